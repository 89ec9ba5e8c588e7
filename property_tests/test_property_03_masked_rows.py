"""Property 3: rows that no expert owns may hold anything: no result changes, and nothing is written to them.

Faults this catches: a padding row in an amax or a block, a mask by multiplication (0 * NaN), a tile that is stored
whole, a read past the used part of the buffer.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
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

from moe_numerics.compare import compare_output
from moe_numerics.devices import fill_bits
from moe_numerics.paths import OutputSpec, Path
from moe_numerics.reference.ragged import Experts
from moe_numerics.strategies import cases

# Whatever memory may hold: NaN, Inf, the largest finite numbers, what a masked product would not hide.
FILLS = (float("nan"), float("inf"), float("-inf"), 3.0e38, -1.0)


def _owned(spec: OutputSpec, experts: Experts, output: torch.Tensor) -> torch.Tensor:
    mask = spec.owned(experts)
    return mask.view(-1, *[1] * (output.dim() - mask.dim())).expand(output.shape)


@pytest.mark.parametrize("device", reference_and_kernels(), indirect=True)
@pytest.mark.parametrize("path", few_paths(), ids=lambda path: path.id)
@kernel_examples()
@given(data=st.data(), fill=st.sampled_from(FILLS))
def test_masked_rows_change_nothing(path: Path, device: ActiveDevice, data: st.DataObject, fill: float) -> None:
    case = data.draw(cases(space(path)))
    experts = path.experts(case)
    masked = ~experts.valid_rows()
    assume(masked.any())
    tensors = case.tensors(path.inputs)
    zeros, filled = {}, {}
    for name, tensor in tensors.items():
        if name not in ("offsets", "counts"):
            shape = (-1, *[1] * (tensor.dim() - 1))
            zeros[name] = tensor.masked_fill(masked.view(shape), 0.0)
            filled[name] = tensor.masked_fill(masked.view(shape), fill)

    contract = path.contract("suite")
    plain = device.run(path, given_tensors(case, zeros), contract).outputs
    other = device.run(path, given_tensors(case, filled), contract).outputs
    for spec in path.outputs_of(case):
        expected, got = plain[spec.name], other[spec.name]
        mask = _owned(spec, experts, got)
        assert_same(spec, torch.where(mask, expected, 0), torch.where(mask, got, 0), f"masked rows hold {fill}")
        if device.name != "reference":
            finding = compare_output(
                spec.name, got, got, format=spec.format, owned=spec.owned(experts), fill=fill_bits(got.dtype)
            )
            assert finding.passed, f"{spec.name}: written outside its rows, {finding.first_mismatch}"
