"""Block scales of the Blackwell grouped GEMMs: from global memory to shared memory to tensor memory.

The tensor core reads scales in tiles of 128 lines by 4 blocks (`moe_numerics.reference.scale_layout`). An expert's
rows, and its blocks of summed tokens, begin anywhere, so its tiles are put together while they are loaded, from compact
scales or from scales swizzled over the whole buffer, and no operand needs padding. What lies outside the expert gets
scale code 0.

Scales of a matrix have two dimensions if they are compact and three if they are swizzled (`Quantized.tiles`), those of
stacked weights one more: which it is costs nothing when the kernel runs.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm, nvvm
from moe_numerics.fused.gemm_problem import BLOCK
from moe_numerics.fused.memory import select, store_words
from moe_numerics.fused.scale_layout import swizzled_lines

__all__ = [
    "SCALE_THREADS",
    "fill_tiles",
    "first_block",
    "left_lines",
    "right_lines",
    "scale_address",
    "to_tensor_memory",
]

SCALE_THREADS = 64
TILE_LINES = 128
TILE_BLOCKS = 4
TILE_BYTES = 512
# Tensor memory: a tile's four blocks of a line are a column of 32 bits, of 32 lines.
TILE_COLUMNS = TILE_LINES // 32
_TENSOR_SPACE = 6


def left_lines(problem: Any, scales: cute.Tensor) -> cute.Tensor:
    """Scales of the left matrix as [lines, blocks]."""
    first, second, *tile = scales.shape
    if tile:
        return swizzled_lines(scales.iterator, first, second)
    return _swapped(scales) if problem.summed_rows else scales


def right_lines(problem: Any, scales: cute.Tensor, expert: Int32) -> cute.Tensor:
    """Scales of an expert's right matrix as [lines, blocks]."""
    if problem.ragged_depth:
        return left_lines(problem, scales)
    _, first, second, *tile = scales.shape
    start = Int64(expert) * (Int64(first) * second)
    if tile:
        return swizzled_lines(scales.iterator + start * TILE_BYTES, first, second)
    scales = cute.make_tensor(
        scales.iterator + start,
        cute.make_layout((first, second), stride=(Int64(second), 1)),
    )
    return _swapped(scales) if problem.transposed else scales


def _swapped(scales: cute.Tensor) -> cute.Tensor:
    blocks, lines = scales.shape
    return cute.make_tensor(scales.iterator, cute.make_layout((lines, blocks), stride=(1, Int64(lines))))


def first_block(problem: Any, scale_block: int, place: Any) -> Int32:
    """The block at which the place's sum begins."""
    if not problem.ragged_depth:
        return Int32(0)
    block = place.start // scale_block
    return block if problem.dense else block + place.expert


@cute.jit
def fill_tiles(
    scales: cute.Tensor,
    first_line: Int32,
    end_line: Int32,
    start_block: Int32,
    begin: Int32,
    end: Int32,
    shuffled: cutlass.Constexpr,
    lines: cutlass.Constexpr,
    tiles: cutlass.Constexpr,
    target: cute.Pointer,
    thread: Int32,
) -> None:
    """Put together the tiles of `lines` lines by 4 * `tiles` blocks; the blocks' tiles are neighbours.

    scales: uint8 [lines, blocks]. A line counts from first_line and exists before end_line, a block counts from
    start_block, the first here is number `begin`, and it exists before number `end`. shuffled: lines stand as
    `RaggedRows.right` permutes them.
    """
    for word in cutlass.range(thread, lines * tiles, SCALE_THREADS, unroll=1):
        line = word // tiles
        tile = word % tiles
        source = line
        if cutlass.const_expr(shuffled):
            within = line % BLOCK
            source = line - within + within % 2 + (within // 2 % 4) * 8 + (within // 8) * 2
        source = first_line + source
        packed = Uint32(0)
        if source < end_line:
            if cutlass.const_expr(cute.depth(scales.layout) > 1):
                # Swizzled. Unrolled this takes more registers than the warps that do it have.
                for j in cutlass.range(TILE_BLOCKS, unroll=1):
                    packed |= _code(scales, source, start_block, begin + tile * TILE_BLOCKS + j, end) << (8 * j)
            else:
                for j in cutlass.range_constexpr(TILE_BLOCKS):
                    packed |= _code(scales, source, start_block, begin + tile * TILE_BLOCKS + j, end) << (8 * j)
        offset = (line // TILE_LINES * tiles + tile) * TILE_BYTES + line % 32 * 16 + line % TILE_LINES // 32 * 4
        store_words(cute.recast_ptr(target + cute.assume(offset, divby=4), dtype=Uint32), [packed])


def _code(scales: cute.Tensor, line: Int32, start_block: Int32, block: Int32, end: Int32) -> Uint32:
    """The scale of a line's block, 0 from block `end` on."""
    known = cutlass.min(block, end - 1)
    code = scales[line, start_block + known].to(Uint32)
    return select(block < end, code, Uint32(0))


def to_tensor_memory(source: cute.Pointer, address: Int32, lines: int, tiles: int) -> None:
    """Copy the tiles that `fill_tiles` put together into tensor memory; a whole warp calls this.

    Lines of one tile of blocks are neighbouring columns, `lines` / 32 of them.
    """
    shared = source.toint()
    with cute.arch.elect_one():
        for tile in range(tiles):
            for group in range(lines // TILE_LINES):
                column = address + (tile * (lines // TILE_LINES) + group) * TILE_COLUMNS
                nvvm.tcgen05_cp(
                    nvvm.Tcgen05CpShape.SHAPE_32x128b,
                    llvm.inttoptr(llvm.PointerType.get(_TENSOR_SPACE), column.ir_value()),
                    _descriptor(shared + (group * tiles + tile) * TILE_BYTES).ir_value(),
                    multicast=nvvm.Tcgen05CpMulticast.WARPX4,
                )


def _descriptor(address: Int32) -> Int64:
    """Matrix descriptor (PTX ISA, tcgen05 "Shared memory descriptor") of 32 lines of 16 bytes without a swizzle."""
    start = (Int64(address) & 0x3FFFF) >> 4
    return start | (128 >> 4) << 32 | 1 << 46


def scale_address(operands: Any, address: Int32, lines: int, step: int) -> cute.Pointer:
    """Where in tensor memory an instruction, the `step`-th of a tile, finds its scales.

    An MXFP8 instruction takes one of a column's four bytes, which the upper two bits of the address number; an NVFP4
    instruction takes a tile.
    """
    if operands.width == 8:
        place = address | Int32((step << 30) - (1 << 32 if step > 1 else 0))
    else:
        place = address + step * (lines // 32)
    return cute.make_ptr(operands.scale, place, cute.AddressSpace.tmem, assumed_align=4)
