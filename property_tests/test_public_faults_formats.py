"""Faults that were reported in public in narrow formats and quantisers, each as a test of its whole kind.

The number in a test's name is the row of the list of public faults that the suite was built from; its
docstring names one report. Each test first replays the reported input, then covers the kind it belongs to.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_numerics.reference import amax, hadamard, mxfp8, nvfp4, scale_layout
from moe_numerics.reference.contract import DEFAULT_SIGNS, Contract
from moe_numerics.reference.formats import (
    E2M1,
    E4M3,
    E4M3FNUZ,
    E5M2,
    E8M0,
    UE5M3,
    pack_e2m1,
    unpack_e2m1,
)
from moe_numerics.reference.ragged import Experts
from significance import assert_share

INF, NAN = math.inf, math.nan
PER_EXPERT = Contract(amax_scope="expert")


def f32(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def hexes(codes: torch.Tensor) -> str:
    return " ".join(f"{code:02X}" for code in codes.flatten().tolist())


def block(*values: float, size: int = 32) -> torch.Tensor:
    """One row whose first values are given and the rest zeros."""
    return torch.tensor([[*values, *[0.0] * (size - len(values))]])


def scales_of(amaxes: torch.Tensor, rule: str) -> list[int]:
    return mxfp8.scale_codes(amaxes.view(torch.int32), E4M3, Contract(scale_rule=rule)).tolist()


def test_b01_e4m3_overflow_saturates() -> None:
    """pytorch#178817: NaN or saturation above 464 by version. Every finite value beyond the range saturates
    here.
    """
    assert hexes(E4M3.encode(f32(448, 464, 465, 1e4, INF, NAN, -INF))) == "7E 7E 7E 7E 7E 7F FE"
    beyond = torch.logspace(8.81, 127.9, 5000, base=2.0)
    for element in (E4M3, E5M2, E2M1, E4M3FNUZ):
        large = beyond[beyond > element.max_value]
        assert bool((element.encode(large) == element.max_code).all())
        assert bool((element.encode(-large) == element.max_code | element.sign_mask).all())


def test_b02_e8m0_is_rounded_as_asked() -> None:
    """pytorch#147466, ml_dtypes#223: native casts drop signs, round to nearest and overflow to NaN."""
    x = f32(0, 1.25 * 2.0**-127, 1.5, 1.5 * 2.0**127)
    assert E8M0.encode(x, "nearest_even").tolist() == [0, 0, 128, 254]
    assert E8M0.encode(x, "up").tolist() == [0, 1, 128, 254]
    with pytest.raises(ValueError, match="no negative values"):
        E8M0.encode(f32(-1))


def test_b03_scale_of_one_ulp_above_a_power_of_two() -> None:
    """sglang#31210: ceil(log2) of 1 + 2**-23 is 0. All binades, one ulp above and at the exact multiple."""
    assert scales_of(f32(math.nextafter(448, 449)), "rceil") == [127]
    exact = 448.0 * torch.exp2(torch.arange(-120, 119, dtype=torch.float64)).to(torch.float32)
    above = (exact.view(torch.int32) + 1).view(torch.float32)
    powers = torch.arange(-120, 119) + 127
    assert scales_of(exact, "rceil") == powers.tolist()
    assert scales_of(above, "rceil") == (powers + 1).tolist()


def test_b04_floor_scale_comes_from_the_unrounded_amax() -> None:
    """ao#4725: 511.5 rounded to bfloat16 is 512, one binade up. Every value that bfloat16 would carry
    over.
    """
    got = mxfp8.quantize(block(511.5), -1, contract=Contract(scale_rule="floor"))
    assert hexes(got.scales) == "7F"
    assert got.codes[0, 0] == 0x7E
    below = torch.exp2(torch.arange(-100, 120, dtype=torch.float64)).to(torch.float32)
    carried = (below.view(torch.int32) - 1).view(torch.float32)
    assert bool((carried.to(torch.bfloat16).to(torch.float32) == below).all())
    expected = [code - 1 for code in scales_of(below, "floor")]
    assert scales_of(carried, "floor") == [max(code, 0) for code in expected]


def test_b05_scale_rules_are_kept_apart() -> None:
    """mlx#4353, aiter#3212: rounding to nearest where up was meant saturates. A table, then every bfloat16
    amax.
    """
    amaxes = f32(256, 300, 448, 449, 480, 512, 957)
    assert scales_of(amaxes, "floor") == [127, 127, 127, 127, 127, 128, 128]
    assert scales_of(amaxes, "ceil") == [127, 128, 128, 128, 128, 128, 129]
    assert scales_of(amaxes, "rceil") == [127, 127, 127, 128, 128, 128, 129]
    largest = [
        mxfp8.quantize(block(957), -1, contract=Contract(scale_rule=rule)).dequantize().max().item()
        for rule in ("floor", "ceil", "rceil")
    ]
    assert largest == [896, 960, 960]
    every = torch.arange(0x0500, 0x7F80, dtype=torch.int32) << 16
    for rule in ("rceil", "ceil"):
        codes = mxfp8.scale_codes(every, E4M3, Contract(scale_rule=rule))
        scaled = every.view(torch.float32) * mxfp8.multipliers(codes)
        assert bool((scaled <= 448).all())


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("axis", [-1, -2])
def test_b06_infinity_saturates_and_does_not_become_nan(element: object, axis: int) -> None:
    """flashinfer#4023: a reciprocal of 2**127 flushed to 0 makes Inf * 0 = NaN. Inf anywhere in a block."""
    assert mxfp8.multipliers(torch.tensor([254], dtype=torch.uint8)).item() == 2.0**-127
    for place in range(32):
        x = torch.ones(32, 32)
        x[place, place], x[place, (place + 1) % 32] = INF, -INF
        got = mxfp8.quantize(x, axis, element)  # type: ignore[arg-type]
        assert got.codes[place, place] == element.max_code  # type: ignore[attr-defined]
        assert got.codes[place, (place + 1) % 32] == element.max_code | 0x80  # type: ignore[attr-defined]
        assert not got.element.decode(got.codes).isnan().any()
        assert (got.scales == 254).sum() == (1 if axis == -1 else 2)


def test_b08_e8m0_code_0_is_not_zero_and_255_is_nan() -> None:
    """TransformerEngine#3262: decoding by shifting the exponent makes 0 and Inf of the two end codes."""
    codes = torch.arange(256, dtype=torch.uint8)
    values = E8M0.decode(codes)
    assert values[0] == 2.0**-127
    assert values[255].isnan()
    assert not torch.isinf(values).any()
    assert torch.equal(values[:255].double(), torch.exp2(torch.arange(-127, 128, dtype=torch.float64)))


@given(st.integers(1, 0x0FFFFFFF), st.sampled_from([-1, -2]))
def test_b09_tiny_blocks_stay_finite(bits: int, axis: int) -> None:
    """flashinfer#2440: a scale that underflows to 0 makes NaN of 0 * Inf. Any tiny amax, float32 subnormals
    too.
    """
    x = torch.zeros(32, 32)
    x[3, 5] = torch.tensor([bits], dtype=torch.int32).view(torch.float32)[0]
    got = mxfp8.quantize(x, axis)
    back = got.dequantize(torch.float64)
    assert bool(torch.isfinite(back).all())
    step = max(float(x[3, 5]) / 16, 2.0**-136)
    assert abs(float(back[3, 5]) - float(x[3, 5])) <= step


def test_b09_the_reported_block() -> None:
    """flashinfer#2440: amax 2.8094e-36 of bfloat16 has scale code 1 and element 0x77."""
    x = block(2.8094e-36).to(torch.bfloat16)
    got = mxfp8.quantize(x, -1)
    assert got.scales.tolist() == [[1]]
    assert got.codes[0, 0] == 0x77


@given(st.floats(min_value=2.0**-149, max_value=2.0**-110, width=32))
def test_b10_tiny_global_amax_is_held_finite(largest: float) -> None:
    """flashinfer#4679: 2688 / amax overflows below 7.9e-36. Any tiny amax: finite factors, no NaN, codes of
    x's sign.
    """
    assert [nvfp4.quantize(torch.full((1, 16), a), -1).scales.item() for a in (7.8e-36, 1e-36, 1e-40)] == [
        0x7E,
        0x66,
        0x03,
    ]
    scale = nvfp4.global_scale(f32(largest))
    assert bool(torch.isfinite(scale.encode).all())
    assert bool((scale.encode > 0).all())
    assert bool((scale.decode > 0).all())
    got = nvfp4.quantize(torch.full((1, 16), largest), -1)
    assert got.scales.item() not in (0x7F, 0xFF)
    assert bool(torch.isfinite(got.dequantize()).all())


@pytest.mark.parametrize("axis", [-1, -2])
def test_b11_an_expert_of_zeros(axis: int) -> None:
    """compressed-tensors#595: amax 0 gives an infinite scale and NaN. An expert of zeros and one without
    rows.
    """
    experts = Experts.from_offsets([0, 16, 16, 48])
    x = torch.zeros(48, 32)
    x[16:] = 3.0
    got = nvfp4.quantize(x, axis, contract=PER_EXPERT, experts=experts)
    assert got.global_amax is not None
    assert got.global_amax.tolist() == [0.0, 0.0, 3.0]
    assert nvfp4.global_scale(got.global_amax).encode.tolist() == [1.0, 1.0, 896.0]
    own = got.scales[:16] if axis == -1 else got.scales[:, :1]
    assert not own.any()
    assert not got.dequantize()[:16].any()
    eight = mxfp8.quantize(x, axis, experts=experts)
    assert not eight.dequantize()[:16].any()
    assert not eight.scales[: 16 if axis == -1 else 1].any()


def test_b12_a_zero_block_never_gets_a_nan_scale() -> None:
    """Model-Optimizer#1397: a zero block patched to scale 1 overflows E4M3 to NaN. Zero blocks under any
    amax.
    """
    for largest in (1e-40, 1e-6, 1.0, 448.0, 3e38):
        x = torch.zeros(1, 32)
        x[0, 16] = largest
        for contract in (Contract(), Contract(nvfp4_scale_floor="smallest_normal")):
            got = nvfp4.quantize(x, -1, contract=contract)
            assert got.scales[0, 0] == (0 if contract.nvfp4_scale_floor == "zero" else 0x08)
            assert not got.dequantize()[0, :16].any()


def test_b15_e2m1_ties_go_to_even() -> None:
    """aiter#3992: ties rounded away from zero. Every midpoint of every format, both signs."""
    ties = f32(0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
    assert E2M1.encode(ties).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert E2M1.encode(-ties).tolist() == [8, 10, 10, 12, 12, 14, 14]
    for element in (E4M3, E5M2, E2M1, E4M3FNUZ, UE5M3):
        codes = torch.arange(element.max_code, dtype=torch.uint8)
        low, high = element.decode(codes, torch.float64), element.decode(codes + 1, torch.float64)
        even = torch.where(codes % 2 == 0, codes, codes + 1)
        assert torch.equal(element.encode((low + high) / 2), even)


def test_b16_sticky_bits_and_round_trips() -> None:
    """tt-metal#51971: a value just above a tie loses its last bits. Just beside every midpoint of every
    format.
    """
    assert E2M1.encode(f32(0.25000006)).tolist() == [1]
    for element in (E4M3, E5M2, E2M1, E4M3FNUZ, UE5M3):
        codes = torch.arange(element.max_code, dtype=torch.uint8)
        middle = (element.decode(codes, torch.float64) + element.decode(codes + 1, torch.float64)) / 2
        up = (middle.to(torch.float32).view(torch.int32) + 1).view(torch.float32)
        down = (middle.to(torch.float32).view(torch.int32) - 1).view(torch.float32)
        assert torch.equal(element.encode(up), codes + 1)
        assert torch.equal(element.encode(down), codes)


@given(st.floats(-448, 448, width=32))
def test_b17_one_rounding_from_float32(x: float) -> None:
    """triton#11753: float32 to float16 to E4M3 rounds twice. The code is the nearest to the float32 value
    itself.
    """
    assert hexes(E4M3.encode(f32(1.0625001, 400.1, 400.9))) == "39 7D 7D"
    error = abs(E4M3.decode(E4M3.encode(f32(x))).double().item() - x)
    others = E4M3.decode(torch.arange(256, dtype=torch.uint8), torch.float64)
    assert error <= (others[~others.isnan()] - x).abs().min().item()


def test_b18_one_rounding_from_float64() -> None:
    """ml_dtypes#401: a double just below a tie is rounded to float32 first, onto the tie. All midpoints."""
    assert hexes(E4M3.encode(torch.tensor([-431.99999999999994], dtype=torch.float64))) == "FD"
    for element in (E4M3, E5M2, E2M1):
        codes = torch.arange(element.max_code, dtype=torch.uint8)
        middle = (element.decode(codes, torch.float64) + element.decode(codes + 1, torch.float64)) / 2
        assert torch.equal(element.encode((middle.view(torch.int64) - 1).view(torch.float64)), codes)
        assert torch.equal(element.encode((middle.view(torch.int64) + 1).view(torch.float64)), codes + 1)


def test_b19_subnormal_scales_decode_as_subnormals() -> None:
    """b12x#388: scale byte 01 read as a normal number. All subnormals are m * 2**-9."""
    values = E4M3.decode(torch.arange(8, dtype=torch.uint8))
    assert values.tolist() == [m * 2.0**-9 for m in range(8)]
    one = nvfp4.multipliers(torch.tensor([1], dtype=torch.uint8), nvfp4.global_scale(f32(2688)))
    assert one.tolist() == [512.0]


@given(st.lists(st.integers(0, 15), min_size=32, max_size=32))
def test_b20_the_first_element_is_in_the_low_nibble(codes: list[int]) -> None:
    """ao#3123: nibbles flipped. Any codes, through packing and through both directions of NVFP4."""
    assert hexes(pack_e2m1(E2M1.encode(f32(1.0, -6.0)))) == "F2"
    values = E2M1.decode(torch.tensor([codes], dtype=torch.uint8))
    values[0, 0] = 6.0
    values[0, 16] = 6.0
    row = nvfp4.quantize(values, -1, f32(2688).reshape(()))
    assert torch.equal(E2M1.decode(row.codes & 15)[0], values[0, 0::2])
    assert torch.equal(E2M1.decode(row.codes >> 4)[0], values[0, 1::2])
    column = nvfp4.quantize(values.t().contiguous(), -2, f32(2688).reshape(()))
    assert torch.equal(column.codes, row.codes)


@given(st.floats(min_value=2.0**-126, max_value=2.0**120, width=32))
def test_b21_next_power_of_two(x: float) -> None:
    """onnx#7784: a hand-written ceil drops mantissa bits or doubles exact powers. Any value."""
    assert E8M0.decode(E8M0.encode(f32(1.125, 1.25, 5.0, 4.0), "up")).tolist() == [2, 2, 8, 4]
    up = E8M0.decode(E8M0.encode(f32(x), "up")).item()
    assert x <= up < 2 * x
    assert scales_of(f32(1792.0), "rceil") == [129]


@given(st.lists(st.floats(min_value=2.0**-120, max_value=2.0**120, width=32), min_size=4, max_size=4))
def test_b22_packed_scales_hold_exponents_only(values: list[float]) -> None:
    """DeepGEMM#35: mantissa bits of one scale leak into the next byte of the word. Any four values."""
    same = E8M0.encode(f32(*[0.006975] * 4), "down")
    assert scale_layout.pack_words(same).tolist() == [0x77777777]
    codes = E8M0.encode(f32(*values), "down")
    word = scale_layout.pack_words(codes).item()
    assert [word >> 8 * place & 0xFF for place in range(4)] == codes.tolist()


def test_b23_product_kept_in_float32_or_rounded_first() -> None:
    """Megatron-LM#6588: squared relu quantised from float32 or through bfloat16, two named contracts, two
    codes.
    """
    x = f32(1.03125) * f32(1.03125)
    values = block(float(x), 1.75)
    direct = mxfp8.quantize(values, -1)
    staged = mxfp8.quantize(values, -1, contract=Contract(staging="bfloat16"))
    assert (direct.scales.item(), staged.scales.item()) == (119, 119)
    assert (direct.codes[0, 0].item(), staged.codes[0, 0].item()) == (0x79, 0x78)


def test_b24_amax_takes_magnitudes_in_float32() -> None:
    """TileKernels#16: a signed maximum, or one accumulated in bfloat16."""
    assert amax.per_tensor(f32(-8, 1).reshape(1, 2)) == 8
    assert nvfp4.global_scale(amax.per_tensor(f32(-8, 1).reshape(1, 2))).encode == 336
    x = torch.ones(1, 4096)
    x[0, 7] = -1.001
    assert amax.per_tensor(x) == f32(1.001)[0]


@given(st.floats(min_value=2.0**-20, max_value=2.0**20, width=32), st.sampled_from([-1, -2]))
def test_b25_each_expert_has_its_own_amax(factor: float, axis: int) -> None:
    """TensorRT-LLM#9551: the amax of the whole buffer. Whatever expert 1 holds, expert 0 keeps every byte."""
    experts = Experts.from_offsets([0, 20, 40])
    x = torch.linspace(-1, 1, 40 * 32).reshape(40, 32)
    x[0, 0], x[20, 0] = 1.0, 1000.0
    before = nvfp4.quantize(x, axis, contract=PER_EXPERT, experts=experts)
    assert before.global_amax is not None
    assert nvfp4.global_scale(before.global_amax).encode.tolist() == f32(2688, 2.688).tolist()
    x[20:] *= factor
    after = nvfp4.quantize(x, axis, contract=PER_EXPERT, experts=experts)
    assert torch.equal(unpack(before)[:20], unpack(after)[:20])
    assert torch.equal(before.dequantize()[:20], after.dequantize()[:20])


def unpack(quantized: object) -> torch.Tensor:
    return quantized.unpacked_codes()  # type: ignore[attr-defined]


@given(st.integers(0, 31), st.sampled_from([0x7FC00000, 0x7F800001, -0x400000, -0x7FFFFF]))
def test_b26_a_maximum_must_not_swallow_nan(place: int, pattern: int) -> None:
    """triton#7349: fmax drops NaN. Any NaN, any place: scale 0xFF, or ignored where the contract says so."""
    x = torch.linspace(1, 3, 32).reshape(1, 32)
    x.view(torch.int32)[0, place] = pattern
    assert x[0, place].isnan()
    propagating = mxfp8.quantize(x, -1)
    assert propagating.scales.item() == 0xFF
    assert propagating.dequantize().isnan().all()
    ignoring = mxfp8.quantize(x, -1, contract=Contract(nan_policy="ignore"))
    assert ignoring.scales.item() in (119, 120)
    assert ignoring.dequantize().isnan().sum() == 1
    assert ignoring.codes[0, place] == 0x7F


def test_b27_the_format_travels_with_the_bytes() -> None:
    """TransformerEngine#3342: E5M2 gradients read as E4M3. A quantised matrix decodes by its own formats."""
    values = f32(1, 0.5, 2, 16)
    codes = E5M2.encode(values)
    assert hexes(codes) == "3C 38 40 4C"
    assert E4M3.decode(codes).tolist() == [1.5, 1, 2, 6]
    got = mxfp8.quantize(block(*values.tolist()), -1, E5M2)
    assert got.element is E5M2
    assert got.dequantize()[0, :4].tolist() == values.tolist()


def test_b37_the_amax_is_that_of_the_rotated_tensor() -> None:
    """TransformerEngine#2411: scaling the rotated transpose by the amax from before the rotation saturates
    it.
    """
    x = torch.tensor(DEFAULT_SIGNS, dtype=torch.float32).reshape(16, 1).repeat(1, 2)
    turned = hadamard.rotate(x, -2)
    assert (amax.per_tensor(x).item(), amax.per_tensor(turned).item()) == (1.0, 4.0)
    got = nvfp4.quantize(turned, -2)
    assert got.global_amax == 4.0
    assert nvfp4.global_scale(got.global_amax).encode == 672.0
    assert torch.equal(got.dequantize(), turned)


def test_b38_rotated_tails_hold_zeros_not_neighbours() -> None:
    """uzu#277: the block over rows 16 to 31 mixes two experts. Every pair of tail lengths."""
    for first in range(1, 33):
        experts = Experts.from_offsets([0, first, first + 12])
        x = torch.zeros(first + 12, 4)
        x[first:] = 1.0
        turned = hadamard.rotate(x, -2, None, experts=experts)
        slots = experts.blocks(16)
        assert not turned[: slots.starts[1]].any()
        assert turned[slots.starts[1] :].abs().max() == 3.0
        assert amax.per_expert(turned, slots).tolist() == [0.0, 3.0]


def test_b40_random_bits_differ_by_direction_and_call_and_repeat_by_seed() -> None:
    """TransformerEngine#2487: row and column share a stream, or every call does. Midpoints show it bit for
    bit.
    """
    n = 64
    x = torch.full((n, n), 2.5)
    x[::16], x[:, ::16] = 6.0, 6.0
    middle = x == 2.5
    largest = f32(2688).reshape(())

    def codes(axis: int, seed: int, tensor: int) -> torch.Tensor:
        return unpack(nvfp4.quantize(x, axis, largest, seed=seed, tensor=tensor))[middle]

    base = codes(-1, 1, 0)
    assert set(base.tolist()) == {4, 5}
    assert torch.equal(base, codes(-1, 1, 0))
    for name, other in (("column", codes(-2, 1, 1)), ("seed", codes(-1, 2, 0)), ("tensor", codes(-1, 1, 1))):
        assert_share(int((base == other).sum()), len(base), 0.5, f"agreement with another {name}")
    assert_share(int((base == 5).sum()), len(base), 0.5, "rounded up")


def test_b42_both_directions_quantise_the_unquantised_tensor() -> None:
    """TransformerEngine#1490: the transpose made from row-wise codes. A small value in a row with a large
    amax.
    """
    x = torch.zeros(32, 32)
    x[0, 0], x[0, 1] = 0.375, 114688.0
    row, column = mxfp8.quantize(x, -1), mxfp8.quantize(x, -2)
    assert row.dequantize()[0, 0] == 0.5
    assert column.dequantize()[0, 0] == 0.375
    four_row, four_column = nvfp4.quantize(x, -1), nvfp4.quantize(x[:, :1].contiguous(), -2)
    assert four_row.dequantize()[0, 0] != 0.375
    assert abs(four_column.dequantize()[0, 0] - 0.375) < 1e-6


def test_b43_minus_zero_is_kept() -> None:
    """torch-xpu-ops#2951: -0 becomes NaN or +0. Every format, rounding and quantiser, and what rounds to
    zero.
    """
    assert hexes(E4M3.encode(f32(-0.0, -1e-10))) == "80 80"
    assert E2M1.encode(f32(-0.0)).tolist() == [8]
    for element in (E4M3, E5M2, E2M1):
        for rounding in ("nearest_even", "nearest_away", "toward_zero", "up"):
            assert bool((element.encode(f32(-0.0, -1e-30), rounding) == element.sign_mask).all())
        bits = torch.zeros(2, dtype=torch.int64)
        assert bool((element.encode(f32(-0.0, -1e-30), "stochastic", random_bits=bits) == element.sign_mask).all())
    for axis in (-1, -2):
        x = torch.full((32, 32), -0.0)
        assert bool((mxfp8.quantize(x, axis).codes == 0x80).all())
        assert bool((nvfp4.quantize(x, axis).codes == 0x88).all())
        assert bool((nvfp4.quantize(x, axis, seed=3).codes == 0x88).all())


def test_b44_fnuz_is_another_format() -> None:
    """triton#10745: E4M3FNUZ read as E4M3. Code 80 is its only NaN, its range ends at 240, it has no -0."""
    codes = torch.arange(256, dtype=torch.uint8)
    values = E4M3FNUZ.decode(codes)
    assert torch.nonzero(values.isnan()).flatten().tolist() == [0x80]
    assert values.nan_to_num().max() == 240
    assert E4M3FNUZ.encode(f32(-0.0, -1e-30, 500.0)).tolist() == [0, 0, 0x7F]
    shared = (codes != 0) & ~values.isnan() & ~E4M3.decode(codes).isnan() & (codes != 0x80)
    assert not (values == E4M3.decode(codes))[shared].any()
    with pytest.raises(ValueError, match="element is E4M3FNUZ"):
        mxfp8.quantize(torch.zeros(1, 32), -1, E4M3FNUZ)


def test_b45_ue5m3_has_no_infinities() -> None:
    """cutlass#3602: codes 248 to 254 of UE5M3 decoded to Inf. They are 65536 to 114688, and 255 is NaN."""
    values = UE5M3.decode(torch.arange(248, 256, dtype=torch.uint8))
    assert values[:7].tolist() == [65536.0 * (1 + m / 8) for m in range(7)]
    assert values[7].isnan()


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("poison", [NAN, INF, -1e30])
def test_b47_rows_past_the_last_offset_do_not_exist(axis: int, poison: float) -> None:
    """pytorch#193633: NaN past the last offset reaches scales and amax. Equal to running on the used rows
    alone.
    """
    x = torch.linspace(-2, 2, 16 * 32).reshape(16, 32)
    x[12:] = poison
    experts = Experts.from_offsets([0, 12], capacity=16)
    for quantise in (mxfp8.quantize, nvfp4.quantize):
        whole, alone = quantise(x, axis, experts=experts), quantise(x[:12].contiguous(), axis)
        assert torch.equal(unpack(whole)[:12], unpack(alone))
        assert torch.equal(whole.dequantize()[:12], alone.dequantize())
        assert not whole.dequantize()[12:].any()
    assert amax.per_tensor(x, experts) == 2.0
    assert not hadamard.rotate(x, axis, experts=experts).isnan().any()


@pytest.mark.parametrize("axis", [-1, -2])
def test_b49_padding_between_experts_changes_nothing(axis: int) -> None:
    """flashinfer#3057: pad rows change scales of real rows. Eight experts with one row each and 63 of
    padding.
    """
    experts = Experts.from_offsets([64 * e for e in range(9)], [1] * 8, alignment=64)
    x = torch.zeros(512, 32)
    x[::64] = torch.linspace(-3, 3, 8 * 32).reshape(8, 32)
    results = []
    for fill in (0.0, NAN, INF, 1e30):
        y = torch.where(experts.valid_rows().unsqueeze(1), x, fill)
        results.append([f(y, axis, experts=experts) for f in (mxfp8.quantize, nvfp4.quantize)])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a.codes, b.codes)
            assert torch.equal(a.scales, b.scales)


@pytest.mark.parametrize(("rows", "hidden"), [(17, 64), (5, 1504), (90, 2880)])
def test_b50_padding_bytes_of_swizzled_scales_are_defined(rows: int, hidden: int) -> None:
    """TransformerEngine#3070: padding of the swizzled buffer is left as it was. Every byte of it is the one
    asked for.
    """
    x = torch.ones(rows, hidden)
    for axis in (-1, -2):
        quantized = mxfp8.quantize(x, axis)
        matrix = scale_layout.scale_matrix(quantized)
        for padding in (0, 0xFF):
            swizzled = scale_layout.swizzle_quantized(quantized, padding)
            assert int((swizzled == padding).sum()) == swizzled.numel() - matrix.numel()
            assert torch.equal(scale_layout.unswizzle(swizzled, *matrix.shape), matrix)


def test_b62_nothing_is_remembered_between_calls() -> None:
    """TransformerEngine#2044: a scale that follows an earlier amax. Calls in any order give the same
    bytes.
    """
    small, large = torch.ones(16, 32), torch.full((16, 32), 100.0)
    first = nvfp4.quantize(small, -1)
    assert nvfp4.global_scale(amax.per_tensor(large)).encode == f32(26.88)[0]
    again = nvfp4.quantize(small, -1)
    assert torch.equal(first.codes, again.codes)
    assert torch.equal(first.scales, again.scales)
    assert first.global_amax == again.global_amax == 1.0


def test_b64_empty_tensors_have_results() -> None:
    """pytorch#192497: amax over no rows raises. Every function of the reference takes an empty buffer."""
    empty = torch.empty(0, 32)
    for axis in (-1, -2):
        assert mxfp8.quantize(empty, axis).dequantize().shape == (0, 32)
        assert nvfp4.quantize(empty, axis).dequantize().shape == (0, 32)
        assert hadamard.rotate(empty, axis).shape == (0, 32)
    assert amax.per_tensor(empty) == 0
    assert E4M3.encode(torch.empty(0)).shape == (0,)
    assert E4M3.decode(torch.empty(0, dtype=torch.uint8)).shape == (0,)
    assert unpack_e2m1(pack_e2m1(torch.empty(3, 0, dtype=torch.uint8))).shape == (3, 0)
    assert scale_layout.swizzle(torch.empty(0, 4, dtype=torch.uint8)).numel() == 0
