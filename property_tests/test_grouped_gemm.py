"""Grouped products over ragged experts: each output is one chain of its own operands, whatever else is there."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_numerics.reference import mxfp8, nvfp4, tensor_core
from moe_numerics.reference.contract import SUITE
from moe_numerics.reference.formats import E2M1, E4M3, E5M2
from moe_numerics.reference.grouped_gemm import grouped_dgrad, grouped_matmul, grouped_wgrad
from moe_numerics.reference.quantized import Quantized
from moe_numerics.reference.ragged import Experts


@dataclass
class Case:
    """Random bfloat16 operands for drawn experts; rows that no expert owns hold NaN."""

    experts: Experts
    offsets: list[int]
    counts: list[int]
    x: torch.Tensor
    grad: torch.Tensor
    weights: torch.Tensor

    @property
    def rows(self) -> tuple[list[int], list[int]]:
        return self.offsets, self.counts


@st.composite
def cases(draw: st.DrawFn, features: tuple[int, ...] = (32, 64), alignments: tuple[int, ...] = (1, 16, 32)) -> Case:
    alignment = draw(st.sampled_from(alignments))
    counts = draw(st.lists(st.integers(0, 36), min_size=1, max_size=3))
    offsets = [0]
    for count in counts:
        room = count + draw(st.integers(0, 3))
        offsets.append(offsets[-1] + -(-room // alignment) * alignment)
    capacity = offsets[-1] + draw(st.integers(0, 5))
    k, n = draw(st.sampled_from(features)), draw(st.sampled_from(features))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def values(*shape: int) -> torch.Tensor:
        spread = torch.randint(-6, 7, shape, generator=generator)
        return (torch.randn(shape, generator=generator) * 2.0**spread).bfloat16()

    experts = Experts.from_offsets(offsets, counts, capacity, alignment)
    x, grad = values(capacity, k), values(capacity, n)
    x[~experts.valid_rows()], grad[~experts.valid_rows()] = math.nan, math.nan
    return Case(experts, offsets, counts, x, grad, values(len(counts), n, k))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[a.dtype]
    return a.dtype == b.dtype and torch.equal(a.view(kind), b.contiguous().view(kind))


def owned(case: Case) -> list[tuple[int, int]]:
    """(expert, row) of each row with an owner."""
    return [(e, row) for row, e in enumerate(case.experts.row_expert().tolist()) if e >= 0]


def matmul_of(case: Case, **options: object) -> torch.Tensor:
    return grouped_matmul(case.x, case.weights, *case.rows, alignment=case.experts.alignment, **options)


def dgrad_of(case: Case, **options: object) -> torch.Tensor:
    return grouped_dgrad(case.grad, case.weights, *case.rows, alignment=case.experts.alignment, **options)


def wgrad_of(case: Case, **options: object) -> torch.Tensor:
    return grouped_wgrad(case.grad, case.x, *case.rows, alignment=case.experts.alignment, **options)


@given(cases(features=(8, 24, 40)))
def test_a_row_is_one_chain_of_its_own(case: Case) -> None:
    """Catches a row computed with another expert's weights, from padding, or differently in company."""
    forward, backward = matmul_of(case), dgrad_of(case)
    rows = owned(case)
    for e, row in rows[:: max(1, len(rows) // 4)] + rows[-1:]:
        assert same_bits(forward[row], tensor_core.matmul(case.x[row, None], case.weights[e].t())[0])
        assert same_bits(backward[row], tensor_core.matmul(case.grad[row, None], case.weights[e])[0])
    padding = ~case.experts.valid_rows()
    for result in (forward, backward):
        assert bool((result[padding].view(torch.int32) == 0).all())


@given(cases(features=(8, 24)), st.sampled_from(["sm_90.bf16", "sm_80.bf16"]))
def test_a_weight_gradient_is_one_chain_over_its_rows(case: Case, accumulator: str) -> None:
    """Catches a chain that begins elsewhere than at the expert's first row, includes padding or is split."""
    result = wgrad_of(case, accumulator=accumulator)
    for e, (start, count) in enumerate(zip(case.experts.starts, case.experts.counts, strict=True)):
        part = slice(start, start + count)
        chain = torch.zeros(case.grad.shape[1], case.x.shape[1])
        for first in range(start, start + count, 16):
            rows = slice(first, min(first + 16, start + count))
            chain = tensor_core.matmul(case.grad[rows].t(), case.x[rows], chain, accumulator)
        assert same_bits(result[e], chain)
        exact = case.grad[part].double().t() @ case.x[part].double()
        bound = tensor_core.accumulation_bound(case.grad[part].t(), case.x[part], None, accumulator)
        assert bool(((result[e].double() - exact).abs() <= bound).all())


@given(cases(features=(8, 24)), st.randoms(use_true_random=False))
def test_main_grad_is_added_once(case: Case, random: object) -> None:
    """Catches main_grad as the start of the chain, an untouched expert overwritten, an input changed in place."""
    plain = wgrad_of(case)
    main_grad = torch.randn(plain.shape, generator=torch.Generator().manual_seed(len(case.offsets))) * 8
    main_grad[:, 0] = -0.0
    before = main_grad.clone()
    result = wgrad_of(case, main_grad=main_grad)
    assert same_bits(main_grad, before)
    for e, count in enumerate(case.experts.counts):
        assert same_bits(result[e], main_grad[e] + plain[e] if count else main_grad[e])
        assert count or bool((plain[e].view(torch.int32) == 0).all())


@given(cases(features=(16,), alignments=(1,)), st.data())
def test_permuting_experts_permutes_results(case: Case, data: st.DataObject) -> None:
    """Catches anything carried from one expert to the next."""
    order = data.draw(st.permutations(range(len(case.counts))))
    rows = [list(range(case.offsets[e], case.offsets[e] + case.counts[e])) for e in order]
    offsets = [0]
    for each in rows:
        offsets.append(offsets[-1] + len(each))
    gather = [row for each in rows for row in each]
    moved = grouped_matmul(case.x[gather], case.weights[list(order)], offsets)
    assert same_bits(moved, matmul_of(case)[gather])
    moved = grouped_wgrad(case.grad[gather], case.x[gather], torch.tensor(offsets))
    assert same_bits(moved, wgrad_of(case)[list(order)])


@given(cases(features=(16, 40)), st.booleans())
def test_alpha_bias_and_prob_come_in_this_order(case: Case, rounded: bool) -> None:
    """Catches a bias that is scaled, a fused multiply-add, a prob applied before the bias, a double rounding."""
    generator = torch.Generator().manual_seed(7)
    count, n = case.weights.shape[:2]
    alpha = torch.rand(count, generator=generator) + 0.5
    bias = torch.randn(count, n, generator=generator).bfloat16()
    prob = torch.rand(case.experts.capacity, generator=generator)
    prob[~case.experts.valid_rows()] = math.nan
    dtype = torch.bfloat16 if rounded else torch.float32
    got = matmul_of(case, alpha=alpha, bias=bias, prob=prob, dtype=dtype)
    plain = matmul_of(case)
    for e, row in owned(case):
        want = (plain[row] * alpha[e] + bias[e].float()) * prob[row]
        assert same_bits(got[row], want.to(dtype))
    scaled, plain = dgrad_of(case, alpha=0.75, prob=prob), dgrad_of(case)
    for _, row in owned(case):
        assert same_bits(scaled[row], plain[row] * 0.75 * prob[row])


def quantise_mx(x: torch.Tensor, axis: int, experts: Experts | None = None) -> Quantized:
    return mxfp8.quantize(x, axis, experts=experts)


def quantise_nv(x: torch.Tensor, axis: int, experts: Experts | None = None) -> Quantized:
    return nvfp4.quantize(x, axis, experts=experts)


def quantise_nv_expert(x: torch.Tensor, axis: int, experts: Experts | None = None) -> Quantized:
    return nvfp4.quantize(x, axis, contract=SUITE.replace(amax_scope="expert"), experts=experts)


def quantise_nv_line(x: torch.Tensor, axis: int, experts: Experts | None = None) -> Quantized:
    return nvfp4.quantize(x, axis, experts=experts, row_scaled=True)


QUANTISERS = {
    "mxfp8": quantise_mx,
    "nvfp4": quantise_nv,
    "nvfp4.expert": quantise_nv_expert,
    "nvfp4.line": quantise_nv_line,
}


def plain_values(q: Quantized) -> torch.Tensor:
    """Codes times block scales as bfloat16, without the global scale."""
    return (q.element.decode(q.unpacked_codes()) * q.row_scales()).bfloat16()


def global_scale(left: Quantized, right: Quantized, expert: int, line: int | slice = slice(None)) -> torch.Tensor:
    """What the sum of codes times block scales is multiplied by; `line`: of the left operand."""
    if left.global_amax is None or right.global_amax is None:
        return torch.ones(())
    if left.line_scaled:
        rows, columns = left.global_amax[line], right.global_amax
        product = rows * columns if isinstance(line, int) else rows[:, None] * columns
    else:
        product = left.global_amax.reshape(-1)[expert if left.global_amax.dim() else 0]
        weight_expert = expert if right.global_amax.numel() > 1 else 0
        product = product * right.global_amax.reshape(-1)[weight_expert]
    return product * torch.tensor(1 / (2688 * 2688), dtype=torch.float32)


@given(cases(), st.sampled_from(list(QUANTISERS)))
def test_quantised_operands_are_their_bfloat16_values(case: Case, kind: str) -> None:
    """Catches a scale row of another expert, codes read in the wrong orientation, a wrong global scale."""
    quantise, experts = QUANTISERS[kind], case.experts
    x, grad = quantise(case.x, -1, experts), quantise(case.grad, -1, experts)
    rowwise = [quantise(w, -1) for w in case.weights]
    colwise = [quantise(w, -2) for w in case.weights]
    got = grouped_matmul(x, rowwise, *case.rows, alignment=experts.alignment)
    plain = grouped_matmul(plain_values(x), torch.stack([plain_values(w) for w in rowwise]), *case.rows)
    for e, row in owned(case):
        assert same_bits(got[row], plain[row] * global_scale(x, rowwise[e], e, row))
    got = grouped_dgrad(grad, colwise, *case.rows, alignment=experts.alignment)
    plain = grouped_dgrad(plain_values(grad), torch.stack([plain_values(w) for w in colwise]), *case.rows)
    for e, row in owned(case):
        assert same_bits(got[row], plain[row] * global_scale(grad, colwise[e], e, row))
    x, grad = quantise(case.x, -2, experts), quantise(case.grad, -2, experts)
    got = grouped_wgrad(grad, x, *case.rows, alignment=experts.alignment)
    plain = grouped_wgrad(plain_values(grad), plain_values(x), *case.rows)
    for e in range(len(experts)):
        assert same_bits(got[e], plain[e] * global_scale(grad, x, e))


SCALED = {"mxfp8": "sm_100.mxf8f6f4", "nvfp4": "sm_100.mxf4nvf4"}


@given(cases(), st.sampled_from(list(SCALED)))
def test_block_scaled_accumulators_stay_within_their_bound(case: Case, kind: str) -> None:
    """Catches scales that the tensor core pairs with other rows or blocks than the quantiser made them for."""
    quantise, experts, model = QUANTISERS[kind], case.experts, SCALED[kind]
    x, grad = quantise(case.x, -1, experts), quantise(case.grad, -1, experts)
    weights = [quantise(w, -1) for w in case.weights]
    got = grouped_matmul(x, weights, *case.rows, model, alignment=experts.alignment)
    for e, (start, count) in enumerate(zip(experts.starts, experts.counts, strict=True)):
        part = slice(start, start + count)
        left, right = plain_values(x)[part].double(), plain_values(weights[e]).double().t()
        scale = float(global_scale(x, weights[e], e))
        slack = scale * (left.abs() @ right.abs()) * 2.0**-21
        assert bool(((got[part].double() - scale * (left @ right)).abs() <= slack).all())
    x, grad = quantise(case.x, -2, experts), quantise(case.grad, -2, experts)
    got = grouped_wgrad(grad, x, *case.rows, model, alignment=experts.alignment)
    for e, (start, count) in enumerate(zip(experts.starts, experts.counts, strict=True)):
        part = slice(start, start + count)
        left, right = plain_values(grad)[part].double().t(), plain_values(x)[part].double()
        scale = float(global_scale(grad, x, e))
        slack = scale * (left.abs() @ right.abs()) * 2.0**-21
        assert bool(((got[e].double() - scale * (left @ right)).abs() <= slack).all())


@given(cases(), st.sampled_from([E4M3, E5M2]))
def test_fp8_blocks_are_added_by_float32_fma(case: Case, element: object) -> None:
    """Catches a scaled sum that is rounded twice, a block's scale on its neighbour, a chain across blocks."""
    experts = case.experts
    x = mxfp8.quantize(case.x, -1, element, experts=experts)
    weights = [mxfp8.quantize(w, -1) for w in case.weights]
    got = grouped_matmul(x, weights, *case.rows, "sm_90.e4m3", alignment=experts.alignment)
    for e, (start, count) in enumerate(zip(experts.starts, experts.counts, strict=True)):
        rows = slice(start, start + count)
        total = torch.zeros(count, case.weights.shape[1], dtype=torch.float64)
        for block in range(case.x.shape[1] // 32):
            part = slice(32 * block, 32 * block + 32)
            left, right, name = x.codes[rows, part], weights[e].codes[:, part].t(), element.name.lower()
            sums = tensor_core.matmul(left, right, None, "sm_90.e4m3", a_format=name)
            exponents = x.scales[rows, block].double()[:, None] + weights[e].scales[:, block].double() - 254
            # 14 bits times a power of two plus 24 bits: exact in float64 for these values, then rounded once.
            total = (total + sums.double() * 2.0**exponents).float().double()
        assert same_bits(got[rows], total.float())


def mx(scale: int, code: int) -> Quantized:
    """A row of 32 equal codes under one scale code."""
    codes = torch.full((1, 32), code, dtype=torch.uint8)
    template = mxfp8.quantize(torch.ones(1, 32), -1)
    return Quantized(
        codes, torch.full((1, 1), scale, dtype=torch.uint8), E4M3, template.scale_format, -1, 32, template.experts
    )


@pytest.mark.parametrize(("scale", "code", "fits"), [(3, 1, True), (2, 1, False), (0, 0x38, True), (246, 0x7E, True)])
@pytest.mark.parametrize("side", [0, 1])
def test_the_ends_of_the_scale_range_are_refused(scale: int, code: int, fits: bool, side: int) -> None:
    """Catches values that bfloat16 silently rounds to something else: E4M3's least under the lowest scales."""
    one = mx(127 if scale < 127 else 100, 0x38)
    operands = [mx(scale, code), one] if side == 0 else [one, mx(scale, code)]
    if fits:
        value = float(E4M3.decode(torch.tensor(code, dtype=torch.uint8))) * 2.0 ** (scale - 127)
        assert float(grouped_matmul(operands[0], [operands[1]], [0, 1])) == 32 * value * (
            1 if scale < 127 else 2.0**-27
        )
    else:
        with pytest.raises(ValueError, match=r"code 0x01 under scale code 2 is .*, which bfloat16 does not hold"):
            grouped_matmul(operands[0], [operands[1]], [0, 1])
    with pytest.raises(ValueError, match="which bfloat16 does not hold"):
        grouped_matmul(mx(247, 0x7E), [one], [0, 1])


def test_scales_without_a_float32_product_are_refused() -> None:
    """Catches an infinite or vanished scale in the FP8 path; a zero block may have any scale, 0xFF is NaN."""
    with pytest.raises(ValueError, match=r"has the scale 2\^254, which float32 does not hold"):
        grouped_matmul(mx(254, 0x38), [mx(254, 0x38)], [0, 1], None, "sm_90.e4m3")
    with pytest.raises(ValueError, match=r"has the scale 2\^-254, which float32 does not hold"):
        grouped_matmul(mx(0, 0x38), [mx(0, 0x38)], [0, 1], None, "sm_90.e4m3")
    assert float(grouped_matmul(mx(0, 0), [mx(0, 0x38)], [0, 1], None, "sm_90.e4m3")) == 0.0
    for accumulator in ("sm_90.e4m3", "sm_90.bf16", "sm_100.mxf8f6f4"):
        assert math.isnan(float(grouped_matmul(mx(0xFF, 0), [mx(127, 0x38)], [0, 1], None, accumulator)))


def test_nothing_to_do() -> None:
    """Catches a crash without experts, rows or K."""
    none = torch.zeros(0, 16).bfloat16()
    assert grouped_matmul(none, torch.zeros(0, 8, 16).bfloat16(), [0]).shape == (0, 8)
    assert grouped_matmul(torch.ones(2, 16).bfloat16(), torch.zeros(0, 8, 16).bfloat16(), [0]).tolist() == [[0] * 8] * 2
    assert grouped_dgrad(none, torch.zeros(0, 16, 4).bfloat16(), [0]).shape == (0, 4)
    assert grouped_wgrad(none, none, [0]).shape == (0, 16, 16)
    bias = torch.tensor([[1.0, -2.0]])
    got = grouped_matmul(torch.zeros(1, 0).bfloat16(), torch.zeros(1, 2, 0).bfloat16(), [0, 1], bias=bias)
    assert got.tolist() == [[1.0, -2.0]]


X, W = torch.zeros(4, 32).bfloat16(), torch.zeros(2, 8, 32).bfloat16()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: grouped_matmul(X, W, [0, 4]), "weights for 2 experts: offsets describe 1"),
        (lambda: grouped_matmul(X, W[:, :, :16], [0, 2, 4]), r"x has 32 values to sum and weights\[0\] has 16"),
        (lambda: grouped_matmul(X, [W[0], W[1, :4]], [0, 2, 4]), r"weights\[1\] has shape \[4, 32\]"),
        (lambda: grouped_matmul(X, W[0], [0, 4]), r"expected \[experts, N, K\]"),
        (lambda: grouped_matmul(X, W, [0, 3, 2]), r"offsets\[2\] = 2 is less than offsets\[1\] = 3"),
        (lambda: grouped_matmul(X, W, [0, 2, 5]), r"offsets\[2\] = 5 is past the buffer, which has 4 rows"),
        (lambda: grouped_matmul(X, W, [0, 2, 4], bias=torch.zeros(8)), r"bias has shape \[8\]: expected \[2, 8\]"),
        (lambda: grouped_matmul(X, W, [0, 2, 4], prob=torch.zeros(3)), r"prob is torch.float32 \[3\]"),
        (lambda: grouped_matmul(X, W, [0, 2, 4], dtype=torch.float16), "results are float32 or bfloat16"),
        (lambda: grouped_matmul(X, W, [0, 2, 4], None, "sm_90.f16_f16acc"), "is float16"),
        (lambda: grouped_matmul(X, W, [0, 2, 4], None, "sm_100.mxf8f6f4"), "x and weights.0. do not fit"),
        (lambda: grouped_matmul(X.float() + 1.001, W, [0, 2, 4]), "is no bf16 value"),
        (lambda: grouped_matmul(X.to(torch.uint8), W, [0, 2, 4]), "x is torch.uint8"),
        (lambda: grouped_matmul(mxfp8.quantize(X, -2), W, [0, 2, 4]), "x is quantised column-wise"),
        (
            lambda: grouped_wgrad(X, mxfp8.quantize(X, -2), [0, 2, 4]),
            r"x is quantised for experts that start at \(0,\)",
        ),
        (lambda: grouped_wgrad(X, X[:3], [0, 2, 4]), "x has 3 rows and grad has 4"),
        (lambda: grouped_wgrad(X, X, [0, 4], main_grad=torch.zeros(32, 32)), r"expected float32 \[1, 32, 32\]"),
        (
            lambda: grouped_matmul(mxfp8.quantize(X, -1, E2M1), [mxfp8.quantize(W[0], -1)], [0, 4], None, "sm_90.e4m3"),
            "sm_90.e4m3",
        ),
    ],
)
def test_bad_input_is_named(call: object, message: str) -> None:
    """Catches operands that do not fit each other and are used all the same."""
    with pytest.raises(ValueError, match=message):
        call()
