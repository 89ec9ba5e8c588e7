"""Activations over ragged experts, forward and backward, with bfloat16 or MXFP8 results: one launch for all experts.

Twins of the functions of the same names in `moe_numerics.reference.elementwise`. Token offsets are read on the
device; nothing here waits for the device, so every call can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.cute.runtime as runtime
import torch
from cutlass import BFloat16, Float32, Int32, Int64, Uint8
from moe_numerics.fused.activations import IDENTITY, Activation
from moe_numerics.fused.activations import activation as twin
from moe_numerics.fused.compilation import Compiled, compile_function, current_target
from moe_numerics.fused.launch import check_tensor, launch
from moe_numerics.fused.maths import FAST
from moe_numerics.fused.memory import MaybeTensor
from moe_numerics.fused.mxfp8 import BLOCK, Mxfp8
from moe_numerics.fused.ragged import slot_grid
from moe_numerics.fused.scale_layout import fill_scales
from moe_numerics.fused.tile import (
    COLUMNS,
    ROWS,
    Backward,
    Bfloat16,
    Forward,
    Layout,
    Sink,
    tile_kernel,
)
from moe_numerics.reference.activations import Activation as ReferenceActivation
from moe_numerics.reference.contract import SUITE, Contract
from moe_numerics.reference.elementwise import BOTH, Blocks, find_activation, output_shapes
from moe_numerics.reference.formats import FloatFormat

__all__ = ["activation_backward", "activation_forward", "quantize"]

# Threads of a block: each holds 4 rows of 8 columns of the 32 x 128 tile.
THREADS = 128
SUM_THREADS = 128


@cute.kernel
def zero_kernel(amax: cute.Tensor) -> None:
    """Zeros in every expert's amax: an expert without rows keeps them."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    expert = block * SUM_THREADS + thread
    if expert < amax.shape[0]:
        amax[expert] = Float32(0.0)


@cute.jit
def zero_amax(amax: cute.Tensor, stream: Any) -> None:
    """Launch `zero_kernel`."""
    zero_kernel(amax).launch(
        grid=[(amax.shape[0] + SUM_THREADS - 1) // SUM_THREADS, 1, 1], block=[SUM_THREADS, 1, 1], stream=stream
    )


@cute.kernel
def sum_shares_kernel(shares: cute.Tensor, offsets: cute.Tensor, counts: MaybeTensor, dprob: cute.Tensor) -> None:
    """dprob of a row: its shares added in the order of the column tiles, one thread a row."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    row = block * SUM_THREADS + thread
    experts = offsets.shape[0] - 1
    if row < Int32(offsets[experts]):
        low = Int32(0)
        high = experts
        while high - low > 1:
            middle = (low + high) // 2
            if Int32(offsets[middle]) <= row:
                low = middle
            else:
                high = middle
        end = Int32(offsets[low + 1])
        if cutlass.const_expr(counts is not None):
            end = Int32(offsets[low]) + Int32(counts[low])
        if row < end:
            total = Float32(shares[0, row])
            for tile in range(1, shares.shape[0]):
                total += shares[tile, row]
            dprob[row] = total


@cute.kernel
def sum_columns_kernel(
    column_shares: cute.Tensor, offsets: cute.Tensor, counts: MaybeTensor, dbias: cute.Tensor
) -> None:
    """dbias: the column sums of an expert's tiles added in their order, one thread a column; zeros without rows."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    width = dbias.shape[1]
    across = (width + SUM_THREADS - 1) // SUM_THREADS
    expert = block // across
    column = block % across * SUM_THREADS + thread
    if column < width:
        start = Int32(offsets[expert])
        end = Int32(offsets[expert + 1])
        if cutlass.const_expr(counts is not None):
            end = start + Int32(counts[expert])
        first = start // ROWS + expert
        last = first + (end - start + ROWS - 1) // ROWS
        total = Float32(0.0)
        if first < last:
            total = Float32(column_shares[first, column])
        for slot in cutlass.range(first + 1, last, unroll=8):
            total += column_shares[slot, column]
        dbias[expert, column] = total


@cute.jit
def _launch(
    op: cutlass.Constexpr,
    sink: cutlass.Constexpr,
    target: cutlass.Constexpr,
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
    dprob: MaybeTensor,
    column_shares: MaybeTensor,
    dbias: MaybeTensor,
    stream: Any,
) -> None:
    hidden = source.shape[1] // op.layout.inputs
    columns = (hidden + COLUMNS - 1) // COLUMNS
    zero_amax(amax, stream)
    if cutlass.const_expr(sink.blocks and sink.copies.swizzled):
        for scales in (scales_rowwise, scales_colwise):
            if cutlass.const_expr(scales is not None):
                fill_scales(sink.scale_padding, scales, stream)
    tile_kernel(
        op,
        sink,
        THREADS,
        target,
        hidden,
        source,
        grad,
        prob,
        bias,
        offsets,
        counts,
        out,
        codes_rowwise,
        scales_rowwise,
        codes_colwise,
        scales_colwise,
        amax,
        shares,
        column_shares,
    ).launch(
        grid=slot_grid(columns, source.shape[0], offsets.shape[0] - 1, ROWS),
        block=[THREADS, 1, 1],
        stream=stream,
    )
    if cutlass.const_expr(dprob is not None):
        sum_shares_kernel(shares, offsets, counts, dprob).launch(
            grid=[(source.shape[0] + SUM_THREADS - 1) // SUM_THREADS, 1, 1],
            block=[SUM_THREADS, 1, 1],
            stream=stream,
        )
    if cutlass.const_expr(dbias is not None):
        across = (dbias.shape[1] + SUM_THREADS - 1) // SUM_THREADS
        sum_columns_kernel(column_shares, offsets, counts, dbias).launch(
            grid=[across * dbias.shape[0], 1, 1], block=[SUM_THREADS, 1, 1], stream=stream
        )


def fake(dtype: Any, *shape: Any, align: int) -> Any:
    """Stands for a contiguous tensor when a function is compiled; sizes are numbers or symbols."""
    order = tuple(reversed(range(len(shape))))
    return runtime.make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)


def fake_swizzled() -> Any:
    """Stands for swizzled scales when a function is compiled."""
    return fake(Uint8, cute.sym_int(divisibility=512), align=16)


def required_alignment(name: str, shape: tuple[int, ...]) -> int:
    """Bytes of which the address of a result is a multiple: whole vectors are written to codes and swizzled scales."""
    if name.startswith("scales"):
        return 16 if len(shape) == 1 else 4
    return 16 if len(shape) == 2 else 4


@dataclass(frozen=True)
class _Variant:
    """What one compilation depends on."""

    op: Forward | Backward
    sink: Sink
    wide_offsets: bool
    counts: bool
    prob: bool
    bias: bool
    fast: bool

    def compile(self) -> Compiled:
        return compile_function(_launch, self, self._arguments)

    def _arguments(self) -> Sequence[Any]:
        backward = isinstance(self.op, Backward)
        quantised, dprob, dbias = self.sink.blocks, backward and self.prob, backward and self.bias
        rowwise, colwise = quantised and self.sink.copies.rowwise, quantised and self.sink.copies.colwise
        rows = cute.sym_int
        narrow, wide = (
            cute.sym_int(divisibility=BLOCK),
            cute.sym_int(divisibility=self.op.layout.inputs * BLOCK),
        )
        own = wide if backward else narrow
        swizzled = fake_swizzled() if quantised and self.sink.copies.swizzled else None
        offset_type = Int64 if self.wide_offsets else Int32
        return (
            self.op,
            self.sink,
            current_target() + (FAST if self.fast else ""),
            fake(BFloat16, rows(), wide, align=16),
            fake(BFloat16, rows(), narrow, align=16) if backward else None,
            fake(Float32, rows(), align=4) if self.prob else None,
            fake(BFloat16, rows(), wide, align=16) if self.bias else None,
            fake(offset_type, rows(), align=offset_type.width // 8),
            fake(Int32, rows(), align=4) if self.counts else None,
            None if quantised else fake(BFloat16, rows(), own, align=16),
            fake(Uint8, rows(), own, align=16) if rowwise else None,
            (swizzled or fake(Uint8, rows(), rows(), align=1)) if rowwise else None,
            fake(Uint8, rows(), own, align=16) if colwise else None,
            (swizzled or fake(Uint8, rows(), own, align=1)) if colwise else None,
            fake(Float32, rows(), align=4),
            fake(Float32, rows(), rows(), align=4) if dprob else None,
            fake(Float32, rows(), align=4) if dprob else None,
            fake(Float32, rows(), wide, align=4) if dbias else None,
            fake(Float32, rows(), wide, align=4) if dbias else None,
            runtime.make_fake_stream(),
        )


def _parse_layout(activation: Activation, layout: str) -> Layout:
    if activation.inputs == 1:
        return Layout(1)
    if layout == "halves":
        return Layout(2)
    kind, _, block = layout.partition(":")
    if kind != "interleaved" or not block.isdigit() or int(block) % BLOCK or int(block) == 0:
        raise ValueError(f"layout is {layout!r}: expected 'halves' or 'interleaved:B', B a multiple of {BLOCK}")
    return Layout(2, int(block))


def check_ragged(offsets: torch.Tensor, counts: torch.Tensor | None, device: torch.device, alignment: int) -> int:
    """Number of experts. ValueError: offsets, counts or an alignment that no kernel takes, their contents aside."""
    if offsets.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"offsets have dtype {offsets.dtype}: expected int32 or int64")
    check_tensor("offsets", offsets, offsets.dtype, (None,), device, offsets.element_size())
    experts = offsets.shape[0] - 1
    if experts < 1:
        raise ValueError(f"offsets have {offsets.shape[0]} entries: expected one an expert and one more, at least 2")
    if counts is not None:
        check_tensor("counts", counts, torch.int32, (experts,), device, 4)
    if not 1 <= alignment <= 256:
        raise ValueError(f"alignment is {alignment}: expected 1 to 256")
    return experts


def _run(
    make_op: type[Forward] | type[Backward],
    activation: Activation,
    layout: str,
    source: torch.Tensor,
    grad: torch.Tensor | None,
    offsets: torch.Tensor,
    counts: torch.Tensor | None,
    prob: torch.Tensor | None,
    bias: torch.Tensor | None,
    element: FloatFormat | None,
    alignment: int,
    contract: Contract,
    out: Mapping[str, torch.Tensor] | None,
    blocks: Blocks = BOTH,
) -> dict[str, torch.Tensor]:
    device = source.device
    op = make_op(activation, _parse_layout(activation, layout))
    check_tensor("gate_up" if activation.inputs == 2 else "x", source, torch.bfloat16, (None, None), device, 16)
    rows, width = source.shape
    if width == 0 or width % (activation.inputs * max(BLOCK, op.layout.block)):
        raise ValueError(
            f"the input has {width} columns: expected a positive multiple of "
            f"{activation.inputs * max(BLOCK, op.layout.block)}"
        )
    hidden = width // activation.inputs
    if grad is not None:
        check_tensor("grad", grad, torch.bfloat16, (rows, hidden), device, 16)
    experts = check_ragged(offsets, counts, device, alignment)
    if prob is not None:
        check_tensor("prob", prob, torch.float32, (rows,), device, 4)
    if bias is not None:
        check_tensor("bias", bias, torch.bfloat16, (experts, width), device, 16)
    fast = contract.maths == "fast"
    if fast and not activation.fast:
        raise ValueError(f"maths is 'fast': {type(activation).__name__} is compiled in exact maths only")

    dprob, dbias = (make_op is Backward and given is not None for given in (prob, bias))
    shapes = output_shapes(rows, hidden, experts, op.streams, element is not None, alignment, dprob, blocks, dbias)
    results: dict[str, torch.Tensor] = {}
    for name, (shape, dtype) in shapes.items():
        if out is not None and name not in out:
            raise ValueError(f"out lacks {name!r}: expected {', '.join(shapes)}")
        results[name] = torch.empty(shape, dtype=dtype, device=device) if out is None else out[name]
        check_tensor(name, results[name], dtype, shape, device, required_alignment(name, shape))
    if rows == 0:
        # There is nothing to launch for, and the DSL takes no tensor without elements.
        for name in ("amax", "dbias"):
            if name in results:
                results[name].zero_()
        if blocks.swizzled and "scales_colwise" in results:
            results["scales_colwise"].fill_(contract.scale_padding)
        return results
    shares = torch.empty((-(-hidden // COLUMNS), rows), dtype=torch.float32, device=device) if dprob else None
    column_shares = torch.empty((rows // ROWS + experts, width), dtype=torch.float32, device=device) if dbias else None
    quantizer = Bfloat16(contract.nan_policy == "propagate") if element is None else Mxfp8.of(element, contract)
    padding = contract.scale_padding if blocks.swizzled else 0
    sink = Sink(quantizer, blocks, alignment % BLOCK == 0, padding)
    wide_offsets = offsets.dtype == torch.int64
    variant = _Variant(op, sink, wide_offsets, counts is not None, prob is not None, bias is not None, fast)
    launch(
        variant.compile(),
        source,
        grad,
        prob,
        bias,
        offsets,
        counts,
        results.get("out"),
        results.get("codes_rowwise"),
        results.get("scales_rowwise"),
        results.get("codes_colwise"),
        results.get("scales_colwise"),
        results["amax"],
        shares,
        results.get("dprob"),
        column_shares,
        results.get("dbias"),
    )
    return results


def activation_forward(
    gate_up: torch.Tensor,
    offsets: torch.Tensor,
    counts: torch.Tensor | None = None,
    prob: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    activation: str | ReferenceActivation = "swiglu",
    layout: str = "halves",
    element: FloatFormat | None = None,
    blocks: Blocks = BOTH,
    alignment: int = 1,
    contract: Contract = SUITE,
    out: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """activation(gate, up), times prob, for every valid row of every expert; a bias is added to gate and up first.

    gate_up: bfloat16 [capacity, 2 * hidden] in `layout` ("halves", or "interleaved:B" with B a multiple of 32, gate
    first), hidden a multiple of 32. offsets: int32 or int64 [experts + 1]; counts: int32 [experts] or None; prob:
    float32 [capacity] or None; bias: bfloat16 [experts, 2 * hidden] in `layout`, added in float32, or None.
    `alignment`: what every offset is a multiple of (it fixes the layout of the column-wise scales, see
    `moe_numerics.reference.ragged.Experts`). Tensors are contiguous and on one device, the pointers of matrices
    multiples of 16 bytes.

    Results without `element`: `out` bfloat16 [capacity, hidden]. With E4M3 or E5M2: `codes_rowwise`, `codes_colwise`
    uint8 [capacity, hidden], `scales_rowwise` [capacity, hidden / 32], `scales_colwise` [scale rows, hidden], as far as
    `blocks` names them; swizzled scales are flat, and every byte of them is written. Always `amax` float32 [experts], 0
    for an expert without rows. Rows that no expert owns are neither read nor written. `out` gives the results' buffers;
    without it they are allocated, and unowned rows hold anything.

    ValueError: dtype, shape, device, stride or alignment of an argument; the contents of offsets and counts are not
    looked at here (that would wait for the device), `moe_numerics.check` does.
    """
    return _run(
        Forward,
        _activation(activation),
        layout,
        gate_up,
        None,
        offsets,
        counts,
        prob,
        bias,
        element,
        alignment,
        contract,
        out,
        blocks,
    )


def activation_backward(
    grad: torch.Tensor,
    gate_up: torch.Tensor,
    offsets: torch.Tensor,
    counts: torch.Tensor | None = None,
    prob: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    activation: str | ReferenceActivation = "swiglu",
    layout: str = "halves",
    element: FloatFormat | None = None,
    blocks: Blocks = BOTH,
    alignment: int = 1,
    contract: Contract = SUITE,
    out: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Gradient of `activation_forward` with respect to gate_up, in gate_up's layout, and dprob.

    grad: bfloat16 [capacity, hidden], the gradient of the activation times prob. Other arguments, results and errors
    as for `activation_forward`, with 2 * hidden columns; and `dprob` float32 [capacity] where prob is given: the sum
    over a row of grad * activation; and `dbias` float32 [experts, 2 * hidden] where bias is given: the sum of the
    float32 gradients over an expert's rows, zeros without rows. Both are added in the pinned order that the reference
    states, so they are the same in every run.
    """
    return _run(
        Backward,
        _activation(activation),
        layout,
        gate_up,
        grad,
        offsets,
        counts,
        prob,
        bias,
        element,
        alignment,
        contract,
        out,
        blocks,
    )


def quantize(
    x: torch.Tensor,
    offsets: torch.Tensor,
    counts: torch.Tensor | None = None,
    *,
    element: FloatFormat,
    blocks: Blocks = BOTH,
    alignment: int = 1,
    contract: Contract = SUITE,
    out: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """MXFP8 codes and scales of x in the copies that `blocks` names, in one pass, and each expert's amax.

    x: bfloat16 [capacity, hidden]. Swizzled scales are flat, and every byte of them is written. Other arguments,
    results and errors as for `activation_forward`.
    """
    return _run(
        Forward, IDENTITY, "halves", x, None, offsets, counts, None, None, element, alignment, contract, out, blocks
    )


def _activation(chosen: str | ReferenceActivation) -> Activation:
    return twin(find_activation(chosen))
