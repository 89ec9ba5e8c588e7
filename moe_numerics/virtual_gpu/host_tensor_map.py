"""`cuTensorMapEncodeTiled` for host code that makes its tensor maps with the driver (CUDA driver API, 6.30)."""

from __future__ import annotations

import ctypes

from . import tensor_map
from .errors import Fault, error

_CODES = {driver: code for code, driver in tensor_map.DRIVER_TYPE.items()}


def encode_tiled(
    kind: int, rank: int, address: int, sizes: int, strides: int, box: int, steps: int, interleave: int, swizzle: int,
    promotion: int, fill: int,
) -> bytes:  # fmt: skip
    """The 128 bytes of a tensor map; `sizes`, `strides` (uint64), `box` and `steps` (uint32) are addresses of arrays.

    promotion: of cache lines, which changes no value. VirtualGPUError: what is not modelled, or not possible.
    """
    dims = tuple((ctypes.c_uint64 * rank).from_address(sizes))
    bytes_apart = tuple((ctypes.c_uint64 * (rank - 1)).from_address(strides)) if rank > 1 else ()
    boxes, element_strides = (tuple((ctypes.c_uint32 * rank).from_address(values)) for values in (box, steps))
    if kind not in _CODES or interleave or swizzle not in tensor_map.SWIZZLE_MASK:
        raise error(
            "tensor_map",
            f"a tensor map of type {kind}, interleave {interleave} and swizzle {swizzle} is not modelled",
        )
    code = _CODES[kind]
    described = tensor_map.TensorMap(
        address, tensor_map.ELEMENT_BITS[code], dims, bytes_apart, boxes, swizzle, code, element_strides, bool(fill)
    )
    try:
        tensor_map.check(described)
    except Fault as fault:
        raise error(fault.kind, fault.message) from fault
    return tensor_map.encode(described)
