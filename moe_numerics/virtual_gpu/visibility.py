"""What other warps can notice of an instruction, so that a schedule orders that and nothing else.

No warp can tell when another one changed its own registers, or read memory that nobody stores to in this launch. Such
quiet steps may run at any moment between their neighbours in the program, and those of several warps together.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import TYPE_CHECKING

from . import ptx
from .lowering import choose, guard_mask
from .registry import Delayed, Index

if TYPE_CHECKING:
    from .launch import Launch
    from .program import Built, Program
    from .wave import Wave

Words = frozenset[int]


class View(IntEnum):
    """How a segment looks from outside.

    QUIET: not at all. EXCHANGE: neither, but lanes of a warp meet in it. LOAD: it reads global memory, so that it is
    quiet where nobody stores. STORE: a weak store alone, whose operands can be taken before it happens.
    """

    VISIBLE = 0
    QUIET = 1
    EXCHANGE = 2
    LOAD = 3
    STORE = 4


# Instructions that read and write registers of their own thread only.
_OWN_REGISTERS = frozenset(
    {
        "abs", "add", "addc", "and", "bfe", "bfi", "bfind", "bmsk", "bra", "brev", "brx", "clz", "cnot", "copysign",
        "cos", "createpolicy", "cvt", "cvta", "div", "dp2a", "dp4a", "ex2", "fma", "fns", "getctarank", "isspacep",
        "lg2", "lop3", "mad", "mad24", "madc", "mapa", "max", "min", "mov", "mul", "mul24", "neg", "not", "or", "popc",
        "prmt", "rcp", "rem", "rsqrt", "sad", "selp", "set", "setp", "shf", "shl", "shr", "sin", "slct", "sqrt", "sub",
        "subc", "szext", "tanh", "testp", "xor",
    }
)  # fmt: skip
# Instructions in which the lanes of a warp meet; what they do beyond that concerns their own warp.
_EXCHANGES = frozenset({"elect", "match", "mma", "movmatrix", "redux", "setmaxnreg", "shfl", "vote"})
_OWN_GROUPS = ("bar.warp.sync", "wgmma.commit_group", "wgmma.fence")
_OWN_MEMORY = frozenset({"param", "param::entry", "const", "local"})
_STRONG = frozenset({"relaxed", "acquire", "release", "volatile", "mmio", "async", "bulk"})


def space(ins: ptx.Instruction) -> str:
    """The state space that an instruction names first, `generic` if none."""
    for m in ins.modifiers:
        if m in _OWN_MEMORY or m == "global" or m.startswith("shared"):
            return m
    return "generic"


def view(b: Built, private: bool) -> View:
    """The view of one instruction.

    private: whether threads have local memory, which generic addresses may reach.
    """
    ins = b.lowering.ins
    if ins.opcode in _OWN_REGISTERS:
        return View.QUIET
    if ins.opcode in _EXCHANGES or ins.name.startswith(_OWN_GROUPS):
        return View.EXCHANGE
    if ins.opcode in ("ld", "st") and _STRONG.isdisjoint(ins.modifiers):
        where = space(ins)
        if where in _OWN_MEMORY:
            return View.QUIET
        if ins.opcode == "st" and b.lowering.delayed is not None and not (private and where == "generic"):
            return View.STORE
        if ins.opcode == "ld" and where == "global":
            return View.LOAD
    return View.VISIBLE


def origins(kernel: ptx.Kernel, built: list[Built]) -> list[Words]:
    """For each register, offsets of the 8-byte words of the parameters that its value may have come from.

    What is loaded from memory has no origin.
    """
    params = {p.name: p.offset for p in kernel.params}
    found: list[Words] = [frozenset()] * len(kernel.registers)
    changed = True
    while changed:
        changed = False
        for b in built:
            ins, lowering = b.lowering.ins, b.lowering
            if ins.opcode == "ld":
                if not space(ins).startswith("param"):
                    continue
                sources = _loaded(kernel, ins, params)
            else:
                symbols = [o.name for o in ins.operands if isinstance(o, ptx.Symbol) and o.name in params]
                words: Words = frozenset(params[name] // 8 * 8 for name in symbols)
                words = words.union(*(found[r] for r in lowering.reads))
                sources = dict.fromkeys(lowering.writes, words)
            for r, words in sources.items():
                if not words <= found[r]:
                    found[r] |= words
                    changed = True
    return found


def _loaded(kernel: ptx.Kernel, ins: ptx.Instruction, params: dict[str, int]) -> dict[int, Words]:
    """The words that each register gets of a load from parameter space; all of them by an address in a register."""
    target, address = ins.operands[:2]
    targets = target.items if isinstance(target, ptx.Vector) else (target,)
    size = ptx.TYPE_BYTES[ins.modifiers[-1]]
    base = address.base if isinstance(address, ptx.Address) else None
    result: dict[int, Words] = {}
    for n, register in enumerate(targets):
        if not isinstance(register, ptx.Reg):
            continue
        if isinstance(address, ptx.Address) and isinstance(base, ptx.Symbol):
            # The parameter of a call is no parameter of the kernel.
            known = base.name in params
            start = params.get(base.name, 0) + address.offset + n * size
            result[register.index] = frozenset({start // 8 * 8}) if known else frozenset()
        else:
            end = sum(p.offset + p.size for p in kernel.params[-1:])
            result[register.index] = frozenset(range(0, end, 8))
    return result


def _based_on(address: ptx.Operand, found: list[Words], params: dict[str, int]) -> Words:
    base = address.base if isinstance(address, ptx.Address) else None
    if isinstance(base, ptx.Reg):
        return found[base.index]
    if isinstance(base, ptx.Symbol) and base.name in params:
        return frozenset({params[base.name] // 8 * 8})
    return frozenset()


def footprint(kernel: ptx.Kernel, built: list[Built]) -> tuple[dict[int, Words], list[Words] | None]:
    """Origins of the addresses of plain loads by instruction number, and of everything that changes global memory.

    The latter is None for a kernel with instructions about which that is not known.
    """
    found = origins(kernel, built)
    params = {p.name: p.offset for p in kernel.params}
    loads: dict[int, Words] = {}
    stores: list[Words] | None = []
    for n, b in enumerate(built):
        ins = b.lowering.ins
        first = next((o for o in ins.operands if isinstance(o, ptx.Address)), None)
        if ins.opcode in ("call", "tensormap"):
            stores = None
        elif ins.opcode == "ld" and first is not None:
            loads[n] = _based_on(first, found, params)
        elif ins.opcode in ("st", "atom", "red", "cp", "discard") and first is not None and stores is not None:
            where = space(ins)
            if where in ("global", "generic"):
                stores.append(_based_on(first, found, params))
    return loads, stores


def part(program: Program, built: list[Built], starts: set[int]) -> None:
    """Begins a segment at each access to memory and at whatever others can notice after what they cannot."""
    quiet = True
    for n, b in enumerate(built):
        quiet |= n in starts
        seen = view(b, bool(program.local_bytes))
        if seen in (View.QUIET, View.EXCHANGE):
            continue
        if quiet or b.form.opcode in ("ld", "st", "atom", "red", "ldmatrix", "stmatrix"):
            starts.add(n)
        quiet = seen is not View.VISIBLE
        if seen is View.STORE:
            starts.add(n + 1)


def note_views(program: Program, built: list[Built], starts: list[int]) -> None:
    """Says of each segment what others can notice of it."""
    loads, program.stores = footprint(program.kernel, built)
    for segment, start, end in zip(program.segments, starts, [*starts[1:], len(built)], strict=True):
        seen = [view(b, bool(program.local_bytes)) for b in built[start:end]]
        segment.view = View.VISIBLE if View.VISIBLE in seen else seen[0]
        segment.origins = loads.get(start, frozenset())
        if segment.view is View.STORE:
            segment.delayed = _delayed(built[start])


def _delayed(b: Built) -> Callable[[Wave, Index], tuple[Index, Delayed]]:
    """Takes a store's operands now: gives the threads whose guard holds and what stores for some of them later."""
    delayed = b.lowering.delayed
    assert delayed is not None
    guarded = guard_mask(b.lowering)

    def take(w: Wave, i: Index) -> tuple[Index, Delayed]:
        if guarded is not None:
            i = choose(i, guarded(w, i))
        return i, delayed(w, i)

    return take


def views(program: Program, launch: Launch) -> list[View]:
    """The view of each segment in a launch: loads become quiet where the parameters say that nobody stores there."""
    stored = _allocations(launch, program.stores)
    result = []
    for segment in program.segments:
        seen = segment.view
        if seen is View.LOAD:
            read = None if stored is None else _allocations(launch, [segment.origins])
            quiet = stored is not None and read is not None and read.isdisjoint(stored)
            seen = View.QUIET if quiet else View.VISIBLE
        result.append(seen)
    return result


def stored(program: Program, launch: Launch) -> frozenset[int]:
    """Base addresses of the allocations that the parameters say are stored to."""
    return _allocations(launch, program.stores) or frozenset()


def _allocations(launch: Launch, addresses: Iterable[Words] | None) -> frozenset[int] | None:
    """Bases of the allocations to which words of the parameters point; None if one set of words has no pointer."""
    if addresses is None:
        return None
    bases: set[int] = set()
    for words in addresses:
        here = set()
        for offset in words:
            if offset + 8 <= len(launch.arguments):
                (value,) = struct.unpack_from("<Q", launch.arguments, offset)
                allocation = launch.memory.find(value, value)
                if allocation is not None:
                    here.add(allocation.base)
        if not here:
            return None
        bases |= here
    return frozenset(bases)
