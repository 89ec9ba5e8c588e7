"""Tensor copies of the virtual GPU move exactly the bytes that the tensor map says.

Faults this catches: a wrong stride, box order, swizzle, fill value or clipping, and a copy that signals the wrong
number of bytes. Expectations walk over the box element by element.
"""

# ruff: noqa: E501  (PTX text)
from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_numerics.virtual_gpu import virtual_gpu
from moe_numerics.virtual_gpu.tensor_map import TensorMap, decode, encode

SHARED = 8192
HEAD = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .align 64 .b8 map[128], .param .u64 data, .param .u32 bytes, .param .b32 c0, .param .b32 c1,
    .param .b32 c2, .param .b32 c3, .param .b32 c4)
{
    .reg .b32 %r<16>, %x, %y<5>, %n;
    .reg .b64 %m, %d, %s;
    .reg .pred %p, %q;
    .shared .align 1024 .b8 tile[8192];
    .shared .align 8 .b64 bar;
    mov.b64 %m, map;
    ld.param.u64 %d, [data];
    ld.param.u32 %n, [bytes];
    ld.param.b32 %y0, [c0];
    ld.param.b32 %y1, [c1];
    ld.param.b32 %y2, [c2];
    ld.param.b32 %y3, [c3];
    ld.param.b32 %y4, [c4];
    mov.u32 %x, %tid.x;
    mov.u32 %r1, tile;
    mov.u32 %r2, bar;
    setp.eq.u32 %p, %x, 0;
    shl.b32 %r4, %x, 2;
    add.u32 %r5, %r1, %r4;
    cvt.u64.u32 %s, %r4;
    add.u64 %d, %d, %s;
"""
LOAD = """    @%p mbarrier.init.shared.b64 [%r2], 1;
    bar.sync 0;
    @!%p bra WAIT;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r2], %n;
    cp.async.bulk.tensor.{rank}d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1], [%m, {{{coordinates}}}], [%r2];
WAIT:
    mbarrier.try_wait.parity.shared.b64 %q, [%r2], 0;
    @!%q bra WAIT;
LOOP:
    setp.ge.u32 %q, %r4, %n;
    @%q bra DONE;
    ld.shared.u32 %r6, [%r5];
    st.global.u32 [%d], %r6;
    add.u32 %r4, %r4, 128;
    add.u32 %r5, %r5, 128;
    add.u64 %d, %d, 128;
    bra LOOP;
DONE:
    ret;
}}
"""
STORE = """LOOP:
    setp.ge.u32 %q, %r4, %n;
    @%q bra DONE;
    ld.global.u32 %r6, [%d];
    st.shared.u32 [%r5], %r6;
    add.u32 %r4, %r4, 128;
    add.u32 %r5, %r5, 128;
    add.u64 %d, %d, 128;
    bra LOOP;
DONE:
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @!%p bra END;
    cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group [%m, {{{coordinates}}}], [%r1];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
END:
    ret;
}}
"""
KIND_OF_BYTES = {1: 0, 2: 1, 4: 2}


@st.composite
def tiles(draw: st.DrawFn) -> tuple[TensorMap, tuple[int, ...], int]:
    """A tensor map with address 0, coordinates that may lie outside, and the element's bytes."""
    element = draw(st.sampled_from([1, 2, 4]))
    rank = draw(st.integers(1, 5))
    swizzle = draw(st.integers(0, 3))
    widest = {0: 128, 1: 32, 2: 64, 3: 128}[swizzle]
    row = draw(st.sampled_from([w for w in (16, 32, 64, 128) if w <= widest]))
    box = [row // element]
    for _ in range(rank - 1):
        most = SHARED // (row * int(np.prod(box[1:])))
        box.append(draw(st.integers(1, max(1, min(6, most)))))
    sizes = [draw(st.integers(1, 2 * box[0] + 3))] + [draw(st.integers(1, b + 3)) for b in box[1:]]
    strides, span = [], -(-sizes[0] * element // 16) * 16
    for size in sizes[1:]:
        span += 16 * draw(st.integers(0, 2))
        strides.append(span)
        span *= size
    coordinates = tuple(draw(st.integers(-b - 1, s + 1)) for b, s in zip(box, sizes, strict=True))
    described = TensorMap(0, 8 * element, tuple(sizes), tuple(strides), tuple(box), swizzle, KIND_OF_BYTES[element])
    return described, coordinates, element


def places(m: TensorMap, element: int, coordinates: tuple[int, ...]) -> list[tuple[int, int | None]]:
    """For each byte of the box in shared memory, its offset there and the offset in the tensor (None: outside)."""
    found = []
    order = itertools.product(*(range(b) for b in reversed(m.box)))
    mask = {0: 0, 1: 1, 2: 3, 3: 7}[m.swizzle]
    for n, reversed_index in enumerate(order):
        index = [c + i for c, i in zip(coordinates, reversed(reversed_index), strict=True)]
        inside = all(0 <= i < s for i, s in zip(index, m.sizes, strict=True))
        start = index[0] * element + sum(i * s for i, s in zip(index[1:], m.strides, strict=True))
        for k in range(element):
            flat = n * element + k
            # The tile begins at a multiple of 1024, so that offsets stand for addresses.
            found.append((flat ^ ((flat >> 7 & mask) << 4), start + k if inside else None))
    return found


def placed(m: TensorMap, address: int) -> TensorMap:
    return TensorMap(address, m.bits, m.sizes, m.strides, m.box, m.swizzle, m.kind)


def tensor_bytes(m: TensorMap, element: int, seed: int) -> torch.Tensor:
    rng = np.random.Generator(np.random.Philox(seed))
    span = m.sizes[0] * element + sum((n - 1) * s for n, s in zip(m.sizes[1:], m.strides, strict=True))
    raw = torch.empty(span + 64, dtype=torch.uint8)
    # Tensor maps need an address that is a multiple of 16.
    start = -raw.data_ptr() % 16
    out = raw[start : start + span]
    out.copy_(torch.from_numpy(rng.integers(1, 256, span, np.uint8)))
    return out


@given(tile=tiles(), seed=st.integers(0, 99), schedule=st.sampled_from(["fast", 1, 2, 3]))
def test_tensor_load_brings_the_box(
    tile: tuple[TensorMap, tuple[int, ...], int], seed: int, schedule: str | int
) -> None:
    """Fault: an element lands elsewhere, or what lies outside the tensor is not zero."""
    m, coordinates, element = tile
    data = tensor_bytes(m, element, seed)
    size = m.box_bytes
    padded = -(-size // 4) * 4
    out = torch.zeros(padded, dtype=torch.uint8)
    text = HEAD + LOAD.format(rank=m.rank, coordinates=", ".join(f"%y{n}" for n in range(m.rank)))
    with virtual_gpu("sm_90a", schedule=schedule) as gpu:
        gpu.allocate(data)
        gpu.readonly(data)
        arguments = [encode(placed(m, data.data_ptr())), out, size, *coordinates, *([0] * (5 - m.rank))]
        gpu.launch(text, "k", 1, 32, arguments)
        assert gpu.findings == []
    for where, source in places(m, element, coordinates):
        wanted = 0 if source is None else int(data[source])
        assert int(out[where]) == wanted, (where, source)


@given(tile=tiles(), seed=st.integers(0, 99), schedule=st.sampled_from(["fast", 1, 2, 3]))
def test_tensor_store_writes_the_inside_only(
    tile: tuple[TensorMap, tuple[int, ...], int], seed: int, schedule: str | int
) -> None:
    """Fault: a store that is not clipped, or that permutes the box."""
    m, coordinates, element = tile
    target = tensor_bytes(m, element, seed)
    before = target.clone()
    rng = np.random.Generator(np.random.Philox(seed + 1000))
    image = torch.from_numpy(rng.integers(0, 256, -(-m.box_bytes // 4) * 4, np.uint8))
    text = HEAD + STORE.format(rank=m.rank, coordinates=", ".join(f"%y{n}" for n in range(m.rank)))
    with virtual_gpu("sm_90a", schedule=schedule) as gpu:
        gpu.allocate(target)
        arguments = [encode(placed(m, target.data_ptr())), image, m.box_bytes, *coordinates, *([0] * (5 - m.rank))]
        gpu.launch(text, "k", 1, 32, arguments)
        assert gpu.findings == []
    for where, destination in places(m, element, coordinates):
        if destination is not None:
            before[destination] = image[where]
    assert torch.equal(target, before)


@given(tile=tiles(), address=st.integers(0, 2**48).map(lambda a: a * 16))
def test_tensor_maps_survive_encoding(tile: tuple[TensorMap, tuple[int, ...], int], address: int) -> None:
    """Fault: a field of the tensor map is put or read at another place."""
    m = placed(tile[0], address)
    assert decode(encode(m)) == m


CLUSTER = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .align 64 .b8 map[128], .param .u64 out, .param .u32 mask)
{
    .reg .b32 %r<12>, %x, %rank;
    .reg .b64 %m, %d, %s;
    .reg .b16 %h;
    .reg .pred %p, %q;
    .shared .align 1024 .b8 tile[128];
    .shared .align 8 .b64 bar;
    mov.b64 %m, map;
    ld.param.u64 %d, [out];
    ld.param.u32 %r7, [mask];
    cvt.u16.u32 %h, %r7;
    mov.u32 %x, %tid.x;
    mov.u32 %rank, %cluster_ctarank;
    mov.u32 %r1, tile;
    mov.u32 %r2, bar;
    setp.eq.u32 %p, %x, 0;
    @%p mbarrier.init.shared.b64 [%r2], 1;
    @%p fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    @%p mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 128;
    setp.eq.and.u32 %q, %rank, 1, %p;
    mov.u32 %r5, 0;
    @%q cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%r1], [%m, {%r5}], [%r2], %h;
WAIT:
    mbarrier.try_wait.parity.shared.b64 %q, [%r2], 0;
    @!%q bra WAIT;
    shl.b32 %r4, %x, 2;
    add.u32 %r5, %r1, %r4;
    ld.shared.u32 %r6, [%r5];
    mad.lo.u32 %r4, %rank, 128, %r4;
    cvt.u64.u32 %s, %r4;
    add.u64 %d, %d, %s;
    st.global.u32 [%d], %r6;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    ret;
}
"""


@pytest.mark.parametrize("schedule", ["fast", 1, 2, 3, 4])
def test_multicast_reaches_every_block_of_the_mask(schedule: str | int) -> None:
    """Fault: a multicast copy reaches one block only, or signals another block's barrier."""
    data = torch.arange(32, dtype=torch.int32)
    m = TensorMap(data.data_ptr(), 32, (32,), (), (32,), 0, 2)
    out = torch.zeros(4, 32, dtype=torch.int32)
    with virtual_gpu("sm_90a", schedule=schedule) as gpu:
        gpu.allocate(data)
        gpu.launch(CLUSTER, "k", 4, 32, [encode(m), out, 15], cluster=4)
        assert gpu.findings == []
    assert torch.equal(out, data.expand(4, 32))
