"""NVFP4 quantisation over ragged experts: row-wise and transposed column-wise copies, with or without rotation.

Two passes: the amax of what is quantised, then the codes. The row-wise copy has the amax of x, the column-wise copy
that of x or, rotated, of the rotated blocks (so a training step's input has two). With contract.amax_scope "tensor"
an amax is one number over all experts, with "expert" one for each; a row-scaled copy has one for each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from . import hadamard, nvfp4
from .contract import SUITE, Contract
from .quantized import Quantized
from .ragged import Experts
from .scale_layout import swizzle, swizzled_size

BLOCK = nvfp4.BLOCK
# Numbers that tell the random streams of one tensor's two copies apart.
ROWWISE_STREAM, COLWISE_STREAM = 0, 1


@dataclass(frozen=True)
class Recipe:
    """What is written of a tensor.

    rowwise, colwise: which copies. rotated: the column-wise copy is of the rotated blocks. block2d: scales of 16x16
    tiles. stochastic: codes are rounded stochastically, with Philox bits keyed by the seed. four_over_six: "mae" or
    "mse", the error by which each block chooses between two scales; scale_max: the largest block scale, 448, or 256 to
    leave the larger of the two room. row_scaled: an amax for each row of the row-wise copy. swizzled: scales over the
    whole buffer in tiles of 128 lines by 4 blocks (`scale_layout`), lines being rows or, column-wise, columns.
    ValueError: nothing to write; a rotation or stochastic rounding of 16x16 tiles, which weights have and never need,
    or of four over six, which compares rounding errors; row scales with a column-wise copy or tiles, which span rows.
    """

    rowwise: bool = True
    colwise: bool = True
    rotated: bool = False
    block2d: bool = False
    stochastic: bool = False
    four_over_six: str | None = None
    scale_max: float = 448.0
    row_scaled: bool = False
    swizzled: bool = False

    def __post_init__(self) -> None:
        if not (self.rowwise or self.colwise):
            raise ValueError("neither rowwise nor colwise: a recipe writes at least one copy")
        if self.rotated and not self.colwise:
            raise ValueError("rotated without colwise: only the column-wise copy is rotated")
        if self.block2d and (self.rotated or self.stochastic):
            raise ValueError("block2d with rotated or stochastic: 16x16 tiles are for weights, which have neither")
        if self.four_over_six not in (None, *nvfp4.FOUR_OVER_SIX):
            raise ValueError(f"four_over_six is {self.four_over_six!r}: expected 'mae', 'mse' or None")
        if self.scale_max not in (448.0, 256.0) or (self.scale_max != 448.0 and self.four_over_six is None):
            raise ValueError(f"scale_max is {self.scale_max}: expected 448, or 256 with four_over_six")
        if self.four_over_six is not None and (self.rotated or self.stochastic):
            raise ValueError(
                "four_over_six with rotated or stochastic: it compares the errors of rounding x to nearest"
            )
        if self.row_scaled and (self.colwise or self.block2d):
            raise ValueError("row_scaled with colwise or block2d: their blocks span rows of different amax")


def output_shapes(
    rows: int, hidden: int, experts: int, recipe: Recipe, alignment: int, contract: Contract
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Gives shape and dtype of each result for x [rows, hidden]."""
    blocks = -(-rows // BLOCK) if alignment % BLOCK == 0 else rows // BLOCK + experts
    scope = (1,) if contract.amax_scope == "tensor" else (experts,)
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    if recipe.rowwise:
        shapes["codes_rowwise"] = ((rows, hidden // 2), torch.uint8)
        shapes["scales_rowwise"] = (_scales_shape(rows, hidden // BLOCK, recipe), torch.uint8)
        shapes["amax_rowwise"] = ((rows,) if recipe.row_scaled else scope, torch.float32)
    if recipe.colwise:
        shapes["codes_colwise"] = ((hidden, blocks * BLOCK // 2), torch.uint8)
        shapes["scales_colwise"] = (_scales_shape(hidden, blocks, recipe), torch.uint8)
        shapes["amax_colwise"] = (scope, torch.float32)
    return shapes


def _scales_shape(lines: int, blocks: int, recipe: Recipe) -> tuple[int, ...]:
    return (swizzled_size(lines, blocks),) if recipe.swizzled else (lines, blocks)


def quantize(
    x: torch.Tensor,
    offsets: torch.Tensor,
    counts: torch.Tensor | None = None,
    *,
    recipe: Recipe,
    alignment: int = 1,
    contract: Contract = SUITE,
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Gives the NVFP4 copies of x that the recipe names.

    x: bfloat16 [capacity, hidden], hidden a multiple of 16; offsets: int32 or int64 [experts + 1]; counts: [experts]
    or None. Results: `codes_rowwise` [capacity, hidden / 2], `scales_rowwise` [capacity, hidden / 16], `codes_colwise`
    [hidden, blocks * 8], `scales_colwise` [hidden, blocks] as of `nvfp4.quantize` (or swizzled, with
    contract.scale_padding where no block of an expert has a scale), `amax_rowwise` and `amax_colwise`
    float32 [1] or [experts], or [capacity] if row-scaled. Rows without an owner are not read. ValueError: see
    `nvfp4.quantize`.
    """
    experts = Experts.from_offsets(offsets, counts, x.shape[0], alignment)
    if x.dim() != 2 or x.shape[1] % BLOCK:
        raise ValueError(f"x has shape {list(x.shape)}: expected [capacity, hidden], hidden a multiple of {BLOCK}")
    choices: dict[str, Any] = {
        "contract": contract,
        "block2d": recipe.block2d,
        "four_over_six": recipe.four_over_six,
        "scale_max": recipe.scale_max,
    }
    results: dict[str, torch.Tensor] = {}
    if recipe.rowwise:
        own = choices | ({"seed": seed, "tensor": ROWWISE_STREAM} if recipe.stochastic else {})
        copy = nvfp4.quantize(x, -1, experts=experts, row_scaled=recipe.row_scaled, **own)
        results |= _named("rowwise", copy, recipe, contract)
    if recipe.colwise:
        own = choices | ({"seed": seed, "tensor": COLWISE_STREAM} if recipe.stochastic else {})
        if recipe.rotated:
            rotated = hadamard.rotate(x, -2, contract=contract, experts=experts)
            blocks = experts.blocks(BLOCK)
            copy = nvfp4.quantize(rotated, -2, experts=blocks, **own)
        else:
            copy = nvfp4.quantize(x, -2, experts=experts, **own)
        results |= _named("colwise", copy, recipe, contract)
    return results


def _named(which: str, copy: Quantized, recipe: Recipe, contract: Contract) -> dict[str, torch.Tensor]:
    assert copy.global_amax is not None
    return {
        f"codes_{which}": copy.codes,
        f"scales_{which}": swizzle(copy.scales, contract.scale_padding) if recipe.swizzled else copy.scales,
        f"amax_{which}": copy.global_amax.reshape(-1),
    }
