"""Property 12: stochastic rounding has the right support, is unbiased, has independent streams, and repeats.

The random bits are keyed by (seed, tensor, expert, row in the expert, column), so that what an element rounds to does
not depend on other experts' tokens, on padding or on the launch. Statistical comparisons share the family-wise error
rate of `significance`.

Faults this catches: a threshold that is off, one stream for both directions or for all calls, bits that are reused by
neighbours, bits counted by the thread, a seed that is dropped, an architecture on which rounding is to nearest.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_runs import ActiveDevice, given_tensors, kernel_examples, reference_and_kernels, space
from moe_numerics.reference import nvfp4
from moe_numerics.reference.formats import E2M1, unpack_e2m1
from significance import assert_mean, assert_share

from moe_numerics.cases import Case, Values
from moe_numerics.paths import find_path
from moe_numerics.strategies import cases

BOTH, ROWS = "quantize.nvfp4.sr", "quantize.nvfp4.rht.sr.per_expert"
DEVICES = pytest.mark.parametrize("device", reference_and_kernels(), indirect=True)
LARGEST = 6.0 * 448.0


def outputs(case: Case, device: ActiveDevice, **choices: object) -> dict[str, torch.Tensor]:
    path = find_path(case.path)
    contract = path.contract("suite").replace(**choices)
    return dict(device.run(path, case, contract).outputs)


def halfway(rows: int, hidden: int, value: float = 2.5) -> torch.Tensor:
    """`value` under a scale of 1, midway between two codes if it is 2.5, with a 6 in every block of both directions."""
    x = torch.full((rows, hidden), value, dtype=torch.bfloat16)
    x[::16], x[:, ::16] = 6.0, 6.0
    x[0, 0] = LARGEST
    return x


def directions(got: dict[str, torch.Tensor], rows: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of both copies as [rows, hidden]."""
    return unpack_e2m1(got["codes_rowwise"]), unpack_e2m1(got["codes_colwise"])[:hidden, :rows].t()


def inner(codes: torch.Tensor) -> torch.Tensor:
    """The codes of what `halfway` sets to `value`, but for the blocks of the largest element."""
    keep = torch.ones_like(codes, dtype=torch.bool)
    keep[::16], keep[:, ::16] = False, False
    # The block of the largest element has another scale in both directions.
    keep[:16], keep[:, :16] = False, False
    return codes[keep]


@DEVICES
@kernel_examples()
@given(data=st.data())
def test_codes_are_neighbours_of_the_value(device: ActiveDevice, data: st.DataObject) -> None:
    """Support: the code at or below x * multiplier, or the one above it; its own code where that is exact."""
    path = find_path(BOTH)
    drawn = space(path, allow_specials=False, max_elements=1500, big_elements=1500, alignments=(1,))
    case = data.draw(cases(drawn))
    got = outputs(case, device)
    x = case.tensors(path.inputs)["x"].float()
    scale = nvfp4.global_scale(got["amax_rowwise"])
    factor = nvfp4.multipliers(got["scales_rowwise"], scale).repeat_interleave(16, dim=1)
    product = (x * factor).clamp(-6, 6)
    low, high = E2M1.encode(product, "toward_zero"), E2M1.encode(product.abs(), "up")
    codes = unpack_e2m1(got["codes_rowwise"])
    above = ((codes & 7) == high) & ((codes & 8) == (low & 8))
    valid = path.experts(case).valid_rows()
    assert ((codes == low) | above)[valid].all()


@DEVICES
@pytest.mark.parametrize("width", [8, 16, 32])
def test_rounding_is_unbiased_where_nothing_saturates(width: int, device: ActiveDevice) -> None:
    """The share that rounds up is the distance from the code below, in steps; with few bits cut to a multiple of 2^-b.

    2.125 and 4.25 lie 1/8 of a step above their code, 3.5 lies 1/2, 2.875 lies 7/8.
    """
    rows = hidden = 160
    for seed, (value, part, above) in enumerate(
        ((2.125, 1 / 8, 5), (4.25, 1 / 8, 7), (3.5, 0.5, 6), (2.875, 7 / 8, 5))
    ):
        case = Case(BOTH, (rows,), hidden, seed=seed)
        got = outputs(given_tensors(case, {"x": halfway(rows, hidden, value)}), device, stochastic_bits=width)
        for codes in directions(got, rows, hidden):
            own = inner(codes)
            assert set(own.unique().tolist()) == {above - 1, above}
            assert_share(int((own == above).sum()), own.numel(), part, f"{value} with {width} bits")


@DEVICES
def test_the_mean_of_many_roundings_is_the_value(device: ActiveDevice) -> None:
    """Unbiased as a sum: Gaussian values without saturation, their roundings' mean error against chance alone."""
    rows, hidden = 256, 128
    generator = torch.Generator().manual_seed(5)
    x = (torch.rand(rows, hidden, generator=generator) * 5 + 0.25).to(torch.bfloat16)
    x[:, ::16], x[0, 0] = 6.0, LARGEST
    got = outputs(given_tensors(Case(BOTH, (rows,), hidden, seed=9), {"x": x}), device)
    codes = unpack_e2m1(got["codes_rowwise"])[1:]
    error = (E2M1.decode(codes).double() - x[1:].double()).flatten()
    assert_mean(error.mean().item(), 0.0, error.std().item() / error.numel() ** 0.5, "mean error")


@DEVICES
def test_streams_are_independent(device: ActiveDevice) -> None:
    """Row-wise and column-wise, two seeds, neighbours in a row and in a column agree in half of the midpoints."""
    rows = hidden = 160
    x = {"x": halfway(rows, hidden)}
    by_seed = []
    for seed in (1, 2, 1 + 2**32):
        got = outputs(given_tensors(Case(BOTH, (rows,), hidden, seed=seed), x), device)
        row, column = directions(got, rows, hidden)
        assert_share(int((inner(row) == inner(column)).sum()), inner(row).numel(), 0.5, "both directions")
        by_seed.append(inner(row))
        grid = torch.stack([row[a + 1 : a + 16] for a in range(16, rows, 16)])[:, :, 17:]
        grid = torch.stack([grid[:, :, a : a + 15] for a in range(0, grid.shape[2], 16)])
        for name, one, other in (
            ("neighbours in a row", grid[..., :-1], grid[..., 1:]),
            ("neighbours in a column", grid[..., :-1, :], grid[..., 1:, :]),
            ("neighbouring blocks", grid[:-1], grid[1:]),
        ):
            # Pairs that share an element are not independent: every other one is.
            same = (one == other).flatten()[::2]
            assert_share(int(same.sum()), same.numel(), 0.5, name)
    for first, second in ((0, 1), (0, 2), (1, 2)):
        same = int((by_seed[first] == by_seed[second]).sum())
        assert_share(same, by_seed[first].numel(), 0.5, f"seeds {first} and {second}")


@DEVICES
@given(seed=st.integers(0, 2**64 - 1))
@kernel_examples()
def test_the_same_seed_gives_the_same_codes(device: ActiveDevice, seed: int) -> None:
    case = given_tensors(Case(BOTH, (32,), 32, seed=seed), {"x": halfway(32, 32)})
    first, second = outputs(case, device), outputs(case, device)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@DEVICES
@pytest.mark.parametrize(("before", "room", "tail"), [(0, 0, 0), (1, 0, 3), (16, 0, 0), (40, 70, 9)])
def test_an_expert_keeps_its_bits_wherever_it_lies(before: int, room: int, tail: int, device: ActiveDevice) -> None:
    """Keyed by the row in the expert: other experts' tokens, padding and the size of the launch change nothing."""
    values = {"x": Values("gaussian", 3)}
    alone = Case(ROWS, (0, 33), 64, padded=True, values=values, seed=4)
    moved = alone.replace(counts=(before, 33), room=room, tail=tail)
    path = find_path(ROWS)
    own = []
    for case in (alone, moved):
        got, experts = outputs(case, device), path.experts(case)
        start, first = experts.starts[1], experts.colwise_row(1, 0, 16)
        own.append((got["codes_rowwise"][start : start + 33], got["codes_colwise"][:, first * 8 : (first + 3) * 8]))
    for expected, got in zip(*own, strict=True):
        assert torch.equal(expected, got)
