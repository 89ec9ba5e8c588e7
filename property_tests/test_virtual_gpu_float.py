"""Floating-point instructions of the virtual GPU are exact rational arithmetic, rounded once.

Faults this catches: rounding twice, a wrong rounding direction, flushing where none is written, a lost NaN, a wrong
overflow. The expectations use fractions only and share no code with the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_numerics.virtual_gpu import VirtualGPU, micro, virtual_gpu


@dataclass(frozen=True)
class Kind:
    """A binary format: exponent and mantissa bits, whether it has infinities, its largest code and NaN code."""

    exponent: int
    mantissa: int
    infinite: bool = True
    top: int = 0
    nan: int = 0

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1

    @property
    def largest(self) -> int:
        return self.top or (((1 << self.exponent) - 1) << self.mantissa) - 1

    @property
    def quiet(self) -> int:
        return self.nan or (1 << (self.bits - 1)) - 1


F32 = Kind(8, 23)
F16 = Kind(5, 10)
BF16 = Kind(8, 7)
E4M3 = Kind(4, 3, False, 0x7E, 0x7F)
E5M2 = Kind(5, 2, True, 0x7B, 0x7F)
E2M1 = Kind(2, 1, False, 0x7, 0x7)
E2M3 = Kind(2, 3, False, 0x1F, 0x1F)
E3M2 = Kind(3, 2, False, 0x1F, 0x1F)

NAN, INF = "nan", "inf"
Exact = tuple[bool, Fraction | str]
"""Sign and magnitude: the sign is kept for zeros."""


def decode(code: int, k: Kind) -> Exact:
    sign = bool(code >> (k.bits - 1) & 1)
    magnitude = code & ((1 << (k.bits - 1)) - 1)
    if k.infinite and magnitude == ((1 << k.exponent) - 1) << k.mantissa:
        return sign, INF
    if magnitude > k.largest:
        return sign, NAN
    field, fraction = magnitude >> k.mantissa, magnitude & ((1 << k.mantissa) - 1)
    if field:
        fraction |= 1 << k.mantissa
    return sign, Fraction(fraction) * Fraction(2) ** (max(field, 1) - k.bias - k.mantissa)


def encode(value: Exact, k: Kind, mode: str = "rn", satfinite: bool = False) -> int:
    sign, x = value
    if x == NAN:
        return k.quiet
    top = sign << (k.bits - 1)
    over = k.largest if satfinite or not k.infinite else k.largest + 1
    if x == INF:
        return top | over
    assert isinstance(x, Fraction)
    if x == 0:
        return top
    exponent = max(x.numerator.bit_length() - x.denominator.bit_length() - 1, 1 - k.bias)
    while x >= Fraction(2) ** (exponent + 1):
        exponent += 1
    quantum = Fraction(2) ** (exponent - k.mantissa)
    steps = x / quantum
    down = math.floor(steps)
    rest = steps - down
    up = {
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and down % 2 == 1),
        "rna": rest >= Fraction(1, 2),
        "rz": False,
        "rm": sign and rest > 0,
        "rp": not sign and rest > 0,
    }[mode]
    code = down + up + (max(exponent + k.bias, 1) - 1 << k.mantissa)
    if code > k.largest:
        towards_zero = mode == "rz" or (mode == "rm" and not sign) or (mode == "rp" and sign)
        code = k.largest if towards_zero else over
    return top | code


def signed(value: Exact) -> Fraction:
    assert isinstance(value[1], Fraction)
    return -value[1] if value[0] else value[1]


def add(a: Exact, b: Exact, mode: str) -> Exact:
    if NAN in (a[1], b[1]) or (a[1] == b[1] == INF and a[0] != b[0]):
        return False, NAN
    for v in (a, b):
        if v[1] == INF:
            return v
    total = signed(a) + signed(b)
    if total == 0:
        return (a[0] if a[0] == b[0] else mode == "rm"), Fraction(0)
    return total < 0, abs(total)


def multiply(a: Exact, b: Exact) -> Exact:
    sign = a[0] != b[0]
    if NAN in (a[1], b[1]) or (INF in (a[1], b[1]) and 0 in (a[1], b[1])):
        return sign, NAN
    if INF in (a[1], b[1]):
        return sign, INF
    return sign, a[1] * b[1]  # type: ignore[operator]


def divide(a: Exact, b: Exact) -> Exact:
    sign = a[0] != b[0]
    if NAN in (a[1], b[1]) or a[1] == b[1] == INF or a[1] == b[1] == 0:
        return sign, NAN
    if a[1] == INF or b[1] == 0:
        return sign, INF
    if b[1] == INF:
        return sign, Fraction(0)
    return sign, a[1] / b[1]  # type: ignore[operator]


def root(a: Exact) -> Exact:
    """The square root to 80 bits, with the last one set if it is inexact: enough for any rounding to float32."""
    if a[1] == NAN or (a[0] and a[1] != 0):
        return False, NAN
    if a[1] in (INF, 0):
        return a
    assert isinstance(a[1], Fraction)
    scaled = a[1] * Fraction(2) ** 400
    whole = math.isqrt(scaled.numerator // scaled.denominator)
    inexact = Fraction(whole) ** 2 != scaled
    return False, (Fraction(whole) + (Fraction(1, 2) if inexact else 0)) / Fraction(2) ** 200


def flushed(code: int) -> int:
    return code & 0x80000000 if code & 0x7F800000 == 0 else code


def saturated(code: int) -> int:
    sign, x = decode(code, F32)
    if x == NAN or sign:
        return 0
    return 0x3F800000 if x == INF or (isinstance(x, Fraction) and x > 1) else code


def minmax(largest: bool, propagate: bool) -> Callable[[int, int], int]:
    def pick(x: int, y: int) -> int:
        a, b = decode(x, F32), decode(y, F32)
        if NAN in (a[1], b[1]):
            if propagate or a[1] == b[1] == NAN:
                return F32.quiet
            return y if a[1] == NAN else x

        def key(v: Exact) -> tuple[Fraction, bool]:
            size = Fraction(2) ** 200 if v[1] == INF else v[1]
            assert isinstance(size, Fraction)
            return (-size if v[0] else size), not v[0]

        return (max if largest else min)((key(a), x), (key(b), y))[1]

    return pick


EDGES = (
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x80800000, 0x00800001, 0x3F800000,
    0xBF800000, 0x3F7FFFFF, 0x3F800001, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001,
    0xFFC00001, 0x33800000, 0x34000000, 0x4B800000, 0x4B000001, 0x5F000000, 0xDF000000, 0x4F000000, 0xCF000000,
    0x3E800000, 0x477FE000, 0x477FF000, 0x38800000, 0x33000000, 0x33000001, 0x43E00000, 0x43E80000, 0x3B000000,
    0x3A800000, 0x3F000000, 0x3FC00000, 0x40200000, 0x3F808000, 0x3F818000, 0x7F7F8000,
)  # fmt: skip

Case = tuple[str, str, tuple[str, ...], Callable[..., int]]


def tiny(value: Exact, mode: str) -> bool:
    """Whether a result, rounded as if exponents had no end, is below 2^-126: an H200 flushes by that."""
    sign, x = value
    if not isinstance(x, Fraction) or not 0 < x < Fraction(2) ** -125:
        return False
    return flushed(encode((sign, x * 2**64), F32, mode)) & 0x7FFFFFFF < (127 - 62) << 23


def wrapped(op: Callable[..., Exact], count: int, mode: str, ftz: bool, sat: bool) -> Callable[..., int]:
    def expect(*codes: int) -> int:
        if ftz:
            codes = tuple(flushed(c) for c in codes)
        exact = op(*(decode(c, F32) for c in codes))
        code = encode(exact, F32, mode)
        if ftz:
            code = code & 0x80000000 if tiny(exact, mode) else flushed(code)
        return saturated(code) if sat else code

    return expect


def half_case(name: str, kind: Kind, kind_name: str, op: Callable[..., Exact], count: int) -> Case:
    def expect(*codes: int) -> int:
        return encode(op(*(decode(c, kind) for c in codes)), kind)

    return f"{name}.{kind_name}", kind_name, (kind_name,) * count, expect


def pair(name: str, kind: Kind, mode: str, satfinite: bool, relu: bool, step: int) -> Callable[[int, int], int]:
    def one(code: int) -> int:
        value = decode(code, F32)
        if relu and value[0] and value[1] != NAN:
            value = (False, Fraction(0))
        return encode(value, kind, mode, satfinite)

    return lambda x, y: one(x) << step | one(y)


def scale(mode: str, satfinite: bool) -> Callable[[int], int]:
    def one(code: int) -> int:
        _, x = decode(code, F32)
        if x == NAN:
            return 255
        if x == INF:
            return 254 if satfinite else 255
        assert isinstance(x, Fraction)
        code = 0
        while code < 255 and Fraction(2) ** (code - 127) < x:
            code += 1
        if mode == "rz" and code and Fraction(2) ** (code - 127) > x:
            code -= 1
        return min(code, 254) if satfinite else code

    return one


def integral(mode: str, low: int, high: int) -> Callable[[int], int]:
    def convert(code: int) -> int:
        sign, x = decode(code, F32)
        if x == NAN:
            # As an H200 does it; the PTX ISA says 0 for all.
            return 1 << 63 if high > 2**32 else 0
        if x == INF:
            return low if sign else high
        value = signed((sign, x))
        whole = {
            "rni": round(value), "rzi": math.trunc(value), "rmi": math.floor(value), "rpi": math.ceil(value)
        }[mode]  # fmt: skip
        return max(low, min(high, whole))

    return convert


def cases() -> Iterator[Case]:
    for mode in ("rn", "rz", "rm", "rp"):
        plain = {
            "add": (lambda a, b, m=mode: add(a, b, m), 2),
            "sub": (lambda a, b, m=mode: add(a, (not b[0], b[1]), m), 2),
            "mul": (multiply, 2),
            "fma": (lambda a, b, c, m=mode: add(multiply(a, b), c, m), 3),
            "div": (divide, 2),
            "rcp": (lambda a: divide((False, Fraction(1)), a), 1),
            "sqrt": (root, 1),
        }
        for name, (op, count) in plain.items():
            suffixes = [("", False, False), (".ftz", True, False)]
            if name in ("add", "sub", "mul", "fma"):
                suffixes.append((".sat", False, True))
            for suffix, ftz, sat in suffixes:
                if mode in ("rm", "rp") and suffix:
                    continue
                yield f"{name}.{mode}{suffix}.f32", "f32", ("f32",) * count, wrapped(op, count, mode, ftz, sat)
    for largest, name in ((False, "min"), (True, "max")):
        yield f"{name}.f32", "f32", ("f32", "f32"), minmax(largest, False)
        yield f"{name}.NaN.f32", "f32", ("f32", "f32"), minmax(largest, True)
    for kind, kind_name in ((F16, "f16"), (BF16, "bf16")):
        yield half_case("add.rn" if kind is BF16 else "add", kind, kind_name, lambda a, b: add(a, b, "rn"), 2)
        yield half_case("mul.rn" if kind is BF16 else "mul", kind, kind_name, multiply, 2)
        yield half_case("fma.rn", kind, kind_name, lambda a, b, c: add(multiply(a, b), c, "rn"), 3)
        for mode in ("rn", "rz"):
            one = lambda x, k=kind, m=mode: encode(decode(x, F32), k, m)  # noqa: E731
            yield f"cvt.{mode}.{kind_name}.f32", kind_name, ("f32",), one
            yield (
                f"cvt.{mode}.{kind_name}x2.f32", "b32", ("f32", "f32"), pair(kind_name, kind, mode, False, False, 16)
            )  # fmt: skip
        yield f"cvt.rn.relu.{kind_name}x2.f32", "b32", ("f32", "f32"), pair(kind_name, kind, "rn", False, True, 16)
        exact = lambda x, k=kind: encode(decode(x, k), F32)  # noqa: E731
        yield f"cvt.f32.{kind_name}", "f32", (kind_name,), exact
    for kind, kind_name in ((E4M3, "e4m3x2"), (E5M2, "e5m2x2")):
        yield f"cvt.rn.satfinite.{kind_name}.f32", "b16", ("f32", "f32"), pair(kind_name, kind, "rn", True, False, 8)
        yield (
            f"cvt.rn.satfinite.relu.{kind_name}.f32", "b16", ("f32", "f32"), pair(kind_name, kind, "rn", True, True, 8)
        )  # fmt: skip
        both = lambda x, k=kind: encode(decode(x & 255, k), F16) | encode(decode(x >> 8, k), F16) << 16  # noqa: E731
        yield f"cvt.rn.f16x2.{kind_name}", "b32", ("b16",), both
    yield "cvt.rn.satfinite.e2m1x2.f32", "b8", ("f32", "f32"), pair("e2m1", E2M1, "rn", True, False, 4)
    yield "cvt.rn.satfinite.e2m3x2.f32", "b16", ("f32", "f32"), pair("e2m3", E2M3, "rn", True, False, 8)
    yield "cvt.rn.satfinite.e3m2x2.f32", "b16", ("f32", "f32"), pair("e3m2", E3M2, "rn", True, False, 8)
    for mode in ("rz", "rp"):
        for satfinite in (False, True):
            s = scale(mode, satfinite)
            name = f"cvt.{mode}{'.satfinite' if satfinite else ''}.ue8m0x2.f32"
            yield name, "b16", ("f32", "f32"), lambda x, y, s=s: s(x) << 8 | s(y)
    yield (
        "cvt.rn.bf16x2.ue8m0x2", "b32", ("b16",),
        lambda x: sum(
            (0x7FFF if c == 255 else encode((False, Fraction(2) ** (c - 127)), BF16)) << s
            for c, s in ((x & 255, 0), (x >> 8, 16))
        ),
    )  # fmt: skip
    for mode in ("rni", "rzi", "rmi", "rpi"):
        yield f"cvt.{mode}.s32.f32", "s32", ("f32",), integral(mode, -(2**31), 2**31 - 1)
        yield f"cvt.{mode}.u32.f32", "u32", ("f32",), integral(mode, 0, 2**32 - 1)
        yield f"cvt.{mode}.s64.f32", "s64", ("f32",), integral(mode, -(2**63), 2**63 - 1)
    for mode in ("rn", "rz", "rm", "rp"):
        ranges = (("s32", -(2**31), 2**31), ("u32", 0, 2**32), ("s64", -(2**63), 2**63), ("u64", 0, 2**64))
        for source, low, high in ranges:
            size = high - low

            def convert(x: int, n: int = size, lowest: int = low, m: str = mode) -> int:
                x = x % n
                x = x - n if lowest and x >= n // 2 else x
                return encode((x < 0, Fraction(abs(x))), F32, m)

            yield f"cvt.{mode}.f32.{source}", "f32", (source,), convert
    yield "cvt.sat.f32.f32", "f32", ("f32",), saturated
    yield "neg.f32", "f32", ("f32",), lambda x: F32.quiet if decode(x, F32)[1] == NAN else x ^ 0x80000000
    yield "abs.f32", "f32", ("f32",), lambda x: F32.quiet if decode(x, F32)[1] == NAN else x & 0x7FFFFFFF


ALL = list(cases())
BYTES = {"f32": 4, "f16": 2, "bf16": 2, "b32": 4, "b16": 2, "b8": 1, "s32": 4, "u32": 4, "s64": 8, "u64": 8}


@pytest.fixture
def gpu() -> Iterator[VirtualGPU]:
    with virtual_gpu("sm_100a") as g:
        yield g


def statement(name: str, count: int) -> str:
    return f"{name} {{d0}}, {', '.join(f'{{a{n}}}' for n in range(count))};"


@pytest.mark.parametrize("case", ALL, ids=[c[0] for c in ALL])
@given(
    seed=st.integers(0, 2**16),
    near=st.booleans(),
    chosen=st.lists(st.tuples(*[st.integers(0, 2**32 - 1)] * 3), max_size=3),
)
def test_float_instruction_is_exact_arithmetic_rounded_once(
    gpu: VirtualGPU, case: Case, seed: int, near: bool, chosen: list[tuple[int, ...]]
) -> None:
    """Fault: a result that is not the exact one rounded once in the instruction's mode, or a wrong special value."""
    name, result, kinds, expect = case
    rng = np.random.Generator(np.random.Philox(seed))
    columns = []
    for n, kind in enumerate(kinds):
        size = 8 * BYTES[kind]
        values = [c[n] for c in chosen] + [EDGES[k] for k in rng.integers(0, len(EDGES), 20)]
        draws = rng.integers(0, 2**size, 20, np.uint64)
        if near and kind == "f32":
            # Exponents close together, so that sums cancel and products meet the third operand; subnormals too.
            base = int(rng.choice([0, 1, 12, 64, 100, 127, 140, 240]))
            draws = draws & 0x807FFFFF | (rng.integers(0, 14, 20).astype(np.uint64) + np.uint64(base)) << np.uint64(23)
        values += [int(v) for v in draws]
        if size == 16:
            values = [v >> 16 if v > 0xFFFF else v for v in values]
        columns.append([v & (2**size - 1) for v in values])
    arrays = [(k, np.array(c, f"u{BYTES[k]}")) for k, c in zip(kinds, columns, strict=True)]
    (got,) = micro.run(gpu, statement(name, len(kinds)), [result], arrays)
    for row, value in zip(zip(*columns, strict=True), got.view(f"u{BYTES[result]}").tolist(), strict=True):
        wanted = expect(*row) & (2 ** (8 * BYTES[result]) - 1)
        if name == "cvt.f32.bf16" and decode(row[0], BF16)[1] == NAN:
            assert value == row[0] << 16, "widening keeps the bits of a NaN"
            continue
        assert value == wanted, f"{name} of {[f'{v:#x}' for v in row]} = {value:#x}, expected {wanted:#x}"


# What an H200 (driver 580.159.04) gives where the PTX ISA leaves it open or says otherwise.
SILICON = [
    ("min.xorsign.abs.f16 {d0}, {a0}, {a1};", "f16", ("f16", "f16"), (0x8A06, 0xFE00), 0x0A06),
    ("neg.f16 {d0}, {a0};", "f16", ("f16",), (0xFE01,), 0x7FFF),
    ("abs.bf16 {d0}, {a0};", "bf16", ("bf16",), (0xFFC1,), 0x7FFF),
    ("add.ftz.f16 {d0}, {a0}, {a1};", "f16", ("f16", "f16"), (0x0001, 0x0400), 0x0400),
    ("testp.normal.f32 {d0}, {a0};", "pred", ("f32",), (0x80000000,), 1),
    ("cvt.rzi.s64.f32 {d0}, {a0};", "s64", ("f32",), (0x7FC00000,), 1 << 63),
    ("cvt.rzi.u32.f32 {d0}, {a0};", "u32", ("f32",), (0x7FC00000,), 0),
    ("cvt.rzi.s32.f64 {d0}, {a0};", "s32", ("f64",), (0x7FF8000000000000,), 1 << 31),
    ("add.f64 {d0}, {a0}, {a1};", "f64", ("f64", "f64"), (0x7FF0000000000000, 0xFFF0000000000000), 0xFFF8000000000000),
    ("cvt.rn.f32.f64 {d0}, {a0};", "f32", ("f64",), (0xFFFFFFFFFFFFFFFF,), 0xFFFFFFFF),
    ("cvt.rna.tf32.f32 {d0}, {a0};", "b32", ("f32",), (0x7FC54321,), 0x7FC54000),
    ("rcp.rp.ftz.f32 {d0}, {a0};", "f32", ("f32",), (0x7E800001,), 0),
    ("cvt.rp.ftz.f16.f32 {d0}, {a0};", "f16", ("f32",), (0x00000001,), 0x0001),
    ("bfe.u64 {d0}, {a0}, {a1}, {a2};", "u64", ("u64", "u32", "u32"), (0xFFFF, 4, 0xCF21F803), 0xFFF),
]


@pytest.mark.parametrize("fact", SILICON, ids=[f[0].split()[0] for f in SILICON])
def test_corners_are_those_of_silicon(
    gpu: VirtualGPU, fact: tuple[str, str, tuple[str, ...], tuple[int, ...], int]
) -> None:
    """Fault: a NaN, a flush or a field is what the manual suggests and not what the hardware does."""
    text, result, kinds, values, wanted = fact
    sizes = {**BYTES, "f64": 8, "pred": 1}
    operands = [(k, np.array([v], f"u{sizes[k]}")) for k, v in zip(kinds, values, strict=True)]
    (got,) = micro.run(gpu, text, [result], operands)
    assert int(got.view(f"u{sizes[result]}")[0]) == wanted
