"""MXFP8 quantisation: scales by their definition, elements by the codec, both directions from the same
tensor.

The scale is checked against "the smallest power of two that fits" with exact comparisons, so an off-by-one
exponent, a log2 in the way or an amax taken from the wrong rows shows as a wrong code.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_numerics.reference import mxfp8
from moe_numerics.reference.contract import Contract
from moe_numerics.reference.formats import E2M1, E4M3, E4M3FNUZ, E5M2, E8M0, FloatFormat
from moe_numerics.reference.ragged import Experts

ELEMENTS = [E4M3, E5M2, E2M1]
RULES = ["rceil", "floor", "ceil", "even"]
FLOAT32 = Contract()
PRODUCT = Contract(mx_scale="float32_product")

by_element = pytest.mark.parametrize("element", ELEMENTS, ids=str)


def bits_of(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).view(torch.int32)


def floor_log2(value: float) -> int:
    return math.frexp(value)[1] - 1


def scale_by_definition(amax: float, element: FloatFormat, rule: str) -> int:
    """The scale code of a positive finite amax from the rule's definition, in doubles, which are exact
    here.
    """
    largest = element.max_value
    if rule == "rceil":
        exponent = floor_log2(amax) - floor_log2(largest)
        exponent += amax > math.ldexp(largest, exponent)
    else:
        exponent = floor_log2(amax)
        if rule == "even":
            step = max(exponent, -126) - element.mantissa_bits
            rounded = math.floor(math.ldexp(amax, -step) + 0.5)
            exponent = floor_log2(math.ldexp(rounded, step)) if rounded else -150
        elif rule == "ceil":
            exponent += amax > math.ldexp(1.0, exponent)
        exponent -= floor_log2(largest)
    return min(max(exponent + 127, 0), 254)


def all_positive_bfloat16() -> torch.Tensor:
    return torch.arange(1, 0x7F80, dtype=torch.int32) << 16


@by_element
@pytest.mark.parametrize("rule", RULES)
def test_scale_of_every_bfloat16_amax(element: FloatFormat, rule: str) -> None:
    """All 32,639 positive finite bfloat16 amaxes under every rule; finds a wrong constant of the integer
    recipe (B05).
    """
    bits = all_positive_bfloat16()
    got = mxfp8.scale_codes(bits, element, Contract(scale_rule=rule))
    values = bits.view(torch.float32).tolist()
    assert got.tolist() == [scale_by_definition(value, element, rule) for value in values]


@by_element
def test_transformer_engine_arithmetic_agrees_on_bfloat16(element: FloatFormat) -> None:
    """RN(amax * fp32(1/max)) rounded up gives the same code for every bfloat16 amax: 0 differences."""
    bits = all_positive_bfloat16()
    assert torch.equal(mxfp8.scale_codes(bits, element), mxfp8.scale_codes(bits, element, PRODUCT))


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=str)
def test_transformer_engine_arithmetic_differs_for_one_float32(element: FloatFormat) -> None:
    """Around every power of two of the range, 4 million float32 amaxes: one difference, just above max *
    2**-127.

    Between those neighbourhoods both are constant: products and codes are monotone in the amax.
    """
    mantissa = bits_of(element.max_value).item() & 0x7FFFFF
    edges = (torch.arange(0, 255, dtype=torch.int64) << 23) | mantissa
    near = (edges.unsqueeze(1) + torch.arange(-8192, 8192)).flatten().clamp(0, 0x7F7FFFFF).to(torch.int32)
    exact, product = mxfp8.scale_codes(near, element), mxfp8.scale_codes(near, element, PRODUCT)
    differing = near[exact != product].unique()
    last = bits_of(element.max_value * 2.0**-127).item()
    assert differing.tolist() == [last + 1]
    assert mxfp8.scale_codes(differing, element).tolist() == [1]
    assert mxfp8.scale_codes(differing, element, PRODUCT).tolist() == [0]


@given(
    amax=st.floats(min_value=0, exclude_min=True, allow_nan=False, allow_infinity=False, width=32),
    element=st.sampled_from(ELEMENTS),
    rule=st.sampled_from(RULES),
)
def test_scale_of_float32_amaxes(amax: float, element: FloatFormat, rule: str) -> None:
    """Any float32 amax, subnormals included, by the definition of the rule (B03, B04, B21)."""
    got = mxfp8.scale_codes(bits_of(amax), element, Contract(scale_rule=rule))
    assert got.tolist() == [scale_by_definition(amax, element, rule)]


@by_element
@pytest.mark.parametrize("rule", RULES)
def test_scale_beside_every_border(element: FloatFormat, rule: str) -> None:
    """float32 amaxes at, just below and just above every power of two and every multiple of the largest
    value.
    """
    powers = torch.exp2(torch.arange(-126, 128, dtype=torch.float64))
    borders = torch.cat([powers * mantissa for mantissa in (1.0, 1.5, 1.75, 1.875, 1.9375)]).to(torch.float32)
    near = torch.cat([borders.view(torch.int32) + step for step in (-1, 0, 1)])
    got = mxfp8.scale_codes(near, element, Contract(scale_rule=rule)).tolist()
    assert got == [scale_by_definition(value, element, rule) for value in near.view(torch.float32).tolist()]


def test_scale_of_special_amaxes() -> None:
    """0 gives 0, Inf 254, NaN 255 with any payload; with mx_inf "rule" Inf is exponent 255 of the rule."""
    special = torch.tensor([0, 0x7F800000, 0x7F800001, 0x7FFFFFFF], dtype=torch.int32)
    for rule in RULES:
        assert mxfp8.scale_codes(special, E4M3, Contract(scale_rule=rule)).tolist() == [0, 254, 255, 255]
    floor = Contract(scale_rule="floor", mx_inf="rule")
    assert mxfp8.scale_codes(special, E4M3, floor).tolist() == [0, 247, 255, 255]


def test_multipliers_are_exact_reciprocals() -> None:
    """All 256 codes: 2**(127 - code), the subnormal 2**-127 for 254 and NaN for 255 (B06), and the two odd
    profiles.
    """
    codes = torch.arange(256, dtype=torch.uint8)
    exact = mxfp8.multipliers(codes)
    scales = E8M0.decode(codes, torch.float64)
    assert torch.equal(exact[:255].to(torch.float64) * scales[:255], torch.ones(255, dtype=torch.float64))
    assert exact[255].isnan()
    flushed = mxfp8.multipliers(codes, Contract(mx_multiplier="flushed"))
    normal = mxfp8.multipliers(codes, Contract(mx_multiplier="normal"))
    assert torch.equal(flushed[1:254], exact[1:254])
    assert torch.equal(normal[1:255], exact[1:255])
    assert [flushed[0].item(), flushed[254].item()] == [torch.finfo(torch.float32).max, 0.0]
    assert [normal[0].item(), normal[255].item()] == [2.0**126, 0.0]
    assert flushed[255].isnan()


def reference_blocks(
    x: torch.Tensor, axis: int, element: FloatFormat, experts: Experts
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales block by block in plain Python loops: the layout's definition."""
    rows, hidden = x.shape
    codes = torch.zeros(rows, hidden, dtype=torch.uint8)
    if axis == -1:
        scales = torch.zeros(rows, hidden // 32, dtype=torch.uint8)
    else:
        scales = torch.zeros(experts.colwise_rows(32), hidden, dtype=torch.uint8)
    for e, (start, count) in enumerate(zip(experts.starts, experts.counts, strict=True)):
        if axis == -1:
            places = [
                (slice(row, row + 1), slice(c, c + 32), (row, c // 32))
                for row in range(start, start + count)
                for c in range(0, hidden, 32)
            ]
        else:
            places = [
                (
                    slice(start + r, start + min(r + 32, count)),
                    slice(c, c + 1),
                    (experts.colwise_row(e, r // 32, 32), c),
                )
                for r in range(0, count, 32)
                for c in range(hidden)
            ]
        for some_rows, columns, where in places:
            block = x[some_rows, columns].to(torch.float32)
            amax = block.abs().max()
            code = 255 if amax.isnan() else 254 if amax.isinf() else 0
            if 0 < amax < math.inf:
                code = scale_by_definition(amax.item(), element, "rceil")
            scales[where] = code
            factor = math.nan if code == 255 else 2.0 ** (127 - code)
            codes[some_rows, columns] = element.encode(block * torch.tensor(factor, dtype=torch.float32))
    return codes, scales


@st.composite
def ragged_inputs(draw: st.DrawFn) -> tuple[torch.Tensor, Experts]:
    """A small buffer of wide-ranging bfloat16 or float32 with specials, and experts that leave gaps and a
    tail.
    """
    alignment = draw(st.sampled_from([1, 32, 5]))
    sizes = draw(st.lists(st.sampled_from([0, 1, 31, 32, 33]), min_size=1, max_size=3))
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // alignment) * alignment)
    experts = Experts.from_offsets(offsets, sizes, offsets[-1] + draw(st.integers(0, 3)), alignment)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(experts.capacity, 32, generator=generator)
    x = x * torch.exp2(torch.randint(-140, 120, x.shape, generator=generator) * draw(st.sampled_from([0, 0.05, 1])))
    for value in draw(st.lists(st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 448.0, 1e-45]), max_size=6)):
        if experts.capacity:
            x[draw(st.integers(0, experts.capacity - 1)), draw(st.integers(0, 31))] = value
    return (x.to(torch.bfloat16) if draw(st.booleans()) else x), experts


@given(ragged_inputs(), st.sampled_from([-1, -2]), st.sampled_from([E4M3, E5M2]))
def test_quantize_equals_the_loop_over_blocks(
    inputs: tuple[torch.Tensor, Experts], axis: int, element: FloatFormat
) -> None:
    """Every code and scale of ragged experts in both directions equals the loop that defines them (B38, B42,
    B47).
    """
    x, experts = inputs
    got = mxfp8.quantize(x, axis, element, FLOAT32, experts)
    codes, scales = reference_blocks(x, axis, element, experts)
    assert torch.equal(got.codes, codes)
    assert torch.equal(got.scales, scales)
    assert (got.element, got.scale_format, got.axis, got.block) == (element, E8M0, axis, 32)


@given(ragged_inputs(), st.sampled_from([-1, -2]), st.sampled_from(RULES), st.booleans())
def test_padding_rows_are_never_read(inputs: tuple[torch.Tensor, Experts], axis: int, rule: str, block2d: bool) -> None:
    """Padding filled with NaN, Inf or zeros changes no byte of the result, and its own bytes are 0 (B47,
    B49).
    """
    x, experts = inputs
    contract = Contract(scale_rule=rule)
    results = []
    for fill in (0.0, math.nan, math.inf):
        y = torch.where(experts.valid_rows().unsqueeze(1), x, fill)
        results.append(mxfp8.quantize(y, axis, E4M3, contract, experts, block2d))
    for other in results[1:]:
        assert torch.equal(results[0].codes, other.codes)
        assert torch.equal(results[0].scales, other.scales)
    unowned = ~experts.valid_rows()
    assert not results[0].codes[unowned].any()
    unused = unowned if axis == -1 else ~experts.owned_colwise_rows(32)
    assert not results[0].scales[unused].any()


@given(ragged_inputs())
def test_two_dimensional_blocks_are_one_scale_for_32_by_32(inputs: tuple[torch.Tensor, Experts]) -> None:
    """The tile's scale is that of its amax; both layouts hold the same codes and values."""
    x, experts = inputs
    row = mxfp8.quantize(x, -1, E4M3, FLOAT32, experts, block2d=True)
    column = mxfp8.quantize(x, -2, E4M3, FLOAT32, experts, block2d=True)
    assert torch.equal(row.codes, column.codes)
    same = row.dequantize().view(torch.int32) == column.dequantize().view(torch.int32)
    assert bool((same | row.dequantize().isnan()).all())
    single = mxfp8.quantize(x, -2, E4M3, FLOAT32, experts)
    tiles = column.scales.reshape(-1, 1, 32)
    assert torch.equal(tiles, tiles[:, :, :1].expand_as(tiles))
    assert torch.equal(tiles[:, :, 0], single.scales.reshape(-1, 1, 32).amax(2))


def test_specials_in_a_block() -> None:
    """NaN poisons its block (scale 0xFF, NaN codes), Inf saturates with scale 0xFE, zeros keep their sign
    (B06, B43).
    """
    x = torch.zeros(4, 32)
    x[0, :3] = torch.tensor([1.0, math.nan, -2.0])
    x[1, :4] = torch.tensor([math.inf, -math.inf, 3.0e38, -1.0])
    x[2, :2] = torch.tensor([-0.0, 0.0])
    x[3, :2] = torch.tensor([448.0, -448.0])
    got = mxfp8.quantize(x, -1)
    assert got.scales.flatten().tolist() == [0xFF, 0xFE, 0, 127]
    assert got.codes[0].tolist() == [0x7F] * 32
    # 3e38 * 2**-127 = 1.763 rounds to 1.75; 2**-127 itself is below the smallest subnormal.
    assert got.codes[1, :5].tolist() == [0x7E, 0xFE, 0x3E, 0x80, 0]
    assert got.codes[2, :3].tolist() == [0x80, 0, 0]
    assert got.codes[3, :3].tolist() == [0x7E, 0xFE, 0]
    ignoring = mxfp8.quantize(x, -1, contract=Contract(nan_policy="ignore"))
    assert ignoring.scales[0].tolist() == [scale_by_definition(2.0, E4M3, "rceil")]
    # The block's amax is 2 = 256 * 2**-7: scale 120, and 1 and -2 become 128 and -256.
    assert ignoring.codes[0, :4].tolist() == [0x70, 0x7F, 0xF8, 0]
    dropped = mxfp8.quantize(x, -1, contract=Contract(signed_zero="drop"))
    assert dropped.codes[2, :2].tolist() == [0, 0]


@given(ragged_inputs(), st.sampled_from([-1, -2]), st.sampled_from([E4M3, E5M2]), st.integers(-8, 8))
def test_scaling_by_a_power_of_two_shifts_the_scale(
    inputs: tuple[torch.Tensor, Experts], axis: int, element: FloatFormat, shift: int
) -> None:
    """x * 2**k keeps every code and moves the scale by k, away from the ends of the range."""
    _, experts = inputs
    generator = torch.Generator().manual_seed(shift + 100)
    x = torch.randn(experts.capacity, 32, generator=generator)
    a, b = (mxfp8.quantize(y, axis, element, FLOAT32, experts) for y in (x, x * 2.0**shift))
    assert torch.equal(a.codes, b.codes)
    owned = a.scales > 0
    assert torch.equal(a.scales[owned].to(torch.int32) + shift, b.scales[owned].to(torch.int32))


@given(ragged_inputs(), st.sampled_from([-1, -2]), st.sampled_from(ELEMENTS), st.sampled_from(RULES))
def test_quantising_again_changes_no_value(
    inputs: tuple[torch.Tensor, Experts], axis: int, element: FloatFormat, rule: str
) -> None:
    """Quantise, dequantise, quantise: the same values, though a scale may drop by one while codes double."""
    x, experts = inputs
    x = x.to(torch.float32).nan_to_num(posinf=1.0, neginf=1.0).clamp(-1e30, 1e30)
    contract = Contract(scale_rule=rule)
    once = mxfp8.quantize(x, axis, element, contract, experts).dequantize()
    twice = mxfp8.quantize(once, axis, element, contract, experts).dequantize()
    assert torch.equal(once, twice)


@pytest.mark.parametrize("axis", [-1, -2])
def test_padding_dequantises_to_zero_whatever_its_scale_byte(axis: int) -> None:
    """Scale entries of no block hold the contract's byte, and even NaN there makes no value of padding
    rows.
    """
    experts = Experts.from_offsets([0, 3, 40], [2, 32], 70)
    got = mxfp8.quantize(torch.ones(70, 32), axis, contract=Contract(scale_padding=0xFF), experts=experts)
    unowned = ~experts.valid_rows() if axis == -1 else ~experts.owned_colwise_rows(32)
    assert bool((got.scales[unowned] == 0xFF).all())
    assert not (got.scales[~unowned] == 0xFF).any()
    expected = experts.valid_rows().unsqueeze(1).expand(70, 32).to(torch.float32)
    assert torch.equal(got.dequantize(), expected)


def test_staging_rounds_to_bfloat16_first() -> None:
    """float32 400.9 is 416 of E4M3 directly and 384 through bfloat16 (B17): two contracts, two codes."""
    x = torch.zeros(1, 32)
    x[0, :2] = torch.tensor([400.9, 448.0])
    assert mxfp8.quantize(x, -1).codes[0, 0] == 0x7D
    assert mxfp8.quantize(x, -1, contract=Contract(staging="bfloat16")).codes[0, 0] == 0x7C


def test_dequantize_is_exact_in_every_dtype() -> None:
    """code * scale over the whole range against float64, overflow to Inf only beyond float32, NaN under
    0xFF.
    """
    x = torch.zeros(256, 32)
    quantized = mxfp8.quantize(x, -1)
    codes = torch.arange(256, dtype=torch.uint8).unsqueeze(1).expand(256, 32)
    scales = torch.tensor([0, 1, 10, 127, 200, 246, 254, 255], dtype=torch.uint8)
    for code in scales:
        some = torch.full((256, 1), int(code), dtype=torch.uint8)
        one = type(quantized)(codes, some, E4M3, E8M0, -1, 32, quantized.experts)
        exact = E4M3.decode(codes, torch.float64) * E8M0.decode(some, torch.float64)
        assert torch.equal(one.dequantize(torch.float64).nan_to_num(nan=1e300), exact.nan_to_num(nan=1e300))
        for dtype, lowest in ((torch.float32, 0.0), (torch.bfloat16, 2.0**-126)):
            got = one.dequantize(dtype)
            fits = (exact.abs() <= torch.finfo(dtype).max) & ((exact == 0) | (exact.abs() >= lowest))
            # Below its smallest normal number bfloat16 has steps of 2**-133, of which half at most may be
            # lost.
            tiny = (exact.abs() < lowest) & (exact != 0)
            assert bool(((got[tiny].to(torch.float64) - exact[tiny]).abs() <= 2.0**-134).all())
            assert torch.equal(got[fits].to(torch.float64), exact[fits])
            assert bool(torch.isinf(got[~fits & ~tiny & ~exact.isnan()]).all())
            assert torch.equal(got.isnan(), exact.isnan())


def test_sources_of_any_type_agree() -> None:
    """bfloat16 and its float32 copy quantise alike, and a non-contiguous view like its copy."""
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    for axis in (-1, -2):
        a, b = mxfp8.quantize(x, axis), mxfp8.quantize(x.to(torch.float32), axis)
        c = mxfp8.quantize(x.t().contiguous().t(), axis)
        assert torch.equal(a.codes, b.codes)
        assert torch.equal(a.scales, b.scales)
        assert torch.equal(a.codes, c.codes)
        assert torch.equal(a.scales, c.scales)


@pytest.mark.parametrize("axis", [-1, -2])
def test_empty_shapes_have_empty_results(axis: int) -> None:
    """No rows, no columns, no experts: defined shapes, nothing raised (B64)."""
    for rows, hidden in ((0, 64), (33, 0), (0, 0)):
        for block2d in (False, True):
            got = mxfp8.quantize(torch.empty(rows, hidden), axis, block2d=block2d)
            assert got.codes.shape == (rows, hidden)
            assert got.scales.shape == ((rows, hidden // 32) if axis == -1 else (-(-rows // 32), hidden))
            assert got.dequantize().shape == (rows, hidden)
    none = Experts.from_offsets([0], capacity=5)
    assert not mxfp8.quantize(torch.full((5, 32), math.nan), axis, experts=none).codes.any()


def test_bad_arguments_name_the_value_and_the_rule() -> None:
    """A wrong axis, format, shape or dtype is refused rather than computed on."""
    x = torch.zeros(8, 32)
    for call, message in (
        (lambda: mxfp8.quantize(x, 0), "axis is 0: expected -1"),
        (lambda: mxfp8.quantize(x[:, :31], -1), "hidden is 31"),
        (lambda: mxfp8.quantize(x, -1, E4M3FNUZ), "element is E4M3FNUZ"),
        (lambda: mxfp8.quantize(x[0], -1), r"and shape \(32,\)"),
        (lambda: mxfp8.quantize(x.to(torch.float64), -1), "x has dtype torch.float64"),
        (lambda: mxfp8.quantize(x, -1, experts=Experts.single(9)), "x has 8 rows"),
        (lambda: mxfp8.quantize(x[:, :31], -2, E2M1), "hidden is 31"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
