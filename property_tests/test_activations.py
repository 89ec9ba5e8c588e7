"""Forward activations: correctly rounded over all bfloat16 inputs, products and special values as stated.

Catches a wrong constant, gelu's two forms swapped, gate and up swapped, a clamp on the wrong side of the
activation, a product taken in another order, a NaN dropped by a minimum, and a parameter that is accepted but
makes no sense.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_numerics.reference import exact_math, oracle
from moe_numerics.reference.activations import (
    ACTIVATIONS,
    CLAMPED_SWIGLU_PRESETS,
    GATED_ACTIVATIONS,
    UNARY_ACTIVATIONS,
    Activation,
    ClampedSwiglu,
    Gated,
    GatedActivation,
    Gelu,
    QuickGelu,
    SituGlu,
    StepSwiglu,
    TanhSquaredRelu,
)

EVERY_BFLOAT16 = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
GATED: dict[str, GatedActivation] = {**GATED_ACTIVATIONS, **CLAMPED_SWIGLU_PRESETS}
EVERY: dict[str, Activation] = {**UNARY_ACTIVATIONS, **GATED}

# Inputs whose float32 result falls on the other side of a bfloat16 tie than the exact one. alpha * x is
# rounded, which costs qgelu up to 60 units in the last place of float32 in its far tail.
MISROUNDED: dict[str, list[float]] = {"qgelu": [-11.6875]}

# A rounded argument of a sigmoid, below 105 wherever the result is not 0, is off by at most 105 * 2**-24,
# which is the relative error of the result; LN_2 and a dozen roundings fit into what is added.
TAIL_ERROR = 2.0**-24 * 150
# A sigmoid rounded to a subnormal times a gate and an up, or up / 25 rounded to one times 25 and 4: at most
# 300.
SUBNORMAL_ERROR = 300 * 2.0**-150

float32_bits = st.integers(0, 2**32 - 1)
ordinary = st.floats(-100, 100, width=32)


def tensor_of_bits(bits: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(bits, dtype=np.uint32).view(np.int32)).view(torch.float32)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, NaN by class."""
    return bool(((a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())).all())


def misrounded(values: torch.Tensor, exact: torch.Tensor) -> list[float]:
    rounded, expected = values.to(torch.bfloat16), oracle.round_once(exact, torch.bfloat16)
    differ = (rounded.view(torch.int16) != expected.view(torch.int16)) & ~(rounded.isnan() & expected.isnan())
    return EVERY_BFLOAT16[differ].float().tolist()


@pytest.mark.parametrize("name", UNARY_ACTIVATIONS)
def test_every_bfloat16_input_gives_the_correctly_rounded_bfloat16(name: str) -> None:
    activation = UNARY_ACTIVATIONS[name]
    values = activation.forward(EVERY_BFLOAT16)
    assert misrounded(values, oracle.forward(activation, EVERY_BFLOAT16)) == MISROUNDED.get(name, [])


@pytest.mark.parametrize("name", GATED)
def test_every_bfloat16_gate_at_a_neutral_up(name: str) -> None:
    """up = 1 (0 where an offset of 1 is added): the product rounds nothing, so the activated gate shows."""
    activation = GATED[name]
    offset = activation.offset if isinstance(activation, ClampedSwiglu) else 0.0
    up = torch.full(EVERY_BFLOAT16.shape, 1.0 - offset)
    values = activation.forward(EVERY_BFLOAT16, up)
    alpha = {"qgeglu": QuickGelu().alpha, "clamped_swiglu": 1.702, "gpt_oss": 1.702}.get(name)
    expected = MISROUNDED["qgelu"] if alpha else []
    assert misrounded(values, oracle.forward(activation, EVERY_BFLOAT16, up)) == expected


@pytest.mark.parametrize("name", GATED)
def test_every_bfloat16_up_at_a_gate(name: str) -> None:
    """Every up, Inf, NaN, subnormals and values far beyond a limit included, against float64."""
    activation = GATED[name]
    gate = torch.full(EVERY_BFLOAT16.shape, 1.5)
    values = activation.forward(gate, EVERY_BFLOAT16).double()
    exact = oracle.forward(activation, gate, EVERY_BFLOAT16)
    assert torch.equal(exact.isnan(), values.isnan())
    in_range = exact.abs() < 2.0**127
    assert ((values - exact).abs() <= exact.abs() * TAIL_ERROR + SUBNORMAL_ERROR)[in_range].all()
    assert torch.equal(torch.signbit(values[in_range]), torch.signbit(exact[in_range]))


@given(st.lists(st.tuples(float32_bits, float32_bits), min_size=1, max_size=64), st.sampled_from(sorted(EVERY)))
def test_value_of_differentiate_has_the_bits_of_forward(pairs: list[tuple[int, int]], name: str) -> None:
    activation = EVERY[name]
    operands = [tensor_of_bits(list(bits)) for bits in zip(*pairs, strict=True)][: activation.inputs]
    value = activation.differentiate(torch.ones(len(pairs)), *operands)[0]
    assert same_bits(value, activation.forward(*operands))


@given(st.lists(st.tuples(ordinary, ordinary), min_size=1, max_size=64))
def test_products_are_taken_in_the_stated_order(pairs: list[tuple[float, float]]) -> None:
    """NumPy's float32 products of the parts in that order; another order differs in the last bit."""
    gate, up = (np.array(column, dtype=np.float32) for column in zip(*pairs, strict=True))

    def part(function: Callable[[torch.Tensor], torch.Tensor], x: Any) -> Any:
        return function(torch.from_numpy(np.asarray(x, dtype=np.float32))).numpy()

    sigmoid, tanh = exact_math.sigmoid, exact_math.tanh
    f32 = np.float32
    g, u = np.minimum(gate, f32(7)), np.clip(up, f32(-7), f32(7))
    expected = {
        "swiglu": (gate * part(sigmoid, gate)) * up,
        "qgeglu": (gate * part(sigmoid, f32(1.702) * gate)) * up,
        "glu": part(lambda x: exact_math.sigmoid_pair(x).value, gate) * up,
        "geglu_erf": (gate * part(exact_math.normal_cdf, gate)) * up,
        "sreglu": (np.maximum(gate, f32(0)) * np.maximum(gate, f32(0))) * up,
        "gpt_oss": (g * part(sigmoid, f32(1.702) * g)) * (u + f32(1)),
        "step": np.minimum(gate * part(sigmoid, gate), f32(7)) * u,
        "situglu": (
            ((part(tanh, gate * f32(0.25)) * f32(4)) * part(lambda x: exact_math.sigmoid_pair(x).value, gate))
            * (part(tanh, up * f32(1 / 25)) * f32(25))
        ),
    }
    for name, values in expected.items():
        got = GATED[name].forward(torch.from_numpy(gate), torch.from_numpy(up))
        assert same_bits(got, torch.from_numpy(values)), name


@pytest.mark.parametrize("name", EVERY)
def test_narrow_inputs_are_widened_and_shapes_are_kept(name: str) -> None:
    activation = EVERY[name]
    for dtype in (torch.bfloat16, torch.float16):
        operands = [torch.linspace(-3, 3, 24).reshape(2, 3, 4).to(dtype) for _ in range(activation.inputs)]
        value = activation.forward(*operands)
        assert value.dtype == torch.float32
        assert value.shape == (2, 3, 4)
        assert same_bits(value, activation.forward(*[operand.float() for operand in operands]))
    empty = [torch.zeros(0, 64, dtype=torch.bfloat16)] * activation.inputs
    assert activation.forward(*empty).shape == (0, 64)


@pytest.mark.parametrize("name", EVERY)
def test_nan_reaches_the_value_from_each_operand(name: str) -> None:
    activation = EVERY[name]
    for position in range(activation.inputs):
        operands = [torch.tensor([0.5]) for _ in range(activation.inputs)]
        operands[position] = torch.tensor([math.nan])
        assert activation.forward(*operands).isnan().all()


def test_values_at_infinities_and_zeros() -> None:
    x = torch.tensor([-math.inf, -300.0, -0.0, 0.0, math.inf])
    nan, inf = math.nan, math.inf
    expected = {
        "gelu": [nan, -0.0, -0.0, 0.0, inf],
        "gelu_erf": [nan, -0.0, -0.0, 0.0, inf],
        "qgelu": [nan, -0.0, -0.0, 0.0, inf],
        "silu": [nan, -0.0, -0.0, 0.0, inf],
        "relu": [0.0, 0.0, 0.0, 0.0, inf],
        "srelu": [0.0, 0.0, 0.0, 0.0, inf],
        "tanh_srelu": [0.0, 0.0, 0.0, 0.0, 256.0],
    }
    assert expected.keys() == UNARY_ACTIVATIONS.keys()
    for name, values in expected.items():
        got = UNARY_ACTIVATIONS[name].forward(x).to(torch.bfloat16)
        assert same_bits(got.float(), torch.tensor(values)), name
    situ = SituGlu().forward(x, torch.full(x.shape, inf)).to(torch.bfloat16)
    assert situ.tolist() == [-0.0, -0.0, -0.0, 0.0, 100.0]


@given(ordinary, ordinary)
def test_a_limit_that_is_not_reached_changes_nothing(gate: float, up: float) -> None:
    g, u = torch.tensor([gate]), torch.tensor([up])
    far, absent = ClampedSwiglu(limit=101.0), ClampedSwiglu(limit=None)
    assert same_bits(far.forward(g, u), absent.forward(g, u))
    assert same_bits(StepSwiglu(limit=101.0).forward(g, u), StepSwiglu(limit=None).forward(g, u))
    plain = ClampedSwiglu(limit=None, alpha=1.0, offset=0.0)
    assert same_bits(plain.forward(g, u), GATED_ACTIVATIONS["swiglu"].forward(g, u))
    assert same_bits(StepSwiglu(limit=None).forward(g, u), GATED_ACTIVATIONS["swiglu"].forward(g, u))


@given(ordinary, st.floats(0.5, 50, width=32))
def test_parameters_are_used(x: float, scale: float) -> None:
    """Not the defaults: each parameter's value reaches the result, as the float64 formula says."""
    gate, up = torch.tensor([x]), torch.tensor([3.0])
    for activation in (
        QuickGelu(alpha=scale),
        TanhSquaredRelu(scale=scale),
        ClampedSwiglu(limit=scale, alpha=1.25, offset=-0.5),
        StepSwiglu(limit=scale),
        SituGlu(beta_gate=scale, beta_up=2 * scale),
    ):
        operands = (gate, up)[: activation.inputs]
        exact = oracle.forward(activation, *operands).item()
        assert activation.forward(*operands).item() == pytest.approx(exact, rel=TAIL_ERROR, abs=SUBNORMAL_ERROR)


def test_activations_are_values() -> None:
    assert Gated(Gelu()) == GATED_ACTIVATIONS["geglu"] != GATED_ACTIVATIONS["geglu_erf"]
    assert len(set(ACTIVATIONS.values())) == len(ACTIVATIONS) == 16
    with pytest.raises(dataclasses.FrozenInstanceError):
        ClampedSwiglu().limit = 1.0  # type: ignore[misc]
    assert CLAMPED_SWIGLU_PRESETS["gpt_oss"] == ACTIVATIONS["clamped_swiglu"]


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, 1e300, 1e-300])
def test_parameters_that_make_no_sense_are_refused(value: float) -> None:
    makers: list[Callable[[], Activation]] = [
        lambda: QuickGelu(alpha=value),
        lambda: ClampedSwiglu(alpha=value),
        lambda: SituGlu(beta_gate=value),
        lambda: SituGlu(beta_up=value),
        lambda: TanhSquaredRelu(scale=value),
    ]
    if value != math.inf:
        makers += [lambda: ClampedSwiglu(limit=value), lambda: StepSwiglu(limit=value)]
    for make in makers:
        with pytest.raises(ValueError, match=r"expected a positive finite float32|must be positive"):
            make()
    for offset in (math.nan, -math.inf, 1e300):
        with pytest.raises(ValueError, match=f"offset = {re.escape(str(offset))}: expected a finite"):
            ClampedSwiglu(offset=offset)


def test_operands_that_do_not_fit_are_refused() -> None:
    swiglu = GATED_ACTIVATIONS["swiglu"]
    with pytest.raises(ValueError, match=r"operands differ in shape \(gate \[2, 4\], up \[2, 8\]\)"):
        swiglu.forward(torch.zeros(2, 4), torch.zeros(2, 8))
    with pytest.raises(ValueError, match=r"grad \[8\], gate \[4\], up \[4\]"):
        swiglu.backward(torch.zeros(8), torch.zeros(4), torch.zeros(4))
    with pytest.raises(TypeError, match=r"up is torch\.float64: expected float32"):
        swiglu.forward(torch.zeros(4), torch.zeros(4, dtype=torch.float64))
    with pytest.raises(TypeError, match="no float64 formula"):
        oracle.forward(object(), torch.zeros(1), torch.zeros(1))  # type: ignore[arg-type]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", EVERY)
def test_cpu_and_cuda_give_the_same_bits(name: str) -> None:
    activation = EVERY[name]
    generator = torch.Generator().manual_seed(0)
    shuffled = [EVERY_BFLOAT16[torch.randperm(65536, generator=generator)] for _ in range(activation.inputs + 1)]
    here = activation.differentiate(*[x.float() for x in shuffled])
    there = activation.differentiate(*[x.float().cuda() for x in shuffled])
    assert all(same_bits(host, device.cpu()) for host, device in zip(here, there, strict=True))
