"""MXFP8 (and MXFP4) quantisation: blocks of 32 with one E8M0 scale.

Scale of a block under "rceil", in integer instructions on the float32 bits of the amax (a kernel mirrors
exactly this; `round_up` and `exponent` are constants of the element format):

    code = max(((bits + round_up) >> 23) - exponent, 0)     # bits: of amax >= 0 in float32, as uint32
    if bits == 0x7F800000: code = 254                       # Inf
    if bits >  0x7F800000: code = 255                       # NaN

                    largest value        round_up   exponent
    E4M3            448 = 1.75 * 2**8    0x1FFFFF   8
    E5M2            57344 = 1.75 * 2**15 0x1FFFFF   15
    E2M1 (MXFP4)    6 = 1.5 * 2**2       0x3FFFFF   2

round_up = 0x7FFFFF - (mantissa bits of the largest value): the addition carries into the exponent exactly
when the amax's mantissa exceeds it. The result is the smallest code with largest * 2**(code - 127) >= amax,
at least 0. The other rules change round_up only: "floor" 0; "ceil" 0x7FFFFF; "even" 1 << (22 - mantissa bits
of the element).

Element: encode(x * multiplier), the product in float32 and round-to-nearest-even with saturation, where
multiplier = 2**(127 - code) has the bits (254 - code) << 23; code 254 has 0x00400000 (2**-127, subnormal) and
code 255 has NaN.

Specials under the suite's choices: an all-zero block has scale 0 and zeros that keep their sign; Inf gives
scale 0xFE, Inf elements saturate and finite ones are multiplied by 2**-127; NaN gives scale 0xFF and NaN
codes in all 32 places of the block, since its multiplier is NaN.

Sources: OCP MX v1.0, 5.1 and 6.3; PTX ISA, `cvt.rp.satfinite.ue8m0x2.f32`;
transformer_engine/common/util/ptx.cuh@2.20 (`float_to_e8m0`, `exp2f_rcp`); arXiv 2506.08027 for round-up.
Transformer Engine rounds amax * fp32(1/448) to float32 first. That gives the same code for every bfloat16
amax and for every float32 amax but one: the value next above 448 * 2**-127 (57344 * 2**-127 for E5M2), whose
product rounds down to 2**-127 and gets code 0 instead of 1.
"""

from __future__ import annotations

import struct

import torch

from .amax import INF_BITS, magnitude_bits
from .contract import SUITE, Contract
from .formats import E2M1, E4M3, E5M2, E8M0, FloatFormat, pack_e2m1
from .quantized import Quantized
from .ragged import Experts

BLOCK = 32
_MANTISSA = 0x7FFFFF


def scale_target(element: FloatFormat, contract: Contract = SUITE) -> float:
    """Gives the value to which a block's amax is scaled: the format's largest, or what the contract says."""
    return contract.e5m2_target if element == E5M2 else element.max_value


def scale_constants(element: FloatFormat, contract: Contract = SUITE) -> tuple[int, int]:
    """Gives (round_up, exponent) of the integer recipe in the module's docstring."""
    bits = int.from_bytes(struct.pack(">f", scale_target(element, contract)), "big")
    round_up = {
        "rceil": _MANTISSA - (bits & _MANTISSA),
        "floor": 0,
        "ceil": _MANTISSA,
        "even": 1 << (22 - element.mantissa_bits),
    }[contract.scale_rule]
    return round_up, (bits >> 23) - 127


def scale_codes(amax_bits: torch.Tensor, element: FloatFormat = E4M3, contract: Contract = SUITE) -> torch.Tensor:
    """Gives the E8M0 code of each amax.

    amax_bits: int32, float32 bits of non-negative amaxes, NaN included. Result: uint8 of that shape.
    """
    round_up, exponent = scale_constants(element, contract)
    if contract.scale_rule == "rceil" and contract.mx_scale == "float32_product":
        target = torch.tensor(scale_target(element, contract), dtype=torch.float32, device=amax_bits.device)
        product = amax_bits.contiguous().view(torch.float32) * (1.0 / target)
        codes = E8M0.encode(product, rounding="up").to(torch.int64)
    else:
        codes = (((amax_bits.to(torch.int64) + round_up) >> 23) - exponent).clamp(min=0)
    if contract.mx_inf == "saturate":
        codes = torch.where(amax_bits == INF_BITS, 254, codes)
    return torch.where(amax_bits > INF_BITS, 255, codes).to(torch.uint8)


def multipliers(codes: torch.Tensor, contract: Contract = SUITE) -> torch.Tensor:
    """Gives the float32 by which elements are multiplied under E8M0 codes, per contract.mx_multiplier."""
    wide = codes.to(torch.int32)
    bits = (254 - wide) << 23
    if contract.mx_multiplier == "exact":
        bits = torch.where(wide == 254, 0x00400000, bits)
        bits = torch.where(wide == 255, 0x7FFFFFFF, bits)
    elif contract.mx_multiplier == "flushed":
        bits = torch.where(wide == 0, 0x7F7FFFFF, bits)
        bits = torch.where(wide == 254, 0, bits)
        bits = torch.where(wide == 255, 0x7FFFFFFF, bits)
    else:
        bits = torch.where(wide == 0, 253 << 23, bits)
        bits = torch.where(wide == 254, 0x00400000, bits)
        bits = torch.where(wide == 255, 0, bits)
    return bits.view(torch.float32)


def quantize(
    x: torch.Tensor,
    axis: int,
    element: FloatFormat = E4M3,
    contract: Contract = SUITE,
    experts: Experts | None = None,
    block2d: bool = False,
) -> Quantized:
    """Gives the MX codes and E8M0 scales of x in blocks of 32.

    x: float32, bfloat16 or float16 [capacity, hidden]. axis -1 (rowwise): blocks of 32 columns of a row,
    hidden a multiple of 32; scales [capacity, hidden / 32]. axis -2 (colwise): blocks of 32 rows of a column
    that begin at each expert's first row and end with its rows (a last block may be shorter); codes are not
    transposed; scales [experts.colwise_rows(32), hidden] with the layout of `Experts.colwise_row`. block2d:
    one scale for each 32x32 tile, whose rows are those of a colwise block; axis then only fixes the layout of
    the scales (rowwise: the tile's scale is repeated for each of its rows; colwise: for each of its columns).
    element: E4M3, E5M2, or E2M1 (codes then packed two a byte along the columns). experts: None is one expert
    with every row.

    Padding rows are never read; their codes are 0, and so are scales of rows and blocks without a valid row
    (the scale's byte is contract.scale_padding). Under contract.padding "zeroed_by_caller" the result is the
    same, as zeros change neither an amax nor another element. ValueError: another axis, element, dtype or
    shape.
    """
    if axis not in (-1, -2):
        raise ValueError(f"axis is {axis}: expected -1 (rowwise, 1x32) or -2 (colwise, 32x1)")
    if element not in (E4M3, E5M2, E2M1):
        raise ValueError(f"element is {element}: MX quantisation takes E4M3, E5M2 or E2M1")
    if x.dim() != 2 or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"x has dtype {x.dtype} and shape {tuple(x.shape)}: "
            "expected float32, bfloat16 or float16 [capacity, hidden]"
        )
    rows = experts if experts is not None else Experts.single(x.shape[0])
    if rows.capacity != x.shape[0]:
        raise ValueError(f"x has {x.shape[0]} rows but the experts describe a buffer of {rows.capacity}")
    hidden = x.shape[1]
    if hidden % BLOCK and (axis == -1 or block2d):
        raise ValueError(f"hidden is {hidden}: rowwise blocks need a multiple of {BLOCK} columns")
    if hidden % 2 and element == E2M1:
        raise ValueError(f"hidden is {hidden}: E2M1 codes share a byte in pairs, so columns must be even")

    values = x.to(torch.bfloat16) if contract.staging == "bfloat16" else x
    values = values.to(torch.float32)
    valid = None if rows.full else rows.valid_rows(x.device)
    bits = magnitude_bits(values, contract.nan_policy)

    if axis == -1 and not block2d:
        amax_bits = bits.view(len(bits), hidden // BLOCK, BLOCK).amax(2)
        scales = scale_codes(amax_bits, element, contract)
        per_element = multipliers(scales, contract).repeat_interleave(BLOCK, dim=1)
    else:
        n_blocks = rows.colwise_rows(BLOCK)
        amax_bits = rows.to_blocks(bits, BLOCK).view(n_blocks, BLOCK, hidden).amax(1)
        if block2d:
            amax_bits = amax_bits.view(n_blocks, hidden // BLOCK, BLOCK).amax(2)
        scales = scale_codes(amax_bits, element, contract)
        if block2d:
            scales = scales.repeat_interleave(BLOCK, dim=1)
        factors = multipliers(scales, contract).repeat_interleave(BLOCK, dim=0)
        per_element = rows.from_blocks(factors, BLOCK)
        if axis == -1:
            scales = rows.from_blocks(scales[:, ::BLOCK].repeat_interleave(BLOCK, dim=0), BLOCK)

    codes = element.encode(values * per_element)
    if contract.signed_zero == "drop":
        codes = torch.where(codes == element.sign_mask, 0, codes)
    if valid is not None:
        codes = torch.where(valid.unsqueeze(1), codes, 0)
    owned_scales = valid if axis == -1 else rows.owned_colwise_rows(BLOCK, x.device)
    if owned_scales is not None:
        scales = torch.where(owned_scales.unsqueeze(1), scales, contract.scale_padding)
    packed = element == E2M1
    return Quantized(
        pack_e2m1(codes) if packed else codes,
        scales.to(torch.uint8),
        element,
        E8M0,
        axis,
        BLOCK,
        rows,
        packed,
    )
