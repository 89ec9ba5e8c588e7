"""Tensor copies of the virtual GPU move exactly the bytes that the tensor map says.

Faults this catches: a wrong stride, box order, swizzle, fill value or clipping, and a copy that signals the wrong
number of bytes. Expectations walk over the box element by element.
"""

# ruff: noqa: E501  (PTX text)
from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_numerics.virtual_gpu import VirtualGPUError, virtual_gpu
from moe_numerics.virtual_gpu.tensor_map import TF32, TensorMap, decode, encode

SHARED = 8192
HEAD = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .align 64 .b8 map[128], .param .u64 data, .param .u32 span, .param .u32 bytes, .param .b32 c0, .param .b32 c1,
    .param .b32 c2, .param .b32 c3, .param .b32 c4)
{
    .reg .b32 %r<16>, %x, %y<5>, %n, %moved;
    .reg .b64 %m, %d, %s;
    .reg .pred %p, %q;
    .shared .align 1024 .b8 tile[8192];
    .shared .align 8 .b64 bar;
    mov.b64 %m, map;
    ld.param.u64 %d, [data];
    ld.param.u32 %n, [span];
    ld.param.u32 %moved, [bytes];
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
LOAD = """    mov.u32 %r7, %r4;
CLEAR:
    setp.ge.u32 %q, %r7, %n;
    @%q bra CLEARED;
    add.u32 %r8, %r1, %r7;
    st.shared.u32 [%r8], 0xA5A5A5A5;
    add.u32 %r7, %r7, 128;
    bra CLEAR;
CLEARED:
    fence.proxy.async.shared::cta;
    @%p mbarrier.init.shared.b64 [%r2], 1;
    bar.sync 0;
    @!%p bra WAIT;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r2], %moved;
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
FLOAT_OF_BYTES = {2: 6, 4: 7}


@st.composite
def tiles(draw: st.DrawFn) -> tuple[TensorMap, tuple[int, ...], int]:
    """A tensor map with address 0, coordinates that may lie outside, and the element's bytes."""
    element = draw(st.sampled_from([1, 2, 4]))
    rank = draw(st.integers(1, 5))
    swizzle = draw(st.integers(0, 3))
    widest = {0: 128, 1: 32, 2: 64, 3: 128}[swizzle]
    row = draw(st.sampled_from([w for w in (16, 32, 64, 128) if w <= widest]))
    box, steps, rows = [row // element], [1], 1
    for _ in range(rank - 1):
        pitch = max(row, widest if swizzle else 0)
        count, step = (
            draw(st.integers(1, max(1, min(6, SHARED // (pitch * rows))))),
            draw(st.sampled_from([1, 1, 2, 3])),
        )
        # Of the last step of a box the first element alone counts.
        box.append(count * step - draw(st.integers(0, step - 1)))
        steps.append(step)
        rows *= count
    if widest * rows % 128:
        # A swizzle permutes the pieces of 128 bytes, also those of which the box has but a part.
        swizzle = 0
    sizes = [draw(st.integers(1, 2 * box[0] + 3))] + [draw(st.integers(1, b + 3)) for b in box[1:]]
    strides, span = [], -(-sizes[0] * element // 16) * 16
    for size in sizes[1:]:
        span += 16 * draw(st.integers(0, 2))
        strides.append(span)
        span *= size
    coordinates = [draw(st.integers(-b - 1, s + 1)) for b, s in zip(box, sizes, strict=True)]
    coordinates[0] -= coordinates[0] % (16 // element)
    nan = element > 1 and draw(st.booleans())
    described = TensorMap(0, 8 * element, tuple(sizes), tuple(strides), tuple(box), swizzle,
                          (FLOAT_OF_BYTES if nan else KIND_OF_BYTES)[element], tuple(steps), nan)  # fmt: skip
    return described, tuple(coordinates), element


def places(
    m: TensorMap, element: int, coordinates: tuple[int, ...], writes: bool = False
) -> list[tuple[int, int | None]]:
    """For each byte of the box in shared memory, its offset there and the offset in the tensor (None: outside)."""
    found = []
    order = itertools.product(*(range(0, b, step) for b, step in zip(reversed(m.box), reversed(m.steps), strict=True)))
    mask = {0: 0, 1: 1, 2: 3, 3: 7}[m.swizzle]
    # A swizzled row has the swizzle's width in shared memory, whatever the box's.
    gap = max(m.box[0] * element, {0: 0, 1: 32, 2: 64, 3: 128}[m.swizzle]) - m.box[0] * element
    for n, reversed_index in enumerate(order):
        index = [c + i for c, i in zip(coordinates, reversed(reversed_index), strict=True)]
        # Rows are stored in pieces of 16 bytes, of which the last may hold what lies past the tensor.
        limit = -(-m.sizes[0] * element // 16) * 16 // element if writes else m.sizes[0]
        inside = all(0 <= i < s for i, s in zip(index, (limit, *m.sizes[1:]), strict=True))
        start = index[0] * element + sum(i * s for i, s in zip(index[1:], m.strides, strict=True))
        for k in range(element):
            flat = n * element + k + n // m.box[0] * gap
            # The tile begins at a multiple of 1024, so that offsets stand for addresses.
            found.append((flat ^ ((flat >> 7 & mask) << 4), start + k if inside else None))
    return found


def placed(m: TensorMap, address: int) -> TensorMap:
    return replace(m, address=address)


def tensor_bytes(m: TensorMap, element: int, seed: int) -> torch.Tensor:
    rng = np.random.Generator(np.random.Philox(seed))
    span = -(-m.sizes[0] * element // 16) * 16
    span += sum((n - 1) * s for n, s in zip(m.sizes[1:], m.strides, strict=True))
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
    """Fault: an element lands elsewhere, or what lies outside the tensor is not zero, or the NaN of the fill."""
    m, coordinates, element = tile
    data = tensor_bytes(m, element, seed)
    size = m.box_bytes
    padded = -(-size // 4) * 4
    out = torch.zeros(padded, dtype=torch.uint8)
    text = HEAD + LOAD.format(rank=m.rank, coordinates=", ".join(f"%y{n}" for n in range(m.rank)))
    with virtual_gpu("sm_90a", schedule=schedule) as gpu:
        gpu.allocate(data)
        gpu.readonly(data)
        arguments = [encode(placed(m, data.data_ptr())), out, size, m.copied_bytes, *coordinates, *([0] * (5 - m.rank))]
        gpu.launch(text, "k", 1, 32, arguments)
        assert gpu.findings == []
    for where, source in places(m, element, coordinates):
        outside = (0xF7, 0x7F)[where % 2] if m.nan else 0
        wanted = outside if source is None else int(data[source])
        assert int(out[where]) == wanted, (where, source)


@given(tile=tiles(), seed=st.integers(0, 99), schedule=st.sampled_from(["fast", 1, 2, 3]))
def test_tensor_store_writes_the_inside_only(
    tile: tuple[TensorMap, tuple[int, ...], int], seed: int, schedule: str | int
) -> None:
    """Fault: a store that is not clipped, or that permutes the box."""
    m, anywhere, element = tile
    coordinates = tuple(max(0, c) for c in anywhere)
    target = tensor_bytes(m, element, seed)
    before = target.clone()
    rng = np.random.Generator(np.random.Philox(seed + 1000))
    image = torch.from_numpy(rng.integers(0, 256, -(-m.box_bytes // 4) * 4, np.uint8))
    text = HEAD + STORE.format(rank=m.rank, coordinates=", ".join(f"%y{n}" for n in range(m.rank)))
    with virtual_gpu("sm_90a", schedule=schedule) as gpu:
        gpu.allocate(target)
        arguments = [
            encode(placed(m, target.data_ptr())),
            image,
            m.box_bytes,
            m.copied_bytes,
            *coordinates,
            *([0] * (5 - m.rank)),
        ]
        gpu.launch(text, "k", 1, 32, arguments)
        assert gpu.findings == []
    for where, destination in places(m, element, coordinates, True):
        if destination is not None:
            before[destination] = image[where]
    assert torch.equal(target, before)


@given(tile=tiles(), address=st.integers(0, 2**48).map(lambda a: a * 16))
def test_tensor_maps_survive_encoding(tile: tuple[TensorMap, tuple[int, ...], int], address: int) -> None:
    """Fault: a field of the tensor map is put or read at another place."""
    m = placed(tile[0], address)
    assert decode(encode(m)) == m


def _once(text: str, m: TensorMap, data: torch.Tensor, coordinates: tuple[int, ...]) -> torch.Tensor:
    """Runs one copy of a box between `data` and 4 KiB of zeros; gives these."""
    out = torch.zeros(4096, dtype=torch.uint8)
    text = HEAD + text.format(rank=m.rank, coordinates=", ".join(f"%y{n}" for n in range(m.rank)))
    with virtual_gpu("sm_90a") as gpu:
        gpu.allocate(data)
        gpu.launch(text, "k", 1, 32, [encode(m), out, m.box_bytes, m.copied_bytes, *coordinates, *([0] * (5 - m.rank))])
        assert gpu.findings == []
    return out


@pytest.mark.parametrize(("held", "refused"), [(208, False), (207, True), (200, True)])
def test_a_store_needs_the_whole_of_its_last_16_bytes(held: int, refused: bool) -> None:
    """Fault: a store past the end of an allocation by the padding of its last row passes unseen."""
    data = torch.zeros(held, dtype=torch.uint8)
    m = TensorMap(data.data_ptr(), 32, (50,), (), (16,), 0, 2)
    if refused:
        with pytest.raises(VirtualGPUError, match="past the end of the allocation"):
            _once(STORE, m, data, (48,))
    else:
        _once(STORE, m, data, (48,))
    _once(STORE, m, data, (32,))


@given(
    element=st.sampled_from([1, 2, 4]),
    x=st.one_of(st.integers(-40, 40), st.sampled_from([-16, 0, 16])),
    y=st.integers(-3, 3),
    copy=st.sampled_from([LOAD, STORE]),
)
def test_a_copy_that_an_h200_refuses_is_refused(element: int, x: int, y: int, copy: str) -> None:
    """Fault: a row that begins between multiples of 16 bytes, or a store before the tensor, runs as if it could."""
    data = torch.zeros(64 * 8, dtype=torch.uint8)
    m = TensorMap(data.data_ptr(), 8 * element, (64 // element, 8), (64,), (16, 2), 0, KIND_OF_BYTES[element])
    refused = "misaligned" if x * element % 16 else "before the tensor" if copy is STORE and min(x, y) < 0 else ""
    if refused:
        with pytest.raises(VirtualGPUError, match=refused):
            _once(copy, m, data, (x, y))
    else:
        _once(copy, m, data, (x, y))


@given(seed=st.integers(0, 2**32), exponent=st.integers(1, 254), kind=st.sampled_from([TF32 + 7, TF32 + 8]))
def test_a_load_of_tf32_rounds_to_the_nearest(seed: int, exponent: int, kind: int) -> None:
    """Fault: bits that are cut off or rounded away from zero in a tie, a subnormal that is flushed, a NaN that is lost."""
    rng = np.random.Generator(np.random.Philox(seed))
    bits = rng.integers(0, 2**32, 256, np.uint32)
    bits[:64] = (exponent << 23 | bits[:64] & 0x807FE000) + 0x1000
    bits[64:96] &= 0x807FFFFF
    bits[96:128] |= 0x7F800000
    data = torch.from_numpy(bits.view(np.uint8).copy())
    m = TensorMap(data.data_ptr(), 32, (32, 8), (128,), (32, 8), 0, kind)
    got = _once(LOAD, m, data, (0, 0)).numpy()[:1024].view(np.uint32)
    with np.errstate(invalid="ignore"):
        x = bits.view(np.float32).astype(np.float64)
    step = np.ldexp(1.0, np.maximum(np.frexp(np.where(np.isfinite(x), x, 1.0))[1] - 11, -136))
    with np.errstate(invalid="ignore", over="ignore"):
        want = (np.where(np.isfinite(x), np.rint(x / step) * step, x)).astype(np.float32).view(np.uint32)
    np.testing.assert_array_equal(got, np.where(np.isnan(x), np.uint32(0x7FFFE000), want))


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
