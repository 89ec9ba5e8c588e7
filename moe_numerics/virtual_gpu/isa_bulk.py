"""Bulk and tensor copies and their groups (PTX ISA 9.7.9.25 to 9.7.9.27)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from . import memory, ptx, tensor_map
from .asynchronous import Operation, unique_rows
from .errors import Fault
from .isa_mbarrier import barrier_offsets
from .lowering import Lowering, Read
from .memory import SHARED_WINDOW, Array
from .registry import Index, Modifiers, Step, instruction

HINT = "hint?=L2::cache_hint"
_GROUPS = "cta_group::1|cta_group::2"
_LOAD = "mode?=tile .mbarrier::complete_tx::bytes multicast?=multicast::cluster"
DIMENSIONS = "dim=1d|2d|3d|4d|5d"
_TENSOR_LOAD = f"cp .async .bulk .tensor {DIMENSIONS} space=shared::cta|shared::cluster .global {_LOAD}"


def _tensor_operands(b: Lowering, operand: ptx.Operand) -> tuple[Read, list[Read]]:
    """The address of a tensor map and the coordinates, from `[map, {c0, c1, ...}]`."""
    if not isinstance(operand, ptx.Address) or len(operand.extra) != 1:
        raise b.fail(f"`{b.ins.name}` needs `[tensor map, {{coordinates}}]`")
    return b.address(ptx.Address(operand.base, operand.offset)), [
        b.full(b.read(c, "s32")) for c in b.items(operand.extra[0])
    ]


def fetch_map(w: Any, address: int, thread: int) -> tensor_map.TensorMap:
    """The tensor map at a generic or global address."""
    found = w.launch.memory.find(address, address + 127)
    if found is None:
        raise Fault(
            "out_of_bounds", f"no tensor map at {address:#x}: {w.launch.memory.describe(address, 128)}", thread, address
        )
    if address % 64:
        raise Fault("misaligned", f"the tensor map at {address:#x} is not aligned to 64 bytes", thread, address)
    decoded = tensor_map.decode(ctypes.string_at(address, 128))
    tensor_map.check(decoded)
    return decoded


def shared_span(w: Any, thread: int, address: int, size: int) -> int:
    """The offset in the wave's shared buffer of `size` bytes of shared memory (own or another block's)."""
    if address >= SHARED_WINDOW:
        address -= SHARED_WINDOW
    at = np.array([address], np.uint64)
    ends = np.array([address + size - 16], np.uint64)
    i = np.array([thread])
    ((_, start, _),) = memory.locate(w, i, "shared", at, 16)
    memory.locate(w, i, "shared", ends, 16)
    return int(start[0])


def spread(start: int, size: int) -> Array:
    """Offsets of the 16-byte pieces of `size` bytes from `start` on."""
    return np.arange(start, start + size, 16, dtype=np.int64)


def _pieces(w: Any) -> Array:
    return w.shared_region.buffer.reshape(-1, 16)


def snapshot(w: Any, pieces: Array) -> Callable[[], Array]:
    return lambda: _pieces(w)[pieces >> 4].copy()


def issue_store(
    w: Any, thread: int, members: Array, pieces: Array, write: Callable[[Array], None], ins: ptx.Instruction
) -> None:
    """Issues what takes `pieces` of shared memory to global memory, for the bulk groups of the threads `members`."""
    operation = Operation(snapshot(w, pieces), write, ins)
    if w.tracker is not None:
        operation.done.append(w.tracker.async_read(w, [thread], pieces))
    w.bulk_groups.add(members, operation)
    w.pending.issue(operation)


def _write_pieces(w: Any, pieces: Array, data: Array) -> None:
    _pieces(w)[pieces >> 4] = data.reshape(-1, 16)
    if w.shared_region.shadow is not None:
        w.shared_region.shadow.reshape(-1, 16)[pieces >> 4] = 1


def _blocks(w: Any, thread: int, mask: int | None) -> list[int]:
    """The wave's blocks that receive a copy: the thread's own, or those a multicast mask names."""
    block = int(w.block[thread])
    if mask is None:
        return [block]
    first = int(w.cluster_start[block])
    if mask >> w.launch.cluster_size:
        raise Fault(
            "cluster", f"multicast mask {mask:#x} names blocks past the cluster's {w.launch.cluster_size}", thread
        )
    return [first + r for r in range(w.launch.cluster_size) if mask >> r & 1]


@instruction(f"{_TENSOR_LOAD} {HINT}")
@instruction(f"{_TENSOR_LOAD} group={_GROUPS} {HINT}", features=("sm_100a",))
@instruction(f"{_TENSOR_LOAD} {HINT} group={_GROUPS}", features=("sm_100a",))
def tensor_load(b: Lowering, m: Modifiers) -> Step:
    destination = b.address(b.operands[0])
    map_of, coordinates = _tensor_operands(b, b.operands[1])
    barrier = b.address(b.operands[2])
    mask = b.full(b.read(b.operands[3], "u16")) if m.multicast else None
    rank = int(m.dim[0])
    if len(coordinates) != rank:
        raise b.fail(f"`{b.ins.name}` needs {rank} coordinates")
    hopper = b.program.arch == "sm_90a"

    def step(w: Any, i: Index) -> None:
        threads = w.index(i)
        where = [c(w, i) for c in coordinates]
        masks = None if mask is None else mask(w, i)
        targets, maps, barriers = destination(w, i), map_of(w, i), barrier(w, i)
        signals = barrier_offsets(w, i, barriers)
        for k, t in enumerate(threads.tolist()):
            described = fetch_map(w, int(maps[k]), t)
            if described.rank != rank:
                raise Fault("tensor_map", f"a {rank}-dimensional copy with a tensor map of rank {described.rank}", t)
            at = tuple(int(c[k]) for c in where)
            if hopper:
                tensor_map.check_place(described, at, False, t)
            if w.checkers:
                tensor_map.check_written(w, described, at)
            _start_load(
                w, b.ins, t, described, at, int(targets[k]), int(signals[k]),
                None if masks is None else int(masks[k]), m.group == "cta_group::2",
            )  # fmt: skip

    return step


def _start_load(
    w: Any, instruction: ptx.Instruction, thread: int, described: tensor_map.TensorMap, at: tuple[int, ...],
    target: int, signal: int, mask: int | None, paired: bool,
) -> None:  # fmt: skip
    size = described.box_bytes
    if target % 128:
        raise Fault("misaligned", f"a tensor copy to shared address {target:#x}, not a multiple of 128", thread, target)
    start = shared_span(w, thread, target, size)
    pieces = tensor_map.pieces(described, start, target)
    home = (start // w.shared_stride) * w.shared_stride
    signal_home = (signal // w.shared_stride) * w.shared_stride
    w.launch.traffic("global", "read", described.copied_bytes)
    signals = []
    for block in _blocks(w, thread, mask):
        shift = 0 if mask is None else block * w.shared_stride - home
        into = signal
        if mask is not None:
            into = signal - signal_home + block * w.shared_stride
            if paired:
                # In a pair of blocks the even or odd one is signalled, as the barrier's own block is.
                first = int(w.cluster_start[block])
                parity = (signal_home // w.shared_stride - first) & 1
                into = signal - signal_home + (first + ((block - first) & ~1 | parity)) * w.shared_stride
        signals.append((pieces + shift, into))
        barrier = w.mbarriers.get(into, thread, "a tensor copy's completion")
        if w.tracker is not None:
            w.tracker.async_write(w, thread, barrier.agent, pieces + shift, described.swizzle)

    def write(data: Array) -> None:
        for where, into in signals:
            _write_pieces(w, where, data)
            w.mbarriers.complete(into, described.copied_bytes, thread)

    w.pending.issue(Operation(lambda: tensor_map.load_box(w, described, at), write, instruction))


def warp_issue(w: Any, i: Index, columns: list[Array]) -> Array:
    """Positions of the copies to start: lanes of a warp that ask for the same copy start it once."""
    warps = w.warp if i is None else w.warp[i]
    return unique_rows([warps, *columns])


def tensor_writer(
    b: Lowering, m: Modifiers, put: Callable[..., None],
    accept: Callable[[tensor_map.TensorMap, int], None] = lambda described, thread: None,
) -> Step:  # fmt: skip
    """The step of a copy from shared memory to a tensor; `put(w, tensor map, coordinates, pieces)` delivers it.

    accept: raises Fault for a tensor map that the copy does not take, as a thread used it.
    """
    map_of, coordinates = _tensor_operands(b, b.operands[0])
    source = b.address(b.operands[1])
    rank = int(m.dim[0])
    hopper = b.program.arch == "sm_90a"

    def step(w: Any, i: Index) -> None:
        threads = w.index(i)
        where = [c(w, i) for c in coordinates]
        sources, maps = source(w, i), map_of(w, i)
        warps = w.warp if i is None else w.warp[i]
        for k in warp_issue(w, i, [sources, maps, *(c.view(np.uint32) for c in where)]).tolist():
            t = int(threads[k])
            described = fetch_map(w, int(maps[k]), t)
            if described.rank != rank:
                raise Fault("tensor_map", f"a {rank}-dimensional copy with a tensor map of rank {described.rank}", t)
            at = tuple(int(c[k]) for c in where)
            accept(described, t)
            if hopper:
                tensor_map.check_place(described, at, True, t)
            start = shared_span(w, t, int(sources[k]), described.box_bytes)
            pieces = tensor_map.pieces(described, start, int(sources[k]))
            check_source(w, t, pieces)
            w.launch.traffic("global", "written", described.copied_bytes)
            same = threads[(warps == warps[k]) & (sources == sources[k])]
            issue_store(w, t, same, pieces, functools.partial(put, w, described, at), b.ins)

    return step


def check_source(w: Any, thread: int, pieces: Array) -> None:
    if w.checkers and w.shared_region.shadow is not None:
        known = w.shared_region.shadow.reshape(-1, 16)[pieces >> 4]
        if not known.all():
            bad = int(pieces[np.flatnonzero(~known.all(axis=1))[0]])
            raise Fault(
                "uninitialised", "a copy reads shared memory before it was written", thread, bad % w.shared_stride
            )


@instruction(f"cp .async .bulk .tensor {DIMENSIONS} .global .shared::cta mode?=tile .bulk_group {HINT}")
def tensor_store(b: Lowering, m: Modifiers) -> Step:
    return tensor_writer(b, m, lambda w, d, at, data: tensor_map.store_box(w, d, at, data.reshape(-1)))


@instruction(f"cp .async .bulk .prefetch .tensor {DIMENSIONS} .L2 .global mode?=tile {HINT}")
@instruction(f"cp .async .bulk .prefetch .L2 .global {HINT}")
def prefetch(b: Lowering, m: Modifiers) -> Step:
    return lambda w, i: None


@instruction(
    f"cp .async .bulk space=shared::cta|shared::cluster .global .mbarrier::complete_tx::bytes "
    f"multicast?=multicast::cluster {HINT}"
)
def bulk_load(b: Lowering, m: Modifiers) -> Step:
    destination, source = b.address(b.operands[0]), b.address(b.operands[1])
    size, barrier = b.full(b.read(b.operands[2], "u32")), b.address(b.operands[3])
    mask = b.full(b.read(b.operands[4], "u16")) if m.multicast else None

    def step(w: Any, i: Index) -> None:
        threads = w.index(i)
        targets, sources, sizes = destination(w, i), source(w, i), size(w, i)
        signals = barrier_offsets(w, i, barrier(w, i))
        masks = None if mask is None else mask(w, i)
        for k, t in enumerate(threads.tolist()):
            n = int(sizes[k])
            check_bulk(t, int(targets[k]), int(sources[k]), n)
            start = shared_span(w, t, int(targets[k]), n)
            base = int(sources[k])
            ends = np.array([base, base + n - 16], np.uint64)
            memory.locate(w, np.array([t, t]), "global", ends, 16)
            home = (start // w.shared_stride) * w.shared_stride
            routes = []
            for block in _blocks(w, t, None if masks is None else int(masks[k])):
                shift = 0 if masks is None else block * w.shared_stride - home
                into = int(signals[k])
                if masks is not None:
                    into = into % w.shared_stride + block * w.shared_stride
                routes.append((spread(start, n) + shift, into))
                agent = w.mbarriers.get(into, t, "a bulk copy's completion").agent
                if w.tracker is not None:
                    w.tracker.async_write(w, t, agent, routes[-1][0])

            def write(data: Array, routes: Any = routes, n: int = n, t: int = t) -> None:
                for where, into in routes:
                    _write_pieces(w, where, data)
                    w.mbarriers.complete(into, n, t)

            w.launch.traffic("global", "read", n)
            w.pending.issue(Operation(functools.partial(_global_bytes, base, n), write, b.ins))

    return step


def _global_bytes(base: int, size: int) -> Array:
    return np.frombuffer(ctypes.string_at(base, size), np.uint8)


def check_bulk(thread: int, target: int, source: int, size: int) -> None:
    if size % 16 or target % 16 or source % 16 or size == 0:
        raise Fault(
            "misaligned",
            f"a bulk copy of {size} bytes from {source:#x} to {target:#x}: all must be positive multiples of 16",
            thread,
            target,
        )


@instruction("cp .async .bulk .shared::cluster .shared::cta .mbarrier::complete_tx::bytes")
def bulk_across(b: Lowering, m: Modifiers) -> Step:
    destination, source = b.address(b.operands[0]), b.address(b.operands[1])
    size, barrier = b.full(b.read(b.operands[2], "u32")), b.address(b.operands[3])

    def step(w: Any, i: Index) -> None:
        signals = barrier_offsets(w, i, barrier(w, i))
        for k, t in enumerate(w.index(i).tolist()):
            target, start, n = int(destination(w, i)[k]), int(source(w, i)[k]), int(size(w, i)[k])
            check_bulk(t, target, start, n)
            into, origin = shared_span(w, t, target, n), shared_span(w, t, start, n)
            pieces, signal = spread(origin, n), int(signals[k])
            check_source(w, t, pieces)

            def write(data: Array, into: int = into, n: int = n, signal: int = signal, t: int = t) -> None:
                _write_pieces(w, spread(into, n), data)
                w.mbarriers.complete(signal, n, t)

            operation = Operation(snapshot(w, pieces), write, b.ins)
            agent = w.mbarriers.get(signal, t, "a bulk copy's completion").agent
            if w.tracker is not None:
                operation.done.append(w.tracker.async_read(w, [t], pieces))
                w.tracker.async_write(w, t, agent, spread(into, n))
            w.pending.issue(operation)

    return step


@instruction(f"cp .async .bulk .global .shared::cta .bulk_group {HINT}")
def bulk_store(b: Lowering, m: Modifiers) -> Step:
    destination, source = b.address(b.operands[0]), b.address(b.operands[1])
    size = b.full(b.read(b.operands[2], "u32"))

    def step(w: Any, i: Index) -> None:
        threads = w.index(i)
        targets, sources, sizes = destination(w, i), source(w, i), size(w, i)
        for k, t in enumerate(threads.tolist()):
            n, target = int(sizes[k]), int(targets[k])
            check_bulk(t, target, int(sources[k]), n)
            pieces = spread(shared_span(w, t, int(sources[k]), n), n)
            check_source(w, t, pieces)
            one = np.array([t])
            touched = np.uint64(target) + np.arange(0, n, 16, dtype=np.uint64)
            many = np.full(touched.size, t)
            for region, _, where in memory.locate(w, many, "global", touched, 16):
                memory.check_writable(region, many, where, touched, 16)

            def write(data: Array, target: int = target, one: Array = one) -> None:
                words = np.ascontiguousarray(data).view(np.uint64).reshape(-1)
                addresses = np.uint64(target) + np.arange(words.size, dtype=np.uint64) * np.uint64(8)
                for region, offsets, where in memory.locate(w, np.repeat(one, words.size), "global", addresses, 8):
                    region.store(offsets >> 3, 8, words if where is None else words[where])

            w.launch.traffic("global", "written", n)
            issue_store(w, t, one, pieces, write, b.ins)

    return step


@instruction("cp .async .bulk .commit_group")
def bulk_commit(b: Lowering, m: Modifiers) -> Step:
    return lambda w, i: w.bulk_groups.commit(w.index(i))


@instruction("cp .async .bulk .wait_group .read?")
def bulk_wait(b: Lowering, m: Modifiers) -> Step:
    keep = b.operands[0]
    if not isinstance(keep, ptx.Imm):
        raise b.fail("wait_group needs an immediate")
    count = int(keep.value)

    def step(w: Any, i: Index) -> None:
        threads = w.index(i)
        if m.read:
            w.pending.force(w.bulk_groups.peek(threads, count), reads_only=True)
        else:
            w.pending.force(w.bulk_groups.due(threads, count))

    return step
