"""Turns one instruction into a step on arrays: its operands, its form in the table, its guard."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from . import ptx
from .errors import Fault, VirtualGPUError, error
from .registry import TABLE, Delayed, Form, Index, Step

if TYPE_CHECKING:
    from .program import Program
    from .wave import Wave

Array = npt.NDArray[Any]
Read = Callable[["Wave", Index], Any]
Write = Callable[["Wave", Index, Any], None]

# How the bits of a PTX type are seen by NumPy. f16 and bf16 stay integers: their arithmetic is done in float64.
VIEW: dict[str, np.dtype[Any]] = {
    name: np.dtype(kind)
    for name, kind in {
        "b8": np.uint8, "u8": np.uint8, "s8": np.int8,
        "b16": np.uint16, "u16": np.uint16, "s16": np.int16, "f16": np.uint16, "bf16": np.uint16,
        "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "f32": np.float32, "f16x2": np.uint32,
        "bf16x2": np.uint32, "tf32": np.uint32,
        "b64": np.uint64, "u64": np.uint64, "s64": np.int64, "f64": np.float64, "f32x2": np.uint64,
        "pred": np.bool_,
    }.items()
}  # fmt: skip
UNSIGNED: dict[int, np.dtype[Any]] = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
BOOL: np.dtype[Any] = np.dtype(np.bool_)


def immediate(operand: ptx.Imm, kind: str) -> Any:
    """The scalar that an immediate stands for in a context of PTX type `kind`."""
    dtype = VIEW[kind]
    if kind in ("f32", "f64"):
        if operand.bits is not None and len(operand.text.lstrip("-")) == 2 + 2 * dtype.itemsize:
            return UNSIGNED[dtype.itemsize].type(operand.bits).view(dtype)
        return dtype.type(operand.value)
    if kind == "pred":
        return np.bool_(bool(operand.value))
    size = dtype.itemsize
    if operand.bits is not None:
        value = operand.bits
    elif isinstance(operand.value, float):
        # A decimal float in an untyped place.
        value = int(np.array(operand.value, f"f{max(size, 4)}").view(UNSIGNED[max(size, 4)]))
    else:
        value = operand.value
    return UNSIGNED[size].type(value & ((1 << (8 * size)) - 1)).view(dtype)


class Lowering:
    """What a builder may use to turn one instruction into a step."""

    def __init__(self, program: Program, instruction: ptx.Instruction) -> None:
        self.program = program
        self.ins = instruction
        self.reads: set[int] = set()
        self.writes: set[int] = set()
        self.sync_mask: Read | None = None
        # For a store: takes its operands and gives what does it later, for some of the threads.
        self.delayed: Callable[[Wave, Index], Delayed] | None = None
        self.plain = False
        # Whether a register may be read before it was written.
        self.lenient = False

    @property
    def operands(self) -> tuple[ptx.Operand, ...]:
        return self.ins.operands

    def fail(self, message: str) -> VirtualGPUError:
        return error(
            "unknown_instruction",
            message,
            kernel=self.program.kernel.name,
            line=self.ins.line,
            text=self.ins.text,
        )

    def width(self, operand: ptx.Operand) -> int:
        """Bytes of a register operand, 0 for a predicate."""
        if isinstance(operand, ptx.Not):
            operand = operand.operand
        if isinstance(operand, ptx.Reg):
            return self.program.kernel.registers[operand.index]
        raise self.fail(f"`{self.ins.name}` needs a register operand")

    def read(self, operand: ptx.Operand, kind: str) -> Read:
        """Gives the values of an operand seen as PTX type `kind`: an array of the fragment's threads or a scalar."""
        if isinstance(operand, ptx.Reg):
            return self._read_register(operand.index, kind)
        if isinstance(operand, ptx.Not):
            inner = self.read(operand.operand, kind)
            return lambda w, i: ~inner(w, i)
        if isinstance(operand, ptx.Imm):
            value = immediate(operand, kind)
            return lambda w, i: value
        if isinstance(operand, ptx.Special):
            return self._read_special(operand.name, kind)
        if isinstance(operand, ptx.Symbol):
            return self.symbol(operand.name, kind)
        raise self.fail(f"operand {operand} of `{self.ins.name}` is not a value")

    def _read_register(self, k: int, kind: str) -> Read:
        self.reads.add(k)
        size = self.program.kernel.registers[k]
        dtype = VIEW[kind]
        checked = k in self.program.unproved and not self.lenient
        if k in self.program.async_registers and not self.plain:
            self.plain = True
            inner = self._read_register(k, kind)
            self.plain = False
            return self._landed(k, inner)
        if size == 0:
            if kind != "pred":
                raise self.fail(f"`{self.ins.name}` needs a {kind} operand, not a predicate")

            def predicate(w: Wave, i: Index) -> Array:
                part = w.parts[k]
                if part is not None:
                    if part[0] is i:
                        return part[1]
                    w.settle(k)
                a = w.regs[k]
                return a if i is None else a[i]

            return self._checked(k, predicate) if checked else predicate
        if kind == "pred":
            raise self.fail(f"`{self.ins.name}` needs a predicate, not {self.program.kernel.register_names[k]}")
        if size == dtype.itemsize:

            def same(w: Wave, i: Index) -> Array:
                part = w.parts[k]
                if part is not None:
                    if part[0] is i:
                        a = part[1]
                        return a if a.dtype is dtype else a.view(dtype)
                    w.settle(k)
                a = w.regs[k]
                if a.dtype is not dtype:
                    a = a.view(dtype)
                return a if i is None else a[i]

            return self._checked(k, same) if checked else same
        if size < dtype.itemsize:
            raise self.fail(
                f"`{self.ins.name}` needs {8 * dtype.itemsize} bits, but "
                f"{self.program.kernel.register_names[k]} has {8 * size}"
            )
        unsigned, cut = UNSIGNED[size], UNSIGNED[dtype.itemsize]

        def narrower(w: Wave, i: Index) -> Array:
            return w.values(k, i).view(unsigned).astype(cut).view(dtype)

        return self._checked(k, narrower) if checked else narrower

    def in_flight(self, registers: list[int]) -> None:
        """Says that the instruction writes these registers later, so that reading them needs a wait first."""
        self.program.async_registers.update(registers)

    def _landed(self, k: int, inner: Read) -> Read:
        name = self.program.kernel.register_names[k]

        def read(w: Wave, i: Index) -> Array:
            if w.in_flight and w.checkers and k in w.unlanded(i):
                operation = next(o for flying in w.in_flight.items() if k in flying[0] for o in flying[1])
                raise Fault(
                    "in_flight",
                    f"register {name} is used before a wait for the `{operation.instruction.opcode}` at line "
                    f"{operation.instruction.line} that writes it",
                    int(w.index(i)[0]),
                )
            return inner(w, i)

        return read

    def _checked(self, k: int, inner: Read) -> Read:
        name = self.program.kernel.register_names[k]

        def read(w: Wave, i: Index) -> Array:
            valid = w.valid.get(k)
            if valid is not None:
                mine = valid if i is None else valid[i]
                if not mine.all():
                    bad = int(np.flatnonzero(~mine)[0])
                    raise Fault(
                        "uninitialised",
                        f"register {name} is read before it was written",
                        bad if i is None else int(i[bad]),
                    )
            return inner(w, i)

        return read

    def _read_special(self, name: str, kind: str) -> Read:
        from .special import SPECIAL

        if name not in SPECIAL:
            raise self.fail(f"unknown special register {name}")
        dtype = VIEW[kind]
        cut = UNSIGNED[dtype.itemsize]

        def read(w: Wave, i: Index) -> Array:
            a = w.special(name)
            a = a.astype(cut).view(dtype)
            return a if i is None else a[i]

        return read

    def symbol(self, name: str, kind: str) -> Read:
        """The address of a variable in its own space; a parameter's is generic."""
        dtype = VIEW[kind]
        cut = UNSIGNED[dtype.itemsize]
        if name in self.program.shared_offsets:
            offset = self.program.shared_offsets[name]

            def shared(w: Wave, i: Index) -> Array:
                a = (w.shared_rank + np.uint32(offset)).astype(cut).view(dtype)
                return a if i is None else a[i]

            return shared
        if name in self.program.local_offsets:
            value = cut.type(self.program.local_offsets[name]).view(dtype)
            return lambda w, i: value
        for param in self.program.kernel.params:
            if param.name == name:
                offset = param.offset
                return lambda w, i: cut.type((w.launch.param_address + offset) & ((1 << 8 * cut.itemsize) - 1))
        if any(v.name == name for v in self.program.module.variables):
            return lambda w, i: cut.type(w.launch.symbols[name])
        raise self.fail(f"unknown symbol {name}")

    def write(self, operand: ptx.Operand, kind: str) -> Write:
        """Stores values into a register; a result wider than `kind` is extended by the sign of the values' dtype."""
        if isinstance(operand, ptx.Sink):
            return lambda w, i, v: None
        if not isinstance(operand, ptx.Reg):
            raise self.fail(f"the result of `{self.ins.name}` needs a register, not {operand}")
        k = operand.index
        self.writes.add(k)
        size = self.program.kernel.registers[k]
        dtype = VIEW[kind]
        if (size == 0) != (kind == "pred"):
            raise self.fail(
                f"`{self.ins.name}` writes {kind}, which {self.program.kernel.register_names[k]} cannot hold"
            )
        if size and size < dtype.itemsize:
            raise self.fail(
                f"`{self.ins.name}` writes {8 * dtype.itemsize} bits, but "
                f"{self.program.kernel.register_names[k]} has {8 * size}"
            )
        shadowed = k in self.program.unproved
        storage = BOOL if size == 0 else UNSIGNED[size]

        def write(w: Wave, i: Index, v: Any) -> None:
            if size and v.dtype.itemsize != size:
                v = v.astype(storage)
            if i is None:
                if v.ndim == 0:
                    v = np.full(w.threads, v)
                w.regs[k], w.parts[k] = v, None
            else:
                part = w.parts[k]
                if part is not None and part[0] is not i:
                    w.settle(k)
                w.parts[k] = (i, v if v.shape == i.shape else np.full(i.size, v), False)
            if shadowed and w.checkers:
                w.mark_valid(k, i)

        return write

    def alu(self, result: str, sources: Iterable[str], compute: Callable[..., Any]) -> Step:
        """The step of an instruction `op d, a, b, ...` whose result depends on its own thread's operands only."""
        kinds = tuple(sources)
        if len(self.operands) != len(kinds) + 1:
            raise self.fail(f"`{self.ins.name}` takes {len(kinds) + 1} operands, found {len(self.operands)}")
        reads = [self.read(o, k) for o, k in zip(self.operands[1:], kinds, strict=True)]
        write = self.write(self.operands[0], result)
        if all(isinstance(o, ptx.Imm) for o in self.operands[1:]):
            spread = [lambda w, i, r=r: np.full(w.count(i), r(w, i)) for r in reads]
            return lambda w, i: write(w, i, compute(*(r(w, i) for r in spread)))
        if len(reads) == 1:
            (a,) = reads
            return lambda w, i: write(w, i, compute(a(w, i)))
        if len(reads) == 2:
            a, b = reads
            return lambda w, i: write(w, i, compute(a(w, i), b(w, i)))
        if len(reads) == 3:
            a, b, c = reads
            return lambda w, i: write(w, i, compute(a(w, i), b(w, i), c(w, i)))
        return lambda w, i: write(w, i, compute(*(r(w, i) for r in reads)))

    def full(self, read: Read) -> Read:
        """`read`, with scalars spread over the fragment's threads."""

        def spread(w: Wave, i: Index) -> Array:
            v = read(w, i)
            return v if v.ndim else np.full(w.count(i), v)

        return spread

    def address(self, operand: ptx.Operand) -> Read:
        """The addresses of `[base + offset]` as uint64."""
        if not isinstance(operand, ptx.Address):
            raise self.fail(f"`{self.ins.name}` needs an address, not {operand}")
        base = operand.base
        offset = np.uint64(operand.offset & (2**64 - 1))
        if isinstance(base, ptx.Imm):
            value = np.uint64((int(base.value) + operand.offset) & (2**64 - 1))
            return lambda w, i: np.full(w.count(i), value)
        narrow = isinstance(base, ptx.Reg) and self.width(base) == 4
        read = self.full(self.read(base, "u32" if narrow else "u64"))
        if narrow:
            # 32-bit addresses (shared memory) wrap at 32 bits.
            low = np.uint32(operand.offset & (2**32 - 1))
            return lambda w, i: (read(w, i) + low).astype(np.uint64)
        if operand.offset == 0:
            return read
        return lambda w, i: read(w, i) + offset

    def items(self, operand: ptx.Operand) -> tuple[ptx.Operand, ...]:
        """The elements of a vector operand, or the operand alone."""
        return operand.items if isinstance(operand, ptx.Vector) else (operand,)


def choose(index: Index, mask: Array) -> Index:
    """The threads of a fragment for which `mask` (one entry a thread of the fragment) holds."""
    count = int(np.count_nonzero(mask))
    if count == mask.size:
        return index
    if index is None:
        return np.flatnonzero(mask)
    return index[mask]


_FOUND: dict[str, tuple[Form, Any]] = {}


def find_form(lowering: Lowering) -> tuple[Form, Any]:
    """The table entry of an instruction and its modifiers.

    Raises VirtualGPUError naming the instruction, or the part of it, that the table does not have.
    """
    ins = lowering.ins
    found = _FOUND.get(ins.name)
    if found is not None and (not found[0].features or lowering.program.arch in found[0].features):
        return found
    candidates = TABLE.get(ins.opcode)
    if not candidates:
        raise lowering.fail(f"unknown instruction `{ins.name}`")
    for form in candidates:
        modifiers = form.match(ins.modifiers)
        if modifiers is not None:
            if form.features and lowering.program.arch not in form.features:
                raise error(
                    "unavailable",
                    f"`{ins.name}` is not available on {lowering.program.arch}, "
                    f"only on {', '.join(sorted(form.features))}",
                    kernel=lowering.program.kernel.name, line=ins.line, text=ins.text,
                )  # fmt: skip
            _FOUND[ins.name] = (form, modifiers)
            return form, modifiers
    known = "; ".join(f"{f.opcode} {' '.join(f.syntax.split()[1:])}".strip() for f in candidates)
    raise lowering.fail(f"unknown form `{ins.name}`; the table has: {known}")


def guard_mask(lowering: Lowering) -> Read | None:
    """Reads for which threads of a fragment the guard of an instruction holds; None without a guard."""
    k = lowering.ins.guard
    if k is None:
        return None
    read = lowering.read(ptx.Reg(k), "pred")
    return (lambda w, i: ~read(w, i)) if lowering.ins.guard_negated else read


def guard(lowering: Lowering, step: Step) -> Step:
    """`step` for the threads whose guard holds."""
    mask = guard_mask(lowering)
    assert mask is not None

    def guarded(w: Wave, i: Index) -> None:
        chosen = choose(i, mask(w, i))
        if chosen is None or chosen.size:
            step(w, chosen)

    return guarded
