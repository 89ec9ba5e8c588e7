"""Property 1: a fused kernel writes the bits of the reference, on every device, and nothing outside its rows.

Faults this catches: any wrong bit in any output, a tile that is skipped or done for the wrong expert, a store to a row
that no expert owns, a read of memory that nobody wrote.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_runs import (
    ActiveDevice,
    another_device,
    failure,
    few_paths,
    kernel_examples,
    one_device,
    representative_paths,
    space,
    thorough,
)

from moe_numerics.cases import gauntlet_case
from moe_numerics.paths import Path, all_paths
from moe_numerics.running import run_case
from moe_numerics.strategies import cases

OTHER_VARIANT = {
    "paddings": (False,),
    "probs": (False,),
    "offsets_dtypes": ("int64",),
    "alignments": (32, 64),
    "multiple": 32,
}
"""What `space` leaves out: neither counts nor probabilities, interleaved columns, wide offsets, dense scale rows."""

QUICK_PROFILES = {
    "quantize.mxfp8_e4m3": ("te@2.20", "cudnn@1.28", "cudnn@1.23", "ocp", "torchao"),
    "quantize.nvfp4.rht": ("te@2.20", "cudnn@1.28", "torchao"),
}
PROFILES = [
    (path, name)
    for path in all_paths()
    for name in path.profiles
    if name != "suite" and (thorough() or name in QUICK_PROFILES.get(path.id, ()))
]


def _id(path: Path) -> str:
    return path.id


@pytest.mark.parametrize("device", one_device(), indirect=True)
@pytest.mark.parametrize("path", representative_paths(), ids=_id)
@kernel_examples()
@given(data=st.data())
def test_drawn_cases_agree_bit_for_bit(path: Path, device: ActiveDevice, data: st.DataObject) -> None:
    case = data.draw(cases(space(path)))
    result = run_case(path, case, path.contract("suite", device.target), device)
    assert result.passed, failure(result)


@pytest.mark.parametrize("device", another_device(), indirect=True)
@pytest.mark.parametrize("path", few_paths(), ids=_id)
@kernel_examples()
@given(data=st.data())
def test_other_layouts_offsets_and_options_agree(path: Path, device: ActiveDevice, data: st.DataObject) -> None:
    other = {**OTHER_VARIANT, "layouts": path.layouts[1:2] or path.layouts}
    case = data.draw(cases(path.space("suite") if thorough() else space(path, **other)))
    result = run_case(path, case, path.contract("suite", device.target), device)
    assert result.passed, failure(result)


@pytest.mark.parametrize("device", another_device(), indirect=True)
@pytest.mark.parametrize("path", few_paths(), ids=_id)
def test_the_gauntlet_agrees_bit_for_bit(path: Path, device: ActiveDevice) -> None:
    case = gauntlet_case(path.id, inputs=path.inputs, hidden=160, depth=3 * path.depth_multiple, layout=path.layouts[0])
    result = run_case(path, case, path.contract("suite", device.target), device)
    assert result.passed, failure(result)


@pytest.mark.parametrize("device", one_device(), indirect=True)
@pytest.mark.parametrize(
    ("path", "profile"),
    PROFILES,
    ids=lambda value: value if isinstance(value, str) else _id(value),
)
@kernel_examples()
@given(data=st.data())
def test_other_profiles_agree_bit_for_bit(path: Path, profile: str, device: ActiveDevice, data: st.DataObject) -> None:
    case = data.draw(cases(space(path, profile)))
    result = run_case(path, case, path.contract(profile, device.target), device)
    assert result.passed, failure(result)
