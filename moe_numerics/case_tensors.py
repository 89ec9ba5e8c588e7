"""From the numbers of a case to the bits of its tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moe_numerics import values
from moe_numerics.checked import CaseError, one_of
from moe_numerics.product_values import PRODUCT_KINDS

if TYPE_CHECKING:
    from moe_numerics.cases import Case, TensorSpec, Values, Window

_KINDS = {**values.KINDS, **PRODUCT_KINDS}


def fill(case: Case, spec: TensorSpec) -> NDArray[Any]:
    """The bits of a tensor whose numbers the case describes: uint16 for bfloat16, uint32 for float32.

    Raises CaseError for a kind that the tensor cannot have, for edits outside it, and for a window or edits of what
    experts have one of.
    """
    item = case.values.get(spec.name) or case.default_values(spec)
    is_prob = spec.kind == "prob"
    one_of(f"values.{spec.name}.kind", item.kind, tuple(values.PROB_KINDS if is_prob else _KINDS))
    parts, hidden = (1, 1) if is_prob else (spec.columns, case.width(spec))
    width = parts * hidden
    if spec.kind in ("bias", "weights", "alpha"):
        if item.window is not None or item.edits:
            raise CaseError(
                f"values.{spec.name} has a window or edits, whose rows are tokens: {spec.name} has none of them"
            )
        return _each_expert(case, spec, item, parts, hidden)
    if item.window is not None and item.window.part_end > parts:
        raise CaseError(f"values.{spec.name}.window.part_end = {item.window.part_end} is more than {parts}")
    flat = _padding(case, spec, width)
    owned = case.valid_rows()
    if len(owned):
        flat[owned] = _owned(case, spec, item, parts, hidden)
    for i, (row, column, bits) in enumerate(item.edits):
        where = f"values.{spec.name}.edits[{i}]"
        if column >= width:
            raise CaseError(f"{where}.column = {column} is past the {width} columns of {spec.name}")
        if bits >> (8 * flat.dtype.itemsize):
            raise CaseError(f"{where}.bits = 0x{bits:x} has more bits than {spec.dtype}")
        flat[row, column] = bits
    return flat[:, 0] if is_prob else flat


def window_edits(case: Case, spec: TensorSpec, item: Values, limit: int) -> list[tuple[int, int, int]] | None:
    """(row, column, bits) of the elements inside the item's window; None if there are more than `limit`."""
    if item.window is None:
        return None
    row, row_end, column, column_end, part, part_end = item.window
    owned = case.valid_rows()
    rows = owned[(owned >= row) & (owned < row_end)]
    if len(rows) * (column_end - column) * (part_end - part) > limit:
        return None
    bits = fill(case.replace(values={spec.name: item}), spec).reshape(case.capacity, -1)
    parts = 1 if spec.kind == "prob" else spec.columns
    physical = [case.physical_column(p, c, parts) for c in range(column, column_end) for p in range(part, part_end)]
    return [(int(r), c, int(bits[r, c])) for r in rows for c in physical]


def _each_expert(case: Case, spec: TensorSpec, item: Values, parts: int, hidden: int) -> NDArray[Any]:
    """The bits of a bias [experts, parts * hidden], of weights or of alpha [experts]."""
    expert = np.arange(len(case.counts), dtype=np.uint64)[:, None]
    if spec.kind == "bias":
        return _filled(case, spec, item, parts, hidden, expert, np.zeros_like(expert))
    if spec.kind == "alpha":
        return _filled(case, spec, item, 1, 1, expert, np.zeros_like(expert))[:, 0]
    row = np.arange(spec.columns * case.hidden, dtype=np.uint64)[:, None]
    column = np.arange(case.depth, dtype=np.uint64)[None, :]
    places = values.Places(item.seed, spec.name, spec.dtype, 0, 1, expert[:, :, None], row, column)
    bits = values.to_dtype(values.scaled(_KINDS[item.kind](places), item.exponent), spec.dtype)
    # Columns are what is summed: of a matrix that stands the other way round, what lies in rows.
    return bits if spec.width == "depth" else np.ascontiguousarray(bits.transpose(0, 2, 1))


def _owned(case: Case, spec: TensorSpec, item: Values, parts: int, hidden: int) -> NDArray[Any]:
    counts = np.array(case.counts)
    expert = np.repeat(np.arange(len(counts), dtype=np.uint64), counts)[:, None]
    row = np.concatenate([np.arange(count, dtype=np.uint64) for count in case.counts])[:, None]
    return _filled(case, spec, item, parts, hidden, expert, row)


def _filled(
    case: Case,
    spec: TensorSpec,
    item: Values,
    parts: int,
    hidden: int,
    expert: NDArray[np.uint64],
    row: NDArray[np.uint64],
) -> NDArray[Any]:
    """The bits of rows that belong to `expert` and have number `row` in it, both [rows, 1]."""
    column = np.arange(hidden, dtype=np.uint64)[None, :]
    kind = {**_KINDS, **values.PROB_KINDS}[item.kind]
    planes = []
    for part in range(parts):
        places = values.Places(item.seed, spec.name, spec.dtype, part, parts, expert, row, column)
        bits = values.scaled(kind(places), item.exponent)
        if item.window is not None:
            bits = np.where(_inside(case, item.window, part, hidden), bits, values.PLAIN)
        planes.append(values.to_dtype(bits, spec.dtype))
    block = hidden if parts == 1 else case.column_block
    tokens = len(row)
    stacked = np.stack([plane.reshape(tokens, hidden // block, block) for plane in planes], axis=2)
    return stacked.reshape(tokens, parts * hidden)


def _inside(case: Case, window: Window, part: int, hidden: int) -> NDArray[np.bool_]:
    rows = case.valid_rows()[:, None]
    columns = np.arange(hidden)[None, :]
    within = (columns >= window.column) & (columns < window.column_end)
    return (rows >= window.row) & (rows < window.row_end) & within & (window.part <= part < window.part_end)


def _padding(case: Case, spec: TensorSpec, width: int) -> NDArray[Any]:
    shape = (case.capacity, width)
    if case.padding_fill == "random":
        row = np.arange(case.capacity, dtype=np.uint64)[:, None]
        column = np.arange(width, dtype=np.uint64)[None, :]
        name, expert = f"padding of {spec.name}", np.zeros_like(row)
        places = values.Places(case.seed, name, spec.dtype, 0, 1, expert, row, column)
        bits = values.KINDS["random_bits"](places)
    else:
        fills = {"zero": np.uint32(0), "nan": values.NAN, "inf": values.INFINITY}
        bits = np.full(shape, fills[case.padding_fill])
    return np.ascontiguousarray(values.to_dtype(bits, spec.dtype))
