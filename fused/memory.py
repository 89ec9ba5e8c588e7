"""Vector loads and stores of packed values by pointer, and their conversion to and from float32 registers."""

from collections.abc import Sequence
from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Float32, Numeric, Uint32
from cutlass._mlir import ir
from cutlass._mlir.dialects import arith, llvm, vector
from cutlass.cutlass_dsl import T

__all__ = ["MaybeTensor", "load_words", "pack_bf16", "pure_ptx", "select", "store_words", "unpack_bf16"]


MaybeTensor = Any
"""A `cute.Tensor`, or None in variants of a kernel that lack it."""


def pure_ptx(text: str, constraints: str, *operands: Numeric) -> Uint32:
    """One PTX instruction without side effects that gives a 32-bit word."""
    result = llvm.inline_asm(
        T.i32(),
        [operand.ir_value() for operand in operands],
        text,
        constraints,
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return Uint32(result)


def select(condition: Boolean, yes: Numeric, no: Numeric) -> Any:
    """`yes` where the condition holds, else `no`: one `selp`, never a branch."""
    return type(yes)(arith.select(condition.ir_value(), yes.ir_value(), no.ir_value()))


def load_words(pointer: cute.Pointer, count: int) -> list[Uint32]:
    """`count` (1, 2 or 4) neighbouring 32-bit words in one load; the address must be aligned to all of them."""
    if count == 1:
        return [Uint32(cute.arch.load(pointer, Uint32))]
    loaded = cute.arch.load(pointer, ir.VectorType.get([count], T.i32()))
    return [Uint32(vector.extract(loaded, [], [i])) for i in range(count)]


def store_words(pointer: cute.Pointer, words: Sequence[Uint32]) -> None:
    """Store neighbouring 32-bit words (1, 2 or 4) in one store; the address must be aligned to all of them."""
    if len(words) == 1:
        cute.arch.store(pointer, words[0])
        return
    packed = vector.from_elements(ir.VectorType.get([len(words)], T.i32()), [word.ir_value() for word in words])
    cute.arch.store(pointer, packed)


def unpack_bf16(words: Sequence[Uint32]) -> list[Float32]:
    """The two bfloat16 values of each word as float32, lower half first."""
    values = []
    for word in words:
        values.append((word << 16).bitcast(Float32))
        values.append((word & Uint32(0xFFFF0000)).bitcast(Float32))
    return values


def pack_bf16(values: Sequence[Float32]) -> list[Uint32]:
    """Values rounded to bfloat16 (nearest even, overflow to Inf), two to a word, first value in the lower half.

    The DSL's own pair conversion saturates finite overflow, so the instruction is spelled here.
    """
    return [
        pure_ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", high, low)
        for low, high in zip(values[::2], values[1::2], strict=True)
    ]
