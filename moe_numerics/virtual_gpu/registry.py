"""The table of instructions: which forms exist, on what evidence, and how each is built.

An entry is a syntax string and a builder. The syntax lists the modifiers in order: `.ftz` must be there, `.ftz?` may,
`type=u32|s32` is one of these, `scope?=cta|gpu` none or one of these. The builder receives the lowering of one
instruction and the modifiers found and returns the step that executes it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from .lowering import Lowering
    from .wave import Wave

Index = npt.NDArray[np.intp] | None
Step = Callable[["Wave", Index], Any]
# Does for `threads` what was taken for more of them; `positions` are theirs among those.
Delayed = Callable[["Wave", npt.NDArray[np.intp], npt.NDArray[np.intp]], None]
Builder = Callable[["Lowering", "Modifiers"], Step]

EVIDENCE = ("silicon", "third party", "manual")


class Modifiers:
    """The modifiers of one instruction by slot name; an absent one is None, a literal one is True or None."""

    def __init__(self, values: dict[str, str]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        return self._values.get(name)

    def get(self, name: str, default: str) -> str:
        return self._values.get(name) or default


@dataclass(frozen=True)
class Slot:
    """One place for a modifier. values: what it may be; literal: whether it is a fixed word."""

    name: str
    values: frozenset[str]
    optional: bool


@dataclass(frozen=True)
class Form:
    """One entry of the table.

    evidence: `silicon` (bits compared on hardware), `third party` (agrees with an independent model) or `manual`
    (from the text of the PTX ISA).
    features: architectures that have it, empty for all. kind: `plain`; `sync` (waits for the lanes it names before it
    runs); `blocking` (may park threads, so ends a run of instructions); `branch`, `exit`.
    """

    opcode: str
    syntax: str
    slots: tuple[Slot, ...]
    build: Builder
    evidence: str
    features: frozenset[str]
    kind: str

    def match(self, modifiers: tuple[str, ...]) -> Modifiers | None:
        found = _match(self.slots, modifiers)
        return None if found is None else Modifiers(found)


def _match(slots: tuple[Slot, ...], modifiers: tuple[str, ...]) -> dict[str, str] | None:
    if not slots:
        return {} if not modifiers else None
    slot = slots[0]
    if modifiers and modifiers[0] in slot.values:
        rest = _match(slots[1:], modifiers[1:])
        if rest is not None:
            return {slot.name: modifiers[0], **rest}
    return _match(slots[1:], modifiers) if slot.optional else None


TABLE: dict[str, list[Form]] = {}


def instruction(
    syntax: str, *, evidence: str = "manual", features: tuple[str, ...] = (), kind: str = "plain"
) -> Callable[[Builder], Builder]:
    """Enters a form into the table."""
    if evidence not in EVIDENCE:
        raise ValueError(f"evidence {evidence!r} is not one of {EVIDENCE}")
    opcode, *words = syntax.split()
    slots = []
    for word in words:
        match = re.fullmatch(r"\.(?P<literal>[\w:]+)(?P<o1>\?)?|(?P<name>\w+)(?P<o2>\?)?=(?P<values>[\w:|]+)", word)
        if match is None:
            raise ValueError(f"{word!r} in {syntax!r} is neither a literal nor a slot")
        if match["literal"]:
            name = re.sub(r"\W", "_", match["literal"])
            slots.append(Slot(name, frozenset({match["literal"]}), match["o1"] is not None))
        else:
            slots.append(Slot(match["name"], frozenset(match["values"].split("|")), match["o2"] is not None))

    def enter(build: Builder) -> Builder:
        form = Form(opcode, syntax, tuple(slots), build, evidence, frozenset(features), kind)
        TABLE.setdefault(opcode, []).append(form)
        return build

    return enter


def forms() -> Iterator[Form]:
    """All entries, in the order of their names."""
    for opcode in sorted(TABLE):
        yield from TABLE[opcode]
