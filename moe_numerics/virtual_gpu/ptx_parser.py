"""Parses PTX text into kernels, with the line of every instruction.

Grammar: PTX ISA, sections 4 (Syntax), 5 (State Spaces, Types and Variables) and 6 (Instruction Operands). Opcodes are
not interpreted here: an instruction is its dotted name, its guard and its operands.
"""

from __future__ import annotations

import ast
import struct

from .errors import error
from .ptx import (
    TYPE_BYTES,
    Address,
    Group,
    Imm,
    Instruction,
    Kernel,
    Module,
    Not,
    Operand,
    Pair,
    Param,
    Reg,
    Sink,
    Special,
    Symbol,
    Variable,
    Vector,
)
from .ptx_tokens import Tokens, evaluate, parse_number


class _Scope:
    """Registers and variables of nested braces; an inner name hides an outer one."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.maps: list[dict[str, int]] = [{}]
        self.renames: list[dict[str, str]] = [{}]
        self.prefixes: list[dict[str, tuple[int, int]]] = [{}]

    def push(self) -> None:
        self.maps.append({})
        self.renames.append({})
        self.prefixes.append({})

    def pop(self) -> None:
        self.maps.pop()
        self.renames.pop()
        self.prefixes.pop()

    def declared(self, name: str) -> bool:
        """Whether the innermost scope has a register of this name."""
        return name in self.maps[-1]

    def declare(self, name: str, size: int) -> None:
        self.maps[-1][name] = len(self.kernel.registers)
        self.kernel.registers.append(size)
        self.kernel.register_names.append(name)

    def register(self, name: str) -> int | None:
        for level in reversed(self.maps):
            if name in level:
                return level[name]
        return None

    def symbol(self, name: str) -> str:
        for level in reversed(self.renames):
            if name in level:
                return level[name]
        return name


class _Parser:
    def __init__(self, text: str) -> None:
        self.t = Tokens(text)
        self.text = text
        self.kernels: dict[str, Kernel] = {}
        self.variables: list[Variable] = []
        self.version = self.target = ""
        self.target_line = 1
        self.fresh = 0

    def module(self) -> Module:
        t = self.t
        while t.kind != "end":
            word = t.value
            if word == ".version":
                t.take()
                self.version = t.take()
            elif word == ".target":
                self.target_line = t.line
                t.take()
                self.target = t.take()
                while t.accept(","):
                    t.take()
            elif word == ".address_size":
                t.take()
                if t.value != "64":
                    t.fail(f".address_size {t.value}: only 64 is supported")
                t.take()
            elif word in (".file", ".loc"):
                self.skip_line()
            elif word == ".section":
                while not t.accept("}"):
                    t.take()
            elif word == ".pragma":
                while not t.accept(";"):
                    t.take()
            elif word in (".visible", ".weak", ".common", ".extern", ".entry", ".func") or word in _SPACES:
                self.declaration()
            else:
                t.fail(f"unexpected `{word}` at module level")
        if not self.target:
            raise error("syntax", "the PTX has no .target", line=1, text=t.at(1))
        return Module(self.version, self.target, self.target_line, self.kernels, tuple(self.variables), self.text)

    def skip_line(self) -> None:
        line = self.t.line
        while self.t.line == line and self.t.kind != "end":
            self.t.take()

    def declaration(self) -> None:
        t = self.t
        extern = False
        while t.value in (".visible", ".weak", ".common", ".extern"):
            extern = extern or t.value == ".extern"
            t.take()
        if t.value == ".entry":
            t.take()
            self.kernel()
        elif t.value == ".func":
            self.skip_function()
        elif t.value in _SPACES:
            self.variables.extend(self.variable(extern))
        else:
            t.fail(f"unexpected `{t.value}` in a declaration")

    def skip_function(self) -> None:
        """Device functions are kept out: a call of one is reported where it is executed."""
        t = self.t
        while t.value not in ("{", ";"):
            t.take()
        if t.accept(";"):
            return
        depth = 0
        while True:
            word = t.take()
            depth += (word == "{") - (word == "}")
            if depth == 0:
                return

    def variable(self, extern: bool = False) -> list[Variable]:
        t = self.t
        space = t.take()[1:].split("::")[0]
        alignment = 0
        lanes = 1
        while t.value in (".align", ".v2", ".v4", ".v8"):
            word = t.take()
            if word == ".align":
                alignment = int(t.take())
            else:
                lanes = int(word[2:])
        kind = t.take()[1:]
        if kind not in TYPE_BYTES:
            t.fail(f"unknown type .{kind}")
        unit = TYPE_BYTES[kind] * lanes
        found = []
        while True:
            name = t.take()
            size, counted = unit, False
            while t.accept("["):
                length = 0 if t.value == "]" else int(t.take().rstrip("U"), 0)
                t.expect("]")
                size, counted = size * length, True
            data = self.initializer(TYPE_BYTES[kind], kind) if t.accept("=") else None
            if data is not None and size == 0 and counted:
                size = len(data)
            found.append(Variable(space, name, size, alignment or unit, data, extern))
            if not t.accept(","):
                break
        t.expect(";")
        return found

    def initializer(self, size: int, kind: str) -> bytes:
        t = self.t
        out = bytearray()

        def value() -> None:
            if t.accept("{"):
                while not t.accept("}"):
                    value()
                    t.accept(",")
                return
            negative = t.accept("-")
            if t.kind != "number":
                t.fail(f"an initialiser `{t.value}` that is not a number is not supported")
            number = parse_number(t.take())
            if number.bits is not None:
                out.extend(number.bits.to_bytes(size, "little"))
            elif kind in ("f32", "f64"):
                out.extend(struct.pack("<f" if kind == "f32" else "<d", -number.value if negative else number.value))
            else:
                integer = -int(number.value) if negative else int(number.value)
                out.extend((integer & ((1 << (8 * size)) - 1)).to_bytes(size, "little"))

        value()
        return bytes(out)

    def kernel(self) -> None:
        t = self.t
        line = t.line
        kernel = Kernel(t.take(), line, t.at(line))
        params: list[Param] = []
        if t.accept("("):
            offset = 0
            while not t.accept(")"):
                t.expect(".param")
                alignment = 0
                kind = ""
                while t.value.startswith("."):
                    word = t.take()[1:]
                    if word == "align":
                        alignment = int(t.take())
                    elif word in TYPE_BYTES:
                        kind = word
                if not kind:
                    t.fail("a parameter without a type")
                name = t.take()
                size = TYPE_BYTES[kind]
                while t.accept("["):
                    size *= int(t.take().rstrip("U"), 0)
                    t.expect("]")
                alignment = alignment or TYPE_BYTES[kind]
                offset = -(-offset // alignment) * alignment
                params.append(Param(name, size, alignment, offset))
                offset += size
                t.accept(",")
        kernel.params = tuple(params)
        while t.value != "{":
            word = t.take()
            if t.kind == "end":
                t.fail(f"the body of kernel {kernel.name} is missing")
            values = []
            while t.kind == "number":
                values.append(int(t.take()))
                t.accept(",")
            kernel.directives[word[1:]] = tuple(values)
        t.expect("{")
        self.body(kernel, _Scope(kernel))
        self.kernels[kernel.name] = kernel

    def body(self, kernel: Kernel, scope: _Scope) -> None:
        t = self.t
        depth = 1
        while depth:
            word = t.value
            if t.kind == "end":
                t.fail(f"kernel {kernel.name} has no closing brace")
            if word == "{":
                t.take()
                depth += 1
                scope.push()
                self.local_labels(scope)
            elif word == "}":
                t.take()
                depth -= 1
                scope.pop()
            elif word == ";":
                t.take()
            elif word == ".reg":
                self.registers(scope)
            elif word in _SPACES or word == ".param":
                for variable in self.variable():
                    name = variable.name
                    if depth > 1:
                        self.fresh += 1
                        name = f"{name}@{self.fresh}"
                        scope.renames[-1][variable.name] = name
                    kernel.variables.append(
                        Variable(variable.space, name, variable.size, variable.alignment, variable.data)
                    )
            elif word == ".loc":
                self.skip_line()
            elif word == ".pragma":
                while not t.accept(";"):
                    t.take()
            elif t.kind == "word" and t.peek() == ":":
                label = scope.symbol(t.value)
                if label in kernel.labels:
                    t.fail(f"label {t.value} is defined twice in one scope")
                t.take()
                t.take()
                kernel.labels[label] = len(kernel.code)
                if t.value in (".branchtargets", ".calltargets"):
                    t.take()
                    targets = []
                    while not t.accept(";"):
                        targets.append(scope.symbol(t.take()))
                        t.accept(",")
                    kernel.tables[label] = tuple(targets)
            else:
                kernel.code.append(self.instruction(scope))

    def local_labels(self, scope: _Scope) -> None:
        """Labels inside braces are local to them, and branches may come before the label."""
        items = self.t.items
        depth, i = 1, self.t.i
        while depth and i + 1 < len(items):
            kind, word, _ = items[i]
            depth += (word == "{") - (word == "}")
            if depth == 1 and kind == "word" and items[i + 1][1] == ":":
                self.fresh += 1
                scope.renames[-1][word] = f"{word}@{self.fresh}"
            i += 1

    def registers(self, scope: _Scope) -> None:
        t = self.t
        t.take()
        while t.value in (".v2", ".v4"):
            t.fail("vector registers are not supported")
        kind = t.take()[1:]
        if kind not in TYPE_BYTES:
            t.fail(f"unknown register type .{kind}")
        size = 0 if kind == "pred" else TYPE_BYTES[kind]
        while True:
            line, name = t.line, t.take()
            names = [name]
            if t.accept("<"):
                names = [f"{name}{i}" for i in range(int(t.take()))]
                t.expect(">")
            for each in names:
                if scope.declared(each):
                    raise error("syntax", f"register {each} is declared twice in one scope", line=line, text=t.at(line))
                scope.declare(each, size)
            if not t.accept(","):
                break
        t.expect(";")

    def instruction(self, scope: _Scope) -> Instruction:
        t = self.t
        line = t.line
        guard, negated = None, False
        if t.accept("@"):
            negated = t.accept("!")
            guard = scope.register(t.value)
            if guard is None:
                t.fail(f"the guard {t.value} is not a register")
            t.take()
        if t.kind != "word":
            t.fail(f"expected an instruction, found `{t.value}`")
        name = t.take()
        # Multi-line modifiers (`cp.async.bulk` in inline PTX may break its name over lines).
        while t.kind == "word" and t.value.startswith(".") and t.items[t.i - 1][0] == "word":
            name += t.take()
        operands = []
        while not t.accept(";"):
            operands.append(self.operand(scope))
            if not t.accept(",") and t.value != ";":
                t.fail(f"expected `,` or `;`, found `{t.value}`")
        return Instruction(name, tuple(operands), guard, negated, line, t.at(line))

    def operand(self, scope: _Scope) -> Operand:
        first = self.single(scope)
        if self.t.accept("|"):
            return Pair(first, self.single(scope))
        return first

    def name(self, word: str, scope: _Scope) -> Operand:
        index = scope.register(word)
        if index is not None:
            return Reg(index)
        if word == "_":
            return Sink()
        if word == "WARP_SZ":
            return Imm(32, None, word)
        if word.startswith("%"):
            base = word.split(".")[0]
            index = scope.register(base)
            if index is not None:
                self.t.fail(f"vector register element {word} is not supported")
            return Special(word)
        return Symbol(scope.symbol(word))

    def single(self, scope: _Scope) -> Operand:
        t = self.t
        if t.accept("!"):
            return Not(self.single(scope))
        if t.accept("{"):
            items = []
            while not t.accept("}"):
                items.append(self.single(scope))
                t.accept(",")
            return Vector(tuple(items))
        if t.accept("["):
            return self.address(scope)
        if t.value == "(":
            return self.parenthesised(scope)
        if t.value == "-" or t.kind == "number":
            return self.constant()
        if t.kind == "word":
            return self.name(t.take(), scope)
        t.fail(f"expected an operand, found `{t.value}`")
        raise AssertionError

    def constant(self) -> Imm:
        negative = self.t.accept("-")
        if self.t.kind != "number":
            self.t.fail(f"expected a number, found `{self.t.value}`")
        number = parse_number(self.t.take())
        if not negative:
            return number
        bits = number.bits
        if bits is not None:
            bits ^= 1 << (31 if len(number.text) == 10 else 63)
        return Imm(-number.value, bits, "-" + number.text)

    def parenthesised(self, scope: _Scope) -> Operand:
        """A call's list, or a constant expression such as `((128 >> 4) << 16)`."""
        t = self.t
        start, depth, words = t.i, 0, []
        while True:
            word = t.take()
            depth += (word == "(") - (word == ")")
            words.append(word)
            if depth == 0 or t.kind == "end":
                break
        if any(w in ("<<", ">>", "+", "*", "-", "&", "~") for w in words):
            text = " ".join(w.rstrip("U") if w[0].isdigit() else w for w in words)
            return Imm(evaluate(ast.parse(text.strip(), mode="eval").body), None, text)
        t.i = start
        t.expect("(")
        items = []
        while not t.accept(")"):
            items.append(self.operand(scope))
            t.accept(",")
        return Group(tuple(items))

    def address(self, scope: _Scope) -> Address:
        t = self.t
        base: Operand = self.constant() if t.kind == "number" else self.name(t.take(), scope)
        if not isinstance(base, Reg | Symbol | Imm):
            t.fail("an address needs a register or a symbol")
        offset = 0
        while t.value in ("+", "-"):
            sign = 1 if t.take() == "+" else -1
            offset += sign * int(self.constant().value)
        extra = []
        while t.accept(","):
            extra.append(self.single(scope))
        t.expect("]")
        return Address(base, offset, tuple(extra))  # type: ignore[arg-type]


_SPACES = frozenset({".shared", ".global", ".const", ".local", ".shared::cta", ".shared::cluster"})


def parse(text: str) -> Module:
    """The kernels and variables of a PTX module.

    Raises VirtualGPUError of kind `syntax` with the line that could not be read.
    """
    return _Parser(text).module()
