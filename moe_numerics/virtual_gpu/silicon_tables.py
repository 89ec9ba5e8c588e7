"""Bit-exact models of the approximate instructions, from tables captured on hardware.

`ex2`, `lg2`, `rcp`, `rsqrt`, `sqrt` and `tanh` of float32 look up a table over the bits that the unit uses, then place
the exponent as its expansion in machine code does. The tables hold results, stored as second differences: small
numbers that depend on no library's rounding. `ex2` and `tanh` of the 16-bit types hold every result.

The models work on tensors of bits, on a CPU or a CUDA device; importing this module makes the virtual GPU use them.
"""

from __future__ import annotations

import lzma
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = [
    "ARCHITECTURES",
    "FUNCTIONS",
    "HALVES",
    "decode_table",
    "encode_table",
    "evaluate",
    "evaluate_half",
    "install",
    "stored",
]

ARCHITECTURES = ("sm_90a",)
FUNCTIONS = ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "tanh")
HALVES = ("ex2.f16", "ex2.bf16", "tanh.f16", "tanh.bf16")

FOLDER = Path(__file__).parent / "tables"

_SIGN = -(2**31)
_INF = 0x7F800000
_NAN = 0x7FFFFFFF
_ONE = 0x3F800000
_TINY = 0x00800000

TANH_FIRST = 119
"""The exponent field of the smallest inputs whose `tanh` is not the input itself, 2^-8."""
TANH_DROPPED = (6, 6, 6, 5, 5, 4, 4, 4, 3, 2, 3)
"""How many low bits of the significand do not matter, for each exponent from there to 2^2."""


def encode_table(values: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """A table of integers below 2^32 as compressed bytes: second differences in a byte each, larger ones listed."""
    second = np.diff(values, n=2, prepend=np.zeros(2, np.int64))
    large = np.flatnonzero(np.abs(second) > 127)
    small = second.copy()
    small[large] = 0
    head = np.array([values.size, large.size], np.int64)
    data = head.tobytes() + large.tobytes() + second[large].tobytes() + small.astype(np.int8).tobytes()
    return np.frombuffer(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME), np.uint8)


def decode_table(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """What `encode_table` was given."""
    raw = lzma.decompress(data.tobytes())
    size, count = np.frombuffer(raw, np.int64, 2)
    where = np.frombuffer(raw, np.int64, int(count), 16)
    large = np.frombuffer(raw, np.int64, int(count), 16 + 8 * int(count))
    second = np.frombuffer(raw, np.int8, int(size), 16 + 16 * int(count)).astype(np.int64)
    second[where] = large
    return np.cumsum(np.cumsum(second))


@lru_cache(maxsize=32)
def _table(arch: str, name: str, device: str) -> torch.Tensor:
    """One table as int32 on a device."""
    if device != "cpu":
        return _table(arch, name, "cpu").to(device)
    with np.load(FOLDER / f"{arch}.npz") as file:
        values = decode_table(file[name])
    return torch.from_numpy(values.astype(np.uint32).view(np.int32))


def stored(arch: str, name: str, first: int, last: int) -> npt.NDArray[np.int64]:
    """Entries `first` to before `last` of a table, as `encode_table` was given them."""
    return _table(arch, name, "cpu")[first:last].numpy().view(np.uint32).astype(np.int64)


def _lookup(arch: str, name: str, index: torch.Tensor) -> torch.Tensor:
    return _table(arch, name, str(index.device))[index]


def _floats(bits: torch.Tensor) -> torch.Tensor:
    return bits.view(torch.float32)


def _scaled(bits: torch.Tensor, factor: float | torch.Tensor) -> torch.Tensor:
    """A product in float32, subnormals kept."""
    return (_floats(bits) * factor).view(torch.int32)


def _magnitude(bits: torch.Tensor) -> torch.Tensor:
    return bits & 0x7FFFFFFF


def _flushed(bits: torch.Tensor) -> torch.Tensor:
    return torch.where(_magnitude(bits) < _TINY, bits & _SIGN, bits)


def _rcp(arch: str, bits: torch.Tensor) -> torch.Tensor:
    magnitude = _magnitude(bits)
    result = _lookup(arch, "rcp", magnitude & 0x7FFFFF) + ((127 - (magnitude >> 23)) << 23)
    result = torch.where((result < _TINY) | (magnitude == _INF), 0, result)
    result = torch.where(magnitude < _TINY, _INF, result)
    return torch.where(magnitude > _INF, _NAN, result | (bits & _SIGN))


def _by_four(arch: str, name: str, bits: torch.Tensor, direction: int) -> torch.Tensor:
    """A function of x = m * 4^k, whose result scales with 2^k or 2^-k: m from 1 to 4 is in the table."""
    exponent = (bits >> 23) - 127
    k = exponent >> 1
    found = _lookup(arch, name, ((exponent - 2 * k) << 23 | (bits & 0x7FFFFF)) & 0xFFFFFF)
    return found + direction * (k << 23)


def _rsqrt(arch: str, bits: torch.Tensor) -> torch.Tensor:
    result = _by_four(arch, "rsqrt", _magnitude(bits), -1)
    result = torch.where(bits == _INF, 0, torch.where(bits < 0, _NAN, result))
    result = torch.where(_magnitude(bits) < _TINY, _INF | (bits & _SIGN), result)
    return torch.where(_magnitude(bits) > _INF, _NAN, result)


def _sqrt(arch: str, bits: torch.Tensor) -> torch.Tensor:
    result = _by_four(arch, "sqrt", _magnitude(bits), 1)
    result = torch.where(bits == _INF, _INF, torch.where(bits < 0, _NAN, result))
    result = torch.where(_magnitude(bits) < _TINY, bits & _SIGN, result)
    return torch.where(_magnitude(bits) > _INF, _NAN, result)


def _ex2(arch: str, bits: torch.Tensor) -> torch.Tensor:
    """x in fixed point with 23 bits of fraction; a negative one is complemented, whole numbers apart."""
    magnitude = _magnitude(bits)
    shift = ((magnitude >> 23) - 127).clamp(-31, 6)
    significand = (magnitude & 0x7FFFFF) | 0x800000
    fixed = torch.where(shift >= 0, significand << shift.clamp(min=0), significand >> (-shift).clamp(min=0))
    negative = bits < 0
    fixed = torch.where(negative, torch.where((fixed & 0x7FFFFF) == 0, -fixed, ~fixed), fixed)
    result = _lookup(arch, "ex2", fixed & 0x7FFFFF) + ((fixed >> 23) << 23)
    result = torch.where(result < _TINY, 0, result)
    result = torch.where(magnitude >= 0x43000000, torch.where(negative, torch.zeros_like(bits), _INF), result)
    return torch.where(magnitude > _INF, _NAN, result)


def _lg2(arch: str, bits: torch.Tensor) -> torch.Tensor:
    """Between 1/2 and 2 from the table; elsewhere the whole part and 23 bits of fraction, cut to 24 bits."""
    magnitude = _magnitude(bits)
    significand = magnitude & 0x7FFFFF
    exponent = (magnitude >> 23) - 127
    above = exponent >= 0
    near = torch.where(above, _lookup(arch, "lg2.above", significand), _lookup(arch, "lg2.below", significand))
    fraction = torch.floor(_floats(_magnitude(near)) * 2.0**23).to(torch.int32)
    whole = torch.where(above, exponent, -1 - exponent)
    total = (whole << 23) + fraction
    dropped = sum((whole >= 1 << n).to(torch.int32) for n in range(1, 7))
    cut = (((total >> dropped) << dropped).to(torch.float32) * 2.0**-23).view(torch.int32)
    result = torch.where(whole == 0, near, torch.where(above, cut, cut | _SIGN))
    result = torch.where(bits == _INF, _INF, torch.where(bits < 0, _NAN, result))
    result = torch.where(magnitude < _TINY, _INF | _SIGN, result)
    return torch.where(magnitude > _INF, _NAN, result)


def _tanh(arch: str, bits: torch.Tensor) -> torch.Tensor:
    magnitude = _magnitude(bits)
    binade = ((magnitude >> 23) - TANH_FIRST).clamp(0, len(TANH_DROPPED) - 1)
    device = bits.device
    dropped = torch.tensor(TANH_DROPPED, dtype=torch.int32, device=device)
    sizes = [1 << (23 - n) for n in TANH_DROPPED]
    first = torch.tensor([sum(sizes[:n]) for n in range(len(sizes))], dtype=torch.int32, device=device)
    result = _lookup(arch, "tanh", first[binade] + ((magnitude & 0x7FFFFF) >> dropped[binade]))
    result = torch.where(magnitude < TANH_FIRST << 23, magnitude, result)
    result = torch.where(magnitude >= (TANH_FIRST + len(TANH_DROPPED)) << 23, _ONE, result)
    return torch.where(magnitude > _INF, _NAN, result | (bits & _SIGN))


_UNIT: dict[str, Callable[[str, torch.Tensor], torch.Tensor]] = {
    "ex2": _ex2, "lg2": _lg2, "rcp": _rcp, "rsqrt": _rsqrt, "sqrt": _sqrt, "tanh": _tanh,
}  # fmt: skip


def _unflushed(arch: str, name: str, bits: torch.Tensor) -> torch.Tensor:
    """The expansion without `.ftz`: operands are scaled into the normal range and results back."""
    unit = _UNIT[name]
    magnitude = _magnitude(bits)
    small = magnitude < _TINY
    if name == "ex2":
        low = (bits < 0) & (magnitude > 0x42FC0000) & (magnitude <= _INF)
        result = unit(arch, _flushed(torch.where(low, _scaled(bits, 0.5), bits)))
        return torch.where(low, _scaled(result, _floats(result)), result)
    if name == "rcp":
        large = (magnitude > 0x7E800000) & (magnitude <= _INF)
        factor = torch.where(small, 2.0**24, torch.where(large, 0.25, 1.0)).to(torch.float32)
        return _scaled(unit(arch, _scaled(bits, factor)), factor)
    scaled = torch.where(small, _scaled(bits, 2.0**24), bits)
    result = unit(arch, scaled)
    if name == "lg2":
        return torch.where(small, (_floats(result) - 24.0).view(torch.int32), result)
    if name in ("rsqrt", "sqrt"):
        return torch.where(small, _scaled(result, 2.0**12 if name == "rsqrt" else 2.0**-12), result)
    return unit(arch, bits)


def evaluate(arch: str, name: str, bits: torch.Tensor, ftz: bool) -> torch.Tensor:
    """What `name.approx{.ftz}.f32` gives on silicon of `arch`: int32 bits for int32 bits, NaN is 0x7fffffff.

    name: one of FUNCTIONS; `tanh` has no `.ftz`. FileNotFoundError: no tables of that architecture.
    """
    result = _flushed(_UNIT[name](arch, _flushed(bits))) if ftz else _unflushed(arch, name, bits)
    return torch.where(_magnitude(result) > _INF, _NAN, result)


def evaluate_half(arch: str, name: str, codes: torch.Tensor) -> torch.Tensor:
    """What `ex2` or `tanh` of a 16-bit type gives: codes below 65536 for such codes. name: one of HALVES."""
    return _lookup(arch, name, codes)


def _correction(arch: str, name: str, ftz: bool) -> Callable[..., npt.NDArray[np.float32]]:
    def correct(x: npt.NDArray[np.float32], rounded: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        shape = np.shape(x)
        bits = torch.from_numpy(np.ascontiguousarray(x).reshape(-1).view(np.int32))
        return evaluate(arch, name, bits, ftz).numpy().view(np.float32).reshape(shape)

    return correct


def _correction_of_codes(arch: str, name: str) -> Callable[..., Any]:
    def correct(codes: npt.NDArray[np.uint16], rounded: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
        index = torch.from_numpy(np.ascontiguousarray(codes).reshape(-1).astype(np.int64))
        return evaluate_half(arch, name, index).numpy().astype(np.uint16).reshape(np.shape(codes))

    return correct


def install() -> None:
    """Makes the virtual GPU use the tables of every architecture that has them."""
    from . import approximate

    for arch in ARCHITECTURES:
        if (FOLDER / f"{arch}.npz").exists():
            for name in FUNCTIONS:
                approximate.load(arch, name, _correction(arch, name, False))
                approximate.load(arch, f"{name}.ftz", _correction(arch, name, True))
            for name in HALVES:
                approximate.load(arch, name, _correction_of_codes(arch, name))


install()
