"""Block scales in the order a block-scaled tensor core reads them: tiles of 128 lines by 4 blocks.

Twin of `moe_numerics.reference.scale_layout`, which states the order.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, Uint32
from moe_numerics.fused.memory import store_words

__all__ = ["fill_scales", "store_scale", "swizzled_lines", "swizzled_offset"]

_THREADS = 128
_BYTES = 16


def swizzled_offset(line: Int32, block: Int32, blocks: Int32) -> Int64:
    """Byte offset of the scale of (line, block) in the swizzled scales of lines of `blocks` blocks."""
    tile = Int64(line >> 7) * ((blocks + 3) >> 2) + (block >> 2)
    return tile * 512 + ((line & 31) * 16 + ((line >> 5) & 3) * 4 + (block & 3))


def swizzled_lines(scales: cute.Pointer, line_tiles: Int32, block_tiles: Int32) -> cute.Tensor:
    """Swizzled scales of so many tiles of 128 lines and of 4 blocks as [lines, blocks]."""
    shape = (32, 4, line_tiles), (4, block_tiles)
    stride = (16, 4, Int64(block_tiles) * 512), (1, Int64(512))
    return cute.make_tensor(scales, cute.make_layout(shape, stride=stride))


@cute.kernel
def fill_kernel(padding: cutlass.Constexpr, scales: cute.Tensor) -> None:
    """`padding` in every byte, 16 bytes a thread."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    start = (Int64(block) * _THREADS + thread) * _BYTES
    if start < scales.shape[0]:
        store_words(scales.iterator + cute.assume(start, divby=_BYTES), [Uint32(padding * 0x01010101)] * (_BYTES // 4))


@cute.jit
def fill_scales(padding: cutlass.Constexpr, scales: cute.Tensor, stream: Any) -> None:
    """Fill swizzled scales with the byte that stands wherever no block has a scale."""
    covered = _THREADS * _BYTES
    fill_kernel(padding, scales).launch(
        grid=[(scales.shape[0] + covered - 1) // covered, 1, 1], block=[_THREADS, 1, 1], stream=stream
    )


def store_scale(scales: cute.Tensor, line: Int32, block: Int32, blocks: Int32, code: Uint32) -> None:
    """Write a scale code into swizzled scales of lines of `blocks` blocks."""
    scales[swizzled_offset(line, block, blocks)] = code.to(Uint8)
