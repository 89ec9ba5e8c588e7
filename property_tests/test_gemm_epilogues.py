"""Every combination of what the epilogues of the fused GEMMs do gives the bits of the reference.

Drawn over the activations of the registry and the presets of clamps, forward and backward: with and without bias, prob
and alpha, as bfloat16 and MXFP8, with the amax before and after rotation, under several contracts.

Faults these tests catch: an operation in another order, a value of one stream in another's place, a rounding too many
or too few, a mask at a kink that is wrong, an amax of other values than those that are written or rotated, an option
that only works beside another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gemm_problems import Problem, assert_equal, fresh, hopper, problems
from hypothesis import example, given
from hypothesis import strategies as st
from kernel_runs import kernel_examples
from moe_numerics.fused import grouped_mlp
from moe_numerics.reference import grouped_mlp as reference_mlp
from moe_numerics.reference.activations import ACTIVATIONS, CLAMPED_SWIGLU_PRESETS, Activation
from moe_numerics.reference.contract import SUITE
from moe_numerics.reference.formats import E4M3, E5M2

BF16 = torch.bfloat16
CONTRACTS = (
    SUITE,
    SUITE.replace(nan_policy="ignore"),
    SUITE.replace(rht_rounding="bfloat16", scale_rule="floor", mx_inf="rule"),
    SUITE.replace(rht_normalise="none", rht_signs=None, staging="bfloat16"),
)
EVERY: tuple[Activation, ...] = (*ACTIVATIONS.values(), *CLAMPED_SWIGLU_PRESETS.values())
ROWS = frozenset({"preactivation", "out", "codes_rowwise", "scales_rowwise", "codes_colwise", "dactivation", "dprob"})


@pytest.fixture(scope="module", autouse=True)
def machine() -> Iterator[None]:
    with hopper():
        yield


options = st.fixed_dictionaries(
    {
        "bias": st.sampled_from((None, torch.float32, BF16)),
        "prob": st.booleans(),
        "alpha": st.sampled_from((None, 0.75, "each")),
        "element": st.sampled_from((None, E4M3, E5M2)),
        "rotated_amax": st.booleans(),
        "epilogue_input": st.sampled_from(("accumulator", "bfloat16")),
        "contract": st.sampled_from(CONTRACTS),
    }
)
BARE = {
    "bias": None,
    "prob": False,
    "alpha": None,
    "element": None,
    "rotated_amax": True,
    "epilogue_input": "accumulator",
    "contract": SUITE,
}


def keywords(problem: Problem, drawn: dict[str, Any], columns: int) -> dict[str, Any]:
    """The options as arguments: tensors in the place of their descriptions."""
    experts = len(problem.counts)
    bias, alpha = drawn["bias"], drawn["alpha"]
    return {
        **drawn,
        "bias": None if bias is None else problem.normal("bias", experts, columns).to(bias),
        "prob": problem.prob() if drawn["prob"] else None,
        "alpha": problem.normal("alpha", experts) if alpha == "each" else alpha,
    }


@kernel_examples()
@given(problem=problems(), activation=st.sampled_from(EVERY), drawn=options)
@example(problem=Problem((17, 33), (0, 1), 2, 24, 64, 5, 0, 1.0), activation=ACTIVATIONS["glu"], drawn=BARE)
def test_activations_forward(problem: Problem, activation: Activation, drawn: dict[str, Any]) -> None:
    columns = activation.inputs * problem.hidden
    arguments = {
        "x": problem.tokens("x", problem.depth),
        "weights": problem.weights("w", columns, problem.depth),
        "offsets": problem.ragged[0],
        "counts": problem.ragged[1],
        "activation": activation,
        "layout": grouped_mlp.INTERLEAVED,
        **keywords(problem, drawn, columns),
    }
    want = reference_mlp.fc1(**arguments)
    assert_equal(grouped_mlp.fc1(out=fresh(want), **arguments), want, problem, ROWS)


@kernel_examples()
@given(problem=problems(), activation=st.sampled_from(EVERY), drawn=options)
@example(problem=Problem((17, 33), (0, 1), 2, 24, 64, 5, 0, 1.0), activation=ACTIVATIONS["srelu"], drawn=BARE)
def test_activations_backward(problem: Problem, activation: Activation, drawn: dict[str, Any]) -> None:
    given_keywords = keywords(problem, drawn, problem.hidden)
    del given_keywords["bias"]
    arguments = {
        "grad": problem.tokens("grad", problem.depth),
        "weights": problem.weights("w", problem.depth, problem.hidden),
        "preactivation": problem.tokens("saved", activation.inputs * problem.hidden),
        "offsets": problem.ragged[0],
        "counts": problem.ragged[1],
        "activation": activation,
        "layout": grouped_mlp.INTERLEAVED,
        **given_keywords,
    }
    want = reference_mlp.fc2_backward(**arguments)
    assert_equal(grouped_mlp.fc2_backward(out=fresh(want), **arguments), want, problem, ROWS)


@kernel_examples()
@given(problem=problems(), drawn=options)
def test_products_that_are_quantised(problem: Problem, drawn: dict[str, Any]) -> None:
    given_keywords = keywords(problem, drawn, problem.hidden)
    del given_keywords["epilogue_input"]
    x, weights = problem.tokens("x", problem.depth), problem.weights("w", problem.hidden, problem.depth)
    want = reference_mlp.matmul_quantize(x, weights, *problem.ragged, **given_keywords)
    got = grouped_mlp.matmul_quantize(x, weights, *problem.ragged, out=fresh(want), **given_keywords)
    assert_equal(got, want, problem, ROWS)
