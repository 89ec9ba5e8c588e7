"""How the warps of a wave take turns under a schedule that is drawn from a seed.

A turn is one step that other warps can notice (see visibility.py). What a unit does before it runs together with all
units that stand at the same place; stores that the others meet on the way are kept until their own turns.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from . import visibility
from .memory import SHARED_WINDOW
from .registry import Delayed, Index
from .visibility import View

if TYPE_CHECKING:
    from .wave import Wave

Array = npt.NDArray[Any]
Threads = npt.NDArray[np.intp]
# How many stores of a unit may wait for its turns.
_MOST_WAITING = 64
_MOST_JOINED = 256


class Interleaving:
    """The units of a wave and what they have yet to do.

    waiting: for each unit, stores (and the end of threads after them) in the order of its program: the instruction, its
    threads, their positions among those whose operands were taken, and what stores for them.
    """

    def __init__(self, w: Wave) -> None:
        self.w = w
        self.whole: list[Threads] = [np.flatnonzero(w.unit_of == u) for u in range(w.unit_count)]
        aligned = w.per_block % 32 == 0
        self.warps: list[Threads] = np.split(w.everyone, w.threads // 32) if aligned else []
        self.waiting: list[deque[tuple[Any, Threads, Threads, Delayed]]] = [deque() for _ in range(w.unit_count)]
        self.views = visibility.views(w.program, w.launch)
        self.stored = visibility.stored(w.program, w.launch)
        self._joined: dict[tuple[int, ...], tuple[list[Threads], Threads]] = {}
        # Identities of arrays with all threads of their units.
        self._wholes = set(map(id, (*self.whole, *self.warps)))
        self._complete = set(self._wholes)

    def ready(self) -> list[int]:
        """Units that can run."""
        return [u for u, pool in enumerate(self.w.pools) if pool or self.waiting[u]]

    def split(self, threads: Threads) -> list[tuple[int, Threads]]:
        """Threads by unit."""
        units = self.w.unit_of[threads]
        found = []
        for u in np.flatnonzero(np.bincount(units)).tolist():
            found.append((u, self.same(u, threads[units == u])))
        return found

    def complete(self, threads: Index) -> bool:
        """Whether these are known to be all threads of their units, so that no lane of a warp is missing."""
        return id(threads) in self._complete

    def same(self, unit: int, threads: Threads) -> Threads:
        """Threads of a unit; all of it, or of a warp, are always one array, by which their registers are found fast."""
        whole = self.whole[unit]
        if threads.size == whole.size:
            return whole
        if threads.size == 32 and self.warps and threads[31] - threads[0] == 31:
            return self.warps[int(threads[0]) // 32]
        return threads

    def expect_store(self, space: str, address: Array, size: int) -> None:
        """A store whose operands were taken will happen. One that no parameter pointed to makes every load visible."""
        if space not in ("global", "generic") or not address.size or int(address.max()) >= SHARED_WINDOW:
            return
        found = self.w.launch.memory.find(int(address.min()), int(address.max()) + size - 1)
        if found is None or found.base not in self.stored:
            for n, segment in enumerate(self.w.program.segments):
                if segment.view is View.LOAD:
                    self.views[n] = View.VISIBLE

    def turn(self, unit: int) -> None:
        """Runs a unit up to and including the next step of it that others can notice."""
        w, waiting = self.w, self.waiting[unit]
        while not waiting:
            pool = w.pools[unit]
            if not pool:
                return
            number = min(pool)
            view = self.views[number]
            if view is View.VISIBLE:
                i = w.take(unit, number)
                for target, part in w.execute(number, i):
                    self._go(unit, target, part)
                return
            self._together(number, view)
        instruction, threads, positions, put = waiting.popleft()
        w.delayed(instruction, threads, positions, put)

    def _together(self, number: int, view: View) -> None:
        """Runs a segment that others cannot notice, for every unit that stands at it, and what follows alike."""
        w = self.w
        members = [
            (u, w.take(u, number))
            for u, pool in enumerate(w.pools)
            if number in pool
            and (len(pool) == 1 or min(pool) == number)
            and len(self.waiting[u]) < _MOST_WAITING
            and (view is not View.EXCHANGE or not self.waiting[u])
        ]
        i = self._join([threads for _, threads in members])
        while True:
            if view is View.STORE:
                self._delay(number, i, members)
                return
            parts = [(target, part) for target, part in w.execute(number, i) if part.size]
            if len(parts) != 1 or parts[0][1] is not i:
                break
            target = parts[0][0]
            view = self.views[target] if target < len(self.views) else View.VISIBLE
            on = view is View.QUIET or (view is View.EXCHANGE and not any(self.waiting[u] for u, _ in members))
            if not on or any(w.pools[u] for u, _ in members):
                for u, threads in members:
                    self._go(u, target, threads)
                return
            number = target
        for target, part in parts:
            for u, threads in self.split(part):
                self._go(u, target, threads)

    def _delay(self, number: int, i: Threads, members: list[tuple[int, Threads]]) -> None:
        """Takes the operands of a store; each unit stores in its own turn."""
        w = self.w
        taken, put = w.take_operands(number, i)
        units = w.unit_of[taken]
        for u, threads in members:
            positions = np.flatnonzero(units == u)
            if positions.size:
                mine = threads if positions.size == threads.size else taken[positions]
                self.waiting[u].append((w.program.segments[number].first, mine, positions, put))
            self._go(u, number + 1, threads)

    def _go(self, unit: int, segment: int, threads: Threads) -> None:
        """Where threads of a unit go on. Their end waits for their stores."""
        if not threads.size:
            return
        threads = self.same(unit, threads)
        if segment < len(self.w.program.segments):
            self.w.pools[unit].setdefault(segment, []).append(threads)
        elif self.waiting[unit]:
            self.waiting[unit].append((None, threads, threads, lambda w, threads, positions: w.exit(threads)))
        else:
            self.w.exit(threads)

    def _join(self, groups: list[Threads]) -> Threads:
        """All threads of some groups; the same groups give the same array."""
        if len(groups) == 1:
            return groups[0]
        key = tuple(map(id, groups))
        if key not in self._joined:
            if len(self._joined) >= _MOST_JOINED:
                self._joined.clear()
                self._complete = set(self._wholes)
            # The groups are kept, so that their identities stay theirs.
            among = np.zeros(self.w.threads, bool)
            for threads in groups:
                among[threads] = True
            together = np.flatnonzero(among)
            self._joined[key] = groups, together
            if self._wholes.issuperset(key):
                self._complete.add(id(together))
        return self._joined[key][1]
