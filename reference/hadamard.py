"""The 16x16 randomised Hadamard transform over blocks of columns, or of each expert's rows.

A block v of 16 values becomes (v * signs) @ H * (1/4), H the Sylvester matrix in natural order,
H[i][j] = (-1)**popcount(i & j). The order of the float32 operations is pinned: first the signs (exact), then
butterflies (a + b, a - b) between places that differ in bit 0, then bit 1, 2 and 3 (strides 1, 2, 4, 8), 64
additions each rounded to nearest even, then one multiplication by 1/4 (exact but for subnormal results), then
the rounding that the contract names.

Sources: arXiv 2509.25149, appendix C; transformer_engine/common/hadamard_transform@2.20 (signs, 1/4, rounding
of the result to bfloat16); cudnn-frontend v1.28, rmsnorm_rht_amax (order of the strides, no signs).
"""

from __future__ import annotations

from enum import Enum

import torch

from .contract import SUITE, Contract, check_signs
from .ragged import Experts

BLOCK = 16
_STRIDES = (1, 2, 4, 8)


class _Source(Enum):
    CONTRACT = "rht_signs of the contract"


FROM_CONTRACT = _Source.CONTRACT
Signs = tuple[int, ...] | list[int] | _Source | None


def rotate(
    x: torch.Tensor,
    axis: int,
    signs: Signs = FROM_CONTRACT,
    contract: Contract = SUITE,
    experts: Experts | None = None,
) -> torch.Tensor:
    """Gives x rotated in blocks of 16 along an axis, float32.

    x: float32, bfloat16 or float16 [capacity, hidden]. axis -1: blocks of 16 columns, hidden a multiple of
    16; result [capacity, hidden], rows that no expert owns are 0. axis -2: blocks of 16 rows that begin at
    each expert's first row; a last block that is shorter is filled with zeros, and its rotation has 16 rows
    all the same, so the result is [experts.blocks(16).capacity, hidden] in the layout of `Experts.blocks`;
    where every expert starts at a multiple of 16 that is the layout of x. Blocks never mix rows of two
    experts, and rows that no expert owns are never read.
    signs: 16 of +1 and -1, None for none, left out: contract.rht_signs. contract: rht_rounding "bfloat16"
    rounds the result to bfloat16 (held in float32); rht_normalise "none" leaves out the factor 1/4. A NaN, or
    two Infs, make NaN of what they reach; one Inf makes the whole block Inf. Zeros have the sign that
    the additions give them: signs can turn a block of zeros into some -0.
    ValueError: a sign vector of another length, a column count that is not a multiple of 16, another axis or
    shape.
    """
    blocks, rows = _blocks(x, axis, experts)
    vector = _sign_vector(signs, contract, x.device)
    if vector is not None:
        blocks = blocks * vector
    result = _butterflies(blocks)
    if contract.rht_normalise == "orthonormal":
        result = result * 0.25
    if contract.rht_rounding == "bfloat16":
        result = result.to(torch.bfloat16).to(torch.float32)
    return _unblock(result, axis, rows, x.shape[1])


def rotate_back(
    y: torch.Tensor,
    axis: int,
    signs: Signs = FROM_CONTRACT,
    contract: Contract = SUITE,
    experts: Experts | None = None,
) -> torch.Tensor:
    """Gives the values that `rotate` turned into y, up to rounding: [capacity, hidden], float32 or float64 as
    y.

    y: the result of rotate(x, axis, signs, contract, experts); experts as given there. Rows without an owner
    are 0.
    """
    if axis == -2:
        rows = experts if experts is not None else Experts.single(y.shape[0])
        blocks, slots = _blocks(y, axis, rows.blocks(BLOCK))
    else:
        blocks, slots = _blocks(y, axis, experts)
    result = _butterflies(blocks) * (0.25 if contract.rht_normalise == "orthonormal" else 0.0625)
    vector = _sign_vector(signs, contract, y.device)
    if vector is not None:
        result = result * vector
    back = _unblock(result, axis, slots, y.shape[1])
    return rows.from_blocks(back, BLOCK) if axis == -2 else back


def _sign_vector(signs: Signs, contract: Contract, device: torch.device) -> torch.Tensor | None:
    chosen = contract.rht_signs if isinstance(signs, _Source) else signs
    return None if chosen is None else torch.tensor(check_signs(tuple(chosen)), dtype=torch.float32, device=device)


def _blocks(x: torch.Tensor, axis: int, experts: Experts | None) -> tuple[torch.Tensor, Experts]:
    """x as [..., 16] blocks along the last dimension, and who owns its rows."""
    if axis not in (-1, -2):
        raise ValueError(f"axis is {axis}: expected -1 (columns) or -2 (rows)")
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}: expected two dimensions, [capacity, hidden]")
    rows = experts if experts is not None else Experts.single(x.shape[0])
    if rows.capacity != x.shape[0]:
        raise ValueError(f"x has {x.shape[0]} rows but the experts describe a buffer of {rows.capacity}")
    values = x if x.dtype == torch.float64 else x.to(torch.float32)
    if axis == -1:
        if x.shape[1] % BLOCK:
            raise ValueError(f"hidden is {x.shape[1]}: rotating columns needs a multiple of {BLOCK}")
        return values.reshape(x.shape[0], x.shape[1] // BLOCK, BLOCK), rows
    moved = rows.to_blocks(values, BLOCK)
    return moved.t().reshape(x.shape[1], rows.colwise_rows(BLOCK), BLOCK), rows


def _unblock(blocks: torch.Tensor, axis: int, rows: Experts, hidden: int) -> torch.Tensor:
    if axis == -1:
        result, owners = blocks.reshape(rows.capacity, hidden), rows
    else:
        owners = rows.blocks(BLOCK)
        result = blocks.reshape(hidden, owners.capacity).t().contiguous()
    if owners.full:
        return result
    # Rotating zeros under signs can give -0; what nobody owns holds +0.
    return torch.where(owners.valid_rows(result.device).unsqueeze(1), result, 0.0)


def _butterflies(blocks: torch.Tensor) -> torch.Tensor:
    shape = blocks.shape
    for stride in _STRIDES:
        pairs = blocks.reshape(-1, BLOCK // (2 * stride), 2, stride)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        blocks = torch.stack((first + second, first - second), dim=2)
    return blocks.reshape(shape)
