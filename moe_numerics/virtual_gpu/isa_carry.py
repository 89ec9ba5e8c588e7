"""Integer arithmetic with a carry from one instruction to the next (PTX ISA 9.7.2)."""

from __future__ import annotations

from typing import Any

import numpy as np

from .isa_integer import UNSIGNED_OF, multiply_high
from .lowering import VIEW, Lowering, Read
from .memory import Array
from .registry import Index, Modifiers, Step, instruction

_TYPES = "type=u32|s32|u64|s64"


def _chained(b: Lowering, kind: str, first: Read, second: Read, subtract: bool, uses: bool, sets: bool) -> Step:
    """The sum or difference of two operands and, if `uses`, the carry."""
    write = b.write(b.operands[0], kind)

    def step(w: Any, i: Index) -> None:
        x, y = first(w, i), second(w, i)
        if w.carry is None:
            w.carry = np.zeros(w.threads, bool)
        extra = (w.carry if i is None else w.carry[i]).astype(x.dtype) if uses else x.dtype.type(0)
        partial = x - y if subtract else x + y
        result = partial - extra if subtract else partial + extra
        if sets:
            out = (x < y) | (partial < extra) if subtract else (partial < x) | (result < partial)
            if i is None:
                w.carry = out
            else:
                w.carry = w.carry.copy()
                w.carry[i] = out
        write(w, i, result)

    return step


for _op, _subtract, _uses in (("add", False, False), ("addc", False, True), ("sub", True, False), ("subc", True, True)):
    for _sets in (True, False):
        if not _uses and not _sets:
            continue

        @instruction(f"{_op}{' .cc' if _sets else ''} {_TYPES}")
        def carry(b: Lowering, m: Modifiers, s: bool = _subtract, u: bool = _uses, c: bool = _sets) -> Step:
            kind = UNSIGNED_OF[m.type]
            x, y = (b.full(b.read(o, kind)) for o in b.operands[1:3])
            return _chained(b, kind, x, y, s, u, c)


for _op, _uses in (("mad", False), ("madc", True)):
    for _sets in (True, False):
        if not _uses and not _sets:
            continue

        @instruction(f"{_op} half=lo|hi{' .cc' if _sets else ''} {_TYPES}")
        def carry_product(b: Lowering, m: Modifiers, u: bool = _uses, c: bool = _sets) -> Step:
            unsigned = VIEW[UNSIGNED_OF[m.type]]
            x, y = (b.full(b.read(o, m.type)) for o in b.operands[1:3])

            def product(w: Any, i: Index) -> Array:
                left, right = x(w, i), y(w, i)
                return (left * right if m.half == "lo" else multiply_high(left, right)).view(unsigned)

            kind = UNSIGNED_OF[m.type]
            return _chained(b, kind, product, b.full(b.read(b.operands[3], kind)), False, u, c)
