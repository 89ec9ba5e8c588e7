"""Special registers (PTX ISA 10), as functions of the running wave."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .wave import Wave


def _lanemask(kind: str) -> Callable[[Wave], Any]:
    def mask(w: Wave) -> Any:
        lane = w.lane.astype(np.uint64)
        one = np.uint64(1)
        equal = one << lane
        below = equal - one
        everything = np.uint64(0xFFFFFFFF)
        table = {
            "eq": equal,
            "lt": below,
            "le": below | equal,
            "gt": everything & ~(below | equal),
            "ge": everything & ~below,
        }
        return table[kind].astype(np.uint32)

    return mask


def _uniform(value: Callable[[Wave], int]) -> Callable[[Wave], Any]:
    return lambda w: np.full(w.threads, value(w), np.uint64)


def _per_block(axis: int, of: str) -> Callable[[Wave], Any]:
    return lambda w: getattr(w, of)[axis][w.block]


# Registers whose value changes while a wave runs are not cached.
VOLATILE = frozenset({"%clock", "%clock_hi", "%clock64", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi"})

SPECIAL: dict[str, Callable[[Wave], Any]] = {
    "%laneid": lambda w: w.lane,
    "%warpid": lambda w: w.linear_thread >> np.uint32(5),
    "%nwarpid": _uniform(lambda w: 64),
    "%smid": _uniform(lambda w: 0),
    "%nsmid": _uniform(lambda w: int(w.launch.multiprocessors)),
    "%gridid": _uniform(lambda w: w.launch.number),
    "%clock": _uniform(lambda w: w.time & 0xFFFFFFFF),
    "%clock_hi": _uniform(lambda w: w.time >> 32),
    "%clock64": _uniform(lambda w: w.time),
    "%globaltimer": _uniform(lambda w: w.time),
    "%globaltimer_lo": _uniform(lambda w: w.time & 0xFFFFFFFF),
    "%globaltimer_hi": _uniform(lambda w: w.time >> 32),
    "%dynamic_smem_size": _uniform(lambda w: w.launch.shared_bytes),
    "%total_smem_size": _uniform(lambda w: w.shared_limit - w.shared_begin),
    "%is_explicit_cluster": lambda w: np.full(w.threads, w.launch.explicit_cluster),
    "%cluster_ctarank": lambda w: w.rank[w.block],
    "%cluster_nctarank": _uniform(lambda w: w.launch.cluster_size),
    **{f"%lanemask_{k}": _lanemask(k) for k in ("eq", "lt", "le", "gt", "ge")},
}


def _axis(n: int, letter: str) -> dict[str, Callable[[Wave], Any]]:
    return {
        f"%tid.{letter}": lambda w: w.thread_index[n],
        f"%ntid.{letter}": _uniform(lambda w: w.launch.block[n]),
        f"%nctaid.{letter}": _uniform(lambda w: w.launch.grid[n]),
        f"%ctaid.{letter}": _per_block(n, "block_index"),
        f"%cluster_ctaid.{letter}": _per_block(n, "cluster_block_index"),
        f"%clusterid.{letter}": _per_block(n, "cluster_index"),
        f"%cluster_nctaid.{letter}": _uniform(lambda w: w.launch.cluster[n]),
        f"%nclusterid.{letter}": _uniform(lambda w: w.launch.grid[n] // w.launch.cluster[n]),
    }


for _n, _letter in enumerate("xyz"):
    SPECIAL.update(_axis(_n, _letter))
