"""Work that instructions start and that finishes later: copies, tensor-core operations, transaction counts.

A schedule decides when an operation happens: when it is issued, as late as something forces it, or a coin for each.
Each operation has two halves. `read` takes its operands from memory, `write` delivers its results; a wait for reads
forces the first, a full wait both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .errors import Fault

if TYPE_CHECKING:
    from .wave import Wave

Array = npt.NDArray[Any]


@dataclass(eq=False)
class Operation:
    """One asynchronous operation.

    read: takes the operands, its result is passed to write. instruction: who issued it, for messages. done: called
    when the operation's issuer knows that the reads are over. warps: whose registers it writes.
    chain: how a product goes on from those before it (see isa_wgmma and isa_tcgen05_mma). number: order of issue.
    """

    read: Callable[[], Any]
    write: Callable[[Any], None]
    instruction: Any
    taken: Any = None
    has_read: bool = False
    finished: bool = False
    done: list[Callable[[], None]] = field(default_factory=list)
    warps: frozenset[int] = frozenset()
    chain: Any = None
    number: int = 0

    def take(self) -> None:
        if not self.has_read:
            self.has_read = True
            with self._blamed():
                self.taken = self.read()

    def finish(self) -> None:
        if not self.finished:
            self.take()
            self.finished = True
            with self._blamed():
                self.write(self.taken)
            self.taken = None

    @contextlib.contextmanager
    def _blamed(self) -> Iterator[None]:
        """A fault is this operation's, whichever instruction made it happen."""
        try:
            yield
        except Fault as fault:
            fault.instruction = fault.instruction or self.instruction
            raise

    def acknowledge(self) -> None:
        for call in self.done:
            call()
        self.done.clear()


class Pending:
    """Operations of a wave that have not finished, in order of issue."""

    def __init__(self, wave: Wave) -> None:
        self.w = wave
        self.queue: list[Operation] = []
        self.issued = 0

    def issue(self, operation: Operation, what: str = "copy") -> Operation:
        """Starts an operation, which the schedule may finish at once; what: see `Schedule.asynchronous`."""
        operation.number = self.issued
        self.issued += 1
        how = self.w.schedule.asynchronous(what)
        if how == "now":
            operation.finish()
        else:
            if how == "read":
                operation.take()
            self.queue.append(operation)
        return operation

    def force(self, operations: list[Operation], reads_only: bool = False) -> None:
        """Finishes operations (or their reads) because a wait demands it."""
        for operation in operations:
            if reads_only:
                operation.take()
            else:
                operation.finish()
                if operation in self.queue:
                    self.queue.remove(operation)
            operation.acknowledge()

    def next(self) -> Operation | None:
        """Takes an operation out of the queue: the one that finishes next."""
        if not self.queue:
            return None
        return self.queue.pop(self.w.schedule.which(len(self.queue)))


@dataclass
class Groups:
    """Commit groups of each thread: `cp.async.bulk`, `cp.async` and `wgmma` each have their own."""

    open: dict[int, list[Operation]] = field(default_factory=dict)
    closed: dict[int, list[list[Operation]]] = field(default_factory=dict)

    def add(self, threads: Array, operation: Operation) -> None:
        for t in threads.tolist():
            self.open.setdefault(t, []).append(operation)

    def commit(self, threads: Array) -> None:
        for t in threads.tolist():
            self.closed.setdefault(t, []).append(self.open.pop(t, []))

    def due(self, threads: Array, keep: int) -> list[Operation]:
        """Operations that must be over when at most `keep` groups may be pending, each once, oldest first."""
        found: dict[int, Operation] = {}
        for t in threads.tolist():
            groups = self.closed.get(t)
            if not groups:
                continue
            cut = len(groups) - keep
            if cut <= 0:
                continue
            for group in groups[:cut]:
                for operation in group:
                    found[id(operation)] = operation
            self.closed[t] = groups[cut:]
        return list(found.values())

    def peek(self, threads: Array, keep: int) -> list[Operation]:
        """Like `due`, but the groups stay: a wait for their reads alone does not retire them."""
        found: dict[int, Operation] = {}
        for t in threads.tolist():
            groups = self.closed.get(t) or []
            for group in groups[: max(0, len(groups) - keep)]:
                for operation in group:
                    found[id(operation)] = operation
        return list(found.values())

    def left(self) -> int:
        """How many operations were issued and never committed."""
        return sum(len(v) for v in self.open.values())


def unique_rows(columns: list[Array]) -> npt.NDArray[np.intp]:
    """The first position of each distinct row of some columns, in order."""
    table = np.stack([c.astype(np.uint64) for c in columns], axis=1)
    _, firsts = np.unique(table, axis=0, return_index=True)
    return np.sort(firsts)
