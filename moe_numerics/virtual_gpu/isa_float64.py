"""Float64 arithmetic (PTX ISA 9.7.3).

Rounding to nearest is NumPy's; other directions round the exact rational value, element by element.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from .lowering import Lowering
from .memory import Array
from .rational import each, root, rounded
from .registry import Modifiers, Step, instruction

_RND = "rnd=rn|rz|rm|rp"


def with_nan64(x: Array, *operands: Array) -> Array:
    """`x` with NaN as an H200 makes it: the first of `operands` that is one, quieted, or 0xfff8000000000000.

    Sums and products look at the second operand first, quotients at the first.
    """
    bad = np.isnan(x)
    if bad.any():
        bits = np.full(x.shape, 0xFFF8000000000000, np.uint64)
        for operand in reversed(operands):
            spread = np.broadcast_to(operand, x.shape)
            quiet = np.ascontiguousarray(spread).view(np.uint64) | np.uint64(0x0008000000000000)
            bits = np.where(np.isnan(spread), quiet, bits)
        x = np.where(bad, bits, np.ascontiguousarray(x).view(np.uint64)).view(np.float64)
    return x


def _finite(*operands: Array) -> Any:
    found: Any = True
    for v in operands:
        found = found & np.isfinite(v)
    return found


def _negative(x: float) -> bool:
    return math.copysign(1.0, x) < 0


def _zero(first: bool, second: bool, mode: str) -> bool:
    """Whether an exact sum of zero is -0, from the signs of its terms (IEEE 754-2019, 6.3)."""
    return first if first == second else mode == "rm"


def _sum(x: float, y: float, mode: str) -> float:
    return rounded(Fraction(x) + Fraction(y), mode, _zero(_negative(x), _negative(y), mode))


def _product(x: float, y: float, mode: str) -> float:
    return rounded(Fraction(x) * Fraction(y), mode, _negative(x) != _negative(y))


def _quotient(x: float, y: float, mode: str) -> float:
    return rounded(Fraction(x) / Fraction(y), mode, _negative(x) != _negative(y))


def _fma(x: float, y: float, z: float, mode: str) -> float:
    negative = _zero(_negative(x) != _negative(y), _negative(z), mode)
    return rounded(Fraction(x) * Fraction(y) + Fraction(z), mode, negative)


def add64(x: Array, y: Array, mode: str) -> Array:
    """x + y."""
    nearest = np.asarray(x + y)
    return nearest if mode == "rn" else each(lambda a, b: _sum(a, b, mode), nearest, _finite(x, y), x, y)


def mul64(x: Array, y: Array, mode: str) -> Array:
    """x * y."""
    nearest = np.asarray(x * y)
    return nearest if mode == "rn" else each(lambda a, b: _product(a, b, mode), nearest, _finite(x, y), x, y)


def div64(x: Array, y: Array, mode: str) -> Array:
    """x / y."""
    nearest = np.asarray(x / y)
    if mode == "rn":
        return nearest
    return each(lambda a, b: _quotient(a, b, mode), nearest, _finite(x, y) & (y != 0), x, y)


def sqrt64(x: Array, mode: str) -> Array:
    """The square root; NaN below zero, -0 for -0."""
    nearest = np.asarray(np.sqrt(x))
    return nearest if mode == "rn" else each(lambda a: root(a, mode), nearest, np.isfinite(x) & (x > 0), x)


def fma64(x: Array, y: Array, z: Array, mode: str) -> Array:
    """x * y + z, rounded once."""
    x, y, z = np.broadcast_arrays(x, y, z)
    # A finite product never meets an infinity: it may only overflow afterwards.
    product = np.where(_finite(x, y) & ~np.isfinite(z), 0.0, x * y)
    return each(lambda a, b, c: _fma(a, b, c, mode), np.asarray(product + z), _finite(x, y, z), x, y, z)


@instruction("add rnd?=rn|rz|rm|rp .f64")
def add(b: Lowering, m: Modifiers) -> Step:
    mode = m.get("rnd", "rn")
    return b.alu("f64", ("f64", "f64"), lambda x, y: with_nan64(add64(x, y, mode), y, x))


@instruction("sub rnd?=rn|rz|rm|rp .f64")
def sub(b: Lowering, m: Modifiers) -> Step:
    mode = m.get("rnd", "rn")
    return b.alu("f64", ("f64", "f64"), lambda x, y: with_nan64(add64(x, np.negative(y), mode), y, x))


@instruction("mul rnd?=rn|rz|rm|rp .f64")
def mul(b: Lowering, m: Modifiers) -> Step:
    mode = m.get("rnd", "rn")
    return b.alu("f64", ("f64", "f64"), lambda x, y: with_nan64(mul64(x, y, mode), y, x))


@instruction(f"div {_RND} .f64")
def div(b: Lowering, m: Modifiers) -> Step:
    return b.alu("f64", ("f64", "f64"), lambda x, y: with_nan64(div64(x, y, m.rnd), x, y))


@instruction(f"rcp {_RND} .f64")
def rcp(b: Lowering, m: Modifiers) -> Step:
    return b.alu("f64", ("f64",), lambda x: with_nan64(div64(np.ones_like(x), x, m.rnd), x))


@instruction(f"sqrt {_RND} .f64")
def sqrt(b: Lowering, m: Modifiers) -> Step:
    return b.alu("f64", ("f64",), lambda x: with_nan64(sqrt64(x, m.rnd), x))


@instruction(f"mad {_RND} .f64")
@instruction(f"fma {_RND} .f64")
def fma(b: Lowering, m: Modifiers) -> Step:
    return b.alu("f64", ("f64",) * 3, lambda x, y, z: with_nan64(fma64(x, y, z, m.rnd), y, z, x))


def _minimum(x: Array, y: Array) -> Array:
    """-0 is below +0."""
    return np.where((x == 0) & (y == 0), np.where(np.signbit(x), x, y), np.fmin(x, y))


def _maximum(x: Array, y: Array) -> Array:
    return np.where((x == 0) & (y == 0), np.where(np.signbit(x), y, x), np.fmax(x, y))


_OTHERS: dict[str, tuple[int, Callable[..., Any]]] = {
    "min": (2, _minimum), "max": (2, _maximum), "neg": (1, np.negative), "abs": (1, np.abs),
}  # fmt: skip
for _name, (_count, _op) in _OTHERS.items():

    @instruction(f"{_name} .f64")
    def other(b: Lowering, m: Modifiers, count: int = _count, op: Callable[..., Any] = _op) -> Step:
        return b.alu("f64", ("f64",) * count, lambda *v: with_nan64(op(*v), *reversed(v)))


@instruction("copysign .f64")
def copysign(b: Lowering, m: Modifiers) -> Step:
    return b.alu("f64", ("f64", "f64"), lambda sign, value: np.copysign(value, sign))
