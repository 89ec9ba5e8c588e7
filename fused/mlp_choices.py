"""What the epilogues of the MLP's launches are told at compile time, and the names and kinds of their results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from moe_numerics.fused.activations import Activation
from moe_numerics.fused.activations import activation as twin
from moe_numerics.fused.gemm_launch import CODES, MATRIX, SCALES, Kind, check_contract
from moe_numerics.fused.gemm_problem import BLOCK
from moe_numerics.fused.hadamard import Rotation
from moe_numerics.fused.mxfp8 import Mxfp8
from moe_numerics.fused.tile import Bfloat16, Layout, Sink
from moe_numerics.reference.activations import Activation as ReferenceActivation
from moe_numerics.reference.contract import Contract
from moe_numerics.reference.elementwise import find_activation, output_shapes
from moe_numerics.reference.formats import FloatFormat

__all__ = ["INTERLEAVED", "Choices", "Shapes", "named", "without_rows"]

INTERLEAVED = f"interleaved:{BLOCK}"
"""The one layout of gate and up that these kernels take: both must stand in one tile."""

_OUTPUTS = {
    "out": MATRIX,
    "codes_rowwise": CODES,
    "scales_rowwise": SCALES,
    "codes_colwise": CODES,
    "scales_colwise": SCALES,
}

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Choices:
    """What the epilogues of both directions are told at compile time."""

    activation: Activation
    element: FloatFormat | None
    rotated_amax: bool
    epilogue_input: str
    alignment: int
    contract: Contract

    def __post_init__(self) -> None:
        check_contract(self.contract)
        if self.epilogue_input not in ("accumulator", "bfloat16"):
            raise ValueError(f"epilogue_input is {self.epilogue_input!r}: expected 'accumulator' or 'bfloat16'")

    @classmethod
    def read(
        cls,
        activation: str | ReferenceActivation,
        layout: str,
        element: FloatFormat | None,
        rotated_amax: bool,
        epilogue_input: str,
        alignment: int,
        contract: Contract,
    ) -> Choices:
        """The choices of a call. ValueError: one that these kernels do not have."""
        chosen = twin(find_activation(activation))
        if chosen.inputs == 2 and layout != INTERLEAVED:
            raise ValueError(
                f"layout is {layout!r}: expected {INTERLEAVED!r}, the weights' rows of gate and up in alternating "
                f"blocks of {BLOCK}, so that one tile holds both"
            )
        return cls(chosen, element, rotated_amax, epilogue_input, alignment, contract)

    @property
    def layout(self) -> Layout:
        return Layout(self.activation.inputs, BLOCK if self.activation.inputs == 2 else 0)

    @property
    def sink(self) -> Sink:
        dense = self.alignment % BLOCK == 0
        if self.element is None:
            return Sink(Bfloat16(self.contract.nan_policy == "propagate"), dense_scale_rows=dense)
        return Sink(Mxfp8.of(self.element, self.contract), dense_scale_rows=dense)

    @property
    def staged(self) -> bool:
        return self.epilogue_input == "bfloat16"

    @property
    def rotation(self) -> Rotation | None:
        return Rotation.of(self.contract) if self.rotated_amax else None

    def shapes(self, rows: int, hidden: int, experts: int, streams: int, dprob: bool) -> Shapes:
        """Results that both directions have."""
        shapes = output_shapes(rows, hidden, experts, streams, self.element is not None, self.alignment, dprob)
        if self.rotated_amax:
            shapes["amax_rotated"] = ((experts,), torch.float32)
        return shapes


def without_rows(results: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The results for a buffer without rows: there is nothing to launch for."""
    for name in ("amax", "amax_rotated", "dbias"):
        if name in results:
            results[name].zero_()
    return results


def named(results: Mapping[str, torch.Tensor]) -> list[tuple[torch.Tensor | None, Kind]]:
    return [(results.get(name), kind) for name, kind in _OUTPUTS.items()]
