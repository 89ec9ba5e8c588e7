"""Schedules: which warps run when. A seed replays exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from .wave import Wave


class Schedule:
    """The fast schedule: all threads of a wave are one unit, and the lowest program counter runs first."""

    fine = False
    wave_threads = 8192

    def order(self, clusters: int) -> npt.NDArray[np.int64]:
        """The order in which clusters of blocks are started."""
        return np.arange(clusters, dtype=np.int64)

    def wave_clusters(self, threads_per_cluster: int) -> int:
        """How many clusters run together."""
        return max(1, self.wave_threads // threads_per_cluster)

    def units(self, w: Wave) -> tuple[int, npt.NDArray[np.int64]]:
        """The number of units and each thread's unit."""
        return 1, np.zeros(0, np.int64)

    def shuffle(self, count: int) -> npt.NDArray[np.intp] | None:
        """An order in which `count` threads of one atomic instruction are served; None: by their numbers."""
        return None

    def asynchronous(self, what: str) -> str:
        """When an asynchronous operation happens: `now`, `read` (operands now, results later) or `late`.

        what: `copy`, `product` into tensor memory or `registers`, a product into these.
        """
        # Products whose results nobody waits for yet are collected, and done as one.
        return "now" if what == "copy" else "read"

    def which(self, count: int) -> int:
        """Which of the pending operations finishes next."""
        return 0

    def gives_up(self) -> bool:
        """Whether a try_wait returns false at once where it could wait: its time limit is up to the hardware."""
        return False

    def completes(self) -> bool:
        """Whether a pending operation finishes before the next segment runs."""
        return False

    def pick(self, w: Wave) -> int:
        """The unit to run next, -1 if none can."""
        return 0 if w.pools[0] else -1


class RandomSchedule(Schedule):
    """A schedule drawn from a seed.

    Units are warps (the same warp number of the blocks that run together). What is picked is who takes the next step
    that others can notice. Half of the seeds pick a unit at random each time, half keep strict random priorities that
    change rarely (probabilistic concurrency testing, Burckhardt et al., ASPLOS 2010). The order of blocks and how many
    run together is drawn too, and whether asynchronous work happens when it is issued, as late as possible, or by a
    coin for each.
    """

    fine = True

    def __init__(self, seed: int) -> None:
        self.rng = np.random.Generator(np.random.Philox(seed))
        self.strict = bool(self.rng.integers(2))
        self.habit = str(self.rng.choice(["now", "late", "coin"]))
        self.width = int(self.rng.choice([1, 4, 16, 64]))
        # Of the units of the running wave.
        self._priority: list[float] = []

    def order(self, clusters: int) -> npt.NDArray[np.int64]:
        return self.rng.permutation(clusters)

    def wave_clusters(self, threads_per_cluster: int) -> int:
        return max(1, min(self.width, self.wave_threads // threads_per_cluster))

    def units(self, w: Wave) -> tuple[int, npt.NDArray[np.int64]]:
        count = w.warps_per_block * w.launch.cluster_size
        unit = w.rank[w.block].astype(np.int64) * w.warps_per_block + (w.linear_thread >> np.uint32(5))
        self._priority = self.rng.permutation(count).tolist()
        return count, unit

    def shuffle(self, count: int) -> npt.NDArray[np.intp] | None:
        return self.rng.permutation(count)

    def asynchronous(self, what: str) -> str:
        how = self.habit if self.habit != "coin" else str(self.rng.choice(["now", "read", "late"]))
        # Nobody may look at registers before the wait, so that it is enough to take the operands at once.
        return "read" if what == "registers" and how == "now" else how

    def which(self, count: int) -> int:
        return int(self.rng.integers(count))

    def gives_up(self) -> bool:
        return bool(self.rng.random() < 0.25)

    def completes(self) -> bool:
        return self.habit == "coin" and bool(self.rng.random() < 0.08)

    def pick(self, w: Wave) -> int:
        ready = w.ahead.ready() if w.ahead is not None else [0] if w.pools[0] else []
        if not ready:
            self._priority = self.rng.permutation(len(w.pools)).tolist()
            return -1
        if len(ready) == 1:
            return ready[0]
        if not self.strict:
            return ready[int(self.rng.integers(len(ready)))]
        priority = self._priority
        best = max(ready, key=priority.__getitem__)
        if self.rng.random() < 0.03:
            # A change point: the running unit falls behind all others.
            priority[best] = min(priority) - 1
            best = max(ready, key=priority.__getitem__)
        return best


def schedule(choice: str | int) -> Schedule:
    """`fast`, or a seed."""
    if choice == "fast":
        return Schedule()
    if isinstance(choice, bool) or not isinstance(choice, int):
        raise ValueError(f'schedule {choice!r} is neither "fast" nor an integer seed')
    if choice < 0:
        raise ValueError(f"schedule seed {choice} is negative")
    return RandomSchedule(choice)
