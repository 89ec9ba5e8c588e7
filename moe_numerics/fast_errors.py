"""How far activations on a GPU's approximate instructions can be from the true ones: sigmoid and what multiplies it.

The exponential is `ex2.approx.ftz.f32`, with a relative error of up to 2^-22, and the reciprocal `rcp.approx.ftz.f32`,
off by one unit in the last place (PTX ISA 9.7.3), and 1 for 1. An H200 keeps to all three: its results, of which
`virtual_gpu.silicon_tables` holds every one, are within them. Each function gives values and error bounds, float64, for
operands in float64. Of 1 - sigmoid, which derivatives need, two forms are covered: the exponential times sigmoid, and
the difference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_numerics.reference import oracle
from moe_numerics.reference.exact_math import float32
from moe_numerics.reference.unary_activations import (
    GELU_CUBIC,
    GELU_CUBIC_DERIVATIVE,
    GELU_LINEAR,
    GELU_MAX,
    GELU_MIN,
    Gelu,
    QuickGelu,
    Sigmoid,
    Silu,
    UnaryActivation,
)

__all__ = ["EX2_ERROR", "RCP_ERROR", "Bounded", "of_activation"]

UNIT = 2.0**-24
EX2_ERROR = 2.0**-22
"""Largest relative error of `ex2.approx.ftz.f32`."""
RCP_ERROR = 2.0**-23
"""Largest relative error of `rcp.approx.ftz.f32`: one unit in the last place."""
FLUSHED = 2.0**-126

Bounded = Callable[[Tensor], tuple[Tensor, Tensor]]
"""(values, error bounds) of a function."""

# Kernels clamp the argument of a sigmoid whose complement they need, so that exp(-z) and the complement are normal.
_LARGEST = 87.0


@dataclass(frozen=True)
class _Sigmoid:
    """sigmoid(z) and its complement, and how far a kernel's can be off."""

    value: Tensor
    error: Tensor
    complement: Tensor
    complement_error: Tensor


def _sigmoid(z: Tensor, argument_error: Tensor) -> _Sigmoid:
    """rcp(1 + ex2(-z * log2 e)) and its complement; z is off by argument_error already."""
    s, c = oracle.sigmoid(z), oracle.sigmoid(-z)
    # The constant and the product are each rounded; what that moves the exponent by, the exponential is off by.
    exponential = torch.expm1(z.abs() * 2.0 * UNIT + argument_error) + EX2_ERROR
    error = s * (c * exponential + UNIT + RCP_ERROR) + FLUSHED
    product = c * (s * exponential + 2 * UNIT + RCP_ERROR) * (1 + 2.0**-20) + FLUSHED
    # Where 1 + exp(-z) rounds to 1, the difference is 0.
    difference = torch.where(z > 18.0, c, error + UNIT * c)
    return _Sigmoid(s, error, c, torch.maximum(product, difference))


def _scaled(alpha: float, times_x: bool) -> Bounded:
    """x * sigmoid(alpha * x), or sigmoid(x)."""

    def evaluate(x: Tensor) -> tuple[Tensor, Tensor]:
        z = alpha * x
        s = _sigmoid(z, z.abs() * UNIT)
        if not times_x:
            return s.value, s.error
        value = x * s.value
        return value, x.abs() * s.error + value.abs() * UNIT

    return evaluate


def _slope(z: Tensor, argument_error: Tensor, factor: Tensor, factor_error: float) -> tuple[Tensor, Tensor]:
    """sigmoid(z) * (1 + factor * (1 - sigmoid(z))), the factor off by a relative factor_error."""
    s = _sigmoid(z, argument_error)
    term = 1 + factor * s.complement
    term_error = factor.abs() * (s.complement_error + s.complement * factor_error * (1 + 2.0**-20))
    term_error = term_error + UNIT * (term.abs() + term_error)
    value = s.value * term
    error = s.value * term_error + (term.abs() + term_error) * s.error
    return value, error + UNIT * (value.abs() + error)


def _scaled_slope(activation: UnaryActivation, alpha: float) -> Bounded:
    def evaluate(x: Tensor) -> tuple[Tensor, Tensor]:
        z = (alpha * x).clamp(-_LARGEST, _LARGEST)
        rounding = 0.0 if alpha == 1.0 else UNIT
        at_clamp, error = _slope(z, z.abs() * rounding, z, rounding)
        value = oracle.backward(activation, torch.ones_like(x), x)[0]
        return value, error + (at_clamp - value).abs()

    return evaluate


# Square, constants, fma and product round once each: five units cover both polynomials of the tanh form.
_POLYNOMIAL_ERROR = 5 * UNIT


def _gelu_argument(x: Tensor) -> tuple[Tensor, Tensor]:
    """The clamped x, and the argument of its sigmoid."""
    clamped = x.clamp(GELU_MIN, GELU_MAX)
    return clamped, clamped * (float32(GELU_LINEAR) + float32(GELU_CUBIC) * clamped * clamped)


def _gelu(x: Tensor) -> tuple[Tensor, Tensor]:
    _, z = _gelu_argument(x)
    s = _sigmoid(z, z.abs() * _POLYNOMIAL_ERROR)
    value = oracle.forward(Gelu(), x)
    return value, x.abs() * s.error + (x * s.value - value).abs() + value.abs() * UNIT


def _gelu_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    clamped, z = _gelu_argument(x)
    z = z.clamp(-_LARGEST, _LARGEST)
    factor = clamped * (float32(GELU_LINEAR) + float32(GELU_CUBIC_DERIVATIVE) * clamped * clamped)
    at_clamp, error = _slope(z, z.abs() * _POLYNOMIAL_ERROR, factor, _POLYNOMIAL_ERROR)
    value = oracle.backward(Gelu(), torch.ones_like(x), x)[0]
    return value, error + (at_clamp - value).abs()


def of_activation(activation: UnaryActivation) -> tuple[Bounded | None, Bounded | None]:
    """(the activation, its derivative) under approximate instructions; None what they do not reach."""
    match activation:
        case Silu():
            return _scaled(1.0, True), _scaled_slope(activation, 1.0)
        case QuickGelu(alpha=alpha):
            return _scaled(float32(alpha), True), _scaled_slope(activation, float32(alpha))
        case Gelu():
            return _gelu, _gelu_slope
        case Sigmoid():
            return _scaled(1.0, False), None
    return None, None
