"""Property 4: what an expert's rows give does not depend on the other experts' tokens, nor on there being others.

Faults this catches: an amax over the whole buffer where one of the expert is meant, a block or tile that reaches into
the next expert, NaN of one expert in another one's scales.
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
    part_of,
    reference_and_kernels,
    space,
    untied_profile,
)

from moe_numerics.cases import Case
from moe_numerics.paths import Path
from moe_numerics.strategies import cases

FILLS = (float("nan"), float("inf"), 3.0e38, 0.0)


def _values(path: Path, case: Case) -> dict[str, torch.Tensor]:
    return {name: x for name, x in case.tensors(path.inputs).items() if name not in ("offsets", "counts")}


@pytest.mark.parametrize("device", reference_and_kernels(), indirect=True)
@pytest.mark.parametrize("path", few_paths(), ids=lambda path: path.id)
@kernel_examples()
@given(data=st.data(), fill=st.sampled_from(FILLS))
def test_values_of_other_experts_change_nothing(
    path: Path, device: ActiveDevice, data: st.DataObject, fill: float
) -> None:
    profile = untied_profile(path)
    case = data.draw(cases(space(path, profile)))
    assume(case.tokens)
    experts = path.experts(case)
    expert = data.draw(st.sampled_from([e for e, count in enumerate(case.counts) if count]))
    others = experts.row_expert() != expert
    tensors = _values(path, case)
    changed = {
        name: tensor.masked_fill(others.view(-1, *[1] * (tensor.dim() - 1)), fill) for name, tensor in tensors.items()
    }
    contract = path.contract(profile)
    plain = device.run(path, case, contract).outputs
    other = device.run(path, given_tensors(case, changed), contract).outputs
    for spec in path.outputs_of(case):
        expected, got = (part_of(spec, experts, expert, outputs[spec.name]) for outputs in (plain, other))
        assert_same(spec, expected, got, f"all experts but {expert} hold {fill}")


@pytest.mark.parametrize("device", reference_and_kernels(), indirect=True)
@pytest.mark.parametrize(
    "path",
    # Stochastic rounding is keyed by the number of the expert, which is 0 for one that is alone.
    [path for path in few_paths() if not path.id.endswith(".sr")],
    ids=lambda path: path.id,
)
@kernel_examples()
@given(data=st.data())
def test_an_expert_alone_gives_the_same(path: Path, device: ActiveDevice, data: st.DataObject) -> None:
    profile = untied_profile(path)
    case = data.draw(cases(space(path, profile)))
    assume(case.tokens)
    experts = path.experts(case)
    expert = data.draw(st.sampled_from([e for e, count in enumerate(case.counts) if count]))
    rows = slice(case.offsets[expert], case.offsets[expert + 1])
    alone = case.replace(counts=(case.counts[expert],), tail=0, values={})
    own = {name: tensor[rows] for name, tensor in _values(path, case).items()}

    contract = path.contract(profile)
    plain = device.run(path, case, contract).outputs
    single = device.run(path, given_tensors(alone, own), contract).outputs
    for spec in path.outputs_of(case):
        assert_same(
            spec,
            part_of(spec, experts, expert, plain[spec.name]),
            part_of(spec, path.experts(alone), 0, single[spec.name]),
            f"expert {expert} alone",
        )
