"""Bulk and tensor reductions: `cp.reduce.async.bulk` (PTX ISA 9.7.9.25.4.2, 9.7.9.27.1.3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import memory, tensor_map
from .asynchronous import Operation
from .errors import Fault
from .isa_atomic import operation, reduction
from .isa_bulk import (
    DIMENSIONS,
    HINT,
    check_bulk,
    check_source,
    issue_store,
    shared_span,
    snapshot,
    spread,
    tensor_writer,
)
from .isa_mbarrier import barrier_offsets
from .lowering import VIEW, Lowering
from .memory import Array
from .registry import Index, Modifiers, Step, instruction

_ORDERED = "op=add|min|max|inc|dec|and|or|xor"
_INTEGER = ("add", "min", "max", "and", "or", "xor")
_OF_ELEMENTS = {
    "u32": (*_INTEGER, "inc", "dec"), "s32": _INTEGER, "u64": _INTEGER, "s64": ("min", "max"),
    "f16": ("add", "min", "max"), "bf16": ("add", "min", "max"),
    **dict.fromkeys(("f32", "f32.ftz", "tf32", "tf32.ftz", "f64"), ("add",)),
}  # fmt: skip
"""What a tensor reduction can do with elements of a type: an H200 stops with an illegal instruction at the others."""


def _bulk_operation(op: str, kind: str) -> Callable[..., Array]:
    """`reduction`, but sums of float32 do not flush here, unlike those of `red` (seen on an H200)."""
    return (operation if kind == "f32" else reduction)(op, kind)


@instruction(
    f"cp .reduce .async .bulk .tensor {DIMENSIONS} .global .shared::cta {_ORDERED} mode?=tile .bulk_group {HINT}"
)
def tensor_reduce(b: Lowering, m: Modifiers) -> Step:
    def accept(described: tensor_map.TensorMap, thread: int) -> None:
        kind = tensor_map.ELEMENT_TYPE.get(described.kind, "packed")
        if m.op not in _OF_ELEMENTS.get(kind, ()):
            raise Fault("tensor_map", f"a tensor reduction cannot {m.op} elements of type {kind}", thread)

    def put(w: Any, described: tensor_map.TensorMap, at: tuple[int, ...], data: Array) -> None:
        name = tensor_map.ELEMENT_TYPE[described.kind]
        kind = name.replace("tf32", "f32").removesuffix(".ftz")
        apply = reduction(m.op, kind) if name.endswith(".ftz") else _bulk_operation(m.op, kind)
        tensor_map.reduce_box(w, described, at, data.reshape(-1), VIEW[kind], apply)

    return tensor_writer(b, m, put, accept)


def _combine(cells: Array, data: Array, kind: str, apply: Callable[..., Array]) -> None:
    """Applies a reduction to bytes in place."""
    typed = cells.view(VIEW[kind])
    typed[:] = np.asarray(apply(typed.copy(), np.ascontiguousarray(data).reshape(-1).view(VIEW[kind])), typed.dtype)


@instruction(f"cp .reduce .async .bulk .global .shared::cta .bulk_group {HINT} .add .noftz type=f16|bf16")
@instruction(f"cp .reduce .async .bulk .global .shared::cta .bulk_group {HINT} op=min|max type=f16|bf16")
@instruction(f"cp .reduce .async .bulk .global .shared::cta .bulk_group {HINT} .add type=f32|f64")
@instruction(f"cp .reduce .async .bulk .global .shared::cta .bulk_group {HINT} op=min|max type=u32|s32|u64|s64")
@instruction(f"cp .reduce .async .bulk .global .shared::cta .bulk_group {HINT} op=add type=u32|s32|u64")
@instruction(f"cp .reduce .async .bulk .global .shared::cta .bulk_group {HINT} op=inc|dec .u32")
@instruction(f"cp .reduce .async .bulk .global .shared::cta .bulk_group {HINT} op=and|or|xor type=b32|b64")
def bulk_reduce(b: Lowering, m: Modifiers) -> Step:
    destination, source = b.address(b.operands[0]), b.address(b.operands[1])
    size = b.full(b.read(b.operands[2], "u32"))
    kind = m.get("type", "u32")
    apply = _bulk_operation(m.get("op", "add"), kind)

    def step(w: Any, i: Index) -> None:
        threads = w.index(i)
        targets, sources, sizes = destination(w, i), source(w, i), size(w, i)
        for k, t in enumerate(threads.tolist()):
            n, target = int(sizes[k]), int(targets[k])
            check_bulk(t, target, int(sources[k]), n)
            pieces = spread(shared_span(w, t, int(sources[k]), n), n)
            check_source(w, t, pieces)
            where = np.uint64(target) + np.arange(0, n, 16, dtype=np.uint64)
            many = np.full(where.size, t)
            for region, offsets, _ in memory.locate(w, many, "global", where, 16):
                memory.check_writable(region, many, None, where, 16)
                if region.must_be_written and w.checkers:
                    memory.check_written(w, many, region, offsets >> 3, 8, 2, None, where)

            def write(data: Array, target: int = target, n: int = n) -> None:
                region = w.launch.memory.find(target, target + n - 1)
                low = target - region.start
                _combine(region.buffer[low : low + n], data, kind, apply)

            w.launch.traffic("global", "read", n)
            w.launch.traffic("global", "written", n)
            issue_store(w, t, threads[k : k + 1], pieces, write, b.ins)

    return step


_ACROSS = "cp .reduce .async .bulk .shared::cluster .shared::cta .mbarrier::complete_tx::bytes"


@instruction(f"{_ACROSS} op=add type=u32|s32|u64")
@instruction(f"{_ACROSS} op=min|max type=u32|s32")
@instruction(f"{_ACROSS} op=inc|dec .u32")
@instruction(f"{_ACROSS} op=and|or|xor type=b32")
def reduce_across(b: Lowering, m: Modifiers) -> Step:
    destination, source = b.address(b.operands[0]), b.address(b.operands[1])
    size, barrier = b.full(b.read(b.operands[2], "u32")), b.address(b.operands[3])
    kind = m.get("type", "u32")
    apply = reduction(m.op, kind)

    def step(w: Any, i: Index) -> None:
        targets, sources, sizes = destination(w, i), source(w, i), size(w, i)
        signals = barrier_offsets(w, i, barrier(w, i))
        for k, t in enumerate(w.index(i).tolist()):
            n, signal = int(sizes[k]), int(signals[k])
            check_bulk(t, int(targets[k]), int(sources[k]), n)
            into = shared_span(w, t, int(targets[k]), n)
            pieces = spread(shared_span(w, t, int(sources[k]), n), n)
            cells = spread(into, n)
            check_source(w, t, pieces)
            check_source(w, t, cells)

            def write(data: Array, into: int = into, n: int = n, signal: int = signal, t: int = t) -> None:
                _combine(w.shared_region.buffer[into : into + n], data, kind, apply)
                w.mbarriers.complete(signal, n, t)

            operation = Operation(snapshot(w, pieces), write, b.ins)
            agent = w.mbarriers.get(signal, t, "a bulk reduction's completion").agent
            if w.tracker is not None:
                operation.done.append(w.tracker.async_read(w, [t], pieces))
                w.tracker.async_write(w, t, agent, cells)
            w.pending.issue(operation)

    return step
