"""Main loops of transposed column-wise NVFP4: a thread holds 16 rows of four columns, which it can rotate in registers.

A tile is 128 rows by 128 columns, a warp for each 16-row block. Codes and scales go through shared memory, so that
neighbouring lanes write the neighbouring blocks of a column. 16x16 tiles exchange their maxima by shuffles.

Rows past an expert's end count as zeros: a column-wise block that the expert does not fill is filled up with them.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32
from moe_numerics.fused.memory import MaybeTensor, load_words, select, store_words, unpack_bf16
from moe_numerics.fused.nvfp4 import BLOCK, SCALE_CODES, random_block
from moe_numerics.fused.ragged import SLOTS_PER_LAYER, locate_tile, raise_amax
from moe_numerics.fused.rowwise import amax_cell, multiplier_table
from moe_numerics.fused.scale_layout import store_scale

__all__ = ["COLUMNS", "ROWS", "THREADS", "amax_kernel", "colwise_kernel"]

_WARP = 32
THREADS = 256
WARPS = THREADS // _WARP
VECTOR = 4
COLUMNS = _WARP * VECTOR
ROWS = WARPS * BLOCK

# In shared memory, code words of column 4 * lane + j begin at j * _PLANE + lane * _LINE, a block after the other. So a
# half-warp that writes a block of its 16 lanes, and one that reads the 8 blocks of two columns, meets each bank once.
_LINE = 2 * WARPS + 2
_PLANE = _WARP * _LINE + _WARP // 2


@cute.jit
def _load_rows(x: cute.Tensor, row: Int32, end: Int32, column: Int32, hidden: Int32, words: cute.Tensor) -> None:
    """16 rows of four neighbouring columns from `row` on, packed, in registers; rows from `end` on are zeros."""
    start = x.iterator + (Int64(row) * hidden + column)
    if row + BLOCK <= end:
        for i in cutlass.range_constexpr(BLOCK):
            words[i, 0], words[i, 1] = load_words(start + cute.assume(i * hidden, divby=VECTOR), VECTOR // 2)
    else:
        for i in cutlass.range_constexpr(BLOCK):
            nearest = cutlass.min(Int32(i), end - 1 - row)
            low, high = load_words(start + cute.assume(nearest * hidden, divby=VECTOR), VECTOR // 2)
            words[i, 0] = select(row + i < end, low, Uint32(0))
            words[i, 1] = select(row + i < end, high, Uint32(0))


def _register_rows() -> cute.Tensor:
    """Registers for what `_load_rows` gives."""
    return cute.make_rmem_tensor((BLOCK, VECTOR // 2), Uint32)


def _column(words: cute.Tensor, j: int, rotation: Any) -> list[Float32]:
    """Column j of what `_load_rows` gave, rotated but for the factor if there is a rotation."""
    values = [unpack_bf16([Uint32(words[i, j // 2])])[j % 2] for i in range(BLOCK)]
    return values if rotation is None else rotation.sums(values)


def _factor(rotation: Any) -> float:
    """What `_column` leaves to be multiplied by."""
    return 1.0 if rotation is None else rotation.factor


def _largest(quantizer: Any, values: list[Float32], rotation: Any) -> Float32:
    """Largest magnitude of a column that `_column` gave."""
    largest = quantizer.largest(values)
    return largest if _factor(rotation) == 1.0 else largest * Float32(_factor(rotation))


@cute.kernel
def amax_kernel(
    quantizer: cutlass.Constexpr,
    rotation: cutlass.Constexpr,
    hidden: Int32,
    x: cute.Tensor,
    offsets: cute.Tensor,
    counts: MaybeTensor,
    amax_plain: MaybeTensor,
    amax_rotated: MaybeTensor,
) -> None:
    """Amax of x and of its rotated column blocks: blockIdx.x is the column tile, y and z the slot of 128 rows."""
    thread, _, _ = cute.arch.thread_idx()
    column_tile, low, high = cute.arch.block_idx()
    lane = thread % _WARP
    expert, first, end = locate_tile(offsets, counts, low + high * SLOTS_PER_LAYER, ROWS, lane)
    if first < end:
        row = first + thread // _WARP * BLOCK
        column = cute.assume(cutlass.min(column_tile * COLUMNS + VECTOR * lane, hidden - VECTOR), divby=VECTOR)
        if row < end:
            rows = _register_rows()
            _load_rows(x, row, end, column, hidden, rows)
            for amax, own in ((amax_plain, None), (amax_rotated, rotation)):
                if cutlass.const_expr(amax is not None):
                    largest = Float32(0.0)
                    for j in cutlass.range_constexpr(VECTOR):
                        largest = quantizer.magnitude_max(largest, _largest(quantizer, _column(rows, j, own), own))
                    raise_amax(amax_cell(quantizer, amax, expert), largest, lane)


@cute.kernel
def colwise_kernel(
    quantizer: cutlass.Constexpr,
    rotation: cutlass.Constexpr,
    block2d: cutlass.Constexpr,
    dense: cutlass.Constexpr,
    swizzled: cutlass.Constexpr,
    stream: cutlass.Constexpr,
    hidden: Int32,
    x: cute.Tensor,
    offsets: cute.Tensor,
    counts: MaybeTensor,
    seed: MaybeTensor,
    amax: cute.Tensor,
    codes: cute.Tensor,
    scales: cute.Tensor,
) -> None:
    """Transposed column-wise copy: blockIdx.x is the tile of 128 columns, y and z the slot of 128 rows."""
    thread, _, _ = cute.arch.thread_idx()
    column_tile, low, high = cute.arch.block_idx()
    lane = thread % _WARP
    warp = thread // _WARP
    expert, first, end = locate_tile(offsets, counts, low + high * SLOTS_PER_LAYER, ROWS, lane)
    if first < end:
        memory = cutlass.memory.SmemAllocator()
        table = memory.allocate_tensor(Float32, cute.make_layout(SCALE_CODES), 16)
        staged_codes = memory.allocate_tensor(Uint32, cute.make_layout(VECTOR * _PLANE), 16)
        staged_scales = memory.allocate_tensor(Uint8, cute.make_layout(COLUMNS * WARPS), 16)
        scale = quantizer.global_scale(Float32(cute.arch.load(amax_cell(quantizer, amax, expert), Float32)))
        multiplier_table(quantizer, scale, table, thread)
        cute.arch.sync_threads()
        row = first + warp * BLOCK
        start = Int32(offsets[expert])
        if row < end:
            column = column_tile * COLUMNS + VECTOR * lane
            nearest = cute.assume(cutlass.min(column, hidden - VECTOR), divby=VECTOR)
            rows = _register_rows()
            _load_rows(x, row, end, nearest, hidden, rows)
            of_tile = Float32(0.0)
            if cutlass.const_expr(block2d):
                for j in cutlass.range_constexpr(VECTOR):
                    of_tile = quantizer.magnitude_max(of_tile, quantizer.largest(_column(rows, j, None)))
                for distance in cutlass.range_constexpr(2):
                    of_tile = quantizer.magnitude_max(of_tile, cute.arch.shuffle_sync_bfly(of_tile, 1 << distance))
            by_tile = block2d and quantizer.four_over_six is not None
            results: list[Any] = []
            if cutlass.const_expr(by_tile):
                results = _tile_candidates(quantizer, rows, of_tile, scale, table)
            for j in cutlass.range_constexpr(VECTOR):
                if cutlass.const_expr(not by_tile):
                    values = _column(rows, j, rotation)
                    largest = of_tile if block2d else _largest(quantizer, values, rotation)
                    bits = None
                    if cutlass.const_expr(quantizer.stochastic_bits is not None):
                        bits = random_block(stream, seed, expert, row - start, column + j, quantizer.stochastic_bits)
                    code, words = quantizer.quantize(
                        values, largest, scale, lambda code: Float32(table[code.to(Int32)]), bits, _factor(rotation)
                    )
                else:
                    code, words = results[j]
                if cutlass.const_expr(rotation is None):
                    words = _without_rows_past(words, end - row)
                store_words(staged_codes.iterator + (j * _PLANE + lane * _LINE + 2 * warp), words)
                staged_scales[(VECTOR * lane + j) * WARPS + warp] = code.to(Uint8)
        cute.arch.sync_threads()

        first_block = start // BLOCK + (first - start) // BLOCK
        if cutlass.const_expr(not dense):
            first_block += expert
        own = thread % WARPS
        block = first_block + own
        for i in cutlass.range_constexpr(COLUMNS * WARPS // THREADS):
            line = thread // WARPS + i * (THREADS // WARPS)
            column = column_tile * COLUMNS + line
            if column < hidden and first + own * BLOCK < end:
                place = line % VECTOR * _PLANE + line // VECTOR * _LINE + 2 * own
                words = [staged_codes[place], staged_codes[place + 1]]
                store_words(codes.iterator + (Int64(column) * codes.shape[1] + block * (BLOCK // 2)), words)
                code = staged_scales[line * WARPS + own]
                if cutlass.const_expr(swizzled):
                    store_scale(scales, column, block, codes.shape[1] // (BLOCK // 2), code.to(Uint32))
                else:
                    scales[column, block] = code


def _tile_candidates(
    quantizer: Any, rows: cute.Tensor, of_tile: Float32, scale: Any, table: cute.Tensor
) -> list[tuple[Uint32, list[Uint32]]]:
    """Scale code and codes of each of a thread's columns, under the scale with the smaller error of the 16x16 tile.

    Columns are added 8, 4, 2 and 1 apart: a thread has four neighbours, four lanes a tile.
    """
    tried = [
        quantizer.candidates(_column(rows, j, None), of_tile, scale, lambda code: Float32(table[code.to(Int32)]))
        for j in range(VECTOR)
    ]
    totals = []
    for which in range(2):
        lines = [candidates[which].error for candidates in tried]
        for distance in (2, 1):
            lines = [line + cute.arch.shuffle_sync_bfly(line, distance) for line in lines]
        totals.append((lines[0] + lines[2]) + (lines[1] + lines[3]))
    return [quantizer.chosen(six, four, totals[0], totals[1]) for six, four in tried]


def _without_rows_past(words: list[Uint32], rows: Int32) -> list[Uint32]:
    """The code words of 16 rows with code 0 from row number `rows` on."""
    kept = []
    for half, word in enumerate(words):
        present = cutlass.min(cutlass.max(rows - 8 * half, Int32(0)), Int32(8)).to(Uint32)
        mask = select(present == Uint32(8), Uint32(0xFFFFFFFF), (Uint32(1) << (present * 4)) - Uint32(1))
        kept.append(word & mask)
    return kept
