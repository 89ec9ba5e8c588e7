"""Main loops of the NVFP4 kernels: rows of 16 columns in a thread, and 16 rows of two columns in a thread.

The first loop writes row-wise copies: a thread holds one 1x16 block, so an amax needs no shuffle. The second writes
transposed column-wise copies: a thread holds a 16-row block of two neighbouring columns, which it can rotate in
registers. 16x16 tiles exchange their 16 maxima through shared memory in the first loop, by shuffles in the second.

Rows past an expert's end count as zeros: a column-wise block that the expert does not fill is filled up with them.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32
from moe_numerics.fused.memory import MaybeTensor, load_words, select, store_words, unpack_bf16
from moe_numerics.fused.nvfp4 import BLOCK
from moe_numerics.fused.philox import philox, unpack_bits
from moe_numerics.fused.ragged import SLOTS_PER_LAYER, locate_tile, raise_amax
from moe_numerics.fused.scale_layout import store_scale

__all__ = [
    "COLUMNS",
    "LINE_COLUMNS",
    "LINE_ROWS",
    "ROWS",
    "THREADS",
    "amax_kernel",
    "colwise_kernel",
    "row_amax_kernel",
    "rowwise_kernel",
]

THREADS = 128

# Row-wise: 8 threads side by side, 16 rows of threads, two rows a thread.
LINE_COLUMNS = 128
LINE_ROWS = 32
_LINE_THREADS = LINE_COLUMNS // BLOCK

# Column-wise: a warp has 64 columns of one 16-row block, the four warps the four blocks of 64 rows.
COLUMNS = 64
ROWS = 64
_WARP = 32

# Row amax: columns that a thread loads at once.
_VECTOR = 8


def _load_columns(x: cute.Tensor, row: Int32, end: Int32, column: Int32, hidden: Int32) -> list[list[Float32]]:
    """16 rows of two neighbouring columns from `row` on, as [column][row]; rows from `end` on are zeros."""
    columns: list[list[Float32]] = [[], []]
    for i in range(BLOCK):
        inside = row + i < end
        nearest = cutlass.min(row + i, end - 1)
        word = load_words(x.iterator + (Int64(nearest) * hidden + column), 1)[0]
        for values, value in zip(columns, unpack_bf16([select(inside, word, Uint32(0))]), strict=True):
            values.append(value)
    return columns


def _zero_amax() -> Float32:
    return Float32(0.0)


def _amax_cell(quantizer: Any, amax: cute.Tensor, expert: Int32) -> cute.Pointer:
    return amax.iterator + (expert if quantizer.per_expert else 0)


def _random(stream: int, seed: cute.Tensor, expert: Int32, along: Int32, across: Int32, width: int) -> list[Uint32]:
    """Random bits of 16 neighbours from position `along` on, a multiple of 16, at position `across`."""
    calls = BLOCK * width // 128
    key = Uint32(seed[0]), Uint32(seed[1])
    numbers: list[Uint32] = []
    for call in range(calls):
        counter = (
            (along // (128 // width) + call).to(Uint32),
            across.to(Uint32),
            expert.to(Uint32) + Uint32(stream << 16),
            Uint32(0),
        )
        numbers += unpack_bits(philox(counter, key), width)
    return numbers


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
    """Amax of x and of its rotated column blocks: blockIdx.x is the column tile, y and z the slot of 64 rows."""
    thread, _, _ = cute.arch.thread_idx()
    column_tile, low, high = cute.arch.block_idx()
    lane = thread % _WARP
    expert, first, end = locate_tile(offsets, counts, low + high * SLOTS_PER_LAYER, ROWS, lane)
    if first < end:
        row = first + thread // _WARP * BLOCK
        column = cute.assume(cutlass.min(column_tile * COLUMNS + 2 * lane, hidden - 2), divby=2)
        if row < end:
            columns = _load_columns(x, row, end, column, hidden)
            if cutlass.const_expr(amax_plain is not None):
                largest = quantizer.magnitude_max(quantizer.largest(columns[0]), quantizer.largest(columns[1]))
                raise_amax(_amax_cell(quantizer, amax_plain, expert), largest, lane)
            if cutlass.const_expr(amax_rotated is not None):
                largest = quantizer.magnitude_max(
                    quantizer.largest(rotation.apply(columns[0])), quantizer.largest(rotation.apply(columns[1]))
                )
                raise_amax(_amax_cell(quantizer, amax_rotated, expert), largest, lane)


@cute.kernel
def row_amax_kernel(
    quantizer: cutlass.Constexpr,
    hidden: Int32,
    x: cute.Tensor,
    offsets: cute.Tensor,
    counts: MaybeTensor,
    amax: cute.Tensor,
) -> None:
    """Amax of each row of x, a warp a row: blockIdx.y and z are the slot of 32 rows."""
    thread, _, _ = cute.arch.thread_idx()
    _, low, high = cute.arch.block_idx()
    lane = thread % _WARP
    _, first, end = locate_tile(offsets, counts, low + high * SLOTS_PER_LAYER, LINE_ROWS, lane)
    for i in cutlass.range_constexpr(LINE_ROWS // (THREADS // _WARP)):
        row = first + thread // _WARP + i * (THREADS // _WARP)
        if row < end:
            largest = Float32(0.0)
            for column in range(lane * _VECTOR, hidden, _WARP * _VECTOR):
                words = load_words(x.iterator + (Int64(row) * hidden + cute.assume(column, divby=_VECTOR)), 4)
                largest = quantizer.magnitude_max(largest, quantizer.largest(unpack_bf16(words)))
            bits = cute.arch.warp_redux_sync(largest.bitcast(Uint32), "umax")
            if lane == 0:
                amax[row] = bits.bitcast(Float32)


@cute.kernel
def rowwise_kernel(
    quantizer: cutlass.Constexpr,
    block2d: cutlass.Constexpr,
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
    """Row-wise copy: blockIdx.x is the tile of 128 columns, y and z the slot of 32 rows.

    amax: of the tensor, of each expert, or (row-scaled) of each row.
    """
    thread, _, _ = cute.arch.thread_idx()
    column_tile, low, high = cute.arch.block_idx()
    expert, first, end = locate_tile(offsets, counts, low + high * SLOTS_PER_LAYER, LINE_ROWS, thread % _WARP)
    if first < end:
        memory = cutlass.memory.SmemAllocator()
        shared = memory.allocate_tensor(Float32, cute.make_layout(LINE_ROWS * _LINE_THREADS), 16)
        scale = None
        if cutlass.const_expr(not quantizer.row_scaled):
            scale = quantizer.global_scale(Float32(cute.arch.load(_amax_cell(quantizer, amax, expert), Float32)))
        own = thread % _LINE_THREADS
        block = column_tile * _LINE_THREADS + own
        column = block * BLOCK
        inside = column < hidden
        nearest = cute.assume(cutlass.min(column, hidden - BLOCK), divby=BLOCK)
        held = []
        for i in cutlass.range_constexpr(LINE_ROWS // (THREADS // _LINE_THREADS)):
            line = thread // _LINE_THREADS + i * (THREADS // _LINE_THREADS)
            row = first + line
            pointer = x.iterator + (Int64(cutlass.min(row, end - 1)) * hidden + nearest)
            words = load_words(pointer, 4) + load_words(pointer + 8, 4)
            valid = row < end
            values = unpack_bf16(words)
            largest = select(valid, quantizer.largest(values), _zero_amax())
            held.append((line, row, values, largest))
            if cutlass.const_expr(block2d):
                shared[line * _LINE_THREADS + own] = largest
        if cutlass.const_expr(block2d):
            cute.arch.sync_threads()
        for i in cutlass.range_constexpr(LINE_ROWS // (THREADS // _LINE_THREADS)):
            line, row, values, largest = held[i]
            if cutlass.const_expr(block2d):
                largest = _zero_amax()
                for j in cutlass.range_constexpr(BLOCK):
                    other = (line // BLOCK * BLOCK + j) * _LINE_THREADS + own
                    largest = quantizer.magnitude_max(largest, shared[other])
            if cutlass.const_expr(quantizer.row_scaled):
                cell = amax.iterator + cutlass.min(row, end - 1)
                scale = quantizer.global_scale(Float32(cute.arch.load(cell, Float32)))
            if cutlass.const_expr(quantizer.four_over_six is not None):
                code, words = quantizer.four_or_six(values, largest, scale)
            else:
                code = quantizer.scale_code(largest, scale)
                bits = None
                if cutlass.const_expr(quantizer.stochastic_bits is not None):
                    index = row - Int32(offsets[expert])
                    bits = _random(stream, seed, expert, column, index, quantizer.stochastic_bits)
                words = quantizer.encode(values, quantizer.multiplier(code, scale), bits)
            pointer = codes.iterator + (Int64(row) * (hidden // 2) + block * (BLOCK // 2))
            if inside and row < end:
                store_words(pointer, words)
                if cutlass.const_expr(swizzled):
                    store_scale(scales, row, block, hidden // BLOCK, code)
                else:
                    scales[row, block] = code.to(Uint8)


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
    """Transposed column-wise copy: blockIdx.x is the tile of 64 columns, y and z the slot of 64 rows."""
    thread, _, _ = cute.arch.thread_idx()
    column_tile, low, high = cute.arch.block_idx()
    lane = thread % _WARP
    expert, first, end = locate_tile(offsets, counts, low + high * SLOTS_PER_LAYER, ROWS, lane)
    if first < end:
        row = first + thread // _WARP * BLOCK
        column = column_tile * COLUMNS + 2 * lane
        inside = column < hidden
        nearest = cute.assume(cutlass.min(column, hidden - 2), divby=2)
        if row < end:
            start = Int32(offsets[expert])
            scale = quantizer.global_scale(Float32(cute.arch.load(_amax_cell(quantizer, amax, expert), Float32)))
            columns = _load_columns(x, row, end, nearest, hidden)
            if cutlass.const_expr(rotation is not None):
                columns = [rotation.apply(columns[0]), rotation.apply(columns[1])]
            largest = [quantizer.largest(columns[0]), quantizer.largest(columns[1])]
            if cutlass.const_expr(block2d):
                tile = quantizer.magnitude_max(largest[0], largest[1])
                for distance in cutlass.range_constexpr(3):
                    tile = quantizer.magnitude_max(tile, cute.arch.shuffle_sync_bfly(tile, 1 << distance))
                largest = [tile, tile]
            block = start // BLOCK + (row - start) // BLOCK
            if cutlass.const_expr(not dense):
                block += expert
            for j in cutlass.range_constexpr(2):
                if cutlass.const_expr(quantizer.four_over_six is not None):
                    code, words = quantizer.four_or_six(columns[j], largest[j], scale)
                else:
                    code = quantizer.scale_code(largest[j], scale)
                    bits = None
                    if cutlass.const_expr(quantizer.stochastic_bits is not None):
                        bits = _random(stream, seed, expert, row - start, column + j, quantizer.stochastic_bits)
                    words = quantizer.encode(columns[j], quantizer.multiplier(code, scale), bits)
                if cutlass.const_expr(rotation is None):
                    words = _without_rows_past(words, end - row)
                pointer = codes.iterator + (Int64(column + j) * codes.shape[1] + block * (BLOCK // 2))
                if inside:
                    store_words(pointer, words)
                    if cutlass.const_expr(swizzled):
                        store_scale(scales, column + j, block, codes.shape[1] // (BLOCK // 2), code)
                    else:
                        scales[column + j, block] = code.to(Uint8)


def _without_rows_past(words: list[Uint32], rows: Int32) -> list[Uint32]:
    """The code words of 16 rows with code 0 from row number `rows` on."""
    kept = []
    for half, word in enumerate(words):
        present = cutlass.min(cutlass.max(rows - 8 * half, Int32(0)), Int32(8)).to(Uint32)
        mask = select(present == Uint32(8), Uint32(0xFFFFFFFF), (Uint32(1) << (present * 4)) - Uint32(1))
        kept.append(word & mask)
    return kept
