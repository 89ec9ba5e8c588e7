"""Products on sm_100a of operands whose scales are swizzled already have the bits of those with compact scales.

The reference reads the swizzled bytes too, and its result must not depend on how scales are stored. What fills up the
tiles is 0xFF, a NaN in both scale formats, and so is every scale that no expert owns.
Faults these tests catch: a tile stride of the expert instead of the buffer, lines and blocks swapped, a block of the
tile in which the expert does not begin, scales of the next expert's weights, padding that is multiplied.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from gemm_problems import DEVICE, INF, NAN, OUT, Problem, assert_equal, fresh
from hypothesis import example, given
from hypothesis import strategies as st
from kernel_runs import active_device, thorough
from moe_numerics.fused import grouped_gemm, grouped_mlp
from moe_numerics.fused.quantized import Quantized
from moe_numerics.reference import grouped_gemm as reference_gemm
from moe_numerics.reference import grouped_mlp as reference_mlp
from moe_numerics.reference import mxfp8, nvfp4
from moe_numerics.reference import quantized as reference
from moe_numerics.reference.contract import SUITE
from moe_numerics.reference.ragged import Experts
from moe_numerics.reference.scale_layout import with_swizzled_scales
from test_grouped_gemm_blackwell import (
    ACCUMULATORS,
    PRODUCTS,
    SCHEDULES,
    TARGET,
    arguments,
    blackwell,
    choices,
    few,
    scaled_problems,
)

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="these kernels run on the virtual GPU")

POISON = 0xFF


def poisoned(operand: reference.Quantized) -> reference.Quantized:
    """The operand with scales of NaN wherever no expert owns a block."""
    experts = operand.experts
    owned = experts.valid_rows() if operand.axis == -1 else experts.owned_colwise_rows(operand.block)
    scales = operand.scales.clone()
    (scales.t() if operand.transposed else scales)[~owned] = POISON
    return replace(operand, scales=scales)


def swizzled(operand: Any) -> Any:
    """An argument of the reference whose scales, if it has any, are swizzled and poisoned."""
    if isinstance(operand, list):
        return [swizzled(each) for each in operand]
    if isinstance(operand, reference.Quantized):
        return with_swizzled_scales(poisoned(operand), POISON)
    return operand


def as_given(operand: Any) -> Any:
    """An argument of the reference as the kernels take it."""
    return Quantized.of(operand) if isinstance(operand, reference.Quantized | list) else operand


BOTH = ("grad", "x", "weights")


TALL = Problem((130, 0, 257), (0, 2, 0), 3, 160, 128, 6, 2, INF)
WIDE = Problem((33, 0, 150), (1, 0, 2), 3, 288, 160, 7, 2, NAN)


@few()
@given(
    form=st.sampled_from(("mxfp8", "nvfp4")),
    product=st.sampled_from(PRODUCTS),
    problem=scaled_problems(),
    schedule=st.sampled_from(SCHEDULES),
    which=st.sampled_from((BOTH, ("weights", "grad"), ("x",)) if thorough() else (BOTH,)),
)
@example(form="mxfp8", product="wgrad", problem=TALL, schedule=1, which=BOTH)
@example(form="nvfp4", product="wgrad", problem=TALL, schedule=2, which=BOTH)
@example(form="mxfp8", product="dgrad", problem=WIDE, schedule="fast", which=BOTH)
def test_products_of_swizzled_operands(
    form: str, product: str, problem: Problem, schedule: str | int, which: tuple[str, ...]
) -> None:
    """Both operands, or one beside compact scales."""
    compact = arguments(product, form, problem)
    given_ = {name: swizzled(value) if name in which else value for name, value in compact.items()}
    function, accumulator = f"grouped_{product}", ACCUMULATORS[form]
    want = {"out": getattr(reference_gemm, function)(**compact, accumulator=accumulator)}
    read = {"out": getattr(reference_gemm, function)(**given_, accumulator=accumulator)}
    token_results = frozenset() if product == "wgrad" else OUT
    out = fresh(want)
    with blackwell(schedule):
        kernel = {name: as_given(value) for name, value in given_.items()}
        getattr(grouped_gemm, function)(**kernel, accumulator=accumulator, out=out["out"])
    assert_equal(out, want, problem, token_results)
    assert torch.equal(read["out"].nan_to_num(1.5), want["out"].nan_to_num(1.5))


@pytest.mark.parametrize("form", ["mxfp8", "nvfp4"] if thorough() else ["nvfp4"])
def test_layers_of_swizzled_operands(form: str) -> None:
    """The first layer with swizzled weights alone, and the backward of the second, whose weights are column-wise."""
    problem = Problem((40, 0, 130, 5), (2, 0, 0, 3), 4, 160, 64, 5, 2, 1.0)
    step, experts = choices(form), problem.experts
    ragged = (*problem.ragged, problem.prob())
    keywords: dict[str, Any] = {
        "layout": grouped_mlp.INTERLEAVED,
        "contract": SUITE.replace(accumulator=ACCUMULATORS[form]),
    }
    x = reference_mlp.copies(problem.tokens("x", problem.depth), experts, step).rowwise
    weights = [each.rowwise for each in reference_mlp.weight_copies(problem.weights("w", 128, problem.depth), step)]
    grad = reference_mlp.copies(problem.tokens("grad", problem.depth), experts, step, gradient=True).rowwise
    others = [each.colwise for each in reference_mlp.weight_copies(problem.weights("v", problem.depth, 64), step)]
    saved = problem.tokens("saved", 128)
    forward = reference_mlp.fc1(x, weights, *ragged, **keywords)
    backward = reference_mlp.fc2_backward(grad, others, saved, *ragged, **keywords)
    x, weights, grad, others = (as_given(each) for each in (x, *map(swizzled, (weights, grad, others))))
    with blackwell():
        got = grouped_mlp.fc1(x, weights, *ragged, out=fresh(forward), **keywords)
        assert_equal(got, forward, problem, frozenset(set(forward) - {"amax"}))
        got = grouped_mlp.fc2_backward(grad, others, saved, *ragged, out=fresh(backward), **keywords)
        assert_equal(got, backward, problem, frozenset(set(backward) - {"amax", "dbias"}))


@pytest.mark.parametrize("form", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("axis", [-1, -2])
@given(counts=st.lists(st.integers(0, 70), min_size=1, max_size=3), alignment=st.sampled_from((1, 16, 32)))
def test_the_reference_reads_swizzled_scales(form: str, axis: int, counts: list[int], alignment: int) -> None:
    """Values are those of compact scales, whatever fills up the tiles."""
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + -(-count // alignment) * alignment)
    experts = Experts.from_offsets(offsets, counts, offsets[-1] + 3, alignment)
    x = torch.randn(experts.capacity, 96, generator=torch.Generator().manual_seed(sum(counts)))
    make = mxfp8.quantize if form == "mxfp8" else nvfp4.quantize
    compact = make(x, axis, experts=experts)
    stored = with_swizzled_scales(compact, POISON)
    assert torch.equal(stored.compact_scales, compact.scales)
    assert torch.equal(stored.dequantize(), compact.dequantize())
    assert Quantized.of(stored).swizzled


COMPACT = arguments("matmul", "mxfp8", Problem((3, 5), (0, 0), 1, 64, 64, 8, 2, 1.0))
SUMMED = arguments("wgrad", "mxfp8", Problem((3, 40), (0, 0), 1, 64, 64, 8, 2, 1.0))


def _resized(operand: Any, difference: int) -> Quantized:
    """The operand with swizzled scales of a wrong number of bytes."""
    stored = as_given(swizzled(operand))
    size = stored.scales.shape[-1] + difference
    return replace(stored, scales=torch.zeros((*stored.scales.shape[:-1], size), dtype=torch.uint8))


@pytest.mark.parametrize(
    ("product", "changes", "message"),
    [
        ("matmul", {"x": _resized(COMPACT["x"], 512)}, r"x scales has shape \[1024\]: expected \[512\]"),
        ("matmul", {"x": _resized(COMPACT["x"], -1)}, r"x scales has shape \[511\]: expected \[512\]"),
        (
            "matmul",
            {"weights": _resized(COMPACT["weights"], 512)},
            r"weights scales has shape \[2, 1024\]: expected \[2, 512\]",
        ),
        (
            "wgrad",
            {"grad": _resized(SUMMED["grad"], 512)},
            "grad scales have 1024 bytes in the 128x4-swizzled layout: expected 512 for 44 rows of 2 experts",
        ),
        (
            "matmul",
            {"x": replace(Quantized.of(COMPACT["x"]), swizzled=True)},
            r"x scales has shape \[9, 2\]: expected \[512\]",
        ),
        (
            "matmul",
            {"x": replace(as_given(swizzled(COMPACT["x"])), swizzled=False)},
            r"x scales has shape \[512\]: expected \[9, 2\]",
        ),
    ],
)
def test_scales_of_another_size_or_layout_are_refused(product: str, changes: dict[str, Any], message: str) -> None:
    given_ = {name: as_given(value) for name, value in (COMPACT if product == "matmul" else SUMMED).items()}
    with blackwell(), pytest.raises(ValueError, match=message):
        getattr(grouped_gemm, f"grouped_{product}")(**{**given_, **changes}, accumulator="sm_100.mxf8f6f4")


@pytest.mark.parametrize("target", ["virtual:sm_90a", TARGET])
def test_products_in_bfloat16_refuse_swizzled_scales(target: str) -> None:
    given_ = {name: as_given(value) for name, value in COMPACT.items()}
    name = target.removeprefix("virtual:")
    message = f"scales are in the 128x4-swizzled layout of block-scaled tensor cores: products in bfloat16 for {name}"
    for which in ("x", "weights"):
        changed = {**given_, which: as_given(swizzled(COMPACT[which]))}
        with active_device(target), pytest.raises(ValueError, match=f"{which} {message}"):
            grouped_gemm.grouped_matmul(**changed, accumulator="sm_90.bf16")


def test_experts_in_different_layouts_are_refused() -> None:
    first, *rest = COMPACT["weights"]
    with pytest.raises(ValueError, match="the experts' matrices have formats"):
        Quantized.of([swizzled(first), *rest])


def test_the_reference_refuses_another_size() -> None:
    stored = swizzled(COMPACT["x"])
    wrong = replace(stored, scales=stored.scales[:-1])
    with pytest.raises(ValueError, match=r"swizzled scales have dtype torch\.uint8 and 511 bytes"):
        reference_gemm.grouped_matmul(**{**COMPACT, "x": wrong}, accumulator="sm_100.mxf8f6f4")
