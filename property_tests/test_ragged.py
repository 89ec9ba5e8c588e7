"""Ragged experts: who owns which row, where column-wise scales go, and what bad offsets are told."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_numerics.reference.ragged import Experts

BLOCKS = st.sampled_from([16, 32])


@st.composite
def ragged(draw: st.DrawFn) -> Experts:
    """Experts with gaps, empties, a tail and any alignment."""
    alignment = draw(st.sampled_from([1, 8, 16, 32, 128, 3]))
    units = draw(st.lists(st.integers(0, 3 if alignment > 8 else 40), min_size=0, max_size=6))
    offsets = [0]
    for size in units:
        offsets.append(offsets[-1] + size * alignment)
    counts = [draw(st.integers(0, end - start)) for start, end in itertools.pairwise(offsets)]
    return Experts.from_offsets(offsets, counts, offsets[-1] + draw(st.integers(0, 40)), alignment)


@given(ragged())
def test_owned_rows_are_those_between_start_and_count(experts: Experts) -> None:
    """Ownership by row equals the definition; finds padding counted as valid and rows past the last
    offset.
    """
    owner = [-1] * experts.capacity
    index = [-1] * experts.capacity
    for e, (start, count) in enumerate(zip(experts.starts, experts.counts, strict=True)):
        for row in range(start, start + count):
            owner[row], index[row] = e, row - start
    assert experts.row_expert().tolist() == owner
    assert experts.row_index().tolist() == index
    assert experts.valid_rows().tolist() == [e >= 0 for e in owner]
    assert experts.full == all(e >= 0 for e in owner)


@given(ragged(), BLOCKS)
def test_column_blocks_never_share_a_scale_row(experts: Experts, block: int) -> None:
    """Every block of every expert has a scale row of its own within the declared shape (B38, B53)."""
    taken = [
        experts.colwise_row(e, j, block) for e in range(len(experts)) for j in range(-(-experts.counts[e] // block))
    ]
    assert len(set(taken)) == len(taken)
    assert all(0 <= row < experts.colwise_rows(block) for row in taken)
    owned = experts.owned_colwise_rows(block)
    assert sorted(taken) == torch.nonzero(owned).flatten().tolist()


@given(ragged(), BLOCKS)
def test_layout_follows_the_alignment(experts: Experts, block: int) -> None:
    """Row starts // block + j for aligned experts, one more for each expert before it otherwise."""
    aligned = experts.alignment % block == 0
    rows = -(-experts.capacity // block) if aligned else experts.capacity // block + len(experts)
    assert experts.colwise_rows(block) == rows
    for e, (start, count) in enumerate(zip(experts.starts, experts.counts, strict=True)):
        for j in range(-(-count // block)):
            assert experts.colwise_row(e, j, block) == start // block + j + (0 if aligned else e)


@given(ragged(), BLOCKS)
def test_moving_rows_into_blocks_and_back_changes_nothing(experts: Experts, block: int) -> None:
    """The block-aligned buffer holds every valid row once, in its expert's own blocks, and zeros
    elsewhere.
    """
    x = torch.arange(1, experts.capacity + 1, dtype=torch.float32).unsqueeze(1).repeat(1, 2)
    moved = experts.to_blocks(x, block)
    slots = experts.blocks(block)
    assert moved.shape == (slots.capacity, 2)
    back = experts.from_blocks(moved, block, fill=-1)
    expected = torch.where(experts.valid_rows().unsqueeze(1), x, -1)
    assert torch.equal(back, expected)
    assert int((moved != 0).sum()) == 2 * sum(experts.counts)
    of_slot = slots.row_expert()
    rows = experts.slot_rows(block)
    for slot in torch.nonzero(rows >= 0).flatten().tolist():
        assert of_slot[slot] == experts.row_expert()[rows[slot]]
    for start, count in zip(slots.starts, slots.counts, strict=True):
        assert start % block == 0
        assert count % block == 0


@given(ragged())
def test_tensors_and_sequences_describe_the_same_experts(experts: Experts) -> None:
    """int32 and int64 tensors give what a list gives."""
    ends = [*experts.starts, experts.capacity - experts.capacity % experts.alignment]
    if not experts.starts:
        ends = [0]
    plain = Experts.from_offsets(ends, experts.counts, experts.capacity, experts.alignment)
    assert plain == experts
    for dtype in (torch.int32, torch.int64):
        counts = torch.tensor(experts.counts, dtype=dtype)
        tensors = Experts.from_offsets(torch.tensor(ends, dtype=dtype), counts, experts.capacity, experts.alignment)
        assert tensors == experts


def test_counts_left_out_mean_every_row() -> None:
    """Without counts an expert owns all rows up to the next offset, and the capacity is the last offset."""
    experts = Experts.from_offsets([0, 3, 3, 10])
    assert experts == Experts((0, 3, 3), (3, 0, 7), 10, 1)
    assert Experts.single(7).counts == (7,)
    assert Experts.single(0).full


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0, 128, 96],), r"offsets\[2\] = 96 is less than offsets\[1\] = 128: offsets must not decrease"),
        (([1, 2],), r"offsets\[0\] = 1: offsets must begin with 0"),
        (([],), "offsets are empty"),
        (([0, 64], None, 60), r"offsets\[1\] = 64 is past the buffer, which has 60 rows"),
        (([0, 64], [65]), r"counts\[0\] = 65 does not fit between offsets\[0\] = 0 and offsets\[1\] = 64"),
        (([0, 64], [-1]), r"counts\[0\] = -1 does not fit"),
        (([0, 64], [1, 2]), "counts have 2 entries: expected 1"),
        (([0, 40], None, 64, 32), r"offsets\[1\] = 40 is not a multiple of the alignment 32"),
        (([0, 40], None, 64, 0), "alignment is 0: expected 1 to 256"),
        (([0, 40], None, 64, 512), "alignment is 512"),
        ((torch.tensor([0.0, 1.0]),), "offsets have dtype torch.float32"),
        ((torch.tensor([[0, 1]]),), "one dimension"),
    ],
)
def test_bad_offsets_name_the_value_and_the_rule(arguments: tuple, message: str) -> None:
    """Every malformed distribution is refused with the number and the rule it breaks, never computed on."""
    with pytest.raises(ValueError, match=message):
        Experts.from_offsets(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((0, 4), (4,), 8), "2 starts and 1 counts"),
        (((1,), (1,), 8), r"starts\[0\] = 1"),
        (((0, 4, 2), (0, 0, 0), 8), r"starts\[2\] = 2 is less than starts\[1\] = 4"),
        (((0, 9), (0, 0), 8), "capacity = 8 is less than"),
        (((0, 4), (5, 0), 8), r"counts\[0\] = 5 does not fit"),
        (((0, 4), (0, 0), 8, 8), r"starts\[1\] = 4 is not a multiple of the alignment 8"),
        (((), (), -1), "capacity is -1"),
    ],
)
def test_inconsistent_experts_cannot_be_built(arguments: tuple, message: str) -> None:
    """The value itself keeps its rules, however it is built."""
    with pytest.raises(ValueError, match=message):
        Experts(*arguments)


def test_a_block_that_does_not_exist_is_an_index_error() -> None:
    """Asking for a block past an expert's rows must not hand out the next expert's scale row."""
    experts = Experts.from_offsets([0, 40, 80])
    assert experts.colwise_row(0, 1, 32) == 1
    with pytest.raises(IndexError, match="block 2 of expert 0 does not exist: its 40 rows make 2 blocks of 32"):
        experts.colwise_row(0, 2, 32)
    with pytest.raises(IndexError, match="expert 2 does not exist"):
        experts.colwise_row(2, 0, 32)
    with pytest.raises(ValueError, match="block is 0"):
        experts.colwise_rows(0)
