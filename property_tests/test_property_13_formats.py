"""Narrow float formats: exhaustive over codes and over bfloat16, exact between, equal to two independent
libraries.

Rounding is checked against its definition (the two neighbours of a value and the midpoint between them), so a
fault in the integer arithmetic (a lost sticky bit, a tie to the wrong side, a double rounding, a carry that
does not reach the exponent) shows as a wrong neighbour.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_numerics.reference.formats import (
    E2M1,
    E4M3,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    E8M0,
    FORMATS,
    UE4M3,
    UE5M3,
    FloatFormat,
    pack_e2m1,
    unpack_e2m1,
)

ALL = list(FORMATS.values())
SIGNED = [E4M3, E5M2, E2M1, E4M3FNUZ, E5M2FNUZ]
DIRECTED = ("nearest_even", "nearest_away", "toward_zero", "up", "down")

by_name = pytest.mark.parametrize("element", ALL, ids=str)
signed_by_name = pytest.mark.parametrize("element", SIGNED, ids=str)

ML_DTYPES = {
    E4M3: ml_dtypes.float8_e4m3fn,
    E5M2: ml_dtypes.float8_e5m2,
    E2M1: ml_dtypes.float4_e2m1fn,
    E8M0: ml_dtypes.float8_e8m0fnu,
    E4M3FNUZ: ml_dtypes.float8_e4m3fnuz,
    E5M2FNUZ: ml_dtypes.float8_e5m2fnuz,
}
GFLOAT = {
    E4M3: gfloat.formats.format_info_ocp_e4m3,
    E5M2: gfloat.formats.format_info_ocp_e5m2,
    E2M1: gfloat.formats.format_info_ocp_e2m1,
    E8M0: gfloat.formats.format_info_ocp_e8m0,
}


def all_codes(element: FloatFormat) -> torch.Tensor:
    return torch.arange(element.n_codes, dtype=torch.uint8)


def all_bfloat16() -> torch.Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def finite_magnitudes(element: FloatFormat) -> list[float]:
    return [element.value(code) for code in range(element.max_code + 1)]


def encode_by_definition(element: FloatFormat, values: list[float], rounding: str) -> list[int]:
    """Codes of finite values by their neighbours, saturating: the independent definition the tests compare
    to.

    Only comparisons of doubles are made, with codes and with midpoints that doubles hold exactly.
    """
    grid = np.array(finite_magnitudes(element))
    signed = np.array(values, dtype=np.float64)
    magnitude, negative = np.abs(signed), np.signbit(signed)
    above = np.searchsorted(grid, magnitude).clip(max=len(grid) - 1)
    below = np.where(grid[above] <= magnitude, above, (above - 1).clip(min=0))
    middle = (grid[below] + grid[above]) / 2
    if rounding in ("nearest_even", "nearest_away"):
        to_below = magnitude < middle
        if rounding == "nearest_even":
            # Without mantissa bits the upper significand, 2, is the even one.
            to_below |= (magnitude == middle) & (below % 2 == 0) & (element.mantissa_bits > 0)
    elif rounding == "toward_zero":
        to_below = np.ones(len(grid[above]), dtype=bool)
    else:
        to_below = negative == (rounding == "up")
    # What lies below the lowest code of a format without zero goes to that code.
    codes = np.where((grid[above] <= magnitude) | (magnitude <= grid[0]), above, np.where(to_below, below, above))
    keeps_sign = negative & element.signed & ~((element.specials == "fnuz") & (codes == 0))
    return (codes | np.where(keeps_sign, element.sign_mask, 0)).tolist()


@by_name
def test_decode_then_encode_is_the_identity(element: FloatFormat) -> None:
    """Every code but a second NaN comes back from every rounding; finds a codec that loses subnormals
    (B16).
    """
    codes = all_codes(element)
    values = element.decode(codes, torch.float64)
    finite = torch.isfinite(values)
    for rounding in DIRECTED:
        assert torch.equal(element.encode(values[finite], rounding), codes[finite])
    if element.inf_code is not None:
        infinite = torch.isinf(values)
        assert torch.equal(element.encode(values[infinite], overflow="nonfinite"), codes[infinite])
    if element.nan_code is not None:
        assert bool((element.encode(values[values.isnan()]) == element.nan_code).all())


@by_name
def test_codes_of_finite_values_are_monotone(element: FloatFormat) -> None:
    """Values increase with the code; finds a wrong bias or a gap between subnormals and normals."""
    values = [element.value(code) for code in range(element.max_code + 1)]
    assert all(low < high for low, high in itertools.pairwise(values))
    assert values[-1] == element.max_value
    if element.has_zero:
        assert values[0] == 0
        assert values[1] == element.min_subnormal
        assert element.min_normal == values[1 << element.mantissa_bits]


@pytest.mark.parametrize(
    ("element", "largest", "min_normal", "min_subnormal", "nan", "inf"),
    [
        (E4M3, 448.0, 2.0**-6, 2.0**-9, 0x7F, None),
        (E5M2, 57344.0, 2.0**-14, 2.0**-16, 0x7F, 0x7C),
        (E2M1, 6.0, 1.0, 0.5, None, None),
        (E8M0, 2.0**127, 2.0**-127, 2.0**-127, 0xFF, None),
        (UE4M3, 448.0, 2.0**-6, 2.0**-9, 0x7F, None),
        (UE5M3, 114688.0, 2.0**-14, 2.0**-17, 0xFF, None),
        (E4M3FNUZ, 240.0, 2.0**-7, 2.0**-10, 0x80, None),
        (E5M2FNUZ, 57344.0, 2.0**-15, 2.0**-17, 0x80, None),
    ],
    ids=lambda value: str(value) if isinstance(value, FloatFormat) else "",
)
def test_properties_are_those_of_the_specification(
    element: FloatFormat,
    largest: float,
    min_normal: float,
    min_subnormal: float,
    nan: int | None,
    inf: int | None,
) -> None:
    """Range and special codes against the tables of OFP8, OCP MX and the FNUZ paper."""
    assert element.max_value == largest
    assert element.min_normal == min_normal
    assert element.min_subnormal == min_subnormal
    assert element.nan_code == nan
    assert element.inf_code == inf


@signed_by_name
@pytest.mark.parametrize("rounding", DIRECTED)
def test_every_bfloat16_rounds_by_definition(element: FloatFormat, rounding: str) -> None:
    """All 65,536 bfloat16 inputs in every rounding; finds ties to the wrong side (B15) and lost signs
    (B43).
    """
    x = all_bfloat16()
    finite = torch.isfinite(x)
    values = x[finite].to(torch.float64)
    got = element.encode(x[finite], rounding)
    expected = encode_by_definition(element, values.tolist(), rounding)
    assert torch.equal(got, torch.tensor(expected, dtype=torch.uint8))


@signed_by_name
def test_every_source_type_gives_the_same_codes(element: FloatFormat) -> None:
    """bfloat16, float32 and float64 carriers of one value agree; finds a path that differs by source type."""
    x = all_bfloat16()
    codes = element.encode(x)
    assert torch.equal(codes, element.encode(x.to(torch.float32)))
    assert torch.equal(codes, element.encode(x.to(torch.float64)))
    halves = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)
    assert torch.equal(element.encode(halves), element.encode(halves.to(torch.float32)))


def neighbourhood(element: FloatFormat) -> st.SearchStrategy[float]:
    """Doubles at, just below and just above codes and midpoints, where roundings change."""
    grid = [element.value(code) for code in range(element.max_code + 1)]
    points = sorted({*grid, *((a + b) / 2 for a, b in itertools.pairwise(grid)), 0.0})

    def move(point: float, steps: int) -> float:
        for _ in range(abs(steps)):
            point = math.nextafter(point, math.inf if steps > 0 else -math.inf)
        return point

    near = st.builds(move, st.sampled_from(points), st.integers(-2, 2))
    anywhere = st.floats(allow_nan=False, allow_infinity=False, width=64)
    return st.builds(lambda value, sign: value * sign, near | anywhere, st.sampled_from([1.0, -1.0]))


@signed_by_name
@given(data=st.data())
def test_float64_is_rounded_once(element: FloatFormat, data: st.DataObject) -> None:
    """A double within one part in 2**52 of a tie goes to its side; a trip through float32 would lose it
    (B18).
    """
    values = data.draw(st.lists(neighbourhood(element), min_size=1, max_size=20))
    rounding = data.draw(st.sampled_from(DIRECTED))
    got = element.encode(torch.tensor(values, dtype=torch.float64), rounding).tolist()
    assert got == encode_by_definition(element, values, rounding)


@given(
    values=st.lists(
        st.floats(min_value=0, allow_nan=False, allow_infinity=False, width=32)
        | st.integers(-126, 126).map(lambda power: 1.5 * 2.0**power),
        min_size=1,
    ),
    rounding=st.sampled_from(DIRECTED),
)
def test_e8m0_rounds_by_definition(values: list[float], rounding: str) -> None:
    """Powers of two on exponent bits, float32 subnormals included; finds log2 and exp2 in the way (B02,
    B03).
    """
    got = E8M0.encode(torch.tensor(values, dtype=torch.float32), rounding).tolist()
    assert got == encode_by_definition(E8M0, values, rounding)


def test_e8m0_specials() -> None:
    """0 and what lies below 2**-127 give code 0, Inf saturates to 254, NaN is 255, a negative is refused
    (B02).
    """
    x = torch.tensor([0.0, -0.0, 2.0**-149, 2.0**-127, 1.25 * 2.0**-127, math.inf, math.nan, 2.0**127])
    assert E8M0.encode(x, "up").tolist() == [0, 0, 0, 0, 1, 254, 255, 254]
    assert E8M0.encode(x, "nearest_even").tolist() == [0, 0, 0, 0, 0, 254, 255, 254]
    top = torch.tensor([1.5 * 2.0**127, math.inf])
    assert E8M0.encode(top, "up").tolist() == [254, 254]
    assert E8M0.encode(top, "up", overflow="nonfinite").tolist() == [255, 255]
    assert E8M0.encode(top, "down", overflow="nonfinite").tolist() == [254, 255]
    with pytest.raises(ValueError, match="E8M0 has no negative values"):
        E8M0.encode(torch.tensor([1.0, -1.0]))


@signed_by_name
def test_specials_saturate_or_become_nonfinite(element: FloatFormat) -> None:
    """Inf, NaN, overflow and -0 in both overflow modes and all roundings; finds Inf - Inf style leaks and
    lost signs.
    """
    over = element.max_value * 1.5
    x = torch.tensor([math.inf, -math.inf, over, -over, math.nan, -math.nan, 0.0, -0.0], dtype=torch.float64)
    top, sign = element.max_code, element.sign_mask
    nan = top if element.nan_code is None else element.nan_code
    minus_zero = 0 if element.specials == "fnuz" else sign
    for rounding in DIRECTED:
        got = element.encode(x, rounding).tolist()
        assert got == [top, top | sign, top, top | sign, nan, nan, 0, minus_zero]
    if element.specials == "none":
        with pytest.raises(ValueError, match="neither Inf nor NaN"):
            element.encode(x, overflow="nonfinite")
        return
    beyond = nan if element.inf_code is None else element.inf_code
    below = nan if element.inf_code is None else element.inf_code | sign
    for rounding, above, under in (
        ("nearest_even", beyond, below),
        ("toward_zero", top, top | sign),
        ("up", beyond, top | sign),
        ("down", top, below),
    ):
        got = element.encode(x, rounding, overflow="nonfinite").tolist()
        assert got == [beyond, below, above, under, nan, nan, 0, minus_zero]


@signed_by_name
@given(data=st.data())
def test_stochastic_rounding_follows_its_definition(element: FloatFormat, data: st.DataObject) -> None:
    """Up exactly where floor(f * 2**n) + r reaches 2**n; finds a shifted fraction and a stuck or biased
    threshold.
    """
    width = data.draw(st.sampled_from([1, 8, 16, 32]))
    values = data.draw(st.lists(neighbourhood(element), min_size=1, max_size=10))
    draws = data.draw(st.lists(st.integers(0, 2**width - 1), min_size=len(values), max_size=len(values)))
    grid = finite_magnitudes(element)
    expected = []
    for value, random in zip(values, draws, strict=True):
        low = encode_by_definition(element, [value], "toward_zero")[0]
        code = low & ~element.sign_mask
        if code < element.max_code and not (element.specials == "fnuz" and low == element.sign_mask):
            below, above = Fraction(grid[code]), Fraction(grid[code + 1])
            part = (abs(Fraction(value)) - below) / (above - below)
            code += math.floor(part * 2**width) + random >= 2**width
        negative = math.copysign(1.0, value) < 0 and not (element.specials == "fnuz" and code == 0)
        expected.append(code | (element.sign_mask if negative else 0))
    got = element.encode(
        torch.tensor(values, dtype=torch.float64),
        "stochastic",
        random_bits=torch.tensor(draws),
        random_width=width,
    )
    assert got.tolist() == expected


def test_large_tensors_are_encoded_as_small_ones() -> None:
    """The chunked path of large CPU tensors equals the plain one; finds a chunk that is skipped or
    shifted.
    """
    x = torch.linspace(-500, 500, 100_003)
    bits = torch.arange(len(x)) % 256
    assert torch.equal(E4M3.encode(x), torch.cat([E4M3.encode(part) for part in x.split(1000)]))
    whole = E4M3.encode(x, "stochastic", random_bits=bits, random_width=8)
    parts = [
        E4M3.encode(part, "stochastic", random_bits=some, random_width=8)
        for part, some in zip(x.split(1000), bits.split(1000), strict=True)
    ]
    assert torch.equal(whole, torch.cat(parts))
    square = x[:99_856].reshape(316, 316).t()
    assert torch.equal(E4M3.encode(square), E4M3.encode(square.contiguous()))


@pytest.mark.parametrize("element", ML_DTYPES, ids=str)
def test_ml_dtypes_decodes_the_same(element: FloatFormat) -> None:
    """All codes against ml_dtypes; finds a wrong table entry."""
    theirs = np.arange(element.n_codes, dtype=np.uint8).view(ML_DTYPES[element]).astype(np.float64)
    np.testing.assert_array_equal(element.decode(all_codes(element), torch.float64).numpy(), theirs)


@pytest.mark.parametrize("element", [f for f in ML_DTYPES if f.signed], ids=str)
def test_ml_dtypes_rounds_the_same(element: FloatFormat) -> None:
    """All bfloat16 inputs to nearest even against ml_dtypes.

    The differences, each with its reason: ml_dtypes keeps the sign of NaN (and of an overflow to NaN) where
    PTX conversions give 0x7F; its E2M1 turns NaN into -0 or 0 by its own choice, where `cvt.satfinite` gives
    +6.
    """
    x = all_bfloat16().to(torch.float32)
    overflow = "saturate" if element.specials == "none" else "nonfinite"
    ours = element.encode(x, overflow=overflow)
    with np.errstate(invalid="ignore"):
        theirs = torch.from_numpy(x.numpy().astype(ML_DTYPES[element]).view(np.uint8))
    not_a_number = x.isnan()
    if element.specials == "none":
        assert bool((ours[not_a_number] == element.max_code).all())
        compared = ~not_a_number
    else:
        compared = ~element.decode(ours).isnan()
        assert torch.equal(element.decode(ours).isnan(), element.decode(theirs).isnan())
    assert torch.equal(ours[compared], theirs[compared])


def test_ml_dtypes_e8m0_differs_only_where_known() -> None:
    """ml_dtypes also rounds E8M0 to nearest; what differs is written out."""
    x = torch.tensor([0.0, 2.0**-149, 2.0**-128, 2.0**-127, 1.25 * 2.0**-127, 1.5, 3.0, 2.0**127, 1.5 * 2.0**127])
    theirs = x.numpy().astype(ml_dtypes.float8_e8m0fnu).view(np.uint8).tolist()
    ours = E8M0.encode(x, overflow="nonfinite").tolist()
    differing = {float(value): (a, b) for value, a, b in zip(x, ours, theirs, strict=True) if a != b}
    assert differing == {
        0.0: (0, 255),  # E8M0 has no zero: NaN there, the smallest scale here and in PTX
        1.25 * 2.0**-127: (0, 1),  # a float32 subnormal above 2**-127 always goes up there
    }


GFLOAT_ROUNDINGS = {
    "nearest_even": gfloat.RoundMode.TiesToEven,
    "nearest_away": gfloat.RoundMode.TiesToAway,
    "toward_zero": gfloat.RoundMode.TowardZero,
    "up": gfloat.RoundMode.TowardPositive,
    "down": gfloat.RoundMode.TowardNegative,
}


@pytest.mark.parametrize("element", GFLOAT, ids=str)
def test_gfloat_decodes_the_same(element: FloatFormat) -> None:
    """All codes against gfloat; finds a wrong table entry."""
    theirs = [gfloat.decode_float(GFLOAT[element], code).fval for code in range(element.n_codes)]
    np.testing.assert_array_equal(element.decode(all_codes(element), torch.float64).numpy(), np.array(theirs))


@pytest.mark.parametrize("rounding", DIRECTED)
@pytest.mark.parametrize("element", [f for f in GFLOAT if f.signed], ids=str)
def test_gfloat_rounds_the_same(element: FloatFormat, rounding: str) -> None:
    """All finite bfloat16 inputs in every rounding, saturating, against gfloat."""
    x = all_bfloat16()
    x = x[torch.isfinite(x)].to(torch.float64)
    theirs = gfloat.round_ndarray(GFLOAT[element], x.numpy(), GFLOAT_ROUNDINGS[rounding], True)
    ours = element.round(x, rounding).numpy()
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(np.signbit(ours), np.signbit(theirs))


@pytest.mark.parametrize("rounding", DIRECTED)
def test_gfloat_rounds_e8m0_the_same_but_for_ties(rounding: str) -> None:
    """Every bfloat16 in range. To nearest even, gfloat takes the even code of a tie and not the even significand."""
    x = all_bfloat16()
    x = x[torch.isfinite(x) & (x >= 2.0**-127)].to(torch.float64)
    theirs = gfloat.round_ndarray(GFLOAT[E8M0], x.numpy(), GFLOAT_ROUNDINGS[rounding], True)
    differing = x[torch.from_numpy(theirs) != E8M0.round(x, rounding)]
    # Ties above codes 0, 2 and so on to 252; what lies above the last code saturates.
    ties = [1.5 * 2.0**power for power in range(-127, 126, 2)] if rounding == "nearest_even" else []
    assert differing.tolist() == ties


@pytest.mark.parametrize("width", [1, 4, 8, 16])
@pytest.mark.parametrize("element", [f for f in GFLOAT if f.signed], ids=str)
def test_gfloat_rounds_stochastically_the_same(element: FloatFormat, width: int) -> None:
    """Every finite bfloat16 with bits of one draw, as gfloat's fastest form; the others round what the bits cut off."""
    x = all_bfloat16()
    x = x[torch.isfinite(x)].to(torch.float64)
    bits = torch.randint(0, 1 << width, x.shape, generator=torch.Generator().manual_seed(width))
    ours = element.round(x, "stochastic", random_bits=bits, random_width=width).numpy()

    def gfloats(form: gfloat.RoundMode) -> np.ndarray:
        return gfloat.round_ndarray(GFLOAT[element], x.numpy(), form, True, bits.numpy(), width)

    np.testing.assert_array_equal(ours, gfloats(gfloat.RoundMode.StochasticFastest))
    np.testing.assert_array_equal(np.signbit(ours), np.signbit(gfloats(gfloat.RoundMode.StochasticFastest)))
    for form in (gfloat.RoundMode.Stochastic, gfloat.RoundMode.StochasticOdd, gfloat.RoundMode.StochasticFast):
        differing = (gfloats(form) != ours).mean()
        assert differing <= 2.0 ** -(width + 3)
        assert width > 4 or differing > 0


@given(codes=st.lists(st.integers(0, 15), min_size=2, max_size=64).filter(lambda c: len(c) % 2 == 0))
def test_packing_keeps_the_even_element_low(codes: list[int]) -> None:
    """Two codes a byte, the first in the low nibble, and back; finds the flipped order (B20)."""
    tensor = torch.tensor(codes, dtype=torch.uint8)
    packed = pack_e2m1(tensor)
    assert packed.tolist() == [a | b << 4 for a, b in zip(codes[::2], codes[1::2], strict=True)]
    assert torch.equal(unpack_e2m1(packed), tensor)


@by_name
def test_decoding_into_another_dtype_is_exact_or_refused(element: FloatFormat) -> None:
    """No dtype may round a value silently: bfloat16 and float16 hold some formats and not others."""
    codes = all_codes(element)
    exact = element.decode(codes, torch.float64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        holds = torch.equal(exact.to(dtype).to(torch.float64).nan_to_num(), exact.nan_to_num())
        if holds:
            assert torch.equal(element.decode(codes, dtype).to(torch.float64).nan_to_num(), exact.nan_to_num())
        else:
            with pytest.raises(ValueError, match="does not hold every value"):
                element.decode(codes, dtype)


def test_bad_arguments_name_the_value_and_the_rule() -> None:
    """Wrong dtypes, unknown modes and codes of another format are refused rather than reinterpreted (B27,
    B44).
    """
    x = torch.ones(3)
    for call, message in (
        (lambda: E4M3.encode(x.to(torch.int32)), "x has dtype torch.int32"),
        (lambda: E4M3.encode(x, "nearest"), "rounding 'nearest' is unknown"),
        (lambda: E4M3.encode(x, overflow="wrap"), "overflow 'wrap' is unknown"),
        (
            lambda: E4M3.encode(x, random_bits=torch.zeros(3, dtype=torch.int64)),
            "only 'stochastic' takes them",
        ),
        (lambda: E4M3.encode(x, "stochastic"), "needs random_bits"),
        (lambda: E4M3.encode(x, "stochastic", random_bits=torch.zeros(2, dtype=torch.int64)), "shape"),
        (
            lambda: E4M3.encode(x, "stochastic", random_bits=torch.zeros(3, dtype=torch.int64), random_width=40),
            "random_width is 40",
        ),
        (lambda: E4M3.decode(x), "decodes uint8 codes"),
        (lambda: E2M1.decode(torch.tensor([16], dtype=torch.uint8)), "codes hold 16: E2M1 has codes 0 to 15"),
        (lambda: E2M1.value(16), "code 16 is not a code of E2M1"),
        (lambda: pack_e2m1(torch.zeros(3, dtype=torch.uint8)), "even last dimension"),
        (lambda: pack_e2m1(torch.full((2,), 16, dtype=torch.uint8)), "codes hold 16"),
        (lambda: unpack_e2m1(x), "expected uint8"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
