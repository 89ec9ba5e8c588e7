"""Turns the instructions of a kernel into steps on arrays: operand access, runs of instructions, control flow.

A kernel becomes a list of segments in program order. A segment is a run of steps that all threads of a fragment
execute together; it ends at a branch, a label, or an instruction that may park threads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from . import ptx
from .errors import Fault, VirtualGPUError, error
from .registry import TABLE, Form, Index, Step

if TYPE_CHECKING:
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
UNSIGNED = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}
BOOL = np.dtype(np.bool_)


def wide_enough(value: Array, size: int) -> Array:
    """`value` with the bytes of a register of `size` bytes: cut off above or extended by its own sign."""
    return value if value.dtype.itemsize == size else value.astype(UNSIGNED[size])


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
        value = int(np.array(operand.value, np.float32 if size == 4 else np.float64).view(UNSIGNED[4 if size == 4 else 8]))
    else:
        value = operand.value
    return UNSIGNED[size].type(value & ((1 << (8 * size)) - 1)).view(dtype)


@dataclass
class Segment:
    """A run of steps. `end` gives where each part of the fragment goes on, as (segment, threads) pairs."""

    number: int
    steps: list[tuple[Step, ptx.Instruction]] = field(default_factory=list)
    end: Callable[[Wave, Index], list[tuple[int, Index]]] | None = None
    end_instruction: ptx.Instruction | None = None
    sync: Callable[[Wave, Index], tuple[Index, Index]] | None = None

    @property
    def length(self) -> int:
        return len(self.steps) + (self.end_instruction is not None)


@dataclass
class Program:
    """A kernel ready to run.

    async_registers: registers that asynchronous instructions write.
    unproved: registers that some path may read before it wrote them; only these carry a shadow at run time.
    shared_offsets, local_offsets: where variables lie; static_shared, local_bytes: how much they need.
    """

    kernel: ptx.Kernel
    module: ptx.Module
    arch: str
    fine: bool
    segments: list[Segment] = field(default_factory=list)
    unproved: frozenset[int] = frozenset()
    shared_offsets: dict[str, int] = field(default_factory=dict)
    local_offsets: dict[str, int] = field(default_factory=dict)
    static_shared: int = 0
    local_bytes: int = 0
    sha256: str = ""
    async_registers: set[int] = field(default_factory=set)

    @property
    def param_bytes(self) -> int:
        params = self.kernel.params
        return params[-1].offset + params[-1].size if params else 0


# Shared memory below this address belongs to the system on sm_90 and later.
SHARED_START = 1024


class Lowering:
    """What a builder may use to turn one instruction into a step."""

    def __init__(self, program: Program, instruction: ptx.Instruction) -> None:
        self.program = program
        self.ins = instruction
        self.reads: set[int] = set()
        self.writes: set[int] = set()
        self.sync_mask: Read | None = None
        self.plain = False

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
        checked = k in self.program.unproved
        if k in self.program.async_registers and not self.plain:
            self.plain = True
            inner = self._read_register(k, kind)
            self.plain = False
            return self._landed(k, inner)
        if size == 0:
            if kind != "pred":
                raise self.fail(f"`{self.ins.name}` needs a {kind} operand, not a predicate")

            def predicate(w: Wave, i: Index) -> Array:
                a = w.regs[k]
                return a if i is None else a[i]

            return self._checked(k, predicate) if checked else predicate
        if kind == "pred":
            raise self.fail(
                f"`{self.ins.name}` needs a predicate, not {self.program.kernel.register_names[k]}"
            )
        if size == dtype.itemsize:

            def same(w: Wave, i: Index) -> Array:
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
            a = w.regs[k].view(unsigned).astype(cut).view(dtype)
            return a if i is None else a[i]

        return self._checked(k, narrower) if checked else narrower

    def in_flight(self, registers: list[int]) -> None:
        """Says that the instruction writes these registers later, so that reading them needs a wait first."""
        self.program.async_registers.update(registers)

    def read_accumulator(self, operand: ptx.Operand) -> Read:
        """The bits of a register that an asynchronous instruction may still be writing; zeros if it was never written."""
        if not isinstance(operand, ptx.Reg):
            raise self.fail(f"an accumulator of `{self.ins.name}` needs a register, not {operand}")
        k = operand.index

        def read(w: Wave, i: Index) -> Array:
            a = w.regs[k]
            if a is None:
                return np.zeros(w.count(i), np.uint32)
            return a.view(np.uint32) if i is None else a.view(np.uint32)[i]

        return read

    def _landed(self, k: int, inner: Read) -> Read:
        name = self.program.kernel.register_names[k]

        def read(w: Wave, i: Index) -> Array:
            flying = w.in_flight.get(k)
            if flying and w.checkers:
                warps = set(np.unique(w.warp[w.index(i)]).tolist())
                for operation in flying:
                    if operation.warps & warps:
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
                return lambda w, i: cut.type(
                    (w.launch.param_address + offset) & ((1 << 8 * cut.itemsize) - 1)
                )
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
                w.regs[k] = v
            else:
                # Registers are never changed in place: an array may serve several of them.
                old = w.regs[k]
                new = np.zeros(w.threads, storage) if old is None else old.copy()
                new.view(v.dtype)[i] = v
                w.regs[k] = new
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
                    f"`{ins.name}` is not available on {lowering.program.arch}, only on {', '.join(sorted(form.features))}",
                    kernel=lowering.program.kernel.name, line=ins.line, text=ins.text,
                )  # fmt: skip
            _FOUND[ins.name] = (form, modifiers)
            return form, modifiers
    known = "; ".join(f"{f.opcode} {' '.join(f.syntax.split()[1:])}".strip() for f in candidates)
    raise lowering.fail(f"unknown form `{ins.name}`; the table has: {known}")


def guard(lowering: Lowering, step: Step) -> Step:
    """`step` for the threads whose guard holds."""
    k = lowering.ins.guard
    assert k is not None
    read = lowering.read(ptx.Reg(k), "pred")
    negated = lowering.ins.guard_negated

    def guarded(w: Wave, i: Index) -> None:
        p = read(w, i)
        chosen = choose(i, ~p if negated else p)
        if chosen is None or chosen.size:
            step(w, chosen)

    return guarded


@dataclass
class _Built:
    form: Form
    step: Step
    lowering: Lowering


def _build(program: Program) -> list[_Built]:
    built = []
    for ins in program.kernel.code:
        lowering = Lowering(program, ins)
        form, modifiers = find_form(lowering)
        step = form.build(lowering, modifiers)
        if ins.guard is not None:
            if form.kind in ("plain", "sync"):
                step = guard(lowering, step)
            else:
                lowering.reads.add(ins.guard)
        built.append(_Built(form, step, lowering))
    return built


def _leaders(program: Program, built: list[_Built]) -> list[int]:
    starts = {0} | set(program.kernel.labels.values())
    for n, b in enumerate(built):
        if b.form.kind in ("branch", "exit", "blocking"):
            starts.add(n + 1)
        if b.form.kind in ("sync", "blocking"):
            starts.add(n)
        if program.fine and b.form.opcode in ("ld", "st", "atom", "red", "ldmatrix", "stmatrix", "ldu"):
            starts.add(n)
    return sorted(s for s in starts if s < len(built))


def _targets(program: Program, b: _Built) -> list[int]:
    """Instruction numbers that a branch may go to."""
    ops = b.lowering.operands
    kernel = program.kernel
    if b.form.opcode == "brx":
        table = ops[1]
        names = kernel.tables.get(table.name) if isinstance(table, ptx.Symbol) else None
        if names is None:
            raise b.lowering.fail("`brx.idx` needs a .branchtargets label")
    else:
        names = tuple(o.name for o in ops if isinstance(o, ptx.Symbol))
    missing = [n for n in names if n not in kernel.labels]
    if missing or not names:
        raise b.lowering.fail(
            f"branch target {missing[0] if missing else '(none)'} is not a label of this kernel"
        )
    return [kernel.labels[n] for n in names]


def _unproved(program: Program, built: list[_Built], starts: list[int]) -> frozenset[int]:
    """Registers that a path from the entry may read before writing, by forward must-analysis over segments."""
    number = {s: k for k, s in enumerate(starts)}
    ends = [*starts[1:], len(built)]
    everything = (1 << len(program.kernel.registers)) - 1
    incoming = [everything] * len(starts)
    if incoming:
        incoming[0] = 0
    work = list(range(len(starts)))
    unproved: set[int] = set()

    def flow(k: int, collect: bool) -> int:
        have = incoming[k]
        for b in built[starts[k] : ends[k]]:
            if collect:
                unproved.update(r for r in b.lowering.reads if not have >> r & 1)
            if b.lowering.ins.guard is None:
                for r in b.lowering.writes:
                    have |= 1 << r
        return have

    def following(k: int) -> list[int]:
        last = built[ends[k] - 1]
        kind, guarded = last.form.kind, last.lowering.ins.guard is not None
        after = [number[ends[k]]] if ends[k] in number else []
        if kind == "branch":
            goes = [number[t] for t in _targets(program, last) if t in number]
            return goes + (after if guarded else [])
        if kind == "exit" and not guarded:
            return []
        return after

    while work:
        k = work.pop()
        out = flow(k, False)
        for s in following(k):
            merged = incoming[s] & out
            if merged != incoming[s]:
                incoming[s] = merged
                work.append(s)
    for k in range(len(starts)):
        flow(k, True)
    return frozenset(unproved)


def _ending(program: Program, b: _Built, after: int, number: dict[int, int], last: int) -> Callable[..., Any]:
    """What happens at the end of a segment: (segment, threads) pairs; segment `last` means the kernel's end."""
    ins = b.lowering.ins
    guard_read = None if ins.guard is None else b.lowering.read(ptx.Reg(ins.guard), "pred")
    negated = ins.guard_negated

    def split(w: Wave, i: Index) -> tuple[Index, Index]:
        """Threads whose guard holds, and the others; an empty array where there are none."""
        if guard_read is None:
            return i, np.empty(0, np.intp)
        p = guard_read(w, i)
        if negated:
            p = ~p
        return choose(i, p), choose(i, ~p)

    def where(n: int) -> int:
        return number.get(n, last)

    if b.form.kind == "branch":
        targets = [where(t) for t in _targets(program, b)]
        if len(targets) == 1 and b.form.opcode == "bra":
            (target,) = targets

            def branch(w: Wave, i: Index) -> list[tuple[int, Index]]:
                yes, no = split(w, i)
                return [(target, yes), (after, no)]

            return branch
        select = b.lowering.read(ins.operands[0], "u32")

        def table(w: Wave, i: Index) -> list[tuple[int, Index]]:
            yes, no = split(w, i)
            parts: list[tuple[int, Index]] = [(after, no)]
            if w.count(yes):
                values = np.broadcast_to(select(w, yes), w.count(yes))
                if int(values.max()) >= len(targets):
                    raise Fault(
                        "branch", f"index {int(values.max())} is past the {len(targets)} entries of the table"
                    )
                parts += [(t, choose(yes, values == n)) for n, t in enumerate(targets)]
            return parts

        return table
    if b.form.kind == "exit":

        def leave(w: Wave, i: Index) -> list[tuple[int, Index]]:
            yes, no = split(w, i)
            if w.count(yes):
                w.exit(yes)
            return [(after, no)]

        return leave
    step = b.step

    def block(w: Wave, i: Index) -> list[tuple[int, Index]]:
        yes, no = split(w, i)
        parts: list[tuple[int, Index]] = [(after, no)]
        if w.count(yes):
            w.resume = after
            parts += [(after, go) for go in step(w, yes)]
        return parts

    return block


def _place_variables(program: Program) -> None:
    shared = SHARED_START
    local = 0
    for v in (*program.module.variables, *program.kernel.variables):
        if v.space == "shared" and v.size:
            shared = -(-shared // v.alignment) * v.alignment
            program.shared_offsets[v.name] = shared
            shared += v.size
        elif v.space == "local":
            local = -(-local // v.alignment) * v.alignment
            program.local_offsets[v.name] = local
            local += v.size
    program.static_shared = shared - SHARED_START
    # Dynamic shared memory follows the static; kernels round their buffers up to 1024 bytes.
    dynamic = -(-shared // 1024) * 1024
    for v in (*program.module.variables, *program.kernel.variables):
        if v.space == "shared" and not v.size:
            program.shared_offsets[v.name] = dynamic
    program.local_bytes = -(-local // 16) * 16


def dynamic_start(program: Program) -> int:
    """Where dynamic shared memory begins."""
    return -(-(SHARED_START + program.static_shared) // 1024) * 1024


def lower(module: ptx.Module, kernel: ptx.Kernel, arch: str, fine: bool) -> Program:
    """The program of a kernel.

    fine: every access to memory starts a segment, so that a scheduler may change threads before it.
    """
    program = Program(kernel, module, arch, fine, sha256=hashlib.sha256(module.text.encode()).hexdigest())
    _place_variables(program)
    built = _build(program)
    starts = _leaders(program, built)
    program.unproved = _unproved(program, built, starts)
    if program.unproved or program.async_registers:
        built = _build(program)
    number = {s: k for k, s in enumerate(starts)}
    ends = [*starts[1:], len(built)]
    last = len(starts)
    for k, start in enumerate(starts):
        segment = Segment(k)
        after = number.get(ends[k], last)
        for b in built[start : ends[k]]:
            if b.form.kind in ("plain", "sync"):
                segment.steps.append((b.step, b.lowering.ins))
            else:
                segment.end = _ending(program, b, after, number, last)
                segment.end_instruction = b.lowering.ins
        if built[start].lowering.sync_mask is not None:
            segment.sync = _rendezvous(built[start])
        if segment.end is None:
            segment.end = lambda w, i, after=after: [(after, i)]  # type: ignore[misc]
        program.segments.append(segment)
    return program


def _rendezvous(b: _Built) -> Callable[[Wave, Index], tuple[Index, Index]]:
    mask = b.lowering.sync_mask
    assert mask is not None
    guard_read = (
        None if b.lowering.ins.guard is None else b.lowering.read(ptx.Reg(b.lowering.ins.guard), "pred")
    )
    negated = b.lowering.ins.guard_negated

    def meet(w: Wave, i: Index) -> tuple[Index, Index]:
        if guard_read is None:
            return w.rendezvous(i, mask)
        p = guard_read(w, i)
        taking = choose(i, ~p if negated else p)
        if w.count(taking) == 0:
            return i, np.empty(0, np.intp)
        ready, waiting = w.rendezvous(taking, mask)
        passing = choose(i, p if negated else ~p)
        return w.union(ready, passing), waiting

    return meet


@lru_cache(maxsize=64)
def parsed(text: str) -> ptx.Module:
    """`ptx.parse` with a cache by text."""
    return ptx.parse(text)


_PROGRAMS: dict[tuple[str, str, str, bool], Program] = {}


def program(text: str, name: str | None, arch: str, fine: bool) -> Program:
    """The program of kernel `name` (None: the only one) of a PTX text; cached by the text's hash."""
    module = parsed(text)
    if name is None:
        if len(module.kernels) != 1:
            raise error(
                "unknown_kernel",
                f"the PTX has {len(module.kernels)} kernels: say which of {sorted(module.kernels)}",
            )
        (name,) = module.kernels
    if name not in module.kernels:
        raise error("unknown_kernel", f"the PTX has no kernel {name}: it has {sorted(module.kernels)}")
    digest = hashlib.sha256(text.encode()).hexdigest()
    key = (digest, name, arch, fine)
    if key not in _PROGRAMS:
        if len(_PROGRAMS) >= 256:
            _PROGRAMS.pop(next(iter(_PROGRAMS)))
        _check_target(module, arch)
        _PROGRAMS[key] = lower(module, module.kernels[name], arch, fine)
    return _PROGRAMS[key]


def _check_target(module: ptx.Module, arch: str) -> None:
    target = module.target
    digits = "".join(c for c in target if c.isdigit())
    mine = "".join(c for c in arch if c.isdigit())
    exact = target[-1:] in "af" and not target[-1:].isdigit()
    if not target.startswith("sm_") or not digits:
        raise error("unknown_target", f".target {target} is not known", line=1)
    if int(digits) > int(mine) or (exact and target.rstrip("f") != arch and int(digits) != int(mine)):
        raise error("unavailable", f"PTX for {target} cannot run on a virtual {arch}")
