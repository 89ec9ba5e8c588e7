"""Narrow float formats as frozen values, with exact integer-bit codecs.

A code is the bit pattern of one narrow value, held in a `torch.uint8`. Encoding works on the integer bits of
the source, in one rounding, so its result depends neither on the device nor on the torch version; torch's own
casts to narrow types are never used.

Sources: OCP 8-bit floating point specification (OFP8) v1.0 for E4M3 and E5M2; OCP Microscaling Formats (MX)
v1.0 for E2M1 and E8M0; PTX ISA, `cvt`, for what `.satfinite`, `.rn`, `.rp` and `.rs` make of NaN, Inf and -0;
Noune et al., arXiv 2206.02915, for the FNUZ variant.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch

Rounding = Literal["nearest_even", "nearest_away", "toward_zero", "up", "down", "stochastic"]
Overflow = Literal["saturate", "nonfinite"]
Specials = Literal["ieee", "fn", "fnuz", "none"]

ROUNDINGS: tuple[str, ...] = get_args(Rounding)
OVERFLOWS: tuple[str, ...] = get_args(Overflow)

_CHUNK = 32768
_SOURCE_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_DIRECTED_INWARD = {"toward_zero": (True, True), "up": (False, True), "down": (True, False)}


@dataclass(frozen=True)
class FloatFormat:
    """A float format of at most eight bits.

    name: how the format is written, for example "E4M3".
    exponent_bits, mantissa_bits, bias: a normal code is (1 + m / 2**mantissa_bits) * 2**(e - bias).
    specials: "ieee": the highest exponent holds Inf (m = 0) and NaN; "fn": only the highest code is NaN, no
    Inf; "fnuz": only the code of -0 is NaN, no Inf and no -0; "none": every code is a finite number.
    signed: whether the highest bit is a sign.
    has_zero: whether exponent 0 holds zero and the subnormals; without it code 0 is 2**-bias (E8M0).
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: Specials
    signed: bool = True
    has_zero: bool = True

    def __str__(self) -> str:
        return self.name

    @property
    def bits(self) -> int:
        """Width of a code in bits."""
        return int(self.signed) + self.exponent_bits + self.mantissa_bits

    @property
    def n_codes(self) -> int:
        """Number of codes, NaN and Inf included."""
        return 1 << self.bits

    @property
    def sign_mask(self) -> int:
        """The sign bit of a code; 0 for an unsigned format."""
        return 1 << (self.bits - 1) if self.signed else 0

    @property
    def max_code(self) -> int:
        """Code of the largest finite value."""
        highest = (1 << (self.exponent_bits + self.mantissa_bits)) - 1
        if self.specials == "ieee":
            return highest - (1 << self.mantissa_bits)
        return highest - 1 if self.specials == "fn" else highest

    @property
    def inf_code(self) -> int | None:
        """Code of +Inf, or None."""
        return self.max_code + 1 if self.specials == "ieee" else None

    @property
    def nan_code(self) -> int | None:
        """The NaN code that encoding writes, or None; 0x7F for E4M3 and E5M2, sign lost (PTX `cvt`)."""
        if self.specials == "none":
            return None
        if self.specials == "fnuz":
            return self.sign_mask
        return (1 << (self.exponent_bits + self.mantissa_bits)) - 1

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value: -6 for E4M3."""
        return 1 - self.bias if self.has_zero else -self.bias

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite value: 8 for E4M3."""
        return (self.max_code >> self.mantissa_bits) - self.bias

    @property
    def max_value(self) -> float:
        """Largest finite value: 448 for E4M3."""
        return self.value(self.max_code)

    @property
    def min_normal(self) -> float:
        """Smallest positive normal value."""
        return math.ldexp(1.0, self.min_exponent)

    @property
    def min_subnormal(self) -> float:
        """Smallest positive value; equal to `min_normal` for a format without subnormals."""
        return math.ldexp(1.0, self.min_exponent - self.mantissa_bits) if self.has_zero else self.min_normal

    def value(self, code: int) -> float:
        """The value of one code as a Python float (exact). ValueError for a code the format does not have."""
        if not 0 <= code < self.n_codes:
            raise ValueError(f"code {code} is not a code of {self.name}: expected 0 to {self.n_codes - 1}")
        sign = -1.0 if code & self.sign_mask else 1.0
        magnitude = code & ~self.sign_mask
        if self.specials == "fnuz":
            if code == self.sign_mask:
                return math.nan
        elif magnitude > self.max_code:
            return sign * math.inf if magnitude == self.inf_code else math.nan
        exponent, mantissa = magnitude >> self.mantissa_bits, magnitude & ((1 << self.mantissa_bits) - 1)
        if self.has_zero and exponent == 0:
            return sign * math.ldexp(mantissa, self.min_exponent - self.mantissa_bits)
        return sign * math.ldexp((1 << self.mantissa_bits) + mantissa, exponent - self.bias - self.mantissa_bits)

    def encode(
        self,
        x: torch.Tensor,
        rounding: str = "nearest_even",
        overflow: str = "saturate",
        random_bits: torch.Tensor | None = None,
        random_width: int = 32,
    ) -> torch.Tensor:
        """Gives the codes of x, rounded once from its exact value.

        x: any shape; float32, bfloat16, float16 or float64. Result: uint8, the shape of x.

        rounding: "nearest_even" and "nearest_away" (ties), "toward_zero", "up" (towards +Inf), "down"
        (towards -Inf), "stochastic". Stochastic takes `random_bits`, an integer tensor of the shape of x
        whose low random_width (at most 32) bits are r: with f the fraction of a step between |x| and the next
        value below, the magnitude is rounded up where floor(f * 2**random_width) + r >= 2**random_width.
        overflow: "saturate" gives the largest finite value of x's sign for what rounds beyond it and for Inf
        (`.satfinite`); "nonfinite" gives Inf where the format has it, else NaN, while a directed rounding
        keeps a finite x at the largest finite value (IEEE 754).

        NaN gives `nan_code`; a format without NaN gives its largest positive value
        (`cvt.rn.satfinite.e2m1x2`). -0 keeps its sign, and so does what rounds to zero; FNUZ formats have no
        -0 and give 0. E8M0 has no zero: 0 and everything below 2**-127 give code 0. Its significands 1 and 2
        make the upper neighbour the even one of every tie, as in PyTorch and ml_dtypes.

        ValueError: unknown rounding or overflow, another dtype, missing or unexpected random bits,
        "nonfinite" for a format with neither Inf nor NaN, a negative value for an unsigned format.
        """
        if x.dtype not in _SOURCE_TYPES:
            raise ValueError(f"x has dtype {x.dtype}: {self.name} encodes float32, bfloat16, float16 and float64")
        if rounding not in ROUNDINGS:
            raise ValueError(f"rounding {rounding!r} is unknown: expected one of {', '.join(ROUNDINGS)}")
        if overflow not in OVERFLOWS:
            raise ValueError(f"overflow {overflow!r} is unknown: expected one of {', '.join(OVERFLOWS)}")
        if overflow == "nonfinite" and self.specials == "none":
            raise ValueError(f"{self.name} has neither Inf nor NaN: overflow must be 'saturate'")
        _check_random_bits(x, rounding, random_bits, random_width)
        if not self.signed and bool((x < 0).any()):
            raise ValueError(f"x holds {x[x < 0].flatten()[0].item()!r}: {self.name} has no negative values")

        if x.device.type != "cpu" or x.numel() <= _CHUNK:
            return self._encode(x, rounding, overflow, random_bits, random_width)
        # Temporaries that stay in the cache make this some ten times faster than whole-tensor operations.
        flat = x.reshape(-1)
        bits = random_bits.reshape(-1) if random_bits is not None else None
        codes = torch.empty(flat.shape, dtype=torch.uint8)
        for first in range(0, len(flat), _CHUNK):
            part = slice(first, first + _CHUNK)
            codes[part] = self._encode(
                flat[part], rounding, overflow, bits[part] if bits is not None else None, random_width
            )
        return codes.view(x.shape)

    def _encode(
        self,
        x: torch.Tensor,
        rounding: str,
        overflow: str,
        random_bits: torch.Tensor | None,
        random_width: int,
    ) -> torch.Tensor:
        # float64 holds every float32 subnormal as a normal number, which a format without subnormals needs,
        # and its int64 bits leave room for 32 random bits.
        wide = x.dtype == torch.float64 or rounding == "stochastic" or not self.has_zero
        source = x.to(torch.float64) if wide else x.to(torch.float32)
        raw = source.contiguous().view(torch.int64 if wide else torch.int32)
        source_mantissa, source_bias = (52, 1023) if wide else (23, 127)
        sign_bit = torch.iinfo(raw.dtype).min
        infinity = (2 * source_bias + 1) << source_mantissa

        negative = raw < 0
        magnitude = raw & ~sign_bit
        exponent = magnitude >> source_mantissa
        fraction = magnitude & ((1 << source_mantissa) - 1)
        # A subnormal source has the exponent of the smallest normal and no leading one.
        significand = torch.where(exponent > 0, fraction | (1 << source_mantissa), fraction)
        lowest = self.min_exponent + source_bias
        target = exponent.clamp(min=1).clamp(min=lowest)
        shift = (source_mantissa - self.mantissa_bits) + (target - exponent.clamp(min=1))
        # From two bits beyond the significand on, everything is below half a step: a longer shift changes
        # nothing.
        held = shift.clamp(max=source_mantissa + 2)
        kept = significand >> held
        rest = significand - (kept << held)
        increment = _increment(kept, rest, held, shift, negative, rounding, random_bits, random_width)
        rounded = kept + increment
        step = target - lowest
        if self.has_zero:
            code = rounded + (step << self.mantissa_bits)
        else:
            # Without subnormals the leading one is implied by every code, and what lies below the lowest code
            # is it.
            code = (rounded - (1 << self.mantissa_bits) + (step << self.mantissa_bits)).clamp(min=0)

        highest = self.max_code
        if overflow == "saturate":
            code = code.clamp(max=highest)
        else:
            beyond = self.nan_code if self.inf_code is None else self.inf_code
            assert beyond is not None
            inward_positive, inward_negative = _DIRECTED_INWARD.get(rounding, (False, False))
            inward = torch.where(negative, inward_negative, inward_positive) & (magnitude < infinity)
            code = torch.where(code > highest, torch.where(inward, highest, beyond), code)
        if self.signed:
            carries_sign = negative if self.specials != "fnuz" else negative & (code != 0)
            code = torch.where(carries_sign & (code != self.nan_code), code | self.sign_mask, code)
        not_a_number = highest if self.nan_code is None else self.nan_code
        code = torch.where(magnitude > infinity, not_a_number, code)
        return code.to(torch.uint8)

    def decode(self, codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Gives the values of codes, exactly.

        codes: uint8, any shape. Result: dtype (float32, float64, or another that holds every value of the
        format), the shape of codes. NaN codes give NaN, -0 stays -0; code 0 of E8M0 is 2**-127 and code 255
        NaN. ValueError: codes of another dtype, a code the format does not have, a dtype that would round.
        """
        if codes.dtype != torch.uint8:
            raise ValueError(f"codes have dtype {codes.dtype}: {self.name} decodes uint8 codes")
        if self.n_codes < 256 and codes.numel() and int(codes.max()) >= self.n_codes:
            raise ValueError(
                f"codes hold {int(codes.max())}: {self.name} has codes 0 to {self.n_codes - 1}; "
                "unpack packed codes first"
            )
        return _value_table(self, dtype, str(codes.device))[codes.to(torch.int64)]

    def round(
        self,
        x: torch.Tensor,
        rounding: str = "nearest_even",
        overflow: str = "saturate",
        random_bits: torch.Tensor | None = None,
        random_width: int = 32,
    ) -> torch.Tensor:
        """Gives the value that x rounds to: float64 for a float64 x, else float32. See `encode`."""
        codes = self.encode(x, rounding, overflow, random_bits, random_width)
        return self.decode(codes, torch.float64 if x.dtype == torch.float64 else torch.float32)


def _check_random_bits(x: torch.Tensor, rounding: str, random_bits: torch.Tensor | None, random_width: int) -> None:
    if rounding != "stochastic":
        if random_bits is not None:
            raise ValueError(f"random_bits were given for rounding {rounding!r}: only 'stochastic' takes them")
        return
    if random_bits is None:
        raise ValueError("rounding 'stochastic' needs random_bits: an integer tensor of the shape of x")
    if random_bits.shape != x.shape or random_bits.is_floating_point():
        raise ValueError(
            f"random_bits have shape {tuple(random_bits.shape)} and dtype {random_bits.dtype}: "
            f"expected integers of shape {tuple(x.shape)}"
        )
    if not 1 <= random_width <= 32:
        raise ValueError(f"random_width is {random_width}: expected 1 to 32")


def _increment(
    kept: torch.Tensor,
    rest: torch.Tensor,
    held: torch.Tensor,
    shift: torch.Tensor,
    negative: torch.Tensor,
    rounding: str,
    random_bits: torch.Tensor | None,
    random_width: int,
) -> torch.Tensor:
    """Whether the magnitude `kept` is rounded up, given the `rest` of `shift` bits that was cut off."""
    if rounding == "nearest_even":
        half = torch.ones_like(held) << (held - 1)
        return (rest + (kept & 1) > half).to(kept.dtype)
    if rounding == "nearest_away":
        half = torch.ones_like(held) << (held - 1)
        return (rest >= half).to(kept.dtype)
    if rounding == "up":
        return ((rest > 0) & ~negative).to(kept.dtype)
    if rounding == "down":
        return ((rest > 0) & negative).to(kept.dtype)
    if rounding == "stochastic" and random_bits is not None:
        # At least 49 bits of a float64 are cut off, so that 32 random bits never exceed them.
        threshold = rest >> (shift - random_width).clamp(max=62)
        return (threshold + (random_bits.to(kept.dtype) & ((1 << random_width) - 1))) >> random_width
    return torch.zeros_like(kept)


@functools.lru_cache(maxsize=64)
def _value_table(element: FloatFormat, dtype: torch.dtype, device: str) -> torch.Tensor:
    exact = torch.tensor([element.value(code) for code in range(element.n_codes)], dtype=torch.float64)
    table = exact.to(dtype)
    if not torch.equal(table.to(torch.float64).nan_to_num(nan=0.5), exact.nan_to_num(nan=0.5)):
        raise ValueError(f"{dtype} does not hold every value of {element.name}: decode to float32 or float64")
    return table.to(device)


E4M3 = FloatFormat("E4M3", exponent_bits=4, mantissa_bits=3, bias=7, specials="fn")
E5M2 = FloatFormat("E5M2", exponent_bits=5, mantissa_bits=2, bias=15, specials="ieee")
E2M1 = FloatFormat("E2M1", exponent_bits=2, mantissa_bits=1, bias=1, specials="none")
E8M0 = FloatFormat("E8M0", exponent_bits=8, mantissa_bits=0, bias=127, specials="fn", signed=False, has_zero=False)
UE4M3 = FloatFormat("UE4M3", exponent_bits=4, mantissa_bits=3, bias=7, specials="fn", signed=False)
UE5M3 = FloatFormat("UE5M3", exponent_bits=5, mantissa_bits=3, bias=15, specials="fn", signed=False)
E4M3FNUZ = FloatFormat("E4M3FNUZ", exponent_bits=4, mantissa_bits=3, bias=8, specials="fnuz")
E5M2FNUZ = FloatFormat("E5M2FNUZ", exponent_bits=5, mantissa_bits=2, bias=16, specials="fnuz")

FORMATS: dict[str, FloatFormat] = {
    element.name: element for element in (E4M3, E5M2, E2M1, E8M0, UE4M3, UE5M3, E4M3FNUZ, E5M2FNUZ)
}


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Gives E2M1 codes two a byte: the even element in the low nibble, the odd one in the high nibble.

    codes: uint8 [..., n], n even, each below 16. Result: uint8 [..., n / 2]. ValueError: an odd n, a code
    above 15. Source: PTX ISA, `cvt` to `.e2m1x2`; torch's float4_e2m1fn_x2.
    """
    if codes.dtype != torch.uint8 or codes.dim() == 0 or codes.shape[-1] % 2:
        raise ValueError(
            f"codes have dtype {codes.dtype} and shape {tuple(codes.shape)}: "
            "expected uint8 with an even last dimension, because two codes share a byte"
        )
    if codes.numel() and int(codes.max()) > 15:
        raise ValueError(f"codes hold {int(codes.max())}: E2M1 has codes 0 to 15")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Gives the codes of packed E2M1 bytes: uint8 [..., n] from uint8 [..., n / 2]; undoes `pack_e2m1`."""
    if packed.dtype != torch.uint8 or packed.dim() == 0:
        raise ValueError(f"packed codes have dtype {packed.dtype}: expected uint8 with at least one dimension")
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
