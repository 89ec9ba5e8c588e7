"""Mbarriers: phases, pending arrivals and transaction counts (PTX ISA 9.7.13.16).

Their state is kept beside shared memory, by the offset of the object; the 64 bits in memory are opaque.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .errors import Fault
from .registry import Index

if TYPE_CHECKING:
    from .wave import Wave

Array = npt.NDArray[Any]
MOST_ARRIVALS = (1 << 20) - 1


@dataclass
class Mbarrier:
    """One object. knowledge: what those who arrived in this phase knew; completed: the same of the last phase."""

    offset: int
    expected: int
    pending: int
    transactions: int = 0
    phase: int = 0
    agent: int = -1
    knowledge: Any = None
    completed: Any = None
    line: int = 0


@dataclass
class Waiter:
    """Threads parked at a try_wait. write: sets their predicate."""

    instruction: Any
    threads: npt.NDArray[np.intp]
    resume: int
    phase: Array
    write: Callable[[Index, Array], None]


@dataclass
class Mbarriers:
    """All mbarriers of a wave."""

    w: Wave
    objects: dict[int, Mbarrier] = field(default_factory=dict)
    waiters: dict[int, list[Waiter]] = field(default_factory=dict)
    events: int = 0
    timed_out_at: int = -1

    def get(self, offset: int, thread: int, what: str) -> Mbarrier:
        found = self.objects.get(offset)
        if found is None:
            near = [o for o in self.objects if abs(o - offset) < 8]
            why = f"; the nearest begins {near[0] - offset:+d} bytes from there" if near else ""
            raise Fault(
                "mbarrier",
                f"{what} at shared address {self.address(offset):#x}, where no mbarrier was initialised{why}",
                thread,
                self.address(offset),
            )
        return found

    def address(self, offset: int) -> int:
        return offset % self.w.shared_stride

    def init(self, offset: int, count: int, thread: int, line: int) -> None:
        w = self.w
        if not 1 <= count <= MOST_ARRIVALS:
            raise Fault("mbarrier", f"an mbarrier for {count} arrivals: 1 to {MOST_ARRIVALS} are possible", thread)
        if offset in self.waiters:
            raise Fault("mbarrier", f"an mbarrier is initialised again while threads wait at it ({offset:#x})", thread)
        for near in range(offset - 7, offset + 8):
            if near != offset and near in self.objects:
                raise Fault("mbarrier", "an mbarrier is initialised over another one", thread, self.address(offset))
        known = self.objects.get(offset)
        agent = known.agent if known is not None else (w.tracker.agent() if w.tracker is not None else -1)
        self.objects[offset] = Mbarrier(offset, count, count, agent=agent, line=line)
        w.shared_region.store(np.array([offset >> 3]), 8, np.uint64(0))
        if w.tracker is not None:
            w.tracker.barrier_object(offset, thread)

    def invalidate(self, offset: int, thread: int) -> None:
        self.get(offset, thread, "mbarrier.inval")
        del self.objects[offset]

    def arrive(self, offset: int, count: int, thread: int, expect: int = 0, threads: Array | None = None) -> int:
        """`count` arrivals after `expect` more bytes were announced; gives the token of the state before them.

        threads: all threads that arrive, for the race checker. A token is opaque to kernels: here bit 0 is the phase's
        parity, above it are the arrivals that were pending.
        """
        m = self.get(offset, thread, "an arrival")
        token = m.phase & 1 | m.pending << 1
        m.transactions += expect
        if count > m.pending:
            raise Fault(
                "mbarrier",
                f"{count} arrivals at the mbarrier at {self.address(offset):#x} (initialised at line {m.line}), but "
                f"only {m.pending} of {m.expected} are pending in this phase",
                thread,
                self.address(offset),
            )
        if self.w.tracker is not None:
            self.w.tracker.release(m, np.array([thread]) if threads is None else threads)
        m.pending -= count
        self.events += 1
        self._flip(m)
        return token

    def expect(self, offset: int, size: int, thread: int) -> None:
        self.get(offset, thread, "expect_tx").transactions += size

    def complete(self, offset: int, size: int, thread: int) -> None:
        """`size` bytes of a copy have arrived."""
        m = self.get(offset, thread, "a completed copy")
        m.transactions -= size
        if abs(m.transactions) > MOST_ARRIVALS:
            raise Fault("mbarrier", f"the transaction count of the mbarrier at {self.address(offset):#x} is "
                        f"{m.transactions}, which is out of range", thread, self.address(offset))  # fmt: skip
        self.events += 1
        if self.w.tracker is not None:
            self.w.tracker.delivered(m)
        self._flip(m)

    def _flip(self, m: Mbarrier) -> None:
        if m.pending or m.transactions:
            return
        m.phase += 1
        m.pending = m.expected
        if self.w.tracker is not None:
            self.w.tracker.completed(m)
        waiters = self.waiters.pop(m.offset, [])
        keep = []
        for waiter in waiters:
            ready = waiter.phase != (m.phase & 1)
            go, stay = waiter.threads[ready], waiter.threads[~ready]
            if stay.size:
                keep.append(Waiter(waiter.instruction, stay, waiter.resume, waiter.phase[~ready], waiter.write))
            if go.size:
                self._pass(m, waiter, go, True)
        if keep:
            self.waiters[m.offset] = keep

    def _pass(self, m: Mbarrier, waiter: Waiter, threads: Array, value: bool) -> None:
        w = self.w
        i = w.group(threads)
        waiter.write(i, np.full(threads.size, value))
        if value and w.tracker is not None:
            w.tracker.acquire(m, threads)
        w.push(waiter.resume, i)

    def wait(
        self, i: Index, offsets: Array, parity: Array, instruction: Any, write: Callable[[Index, Array], None],
        parks: bool,
    ) -> list[Index]:  # fmt: skip
        """Tests the phase of parity `parity`; threads whose phase goes on are parked or told so.

        Gives the groups that continue at once.
        """
        w = self.w
        threads = w.index(i)
        done = np.zeros(threads.size, bool)
        for offset in np.unique(offsets):
            mine = offsets == offset
            m = self.get(int(offset), int(threads[mine][0]), "a wait")
            done[mine] = parity[mine] != (m.phase & 1)
            if w.tracker is not None and done[mine].any():
                w.tracker.acquire(m, threads[mine & done])
        if done.all() or not parks or w.schedule.gives_up():
            write(i, done)
            return [i]
        go = threads[done]
        if go.size:
            write(go, np.ones(go.size, bool))
        for offset in np.unique(offsets[~done]):
            mine = ~done & (offsets == offset)
            self.waiters.setdefault(int(offset), []).append(
                Waiter(instruction, threads[mine], w.resume, parity[mine], write)
            )
        return [go]

    def time_out(self) -> bool:
        """Lets every parked try_wait return false, once for each state of affairs."""
        if not self.waiters or self.timed_out_at == self.events:
            return False
        self.timed_out_at = self.events
        waiters, self.waiters = self.waiters, {}
        for offset, parked in waiters.items():
            for waiter in parked:
                self._pass(self.objects[offset], waiter, waiter.threads, False)
        return True

    def waiting(self) -> Iterator[tuple[Any, Array, str]]:
        """Parked threads, with the state of what they wait for."""
        for offset, parked in self.waiters.items():
            m = self.objects[offset]
            for waiter in parked:
                yield (
                    waiter.instruction,
                    waiter.threads,
                    f"the mbarrier at {self.address(offset):#x} (line {m.line}): phase {m.phase}, {m.pending} of "
                    f"{m.expected} arrivals and {m.transactions} bytes missing",
                )
