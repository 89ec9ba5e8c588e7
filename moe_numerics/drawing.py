"""Drawing cases from a source of integers: a seed for campaigns, Hypothesis for tests.

The draws are ordered and bounded so that smaller integers mean simpler cases: fewer experts, fewer tokens, fewer
columns, `plain` values, no edits. A window of values that has shrunk to a few elements becomes edits of a plain
tensor, so that the case shows the bits that matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moe_numerics import values
from moe_numerics.case_tensors import window_edits
from moe_numerics.cases import PADDING_FILLS, Case, Edit, Option, TensorSpec, Values, Window
from moe_numerics.checked import FrozenMapping, integer
from moe_numerics.token_counts import SHAPES, SeededSource, Source, at_most, draw_counts, one_of

EXTRACTED = 8
"""Most elements of a window that become edits."""

EDIT_BITS = (
    0x0000, 0x8000, 0x3F80, 0xBF80, 0x0001, 0x007F, 0x0080, 0x0460, 0x0461, 0x40E0, 0xC0E0, 0x43E0,
    0x43E8, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0xFFC0, 0x7F81,
)  # fmt: skip
"""Upper 16 bits of edits, finite ones first: zeros, ones, the ends of the subnormals, 448 * 2**-127 and the next
bfloat16 (where E8M0 leaves code 0), 7, 448, the E4M3 saturation midpoint 464, the largest, infinities, NaNs."""
_FINITE_EDITS = 15

EXPONENTS = (0, 0, 0, 0, 3, -8, 6, 40, -60, -120)


@dataclass(frozen=True)
class Space:
    """The cases that a path takes.

    multiple: what hidden sizes are multiples of. alignments, paddings (whether counts are given), probs,
    layouts, offsets_dtypes, fills, options: what is drawn from, simplest first. A layout is drawn only if the
    hidden size is a multiple of its blocks. max_elements: rows times hidden of nine in ten cases; big_elements:
    of the others. empty_buffer: whether a case may have no row at all. allow_specials: whether values may be NaN
    or infinite (padding rows may anyway). kinds: names of `values.KINDS` to draw from.
    """

    path: str
    inputs: tuple[TensorSpec, ...]
    profile: str = "suite"
    max_experts: int = 16
    max_rows: int = 1024
    max_hidden: int = 512
    max_tail: int = 40
    multiple: int = 32
    alignments: tuple[int, ...] = (1, 16, 32, 8, 64, 128, 256)
    paddings: tuple[bool, ...] = (False, True)
    probs: tuple[bool, ...] = (False, True)
    layouts: tuple[str, ...] = ("halves", "interleaved:32", "interleaved:64")
    offsets_dtypes: tuple[str, ...] = ("int32", "int64")
    fills: tuple[str, ...] = PADDING_FILLS
    options: Mapping[str, tuple[Option, ...]] = field(default_factory=FrozenMapping)
    kinds: tuple[str, ...] = tuple(values.KINDS)
    shapes: tuple[str, ...] = tuple(SHAPES)
    allow_specials: bool = True
    max_elements: int = 50_000
    big_elements: int = 300_000
    empty_buffer: bool = True

    def __post_init__(self) -> None:
        for name in ("max_experts", "max_rows", "multiple", "max_elements", "big_elements"):
            integer(name, getattr(self, name), 1)
        integer("max_tail", self.max_tail, 0)
        integer("max_hidden", self.max_hidden, self.multiple)
        for name in (
            "alignments",
            "paddings",
            "probs",
            "layouts",
            "offsets_dtypes",
            "fills",
            "kinds",
            "shapes",
        ):
            if not getattr(self, name):
                raise ValueError(f"{name} = () leaves nothing to draw: expected at least one")


def draw_case(source: Source, space: Space) -> Case:
    """One case of the space; the integers of `source` decide everything."""
    elements = space.max_elements if source.integer(0, 9) < 9 else space.big_elements
    hidden = _draw_hidden(source, space, elements)
    rows = max(1, min(space.max_rows, elements // hidden))
    padded = one_of(source, space.paddings)
    fitting = [a for a in space.alignments if a <= rows] or [min(space.alignments)]
    alignment = one_of(source, fitting)
    room = min(one_of(source, (0, 0, 0, 1, 5, 64)), rows // alignment * alignment) if padded else 0
    counts = draw_counts(
        source,
        experts=space.max_experts,
        rows=max(rows, alignment),
        multiple=1 if padded else alignment,
        alignment=alignment,
        room=room,
        shapes=space.shapes,
    )
    tail = source.integer(0, space.max_tail) if source.integer(0, 1) else 0
    if not space.empty_buffer and tail == 0 and not any(counts) and not room:
        tail = max(1, min(space.max_tail, 1))
    layouts = [x for x in space.layouts if hidden % int(x.partition(":")[2] or 1) == 0]
    case = Case(
        path=space.path,
        profile=space.profile,
        counts=counts,
        hidden=hidden,
        alignment=alignment,
        padded=padded,
        room=room,
        tail=tail,
        layout=one_of(source, layouts or space.layouts),
        offsets_dtype=one_of(source, space.offsets_dtypes),
        prob=any(spec.kind == "prob" for spec in space.inputs) and one_of(source, space.probs),
        options={name: one_of(source, choices) for name, choices in space.options.items()},
        seed=source.integer(0, (1 << 32) - 1),
        padding_fill=one_of(source, space.fills),
    )
    filled = _draw_values(source, space, case)
    # Dropping empty experts last keeps the values of the others, which the expert's number is part of.
    keep_empty = source.integer(0, 15) > 0
    return case.replace(values=filled) if keep_empty else _without_empty(case, filled)


def draw_cases(n: int, seed: int, space: Space) -> list[Case]:
    """`n` cases of the space, the same on every machine and Python version; the first ones do not depend on n."""
    return [draw_case(SeededSource(values.key("case", space.path, seed, i)), space) for i in range(n)]


def _draw_hidden(source: Source, space: Space, elements: int) -> int:
    most = max(1, min(space.max_hidden, elements) // space.multiple)
    few = source.integer(0, 3) < 3
    return space.multiple * source.integer(1, min(most, 4) if few else most)


def _draw_values(source: Source, space: Space, case: Case) -> dict[str, Values]:
    kinds = [kind for kind in space.kinds if space.allow_specials or kind not in values.NOT_FINITE]
    together = source.integer(0, 3) > 0
    seed = source.integer(0, (1 << 32) - 1)
    common = one_of(source, kinds)
    result = {}
    for spec in space.inputs:
        if spec.kind == "prob" and case.prob:
            item = Values(one_of(source, tuple(values.PROB_KINDS)), seed)
        elif spec.kind == "values":
            kind = common if together else one_of(source, kinds)
            item = Values(kind, seed, one_of(source, EXPONENTS))
        else:
            continue
        item = _windowed(source, case, spec, item)
        result[spec.name] = _edited(source, space, case, spec, item)
    return result


def _windowed(source: Source, case: Case, spec: TensorSpec, item: Values) -> Values:
    """The item with a window, which nearly always is everything and then is left out.

    The ends shrink first, to the first element that matters, and then the sizes.
    """
    tokens, hidden = case.tokens, 1 if spec.kind == "prob" else case.hidden
    token_end, column_end = at_most(source, tokens), at_most(source, hidden)
    token, column = token_end - at_most(source, token_end), column_end - at_most(source, column_end)
    if (token, token_end, column, column_end) == (0, tokens, 0, hidden) and tokens * hidden > EXTRACTED:
        return item
    if token == token_end or column == column_end:
        return Values("ones" if spec.kind == "prob" else "plain")
    rows = case.valid_rows()
    window = Window(int(rows[token]), int(rows[token_end - 1]) + 1, column, column_end)
    windowed = Values(item.kind, item.seed, item.exponent, window)
    edits = window_edits(case, spec, windowed, EXTRACTED)
    if edits is None:
        return windowed
    plain = Values("ones" if spec.kind == "prob" else "plain")
    one = int(values.to_dtype(values.PLAIN.reshape(1), spec.dtype)[0])
    return Values(plain.kind, edits=tuple(Edit(*edit) for edit in edits if edit[2] != one))


def _edited(source: Source, space: Space, case: Case, spec: TensorSpec, item: Values) -> Values:
    number = max(0, source.integer(0, 8) - 5)
    if not case.tokens or not number:
        return item
    width = 1 if spec.kind == "prob" else spec.columns * case.hidden
    patterns = EDIT_BITS if space.allow_specials else EDIT_BITS[:_FINITE_EDITS]
    rows = case.valid_rows()
    edits = {(edit.row, edit.column): edit for edit in item.edits}
    for _ in range(number):
        row, column = int(rows[source.integer(0, len(rows) - 1)]), source.integer(0, width - 1)
        bits = one_of(source, patterns)
        edits[row, column] = Edit(row, column, bits if spec.dtype == "bfloat16" else bits << 16)
    return Values(item.kind, item.seed, item.exponent, item.window, tuple(edits.values()))


def _without_empty(case: Case, filled: Mapping[str, Values]) -> Case:
    """The case without empty experts, if its values then stay what they are."""
    counts = tuple(count for count in case.counts if count)
    placed = all(item.window is None and item.kind in ("plain", "ones") for item in filled.values())
    if not counts or not placed:
        return case.replace(values=filled)
    smaller = case.replace(counts=counts)
    moved = dict(zip(case.valid_rows().tolist(), smaller.valid_rows().tolist(), strict=True))
    kept = {
        name: Values(
            item.kind, edits=tuple(Edit(moved[row], column, bits) for row, column, bits in item.edits)
        )
        for name, item in filled.items()
    }
    return smaller.replace(values=kept)


def value_inputs(inputs: Sequence[TensorSpec]) -> list[str]:
    """Names of the inputs that hold values or probabilities."""
    return [spec.name for spec in inputs if spec.kind in ("values", "prob")]
