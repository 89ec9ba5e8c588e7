"""Grouped GEMMs over ragged experts on Hopper: one launch for all experts, token offsets read on the device.

Twins of the functions of the same names in `moe_numerics.reference.grouped_gemm`. Nothing here waits for the device,
so every call can be captured in a CUDA graph and replayed with other offsets.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
import cutlass.cute.runtime as runtime
import torch
from cutlass import BFloat16, Float32, Int32, Int64, Uint8
from moe_numerics.fused.activations import activation as twin
from moe_numerics.fused.compilation import Compiled, compile_function, current_target
from moe_numerics.fused.gemm_activation import SHARE_COLUMNS, ActivationBackward, ActivationForward
from moe_numerics.fused.gemm_epilogue import Store
from moe_numerics.fused.gemm_mainloop import BLOCK, Tiling, launch_grouped_gemm
from moe_numerics.fused.launch import check_tensor
from moe_numerics.fused.mxfp8 import Mxfp8
from moe_numerics.fused.tile import Backward, Bfloat16, Forward, Layout, Sink
from moe_numerics.reference.activations import Activation as ReferenceActivation
from moe_numerics.reference.contract import SUITE, Contract
from moe_numerics.reference.elementwise import find_activation, output_shapes
from moe_numerics.reference.formats import FloatFormat

__all__ = ["grouped_matmul", "matmul_activation", "matmul_activation_backward"]
TILING = Tiling()


def _fake(dtype: Any, *shape: Any, align: int) -> Any:
    order = tuple(reversed(range(len(shape))))
    return runtime.make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)


_TYPES = {
    torch.bfloat16: BFloat16,
    torch.float32: Float32,
    torch.uint8: Uint8,
    torch.int32: Int32,
    torch.int64: Int64,
}


@dataclass(frozen=True)
class _Signature:
    """What the compiled code knows of a tensor: its type, what its sizes are multiples of, its alignment."""

    dtype: torch.dtype
    multiples: tuple[int, ...]
    align: int

    def fake(self) -> Any:
        shape = [cute.sym_int(divisibility=size) if size > 1 else cute.sym_int() for size in self.multiples]
        return _fake(_TYPES[self.dtype], *shape, align=self.align)


@dataclass(frozen=True)
class _Variant:
    """What one compilation depends on."""

    epilogue: Any
    tiling: Tiling
    wide_offsets: bool
    counts: bool
    tensors: tuple[_Signature | None, ...]

    def compile(self) -> Compiled:
        return compile_function(launch_grouped_gemm, self, self._arguments)

    def _arguments(self) -> Sequence[Any]:
        offset_type = torch.int64 if self.wide_offsets else torch.int32
        return (
            self.epilogue,
            self.tiling,
            current_target(),
            _Signature(torch.bfloat16, (1, 8), 16).fake(),
            _Signature(torch.bfloat16, (1, BLOCK, 8), 16).fake(),
            _Signature(offset_type, (1,), offset_type.itemsize).fake(),
            _Signature(torch.int32, (1,), 4).fake() if self.counts else None,
            tuple(None if signature is None else signature.fake() for signature in self.tensors),
            Int32(1),
            runtime.make_fake_stream(),
        )


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def _stream(device: torch.device) -> Any:
    import cuda.bindings.driver as cuda

    return cuda.CUstream(torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)


def _signature(tensor: torch.Tensor | None) -> _Signature | None:
    if tensor is None:
        return None
    if tensor.dim() == 1:
        return _Signature(tensor.dtype, (1,), 4)
    if tensor.dtype == torch.float32:
        return _Signature(tensor.dtype, (1, 1), 16)
    return _Signature(tensor.dtype, (1, 1), 1)


def _launch(
    epilogue: Any,
    tiling: Tiling,
    x: torch.Tensor,
    weights: torch.Tensor,
    offsets: torch.Tensor,
    counts: torch.Tensor | None,
    tensors: tuple[torch.Tensor | None, ...],
    signatures: tuple[_Signature | None, ...],
) -> None:
    variant = _Variant(epilogue, tiling, offsets.dtype == torch.int64, counts is not None, signatures)
    variant.compile()(
        x, weights, offsets, counts, tensors, _multiprocessors(x.device), _stream(x.device)
    )


def grouped_matmul(
    x: torch.Tensor,
    weights: torch.Tensor,
    offsets: torch.Tensor,
    counts: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    tiling: Tiling = TILING,
) -> torch.Tensor:
    rows, depth = x.shape
    columns = weights.shape[1]
    device = x.device
    if out is None:
        out = torch.empty((rows, columns), dtype=out_dtype, device=device)
    check_tensor("out", out, out_dtype, (rows, columns), device, 16)
    epilogue = Store(out_dtype == torch.float32)
    _launch(epilogue, tiling, x, weights, offsets, counts, (out,), (_Signature(out_dtype, (1, BLOCK), 16),))
    return out


_CODES = _Signature(torch.uint8, (1, BLOCK), 16)
_SCALES = _Signature(torch.uint8, (1, 1), 1)
_MATRIX = _Signature(torch.bfloat16, (1, BLOCK), 16)
_VECTOR = _Signature(torch.float32, (1,), 4)
_SHARES = _Signature(torch.float32, (1, 1), 4)


def _sink(element: FloatFormat | None, contract: Contract, alignment: int) -> Sink:
    quantizer = (
        Bfloat16(contract.nan_policy == "propagate") if element is None else Mxfp8.of(element, contract)
    )
    return Sink(quantizer, alignment % BLOCK == 0)


def matmul_activation(
    x: torch.Tensor,
    weights: torch.Tensor,
    offsets: torch.Tensor,
    counts: torch.Tensor | None = None,
    prob: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    activation: str | ReferenceActivation = "swiglu",
    element: FloatFormat | None = None,
    alignment: int = 1,
    product: bool = True,
    staged: bool = False,
    contract: Contract = SUITE,
    out: Mapping[str, torch.Tensor] | None = None,
    tiling: Tiling = TILING,
) -> dict[str, torch.Tensor]:
    rows, depth = x.shape
    columns = weights.shape[1]
    device = x.device
    act = twin(find_activation(activation))
    op = Forward(act, Layout(act.inputs, BLOCK if act.inputs == 2 else 0))
    hidden = columns // act.inputs
    shapes = output_shapes(rows, hidden, weights.shape[0], 1, element is not None, alignment, False)
    if product:
        shapes["product"] = ((rows, columns), torch.bfloat16)
    results = _buffers(shapes, out, device)
    epilogue = ActivationForward(op, _sink(element, contract, alignment), staged, current_target())
    names = {"product": _MATRIX, "out": _MATRIX, "codes_rowwise": _CODES, "scales_rowwise": _SCALES,
             "codes_colwise": _CODES, "scales_colwise": _SCALES, "amax": _VECTOR}
    tensors = (bias, prob, *(results.get(name) for name in names))
    signatures = (_MATRIX, _VECTOR, *names.values())
    _launch(epilogue, tiling, x, weights, offsets, counts, tensors,
            tuple(None if t is None else s for t, s in zip(tensors, signatures, strict=True)))
    return results


def matmul_activation_backward(
    grad: torch.Tensor,
    weights: torch.Tensor,
    inputs: torch.Tensor,
    offsets: torch.Tensor,
    counts: torch.Tensor | None = None,
    prob: torch.Tensor | None = None,
    *,
    activation: str | ReferenceActivation = "swiglu",
    element: FloatFormat | None = None,
    alignment: int = 1,
    staged: bool = False,
    contract: Contract = SUITE,
    out: Mapping[str, torch.Tensor] | None = None,
    tiling: Tiling = TILING,
) -> dict[str, torch.Tensor]:
    rows, depth = grad.shape
    hidden = weights.shape[1]
    device = grad.device
    act = twin(find_activation(activation))
    op = Backward(act, Layout(act.inputs, BLOCK if act.inputs == 2 else 0))
    shapes = output_shapes(rows, hidden, weights.shape[0], act.inputs, element is not None, alignment, prob is not None)
    results = _buffers(shapes, out, device)
    shares = None
    if prob is not None:
        shares = torch.empty((-(-hidden // SHARE_COLUMNS), rows), dtype=torch.float32, device=device)
    epilogue = ActivationBackward(op, _sink(element, contract, alignment), staged, current_target())
    names = {"out": _MATRIX, "codes_rowwise": _CODES, "scales_rowwise": _SCALES,
             "codes_colwise": _CODES, "scales_colwise": _SCALES, "amax": _VECTOR}
    tensors = (prob, inputs, *(results.get(name) for name in names), shares, results.get("dprob"))
    signatures = (_VECTOR, _MATRIX, *names.values(), _SHARES, _VECTOR)
    _launch(epilogue, tiling, grad, weights, offsets, counts, tensors,
            tuple(None if t is None else s for t, s in zip(tensors, signatures, strict=True)))
    return results


def _buffers(shapes, out, device):
    results = {} if out is None else dict(out)
    for name, (shape, dtype) in shapes.items():
        if name not in results:
            results[name] = torch.empty(shape, dtype=dtype, device=device)
        check_tensor(name, results[name], dtype, shape, device, 4)
    return {name: results[name] for name in shapes}
