"""Barriers of a block and fences (PTX ISA 9.7.13.1 to 9.7.13.4)."""

from __future__ import annotations

from typing import Any

import numpy as np

from .lowering import Lowering
from .memory import Array
from .registry import Index, Modifiers, Step, instruction

_EVERY_LANE = np.uint32(0xFFFFFFFF)


def _aligned(b: Lowering, m: Modifiers) -> None:
    """`bar` and `.aligned` need all lanes of the warp: the instruction waits for those that are alive."""
    if b.ins.opcode == "bar" or m.aligned:
        b.sync_mask = lambda w, i: _EVERY_LANE


for _opcode, _aligned_word in (("bar", ""), ("barrier", " .aligned?")):

    @instruction(f"{_opcode} .cta? .sync{_aligned_word}", kind="blocking")
    def sync(b: Lowering, m: Modifiers) -> Step:
        _aligned(b, m)
        number = b.read(b.operands[0], "u32")
        count = b.read(b.operands[1], "u32") if len(b.operands) > 1 else None
        return lambda w, i: w.barriers.arrive(i, number(w, i), None if count is None else count(w, i), b.ins)

    @instruction(f"{_opcode} .cta? .arrive{_aligned_word}", kind="blocking")
    def arrive(b: Lowering, m: Modifiers) -> Step:
        _aligned(b, m)
        if len(b.operands) != 2:
            raise b.fail("an arrival at a barrier needs a thread count")
        number, count = (b.read(o, "u32") for o in b.operands)
        return lambda w, i: w.barriers.arrive(i, number(w, i), count(w, i), b.ins, waits=False)

    @instruction(f"{_opcode} .cta? .red op=popc{_aligned_word} .u32", kind="blocking")
    @instruction(f"{_opcode} .cta? .red op=and|or{_aligned_word} .pred", kind="blocking")
    def red(b: Lowering, m: Modifiers) -> Step:
        _aligned(b, m)
        number = b.read(b.operands[1], "u32")
        count = b.read(b.operands[2], "u32") if len(b.operands) > 3 else None
        predicate = b.read(b.operands[-1], "pred")
        write = b.write(b.operands[0], "u32" if m.op == "popc" else "pred")

        def step(w: Any, i: Index) -> list[Index]:
            def finish(threads: Index, true: Array, participants: Array) -> None:
                if m.op == "popc":
                    write(w, threads, true.astype(np.uint32))
                else:
                    write(w, threads, true == participants if m.op == "and" else true > 0)

            return w.barriers.arrive(
                i, number(w, i), None if count is None else count(w, i), b.ins, True, predicate(w, i), finish
            )

        return step


@instruction("membar level=cta|gl|sys")
@instruction("fence sem?=sc|acq_rel|acquire|release scope=cta|cluster|gpu|sys")
@instruction("fence .proxy kind=async|alias")
@instruction("fence .proxy .async space=global|shared::cta|shared::cluster")
@instruction("membar .proxy .alias")
@instruction("fence .mbarrier_init .release .cluster")
@instruction("fence .acquire .sync_restrict::shared::cluster .cluster")
@instruction("fence .release .sync_restrict::shared::cta .cluster")
@instruction("fence .proxy .async::generic .acquire .sync_restrict::shared::cluster .cluster")
@instruction("fence .proxy .async::generic .release .sync_restrict::shared::cta .cluster")
def fence(b: Lowering, m: Modifiers) -> Step:
    """Memory is sequentially consistent here; fences matter to the race checker only."""
    name = b.ins.name

    def step(w: Any, i: Index) -> None:
        if w.tracker is not None:
            w.tracker.fence(w, i, name)

    return step
