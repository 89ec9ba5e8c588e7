"""Where a value is, and the words that a hash makes of it.

An element's word depends on (seed, tensor, part, expert, row in the expert, column) and on nothing else. Words come
from the SplitMix64 finaliser (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Bits = NDArray[np.uint32]
"""Float32 bit patterns."""
Floats = NDArray[np.float64]

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1

MANTISSA_BITS = {"bfloat16": 7, "float32": 23}
"""Stored mantissa bits of the dtypes that values can have."""


def mix(words: Words) -> Words:
    """The SplitMix64 finaliser of every word: a bijection whose output bits look independent."""
    z = words + np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def mix_one(word: int) -> int:
    """`mix` of one Python integer, taken modulo 2**64."""
    z = (word + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def key(*parts: int | str) -> int:
    """A 64-bit key of a sequence of integers and names, the same on every machine."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def below(words: Words, n: int) -> Words:
    """Integers in [0, n) from the upper 32 bits of every word; n at most 2**32."""
    return ((words >> np.uint64(32)) * np.uint64(n)) >> np.uint64(32)


@dataclass(frozen=True)
class Places:
    """The elements to fill: `expert`, `row` (in the expert) and `column` (of one part) broadcast together.

    part, parts: which of the tensor's column groups this is; a gate_up tensor has part 0 (gate) and 1 (up).
    """

    seed: int
    tensor: str
    dtype: str
    part: int
    parts: int
    expert: Words
    row: Words
    column: Words

    @property
    def shape(self) -> tuple[int, ...]:
        """The broadcast shape of the coordinates."""
        return np.broadcast_shapes(self.expert.shape, self.row.shape, self.column.shape)

    @property
    def step(self) -> np.uint32:
        """One unit in the last place of the dtype, as an increment of float32 bits."""
        return np.uint32(1 << (23 - MANTISSA_BITS[self.dtype]))

    def words(self, stream: str) -> Words:
        """A word for every element."""
        return self._hash(key(self.seed, self.tensor, self.part, stream), self.expert, self.row, self.column)

    def columns(self, stream: str) -> Words:
        """A word for every column, the same in all rows and experts."""
        zero = np.zeros_like(self.row)
        return self._hash(key(self.seed, self.tensor, self.part, stream), zero, zero, self.column)

    def tiles(self, stream: str, side: int = 32, *, shared: bool = False) -> Words:
        """A word for every side x side tile, counted from the expert's first row.

        shared: the same word for all tensors and parts with this seed.
        """
        size = np.uint64(side)
        owner = key(self.seed, stream) if shared else key(self.seed, self.tensor, self.part, stream)
        return self._hash(owner, self.expert, self.row // size, self.column // size)

    @staticmethod
    def _hash(owner: int, expert: Words, row: Words, column: Words) -> Words:
        rows = mix(np.uint64(owner) ^ ((expert << np.uint64(32)) | row))
        return mix(rows + column * np.uint64(_GOLDEN))


def float_bits(values: NDArray[np.floating]) -> Bits:
    with np.errstate(over="ignore", under="ignore"):
        return np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)


def sign_bits(words: Words) -> Bits:
    return (words & np.uint64(1)).astype(np.uint32) << np.uint32(31)


def powers_of_two(exponents: NDArray[np.int64]) -> Floats:
    """2**exponents in float64, for exponents of normal numbers."""
    return ((exponents + 1023).astype(np.uint64) << np.uint64(52)).view(np.float64)
