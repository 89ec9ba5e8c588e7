"""A CUDA graph of a grouped GEMM serves any distribution of tokens: captured with one, replayed with twelve others.

Faults this catches: a grid, a tile or an address that depends on counts read on the host, a result that is left over
from the distribution before, work that waits for the device. Needs a CUDA device.
"""

from __future__ import annotations

import pytest
import torch
from kernel_runs import active_device, assert_same, captured_as_it_is, owned_part, space, thorough

from moe_numerics.cases import Case
from moe_numerics.drawing import draw_cases
from moe_numerics.paths import Path, all_paths
from moe_numerics.token_counts import SHAPES, SeededSource

HAS_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
DISTRIBUTIONS = 12
PATHS = [
    path
    for path in all_paths()
    if path.operands is not None and captured_as_it_is(path) and (thorough() or not path.extended)
]


def _distributions(case: Case) -> list[Case]:
    """Cases of the same buffer with other counts, all of its rows among them."""
    rows, experts = case.capacity - case.tail, len(case.counts)
    found = []
    for number in range(DISTRIBUTIONS):
        shape = list(SHAPES)[number % len(SHAPES)]
        proposed = SHAPES[shape](SeededSource(number), experts, rows)
        left, counts = rows, []
        for count in proposed:
            counts.append(min(count, left))
            left -= counts[-1]
        found.append(case.replace(counts=tuple(counts), tail=case.capacity - sum(counts), values=case.values))
    return found


@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device of compute capability 9.0")
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.id)
def test_a_captured_graph_serves_twelve_other_distributions(path: Path) -> None:
    gaussian = space(path, alignments=(1,), paddings=(False,), max_experts=6, factor_kinds=("gaussian",))
    drawn = draw_cases(6, 11, gaussian)
    case = max(drawn, key=lambda each: each.tokens).replace(values={}, padding_fill="nan")
    with active_device("cuda") as device:
        contract = path.contract("suite", device.target)
        inputs = case.tensors(path.inputs, "cuda")
        outputs = {
            name: torch.zeros(shape, dtype=dtype, device="cuda")
            for name, (shape, dtype) in path.operation.shapes(case).items()
        }
        path.operation.fused(case, inputs, contract, outputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            path.operation.fused(case, inputs, contract, outputs)
        for other in _distributions(case):
            eager = device.run(path, other, contract).outputs
            for name, tensor in other.tensors(path.inputs, "cuda").items():
                inputs[name].copy_(tensor)
            graph.replay()
            torch.cuda.synchronize()
            for spec in path.outputs_of(other):
                expected, got = (
                    owned_part(spec, path.experts(other), results)
                    for results in (eager[spec.name], outputs[spec.name].cpu())
                )
                assert_same(spec, expected, got, f"replayed with counts {other.counts}")


def test_the_distributions_differ_and_fill_the_same_buffer() -> None:
    """Of the test above, which needs a GPU: empty experts, one that takes everything, and the same addresses."""
    path = next(each for each in PATHS if each.id == "grouped_gemm.dgrad.bf16")
    case = Case(path.id, (70, 0, 3, 40), 64, depth=64, tail=9)
    others = _distributions(case)
    assert len(others) == DISTRIBUTIONS
    assert len({other.counts for other in others}) > DISTRIBUTIONS // 2
    assert {other.capacity for other in others} == {case.capacity}
    assert any(max(other.counts) == sum(other.counts) > 1 for other in others)
    assert any(0 in other.counts for other in others)
