"""Kinds of values that lie on rounding boundaries: elements, block scales and rotated elements on ties."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moe_numerics.places import Bits, Floats, Places, Words, below, float_bits, key, powers_of_two, sign_bits
from moe_numerics.reference.contract import DEFAULT_SIGNS

__all__ = ["gate_of_ties", "nvfp4_near_ties", "nvfp4_ties", "ties_e2m1", "ties_e4m3"]


def _e4m3_midpoints() -> Floats:
    codes = np.arange(127)
    values = np.where(
        codes < 8,
        codes * 2.0**-9,
        (8 + codes % 8) * powers_of_two((np.maximum(codes, 8) // 8 - 10).astype(np.int64)),
    )
    return (values[1:] + values[:-1]) / 2


_E4M3_MIDPOINTS = _e4m3_midpoints()
_E2M1_MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def gate_of_ties(places: Places) -> Bits:
    """32.0: its sigmoid rounds to 1 in float32, so silu, gelu and relu return it, and a product is exact."""
    return np.full(places.shape, np.uint32(0x42000000))


def _with_ties(places: Places, exact: Floats, amax: Floats, side: int, powers: Floats) -> Bits:
    """Ties or one of their neighbours, and the block's amax on the diagonal of every tile.

    powers: what half the tiles of a two-part tensor hold instead, or NaN in a tile that must keep its ties.
    """
    words = places.words("ties")
    bits = float_bits(exact)
    nudge = (words >> np.uint64(1)) & np.uint64(7)
    bits = np.where(nudge == 1, bits + places.step, np.where(nudge == 2, bits - places.step, bits))
    size = np.uint64(side)
    bits = np.where(places.row % size == places.column % size, float_bits(amax), bits)
    if places.parts == 2:
        # Two ties multiplied, as in a backward pass, make none: half the tiles hold a power of two.
        keep = (places.tiles("ties or powers", side) & np.uint64(1) == 1) | np.isnan(powers)
        bits = np.where(keep, bits, float_bits(powers))
    return bits | sign_bits(words)


def ties_e4m3(places: Places) -> Bits:
    """Midpoints between E4M3 codes in units of an exact scale, and their neighbours; see `values.KINDS`."""
    if places.parts == 2 and places.part == 0:
        return gate_of_ties(places)
    tiles = places.tiles("ties e4m3")
    unit = powers_of_two(below(tiles, 61).astype(np.int64) - 30)
    full = tiles & np.uint64(1) == 1
    picks = below(places.words("midpoints"), 1 << 16)
    # Amax 448 or 256 in units of the scale: rounding the scale up and down then agree.
    limit = np.where(full, len(_E4M3_MIDPOINTS), np.searchsorted(_E4M3_MIDPOINTS, 256.0)).astype(np.uint64)
    exact = _E4M3_MIDPOINTS[(picks * limit) >> np.uint64(16)] * unit
    return _with_ties(places, exact, np.where(full, 448.0, 256.0) * unit, 32, unit)


def ties_e2m1(places: Places) -> Bits:
    """Midpoints between E2M1 codes in units of an exact scale, and their neighbours; see `values.KINDS`."""
    if places.parts == 2 and places.part == 0:
        return gate_of_ties(places)
    tiles = places.tiles("ties e2m1", 16)
    level = np.array(2.0 ** (key(places.seed, "e2m1 level") % 9 - 4))
    scale = powers_of_two(below(tiles, 15).astype(np.int64) - 6)
    # Half the tiles put the E4M3 block scale on a tie, the others the elements. Every expert's first tile
    # holds 6 * 448, so that the encode scale of the tensor is a power of two.
    odd = _E4M3_MIDPOINTS[8 + below(tiles, len(_E4M3_MIDPOINTS) - 8)]
    first = (places.row < np.uint64(16)) & (places.column < np.uint64(16))
    block = np.where(first, 448.0, np.where(tiles & np.uint64(1), odd, scale))
    exact = _E2M1_MIDPOINTS[below(places.words("midpoints"), 7)] * block
    powers = np.where(first, np.nan, level)
    return _with_ties(places, exact * level, 6.0 * block * level, 16, powers)


_TILE = np.uint64(16)
_SIGNS = np.array(DEFAULT_SIGNS, dtype=np.float64)


def nvfp4_ties(places: Places) -> Bits:
    """A tensor with the amax 6 * 448 times a power of two: its encode scale is a power of two, and ties are ties.

    See `_nvfp4_tensor` for its tiles.
    """
    return _nvfp4_tensor(places, 1.0)


def nvfp4_near_ties(places: Places) -> Bits:
    """The same with the amax 252 times a power of two: 6 * 448 / 252 is 32 / 3, and products with it are rounded.

    Block amaxes at 9/16 of a midpoint between E4M3 scales are bfloat16 numbers, and the orders of the scale
    arithmetic, equal without rounding, disagree about them.
    """
    return _nvfp4_tensor(places, 252 / (6 * 448))


def _nvfp4_tensor(places: Places, unit: float) -> Bits:
    """Tiles of 16x16: element ties under scales of every size and on a tie, the same after rotation, and zeros.

    unit: a power of two of it is what a scale of 1 stands for. The first tile of an expert holds the tensor's amax,
    in its first column with the signs of the rotation and in its second with none, so that the amax after rotation
    is four times that before, whether the rotation has signs or not.
    """
    if places.parts == 2 and places.part == 0:
        return gate_of_ties(places)
    tiles = places.tiles("nvfp4", 16)
    level = unit * 2.0 ** (key(places.seed, "nvfp4 level") % 9 - 4)
    role = tiles & np.uint64(7)
    scale = powers_of_two(below(tiles, 18).astype(np.int64) - 9)
    odd = _E4M3_MIDPOINTS[below(tiles, len(_E4M3_MIDPOINTS))]
    first = (places.row < _TILE) & (places.column < _TILE)
    block = np.where(first, 448.0, np.where(role < 2, odd, scale)) * level
    elements = _E2M1_MIDPOINTS[below(places.words("midpoints"), 7)] * block
    plain = replace(places, parts=1)
    bits = _with_ties(plain, elements, 6.0 * block, 16, np.zeros(1))
    signed = _SIGNS[(places.row % _TILE).astype(np.int64)]
    # Columns of one magnitude: their row-wise and rotated blocks have amaxes on a tie between scales.
    flat = (role == 2) & ~first
    bits = np.where(flat, float_bits(6.0 * odd * level * signed), bits)
    bits = np.where((role == 3) & ~first, bits & np.uint32(0x80000000), bits)
    bits = np.where(first & (places.column == 0), float_bits(6.0 * 448.0 * level * signed), bits)
    bits = np.where(first & (places.column == 1), float_bits(np.full(1, 6.0 * 448.0 * level)), bits)
    turned = np.broadcast_to((role >= 6) & ~first, places.shape)
    if turned.any():
        # At most 16: 16 sums of at most 6 in a quarter of it stay below the amax.
        held = np.broadcast_to(np.minimum(scale, 16.0), places.shape)[turned]
        bits[turned] = _rotated_ties(places, turned, held * level)
    return bits


def _rotated_ties(places: Places, where: np.ndarray, scale: Floats) -> Bits:
    """What the rotation turns into element ties in blocks of 16 rows, whose amax stands for 6.

    The rotation is (x * signs) @ H / 4, its inverse x = signs * (y @ H) / 4: sums of quarters, nearly always
    bfloat16 numbers.
    """
    expert, row, column = (np.broadcast_to(a, places.shape)[where] for a in (places.expert, places.row, places.column))
    inside = row % _TILE
    total = np.zeros(row.shape)
    for j in range(16):
        at = np.uint64(j)
        word = replace(places, expert=expert, row=row - inside + at, column=column).words("rotated midpoints")
        largest = column % _TILE == at
        magnitude = np.where(largest, 6.0, _E2M1_MIDPOINTS[below(word, 7)])
        total += np.where((word ^ _parity(inside & at)) & np.uint64(1), -magnitude, magnitude)
    return float_bits(_SIGNS[inside.astype(np.int64)] * total / 4 * scale)


def _parity(words: Words) -> Words:
    """Whether an odd number of the lowest four bits is set."""
    folded = words ^ (words >> np.uint64(2))
    return (folded ^ (folded >> np.uint64(1))) & np.uint64(1)
