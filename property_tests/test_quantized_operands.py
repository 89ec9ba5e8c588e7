"""Grouped GEMMs of quantised operands give the bits of the reference, and no operand is read wrong in silence.

Faults these tests catch: a scale of the wrong block, row or expert, codes of an expert's neighbour, nibbles or
transposed blocks in the wrong order, a padding row that is read, a global amax left out or multiplied in another order,
a value that bfloat16 does not hold and that is rounded, scales of another layout, shape or format that are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gemm_problems import DEVICE, OUT, TALL, Problem, assert_equal, bits, fresh, hopper, problems
from hypothesis import example, given
from hypothesis import strategies as st
from kernel_runs import kernel_examples, thorough
from moe_numerics.fused import grouped_gemm, grouped_mlp
from moe_numerics.fused.dequantize import dequantize_tokens
from moe_numerics.fused.gemm_operands import block_offsets
from moe_numerics.fused.grouped_gemm import Quantized
from moe_numerics.reference import grouped_gemm as reference_gemm
from moe_numerics.reference import grouped_mlp as reference_mlp
from moe_numerics.reference import hadamard, mxfp8, nvfp4
from moe_numerics.reference.contract import SUITE
from moe_numerics.reference.formats import E2M1, E4M3, E5M2, E8M0
from moe_numerics.reference.quantized import Quantized as ReferenceQuantized
from moe_numerics.reference.ragged import Experts

BF16 = torch.bfloat16
PER_EXPERT = SUITE.replace(amax_scope="expert")


@pytest.fixture(scope="module", autouse=True)
def machine() -> Iterator[None]:
    with hopper():
        yield


Quantise = Callable[[torch.Tensor, int, Experts | None], ReferenceQuantized]

FORMATS: dict[str, Quantise] = {
    "mxfp8_e4m3": lambda x, axis, experts: mxfp8.quantize(x, axis, E4M3, experts=experts),
    "mxfp8_e5m2": lambda x, axis, experts: mxfp8.quantize(x, axis, E5M2, experts=experts),
    "nvfp4": lambda x, axis, experts: nvfp4.quantize(x, axis, experts=experts),
    "nvfp4.expert": lambda x, axis, experts: nvfp4.quantize(x, axis, contract=PER_EXPERT, experts=experts),
}
SPECIALS = (1.0, 0.0, float("nan"))
formats = st.sampled_from(list(FORMATS))


@st.composite
def whole_blocks(draw: st.DrawFn) -> Problem:
    """Problems whose sizes are multiples of every scale block and whose values stay inside the range of scales."""
    drawn = draw(problems())
    return Problem(
        drawn.counts,
        drawn.room,
        drawn.tail,
        32 * draw(st.integers(1, 4)),
        # The narrow tiles, which compile quicker; thorough runs have both.
        drawn.hidden if thorough() else 32 * draw(st.integers(1, 2)),
        drawn.seed,
        drawn.spread,
        draw(st.sampled_from(SPECIALS)),
    )


MIXED = Problem(TALL.counts, TALL.room, TALL.tail, 96, 64, 6, 2, 1.0)


def of_weights(form: str, weights: torch.Tensor, axis: int) -> list[ReferenceQuantized]:
    if form.startswith("nvfp4"):
        return [nvfp4.quantize(weight, axis, block2d=True) for weight in weights]
    return [FORMATS[form](weight, axis, None) for weight in weights]


@kernel_examples()
@given(problem=whole_blocks(), form=formats, other=formats, alpha=st.sampled_from((None, 0.75, "each")))
@example(problem=MIXED, form="nvfp4.expert", other="mxfp8_e4m3", alpha="each")
def test_rows_times_weights(problem: Problem, form: str, other: str, alpha: Any) -> None:
    offsets, counts = problem.ragged
    if alpha == "each":
        alpha = problem.normal("alpha", len(problem.counts))
    x = FORMATS[form](problem.tokens("x", problem.depth), -1, problem.experts)
    weights = of_weights(other, problem.weights("w", problem.hidden, problem.depth), -1)
    want = {"out": reference_gemm.grouped_matmul(x, weights, offsets, counts, alpha=alpha)}
    out = fresh(want)
    own = Quantized.of(x), Quantized.of(weights)
    grouped_gemm.grouped_matmul(*own, offsets, counts, alpha=alpha, out=out["out"])
    assert_equal(out, want, problem, OUT)


@kernel_examples()
@given(problem=whole_blocks(), form=formats, other=formats)
@example(problem=MIXED, form="mxfp8_e5m2", other="nvfp4")
def test_gradients_of_rows(problem: Problem, form: str, other: str) -> None:
    offsets, counts = problem.ragged
    grad = FORMATS[form](problem.tokens("x", problem.depth), -1, problem.experts)
    weights = of_weights(other, problem.weights("w", problem.depth, problem.hidden), -2)
    want = {"out": reference_gemm.grouped_dgrad(grad, weights, offsets, counts)}
    out = fresh(want)
    grouped_gemm.grouped_dgrad(Quantized.of(grad), Quantized.of(weights), offsets, counts, out=out["out"])
    assert_equal(out, want, problem, OUT)


@kernel_examples()
@given(problem=whole_blocks(), form=formats, other=st.sampled_from([*FORMATS, None]))
@example(problem=MIXED, form="nvfp4", other=None)
@example(problem=MIXED, form="mxfp8_e4m3", other="nvfp4.expert")
def test_gradients_of_weights(problem: Problem, form: str, other: str | None) -> None:
    """Column-wise copies of both operands, or of one beside bfloat16."""
    offsets, counts = problem.ragged
    grad = FORMATS[form](problem.tokens("grad", problem.depth), -2, problem.experts)
    x: Any = problem.tokens("x", problem.hidden)
    own = x
    if other is not None:
        x = FORMATS[other](x, -2, problem.experts)
        own = Quantized.of(x)
    want = {"out": reference_gemm.grouped_wgrad(grad, x, offsets, counts)}
    out = fresh(want)
    grouped_gemm.grouped_wgrad(Quantized.of(grad), own, offsets, counts, out=out["out"])
    assert_equal(out, want, problem, frozenset())


@kernel_examples()
@given(problem=whole_blocks())
@example(problem=MIXED)
def test_gradients_of_weights_of_rotated_copies(problem: Problem) -> None:
    """Rotated copies describe whole blocks of 16 rows; their offsets are computed on the device."""
    experts = problem.experts
    blocks = experts.blocks(16)
    grad, x = (
        nvfp4.quantize(hadamard.rotate(tokens, -2, experts=experts), -2, experts=blocks)
        for tokens in (problem.tokens("grad", problem.depth), problem.tokens("x", problem.hidden))
    )
    offsets, counts = block_offsets(*problem.ragged, problem.capacity)
    assert offsets.tolist() == [*blocks.starts, blocks.capacity]
    assert counts.tolist() == list(blocks.counts)
    want = {"out": reference_gemm.grouped_wgrad(grad, x, offsets, counts, alignment=16)}
    out = fresh(want)
    grouped_gemm.grouped_wgrad(Quantized.of(grad), Quantized.of(x), offsets, counts, alignment=16, out=out["out"])
    assert_equal(out, want, problem, frozenset())


def test_aligned_offsets_have_dense_scales() -> None:
    problem = Problem((40, 0, 130, 5), (24, 0, 30, 27), 4, 64, 32, 8, 3, 1.0)
    offsets, counts = problem.ragged
    experts = Experts.from_offsets(offsets, counts, problem.capacity, 32)
    for form in FORMATS:
        grad, x = (
            FORMATS[form](problem.tokens(name, columns), -2, experts)
            for name, columns in (("grad", problem.depth), ("x", problem.hidden))
        )
        want = {"out": reference_gemm.grouped_wgrad(grad, x, offsets, counts, alignment=32)}
        out = fresh(want)
        grouped_gemm.grouped_wgrad(Quantized.of(grad), Quantized.of(x), offsets, counts, alignment=32, out=out["out"])
        assert_equal(out, want, problem, frozenset())


ROWS = frozenset({"preactivation", "out", "codes_rowwise", "scales_rowwise", "codes_colwise", "dactivation", "dprob"})


@pytest.mark.skipif(not thorough(), reason="a training step has such layers in the quick profile")
@kernel_examples()
@given(problem=whole_blocks(), form=formats)
def test_layers_of_quantised_operands(problem: Problem, form: str) -> None:
    """The epilogues see the accumulators times the global scales."""
    offsets, counts = problem.ragged
    keywords: dict[str, Any] = {"layout": grouped_mlp.INTERLEAVED, "element": E4M3}
    tokens = FORMATS[form](problem.tokens("x", problem.depth), -1, problem.experts)
    weights = of_weights(form, problem.weights("w", 2 * problem.hidden, problem.depth), -1)
    rest = (offsets, counts, problem.prob())
    want = reference_mlp.fc1(tokens, weights, *rest, **keywords)
    got = grouped_mlp.fc1(Quantized.of(tokens), Quantized.of(weights), *rest, out=fresh(want), **keywords)
    assert_equal(got, want, problem, ROWS)
    weights = of_weights(form, problem.weights("v", problem.depth, problem.hidden), -2)
    rest = (problem.tokens("saved", 2 * problem.hidden), *rest)
    want = reference_mlp.fc2_backward(tokens, weights, *rest, **keywords)
    got = grouped_mlp.fc2_backward(Quantized.of(tokens), Quantized.of(weights), *rest, out=fresh(want), **keywords)
    assert_equal(got, want, problem, ROWS)


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda element: element.name)
@pytest.mark.parametrize("axis", [-1, -2])
def test_every_code_under_every_scale(element: Any, axis: int) -> None:
    """A product that bfloat16 holds is exact, any other is NaN."""
    every = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    # Codes along one dimension and scales along the other.
    codes, scales = every.repeat(256, 1), every.view(-1, 1).repeat(1, 8)
    spread = scales[:, :1]
    if axis == -2:
        codes, scales = codes.t().contiguous(), scales.t().contiguous()
        spread = scales[:1]
    offsets = torch.tensor([0, 256], dtype=torch.int32, device=DEVICE)
    got = dequantize_tokens(Quantized.mxfp8(codes, scales, axis, element), 256, offsets, None, 32)
    exact = element.decode(codes, torch.float64) * E8M0.decode(spread, torch.float64)
    rounded = exact.float().to(BF16)
    held = rounded.double() == exact
    assert (got.isnan() == ~held).all()
    assert torch.equal(bits(got[held]), bits(rounded[held]))


def test_every_e2m1_code_under_every_scale() -> None:
    every = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    codes = every.repeat_interleave(2).repeat(256, 1)
    scales = every.view(-1, 1).repeat(1, codes.shape[1] // 8)
    offsets = torch.tensor([0, 256], dtype=torch.int32, device=DEVICE)
    operand = Quantized.nvfp4(codes, scales, torch.ones(1, device=DEVICE), -1)
    got = dequantize_tokens(operand, 256, offsets, None, 1)
    unpacked = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    want = E2M1.decode(unpacked) * E4M3.decode(scales[:, :1])
    assert torch.equal(bits(got[~want.isnan()]), bits(want.to(BF16)[~want.isnan()]))
    assert (got.isnan() == want.isnan()).all()


def test_a_value_that_bfloat16_does_not_hold_shows_in_the_result() -> None:
    """The reference refuses it; the kernel, which cannot, gives NaN for the rows that it reaches."""
    codes = torch.full((2, 32), 0x39, dtype=torch.uint8, device=DEVICE)
    codes[0, 5] = 0x01
    scales = torch.tensor([[0], [127]], dtype=torch.uint8, device=DEVICE)
    offsets = torch.tensor([0, 2], dtype=torch.int32, device=DEVICE)
    weights = torch.ones((1, 32, 32), dtype=BF16, device=DEVICE)
    x = ReferenceQuantized(codes, scales, E4M3, E8M0, -1, 32, Experts.single(2))
    with pytest.raises(ValueError, match="which bfloat16 does not hold"):
        reference_gemm.grouped_matmul(x, weights, offsets)
    out = grouped_gemm.grouped_matmul(Quantized.of(x), weights, offsets)
    assert out[0].isnan().all()
    assert (out[1] == 36.0).all()


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a Hopper GPU")
def test_a_captured_graph_replays_other_distributions() -> None:
    problem = Problem((60, 0, 200), (4, 0, 0), 8, 64, 96, 1, 3, 1.0)
    x, grad = (
        Quantized.of(mxfp8.quantize(problem.tokens(name, 96), axis, E4M3, experts=problem.experts))
        for name, axis in (("x", -1), ("grad", -2))
    )
    weights = Quantized.of(of_weights("nvfp4", problem.weights("w", 64, 96), -1))
    offsets, counts = problem.ragged

    def run() -> list[torch.Tensor]:
        return [
            grouped_gemm.grouped_matmul(x, weights, offsets, counts),
            grouped_gemm.grouped_wgrad(grad, grad, offsets, counts),
        ]

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for cuts in ([0, 0, 264, 272], [0, 100, 101, 200], [0, 32, 33, 34]):
        offsets.copy_(torch.tensor(cuts, dtype=torch.int32))
        counts.copy_(offsets[1:] - offsets[:-1])
        graph.replay()
        eager = run()
        assert torch.equal(bits(captured[0][: cuts[-1]]), bits(eager[0][: cuts[-1]]))
        assert torch.equal(bits(captured[1]), bits(eager[1]))


def _operand(**changes: Any) -> Quantized:
    fields: dict[str, Any] = {
        "codes": torch.zeros((8, 64), dtype=torch.uint8),
        "scales": torch.zeros((8, 2), dtype=torch.uint8),
        "element": E4M3,
        "scale_format": E8M0,
        "axis": -1,
    }
    return Quantized(**(fields | changes))


def _fp4(codes: tuple[int, ...], scales: tuple[int, ...], axis: int = -1, amax: int = 1) -> Quantized:
    made = (torch.zeros(shape, dtype=torch.uint8) for shape in (codes, scales))
    return Quantized.nvfp4(*made, torch.zeros(amax), axis)


BAD: dict[str, tuple[Callable[[], Quantized], str]] = {
    "e2m1 with e8m0": (lambda: _operand(element=E2M1), "element is E2M1 with E8M0 scales: expected"),
    "e4m3 with e4m3": (lambda: _operand(scale_format=E4M3), "element is E4M3 with E4M3 scales: expected"),
    "axis": (lambda: _operand(axis=0), "axis is 0: expected -1"),
    "no amax": (lambda: _operand(element=E2M1, scale_format=E4M3), "global_amax is None: NVFP4 has one"),
    "column-wise": (lambda: _operand(axis=-2), "x is quantised column-wise .*: this product sums along the other axis"),
    "dtype of codes": (lambda: _operand(codes=torch.zeros((8, 64))), "x codes has dtype torch.float32"),
    "dtype of scales": (lambda: _operand(scales=torch.zeros((8, 2))), "x scales has dtype torch.float32"),
    "shape of scales": (
        lambda: _operand(scales=torch.zeros((8, 4), dtype=torch.uint8)),
        r"x scales has shape \[8, 4\]: expected \[8, 2\]",
    ),
    "transposed scales": (
        lambda: _operand(scales=torch.zeros((2, 8), dtype=torch.uint8).t()),
        "x scales has strides .*: expected a contiguous tensor",
    ),
    "swizzled scales": (lambda: _operand(scales=torch.zeros(512, dtype=torch.uint8)), "x scales has shape"),
    "columns": (
        lambda: _operand(codes=torch.zeros((8, 48), dtype=torch.uint8)),
        "x has 48 columns: expected a positive multiple of 32",
    ),
    "sum": (
        lambda: _operand(codes=torch.zeros((8, 32), dtype=torch.uint8), scales=torch.zeros((8, 1), dtype=torch.uint8)),
        "x has 32 columns: expected 64, which weights",
    ),
    "alignment": (
        lambda: _operand(codes=torch.zeros(8 * 64 + 1, dtype=torch.uint8)[1:].view(8, 64)),
        "x codes starts at address .*: expected a multiple of 16 bytes",
    ),
    "amax": (lambda: _fp4((8, 32), (8, 4), amax=3), r"x global_amax is torch.float32 \[3\]"),
    "nvfp4 scales": (lambda: _fp4((8, 32), (8, 2)), r"x scales has shape \[8, 2\]: expected \[8, 4\]"),
}


@pytest.mark.skipif(DEVICE != "cpu", reason="the same checks wherever the tensors are")
@pytest.mark.parametrize("name", BAD)
def test_bad_operands_are_refused_before_a_launch(name: str) -> None:
    make, message = BAD[name]
    offsets = torch.tensor([0, 4, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        grouped_gemm.grouped_matmul(make(), torch.zeros((2, 32, 64), dtype=BF16), offsets)


@pytest.mark.skipif(DEVICE != "cpu", reason="the same checks wherever the tensors are")
def test_column_wise_scales_of_another_alignment_are_refused() -> None:
    """Scales of offsets in multiples of 32 have no spare rows: they must not be read as if they had."""
    offsets = torch.tensor([0, 32, 64], dtype=torch.int32)
    dense = _operand(
        axis=-2, codes=torch.zeros((64, 64), dtype=torch.uint8), scales=torch.zeros((2, 64), dtype=torch.uint8)
    )
    grouped_gemm.grouped_wgrad(dense, dense, offsets, alignment=32)
    with pytest.raises(ValueError, match="grad scales have 2 rows: expected 4 for 64 rows of 2 experts"):
        grouped_gemm.grouped_wgrad(dense, dense, offsets)
    short = _fp4((64, 16), (64, 2), -2)
    with pytest.raises(ValueError, match="x has 32 rows: expected 96, as the other operand has 64"):
        grouped_gemm.grouped_wgrad(torch.zeros((64, 64), dtype=BF16), short, offsets)


def test_matrices_that_do_not_belong_together_are_refused() -> None:
    weight = torch.zeros((32, 32), dtype=BF16)
    first, second = (mxfp8.quantize(weight, -1, element) for element in (E4M3, E5M2))
    with pytest.raises(ValueError, match="the experts' matrices have formats"):
        Quantized.of([first, second])
    with pytest.raises(ValueError, match="no matrices were given"):
        Quantized.of([])
    with pytest.raises(ValueError, match="global_amax has an entry for each row"):
        Quantized.of(nvfp4.quantize(weight, -1, row_scaled=True))
