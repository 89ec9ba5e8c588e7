"""Distributions of tokens over experts, realistic and awkward, in integers only.

`SHAPES` proposes how many tokens each expert gets; `draw_counts` draws from a proposal in such a way that
lower draws mean fewer tokens, one expert at a time, whatever the distribution was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np

from moe_numerics import values

T = TypeVar("T")

MULTIPLES = (16, 32, 128, 256)
"""Block and tile sizes around which counts are drawn."""


class Source(Protocol):
    """Where drawn integers come from: a seed, or Hypothesis, which shrinks each of them towards `low`."""

    def integer(self, low: int, high: int) -> int:
        """An integer in [low, high], ends included."""


class SeededSource:
    """Integers from a 64-bit seed, the same on every machine and Python version."""

    def __init__(self, seed: int) -> None:
        self._state = values.mix_one(seed)

    def integer(self, low: int, high: int) -> int:
        """An integer in [low, high], ends included; high - low less than 2**64."""
        if high < low:
            raise ValueError(f"integer({low}, {high}) has no value: low must not exceed high")
        self._state = (self._state + 1) % (1 << 64)
        return low + (values.mix_one(self._state) * (high - low + 1) >> 64)


def one_of(source: Source, options: Sequence[T]) -> T:
    """One of `options`; draws shrink towards the first."""
    return options[source.integer(0, len(options) - 1)]


def at_most(source: Source, value: int) -> int:
    """`value` in 31 of 32 draws, and otherwise less; draws shrink towards 0 one by one."""
    return min(value, source.integer(0, 32 * value))


def _uniform(source: SeededSource, experts: int, tokens: int) -> list[int]:
    return [source.integer(0, 2 * tokens // experts) for _ in range(experts)]


def _balanced(source: SeededSource, experts: int, tokens: int) -> list[int]:
    return [tokens // experts + (expert < tokens % experts) for expert in range(experts)]


def _zipf(source: SeededSource, experts: int, tokens: int) -> list[int]:
    # Shares of 1/rank**s for s = 1/2, 1, 2, to 32 bits.
    power = one_of(source, (1, 2, 4))
    shares = [(1 << 32) // math.isqrt(rank**power << 16) for rank in range(1, experts + 1)]
    counts = [tokens * share // sum(shares) for share in shares]
    _shuffle(source, counts)
    return counts


def _one_takes_all(source: SeededSource, experts: int, tokens: int) -> list[int]:
    return _single(experts, source.integer(0, experts - 1), tokens)


def _many_empty(source: SeededSource, experts: int, tokens: int) -> list[int]:
    used = max(1, experts // 4)
    counts = _uniform(source, used, tokens) + [0] * (experts - used)
    _shuffle(source, counts)
    return counts


def _all_empty(source: SeededSource, experts: int, tokens: int) -> list[int]:
    return [0] * experts


def _one_token(source: SeededSource, experts: int, tokens: int) -> list[int]:
    return _single(experts, source.integer(0, experts - 1), 1)


def _near_multiples(source: SeededSource, experts: int, tokens: int) -> list[int]:
    share = max(1, 2 * tokens // experts)
    counts = []
    for _ in range(experts):
        multiple = one_of(source, [m for m in MULTIPLES if m <= share + 1] or [share])
        counts.append(max(0, multiple * source.integer(0, max(1, share // multiple)) + source.integer(-1, 1)))
    return counts


def _router(source: SeededSource, experts: int, tokens: int) -> list[int]:
    """Top-k of logits that share an expert bias and a topic; a topic lasts for about sixteen tokens."""
    top = source.integer(1, min(experts, 8))
    routed = max(1, tokens // top)
    seed, topics = source.integer(0, (1 << 32) - 1), source.integer(1, 6)
    bias_weight, topic_weight = source.integer(0, 3), source.integer(0, 3)

    def gaussian(name: str, rows: int) -> np.ndarray:
        row = np.arange(rows, dtype=np.uint64)[:, None]
        column = np.arange(experts, dtype=np.uint64)[None, :]
        zero = np.zeros((1, 1), dtype=np.uint64)
        total = np.zeros((rows, experts), dtype=np.int64)
        for part in range(3):
            words = values.Places(seed, name, "float32", part, 3, zero, row, column).words("logits")
            for shift in (0, 16, 32, 48):
                total += ((words >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int64)
        return total

    starts = [source.integer(0, 15) == 0 for _ in range(routed)]
    topic_of = np.cumsum(np.array(starts)) % topics
    logits = 2 * gaussian("token", routed)
    logits += topic_weight * gaussian("topic", topics)[topic_of] + bias_weight * gaussian("bias", 1)
    # Distinct keys, so that equal logits choose the lower expert under any sorting algorithm.
    ordered = np.argsort(-logits * experts + np.arange(experts), axis=1, kind="stable")
    return [int(n) for n in np.bincount(ordered[:, :top].ravel(), minlength=experts)]


def _single(experts: int, owner: int, tokens: int) -> list[int]:
    return [tokens if expert == owner else 0 for expert in range(experts)]


def _shuffle(source: SeededSource, items: list[int]) -> None:
    for last in range(len(items) - 1, 0, -1):
        other = source.integer(0, last)
        items[last], items[other] = items[other], items[last]


SHAPES: dict[str, Callable[[SeededSource, int, int], list[int]]] = {
    "balanced": _balanced,
    "uniform": _uniform,
    "near_multiples": _near_multiples,
    "zipf": _zipf,
    "one_takes_all": _one_takes_all,
    "many_empty": _many_empty,
    "one_token": _one_token,
    "all_empty": _all_empty,
    "router": _router,
}
"""Proposals (source, experts, tokens) -> tokens of each expert, at most about twice `tokens` together.

balanced; uniform: each expert's own; near_multiples: multiples of 16, 32, 128, 256, one less and one more;
zipf: exponent 1/2, 1 or 2, in random order; one_takes_all; many_empty: three in four; one_token; all_empty;
router: top-k of correlated logits.
"""

DRAWN_SHAPES = (*SHAPES, *(name for name in SHAPES if name not in ("one_token", "all_empty")))
"""Names of shapes as often as they are drawn."""


def draw_counts(
    source: Source,
    *,
    experts: int,
    rows: int,
    multiple: int = 1,
    alignment: int = 1,
    room: int = 0,
    shapes: Sequence[str] = DRAWN_SHAPES,
) -> tuple[int, ...]:
    """Tokens of each of at most `experts` experts.

    rows: what all regions together may take; an expert's region is the larger of its count and `room`,
    rounded up to `alignment`. multiple: what counts are multiples of. shapes: names from SHAPES.
    """
    number = source.integer(1, min(experts, max(1, rows // max(alignment, room))))
    shape = one_of(source, shapes)
    seeded = SeededSource(source.integer(0, (1 << 32) - 1))
    # Rounding every region up takes alignment - 1 rows at most.
    most = max(rows - number * (alignment - 1), rows // 2)
    tokens = most if source.integer(0, 3) else seeded.integer(0, most)
    counts = []
    left = rows
    for proposed in SHAPES[shape](seeded, number, tokens):
        count = -(-at_most(source, proposed) // multiple) * multiple
        region = -(-max(count, room) // alignment) * alignment
        if region > left:
            # What is left still takes whole alignments only.
            region = left // alignment * alignment
            if region < room:
                break
            count = min(count, region) // multiple * multiple
        counts.append(count)
        left -= region
    return tuple(counts) or (0,)
