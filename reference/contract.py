"""The numerics choices of a path as one frozen value.

Two implementations can only be compared bit by bit once every choice that changes a bit is named. Each field
of `Contract` is one such choice and the defaults are the `suite` profile. Named profiles of other
implementations, with their sources, are in `moe_numerics.contract`.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

# -1 at bits 3, 5 to 10, 12, 14 and 15, as a bit mask 0xD7E8: the fixed sign vector of Transformer Engine
# (transformer_engine/pytorch/tensor/nvfp4_tensor.py@2.20) and of arXiv 2509.25149, appendix.
DEFAULT_SIGNS: tuple[int, ...] = tuple(-1 if 0xD7E8 >> bit & 1 else 1 for bit in range(16))

CHOICES: dict[str, tuple[Any, ...]] = {
    "maths": ("exact", "fast"),
    "compute": ("float32",),
    "staging": ("none", "bfloat16"),
    "scale_rule": ("rceil", "floor", "ceil", "even"),
    "mx_scale": ("exact", "float32_product"),
    "mx_inf": ("saturate", "rule"),
    "mx_multiplier": ("exact", "flushed", "normal"),
    "e5m2_target": (57344.0, 128.0),
    "nvfp4_encode_scale": ("divide_2688", "reciprocal_of_divided_amax"),
    "nvfp4_block_scale": (
        "amax_times_scaled_sixth",
        "sixth_times_scale",
        "divided_amax_times_scale",
        "divided_amax_over_decode_scale",
    ),
    "nvfp4_multiplier": (
        "reciprocal_of_product",
        "encode_scale_over_block_scale",
    ),
    "nvfp4_scale_floor": ("zero", "smallest_normal"),
    "amax_scope": ("tensor", "expert"),
    "nan_policy": ("propagate", "ignore"),
    "signed_zero": ("keep", "drop"),
    "rht_rounding": ("none", "bfloat16"),
    "rht_normalise": ("orthonormal", "none"),
    "stochastic_source": ("philox", "given"),
    "stochastic_bits": (8, 16, 32),
    "padding": ("masked", "zeroed_by_caller"),
}


@dataclass(frozen=True)
class Contract:
    """Every numerics choice of a path; the defaults are the profile `suite`.

    maths: "exact": explicitly rounded operations only; "fast": hardware approximations, bounded, not exact.
    compute: type in which activations and scales are computed.
    accumulator: model of the tensor core that accumulates a GEMM, `architecture.kind`. One of bfloat16 reads quantised
        operands as codes times block scales; a product that bfloat16 does not hold, near the ends of the E8M0 range,
        is an error in the reference and NaN in a kernel.
    staging: type to which values are rounded before amax and quantisation; "none" quantises the float32
        value.
    scale_rule: E8M0 scale of a block: "rceil": the smallest power of two with amax / scale <= largest element
        value; "floor": 2**floor(log2 amax) over the largest power of two of the element format (OCP MX v1.0,
        6.3); "ceil": the same with ceil; "even": the same as floor with amax first rounded to the element's
        mantissa width, ties away from zero.
    mx_scale: arithmetic of "rceil": "exact" on the integer bits; "float32_product" rounds
        amax * (1 / largest) to float32 first. They differ for one float32 amax and for no bfloat16 amax (see
        `mxfp8`).
    mx_inf: scale of a block with Inf: "saturate": 0xFE; "rule": what scale_rule makes of exponent 255 (floor,
        ceil and even only).
    mx_multiplier: what an element is multiplied by under scale code s: "exact": 2**(127 - s), NaN under 0xFF;
        "flushed": a reciprocal that flushes subnormals: s = 0 gives the largest float32, s = 254 gives 0;
        "normal": a divisor held between 2**-126 and Inf: s = 0 gives 2**126, 0xFF gives 0.
    e5m2_target: the value to which a block's amax is scaled for E5M2.
    nvfp4_encode_scale: global scale g from the amax A: "divide_2688": 2688 / A; "reciprocal_of_divided_amax":
        1 / (A / 2688).
    nvfp4_block_scale: block scale, from the block's amax b, before rounding to E4M3:
        "amax_times_scaled_sixth": b * (g * (1/6)); "sixth_times_scale": (b * (1/6)) * g;
        "divided_amax_times_scale": (b / 6) * g; "divided_amax_over_decode_scale": (b / 6) / (A / 2688).
    nvfp4_multiplier: what an element is multiplied by, from the rounded block scale s:
        "reciprocal_of_product": 1 / (s * (1 / g)); "encode_scale_over_block_scale": g / s.
    nvfp4_scale_floor: smallest block scale: "zero"; "smallest_normal": 2**-6, so a zero block gets it too.
    amax_scope: whether the global scale of NVFP4 is one for the tensor or one for each expert.
    nan_policy: what a NaN does to an amax: "propagate" or "ignore".
    signed_zero: whether -0 keeps its sign in codes.
    rht_signs: 16 signs of the randomised Hadamard transform, or None for none.
    rht_rounding: type to which rotated values are rounded.
    rht_normalise: "orthonormal" multiplies by 1/4; "none" leaves the sums of +-1 terms.
    stochastic_source: "philox": bits from Philox keyed by seed and counted by logical element; "given" by the
        caller.
    stochastic_bits: random bits an element.
    padding: "masked": padding rows are never read; "zeroed_by_caller": the rows between an expert's count and
        the next offset must hold zeros and take part as zeros.
    scale_padding: byte in scale entries that belong to no block.

    ValueError: an unknown value, named with the field and what it may be.
    """

    maths: str = "exact"
    compute: str = "float32"
    accumulator: str = "sm_90.bf16"
    staging: str = "none"
    scale_rule: str = "rceil"
    mx_scale: str = "exact"
    mx_inf: str = "saturate"
    mx_multiplier: str = "exact"
    e5m2_target: float = 57344.0
    nvfp4_encode_scale: str = "divide_2688"
    nvfp4_block_scale: str = "amax_times_scaled_sixth"
    nvfp4_multiplier: str = "reciprocal_of_product"
    nvfp4_scale_floor: str = "zero"
    amax_scope: str = "tensor"
    nan_policy: str = "propagate"
    signed_zero: str = "keep"
    rht_signs: tuple[int, ...] | None = DEFAULT_SIGNS
    rht_rounding: str = "none"
    rht_normalise: str = "orthonormal"
    stochastic_source: str = "philox"
    stochastic_bits: int = 32
    padding: str = "masked"
    scale_padding: int = 0

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name} = {value!r} is unknown: expected one of {', '.join(map(repr, allowed))}")
        if not re.fullmatch(r"\w+\.\w+", str(self.accumulator)):
            raise ValueError(
                f"accumulator = {self.accumulator!r} is not a model name: "
                "expected architecture.kind, such as 'sm_90.bf16'"
            )
        if self.rht_signs is not None:
            object.__setattr__(self, "rht_signs", check_signs(self.rht_signs))
        if not isinstance(self.scale_padding, int) or not 0 <= self.scale_padding <= 255:
            raise ValueError(f"scale_padding = {self.scale_padding!r} is not a byte: expected 0 to 255")
        if self.mx_inf == "rule" and self.scale_rule == "rceil":
            raise ValueError("mx_inf = 'rule' with scale_rule = 'rceil': round-up always gives 0xFE for Inf")

    def replace(self, **choices: Any) -> Contract:
        """Gives this contract with some choices changed. ValueError: unknown choice or value."""
        known = {field.name for field in dataclasses.fields(self)}
        for name in choices:
            if name not in known:
                raise ValueError(f"{name!r} is not a choice of a contract: expected one of {', '.join(sorted(known))}")
        return dataclasses.replace(self, **choices)

    def differences(self, other: Contract) -> dict[str, tuple[Any, Any]]:
        """Gives what differs: choice -> (value here, value in other)."""
        return {
            field.name: (getattr(self, field.name), getattr(other, field.name))
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(other, field.name)
        }

    def to_dict(self) -> dict[str, Any]:
        """Gives every choice by name, as values that JSON can hold."""
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in dataclasses.asdict(self).items()
        }

    @classmethod
    def from_dict(cls, choices: dict[str, Any]) -> Contract:
        """Gives the contract of `to_dict`; missing choices have their defaults. ValueError: see `replace`."""
        signs = choices.get("rht_signs")
        return cls().replace(**(choices if signs is None else {**choices, "rht_signs": tuple(signs)}))


def check_signs(signs: tuple[int, ...] | list[int]) -> tuple[int, ...]:
    """Gives the 16 signs as a tuple of +1 and -1. ValueError: another length or another value."""
    values = tuple(signs)
    if len(values) != 16:
        raise ValueError(f"the sign vector has {len(values)} entries: the rotation is 16x16 and needs 16")
    for place, sign in enumerate(values):
        if sign not in (1, -1):
            raise ValueError(f"signs[{place}] = {sign!r}: expected 1 or -1")
    return tuple(int(sign) for sign in values)


SUITE = Contract()
