"""Ragged problems for the tests of the grouped GEMMs, and the comparison of their results."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from kernel_runs import ActiveDevice, active_device
from moe_numerics.reference.ragged import Experts

from moe_numerics.devices import FILL_BYTE

BF16 = torch.bfloat16
NAN, INF = float("nan"), float("inf")
DEVICE = "cuda" if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9 else "cpu"

Results = dict[str, torch.Tensor]
OUT = frozenset({"out"})


def hopper() -> AbstractContextManager[ActiveDevice]:
    """Launches go to a Hopper GPU where there is one, else to a virtual one."""
    return active_device("cuda" if DEVICE == "cuda" else "virtual:sm_90a")


@dataclass(frozen=True)
class Problem:
    """Ragged tokens with weights of two layers; `counts` are the experts' valid rows."""

    counts: tuple[int, ...]
    room: tuple[int, ...]
    tail: int
    depth: int
    hidden: int
    seed: int
    spread: int
    special: float
    drawn: dict[str, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def capacity(self) -> int:
        return sum(self.counts) + sum(self.room) + self.tail

    @property
    def ragged(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Offsets and counts."""
        bounds = [0]
        for count, room in zip(self.counts, self.room, strict=True):
            bounds.append(bounds[-1] + count + room)
        return (
            torch.tensor(bounds, dtype=torch.int32, device=DEVICE),
            torch.tensor(self.counts, dtype=torch.int32, device=DEVICE),
        )

    @property
    def experts(self) -> Experts:
        return Experts.from_offsets(*self.ragged, capacity=self.capacity)

    def normal(self, name: str, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Normal values, the same whenever they are asked for by one name."""
        generator = torch.Generator().manual_seed(self.seed * 1009 + sum(map(ord, name)))
        return (torch.randn(shape, generator=generator) * scale).to(DEVICE)

    def tokens(self, name: str, columns: int, padding: float = NAN) -> torch.Tensor:
        """bfloat16 tokens with exponents spread over 2 * spread binades, a special value, and padding."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        shifts = torch.randint(-self.spread, self.spread + 1, (self.capacity, columns), generator=generator)
        values = (self.normal(name, self.capacity, columns) * torch.exp2(shifts.float()).to(DEVICE)).to(BF16)
        if self.capacity:
            values[self.seed % self.capacity, self.seed % columns] = self.special
        values[~self.experts.valid_rows(DEVICE)] = padding
        return values

    def weights(self, name: str, rows: int, columns: int) -> torch.Tensor:
        return self.normal(name, len(self.counts), rows, columns, scale=self.depth**-0.5).to(BF16)

    def prob(self) -> torch.Tensor:
        values = self.normal("prob", self.capacity)
        values[~self.experts.valid_rows(DEVICE)] = NAN
        return values


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Few experts, empty ones and counts around the sizes of tiles and blocks among them."""
    edges = st.sampled_from((0, 1, 15, 16, 17, 31, 32, 33, 127, 128, 129))
    counts = draw(st.lists(st.one_of(st.integers(0, 70), edges), min_size=1, max_size=3))
    room = draw(st.lists(st.integers(0, 3), min_size=len(counts), max_size=len(counts)))
    return Problem(
        tuple(counts),
        tuple(room),
        # At least one row: a buffer without any launches nothing.
        draw(st.integers(1, 5)),
        8 * draw(st.integers(1, 18)),
        32 * draw(st.integers(1, 5)),
        draw(st.integers(0, 2**16)),
        draw(st.sampled_from((0, 12))),
        draw(st.sampled_from((1.0, 0.0, NAN, INF, -INF))),
    )


TALL = Problem((130, 0, 257), (0, 2, 0), 3, 40, 64, 6, 2, INF)
"""Experts of more than one tile of rows, the last of them nearly empty."""


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    size = dtype.itemsize
    for length in shape:
        size *= length
    return torch.full((size,), FILL_BYTE, dtype=torch.uint8, device=DEVICE).view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def assert_equal(
    got: Results, want: Results, problem: Problem, token_results: frozenset[str], alignment: int = 1
) -> None:
    """Owned rows have the reference's bits, NaN by class; rows without an owner are as they were."""
    assert set(got) == set(want)
    experts = Experts.from_offsets(*problem.ragged, capacity=problem.capacity, alignment=alignment)
    valid = experts.valid_rows(DEVICE)
    for name, result in got.items():
        owned = torch.ones(result.shape[0], dtype=torch.bool, device=DEVICE)
        if name in token_results:
            owned = valid
        elif name == "scales_colwise":
            owned = experts.owned_colwise_rows(32, DEVICE)
        a, b = result[owned], want[name][owned]
        differ = bits(a) != bits(b)
        if a.is_floating_point():
            differ &= ~(a.isnan() & b.isnan())
        assert not differ.any(), f"{name}: {int(differ.sum())} of {differ.numel()} differ, first {differ.nonzero()[0]}"
        untouched = result[~owned].contiguous().view(torch.uint8) == FILL_BYTE
        assert untouched.all(), f"{name}: {int((~untouched).sum())} bytes written that belong to nobody"


def fresh(want: Results) -> Results:
    """Buffers for results of these shapes, filled with a pattern."""
    return {name: poisoned(tuple(result.shape), result.dtype) for name, result in want.items()}
