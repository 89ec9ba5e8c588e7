"""Races on tensor memory: products, their commits and the warps that read accumulators."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .race_order import Order

if TYPE_CHECKING:
    from .wave import Wave

Array = npt.NDArray[Any]


class TensorRaces(Order):
    """Products under way and the last uses of each column by quarters: a warp has 32 of its lanes, a product all."""

    def begin(self, w: Wave) -> None:
        super().begin(w)
        self.tensor: tuple[Array, Array, Array, Array] | None = None

    def _tensor(self) -> tuple[Array, Array, Array, Array]:
        """Products under way by block and column, time and warp of the last write by quarter too, reads by warp."""
        if self.tensor is None:
            n = self.w.block_count
            self.tensor = (
                np.zeros((n, 512), np.int32), np.zeros((n, 4, 512), np.int64), np.zeros((n, 4, 512), np.int64),
                np.zeros((n, 512, self.per_cluster), np.int64),
            )  # fmt: skip
        return self.tensor

    def _warp_ordered(self, w: Wave, thread: int, columns: Array, times: Array) -> Array:
        """Whether what warps (by their columns) of the cluster did at `times` comes before `thread`'s next step."""
        warp = int(w.warp[thread])
        block = int(w.block[thread])
        ok = (times <= self.start_time) | (columns == int(self.column(np.array([thread]))[0]))
        own = w.cluster_start[block] + columns // w.warps_per_block == block
        ok |= own & (times <= self.floor[block])
        if self.known is not None:
            ok |= times <= self.known[warp][columns]
        return ok

    @staticmethod
    def _quarter(w: Wave, thread: int) -> int:
        """Which 32 lanes of tensor memory a thread's warp may use."""
        return thread % w.per_block // 32 % 4

    def tensor_read(self, w: Wave, thread: int, block: int, columns: Array) -> None:
        self.tick()
        busy, time, warp, reads = self._tensor()
        here = block, self._quarter(w, thread), columns
        bad = (busy[block, columns] > 0) | ~self._warp_ordered(w, thread, warp[here], time[here])
        if bad.any():
            c = int(columns[np.flatnonzero(bad)[0]])
            self._add(
                w, ("tensor", w.line),
                f"column {c} of tensor memory is read, but no wait orders it after the product that writes it",
                thread, c,
            )  # fmt: skip
        reads[block, columns, int(self.column(np.array([thread]))[0])] = self.now

    def tensor_write(self, w: Wave, thread: int, block: int, columns: Array) -> None:
        self.tick()
        busy, time, warp, reads = self._tensor()
        quarter = self._quarter(w, thread)
        each = np.arange(self.per_cluster)[None, :]
        ok = self._warp_ordered(w, thread, each, reads[block, columns]) | (each % w.warps_per_block % 4 != quarter)
        bad = (busy[block, columns] > 0) | ~ok.all(axis=1)
        if bad.any():
            c = int(columns[np.flatnonzero(bad)[0]])
            self._add(w, ("tensor", w.line), f"column {c} of tensor memory is written while others may still use it",
                      thread, c)  # fmt: skip
        time[block, quarter, columns] = self.now
        warp[block, quarter, columns] = int(self.column(np.array([thread]))[0])

    def tensor_product(self, w: Wave, thread: int, block: int, columns: Array) -> Callable[[], None]:
        """A product was issued that writes columns; gives what to call when a commit says it is over."""
        self.tick()
        busy, time, warp, reads = self._tensor()
        each = np.arange(self.per_cluster)[None, :]
        bad = ~self._warp_ordered(w, thread, each, reads[block, columns]).all(axis=1)
        if bad.any():
            c = int(columns[np.flatnonzero(bad)[0]])
            self._add(w, ("tensor", w.line), f"a product overwrites column {c} of tensor memory, and nothing orders it "
                      "after the reads of other warps", thread, c)  # fmt: skip
        busy[block, columns] += 1
        mine = int(self.column(np.array([thread]))[0])

        def over() -> None:
            self.tick()
            busy[block, columns] -= 1
            time[block, :, columns] = self.now
            warp[block, :, columns] = mine

        return over
