"""Garbage collection out of the way of work that makes very many objects, hardly any of them garbage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["collect_rarely", "uncollected"]


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No automatic garbage collection inside; on leaving it is as it was before, also after an exception.

    While objects pile up, each collection of the oldest generation walks through all objects of the process, those of
    torch and of the compiler included: a tenth of the time of compiling, parsing and lowering a kernel.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def collect_rarely() -> None:
    """What this process holds by now is never looked through again, and what comes later seldom.

    For processes that compile and run kernel after kernel: with Python's own thresholds a sixth of their time goes into
    collections that find next to nothing, for a tenth more memory.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)
