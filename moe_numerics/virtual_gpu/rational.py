"""Float64 results of exact rational values, rounded in any direction of IEEE 754-2019 (4.3)."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

_LEAST = -1074
_PRECISION = 53


def _away(negative: bool, quotient: int, twice: int, whole: int, mode: str) -> bool:
    """Whether a magnitude between two neighbours takes the larger: `twice` is double the rest, of `whole`."""
    if mode == "rn":
        return twice > whole or (twice == whole and bool(quotient & 1))
    return mode == ("rm" if negative else "rp")


def rounded(exact: Fraction, mode: str, negative_zero: bool = False) -> float:
    """`exact` as a float64. mode: rn, rz, rm or rp.

    negative_zero: the sign of an exact zero. Past the largest number a result is that or an infinity, as `mode` says.
    """
    if exact == 0:
        return -0.0 if negative_zero else 0.0
    negative, n, d = exact < 0, abs(exact.numerator), exact.denominator
    top = n.bit_length() - d.bit_length()
    # 2^(top - 1) < n / d < 2^(top + 1)
    if n << max(-top, 0) < d << max(top, 0):
        top -= 1
    exponent = max(top - _PRECISION + 1, _LEAST)
    whole = d << max(exponent, 0)
    quotient, rest = divmod(n << max(-exponent, 0), whole)
    if rest and _away(negative, quotient, 2 * rest, whole, mode):
        quotient += 1
    try:
        magnitude = math.ldexp(quotient, exponent)
    except OverflowError:
        infinite = mode == "rn" or mode == ("rm" if negative else "rp")
        magnitude = math.inf if infinite else math.nextafter(math.inf, 0.0)
    return -magnitude if negative else magnitude


def root(x: float, mode: str) -> float:
    """The square root of a positive finite float64."""
    n, exponent = (int(v) for v in (x.as_integer_ratio()[0], -(x.as_integer_ratio()[1].bit_length() - 1)))
    # At least 120 bits, so that the root has more than float64 and one bit for "not exact".
    shift = max(0, 120 - n.bit_length())
    shift += (exponent - shift) & 1
    n, exponent = n << shift, exponent - shift
    whole = math.isqrt(n)
    exact = Fraction(2 * whole + (whole * whole != n), 2)
    return rounded(exact * Fraction(2) ** (exponent // 2), mode)


def each(function: Callable[..., float], nearest: F64, safe: npt.NDArray[np.bool_], *operands: Any) -> F64:
    """`nearest`, and where `safe` holds `function` of the operands, element by element: right, and slow."""
    out = np.array(nearest, np.float64, copy=True)
    at = np.flatnonzero(safe)
    spread = [np.broadcast_to(v, out.shape)[at].tolist() for v in operands]
    out[at] = [function(*v) for v in zip(*spread, strict=True)]
    return out
