"""Arguments for functions that were compiled with fake tensors whose sizes have other widths than the DSL packs.

Built with `--enable-tvm-ffi`, such a function takes sizes of any width. Without it the DSL packs 32-bit sizes and
64-bit strides of a tensor, whatever the function was compiled for, and the kernel would read others.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import torch

_PACKED = {"shape": 32, "stride": 64}


def _dynamic(fake: Any) -> Iterator[tuple[str, int, int]]:
    """(shape or stride, dimension, width in bits) of what a fake tensor leaves to the call, in memory order."""
    for name in _PACKED:
        for n, value in enumerate(getattr(fake, name)):
            if hasattr(value, "width"):
                yield name, n, value.width


def unusual(fake: Any) -> bool:
    """Whether a tensor of this description needs another packing than the DSL's."""
    return any(width != _PACKED[name] for name, _, width in _dynamic(fake))


class PackedTensor:
    """A tensor as the host code takes it: its address, then the sizes and strides that the compilation left open."""

    def __init__(self, tensor: torch.Tensor, fake: Any) -> None:
        raw = bytearray(struct.pack("<Q", tensor.data_ptr()))
        for name, n, width in _dynamic(fake):
            value = tensor.shape[n] if name == "shape" else tensor.stride(n)
            raw += bytes(-len(raw) % (width // 8)) + struct.pack("<q" if width == 64 else "<i", value)
        self._buffer = ctypes.create_string_buffer(bytes(raw), len(raw) + 8)

    def __c_pointers__(self) -> list[int]:
        return [ctypes.addressof(self._buffer)]


def is_tensor(value: object) -> bool:
    """Whether an argument is a tensor of some kind: PyTorch's, the DSL's, or a fake one."""
    return isinstance(value, torch.Tensor) or (hasattr(value, "element_type") and hasattr(value, "stride"))


def adapted(fakes: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """`given` with the PyTorch tensors packed as the compilation expects, where that is not what the DSL does.

    fakes: the tensors that the function was compiled with, in order.
    """
    places = [n for n, value in enumerate(given) if is_tensor(value)]
    out = list(given)
    if len(places) != len(fakes):
        return out
    for n, fake in zip(places, fakes, strict=True):
        if isinstance(given[n], torch.Tensor) and not isinstance(fake, torch.Tensor) and unusual(fake):
            out[n] = PackedTensor(given[n], fake)
    return out
