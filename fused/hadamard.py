"""The 16-point randomised Hadamard transform of values in registers.

Twin of `moe_numerics.reference.hadamard`: signs, butterflies at strides 1, 2, 4 and 8, the factor 1/4, the rounding.
The factor is exact, as sums of bfloat16 are multiples of 2^-133: what follows may apply it instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cutlass import BFloat16, Float32
from moe_numerics.reference.contract import Contract
from moe_numerics.reference.hadamard import BLOCK

__all__ = ["BLOCK", "Rotation"]


@dataclass(frozen=True)
class Rotation:
    """A rotation with its signs, factor and rounding, as a compile-time parameter of a kernel."""

    signs: tuple[int, ...] | None
    orthonormal: bool
    rounded: bool

    @classmethod
    def of(cls, contract: Contract) -> Rotation:
        """The rotation of a contract, rounded where the contract rounds rotated values or what is quantised."""
        rounded = "bfloat16" in (contract.rht_rounding, contract.staging)
        return cls(contract.rht_signs, contract.rht_normalise == "orthonormal", rounded)

    @property
    def factor(self) -> float:
        """What `sums` leaves to be multiplied by: 1/4, or 1 where the rotated values are rounded or not normalised."""
        return 0.25 if self.orthonormal and not self.rounded else 1.0

    def sums(self, values: Sequence[Float32]) -> list[Float32]:
        """The 16 values rotated, but for `factor`."""
        current = list(values)
        if self.signs is not None:
            current = [value if sign > 0 else -value for value, sign in zip(current, self.signs, strict=True)]
        for stride in (1, 2, 4, 8):
            previous, current = current, list(current)
            for place in range(BLOCK):
                if not place & stride:
                    first, second = previous[place], previous[place + stride]
                    current[place], current[place + stride] = first + second, first - second
        if self.orthonormal and self.rounded:
            current = [value * Float32(0.25) for value in current]
        return [value.to(BFloat16).to(Float32) for value in current] if self.rounded else current
