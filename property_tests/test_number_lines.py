"""Number lines: a ULP distance counts the codes between two values, for every format."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_numerics.reference import formats

from moe_numerics.compare import compare_output
from moe_numerics.number_lines import LINES

NARROW = ("E4M3", "E5M2", "E2M1", "E8M0", "UE4M3", "UE5M3", "E4M3FNUZ", "E5M2FNUZ")


@pytest.mark.parametrize("name", NARROW)
def test_the_ulp_line_of_a_narrow_format_is_the_order_of_its_values(name: str) -> None:
    """All pairs of codes. Would catch a wrong sign bit, NaN code, or a sign in an unsigned format."""
    element = getattr(formats, name)
    line = LINES[name]
    codes = list(range(1 << line.bits))
    values = element.decode(torch.tensor(codes, dtype=torch.uint8), torch.float64).tolist()
    numbers = [code for code in codes if not math.isnan(values[code])]
    # Of the two zeros the negative one comes first; otherwise values of one format are distinct.
    ordered = sorted(numbers, key=lambda code: (values[code], math.copysign(1, values[code])))
    rank = {code: number for number, code in enumerate(ordered)}
    expected = torch.tensor(numbers, dtype=torch.uint8).repeat_interleave(len(numbers))
    got = torch.tensor(numbers, dtype=torch.uint8).repeat(len(numbers))
    distance = line.distance(expected.numpy().astype(np.uint64), got.numpy().astype(np.uint64))
    ranks = torch.tensor([rank.get(code, -1) for code in codes])
    assert np.array_equal(distance, (ranks[expected.long()] - ranks[got.long()]).abs().numpy())
    nans = [code for code in codes if math.isnan(values[code])]
    assert np.flatnonzero(line.is_nan(np.array(codes, dtype=np.uint64))).tolist() == nans


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_ulp_line_of_a_16_bit_float_is_the_order_of_its_values(dtype: torch.dtype) -> None:
    """All 65,536 codes. Would catch a NaN on the line, or an Inf off it."""
    line = LINES[str(dtype).removeprefix("torch.")]
    codes = np.arange(1 << 16, dtype=np.uint64)
    values = torch.from_numpy(codes.astype(np.uint16).view(np.int16)).view(dtype).double().numpy()
    assert np.array_equal(line.is_nan(codes), np.isnan(values))
    numbers = codes[~np.isnan(values)]
    order = np.lexsort((np.copysign(1, values[numbers]), values[numbers]))
    steps = line.distance(numbers[order][:-1], numbers[order][1:])
    assert (steps == 1).all()
    assert line.distance(numbers[order][:1], numbers[order][-1:])[0] == len(numbers) - 1


@given(
    start=st.floats(width=32, allow_nan=False, allow_infinity=False),
    steps=st.integers(1, 50),
    dtype=st.sampled_from((torch.float32, torch.float64)),
)
def test_ulp_distance_counts_steps_of_nextafter(start: float, steps: int, dtype: torch.dtype) -> None:
    """Would catch a distance taken on raw bits, which jumps where the sign changes."""
    one = torch.tensor([start], dtype=dtype)
    other = one.clone()
    zeros = 0
    for _ in range(steps):
        after = torch.nextafter(other, torch.tensor(math.inf, dtype=dtype))
        # nextafter passes from the negative subnormals to -0 and from there to the positive ones, past +0.
        zeros += int(bool(torch.signbit(other).item()) and not bool(torch.signbit(after).item()))
        other = after
    finding = compare_output("out", one, other)
    assert finding.max_ulp == steps + zeros
    assert compare_output("out", other, one).max_ulp == finding.max_ulp


@pytest.mark.parametrize(("dtype", "low", "high"), [(torch.int32, -(2**31), 2**31 - 1), (torch.float64, -1e308, 1e308)])
def test_distances_wider_than_a_signed_integer_do_not_overflow(dtype: torch.dtype, low: float, high: float) -> None:
    """Would catch a difference taken in a signed type of the same width, which wraps around."""
    finding = compare_output("counts", torch.tensor([low], dtype=dtype), torch.tensor([high], dtype=dtype))
    width = torch.tensor([], dtype=dtype).element_size() * 8
    assert finding.max_ulp is not None
    assert finding.max_ulp > 1 << (width - 1)
    (label,) = finding.ulp_histogram
    low_end, high_end = (int(end) for end in label.split("-"))
    assert low_end <= finding.max_ulp <= high_end == 2 * low_end - 1


@pytest.mark.parametrize(
    ("number_format", "code", "text"),
    [
        ("E4M3", 0x7E, "448"),
        ("E4M3", 0x80, "-0"),
        ("E5M2", 0x7C, "inf"),
        ("E2M1", 0xF, "-6"),
        ("E8M0", 0x7F, "2^0"),
        ("E8M0", 0xFF, "nan"),
        ("uint8", 0xFF, "255"),
        ("bfloat16", 0x3F81, "1.0078125"),
        ("float32", 0x3DCCCCCD, "0.100000001"),
        ("float64", 0x3FB999999999999A, "0.1"),
        ("int32", 0xFFFFFFFE, "-2"),
    ],
)
def test_values_are_shown_as_people_read_them(number_format: str, code: int, text: str) -> None:
    """Would catch a first mismatch whose value is that of other bits."""
    assert LINES[number_format].text(code) == text
