"""The fused grouped GEMMs and MLP launches give the bits of their references, whatever the distribution of tokens.

Faults these tests catch: a partial tile that writes the next expert's rows, tokens of the next expert in a weight
gradient, NaN in padding that reaches a sum or an amax, a 32x1 block that crosses experts, a K tail that is not zero, a
wrong order of accumulation, of dprob or of dbias, an expert without rows that is left unwritten, a tile that is worked
on twice or never, arguments that a launch would silently misread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gemm_problems import DEVICE, INF, NAN, OUT, TALL, Problem, assert_equal, bits, fresh, hopper, problems
from hypothesis import example, given
from kernel_runs import kernel_examples, thorough
from moe_numerics.fused import gemm_launch, grouped_gemm, grouped_mlp
from moe_numerics.fused.gemm_problem import Tiling
from moe_numerics.reference import grouped_gemm as reference_gemm
from moe_numerics.reference import grouped_mlp as reference_mlp
from moe_numerics.reference.formats import E4M3
from moe_numerics.reference.ragged import Experts

BF16 = torch.bfloat16


@pytest.fixture(scope="module", autouse=True)
def machine() -> Iterator[None]:
    with hopper():
        yield


@kernel_examples()
@given(problem=problems())
@example(problem=TALL)
def test_rows_times_weights(problem: Problem) -> None:
    offsets, counts = problem.ragged
    x, weights = problem.tokens("x", problem.depth), problem.weights("w", problem.hidden, problem.depth)
    arguments: dict[str, Any] = {
        "alpha": problem.normal("alpha", len(problem.counts)),
        "bias": problem.normal("bias", len(problem.counts), problem.hidden),
        "prob": problem.prob(),
    }
    want = {"out": reference_gemm.grouped_matmul(x, weights, offsets, counts, **arguments)}
    out = fresh(want)
    grouped_gemm.grouped_matmul(x, weights, offsets, counts, out=out["out"], **arguments)
    assert_equal(out, want, problem, OUT)


@kernel_examples()
@given(problem=problems())
def test_gradients_of_rows(problem: Problem) -> None:
    offsets, counts = problem.ragged
    grad, weights = problem.tokens("x", problem.depth), problem.weights("w", problem.depth, problem.hidden)
    want = {"out": reference_gemm.grouped_dgrad(grad, weights, offsets, counts, dtype=BF16)}
    out = fresh(want)
    grouped_gemm.grouped_dgrad(grad, weights, offsets, counts, dtype=BF16, out=out["out"])
    assert_equal(out, want, problem, OUT)


@kernel_examples()
@given(problem=problems())
def test_gradients_of_weights(problem: Problem) -> None:
    offsets, counts = problem.ragged
    grad, x = problem.tokens("grad", problem.depth), problem.tokens("x", problem.hidden)
    main_grad = problem.normal("main", len(problem.counts), problem.depth, problem.hidden)
    main_grad[:, 0] = -0.0
    want = {"out": reference_gemm.grouped_wgrad(grad, x, offsets, counts, main_grad=main_grad)}
    out = fresh(want)
    grouped_gemm.grouped_wgrad(grad, x, offsets, counts, main_grad=main_grad, out=out["out"])
    assert_equal(out, want, problem, frozenset())


FORWARD_ROWS = frozenset({"preactivation", "out", "codes_rowwise", "scales_rowwise", "codes_colwise"})
BACKWARD_ROWS = FORWARD_ROWS | {"dactivation", "dprob"}
CHOICES: dict[str, dict[str, Any]] = {"mxfp8": {"element": E4M3, "epilogue_input": "bfloat16", "rotated_amax": True}}
if thorough():
    CHOICES |= {"bf16": {}, "mxfp8.accumulator": {"element": E4M3}}


@pytest.mark.parametrize("choices", CHOICES)
@kernel_examples()
@given(problem=problems())
@example(problem=TALL)
def test_first_layer_with_activation(choices: str, problem: Problem) -> None:
    offsets, counts = problem.ragged
    x, weights = problem.tokens("x", problem.depth), problem.weights("w", 2 * problem.hidden, problem.depth)
    bias = problem.normal("bias", len(problem.counts), 2 * problem.hidden).to(BF16)
    arguments = (x, weights, offsets, counts, problem.prob())
    keywords = {"bias": bias, "layout": grouped_mlp.INTERLEAVED, **CHOICES[choices]}
    want = reference_mlp.fc1(*arguments, **keywords)
    got = grouped_mlp.fc1(*arguments, out=fresh(want), **keywords)
    assert_equal(got, want, problem, FORWARD_ROWS)


@pytest.mark.parametrize("choices", CHOICES)
@kernel_examples()
@given(problem=problems())
@example(problem=TALL)
def test_second_layer_backward_through_activation(choices: str, problem: Problem) -> None:
    offsets, counts = problem.ragged
    grad, weights = problem.tokens("grad", problem.depth), problem.weights("w", problem.depth, problem.hidden)
    saved = problem.tokens("saved", 2 * problem.hidden)
    arguments = (grad, weights, saved, offsets, counts, problem.prob())
    keywords = {"alpha": 0.75, "layout": grouped_mlp.INTERLEAVED, **CHOICES[choices]}
    want = reference_mlp.fc2_backward(*arguments, **keywords)
    got = grouped_mlp.fc2_backward(*arguments, out=fresh(want), **keywords)
    assert_equal(got, want, problem, BACKWARD_ROWS)


@kernel_examples()
@given(problem=problems())
def test_a_tiling_changes_no_bit(problem: Problem) -> None:
    """One cluster's tile against two blocks' with other columns: nothing depends on who computes what."""
    offsets, counts = problem.ragged
    grad, x = problem.tokens("grad", problem.depth), problem.tokens("x", problem.hidden)
    main_grad = problem.normal("main", len(problem.counts), problem.depth, problem.hidden)
    first, second = (
        grouped_gemm.grouped_wgrad(grad, x, offsets, counts, main_grad=main_grad, tiling=tiling)
        for tiling in (Tiling(), Tiling(columns=128, stages=3, cluster=1, group=1))
    )
    assert torch.equal(bits(first), bits(second))


def test_rows_do_not_depend_on_other_experts() -> None:
    problem = Problem((40, 130, 0, 70), (0, 0, 0, 0), 1, 72, 64, 5, 3, 1.0)
    offsets, counts = problem.ragged
    x, weights = problem.tokens("x", problem.depth), problem.weights("w", 2 * problem.hidden, problem.depth)
    keywords: dict[str, Any] = {"layout": grouped_mlp.INTERLEAVED, **CHOICES["mxfp8"]}
    bias = torch.zeros((4, 2 * problem.hidden), dtype=BF16, device=DEVICE)
    before = grouped_mlp.fc1(x, weights, offsets, counts, problem.prob(), bias=bias, **keywords)
    changed = x.clone()
    changed[:40] = NAN
    changed[170:] = INF
    after = grouped_mlp.fc1(changed, weights, offsets, counts, problem.prob(), bias=bias, **keywords)
    for name in FORWARD_ROWS & set(before):
        assert torch.equal(bits(before[name][40:170]), bits(after[name][40:170])), name
    assert torch.equal(bits(before["amax"][1:2]), bits(after["amax"][1:2]))


def test_aligned_offsets_have_dense_scales() -> None:
    """Where every expert starts at a multiple of 32 rows, column-wise scales have no spare rows."""
    problem = Problem((40, 0, 130, 5), (24, 0, 30, 27), 4, 72, 64, 8, 3, NAN)
    offsets, counts = problem.ragged
    arguments = (
        problem.tokens("x", problem.depth),
        problem.weights("w", 2 * problem.hidden, problem.depth),
        offsets,
        counts,
    )
    keywords: dict[str, Any] = {"element": E4M3, "layout": grouped_mlp.INTERLEAVED, "alignment": 32}
    want = reference_mlp.fc1(*arguments, **keywords)
    got = grouped_mlp.fc1(*arguments, out=fresh(want), **keywords)
    assert_equal(got, want, problem, FORWARD_ROWS, 32)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a Hopper GPU")
def test_a_captured_graph_replays_other_distributions() -> None:
    capacity, depth, hidden, experts = 512, 128, 96, 6
    generator = torch.Generator().manual_seed(3)
    x = torch.randn((capacity, depth), generator=generator).to(DEVICE, BF16)
    weights = torch.randn((experts, 2 * hidden, depth), generator=generator).to(DEVICE, BF16)
    offsets = torch.zeros(experts + 1, dtype=torch.int32, device=DEVICE)
    keywords: dict[str, Any] = {"element": E4M3, "layout": grouped_mlp.INTERLEAVED}
    grouped_mlp.fc1(x, weights, offsets, **keywords)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = grouped_mlp.fc1(x, weights, offsets, **keywords)
    for _ in range(12):
        cuts = torch.randint(0, capacity + 1, (experts,), generator=generator).sort().values
        offsets[1:] = cuts.to(DEVICE)
        graph.replay()
        eager = grouped_mlp.fc1(x, weights, offsets, **keywords)
        owned = Experts.from_offsets(offsets, capacity=capacity)
        for name, result in captured.items():
            rows = owned.valid_rows(DEVICE)
            if name == "scales_colwise":
                rows = owned.owned_colwise_rows(32, DEVICE)
            elif name == "amax":
                rows = torch.ones(experts, dtype=torch.bool, device=DEVICE)
            assert torch.equal(bits(result[rows]), bits(eager[name][rows])), name


def test_a_buffer_without_rows() -> None:
    empty = torch.zeros((0, 64), dtype=BF16, device=DEVICE)
    offsets = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    main_grad = torch.full((2, 64, 64), -0.0, device=DEVICE)
    weights = torch.zeros((2, 64, 64), dtype=BF16, device=DEVICE)
    assert grouped_gemm.grouped_matmul(empty, weights, offsets).shape == (0, 64)
    assert not grouped_gemm.grouped_wgrad(empty, empty, offsets).any()
    kept = grouped_gemm.grouped_wgrad(empty, empty, offsets, main_grad=main_grad)
    assert torch.equal(bits(kept), bits(main_grad))
    assert not grouped_mlp.fc1(empty, weights, offsets)["amax"].any()
    backward = grouped_mlp.fc2_backward(empty, weights, empty.new_zeros((0, 128)), offsets)
    assert not backward["amax"].any()
    assert not backward["dbias"].any()


def _call(**changes: Any) -> Callable[[], object]:
    given_arguments: dict[str, Any] = {
        "x": torch.zeros((8, 64), dtype=BF16),
        "weights": torch.zeros((2, 64, 64), dtype=BF16),
        "offsets": torch.tensor([0, 4, 8], dtype=torch.int32),
    }
    return lambda: grouped_mlp.fc1(**(given_arguments | changes))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "depth": (
        {"x": torch.zeros((8, 60), dtype=BF16), "weights": torch.zeros((2, 64, 60), dtype=BF16)},
        "x has 60 columns: expected a positive multiple of 8",
    ),
    "sum": ({"x": torch.zeros((8, 56), dtype=BF16)}, "x has 56 columns: expected 64"),
    "columns": ({"weights": torch.zeros((2, 32, 64), dtype=BF16)}, "32 columns: expected a positive multiple of 64"),
    "experts": ({"weights": torch.zeros((3, 64, 64), dtype=BF16)}, "weights has shape"),
    "dtype": ({"x": torch.zeros((8, 64))}, "x has dtype torch.float32: expected torch.bfloat16"),
    "offsets": ({"offsets": torch.tensor([0.0, 4.0, 8.0])}, "offsets have dtype torch.float32"),
    "prob": ({"prob": torch.zeros(7)}, "prob has shape"),
    "bias": ({"bias": torch.zeros((2, 32), dtype=BF16)}, "bias has shape"),
    "alpha": ({"alpha": torch.zeros(3)}, "alpha has shape"),
    "layout": ({"layout": "halves"}, "layout is 'halves': expected 'interleaved:32'"),
    "epilogue": ({"epilogue_input": "float16"}, "epilogue_input is 'float16'"),
    "out": ({"out": {}}, "out lacks 'preactivation'"),
    "many experts": (
        {
            "offsets": torch.zeros(65537, dtype=torch.int32),
            "weights": torch.zeros((65536, 64, 64), dtype=BF16, device="meta"),
        },
        "offsets describe 65536 experts: these kernels take at most 65535",
    ),
    "strides": ({"x": torch.zeros((64, 8), dtype=BF16).t()}, "expected a contiguous tensor"),
}


@pytest.mark.skipif(DEVICE != "cpu", reason="the same checks wherever the tensors are")
@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused_before_a_launch(name: str) -> None:
    changes, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        _call(**changes)()


@pytest.mark.skipif(DEVICE != "cpu", reason="the same checks wherever the tensors are")
def test_an_older_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_launch, "current_target", lambda: "sm_80")
    with pytest.raises(ValueError, match="the target is sm_80: these kernels need sm_90a"):
        _call()()


def test_another_accumulator_is_refused() -> None:
    contract = reference_mlp.SUITE.replace(accumulator="sm_90.e4m3")
    with pytest.raises(ValueError, match=r"accumulator is 'sm_90.e4m3'"):
        _call(contract=contract)()
