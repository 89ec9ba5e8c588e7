"""Asynchronous copies of single threads: `cp.async` (PTX ISA 9.7.9.25.3)."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import memory, ptx
from .asynchronous import Operation
from .isa_mbarrier import barrier_offsets
from .lowering import Lowering, Read
from .memory import Array
from .registry import Index, Modifiers, Step, instruction

_HINT = "hint?=L2::cache_hint"


def _kept(b: Lowering, operands: tuple[ptx.Operand, ...], size: int) -> Read | None:
    """How many bytes of the source are copied before zeros: a number, or none where a predicate holds; None: all."""
    if not operands:
        return None
    (operand,) = operands
    if isinstance(operand, ptx.Reg | ptx.Not) and b.width(operand) == 0:
        ignored = b.full(b.read(operand, "pred"))
        return lambda w, i: np.where(ignored(w, i), np.uint32(0), np.uint32(size))
    return b.full(b.read(operand, "u32"))


@instruction(f"cp .async cop=ca|cg space=shared|shared::cta .global {_HINT} l2?=L2::64B|L2::128B|L2::256B")
def copy(b: Lowering, m: Modifiers) -> Step:
    destination, source = b.address(b.operands[0]), b.address(b.operands[1])
    size_operand = b.operands[2]
    if not isinstance(size_operand, ptx.Imm) or int(size_operand.value) not in (4, 8, 16):
        raise b.fail("cp.async copies 4, 8 or 16 bytes")
    size = int(size_operand.value)
    if m.cop == "cg" and size != 16:
        raise b.fail("cp.async.cg copies 16 bytes")
    keep = _kept(b, b.operands[3:-1] if m.hint else b.operands[3:], size)

    def step(w: Any, i: Index) -> None:
        threads = w.index(i)
        wide = min(size, 8)
        count = size // wide
        targets, sources = destination(w, i), source(w, i)
        sizes = None if keep is None else keep(w, i)
        wanted = np.ones(threads.size, bool) if sizes is None else sizes > 0
        ((_, offsets, _),) = memory.locate(w, i, "shared", targets, size)

        def read() -> list[Array]:
            values = [np.zeros(threads.size, np.uint64 if wide == 8 else np.uint32) for _ in range(count)]
            if wanted.any():
                chosen = np.flatnonzero(wanted)
                loaded = memory.load(w, threads[chosen], "global", sources[chosen], wide, count)
                for v, got in zip(values, loaded, strict=True):
                    v[chosen] = got
            if sizes is not None:
                for n, v in enumerate(values):
                    left = np.clip(sizes.astype(np.int64) - n * wide, 0, wide)
                    ones = (np.uint64(1) << (left * 8).astype(np.uint64)) - np.uint64(1)
                    mask = np.where(left >= 8, ~np.uint64(0), ones)
                    v &= mask.astype(v.dtype)
            return values

        def write(values: list[Array]) -> None:
            if w.tracker is None:
                memory.store(w, threads, "shared", targets, wide, values)
                return
            w.tracker.delivering = True
            memory.store(w, threads, "shared", targets, wide, values)
            w.tracker.delivering = False

        operation = Operation(read, write, b.ins)
        if w.tracker is not None:
            operation.done.append(w.tracker.copy_begins(w, threads, offsets, size))
        w.copy_groups.add(threads, operation)
        w.pending.issue(operation)

    return step


@instruction("cp .async .commit_group")
def copy_commit(b: Lowering, m: Modifiers) -> Step:
    return lambda w, i: w.copy_groups.commit(w.index(i))


@instruction("cp .async .wait_group")
@instruction("cp .async .wait_all")
def copy_wait(b: Lowering, m: Modifiers) -> Step:
    count = int(b.operands[0].value) if b.operands and isinstance(b.operands[0], ptx.Imm) else 0
    everything = not b.operands

    def step(w: Any, i: Index) -> None:
        threads = w.index(i)
        if everything:
            w.copy_groups.commit(threads)
        w.pending.force(w.copy_groups.due(threads, count))

    return step


@instruction("cp .async .mbarrier .arrive .noinc? space?=shared|shared::cta .b64")
def copy_arrive(b: Lowering, m: Modifiers) -> Step:
    """The arrival happens when the thread's earlier copies are over."""
    address = b.address(b.operands[0])

    def step(w: Any, i: Index) -> None:
        threads = w.index(i)
        for t, offset in zip(threads.tolist(), barrier_offsets(w, i, address(w, i)).tolist(), strict=True):
            if not m.noinc:
                w.mbarriers.get(offset, t, "cp.async.mbarrier.arrive").pending += 1
            w.copy_groups.commit(np.array([t]))
            earlier = w.copy_groups.peek(np.array([t]), 0)

            def write(_: Any, earlier: Any = earlier, offset: int = offset, t: int = t) -> None:
                for operation in earlier:
                    operation.finish()
                    operation.acknowledge()
                w.mbarriers.arrive(offset, 1, t)

            w.pending.issue(Operation(lambda: None, write, b.ins))

    return step
