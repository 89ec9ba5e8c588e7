"""The activations' formulas in float64: what an exact or approximate float32 kernel is measured against.

Nothing here comes from the float32 polynomials: exp, tanh, cosh and erfc are torch's own in float64, and each
derivative is a closed form written by hand. Where a formula cancels in float64 (1 + tanh far below zero, 1 -
tanh**2, 1 - sigmoid), an equal one that does not is used. Rounding to the result's type is the caller's,
once: `round_once`.

Parameters (alpha, limits, betas, scales) are taken as the float32 values the kernels use. Masks at kinks and
NaN are those of `activations`: a NaN operand gives NaN, a masked gradient is +0.
"""

import math

import torch
from torch import Tensor

from .activations import Activation, GatedActivation, UnaryActivation
from .exact_math import float32
from .gated_activations import ClampedSwiglu, Gated, SituGlu, StepSwiglu
from .unary_activations import Gelu, GeluErf, QuickGelu, Relu, Sigmoid, Silu, SquaredRelu, TanhSquaredRelu

SQRT_2 = 2.0**0.5
# 2 * sqrt(2 / pi) and 1 / sqrt(2 * pi)
TWO_SQRT_2_OVER_PI = 1.5957691216057308
INVERSE_SQRT_2_PI = 0.3989422804014327
GELU_CUBIC = 0.044715

# Any magnitude at which exp(-|x|) is 0 in float64 stands for infinity in x * exp(-|x|).
_FAR = 1.0e4


def round_once(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 `x` rounded to float32, bfloat16 or float16, once, to nearest even.

    torch casts float64 to the 16-bit types by way of float32, which rounds twice; here float32 is reached by
    rounding to odd, which keeps the final rounding that of `x`.
    """
    if x.dtype != torch.float64:
        raise TypeError(f"x is {x.dtype}: round_once takes float64")
    single = x.float()
    if dtype == torch.float32:
        return single
    if dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"dtype is {dtype}: expected torch.float32, torch.bfloat16 or torch.float16")
    bits = single.view(torch.int32)
    away = single.double().abs() > x.abs()
    odd = (bits - away.int()) | 1
    inexact = (single.double() != x) & torch.isfinite(x)
    return torch.where(inexact, odd, bits).view(torch.float32).to(dtype)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)); its complement 1 - sigmoid(x) is sigmoid(-x)."""
    return 1.0 / (1.0 + torch.exp(-x))


def silu_derivative(x: Tensor) -> Tensor:
    """s + x * s * (1 - s) with its limits at the infinities, -0 and 1."""
    x = x.clamp(-_FAR, _FAR)
    return sigmoid(x) * (1.0 + x * sigmoid(-x))


def gelu(x: Tensor) -> Tensor:
    """x * (1 + tanh(u)) / 2 = x * sigmoid(2u), u = sqrt(2 / pi) * (x + 0.044715 * x**3)."""
    return x * sigmoid(TWO_SQRT_2_OVER_PI * x * (1.0 + GELU_CUBIC * x * x))


def gelu_derivative(x: Tensor) -> Tensor:
    """The derivative of `gelu`, with its limits at the infinities."""
    x = x.clamp(-_FAR, _FAR)
    argument = TWO_SQRT_2_OVER_PI * x * (1.0 + GELU_CUBIC * x * x)
    slope = TWO_SQRT_2_OVER_PI * (1.0 + 3.0 * GELU_CUBIC * x * x)
    return sigmoid(argument) * (1.0 + x * slope * sigmoid(-argument))


def normal_cdf(x: Tensor) -> Tensor:
    """erfc(-x / sqrt(2)) / 2."""
    return 0.5 * torch.erfc(-x / SQRT_2)


def gelu_erf(x: Tensor) -> Tensor:
    """x * normal_cdf(x)."""
    return x * normal_cdf(x)


def gelu_erf_derivative(x: Tensor) -> Tensor:
    """normal_cdf(x) + x * exp(-x**2 / 2) / sqrt(2 * pi), with its limits at the infinities."""
    x = x.clamp(-_FAR, _FAR)
    density = INVERSE_SQRT_2_PI * torch.exp(-0.5 * x * x)
    # Where both terms underflow the negative one is the larger, which its sign keeps.
    return torch.where((x < 0) & (density == 0), -0.0, normal_cdf(x) + x * density)


def sech_squared(x: Tensor) -> Tensor:
    """1 - tanh(x)**2 = 1 / cosh(x)**2."""
    return torch.cosh(x) ** -2


def _relu(x: Tensor) -> Tensor:
    return torch.where(x <= 0, 0.0, x)


def _where_positive(x: Tensor, gradient: Tensor) -> Tensor:
    return torch.where(x > 0, gradient, _relu(x))


def _limit(limit: float | None) -> float:
    return math.inf if limit is None else float32(limit)


def _unary(activation: UnaryActivation, x: Tensor) -> Tensor:
    match activation:
        case Gelu():
            return gelu(x)
        case GeluErf():
            return gelu_erf(x)
        case QuickGelu(alpha=alpha):
            return x * sigmoid(float32(alpha) * x)
        case Silu():
            return x * sigmoid(x)
        case Sigmoid():
            return sigmoid(x)
        case Relu():
            return _relu(x)
        case SquaredRelu():
            return _relu(x) ** 2
        case TanhSquaredRelu(scale=scale):
            return (float32(scale) * torch.tanh(_relu(x) / float32(scale))) ** 2
    raise TypeError(f"no float64 formula for {activation!r}: add one to reference/oracle.py")


def _unary_gradient(activation: UnaryActivation, grad: Tensor, x: Tensor) -> Tensor:
    match activation:
        case Gelu():
            return grad * gelu_derivative(x)
        case GeluErf():
            return grad * gelu_erf_derivative(x)
        case QuickGelu(alpha=alpha):
            return grad * silu_derivative(float32(alpha) * x)
        case Silu():
            return grad * silu_derivative(x)
        case Sigmoid():
            return grad * sigmoid(x) * sigmoid(-x)
        case Relu():
            return _where_positive(x, grad)
        case SquaredRelu():
            return _where_positive(x, grad * 2.0 * x)
        case TanhSquaredRelu(scale=scale):
            ratio = _relu(x) / float32(scale)
            derivative = 2.0 * float32(scale) * torch.tanh(ratio) * sech_squared(ratio)
            return _where_positive(x, grad * derivative)
    raise TypeError(f"no float64 derivative for {activation!r}: add one to reference/oracle.py")


def _gated(activation: GatedActivation, gate: Tensor, up: Tensor) -> Tensor:
    match activation:
        case Gated(activation=unary):
            return _unary(unary, gate) * up
        case ClampedSwiglu(limit=limit, alpha=alpha, offset=offset):
            clamped = gate.clamp(max=_limit(limit))
            linear = up.clamp(-_limit(limit), _limit(limit))
            return clamped * sigmoid(float32(alpha) * clamped) * _add_offset(linear, offset)
        case StepSwiglu(limit=limit):
            return (gate * sigmoid(gate)).clamp(max=_limit(limit)) * up.clamp(-_limit(limit), _limit(limit))
        case SituGlu(beta_gate=beta_gate, beta_up=beta_up):
            b, c = float32(beta_gate), float32(beta_up)
            return b * torch.tanh(gate / b) * sigmoid(gate) * c * torch.tanh(up / c)
    raise TypeError(f"no float64 formula for {activation!r}: add one to reference/oracle.py")


def _add_offset(linear: Tensor, offset: float) -> Tensor:
    return linear if offset == 0 else linear + float32(offset)


def _gated_gradients(activation: GatedActivation, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    match activation:
        case Gated(activation=unary):
            return _unary_gradient(unary, grad * up, gate), grad * _unary(unary, gate)
        case ClampedSwiglu(limit=limit, alpha=alpha, offset=offset):
            bound = _limit(limit)
            clamped = gate.clamp(max=bound)
            linear = _add_offset(up.clamp(-bound, bound), offset)
            dgate = grad * linear * silu_derivative(float32(alpha) * clamped)
            dup = grad * clamped * sigmoid(float32(alpha) * clamped)
            return torch.where(gate > bound, 0.0, dgate), torch.where(up.abs() > bound, 0.0, dup)
        case StepSwiglu(limit=limit):
            bound = _limit(limit)
            activated = gate * sigmoid(gate)
            dgate = grad * up.clamp(-bound, bound) * silu_derivative(gate)
            dup = grad * activated.clamp(max=bound)
            return torch.where(activated > bound, 0.0, dgate), torch.where(up.abs() > bound, 0.0, dup)
        case SituGlu(beta_gate=beta_gate, beta_up=beta_up):
            b, c = float32(beta_gate), float32(beta_up)
            bounded = b * torch.tanh(gate / b)
            derivative = sigmoid(gate) * (bounded * sigmoid(-gate) + sech_squared(gate / b))
            dup = grad * bounded * sigmoid(gate) * sech_squared(up / c)
            return grad * c * torch.tanh(up / c) * derivative, dup
    raise TypeError(f"no float64 derivative for {activation!r}: add one to reference/oracle.py")


def _float64(operands: tuple[Tensor, ...]) -> list[Tensor]:
    return [operand.double() for operand in operands]


def forward(activation: Activation, *operands: Tensor) -> Tensor:
    """The activation in float64: operands (x) or (gate, up) of any float type and one shape."""
    wide = _float64(operands)
    if isinstance(activation, UnaryActivation):
        return _unary(activation, *wide)
    return _gated(activation, *wide)


def backward(activation: Activation, grad: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
    """The gradient of each operand in float64: (dx,) or (dgate, dup); arguments as for `forward`."""
    wide = _float64(operands)
    g = grad.double()
    if isinstance(activation, UnaryActivation):
        return (_unary_gradient(activation, g, *wide),)
    return _gated_gradients(activation, g, *wide)
