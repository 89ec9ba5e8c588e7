"""Registers of a wave: values of all threads, what a fragment wrote last, and operations that will write some later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .asynchronous import Operation
from .registry import Index

if TYPE_CHECKING:
    from .interleaving import Interleaving
    from .program import Program

Array = npt.NDArray[Any]
_STORED = {0: np.bool_, 1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Registers:
    """The part of a wave that its threads' registers are.

    regs: values of all threads by register. parts: over them, what one fragment wrote last, as (its threads, their
    values, whether `regs` has them too), so that a run of instructions of one fragment copies nothing.
    valid: for registers that may be read before they were written, which threads wrote them.
    in_flight: operations by the registers that they will write, in order of issue.
    """

    program: Program
    threads: int
    checkers: bool
    everyone: npt.NDArray[np.intp]
    warp: npt.NDArray[np.int64]
    ahead: Interleaving | None

    def make_registers(self) -> None:
        sizes = self.program.kernel.registers
        self.regs: list[Any] = [None] * len(sizes)
        self.parts: list[tuple[Array, Array, bool] | None] = [None] * len(sizes)
        # Which arrays of `regs` were made by `settle`.
        self._own = bytearray(len(sizes))
        self.valid: dict[int, Any] = {}
        for k in self.program.unproved:
            self.regs[k] = np.zeros(self.threads, _STORED[sizes[k]])
            if self.checkers:
                self.valid[k] = np.zeros(self.threads, bool)
        self.in_flight: dict[frozenset[int], list[Operation]] = {}
        # A fragment and what `unlanded` found for it, until operations come or go.
        self._unlanded: tuple[Index, frozenset[int]] | None = None

    def settle(self, k: int) -> None:
        """Puts what a fragment wrote to register `k` among the values of all threads.

        An array of all threads may serve several registers, so that it is not changed in place unless it was made here
        and nobody got hold of it, which is so where units are less than the wave.
        """
        part = self.parts[k]
        if part is None or part[2]:
            return
        i, v, _ = part
        new = self.regs[k]
        if new is None:
            new = np.zeros(self.threads, v.dtype)
        elif self.ahead is None or not self._own[k]:
            new = new.copy()
        self._own[k] = True
        new.view(v.dtype)[i] = v
        self.regs[k], self.parts[k] = new, (i, v, True)

    def values(self, k: int, i: Index) -> Array:
        """The values of register `k` for a fragment's threads."""
        part = self.parts[k]
        if part is not None:
            if part[0] is i:
                return part[1]
            self.settle(k)
        a: Array = self.regs[k]
        return a if i is None else a[i]

    def read_words(self, registers: list[int], i: Index) -> list[Array]:
        """32-bit registers of a fragment's threads; zeros for those that were never written."""
        absent = np.zeros(self.count(i), np.uint32)
        never = [self.regs[k] is None and self.parts[k] is None for k in registers]
        return [absent if n else self.values(k, i).view(np.uint32) for k, n in zip(registers, never, strict=True)]

    def write_words(self, registers: list[int], i: Index, words: list[Array]) -> None:
        """Sets 32-bit registers of a fragment's threads."""
        for k, v in zip(registers, words, strict=True):
            if i is None:
                self.regs[k], self.parts[k] = v, None
            else:
                part = self.parts[k]
                if part is not None and part[0] is not i:
                    self.settle(k)
                self.parts[k] = (i, v, False)
            if k in self.valid:
                self.mark_valid(k, i)

    def earlier(self, registers: frozenset[int], warps: frozenset[int]) -> list[Operation]:
        """Operations that will write some of these registers of some of these warps, in order of issue."""
        groups = [flying for group, flying in self.in_flight.items() if not group.isdisjoint(registers)]
        found = [o for flying in groups for o in flying if not o.warps.isdisjoint(warps)]
        return found if len(groups) < 2 else sorted(found, key=lambda o: o.number)

    def take_off(self, registers: frozenset[int], operation: Operation) -> None:
        """An operation begins that will write registers."""
        self.in_flight.setdefault(registers, []).append(operation)
        self._unlanded = None

    def land(self, operations: list[Operation]) -> None:
        """Their issuers know that operations are over."""
        over = {id(o) for o in operations}
        left = {k: [o for o in flying if id(o) not in over] for k, flying in self.in_flight.items()}
        self.in_flight = {k: flying for k, flying in left.items() if flying}
        self._unlanded = None

    def unlanded(self, i: Index) -> frozenset[int]:
        """Registers that operations under way will write for warps of a fragment."""
        if self._unlanded is None or self._unlanded[0] is not i:
            warps = set(self.warp[self.index(i)].tolist())
            groups = [g for g, flying in self.in_flight.items() if any(not o.warps.isdisjoint(warps) for o in flying)]
            self._unlanded = i, frozenset().union(*groups)
        return self._unlanded[1]

    def count(self, i: Index) -> int:
        return self.threads if i is None else i.size

    def index(self, i: Index) -> npt.NDArray[np.intp]:
        """A fragment's threads as an array."""
        return self.everyone if i is None else i

    def mark_valid(self, k: int, i: Index) -> None:
        valid = self.valid.get(k)
        if valid is not None:
            if i is None:
                del self.valid[k]
            else:
                valid[i] = True
