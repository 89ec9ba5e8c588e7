"""Operands of the silicon comparison: special values, ties, subnormals, small numbers and random bits.

Element `i` of an operand depends on its kind, the operand's number, the seed and `i` only, so that a short array is
the beginning of a long one and an architecture's committed results need no operands beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["BYTES", "operand", "operands"]

U64 = npt.NDArray[np.uint64]
Bits = npt.NDArray[Any]

BYTES = {
    "pred": 1, "b8": 1, "u8": 1, "s8": 1,
    "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2,
    "b32": 4, "u32": 4, "s32": 4, "f32": 4, "f16x2": 4, "bf16x2": 4,
    "b64": 8, "u64": 8, "s64": 8, "f64": 8,
}  # fmt: skip

_CLASSES = 6


def mix(x: U64) -> U64:
    """The finaliser of SplitMix64 (Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _stream(seed: int, number: int, count: int, salt: int) -> U64:
    key = mix(np.array([(seed << 20) + (number << 8) + salt], np.uint64))
    return mix(np.arange(count, dtype=np.uint64) ^ key)


def _f32_bits(*values: float) -> list[int]:
    return [int(v) for v in np.array(values, np.float32).view(np.uint32)]


_F32_SPECIAL = [
    0x00000000, 0x00000001, 0x00000002, 0x003FFFFF, 0x00400000, 0x00400001, 0x007FFFFF, 0x00800000, 0x00800001,
    0x3F800000, 0x3F800001, 0x3F7FFFFF, 0x3F000000, 0x3EFFFFFF, 0x3FC00000, 0x40200000, 0x40600000, 0x7F7FFFFF,
    0x7F000000, 0x7E800000, 0x7E800001, 0x7F800000, 0x7FC00000, 0x7FFFFFFF, 0x7F800001, 0x7FA12345, 0x7FC54321,
    *_f32_bits(
        2.0**-149 * 3, 2.0**-133, 2.0**-134, 2.0**-126 * 3, 2.0**-25, 2.0**-24, 2.0**-17, 2.0**-16, 2.0**-14, 2.0**-10,
        2.0**-9, 2.0**-6, 3, 4, 6, 15, 16, 126, 127, 128, 149, 150, 255, 256, 448, 464, 480, 32767.5, 32768, 57344,
        61440, 65504, 65519.99, 65520, 65535, 65536, 8388607.5, 8388608, 16777216, 2.0**31, 2.0**31 - 128, 2.0**32,
        2.0**32 - 256, 2.0**63, 2.0**64, 3.3895e38, 0.33333334, 3.1415927,
    ),
]  # fmt: skip


def _f32(seed: int, number: int, count: int) -> Bits:
    r = _stream(seed, number, count, 1)
    kind = _stream(seed, number, count, 2) % np.uint64(_CLASSES)
    low = r.astype(np.uint32)
    sign = (r >> np.uint64(32)).astype(np.uint32) & np.uint32(0x80000000)
    special = np.array(_F32_SPECIAL, np.uint32)[(low % np.uint32(len(_F32_SPECIAL))).astype(np.intp)] | sign
    near_one = (
        (low & np.uint32(0x007FFFFF))
        | (np.uint32(119) + (low >> np.uint32(24)) % np.uint32(17)) << np.uint32(23)
        | sign
    )
    tiny = (low & np.uint32(0x007FFFFF)) | ((low >> np.uint32(24)) % np.uint32(4)) << np.uint32(23) | sign
    # A tie: all bits below some position are clear and that bit is set.
    place = (low % np.uint32(23)).astype(np.uint32)
    moderate = ((r >> np.uint64(20)).astype(np.uint32) & np.uint32(0x007FFFFF)) | (
        np.uint32(95) + (low >> np.uint32(8)) % np.uint32(64)
    ) << np.uint32(23)
    tie = ((moderate >> place) | np.uint32(1)) << place | sign
    integer = ((low >> np.uint32(8)) % np.uint32(1024)).astype(np.float32).view(np.uint32) | sign
    return np.choose(kind.astype(np.intp), [special, low, near_one, tiny, tie, integer]).astype(np.uint32)


def _f64(seed: int, number: int, count: int) -> Bits:
    """Random doubles, float32 values with and without a small excess, and the ends of the range."""
    r = _stream(seed, number, count, 3)
    kind = _stream(seed, number, count, 4) % np.uint64(_CLASSES)
    single = _f32(seed, number, count).view(np.float32)
    with np.errstate(invalid="ignore"):
        wide = single.astype(np.float64).view(np.uint64)
    special = np.array(
        [0, 1, 0x000FFFFFFFFFFFFF, 0x0010000000000000, 0x3FF0000000000000, 0x3FF0000000000001, 0x3FEFFFFFFFFFFFFF,
         0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000, 0x7FF8000000000000, 0x7FF0000000000001, 0x7FFFFFFFFFFFFFFF],
        np.uint64,
    )[(r % np.uint64(12)).astype(np.intp)] | (r & np.uint64(1 << 63))  # fmt: skip
    around_one = (r & np.uint64((1 << 52) - 1)) | (np.uint64(1013) + (r >> np.uint64(53)) % np.uint64(20)) << np.uint64(
        52
    )
    half = wide ^ np.uint64(0x10000000)
    return np.choose(
        kind.astype(np.intp), [special, r, around_one | (r & np.uint64(1 << 63)), wide, half, wide ^ np.uint64(1)]
    ).astype(np.uint64)


_F16_SPECIAL = [0x0000, 0x0001, 0x03FF, 0x0400, 0x3C00, 0x3C01, 0x3BFF, 0x7BFF, 0x7C00, 0x7E00, 0x7FFF, 0x7C01, 0x3800]
_BF16_SPECIAL = [0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x3F81, 0x3F7F, 0x7F7F, 0x7F80, 0x7FC0, 0x7FFF, 0x7F81, 0x3F00]


def _half(name: str) -> Callable[[int, int, int], Bits]:
    table = np.array(_F16_SPECIAL if name == "f16" else _BF16_SPECIAL, np.uint16)
    mantissa, bias = (10, 15) if name == "f16" else (7, 127)

    def draw(seed: int, number: int, count: int) -> Bits:
        r = _stream(seed, number, count, 5)
        kind = _stream(seed, number, count, 6) % np.uint64(4)
        low = r.astype(np.uint16)
        sign = (r >> np.uint64(16)).astype(np.uint16) & np.uint16(0x8000)
        special = table[((r >> np.uint64(32)) % np.uint64(table.size)).astype(np.intp)] | sign
        exponent = (np.uint64(bias - 4) + (r >> np.uint64(40)) % np.uint64(9)).astype(np.uint16)
        near_one = (low & np.uint16((1 << mantissa) - 1)) | exponent << np.uint16(mantissa) | sign
        small = (low & np.uint16((1 << (mantissa + 2)) - 1)) | sign
        return np.choose(kind.astype(np.intp), [special, low, near_one, small]).astype(np.uint16)

    return draw


def _pair(name: str) -> Callable[[int, int, int], Bits]:
    draw = _half(name)
    return lambda seed, number, count: (
        draw(seed, number, count).astype(np.uint32) | draw(seed, number + 16, count).astype(np.uint32) << np.uint32(16)
    )


def _integer(bits: int) -> Callable[[int, int, int], Bits]:
    dtype = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}[bits]
    top = 1 << (bits - 1)
    special = [0, 1, 2, 3, 7, 31 % top, 32 % top, 33 % top, top - 2, top - 1, top, top + 1, 2 * top - 2, 2 * top - 1]

    def draw(seed: int, number: int, count: int) -> Bits:
        r = _stream(seed, number, count, 7)
        kind = _stream(seed, number, count, 8) % np.uint64(5)
        table = np.array(special, np.uint64)
        picked = table[(r % np.uint64(len(special))).astype(np.intp)]
        place = np.uint64(1) << ((r >> np.uint64(8)) % np.uint64(bits))
        small = (r >> np.uint64(16)) % np.uint64(64)
        return np.choose(kind.astype(np.intp), [picked, r, place, place - np.uint64(1), small]).astype(dtype)

    return draw


def _divisor(bits: int) -> Callable[[int, int, int], Bits]:
    """No zero and no -1: PTX leaves a division by zero, and of the least number by -1, open."""
    draw = _integer(bits)

    def nonzero(seed: int, number: int, count: int) -> Bits:
        x = draw(seed, number, count)
        return np.where((x == 0) | (x == x.dtype.type(-1 & ((1 << bits) - 1))), x.dtype.type(3), x)

    return nonzero


def _shift(seed: int, number: int, count: int) -> Bits:
    r = _stream(seed, number, count, 9)
    wide = _stream(seed, number, count, 10) % np.uint64(8) == 0
    return np.where(wide, r.astype(np.uint32), (r % np.uint64(70)).astype(np.uint32)).astype(np.uint32)


def _predicate(seed: int, number: int, count: int) -> Bits:
    return (_stream(seed, number, count, 11) & np.uint64(1)).astype(np.uint8)


def _uniform(values: int) -> Callable[[int, int, int], Bits]:
    """Few values, so that lanes of a warp often agree; every fourth warp is of one value."""

    def draw(seed: int, number: int, count: int) -> Bits:
        r = _stream(seed, number, count, 12)
        warp = np.arange(count) // 32
        same = mix(warp.astype(np.uint64) ^ np.uint64(seed)) % np.uint64(4) == 0
        each = (r % np.uint64(values)).astype(np.uint32)
        return np.where(same, (mix(warp.astype(np.uint64)) % np.uint64(values)).astype(np.uint32), each).astype(
            np.uint32
        )

    return draw


def _member_mask(seed: int, number: int, count: int) -> Bits:
    """For each lane the mask of its group: the whole warp, its halves, or the even and the odd lanes."""
    lane = np.arange(count, dtype=np.uint32) % np.uint32(32)
    warp = np.arange(count) // 32
    halves = np.where(lane < 16, np.uint32(0x0000FFFF), np.uint32(0xFFFF0000))
    parity = np.where(lane % 2 == 0, np.uint32(0x55555555), np.uint32(0xAAAAAAAA))
    return np.choose(warp % 3, [np.full(count, 0xFFFFFFFF, np.uint32), halves, parity]).astype(np.uint32)


def _clamp(seed: int, number: int, count: int) -> Bits:
    """The clamp and segment operand of a shuffle: segments of 32, 16 and 8 lanes."""
    r = _stream(seed, number, count, 13)
    table = np.array([0x001F, 0x0000, 0x100F, 0x101F, 0x1800, 0x181F, 0x1C1F, 0x0010, 0x1807], np.uint32)
    return table[(r % np.uint64(table.size)).astype(np.intp)]


def _fragment(name: str) -> Callable[[int, int, int], Bits]:
    """Words of matrix operands of a moderate range, so that sums neither vanish nor overflow."""

    def draw(seed: int, number: int, count: int) -> Bits:
        r = _stream(seed, number, count, 14)
        if name == "f32":
            low = r.astype(np.uint32)
            exponent = np.uint32(117) + ((r >> np.uint64(32)).astype(np.uint32) % np.uint32(20))
            return ((low & np.uint32(0x807FFFFF)) | exponent << np.uint32(23)).astype(np.uint32)
        if name in ("bf16", "f16"):
            mantissa, bias = (10, 15) if name == "f16" else (7, 127)
            halves = []
            for side in range(2):
                low = (r >> np.uint64(32 * side)).astype(np.uint32)
                exponent = np.uint32(bias - 5) + (low >> np.uint32(16)) % np.uint32(10)
                halves.append(
                    (low & np.uint32(0x8000)) | exponent << np.uint32(mantissa) | (low & np.uint32((1 << mantissa) - 1))
                )
            return (halves[0] | halves[1] << np.uint32(16)).astype(np.uint32)
        # Codes of eight bits; those of NaN and infinity become small values.
        keep = np.uint64(0xBFBFBFBFBFBFBFBF)
        return (r & keep).astype(np.uint32)

    return draw


def _spiced(name: str) -> Callable[[int, int, int], Bits]:
    """`_fragment` with random bits in one word of 32, so that NaN, infinities and subnormals meet other values."""
    plain, random = _fragment(name), _integer(32)

    def draw(seed: int, number: int, count: int) -> Bits:
        rare = _stream(seed, number, count, 18) % np.uint64(32) == 0
        return np.where(rare, random(seed, number, count), plain(seed, number, count)).astype(np.uint32)

    return draw


def _edge(left: bool) -> Callable[[int, int, int], Bits]:
    """Factors whose product lies within a few ulp of 2^-126, where flushing and rounding meet."""

    def draw(seed: int, number: int, count: int) -> Bits:
        r = _stream(seed, 0, count, 16)
        first = ((r.astype(np.uint32) & np.uint32(0x007FFFFF)) | np.uint32(64 << 23)).view(np.float32)
        if left:
            return first.view(np.uint32)
        second = (np.float64(2.0**-126) / first.astype(np.float64)).astype(np.float32).view(np.uint32)
        shifted = second + ((r >> np.uint64(40)) % np.uint64(5)).astype(np.uint32) - np.uint32(2)
        return (shifted | ((r >> np.uint64(32)).astype(np.uint32) & np.uint32(0x80000000))).astype(np.uint32)

    return draw


def _f64_edge(seed: int, number: int, count: int) -> Bits:
    """Doubles within two float32 ulp of 2^-126."""
    r = _stream(seed, number, count, 17)
    offset = (r >> np.uint64(8)) % np.uint64(1 << 31)
    value = np.uint64(0x3810000000000000) + offset - np.uint64(1 << 30)
    coarse = np.where(r % np.uint64(3) == 0, value & ~np.uint64(0x0FFFFFFF), value)
    return (coarse | (r & np.uint64(1 << 63))).astype(np.uint64)


_MAKERS: dict[str, Callable[[int, int, int], Bits]] = {
    "f32": _f32,
    "f64": _f64,
    "pred": _predicate,
    "f16": _half("f16"),
    "bf16": _half("bf16"),
    "f16x2": _pair("f16"),
    "bf16x2": _pair("bf16"),
    **{f"{letter}{bits}": _integer(bits) for letter in "bus" for bits in (8, 16, 32, 64)},
    **{f"{letter}{bits}:divisor": _divisor(bits) for letter in "us" for bits in (16, 32, 64)},
    "f32:edge_left": _edge(True),
    "f32:edge_right": _edge(False),
    "f64:edge": _f64_edge,
    "u32:shift": _shift,
    "b32:few": _uniform(5),
    "b64:few": lambda seed, number, count: _uniform(5)(seed, number, count).astype(np.uint64) * np.uint64(0x100000001),
    "u32:members": _member_mask,
    "u32:clamp": _clamp,
    "b32:f32": _fragment("f32"),
    "b32:bf16": _fragment("bf16"),
    "b32:f16": _fragment("f16"),
    "b32:fp8": _fragment("fp8"),
    **{f"b32:{name}:any": _spiced(name) for name in ("f32", "bf16", "f16", "fp8")},
}


def operand(kind: str, number: int, count: int, seed: int = 0) -> Bits:
    """Bits of `count` elements of operand `number`.

    kind: a PTX type, or one with a purpose (`u32:shift`, `s32:divisor`, `u32:members`, ...).
    """
    with np.errstate(over="ignore"):
        return _MAKERS[kind](seed, number, count)


def operands(kinds: Sequence[str], count: int, seed: int = 0) -> list[Bits]:
    """Bits of all operands of a probe: for a quarter of the elements a later operand is near an earlier one.

    Near: the same bits, a neighbour, the negative, or for floats an exponent 24 apart, where sums are ties.
    """
    out = [operand(kind, number, count, seed) for number, kind in enumerate(kinds)]
    with np.errstate(over="ignore"):
        for number in range(1, len(out)):
            if kinds[number] != kinds[number - 1] or ":" in kinds[number] or kinds[number] == "pred":
                continue
            before, bits = out[number - 1], out[number]
            one = bits.dtype.type(1)
            width = 8 * bits.dtype.itemsize
            top = bits.dtype.type(1 << (width - 1))
            near = [before, before + one, before - one, before ^ top]
            if kinds[number] == "f32":
                near += [before - np.uint32(24 << 23), (before + np.uint32(24 << 23)) ^ top]
            r = _stream(seed, number, count, 15)
            choice = ((r >> np.uint64(8)) % np.uint64(len(near))).astype(np.intp)
            out[number] = np.where(r % np.uint64(4) == 0, np.choose(choice, near), bits).astype(bits.dtype)
    return out
