"""Scalar twins of `moe_numerics.reference.gated_activations`, operation by operation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from cutlass import Float32
from moe_numerics.fused.exact_math import absolute, clamp, fma, minimum, sigmoid_pair, tanh, tanh_terms
from moe_numerics.fused.maths import sigmoid, sigmoid_terms
from moe_numerics.fused.memory import select
from moe_numerics.fused.unary_activations import Silu, Unary


@dataclass(frozen=True)
class GatedActivation:
    """An activation of gate and up; subclasses give `evaluate` and `differentiate`.

    fast: whether it has a form in fast maths.
    """

    inputs: ClassVar[int] = 2

    @property
    def fast(self) -> bool:
        return False


@dataclass(frozen=True)
class Gated(GatedActivation):
    """activation(gate) * up."""

    activation: Unary = field(default_factory=Silu)

    @property
    def fast(self) -> bool:
        return self.activation.fast

    def evaluate(self, inputs: Sequence[Float32], target: str) -> Float32:
        gate, up = inputs
        return self.activation.value(gate, target) * up

    def differentiate(
        self, grad: Float32, inputs: Sequence[Float32], target: str
    ) -> tuple[Float32, tuple[Float32, ...]]:
        gate, up = inputs
        activated, dgate = self.activation.gradient(grad * up, gate, target)
        return activated * up, (dgate, grad * activated)


def _clamp_up(up: Float32, limit: float | None) -> Float32:
    return up if limit is None else clamp(up, -limit, limit)


def _mask_up(up: Float32, limit: float | None, dup: Float32) -> Float32:
    return dup if limit is None else select(absolute(up) > Float32(limit), Float32(0.0), dup)


def _finite(limit: float | None) -> float | None:
    return None if limit == math.inf else limit


@dataclass(frozen=True)
class ClampedSwiglu(GatedActivation):
    """g * sigmoid(alpha * g) * (u + offset), g = min(gate, limit), u = up clamped to [-limit, limit]."""

    limit: float | None = 7.0
    alpha: float = 1.702
    offset: float = 1.0

    @property
    def fast(self) -> bool:
        return True

    def _operands(self, gate: Float32, up: Float32) -> tuple[Float32, Float32]:
        limit = _finite(self.limit)
        clamped = gate if limit is None else minimum(gate, limit)
        linear = _clamp_up(up, limit)
        return clamped, linear if self.offset == 0 else linear + Float32(self.offset)

    def evaluate(self, inputs: Sequence[Float32], target: str) -> Float32:
        clamped, linear = self._operands(*inputs)
        return (clamped * sigmoid(clamped * Float32(self.alpha), target)) * linear

    def differentiate(
        self, grad: Float32, inputs: Sequence[Float32], target: str
    ) -> tuple[Float32, tuple[Float32, ...]]:
        gate, up = inputs
        clamped, linear = self._operands(gate, up)
        s = sigmoid_terms(clamped * Float32(self.alpha), target)
        activated = clamped * s.value
        derivative = s.value * fma(s.clamped, s.complement, 1.0)
        dgate = (grad * linear) * derivative
        limit = _finite(self.limit)
        if limit is not None:
            dgate = select(gate > Float32(limit), Float32(0.0), dgate)
        return activated * linear, (dgate, _mask_up(up, limit, grad * activated))


@dataclass(frozen=True)
class StepSwiglu(GatedActivation):
    """min(silu(gate), limit) * u, u = up clamped to [-limit, limit]."""

    limit: float | None = 7.0

    @property
    def fast(self) -> bool:
        return True

    def evaluate(self, inputs: Sequence[Float32], target: str) -> Float32:
        gate, up = inputs
        limit = _finite(self.limit)
        activated = Silu().value(gate, target)
        clamped = activated if limit is None else minimum(activated, limit)
        return clamped * _clamp_up(up, limit)

    def differentiate(
        self, grad: Float32, inputs: Sequence[Float32], target: str
    ) -> tuple[Float32, tuple[Float32, ...]]:
        gate, up = inputs
        limit = _finite(self.limit)
        linear = _clamp_up(up, limit)
        activated, dgate = Silu().gradient(grad * linear, gate, target)
        clamped = activated
        if limit is not None:
            clamped = minimum(activated, limit)
            dgate = select(activated > Float32(limit), Float32(0.0), dgate)
        return clamped * linear, (dgate, _mask_up(up, limit, grad * clamped))


@dataclass(frozen=True)
class SituGlu(GatedActivation):
    """(beta_gate * tanh(gate / beta_gate) * sigmoid(gate)) * (beta_up * tanh(up / beta_up))."""

    beta_gate: float = 4.0
    beta_up: float = 25.0

    def evaluate(self, inputs: Sequence[Float32], target: str) -> Float32:
        gate, up = inputs
        bounded = tanh(gate * Float32(1.0 / self.beta_gate), target) * Float32(self.beta_gate)
        linear = tanh(up * Float32(1.0 / self.beta_up), target) * Float32(self.beta_up)
        return (bounded * sigmoid_pair(gate, target).value) * linear

    def differentiate(
        self, grad: Float32, inputs: Sequence[Float32], target: str
    ) -> tuple[Float32, tuple[Float32, ...]]:
        gate, up = inputs
        gate_tanh = tanh_terms(gate * Float32(1.0 / self.beta_gate), target)
        up_tanh = tanh_terms(up * Float32(1.0 / self.beta_up), target)
        s = sigmoid_pair(gate, target)
        bounded = gate_tanh.value * Float32(self.beta_gate)
        linear = up_tanh.value * Float32(self.beta_up)
        activated = bounded * s.value
        derivative = s.value * fma(bounded, s.complement, gate_tanh.derivative)
        dgate = (grad * linear) * derivative
        return activated * linear, (dgate, (grad * activated) * up_tanh.derivative)
