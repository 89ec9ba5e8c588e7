"""Every activation as a kernel's compile-time parameter, made from the reference's value of the same name."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from cutlass import Float32
from moe_numerics.fused import gated_activations, unary_activations
from moe_numerics.fused.unary_activations import Identity

__all__ = ["IDENTITY", "Activation", "activation"]


class Activation(Protocol):
    """What a kernel asks of an activation; `inputs` are `(x,)` or `(gate, up)`. fast: whether it has fast maths."""

    inputs: ClassVar[int]

    @property
    def fast(self) -> bool: ...

    def evaluate(self, inputs: Sequence[Float32], target: str) -> Float32:
        """f(inputs)."""

    def differentiate(
        self, grad: Float32, inputs: Sequence[Float32], target: str
    ) -> tuple[Float32, tuple[Float32, ...]]:
        """f(inputs), and grad times the derivative for each input."""


def activation(reference: Any) -> Activation:
    """The twin of a reference activation: the class of the same name with the same parameters."""
    name = type(reference).__name__
    module = unary_activations if hasattr(unary_activations, name) else gated_activations
    parameters = {item.name: _parameter(getattr(reference, item.name)) for item in dataclasses.fields(reference)}
    twin: Activation = getattr(module, name)(**parameters)
    return twin


def _parameter(value: Any) -> Any:
    """The twin of an activation, or a number whose text can be part of a kernel's name: of 1e+30 libNVVM takes no +."""
    if dataclasses.is_dataclass(value):
        return activation(value)
    return int(value) if isinstance(value, float) and "+" in repr(value) else value


IDENTITY = Identity()
