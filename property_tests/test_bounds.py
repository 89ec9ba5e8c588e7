"""Derived bounds enclose what correct kernels compute, in any order of operations, and are not much wider."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_runs import kernel_examples, space, thorough
from moe_numerics.reference.contract import SUITE
from moe_numerics.reference.ragged import Experts
from moe_numerics.reference.tensor_core import accumulation_bound, matmul

from moe_numerics import activation_bounds, bounds
from moe_numerics.activation_errors import FLOAT32_TABLE, FUNCTIONS, TABLE, measure
from moe_numerics.bounded import enclose
from moe_numerics.bounds import Arithmetic, BoundError, Enclosure
from moe_numerics.cases import Case
from moe_numerics.drawing import draw_cases
from moe_numerics.paths import find_path
from moe_numerics.running import expected_outputs
from moe_numerics.strategies import cases

EXACT = Arithmetic("exact")
MEASURED = tuple(FUNCTIONS) if thorough() else ("silu", "gelu'", "tanh_srelu'", "situ_gate")
ENCLOSED = (
    "swiglu.fwd.bf16",
    "geglu_erf.bwd.bf16",
    "srelu.bwd.bf16",
    "clamped_swiglu.bwd.bf16",
    "situglu.fwd.bf16",
    "swiglu.bwd.bf16.bias",
    "grouped_gemm.matmul.bf16.bias",
    "grouped_gemm.wgrad.bf16.main_grad",
    "grouped_mlp.fc1.swiglu.fwd.mxfp8_e4m3",
    "grouped_mlp.fc2.swiglu.bwd.mxfp8_e4m3",
)

finite = st.floats(-(2.0**20), 2.0**20, width=32)


def _inside(enclosure: Enclosure, got: torch.Tensor) -> torch.Tensor:
    """bool: inside, or the same NaN, or not decided."""
    close = (got.double() - enclosure.value).abs() <= enclosure.error
    return close | (got.isnan() & enclosure.value.isnan()) | ~enclosure.decided


@pytest.mark.parametrize("name", MEASURED)
def test_the_table_of_activation_errors_is_what_is_measured(name: str) -> None:
    """A changed polynomial or a hand-edited constant: the exact functions give the table's numbers again."""
    found = measure(name, "exact")
    assert (found.relative, found.weighted, found.tiny) == TABLE[name]["exact"]


@pytest.mark.parametrize("path_id", ENCLOSED)
@kernel_examples()
@given(data=st.data())
def test_the_reference_is_inside_its_bounds(path_id: str, data: st.DataObject) -> None:
    """A rounding step left out of a bound: the reference's own outputs would be outside."""
    path = find_path(path_id)
    case: Case = data.draw(cases(space(path, paddings=(True, False))))
    contract = path.contract("suite")
    expected = expected_outputs(path, case, contract)
    enclosed = enclose(path, case, contract, EXACT)
    for name, enclosure in enclosed.floats.items():
        if name not in expected:
            continue
        owned = path.output(name).owned(path.experts(case))
        owned = owned.view(-1, *[1] * (expected[name].dim() - 1)) if owned.dim() == 1 else owned
        outside = ~_inside(enclosure, expected[name]) & owned
        assert not bool(outside.any()), f"{name}: {int(outside.sum())} elements, first {outside.nonzero()[0].tolist()}"


def test_bounds_are_sharp() -> None:
    """A bound that explains anything: the largest error of an output must come near its bound."""
    path = find_path("swiglu.fwd.bf16")
    plain = replace(space(path), kinds=("gaussian",), allow_specials=False)
    largest = {"out": 0.0, "amax": 0.0}
    for case in draw_cases(3, 5, plain):
        expected, enclosed = expected_outputs(path, case, SUITE), enclose(path, case, SUITE, EXACT)
        for name, enclosure in enclosed.floats.items():
            positive = enclosure.decided & (enclosure.error > 0)
            ratio = ((expected[name].double() - enclosure.value).abs() / enclosure.error)[positive]
            largest[name] = max(largest[name], float(ratio.max()) if ratio.numel() else 0.0)
    assert largest["out"] > 0.9
    assert largest["amax"] > 0.05


@given(st.lists(finite, min_size=2, max_size=4), st.sampled_from(["float32", "bfloat16"]))
def test_products_in_any_order_are_enclosed(factors: list[float], intermediate: str) -> None:
    """A rounding of an intermediate product forgotten, or an order assumed."""
    rounded = torch.bfloat16 if intermediate == "bfloat16" else torch.float32
    exact = [Enclosure.exact(torch.tensor([factor])) for factor in factors]
    enclosure = bounds.product(Arithmetic("exact", intermediate), *exact)
    for order in itertools.permutations(factors):
        result = torch.tensor(order[0], dtype=torch.float32)
        for factor in order[1:]:
            result = (result * torch.tensor(factor, dtype=torch.float32)).to(rounded).float()
        assert bool(_inside(enclosure, result))


@given(st.lists(finite, min_size=1, max_size=40), st.randoms())
def test_sums_in_any_order_are_enclosed(terms: list[float], order: object) -> None:
    """Atomics and shuffles add in an order that nobody knows."""
    values = torch.tensor([terms])
    enclosure = bounds.row_sum(Enclosure.exact(values))
    shuffled = list(terms)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    total = torch.zeros(())
    for term in shuffled:
        total = total + torch.tensor(term)
    assert bool(_inside(enclosure, total.reshape(1)))


@given(st.floats(allow_nan=False, allow_infinity=False, width=32))
def test_rounding_moves_at_most_half_a_spacing(value: float) -> None:
    """A spacing that is off by one binade, or wrong for subnormals."""
    x = torch.tensor([value], dtype=torch.float32)
    enclosure = Enclosure.exact(x).converted(mantissa_bits=7)
    assert bool(_inside(enclosure, x.to(torch.bfloat16)))
    assert float(bounds.half_spacing(x.double().abs(), 7)) <= max(abs(value) * 2.0**-8, 2.0**-134)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "relu'"])
def test_an_operands_error_moves_a_function_by_no_more(name: str) -> None:
    """A curvature above the constant: derivatives (or, of a derivative, values) would move by more than is added."""
    x = torch.linspace(-30.0, 30.0, 400_001, dtype=torch.float64)
    slope = FUNCTIONS[name if name.endswith("'") else f"{name}'"].oracle(x)
    steepest = ((slope[1:] - slope[:-1]) / (x[1:] - x[:-1])).abs()
    # relu' jumps, and with it the second derivative of what is masked below zero.
    away = (x[1:] * x[:-1] > 0) if name.rstrip("'") == "relu" else torch.ones_like(steepest, dtype=torch.bool)
    assert float(steepest[away].max()) <= activation_bounds.CURVATURE * (1 + 1e-9)


@given(st.sampled_from(list(FLOAT32_TABLE)), finite, st.floats(0.0, 2.0**-4), st.floats(-1.0, 1.0))
def test_an_enclosed_operand_encloses_the_result(name: str, x: float, error: float, where: float) -> None:
    """A bound that forgets the operand's error, its kink, or what the function's own error there is."""
    operand = Enclosure(torch.tensor([x]).double(), torch.tensor([error]).double(), torch.tensor([True]))
    actual = torch.tensor([x + where * error]).float()
    wide = actual.double()
    if not bool((wide - operand.value).abs() <= operand.error):
        return
    enclosure = activation_bounds._apply(name, operand, EXACT)
    assert bool(_inside(enclosure, FUNCTIONS[name].exact(actual)))


def test_what_is_not_decided() -> None:
    """An Inf, or a product that may overflow in some order, explained or held against a kernel."""
    huge, tiny = torch.tensor([1e30]), torch.tensor([1e-30])
    parts = [Enclosure.exact(x) for x in (huge, huge, tiny)]
    assert not bool(bounds.product(EXACT, *parts).decided)
    assert not bool(Enclosure.exact(torch.tensor([float("inf")])).decided)
    nan = bounds.product(EXACT, Enclosure.exact(torch.tensor([float("nan")])), parts[2])
    assert bool(nan.decided)
    assert bool(nan.value.isnan())


def test_a_masked_gradient_is_exactly_zero() -> None:
    """A bound that lets a little of a masked gradient through."""
    tensors = {
        "grad": torch.ones((1, 32), dtype=torch.bfloat16),
        "gate_up": torch.full((1, 64), 9.0, dtype=torch.bfloat16),
    }
    activation = find_path("clamped_swiglu.bwd.bf16").operation.activation  # type: ignore[attr-defined]
    grad, x = (activation_bounds.given(tensors, name, Experts.single(1), EXACT) for name in ("grad", "gate_up"))
    gradient, _ = activation_bounds.backward(activation, grad, x, "halves", EXACT, [])
    assert bool((gradient.value == 0).all())
    assert bool((gradient.error == 0).all())


@pytest.mark.parametrize("model", ["sm_90.bf16", "sm_90.e4m3", "sm_100.f8f6f4"])
def test_the_factor_of_a_shape_covers_every_operand(model: str) -> None:
    """A factor below what a tensor core really loses."""
    generator = torch.Generator().manual_seed(7)
    k = 512
    format_of = "bf16" if model.endswith("bf16") else "e4m3"
    a, b = (torch.randint(-8, 9, (8, k), generator=generator).float() / 4 for _ in range(2))
    result = matmul(a, b.t(), model=model, a_format=format_of, b_format=format_of)
    magnitudes = a.double().abs() @ b.double().abs().t()
    error = (result.double() - a.double() @ b.double().t()).abs()
    factor = bounds.accumulation_factor(model, k)
    assert bool((error <= factor * magnitudes).all())
    # Everything after the first product lies just below what the accumulator's place lets through.
    left, right = torch.full((1, k), 1.875), torch.full((1, k), 4.0 if format_of == "e4m3" else 2.0**-10)
    left[0, 0] = right[0, 0] = 256.0
    lost = (
        matmul(left, right.t(), model=model, a_format=format_of, b_format=format_of).double()
        - left.double() @ right.double().t()
    )
    assert float(lost.abs() / (left @ right.t())) <= factor
    assert bool((error <= accumulation_bound(a, b.t(), model=model, a_format=format_of, b_format=format_of)).all())


def test_what_has_no_bound_says_so() -> None:
    """A bound made up for what was never measured."""
    path = find_path("geglu_erf.fwd.bf16")
    (case,) = draw_cases(1, 0, space(path))
    with pytest.raises(BoundError, match=r"no bound of gelu_erf.*it has exact, library"):
        enclose(path, case, SUITE, Arithmetic("fast"))
    eager = find_path("situglu.fwd.bf16")
    (case,) = draw_cases(1, 0, space(eager))
    with pytest.raises(BoundError, match="no bound of situ_gate is derived where the results of its operators"):
        enclose(eager, case, SUITE, Arithmetic("library", "bfloat16"))
    with pytest.raises(BoundError, match="expected one of exact, library, fast"):
        Arithmetic("approximate")


def test_float32_operands_have_no_smaller_errors() -> None:
    """A table measured over fewer operands than those it contains: bfloat16 values are float32 values."""
    for name, kinds in TABLE.items():
        for kind, entry in kinds.items():
            assert all(wide >= narrow for wide, narrow in zip(FLOAT32_TABLE[name][kind], entry, strict=True)), name
