"""Sums over an expert's rows (dbias) in an epilogue, in one order for every run and every distribution.

The order is that of `moe_numerics.reference.grouped_mlp.sum_over_rows`: inside 128 rows of an expert neighbours are
added, then pairs, fours and so on: bits 0 to 2 of a row are lanes, bit 3 is a thread's second row, bits 4 and 5 are
warps, bit 6 the warpgroup. The sums of 128 rows go to memory, and a second kernel adds them in ascending order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from moe_numerics.fused.gemm_epilogue import BLOCK, VECTOR
from moe_numerics.fused.gemm_schedule import expert_rows
from moe_numerics.fused.memory import MaybeTensor, select

__all__ = ["ColumnSums", "add_columns", "launch_sum_parts", "part_rows", "write_parts"]

ROWS = 128
WARPS = 8
THREADS = WARPS * 32
# Of all warps that multiply; the main loop's own use of it is over when an epilogue begins.
BARRIER = 5
SUM_THREADS = 128


def part_rows(capacity: int, experts: int) -> int:
    """Rows of the buffer of sums of 128 rows: part j of an expert is row `start // 128 + expert + j`."""
    return capacity // ROWS + experts


class ColumnSums:
    """Shared memory for the sums of every warp's 16 rows: of each stream, `columns` columns."""

    def __init__(self, memory: Any, streams: int, columns: int):
        self.streams, self.columns = streams, columns
        self.sums = memory.allocate_tensor(Float32, cute.make_layout(WARPS * streams * columns), 16)


def add_columns(
    shared: Any, thread: Int32, stream: int, step: Int32, columns: Sequence[tuple[Float32, Float32]]
) -> None:
    """Sum 8 columns of a stream's block number `step`, of which a thread has two rows, over the warp's rows."""
    lane = thread % 32
    halves = []
    for half in range(2):
        values = [column[half] for column in columns]
        for distance in (4, 8, 16):
            upper = (lane & distance) != 0
            count = len(values) // 2
            kept = [select(upper, values[count + j], values[j]) for j in range(count)]
            sent = [select(upper, values[j], values[count + j]) for j in range(count)]
            values = [own + cute.arch.shuffle_sync_bfly(other, distance) for own, other in zip(kept, sent, strict=True)]
        halves.append(values[0])
    column = (lane % 4) * VECTOR + (lane & 4) + ((lane >> 2) & 2) + ((lane >> 4) & 1)
    place = ((thread // 32) * shared.streams + stream) * shared.columns + step * BLOCK + column
    shared.sums[place] = halves[0] + halves[1]


def _tree_sum(values: list[Float32]) -> Float32:
    """Neighbours added, then pairs, and so on."""
    while len(values) > 1:
        values = [first + second for first, second in zip(values[::2], values[1::2], strict=True)]
    return values[0]


@cute.jit
def write_parts(shared: Any, thread: Int32, place: Any, shift: Int32, columns: Int32, parts: cute.Tensor) -> None:
    """Add the warps' sums and store them, if the tile has a valid row; blocks of streams alternate in `parts`."""
    streams = shared.streams
    cute.arch.barrier(barrier_id=BARRIER, number_of_threads=THREADS)
    if place.first + shift < place.end:
        row = place.start // ROWS + place.expert + (place.first + shift - place.start) // ROWS
        for entry in cutlass.range(thread, streams * shared.columns, THREADS, unroll=1):
            stream = entry // shared.columns
            column = entry % shared.columns
            warps = [shared.sums[(warp * streams + stream) * shared.columns + column] for warp in range(WARPS)]
            total = _tree_sum(warps)
            if place.column + column < columns:
                block = (place.column + column) // BLOCK
                parts[row, (block * streams + stream) * BLOCK + column % BLOCK] = total
    cute.arch.barrier(barrier_id=BARRIER, number_of_threads=THREADS)


@cute.kernel
def sum_parts_kernel(parts: cute.Tensor, offsets: cute.Tensor, counts: MaybeTensor, sums: cute.Tensor) -> None:
    """Sum of an expert's parts in ascending order, one thread a column; 0 for an expert without rows."""
    thread, _, _ = cute.arch.thread_idx()
    block, expert, _ = cute.arch.block_idx()
    column = block * SUM_THREADS + thread
    if column < sums.shape[1]:
        start, end = expert_rows(offsets, counts, expert)
        row = start // ROWS + expert
        total = Float32(0.0)
        if end > start:
            total = Float32(parts[row, column])
            for part in range(1, (end - start + (ROWS - 1)) // ROWS):
                total += parts[row + part, column]
        sums[expert, column] = total


@cute.jit
def launch_sum_parts(
    parts: cute.Tensor, offsets: cute.Tensor, counts: MaybeTensor, sums: cute.Tensor, stream: Any
) -> None:
    """Launch `sum_parts_kernel`."""
    sum_parts_kernel(parts, offsets, counts, sums).launch(
        grid=[(sums.shape[1] + SUM_THREADS - 1) // SUM_THREADS, sums.shape[0], 1],
        block=[SUM_THREADS, 1, 1],
        stream=stream,
    )
