"""Finds accesses to shared and global memory that no synchronisation orders.

Each access is checked against the last write and the reads of the same bytes. Order is kept as knowledge: `floor` is
the time of a block's last barrier of all its threads; `known[w, v]` is the time up to which warp w knows what warp v
did, from named barriers, mbarriers and cluster barriers; lanes of one warp are ordered by `bar.warp.sync` and by
instructions that wait for the whole warp. Between warps knowledge is shared by all lanes. Threads of different blocks
of global memory are ordered by nothing but fences and atomics of gpu scope; a kernel that has such fences is not checked
between blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .memory import Allocation, Region
from .registry import Index

if TYPE_CHECKING:
    from collections.abc import Callable

    from .launch import Launch
    from .mbarrier import Mbarrier
    from .wave import Wave

Array = npt.NDArray[Any]
_MANY_BLOCKS = -(2**62)
_LOG_LIMIT = 64 << 20
_PAGE = 64 << 20
TIME, STRONG, ASYNC, THREAD = 24, 23, 22, (1 << 22) - 1


def granule(launch: Launch) -> int:
    """The smallest access to shared memory that the program can make, at most 4 bytes."""
    size = 4
    for ins in launch.program.kernel.code:
        if ins.opcode in ("ld", "st", "atom", "red"):
            for m in ins.modifiers:
                if m in ("b8", "u8", "s8"):
                    return 1
                if m in ("b16", "u16", "s16", "f16", "bf16"):
                    size = 2
    return size


def orders_blocks(launch: Launch) -> bool:
    """Whether the kernel may order its blocks by itself."""
    for ins in launch.program.kernel.code:
        name = ins.name
        if name.startswith(("membar.gl", "membar.sys", "fence")) and (".gpu" in name or ".gl" in name or ".sys" in name):
            return True
        if ins.opcode in ("ld", "st", "atom", "red") and any(s in name for s in (".acquire", ".release", ".acq_rel")):
            return True
    return False


@dataclass
class GlobalHistory:
    """Who touched the bytes of an allocation in this launch, by granules of `size` bytes.

    writer: 0 for none, else (launch-wide thread number + 1) * 2, plus 1 for an atomic or volatile access.
    reader: 0 for none, a thread number + 1, -1 - b for several threads of block b, _MANY_BLOCKS for threads of several
    blocks.
    """

    size: int
    writer: Array
    write_time: Array
    reader: Array
    read_time: Array
    log: list[tuple[Any, ...]]
    logged: int = 0
    has_writes: bool = False
    reads: bool = False

    @classmethod
    def of(cls, span: int, size: int) -> GlobalHistory:
        n = -(-span // size)
        return cls(size, *(np.zeros(n, np.int64) for _ in range(4)), [])

    def refine(self, size: int) -> None:
        """Halves the granules until they are `size` bytes."""
        factor = self.size // size
        for name in ("writer", "write_time", "reader", "read_time"):
            setattr(self, name, np.repeat(getattr(self, name), factor))
        self.size = size


class Races:
    """The race checker of one launch; `begin` starts it on each wave."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.granule = granule(launch)
        self.between_blocks = not orders_blocks(launch)
        self.histories: dict[tuple[int, int], GlobalHistory] = {}
        self.reported: set[tuple[Any, ...]] = set()
        self.now = 1
        # The PTX line of each moment, and launch-wide thread numbers of a whole wave.
        self.lines = [0, 0]
        self._stored: Any = None
        self._whole: tuple[Wave, Array] | None = None

    def tick(self) -> None:
        """A new moment."""
        self.now += 1
        self.lines.append(self.w.line)

    def begin(self, w: Wave) -> None:
        self.w = w
        per_cluster = w.warps_per_block * self.launch.cluster_size
        self.per_cluster = per_cluster
        self.clusters = w.block_count // self.launch.cluster_size
        self.cluster_of = w.cluster_start // self.launch.cluster_size
        # Columns past the warps stand for asynchronous writes bound to an mbarrier.
        self.agents = 0
        self.floor = np.zeros(w.block_count, np.int64)
        self.floor_least = 0
        self.warp_time = np.zeros(w.block_count * w.warps_per_block, np.int64)
        self.lane_time = np.zeros(w.threads, np.int64)
        self.lane_mask = np.zeros(w.threads, np.uint32)
        self.proxy_time = np.zeros(w.threads, np.int64)
        self.known: Array | None = None
        self.start_time = self.now
        n = w.shared_region.buffer.size // self.granule
        # The last write of each granule: time << 24 | strong << 23 | asynchronous << 22 | thread + 1; 0 for none.
        self.written = np.zeros(n, np.int64)
        self.read_latest = np.zeros(n, np.int64)
        self.read_time: Array | None = None
        self.read_lane: Array | None = None
        # Reads are kept aside until a write may meet them; a barrier of all threads makes them harmless.
        self.tensor: tuple[Array, Array, Array, Array] | None = None
        self.reading: Array | None = None
        self.reading_line = np.zeros(0, np.int32)
        self.pending: list[tuple[Array, Array, int]] = []

    # -- knowledge ------------------------------------------------------------------------------------------------

    def column(self, threads: Array) -> Array:
        """The column of a thread's warp in `known`."""
        w = self.w
        return w.rank[w.block[threads]].astype(np.int64) * w.warps_per_block + (w.linear_thread[threads] >> 5)

    def matrix(self) -> Array:
        """known[warp of the wave, column], made when first needed."""
        if self.known is None:
            w = self.w
            self.known = np.zeros((w.block_count * w.warps_per_block, self.per_cluster + self.agents), np.int64)
        elif self.known.shape[1] < self.per_cluster + self.agents:
            more = self.per_cluster + self.agents - self.known.shape[1]
            self.known = np.pad(self.known, ((0, 0), (0, more)))
        return self.known

    def row(self, warp: int) -> Array:
        """All that a warp knows, its block's barriers included."""
        w = self.w
        known = self.matrix()[warp].copy()
        b = warp // w.warps_per_block
        own = slice(int(w.rank[b]) * w.warps_per_block, (int(w.rank[b]) + 1) * w.warps_per_block)
        np.maximum(known[own], self.floor[b], out=known[own])
        return known

    def ordered(self, threads: Array, others: Array, times: Array) -> Array:
        """Whether what `others` did at `times` comes before what `threads` do now (all by wave number)."""
        w = self.w
        ok = (threads == others) | (times <= self.start_time)
        block, other_block = w.block[threads], w.block[others]
        ok |= (block == other_block) & (times <= self.floor[block])
        if ok.all():
            return ok
        warp, other_warp = w.warp[threads], w.warp[others]
        same = warp == other_warp
        ok |= same & (times <= self.warp_time[warp])
        named = (self.lane_mask[threads] >> w.lane[others]) & np.uint32(1)
        ok |= same & (times <= self.lane_time[threads]) & (named != 0)
        if self.known is not None:
            together = self.cluster_of[block] == self.cluster_of[other_block]
            ok |= ~same & together & (times <= self.known[warp, self.column(others)])
        return ok

    # -- synchronisation ------------------------------------------------------------------------------------------

    def barrier(self, groups: list[tuple[Array, int]], leaving: Array | None) -> None:
        """A barrier of a block completed: `groups` are the threads that arrived and when, `leaving` those that waited.

        leaving None: all that arrived.
        """
        w = self.w
        self.tick()
        arrived = groups[0][0] if len(groups) == 1 else np.concatenate([g for g, _ in groups])
        leaves = arrived if leaving is None else leaving
        for b in np.unique(w.block[arrived]):
            mine, going = arrived[w.block[arrived] == b], leaves[w.block[leaves] == b]
            living = int(np.count_nonzero(w.live[b * w.per_block : (b + 1) * w.per_block]))
            if mine.size >= living and going.size == mine.size:
                self.floor[b] = self.now
                continue
            known = self.matrix()
            joined = np.zeros(known.shape[1], np.int64)
            for threads, time in groups:
                here = threads[w.block[threads] == b]
                for warp in np.unique(w.warp[here]):
                    np.maximum(joined, self.row(int(warp)), out=joined)
                    col = int(self.column(here[w.warp[here] == warp][:1])[0])
                    joined[col] = max(joined[col], time or self.now)
            for warp in np.unique(w.warp[going]):
                np.maximum(known[warp], joined, out=known[warp])
                self.warp_time[warp] = self.now
        self.floor_least = int(self.floor.min())

    def cluster_barrier(self, blocks: Array) -> None:
        """All threads of these blocks, which make up whole clusters, met."""
        self.tick()
        w = self.w
        known = self.matrix()
        for b in blocks:
            rows = slice(int(b) * w.warps_per_block, (int(b) + 1) * w.warps_per_block)
            known[rows, : self.per_cluster] = self.now
        self.floor[blocks] = self.now
        self.floor_least = int(self.floor.min())

    def warp_barrier(self, w: Wave, i: Index, masks: Any) -> None:
        self.tick()
        threads = w.index(i)
        masks = np.broadcast_to(masks, threads.shape)
        self.lane_time[threads] = self.now
        self.lane_mask[threads] = masks
        whole = masks == np.uint32(0xFFFFFFFF)
        if whole.any():
            self.warp_time[w.warp[threads[whole]]] = self.now

    def fence(self, w: Wave, i: Index, name: str) -> None:
        if name.startswith("fence.proxy.async"):
            self.tick()
            self.proxy_time[w.index(i)] = self.now

    # -- accesses -------------------------------------------------------------------------------------------------

    def access(
        self, w: Wave, i: Index, where: Index, region: Region, offsets: Array, size: int, kind: str, stored: Any = None
    ) -> None:
        """One access of each thread: `kind` is read, write or atomic.

        stored: item numbers, item size and values of a write, to tell whether it changes anything.
        """
        if region.space == "local":
            return
        self.tick()
        threads = w.index(i)
        if where is not None:
            threads = threads[where]
        strong = kind == "atomic" or w.strong
        self._stored = stored
        if region.space == "shared":
            cells, index = self._cells(offsets, size, self.granule, threads.size)
            self._shared(w, threads, index, cells, kind, strong)
        elif isinstance(region, Allocation) and not region.readonly:
            if region.buffer.size <= _PAGE:
                self._global(w, threads, region, 0, offsets, size, kind, strong)
                return
            pages = offsets // _PAGE
            for page in np.unique(pages):
                chosen = pages == page
                self._stored = None if stored is None else (
                    stored[0][chosen], stored[1], [v if v.ndim == 0 else v[chosen] for v in stored[2]]
                )  # fmt: skip
                self._global(w, threads[chosen], region, int(page), offsets[chosen] - page * _PAGE, size, kind, strong)

    def _changes(self, w: Wave, region: Region, index: Array) -> Array:
        """For accesses by number: whether the write changes what is there. Storing the same value again is harmless."""
        if self._stored is None:
            return np.ones(index.size, bool)
        items, size, values = self._stored
        changed = np.zeros(index.size, bool)
        for k, v in enumerate(values):
            changed |= region.load(items[index] + k, size) != (v if v.ndim == 0 else v[index])
        return changed

    @staticmethod
    def _cells(offsets: Array, size: int, granule_size: int, count: int) -> tuple[Array, Any]:
        """The granules that accesses touch and the number of the access of each."""
        each = max(1, size // granule_size)
        cells = offsets // granule_size if granule_size > 1 else offsets
        if each == 1:
            return cells, slice(None)
        return (cells[:, None] + np.arange(each)).reshape(-1), np.repeat(np.arange(count), each)

    def _shared(self, w: Wave, threads: Array, index: Any, cells: Array, kind: str, strong: bool) -> None:
        written = self.written.take(cells)
        owners = threads[index]
        if written.size and int(written.max()) >> TIME > self.floor_least:
            self._check_writers(w, owners, cells, written, kind, strong, index)
        if kind == "read":
            if not strong:
                self.pending.append((owners, cells, self.now))
            return
        if self.pending or self.read_time is not None:
            self._check_readers(w, owners, cells, kind)
        if self.reading is not None:
            self._check_reading(w, owners, cells * self.granule >> 4)
        self.written[cells] = (self.now << TIME | strong << STRONG) + owners + 1

    def _check_writers(
        self, w: Wave, threads: Array, cells: Array, written: Array, kind: str, strong: bool, index: Any = None
    ) -> None:
        risky = written > 0
        if strong:
            risky &= written >> STRONG & 1 == 0
        at = np.flatnonzero(risky)
        if not at.size:
            return
        times, writers = written[at] >> TIME, (written[at] & THREAD) - 1
        ok = self._ordered_or_agent(threads[at], writers, times)
        if not ok.all() and kind == "write" and index is not None:
            bad = at[~ok]
            ok[~ok] = ~self._changes(w, w.shared_region, bad if isinstance(index, slice) else index[bad])
        if not ok.all():
            k = int(np.flatnonzero(~ok)[0])
            self._report(w, kind, "shared", int(threads[at[k]]), int(writers[k]), "wrote", self.lines[int(times[k])],
                         int(cells[at[k]]) * self.granule % w.shared_stride)  # fmt: skip

    def _ordered_or_agent(self, threads: Array, writers: Array, times: Array) -> Array:
        """`ordered`, where a writer past the wave's threads is the asynchronous agent of an mbarrier."""
        w = self.w
        agent = writers >= w.threads
        if not agent.any():
            return self.ordered(threads, writers, times)
        ok = np.zeros(threads.shape, bool)
        plain = ~agent
        ok[plain] = self.ordered(threads[plain], writers[plain], times[plain])
        known = self.matrix()
        columns = self.per_cluster + (writers[agent] - w.threads)
        ok[agent] = times[agent] <= known[w.warp[threads[agent]], columns]
        return ok

    def _note_reads(self, w: Wave, threads: Array, cells: Array, now: int) -> None:
        if self.read_time is None:
            shape = (self.written.size, self.per_cluster)
            self.read_time = np.zeros(shape, np.int64)
            self.read_lane = np.zeros(shape, np.int8)
        assert self.read_lane is not None
        columns = self.column(threads)
        # Lanes count from 1; several lanes of a warp that read one cell are "many" (-1), in this step or since the
        # warp last met.
        lanes = w.lane[threads].astype(np.int8) + np.int8(1)
        earlier = self.read_lane[cells, columns]
        recent = self.read_time[cells, columns] > self.warp_time[w.warp[threads]]
        self.read_lane[cells, columns] = lanes
        after = self.read_lane[cells, columns]
        many = (after != lanes) | (recent & (earlier != 0) & (earlier != lanes))
        if many.any():
            self.read_lane[cells[many], columns[many]] = -1
        self.read_time[cells, columns] = now
        self.read_latest[cells] = now

    def _check_readers(self, w: Wave, threads: Array, cells: Array, kind: str) -> None:
        for t, c, now in self.pending:
            if now > self.floor_least:
                self._note_reads(w, t, c, now)
        self.pending.clear()
        latest = self.read_latest.take(cells)
        if self.read_time is None or not latest.size or int(latest.max()) <= self.floor_least:
            return
        assert self.read_lane is not None
        at = np.flatnonzero(latest > self.floor[w.block[threads]])
        if not at.size:
            return
        t, c = threads[at], cells[at]
        times, lanes = self.read_time[c], self.read_lane[c]
        warp = w.warp[t]
        own = self.column(t)
        columns = np.arange(self.per_cluster)
        reader_block = w.cluster_start[w.block[t]][:, None] + columns // w.warps_per_block
        ok = (times <= self.start_time) | (times <= np.where(reader_block == w.block[t][:, None], self.floor[w.block[t]][:, None], 0))
        if self.known is not None:
            ok |= (columns != own[:, None]) & (times <= self.known[warp][:, : self.per_cluster])
        mine = columns == own[:, None]
        lane = lanes[np.arange(at.size), own]
        ordered_lane = (lane == w.lane[t].astype(np.int8) + 1) | (times[np.arange(at.size), own] <= self.warp_time[warp])
        named = (lane > 0) & ((self.lane_mask[t] >> (np.maximum(lane, 1) - 1).astype(np.uint32)) & np.uint32(1) != 0)
        ordered_lane |= named & (times[np.arange(at.size), own] <= self.lane_time[t])
        ok |= mine & ordered_lane[:, None]
        bad = ~ok.all(axis=1)
        if bad.any():
            k = int(np.flatnonzero(bad)[0])
            col = int(np.flatnonzero(~ok[k])[0])
            b = int(w.cluster_start[w.block[t[k]]]) + col // w.warps_per_block
            reader = b * w.per_block + (col % w.warps_per_block) * 32 + max(0, int(lanes[k, col]) - 1)
            self._report(w, kind, "shared", int(t[k]), reader, "read", self.lines[int(times[k, col])],
                         int(c[k]) * self.granule % w.shared_stride)  # fmt: skip

    # -- asynchronous copies --------------------------------------------------------------------------------------

    def agent(self) -> int:
        """A new asynchronous agent; its accesses are ordered before a thread once `known` says so."""
        self.agents += 1
        return self.agents - 1

    def async_write(self, w: Wave, thread: int, agent: int, pieces: Array) -> None:
        """A copy issued by `thread` writes 16-byte pieces (offsets in the shared buffer) on behalf of an agent."""
        self.tick()
        rows = pieces >> 4
        written = self.written.reshape(-1, 16 // self.granule)[rows]
        if int(written.max()) >> TIME > self.floor_least:
            cells = self._granules(rows)
            flat = written.reshape(-1)
            others = np.where((flat & THREAD) - 1 == w.threads + agent, 0, flat)
            self._check_writers(w, np.full(cells.size, thread), cells, others, "write", False)
        if self.pending or self.read_time is not None:
            cells = self._granules(rows)
            self._check_readers(w, np.full(cells.size, thread), cells, "write")
        self._check_reading(w, np.full(rows.size, thread), rows)
        self.written.reshape(-1, 16 // self.granule)[rows] = (self.now << TIME | 1 << ASYNC) + w.threads + agent + 1

    def _granules(self, rows: Array) -> Array:
        each = 16 // self.granule
        return (rows[:, None] * each + np.arange(each)).reshape(-1)

    def async_read(self, w: Wave, thread: int, pieces: Array) -> Callable[[], None]:
        """An asynchronous operation issued by `thread` reads 16-byte pieces through the async proxy.

        Gives what to call when the thread knows that the read is over; until then nobody may write there.
        """
        self.tick()
        rows = pieces >> 4
        written = self.written.reshape(-1, 16 // self.granule)[rows].reshape(-1)
        if int(written.max()) >> TIME > self.start_time:
            cells = self._granules(rows)
            self._check_writers(w, np.full(cells.size, thread), cells, written, "read", False)
            at = np.flatnonzero((written > 0) & (written >> ASYNC & 1 == 0))
            writers, times = (written[at] & THREAD) - 1, written[at] >> TIME
            fenced = (self.proxy_time[writers] >= times) | (self.proxy_time[thread] >= times)
            if not fenced.all():
                k = int(np.flatnonzero(~fenced)[0])
                self._proxy_report(w, thread, int(writers[k]), self.lines[int(times[k])],
                                   int(cells[at[k]]) * self.granule % w.shared_stride)  # fmt: skip
        if self.reading is None:
            n = self.written.size * self.granule // 16
            self.reading, self.reading_line = np.zeros(n, np.int32), np.zeros(n, np.int32)
            self.async_latest, self.async_time = np.zeros(n, np.int64), np.zeros((n, self.per_cluster), np.int64)
        reading, column = self.reading, int(self.column(np.array([thread]))[0])
        reading[rows] += 1
        self.reading_line[rows] = w.line

        def over() -> None:
            self.tick()
            reading[rows] -= 1
            self.async_time[rows, column] = self.now
            self.async_latest[rows] = self.now

        return over

    def _check_reading(self, w: Wave, threads: Array, rows: Array) -> None:
        """A write where an asynchronous operation reads, or has read with nothing to order the two."""
        if self.reading is None:
            return
        busy = self.reading[rows] > 0
        recent = self.async_latest[rows] > self.floor[w.block[threads]]
        at = np.flatnonzero(recent & ~busy)
        if at.size:
            t = threads[at]
            times = self.async_time[rows[at]]
            columns = np.arange(self.per_cluster)
            reader_block = w.cluster_start[w.block[t]][:, None] + columns // w.warps_per_block
            mine = reader_block == w.block[t][:, None]
            ok = (times <= self.start_time) | (mine & (times <= self.floor[w.block[t]][:, None]))
            ok |= columns == self.column(t)[:, None]
            if self.known is not None:
                ok |= times <= self.known[w.warp[t]][:, : self.per_cluster]
            busy[at] |= ~ok.all(axis=1)
        if busy.any():
            k = int(np.flatnonzero(busy)[0])
            line = int(self.reading_line[rows[k]])
            self._add(
                w, ("reading", w.line, line),
                f"the thread writes shared memory that the asynchronous operation of line {line} may still be reading",
                int(threads[k]), int(rows[k]) * 16 % w.shared_stride,
            )  # fmt: skip

    # -- tensor memory --------------------------------------------------------------------------------------------

    def _tensor(self) -> tuple[Array, Array, Array, Array]:
        """Products under way, time and warp of the last write, times of reads by warp; by block and column."""
        if self.tensor is None:
            n = self.w.block_count
            self.tensor = (
                np.zeros((n, 512), np.int32), np.zeros((n, 512), np.int64), np.zeros((n, 512), np.int64),
                np.zeros((n, 512, self.per_cluster), np.int64),
            )  # fmt: skip
        return self.tensor

    def _warp_ordered(self, w: Wave, thread: int, columns: Array, times: Array) -> Array:
        """Whether what warps (by their columns) of the cluster did at `times` comes before `thread`'s next step."""
        warp = int(w.warp[thread])
        block = int(w.block[thread])
        ok = (times <= self.start_time) | (columns == int(self.column(np.array([thread]))[0]))
        own = w.cluster_start[block] + columns // w.warps_per_block == block
        ok |= own & (times <= self.floor[block])
        if self.known is not None:
            ok |= times <= self.known[warp][columns]
        return ok

    def tensor_read(self, w: Wave, thread: int, block: int, columns: Array) -> None:
        self.tick()
        busy, time, warp, reads = self._tensor()
        bad = (busy[block, columns] > 0) | ~self._warp_ordered(w, thread, warp[block, columns], time[block, columns])
        if bad.any():
            c = int(columns[np.flatnonzero(bad)[0]])
            self._add(w, ("tensor", w.line), f"column {c} of tensor memory is read, but no wait for a commit orders the "
                      "product that writes it before", thread, c)  # fmt: skip
        reads[block, columns, int(self.column(np.array([thread]))[0])] = self.now

    def tensor_write(self, w: Wave, thread: int, block: int, columns: Array) -> None:
        self.tick()
        busy, time, warp, reads = self._tensor()
        each = np.arange(self.per_cluster)[None, :]
        bad = (busy[block, columns] > 0) | ~self._warp_ordered(w, thread, each, reads[block, columns]).all(axis=1)
        if bad.any():
            c = int(columns[np.flatnonzero(bad)[0]])
            self._add(w, ("tensor", w.line), f"column {c} of tensor memory is written while others may still use it",
                      thread, c)  # fmt: skip
        time[block, columns] = self.now
        warp[block, columns] = int(self.column(np.array([thread]))[0])

    def tensor_product(self, w: Wave, thread: int, block: int, columns: Array) -> Callable[[], None]:
        """A product was issued that writes columns; gives what to call when a commit says it is over."""
        self.tick()
        busy, time, warp, reads = self._tensor()
        each = np.arange(self.per_cluster)[None, :]
        bad = ~self._warp_ordered(w, thread, each, reads[block, columns]).all(axis=1)
        if bad.any():
            c = int(columns[np.flatnonzero(bad)[0]])
            self._add(w, ("tensor", w.line), f"a product overwrites column {c} of tensor memory, and nothing orders it "
                      "after the reads of other warps", thread, c)  # fmt: skip
        busy[block, columns] += 1
        mine = int(self.column(np.array([thread]))[0])

        def over() -> None:
            self.tick()
            busy[block, columns] -= 1
            time[block, columns] = self.now
            warp[block, columns] = mine

        return over

    # -- mbarriers ------------------------------------------------------------------------------------------------

    def barrier_object(self, offset: int, thread: int) -> None:
        """An mbarrier was made at an offset of shared memory."""
        self.written[offset // self.granule : (offset + 8) // self.granule] = 0

    def release(self, m: Mbarrier, threads: Array) -> None:
        """Threads arrive at an mbarrier."""
        self.tick()
        w = self.w
        known = self.matrix()
        if m.knowledge is None:
            m.knowledge = np.zeros(known.shape[1], np.int64)
        elif m.knowledge.size < known.shape[1]:
            m.knowledge = np.pad(m.knowledge, (0, known.shape[1] - m.knowledge.size))
        for warp in np.unique(w.warp[threads]):
            np.maximum(m.knowledge, self.row(int(warp)), out=m.knowledge)
            column = int(self.column(threads[w.warp[threads] == warp][:1])[0])
            m.knowledge[column] = self.now

    def delivered(self, m: Mbarrier) -> None:
        """An asynchronous copy reported to an mbarrier."""
        self.tick()
        known = self.matrix()
        if m.knowledge is None:
            m.knowledge = np.zeros(known.shape[1], np.int64)
        elif m.knowledge.size < known.shape[1]:
            m.knowledge = np.pad(m.knowledge, (0, known.shape[1] - m.knowledge.size))
        m.knowledge[self.per_cluster + m.agent] = self.now

    def completed(self, m: Mbarrier) -> None:
        """A phase is over: what its arrivals knew becomes known to those who wait."""
        m.completed = m.knowledge if m.completed is None or m.knowledge is None else self._joined(m.completed, m.knowledge)
        m.knowledge = None

    @staticmethod
    def _joined(a: Array, b: Array) -> Array:
        size = max(a.size, b.size)
        return np.maximum(np.pad(a, (0, size - a.size)), np.pad(b, (0, size - b.size)))

    def acquire(self, m: Mbarrier, threads: Array) -> None:
        """Threads saw a phase complete."""
        if m.completed is None:
            return
        known = self.matrix()
        for warp in np.unique(self.w.warp[threads]):
            row = known[warp, : m.completed.size]
            np.maximum(row, m.completed, out=row)

    # -- global memory --------------------------------------------------------------------------------------------

    def _global(
        self, w: Wave, threads: Array, region: Allocation, page: int, offsets: Array, size: int, kind: str, strong: bool
    ) -> None:
        history = self.histories.get((id(region), page))
        if history is None:
            span = min(_PAGE, region.buffer.size - page * _PAGE)
            history = self.histories[id(region), page] = GlobalHistory.of(span, min(size, 16))
        if kind == "read" and not history.has_writes:
            if not strong and history.logged < _LOG_LIMIT:
                history.log.append((w, threads, offsets, size, self.now))
                history.logged += offsets.nbytes
            return
        fresh = not history.has_writes
        if fresh:
            history.has_writes = True
            log, history.log = history.log, []
            for wave, t, o, s, now in log:
                self._note_global_reads(wave, history, t, o, s, now, self._numbers(wave, t))
        if size < history.size:
            history.refine(size)
        numbers = self._numbers(w, threads)
        cells, index = self._cells(offsets, size, history.size, threads.size)
        owners, mine = threads[index], numbers[index]
        start = region.start + page * _PAGE
        if not fresh:
            self._check_global_writers(w, history, owners, mine, cells, index, kind, strong, region, start)
        if kind == "read":
            if not strong:
                self._note_global_reads(w, history, threads, offsets, size, self.now, numbers)
            return
        if history.reads:
            self._check_global_readers(w, history, owners, mine, cells, kind, region, start)
        history.writer[cells] = (mine + 1) * 2 + strong
        history.write_time[cells] = self.now

    def _numbers(self, w: Wave, threads: Array) -> Array:
        """Launch-wide thread numbers."""
        if self._whole is None or self._whole[0] is not w:
            self._whole = (w, w.blocks[w.block] * w.per_block + w.linear_thread)
        numbers = self._whole[1]
        return numbers if threads.size == w.threads else numbers[threads]

    def _note_global_reads(
        self, w: Wave, history: GlobalHistory, threads: Array, offsets: Array, size: int, now: int, numbers: Array
    ) -> None:
        history.reads = True
        if size < history.size:
            history.refine(size)
        cells, index = self._cells(offsets, size, history.size, threads.size)
        mine = numbers[index] + 1
        block = numbers[index] // w.per_block
        before = history.reader[cells]
        history.reader[cells] = mine
        mixed = (history.reader[cells] != mine) | ((before != 0) & (before != mine))
        if mixed.any():
            c, b, old = cells[mixed], block[mixed], before[mixed]
            of = np.where(old > 0, (old - 1) // w.per_block, np.where(old == _MANY_BLOCKS, -1, -1 - old))
            alone = (of == b) | (old == 0)
            value = np.where(alone, -1 - b, _MANY_BLOCKS)
            history.reader[c] = value
            # Several threads of this step may have met here, from different blocks.
            history.reader[c[history.reader[c] != value]] = _MANY_BLOCKS
        history.read_time[cells] = now

    def _check_global_writers(
        self, w: Wave, history: GlobalHistory, threads: Array, mine: Array, cells: Array, index: Any, kind: str,
        strong: bool, region: Allocation, start: int,
    ) -> None:  # fmt: skip
        packed = history.writer[cells]
        risky = (packed != 0) & (packed >> 1 != mine + 1)
        if strong:
            risky &= packed & 1 == 0
        at = np.flatnonzero(risky)
        if not at.size:
            return
        writers = (packed[at] >> 1) - 1
        same = writers // w.per_block == mine[at] // w.per_block
        ok = np.full(at.size, not self.between_blocks)
        times = history.write_time[cells[at]]
        if same.any():
            inner = threads[at[same]]
            others = w.block[inner] * w.per_block + writers[same] % w.per_block
            ok[same] = self.ordered(inner, others, times[same])
        if not ok.all() and kind == "write":
            bad = at[~ok]
            ok[~ok] = ~self._changes(w, region, bad if isinstance(index, slice) else index[bad])
        if not ok.all():
            k = int(np.flatnonzero(~ok)[0])
            self._report(
                w, kind, region.name, int(threads[at[k]]), None, "wrote", self.lines[int(times[k])],
                start + int(cells[at[k]]) * history.size, int(writers[k]),
            )  # fmt: skip

    def _check_global_readers(
        self, w: Wave, history: GlobalHistory, threads: Array, numbers: Array, cells: Array, kind: str, region: Allocation,
        start: int,
    ) -> None:  # fmt: skip
        readers = history.reader[cells]
        at = np.flatnonzero((readers != 0) & (readers != numbers + 1))
        if not at.size:
            return
        r, b, t = readers[at], numbers[at] // w.per_block, threads[at]
        of = np.where(r > 0, (r - 1) // w.per_block, np.where(r == _MANY_BLOCKS, -1, -1 - r))
        same = of == b
        ok = np.full(at.size, not self.between_blocks)
        times = history.read_time[cells[at]]
        if same.any():
            inner, when = t[same], times[same]
            single = r[same] > 0
            others = np.where(single, w.block[inner] * w.per_block + np.maximum(r[same] - 1, 0) % w.per_block, inner)
            one = self.ordered(inner, others, when)
            several = (when <= self.floor[w.block[inner]]) | (when <= self.start_time)
            if self.known is not None:
                several |= when <= self.known[w.warp[inner], : self.per_cluster].min(axis=1)
            ok[same] = np.where(single, one, several)
        if not ok.all():
            k = int(np.flatnonzero(~ok)[0])
            self._report(
                w, kind, region.name, int(t[k]), None, "read", self.lines[int(times[k])],
                start + int(cells[at[k]]) * history.size, int(r[k]) - 1 if r[k] > 0 else None,
            )  # fmt: skip

    # -- reports --------------------------------------------------------------------------------------------------

    def conflict(self, w: Wave, thread: int, region: Region, offset: int) -> None:
        """Two threads of one instruction stored different values to one place."""
        name = getattr(region, "name", f"{region.space} memory")
        address = region.start + offset if isinstance(region, Allocation) else offset % w.shared_stride
        self._add(w, ("conflict", w.line), f"threads of one instruction store different values to the same place of {name}",
                  thread, address)  # fmt: skip

    def _report(
        self, w: Wave, kind: str, what: str, thread: int, other: int | None, did: str, line: int, address: int,
        number: int | None = None,
    ) -> None:  # fmt: skip
        key = (kind, what, w.line, did, line)
        if key in self.reported:
            return
        if other is not None and other >= w.threads:
            who = "an asynchronous copy"
        elif other is not None:
            who = "thread {1} of block {0}".format(*w.place(other))
        elif number is not None:
            who = f"thread {number % w.per_block} of block {number // w.per_block} of the grid"
        else:
            who = "other threads"
        verb = {"read": "reads", "write": "writes", "atomic": "updates"}[kind]
        self._add(
            w, key,
            f"the thread {verb} {what}{' memory' if what == 'shared' else ''} that {who} {did} at line {line}, "
            "and nothing orders the two",
            thread, address,
        )  # fmt: skip

    def _proxy_report(self, w: Wave, thread: int, other: int, line: int, address: int) -> None:
        self._add(
            w, ("proxy", w.line, line),
            f"an asynchronous operation reads shared memory that thread {w.place(other)[1]} stored at line {line} with no "
            "fence.proxy.async between",
            thread, address, "proxy",
        )  # fmt: skip

    def _add(self, w: Wave, key: tuple[Any, ...], message: str, thread: int, address: int, kind: str = "race") -> None:
        if key in self.reported:
            return
        self.reported.add(key)
        self.launch.findings.append(w.finding(kind, message, w.current, thread, address))
