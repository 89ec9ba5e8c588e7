"""How far float32 activations are from the true ones: measured on every bfloat16 input, kept as a table.

The functions are those that a path applies to one operand: activations and their derivatives. Three kinds of arithmetic
evaluate them: "exact", the project's own float32 polynomials; "library", PyTorch's float32 operators, whose derivatives
are those of its autograd; "fast", the approximate instructions of a GPU. The first two are measured against the float64
oracle. The third is bounded over the same inputs (`fast_errors`), and only for sigmoid and what multiplies it.

Operands are bfloat16 where a path applies the function to its input, and all of their finite values are measured; they
are float32 where a bias was added or a matrix product made them, and then all values of magnitudes from 2^-30 to 2^8
are measured, and every 256th beyond, where the functions are straight lines, constants or 0.

    |computed(x) - f(x)| <= (relative * |f(x)| + weighted * w(x)) * 2^-24 + 2^tiny        without 2^tiny where w(x) = 0

w(x) is |x| for activations, max(x, 0) for those that are masked below zero and their derivatives, and 1 for other
derivatives and sigmoid: where f is small by cancellation, the error follows w and not f. `relative` is the largest
error over |f| where |f| >= w / 8, `weighted` what other inputs need above that, `tiny` what is left below 2^-120. All
are rounded up, which covers what float64 loses.

`python -m moe_numerics.activation_errors [--operands float32 --device cuda]` measures again and prints a table. On a
GPU "library" is the worse of PyTorch's operators on the CPU and there.
"""

from __future__ import annotations

import argparse
import fnmatch
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_numerics import fast_errors
from moe_numerics.reference import exact_math, oracle
from moe_numerics.reference.activations import UNARY_ACTIVATIONS, SituGlu
from moe_numerics.reference.exact_math import float32
from moe_numerics.reference.unary_activations import (
    QuickGelu,
    Relu,
    Sigmoid,
    SquaredRelu,
    TanhSquaredRelu,
    UnaryActivation,
)

__all__ = ["FUNCTIONS", "KINDS", "ActivationError", "Function", "error_of", "measure"]

KINDS = ("exact", "library", "fast")
UNIT = 2.0**-24
NORMAL = 2.0**-120
LOG2_E = 1.4426950408889634

Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ActivationError:
    """The constants of the module's docstring; relative and weighted in units of 2^-24, tiny a power of two."""

    relative: float
    weighted: float
    tiny: int

    def bound(self, value: Tensor, weight: Tensor) -> Tensor:
        """The error bound for oracle values and weights, float64."""
        return (self.relative * value.abs() + self.weighted * weight) * UNIT + (weight > 0) * 2.0**self.tiny


@dataclass(frozen=True)
class Function:
    """One function of one operand: its float64 oracle, and how float32 evaluates it.

    weighting: "input", "positive" or "one", what w(x) is. fast: (value, error bound) under approximate instructions,
    None where those do not reach it.
    """

    oracle: Map
    exact: Map
    library: Map
    weighting: str
    fast: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None

    def weight(self, x: Tensor) -> Tensor:
        """w(x) in float64."""
        wide = x.double()
        return {"input": wide.abs(), "positive": wide.clamp(min=0.0), "one": torch.ones_like(wide)}[self.weighting]


def _library(activation: UnaryActivation) -> Map:
    name = type(activation).__name__
    if isinstance(activation, QuickGelu):
        alpha = float32(activation.alpha)
        return lambda x: x * torch.sigmoid(alpha * x)
    named: dict[str, Map] = {
        "Silu": torch.nn.functional.silu,
        "Sigmoid": torch.sigmoid,
        "Gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "GeluErf": torch.nn.functional.gelu,
        "Relu": torch.relu,
        "SquaredRelu": lambda x: torch.relu(x) ** 2,
        "TanhSquaredRelu": lambda x: (_SCALE * torch.tanh(torch.relu(x) / _SCALE)) ** 2,
    }
    return named[name]


_SCALE = float32(getattr(UNARY_ACTIVATIONS["tanh_srelu"], "scale", 1.0))
_SITU = SituGlu()
_BETAS = {"gate": float32(_SITU.beta_gate), "up": float32(_SITU.beta_up)}


def _autograd(function: Map) -> Map:
    def derivative(x: Tensor) -> Tensor:
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(function(leaf).sum(), leaf)
        return gradient

    return derivative


def _unary(activation: UnaryActivation) -> tuple[Function, Function]:
    """The activation and its derivative."""
    library = _library(activation)
    times_x = not isinstance(activation, Sigmoid)
    fast, fast_slope = fast_errors.of_activation(activation)
    masked = isinstance(activation, Relu | SquaredRelu | TanhSquaredRelu)
    weighting = "positive" if masked else "input" if times_x else "one"
    forward = Function(lambda x: oracle.forward(activation, x), activation.evaluate, library, weighting, fast)
    backward = Function(
        lambda x: oracle.backward(activation, torch.ones_like(x), x)[0],
        lambda x: activation.differentiate(torch.ones_like(x), x)[1],
        _autograd(library),
        "positive" if masked else "one",
        fast_slope,
    )
    return forward, backward


def _situ() -> dict[str, Function]:
    b, c = _BETAS["gate"], _BETAS["up"]

    def bounded(x: Tensor, beta: float) -> Tensor:
        return exact_math.tanh(x * float32(1.0 / beta)) * beta

    def gate_slope(x: Tensor) -> Tensor:
        terms, pair = exact_math.tanh_terms(x * float32(1.0 / b)), exact_math.sigmoid_pair(x)
        return pair.value * exact_math.fma(terms.value * b, pair.complement, terms.derivative)

    def gate_value(x: Tensor) -> Tensor:
        return b * torch.tanh(x / b) * torch.sigmoid(x)

    def up_value(x: Tensor) -> Tensor:
        return c * torch.tanh(x / c)

    return {
        "situ_gate": Function(
            gate_value, lambda x: bounded(x, b) * exact_math.sigmoid_pair(x).value, gate_value, "input"
        ),
        "situ_gate'": Function(
            lambda x: oracle.sigmoid(x) * (b * torch.tanh(x / b) * oracle.sigmoid(-x) + oracle.sech_squared(x / b)),
            gate_slope,
            _autograd(gate_value),
            "one",
        ),
        "situ_up": Function(up_value, lambda x: bounded(x, c), up_value, "input"),
        "situ_up'": Function(
            lambda x: oracle.sech_squared(x / c),
            lambda x: exact_math.tanh_terms(x * float32(1.0 / c)).derivative,
            _autograd(up_value),
            "one",
        ),
    }


def _functions() -> dict[str, Function]:
    found: dict[str, Function] = {}
    for name, activation in {**UNARY_ACTIVATIONS, "sigmoid": Sigmoid()}.items():
        found[name], found[f"{name}'"] = _unary(activation)
    return found | _situ()


FUNCTIONS: dict[str, Function] = _functions()
"""Every function by name; a derivative's name ends in an apostrophe."""


CHUNK = 1 << 23
"""Float32 operands that are measured at a time."""


def _operands(kind: str, device: str) -> Iterator[Tensor]:
    """float32 tensors that hold the operands of a kind, "bfloat16" or "float32"."""
    if kind == "bfloat16":
        bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
        yield bits[torch.isfinite(bits)].float().to(device)
        return
    ends = [(127 + exponent) << 23 for exponent in (-30, 8)]
    for start, end, step in ((0, ends[0], 256), (*ends, 1), (ends[1], 0x7F800000, 256)):
        for first in range(start, end, CHUNK * step):
            magnitude = torch.arange(first, min(first + CHUNK * step, end), step, dtype=torch.int32, device=device)
            x = magnitude.view(torch.float32)
            yield x
            yield -x


def _errors(name: str, kind: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """(oracle values, errors of the kind) in float64. KeyError: the kind does not reach the function."""
    function, wide = FUNCTIONS[name], x.double()
    if kind == "fast":
        if function.fast is None:
            raise KeyError(name)
        return function.fast(wide)
    value = function.oracle(wide)
    evaluate = function.exact if kind == "exact" else function.library
    error = (evaluate(x).double() - value).abs()
    if kind == "library" and x.is_cuda:
        error = error.maximum((evaluate(x.cpu()).to(x.device).double() - value).abs())
    return value, error


def measure(name: str, kind: str, operands: str = "bfloat16", device: str = "cpu") -> ActivationError:
    """The constants of one function, over its operands. KeyError: the kind does not reach it."""
    largest, kept = 0.0, []
    for x in _operands(operands, device):
        value, error = _errors(name, kind, x)
        weight = FUNCTIONS[name].weight(x)
        inside = (value.abs() < 2.0**127) & torch.isfinite(error) & (weight > 0)
        value, error, weight = value.abs()[inside], error[inside], weight[inside]
        large = (value >= NORMAL) & (weight >= NORMAL) & (value >= weight / 8)
        largest = max(largest, float((error[large] / value[large]).amax()) if bool(large.any()) else 0.0)
        kept.append(torch.stack((value, error, weight))[:, ~large])
    relative = _ceil(largest / UNIT)
    value, error, weight = torch.cat(kept, dim=1)
    normal = (value >= NORMAL) & (weight >= NORMAL)
    left = (error - relative * UNIT * value).clamp(min=0.0)
    # Below 2^-90 of the weight the flushed end of an exponential is left to `tiny`.
    weighted = _ceil(float((left[normal] / weight[normal]).amax()) / UNIT) if bool(normal.any()) else 0.0
    left = (left - weighted * UNIT * weight).clamp(min=0.0)
    tiny = float(left.amax()) if left.numel() else 0.0
    return ActivationError(relative, weighted, max(math.ceil(math.log2(tiny)) if tiny else -149, -149))


def _ceil(value: float) -> float:
    """The next 1/64 above, zero for zero."""
    return math.ceil(value * 64 + 2.0**-10) / 64 if value else 0.0


def error_of(name: str, kind: str, operands: str = "bfloat16") -> ActivationError:
    """The table's entry. KeyError: an unknown function, or one that the kind of arithmetic does not reach."""
    return ActivationError(*(TABLE if operands == "bfloat16" else FLOAT32_TABLE)[name][kind])


TABLE: dict[str, dict[str, tuple[float, float, int]]] = {
    "gelu": {"exact": (3.453125, 0.09375, -149), "library": (4.359375, 0.5, -149), "fast": (20.09375, 0.421875, -149)},
    "gelu'": {
        "exact": (6.03125, 0.453125, -149),
        "library": (17.296875, 17.296875, -149),
        "fast": (115.984375, 2.75, -149),
    },
    "gelu_erf": {"exact": (7.78125, 0.0, -146), "library": (11.359375, 3.171875, -149)},
    "gelu_erf'": {"exact": (6.671875, 0.578125, -149), "library": (17.015625, 1.578125, -149)},
    "qgelu": {
        "exact": (3.3125, 0.03125, -149),
        "library": (2.734375, 0.0625, -149),
        "fast": (12.59375, 0.1875, -149),
    },
    "qgelu'": {
        "exact": (3.8125, 0.453125, -149),
        "library": (15.765625, 0.359375, -149),
        "fast": (58.9375, 1.453125, -149),
    },
    "silu": {
        "exact": (3.1875, 0.015625, -149),
        "library": (2.375, 0.015625, -121),
        "fast": (12.609375, 0.1875, -149),
    },
    "silu'": {
        "exact": (3.75, 0.328125, -149),
        "library": (16.21875, 0.140625, -149),
        "fast": (59.015625, 1.15625, -149),
    },
    "relu": {"exact": (0.0, 0.0, -149), "library": (0.0, 0.0, -149)},
    "relu'": {"exact": (0.0, 0.0, -149), "library": (0.0, 0.0, -149)},
    "srelu": {"exact": (0.0, 0.0, -149), "library": (0.0, 0.0, -149)},
    "srelu'": {"exact": (0.0, 0.0, -149), "library": (0.0, 0.0, -149)},
    "tanh_srelu": {"exact": (5.703125, 0.0, -149), "library": (5.546875, 0.0, -149)},
    "tanh_srelu'": {"exact": (5.703125, 0.0, -145), "library": (9.765625, 0.640625, -149)},
    "sigmoid": {
        "exact": (2.984375, 0.015625, -149),
        "library": (2.25, 0.015625, -128),
        "fast": (11.609375, 0.1875, -149),
    },
    "sigmoid'": {"exact": (3.15625, 0.015625, -149), "library": (5.921875, 1.40625, -149)},
    "situ_gate": {"exact": (4.734375, 0.015625, -149), "library": (4.171875, 0.0, -126)},
    "situ_gate'": {"exact": (6.96875, 0.53125, -149), "library": (35.296875, 4.3125, -149)},
    "situ_up": {"exact": (4.046875, 0.0, -145), "library": (3.5625, 0.0, -145)},
    "situ_up'": {"exact": (4.53125, 0.078125, -149), "library": (9.203125, 1.015625, -149)},
}
"""Measured with torch 2.13.0 and 2.11.0 on x86-64, and with 2.11.0 on an H200: "library" is the worst of them."""


FLOAT32_TABLE: dict[str, dict[str, tuple[float, float, int]]] = {
    "gelu": {
        "exact": (5.4375, 0.109375, -149),
        "library": (8.234375, 0.515625, -149),
        "fast": (20.140625, 0.421875, -149),
    },
    "gelu'": {
        "exact": (10.0, 0.828125, -149),
        "library": (17.421875, 17.421875, -149),
        "fast": (117.65625, 2.8125, -149),
    },
    "gelu_erf": {"exact": (8.765625, 0.015625, -146), "library": (11.359375, 5.71875, -149)},
    "gelu_erf'": {"exact": (14.078125, 1.3125, -149), "library": (22.34375, 2.859375, -149)},
    "qgelu": {
        "exact": (4.546875, 0.09375, -149),
        "library": (4.265625, 0.15625, -149),
        "fast": (12.609375, 0.1875, -149),
    },
    "qgelu'": {
        "exact": (6.40625, 0.703125, -149),
        "library": (16.375, 0.734375, -149),
        "fast": (59.015625, 1.46875, -149),
    },
    "silu": {
        "exact": (4.046875, 0.015625, -149),
        "library": (3.28125, 0.015625, -121),
        "fast": (12.609375, 0.1875, -149),
    },
    "silu'": {"exact": (5.40625, 0.5, -149), "library": (16.375, 0.296875, -149), "fast": (59.015625, 1.1875, -149)},
    "relu": {"exact": (0.0, 0.0, -149), "library": (0.0, 0.0, -149)},
    "relu'": {"exact": (0.0, 0.0, -149), "library": (0.0, 0.0, -149)},
    "srelu": {"exact": (1.0, 0.0, -149), "library": (1.0, 0.0, -149)},
    "srelu'": {"exact": (0.0, 0.0, -149), "library": (0.0, 0.0, -149)},
    "tanh_srelu": {"exact": (7.71875, 0.0, -149), "library": (7.34375, 0.0, -149)},
    "tanh_srelu'": {"exact": (7.546875, 0.0, -145), "library": (12.375, 0.65625, -149)},
    "sigmoid": {
        "exact": (3.390625, 0.015625, -149),
        "library": (2.9375, 0.03125, -128),
        "fast": (11.609375, 0.1875, -149),
    },
    "sigmoid'": {"exact": (3.734375, 0.03125, -149), "library": (8.765625, 1.5, -149)},
    "situ_gate": {"exact": (6.734375, 0.015625, -149), "library": (5.734375, 0.0, -126)},
    "situ_gate'": {"exact": (12.765625, 0.96875, -149), "library": (51.921875, 4.96875, -149)},
    "situ_up": {"exact": (5.09375, 0.0, -145), "library": (4.625, 0.0, -145)},
    "situ_up'": {"exact": (6.734375, 0.1875, -149), "library": (15.3125, 1.03125, -149)},
}
"""Of float32 operands: measured with torch 2.11.0 on an H200 and its x86-64 host; no entry is below `TABLE`'s."""


def table_text(operands: str = "bfloat16", device: str = "cpu", only: str = "*") -> str:
    """The measured table as the lines of this file, of the functions whose names match a shell pattern."""
    lines = []
    for name in fnmatch.filter(FUNCTIONS, only):
        entries = []
        for kind in KINDS:
            try:
                found = measure(name, kind, operands, device)
            except KeyError:
                continue
            entries.append(f'"{kind}": ({found.relative!r}, {found.weighted!r}, {found.tiny})')
        lines.append(f'    "{name}": {{{", ".join(entries)}}},')
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure the errors of activations and print the table.")
    parser.add_argument("--operands", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="*", help="shell pattern on names of functions")
    arguments = parser.parse_args()
    print(table_text(arguments.operands, arguments.device, arguments.only))
