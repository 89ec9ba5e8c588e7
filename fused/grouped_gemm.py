"""Grouped GEMMs over ragged experts on Hopper and Blackwell: one launch for all experts, token offsets read on the device.

    grouped_matmul  y_e  = x_e @ W_e^T        x_e [rows of e, K], W_e [N, K]
    grouped_dgrad   dx_e = dy_e @ W_e         dy_e [rows of e, N]
    grouped_wgrad   dW_e = dy_e^T @ x_e       [N, K], summed over the rows of e

Twins of the functions of the same names in `moe_numerics.reference.grouped_gemm`, for bfloat16 operands and the
accumulator "sm_90.bf16". Nothing here waits for the device, so every call can be captured in a CUDA graph and
replayed with other offsets.
"""

from __future__ import annotations

import torch
from moe_numerics.fused.elementwise import check_ragged
from moe_numerics.fused.gemm_epilogue import Linear
from moe_numerics.fused.gemm_launch import (
    ACCUMULATOR,
    MATRIX,
    VECTOR,
    WIDE,
    Kind,
    buffers,
    check_accumulator,
    choose_tiling,
    launch_gemm,
)
from moe_numerics.fused.gemm_problem import BLOCK, RaggedDepth, RaggedRows, Tiling
from moe_numerics.fused.launch import check_tensor

__all__ = ["check_bias", "check_operands", "expert_alpha", "grouped_dgrad", "grouped_matmul", "grouped_wgrad"]

# TMA's strides are multiples of 16 bytes.
_STRIDE = 8
_DTYPES = (torch.float32, torch.bfloat16)


def check_operands(
    name: str, x: torch.Tensor, weights: torch.Tensor, experts: int, summed: int, columns_multiple: int
) -> int:
    """Columns of x @ weights, `summed` being the weights' dimension that is summed. ValueError: they do not fit."""
    check_tensor(name, x, torch.bfloat16, (None, None), x.device, 16)
    check_tensor("weights", weights, torch.bfloat16, (experts, None, None), x.device, 16)
    depth, columns = weights.shape[summed], weights.shape[3 - summed]
    if x.shape[1] != depth:
        raise ValueError(f"{name} has {x.shape[1]} columns: expected {depth}, which weights {list(weights.shape)} sum")
    if depth == 0 or depth % _STRIDE:
        raise ValueError(f"{name} has {depth} columns: expected a positive multiple of {_STRIDE}")
    if columns == 0 or columns % columns_multiple:
        raise ValueError(f"the result has {columns} columns: expected a positive multiple of {columns_multiple}")
    return columns


def check_bias(bias: torch.Tensor | None, experts: int, columns: int, device: torch.device) -> bool:
    """Whether the bias is float32 and not bfloat16. ValueError: it does not fit."""
    if bias is None:
        return False
    dtype = torch.float32 if bias.dtype == torch.float32 else torch.bfloat16
    check_tensor("bias", bias, dtype, (experts, columns), device, 16)
    return dtype == torch.float32


def expert_alpha(alpha: torch.Tensor | float | None, experts: int, device: torch.device) -> torch.Tensor | None:
    """alpha as float32 [experts]. ValueError: neither one number nor one an expert."""
    if alpha is None:
        return None
    if not isinstance(alpha, torch.Tensor):
        return torch.full((experts,), alpha, dtype=torch.float32, device=device)
    if alpha.dim() == 0:
        alpha = alpha.expand(experts).contiguous()
    check_tensor("alpha", alpha, torch.float32, (experts,), device, 4)
    return alpha


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype}: results are float32 or bfloat16")


def _each_row(
    name: str,
    problem: RaggedRows,
    x: torch.Tensor,
    weights: torch.Tensor,
    offsets: torch.Tensor,
    counts: torch.Tensor | None,
    accumulator: str,
    alpha: torch.Tensor | float | None,
    bias: torch.Tensor | None,
    prob: torch.Tensor | None,
    dtype: torch.dtype,
    out: torch.Tensor | None,
    tiling: Tiling | None,
) -> torch.Tensor:
    check_accumulator(accumulator)
    _check_dtype(dtype)
    experts = check_ragged(offsets, counts, x.device, 1)
    columns = check_operands(name, x, weights, experts, 1 if problem.transposed else 2, BLOCK)
    wide_bias = check_bias(bias, experts, columns, x.device)
    if prob is not None:
        check_tensor("prob", prob, torch.float32, (x.shape[0],), x.device, 4)
    result = buffers({"out": ((x.shape[0], columns), dtype)}, None if out is None else {"out": out}, x.device)["out"]
    if x.shape[0] == 0:
        return result
    weights_kind = Kind(torch.bfloat16, (1, _STRIDE, BLOCK) if problem.transposed else (1, BLOCK, _STRIDE), 16)
    launch_gemm(
        problem,
        Linear(dtype == torch.float32, wide_bias=wide_bias),
        tiling or choose_tiling(columns),
        (x, Kind(torch.bfloat16, (1, _STRIDE), 16)),
        (weights, weights_kind),
        offsets,
        counts,
        (
            (expert_alpha(alpha, experts, x.device), VECTOR),
            (bias, WIDE if wide_bias else MATRIX),
            (prob, VECTOR),
            (None, VECTOR),
            (result, WIDE if dtype == torch.float32 else MATRIX),
        ),
    )
    return result


def grouped_matmul(
    x: torch.Tensor,
    weights: torch.Tensor,
    offsets: torch.Tensor,
    counts: torch.Tensor | None = None,
    accumulator: str = ACCUMULATOR,
    *,
    alpha: torch.Tensor | float | None = None,
    bias: torch.Tensor | None = None,
    prob: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """x_e @ W_e^T for the rows of every expert: [capacity, N].

    x: bfloat16 [capacity, K], K a multiple of 8. weights: bfloat16 [experts, N, K], N a multiple of 32. offsets: int32
    or int64 [experts + 1]; counts: int32 [experts] or None. alpha: float, or float32 [] or [experts]. bias: float32 or
    bfloat16 [experts, N]. prob: float32 [capacity]. dtype: of the result, float32 or bfloat16.

    The sum is multiplied by alpha, the bias is added, and that is multiplied by prob, each step rounded to float32.
    Rows that no expert owns are not written, and what they hold changes nothing. `out` gives the result's buffer;
    without it it is allocated, and unowned rows hold anything. `tiling` changes the speed, never a bit.

    ValueError: dtype, shape, device, stride or alignment of an argument, another accumulator, a target other than
    sm_90a, sm_100a and sm_103a; the contents of offsets and counts are not looked at here.
    """
    return _each_row("x", RaggedRows(), x, weights, offsets, counts, accumulator, alpha, bias, prob, dtype, out, tiling)


def grouped_dgrad(
    grad: torch.Tensor,
    weights: torch.Tensor,
    offsets: torch.Tensor,
    counts: torch.Tensor | None = None,
    accumulator: str = ACCUMULATOR,
    *,
    alpha: torch.Tensor | float | None = None,
    prob: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """grad_e @ W_e for the rows of every expert: [capacity, K].

    grad: bfloat16 [capacity, N], N a multiple of 8. weights: bfloat16 [experts, N, K], K a multiple of 32. The rest as
    for `grouped_matmul`.
    """
    problem = RaggedRows(transposed=True)
    return _each_row(
        "grad", problem, grad, weights, offsets, counts, accumulator, alpha, None, prob, dtype, out, tiling
    )


def grouped_wgrad(
    grad: torch.Tensor,
    x: torch.Tensor,
    offsets: torch.Tensor,
    counts: torch.Tensor | None = None,
    accumulator: str = ACCUMULATOR,
    *,
    main_grad: torch.Tensor | None = None,
    alpha: torch.Tensor | float | None = None,
    dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """grad_e^T @ x_e, summed over the rows of each expert: [experts, N, K].

    grad: bfloat16 [capacity, N], N a multiple of 8. x: bfloat16 [capacity, K], K a multiple of 32. main_grad: float32
    [experts, N, K], to which the gradient is added in one float32 addition; `out` may be `main_grad` itself. An expert
    without rows has zeros, or its main_grad as it is. The rest as for `grouped_matmul`.
    """
    check_accumulator(accumulator)
    _check_dtype(dtype)
    device = grad.device
    check_tensor("grad", grad, torch.bfloat16, (None, None), device, 16)
    check_tensor("x", x, torch.bfloat16, (grad.shape[0], None), device, 16)
    experts = check_ragged(offsets, counts, device, 1)
    rows, columns = grad.shape[1], x.shape[1]
    if rows == 0 or rows % _STRIDE:
        raise ValueError(f"grad has {rows} columns: expected a positive multiple of {_STRIDE}")
    if columns == 0 or columns % BLOCK:
        raise ValueError(f"x has {columns} columns: expected a positive multiple of {BLOCK}")
    shape = (experts, rows, columns)
    if main_grad is not None:
        check_tensor("main_grad", main_grad, torch.float32, shape, device, 16)
    result = buffers({"out": (shape, dtype)}, None if out is None else {"out": out}, device)["out"]
    if grad.shape[0] == 0:
        return result.zero_() if main_grad is None else result.copy_(main_grad)
    launch_gemm(
        RaggedDepth(),
        Linear(dtype == torch.float32, by_expert=True),
        tiling or choose_tiling(columns),
        (grad, Kind(torch.bfloat16, (1, _STRIDE), 16)),
        (x, Kind(torch.bfloat16, (1, BLOCK), 16)),
        offsets,
        counts,
        (
            (expert_alpha(alpha, experts, device), VECTOR),
            (None, VECTOR),
            (None, VECTOR),
            (main_grad, Kind(torch.float32, (1, 1, BLOCK), 16)),
            (result, Kind(dtype, (1, 1, BLOCK), 16)),
        ),
    )
    return result
