"""Elementary functions in float32 with every rounding explicit: the same bits on any CPU or GPU.

Every function is a fixed sequence of IEEE 754 operations (add, subtract, multiply, fused multiply-add,
reciprocal, minimum, maximum; each rounded once, to nearest even) and of integer operations on bits. A kernel
that performs the same sequence with `.rn` instructions gives the same bits. Negation, absolute value and
copying a sign are exact and cost nothing on a GPU.

How the exponential is taken apart: `shifted = fma(y, log2(e), MAGIC + bias)` rounds y / ln(2) to the integer
k, which then stands, plus `bias`, in the low bits of `shifted`; `bits(shifted) << 23` is the float whose
exponent field is k + bias, so a bias of 127 - 32 gives 2**(k - 32) in one operation. `reduced = y - k *
ln(2)` lies in [-0.3466, 0.3466], where a polynomial stands for exp(reduced). NaN travels through the
polynomial, never through the integer operations, so it reaches every result.

The factor 2**-32 keeps exp, its sum with 1 and the reciprocal normal over the whole range of a sigmoid, so
that only the last multiplication, by 2**-32, rounds into the subnormals.

Polynomials: minimax fits of relative error (Remez exchange in 40-digit arithmetic), the coefficients rounded
to float32 one after the other, the others fitted again after each. Stated errors are those of the rounded
ones.

Special values: NaN gives NaN. NaN payloads are not specified.
"""

import math
import struct
from typing import NamedTuple

import torch
from torch import Tensor

# 1.5 * 2**23: floats near it have a spacing of 1, and the bit of the .5 keeps negative integers in the same
# binade.
MAGIC = 12582912.0
EXPONENT_BIAS = 127
SCALE_EXPONENT = 32
SCALE = 2.0**-SCALE_EXPONENT

LOG2_E = float.fromhex("0x1.715476p+0")
LN_2 = float.fromhex("0x1.62e430p-1")
# ln(2) - LN_2
LN_2_LOW = float.fromhex("-0x1.05c610p-29")

# exp(r) = 1 + r + r**2 * (...), |r| <= 0.34658: relative error 3.2e-9. Highest power first.
EXP_COEFFICIENTS = tuple(
    map(float.fromhex, ("0x1.6ac74ep-10", "0x1.123de0p-7", "0x1.555858p-5", "0x1.55548cp-3", "0x1.fffffcp-2"))
)
# exp(r) = 1 + r * (...), |r| <= 0.34658: relative error 9.2e-8. Highest power first. One operation shorter
# than EXP_COEFFICIENTS, and like the missing LN_2_LOW below (k * 1.9e-9 of the result) paid for by a few last
# bits only: activation kernels are bound by their instruction count, and no bfloat16 result changes.
SHORT_EXP_COEFFICIENTS = tuple(
    map(float.fromhex, ("0x1.0f992ep-7", "0x1.573accp-5", "0x1.555a8ap-3", "0x1.fffdc4p-2", "0x1.fffff6p-1"))
)
# (exp(2r) - 1) / 2 = r + r**2 * (...), |r| <= 0.17329: relative error 1.5e-8. Highest power first.
HALF_EXPM1_COEFFICIENTS = tuple(
    map(float.fromhex, ("0x1.6ab16cp-5", "0x1.122c86p-3", "0x1.55579ep-2", "0x1.5554aap-1", "0x1.fffffep-1"))
)
# Normal tail(z) * exp(z**2 / 2) as a polynomial of t = 1 / (1 + z * MILLS_SLOPE), 0 <= z <= 14.5: relative
# error 4.9e-8. Highest power first.
MILLS_SLOPE = 19.0 / 64.0
MILLS_COEFFICIENTS = tuple(
    map(
        float.fromhex,
        (
            "0x1.41512cp-5",
            "-0x1.6e372ap-3",
            "0x1.064dc0p-2",
            "-0x1.a41b4ep-4",
            "0x1.42ea90p-3",
            "0x1.6a258ep-4",
            "0x1.f2d588p-4",
            "0x1.e3cc00p-4",
            "0x1.bb8dd2p-17",
        ),
    )
)
INVERSE_SQRT_2_PI = float.fromhex("0x1.988454p-2")

# The argument y of exp(y) in 1 / (1 + exp(y)): at -30 that is 1, at 104 it is below half of the smallest
# subnormal.
SIGMOID_EXPONENT_MIN = -30.0
SIGMOID_EXPONENT_MAX = 104.0

# A block of elements small enough that the float64 intermediates stay in a core's cache.
_FMA_BLOCK = 1 << 14


def float32(value: float) -> float:
    """The float32 nearest to a Python float, ties to even, as a Python float.

    NaN and infinities are kept; raises OverflowError for a finite value beyond the float32 range.
    """
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def as_float32(name: str, x: Tensor) -> Tensor:
    """`x` as float32, exactly; raises TypeError unless it is float32, bfloat16 or float16."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"{name} is {x.dtype}: expected float32, bfloat16 or float16, which float32 holds exactly")
    return x.float()


def fma(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """a * b + c, rounded once to float32, nearest even.

    `a` float32 of any shape; `b` and `c` float32 tensors that broadcast with it, or Python floats that are
    float32 values (others are rounded to float32 first). Result: float32. Subnormals are kept, overflow gives
    infinity, 0 * Inf and Inf - Inf give NaN; an exact sum of 0 is +0 unless both terms are -0.

    The product is exact in float64 and the float64 sum is corrected to round-to-odd, after which rounding to
    float32 is that of the exact value (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums:
    proved algorithms using rounding to odd", IEEE Transactions on Computers 57(4), 2008).
    """
    tensors = [x for x in (a, b, c) if isinstance(x, Tensor)]
    for name, operand in zip("abc", (a, b, c), strict=True):
        if isinstance(operand, Tensor) and operand.dtype != torch.float32:
            raise TypeError(f"{name} is {operand.dtype}: fma takes float32 tensors, convert it first")
    b = b if isinstance(b, Tensor) else float32(b)
    c = c if isinstance(c, Tensor) else float32(c)
    # Not torch.broadcast_shapes: its first call imports sympy, which takes longer than a small kernel.
    shape = torch.broadcast_tensors(*tensors)[0].shape
    count = math.prod(shape)
    if a.is_cuda or count <= _FMA_BLOCK:
        return _fma_block(a, b, c)
    flat = [x.expand(shape).reshape(-1) if isinstance(x, Tensor) else x for x in (a, b, c)]
    result = torch.empty(count, dtype=torch.float32)
    for start in range(0, count, _FMA_BLOCK):
        block = slice(start, min(start + _FMA_BLOCK, count))
        result[block] = _fma_block(*(x[block] if isinstance(x, Tensor) else x for x in flat))
    return result.view(shape)


def _fma_block(a: Tensor | float, b: Tensor | float, c: Tensor | float) -> Tensor:
    a, b, c = (x.double() if isinstance(x, Tensor) else x for x in (a, b, c))
    product = torch.as_tensor(a * b)
    total = product + c
    # TwoSum: `error` is what `total` is too small by, exactly.
    addend = total - product
    error = (product - (total - addend)).add_(c - addend)
    # Round to odd: where inexact, truncate (step back where the error points towards zero), set the last bit.
    total_bits = total.view(torch.int64)
    inexact = error.abs() > 0
    towards_zero = error.view(torch.int64).bitwise_xor_(total_bits).bitwise_right_shift_(63)
    odd = towards_zero.add_(total_bits).bitwise_or_(1)
    return torch.where(inexact, odd, total_bits).view(torch.float64).float()


def reciprocal(x: Tensor) -> Tensor:
    """1 / x in float32, correctly rounded. +-0 gives +-Inf, +-Inf gives +-0. PTX: rcp.rn.f32."""
    return torch.reciprocal(x)


def exp(x: Tensor) -> Tensor:
    """e**x in float32; rounded to bfloat16 it is the correctly rounded result for every bfloat16 input.

    `x` float32 (bfloat16 and float16 are widened), any shape. Subnormal results are kept; above 88.72 the
    result is Inf, below -103.97 it is +0.
    """
    x = as_float32("x", x)
    y = torch.clamp(x, -104.0, 89.0)
    bias = 2 * EXPONENT_BIAS
    shifted = fma(y, LOG2_E, MAGIC + bias)
    k = shifted - (MAGIC + bias)
    reduced = fma(k, -LN_2, y)
    reduced = fma(k, -LN_2_LOW, reduced)
    power = fma(reduced, EXP_COEFFICIENTS[0], EXP_COEFFICIENTS[1])
    for coefficient in EXP_COEFFICIENTS[2:]:
        power = fma(power, reduced, coefficient)
    power = fma(power, reduced, 1.0)
    power = fma(power, reduced, 1.0)
    # 2**k in two factors, the first of which cannot leave the normal numbers.
    bits = shifted.view(torch.int32)
    half = bits >> 1
    first = (half << 23).view(torch.float32)
    second = ((bits - half) << 23).view(torch.float32)
    return (power * first) * second


def _short_exp(reduced: Tensor) -> Tensor:
    power = fma(reduced, SHORT_EXP_COEFFICIENTS[0], SHORT_EXP_COEFFICIENTS[1])
    for coefficient in SHORT_EXP_COEFFICIENTS[2:]:
        power = fma(power, reduced, coefficient)
    return fma(power, reduced, 1.0)


class SigmoidTerms(NamedTuple):
    """sigmoid(x) with what the derivative of x * sigmoid(x) needs, each float32 and of the shape of x.

    value: 1 / (1 + exp(-x)). clamped: x limited to [-104, 30]. complement: 1 - sigmoid(clamped), without
    cancellation; it stops shrinking at 30, so a product with x is to be taken with `clamped`.
    """

    value: Tensor
    complement: Tensor
    clamped: Tensor


class SigmoidPair(NamedTuple):
    """sigmoid(x) and 1 - sigmoid(x) = sigmoid(-x), both relatively accurate everywhere; float32."""

    value: Tensor
    complement: Tensor


def _sigmoid_parts(y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(exp(y) before scaling, its scale 2**(k - 32), 2**32 / (1 + exp(y))) for -30 <= y <= 108."""
    bias = EXPONENT_BIAS - SCALE_EXPONENT
    shifted = fma(y, LOG2_E, MAGIC + bias)
    k = shifted - (MAGIC + bias)
    reduced = fma(k, -LN_2, y)
    power = _short_exp(reduced)
    scale = (shifted.view(torch.int32) << 23).view(torch.float32)
    denominator = fma(power, scale, SCALE)
    return power, scale, reciprocal(denominator)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) in float32; rounded to bfloat16 it is correctly rounded for every bfloat16 input.

    `x` float32 (bfloat16 and float16 are widened), any shape. Subnormal results are kept; -Inf gives +0, Inf
    1.
    """
    y = torch.clamp(-as_float32("x", x), SIGMOID_EXPONENT_MIN, SIGMOID_EXPONENT_MAX)
    _, _, scaled = _sigmoid_parts(y)
    return scaled * SCALE


def sigmoid_terms(x: Tensor) -> SigmoidTerms:
    """sigmoid(x), with the bits of `sigmoid`, and what the derivative of x * sigmoid(x) needs."""
    y = torch.clamp(-as_float32("x", x), SIGMOID_EXPONENT_MIN, SIGMOID_EXPONENT_MAX)
    power, scale, scaled = _sigmoid_parts(y)
    return SigmoidTerms(value=scaled * SCALE, complement=(power * scale) * scaled, clamped=-y)


def sigmoid_pair(x: Tensor) -> SigmoidPair:
    """sigmoid(x) and sigmoid(-x), from the smaller of the two; NaN gives NaN in both.

    `x` float32 (bfloat16 and float16 are widened), any shape. Unlike `sigmoid_terms` the complement keeps
    shrinking, to the subnormals and +0; the last bits of the value differ from those of `sigmoid`.
    """
    x = as_float32("x", x)
    y = torch.clamp(x.abs(), max=SIGMOID_EXPONENT_MAX)
    _, _, scaled = _sigmoid_parts(y)
    smaller = scaled * SCALE
    larger = 1.0 - smaller
    positive = x > 0
    return SigmoidPair(torch.where(positive, larger, smaller), torch.where(positive, smaller, larger))


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x) in float32; rounded to bfloat16 it is correctly rounded for every bfloat16 input.

    `x` float32 (bfloat16 and float16 are widened), any shape. Finite x below -104 give -0; Inf gives Inf;
    -Inf gives NaN, being Inf * 0 as in the formula.
    """
    x = as_float32("x", x)
    return x * sigmoid(x)


class TanhTerms(NamedTuple):
    """tanh(x) and its derivative 1 - tanh(x)**2, without cancellation; float32, of the shape of x."""

    value: Tensor
    derivative: Tensor


# Beyond 53, 1 - tanh(x)**2 is below half of the smallest subnormal; below 2**-12, tanh(x) rounds to x.
TANH_MAX = 53.0
TANH_IDENTITY = 2.0**-12


def _tanh_parts(magnitude: Tensor) -> tuple[Tensor, Tensor]:
    """(2**-32 * (exp(2z) - 1) / 2, 2**32 / (that unscaled + 1)) for 0 <= z <= 53."""
    bias = EXPONENT_BIAS - SCALE_EXPONENT
    shifted = fma(magnitude, 2 * LOG2_E, MAGIC + bias)
    k = shifted - (MAGIC + bias)
    reduced = fma(k, -0.5 * LN_2, magnitude)
    power = fma(reduced, HALF_EXPM1_COEFFICIENTS[0], HALF_EXPM1_COEFFICIENTS[1])
    for coefficient in HALF_EXPM1_COEFFICIENTS[2:]:
        power = fma(power, reduced, coefficient)
    half_expm1 = fma(power * reduced, reduced, reduced)
    scale = (shifted.view(torch.int32) << 23).view(torch.float32)
    # 2**k * half_expm1 + (2**k - 1) / 2
    offset = fma(scale, 0.5, -0.5 * SCALE)
    scaled = fma(scale, half_expm1, offset)
    return scaled, reciprocal(scaled + SCALE)


def tanh(x: Tensor) -> Tensor:
    """tanh(x) in float32; rounded to bfloat16 it is correctly rounded for every bfloat16 input.

    `x` float32 (bfloat16 and float16 are widened), any shape. No cancellation near 0: |x| < 2**-12 gives x
    itself, subnormals and -0 included. Large |x| give 1 or 1 - 2**-24, with the sign of x.
    """
    x = as_float32("x", x)
    magnitude = torch.clamp(x.abs(), max=TANH_MAX)
    scaled, inverse = _tanh_parts(magnitude)
    value = torch.where(magnitude < TANH_IDENTITY, magnitude, scaled * inverse)
    return torch.copysign(value, x)


def tanh_terms(x: Tensor) -> TanhTerms:
    """tanh(x), with the bits of `tanh`, and its derivative 4 * exp(2x) / (exp(2x) + 1)**2."""
    x = as_float32("x", x)
    magnitude = torch.clamp(x.abs(), max=TANH_MAX)
    scaled, inverse = _tanh_parts(magnitude)
    value = torch.where(magnitude < TANH_IDENTITY, magnitude, scaled * inverse)
    exponential = fma(scaled, 2.0, SCALE)
    derivative = ((exponential * inverse) * inverse) * SCALE
    return TanhTerms(value=torch.copysign(value, x), derivative=derivative)


class NormalTail(NamedTuple):
    """What the normal distribution's functions of x share; float32, of the shape of x.

    magnitude: min(|x|, 14.75) = z. exponential: 2**32 * exp(-z**2 / 2). mills: 2**-32 * tail(z) * exp(z**2 /
    2), where tail(z) is the probability beyond z.
    """

    magnitude: Tensor
    exponential: Tensor
    mills: Tensor


# Here tail(z) and z times the density are below half of the smallest subnormal.
NORMAL_MAX = 14.75


def normal_tail(x: Tensor) -> NormalTail:
    """The parts from which `normal_cdf` and the derivative of x * normal_cdf(x) are made."""
    magnitude = torch.clamp(as_float32("x", x).abs(), max=NORMAL_MAX)
    square = magnitude * magnitude
    square_error = fma(magnitude, magnitude, -square)
    bias = EXPONENT_BIAS + SCALE_EXPONENT
    shifted = fma(square, -0.5 * LOG2_E, MAGIC + bias)
    k = shifted - (MAGIC + bias)
    # Twice the reduced argument: -z**2 - 2k * ln(2), with what rounding z**2 lost.
    reduced = fma(k, -2.0 * LN_2, -square)
    reduced = reduced - square_error
    # The polynomial of half the argument: coefficient i times 2**-i, which is exact.
    c5, c4, c3, c2, c1 = SHORT_EXP_COEFFICIENTS
    power = fma(reduced, c5 * 2.0**-5, c4 * 2.0**-4)
    power = fma(power, reduced, c3 * 2.0**-3)
    power = fma(power, reduced, c2 * 2.0**-2)
    power = fma(power, reduced, c1 * 2.0**-1)
    power = fma(power, reduced, 1.0)
    exponential = power * (shifted.view(torch.int32) << 23).view(torch.float32)
    t = reciprocal(fma(magnitude, MILLS_SLOPE, 1.0))
    mills = fma(t, MILLS_COEFFICIENTS[0] * SCALE, MILLS_COEFFICIENTS[1] * SCALE)
    for coefficient in MILLS_COEFFICIENTS[2:]:
        mills = fma(mills, t, coefficient * SCALE)
    return NormalTail(magnitude=magnitude, exponential=exponential, mills=mills)


def normal_cdf(x: Tensor) -> Tensor:
    """The standard normal distribution function, erfc(-x / sqrt(2)) / 2, in float32.

    `x` float32 (bfloat16 and float16 are widened), any shape. Relatively accurate down to the subnormal
    results of the negative tail; -Inf gives +0, Inf gives 1.
    """
    x = as_float32("x", x)
    _, exponential, mills = normal_tail(x)
    tail = exponential * mills
    return torch.where(x > 0, 1.0 - tail, tail)
