"""A whole training step of the fused MLP has the bits of the reference: every intermediate, code, scale and gradient.

Faults these tests catch: a copy that is quantised from rounded values or of the wrong tensor, an amax that is not that
of what is quantised, random bits of another stream, offsets of one buffer used for another, a scale that is lost
between two launches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gemm_problems import DEVICE, NAN, Problem, Results, bits, hopper, problems
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from kernel_runs import kernel_examples, thorough
from moe_numerics.fused import grouped_mlp
from moe_numerics.reference import grouped_mlp as reference_mlp
from moe_numerics.reference.contract import SUITE
from moe_numerics.reference.formats import E5M2
from moe_numerics.reference.grouped_mlp import Step
from moe_numerics.reference.ragged import Experts

BF16 = torch.bfloat16


@pytest.fixture(scope="module", autouse=True)
def machine() -> Iterator[None]:
    with hopper():
        yield


def owned(name: str, result: torch.Tensor, experts: Experts, nvfp4: bool) -> torch.Tensor:
    """What a step writes of a result, as a mask that broadcasts to its shape."""
    if name.startswith(("weights", "dweights")) or "_amax_" in name or name == "dbias":
        return torch.ones((), dtype=torch.bool, device=DEVICE)
    if nvfp4 and name.endswith("_colwise"):
        # Transposed: blocks of rows lie along a line, 8 bytes of codes or one scale each.
        return experts.owned_colwise_rows(16, DEVICE).repeat_interleave(8 if "_codes_" in name else 1)
    rows = experts.owned_colwise_rows(32, DEVICE) if name.endswith("scales_colwise") else experts.valid_rows(DEVICE)
    return rows.view(-1, *[1] * (result.dim() - 1))


def assert_steps_agree(got: Results, want: Results, experts: Experts, choices: Step) -> None:
    assert set(got) == set(want)
    for name, expected in want.items():
        result = got[name]
        assert (result.dtype, result.shape) == (expected.dtype, expected.shape), name
        differ = bits(result) != bits(expected)
        if result.is_floating_point():
            differ &= ~(result.isnan() & expected.isnan())
        differ &= owned(name, result, experts, choices.operands == "nvfp4")
        assert not differ.any(), f"{name}: {int(differ.sum())} of {differ.numel()} differ, first {differ.nonzero()[0]}"


def tensors(problem: Problem, inputs: int) -> dict[str, Any]:
    counts = len(problem.counts)
    depth, hidden = problem.depth, problem.hidden
    offsets, valid = problem.ragged
    return {
        "x": problem.tokens("x", depth),
        "weights1": problem.weights("w1", inputs * hidden, depth),
        "weights2": problem.weights("w2", depth, hidden),
        "grad": problem.tokens("grad", depth),
        "offsets": offsets,
        "counts": valid,
        "prob": problem.prob(),
        "bias": problem.normal("bias", counts, inputs * hidden),
        "main_grad1": problem.normal("main1", counts, inputs * hidden, depth),
    }


def step_examples() -> settings:
    """The one example below in the quick profile: it is a dozen launches."""
    return kernel_examples() if thorough() else settings(max_examples=1, phases=[Phase.explicit])


@st.composite
def steps(draw: st.DrawFn) -> Problem:
    drawn = draw(problems())
    sizes = 32 * draw(st.integers(1, 3)), 32 * draw(st.integers(1, 3))
    special = draw(st.sampled_from((1.0, 0.0, NAN)))
    return Problem(drawn.counts, drawn.room, drawn.tail, *sizes, drawn.seed, min(drawn.spread, 3), special)


TALL = Problem((130, 0, 33), (0, 2, 0), 3, 96, 64, 6, 2, 1.0)

RECIPES = {
    "bf16": Step("bf16", layout=grouped_mlp.INTERLEAVED),
    "mxfp8": Step("mxfp8", layout=grouped_mlp.INTERLEAVED, grad_element=E5M2),
    "nvfp4": Step("nvfp4", layout=grouped_mlp.INTERLEAVED, seed=(7 << 33) + (1 << 31)),
    "nvfp4.expert": Step(
        "nvfp4", "relu", epilogue_input="bfloat16", stochastic=False, contract=SUITE.replace(amax_scope="expert")
    ),
}


QUICK = ("mxfp8", "nvfp4")


@pytest.mark.parametrize("recipe", RECIPES if thorough() else QUICK)
@step_examples()
@given(problem=steps())
@example(problem=TALL)
def test_a_step_has_the_bits_of_the_reference(recipe: str, problem: Problem) -> None:
    choices = RECIPES[recipe]
    arguments = tensors(problem, 1 if choices.activation == "relu" else 2)
    want = reference_mlp.step(**arguments, choices=choices)
    assert_steps_agree(grouped_mlp.step(**arguments, choices=choices), want, problem.experts, choices)


@pytest.mark.skipif(not thorough(), reason="a second step of each recipe, in the thorough profile")
def test_aligned_offsets_have_dense_copies() -> None:
    problem = Problem((40, 0, 33), (24, 0, 31), 0, 64, 32, 8, 3, 1.0)
    experts = Experts.from_offsets(*problem.ragged, problem.capacity, 32)
    for choices in (RECIPES["mxfp8"], RECIPES["nvfp4"]):
        arguments = {**tensors(problem, 2), "alignment": 32, "choices": choices}
        want = reference_mlp.step(**arguments)
        assert_steps_agree(grouped_mlp.step(**arguments), want, experts, choices)


def test_another_layout_is_refused() -> None:
    problem = Problem((3,), (0,), 1, 32, 32, 8, 3, 1.0)
    with pytest.raises(ValueError, match="layout is 'halves': expected 'interleaved:32'"):
        grouped_mlp.step(**tensors(problem, 2), choices=Step("bf16"))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a Hopper GPU")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_captured_graph_replays_other_distributions(recipe: str) -> None:
    """Nothing in a step waits for the device."""
    choices = RECIPES[recipe]
    problem = Problem((60, 0, 200), (4, 0, 0), 8, 64, 96, 1, 3, 1.0)
    arguments = tensors(problem, 1 if choices.activation == "relu" else 2)
    for name in ("x", "grad", "prob"):
        arguments[name] = arguments[name].nan_to_num()
    grouped_mlp.step(**arguments, choices=choices)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = grouped_mlp.step(**arguments, choices=choices)
    for cuts in ([0, 0, 264, 272], [0, 100, 101, 200], [0, 32, 33, 34]):
        arguments["offsets"].copy_(torch.tensor(cuts, dtype=torch.int32))
        arguments["counts"].copy_(arguments["offsets"][1:] - arguments["offsets"][:-1])
        graph.replay()
        experts = Experts.from_offsets(arguments["offsets"], capacity=problem.capacity)
        assert_steps_agree(captured, reference_mlp.step(**arguments, choices=choices), experts, choices)
