"""Property 8: the rotated copy holds the rotated values, its amax is theirs, and blocks end with their expert.

Energy, inverse and the order of additions are tested on the reference in test_hadamard.py; here kernels are held
against a matrix product in float64, which shares nothing with butterflies.

Faults this catches: signs after the transform, H in another order, an amax taken before the rotation, a block that
takes rows of the next expert or of padding.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_runs import ActiveDevice, assert_same, given_tensors, kernel_examples, reference_and_kernels
from moe_numerics.reference.contract import DEFAULT_SIGNS
from moe_numerics.reference.formats import unpack_e2m1

from moe_numerics.cases import Case
from moe_numerics.paths import find_path

PATH = find_path("quantize.nvfp4.rht")
SYLVESTER = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(16)] for i in range(16)], dtype=torch.float64)
SIGNED = SYLVESTER * torch.tensor(DEFAULT_SIGNS, dtype=torch.float64)
"""Row i is what the transform takes to 4 at place i and 0 elsewhere."""


@pytest.mark.parametrize("device", reference_and_kernels(), indirect=True)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_signed_hadamard_row_becomes_one_element(device: ActiveDevice, sign: float) -> None:
    """Column j of x is row j of the signed matrix, so its rotation is 4 at place j: code 6, and its amax 4."""
    x = given_tensors(Case(PATH.id, (16,), 16), {"x": (sign * SIGNED.t()).to(torch.bfloat16).contiguous()})
    outputs = device.run(PATH, x, PATH.contract("suite")).outputs
    codes = unpack_e2m1(outputs["codes_colwise"])[:, :16]
    assert torch.equal(codes & 7, 7 * torch.eye(16, dtype=torch.uint8))
    assert set((codes.diagonal() >> 3).tolist()) == {0 if sign > 0 else 1}
    assert outputs["amax_colwise"].tolist() == [4.0]
    assert outputs["amax_rowwise"].tolist() == [1.0]


@pytest.mark.parametrize("device", reference_and_kernels(), indirect=True)
@kernel_examples()
@given(
    counts=st.lists(st.sampled_from([0, 1, 12, 15, 16, 17, 33]), min_size=1, max_size=4),
    room=st.sampled_from([0, 3, 20]),
    seed=st.integers(0, 2**32 - 1),
)
def test_amax_is_that_of_the_rotated_blocks(device: ActiveDevice, counts: list[int], room: int, seed: int) -> None:
    """Of small integers, whose rotation is exact in float32; a last block is filled with zeros."""
    case = Case(PATH.id, tuple(counts), 32, profile="cudnn@1.28", padded=True, room=room, tail=5)
    x = torch.randint(-8, 9, (case.capacity, 32), generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    contract = PATH.contract("cudnn@1.28").replace(rht_signs=DEFAULT_SIGNS)
    amax = device.run(PATH, given_tensors(case, {"x": x}), contract).outputs["amax_colwise"]
    for expert, (start, count) in enumerate(zip(case.offsets, counts, strict=False)):
        blocks = torch.zeros(-(-count // 16) * 16, 32, dtype=torch.float64)
        blocks[:count] = x[start : start + count].double()
        rotated = SIGNED @ blocks.unflatten(0, (-1, 16)) / 4
        expected = rotated.abs().max() if count else torch.zeros((), dtype=torch.float64)
        assert_same(PATH.output("amax_colwise"), expected.float().reshape(1), amax[expert : expert + 1], f"{expert}")
