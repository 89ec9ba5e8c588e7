"""The 16x16 randomised Hadamard transform keeps energy, inverts, pins its order of additions and its block
borders.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_numerics.reference import amax, hadamard
from moe_numerics.reference.contract import DEFAULT_SIGNS, Contract
from moe_numerics.reference.ragged import Experts

PLAIN = Contract()
SIGNS = st.lists(st.sampled_from([1, -1]), min_size=16, max_size=16).map(tuple)


def sylvester() -> torch.Tensor:
    places = range(16)
    return torch.tensor([[(-1.0) ** (i & j).bit_count() for j in places] for i in places], dtype=torch.float64)


@st.composite
def ragged(draw: st.DrawFn) -> Experts:
    """Experts whose rows end at any place within a block of 16, with gaps and a tail."""
    sizes = draw(st.lists(st.sampled_from([0, 1, 12, 15, 16, 17, 20, 33]), min_size=1, max_size=4))
    alignment = draw(st.sampled_from([1, 16]))
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // alignment) * alignment)
    return Experts.from_offsets(offsets, sizes, offsets[-1] + draw(st.integers(0, 5)), alignment)


def values(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@given(st.integers(0, 1000), SIGNS | st.none(), st.booleans())
def test_rotation_is_the_matrix_product(seed: int, signs: tuple[int, ...] | None, orthonormal: bool) -> None:
    """(x * signs) @ H / 4 in float64 within the rounding of 4 additions; finds a wrong order of places or
    signs.
    """
    x = values(3, 32, seed)
    contract = Contract(rht_normalise="orthonormal" if orthonormal else "none")
    got = hadamard.rotate(x, -1, signs, contract)
    flipped = x.to(torch.float64) * torch.tensor((signs or (1,) * 16) * 2, dtype=torch.float64)
    exact = (flipped.reshape(3, 2, 16) @ sylvester()).reshape(3, 32) * (0.25 if orthonormal else 1.0)
    size = x.abs().reshape(3, 2, 16).sum(2).repeat_interleave(16, 1)
    assert bool(((got - exact).abs() <= 4 * 2.0**-24 * size).all())


@given(st.integers(0, 1000))
def test_order_of_additions_is_pinned(seed: int) -> None:
    """Bit for bit the butterflies of strides 1, 2, 4 and 8 in NumPy float32; finds another tree of
    additions.
    """
    x = values(5, 16, seed) * torch.exp2(torch.randint(-20, 20, (5, 16)))
    work = (x.numpy() * np.array(DEFAULT_SIGNS, dtype=np.float32)).astype(np.float32)
    for stride in (1, 2, 4, 8):
        after = work.copy()
        for place in range(16):
            if place & stride:
                after[:, place] = work[:, place - stride] - work[:, place]
            else:
                after[:, place] = work[:, place] + work[:, place + stride]
        work = after
    expected = torch.from_numpy(work * np.float32(0.25))
    assert torch.equal(hadamard.rotate(x, -1).view(torch.int32), expected.view(torch.int32))


@given(ragged(), st.integers(0, 1000), SIGNS | st.none())
def test_rotation_along_tokens_is_the_rotation_of_the_transpose(
    experts: Experts, seed: int, signs: tuple[int, ...] | None
) -> None:
    """Each expert's rows, filled with zeros to blocks of 16, rotated alone; finds blocks across experts
    (B38).
    """
    x = values(experts.capacity, 6, seed)
    got = hadamard.rotate(x, -2, signs, PLAIN, experts)
    slots = experts.blocks(16)
    expected = torch.zeros(slots.capacity, 6)
    for e, (start, count) in enumerate(zip(experts.starts, experts.counts, strict=True)):
        if count:
            filled = torch.zeros(slots.counts[e], 6)
            filled[:count] = x[start : start + count]
            first = slots.starts[e]
            turned = hadamard.rotate(filled.t().contiguous(), -1, signs).t()
            expected[first : first + slots.counts[e]] = turned
    assert torch.equal(got.view(torch.int32), expected.view(torch.int32))


@given(ragged(), st.integers(0, 1000), st.sampled_from([-1, -2]), SIGNS | st.none(), st.booleans())
def test_rotation_keeps_energy_and_inverts(
    experts: Experts, seed: int, axis: int, signs: tuple[int, ...] | None, orthonormal: bool
) -> None:
    """Rotating back gives x, and the sum of squares is kept (times 16 without the factor 1/4)."""
    x = values(experts.capacity, 16, seed)
    x = torch.where(experts.valid_rows().unsqueeze(1), x, 0.0)
    contract = Contract(rht_normalise="orthonormal" if orthonormal else "none")
    turned = hadamard.rotate(x, axis, signs, contract, experts)
    back = hadamard.rotate_back(turned, axis, signs, contract, experts)
    torch.testing.assert_close(back, x, rtol=0, atol=8 * 2.0**-24 * 16 * float(x.abs().max() if len(x) else 0))
    energy = turned.to(torch.float64).square().sum() / (1 if orthonormal else 16)
    assert math.isclose(energy, x.to(torch.float64).square().sum(), rel_tol=1e-5, abs_tol=1e-12)


@given(ragged(), st.integers(0, 1000))
def test_rotations_of_both_operands_cancel(experts: Experts, seed: int) -> None:
    """(HX)'(HdY) = X'dY for each expert in float64, ragged tails included; what the weight gradient relies
    on.
    """
    x, grad = values(experts.capacity, 4, seed).double(), values(experts.capacity, 3, seed + 1).double()
    turned, turned_grad = (hadamard.rotate(t, -2, experts=experts) for t in (x, grad))
    slots = experts.blocks(16)
    for e, (start, count) in enumerate(zip(experts.starts, experts.counts, strict=True)):
        own, first = slice(start, start + count), slots.starts[e]
        there = slice(first, first + slots.counts[e])
        torch.testing.assert_close(turned[there].t() @ turned_grad[there], x[own].t() @ grad[own], atol=1e-10, rtol=0)


@given(ragged(), st.integers(0, 1000), st.sampled_from([-1, -2]))
def test_padding_rows_are_never_read(experts: Experts, seed: int, axis: int) -> None:
    """NaN in padding reaches no result, and rows or slots without an owner are 0."""
    x = values(experts.capacity, 16, seed)
    poisoned = torch.where(experts.valid_rows().unsqueeze(1), x, math.nan)
    a, b = (hadamard.rotate(t, axis, experts=experts) for t in (x, poisoned))
    assert torch.equal(a.view(torch.int32), b.view(torch.int32))
    owners = experts if axis == -1 else experts.blocks(16)
    assert not a[~owners.valid_rows()].any()


def test_rounding_to_bfloat16_is_the_last_step() -> None:
    """The contract's bfloat16 rounding acts on the finished float32 value, once."""
    x = values(4, 64, 5)
    plain = hadamard.rotate(x, -1)
    rounded = hadamard.rotate(x, -1, contract=Contract(rht_rounding="bfloat16"))
    assert torch.equal(rounded, plain.to(torch.bfloat16).to(torch.float32))
    assert not torch.equal(rounded, plain)


def test_amax_after_rotation_is_that_of_what_is_quantised() -> None:
    """A block equal to the sign vector has amax 1 before and 4 after (B37), by the rotated tensor's own
    amax.
    """
    x = torch.tensor(DEFAULT_SIGNS, dtype=torch.float32).reshape(16, 1)
    assert amax.per_tensor(x) == 1.0
    assert amax.per_tensor(hadamard.rotate(x, -2)) == 4.0


def test_specials_spread_over_their_block() -> None:
    """Inf makes its block Inf, NaN and two Infs make NaN, other blocks stay finite; -0 keeps its sign bit
    rule.
    """
    x = torch.ones(1, 48)
    x[0, 3], x[0, 20] = math.inf, math.nan
    got = hadamard.rotate(x, -1)
    assert bool(torch.isinf(got[0, :16]).all())
    assert bool(got[0, 16:32].isnan().all())
    assert bool(torch.isfinite(got[0, 32:]).all())


def test_bad_arguments_name_the_value_and_the_rule() -> None:
    """A sign vector of the wrong length or content, and columns that are not a multiple of 16, are
    refused.
    """
    x = torch.zeros(4, 16)
    for call, message in (
        (lambda: hadamard.rotate(x, -1, (1,) * 15), "the sign vector has 15 entries"),
        (lambda: hadamard.rotate(x, -1, ()), "the sign vector has 0 entries"),
        (lambda: hadamard.rotate_back(x, -1, [1] * 17), "the sign vector has 17 entries"),
        (lambda: hadamard.rotate(x, -1, (1,) * 15 + (0,)), r"signs\[15\] = 0: expected 1 or -1"),
        (lambda: hadamard.rotate(x[:, :12], -1), "hidden is 12"),
        (lambda: hadamard.rotate(x, 1), "axis is 1"),
        (lambda: hadamard.rotate(x[0], -1), "expected two dimensions"),
        (lambda: hadamard.rotate(x, -1, experts=Experts.single(5)), "x has 4 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
