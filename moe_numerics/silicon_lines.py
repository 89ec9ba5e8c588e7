"""Instructions that the silicon comparison runs element by element, as lines of one kernel."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

from moe_numerics.virtual_gpu import micro

__all__ = ["Line", "Probe", "join", "named", "split"]

LARGEST = 20
"""Instructions of one kernel, so that its registers fit."""


@dataclass(frozen=True)
class Line:
    """One instruction, or a few that belong together.

    text: PTX with {d}, {e}, ... for results and {a}, {b}, ... for operands. results: their PTX types.
    """

    text: str
    results: tuple[str, ...]

    @property
    def instructions(self) -> tuple[str, ...]:
        """The dotted names in the text."""
        return tuple(
            match[1] for part in self.text.split(";") if (match := re.match(r"\s*(?:\{\{)?\s*([a-z][\w.:]*)", part))
        )


@dataclass(frozen=True)
class Probe:
    """Lines that run in one kernel on the same operands. kinds: operand kinds of `silicon_data`."""

    name: str
    lines: tuple[Line, ...]
    kinds: tuple[str, ...]

    @property
    def results(self) -> tuple[str, ...]:
        return tuple(kind for line in self.lines for kind in line.results)

    @property
    def operand_types(self) -> tuple[str, ...]:
        return tuple(kind.split(":")[0] for kind in self.kinds)

    def owners(self) -> list[Line]:
        """For each result, the line it comes from."""
        return [line for line in self.lines for _ in line.results]

    def ptx(self, target: str) -> str:
        """The kernel `micro`: a pointer for each result, one for each operand, then the number of elements."""
        letters = "abcghijklmnopqrstuvwxyz"
        operands = {letters[n]: f"%a{n}" for n in range(len(self.kinds))}
        statements, at = [], 0
        for line in self.lines:
            results = {"def"[n] if n < 3 else f"d{n}": f"%d{at + n}" for n in range(len(line.results))}
            statements.append(line.text.format(**operands, **results))
            at += len(line.results)
        body = "\n    ".join(statements).replace("{", "{{").replace("}", "}}")
        return micro.kernel(body, self.results, self.operand_types, target)


def named(names: Iterable[str], result: str, operands: int, text: str = "") -> list[Line]:
    """Lines `name d, a, b, ...;`, or of a text with `NAME` in it."""
    arguments = ", ".join(f"{{{letter}}}" for letter in "abc"[:operands])
    return [Line((text or f"NAME {{d}}, {arguments};").replace("NAME", name), (result,)) for name in names]


def join(*parts: Iterable[str]) -> list[str]:
    """All combinations of modifiers, in order: each part a modifier or nothing."""
    return ["".join(choice) for choice in product(*parts)]


def split(name: str, lines: list[Line], kinds: tuple[str, ...]) -> Iterator[Probe]:
    for n in range(0, len(lines), LARGEST):
        yield Probe(name if len(lines) <= LARGEST else f"{name}.{n // LARGEST}", tuple(lines[n : n + LARGEST]), kinds)
