"""Philox4x32-10 in registers: the random bits of a logical element.

Twin of `moe_numerics.reference.philox`.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Uint32

__all__ = ["philox", "unpack_bits"]

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

Words = tuple[Uint32, Uint32, Uint32, Uint32]


def philox(counter: Words, key: tuple[Uint32, Uint32]) -> Words:
    """The four output words for a counter."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        first, second = Uint32(_MULTIPLIERS[0]), Uint32(_MULTIPLIERS[1])
        high0, low0 = Uint32(cute.arch.mul_hi(first, c0)), first * c0
        high1, low1 = Uint32(cute.arch.mul_hi(second, c2)), second * c2
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + Uint32(_WEYL[0]), k1 + Uint32(_WEYL[1])
    return c0, c1, c2, c3


def unpack_bits(words: Words, width: int) -> list[Uint32]:
    """The 128 / width random numbers of a call, in the order of their elements."""
    if width == 32:
        return list(words)
    mask = Uint32((1 << width) - 1)
    return [(word >> shift) & mask for word in words for shift in range(0, 32, width)]
