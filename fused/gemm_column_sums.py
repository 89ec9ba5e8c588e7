"""Sums over an expert's rows (dbias) in an epilogue, in one order for every run and every distribution.

The order is that of `moe_numerics.reference.grouped_mlp.sum_over_rows`: inside 128 rows of an expert neighbours are
added, then pairs, fours and so on: bits 0 to 2 of a row are lanes, bit 3 is a thread's second row, bits 4 and 5 are
warps. The sums of a warpgroup's 64 rows go to memory; a second kernel adds those of each 128 rows, and the results in
ascending order. So nothing depends on which warpgroups have the two halves of 128 rows.
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

# A warpgroup's rows and warps.
ROWS = 64
WARPS = 4
THREADS = WARPS * 32
GROUPS = 2
# One for each warpgroup; barriers 1 to 7 have other uses.
FIRST_BARRIER = 8
SUM_THREADS = 128


def part_rows(capacity: int, experts: int) -> int:
    """Rows of the buffer of sums of 64 rows: part j of an expert is row `start // 64 + expert + j`."""
    return capacity // ROWS + experts


class ColumnSums:
    """Shared memory for the sums of every warp's 16 rows: of each stream, `columns` columns."""

    def __init__(self, memory: Any, streams: int, columns: int):
        self.streams, self.columns = streams, columns
        self.sums = memory.allocate_tensor(Float32, cute.make_layout(GROUPS * WARPS * streams * columns), 16)


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
    """Add the sums of a warpgroup's warps and store them, if it has a valid row; streams' blocks alternate in `parts`.

    All threads of a warpgroup call this together; `shift` as of `write`.
    """
    streams = shared.streams
    group = thread // THREADS
    first = place.first + shift + group * ROWS
    cute.arch.barrier(barrier_id=FIRST_BARRIER + group, number_of_threads=THREADS)
    if first < place.end:
        row = place.start // ROWS + place.expert + (first - place.start) // ROWS
        for entry in cutlass.range(thread % THREADS, streams * shared.columns, THREADS, unroll=1):
            stream = entry // shared.columns
            column = entry % shared.columns
            warps = [
                shared.sums[((group * WARPS + warp) * streams + stream) * shared.columns + column]
                for warp in range(WARPS)
            ]
            total = _tree_sum(warps)
            if place.column + column < columns:
                block = (place.column + column) // BLOCK
                parts[row, (block * streams + stream) * BLOCK + column % BLOCK] = total
    cute.arch.barrier(barrier_id=FIRST_BARRIER + group, number_of_threads=THREADS)


@cute.jit
def _sum_of_pair(parts: cute.Tensor, first: Int32, last: Int32, column: Int32) -> Float32:
    """Sum of 128 rows from its two parts, the second of which may not exist and counts as +0."""
    second = Float32(0.0)
    if first < last:
        second = Float32(parts[first + 1, column])
    return Float32(parts[first, column]) + second


@cute.kernel
def sum_parts_kernel(parts: cute.Tensor, offsets: cute.Tensor, counts: MaybeTensor, sums: cute.Tensor) -> None:
    """Sum of an expert's parts, one thread a column; 0 for an expert without rows."""
    thread, _, _ = cute.arch.thread_idx()
    block, expert, _ = cute.arch.block_idx()
    column = block * SUM_THREADS + thread
    if column < sums.shape[1]:
        start, end = expert_rows(offsets, counts, expert)
        row = start // ROWS + expert
        last = row + (end - start + (ROWS - 1)) // ROWS - 1
        total = Float32(0.0)
        if end > start:
            total = _sum_of_pair(parts, row, last, column)
            for pair in range(row + 2, last + 1, 2):
                total += _sum_of_pair(parts, pair, last, column)
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
