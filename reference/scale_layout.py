"""Block scales in the order a block-scaled tensor core reads them: tiles of 128 lines by 4 blocks.

A compact matrix of scale bytes has lines i (rows of a rowwise, columns of a colwise quantised matrix) and
blocks j along the quantised direction. Its byte (i, j) goes to

    ((i // 128) * T + j // 4) * 512 + (i % 32) * 16 + ((i % 128) // 32) * 4 + j % 4        T = ceil(blocks /
    4)

so lines are filled up to a multiple of 128 and blocks to a multiple of 4. The bytes filled in are read by the
tensor core (multiplied by zeros, which NaN survives), so they are defined: `padding`, 0 unless told.

Sources: PTX ISA, `tcgen05.mma` scale factor layout; cuBLAS documentation, "1D block scaling factors layout";
transformer_engine/common/swizzle@2.20.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .quantized import Quantized

LINES = 128
BLOCKS = 4


def swizzled_size(lines: int, blocks: int) -> int:
    """Gives the number of bytes of swizzled scales."""
    return -(-lines // LINES) * -(-blocks // BLOCKS) * LINES * BLOCKS


def swizzled_offset(line: torch.Tensor, block: torch.Tensor, blocks: int) -> torch.Tensor:
    """Gives the byte offsets (int64) of scales (line, block) of a matrix with `blocks` blocks a line."""
    tile = torch.div(line, LINES, rounding_mode="floor") * -(-blocks // BLOCKS) + torch.div(
        block, BLOCKS, rounding_mode="floor"
    )
    within = (line % 32) * 16 + torch.div(line % LINES, 32, rounding_mode="floor") * BLOCKS + block % BLOCKS
    return tile * (LINES * BLOCKS) + within


def swizzle(scales: torch.Tensor, padding: int = 0) -> torch.Tensor:
    """Gives compact scales in the swizzled order.

    scales: uint8 [lines, blocks]. padding: the byte filled in. Result: uint8 [swizzled_size(lines, blocks)].
    ValueError: another dtype or shape, a padding that is not a byte.
    """
    if scales.dtype != torch.uint8 or scales.dim() != 2:
        raise ValueError(
            f"scales have dtype {scales.dtype} and shape {tuple(scales.shape)}: expected uint8 [lines, blocks]"
        )
    if not 0 <= padding <= 255:
        raise ValueError(f"padding is {padding}: expected a byte, 0 to 255")
    lines, blocks = scales.shape
    result = torch.full((swizzled_size(lines, blocks),), padding, dtype=torch.uint8, device=scales.device)
    result[_offsets(lines, blocks, scales.device)] = scales
    return result


def unswizzle(swizzled: torch.Tensor, lines: int, blocks: int) -> torch.Tensor:
    """Gives the compact scales uint8 [lines, blocks] of swizzled ones; the bytes filled in are dropped.

    ValueError: a buffer of another size than swizzled_size(lines, blocks).
    """
    if swizzled.dtype != torch.uint8 or swizzled.numel() != swizzled_size(lines, blocks):
        raise ValueError(
            f"swizzled scales have dtype {swizzled.dtype} and {swizzled.numel()} bytes: expected uint8 and "
            f"{swizzled_size(lines, blocks)} for {lines} lines of {blocks} blocks"
        )
    return swizzled.reshape(-1)[_offsets(lines, blocks, swizzled.device)]


def scale_matrix(quantized: Quantized) -> torch.Tensor:
    """Gives compact scales as [lines, blocks]: [capacity, hidden / block] or, colwise, [hidden, blocks]."""
    scales = quantized.compact_scales
    return scales.t() if quantized.axis == -2 and not quantized.transposed else scales


def swizzle_quantized(quantized: Quantized, padding: int = 0) -> torch.Tensor:
    """Gives the scales of a quantised matrix in one swizzled layout over the whole buffer. See `swizzle`."""
    return swizzle(scale_matrix(quantized), padding)


def with_swizzled_scales(quantized: Quantized, padding: int = 0) -> Quantized:
    """Gives the same quantised matrix, whose scales are in the layout of `swizzle_quantized`."""
    return replace(quantized, scales=swizzle_quantized(quantized, padding), swizzled=True)


def swizzle_experts(quantized: Quantized, padding: int = 0) -> list[torch.Tensor]:
    """Gives the scales of each expert in a swizzled layout of its own.

    Rowwise an expert has its counts[e] lines, colwise its ceil(counts[e] / block) blocks; an expert without
    rows has an empty layout.
    """
    matrix, experts, block = scale_matrix(quantized), quantized.experts, quantized.block
    result = []
    for e, (start, count) in enumerate(zip(experts.starts, experts.counts, strict=True)):
        if quantized.axis == -1:
            part = matrix[start : start + count]
        else:
            first = experts.colwise_row(e, 0, block) if count else 0
            part = matrix[:, first : first + -(-count // block)]
        result.append(swizzle(part, padding))
    return result


def pack_words(codes: torch.Tensor) -> torch.Tensor:
    """Gives four scale bytes a word, the first in the lowest byte.

    codes: uint8 [..., 4 n]. Result: int64 [..., n] in [0, 2**32). ValueError: another dtype or length.
    """
    if codes.dtype != torch.uint8 or codes.dim() == 0 or codes.shape[-1] % 4:
        raise ValueError(
            f"codes have dtype {codes.dtype} and shape {tuple(codes.shape)}: expected uint8, four for each word"
        )
    parts = codes.to(torch.int64).unflatten(-1, (-1, 4))
    return parts[..., 0] | parts[..., 1] << 8 | parts[..., 2] << 16 | parts[..., 3] << 24


def _offsets(lines: int, blocks: int, device: torch.device) -> torch.Tensor:
    line = torch.arange(lines, device=device).unsqueeze(1)
    return swizzled_offset(line, torch.arange(blocks, device=device).unsqueeze(0), blocks)
