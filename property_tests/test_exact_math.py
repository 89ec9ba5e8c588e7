"""Exact float32 maths: fma is rounded once, and the functions rounded to bfloat16 are correctly rounded.

fma is checked against rational arithmetic, so a float64 fma without its correction (which rounds twice) is
caught; the functions over all 65,536 bfloat16 inputs against float64, which is itself checked against
50-digit arithmetic, so a dropped coefficient, a clamp that is too tight, a lost sign of zero or a NaN that
gets lost is caught.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_numerics.reference import exact_math, oracle
from torch.utils._python_dispatch import TorchDispatchMode

LARGEST = Fraction(2**24 - 1) * 2**104
EVERY_BFLOAT16 = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)

Function = Callable[[torch.Tensor], torch.Tensor]


def float_of(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def bits_of(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def round_to_float32(exact: Fraction) -> float:
    """Round to nearest even by definition: the nearest multiple of the spacing at that magnitude."""
    if exact == 0:
        return 0.0
    magnitude = abs(exact)
    exponent = max(magnitude.numerator.bit_length() - magnitude.denominator.bit_length(), -126)
    while exponent > -126 and magnitude < Fraction(2) ** exponent:
        exponent -= 1
    while magnitude >= Fraction(2) ** (exponent + 1):
        exponent += 1
    spacing = Fraction(2) ** (exponent - 23)
    rounded = round(magnitude / spacing) * spacing
    value = math.inf if rounded > LARGEST else float(rounded)
    return math.copysign(value, exact)


def fma_by_definition(a: float, b: float, c: float) -> float:
    if not all(map(math.isfinite, (a, b, c))):
        return a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    return round_to_float32(exact) if exact else a * b + c


def fma_bits(triples: list[tuple[float, float, float]]) -> list[int]:
    columns = [torch.tensor(column, dtype=torch.float32) for column in zip(*triples, strict=True)]
    return [bits & 0xFFFFFFFF for bits in exact_math.fma(*columns).view(torch.int32).tolist()]


def assert_fma(triples: list[tuple[float, float, float]]) -> None:
    for (a, b, c), got in zip(triples, fma_bits(triples), strict=True):
        expected = fma_by_definition(a, b, c)
        if math.isnan(expected):
            assert math.isnan(float_of(got)), (a, b, c)
        else:
            assert got == bits_of(expected), (a.hex(), b.hex(), c.hex(), float_of(got).hex(), expected.hex())


any_float32 = st.integers(0, 2**32 - 1).map(float_of)
significand = st.integers(2**23, 2**24 - 1)


@st.composite
def near_a_tie(draw: st.DrawFn) -> tuple[float, float, float]:
    """a * b is halfway between two float32 and c, down to the smallest subnormal, decides."""
    odd = st.integers(2**11, 2895).map(lambda n: 2 * n + 1)  # products of two have 25 bits, the last one set
    scale = draw(st.integers(-40, 50))
    c = math.ldexp(draw(significand), draw(st.integers(-149, 2 * scale - 30)))
    return math.ldexp(draw(odd), scale), math.ldexp(draw(odd), scale), draw(st.sampled_from((-1, 1))) * c


@st.composite
def cancelling(draw: st.DrawFn) -> tuple[float, float, float]:
    """c is the rounded -a * b, or a neighbour of it: what remains is the rounding error of the product."""
    a = math.ldexp(draw(significand), draw(st.integers(-60, 20)))
    b = math.ldexp(draw(significand), draw(st.integers(-60, 20)))
    bits = bits_of(round_to_float32(-Fraction(a) * Fraction(b)))
    return a, b, float_of(bits + draw(st.integers(-2, 2)))


@st.composite
def subnormal(draw: st.DrawFn) -> tuple[float, float, float]:
    """The result is subnormal, where fewer bits are kept."""
    a = math.ldexp(draw(significand), draw(st.integers(-105, -90)))
    b = math.ldexp(draw(significand), draw(st.integers(-85, -70)))
    return a, b, draw(st.sampled_from((-1, 1))) * float_of(draw(st.integers(0, 2**24)))


@given(st.lists(st.one_of(near_a_tie(), cancelling(), subnormal()), min_size=1, max_size=40))
def test_fma_is_rounded_once_where_rounding_twice_shows(triples: list[tuple[float, float, float]]) -> None:
    assert_fma(triples)


@given(st.lists(st.tuples(any_float32, any_float32, any_float32), min_size=1, max_size=40))
def test_fma_is_rounded_once_for_any_bits(triples: list[tuple[float, float, float]]) -> None:
    assert_fma(triples)


def test_fma_breaks_a_tie_by_an_addend_far_below_it() -> None:
    midpoint = 1 + 2.0**-12  # its square is 1 + 2**-11 + 2**-24, halfway between two float32
    for tiny in (2.0**-30, 2.0**-100, 2.0**-149):
        up, down = fma_bits([(midpoint, midpoint, tiny), (midpoint, midpoint, -tiny)])
        assert up == down + 1
    assert_fma([(midpoint, midpoint, 0.0), (-midpoint, midpoint, 2.0**-149), (midpoint, midpoint, -(2.0**-149))])


def test_fma_of_special_values() -> None:
    values = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        2.0**-149,
        -(2.0**-149),
        float(LARGEST),
        -float(LARGEST),
        math.inf,
        -math.inf,
    ]
    values.append(math.nan)
    assert_fma([(a, b, c) for a in values for b in values for c in values])


def test_fma_broadcasts_and_does_not_depend_on_the_size() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(1, 70001, generator=generator), torch.randn(3, 1, generator=generator)
    whole = exact_math.fma(a, b, 0.1)
    parts = torch.stack([exact_math.fma(a[0, i : i + 1], b[:, 0], torch.tensor(0.1)) for i in range(0, 70001, 7001)])
    assert torch.equal(whole[:, ::7001].T, parts)
    assert exact_math.fma(torch.zeros(0, 4), 1.0, 2.0).shape == (0, 4)


def test_fma_refuses_other_types() -> None:
    with pytest.raises(TypeError, match=r"b is torch\.float64: fma takes float32"):
        exact_math.fma(torch.ones(2), torch.ones(2, dtype=torch.float64), 1.0)
    with pytest.raises(TypeError, match=r"x is torch\.int32: expected float32, bfloat16 or float16"):
        exact_math.exp(torch.ones(2, dtype=torch.int32))


def misrounded(values: torch.Tensor, exact: torch.Tensor) -> list[float]:
    """The bfloat16 inputs whose float32 result, rounded to bfloat16, is not the correctly rounded one."""
    rounded, expected = values.to(torch.bfloat16), oracle.round_once(exact, torch.bfloat16)
    both_nan = rounded.isnan() & expected.isnan()
    differ = (rounded.view(torch.int16) != expected.view(torch.int16)) & ~both_nan
    return EVERY_BFLOAT16[differ].float().tolist()


EXACT: dict[str, tuple[Function, Function]] = {
    "exp": (exact_math.exp, torch.exp),
    "sigmoid": (exact_math.sigmoid, oracle.sigmoid),
    "sigmoid_pair": (lambda x: exact_math.sigmoid_pair(x).value, oracle.sigmoid),
    "sigmoid_pair complement": (
        lambda x: exact_math.sigmoid_pair(x).complement,
        lambda x: oracle.sigmoid(-x),
    ),
    "tanh": (exact_math.tanh, torch.tanh),
    "tanh derivative": (lambda x: exact_math.tanh_terms(x).derivative, oracle.sech_squared),
    "silu": (exact_math.silu, lambda x: x * oracle.sigmoid(x)),
}


@pytest.mark.parametrize("name", EXACT)
def test_every_bfloat16_input_gives_the_correctly_rounded_bfloat16(name: str) -> None:
    function, formula = EXACT[name]
    assert misrounded(function(EVERY_BFLOAT16), formula(EVERY_BFLOAT16.double())) == []


def test_normal_cdf_of_every_bfloat16_but_one_is_correctly_rounded() -> None:
    exact = oracle.normal_cdf(EVERY_BFLOAT16.double())
    assert misrounded(exact_math.normal_cdf(EVERY_BFLOAT16), exact) == [0.5390625]


def mp_gelu(x: Any) -> Any:
    return x * (1 + mpmath.tanh(mpmath.sqrt(2 / mpmath.pi) * (x + mpmath.mpf("0.044715") * x**3))) / 2


def mp_gelu_erf(x: Any) -> Any:
    return x * mpmath.erfc(-x / mpmath.sqrt(2)) / 2


MPMATH: dict[str, tuple[Function, Callable[[Any], Any]]] = {
    "exp": (torch.exp, mpmath.exp),
    "sigmoid": (oracle.sigmoid, lambda x: 1 / (1 + mpmath.exp(-x))),
    "tanh": (torch.tanh, mpmath.tanh),
    "sech_squared": (oracle.sech_squared, lambda x: mpmath.sech(x) ** 2),
    "normal_cdf": (oracle.normal_cdf, mpmath.ncdf),
    "silu_derivative": (oracle.silu_derivative, lambda x: mpmath.diff(lambda t: t / (1 + mpmath.exp(-t)), x)),
    "gelu": (oracle.gelu, mp_gelu),
    "gelu_derivative": (oracle.gelu_derivative, lambda x: mpmath.diff(mp_gelu, x)),
    "gelu_erf": (oracle.gelu_erf, mp_gelu_erf),
    "gelu_erf_derivative": (oracle.gelu_erf_derivative, lambda x: mpmath.diff(mp_gelu_erf, x)),
}


@pytest.mark.parametrize("name", MPMATH)
def test_the_oracle_agrees_with_arbitrary_precision(name: str) -> None:
    """Relative error below 2**-40, 16 bits beyond float32, for results down to float32's subnormals."""
    formula, exact = MPMATH[name]
    codes = torch.arange(0x3000, 0x42F0, 11)  # 4.7e-10 to 120
    x = EVERY_BFLOAT16[torch.cat([codes, codes + 0x8000])].double()
    with mpmath.workdps(120):
        for given_x, value in zip(x.tolist(), formula(x).tolist(), strict=True):
            expected = exact(mpmath.mpf(given_x))
            if abs(expected) > 2**-150 and abs(expected) < 2**127:
                assert abs(value - expected) <= abs(expected) * mpmath.mpf(2) ** -40, (given_x, value)


@given(st.lists(st.floats(allow_nan=False), min_size=1), st.sampled_from((torch.bfloat16, torch.float32)))
def test_round_once_rounds_float64_once(values: list[float], dtype: torch.dtype) -> None:
    got = oracle.round_once(torch.tensor(values, dtype=torch.float64), dtype).double().tolist()
    shift = 16 if dtype == torch.bfloat16 else 0
    for value, rounded in zip(values, got, strict=True):
        if math.isinf(value):
            assert rounded == value
            continue
        # bfloat16 is float32 with 16 fewer bits: round a value that keeps its leading 8 bits in place of 24.
        magnitude = abs(Fraction(value))
        if shift and magnitude:
            exponent = max(math.frexp(value)[1] - 1, -126)
            spacing = Fraction(2) ** (exponent - 7)
            nearest = round(magnitude / spacing) * spacing
            expected = math.inf if nearest >= Fraction(2) ** 128 else float(nearest)
        else:
            expected = abs(round_to_float32(Fraction(value)))
        assert rounded == math.copysign(expected, value), value


def test_round_once_is_not_fooled_by_torchs_double_rounding() -> None:
    just_above_a_tie = 1 + 2.0**-8 + 2.0**-40  # float32 rounds it to the tie, which goes down to even
    value = torch.tensor([just_above_a_tie, -just_above_a_tie], dtype=torch.float64)
    assert oracle.round_once(value, torch.bfloat16).tolist() == [1 + 2.0**-7, -1 - 2.0**-7]


def every_and_between() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    between = (torch.rand(100_000, generator=generator) - 0.5) * 240
    near_zero = torch.randn(100_000, generator=generator) * torch.exp2(-20 * torch.rand(100_000, generator=generator))
    return torch.cat([between, near_zero, EVERY_BFLOAT16.float()])


def horner(x: torch.Tensor, *coefficients: float) -> torch.Tensor:
    value = torch.zeros_like(x)
    for coefficient in coefficients:
        value = value * x + coefficient
    return value


def test_the_polynomials_have_their_stated_errors() -> None:
    """In float64, where their evaluation adds nothing: a wrong digit of a coefficient shows."""
    r = torch.linspace(-0.34658, 0.34658, 100_000, dtype=torch.float64)
    exponential = torch.exp(r)
    long = horner(r, *exact_math.EXP_COEFFICIENTS, 1.0, 1.0)
    assert ((long - exponential).abs() / exponential).max() < 3.25e-9
    short = horner(r, *exact_math.SHORT_EXP_COEFFICIENTS, 1.0)
    assert ((short - exponential).abs() / exponential).max() < 9.25e-8
    half = r / 2
    expm1 = horner(half, *exact_math.HALF_EXPM1_COEFFICIENTS, 1.0, 0.0)
    assert ((expm1 - torch.expm1(r) / 2).abs() / (torch.expm1(r) / 2).abs()).max() < 1.45e-8
    z = torch.linspace(0, 14.5, 100_000, dtype=torch.float64)
    mills = 0.5 * torch.special.erfcx(z / math.sqrt(2))
    fitted = horner(1 / (1 + z * exact_math.MILLS_SLOPE), *exact_math.MILLS_COEFFICIENTS)
    assert ((fitted - mills).abs() / mills).max() < 4.95e-8
    for constant, value in (
        ("LOG2_E", math.log2(math.e)),
        ("LN_2", math.log(2)),
        ("INVERSE_SQRT_2_PI", (2 * math.pi) ** -0.5),
    ):
        assert getattr(exact_math, constant) == round_to_float32(Fraction(value))
    assert round_to_float32(Fraction(math.log(2)) - Fraction(exact_math.LN_2)) == exact_math.LN_2_LOW


def relative_error_of_short_exp(y: torch.Tensor) -> torch.Tensor:
    """Bound for exp(y) in sigmoid: its polynomial, LN_2 as a float32, rounding of `reduced` and five steps.

    A step's rounding error is at most 2**-24 of its result; each later step multiplies it by |reduced| <
    0.347, against a result above 0.707.
    """
    k = (y.double() / math.log(2)).abs() + 1
    steps = 2.0**-24 * (1 + 1.42 * 0.347 / 0.707 * (1 + 0.347 + 0.347**2))
    return 9.2e-8 + k * abs(exact_math.LN_2 - math.log(2)) + 0.347 * 2.0**-24 + steps


def test_sigmoid_is_inside_its_error_bound_for_float32_inputs() -> None:
    """A leading coefficient wrong in its 16th bit, or a coarser ln(2), exceeds it."""
    x = every_and_between()
    x = x[x.isfinite()]
    exact = oracle.sigmoid(x.double())
    relative = relative_error_of_short_exp(x.clamp(-104, 104)) + 3 * 2.0**-24
    error = (exact_math.sigmoid(x).double() - exact).abs()
    assert (error <= exact * relative + 2.0**-150).all()
    pair = exact_math.sigmoid_pair(x)
    assert ((pair.value.double() - exact).abs() <= exact * relative + 2.0**-150).all()
    assert ((pair.complement.double() - oracle.sigmoid(-x.double())).abs() <= relative + 2.0**-150).all()


def test_exp_is_within_one_last_place_for_float32_inputs() -> None:
    x = every_and_between()
    x = x[x.isfinite()]
    exact = torch.exp(x.double())
    inside = exact < 2.0**128 * (1 - 2.0**-25)
    spacing = torch.exp2(torch.floor(torch.log2(exact.clamp(2.0**-126, 2.0**127))) - 23)
    got = exact_math.exp(x).double()
    assert ((got - exact).abs()[inside] <= spacing[inside]).all()
    assert torch.isinf(got[exact >= 2.0**128]).all()


@pytest.mark.parametrize("name", ["exp", "sigmoid"])
def test_monotone_over_bfloat16(name: str) -> None:
    ordered = EVERY_BFLOAT16[~EVERY_BFLOAT16.isnan()].float().sort().values
    values = EXACT[name][0](ordered)
    assert (values[1:] >= values[:-1]).all()


def test_sigmoid_pair_mirrors() -> None:
    x = every_and_between()
    there, back = exact_math.sigmoid_pair(x), exact_math.sigmoid_pair(-x)
    off_zero = ~x.isnan() & (x != 0)
    assert torch.equal(there.value[off_zero], back.complement[off_zero])
    assert torch.equal(there.complement[off_zero], back.value[off_zero])


def test_terms_have_the_bits_of_the_plain_functions() -> None:
    x = every_and_between()
    x = x[~x.isnan()]
    assert torch.equal(exact_math.sigmoid_terms(x).value, exact_math.sigmoid(x))
    assert torch.equal(exact_math.tanh_terms(x).value, exact_math.tanh(x))
    assert torch.equal(exact_math.sigmoid_terms(x).clamped, x.clamp(-104, 30))


def test_tanh_is_odd_and_keeps_small_numbers() -> None:
    x = every_and_between()
    x = x[~x.isnan()]
    assert torch.equal(exact_math.tanh(-x).view(torch.int32), (-exact_math.tanh(x)).view(torch.int32))
    small = torch.tensor([2.0**-149, -(2.0**-149), 2.0**-126, -0.0, 0.0, 2.0**-13])
    assert torch.equal(exact_math.tanh(small).view(torch.int32), small.view(torch.int32))


@pytest.mark.parametrize("payload", [0x7FC00000, 0x7FFFFFFF, 0x7F800001, -0x400000, -1])
def test_nan_reaches_every_result_whatever_its_payload(payload: int) -> None:
    """The scale is made from bits of the argument: a NaN must not become a number there."""
    x = torch.tensor([payload], dtype=torch.int32).view(torch.float32)
    results = [exact_math.exp(x), exact_math.sigmoid(x), exact_math.silu(x), exact_math.tanh(x)]
    results += [exact_math.normal_cdf(x), *exact_math.sigmoid_pair(x), *exact_math.tanh_terms(x)]
    results += [*exact_math.sigmoid_terms(x), *exact_math.normal_tail(x)]
    assert all(result.isnan().all() for result in results)


ROUNDED_OPERATIONS = {
    "add",
    "sub",
    "rsub",
    "mul",
    "reciprocal",
    "clamp",
    "neg",
    "abs",
    "where",
    "gt",
    "lt",
    "copysign",
}
EXACT_OPERATIONS = {
    "view",
    "_to_copy",
    "expand",
    "_unsafe_view",
    "empty",
    "slice",
    "copy_",
    "bitwise_or_",
    "add_",
}
EXACT_OPERATIONS |= {
    "bitwise_xor_",
    "bitwise_right_shift_",
    "__lshift__",
    "__rshift__",
    "lift_fresh",
    "detach",
}
EXACT_OPERATIONS |= {"bitwise_left_shift", "bitwise_right_shift", "clone"}


class Operations(TorchDispatchMode):
    """Records the names of the operations that tensors go through."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.add(str(function).split(".")[1])
        return function(*args, **(kwargs or {}))


FUNCTIONS: list[Callable[[torch.Tensor], Any]] = [
    exact_math.exp,
    exact_math.sigmoid,
    exact_math.sigmoid_terms,
    exact_math.sigmoid_pair,
    exact_math.silu,
    exact_math.tanh,
    exact_math.tanh_terms,
    exact_math.normal_tail,
    exact_math.normal_cdf,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_only_operations_that_a_kernel_can_mirror(function: Callable[[torch.Tensor], Any]) -> None:
    """torch.exp, torch.tanh or a float division by a scalar have other bits on another device."""
    x = torch.linspace(-9, 9, 64)
    with Operations() as operations:
        function(x)
    assert operations.names <= ROUNDED_OPERATIONS | EXACT_OPERATIONS


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_cpu_and_cuda_give_the_same_bits(function: Callable[[torch.Tensor], Any]) -> None:
    x = every_and_between()
    here, there = function(x), function(x.cuda())
    for host, device in zip(
        [here] if isinstance(here, torch.Tensor) else here,
        [there] if isinstance(there, torch.Tensor) else there,
        strict=True,
    ):
        same = host.view(torch.int32) == device.cpu().view(torch.int32)
        assert (same | (host.isnan() & device.cpu().isnan())).all()
