"""E2M1 codes in registers, by additions and integer arithmetic: sm_90 has no conversion to E2M1.

To nearest even, a code is the least of three roundings to whole numbers and of 7: with m the magnitude,

    code = min(r(2 m), r(m) + 2, r(m / 2) + 4, 7)

since E2M1 has steps of 1/2 below 2, of 1 below 4 and of 2 above, and r(2 m) <= r(m) + 2 exactly where m is below 2, and
so on. Adding 1.5 * 2^22, 1.5 * 2^23 and 1.5 * 2^24, whose spacings are these steps, rounds so, and leaves the whole
number in the lowest bits. Magnitudes past the range, Inf and NaN give more than 7 in each of the three.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import cutlass.cute as cute
from cutlass import Boolean, Float32, Uint32
from moe_numerics.fused.memory import pure_ptx, select
from moe_numerics.reference.formats import E2M1

__all__ = ["WORD", "decode", "encode_stochastic", "encode_word"]

WORD = 8
"""Codes of a 32-bit word, the first one in the lowest nibble."""

_ONES = 1.5 * 2.0**23
_ONES_BITS = 0x4B400000
_BINADE = 1 << 23


def _least(a: Uint32, b: Uint32) -> Uint32:
    return pure_ptx("min.u32 $0, $1, $2;", "=r,r,r", a, b)


def _base(factor: float) -> int:
    """The bits of 1.5 * 2^23 / factor."""
    return _ONES_BITS - int(math.log2(factor)) * _BINADE


def _steps(value: Float32, factor: float) -> Uint32:
    """The code of |value| * factor above `_base(factor)`; 7 for NaN."""
    magnitude = cute.math.absf(value)
    by_halves = (magnitude + Float32(_ONES / 2 / factor)).bitcast(Uint32) + Uint32(_BINADE)
    by_ones = (magnitude + Float32((_ONES + 2) / factor)).bitcast(Uint32)
    by_twos = (magnitude + Float32((2 * _ONES + 8) / factor)).bitcast(Uint32) - Uint32(_BINADE)
    return _least(_least(_least(by_halves, by_ones), by_twos), Uint32(_base(factor) + 7))


def _signs(values: Sequence[Float32]) -> Uint32:
    """The sign bits of eight values, each in the highest bit of its nibble; other bits hold anything."""
    word = Uint32(0)
    for value in reversed(values):
        word = pure_ptx("shf.l.wrap.b32 $0, $1, $2, 4;", "=r,f,r", value, word)
    return word


def encode_word(values: Sequence[Float32], factor: float = 1.0) -> Uint32:
    """Codes of eight values times a power of two, to nearest even, saturating.

    NaN gives 7, as its sign is that of a computed NaN, +.
    """
    word = Uint32(0)
    for value in reversed(values):
        word = word * Uint32(16) + _steps(value, factor)
    constant = sum(_base(factor) << (4 * place) for place in range(WORD))
    return (word - Uint32(constant & 0xFFFFFFFF)) | (_signs(values) & Uint32(0x88888888))


def encode_stochastic(value: Float32, random_bits: Uint32, width: int) -> Uint32:
    """Code rounded up where floor(fraction of a step * 2^width) + random bits reach 2^width; saturating, 7 for NaN."""
    magnitude = cute.arch.fmin(cute.math.absf(value), Float32(E2M1.max_value))
    two: Boolean = magnitude >= Float32(2.0)
    four: Boolean = magnitude >= Float32(4.0)
    steps = magnitude * select(four, Float32(0.5), select(two, Float32(1.0), Float32(2.0)))
    whole = pure_ptx("cvt.rzi.u32.f32 $0, $1;", "=r,f", steps)
    fraction = steps - whole.to(Float32)
    threshold = pure_ptx("cvt.rzi.u32.f32 $0, $1;", "=r,f", fraction * Float32(2.0**width))
    total = threshold + random_bits
    carry = select(total < threshold, Uint32(1), Uint32(0)) if width == 32 else (total >> width)
    offset = select(four, Uint32(4), select(two, Uint32(2), Uint32(0)))
    return (whole + carry + offset) | ((value.bitcast(Uint32) >> 28) & Uint32(8))


def decode(code: Uint32) -> Float32:
    """Value of a code in the low four bits of a word, whose other bits may hold anything."""
    # As the upper bits of a float32 the magnitude is the value times 2^-126, subnormal for code 1.
    magnitude = ((code & Uint32(7)) << 22).bitcast(Float32) * Float32(2.0**126)
    return (magnitude.bitcast(Uint32) | ((code & Uint32(8)) << 28)).bitcast(Float32)
