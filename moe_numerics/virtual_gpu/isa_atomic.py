"""Atomic operations (PTX ISA 9.7.13.5, 9.7.13.6).

Threads that hit the same address are served one after the other, in the order of their numbers; a random schedule
changes that order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import floats, memory, ptx
from .isa_half import TABLES, round_to
from .isa_memory import space_of
from .lowering import VIEW, Lowering
from .memory import Array
from .registry import Index, Modifiers, Step, instruction

_SEM = "sem?=relaxed|acquire|release|acq_rel"
_RED_SEM = "sem?=relaxed|release"
_SCOPE = "scope?=cta|cluster|gpu|sys"
_SPACE = "space?=global|shared|shared::cta|shared::cluster"
_HINT = "hint?=L2::cache_hint"
_VECTOR = "vec=v2|v4|v8 type=f16|bf16|f16x2|bf16x2"


def _halves(kind: str, op: str) -> Callable[[Array, Array], Array]:
    """The operation on one or two 16-bit floats in a word."""
    name = kind.removesuffix("x2")
    table = TABLES[name]

    def apply(old: Array, value: Array) -> Array:
        x = np.ascontiguousarray(old).view(np.uint16)
        y = np.ascontiguousarray(value).view(np.uint16)
        a, b = table[x].astype(np.float64), table[y].astype(np.float64)
        if op == "add":
            r = round_to(name, floats.odd(*floats.two_sum(a, b)))
        else:
            small = floats.minmax(a.astype(np.float32), b.astype(np.float32), op == "max", False)
            r = round_to(name, small.astype(np.float64))
        return r.view(old.dtype)

    return apply


def operation(op: str, kind: str) -> Callable[..., Array]:
    if kind in ("f16", "bf16", "f16x2", "bf16x2"):
        return _halves(kind, op)
    table: dict[str, Callable[..., Any]] = {
        "add": (lambda o, v: floats.add(o, v, "rn")) if kind == "f32" else np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "exch": lambda o, v: v,
        "inc": lambda o, v: np.where(o >= v, o.dtype.type(0), o + o.dtype.type(1)),
        "dec": lambda o, v: np.where((o == 0) | (o > v), v, o - o.dtype.type(1)),
        "cas": lambda o, compare, v: np.where(o == compare, v, o),
    }
    return table[op]


def _flushing_add(old: Array, value: Array) -> Array:
    return floats.flush(floats.add(floats.flush(old), floats.flush(value), "rn"))


def _keeping_add(old: Array, value: Array) -> Array:
    """A NaN stays as it is, the operand's before the cell's."""
    return np.where(np.isnan(value), value, np.where(np.isnan(old), old, old + value))


_GLOBAL_SUMS = {"f32": _flushing_add, "f64": _keeping_add}


def reduction(op: str, kind: str) -> Callable[..., Array]:
    """`operation` as the units of global memory do it."""
    return _GLOBAL_SUMS[kind] if op == "add" and kind in _GLOBAL_SUMS else operation(op, kind)


_INTEGER_AT = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
               "xor": np.bitwise_xor}  # fmt: skip


def perform(
    w: Any, i: Index, space: str, address: Array, size: int, kind: str, op: str, values: list[Array], want: bool,
    checked: bool = True,
) -> Array | None:  # fmt: skip
    """Applies the operation at every thread's address; gives the values found there if wanted.

    checked: whether the race checker is told here.
    """
    apply = operation(op, kind)
    view = VIEW[kind]
    parts = memory.locate(w, i, space, address, size)
    old = np.empty(address.size, view) if want else None
    for region, offsets, where in parts:
        memory.check_writable(region, i, where, address, size)
        items = offsets >> memory.SHIFT[size]
        if region.must_be_written and w.checkers:
            memory.check_written(w, i, region, items, size, 1, where, address)
        if w.tracker is not None and checked:
            w.tracker.access(w, i, where, region, offsets, size, "atomic")
        w.launch.traffic(region.space, "read", size * items.size)
        w.launch.traffic(region.space, "written", size * items.size)
        mine = [v if where is None else v[where] for v in values]
        cells = region.view(size).view(view)
        if old is None and op in _INTEGER_AT and kind[0] in "usb" and kind[1].isdigit():
            _INTEGER_AT[op].at(cells, items, mine[0])
            if region.shadow is not None:
                region.store(items, size, region.load(items, size))
            continue
        # Global memory's adders flush subnormal float32 and do not quiet a NaN of float64 (seen on an H200).
        added = reduction(op, kind) if region.space == "global" else apply
        found = _serve(w, cells, items, mine, added)
        if region.shadow is not None:
            region.store(items, size, region.load(items, size))
        if old is not None:
            old[slice(None) if where is None else where] = found
    return old


def _serve(w: Any, cells: Array, items: Array, values: list[Array], apply: Callable[..., Array]) -> Array:
    """One round for each rank among the threads that share a cell."""
    found = np.empty(items.size, cells.dtype)
    shuffled = w.schedule.shuffle(items.size)
    order = np.argsort(items if shuffled is None else items[shuffled], kind="stable")
    if shuffled is not None:
        order = shuffled[order]
    ordered = items[order]
    fresh = np.concatenate(([True], ordered[1:] != ordered[:-1]))
    starts = np.flatnonzero(fresh)
    rank = np.arange(items.size) - np.repeat(starts, np.diff(np.append(starts, items.size)))
    for r in range(int(rank.max()) + 1):
        chosen = order[rank == r]
        at = items[chosen]
        before = cells[at]
        found[chosen] = before
        cells[at] = apply(before, *(v[chosen] for v in values))
    return found


def _build(b: Lowering, m: Modifiers, returns: bool) -> Step:
    kind = m.type
    size = VIEW[kind].itemsize
    space = space_of(m.space)
    op = m.op
    if (op, kind) == ("add", "s64"):
        raise b.fail(f"`{b.ins.name}`: sums of 64 bits are .u64")
    count = m.vec and int(m.vec[1:])
    target = b.operands[0] if returns else None
    rest = b.operands[1:] if returns else b.operands
    address = b.address(rest[0])
    sources = rest[1:3] if op == "cas" else rest[1:2]
    if count:
        return _vector(b, m, target, address, sources[0], count)
    reads = [b.full(b.read(s, kind)) for s in sources]
    sink = target is None or isinstance(target, ptx.Sink)
    write = None if sink or target is None else b.write(target, kind)

    def step(w: Any, i: Index) -> None:
        old = perform(w, i, space, address(w, i), size, kind, op, [r(w, i) for r in reads], write is not None)
        if write is not None:
            assert old is not None
            write(w, i, old)

    return step


def _vector(
    b: Lowering, m: Modifiers, target: ptx.Operand | None, address: Any, source: ptx.Operand, count: int
) -> Step:
    """`.v2`, `.v4`, `.v8`: one atomic operation for each element."""
    kind = m.type
    size = VIEW[kind].itemsize
    reads = [b.full(b.read(s, kind)) for s in b.items(source)]
    writes = None if target is None or isinstance(target, ptx.Sink) else [b.write(t, kind) for t in b.items(target)]
    if len(reads) != count or (writes is not None and len(writes) != count):
        raise b.fail(f"`{b.ins.name}` needs {count} elements")

    def step(w: Any, i: Index) -> None:
        base = address(w, i)
        memory.locate(w, i, space_of(m.space), base, size * count)
        for n, read in enumerate(reads):
            at = base + np.uint64(n * size)
            old = perform(w, i, space_of(m.space), at, size, kind, m.op, [read(w, i)], writes is not None)
            if writes is not None:
                assert old is not None
                writes[n](w, i, old)

    return step


_INTEGER_FORMS = (
    "op=add|min|max type=u32|s32|u64|s64",
    "op=and|or|xor|exch type=b32|b64",
    "op=inc|dec type=u32",
)
_FLOAT_FORMS = (
    "op=add type=f32|f64",
    f"op=add .noftz {_HINT} type=f16|bf16|f16x2|bf16x2",
)
for _form in (*_INTEGER_FORMS, "op=cas type=b16|b32|b64", *_FLOAT_FORMS):

    @instruction(f"atom {_SEM} {_SCOPE} {_SPACE} {_form.split()[0]} {_HINT} {' '.join(_form.split()[1:])}")
    def atom(b: Lowering, m: Modifiers) -> Step:
        return _build(b, m, returns=True)


for _form in (*(f for f in _INTEGER_FORMS if "exch" not in f), "op=and|or|xor type=b32|b64", *_FLOAT_FORMS):

    @instruction(f"red {_RED_SEM} {_SCOPE} {_SPACE} {_form.split()[0]} {_HINT} {' '.join(_form.split()[1:])}")
    def red(b: Lowering, m: Modifiers) -> Step:
        return _build(b, m, returns=False)


@instruction(f"red {_RED_SEM} {_SCOPE} space?=global op=add {_HINT} vec=v2|v4 .f32")
@instruction(f"red {_RED_SEM} {_SCOPE} space?=global op=add|min|max .noftz {_HINT} {_VECTOR}")
def red_vector(b: Lowering, m: Modifiers) -> Step:
    return _build(b, m if m.type else _with_type(m, "f32"), returns=False)


@instruction(f"atom {_SEM} {_SCOPE} space?=global op=add {_HINT} vec=v2|v4 .f32")
@instruction(f"atom {_SEM} {_SCOPE} space?=global op=add|min|max .noftz {_HINT} {_VECTOR}")
def atom_vector(b: Lowering, m: Modifiers) -> Step:
    return _build(b, m if m.type else _with_type(m, "f32"), returns=True)


def _with_type(m: Modifiers, kind: str) -> Modifiers:
    return Modifiers({**m._values, "type": kind})
