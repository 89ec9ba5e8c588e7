"""A quantised matrix: codes, scales and everything needed to read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .formats import FloatFormat, unpack_e2m1
from .ragged import Experts
from .scale_layout import unswizzle


@dataclass(frozen=True, eq=False)
class Quantized:
    """Codes and block scales of a matrix [capacity, hidden], with the formats travelling beside the bytes.

    codes: uint8; [capacity, hidden], or packed two a byte along the last dimension (`packed`), or transposed
    (`transposed`: [hidden, colwise_rows(block) * block], each expert's rows moved to its own block slots).
    scales: uint8; rowwise [capacity, hidden / block]; colwise [colwise_rows(block), hidden], transposed
    colwise [hidden, colwise_rows(block)].
    element, scale_format: formats of codes and scales. axis: -1 rowwise, -2 colwise. block: elements a scale.
    experts: who owns which row.
    global_amax: of two-level scaling, else None: float32 [] or [experts]; with `line_scaled` one for each row
    (rowwise) or column (colwise).
    swizzled: scales are uint8 [bytes] in tiles over the whole buffer instead, see `scale_layout.with_swizzled_scales`.
    global_factor: a dequantised element is code * (scale * (global_amax * global_factor)).
    """

    codes: torch.Tensor
    scales: torch.Tensor
    element: FloatFormat
    scale_format: FloatFormat
    axis: int
    block: int
    experts: Experts
    packed: bool = False
    transposed: bool = False
    global_amax: torch.Tensor | None = None
    global_factor: float = 1.0
    line_scaled: bool = False
    swizzled: bool = False

    @property
    def hidden(self) -> int:
        """Columns of the matrix."""
        if self.transposed:
            return self.codes.shape[0]
        return self.codes.shape[1] * (2 if self.packed else 1)

    @property
    def compact_scales(self) -> torch.Tensor:
        """The scales in their compact shape, whatever fills up swizzled tiles.

        ValueError: swizzled scales of another dtype or size than the codes need.
        """
        if not self.swizzled:
            return self.scales
        if self.axis == -1:
            return unswizzle(self.scales, self.codes.shape[0], self.hidden // self.block)
        matrix = unswizzle(self.scales, self.hidden, self.experts.colwise_rows(self.block))
        return matrix if self.transposed else matrix.t()

    def unpacked_codes(self) -> torch.Tensor:
        """Gives the codes one a byte, in matrix orientation [capacity, hidden]; padding rows hold code 0."""
        codes = unpack_e2m1(self.codes) if self.packed else self.codes
        if not self.transposed:
            return codes
        return self.experts.from_blocks(codes.t(), self.block)

    def row_scales(self) -> torch.Tensor:
        """Gives the decoded scale of every element, float32 [capacity, hidden]; code 0 in unowned rows."""
        scales = self.scale_format.decode(self.compact_scales, torch.float32)
        if self.axis == -1:
            return scales.repeat_interleave(self.block, dim=1)
        columns = scales.t() if self.transposed else scales
        return self.experts.from_blocks(
            columns.repeat_interleave(self.block, dim=0), self.block, self.scale_format.value(0)
        )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Gives the values the codes stand for, [capacity, hidden]; padding rows are 0.

        One-level scaling: code * scale is exact in float64 and rounded once to dtype (what exceeds float32
        becomes Inf). Two-level scaling: float32 operations in Transformer Engine's order, code * (scale *
        (amax * (1/2688))) (transformer_engine/common/cast/nvfp4@2.20). NaN scales give NaN.
        """
        codes = self.unpacked_codes()
        if self.global_amax is None:
            exact = self.element.decode(codes, torch.float64) * self.row_scales().to(torch.float64)
            # One narrow significand times a power of two is exact in float32 too, so that bfloat16 rounds
            # once.
            values = exact if dtype == torch.float64 else exact.to(torch.float32).to(dtype)
        else:
            amax = self.global_amax.to(torch.float32)
            if self.line_scaled:
                amax = amax.unsqueeze(1) if self.axis == -1 else amax.unsqueeze(0)
            elif amax.dim() == 1:
                # The entry appended is that of rows without an expert, whose number is -1.
                amax = torch.cat((amax, amax.new_zeros(1)))[self.experts.row_expert(codes.device)].unsqueeze(1)
            factor = torch.tensor(self.global_factor, dtype=torch.float32, device=codes.device)
            values = (self.element.decode(codes) * (self.row_scales() * (amax * factor))).to(dtype)
        if self.experts.full:
            return values
        owned = self.experts.valid_rows(codes.device).unsqueeze(1)
        return torch.where(owned, values, torch.zeros((), dtype=values.dtype, device=values.device))
