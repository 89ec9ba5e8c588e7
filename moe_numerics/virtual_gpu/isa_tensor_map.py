"""Tensor maps that a kernel changes: `tensormap.replace` and its fences (PTX ISA 9.7.9.28, 9.7.13.4)."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import memory, ptx
from .errors import Fault
from .isa_bulk import warp_issue
from .lowering import Lowering
from .memory import Array
from .registry import Index, Modifiers, Step, instruction

_FIELDS = (
    "field=global_address|rank|box_dim|global_dim|global_stride|element_stride|elemtype|interleave_layout|swizzle_mode|"
    "fill_mode"
)


@instruction(f"tensormap .replace mode?=tile {_FIELDS} space=global|shared::cta .b1024 type=b32|b64")
def replace(b: Lowering, m: Modifiers) -> Step:
    space = "shared" if m.space.startswith("shared") else "global"
    address = b.address(b.operands[0])
    ordinal = 0
    value_operand = b.operands[1]
    if m.field in ("box_dim", "global_dim", "global_stride", "element_stride"):
        if not isinstance(b.operands[1], ptx.Imm):
            raise b.fail("tensormap.replace needs an immediate dimension")
        ordinal = int(b.operands[1].value)
        value_operand = b.operands[2]
    value = b.full(b.read(value_operand, m.type))

    def step(w: Any, i: Index) -> None:
        at, new = address(w, i), value(w, i).astype(np.uint64)

        def word(n: int) -> Array:
            return memory.load(w, i, space, at + np.uint64(4 * n), 4, 1)[0]

        def put(n: int, values: Array) -> None:
            memory.store(w, i, space, at + np.uint64(4 * n), 4, [values.astype(np.uint32)])

        def bits(n: int, shift: int, width: int, values: Array) -> None:
            mask = np.uint32(((1 << width) - 1) << shift)
            put(n, (word(n) & ~mask) | ((values.astype(np.uint32) << np.uint32(shift)) & mask))

        if m.field == "global_address":
            put(0, new & np.uint64(0xFFFFFFFF))
            put(1, new >> np.uint64(32))
        elif m.field == "global_dim":
            put(8 + ordinal, new - np.uint64(1))
        elif m.field == "global_stride":
            put(3 + ordinal, (new >> np.uint64(4)) & np.uint64(0xFFFFFFFF))
            bits(7, 4 * ordinal, 4, (new >> np.uint64(36)) & np.uint64(15))
        elif m.field == "box_dim":
            if ordinal == 0:
                bits(13, 24, 8, new - np.uint64(1))
            else:
                bits(14, 8 * (ordinal - 1), 8, new - np.uint64(1))
        elif m.field == "rank":
            bits(2, 4, 3, new)
        elif m.field == "swizzle_mode":
            bits(2, 13, 2, new)
        elif m.field == "elemtype" and np.all((new < 8) | (new == 10)):
            bits(2, 7, 4, new)
        elif np.any(new != (1 if m.field == "element_stride" else 0)):
            raise Fault(
                "tensor_map", f"tensormap.replace of {m.field} by {int(new[0])} is not modelled", int(w.index(i)[0])
            )

    return step


@instruction("fence .proxy kind=tensormap::generic sem=acquire|release scope=cta|cluster|gpu|sys")
@instruction(
    "tensormap .cp_fenceproxy .global .shared::cta .tensormap::generic .release scope=cta|cluster|gpu|sys .sync "
    ".aligned"
)
def fence_map(b: Lowering, m: Modifiers) -> Step:
    if b.ins.opcode == "fence":
        return lambda w, i: None
    destination, source = b.address(b.operands[0]), b.address(b.operands[1])

    def step(w: Any, i: Index) -> None:
        threads = w.index(i)
        targets, sources = destination(w, i), source(w, i)
        for k in warp_issue(w, i, [targets, sources]).tolist():
            one = threads[k : k + 1]
            step = np.arange(32, dtype=np.uint64) * np.uint64(4)
            many = np.repeat(one, 32)
            values = memory.load(w, many, "shared", sources[k] + step, 4, 1)
            memory.store(w, many, "global", targets[k] + step, 4, values)

    return step
