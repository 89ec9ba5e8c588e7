"""Compiles and launches grouped GEMMs, once for each combination of problem, epilogue and tensors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32, Int32, Int64, Uint8
from cutlass.cute import runtime
from moe_numerics.fused.blackwell_mainloop import launch_blackwell_gemm
from moe_numerics.fused.blackwell_operands import BF16, Operands, ring_stages
from moe_numerics.fused.compilation import Compiled, compile_function, current_target
from moe_numerics.fused.elementwise import fake
from moe_numerics.fused.gemm_mainloop import launch_grouped_gemm
from moe_numerics.fused.gemm_problem import BLOCK, RaggedDepth, RaggedRows, Tiling
from moe_numerics.fused.launch import as_argument, check_tensor, current_stream
from moe_numerics.reference.contract import Contract
from moe_numerics.reference.tensor_core_models import Model, find_model

__all__ = [
    "ACCUMULATOR",
    "CODES",
    "MATRIX",
    "SCALES",
    "VECTOR",
    "WIDE",
    "Factors",
    "Kind",
    "buffers",
    "check_accumulator",
    "check_contract",
    "choose_tiling",
    "launch_gemm",
]

ACCUMULATOR = "sm_90.bf16"
BLACKWELL_ACCUMULATORS = ("sm_100.bf16", "sm_100.mxf8f6f4", "sm_100.mxf4nvf4")
# A virtual GPU runs thread blocks one after the other: few of them, so that each still takes several tiles.
VIRTUAL_MULTIPROCESSORS = 4

_TYPES = {
    torch.bfloat16: BFloat16,
    torch.float32: Float32,
    torch.uint8: Uint8,
    torch.int32: Int32,
    torch.int64: Int64,
}


@dataclass(frozen=True)
class Kind:
    """What compiled code knows of a tensor: dtype, what each size is a multiple of, alignment in bytes."""

    dtype: torch.dtype
    multiples: tuple[int, ...]
    align: int

    def fake(self) -> Any:
        """A tensor without data, to compile for."""
        sizes = [cute.sym_int(divisibility=size) if size > 1 else cute.sym_int() for size in self.multiples]
        return fake(_TYPES[self.dtype], *sizes, align=self.align)


CODES = Kind(torch.uint8, (1, BLOCK), 16)
SCALES = Kind(torch.uint8, (1, 1), 1)
MATRIX = Kind(torch.bfloat16, (1, BLOCK), 16)
WIDE = Kind(torch.float32, (1, BLOCK), 16)
VECTOR = Kind(torch.float32, (1,), 4)


@dataclass(frozen=True)
class _Variant:
    """What one compilation depends on."""

    problem: RaggedRows | RaggedDepth
    operands: Operands
    epilogue: Any
    tiling: Tiling
    left: Kind
    right: Kind
    offsets: Kind
    counts: bool
    tensors: tuple[Kind | None, ...]
    scales: tuple[Kind | None, ...]

    def compile(self) -> Compiled:
        function = launch_blackwell_gemm if _on_blackwell() else launch_grouped_gemm
        return compile_function(function, self, self._arguments)

    def _arguments(self) -> Sequence[Any]:
        return (
            self.problem,
            *((self.operands,) if _on_blackwell() else ()),
            self.epilogue,
            self.tiling,
            self.left.fake(),
            self.right.fake(),
            *(() if not _on_blackwell() else tuple(None if kind is None else kind.fake() for kind in self.scales)),
            self.offsets.fake(),
            Kind(torch.int32, (1,), 4).fake() if self.counts else None,
            tuple(None if kind is None else kind.fake() for kind in self.tensors),
            Int32(1),
            runtime.make_fake_stream(),
        )


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return VIRTUAL_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _on_blackwell() -> bool:
    return current_target().startswith(("sm_100", "sm_103"))


def choose_tiling(problem: RaggedRows | RaggedDepth, columns: int, operands: Operands = BF16) -> Tiling:
    """The tiling for a result of so many columns: no wider than it needs to be.

    Alternating warpgroups hide an epilogue behind the other's products, which a weight gradient's hardly needs.
    """
    if _on_blackwell():
        width = 256 if columns > 128 else 128
        return Tiling(columns=width, stages=ring_stages(operands, width), cluster=1)
    if columns <= 128:
        return Tiling(columns=128, stages=6)
    return Tiling() if problem.ragged_depth else Tiling(stages=5, alternating=True)


def check_contract(contract: Contract) -> None:
    """ValueError: a contract that these kernels do not follow, or a target that cannot run them."""
    if contract.maths != "exact":
        raise ValueError(f"maths is {contract.maths!r}: these kernels are compiled in exact maths")
    check_accumulator(contract.accumulator)


def check_accumulator(accumulator: str) -> None:
    """ValueError: an accumulation that the target's kernels do not have, or a target without any."""
    target = current_target()
    if _on_blackwell():
        own: tuple[str, ...] = BLACKWELL_ACCUMULATORS
    elif target.startswith("sm_90"):
        own = (ACCUMULATOR,)
    else:
        raise ValueError(f"the target is {target}: these kernels need sm_90a (wgmma), sm_100a or sm_103a (tcgen05)")
    # Models are told apart by what they compute: bfloat16 accumulates alike on both architectures.
    if _arithmetic(accumulator) not in [_arithmetic(each) for each in own]:
        raise ValueError(
            f"accumulator is {accumulator!r}: the kernels of {target} accumulate as {' or '.join(map(repr, own))}"
        )


def _arithmetic(accumulator: str) -> Model:
    return dataclasses.replace(find_model(accumulator), name="", evidence="")


def buffers(
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    out: Mapping[str, torch.Tensor] | None,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Results to write to: the caller's, checked, or new ones. ValueError: one lacks or does not fit."""
    results = {}
    for name, (shape, dtype) in shapes.items():
        if out is None:
            results[name] = torch.empty(shape, dtype=dtype, device=device)
        elif name not in out:
            raise ValueError(f"out lacks {name!r}: expected {', '.join(shapes)}")
        else:
            results[name] = out[name]
        matrix = len(shape) > 1 and "scales" not in name
        check_tensor(name, results[name], dtype, shape, device, 16 if matrix else min(dtype.itemsize, 4))
    return results


@dataclass(frozen=True, eq=False)
class Factors:
    """The factors of a product as kernels take them, checked.

    scales: of the left and the right matrix, if the operands have any, compact or as `Quantized.tiles`; else the
    products of codes and scales are in the matrices.
    """

    problem: RaggedRows | RaggedDepth
    left: tuple[torch.Tensor, Kind]
    right: tuple[torch.Tensor, Kind]
    operands: Operands = BF16
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)


def launch_gemm(
    factors: Factors,
    epilogue: Any,
    columns: int,
    tiling: Tiling | None,
    offsets: torch.Tensor,
    counts: torch.Tensor | None,
    tensors: Sequence[tuple[torch.Tensor | None, Kind]],
) -> None:
    """Launch on the current stream; every argument but the tiling has been checked.

    columns: of the result. tiling: None for the one that suits it.
    """
    operands, scales = factors.operands, factors.scales
    tiling = tiling or choose_tiling(factors.problem, columns, operands)
    if _on_blackwell() and (tiling.cluster != 1 or tiling.alternating):
        raise ValueError(f"tiling is {tiling}: the kernels of {current_target()} need clusters of 1 and whole tiles")
    if tiling.alternating and factors.problem.ragged_depth:
        raise ValueError("tiling is alternating: the products of a weight gradient have no such tiles")
    variant = _Variant(
        factors.problem,
        operands,
        epilogue,
        tiling,
        factors.left[1],
        factors.right[1],
        Kind(offsets.dtype, (1,), offsets.element_size()),
        counts is not None,
        tuple(None if tensor is None else kind for tensor, kind in tensors),
        tuple(None if each is None else Kind(torch.uint8, (1,) * each.dim(), 1) for each in scales),
    )
    device = factors.left[0].device
    variant.compile()(
        as_argument(factors.left[0]),
        as_argument(factors.right[0]),
        *((as_argument(scales[0]), as_argument(scales[1])) if _on_blackwell() else ()),
        as_argument(offsets),
        as_argument(counts),
        tuple(as_argument(tensor) for tensor, _ in tensors),
        _multiprocessors(device),
        current_stream(device),
    )
