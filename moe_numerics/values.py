"""Kinds of tensor values, as integer functions of (seed, tensor, expert, row in the expert, column).

An element's bits depend on nothing else: not on how many tokens its expert or another one has, not on the
hidden size, not on the column layout, and not on the machine or on any library's random generator. So a case
that loses tokens or columns while it shrinks keeps the values of those that stay.

Words come from a hash of that place (`places`); Gaussians are sums of twelve uniform integers, so no libm takes part.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moe_numerics.places import (
    MANTISSA_BITS,
    Bits,
    Floats,
    Places,
    Words,
    below,
    float_bits,
    key,
    mix,
    mix_one,
    powers_of_two,
    sign_bits,
)
from moe_numerics.ties import gate_of_ties, nvfp4_near_ties, nvfp4_ties, ties_e2m1, ties_e4m3

__all__ = [
    "INFINITY",
    "KINDS",
    "MANTISSA_BITS",
    "NAN",
    "NOT_FINITE",
    "PLAIN",
    "PROB_KINDS",
    "Places",
    "below",
    "key",
    "mix",
    "mix_one",
    "scaled",
    "to_dtype",
]

PLAIN = np.uint32(0x3F800000)
NAN = np.uint32(0x7FC00000)
INFINITY = np.uint32(0x7F800000)
_SIGN = np.uint32(0x80000000)


def _mantissas(places: Places, words: Words) -> Bits:
    """The dtype's mantissa bits, at random, where float32 has them."""
    bits = MANTISSA_BITS[places.dtype]
    return ((words >> np.uint64(8)).astype(np.uint32) & np.uint32((1 << bits) - 1)) << np.uint32(23 - bits)


def _plain(places: Places) -> Bits:
    return np.full(places.shape, PLAIN)


def _gaussian_values(places: Places) -> Floats:
    total = np.zeros(places.shape, dtype=np.uint64)
    for stream in ("gaussian 0", "gaussian 1", "gaussian 2"):
        words = places.words(stream)
        for shift in (0, 16, 32, 48):
            total += (words >> np.uint64(shift)) & np.uint64(0xFFFF)
    # Twelve uniform 16-bit integers have the mean 6 * 65535 and the standard deviation 65536.
    return (2.0 * total - 12 * 65535) / (1 << 17)


def _gaussian(places: Places) -> Bits:
    return float_bits(_gaussian_values(places))


def _outliers(places: Places) -> Bits:
    words = places.columns("outlier channels")
    exponents = np.where(below(words, 16) == 0, 4 + (words & np.uint64(3)), 0).astype(np.int64)
    return float_bits(_gaussian_values(places) * powers_of_two(exponents))


def _wide(places: Places) -> Bits:
    words = places.words("wide")
    return float_bits(below(words, 1 << 32).astype(np.float64) / (1 << 24) - 128.0)


def _log_uniform(places: Places) -> Bits:
    words = places.words("log uniform")
    return sign_bits(words) | (below(words, 255).astype(np.uint32) << np.uint32(23)) | _mantissas(places, words)


def _subnormal(places: Places) -> Bits:
    words = places.words("subnormal")
    field = np.where(words & np.uint64(6), 0, below(words, 16)).astype(np.uint32)
    bits = sign_bits(words) | (field << np.uint32(23)) | _mantissas(places, words)
    if places.parts == 2 and places.part == 0:
        # Two subnormal factors give 0; an ordinary gate makes the product subnormal.
        return np.where(places.tiles("ordinary gate") & np.uint64(3), _gaussian(places), bits)
    return bits


def _saturating(places: Places) -> Bits:
    words, tiles = places.words("saturating"), places.tiles("saturating")
    signs, mantissas = sign_bits(words), _mantissas(places, words)
    top = signs | ((250 + below(words, 5)).astype(np.uint32) << np.uint32(23)) | mantissas
    # A block amax between 1.75 and 2 times a power of two is past 448 in units of a rounded-down scale.
    field = (97 + below(tiles, 60)).astype(np.uint32) << np.uint32(23)
    past = signs | field | np.uint32(0x600000) | mantissas
    top = np.where(words & np.uint64(6), top, signs | np.uint32(0x7F7F0000))
    return np.where(tiles & np.uint64(1), past, top)


def _constant(places: Places) -> Bits:
    tiles = places.tiles("constant")
    field = (110 + below(tiles, 30)).astype(np.uint32) << np.uint32(23)
    drawn = sign_bits(tiles) | field | _mantissas(places, tiles)
    noted = float_bits(np.array([448.0, 256.0, 6.0, 5.0, 7.0, 1.0, 0.25, -1.0]))[below(tiles, 8)]
    return np.broadcast_to(np.where(tiles & np.uint64(6), drawn, noted), places.shape)


def _zeros(places: Places) -> Bits:
    tiles = places.tiles("zeros")
    mixed = sign_bits(places.words("zeros"))
    return np.where(tiles & np.uint64(2), mixed, sign_bits(tiles))


def _specials(places: Places) -> Bits:
    words = places.words("specials")
    special = np.array([NAN, INFINITY, INFINITY | _SIGN, NAN | _SIGN])[words & np.uint64(3)]
    return np.where(below(words, 128) == 0, special, _gaussian(places))


def _random_bits(places: Places) -> Bits:
    mask = np.uint64(0xFFFFFFFF & ~(int(places.step) - 1))
    return ((places.words("random bits") >> np.uint64(16)) & mask).astype(np.uint32)


_KINKS = np.array([0.0, 1.0, 7.0, 2.0**-126, 0.5, 30.0, 104.0, 88.0])


def _kinks(places: Places) -> Bits:
    words = places.words("kinks")
    bits = float_bits(_KINKS)[below(words, len(_KINKS))] | sign_bits(words)
    nudge = (words >> np.uint64(1)) & np.uint64(3)
    up = np.where(nudge == 1, bits + places.step, bits)
    return np.where((nudge == 2) & (bits & ~_SIGN != 0), up - places.step, up)


def _scale_edges(places: Places) -> Bits:
    if places.parts == 2 and places.part == 0:
        return gate_of_ties(places)
    tiles, words = places.tiles("scale edges"), places.words("scale edges")
    # E8M0 from code 0 and below to the largest amax that a bfloat16 has; a gate of 32 is taken out again.
    ends = np.array([-130, -128, -127, -126, 118, 119])[below(tiles, 6)]
    exponents = np.where(tiles & np.uint64(6), below(tiles, 248).astype(np.int64) - 128, ends)
    unit = powers_of_two(exponents - (5 if places.parts == 2 else 0))
    top = np.array([448.0, 256.0, 510.0, 480.0])[(tiles >> np.uint64(3)) & np.uint64(3)] * unit
    amax = float_bits(top)
    nudge = (tiles >> np.uint64(5)) & np.uint64(3)
    amax = np.where(nudge == 1, amax + places.step, np.where(nudge == 2, amax - places.step, amax))
    size = np.uint64(32)
    diagonal = places.row % size == places.column % size
    rest = float_bits(top * below(words, 1 << 20).astype(np.float64) / (1 << 21))
    return np.where(diagonal, np.minimum(amax, np.uint32(0x7F7F0000)), rest) | sign_bits(words)


_SINGLE: dict[str, Callable[[Places], Bits]] = {
    "plain": _plain,
    "gaussian": _gaussian,
    "zeros": _zeros,
    "constant": _constant,
    "outliers": _outliers,
    "wide": _wide,
    "kinks": _kinks,
    "ties_e4m3": ties_e4m3,
    "ties_e2m1": ties_e2m1,
    "nvfp4_ties": nvfp4_ties,
    "nvfp4_near_ties": nvfp4_near_ties,
    "scale_edges": _scale_edges,
    "subnormal": _subnormal,
    "saturating": _saturating,
    "log_uniform": _log_uniform,
    "specials": _specials,
    "random_bits": _random_bits,
}

NOT_FINITE = ("specials", "random_bits", "mixed")
"""Kinds that hold NaN or infinities."""


def _mixture(names: tuple[str, ...]) -> Callable[[Places], Bits]:
    def fill(places: Places) -> Bits:
        shape = places.shape
        choice = np.broadcast_to(below(places.tiles("mixed", shared=True), len(names)), shape)
        expert, row, column = (np.broadcast_to(a, shape) for a in (places.expert, places.row, places.column))
        result = np.empty(shape, dtype=np.uint32)
        for index, name in enumerate(names):
            here = choice == np.uint64(index)
            if here.any():
                chosen = replace(places, expert=expert[here], row=row[here], column=column[here])
                result[here] = _SINGLE[name](chosen)
        return result

    return fill


KINDS: dict[str, Callable[[Places], Bits]] = {
    **_SINGLE,
    "mixed_finite": _mixture(tuple(name for name in _SINGLE if name not in ("plain", *NOT_FINITE))),
    "mixed": _mixture(tuple(name for name in _SINGLE if name != "plain")),
}
"""Kinds of the values of bfloat16 and float32 tensors, simplest first.

plain: 1.0. gaussian: standard deviation 1, at most 6. zeros: +0 and -0. constant: one value a 32x32
tile. outliers: gaussian with one column in 16 times 16 to 128. wide: uniform in [-128, 128). kinks:
limits, zeros and range ends of activations, and their neighbours. ties_e4m3, ties_e2m1: midpoints
between neighbouring codes in units of an exact block scale, and their neighbours. nvfp4_ties,
nvfp4_near_ties: a tensor amax under which the elements and block scales of NVFP4, before and after
rotation, lie on ties, or where only the rounding of the scale arithmetic decides. scale_edges: block
amaxes at and beside the E8M0 steps. subnormal: subnormal and tiny. saturating: near the largest finite
number, or past the largest code under a scale rounded down. log_uniform: every exponent as often.
specials: gaussian with NaN and infinities in one element of 128. random_bits: every bit pattern as
often. mixed, mixed_finite: another kind in every 32x32 tile.
"""


def _ones(places: Places) -> Bits:
    return np.full(places.shape, PLAIN)


def _powers(places: Places) -> Bits:
    return float_bits(powers_of_two(-below(places.words("powers"), 25).astype(np.int64)))


def _router(places: Places) -> Bits:
    words = places.words("router")
    uniform = float_bits((below(words, 1 << 24) + np.uint64(1)).astype(np.float64) / (1 << 24))
    kind = words & np.uint64(15)
    special = np.where(kind == 0, np.uint32(0), np.where(kind == 1, PLAIN, _powers(places)))
    return np.where(kind < 4, special, uniform)


PROB_KINDS: dict[str, Callable[[Places], Bits]] = {"ones": _ones, "powers_of_two": _powers, "router": _router}
"""Kinds of router probabilities, simplest first.

router: uniform in (0, 1], and in one of four tokens exactly 0, 1 or a power of two.
"""


def scaled(bits: Bits, exponent: int) -> Bits:
    """Float32 bits of the values times 2**exponent: nearest even, finite ones saturate, NaN and Inf stay."""
    if exponent == 0:
        return bits
    finite = bits & ~_SIGN < INFINITY
    values = np.where(finite, bits, np.uint32(0)).view(np.float32).astype(np.float64)
    limit = float(np.finfo(np.float32).max)
    return np.where(finite, float_bits(np.clip(values * math.ldexp(1.0, exponent), -limit, limit)), bits)


def to_dtype(bits: Bits, dtype: str) -> NDArray[np.uint16] | NDArray[np.uint32]:
    """Bits in `dtype` of float32 bits, rounded to nearest even; finite values saturate, NaN bits stay."""
    if dtype == "float32":
        return bits
    # What already is a bfloat16, NaN included, has a zero lower half and passes unchanged.
    even = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + even) >> np.uint32(16)
    overflow = (bits & ~_SIGN < INFINITY) & (rounded & np.uint32(0x7FFF) >= np.uint32(0x7F80))
    largest = (bits >> np.uint32(16)) & np.uint32(0x8000) | np.uint32(0x7F7F)
    return np.where(overflow, largest, rounded).astype(np.uint16)
