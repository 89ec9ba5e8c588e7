"""Largest magnitude of a tensor or of each expert, exact and independent of the order of the reduction.

Magnitudes of float32 values are ordered like their bits without the sign, so the maximum is one of integers:
it does not round, any tree of reductions and any order of atomics gives the same bits, and NaN, whose bits
are the largest, wins. A kernel can use `redux.sync.max.u32` and `atom.global.max.u32` (PTX ISA).
"""

from __future__ import annotations

import torch

from .contract import SUITE, Contract
from .ragged import Experts

INF_BITS = 0x7F800000


def magnitude_bits(x: torch.Tensor, nan_policy: str = "propagate") -> torch.Tensor:
    """Gives the float32 bits of |x| as int32; with "ignore" a NaN counts as 0.

    x: float32, bfloat16 or float16, any shape. ValueError: another dtype or policy.
    """
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"x has dtype {x.dtype}: expected float32, bfloat16 or float16")
    if nan_policy not in ("propagate", "ignore"):
        raise ValueError(f"nan_policy {nan_policy!r} is unknown: expected 'propagate' or 'ignore'")
    bits = x.to(torch.float32).contiguous().view(torch.int32) & 0x7FFFFFFF
    return bits if nan_policy == "propagate" else torch.where(bits > INF_BITS, 0, bits)


def per_expert(x: torch.Tensor, experts: Experts | None = None, contract: Contract = SUITE) -> torch.Tensor:
    """Gives the largest |x| of each expert's valid rows.

    x: [capacity, columns], float32, bfloat16 or float16. experts: None is one expert with every row. Result:
    float32 [experts]; 0 for an expert without rows (or without columns), NaN where an expert holds one and
    contract.nan_policy is "propagate". Padding rows are never read. ValueError: another shape or dtype.
    """
    rows = experts if experts is not None else Experts.single(x.shape[0])
    _check_rows(x, rows)
    bits = magnitude_bits(x, contract.nan_policy)
    result = torch.zeros(len(rows), dtype=torch.int32, device=x.device)
    if x.shape[1]:
        for e, (start, count) in enumerate(zip(rows.starts, rows.counts, strict=True)):
            if count:
                result[e] = bits[start : start + count].max()
    return result.view(torch.float32)


def per_tensor(x: torch.Tensor, experts: Experts | None = None, contract: Contract = SUITE) -> torch.Tensor:
    """Gives the largest |x| over all valid rows, float32 [] ; 0 when there are none. See `per_expert`."""
    each = per_expert(x, experts, contract)
    if not each.numel():
        return torch.zeros((), dtype=torch.float32, device=x.device)
    return each.view(torch.int32).max().view(torch.float32)


def _check_rows(x: torch.Tensor, experts: Experts) -> None:
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}: expected two dimensions, [capacity, columns]")
    if x.shape[0] != experts.capacity:
        raise ValueError(f"x has {x.shape[0]} rows but the experts describe a buffer of {experts.capacity}")
