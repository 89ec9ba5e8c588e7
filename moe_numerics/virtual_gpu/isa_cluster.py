"""Clusters: barriers of all their threads and addresses of other blocks' shared memory (PTX ISA 9.7.9.23, 9.7.13.2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import memory, ptx
from .asynchronous import Operation
from .isa_atomic import perform
from .isa_mbarrier import barrier_offsets
from .lowering import VIEW, Lowering
from .memory import RANK_SHIFT, SHARED_WINDOW, Array
from .registry import Index, Modifiers, Step, instruction

_EVERY_LANE = np.uint32(0xFFFFFFFF)


@instruction("barrier .cluster .arrive sem?=release|relaxed .aligned?", kind="blocking")
def arrive(b: Lowering, m: Modifiers) -> Step:
    if m.aligned:
        b.sync_mask = lambda w, i: _EVERY_LANE
    return lambda w, i: w.cluster_barrier.arrive(i)


@instruction("barrier .cluster .wait .acquire? .aligned?", kind="blocking")
def wait(b: Lowering, m: Modifiers) -> Step:
    if m.aligned:
        b.sync_mask = lambda w, i: _EVERY_LANE
    return lambda w, i: w.cluster_barrier.wait(i, b.ins)


@instruction("mapa space?=shared::cluster type=u32|u64")
def mapa(b: Lowering, m: Modifiers) -> Step:
    mask = (1 << RANK_SHIFT) - 1
    source = b.operands[1]
    if isinstance(source, ptx.Imm):
        raise b.fail("mapa needs a variable or a register")
    if m.space and m.type == "u32":
        return b.alu("u32", ("u32", "u32"), lambda x, r: (x & np.uint32(mask)) | (r << np.uint32(RANK_SHIFT)))
    window = np.uint64(0 if m.space else SHARED_WINDOW)
    return b.alu(
        "u64", ("u64", "u32"),
        lambda x, r: ((x & np.uint64(mask)) | (r.astype(np.uint64) << np.uint64(RANK_SHIFT))) + window,
    )  # fmt: skip


@instruction("getctarank space?=shared::cluster type=u32|u64")
def getctarank(b: Lowering, m: Modifiers) -> Step:
    return b.alu("u32", (m.type,), lambda x: ((x >> x.dtype.type(RANK_SHIFT)) & x.dtype.type(255)).astype(np.uint32))


def _issue(
    w: Any, i: Index, ins: ptx.Instruction, address: Array, barrier: Array, size: int, strong: bool,
    put: Callable[[], None],
) -> None:  # fmt: skip
    """Starts what `put` does to `size` bytes at each thread's address, and tells the threads' mbarriers afterwards."""
    threads = w.index(i)
    signals = barrier_offsets(w, i, barrier)
    agents = np.array(
        [
            w.mbarriers.get(offset, t, "an asynchronous store's completion").agent
            for t, offset in zip(threads.tolist(), signals.tolist(), strict=True)
        ]
    )
    if w.tracker is not None:
        ((_, offsets, _),) = memory.locate(w, i, "shared", address, size)
        w.tracker.async_store(w, threads, agents, offsets, size, strong)

    def write(_: Any) -> None:
        put()
        for t, offset in zip(threads.tolist(), signals.tolist(), strict=True):
            w.mbarriers.complete(offset, size, t)

    w.pending.issue(Operation(lambda: None, write, ins))


@instruction("st .async sem?=weak scope?=cluster space?=shared::cluster .mbarrier::complete_tx::bytes vec?=v2|v4 "
             "type=b32|u32|s32|f32|b64|u64|s64|f64")  # fmt: skip
def store_async(b: Lowering, m: Modifiers) -> Step:
    address = b.address(b.operands[0])
    size = VIEW[m.type].itemsize
    reads = [b.full(b.read(o, f"b{8 * size}")) for o in b.items(b.operands[1])]
    if len(reads) != int((m.vec or "v1")[1:]):
        raise b.fail(f"`{b.ins.name}` stores {(m.vec or 'v1')[1:]} items from {len(reads)} registers")
    if size * len(reads) > 16:
        raise b.fail(f"`{b.ins.name}` stores more than 16 bytes")
    barrier = b.address(b.operands[2])

    def step(w: Any, i: Index) -> None:
        values = [r(w, i) for r in reads]
        ((region, offsets, _),) = memory.locate(w, i, "shared", address(w, i), size * len(values))

        def put() -> None:
            for k, value in enumerate(values):
                region.store((offsets >> memory.SHIFT[size]) + k, size, value)

        w.launch.traffic("shared", "written", size * len(values) * offsets.size)
        _issue(w, i, b.ins, address(w, i), barrier(w, i), size * len(values), False, put)

    return step


_RED_ASYNC = "red .async .relaxed scope=cluster .shared::cluster .mbarrier::complete_tx::bytes"


@instruction(f"{_RED_ASYNC} op=add type=u32|s32|u64")
@instruction(f"{_RED_ASYNC} op=min|max type=u32|s32")
@instruction(f"{_RED_ASYNC} op=inc|dec .u32")
@instruction(f"{_RED_ASYNC} op=and|or|xor .b32")
def reduce_async(b: Lowering, m: Modifiers) -> Step:
    kind = m.get("type", "b32" if m.b32 else "u32")
    address = b.address(b.operands[0])
    read = b.full(b.read(b.operands[1], kind))
    barrier = b.address(b.operands[2])
    size = VIEW[kind].itemsize

    def step(w: Any, i: Index) -> None:
        at, value = address(w, i), read(w, i)

        def put() -> None:
            perform(w, i, "shared", at, size, kind, m.op, [value], False, checked=False)

        _issue(w, i, b.ins, at, barrier(w, i), size, True, put)

    return step
