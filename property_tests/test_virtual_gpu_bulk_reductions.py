"""Bulk and tensor reductions to global memory combine every element once, as their type and operation say.

Faults these tests catch: another operation or signedness, a sum that flushes subnormals, an element that is skipped,
stored instead of combined, or combined twice, and blocks whose reductions overwrite each other's.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_numerics.virtual_gpu import VirtualGPUError, tensor_map, virtual_gpu

KERNEL = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 out, .param .u64 data, .param .align 64 .b8 map[128])
{{
    .reg .b32 %t, %tile, %mine, %v;
    .reg .b64 %o, %d, %m;
    .reg .pred %p;
    .shared .align 128 .b8 tile[128];
    ld.param.u64 %o, [out];
    ld.param.u64 %d, [data];
    mov.b64 %m, map;
    mov.u32 %t, %tid.x;
    mov.u32 %tile, tile;
    mad.lo.u32 %mine, %t, 4, %tile;
    mad.wide.u32 %d, %t, 4, %d;
    ld.global.b32 %v, [%d];
    st.shared.b32 [%mine], %v;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    setp.ne.u32 %p, %t, 0;
    @%p bra DONE;
    {reduction};
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
DONE:
    ret;
}}
"""
BYTES = "cp.reduce.async.bulk.global.shared::cta.bulk_group.{} [%o], [%tile], 128"
TILE = "cp.reduce.async.bulk.tensor.1d.global.shared::cta.{}.tile.bulk_group [%m, {{0}}], [%tile]"
Words = np.ndarray
SCHEDULES = ("fast", 1, 2, 3)


def _increment(old: Words, limit: Words) -> Words:
    return np.where(old >= limit, 0, old + 1)


def _decrement(old: Words, limit: Words) -> Words:
    return np.where((old == 0) | (old > limit), limit, old - 1)


OPERATIONS: dict[str, tuple[type[np.generic], Callable[[Words, Words], Words]]] = {
    "add.u32": (np.uint32, np.add),
    "add.s32": (np.int32, np.add),
    "add.u64": (np.uint64, np.add),
    "min.u32": (np.uint32, np.minimum),
    "max.u32": (np.uint32, np.maximum),
    "min.s32": (np.int32, np.minimum),
    "max.s64": (np.int64, np.maximum),
    "inc.u32": (np.uint32, _increment),
    "dec.u32": (np.uint32, _decrement),
    "and.b32": (np.uint32, np.bitwise_and),
    "or.b64": (np.uint64, np.bitwise_or),
    "xor.b32": (np.uint32, np.bitwise_xor),
    "add.f32": (np.float32, np.add),
    "add.f64": (np.float64, np.add),
    "add.noftz.f16": (np.float16, np.add),
}


def _operands(kind: type[np.generic], seed: int) -> tuple[Words, Words]:
    """128 bytes of what is there and of what comes; some equal and zero, floats finite, subnormals among them."""
    rng = np.random.Generator(np.random.Philox(seed))
    old, new = (rng.integers(0, 256, 128, np.uint8).view(kind).copy() for _ in range(2))
    if issubclass(kind, np.floating):
        small = np.finfo(kind).tiny * rng.uniform(-2, 2, (2, old.size))
        old, new = (np.where(rng.random(old.size) < 0.5, each, 0.0).astype(kind) for each in small)
        new = np.where(rng.random(new.size) < 0.3, rng.standard_normal(new.size), new).astype(kind)
    else:
        old[0], new[1] = 0, 0
        new[2] = old[2]
    return old, new


def _reduce(
    reduction: str, old: Words, new: Words, blocks: int, schedule: str | int, code: int = tensor_map.TF32 + 7
) -> Words:
    """What `blocks` blocks leave that each combine `new` with `old`; code: the type of a tensor map's elements."""
    out = torch.from_numpy(old.view(np.uint8).copy())
    data = torch.from_numpy(new.view(np.uint8).copy())
    with virtual_gpu("sm_90a", schedule=schedule) as gpu:
        bits = tensor_map.ELEMENT_BITS[code]
        described = tensor_map.TensorMap(out.data_ptr(), bits, (1024 // bits,), (), (1024 // bits,), 0, code)
        arguments = [out, data, tensor_map.encode(described)]
        gpu.launch(KERNEL.format(reduction=reduction), "k", blocks, 32, arguments)
        assert gpu.findings == []
    return out.numpy().view(old.dtype)


@pytest.mark.parametrize("operation", OPERATIONS)
@given(seed=st.integers(0, 2**32), schedule=st.sampled_from(SCHEDULES))
def test_every_element_is_combined_once(operation: str, seed: int, schedule: str | int) -> None:
    kind, apply = OPERATIONS[operation]
    old, new = _operands(kind, seed)
    got = _reduce(BYTES.format(operation), old, new, 1, schedule)
    np.testing.assert_array_equal(got.view(np.uint8), apply(old, new).astype(kind).view(np.uint8))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_reductions_of_several_blocks_all_count(schedule: str | int) -> None:
    old, new = _operands(np.uint32, 7)
    np.testing.assert_array_equal(_reduce(BYTES.format("add.u32"), old, new, 3, schedule), old + 3 * new)


def _flushed(x: Words) -> Words:
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


OF_TYPES: dict[str, tuple[type[np.generic], str]] = {
    "u32": (np.uint32, "add min max inc dec and or xor"),
    "s32": (np.int32, "add min max and or xor"),
    "u64": (np.uint64, "add min max and or xor"),
    "s64": (np.int64, "min max"),
    "f16": (np.float16, "add min max"),
    **dict.fromkeys(("f32", "f32.ftz", "tf32", "tf32.ftz"), (np.float32, "add")),
    "f64": (np.float64, "add"),
    "u8": (np.uint8, ""),
    "u16": (np.uint16, ""),
}
"""The operations of a tensor reduction that an H200 has for elements of a type; it stops at the others."""
APPLY = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "inc": _increment, "dec": _decrement,
}  # fmt: skip


@pytest.mark.parametrize("operation", APPLY)
@given(name=st.sampled_from(sorted(OF_TYPES)), seed=st.integers(0, 2**32), schedule=st.sampled_from(SCHEDULES))
def test_a_tensor_reduction_is_of_its_elements_type(operation: str, name: str, seed: int, schedule: str | int) -> None:
    """Only sums of float32 marked `.ftz` flush; what a type has no operation for is refused."""
    kind, known = OF_TYPES[name]
    code = next(c for c, known_name in tensor_map.ELEMENT_TYPE.items() if known_name == name)
    old, new = _operands(kind, seed)
    if operation not in known.split():
        with pytest.raises(VirtualGPUError, match=f"cannot {operation} elements of type {name}"):
            _reduce(TILE.format(operation), old, new, 1, schedule, code)
        return
    got = _reduce(TILE.format(operation), old, new, 1, schedule, code)
    flushes = _flushed if name.endswith(".ftz") else lambda x: x
    want = flushes(APPLY[operation](flushes(old), flushes(new)).astype(kind))
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))
