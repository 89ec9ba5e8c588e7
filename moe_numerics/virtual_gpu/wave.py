"""A wave: the blocks that are resident together, their registers and memory, and the loop that runs them.

Threads that share a program counter form a fragment and execute as one array operation. Fragments belong to units:
one unit for all threads in the fast schedule, one for each warp number in the others. Inside a unit the lowest
program counter runs first, which makes threads meet again after a branch; between units the schedule chooses, and
interleaving.py runs what it chose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from . import special
from .asynchronous import Groups, Operation, Pending
from .barriers import NamedBarriers
from .clusters import ClusterBarrier
from .errors import Fault, Finding, VirtualGPUError
from .interleaving import Interleaving
from .lowering import Read
from .mbarrier import Mbarriers
from .memory import Region
from .program import SHARED_START, Program, Segment, dynamic_start
from .registry import Delayed, Index
from .tensor_memory import TensorMemory
from .wave_registers import Registers

if TYPE_CHECKING:
    from .launch import Launch
    from .schedule import Schedule

Array = npt.NDArray[Any]
EVERY_LANE = np.uint32(0xFFFFFFFF)
NOBODY: npt.NDArray[np.intp] = np.empty(0, np.intp)


class Wave(Registers):
    """Blocks running together. Blocks are numbered as in the grid, x fastest; clusters are kept whole."""

    lane: npt.NDArray[np.uint32]
    linear_thread: npt.NDArray[np.uint32]
    block: npt.NDArray[np.intp]
    rank: npt.NDArray[np.uint32]
    thread_index: tuple[Array, Array, Array]
    time: int
    shared_begin: int
    shared_limit: int
    launch: Launch

    def __init__(self, launch: Launch, blocks: npt.NDArray[np.int64], schedule: Schedule) -> None:
        self.launch = launch
        self.program: Program = launch.program
        self.checkers = launch.checkers
        self.tracker: Any = None
        self.schedule = schedule
        self.per_block = int(np.prod(launch.block))
        self.blocks = blocks
        self.block_count = int(blocks.size)
        self.threads = self.block_count * self.per_block
        self._special: dict[str, Array] = {}
        self.resume = 0
        self.carry: Any = None
        self.current: Any = None
        self.line = 0
        self.strong = False
        self.time = 0

        self.everyone = everyone = np.arange(self.threads)
        self.block = everyone // self.per_block
        self.linear_thread = (everyone % self.per_block).astype(np.uint32)
        self.lane = self.linear_thread & np.uint32(31)
        self.warps_per_block = -(-self.per_block // 32)
        self.warp = self.block * self.warps_per_block + (self.linear_thread >> np.uint32(5))
        self.warp_base = everyone - self.lane
        bx, by, _ = launch.block
        t = self.linear_thread
        self.thread_index = (t % np.uint32(bx), t // np.uint32(bx) % np.uint32(by), t // np.uint32(bx * by))
        self._place_blocks()
        self.make_registers()

        self.shared_begin = SHARED_START
        self.shared_limit = dynamic_start(self.program) + launch.shared_bytes
        if not launch.shared_bytes:
            self.shared_limit = SHARED_START + self.program.static_shared
        self.shared_stride = -(-self.shared_limit // 1024) * 1024
        total = self.shared_stride * self.block_count
        self.shared_region = Region(
            "shared", np.zeros(total, np.uint8), np.zeros(total, np.uint8) if self.checkers else None
        )
        self.shared_base = self.block.astype(np.int64) * self.shared_stride
        self.local_bytes = self.program.local_bytes
        total = self.local_bytes * self.threads
        self.local_region = Region(
            "local", np.zeros(total, np.uint8), np.zeros(total, np.uint8) if self.checkers else None
        )

        self.live = np.ones(self.threads, bool)
        self.all_live = True
        self.live_count = self.threads
        # Bits of the living lanes of each warp, made when needed.
        self._live_lanes: Array | None = None
        self.barriers = NamedBarriers(self)
        self.cluster_barrier = ClusterBarrier(self)
        self.mbarriers = Mbarriers(self)
        self.pending = Pending(self)
        self.bulk_groups, self.copy_groups, self.wgmma_groups = Groups(), Groups(), Groups()
        # tcgen05: unfinished operations of each thread in order, and those that no commit covers yet.
        self.tensor_queues: dict[int, list[Operation]] = {}
        self.tensor_uncommitted: dict[int, list[Operation]] = {}
        self._tensor_memory: TensorMemory | None = None
        # The last fragment found to have all living lanes of its warps.
        self._met: Index = NOBODY
        self.unit_count, self.unit_of = schedule.units(self)
        if launch.races is not None:
            launch.races.begin(self)
            self.tracker = launch.races
        # Runnable threads of each unit by segment, and those that wait for lanes of their warp, by unit and segment.
        self.pools: list[dict[int, list[Any]]] = [{} for _ in range(self.unit_count)]
        self.asleep: dict[tuple[int, int], list[Any]] = {}
        self.ahead: Interleaving | None = Interleaving(self) if self.unit_count > 1 else None

    def _place_blocks(self) -> None:
        gx, gy, _ = self.launch.grid
        cx, cy, cz = self.launch.cluster
        b = self.blocks
        x, y, z = b % gx, b // gx % gy, b // (gx * gy)
        self.block_index = (x, y, z)
        self.cluster_block_index = (x % cx, y % cy, z % cz)
        self.cluster_index = (x // cx, y // cy, z // cz)
        self.rank = (x % cx + cx * (y % cy + cy * (z % cz))).astype(np.uint32)
        # cluster_start: the wave's number of the block of rank 0; the launch hands out blocks cluster by cluster.
        self.cluster_start = np.arange(self.block_count) - self.rank
        self.shared_rank = (self.rank << np.uint32(24))[self.block]

    # -- memory ---------------------------------------------------------------------------------------------------

    def special(self, name: str) -> Array:
        if name in special.VOLATILE:
            return np.asarray(special.SPECIAL[name](self))
        if name not in self._special:
            self._special[name] = np.asarray(special.SPECIAL[name](self))
        return self._special[name]

    @property
    def tensor_memory(self) -> TensorMemory:
        if self._tensor_memory is None:
            self._tensor_memory = TensorMemory(self)
        return self._tensor_memory

    def shared_offset(self, i: Index, rank: Array, low: Array) -> npt.NDArray[np.int64]:
        """Offsets in the wave's shared buffer of addresses with their cluster rank."""
        base = self.shared_base if i is None else self.shared_base[i]
        if self.launch.cluster_size == 1:
            if rank.any():
                k = int(np.flatnonzero(rank)[0])
                raise Fault(
                    "out_of_bounds", "a shared address of another block, but the launch has no clusters",
                    k if i is None else int(i[k]), int(low[k]),
                )  # fmt: skip
            return base + low.view(np.int64)
        if int(rank.max()) >= self.launch.cluster_size:
            k = int(np.argmax(rank))
            raise Fault(
                "out_of_bounds", f"a shared address of block {int(rank[k])} of a cluster of {self.launch.cluster_size}",
                k if i is None else int(i[k]), int(low[k]),
            )  # fmt: skip
        mine = self.block if i is None else self.block[i]
        return (self.cluster_start[mine] + rank.view(np.int64)) * self.shared_stride + low.view(np.int64)

    # -- scheduling -----------------------------------------------------------------------------------------------

    def union(self, a: Index, b: Index) -> Index:
        """Both groups of threads."""
        if a is None or b is None:
            return None
        if not a.size:
            return b
        if not b.size:
            return a
        both = np.sort(np.concatenate((a, b)))
        return None if both.size == self.threads else both

    def push(self, segment: int, i: Index) -> None:
        """Makes threads runnable at a segment."""
        if i is not None and not i.size:
            return
        if segment >= len(self.program.segments):
            self.exit(i)
        elif self.ahead is None:
            self.pools[0].setdefault(segment, []).append(i)
        else:
            for unit, threads in self.ahead.split(self.index(i)):
                self.pools[unit].setdefault(segment, []).append(threads)

    def group(self, threads: npt.NDArray[np.intp]) -> Index:
        """Threads as a fragment: None stands for all of them, unless units are less than the wave."""
        return None if threads.size == self.threads and self.ahead is None else threads

    def exit(self, i: Index) -> None:
        """Ends threads."""
        if i is None:
            self.live[:] = False
        else:
            self.live[i] = False
        self.all_live = False
        self.live_count = int(np.count_nonzero(self.live))
        self._live_lanes = None
        self.barriers.threads_left(i)
        if self.cluster_barrier.parked:
            self.cluster_barrier.complete()
        # Lanes that waited for the ones that ended may be complete now.
        asleep, self.asleep = self.asleep, {}
        for (_, segment), parts in asleep.items():
            for part in parts:
                self.push(segment, part)

    def rendezvous(self, i: Index, mask: Read) -> tuple[Index, Index]:
        """Splits a fragment at a `.sync` instruction into lanes whose partners are all here and lanes that wait."""
        masks = mask(self, i)
        whole = masks.ndim == 0 and masks == EVERY_LANE
        if whole and (self._met is i or (self.ahead is not None and self.ahead.complete(i))):
            return i, NOBODY
        lanes = self.lane if i is None else self.lane[i]
        named = (masks >> lanes) & np.uint32(1)
        if not np.all(named):
            k = int(np.flatnonzero(np.broadcast_to(named, lanes.shape) == 0)[0])
            raise Fault(
                "warp_mask", "the thread executes a .sync instruction whose member mask does not name it",
                k if i is None else int(i[k]),
            )  # fmt: skip
        if lanes.size == self.live_count:
            # Everybody who lives is here.
            return i, NOBODY
        warps = self.warp if i is None else self.warp[i]
        bits = np.uint32(1) << lanes
        size = self.block_count * self.warps_per_block
        here = np.bincount(warps, bits, size).astype(np.uint32)
        if self._live_lanes is None:
            self._live_lanes = np.bincount(self.warp, (np.uint32(1) << self.lane) * self.live, size).astype(np.uint32)
        wanted = masks & self._live_lanes[warps]
        complete = (wanted & ~here[warps]) == 0
        if complete.all():
            if whole:
                self._met = i
            return i, NOBODY
        threads = self.index(i)
        return threads[complete], threads[~complete]

    def run(self) -> None:
        """Runs all threads to their end."""
        if not self.program.segments:
            return
        self.push(0, None)
        while True:
            unit = self.schedule.pick(self)
            if unit < 0 or (self.pending.queue and self.schedule.completes()):
                operation = self.pending.next()
                if operation is not None:
                    self._finish(operation)
                    continue
                if self.mbarriers.time_out():
                    continue
                if self.live.any():
                    self._deadlock()
                self._end()
                return
            if self.ahead is not None:
                self.ahead.turn(unit)
                continue
            number = min(self.pools[0])
            for target, part in self.execute(number, self.take(0, number)):
                self.push(target, part)

    def take(self, unit: int, number: int) -> Any:
        """The threads of a unit that stand at a segment, those that wait in it for others included."""
        parts = self.pools[unit].pop(number)
        waiting = self.asleep.pop((unit, number), None) if self.asleep else None
        if waiting:
            parts += waiting
        i: Index = parts[0]
        for part in parts[1:]:
            i = self.union(i, part)
        if len(parts) > 1 and self.ahead is not None and i is not None:
            return self.ahead.same(unit, i)
        return i

    def execute(self, number: int, i: Index) -> list[tuple[int, Any]]:
        """Runs a segment for threads that stand at it; gives (segment, threads) pairs of where they go on."""
        segment = self.program.segments[number]
        current = segment.first
        try:
            if segment.sync is not None:
                i, late = segment.sync(self, i)
                self._sleep(number, late)
                if i is not None and not i.size:
                    return []
            if self.tracker is None:
                for step, current in segment.steps:  # noqa: B007
                    step(self, i)
            else:
                for step, current in segment.steps:
                    self.current, self.line = current, current.line
                    step(self, i)
            current = segment.end_instruction
            if current is not None:
                self.current, self.line = current, current.line
            assert segment.end is not None
            parts = segment.end(self, i)
        except Fault as fault:
            raise self._error(fault, current) from fault
        self._count(segment, i)
        return parts

    def _sleep(self, number: int, late: Index) -> None:
        """Threads that wait at a segment for other lanes of their warps."""
        if late is None or not late.size:
            return
        for unit, threads in [(0, late)] if self.ahead is None else self.ahead.split(late):
            self.asleep.setdefault((unit, number), []).append(threads)

    def _count(self, segment: Segment, i: Index) -> None:
        launch = self.launch
        self.time += segment.length
        launch.stats.thread_instructions += segment.length * self.count(i)
        if self.time > launch.budget * self.unit_count:
            raise self._error(
                Fault(
                    "budget",
                    f"more than {launch.budget} instructions in a thread: an endless loop, or instruction_budget "
                    "is too small",
                    int(self.index(i)[0]),
                ),
                segment.end_instruction or segment.steps[-1][1],
            )

    def take_operands(self, number: int, i: Index) -> tuple[Any, Delayed]:
        """Runs a store up to the store itself: gives the threads that store and what does it for some of them."""
        segment = self.program.segments[number]
        assert segment.delayed is not None
        try:
            taken = segment.delayed(self, i)
        except Fault as fault:
            raise self._error(fault, segment.first) from fault
        self._count(segment, i)
        return taken

    def delayed(self, instruction: Any, threads: Array, positions: Array, put: Delayed) -> None:
        """What was put off when the operands of `instruction` were taken."""
        if instruction is not None:
            self.current, self.line = instruction, instruction.line
        try:
            put(self, threads, positions)
        except Fault as fault:
            raise self._error(fault, instruction) from fault

    def _end(self) -> None:
        """What should not be left over."""
        if self._tensor_memory is None or not self.checkers:
            return
        for block, columns, line in self._tensor_memory.leaks():
            ins = next((i for i in self.program.kernel.code if i.line == line), None)
            self.launch.findings.append(
                self.finding(
                    "tensor_memory", f"{columns} columns of tensor memory are still allocated when the block ends", ins,
                    block * self.per_block,
                )
            )  # fmt: skip

    def _finish(self, operation: Operation) -> None:
        self.current, self.line = operation.instruction, operation.instruction.line
        try:
            operation.finish()
        except Fault as fault:
            raise self._error(fault, operation.instruction) from fault

    def place(self, thread: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """blockIdx and threadIdx of the wave's thread of this number."""
        b = int(self.block[thread])
        return (
            tuple(int(a[b]) for a in self.block_index),  # type: ignore[return-value]
            tuple(int(a[thread]) for a in self.thread_index),
        )

    def _error(self, fault: Fault, instruction: Any) -> VirtualGPUError:
        finding = self.finding(
            fault.kind, fault.message, fault.instruction or instruction, fault.position, fault.address
        )
        self.launch.findings.append(finding)
        return VirtualGPUError(finding)

    def finding(
        self, kind: str, message: str, instruction: Any, thread: int | None = None, address: int | None = None
    ) -> Finding:
        block_index, thread_index = (None, None) if thread is None else self.place(thread)
        return Finding(
            kind, message, self.program.kernel.name, getattr(instruction, "line", None),
            getattr(instruction, "text", None), block_index, thread_index, address,
        )  # fmt: skip

    def _deadlock(self) -> None:
        """Nothing can run, but threads are alive: say where each of them waits."""
        places = []
        first = None
        for (_, segment), parts in self.asleep.items():
            ins = self.program.segments[segment].first
            threads = np.concatenate([self.index(p) for p in parts])
            first = first or (ins, int(threads[0]))
            places.append(f"{threads.size} threads at line {getattr(ins, 'line', '?')} wait for lanes of their warp")
        for ins, threads, why in (*self.barriers.waiting(), *self.cluster_barrier.waiting(), *self.mbarriers.waiting()):
            first = first or (ins, int(threads[0]))
            b, t = self.place(int(threads[0]))
            places.append(f"{threads.size} threads (block {b}, first {t}) at line {ins.line} wait for {why}")
        ins, thread = first if first is not None else (None, int(np.flatnonzero(self.live)[0]))
        fault = Fault("deadlock", "no thread can run: " + "; ".join(places[:12]), thread)
        raise self._error(fault, ins)
