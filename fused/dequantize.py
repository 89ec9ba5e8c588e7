"""Codes times block scales as bfloat16, which the Hopper tensor core multiplies: it has no block-scaled product.

A bfloat16 holds every NVFP4 product of a code and a block scale, and every MXFP8 one but those near the ends of the
E8M0 range. One that it does not hold becomes NaN, so that it shows in every result it reaches; the reference refuses
it. The global amax of NVFP4 is not part of this: it scales the accumulators.

Two kernels: codes in lines of rows, and transposed codes. Rows that no expert owns are neither read nor written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32
from cutlass.cute import runtime
from moe_numerics.fused import e2m1
from moe_numerics.fused.compilation import Compiled, compile_function
from moe_numerics.fused.elementwise import fake
from moe_numerics.fused.launch import as_argument, current_stream
from moe_numerics.fused.memory import MaybeTensor, load_words, pack_bf16, select, store_words, unpack_bf16
from moe_numerics.fused.mxfp8 import decode_codes, decode_scale
from moe_numerics.fused.quantized import Quantized
from moe_numerics.fused.ragged import SLOTS_PER_LAYER, locate_tile, slot_grid

__all__ = ["dequantize_tokens", "dequantize_weights"]

THREADS = 128
WARP = 32

# Lines of rows: 8 threads side by side with 16 columns each, 16 rows of threads, two rows a thread.
ROWS = 32
COLUMNS = 128
VECTOR = 16
LINE_THREADS = COLUMNS // VECTOR
ROWS_AT_ONCE = THREADS // LINE_THREADS

# Transposed: a warp has a block of 16 rows, a lane two columns of it.
BLOCK = 16
TALL_ROWS = THREADS // WARP * BLOCK
TALL_COLUMNS = 2 * WARP

NAN = 0x7FFFFFFF


@cute.jit
def _locate(
    offsets: MaybeTensor,
    counts: MaybeTensor,
    rows_each: Int32,
    total: Int32,
    tile: cutlass.Constexpr,
    slot: Int32,
    lane: Int32,
) -> tuple[Int32, Int32, Int32, Int32]:
    """Expert of a slot, its first row, the slot's first row and its end; without offsets experts have rows_each."""
    if cutlass.const_expr(offsets is not None):
        expert, first, end = locate_tile(offsets, counts, slot, tile, lane)
        start = Int32(offsets[expert])
    else:
        tiles = (rows_each + (tile - 1)) // tile
        expert = slot // tiles
        start = expert * rows_each
        first = start + (slot - expert * tiles) * tile
        end = cutlass.min(start + rows_each, total)
    return expert, start, first, end


def _rounded(codes: list[Float32], factors: list[Float32]) -> list[Uint32]:
    """code * factor as bfloat16, two to a word; NaN where bfloat16 does not hold the product."""
    products = [code * factor for code, factor in zip(codes, factors, strict=True)]
    held = unpack_bf16(pack_bf16(products))
    infinity = Float32(float("inf"))
    kept = []
    for code, product, back in zip(codes, products, held, strict=True):
        size = cute.math.absf(product)
        exact = select(size == infinity, cute.math.absf(code) == infinity, back == product)
        kept.append(select(exact, product.bitcast(Uint32), Uint32(NAN)).bitcast(Float32))
    return pack_bf16(kept)


def _column_factors(scales: cute.Tensor, row: Int32, column: Int32, width: Int32) -> list[Float32]:
    """The scales of 16 neighbouring columns in a row of column-wise E8M0 scales."""
    words = load_words(scales.iterator + (Int64(row) * width + column), VECTOR // 4)
    return [decode_scale((words[j // 4] >> (8 * (j % 4))) & Uint32(0xFF)) for j in range(VECTOR)]


def _line_words(
    element: str,
    codes: cute.Tensor,
    scales: cute.Tensor,
    row: Int32,
    column: Int32,
    width: Int32,
    factors: list[Float32] | None,
) -> list[Uint32]:
    """16 neighbouring values of a row as bfloat16, two to a word; without factors, under the row's own scale."""
    if element == "E2M1":
        packed = load_words(codes.iterator + (Int64(row) * (width // 2) + column // 2), VECTOR // 8)
        return pack_bf16(_scaled_e2m1(packed, scales[row, column // VECTOR]))
    words = load_words(codes.iterator + (Int64(row) * width + column), VECTOR // 4)
    if factors is None:
        factors = [decode_scale(scales[row, column // 32].to(Uint32))] * VECTOR
    return _rounded(decode_codes(element, words), factors)


def _scaled_e2m1(words: list[Uint32], scale: Uint8) -> list[Float32]:
    """Values of the 16 E2M1 codes of a block times its E4M3 scale: at most 6 significant bits."""
    factor = decode_codes("E4M3", [scale.to(Uint32)])[0]
    return [e2m1.decode(words[j // e2m1.WORD] >> (4 * (j % e2m1.WORD))) * factor for j in range(BLOCK)]


@cute.kernel
def lines_kernel(
    element: cutlass.Constexpr,
    colwise: cutlass.Constexpr,
    dense: cutlass.Constexpr,
    codes: cute.Tensor,
    scales: cute.Tensor,
    offsets: MaybeTensor,
    counts: MaybeTensor,
    rows_each: Int32,
    out: cute.Tensor,
) -> None:
    """Codes [rows, columns], or packed: blockIdx.x is the tile of 128 columns, y and z the slot of 32 rows."""
    thread, _, _ = cute.arch.thread_idx()
    column_tile, low, high = cute.arch.block_idx()
    slot = low + high * SLOTS_PER_LAYER
    rows, width = out.shape
    packed = element == "E2M1"
    expert, _, first, end = _locate(offsets, counts, rows_each, rows, ROWS, slot, thread % WARP)
    column = cute.assume(column_tile * COLUMNS + (thread % LINE_THREADS) * VECTOR, divby=VECTOR)
    if first < end and column < width:
        scale_row = slot
        if cutlass.const_expr(dense and offsets is not None):
            scale_row = slot - expert
        # Of the columns of a column-wise block; none row-wise, where each row has its own.
        shared = _column_factors(scales, scale_row, column, width) if colwise and not packed else None
        for i in cutlass.range_constexpr(ROWS // ROWS_AT_ONCE):
            row = first + thread // LINE_THREADS + ROWS_AT_ONCE * i
            if row < end:
                words = _line_words(element, codes, scales, row, column, width, shared)
                pointer = out.iterator + (Int64(row) * width + column)
                store_words(pointer, words[:4])
                store_words(pointer + 8, words[4:])


@cute.kernel
def transposed_kernel(
    dense: cutlass.Constexpr,
    codes: cute.Tensor,
    scales: cute.Tensor,
    offsets: MaybeTensor,
    counts: MaybeTensor,
    rows_each: Int32,
    out: cute.Tensor,
) -> None:
    """Transposed E2M1 codes: blockIdx.x is the tile of 64 columns, y and z the slot of 64 rows."""
    thread, _, _ = cute.arch.thread_idx()
    column_tile, low, high = cute.arch.block_idx()
    lane = thread % WARP
    rows, width = out.shape
    slot = low + high * SLOTS_PER_LAYER
    expert, start, first, end = _locate(offsets, counts, rows_each, rows, TALL_ROWS, slot, lane)
    row = first + thread // WARP * BLOCK
    column = column_tile * TALL_COLUMNS + 2 * lane
    if row < end and column < width:
        line = column
        block = (row - start) // BLOCK
        if cutlass.const_expr(offsets is None):
            line += expert * width
        else:
            block += start // BLOCK
            if cutlass.const_expr(not dense):
                block += expert
        values = []
        for j in cutlass.range_constexpr(2):
            pointer = codes.iterator + (Int64(line + j) * codes.shape[1] + cute.assume(block * 8, divby=8))
            values.append(_scaled_e2m1(load_words(pointer, 2), scales[line + j, block]))
        for i in cutlass.range_constexpr(BLOCK):
            if row + i < end:
                pair = pack_bf16([values[0][i], values[1][i]])
                store_words(out.iterator + (Int64(row + i) * width + cute.assume(column, divby=2)), pair)


@cute.jit
def _launch(
    element: cutlass.Constexpr,
    colwise: cutlass.Constexpr,
    dense: cutlass.Constexpr,
    codes: cute.Tensor,
    scales: cute.Tensor,
    offsets: MaybeTensor,
    counts: MaybeTensor,
    rows_each: Int32,
    out: cute.Tensor,
    stream: Any,
) -> None:
    rows, width = out.shape
    experts = rows // cutlass.max(rows_each, Int32(1))
    if cutlass.const_expr(offsets is not None):
        experts = offsets.shape[0] - 1
    block = [THREADS, 1, 1]
    if cutlass.const_expr(element == "E2M1" and colwise):
        grid = slot_grid((width + TALL_COLUMNS - 1) // TALL_COLUMNS, rows, experts, TALL_ROWS)
        transposed_kernel(dense, codes, scales, offsets, counts, rows_each, out).launch(
            grid=grid, block=block, stream=stream
        )
    else:
        grid = slot_grid((width + COLUMNS - 1) // COLUMNS, rows, experts, ROWS)
        lines_kernel(element, colwise, dense, codes, scales, offsets, counts, rows_each, out).launch(
            grid=grid, block=block, stream=stream
        )


@dataclass(frozen=True)
class _Variant:
    """What one compilation depends on; offset_type None: weights, which have no offsets."""

    element: str
    colwise: bool
    dense: bool
    offset_type: Any
    counts: bool

    def compile(self) -> Compiled:
        return compile_function(_launch, self, self._arguments)

    def _arguments(self) -> Sequence[Any]:
        size = cute.sym_int
        wide_scales = self.colwise and self.element != "E2M1"
        return (
            self.element,
            self.colwise,
            self.dense,
            fake(Uint8, size(), size(divisibility=8), align=16),
            fake(Uint8, size(), size(divisibility=VECTOR) if wide_scales else size(), align=16 if wide_scales else 1),
            None if self.offset_type is None else fake(self.offset_type, size(), align=self.offset_type.width // 8),
            fake(Int32, size(), align=4) if self.counts else None,
            Int32(1),
            fake(BFloat16, size(), size(divisibility=VECTOR), align=16),
            runtime.make_fake_stream(),
        )


def _run(
    operand: Quantized,
    rows: int,
    rows_each: int,
    offsets: torch.Tensor | None,
    counts: torch.Tensor | None,
    dense: bool,
) -> torch.Tensor:
    codes, scales = operand.codes.flatten(0, -2), operand.scales.flatten(0, -2)
    out = torch.empty((rows, operand.columns), dtype=torch.bfloat16, device=codes.device)
    if rows == 0:
        return out
    offset_type = None if offsets is None else {torch.int32: Int32, torch.int64: Int64}[offsets.dtype]
    variant = _Variant(operand.element.name, operand.axis == -2, dense, offset_type, counts is not None)
    variant.compile()(
        as_argument(codes),
        as_argument(scales),
        as_argument(offsets),
        as_argument(counts),
        rows_each,
        as_argument(out),
        current_stream(codes.device),
    )
    return out


def dequantize_tokens(
    operand: Quantized, rows: int, offsets: torch.Tensor, counts: torch.Tensor | None, alignment: int
) -> torch.Tensor:
    """Codes times block scales of checked tokens: bfloat16 [rows, columns], anything in rows without an owner.

    alignment: what every offset is a multiple of. Values that bfloat16 does not hold are NaN.
    """
    return _run(operand, rows, 0, offsets, counts, alignment % operand.block == 0)


def dequantize_weights(operand: Quantized) -> torch.Tensor:
    """Codes times block scales of checked stacked weights: bfloat16 [experts, rows, columns].

    Values that bfloat16 does not hold are NaN.
    """
    experts = operand.codes.shape[0]
    rows = operand.scales.shape[-1] * operand.block if operand.transposed else operand.codes.shape[1]
    return _run(operand, experts * rows, rows, None, None, True).view(experts, rows, operand.columns)
