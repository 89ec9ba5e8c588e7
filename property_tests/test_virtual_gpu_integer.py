"""Every integer instruction of the virtual GPU gives what exact Python integers give.

Faults this catches: a wrong width or sign, a shift that does not clamp, a field that runs past the operand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_numerics.virtual_gpu import VirtualGPU, micro, virtual_gpu
from moe_numerics.virtual_gpu.lowering import VIEW

EDGES = (0, 1, 2, 3, 7, 8, 31, 32, 33, 63, 64, 127, 128, 255, 256, -1, -2, -128, 1 << 15, (1 << 15) - 1, 1 << 31,
         (1 << 31) - 1, 1 << 63, (1 << 63) - 1, 0x3C6EF372, 0x80000001)  # fmt: skip


def wrap(value: int, kind: str) -> int:
    bits = 8 * VIEW[kind].itemsize
    value &= (1 << bits) - 1
    return value - (1 << bits) if kind[0] == "s" and value >> (bits - 1) else value


def quotient(x: int, y: int) -> int:
    q = abs(x) // abs(y)
    return q if (x < 0) == (y < 0) else -q


def field(x: int, position: int, length: int, bits: int, signed: bool) -> int:
    reach = 255 if bits == 32 else 0xFFFFFFFF
    position, length = position & reach, min(length & reach, 1 << 20)
    if position >= 1 << 20:
        position = 1 << 20
    u = x & ((1 << bits) - 1)
    value = (u >> position) & ((1 << length) - 1) if position < bits else 0
    if not signed or length == 0:
        return value
    top = min(position + length - 1, bits - 1)
    sign = u >> top & 1
    inside = max(0, min(length, bits - position))
    return value | (-1 << inside) if sign else value


def insert(x: int, y: int, position: int, length: int, bits: int) -> int:
    reach = 255 if bits == 32 else 0xFFFFFFFF
    position, length = min(position & reach, 1 << 10), min(length & reach, bits)
    mask = ((1 << length) - 1) << position
    return (y & ~mask) | ((x << position) & mask)


def permute(x: int, y: int, selector: int) -> int:
    both = (x & 0xFFFFFFFF) | (y & 0xFFFFFFFF) << 32
    out = 0
    for k in range(4):
        nibble = selector >> (4 * k) & 15
        byte = both >> (8 * (nibble & 7)) & 255
        if nibble & 8:
            byte = 255 if byte & 128 else 0
        out |= byte << (8 * k)
    return out


def lop3(table: int) -> Callable[[int, int, int], int]:
    def combine(x: int, y: int, z: int) -> int:
        return sum((table >> ((x >> k & 1) * 4 + (y >> k & 1) * 2 + (z >> k & 1)) & 1) << k for k in range(32))

    return combine


def dot4(x: int, y: int, c: int) -> int:
    def byte(v: int, k: int) -> int:
        return wrap(v >> (8 * k), "s8")

    return c + sum(byte(x, k) * byte(y, k) for k in range(4))


def funnel(side: str, mode: str) -> Callable[[int, int, int], int]:
    def shift(low: int, high: int, n: int) -> int:
        n = n & 31 if mode == "wrap" else min(n, 32)
        both = (high & 0xFFFFFFFF) << 32 | (low & 0xFFFFFFFF)
        return both >> n if side == "r" else both << n >> 32

    return shift


def low24(x: int) -> int:
    return wrap(x << 8, "s32") // 256


def by_halves(op: Callable[[int, int], int], x: int, y: int) -> int:
    return sum((op(wrap(x >> n, "s16"), wrap(y >> n, "s16")) & 0xFFFF) << n for n in (0, 16))


def nth_bit(mask: int, base: int, offset: int) -> int:
    """The |offset|-th set bit from `base`, upwards or downwards; with offset 0 the base itself, if it is set."""
    if base > 31:
        return 0xFFFFFFFF
    positions = range(base, 32) if offset > 0 else range(base, -1 if offset else base - 1, -1)
    found = [p for p in positions if mask >> p & 1]
    wanted = max(abs(offset), 1) - 1
    return found[wanted] if wanted < len(found) else 0xFFFFFFFF


def chains(kind: str) -> Iterator[tuple[str, str, Callable[..., int]]]:
    """Sums of two words [low, high] with a carry between them; the result is the upper word.

    The operands are the low words, two high words, and a low word that products are added to.
    """
    bits = 8 * VIEW[kind].itemsize

    def unsigned(x: int) -> int:
        return x & ((1 << bits) - 1)

    def total(sign: int) -> Callable[..., int]:
        return lambda a, b, c, d, _: c + sign * d + sign * int(not 0 <= unsigned(a) + sign * unsigned(b) < 1 << bits)

    yield "add.cc", f"{{d0}}, {{a0}}, {{a1}}; addc.{kind} {{d0}}, {{a2}}, {{a3}};", total(1)
    yield "sub.cc", f"{{d0}}, {{a0}}, {{a1}}; subc.{kind} {{d0}}, {{a2}}, {{a3}};", total(-1)

    def product(half: str, a: int, b: int) -> int:
        return a * b if half == "lo" else a * b >> bits

    def chained(half: str) -> Callable[..., int]:
        def expect(a: int, b: int, c: int, d: int, e: int) -> int:
            carry = unsigned(product(half, a, b)) + unsigned(e) >> bits
            return product(half, c, d) + e + carry

        return expect

    for half in ("lo", "hi"):
        second = f"madc.{half}.{kind} {{d0}}, {{a2}}, {{a3}}, {{a4}};"
        yield f"mad.{half}.cc", f"{{d0}}, {{a0}}, {{a1}}, {{a4}}; {second}", chained(half)


def leading(x: int, bits: int) -> int:
    return bits - (x & ((1 << bits) - 1)).bit_length()


Case = tuple[str, str, tuple[str, ...], Callable[..., int]]


def cases() -> Iterator[Case]:
    for t in ("u16", "s16", "u32", "s32", "u64", "s64"):
        bits = 8 * VIEW[t].itemsize
        yield f"add.{t}", t, (t, t), lambda x, y: x + y
        yield f"sub.{t}", t, (t, t), lambda x, y: x - y
        yield f"mul.lo.{t}", t, (t, t), lambda x, y: x * y
        yield f"mul.hi.{t}", t, (t, t), lambda x, y, n=bits: x * y >> n
        yield f"mad.lo.{t}", t, (t, t, t), lambda x, y, z: x * y + z
        yield f"mad.hi.{t}", t, (t, t, t), lambda x, y, z, n=bits: (x * y >> n) + z
        yield f"div.{t}", t, (t, t), lambda x, y: quotient(x, y) if y else 0
        yield f"rem.{t}", t, (t, t), lambda x, y: x - quotient(x, y) * y if y else 0
        yield f"min.{t}", t, (t, t), min
        yield f"max.{t}", t, (t, t), max
        yield f"sad.{t}", t, (t, t, t), lambda x, y, z: abs(x - y) + z
        yield f"shr.{t}", t, (t, "u32"), lambda x, n: x >> n if n < 4096 else (-1 if x < 0 else 0)
        if bits < 64:
            wide = f"{t[0]}{2 * bits}"
            yield f"mul.wide.{t}", wide, (t, t), lambda x, y: x * y
            yield f"mad.wide.{t}", wide, (t, t, wide), lambda x, y, z: x * y + z
        if t[0] == "s":
            yield f"neg.{t}", t, (t,), lambda x: -x
            yield f"abs.{t}", t, (t,), abs
        if bits >= 32:
            yield f"bfe.{t}", t, (t, "u32", "u32"), lambda x, p, n, b=bits, s=t[0] == "s": field(x, p, n, b, s)
            yield f"bfind.{t}", "s32", (t,), lambda x: (~x if x < 0 else x).bit_length() - 1
    yield "add.sat.s32", "s32", ("s32", "s32"), lambda x, y: max(min(x + y, 2**31 - 1), -(2**31))
    yield "sub.sat.s32", "s32", ("s32", "s32"), lambda x, y: max(min(x - y, 2**31 - 1), -(2**31))
    yield "mad.hi.sat.s32", "s32", ("s32",) * 3, lambda x, y, z: max(min((x * y >> 32) + z, 2**31 - 1), -(2**31))
    yield (
        "mad24.hi.sat.s32",
        "s32",
        ("s32",) * 3,
        lambda x, y, z: max(min((low24(x) * low24(y) >> 16) + z, 2**31 - 1), -(2**31)),
    )
    yield "min.relu.s32", "s32", ("s32", "s32"), lambda x, y: max(min(x, y), 0)
    yield "max.relu.s32", "s32", ("s32", "s32"), lambda x, y: max(x, y, 0)
    for op, pick in (("min", min), ("max", max)):
        yield (
            f"{op}.relu.s16x2",
            "b32",
            ("b32", "b32"),
            lambda x, y, p=pick: by_halves(lambda a, b: max(p(a, b), 0), x, y),
        )
    for t in ("u32", "s32", "u64", "s64"):
        for name, text, expect in chains(t):
            yield f"{name}.{t} {text}", t, (t,) * 5, expect
    for offset in (0, 1, 3, -1, -2, -32):
        text = f"and.b32 {{a1}}, {{a1}}, 63; fns.b32 {{d0}}, {{a0}}, {{a1}}, {offset};"
        yield text, "b32", ("b32", "u32"), lambda x, base, n=offset: nth_bit(x, base & 63, n)
    for logic in ("or", "and"):
        text = f"lop3.{logic}.b32 {{a0}}|{{d0}}, {{a0}}, {{a1}}, {{a2}}, 0xe8, {{a3}};"
        yield (
            text,
            "pred",
            ("b32", "b32", "b32", "pred"),
            lambda x, y, z, p, o=logic == "or": (
                (lop3(0xE8)(x, y, z) != 0 or p) if o else (lop3(0xE8)(x, y, z) != 0 and p)
            ),
        )
    for t in ("b16", "u16", "s32", "b64"):
        yield f"slct.{t}.s32", t, (t, t, "s32"), lambda x, y, c: x if c >= 0 else y
    yield "mul24.lo.s32", "s32", ("s32", "s32"), lambda x, y: wrap(x << 8, "s32") // 256 * (wrap(y << 8, "s32") // 256)
    for t in ("b16", "b32", "b64"):
        bits = 8 * VIEW[t].itemsize
        yield f"and.{t}", t, (t, t), lambda x, y: x & y
        yield f"or.{t}", t, (t, t), lambda x, y: x | y
        yield f"xor.{t}", t, (t, t), lambda x, y: x ^ y
        yield f"not.{t}", t, (t,), lambda x: ~x
        yield f"cnot.{t}", t, (t,), lambda x: int(x == 0)
        yield f"shl.{t}", t, (t, "u32"), lambda x, n: x << n if n < 4096 else 0
        if bits >= 32:
            yield f"popc.{t}", "u32", (t,), lambda x: x.bit_count()
            yield f"clz.{t}", "u32", (t,), lambda x, b=bits: leading(x, b)
            yield f"brev.{t}", t, (t,), lambda x, b=bits: int(f"{x:0{b}b}"[::-1], 2)
            yield f"bfi.{t}", t, (t, t, "u32", "u32"), lambda x, y, p, n, b=bits: insert(x, y, p, n, b)
    yield "prmt.b32", "b32", ("b32", "b32", "b32"), permute
    yield "dp4a.s32.s32", "s32", ("b32", "b32", "s32"), dot4
    for table in (0x96, 0xE8, 0xCA, 0x00, 0xFF):
        yield f"lop3.b32 {{d0}}, {{a0}}, {{a1}}, {{a2}}, {table};", "b32", ("b32", "b32", "b32"), lop3(table)
    for side in "lr":
        for mode in ("clamp", "wrap"):
            yield f"shf.{side}.{mode}.b32", "b32", ("b32", "b32", "u32"), funnel(side, mode)
    for t, cmp in (("s32", "lt"), ("u32", "lt"), ("u32", "hi"), ("s64", "ge"), ("u16", "le"), ("b32", "ne")):
        compare = {"lt": int.__lt__, "hi": int.__gt__, "ge": int.__ge__, "le": int.__le__, "ne": int.__ne__}[cmp]
        yield f"setp.{cmp}.{t}", "pred", (t, t), lambda x, y, c=compare: int(c(x, y))
        yield f"setp.{cmp}.xor.{t}", "pred", (t, t, "pred"), lambda x, y, p, c=compare: int(c(x, y)) ^ p
    yield "selp.b32", "b32", ("b32", "b32", "pred"), lambda x, y, p: x if p else y
    yield "selp.s64", "s64", ("s64", "s64", "pred"), lambda x, y, p: x if p else y
    for source in ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"):
        for target in ("u16", "s16", "u32", "s32", "u64", "s64"):
            if source not in ("u8", "s8"):
                yield f"cvt.{target}.{source}", target, (source,), lambda x: x
                low = -(1 << (8 * VIEW[target].itemsize - 1)) if target[0] == "s" else 0
                high = (1 << (8 * VIEW[target].itemsize - (target[0] == "s"))) - 1
                signed = source[0] == "s"
                held = high.bit_length() >= 8 * VIEW[source].itemsize - signed and (not signed or target[0] == "s")
                if not held:
                    yield f"cvt.sat.{target}.{source}", target, (source,), lambda x, a=low, b=high: max(a, min(b, x))


ALL = list(cases())


@pytest.fixture
def gpu() -> Iterator[VirtualGPU]:
    with virtual_gpu("sm_90a") as g:
        yield g


def statement(name: str, operands: tuple[str, ...]) -> str:
    if "{" in name:
        return name
    return f"{name} {{d0}}, {', '.join(f'{{a{n}}}' for n in range(len(operands)))};"


def operands(kinds: tuple[str, ...], seed: int, chosen: list[tuple[int, ...]]) -> list[list[int]]:
    """Random and edge operands, with the drawn ones first."""
    rng = np.random.Generator(np.random.Philox(seed))
    columns = []
    for n, kind in enumerate(kinds):
        if kind == "pred":
            values = [c[n] & 1 for c in chosen] + [int(v) for v in rng.integers(0, 2, 40)]
        else:
            pool = [EDGES[k] for k in rng.integers(0, len(EDGES), 24)]
            values = [c[n] for c in chosen] + pool + [int(v) for v in rng.integers(0, 2**64, 16, np.uint64)]
            values = [wrap(v, kind) for v in values]
        columns.append(values)
    return columns


@pytest.mark.parametrize("case", ALL, ids=[c[0] for c in ALL])
@given(seed=st.integers(0, 2**16), chosen=st.lists(st.tuples(*[st.integers(0, 2**64 - 1)] * 5), max_size=3))
def test_integer_instruction_equals_exact_arithmetic(
    gpu: VirtualGPU, case: Case, seed: int, chosen: list[tuple[int, ...]]
) -> None:
    """Fault: one instruction computes with the wrong width, sign, rounding or clamping."""
    name, result, kinds, expect = case
    columns = operands(kinds, seed, chosen)
    arrays = [
        (k, np.array(c, bool).astype(np.uint8) if k == "pred" else np.array(c, VIEW[k]))
        for k, c in zip(kinds, columns, strict=True)
    ]
    (got,) = micro.run(gpu, statement(name, kinds), [result], arrays)
    for row, value in zip(zip(*columns, strict=True), got.tolist(), strict=True):
        wanted = expect(*row)
        wanted = bool(wanted) if result == "pred" else wrap(wanted, result)
        assert value == wanted, f"{name}{row} = {value}, expected {wanted}"
