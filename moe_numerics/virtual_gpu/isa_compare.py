"""Comparisons and selections (PTX ISA 9.7.6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import floats, ptx
from .lowering import VIEW, Lowering, immediate
from .memory import Array
from .registry import Index, Modifiers, Step, instruction

COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
    "equ": lambda x, y: (x == y) | np.isnan(x) | np.isnan(y),
    "neu": np.not_equal,
    "ltu": lambda x, y: ~(x >= y), "leu": lambda x, y: ~(x > y), "gtu": lambda x, y: ~(x <= y),
    "geu": lambda x, y: ~(x < y),
    "num": lambda x, y: ~(np.isnan(x) | np.isnan(y)), "nan": lambda x, y: np.isnan(x) | np.isnan(y),
}  # fmt: skip


def _ordered_ne(x: Array, y: Array) -> Array:
    """`ne` of floats is false for NaN."""
    return (x < y) | (x > y)


_COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
_CMP = "cmp=eq|ne|lt|le|gt|ge|lo|ls|hi|hs|equ|neu|ltu|leu|gtu|geu|num|nan"
_CMP_TYPES = "type=b16|b32|b64|u16|u32|u64|s16|s32|s64|f32|f64|f16|bf16"


def comparison(cmp: str, kind: str, ftz: bool) -> Callable[[Any, Any], Any]:
    """The comparison of two operands of a PTX type."""
    op = COMPARE[cmp]
    if kind in ("f16", "bf16"):
        from .isa_half import decoder

        if cmp == "ne":
            op = _ordered_ne
        decode = decoder(kind)
        return lambda x, y: op(decode(x), decode(y))
    if kind in ("f32", "f64"):
        if cmp == "ne":
            op = _ordered_ne
        if ftz:
            return lambda x, y: op(floats.flush(x), floats.flush(y))
    return op


@instruction(f"setp {_CMP} combine?=and|or|xor .ftz? {_CMP_TYPES}")
def setp(b: Lowering, m: Modifiers) -> Step:
    compare = comparison(m.cmp, m.type, bool(m.ftz))
    target = b.operands[0]
    second = None
    if isinstance(target, ptx.Pair):
        second = b.write(target.second, "pred")
        target = target.first
    write = b.write(target, "pred")
    x, y = (b.read(o, m.type) for o in b.operands[1:3])
    if all(isinstance(o, ptx.Imm) for o in b.operands[1:3]):
        x = b.full(x)
    if not m.combine:
        if second is None:
            return lambda w, i: write(w, i, compare(x(w, i), y(w, i)))

        def both(w: Any, i: Index) -> None:
            t = compare(x(w, i), y(w, i))
            write(w, i, t)
            second(w, i, ~t)

        return both
    combine = _COMBINE[m.combine]
    c = b.read(b.operands[3], "pred")

    def combined(w: Any, i: Index) -> None:
        t, other = compare(x(w, i), y(w, i)), c(w, i)
        write(w, i, combine(t, other))
        if second is not None:
            second(w, i, combine(~t, other))

    return combined


@instruction(f"set {_CMP} combine?=and|or|xor .ftz? to=u32|s32|f32 {_CMP_TYPES}")
def set_value(b: Lowering, m: Modifiers) -> Step:
    compare = comparison(m.cmp, m.type, bool(m.ftz))
    true = np.float32(1) if m.to == "f32" else np.uint32(0xFFFFFFFF)
    zero = true.dtype.type(0)
    if m.combine:
        combine = _COMBINE[m.combine]
        return b.alu(m.to, (m.type, m.type, "pred"), lambda x, y, c: np.where(combine(compare(x, y), c), true, zero))
    return b.alu(m.to, (m.type, m.type), lambda x, y: np.where(compare(x, y), true, zero))


@instruction("selp type=b16|b32|b64|u16|u32|u64|s16|s32|s64|f32|f64")
def selp(b: Lowering, m: Modifiers) -> Step:
    # Selecting by arithmetic: np.where takes five times as long on mixed predicates.
    t = f"b{8 * VIEW[m.type].itemsize}"
    dtype = VIEW[t]
    if all(isinstance(o, ptx.Imm) for o in b.operands[1:3]):
        x, y = (immediate(o, m.type).view(dtype) for o in b.operands[1:3])  # type: ignore[arg-type]
        p, write = b.full(b.read(b.operands[3], "pred")), b.write(b.operands[0], t)
        return lambda w, i: write(w, i, np.multiply(x ^ y, p(w, i), dtype=dtype) ^ y)
    return b.alu(t, (t, t, "pred"), lambda x, y, p: np.multiply(x ^ y, p, dtype=dtype) ^ y)


@instruction("slct type=b32|u32|s32|f32|b64|u64|s64|f64 by=s32|f32")
def slct(b: Lowering, m: Modifiers) -> Step:
    return b.alu(m.type, (m.type, m.type, m.by), lambda x, y, c: np.where(c >= 0, x, y))
