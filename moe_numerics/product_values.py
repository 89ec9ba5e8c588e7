"""Kinds of values for the factors of matrix products: what the accumulation of a tensor core is sensitive to.

Like the kinds of `values`, functions of (seed, tensor, expert, row, column) in integers. `Places.column` is the place
in the sum of `x @ W^T`; only `identity` depends on which of both axes is summed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from moe_numerics import values
from moe_numerics.values import KINDS, MANTISSA_BITS, NAN, PLAIN, Bits, Places, Words, below

__all__ = ["FACTOR_KINDS", "MILD_FACTOR_KINDS", "PRODUCT_KINDS", "PRODUCT_NOT_FINITE"]

_SIDE = np.uint64(32)


def _bits_of(exponents: Words, words: Words, places: Places) -> Bits:
    """Numbers of given biased exponents with random signs and the dtype's mantissa bits, as float32 bits."""
    stored = MANTISSA_BITS[places.dtype]
    mantissas = ((words >> np.uint64(8)).astype(np.uint32) & np.uint32((1 << stored) - 1)) << np.uint32(23 - stored)
    signs = (words & np.uint64(1)).astype(np.uint32) << np.uint32(31)
    return signs | (exponents.astype(np.uint32) << np.uint32(23)) | mantissas


def _identity(places: Places) -> Bits:
    """1.0 at column (row + row // 32) % 32 and 0 elsewhere: a product with it gives the other factor's elements."""
    chosen = (places.row + places.row // _SIDE) % _SIDE == places.column
    return np.broadcast_to(np.where(chosen, PLAIN, np.uint32(0)), places.shape)


def _spread(places: Places) -> Bits:
    words = places.words("spread")
    return _bits_of(np.uint64(115) + below(words, 25), words, places)


def _cancelling(places: Places) -> Bits:
    """Pairs of neighbours in both axes hold one number, negated where row and column are odd.

    So the products of a pair cancel in every other sum, in whichever axis; one number in eight is a step larger, and
    leaves a rest far below the largest term.
    """
    two = np.uint64(2)
    pairs = replace(places, row=places.row // two, column=places.column // two)
    shared = pairs.words("cancelling")
    bits = _bits_of(np.uint64(119) + below(shared, 17), shared, places)
    odd = (places.row & places.column & np.uint64(1)).astype(np.uint32) << np.uint32(31)
    rest = np.where(below(places.words("rest"), 8) == 0, places.step, np.uint32(0))
    return (bits + rest) ^ odd


def _rare_specials(places: Places) -> Bits:
    """Gaussian, one element in 2048 NaN or infinite: few enough that most sums are finite."""
    words = places.words("rare specials")
    infinity = values.INFINITY
    special = np.array([NAN, infinity, infinity | np.uint32(0x80000000), infinity])[words & np.uint64(3)]
    return np.where(below(words, 2048) == 0, special, KINDS["gaussian"](places))


_MIXED: tuple[Callable[[Places], Bits], ...] = (
    KINDS["gaussian"],
    _spread,
    _cancelling,
    _rare_specials,
    KINDS["wide"],
    KINDS["subnormal"],
    KINDS["constant"],
    KINDS["zeros"],
    KINDS["kinks"],
    KINDS["ties_e4m3"],
)


def _products(places: Places) -> Bits:
    choice = np.broadcast_to(below(places.tiles("products"), len(_MIXED)), places.shape)
    expert, row, column = (np.broadcast_to(a, places.shape) for a in (places.expert, places.row, places.column))
    result = np.empty(places.shape, dtype=np.uint32)
    for index, kind in enumerate(_MIXED):
        here = choice == np.uint64(index)
        if here.any():
            result[here] = kind(replace(places, expert=expert[here], row=row[here], column=column[here]))
    return result


PRODUCT_KINDS: dict[str, Callable[[Places], Bits]] = {
    "identity": _identity,
    "spread": _spread,
    "cancelling": _cancelling,
    "rare_specials": _rare_specials,
    "products": _products,
}
"""Kinds of factors besides those of `values.KINDS`.

identity: hands the other factor on, so that every value reaches the epilogue as it is. spread: exponents from -12 to
12, so that most terms of a sum are truncated. cancelling: sums of pairs that cancel, but for a rest. rare_specials:
gaussian with a NaN or infinity in 2048. products: another kind in every 32x32 tile.
"""

PRODUCT_NOT_FINITE = ("rare_specials", "products")
"""Those that hold NaN or infinities."""

FACTOR_KINDS = (
    "plain", "gaussian", "spread", "cancelling", "identity", "products", "kinks", "ties_e4m3", "scale_edges",
    "subnormal", "wide", "rare_specials", "outliers", "log_uniform", "products", "spread",
)  # fmt: skip
"""Kinds that factors are drawn from, as often as they are drawn, simplest first."""

MILD_FACTOR_KINDS = (
    "plain",
    "gaussian",
    "spread",
    "cancelling",
    "identity",
    "outliers",
    "constant",
    "wide",
    "gaussian",
)
"""Those far from the ends of the range."""
