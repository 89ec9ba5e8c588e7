"""`ldmatrix`, `stmatrix` and `movmatrix`: 8x8 tiles of a warp (PTX ISA 9.7.14)."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import memory
from .errors import Fault
from .lowering import Lowering
from .memory import SHARED_WINDOW, Array
from .registry import Index, Modifiers, Step, instruction

_EVERY_LANE = np.uint32(0xFFFFFFFF)
_COUNT = {"x1": 1, "x2": 2, "x4": 4}
_SPACE = "space?=shared|shared::cta"


def _row_addresses(w: Any, i: Index, address: Array) -> tuple[Array, Array]:
    """For all threads of the wave, the address they gave, and the fragment's threads."""
    threads = w.index(i)
    if address.size and int(address.max()) >= SHARED_WINDOW:
        address = address - np.uint64(SHARED_WINDOW)
    spread = np.zeros(w.threads, np.uint64)
    spread[threads] = address
    return spread, threads


def _at(w: Any, threads: Array, rows: Array, matrix: int, row: Array) -> Array:
    """Address of a row of an 8x8 matrix: lane 8 * matrix + row holds it."""
    return rows[w.warp_base[threads] + 8 * matrix + row]


@instruction(f"stmatrix .sync .aligned .m8n8 num=x1|x2|x4 .trans? {_SPACE} .b16", kind="sync")
def stmatrix(b: Lowering, m: Modifiers) -> Step:
    b.sync_mask = lambda w, i: _EVERY_LANE
    address = b.address(b.operands[0])
    reads = [b.full(b.read(o, "b32")) for o in b.items(b.operands[1])]
    if len(reads) != _COUNT[m.num]:
        raise b.fail(f"`{b.ins.name}` needs {_COUNT[m.num]} registers")

    def step(w: Any, i: Index) -> None:
        rows, threads = _row_addresses(w, i, address(w, i))
        lane = w.lane[threads].astype(np.int64)
        _check_rows(w, threads, rows, len(reads))
        for j, read in enumerate(reads):
            value = read(w, i)
            if not m.trans:
                at = _at(w, threads, rows, j, lane // 4) + (4 * (lane % 4)).astype(np.uint64)
                memory.store(w, i, "shared", at, 4, [value])
                continue
            for k in range(2):
                at = _at(w, threads, rows, j, 2 * (lane % 4) + k) + (2 * (lane // 4)).astype(np.uint64)
                memory.store(w, i, "shared", at, 2, [(value >> np.uint32(16 * k)).astype(np.uint16)])

    return step


def _check_rows(w: Any, threads: Array, rows: Array, count: int) -> None:
    given = threads[w.lane[threads] < 8 * count]
    odd = rows[given] % np.uint64(16) != 0
    if odd.any():
        t = int(given[np.flatnonzero(odd)[0]])
        raise Fault("misaligned", f"matrix row address {int(rows[t]):#x} is not a multiple of 16", t, int(rows[t]))


@instruction(f"ldmatrix .sync .aligned .m8n8 num=x1|x2|x4 .trans? {_SPACE} .b16", kind="sync")
def ldmatrix(b: Lowering, m: Modifiers) -> Step:
    b.sync_mask = lambda w, i: _EVERY_LANE
    writes = [b.write(o, "b32") for o in b.items(b.operands[0])]
    address = b.address(b.operands[1])
    if len(writes) != _COUNT[m.num]:
        raise b.fail(f"`{b.ins.name}` needs {_COUNT[m.num]} registers")

    def step(w: Any, i: Index) -> None:
        rows, threads = _row_addresses(w, i, address(w, i))
        lane = w.lane[threads].astype(np.int64)
        _check_rows(w, threads, rows, len(writes))
        results = []
        for j in range(len(writes)):
            if not m.trans:
                at = _at(w, threads, rows, j, lane // 4) + (4 * (lane % 4)).astype(np.uint64)
                results.append(memory.load(w, i, "shared", at, 4, 1)[0])
                continue
            halves = []
            for k in range(2):
                at = _at(w, threads, rows, j, 2 * (lane % 4) + k) + (2 * (lane // 4)).astype(np.uint64)
                halves.append(memory.load(w, i, "shared", at, 2, 1)[0].astype(np.uint32))
            results.append(halves[0] | halves[1] << np.uint32(16))
        for write, value in zip(writes, results, strict=True):
            write(w, i, value)

    return step


@instruction("movmatrix .sync .aligned .m8n8 .trans .b16", kind="sync")
def movmatrix(b: Lowering, m: Modifiers) -> Step:
    b.sync_mask = lambda w, i: _EVERY_LANE
    read = b.read(b.operands[1], "b32")
    write = b.write(b.operands[0], "b32")

    def step(w: Any, i: Index) -> None:
        threads = w.index(i)
        lane = w.lane[threads].astype(np.int64)
        values = read(w, None)
        out = np.zeros(threads.size, np.uint32)
        for k in range(2):
            row, column = 2 * (lane % 4) + k, lane // 4
            source = values[w.warp_base[threads] + 4 * row + column // 2]
            half = (source >> (16 * (column % 2)).astype(np.uint32)) & np.uint32(0xFFFF)
            out = out | half << np.uint32(16 * k)
        write(w, i, out)

    return step
