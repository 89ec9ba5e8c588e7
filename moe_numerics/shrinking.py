"""Shrinking a failing case that no Hypothesis test drew, such as one of a campaign."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from moe_numerics.cases import EXPERT_KINDS, VALUE_KINDS, Case, CaseError, TensorSpec, Values
from moe_numerics.reducing import (
    extent,
    is_plain,
    keep,
    narrower,
    plain_values,
    windowed,
    without_empty_experts,
    without_plain_tokens,
)

Change = Callable[[], Case]


def shrink(
    case: Case,
    inputs: Sequence[TensorSpec],
    fails: Callable[[Case], bool],
    *,
    multiple: int = 32,
    depth_multiple: int = 32,
    attempts: int = 150,
) -> Case:
    """A smaller case that still fails, found by at most `attempts` calls of `fails`; `case` must fail itself.

    multiple, depth_multiple: what hidden sizes and depths are multiples of. The result is the same in every run if
    `fails` is.
    """
    tried = {case}
    progress = True
    while progress:
        progress = False
        for change in _changes(case, inputs, multiple, depth_multiple):
            try:
                candidate = change()
            except CaseError:
                continue
            if candidate in tried:
                continue
            if len(tried) > attempts:
                return case
            tried.add(candidate)
            if fails(candidate):
                case, progress = candidate, True
                break
    return case


def _changes(case: Case, inputs: Sequence[TensorSpec], multiple: int, depth_multiple: int) -> Iterator[Change]:
    """Ways to make the case simpler, the most promising first; some may be impossible."""
    for spec in inputs:
        if spec.kind in EXPERT_KINDS:
            if case.values.get(spec.name) != plain_values(spec):
                yield partial(_with, case, spec, plain_values(spec))
        elif spec.kind in VALUE_KINDS and (spec.kind != "prob" or case.prob):
            yield from _simpler_values(case, spec)
    if is_plain(case):
        yield partial(without_plain_tokens, case)
        yield partial(without_empty_experts, case)
    yield from _fewer_tokens(case)
    for hidden in _smaller(case.hidden, multiple):
        yield partial(narrower, case, inputs, hidden, case.layout)
        yield partial(narrower, case, inputs, hidden, "halves")
    for depth in _smaller(case.depth, depth_multiple):
        yield partial(narrower, case, inputs, case.hidden, case.layout, depth)
    yield partial(narrower, case, inputs, case.hidden, "halves")
    everyone = [range(count) for count in case.counts]
    for change in _SIMPLER_ROWS:
        yield partial(keep, case, everyone, **change)
    probs = [spec.name for spec in inputs if spec.kind == "prob"]
    rest = {name: item for name, item in case.values.items() if name not in probs}
    yield partial(case.replace, prob=False, values=rest)
    yield partial(case.replace, padding_fill="zero")
    yield partial(case.replace, offsets_dtype="int32")
    yield partial(case.replace, seed=0)


def _smaller(size: int, multiple: int) -> list[int]:
    """The least size, half of it, and one step less, as far as they are smaller."""
    return [n for n in (multiple, size // 2 // multiple * multiple, size - multiple) if 0 < n < size]


_SIMPLER_ROWS: tuple[dict[str, Any], ...] = (
    {"tail": 0},
    {"alignment": 1, "padded": False, "room": 0},
    {"padded": False, "room": 0},
    {"room": 0},
    {"alignment": 1},
)


def _fewer_tokens(case: Case) -> Iterator[Change]:
    counts = case.counts
    for size in (max(1, len(counts) // 2), 1):
        for first in range(0, len(counts), size):
            dropped = range(first, first + size)
            yield partial(keep, case, [None if e in dropped else range(n) for e, n in enumerate(counts)])
    for part in (2, 4):
        yield partial(keep, case, [range(n - n // part) for n in counts])
    least = 1 if case.padded else case.alignment
    for expert, count in enumerate(counts):
        for fewer in (0, count // 2 // least * least, count - least):
            if 0 <= fewer < count:
                yield partial(keep, case, [range(fewer if e == expert else n) for e, n in enumerate(counts)])


def _simpler_values(case: Case, spec: TensorSpec) -> Iterator[Change]:
    item = case.values.get(spec.name) or case.default_values(spec)
    plain = plain_values(spec)
    if item != plain:
        yield partial(_with, case, spec, plain)
    if item.kind != plain.kind:
        starts, ends = _box(case, spec, item)
        for axis in range(3):
            middle = (starts[axis] + ends[axis]) // 2
            if starts[axis] < middle:
                first_half = [*ends[:axis], middle, *ends[axis + 1 :]]
                second_half = [*starts[:axis], middle, *starts[axis + 1 :]]
                yield partial(_within, case, spec, item, starts, first_half)
                yield partial(_within, case, spec, item, second_half, ends)
        # A box that two failing elements keep from being halved may still lose a row or column at its ends.
        for axis in range(3):
            if ends[axis] - starts[axis] > 1:
                shorter = [*ends[:axis], ends[axis] - 1, *ends[axis + 1 :]]
                later = [*starts[:axis], starts[axis] + 1, *starts[axis + 1 :]]
                yield partial(_within, case, spec, item, starts, shorter)
                yield partial(_within, case, spec, item, later, ends)
    for i in range(len(item.edits)):
        yield partial(_with, case, spec, replace(item, edits=item.edits[:i] + item.edits[i + 1 :]))


def _box(case: Case, spec: TensorSpec, item: Values) -> tuple[list[int], list[int]]:
    """The item's window as tokens, columns and parts; all of the tensor if it has none."""
    window = item.window
    if window is None:
        return [0, 0, 0], list(extent(case, spec))
    tokens = np.searchsorted(case.valid_rows(), [window.row, window.row_end])
    return [int(tokens[0]), window.column, window.part], [int(tokens[1]), window.column_end, window.part_end]


def _within(case: Case, spec: TensorSpec, item: Values, starts: Sequence[int], ends: Sequence[int]) -> Case:
    return _with(case, spec, windowed(case, spec, item, starts, ends))


def _with(case: Case, spec: TensorSpec, item: Values) -> Case:
    return case.replace(values={**case.values, spec.name: item})
