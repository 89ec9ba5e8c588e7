"""Bulk reductions from shared to global memory combine every element once, as their type and operation say.

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

from moe_numerics.virtual_gpu import virtual_gpu

KERNEL = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 out, .param .u64 data)
{{
    .reg .b32 %t, %tile, %mine, %v;
    .reg .b64 %o, %d;
    .reg .pred %p;
    .shared .align 128 .b8 tile[128];
    ld.param.u64 %o, [out];
    ld.param.u64 %d, [data];
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
    cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation} [%o], [%tile], 128;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
DONE:
    ret;
}}
"""
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


def _reduce(operation: str, old: Words, new: Words, blocks: int, schedule: str | int) -> Words:
    out = torch.from_numpy(old.view(np.uint8).copy())
    data = torch.from_numpy(new.view(np.uint8).copy())
    with virtual_gpu("sm_90a", schedule=schedule) as gpu:
        gpu.launch(KERNEL.format(operation=operation), "k", blocks, 32, [out, data])
        assert gpu.findings == []
    return out.numpy().view(old.dtype)


@pytest.mark.parametrize("operation", OPERATIONS)
@given(seed=st.integers(0, 2**32), schedule=st.sampled_from(SCHEDULES))
def test_every_element_is_combined_once(operation: str, seed: int, schedule: str | int) -> None:
    kind, apply = OPERATIONS[operation]
    old, new = _operands(kind, seed)
    got = _reduce(operation, old, new, 1, schedule)
    np.testing.assert_array_equal(got.view(np.uint8), apply(old, new).astype(kind).view(np.uint8))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_reductions_of_several_blocks_all_count(schedule: str | int) -> None:
    old, new = _operands(np.uint32, 7)
    np.testing.assert_array_equal(_reduce("add.u32", old, new, 3, schedule), old + 3 * new)
