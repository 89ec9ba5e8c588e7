"""Public faults of activation kernels, each as a test of its whole kind.

The ids name rows of a log of public reports; each test's docstring gives the report. A value in a row was
computed from the formula in float64 and is written with the digits the row gives.
"""

from __future__ import annotations

import math

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
    Gelu,
    GeluErf,
    SquaredRelu,
    StepSwiglu,
)
from moe_numerics.reference.formats import E4M3

EVERY_BFLOAT16 = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
FINITE = EVERY_BFLOAT16[EVERY_BFLOAT16.isfinite()].float()
EVERY: dict[str, Activation] = {**UNARY_ACTIVATIONS, **GATED_ACTIVATIONS, **CLAMPED_SWIGLU_PRESETS}

small = st.floats(-30, 30, width=32)


def one(*values: float) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([value]) for value in values)


class TestB23RoundingPointOfSquaredRelu:
    """Megatron-LM#6588: the product kept in float32 or materialised as bfloat16 before MXFP8 are two results."""

    def test_the_reported_value(self) -> None:
        squared = SquaredRelu().forward(torch.tensor([1.03125], dtype=torch.bfloat16))
        assert squared.item() == 1.03125**2
        assert E4M3.encode(squared * 256).tolist() == [0x79]
        assert E4M3.encode(squared.to(torch.bfloat16).float() * 256).tolist() == [0x78]

    @pytest.mark.parametrize("name", EVERY)
    def test_no_result_is_rounded_to_bfloat16_on_the_way(self, name: str) -> None:
        """Results that bfloat16 cannot hold appear, so nothing was materialised in it."""
        activation = EVERY[name]
        generator = torch.Generator().manual_seed(0)
        operands = [torch.randn(64, generator=generator).to(torch.bfloat16) for _ in range(activation.inputs)]
        value = activation.forward(*operands)
        held = value == value.to(torch.bfloat16).float()
        relu_only = name == "relu"
        assert bool(held.all()) == relu_only


class TestB28GradientAtTheLimit:
    """TransformerEngine#3424, pytorch#191142, pytorch#76522: autograd of clamp at the limit differs by version."""

    def test_the_gradient_at_the_limit_is_that_of_the_inside(self) -> None:
        activation = ClampedSwiglu()
        inside = ClampedSwiglu(limit=None)
        for gate, up in ((7.0, 1.0), (1.0, 7.0), (1.0, -7.0), (7.0, 7.0), (7.0, -7.0)):
            at = activation.backward(*one(1.0, gate, up))
            expected = inside.backward(*one(1.0, gate, up))
            assert [gradient.item() for gradient in at] == [gradient.item() for gradient in expected]
            assert all(gradient.item() != 0 for gradient in at)

    @given(st.floats(0.25, 64, width=32))
    def test_the_mask_changes_exactly_above_the_limit(self, limit: float) -> None:
        above = torch.nextafter(torch.tensor([limit]), torch.tensor([math.inf])).item()
        for activation in (ClampedSwiglu(limit=limit), ClampedSwiglu(limit=limit, alpha=1.0, offset=0.0)):
            assert activation.backward(*one(1.0, limit, limit))[0].item() != 0
            assert activation.backward(*one(1.0, above, limit))[0].item() == 0
            assert activation.backward(*one(1.0, 1.0, limit))[1].item() != 0
            assert activation.backward(*one(1.0, 1.0, above))[1].item() == 0
            assert activation.backward(*one(1.0, 1.0, -limit))[1].item() != 0
            assert activation.backward(*one(1.0, 1.0, -above))[1].item() == 0


class TestB29ClampedSwigluVariants:
    """flashinfer#3492, sglang#39939, fak#4837: clamp before or after SiLU, both gate sides, a missing + 1."""

    VARIANTS = {  # noqa: RUF012
        "gpt_oss": (ClampedSwiglu(), (13.99991, -1.9533e-5, 2.98193)),
        "deepseek": (ClampedSwiglu(limit=7.0, alpha=1.0, offset=0.0), (6.99362, -2.6828e-3, 0.0)),
        "step": (StepSwiglu(limit=7.0), (7.0, -2.6828e-3, 0.0)),
    }

    @pytest.mark.parametrize("name", VARIANTS)
    def test_the_reported_values(self, name: str) -> None:
        activation, expected = self.VARIANTS[name]
        got = activation.forward(torch.tensor([8.0, -8.0, 3.0]), torch.tensor([1.0, 1.0, 0.0]))
        assert [f"{value:.6g}" for value in expected] == [
            f"{value:.{6 if abs(value) > 1 else 5}g}" for value in got.tolist()
        ]

    @pytest.mark.parametrize("name", VARIANTS)
    def test_the_presets_are_these_variants(self, name: str) -> None:
        preset, variant = CLAMPED_SWIGLU_PRESETS[name], self.VARIANTS[name][0]
        assert type(preset) is type(variant)
        for parameter in ("alpha", "offset"):
            assert getattr(preset, parameter, None) == getattr(variant, parameter, None)

    @given(st.floats(-100, -7, width=32), small)
    def test_the_gate_is_not_clamped_from_below(self, gate: float, up: float) -> None:
        for activation, _ in self.VARIANTS.values():
            unlimited = StepSwiglu(limit=None)
            if isinstance(activation, ClampedSwiglu):
                unlimited = ClampedSwiglu(limit=None, alpha=activation.alpha, offset=activation.offset)
            inside = max(-7.0, min(7.0, up))
            assert torch.equal(activation.forward(*one(gate, up)), unlimited.forward(*one(gate, inside)))


class TestB30AbsentLimit:
    """onnxruntime#27221, vllm-ascend#9438: a limit that was not given clamped everything to 0."""

    @given(st.floats(-1000, 1000, width=32), st.floats(-1000, 1000, width=32))
    def test_none_and_inf_mean_no_clamp(self, gate: float, up: float) -> None:
        for limit in (None, math.inf):
            activation = ClampedSwiglu(limit=limit, alpha=1.0, offset=0.0)
            plain = GATED_ACTIVATIONS["swiglu"]
            assert torch.equal(activation.forward(*one(gate, up)), plain.forward(*one(gate, up)))
            for got, expected in zip(
                activation.backward(*one(1.0, gate, up)), plain.backward(*one(1.0, gate, up)), strict=True
            ):
                assert torch.equal(got, expected)

    @pytest.mark.parametrize("limit", [0.0, -0.0, -7.0, math.nan])
    def test_a_limit_that_is_not_positive_is_refused(self, limit: float) -> None:
        for make in (ClampedSwiglu, StepSwiglu):
            with pytest.raises(ValueError, match="a limit must be positive; None or inf means no clamp"):
                make(limit=limit)


class TestB31ClampGradient:
    """cudnn-frontend#447, #568, #1144: the clamped value stood where a mask of 0 or 1 belongs."""

    @pytest.mark.parametrize(
        ("gate", "up", "dgate", "dup"),
        [(2.0, 3.0, 4.29526, 1.93566), (8.0, 3.0, 0.0, 6.99995), (2.0, -9.0, -6.44289, 0.0)],
    )
    def test_the_reported_values(self, gate: float, up: float, dgate: float, dup: float) -> None:
        got = ClampedSwiglu().backward(*one(1.0, gate, up))
        assert [round(gradient.item(), 5) for gradient in got] == [dgate, dup]

    @given(small, small, small)
    def test_a_gradient_is_masked_or_that_of_the_clamped_operands(self, grad: float, gate: float, up: float) -> None:
        for activation in (ClampedSwiglu(), ClampedSwiglu(limit=7.0, alpha=1.0, offset=0.0)):
            unlimited = ClampedSwiglu(limit=None, alpha=activation.alpha, offset=activation.offset)
            clamped = (min(gate, 7.0), max(-7.0, min(7.0, up)))
            dgate, dup = (gradient.item() for gradient in unlimited.backward(*one(grad, *clamped)))
            got = activation.backward(*one(grad, gate, up))
            assert got[0].item() == (0.0 if gate > 7 else dgate)
            assert got[1].item() == (0.0 if abs(up) > 7 else dup)


class TestB32OperandOrder:
    """vllm#29273, ATOM#885, TransformerEngine#3078: gate and up read from each other's columns."""

    def test_the_reported_value(self) -> None:
        value = GATED_ACTIVATIONS["swiglu"].forward(*one(2.0, 3.0)).item()
        swapped = GATED_ACTIVATIONS["swiglu"].forward(*one(3.0, 2.0)).item()
        assert round(value, 5) == 5.28478
        assert round(swapped, 5) == 5.71544

    @pytest.mark.parametrize("name", [*GATED_ACTIVATIONS, *CLAMPED_SWIGLU_PRESETS])
    def test_the_first_operand_is_the_one_that_is_activated(self, name: str) -> None:
        """Far below zero the gate closes and up does not."""
        activation = EVERY[name]
        closed = activation.forward(*one(-60.0, 5.0)).abs().item()
        swapped = activation.forward(*one(5.0, -60.0)).abs().item()
        assert closed < 1e-20
        assert swapped > 1


class TestB33GeluForms:
    """mistral.rs#1867, executorch#22323, llm-scaler#484, Liger-Kernel#959: tanh and erf swapped; tanh overflows.

    At -4 torch's float32 forms cancel: -7.0214e-05 and -1.26481e-04. Exact are the values below.
    """

    def test_the_reported_values(self) -> None:
        assert f"{Gelu().forward(*one(-4.0)).item():.4e}" == "-7.0246e-05"
        assert f"{GeluErf().forward(*one(-4.0)).item():.5e}" == "-1.26685e-04"
        assert abs(Gelu().forward(*one(2.6895)) - GeluErf().forward(*one(2.6895))).item() > 4.7e-4
        for x, expected in ((-13.24, 0.0), (40.0, 40.0)):
            assert Gelu().forward(*one(x)).item() == pytest.approx(expected, abs=1e-30)
            assert GeluErf().forward(*one(x)).item() == pytest.approx(expected, abs=1e-30)

    @pytest.mark.parametrize("name", ["gelu", "gelu_erf", "geglu", "geglu_erf"])
    def test_each_form_is_its_own_formula_and_finite(self, name: str) -> None:
        """Every finite bfloat16 input, forward and derivative, against the form's own float64 formula."""
        activation = EVERY[name]
        gate = activation.activation if isinstance(activation, Gated) else activation
        operands = (FINITE, torch.ones(FINITE.shape))[: activation.inputs]
        value = activation.forward(*operands)
        exact = oracle.forward(gate, FINITE)
        assert ((value.double() - exact).abs() <= exact.abs() * 2.0**-24 * 150 + 300 * 2.0**-150).all()
        derivative = activation.differentiate(torch.ones(FINITE.shape), *operands)[1]
        assert derivative.isfinite().all()


class TestB34DerivativesFarOut:
    """candle#1722, nequip#604: a ratio of exponentials becomes Inf / Inf."""

    def test_the_reported_value(self) -> None:
        assert UNARY_ACTIVATIONS["silu"].backward(*one(1.0, -200.0)).item() == 0
        assert math.copysign(1, UNARY_ACTIVATIONS["silu"].forward(*one(-200.0)).item()) == -1
        assert UNARY_ACTIVATIONS["silu"].forward(*one(-math.inf)).isnan().all()

    @pytest.mark.parametrize("name", EVERY)
    def test_every_finite_input_has_a_finite_derivative(self, name: str) -> None:
        activation = EVERY[name]
        grad = torch.full(FINITE.shape, 2.0**-8)
        others = torch.full(FINITE.shape, 0.5)
        squares = name in ("srelu", "sreglu")  # these overflow by themselves
        for position in range(activation.inputs):
            operands = [others] * activation.inputs
            operands[position] = FINITE
            value, *gradients = activation.differentiate(grad, *operands)
            for gradient in gradients:
                in_range = FINITE.abs() < 2.0**60 if squares else FINITE.abs() >= 0
                assert gradient[in_range].isfinite().all()
                assert not gradient.isnan().any()
            assert not value.isnan().any()


class TestB35GradAndOperandSwapped:
    """TransformerEngine#1460: the kernel took the gradient for the activation's operand."""

    @pytest.mark.parametrize("name", EVERY)
    @given(rows=st.lists(st.tuples(small, small), min_size=1, max_size=32))
    def test_no_gradient_comes_out_where_none_goes_in(self, name: str, rows: list[tuple[float, float]]) -> None:
        activation = EVERY[name]
        operands = [torch.tensor(column) for column in zip(*rows, strict=True)][: activation.inputs]
        gradients = activation.differentiate(torch.zeros(len(rows)), *operands)[1:]
        assert all((gradient == 0).all() for gradient in gradients)


class TestB65DerivativeFromARoundedResult:
    """tt-metal#55724, triton-transformer#9: s * (1 - s), or 2 * sqrt(y), of a stored and rounded result."""

    def test_the_reported_values(self) -> None:
        gate = torch.tensor([9.0], dtype=torch.bfloat16)
        derivative, _ = GATED_ACTIVATIONS["glu"].backward(torch.ones(1), gate, torch.ones(1))
        assert f"{derivative.item():.5e}" == "1.23379e-04"
        assert SquaredRelu().backward(torch.ones(1), torch.tensor([1.03125], dtype=torch.bfloat16)).item() == 2.0625

    def test_one_minus_sigmoid_does_not_cancel(self) -> None:
        """glu's derivative falls off like exp(-|x|) down to the subnormals, over every finite bfloat16 gate."""
        ones = torch.ones(FINITE.shape)
        dgate, _ = GATED_ACTIVATIONS["glu"].backward(ones, FINITE, ones)
        exact, _ = oracle.backward(GATED_ACTIVATIONS["glu"], ones, FINITE, ones)
        assert ((dgate.double() - exact).abs() <= exact * 2.0**-20 + 2.0**-149).all()

    def test_one_minus_tanh_squared_does_not_cancel(self) -> None:
        derivative = exact_math.tanh_terms(FINITE).derivative.double()
        exact = oracle.sech_squared(FINITE.double())
        assert ((derivative - exact).abs() <= exact * 2.0**-20 + 2.0**-149).all()

    def test_squared_relu_has_exactly_twice_its_operand(self) -> None:
        positive = FINITE[(FINITE > 0) & (FINITE < 2.0**126)]
        assert torch.equal(SquaredRelu().backward(torch.ones(positive.shape), positive), positive + positive)
