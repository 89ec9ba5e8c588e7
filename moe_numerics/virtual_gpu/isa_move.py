"""Moves, packing, address conversion and what else only copies (PTX ISA 9.7.9)."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import ptx
from .lowering import VIEW, Lowering
from .memory import LOCAL_WINDOW, RANK_SHIFT, SHARED_WINDOW, Array
from .registry import Index, Modifiers, Step, instruction

_MOVE = "type=pred|b16|b32|b64|u16|u32|u64|s16|s32|s64|f32|f64"


@instruction(f"mov {_MOVE}")
def mov(b: Lowering, m: Modifiers) -> Step:
    target, source = b.operands
    if isinstance(source, ptx.Vector):
        return _pack(b, source, target, m.type)
    if isinstance(target, ptx.Vector):
        return _unpack(b, source, target, m.type)
    if isinstance(source, ptx.Symbol):
        read = b.full(b.read(source, m.type))
        write = b.write(target, m.type)
        return lambda w, i: write(w, i, read(w, i))
    return b.alu(m.type, (m.type,), lambda x: x)


def _pack(b: Lowering, source: ptx.Vector, target: ptx.Operand, kind: str) -> Step:
    size = VIEW[kind].itemsize
    part = size // len(source.items)
    names = {1: "b8", 2: "b16", 4: "b32"}
    if part not in names or part * len(source.items) != size:
        raise b.fail(f"{len(source.items)} elements do not make up .{kind}")
    reads = [b.full(_part(b, o, names[part])) for o in source.items]
    write = b.write(target, f"b{8 * size}")
    dtype = VIEW[f"b{8 * size}"]

    def step(w: Any, i: Index) -> None:
        out: Array = reads[0](w, i).astype(dtype)
        for n, read in enumerate(reads[1:], 1):
            out = out | (read(w, i).astype(dtype) << dtype.type(8 * part * n))
        write(w, i, out)

    return step


def _part(b: Lowering, operand: ptx.Operand, kind: str) -> Any:
    """An element of a pack. Compilers pack registers that nothing ever writes where an element does not matter."""
    if isinstance(operand, ptx.Reg) and operand.index in b.program.undefined:
        zero = VIEW[kind].type(0)
        return lambda w, i: zero
    return b.read(operand, kind)


def _unpack(b: Lowering, source: ptx.Operand, target: ptx.Vector, kind: str) -> Step:
    size = VIEW[kind].itemsize
    part = size // len(target.items)
    names = {1: "b8", 2: "b16", 4: "b32"}
    if part not in names or part * len(target.items) != size:
        raise b.fail(f".{kind} does not split into {len(target.items)} elements")
    # Compilers take an element out of a register that is not written yet to put it back beside a new one.
    b.lenient = any(isinstance(o, ptx.Sink) for o in target.items)
    read = b.full(b.read(source, f"b{8 * size}"))
    writes = [b.write(o, names[part]) for o in target.items]
    dtype, small = VIEW[f"b{8 * size}"], VIEW[names[part]]

    def step(w: Any, i: Index) -> None:
        value = read(w, i)
        for n, write in enumerate(writes):
            write(w, i, (value >> dtype.type(8 * part * n)).astype(small))

    return step


_WINDOWS = {"shared": SHARED_WINDOW, "shared::cta": SHARED_WINDOW, "shared::cluster": SHARED_WINDOW,
            "local": LOCAL_WINDOW, "global": 0, "const": 0, "param": 0, "param::entry": 0}  # fmt: skip
_SPACE = "space=global|shared|shared::cta|shared::cluster|local|const|param|param::entry"


@instruction(f"cvta .to {_SPACE} .u64")
def cvta_to(b: Lowering, m: Modifiers) -> Step:
    offset = np.uint64(_WINDOWS[m.space])
    return b.alu("u64", ("u64",), lambda x: x - offset if offset else x)


@instruction(f"cvta {_SPACE} .u64")
def cvta(b: Lowering, m: Modifiers) -> Step:
    offset = np.uint64(_WINDOWS[m.space])
    read = b.full(b.read(b.operands[1], "u64"))
    write = b.write(b.operands[0], "u64")
    return lambda w, i: write(w, i, read(w, i) + offset if offset else read(w, i))


@instruction("isspacep space=global|shared|shared::cta|shared::cluster|local|const|param|param::entry")
def isspacep(b: Lowering, m: Modifiers) -> Step:
    """Parameters and constants lie in ordinary memory here: their addresses tell them apart.

    A parameter's address is a global one too, a constant's is not (seen on an H200).
    """
    read = b.full(b.read(b.operands[1], "u64"))
    write = b.write(b.operands[0], "pred")
    constants = [(v.name, v.size) for v in b.program.module.variables if v.space == "const"]

    def within(x: Array, start: int, size: int) -> Array:
        return x - np.uint64(start) < np.uint64(size)

    def step(w: Any, i: Index) -> None:
        x = read(w, i)
        if m.space.startswith("shared"):
            found = within(x, SHARED_WINDOW, SHARED_WINDOW)
            if m.space == "shared::cta" or m.space == "shared":
                mine = w.rank[w.block] if i is None else w.rank[w.block[i]]
                found &= x >> np.uint64(RANK_SHIFT) & np.uint64(255) == mine
        elif m.space == "local":
            found = within(x, LOCAL_WINDOW, LOCAL_WINDOW)
        else:
            parameter = within(x, w.launch.param_address, w.program.param_bytes)
            constant = np.zeros(x.shape, bool)
            for name, size in constants:
                constant |= within(x, w.launch.symbols[name], size)
            found = {"param": parameter, "const": constant}.get(m.space.split("::")[0], x < np.uint64(SHARED_WINDOW))
            if m.space == "global":
                found &= ~constant
        write(w, i, found)

    return step
