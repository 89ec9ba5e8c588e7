"""Tensor maps (TMA descriptors) and the tiles they describe (PTX ISA 5.5.8, CUDA driver API cuTensorMapEncodeTiled).

The bits are those that CuTe DSL's host code (nvidia-cutlass-dsl 4.8.1) writes, read off by varying its inputs.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .errors import Fault

if TYPE_CHECKING:
    from .wave import Wave

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

# Bits of an element in global memory by type code; 11 to 13 are those that CuTe DSL writes for packed 4-bit elements,
# and for 4- and 6-bit elements of which 16 take 16 bytes in shared memory (`.b4x16_p64`, `.b6x16_p32`).
ELEMENT_BITS = {0: 8, 1: 16, 2: 32, 3: 32, 4: 64, 5: 64, 6: 16, 7: 32, 8: 64, 9: 16, 10: 16, 11: 4, 12: 4, 13: 6}
SPREAD = (12, 13)
ELEMENT_TYPE = {0: "u8", 1: "u16", 2: "u32", 3: "s32", 4: "u64", 5: "s64", 6: "f16", 7: "f32", 8: "f64", 10: "bf16"}
# CUtensorMapDataType (CUDA driver API) of a type code.
DRIVER_TYPE = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6, 7: 7, 8: 8, 10: 9, 11: 13, 12: 14, 13: 15}
SWIZZLE_MASK = {0: 0, 1: 1, 2: 3, 3: 7}


@dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory and the box that one copy moves. Dimension 0 is the contiguous one.

    strides: bytes of dimensions 1 and up. swizzle: 0 none, 1, 2, 3 for 32, 64 and 128 bytes.
    """

    address: int
    bits: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    kind: int = 0

    @property
    def rank(self) -> int:
        return len(self.sizes)

    @property
    def spread(self) -> bool:
        """Whether 16 elements take 16 bytes in shared memory, packed at the beginning, whatever their width."""
        return self.kind in SPREAD

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the box in shared memory."""
        return self.box[0] if self.spread else self.box[0] * self.bits // 8

    @property
    def box_bytes(self) -> int:
        """Bytes of the box in shared memory."""
        return self.row_bytes * int(np.prod(self.box[1:]))

    @property
    def copied_bytes(self) -> int:
        """Bytes that a copy of the box reports to its mbarrier: those of its elements without padding."""
        return int(np.prod(self.box)) * self.bits // 8


@lru_cache(maxsize=512)
def decode(raw: bytes) -> TensorMap:
    """The tensor map that 128 bytes hold. Raises Fault if they hold none."""
    words = struct.unpack("<16I", raw[:64])
    flags = words[2]
    kind = flags >> 7 & 15
    # CuTe DSL's host code writes 2 there, the driver 0.
    if flags & 15 not in (0, 2) or kind not in ELEMENT_BITS:
        raise Fault("tensor_map", f"the 128 bytes are no tensor map of the known kind (word 2 is {flags:#010x})")
    rank = (flags >> 4 & 7) + 1
    address = words[0] | words[1] << 32
    boxes = (words[13] >> 24, *(words[14] >> s & 255 for s in (0, 8, 16, 24)))
    # Word 7 holds the upper four bits of each stride (36 bits in units of 16 bytes).
    upper = [words[7] >> (4 * k) & 15 for k in range(4)]
    strides = tuple((words[3 + k] | upper[k] << 32) * 16 for k in range(rank - 1))
    return TensorMap(
        address,
        ELEMENT_BITS[kind],
        tuple(words[8 + k] + 1 for k in range(rank)),
        strides,
        tuple(boxes[k] + 1 for k in range(rank)),
        flags >> 13 & 3,
        kind,
    )


def encode(m: TensorMap) -> bytes:
    """128 bytes that `decode` reads as `m`."""
    words = [0] * 32
    words[0], words[1] = m.address & 0xFFFFFFFF, m.address >> 32
    words[2] = 2 | (m.rank - 1) << 4 | m.kind << 7 | m.swizzle << 13 | 1 << 18
    for k, stride in enumerate(m.strides):
        words[3 + k] = stride // 16 & 0xFFFFFFFF
        words[7] |= (stride // 16 >> 32) << (4 * k)
    for k, size in enumerate(m.sizes):
        words[8 + k] = size - 1
    words[13] = (m.box[0] - 1) << 24
    for k, size in enumerate(m.box[1:]):
        words[14] |= (size - 1) << (8 * k)
    return struct.pack("<32I", *words)


def swizzled(address: Array, mask: int) -> Array:
    """Where bytes go: bits 4 to 6 of the address are xored with bits 7 to 9 under `mask`."""
    if not mask:
        return address
    return address ^ ((address >> 7 & mask) << 4)


def check(m: TensorMap) -> None:
    """Raises Fault for what the hardware requires of a tensor map (cuTensorMapEncodeTiled)."""
    if m.address % 16:
        raise Fault("tensor_map", f"the tensor map's global address {m.address:#x} is not a multiple of 16")
    if m.row_bytes % 16:
        raise Fault("tensor_map", f"a row of the box has {m.row_bytes} bytes, not a multiple of 16")
    limit = {0: None, 1: 32, 2: 64, 3: 128}[m.swizzle]
    if limit is not None and m.row_bytes > limit:
        raise Fault("tensor_map", f"a row of the box has {m.row_bytes} bytes, more than the swizzle's {limit}")
    if m.spread and (m.box[0] % 16 or m.sizes[0] % 16):
        raise Fault("tensor_map", f"rows of {m.sizes[0]} and boxes of {m.box[0]} elements: 16 share their padding")
    if max(m.box) > 256:
        raise Fault("tensor_map", f"box {m.box} exceeds 256 in a dimension")


def _window(w: Wave, m: TensorMap, what: str) -> Bytes:
    """The whole tensor as bytes, [size of the last dimension, ..., bytes of a row], over global memory."""
    memory = w.launch.memory
    row = m.sizes[0] * m.bits // 8
    span = row + sum((n - 1) * s for n, s in zip(m.sizes[1:], m.strides, strict=True))
    found = memory.find(m.address, m.address + span - 1)
    if found is None:
        raise Fault(
            "out_of_bounds",
            f"the tensor map of {what} covers {span} bytes at {m.address:#x} that no allocation holds: "
            f"{memory.describe(m.address, span)}",
            address=m.address,
        )
    shape = (*reversed(m.sizes[1:]), row)
    strides = (*reversed(m.strides), 1)
    return np.lib.stride_tricks.as_strided(found.buffer[m.address - found.start :], shape, strides)


def _cut(m: TensorMap, coordinates: tuple[int, ...]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Slices of the tensor and of the box where they overlap; dimension 0 last, in bytes."""
    inside, place = [], []
    for k in reversed(range(m.rank)):
        scale = (m.bits, 8) if k == 0 else (1, 1)
        low = max(coordinates[k], 0)
        high = min(coordinates[k] + m.box[k], m.sizes[k])
        high = max(low, high)
        inside.append(slice(low * scale[0] // scale[1], high * scale[0] // scale[1]))
        start = low - coordinates[k]
        place.append(slice(start * scale[0] // scale[1], (start + high - low) * scale[0] // scale[1]))
    return tuple(inside), tuple(place)


def load_box(w: Wave, m: TensorMap, coordinates: tuple[int, ...]) -> Bytes:
    """The bytes of a box, in the order of its elements; what lies outside the tensor is zero."""
    inside, place = _cut(m, coordinates)
    box = np.zeros((*reversed(m.box[1:]), m.box[0] * m.bits // 8), np.uint8)
    if all(s.stop > s.start for s in inside):
        box[place] = _window(w, m, "a load")[inside]
    if m.spread:
        groups = box.reshape(-1, 2 * m.bits)
        box = np.zeros((groups.shape[0], 16), np.uint8)
        box[:, : 2 * m.bits] = groups
    return box.reshape(-1)


def store_box(w: Wave, m: TensorMap, coordinates: tuple[int, ...], data: Bytes) -> None:
    """Writes the part of a box that lies inside the tensor."""
    inside, place = _cut(m, coordinates)
    if not all(s.stop > s.start for s in inside):
        return
    found = w.launch.memory.find(m.address, m.address)
    if found is not None and found.readonly:
        raise Fault("readonly", f"a tensor store to {found.name}, which was marked read-only", address=m.address)
    _no_padding(m, "store")
    box = data.reshape(*reversed(m.box[1:]), m.row_bytes)
    _window(w, m, "a store")[inside] = box[place]
    if found is not None and found.shadow is not None:
        shape = (*reversed(m.sizes[1:]), m.sizes[0] * m.bits // 8)
        strides = (*reversed(m.strides), 1)
        shadow = np.lib.stride_tricks.as_strided(found.shadow[m.address - found.start :], shape, strides)
        shadow[inside] = 1


def _no_padding(m: TensorMap, what: str) -> None:
    if m.spread:
        raise Fault("tensor_map", f"a tensor {what} of elements with padding is not modelled")


def reduce_box(w: Wave, m: TensorMap, coordinates: tuple[int, ...], data: Bytes, dtype: Any, apply: Any) -> None:
    """Combines a box with the tensor, element by element: `apply(old, new)` on arrays of `dtype`."""
    inside, place = _cut(m, coordinates)
    if not all(s.stop > s.start for s in inside):
        return
    found = w.launch.memory.find(m.address, m.address)
    if found is not None and found.readonly:
        raise Fault("readonly", f"a reduction into {found.name}, which was marked read-only", address=m.address)
    check_written(w, m, coordinates, "reduction into")
    _no_padding(m, "reduction")
    window = _window(w, m, "a reduction")[inside]
    box = data.reshape(*reversed(m.box[1:]), m.row_bytes)[place]
    old = np.ascontiguousarray(window).view(dtype)
    window[...] = np.asarray(apply(old, np.ascontiguousarray(box).view(dtype)), dtype).view(np.uint8)


def check_written(w: Wave, m: TensorMap, coordinates: tuple[int, ...], what: str = "load") -> None:
    """Raises Fault if a tensor copy would read global bytes that were marked as never written."""
    found = w.launch.memory.find(m.address, m.address)
    if found is None or not found.must_be_written or found.shadow is None:
        return
    inside, _ = _cut(m, coordinates)
    shape = (*reversed(m.sizes[1:]), m.sizes[0] * m.bits // 8)
    shadow = np.lib.stride_tricks.as_strided(found.shadow[m.address - found.start :], shape, (*reversed(m.strides), 1))
    if not shadow[inside].all():
        raise Fault("uninitialised", f"a tensor {what} reads elements of {found.name} before they were written")
