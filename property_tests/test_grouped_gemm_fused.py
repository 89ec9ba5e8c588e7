"""The fused grouped GEMMs and MLP launches give the bits of their references, whatever the distribution of tokens.

Faults these tests catch: a partial tile that writes the next expert's rows, tokens of the next expert in a weight
gradient, NaN in padding that reaches a sum or an amax, a 32x1 block that crosses experts, a K tail that is not zero, a
wrong order of accumulation, of dprob or of dbias, an expert without rows that is left unwritten, a tile that is worked
on twice or never, arguments that a launch would silently misread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from kernel_runs import active_device, kernel_examples, thorough
from moe_numerics.fused import grouped_gemm, grouped_mlp
from moe_numerics.fused.gemm_problem import Tiling
from moe_numerics.reference import grouped_gemm as reference_gemm
from moe_numerics.reference import grouped_mlp as reference_mlp
from moe_numerics.reference.formats import E4M3
from moe_numerics.reference.ragged import Experts

from moe_numerics.devices import FILL_BYTE

BF16 = torch.bfloat16
NAN, INF = float("nan"), float("inf")
DEVICE = "cuda" if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9 else "cpu"

Results = dict[str, torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def machine() -> Iterator[None]:
    """Launches go to a Hopper GPU where there is one, else to a virtual one."""
    with active_device("cuda" if DEVICE == "cuda" else "virtual:sm_90a"):
        yield


@dataclass(frozen=True)
class Problem:
    """Ragged tokens with weights of two layers; `counts` are the experts' valid rows."""

    counts: tuple[int, ...]
    room: tuple[int, ...]
    tail: int
    depth: int
    hidden: int
    seed: int
    spread: int
    special: float
    drawn: dict[str, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def capacity(self) -> int:
        return sum(self.counts) + sum(self.room) + self.tail

    @property
    def ragged(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Offsets and counts."""
        bounds = [0]
        for count, room in zip(self.counts, self.room, strict=True):
            bounds.append(bounds[-1] + count + room)
        return (
            torch.tensor(bounds, dtype=torch.int32, device=DEVICE),
            torch.tensor(self.counts, dtype=torch.int32, device=DEVICE),
        )

    @property
    def experts(self) -> Experts:
        return Experts.from_offsets(*self.ragged, capacity=self.capacity)

    def normal(self, name: str, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Normal values, the same whenever they are asked for by one name."""
        generator = torch.Generator().manual_seed(self.seed * 1009 + sum(map(ord, name)))
        return (torch.randn(shape, generator=generator) * scale).to(DEVICE)

    def tokens(self, name: str, columns: int, padding: float = NAN) -> torch.Tensor:
        """bfloat16 tokens with exponents spread over 2 * spread binades, a special value, and padding."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        shifts = torch.randint(-self.spread, self.spread + 1, (self.capacity, columns), generator=generator)
        values = (self.normal(name, self.capacity, columns) * torch.exp2(shifts.float()).to(DEVICE)).to(BF16)
        if self.capacity:
            values[self.seed % self.capacity, self.seed % columns] = self.special
        values[~self.experts.valid_rows(DEVICE)] = padding
        return values

    def weights(self, name: str, rows: int, columns: int) -> torch.Tensor:
        return self.normal(name, len(self.counts), rows, columns, scale=self.depth**-0.5).to(BF16)

    def prob(self) -> torch.Tensor:
        values = self.normal("prob", self.capacity)
        values[~self.experts.valid_rows(DEVICE)] = NAN
        return values


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Few experts, empty ones and counts around the sizes of tiles and blocks among them."""
    edges = st.sampled_from((0, 1, 15, 16, 17, 31, 32, 33, 127, 128, 129))
    counts = draw(st.lists(st.one_of(st.integers(0, 70), edges), min_size=1, max_size=3))
    room = draw(st.lists(st.integers(0, 3), min_size=len(counts), max_size=len(counts)))
    return Problem(
        tuple(counts),
        tuple(room),
        # At least one row: a buffer without any launches nothing.
        draw(st.integers(1, 5)),
        8 * draw(st.integers(1, 18)),
        32 * draw(st.integers(1, 5)),
        draw(st.integers(0, 2**16)),
        draw(st.sampled_from((0, 12))),
        draw(st.sampled_from((1.0, 0.0, NAN, INF, -INF))),
    )


TALL = Problem((130, 0, 257), (0, 2, 0), 3, 40, 64, 6, 2, INF)
"""Experts of more than one tile of rows, the last of them nearly empty."""


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    size = dtype.itemsize
    for length in shape:
        size *= length
    return torch.full((size,), FILL_BYTE, dtype=torch.uint8, device=DEVICE).view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def assert_equal(
    got: Results, want: Results, problem: Problem, token_results: frozenset[str], alignment: int = 1
) -> None:
    """Owned rows have the reference's bits, NaN by class; rows without an owner are as they were."""
    assert set(got) == set(want)
    experts = Experts.from_offsets(*problem.ragged, capacity=problem.capacity, alignment=alignment)
    valid = experts.valid_rows(DEVICE)
    for name, result in got.items():
        owned = torch.ones(result.shape[0], dtype=torch.bool, device=DEVICE)
        if name in token_results:
            owned = valid
        elif name == "scales_colwise":
            owned = experts.owned_colwise_rows(32, DEVICE)
        a, b = result[owned], want[name][owned]
        differ = bits(a) != bits(b)
        if a.is_floating_point():
            differ &= ~(a.isnan() & b.isnan())
        assert not differ.any(), f"{name}: {int(differ.sum())} of {differ.numel()} differ, first {differ.nonzero()[0]}"
        untouched = result[~owned].contiguous().view(torch.uint8) == FILL_BYTE
        assert untouched.all(), f"{name}: {int((~untouched).sum())} bytes written that belong to nobody"


def fresh(want: Results) -> Results:
    """Buffers for results of these shapes, filled with a pattern."""
    return {name: poisoned(tuple(result.shape), result.dtype) for name, result in want.items()}


OUT = frozenset({"out"})


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
    "strides": ({"x": torch.zeros((64, 8), dtype=BF16).t()}, "expected a contiguous tensor"),
}


@pytest.mark.skipif(DEVICE != "cpu", reason="the same checks wherever the tensors are")
@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused_before_a_launch(name: str) -> None:
    changes, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        _call(**changes)()


def test_another_accumulator_is_refused() -> None:
    contract = reference_mlp.SUITE.replace(accumulator="sm_90.e4m3")
    with pytest.raises(ValueError, match=r"accumulator is 'sm_90.e4m3'"):
        _call(contract=contract)()
