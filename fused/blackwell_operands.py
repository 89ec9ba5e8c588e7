"""What `tcgen05.mma` multiplies: formats of both operands, the instruction, and the tiles in shared memory.

Tiles have lines of 128 bytes, as wide as their swizzle, whatever the format: 64 bfloat16, 128 FP8 or 256 FP4 codes.
Codes are copied as bytes. Along a line K is contiguous, or, of operands that are summed over rows, the rows' columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16, Float4E2M1FN, Float8E4M3FN, Float8E5M2, Float8E8M0FNU, Float32, Uint8
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from moe_numerics.fused.gemm_problem import ROWS

__all__ = ["BF16", "LINE_BYTES", "Operands", "ring_stages"]

LINE_BYTES = 128
# Shared memory for the ring; the rest is the epilogues'.
RING_BYTES = 200 * 1024

_TYPES = {"BF16": BFloat16, "E4M3": Float8E4M3FN, "E5M2": Float8E5M2, "E2M1": Float4E2M1FN}
_ACCUMULATORS = {16: "sm_100.bf16", 8: "sm_100.mxf8f6f4", 4: "sm_100.mxf4nvf4"}


@dataclass(frozen=True)
class Operands:
    """The formats of the left and the right matrix.

    left, right: both "BF16"; or "E4M3" or "E5M2", with an E8M0 scale for 32 codes of K (MXFP8); or both "E2M1", with an
    E4M3 scale for 16 (NVFP4).

    ValueError: formats that no instruction takes together.
    """

    left: str = "BF16"
    right: str = "BF16"

    def __post_init__(self) -> None:
        if _TYPES[self.left].width != _TYPES[self.right].width:
            raise ValueError(f"the operands are {self.left} and {self.right}: no kernel takes them together")

    @property
    def width(self) -> int:
        """Bits of an element."""
        return int(_TYPES[self.left].width)

    @property
    def accumulator(self) -> str:
        """The model of `moe_numerics.reference.tensor_core` that gives its bits."""
        return _ACCUMULATORS[self.width]

    @property
    def copied(self) -> Any:
        """The type in which a tile is copied to shared memory."""
        return BFloat16 if self.width == 16 else Uint8

    @property
    def depth(self) -> int:
        """Copied elements of a line of a tile."""
        return LINE_BYTES * 8 // int(self.copied.width)

    @property
    def scale_block(self) -> int:
        """Elements of K that share a scale; 0: there are no scales."""
        return {16: 0, 8: 32, 4: 16}[self.width]

    @property
    def blocks(self) -> int:
        """Scales of a line of a tile."""
        return LINE_BYTES * 8 // self.width // self.scale_block if self.scale_block else 0

    @property
    def scale(self) -> Any:
        """The type of scales."""
        return Float8E8M0FNU if self.width == 8 else Float8E4M3FN

    def tiled_mma(self, majors: tuple[OperandMajorMode, OperandMajorMode], columns: int) -> cute.TiledMma:
        """The instruction for a tile of so many columns, by one thread block."""
        shape, one, shared = (ROWS, columns, 256 // self.width), tcgen05.CtaGroup.ONE, tcgen05.OperandSource.SMEM
        if self.width == 16:
            operation: Any = tcgen05.MmaF16BF16Op(BFloat16, Float32, shape, one, shared, *majors)
        elif self.width == 8:
            types = _TYPES[self.left], _TYPES[self.right]
            operation = tcgen05.MmaMXF8F6F4Op(*types, shape, one, shared, *majors)
        else:
            operation = tcgen05.MmaMXF4NVF4Op(self.scale, shape, one, shared)
        return cute.make_tiled_mma(cute.make_mma_atom(operation))

    def copied_layout(self, rows: int, stages: int, major: OperandMajorMode) -> Any:
        """Shared-memory layout [rows, depth, stages] of a ring of tiles, as TMA writes it."""
        along_depth = major == OperandMajorMode.K
        shape = (rows, self.depth, stages)
        return cute.tile_to_shape(_atom(major, self.copied), shape, order=(0, 1, 2) if along_depth else (1, 0, 2))

    def multiplied(
        self, tiled_mma: cute.TiledMma, ring: cute.Tensor, left: bool, major: OperandMajorMode, swizzle: Any
    ) -> cute.Tensor:
        """The ring as the instruction reads it: (instruction's tile, tiles of rows, steps of K, stages)."""
        rows, _, stages = ring.shape
        kind = _TYPES[self.left if left else self.right]
        partition = tiled_mma.partition_shape_A if left else tiled_mma.partition_shape_B
        shape = cute.append(partition((cute.size(rows), self.depth * int(self.copied.width) // self.width)), stages)
        layout = tcgen05.tile_to_mma_shape(
            _atom(major, kind), shape, order=(1, 2, 3) if major == OperandMajorMode.K else (2, 1, 3)
        )
        tile = cute.make_tensor(cute.recast_ptr(ring.iterator, swizzle, dtype=kind), layout.outer)
        return tiled_mma.make_fragment_A(tile) if left else tiled_mma.make_fragment_B(tile)


def _atom(major: OperandMajorMode, kind: Any) -> Any:
    kinds = tcgen05.SmemLayoutAtomKind
    return tcgen05.make_smem_layout_atom(kinds.K_SW128 if major == OperandMajorMode.K else kinds.MN_SW128, kind)


BF16 = Operands()


def ring_stages(operands: Operands, columns: int) -> int:
    """Stages of tiles of so many columns, with their scales, that fit in shared memory."""
    return RING_BYTES // ((ROWS + columns) * (LINE_BYTES + operands.blocks))
