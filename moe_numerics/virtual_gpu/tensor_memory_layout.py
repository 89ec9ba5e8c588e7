"""Operand tiles of tensor-core instructions in shared memory, as matrix descriptors give them.

Sources: PTX ISA 9.7.15.5.1 (wgmma matrix descriptor) and 9.7.16.4 (tcgen05 shared memory descriptor); the canonical
layouts as described in NVIDIA/cutlass include/cute/arch/mma_sm90_desc.hpp. 64 and 128 byte swizzles of K-major tiles
were checked through the address arithmetic of compiled kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .errors import Fault
from .tensor_map import swizzled

if TYPE_CHECKING:
    from .wave import Wave

Array = npt.NDArray[Any]
WIDTH = {0: 16, 1: 32, 2: 64, 3: 128}
MASK = {0: 0, 1: 1, 2: 3, 3: 7}


@dataclass(frozen=True)
class Descriptor:
    """A decoded matrix descriptor: byte offsets, and the swizzle as 0 none, 1, 2, 3 for 32, 64, 128 bytes."""

    start: int
    leading: int
    stride: int
    base: int
    swizzle: int


def wgmma_descriptor(bits: int) -> Descriptor:
    """The descriptor of `wgmma`."""
    mode = bits >> 62 & 3
    swizzle = {0: 0, 1: 3, 2: 2, 3: 1}[mode]
    return Descriptor(
        (bits & 0x3FFF) << 4, (bits >> 16 & 0x3FFF) << 4, (bits >> 32 & 0x3FFF) << 4, bits >> 49 & 7, swizzle
    )


def tcgen05_descriptor(bits: int) -> Descriptor:
    """The descriptor of `tcgen05.mma` and `tcgen05.cp`."""
    mode = bits >> 61 & 7
    if mode not in (0, 2, 4, 6):
        raise Fault("descriptor", f"swizzle mode {mode} of matrix descriptor {bits:#x} is not modelled")
    swizzle = {0: 0, 2: 3, 4: 2, 6: 1}[mode]
    return Descriptor(
        (bits & 0x3FFF) << 4, (bits >> 16 & 0x3FFF) << 4, (bits >> 32 & 0x3FFF) << 4, bits >> 49 & 7, swizzle
    )


@lru_cache(maxsize=256)
def _layout(leading: int, stride: int, swizzle: int, rows: int, row_bytes: int, transposed: bool, size: int) -> Array:
    width = WIDTH[swizzle]
    if not transposed:
        r = np.arange(rows)[:, None]
        k = np.arange(0, row_bytes, 16)[None, :]
        along = k // 16 * leading if swizzle == 0 else k
        flat = r // 8 * stride + r % 8 * width + along
    else:
        k = np.arange(row_bytes // size)[:, None]
        mn = np.arange(0, rows * size, 16)[None, :]
        if swizzle == 0:
            flat = mn // 16 * stride + k // 8 * leading + k % 8 * 16
        else:
            flat = mn // width * leading + mn % width + k % 8 * width + k // 8 * stride
    return flat.astype(np.int64)


def pieces(d: Descriptor, rows: int, row_bytes: int, transposed: bool, size: int = 2) -> Array:
    """Shared addresses of the 16-byte pieces of a tile.

    K-major: [rows, row_bytes / 16], `row_bytes` bytes of K for each of `rows` rows of M or N. Transposed (MN-major,
    `size` bytes an element): [K, rows * size / 16], where `row_bytes` is size * K.
    """
    layout = _layout(d.leading, d.stride, d.swizzle, rows, row_bytes, transposed, size)
    return swizzled(layout + d.start, MASK[d.swizzle])


def check_bounds(w: Wave, addresses: Array, thread: int) -> None:
    """Raises Fault for pieces outside a block's shared memory."""
    check_range(w, int(addresses.min()), int(addresses.max()), thread)


def check_range(w: Wave, low: int, high: int, thread: int) -> None:
    """`check_bounds` for the lowest and the highest address."""
    if low < w.shared_begin or high + 16 > w.shared_limit:
        raise Fault(
            "out_of_bounds",
            f"a matrix descriptor covers shared addresses {low:#x} to {high + 16:#x}; the block's shared memory lies "
            f"from {w.shared_begin:#x} to {w.shared_limit:#x}",
            thread,
            low,
        )


def read_tile(w: Wave, block: int, addresses: Array, thread: int) -> Array:
    """Bytes [..., 16] of pieces in a block's shared memory."""
    check_bounds(w, addresses, thread)
    offsets = addresses + block * w.shared_stride
    view = w.shared_region.buffer.reshape(-1, 16)
    if w.checkers and w.shared_region.shadow is not None:
        known = w.shared_region.shadow.reshape(-1, 16)[offsets >> 4]
        if not known.all():
            bad = offsets[~known.all(axis=-1)]
            raise Fault(
                "uninitialised", "a matrix operand in shared memory is read before it was written", thread,
                int(bad.flat[0]) % w.shared_stride,
            )  # fmt: skip
    return np.asarray(view[offsets >> 4])
