"""Shared memory that asynchronous operations read: who may write there, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from .race_order import Order

Array = npt.NDArray[Any]
_LOW, _HIGH, _BLOCK, _COLUMN, _RUNNING, _TIME, _LINE = range(7)


class AsyncReads:
    """For each set of 16-byte pieces and warp that had it read: reads under way, and when the last one was known over.

    The table has the lowest and highest piece, the block and the column in `known` of the warp, how many reads are
    under way, the time, and the PTX line of the last.
    """

    def __init__(self, order: Order, count: int) -> None:
        self.order = order
        self.slots: dict[tuple[bytes, int], int] = {}
        self.rows: list[Array] = []
        self.table = np.zeros((7, 64), np.int64)
        self.among = np.zeros(count, bool)

    def start(self, thread: int, rows: Array) -> int:
        """A read issued by a thread begins; gives its slot."""
        w = self.order.w
        key = rows.tobytes(), int(w.warp[thread])
        slot = self.slots.get(key)
        if slot is None:
            slot = self.slots[key] = len(self.rows)
            self.rows.append(rows)
            if slot == self.table.shape[1]:
                self.table = np.pad(self.table, ((0, 0), (0, slot)))
            block, column = int(w.block[thread]), int(self.order.column(np.array([thread]))[0])
            self.table[:, slot] = int(rows.min()), int(rows.max()), block, column, 0, 0, 0
        self.table[_RUNNING, slot] += 1
        self.table[_LINE, slot] = w.line
        return slot

    def over(self, slots: list[int]) -> None:
        """The threads that had these slots read know that it is over."""
        for slot in slots:
            self.table[_RUNNING, slot] -= 1
            self.table[_TIME, slot] = self.order.now

    def check(self, threads: Array, rows: Array) -> None:
        """Reports a write to pieces that are being read, or were with nothing to order the two.

        threads: the writer of each piece, or the one of all.
        """
        if not self.rows or not rows.size:
            return
        o, w, table = self.order, self.order.w, self.table[:, : len(self.rows)]
        recent = table[_TIME] > (o.floor[table[_BLOCK]] if o.launch.cluster_size == 1 else o.start_time)
        near = (table[_LOW] <= int(rows.max())) & (table[_HIGH] >= int(rows.min()))
        at = np.flatnonzero(near & (recent | (table[_RUNNING] > 0)))
        if not at.size:
            return
        warps, firsts = np.unique(w.warp[threads], return_index=True)
        unordered = self._unordered(warps, threads[firsts], at)
        for n in np.flatnonzero(unordered.any(axis=0)).tolist():
            mine = self.rows[at[n]]
            self.among[mine] = True
            hits = np.flatnonzero(self.among[rows])
            self.among[mine] = False
            writers = threads[hits] if threads.size > 1 else np.broadcast_to(threads, hits.shape)
            bad = np.flatnonzero(unordered[np.searchsorted(warps, w.warp[writers]), n])
            if bad.size:
                line = int(table[_LINE, at[n]])
                o.still_reading(w, line, int(writers[bad[0]]), int(rows[hits[bad[0]]]) * 16 % w.shared_stride)
                return

    def _unordered(self, warps: Array, threads: Array, at: Array) -> Array:
        """For each warp (and a thread of it) and slot, whether a write of the warp may meet the slot's read."""
        o, w, table = self.order, self.order.w, self.table[:, at]
        block = w.block[threads][:, None]
        time, column = table[_TIME], table[_COLUMN]
        ordered = (time <= o.start_time) | (column == o.column(threads)[:, None])
        ordered |= (block == table[_BLOCK]) & (time <= o.floor[block])
        if o.known is not None:
            ordered |= time <= o.known[warps][:, column]
        result: Array = (~ordered | (table[_RUNNING] > 0)) & (o.cluster_of[block] == o.cluster_of[table[_BLOCK]])
        return result
