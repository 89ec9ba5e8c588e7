"""Conversions between float32 and the narrow formats of PTX, on integer bits.

Formats: PTX ISA 5.2.3 (alternate floating-point formats), 9.7.9.22 (cvt); OCP OFP8 1.0 for e4m3 and e5m2, OCP MX
1.0 for e2m1, e2m3, e3m2 and ue8m0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
U32 = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Format:
    """A binary format below float32.

    maximum: the code of the largest finite value. infinity: the code of +Inf, None where there is none.
    nan: the code that NaN becomes, None where the format has none (NaN then becomes the positive maximum).
    """

    name: str
    exponent: int
    mantissa: int
    maximum: int
    infinity: int | None
    nan: int | None

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1


FORMATS = {
    f.name: f
    for f in (
        Format("f16", 5, 10, 0x7BFF, 0x7C00, 0x7FFF),
        Format("bf16", 8, 7, 0x7F7F, 0x7F80, 0x7FFF),
        Format("tf32", 8, 10, 0x3FBFF, 0x3FC00, 0x3FFFF),
        Format("e4m3", 4, 3, 0x7E, None, 0x7F),
        Format("e5m2", 5, 2, 0x7B, 0x7C, 0x7F),
        Format("e2m1", 2, 1, 0x7, None, None),
        Format("e2m3", 2, 3, 0x1F, None, None),
        Format("e3m2", 3, 2, 0x1F, None, None),
    )
}


def encode(
    x: npt.NDArray[np.float32],
    fmt: Format,
    mode: str = "rn",
    satfinite: bool = False,
    random: U32 | None = None,
    random_bits: int = 0,
) -> U32:
    """The codes of float32 values, as uint32.

    mode: rn (ties to even), rna (ties away), rz, rm, rp, rs (away from zero where the upper `random_bits` of the bits
    that are dropped, plus `random`, carry). satfinite: values past the maximum, infinities included, become the maximum
    with their sign; without it they overflow to infinity (rz: to the maximum).
    """
    u = x.view(np.uint32)
    magnitude = u & np.uint32(0x7FFFFFFF)
    negative = (u >> np.uint32(31)).astype(bool)
    drop = 23 - fmt.mantissa
    field = magnitude >> np.uint32(23)
    significand = magnitude & np.uint32(0x7FFFFF)
    normal = field > 0
    significand = significand | (normal.astype(np.uint32) << np.uint32(23))
    e = np.maximum(field, np.uint32(1)).astype(np.int32) - (127 - fmt.bias)
    dropped = drop + np.maximum(1 - e, 0)
    shift = np.minimum(dropped, 25).astype(np.uint32)
    kept = significand >> shift
    rest = significand & ((np.uint32(1) << shift) - np.uint32(1))
    if mode in ("rn", "rna"):
        half = np.uint32(1) << (shift - np.uint32(1))
        up = (rest > half) | ((rest == half) & (((kept & np.uint32(1)) == 1) | (mode == "rna")))
    elif mode == "rz":
        up = np.zeros(x.shape, bool)
    elif mode == "rs":
        surplus = dropped - random_bits
        upper = rest >> np.clip(surplus, 0, 31).astype(np.uint32) << np.clip(-surplus, 0, 31).astype(np.uint32)
        up = (upper + random) >> np.uint32(random_bits) > 0
    else:
        up = (rest > 0) & (negative if mode == "rm" else ~negative)
    code = ((np.maximum(e, 1) - 1).astype(np.uint32) << np.uint32(fmt.mantissa)) + kept + up.astype(np.uint32)
    maximum = np.uint32(fmt.maximum)
    infinite = magnitude == np.uint32(0x7F800000)
    over = code > maximum
    if satfinite or fmt.infinity is None:
        code = np.where(over | infinite, maximum, code)
    else:
        if mode == "rz":
            towards_zero: npt.NDArray[np.bool_] | bool = True
        elif mode in ("rm", "rp"):
            towards_zero = ~negative if mode == "rm" else negative
        else:
            towards_zero = False
        code = np.where(over, np.where(towards_zero, maximum, np.uint32(fmt.infinity)), code)
        code = np.where(infinite, np.uint32(fmt.infinity), code)
    code = code | (negative.astype(np.uint32) << np.uint32(fmt.bits - 1))
    nan = magnitude > np.uint32(0x7F800000)
    if nan.any():
        code = np.where(nan, np.uint32(fmt.maximum if fmt.nan is None else fmt.nan), code)
    return np.asarray(code, np.uint32)


@lru_cache(maxsize=64)
def encoder(fmt: Format, mode: str, satfinite: bool) -> Callable[[F32], U32]:
    """`encode` of a format, a mode other than rs, and `satfinite`: looked up where the table is small.

    Rounding depends on the bits that the format can keep, the one below them, and whether any lower one is set.
    """
    if fmt.mantissa > 3:
        return partial(encode, fmt=fmt, mode=mode, satfinite=satfinite)
    lower = np.uint32(22 - fmt.mantissa)
    below = np.uint32((1 << int(lower)) - 1)
    one = np.uint32(1)
    keys = np.arange(1 << (33 - int(lower)), dtype=np.uint32)
    table = encode(((keys >> one) << lower | keys & one).view(np.float32), fmt, mode, satfinite)

    def look_up(x: F32) -> U32:
        u = x.view(np.uint32)
        return np.asarray(table.take((u >> lower) << one | ((u & below) != 0)))

    return look_up


def decode(codes: U32, fmt: Format) -> npt.NDArray[np.float32]:
    """The float32 values of codes; NaN becomes 0x7fffffff."""
    c = np.asarray(codes).astype(np.uint32)
    sign = (c >> np.uint32(fmt.bits - 1)) & np.uint32(1)
    magnitude = c & np.uint32((1 << (fmt.bits - 1)) - 1)
    field = magnitude >> np.uint32(fmt.mantissa)
    fraction = magnitude & np.uint32((1 << fmt.mantissa) - 1)
    if fmt.exponent == 8:
        bits = magnitude << np.uint32(23 - fmt.mantissa)
    else:
        normal = ((field + np.uint32(127 - fmt.bias)) << np.uint32(23)) | (fraction << np.uint32(23 - fmt.mantissa))
        small = (fraction.astype(np.float32) * np.float32(2.0 ** (1 - fmt.bias - fmt.mantissa))).view(np.uint32)
        bits = np.where(field == 0, small, normal)
    if fmt.infinity is not None:
        bits = np.where(magnitude == fmt.infinity, np.uint32(0x7F800000), bits)
    bits = bits | (sign << np.uint32(31))
    if fmt.nan is not None:
        is_nan = magnitude > np.uint32(fmt.maximum if fmt.infinity is None else fmt.infinity)
        bits = np.where(is_nan, np.uint32(0x7FFFFFFF), bits)
    return np.asarray(bits, np.uint32).view(np.float32)


def to_bf16(x: npt.NDArray[np.float32]) -> U32:
    """Codes of bfloat16, round to nearest even: the common case of `encode` in five operations."""
    u = x.view(np.uint32)
    r = (u + (np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    if r.size and np.isnan(np.minimum.reduce(x, axis=None)):
        r = np.where(np.isnan(x), np.uint32(0x7FFF), r)
    return r


def encode_ue8m0(x: npt.NDArray[np.float32], mode: str, satfinite: bool) -> U32:
    """Codes of ue8m0, the power of two at (rz) or at and above (rp) |x|; 0xFF is NaN.

    Zero and what lies below 2^-127 become 0 (rz) or the smallest code that is not less (rp).
    """
    magnitude = x.view(np.uint32) & np.uint32(0x7FFFFFFF)
    field = magnitude >> np.uint32(23)
    fraction = magnitude & np.uint32(0x7FFFFF)
    if mode == "rp":
        # Code 0 is 2^-127, which in float32 is the subnormal 0x400000.
        up = np.where(field == 0, fraction > np.uint32(0x400000), fraction != 0)
        code = field + up.astype(np.uint32)
    else:
        code = field
    top = np.uint32(0xFE)
    over = (code > top) | (magnitude == np.uint32(0x7F800000))
    code = np.where(over, top if satfinite else np.uint32(0xFF), code)
    return np.asarray(np.where(magnitude > np.uint32(0x7F800000), np.uint32(0xFF), code), np.uint32)


def decode_ue8m0(codes: U32) -> npt.NDArray[np.float32]:
    """2^(code - 127) as float32; 0xFF is NaN."""
    c = np.asarray(codes).astype(np.uint32)
    bits = np.where(c == 0, np.uint32(0x400000), c << np.uint32(23))
    return np.asarray(np.where(c == 0xFF, np.uint32(0x7FFFFFFF), bits), np.uint32).view(np.float32)
