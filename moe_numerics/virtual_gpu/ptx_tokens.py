"""The words and constants of PTX text (PTX ISA 4.4 and 4.5)."""

from __future__ import annotations

import ast
import operator
import re
import struct
from collections.abc import Callable

from .errors import error
from .ptx import Imm

_TOKEN = re.compile(
    r"""(?P<skip>[ \t\r]+|//[^\n]*|/\*.*?\*/)
      |(?P<newline>\n)
      |(?P<string>"[^"]*")
      |(?P<number>0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?
                 |\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+|\d+U?)
      |(?P<word>[.%$A-Za-z_][\w$%.]*(?:::[\w$.]+)*)
      |(?P<op><<|>>|[-+*/@{}()\[\],;:|!<>=&~])""",
    re.VERBOSE | re.DOTALL,
)


class Tokens:
    def __init__(self, text: str) -> None:
        self.lines = text.split("\n")
        self.items: list[tuple[str, str, int]] = []
        line, position = 1, 0
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                raise error("syntax", f"unexpected character {text[position]!r}", line=line, text=self.at(line))
            kind, value = match.lastgroup, match.group()
            if kind not in ("skip", "newline"):
                self.items.append((str(kind), value, line))
            line += value.count("\n")
            position = match.end()
        self.items.append(("end", "", line))
        self.i = 0

    def at(self, line: int) -> str:
        return self.lines[line - 1].strip() if 0 < line <= len(self.lines) else ""

    @property
    def kind(self) -> str:
        return self.items[self.i][0]

    @property
    def value(self) -> str:
        return self.items[self.i][1]

    @property
    def line(self) -> int:
        return self.items[self.i][2]

    def peek(self, ahead: int = 1) -> str:
        return self.items[min(self.i + ahead, len(self.items) - 1)][1]

    def take(self) -> str:
        value = self.items[self.i][1]
        self.i += 1
        return value

    def accept(self, value: str) -> bool:
        if self.items[self.i][1] == value and self.items[self.i][0] != "string":
            self.i += 1
            return True
        return False

    def expect(self, value: str) -> None:
        if not self.accept(value):
            self.fail(f"expected `{value}`, found `{self.value or 'the end of the text'}`")

    def fail(self, message: str) -> None:
        raise error("syntax", message, line=self.line, text=self.at(self.line))


def parse_number(text: str) -> Imm:
    """The immediate that `text` (PTX ISA 4.5, Constants) stands for."""
    head = text[:2].lower()
    if head == "0f" and len(text) == 10:
        bits = int(text[2:], 16)
        return Imm(struct.unpack("<f", struct.pack("<I", bits))[0], bits, text)
    if head == "0d" and len(text) == 18:
        bits = int(text[2:], 16)
        return Imm(struct.unpack("<d", struct.pack("<Q", bits))[0], bits, text)
    if any(c in text for c in ".eE") and head != "0x":
        return Imm(float(text), None, text)
    digits = text.rstrip("U")
    if head not in ("0x", "0b") and len(digits) > 1 and digits[0] == "0":
        return Imm(int(digits, 8), None, text)
    return Imm(int(digits, 0), None, text)


_OPERATORS: dict[type, Callable[..., int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.LShift: operator.lshift,
    ast.RShift: operator.rshift, ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor,
    ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert,
}  # fmt: skip


def evaluate(node: ast.AST) -> int:
    """A constant expression of integers (PTX ISA 4.5.5)."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](evaluate(node.left), evaluate(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](evaluate(node.operand))
    raise error("syntax", f"constant expression with `{ast.unparse(node)}` is not supported")
