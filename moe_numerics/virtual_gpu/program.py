"""Programs: the instructions of a kernel as segments of steps, with their control flow.

A kernel becomes a list of segments in program order. A segment is a run of steps that all threads of a fragment
execute together; it ends at a branch, a label, or an instruction that may park threads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_numerics.garbage import uncollected

from . import ptx, ptx_parser, visibility
from .errors import Fault, error
from .lowering import Lowering, choose, find_form, guard, guard_mask
from .registry import Delayed, Form, Index, Step
from .visibility import View

if TYPE_CHECKING:
    from .wave import Wave


@dataclass
class Segment:
    """A run of steps. `end` gives where each part of the fragment goes on, as (segment, threads) pairs.

    view: what others can notice of it; origins: of a `LOAD`, words of the parameters from which its address comes;
    delayed: of a `STORE`, takes its operands and gives the threads that store, and what lets some of them do it.
    """

    number: int
    steps: list[tuple[Step, ptx.Instruction]] = field(default_factory=list)
    end: Callable[[Wave, Index], list[tuple[int, Index]]] | None = None
    end_instruction: ptx.Instruction | None = None
    sync: Callable[[Wave, Index], tuple[Index, Index]] | None = None
    view: View = View.VISIBLE
    origins: frozenset[int] = frozenset()
    delayed: Callable[[Wave, Index], tuple[Index, Delayed]] | None = None

    @property
    def first(self) -> ptx.Instruction | None:
        return self.steps[0][1] if self.steps else self.end_instruction

    @property
    def length(self) -> int:
        return len(self.steps) + (self.end_instruction is not None)


@dataclass(eq=False)
class Program:
    """A kernel ready to run.

    async_registers: registers that asynchronous instructions write.
    unproved: registers that some path may read before it wrote them; only these carry a shadow at run time.
    undefined: registers that no instruction writes.
    shared_offsets, local_offsets: where variables lie; static_shared, local_bytes: how much they need.
    stores: words of the parameters from which the addresses of stores to global memory come; None: not known.
    """

    kernel: ptx.Kernel
    module: ptx.Module
    arch: str
    fine: bool
    segments: list[Segment] = field(default_factory=list)
    unproved: frozenset[int] = frozenset()
    undefined: frozenset[int] = frozenset()
    shared_offsets: dict[str, int] = field(default_factory=dict)
    local_offsets: dict[str, int] = field(default_factory=dict)
    static_shared: int = 0
    local_bytes: int = 0
    sha256: str = ""
    async_registers: set[int] = field(default_factory=set)
    stores: list[frozenset[int]] | None = None

    @property
    def param_bytes(self) -> int:
        params = self.kernel.params
        return params[-1].offset + params[-1].size if params else 0


# Shared memory below this address belongs to the system on sm_90 and later.
SHARED_START = 1024


@dataclass
class Built:
    form: Form
    step: Step
    lowering: Lowering


def _build(program: Program) -> list[Built]:
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
        built.append(Built(form, step, lowering))
    return built


def _leaders(program: Program, built: list[Built]) -> list[int]:
    starts = {0} | set(program.kernel.labels.values())
    for n, b in enumerate(built):
        if b.form.kind in ("branch", "exit", "blocking"):
            starts.add(n + 1)
        if b.form.kind in ("sync", "blocking"):
            starts.add(n)
    if program.fine:
        visibility.part(program, built, starts)
    return sorted(s for s in starts if s < len(built))


def _targets(program: Program, b: Built) -> list[int]:
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
        raise b.lowering.fail(f"branch target {missing[0] if missing else '(none)'} is not a label of this kernel")
    return [kernel.labels[n] for n in names]


def _unproved(program: Program, built: list[Built], starts: list[int]) -> frozenset[int]:
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


def _ending(program: Program, b: Built, after: int, number: dict[int, int], last: int) -> Callable[..., Any]:
    """What happens at the end of a segment: (segment, threads) pairs; segment `last` means the kernel's end."""
    ins = b.lowering.ins
    guarded = guard_mask(b.lowering)

    def split(w: Wave, i: Index) -> tuple[Index, Index]:
        """Threads whose guard holds, and the others; an empty array where there are none."""
        if guarded is None:
            return i, np.empty(0, np.intp)
        p = guarded(w, i)
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
                    raise Fault("branch", f"index {int(values.max())} is past the {len(targets)} entries of the table")
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
        elif v.space in ("local", "param"):
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
    written = {r for b in built for r in b.lowering.writes}
    program.undefined = frozenset(range(len(kernel.registers))) - written
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
            segment.end = lambda w, i, after=after: [(after, i)]
        program.segments.append(segment)
    if fine:
        visibility.note_views(program, built, starts)
    return program


def _rendezvous(b: Built) -> Callable[[Wave, Index], tuple[Index, Index]]:
    mask = b.lowering.sync_mask
    assert mask is not None
    guarded = guard_mask(b.lowering)

    def meet(w: Wave, i: Index) -> tuple[Index, Index]:
        if guarded is None:
            return w.rendezvous(i, mask)
        p = guarded(w, i)
        taking = choose(i, p)
        if w.count(taking) == 0:
            return i, np.empty(0, np.intp)
        ready, waiting = w.rendezvous(taking, mask)
        passing = choose(i, ~p)
        return w.union(ready, passing), waiting

    return meet


@lru_cache(maxsize=64)
def parsed(text: str) -> ptx.Module:
    """`ptx_parser.parse` with a cache by text."""
    with uncollected():
        return ptx_parser.parse(text)


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
        with uncollected():
            _PROGRAMS[key] = lower(module, module.kernels[name], arch, fine)
    return _PROGRAMS[key]


def _check_target(module: ptx.Module, arch: str) -> None:
    target = module.target
    digits = "".join(c for c in target if c.isdigit())
    mine = "".join(c for c in arch if c.isdigit())
    exact = target[-1:] in "af" and not target[-1:].isdigit()
    where = {"line": module.target_line, "text": module.text.splitlines()[module.target_line - 1].strip()}
    if not target.startswith("sm_") or not digits:
        raise error("unknown_target", f".target {target} is not known", **where)
    if int(digits) > int(mine) or (exact and target.rstrip("f") != arch and int(digits) != int(mine)):
        raise error("unavailable", f"PTX for {target} cannot run on a virtual {arch}", **where)
