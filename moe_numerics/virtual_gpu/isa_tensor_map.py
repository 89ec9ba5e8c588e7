"""Tensor maps that a kernel changes: `tensormap.replace` and its fences (PTX ISA 9.7.9.28, 9.7.13.4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import memory, ptx
from .isa_bulk import warp_issue
from .lowering import Lowering
from .memory import Array
from .registry import Index, Modifiers, Step, instruction

_FIELDS = (
    "field=global_address|rank|box_dim|global_dim|global_stride|element_stride|elemtype|interleave_layout|swizzle_mode|"
    "fill_mode"
)


_ORDINALS = {"box_dim": 5, "global_dim": 5, "global_stride": 4, "element_stride": 5}
_VALUES = {"elemtype": 13, "interleave_layout": 3, "swizzle_mode": 4, "fill_mode": 2}
"""How many values a field has on sm_90a that takes an immediate."""
_BLACKWELL_TYPES = 16


def _bounded(b: Lowering, operand: ptx.Operand, what: str, count: int) -> int:
    if not isinstance(operand, ptx.Imm) or not 0 <= int(operand.value) < count:
        raise b.fail(f"`{b.ins.name}` needs an immediate {what} from 0 to {count - 1}")
    return int(operand.value)


def _places(b: Lowering, m: Modifiers) -> list[tuple[int, int, int, Callable[[Array], Array]]]:
    """What a replacement changes: (word, first bit, bits, their value from the new one)."""
    n = _bounded(b, b.operands[1], "dimension", _ORDINALS[m.field]) if m.field in _ORDINALS else 0
    fixed = 0
    if m.field in _VALUES:
        wide = m.field == "elemtype" and b.program.arch == "sm_100a"
        fixed = _bounded(b, b.operands[-1], "value", _BLACKWELL_TYPES if wide else _VALUES[m.field])

    def less_one(new: Array) -> Array:
        return new - np.uint64(1)

    def shifted(bits: int) -> Callable[[Array], Array]:
        return lambda new: new >> np.uint64(bits)

    def constant(number: int) -> Callable[[Array], Array]:
        return lambda new: np.full_like(new, number)

    match m.field:
        case "global_address":
            return [(0, 0, 32, shifted(0)), (1, 0, 32, shifted(32))]
        case "rank":
            return [(2, 4, 3, shifted(0))]
        case "global_dim":
            return [(8 + n, 0, 32, less_one)]
        case "global_stride":
            return [(3 + n, 0, 32, shifted(4)), (7, 4 * n, 4, shifted(36))]
        case "box_dim":
            return [(14, 8 * (n - 1), 8, less_one) if n else (13, 24, 8, less_one)]
        case "element_stride":
            return [(13, 3 * n, 3, less_one)]
        case "elemtype":
            # tf32 is float32 with a mark, which other types leave as it is.
            rounded = 11 <= fixed <= 12
            code = fixed if fixed < 11 else fixed - (4 if rounded else 2)
            return [(2, 7, 4, constant(code))] + ([(2, 16, 1, constant(1))] if rounded else [])
        case "swizzle_mode":
            return [(2, 13, 2, constant(fixed)), (2, 22, 1, constant(0))]
        case "interleave_layout":
            return [(2, 11, 2, constant(fixed))]
        case _:
            return [(2, 15, 1, constant(fixed))]


@instruction(f"tensormap .replace mode?=tile {_FIELDS} space=global|shared::cta .b1024 type=b32|b64")
def replace(b: Lowering, m: Modifiers) -> Step:
    """The bits are those that `ptxas` 13.0 changes in memory: the instruction is a short program on sm_90a."""
    space = "shared" if m.space.startswith("shared") else "global"
    address = b.address(b.operands[0])
    places = _places(b, m)
    value = b.full(b.read(b.operands[-1], m.type))

    def step(w: Any, i: Index) -> None:
        at, new = address(w, i), value(w, i).astype(np.uint64)
        for word, shift, width, part in places:
            where = at + np.uint64(4 * word)
            mask = np.uint32(((1 << width) - 1) << shift)
            old = memory.load(w, i, space, where, 4, 1)[0]
            changed = part(new).astype(np.uint32) << np.uint32(shift)
            memory.store(w, i, space, where, 4, [old & ~mask | changed & mask])

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
