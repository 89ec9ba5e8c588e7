"""What PTX text holds: kernels, variables, instructions with their lines, operands.

Terms: PTX ISA, sections 4 (Syntax), 5 (State Spaces, Types and Variables) and 6 (Instruction Operands).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

TYPE_BYTES = {
    "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2,
    "b32": 4, "u32": 4, "s32": 4, "f32": 4, "f16x2": 4, "bf16x2": 4, "tf32": 4,
    "b64": 8, "u64": 8, "s64": 8, "f64": 8, "b128": 16, "pred": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Reg:
    """A register, resolved to its number in the kernel."""

    index: int


@dataclass(frozen=True)
class Special:
    """A special register such as `%tid.x`."""

    name: str


@dataclass(frozen=True)
class Imm:
    """An immediate. Integers are Python ints; `0f...` and `0d...` are floats given by their bits."""

    value: int | float
    bits: int | None = None
    text: str = ""


@dataclass(frozen=True)
class Symbol:
    """The name of a variable, a parameter or a label."""

    name: str


@dataclass(frozen=True)
class Vector:
    """`{a, b, ...}`"""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Address:
    """`[base + offset]`; tensor copies add coordinates: `[base, {c0, c1}]`, im2col further ones."""

    base: Reg | Symbol | Imm
    offset: int = 0
    extra: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Not:
    """`!p`"""

    operand: Operand


@dataclass(frozen=True)
class Pair:
    """`p|q`: two results."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Sink:
    """`_`: a result nobody wants."""


@dataclass(frozen=True)
class Group:
    """`(a, b)`: arguments of a call."""

    items: tuple[Operand, ...]


Operand = Reg | Special | Imm | Symbol | Vector | Address | Not | Pair | Sink | Group


@dataclass(frozen=True)
class Instruction:
    """One instruction: `name` is the dotted text, `guard` the predicate register (negated or not)."""

    name: str
    operands: tuple[Operand, ...]
    guard: int | None
    guard_negated: bool
    line: int
    text: str

    @cached_property
    def opcode(self) -> str:
        return self.name.split(".", 1)[0]

    @cached_property
    def modifiers(self) -> tuple[str, ...]:
        return tuple(self.name.split(".")[1:])


@dataclass(frozen=True)
class Variable:
    """A `.shared`, `.global`, `.const` or `.local` variable. size 0: an unsized `.extern` array."""

    space: str
    name: str
    size: int
    alignment: int
    data: bytes | None = None
    extern: bool = False


@dataclass(frozen=True)
class Param:
    """A kernel parameter at `offset` of the parameter block."""

    name: str
    size: int
    alignment: int
    offset: int


@dataclass
class Kernel:
    """An `.entry`: parameters, registers (bytes of each; 0 is a predicate), variables, code.

    line, text: where it begins.
    """

    name: str
    line: int = 0
    text: str = ""
    params: tuple[Param, ...] = ()
    registers: list[int] = field(default_factory=list)
    register_names: list[str] = field(default_factory=list)
    variables: list[Variable] = field(default_factory=list)
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def place(self) -> dict[str, Any]:
        """What an error of a launch says about the kernel."""
        return {"kernel": self.name, "line": self.line, "text": self.text}


@dataclass(frozen=True)
class Module:
    """A PTX module. target_line: the line of its `.target`."""

    version: str
    target: str
    target_line: int
    kernels: dict[str, Kernel]
    variables: tuple[Variable, ...]
    text: str
