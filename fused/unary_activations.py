"""Scalar twins of `moe_numerics.reference.unary_activations`, operation by operation.

Each class is a compile-time parameter of a kernel: a frozen dataclass with the fields of its twin. `evaluate` gives
f(x); `differentiate` gives f(x) and the gradients, here one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from cutlass import Float32
from moe_numerics.fused.exact_math import (
    clamp,
    fma,
    maximum,
    normal_cdf,
    normal_tail,
    sigmoid_pair,
    tanh,
    tanh_terms,
)
from moe_numerics.fused.maths import sigmoid, sigmoid_terms
from moe_numerics.fused.memory import select
from moe_numerics.reference.exact_math import INVERSE_SQRT_2_PI, SCALE
from moe_numerics.reference.unary_activations import (
    GELU_CUBIC,
    GELU_CUBIC_DERIVATIVE,
    GELU_LINEAR,
    GELU_MAX,
    GELU_MIN,
)


@dataclass(frozen=True)
class Unary:
    """An activation of one input; subclasses give `value` and `gradient`.

    fast: whether it has a form in fast maths.
    """

    inputs: ClassVar[int] = 1
    fast: ClassVar[bool] = False

    def value(self, x: Float32, target: str) -> Float32:
        """f(x)."""
        raise NotImplementedError

    def gradient(self, grad: Float32, x: Float32, target: str) -> tuple[Float32, Float32]:
        """(f(x), grad * f'(x))."""
        raise NotImplementedError

    def evaluate(self, inputs: Sequence[Float32], target: str) -> Float32:
        return self.value(inputs[0], target)

    def differentiate(
        self, grad: Float32, inputs: Sequence[Float32], target: str
    ) -> tuple[Float32, tuple[Float32, ...]]:
        value, gradient = self.gradient(grad, inputs[0], target)
        return value, (gradient,)


@dataclass(frozen=True)
class Identity(Unary):
    """x: plain quantisation."""

    def value(self, x: Float32, target: str) -> Float32:
        return x

    def gradient(self, grad: Float32, x: Float32, target: str) -> tuple[Float32, Float32]:
        return x, grad


def relu(x: Float32) -> Float32:
    """max(x, +0): 0 and -0 give +0, NaN gives NaN."""
    return maximum(x, 0.0)


def where_positive(x: Float32, gradient: Float32) -> Float32:
    """`gradient` where x > 0, +0 where x <= 0, NaN where x is NaN."""
    return select(x > Float32(0.0), gradient, relu(x))


def _silu_terms(x: Float32, target: str) -> tuple[Float32, Float32]:
    s = sigmoid_terms(x, target)
    return s.value, s.value * fma(s.clamped, s.complement, 1.0)


@dataclass(frozen=True)
class Sigmoid(Unary):
    """1 / (1 + exp(-x))."""

    def value(self, x: Float32, target: str) -> Float32:
        return sigmoid_pair(x, target).value

    def gradient(self, grad: Float32, x: Float32, target: str) -> tuple[Float32, Float32]:
        s = sigmoid_pair(x, target)
        return s.value, grad * (s.value * s.complement)


@dataclass(frozen=True)
class Silu(Unary):
    """x * sigmoid(x)."""

    fast: ClassVar[bool] = True

    def value(self, x: Float32, target: str) -> Float32:
        return x * sigmoid(x, target)

    def gradient(self, grad: Float32, x: Float32, target: str) -> tuple[Float32, Float32]:
        s, derivative = _silu_terms(x, target)
        return x * s, grad * derivative


@dataclass(frozen=True)
class QuickGelu(Unary):
    """x * sigmoid(alpha * x)."""

    fast: ClassVar[bool] = True

    alpha: float = 1.702

    def value(self, x: Float32, target: str) -> Float32:
        return x * sigmoid(x * Float32(self.alpha), target)

    def gradient(self, grad: Float32, x: Float32, target: str) -> tuple[Float32, Float32]:
        s, derivative = _silu_terms(x * Float32(self.alpha), target)
        return x * s, grad * derivative


@dataclass(frozen=True)
class Gelu(Unary):
    """The tanh form of GELU."""

    fast: ClassVar[bool] = True

    def value(self, x: Float32, target: str) -> Float32:
        clamped = clamp(x, GELU_MIN, GELU_MAX)
        square = clamped * clamped
        return x * sigmoid(clamped * fma(square, GELU_CUBIC, GELU_LINEAR), target)

    def gradient(self, grad: Float32, x: Float32, target: str) -> tuple[Float32, Float32]:
        clamped = clamp(x, GELU_MIN, GELU_MAX)
        square = clamped * clamped
        s = sigmoid_terms(clamped * fma(square, GELU_CUBIC, GELU_LINEAR), target)
        slope = clamped * fma(square, GELU_CUBIC_DERIVATIVE, GELU_LINEAR)
        return x * s.value, grad * (s.value * fma(slope, s.complement, 1.0))


@dataclass(frozen=True)
class GeluErf(Unary):
    """x * normal_cdf(x)."""

    def value(self, x: Float32, target: str) -> Float32:
        return x * normal_cdf(x, target)

    def gradient(self, grad: Float32, x: Float32, target: str) -> tuple[Float32, Float32]:
        magnitude, exponential, mills = normal_tail(x, target)
        tail = exponential * mills
        tail_derivative = exponential * fma(magnitude, -INVERSE_SQRT_2_PI * SCALE, mills)
        positive = x > Float32(0.0)
        cdf = select(positive, Float32(1.0) - tail, tail)
        return x * cdf, grad * select(positive, Float32(1.0) - tail_derivative, tail_derivative)


@dataclass(frozen=True)
class Relu(Unary):
    """max(x, 0)."""

    def value(self, x: Float32, target: str) -> Float32:
        return relu(x)

    def gradient(self, grad: Float32, x: Float32, target: str) -> tuple[Float32, Float32]:
        return relu(x), where_positive(x, grad)


@dataclass(frozen=True)
class SquaredRelu(Unary):
    """max(x, 0)**2."""

    def value(self, x: Float32, target: str) -> Float32:
        r = relu(x)
        return r * r

    def gradient(self, grad: Float32, x: Float32, target: str) -> tuple[Float32, Float32]:
        r = relu(x)
        return r * r, where_positive(x, grad * (x + x))


@dataclass(frozen=True)
class TanhSquaredRelu(Unary):
    """(scale * tanh(max(x, 0) / scale))**2."""

    scale: float = 16.0

    def value(self, x: Float32, target: str) -> Float32:
        clamped = tanh(relu(x) * Float32(1.0 / self.scale), target) * Float32(self.scale)
        return clamped * clamped

    def gradient(self, grad: Float32, x: Float32, target: str) -> tuple[Float32, Float32]:
        t = tanh_terms(relu(x) * Float32(1.0 / self.scale), target)
        clamped = t.value * Float32(self.scale)
        return clamped * clamped, where_positive(x, grad * ((clamped + clamped) * t.derivative))
