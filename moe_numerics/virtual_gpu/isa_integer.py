"""Integer arithmetic, logic and shifts (PTX ISA 9.7.1, 9.7.2, 9.7.8)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import ptx
from .lowering import VIEW, Lowering
from .memory import Array
from .registry import Index, Modifiers, Step, instruction

INTS = "type=u16|s16|u32|s32|u64|s64"
BITS = {"u16": 16, "s16": 16, "u32": 32, "s32": 32, "u64": 64, "s64": 64, "b16": 16, "b32": 32, "b64": 64}
UNSIGNED_OF = {"u16": "u16", "s16": "u16", "u32": "u32", "s32": "u32", "u64": "u64", "s64": "u64"}
WIDE = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}


def _clamped(kind: str) -> tuple[int, int]:
    info = np.iinfo(VIEW[kind])
    return int(info.min), int(info.max)


@instruction(f"add .sat? {INTS}")
def add(b: Lowering, m: Modifiers) -> Step:
    if m.sat:
        low, high = _clamped(m.type)
        return b.alu(m.type, (m.type, m.type), lambda x, y: np.clip(x.astype(np.int64) + y, low, high).astype(np.int32))
    t = UNSIGNED_OF[m.type]
    return b.alu(t, (t, t), np.add)


@instruction(f"sub .sat? {INTS}")
def sub(b: Lowering, m: Modifiers) -> Step:
    if m.sat:
        low, high = _clamped(m.type)
        return b.alu(m.type, (m.type, m.type), lambda x, y: np.clip(x.astype(np.int64) - y, low, high).astype(np.int32))
    t = UNSIGNED_OF[m.type]
    return b.alu(t, (t, t), np.subtract)


def _carry(b: Lowering, kind: str, subtract: bool, uses: bool, sets: bool) -> Step:
    reads = [b.full(b.read(o, kind)) for o in b.operands[1:]]
    write = b.write(b.operands[0], kind)

    def step(w: Any, i: Index) -> None:
        x, y = (r(w, i) for r in reads)
        if w.carry is None:
            w.carry = np.zeros(w.threads, bool)
        extra = (w.carry if i is None else w.carry[i]).astype(x.dtype) if uses else x.dtype.type(0)
        first = x - y if subtract else x + y
        result = first - extra if subtract else first + extra
        if sets:
            out = (x < y) | (first < extra) if subtract else (first < x) | (result < first)
            if i is None:
                w.carry = out
            else:
                w.carry = w.carry.copy()
                w.carry[i] = out
        write(w, i, result)

    return step


for _op, _subtract, _uses in (("add", False, False), ("addc", False, True), ("sub", True, False), ("subc", True, True)):
    for _sets in (True, False):
        if not _uses and not _sets:
            continue

        @instruction(f"{_op}{' .cc' if _sets else ''} type=u32|s32|u64|s64")
        def carry(b: Lowering, m: Modifiers, s: bool = _subtract, u: bool = _uses, c: bool = _sets) -> Step:
            return _carry(b, UNSIGNED_OF[m.type], s, u, c)


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


@instruction(f"mad .hi .sat? {INTS}")
def mad_hi(b: Lowering, m: Modifiers) -> Step:
    if m.sat:
        return b.alu(
            "s32", ("s32",) * 3,
            lambda x, y, z: np.clip(multiply_high(x, y).astype(np.int64) + z, -(2**31), 2**31 - 1).astype(np.int32),
        )  # fmt: skip
    return b.alu(m.type, (m.type,) * 3, lambda x, y, z: multiply_high(x, y) + z)


@instruction("mad .wide type=u16|s16|u32|s32")
def mad_wide(b: Lowering, m: Modifiers) -> Step:
    t = WIDE[m.type]
    wide = VIEW[t]
    return b.alu(t, (m.type, m.type, t), lambda x, y, z: np.multiply(x, y, dtype=wide) + z)


def _cut24(x: Array) -> Array:
    return (x << 8) >> 8


@instruction("mul24 half=lo|hi type=u32|s32")
def mul24(b: Lowering, m: Modifiers) -> Step:
    wide = np.int64 if m.type == "s32" else np.uint64
    shift = wide(16 if m.half == "hi" else 0)
    return b.alu(
        m.type, (m.type,) * 2,
        lambda x, y: (_cut24(x).astype(wide) * _cut24(y).astype(wide) >> shift).astype(x.dtype),
    )  # fmt: skip


@instruction("mad24 half=lo|hi type=u32|s32")
def mad24(b: Lowering, m: Modifiers) -> Step:
    wide = np.int64 if m.type == "s32" else np.uint64
    shift = wide(16 if m.half == "hi" else 0)
    return b.alu(
        m.type, (m.type,) * 3,
        lambda x, y, z: (_cut24(x).astype(wide) * _cut24(y).astype(wide) >> shift).astype(x.dtype) + z,
    )  # fmt: skip


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


@instruction(f"min .relu? {INTS}")
def minimum(b: Lowering, m: Modifiers) -> Step:
    if m.relu:
        return b.alu(m.type, (m.type, m.type), lambda x, y: np.maximum(np.minimum(x, y), x.dtype.type(0)))
    return b.alu(m.type, (m.type, m.type), np.minimum)


@instruction(f"max .relu? {INTS}")
def maximum(b: Lowering, m: Modifiers) -> Step:
    if m.relu:
        return b.alu(m.type, (m.type, m.type), lambda x, y: np.maximum(np.maximum(x, y), x.dtype.type(0)))
    return b.alu(m.type, (m.type, m.type), np.maximum)


@instruction("min type=u16x2|s16x2", features=("sm_90a", "sm_100a"))
def minimum_halves(b: Lowering, m: Modifiers) -> Step:
    return b.alu("u32", ("u32", "u32"), _by_halves(np.minimum, m.type))


@instruction("max type=u16x2|s16x2", features=("sm_90a", "sm_100a"))
def maximum_halves(b: Lowering, m: Modifiers) -> Step:
    return b.alu("u32", ("u32", "u32"), _by_halves(np.maximum, m.type))


@instruction("popc type=b32|b64")
def popc(b: Lowering, m: Modifiers) -> Step:
    return b.alu("u32", (m.type,), lambda x: np.bitwise_count(x).astype(np.uint32))


def highest_bit(x: Array) -> Array:
    """The number of the highest set bit, -1 for zero, as int32."""
    out = np.full(x.shape, -1, np.int32)
    rest = x.astype(np.uint64)
    for shift in (32, 16, 8, 4, 2, 1):
        big = rest >= (np.uint64(1) << np.uint64(shift))
        rest = np.where(big, rest >> np.uint64(shift), rest)
        out = out + np.where(big, np.int32(shift), np.int32(0))
    return out + (rest != 0).astype(np.int32)


@instruction("clz type=b32|b64")
def clz(b: Lowering, m: Modifiers) -> Step:
    top = np.int32(BITS[m.type] - 1)
    return b.alu("u32", (m.type,), lambda x: (top - highest_bit(x)).astype(np.uint32))


@instruction("bfind .shiftamt? type=u32|s32|u64|s64")
def bfind(b: Lowering, m: Modifiers) -> Step:
    bits = BITS[m.type]

    def find(x: Array) -> Array:
        if x.dtype.kind == "i":
            x = np.where(x < 0, ~x, x)
        high = highest_bit(x.view(VIEW[UNSIGNED_OF[m.type]]))
        if m.shiftamt:
            high = np.where(high < 0, high, np.int32(bits - 1) - high)
        return high.astype(np.int32).view(np.uint32)

    return b.alu("u32", (m.type,), find)


@instruction("brev type=b32|b64")
def brev(b: Lowering, m: Modifiers) -> Step:
    def reverse(x: Array) -> Array:
        t = x.dtype.type
        bits = 8 * x.dtype.itemsize
        for shift in (1, 2, 4, 8, 16, 32):
            if shift >= bits:
                break
            ones = (1 << shift) - 1
            mask = t(sum(ones << k for k in range(0, bits, 2 * shift)))
            x = ((x >> t(shift)) & mask) | ((x & mask) << t(shift))
        return x

    return b.alu(m.type, (m.type,), reverse)


# Position and length of a field count modulo 256 in 32-bit forms; the 64-bit ones take all bits (seen on an H200).
_REACH = {32: np.uint32(255), 64: np.uint32(0xFFFFFFFF)}


@instruction("bfe type=u32|s32|u64|s64")
def bfe(b: Lowering, m: Modifiers) -> Step:
    bits = BITS[m.type]
    signed = m.type[0] == "s"
    wide = np.dtype(np.uint64)
    reach = _REACH[bits]

    def extract(x: Array, position: Array, length: Array) -> Array:
        p, n = ((v & reach).astype(wide) for v in (position, length))
        u = x.astype(np.int64).view(wide) if signed else x.astype(wide)
        u = u & np.uint64((1 << bits) - 1)
        field = np.minimum(n, np.uint64(bits))
        ones = np.where(field >= 64, ~np.uint64(0), (np.uint64(1) << field) - np.uint64(1))
        value = (u >> p) & ones
        if signed:
            top = np.minimum(p + n - np.uint64(1), np.uint64(bits - 1))
            sign = ((u >> top) & np.uint64(1)).astype(bool) & (n > 0)
            # Bits of the field past the operand's end, and those above the field, are copies of the sign.
            inside = np.where(p >= bits, np.uint64(0), np.minimum(n, np.uint64(bits) - p))
            known = np.where(inside >= 64, ~np.uint64(0), (np.uint64(1) << inside) - np.uint64(1))
            value = np.where(sign, value | ~known, value)
        return value.astype(np.uint32 if bits == 32 else np.uint64)

    return b.alu(m.type, (m.type, "u32", "u32"), extract)


@instruction("bfi type=b32|b64")
def bfi(b: Lowering, m: Modifiers) -> Step:
    bits = BITS[m.type]
    reach = _REACH[bits]

    def insert(field: Array, base: Array, position: Array, length: Array) -> Array:
        p = (position & reach).astype(np.uint64)
        n = np.minimum(length & reach, np.uint32(bits)).astype(np.uint64)
        ones = np.where(n >= 64, ~np.uint64(0), (np.uint64(1) << n) - np.uint64(1))
        mask = ones << p
        out = (base.astype(np.uint64) & ~mask) | ((field.astype(np.uint64) << p) & mask)
        return out.astype(VIEW[m.type])

    return b.alu(m.type, (m.type, m.type, "u32", "u32"), insert)


@instruction("szext mode=clamp|wrap type=u32|s32")
def szext(b: Lowering, m: Modifiers) -> Step:
    def extend(x: Array, n: Array) -> Array:
        n = n & np.uint32(31) if m.mode == "wrap" else np.minimum(n, np.uint32(32))
        shift = (np.uint32(32) - n).astype(np.int64)
        wide = x.astype(np.int64) << shift
        cut = wide.astype(np.uint32)
        if m.type == "s32":
            return (cut.view(np.int32).astype(np.int64) >> shift).astype(np.uint32)
        return (cut.astype(np.int64) >> shift).astype(np.uint32)

    return b.alu("u32", ("u32", "u32"), extend)


@instruction("bmsk mode=clamp|wrap .b32")
def bmsk(b: Lowering, m: Modifiers) -> Step:
    def mask(a: Array, n: Array) -> Array:
        if m.mode == "wrap":
            a, n = a & np.uint32(31), n & np.uint32(31)
        a, n = np.minimum(a, np.uint32(32)).astype(np.uint64), np.minimum(n, np.uint32(32)).astype(np.uint64)
        return ((((np.uint64(1) << n) - np.uint64(1)) << a) & np.uint64(0xFFFFFFFF)).astype(np.uint32)

    return b.alu("u32", ("u32", "u32"), mask)


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


_LOGIC: dict[str, Callable[..., Any]] = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
for _name, _logic in _LOGIC.items():

    @instruction(f"{_name} type=pred|b16|b32|b64")
    def logic(b: Lowering, m: Modifiers, op: Callable[..., Any] = _logic) -> Step:
        return b.alu(m.type, (m.type, m.type), op)


@instruction("not type=pred|b16|b32|b64")
def invert(b: Lowering, m: Modifiers) -> Step:
    return b.alu(m.type, (m.type,), np.invert)


@instruction("cnot type=b16|b32|b64")
def cnot(b: Lowering, m: Modifiers) -> Step:
    return b.alu(m.type, (m.type,), lambda x: (x == 0).astype(x.dtype))


@instruction("lop3 .b32")
def lop3(b: Lowering, m: Modifiers) -> Step:
    table = b.operands[4]
    if not isinstance(table, ptx.Imm):
        raise b.fail("the table of lop3 must be an immediate")
    bits = int(table.value)

    def combine(x: Array, y: Array, z: Array, _: Any) -> Array:
        out: Any = np.uint32(0)
        for k in range(8):
            if bits >> k & 1:
                out = out | ((x if k & 4 else ~x) & (y if k & 2 else ~y) & (z if k & 1 else ~z))
        return np.asarray(out + np.zeros_like(x), np.uint32)

    return b.alu("b32", ("b32", "b32", "b32", "b32"), combine)


@instruction("shl type=b16|b32|b64")
def shl(b: Lowering, m: Modifiers) -> Step:
    dtype = VIEW[m.type]
    if dtype.itemsize == 4:
        return b.alu(m.type, (m.type, "u32"), np.left_shift)
    # NumPy gives 0 for shifts by the width and more, as PTX does.
    return b.alu(m.type, (m.type, "u32"), lambda x, n: x << np.minimum(n, np.uint32(64)).astype(dtype))


@instruction("shr type=b16|b32|b64|u16|u32|u64|s16|s32|s64")
def shr(b: Lowering, m: Modifiers) -> Step:
    dtype = VIEW[m.type]
    if dtype == np.uint32:
        return b.alu(m.type, (m.type, "u32"), np.right_shift)
    most = np.uint32(8 * dtype.itemsize - 1 if m.type[0] == "s" else 64)
    return b.alu(m.type, (m.type, "u32"), lambda x, n: x >> np.minimum(n, most).astype(dtype))


@instruction("shf side=l|r mode=clamp|wrap .b32")
def shf(b: Lowering, m: Modifiers) -> Step:
    def funnel(low: Array, high: Array, n: Array) -> Array:
        n = (n & np.uint32(31)) if m.mode == "wrap" else np.minimum(n, np.uint32(32))
        both = (high.astype(np.uint64) << np.uint64(32)) | low
        wide = n.astype(np.uint64)
        if m.side == "r":
            return (both >> wide).astype(np.uint32)
        return ((both << wide) >> np.uint64(32)).astype(np.uint32)

    return b.alu("b32", ("b32", "b32", "u32"), funnel)


@instruction("prmt .b32 mode?=f4e|b4e|rc8|ecl|ecr|rc16")
def prmt(b: Lowering, m: Modifiers) -> Step:
    special = {
        "f4e": [[0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]],
        "b4e": [[0, 7, 6, 5], [1, 0, 7, 6], [2, 1, 0, 7], [3, 2, 1, 0]],
        "rc8": [[0] * 4, [1] * 4, [2] * 4, [3] * 4],
        "ecl": [[0, 1, 2, 3], [1, 1, 2, 3], [2, 2, 2, 3], [3, 3, 3, 3]],
        "ecr": [[0, 0, 0, 0], [0, 1, 1, 1], [0, 1, 2, 2], [0, 1, 2, 3]],
        "rc16": [[0, 1, 0, 1], [2, 3, 2, 3], [0, 1, 0, 1], [2, 3, 2, 3]],
    }

    def permute(x: Array, y: Array, selector: Array) -> Array:
        both = x.astype(np.uint64) | (y.astype(np.uint64) << np.uint64(32))
        out = np.zeros(both.shape, np.uint32)
        for k in range(4):
            if m.mode:
                rows = np.array(special[m.mode], np.uint64)[:, k]
                pick = rows[(selector & np.uint32(3)).astype(np.intp)]
                copy_sign = np.zeros(both.shape, bool)
            else:
                nibble = (selector >> np.uint32(4 * k)) & np.uint32(15)
                pick = (nibble & np.uint32(7)).astype(np.uint64)
                copy_sign = (nibble & np.uint32(8)) != 0
            byte = ((both >> (pick * np.uint64(8))) & np.uint64(255)).astype(np.uint32)
            byte = np.where(copy_sign, np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0)), byte)
            out = out | (byte.astype(np.uint32) << np.uint32(8 * k))
        return out

    return b.alu("b32", ("b32", "b32", "b32"), permute)
