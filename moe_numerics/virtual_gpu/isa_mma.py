"""`mma.sync`: the product of one warp, operands and accumulators in registers (PTX ISA 9.7.14.5).

bf16, f16 and tf32 are one step of `moe_numerics.reference.tensor_core`. Hopper and Blackwell have no FP8 unit behind
`mma.sync`: ptxas (CUDA 13.0, sm_90a and sm_100a) converts the codes to f16 and gives two products of half the depth in
a chain that begins at +0, then one addition of the accumulator. Integers are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from moe_numerics.reference import tensor_core

from .isa_wgmma import operand
from .lowering import Lowering
from .memory import Array
from .narrow import FORMATS, decode
from .registry import Index, Modifiers, Step, instruction

_EVERY_LANE = np.uint32(0xFFFFFFFF)
_DEPTHS = {"bf16": (8, 16), "f16": (8, 16), "tf32": (4, 8), "e4m3": (16, 32), "e5m2": (16, 32)}
_ELEMENT = {"bf16": 16, "f16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}
_FP8 = ("e4m3", "e5m2")
_CANONICAL: dict[Any, Any] = {np.dtype(np.float32): np.uint32(0x7FFFFFFF), np.dtype(np.float16): np.uint16(0x7FFF)}

Product = Callable[[Array, Array, Array], Array]


def _a_fragment(registers: list[Array], depth: int, bits: int) -> Array:
    """Rows [warps, 16, K bytes] of A: registers alternate rows (8 apart), then K by 16 bytes' worth of lanes."""
    return _fragment(registers, depth, bits, 2)


def _b_fragment(registers: list[Array], depth: int, bits: int) -> Array:
    """Columns [warps, 8, K bytes] of B."""
    return _fragment(registers, depth, bits, 1)


def _fragment(registers: list[Array], depth: int, bits: int, halves: int) -> Array:
    each = 32 // bits
    warps = registers[0].size // 32
    lane = np.arange(32)
    out = np.zeros((warps, 8 * halves, depth * bits // 8), np.uint8)
    for r, values in enumerate(registers):
        raw = np.ascontiguousarray(values).view(np.uint8).reshape(warps, 32, 4)
        first = (each * (lane % 4) + (r // halves) * 4 * each) * bits // 8
        for k in range(4):
            out[:, lane // 4 + 8 * (r % halves), first + k] = raw[:, :, k]
    return out


def _float_product(a: str, b: str, model: str) -> Product:
    def multiply(left: Array, right: Array, start: Array) -> Array:
        result = tensor_core.accumulate(operand(a, left), operand(b, right), torch.from_numpy(start), model)
        return result.numpy()

    return multiply


def _fp8_product(a: str, b: str, model: str) -> Product:
    """The first chain link has the lower two codes of every register, the second the upper two."""

    def halves(raw: Array, kind: str) -> list[torch.Tensor]:
        values = decode(raw, FORMATS[kind]).astype(np.float16)
        quads = values.reshape(*raw.shape[:-1], -1, 4)
        return [torch.from_numpy(quads[..., s].reshape(*raw.shape[:-1], -1)) for s in (slice(0, 2), slice(2, 4))]

    def multiply(left: Array, right: Array, start: Array) -> Array:
        chain = None
        for x, y in zip(halves(left, a), halves(right, b), strict=True):
            chain = tensor_core.accumulate(x, y, chain, model)
        assert chain is not None
        total = start + chain.numpy()
        bits = total.view(_CANONICAL[total.dtype].dtype)
        return np.where(np.isnan(total), _CANONICAL[total.dtype], bits).view(total.dtype)

    return multiply


def _integer_product(a: str, b: str, saturates: bool) -> Product:
    kinds = {"s8": np.int8, "u8": np.uint8}

    def multiply(left: Array, right: Array, start: Array) -> Array:
        x, y = left.view(kinds[a]).astype(np.int64), right.view(kinds[b]).astype(np.int64)
        total = np.einsum("wmk,wnk->wmn", x, y) + start
        if saturates:
            total = np.clip(total, -(1 << 31), (1 << 31) - 1)
        return total.astype(np.int32)

    return multiply


def _warp_product(b: Lowering, depth: int, kind: str, rows: int, dtype: Any, multiply: Product) -> Step:
    """The step of an instruction `mma d, a, b, c` on [rows, depth] by [depth, 8]."""
    b.sync_mask = lambda w, i: _EVERY_LANE
    bits = _ELEMENT[kind]
    elements = rows * 8 // 32
    results = elements * np.dtype(dtype).itemsize // 4
    wanted = (results, rows * depth * bits // 1024, 8 * depth * bits // 1024, results)
    groups = [b.items(o) for o in b.operands]
    for group, count in zip(groups, wanted, strict=False):
        if len(group) != count:
            raise b.fail(f"`{b.ins.name}` needs {count} registers where {len(group)} are given")
    if len(groups) != 4:
        raise b.fail(f"`{b.ins.name}` takes 4 operands, found {len(groups)}")
    writes = [b.write(o, "b32") for o in groups[0]]
    a_reads, b_reads, c_reads = ([b.full(b.read(o, "b32")) for o in group] for group in groups[1:])
    lane = np.arange(32)[:, None]
    element = np.arange(elements)[None, :]
    row, column = lane // 4 + 8 * (element // 2), 2 * (lane % 4) + element % 2

    def step(w: Any, i: Index) -> None:
        left = _a_fragment([r(w, i) for r in a_reads], depth, bits)
        right = _b_fragment([r(w, i) for r in b_reads], depth, bits)
        words = np.stack([r(w, i) for r in c_reads], axis=1)
        warps = words.shape[0] // 32
        start = np.zeros((warps, 16, 8), dtype)
        start[:, row, column] = np.ascontiguousarray(words).view(dtype).reshape(warps, 32, elements)
        result = multiply(left, right, start)
        out = np.ascontiguousarray(result[:, row, column].reshape(warps * 32, elements)).view(np.uint32)
        for n, write in enumerate(writes):
            write(w, i, np.ascontiguousarray(out[:, n]))

    return step


@instruction("mma .sync .aligned shape=m16n8k4|m16n8k8|m16n8k16|m16n8k32 .row .col d=f32|f16 a=bf16|f16|tf32|e4m3|e5m2 "
             "b=bf16|f16|tf32|e4m3|e5m2 c=f32|f16", kind="sync", evidence="third party")  # fmt: skip
def mma(b: Lowering, m: Modifiers) -> Step:
    depth = int(m.shape[6:])
    mixed = m.a != m.b and not (m.a in _FP8 and m.b in _FP8)
    if depth not in _DEPTHS[m.a] or m.d != m.c or mixed or (m.d == "f16" and m.a in ("bf16", "tf32")):
        raise b.fail(f"`{b.ins.name}` is no combination of shape and types that PTX has")
    arch = "sm_100" if b.program.arch == "sm_100a" else "sm_90"
    fp8 = m.a in _FP8
    model = f"{arch}.{'f16' if fp8 else m.a}" + ("_f16acc" if m.d == "f16" else "")
    multiply = (_fp8_product if fp8 else _float_product)(m.a, m.b, model)
    return _warp_product(b, depth, m.a, 16, np.float16 if m.d == "f16" else np.float32, multiply)


@instruction("mma .sync .aligned shape=m8n8k16|m16n8k16|m16n8k32 .row .col .satfinite? .s32 a=s8|u8 b=s8|u8 c=s32",
             kind="sync")  # fmt: skip
def mma_integer(b: Lowering, m: Modifiers) -> Step:
    rows, depth = (8, 16) if m.shape == "m8n8k16" else (16, int(m.shape[6:]))
    return _warp_product(b, depth, m.a, rows, np.int32, _integer_product(m.a, m.b, bool(m.satfinite)))
