"""The amax of rotated values in an epilogue: 16 rows of a warp, rotated along the rows.

Twin of `moe_numerics.reference.hadamard` along axis -2: bits 0 to 2 of a row are lanes, bit 3 is a thread's second row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32
from moe_numerics.fused.hadamard import Rotation

__all__ = ["largest_rotated"]


def _flipped(value: Float32, flip: Uint32) -> Float32:
    """The value, its sign changed where `flip` is the sign bit and not 0."""
    return (value.bitcast(Uint32) ^ flip).bitcast(Float32)


def _row_signs(rotation: Rotation, half: int, lane: Int32) -> Uint32:
    """The sign bit where the lane's row of a half has a negative sign."""
    assert rotation.signs is not None
    mask = sum(1 << row for row in range(8) if rotation.signs[8 * half + row] < 0)
    return (Uint32(mask) >> (lane // 4).to(Uint32)) << 31


def largest_rotated(
    rotation: Rotation | None, quantizer: Any, columns: Sequence[tuple[Float32, Float32]], lane: Int32
) -> Float32:
    """Largest magnitude of rotated columns, of which a thread has two rows each (zeros where invalid).

    The values are rounded to bfloat16 first.
    """
    assert rotation is not None
    signs = None if rotation.signs is None else [_row_signs(rotation, half, lane) for half in range(2)]
    uppers = [(lane & distance).to(Uint32) << (31 - bit) for bit, distance in ((2, 4), (3, 8), (4, 16))]
    largest = Float32(0.0)
    for column in columns:
        rows = [value.to(BFloat16).to(Float32) for value in column]
        if signs is not None:
            rows = [_flipped(value, sign) for value, sign in zip(rows, signs, strict=True)]
        for distance, upper in zip((4, 8, 16), uppers, strict=True):
            rows = [cute.arch.shuffle_sync_bfly(value, distance) + _flipped(value, upper) for value in rows]
        rows = [rows[0] + rows[1], rows[0] - rows[1]]
        for value in rows:
            rotated = value * Float32(0.25) if rotation.orthonormal else value
            if rotation.rounded:
                rotated = rotated.to(BFloat16).to(Float32)
            largest = quantizer.magnitude_max(largest, rotated)
    return largest
