"""NVFP4 quantisation in registers: the global scale, the E4M3 scale of a block, and E2M1 codes.

Mirrors `moe_numerics.reference.nvfp4`. Divisions are true divisions. Codes are integer arithmetic, since sm_90 has no
conversion to E2M1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Boolean, Float8E4M3FN, Float32, Uint16, Uint32
from cutlass._mlir import ir
from cutlass._mlir.dialects import nvvm
from cutlass.cutlass_dsl import T
from moe_numerics.fused.exact_math import absolute, maximum
from moe_numerics.fused.memory import pure_ptx, select
from moe_numerics.reference.contract import Contract
from moe_numerics.reference.formats import E2M1, E4M3
from moe_numerics.reference.grouped_nvfp4 import Recipe
from moe_numerics.reference.nvfp4 import BLOCK, FLT_MAX

__all__ = ["BLOCK", "GlobalScale", "Nvfp4"]

# 1.5 * 2^22: floats near it have a spacing of 1/2, the smallest step of E2M1.
_HALVES = 6291456.0
_HALVES_BITS = 0x4AC00000


@dataclass(frozen=True)
class GlobalScale:
    """Amax of a tensor, an expert or a row, and its encode and decode factor."""

    amax: Float32
    encode: Float32
    decode: Float32


@dataclass(frozen=True)
class Nvfp4:
    """The choices of a contract and a recipe that change a bit of NVFP4 output, as a compile-time parameter."""

    encode_scale: str
    block_scale: str
    multiplier_order: str
    scale_floor: str
    per_expert: bool
    propagate_nan: bool
    stochastic_bits: int | None
    four_over_six: str | None
    scale_max: float
    row_scaled: bool

    @classmethod
    def of(cls, contract: Contract, recipe: Recipe) -> Nvfp4:
        """The quantiser of a contract and a recipe. ValueError: a choice that the kernels do not have."""
        if contract.signed_zero != "keep":
            raise ValueError(f"signed_zero is {contract.signed_zero!r}: the NVFP4 kernels keep the sign of zeros")
        if recipe.four_over_six is not None and recipe.block2d:
            raise ValueError(
                "four_over_six with block2d: the NVFP4 kernels compare errors of blocks of 16, not of tiles"
            )
        return cls(
            contract.nvfp4_encode_scale,
            contract.nvfp4_block_scale,
            contract.nvfp4_multiplier,
            contract.nvfp4_scale_floor,
            contract.amax_scope == "expert",
            contract.nan_policy == "propagate",
            contract.stochastic_bits if recipe.stochastic else None,
            recipe.four_over_six,
            recipe.scale_max,
            recipe.row_scaled,
        )

    def magnitude_max(self, a: Float32, b: Float32) -> Float32:
        """max(a, |b|) for a that is not negative, with the contract's treatment of NaN."""
        return cute.arch.fmax(a, absolute(b), nan=self.propagate_nan)

    def largest(self, values: Sequence[Float32]) -> Float32:
        """Largest magnitude of the values."""
        largest = Float32(0.0)
        for value in values:
            largest = self.magnitude_max(largest, value)
        return largest

    def _at_most(self, value: Float32) -> Float32:
        return cute.arch.fmin(value, Float32(FLT_MAX), nan=self.propagate_nan)

    def global_scale(self, amax: Float32) -> GlobalScale:
        """Factors from the amax of the tensor, of the expert or of the row."""
        largest = Float32(E2M1.max_value * self.scale_max)
        if self.encode_scale == "reciprocal_of_divided_amax":
            decode = amax / largest
            return GlobalScale(amax, Float32(1.0) / decode, decode)
        encode = self._at_most(largest / amax)
        one = Float32(1.0)
        encode = select(amax == Float32(0.0), one, select(encode == Float32(0.0), one, encode))
        return GlobalScale(amax, encode, one / encode)

    def scale_code(self, amax: Float32, scale: GlobalScale) -> Uint32:
        """E4M3 code of a block whose largest magnitude is `amax`."""
        sixth = Float32(1.0 / 6.0)
        if self.block_scale == "amax_times_scaled_sixth":
            value = amax * (scale.encode * sixth)
        elif self.block_scale == "sixth_times_scale":
            value = (amax * sixth) * scale.encode
        elif self.block_scale == "divided_amax_times_scale":
            value = (amax / Float32(6.0)) * scale.encode
        else:
            value = (amax / Float32(6.0)) / scale.decode
        if self.scale_floor == "smallest_normal":
            value = maximum(value, E4M3.min_normal)
        return encode_e4m3(value)

    def multiplier(self, code: Uint32, scale: GlobalScale) -> Float32:
        """What elements of a block with this scale code are multiplied by."""
        block = decode_e4m3(code)
        if self.multiplier_order == "reciprocal_of_product":
            value = Float32(1.0) / (block * scale.decode)
        else:
            value = scale.encode / block
        return value if self.encode_scale == "reciprocal_of_divided_amax" else self._at_most(value)

    def encode(
        self, values: Sequence[Float32], multiplier: Float32, random_bits: Sequence[Uint32] | None = None
    ) -> list[Uint32]:
        """E2M1 codes of value * multiplier, eight to a 32-bit word, first value in the lowest nibble."""
        words = []
        for start in range(0, len(values), 8):
            word = Uint32(0)
            for place in range(8):
                scaled = values[start + place] * multiplier
                if random_bits is None:
                    code = encode_e2m1(scaled)
                else:
                    assert self.stochastic_bits is not None
                    code = encode_e2m1_stochastic(scaled, random_bits[start + place], self.stochastic_bits)
                word = word | (code << (4 * place))
            words.append(word)
        return words

    def four_or_six(self, values: Sequence[Float32], amax: Float32, scale: GlobalScale) -> tuple[Uint32, list[Uint32]]:
        """Scale code and E2M1 codes of a block under the one of two scales that gives the smaller error.

        The first puts the block's amax on 6, the second, 1.5 times as large, on 4; the first where errors are equal.
        """
        base = (amax / Float32(6.0)) * scale.encode
        six, words_six, error_six = self._tried(values, base, scale)
        four, words_four, error_four = self._tried(values, base * Float32(1.5), scale)
        better: Boolean = error_four < error_six
        words = [select(better, own, other) for own, other in zip(words_four, words_six, strict=True)]
        return select(better, four, six), words

    def _tried(
        self, values: Sequence[Float32], block_scale: Float32, scale: GlobalScale
    ) -> tuple[Uint32, list[Uint32], Float32]:
        """Scale code, E2M1 codes and error of a block under a block scale."""
        code = encode_e4m3(block_scale)
        words = self.encode(values, self.multiplier(code, scale))
        block = decode_e4m3(code)
        largest = Float32(E2M1.max_value * self.scale_max)
        error = None
        for place, value in enumerate(values):
            decoded = decode_e2m1(words[place // 8] >> (4 * (place % 8)))
            away = ((decoded * block) * scale.amax) / largest - value
            each = absolute(away) if self.four_over_six == "mae" else away * away
            error = each if error is None else error + each
        assert error is not None
        return code, words, error


def encode_e4m3(value: Float32) -> Uint32:
    """E4M3 code to nearest even, saturating; NaN gives 0x7F."""
    codes = nvvm.convert_f32x2_to_f8x2(
        T.i16(),
        Float32(0.0).ir_value(),
        value.ir_value(),
        ir.TypeAttr.get(Float8E4M3FN.mlir_type),
        rnd=nvvm.FPRoundingMode.RN,
        sat=nvvm.SaturationMode.SATFINITE,
    )
    return Uint16(codes).to(Uint32)


def decode_e2m1(code: Uint32) -> Float32:
    """Value of an E2M1 code in the low four bits of a word, whose other bits may hold anything."""
    # As the upper bits of a float32 the magnitude is the value times 2^-126, subnormal for code 1.
    magnitude = ((code & Uint32(7)) << 22).bitcast(Float32) * Float32(2.0**126)
    return (magnitude.bitcast(Uint32) | ((code & Uint32(8)) << 28)).bitcast(Float32)


def decode_e4m3(code: Uint32) -> Float32:
    """Value of an E4M3 code without sign; 0x7F is NaN."""
    normal = ((code << 20) + Uint32((127 - E4M3.bias) << 23)).bitcast(Float32)
    subnormal = code.to(Float32) * Float32(E4M3.min_subnormal)
    value = select(code < Uint32(8), subnormal, normal)
    return select(code == Uint32(0x7F), Uint32(0x7FFFFFFF), value.bitcast(Uint32)).bitcast(Float32)


def _sign(bits: Uint32) -> Uint32:
    return (bits >> 28) & Uint32(8)


def _magnitude(value: Float32) -> Float32:
    """min(|value|, 6), 6 for NaN."""
    return cute.arch.fmin(absolute(value), Float32(E2M1.max_value))


def encode_e2m1(value: Float32) -> Uint32:
    """E2M1 code to nearest even, saturating; NaN gives 7, as its sign is that of a computed NaN, +."""
    magnitude = _magnitude(value)
    # Below 1 every step is 1/2; from 1 on the code is the exponent and one bit of the mantissa.
    low = (magnitude + Float32(_HALVES)).bitcast(Uint32) - Uint32(_HALVES_BITS)
    bits = magnitude.bitcast(Uint32)
    high = ((bits + Uint32(0x1FFFFF) + ((bits >> 22) & Uint32(1))) >> 22) - Uint32(2 * 127 - 2)
    below: Boolean = magnitude < Float32(1.0)
    return select(below, low, high) | _sign(value.bitcast(Uint32))


def encode_e2m1_stochastic(value: Float32, random_bits: Uint32, width: int) -> Uint32:
    """E2M1 code rounded up where floor(fraction of a step * 2^width) + random bits reach 2^width; saturating."""
    magnitude = _magnitude(value)
    two: Boolean = magnitude >= Float32(2.0)
    four: Boolean = magnitude >= Float32(4.0)
    steps = magnitude * select(four, Float32(0.5), select(two, Float32(1.0), Float32(2.0)))
    whole = pure_ptx("cvt.rzi.u32.f32 $0, $1;", "=r,f", steps)
    fraction = steps - whole.to(Float32)
    threshold = pure_ptx("cvt.rzi.u32.f32 $0, $1;", "=r,f", fraction * Float32(2.0**width))
    total = threshold + random_bits
    carry = select(total < threshold, Uint32(1), Uint32(0)) if width == 32 else (total >> width)
    offset = select(four, Uint32(4), select(two, Uint32(2), Uint32(0)))
    return (whole + carry + offset) | _sign(value.bitcast(Uint32))
