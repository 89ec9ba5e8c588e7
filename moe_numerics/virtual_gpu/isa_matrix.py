"""`ldmatrix`, `stmatrix`, `movmatrix` and the warp-wide `mma.sync` (PTX ISA 9.7.14)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from moe_numerics.reference import tensor_core

from . import memory
from .errors import Fault
from .isa_wgmma import operand
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


_MMA_K = {"bf16": (8, 16), "f16": (8, 16), "tf32": (4, 8), "e4m3": (32,), "e5m2": (32,)}
_ELEMENT = {"bf16": 16, "f16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8}


def _a_fragment(registers: list[Array], depth: int, bits: int) -> Array:
    """Rows [warps, 16, K bytes] of A: registers alternate rows (8 apart), then K by 16 bytes' worth of lanes."""
    each = 32 // bits
    warps = registers[0].size // 32
    lane = np.arange(32)
    out = np.zeros((warps, 16, depth * bits // 8), np.uint8)
    for r, values in enumerate(registers):
        raw = np.ascontiguousarray(values).view(np.uint8).reshape(warps, 32, 4)
        first = (each * (lane % 4) + (r // 2) * 4 * each) * bits // 8
        for k in range(4):
            out[:, lane // 4 + 8 * (r % 2), first + k] = raw[:, :, k]
    return out


def _b_fragment(registers: list[Array], depth: int, bits: int) -> Array:
    """Columns [warps, 8, K bytes] of B."""
    each = 32 // bits
    warps = registers[0].size // 32
    lane = np.arange(32)
    out = np.zeros((warps, 8, depth * bits // 8), np.uint8)
    for r, values in enumerate(registers):
        raw = np.ascontiguousarray(values).view(np.uint8).reshape(warps, 32, 4)
        first = (each * (lane % 4) + r * 4 * each) * bits // 8
        for k in range(4):
            out[:, lane // 4, first + k] = raw[:, :, k]
    return out


@instruction("mma .sync .aligned shape=m16n8k4|m16n8k8|m16n8k16|m16n8k32 .row .col d=f32|f16 a=bf16|f16|tf32|e4m3|e5m2 "
             "b=bf16|f16|tf32|e4m3|e5m2 c=f32|f16", kind="sync", evidence="third party")  # fmt: skip
def mma(b: Lowering, m: Modifiers) -> Step:
    """One warp's product. FP8 on this unit is not the warpgroup's; its accumulation is not modelled."""
    depth = int(m.shape[6:])
    if depth not in _MMA_K[m.a] or m.d != m.c:
        raise b.fail(f"`{b.ins.name}` is no shape that is modelled")
    if m.a in ("e4m3", "e5m2"):
        raise b.fail(f"`{b.ins.name}`: how mma.sync accumulates FP8 on {b.program.arch} is not known")
    model = f"sm_90.{m.a}" + ("_f16acc" if m.d == "f16" else "")
    if b.program.arch == "sm_100a":
        model = model.replace("sm_90", "sm_100")
    bits = _ELEMENT[m.a]
    b.sync_mask = lambda w, i: _EVERY_LANE
    kind = "b32"
    writes = [b.write(o, kind) for o in b.items(b.operands[0])]
    a_reads, b_reads, c_reads = ([b.full(b.read(o, kind)) for o in b.items(b.operands[n])] for n in (1, 2, 3))
    lane = np.arange(32)[:, None]
    element = np.arange(4)[None, :]
    row, column = lane // 4 + 8 * (element // 2), 2 * (lane % 4) + element % 2
    dtype = np.float16 if m.d == "f16" else np.float32

    def step(w: Any, i: Index) -> None:
        left = operand(m.a, _a_fragment([r(w, i) for r in a_reads], depth, bits))
        right = operand(m.b, _b_fragment([r(w, i) for r in b_reads], depth, bits))
        words = np.stack([r(w, i) for r in c_reads], axis=1)
        warps = words.shape[0] // 32
        start = np.zeros((warps, 16, 8), dtype)
        start[:, row, column] = np.ascontiguousarray(words).view(dtype).reshape(warps, 32, 4)
        result = tensor_core.accumulate(left, right, torch.from_numpy(start), model).numpy()
        out = np.ascontiguousarray(result[:, row, column].reshape(warps * 32, 4)).view(np.uint32)
        for n, write in enumerate(writes):
            write(w, i, np.ascontiguousarray(out[:, n]))

    return step
