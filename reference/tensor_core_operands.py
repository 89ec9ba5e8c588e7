"""Operands of a tensor core: values, codes and scales read into exact float64 values and their exponents."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .formats import E8M0, UE4M3, FloatFormat
from .tensor_core_models import OPERANDS, Model

# The exponent of a zero: below every real one, and two of them and two scales still fit an int16.
NO_EXPONENT = -8192
# What the exponent bits of Inf and NaN give.
NOT_FINITE = 1024


@dataclass(frozen=True)
class Side:
    """One operand, K first, with NaN and Inf as zeros.

    values [K, ...]: float64, of FP4 float32. exponents [terms, ...]: of the terms that are aligned, which are
    the values, or the scales if products are scaled after an exact sum; then `scales` [terms, ...] are the
    scales. `signs` [K, ...] is there if there is an Inf: Inf as it is and 1, 0 or -1 for the rest.
    """

    values: Tensor
    exponents: Tensor
    scales: Tensor | None = None
    signs: Tensor | None = None

    @property
    def length(self) -> int:
        """K, padded to whole groups."""
        return self.values.shape[0]

    def map(self, change: Callable[[Tensor], Tensor]) -> Side:
        scales = None if self.scales is None else change(self.scales)
        signs = None if self.signs is None else change(self.signs)
        return Side(change(self.values), change(self.exponents), scales, signs)

    def part(self, row: Model, k: slice) -> Side:
        """The values from k.start to k.stop of K, which are whole groups."""
        terms = slice(k.start // row.exact_run, k.stop // row.exact_run)
        return Side(
            self.values[k],
            self.exponents[terms],
            None if self.scales is None else self.scales[terms],
            None if self.signs is None else self.signs[k],
        )

    def exponent_range(self) -> tuple[int, int]:
        """The smallest and the largest exponent of a nonzero term; a large and a small number if none is."""
        zero = self.exponents < NO_EXPONENT // 2
        return int(self.exponents.masked_fill(zero, -NO_EXPONENT).min()), int(self.exponents.max())


def power_of_two(exponents: Tensor) -> Tensor:
    """2^exponents as float64, by its bits: exact on every device. Exponents from -1022 to 1023."""
    return exponents.long().add_(1023).bitwise_left_shift_(52).view(torch.float64)


def exponent(values: Tensor, min_exponent: int) -> Tensor:
    """max(floor(log2 |values|), min_exponent) of float64 values as int16, NO_EXPONENT for zeros."""
    exponents = values.view(torch.int64).bitwise_right_shift(52).bitwise_and_(0x7FF).to(torch.int16)
    return exponents.sub_(1023).clamp_(min=min_exponent).masked_fill_(values == 0, NO_EXPONENT)


def _decode(row: Model, which: str, x: Tensor, name: str | None, check: bool) -> tuple[Tensor, FloatFormat]:
    """The values of an operand as float64, and its format."""
    implied = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}.get(x.dtype)
    name = name or implied or row.operands[0]
    if implied and name != implied:
        raise ValueError(f"{which}_format is {name!r} but {which} is {x.dtype}: codes have the format of their dtype")
    if name not in row.operands:
        raise ValueError(f"{which} is {name} ({x.dtype}): {row.name} takes {' or '.join(row.operands)}")
    fmt, x = OPERANDS[name], x.detach()
    if implied:
        x = x.view(torch.uint8)
    if x.dtype == torch.uint8:
        if fmt.bits > 8:
            raise ValueError(f"{which} is uint8: give {name} operands as floating-point values")
        return fmt.decode(x, torch.float64), fmt
    if not x.is_floating_point():
        raise ValueError(f"{which} is {x.dtype}: expected floating-point values or uint8 codes of {name}")
    if name == "tf32":
        x = x.float().view(torch.int32).bitwise_and(-1 << 13).view(torch.float32)
    values = x.double()
    if check:
        _check_values(which, name, values, fmt)
    return values, fmt


def _check_values(which: str, name: str, values: Tensor, fmt: FloatFormat) -> None:
    finite = torch.isfinite(values)
    known = finite.clone()
    if fmt.specials != "none":
        known |= torch.isnan(values)
    if fmt.specials == "ieee":
        known |= torch.isinf(values)
    kept = torch.where(finite, values, 0.0)
    exponents = exponent(kept, fmt.min_exponent).clamp_(min=fmt.min_exponent)
    whole = kept * power_of_two(fmt.mantissa_bits - exponents.long())
    wrong = ~known | (whole != torch.round(whole)) | (kept.abs() > fmt.max_value)
    if bool(wrong.any()):
        place = tuple(int(i) for i in wrong.nonzero()[0])
        raise ValueError(f"{which}{list(place)} = {float(values[place])!r} is no {name} value: round to {name} first")


def _decode_scales(row: Model, which: str, x: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Scales as float64 and their exponents, one for each run (or value) of K; None for an unscaled model."""
    if not row.scale_format:
        if scales is not None:
            raise ValueError(f"scales_{which} is given: {row.name} has no scales")
        return None
    blocks = -(-x.shape[-1] // row.scale_block)
    if scales is None or scales.dtype != torch.uint8 or scales.shape != (*x.shape[:-1], blocks):
        given = "missing" if scales is None else f"{scales.dtype} {list(scales.shape)}"
        raise ValueError(
            f"scales_{which} is {given}: {row.name} needs uint8 {row.scale_format} codes, one for each row "
            f"and {row.scale_block} values of K: {blocks} blocks for K = {x.shape[-1]}"
        )
    if row.scale_format == "e8m0":
        values, least = E8M0.decode(scales, torch.float64), E8M0.min_exponent
    else:
        values, least = UE4M3.decode(scales & 0x7F, torch.float64), UE4M3.min_exponent
    repeat = row.scale_block // row.exact_run
    return values.repeat_interleave(repeat, -1), exponent(values, least).repeat_interleave(repeat, -1)


def prepare(
    row: Model, which: str, x: Tensor, name: str | None, scales: Tensor | None, check: bool
) -> tuple[Side, Tensor | None]:
    """An operand [..., rows, K] as a `Side` [K, batch, rows], K padded, and which rows hold a NaN, if any."""
    values, fmt = _decode(row, which, x, name, check)
    scaled = _decode_scales(row, which, x, scales)
    rows, length = x.shape[-2:]
    batch = math.prod(x.shape[:-2])
    padded = -(-length // row.group) * row.group

    def arrange(t: Tensor, size: int) -> Tensor:
        t = t[..., :size]
        if t.shape[-1] < size:
            t = torch.nn.functional.pad(t, (0, size - t.shape[-1]))
        return t.reshape(batch, rows, size).permute(2, 0, 1).contiguous()

    values = arrange(values, padded)
    exponents = exponent(values, fmt.min_exponent)
    signs = nan_rows = factors = None
    if values.numel() and int(exponents.max()) == NOT_FINITE:
        nan, infinite = torch.isnan(values), torch.isinf(values)
        nan_rows = nan.any(0)
        values = values.masked_fill(nan, 0.0)
        if bool(infinite.any()):
            signs = torch.where(infinite, values, torch.sign(values))
        values = values.masked_fill(infinite, 0.0)
        exponents = exponents.masked_fill(nan | infinite, NO_EXPONENT)
    if scaled is not None:
        factors, factor_exponents = (arrange(t, padded // row.exact_run) for t in scaled)
        nan = torch.isnan(factors)
        nan_rows = nan.any(0) if nan_rows is None else nan_rows | nan.any(0)
        factors = factors.masked_fill(nan, 0.0)
        if row.exact_run > 1:
            # FP4 products and the sums of their runs are exact in float32.
            exponents, values = factor_exponents.masked_fill(factors == 0, NO_EXPONENT), values.float()
        else:
            values = values * factors
            exponents, factors = (exponents + factor_exponents).masked_fill_(values == 0, NO_EXPONENT), None
    return Side(values, exponents, factors, signs), nan_rows
