"""Comparison: every differing bit is counted once, measured on the right line, and located."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_numerics.compare import CompareError, Finding, compare_output

# Bit patterns of bfloat16 at which comparisons go wrong: both zeros, subnormals, ends, Inf and several NaNs.
NASTY = (
    0x0000,
    0x8000,
    0x0001,
    0x8001,
    0x3F80,
    0x3F81,
    0xBF80,
    0x7F7F,
    0x7F80,
    0xFF80,
    0x7FC0,
    0xFFC1,
    0x7FA5,
)


def bfloat16(patterns: list[list[int]]) -> torch.Tensor:
    array = np.array(patterns, dtype=np.uint16)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def value(pattern: int) -> float:
    return float(bfloat16([[pattern]]).double())


@st.composite
def outputs(draw: st.DrawFn) -> dict[str, list[list[int]]]:
    """Two small bfloat16 outputs that agree more often than not, which rows are owned, and experts."""
    rows, columns = draw(st.integers(0, 5)), draw(st.integers(1, 4))
    pattern = st.one_of(st.sampled_from(NASTY), st.integers(0, 0xFFFF))
    grid = st.lists(st.lists(pattern, min_size=columns, max_size=columns), min_size=rows, max_size=rows)
    expected = draw(grid)
    other = draw(grid)
    takes_other = draw(
        st.lists(st.lists(st.booleans(), min_size=columns, max_size=columns), min_size=rows, max_size=rows)
    )
    got = [
        [b if take else a for a, b, take in zip(*row, strict=True)]
        for row in zip(expected, other, takes_other, strict=True)
    ]
    owned = draw(st.lists(st.integers(0, 1), min_size=rows, max_size=rows))
    experts = sorted(draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows)))
    return {"expected": expected, "got": got, "owned": [owned], "experts": [experts]}


def position(pattern: int) -> int:
    """Where a bfloat16 stands: +0 at 0, -0 at -1, the smallest subnormals at 1 and -2."""
    return pattern if pattern < 0x8000 else -1 - (pattern - 0x8000)


@given(
    drawn=outputs(),
    width=st.sampled_from((0.0, 2.0**-8, 0.5, math.inf)),
    fill=st.sampled_from((0x7FA5, 0xFFC1, 0x0000)),
)
def test_counts_agree_with_a_comparison_element_by_element(
    drawn: dict[str, list[list[int]]], width: float, fill: int
) -> None:
    """Would catch a miscounted mismatch, NaN, zero, padding element or bound in the vectorised comparison."""
    (owned,), (experts,) = drawn["owned"], drawn["experts"]
    rows, columns = len(owned), len(drawn["expected"][0]) if drawn["expected"] else 1
    expected, got = bfloat16(drawn["expected"]), bfloat16(drawn["got"])
    if not rows:
        expected, got = expected.reshape(0, 1), got.reshape(0, 1)
    oracle = expected.double()
    bound = torch.full_like(oracle, width)

    counts = {"elements": 0, "bit_equal": 0, "explained": 0, "unexplained": 0, "outside": 0}
    distances: list[int] = []
    nan_mismatches = 0
    places: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for row in range(rows):
        for column in range(columns):
            a, b = drawn["expected"][row][column], drawn["got"][row][column]
            if not owned[row]:
                if b != fill:
                    counts["outside"] += 1
                    counts["unexplained"] += 1
                    places[False].append((row, column))
                continue
            counts["elements"] += 1
            a_value, b_value = value(a), value(b)
            if a == b or (math.isnan(a_value) and math.isnan(b_value)):
                counts["bit_equal"] += 1
                continue
            # Equal values are 0 apart (+0 and -0); else an infinite or NaN error is in no bound.
            error = 0.0 if a_value == b_value else abs(a_value - b_value)
            fits = error <= width and math.isfinite(error)
            counts["explained" if fits else "unexplained"] += 1
            places[fits].append((row, column))
            if math.isnan(a_value) or math.isnan(b_value):
                nan_mismatches += 1
            else:
                distances.append(abs(position(a) - position(b)))

    finding = compare_output(
        "out",
        expected,
        got,
        owned=torch.tensor(owned, dtype=torch.bool),
        row_expert=torch.tensor(experts, dtype=torch.int64),
        fill=fill,
        oracle=oracle,
        bound=bound,
    )
    assert {key: getattr(finding, key) for key in counts} == counts
    assert finding.grade == "bounded"
    histogram = {"0": counts["bit_equal"], "nan": nan_mismatches}
    for distance in distances:
        power = distance.bit_length() - 1
        low, high = 1 << power, (2 << power) - 1
        label = str(low) if low == high else f"{low}-{high}"
        histogram[label] = histogram.get(label, 0) + 1
    assert dict(finding.ulp_histogram) == {label: count for label, count in histogram.items() if count}
    largest = max([*distances, *([0] if counts["bit_equal"] else [])], default=None)
    assert finding.max_ulp == largest

    where = min(places[False] or places[True], default=None)
    first = finding.first_mismatch
    assert (first is None) == (where is None)
    if first is not None and where is not None:
        row, column = where
        assert first["coordinates"] == {
            "row": row,
            "column": column,
            "expert": experts[row],
            "row in expert": row - experts.index(experts[row]),
        }
        assert int(first["got_bits"], 16) == drawn["got"][row][column]
        assert int(first["expected_bits"], 16) == (drawn["expected"][row][column] if owned[row] else fill)
        assert first["explained"] == (where in places[True])
        assert first.get("outside", False) == (not owned[row])
    cells: dict[tuple[int, int], int] = {}
    for row, column in places[True] + places[False]:
        cell = (experts[row], (2 * column + 1) * 32 // (2 * columns))
        cells[cell] = cells.get(cell, 0) + 1
    assert {(expert, bucket): count for expert, bucket, count in finding.mismatch_map} == cells


def test_zeros_of_both_signs_differ_and_nans_are_one_class() -> None:
    """Would catch a comparison with ==, which hides a lost sign and makes every NaN a mismatch."""
    zeros = compare_output("out", torch.tensor([0.0, -0.0]), torch.tensor([-0.0, -0.0]))
    assert (zeros.bit_equal, zeros.unexplained, zeros.max_ulp) == (1, 1, 1)
    assert zeros.first_mismatch is not None
    assert (zeros.first_mismatch["expected"], zeros.first_mismatch["got"]) == ("0", "-0")
    nans = bfloat16([[0x7FC0, 0xFFC0, 0x7F81]])
    canonical = bfloat16([[0x7FC0, 0x7FC0, 0x7FC0]])
    assert compare_output("out", canonical, nans).bit_equal == 3
    assert compare_output("out", canonical, nans, nan="bits").unexplained == 2
    codes = torch.tensor([0x7F, 0xFF, 0x7E], dtype=torch.uint8)
    assert compare_output("codes", codes, codes ^ 0x80, format="E4M3").ulp_histogram == {"0": 2, "128-255": 1}
    assert compare_output("codes", codes, codes ^ 0x80, format="uint8").unexplained == 3


@given(shift=st.integers(-3, 3), seed=st.integers(0, 2**16))
def test_a_scale_that_is_off_by_one_is_found(shift: int, seed: int) -> None:
    """Would catch a tolerance on decoded scales, which passes small ones: 2^-9 for 2^-10."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randint(100, 140, (33, 4), generator=generator, dtype=torch.uint8)
    got = (scales.int() + shift).to(torch.uint8)
    finding = compare_output("scales", scales, got, format="E8M0")
    assert finding.passed == (shift == 0)
    assert finding.max_ulp == abs(shift)
    assert finding.unexplained == (0 if shift == 0 else 132)


@given(
    packed=st.lists(st.integers(0, 255), min_size=6, max_size=6),
    flips=st.lists(st.integers(0, 255), min_size=6, max_size=6),
)
def test_a_packed_output_is_compared_element_by_element(packed: list[int], flips: list[int]) -> None:
    """Would catch bytes counted as elements, or nibbles swapped: the even element is the low nibble."""
    expected = torch.tensor(packed, dtype=torch.uint8).reshape(2, 3)
    got = torch.tensor([a ^ b for a, b in zip(packed, flips, strict=True)], dtype=torch.uint8).reshape(2, 3)
    finding = compare_output("codes", expected, got, format="E2M1x2")
    nibbles = [nibble for flip in flips for nibble in (flip & 15, flip >> 4)]
    assert finding.elements == 12
    assert finding.unexplained == sum(nibble != 0 for nibble in nibbles)
    assert finding.columns == 6
    if finding.unexplained:
        first = next(place for place, nibble in enumerate(nibbles) if nibble)
        assert finding.first_mismatch is not None
        assert finding.first_mismatch["coordinates"] == {"row": first // 6, "column": first % 6}


def test_a_packed_output_owns_both_elements_of_a_byte() -> None:
    """Would catch a mask or fill that is not spread over the two elements of a byte."""
    expected = torch.full((3, 4), 0x21, dtype=torch.uint8)
    got = expected.clone()
    got[2] = 0xA5
    got[2, 1] = 0xA6
    finding = compare_output(
        "codes", expected, got, format="E2M1x2", owned=torch.tensor([True, True, False]), fill=0xA5
    )
    assert (finding.elements, finding.bit_equal, finding.outside) == (16, 16, 1)
    assert finding.first_mismatch is not None
    assert finding.first_mismatch["coordinates"] == {"row": 2, "column": 2}
    assert (finding.first_mismatch["expected_bits"], finding.first_mismatch["got_bits"]) == ("0x5", "0x6")
    # Both nibbles of bytes 0 and 3 differ, and nothing else is the path's.
    got[0] = torch.tensor([0x12, 0xA5, 0xA5, 0x12], dtype=torch.uint8)
    finding = compare_output(
        "codes",
        expected[:1],
        got[:1],
        format="E2M1x2",
        owned=torch.tensor([[True, False, False, True]]),
        fill=0xA5,
    )
    assert (finding.elements, finding.bit_equal, finding.unexplained, finding.outside) == (4, 0, 4, 0)


def test_bits_above_a_narrow_code_are_a_mismatch() -> None:
    """Would catch a kernel that leaves garbage in the upper half of an unpacked E2M1 byte."""
    expected = torch.tensor([0x3, 0x4], dtype=torch.uint8)
    finding = compare_output("codes", expected, expected | 0xF0, format="E2M1")
    assert finding.unexplained == 2
    assert finding.ulp_histogram == {"nan": 2}
    assert finding.first_mismatch is not None
    assert finding.first_mismatch["got"] == "not a code of E2M1"


def test_what_a_path_does_not_own_must_keep_its_fill() -> None:
    """Would catch a padding row written by a kernel, and a mask taken for columns where it names rows."""
    expected = torch.zeros(3, 3)
    before = torch.tensor([[7.0], [8.0], [9.0]]).expand(3, 3)
    got = before.clone()
    got[0] = 0.0
    owned = torch.tensor([True, False, False])
    clean = compare_output("out", expected, got, owned=owned, fill=before)
    assert (clean.elements, clean.bit_equal, clean.outside, clean.passed) == (3, 3, 0, True)
    got[2, 1] = 0.0
    written = compare_output("out", expected, got, owned=owned, fill=before)
    assert (written.elements, written.outside, written.unexplained) == (3, 1, 1)
    assert written.first_mismatch == {
        "coordinates": {"row": 2, "column": 1},
        "expected_bits": "0x41100000",
        "got_bits": "0x00000000",
        "expected": "9",
        "got": "0",
        "explained": False,
        "outside": True,
    }
    assert compare_output("out", expected, got, owned=owned).passed
    by_element = compare_output("out", expected, got, owned=owned[:, None] & torch.ones(3, dtype=torch.bool))
    assert by_element.elements == 3
    columns = compare_output("out", torch.zeros(2, 3), torch.zeros(2, 3), owned=torch.tensor([[True, False, True]]))
    assert columns.elements == 4


def test_a_write_outside_is_never_explained() -> None:
    """Would catch a padding row that passes because its value lies inside the bound."""
    zeros = torch.zeros(2, 2)
    finding = compare_output(
        "out",
        zeros,
        zeros,
        owned=torch.tensor([True, False]),
        fill=0x7FC00000,
        oracle=zeros.double(),
        bound=zeros.double() + 1,
        explains=torch.ones_like,
    )
    assert (finding.outside, finding.unexplained, finding.explained) == (2, 2, 0)


def test_an_explanation_sees_the_mismatches_and_answers_for_them_only() -> None:
    """Would catch an explanation that hides elements it was not asked about, or that is not used."""
    expected = torch.arange(12, dtype=torch.uint8).reshape(3, 4)
    got = expected.clone()
    got[0, 1] += 1
    got[2] += 1
    seen: list[torch.Tensor] = []

    def neighbours_in_row_two(mask: torch.Tensor) -> torch.Tensor:
        seen.append(mask)
        answer = torch.zeros_like(mask)
        answer[2, :3] = True
        answer[1] = True
        return answer

    finding = compare_output("codes", expected, got, format="E4M3", explains=neighbours_in_row_two)
    assert torch.equal(seen[0], expected != got)
    assert (finding.grade, finding.bit_equal, finding.explained, finding.unexplained) == ("bounded", 7, 3, 2)
    packed = compare_output("codes", expected, got, format="E2M1x2", explains=torch.ones_like)
    assert packed.passed
    assert packed.elements == 24


def test_error_over_bound_is_measured_over_all_owned_elements() -> None:
    """Would catch a sharpness taken over mismatches only, or over padding, and a wrongly placed bin."""
    oracle = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]], dtype=torch.float64)
    got = torch.tensor([[0.0, 1.0625, 2.5, 4.0, 4.0, math.nan]])
    got = torch.cat((got, got + 100))
    finding = compare_output(
        "out",
        oracle.float().expand(2, 6),
        got,
        owned=torch.tensor([True, False]),
        oracle=oracle,
        bound=torch.ones(1, dtype=torch.float64),
    )
    assert finding.error_histogram == {"0": 2, "0.01-0.1": 1, "0.4-0.5": 1, "0.9-1": 1, "nan": 1}
    assert finding.sharpness == 1.0
    assert (finding.explained, finding.unexplained) == (3, 1)


def test_a_missed_bound_of_zero_is_an_infinite_sharpness() -> None:
    """Would catch 0 / 0 or x / 0 taken for inside the bound."""
    oracle = torch.tensor([1.0, 2.0], dtype=torch.float64)
    finding = compare_output(
        "out",
        torch.ones(2),
        torch.tensor([1.0, 2.5]),
        oracle=oracle,
        bound=torch.zeros(2, dtype=torch.float64),
    )
    assert finding.sharpness == math.inf
    assert finding.error_histogram == {"0": 1, ">1": 1}
    assert finding.unexplained == 1


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0), (2, 0, 5)])
def test_an_output_without_elements_passes(shape: tuple[int, ...]) -> None:
    """Would catch a crash on experts that all got no token."""
    empty = torch.zeros(shape)
    finding = compare_output(
        "out",
        empty,
        empty,
        owned=torch.ones(shape[0], dtype=torch.bool),
        row_expert=torch.zeros(shape[0], dtype=torch.int32),
        fill=0,
        oracle=empty.double(),
        bound=empty.double(),
        explains=torch.ones_like,
    )
    assert finding.passed
    assert (finding.elements, finding.max_ulp, finding.sharpness, finding.first_mismatch) == (
        0,
        None,
        None,
        None,
    )


def test_any_rank_and_stride_is_compared_in_logical_order() -> None:
    """Would catch bits read in memory order from a transposed or sliced tensor."""
    base = torch.arange(24, dtype=torch.float32)
    expected = base.reshape(4, 6).t()
    got = expected.clone(memory_format=torch.contiguous_format)
    assert compare_output("out", expected, got).bit_equal == 24
    got[1, 2] = -1
    finding = compare_output("out", expected, got)
    assert finding.first_mismatch is not None
    assert finding.first_mismatch["coordinates"] == {"row": 1, "column": 2}
    cube = compare_output("out", base.reshape(2, 3, 4), base.reshape(2, 3, 4).flip(0).flip(0) + 0)
    assert cube.columns == 12
    assert compare_output("out", torch.tensor(1.0), torch.tensor(1.0)).elements == 1
    vector = compare_output("amax", base, base + 1, row_expert=torch.arange(24))
    assert vector.first_mismatch is not None
    assert vector.first_mismatch["coordinates"] == {"row": 0, "expert": 0, "row in expert": 0}
    halves = compare_output("out", base.repeat(2)[::2].bfloat16(), base.repeat(2)[::2].bfloat16())
    assert halves.passed


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_gives_the_finding_of_the_cpu() -> None:
    """Would catch an index, mask or bound left on the other device, or another rounding of the ratios."""
    generator = torch.Generator().manual_seed(5)
    expected = torch.randn(257, 96, generator=generator)
    got = torch.where(torch.rand(257, 96, generator=generator) < 0.2, expected * 1.001, expected)
    got[3, 4] = math.nan
    settings: dict[str, Any] = {
        "owned": torch.arange(257) % 19 != 0,
        "row_expert": torch.arange(257) // 40,
        "fill": 0x7FC00000,
        "oracle": expected.double(),
        "bound": expected.double().abs() * 2.0**-10,
    }
    on_cpu = compare_output("out", expected, got, explains=torch.zeros_like, **settings)
    moved: dict[str, Any] = {
        key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in settings.items()
    }
    assert compare_output("out", expected, got.cuda(), explains=torch.zeros_like, **settings) == on_cpu
    assert compare_output("out", expected.cuda(), got.cuda(), explains=torch.zeros_like, **moved) == on_cpu
    assert not on_cpu.passed


FLOATS, CODES = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.uint8)


DOUBLES = torch.zeros(2, 3, dtype=torch.float64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: compare_output("out", FLOATS, torch.zeros(3, 2)),
            r"'out' has shape \[3, 2\], expected \[2, 3\]",
        ),
        (lambda: compare_output("out", FLOATS, DOUBLES), "has dtype torch.float64, expected torch.float32"),
        (lambda: compare_output("out", CODES, CODES), "format = None for a tensor of torch.uint8"),
        (lambda: compare_output("out", CODES, CODES, format="E3M4"), "format = 'E3M4'.*expected one of"),
        (lambda: compare_output("out", FLOATS, FLOATS, format="E4M3"), "E4M3 is held in torch.uint8"),
        (lambda: compare_output("out", FLOATS, FLOATS, bound=DOUBLES), "oracle and bound belong together"),
        (
            lambda: compare_output("out", CODES, CODES, format="E4M3", oracle=DOUBLES, bound=DOUBLES),
            "use explains instead",
        ),
        (lambda: compare_output("out", FLOATS, FLOATS, oracle=FLOATS, bound=DOUBLES), "oracle has dtype"),
        (
            lambda: compare_output("out", FLOATS, FLOATS, oracle=DOUBLES.T, bound=DOUBLES),
            r"oracle has shape \[3, 2\], expected one that broadcasts to \[2, 3\]",
        ),
        (lambda: compare_output("out", FLOATS, FLOATS, owned=CODES), "owned has dtype torch.uint8"),
        (
            lambda: compare_output("out", FLOATS, FLOATS, owned=torch.ones(5, dtype=torch.bool)),
            r"owned has shape \[5\]",
        ),
        (
            lambda: compare_output("out", FLOATS, FLOATS, fill=1 << 32),
            "fill = 0x100000000, expected the 32 bits",
        ),
        (lambda: compare_output("out", FLOATS, FLOATS, fill=DOUBLES), "fill has dtype torch.float64"),
        (
            lambda: compare_output("out", FLOATS, FLOATS, row_expert=torch.zeros(3)),
            r"row_expert has shape \[3\]",
        ),
        (lambda: compare_output("out", FLOATS, FLOATS, nan="any"), "nan = 'any'"),  # type: ignore[arg-type]
        (
            lambda: compare_output("out", FLOATS, FLOATS, explains=lambda mask: mask[0]),
            r"explains gave torch.bool of shape \[3\], expected torch.bool of shape \[2, 3\]",
        ),
        (lambda: Finding("out", "certain", 1, bit_equal=1), "grade = 'certain'"),  # type: ignore[arg-type]
        (lambda: Finding("out", "exact", 2, bit_equal=1), "= 1, expected elements \\+ outside = 2"),
        (lambda: Finding("out", "unchecked", 2, unchecked=2), "2 unchecked elements and no reason"),
    ],
)
def test_what_does_not_fit_is_said_plainly(call: Callable[[], Finding], message: str) -> None:
    """Would catch a comparison of tensors that do not belong together, or a finding that does not add up."""
    with pytest.raises(CompareError, match=message):
        call()
