"""MXFP8 quantisation in registers: the E8M0 scale of a block and the codes of its elements.

Mirrors `moe_numerics.reference.mxfp8`. The scale is integer arithmetic on both architectures (sm_90 has no
conversion to UE8M0), the elements are `cvt.rn.satfinite`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float8E5M2, Float16, Float32, Int32, Uint16, Uint32
from cutlass._mlir import ir
from cutlass._mlir.dialects import nvvm
from cutlass.cutlass_dsl import T
from moe_numerics.fused.memory import pure_ptx, select
from moe_numerics.reference.contract import Contract
from moe_numerics.reference.formats import E4M3, E5M2, FloatFormat
from moe_numerics.reference.mxfp8 import BLOCK, scale_constants, scale_target

__all__ = ["BLOCK", "Mxfp8", "decode_codes", "decode_scale"]

_CONVERSIONS = {"E4M3": Float8E4M3FN, "E5M2": Float8E5M2}
_INFINITY = 0x7F800000
_NAN = 0x7FFFFFFF


@dataclass(frozen=True)
class Mxfp8:
    """The choices of a contract that change a bit of MXFP8 output, as a compile-time parameter of a kernel."""

    element: str
    round_up: int
    exponent: int
    reciprocal: float | None
    """1 / (value to which an amax is scaled) where the scale comes from a float32 product, else None."""
    saturate_inf: bool
    multiplier: str
    propagate_nan: bool
    staged: bool
    """Values are rounded to bfloat16 before amax and quantisation."""

    @classmethod
    def of(cls, element: FloatFormat, contract: Contract) -> Mxfp8:
        """The quantiser of a contract. ValueError: not an MXFP8 element, or a choice that the kernels do not have."""
        if element not in (E4M3, E5M2):
            raise ValueError(f"element is {element.name}: MXFP8 takes E4M3 or E5M2")
        if contract.signed_zero != "keep":
            raise ValueError(f"signed_zero is {contract.signed_zero!r}: the MXFP8 kernels keep the sign of zeros")
        round_up, exponent = scale_constants(element, contract)
        product = contract.scale_rule == "rceil" and contract.mx_scale == "float32_product"
        return cls(
            element.name,
            round_up,
            exponent,
            1.0 / scale_target(element, contract) if product else None,
            contract.mx_inf == "saturate",
            contract.mx_multiplier,
            contract.nan_policy == "propagate",
            contract.staging == "bfloat16",
        )

    def prepare(self, value: Float32) -> Float32:
        """The value that is quantised: itself, or rounded to bfloat16."""
        return value.to(BFloat16).to(Float32) if self.staged else value

    def magnitude_max(self, a: Float32, b: Float32) -> Float32:
        """max(a, |b|) for a that is not negative, with the contract's treatment of NaN."""
        return cute.arch.fmax(a, cute.math.absf(b), nan=self.propagate_nan)

    def scale_code(self, amax: Float32) -> Uint32:
        """E8M0 code of a block; `amax` is not negative."""
        bits = amax.bitcast(Uint32)
        if self.reciprocal is None:
            code = self._shifted(bits, self.round_up, self.exponent)
        else:
            # Round-up of the product itself to a power of two: every mantissa bit counts, and a value of at most
            # 2^-127 has code 0.
            product = (amax * Float32(self.reciprocal)).bitcast(Uint32)
            code = (product + Uint32(0x7FFFFF)) >> 23
            code = select(product <= Uint32(0x400000), Uint32(0), code)
        if self.saturate_inf:
            code = select(bits == Uint32(_INFINITY), Uint32(254), code)
        return select(bits > Uint32(_INFINITY), Uint32(255), code)

    @staticmethod
    def _shifted(bits: Uint32, round_up: int, exponent: int) -> Uint32:
        code = ((bits + Uint32(round_up)) >> 23).to(Int32) - Int32(exponent)
        return cutlass.max(code, Int32(0)).to(Uint32)

    def factor(self, code: Uint32) -> Float32:
        """What elements of a block with this scale code are multiplied by."""
        bits = (Uint32(254) - code) << 23
        at_0, at_254, at_255 = {
            "exact": (None, 0x00400000, _NAN),
            "flushed": (0x7F7FFFFF, 0, _NAN),
            "normal": (253 << 23, 0x00400000, 0),
        }[self.multiplier]
        for special, value in ((0, at_0), (254, at_254), (255, at_255)):
            if value is not None:
                bits = select(code == Uint32(special), Uint32(value), bits)
        return bits.bitcast(Float32)

    def encode(self, values: Sequence[Float32], factors: Sequence[Float32]) -> list[Uint32]:
        """Codes of value * factor, four to a 32-bit word, first value in the lowest byte."""
        scaled = [value * factor for value, factor in zip(values, factors, strict=True)]
        pairs = [self._encode_pair(low, high) for low, high in zip(scaled[::2], scaled[1::2], strict=True)]
        return [
            pure_ptx("mov.b32 $0, {$1, $2};", "=r,h,h", low, high)
            for low, high in zip(pairs[::2], pairs[1::2], strict=True)
        ]

    def _encode_pair(self, low: Float32, high: Float32) -> Uint16:
        codes = nvvm.convert_f32x2_to_f8x2(
            T.i16(),
            high.ir_value(),
            low.ir_value(),
            ir.TypeAttr.get(_CONVERSIONS[self.element].mlir_type),
            rnd=nvvm.FPRoundingMode.RN,
            sat=nvvm.SaturationMode.SATFINITE,
        )
        return Uint16(codes)


def decode_codes(element: str, words: Sequence[Uint32]) -> list[Float32]:
    """Values of E4M3 or E5M2 codes, four to a word, first value in the lowest byte; exact, NaN for a NaN code."""
    values = []
    for word in words:
        for shift in (0, 16):
            halves = pure_ptx(
                f"cvt.rn.f16x2.{element.lower()}x2 $0, $1;", "=r,h", ((word >> shift) & Uint32(0xFFFF)).to(Uint16)
            )
            values.append((halves & Uint32(0xFFFF)).to(Uint16).bitcast(Float16).to(Float32))
            values.append((halves >> 16).to(Uint16).bitcast(Float16).to(Float32))
    return values


def decode_scale(code: Uint32) -> Float32:
    """Value of an E8M0 code: 2**(code - 127), NaN for 0xFF."""
    bits = select(code == Uint32(0), Uint32(0x00400000), code << 23)
    return select(code == Uint32(0xFF), Uint32(_NAN), bits).bitcast(Float32)
