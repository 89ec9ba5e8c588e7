"""The main loop of the elementwise kernels: row-wise and column-wise blocks from one tile, one tile a thread block.

A tile is 32 rows of one expert by 128 columns. A thread holds a few rows of 8 neighbouring columns, so that every
load and store is a full vector, a 1x32 block lies in four lanes and a 32x1 block in the same column of all warps.
The `operation` says what is loaded and computed and yields one or two streams of values (backward: the gradients of
gate and up); the `sink` says how each stream is written.

Rows past the expert's end and columns past the buffer's are clamped to the last valid ones when loading: an element
seen twice changes no maximum, and nothing is stored for it.

Sums over rows (dbias) are taken tile by tile in a fixed order, with zeros for rows past the expert's end: the rows of
a thread, 8 apart, then neighbouring rows, pairs and fours. The tiles of an expert are added by a second kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint32
from moe_numerics.fused.activations import Activation
from moe_numerics.fused.memory import MaybeTensor, load_words, pack_bf16, select, store_words, unpack_bf16
from moe_numerics.fused.mxfp8 import Mxfp8
from moe_numerics.fused.ragged import SLOTS_PER_LAYER, locate_tile, raise_amax
from moe_numerics.fused.scale_layout import store_scale
from moe_numerics.reference.elementwise import BOTH, Blocks

__all__ = [
    "COLUMNS",
    "ROWS",
    "SLOTS_PER_LAYER",
    "Backward",
    "Bfloat16",
    "Forward",
    "Layout",
    "Sink",
    "tile_kernel",
]

ROWS = 32
COLUMNS = 128
VECTOR = 8
WORDS = VECTOR // 2
LANES_PER_ROW = COLUMNS // VECTOR
LANES_PER_BLOCK = 32 // VECTOR
FULL_WARP = 32


@dataclass(frozen=True)
class Layout:
    """Where the inputs of an activation stand in a row.

    One input: the columns themselves. Two (gate and up): as halves (`block` 0), or in alternating blocks of `block`
    columns, gate first.
    """

    inputs: int = 2
    block: int = 0

    def columns(self, column: Int32, hidden: Int32) -> list[Int32]:
        """Column of each input that belongs to column `column` of the activation's result."""
        if self.inputs == 1:
            return [column]
        if self.block == 0:
            return [column, column + hidden]
        gate = (column // self.block) * (2 * self.block) + column % self.block
        return [gate, gate + self.block]


@dataclass(frozen=True)
class Bfloat16:
    """Values written as bfloat16; the amax is that of the float32 values."""

    propagate_nan: bool

    def prepare(self, value: Float32) -> Float32:
        return value

    def magnitude_max(self, a: Float32, b: Float32) -> Float32:
        """max(a, |b|) for a that is not negative, with the contract's treatment of NaN."""
        return cute.arch.fmax(a, cute.math.absf(b), nan=self.propagate_nan)


@dataclass(frozen=True)
class Sink:
    """How each stream is written: as bfloat16, or as MXFP8 codes and scales row-wise and column-wise."""

    quantizer: Bfloat16 | Mxfp8
    copies: Blocks = BOTH
    dense_scale_rows: bool = False
    """Column-wise scales without a spare row for each expert: offsets are multiples of the block."""
    scale_padding: int = 0
    """Byte of swizzled scales wherever no block has one."""

    @property
    def blocks(self) -> bool:
        return isinstance(self.quantizer, Mxfp8)

    @property
    def row_blocks(self) -> bool:
        """Whether there are blocks of 1x32."""
        return self.blocks and self.copies.rowwise and not self.copies.block2d

    @property
    def shared_blocks(self) -> bool:
        """Whether a block spans the rows of the tile, so that its maximum goes through shared memory."""
        return self.blocks and (self.copies.colwise or self.copies.block2d)

    def scale_rows(self, rows: Int32, experts: Int32) -> Int32:
        """Number of rows of the column-wise scales of a buffer."""
        return (rows + ROWS - 1) // ROWS if self.dense_scale_rows else rows // ROWS + experts


@dataclass(frozen=True)
class Forward:
    """activation(inputs), times the router's probability if there is one: one stream."""

    activation: Activation
    layout: Layout

    @property
    def streams(self) -> int:
        return 1

    def places(self, column: Int32, hidden: Int32) -> list[Int32]:
        """Column of each stream in its output."""
        return [column]

    def row(
        self, inputs: Sequence[Sequence[Float32]], grad: None, prob: Float32 | None, target: str
    ) -> tuple[list[list[Float32]], None]:
        """Values of each stream at some columns of a row."""
        values = [self.activation.evaluate(own, target) for own in zip(*inputs, strict=True)]
        return [values if prob is None else [value * prob for value in values]], None


@dataclass(frozen=True)
class Backward:
    """Gradient of each input: one stream each; and the row's share of dprob."""

    activation: Activation
    layout: Layout

    @property
    def streams(self) -> int:
        return self.layout.inputs

    def places(self, column: Int32, hidden: Int32) -> list[Int32]:
        """Column of each stream in its output."""
        return self.layout.columns(column, hidden)

    def row(
        self, inputs: Sequence[Sequence[Float32]], grad: Sequence[Float32], prob: Float32 | None, target: str
    ) -> tuple[list[list[Float32]], Float32]:
        """Values of each stream at some columns of a row, and the sum of grad * activation over them in order."""
        streams: list[list[Float32]] = [[] for _ in range(self.streams)]
        share = None
        for incoming, own in zip(grad, zip(*inputs, strict=True), strict=True):
            weighted = incoming if prob is None else incoming * prob
            value, gradients = self.activation.differentiate(weighted, own, target)
            for stream, gradient in zip(streams, gradients, strict=True):
                stream.append(gradient)
            term = incoming * value
            share = term if share is None else share + term
        return streams, share


def _raised(quantizer: Any, largest: Float32 | None, value: Float32) -> Float32:
    """The larger one of a largest magnitude, None before the first, and |value|."""
    if largest is None:
        if quantizer.propagate_nan:
            return cute.math.absf(value)
        largest = Float32(0.0)
    return quantizer.magnitude_max(largest, value)


def _largest(quantizer: Any, values: Sequence[Float32], start: Float32 | None = None) -> Any:
    """Largest magnitude of the values, and of `start` if there is one."""
    for value in values:
        start = _raised(quantizer, start, value)
    return start


def _over_lanes(quantizer: Any, value: Float32, distances: Sequence[int]) -> Float32:
    for distance in distances:
        value = quantizer.magnitude_max(value, cute.arch.shuffle_sync_bfly(value, distance))
    return value


def _add_rows(sums: Sequence[Float32] | None, values: Sequence[Float32], counted: Boolean) -> list[Float32]:
    """Column sums with one more row, which counts as zeros unless it is a row of the expert."""
    row = [select(counted, value, Float32(0.0)) for value in values]
    return row if sums is None else [total + value for total, value in zip(sums, row, strict=True)]


def _pairwise(values: Sequence[Float32]) -> Float32:
    """Sum of neighbours, then of neighbouring pairs, and so on; a power of two of values."""
    while len(values) > 1:
        values = [low + high for low, high in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def _sum_over_row(value: Float32) -> Float32:
    """Sum over the 16 lanes of a row: neighbours first, then pairs of neighbours, and so on."""
    for distance in (1, 2, 4, 8):
        value = value + cute.arch.shuffle_sync_bfly(value, distance)
    return value


def _read_vector(tensor: cute.Tensor, offset: Int32) -> list[Float32]:
    return [tensor[offset + j] for j in range(VECTOR)]


def _write_vector(tensor: cute.Tensor, offset: Int32, values: Sequence[Float32]) -> None:
    for j, value in enumerate(values):
        tensor[offset + j] = value


def _minimum(a: Int32, b: Int32) -> Int32:
    return cutlass.min(a, b)


def _load(
    op: Any,
    source: cute.Tensor,
    grad: MaybeTensor,
    prob: MaybeTensor,
    row: Int32,
    column: Int32,
    hidden: Int32,
) -> tuple[list[list[Uint32]], list[Uint32] | None, Float32 | None]:
    """Packed inputs and (backward) grad at 8 columns of one row, and the row's probability."""
    start = source.iterator + Int64(row) * (op.layout.inputs * hidden)
    words = [load_words(start + cute.assume(place, divby=VECTOR), WORDS) for place in op.layout.columns(column, hidden)]
    incoming = None if grad is None else load_words(grad.iterator + (Int64(row) * hidden + column), WORDS)
    return words, incoming, None if prob is None else Float32(prob[row])


def _load_bias(op: Any, bias: cute.Tensor, expert: Int32, column: Int32, hidden: Int32) -> list[list[Float32]]:
    """An expert's bias of each input at 8 columns."""
    start = bias.iterator + Int64(expert) * (op.layout.inputs * hidden)
    places = op.layout.columns(column, hidden)
    return [unpack_bf16(load_words(start + cute.assume(place, divby=VECTOR), WORDS)) for place in places]


def _compute(
    op: Any,
    words: Sequence[Sequence[Uint32]],
    incoming: Sequence[Uint32] | None,
    bias: Sequence[Sequence[Float32]] | None,
    prob: Float32 | None,
    target: str,
) -> tuple[list[list[Float32]], Float32 | None]:
    """Values of each stream at 8 columns of one row in float32, and the row's share of dprob."""
    grad = None if incoming is None else unpack_bf16(incoming)
    inputs = [unpack_bf16(vector) for vector in words]
    if bias is not None:
        inputs = [
            [value + shift for value, shift in zip(own, shifts, strict=True)]
            for own, shifts in zip(inputs, bias, strict=True)
        ]
    return op.row(inputs, grad, prob, target)


def _prepare(quantizer: Any, streams: Sequence[Sequence[Float32]]) -> list[list[Float32]]:
    """The values as they are quantised."""
    return [[quantizer.prepare(value) for value in stream] for stream in streams]


def _places(op: Any, column: Int32, hidden: Int32) -> list[Int32]:
    return [cute.assume(place, divby=VECTOR) for place in op.places(column, hidden)]


def _place_of(op: Any, column: Int32, hidden: Int32, stream: Int32) -> Int32:
    """Column in the output of one column of a stream whose number is only known on the device."""
    places = op.places(column, hidden)
    return places[0] if len(places) == 1 else select(stream == 0, places[0], places[1])


@cute.jit
def _store_rowwise_scale(
    sink: cutlass.Constexpr,
    scales: cute.Tensor,
    row: Int32,
    end: Int32,
    place: Int32,
    width: Int32,
    code: Uint32,
    writes: Boolean,
) -> None:
    """Write a scale code of the 1x32 block with column `place` of an output of `width` columns, if row < end."""
    if writes and row < end:
        if cutlass.const_expr(sink.copies.swizzled):
            store_scale(scales, row, place // 32, width // 32, code)
        else:
            pointer = scales.iterator + (Int64(row) * (width // 32) + place // 32)
            cute.arch.store(pointer, code.to(Uint8))


@cute.jit
def _share_columns(
    op: cutlass.Constexpr,
    sums: Any,
    threads: cutlass.Constexpr,
    memory: cute.Tensor,
    column_shares: cute.Tensor,
    slot: Int32,
    column_tile: Int32,
    hidden: Int32,
    thread: Int32,
) -> None:
    """Add the threads' column sums to those of the tile, and write them as row `slot` of the shares of dbias."""
    lane = thread % FULL_WARP
    warps = threads // FULL_WARP
    for stream in cutlass.range_constexpr(op.streams):
        over_rows = [value + cute.arch.shuffle_sync_bfly(value, LANES_PER_ROW) for value in sums[stream]]
        if lane < LANES_PER_ROW:
            _write_vector(memory, (stream * warps + thread // FULL_WARP) * COLUMNS + lane * VECTOR, over_rows)
    cute.arch.sync_threads()
    for index in cutlass.range_constexpr((op.streams * COLUMNS + threads - 1) // threads):
        entry = thread + index * threads
        stream_index = entry // COLUMNS
        column = column_tile * COLUMNS + entry % COLUMNS
        if entry < op.streams * COLUMNS and column < hidden:
            over_warps = []
            for w in cutlass.range_constexpr(warps):
                over_warps.append(memory[(stream_index * warps + w) * COLUMNS + entry % COLUMNS])
            column_shares[slot, _place_of(op, column, hidden, stream_index)] = _pairwise(over_warps)


@cute.kernel
def tile_kernel(
    op: cutlass.Constexpr,
    sink: cutlass.Constexpr,
    threads: cutlass.Constexpr,
    target: cutlass.Constexpr,
    hidden: Int32,
    source: cute.Tensor,
    grad: MaybeTensor,
    prob: MaybeTensor,
    bias: MaybeTensor,
    offsets: cute.Tensor,
    counts: MaybeTensor,
    out: MaybeTensor,
    codes_rowwise: MaybeTensor,
    scales_rowwise: MaybeTensor,
    codes_colwise: MaybeTensor,
    scales_colwise: MaybeTensor,
    amax: cute.Tensor,
    shares: MaybeTensor,
    column_shares: MaybeTensor,
) -> None:
    """One tile: blockIdx.x is the column tile, blockIdx.y and z the slot of the row tile (see `locate_tile`)."""
    thread, _, _ = cute.arch.thread_idx()
    column_tile, low, high = cute.arch.block_idx()
    slot = low + high * SLOTS_PER_LAYER
    lane = thread % FULL_WARP
    warp = thread // FULL_WARP
    row_step = threads // LANES_PER_ROW
    rows = ROWS // row_step
    warps = threads // FULL_WARP
    quantizer = sink.quantizer

    expert, first, end = locate_tile(offsets, counts, slot, ROWS, lane)
    if first < end:
        memory = cutlass.memory.SmemAllocator()
        partial: Any = None
        factors: Any = None
        if cutlass.const_expr(sink.shared_blocks):
            partial = memory.allocate_tensor(Float32, cute.make_layout(op.streams * warps * COLUMNS), 16)
            factors = memory.allocate_tensor(Float32, cute.make_layout(op.streams * COLUMNS), 16)
        tile_codes: Any = None
        if cutlass.const_expr(sink.copies.block2d):
            tile_codes = memory.allocate_tensor(Uint32, cute.make_layout(op.streams * COLUMNS), 16)

        column = column_tile * COLUMNS + (thread % LANES_PER_ROW) * VECTOR
        inside = column < hidden
        nearest = cute.assume(_minimum(column, hidden - VECTOR), divby=VECTOR)
        top = first + thread // LANES_PER_ROW
        last = end - 1
        width = op.streams * hidden

        places = _places(op, column, hidden)
        values = []
        largest: list[Any] = []
        column_sums: list[Any] = []
        for _ in cutlass.range_constexpr(op.streams):
            largest.append([None] * VECTOR)
            column_sums.append(None)
        shifts = None
        if cutlass.const_expr(bias is not None):
            shifts = _load_bias(op, bias, expert, nearest, hidden)
        # All loads come first: what follows branches, and a load is not moved over a branch.
        loaded = []
        for i in cutlass.range_constexpr(rows):
            row = _minimum(top + row_step * i, last)
            loaded.append(_load(op, source, grad, prob, row, nearest, hidden))
        # Four lanes have a block of 32 columns, and at most four rows each: a lane writes the scales of one of them.
        turn = thread % LANES_PER_BLOCK
        turn_row = top + row_step * turn
        writes_scales = inside and turn < rows
        row_codes = []
        for _ in cutlass.range_constexpr(op.streams):
            row_codes.append(Uint32(0))
        for i in cutlass.range_constexpr(rows):
            row = top + row_step * i
            words, incoming, weight = loaded[i]
            unrounded, share = _compute(op, words, incoming, shifts, weight, target)
            streams = _prepare(quantizer, unrounded)
            values.append(streams)
            if cutlass.const_expr(shares is not None):
                share = _sum_over_row(select(inside, share, Float32(0.0)))
                if row < end and thread % LANES_PER_ROW == 0:
                    shares[column_tile, row] = share
            for stream in cutlass.range_constexpr(op.streams):
                if cutlass.const_expr(column_shares is not None):
                    column_sums[stream] = _add_rows(column_sums[stream], unrounded[stream], row < end)
                current = streams[stream]
                for j in cutlass.range_constexpr(VECTOR):
                    largest[stream][j] = _raised(quantizer, largest[stream][j], current[j])
                pointer = Int64(row) * width + places[stream]
                if cutlass.const_expr(not sink.blocks):
                    words = pack_bf16(current)
                    pointer = out.iterator + pointer
                elif cutlass.const_expr(sink.row_blocks):
                    block = _over_lanes(quantizer, _largest(quantizer, current), (1, 2))
                    code = quantizer.scale_code(block)
                    words = quantizer.encode(current, [quantizer.factor(code)] * VECTOR)
                    pointer = codes_rowwise.iterator + pointer
                    row_codes[stream] = select(turn == i, code, row_codes[stream])
                # A compile-time condition stands alone: where it is mixed with others, the branch is traced regardless.
                if cutlass.const_expr(not sink.blocks or sink.row_blocks):  # noqa: SIM102
                    if inside and row < end:
                        store_words(pointer, words)

        if cutlass.const_expr(sink.row_blocks):
            for stream in cutlass.range_constexpr(op.streams):
                _store_rowwise_scale(
                    sink, scales_rowwise, turn_row, end, places[stream], width, row_codes[stream], writes_scales
                )

        if cutlass.const_expr(column_shares is not None):
            sums = memory.allocate_tensor(Float32, cute.make_layout(op.streams * warps * COLUMNS), 16)
            _share_columns(op, column_sums, threads, sums, column_shares, slot, column_tile, hidden, thread)

        of_expert = Float32(0.0)
        if cutlass.const_expr(not sink.shared_blocks):
            for stream in cutlass.range_constexpr(op.streams):
                of_expert = _largest(quantizer, largest[stream], of_expert)
        else:
            for stream in cutlass.range_constexpr(op.streams):
                over_rows = []
                for j in cutlass.range_constexpr(VECTOR):
                    over_rows.append(_over_lanes(quantizer, largest[stream][j], (LANES_PER_ROW,)))
                if lane < LANES_PER_ROW:
                    _write_vector(partial, (stream * warps + warp) * COLUMNS + lane * VECTOR, over_rows)
            cute.arch.sync_threads()
            for index in cutlass.range_constexpr((op.streams * COLUMNS + threads - 1) // threads):
                entry = thread + index * threads
                if entry < op.streams * COLUMNS:
                    stream_index = entry // COLUMNS
                    own = entry % COLUMNS
                    over_warps = Float32(0.0)
                    for w in cutlass.range_constexpr(warps):
                        entry_of_warp = (stream_index * warps + w) * COLUMNS + own
                        over_warps = quantizer.magnitude_max(over_warps, partial[entry_of_warp])
                    of_expert = quantizer.magnitude_max(of_expert, over_warps)
                    if cutlass.const_expr(sink.copies.block2d):
                        # The 32 lanes of a warp have the 32 columns of one tile.
                        over_warps = _over_lanes(quantizer, over_warps, (1, 2, 4, 8, 16))
                    shared_code = quantizer.scale_code(over_warps)
                    factors[entry] = quantizer.factor(shared_code)
                    if cutlass.const_expr(sink.copies.block2d):
                        tile_codes[entry] = shared_code
                    own_column = column_tile * COLUMNS + own
                    if cutlass.const_expr(sink.copies.colwise):  # noqa: SIM102
                        if own_column < hidden:
                            scale_row = slot
                            if cutlass.const_expr(sink.dense_scale_rows):
                                scale_row = slot - expert
                            own_place = _place_of(op, own_column, hidden, stream_index)
                            if cutlass.const_expr(sink.copies.swizzled):
                                scale_rows = sink.scale_rows(source.shape[0], offsets.shape[0] - 1)
                                store_scale(scales_colwise, own_place, scale_row, scale_rows, shared_code)
                            else:
                                scales_colwise[scale_row, own_place] = shared_code.to(Uint8)
        raise_amax(amax.iterator + expert, of_expert, lane)

        if cutlass.const_expr(sink.shared_blocks):
            cute.arch.sync_threads()
            for stream in cutlass.range_constexpr(op.streams):
                entry = stream * COLUMNS + (thread % LANES_PER_ROW) * VECTOR
                own_factors = _read_vector(factors, entry)
                for i in cutlass.range_constexpr(rows):
                    row = top + row_step * i
                    words = quantizer.encode(values[i][stream], own_factors)
                    offset = Int64(row) * width + places[stream]
                    if inside and row < end:
                        if cutlass.const_expr(sink.copies.colwise):
                            store_words(codes_colwise.iterator + offset, words)
                        if cutlass.const_expr(sink.copies.rowwise and sink.copies.block2d):
                            store_words(codes_rowwise.iterator + offset, words)
                if cutlass.const_expr(sink.copies.rowwise and sink.copies.block2d):
                    _store_rowwise_scale(
                        sink, scales_rowwise, turn_row, end, places[stream], width, tile_codes[entry], writes_scales
                    )
