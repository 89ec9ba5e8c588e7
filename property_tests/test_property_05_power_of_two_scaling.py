"""Property 5: scaling the values by 2^k shifts every E8M0 scale by k and keeps every code, away from the range's ends.

Activations are scaled by their probabilities (forward) and by grad (backward), in which they are linear. Without
blocks, outputs themselves scale by 2^k, and so do amax and dprob.

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
    few_paths,
    given_tensors,
    kernel_examples,
    reference_and_kernels,
    space,
)

from moe_numerics.cases import Case
from moe_numerics.devices import Outcome
from moe_numerics.paths import OutputSpec, Path
from moe_numerics.strategies import cases

LINEAR_KINDS = ("plain", "gaussian", "constant", "ties_e4m3", "outliers")
# Scale codes of blocks whose values, and those of the scaled block, stay clear of subnormals and of overflow.
LOWEST_SCALE, HIGHEST_SCALE = 60, 190
SMALLEST, LARGEST = 2.0**-60, 2.0**60


def _scaled_input(path: Path) -> str:
    """The input in which the path's values are linear."""
    names = [spec.name for spec in path.inputs]
    return next(name for name in ("grad", "prob", "x") if name in names)


def _check(spec: OutputSpec, plain: Outcome, scaled: Outcome, power: int) -> None:
    before, after = plain.outputs[spec.name], scaled.outputs[spec.name]
    if spec.format in ("bfloat16", "float32"):
        ordinary = (before.abs() > SMALLEST) & (before.abs() < LARGEST) | (before == 0)
        expected = (before.double() * 2.0**power).to(before.dtype)
    else:
        scales = plain.outputs[spec.name.replace("codes", "scales")]
        usable = (scales >= LOWEST_SCALE) & (scales <= HIGHEST_SCALE)
        if spec.name.startswith("scales"):
            ordinary, expected = usable, (before.int() + power).to(torch.uint8)
        else:
            # A column's block is named by its scale row, which only `Experts` knows: codes are compared block by
            # block row-wise, and column-wise where the scales of the whole column are usable.
            block = before.shape[1] // scales.shape[1]
            columns = usable.repeat_interleave(block, 1) if block > 1 else usable.all(0).expand(before.shape)
            ordinary, expected = columns, before
    assert_same(spec, torch.where(ordinary, expected, 0), torch.where(ordinary, after, 0), f"scaled by 2^{power}")


@pytest.mark.parametrize("device", reference_and_kernels(), indirect=True)
@pytest.mark.parametrize(
    "path", [path for path in few_paths() if "nvfp4" not in path.id], ids=lambda path: path.id
)
@kernel_examples()
@given(data=st.data(), power=st.integers(-20, 20))
def test_powers_of_two_shift_scales_and_keep_codes(
    path: Path, device: ActiveDevice, data: st.DataObject, power: int
) -> None:
    case: Case = data.draw(cases(space(path, allow_specials=False, kinds=LINEAR_KINDS)))
    contract = path.contract("suite")
    tensors = case.tensors(path.inputs)
    name = _scaled_input(path)
    # In float64 and back is exact: the drawn values are far from the ends of bfloat16.
    scaled = {**tensors, name: (tensors[name].double() * 2.0**power).to(tensors[name].dtype)}
    plain = device.run(path, case, contract)
    other = device.run(path, given_tensors(case, scaled), contract)
    experts = path.experts(case)
    for spec in path.outputs_of(case):
        mask = spec.owned(experts)
        owned = {
            key: torch.where(
                path.output(key).owned(experts).view(-1, *[1] * (tensor.dim() - 1)), tensor, 0
            )
            for key, tensor in plain.outputs.items()
        }
        again = {key: torch.where(mask.view(-1, *[1] * (tensor.dim() - 1)), tensor, 0) for key, tensor in other.outputs.items() if key == spec.name}
        _check(spec, Outcome(owned, ()), Outcome(again, ()), power)
