"""Property 7: row-wise and column-wise copies both come from the values, neither from the other copy.

The column-wise copy of a matrix is the row-wise copy of its transpose, transposed.

Faults this catches: a column-wise copy made from row-wise codes (double quantisation), axes swapped in one copy, a
block of columns that starts at the wrong row, a scale written in the place of another block.
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
    given_tensors,
    kernel_examples,
    reference_and_kernels,
    thorough,
)

from moe_numerics.cases import Case, Values
from moe_numerics.paths import Path, all_paths, find_path
from moe_numerics.values import KINDS

QUICK = ("swiglu.fwd.mxfp8_e4m3", "swiglu.bwd.mxfp8_e4m3", "quantize.mxfp8_e5m2")
COPIES = {"codes_rowwise", "codes_colwise", "scales_rowwise", "scales_colwise"}


def _paths() -> list[Path]:
    if not thorough():
        return [find_path(name) for name in QUICK]
    paths = (path for path in elementwise(all_paths()) if "mxfp8" in path.id)
    both = (path for path in paths if {spec.name for spec in path.outputs} >= COPIES)
    # A bias is one row of each expert, which a transposition turns into columns.
    return [path for path in both if not path.id.endswith((".bias", ".swizzled"))]


def _transposed(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Each [size, size] part of a matrix of one or more parts side by side, transposed."""
    return torch.cat([part.t() for part in tensor.split(size, dim=1)], dim=1).contiguous()


@pytest.mark.parametrize("device", reference_and_kernels(), indirect=True)
@pytest.mark.parametrize("path", _paths(), ids=lambda path: path.id)
@kernel_examples()
@given(
    size=st.sampled_from([32, 64, 96, 160]),
    kind=st.sampled_from(sorted(KINDS)),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_columnwise_copy_is_the_rowwise_copy_of_the_transpose(
    path: Path, device: ActiveDevice, size: int, kind: str, seed: int
) -> None:
    values = {spec.name: Values(kind, seed) for spec in path.inputs if spec.kind == "values"}
    case = Case(path.id, (size,), size, alignment=32, values=values)
    tensors = {name: x for name, x in case.tensors(path.inputs).items() if x.dim() == 2}
    turned = {name: _transposed(tensor, size) for name, tensor in tensors.items()}

    contract = path.contract("suite")
    plain = device.run(path, case, contract).outputs
    other = device.run(path, given_tensors(case, turned), contract).outputs
    for what in ("codes", "scales"):
        rowwise, colwise = path.output(f"{what}_rowwise"), path.output(f"{what}_colwise")
        for first, second in ((plain, other), (other, plain)):
            got = first[colwise.name]
            parts = second[rowwise.name].chunk(got.shape[1] // size, dim=1)
            assert_same(colwise, torch.cat([part.t() for part in parts], dim=1), got, f"transpose of {kind}")


@pytest.mark.parametrize("device", reference_and_kernels(), indirect=True)
@pytest.mark.parametrize("path", [find_path("quantize.nvfp4"), find_path("quantize.nvfp4.16x16")], ids=lambda p: p.id)
@kernel_examples()
@given(size=st.sampled_from([16, 48, 128]), kind=st.sampled_from(sorted(KINDS)), seed=st.integers(0, 2**32 - 1))
def test_a_transposed_copy_is_the_rowwise_copy_of_the_transpose(
    path: Path, device: ActiveDevice, size: int, kind: str, seed: int
) -> None:
    case = Case(path.id, (size,), size, alignment=16, values={"x": Values(kind, seed)})
    turned = given_tensors(case, {"x": case.tensors(path.inputs)["x"].t().contiguous()})
    contract = path.contract("suite")
    plain = device.run(path, case, contract).outputs
    other = device.run(path, turned, contract).outputs
    for what in ("codes", "scales", "amax"):
        spec = path.output(f"{what}_colwise")
        assert_same(spec, other[f"{what}_rowwise"], plain[spec.name], f"transpose of {kind}")


@pytest.mark.parametrize("device", reference_and_kernels(), indirect=True)
def test_a_small_value_beside_a_large_one_survives_in_its_column(device: ActiveDevice) -> None:
    """0.375 in a row with 114688 is 0.5 once it has been quantised row-wise; its own column keeps it."""
    path = find_path("quantize.mxfp8_e4m3")
    x = torch.zeros(32, 32, dtype=torch.bfloat16)
    x[0, 0], x[0, 1] = 114688.0, 0.375
    case = given_tensors(Case(path.id, (32,), 32, alignment=32), {"x": x})
    outputs = device.run(path, case, path.contract("suite")).outputs
    decode = path.operation.element.decode  # type: ignore[attr-defined]
    scale = 2.0 ** (int(outputs["scales_colwise"][0, 1]) - 127)
    assert float(decode(outputs["codes_colwise"])[0, 1]) * scale == 0.375
    scale = 2.0 ** (int(outputs["scales_rowwise"][0, 0]) - 127)
    assert float(decode(outputs["codes_rowwise"])[0, 1]) * scale != 0.375
