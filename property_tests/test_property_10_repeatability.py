"""Property 10: two runs, two schedules, and a replayed CUDA graph with new counts give the same bits.

Faults this catches: a missing barrier, a sum in the order of arrival, an atomic that loses an update, memory that is
reused from the run before, work that depends on numbers read on the host.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_runs import (
    VIRTUAL,
    ActiveDevice,
    active_device,
    assert_same,
    captured_as_it_is,
    few_paths,
    kernel_examples,
    one_device,
    owned_part,
    reference_and_kernels,
    space,
)

from moe_numerics import operations
from moe_numerics.cases import Case
from moe_numerics.devices import Outcome
from moe_numerics.paths import Path, all_paths
from moe_numerics.strategies import cases

HAS_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def _assert_same_outcomes(path: Path, case: Case, first: Outcome, second: Outcome, claim: str) -> None:
    experts = path.experts(case)
    for spec in path.outputs_of(case):
        expected, got = (owned_part(spec, experts, run.outputs[spec.name]) for run in (first, second))
        assert_same(spec, expected, got, claim)


@pytest.mark.parametrize("device", reference_and_kernels(), indirect=True)
@pytest.mark.parametrize("path", few_paths(), ids=lambda path: path.id)
@kernel_examples()
@given(data=st.data())
def test_two_runs_agree(path: Path, device: ActiveDevice, data: st.DataObject) -> None:
    first, second = (data.draw(cases(space(path))) for _ in range(2))
    contract = path.contract("suite", device.target)
    before = device.run(path, first, contract)
    device.run(path, second, contract)
    _assert_same_outcomes(path, first, before, device.run(path, first, contract), "after a run of another case")


@pytest.mark.parametrize("target", one_device())
@pytest.mark.parametrize("path", few_paths(), ids=lambda path: path.id)
@kernel_examples()
@given(data=st.data(), seeds=st.lists(st.integers(0, 2**31), min_size=2, max_size=2, unique=True))
def test_any_schedule_gives_the_same(path: Path, target: str, data: st.DataObject, seeds: list[int]) -> None:
    case = data.draw(cases(space(path, max_elements=3_000, big_elements=3_000)))
    with active_device(target) as device:
        contract = path.contract("suite", device.target)
        plain = device.run(path, case, contract)
    for seed in seeds:
        with active_device(target, seed) as device:
            _assert_same_outcomes(path, case, plain, device.run(path, case, contract), f"schedule {seed}")


@settings(max_examples=4)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_any_path_under_any_schedule(data: st.DataObject, seed: int) -> None:
    """The whole registry is drawn from, where the quick profile parametrises a few paths."""
    path = data.draw(st.sampled_from(all_paths()), label="path")
    target = data.draw(st.sampled_from([name for name in VIRTUAL if name in path.devices]), label="device")
    case = data.draw(cases(space(path, max_elements=1_000, big_elements=1_000)))
    outcomes = []
    for schedule in ("fast", seed):
        with active_device(target, schedule) as device:
            outcomes.append(device.run(path, case, path.contract("suite", device.target)))
    _assert_same_outcomes(path, case, *outcomes, f"{path.id}, schedule {seed}")


@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device of compute capability 9.0")
@pytest.mark.parametrize("path", [path for path in few_paths() if captured_as_it_is(path)], ids=lambda path: path.id)
@kernel_examples()
@given(data=st.data())
def test_a_replayed_graph_serves_new_counts(path: Path, data: st.DataObject) -> None:
    """Tokens move between experts; the graph that was captured before sees only the same addresses."""
    case = data.draw(cases(space(path)))
    order = data.draw(st.permutations(range(len(case.counts))))
    other = case.replace(counts=tuple(case.counts[e] for e in order), values={})
    with active_device("cuda") as device:
        contract = path.contract("suite", device.target)
        plain = device.run(path, other, contract)
        inputs = case.tensors(path.inputs, "cuda")
        outputs = {
            name: torch.zeros(shape, dtype=dtype, device="cuda")
            for name, (shape, dtype) in path.operation.shapes(case).items()
        }
        # A copy from the host cannot be captured: the seed has to be on the device before.
        words = operations._seed_words(case, torch.device("cuda"))
        graph = torch.cuda.CUDAGraph()
        with pytest.MonkeyPatch.context() as patch, torch.cuda.graph(graph):
            patch.setattr(operations, "_seed_words", lambda *_: words)
            path.operation.fused(case, inputs, contract, outputs)
        for name, tensor in other.tensors(path.inputs, "cuda").items():
            inputs[name].copy_(tensor)
        graph.replay()
        torch.cuda.synchronize()
        replayed = Outcome({name: tensor.cpu() for name, tensor in outputs.items()}, ())
    _assert_same_outcomes(path, other, plain, replayed, "graph replayed with other counts")
