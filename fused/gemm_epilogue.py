"""Epilogues of the grouped GEMM that store the sums themselves, and what all epilogues share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from moe_numerics.fused.memory import pack_bf16, store_words

__all__ = ["BLOCK", "VECTOR", "Store", "block_values", "drop_block", "thread_place"]

BLOCK = 32
VECTOR = 8
# Accumulators of a thread in a block of 32 columns: 8 neighbouring columns of two rows.
PER_BLOCK = 16


def thread_place(thread: Int32) -> tuple[Int32, Int32]:
    """First of a thread's two rows in the tile (the other is 8 below it) and its first column in a block."""
    return (thread // 32) * 16 + (thread % 32) // 4, (thread % 4) * VECTOR


def block_values(sums: cute.Tensor, block: int, half: int) -> list[Float32]:
    """A thread's 8 neighbouring columns of a block, in the first (`half` 0) or second of its rows."""
    start = block * PER_BLOCK + 2 * half
    return [sums[start + 4 * (j // 2) + j % 2] for j in range(VECTOR)]


def drop_block(sums: cute.Tensor, blocks: int) -> None:
    """Move every accumulator `blocks` blocks down, so that a loop over blocks always works on the first ones.

    Registers cannot be indexed by a loop's counter, and an unrolled epilogue would not fit the instruction cache.
    """
    for index in range(cute.size(sums) - blocks * PER_BLOCK):
        sums[index] = sums[index + blocks * PER_BLOCK]


@dataclass(frozen=True)
class Store:
    """The sums as float32, or rounded to bfloat16. Tensors: `(out [capacity, N],)`."""

    wide: bool

    def allocate(self, memory: Any) -> None:
        return None

    def prepare(self, tensors: Any, stream: Any) -> None:
        return None

    def finish(self, tensors: Any, offsets: Any, counts: Any, stream: Any) -> None:
        return None

    @cute.jit
    def write(
        self, sums, thread: Int32, expert: Int32, start: Int32, first: Int32, end: Int32, column: Int32, columns: Int32, tensors, shared
    ):  # type: ignore[no-untyped-def]
        """Store the tile that begins at row `first` and column `column`, up to row `end` and column `columns`."""
        (out,) = tensors
        row, place = thread_place(thread)
        for block in cutlass.range(cute.size(sums) // PER_BLOCK, unroll=1):
            at = column + block * BLOCK + place
            for half in cutlass.range_constexpr(2):
                own = first + row + 8 * half
                if own < end and at < columns:
                    values = block_values(sums, 0, half)
                    pointer = out.iterator + (Int64(own) * columns + cute.assume(at, divby=VECTOR))
                    if cutlass.const_expr(self.wide):
                        words = [value.bitcast(Uint32) for value in values]
                        store_words(pointer, words[:4])
                        store_words(pointer + 4, words[4:])
                    else:
                        store_words(pointer, pack_bf16(values))
            drop_block(sums, 1)
