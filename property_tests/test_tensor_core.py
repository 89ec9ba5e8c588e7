"""Tensor-core products: an independent scalar model, chains, tiles, special values, bounds, bad input.

`scalar_chain` evaluates the model of tensor_core_models.py in rational numbers, one output at a time; it
shares no arithmetic with the reference.
"""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_numerics.reference import tensor_core
from moe_numerics.reference.formats import E8M0, UE4M3
from moe_numerics.reference.tensor_core import MODELS, OPERANDS, Model, accumulate, accumulation_bound, matmul

from moe_numerics import silicon

WIDE = {"bf16": torch.bfloat16, "f16": torch.float16}
SILICON = tuple(row.name for row in MODELS.values() if row.evidence == "silicon")


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16 if x.dtype == torch.float16 else torch.int32)


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.dtype == y.dtype and torch.equal(bits(x), bits(y))


def draw_operand(name: str, shape: tuple[int, ...], spread: str, generator: torch.Generator) -> torch.Tensor:
    """Values of a format: any bit patterns, or finite ones near 1, near the least, or sparse."""
    if name == "tf32":
        raw = torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32).view(torch.float32)
    elif name in WIDE:
        raw = torch.randint(-(2**15), 2**15, shape, generator=generator).to(torch.int16).view(WIDE[name])
    else:
        codes = torch.randint(0, OPERANDS[name].n_codes, shape, generator=generator).to(torch.uint8)
        if spread == "bits":
            return codes
        kept = torch.isfinite(OPERANDS[name].decode(codes))
        if spread == "sparse":
            kept &= torch.rand(shape, generator=generator) < 0.2
        return torch.where(kept, codes, 0)
    if spread == "bits":
        return raw
    values = torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-8, 9, shape, generator=generator)
    if spread == "tiny":
        values = values * (2.0**-14 if name == "f16" else 2.0**-70)
    if spread == "sparse":
        values = values * (torch.rand(shape, generator=generator) < 0.2)
    return values if name == "tf32" else values.to(WIDE[name])


def draw_scales(row: Model, shape: tuple[int, ...], spread: str, generator: torch.Generator) -> torch.Tensor:
    low, high = {"bits": (0, 256), "tiny": (0, 40)}.get(spread, (120, 135))
    if row.scale_format == "e4m3":
        low, high = {"bits": (0, 256), "tiny": (0, 12)}.get(spread, (20, 127))
    return torch.randint(low, high, shape, generator=generator).to(torch.uint8)


def draw_accumulator(row: Model, shape: tuple[int, ...], spread: str, generator: torch.Generator) -> torch.Tensor:
    if row.rounding == "rne_f16":
        raw = torch.randint(-(2**15), 2**15, shape, generator=generator).to(torch.int16).view(torch.float16)
        return raw if spread == "bits" else torch.randn(shape, generator=generator).half()
    raw = torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32).view(torch.float32)
    return (
        raw if spread == "bits" else torch.randn(shape, generator=generator) * (2.0**-135 if spread == "tiny" else 1.0)
    )


def values_of(name: str, x: torch.Tensor) -> list[list[float]]:
    if x.dtype == torch.uint8:
        return OPERANDS[name].decode(x, torch.float64).tolist()
    if name == "tf32":
        x = (x.view(torch.int32) >> 13 << 13).view(torch.float32)
    return x.double().tolist()


def exponent_of(value: float, least: int) -> int:
    return max(math.frexp(value)[1] - 1, least)


def round_scalar(total: Fraction, rounding: str) -> float:
    """The rounding of a sum, by the steps of a float type at its size."""
    size, sign = abs(total), -1.0 if total < 0 else 1.0
    precision, least, above = (11, -14, 65536) if rounding == "rne_f16" else (24, -126, 2**128)
    exponent = least
    while Fraction(2) ** (exponent + 1) <= size:
        exponent += 1
    step = Fraction(2) ** (exponent - precision + 1)
    steps = round(size / step) if rounding == "rne_f16" else size // step
    if rounding == "rz_e8m13":
        steps -= steps % 1024
    size = steps * step
    if size == 0:
        return 0.0
    return sign * (math.inf if size >= above else float(size))


def scalar_chain(
    row: Model, a: list[float], b: list[float], c: float, least: tuple[int, int], scales: list[list[float]]
) -> float:
    """One output of the chain over K, in rational numbers."""
    for first in range(0, len(a), row.group):
        terms: list[tuple[Fraction, int | None]] = []
        special: list[float] = [] if math.isfinite(c) else [c]
        finite = c if math.isfinite(c) else 0.0
        least_c = -14 if row.rounding == "rne_f16" else -126
        terms.append((Fraction(finite), exponent_of(finite, least_c) if finite else None))
        for run in range(first, first + row.group, row.exact_run):
            products = []
            factors = [side[run // row.scale_block] for side in scales] if row.scale_format else []
            exponents = [exponent_of(f, -6 if row.scale_format == "e4m3" else -127) for f in factors if f]
            for x, y in zip(a[run : run + row.exact_run], b[run : run + row.exact_run], strict=True):
                product = x * y
                for factor in factors:
                    product *= factor
                if math.isfinite(product):
                    products.append((Fraction(x) * Fraction(y), x, y))
                else:
                    special.append(product)
            scale = math.prod((Fraction(f) for f in factors if math.isfinite(f)), start=Fraction(1))
            if row.exact_run == 1:
                for product, x, y in products:
                    real = product * scale
                    exponent = exponent_of(x, least[0]) + exponent_of(y, least[1]) + sum(exponents)
                    terms.append((real, exponent if real else None))
            else:
                live = scale != 0 and any(product for product, _, _ in products)
                total = sum((product for product, _, _ in products), start=Fraction(0))
                terms.append((total * scale, sum(exponents) if live else None))
        if special:
            c = math.fsum(special) if len({*special} & {math.inf, -math.inf}) < 2 else math.nan
            continue
        emax = max([row.zero_exponent, *(exponent for _, exponent in terms if exponent is not None)])
        step = Fraction(2) ** (emax - row.fraction_bits)
        c = round_scalar(sum(math.trunc(term / step) for term, _ in terms) * step, row.rounding)
    return c


def decode_scales(row: Model, scales: torch.Tensor | None) -> list[list[float]]:
    if scales is None:
        return []
    return (E8M0.decode(scales) if row.scale_format == "e8m0" else UE4M3.decode(scales & 0x7F)).tolist()


class Operands:
    """One drawn call of `accumulate`: everything it takes for m x n outputs over k values."""

    def __init__(self, row: Model, shape: tuple[int, int, int], spread: str, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        m, n, k = shape
        picks = torch.randint(0, len(row.operands), (2,), generator=generator).tolist()
        self.row = row
        self.formats = [row.operands[pick] for pick in picks]
        self.a = draw_operand(self.formats[0], (m, k), spread, generator)
        self.b = draw_operand(self.formats[1], (n, k), spread, generator)
        self.c = draw_accumulator(row, (m, n), spread, generator)
        self.scales: list[torch.Tensor | None] = [None, None]
        if row.scale_format:
            blocks = -(-k // row.scale_block)
            self.scales = [draw_scales(row, (size, blocks), spread, generator) for size in (m, n)]

    def accumulate(self) -> torch.Tensor:
        return accumulate(
            self.a,
            self.b,
            self.c,
            self.row.name,
            a_format=self.formats[0],
            b_format=self.formats[1],
            scales_a=self.scales[0],
            scales_b=self.scales[1],
        )

    def arguments(self, c: torch.Tensor | None) -> dict[str, object]:
        """What `matmul` and `accumulation_bound` take."""
        return {
            "a": self.a,
            "b": self.b.t(),
            "c": c,
            "model": self.row.name,
            "a_format": self.formats[0],
            "b_format": self.formats[1],
            "scales_a": self.scales[0],
            "scales_b": None if self.scales[1] is None else self.scales[1].t(),
        }


names = st.sampled_from(list(MODELS))
spreads = st.sampled_from(("bits", "near", "tiny", "sparse"))
seeds = st.integers(0, 2**32)


def assert_equals_scalar_model(case: Operands) -> None:
    row = case.row
    got = case.accumulate()
    left, right = values_of(case.formats[0], case.a), values_of(case.formats[1], case.b)
    factors = [decode_scales(row, scales) for scales in case.scales]
    least = (OPERANDS[case.formats[0]].min_exponent, OPERANDS[case.formats[1]].min_exponent)
    for i, line in enumerate(left):
        for j, column in enumerate(right):
            scales = [factors[0][i], factors[1][j]] if row.scale_format else []
            want = scalar_chain(row, line, column, float(case.c[i, j]), least, scales)
            place = f"{row.name} {case.formats} [{i}, {j}]"
            if math.isnan(want):
                canonical = 0x7FFF if got.dtype == torch.float16 else 0x7FFFFFFF
                assert int(bits(got)[i, j]) == canonical, place
            else:
                expected = torch.tensor(want, dtype=torch.float64).to(torch.float32).to(got.dtype)
                found = f"{place}: {float(got[i, j])!r}, not {want!r}"
                assert int(bits(got)[i, j]) == int(bits(expected)), found


@given(names, spreads, seeds, st.integers(1, 2))
def test_equals_a_scalar_model_in_rational_numbers(name: str, spread: str, seed: int, groups: int) -> None:
    """Catches any wrong bit of alignment, truncation, rounding, exponents of zeros and special values."""
    row = MODELS[name]
    assert_equals_scalar_model(Operands(row, (3, 4, groups * row.group), spread, seed))


@pytest.mark.parametrize("name", MODELS)
def test_every_row_equals_the_scalar_model(name: str) -> None:
    """Catches a fault that only one row of the table shows; the largest operands fill the widest sums."""
    row = MODELS[name]
    for spread in ("bits", "near", "tiny", "sparse"):
        assert_equals_scalar_model(Operands(row, (2, 3, row.group), spread, 0))
    case = Operands(row, (1, 1, row.group), "near", 0)
    for side in ("a", "b"):
        x, fmt = getattr(case, side), OPERANDS[case.formats["ab".index(side)]]
        full = fmt.max_code if x.dtype == torch.uint8 else fmt.max_value * 2.0 ** (-fmt.max_exponent)
        setattr(case, side, torch.full_like(x, full))
    assert_equals_scalar_model(case)


@given(names, spreads, seeds)
def test_a_chain_is_its_parts_one_after_another(name: str, spread: str, seed: int) -> None:
    """Catches state kept across groups, or a group order other than ascending."""
    row = MODELS[name]
    size = max(row.group, row.scale_block)
    case = Operands(row, (5, 6, 3 * size), spread, seed)
    c: torch.Tensor = case.c
    for k in range(0, 3 * size, size):
        part = Operands(row, (0, 0, 0), "near", 0)
        part.formats, part.c = case.formats, c
        part.a, part.b = case.a[:, k : k + size], case.b[:, k : k + size]
        if row.scale_format:
            blocks = slice(k // row.scale_block, (k + size) // row.scale_block)
            part.scales = [scales[:, blocks] for scales in case.scales if scales is not None]
        c = part.accumulate()
    assert same_bits(case.accumulate(), c)


@given(names, spreads, seeds)
def test_order_within_a_group_does_not_matter(name: str, spread: str, seed: int) -> None:
    """Catches rounding between the products of a group."""
    row = MODELS[name]
    length = row.exact_run if row.exact_run > 1 else row.group
    case = Operands(row, (5, 6, length), spread, seed)
    before = case.accumulate()
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed))
    case.a, case.b = case.a[:, order], case.b[:, order]
    assert same_bits(before, case.accumulate())


@given(names, spreads, seeds, st.integers(1, 70))
def test_k_is_padded_with_zeros(name: str, spread: str, seed: int, k: int) -> None:
    """Catches a partial group that reads past K, or a padding zero that takes part in an alignment."""
    row = MODELS[name]
    case = Operands(row, (3, 5, k), spread, seed)
    short = case.accumulate()
    padding = -k % row.group
    case.a, case.b = (torch.nn.functional.pad(x, (0, padding)) for x in (case.a, case.b))
    if row.scale_format:
        blocks = -(-(k + padding) // row.scale_block)
        case.scales = [
            torch.nn.functional.pad(scales, (0, blocks - scales.shape[1]), value=1)
            for scales in case.scales
            if scales is not None
        ]
    assert same_bits(short, case.accumulate())


@given(st.sampled_from([1, 7, 300, 1 << 20]), names, spreads, seeds)
def test_tiles_do_not_matter(budget: int, name: str, spread: str, seed: int) -> None:
    """Catches a tile that reads another tile's operands, and products folded wrongly at any step size."""
    row = MODELS[name]
    case = Operands(row, (3, 260, row.group), spread, seed)
    whole = case.accumulate()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tensor_core.TILE_ELEMENTS, "cpu", budget)
        assert same_bits(whole, case.accumulate())


@given(names, spreads, seeds, st.sampled_from([(1, 16, 8), (40, 16, 8), (3, 5, 33), (2, 64, 40)]))
def test_a_batch_is_its_instructions(name: str, spread: str, seed: int, shape: tuple[int, int, int]) -> None:
    """Catches either memory layout of a batch (batch last for short N) mixing up its instructions."""
    row, (batch, m, n) = MODELS[name], shape
    cases = [Operands(row, (m, n, row.group), spread, seed + i) for i in range(batch)]
    for case in cases:
        case.formats = cases[0].formats
        if case.a.dtype == torch.uint8:
            masks = [OPERANDS[fmt].n_codes - 1 for fmt in case.formats]
            case.a, case.b = case.a & masks[0], case.b & masks[1]
    together = Operands(row, (0, 0, 0), "near", 0)
    together.formats = cases[0].formats
    together.a, together.b, together.c = (
        torch.stack([getattr(case, part) for case in cases]).unsqueeze(0) for part in ("a", "b", "c")
    )
    if row.scale_format:
        together.scales = [torch.stack([case.scales[i] for case in cases]).unsqueeze(0) for i in (0, 1)]
    got = together.accumulate()
    for i, case in enumerate(cases):
        assert same_bits(got[0, i], case.accumulate())


@given(names, spreads, seeds)
def test_matmul_is_accumulate_with_b_transposed(name: str, spread: str, seed: int) -> None:
    """Catches a swapped operand, format or scale; codes and values give the same."""
    row = MODELS[name]
    case = Operands(row, (4, 7, 2 * row.group), spread, seed)
    want = case.accumulate()
    arguments = case.arguments(case.c)
    assert same_bits(want, matmul(**arguments))
    for which, fmt in zip("ab", case.formats, strict=True):
        if arguments[which].dtype == torch.uint8:
            arguments[which] = OPERANDS[fmt].decode(arguments[which])
    assert same_bits(want, matmul(**arguments))


@given(st.sampled_from([row.name for row in MODELS.values() if row.rounding != "rne_f16"]), seeds)
def test_restart_adds_chains_in_float32(name: str, seed: int) -> None:
    """Catches a restart at the wrong K, or a sum of chains that is not rounded to nearest."""
    row = MODELS[name]
    every = 2 * row.group
    case = Operands(row, (6, 5, 5 * row.group), "near", seed)
    arguments = case.arguments(case.c)
    want = case.c
    for k in range(0, 5 * row.group, every):
        part = {**arguments, "c": None, "a": case.a[:, k : k + every], "b": case.b[:, k : k + every].t()}
        if row.scale_format:
            blocks = slice(k // row.scale_block, (k + every) // row.scale_block)
            part["scales_a"] = case.scales[0][:, blocks]
            part["scales_b"] = case.scales[1][:, blocks].t()
        want = want + matmul(**part)
    assert same_bits(want, matmul(**arguments, restart=every))


@given(names, st.sampled_from(("near", "tiny", "sparse")), seeds, st.booleans(), st.booleans())
def test_the_bound_holds_and_is_not_loose(name: str, spread: str, seed: int, with_c: bool, promoted: bool) -> None:
    """Catches a bound that a real chain exceeds, and one that is an order above what a chain can lose."""
    row = MODELS[name]
    k = 4 * row.group
    case = Operands(row, (4, 5, k), spread, seed)
    arguments = case.arguments(case.c if with_c else None)
    restart = {"restart": 2 * row.group} if promoted and row.rounding != "rne_f16" else {}
    left, right = exact_values(case, 0), exact_values(case, 1)
    bound = accumulation_bound(**arguments, **restart)
    got = matmul(**arguments, **restart)
    for i in range(4):
        for j in range(5):
            if math.isinf(float(bound[i, j])):
                continue
            exact = sum((x * y for x, y in zip(left[i], right[j], strict=True)), start=Fraction(0))
            exact += Fraction(float(case.c[i, j])) if with_c else 0
            error = abs(Fraction(float(got[i, j])) - exact)
            assert error <= Fraction(float(bound[i, j])), f"[{i}, {j}]: error {float(error)}"
    size = accumulation_bound_scale(case, with_c)
    finite = torch.isfinite(bound)
    precision = {"rz_f32": 23, "rz_e8m13": 13, "rne_f16": 11}[row.rounding]
    loosest = size * (4 * (row.group + 2) * 4 * 2.0**-row.fraction_bits + 9 * 2.0**-precision) + 2.0**-18
    assert bool((bound[finite] <= loosest[finite]).all())


def exact_values(case: Operands, side: int) -> list[list[Fraction]]:
    values = values_of(case.formats[side], (case.a, case.b)[side])
    scales = case.scales[side]
    factors = decode_scales(case.row, scales)
    block = case.row.scale_block
    return [
        [Fraction(x) * (Fraction(factors[i][k // block]) if block else 1) for k, x in enumerate(line)]
        for i, line in enumerate(values)
    ]


def accumulation_bound_scale(case: Operands, with_c: bool) -> torch.Tensor:
    """Sum of |a b| and |c|, in float64."""
    sides = [[[float(abs(x)) for x in line] for line in exact_values(case, side)] for side in (0, 1)]
    left, right = (torch.tensor(side, dtype=torch.float64) for side in sides)
    return left @ right.t() + (case.c.double().abs() if with_c else 0.0)


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("a", "b", "c", "want"),
    [
        ([0.0], [1.0], -0.0, 0x00000000),
        ([-0.0], [1.0], -0.0, 0x00000000),
        ([1.0, -1.0], [1.0, 1.0], -0.0, 0x00000000),
        ([NAN], [1.0], 1.0, 0x7FFFFFFF),
        ([1.0], [NAN], 1.0, 0x7FFFFFFF),
        ([1.0], [1.0], NAN, 0x7FFFFFFF),
        ([INF], [0.0], 1.0, 0x7FFFFFFF),
        ([INF, -INF], [1.0, 1.0], 1.0, 0x7FFFFFFF),
        ([INF], [1.0], -INF, 0x7FFFFFFF),
        ([INF], [-2.0], 1.0, 0xFF800000),
        ([1.0], [1.0], INF, 0x7F800000),
        # An overflow stays an Inf in the groups that follow, unless they hold the other one.
        ([2.0**127] * 32, [2.0] * 32, 0.0, 0x7F800000),
        ([2.0**127] * 16 + [-1.0] * 16, [2.0] * 32, 0.0, 0x7F800000),
        ([2.0**127] * 16 + [-INF] * 16, [2.0] * 32, 0.0, 0x7FFFFFFF),
        # Zero counts with exponent -133: 16 terms of 2^-152 are kept. A subnormal counts with -126: they are not.
        ([2.0**-76] * 16, [2.0**-76] * 16, 0.0, 0x00000002),
        ([2.0**-76] * 16, [2.0**-76] * 16, 2.0**-149, 0x00000001),
        # 16899 * 2^-150 is truncated to 8449 * 2^-149; nearest would be 8450.
        ([129 * 2.0**-75], [131 * 2.0**-75], 0.0, 8449),
        # The largest finite float32 plus 2^103, half its step: truncated, not rounded to Inf.
        ([2.0**103], [1.0], (2 - 2.0**-23) * 2.0**127, 0x7F7FFFFF),
        ([2.0**104], [1.0], (2 - 2.0**-23) * 2.0**127, 0x7F800000),
        # A finite sum that would overflow does not meet the Inf of the accumulator.
        ([-(2.0**127), -(2.0**127)], [2.0, 2.0], INF, 0x7F800000),
        # 2^-100 * 2^-49 is the smallest subnormal; half of it is truncated to +0, also from below.
        ([2.0**-100], [2.0**-49], 0.0, 0x00000001),
        ([2.0**-100], [2.0**-50], 0.0, 0x00000000),
        ([-(2.0**-100)], [2.0**-50], 0.0, 0x00000000),
        ([-(2.0**-100)], [1.5 * 2.0**-49], 0.0, 0x80000001),
    ],
)
def test_special_values(a: list[float], b: list[float], c: float, want: int) -> None:
    """Catches the wrong zero, NaN payload, overflow or subnormal of the bf16 rows."""
    for name in ("sm_90.bf16", "sm_100.bf16"):
        got = accumulate(torch.tensor([a]).bfloat16(), torch.tensor([b]).bfloat16(), torch.tensor([[c]]), name)
        assert int(bits(got)) & 0xFFFFFFFF == want


def test_float16_accumulators_round_once() -> None:
    """Catches a detour through float32: 2^11 + 1 + 2^-20 is above the tie, float32 would land on it."""
    a, b = torch.tensor([[2048.0, 1.0, 2.0**-10]]).half(), torch.tensor([[1.0, 1.0, 2.0**-4]]).half()
    assert float(accumulate(a, b, model="sm_90.f16_f16acc")) == 2050.0
    assert float(accumulate(a[:, :2], b[:, :2], model="sm_90.f16_f16acc")) == 2048.0
    big = torch.full((1, 2), 40000.0).half()
    assert float(accumulate(big, torch.ones_like(big), model="sm_90.f16_f16acc")) == math.inf


def test_hopper_fp8_keeps_thirteen_bits() -> None:
    """Catches F = 25 or an unrounded accumulator in the Hopper FP8 rows."""
    one = torch.tensor([[1.0]])
    step = accumulate(one, one * 2.0**-7, one, "sm_90.e4m3")
    assert float(step) == 1 + 2.0**-7
    for power, kept in ((13, 2.0**-13), (14, 0.0)):
        c = torch.tensor([[1 + 2.0**-power]])
        assert float(accumulate(one * 0, one, c, "sm_90.e4m3")) == 1 + kept
        assert float(accumulate(one * 0, one, c, "sm_100.f8f6f4")) == 1 + 2.0**-power


def test_fp8_subnormals_align_by_the_format() -> None:
    """Catches a subnormal aligned by its own leading bit instead of by the smallest exponent of its format."""
    least, c = torch.tensor([[2.0**-9]]), torch.tensor([[2.0**-26]])
    assert float(accumulate(least, least, c, "sm_90.e4m3")) == 2.0**-18
    assert float(accumulate(least, least, c, "sm_90.e5m2")) == 2.0**-18 + 2.0**-26
    assert float(accumulate(least * 0, least, -(2.0**-114) * c, "sm_90.e4m3").view(torch.int32)) == 0


@pytest.mark.parametrize(("a", "b", "kept"), [((2, 0xA), (2, 2), False), ((2, 2), (0, 0), True)])
def test_a_cancelled_fp4_run_keeps_its_exponent(a: tuple[int, int], b: tuple[int, int], kept: bool) -> None:
    """Catches an exponent taken from the sum of a run: 1 - 1 truncates what zero products do not."""
    codes = [torch.tensor([[*pair] + [0] * 14], dtype=torch.uint8) for pair in (a, b)]
    scales = torch.full((1, 1), 0x7E, dtype=torch.uint8)
    c = torch.tensor([[2.0**-20]])
    got = accumulate(*codes, c, "sm_100.mxf4nvf4", scales_a=scales, scales_b=scales)
    assert float(got) == (2.0**-20 if kept else 0.0)


def test_k_zero_gives_c() -> None:
    """Catches a crash, garbage or a lost sign where there is nothing to add; and empty M and N."""
    a, b = torch.zeros(2, 0).bfloat16(), torch.zeros(0, 3).bfloat16()
    assert same_bits(matmul(a, b), torch.zeros(2, 3))
    c = torch.tensor([[-0.0, 1.0, NAN]]).repeat(2, 1)
    assert bits(matmul(a, b, c))[0].tolist() == [-(2**31), 0x3F800000, 0x7FFFFFFF]
    assert matmul(torch.zeros(0, 16).bfloat16(), torch.zeros(16, 3).bfloat16()).shape == (0, 3)
    assert matmul(torch.zeros(2, 16).bfloat16(), torch.zeros(16, 0).bfloat16(), restart=16).shape == (2, 0)
    assert accumulation_bound(a, b).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "sm_91.bf16"}, "unknown tensor-core model 'sm_91.bf16'"),
        ({"b": torch.zeros(8, 4).bfloat16()}, r"a \[2, 16\] and b \[8, 4\]"),
        ({"a": torch.full((2, 16), 1.001)}, r"a\[0, 0\] = 1.00\d+ is no bf16 value"),
        ({"a": torch.full((2, 16), 2.0**-134)}, "is no bf16 value"),
        ({"a_format": "e4m3"}, "sm_90.bf16 takes bf16"),
        ({"a": torch.zeros(2, 16, dtype=torch.uint8)}, "as floating-point values"),
        ({"c": torch.zeros(2, 4).bfloat16()}, r"c is torch.bfloat16 \[2, 4\]"),
        ({"c": torch.zeros(4, 2)}, r"c is torch.float32 \[4, 2\]"),
        ({"restart": 8}, "restart = 8: expected a multiple of 16"),
        ({"scales_a": torch.zeros(2, 1, dtype=torch.uint8)}, "sm_90.bf16 has no scales"),
        ({"model": "sm_100.mxf8f6f4"}, "scales_a is missing"),
        ({"model": "sm_90.e4m3", "a": torch.full((2, 16), INF)}, "is no e4m3 value"),
        ({"model": "sm_90.e4m3", "a": torch.full((2, 16), 480.0)}, "is no e4m3 value"),
    ],
)
def test_bad_input_is_named(change: dict[str, object], message: str) -> None:
    """Catches operands that are silently rounded or misread."""
    arguments = {"a": torch.zeros(2, 16).bfloat16(), "b": torch.zeros(16, 4).bfloat16(), **change}
    with pytest.raises(ValueError, match=message):
        matmul(**arguments)


def test_the_table_is_consistent() -> None:
    """Catches a row that the arithmetic cannot do: its group, runs and sums must fit the integers used."""
    for name, row in MODELS.items():
        assert name == row.name
        assert row.group & (row.group - 1) == 0
        assert row.group % row.exact_run == 0
        assert not row.scale_block or row.scale_block % row.exact_run == 0
        assert row.zero_exponent == -106 - row.fraction_bits - 2 or row.zero_exponent < 0
        assert row.fraction_bits <= 29 or row.exact_run > 1
        assert set(row.operands) <= set(OPERANDS)
    compared = silicon.silicon_instructions("sm_90a")
    shapes = {
        "sm_90.bf16": "m64n32k16.f32.bf16.bf16",
        "sm_90.f16": "m64n32k16.f32.f16.f16",
        "sm_90.tf32": "m64n32k8.f32.tf32.tf32",
        "sm_90.e4m3": "m64n32k32.f32.e4m3.e4m3",
        "sm_90.e5m2": "m64n32k32.f32.e5m2.e5m2",
        "sm_90.f16_f16acc": "m64n32k16.f16.f16.f16",
        "sm_90.e4m3_f16acc": "m64n32k32.f16.e4m3.e4m3",
    }
    assert set(SILICON) == set(shapes)
    assert all(f"wgmma.mma_async.sync.aligned.{shape}" in compared for shape in shapes.values())


MMASIM = {
    "sm_80.bf16": ("MMA", "Ampere", "m16n8k16.f32.bf16.bf16.f32"),
    "sm_90.bf16": ("WGMMA", "Hopper", "m64n8k16.f32.bf16.bf16"),
    "sm_90.f16": ("WGMMA", "Hopper", "m64n8k16.f32.f16.f16"),
    "sm_90.tf32": ("WGMMA", "Hopper", "m64n8k8.f32.tf32.tf32"),
    "sm_90.f16_f16acc": ("WGMMA", "Hopper", "m64n8k16.f16.f16.f16"),
    "sm_90.e4m3": ("WGMMA", "Hopper", "m64n8k32.f32.{a}.{b}"),
    "sm_100.f16": ("TCGen05MMA", "Blackwell", "m64n8k16.kind::f16.f32.f16.f16"),
    "sm_100.f8f6f4": ("TCGen05MMA", "Blackwell", "m64n8k32.kind::f8f6f4.f32.{a}.{b}"),
    "sm_100.mxf8f6f4": (
        "TCGen05MMABlockScale",
        "Blackwell",
        "m128n8k32.kind::mxf8f6f4.block32.f32.{a}.{b}.ue8m0",
    ),
    "sm_100.mxf4nvf4": (
        "TCGen05MMABlockScale",
        "Blackwell",
        "m128n8k64.kind::mxf4nvf4.block16.f32.e2m1.e2m1.ue4m3",
    ),
}


@pytest.mark.parametrize("name", MMASIM)
@given(spreads, seeds)
def test_equals_mmasim(name: str, spread: str, seed: int) -> None:
    """Catches a constant of the table that differs from the independent model's. Needs the package mmasim."""
    nv_ptx = pytest.importorskip("mmasim.nv_ptx")
    row = MODELS[name]
    case = Operands(row, (16, 8, row.group), spread, seed)
    kind, architecture, shape = MMASIM[name]
    operation = getattr(nv_ptx, kind)(architecture, shape.format(a=case.formats[0], b=case.formats[1]))
    native = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
    sides = []
    for x, fmt in zip((case.a, case.b), case.formats, strict=True):
        if row.exact_run > 1:
            x = x[:, ::2] | x[:, 1::2] << 4
        elif fmt == "e2m1":
            x = x << 2
        sides.append(x.view(native[fmt]) if fmt in native else x)
    scales = []
    if row.scale_format:
        scale_type = torch.float8_e8m0fnu if row.scale_format == "e8m0" else torch.float8_e4m3fn
        scales = [case.scales[0].view(scale_type), case.scales[1].view(scale_type).t()]
    assert same_bits(case.accumulate(), operation(sides[0], sides[1].t(), case.c, *scales))
