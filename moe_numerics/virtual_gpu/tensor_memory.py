"""Tensor memory of sm_100 (PTX ISA 9.7.16.1): 128 lanes of 512 columns of 32 bits for each block.

Addresses hold the lane in the upper and the column in the lower 16 bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .errors import Fault

if TYPE_CHECKING:
    from .wave import Wave

Array = npt.NDArray[Any]
LANES, COLUMNS = 128, 512


class TensorMemory:
    """Contents, allocations and what was written, for all blocks of a wave."""

    def __init__(self, wave: Wave) -> None:
        self.w = wave
        self.words = np.zeros((wave.block_count, LANES, COLUMNS), np.uint32)
        self.written = np.zeros((wave.block_count, LANES, COLUMNS), bool)
        # The PTX line that allocated a column, 0 for a free one.
        self.owner = np.zeros((wave.block_count, COLUMNS), np.int32)
        self.relinquished = np.zeros(wave.block_count, bool)
        # Allocations of a pair of blocks that only one of them has asked for yet: (start, columns) by block.
        self.promised: dict[int, tuple[int, int]] = {}

    def allocate(self, block: int, columns: int, thread: int, line: int) -> int:
        if columns < 32 or columns > COLUMNS or columns & (columns - 1):
            raise Fault("tensor_memory", f"{columns} columns: a power of two from 32 to {COLUMNS} is needed", thread)
        if self.relinquished[block]:
            raise Fault("tensor_memory", "an allocation after relinquish_alloc_permit", thread)
        for start in range(0, COLUMNS - columns + 1, columns):
            if not self.owner[block, start : start + columns].any():
                self.owner[block, start : start + columns] = line
                self.written[block, :, start : start + columns] = False
                return start
        raise Fault(
            "tensor_memory",
            f"no {columns} free columns in a row: {int(np.count_nonzero(self.owner[block]))} of {COLUMNS} are "
            "allocated, so the allocation would wait for ever",
            thread,
        )

    def allocate_pair(self, block: int, first: int, columns: int, thread: int, line: int) -> int:
        """Both blocks of a pair allocate together: the first to ask decides where, and the other is given the same."""
        if block in self.promised:
            start, promised = self.promised.pop(block)
            if promised != columns:
                raise Fault("tensor_memory", f"the blocks of a pair allocate {promised} and {columns} columns", thread)
            return start
        start = self.allocate(block, columns, thread, line)
        other = first + 1 - (block - first)
        if self.owner[other, start : start + columns].any():
            raise Fault(
                "tensor_memory", f"columns {start} to {start + columns} are in use in the pair's other block", thread
            )
        self.owner[other, start : start + columns] = line
        self.written[other, :, start : start + columns] = False
        self.promised[other] = (start, columns)
        return start

    def free(self, block: int, address: int, columns: int, thread: int) -> None:
        start = address & 0xFFFF
        if start + columns > COLUMNS or not self.owner[block, start : start + columns].all():
            raise Fault(
                "tensor_memory", f"columns {start} to {start + columns} are freed, but not all are allocated",
                thread, address,
            )  # fmt: skip
        self.owner[block, start : start + columns] = 0

    def check(self, block: int, lane: int, lanes: int, column: int, columns: int, thread: int) -> None:
        if lane + lanes > LANES or column + columns > COLUMNS:
            raise Fault(
                "out_of_bounds",
                f"tensor memory lanes {lane} to {lane + lanes}, columns {column} to {column + columns}",
                thread,
                lane << 16 | column,
            )
        if not self.owner[block, column : column + columns].all():
            free = column + int(np.flatnonzero(self.owner[block, column : column + columns] == 0)[0])
            raise Fault("tensor_memory", f"column {free} of tensor memory is used, but not allocated", thread, free)

    def check_written(self, block: int, lanes: Any, columns: Any, thread: int) -> None:
        if self.w.checkers and not self.written[block, lanes, columns].all():
            raise Fault("uninitialised", "tensor memory is read before it was written", thread)

    def leaks(self) -> list[tuple[int, int, int]]:
        """(block, columns still allocated, line of the allocation) of blocks that did not free all."""
        found = []
        for block in np.flatnonzero(self.owner.any(axis=1)):
            mine = self.owner[block]
            found.append((int(block), int(np.count_nonzero(mine)), int(mine[np.flatnonzero(mine)[0]])))
        return found
