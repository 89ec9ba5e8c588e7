"""Bits: counting, searching, fields, logic, shifts and permutations (PTX ISA 9.7.1, 9.7.8)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import ptx
from .isa_integer import UNSIGNED_OF
from .lowering import VIEW, Lowering
from .memory import Array
from .registry import Index, Modifiers, Step, instruction

_BITS = {"u32": 32, "s32": 32, "u64": 64, "s64": 64, "b32": 32, "b64": 64}


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
    top = np.int32(_BITS[m.type] - 1)
    return b.alu("u32", (m.type,), lambda x: (top - highest_bit(x)).astype(np.uint32))


@instruction("bfind .shiftamt? type=u32|s32|u64|s64")
def bfind(b: Lowering, m: Modifiers) -> Step:
    bits = _BITS[m.type]

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
    bits = _BITS[m.type]
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
    bits = _BITS[m.type]
    reach = _REACH[bits]

    def insert(field: Array, base: Array, position: Array, length: Array) -> Array:
        p = (position & reach).astype(np.uint64)
        n = np.minimum(length & reach, np.uint32(bits)).astype(np.uint64)
        ones = np.where(n >= 64, ~np.uint64(0), (np.uint64(1) << n) - np.uint64(1))
        mask = ones << p
        out = (base.astype(np.uint64) & ~mask) | ((field.astype(np.uint64) << p) & mask)
        return out.astype(VIEW[m.type])

    return b.alu(m.type, (m.type, m.type, "u32", "u32"), insert)


@instruction("fns .b32")
def fns(b: Lowering, m: Modifiers) -> Step:
    """The position of the n-th set bit from a base, 0xffffffff where there is none (PTX ISA 9.7.1.18)."""

    def find(mask: Array, base: Array, offset: Array) -> Array:
        found = np.full(mask.shape, -1, np.int64)
        # A base past the word finds nothing, whichever way the search would go (seen on an H200).
        position, left = base.astype(np.int64), np.abs(offset.astype(np.int64)) - 1
        left = np.where(offset == 0, 0, left)
        for k in range(32):
            inside = (position >= 0) & (position < 32) & (base < 32) & (found < 0)
            inside &= (offset != 0) | (k == 0)
            there = inside & ((mask >> (position & 31).astype(np.uint32) & np.uint32(1)) == 1)
            found = np.where(there & (left == 0), position, found)
            left = left - there
            position = position + np.where(offset >= 0, 1, -1)
        return found.astype(np.uint32)

    return b.alu("u32", ("u32", "u32", "s32"), find)


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


def _lookup(b: Lowering, operand: ptx.Operand) -> Callable[[Array, Array, Array], Array]:
    """The function of three words whose truth table is an immediate."""
    if not isinstance(operand, ptx.Imm):
        raise b.fail("the table of lop3 must be an immediate")
    bits = int(operand.value)

    def combine(x: Array, y: Array, z: Array) -> Array:
        out: Any = np.uint32(0)
        for k in range(8):
            if bits >> k & 1:
                out = out | ((x if k & 4 else ~x) & (y if k & 2 else ~y) & (z if k & 1 else ~z))
        return np.asarray(out + np.zeros_like(x), np.uint32)

    return combine


@instruction("lop3 .b32")
def lop3(b: Lowering, m: Modifiers) -> Step:
    combine = _lookup(b, b.operands[4])
    return b.alu("b32", ("b32", "b32", "b32", "b32"), lambda x, y, z, _: combine(x, y, z))


@instruction("lop3 op=or|and .b32")
def lop3_predicate(b: Lowering, m: Modifiers) -> Step:
    """Also gives whether the result has a set bit, combined with a predicate."""
    target = b.operands[0]
    if not isinstance(target, ptx.Pair):
        raise b.fail(f"`{b.ins.name}` needs `d|p`")
    combine = _lookup(b, b.operands[4])
    reads = [b.full(b.read(o, "b32")) for o in b.operands[1:4]]
    other = b.read(b.operands[5], "pred")
    write, predicate = b.write(target.first, "b32"), b.write(target.second, "pred")
    logic = np.logical_or if m.op == "or" else np.logical_and

    def step(w: Any, i: Index) -> None:
        r = combine(*(read(w, i) for read in reads))
        p = logic(r != 0, other(w, i))
        write(w, i, r)
        predicate(w, i, p)

    return step


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
