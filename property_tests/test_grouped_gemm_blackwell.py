"""The grouped GEMMs of sm_100a give the bits of their references, with operands in bfloat16, MXFP8 and NVFP4.

The kernels run on the virtual GPU, in orders of warps and blocks that are drawn, and it must find nothing to object to.
Faults these tests catch: scales of another line or block than the tensor core multiplies, codes and scales of the next
expert in a sum, NaN in rows that nobody owns, a partial tile that writes the next expert's rows, a global amax that is
multiplied in another order, an accumulator that is read too early or not emptied, a stage that is refilled too early.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from gemm_problems import BF16, DEVICE, INF, NAN, OUT, Problem, Results, assert_equal, bits, fresh, problems
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_runs import active_device, thorough
from moe_numerics.fused import grouped_gemm, grouped_mlp
from moe_numerics.fused.gemm_problem import Tiling
from moe_numerics.fused.quantized import Quantized
from moe_numerics.reference import grouped_gemm as reference_gemm
from moe_numerics.reference import grouped_mlp as reference_mlp
from moe_numerics.reference import quantized as reference
from moe_numerics.reference.contract import SUITE
from moe_numerics.reference.formats import E4M3, E5M2
from moe_numerics.reference.grouped_mlp import Step

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="these kernels run on the virtual GPU")

TARGET = "virtual:sm_100a"
ACCUMULATORS = {"bf16": "sm_100.bf16", "mxfp8": "sm_100.mxf8f6f4", "nvfp4": "sm_100.mxf4nvf4"}
SCHEDULES = ("fast", 1, 2, 3)
PRODUCTS = ("matmul", "dgrad", "wgrad")


@contextmanager
def blackwell(schedule: str | int = "fast") -> Iterator[None]:
    """Launches go to a virtual GPU, whose checkers find nothing."""
    with active_device(TARGET, schedule) as device:
        yield
        assert device._gpu.findings == []  # type: ignore[union-attr]


@st.composite
def scaled_problems(draw: st.DrawFn) -> Problem:
    """Problems whose sizes MXFP8 and NVFP4 operands may have."""
    drawn = draw(problems())
    sizes = 32 * draw(st.integers(1, 9)), 32 * draw(st.integers(1, 4))
    return Problem(drawn.counts, drawn.room, drawn.tail, *sizes, drawn.seed, drawn.spread, drawn.special)


def choices(form: str) -> Step:
    return Step(form, layout=grouped_mlp.INTERLEAVED, grad_element=E5M2, stochastic=False)


def poisoned(operand: reference.Quantized) -> Quantized:
    """The operand as kernels take it; 0xFF in codes and scales that no expert owns."""
    given_, experts, block = Quantized.of(operand), operand.experts, operand.block
    codes, scales = given_.codes.clone(), given_.scales.clone()
    blocks = experts.owned_colwise_rows(block)
    if operand.transposed:
        codes[:, ~blocks.repeat_interleave(block // 2)] = 0xFF
        scales[:, ~blocks] = 0xFF
    else:
        codes[~experts.valid_rows()] = 0xFF
        scales[~(experts.valid_rows() if operand.axis == -1 else blocks)] = 0xFF
    return Quantized(
        codes, scales, given_.element, given_.scale_format, given_.axis, given_.global_amax, given_.global_factor
    )


def as_given(operand: Any) -> Any:
    """An operand of the reference as the kernels take it."""
    if isinstance(operand, list):
        return Quantized.of(operand) if isinstance(operand[0], reference.Quantized) else torch.stack(operand)
    return poisoned(operand) if isinstance(operand, reference.Quantized) else operand


def arguments(product: str, form: str, problem: Problem) -> dict[str, Any]:
    """Both factors, offsets and counts of a product, as the reference takes them."""
    offsets, counts = problem.ragged
    ragged: dict[str, Any] = {"offsets": offsets, "counts": counts}
    # A NaN or Inf is in every NVFP4 result through the global amax.
    special = problem if form != "nvfp4" else Problem(*_finite(problem))
    step, experts = choices(form), problem.experts
    name, other = ("x", "rowwise") if product == "matmul" else ("grad", "colwise")
    tokens = reference_mlp.copies(special.tokens(name, problem.depth), experts, step, gradient=name == "grad")
    if product != "wgrad":
        shape = (problem.hidden, problem.depth) if product == "matmul" else (problem.depth, problem.hidden)
        weights = reference_mlp.weight_copies(problem.weights("w", *shape), step)
        return {name: tokens.rowwise, "weights": [getattr(each, other) for each in weights], **ragged}
    x = reference_mlp.copies(special.tokens("x", problem.hidden), experts, step).colwise
    if form == "nvfp4":
        blocks = experts.blocks(16)
        ragged["offsets"] = torch.tensor([*blocks.starts, blocks.capacity], dtype=torch.int32)
        ragged["counts"] = torch.tensor(blocks.counts, dtype=torch.int32)
        ragged["alignment"] = 16
    return {"grad": tokens.colwise, "x": x, **ragged}


def _finite(problem: Problem) -> tuple[Any, ...]:
    return problem.counts, problem.room, problem.tail, problem.depth, problem.hidden, problem.seed, 2, 1.0


TALL = Problem((130, 0, 257), (0, 2, 0), 3, 288, 128, 6, 2, INF)
"""Experts of more than one tile of rows, and more than one tile of depth in every format."""


def check(product: str, form: str, problem: Problem, schedule: str | int = "fast", **options: Any) -> None:
    """A product of the kernels against the reference's."""
    given_ = arguments(product, form, problem)
    if product == "wgrad":
        options["main_grad"] = problem.normal("main", len(problem.counts), problem.depth, problem.hidden)
    else:
        options["prob"] = problem.prob()
    options["alpha"] = problem.normal("alpha", len(problem.counts))
    accumulator = ACCUMULATORS[form]
    want = {
        "out": getattr(reference_gemm, f"grouped_{product}")(**given_, accumulator=accumulator, **options),
    }
    out = fresh(want)
    with blackwell(schedule):
        getattr(grouped_gemm, f"grouped_{product}")(
            **{name: as_given(value) for name, value in given_.items()},
            accumulator=accumulator,
            out=out["out"],
            **options,
        )
    assert_equal(out, want, problem, frozenset() if product == "wgrad" else OUT)


def few() -> settings:
    """A few examples; each launches kernels, and each product of each format is one compilation."""
    assert settings.default is not None
    return settings(max_examples=max(2, settings.default.max_examples // 8))


@pytest.mark.parametrize("form", ACCUMULATORS)
@few()
@given(product=st.sampled_from(PRODUCTS), problem=scaled_problems(), schedule=st.sampled_from(SCHEDULES))
@example(product="wgrad", problem=TALL, schedule=1)
def test_products_have_the_bits_of_the_reference(
    form: str, product: str, problem: Problem, schedule: str | int
) -> None:
    check(product, form, problem, schedule)


@pytest.mark.parametrize(
    ("product", "form"), [("dgrad", "mxfp8"), *([("matmul", "nvfp4"), ("wgrad", "bf16")] if thorough() else [])]
)
def test_a_wide_result(product: str, form: str) -> None:
    """Tiles of 256 columns, a ring that is gone round more than once, and a block of threads with several tiles."""
    check(product, form, Problem((270, 0, 7), (1, 0, 2), 3, 544, 160, 4, 2, 1.0))


def test_first_layer_of_mxfp8_operands() -> None:
    """Fault: an epilogue that is given other rows or columns than its thread's."""
    problem = Problem((40, 0, 130, 5), (2, 0, 0, 3), 4, 96, 64, 5, 3, NAN)
    step = choices("mxfp8")
    offsets, counts = problem.ragged
    x = reference_mlp.copies(problem.tokens("x", problem.depth), problem.experts, step).rowwise
    weights = [each.rowwise for each in reference_mlp.weight_copies(problem.weights("w", 128, problem.depth), step)]
    keywords: dict[str, Any] = {
        "prob": problem.prob(),
        "element": E4M3,
        "layout": grouped_mlp.INTERLEAVED,
        "contract": SUITE.replace(accumulator=ACCUMULATORS["mxfp8"]),
    }
    want = reference_mlp.fc1(x, weights, offsets, counts, **keywords)
    with blackwell():
        got = grouped_mlp.fc1(as_given(x), as_given(weights), offsets, counts, out=fresh(want), **keywords)
    assert_equal(got, want, problem, frozenset(set(want) - {"amax", "scales_colwise"}))


@pytest.mark.skipif(not thorough(), reason="compiles a dozen kernels")
@pytest.mark.parametrize("form", ACCUMULATORS)
def test_a_step_has_the_bits_of_the_reference(form: str) -> None:
    problem = Problem((60, 0, 130, 33), (3, 2, 0, 4), 5, 64, 96, 9, 2, 1.0)
    offsets, counts = problem.ragged
    given_: dict[str, Any] = {
        "x": problem.tokens("x", 64),
        "weights1": problem.weights("w1", 192, 64),
        "weights2": problem.weights("w2", 64, 96),
        "grad": problem.tokens("grad", 64),
        "offsets": offsets,
        "counts": counts,
        "prob": problem.prob(),
    }
    contract = SUITE.replace(accumulator=ACCUMULATORS[form])
    step = Step(form, layout=grouped_mlp.INTERLEAVED, grad_element=E5M2, seed=77, contract=contract)
    want = reference_mlp.step(**given_, choices=step)
    with blackwell():
        got = grouped_mlp.step(**given_, choices=step)
    valid = problem.experts.valid_rows()
    assert set(got) == set(want)
    for name in ("preactivation", "out", "dactivation", "dprob", "dx", "dweights1", "dweights2", "dbias"):
        rows = valid if len(want[name]) == len(valid) else torch.ones(len(want[name]), dtype=torch.bool)
        assert torch.equal(bits(got[name][rows]), bits(want[name][rows])), name


@pytest.mark.skipif(not thorough(), reason="compiles for both architectures")
def test_bfloat16_products_of_scaled_operands() -> None:
    """With an accumulator of bfloat16 codes and scales are multiplied first, as on Hopper: the same bits."""
    problem = Problem((33, 70), (0, 1), 2, 64, 64, 8, 2, 1.0)
    given_ = arguments("matmul", "mxfp8", problem)
    kernel = {name: as_given(value) for name, value in given_.items()}
    results: list[Results] = []
    for target in ("virtual:sm_90a", TARGET):
        out = fresh({"out": torch.zeros((problem.capacity, problem.hidden))})
        with active_device(target):
            grouped_gemm.grouped_matmul(**kernel, accumulator="sm_90.bf16", out=out["out"])
        results.append(out)
    assert torch.equal(bits(results[0]["out"]), bits(results[1]["out"]))


def _fc1(**changes: Any) -> None:
    given_ = arguments("matmul", "mxfp8", Problem((3, 5), (0, 0), 1, 64, 64, 8, 2, 1.0))
    kernel = {name: as_given(value) for name, value in given_.items()} | {"accumulator": "sm_100.mxf8f6f4"}
    with blackwell():
        grouped_gemm.grouped_matmul(**{**kernel, **changes})


def nvfp4_weights() -> Any:
    return as_given(arguments("matmul", "nvfp4", Problem((3, 5), (0, 0), 1, 64, 64, 8, 2, 1.0))["weights"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accumulator": "sm_100.f8f6f4"}, "accumulator is 'sm_100.f8f6f4': the kernels of sm_100a accumulate as"),
        ({"accumulator": "sm_100.mxf4nvf4"}, "does not fit accumulator sm_100.mxf4nvf4: it needs e2m1 codes with e4m3"),
        ({"weights": nvfp4_weights}, "does not fit accumulator sm_100.mxf8f6f4: it needs e4m3 or e5m2"),
        ({"x": torch.zeros((9, 64), dtype=BF16)}, "does not fit accumulator sm_100.mxf8f6f4"),
        ({"tiling": Tiling(cluster=2)}, "the kernels of sm_100a need clusters of 1"),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _fc1(**{name: value() if callable(value) else value for name, value in changes.items()})


def test_hopper_has_no_block_scaled_products() -> None:
    given_ = arguments("matmul", "mxfp8", Problem((3, 5), (0, 0), 1, 64, 64, 8, 2, 1.0))
    kernel = {name: as_given(value) for name, value in given_.items()}
    with active_device("virtual:sm_90a"), pytest.raises(ValueError, match="the kernels of sm_90a accumulate as"):
        grouped_gemm.grouped_matmul(**kernel, accumulator="sm_100.mxf8f6f4")


def test_rows_do_not_depend_on_other_experts() -> None:
    problem = Problem((40, 130, 0, 70), (0, 0, 0, 0), 1, 96, 64, 5, 3, 1.0)
    given_ = {name: as_given(value) for name, value in arguments("matmul", "mxfp8", problem).items()}
    with blackwell():
        before = grouped_gemm.grouped_matmul(**given_, accumulator="sm_100.mxf8f6f4")
        for rows in (slice(0, 40), slice(170, None)):
            given_["x"].codes[rows] = 0x7F
            given_["x"].scales[rows] = 0xFF
        after = grouped_gemm.grouped_matmul(**given_, accumulator="sm_100.mxf8f6f4")
    assert torch.equal(bits(before[40:170]), bits(after[40:170]))
    assert bool(after[:40].isnan().all())
