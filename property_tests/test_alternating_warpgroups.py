"""Warpgroups that take turns read the stages of their own tiles, whichever of them the machine runs first.

Fault these tests catch: a warpgroup that is done with its epilogue early and waits for a stage of its next tile while
the ring is still phases behind: as a phase has one bit, the wait may succeed at once, on another tile's data.
"""

from __future__ import annotations

import pytest
import torch
from gemm_problems import DEVICE, bits
from kernel_runs import active_device, thorough
from moe_numerics.fused import grouped_gemm
from moe_numerics.fused.gemm_problem import Tiling

SCHEDULES: tuple[str | int, ...] = ("fast", *range(1, 9)) if thorough() else (1,)


@pytest.mark.parametrize("schedule", SCHEDULES if DEVICE == "cpu" else ("fast",))
def test_turns_are_kept_under_every_schedule(schedule: str | int) -> None:
    """Three tiles a thread block, of more stages than the ring has; equal to one warpgroup beside the other."""
    generator = torch.Generator().manual_seed(3)
    x, weights = (
        torch.randn(shape, generator=generator).to(DEVICE, torch.bfloat16) for shape in ((576, 320), (1, 320, 32))
    )
    offsets = torch.tensor([0, 576], dtype=torch.int32, device=DEVICE)
    with active_device("cuda" if DEVICE == "cuda" else "virtual:sm_90a", schedule):
        beside, alternating = (
            grouped_gemm.grouped_dgrad(x, weights, offsets, tiling=tiling)
            for tiling in (
                Tiling(columns=128, stages=3, cluster=1),
                Tiling(columns=128, stages=3, cluster=1, alternating=True),
            )
        )
    assert torch.equal(bits(beside), bits(alternating))


def test_weight_gradients_have_no_turns() -> None:
    tokens = torch.zeros((8, 32), dtype=torch.bfloat16, device=DEVICE)
    offsets = torch.tensor([0, 8], dtype=torch.int32, device=DEVICE)
    with (
        active_device("cuda" if DEVICE == "cuda" else "virtual:sm_90a"),
        pytest.raises(ValueError, match="tiling is alternating"),
    ):
        grouped_gemm.grouped_wgrad(tokens, tokens, offsets, tiling=Tiling(alternating=True))
