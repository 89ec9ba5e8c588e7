"""Activations as kernels compute them: scalar twins of `moe_numerics.reference.activations`, operation by operation.

Each class is a compile-time parameter of a kernel: a frozen dataclass whose fields are the activation's constants.
`forward` gives one float32 value, `backward` the gradient of each input and the value of `forward` (what `dprob`
sums).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from cutlass import Float32

from moe_numerics.fused.exact_math import fma, sigmoid_parts

__all__ = ["ACTIVATIONS", "IDENTITY", "Activation", "Identity", "Swiglu"]


class Activation(Protocol):
    """What a kernel asks of an activation; `inputs` are `(x,)` or `(gate, up)`."""

    inputs: ClassVar[int]

    def forward(self, inputs: Sequence[Float32], target: str) -> Float32: ...

    def backward(
        self, grad: Float32, inputs: Sequence[Float32], target: str
    ) -> tuple[tuple[Float32, ...], Float32]: ...


@dataclass(frozen=True)
class Identity:
    """x: plain quantisation."""

    inputs: ClassVar[int] = 1

    def forward(self, inputs: Sequence[Float32], target: str) -> Float32:
        return inputs[0]

    def backward(
        self, grad: Float32, inputs: Sequence[Float32], target: str
    ) -> tuple[tuple[Float32, ...], Float32]:
        return (grad,), inputs[0]


@dataclass(frozen=True)
class Swiglu:
    """silu(gate) * up."""

    inputs: ClassVar[int] = 2

    def forward(self, inputs: Sequence[Float32], target: str) -> Float32:
        gate, up = inputs
        return (gate * sigmoid_parts(gate, target).sigmoid) * up

    def backward(
        self, grad: Float32, inputs: Sequence[Float32], target: str
    ) -> tuple[tuple[Float32, ...], Float32]:
        gate, up = inputs
        parts = sigmoid_parts(gate, target)
        silu = gate * parts.sigmoid
        derivative = parts.sigmoid * fma(-parts.negated, parts.complement, Float32(1.0))
        return ((grad * up) * derivative, grad * silu), silu * up


IDENTITY = Identity()
ACTIVATIONS: dict[str, Activation] = {"swiglu": Swiglu()}
