"""Tensor maps (TMA descriptors) and the tiles they describe (PTX ISA 5.5.8, CUDA driver API cuTensorMapEncodeTiled).

The bits are those that CuTe DSL's host code (nvidia-cutlass-dsl 4.8.1) and the driver write, read off by varying their
inputs, and those that `ptxas` makes `tensormap.replace` change.
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

TF32 = 16
"""Added to a type code (7 or 8) if a load rounds float32 to tf32: bit 16 of word 2."""
# Bits of an element in global memory by type code; 11 to 13 are packed 4-bit elements, and 4- and 6-bit elements of
# which 16 take 16 bytes in shared memory (`.b4x16_p64`, `.b6x16_p32`).
ELEMENT_BITS = {
    0: 8, 1: 16, 2: 32, 3: 32, 4: 64, 5: 64, 6: 16, 7: 32, 8: 32, 9: 64, 10: 16, 11: 4, 12: 4, 13: 6,
    TF32 + 7: 32, TF32 + 8: 32,
}  # fmt: skip
SPREAD = (12, 13)
ELEMENT_TYPE = {
    0: "u8", 1: "u16", 2: "u32", 3: "s32", 4: "u64", 5: "s64", 6: "f16", 7: "f32", 8: "f32.ftz", 9: "f64", 10: "bf16",
    TF32 + 7: "tf32", TF32 + 8: "tf32.ftz",
}  # fmt: skip
# CUtensorMapDataType (CUDA driver API) of a type code.
DRIVER_TYPE = {
    **{code: code for code in range(8)}, 8: 10, 9: 8, 10: 9, TF32 + 7: 11, TF32 + 8: 12, 11: 13, 12: 14, 13: 15,
}  # fmt: skip
FLOATS = (6, 7, 8, 9, 10, TF32 + 7, TF32 + 8)
NAN_FILL = (0xF7, 0x7F)
"""The bytes of what a load puts outside the tensor instead of zeros, whatever the type (seen on an H200)."""
SWIZZLE_MASK = {0: 0, 1: 1, 2: 3, 3: 7}
SWIZZLE_BYTES = {0: 0, 1: 32, 2: 64, 3: 128}


@dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory and the box that one copy moves. Dimension 0 is the contiguous one.

    strides: bytes of dimensions 1 and up. swizzle: 0 none, 1, 2, 3 for 32, 64 and 128 bytes. steps: of every dimension
    but 0 the box takes each first of so many elements; () is 1 in all. nan: outside the tensor are NaNs, not zeros.
    """

    address: int
    bits: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    kind: int = 0
    steps: tuple[int, ...] = ()
    nan: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", self.steps or (1,) * len(self.sizes))

    @property
    def counts(self) -> tuple[int, ...]:
        """Elements of each dimension that a copy moves. Dimension 0 has no step, whatever its field says."""
        return (self.box[0], *(-(-n // step) for n, step in zip(self.box[1:], self.steps[1:], strict=True)))

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
        return self.counts[0] if self.spread else self.counts[0] * self.bits // 8

    @property
    def pitch(self) -> int:
        """Bytes from one row of the box to the next in shared memory: a swizzled row takes the swizzle's (an H200)."""
        return max(self.row_bytes, SWIZZLE_BYTES[self.swizzle])

    @property
    def box_bytes(self) -> int:
        """Bytes of the box in shared memory, with what lies between its rows."""
        return self.pitch * int(np.prod(self.counts[1:]))

    @property
    def copied_bytes(self) -> int:
        """Bytes that a copy of the box reports to its mbarrier: those of its elements without padding."""
        return int(np.prod(self.counts)) * self.bits // 8


@lru_cache(maxsize=512)
def decode(raw: bytes) -> TensorMap:
    """The tensor map that 128 bytes hold. Raises Fault if they hold none."""
    words = struct.unpack("<16I", raw[:64])
    flags = words[2]
    kind = flags >> 7 & 15 | (flags >> 16 & 1) * TF32
    # CuTe DSL's host code writes 2 there, the driver 0.
    if flags & 15 not in (0, 2) or kind not in ELEMENT_BITS:
        raise Fault("tensor_map", f"the 128 bytes are no tensor map of the known kind (word 2 is {flags:#010x})")
    if flags >> 11 & 3:
        raise Fault("tensor_map", f"interleaved layouts are not modelled (word 2 is {flags:#010x})")
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
        tuple((words[13] >> 3 * k & 7) + 1 for k in range(rank)),
        bool(flags >> 15 & 1),
    )


def encode(m: TensorMap) -> bytes:
    """128 bytes that `decode` reads as `m`."""
    words = [0] * 32
    words[0], words[1] = m.address & 0xFFFFFFFF, m.address >> 32
    words[2] = 2 | (m.rank - 1) << 4 | m.kind % TF32 << 7 | m.swizzle << 13 | m.nan << 15 | m.kind // TF32 << 16
    words[2] |= 1 << 18
    for k, stride in enumerate(m.strides):
        words[3 + k] = stride // 16 & 0xFFFFFFFF
        words[7] |= (stride // 16 >> 32) << (4 * k)
    for k, size in enumerate(m.sizes):
        words[8 + k] = size - 1
    words[13] = (m.box[0] - 1) << 24 | sum((step - 1) << 3 * k for k, step in enumerate(m.steps))
    for k, size in enumerate(m.box[1:]):
        words[14] |= (size - 1) << (8 * k)
    return struct.pack("<32I", *words)


def swizzled(address: Array, mask: int) -> Array:
    """Where bytes go: bits 4 to 6 of the address are xored with bits 7 to 9 under `mask`."""
    if not mask:
        return address
    return address ^ ((address >> 7 & mask) << 4)


def pieces(m: TensorMap, start: int, address: int) -> Array:
    """Where the 16-byte pieces of a box go that begins at shared address `address`, which is at `start` of a buffer."""
    rows = np.arange(int(np.prod(m.counts[1:])), dtype=np.int64)
    flat = (rows[:, None] * m.pitch + np.arange(0, m.row_bytes, 16)).reshape(-1) + address
    return swizzled(flat, SWIZZLE_MASK[m.swizzle]) - address + start


def check(m: TensorMap) -> None:
    """Raises Fault for what the hardware requires of a tensor map (cuTensorMapEncodeTiled)."""
    if m.address % 16:
        raise Fault("tensor_map", f"the tensor map's global address {m.address:#x} is not a multiple of 16")
    if m.row_bytes % 16:
        raise Fault("tensor_map", f"a row of the box has {m.row_bytes} bytes, not a multiple of 16")
    limit = SWIZZLE_BYTES[m.swizzle]
    if m.swizzle and m.row_bytes > limit:
        raise Fault("tensor_map", f"a row of the box has {m.row_bytes} bytes, more than the swizzle's {limit}")
    if m.spread and (m.box[0] % 16 or m.sizes[0] % 16):
        raise Fault("tensor_map", f"rows of {m.sizes[0]} and boxes of {m.box[0]} elements: 16 share their padding")
    if m.nan and m.kind not in FLOATS:
        raise Fault("tensor_map", f"elements of type {ELEMENT_TYPE.get(m.kind, m.kind)} cannot be filled with NaN")
    if max(m.box) > 256:
        raise Fault("tensor_map", f"box {m.box} exceeds 256 in a dimension")


def check_place(m: TensorMap, coordinates: tuple[int, ...], writes: bool, thread: int) -> None:
    """Raises Fault for where a copy begins if an H200 stops with an illegal instruction there."""
    if coordinates[0] * m.bits % 128:
        raise Fault(
            "misaligned",
            f"a tensor copy begins at element {coordinates[0]} of {m.bits} bits in a row, not a multiple of 16 bytes",
            thread,
        )
    if writes and min(coordinates) < 0:
        raise Fault(
            "out_of_bounds", f"a tensor copy to global memory begins at {coordinates}, before the tensor", thread
        )


def _bytes_of(m: TensorMap, buffer: Bytes, start: int) -> Bytes:
    """The tensor in a buffer that begins at address `start`, [size of the last dimension, ..., bytes of a row].

    A row is taken up to a multiple of 16 bytes: the last one may end past the buffer.
    """
    shape = (*reversed(m.sizes[1:]), -(-m.sizes[0] * m.bits // 128) * 16)
    return np.lib.stride_tricks.as_strided(buffer[m.address - start :], shape, (*reversed(m.strides), 1))


def _window(w: Wave, m: TensorMap, what: str, inside: tuple[slice, ...]) -> Bytes:
    """`inside` of the tensor over global memory. Raises Fault unless an allocation holds it, and all of the tensor."""
    memory = w.launch.memory
    span = m.sizes[0] * m.bits // 8 + sum((n - 1) * s for n, s in zip(m.sizes[1:], m.strides, strict=True))
    found = memory.find(m.address, m.address + span - 1)
    if found is None:
        raise Fault(
            "out_of_bounds",
            f"the tensor map of {what} covers {span} bytes at {m.address:#x} that no allocation holds: "
            f"{memory.describe(m.address, span)}",
            address=m.address,
        )
    last = [s.start + (len(range(s.start, s.stop, s.step)) - 1) * s.step for s in reversed(inside)]
    end = m.address + last[0] + sum(n * s for n, s in zip(last[1:], m.strides, strict=True))
    if memory.find(m.address, end) is None:
        raise Fault(
            "out_of_bounds",
            f"{what} writes the 16 bytes of which a row's last elements are a part, past the end of the allocation: "
            f"{memory.describe(end, 1)}",
            address=end,
        )
    return _bytes_of(m, found.buffer, found.start)[inside]


def _cut(
    m: TensorMap, coordinates: tuple[int, ...], writes: bool = False
) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Slices of the tensor and of the box where they overlap; dimension 0 last, in bytes.

    writes: rows go to memory in whole pieces of 16 bytes, so that the last one takes its padding too (an H200).
    """
    inside, place = [], []
    for k in reversed(range(1, m.rank)):
        at, step = coordinates[k], m.steps[k]
        first = max(0, -(at // step))
        last = max(first, min(m.counts[k], -((at - m.sizes[k]) // step)))
        place.append(slice(first, last))
        inside.append(slice(at + first * step, at + last * step, step))
    at, size = coordinates[0] * m.bits // 8, m.sizes[0] * m.bits // 8
    low = max(at, 0)
    high = max(low, min(at + m.box[0] * m.bits // 8, -(-size // 16) * 16 if writes else size))
    return (*inside, slice(low, high, 1)), (*place, slice(low - at, high - at))


def _rounded(data: Bytes) -> Bytes:
    """float32 to the nearest tf32, ties to even; subnormals stay, every NaN becomes one (seen on an H200)."""
    bits = np.ascontiguousarray(data).view(np.uint32)
    nearest = bits + 0xFFF + (bits >> 13 & 1) & 0xFFFFE000
    return np.where(bits & 0x7FFFFFFF > 0x7F800000, np.uint32(0x7FFFE000), nearest).astype(np.uint32).view(np.uint8)


def load_box(w: Wave, m: TensorMap, coordinates: tuple[int, ...]) -> Bytes:
    """The bytes of a box, in the order of its elements; what lies outside the tensor is zero, or NaN."""
    inside, place = _cut(m, coordinates)
    box = np.zeros((*reversed(m.counts[1:]), m.counts[0] * m.bits // 8), np.uint8)
    if m.nan:
        box.reshape(-1, 2)[:] = NAN_FILL
    if all(s.stop > s.start for s in inside):
        found = _window(w, m, "a load", inside)
        box[place] = _rounded(found) if m.kind >= TF32 else found
    if m.spread:
        groups = box.reshape(-1, 2 * m.bits)
        box = np.zeros((groups.shape[0], 16), np.uint8)
        box[:, : 2 * m.bits] = groups
    return box.reshape(-1)


def store_box(w: Wave, m: TensorMap, coordinates: tuple[int, ...], data: Bytes) -> None:
    """Writes the part of a box that lies inside the tensor, whole pieces of 16 bytes."""
    inside, place = _cut(m, coordinates, True)
    if not all(s.stop > s.start for s in inside):
        return
    found = w.launch.memory.find(m.address, m.address)
    if found is not None and found.readonly:
        raise Fault("readonly", f"a tensor store to {found.name}, which was marked read-only", address=m.address)
    _no_padding(m, "store")
    box = data.reshape(*reversed(m.counts[1:]), m.row_bytes)
    _window(w, m, "a tensor store", inside)[...] = box[place]
    if found is not None and found.shadow is not None:
        _bytes_of(m, found.shadow, found.start)[inside] = 1


def _no_padding(m: TensorMap, what: str) -> None:
    if m.spread:
        raise Fault("tensor_map", f"a tensor {what} of elements with padding is not modelled")


def reduce_box(w: Wave, m: TensorMap, coordinates: tuple[int, ...], data: Bytes, dtype: Any, apply: Any) -> None:
    """Combines a box with the tensor, element by element: `apply(old, new)` on arrays of `dtype`."""
    inside, place = _cut(m, coordinates, True)
    if not all(s.stop > s.start for s in inside):
        return
    found = w.launch.memory.find(m.address, m.address)
    if found is not None and found.readonly:
        raise Fault("readonly", f"a reduction into {found.name}, which was marked read-only", address=m.address)
    check_written(w, m, coordinates, "reduction into")
    _no_padding(m, "reduction")
    window = _window(w, m, "a tensor reduction", inside)
    box = data.reshape(*reversed(m.counts[1:]), m.row_bytes)[place]
    old = np.ascontiguousarray(window).view(dtype)
    window[...] = np.asarray(apply(old, np.ascontiguousarray(box).view(dtype)), dtype).view(np.uint8)


def check_written(w: Wave, m: TensorMap, coordinates: tuple[int, ...], what: str = "load") -> None:
    """Raises Fault if a tensor copy would read global bytes that were marked as never written."""
    found = w.launch.memory.find(m.address, m.address)
    if found is None or not found.must_be_written or found.shadow is None:
        return
    inside, _ = _cut(m, coordinates)
    if not _bytes_of(m, found.shadow, found.start)[inside].all():
        raise Fault("uninitialised", f"a tensor {what} reads elements of {found.name} before they were written")
