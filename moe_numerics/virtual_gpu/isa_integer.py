"""Integer arithmetic (PTX ISA 9.7.1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .lowering import VIEW, Lowering
from .memory import Array
from .registry import Modifiers, Step, instruction

INTS = "type=u16|s16|u32|s32|u64|s64"
UNSIGNED_OF = {"u16": "u16", "s16": "u16", "u32": "u32", "s32": "u32", "u64": "u64", "s64": "u64"}
WIDE = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}


def _saturated(x: Array) -> Array:
    """Int64 values clamped to the range of int32."""
    return np.clip(x, -(2**31), 2**31 - 1).astype(np.int32)


@instruction(f"add {INTS}")
def add(b: Lowering, m: Modifiers) -> Step:
    t = UNSIGNED_OF[m.type]
    return b.alu(t, (t, t), np.add)


@instruction("add .sat .s32")
def add_saturated(b: Lowering, m: Modifiers) -> Step:
    return b.alu("s32", ("s32", "s32"), lambda x, y: _saturated(x.astype(np.int64) + y))


@instruction(f"sub {INTS}")
def sub(b: Lowering, m: Modifiers) -> Step:
    t = UNSIGNED_OF[m.type]
    return b.alu(t, (t, t), np.subtract)


@instruction("sub .sat .s32")
def sub_saturated(b: Lowering, m: Modifiers) -> Step:
    return b.alu("s32", ("s32", "s32"), lambda x, y: _saturated(x.astype(np.int64) - y))


@instruction("add type=u16x2|s16x2", features=("sm_90a", "sm_100a"))
def add_halves(b: Lowering, m: Modifiers) -> Step:
    return b.alu("u32", ("u32", "u32"), _by_halves(np.add, m.type))


def _by_halves(op: Callable[..., Any], kind: str) -> Callable[..., Any]:
    dtype = np.dtype(np.uint16 if kind == "u16x2" else np.int16)

    def both(x: Array, y: Array) -> Array:
        x, y = np.broadcast_arrays(x, y)
        x, y = np.ascontiguousarray(x), np.ascontiguousarray(y)
        return op(x.view(dtype), y.view(dtype)).astype(dtype).view(np.uint32)

    return both


def multiply_high(x: Array, y: Array) -> Array:
    """The upper half of the product, in the operands' type."""
    if x.dtype.itemsize < 8:
        wide = np.int64 if x.dtype.kind == "i" else np.uint64
        shift = 8 * x.dtype.itemsize
        return (x.astype(wide) * y.astype(wide) >> wide(shift)).astype(x.dtype)
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    ux, uy = x.view(np.uint64), y.view(np.uint64)
    xl, xh, yl, yh = ux & mask, ux >> half, uy & mask, uy >> half
    middle = xh * yl + (xl * yl >> half)
    high = xh * yh + (middle >> half) + ((xl * yh + (middle & mask)) >> half)
    if x.dtype.kind == "i":
        high = high - np.where(x < 0, uy, np.uint64(0)) - np.where(y < 0, ux, np.uint64(0))
    return high.view(x.dtype)


@instruction(f"mul .lo {INTS}")
def mul_lo(b: Lowering, m: Modifiers) -> Step:
    t = UNSIGNED_OF[m.type]
    return b.alu(t, (t, t), np.multiply)


@instruction(f"mul .hi {INTS}")
def mul_hi(b: Lowering, m: Modifiers) -> Step:
    return b.alu(m.type, (m.type, m.type), multiply_high)


@instruction("mul .wide type=u16|s16|u32|s32")
def mul_wide(b: Lowering, m: Modifiers) -> Step:
    wide = VIEW[WIDE[m.type]]
    return b.alu(WIDE[m.type], (m.type, m.type), lambda x, y: np.multiply(x, y, dtype=wide))


@instruction(f"mad .lo {INTS}")
def mad_lo(b: Lowering, m: Modifiers) -> Step:
    t = UNSIGNED_OF[m.type]
    return b.alu(t, (t, t, t), lambda x, y, z: x * y + z)


@instruction(f"mad .hi {INTS}")
def mad_hi(b: Lowering, m: Modifiers) -> Step:
    return b.alu(m.type, (m.type,) * 3, lambda x, y, z: multiply_high(x, y) + z)


@instruction("mad .hi .sat .s32")
def mad_hi_saturated(b: Lowering, m: Modifiers) -> Step:
    return b.alu("s32", ("s32",) * 3, lambda x, y, z: _saturated(multiply_high(x, y).astype(np.int64) + z))


@instruction("mad .wide type=u16|s16|u32|s32")
def mad_wide(b: Lowering, m: Modifiers) -> Step:
    t = WIDE[m.type]
    wide = VIEW[t]
    return b.alu(t, (m.type, m.type, t), lambda x, y, z: np.multiply(x, y, dtype=wide) + z)


def _cut24(x: Array) -> Array:
    return (x << 8) >> 8


def _product24(half: str, x: Array, y: Array) -> Array:
    """The lower (bits 0 to 31) or upper half (bits 16 to 47) of the product of the operands' lower 24 bits."""
    wide = np.int64 if x.dtype.kind == "i" else np.uint64
    product = _cut24(x).astype(wide) * _cut24(y).astype(wide)
    return (product >> wide(16 if half == "hi" else 0)).astype(x.dtype)


@instruction("mul24 half=lo|hi type=u32|s32")
def mul24(b: Lowering, m: Modifiers) -> Step:
    return b.alu(m.type, (m.type,) * 2, lambda x, y: _product24(m.half, x, y))


@instruction("mad24 half=lo|hi type=u32|s32")
def mad24(b: Lowering, m: Modifiers) -> Step:
    return b.alu(m.type, (m.type,) * 3, lambda x, y, z: _product24(m.half, x, y) + z)


@instruction("mad24 .hi .sat .s32")
def mad24_saturated(b: Lowering, m: Modifiers) -> Step:
    return b.alu("s32", ("s32",) * 3, lambda x, y, z: _saturated(_product24("hi", x, y).astype(np.int64) + z))


@instruction(f"sad {INTS}")
def sad(b: Lowering, m: Modifiers) -> Step:
    t = UNSIGNED_OF[m.type]
    unsigned = VIEW[t]
    return b.alu(
        m.type, (m.type,) * 3,
        lambda x, y, z: (np.maximum(x, y).view(unsigned) - np.minimum(x, y).view(unsigned) + z.view(unsigned)),
    )  # fmt: skip


def divide(x: Array, y: Array) -> Array:
    """Quotient rounded towards zero. Division by zero, whose result PTX leaves open, gives 0."""
    q = x // y
    if x.dtype.kind == "i":
        q = q + ((x % y != 0) & ((x < 0) != (y < 0)))
    return q.astype(x.dtype)


@instruction(f"div {INTS}")
def div(b: Lowering, m: Modifiers) -> Step:
    return b.alu(m.type, (m.type, m.type), divide)


@instruction(f"rem {INTS}")
def rem(b: Lowering, m: Modifiers) -> Step:
    return b.alu(m.type, (m.type, m.type), np.fmod)


@instruction("abs type=s16|s32|s64")
def absolute(b: Lowering, m: Modifiers) -> Step:
    return b.alu(m.type, (m.type,), np.abs)


@instruction("neg type=s16|s32|s64")
def negate(b: Lowering, m: Modifiers) -> Step:
    return b.alu(m.type, (m.type,), np.negative)


_EXTREMA: dict[str, Callable[..., Any]] = {"min": np.minimum, "max": np.maximum}
for _name, _pick in _EXTREMA.items():

    @instruction(f"{_name} {INTS}")
    def extremum(b: Lowering, m: Modifiers, op: Callable[..., Any] = _pick) -> Step:
        return b.alu(m.type, (m.type, m.type), op)

    @instruction(f"{_name} .relu .s32")
    def extremum_relu(b: Lowering, m: Modifiers, op: Callable[..., Any] = _pick) -> Step:
        return b.alu("s32", ("s32", "s32"), lambda x, y: np.maximum(op(x, y), np.int32(0)))

    @instruction(f"{_name} type=u16x2|s16x2", features=("sm_90a", "sm_100a"))
    def extremum_halves(b: Lowering, m: Modifiers, op: Callable[..., Any] = _pick) -> Step:
        return b.alu("u32", ("u32", "u32"), _by_halves(op, m.type))

    @instruction(f"{_name} .relu .s16x2", features=("sm_90a", "sm_100a"))
    def extremum_halves_relu(b: Lowering, m: Modifiers, op: Callable[..., Any] = _pick) -> Step:
        return b.alu("u32", ("u32", "u32"), _by_halves(lambda x, y: np.maximum(op(x, y), np.int16(0)), "s16x2"))


@instruction("dp4a a=u32|s32 b=u32|s32")
def dp4a(b: Lowering, m: Modifiers) -> Step:
    left, right = (np.dtype(np.int8 if t == "s32" else np.uint8) for t in (m.a, m.b))

    def dot(x: Array, y: Array, c: Array) -> Array:
        x, y = (np.ascontiguousarray(v) for v in np.broadcast_arrays(x, y))
        products = x.view(left).astype(np.int32) * y.view(right).astype(np.int32)
        return products.reshape(-1, 4).sum(axis=1, dtype=np.int32).view(np.uint32) + c

    return b.alu("u32", ("u32", "u32", "u32"), dot)


@instruction("dp2a half=lo|hi a=u32|s32 b=u32|s32")
def dp2a(b: Lowering, m: Modifiers) -> Step:
    left = np.dtype(np.int16 if m.a == "s32" else np.uint16)
    right = np.dtype(np.int8 if m.b == "s32" else np.uint8)
    start = 0 if m.half == "lo" else 2

    def dot(x: Array, y: Array, c: Array) -> Array:
        x, y = (np.ascontiguousarray(v) for v in np.broadcast_arrays(x, y))
        pick = y.view(right).reshape(-1, 4)[:, start : start + 2].astype(np.int32)
        products = x.view(left).reshape(-1, 2).astype(np.int32) * pick
        return products.sum(axis=1, dtype=np.int32).view(np.uint32) + c

    return b.alu("u32", ("u32", "u32", "u32"), dot)
