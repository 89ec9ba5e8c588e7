"""One launch: checks its arguments, places its parameters and runs its blocks wave by wave."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import numpy as np
import torch

from . import isa  # noqa: F401  (fills the table of instructions)
from .errors import Finding, Triple, error
from .memory import Memory
from .program import SHARED_START, Program, dynamic_start
from .races import Races
from .schedule import Schedule
from .wave import Wave

# Largest shared memory of a block and numbers of multiprocessors, by architecture (CUDA programming guide, table of
# compute capabilities: 227 KiB usable on 9.0 and 10.0; 132 on an H200, 148 on a B200).
SHARED_LIMIT = 227 * 1024
MULTIPROCESSORS = {"sm_90a": 132, "sm_100a": 148}


@dataclass
class Stats:
    """What the launches of a context did.

    thread_instructions: instructions times threads, those that a guard turned off included. read, written: bytes by
    state space.
    """

    thread_instructions: int = 0
    launches: int = 0
    read: dict[str, int] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)


@dataclass
class Launch:
    """A kernel with its grid, arguments and the state of the context that it touches."""

    program: Program
    grid: Triple
    block: Triple
    arguments: bytes
    memory: Memory
    schedule: Schedule
    stats: Stats
    findings: list[Finding]
    checkers: bool
    budget: int
    shared_bytes: int = 0
    cluster: Triple = (1, 1, 1)
    cooperative: bool = False
    number: int = 0
    symbols: dict[str, int] = field(default_factory=dict)

    @property
    def cluster_size(self) -> int:
        return self.cluster[0] * self.cluster[1] * self.cluster[2]

    @property
    def explicit_cluster(self) -> bool:
        return self.cluster_size > 1

    @property
    def multiprocessors(self) -> int:
        return MULTIPROCESSORS.get(self.program.arch, 132)

    def __post_init__(self) -> None:
        where = self.program.kernel.place
        if min(self.grid) < 1 or self.grid[0] > 2**31 - 1 or max(self.grid[1:]) > 65535:
            raise error("launch", f"grid {self.grid} is not possible: 1 to 2147483647, 65535, 65535 are", **where)
        threads = int(np.prod(self.block))
        if not 1 <= threads <= 1024 or self.block[2] > 64:
            raise error("launch", f"block {self.block} has {threads} threads; 1 to 1024 are possible", **where)
        required = self.program.kernel.directives.get("reqntid")
        if required and (*required, 1, 1)[:3] != tuple(self.block):
            raise error("launch", f"block {self.block} is not the .reqntid {required} of the kernel", **where)
        most = self.program.kernel.directives.get("maxntid")
        if most and threads > int(np.prod(most)):
            raise error("launch", f"{threads} threads a block are more than .maxntid {most}", **where)
        if any(g % c for g, c in zip(self.grid, self.cluster, strict=True)) or self.cluster_size > 16:
            raise error("launch", f"grid {self.grid} is not a multiple of cluster {self.cluster}", **where)
        shared = dynamic_start(self.program) - SHARED_START + self.shared_bytes
        if shared > SHARED_LIMIT:
            raise error(
                "launch", f"{shared} bytes of shared memory are more than the {SHARED_LIMIT} of {self.program.arch}",
                **where,
            )  # fmt: skip
        wanted = self.program.param_bytes
        if len(self.arguments) != wanted:
            raise error("launch", f"{len(self.arguments)} bytes of arguments, the kernel takes {wanted}", **where)
        # The parameter block has a real address: tensor maps are read from it through generic pointers.
        self.races = Races(self) if self.checkers else None
        self._raw = ctypes.create_string_buffer(max(wanted, 1) + 128)
        self.param_address = (ctypes.addressof(self._raw) + 127) & ~127
        ctypes.memmove(self.param_address, self.arguments, wanted)

    def traffic(self, space: str, way: str, size: int) -> None:
        table = self.stats.read if way == "read" else self.stats.written
        table[space] = table.get(space, 0) + size

    def run(self) -> None:
        """Runs all blocks."""
        self.stats.launches += 1
        clusters = int(np.prod(self.grid)) // self.cluster_size
        params = self.memory.add(
            self.param_address, self.program.param_bytes, "the kernel parameters", self._raw, readonly=True
        )
        threads = torch.get_num_threads()
        # Small operations on many threads cost more than they save, and callers run several processes.
        torch.set_num_threads(1)
        try:
            order = self.schedule.order(clusters)
            together = self.schedule.wave_clusters(int(np.prod(self.block)) * self.cluster_size)
            if self.cooperative:
                together = clusters
            with np.errstate(all="ignore"):
                for start in range(0, clusters, together):
                    Wave(self, self._blocks(order[start : start + together]), self.schedule).run()
        finally:
            torch.set_num_threads(threads)
            if params is not None:
                self.memory.remove(params)

    def _blocks(self, clusters: np.ndarray) -> np.ndarray:
        """Block numbers of clusters, cluster by cluster in order of rank."""
        if self.cluster_size == 1:
            return clusters
        cx, cy, cz = self.cluster
        nx, ny = self.grid[0] // cx, self.grid[1] // cy
        x, y, z = clusters % nx, clusters // nx % ny, clusters // (nx * ny)
        rank = np.arange(self.cluster_size)
        bx = x[:, None] * cx + rank % cx
        by = y[:, None] * cy + rank // cx % cy
        bz = z[:, None] * cz + rank // (cx * cy)
        return ((bz * self.grid[1] + by) * self.grid[0] + bx).reshape(-1)
