"""What comes before what: the knowledge that barriers give to warps, and how races are reported.

`floor` is the time of a block's last barrier of all its threads; `known[w, v]` is the time up to which warp w knows
what warp v did, from named barriers, mbarriers and cluster barriers; lanes of one warp are ordered by `bar.warp.sync`
and by instructions that wait for the whole warp. Between warps knowledge is shared by all lanes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .memory import Allocation, Region
from .registry import Index

if TYPE_CHECKING:
    from .launch import Launch
    from .mbarrier import Mbarrier
    from .wave import Wave

Array = npt.NDArray[Any]


class Order:
    """Time and knowledge of one launch; `begin` starts anew for each wave."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.reported: set[tuple[Any, ...]] = set()
        self.now = 1
        # The PTX line of each moment.
        self.lines = [0, 0]

    def tick(self) -> None:
        """A new moment."""
        self.now += 1
        self.lines.append(self.w.line)

    def begin(self, w: Wave) -> None:
        self.w = w
        self.per_cluster = w.warps_per_block * self.launch.cluster_size
        self.cluster_of = w.cluster_start // self.launch.cluster_size
        # Columns past the warps stand for asynchronous writes bound to an mbarrier.
        self.agents = 0
        self.floor = np.zeros(w.block_count, np.int64)
        self.floor_least = 0
        self.warp_time = np.zeros(w.block_count * w.warps_per_block, np.int64)
        self.lane_time = np.zeros(w.threads, np.int64)
        self.lane_mask = np.zeros(w.threads, np.uint32)
        self.proxy_time = np.zeros(w.threads, np.int64)
        # Up to when a thread knows what its own warp did, from an mbarrier at which a lane of it arrived.
        self.own_time = np.zeros(w.threads, np.int64)
        self.known: Array | None = None
        self.start_time = self.now

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
        ok |= same & (times <= np.maximum(self.warp_time[warp], self.own_time[threads]))
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
                if self.known is not None:
                    self._share(slice(int(b) * w.warps_per_block, (int(b) + 1) * w.warps_per_block))
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

    def _share(self, warps: slice) -> None:
        """Each of these warps learns what any of them knows."""
        known = self.matrix()
        known[warps] = known[warps].max(axis=0)

    def cluster_barrier(self, blocks: Array) -> None:
        """All threads of these blocks, which make up whole clusters, met."""
        self.tick()
        w = self.w
        known = self.matrix()
        for b in blocks:
            rows = slice(int(b) * w.warps_per_block, (int(b) + 1) * w.warps_per_block)
            known[rows, : self.per_cluster] = self.now
        for first in np.unique(w.cluster_start[blocks]):
            self._share(slice(int(first) * w.warps_per_block, int(first) * w.warps_per_block + self.per_cluster))
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
        if m.completed is None:
            m.completed = m.knowledge
        elif m.knowledge is not None:
            m.completed = self._joined(m.completed, m.knowledge)
        m.knowledge = None

    @staticmethod
    def _joined(a: Array, b: Array) -> Array:
        size = max(a.size, b.size)
        return np.maximum(np.pad(a, (0, size - a.size)), np.pad(b, (0, size - b.size)))

    def acquire(self, m: Mbarrier, threads: Array) -> None:
        """Threads saw a phase complete."""
        if m.completed is None:
            return
        known, warps = self.matrix(), self.w.warp[threads]
        for warp in np.unique(warps):
            row = known[warp, : m.completed.size]
            np.maximum(row, m.completed, out=row)
        self.own_time[threads] = np.maximum(self.own_time[threads], m.completed[self.column(threads)])

    def conflict(self, w: Wave, thread: int, region: Region, offset: int) -> None:
        """Two threads of one instruction stored different values to one place."""
        name = getattr(region, "name", f"{region.space} memory")
        address = region.start + offset if isinstance(region, Allocation) else offset % w.shared_stride
        self._add(
            w, ("conflict", w.line), f"threads of one instruction store different values to the same place of {name}",
            thread, address,
        )  # fmt: skip

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
            f"an asynchronous operation reads shared memory that thread {w.place(other)[1]} stored at line {line} with "
            "no fence.proxy.async between",
            thread, address, "proxy",
        )  # fmt: skip

    def still_reading(self, w: Wave, line: int, thread: int, address: int) -> None:
        """A thread writes where the asynchronous operation of a line may not be over."""
        self._add(
            w, ("reading", w.line, line),
            f"the thread writes shared memory that the asynchronous operation of line {line} may still be reading",
            thread, address,
        )  # fmt: skip

    def note(self, w: Wave, kind: str, message: str, thread: int) -> None:
        """A finding of the running instruction, once for each line."""
        self._add(w, (kind, w.line), message, thread, None, kind)

    def _add(
        self, w: Wave, key: tuple[Any, ...], message: str, thread: int, address: int | None, kind: str = "race"
    ) -> None:
        if key in self.reported:
            return
        self.reported.add(key)
        self.launch.findings.append(w.finding(kind, message, w.current, thread, address))
