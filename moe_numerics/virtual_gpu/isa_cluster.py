"""Clusters: barriers of all their threads and addresses of other blocks' shared memory (PTX ISA 9.7.9.23, 9.7.13.2)."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import memory, ptx
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


@instruction("st .async sem?=weak scope?=cluster space?=shared::cluster .mbarrier::complete_tx::bytes vec?=v2|v4 "
             "type=b32|u32|s32|f32|b64|u64|s64|f64")  # fmt: skip
def store_async(b: Lowering, m: Modifiers) -> Step:
    address = b.address(b.operands[0])
    size = VIEW[m.type].itemsize
    reads = [b.full(b.read(o, f"b{8 * size}")) for o in b.items(b.operands[1])]
    barrier = b.address(b.operands[2])

    def step(w: Any, i: Index) -> None:
        signals = barrier_offsets(w, i, barrier(w, i))
        values: list[Array] = [r(w, i) for r in reads]
        memory.store(w, i, "shared", address(w, i), size, values)
        for t, offset in zip(w.index(i).tolist(), signals.tolist(), strict=True):
            w.mbarriers.complete(offset, size * len(values), t)

    return step
