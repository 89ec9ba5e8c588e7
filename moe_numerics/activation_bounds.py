"""Enclosures of activations and their gradients, from operands that are exact or themselves enclosed.

An operand without an error is a bfloat16 input of the path, and the error of a function there is the measured one.
Where a bias was added, or a matrix product made it, an operand x has an error e, and the function adds what it can move
by: |f(x + d) - f(x)| <= e |f'(x)| + e^2 for |d| <= e, as no second derivative here exceeds 2, that of relu(x)^2. A
derivative moves by 2 e at most, and by 1 where relu's jumps within e.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_numerics.activation_errors import FUNCTIONS, KINDS, ActivationError, error_of
from moe_numerics.bounds import Arithmetic, BoundError, Enclosure, product, row_sum
from moe_numerics.reference import elementwise, oracle
from moe_numerics.reference.activations import UNARY_ACTIVATIONS, Activation
from moe_numerics.reference.exact_math import float32
from moe_numerics.reference.gated_activations import ClampedSwiglu, Gated, SituGlu, StepSwiglu
from moe_numerics.reference.ragged import Experts
from moe_numerics.reference.unary_activations import QuickGelu, Sigmoid, UnaryActivation

__all__ = ["CURVATURE", "backward", "forward", "given", "probabilities"]

CURVATURE = 2.0
"""No second derivative of an activation, and no derivative of a derivative, exceeds it."""

_SEVERAL_OPERATORS = ("qgelu", "tanh_srelu", "situ_gate", "situ_up")
"""Functions that PyTorch code computes by several operators: bfloat16 intermediate values are rounded inside."""


def _name(activation: Activation) -> str:
    """The table's name of a unary activation. BoundError: it has parameters that were not measured."""
    if activation == Sigmoid():
        return "sigmoid"
    for name, known in UNARY_ACTIVATIONS.items():
        if known == activation:
            return name
    raise BoundError(f"{activation!r} has parameters whose errors are not measured")


def _measured(name: str, kind: str, operands: str) -> ActivationError:
    def known(each: str) -> bool:
        try:
            error_of(name, each, operands)
        except KeyError:
            return False
        return True

    if not known(kind):
        raise BoundError(
            f"functions = {kind!r}: no bound of {name} under them is derived; it has "
            f"{', '.join(each for each in KINDS if known(each))}"
        )
    return error_of(name, kind, operands)


def _monotone(function: Callable[[Tensor], Tensor], x: Enclosure, added: Tensor) -> Enclosure:
    """An increasing function of what is enclosed, whose own error is `added`."""
    value = function(x.value)
    away = torch.maximum(function(x.value + x.error) - value, value - function(x.value - x.error))
    return Enclosure(value, away + added, x.decided)


def _quick_gelu_by_operators(x: Enclosure, arithmetic: Arithmetic) -> Enclosure:
    """x * sigmoid(alpha * x), each operator's result rounded to bfloat16: so the table's error of sigmoid applies."""
    alpha = Enclosure.exact(torch.full_like(x.value, QuickGelu().alpha, dtype=torch.float32))
    argument = product(arithmetic, x, alpha)
    largest_value = oracle.sigmoid(argument.value + argument.error)
    added = _measured("sigmoid", arithmetic.functions, "bfloat16").bound(largest_value, torch.ones_like(largest_value))
    sigmoid = _monotone(oracle.sigmoid, argument, added).rounded(arithmetic.unit - 2.0**-24, arithmetic.underflow)
    return product(arithmetic, x, sigmoid)


def _moved(name: str, x: Enclosure) -> Tensor:
    """How far the operand's error moves the function."""
    if not name.endswith("'"):
        return x.error * FUNCTIONS[f"{name}'"].oracle(x.value).abs() + CURVATURE / 2 * x.error.square()
    moved = CURVATURE * x.error
    return torch.where((x.value.abs() <= x.error) & (x.error > 0), 1.0, 0.0) if name == "relu'" else moved


def _apply(name: str, x: Enclosure, arithmetic: Arithmetic) -> Enclosure:
    """A measured function of an operand, its result a float32 or rounded to the intermediate type."""
    enclosed = bool((x.error > 0).any())
    if arithmetic.intermediate == "bfloat16" and name.rstrip("'") in _SEVERAL_OPERATORS:
        if name == "qgelu":
            return _quick_gelu_by_operators(x, arithmetic)
        raise BoundError(f"no bound of {name} is derived where the results of its operators are rounded to bfloat16")
    measured = _measured(name, arithmetic.functions, "float32" if enclosed else "bfloat16")
    function, value = FUNCTIONS[name], FUNCTIONS[name].oracle(x.value)
    if enclosed:
        weight = torch.maximum(function.weight(x.value - x.error), function.weight(x.value + x.error))
        # Below its mask a function is 0, whatever the operand's error.
        moved = torch.where(weight > 0, _moved(name, x), 0.0)
        error = moved + measured.bound(value.abs() + moved, weight)
    else:
        error = measured.bound(value, function.weight(x.value))
    error = torch.where(torch.isfinite(value), error, 0.0)
    result = Enclosure(value, error, x.decided & ~torch.isinf(value) & ~torch.isinf(x.value))
    if arithmetic.intermediate == "bfloat16":
        return result.rounded(arithmetic.unit - 2.0**-24, arithmetic.underflow)
    return result


def _clamped(x: Enclosure, low: float, high: float) -> Enclosure:
    return Enclosure(x.value.clamp(low, high), x.error, x.decided)


def _masked_above(slope: Enclosure, x: Enclosure, limit: float) -> Enclosure:
    """The slope where x is not above the limit, 0 where it is, not decided where its error leaves that open."""
    near = ((x.value - limit).abs() <= x.error) & (x.error > 0)
    masked = slope.where(~(x.value > limit))
    return Enclosure(masked.value, masked.error, masked.decided & ~near)


@dataclass(frozen=True)
class _Parts:
    """A gated activation as a product: activated(gate) * linear(up), and the derivatives where those were asked for."""

    activated: Enclosure
    linear: Enclosure
    slope: Enclosure | None = None
    linear_slope: Enclosure | None = None


def _parts(activation: Activation, gate: Enclosure, up: Enclosure, arithmetic: Arithmetic, slopes: bool) -> _Parts:
    def apply(name: str, x: Enclosure) -> Enclosure:
        return _apply(name, x, arithmetic)

    def inside(limit: float) -> Enclosure:
        one = Enclosure.exact(torch.ones_like(up.value))
        magnitude = Enclosure(up.value.abs(), up.error, up.decided)
        return _masked_above(one, magnitude, limit)

    match activation:
        case Gated(activation=unary):
            name = _name(unary)
            return _Parts(apply(name, gate), up, apply(f"{name}'", gate) if slopes else None)
        case ClampedSwiglu(limit=limit, alpha=alpha, offset=offset):
            bound = math.inf if limit is None else float32(limit)
            name = "silu" if alpha == 1.0 else _name(QuickGelu(alpha))
            clamped = _clamped(gate, -math.inf, bound)
            linear = _clamped(up, -bound, bound)
            if offset:
                moved = Enclosure(linear.value + float32(offset), linear.error, linear.decided)
                linear = moved.rounded(arithmetic.unit, arithmetic.underflow)
            if not slopes:
                return _Parts(apply(name, clamped), linear)
            slope = _masked_above(apply(f"{name}'", clamped), gate, bound)
            return _Parts(apply(name, clamped), linear, slope, inside(bound))
        case StepSwiglu(limit=limit):
            bound = math.inf if limit is None else float32(limit)
            activated = apply("silu", gate)
            values = _Parts(_clamped(activated, -math.inf, bound), _clamped(up, -bound, bound))
            if not slopes:
                return values
            slope = _masked_above(apply("silu'", gate), activated, bound)
            return _Parts(values.activated, values.linear, slope, inside(bound))
        case SituGlu() if activation == SituGlu():
            values = _Parts(apply("situ_gate", gate), apply("situ_up", up))
            if not slopes:
                return values
            return _Parts(values.activated, values.linear, apply("situ_gate'", gate), apply("situ_up'", up))
    raise BoundError(f"{activation!r} has parameters whose errors are not measured")


def given(tensors: Mapping[str, Tensor], name: str, experts: Experts, arithmetic: Arithmetic) -> Enclosure:
    """An input of a case, 0 in rows without owner; gate_up and x with the bias that the case has."""
    x = tensors[name]
    valid = experts.valid_rows(x.device)
    owned = torch.where(valid.view(-1, *[1] * (x.dim() - 1)), x.float(), 0.0)
    if name == "grad" or "bias" not in tensors:
        return Enclosure.exact(owned)
    bias = torch.where(valid.view(-1, 1), tensors["bias"].float()[experts.row_expert().clamp(min=0)], 0.0)
    total = Enclosure.exact(owned.double() + bias.double())
    # A sum that the type holds, as one that cancels, is not rounded.
    held = total.value.to(getattr(torch, arithmetic.intermediate)).double() == total.value
    rounded = total.rounded(arithmetic.unit, arithmetic.underflow)
    error = torch.where(held, 0.0, rounded.error)
    return Enclosure(total.value, error, total.decided).where(valid.view(-1, 1).expand_as(owned))


def probabilities(tensors: Mapping[str, Tensor], experts: Experts) -> list[Enclosure]:
    """The factor of each row, none without probabilities."""
    prob = tensors.get("prob")
    if prob is None:
        return []
    return [Enclosure.exact(torch.where(experts.valid_rows(prob.device), prob.float(), 0.0).unsqueeze(1))]


def _split(x: Enclosure, layout: str) -> tuple[Enclosure, Enclosure]:
    halves = [elementwise.split_gate_up(part, layout) for part in (x.value, x.error, x.decided)]
    gate, up = (Enclosure(*(part[side] for part in halves)) for side in (0, 1))
    return gate, up


def _joined(gate: Enclosure, up: Enclosure, layout: str) -> Enclosure:
    pairs = ((gate.value, up.value), (gate.error, up.error), (gate.decided, up.decided))
    return Enclosure(*(elementwise.join_gate_up(a, b, layout) for a, b in pairs))


def forward(
    activation: Activation, x: Enclosure, layout: str, arithmetic: Arithmetic, factors: list[Enclosure]
) -> Enclosure:
    """activation(x), x being gate and up in the layout, times the factors, before it is rounded or quantised.

    BoundError: the arithmetic does not reach the activation.
    """
    if isinstance(activation, UnaryActivation):
        return product(arithmetic, _apply(_name(activation), x, arithmetic), *factors)
    parts = _parts(activation, *_split(x, layout), arithmetic, slopes=False)
    return product(arithmetic, parts.activated, parts.linear, *factors)


def backward(
    activation: Activation, grad: Enclosure, x: Enclosure, layout: str, arithmetic: Arithmetic, factors: list[Enclosure]
) -> tuple[Enclosure, Enclosure]:
    """(the gradient of x for grad times the factors, before it is rounded or quantised; dprob of each row)."""
    incoming = [grad, *factors]
    if isinstance(activation, UnaryActivation):
        name = _name(activation)
        values = [_apply(name, x, arithmetic)]
        slope = _apply(f"{name}'", x, arithmetic)
        gradient = _masked(product(arithmetic, *incoming, slope, inner=_inner(x, arithmetic)), slope)
    else:
        gate, up = _split(x, layout)
        parts = _parts(activation, gate, up, arithmetic, slopes=True)
        assert parts.slope is not None
        values = [parts.activated, parts.linear]
        inner = _inner(gate, arithmetic)
        dgate = _masked(product(arithmetic, *incoming, parts.linear, parts.slope, inner=inner), parts.slope)
        extra = [] if parts.linear_slope is None else [parts.linear_slope]
        dup = product(arithmetic, *incoming, parts.activated, *extra, inner=_inner(up, arithmetic) if extra else None)
        if parts.linear_slope is not None:
            dup = _masked(dup, parts.linear_slope)
        gradient = _joined(dgate, dup, layout)
    return gradient, row_sum(product(arithmetic, grad, *values))


def _inner(x: Enclosure, arithmetic: Arithmetic) -> Tensor | None:
    """PyTorch multiplies a gradient into the derivative's own factors, none of which exceeds (1 + |x|)^3."""
    return (1.0 + x.reach) ** 3 if arithmetic.functions == "library" else None


def _masked(gradient: Enclosure, slope: Enclosure) -> Enclosure:
    """Exactly 0 where the slope is exactly 0, whatever is multiplied by it: a masked gradient is selected."""
    return gradient.where(~((slope.value == 0) & (slope.error == 0) & slope.decided))
