"""Quantised operands of the fused grouped GEMMs: codes and scales on the device, of tokens or of stacked weights.

Twin of `moe_numerics.reference.quantized`, without the experts: kernels read them from the token offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from moe_numerics.fused.launch import check_tensor
from moe_numerics.reference.formats import E2M1, E4M3, E8M0, FloatFormat
from moe_numerics.reference.quantized import Quantized as ReferenceQuantized
from moe_numerics.reference.scale_layout import BLOCKS, LINES, swizzled_size

__all__ = ["NVFP4_FACTOR", "Quantized"]

NVFP4_FACTOR = 1.0 / (E2M1.max_value * E4M3.max_value)


@dataclass(frozen=True, eq=False)
class Quantized:
    """Codes and block scales of a matrix [rows, columns], or of every expert's weights [experts, rows, columns].

    MXFP8 (element E4M3 or E5M2, scale_format E8M0): codes uint8 [rows, columns]; scales row-wise (axis -1)
    [rows, columns / 32], column-wise (axis -2) [blocks of 32 rows, columns].
    NVFP4 (element E2M1, scale_format E4M3, a global_amax): row-wise codes [rows, columns / 2], scales
    [rows, columns / 16]; column-wise transposed, codes [columns, blocks of 16 rows * 8], scales [columns, blocks].
    Weights have all this for each expert, stacked. Where an expert's blocks of tokens lie in column-wise copies is told
    by `moe_numerics.reference.ragged.Experts.colwise_row`.
    swizzled: scales are tiles of 128 lines by 4 blocks over the whole buffer instead, as the quantisers' `swizzled`
    recipes write them and `moe_numerics.reference.scale_layout` states: uint8 [bytes], of weights [experts, bytes].
    Lines are rows of row-wise and columns of column-wise matrices; what fills up the tiles is not read. Only products
    whose tensor core applies scales take them.

    global_amax: float32 [], [1] or [experts]. global_factor: a dequantised element is
    code * (scale * (global_amax * global_factor)).

    ValueError: another combination of formats; an axis that is neither -1 nor -2; NVFP4 without a global_amax.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    element: FloatFormat
    scale_format: FloatFormat
    axis: int
    global_amax: torch.Tensor | None = None
    global_factor: float = 1.0
    swizzled: bool = False

    def __post_init__(self) -> None:
        pair = (self.element.name, self.scale_format.name)
        if pair not in (("E4M3", "E8M0"), ("E5M2", "E8M0"), ("E2M1", "E4M3")):
            raise ValueError(
                f"element is {pair[0]} with {pair[1]} scales: expected E4M3 or E5M2 with E8M0 (MXFP8), or E2M1 with "
                "E4M3 (NVFP4)"
            )
        if self.axis not in (-1, -2):
            raise ValueError(f"axis is {self.axis}: expected -1 (row-wise) or -2 (column-wise)")
        if (self.global_amax is not None) != self.packed:
            raise ValueError(f"global_amax is {self.global_amax}: NVFP4 has one and MXFP8 has none")

    @classmethod
    def mxfp8(cls, codes: torch.Tensor, scales: torch.Tensor, axis: int, element: FloatFormat = E4M3) -> Quantized:
        """MXFP8 codes and scales."""
        return cls(codes, scales, element, E8M0, axis)

    @classmethod
    def nvfp4(
        cls,
        codes: torch.Tensor,
        scales: torch.Tensor,
        global_amax: torch.Tensor,
        axis: int,
        global_factor: float = NVFP4_FACTOR,
    ) -> Quantized:
        """NVFP4 codes, scales and global amax."""
        return cls(codes, scales, E2M1, E4M3, axis, global_amax, global_factor)

    @classmethod
    def of(cls, source: ReferenceQuantized | Sequence[ReferenceQuantized]) -> Quantized:
        """The operand that the reference has as one matrix, or as one for each expert, which are stacked.

        ValueError: there are none; they differ in format; a global amax for each row.
        """
        single = isinstance(source, ReferenceQuantized)
        each = [source] if isinstance(source, ReferenceQuantized) else list(source)
        if not each:
            raise ValueError("no matrices were given: expected one for each expert")
        kinds = {(one.element.name, one.scale_format.name, one.axis, one.global_factor, one.swizzled) for one in each}
        if len(kinds) > 1:
            raise ValueError(f"the experts' matrices have formats {sorted(kinds)}: expected one")
        if any(one.line_scaled for one in each):
            raise ValueError("global_amax has an entry for each row: these kernels take one a tensor or an expert")
        first = each[0]
        amax = None
        if first.global_amax is not None:
            amaxes = [one.global_amax for one in each if one.global_amax is not None]
            amax = amaxes[0] if single else torch.stack([one.reshape(()) for one in amaxes])
        codes, scales = (
            parts[0] if single else torch.stack(parts)
            for parts in ([one.codes for one in each], [one.scales for one in each])
        )
        formats = (first.element, first.scale_format, first.axis)
        return cls(codes, scales, *formats, amax, first.global_factor, first.swizzled)

    @property
    def packed(self) -> bool:
        """Whether a byte holds two codes."""
        return self.element == E2M1

    @property
    def transposed(self) -> bool:
        """Whether a line of codes is a column of the matrix."""
        return self.packed and self.axis == -2

    @property
    def block(self) -> int:
        """Values that share a scale."""
        return 16 if self.packed else 32

    @property
    def columns(self) -> int:
        """Columns of the matrix."""
        if self.transposed:
            return self.codes.shape[-2]
        return self.codes.shape[-1] * (2 if self.packed else 1)

    def check(self, name: str, device: torch.device, experts: int, axis: int, weights: bool) -> None:
        """ValueError unless this can be read as tokens, or as weights, that are summed along an axis.

        Dtypes, device, strides, alignment, and shapes against each other; `rows` checks those that depend on the rows.
        """
        kinds = {-1: "row-wise (axis -1)", -2: "column-wise (axis -2)"}
        if self.axis != axis:
            raise ValueError(
                f"{name} is quantised {kinds[self.axis]}: this product sums along the other axis, "
                f"quantise it {kinds[axis]}"
            )
        lead = (experts,) if weights else ()
        check_tensor(f"{name} codes", self.codes, torch.uint8, (*lead, None, None), device, 16)
        columns, block = self.columns, self.block
        if columns == 0 or columns % block:
            raise ValueError(f"{name} has {columns} columns: expected a positive multiple of {block}, its scale block")
        lines, across = self.codes.shape[-2:]
        if self.transposed:
            if across % (block // 2):
                raise ValueError(f"{name} codes have {across} bytes a column: expected a multiple of {block // 2}")
            shape: tuple[int | None, ...] = (lines, across // (block // 2))
        elif self.axis == -1:
            shape = (lines, columns // block)
        elif weights:
            shape = (-(-lines // block), columns)
        else:
            shape = (None, columns)
        across_lines = self.axis == -2 and not self.packed
        # Compact column-wise MXFP8 scales are read 16 at once.
        align = 16 if across_lines and not self.swizzled else 1
        if self.swizzled:
            first, second = shape
            if first is None or second is None:
                shape = (None,)
            else:
                shape = (swizzled_size(second, first) if across_lines else swizzled_size(first, second),)
        check_tensor(f"{name} scales", self.scales, torch.uint8, (*lead, *shape), device, align)
        if self.global_amax is not None:
            amax = self.global_amax
            if amax.dtype != torch.float32 or amax.device != device or amax.numel() not in (1, experts):
                raise ValueError(
                    f"{name} global_amax is {amax.dtype} {list(amax.shape)} on {amax.device}: expected float32 with "
                    f"one entry or {experts} on {device}"
                )

    def rows(self, name: str, experts: int, alignment: int, weights: bool) -> int:
        """Rows of the matrix; of transposed tokens, rows that hold any buffer with as many blocks.

        ValueError: column-wise scales of tokens that are not as many as the rows, experts and alignment ask for.
        """
        if self.transposed:
            return self.codes.shape[-1] * 2
        rows = self.codes.shape[-2]
        if self.axis == -2 and not weights:
            wanted, unit = colwise_rows(rows, experts, alignment, self.block), "rows"
            if self.swizzled:
                wanted, unit = swizzled_size(self.columns, wanted), "bytes in the 128x4-swizzled layout"
            if self.scales.shape[0] != wanted:
                raise ValueError(
                    f"{name} scales have {self.scales.shape[0]} {unit}: expected {wanted} for {rows} rows of {experts} "
                    f"experts whose offsets are multiples of {alignment}"
                )
        return rows

    def tiles(self) -> torch.Tensor:
        """Checked swizzled scales as [(experts,) tiles of 128 lines, tiles of 4 blocks, 512]."""
        lines = self.columns if self.axis == -2 else self.codes.shape[-2]
        return self.scales.unflatten(-1, (-(-lines // LINES), -1, LINES * BLOCKS))


def colwise_rows(rows: int, experts: int, alignment: int, block: int) -> int:
    """Blocks of a column-wise copy; see `moe_numerics.reference.ragged.Experts.colwise_rows`."""
    return -(-rows // block) if alignment % block == 0 else rows // block + experts
