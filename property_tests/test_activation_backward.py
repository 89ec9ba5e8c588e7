"""Backward activations: float64 derivatives equal autograd, float32 ones round correctly, masks are stated.

Catches a derivative of another function, one that cancels or overflows in a tail, gate and up gradients
swapped, a clamp whose mask is missing or is the clamped value, a masked gradient that lets NaN or -0 through,
and grad multiplied last.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_numerics.reference import exact_math, oracle
from moe_numerics.reference.activations import (
    CLAMPED_SWIGLU_PRESETS,
    GATED_ACTIVATIONS,
    UNARY_ACTIVATIONS,
    Activation,
    ClampedSwiglu,
    Gated,
    GatedActivation,
    Relu,
    SituGlu,
    SquaredRelu,
    StepSwiglu,
    TanhSquaredRelu,
)

EVERY_BFLOAT16 = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
GATED: dict[str, GatedActivation] = {**GATED_ACTIVATIONS, **CLAMPED_SWIGLU_PRESETS}
EVERY: dict[str, Activation] = {**UNARY_ACTIVATIONS, **GATED}
KINKED = (Relu, SquaredRelu, TanhSquaredRelu)

# Inputs whose float32 derivative falls on the other side of a bfloat16 tie than the exact one. situglu's is
# beside its root, where two terms cancel.
MISROUNDED = {
    "gelu": [-3.953125],
    "silu": [-0.005859375],
    "geglu": [-3.953125],
    "swiglu": [-0.005859375],
    "deepseek": [-0.005859375],
    "step": [-0.005859375],
    "situglu": [0.01226806640625, -1.21875],
}

ordinary = st.floats(-60, 60, width=32)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, NaN by class."""
    return bool(((a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())).all())


def misrounded(values: torch.Tensor, exact: torch.Tensor) -> list[float]:
    rounded, expected = values.to(torch.bfloat16), oracle.round_once(exact, torch.bfloat16)
    differ = (rounded.view(torch.int16) != expected.view(torch.int16)) & ~(rounded.isnan() & expected.isnan())
    return EVERY_BFLOAT16[differ].float().tolist()


def gradients(activation: Activation, grad: torch.Tensor, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return activation.differentiate(grad, *operands)[1:]


def away_from_kinks(activation: Activation, operands: list[torch.Tensor]) -> torch.Tensor:
    """Where autograd and the masks must agree: no operand at, or within rounding of, a kink."""
    if isinstance(activation, Gated):
        activation = activation.activation
    if isinstance(activation, KINKED):
        return operands[0] != 0
    limit = getattr(activation, "limit", None)
    if limit is None:
        return torch.ones(operands[0].shape, dtype=torch.bool)
    activated = operands[0]
    if isinstance(activation, StepSwiglu):
        activated = oracle.forward(UNARY_ACTIVATIONS["silu"], operands[0])
    return ((activated - limit).abs() > 1e-6) & ((operands[1].abs() - limit).abs() > 1e-6)


def columns(rows: list[tuple[float, ...]]) -> list[torch.Tensor]:
    return [torch.tensor(column, dtype=torch.float32) for column in zip(*rows, strict=True)]


triples = st.lists(st.tuples(ordinary, ordinary, ordinary), min_size=1, max_size=64)
# exp overflows in autograd's form of gelu beyond this, where the closed form does not.
moderate = st.floats(-20, 20, width=32)
moderate_triples = st.lists(st.tuples(moderate, moderate, moderate), min_size=1, max_size=64)


@given(rows=moderate_triples, name=st.sampled_from(sorted(EVERY)))
def test_the_float64_derivative_is_that_of_autograd(rows: list[tuple[float, ...]], name: str) -> None:
    """Closed forms against reverse mode over the forward formula, which shares none of their algebra."""
    activation = EVERY[name]
    grad, *values = (column.double() for column in columns(rows)[: activation.inputs + 1])
    operands = [value.clone().requires_grad_() for value in values]
    (oracle.forward(activation, *operands) * grad).sum().backward()
    smooth = away_from_kinks(activation, values)
    # autograd's form cancels in tails: an error of its largest term, not of the sum.
    size = grad.abs() * torch.stack([value.abs() for value in values]).amax(0).clamp(min=1) ** 3
    for operand, derivative in zip(operands, oracle.backward(activation, grad, *values), strict=True):
        assert operand.grad is not None
        assert ((derivative - operand.grad).abs() <= size * 2.0**-48)[smooth].all()


@pytest.mark.parametrize("name", UNARY_ACTIVATIONS)
def test_every_bfloat16_input_gives_the_correctly_rounded_derivative(name: str) -> None:
    activation = UNARY_ACTIVATIONS[name]
    grad = torch.ones(EVERY_BFLOAT16.shape)
    exact = oracle.backward(activation, grad, EVERY_BFLOAT16)[0]
    assert misrounded(activation.backward(grad, EVERY_BFLOAT16), exact) == MISROUNDED.get(name, [])


@pytest.mark.parametrize("name", GATED)
def test_every_bfloat16_gate_gives_the_correctly_rounded_dgate(name: str) -> None:
    """up = 1, or 0 where an offset of 1 is added, so that only the derivative rounds."""
    activation = GATED[name]
    offset = activation.offset if isinstance(activation, ClampedSwiglu) else 0.0
    grad = torch.ones(EVERY_BFLOAT16.shape)
    up = torch.full(EVERY_BFLOAT16.shape, 1.0 - offset)
    exact, _ = oracle.backward(activation, grad, EVERY_BFLOAT16, up)
    dgate, _ = activation.backward(grad, EVERY_BFLOAT16, up)
    assert misrounded(dgate, exact) == MISROUNDED.get(name, [])


@given(rows=triples, name=st.sampled_from(sorted(name for name in GATED if name != "situglu")))
def test_dup_is_grad_times_the_activated_gate(rows: list[tuple[float, ...]], name: str) -> None:
    activation = GATED[name]
    grad, gate, up = columns(rows)
    limit = getattr(activation, "limit", None) or math.inf
    offset = activation.offset if isinstance(activation, ClampedSwiglu) else 0.0
    activated = activation.forward(gate, torch.full(gate.shape, 1.0 - offset))
    expected = torch.where(up.abs() > limit, 0.0, grad * activated)
    assert same_bits(activation.backward(grad, gate, up)[1], expected)


@given(triples)
def test_products_are_taken_in_the_stated_order(rows: list[tuple[float, ...]]) -> None:
    """NumPy's float32 products of the parts: (grad * linear) * derivative and grad * activated."""
    grad, gate, up = (np.array(column, dtype=np.float32) for column in zip(*rows, strict=True))
    s = exact_math.sigmoid_terms(torch.from_numpy(gate))
    derivative = (s.value * exact_math.fma(s.clamped, s.complement, 1.0)).numpy()
    dgate, dup = GATED["swiglu"].backward(*(torch.from_numpy(x) for x in (grad, gate, up)))
    assert same_bits(dgate, torch.from_numpy((grad * up) * derivative))
    assert same_bits(dup, torch.from_numpy(grad * (gate * s.value.numpy())))

    pair = exact_math.sigmoid_pair(torch.from_numpy(gate))
    gate_tanh = exact_math.tanh_terms(torch.from_numpy(gate * np.float32(0.25)))
    up_tanh = exact_math.tanh_terms(torch.from_numpy(up * np.float32(1 / 25)))
    bounded = gate_tanh.value * 4.0
    slope = (pair.value * exact_math.fma(bounded, pair.complement, gate_tanh.derivative)).numpy()
    linear = up_tanh.value.numpy() * np.float32(25)
    dgate, dup = GATED["situglu"].backward(*(torch.from_numpy(x) for x in (grad, gate, up)))
    assert same_bits(dgate, torch.from_numpy((grad * linear) * slope))
    activated = (bounded * pair.value).numpy()
    assert same_bits(dup, torch.from_numpy((grad * activated) * up_tanh.derivative.numpy()))


@given(rows=moderate_triples, name=st.sampled_from(sorted(EVERY)))
def test_gradients_are_linear_in_grad_by_powers_of_two(rows: list[tuple[float, ...]], name: str) -> None:
    """Scaling grad by 2**20 scales every gradient exactly: nothing but products touches grad."""
    activation = EVERY[name]
    grad, *operands = columns(rows)[: activation.inputs + 1]
    scaled = gradients(activation, grad * 2.0**20, *operands)
    for once, larger in zip(gradients(activation, grad, *operands), scaled, strict=True):
        above_underflow = larger.abs() > 2.0**-80
        assert same_bits((once * 2.0**20)[above_underflow], larger[above_underflow])


class TestMasks:
    """At each kink the gradient is the stated one, on both sides of it, whatever grad holds."""

    grads = torch.tensor([1.0, -1.0, math.inf, math.nan])

    @pytest.mark.parametrize("name", ["relu", "srelu", "tanh_srelu", "reglu", "sreglu"])
    def test_nothing_passes_at_or_below_zero(self, name: str) -> None:
        activation = EVERY[name]
        for x in (0.0, -0.0, -(2.0**-149), -1.0, -math.inf):
            operands = [torch.full((4,), x), torch.full((4,), 3.0)][: activation.inputs]
            assert gradients(activation, self.grads, *operands)[0].view(torch.int32).tolist() == [0, 0, 0, 0]

    @pytest.mark.parametrize("name", ["relu", "reglu"])
    def test_everything_passes_above_zero(self, name: str) -> None:
        activation = EVERY[name]
        operands = [torch.full((4,), 2.0**-149), torch.ones(4)][: activation.inputs]
        assert same_bits(gradients(activation, self.grads, *operands)[0], self.grads)

    @pytest.mark.parametrize("limit", [7.0, 10.0, 0.1])
    def test_clamped_swiglu_passes_up_to_its_limit_inclusive(self, limit: float) -> None:
        activation = ClampedSwiglu(limit=limit)
        unlimited = ClampedSwiglu(limit=None)
        at = exact_math.float32(limit)
        beyond = np.nextafter(np.float32(at), np.float32(np.inf))
        inside = torch.full((4,), 0.05)
        for gate in (at, -at, -100.0):
            got = activation.backward(self.grads, torch.full((4,), gate), inside)
            assert all(
                same_bits(a, b)
                for a, b in zip(got, unlimited.backward(self.grads, torch.full((4,), gate), inside), strict=True)
            )
        for up in (at, -at):
            got = activation.backward(self.grads, inside, torch.full((4,), up))
            expected = unlimited.backward(self.grads, inside, torch.full((4,), up))
            assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))
        zero = torch.zeros(4, dtype=torch.int32)
        for gate in (float(beyond), 1e30, math.inf):
            dgate, _ = activation.backward(self.grads, torch.full((4,), gate), inside)
            assert torch.equal(dgate.view(torch.int32), zero)
        for up in (float(beyond), -float(beyond), math.inf, -math.inf):
            _, dup = activation.backward(self.grads, inside, torch.full((4,), up))
            assert torch.equal(dup.view(torch.int32), zero)

    def test_step_masks_where_silu_and_not_gate_exceeds_the_limit(self) -> None:
        activation = StepSwiglu(limit=7.0)
        gates = torch.linspace(6.9, 7.2, 1001)
        passes = exact_math.silu(gates) <= 7.0
        assert passes[gates <= 7.0].all()
        assert 0 < passes[gates > 7.0].sum() < (gates > 7.0).sum()
        ones = torch.ones(gates.shape)
        dgate, _ = activation.backward(ones, gates, ones)
        assert torch.equal(dgate != 0, passes)
        _, dup = activation.backward(ones, ones, torch.linspace(-8, 8, 1001))
        assert torch.equal(dup != 0, torch.linspace(-8, 8, 1001).abs() <= 7.0)


@pytest.mark.parametrize("name", EVERY)
def test_nan_reaches_each_gradient_that_depends_on_the_operand(name: str) -> None:
    activation = EVERY[name]
    nan, half, one = torch.tensor([math.nan]), torch.tensor([0.5]), torch.tensor([1.0])
    if activation.inputs == 1:
        assert gradients(activation, one, nan)[0].isnan().all()
        return
    dgate, dup = gradients(activation, one, nan, half)
    assert dgate.isnan().all()
    assert dup.isnan().all()
    dgate, dup = gradients(activation, one, half, nan)
    assert dgate.isnan().all()
    # Where up enters linearly its gradient does not depend on it, and NaN is not beyond any limit.
    assert bool(dup.isnan().all()) == isinstance(activation, SituGlu)


def test_derivatives_have_their_limits_at_the_infinities() -> None:
    ones = torch.ones(2)
    x = torch.tensor([-math.inf, math.inf])
    expected = {
        "gelu": [-0.0, 1.0],
        "gelu_erf": [-0.0, 1.0],
        "qgelu": [-0.0, 1.0],
        "silu": [-0.0, 1.0],
        "relu": [0.0, 1.0],
        "srelu": [0.0, math.inf],
        "tanh_srelu": [0.0, 0.0],
    }
    assert expected.keys() == UNARY_ACTIVATIONS.keys()
    for name, limits in expected.items():
        assert same_bits(UNARY_ACTIVATIONS[name].backward(ones, x), torch.tensor(limits)), name
    dgate, dup = SituGlu().backward(ones, x, x)
    assert dgate.abs().tolist() == dup.abs().tolist() == [0.0, 0.0]


@given(
    st.lists(st.tuples(ordinary, ordinary), min_size=1, max_size=32),
    st.sampled_from(sorted(GATED_ACTIVATIONS)),
)
def test_narrow_inputs_are_widened(pairs: list[tuple[float, float]], name: str) -> None:
    gate, up = (torch.tensor(column).to(torch.bfloat16) for column in zip(*pairs, strict=True))
    narrow = GATED_ACTIVATIONS[name].backward(up, gate, up)
    wide = GATED_ACTIVATIONS[name].backward(up.float(), gate.float(), up.float())
    for a, b in zip(narrow, wide, strict=True):
        assert a.dtype == torch.float32
        assert same_bits(a, b)
