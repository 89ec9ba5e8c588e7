"""Philox4x32-10 in integer tensor operations, and the random bits of a logical element.

A counter-based generator: the bits depend on a key and a counter only, never on the launch, so a row gets the
same bits whatever buffer, tile or device it is processed in.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11, section 3 and table 2; constants
and known-answer vectors as published with Random123 (tests/kat_vectors).
"""

from __future__ import annotations

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(counter: Words, key: tuple[int, int], rounds: int = 10) -> Words:
    """Gives the four output words of Philox4x32 for each counter.

    counter: four int64 tensors that broadcast, words 0 to 3, each in [0, 2**32). key: two words. Result: four
    int64 tensors with values in [0, 2**32). ValueError: a key word outside 32 bits.
    """
    for place, word in enumerate(key):
        if not 0 <= word <= _WORD:
            raise ValueError(f"key[{place}] = {word} is not a 32-bit word: expected 0 to {_WORD}")
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = key
    for _ in range(rounds):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def element_bits(
    seed: int,
    tensor: int,
    expert: torch.Tensor,
    row: torch.Tensor,
    column: torch.Tensor,
    axis: int = -1,
    width: int = 32,
) -> torch.Tensor:
    """Gives the random bits of logical elements, keyed by (seed, tensor, expert, row in the expert, column).

    seed: 64 bits, the key (low word first). tensor: 16 bits that tell the streams of a step apart; a tensor
    quantised in both directions has a number for each. expert: int64, below 2**16. row: int64, row within the
    expert. column: int64. expert, row and column broadcast. axis: along which neighbours share one Philox
    call: -1 columns, -2 rows.
    width: 8, 16 or 32 bits an element.

    With p the position along the axis, q the other one and n = 128 / width elements to a call: counter = (p
    // n, q, expert + 65536 * tensor, 0), and the element has bits (p % n) * width and up of the 128-bit
    result (word 0 lowest). Result: int64 in [0, 2**width). ValueError: a seed, tensor, width or axis out of
    range.
    """
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed is {seed}: expected 0 to 2**64 - 1")
    if not 0 <= tensor < 1 << 16:
        raise ValueError(f"tensor is {tensor}: expected 0 to 65535")
    if width not in (8, 16, 32):
        raise ValueError(f"width is {width}: expected 8, 16 or 32 bits")
    if axis not in (-1, -2):
        raise ValueError(f"axis is {axis}: expected -1 (columns) or -2 (rows)")
    along, across = (column, row) if axis == -1 else (row, column)
    n = 128 // width
    along, across, owner = torch.broadcast_tensors(along, across, expert)
    call, place = torch.div(along, n, rounding_mode="floor"), along % n
    stream = owner + (tensor << 16)
    words = philox((call, across, stream, torch.zeros_like(call)), (seed & _WORD, seed >> 32))
    per_word = 32 // width
    which, shift = torch.div(place, per_word, rounding_mode="floor"), (place % per_word) * width
    word = words[0]
    for number in (1, 2, 3):
        word = torch.where(which == number, words[number], word)
    return (word >> shift) & ((1 << width) - 1)


def _multiply(constant: int, word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low word of constant * word, in halves because int64 does not hold 64 unsigned bits."""
    low = constant * (word & 0xFFFF)
    high = constant * (word >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)
