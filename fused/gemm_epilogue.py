"""The epilogue of a plain grouped GEMM, and how all epilogues see the accumulators.

A warpgroup has 64 rows of the tile, a warp 16 of them, a thread two: row l / 4 of lane l and the row 8 below. In every
block of 32 columns it holds 8 neighbouring ones, from 8 * (l % 4) on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from moe_numerics.fused.memory import MaybeTensor, load_words, pack_bf16, select, store_words, unpack_bf16

__all__ = [
    "BLOCK",
    "PER_BLOCK",
    "VECTOR",
    "Linear",
    "block_values",
    "drop_blocks",
    "expert_factor",
    "gather_vectors",
    "prefetch_l2",
    "read_vector",
    "scaled",
    "store_vector",
    "thread_place",
]

BLOCK = 32
VECTOR = 8
# Accumulators of a thread in a block: 8 columns of two rows.
PER_BLOCK = 16


def thread_place(thread: Int32) -> tuple[Int32, Int32]:
    """First of a thread's two rows in the tile and its first column in a block."""
    return (thread // 32) * 16 + (thread % 32) // 4, (thread % 4) * VECTOR


def _index(block: int, half: int, column: int) -> int:
    """Accumulator of a column (of 8) of the first or second row."""
    return block * PER_BLOCK + 4 * (column // 2) + 2 * half + column % 2


def block_values(sums: cute.Tensor, block: int, half: int) -> list[Float32]:
    """A thread's 8 neighbouring columns of a block, in the first (`half` 0) or second of its rows."""
    return [sums[_index(block, half, column)] for column in range(VECTOR)]


def gather_vectors(sums: cute.Tensor, lane: Int32) -> None:
    """From accumulators as wgmma spreads them, columns 8 j + 2 q and 8 j + 2 q + 1 in lane q of four, to vectors.

    The four pairs of the four lanes are transposed in two exchanges.
    """
    for block in range(cute.size(sums) // PER_BLOCK):
        for half in range(2):
            for distance in (1, 2):
                upper = (lane & distance) != 0
                for pair in range(4):
                    if pair & distance:
                        continue
                    for place in range(2):
                        low = _index(block, half, 2 * pair + place)
                        high = _index(block, half, 2 * (pair | distance) + place)
                        sent = select(upper, sums[low], sums[high])
                        received = cute.arch.shuffle_sync_bfly(sent, distance)
                        kept = select(upper, sums[high], sums[low])
                        sums[low] = select(upper, received, kept)
                        sums[high] = select(upper, kept, received)


def drop_blocks(sums: cute.Tensor, blocks: int) -> None:
    """Move every accumulator `blocks` blocks down, so that a loop over blocks always works on the first ones.

    Registers cannot be indexed by a loop's counter, and an unrolled epilogue would not fit the instruction cache.
    """
    for index in range(cute.size(sums) - blocks * PER_BLOCK):
        sums[index] = sums[index + blocks * PER_BLOCK]


def read_vector(pointer: cute.Pointer, wide: bool) -> list[Float32]:
    """8 neighbouring values, float32 (`wide`) or bfloat16."""
    if not wide:
        return unpack_bf16(load_words(pointer, 4))
    words = [*load_words(pointer, 4), *load_words(pointer + 4, 4)]
    return [word.bitcast(Float32) for word in words]


def store_vector(pointer: cute.Pointer, values: list[Float32], wide: bool) -> None:
    """Store 8 neighbouring values, as float32 (`wide`) or rounded to bfloat16."""
    if not wide:
        store_words(pointer, pack_bf16(values))
        return
    words = [value.bitcast(Uint32) for value in values]
    store_words(pointer, words[:4])
    store_words(pointer + 4, words[4:])


def expert_factor(alpha: MaybeTensor, expert: Int32) -> Float32 | None:
    """What the expert's accumulators are multiplied by, if anything."""
    return None if alpha is None else Float32(alpha[expert])


def scaled(values: list[Float32], factor: Float32 | None) -> list[Float32]:
    """The values times a factor, if there is one."""
    return values if factor is None else [value * factor for value in values]


def prefetch_l2(pointer: cute.Pointer) -> None:
    """Bring a line of global memory into L2."""
    llvm.inline_asm(
        None,
        [pointer.toint().ir_value()],
        "prefetch.global.L2 [$0];",
        "l",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


@dataclass(frozen=True)
class Linear:
    """sum * alpha + bias, times prob, added to a main gradient: each step rounded to float32; float32 or bfloat16.

    Tensors: `(alpha [E], bias [E, N], prob [capacity], main_grad, out)`, None where absent. `by_expert`: the result is
    [E, rows, N] and not [capacity, N]; an expert without tokens then keeps its main gradient as it is.
    """

    wide: bool
    by_expert: bool = False
    wide_bias: bool = False
    prefetches: ClassVar[bool] = False

    def allocate(self, memory: Any, columns: int) -> None:
        return None

    def prepare(self, tensors: tuple[MaybeTensor, ...], stream: Any) -> None:
        return None

    def finish(self, tensors: tuple[MaybeTensor, ...], offsets: cute.Tensor, counts: MaybeTensor, stream: Any) -> None:
        return None

    @cute.jit
    def write(
        self,
        sums: cute.Tensor,
        thread: Int32,
        place: Any,
        shift: Int32,
        columns: Int32,
        tensors: tuple[MaybeTensor, ...],
        shared: None,
    ) -> None:
        """Store this thread's part of the tile that begins `shift` rows below the place's first."""
        alpha, bias, prob, main_grad, out = tensors
        tile_row, lane_column = thread_place(thread)
        row = place.first + shift + tile_row
        factor = expert_factor(alpha, place.expert)
        for block in cutlass.range(cute.size(sums) // PER_BLOCK, unroll=1):
            column = place.column + block * BLOCK + lane_column
            for half in cutlass.range_constexpr(2):
                own = row + 8 * half
                if own < place.end and column < columns:
                    at = cute.assume(column, divby=VECTOR)
                    values = scaled(block_values(sums, 0, half), factor)
                    if cutlass.const_expr(bias is not None):
                        shifts = read_vector(bias.iterator + (Int64(place.expert) * columns + at), self.wide_bias)
                        values = [value + own_shift for value, own_shift in zip(values, shifts, strict=True)]
                    if cutlass.const_expr(prob is not None):
                        values = [value * Float32(prob[own]) for value in values]
                    line = Int64(own)
                    if cutlass.const_expr(self.by_expert):
                        line = Int64(place.expert) * place.end + own
                    pointer = line * columns + at
                    if cutlass.const_expr(main_grad is not None):
                        before = read_vector(main_grad.iterator + pointer, True)
                        values = [
                            select(place.depth > 0, old + value, old) for old, value in zip(before, values, strict=True)
                        ]
                    store_vector(out.iterator + pointer, values, self.wide)
            drop_blocks(sums, 1)
