"""Epilogues of the grouped GEMM with an activation: forward on the product, backward with the product as gradient.

They run the operations of the elementwise kernels (`moe_numerics.fused.tile`) on the accumulators. Gate and up must
stand in one tile: their columns alternate in blocks of 32, gate first (layout "interleaved:32").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from moe_numerics.fused.elementwise import SUM_THREADS, sum_shares_kernel, zero_amax
from moe_numerics.fused.gemm_blocks import Exchange, Outputs, Spot, write_block, zero_invalid_rows
from moe_numerics.fused.gemm_column_sums import ColumnSums, add_columns, launch_sum_parts, write_parts
from moe_numerics.fused.gemm_epilogue import (
    BLOCK,
    PER_BLOCK,
    VECTOR,
    block_values,
    drop_blocks,
    expert_factor,
    prefetch_l2,
    read_vector,
    scaled,
    store_vector,
)
from moe_numerics.fused.gemm_problem import ROWS
from moe_numerics.fused.gemm_rotation import largest_rotated
from moe_numerics.fused.hadamard import Rotation
from moe_numerics.fused.memory import MaybeTensor, load_words, pack_bf16, select, store_words, unpack_bf16
from moe_numerics.fused.ragged import raise_amax
from moe_numerics.fused.tile import Backward, Forward, Sink

__all__ = ["SHARE_COLUMNS", "ActivationBackward", "ActivationForward"]

# Columns whose share of dprob is one number, as in the elementwise kernels.
SHARE_COLUMNS = 128
WORDS = VECTOR // 2
# Blocks worked on between two moves of the accumulators.
UNROLLED = 2
LINE_BYTES = 128


@dataclass(frozen=True)
class ActivationForward:
    """activation(product * alpha + bias), times prob, as bfloat16 or MXFP8 both ways; the preactivation as bfloat16.

    Tensors: `(amax, alpha, bias, prob, preactivation, amax_rotated, *Outputs)`, None where absent. `staged`: the
    activation sees the preactivation rounded to bfloat16. `rotation`: that of amax_rotated.
    """

    op: Forward
    sink: Sink
    staged: bool
    target: str
    rotation: Rotation | None = None
    wide_bias: bool = False
    prefetches: ClassVar[bool] = False

    def allocate(self, memory: Any, columns: int) -> Exchange | None:
        return Exchange(memory, 1) if self.sink.blocks else None

    @cute.jit
    def prepare(self, tensors: tuple[MaybeTensor, ...], stream: Any) -> None:
        zero_amax(tensors[0], stream)
        if cutlass.const_expr(tensors[5] is not None):
            zero_amax(tensors[5], stream)

    def finish(self, tensors: tuple[MaybeTensor, ...], offsets: cute.Tensor, counts: MaybeTensor, stream: Any) -> None:
        return None

    @cute.jit
    def write(
        self,
        sums: cute.Tensor,
        thread: Int32,
        place: Any,
        shift: Int32,
        columns: Int32,
        tensors: tuple[MaybeTensor, ...],
        shared: Any,
    ) -> None:
        """Write this thread's part of the tile that begins `shift` rows below the place's first."""
        amax, alpha, bias, prob, preactivation, amax_rotated, *others = tensors
        outputs = Outputs(*others)
        inputs = self.op.layout.inputs
        quantizer = self.sink.quantizer
        spot = Spot.of(thread, place, shift, self.sink.dense_scale_rows)
        lane_column = (thread % 4) * VECTOR
        hidden = columns // inputs
        factor = expert_factor(alpha, place.expert)
        weights = [None, None]
        if cutlass.const_expr(prob is not None):
            weights = [Float32(prob[cutlass.min(spot.row + 8 * half, place.end - 1)]) for half in range(2)]
        largest = Float32(0.0)
        rotated = Float32(0.0)
        exact = cute.make_rmem_tensor(2 * VECTOR, Float32)
        for step in cutlass.range(cute.size(sums) // (PER_BLOCK * inputs), unroll=1):
            base = place.column + step * (BLOCK * inputs)
            inside = base < columns
            biases: list[Any] = [None] * inputs
            if cutlass.const_expr(bias is not None):
                nearest = cutlass.min(base, columns - BLOCK * inputs) + lane_column
                line = bias.iterator + Int64(place.expert) * columns
                biases = [
                    read_vector(line + cute.assume(nearest + BLOCK * i, divby=VECTOR), self.wide_bias)
                    for i in range(inputs)
                ]
            packed = []
            for half in cutlass.range_constexpr(2):
                own = []
                for i in cutlass.range_constexpr(inputs):
                    vector = scaled(block_values(sums, i, half), factor)
                    if cutlass.const_expr(bias is not None):
                        vector = [value + addend for value, addend in zip(vector, biases[i], strict=True)]
                    words = pack_bf16(vector)
                    packed.append(words)
                    own.append(unpack_bf16(words) if self.staged else vector)
                streams, _ = self.op.row(own, None, weights[half], self.target)
                for j in cutlass.range_constexpr(VECTOR):
                    exact[half * VECTOR + j] = streams[0][j]
            zero_invalid_rows(exact, spot)
            values = [[[quantizer.prepare(exact[half * VECTOR + j]) for j in range(VECTOR)]] for half in range(2)]
            if cutlass.const_expr(amax_rotated is not None):
                pairs = [(exact[j], exact[VECTOR + j]) for j in range(VECTOR)]
                of_rotated = largest_rotated(self.rotation, quantizer, pairs, thread % 32)
                rotated = quantizer.magnitude_max(rotated, select(inside, of_rotated, Float32(0.0)))
            of_block = write_block(
                quantizer,
                self.sink.blocks,
                values,
                spot,
                step % 2,
                inside,
                hidden,
                [base // inputs],
                outputs,
                shared,
            )
            if cutlass.const_expr(preactivation is not None):
                for half, valid in enumerate((spot.upper, spot.lower)):
                    line = preactivation.iterator + (Int64(spot.row + 8 * half) * columns + lane_column)
                    if inside and valid:
                        for i in cutlass.range_constexpr(inputs):
                            store_words(line + (base + BLOCK * i), packed[half * inputs + i])
            largest = quantizer.magnitude_max(largest, of_block)
            drop_blocks(sums, inputs)
        raise_amax(amax.iterator + place.expert, largest, thread % 32)
        if cutlass.const_expr(amax_rotated is not None):
            raise_amax(amax_rotated.iterator + place.expert, rotated, thread % 32)


@dataclass(frozen=True)
class ActivationBackward:
    """Gradients of the activation's inputs, product * alpha being the gradient of its result; dprob and dbias.

    Tensors: `(amax, alpha, prob, preactivation, dactivation, shares, dprob, parts, dbias, amax_rotated, *Outputs)`,
    None where absent; shares and parts are scratch for dprob and dbias. `staged`: the gradient that enters is rounded
    to bfloat16. `sums`: whether there is a dbias. `rotation`: that of amax_rotated.
    """

    op: Backward
    sink: Sink
    staged: bool
    target: str
    rotation: Rotation | None = None
    sums: bool = False
    prefetches: ClassVar[bool] = True

    def allocate(self, memory: Any, columns: int) -> tuple[Exchange | None, ColumnSums | None]:
        exchange = Exchange(memory, self.op.streams) if self.sink.blocks else None
        return exchange, ColumnSums(memory, self.op.streams, columns) if self.sums else None

    @cute.jit
    def prepare(self, tensors: tuple[MaybeTensor, ...], stream: Any) -> None:
        zero_amax(tensors[0], stream)
        if cutlass.const_expr(tensors[9] is not None):
            zero_amax(tensors[9], stream)

    @cute.jit
    def finish(self, tensors: tuple[MaybeTensor, ...], offsets: cute.Tensor, counts: MaybeTensor, stream: Any) -> None:
        _, _, _, _, _, shares, dprob, parts, dbias, *_ = tensors
        if cutlass.const_expr(dbias is not None):
            launch_sum_parts(parts, offsets, counts, dbias, stream)
        if cutlass.const_expr(dprob is not None):
            sum_shares_kernel(shares, offsets, counts, dprob).launch(
                grid=[(dprob.shape[0] + SUM_THREADS - 1) // SUM_THREADS, 1, 1],
                block=[SUM_THREADS, 1, 1],
                stream=stream,
            )

    def _load(
        self,
        words: cute.Tensor,
        saved: cute.Tensor,
        rows: list[Int32],
        base: Int32,
        columns: Int32,
        lane_column: Int32,
    ) -> None:
        """The activation's inputs as they were saved, into registers: of each row, of each input, 8 packed columns."""
        inputs = self.op.layout.inputs
        nearest = cutlass.min(base, columns - BLOCK) * inputs
        for half, row in enumerate(rows):
            line = saved.iterator + (Int64(row) * (inputs * columns) + lane_column)
            for i in range(inputs):
                loaded = load_words(line + (nearest + BLOCK * i), WORDS)
                for word in range(WORDS):
                    words[(half * inputs + i) * WORDS + word] = loaded[word]

    def _held(self, exact: cute.Tensor) -> list[list[list[Float32]]]:
        """The values of each row, of each stream."""
        streams = self.op.streams
        return [
            [[exact[(half * streams + stream) * VECTOR + j] for j in range(VECTOR)] for stream in range(streams)]
            for half in range(2)
        ]

    @cute.jit
    def prefetch(
        self,
        place: Any,
        shift: Int32,
        columns: Int32,
        turn: Int32,
        tile_columns: cutlass.Constexpr,
        tensors: tuple[MaybeTensor, ...],
        lane: Int32,
    ) -> None:
        """Bring a part of the tile's preactivation into L2, so that the epilogue does not wait for memory.

        Turns 0 to PREFETCHES - 1 bring all of it; a whole warp calls this.
        """
        inputs = self.op.layout.inputs
        elements = LINE_BYTES // 2
        index = turn * 32 + lane
        lines = tile_columns * inputs // elements
        row = place.first + shift + index // lines
        column = place.column * inputs + index % lines * elements
        if row < place.end and column < columns * inputs and index < ROWS * lines:
            prefetch_l2(tensors[3].iterator + (Int64(row) * (inputs * columns) + column))

    @cute.jit
    def write(
        self,
        sums: cute.Tensor,
        thread: Int32,
        place: Any,
        shift: Int32,
        columns: Int32,
        tensors: tuple[MaybeTensor, ...],
        shared: Any,
    ) -> None:
        """Write this thread's part of the tile that begins `shift` rows below the place's first."""
        amax, alpha, prob, saved, dactivation, shares, _, parts, _, amax_rotated, *others = tensors
        exchange, column_sums = shared
        outputs = Outputs(*others)
        inputs = self.op.layout.inputs
        quantizer = self.sink.quantizer
        spot = Spot.of(thread, place, shift, self.sink.dense_scale_rows)
        lane_column = (thread % 4) * VECTOR
        factor = expert_factor(alpha, place.expert)
        rows = [cutlass.min(spot.row + 8 * half, place.end - 1) for half in range(2)]
        weights = [None, None]
        if cutlass.const_expr(prob is not None):
            weights = [Float32(prob[row]) for row in rows]
        # Running sums of dprob, for each row: of a pair of blocks, and of the pair before it.
        pairs = cute.make_rmem_tensor(2, Float32)
        earlier = cute.make_rmem_tensor(2, Float32)
        pairs.fill(0.0)
        earlier.fill(0.0)
        # The inputs of a block are loaded while the one before it is worked on.
        ahead = cute.make_rmem_tensor(2 * inputs * WORDS, Uint32)
        self._load(ahead, saved, rows, place.column, columns, lane_column)
        largest = Float32(0.0)
        rotated = Float32(0.0)
        exact = cute.make_rmem_tensor(2 * self.op.streams * VECTOR, Float32)
        for round_ in cutlass.range(cute.size(sums) // (PER_BLOCK * UNROLLED), unroll=1):
            for block in cutlass.range_constexpr(UNROLLED):
                step = round_ * UNROLLED + block
                base = place.column + step * BLOCK
                inside = base < columns
                current = [ahead[i] for i in range(2 * inputs * WORDS)]
                self._load(ahead, saved, rows, base + BLOCK, columns, lane_column)
                totals = []
                entered = []
                for half in cutlass.range_constexpr(2):
                    incoming = scaled(block_values(sums, block, half), factor)
                    if cutlass.const_expr(self.staged):
                        incoming = unpack_bf16(pack_bf16(incoming))
                    own = [
                        unpack_bf16(current[(half * inputs + i) * WORDS : (half * inputs + i + 1) * WORDS])
                        for i in range(inputs)
                    ]
                    streams, share = self.op.row(own, incoming, weights[half], self.target)
                    for stream in cutlass.range_constexpr(self.op.streams):
                        for j in cutlass.range_constexpr(VECTOR):
                            exact[(half * self.op.streams + stream) * VECTOR + j] = streams[stream][j]
                    entered.append(incoming)
                    if cutlass.const_expr(shares is not None):
                        share = select(inside, share, Float32(0.0))
                        share = share + cute.arch.shuffle_sync_bfly(share, 1)
                        share = share + cute.arch.shuffle_sync_bfly(share, 2)
                        # Of 128 columns blocks 0 and 1, 2 and 3 are added first, then the two sums.
                        both = pairs[half] + share
                        totals.append(earlier[half] + both)
                        earlier[half] = select(step % 4 == 1, both, earlier[half])
                        pairs[half] = select(step % 2 == 0, share, Float32(0.0))
                zero_invalid_rows(exact, spot)
                held = self._held(exact)
                values = [[[quantizer.prepare(value) for value in stream] for stream in row] for row in held]
                if cutlass.const_expr(dactivation is not None):
                    for half, valid in enumerate((spot.upper, spot.lower)):
                        line = dactivation.iterator + (Int64(spot.row + 8 * half) * columns + lane_column)
                        if inside and valid:
                            store_vector(line + base, entered[half], True)
                if cutlass.const_expr(parts is not None or amax_rotated is not None):
                    for stream in cutlass.range_constexpr(self.op.streams):
                        rows_of_columns = [(held[0][stream][j], held[1][stream][j]) for j in range(VECTOR)]
                        if cutlass.const_expr(parts is not None):
                            add_columns(column_sums, thread, stream, step, rows_of_columns)
                        if cutlass.const_expr(amax_rotated is not None):
                            of_rotated = largest_rotated(self.rotation, quantizer, rows_of_columns, thread % 32)
                            rotated = quantizer.magnitude_max(rotated, select(inside, of_rotated, Float32(0.0)))
                of_block = write_block(
                    quantizer,
                    self.sink.blocks,
                    values,
                    spot,
                    block % 2,
                    inside,
                    inputs * columns,
                    [base * inputs + BLOCK * i for i in range(inputs)],
                    outputs,
                    exchange,
                )
                largest = quantizer.magnitude_max(largest, of_block)
                if cutlass.const_expr(shares is not None):
                    closing = _last_share(step, base, columns) & (thread % 4 == 0)
                    if closing:
                        for half, valid in enumerate((spot.upper, spot.lower)):
                            if valid:
                                shares[base // SHARE_COLUMNS, spot.row + 8 * half] = totals[half]
            drop_blocks(sums, UNROLLED)
        raise_amax(amax.iterator + place.expert, largest, thread % 32)
        if cutlass.const_expr(amax_rotated is not None):
            raise_amax(amax_rotated.iterator + place.expert, rotated, thread % 32)
        if cutlass.const_expr(parts is not None):
            write_parts(column_sums, thread, place, shift, columns, parts)


def _last_share(step: Int32, base: Int32, columns: Int32) -> Boolean:
    """Whether the block at column `base` is the fourth of 128 columns of which some exist."""
    return (step % 4 == 3) & (base - 3 * BLOCK < columns)
