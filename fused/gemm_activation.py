"""Epilogues of the grouped GEMM with an activation: forward on the product, backward with the product as gradient.

They run the operations of the elementwise kernels (`moe_numerics.fused.tile`) on the accumulators: a thread holds 8
neighbouring columns of two rows of each block of 32 columns, a 1x32 block lies in four lanes and a 32x1 block in the
same columns of two neighbouring warps, which exchange its amax through shared memory.

Gate and up must stand in one tile: their columns alternate in blocks of 32, gate first (layout "interleaved:32").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint32
from moe_numerics.fused.elementwise import SUM_THREADS, sum_shares_kernel, zero_amax
from moe_numerics.fused.gemm_epilogue import BLOCK, PER_BLOCK, VECTOR, block_values, drop_block, thread_place
from moe_numerics.fused.memory import load_words, pack_bf16, select, store_words, unpack_bf16
from moe_numerics.fused.ragged import raise_amax
from moe_numerics.fused.tile import Backward, Forward, Sink

__all__ = ["ActivationBackward", "ActivationForward"]

WARPS = 8
# Barrier 0 is that of the whole thread block; each pair of warps has its own.
FIRST_BARRIER = 1
SHARE_COLUMNS = 128


class Exchange:
    """Shared memory through which two warps find the scales of their common 32x1 blocks."""

    def __init__(self, memory: Any, streams: int):
        self.partial = memory.allocate_tensor(Float32, cute.make_layout(2 * streams * WARPS * BLOCK), 16)
        self.factors = memory.allocate_tensor(Float32, cute.make_layout(streams * WARPS * BLOCK), 16)


def _read_vector(tensor: cute.Tensor, offset: Int32) -> list[Float32]:
    return [tensor[offset + j] for j in range(VECTOR)]


def _largest(quantizer: Any, values: Sequence[Float32], start: Float32) -> Float32:
    for value in values:
        start = quantizer.magnitude_max(start, value)
    return start


def _column_of_lane(quantizer: Any, values: list[Float32], lane: Int32) -> Float32:
    """Of the 32 columns that the lanes hold by 8, each lane gets one, the largest over the warp's rows.

    The lanes that hold the same columns differ in bits 2 to 4; lane 4 r + q ends with column 8 q + reversed bits of
    r, which `_scattered_column` gives.
    """
    for distance in (16, 8, 4):
        upper = (lane & distance) != 0
        count = len(values) // 2
        kept = [select(upper, values[count + j], values[j]) for j in range(count)]
        sent = [select(upper, values[j], values[count + j]) for j in range(count)]
        values = [
            quantizer.magnitude_max(own, cute.arch.shuffle_sync_bfly(other, distance))
            for own, other in zip(kept, sent, strict=True)
        ]
    return values[0]


def _scattered_column(lane: Int32) -> Int32:
    return (lane % 4) * VECTOR + ((lane >> 2) & 4) + ((lane >> 2) & 2) + ((lane >> 2) & 1)


@cute.jit
def _write_block(
    quantizer: cutlass.Constexpr,
    streams: cutlass.Constexpr,
    width: Int32,
    columns,
    scale_columns,
    values,
    valid,
    thread: Int32,
    row: Int32,
    scale_row: Int32,
    scales_owned: Boolean,
    inside: Boolean,
    buffer: Int32,
    exchange,
    codes_rowwise: cute.Tensor,
    scales_rowwise: cute.Tensor,
    codes_colwise: cute.Tensor,
    scales_colwise: cute.Tensor,
):  # type: ignore[no-untyped-def]
    """Quantise a block of 32 columns of each stream both ways; gives the largest magnitude that the lane saw.

    `columns[stream]`: this thread's first column in the output, `scale_columns[stream]`: the column whose 32x1 block
    this lane scales; `values[half][stream]`: 8 values.
    """
    lane = thread % 32
    warp = thread // 32
    of_expert = Float32(0.0)
    for half in cutlass.range_constexpr(2):
        own_row = row + 8 * half
        for stream in cutlass.range_constexpr(streams):
            current = values[half][stream]
            block = _largest(quantizer, current, Float32(0.0))
            block = quantizer.magnitude_max(block, cute.arch.shuffle_sync_bfly(block, 1))
            block = quantizer.magnitude_max(block, cute.arch.shuffle_sync_bfly(block, 2))
            code = quantizer.scale_code(block)
            words = quantizer.encode(current, [quantizer.factor(code)] * VECTOR)
            if inside and valid[half]:
                store_words(codes_rowwise.iterator + (Int64(own_row) * width + columns[stream]), words)
                if lane % 4 == 0:
                    scales_rowwise[own_row, columns[stream] // BLOCK] = code.to(Uint8)
    scattered = _scattered_column(lane)
    largest = []
    for stream in cutlass.range_constexpr(streams):
        over_rows = []
        for j in cutlass.range_constexpr(VECTOR):
            upper = select(valid[0], values[0][stream][j], Float32(0.0))
            lower = select(valid[1], values[1][stream][j], Float32(0.0))
            over_rows.append(_largest(quantizer, [upper, lower], Float32(0.0)))
        column_max = _column_of_lane(quantizer, over_rows, lane)
        largest.append(column_max)
        of_expert = quantizer.magnitude_max(of_expert, column_max)
        exchange.partial[((buffer * streams + stream) * WARPS + warp) * BLOCK + scattered] = column_max
    cute.arch.barrier(barrier_id=FIRST_BARRIER + warp // 2, number_of_threads=64)
    for stream in cutlass.range_constexpr(streams):
        other = exchange.partial[((buffer * streams + stream) * WARPS + (warp ^ 1)) * BLOCK + scattered]
        code = quantizer.scale_code(quantizer.magnitude_max(largest[stream], other))
        exchange.factors[(stream * WARPS + warp) * BLOCK + scattered] = quantizer.factor(code)
        if scales_owned and inside and warp % 2 == 0:
            scales_colwise[scale_row, scale_columns[stream] + scattered] = code.to(Uint8)
    cute.arch.sync_warp()
    for stream in cutlass.range_constexpr(streams):
        factors = _read_vector(exchange.factors, (stream * WARPS + warp) * BLOCK + (lane % 4) * VECTOR)
        for half in cutlass.range_constexpr(2):
            words = quantizer.encode(values[half][stream], factors)
            if inside and valid[half]:
                store_words(
                    codes_colwise.iterator + (Int64(row + 8 * half) * width + columns[stream]), words
                )
    return of_expert


@cute.jit
def _write_rounded(
    quantizer: cutlass.Constexpr,
    streams: cutlass.Constexpr,
    width: Int32,
    columns,
    values,
    valid,
    row: Int32,
    inside: Boolean,
    out: cute.Tensor,
):  # type: ignore[no-untyped-def]
    """Store 8 columns of two rows of each stream as bfloat16; gives the largest magnitude of the valid rows."""
    of_expert = Float32(0.0)
    for half in cutlass.range_constexpr(2):
        for stream in cutlass.range_constexpr(streams):
            current = values[half][stream]
            if inside and valid[half]:
                store_words(
                    out.iterator + (Int64(row + 8 * half) * width + columns[stream]), pack_bf16(current)
                )
                of_expert = _largest(quantizer, current, of_expert)
    return of_expert


def _scale_row(dense: bool, start: Int32, expert: Int32, row: Int32) -> Int32:
    """Column-wise scale row of the block that begins at `row`."""
    index = start // BLOCK + (row - start) // BLOCK
    return index if dense else index + expert


@dataclass(frozen=True)
class ActivationForward:
    """activation(product + bias), times prob, as bfloat16 or MXFP8 both ways; and the product itself as bfloat16.

    Tensors: `(bias, prob, product, out, codes_rowwise, scales_rowwise, codes_colwise, scales_colwise, amax)`, None
    where absent. `staged`: the activation sees the product rounded to bfloat16.
    """

    op: Forward
    sink: Sink
    staged: bool
    target: str

    def allocate(self, memory: Any) -> Exchange | None:
        return Exchange(memory, 1) if self.sink.blocks else None

    @cute.jit
    def prepare(self, tensors, stream):  # type: ignore[no-untyped-def]
        zero_amax(tensors[-1], stream)

    @cute.jit
    def finish(self, tensors, offsets: cute.Tensor, counts, stream):  # type: ignore[no-untyped-def]
        pass

    @cute.jit
    def write(
        self,
        sums,
        thread: Int32,
        expert: Int32,
        start: Int32,
        first: Int32,
        end: Int32,
        column: Int32,
        columns: Int32,
        tensors,
        shared,
    ):  # type: ignore[no-untyped-def]
        """Write the tile that begins at row `first` and column `column`, up to row `end` and column `columns`."""
        bias, prob, product, out, codes_rowwise, scales_rowwise, codes_colwise, scales_colwise, amax = tensors
        inputs = self.op.layout.inputs
        quantizer = self.sink.quantizer
        lane = thread % 32
        tile_row, place = thread_place(thread)
        row = first + tile_row
        hidden = columns // inputs
        block_row = first + (thread // 64) * BLOCK
        valid = [row < end, row + 8 < end]
        weights = [None, None]
        if cutlass.const_expr(prob is not None):
            last = end - 1
            weights = [Float32(prob[cutlass.min(row + 8 * half, last)]) for half in range(2)]
        of_expert = Float32(0.0)
        for step in cutlass.range(cute.size(sums) // (PER_BLOCK * inputs), unroll=1):
            base = column + step * (BLOCK * inputs)
            inside = base < columns
            biases = [None] * inputs
            if cutlass.const_expr(bias is not None):
                nearest = cutlass.min(base, columns - BLOCK * inputs) + place
                biases = [
                    unpack_bf16(
                        load_words(
                            bias.iterator
                            + (Int64(expert) * columns + cute.assume(nearest + BLOCK * i, divby=VECTOR)),
                            4,
                        )
                    )
                    for i in range(inputs)
                ]
            values = []
            for half in cutlass.range_constexpr(2):
                own = []
                for i in cutlass.range_constexpr(inputs):
                    vector = block_values(sums, i, half)
                    if cutlass.const_expr(bias is not None):
                        vector = [value + shift for value, shift in zip(vector, biases[i])]
                    words = None
                    if cutlass.const_expr(product is not None or self.staged):
                        words = pack_bf16(vector)
                    if cutlass.const_expr(product is not None):
                        if inside and valid[half]:
                            at = cute.assume(base + BLOCK * i + place, divby=VECTOR)
                            store_words(product.iterator + (Int64(row + 8 * half) * columns + at), words)
                    if cutlass.const_expr(self.staged):
                        vector = unpack_bf16(words)
                    own.append(vector)
                streams, _ = self.op.row(own, None, weights[half], self.target)
                values.append([[quantizer.prepare(value) for value in stream] for stream in streams])
            result_base = base // inputs
            at = [cute.assume(result_base + place, divby=VECTOR)]
            if cutlass.const_expr(self.sink.blocks):
                of_block = _write_block(
                    quantizer,
                    1,
                    hidden,
                    at,
                    [result_base],
                    values,
                    valid,
                    thread,
                    row,
                    _scale_row(self.sink.dense_scale_rows, start, expert, block_row),
                    block_row < end,
                    inside,
                    step % 2,
                    shared,
                    codes_rowwise,
                    scales_rowwise,
                    codes_colwise,
                    scales_colwise,
                )
            else:
                of_block = _write_rounded(quantizer, 1, hidden, at, values, valid, row, inside, out)
            of_expert = quantizer.magnitude_max(of_expert, select(inside, of_block, Float32(0.0)))
            drop_block(sums, inputs)
        raise_amax(amax.iterator + expert, of_expert, lane)


@dataclass(frozen=True)
class ActivationBackward:
    """Gradients of the activation's inputs, the product being the gradient of its result; and dprob.

    Tensors: `(prob, inputs, out, codes_rowwise, scales_rowwise, codes_colwise, scales_colwise, amax, shares, dprob)`,
    None where absent. `staged`: the gradient that enters is the product rounded to bfloat16.
    """

    op: Backward
    sink: Sink
    staged: bool
    target: str

    def allocate(self, memory: Any) -> Exchange | None:
        return Exchange(memory, self.op.streams) if self.sink.blocks else None

    @cute.jit
    def prepare(self, tensors, stream):  # type: ignore[no-untyped-def]
        zero_amax(tensors[7], stream)

    @cute.jit
    def finish(self, tensors, offsets: cute.Tensor, counts, stream):  # type: ignore[no-untyped-def]
        shares, dprob = tensors[8], tensors[9]
        if cutlass.const_expr(dprob is not None):
            sum_shares_kernel(shares, offsets, counts, dprob).launch(
                grid=[(dprob.shape[0] + SUM_THREADS - 1) // SUM_THREADS, 1, 1],
                block=[SUM_THREADS, 1, 1],
                stream=stream,
            )

    @cute.jit
    def write(
        self,
        sums,
        thread: Int32,
        expert: Int32,
        start: Int32,
        first: Int32,
        end: Int32,
        column: Int32,
        columns: Int32,
        tensors,
        shared,
    ):  # type: ignore[no-untyped-def]
        """Write the tile that begins at row `first` and column `column`, up to row `end` and column `columns`."""
        prob, saved, out, codes_rowwise, scales_rowwise, codes_colwise, scales_colwise, amax, shares, _ = tensors
        inputs = self.op.layout.inputs
        quantizer = self.sink.quantizer
        lane = thread % 32
        tile_row, place = thread_place(thread)
        row = first + tile_row
        width = inputs * columns
        block_row = first + (thread // 64) * BLOCK
        valid = [row < end, row + 8 < end]
        last = end - 1
        nearest_rows = [cutlass.min(row + 8 * half, last) for half in range(2)]
        weights = [None, None]
        if cutlass.const_expr(prob is not None):
            weights = [Float32(prob[own]) for own in nearest_rows]
        of_expert = Float32(0.0)
        # Running sums of dprob: of a pair of blocks, and of the pair before it; for each of the two rows.
        pairs = cute.make_rmem_tensor(2, Float32)
        earlier = cute.make_rmem_tensor(2, Float32)
        pairs.fill(0.0)
        earlier.fill(0.0)
        for step in cutlass.range(cute.size(sums) // PER_BLOCK, unroll=1):
            base = column + step * BLOCK
            inside = base < columns
            nearest = cutlass.min(base, columns - BLOCK)
            loaded = []
            for half in cutlass.range_constexpr(2):
                source = saved.iterator + Int64(nearest_rows[half]) * width
                loaded.append(
                    [
                        load_words(
                            source + cute.assume(nearest * inputs + BLOCK * i + place, divby=VECTOR), 4
                        )
                        for i in range(inputs)
                    ]
                )
            values = []
            for half in cutlass.range_constexpr(2):
                incoming = block_values(sums, 0, half)
                if cutlass.const_expr(self.staged):
                    incoming = unpack_bf16(pack_bf16(incoming))
                streams, share = self.op.row(
                    [unpack_bf16(words) for words in loaded[half]], incoming, weights[half], self.target
                )
                values.append([[quantizer.prepare(value) for value in stream] for stream in streams])
                if cutlass.const_expr(shares is not None):
                    share = select(inside, share, Float32(0.0))
                    share = share + cute.arch.shuffle_sync_bfly(share, 1)
                    share = share + cute.arch.shuffle_sync_bfly(share, 2)
                    # Blocks 0 and 1, 2 and 3 of 128 columns are added first, then the two sums.
                    both = pairs[half] + share
                    if step % 4 == 3:
                        if inside_share(column, step, columns) and valid[half] and lane % 4 == 0:
                            shares[(column + step * BLOCK) // SHARE_COLUMNS, row + 8 * half] = earlier[half] + both
                    earlier[half] = select(step % 4 == 1, both, earlier[half])
                    pairs[half] = select(step % 2 == 0, share, Float32(0.0))
            at = [cute.assume(base * inputs + BLOCK * i + place, divby=VECTOR) for i in range(inputs)]
            if cutlass.const_expr(self.sink.blocks):
                of_block = _write_block(
                    quantizer,
                    inputs,
                    width,
                    at,
                    [base * inputs + BLOCK * i for i in range(inputs)],
                    values,
                    valid,
                    thread,
                    row,
                    _scale_row(self.sink.dense_scale_rows, start, expert, block_row),
                    block_row < end,
                    inside,
                    step % 2,
                    shared,
                    codes_rowwise,
                    scales_rowwise,
                    codes_colwise,
                    scales_colwise,
                )
            else:
                of_block = _write_rounded(quantizer, inputs, width, at, values, valid, row, inside, out)
            of_expert = quantizer.magnitude_max(of_expert, select(inside, of_block, Float32(0.0)))
            drop_block(sums, 1)
        raise_amax(amax.iterator + expert, of_expert, lane)


def inside_share(column: Int32, step: Int32, columns: Int32) -> Boolean:
    """Whether the 128 columns that end with block `step` hold any column."""
    return column + (step - 3) * BLOCK < columns
