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
_FLOAT_CMP = "cmp=eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan"
_CMP_TYPES = "type=b16|b32|b64|u16|u32|u64|s16|s32|s64|f32|f64|f16|bf16"


def comparison(cmp: str, kind: str, ftz: bool) -> Callable[[Any, Any], Any]:
    """The comparison of two operands of a PTX type."""
    op = COMPARE[cmp]
    if kind in ("f16", "bf16"):
        from .isa_half import decoder

        if cmp == "ne":
            op = _ordered_ne
        decode = decoder(kind)
        if ftz:
            least = np.float32(2.0**-14)
            return lambda x, y: op(*(np.where(np.abs(v) < least, np.float32(0), v) for v in (decode(x), decode(y))))
        return lambda x, y: op(decode(x), decode(y))
    if kind in ("f32", "f64"):
        if cmp == "ne":
            op = _ordered_ne
        if ftz:
            return lambda x, y: op(floats.flush(x), floats.flush(y))
    return op


def _each(x: Array) -> tuple[Array, Array]:
    """The lower and the upper 16 bits of words."""
    return (x & np.uint32(0xFFFF)).astype(np.uint16), (x >> np.uint32(16)).astype(np.uint16)


def _checked(b: Lowering, m: Modifiers) -> None:
    """Refuses comparisons that a type does not have, and flushing where there is nothing to flush."""
    ordered = {"b": "eq ne", "s": "eq ne lt le gt ge", "u": "eq ne lt le gt ge lo ls hi hs"}.get(m.type[0], "")
    floating = m.type in ("f16", "bf16", "f32", "f64")
    allowed = [name for name in COMPARE if name not in ("lo", "ls", "hi", "hs")] if floating else ordered.split()
    if m.cmp not in allowed:
        raise b.fail(f"`{b.ins.name}`: .{m.cmp} does not compare .{m.type}; {', '.join(f'.{a}' for a in allowed)} do")
    if m.ftz and m.type not in ("f16", "f32"):
        raise b.fail(f"`{b.ins.name}`: .ftz does not go with .{m.type}")


@instruction(f"setp {_CMP} combine?=and|or|xor .ftz? {_CMP_TYPES}")
def setp(b: Lowering, m: Modifiers) -> Step:
    _checked(b, m)
    compare = comparison(m.cmp, m.type, bool(m.ftz))
    target = b.operands[0]
    second = None
    if isinstance(target, ptx.Pair):
        if m.type in ("f16", "bf16"):
            raise b.fail(f"`{b.ins.name}` gives one predicate")
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


@instruction(f"setp {_FLOAT_CMP} combine?=and|or|xor .ftz? type=f16x2")
@instruction(f"setp {_FLOAT_CMP} combine?=and|or|xor type=bf16x2")
def setp_pair(b: Lowering, m: Modifiers) -> Step:
    """Compares the lower halves into the first predicate, the upper ones into the second."""
    target = b.operands[0]
    if not isinstance(target, ptx.Pair):
        raise b.fail(f"`{b.ins.name}` needs `p|q`")
    compare = comparison(m.cmp, m.type.removesuffix("x2"), bool(m.ftz))
    writes = [b.write(o, "pred") for o in (target.first, target.second)]
    x, y = (b.full(b.read(o, "b32")) for o in b.operands[1:3])
    other = b.read(b.operands[3], "pred") if m.combine else None

    def step(w: Any, i: Index) -> None:
        found = [compare(left, right) for left, right in zip(_each(x(w, i)), _each(y(w, i)), strict=True)]
        if other is not None:
            found = [_COMBINE[m.combine](t, other(w, i)) for t in found]
        for write, t in zip(writes, found, strict=True):
            write(w, i, t)

    return step


_TRUE: dict[str, Any] = {
    "f32": np.float32(1), "u32": np.uint32(0xFFFFFFFF), "s32": np.int32(-1), "u16": np.uint16(0xFFFF),
    "s16": np.int16(-1), "f16": np.uint16(0x3C00), "bf16": np.uint16(0x3F80),
}  # fmt: skip


@instruction(f"set {_FLOAT_CMP} combine?=and|or|xor .ftz? to=u16|s16|u32|s32|f16|bf16 type=f16|bf16")
@instruction(f"set {_CMP} combine?=and|or|xor .ftz? to=u32|s32|f32|f16|bf16 {_CMP_TYPES.removesuffix('|f16|bf16')}")
def set_value(b: Lowering, m: Modifiers) -> Step:
    _checked(b, m)
    if (m.to, m.type) == ("f16", "bf16") or (m.ftz and m.to == "bf16"):
        raise b.fail(f"`{b.ins.name}` is no combination of types and modifiers that PTX has")
    compare = comparison(m.cmp, m.type, bool(m.ftz))
    true = _TRUE[m.to]
    zero = true.dtype.type(0)
    if m.combine:
        combine = _COMBINE[m.combine]
        return b.alu(m.to, (m.type, m.type, "pred"), lambda x, y, c: np.where(combine(compare(x, y), c), true, zero))
    return b.alu(m.to, (m.type, m.type), lambda x, y: np.where(compare(x, y), true, zero))


@instruction(f"set {_FLOAT_CMP} combine?=and|or|xor .ftz? to=f16x2|u32|s32 type=f16x2")
@instruction(f"set {_FLOAT_CMP} combine?=and|or|xor to=bf16x2|u32|s32 type=bf16x2")
def set_pair(b: Lowering, m: Modifiers) -> Step:
    """Each half becomes 1.0, or 0xffff where the target is an integer, or 0."""
    compare = comparison(m.cmp, m.type.removesuffix("x2"), bool(m.ftz))
    true = np.uint32(_TRUE[m.to.removesuffix("x2") if m.to.endswith("x2") else "u16"])

    def halves(x: Array, y: Array, c: Any = None) -> Array:
        low, high = (compare(left, right) for left, right in zip(_each(x), _each(y), strict=True))
        if m.combine:
            low, high = (_COMBINE[m.combine](t, c) for t in (low, high))
        return low * true | high * true << np.uint32(16)

    return b.alu("b32", ("b32", "b32", "pred") if m.combine else ("b32", "b32"), halves)


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


_SELECTED = "type=b16|u16|s16|b32|u32|s32|f32|b64|u64|s64|f64"


@instruction(f"slct {_SELECTED} by=s32|f32")
def slct(b: Lowering, m: Modifiers) -> Step:
    t = f"b{8 * VIEW[m.type].itemsize}"
    return b.alu(t, (t, t, m.by), lambda x, y, c: np.where(c >= 0, x, y))


@instruction(f"slct .ftz {_SELECTED} .f32")
def slct_flushed(b: Lowering, m: Modifiers) -> Step:
    t = f"b{8 * VIEW[m.type].itemsize}"
    return b.alu(t, (t, t, "f32"), lambda x, y, c: np.where(floats.flush(c) >= 0, x, y))
