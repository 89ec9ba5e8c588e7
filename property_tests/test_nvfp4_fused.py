"""Fused NVFP4 copies with a choice between two block scales, or with an amax for each row.

Faults this catches: the errors of the two scales compared the wrong way round, in another order or of undecoded codes,
the amax of the tensor where that of the row is meant, a row's amax that misses its last columns, choices of a recipe
that exclude each other taken in silence.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_runs import ActiveDevice, failure, kernel_examples, space
from moe_numerics.reference import grouped_nvfp4, nvfp4
from moe_numerics.reference.contract import SUITE
from moe_numerics.reference.formats import E2M1, E4M3, unpack_e2m1
from moe_numerics.reference.grouped_nvfp4 import Recipe

from moe_numerics.cases import Case, Values
from moe_numerics.paths import find_path
from moe_numerics.running import run_case
from moe_numerics.strategies import cases

PATHS = (
    ("quantize.nvfp4.4over6_mae", "suite", "virtual:sm_90a"),
    ("quantize.nvfp4.4over6_mse.448", "cudnn", "virtual:sm_100a"),
    ("quantize.nvfp4.row_scaled", "te", "virtual:sm_90a"),
    ("quantize.nvfp4.row_scaled.4over6_mae", "suite", "virtual:sm_100a"),
)


def matrix(rows: int, columns: int, seed: int = 1) -> torch.Tensor:
    """Gaussian bfloat16."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def one_expert(x: torch.Tensor) -> torch.Tensor:
    """Offsets of one expert that owns every row."""
    return torch.tensor([0, x.shape[0]], dtype=torch.int32)


@pytest.mark.parametrize(("path_id", "profile", "device"), PATHS, indirect=["device"])
@kernel_examples()
@given(data=st.data())
def test_drawn_cases_agree_bit_for_bit(path_id: str, profile: str, device: ActiveDevice, data: st.DataObject) -> None:
    path = find_path(path_id)
    case = data.draw(cases(space(path, profile)))
    result = run_case(path, case, path.contract(profile), device)
    assert result.passed, failure(result)


@pytest.mark.parametrize(("error", "scale_max"), [("mae", 256.0), ("mse", 448.0)])
def test_no_block_is_worse_than_with_its_maximum_on_six(error: str, scale_max: float) -> None:
    """In float64: the chosen scale's error is the smaller one, and it is not always the same scale."""
    x = matrix(64, 256)
    blocks = x.double().view(64, 16, 16)
    contract = SUITE.replace(nvfp4_block_scale="divided_amax_times_scale")
    amax = x.abs().max().float()
    scale = nvfp4.global_scale(amax.reshape(1), contract, scale_max)
    six = nvfp4.block_scale_codes(blocks.float().abs().amax(2), scale, contract)
    codes = E2M1.encode(blocks.float() * nvfp4.multipliers(six, scale, contract).unsqueeze(2))

    recipe = Recipe(colwise=False, four_over_six=error, scale_max=scale_max)
    chosen = grouped_nvfp4.quantize(x, one_expert(x), recipe=recipe)

    def block_error(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        decoded = E2M1.decode(codes, torch.float64).view(64, 16, 16) * E4M3.decode(scales, torch.float64).unsqueeze(2)
        away = decoded * float(amax) / (6 * scale_max) - blocks
        return (away.abs() if error == "mae" else away**2).sum(2)

    best = block_error(unpack_e2m1(chosen["codes_rowwise"]), chosen["scales_rowwise"])
    on_six = block_error(codes, six)
    slack = 1e-5 * on_six
    assert (best <= on_six + slack).all()
    share = (chosen["scales_rowwise"] != six).double().mean()
    assert 0.1 < share < 0.9
    assert best.sum() < on_six.sum()


@pytest.mark.parametrize("device", ["virtual:sm_90a"], indirect=True)
def test_a_row_scaled_row_is_quantised_as_if_it_were_alone(device: ActiveDevice) -> None:
    """Rows of magnitudes 2^40 apart: each has the codes, scales and amax of a tensor of that row only."""
    from moe_numerics.fused import grouped_nvfp4 as fused

    x = matrix(37, 592)
    x[::2, -1], x[1::2, 0] = -8.0, 8.0
    x = x * torch.tensor([2.0**-30, 1.0, 2.0**10]).repeat(13)[:37, None].to(torch.bfloat16)
    recipe = Recipe(colwise=False, row_scaled=True)
    together = fused.quantize(x, one_expert(x), recipe=recipe)
    assert torch.equal(together["amax_rowwise"], x.float().abs().amax(1))
    given_amax = fused.quantize(x, one_expert(x), recipe=recipe, amax={"amax_rowwise": together["amax_rowwise"]})
    for row in range(0, 37, 5):
        alone = grouped_nvfp4.quantize(x[row : row + 1], one_expert(x[:1]), recipe=Recipe(colwise=False))
        for name in ("codes_rowwise", "scales_rowwise"):
            assert torch.equal(together[name][row], alone[name][0])
            assert torch.equal(given_amax[name][row], alone[name][0])


@pytest.mark.parametrize("device", ["virtual:sm_90a"], indirect=True)
@pytest.mark.parametrize("counts", [(0, 0), (3, 0)])
def test_empty_experts_and_buffers(device: ActiveDevice, counts: tuple[int, ...]) -> None:
    path = find_path("quantize.nvfp4.row_scaled.4over6_mae")
    case = Case(path.id, counts, 48, values={"x": Values("zeros", 3)})
    result = run_case(path, case, path.contract("suite"), device)
    assert result.passed, failure(result)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"four_over_six": "max"}, "four_over_six is 'max': expected 'mae', 'mse' or None"),
        ({"scale_max": 256.0}, "scale_max is 256.0: expected 448, or 256 with four_over_six"),
        ({"scale_max": 100.0, "four_over_six": "mae"}, "scale_max is 100.0"),
        ({"four_over_six": "mae", "rotated": True}, "four_over_six with rotated or stochastic"),
        ({"four_over_six": "mae", "stochastic": True}, "four_over_six with rotated or stochastic"),
        ({"row_scaled": True}, "row_scaled with colwise or block2d"),
        ({"row_scaled": True, "colwise": False, "block2d": True}, "row_scaled with colwise or block2d"),
    ],
)
def test_recipes_that_exclude_each_other_are_refused(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe(**choices)


@pytest.mark.parametrize(
    ("recipe", "columns", "more", "message"),
    [
        (Recipe(colwise=False, row_scaled=True), 40, {}, "x has 40 columns: expected a positive multiple of 16"),
        (Recipe(colwise=False, row_scaled=True), 32, {"amax": {}}, "amax lacks 'amax_rowwise'"),
        (
            Recipe(colwise=False, row_scaled=True),
            32,
            {"amax": {"amax_rowwise": torch.zeros(1)}},
            r"amax_rowwise has shape \[1\]: expected \[4\]",
        ),
        (Recipe(stochastic=True), 32, {}, "seed is missing"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    recipe: Recipe, columns: int, more: dict[str, Any], message: str
) -> None:
    from moe_numerics.fused import grouped_nvfp4 as fused

    x = matrix(4, columns)
    with pytest.raises(ValueError, match=message):
        fused.quantize(x, one_expert(x), recipe=recipe, **more)
