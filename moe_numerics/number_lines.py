"""The codes of a number format as one ordered line of integers: what a ULP distance is measured on."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from moe_numerics.reference import formats

Codes = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class NumberLine:
    """A format's codes, how they are ordered, and which of them are NaN.

    `bits` is the width of a code; `dtype` the torch dtype that holds it; `encoding` how a code is ordered:
    `sign_magnitude` (top bit is the sign), `unsigned` or `twos_complement`. Magnitudes above
    `largest_number` are NaN; `negative_zero` is False where the code of -0 is the NaN (FNUZ formats).

    On the line -0 stands one step below +0, so that two different codes are never 0 apart, and Inf one step
    above the largest finite value. NaNs are not on the line.
    """

    name: str
    dtype: torch.dtype
    bits: int
    encoding: Literal["sign_magnitude", "unsigned", "twos_complement"]
    largest_number: int | None = None
    negative_zero: bool = True

    def is_nan(self, codes: Codes) -> npt.NDArray[np.bool_]:
        """Which codes (uint64) are NaN or no code of the format at all, as a bool array."""
        sign = np.uint64(1 << (self.bits - 1))
        if self.encoding == "sign_magnitude" and not self.negative_zero:
            return codes == sign
        largest = (1 << self.bits) - 1 if self.largest_number is None else self.largest_number
        magnitude = codes & ~sign if self.encoding == "sign_magnitude" else codes
        return magnitude > np.uint64(largest)

    def position(self, codes: Codes) -> Codes:
        """Where each code stands on the line, as uint64 that grow with the value; meaningless for NaN."""
        if self.encoding == "unsigned":
            return codes
        sign = np.uint64(1 << (self.bits - 1))
        if self.encoding == "twos_complement":
            return codes ^ sign
        mask = np.uint64((1 << self.bits) - 1)
        below_zero = (~codes & mask) + np.uint64(0 if self.negative_zero else 1)
        return np.where(codes & sign != 0, below_zero, codes | sign)

    def distance(self, a: Codes, b: Codes) -> Codes:
        """How many steps of the line lie between codes `a` and `b` (uint64); meaningless for NaN."""
        a_position, b_position = self.position(a), self.position(b)
        return np.maximum(a_position, b_position) - np.minimum(a_position, b_position)

    def hex(self, code: int) -> str:
        """The bit pattern as text, padded to the width of the format: `0x3f80`."""
        return f"0x{code:0{(self.bits + 3) // 4}x}"

    def text(self, code: int) -> str:
        """The value of a code as text: nine digits at most, `nan`, `inf`, `-0`, and `2^-3` for E8M0."""
        if self.encoding == "twos_complement":
            return str(code - (1 << self.bits) if code >> (self.bits - 1) else code)
        if self.bits == 64:
            return repr(struct.unpack("<d", struct.pack("<Q", code))[0])
        if self.dtype.is_floating_point:
            storage = _BIT_VIEWS[self.dtype]
            signed = code - (1 << self.bits) if code >> (self.bits - 1) else code
            return f"{torch.tensor([signed], dtype=storage).view(self.dtype).double().item():.9g}"
        if self.name == "uint8":
            return str(code)
        if self.name == "E8M0":
            return "nan" if code == 0xFF else f"2^{code - 127}"
        if code >> self.bits:
            return f"not a code of {self.name}"
        value_format: Any = getattr(formats, self.name)
        return f"{value_format.decode(torch.tensor([code], dtype=torch.uint8)).item():.9g}"


_BIT_VIEWS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}

# Largest non-NaN magnitude: the code of Inf where there is one (IEEE 754, bfloat16, E5M2), else of the
# largest finite value (OCP 8-bit floating point 1.0 for E4M3; OCP MX 1.0 for E8M0 and E2M1).
LINES = {
    line.name: line
    for line in (
        NumberLine("bfloat16", torch.bfloat16, 16, "sign_magnitude", 0x7F80),
        NumberLine("float16", torch.float16, 16, "sign_magnitude", 0x7C00),
        NumberLine("float32", torch.float32, 32, "sign_magnitude", 0x7F800000),
        NumberLine("float64", torch.float64, 64, "sign_magnitude", 0x7FF0000000000000),
        NumberLine("E4M3", torch.uint8, 8, "sign_magnitude", 0x7E),
        NumberLine("E5M2", torch.uint8, 8, "sign_magnitude", 0x7C),
        NumberLine("E4M3FNUZ", torch.uint8, 8, "sign_magnitude", 0x7F, negative_zero=False),
        NumberLine("E5M2FNUZ", torch.uint8, 8, "sign_magnitude", 0x7F, negative_zero=False),
        NumberLine("E2M1", torch.uint8, 4, "sign_magnitude", 0x7),
        NumberLine("E8M0", torch.uint8, 8, "unsigned", 0xFE),
        NumberLine("UE4M3", torch.uint8, 7, "unsigned", 0x7E),
        NumberLine("UE5M3", torch.uint8, 8, "unsigned", 0xFE),
        NumberLine("uint8", torch.uint8, 8, "unsigned"),
        NumberLine("int8", torch.int8, 8, "twos_complement"),
        NumberLine("int32", torch.int32, 32, "twos_complement"),
        NumberLine("int64", torch.int64, 64, "twos_complement"),
    )
}

PACKED = {"E2M1x2": "E2M1"}
"""Formats with two codes a byte, the even element in the low nibble, and the format of the elements."""


def bit_view(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as integers of the same width; integer tensors as they are."""
    return tensor.view(_BIT_VIEWS[tensor.dtype]) if tensor.dtype in _BIT_VIEWS else tensor
