"""NVFP4 quantisation in registers: the global scale, the E4M3 scale of a block, and E2M1 codes.

Mirrors `moe_numerics.reference.nvfp4`. Divisions are true divisions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Boolean, Float8E4M3FN, Float32, Int32, Uint16, Uint32
from cutlass._mlir import ir
from cutlass._mlir.dialects import nvvm
from cutlass.cutlass_dsl import T
from moe_numerics.fused import e2m1
from moe_numerics.fused.exact_math import absolute, maximum
from moe_numerics.fused.memory import pure_ptx, select, unpack_bf16
from moe_numerics.fused.philox import philox, unpack_bits
from moe_numerics.reference.contract import Contract
from moe_numerics.reference.formats import E2M1, E4M3
from moe_numerics.reference.grouped_nvfp4 import Recipe
from moe_numerics.reference.nvfp4 import BLOCK, FLT_MAX

__all__ = ["BLOCK", "SCALE_CODES", "GlobalScale", "Nvfp4", "random_block"]

SCALE_CODES = 128
"""E4M3 codes without sign."""


@dataclass(frozen=True)
class GlobalScale:
    """Amax of a tensor, an expert or a row, and its encode and decode factor."""

    amax: Float32
    encode: Float32
    decode: Float32


@dataclass(frozen=True)
class Candidate:
    """A block under one of two scales: the scale's code, its E2M1 codes, and its error, summed in order."""

    code: Uint32
    words: list[Uint32]
    error: Float32


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

    def largest_packed(self, words: Sequence[Uint32]) -> Float32:
        """Largest magnitude of bfloat16 values, two to a word."""
        instruction = f"max{'.NaN' if self.propagate_nan else ''}.xorsign.abs.bf16x2 $0, $1, $2;"
        largest = words[0]
        for word in words[1:]:
            largest = pure_ptx(instruction, "=r,r,r", largest, word)
        return self.largest(unpack_bf16([largest]))

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
        self,
        values: Sequence[Float32],
        multiplier: Float32,
        random_bits: Sequence[Uint32] | None = None,
        factor: float = 1.0,
    ) -> list[Uint32]:
        """E2M1 codes of (value * factor) * multiplier, eight to a 32-bit word, first value in the lowest nibble.

        The factor, a power of two up to 1, may come last: where the product without it overflows the code is 7 both
        ways, and where the product with it underflows 0.
        """
        words = []
        if random_bits is None:
            scaled = [value * multiplier for value in values]
            for start in range(0, len(scaled), e2m1.WORD):
                words.append(e2m1.encode_word(scaled[start : start + e2m1.WORD], factor))
            return words
        assert self.stochastic_bits is not None
        scaled = [(value * Float32(factor)) * multiplier for value in values]
        for start in range(0, len(scaled), e2m1.WORD):
            word = Uint32(0)
            for place in range(e2m1.WORD):
                bits = random_bits[start + place]
                word = word | (e2m1.encode_stochastic(scaled[start + place], bits, self.stochastic_bits) << (4 * place))
            words.append(word)
        return words

    def quantize(
        self,
        values: Sequence[Float32],
        amax: Float32,
        scale: GlobalScale,
        multiplier: Callable[[Uint32], Float32],
        random_bits: Sequence[Uint32] | None = None,
        factor: float = 1.0,
    ) -> tuple[Uint32, list[Uint32]]:
        """Scale code and E2M1 codes of a block, `values` times the power of two `factor`, of largest magnitude `amax`.

        multiplier: the multiplier of a scale code under this global scale; random_bits: of the block's elements.
        """
        if self.four_over_six is not None:
            six, four = self.candidates(values, amax, scale, multiplier)
            return self.chosen(six, four, six.error, four.error)
        code = self.scale_code(amax, scale)
        return code, self.encode(values, multiplier(code), random_bits, factor)

    def candidates(
        self,
        values: Sequence[Float32],
        amax: Float32,
        scale: GlobalScale,
        multiplier: Callable[[Uint32], Float32],
    ) -> tuple[Candidate, Candidate]:
        """A block under the scale that puts its amax on 6, and under the one, 1.5 times as large, that puts it on 4."""
        base = (amax / Float32(6.0)) * scale.encode
        return (
            self._tried(values, base, scale, multiplier),
            self._tried(values, base * Float32(1.5), scale, multiplier),
        )

    def chosen(
        self, six: Candidate, four: Candidate, error_six: Float32, error_four: Float32
    ) -> tuple[Uint32, list[Uint32]]:
        """Scale code and E2M1 codes of the candidate with the smaller error, of `six` where they are equal.

        The errors: the candidates' own, or those of the 16x16 tile.
        """
        better: Boolean = error_four < error_six
        words = [select(better, own, other) for own, other in zip(four.words, six.words, strict=True)]
        return select(better, four.code, six.code), words

    def _tried(
        self,
        values: Sequence[Float32],
        block_scale: Float32,
        scale: GlobalScale,
        multiplier: Callable[[Uint32], Float32],
    ) -> Candidate:
        code = encode_e4m3(block_scale)
        words = self.encode(values, multiplier(code))
        block = decode_e4m3(code)
        largest = Float32(E2M1.max_value * self.scale_max)
        error = None
        for place, value in enumerate(values):
            decoded = e2m1.decode(words[place // 8] >> (4 * (place % 8)))
            away = ((decoded * block) * scale.amax) / largest - value
            each = absolute(away) if self.four_over_six == "mae" else away * away
            error = each if error is None else error + each
        assert error is not None
        return Candidate(code, words, error)


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


def decode_e4m3(code: Uint32) -> Float32:
    """Value of an E4M3 code without sign; 0x7F is NaN."""
    normal = ((code << 20) + Uint32((127 - E4M3.bias) << 23)).bitcast(Float32)
    subnormal = code.to(Float32) * Float32(E4M3.min_subnormal)
    value = select(code < Uint32(8), subnormal, normal)
    return select(code == Uint32(0x7F), Uint32(0x7FFFFFFF), value.bitcast(Uint32)).bitcast(Float32)


def random_block(
    stream: int, seed: cute.Tensor, expert: Int32, along: Int32, across: Int32, width: int
) -> list[Uint32]:
    """Random bits of 16 neighbours from position `along` on, a multiple of 16, at position `across`."""
    calls = BLOCK * width // 128
    key = Uint32(seed[0]), Uint32(seed[1])
    numbers: list[Uint32] = []
    for call in range(calls):
        counter = (
            (along // (128 // width) + call).to(Uint32),
            across.to(Uint32),
            expert.to(Uint32) + Uint32(stream << 16),
            Uint32(0),
        )
        numbers += unpack_bits(philox(counter, key), width)
    return numbers
