"""Main loops of row-wise NVFP4: a thread holds 1x16 blocks, a warp 512 columns of a row.

A block in one thread needs no shuffle for its amax; 16x16 tiles exchange the 16 maxima of a column of blocks through
shared memory. Neighbouring lanes write neighbouring codes and scales, so that whole lines reach memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32
from moe_numerics.fused.memory import MaybeTensor, load_words, select, store_words, unpack_bf16
from moe_numerics.fused.nvfp4 import BLOCK, SCALE_CODES, GlobalScale, random_block
from moe_numerics.fused.ragged import SLOTS_PER_LAYER, locate_tile
from moe_numerics.fused.scale_layout import store_scale

__all__ = ["COLUMNS", "ROWS", "THREADS", "amax_cell", "multiplier_table", "row_amax_kernel", "rowwise_kernel"]

_WARP = 32
THREADS = 128
WARPS = THREADS // _WARP
COLUMNS = _WARP * BLOCK
ROWS = BLOCK
_ROWS_OF_THREAD = ROWS // WARPS

# Row amax: columns that a thread loads at once.
_VECTOR = 8


def amax_cell(quantizer: Any, amax: cute.Tensor, expert: Int32) -> cute.Pointer:
    """Where the amax of an expert is."""
    return amax.iterator + (expert if quantizer.per_expert else 0)


@cute.jit
def multiplier_table(quantizer: cutlass.Constexpr, scale: Any, table: cute.Tensor, thread: Int32) -> None:
    """Write the multiplier of every scale code; the block synchronises before it reads them.

    A division each once a thread, instead of once for each block of 16.
    """
    if thread < SCALE_CODES:
        table[thread] = quantizer.multiplier(thread.to(Uint32), scale)


def _multipliers(quantizer: Any, scale: GlobalScale, table: cute.Tensor | None) -> Callable[[Uint32], Float32]:
    if table is None:
        return lambda code: quantizer.multiplier(code, scale)
    return lambda code: Float32(table[code.to(Int32)])


@cute.kernel
def row_amax_kernel(
    quantizer: cutlass.Constexpr,
    hidden: Int32,
    x: cute.Tensor,
    offsets: cute.Tensor,
    counts: MaybeTensor,
    amax: cute.Tensor,
) -> None:
    """Amax of each row of x, a warp a row: blockIdx.y and z are the slot of 16 rows."""
    thread, _, _ = cute.arch.thread_idx()
    _, low, high = cute.arch.block_idx()
    lane = thread % _WARP
    _, first, end = locate_tile(offsets, counts, low + high * SLOTS_PER_LAYER, ROWS, lane)
    for i in cutlass.range_constexpr(_ROWS_OF_THREAD):
        row = first + thread // _WARP + i * WARPS
        if row < end:
            largest = Float32(0.0)
            for column in range(lane * _VECTOR, hidden, _WARP * _VECTOR):
                words = load_words(x.iterator + (Int64(row) * hidden + cute.assume(column, divby=_VECTOR)), 4)
                largest = quantizer.magnitude_max(largest, quantizer.largest_packed(words))
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
    """Row-wise copy: blockIdx.x is the tile of 512 columns, y and z the slot of 16 rows.

    amax: of the tensor, of each expert, or (row-scaled) of each row.
    """
    thread, _, _ = cute.arch.thread_idx()
    column_tile, low, high = cute.arch.block_idx()
    lane = thread % _WARP
    expert, first, end = locate_tile(offsets, counts, low + high * SLOTS_PER_LAYER, ROWS, lane)
    if first < end:
        memory = cutlass.memory.SmemAllocator()
        block = column_tile * _WARP + lane
        column = block * BLOCK
        inside = column < hidden
        nearest = cute.assume(cutlass.min(column, hidden - BLOCK), divby=BLOCK)
        # All loads come first: what follows branches, and a load is not moved over a branch.
        loaded = []
        for i in cutlass.range_constexpr(_ROWS_OF_THREAD):
            row = cutlass.min(first + thread // _WARP + i * WARPS, end - 1)
            pointer = x.iterator + (Int64(row) * hidden + nearest)
            loaded.append(load_words(pointer, 4) + load_words(pointer + 8, 4))
        scale: Any = None
        table: Any = None
        if cutlass.const_expr(not quantizer.row_scaled):
            scale = quantizer.global_scale(Float32(cute.arch.load(amax_cell(quantizer, amax, expert), Float32)))
            table = memory.allocate_tensor(Float32, cute.make_layout(SCALE_CODES), 16)
            multiplier_table(quantizer, scale, table, thread)
        shared: Any = None
        if cutlass.const_expr(block2d):
            shared = memory.allocate_tensor(Float32, cute.make_layout(ROWS * _WARP), 16)
            for i in cutlass.range_constexpr(_ROWS_OF_THREAD):
                line = thread // _WARP + i * WARPS
                own = quantizer.largest_packed(loaded[i])
                shared[line * _WARP + lane] = select(first + line < end, own, Float32(0.0))
        if cutlass.const_expr(block2d or not quantizer.row_scaled):
            cute.arch.sync_threads()
        of_tile = Float32(0.0)
        if cutlass.const_expr(block2d):
            for line in cutlass.range_constexpr(ROWS):
                of_tile = quantizer.magnitude_max(of_tile, shared[line * _WARP + lane])
        by_tile = block2d and quantizer.four_over_six is not None
        results: list[Any] = []
        if cutlass.const_expr(by_tile):
            errors = memory.allocate_tensor(Float32, cute.make_layout(2 * THREADS), 16)
            results = _tile_candidates(quantizer, loaded, of_tile, scale, table, errors, first, end, thread)
        for i in cutlass.range_constexpr(_ROWS_OF_THREAD):
            row = first + thread // _WARP + i * WARPS
            if cutlass.const_expr(not by_tile):
                largest = of_tile if block2d else quantizer.largest_packed(loaded[i])
                if cutlass.const_expr(quantizer.row_scaled):
                    cell = amax.iterator + cutlass.min(row, end - 1)
                    scale = quantizer.global_scale(Float32(cute.arch.load(cell, Float32)))
                bits = None
                if cutlass.const_expr(quantizer.stochastic_bits is not None):
                    index = row - Int32(offsets[expert])
                    bits = random_block(stream, seed, expert, column, index, quantizer.stochastic_bits)
                code, words = quantizer.quantize(
                    unpack_bf16(loaded[i]), largest, scale, _multipliers(quantizer, scale, table), bits
                )
            else:
                code, words = results[i]
            if inside and row < end:
                store_words(codes.iterator + (Int64(row) * (hidden // 2) + block * (BLOCK // 2)), words)
                if cutlass.const_expr(swizzled):
                    store_scale(scales, row, block, hidden // BLOCK, code)
                else:
                    scales[row, block] = code.to(Uint8)


def _tile_candidates(
    quantizer: Any,
    loaded: list[list[Uint32]],
    of_tile: Float32,
    scale: Any,
    table: cute.Tensor,
    errors: cute.Tensor,
    first: Int32,
    end: Int32,
    thread: Int32,
) -> list[tuple[Uint32, list[Uint32]]]:
    """Scale code and codes of each of a thread's rows, under the scale with the smaller error of the 16x16 tile.

    Lines are added 8, 4, 2 and 1 apart: a thread has every fourth, the four warps have neighbours. Rows past the end
    have no error.
    """
    lane = thread % _WARP
    warp = thread // _WARP
    tried = [
        quantizer.candidates(unpack_bf16(words), of_tile, scale, _multipliers(quantizer, scale, table))
        for words in loaded
    ]
    totals = []
    for which in range(2):
        lines = []
        for i, candidates in enumerate(tried):
            valid = first + warp + i * WARPS < end
            lines.append(select(valid, candidates[which].error, Float32(0.0)))
        errors[which * THREADS + thread] = (lines[0] + lines[2]) + (lines[1] + lines[3])
    cute.arch.sync_threads()
    for which in range(2):
        own = [Float32(errors[which * THREADS + other * _WARP + lane]) for other in range(WARPS)]
        totals.append((own[0] + own[2]) + (own[1] + own[3]))
    return [quantizer.chosen(six, four, totals[0], totals[1]) for six, four in tried]
