"""The functions that activations share, in exact maths or in fast maths, as a kernel's target says.

A target is the architecture that a kernel is compiled for, followed by `.fast` where it may approximate. Then sigmoid
is `rcp.approx(1 + ex2.approx(-x * log2(e)))`; `moe_numerics.fast_errors` bounds what activations make of that.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32
from moe_numerics.fused import exact_math
from moe_numerics.fused.exact_math import SigmoidTerms, clamp
from moe_numerics.reference.exact_math import LOG2_E

__all__ = ["FAST", "FAST_SIGMOID_MAX", "is_fast", "sigmoid", "sigmoid_terms"]

FAST = ".fast"

FAST_SIGMOID_MAX = 87.0
"""Up to this magnitude exp(-x) and its product with sigmoid, 1 - sigmoid, are normal."""


def is_fast(target: str) -> bool:
    """Whether a target names fast maths."""
    return target.endswith(FAST)


def _exponential(x: Float32) -> Float32:
    """exp(-x); `ex2.approx.ftz.f32`."""
    return cute.math.exp2(x * Float32(-LOG2_E), fastmath=True)


def sigmoid(x: Float32, target: str) -> Float32:
    """1 / (1 + exp(-x)); in fast maths 0 where exp(-x) overflows."""
    if not is_fast(target):
        return exact_math.sigmoid(x, target)
    return cute.arch.rcp_approx(_exponential(x) + Float32(1.0))


def sigmoid_terms(x: Float32, target: str) -> SigmoidTerms:
    """sigmoid(x), 1 - sigmoid(x) and the clamped x; in fast maths the complement is exp(-x) * sigmoid(x)."""
    if not is_fast(target):
        return exact_math.sigmoid_terms(x, target)
    clamped = clamp(x, -FAST_SIGMOID_MAX, FAST_SIGMOID_MAX)
    exponential = _exponential(clamped)
    value = cute.arch.rcp_approx(exponential + Float32(1.0))
    return SigmoidTerms(value, exponential * value, clamped)
