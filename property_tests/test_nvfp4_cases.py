"""The fixed cases of paths that write NVFP4: amaxes as intended, and ties where the kernels round."""

from __future__ import annotations

import pytest
import torch
from moe_numerics.reference import hadamard, nvfp4
from moe_numerics.reference.amax import per_tensor
from moe_numerics.reference.formats import E4M3

from moe_numerics.campaign import campaign_cases
from moe_numerics.cases import Case, TensorSpec, Values
from moe_numerics.paths import find_path

X = TensorSpec("x")
TIES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
SCALES = E4M3.decode(torch.arange(127, dtype=torch.uint8), torch.float64)


def tensor(kind: str, seed: int) -> torch.Tensor:
    """[256, 256] of one expert."""
    return Case("p", (256,), 256, values={"x": Values(kind, seed)}).tensors([X])["x"].float()


def is_power_of_two(value: float) -> bool:
    return torch.frexp(torch.tensor(value, dtype=torch.float64)).mantissa.item() == 0.5


@pytest.mark.parametrize(("kind", "amax"), [("nvfp4_ties", 2688.0), ("nvfp4_near_ties", 252.0)])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("signs", [None, hadamard.FROM_CONTRACT], ids=["unsigned", "signed"])
def test_the_amax_before_and_after_rotation_is_chosen(
    kind: str, amax: float, seed: int, signs: tuple[int, ...] | None
) -> None:
    """Catches an element above the intended amax, and a rotation whose amax is an accident."""
    x = tensor(kind, seed)
    rotated = hadamard.rotate(x, -2, signs)
    assert is_power_of_two(x.abs().max().item() / amax)
    assert rotated.abs().max().item() == 4 * x.abs().max().item()


@pytest.mark.parametrize("rotated", [False, True], ids=["as they are", "rotated"])
def test_elements_and_scales_are_ties(rotated: bool) -> None:
    """Catches a kind whose values lie beside the ties: in exact arithmetic, with scales from subnormals to 448."""
    x = tensor("nvfp4_ties", 1)
    lines = hadamard.rotate(x, -2).t().contiguous() if rotated else x
    copy = nvfp4.quantize(lines, -1)
    encode = 2688 / lines.abs().max().double().item()
    blocks = lines.double().reshape(256, 16, 16)
    scale = E4M3.decode(copy.scales, torch.float64)
    known = scale > 0
    elements = (blocks * encode).abs()[known] / scale[known].unsqueeze(1)
    assert torch.isin(elements, TIES.double()).float().mean() > 0.15
    # A block scale on a tie lies in the middle between two codes.
    exact = blocks.abs().amax(2) * encode / 6
    above = torch.searchsorted(SCALES, exact).clamp(1, 126)
    middle = (SCALES[above] + SCALES[above - 1]) / 2
    assert (exact == middle).float().mean() > 0.08
    assert set(range(8)) < set(copy.scales.flatten().tolist())
    assert 0x7E in copy.scales


def test_orders_of_arithmetic_differ_where_only_rounding_decides() -> None:
    """Catches near ties that are none: each other order of the scale arithmetic must change a scale."""
    x = tensor("nvfp4_near_ties", 0)
    contract = nvfp4.SUITE
    ours = nvfp4.quantize(x, -1).scales
    for order in ("sixth_times_scale", "divided_amax_times_scale", "divided_amax_over_decode_scale"):
        assert not torch.equal(ours, nvfp4.quantize(x, -1, contract=contract.replace(nvfp4_block_scale=order)).scales)


def test_the_cases_of_a_path_have_every_kind_of_amax() -> None:
    """Catches a fixed case that lost what it stands for: an exact amax, NaN, infinity, a tiny amax, zeros."""
    path = find_path("quantize.nvfp4")
    cases = list(campaign_cases(path, "suite", 2, 0))
    amaxes = [per_tensor(case.tensors(path.inputs)["x"], path.experts(case)).item() for case in cases]
    exact, ordinary, near, mixed, infinite, tiny, zero = amaxes
    assert is_power_of_two(exact / 2688)
    assert 1 < ordinary < 7
    assert is_power_of_two(near / 252)
    assert mixed != mixed
    assert infinite == float("inf")
    assert 0 < tiny < 2688 / nvfp4.FLT_MAX
    assert zero == 0


@pytest.mark.parametrize("name", ["silu", "swiglu"])
def test_what_an_activation_quantises_has_the_amax(name: str) -> None:
    """Catches fixed inputs whose activation or gradient is no tie any more: the amax must stay 2688 times 2**k."""
    for direction in ("fwd", "bwd"):
        path = find_path(f"{name}.{direction}.nvfp4")
        for case, amax in zip(campaign_cases(path, "suite", 2, 0), (2688.0, None, 252.0), strict=False):
            if amax is not None:
                results = path.operation.reference(case, case.tensors(path.inputs), path.contract("suite"))
                assert is_power_of_two(results["amax_rowwise"].item() / amax), (direction, amax)
