"""Which tile of a grouped GEMM a persistent thread block works on, found on the device from the token offsets.

Row tiles never cross experts. They are numbered without gaps, expert after expert, by a prefix sum over the experts'
tile counts that a warp computes with shuffles: so tiles are spread evenly over thread blocks for every distribution,
and the host never needs to know it.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from moe_numerics.fused.memory import MaybeTensor, select

__all__ = ["count_row_tiles", "expert_rows", "find_row_tile", "locate_columns"]

LANES = 32


def expert_rows(offsets: cute.Tensor, counts: MaybeTensor, expert: Int32) -> tuple[Int32, Int32]:
    """First row of an expert and its end, one past the last valid row."""
    start = Int32(offsets[expert])
    if counts is None:
        return start, Int32(offsets[expert + 1])
    return start, start + Int32(counts[expert])


def _inclusive_sum(value: Int32, lane: Int32) -> Int32:
    """Sum over the lanes up to this one."""
    for distance in (1, 2, 4, 8, 16):
        below = cute.arch.shuffle_sync_up(value, distance, mask_and_clamp=0)
        value = value + select(lane >= distance, below, Int32(0))
    return value


@cute.jit
def _tiles_of(offsets: cute.Tensor, counts: MaybeTensor, expert: Int32, rows: cutlass.Constexpr) -> Int32:
    tiles = Int32(0)
    if expert < offsets.shape[0] - 1:
        start, end = expert_rows(offsets, counts, expert)
        tiles = (end - start + (rows - 1)) // rows
    return tiles


@cute.jit
def count_row_tiles(offsets: cute.Tensor, counts: MaybeTensor, rows: cutlass.Constexpr, lane: Int32) -> Int32:
    """Row tiles of all experts. All lanes of a warp call this together."""
    total = Int32(0)
    for base in range(0, offsets.shape[0] - 1, LANES):
        summed = _inclusive_sum(_tiles_of(offsets, counts, base + lane, rows), lane)
        total += cute.arch.shuffle_sync(summed, LANES - 1)
    return total


@cute.jit
def find_row_tile(
    offsets: cute.Tensor, counts: MaybeTensor, tile: Int32, rows: cutlass.Constexpr, lane: Int32
) -> tuple[Int32, Int32, Int32, Int32]:
    """Expert of row tile number `tile`, the expert's first row, the tile's first row and the expert's end.

    The tile may reach beyond the end. All lanes of a warp call this together.
    """
    before = Int32(0)
    expert = Int32(0)
    within = Int32(0)
    for base in range(0, offsets.shape[0] - 1, LANES):
        own = _tiles_of(offsets, counts, base + lane, rows)
        summed = _inclusive_sum(own, lane) + before
        holds = Boolean(False)
        if summed > tile:
            holds = summed - own <= tile
        ballot = cute.arch.vote_ballot_sync(holds)
        if ballot != 0:
            winner = cute.arch.popc(ballot - 1)
            expert = base + winner
            within = tile - cute.arch.shuffle_sync(summed - own, winner)
        before = cute.arch.shuffle_sync(summed, LANES - 1)
    start, end = expert_rows(offsets, counts, expert)
    return expert, start, start + within * rows, end


@cute.jit
def locate_columns(
    index: Int32, row_tiles: Int32, column_tiles: Int32, group: cutlass.Constexpr
) -> tuple[Int32, Int32]:
    """Row tile and column tile of tile number `index`, of `row_tiles * column_tiles`.

    `group` column tiles are gone through for one row tile before the next: neighbours in time share operands in L2.
    """
    before = index // (row_tiles * group)
    within = index - before * (row_tiles * group)
    width = cutlass.min(column_tiles - before * group, Int32(group))
    row_tile = within // width
    return row_tile, before * group + (within - row_tile * width)
