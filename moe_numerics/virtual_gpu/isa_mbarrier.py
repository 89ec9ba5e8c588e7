"""`mbarrier` instructions (PTX ISA 9.7.13.16)."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import memory, ptx
from .lowering import Lowering, Read
from .memory import SHARED_WINDOW, Array
from .registry import Index, Modifiers, Step, instruction

_SPACE = "space?=shared|shared::cta|shared::cluster"
_OWN = "space?=shared|shared::cta"
_SEM = "sem?=release|acquire|relaxed"
_SCOPE = "scope?=cta|cluster"


def barrier_offsets(w: Any, i: Index, address: Array) -> Array:
    """Offsets in the wave's shared buffer of mbarrier addresses (shared or generic)."""
    if address.size and int(address.max()) >= SHARED_WINDOW:
        address = np.where(address >= np.uint64(SHARED_WINDOW), address - np.uint64(SHARED_WINDOW), address)
    ((_, offsets, _),) = memory.locate(w, i, "shared", address, 8)
    return offsets


@instruction(f"mbarrier .init {_OWN} .b64")
def init(b: Lowering, m: Modifiers) -> Step:
    address = b.address(b.operands[0])
    count = b.full(b.read(b.operands[1], "u32"))

    def step(w: Any, i: Index) -> None:
        threads = w.index(i)
        for t, offset, n in zip(threads, barrier_offsets(w, i, address(w, i)), count(w, i), strict=True):
            w.mbarriers.init(int(offset), int(n), int(t), b.ins.line)

    return step


@instruction(f"mbarrier .inval {_OWN} .b64")
def inval(b: Lowering, m: Modifiers) -> Step:
    address = b.address(b.operands[0])

    def step(w: Any, i: Index) -> None:
        for t, offset in zip(w.index(i), barrier_offsets(w, i, address(w, i)), strict=True):
            w.mbarriers.invalidate(int(offset), int(t))

    return step


def arrivals(w: Any, i: Index, offsets: Array, counts: Array, expects: Array | None) -> Array:
    """Arrivals of a fragment, grouped by barrier where they are alike; gives each thread's token."""
    threads = w.index(i)
    tokens = np.zeros(threads.size, np.uint64)
    announced = np.zeros_like(offsets) if expects is None else expects.astype(np.int64)
    table = np.stack((offsets, counts.astype(np.int64), announced))
    if (table == table[:, :1]).all():
        rows, inverse = table[:, :1], np.zeros(threads.size, np.intp)
    else:
        rows, inverse = np.unique(table, axis=1, return_inverse=True)
        inverse = inverse.reshape(-1)
    for n in range(rows.shape[1]):
        offset, count, expect = (int(v) for v in rows[:, n])
        mine = np.flatnonzero(inverse == n)
        barrier = w.mbarriers.get(offset, int(threads[mine[0]]), "an arrival")
        if expect == 0 and count * mine.size <= barrier.pending:
            first = w.mbarriers.arrive(offset, count * mine.size, int(threads[mine[0]]), 0, threads[mine])
            tokens[mine] = first - 2 * count * np.arange(mine.size)
            continue
        # Arrivals that may cross a phase, or announce bytes, count one after the other.
        for k in mine:
            tokens[k] = w.mbarriers.arrive(offset, count, int(threads[k]), expect)
    return tokens


def _arrive(b: Lowering, m: Modifiers, expects: bool, drop: bool) -> Step:
    operands = list(b.operands)
    write = None
    if not isinstance(operands[0], ptx.Address):
        target = operands.pop(0)
        write = None if isinstance(target, ptx.Sink) else b.write(target, "b64")
    address = b.address(operands[0])
    size: Read | None = b.full(b.read(operands[1], "u32")) if expects else None
    count = b.full(b.read(operands[1], "u32")) if not expects and len(operands) > 1 else None

    def step(w: Any, i: Index) -> None:
        offsets = barrier_offsets(w, i, address(w, i))
        counts = np.ones(offsets.size, np.uint32) if count is None else count(w, i)
        if drop:
            for t, offset, n in zip(w.index(i), offsets, counts, strict=True):
                w.mbarriers.get(int(offset), int(t), "arrive_drop").expected -= int(n)
        tokens = arrivals(w, i, offsets, counts, None if size is None else size(w, i))
        if write is not None:
            write(w, i, tokens)

    return step


@instruction(f"mbarrier .arrive .noComplete? {_SEM} {_SCOPE} {_SPACE} .b64")
def arrive(b: Lowering, m: Modifiers) -> Step:
    return _arrive(b, m, expects=False, drop=False)


@instruction(f"mbarrier .arrive .expect_tx {_SEM} {_SCOPE} {_SPACE} .b64")
def arrive_expect(b: Lowering, m: Modifiers) -> Step:
    return _arrive(b, m, expects=True, drop=False)


@instruction(f"mbarrier .arrive_drop .noComplete? {_SEM} {_SCOPE} {_SPACE} .b64")
def arrive_drop(b: Lowering, m: Modifiers) -> Step:
    return _arrive(b, m, expects=False, drop=True)


@instruction(f"mbarrier .arrive_drop .expect_tx {_SEM} {_SCOPE} {_SPACE} .b64")
def arrive_drop_expect(b: Lowering, m: Modifiers) -> Step:
    return _arrive(b, m, expects=True, drop=True)


@instruction(f"mbarrier .expect_tx {_SEM} {_SCOPE} {_SPACE} .b64")
def expect(b: Lowering, m: Modifiers) -> Step:
    address = b.address(b.operands[0])
    size = b.full(b.read(b.operands[1], "u32"))

    def step(w: Any, i: Index) -> None:
        for t, offset, n in zip(w.index(i), barrier_offsets(w, i, address(w, i)), size(w, i), strict=True):
            w.mbarriers.expect(int(offset), int(n), int(t))

    return step


@instruction(f"mbarrier .complete_tx {_SEM} {_SCOPE} {_SPACE} .b64")
def complete(b: Lowering, m: Modifiers) -> Step:
    address = b.address(b.operands[0])
    size = b.full(b.read(b.operands[1], "u32"))

    def step(w: Any, i: Index) -> None:
        for t, offset, n in zip(w.index(i), barrier_offsets(w, i, address(w, i)), size(w, i), strict=True):
            w.mbarriers.complete(int(offset), int(n), int(t))

    return step


@instruction("mbarrier .pending_count .b64")
def pending_count(b: Lowering, m: Modifiers) -> Step:
    """The arrivals that were pending before the one that gave the token."""
    return b.alu("u32", ("b64",), lambda token: (token >> np.uint64(1)).astype(np.uint32))


for _kind in ("try_wait", "test_wait"):

    @instruction(f"mbarrier .{_kind} .parity? {_SEM} {_SCOPE} {_OWN} .b64", kind="blocking")
    def wait(b: Lowering, m: Modifiers, parks: bool = _kind == "try_wait") -> Step:
        """A try_wait parks its threads until the phase completes; when nothing else can happen it gives up."""
        write = b.write(b.operands[0], "pred")
        address = b.address(b.operands[1])
        phase = b.full(b.read(b.operands[2], "u32" if m.parity else "b64"))

        def step(w: Any, i: Index) -> list[Index]:
            parity = (phase(w, i) & 1).astype(np.int64)
            offsets = barrier_offsets(w, i, address(w, i))
            return w.mbarriers.wait(i, offsets, parity, b.ins, lambda t, v: write(w, t, v), parks)

        return step
