"""Named barriers of a block: `bar` and `barrier.cta` (PTX ISA 9.7.13.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .errors import Fault
from .registry import Index

if TYPE_CHECKING:
    from .wave import Wave

NAMED = 16
Array = npt.NDArray[Any]


@dataclass
class _Waiter:
    """Threads parked at a barrier. finish: gets the per-thread count of true predicates and of participants."""

    instruction: Any
    threads: npt.NDArray[np.intp]
    resume: int
    predicate: Array | None
    finish: Callable[[Index, Array, Array], None] | None
    time: int = 0


class NamedBarriers:
    """The sixteen barriers of each block of a wave."""

    def __init__(self, wave: Wave) -> None:
        self.w = wave
        self.arrived = np.zeros((NAMED, wave.block_count), np.int64)
        self.expected = np.zeros((NAMED, wave.block_count), np.int64)
        self.true = np.zeros((NAMED, wave.block_count), np.int64)
        self.waiters: dict[int, list[_Waiter]] = {}
        self.busy = False

    def arrive(
        self,
        i: Index,
        ids: Any,
        counts: Any | None,
        instruction: Any,
        waits: bool = True,
        predicate: Array | None = None,
        finish: Callable[[Index, Array, Array], None] | None = None,
    ) -> list[Index]:
        """Threads arrive; gives the groups that go on at once. Others are parked until their barrier completes.

        ids, counts: barrier number and thread count of each thread, or scalars; counts None: all threads of the block.
        """
        w = self.w
        simple = i is None and w.all_live and not self.busy and ids.ndim == 0 and predicate is None
        if simple and (counts is None or (counts.ndim == 0 and int(counts) == w.per_block)) and waits:
            if not 0 <= int(ids) < NAMED:
                raise Fault("barrier", f"barrier {int(ids)} does not exist: a block has {NAMED}", 0)
            if w.tracker is not None:
                w.tracker.barrier([(w.index(None), 0)], None)
            return [None]
        threads = w.index(i)
        all_ids = np.broadcast_to(ids, threads.shape)
        for number in np.unique(all_ids):
            chosen = all_ids == number
            mine = threads[chosen]
            count = None if counts is None else np.broadcast_to(counts, threads.shape)[chosen]
            truth = None if predicate is None else np.broadcast_to(predicate, threads.shape)[chosen]
            self._arrive(int(number), mine, count, instruction, waits, truth, finish)
        return [] if waits else [i]

    def _arrive(
        self,
        number: int,
        threads: npt.NDArray[np.intp],
        counts: Array | None,
        instruction: Any,
        waits: bool,
        predicate: Array | None,
        finish: Callable[[Index, Array, Array], None] | None,
    ) -> None:
        w = self.w
        if not 0 <= number < NAMED:
            raise Fault("barrier", f"barrier {number} does not exist: a block has {NAMED}", int(threads[0]))
        blocks = w.block[threads]
        here = np.bincount(blocks, minlength=w.block_count)
        expected = self.expected[number]
        if counts is None:
            wanted = np.full(threads.size, -1)
        else:
            wanted = counts.astype(np.int64)
            bad = (wanted % 32 != 0) | (wanted <= 0)
            if bad.any():
                k = int(np.flatnonzero(bad)[0])
                raise Fault(
                    "barrier", f"thread count {int(wanted[k])} of barrier {number} is not a positive multiple of 32",
                    int(threads[k]),
                )  # fmt: skip
        before = np.where(expected[blocks] == 0, wanted, expected[blocks])
        expected[blocks] = wanted
        if (before != wanted).any() or (expected[blocks] != wanted).any():
            k = int(np.flatnonzero((before != wanted) | (expected[blocks] != wanted))[0])
            raise Fault(
                "barrier",
                f"barrier {number} is used with different thread counts: {_said(before[k])} and {_said(wanted[k])}",
                int(threads[k]),
            )
        self.arrived[number] += here
        if predicate is not None:
            self.true[number] += np.bincount(blocks, predicate, w.block_count).astype(np.int64)
        over = (expected > 0) & (self.arrived[number] > expected)
        if over.any():
            b = int(np.flatnonzero(over)[0])
            raise Fault(
                "barrier",
                f"{int(self.arrived[number, b])} threads arrived at barrier {number}, which expects {int(expected[b])}",
                int(threads[blocks == b][0]) if (blocks == b).any() else int(threads[0]),
            )
        self.waiters.setdefault(number, []).append(
            _Waiter(
                instruction, threads, w.resume if waits else -1, predicate, finish,
                0 if waits or w.tracker is None else w.tracker.now,
            )
        )  # fmt: skip
        self.busy = True
        self._complete(number)

    def _complete(self, number: int) -> None:
        w = self.w
        expected = self.expected[number]
        living = np.bincount(w.block, w.live, w.block_count).astype(np.int64)
        target = np.where(expected == -1, living, expected)
        done = (expected != 0) & (self.arrived[number] >= target)
        if not done.any():
            return
        true, participants = self.true[number].copy(), self.arrived[number].copy()
        self.arrived[number, done] = 0
        self.true[number, done] = 0
        expected[done] = 0
        keep = []
        released = []
        for waiter in self.waiters.pop(number, []):
            go = done[w.block[waiter.threads]]
            free, held = waiter.threads[go], waiter.threads[~go]
            if held.size:
                keep.append(_Waiter(waiter.instruction, held, waiter.resume, None, waiter.finish, waiter.time))
            if free.size:
                released.append((waiter.resume, free, waiter.finish, waiter.time))
        if keep:
            self.waiters[number] = keep
        self.busy = bool(self.waiters)
        if released and w.tracker is not None:
            leaving = [t for resume, t, _, _ in released if resume >= 0]
            nobody = np.empty(0, np.intp)
            w.tracker.barrier([(t, time) for _, t, _, time in released], np.concatenate(leaving) if leaving else nobody)
        for resume, free, finish, _ in released:
            if resume < 0:
                continue
            i = w.group(free)
            if finish is not None:
                b = w.block[free]
                finish(i, true[b], participants[b])
            w.push(resume, i)

    def threads_left(self, i: Index) -> None:
        """Threads ended: barriers of all threads of a block wait for the remaining ones only."""
        for number in list(self.waiters):
            self._complete(number)

    def waiting(self) -> Iterator[tuple[Any, npt.NDArray[np.intp], str]]:
        """Parked threads by instruction, block by block, with what they wait for."""
        w = self.w
        for number, waiters in self.waiters.items():
            for waiter in waiters:
                if waiter.resume < 0:
                    continue
                b = int(w.block[waiter.threads[0]])
                expected = int(self.expected[number, b])
                yield (
                    waiter.instruction,
                    waiter.threads,
                    f"barrier {number}: {int(self.arrived[number, b])} of {_said(expected)} have arrived",
                )


def _said(count: int) -> str:
    return "all threads" if count == -1 else f"{int(count)} threads"
