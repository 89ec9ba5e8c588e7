"""Property 5: scaling the values by 2^k shifts every E8M0 scale by k and keeps every code, away from the range's ends.

Activations are scaled by their probabilities (forward) and by grad (backward), in which they are linear. Outputs
without blocks scale by 2^k themselves, and so do amax and dprob.

Faults this catches: a scale from a rounded logarithm, a mantissa that leaks into a scale, a multiplier that is not a
power of two, a threshold in absolute terms.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_runs import (
    ActiveDevice,
    assert_same,
    elementwise,
    few_paths,
    given_tensors,
    kernel_examples,
    owned_mask,
    reference_and_kernels,
    space,
)
from moe_numerics.reference.ragged import Experts

from moe_numerics.paths import OutputSpec, Path
from moe_numerics.strategies import cases

# NVFP4 has two scales, of which this is not true; swizzled scales are those of the same path without swizzling.
E8M0_PATHS = [path for path in elementwise(few_paths()) if "nvfp4" not in path.id and "swizzled" not in path.id]
LINEAR_KINDS = ("plain", "gaussian", "constant", "ties_e4m3", "outliers")
POWERS = st.integers(-20, 20)
# Blocks and floats this far from the range's ends meet neither subnormals nor overflow when they are scaled.
LOWEST_SCALE, HIGHEST_SCALE = 60, 190
SMALLEST, LARGEST = 2.0**-60, 2.0**60


def _linear_input(path: Path) -> str:
    """The input in which the path's values are linear."""
    names = [spec.name for spec in path.inputs]
    return next(name for name in ("grad", "prob", "x") if name in names)


def _element_scales(name: str, scales: torch.Tensor, experts: Experts) -> torch.Tensor:
    """The scale code of every element of the codes of this name."""
    if name.endswith("rowwise"):
        return scales.repeat_interleave(32, dim=1)
    return scales[experts.colwise_slots(32).clamp(min=0) // 32]


def _usable(scales: torch.Tensor) -> torch.Tensor:
    return (scales >= LOWEST_SCALE) & (scales <= HIGHEST_SCALE)


def _expected(
    spec: OutputSpec, plain: dict[str, torch.Tensor], experts: Experts, power: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(what the scaled run must give, where that is said)."""
    before = plain[spec.name]
    owned = owned_mask(spec, experts, before)
    if spec.name.startswith("codes"):
        scales = plain[spec.name.replace("codes", "scales")]
        return before, owned & _usable(_element_scales(spec.name, scales, experts))
    if spec.name.startswith("scales"):
        return (before.int() + power).to(torch.uint8), owned & _usable(before)
    size = before.abs()
    return (before.double() * 2.0**power).to(before.dtype), owned & (size > SMALLEST) & (size < LARGEST)


@pytest.mark.parametrize("device", reference_and_kernels(), indirect=True)
@pytest.mark.parametrize("path", E8M0_PATHS, ids=lambda path: path.id)
@kernel_examples()
@given(data=st.data(), power=POWERS)
def test_powers_of_two_shift_scales_and_keep_codes(
    path: Path, device: ActiveDevice, data: st.DataObject, power: int
) -> None:
    case = data.draw(cases(space(path, allow_specials=False, kinds=LINEAR_KINDS)))
    tensors = case.tensors(path.inputs)
    name = _linear_input(path)
    scaled = {**tensors, name: (tensors[name].double() * 2.0**power).to(tensors[name].dtype)}

    contract = path.contract("suite")
    plain = dict(device.run(path, case, contract).outputs)
    other = device.run(path, given_tensors(case, scaled), contract).outputs
    experts = path.experts(case)
    for spec in path.outputs_of(case):
        expected, where = _expected(spec, plain, experts, power)
        assert_same(
            spec,
            torch.where(where, expected, 0),
            torch.where(where, other[spec.name], 0),
            f"{name} scaled by 2^{power}",
        )
