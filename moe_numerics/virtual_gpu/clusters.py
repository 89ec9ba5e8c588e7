"""The barrier of a cluster: `barrier.cluster.arrive` and `.wait` (PTX ISA 9.7.13.2)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .errors import Fault
from .registry import Index

if TYPE_CHECKING:
    from .wave import Wave

Array = npt.NDArray[Any]


class ClusterBarrier:
    """Arrivals by cluster. A thread arrives once a phase and waits for the phase to end."""

    def __init__(self, wave: Wave) -> None:
        self.w = wave
        size = wave.launch.cluster_size
        self.cluster = wave.cluster_start[wave.block] // size
        self.count = wave.block_count // size
        self.arrived = np.zeros(self.count, np.int64)
        self.phase = np.zeros(self.count, np.int64)
        # The phase in which a thread last arrived, -1 for none since its last wait.
        self.mine = np.full(wave.threads, -1, np.int64)
        self.parked: list[tuple[Any, Array, int]] = []

    def arrive(self, i: Index) -> list[Index]:
        threads = self.w.index(i)
        twice = self.mine[threads] >= 0
        if twice.any():
            raise Fault(
                "barrier", "a thread arrives at the cluster barrier twice without a wait",
                int(threads[np.flatnonzero(twice)[0]]),
            )  # fmt: skip
        self.mine[threads] = self.phase[self.cluster[threads]]
        self.arrived += np.bincount(self.cluster[threads], minlength=self.count)
        self.complete()
        return [i]

    def wait(self, i: Index, instruction: Any) -> list[Index]:
        w = self.w
        threads = w.index(i)
        early = self.mine[threads] < 0
        if early.any():
            raise Fault(
                "barrier", "a thread waits at the cluster barrier without having arrived",
                int(threads[np.flatnonzero(early)[0]]),
            )  # fmt: skip
        over = self.mine[threads] < self.phase[self.cluster[threads]]
        go, stay = threads[over], threads[~over]
        self.mine[go] = -1
        if stay.size:
            self.parked.append((instruction, stay, w.resume))
        return [w.group(go)]

    def complete(self) -> None:
        """Ends the phase of clusters whose living threads have all arrived."""
        w = self.w
        living = np.bincount(self.cluster, w.live, self.count)
        done = (self.arrived > 0) & (self.arrived >= living)
        if not done.any():
            return
        self.arrived[done] = 0
        self.phase[done] += 1
        if w.tracker is not None:
            w.tracker.cluster_barrier(np.flatnonzero(done[w.cluster_start // w.launch.cluster_size]))
        parked, self.parked = self.parked, []
        for instruction, threads, resume in parked:
            free = done[self.cluster[threads]]
            if free.any():
                self.mine[threads[free]] = -1
                w.push(resume, w.group(threads[free]))
            if not free.all():
                self.parked.append((instruction, threads[~free], resume))

    def waiting(self) -> Iterator[tuple[Any, Array, str]]:
        for instruction, threads, _ in self.parked:
            c = int(self.cluster[threads[0]])
            yield instruction, threads, f"the cluster barrier: {int(self.arrived[c])} threads have arrived"
