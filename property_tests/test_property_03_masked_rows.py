"""Property 3: rows that no expert owns may hold anything: no result changes, and nothing is written to them.

Faults this catches: a padding row in an amax or a block, a mask by multiplication (0 * NaN), a tile that is stored
whole, a read past the used part of the buffer.
"""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from kernel_runs import (
    ActiveDevice,
    assert_same,
    few_paths,
    filled,
    given_tensors,
    kernel_examples,
    owned_part,
    reference_and_kernels,
    space,
)

from moe_numerics.compare import compare_output
from moe_numerics.devices import fill_bits
from moe_numerics.paths import Path
from moe_numerics.strategies import cases

# Whatever memory may hold: NaN, Inf, the largest finite numbers, what a masked product would not hide.
FILLS = (float("nan"), float("inf"), float("-inf"), 3.0e38, -1.0)


@pytest.mark.parametrize("device", reference_and_kernels(), indirect=True)
@pytest.mark.parametrize("path", few_paths(), ids=lambda path: path.id)
@kernel_examples()
@given(data=st.data(), fill=st.sampled_from(FILLS))
def test_masked_rows_change_nothing(path: Path, device: ActiveDevice, data: st.DataObject, fill: float) -> None:
    case = data.draw(cases(space(path)))
    experts = path.experts(case)
    masked = ~experts.valid_rows()
    assume(masked.any())
    tensors = {name: x for name, x in case.tensors(path.inputs).items() if name not in ("offsets", "counts")}
    zeros = filled(path, tensors, masked, 0.0)
    other_fill = filled(path, tensors, masked, fill)

    contract = path.contract("suite", device.target)
    plain = device.run(path, given_tensors(case, zeros), contract).outputs
    other = device.run(path, given_tensors(case, other_fill), contract).outputs
    for spec in path.outputs_of(case):
        expected, got = plain[spec.name], other[spec.name]
        expected, got = owned_part(spec, experts, expected), owned_part(spec, experts, got)
        assert_same(spec, expected, got, f"masked rows hold {fill}")
        if device.name != "reference":
            written = other[spec.name]
            finding = compare_output(
                spec.name, written, written, format=spec.format, owned=spec.owned(experts), fill=fill_bits(got.dtype)
            )
            assert finding.passed, f"{spec.name}: written outside its rows, {finding.first_mismatch}"
