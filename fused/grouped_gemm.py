"""Grouped GEMMs over ragged experts on Hopper and Blackwell, one launch for all, token offsets read on the device.

    grouped_matmul  y_e  = x_e @ W_e^T        x_e [rows of e, K], W_e [N, K]
    grouped_dgrad   dx_e = dy_e @ W_e         dy_e [rows of e, N]
    grouped_wgrad   dW_e = dy_e^T @ x_e       [N, K], summed over the rows of e

Twins of the functions of the same names in `moe_numerics.reference.grouped_gemm`, for the accumulators "sm_90.bf16"
and, on Blackwell, "sm_100.bf16", "sm_100.mxf8f6f4" and "sm_100.mxf4nvf4". Nothing here waits for the device, so every
call can be captured in a CUDA graph and replayed with other offsets.

Operands are bfloat16 or `Quantized`: MXFP8 or NVFP4, row-wise where a product sums along columns and column-wise where
it sums along rows. The global amaxes of NVFP4 scale the accumulators. Block scales are applied by the tensor core with
an accumulator that has them; those may be compact or, over the whole buffer, swizzled (`Quantized.swizzled`), each
operand's in its own way. Hopper has none, so with those of bfloat16 a kernel of its own turns codes and compact block
scales into bfloat16 first (`dequantize`), and swizzled ones are refused. A product of code and scale that bfloat16 does
not hold, near the ends of the E8M0 range, is NaN then and shows in the result; the reference refuses it.
"""

from __future__ import annotations

import torch
from moe_numerics.fused.gemm_epilogue import Linear
from moe_numerics.fused.gemm_launch import (
    ACCUMULATOR,
    MATRIX,
    VECTOR,
    WIDE,
    Kind,
    buffers,
    check_accumulator,
    launch_gemm,
)
from moe_numerics.fused.gemm_operands import (
    Product,
    Ragged,
    check_bias,
    check_prob,
    product_of_rows,
    product_over_rows,
)
from moe_numerics.fused.gemm_problem import BLOCK, Tiling
from moe_numerics.fused.launch import check_tensor
from moe_numerics.fused.quantized import Quantized

__all__ = ["Quantized", "grouped_dgrad", "grouped_matmul", "grouped_wgrad"]

_DTYPES = (torch.float32, torch.bfloat16)


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype}: results are float32 or bfloat16")


def _each_row(
    product: Product,
    accumulator: str,
    alpha: torch.Tensor | float | None,
    bias: torch.Tensor | None,
    prob: torch.Tensor | None,
    dtype: torch.dtype,
    out: torch.Tensor | None,
    tiling: Tiling | None,
) -> torch.Tensor:
    ragged, rows, columns = product.ragged, product.rows, product.columns
    device = ragged.offsets.device
    _check_dtype(dtype)
    wide_bias = check_bias(bias, ragged.experts, columns, device)
    check_prob(prob, rows, device)
    result = buffers({"out": ((rows, columns), dtype)}, None if out is None else {"out": out}, device)["out"]
    factor = product.alpha(alpha)
    if rows == 0:
        return result
    launch_gemm(
        product.factors(accumulator),
        Linear(dtype == torch.float32, wide_bias=wide_bias),
        columns,
        tiling,
        ragged.offsets,
        ragged.counts,
        (
            (factor, VECTOR),
            (bias, WIDE if wide_bias else MATRIX),
            (prob, VECTOR),
            (None, VECTOR),
            (result, WIDE if dtype == torch.float32 else MATRIX),
        ),
    )
    return result


def grouped_matmul(
    x: torch.Tensor | Quantized,
    weights: torch.Tensor | Quantized,
    offsets: torch.Tensor,
    counts: torch.Tensor | None = None,
    accumulator: str = ACCUMULATOR,
    *,
    alpha: torch.Tensor | float | None = None,
    bias: torch.Tensor | None = None,
    prob: torch.Tensor | None = None,
    alignment: int = 1,
    dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """x_e @ W_e^T for the rows of every expert: [capacity, N].

    x: bfloat16 [capacity, K], K a multiple of 8, or row-wise `Quantized`, K a multiple of its scale block. weights:
    bfloat16 [experts, N, K], N a multiple of 32, or row-wise `Quantized` of that shape. offsets: int32 or int64
    [experts + 1]; counts: int32 [experts] or None. alpha: float, or float32 [] or [experts]. bias: float32 or bfloat16
    [experts, N]. prob: float32 [capacity]. alignment: what every offset is a multiple of. dtype: of the result, float32
    or bfloat16.

    The sum is multiplied by alpha and the global scales (whose product comes first, as in the reference), the bias is
    added, and that is multiplied by prob, each step rounded to float32. Rows that no expert owns are not written, and
    what they hold changes nothing. `out` gives the result's buffer; without it it is allocated, and unowned rows hold
    anything. `tiling` changes the speed, never a bit.

    ValueError: dtype, shape, device, stride or alignment of an argument, another accumulator, a target other than
    sm_90a, sm_100a and sm_103a; the contents of offsets and counts are not looked at here.
    """
    check_accumulator(accumulator)
    product = product_of_rows("x", x, weights, Ragged.read(x, offsets, counts, alignment), False, BLOCK)
    return _each_row(product, accumulator, alpha, bias, prob, dtype, out, tiling)


def grouped_dgrad(
    grad: torch.Tensor | Quantized,
    weights: torch.Tensor | Quantized,
    offsets: torch.Tensor,
    counts: torch.Tensor | None = None,
    accumulator: str = ACCUMULATOR,
    *,
    alpha: torch.Tensor | float | None = None,
    prob: torch.Tensor | None = None,
    alignment: int = 1,
    dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """grad_e @ W_e for the rows of every expert: [capacity, K].

    grad: bfloat16 [capacity, N], N a multiple of 8, or row-wise `Quantized`. weights: bfloat16 [experts, N, K], K a
    multiple of 32, or column-wise `Quantized` of that shape. The rest as for `grouped_matmul`.
    """
    check_accumulator(accumulator)
    product = product_of_rows("grad", grad, weights, Ragged.read(grad, offsets, counts, alignment), True, BLOCK)
    return _each_row(product, accumulator, alpha, None, prob, dtype, out, tiling)


def grouped_wgrad(
    grad: torch.Tensor | Quantized,
    x: torch.Tensor | Quantized,
    offsets: torch.Tensor,
    counts: torch.Tensor | None = None,
    accumulator: str = ACCUMULATOR,
    *,
    main_grad: torch.Tensor | None = None,
    alpha: torch.Tensor | float | None = None,
    alignment: int = 1,
    dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """grad_e^T @ x_e, summed over the rows of each expert: [experts, N, K].

    grad: bfloat16 [capacity, N], N a multiple of 8, x: bfloat16 [capacity, K], K a multiple of 32; or column-wise
    `Quantized`, whose scales `alignment` gives their layout; rotated ones describe the buffer of
    `moe_numerics.reference.ragged.Experts.blocks(16)`, and so do then offsets and counts, with alignment 16
    (`block_offsets`). main_grad: float32 [experts, N, K], to which the gradient is added in one float32 addition; `out`
    may be `main_grad` itself. An expert without rows has zeros, or its main_grad as it is. The rest as for
    `grouped_matmul`.
    """
    check_accumulator(accumulator)
    _check_dtype(dtype)
    ragged = Ragged.read(grad, offsets, counts, alignment)
    product = product_over_rows(grad, x, ragged, BLOCK)
    device = offsets.device
    shape = (ragged.experts, product.rows, product.columns)
    if main_grad is not None:
        check_tensor("main_grad", main_grad, torch.float32, shape, device, 16)
    result = buffers({"out": (shape, dtype)}, None if out is None else {"out": out}, device)["out"]
    factor = product.alpha(alpha)
    if min(product.left.rows, product.right.rows) == 0:
        return result.zero_() if main_grad is None else result.copy_(main_grad)
    launch_gemm(
        product.factors(accumulator),
        Linear(dtype == torch.float32, by_expert=True),
        product.columns,
        tiling,
        offsets,
        counts,
        (
            (factor, VECTOR),
            (None, VECTOR),
            (None, VECTOR),
            (main_grad, Kind(torch.float32, (1, 1, BLOCK), 16)),
            (result, Kind(dtype, (1, 1, BLOCK), 16)),
        ),
    )
    return result
