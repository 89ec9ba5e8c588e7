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
    filled,
    given_tensors,
    kernel_examples,
    moved,
    part_of,
    reference_and_kernels,
    space,
    stochastic,
    untied_profile,
)

from moe_numerics.cases import Case
from moe_numerics.paths import Path
from moe_numerics.strategies import cases

FILLS = (float("nan"), float("inf"), 3.0e38, 0.0)


UNTIED = [path for path in few_paths() if untied_profile(path) is not None]


def _drawn(path: Path, data: st.DataObject) -> tuple[Case, str, int]:
    """A case, the profile it is of, and an expert with tokens."""
    profile = untied_profile(path)
    assert profile is not None
    case = data.draw(cases(space(path, profile)))
    assume(case.tokens)
    expert = data.draw(st.sampled_from([e for e, count in enumerate(case.counts) if count]))
    return case, profile, expert


@pytest.mark.parametrize("device", reference_and_kernels(), indirect=True)
@pytest.mark.parametrize("path", UNTIED, ids=lambda path: path.id)
@kernel_examples()
@given(data=st.data(), fill=st.sampled_from(FILLS))
def test_values_of_other_experts_change_nothing(
    path: Path, device: ActiveDevice, data: st.DataObject, fill: float
) -> None:
    case, profile, expert = _drawn(path, data)
    experts = path.experts(case)
    tensors = {name: x for name, x in case.tensors(path.inputs).items() if name not in ("offsets", "counts")}
    changed = filled(path, tensors, experts.row_expert() != expert, fill)
    contract = path.contract(profile, device.target)
    plain = device.run(path, case, contract).outputs
    other = device.run(path, given_tensors(case, changed), contract).outputs
    for spec in path.outputs_of(case):
        if spec.rows != "buffer":
            expected, got = (part_of(spec, experts, expert, outputs[spec.name]) for outputs in (plain, other))
            assert_same(spec, expected, got, f"all experts but {expert} hold {fill}")


@pytest.mark.parametrize("device", reference_and_kernels(), indirect=True)
@pytest.mark.parametrize(
    "path",
    # Stochastic rounding is keyed by the number of the expert, which is 0 for one that is alone.
    [path for path in UNTIED if not stochastic(path)],
    ids=lambda path: path.id,
)
@kernel_examples()
@given(data=st.data())
def test_an_expert_alone_gives_the_same(path: Path, device: ActiveDevice, data: st.DataObject) -> None:
    case, profile, expert = _drawn(path, data)
    alone = case.replace(counts=(case.counts[expert],), tail=0, values={})
    rows = torch.arange(case.offsets[expert], case.offsets[expert + 1])
    own = moved(path, case.tensors(path.inputs), rows, [expert])

    contract = path.contract(profile, device.target)
    plain = device.run(path, case, contract).outputs
    single = device.run(path, given_tensors(alone, own), contract).outputs
    for spec in path.outputs_of(case):
        if spec.rows != "buffer":
            assert_same(
                spec,
                part_of(spec, path.experts(case), expert, plain[spec.name]),
                part_of(spec, path.experts(alone), 0, single[spec.name]),
                f"expert {expert} alone",
            )
