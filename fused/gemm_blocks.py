"""How the epilogues of the grouped GEMM write results: as bfloat16, or as MXFP8 row-wise and column-wise.

A 1x32 block lies in four lanes. A 32x1 block lies in the same columns of two neighbouring warps, which exchange its
amax through shared memory: first each lane gets the largest magnitude of one of the 32 columns over its warp's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint8
from moe_numerics.fused.gemm_epilogue import BLOCK, VECTOR
from moe_numerics.fused.memory import MaybeTensor, pack_bf16, select, store_words

__all__ = ["Exchange", "Outputs", "Spot", "write_block", "zero_invalid_rows"]

WARPS = 8
# Barrier 0 is that of the whole thread block; each pair of warps has its own.
FIRST_BARRIER = 1
PAIR_THREADS = 64

Values = list[list[list[Float32]]]
"""Of the first and the second row, of each stream, 8 neighbouring columns."""


class Exchange:
    """Shared memory through which two warps find the scales of their common 32x1 blocks."""

    def __init__(self, memory: Any, streams: int):
        self.partial = memory.allocate_tensor(Float32, cute.make_layout(2 * streams * WARPS * BLOCK), 16)
        self.factors = memory.allocate_tensor(Float32, cute.make_layout(streams * WARPS * BLOCK), 16)


class Outputs(NamedTuple):
    """The tensors that are written, None where absent."""

    out: MaybeTensor
    codes_rowwise: MaybeTensor
    scales_rowwise: MaybeTensor
    codes_colwise: MaybeTensor
    scales_colwise: MaybeTensor


class Spot(NamedTuple):
    """Where a thread's values stand.

    row: its first row, the other is 8 below; upper, lower: whether they are valid; scale_row: row of column-wise
    scales for the rows of its two warps; owned: whether any of those is valid.
    """

    thread: Int32
    row: Int32
    upper: Boolean
    lower: Boolean
    scale_row: Int32
    owned: Boolean

    @classmethod
    def of(cls, thread: Int32, place: Any, shift: Int32, dense_scale_rows: bool) -> Spot:
        """The place of a thread's rows in the tile that begins `shift` rows below the place's first."""
        first = place.first + shift
        row = first + (thread // 32) * 16 + (thread % 32) // 4
        block_row = first + (thread // PAIR_THREADS) * BLOCK
        scale_row = place.start // BLOCK + (block_row - place.start) // BLOCK
        if not dense_scale_rows:
            scale_row = scale_row + place.expert
        return cls(thread, row, row < place.end, row + 8 < place.end, scale_row, block_row < place.end)


def _largest(quantizer: Any, values: Sequence[Float32]) -> Float32:
    """Largest magnitude of the values; 0 where NaN is ignored and there is nothing else."""
    first, *others = values
    largest = cute.math.absf(first)
    if not quantizer.propagate_nan:
        largest = quantizer.magnitude_max(Float32(0.0), first)
    for value in others:
        largest = quantizer.magnitude_max(largest, value)
    return largest


@cute.jit
def zero_invalid_rows(values: cute.Tensor, spot: Any) -> None:
    """Zeros for a thread's values, of its first row and then of its second, where the row is not valid.

    A branch, since almost every tile is full.
    """
    half = cute.size(values) // 2
    if not spot.lower:
        for i in cutlass.range_constexpr(half):
            values[half + i] = Float32(0.0)
        if not spot.upper:
            for i in cutlass.range_constexpr(half):
                values[i] = Float32(0.0)


def _column_of_lane(quantizer: Any, values: list[Float32], lane: Int32) -> Float32:
    """Of the 32 columns that four lanes hold by 8, each lane gets one: its largest magnitude over the warp's rows.

    Lanes that hold the same columns differ in bits 2 to 4; in each of three exchanges a lane keeps half the columns.
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


def _own_column(lane: Int32) -> Int32:
    """The column that `_column_of_lane` leaves in a lane."""
    return (lane % 4) * VECTOR + ((lane >> 2) & 7)


@cute.jit
def write_block(
    quantizer: cutlass.Constexpr,
    blocks: cutlass.Constexpr,
    values: Any,
    spot: Any,
    parity: Int32,
    inside: Boolean,
    width: Int32,
    first_columns: Any,
    outputs: Any,
    exchange: Any,
) -> Float32:
    """Write a block of 32 columns of each stream; gives the largest magnitude that this lane saw.

    blocks: as MXFP8, else as bfloat16. first_columns: of each stream's block in the output, `width` columns wide;
    inside: whether the block is in the output at all. parity: alternates from block to block.
    """
    if cutlass.const_expr(blocks):
        largest = _write_mxfp8(quantizer, values, spot, parity, inside, width, first_columns, outputs, exchange)
    else:
        largest = _write_rounded(quantizer, values, spot, inside, width, first_columns, outputs)
    return select(inside, largest, Float32(0.0))


@cute.jit
def _write_rounded(
    quantizer: cutlass.Constexpr,
    values: Any,
    spot: Any,
    inside: Boolean,
    width: Int32,
    first_columns: Any,
    outputs: Any,
) -> Float32:
    largest = Float32(0.0)
    shift = (spot.thread % 4) * VECTOR
    for half, valid in enumerate((spot.upper, spot.lower)):
        for stream, first in enumerate(first_columns):
            if inside and valid:
                line = outputs.out.iterator + (Int64(spot.row + 8 * half) * width + shift)
                store_words(line + first, pack_bf16(values[half][stream]))
                largest = quantizer.magnitude_max(largest, _largest(quantizer, values[half][stream]))
    return largest


@cute.jit
def _write_mxfp8(
    quantizer: cutlass.Constexpr,
    values: Any,
    spot: Any,
    parity: Int32,
    inside: Boolean,
    width: Int32,
    first_columns: Any,
    outputs: Any,
    exchange: Any,
) -> Float32:
    lane = spot.thread % 32
    warp = spot.thread // 32
    shift = (lane % 4) * VECTOR
    streams = len(first_columns)
    column = _own_column(lane)
    # Stores come last and together: they branch, and nothing is moved over a branch.
    rowwise: list[list[Any]] = [[], []]
    over_warp = []
    for stream in cutlass.range_constexpr(streams):
        for half in cutlass.range_constexpr(2):
            current = values[half][stream]
            block = _largest(quantizer, current)
            block = quantizer.magnitude_max(block, cute.arch.shuffle_sync_bfly(block, 1))
            block = quantizer.magnitude_max(block, cute.arch.shuffle_sync_bfly(block, 2))
            code = quantizer.scale_code(block)
            rowwise[half].append((code, quantizer.encode(current, [quantizer.factor(code)] * VECTOR)))
        over_rows = []
        for j in cutlass.range_constexpr(VECTOR):
            over_rows.append(_largest(quantizer, (values[0][stream][j], values[1][stream][j])))
        over_warp.append(_column_of_lane(quantizer, over_rows, lane))
        exchange.partial[((parity * streams + stream) * WARPS + warp) * BLOCK + column] = over_warp[stream]
    cute.arch.barrier(barrier_id=FIRST_BARRIER + warp // 2, number_of_threads=PAIR_THREADS)
    column_codes = []
    for stream in cutlass.range_constexpr(streams):
        other = exchange.partial[((parity * streams + stream) * WARPS + (warp ^ 1)) * BLOCK + column]
        code = quantizer.scale_code(quantizer.magnitude_max(over_warp[stream], other))
        exchange.factors[(stream * WARPS + warp) * BLOCK + column] = quantizer.factor(code)
        column_codes.append(code)
    cute.arch.sync_warp()
    colwise: list[list[Any]] = [[], []]
    for stream in cutlass.range_constexpr(streams):
        own = (stream * WARPS + warp) * BLOCK + shift
        factors = [exchange.factors[own + j] for j in range(VECTOR)]
        for half in cutlass.range_constexpr(2):
            colwise[half].append(quantizer.encode(values[half][stream], factors))
    if inside:
        if spot.owned and warp % 2 == 0:
            for stream in cutlass.range_constexpr(streams):
                outputs.scales_colwise[spot.scale_row, first_columns[stream] + column] = column_codes[stream].to(Uint8)
        for half, valid in enumerate((spot.upper, spot.lower)):
            if valid:
                own_row = spot.row + 8 * half
                start = Int64(own_row) * width + shift
                for stream in cutlass.range_constexpr(streams):
                    first = first_columns[stream]
                    store_words((outputs.codes_rowwise.iterator + start) + first, rowwise[half][stream][1])
                    store_words((outputs.codes_colwise.iterator + start) + first, colwise[half][stream])
                if lane % 4 == 0:
                    for stream in cutlass.range_constexpr(streams):
                        outputs.scales_rowwise[own_row, first_columns[stream] // BLOCK] = rowwise[half][stream][0].to(
                            Uint8
                        )
    return _largest(quantizer, over_warp)
