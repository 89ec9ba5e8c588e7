"""Arithmetic of f16, bf16 and their packed pairs (PTX ISA 9.7.4).

Operands become float64, where sums and products of them are exact or rounded to odd; one rounding to the format
follows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import approximate, floats
from .lowering import Lowering
from .memory import Array
from .narrow import FORMATS, decode, encode
from .registry import Modifiers, Step, instruction

TABLES = {name: decode(np.arange(65536, dtype=np.uint32), FORMATS[name]).astype(np.float32) for name in ("f16", "bf16")}
HALF = "type=f16|bf16|f16x2|bf16x2"
_F16, _BF16 = "type=f16|f16x2", "type=bf16|bf16x2"


def decoder(kind: str) -> Callable[[Array], Array]:
    """Float32 values of codes."""
    table = TABLES[kind]
    return lambda codes: table[codes]


def round_to(kind: str, x: Array, mode: str = "rn") -> Array:
    """Codes (uint16) of float64 values that are exact or rounded to odd."""
    r = floats.narrow32(x, "rz")
    bits = r.view(np.uint32) | (np.isfinite(x) & (r.astype(np.float64) != x)).astype(np.uint32)
    return encode(bits.view(np.float32), FORMATS[kind], mode).astype(np.uint16)


def lanes(kind: str) -> tuple[str, str]:
    """The element type and the register type."""
    return kind.removesuffix("x2"), "b32" if kind.endswith("x2") else "b16"


def _flushed(codes: Array) -> Array:
    """f16 codes with subnormal values replaced by zeros of their sign."""
    return np.where(codes & np.uint16(0x7C00), codes, codes & np.uint16(0x8000))


def halves(b: Lowering, m: Modifiers, count: int, compute: Callable[..., Array], raw: bool = False) -> Step:
    """An instruction on 16-bit elements; `compute` maps float64 arrays to codes, or codes to codes (raw).

    `.ftz` flushes operands and results of f16.
    """
    kind, register = lanes(m.type)
    table = TABLES[kind]
    flushing = m.ftz and kind == "f16"

    def step(*v: Any) -> Array:
        shape = np.broadcast_shapes(*(np.shape(x) for x in v))
        codes = [np.ascontiguousarray(np.broadcast_to(x, shape)).view(np.uint16) for x in v]
        if flushing:
            codes = [_flushed(c) for c in codes]
        out = compute(*codes) if raw else compute(*(table[c].astype(np.float64) for c in codes))
        if flushing:
            out = _flushed(out)
        return np.asarray(out, np.uint16).view(np.uint32) if register == "b32" else np.asarray(out, np.uint16)

    return b.alu(register, (register,) * count, step)


def saturated(kind: str, codes: Array) -> Array:
    """Codes clamped to [0, 1]; NaN becomes +0."""
    value = TABLES[kind][codes]
    one = encode(np.ones(1, np.float32), FORMATS[kind]).astype(np.uint16)[0]
    return np.where(value >= 1, one, np.where(value > 0, codes, np.uint16(0)))


def _after(m: Modifiers, kind: str) -> Callable[[Array], Array]:
    """`.relu` clamps negative values and turns NaN into the canonical NaN; `.sat` clamps to [0, 1]."""
    nan = np.uint16(FORMATS[kind].nan or 0)

    def adjust(codes: Array) -> Array:
        if m.sat:
            codes = saturated(kind, codes)
        if m.relu:
            value = TABLES[kind][codes]
            codes = np.where(np.isnan(value), nan, np.where(value > 0, codes, np.uint16(0)))
        return codes

    return adjust


def _sum(kind: str, x: Array, y: Array) -> Array:
    return round_to(kind, floats.odd(*floats.two_sum(x, y)))


for _name in ("add", "sub"):

    @instruction(f"{_name} .rn? .ftz? .sat? {_F16}")
    @instruction(f"{_name} .rn? {_BF16}")
    def add(b: Lowering, m: Modifiers, sign: float = 1.0 if _name == "add" else -1.0) -> Step:
        kind, _ = lanes(m.type)
        after = _after(m, kind)
        return halves(b, m, 2, lambda x, y: after(_sum(kind, x, sign * y)))


def _rounded(m: Modifiers, kind: str, exact: Array) -> Array:
    """`exact` rounded; with `.ftz` a result that only rounding lifts to 2^-14 is zero (measured on an H200)."""
    codes = round_to(kind, exact)
    if m.ftz:
        wide = TABLES[kind][round_to(kind, exact * 2.0**8)]
        lifted = ((codes & np.uint16(0x7FFF)) == 0x0400) & (np.abs(wide) < np.float32(2.0**-6))
        codes = np.where(lifted, codes & np.uint16(0x8000), codes)
    return codes


@instruction(f"mul .rn? .ftz? .sat? {_F16}")
@instruction(f"mul .rn? {_BF16}")
def mul(b: Lowering, m: Modifiers) -> Step:
    kind, _ = lanes(m.type)
    after = _after(m, kind)
    return halves(b, m, 2, lambda x, y: after(_rounded(m, kind, x * y)))


@instruction(f"fma .rn .ftz? .sat? {_F16}")
@instruction(f"fma .rn .ftz? .relu {_F16}")
@instruction(f"fma .rn .relu? {_BF16}")
def fma(b: Lowering, m: Modifiers) -> Step:
    kind, _ = lanes(m.type)
    after = _after(m, kind)
    return halves(b, m, 3, lambda x, y, z: after(_rounded(m, kind, floats.odd(*floats.two_sum(x * y, z)))))


for _name in ("min", "max"):

    @instruction(f"{_name} .ftz? .NaN? {_F16}")
    @instruction(f"{_name} .ftz? .NaN? .xorsign .abs {_F16}")
    @instruction(f"{_name} .NaN? {_BF16}")
    @instruction(f"{_name} .NaN? .xorsign .abs {_BF16}")
    def extremum(b: Lowering, m: Modifiers, largest: bool = _name == "max") -> Step:
        kind, _ = lanes(m.type)
        fmt = FORMATS[kind]

        def pick(x: Array, y: Array) -> Array:
            r = floats.minmax(TABLES[kind][x], TABLES[kind][y], largest, bool(m.NaN), bool(m.abs))
            codes = encode(r, fmt).astype(np.uint16)
            if m.xorsign:
                # Signs of NaN operands count, too.
                signed = codes & np.uint16(0x7FFF) | (x ^ y) & np.uint16(0x8000)
                codes = np.where(np.isnan(r), codes, signed)
            return codes

        return halves(b, m, 2, pick, raw=True)


def _canonical(kind: str, codes: Array, result: Array) -> Array:
    """`result`, or the canonical NaN where the operand is NaN."""
    return np.where(np.isnan(TABLES[kind][codes]), np.uint16(0x7FFF), result)


@instruction(f"neg .ftz? {_F16}")
@instruction(f"neg {_BF16}")
def neg(b: Lowering, m: Modifiers) -> Step:
    kind, _ = lanes(m.type)
    return halves(b, m, 1, lambda c: _canonical(kind, c, c ^ np.uint16(0x8000)), raw=True)


@instruction(f"abs .ftz? {_F16}")
@instruction(f"abs {_BF16}")
def absolute(b: Lowering, m: Modifiers) -> Step:
    kind, _ = lanes(m.type)
    return halves(b, m, 1, lambda c: _canonical(kind, c, c & np.uint16(0x7FFF)), raw=True)


for _name, _form in (
    ("ex2", ".approx type=f16|f16x2"), ("ex2", ".approx .ftz type=bf16|bf16x2"), ("tanh", f".approx {HALF}"),
):  # fmt: skip

    @instruction(f"{_name} {_form}")
    def approximation(b: Lowering, m: Modifiers, name: str = _name) -> Step:
        kind, _ = lanes(m.type)
        captured = approximate.of_codes(name, kind, b.program.arch)
        if captured is not None:
            return halves(b, m, 1, captured, raw=True)
        f = approximate.function(name, b.program.arch, False)
        fmt = FORMATS[kind]
        return halves(b, m, 1, lambda x: encode(f(x.astype(np.float32)), fmt).astype(np.uint16))
