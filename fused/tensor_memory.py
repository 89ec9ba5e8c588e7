"""Accumulators between tensor memory and registers, as the epilogues expect them (PTX ISA, `tcgen05.ld`).

With shape 16x256b a warp reads 16 rows, and a lane gets of every 8 columns the two that wgmma would give it: row l / 4
and the row 8 below, columns 2 * (l % 4) and the next.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm, nvvm, vector
from cutlass.cutlass_dsl import T

__all__ = ["after_thread_sync", "before_thread_sync", "epilogue_warp", "load_accumulators"]

_TENSOR_SPACE = 6


def before_thread_sync() -> None:
    """Order this thread's tensor-memory operations before the synchronisation that follows."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC)


def after_thread_sync() -> None:
    """Order this thread's tensor-memory operations after the synchronisation that went before."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)


def epilogue_warp(warp: Int32) -> Int32:
    """Which 16 rows of 128 a warp works on: warps 0 to 3 of two warpgroups, `warp` being 0 to 7.

    A warp may read the 32 lanes of tensor memory that its place in the warpgroup gives it (PTX ISA, "Access
    Restrictions"): those are halved between the warps of that place in both warpgroups.
    """
    return (warp % 4) * 2 + warp // 4


def load_accumulators(address: Int32, sums: cute.Tensor) -> None:
    """Load 16 rows of accumulators, all columns, into registers and wait for them.

    address: of the first row and column. sums: 4 registers for every 8 columns.
    """
    count = cute.size(sums)
    pointer = llvm.inttoptr(llvm.PointerType.get(_TENSOR_SPACE), address.ir_value())
    words = nvvm.tcgen05_ld(ir.VectorType.get([count], T.i32()), nvvm.Tcgen05LdStShape.SHAPE_16X256B, pointer)
    nvvm.tcgen05_wait(nvvm.Tcgen05WaitKind.LOAD)
    for index in range(count):
        sums[index] = Int32(vector.extract(words, [], [index])).bitcast(Float32)
