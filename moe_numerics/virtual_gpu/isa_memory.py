"""Loads and stores (PTX ISA 9.7.9.8 to 9.7.9.12) and hints that change no value."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import memory, ptx
from .lowering import VIEW, Lowering
from .memory import Array
from .registry import Delayed, Index, Modifiers, Step, instruction

_TYPES = "type=b8|u8|s8|b16|u16|s16|b32|u32|s32|b64|u64|s64|f32|f64"
_WIDE = "type=b32|u32|s32|f32"
_SPACES = "global|shared|shared::cta|shared::cluster|local|const|param|param::entry"
_STORED = "global|shared|shared::cta|shared::cluster|local|param"
_LOADED = "sem?=weak|relaxed|acquire|volatile"
_WRITTEN = "sem?=weak|relaxed|release|volatile"
_SCOPE = "scope?=cta|cluster|gpu|sys"
_KEPT = "L2::evict_normal|L2::evict_first|L2::evict_last"
_FETCHED = "L2::64B|L2::128B|L2::256B"
_L1 = "l1?=L1::evict_normal|L1::evict_unchanged|L1::evict_first|L1::evict_last|L1::no_allocate"
_READ_LEVEL = f"{_L1} l2?={_KEPT}|L2::cache_hint|{_FETCHED} l2b?=L2::cache_hint|{_FETCHED}"
_WRITE_LEVEL = f"{_L1} l2?={_KEPT}|L2::cache_hint l2b?=L2::cache_hint"
_SPACE_OF = {"global": "global", "const": "global", "local": "local", "shared": "shared", "shared::cta": "shared",
             "shared::cluster": "shared", "param": "param", "param::entry": "param"}  # fmt: skip


def space_of(name: str | None) -> str:
    return "generic" if name is None else _SPACE_OF[name]


def _checked(b: Lowering, m: Modifiers) -> None:
    """Refuses what goes with accesses of 32 bytes only, and these where they do not exist."""
    whole = VIEW[m.type].itemsize * int(m.vec[1:] if m.vec else 1) == 32
    if whole and (m.space not in (None, "global") or b.program.arch == "sm_90a"):
        raise b.fail(f"`{b.ins.name}`: accesses of 32 bytes are to global memory, on sm_100a")
    if m.nc and (m.space != "global" or m.sem not in (None, "weak") or m.cop not in (None, "ca", "cg", "cs")):
        raise b.fail(f"`{b.ins.name}`: .nc goes with weak loads of .global memory, and with .ca, .cg or .cs")
    if (m.l2 or "").startswith("L2::evict") and not whole:
        raise b.fail(f"`{b.ins.name}`: .{m.l2} goes with .v8.b32 and .v4.b64 only")


@instruction(f"ld {_LOADED} {_SCOPE} space?={_SPACES} .nc? cop?=ca|cg|cs|lu|cv {_READ_LEVEL} vec?=v2|v4 {_TYPES}")
@instruction(f"ld space=global cop=ca|cg|cs .nc {_READ_LEVEL} vec?=v2|v4 {_TYPES}")
@instruction(f"ld sem=mmio .relaxed scope=sys space?=global {_TYPES}")
@instruction(
    f"ld {_LOADED} {_SCOPE} space?=global .nc? cop?=ca|cg|cs|lu|cv {_READ_LEVEL} vec=v8 {_WIDE}",
    features=("sm_100a",),
)
@instruction(f"ldu space?=global vec?=v2|v4 {_TYPES}")
def load(b: Lowering, m: Modifiers) -> Step:
    _checked(b, m)
    space = space_of(m.space)
    targets = b.items(b.operands[0])
    count = int(m.vec[1:]) if m.vec else 1
    if len(targets) != count:
        raise b.fail(f"`{b.ins.name}` loads {count} items into {len(targets)} registers")
    writes = [b.write(t, m.type) for t in targets]
    size = VIEW[m.type].itemsize
    if space == "param":
        return _load_param(b, m, writes)
    address = b.address(b.operands[1])
    view = VIEW[m.type]
    atomic = m.sem in ("relaxed", "acquire", "volatile", "mmio")

    def step(w: Any, i: Index) -> None:
        w.strong = atomic
        loaded = memory.load(w, i, space, address(w, i), size, count)
        w.strong = False
        for write, values in zip(writes, loaded, strict=True):
            write(w, i, values.view(view))

    return step


def _load_param(b: Lowering, m: Modifiers, writes: list[Any]) -> Step:
    """Parameters are the same for all threads; the address of a parameter is known before the launch."""
    operand = b.operands[1]
    view = VIEW[m.type]
    size = view.itemsize
    if not isinstance(operand, ptx.Address):
        raise b.fail("ld.param needs an address")
    if isinstance(operand.base, ptx.Symbol) and operand.base.name in b.program.local_offsets:
        read = b.address(operand)

        def private(w: Any, i: Index) -> None:
            """A parameter of a call, which is the thread's own."""
            for write, values in zip(writes, memory.load(w, i, "local", read(w, i), size, len(writes)), strict=True):
                write(w, i, values.view(view))

        return private
    params = {p.name: p for p in b.program.kernel.params}
    if isinstance(operand.base, ptx.Symbol) and operand.base.name in params:
        param = params[operand.base.name]
        offset = param.offset + operand.offset
        if operand.offset < 0 or operand.offset + size * len(writes) > param.size:
            raise b.fail(f"`{b.ins.name}` reads outside parameter {param.name} of {param.size} bytes")

        def step(w: Any, i: Index) -> None:
            for n, write in enumerate(writes):
                start = offset + n * size
                value = np.frombuffer(w.launch.arguments, view, 1, start)[0]
                write(w, i, np.full(w.count(i), value))

        return step
    address = b.address(operand)

    def indexed(w: Any, i: Index) -> None:
        for write, values in zip(writes, memory.load(w, i, "global", address(w, i), size, len(writes)), strict=True):
            write(w, i, values.view(view))

    return indexed


@instruction(f"st {_WRITTEN} {_SCOPE} space?={_STORED} cop?=wb|cg|cs|wt {_WRITE_LEVEL} vec?=v2|v4 {_TYPES}")
@instruction(f"st sem=mmio .relaxed scope=sys space?=global {_TYPES}")
@instruction(
    f"st {_WRITTEN} {_SCOPE} space?=global cop?=wb|cg|cs|wt {_WRITE_LEVEL} vec=v8 {_WIDE}",
    features=("sm_100a",),
)
def store(b: Lowering, m: Modifiers) -> Step:
    _checked(b, m)
    space = space_of(m.space)
    if space == "param":
        target = b.operands[0]
        base = target.base if isinstance(target, ptx.Address) else None
        if not isinstance(base, ptx.Symbol) or base.name not in b.program.local_offsets:
            raise b.fail(f"`{b.ins.name}` stores to the parameters of a call only")
        space = "local"
    address = b.address(b.operands[0])
    sources = b.items(b.operands[1])
    count = int(m.vec[1:]) if m.vec else 1
    if len(sources) != count:
        raise b.fail(f"`{b.ins.name}` stores {count} items from {len(sources)} registers")
    size = VIEW[m.type].itemsize
    unsigned = f"b{8 * size}"
    reads = [b.read(s, unsigned) if not isinstance(s, ptx.Imm) else b.read(s, m.type) for s in sources]
    dtype = VIEW[unsigned]
    strong = m.sem in ("relaxed", "release", "volatile", "mmio")

    def step(w: Any, i: Index) -> None:
        w.strong = strong
        memory.store(w, i, space, address(w, i), size, [np.asarray(r(w, i)).view(dtype) for r in reads])
        w.strong = False

    def delayed(w: Any, i: Index) -> Delayed:
        where, values = address(w, i), [np.asarray(r(w, i)).view(dtype) for r in reads]
        w.ahead.expect_store(space, where, size * count)

        def put(w: Any, threads: Array, positions: Array) -> None:
            mine = [v if v.ndim == 0 else v[positions] for v in values]
            memory.store(w, threads, space, where[positions], size, mine)

        return put

    b.delayed = delayed
    return step


@instruction("prefetch space?=global|local level?=L1|L2 policy?=L2::evict_last|L2::evict_normal")
@instruction("prefetch space?=param|const .tensormap")
@instruction("prefetchu .L1")
@instruction("applypriority space?=global .L2::evict_normal")
@instruction("discard space?=global .L2")
def hint(b: Lowering, m: Modifiers) -> Step:
    b.address(b.operands[0])
    return lambda w, i: None


@instruction("createpolicy .fractional primary=L2::evict_last|L2::evict_normal|L2::evict_first|L2::evict_unchanged "
             "secondary?=L2::evict_first|L2::evict_unchanged .b64")  # fmt: skip
@instruction("createpolicy .range .global? primary=L2::evict_last|L2::evict_normal|L2::evict_first|L2::evict_unchanged "
             "secondary?=L2::evict_first|L2::evict_unchanged .b64")  # fmt: skip
@instruction("createpolicy .cvt .L2 .b64")
def policy(b: Lowering, m: Modifiers) -> Step:
    """Cache policies change no value; the opaque result is 0."""
    write = b.write(b.operands[0], "b64")
    return lambda w, i: write(w, i, np.zeros(w.count(i), np.uint64))
