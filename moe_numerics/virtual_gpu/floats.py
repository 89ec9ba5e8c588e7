"""IEEE arithmetic of PTX on NumPy arrays: rounding modes, fused multiply-add, flushing, canonical NaN.

Every function takes and gives arrays; `mode` is the PTX rounding modifier without its dot (rn, rz, rm, rp).
Sources: PTX ISA 9.7.3 (Floating Point Instructions); IEEE 754-2019. Rounding through float64 is exact here
because float64 results are first rounded to odd (Boldo and Melquiond, Emulation of FMA and correctly rounded
sums, 2008).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
U32 = npt.NDArray[np.uint32]

_TINY = np.float32(2.0**-126)


def canonical(x: F32) -> F32:
    """`x` with every NaN replaced by 0x7fffffff, the NaN that the hardware's float32 operations produce."""
    # min.reduce propagates a NaN, so that the common case costs one pass and no temporary.
    if x.size and np.isnan(np.minimum.reduce(x, axis=None)):
        fixed: F32 = np.array(x, copy=True)
        bits: U32 = fixed.view(np.uint32)
        bits[np.isnan(fixed)] = np.uint32(0x7FFFFFFF)
        return fixed
    return x


def flush(x: F32) -> F32:
    """`x` with subnormal values replaced by zeros of the same sign (`.ftz`)."""
    small = np.abs(x) < _TINY
    if small.any():
        return np.where(small, np.copysign(np.float32(0), x), x)
    return x


def flush_exact(r: F32, exact: F64, mode: str) -> F32:
    """`r`, the rounded `exact`, flushed: a result is tiny if it were below 2^-126 with exponents without end.

    So what only rounding lifts to 2^-126 is flushed too (measured on an H200).
    """
    edge = np.abs(r) == _TINY
    if edge.any():
        where = np.flatnonzero(edge)
        wide = narrow32(np.broadcast_to(exact, r.shape)[where] * 2.0**32, mode)
        r = np.array(r, copy=True)
        r[where] = np.where(np.abs(wide) < _TINY * np.float32(2.0**32), np.copysign(np.float32(0), r[where]), r[where])
    return flush(r)


def saturate(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """`x` clamped to [0, 1]; NaN becomes +0 (`.sat`)."""
    return np.where(x > 0, np.minimum(x, x.dtype.type(1)), x.dtype.type(0))


def odd(total: F64, residue: F64) -> F64:
    """total + residue rounded to odd in float64, where `residue` is the exact error of the rounded `total`."""
    bits = total.view(np.int64)
    inexact = (residue != 0) & np.isfinite(total) & np.isfinite(residue) & ((bits & 1) == 0)
    if not inexact.any():
        return total
    # An even total is replaced by its odd neighbour on the side where the exact value lies.
    towards = np.where((residue > 0) == (total > 0), np.int64(1), np.int64(-1))
    zero = total == 0
    step = np.where(zero, np.int64(1), towards)
    moved = bits + np.where(inexact, step, np.int64(0))
    moved = np.where(inexact & zero & (residue < 0), np.int64(-(2**63) + 1), moved)
    return moved.view(np.float64)


def two_sum(a: F64, b: F64) -> tuple[F64, F64]:
    """a + b rounded to nearest and its exact error (Knuth)."""
    s = a + b
    bb = s - a
    return s, (a - (s - bb)) + (b - bb)


def directed64(total: F64, residue: F64, mode: str) -> F64:
    """total + residue rounded to float64 in a direction, where `total` is the sum rounded to nearest."""
    if mode == "rn":
        return total
    below, above = np.nextafter(total, -np.inf), np.nextafter(total, np.inf)
    down = np.where(residue < 0, below, total)
    up = np.where(residue > 0, above, total)
    if mode == "rz":
        return np.where(total > 0, down, up)
    return down if mode == "rm" else up


def narrow32(x: F64, mode: str) -> F32:
    """A float64 that is exact or rounded to odd, rounded to float32."""
    r = x.astype(np.float32)
    if mode == "rn":
        return r
    back = r.astype(np.float64)
    if mode == "rz":
        wrong = np.abs(back) > np.abs(x)
        smaller = r.view(np.uint32).copy()
        smaller[wrong] -= np.uint32(1)
        return smaller.view(np.float32)
    up = mode == "rp"
    wrong = (back < x) if up else (back > x)
    bits = r.view(np.int32).copy()
    # Towards +inf: the magnitude of a positive value grows, that of a negative one shrinks; zeros go to +-tiny.
    positive = bits >= 0
    zero = (bits & 0x7FFFFFFF) == 0
    step = np.where(positive == up, np.int32(1), np.int32(-1))
    bits = bits + np.where(wrong & ~zero, step, np.int32(0))
    tiny = np.int32(1) if up else np.int32(-(2**31) + 1)
    return np.asarray(np.where(wrong & zero, tiny, bits), np.int32).view(np.float32)


def add(a: F32, b: F32, mode: str) -> F32:
    """a + b."""
    if mode == "rn":
        return canonical(a + b)
    s, e = two_sum(a.astype(np.float64), b.astype(np.float64))
    r = narrow32(odd(s, e), mode)
    if mode == "rm":
        # An exact zero sum of unlike signs is -0 when rounding down.
        r = np.where((s == 0) & (e == 0) & (np.signbit(a) | np.signbit(b)), np.float32(-0.0), r)
    return canonical(np.asarray(r, np.float32))


def mul(a: F32, b: F32, mode: str) -> F32:
    """a * b."""
    if mode == "rn":
        return canonical(a * b)
    return canonical(narrow32(a.astype(np.float64) * b, mode))


def fma(a: F32, b: F32, c: F32, mode: str) -> F32:
    """a * b + c, rounded once."""
    product = np.multiply(a, b, dtype=np.float64)
    s: F64 = np.asarray(product + np.asarray(c, np.float64))
    if mode == "rn":
        r = np.asarray(s.astype(np.float32))
        # Rounding twice differs from rounding once only if float64 landed on a float32 tie (also on the
        # finer grid below the normal range, where any inexact sum may sit on a tie).
        risky = (s.view(np.uint64) & np.uint64(0x1FFFFFFF)) == np.uint64(0x10000000)
        low = np.abs(r) < _TINY
        if low.any():
            risky |= low
        if risky.any():
            where = np.flatnonzero(risky)
            p = np.broadcast_to(product, s.shape)[where]
            d = np.broadcast_to(np.asarray(c, np.float64), s.shape)[where]
            r[where] = odd(*two_sum(p, d)).astype(np.float32)
        return canonical(r)
    s, e = two_sum(product, np.asarray(c, np.float64))
    r = narrow32(odd(s, e), mode)
    if mode == "rm":
        unlike = np.signbit(product) | np.signbit(c)
        r = np.asarray(np.where((s == 0) & (e == 0) & unlike, np.float32(-0.0), r), np.float32)
    return canonical(r)


def div(a: F32, b: F32, mode: str) -> F32:
    """a / b. A float64 quotient of float32 operands never rounds across a float32 boundary."""
    if mode == "rn":
        return canonical(a / b)
    return canonical(narrow32(np.divide(a, b, dtype=np.float64), mode))


def sqrt(a: F32, mode: str) -> F32:
    """The square root; NaN below zero, -0 for -0."""
    if mode == "rn":
        return canonical(np.sqrt(a))
    return canonical(narrow32(np.sqrt(a.astype(np.float64)), mode))


def minmax(a: F32, b: F32, largest: bool, propagate: bool, magnitude: bool = False, xorsign: bool = False) -> F32:
    """The smaller or larger operand, -0 below +0 (PTX ISA 9.7.3.11, 9.7.3.12).

    One NaN: the other operand, or the canonical NaN with `.NaN`. Two: the canonical NaN.
    """
    sign = (np.signbit(a) ^ np.signbit(b)) if xorsign else None
    if magnitude or xorsign:
        a, b = np.abs(a), np.abs(b)
    r = np.maximum(a, b) if largest else np.minimum(a, b)
    if not propagate and r.size and np.isnan(np.minimum.reduce(r, axis=None)):
        # NumPy's fmax and fmin keep a signalling NaN; PTX takes the other operand.
        r = np.where(np.isnan(a), b, np.where(np.isnan(b), a, r))
    both_zero = (a == 0) & (b == 0)
    if both_zero.any():
        negative = (np.signbit(a) & np.signbit(b)) if largest else (np.signbit(a) | np.signbit(b))
        r = np.where(both_zero, np.where(negative, np.float32(-0.0), np.float32(0.0)), r)
    if sign is not None:
        r = np.where(sign, -np.abs(r), np.abs(r))
    return canonical(np.asarray(r, np.float32))


def round_integral(x: F32, mode: str) -> F32:
    """`x` rounded to an integral value in the same format (`cvt.rni` and its kin)."""
    table = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
    return table[mode](x)
