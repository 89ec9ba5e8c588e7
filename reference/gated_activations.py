"""Activations of two operands, gate and up, forward and backward, in exactly rounded float32.

An activation is a frozen value whose fields are its parameters. `forward` and `backward` are what users call;
a kernel mirrors `evaluate` and `differentiate`, operation by operation. Kinks, NaN and the order of products
are stated in `activations`.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from .exact_math import as_float32, float32, fma, sigmoid, sigmoid_pair, sigmoid_terms, silu, tanh, tanh_terms
from .unary_activations import Silu, UnaryActivation, positive_parameter, same_shape


@dataclass(frozen=True)
class GatedActivation(ABC):
    """y = f(gate, up)."""

    inputs: ClassVar[int] = 2

    @abstractmethod
    def evaluate(self, gate: Tensor, up: Tensor) -> Tensor:
        """f(gate, up); float32 in and out, any shape."""

    @abstractmethod
    def differentiate(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(f(gate, up), grad * df/dgate, grad * df/dup); float32 in and out. f has the bits of `evaluate`."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """f(gate, up), float32; `gate` and `up` float32, bfloat16 or float16, of any one shape."""
        same_shape(gate=gate, up=up)
        return self.evaluate(as_float32("gate", gate), as_float32("up", up))

    def backward(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """(dgate, dup), float32, for the incoming `grad`; operands as for `forward`, all of one shape."""
        same_shape(grad=grad, gate=gate, up=up)
        _, dgate, dup = self.differentiate(as_float32("grad", grad), as_float32("gate", gate), as_float32("up", up))
        return dgate, dup


@dataclass(frozen=True)
class Gated(GatedActivation):
    """activation(gate) * up: glu, geglu, qgeglu, reglu, sreglu, swiglu by the activation of the gate.

    (Shazeer, "GLU Variants Improve Transformer", 2020, section 2.)
    """

    activation: UnaryActivation = field(default_factory=Silu)

    def evaluate(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.activation.evaluate(gate) * up

    def differentiate(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        activated, dgate = self.activation.differentiate(grad * up, gate)
        return activated * up, dgate, grad * activated


def _checked_limit(owner: str, limit: float | None) -> None:
    if limit is not None and not limit > 0:
        raise ValueError(f"{owner}: limit = {limit}: a limit must be positive; None or inf means no clamp")
    if limit is not None and limit != math.inf:
        positive_parameter(owner, "limit", limit)


def _float32_limit(limit: float | None) -> float | None:
    return None if limit is None or limit == math.inf else float32(limit)


def _clamp_up(up: Tensor, limit: float | None) -> Tensor:
    return up if limit is None else torch.clamp(up, -limit, limit)


def _mask_up(up: Tensor, limit: float | None, dup: Tensor) -> Tensor:
    return dup if limit is None else torch.where(up.abs() > limit, 0.0, dup)


@dataclass(frozen=True)
class ClampedSwiglu(GatedActivation):
    """g * sigmoid(alpha * g) * (u + offset), g = min(gate, limit), u = up clamped to [-limit, limit].

    `limit` None or inf: no clamp, and no masks; 0, negative or NaN raises ValueError. With offset 0 nothing
    is added (a -0 stays). (OpenAI gpt-oss, model.py, swiglu; Transformer Engine 2.20, clamped_swiglu.)
    """

    limit: float | None = 7.0
    alpha: float = 1.702
    offset: float = 1.0

    def __post_init__(self) -> None:
        _checked_limit("ClampedSwiglu", self.limit)
        positive_parameter("ClampedSwiglu", "alpha", self.alpha)
        if not abs(self.offset) < 2.0**127:
            raise ValueError(f"ClampedSwiglu: offset = {self.offset}: expected a finite number")

    def _operands(self, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        limit = _float32_limit(self.limit)
        clamped = gate if limit is None else torch.clamp(gate, max=limit)
        linear = _clamp_up(up, limit)
        return clamped, linear if self.offset == 0 else linear + float32(self.offset)

    def evaluate(self, gate: Tensor, up: Tensor) -> Tensor:
        clamped, linear = self._operands(gate, up)
        return (clamped * sigmoid(clamped * float32(self.alpha))) * linear

    def differentiate(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        clamped, linear = self._operands(gate, up)
        s = sigmoid_terms(clamped * float32(self.alpha))
        activated = clamped * s.value
        derivative = s.value * fma(s.clamped, s.complement, 1.0)
        dgate = (grad * linear) * derivative
        limit = _float32_limit(self.limit)
        if limit is not None:
            dgate = torch.where(gate > limit, 0.0, dgate)
        return activated * linear, dgate, _mask_up(up, limit, grad * activated)


@dataclass(frozen=True)
class StepSwiglu(GatedActivation):
    """min(silu(gate), limit) * u, u = up clamped to [-limit, limit]: the gate is clamped after SiLU.

    `limit` as for `ClampedSwiglu`. (Step-3.5 models; sglang pull request 39939 lists the variants.)
    """

    limit: float | None = 7.0

    def __post_init__(self) -> None:
        _checked_limit("StepSwiglu", self.limit)

    def evaluate(self, gate: Tensor, up: Tensor) -> Tensor:
        limit = _float32_limit(self.limit)
        activated = silu(gate)
        clamped = activated if limit is None else torch.clamp(activated, max=limit)
        return clamped * _clamp_up(up, limit)

    def differentiate(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        limit = _float32_limit(self.limit)
        linear = _clamp_up(up, limit)
        activated, dgate = Silu().differentiate(grad * linear, gate)
        clamped = activated
        if limit is not None:
            clamped = torch.clamp(activated, max=limit)
            dgate = torch.where(activated > limit, 0.0, dgate)
        return clamped * linear, dgate, _mask_up(up, limit, grad * clamped)


@dataclass(frozen=True)
class SituGlu(GatedActivation):
    """(beta_gate * tanh(gate / beta_gate) * sigmoid(gate)) * (beta_up * tanh(up / beta_up)).

    1 / beta_gate and 1 / beta_up are float32 constants. Finite for infinite operands.
    (Transformer Engine 2.20, situglu; cudnn-frontend pull request 645.)
    """

    beta_gate: float = 4.0
    beta_up: float = 25.0

    def __post_init__(self) -> None:
        for name, beta in (("beta_gate", self.beta_gate), ("beta_up", self.beta_up)):
            positive_parameter("SituGlu", name, beta)
            positive_parameter("SituGlu", f"1 / {name}", 1.0 / beta)

    def evaluate(self, gate: Tensor, up: Tensor) -> Tensor:
        bounded = tanh(gate * float32(1.0 / self.beta_gate)) * float32(self.beta_gate)
        linear = tanh(up * float32(1.0 / self.beta_up)) * float32(self.beta_up)
        return (bounded * sigmoid_pair(gate).value) * linear

    def differentiate(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate_tanh = tanh_terms(gate * float32(1.0 / self.beta_gate))
        up_tanh = tanh_terms(up * float32(1.0 / self.beta_up))
        s = sigmoid_pair(gate)
        bounded = gate_tanh.value * float32(self.beta_gate)
        linear = up_tanh.value * float32(self.beta_up)
        activated = bounded * s.value
        derivative = s.value * fma(bounded, s.complement, gate_tanh.derivative)
        return activated * linear, (grad * linear) * derivative, (grad * activated) * up_tanh.derivative
