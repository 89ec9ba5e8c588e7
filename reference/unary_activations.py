"""Activations of one operand, forward and backward, in exactly rounded float32.

An activation is a frozen value whose fields are its parameters. `forward` and `backward` are what users call;
a kernel mirrors `evaluate` and `differentiate`, operation by operation. Kinks, NaN and the order of products
are stated in `activations`.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .exact_math import (
    INVERSE_SQRT_2_PI,
    SCALE,
    as_float32,
    float32,
    fma,
    normal_cdf,
    normal_tail,
    sigmoid,
    sigmoid_pair,
    sigmoid_terms,
    tanh,
    tanh_terms,
)


def positive_parameter(owner: str, name: str, value: float) -> float:
    """float32 nearest to a parameter that must be positive and finite; raises ValueError otherwise."""
    if not (math.isfinite(value) and 0 < value < 2.0**127 and float32(value) > 0):
        raise ValueError(f"{owner}: {name} = {value}: expected a positive finite float32 number")
    return float32(value)


def same_shape(**operands: Tensor) -> None:
    """Raises ValueError unless all operands have one shape."""
    shapes = {name: list(operand.shape) for name, operand in operands.items()}
    if len({tuple(shape) for shape in shapes.values()}) > 1:
        given = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"operands differ in shape ({given}): expected one shape for all")


@dataclass(frozen=True)
class UnaryActivation(ABC):
    """y = f(x)."""

    inputs: ClassVar[int] = 1

    @abstractmethod
    def evaluate(self, x: Tensor) -> Tensor:
        """f(x); float32 in and out, any shape."""

    @abstractmethod
    def differentiate(self, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """(f(x), grad * f'(x)); float32 in and out, any shape. f(x) has the bits of `evaluate`."""

    def forward(self, x: Tensor) -> Tensor:
        """f(x), float32 of the shape of x; `x` float32, bfloat16 or float16 of any shape."""
        return self.evaluate(as_float32("x", x))

    def backward(self, grad: Tensor, x: Tensor) -> Tensor:
        """grad * f'(x), float32 of the shape of x; both float32, bfloat16 or float16 and of one shape."""
        same_shape(grad=grad, x=x)
        return self.differentiate(as_float32("grad", grad), as_float32("x", x))[1]


def relu(x: Tensor) -> Tensor:
    """max(x, +0): 0 and -0 give +0, NaN gives NaN. PTX: max.NaN.f32."""
    return torch.where(x <= 0, 0.0, x)


def where_positive(x: Tensor, gradient: Tensor) -> Tensor:
    """`gradient` where x > 0, +0 where x <= 0, NaN where x is NaN."""
    return torch.where(x > 0, gradient, relu(x))


def _silu_terms(x: Tensor) -> tuple[Tensor, Tensor]:
    """(sigmoid(x), derivative of x * sigmoid(x)); the latter is -0 at -Inf and 1 at Inf."""
    s = sigmoid_terms(x)
    return s.value, s.value * fma(s.clamped, s.complement, 1.0)


@dataclass(frozen=True)
class Sigmoid(UnaryActivation):
    """1 / (1 + exp(-x)), the gate of `glu`; its value has the bits of `exact_math.sigmoid_pair`."""

    def evaluate(self, x: Tensor) -> Tensor:
        return sigmoid_pair(x).value

    def differentiate(self, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        s = sigmoid_pair(x)
        return s.value, grad * (s.value * s.complement)


@dataclass(frozen=True)
class Silu(UnaryActivation):
    """x * sigmoid(x). NaN at -Inf; the derivative there is -0."""

    def evaluate(self, x: Tensor) -> Tensor:
        return x * sigmoid(x)

    def differentiate(self, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        s, derivative = _silu_terms(x)
        return x * s, grad * derivative


@dataclass(frozen=True)
class QuickGelu(UnaryActivation):
    """x * sigmoid(alpha * x). NaN at -Inf; the derivative there is -0."""

    alpha: float = 1.702

    def __post_init__(self) -> None:
        positive_parameter("QuickGelu", "alpha", self.alpha)

    def evaluate(self, x: Tensor) -> Tensor:
        return x * sigmoid(x * float32(self.alpha))

    def differentiate(self, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        s, derivative = _silu_terms(x * float32(self.alpha))
        return x * s, grad * derivative


# 2 * sqrt(2 / pi), and that times 0.044715 and 3 * 0.044715
GELU_LINEAR = float.fromhex("0x1.988454p+0")
GELU_CUBIC = float32(1.5957691216057308 * 0.044715)
GELU_CUBIC_DERIVATIVE = float32(1.5957691216057308 * 3 * 0.044715)
# The sigmoid's argument is -105.8 at the lower bound, where sigmoid is 0, and 29.97 at the upper, where it is
# 1.
GELU_MIN = -10.75
GELU_MAX = 6.5


@dataclass(frozen=True)
class Gelu(UnaryActivation):
    """x * (1 + tanh(u)) / 2, u = sqrt(2 / pi) * (x + 0.044715 * x**3), as x * sigmoid(2u).

    NaN at -Inf; the derivative there is -0. (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016,
    section 2.)
    """

    def evaluate(self, x: Tensor) -> Tensor:
        clamped = torch.clamp(x, GELU_MIN, GELU_MAX)
        square = clamped * clamped
        return x * sigmoid(clamped * fma(square, GELU_CUBIC, GELU_LINEAR))

    def differentiate(self, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        clamped = torch.clamp(x, GELU_MIN, GELU_MAX)
        square = clamped * clamped
        s = sigmoid_terms(clamped * fma(square, GELU_CUBIC, GELU_LINEAR))
        slope = clamped * fma(square, GELU_CUBIC_DERIVATIVE, GELU_LINEAR)
        return x * s.value, grad * (s.value * fma(slope, s.complement, 1.0))


@dataclass(frozen=True)
class GeluErf(UnaryActivation):
    """x * normal_cdf(x) = x * erfc(-x / sqrt(2)) / 2. NaN at -Inf; the derivative there is -0."""

    def evaluate(self, x: Tensor) -> Tensor:
        return x * normal_cdf(x)

    def differentiate(self, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        magnitude, exponential, mills = normal_tail(x)
        tail = exponential * mills
        # The derivative at -|x|: tail - |x| * density; at |x| it is 1 minus that.
        tail_derivative = exponential * fma(magnitude, -INVERSE_SQRT_2_PI * SCALE, mills)
        positive = x > 0
        cdf = torch.where(positive, 1.0 - tail, tail)
        return x * cdf, grad * torch.where(positive, 1.0 - tail_derivative, tail_derivative)


@dataclass(frozen=True)
class Relu(UnaryActivation):
    """max(x, 0)."""

    def evaluate(self, x: Tensor) -> Tensor:
        return relu(x)

    def differentiate(self, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return relu(x), where_positive(x, grad)


@dataclass(frozen=True)
class SquaredRelu(UnaryActivation):
    """max(x, 0)**2."""

    def evaluate(self, x: Tensor) -> Tensor:
        r = relu(x)
        return r * r

    def differentiate(self, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        r = relu(x)
        return r * r, where_positive(x, grad * (x + x))


@dataclass(frozen=True)
class TanhSquaredRelu(UnaryActivation):
    """(scale * tanh(max(x, 0) / scale))**2: squared relu with a soft clamp at scale**2.

    1 / scale is a float32 constant. (Transformer Engine 2.20, ScaledTanhSReLU; cudnn-frontend pull request
    858.)
    """

    scale: float = 16.0

    def __post_init__(self) -> None:
        positive_parameter("TanhSquaredRelu", "scale", self.scale)
        positive_parameter("TanhSquaredRelu", "1 / scale", 1.0 / self.scale)

    def evaluate(self, x: Tensor) -> Tensor:
        clamped = tanh(relu(x) * float32(1.0 / self.scale)) * float32(self.scale)
        return clamped * clamped

    def differentiate(self, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        t = tanh_terms(relu(x) * float32(1.0 / self.scale))
        clamped = t.value * float32(self.scale)
        return clamped * clamped, where_positive(x, grad * ((clamped + clamped) * t.derivative))
