"""Smaller cases from a case: fewer experts, tokens and columns, with the edits of those that stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from moe_numerics import values
from moe_numerics.case_tensors import window_edits
from moe_numerics.cases import Case, Edit, TensorSpec, Values, Window

EXTRACTED = 8
"""Most elements of a window that become edits."""

PLAIN_KINDS = ("plain", "ones")
"""Kinds whose elements are all the same, whatever their expert and row."""


def plain_values(spec: TensorSpec) -> Values:
    """The simplest values of an input."""
    return Values("ones" if spec.kind == "prob" else "plain")


def is_plain(case: Case) -> bool:
    """Whether every tensor that the case names is all the same but for edits."""
    return all(item.window is None and item.kind in PLAIN_KINDS for item in case.values.values())


def extent(case: Case, spec: TensorSpec) -> tuple[int, int, int]:
    """Tokens, columns and parts of an input of values or probabilities."""
    return (case.tokens, 1, 1) if spec.kind == "prob" else (case.tokens, case.width(spec), spec.columns)


def windowed(case: Case, spec: TensorSpec, item: Values, starts: Sequence[int], ends: Sequence[int]) -> Values:
    """The item inside a box of (tokens, columns, parts) and 1.0 outside; as edits, if the box is small.

    Tokens count valid rows from the start of the buffer. Edits of the item stay.
    """
    plain = plain_values(spec)
    if any(start >= end for start, end in zip(starts, ends, strict=True)):
        return replace(plain, edits=item.edits)
    rows = case.valid_rows()
    row, row_end = int(rows[starts[0]]), int(rows[ends[0] - 1]) + 1
    inside = replace(item, window=Window(row, row_end, starts[1], ends[1], starts[2], ends[2]))
    found = window_edits(case, spec, inside, EXTRACTED)
    if found is None:
        return inside
    one = int(values.to_dtype(values.PLAIN.reshape(1), spec.dtype)[0])
    edits = {(edit.row, edit.column): edit for edit in item.edits}
    edits |= {(row, column): Edit(row, column, bits) for row, column, bits in found if bits != one}
    return replace(plain, edits=tuple(edits.values()))


def keep(case: Case, tokens: Sequence[Sequence[int] | None], **changes: Any) -> Case:
    """The case in which expert e has only the tokens tokens[e], rows in the expert; None drops the expert.

    changes: other fields of the case that decide where rows lie, such as `alignment`.
    Edits and windows move with their rows and go with them. Seeded values follow the new expert and row.
    Raises CaseError if no expert is left, or for counts that the alignment does not allow.
    """
    kept = [(start, rows) for start, rows in zip(case.offsets, tokens, strict=False) if rows is not None]
    smaller = case.replace(counts=tuple(len(rows) for _, rows in kept), values={}, **changes)
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
    """The case without experts that have no token; the same case if no expert has one."""
    if not any(case.counts):
        return case
    return keep(case, [range(count) if count else None for count in case.counts])


def without_plain_tokens(case: Case) -> Case:
    """The case without tokens that no edit touches, but for as many as each expert's alignment asks for.

    The same case if there are no edits: then nothing says which tokens matter.
    """
    touched = {row for item in case.values.values() for row, _, _ in item.edits}
    if not touched:
        return case
    multiple = 1 if case.padded else case.alignment
    tokens = []
    for start, count in zip(case.offsets, case.counts, strict=False):
        own = [row for row in range(count) if start + row in touched]
        others = [row for row in range(count) if start + row not in touched]
        number = min(count, -(-max(len(own), 1) // multiple) * multiple)
        tokens.append(sorted(own + others[: number - len(own)]))
    return keep(case, tokens)


def narrower(case: Case, inputs: Sequence[TensorSpec], hidden: int, layout: str, depth: int | None = None) -> Case:
    """The case with other columns: edits keep their part, and their column modulo `hidden`, or `depth` (None: as is).

    Raises CaseError if the layout does not allow the hidden size.
    """
    depth = case.depth if depth is None else depth
    smaller = case.replace(hidden=hidden, depth=depth, layout=layout, values={})
    specs = {spec.name: spec for spec in inputs if spec.kind == "values"}
    changed = {}
    for name, item in case.values.items():
        if name in specs:
            parts, width = specs[name].columns, smaller.width(specs[name])
            edits = {}
            for row, physical, bits in item.edits:
                part, column = case.logical_column(physical, parts)
                physical = smaller.physical_column(part, column % width, parts)
                edits[row, physical] = Edit(row, physical, bits)
            window = item.window
            if window is not None:
                start, end = min(window.column, width), min(window.column_end, width)
                window = window._replace(column=start, column_end=end)
            item = replace(item, window=window, edits=tuple(edits.values()))
        changed[name] = item
    return smaller.replace(values=changed)
