"""Grouped GEMMs over ragged experts on Hopper: one launch for all experts, token offsets read on the device.

Twins of the functions of the same names in `moe_numerics.reference.grouped_gemm`. Nothing here waits for the device,
so every call can be captured in a CUDA graph and replayed with other offsets.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
import cutlass.cute.runtime as runtime
import torch
from cutlass import BFloat16, Float32, Int32, Int64
from moe_numerics.fused.compilation import Compiled, compile_function, current_target
from moe_numerics.fused.gemm_epilogue import Store
from moe_numerics.fused.gemm_mainloop import BLOCK, Tiling, launch_grouped_gemm
from moe_numerics.fused.launch import check_tensor

__all__ = ["grouped_matmul"]
TILING = Tiling()


def _fake(dtype: Any, *shape: Any, align: int) -> Any:
    order = tuple(reversed(range(len(shape))))
    return runtime.make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)


@dataclass(frozen=True)
class _Variant:
    """What one compilation depends on."""

    epilogue: Any
    tiling: Tiling
    wide_offsets: bool
    counts: bool

    def compile(self) -> Compiled:
        return compile_function(launch_grouped_gemm, self, self._arguments)

    def _arguments(self) -> Sequence[Any]:
        rows = cute.sym_int
        depth, columns = cute.sym_int(divisibility=8), cute.sym_int(divisibility=BLOCK)
        offset_type = Int64 if self.wide_offsets else Int32
        return (
            self.epilogue,
            self.tiling,
            current_target(),
            _fake(BFloat16, rows(), depth, align=16),
            _fake(BFloat16, rows(), columns, depth, align=16),
            _fake(offset_type, rows(), align=offset_type.width // 8),
            _fake(Int32, rows(), align=4) if self.counts else None,
            (_fake(Float32 if self.epilogue.wide else BFloat16, rows(), columns, align=16),),
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
    variant = _Variant(Store(out_dtype == torch.float32), tiling, offsets.dtype == torch.int64, counts is not None)
    variant.compile()(x, weights, offsets, counts, (out,), _multiprocessors(device), _stream(device))
    return out
