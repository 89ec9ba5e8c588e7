"""`tcgen05`: tensor memory, copies into it and commits (PTX ISA 9.7.16), on sm_100a.

Operations that one thread issues happen in their order: a copy into tensor memory after what was issued before it has
read, a product after the copies before it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import ptx
from .asynchronous import Operation
from .errors import Fault
from .isa_mbarrier import barrier_offsets
from .lowering import Lowering
from .memory import Array, locate
from .registry import Index, Modifiers, Step, instruction
from .tensor_memory_layout import check_bounds, pieces, read_tile, tcgen05_descriptor

_EVERY_LANE = np.uint32(0xFFFFFFFF)
GROUP = "group=cta_group::1|cta_group::2"
SM100 = ("sm_100a",)


def _all_lanes(b: Lowering) -> None:
    b.sync_mask = lambda w, i: _EVERY_LANE


def _warps(w: Any, i: Index) -> Array:
    """One thread of each warp of a fragment."""
    threads = w.index(i)
    _, firsts = np.unique(w.warp[threads], return_index=True)
    return threads[firsts]


# -- allocation -------------------------------------------------------------------------------------------------------


@instruction(f"tcgen05 .alloc {GROUP} .sync .aligned space?=shared::cta .b32", kind="sync", features=SM100)
def alloc(b: Lowering, m: Modifiers) -> Step:
    _all_lanes(b)
    address = b.address(b.operands[0])
    count = b.full(b.read(b.operands[1], "u32"))

    def step(w: Any, i: Index) -> None:
        threads = w.index(i)
        where, columns = address(w, i), count(w, i)
        for t in _warps(w, i).tolist():
            k = int(np.searchsorted(threads, t))
            block, wanted = int(w.block[t]), int(columns[k])
            if m.group == "cta_group::2":
                start = w.tensor_memory.allocate_pair(block, blocks_of(w, t, m.group)[0], wanted, t, b.ins.line)
            else:
                start = w.tensor_memory.allocate(block, wanted, t, b.ins.line)
            one = np.array([t])
            ((region, offsets, _),) = locate(w, one, "shared", where[k : k + 1], 4)
            if w.tracker is not None:
                w.tracker.access(w, one, None, region, offsets, 4, "write")
            region.store(offsets >> 2, 4, np.uint32(start))

    return step


@instruction(f"tcgen05 .dealloc {GROUP} .sync .aligned .b32", kind="sync", features=SM100)
def dealloc(b: Lowering, m: Modifiers) -> Step:
    _all_lanes(b)
    address = b.full(b.read(b.operands[0], "u32"))
    count = b.full(b.read(b.operands[1], "u32"))

    def step(w: Any, i: Index) -> None:
        threads = w.index(i)
        where, columns = address(w, i), count(w, i)
        for t in _warps(w, i).tolist():
            k = int(np.searchsorted(threads, t))
            w.tensor_memory.free(int(w.block[t]), int(where[k]), int(columns[k]), t)

    return step


@instruction(f"tcgen05 .relinquish_alloc_permit {GROUP} .sync .aligned", kind="sync", features=SM100)
def relinquish(b: Lowering, m: Modifiers) -> Step:
    _all_lanes(b)

    def step(w: Any, i: Index) -> None:
        w.tensor_memory.relinquished[w.block[w.index(i)]] = True

    return step


# -- loads and stores -------------------------------------------------------------------------------------------------

_SHAPES = "shape=32x32b|16x32bx2|16x64b|16x128b|16x256b"
_NUMBER = "num=x1|x2|x4|x8|x16|x32|x64|x128"


def cells(shape: str, count: int) -> tuple[Array, Array]:
    """Lane and column [32, registers] of each lane's registers, relative to the address.

    The layouts of 16x64b and 16x32bx2 are those of the atoms in CUTLASS's include/cute/atom/copy_traits_sm100.hpp.
    """
    lane = np.arange(32)[:, None]
    if shape == "32x32b":
        return np.broadcast_to(lane, (32, count)), np.broadcast_to(np.arange(count)[None, :], (32, count))
    if shape == "16x32bx2":
        r = np.arange(count)[None, :]
        return lane % 16 + 0 * r, r + 0 * lane
    if shape == "16x64b":
        r = np.arange(count)[None, :]
        return lane % 2 * 8 + lane // 4 + 0 * r, 2 * r + lane // 2 % 2
    if shape == "16x256b":
        r = np.arange(4 * count)[None, :]
        return lane // 4 + 8 * (r // 2 % 2), 8 * (r // 4) + 2 * (lane % 4) + r % 2
    r = np.arange(2 * count)[None, :]
    return lane // 4 + 8 * (r % 2), 4 * (r // 2) + lane % 4 + 0 * r


def _place(w: Any, i: Index, address: Array, lanes: Array, columns: Array) -> Any:
    """Yields (thread of the warp, its threads' positions, block, lanes, columns) for each warp of a fragment."""
    threads = w.index(i)
    for t in _warps(w, i).tolist():
        k = int(np.searchsorted(threads, t))
        taddr = int(address[k])
        lane, column = taddr >> 16, taddr & 0xFFFF
        quarter = (t % w.per_block) // 32 % 4
        span = int(lanes.max()) + 1
        if lane < 32 * quarter or lane + span > 32 * quarter + 32:
            raise Fault(
                "tensor_memory",
                f"warp {quarter} of its warpgroup may use lanes {32 * quarter} to {32 * quarter + 31}, not {lane} to "
                f"{lane + span - 1}",
                t,
                taddr,
            )
        width = int(columns.max()) + 1
        w.tensor_memory.check(int(w.block[t]), lane, span, column, width, t)
        yield t, slice(k, k + 32), int(w.block[t]), lanes + lane, columns + column


def _layout(b: Lowering, m: Modifiers, registers: int, packed: bool) -> tuple[Array, Array]:
    """Lanes and columns [32, cells] that the registers of an instruction stand for, one or (packed) two for each."""
    split = 0
    if m.shape == "16x32bx2":
        offsets = [o for o in b.operands if isinstance(o, ptx.Imm)]
        if len(offsets) != 1:
            raise b.fail(f"`{b.ins.name}` needs the column where its second half begins")
        split = int(offsets[0].value)
    lanes, columns = cells(m.shape, int(m.num[1:]))
    if registers != lanes.shape[1]:
        raise b.fail(f"`{b.ins.name}` needs {lanes.shape[1]} registers, found {registers}")
    if packed:
        lanes, columns = np.repeat(lanes, 2, axis=1), np.stack((2 * columns, 2 * columns + 1), axis=-1).reshape(32, -1)
    return lanes, columns + (np.arange(32)[:, None] // 16 * split if split else 0)


@instruction(f"tcgen05 .ld .sync .aligned {_SHAPES} {_NUMBER} .pack::16b? .b32", kind="sync", features=SM100)
def load(b: Lowering, m: Modifiers) -> Step:
    """Synchronous: compiled kernels leave out the wait where registers are used at once.

    `.pack::16b` puts the lower halves of two columns beside each other into a register.
    """
    _all_lanes(b)
    writes = [b.write(o, "b32") for o in b.items(b.operands[0])]
    address = b.full(tensor_address(b, b.operands[1]))
    packed = bool(m.pack__16b)
    lanes, columns = _layout(b, m, len(writes), packed)

    def step(w: Any, i: Index) -> None:
        out = np.empty((w.count(i), lanes.shape[1]), np.uint32)
        for t, mine, block, row, column in _place(w, i, address(w, i), lanes, columns):
            if w.tracker is not None:
                w.tracker.tensor_read(w, t, block, np.unique(column))
            w.tensor_memory.check_written(block, row, column, t)
            out[mine] = w.tensor_memory.words[block, row, column]
        if packed:
            out = out[:, 0::2] & np.uint32(0xFFFF) | out[:, 1::2] << np.uint32(16)
        for n, write in enumerate(writes):
            write(w, i, np.ascontiguousarray(out[:, n]))

    return step


@instruction(f"tcgen05 .st .sync .aligned {_SHAPES} {_NUMBER} .unpack::16b? .b32", kind="sync", features=SM100)
def store(b: Lowering, m: Modifiers) -> Step:
    """`.unpack::16b` puts the halves of a register into the lower halves of two columns; the upper ones become 0."""
    _all_lanes(b)
    address = b.full(tensor_address(b, b.operands[0]))
    reads = [b.full(b.read(o, "b32")) for o in b.items(b.operands[-1])]
    packed = bool(m.unpack__16b)
    lanes, columns = _layout(b, m, len(reads), packed)

    def step(w: Any, i: Index) -> None:
        values = np.stack([r(w, i) for r in reads], axis=1)
        if packed:
            values = np.stack((values & np.uint32(0xFFFF), values >> np.uint32(16)), axis=-1).reshape(len(values), -1)
        for t, mine, block, row, column in _place(w, i, address(w, i), lanes, columns):
            if w.tracker is not None:
                w.tracker.tensor_write(w, t, block, np.unique(column))
            w.tensor_memory.words[block, row, column] = values[mine]
            w.tensor_memory.written[block, row, column] = True

    return step


def tensor_address(b: Lowering, o: ptx.Operand) -> Any:
    """A tensor memory address in brackets: 32 bits."""
    if isinstance(o, ptx.Address) and isinstance(o.base, ptx.Reg):
        read = b.read(o.base, "u32")
        offset = np.uint32(o.offset & 0xFFFFFFFF)
        return lambda w, i: read(w, i) + offset
    raise b.fail(f"`{b.ins.name}` needs `[register]` as an address of tensor memory")


@instruction("tcgen05 what=wait::ld|wait::st .sync .aligned", kind="sync", features=SM100)
def wait(b: Lowering, m: Modifiers) -> Step:
    _all_lanes(b)
    return lambda w, i: None


@instruction("tcgen05 what=fence::before_thread_sync|fence::after_thread_sync", features=SM100)
def fence(b: Lowering, m: Modifiers) -> Step:
    return lambda w, i: None


# -- asynchronous operations ------------------------------------------------------------------------------------------


def queue(w: Any, thread: int) -> list[Operation]:
    """Unfinished operations that a thread has issued, in order."""
    waiting = [o for o in w.tensor_queues.get(thread, []) if not o.finished]
    w.tensor_queues[thread] = waiting
    return waiting


def blocks_of(w: Any, thread: int, group: str) -> list[int]:
    """The blocks that an operation acts in: the thread's own, or its pair."""
    block = int(w.block[thread])
    if group == "cta_group::1":
        return [block]
    if w.launch.cluster_size % 2:
        raise Fault("cluster", "cta_group::2 needs clusters with an even number of blocks", thread)
    first = block - int(w.rank[block]) % 2
    return [first, first + 1]


_COPY = {"128x256b": (128, 32), "128x128b": (128, 16), "64x128b": (64, 16), "32x128b": (32, 16)}
# Rows of the source for the 128 lanes of tensor memory.
_SPREAD = {
    None: np.arange(128),
    "warpx4": np.arange(128) % 32,
    "warpx2::02_13": np.arange(128) % 64,
    "warpx2::01_23": np.arange(128) // 64 * 32 + np.arange(128) % 32,
}


@instruction(f"tcgen05 .cp {GROUP} shape=128x256b|128x128b", features=SM100)
@instruction(f"tcgen05 .cp {GROUP} shape=64x128b spread=warpx2::02_13|warpx2::01_23", features=SM100)
@instruction(f"tcgen05 .cp {GROUP} shape=32x128b spread=warpx4", features=SM100)
def copy(b: Lowering, m: Modifiers) -> Step:
    address = b.full(tensor_address(b, b.operands[0]))
    descriptor = b.full(b.read(b.operands[1], "b64"))
    rows, width = _COPY[m.shape]

    def step(w: Any, i: Index) -> None:
        threads = w.index(i)
        targets, descriptors = address(w, i), descriptor(w, i)
        for k, t in enumerate(threads.tolist()):
            column = int(targets[k]) & 0xFFFF
            described = tcgen05_descriptor(int(descriptors[k]))
            where = pieces(described, rows, width, False)
            check_bounds(w, where, t)
            blocks = blocks_of(w, t, m.group)
            earlier = queue(w, t)
            for block in blocks:
                w.tensor_memory.check(block, 0, 128, column, width // 4, t)

            def read(where: Array = where, blocks: list[int] = blocks, t: int = t) -> list[Array]:
                return [read_tile(w, block, where, t).reshape(rows, -1) for block in blocks]

            def write(
                data: list[Array], blocks: list[int] = blocks, column: int = column,
                earlier: list[Operation] = earlier,
            ) -> None:  # fmt: skip
                for o in earlier:
                    if o.chain is None:
                        o.finish()
                    else:
                        o.take()
                for block, tile in zip(blocks, data, strict=True):
                    words = np.ascontiguousarray(tile).view(np.uint32)[_SPREAD[m.spread]]
                    w.tensor_memory.words[block, :, column : column + width // 4] = words
                    w.tensor_memory.written[block, :, column : column + width // 4] = True

            operation = Operation(read, write, b.ins)
            if w.tracker is not None:
                for block in blocks:
                    moved = where.reshape(-1) + block * w.shared_stride
                    operation.done.append(w.tracker.async_read(w, [t], moved, described.swizzle))
            w.tensor_queues[t].append(operation)
            w.tensor_uncommitted.setdefault(t, []).append(operation)
            w.pending.issue(operation)

    return step


_ARRIVE = ".mbarrier::arrive::one space?=shared::cluster multicast?=multicast::cluster .b64"


@instruction(f"tcgen05 .commit {GROUP} {_ARRIVE}", features=SM100)
def commit(b: Lowering, m: Modifiers) -> Step:
    address = b.address(b.operands[0])
    mask = b.full(b.read(b.operands[1], "u16")) if m.multicast else None

    def step(w: Any, i: Index) -> None:
        offsets = barrier_offsets(w, i, address(w, i))
        masks = None if mask is None else mask(w, i)
        for k, t in enumerate(w.index(i).tolist()):
            earlier = queue(w, t)
            covered = w.tensor_uncommitted.pop(t, [])
            block = int(w.block[t])
            targets = [int(offsets[k])]
            if masks is not None:
                first = int(w.cluster_start[block])
                targets = [
                    (first + r) * w.shared_stride + int(offsets[k]) % w.shared_stride
                    for r in range(w.launch.cluster_size)
                    if int(masks[k]) >> r & 1
                ]

            def write(
                _: Any, earlier: list[Operation] = earlier, covered: list[Operation] = covered,
                targets: list[int] = targets, t: int = t,
            ) -> None:  # fmt: skip
                if earlier:
                    # The last product of a chain does the earlier ones.
                    for o in reversed(earlier):
                        o.finish()
                for o in covered:
                    o.acknowledge()
                for target in targets:
                    w.mbarriers.arrive(target, 1, t)

            operation = Operation(lambda: None, write, b.ins)
            w.tensor_queues[t].append(operation)
            w.pending.issue(operation)

    return step
