"""Races on global memory.

Threads of different blocks are ordered by nothing but fences and atomics of gpu scope; a kernel that has such fences is
not checked between blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .memory import Allocation
from .race_shared import SharedRaces

if TYPE_CHECKING:
    from .launch import Launch
    from .program import Program
    from .wave import Wave

Array = npt.NDArray[Any]
_MANY_BLOCKS = -(2**62)
_LOG_LIMIT = 64 << 20
PAGE = 64 << 20


@lru_cache(maxsize=256)
def orders_blocks(program: Program) -> bool:
    """Whether the kernel may order its blocks by itself."""
    for ins in program.kernel.code:
        name = ins.name
        if ins.opcode in ("membar", "fence") and any(s in name for s in (".gpu", ".gl", ".sys")):
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
        return cls(size, np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64), [])

    def refine(self, size: int) -> None:
        """Halves the granules until they are `size` bytes."""
        factor = self.size // size
        for name in ("writer", "write_time", "reader", "read_time"):
            setattr(self, name, np.repeat(getattr(self, name), factor))
        self.size = size


class GlobalRaces(SharedRaces):
    """The last write and read of each granule of the allocations that a launch writes."""

    def __init__(self, launch: Launch) -> None:
        super().__init__(launch)
        self.between_blocks = not orders_blocks(launch.program)
        self.histories: dict[tuple[int, int], GlobalHistory] = {}
        # Launch-wide numbers of all threads of the running wave.
        self._whole: tuple[Wave, Array] | None = None

    def _global(
        self, w: Wave, threads: Array, region: Allocation, page: int, offsets: Array, size: int, kind: str, strong: bool
    ) -> None:
        history = self.histories.get((id(region), page))
        if history is None:
            span = min(PAGE, region.buffer.size - page * PAGE)
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
        start = region.start + page * PAGE
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
        self, w: Wave, history: GlobalHistory, threads: Array, numbers: Array, cells: Array, kind: str,
        region: Allocation, start: int,
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
            reader = w.block[inner] * w.per_block + np.maximum(r[same] - 1, 0) % w.per_block
            others = np.where(single, reader, inner)
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
