"""Property 6: to quantise what was dequantised gives the same values again.

Under "rceil" a scale may then be one lower and its codes doubled, where the largest code of a block is at most half of
the format's largest.

Faults this catches: a scale that is too small, so that codes saturate; a scale or code that decodes as another one;
elements rounded twice.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from kernel_runs import ActiveDevice, given_tensors, kernel_examples, reference_and_kernels, space
from moe_numerics.reference import nvfp4
from moe_numerics.reference.formats import E4M3, E8M0
from moe_numerics.reference.ragged import Experts

from moe_numerics.contract import PROFILES
from moe_numerics.paths import Path, find_path
from moe_numerics.strategies import cases

PATHS = [find_path(name) for name in ("quantize.mxfp8_e4m3", "quantize.mxfp8_e5m2", "quantize.mxfp8_e4m3.32x32")]
AXES = ("rowwise", "colwise")
SMALLEST_NORMAL_SCALE = 1 << E4M3.mantissa_bits
"""Code of the smallest block scale whose steps are relative."""


def _dequantised(path: Path, outputs: dict[str, torch.Tensor], axis: str, experts: Experts) -> torch.Tensor:
    """Values of one copy, float64 [capacity, hidden]; 0 in rows that no expert owns."""
    values = path.operation.element.decode(outputs[f"codes_{axis}"], torch.float64)  # type: ignore[attr-defined]
    scales = E8M0.decode(outputs[f"scales_{axis}"], torch.float64)
    if axis == "rowwise":
        scales = scales.repeat_interleave(32, dim=1)
    else:
        scales = scales[experts.colwise_slots(32).clamp(min=0) // 32]
    return torch.where(experts.valid_rows().unsqueeze(1), values * scales, 0.0)


@pytest.mark.parametrize("device", reference_and_kernels(), indirect=True)
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.id)
@kernel_examples()
@given(data=st.data())
def test_quantising_again_keeps_every_value(path: Path, axis: str, device: ActiveDevice, data: st.DataObject) -> None:
    case = data.draw(cases(space(path)))
    assume(case.tokens)
    contract = path.contract("suite")
    experts = path.experts(case)
    first = _dequantised(path, dict(device.run(path, case, contract).outputs), axis, experts)
    # The path takes bfloat16: values below or above its range (of tiny and of infinite blocks) are left out.
    x = first.to(torch.float32).to(torch.bfloat16)
    expected = torch.where(x.double() == first, first, 0.0)
    x = torch.where(x.double() == first, x, 0.0)
    again = given_tensors(case, {"x": x})
    second = _dequantised(path, dict(device.run(path, again, contract).outputs), axis, experts)
    differ = second != expected
    assert not differ.any(), f"{int(differ.sum())} values changed, {expected[differ][0]} became {second[differ][0]}"


@given(
    profile=st.sampled_from(sorted(PROFILES)),
    seed=st.integers(0, 2**32 - 1),
    spread=st.integers(0, 6),
    axis=st.sampled_from((-1, -2)),
    block2d=st.booleans(),
)
def test_quantising_nvfp4_again_keeps_every_value(
    profile: str, seed: int, spread: int, axis: int, block2d: bool
) -> None:
    """Under the same global amax: a rounded scale leaves the block's largest code at 6, which gives that scale again.

    Of the reference, as dequantised values are float32 and kernels take bfloat16. Blocks with subnormal scales, where
    the largest code can be below 6, are left out.
    """
    generator = torch.Generator().manual_seed(seed)
    powers = torch.exp2(torch.randint(-spread, spread + 1, (3, 4), generator=generator).float())
    x = torch.randn(48, 64, generator=generator) * powers.repeat_interleave(16, 0).repeat_interleave(16, 1)
    contract = PROFILES[profile].contract.replace(amax_scope="tensor")
    first = nvfp4.quantize(x, axis, contract=contract, block2d=block2d)
    assume(first.scales.min() >= SMALLEST_NORMAL_SCALE)
    values = first.dequantize()
    again = nvfp4.quantize(values, axis, first.global_amax, contract=contract.replace(staging="none"), block2d=block2d)
    assert torch.equal(again.dequantize(), values)
