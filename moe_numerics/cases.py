"""One test input of a path: ragged token counts, shapes and values, as JSON that replays exactly.

A case stores numbers only. `Case.tensors` builds the inputs from them without any library's random generator,
so the same file gives the same bits on every machine and version.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_numerics import case_tensors, checked
from moe_numerics import values as value_kinds
from moe_numerics.checked import CaseError, FrozenMapping
from moe_numerics.product_values import PRODUCT_KINDS

if TYPE_CHECKING:
    import torch

SCHEMA = 1
MAX_ALIGNMENT = 256
MAX_ELEMENTS = 1 << 36
PADDING_FILLS = ("zero", "nan", "inf", "random")
OFFSETS_DTYPES = ("int32", "int64")
TENSOR_KINDS = ("values", "prob", "bias", "weights", "alpha", "offsets", "counts")
VALUE_KINDS = ("values", "prob", "bias", "weights", "alpha")
"""Kinds of tensors whose numbers a case describes."""
EXPERT_KINDS = ("bias", "weights", "alpha")
"""Kinds of tensors that hold something for each expert: of a seeded kind, without window and edits."""
SIZES = ("hidden", "depth")

Option = str | int | float | bool | None


class Edit(NamedTuple):
    """One element set to given bits: row of the buffer, column of the tensor as it lies in memory, bits."""

    row: int
    column: int
    bits: int

    def __repr__(self) -> str:
        return f"Edit({self.row}, {self.column}, 0x{self.bits:04x})"


class Window(NamedTuple):
    """Rows [row, row_end) of the buffer, columns [column, column_end) of the parts [part, part_end)."""

    row: int
    row_end: int
    column: int
    column_end: int
    part: int
    part_end: int


@dataclass(frozen=True)
class Values:
    """What one tensor holds: a seeded kind, times 2**exponent, inside a window if there is one, then edits.

    kind: a name from `values.KINDS`, from `product_values.PRODUCT_KINDS`, or from `values.PROB_KINDS` for router
    probabilities.
    window: outside it every element is 1.0. edits: the last word on single elements, padding rows included.
    """

    kind: str = "plain"
    seed: int = 0
    exponent: int = 0
    window: Window | None = None
    edits: tuple[Edit, ...] = ()

    def __post_init__(self) -> None:
        kinds = (*value_kinds.KINDS, *PRODUCT_KINDS, *value_kinds.PROB_KINDS)
        checked.one_of("kind", self.kind, kinds)
        checked.integer("seed", self.seed, 0, (1 << 64) - 1)
        checked.integer("exponent", self.exponent, -300, 300)
        if self.window is not None:
            object.__setattr__(self, "window", checked.record("window", self.window, Window))
            for axis in ("row", "column", "part"):
                start, end = getattr(self.window, axis), getattr(self.window, f"{axis}_end")
                if end < start:
                    raise CaseError(f"window.{axis}_end = {end} is less than window.{axis} = {start}")
        edits = checked.items("edits", self.edits)
        object.__setattr__(
            self, "edits", tuple(checked.record(f"edits[{i}]", edit, Edit) for i, edit in enumerate(edits))
        )
        for i, edit in enumerate(self.edits):
            checked.integer(f"edits[{i}].bits", edit.bits, 0, (1 << 32) - 1)

    def __repr__(self) -> str:
        return _short_repr(self)


@dataclass(frozen=True)
class TensorSpec:
    """One input of a path.

    kind: "values", of `columns` times hidden columns, in the case's layout if `columns` is more than 1
    (gate_up: 2, grad and x: 1); "bias": a row of such columns for each expert; "weights": a matrix for each expert;
    "alpha" [experts]; "prob" [capacity]; "offsets" [experts + 1] or "counts" [experts], whose dtype the case and int32
    give. Those for each expert are of a seeded kind without window and edits.
    width: "hidden", or "depth" for a tensor whose columns are those that the path's matrix product sums. Weights of
    width "depth" are [experts, columns * hidden, depth], of width "hidden" [experts, depth, columns * hidden].
    factor: whether a matrix product takes it, for which `product_values` has kinds.
    """

    name: str
    dtype: str = "bfloat16"
    kind: str = "values"
    columns: int = 1
    width: str = "hidden"
    factor: bool = False

    def __post_init__(self) -> None:
        checked.one_of("kind", self.kind, TENSOR_KINDS)
        if self.kind in VALUE_KINDS:
            checked.one_of("dtype", self.dtype, tuple(value_kinds.MANTISSA_BITS))
        checked.integer("columns", self.columns, 1, 64)
        checked.one_of("width", self.width, SIZES)

    @property
    def shape(self) -> str:
        """The shape in words, for people: `[capacity, 2 * hidden]`."""
        hidden = f"{self.columns} * hidden" if self.columns > 1 else "hidden"
        if self.kind == "weights":
            return f"[experts, {hidden}, depth]" if self.width == "depth" else f"[experts, depth, {hidden}]"
        if self.kind in ("values", "bias"):
            columns = "depth" if self.width == "depth" else hidden
            return f"[{'experts' if self.kind == 'bias' else 'capacity'}, {columns}]"
        return {"prob": "[capacity]", "offsets": "[experts + 1]"}.get(self.kind, "[experts]")


@dataclass(frozen=True)
class Case:
    """One input of a path.

    counts: valid rows of each expert. alignment: an expert's region is its count, or `room` if that is more,
    rounded up to this. padded: whether kernels get the counts as a tensor; if not, all rows of a region are
    valid, so counts must be multiples of the alignment. tail: rows past the last region.
    hidden, layout: `halves` (all gate columns, then all up columns) or `interleaved:B` (B gate, B up, again).
    depth: the other size of a matrix product, which it sums; 0 for a path without one.
    prob: whether router probabilities are given. options: further choices of the path.
    values: kind of each tensor by name; a tensor without one is gaussian with the case's seed (prob: router).
    padding_fill: what rows that no expert owns hold: `zero`, `nan`, `inf` or `random` bits.
    """

    path: str
    counts: tuple[int, ...]
    hidden: int
    profile: str = "suite"
    depth: int = 0
    alignment: int = 1
    padded: bool = False
    room: int = 0
    tail: int = 0
    layout: str = "halves"
    offsets_dtype: str = "int32"
    prob: bool = False
    options: Mapping[str, Option] = field(default_factory=FrozenMapping)
    values: Mapping[str, Values] = field(default_factory=FrozenMapping)
    seed: int = 0
    padding_fill: str = "zero"

    def __post_init__(self) -> None:
        for name in ("path", "profile"):
            value = getattr(self, name)
            if not isinstance(value, str) or not re.fullmatch(r"[\w.@+:/-]+", value):
                raise CaseError(f"{name} = {value!r} is not a name: expected letters, digits and ._-@+:/")
        object.__setattr__(self, "counts", tuple(checked.items("counts", self.counts)))
        if not self.counts:
            raise CaseError("counts = [] is empty: expected the tokens of at least one expert")
        for i, count in enumerate(self.counts):
            checked.integer(f"counts[{i}]", count, 0)
        checked.integer("hidden", self.hidden, 1)
        checked.integer("depth", self.depth, 0)
        checked.integer("alignment", self.alignment, 1, MAX_ALIGNMENT)
        checked.integer("room", self.room, 0)
        checked.integer("tail", self.tail, 0)
        checked.integer("seed", self.seed, 0, (1 << 64) - 1)
        for name in ("padded", "prob"):
            if not isinstance(getattr(self, name), bool):
                raise CaseError(f"{name} = {getattr(self, name)!r} is neither true nor false")
        checked.one_of("offsets_dtype", self.offsets_dtype, OFFSETS_DTYPES)
        checked.one_of("padding_fill", self.padding_fill, PADDING_FILLS)
        self._check_layout()
        self._check_rows()
        object.__setattr__(self, "options", checked.mapping("options", self.options))
        for name, option in self.options.items():
            if option is not None and not isinstance(option, str | int | float):
                raise CaseError(f"options.{name} = {option!r} is not text, a number, true, false or null")
            if isinstance(option, float) and not np.isfinite(option):
                raise CaseError(f"options.{name} = {option!r} is not finite: JSON has no such number")
        object.__setattr__(self, "values", checked.mapping("values", self.values))
        for name, item in self.values.items():
            if not isinstance(item, Values):
                raise CaseError(f"values.{name} = {item!r} is not a Values")
            self._check_places(f"values.{name}", item)

    def _check_layout(self) -> None:
        match = re.fullmatch(r"halves|interleaved:([1-9]\d*)", str(self.layout))
        if match is None:
            raise CaseError(f"layout = {self.layout!r} is unknown: expected halves or interleaved:B")
        if match[1] is not None and int(match[1]) % 32:
            raise CaseError(f"layout = {self.layout!r}: {match[1]} is not a multiple of 32 columns")
        if self.hidden % self.column_block:
            raise CaseError(f"hidden = {self.hidden} is not a multiple of the blocks of layout {self.layout}")

    def _check_rows(self) -> None:
        if not self.padded:
            if self.room:
                raise CaseError(f"room = {self.room} without counts: expected 0, or padded = true")
            for i, count in enumerate(self.counts):
                if count % self.alignment:
                    raise CaseError(
                        f"counts[{i}] = {count} is not a multiple of alignment = {self.alignment}: "
                        "expected one, or padded = true"
                    )
        if self.offsets_dtype == "int32" and self.offsets[-1] >= 1 << 31:
            raise CaseError(f"counts end at row {self.offsets[-1]}, past int32: use offsets_dtype int64")
        columns = max(self.hidden, self.depth)
        if self.capacity * columns > MAX_ELEMENTS:
            raise CaseError(
                f"{self.capacity} rows of hidden = {self.hidden} and depth = {self.depth} are more than "
                f"{MAX_ELEMENTS} elements: expected fewer rows or columns"
            )
        if len(self.counts) * self.hidden * self.depth > MAX_ELEMENTS:
            raise CaseError(
                f"weights of {len(self.counts)} experts, hidden = {self.hidden} and depth = {self.depth} are more "
                f"than {MAX_ELEMENTS} elements: expected fewer experts or columns"
            )

    def _check_places(self, where: str, item: Values) -> None:
        for i, edit in enumerate(item.edits):
            if edit.row >= self.capacity:
                raise CaseError(f"{where}.edits[{i}].row = {edit.row} is past the {self.capacity} rows")
        if item.window is not None:
            for end, size in (("row_end", self.capacity), ("column_end", max(self.hidden, self.depth))):
                if getattr(item.window, end) > size:
                    raise CaseError(f"{where}.window.{end} = {getattr(item.window, end)} is more than {size}")

    @property
    def column_block(self) -> int:
        """Columns of one part that lie side by side: hidden for `halves`."""
        return self.hidden if self.layout == "halves" else int(self.layout.partition(":")[2])

    @property
    def regions(self) -> tuple[int, ...]:
        """Rows of each expert's region, valid ones and padding."""
        return tuple(-(-max(count, self.room) // self.alignment) * self.alignment for count in self.counts)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each expert's region starts, and where the last one ends."""
        offsets = [0]
        for region in self.regions:
            offsets.append(offsets[-1] + region)
        return tuple(offsets)

    @property
    def capacity(self) -> int:
        """Rows of the buffer: all regions and the tail."""
        return self.offsets[-1] + self.tail

    @property
    def tokens(self) -> int:
        """Valid rows of all experts."""
        return sum(self.counts)

    def valid_rows(self) -> NDArray[np.int64]:
        """Buffer rows that experts own, [tokens], ascending."""
        return np.concatenate(
            [np.arange(s, s + n, dtype=np.int64) for s, n in zip(self.offsets, self.counts, strict=False)]
        )

    def locate(self, row: int) -> tuple[int, int] | None:
        """(expert, row in the expert) of a buffer row; None for padding."""
        for expert, (start, count) in enumerate(zip(self.offsets, self.counts, strict=False)):
            if start <= row < start + count:
                return expert, row - start
        return None

    def width(self, spec: TensorSpec) -> int:
        """Columns of one part of an input: its hidden or depth."""
        return self.depth if spec.width == "depth" else self.hidden

    def physical_column(self, part: int, column: int, parts: int) -> int:
        """The column of a `parts` * hidden wide tensor in which column `column` of part `part` lies."""
        block = self.column_block
        return (column // block) * block * parts + part * block + column % block

    def logical_column(self, physical: int, parts: int) -> tuple[int, int]:
        """(part, column) of a column of a `parts` * hidden wide tensor: the inverse of `physical_column`."""
        group, within = divmod(physical, self.column_block * parts)
        part, column = divmod(within, self.column_block)
        return part, group * self.column_block + column

    def default_values(self, spec: TensorSpec) -> Values:
        """What an input that `values` does not name holds: gaussian, or a router's probabilities."""
        return Values("router" if spec.kind == "prob" else "gaussian", self.seed)

    def replace(self, **changes: Any) -> Case:
        """A copy with some fields changed; raises CaseError like the constructor."""
        return dataclasses.replace(self, **changes)

    def bits(self, spec: TensorSpec) -> NDArray[Any]:
        """The bits of one input: uint16 for bfloat16, uint32 for float32, or int32 and int64 integers.

        Shapes as in `TensorSpec`. Raises CaseError for edits or windows outside the tensor.
        """
        if spec.kind == "offsets":
            return np.array(self.offsets, dtype=self.offsets_dtype)
        if spec.kind == "counts":
            return np.array(self.counts, dtype=np.int32)
        return case_tensors.fill(self, spec)

    def tensors(self, inputs: Sequence[TensorSpec], device: str = "cpu") -> dict[str, torch.Tensor]:
        """The inputs by name, on `device`. Counts only if `padded`, probabilities only if `prob`.

        Raises CaseError if `values` names a tensor that is not among the inputs.
        """
        import torch

        known = [spec.name for spec in inputs if spec.kind in VALUE_KINDS]
        for name in self.values:
            if name not in known:
                raise CaseError(f"values.{name} is no input of {self.path}: expected {checked.listed(known)}")
        result = {}
        for spec in inputs:
            if (spec.kind == "counts" and not self.padded) or (spec.kind == "prob" and not self.prob):
                continue
            bits = np.ascontiguousarray(self.bits(spec))
            # torch has no arithmetic on its unsigned types, and views need none of it.
            signed = bits.view({2: np.int16, 4: np.int32, 8: np.int64}[bits.dtype.itemsize])
            tensor = torch.from_numpy(signed)
            if spec.kind in VALUE_KINDS:
                tensor = tensor.view(torch.bfloat16 if spec.dtype == "bfloat16" else torch.float32)
            result[spec.name] = tensor.to(device)
        return result

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values that `from_json` turns back into an equal case; bits are hexadecimal text."""
        result: dict[str, Any] = {"schema": SCHEMA}
        for item in dataclasses.fields(self):
            if item.name != "depth" or self.depth:
                result[item.name] = getattr(self, item.name)
        result["counts"] = list(self.counts)
        result["options"] = dict(self.options)
        result["values"] = {
            name: {
                "kind": item.kind,
                "seed": item.seed,
                "exponent": item.exponent,
                "window": None if item.window is None else list(item.window),
                "edits": [[row, column, f"0x{bits:04x}"] for row, column, bits in item.edits],
            }
            for name, item in self.values.items()
        }
        return result

    @classmethod
    def from_json(cls, data: object) -> Case:
        """The case that `to_json` gave. Keys with a default may be absent; raises CaseError for all else."""
        given = checked.keys("the case", data, {"schema", *(item.name for item in dataclasses.fields(cls))})
        for name in ("schema", "path", "counts", "hidden"):
            if name not in given:
                raise CaseError(f"{name} is missing: a case needs schema, path, counts and hidden")
        if given.pop("schema") != SCHEMA or isinstance(data["schema"], bool):  # type: ignore[index]
            raise CaseError(f"schema = {data['schema']!r} is unknown: expected {SCHEMA}")  # type: ignore[index]
        if "values" in given:
            items = checked.keys("values", given["values"], None)
            given["values"] = {name: _values_from_json(name, item) for name, item in items.items()}
        return cls(**given)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Case:
        """The case in a JSON file; raises CaseError, which names the file, for one that cannot be read."""
        try:
            text = Path(path).read_text(encoding="utf-8")
            read = json.JSONDecoder(object_pairs_hook=checked.unique, parse_constant=checked.refuse_constant)
            return cls.from_json(read.decode(text))
        except OSError as error:
            raise CaseError(f"{path}: cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise CaseError(f"{path}: byte {error.start} is not UTF-8 text") from error
        except json.JSONDecodeError as error:
            raise CaseError(f"{path}: line {error.lineno} is not JSON: {error.msg}") from error
        except RecursionError as error:
            raise CaseError(f"{path}: is nested too deeply for a case") from error
        except ValueError as error:
            # A CaseError, or an integer of more digits than Python reads.
            raise CaseError(f"{path}: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the case to a JSON file, whole or not at all."""
        target = Path(path)
        part = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            part.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)

    def digest(self) -> str:
        """Twelve hexadecimal digits that equal cases share."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

    def describe(self) -> str:
        """One line for people: `expert 1 has 1 token; expert 1 token 0: x[3] is 0x0461`."""
        parts = [f"{len(self.counts)} expert{'s' * (len(self.counts) != 1)}, hidden {self.hidden}"]
        if self.depth:
            parts[0] += f", depth {self.depth}"
        used = [(expert, count) for expert, count in enumerate(self.counts) if count]
        if not used:
            parts.append("no tokens")
        elif len(used) <= 4:
            parts += [f"expert {expert} has {count} token{'s' * (count != 1)}" for expert, count in used]
        else:
            parts.append(f"{self.tokens} tokens in {len(used)} experts, at most {max(self.counts)}")
        for name, item in self.values.items():
            if item.kind not in ("plain", "ones"):
                parts.append(f"{name} is {item.kind}, seed {item.seed}" + _extra(item))
            elif item.exponent:
                parts.append(f"{name} is {2.0**item.exponent}")
            for row, column, bits in item.edits[:8]:
                place = self.locate(row)
                where = f"row {row} (padding)" if place is None else f"expert {place[0]} token {place[1]}"
                parts.append(f"{where}: {name}[{column}] is 0x{bits:04x}")
            if len(item.edits) > 8:
                parts.append(f"{name} has {len(item.edits) - 8} more edits")
        return "; ".join(parts)

    def __repr__(self) -> str:
        return _short_repr(self)


GAUNTLET_COUNTS = (0, 1, 15, 16, 17, 0, 31, 32, 33, 63, 65, 127, 129, 0, 2, 1)
PRODUCT_COUNTS = (0, 1, 33, 0, 129, 16, 65)
"""Of a path with a matrix product, which costs a whole tile for every expert."""


def gauntlet_case(
    path: str,
    profile: str = "suite",
    *,
    inputs: Sequence[TensorSpec] = (),
    hidden: int = 128,
    depth: int = 0,
    alignment: int = 1,
    padded: bool = True,
    layout: str = "halves",
    prob: bool = True,
    options: Mapping[str, Option] = FrozenMapping(),
    factors: str = "products",
    seed: int = 22,
) -> Case:
    """The fixed case with all of it at once: ties, specials, range ends, empty experts and awkward counts.

    About 600 rows at alignment 1, with a depth 300, the last ones unowned. With `padded`, experts of fewer than 5
    tokens, empty ones included, own a region of 5 rows, so that regions start at odd rows. prob: given if an input is
    one. factors: kind of the factors of a matrix product.
    """
    counts: tuple[int, ...] = PRODUCT_COUNTS if depth else GAUNTLET_COUNTS
    if not padded:
        counts = tuple(-(-count // alignment) * alignment for count in counts)
    return Case(
        path=path,
        profile=profile,
        counts=counts,
        hidden=hidden,
        depth=depth,
        alignment=alignment,
        padded=padded,
        room=5 if padded else 0,
        tail=37,
        layout=layout,
        prob=prob and any(spec.kind == "prob" for spec in inputs),
        options=options,
        values={spec.name: Values(_gauntlet_kind(spec, factors), seed) for spec in inputs if spec.kind in VALUE_KINDS},
        seed=seed,
        padding_fill="nan",
    )


def _gauntlet_kind(spec: TensorSpec, factors: str) -> str:
    if spec.factor:
        return factors
    return {"prob": "router", "alpha": "gaussian"}.get(spec.kind, "mixed")


def _extra(item: Values) -> str:
    text = f" times 2**{item.exponent}" if item.exponent else ""
    if item.window is not None:
        row, row_end, column, column_end = item.window[:4]
        text += f" in rows {row} to {row_end - 1}, columns {column} to {column_end - 1}"
    return text


def _values_from_json(name: str, data: object) -> Values:
    where = f"values.{name}"
    given = checked.keys(where, data, {item.name for item in dataclasses.fields(Values)})
    edits = []
    for i, edit in enumerate(checked.items(f"{where}.edits", given.get("edits", []))):
        row, column, bits = checked.record(f"{where}.edits[{i}]", edit, Edit, integers=False)
        if not isinstance(bits, str) or not re.fullmatch(r"0x[0-9a-fA-F]{1,8}", bits):
            raise CaseError(f"{where}.edits[{i}].bits = {bits!r} is not hexadecimal text such as 0x7fc0")
        edits.append((row, column, int(bits, 16)))
    try:
        return Values(**{**given, "edits": tuple(edits)})
    except CaseError as error:
        raise CaseError(f"{where}.{error}") from error


def _short_repr(item: Any) -> str:
    """The constructor call, without the fields that have their default."""
    shown = []
    for entry in dataclasses.fields(item):
        value = getattr(item, entry.name)
        factory = entry.default_factory
        default = factory() if factory is not dataclasses.MISSING else entry.default
        if value != default:
            shown.append(f"{entry.name}={value!r}")
    return f"{type(item).__name__}({', '.join(shown)})"
