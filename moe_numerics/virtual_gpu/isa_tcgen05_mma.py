"""`tcgen05.mma`: products of whole tiles, plain and block-scaled (PTX ISA 9.7.16.10).

The arithmetic is `moe_numerics.reference.tensor_core`. Layouts of accumulators and block scales are those that
CUTLASS's kernels use; no silicon was involved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from moe_numerics.reference import tensor_core

from . import ptx
from .asynchronous import Operation
from .errors import Fault
from .isa_tcgen05 import GROUP, SM100, blocks_of, queue, tensor_address
from .isa_wgmma import operand, shared_operand
from .lowering import Lowering
from .memory import Array
from .registry import Index, Modifiers, Step, instruction
from .tensor_memory_layout import Descriptor, check_bounds, pieces, read_tile, tcgen05_descriptor


@dataclass(frozen=True)
class Product:
    """What a `tcgen05.mma` multiplies, from its instruction descriptor (PTX ISA 9.7.16.4.2)."""

    rows: int
    columns: int
    a: str
    b: str
    half: bool
    negate_a: bool
    negate_b: bool
    transpose_a: bool
    transpose_b: bool
    model: str
    block: int
    scale_id_a: int
    scale_id_b: int

    @property
    def spread(self) -> bool:
        """Whether 16 elements take 16 bytes whatever their width, as in kinds that mix 8-, 6- and 4-bit formats."""
        return "f8f6f4" in self.model


_F8F6F4 = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}
_CODE_BITS = {"e4m3": 8, "e5m2": 8, "e2m3": 6, "e3m2": 6, "e2m1": 4}
# In the kinds of E2M1 alone two codes are packed in a byte.
ELEMENT_BYTES = {"bf16": 2, "f16": 2, "tf32": 4, **dict.fromkeys(_CODE_BITS, 1)}


def product(kind: str, scaled: bool, bits: int, block: int, thread: int) -> Product:
    """Decodes an instruction descriptor. Raises Fault for what is not modelled."""

    def field(low: int, width: int) -> int:
        return bits >> low & ((1 << width) - 1)

    columns = field(17, 6) * 8
    a, b = field(7, 3), field(10, 3)
    if field(2, 1) or (not scaled and field(3, 1)):
        raise Fault(
            "descriptor", f"instruction descriptor {bits:#010x}: sparsity and saturation are not modelled", thread
        )
    if kind in ("mxf8f6f4", "f8f6f4"):
        if a not in _F8F6F4 or b not in _F8F6F4:
            raise Fault("descriptor", f"instruction descriptor {bits:#010x}: operand types {a} and {b}", thread)
        a_name, b_name = _F8F6F4[a], _F8F6F4[b]
        for name, transposed in ((a_name, field(15, 1)), (b_name, field(16, 1))):
            if transposed and _CODE_BITS[name] < 8:
                raise Fault(
                    "descriptor", f"instruction descriptor {bits:#010x}: MN-major {name} is not modelled", thread
                )
    elif kind in ("mxf4", "mxf4nvf4"):
        a_name = b_name = "e2m1"
        if field(15, 2):
            raise Fault("descriptor", f"instruction descriptor {bits:#010x}: {kind} has no transposed operands", thread)
    elif kind == "tf32":
        a_name = b_name = "tf32"
    else:
        names = {0: "f16", 1: "bf16"}
        if a not in names or b not in names or a != b:
            raise Fault("descriptor", f"instruction descriptor {bits:#010x}: operand types {a} and {b}", thread)
        a_name, b_name = names[a], names[b]
    half = not scaled and field(4, 2) == 0
    if scaled:
        rows = field(27, 2) * 128
        ue8m0 = bool(field(23, 1))
        if kind == "mxf8f6f4":
            model, size = "sm_100.mxf8f6f4", 32
        elif kind == "mxf4" or (ue8m0 and block == 32):
            model, size = "sm_100.mxf4", 32
        else:
            model, size = ("sm_100.mxf4nvf4_e8m0" if ue8m0 else "sm_100.mxf4nvf4"), 16
        return Product(
            rows, columns, a_name, b_name, False, bool(field(13, 1)), bool(field(14, 1)), bool(field(15, 1)),
            bool(field(16, 1)), model, size, field(29, 2), field(4, 2),
        )  # fmt: skip
    model = {"f16": f"sm_100.{a_name}", "tf32": "sm_100.tf32", "f8f6f4": "sm_100.f8f6f4"}[kind]
    return Product(
        field(24, 5) * 16, columns, a_name, b_name, half, bool(field(13, 1)), bool(field(14, 1)), bool(field(15, 1)),
        bool(field(16, 1)), f"{model}_f16acc" if half else model, 0, 0, 0,
    )  # fmt: skip


def accumulator(p: Product, paired: bool) -> tuple[Array, Array, int]:
    """Lane and column of accumulator element [row, column] of one block, and the block's rows."""
    rows = p.rows // 2 if paired else p.rows
    r, c = np.arange(rows)[:, None], np.arange(p.columns)[None, :]
    if rows == 128:
        return r + 0 * c, c + 0 * r, rows
    if rows != 64:
        raise Fault("descriptor", f"M = {p.rows} is no shape of tcgen05.mma")
    if paired:
        half = p.columns // 2
        return r + 64 * (c >= half), c % half + 0 * r, rows
    return r // 16 * 32 + r % 16 + 0 * c, c + 0 * r, rows


def _tile(
    w: Any, block: int, described: Descriptor, rows: int, kind: str, transposed: bool, spread: bool, thread: int
) -> Array:
    raw = read_tile(w, block, pieces(described, rows, 32, transposed, ELEMENT_BYTES[kind]), thread)
    if spread and _CODE_BITS[kind] < 8:
        return _gathered(raw.reshape(rows, -1, 16), _CODE_BITS[kind])
    return shared_operand(raw, kind, transposed)


def _gathered(groups: Array, width: int) -> Array:
    """Codes [rows, 16 * groups], one a byte, from groups of 16 bytes that begin with 16 packed codes."""
    packed = np.unpackbits(groups[..., : 2 * width], axis=-1, bitorder="little")
    bits = packed.reshape(groups.shape[0], -1, width).astype(np.uint8)
    return np.asarray((bits << np.arange(width, dtype=np.uint8)).sum(axis=-1), np.uint8)


def _scales(w: Any, block: int, address: int, rows: int, p: Product, identity: int, thread: int) -> Array:
    """Scale codes [rows, scales of one instruction] from tensor memory."""
    column = address & 0xFFFF
    r = np.arange(rows)
    words = w.tensor_memory.words[block, r % 32, column + r // 32]
    w.tensor_memory.check_written(block, r % 32, column + r // 32, thread)
    codes = words[:, None].view(np.uint8).reshape(rows, 4)
    if p.model == "sm_100.mxf8f6f4":
        return codes[:, identity : identity + 1]
    if p.block == 32:
        return codes[:, 2 * (identity // 2) : 2 * (identity // 2) + 2]
    return codes


def _codes(raw: Array, kind: str, spread: bool) -> torch.Tensor:
    """Operand values or codes, one each: packed 4-bit codes are taken apart."""
    if spread or kind != "e2m1":
        return operand(kind, raw)
    both = np.stack((raw & 15, raw >> 4), axis=-1)
    return torch.from_numpy(np.ascontiguousarray(both.reshape(*raw.shape[:-1], -1)))


@dataclass
class Chain:
    """Identity of a product for chaining: later ones onto the same accumulator add to it."""

    product: Product
    target: int
    blocks: tuple[int, ...]
    adds: bool


def _mma(b: Lowering, m: Modifiers, kind: str, scaled: bool, block_size: int) -> Step:
    target = b.full(tensor_address(b, b.operands[0]))
    a_operand = b.operands[1]
    from_tensor = isinstance(a_operand, ptx.Address)
    a_read = b.full(tensor_address(b, a_operand)) if from_tensor else b.full(b.read(a_operand, "b64"))
    b_read = b.full(b.read(b.operands[2], "b64"))
    descriptor = b.full(b.read(b.operands[3], "b32"))
    rest = list(b.operands[4:])
    scale_reads: list[Any] = []
    masks: list[Any] = []
    if scaled:
        scale_reads = [b.full(tensor_address(b, o)) for o in rest[:2]]
        rest = rest[2:]
    if rest and isinstance(rest[0], ptx.Vector):
        masks = [b.full(b.read(o, "b32")) for o in rest[0].items]
        rest = rest[1:]
    if len(rest) != 1:
        raise b.fail(f"`{b.ins.name}`: scaling of the accumulator is not modelled")
    adds = b.full(b.read(rest[0], "pred"))
    paired = m.group == "cta_group::2"

    def step(w: Any, i: Index) -> None:
        threads = w.index(i)
        columns = [r(w, i) for r in (target, a_read, b_read, descriptor, adds)]
        scales = [r(w, i) for r in scale_reads]
        off = [r(w, i) for r in masks]
        for k, t in enumerate(threads.tolist()):
            d, a_bits, b_bits, bits = (int(c[k]) for c in columns[:4])
            p = product(kind, scaled, bits, block_size, t)
            _issue(
                w, b.ins, t, p, d, a_bits, b_bits, from_tensor, bool(columns[4][k]), tuple(int(s[k]) for s in scales),
                [int(o[k]) for o in off], blocks_of(w, t, m.group), paired,
            )  # fmt: skip

    return step


def _issue(
    w: Any, ins: ptx.Instruction, thread: int, p: Product, target: int, a_bits: int, b_bits: int, from_tensor: bool,
    adds: bool, scales: tuple[int, ...], off: list[int], blocks: list[int], paired: bool,
) -> None:  # fmt: skip
    lane, column, rows = accumulator(p, paired)
    start = target & 0xFFFF
    width = int(column.max()) + 1
    for block in blocks:
        w.tensor_memory.check(block, 0, 128, start, width, thread)
    a_tile = None if from_tensor else tcgen05_descriptor(a_bits)
    b_tile = tcgen05_descriptor(b_bits)
    b_rows = p.columns // len(blocks)
    earlier = queue(w, thread)

    def read() -> dict[str, Any]:
        for o in earlier:
            if o.chain is None:
                o.finish()
        right = np.concatenate(
            [_tile(w, block, b_tile, b_rows, p.b, p.transpose_b, p.spread, thread) for block in blocks]
        )
        left = []
        for block in blocks:
            if a_tile is not None:
                left.append(_tile(w, block, a_tile, rows, p.a, p.transpose_a, p.spread, thread))
                continue
            if p.spread and _CODE_BITS[p.a] < 8:
                raise Fault("descriptor", f"operand A of {p.a} in tensor memory is not modelled", thread)
            for o in earlier:
                o.finish()
            at = a_bits & 0xFFFF
            w.tensor_memory.check_written(block, slice(0, rows), slice(at, at + 8), thread)
            left.append(np.ascontiguousarray(w.tensor_memory.words[block, :rows, at : at + 8]).view(np.uint8))
        taken: dict[str, Any] = {"a": left, "b": right}
        if scales:
            taken["sa"] = [_scales(w, block, scales[0], rows, p, p.scale_id_a, thread) for block in blocks]
            taken["sb"] = [_scales(w, block, scales[1], p.columns, p, p.scale_id_b, thread) for block in blocks]
        return taken

    def write(taken: dict[str, Any]) -> None:
        steps = [taken]
        first = adds
        for o in reversed(earlier):
            if o.finished:
                continue
            same = o.chain is not None and first and not any(off)
            same = same and (o.chain.product, o.chain.target, o.chain.blocks) == (p, target, tuple(blocks))
            if not same:
                o.finish()
                continue
            o.take()
            o.finished = True
            steps.insert(0, o.taken)
            first = o.chain.adds
        for n, block in enumerate(blocks):
            words = w.tensor_memory.words[block]
            where = (lane, column + start)
            before = None
            if first:
                w.tensor_memory.check_written(block, *where, thread)
                before = words[where]
            result = _multiply(p, steps, n, before)
            if any(off):
                mask = np.array([off[4 * n + q] >> b & 1 for q in range(4) for b in range(32)], bool)
                result = np.where(mask[lane], words[where], result)
            words[where] = result
            w.tensor_memory.written[block, lane, column + start] = True

    operation = Operation(read, write, ins)
    operation.chain = Chain(p, target, tuple(blocks), adds)
    if w.tracker is not None:
        span = np.arange(start, start + width)
        for block in blocks:
            sides = (a_tile, rows, p.transpose_a, p.a), (b_tile, b_rows, p.transpose_b, p.b)
            for described, count, transposed, kind in sides:
                if described is not None:
                    where = pieces(described, count, 32, transposed, ELEMENT_BYTES[kind]).reshape(-1)
                    check_bounds(w, where, thread)
                    where = where + block * w.shared_stride
                    operation.done.append(w.tracker.async_read(w, [thread], where, described.swizzle))
            operation.done.append(w.tracker.tensor_product(w, thread, block, span))
    w.tensor_queues[thread].append(operation)
    w.tensor_uncommitted.setdefault(thread, []).append(operation)
    w.pending.issue(operation, "product")


def _negated(x: torch.Tensor, kind: str, negate: bool) -> torch.Tensor:
    if not negate:
        return x
    return x ^ (1 << (_CODE_BITS[kind] - 1)) if kind in _CODE_BITS else -x


def _multiply(p: Product, steps: list[dict[str, Any]], n: int, before: Array | None) -> Array:
    """The accumulator words of one block after the products of `steps` in order."""
    a = _negated(_codes(np.concatenate([s["a"][n] for s in steps], axis=-1), p.a, p.spread), p.a, p.negate_a)
    b = _negated(_codes(np.concatenate([s["b"] for s in steps], axis=-1), p.b, p.spread), p.b, p.negate_b)
    c = None
    if before is not None:
        c = torch.from_numpy(before.astype(np.uint16).view(np.float16) if p.half else before.view(np.float32))
    named = p.a in _CODE_BITS
    extra: dict[str, Any] = {}
    if "sa" in steps[0]:
        extra = {
            "scales_a": torch.from_numpy(np.ascontiguousarray(np.concatenate([s["sa"][n] for s in steps], axis=-1))),
            "scales_b": torch.from_numpy(np.ascontiguousarray(np.concatenate([s["sb"][n] for s in steps], axis=-1))),
        }
    result = tensor_core.accumulate(
        a, b, c, p.model, a_format=p.a if named else None, b_format=p.b if named else None, **extra
    ).numpy()
    return result.view(np.uint16).astype(np.uint32) if p.half else result.view(np.uint32)


_REUSE = "reuse?=collector::a::fill|collector::a::use|collector::a::lastuse|collector::a::discard"


@instruction(f"tcgen05 .mma {GROUP} kind=kind::f16|kind::tf32|kind::f8f6f4 {_REUSE}", features=SM100,
             evidence="third party")  # fmt: skip
def mma(b: Lowering, m: Modifiers) -> Step:
    return _mma(b, m, m.kind.removeprefix("kind::"), False, 0)


@instruction(f"tcgen05 .mma {GROUP} kind=kind::mxf8f6f4|kind::mxf4|kind::mxf4nvf4 .block_scale "
             f"size?=block16|block32|scale_vec::1X|scale_vec::2X|scale_vec::4X {_REUSE}", features=SM100,
             evidence="third party")  # fmt: skip
def mma_scaled(b: Lowering, m: Modifiers) -> Step:
    if m.kind == "kind::mxf4nvf4" and m.size is None:
        raise b.fail(f"`{b.ins.name}` needs the size of its blocks, such as .block16")
    sizes = {"block16": 16, "scale_vec::4X": 16, "block32": 32, "scale_vec::1X": 32, "scale_vec::2X": 32}
    return _mma(b, m, m.kind.removeprefix("kind::"), True, sizes.get(m.size, 0))
