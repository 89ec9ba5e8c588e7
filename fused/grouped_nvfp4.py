"""NVFP4 quantisation over ragged experts: amax, then row-wise and transposed column-wise copies, in one call.

Twin of `moe_numerics.reference.grouped_nvfp4`. The passes follow each other on the stream with the amax in device
memory between them: nothing waits for the device, so a call can be captured in a CUDA graph.
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
from moe_numerics.fused import rowwise, transpose
from moe_numerics.fused.compilation import Compiled, compile_function
from moe_numerics.fused.elementwise import check_ragged, fake, fake_swizzled, required_alignment, zero_amax
from moe_numerics.fused.hadamard import Rotation
from moe_numerics.fused.launch import check_tensor, launch
from moe_numerics.fused.memory import MaybeTensor
from moe_numerics.fused.nvfp4 import BLOCK, Nvfp4
from moe_numerics.fused.ragged import slot_grid
from moe_numerics.fused.scale_layout import fill_scales
from moe_numerics.reference.contract import SUITE, Contract
from moe_numerics.reference.grouped_nvfp4 import COLWISE_STREAM, ROWWISE_STREAM, Recipe, output_shapes

__all__ = ["quantize"]


@cute.jit
def _launch(
    quantizer: cutlass.Constexpr,
    rotation: cutlass.Constexpr,
    block2d: cutlass.Constexpr,
    dense: cutlass.Constexpr,
    measure: cutlass.Constexpr,
    swizzled: cutlass.Constexpr,
    scale_padding: cutlass.Constexpr,
    x: cute.Tensor,
    offsets: cute.Tensor,
    counts: MaybeTensor,
    seed: MaybeTensor,
    codes_rowwise: MaybeTensor,
    scales_rowwise: MaybeTensor,
    amax_rowwise: MaybeTensor,
    codes_colwise: MaybeTensor,
    scales_colwise: MaybeTensor,
    amax_colwise: MaybeTensor,
    stream: Any,
) -> None:
    rows, hidden = x.shape
    experts = offsets.shape[0] - 1
    along = [rowwise.THREADS, 1, 1]
    across = [transpose.THREADS, 1, 1]
    wide = slot_grid((hidden + rowwise.COLUMNS - 1) // rowwise.COLUMNS, rows, experts, rowwise.ROWS)
    tall = slot_grid((hidden + transpose.COLUMNS - 1) // transpose.COLUMNS, rows, experts, transpose.ROWS)
    if cutlass.const_expr(measure and quantizer.row_scaled):
        lines = slot_grid(Int32(1), rows, experts, rowwise.ROWS)
        rowwise.row_amax_kernel(quantizer, hidden, x, offsets, counts, amax_rowwise).launch(
            grid=lines, block=along, stream=stream
        )
    elif cutlass.const_expr(measure):
        if cutlass.const_expr(amax_rowwise is not None):
            zero_amax(amax_rowwise, stream)
        if cutlass.const_expr(amax_colwise is not None):
            zero_amax(amax_colwise, stream)
        plain, rotated = amax_rowwise, None
        if cutlass.const_expr(rotation is not None):
            rotated = amax_colwise
        elif cutlass.const_expr(amax_rowwise is None):
            plain = amax_colwise
        transpose.amax_kernel(quantizer, rotation, hidden, x, offsets, counts, plain, rotated).launch(
            grid=tall, block=across, stream=stream
        )
    if cutlass.const_expr(swizzled):
        for scales in (scales_rowwise, scales_colwise):
            if cutlass.const_expr(scales is not None):
                fill_scales(scale_padding, scales, stream)
    if cutlass.const_expr(codes_rowwise is not None):
        rowwise.rowwise_kernel(
            quantizer,
            block2d,
            swizzled,
            ROWWISE_STREAM,
            hidden,
            x,
            offsets,
            counts,
            seed,
            amax_rowwise,
            codes_rowwise,
            scales_rowwise,
        ).launch(grid=wide, block=along, stream=stream)
    if cutlass.const_expr(codes_colwise is not None):
        source = amax_colwise
        if cutlass.const_expr(measure and rotation is None and amax_rowwise is not None):
            # Both copies are of the same values: one amax serves both, and is written to both results.
            source = amax_rowwise
            copy_kernel(amax_rowwise, amax_colwise).launch(grid=[1, 1, 1], block=across, stream=stream)
        transpose.colwise_kernel(
            quantizer,
            rotation,
            block2d,
            dense,
            swizzled,
            COLWISE_STREAM,
            hidden,
            x,
            offsets,
            counts,
            seed,
            source,
            codes_colwise,
            scales_colwise,
        ).launch(grid=tall, block=across, stream=stream)


@cute.kernel
def copy_kernel(source: cute.Tensor, target: cute.Tensor) -> None:
    """target = source, one block of threads."""
    thread, _, _ = cute.arch.thread_idx()
    for place in range(thread, source.shape[0], transpose.THREADS):
        target[place] = source[place]


@dataclass(frozen=True)
class _Variant:
    """What one compilation depends on."""

    quantizer: Nvfp4
    recipe: Recipe
    rotation: Rotation | None
    dense: bool
    measure: bool
    wide_offsets: bool
    counts: bool
    scale_padding: int

    def compile(self) -> Compiled:
        return compile_function(_launch, self, self._arguments)

    def _arguments(self) -> Sequence[Any]:
        size = cute.sym_int
        offset_type = Int64 if self.wide_offsets else Int32
        row, column = self.recipe.rowwise, self.recipe.colwise
        swizzled = fake_swizzled() if self.recipe.swizzled else None
        return (
            self.quantizer,
            self.rotation,
            self.recipe.block2d,
            self.dense,
            self.measure,
            self.recipe.swizzled,
            self.scale_padding,
            fake(BFloat16, size(), size(divisibility=BLOCK), align=16),
            fake(offset_type, size(), align=offset_type.width // 8),
            fake(Int32, size(), align=4) if self.counts else None,
            fake(Int32, 2, align=4) if self.recipe.stochastic else None,
            fake(Uint8, size(), size(divisibility=BLOCK // 2), align=16) if row else None,
            (swizzled or fake(Uint8, size(), size(), align=1)) if row else None,
            fake(Float32, size(), align=4) if row else None,
            fake(Uint8, size(), size(divisibility=BLOCK // 2), align=16) if column else None,
            (swizzled or fake(Uint8, size(), size(), align=1)) if column else None,
            fake(Float32, size(), align=4) if column else None,
            runtime.make_fake_stream(),
        )


def quantize(
    x: torch.Tensor,
    offsets: torch.Tensor,
    counts: torch.Tensor | None = None,
    *,
    recipe: Recipe,
    alignment: int = 1,
    contract: Contract = SUITE,
    seed: torch.Tensor | None = None,
    amax: Mapping[str, torch.Tensor] | None = None,
    out: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """NVFP4 copies of x that the recipe names.

    x: bfloat16 [capacity, hidden], hidden a multiple of 16; offsets: int32 or int64 [experts + 1]; counts: int32
    [experts] or None; all contiguous and on one device. seed: int32 [2] on the device, low word first, for stochastic
    rounding. amax: `amax_rowwise` and `amax_colwise` if they are known already: then there is no first pass. Results:
    see the reference; `out` gives their buffers. Unowned rows of x are not read, of the results not written.

    ValueError: dtype, shape, device, stride or alignment of an argument; a choice of the contract that the kernels do
    not have.
    """
    device = x.device
    check_tensor("x", x, torch.bfloat16, (None, None), device, 16)
    rows, hidden = x.shape
    if hidden == 0 or hidden % BLOCK:
        raise ValueError(f"x has {hidden} columns: expected a positive multiple of {BLOCK}")
    experts = check_ragged(offsets, counts, device, alignment)
    if contract.maths != "exact":
        raise ValueError(f"maths is {contract.maths!r}: these kernels are compiled in exact maths")
    if recipe.stochastic:
        if contract.stochastic_source != "philox":
            raise ValueError(f"stochastic_source is {contract.stochastic_source!r}: the kernels have philox")
        if seed is None:
            raise ValueError("seed is missing: stochastic rounding needs an int32 tensor of two words")
        check_tensor("seed", seed, torch.int32, (2,), device, 4)
    shapes = output_shapes(rows, hidden, experts, recipe, alignment, contract)
    results: dict[str, torch.Tensor] = {}
    for name, (shape, dtype) in shapes.items():
        given = amax if amax is not None and name.startswith("amax") else out
        if given is not None and name not in given:
            raise ValueError(f"{'amax' if given is amax else 'out'} lacks {name!r}: expected {', '.join(shapes)}")
        results[name] = torch.empty(shape, dtype=dtype, device=device) if given is None else given[name]
        check_tensor(name, results[name], dtype, shape, device, required_alignment(name, shape))
    if rows == 0:
        # There is nothing to launch for, and the DSL takes no tensor without elements.
        for name in shapes:
            if name.startswith("amax") and amax is None:
                results[name].zero_()
        if recipe.swizzled and recipe.colwise:
            results["scales_colwise"].fill_(contract.scale_padding)
        return results
    variant = _Variant(
        Nvfp4.of(contract, recipe),
        recipe,
        Rotation.of(contract) if recipe.rotated else None,
        alignment % BLOCK == 0,
        amax is None,
        offsets.dtype == torch.int64,
        counts is not None,
        contract.scale_padding if recipe.swizzled else 0,
    )
    launch(
        variant.compile(),
        x,
        offsets,
        counts,
        seed if recipe.stochastic else None,
        results.get("codes_rowwise"),
        results.get("scales_rowwise"),
        results.get("amax_rowwise"),
        results.get("codes_colwise"),
        results.get("scales_colwise"),
        results.get("amax_colwise"),
    )
    return results
