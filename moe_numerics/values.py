"""Kinds of tensor values, as integer functions of (seed, tensor, expert, row in the expert, column).

An element's bits depend on nothing else: not on how many tokens its expert or another one has, not on the
hidden size, not on the column layout, and not on the machine or on any library's random generator. So a case
that loses tokens or columns while it shrinks keeps the values of those that stay.

Words come from the SplitMix64 finaliser (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
OOPSLA 2014); Gaussians are sums of twelve uniform integers, so no libm takes part.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

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

PLAIN = np.uint32(0x3F800000)
NAN = np.uint32(0x7FC00000)
INFINITY = np.uint32(0x7F800000)
_SIGN = np.uint32(0x80000000)


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


def _bits(values: NDArray[np.floating]) -> Bits:
    with np.errstate(over="ignore", under="ignore"):
        return np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)


def _signs(words: Words) -> Bits:
    return (words & np.uint64(1)).astype(np.uint32) << np.uint32(31)


def _powers_of_two(exponents: NDArray[np.int64]) -> Floats:
    """2**exponents in float64, for exponents of normal numbers."""
    return ((exponents + 1023).astype(np.uint64) << np.uint64(52)).view(np.float64)


def _mantissas(places: Places, words: Words) -> Bits:
    """The dtype's mantissa bits, at random, where float32 has them."""
    bits = MANTISSA_BITS[places.dtype]
    return ((words >> np.uint64(8)).astype(np.uint32) & np.uint32((1 << bits) - 1)) << np.uint32(23 - bits)


def _plain(places: Places) -> Bits:
    return np.full(places.shape, PLAIN)


def _gaussian_values(places: Places) -> Floats:
    total = np.zeros(places.shape, dtype=np.uint64)
    for stream in ("gaussian 0", "gaussian 1", "gaussian 2"):
        words = places.words(stream)
        for shift in (0, 16, 32, 48):
            total += (words >> np.uint64(shift)) & np.uint64(0xFFFF)
    # Twelve uniform 16-bit integers have the mean 6 * 65535 and the standard deviation 65536.
    return (2.0 * total - 12 * 65535) / (1 << 17)


def _gaussian(places: Places) -> Bits:
    return _bits(_gaussian_values(places))


def _outliers(places: Places) -> Bits:
    words = places.columns("outlier channels")
    exponents = np.where(below(words, 16) == 0, 4 + (words & np.uint64(3)), 0).astype(np.int64)
    return _bits(_gaussian_values(places) * _powers_of_two(exponents))


def _wide(places: Places) -> Bits:
    words = places.words("wide")
    return _bits(below(words, 1 << 32).astype(np.float64) / (1 << 24) - 128.0)


def _log_uniform(places: Places) -> Bits:
    words = places.words("log uniform")
    return _signs(words) | (below(words, 255).astype(np.uint32) << np.uint32(23)) | _mantissas(places, words)


def _subnormal(places: Places) -> Bits:
    words = places.words("subnormal")
    field = np.where(words & np.uint64(6), 0, below(words, 16)).astype(np.uint32)
    bits = _signs(words) | (field << np.uint32(23)) | _mantissas(places, words)
    if places.parts == 2 and places.part == 0:
        # Two subnormal factors give 0; an ordinary gate makes the product subnormal.
        return np.where(places.tiles("ordinary gate") & np.uint64(3), _gaussian(places), bits)
    return bits


def _saturating(places: Places) -> Bits:
    words, tiles = places.words("saturating"), places.tiles("saturating")
    signs, mantissas = _signs(words), _mantissas(places, words)
    top = signs | ((250 + below(words, 5)).astype(np.uint32) << np.uint32(23)) | mantissas
    # A block amax between 1.75 and 2 times a power of two is past 448 in units of a rounded-down scale.
    field = (97 + below(tiles, 60)).astype(np.uint32) << np.uint32(23)
    past = signs | field | np.uint32(0x600000) | mantissas
    top = np.where(words & np.uint64(6), top, signs | np.uint32(0x7F7F0000))
    return np.where(tiles & np.uint64(1), past, top)


def _constant(places: Places) -> Bits:
    tiles = places.tiles("constant")
    field = (110 + below(tiles, 30)).astype(np.uint32) << np.uint32(23)
    drawn = _signs(tiles) | field | _mantissas(places, tiles)
    noted = _bits(np.array([448.0, 256.0, 6.0, 5.0, 7.0, 1.0, 0.25, -1.0]))[below(tiles, 8)]
    return np.broadcast_to(np.where(tiles & np.uint64(6), drawn, noted), places.shape)


def _zeros(places: Places) -> Bits:
    tiles = places.tiles("zeros")
    mixed = _signs(places.words("zeros"))
    return np.where(tiles & np.uint64(2), mixed, _signs(tiles))


def _specials(places: Places) -> Bits:
    words = places.words("specials")
    special = np.array([NAN, INFINITY, INFINITY | _SIGN, NAN | _SIGN])[words & np.uint64(3)]
    return np.where(below(words, 128) == 0, special, _gaussian(places))


def _random_bits(places: Places) -> Bits:
    mask = np.uint64(0xFFFFFFFF & ~(int(places.step) - 1))
    return ((places.words("random bits") >> np.uint64(16)) & mask).astype(np.uint32)


_KINKS = np.array([0.0, 1.0, 7.0, 2.0**-126, 0.5, 30.0, 104.0, 88.0])


def _kinks(places: Places) -> Bits:
    words = places.words("kinks")
    bits = _bits(_KINKS)[below(words, len(_KINKS))] | _signs(words)
    nudge = (words >> np.uint64(1)) & np.uint64(3)
    up = np.where(nudge == 1, bits + places.step, bits)
    return np.where((nudge == 2) & (bits & ~_SIGN != 0), up - places.step, up)


def _e4m3_midpoints() -> Floats:
    codes = np.arange(127)
    values = np.where(
        codes < 8,
        codes * 2.0**-9,
        (8 + codes % 8) * _powers_of_two((np.maximum(codes, 8) // 8 - 10).astype(np.int64)),
    )
    return (values[1:] + values[:-1]) / 2


_E4M3_MIDPOINTS = _e4m3_midpoints()
_E2M1_MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def _gate_of_ties(places: Places) -> Bits:
    """32.0: its sigmoid rounds to 1 in float32, so silu, gelu and relu return it, and a product is exact."""
    return np.full(places.shape, np.uint32(0x42000000))


def _with_ties(places: Places, exact: Floats, amax: Floats, side: int, powers: Floats) -> Bits:
    """Ties or one of their neighbours, and the block's amax on the diagonal of every tile.

    powers: what half the tiles of a two-part tensor hold instead, or NaN in a tile that must keep its ties.
    """
    words = places.words("ties")
    bits = _bits(exact)
    nudge = (words >> np.uint64(1)) & np.uint64(7)
    bits = np.where(nudge == 1, bits + places.step, np.where(nudge == 2, bits - places.step, bits))
    size = np.uint64(side)
    bits = np.where(places.row % size == places.column % size, _bits(amax), bits)
    if places.parts == 2:
        # Two ties multiplied, as in a backward pass, make none: half the tiles hold a power of two.
        keep = (places.tiles("ties or powers", side) & np.uint64(1) == 1) | np.isnan(powers)
        bits = np.where(keep, bits, _bits(powers))
    return bits | _signs(words)


def _ties_e4m3(places: Places) -> Bits:
    if places.parts == 2 and places.part == 0:
        return _gate_of_ties(places)
    tiles = places.tiles("ties e4m3")
    unit = _powers_of_two(below(tiles, 61).astype(np.int64) - 30)
    full = tiles & np.uint64(1) == 1
    picks = below(places.words("midpoints"), 1 << 16)
    # Amax 448 or 256 in units of the scale: rounding the scale up and down then agree.
    limit = np.where(full, len(_E4M3_MIDPOINTS), np.searchsorted(_E4M3_MIDPOINTS, 256.0)).astype(np.uint64)
    exact = _E4M3_MIDPOINTS[(picks * limit) >> np.uint64(16)] * unit
    return _with_ties(places, exact, np.where(full, 448.0, 256.0) * unit, 32, unit)


def _ties_e2m1(places: Places) -> Bits:
    if places.parts == 2 and places.part == 0:
        return _gate_of_ties(places)
    tiles = places.tiles("ties e2m1", 16)
    level = np.array(2.0 ** (key(places.seed, "e2m1 level") % 9 - 4))
    scale = _powers_of_two(below(tiles, 15).astype(np.int64) - 6)
    # Half the tiles put the E4M3 block scale on a tie, the others the elements. Every expert's first tile
    # holds 6 * 448, so that the encode scale of the tensor is a power of two.
    odd = _E4M3_MIDPOINTS[8 + below(tiles, len(_E4M3_MIDPOINTS) - 8)]
    first = (places.row < np.uint64(16)) & (places.column < np.uint64(16))
    block = np.where(first, 448.0, np.where(tiles & np.uint64(1), odd, scale))
    exact = _E2M1_MIDPOINTS[below(places.words("midpoints"), 7)] * block
    powers = np.where(first, np.nan, level)
    return _with_ties(places, exact * level, 6.0 * block * level, 16, powers)


def _scale_edges(places: Places) -> Bits:
    if places.parts == 2 and places.part == 0:
        return _gate_of_ties(places)
    tiles, words = places.tiles("scale edges"), places.words("scale edges")
    # E8M0 from code 0 and below to the largest amax that a bfloat16 has; a gate of 32 is taken out again.
    ends = np.array([-130, -128, -127, -126, 118, 119])[below(tiles, 6)]
    exponents = np.where(tiles & np.uint64(6), below(tiles, 248).astype(np.int64) - 128, ends)
    unit = _powers_of_two(exponents - (5 if places.parts == 2 else 0))
    top = np.array([448.0, 256.0, 510.0, 480.0])[(tiles >> np.uint64(3)) & np.uint64(3)] * unit
    amax = _bits(top)
    nudge = (tiles >> np.uint64(5)) & np.uint64(3)
    amax = np.where(nudge == 1, amax + places.step, np.where(nudge == 2, amax - places.step, amax))
    size = np.uint64(32)
    diagonal = places.row % size == places.column % size
    rest = _bits(top * below(words, 1 << 20).astype(np.float64) / (1 << 21))
    return np.where(diagonal, np.minimum(amax, np.uint32(0x7F7F0000)), rest) | _signs(words)


_SINGLE: dict[str, Callable[[Places], Bits]] = {
    "plain": _plain,
    "gaussian": _gaussian,
    "zeros": _zeros,
    "constant": _constant,
    "outliers": _outliers,
    "wide": _wide,
    "kinks": _kinks,
    "ties_e4m3": _ties_e4m3,
    "ties_e2m1": _ties_e2m1,
    "scale_edges": _scale_edges,
    "subnormal": _subnormal,
    "saturating": _saturating,
    "log_uniform": _log_uniform,
    "specials": _specials,
    "random_bits": _random_bits,
}

NOT_FINITE = ("specials", "random_bits", "mixed")
"""Kinds that hold NaN or infinities."""


def _mixture(names: tuple[str, ...]) -> Callable[[Places], Bits]:
    def fill(places: Places) -> Bits:
        shape = places.shape
        choice = np.broadcast_to(below(places.tiles("mixed", shared=True), len(names)), shape)
        expert, row, column = (np.broadcast_to(a, shape) for a in (places.expert, places.row, places.column))
        result = np.empty(shape, dtype=np.uint32)
        for index, name in enumerate(names):
            here = choice == np.uint64(index)
            if here.any():
                chosen = replace(places, expert=expert[here], row=row[here], column=column[here])
                result[here] = _SINGLE[name](chosen)
        return result

    return fill


KINDS: dict[str, Callable[[Places], Bits]] = {
    **_SINGLE,
    "mixed_finite": _mixture(tuple(name for name in _SINGLE if name not in ("plain", *NOT_FINITE))),
    "mixed": _mixture(tuple(name for name in _SINGLE if name != "plain")),
}
"""Kinds of the values of bfloat16 and float32 tensors, simplest first.

plain: 1.0. gaussian: standard deviation 1, at most 6. zeros: +0 and -0. constant: one value a 32x32
tile. outliers: gaussian with one column in 16 times 16 to 128. wide: uniform in [-128, 128). kinks:
limits, zeros and range ends of activations, and their neighbours. ties_e4m3, ties_e2m1: midpoints
between neighbouring codes in units of an exact block scale, and their neighbours. scale_edges: block
amaxes at and beside the E8M0 steps. subnormal: subnormal and tiny. saturating: near the largest finite
number, or past the largest code under a scale rounded down. log_uniform: every exponent as often.
specials: gaussian with NaN and infinities in one element of 128. random_bits: every bit pattern as
often. mixed, mixed_finite: another kind in every 32x32 tile.
"""


def _ones(places: Places) -> Bits:
    return np.full(places.shape, PLAIN)


def _powers(places: Places) -> Bits:
    return _bits(_powers_of_two(-below(places.words("powers"), 25).astype(np.int64)))


def _router(places: Places) -> Bits:
    words = places.words("router")
    uniform = _bits((below(words, 1 << 24) + np.uint64(1)).astype(np.float64) / (1 << 24))
    kind = words & np.uint64(15)
    special = np.where(kind == 0, np.uint32(0), np.where(kind == 1, PLAIN, _powers(places)))
    return np.where(kind < 4, special, uniform)


PROB_KINDS: dict[str, Callable[[Places], Bits]] = {"ones": _ones, "powers_of_two": _powers, "router": _router}
"""Kinds of router probabilities, simplest first.

router: uniform in (0, 1], and in one of four tokens exactly 0, 1 or a power of two.
"""


def scaled(bits: Bits, exponent: int) -> Bits:
    """Float32 bits of the values times 2**exponent: nearest even, finite ones saturate, NaN and Inf stay."""
    if exponent == 0:
        return bits
    finite = bits & ~_SIGN < INFINITY
    values = np.where(finite, bits, np.uint32(0)).view(np.float32).astype(np.float64)
    limit = float(np.finfo(np.float32).max)
    return np.where(finite, _bits(np.clip(values * math.ldexp(1.0, exponent), -limit, limit)), bits)


def to_dtype(bits: Bits, dtype: str) -> NDArray[np.uint16] | NDArray[np.uint32]:
    """Bits in `dtype` of float32 bits, rounded to nearest even; finite values saturate, NaN bits stay."""
    if dtype == "float32":
        return bits
    # What already is a bfloat16, NaN included, has a zero lower half and passes unchanged.
    even = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + even) >> np.uint32(16)
    overflow = (bits & ~_SIGN < INFINITY) & (rounded & np.uint32(0x7FFF) >= np.uint32(0x7F80))
    largest = (bits >> np.uint32(16)) & np.uint32(0x8000) | np.uint32(0x7F7F)
    return np.where(overflow, largest, rounded).astype(np.uint16)
