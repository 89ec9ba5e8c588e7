"""What of a kernel's numerics its PTX leaves open, approximates or pins: read from the text, with line numbers.

Kinds of notes: `approximate` and `flush` instructions; `contractable` sums, which ptxas may fuse with the product they
take (PTX ISA 9.7.3: an `add` or `mul` without a rounding modifier may be contracted), so that the PTX does not say what
silicon computes; the `rounding` of each conversion; `atomic` operations on floats, whose result depends on their order.
"""

from __future__ import annotations

import hashlib
import importlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path as FilePath
from typing import Any

from moe_numerics.virtual_gpu import ptx as syntax
from moe_numerics.virtual_gpu.ptx_parser import parse

__all__ = ["KINDS", "Audit", "AuditError", "Note", "audit_ptx", "audit_target", "render"]

KINDS = ("approximate", "flush", "contractable", "atomic", "rounding")
_TITLES = {
    "approximate": "approximate instructions",
    "flush": "instructions that flush subnormal numbers",
    "contractable": "sums that ptxas may fuse with the product they take: not determined by the PTX",
    "atomic": "atomic additions of floats: the result depends on their order",
    "rounding": "conversions and how they round",
}
_FLOATS = frozenset({"f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2", "f64"})
_NARROW = frozenset({"e4m3x2", "e5m2x2", "e2m1x2", "e2m3x2", "e3m2x2", "e2m1x4", "e4m3x4", "e5m2x4", "ue8m0x2", "tf32"})
_MODES = {
    "rn": "to nearest, ties to even", "rna": "to nearest, ties away from zero", "rz": "towards zero", "rm": "down",
    "rp": "up", "rs": "stochastically", "rni": "to the nearest integer, ties to even",
    "rzi": "to an integer, towards zero",
    "rmi": "to an integer, down", "rpi": "to an integer, up",
}  # fmt: skip
_ROUNDINGS = frozenset({"rn", "rz", "rm", "rp"})


class AuditError(ValueError):
    """A target that cannot be audited, with the reason."""


@dataclass(frozen=True)
class Note:
    """One place. line: of the PTX text, counted from 1. detail: what follows from it."""

    kind: str
    kernel: str
    line: int
    instruction: str
    text: str
    detail: str


@dataclass(frozen=True)
class Audit:
    """The notes of one PTX module. target: its `.target`."""

    name: str
    target: str
    ptx_sha256: str
    kernels: tuple[str, ...]
    notes: tuple[Note, ...]

    def of(self, kind: str) -> tuple[Note, ...]:
        """The notes of a kind."""
        return tuple(note for note in self.notes if note.kind == kind)

    @property
    def determined(self) -> bool:
        """Whether the PTX alone says what silicon computes, up to the tables of approximations."""
        return not self.of("contractable") and not self.of("atomic")

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "name": self.name,
            "target": self.target,
            "ptx_sha256": self.ptx_sha256,
            "kernels": list(self.kernels),
            "determined": self.determined,
            "notes": [asdict(note) for note in self.notes],
        }


def _unpinned(instruction: syntax.Instruction, opcodes: Iterable[str]) -> bool:
    words = set(instruction.modifiers)
    return instruction.opcode in opcodes and bool(words & _FLOATS) and not words & _ROUNDINGS


def _registers(operand: syntax.Operand) -> Iterator[int]:
    match operand:
        case syntax.Reg():
            yield operand.index
        case syntax.Vector():
            for item in operand.items:
                yield from _registers(item)
        case syntax.Pair():
            yield from _registers(operand.first)
            yield from _registers(operand.second)


def _contractable(kernel: syntax.Kernel) -> Iterator[Note]:
    """Sums whose operand may come from a product, through moves and negations, whatever the path taken."""
    written: dict[int, list[syntax.Instruction]] = {}
    for instruction in kernel.code:
        if instruction.operands:
            for register in _registers(instruction.operands[0]):
                written.setdefault(register, []).append(instruction)

    def products(register: int, seen: set[int]) -> Iterator[syntax.Instruction]:
        if register in seen:
            return
        seen.add(register)
        for source in written.get(register, []):
            if _unpinned(source, ("mul",)):
                yield source
            elif source.opcode in ("mov", "neg"):
                for operand in source.operands[1:]:
                    for each in _registers(operand):
                        yield from products(each, seen)

    for instruction in kernel.code:
        if not _unpinned(instruction, ("add", "sub")):
            continue
        lines: set[int] = set()
        for operand in instruction.operands[1:]:
            for register in _registers(operand):
                lines.update(product.line for product in products(register, set()))
        if lines:
            listed = ", ".join(str(line) for line in sorted(lines))
            detail = f"takes the product of line {listed}: write it with .rn, or as an fma"
            yield _note("contractable", kernel, instruction, detail)


def _note(kind: str, kernel: syntax.Kernel, instruction: syntax.Instruction, detail: str) -> Note:
    return Note(kind, kernel.name, instruction.line, instruction.name, instruction.text.strip(), detail)


def _rounding(instruction: syntax.Instruction) -> str | None:
    """How a conversion rounds in words, None where nothing can be lost."""
    words = instruction.modifiers
    types = [w for w in words if w in _FLOATS or w in _NARROW or (w[:1] in "us" and w[1:].isdigit())]
    if not any(w in _FLOATS or w in _NARROW for w in types):
        return None
    mode = next((w for w in words if w in _MODES), None)
    further = [w for w in words if w in ("satfinite", "sat", "relu", "ftz")]
    if mode is None and not further:
        return None
    said = _MODES[mode] if mode else "exactly"
    return said + "".join(f", .{w}" for w in further)


def _atomic_sum(instruction: syntax.Instruction) -> str | None:
    """What an atomic addition leaves open; None for what is none, or of integers."""
    words = set(instruction.modifiers)
    sums = instruction.opcode in ("atom", "red", "multimem") or instruction.name.startswith("cp.reduce.async.bulk")
    if not sums or "add" not in words:
        return None
    if words & _FLOATS:
        return "threads that share a cell add in no fixed order"
    if instruction.name.startswith("cp.reduce.async.bulk.tensor"):
        return "copies that share a cell add in no fixed order, if the tensor map's elements are floats"
    return None


def _single(kernel: syntax.Kernel) -> Iterator[Note]:
    for instruction in kernel.code:
        words = instruction.modifiers
        if "approx" in words or (instruction.opcode == "div" and "full" in words):
            yield _note("approximate", kernel, instruction, "its bits are those of the hardware's table")
        if "ftz" in words:
            yield _note("flush", kernel, instruction, "subnormal operands and results become zeros of their sign")
        order = _atomic_sum(instruction)
        if order is not None:
            yield _note("atomic", kernel, instruction, order)
        if instruction.opcode == "cvt":
            how = _rounding(instruction)
            if how is not None:
                yield _note("rounding", kernel, instruction, how)


def audit_ptx(text: str, name: str = "") -> Audit:
    """The audit of a PTX module. VirtualGPUError: text that is no PTX, with the line."""
    module = parse(text)
    notes: list[Note] = []
    for kernel in module.kernels.values():
        notes += _single(kernel)
        notes += _contractable(kernel)
    notes.sort(key=lambda note: (KINDS.index(note.kind), note.line))
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    return Audit(name, module.target, sha256, tuple(module.kernels), tuple(notes))


def _modules_of(made: object, where: str) -> list[str]:
    """PTX texts of what a function returned: a text, a compiled function, or several."""
    if isinstance(made, str):
        return [made]
    if isinstance(made, list | tuple):
        return [text for each in made for text in _modules_of(each, where)]
    for attribute in ("__ptx__", "ptx"):
        text = getattr(made, attribute, None)
        if isinstance(text, str):
            return [text]
    raise AuditError(
        f"{where} returned {type(made).__name__}: expected PTX as text, or a function compiled with KeepPTX, or a list"
    )


def _modules_of_function(target: str, arch: str) -> list[str]:
    from moe_numerics.virtual_gpu import VirtualGPUError, virtual_gpu

    module_name, _, function_name = target.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise AuditError(f"{target}: {error}") from error
    if not callable(function):
        raise AuditError(f"{target} is {type(function).__name__}: expected a function without arguments")
    with virtual_gpu(arch):
        try:
            made = function()
        except VirtualGPUError:
            raise
        except Exception as error:
            raise AuditError(f"{target}() failed: {type(error).__name__}: {error}") from error
    return _modules_of(made, target)


def _modules_of_path(target: str, arch: str, profile: str) -> list[str]:
    import torch

    from moe_numerics.cases import Case
    from moe_numerics.devices import VirtualDevice
    from moe_numerics.fused import compilation
    from moe_numerics.paths import find_path

    path = find_path(target)
    contract = path.contract(profile, arch)
    lacking = path.lacking(arch)
    if lacking:
        raise AuditError(f"{target} has {lacking}")
    hidden = -(-64 // path.multiple) * path.multiple
    prob = any(spec.kind == "prob" for spec in path.inputs)
    case = Case(path.id, (3,), hidden, profile, path.depth_multiple, padded=True, prob=prob, layout=path.layouts[0])
    with VirtualDevice(arch).activate(), compilation.recording() as compiled:
        shapes = path.operation.shapes(case)
        outputs = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
        path.operation.fused(case, case.tensors(path.inputs), contract, outputs)
    return [each.ptx for each in compiled]


def audit_target(target: str, arch: str = "sm_90a", profile: str = "suite") -> list[Audit]:
    """The audits of a path id, of MODULE:FUNCTION (no arguments, gives compiled functions or PTX), or of a PTX file.

    Paths and functions are compiled for `arch` on a virtual GPU. AuditError: a target that is none of these, or has no
    kernel; PathError: a path that is not there.
    """
    if target.endswith(".ptx") or FilePath(target).is_file():
        try:
            texts = [FilePath(target).read_text(encoding="utf-8")]
        except (OSError, UnicodeDecodeError) as error:
            raise AuditError(f"{target} cannot be read: {error}") from error
    elif ":" in target:
        texts = _modules_of_function(target, arch)
    else:
        texts = _modules_of_path(target, arch, profile)
    if not texts:
        raise AuditError(f"{target} launched no kernel: there is nothing to audit")
    return [audit_ptx(text, target if len(texts) == 1 else f"{target} [{n}]") for n, text in enumerate(texts)]


def render(audit: Audit) -> str:
    """The audit as text: what was found of each kind, with the lines."""
    out = [f"{audit.name or 'PTX'}: {', '.join(audit.kernels)} ({audit.target}, sha256 {audit.ptx_sha256[:16]})"]
    for kind in KINDS:
        notes = audit.of(kind)
        if not notes:
            out.append(f"  no {_TITLES[kind].partition(':')[0]}")
            continue
        out.append(f"  {len(notes)} {_TITLES[kind]}")
        if kind in ("approximate", "flush", "rounding"):
            counted = Counter((note.instruction, note.detail) for note in notes)
            for (instruction, detail), count in sorted(counted.items()):
                lines = [str(n.line) for n in notes if (n.instruction, n.detail) == (instruction, detail)]
                out.append(f"    {count} x {instruction}: {detail}; line {', '.join(lines)}")
            continue
        out += [f"    line {note.line}: {note.text}  ({note.detail})" for note in notes]
    said = "yes" if audit.determined else "no"
    out.append(f"  determined by the PTX: {said}")
    return "\n".join(out)
