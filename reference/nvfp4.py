"""NVFP4 quantisation: E2M1 elements in blocks of 16, an E4M3 scale a block, and one float32 amax above them.

Every operation is one float32 operation rounded to nearest even. With A the amax of the tensor (or of the
expert, or of the row), b the amax of a block and x an element, under the suite's choices:

    encode_scale = min(2688 / A, FLT_MAX);  1.0 if A == 0 or A == Inf      2688 = 6 * 448
    decode_scale = 1 / encode_scale
    scale        = E4M3(min(b * (encode_scale * fp32(1/6)), FLT_MAX))      saturating, to nearest even
    multiplier   = min(1 / (scale * decode_scale), FLT_MAX)                FLT_MAX where scale is 0
    code         = E2M1(x * multiplier)                                    saturating, to nearest even or
    stochastic

The order is Transformer Engine's; the choices nvfp4_* of the contract name other orders. NaN: under
"propagate" a NaN in a block gives scale 0x7F and code 7 (E2M1 has no NaN and its conversion gives +6)
throughout the block, and through A throughout the tensor unless amax is given; under "ignore" only the
element gets code 7. Inf: A = Inf gives encode_scale 1, the block saturates at scale 448 and Inf elements at
6. A zero tensor has scales 0 and zeros that keep their sign. Where a scale underflows to 0 the codes of
non-zero elements are those of x * FLT_MAX; they dequantise to 0.

Four over six tries a second scale for each block, 1.5 times as large, so that its maximum lands on 4 rather
than 6:

    base = (b / 6) * encode_scale;  scale6 = E4M3(min(base, 448));  scale4 = E4M3(min(base * 1.5, 448))
    error = sum over the 16 elements, in order, of |d| or d * d,  d = ((code * scale) * A) / (6 * M) - x

with M = 256 or 448 in the place of 448 in encode_scale too; scale4 is taken only where its error is smaller.
Blocks of 16x16 add the 16 errors of their lines pairwise, 8, 4, 2 and 1 apart.

Sources: arXiv 2509.25149, appendices B and C; transformer_engine/common/cast/nvfp4/core_nvfp4.cuh and
quantize_4over6_nvfp4.cuh@2.20; arXiv 2512.02010 for four over six.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import amax as amaxes
from . import philox
from .contract import SUITE, Contract
from .formats import E2M1, E4M3, pack_e2m1
from .quantized import Quantized
from .ragged import Experts

BLOCK = 16
FLT_MAX = torch.finfo(torch.float32).max
FOUR_OVER_SIX = ("mae", "mse")


@dataclass(frozen=True)
class GlobalScale:
    """Factors between a tensor and its block scales: encode = 6 * M / amax, decode = 1 / encode, as the
    contract
    computes them; float32 tensors of the shape of the amax."""

    encode: torch.Tensor
    decode: torch.Tensor


def global_scale(amax: torch.Tensor, contract: Contract = SUITE, scale_max: float = 448.0) -> GlobalScale:
    """Gives the global scale of an amax (float32, any shape); scale_max: the largest block scale."""
    largest = _constant(6.0 * scale_max, amax)
    if contract.nvfp4_encode_scale == "reciprocal_of_divided_amax":
        decode = amax / largest
        return GlobalScale(1.0 / decode, decode)
    encode = _at_most(largest / amax, FLT_MAX, contract)
    encode = torch.where((amax == 0) | (encode == 0), 1.0, encode)
    return GlobalScale(encode, 1.0 / encode)


def block_scale_codes(block_amax: torch.Tensor, scale: GlobalScale, contract: Contract = SUITE) -> torch.Tensor:
    """Gives the E4M3 codes of block scales, uint8 of the shape of block_amax; scale broadcasts to it."""
    six = _constant(6.0, block_amax)
    sixth = 1.0 / six
    if contract.nvfp4_block_scale == "amax_times_scaled_sixth":
        value = block_amax * (scale.encode * sixth)
    elif contract.nvfp4_block_scale == "sixth_times_scale":
        value = (block_amax * sixth) * scale.encode
    elif contract.nvfp4_block_scale == "divided_amax_times_scale":
        value = (block_amax / six) * scale.encode
    else:
        value = (block_amax / six) / scale.decode
    if contract.nvfp4_scale_floor == "smallest_normal":
        value = value.clamp(min=E4M3.min_normal)
    return E4M3.encode(value)


def multipliers(scale_codes: torch.Tensor, scale: GlobalScale, contract: Contract = SUITE) -> torch.Tensor:
    """Gives the float32 by which elements of each block are multiplied; scale broadcasts to scale_codes."""
    block = E4M3.decode(scale_codes)
    if contract.nvfp4_multiplier == "reciprocal_of_product":
        value = 1.0 / (block * scale.decode)
    else:
        value = scale.encode / block
    # An encode scale that is itself a plain reciprocal comes from a source that does not hold its factors
    # finite.
    if contract.nvfp4_encode_scale == "reciprocal_of_divided_amax":
        return value
    return _at_most(value, FLT_MAX, contract)


def quantize(
    x: torch.Tensor,
    axis: int,
    amax: torch.Tensor | None = None,
    contract: Contract = SUITE,
    random_bits: torch.Tensor | None = None,
    experts: Experts | None = None,
    *,
    seed: int | None = None,
    tensor: int = 0,
    block2d: bool = False,
    four_over_six: str | None = None,
    scale_max: float = 448.0,
    row_scaled: bool = False,
) -> Quantized:
    """Gives the NVFP4 codes, block scales and global amax of x.

    x: float32, bfloat16 or float16 [capacity, hidden]; hidden a multiple of 16 (axis -1 or block2d). experts:
    None is one expert with every row. axis -1 (rowwise, 1x16): codes uint8 [capacity, hidden / 2], even
    column in the low nibble; scales [capacity, hidden / 16]. axis -2 (colwise, 16x1): codes are transposed,
    [hidden, n * 8] with n = experts.colwise_rows(16), even row in the low nibble, and scales [hidden, n];
    each expert's rows stand at its own block slots (`Experts.blocks`), so a shorter last block is filled with
    code 0. block2d: one scale for each 16x16 tile, repeated for its 16 lines.
    amax: float32, None to take it from x over valid rows: [] for the tensor, [experts] for each expert (which
    of both is contract.amax_scope), or with row_scaled one for each line: [capacity] rowwise, [hidden]
    colwise.
    random_bits: int [capacity, hidden] for stochastic rounding with contract.stochastic_bits bits an element;
    or seed (64 bits) and tensor (16 bits): Philox bits by logical element (`philox.element_bits`), neighbours
    along the axis sharing a call. With neither, to nearest even. four_over_six: "mae" or "mse"; scale_max:
    448 or 256.

    Padding rows are never read; their codes are 0 and scales without a valid row contract.scale_padding.
    ValueError: a shape, dtype, axis or choice that does not fit; four over six with stochastic rounding;
    row_scaled with block2d.
    """
    rows = experts if experts is not None else Experts.single(x.shape[0] if x.dim() == 2 else 0)
    _check(x, axis, rows, block2d, four_over_six, scale_max, row_scaled)
    rounding, bits = _random_bits(x, axis, rows, random_bits, seed, tensor, contract)
    if four_over_six is not None and bits is not None:
        raise ValueError("four_over_six with random bits: it compares rounding errors and takes nearest-even only")

    values = (x.to(torch.bfloat16) if contract.staging == "bfloat16" else x).to(torch.float32)
    valid = None if rows.full else rows.valid_rows(x.device)
    if valid is not None:
        values = torch.where(valid.unsqueeze(1), values, 0.0)
    # Lines of blocks along the last dimension: rows as they are, or the columns of the block-aligned buffer.
    if axis == -1:
        lines = values
        line_bits = bits
    else:
        lines = rows.to_blocks(values, BLOCK).t()
        line_bits = None if bits is None else rows.to_blocks(bits, BLOCK).t()
    n_blocks = lines.shape[1] // BLOCK
    blocks = lines.reshape(lines.shape[0], n_blocks, BLOCK)

    total = _global_amax(values, axis, amax, rows, row_scaled, contract)
    per_block = _spread_amax(total, axis, rows, row_scaled, x.device)
    scale = global_scale(per_block, contract, scale_max)
    block_amax = _block_amax(blocks, axis, rows, block2d, contract)

    if four_over_six is None:
        scales = block_scale_codes(block_amax, scale, contract)
        product = blocks * multipliers(scales, scale, contract).unsqueeze(2)
        codes = E2M1.encode(
            product,
            rounding,
            random_bits=None if line_bits is None else line_bits.reshape(product.shape),
            random_width=contract.stochastic_bits,
        )
    else:
        codes, scales = _four_over_six(
            blocks, block_amax, per_block, scale, axis, rows, block2d, four_over_six, scale_max, contract
        )
    if contract.signed_zero == "drop":
        codes = torch.where(codes == E2M1.sign_mask, 0, codes)

    codes = codes.reshape(lines.shape)
    if valid is not None and axis == -1:
        codes = torch.where(valid.unsqueeze(1), codes, 0)
        scales = torch.where(valid.unsqueeze(1), scales, contract.scale_padding)
    elif axis == -2:
        codes = torch.where(rows.slot_rows(BLOCK, x.device) >= 0, codes, 0)
        scales = torch.where(rows.owned_colwise_rows(BLOCK, x.device), scales, contract.scale_padding)
    factor = 1.0 / (6.0 * scale_max)
    return Quantized(
        pack_e2m1(codes),
        scales.to(torch.uint8),
        E2M1,
        E4M3,
        axis,
        BLOCK,
        rows,
        packed=True,
        transposed=axis == -2,
        global_amax=total,
        global_factor=factor,
        line_scaled=row_scaled,
    )


def _constant(value: float, like: torch.Tensor) -> torch.Tensor:
    """A float32 operand on the device: torch turns division by a Python number into a product on CUDA."""
    return torch.tensor(value, dtype=torch.float32, device=like.device)


def _at_most(value: torch.Tensor, limit: float, contract: Contract) -> torch.Tensor:
    """min(value, limit); by the contract's policy a NaN stays (`min.NaN.f32`) or gives the limit."""
    bound = torch.full_like(value, limit)
    return torch.minimum(value, bound) if contract.nan_policy == "propagate" else torch.fmin(value, bound)


def _random_bits(
    x: torch.Tensor,
    axis: int,
    rows: Experts,
    random_bits: torch.Tensor | None,
    seed: int | None,
    tensor: int,
    contract: Contract,
) -> tuple[str, torch.Tensor | None]:
    if random_bits is not None and seed is not None:
        raise ValueError("both random_bits and seed were given: expected one source of random bits")
    if random_bits is not None:
        if random_bits.shape != x.shape or random_bits.is_floating_point():
            raise ValueError(
                f"random_bits have shape {tuple(random_bits.shape)} and dtype {random_bits.dtype}: "
                f"expected integers of shape {tuple(x.shape)}"
            )
        return "stochastic", random_bits
    if seed is None:
        return "nearest_even", None
    if contract.stochastic_source != "philox":
        raise ValueError(f"seed was given but stochastic_source is {contract.stochastic_source!r}: pass random_bits")
    owner, index = rows.row_expert(x.device), rows.row_index(x.device)
    bits = philox.element_bits(
        seed,
        tensor,
        owner.clamp(min=0).unsqueeze(1),
        index.clamp(min=0).unsqueeze(1),
        torch.arange(x.shape[1], device=x.device).unsqueeze(0),
        axis,
        contract.stochastic_bits,
    )
    return "stochastic", bits


def _global_amax(
    values: torch.Tensor,
    axis: int,
    amax: torch.Tensor | None,
    rows: Experts,
    row_scaled: bool,
    contract: Contract,
) -> torch.Tensor:
    """The amax given, checked, or that of the values."""
    if row_scaled:
        expected: tuple[int, ...] = (values.shape[0] if axis == -1 else values.shape[1],)
    else:
        expected = () if contract.amax_scope == "tensor" else (len(rows),)
    if amax is not None:
        if amax.dtype != torch.float32 or amax.numel() != torch.Size(expected).numel():
            raise ValueError(
                f"amax has dtype {amax.dtype} and shape {tuple(amax.shape)}: expected float32 {list(expected)}"
            )
        return amax.reshape(expected)
    if not row_scaled:
        whole = contract.amax_scope == "tensor"
        return amaxes.per_tensor(values, rows, contract) if whole else amaxes.per_expert(values, rows, contract)
    bits = amaxes.magnitude_bits(values, contract.nan_policy)
    across = 1 if axis == -1 else 0
    if not bits.shape[across]:
        return torch.zeros(expected, dtype=torch.float32, device=values.device)
    return bits.amax(across).view(torch.float32)


def _spread_amax(total: torch.Tensor, axis: int, rows: Experts, row_scaled: bool, device: torch.device) -> torch.Tensor:
    """The global amax in a shape that broadcasts to [lines, blocks]."""
    if row_scaled:
        return total.unsqueeze(1)
    if total.dim() == 0:
        return total.reshape(1, 1)
    padded = torch.cat((total, total.new_zeros(1)))
    if axis == -1:
        return padded[rows.row_expert(device)].unsqueeze(1)
    return padded[rows.blocks(BLOCK).row_expert(device)[::BLOCK]].unsqueeze(0)


def _block_amax(
    blocks: torch.Tensor,
    axis: int,
    rows: Experts,
    block2d: bool,
    contract: Contract,
) -> torch.Tensor:
    """The amax of each block, float32 [lines, blocks]."""
    largest = amaxes.magnitude_bits(blocks, contract.nan_policy).amax(2)
    if not block2d:
        return largest.view(torch.float32)
    if axis == -1:
        tiles = _tiles(rows.to_blocks(largest, BLOCK)).amax(1)
        largest = rows.from_blocks(tiles.repeat_interleave(BLOCK, dim=0), BLOCK)
    else:
        largest = _tiles(largest).amax(1).repeat_interleave(BLOCK, dim=0)
    return largest.contiguous().view(torch.float32)


def _four_over_six(
    blocks: torch.Tensor,
    block_amax: torch.Tensor,
    amax: torch.Tensor,
    scale: GlobalScale,
    axis: int,
    rows: Experts,
    block2d: bool,
    error: str,
    scale_max: float,
    contract: Contract,
) -> tuple[torch.Tensor, torch.Tensor]:
    base = (block_amax / _constant(6.0, block_amax)) * scale.encode
    largest = _constant(6.0 * scale_max, block_amax)
    candidates = []
    for factor in (1.0, 1.5):
        scales = E4M3.encode(base * factor)
        codes = E2M1.encode(blocks * multipliers(scales, scale, contract).unsqueeze(2))
        back = ((E2M1.decode(codes) * E4M3.decode(scales).unsqueeze(2)) * amax.unsqueeze(2)) / largest
        away = back - blocks
        each = away.abs() if error == "mae" else away * away
        total = torch.zeros_like(block_amax)
        for place in range(BLOCK):
            total = total + each[:, :, place]
        candidates.append((codes, scales, tile_sum(total, axis, rows) if block2d else total))
    (codes6, scales6, error6), (codes4, scales4, error4) = candidates
    four = error4 < error6
    return torch.where(four.unsqueeze(2), codes4, codes6), torch.where(four, scales4, scales6)


def tile_sum(errors: torch.Tensor, axis: int, rows: Experts) -> torch.Tensor:
    """Gives the sums of errors over the 16 lines of each tile, repeated for its lines.

    errors: float32 [lines, blocks]. The lines of a tile are added in pairs 8, then 4, 2 and 1 apart, the
    order in which a warp reduces them.
    """
    tiles = _tiles(rows.to_blocks(errors, BLOCK) if axis == -1 else errors)
    for half in (8, 4, 2, 1):
        tiles = tiles[:, :half] + tiles[:, half : 2 * half]
    spread = tiles[:, 0].repeat_interleave(BLOCK, dim=0)
    return rows.from_blocks(spread, BLOCK) if axis == -1 else spread


def _tiles(lines: torch.Tensor) -> torch.Tensor:
    """[lines, blocks] as [tiles, 16, blocks]."""
    return lines.reshape(lines.shape[0] // BLOCK, BLOCK, lines.shape[1])


def _check(
    x: torch.Tensor,
    axis: int,
    rows: Experts,
    block2d: bool,
    four_over_six: str | None,
    scale_max: float,
    row_scaled: bool,
) -> None:
    if x.dim() != 2 or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"x has dtype {x.dtype} and shape {tuple(x.shape)}: "
            "expected float32, bfloat16 or float16 [capacity, hidden]"
        )
    if axis not in (-1, -2):
        raise ValueError(f"axis is {axis}: expected -1 (rowwise, 1x16) or -2 (colwise, 16x1)")
    if rows.capacity != x.shape[0]:
        raise ValueError(f"x has {x.shape[0]} rows but the experts describe a buffer of {rows.capacity}")
    if x.shape[1] % BLOCK and (axis == -1 or block2d):
        raise ValueError(f"hidden is {x.shape[1]}: blocks of {BLOCK} columns need a multiple of {BLOCK}")
    if four_over_six is not None and four_over_six not in FOUR_OVER_SIX:
        raise ValueError(f"four_over_six = {four_over_six!r} is unknown: expected 'mae' or 'mse'")
    if scale_max not in (448.0, 256.0):
        raise ValueError(f"scale_max is {scale_max}: expected 448 or 256")
    if scale_max != 448.0 and four_over_six is None:
        raise ValueError("scale_max 256 leaves room for the larger scale of four_over_six: set it, or use 448")
    if row_scaled and block2d:
        raise ValueError("row_scaled with block2d: a 16x16 block has one scale for 16 rows")
