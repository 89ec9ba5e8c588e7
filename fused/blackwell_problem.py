"""The weight gradient of operands whose copies are transposed: NVFP4, which the tensor core sums along lines only."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import OperandMajorMode
from moe_numerics.fused.gemm_problem import Place, RaggedDepth, Sizes
from moe_numerics.fused.memory import MaybeTensor

__all__ = ["RaggedSlots"]

SLOT_ROWS = 16
SLOT_BYTES = SLOT_ROWS // 2


@dataclass(frozen=True)
class RaggedSlots(RaggedDepth):
    """`RaggedDepth` of packed codes [columns, blocks of 16 rows * 8 bytes], whose blocks begin anew for each expert.

    Depths are in bytes.
    """

    summed_rows = False

    @property
    def majors(self) -> tuple[OperandMajorMode, OperandMajorMode]:
        return OperandMajorMode.K, OperandMajorMode.K

    def sizes(self, grad: cute.Tensor, x: cute.Tensor) -> Sizes:
        return Sizes(grad.shape[0], x.shape[0], Int32(0))

    def left(self, grad: cute.Tensor) -> cute.Tensor:
        return grad

    def right(self, x: cute.Tensor) -> cute.Tensor:
        return x

    def _first(self, place: Place) -> Int32:
        block = place.start // SLOT_ROWS
        return (block if self.dense else block + place.expert) * SLOT_BYTES

    def left_source(self, left: cute.Tensor, place: Place, row: Int32) -> cute.Tensor:
        """The left matrix from row `row` and the expert's first block on."""
        return cute.domain_offset((row, self._first(place)), left)

    def right_source(self, right: cute.Tensor, place: Place, sizes: Sizes) -> cute.Tensor:
        """The right matrix from the place's first column and the expert's first block on."""
        return cute.domain_offset((place.column, self._first(place)), right)

    @cute.jit
    def locate(
        self,
        offsets: cute.Tensor,
        counts: MaybeTensor,
        index: Int32,
        row_tiles: Int32,
        sizes: Sizes,
        tiling: cutlass.Constexpr,
        lane: Int32,
    ) -> Place:
        """Where tile number `index` stands."""
        place = RaggedDepth.locate(self, offsets, counts, index, row_tiles, sizes, tiling, lane)
        bytes_ = (place.depth + (SLOT_ROWS - 1)) // SLOT_ROWS * SLOT_BYTES
        return Place(place.expert, place.start, place.first, place.end, place.column, bytes_)
