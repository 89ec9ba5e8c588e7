"""Tensors of a training step of the MLP as its matrix products read them: bfloat16, MXFP8 or NVFP4, in two copies.

Twins of `copies` and `weight_copies` in `moe_numerics.reference.grouped_mlp`, made by the fused quantisers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from moe_numerics.fused import elementwise, grouped_nvfp4
from moe_numerics.fused.gemm_operands import Ragged
from moe_numerics.fused.quantized import Quantized
from moe_numerics.reference.contract import Contract
from moe_numerics.reference.formats import FloatFormat
from moe_numerics.reference.grouped_mlp import Step
from moe_numerics.reference.grouped_nvfp4 import Recipe

__all__ = ["Copies", "mxfp8_copies", "nvfp4_copies", "token_copies", "weight_copies"]

_WEIGHT_BLOCK = 32


@dataclass(frozen=True, eq=False)
class Copies:
    """One tensor as matrix products read it: summed along its columns, and along its rows."""

    rowwise: torch.Tensor | Quantized
    colwise: torch.Tensor | Quantized

    def named(self, name: str) -> dict[str, torch.Tensor]:
        """Codes, scales and global amaxes by name; nothing for operands that are not quantised."""
        results: dict[str, torch.Tensor] = {}
        for which, copy in (("rowwise", self.rowwise), ("colwise", self.colwise)):
            if isinstance(copy, Quantized):
                results[f"{name}_codes_{which}"] = copy.codes
                results[f"{name}_scales_{which}"] = copy.scales
                if copy.global_amax is not None:
                    results[f"{name}_amax_{which}"] = copy.global_amax
        return results


def mxfp8_copies(results: Mapping[str, torch.Tensor], element: FloatFormat) -> Copies:
    """The copies that a kernel wrote as MXFP8 both ways."""
    rowwise, colwise = (
        Quantized.mxfp8(results[f"codes_{which}"], results[f"scales_{which}"], axis, element)
        for which, axis in (("rowwise", -1), ("colwise", -2))
    )
    return Copies(rowwise, colwise)


def nvfp4_copies(
    values: torch.Tensor,
    ragged: Ragged,
    contract: Contract,
    seed: int | None,
    largest: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Copies:
    """Row-wise, and rotated column-wise, of bfloat16 tokens; rounded stochastically if there is a seed.

    largest: amax of every expert before and after rotation, where they are known already.
    """
    device = values.device
    amax = None
    if largest is not None:
        per_tensor = contract.amax_scope == "tensor"
        plain, rotated = (each.amax(dim=0, keepdim=True) if per_tensor else each for each in largest)
        amax = {"amax_rowwise": plain, "amax_colwise": rotated}
    written = grouped_nvfp4.quantize(
        values,
        ragged.offsets,
        ragged.counts,
        recipe=Recipe(rotated=True, stochastic=seed is not None),
        alignment=ragged.alignment,
        contract=contract,
        seed=None if seed is None else _words(seed, device),
        amax=amax,
    )
    shape = () if contract.amax_scope == "tensor" else (ragged.experts,)
    rowwise, colwise = (
        Quantized.nvfp4(
            written[f"codes_{which}"], written[f"scales_{which}"], written[f"amax_{which}"].reshape(shape), axis
        )
        for which, axis in (("rowwise", -1), ("colwise", -2))
    )
    return Copies(rowwise, colwise)


def token_copies(
    values: torch.Tensor, ragged: Ragged, choices: Step, *, gradient: bool = False, seed: int = 0
) -> Copies:
    """A token tensor, bfloat16 [capacity, columns], as the operands of a step."""
    if choices.operands == "bf16":
        return Copies(values, values)
    if choices.operands == "mxfp8":
        element = choices.grad_element if gradient else choices.element
        written = elementwise.quantize(
            values,
            ragged.offsets,
            ragged.counts,
            element=element,
            alignment=ragged.alignment,
            contract=choices.contract,
        )
        return mxfp8_copies(written, element)
    return nvfp4_copies(values, ragged, choices.contract, seed if gradient and choices.stochastic else None)


def weight_copies(weights: torch.Tensor, choices: Step) -> Copies:
    """The weights bfloat16 [experts, N, K] as the operands of a step, stacked; N and K multiples of 32."""
    if choices.operands == "bf16":
        return Copies(weights, weights)
    experts, rows, columns = weights.shape
    offsets = torch.arange(0, (experts + 1) * rows, rows, dtype=torch.int32, device=weights.device)
    tokens, contract = weights.view(experts * rows, columns), choices.contract
    if choices.operands == "mxfp8":
        written = elementwise.quantize(
            tokens, offsets, element=choices.element, alignment=_WEIGHT_BLOCK, contract=contract
        )
        return mxfp8_copies({name: _by_expert(result, experts) for name, result in written.items()}, choices.element)
    written = grouped_nvfp4.quantize(
        tokens,
        offsets,
        recipe=Recipe(block2d=True),
        alignment=_WEIGHT_BLOCK,
        contract=contract.replace(amax_scope="expert"),
    )
    shape = (experts,) if contract.amax_scope == "tensor" else (experts, 1)
    rowwise = Quantized.nvfp4(
        _by_expert(written["codes_rowwise"], experts),
        _by_expert(written["scales_rowwise"], experts),
        written["amax_rowwise"].view(shape),
        -1,
    )
    # Lines of transposed codes are columns, which hold all experts' blocks.
    codes, scales = (
        written[name].unflatten(1, (experts, -1)).transpose(0, 1).contiguous()
        for name in ("codes_colwise", "scales_colwise")
    )
    return Copies(rowwise, Quantized.nvfp4(codes, scales, written["amax_colwise"].view(shape), -2))


def _by_expert(result: torch.Tensor, experts: int) -> torch.Tensor:
    return result.unflatten(0, (experts, -1))


def _words(seed: int, device: torch.device) -> torch.Tensor:
    """The seed as kernels take it, int32 [2], low word first; filled on the device, which nothing waits for."""
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed is {seed}: expected 0 to 2**64 - 1")
    words = torch.empty(2, dtype=torch.int32, device=device)
    for place in range(2):
        word = seed >> (32 * place) & 0xFFFFFFFF
        words[place].fill_(word - (1 << 32) if word >> 31 else word)
    return words
