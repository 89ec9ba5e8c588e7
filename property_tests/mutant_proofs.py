"""Proofs that a mutant of PTX changes no result, whatever the kernel is given.

Three arguments, each of which covers every place that the mutant changes:

sign        an `abs` of what is never negative: an absolute value, a maximum with something that is not, another lane's
            or, if nothing else is stored there, shared memory's. (A NaN that `max` makes has no sign.)
NaN         a constant that is a NaN becomes another one, and only arithmetic reads what it is selected for.
all inputs  the changed instruction, or everything that uses its result, computes a pure function of a few bits: both
            versions run on the virtual GPU over all values of these bits and agree in every one. Bits come from a
            bfloat16 in a word, from a 16-bit register, or from a mask or shift; whether a kernel can make all of them
            does not matter.
unused      nothing uses the result.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from ptx_mutants import DEVICE, Mutant, launched_modules

from moe_numerics.virtual_gpu import virtual_gpu

__all__ = ["proof", "proof_of"]

MOST_BITS = 20
"""Inputs of a function are at most this many bits together."""

THREADS = 256
STEPS_FORWARD = 400
"""Instructions that are followed from a changed one before a proof is given up."""

_PURE = re.compile(
    r"(?:fma|mul|add|sub|neg|abs|min|max|rcp|div|cvt|shl|shr|and|or|xor|not|setp|selp|mov|prmt|lop3|popc|mad)\b"
)
_SPECIAL = re.compile(r"%(?:tid|ntid|ctaid|nctaid|laneid|warpid|clock|globaltimer|smid)")
_REGISTER = re.compile(r"%(?:rs|rd|r|p|fd|f)\d+\b")


@dataclass(frozen=True)
class Line:
    """One line of a kernel: what it writes and reads; pure where it is a function of what it reads."""

    number: int
    text: str
    writes: tuple[str, ...]
    reads: tuple[str, ...]
    pure: bool


def _line(number: int, text: str) -> Line | None:
    body = text.strip().rstrip(";")
    if not body or body.startswith((".", "//", "$", "{", "}", ")")):
        return None
    guarded = body.startswith("@")
    opcode = body.split(None, 2)[1] if guarded else body.split(None, 1)[0]
    registers = _REGISTER.findall(body)
    if re.match(r"(?:st|red|bra|bar|ret|trap|exit|fence|membar|cp|mbarrier|wgmma)\b", opcode) or not registers:
        return Line(number, text, (), tuple(registers), False)
    vector = re.search(r"\{([^}]*)\}", body)
    loads = opcode.startswith("ld.")
    writes = tuple(_REGISTER.findall(vector[1])) if vector and loads else (registers[1 if guarded else 0],)
    reads = tuple(register for register in registers if register not in writes)
    pure = not guarded and _PURE.match(opcode) is not None and not _SPECIAL.search(body)
    pure = pure and not (opcode.startswith("mov") and re.search(r",\s*[A-Za-z_]", body) is not None)
    return Line(number, text, writes, reads, pure)


@dataclass(frozen=True)
class Leaf:
    """Where a function's input comes from: the instruction that has few bits, and the bits of its word."""

    register: str
    bits: tuple[int, ...]


@dataclass
class Body:
    """The kernel around a line, as a graph of values."""

    lines: list[str]
    first: int
    last: int
    leaves: dict[str, Leaf | None] = field(default_factory=dict)

    @classmethod
    def around(cls, ptx: str, number: int) -> Body:
        lines = ptx.split("\n")
        first = max(n for n, line in enumerate(lines[:number], 1) if ".entry" in line)
        later = [n for n, line in enumerate(lines, 1) if n > number and ".entry" in line]
        return cls(lines, first, (later[0] if later else len(lines) + 1) - 1)

    @cached_property
    def parsed(self) -> dict[int, Line]:
        found = (_line(n, self.lines[n - 1]) for n in range(self.first, self.last + 1))
        return {line.number: line for line in found if line is not None}

    @cached_property
    def writers(self) -> dict[str, list[Line]]:
        by_register: dict[str, list[Line]] = {}
        for line in self.parsed.values():
            for register in line.writes:
                by_register.setdefault(register, []).append(line)
        return by_register

    @cached_property
    def readers(self) -> dict[str, list[Line]]:
        by_register: dict[str, list[Line]] = {}
        for line in self.parsed.values():
            for register in line.reads:
                by_register.setdefault(register, []).append(line)
        return by_register

    def only_writer(self, register: str) -> Line | None:
        writers = self.writers.get(register, [])
        return writers[0] if len(writers) == 1 else None

    def leaf(self, register: str) -> Leaf | None:
        """The register as an input of few bits, None where it has too many."""
        if register not in self.leaves:
            self.leaves[register] = self._leaf(register)
        return self.leaves[register]

    def _leaf(self, register: str) -> Leaf | None:
        if register.startswith("%rs"):
            return Leaf(register, tuple(range(16)))
        writer = self.only_writer(register)
        if writer is None:
            return None
        text = writer.text.strip()
        mask = re.fullmatch(r"and\.b32\s+%r\d+, %r\d+, (-?\d+);", text)
        if mask:
            bits = int(mask[1]) & 0xFFFFFFFF
            return Leaf(register, tuple(b for b in range(32) if bits >> b & 1))
        shift = re.fullmatch(r"(shl|shr)\.[bu]32\s+%r\d+, %r\d+, (\d+);", text)
        if shift:
            by = int(shift[2])
            return Leaf(register, tuple(range(by, 32) if shift[1] == "shl" else range(32 - by)))
        return None

    def function(self, register: str) -> tuple[list[Line], list[Leaf]] | None:
        """(lines that compute a register, in order; inputs of few bits), None if it is no function of such inputs."""
        lines: dict[int, Line] = {}
        leaves: dict[str, Leaf] = {}
        waiting, first = [register], True
        while waiting:
            name = waiting.pop()
            leaf = None if first else self.leaf(name)
            first = False
            if leaf is not None and len(leaf.bits) <= MOST_BITS:
                leaves[name] = leaf
                continue
            writer = self.only_writer(name)
            if writer is None or not writer.pure:
                return None
            if writer.number not in lines:
                lines[writer.number] = writer
                waiting += writer.reads
        if sum(len(leaf.bits) for leaf in leaves.values()) > MOST_BITS:
            return None
        return [lines[n] for n in sorted(lines)], list(leaves.values())

    @cached_property
    def stored(self) -> set[str]:
        """Registers whose words the kernel stores to shared memory."""
        found: set[str] = set()
        for line in self.parsed.values():
            match = re.search(r"\bst\.shared\.\S+\s+\[[^\]]*\],\s*(.*);", line.text)
            if match:
                found.update(_REGISTER.findall(match[1]))
        return found

    def only_arithmetic_reads(self, register: str) -> bool:
        """Whether float32 arithmetic, which gives a NaN of its own for any, is all that reads the register."""
        readers = self.readers.get(register, [])
        return all(re.match(r"\s*(?:mul|add|sub|fma|div|rcp)\.[a-z.]*f32\b", line.text) for line in readers)

    def never_negative(self, register: str) -> bool:
        """Whether the register's sign bit is never set."""
        writer = self.only_writer(register)
        if writer is None:
            return False
        text = writer.text.strip()
        if text.startswith("abs.f32"):
            return True
        if text.startswith("shfl.sync"):
            # The same register of another lane.
            return self.never_negative(writer.reads[0])
        if text.startswith("ld.shared"):
            return bool(self.stored) and all(self.never_negative(each) for each in self.stored)
        match = re.fullmatch(r"(max|min)(?:\.NaN)?\.f32\s+%r\d+, (.+), (.+);", text)
        if match is None:
            return False
        sides = [
            int(side[2:], 16) < 0x80000000 if side.startswith("0f") else self.never_negative(side)
            for side in (match[2], match[3])
        ]
        return any(sides) if match[1] == "max" else all(sides)


def _kernel(body: Body, lines: list[str], leaves: list[Leaf], register: str) -> str:
    """A kernel in which thread n computes the register from the n-th combination of the inputs' bits."""
    declared = [line for line in body.lines[body.first - 1 : body.last] if re.match(r"\s*\.reg\s", line)]
    setup, place = [], 0
    for leaf in leaves:
        # Bits of the thread's number, each moved to its place in the word.
        setup.append("mov.b32 %leaf, 0;")
        runs: list[list[int]] = []
        for bit in leaf.bits:
            if runs and bit == runs[-1][-1] + 1:
                runs[-1].append(bit)
            else:
                runs.append([bit])
        for run in runs:
            mask = (1 << len(run)) - 1
            setup += [
                f"shr.u32 %part, %thread, {place};",
                f"and.b32 %part, %part, {mask};",
                f"shl.b32 %part, %part, {run[0]};",
                "or.b32 %leaf, %leaf, %part;",
            ]
            place += len(run)
        narrow = leaf.register.startswith("%rs")
        setup.append(f"cvt.u16.u32 {leaf.register}, %leaf;" if narrow else f"mov.b32 {leaf.register}, %leaf;")
    if register.startswith("%p"):
        taken = f"selp.b32 %leaf, 1, 0, {register};"
    elif register.startswith("%rs"):
        taken = f"cvt.u32.u16 %leaf, {register};"
    else:
        taken = f"mov.b32 %leaf, {register};"
    return "\n".join(
        (
            ".version 8.8",
            ".target sm_90a",
            ".address_size 64",
            ".visible .entry function(.param .u64 out)",
            "{",
            *declared,
            ".reg .b32 %leaf; .reg .b32 %part; .reg .b32 %thread; .reg .b32 %block; .reg .b64 %at; .reg .b64 %to;",
            "mov.u32 %block, %ctaid.x;",
            f"mul.lo.s32 %block, %block, {THREADS};",
            "mov.u32 %thread, %tid.x;",
            "add.s32 %thread, %thread, %block;",
            *setup,
            *lines,
            taken,
            "ld.param.u64 %to, [out];",
            "mul.wide.u32 %at, %thread, 4;",
            "add.s64 %to, %to, %at;",
            "st.global.b32 [%to], %leaf;",
            "ret;",
            "}",
        )
    )


def _same(body: Body, changed: Mapping[int, str], register: str) -> int | None:
    """How many inputs both versions of the register were compared on, None if they differ or cannot be compared."""
    function = body.function(register)
    if function is None or register.startswith("%rd"):
        return None
    lines, leaves = function
    if all(line.number not in changed for line in lines):
        return None
    inputs = 1 << sum(len(leaf.bits) for leaf in leaves)
    results = []
    for texts in ([line.text for line in lines], [changed.get(line.number, line.text) for line in lines]):
        out = torch.zeros(max(inputs, THREADS), dtype=torch.int32)
        with virtual_gpu(DEVICE.partition(":")[2], checkers=False) as gpu:
            gpu.launch(_kernel(body, texts, leaves, register), None, len(out) // THREADS, THREADS, [out])
        results.append(out.numpy()[:inputs])
    return inputs if np.array_equal(*results) else None


def _by_all_inputs(body: Body, changed: Mapping[int, str], start: Line) -> int | None:
    """Compares what comes from a changed line, until every way from it ends in equal values. Gives the inputs."""
    waiting, most, steps = [start.writes[0]], 0, 0
    seen = set(waiting)
    while waiting:
        register = waiting.pop()
        steps += 1
        if steps > STEPS_FORWARD:
            return None
        inputs = _same(body, changed, register)
        if inputs is not None:
            most = max(most, inputs)
            continue
        for reader in body.readers.get(register, []):
            if not reader.pure or body.function(reader.writes[0]) is None:
                return None
            if reader.writes[0] not in seen:
                seen.add(reader.writes[0])
                waiting.append(reader.writes[0])
    return most


def _only_nan(before: str, after: str) -> bool:
    """Whether a select differs in constants only, each of which is a NaN and stays one."""
    texts = [re.split(r"0f([0-9A-F]{8})", text) for text in (before, after)]
    same = before.strip().startswith("selp.f32") and texts[0][::2] == texts[1][::2]
    pairs = [(int(a, 16), int(b, 16)) for a, b in zip(texts[0][1::2], texts[1][1::2], strict=True)] if same else []
    return same and all(a == b or min(a & 0x7FFFFFFF, b & 0x7FFFFFFF) > 0x7F800000 for a, b in pairs)


def proof_of(mutant: Mutant) -> str:
    """The proof in words that the mutant changes no result, empty if none of the arguments holds."""
    return proof(launched_modules(mutant.path)[mutant.module], mutant.changed)


def proof(ptx: str, changed: Mapping[int, str]) -> str:
    """The same of a module and what becomes of its lines, by number from 1."""
    argued: set[str] = set()
    for number, after in changed.items():
        body = Body.around(ptx, number)
        line = body.parsed.get(number)
        if line is None or len(line.writes) != 1 or body.only_writer(line.writes[0]) is None:
            return ""
        if line.text.strip().startswith("abs.f32") and body.never_negative(line.reads[0]):
            argued.add("the operand is a maximum with an absolute value, so never negative")
        elif not body.readers.get(line.writes[0]):
            argued.add("nothing uses the result")
        elif _only_nan(line.text, after) and body.only_arithmetic_reads(line.writes[0]):
            argued.add("a NaN becomes another, which arithmetic takes for the same")
        else:
            inputs = _by_all_inputs(body, changed, line)
            if inputs is None:
                return ""
            argued.add(f"the same bits for all {inputs:,} inputs of what it computes")
    return "; ".join(sorted(argued))
