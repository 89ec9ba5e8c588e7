"""Every shape of `tcgen05.ld` and `tcgen05.st` names the cells of tensor memory that CUTLASS's atoms say, and copies
into tensor memory reach the lanes of their warps.

Faults this catches: a lane, column or register in another place, halves packed in the wrong order, a store that touches
other cells, rows that are spread over the wrong warps. The layouts are those of CUTLASS's
include/cute/atom/copy_traits_sm100.hpp: shapes and strides in bits, from thread and register to a place in a tile.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch

from moe_numerics.virtual_gpu import virtual_gpu

COLUMNS = 64
Modes = Sequence[tuple[int, int]]


def layouts(shape: str, number: int) -> tuple[int, Modes, Modes]:
    """Bits of a lane's tile, and the modes (size, stride) of threads and of registers."""
    width = {"32x32b": 32, "16x64b": 64, "16x128b": 128, "16x256b": 256, "16x32bx2": 64}[shape] * number
    return {
        "32x32b": (width, [(32, width)], [(number, 32)]),
        "16x64b": (width, [(2, 8 * width), (2, 32), (8, width)], [(number, 64)]),
        "16x128b": (width, [(4, 32), (8, width)], [(2, 8 * width), (number, 128)]),
        "16x256b": (width, [(4, 64), (8, width)], [(2, 32), (2, 8 * width), (number, 256)]),
        "16x32bx2": (width, [(16, width), (2, 32 * number)], [(number, 32)]),
    }[shape]


def offsets(modes: Modes) -> npt.NDArray[np.intp]:
    """The offset of each index, the first mode fastest."""
    found = np.zeros(1, np.intp)
    for size, stride in modes:
        found = (np.arange(size)[:, None] * stride + found[None, :]).reshape(-1)
    return found


def cells(shape: str, number: int, packed: bool) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Lane and first column [32, registers] of each register."""
    width, threads, registers = layouts(shape, number)
    place = offsets(threads)[:, None] + offsets(registers)[None, :]
    return place // width, place % width // (16 if packed else 32)


TEXT = """.version 8.8
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 in, .param .u64 out)
{{
    .reg .b32 %t, %warp, %slot, %base, %at, %v<64>, %x<64>;
    .reg .b64 %in, %out, %rd<64>;
    .reg .pred %p;
    .shared .align 8 .b32 slot;
    ld.param.u64 %in, [in];
    ld.param.u64 %out, [out];
    mov.u32 %t, %tid.x;
    shr.u32 %warp, %t, 5;
    mov.u32 %slot, slot;
    setp.eq.u32 %p, %warp, 0;
    @%p tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%slot], 64;
    bar.sync 0;
    ld.shared.b32 %base, [%slot];
    shl.b32 %at, %warp, 21;
    add.u32 %at, %at, %base;
    mad.wide.u32 %in, %t, {given_bytes}, %in;
    mad.wide.u32 %out, %t, {taken_bytes}, %out;
    {loads}
    {first}
    tcgen05.wait::st.sync.aligned;
    {second}
    tcgen05.wait::ld.sync.aligned;
    {stores}
    bar.sync 0;
    @%p tcgen05.dealloc.cta_group::1.sync.aligned.b32 %base, 64;
    ret;
}}
"""
FILL = "tcgen05.st.sync.aligned.32x32b.x64.b32 [%at], {{{v}}};"
DRAIN = "tcgen05.ld.sync.aligned.32x32b.x64.b32 {{{x}}}, [%at];"


def names(prefix: str, count: int) -> str:
    return ", ".join(f"%{prefix}{n}" for n in range(count))


def run(given: npt.NDArray[np.uint32], taken: int, first: str, second: str) -> npt.NDArray[np.uint32]:
    """What 128 threads read back: `first` stores registers %v, `second` loads registers %x."""
    count = given.shape[1]
    text = TEXT.format(
        given_bytes=4 * count,
        taken_bytes=4 * taken,
        loads=" ".join(f"ld.global.b32 %v{n}, [%in+{4 * n}];" for n in range(count)),
        stores=" ".join(f"st.global.b32 [%out+{4 * n}], %x{n};" for n in range(taken)),
        first=first,
        second=second,
    )
    out = torch.zeros(128, taken, dtype=torch.int32)
    with virtual_gpu("sm_100a") as gpu:
        gpu.launch(text, "k", 1, 128, [torch.from_numpy(given.view(np.int32).copy()), out])
        assert gpu.findings == []
    return out.numpy().view(np.uint32)


CASES = [
    (shape, number, packed)
    for shape, most in (("32x32b", 32), ("16x64b", 16), ("16x128b", 8), ("16x256b", 4), ("16x32bx2", 16))
    for number in (1, 2, 4, 8, 16, 32)
    for packed in (False, True)
    if number <= most
]


def halfway(shape: str, number: int, packed: bool) -> str:
    """The column where the second half of the lanes begins: beside what the first half takes."""
    return f", {number * (2 if packed else 1)}" if shape == "16x32bx2" else ""


@pytest.mark.parametrize(("shape", "number", "packed"), CASES)
def test_loads_take_the_cells_of_their_shape(shape: str, number: int, packed: bool) -> None:
    lanes, columns = cells(shape, number, packed)
    memory = np.random.default_rng(number).integers(0, 2**32, (128, COLUMNS), np.uint32)
    registers = lanes.shape[1]
    modifier = ".pack::16b" if packed else ""
    load = f"tcgen05.ld.sync.aligned.{shape}.x{number}{modifier}.b32 {{{names('x', registers)}}}, [%at]"
    got = run(memory, registers, FILL.format(v=names("v", COLUMNS)), load + halfway(shape, number, packed) + ";")
    for warp in range(4):
        tile = memory[32 * warp : 32 * warp + 32]
        wanted = tile[lanes, columns]
        if packed:
            wanted = wanted & 0xFFFF | tile[lanes, columns + 1] << 16
        np.testing.assert_array_equal(got[32 * warp : 32 * warp + 32], wanted)


@pytest.mark.parametrize(("shape", "number", "packed"), CASES)
def test_stores_fill_the_cells_of_their_shape(shape: str, number: int, packed: bool) -> None:
    lanes, columns = cells(shape, number, packed)
    registers = lanes.shape[1]
    values = np.random.default_rng(number).integers(0, 2**32, (128, COLUMNS), np.uint32)
    modifier = ".unpack::16b" if packed else ""
    split = halfway(shape, number, packed)
    store = f"tcgen05.st.sync.aligned.{shape}.x{number}{modifier}.b32 [%at]{split}, {{{names('v', registers)}}};"
    got = run(values, COLUMNS, FILL.format(v=names("v", COLUMNS)) + store, DRAIN.format(x=names("x", COLUMNS)))
    wanted = values.copy()
    for warp in range(4):
        tile, mine = wanted[32 * warp : 32 * warp + 32], values[32 * warp : 32 * warp + 32, :registers]
        tile[lanes, columns] = mine & 0xFFFF if packed else mine
        if packed:
            tile[lanes, columns + 1] = mine >> 16
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(
    ("form", "rows"),
    [
        ("128x128b", list(range(128))),
        ("64x128b.warpx2::02_13", [*range(64), *range(64)]),
        ("64x128b.warpx2::01_23", [*range(32), *range(32), *range(32, 64), *range(32, 64)]),
        ("32x128b.warpx4", [*range(32)] * 4),
    ],
)
def test_copies_reach_the_lanes_of_their_warps(form: str, rows: list[int]) -> None:
    """16 bytes a row, rows of eight beside each other without a swizzle."""
    given = np.random.default_rng(1).integers(0, 2**32, (128, 4), np.uint32)
    copy = """mov.u32 %x0, tile; mad.lo.u32 %x1, %t, 16, %x0;
    st.shared.v4.b32 [%x1], {%v0, %v1, %v2, %v3};
    fence.proxy.async.shared::cta;
    setp.eq.u32 %p, %t, 0;
    @%p mbarrier.init.shared.b64 [bar], 1;
    bar.sync 0;
    @!%p bra WAIT;
    shr.u32 %x0, %x0, 4;
    cvt.u64.u32 %rd0, %x0;
    or.b64 %rd0, %rd0, 0x0000400800010000;
    tcgen05.cp.cta_group::1.FORM [%base], %rd0;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [bar];
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p, [bar], 0;
    @!%p bra WAIT;
    setp.eq.u32 %p, %warp, 0;
    .shared .align 1024 .b8 tile[2048];
    .shared .align 8 .b64 bar;
    """.replace("FORM", form)
    load = f"tcgen05.ld.sync.aligned.32x32b.x4.b32 {{{names('x', 4)}}}, [%at];"
    got = run(given, 4, copy, load)
    np.testing.assert_array_equal(got, given[rows])
