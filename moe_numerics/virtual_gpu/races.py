"""Finds accesses to memory that no synchronisation orders.

Each access is checked against the last write and the reads of the same bytes: race_shared.py, race_global.py and
race_tensor.py hold the histories, race_order.py the order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .memory import Allocation, Region
from .race_global import PAGE, GlobalRaces
from .race_tensor import TensorRaces
from .registry import Index

if TYPE_CHECKING:
    from .wave import Wave

Array = npt.NDArray[Any]


class Races(GlobalRaces, TensorRaces):
    """The race checker of one launch."""

    def access(
        self, w: Wave, i: Index, where: Index, region: Region, offsets: Array, size: int, kind: str, stored: Any = None
    ) -> None:
        """One access of each thread: `kind` is read, write or atomic.

        stored: item numbers, item size and values of a write, to tell whether it changes anything.
        """
        if region.space == "local":
            return
        self.tick()
        threads = w.index(i)
        if where is not None:
            threads = threads[where]
        strong = kind == "atomic" or w.strong
        self.stored = stored
        if region.space == "shared":
            cells, index = self._cells(offsets, size, self.granule, threads.size)
            self._shared(w, threads, index, cells, kind, strong)
        elif isinstance(region, Allocation) and not region.readonly:
            if region.buffer.size <= PAGE:
                self._global(w, threads, region, 0, offsets, size, kind, strong)
                return
            pages = offsets // PAGE
            for page in np.unique(pages):
                chosen = pages == page
                self.stored = None if stored is None else (
                    stored[0][chosen], stored[1], [v if v.ndim == 0 else v[chosen] for v in stored[2]]
                )  # fmt: skip
                self._global(w, threads[chosen], region, int(page), offsets[chosen] - page * PAGE, size, kind, strong)
