"""Findings: those of many cases add up, and a map finds every column."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_numerics.compare import CompareError, Finding, compare_output, merge, unchecked_output


@given(
    rows=st.integers(1, 12),
    cut=st.integers(0, 12),
    columns=st.sampled_from((1, 3, 32, 64)),
    seed=st.integers(0, 2**16),
)
def test_findings_of_parts_add_up_to_the_finding_of_the_whole(rows: int, cut: int, columns: int, seed: int) -> None:
    """Would catch a count, histogram, map or maximum that is lost or doubled when cases are merged."""
    cut = min(cut, rows)
    generator = torch.Generator().manual_seed(seed)
    expected = torch.randn(rows, columns, generator=generator)
    got = torch.where(torch.rand(rows, columns, generator=generator) < 0.3, expected * 1.001, expected)
    got[torch.rand(rows, columns, generator=generator) < 0.05] = math.nan
    experts = torch.arange(rows) // 3
    owned = experts != 1
    bound = expected.double().abs() * 0.0005 * torch.rand(rows, columns, generator=generator) * 4

    def part(low: int, high: int) -> Finding:
        return compare_output(
            "out",
            expected[low:high],
            got[low:high],
            owned=owned[low:high],
            row_expert=experts[low:high],
            fill=0,
            oracle=expected[low:high].double(),
            bound=bound[low:high],
        )

    whole, merged = part(0, rows), merge([part(0, cut), part(cut, rows)])
    # Rows are numbered within each case, so positions are those of the part.
    comparable: dict[str, Any] = {"first_mismatch": None, "experts": 0}
    assert replace(merged, **comparable) == replace(whole, **comparable)
    assert merged.experts <= whole.experts
    assert list(merged.ulp_histogram) == list(whole.ulp_histogram)
    assert list(merged.error_histogram) == list(whole.error_histogram)
    assert (merged.first_mismatch is None) == (whole.first_mismatch is None)
    if merged.first_mismatch and whole.first_mismatch:
        assert merged.first_mismatch["explained"] == whole.first_mismatch["explained"]


def test_merging_keeps_the_first_unexplained_mismatch_and_its_command() -> None:
    """Would catch a report that shows an explained mismatch, or the command of another case."""
    expected = torch.tensor([[1.0]])
    oracle, near, far = expected.double(), torch.tensor([[1.25]]), torch.tensor([[4.0]])
    explained, unexplained = (
        replace(
            compare_output("out", expected, got, oracle=oracle, bound=torch.full_like(oracle, 0.5)),
            reproduce=f"run {name}.json",
        )
        for name, got in (("near", near), ("far", far))
    )
    merged = merge([explained, unexplained, replace(unexplained, reproduce="run later.json")])
    assert merged.reproduce == "run far.json"
    assert merged.first_mismatch == unexplained.first_mismatch
    assert merged.sharpness == 6.0


def test_merging_takes_the_weakest_grade_that_checked_anything() -> None:
    """Would catch a bounded output reported as exact, or unchecked elements that vanish in a merge."""
    value = torch.ones(2, 2)
    exact = compare_output("out", value, value)
    bounded = compare_output("out", value, value, oracle=value.double(), bound=value.double())
    unchecked = unchecked_output("out", 4, "rows of another profile")
    merged = merge([exact, bounded, unchecked, unchecked])
    assert (merged.grade, merged.elements, merged.bit_equal, merged.unchecked) == ("bounded", 16, 8, 8)
    assert merged.reason == "rows of another profile"
    assert merge([exact, unchecked]).grade == "exact"
    assert merge([unchecked]) == unchecked
    with pytest.raises(CompareError, match="no findings to merge"):
        merge([])
    with pytest.raises(CompareError, match="different outputs"):
        merge([exact, replace(exact, output="amax")])


@given(columns=st.integers(1, 400))
def test_every_column_has_its_place_in_the_map(columns: int) -> None:
    """Would catch a map that runs out of range, or shows the columns out of order."""
    expected = torch.zeros(1, columns, dtype=torch.int32)
    finding = compare_output("out", expected, expected + 1, row_expert=torch.tensor([5]))
    buckets = [bucket for _, bucket, _ in finding.mismatch_map]
    assert buckets == sorted(set(buckets))
    assert buckets[0] >= 0
    assert buckets[-1] < 32
    assert len(buckets) == min(columns, 32)
    counts = [count for _, _, count in finding.mismatch_map]
    assert sum(counts) == columns
    assert max(counts) - min(counts) <= 1
    assert all(later > earlier for earlier, later in pairwise(buckets))
