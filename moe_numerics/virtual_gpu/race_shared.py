"""Races on shared memory, between threads and with asynchronous operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .memory import Region
from .race_async import AsyncReads
from .race_order import Order

if TYPE_CHECKING:
    from .launch import Launch
    from .program import Program
    from .wave import Wave

Array = npt.NDArray[Any]
TIME, STRONG, ASYNC, THREAD = 24, 23, 22, (1 << 22) - 1


@lru_cache(maxsize=256)
def granule(program: Program) -> int:
    """The smallest access to shared memory that the program can make, at most 4 bytes."""
    size = 4
    for ins in program.kernel.code:
        if ins.opcode in ("ldmatrix", "stmatrix") and "trans" in ins.modifiers:
            size = min(size, 2)
        if ins.opcode in ("ld", "st", "atom", "red") and "global" not in ins.modifiers:
            for m in ins.modifiers:
                if m in ("b8", "u8", "s8"):
                    return 1
                if m in ("b16", "u16", "s16", "f16", "bf16"):
                    size = min(size, 2)
    return size


class SharedRaces(Order):
    """The last write and the reads of each granule of shared memory."""

    def __init__(self, launch: Launch) -> None:
        super().__init__(launch)
        self.granule = granule(launch.program)
        # Item numbers, item size and values of the write under way, to tell whether it changes anything.
        self.stored: Any = None

    def begin(self, w: Wave) -> None:
        super().begin(w)
        n = w.shared_region.buffer.size // self.granule
        # The last write of each granule: time << 24 | strong << 23 | asynchronous << 22 | thread + 1; 0 for none.
        self.written = np.zeros(n, np.int64)
        self.read_latest = np.zeros(n, np.int64)
        self.read_time: Array | None = None
        self.read_lane: Array | None = None
        self.async_reads = AsyncReads(self, w.shared_region.buffer.size // 16)
        # How many copies of single threads may still write each granule, and the line of the last of them.
        self.landing: Array | None = None
        self.landing_line = np.zeros(0, np.int32)
        self.delivering = False
        # How the last tensor copy into each piece swizzled it.
        self.swizzles: Array | None = None
        # Reads are kept aside until a write may meet them; a barrier of all threads makes them harmless.
        self.pending: list[tuple[Array, Array, int]] = []

    def _changes(self, w: Wave, region: Region, index: Array) -> Array:
        """For accesses by number: whether the write changes what is there. Storing the same value again is harmless."""
        if self.stored is None:
            return np.ones(index.size, bool)
        items, size, values = self.stored
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
        if self.landing is not None and not self.delivering:
            self._check_landing(w, owners, cells, kind)
        if self._may_race(written):
            self._check_writers(w, owners, cells, written, kind, strong, index)
        if kind == "read":
            if not strong:
                self.pending.append((owners, cells, self.now))
            return
        if self.pending or self.read_time is not None:
            self._check_readers(w, owners, cells, kind)
        if self.async_reads.rows:
            self.async_reads.check(owners, cells * self.granule >> 4)
        self.written[cells] = (self.now << TIME | strong << STRONG) + owners + 1

    def _may_race(self, written: Array) -> bool:
        """Whether some of these writes came after the last barrier, or are asynchronous, which no barrier waits for."""
        if not written.size:
            return False
        return int(written.max()) >> TIME > self.floor_least or (self.agents > 0 and bool((written >> ASYNC & 1).any()))

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
        own_block = reader_block == w.block[t][:, None]
        ok = (times <= self.start_time) | (own_block & (times <= self.floor[w.block[t]][:, None]))
        if self.known is not None:
            ok |= (columns != own[:, None]) & (times <= self.known[warp][:, : self.per_cluster])
        mine = columns == own[:, None]
        lane = lanes[np.arange(at.size), own]
        when = times[np.arange(at.size), own]
        ordered_lane = (lane == w.lane[t].astype(np.int8) + 1) | (
            when <= np.maximum(self.warp_time[warp], self.own_time[t])
        )
        bit = (self.lane_mask[t] >> (np.maximum(lane, 1) - 1).astype(np.uint32)) & np.uint32(1)
        named = (lane > 0) & (bit != 0)
        ordered_lane |= named & (when <= self.lane_time[t])
        ok |= mine & ordered_lane[:, None]
        bad = ~ok.all(axis=1)
        if bad.any():
            k = int(np.flatnonzero(bad)[0])
            col = int(np.flatnonzero(~ok[k])[0])
            b = int(w.cluster_start[w.block[t[k]]]) + col // w.warps_per_block
            reader = b * w.per_block + (col % w.warps_per_block) * 32 + max(0, int(lanes[k, col]) - 1)
            self._report(w, kind, "shared", int(t[k]), reader, "read", self.lines[int(times[k, col])],
                         int(c[k]) * self.granule % w.shared_stride)  # fmt: skip

    def agent(self) -> int:
        """A new asynchronous agent; its accesses are ordered before a thread once `known` says so."""
        self.agents += 1
        return self.agents - 1

    def async_write(self, w: Wave, thread: int, agent: int, pieces: Array, swizzle: int = 0) -> None:
        """A copy issued by `thread` writes 16-byte pieces (offsets in the shared buffer) on behalf of an agent.

        swizzle: how it orders them, as in a tensor map.
        """
        self.tick()
        rows = pieces >> 4
        if self.swizzles is None:
            self.swizzles = np.zeros(self.written.size * self.granule // 16, np.int8)
        self.swizzles[rows] = swizzle
        written = self.written.reshape(-1, 16 // self.granule)[rows]
        if self._may_race(written):
            cells = self._granules(rows)
            flat = written.reshape(-1)
            others = np.where((flat & THREAD) - 1 == w.threads + agent, 0, flat)
            self._check_writers(w, np.full(cells.size, thread), cells, others, "write", False)
        if self.pending or self.read_time is not None:
            cells = self._granules(rows)
            self._check_readers(w, np.full(cells.size, thread), cells, "write")
        self.async_reads.check(np.array([thread]), rows)
        self.written.reshape(-1, 16 // self.granule)[rows] = (self.now << TIME | 1 << ASYNC) + w.threads + agent + 1

    def async_store(self, w: Wave, threads: Array, agents: Array, offsets: Array, size: int, strong: bool) -> None:
        """Every thread starts a write of `size` bytes at an offset of the shared buffer, for the agent of an mbarrier.

        strong: atomic updates, which may meet each other.
        """
        self.tick()
        cells, index = self._cells(offsets, size, self.granule, threads.size)
        owners, writers = threads[index], w.threads + agents[index]
        written = self.written[cells]
        others = np.where((written & THREAD) - 1 == writers, 0, written)
        kind = "atomic" if strong else "write"
        self._check_writers(w, owners, cells, others, kind, strong)
        if self.pending or self.read_time is not None:
            self._check_readers(w, owners, cells, kind)
        self.async_reads.check(owners, cells * self.granule >> 4)
        self.written[cells] = (self.now << TIME | strong << STRONG | 1 << ASYNC) + writers + 1

    def _granules(self, rows: Array) -> Array:
        each = 16 // self.granule
        return (rows[:, None] * each + np.arange(each)).reshape(-1)

    def async_read(self, w: Wave, threads: list[int], pieces: Array, swizzle: int | None = None) -> Callable[[], None]:
        """Asynchronous operations issued by these threads read 16-byte pieces through the async proxy.

        swizzle: in which order they take the pieces that a copy swizzled; None: in any.
        Gives what to call when the threads know that the reads are over; until then nobody may write there.
        """
        self.tick()
        rows = pieces >> 4
        if self.landing is not None:
            cells = self._granules(rows)
            self._check_landing(w, np.full(cells.size, threads[0]), cells, "read")
        if swizzle is not None and self.swizzles is not None:
            self._check_swizzle(w, threads[0], rows, swizzle)
        written = self.written.reshape(-1, 16 // self.granule)[rows].reshape(-1)
        # A copy writes many granules in one go: the first of each run of equal writes stands for the others.
        changes = written[1:] != written[:-1]
        runs = np.append(0, np.flatnonzero(changes) + 1) if changes.any() else np.zeros(1, np.intp)
        written = written[runs]
        if int(written.max()) >> TIME > self.start_time:
            each = 16 // self.granule
            cells = rows[runs // each] * each + runs % each
            for thread in threads:
                self._check_async_read(w, thread, cells, written)
        slots = [self.async_reads.start(thread, rows) for thread in threads]

        def over() -> None:
            self.tick()
            self.async_reads.over(slots)

        return over

    def copy_begins(self, w: Wave, threads: Array, offsets: Array, size: int) -> Callable[[], None]:
        """Threads begin copies of `size` bytes each to offsets of the shared buffer.

        Gives what to call when they know that the copies are over; until then nobody may touch what they write.
        """
        if self.landing is None:
            self.landing, self.landing_line = np.zeros((2, self.written.size), np.int32)
        landing = self.landing
        cells, _ = self._cells(offsets, size, self.granule, threads.size)
        np.add.at(landing, cells, 1)
        self.landing_line[cells] = w.line
        return lambda: np.subtract.at(landing, cells, 1)

    def _check_landing(self, w: Wave, threads: Array, cells: Array, kind: str) -> None:
        """An access to what a copy may still write."""
        assert self.landing is not None
        at = np.flatnonzero(self.landing[cells])
        if at.size:
            cell = int(cells[at[0]])
            line = int(self.landing_line[cell])
            verb = {"read": "reads", "write": "writes", "atomic": "updates"}[kind]
            self._add(
                w, ("landing", w.line, line),
                f"the thread {verb} shared memory that the asynchronous copy of line {line} may still be writing",
                int(threads[at[0]]), cell * self.granule % w.shared_stride,
            )  # fmt: skip

    def _check_swizzle(self, w: Wave, thread: int, rows: Array, swizzle: int) -> None:
        """A descriptor that swizzles otherwise than the tensor copy that filled its tile.

        A copy that does not swizzle may bring what is swizzled already.
        """
        assert self.swizzles is not None
        found = self.swizzles[rows]
        at = np.flatnonzero((found != 0) & (found != swizzle))
        if not at.size:
            return
        written = self.written.reshape(-1, 16 // self.granule)[rows[at], 0]
        at = at[written >> ASYNC & 1 == 1]
        if at.size:
            row, names = int(rows[at[0]]), ("no", "a 32-byte", "a 64-byte", "a 128-byte")
            line = self.lines[int(self.written[row * 16 // self.granule]) >> TIME]
            self._add(
                w, ("swizzle", w.line, line),
                f"the descriptor has {names[swizzle]} swizzle, but the copy of line {line} filled the tile with "
                f"{names[int(self.swizzles[row])]} one",
                thread, row * 16 % w.shared_stride, "swizzle",
            )  # fmt: skip

    def _check_async_read(self, w: Wave, thread: int, cells: Array, written: Array) -> None:
        """The writes that an asynchronous read meets, and whether stores of threads passed a proxy fence."""
        if written.size == 1 and self._delivered(w, thread, int(written[0])):
            return
        self._check_writers(w, np.full(cells.size, thread), cells, written, "read", False)
        at = np.flatnonzero((written > 0) & (written >> ASYNC & 1 == 0))
        writers, times = (written[at] & THREAD) - 1, written[at] >> TIME
        fenced = (self.proxy_time[writers] >= times) | (self.proxy_time[thread] >= times)
        if not fenced.all():
            k = int(np.flatnonzero(~fenced)[0])
            self._proxy_report(w, thread, int(writers[k]), self.lines[int(times[k])],
                               int(cells[at[k]]) * self.granule % w.shared_stride)  # fmt: skip

    def _delivered(self, w: Wave, thread: int, written: int) -> bool:
        """Whether a write was an asynchronous copy's of which the thread's warp knows."""
        agent = (written & THREAD) - 1 - w.threads
        return agent >= 0 and written >> TIME <= int(self.matrix()[w.warp[thread], self.per_cluster + agent])

    def barrier_object(self, offset: int, thread: int) -> None:
        """An mbarrier was made at an offset of shared memory."""
        self.written[offset // self.granule : (offset + 8) // self.granule] = 0
