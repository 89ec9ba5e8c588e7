"""What a grouped GEMM multiplies: its operands as tiles of a left and a right matrix, and where each tile stands.

Both problems sum over ascending K in tiles of 64. In `RaggedRows` the experts' tokens are the rows of the left matrix;
in `RaggedDepth` (weight gradients) they are what is summed over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from moe_numerics.fused.gemm_schedule import count_row_tiles, expert_rows, find_row_tile, locate_columns
from moe_numerics.fused.memory import MaybeTensor

__all__ = ["BLOCK", "DEPTH", "ROWS", "Place", "RaggedDepth", "RaggedRows", "Sizes", "Tiling"]

ROWS = 128
DEPTH = 64
BLOCK = 32


@dataclass(frozen=True)
class Tiling:
    """Shape of a thread block's tile, of the ring of stages and of the cluster.

    `cluster` thread blocks work on neighbouring row tiles and share the tiles of the right matrix that they load.
    columns: 128 or 256. group: see `gemm_schedule.locate_columns`. alternating: the two warpgroups work on tiles of 64
    rows of their own, so that one multiplies while the other is in its epilogue; else on the halves of one tile.
    """

    columns: int = 256
    stages: int = 4
    cluster: int = 2
    group: int = 16
    alternating: bool = False

    @property
    def block_rows(self) -> int:
        """Rows of a thread block's tile."""
        return ROWS // 2 if self.alternating else ROWS

    @property
    def rows(self) -> int:
        """Rows of a cluster's tile."""
        return self.block_rows * self.cluster


class Sizes(NamedTuple):
    """Rows (of a weight gradient), columns and summed length (of ragged rows) of a result."""

    rows: Int32
    columns: Int32
    depth: Int32


class Place(NamedTuple):
    """Where a tile stands: its rows are `first` and up to `end`, of an expert whose rows begin at `start`.

    column: first column; depth: what is summed over.
    """

    expert: Int32
    start: Int32
    first: Int32
    end: Int32
    column: Int32
    depth: Int32


def _layout(rows: int, stages: int, along_depth: bool) -> Any:
    """Shared-memory layout of a ring of tiles, for the operand's contiguous dimension; 128-byte swizzle."""
    kind = warpgroup.SmemLayoutAtomKind.K_SW128 if along_depth else warpgroup.SmemLayoutAtomKind.MN_SW128
    atom = warpgroup.make_smem_layout_atom(kind, BFloat16)
    return cute.tile_to_shape(atom, (rows, DEPTH, stages), order=(0, 1, 2) if along_depth else (1, 0, 2))


def _tiles(length: Int32, tile: int) -> Int32:
    return (length + (tile - 1)) // tile


@dataclass(frozen=True)
class RaggedRows:
    """x [capacity, K] times the weights of each row's expert: [E, N, K], or `transposed` [E, K, N].

    The rows of [E, N, K] weights are permuted inside blocks of 32 while they are loaded, so that a thread's
    accumulators are 8 neighbouring columns of each block (wgmma itself spreads them as pairs over the block; PTX ISA,
    wgmma, "Register Fragments and Shared Memory Matrix Layouts").
    """

    transposed: bool = False
    ragged_depth = False
    summed_rows = False

    @property
    def majors(self) -> tuple[OperandMajorMode, OperandMajorMode]:
        return OperandMajorMode.K, OperandMajorMode.MN if self.transposed else OperandMajorMode.K

    @property
    def spread(self) -> bool:
        """Whether accumulators stand as wgmma spreads them."""
        return self.transposed

    def left_layout(self, tiling: Tiling) -> Any:
        return _layout(tiling.block_rows, tiling.stages, True)

    def right_layout(self, tiling: Tiling) -> Any:
        return _layout(tiling.columns, tiling.stages, not self.transposed)

    def sizes(self, x: cute.Tensor, weights: cute.Tensor) -> Sizes:
        columns = weights.shape[2] if self.transposed else weights.shape[1]
        return Sizes(Int32(0), columns, x.shape[1])

    def most_tiles(
        self, x: cute.Tensor, weights: cute.Tensor, offsets: cute.Tensor, sizes: Sizes, tiling: Tiling
    ) -> Int32:
        """As many tiles as any distribution has."""
        return (x.shape[0] // tiling.rows + weights.shape[0]) * _tiles(sizes.columns, tiling.columns)

    def left(self, x: cute.Tensor) -> cute.Tensor:
        """The left matrix as [rows, depth]."""
        return x

    def right(self, weights: cute.Tensor) -> cute.Tensor:
        """The right matrix as [columns, depth], of all experts."""
        experts, first, second = weights.shape
        stride = Int64(second)
        if self.transposed:
            layout = cute.make_layout((second, first, experts), stride=(1, stride, stride * first))
        else:
            blocks = experts * (first // BLOCK)
            layout = cute.make_layout(
                (((2, 4, 4), blocks), second), stride=(((stride, 8 * stride, 2 * stride), BLOCK * stride), 1)
            )
        return cute.make_tensor(weights.iterator, layout)

    def left_source(self, left: cute.Tensor, place: Place, row: Int32) -> cute.Tensor:
        """The left matrix from row `row` on."""
        return cute.domain_offset((row, 0), left)

    def right_source(self, right: cute.Tensor, place: Place, sizes: Sizes) -> cute.Tensor:
        """The right matrix from the place's first column on."""
        if self.transposed:
            return cute.domain_offset((place.column, 0), right[None, None, place.expert])
        block = (place.expert * sizes.columns + place.column) // BLOCK
        return cute.domain_offset((((0, 0, 0), block), 0), right)

    def row_tiles(self, offsets: cute.Tensor, counts: MaybeTensor, sizes: Sizes, tiling: Tiling, lane: Int32) -> Int32:
        """Row tiles of a whole column of tiles."""
        return count_row_tiles(offsets, counts, tiling.rows, lane)

    def tiles(self, offsets: cute.Tensor, row_tiles: Int32, sizes: Sizes, tiling: Tiling) -> Int32:
        """All tiles."""
        return row_tiles * _tiles(sizes.columns, tiling.columns)

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
        row_tile, column_tile = locate_columns(index, row_tiles, _tiles(sizes.columns, tiling.columns), tiling.group)
        expert, start, first, end = find_row_tile(offsets, counts, row_tile, tiling.rows, lane)
        return Place(expert, start, first, end, column_tile * tiling.columns, sizes.depth)


@dataclass(frozen=True)
class RaggedDepth:
    """For each expert the transpose of its rows of grad [capacity, N] times its rows of x [capacity, K]: [E, N, K].

    dense: whether column-wise blocks of tokens have no spare rows, see
    `moe_numerics.reference.ragged.Experts.colwise_row`.
    """

    dense: bool = False
    spread = True
    ragged_depth = True
    summed_rows = True

    @property
    def majors(self) -> tuple[OperandMajorMode, OperandMajorMode]:
        return OperandMajorMode.MN, OperandMajorMode.MN

    def left_layout(self, tiling: Tiling) -> Any:
        return _layout(ROWS, tiling.stages, False)

    def right_layout(self, tiling: Tiling) -> Any:
        return _layout(tiling.columns, tiling.stages, False)

    def sizes(self, grad: cute.Tensor, x: cute.Tensor) -> Sizes:
        return Sizes(grad.shape[1], x.shape[1], Int32(0))

    def most_tiles(
        self, grad: cute.Tensor, x: cute.Tensor, offsets: cute.Tensor, sizes: Sizes, tiling: Tiling
    ) -> Int32:
        """As many tiles as any distribution has."""
        return self.tiles(offsets, _tiles(sizes.rows, tiling.rows), sizes, tiling)

    @staticmethod
    def _transposed(matrix: cute.Tensor) -> cute.Tensor:
        rows, columns = matrix.shape
        return cute.make_tensor(matrix.iterator, cute.make_layout((columns, rows), stride=(1, Int64(columns))))

    def left(self, grad: cute.Tensor) -> cute.Tensor:
        """The left matrix as [rows, depth]."""
        return self._transposed(grad)

    def right(self, x: cute.Tensor) -> cute.Tensor:
        """The right matrix as [columns, depth]."""
        return self._transposed(x)

    def left_source(self, left: cute.Tensor, place: Place, row: Int32) -> cute.Tensor:
        """The left matrix from row `row` and the expert's first token on."""
        return cute.domain_offset((row, place.start), left)

    def right_source(self, right: cute.Tensor, place: Place, sizes: Sizes) -> cute.Tensor:
        """The right matrix from the place's first column and the expert's first token on."""
        return cute.domain_offset((place.column, place.start), right)

    def row_tiles(self, offsets: cute.Tensor, counts: MaybeTensor, sizes: Sizes, tiling: Tiling, lane: Int32) -> Int32:
        """Row tiles of one expert's gradient."""
        return _tiles(sizes.rows, tiling.rows)

    def tiles(self, offsets: cute.Tensor, row_tiles: Int32, sizes: Sizes, tiling: Tiling) -> Int32:
        """All tiles."""
        return row_tiles * _tiles(sizes.columns, tiling.columns) * (offsets.shape[0] - 1)

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
        column_tiles = _tiles(sizes.columns, tiling.columns)
        expert = index // (row_tiles * column_tiles)
        row_tile, column_tile = locate_columns(
            index - expert * (row_tiles * column_tiles), row_tiles, column_tiles, tiling.group
        )
        start, end = expert_rows(offsets, counts, expert)
        return Place(expert, start, row_tile * tiling.rows, sizes.rows, column_tile * tiling.columns, end - start)
