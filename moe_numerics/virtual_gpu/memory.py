"""Memory of the virtual GPU: known allocations, address windows, bounds, alignment and written-byte shadows.

Global memory is the process's own memory: an address is valid only inside a registered allocation. Shared and local
memory are buffers of the running wave. Generic addresses of the latter lie in windows above the user address space.
"""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .errors import Fault
from .registry import Index

if TYPE_CHECKING:
    from .wave import Wave

Array = npt.NDArray[Any]
Offsets = npt.NDArray[np.int64]

SHARED_WINDOW = 1 << 56
LOCAL_WINDOW = 1 << 57
RANK_SHIFT = 24
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_STORED = {1: np.uint8(1), 2: np.uint16(0x0101), 4: np.uint32(0x01010101), 8: np.uint64(0x0101010101010101)}
SHIFT = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4}


class Region:
    """Bytes that can be read and written by offset, seen in any item size.

    shadow: one byte for each byte of the region, 1 where it holds a defined value; None: all of it does.
    """

    def __init__(self, space: str, buffer: npt.NDArray[np.uint8], shadow: npt.NDArray[np.uint8] | None = None) -> None:
        self.space = space
        self.buffer = buffer
        self.shadow = shadow
        self.must_be_written = shadow is not None
        self._views: dict[int, Array] = {1: buffer}
        self._shadows: dict[int, Array] = {}

    def view(self, size: int) -> Array:
        if size not in self._views:
            usable = self.buffer.size // size * size
            self._views[size] = self.buffer[:usable].view(_UNSIGNED[size])
        return self._views[size]

    def shadow_view(self, size: int) -> Array:
        assert self.shadow is not None
        if size not in self._shadows:
            usable = self.shadow.size // size * size
            self._shadows[size] = self.shadow[:usable].view(_UNSIGNED[size])
        return self._shadows[size]

    def load(self, items: Offsets, size: int) -> Array:
        return self.view(size).take(items)

    def store(self, items: Offsets, size: int, values: Any) -> None:
        self.view(size)[items] = values
        if self.shadow is not None:
            self.shadow_view(size)[items] = _STORED[size]


class Allocation(Region):
    """A range of global memory that kernels may touch. `owner` keeps it alive.

    closed: one byte for each byte of the region, 1 where a store is an error; None: nowhere, but for `readonly`.
    """

    def __init__(self, base: int, size: int, name: str, owner: object, readonly: bool = False) -> None:
        # The buffer begins at a multiple of 16, so that item numbers follow from addresses by shifting.
        self.start = base & ~15
        span = (base - self.start + size + 15) // 16 * 16
        raw = (ctypes.c_uint8 * span).from_address(self.start)
        super().__init__("global", np.ctypeslib.as_array(raw))
        self.base = base
        self.size = size
        self.name = name
        self.owner = owner
        self.readonly = readonly
        self.closed: npt.NDArray[np.uint8] | None = None

    def track(self, defined: bool = True) -> npt.NDArray[np.uint8]:
        """The shadow of the bytes from `base` on, made if there is none, with all bytes defined or none of them."""
        if self.shadow is None:
            # Zeros are not touched until they are used, so that the shadow of a sparse buffer is sparse too.
            self.shadow = (np.ones if defined else np.zeros)(self.buffer.size, np.uint8)
            self._shadows = {}
        return self.shadow[self.base - self.start : self.base - self.start + self.size]


class Memory:
    """The allocations of a virtual GPU, by address."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._items: list[Allocation] = []

    def add(self, base: int, size: int, name: str, owner: object, readonly: bool = False) -> Allocation | None:
        """Registers `size` bytes at `base`; what is known already keeps its marks. None for nothing to register."""
        if size <= 0 or base == 0:
            return None
        known = self.find(base, base + size - 1)
        if known is not None:
            return known
        for other in list(self._overlapping(base, base + size)):
            # A smaller registration inside this one (or a stale one of freed memory) gives way.
            self.remove(other)
        new = Allocation(base, size, name, owner, readonly)
        at = bisect.bisect_left(self._bases, base)
        self._bases.insert(at, base)
        self._items.insert(at, new)
        return new

    def remove(self, allocation: Allocation) -> None:
        for at, item in enumerate(self._items):
            if item is allocation:
                del self._items[at], self._bases[at]
                return

    def __iter__(self) -> Iterator[Allocation]:
        return iter(self._items)

    def _overlapping(self, low: int, high: int) -> Iterator[Allocation]:
        for item in self._items:
            if item.base < high and low < item.base + item.size:
                yield item

    def find(self, low: int, high: int) -> Allocation | None:
        """The allocation that holds all bytes from `low` to `high`, both included."""
        at = bisect.bisect_right(self._bases, low) - 1
        if at >= 0:
            item = self._items[at]
            if high < item.base + item.size:
                return item
        return None

    def describe(self, address: int, size: int) -> str:
        """Where an address lies relative to the nearest allocation."""
        if not self._items:
            return "no tensor is known"

        def distance(item: Allocation) -> int:
            return max(item.base - address, address + size - (item.base + item.size), 0)

        near = min(self._items, key=distance)
        if address < near.base:
            return f"{near.base - address} bytes before the start of {near.name}"
        past = address - (near.base + near.size)
        if past >= 0:
            return f"{past} bytes past the end of {near.name}"
        return f"at byte {address - near.base} of {near.name}, whose {near.size} bytes end before the access does"


def position(i: Index, k: int) -> int:
    """The wave's number of the k-th thread of a fragment."""
    return k if i is None else int(i[k])


def first(mask: Array) -> int:
    return int(np.flatnonzero(mask)[0])


Part = tuple[Region, Offsets, Index]


def locate(w: Wave, i: Index, space: str, address: Array, size: int) -> list[Part]:
    """Splits an access of `size` bytes a thread by region.

    Gives (region, byte offsets, positions in the fragment; None for all). Raises Fault for a misaligned or foreign
    address.
    """
    bits = int(np.bitwise_or.reduce(address)) if address.size else 0
    if bits & (size - 1):
        k = first((address & np.uint64(size - 1)) != 0)
        a = int(address[k])
        raise Fault("misaligned", f"address {a:#x} is not a multiple of the access's {size} bytes", position(i, k), a)
    if space == "global":
        return _global(w, i, address, size)
    if space == "shared":
        return [_shared(w, i, address, size)]
    if space == "local":
        return [_local(w, i, address, size)]
    return _generic(w, i, address, size)


def _global(w: Wave, i: Index, address: Array, size: int) -> list[Part]:
    memory = w.launch.memory
    low, high = int(address.min()), int(address.max())
    item = memory.find(low, high + size - 1)
    if item is not None:
        return [(item, (address - np.uint64(item.start)).view(np.int64), None)]
    parts: list[Part] = []
    left = np.arange(address.size)
    while left.size:
        a = int(address[left[0]])
        item = memory.find(a, a + size - 1)
        if item is None:
            raise Fault(
                "out_of_bounds",
                f"{size} bytes at {a:#x} are outside every known allocation: {memory.describe(a, size)}",
                position(i, int(left[0])),
                a,
            )
        mine = address[left]
        inside = (mine >= np.uint64(item.base)) & (mine <= np.uint64(item.base + item.size - size))
        parts.append((item, (mine[inside] - np.uint64(item.start)).view(np.int64), left[inside]))
        left = left[~inside]
    return parts


def _shared(w: Wave, i: Index, address: Array, size: int) -> Part:
    rank = address >> np.uint64(RANK_SHIFT)
    low = address & np.uint64((1 << RANK_SHIFT) - 1)
    limit = w.shared_limit
    if int(low.max()) + size > limit or int(low.min()) < w.shared_begin:
        k = first((low + np.uint64(size) > np.uint64(limit)) | (low < np.uint64(w.shared_begin)))
        a = int(address[k])
        raise Fault(
            "out_of_bounds",
            f"{size} bytes at shared address {a:#x}: the block's shared memory lies from {w.shared_begin:#x} "
            f"to {limit:#x}",
            position(i, k),
            a,
        )
    return w.shared_region, w.shared_offset(i, rank, low), None


def _local(w: Wave, i: Index, address: Array, size: int) -> Part:
    limit = w.local_bytes
    if int(address.max()) + size > limit:
        k = first(address + np.uint64(size) > np.uint64(limit))
        a = int(address[k])
        raise Fault(
            "out_of_bounds",
            f"{size} bytes at local address {a:#x}: the thread has {limit} bytes",
            position(i, k),
            a,
        )
    thread = np.arange(w.threads, dtype=np.int64) if i is None else i
    return w.local_region, thread * limit + address.view(np.int64), None


def _generic(w: Wave, i: Index, address: Array, size: int) -> list[Part]:
    if int(address.max()) < SHARED_WINDOW:
        return _global(w, i, address, size)
    parts: list[Part] = []
    shared = (address >= np.uint64(SHARED_WINDOW)) & (address < np.uint64(LOCAL_WINDOW))
    local = (address >= np.uint64(LOCAL_WINDOW)) & (address < np.uint64(2 * LOCAL_WINDOW))
    for mask, base, inner in (
        (shared, SHARED_WINDOW, "shared"),
        (local, LOCAL_WINDOW, "local"),
        (~(shared | local), 0, "global"),
    ):
        chosen = np.flatnonzero(mask)
        if not chosen.size:
            continue
        threads = chosen if i is None else i[chosen]
        for region, offsets, sub in locate(w, threads, inner, address[chosen] - np.uint64(base), size):
            parts.append((region, offsets, chosen if sub is None else chosen[sub]))
    return parts


def load(w: Wave, i: Index, space: str, address: Array, size: int, count: int) -> list[Array]:
    """`count` items of `size` bytes a thread, as unsigned integers."""
    parts = locate(w, i, space, address, size * count)
    shift = SHIFT[size]
    w.launch.traffic(parts[0][0].space if parts else space, "read", address.size * size * count)
    out: list[Array] = []
    for region, offsets, where in parts:
        items = offsets >> shift if shift else offsets
        if region.must_be_written and w.checkers:
            check_written(w, i, region, items, size, count, where, address)
        if w.tracker is not None:
            w.tracker.access(w, i, where, region, offsets, size * count, "read")
        values = [region.load(items if k == 0 else items + k, size) for k in range(count)]
        if where is None:
            return values
        if not out:
            out = [np.empty(address.size, v.dtype) for v in values]
        for o, v in zip(out, values, strict=True):
            o[where] = v
    return out


def check_written(
    w: Wave, i: Index, region: Region, items: Offsets, size: int, count: int, where: Index, address: Array
) -> None:
    stored = _STORED[size]
    for k in range(count):
        good = region.shadow_view(size).take(items + k) == stored
        if not good.all():
            at = first(~good)
            at = at if where is None else int(where[at])
            name = getattr(region, "name", f"{region.space} memory")
            raise Fault(
                "uninitialised",
                f"{size * count} bytes of {name} are read before they were written",
                position(i, at),
                int(address[at]),
            )


def check_writable(region: Region, i: Index, where: Index, address: Array, size: int) -> None:
    """Refuses stores of `size` bytes at each address: all of a read-only allocation, some of a partly closed one."""
    if not isinstance(region, Allocation):
        return
    if region.readonly:
        at = 0 if where is None else int(where[0])
        a = int(address[at])
        raise Fault("readonly", f"a store to {region.name}, which was marked read-only", position(i, at), a)
    if region.closed is not None:
        mine = address if where is None else address[where]
        first_bytes = (mine - np.uint64(region.start)).astype(np.int64)
        # Rows are closed as a whole, so that an access is either open or reaches a closed byte at one of its ends.
        shut = (region.closed[first_bytes] | region.closed[first_bytes + size - 1]) != 0
        if shut.any():
            k = first(shut)
            at = k if where is None else int(where[k])
            raise Fault(
                "not_owned",
                f"a store to {region.name} outside of what the case owns",
                position(i, at),
                int(address[at]),
            )


def store(w: Wave, i: Index, space: str, address: Array, size: int, values: list[Any]) -> None:
    """Writes one item of `size` bytes for each entry of `values`, one after the other in memory."""
    count = len(values)
    parts = locate(w, i, space, address, size * count)
    shift = SHIFT[size]
    w.launch.traffic(parts[0][0].space if parts else space, "written", address.size * size * count)
    for region, offsets, where in parts:
        check_writable(region, i, where, address, size * count)
        items = offsets >> shift if shift else offsets
        mine = [v if where is None or v.ndim == 0 else v[where] for v in values]
        if w.tracker is not None:
            w.tracker.access(w, i, where, region, offsets, size * count, "write", (items, size, mine))
        # Threads in the order of their places do not meet.
        apart = w.tracker is None or w.strong or bool((items[1:] > items[:-1]).all())
        for k, v in enumerate(mine):
            at = items if k == 0 else items + k
            region.store(at, size, v)
            if not apart:
                lost = region.load(at, size) != v
                if lost.any():
                    n = first(lost)
                    w.tracker.conflict(w, position(i, n if where is None else int(where[n])), region, int(offsets[n]))
