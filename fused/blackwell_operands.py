"""What `tcgen05.mma` multiplies: formats of both operands, the instruction, and the tiles in shared memory.

Tiles have lines of 128 bytes, as wide as their swizzle, whatever the format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16, Float32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from moe_numerics.fused.gemm_problem import ROWS

__all__ = ["BF16", "Operands"]

LINE_BYTES = 128


@dataclass(frozen=True)
class Operands:
    """The formats of the left and the right matrix: "bf16"."""

    left: str = "bf16"
    right: str = "bf16"

    @property
    def accumulator(self) -> str:
        """The model of `moe_numerics.reference.tensor_core` that gives its bits."""
        return "sm_100.bf16"

    @property
    def element(self) -> Any:
        """The type that is copied to shared memory."""
        return BFloat16

    @property
    def depth(self) -> int:
        """Elements of a line of a tile: summed at once where K is contiguous."""
        return LINE_BYTES * 8 // self.element.width

    def tiled_mma(self, majors: tuple[OperandMajorMode, OperandMajorMode], columns: int) -> cute.TiledMma:
        """The instruction for a tile of so many columns, by one thread block."""
        operation = tcgen05.MmaF16BF16Op(
            BFloat16, Float32, (ROWS, columns, 16), tcgen05.CtaGroup.ONE, tcgen05.OperandSource.SMEM, *majors
        )
        return cute.make_tiled_mma(cute.make_mma_atom(operation))

    def copied_layout(self, rows: int, stages: int, major: OperandMajorMode) -> Any:
        """Shared-memory layout [rows, depth, stages] of a ring of tiles, as TMA writes it."""
        along_depth = major == OperandMajorMode.K
        shape = (rows, self.depth, stages)
        return cute.tile_to_shape(self._atom(major), shape, order=(0, 1, 2) if along_depth else (1, 0, 2))

    def multiplied_layout(self, shape: Any, stages: int, major: OperandMajorMode) -> Any:
        """The same ring as the instruction reads it; shape: of one operand's tile, partitioned by instructions."""
        along_depth = major == OperandMajorMode.K
        return tcgen05.tile_to_mma_shape(
            self._atom(major), cute.append(shape, stages), order=(1, 2, 3) if along_depth else (2, 1, 3)
        )

    def _atom(self, major: OperandMajorMode) -> Any:
        kinds = tcgen05.SmemLayoutAtomKind
        return tcgen05.make_smem_layout_atom(
            kinds.K_SW128 if major == OperandMajorMode.K else kinds.MN_SW128, self.element
        )


BF16 = Operands()
