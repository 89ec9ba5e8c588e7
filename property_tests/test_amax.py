"""Amax is exact, the same in any order, kept apart by expert, and follows the declared NaN policy."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_numerics.reference import amax
from moe_numerics.reference.contract import Contract
from moe_numerics.reference.ragged import Experts

FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)
EXPERTS = Experts.from_offsets([0, 5, 5, 12], counts=[3, 0, 7], capacity=15)
IGNORE = Contract(nan_policy="ignore")


def matrix(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).reshape(15, 4)


@given(st.lists(FLOATS, min_size=60, max_size=60))
def test_amax_of_each_expert_is_that_of_its_valid_rows(values: list[float]) -> None:
    """max of |x| over valid rows, NaN winning, 0 for an empty expert; finds signed maxima and leaks (B24,
    B25).
    """
    x = matrix(values)
    got = amax.per_expert(x, EXPERTS).tolist()
    for e, (start, count) in enumerate(zip(EXPERTS.starts, EXPERTS.counts, strict=True)):
        block = [abs(value) for value in x[start : start + count].flatten().tolist()]
        expected = math.nan if any(map(math.isnan, block)) else max(block, default=0.0)
        assert got[e] == expected or (math.isnan(got[e]) and math.isnan(expected))
    clean = x.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)
    assert torch.equal(amax.per_expert(x, EXPERTS, IGNORE), amax.per_expert(clean, EXPERTS))


@given(st.lists(FLOATS, min_size=60, max_size=60), st.randoms(use_true_random=False))
def test_amax_does_not_depend_on_order_or_padding(values: list[float], random: object) -> None:
    """Shuffled rows of an expert and anything in padding rows leave every bit as it was (B47)."""
    x = matrix(values)
    y = x.clone()
    y[[3, 4, 12, 13, 14]] = math.nan
    order = list(range(5, 12))
    random.shuffle(order)  # type: ignore[attr-defined]
    y[5:12] = x[order]
    for contract in (Contract(), IGNORE):
        before, after = amax.per_expert(x, EXPERTS, contract), amax.per_expert(y, EXPERTS, contract)
        assert torch.equal(before.view(torch.int32), after.view(torch.int32))


@given(st.lists(FLOATS, min_size=60, max_size=60))
def test_amax_of_the_tensor_is_the_largest_of_its_experts(values: list[float]) -> None:
    """One tensor's amax is the maximum over experts, NaN winning; finds a reduction that drops NaN (B26)."""
    x = matrix(values)
    each = amax.per_expert(x, EXPERTS)
    whole = amax.per_tensor(x, EXPERTS)
    assert whole.dim() == 0
    assert torch.equal(whole.isnan(), each.isnan().any())
    if not whole.isnan():
        assert whole == each.max()


def test_empty_shapes_have_amax_zero() -> None:
    """No rows, no columns, no experts: 0, where torch.amax raises (B64)."""
    assert amax.per_expert(torch.empty(0, 4)).tolist() == [0.0]
    assert amax.per_expert(torch.empty(5, 0)).tolist() == [0.0]
    none = Experts.from_offsets([0], capacity=3)
    assert amax.per_expert(torch.full((3, 4), math.nan), none).tolist() == []
    assert amax.per_tensor(torch.full((3, 4), math.nan), none).item() == 0.0


def test_amax_keeps_every_bit_of_float32() -> None:
    """The result is the float32 value itself, not one rounded through bfloat16 or flushed."""
    for value in (1.0000001, 1e-45, 3.4028235e38, 511.5):
        x = torch.tensor([[0.0, -value]], dtype=torch.float32)
        assert amax.per_tensor(x).item() == x[0, 1].abs().item()


def test_bad_arguments_name_the_value_and_the_rule() -> None:
    """A wrong shape, dtype or policy is refused."""
    with pytest.raises(ValueError, match="x has 3 rows but the experts describe a buffer of 15"):
        amax.per_expert(torch.zeros(3, 4), EXPERTS)
    with pytest.raises(ValueError, match="expected two dimensions"):
        amax.per_expert(torch.zeros(3))
    with pytest.raises(ValueError, match=r"x has dtype torch\.float64"):
        amax.per_tensor(torch.zeros(3, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="nan_policy 'drop' is unknown"):
        amax.magnitude_bits(torch.zeros(3), "drop")
