"""Grouped matrix products over ragged experts, with the bits of a tensor core: forward, data and weight gradient.

    grouped_matmul  y_e  = x_e @ W_e^T        x_e [rows of e, K], W_e [N, K]
    grouped_dgrad   dx_e = dy_e @ W_e         dy_e [rows of e, N]
    grouped_wgrad   dW_e = dy_e^T @ x_e       [N, K], summed over the rows of e

Each output is one chain of `tensor_core.matmul` over ascending K (N, rows), without split-K; the weight
gradient's chain begins at the expert's first row. What follows is float32, every step rounded:

    value = sum * (((alpha * amax_left) * amax_right) * factor)    where there is an alpha or a global amax
    value = value + bias
    value = value * prob
    value = main_grad + value                                     weight gradient

factor is the product of both operands' `global_factor` as a float32, for NVFP4 1 / (2688 * 2688)
(transformer_engine/common/recipe/nvfp4.cu@2.20 has the same order and constant).

Quantised operands, whose scales may be compact or swizzled, are read in one of three ways, by the accumulator:

    operands     accumulator              how
    MX, NVFP4    bf16                     codes times block scales as bfloat16 values, where that is exact;
                                          a value that bfloat16 does not hold is an error (the ends of the
                                          E8M0 range)
    MX, NVFP4    with scales of that kind the tensor core applies the block scales
    MX           fp8 without scales       a chain for each 32 of K, whose result is multiplied by
                                          2^(scale codes) and added to the sum by one float32 FMA
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import tensor_core
from .exact_math import fma
from .quantized import Quantized
from .ragged import Experts
from .tensor_core_models import Model, find_model
from .tensor_core_operands import power_of_two

Weights = Tensor | Sequence[Tensor | Quantized]


def grouped_matmul(
    x: Tensor | Quantized,
    weights: Weights,
    offsets: Tensor | Sequence[int],
    counts: Tensor | Sequence[int] | None = None,
    accumulator: str = "sm_90.bf16",
    *,
    alpha: Tensor | float | None = None,
    bias: Tensor | None = None,
    prob: Tensor | None = None,
    alignment: int = 1,
    restart: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Gives x_e @ W_e^T for the rows of every expert: [capacity, N], zeros in rows that no expert owns.

    x [capacity, K]: values of the accumulator's operand format (bfloat16 for "sm_90.bf16"), or quantised row-wise.
    weights: [experts, N, K], or one [N, K] for each expert, tensors or quantised row-wise (along K). offsets
    [experts + 1], counts [experts] or None, alignment: see `Experts.from_offsets`. alpha: float, or float32 [] or
    [experts]. bias: [experts, N]. prob: float32 [capacity]. restart: see `tensor_core.matmul`. dtype: float32, or
    bfloat16 for the value rounded to nearest even.

    Rows that no expert owns are never read. An expert without rows has no results; K = 0 gives the bias.
    ValueError: operands, weights, offsets or an accumulator that do not fit each other, or operands that the
    accumulator cannot read exactly.
    """
    left = _Operand.read("x", x, -1)
    experts = Experts.from_offsets(offsets, counts, left.rows, alignment)
    each, (columns, _) = _weights(weights, len(experts), -1)
    right = [weight.rowwise(slice(None)) for weight in each]
    return _each_row(left, right, columns, experts, accumulator, alpha, bias, prob, restart, dtype)


def grouped_dgrad(
    grad: Tensor | Quantized,
    weights: Weights,
    offsets: Tensor | Sequence[int],
    counts: Tensor | Sequence[int] | None = None,
    accumulator: str = "sm_90.bf16",
    *,
    alpha: Tensor | float | None = None,
    prob: Tensor | None = None,
    alignment: int = 1,
    restart: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Gives grad_e @ W_e for the rows of every expert: [capacity, K], zeros in rows that no expert owns.

    grad [capacity, N]: as x of `grouped_matmul`. weights: [experts, N, K], or one [N, K] for each expert, tensors or
    quantised column-wise (along N). The rest as for `grouped_matmul`.
    """
    left = _Operand.read("grad", grad, -1)
    experts = Experts.from_offsets(offsets, counts, left.rows, alignment)
    each, (_, columns) = _weights(weights, len(experts), -2)
    right = [weight.colwise() for weight in each]
    return _each_row(left, right, columns, experts, accumulator, alpha, None, prob, restart, dtype)


def grouped_wgrad(
    grad: Tensor | Quantized,
    x: Tensor | Quantized,
    offsets: Tensor | Sequence[int],
    counts: Tensor | Sequence[int] | None = None,
    accumulator: str = "sm_90.bf16",
    *,
    main_grad: Tensor | None = None,
    alpha: Tensor | float | None = None,
    alignment: int = 1,
    restart: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Gives grad_e^T @ x_e, summed over the rows of each expert: [experts, N, K].

    grad [capacity, N] and x [capacity, K]: values, or quantised column-wise; rotated ones describe the buffer of
    `Experts.blocks(16)`, and so do then offsets and counts. main_grad: float32 [experts, N, K], to which the
    gradient is added in one float32 addition; it is not changed. An expert without rows has zeros, or its main_grad
    as it is. The rest as for `grouped_matmul`.
    """
    left, right = _Operand.read("grad", grad, -2), _Operand.read("x", x, -2)
    experts = Experts.from_offsets(offsets, counts, left.rows, alignment)
    if right.rows != experts.capacity:
        raise ValueError(f"x has {right.rows} rows and grad has {experts.capacity}: expected as many")
    shape = (len(experts), left.columns, right.columns)
    if main_grad is not None and (main_grad.dtype != torch.float32 or main_grad.shape != shape):
        raise ValueError(f"main_grad is {main_grad.dtype} {list(main_grad.shape)}: expected float32 {list(shape)}")
    model = find_model(accumulator)
    result = torch.zeros(shape, dtype=torch.float32, device=left.values.device)
    for e, count in enumerate(experts.counts):
        if count:
            sides = left.colwise(experts, e), right.colwise(experts, e)
            result[e] = _scaled(_product(model, *sides, restart), *sides, _of_expert(alpha, e))
    if main_grad is not None:
        # Selected by the experts' counts, so that an untouched main_grad keeps a -0.
        written = torch.tensor([count > 0 for count in experts.counts], device=result.device)
        result = torch.where(written[:, None, None], main_grad + result, main_grad)
    return result.to(_result_type(dtype))


@dataclass(frozen=True)
class _Matrix:
    """One factor of a product, K last: values, or codes and scales [rows, K / block]; what its product is scaled by.

    amax: None, [] or [rows]. factor: of the global amax.
    """

    which: str
    values: Tensor
    scales: Tensor | None = None
    source: Quantized | None = None
    amax: Tensor | None = None


@dataclass(frozen=True)
class _Operand:
    """An argument in matrix orientation [rows, columns]: values, or codes and scales of a `Quantized`."""

    which: str
    values: Tensor
    scales: Tensor | None
    source: Quantized | None

    @classmethod
    def read(cls, which: str, operand: Tensor | Quantized, axis: int) -> _Operand:
        if isinstance(operand, Tensor):
            if operand.dim() != 2 or not operand.is_floating_point():
                raise ValueError(
                    f"{which} is {operand.dtype} {list(operand.shape)}: expected two dimensions of floating-point "
                    "values (codes are given as a Quantized or a torch float8 tensor)"
                )
            return cls(which, operand, None, None)
        if operand.axis != axis:
            kinds = {-1: "row-wise (axis -1)", -2: "column-wise (axis -2)"}
            raise ValueError(
                f"{which} is quantised {kinds[operand.axis]}: this product sums along the other axis, "
                f"quantise it {kinds[axis]}"
            )
        scales = operand.compact_scales
        return cls(which, operand.unpacked_codes(), scales.t() if operand.transposed else scales, operand)

    @property
    def rows(self) -> int:
        return self.values.shape[0]

    @property
    def columns(self) -> int:
        return self.values.shape[1]

    def rowwise(self, rows: slice, expert: int = 0) -> _Matrix:
        """Some rows, to be summed along the columns."""
        scales = None if self.scales is None else self.scales[rows]
        return _Matrix(self.which, self.values[rows], scales, self.source, self._amax(expert, rows))

    def colwise(self, experts: Experts | None = None, expert: int = 0) -> _Matrix:
        """The columns of one expert's rows (None: of all rows), to be summed along the rows."""
        if experts is None:
            experts = Experts.single(self.rows)
        start, count = experts.starts[expert], experts.counts[expert]
        values = self.values[start : start + count].t()
        if self.source is None or self.scales is None:
            return _Matrix(self.which, values)
        owners = self.source.experts
        if (owners.starts, owners.counts) != (experts.starts, experts.counts):
            raise ValueError(
                f"{self.which} is quantised for experts that start at {owners.starts} with {owners.counts} rows, "
                f"but the offsets and counts say {experts.starts} and {experts.counts}"
            )
        block = self.source.block
        first = owners.colwise_row(expert, 0, block) if count else 0
        scales = self.scales[first : first + -(-count // block)].t()
        return _Matrix(self.which, values, scales, self.source, self._amax(expert, slice(None)))

    def _amax(self, expert: int, lines: slice) -> Tensor | None:
        amax = None if self.source is None else self.source.global_amax
        if amax is None or self.source is None:
            return None
        if self.source.line_scaled:
            return amax[lines].float()
        return (amax[expert] if amax.dim() else amax).float()


def _weights(weights: Weights, count: int, axis: int) -> tuple[list[_Operand], tuple[int, int]]:
    """The weights of each expert and their one shape (0, 0 if there is nothing to tell it)."""
    if isinstance(weights, Tensor) and weights.dim() != 3:
        raise ValueError(f"weights have shape {list(weights.shape)}: expected [experts, N, K]")
    if len(weights) != count:
        raise ValueError(f"there are weights for {len(weights)} experts: offsets describe {count}")
    each = [_Operand.read(f"weights[{e}]", weights[e], axis) for e in range(count)]
    if not each:
        return [], (weights.shape[1], weights.shape[2]) if isinstance(weights, Tensor) else (0, 0)
    for weight in each:
        if weight.values.shape != each[0].values.shape:
            raise ValueError(
                f"{weight.which} has shape {list(weight.values.shape)} and weights[0] has "
                f"{list(each[0].values.shape)}: expected one shape"
            )
    return each, (each[0].rows, each[0].columns)


def _each_row(
    left: _Operand,
    right: list[_Matrix],
    columns: int,
    experts: Experts,
    accumulator: str,
    alpha: Tensor | float | None,
    bias: Tensor | None,
    prob: Tensor | None,
    restart: int,
    dtype: torch.dtype,
) -> Tensor:
    """The rows of every expert times its right factor."""
    model = find_model(accumulator)

    if bias is not None and bias.shape != (len(experts), columns):
        raise ValueError(f"bias has shape {list(bias.shape)}: expected {[len(experts), columns]}")
    if prob is not None and (prob.dtype != torch.float32 or prob.shape != (experts.capacity,)):
        raise ValueError(f"prob is {prob.dtype} {list(prob.shape)}: expected float32 {[experts.capacity]}")
    result = torch.zeros((experts.capacity, columns), dtype=torch.float32, device=left.values.device)
    for e, (start, count) in enumerate(zip(experts.starts, experts.counts, strict=True)):
        if count:
            rows = slice(start, start + count)
            part = left.rowwise(rows, e)
            value = _scaled(_product(model, part, right[e], restart), part, right[e], _of_expert(alpha, e))
            if bias is not None:
                value = value + bias[e].float()
            if prob is not None:
                value = value * prob[rows, None]
            result[rows] = value
    return result.to(_result_type(dtype))


def _product(model: Model, left: _Matrix, right: _Matrix, restart: int) -> Tensor:
    """left [M, K] times right [N, K]^T as the accumulator gives it, block scales included: float32 [M, N]."""
    if left.values.shape[1] != right.values.shape[1]:
        raise ValueError(
            f"{left.which} has {left.values.shape[1]} values to sum and {right.which} has "
            f"{right.values.shape[1]}: expected as many"
        )
    if model.rounding == "rne_f16":
        raise ValueError(f"accumulator {model.name} is float16: grouped products need a float32 one")
    quantised = [side.source for side in (left, right) if side.source is not None]
    if model.scale_format:
        if len(quantised) < 2 or any(not _applies(model, source) for source in quantised):
            raise ValueError(
                f"{left.which} and {right.which} do not fit accumulator {model.name}: it needs "
                f"{' or '.join(model.operands)} codes with {model.scale_format} scales for {model.scale_block}"
            )
        return tensor_core.matmul(
            left.values,
            right.values.t(),
            None,
            model.name,
            a_format=_name(left.source),
            b_format=_name(right.source),
            scales_a=left.scales,
            scales_b=None if right.scales is None else right.scales.t(),
            restart=restart,
        )
    if len(quantised) == 2 and "e4m3" in model.operands:
        return _scaled_blocks(model, left, right, restart)
    sides = [_exact_bfloat16(side) if side.source is not None else side.values for side in (left, right)]
    return tensor_core.matmul(sides[0], sides[1].t(), None, model.name, restart=restart)


def _name(source: Quantized | None) -> str | None:
    return None if source is None else source.element.name.lower()


def _applies(model: Model, source: Quantized) -> bool:
    """Whether the tensor core can apply the block scales of an operand."""
    scale_format = {"E8M0": "e8m0", "E4M3": "e4m3", "UE4M3": "e4m3"}.get(source.scale_format.name)
    kind = (scale_format, source.block)
    return _name(source) in model.operands and kind == (model.scale_format, model.scale_block)


def _exact_bfloat16(side: _Matrix) -> Tensor:
    """Codes times block scales as bfloat16. ValueError where bfloat16 does not hold the value."""
    assert side.source is not None
    assert side.scales is not None
    spread = side.scales.repeat_interleave(side.source.block, dim=1)[:, : side.values.shape[1]]
    exact = side.source.element.decode(side.values, torch.float64)
    exact = exact * side.source.scale_format.decode(spread, torch.float64)
    # Every exact float32 product that bfloat16 holds survives both conversions.
    rounded = exact.float().to(torch.bfloat16)
    wrong = (rounded.double() != exact) & ~torch.isnan(exact)
    if bool(wrong.any()):
        place = tuple(int(i) for i in wrong.nonzero()[0])
        raise ValueError(
            f"{side.which}: code 0x{int(side.values[place]):02X} under scale code {int(spread[place])} is "
            f"{float(exact[place])!r}, which bfloat16 does not hold: scale the tensor away from the ends of the "
            f"{side.source.scale_format.name} range or take an accumulator that applies the scales"
        )
    return rounded


def _scaled_blocks(model: Model, left: _Matrix, right: _Matrix, restart: int) -> Tensor:
    """FP8 products of each scale block, scaled and added up by FMAs in float32."""
    assert left.source is not None
    assert right.source is not None
    assert left.scales is not None
    assert right.scales is not None
    for side in (left, right):
        source = side.source
        if source is None or (source.scale_format.name, source.block) != ("E8M0", 32):
            raise ValueError(f"{side.which} does not fit accumulator {model.name}: it needs E8M0 scales for 32 values")
    if restart:
        raise ValueError(f"restart = {restart}: {model.name} begins anew at every block of 32 here")
    block, length = 32, left.values.shape[1]
    blocks = -(-length // block)
    sides = [
        torch.nn.functional.pad(side.values, (0, blocks * block - length))
        .reshape(-1, blocks, block)
        .transpose(0, 1)
        .contiguous()
        for side in (left, right)
    ]
    sums = tensor_core.accumulate(
        sides[0], sides[1], None, model.name, a_format=_name(left.source), b_format=_name(right.source)
    )
    total = torch.zeros(sums.shape[1:], dtype=torch.float32, device=sums.device)
    for i in range(blocks):
        codes = left.scales[:, i].int()[:, None] + right.scales[:, i].int()[None, :]
        exponents = codes - 2 * 127
        nan = (left.scales[:, i] == 0xFF)[:, None] | (right.scales[:, i] == 0xFF)[None, :]
        outside = ~nan & ((exponents > 127) | ((exponents < -149) & (sums[i] != 0)))
        if bool(outside.any()):
            place = tuple(int(j) for j in outside.nonzero()[0])
            raise ValueError(
                f"block {i} of {left.which} row {place[0]} and {right.which} row {place[1]} has the scale "
                f"2^{int(exponents[place])}, which float32 does not hold"
            )
        scale = power_of_two(exponents.clamp(-150, 127)).float()
        total = fma(sums[i], scale.masked_fill(nan, math.nan), total)
    return total


def _of_expert(alpha: Tensor | float | None, expert: int) -> Tensor | float | None:
    return alpha[expert] if isinstance(alpha, Tensor) and alpha.dim() else alpha


def _scaled(value: Tensor, left: _Matrix, right: _Matrix, alpha: Tensor | float | None) -> Tensor:
    """The accumulator times alpha and the global scales, which are multiplied first and in this order."""
    factors: list[Tensor] = []
    if alpha is not None:
        factors.append(torch.as_tensor(alpha, dtype=torch.float32, device=value.device))
    if left.amax is not None:
        factors.append(left.amax.unsqueeze(1) if left.amax.dim() else left.amax)
    if right.amax is not None:
        factors.append(right.amax)
    constant = math.prod(side.source.global_factor for side in (left, right) if side.amax is not None and side.source)
    if constant != 1.0:
        factors.append(torch.tensor(constant, dtype=torch.float32, device=value.device))
    if not factors:
        return value
    scale = factors[0]
    for factor in factors[1:]:
        scale = scale * factor
    return value * scale


def _result_type(dtype: torch.dtype) -> torch.dtype:
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dtype is {dtype}: results are float32 or bfloat16")
    return dtype
