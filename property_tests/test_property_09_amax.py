"""Property 9: an amax is exact, of each expert's rows in any order, and follows the declared treatment of NaN.

Faults this catches: an amax without abs or in bfloat16, one that drops NaN or invents it, one that depends on which
tile came last, an expert without rows that keeps what memory held.
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
    moved,
    reference_and_kernels,
    space,
)

from moe_numerics.paths import Path, find_path
from moe_numerics.strategies import cases

MXFP8 = [path for path in few_paths() if any(spec.name == "amax" for spec in path.outputs)]
NVFP4 = find_path("quantize.nvfp4.rht")
WITH_NAN = ("specials", "random_bits")


def _largest(rows: torch.Tensor, ignore_nan: bool = False) -> float:
    """Largest magnitude by Python's own comparison of float32 values; NaN if there is one and it counts."""
    magnitudes = [abs(value) for value in rows.float().flatten().tolist()]
    numbers = [value for value in magnitudes if value == value]
    if len(numbers) < len(magnitudes) and not ignore_nan:
        return float("nan")
    return max(numbers, default=0.0)


@pytest.mark.parametrize("device", reference_and_kernels(), indirect=True)
@pytest.mark.parametrize("profile", ["suite", "te@2.20"])
@kernel_examples()
@given(data=st.data())
def test_amax_of_what_is_quantised_is_the_largest_magnitude(
    profile: str, device: ActiveDevice, data: st.DataObject
) -> None:
    """A quantiser's values are its inputs, so its amax needs no reference."""
    path = find_path("quantize.mxfp8_e5m2")
    case = data.draw(cases(space(path, profile, kinds=WITH_NAN)))
    contract = path.contract(profile)
    amax = device.run(path, case, contract).outputs["amax"]
    x = case.tensors(path.inputs)["x"]
    for expert, (start, count) in enumerate(zip(case.offsets, case.counts, strict=False)):
        expected = _largest(x[start : start + count], contract.nan_policy == "ignore")
        assert_same(path.output("amax"), torch.tensor([expected]), amax[expert : expert + 1], f"expert {expert}")


@pytest.mark.parametrize("device", reference_and_kernels(), indirect=True)
@pytest.mark.parametrize("path", [path for path in MXFP8 if path.id.endswith("bf16")], ids=lambda path: path.id)
@kernel_examples()
@given(data=st.data())
def test_rounded_amax_is_the_amax_of_what_is_rounded(path: Path, device: ActiveDevice, data: st.DataObject) -> None:
    """Rounding keeps order, so the amax of the float32 values, rounded, is that of the bfloat16 output."""
    case = data.draw(cases(space(path)))
    outputs = device.run(path, case, path.contract("suite", device.target)).outputs
    for expert, (start, count) in enumerate(zip(case.offsets, case.counts, strict=False)):
        written = torch.tensor([_largest(outputs["out"][start : start + count])])
        rounded = outputs["amax"][expert : expert + 1].to(torch.bfloat16).float()
        assert_same(path.output("amax"), written, rounded, f"expert {expert}")


@pytest.mark.parametrize("device", reference_and_kernels(), indirect=True)
@pytest.mark.parametrize("path", MXFP8, ids=lambda path: path.id)
@kernel_examples()
@given(data=st.data())
def test_amax_does_not_depend_on_the_order_of_rows(path: Path, device: ActiveDevice, data: st.DataObject) -> None:
    case = data.draw(cases(space(path)))
    tensors = case.tensors(path.inputs)
    rows = torch.arange(case.capacity)
    for start, count in zip(case.offsets, case.counts, strict=False):
        rows[start : start + count] = rows[start : start + count].flip(0)
    reversed_rows = moved(path, tensors, rows, range(len(case.counts)))
    contract = path.contract("suite", device.target)
    plain = device.run(path, case, contract).outputs
    flipped = device.run(path, given_tensors(case, reversed_rows), contract).outputs
    assert_same(path.output("amax"), plain["amax"], flipped["amax"], "rows of each expert in reverse")


@pytest.mark.parametrize("device", reference_and_kernels(), indirect=True)
@pytest.mark.parametrize("profile", ["suite", "cudnn@1.28"])
@kernel_examples()
@given(data=st.data())
def test_amax_of_a_tensor_is_the_largest_of_its_experts(
    profile: str, device: ActiveDevice, data: st.DataObject
) -> None:
    """Row-wise copies of NVFP4: one amax for the tensor, or one for each expert, as the contract says."""
    case = data.draw(cases(space(NVFP4, profile, kinds=WITH_NAN)))
    contract = NVFP4.contract(profile)
    amax = device.run(NVFP4, case, contract).outputs["amax_rowwise"]
    x = case.tensors(NVFP4.inputs)["x"]
    parts = [x[start : start + count] for start, count in zip(case.offsets, case.counts, strict=False)]
    if contract.amax_scope == "tensor":
        parts = [torch.cat(parts)]
    expected = torch.tensor([_largest(part) for part in parts])
    assert_same(NVFP4.output("amax_rowwise"), expected, amax, contract.amax_scope)
