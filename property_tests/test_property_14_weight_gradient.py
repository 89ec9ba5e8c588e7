"""Property 14: rotating both operands of the weight gradient cancels: (HX)'(HdY) = X'dY for each expert.

Of small integers, so that the rotation is exact in the float32 arithmetic that kernels use, every product and sum is
exact in float64, and the two sides must be equal and not merely near. Gaussian values are in test_hadamard.py.

Faults this catches: different signs or orders in the two operands, a tail that is dropped or filled with anything but
zeros, a block over the border of two experts.
"""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_numerics.reference import hadamard
from moe_numerics.reference.ragged import Experts

COUNTS = st.lists(st.sampled_from([0, 1, 5, 15, 16, 17, 31, 33, 48]), min_size=1, max_size=5)


@given(counts=COUNTS, gap=st.integers(0, 20), seed=st.integers(0, 2**32 - 1))
def test_rotations_of_both_operands_cancel_exactly(counts: list[int], gap: int, seed: int) -> None:
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count + gap)
    experts = Experts.from_offsets(offsets, counts, offsets[-1] + 3)
    generator = torch.Generator().manual_seed(seed)
    x, grad = (torch.randint(-8, 9, (experts.capacity, n), generator=generator).float() for n in (6, 5))
    padding = ~experts.valid_rows()
    x[padding] = float("nan")
    grad[padding] = float("nan")

    turned, turned_grad = (hadamard.rotate(t, -2, experts=experts).double() for t in (x, grad))
    blocks = experts.blocks(16)
    for start, count, first, rows in zip(experts.starts, counts, blocks.starts, blocks.counts, strict=True):
        plain = x[start : start + count].double().t() @ grad[start : start + count].double()
        rotated = turned[first : first + rows].t() @ turned_grad[first : first + rows]
        assert torch.equal(rotated, plain)
