"""Scalar mirrors of `moe_numerics.reference.exact_math`: the same IEEE operations in the same order.

Arguments and results are `Float32` values inside a kernel. Nothing here is approximate except the seed of the
reciprocal on sm_90, whose corrected result was swept on an H200 (see `reciprocal`).
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Uint32


__all__ = ["clamp", "fma", "reciprocal", "sigmoid_parts"]


def fma(a: Float32, b: Float32, c: Float32) -> Float32:
    """`a * b + c` rounded once (`fma.rn.f32`)."""
    return cute.math.fma(a, b, c)


def clamp(x: Float32, low: float, high: float) -> Float32:
    """`min(max(x, low), high)`; NaN propagates."""
    return cute.arch.fmin(cute.arch.fmax(x, Float32(low), nan=True), Float32(high), nan=True)


def reciprocal(d: Float32, target: str) -> Float32:
    """Correctly rounded `1 / d` for d in [2^-126, 2^126].

    On sm_90 one Newton step in FMAs corrects the approximate seed: `rcp.rn` for every one of the 2,113,929,218
    float32 values of that range on an H200, and without its branch. No such sweep exists for sm_100, so there it is
    `rcp.rn`.
    """
    if target.startswith("sm_90"):
        seed = cute.arch.rcp_approx(d)
        return fma(seed, fma(-d, seed, Float32(1.0)), seed)
    return Float32(1.0) / d


@dataclass(frozen=True)
class SigmoidParts:
    """Pieces of the sigmoid that a derivative needs as well."""

    sigmoid: Float32
    complement: Float32
    """1 - sigmoid, without cancellation."""
    negated: Float32
    """-x, clamped to where the pieces are accurate."""


def sigmoid_parts(x: Float32, target: str) -> SigmoidParts:
    """Twin of `moe_numerics.reference.exact_math.sigmoid_parts`."""
    negated = clamp(-x, -30.0, 104.0)
    magic = Float32(12582912.0 - 32.0)
    shifted = fma(negated, Float32(1.4426950408889634), magic)
    whole = shifted - magic
    rest = fma(whole, Float32(-0.693359375), negated)
    rest = fma(whole, Float32(2.12194440e-4), rest)
    polynomial = Float32(1 / 720)
    for c in (1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
        polynomial = fma(polynomial, rest, Float32(c))
    exponential = (polynomial.bitcast(Uint32) + (shifted.bitcast(Uint32) << 23)).bitcast(Float32)
    quotient = reciprocal(exponential + Float32(2.0**-32), target)
    return SigmoidParts(quotient * Float32(2.0**-32), exponential * quotient, negated)
