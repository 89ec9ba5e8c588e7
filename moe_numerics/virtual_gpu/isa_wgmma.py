"""`wgmma`: warpgroup matrix products (PTX ISA 9.7.15). The arithmetic is `moe_numerics.reference.tensor_core`.

Each warp multiplies its own 16 rows, so that a random schedule can let the warps of a warpgroup drift apart. Operands
in shared memory are read when the operation happens, which is between its issue and the wait for its group.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from moe_numerics.reference import tensor_core

from . import ptx
from .asynchronous import Operation
from .errors import Fault
from .lowering import Lowering
from .memory import Array
from .registry import Index, Modifiers, Step, instruction
from .tensor_memory_layout import check_range, pieces, read_tile, wgmma_descriptor

_EVERY_LANE = np.uint32(0xFFFFFFFF)
_BITS = {"bf16": 16, "f16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8}
_TYPES = "|".join(_BITS)
_SHAPES = "|".join(f"m64n{n}k{k}" for k in (8, 16, 32) for n in range(8, 257, 8))


@dataclass(frozen=True)
class Shape:
    """What one instruction multiplies: [64, depth] by [depth, columns]."""

    columns: int
    depth: int
    a: str
    b: str
    result: str


@dataclass
class Chain:
    """What products have to share to be done as one, and how one of them goes on from those before it.

    kind: shape, signs and registers. keep: which warps add to their accumulators. threads: the fragment.
    before: earlier products onto the same registers, oldest first.
    """

    kind: tuple[Any, ...]
    keep: Array
    threads: Index
    before: list[Operation]


def linked(operation: Operation) -> tuple[list[Operation], list[Operation]]:
    """The products that `operation` adds to and that can be done with it as one with a longer K, itself last.

    Then the products before these.
    """
    links, before = [operation], operation.chain.before
    left = len(before)
    while left and links[0].chain.keep.all():
        earlier = before[left - 1]
        if earlier.finished or earlier.warps != operation.warps or earlier.chain.kind != operation.chain.kind:
            break
        links.insert(0, earlier)
        left -= 1
    return links, before[:left]


def alike(links: list[Operation], flying: list[Operation]) -> list[list[Operation]]:
    """Chains of the same instructions in other warps whose operands are taken: their results come along unseen."""
    found, warps = [], set(links[-1].warps)
    for operation in flying:
        if operation.finished or operation.instruction is not links[-1].instruction or operation.warps & warps:
            continue
        others, before = linked(operation)
        same = [o.instruction for o in others] == [o.instruction for o in links]
        if same and all(o.has_read for o in others) and all(o.finished for o in before):
            found.append(others)
            warps |= operation.warps
    return found


def operand(kind: str, raw: Array) -> torch.Tensor:
    """Bytes [..., bytes] as a tensor of operand values or codes."""
    contiguous = torch.from_numpy(np.ascontiguousarray(raw))
    if kind in ("bf16", "f16"):
        return contiguous.view(torch.bfloat16 if kind == "bf16" else torch.float16)
    return contiguous.view(torch.float32) if kind == "tf32" else contiguous


def shared_operand(raw: Array, kind: str, transposed: bool) -> Array:
    """Bytes [rows, K bytes] of a tile's pieces [rows, K pieces, 16] or, transposed, [K, row pieces, 16]."""
    if not transposed:
        return raw.reshape(raw.shape[0], -1)
    elements = raw.reshape(raw.shape[0], -1).view(f"u{_BITS[kind] // 8}")
    return np.ascontiguousarray(elements.T).view(np.uint8)


def _model(shape: Shape) -> str:
    base = f"sm_90.{'e4m3' if shape.a in ('e4m3', 'e5m2') else shape.a}"
    return f"{base}_f16acc" if shape.result == "f16" else base


def fragment(columns: int) -> tuple[Array, Array]:
    """Row and column [32, columns / 2] of each lane's float32 accumulators in its warp's 16 rows."""
    d = np.arange(columns // 2)[None, :]
    lane = np.arange(32)[:, None]
    return lane // 4 + 8 * (d // 2 % 2), 8 * (d // 4) + 2 * (lane % 4) + d % 2


def _register_a(shape: Shape, registers: list[Array]) -> Array:
    """Rows [warps * 16, K bytes] of operand A from four registers of each lane, threads in order."""
    each = 32 // _BITS[shape.a]
    warps = registers[0].size // 32
    lane = np.arange(32)
    out = np.zeros((warps, 16, shape.depth * _BITS[shape.a] // 8), np.uint8)
    for r, values in enumerate(registers):
        raw = np.ascontiguousarray(values).view(np.uint8).reshape(warps, 32, 4)
        row = lane // 4 + 8 * (r % 2)
        first = (each * (lane % 4) + (r // 2) * (shape.depth // 2)) * _BITS[shape.a] // 8
        for k in range(4):
            out[:, row, first + k] = raw[:, :, k]
    return out.reshape(warps * 16, -1)


@instruction(
    f"wgmma .mma_async .sync .aligned shape={_SHAPES} result=f32|f16 a={_TYPES} b={_TYPES}",
    kind="sync",
    features=("sm_90a",),
    evidence="silicon",
)
def mma(b: Lowering, m: Modifiers) -> Step:
    numbers = m.shape[4:].split("k")
    shape = Shape(int(numbers[0]), int(numbers[1]), m.a, m.b, m.result)
    if shape.depth * _BITS[shape.a] != 256 or (_BITS[shape.a] > 8 and shape.a != shape.b):
        raise b.fail(f"`{b.ins.name}` is no shape that wgmma has")
    b.sync_mask = lambda w, i: _EVERY_LANE
    targets = b.items(b.operands[0])
    wanted = shape.columns // (2 if shape.result == "f32" else 4)
    if len(targets) != wanted:
        raise b.fail(f"`{b.ins.name}` needs {wanted} accumulator registers, found {len(targets)}")
    for target in targets:
        b.write(target, "b32")
    numbers_of = [t.index for t in targets if isinstance(t, ptx.Reg)]
    if len(numbers_of) != wanted:
        raise b.fail(f"`{b.ins.name}` needs registers as accumulators")
    registers = frozenset(numbers_of)
    b.in_flight(numbers_of)
    from_registers = isinstance(b.operands[1], ptx.Vector)
    a_registers = [b.full(b.read(r, "b32")) for r in b.items(b.operands[1])] if from_registers else []
    a_read = None if from_registers else b.full(b.read(b.operands[1], "b64"))
    b_read = b.full(b.read(b.operands[2], "b64"))
    scale_d = b.read(b.operands[3], "pred")
    scales = [int(o.value) for o in b.operands[4:] if isinstance(o, ptx.Imm)]
    negate_a, negate_b = scales[0] == -1, scales[1] == -1
    kind = (shape, negate_a, negate_b, registers)
    rest = scales[2:]
    transpose_a = bool(rest[0]) if not from_registers and len(rest) == 2 else False
    transpose_b = bool(rest[-1]) if rest else False
    row, column = fragment(shape.columns)

    def step(w: Any, i: Index) -> None:
        threads = w.index(i)
        warps = threads[::32] // 32 if w.per_block % 32 == 0 else w.warp[threads[::32]]
        count = warps.size
        if threads.size != count * 32:
            raise Fault("warp_mask", "wgmma needs all lanes of its warps", int(threads[0]))
        keep = np.broadcast_to(scale_d(w, i), threads.shape)[::32]
        b_bits = b_read(w, i)[::32]
        a_bits = None if a_read is None else a_read(w, i)[::32]
        a_values = [r(w, i) for r in a_registers]
        start = [int(v) for v in threads[::32]]

        def read() -> list[tuple[Array, Array]]:
            found = []
            cache: dict[tuple[int, int, int], Array] = {}
            for n in range(count):
                block = int(w.block[start[n]])
                quarter = (start[n] % w.per_block) // 32 % 4
                if a_bits is None:
                    a = _register_a(shape, [v[32 * n : 32 * n + 32] for v in a_values])
                else:
                    a = tile(cache, block, int(a_bits[n]), 64, start[n])[16 * quarter : 16 * quarter + 16]
                found.append((a, tile(cache, block, int(b_bits[n]), shape.columns, start[n])))
            return found

        def tile(cache: dict[tuple[int, int, int], Array], block: int, bits: int, rows: int, thread: int) -> Array:
            key = (block, bits, rows)
            if key not in cache:
                left = rows == 64 and a_bits is not None and bits in set(a_bits.tolist())
                transposed = transpose_a if left else transpose_b
                raw = read_tile(w, block, _pieces(bits, rows, transposed), thread)
                cache[key] = shared_operand(raw, shape.a if left else shape.b, transposed)
            return cache[key]

        def write(tiles: list[tuple[Array, Array]]) -> None:
            links, before = linked(operation)
            for earlier in before:
                earlier.finish()
            chains = [links] if w.ahead is None else [links, *alike(links, w.in_flight[registers])]
            joined = i if len(chains) == 1 else np.concatenate([c[-1].chain.threads for c in chains])
            keep = np.concatenate([c[0].chain.keep for c in chains])
            taken: list[list[tuple[Array, Array]]] = [[] for _ in links]
            for c in chains:
                for step, link in zip(taken, c, strict=True):
                    link.take()
                    step += link.taken
                    link.finished = True
                    link.taken = None
            start = w.read_words(numbers_of, joined) if keep.any() else None
            out = _multiply(shape, taken, start, keep, negate_a, negate_b, row, column)
            w.write_words(numbers_of, joined, out)

        operation = Operation(read, write, b.ins)
        _note_reads(w, shape, threads, a_bits, b_bits, transpose_a, transpose_b, operation.done)
        w.wgmma_groups.add(threads[::32], operation)
        operation.warps = frozenset(w.warp[threads[::32]].tolist())
        # Products onto the same accumulators happen in their order of issue.
        operation.chain = Chain(kind, keep, i, w.earlier(registers, operation.warps))
        w.take_off(registers, operation)
        w.pending.issue(operation, "registers")

    return step


def _note_reads(
    w: Any, shape: Shape, threads: Array, a_bits: Array | None, b_bits: Array, transpose_a: bool, transpose_b: bool,
    done: list[Any],
) -> None:  # fmt: skip
    """Tells the race checker which shared memory the product reads."""
    if w.tracker is None:
        return
    read: dict[tuple[int, int], list[int]] = {}
    for n, t in enumerate(threads[::32].tolist()):
        block = int(w.block[t])
        read.setdefault((block, int(b_bits[n])), []).append(t)
        if a_bits is not None:
            quarter = (t % w.per_block) // 32 % 4
            where, low, high, swizzle = _covered(int(a_bits[n]), 64, transpose_a, quarter)
            check_range(w, low, high, t)
            done.append(w.tracker.async_read(w, [t], where + block * w.shared_stride, swizzle))
    for (block, bits), readers in read.items():
        where, low, high, swizzle = _covered(bits, shape.columns, transpose_b, None)
        check_range(w, low, high, readers[0])
        done.append(w.tracker.async_read(w, readers, where + block * w.shared_stride, swizzle))


@functools.lru_cache(maxsize=1024)
def _pieces(bits: int, rows: int, transposed: bool) -> Array:
    return pieces(wgmma_descriptor(bits), rows, 32, transposed)


@functools.lru_cache(maxsize=1024)
def _covered(bits: int, rows: int, transposed: bool, quarter: int | None) -> tuple[Array, int, int, int]:
    """The pieces that an operand covers in a block's shared memory, the lowest and highest of them, and its swizzle.

    quarter: a warp's own 16 rows of operand A alone, which are two pieces of eight along M in a transposed tile.
    """
    where = _pieces(bits, rows, transposed)
    low, high = int(where.min()), int(where.max())
    if quarter is not None:
        mine = slice(2 * quarter, 2 * quarter + 2) if transposed else slice(16 * quarter, 16 * quarter + 16)
        where = where[:, mine] if transposed else where[mine]
    return where.reshape(-1), low, high, wgmma_descriptor(bits).swizzle


def _multiply(
    shape: Shape, steps: list[list[tuple[Array, Array]]], before: list[Array] | None, keep: Array, negate_a: bool,
    negate_b: bool, row: Array, column: Array,
) -> list[Array]:  # fmt: skip
    """New accumulator registers of all lanes, register by register, after the products of `steps` in order."""
    count = len(steps[0])
    groups = _sharing(steps)
    order = [n for group in groups for n in group]
    b = operand(shape.b, np.stack([np.concatenate([tiles[g[0]][1] for tiles in steps], axis=-1) for g in groups]))
    left = np.concatenate([np.stack([tiles[n][0] for n in order]) for tiles in steps], axis=-1)
    a = operand(shape.a, left).reshape(len(groups), count // len(groups) * 16, -1)
    a, b = _signed(a, negate_a, shape.a), _signed(b, negate_b, shape.b)
    half = shape.result == "f16"
    start = np.zeros((count, 16, shape.columns), np.float16 if half else np.float32)
    if before is not None:
        start[:, row, column] = _unpack(before, count, half)
        start[~keep] = 0
    c = torch.from_numpy(start[order].reshape(len(groups), -1, shape.columns))
    result = tensor_core.accumulate(
        a, b, c, _model(shape), a_format=shape.a if _BITS[shape.a] == 8 else None,
        b_format=shape.b if _BITS[shape.b] == 8 else None,
    )  # fmt: skip
    lanes = np.empty((count, 32, row.shape[1]), result.numpy().dtype)
    lanes[order] = result.numpy().reshape(count, 16, shape.columns)[:, row, column]
    return list(np.ascontiguousarray(lanes.reshape(count * 32, -1).view(np.uint32).T))


def _sharing(steps: list[list[tuple[Array, Array]]]) -> list[list[int]]:
    """Warps by their operands B: groups of one size, each with the same bytes in all steps."""
    count = len(steps[0])
    tiles: dict[tuple[int, ...], list[int]] = {}
    for n in range(count):
        tiles.setdefault(tuple(id(step[n][1]) for step in steps), []).append(n)
    groups: dict[bytes, list[int]] = {}
    for mine in tiles.values():
        raw = b"".join(step[mine[0]][1].tobytes() for step in steps) if len(tiles) > 1 else b""
        groups.setdefault(raw, []).extend(mine)
    sizes = {len(group) for group in groups.values()}
    return list(groups.values()) if len(sizes) == 1 else [[n] for n in range(count)]


def _unpack(registers: list[Array], count: int, half: bool) -> Array:
    """Accumulator values [warps, 32, elements] from registers."""
    words = np.stack([r.view(np.uint32) for r in registers], axis=1)
    values = np.ascontiguousarray(words).view(np.float16 if half else np.float32)
    return values.reshape(count, 32, -1)


def _signed(x: torch.Tensor, negate: bool, kind: str) -> torch.Tensor:
    if not negate:
        return x
    return x ^ 0x80 if _BITS[kind] == 8 else -x


@instruction("wgmma .fence .sync .aligned", kind="sync", features=("sm_90a",))
def fence(b: Lowering, m: Modifiers) -> Step:
    b.sync_mask = lambda w, i: _EVERY_LANE
    return lambda w, i: None


@instruction("wgmma .commit_group .sync .aligned", kind="sync", features=("sm_90a",))
def commit(b: Lowering, m: Modifiers) -> Step:
    b.sync_mask = lambda w, i: _EVERY_LANE
    return lambda w, i: w.wgmma_groups.commit(w.index(i)[::32])


@instruction("wgmma .wait_group .sync .aligned", kind="sync", features=("sm_90a",))
def wait(b: Lowering, m: Modifiers) -> Step:
    b.sync_mask = lambda w, i: _EVERY_LANE
    keep = b.operands[0]
    if not isinstance(keep, ptx.Imm):
        raise b.fail("wgmma.wait_group needs an immediate")
    count = int(keep.value)

    def step(w: Any, i: Index) -> None:
        threads = w.index(i)
        finished = w.wgmma_groups.due(threads[::32], count)
        # The last product first: it takes those that it adds to along.
        w.pending.force(finished[::-1])
        if finished:
            w.land(finished)
        if w.tracker is not None:
            w.tracker.warp_barrier(w, i, _EVERY_LANE)

    return step
