"""Drawing cases from a source of integers: a seed for campaigns, Hypothesis for tests.

The draws are ordered and bounded so that smaller integers mean simpler cases: fewer experts, fewer
tokens, fewer columns, `plain` values, no edits. A window of values that has shrunk to a few elements
becomes edits of a plain tensor, so that the case shows the bits that matter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from moe_numerics import checked, values
from moe_numerics.cases import EXPERT_KINDS, PADDING_FILLS, VALUE_KINDS, Case, Edit, Option, TensorSpec, Values
from moe_numerics.checked import CaseError, FrozenMapping
from moe_numerics.product_values import FACTOR_KINDS, PRODUCT_KINDS, PRODUCT_NOT_FINITE
from moe_numerics.reducing import (
    EXTRACTED,
    PLAIN_KINDS,
    extent,
    is_plain,
    narrower,
    windowed,
    without_empty_experts,
    without_plain_tokens,
)
from moe_numerics.token_counts import DRAWN_SHAPES, SHAPES, SeededSource, Source, at_most, draw_counts, one_of

EDIT_BITS = (
    0x0000, 0x8000, 0x3F80, 0xBF80, 0x0001, 0x007F, 0x0080, 0x0460, 0x0461, 0x40E0, 0xC0E0, 0x43E0,
    0x43E8, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0xFFC0, 0x7F81,
)  # fmt: skip
"""Upper 16 bits of edits, finite ones first: zeros, ones, the ends of the subnormals, 448 * 2**-127 and
the next bfloat16 (where E8M0 leaves code 0), 7, 448, the E4M3 saturation midpoint 464, the largest,
infinities, NaNs."""
MILD_EDITS = (0x0000, 0x8000, 0x3F80, 0xBF80, 0x40E0, 0xC0E0, 0x43E0, 0x43E8)
"""Those among them whose products and squares stay far from the ends of the range."""

SCALED = ("plain", "gaussian", "constant", "outliers", "spread", "cancelling")
EXPONENTS = (0, 0, 0, 0, 3, -8, 6, 40, -60, -120)
FACTOR_EXPONENTS = (0, 0, 0, 0, -3, -6, -3, 2, -60, 40)
ALPHA_KINDS = ("plain", "gaussian", "gaussian", "wide", "kinks", "specials")
_NOT_FINITE = (*values.NOT_FINITE, *PRODUCT_NOT_FINITE)


@dataclass(frozen=True)
class Space:
    """The cases that a path takes.

    multiple: what hidden sizes are multiples of. depth_multiple: the same of depths, up to max_depth; 0 where the
    path sums no matrix product. factor_kinds, factor_exponents: kinds and scales of the factors of one, kinds from
    `product_values` too. edit_bits: the upper halves of edits. alignments, paddings (whether counts are given),
    probs, layouts, offsets_dtypes, fills, options: what is drawn from, simplest first. A layout is drawn only if
    the hidden size is a multiple of its blocks. max_elements: rows times hidden of nine in ten cases; big_elements:
    of the others. empty_buffer: whether a case may have no row at all. allow_specials: whether values may be NaN or
    infinite (padding rows may anyway). kinds: names of `values.KINDS` to draw from.
    """

    path: str
    inputs: tuple[TensorSpec, ...]
    profile: str = "suite"
    max_experts: int = 16
    max_rows: int = 4096
    max_hidden: int = 512
    max_tail: int = 40
    multiple: int = 32
    max_depth: int = 256
    depth_multiple: int = 0
    alignments: tuple[int, ...] = (1, 16, 32, 1, 128, 1, 8, 64, 256, 1)
    paddings: tuple[bool, ...] = (False, True)
    probs: tuple[bool, ...] = (False, True)
    layouts: tuple[str, ...] = ("halves", "interleaved:32", "interleaved:64")
    offsets_dtypes: tuple[str, ...] = ("int32", "int64")
    fills: tuple[str, ...] = PADDING_FILLS
    options: Mapping[str, tuple[Option, ...]] = field(default_factory=FrozenMapping)
    kinds: tuple[str, ...] = tuple(values.KINDS)
    factor_kinds: tuple[str, ...] = FACTOR_KINDS
    factor_exponents: tuple[int, ...] = FACTOR_EXPONENTS
    edit_bits: tuple[int, ...] = EDIT_BITS
    shapes: tuple[str, ...] = DRAWN_SHAPES
    allow_specials: bool = True
    max_elements: int = 50_000
    big_elements: int = 300_000
    empty_buffer: bool = True

    def __post_init__(self) -> None:
        for name in ("max_experts", "max_rows", "multiple", "max_elements", "big_elements"):
            checked.integer(name, getattr(self, name), 1)
        checked.integer("max_tail", self.max_tail, 0)
        checked.integer("max_hidden", self.max_hidden, self.multiple)
        checked.integer("depth_multiple", self.depth_multiple, 0)
        checked.integer("max_depth", self.max_depth, self.depth_multiple)
        for name in (
            "alignments",
            "paddings",
            "probs",
            "layouts",
            "offsets_dtypes",
            "fills",
            "kinds",
            "factor_kinds",
            "factor_exponents",
            "edit_bits",
            "shapes",
        ):
            if not getattr(self, name):
                raise CaseError(f"{name} = () leaves nothing to draw: expected at least one")
        for name, known in (
            ("kinds", tuple(values.KINDS)),
            ("factor_kinds", (*values.KINDS, *PRODUCT_KINDS)),
            ("shapes", tuple(SHAPES)),
        ):
            for item in getattr(self, name):
                checked.one_of(name, item, known)
        for name in ("kinds", "factor_kinds"):
            if not self.allow_specials and not set(getattr(self, name)) - set(_NOT_FINITE):
                raise CaseError(f"{name} = {getattr(self, name)} leave no kind without NaN and infinities")
        blocks = [int(layout.partition(":")[2] or 1) for layout in self.layouts]
        if not any(block <= self.max_hidden and self.multiple % block == 0 for block in blocks):
            raise CaseError(f"layouts = {self.layouts} leave no layout for every multiple of {self.multiple} columns")


def draw_case(source: Source, space: Space) -> Case:
    """One case of the space; the integers of `source` decide everything."""
    elements = space.max_elements if source.integer(0, 9) < 9 else space.big_elements
    hidden = _draw_size(source, min(space.max_hidden, elements), space.multiple)
    depth = _draw_size(source, space.max_depth, space.depth_multiple) if space.depth_multiple else 0
    rows = max(1, min(space.max_rows, elements // hidden))
    padded = one_of(source, space.paddings)
    fitting = [a for a in space.alignments if a <= rows] or [min(space.alignments)]
    alignment = one_of(source, fitting)
    room = min(one_of(source, (0, 0, 0, 1, 5, 64)), rows // alignment * alignment)
    room = room if padded else 0
    counts = draw_counts(
        source,
        experts=space.max_experts,
        rows=max(rows, alignment),
        multiple=1 if padded else alignment,
        alignment=alignment,
        room=room,
        shapes=space.shapes,
    )
    tail = max(0, source.integer(0, 2 * space.max_tail) - space.max_tail)
    if not (space.empty_buffer or any(counts) or room or tail):
        tail = 1
    layouts = [x for x in space.layouts if hidden % int(x.partition(":")[2] or 1) == 0]
    case = Case(
        path=space.path,
        profile=space.profile,
        counts=counts,
        hidden=hidden,
        depth=depth,
        alignment=alignment,
        padded=padded,
        room=room,
        tail=tail,
        layout=one_of(source, layouts),
        offsets_dtype=one_of(source, space.offsets_dtypes),
        prob=one_of(source, space.probs) and any(spec.kind == "prob" for spec in space.inputs),
        options={name: one_of(source, choices) for name, choices in space.options.items()},
        seed=source.integer(0, (1 << 32) - 1),
        padding_fill=one_of(source, space.fills),
    )
    case = case.replace(values=_draw_values(source, space, case))
    # Last, because to drop experts and tokens changes seeded values, which by now have become edits.
    keep_wide, keep_empty, keep_plain = (source.integer(0, 15) > 0 for _ in range(3))
    if is_plain(case):
        least = math.lcm(space.multiple, int(case.layout.partition(":")[2] or 1))
        shallow = min(depth, space.depth_multiple)
        case = case if keep_wide else narrower(case, space.inputs, min(hidden, least), case.layout, shallow)
        case = case if keep_empty else without_empty_experts(case)
        case = case if keep_plain else without_plain_tokens(case)
    return case


def draw_cases(n: int, seed: int, space: Space) -> list[Case]:
    """`n` cases of the space, the same on every machine; the first ones do not depend on how many follow."""
    return [draw_case(SeededSource(values.key("case", space.path, seed, i)), space) for i in range(n)]


def _draw_size(source: Source, largest: int, multiple: int) -> int:
    most = max(1, largest // multiple)
    few = source.integer(0, 3) < 3
    return multiple * source.integer(1, min(most, 4) if few else most)


def _draw_values(source: Source, space: Space, case: Case) -> dict[str, Values]:
    kinds, factor_kinds = (
        [kind for kind in drawn if space.allow_specials or kind not in _NOT_FINITE]
        for drawn in (space.kinds, space.factor_kinds)
    )
    apart = source.integer(0, 3) == 3
    seed = source.integer(0, (1 << 32) - 1)
    common = one_of(source, kinds)
    result = {}
    for spec in space.inputs:
        if spec.kind == "prob" and case.prob:
            item = _seeded(one_of(source, tuple(values.PROB_KINDS)), seed)
        elif spec.kind == "alpha":
            item = _seeded(one_of(source, ALPHA_KINDS), seed)
        elif spec.kind in VALUE_KINDS and spec.kind != "prob":
            own = one_of(source, factor_kinds if spec.factor else kinds)
            exponent = one_of(source, space.factor_exponents if spec.factor else EXPONENTS)
            kind = own if apart or spec.factor else common
            item = _seeded(kind, seed, exponent if kind in SCALED else 0)
        else:
            continue
        if spec.kind not in EXPERT_KINDS:
            item = _windowed(source, case, spec, item)
            item = _edited(source, space, case, spec, item)
        result[spec.name] = item
    return result


def _seeded(kind: str, seed: int, exponent: int = 0) -> Values:
    return Values(kind, 0 if kind in PLAIN_KINDS else seed, exponent)


def _windowed(source: Source, case: Case, spec: TensorSpec, item: Values) -> Values:
    """The item with a window, which nearly always is everything and then is left out.

    The ends shrink first, to the first element that matters, and then the sizes. How many integers are drawn
    does not depend on them: what a later integer means must not change while an earlier one shrinks.
    """
    sizes = extent(case, spec)
    ends = [at_most(source, size) for size in sizes]
    starts = [end - at_most(source, end) for end in ends]
    if item.kind in PLAIN_KINDS or (not any(starts) and tuple(ends) == sizes and math.prod(sizes) > EXTRACTED):
        return item
    return windowed(case, spec, item, starts, ends)


def _edited(source: Source, space: Space, case: Case, spec: TensorSpec, item: Values) -> Values:
    number = max(0, source.integer(0, 8) - 5)
    if not case.tokens or not number:
        return item
    width = 1 if spec.kind == "prob" else spec.columns * case.width(spec)
    finite = tuple(bits for bits in space.edit_bits if bits & 0x7F80 != 0x7F80)
    patterns = space.edit_bits if space.allow_specials else finite
    rows = case.valid_rows()
    edits = {(edit.row, edit.column): edit for edit in item.edits}
    for _ in range(number):
        row, column = int(rows[source.integer(0, len(rows) - 1)]), source.integer(0, width - 1)
        bits = one_of(source, patterns)
        edits[row, column] = Edit(row, column, bits if spec.dtype == "bfloat16" else bits << 16)
    return replace(item, edits=tuple(edits.values()))
