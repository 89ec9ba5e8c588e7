"""Scalar twins of `moe_numerics.reference.exact_math`: the same IEEE operations in the same order.

Arguments and results are `Float32` values inside a kernel. Nothing here is approximate but the seed of the
reciprocal on sm_90, whose corrected result equals `rcp.rn` (see `reciprocal`).
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Float32, Uint32
from moe_numerics.fused.memory import select
from moe_numerics.reference.exact_math import (
    EXPONENT_BIAS,
    HALF_EXPM1_COEFFICIENTS,
    LN_2,
    LOG2_E,
    MAGIC,
    MILLS_COEFFICIENTS,
    MILLS_SLOPE,
    NORMAL_MAX,
    SCALE,
    SCALE_EXPONENT,
    SHORT_EXP_COEFFICIENTS,
    SIGMOID_EXPONENT_MAX,
    SIGMOID_EXPONENT_MIN,
    TANH_IDENTITY,
    TANH_MAX,
)

__all__ = [
    "NormalTail",
    "SigmoidPair",
    "SigmoidTerms",
    "TanhTerms",
    "clamp",
    "fma",
    "maximum",
    "minimum",
    "normal_cdf",
    "normal_tail",
    "reciprocal",
    "sigmoid",
    "sigmoid_pair",
    "sigmoid_terms",
    "tanh",
    "tanh_terms",
]


def fma(a: Float32, b: Float32 | float, c: Float32 | float) -> Float32:
    """`a * b + c` rounded once (`fma.rn.f32`)."""
    return cute.math.fma(a, Float32(b), Float32(c))


def minimum(a: Float32, b: Float32 | float) -> Float32:
    """The smaller one; NaN propagates."""
    return cute.arch.fmin(a, Float32(b), nan=True)


def maximum(a: Float32, b: Float32 | float) -> Float32:
    """The larger one, +0 of two zeros; NaN propagates."""
    return cute.arch.fmax(a, Float32(b), nan=True)


def clamp(x: Float32, low: float, high: float) -> Float32:
    """`min(max(x, low), high)`; NaN propagates."""
    return minimum(maximum(x, low), high)


def absolute(x: Float32) -> Float32:
    return cute.math.absf(x)


def copysign(magnitude: Float32, sign: Float32) -> Float32:
    """`magnitude`, which is not negative, with the sign bit of `sign`."""
    bits = magnitude.bitcast(Uint32) | (sign.bitcast(Uint32) & Uint32(0x80000000))
    return bits.bitcast(Float32)


def reciprocal(d: Float32, target: str) -> Float32:
    """Correctly rounded `1 / d` for d in [2^-126, 2^126].

    On sm_90 one Newton step in FMAs corrects the approximate seed: `rcp.rn` for every one of the 2,113,929,218
    float32 values of that range on an H200, and without its branch. No such sweep exists for sm_100, so there it is
    `rcp.rn`.
    """
    if target.startswith("sm_90"):
        seed = cute.arch.rcp_approx(d)
        return fma(seed, fma(-d, seed, 1.0), seed)
    return Float32(1.0) / d


def _power_of_two(shifted: Float32) -> Float32:
    """2^(k + bias - 127) from `fma(y, log2(e), MAGIC + bias)`, whose low bits hold k + bias."""
    return (shifted.bitcast(Uint32) << 23).bitcast(Float32)


def _polynomial(x: Float32, coefficients: tuple[float, ...]) -> Float32:
    """Horner's scheme in FMAs, highest power first."""
    value = fma(x, coefficients[0], coefficients[1])
    for coefficient in coefficients[2:]:
        value = fma(value, x, coefficient)
    return value


class SigmoidTerms(NamedTuple):
    """Twin of `moe_numerics.reference.exact_math.SigmoidTerms`."""

    value: Float32
    complement: Float32
    clamped: Float32


class SigmoidPair(NamedTuple):
    """Twin of `moe_numerics.reference.exact_math.SigmoidPair`."""

    value: Float32
    complement: Float32


def _sigmoid_parts(y: Float32, target: str) -> tuple[Float32, Float32, Float32]:
    bias = EXPONENT_BIAS - SCALE_EXPONENT
    shifted = fma(y, LOG2_E, MAGIC + bias)
    k = shifted - Float32(MAGIC + bias)
    power = _polynomial(fma(k, -LN_2, y), (*SHORT_EXP_COEFFICIENTS, 1.0))
    scale = _power_of_two(shifted)
    return power, scale, reciprocal(fma(power, scale, SCALE), target)


def sigmoid(x: Float32, target: str) -> Float32:
    """1 / (1 + exp(-x))."""
    _, _, scaled = _sigmoid_parts(clamp(-x, SIGMOID_EXPONENT_MIN, SIGMOID_EXPONENT_MAX), target)
    return scaled * Float32(SCALE)


def sigmoid_terms(x: Float32, target: str) -> SigmoidTerms:
    """sigmoid(x), 1 - sigmoid(x) and the clamped x."""
    y = clamp(-x, SIGMOID_EXPONENT_MIN, SIGMOID_EXPONENT_MAX)
    power, scale, scaled = _sigmoid_parts(y, target)
    return SigmoidTerms(scaled * Float32(SCALE), (power * scale) * scaled, -y)


def sigmoid_pair(x: Float32, target: str) -> SigmoidPair:
    """sigmoid(x) and sigmoid(-x), from the smaller of the two."""
    _, _, scaled = _sigmoid_parts(minimum(absolute(x), SIGMOID_EXPONENT_MAX), target)
    smaller = scaled * Float32(SCALE)
    larger = Float32(1.0) - smaller
    positive = x > Float32(0.0)
    return SigmoidPair(select(positive, larger, smaller), select(positive, smaller, larger))


class TanhTerms(NamedTuple):
    """Twin of `moe_numerics.reference.exact_math.TanhTerms`."""

    value: Float32
    derivative: Float32


def _tanh_parts(magnitude: Float32, target: str) -> tuple[Float32, Float32]:
    bias = EXPONENT_BIAS - SCALE_EXPONENT
    shifted = fma(magnitude, 2 * LOG2_E, MAGIC + bias)
    k = shifted - Float32(MAGIC + bias)
    reduced = fma(k, -0.5 * LN_2, magnitude)
    power = _polynomial(reduced, HALF_EXPM1_COEFFICIENTS)
    half_expm1 = fma(power * reduced, reduced, reduced)
    scale = _power_of_two(shifted)
    scaled = fma(scale, half_expm1, fma(scale, 0.5, -0.5 * SCALE))
    return scaled, reciprocal(scaled + Float32(SCALE), target)


def _tanh_value(x: Float32, magnitude: Float32, product: Float32) -> Float32:
    small: Boolean = magnitude < Float32(TANH_IDENTITY)
    return copysign(select(small, magnitude, product), x)


def tanh(x: Float32, target: str) -> Float32:
    """tanh(x), without cancellation near 0."""
    magnitude = minimum(absolute(x), TANH_MAX)
    scaled, inverse = _tanh_parts(magnitude, target)
    return _tanh_value(x, magnitude, scaled * inverse)


def tanh_terms(x: Float32, target: str) -> TanhTerms:
    """tanh(x) and its derivative."""
    magnitude = minimum(absolute(x), TANH_MAX)
    scaled, inverse = _tanh_parts(magnitude, target)
    value = _tanh_value(x, magnitude, scaled * inverse)
    exponential = fma(scaled, 2.0, SCALE)
    return TanhTerms(value, ((exponential * inverse) * inverse) * Float32(SCALE))


class NormalTail(NamedTuple):
    """Twin of `moe_numerics.reference.exact_math.NormalTail`."""

    magnitude: Float32
    exponential: Float32
    mills: Float32


def normal_tail(x: Float32, target: str) -> NormalTail:
    """The parts from which `normal_cdf` and the derivative of x * normal_cdf(x) are made."""
    magnitude = minimum(absolute(x), NORMAL_MAX)
    square = magnitude * magnitude
    square_error = fma(magnitude, magnitude, -square)
    bias = EXPONENT_BIAS + SCALE_EXPONENT
    shifted = fma(square, -0.5 * LOG2_E, MAGIC + bias)
    k = shifted - Float32(MAGIC + bias)
    reduced = fma(k, -2.0 * LN_2, -square) - square_error
    highest = len(SHORT_EXP_COEFFICIENTS)
    halved = tuple(c * 2.0 ** (i - highest) for i, c in enumerate(SHORT_EXP_COEFFICIENTS))
    exponential = _polynomial(reduced, (*halved, 1.0)) * _power_of_two(shifted)
    t = reciprocal(fma(magnitude, MILLS_SLOPE, 1.0), target)
    mills = _polynomial(t, tuple(c * SCALE for c in MILLS_COEFFICIENTS))
    return NormalTail(magnitude, exponential, mills)


def normal_cdf(x: Float32, target: str) -> Float32:
    """The standard normal distribution function."""
    _, exponential, mills = normal_tail(x, target)
    tail = exponential * mills
    return select(x > Float32(0.0), Float32(1.0) - tail, tail)
