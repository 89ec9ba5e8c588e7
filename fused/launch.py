"""Checks of arguments that need no synchronisation, and the launch on the caller's stream."""

from __future__ import annotations

from typing import Any

import torch
from cutlass.cute.runtime import from_dlpack
from moe_numerics.fused.compilation import Compiled

__all__ = ["as_argument", "check_tensor", "current_stream", "launch"]


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    shape: tuple[int | None, ...],
    device: torch.device,
    alignment: int,
) -> None:
    """ValueError unless the tensor has this dtype, shape (None: any size), device and alignment and is contiguous."""
    if tensor.dtype != dtype:
        raise ValueError(f"{name} has dtype {tensor.dtype}: expected {dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}: expected {device}, where the first input is")
    fits = tensor.dim() == len(shape) and all(
        want is None or have == want for have, want in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {list(tensor.shape)}: expected [{wanted}]")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}: expected a contiguous tensor")
    if tensor.data_ptr() % alignment:
        raise ValueError(f"{name} starts at address {tensor.data_ptr():#x}: expected a multiple of {alignment} bytes")


def launch(compiled: Compiled, first: torch.Tensor, *others: torch.Tensor | None) -> None:
    """Launch a compiled function on the current CUDA stream of the first tensor's device (or on a virtual GPU)."""
    compiled(*(as_argument(tensor) for tensor in (first, *others)), current_stream(first.device))


def as_argument(tensor: torch.Tensor | None) -> Any:
    """The tensor as the DSL takes it, its last dimension contiguous.

    Left to itself the DSL looks for the one dimension of stride 1, which a matrix of at most one row does not have.
    """
    if tensor is None:
        return None
    return from_dlpack(tensor).mark_layout_dynamic(leading_dim=tensor.dim() - 1)


def current_stream(device: torch.device) -> Any:
    import cuda.bindings.driver as cuda

    handle = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return cuda.CUstream(handle)
