"""Comparisons of packed halves, and conversions among 16-bit floats, are those of exact numbers.

Faults this catches: predicates or halves in the wrong order, NaN taken for a number, a conversion that rounds twice,
`.sat` that is ignored, a narrow operand that is not widened exactly.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_virtual_gpu_float import BF16, F16, F32, INF, NAN, Exact, Kind, add, decode, encode, multiply, signed

from moe_numerics.virtual_gpu import VirtualGPU, micro, virtual_gpu

KINDS = {"f16": F16, "bf16": BF16, "f32": F32}
EDGES = (
    0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x3C00, 0xBC00, 0x3C01, 0x3800, 0x7BFF, 0x7C00, 0xFC00, 0x7E00,
    0x7C01, 0x7F7F, 0x7F80, 0xFF80, 0x7FC0, 0x3F80, 0xBF80, 0x4100, 0x3FC0, 0x3E00,
)  # fmt: skip
ORDERED = {"eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt,
           "ge": operator.ge}  # fmt: skip
COMPARISONS = (*ORDERED, *(f"{name}u" for name in ORDERED), "num", "nan")


@pytest.fixture
def gpu() -> Iterator[VirtualGPU]:
    with virtual_gpu("sm_100a") as g:
        yield g


def number(value: Exact) -> Fraction:
    return signed(value) if value[1] != INF else Fraction(2) ** 999 * (-1 if value[0] else 1)


def holds(name: str, x: Exact, y: Exact) -> bool:
    unordered = NAN in (x[1], y[1])
    if name in ("num", "nan"):
        return unordered == (name == "nan")
    plain = name.removesuffix("u")
    return name != plain if unordered else bool(ORDERED[plain](number(x), number(y)))


def words(seed: int, chosen: list[int], count: int = 24) -> np.ndarray:
    rng = np.random.Generator(np.random.Philox(seed))
    halves = [[EDGES[k] for k in rng.integers(0, len(EDGES), count)] + rng.integers(0, 65536, 8).tolist() for _ in "ab"]
    return np.array([*chosen, *(a | b << 16 for a, b in zip(*halves, strict=True))], np.uint32)


DRAWN = st.lists(st.integers(0, 2**32 - 1), max_size=2)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@given(
    name=st.sampled_from(COMPARISONS),
    seed=st.integers(0, 2**16),
    mask=st.booleans(),
    logic=st.sampled_from(["and", "or", "xor"]),
)
def test_packed_halves_are_compared_one_by_one(
    gpu: VirtualGPU, kind: str, name: str, seed: int, mask: bool, logic: str
) -> None:
    x, y = words(seed, []), words(seed + 1, [])
    combine = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}[logic]
    other = np.full(x.size, mask, np.uint8)
    text = f"setp.{name}.{logic}.{kind}x2 {{d0}}|{{d1}}, {{a0}}, {{a1}}, {{a2}};"
    low, high = micro.run(gpu, text, ["pred", "pred"], [("b32", x), ("b32", y), ("pred", other)])
    (as_mask,) = micro.run(gpu, f"set.{name}.u32.{kind}x2 {{d0}}, {{a0}}, {{a1}};", ["u32"], [("b32", x), ("b32", y)])
    (as_ones,) = micro.run(
        gpu, f"set.{name}.{kind}x2.{kind}x2 {{d0}}, {{a0}}, {{a1}};", ["b32"], [("b32", x), ("b32", y)]
    )
    one = encode((False, Fraction(1)), KINDS[kind])
    for k, (a, b) in enumerate(zip(x.tolist(), y.tolist(), strict=True)):
        found = [
            holds(name, decode(a >> n & 0xFFFF, KINDS[kind]), decode(b >> n & 0xFFFF, KINDS[kind])) for n in (0, 16)
        ]
        assert [bool(low[k]), bool(high[k])] == [combine(t, mask) for t in found]
        assert int(as_mask[k]) == found[0] * 0xFFFF | found[1] * 0xFFFF0000
        assert int(as_ones[k]) == found[0] * one | found[1] * one << 16


def clamped(code: int, kind: Kind) -> int:
    sign, x = decode(code, kind)
    if x == NAN or sign:
        return 0
    return encode((False, Fraction(1)), kind) if x == INF or (isinstance(x, Fraction) and x > 1) else code


def whole(code: int, kind: Kind, mode: str) -> int:
    sign, x = decode(code, kind)
    if not isinstance(x, Fraction):
        return encode((sign, x), kind)
    value = -x if sign else x
    rounded = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[mode](value)
    return encode((sign, Fraction(abs(rounded))), kind)


Case = tuple[str, str, tuple[str, ...], Callable[..., int]]


def cases() -> Iterator[Case]:
    for mode in ("rni", "rzi", "rmi", "rpi"):
        for name, kind in (("f16", F16), ("bf16", BF16)):
            yield f"cvt.{mode}.{name}.{name}", name, (name,), lambda c, k=kind, m=mode: whole(c, k, m)
        yield f"cvt.{mode}.sat.f16.f16", "f16", ("f16",), lambda c, m=mode: clamped(whole(c, F16, m), F16)
    yield "cvt.f16.f16", "f16", ("f16",), lambda c: encode(decode(c, F16), F16)
    yield "cvt.bf16.bf16", "bf16", ("bf16",), lambda c: encode(decode(c, BF16), BF16)
    yield "cvt.sat.f16.f16", "f16", ("f16",), lambda c: clamped(c, F16)
    yield "cvt.sat.f32.f16", "f32", ("f16",), lambda c: clamped(encode(decode(c, F16), F32), F32)
    for mode in ("rn", "rz", "rm", "rp"):
        yield f"cvt.{mode}.f16.bf16", "f16", ("bf16",), lambda c, m=mode: encode(decode(c, BF16), F16, m)
        yield f"cvt.{mode}.bf16.f16", "bf16", ("f16",), lambda c, m=mode: encode(decode(c, F16), BF16, m)
        yield f"cvt.{mode}.sat.f16.s16", "f16", ("s16",), lambda c: encode((False, Fraction(0 < c < 1 << 15)), F16)
        for name, kind in (("f16", F16), ("bf16", BF16)):
            for op, turn in (("add", False), ("sub", True)):

                def total(a: int, c: int, k: Kind = kind, m: str = mode, t: bool = turn) -> int:
                    second = decode(c, F32)
                    return encode(add(decode(a, k), (second[0] != t, second[1]), m), F32, m)

                yield f"{op}.{mode}.f32.{name}", "f32", (name, "f32"), total

            def fused(a: int, b: int, c: int, k: Kind = kind, m: str = mode) -> int:
                return encode(add(multiply(decode(a, k), decode(b, k)), decode(c, F32), m), F32, m)

            yield f"fma.{mode}.f32.{name}", "f32", (name, name, "f32"), fused


ALL = list(cases())
SIZES = {"f16": 2, "bf16": 2, "s16": 2, "f32": 4}


@pytest.mark.parametrize("case", ALL, ids=[c[0] for c in ALL])
@given(seed=st.integers(0, 2**16), chosen=DRAWN)
def test_conversions_round_once(gpu: VirtualGPU, case: Case, seed: int, chosen: list[int]) -> None:
    name, result, kinds, expect = case
    columns = []
    for n, kind in enumerate(kinds):
        values = words(seed + n, chosen)
        columns.append(values if SIZES[kind] == 4 else values.astype(np.uint16))
    text = f"{name} {{d0}}, {', '.join(f'{{a{n}}}' for n in range(len(kinds)))};"
    (got,) = micro.run(gpu, text, [result], list(zip(kinds, columns, strict=True)))
    for row, value in zip(zip(*(c.tolist() for c in columns), strict=True), got.view(f"u{SIZES[result]}"), strict=True):
        wanted = expect(*row)
        assert int(value) == wanted, f"{name} of {[hex(v) for v in row]} = {int(value):#x}, expected {wanted:#x}"


@pytest.mark.parametrize(("value", "wanted"), [(-2.0, 0), (0.25, 0x3400), (3.0, 0x3C00), (math.nan, 0), (-0.0, 0)])
def test_halves_of_doubles_saturate(gpu: VirtualGPU, value: float, wanted: int) -> None:
    (got,) = micro.run(gpu, "cvt.rn.sat.f16.f64 {d0}, {a0};", ["f16"], [("f64", np.array([value]))])
    assert int(got[0]) == wanted
    (kept,) = micro.run(gpu, "slct.ftz.b16.f32 {d0}, {a0}, {a1}, {a2};", ["b16"], [
        ("b16", np.array([7], np.uint16)), ("b16", np.array([9], np.uint16)),
        ("f32", np.array([math.copysign(2.0**-140, value)], np.float32)),
    ])  # fmt: skip
    assert int(kept[0]) == 7, "what is flushed is no longer negative"
