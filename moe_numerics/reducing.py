"""Smaller cases from a case: fewer experts and tokens, with the edits of those that stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from moe_numerics.cases import Case, Edit, Values

PLAIN_KINDS = ("plain", "ones")
"""Kinds whose elements are all the same, whatever their expert and row."""


def is_plain(case: Case) -> bool:
    """Whether every tensor that the case names holds 1.0 but for edits."""
    return all(item.window is None and item.kind in PLAIN_KINDS for item in case.values.values())


def keep(case: Case, tokens: Sequence[Sequence[int] | None]) -> Case:
    """The case in which expert e has only the tokens tokens[e], rows in the expert; None drops the expert.

    Edits and windows move with their rows and go with them. Seeded values follow the new expert and row.
    Raises CaseError if no expert is left, or for counts that the alignment does not allow.
    """
    kept = [(start, rows) for start, rows in zip(case.offsets, tokens, strict=False) if rows is not None]
    smaller = case.replace(counts=tuple(len(rows) for _, rows in kept), values={})
    old = [start + row for start, rows in kept for row in rows]
    moved = dict(zip(old, smaller.valid_rows().tolist(), strict=True))
    return smaller.replace(values={name: _move(item, moved) for name, item in case.values.items()})


def _move(item: Values, moved: Mapping[int, int]) -> Values:
    edits = tuple(Edit(moved[row], column, bits) for row, column, bits in item.edits if row in moved)
    window = item.window
    if window is not None:
        inside = [new for old, new in moved.items() if window.row <= old < window.row_end]
        window = window._replace(row=min(inside, default=0), row_end=max(inside, default=-1) + 1)
    return replace(item, window=window, edits=edits)


def without_empty_experts(case: Case) -> Case:
    """The case without experts that have no token; the same case if none has one."""
    if not any(case.counts):
        return case
    return keep(case, [range(count) if count else None for count in case.counts])


def without_plain_tokens(case: Case) -> Case:
    """The case without tokens that no edit touches, but for as many as each expert's alignment asks for."""
    touched = {row for item in case.values.values() for row, _, _ in item.edits}
    multiple = 1 if case.padded else case.alignment
    tokens = []
    for start, count in zip(case.offsets, case.counts, strict=False):
        own = [row for row in range(count) if start + row in touched]
        others = [row for row in range(count) if start + row not in touched]
        number = min(count, -(-max(len(own), 1) // multiple) * multiple)
        tokens.append(sorted(own + others[: number - len(own)]))
    return keep(case, tokens)
