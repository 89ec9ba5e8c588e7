"""Planted faults of asynchronous kernels (copies, mbarriers, proxies, products, tensor memory) are reported by line.

The kernel without faults is clean under every schedule tried; each fault is one edit of its text.
"""

# ruff: noqa: E501  (PTX in tables)
from __future__ import annotations

import contextlib
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from moe_numerics.virtual_gpu import VirtualGPU, VirtualGPUError, virtual_gpu
from moe_numerics.virtual_gpu.tensor_map import TensorMap, encode

HOPPER = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .align 64 .b8 from[128], .param .align 64 .b8 to[128], .param .u64 out)
{
    .reg .b32 %r<16>, %x, %warp, %d<4>, %zero;
    .reg .b64 %from, %to, %o, %da, %db;
    .reg .pred %p, %q, %first, %load;
    .shared .align 1024 .b8 ring[8192];
    .shared .align 1024 .b8 result[1024];
    .shared .align 8 .b64 full[2];
    .shared .align 8 .b64 empty[2];
    mov.b64 %from, from;
    mov.b64 %to, to;
    ld.param.u64 %o, [out];
    mov.u32 %x, %tid.x;
    mov.u32 %zero, 0;
    shr.u32 %warp, %x, 5;
    setp.eq.u32 %first, %x, 0;
    setp.eq.u32 %load, %x, 128;
    mov.u32 %r1, ring;
    mov.u32 %r2, full;
    mov.u32 %r3, empty;
    mov.u32 %r4, result;
    @%first mbarrier.init.shared.b64 [%r2], 1;
    @%first mbarrier.init.shared.b64 [%r2+8], 1;
    @%first mbarrier.init.shared.b64 [%r3], 128;
    @%first mbarrier.init.shared.b64 [%r3+8], 128;
    bar.sync 0;
    setp.lt.u32 %p, %x, 128;
    @%p bra CONSUME;
    @!%load bra DONE;
    mov.u32 %r5, 0;
PRODUCE:
    and.b32 %r6, %r5, 1;
    shl.b32 %r7, %r6, 3;
    add.u32 %r8, %r3, %r7;
    add.u32 %r9, %r2, %r7;
    shr.u32 %r10, %r5, 1;
    xor.b32 %r10, %r10, 1;
    and.b32 %r10, %r10, 1;
EMPTY:
    mbarrier.try_wait.parity.shared.b64 %q, [%r8], %r10;
    @!%q bra EMPTY;
    shl.b32 %r11, %r6, 12;
    add.u32 %r11, %r1, %r11;
    shl.b32 %r12, %r5, 6;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r9], 4096;
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r11], [%from, {%zero, %r12}], [%r9];
    add.u32 %r5, %r5, 1;
    setp.lt.u32 %q, %r5, 4;
    @%q bra PRODUCE;
    bra DONE;
CONSUME:
    mov.u32 %d0, 0;
    mov.u32 %d1, 0;
    mov.u32 %d2, 0;
    mov.u32 %d3, 0;
    mov.u32 %r5, 0;
NEXT:
    and.b32 %r6, %r5, 1;
    shl.b32 %r7, %r6, 3;
    add.u32 %r9, %r2, %r7;
    add.u32 %r8, %r3, %r7;
    shr.u32 %r10, %r5, 1;
    and.b32 %r10, %r10, 1;
FULL:
    mbarrier.try_wait.parity.shared.b64 %q, [%r9], %r10;
    @!%q bra FULL;
    shl.b32 %r11, %r6, 12;
    add.u32 %r11, %r1, %r11;
    shr.u32 %r12, %r11, 4;
    cvt.u64.u32 %da, %r12;
    or.b64 %da, %da, 0x8000002000000000;
    mov.b64 %db, %da;
    wgmma.fence.sync.aligned;
    setp.ne.u32 %p, 0, 1;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%d0, %d1, %d2, %d3}, %da, %db, %p, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    mbarrier.arrive.shared.b64 _, [%r8];
    add.u32 %r5, %r5, 1;
    setp.lt.u32 %q, %r5, 4;
    @%q bra NEXT;
    and.b32 %r12, %x, 31;
    shl.b32 %r13, %x, 3;
    add.u32 %r13, %r4, %r13;
    st.shared.v2.b32 [%r13], {%d0, %d1};
    fence.proxy.async.shared::cta;
    bar.sync 1, 128;
    @!%first bra DONE;
    cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [%to, {%zero}], [%r4];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
    st.shared.b32 [%r4], %zero;
DONE:
    ret;
}
"""


@dataclass(frozen=True)
class Edit:
    """A fault: text that is replaced, what must be reported, and parts of the lines that may be blamed."""

    name: str
    old: str
    new: str
    kinds: tuple[str, ...]
    lines: tuple[str, ...]


TRY = "mbarrier.try_wait.parity.shared.b64 %q,"
WAITS = (f"{TRY} [%r8]", f"{TRY} [%r9]")
COPY = "cp.async.bulk.tensor.2d.shared::cta.global"
PRODUCT = "wgmma.mma_async"
STORE = "cp.async.bulk.tensor.1d.global.shared::cta"
ANNOUNCE = "mbarrier.arrive.expect_tx"
HOPPER_FAULTS = [
    Edit("copy_announces_too_few_bytes", "[%r9], 4096", "[%r9], 2048", ("deadlock",), WAITS),
    Edit("copy_announces_too_many_bytes", "[%r9], 4096", "[%r9], 8192", ("deadlock",), WAITS),
    Edit("barrier_counts_one_arrival_too_many", "[%r3], 128;", "[%r3], 129;", ("deadlock",), WAITS),
    Edit("barrier_counts_half_of_the_arrivals", "[%r3], 128;", "[%r3], 64;", ("mbarrier", "race", "deadlock"), (COPY, PRODUCT, *WAITS)),
    Edit("barrier_never_initialised", "@%first mbarrier.init.shared.b64 [%r2+8], 1;", "", ("mbarrier",), (ANNOUNCE, *WAITS)),
    Edit("initialisation_not_published", "[%r3+8], 128;\n    bar.sync 0;", "[%r3+8], 128;", ("mbarrier", "race"), (ANNOUNCE, *WAITS)),
    Edit("producer_never_waits_for_an_empty_slot", f"{TRY} [%r8], %r10;\n    @!%q bra EMPTY;", "",
         ("race", "mbarrier", "uninitialised", "deadlock"), (COPY, PRODUCT, ANNOUNCE, *WAITS, "bar.sync 1, 128;")),
    Edit("producer_tries_once_for_an_empty_slot", "[%r8], %r10;\n    @!%q bra EMPTY;", "[%r8], %r10;",
         ("race", "mbarrier", "uninitialised", "deadlock"), (COPY, PRODUCT, ANNOUNCE, *WAITS, "bar.sync 1, 128;")),
    Edit("producer_waits_with_the_wrong_phase", "xor.b32 %r10, %r10, 1;", "xor.b32 %r10, %r10, 0;", ("deadlock",), WAITS),
    Edit("consumer_waits_with_the_wrong_phase", "add.u32 %r8, %r3, %r7;\n    shr.u32 %r10, %r5, 1;\n    and",
         "add.u32 %r8, %r3, %r7;\n    shr.u32 %r10, %r5, 1;\n    xor.b32 %r10, %r10, 1;\n    and",
         ("race", "uninitialised", "deadlock"), (PRODUCT, COPY, *WAITS)),
    Edit("consumer_does_not_wait", f"{TRY} [%r9], %r10;\n    @!%q bra FULL;", "", ("race", "uninitialised"), (PRODUCT, COPY)),
    Edit("consumer_tries_once", "@!%q bra FULL;", "", ("race", "uninitialised"), (PRODUCT, COPY)),
    Edit("slot_released_before_the_product_has_read",
         "wgmma.wait_group.sync.aligned 0;\n    mbarrier.arrive.shared.b64 _, [%r8];",
         "mbarrier.arrive.shared.b64 _, [%r8];\n    wgmma.wait_group.sync.aligned 0;", ("race",), (COPY,)),
    Edit("accumulators_read_before_the_wait", "wgmma.wait_group.sync.aligned 0;", "", ("in_flight", "race"), (COPY, "st.shared.v2.b32 [%r13]")),
    Edit("stale_stage", "shl.b32 %r11, %r6, 12;\n    add.u32 %r11, %r1, %r11;\n    shr.u32 %r12, %r11, 4;",
         "xor.b32 %r11, %r6, 1;\n    shl.b32 %r11, %r11, 12;\n    add.u32 %r11, %r1, %r11;\n    shr.u32 %r12, %r11, 4;",
         ("race", "uninitialised"), (PRODUCT, COPY)),
    Edit("no_proxy_fence_before_the_store", "fence.proxy.async.shared::cta;", "", ("proxy",), (STORE,)),
    Edit("no_barrier_before_the_store", "bar.sync 1, 128;", "", ("race", "uninitialised"), (STORE,)),
    Edit("buffer_reused_before_the_store_has_read", "cp.async.bulk.wait_group.read 0;", "", ("race",), ("st.shared.b32 [%r4], %zero;",)),
    Edit("store_never_committed", "cp.async.bulk.commit_group;\n    cp", "cp", ("race", "uncommitted"), ("st.shared.b32 [%r4], %zero;",)),
    Edit("copy_to_a_misaligned_tile", "add.u32 %r11, %r1, %r11;\n    shl.b32 %r12, %r5, 6;",
         "add.u32 %r11, %r1, %r11;\n    add.u32 %r11, %r11, 64;\n    shl.b32 %r12, %r5, 6;", ("misaligned",), (COPY,)),
    Edit("copy_past_shared_memory", "add.u32 %r11, %r1, %r11;\n    shl.b32 %r12, %r5, 6;",
         "add.u32 %r11, %r1, %r11;\n    add.u32 %r11, %r11, 8192;\n    shl.b32 %r12, %r5, 6;",
         ("out_of_bounds", "mbarrier", "race"), (COPY,)),
    Edit("copy_signals_another_barrier", "[%from, {%zero, %r12}], [%r9];", "[%from, {%zero, %r12}], [%r8];",
         ("deadlock", "mbarrier", "race"), WAITS),
    Edit("wrong_rank", "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r11], "
         "[%from, {%zero, %r12}]", "cp.async.bulk.tensor.1d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r11], "
         "[%from, {%r12}]", ("tensor_map",), ("cp.async.bulk.tensor.1d.shared::cta.global",)),
    Edit("barrier_not_aligned", "mov.u32 %r2, full;", "mov.u32 %r2, full; add.u32 %r2, %r2, 4;", ("misaligned",), ("mbarrier.init",)),
    Edit("wrong_swizzle", "or.b64 %da, %da, 0x8000002000000000;", "or.b64 %da, %da, 0x4000002000000000;", ("swizzle",),
         (PRODUCT,)),
    Edit("no_swizzle", "or.b64 %da, %da, 0x8000002000000000;", "or.b64 %da, %da, 0x0000002000000000;", ("swizzle",),
         (PRODUCT,)),
    Edit("descriptor_past_shared_memory", "or.b64 %da, %da, 0x8000002000000000;", "or.b64 %da, %da, 0x8000002000003fff;",
         ("out_of_bounds",), (PRODUCT,)),
]  # fmt: skip


def hopper(gpu: VirtualGPU, text: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A ring of two stages of 64 rows of 32 bf16 (64-byte swizzle), multiplied by themselves and stored."""
    data = torch.arange(4 * 64 * 32).remainder(7).to(torch.bfloat16).reshape(256, 32)
    out = torch.zeros(256)
    source = TensorMap(data.data_ptr(), 16, (32, 256), (64,), (32, 64), 2, 10)
    target = TensorMap(out.data_ptr(), 32, (256,), (), (256,), 0, 7)
    gpu.allocate(data)
    gpu.allocate(out)
    gpu.launch(text, "k", 1, 160, [encode(source), encode(target), out])
    return data, out


@pytest.mark.parametrize("schedule", ["fast", *range(10)])
def test_pipeline_is_clean_and_right(schedule: str | int) -> None:
    """Fault: a checker cries wolf, or a schedule changes the result."""
    with virtual_gpu("sm_90a", schedule=schedule, instruction_budget=20_000) as gpu:
        data, out = hopper(gpu, HOPPER)
        assert gpu.findings == []
    x = data.reshape(4, 64, 32)[:, :, :16].double()
    wanted = torch.einsum("bik,bjk->ij", x, x[:, :8]).float()
    for t in range(128):
        for d in range(2):
            row, column = 16 * (t // 32) + t % 32 // 4, 2 * (t % 4) + d
            assert out[2 * t + d] == wanted[row, column]


def reported(fault: Edit, arch: str, text: str, schedule: str | int) -> list[str]:
    """The kinds of what a schedule shows of a fault; what is reported as this fault blames one of its lines."""
    text = text.replace(fault.old, fault.new)
    with virtual_gpu(arch, schedule=schedule, instruction_budget=20_000) as gpu:
        with contextlib.suppress(VirtualGPUError):
            (hopper if arch == "sm_90a" else blackwell)(gpu, text)
        findings = gpu.findings
    for finding in findings:
        line = text.split("\n")[(finding.line or 1) - 1]
        if finding.kind in fault.kinds:
            assert any(part in line for part in fault.lines), (finding, line)
        if finding.kind == "deadlock":
            assert f"at line {finding.line} wait for" in finding.message
    return [f.kind for f in findings]


@pytest.mark.parametrize("fault", HOPPER_FAULTS, ids=[f.name for f in HOPPER_FAULTS])
def test_planted_fault_of_a_pipeline_is_reported(fault: Edit) -> None:
    """Fault: a broken pipeline passes under all of a handful of schedules."""
    assert HOPPER.count(fault.old) >= 1, "the edit does not apply"
    kinds = {s: reported(fault, "sm_90a", HOPPER, s) for s in ("fast", 0, 1, 2, 3, 4)}
    assert any(set(k) & set(fault.kinds) for k in kinds.values()), kinds
    # Whatever schedule sees the kernel, no other kind of finding is made up.
    for k in kinds.values():
        assert not k or set(k) & set(fault.kinds), kinds


BLACKWELL = """.version 8.7
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 in, .param .u64 out)
{
    .reg .b32 %r<12>, %x, %t, %d<8>, %id;
    .reg .b64 %i, %o, %da, %db, %s;
    .reg .pred %p, %q, %first, %warp0;
    .shared .align 1024 .b8 tile[8192];
    .shared .align 8 .b64 bar;
    .shared .align 4 .b32 place;
    ld.param.u64 %i, [in];
    ld.param.u64 %o, [out];
    mov.u32 %x, %tid.x;
    setp.eq.u32 %first, %x, 0;
    setp.lt.u32 %warp0, %x, 32;
    mov.u32 %r1, bar;
    mov.u32 %r2, place;
    mov.u32 %r3, tile;
    mad.lo.u32 %r4, %x, 64, %r3;
    mad.wide.u32 %s, %x, 64, %i;
    ld.global.v4.b32 {%d0, %d1, %d2, %d3}, [%s];
    st.shared.v4.b32 [%r4], {%d0, %d1, %d2, %d3};
    ld.global.v4.b32 {%d0, %d1, %d2, %d3}, [%s+16];
    st.shared.v4.b32 [%r4+16], {%d0, %d1, %d2, %d3};
    ld.global.v4.b32 {%d0, %d1, %d2, %d3}, [%s+32];
    st.shared.v4.b32 [%r4+32], {%d0, %d1, %d2, %d3};
    ld.global.v4.b32 {%d0, %d1, %d2, %d3}, [%s+48];
    st.shared.v4.b32 [%r4+48], {%d0, %d1, %d2, %d3};
    fence.proxy.async.shared::cta;
    @%first mbarrier.init.shared.b64 [%r1], 1;
    @%warp0 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 32;
    bar.sync 0;
    ld.shared.b32 %t, [%r2];
    @!%first bra WAIT;
    shr.u32 %r5, %r3, 4;
    cvt.u64.u32 %da, %r5;
    or.b64 %da, %da, 0x8000402000000000;
    mov.b64 %db, %da;
    mov.u32 %id, 0x8020490;
    setp.ne.u32 %q, 0, 0;
    tcgen05.mma.cta_group::1.kind::f16 [%t], %da, %db, %id, %q;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1];
WAIT:
    mbarrier.try_wait.parity.shared.b64 %q, [%r1], 0;
    @!%q bra WAIT;
    tcgen05.fence::after_thread_sync;
    shl.b32 %r5, %x, 16;
    and.b32 %r5, %r5, 0x600000;
    add.u32 %r5, %r5, %t;
    tcgen05.ld.sync.aligned.32x32b.x8.b32 {%d0, %d1, %d2, %d3, %d4, %d5, %d6, %d7}, [%r5];
    tcgen05.wait::ld.sync.aligned;
    mad.wide.u32 %s, %x, 32, %o;
    st.global.v4.b32 [%s], {%d0, %d1, %d2, %d3};
    st.global.v4.b32 [%s+16], {%d4, %d5, %d6, %d7};
    bar.sync 0;
    @%warp0 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %t, 32;
    ret;
}
"""

LOADED = "tcgen05.ld.sync.aligned.32x32b.x8.b32 {%d0, %d1, %d2, %d3, %d4, %d5, %d6, %d7}, [%r5];"
BLACKWELL_FAULTS = [
    Edit("tensor_memory_leak", "@%warp0 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %t, 32;", "", ("tensor_memory",),
         ("tcgen05.alloc",)),
    Edit("unallocated_column", "mov.u32 %id,", "add.u32 %t, %t, 64;\n    mov.u32 %id,", ("tensor_memory",), ("tcgen05.mma",)),
    Edit("freed_twice", "@%warp0 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %t, 32;",
         "@%warp0 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %t, 32;\n"
         "    @%warp0 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %t, 32;", ("tensor_memory",), ("tcgen05.dealloc",)),
    Edit("columns_not_a_power_of_two", "[%r2], 32;", "[%r2], 48;", ("tensor_memory",), ("tcgen05.alloc",)),
    Edit("accumulator_read_before_the_commit", f"{TRY} [%r1], 0;\n    @!%q bra WAIT;", "", ("race",), ("tcgen05.ld",)),
    Edit("no_commit", "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1];", "", ("deadlock",), (TRY,)),
    Edit("column_never_written", LOADED, "add.u32 %r5, %r5, 16;\n    " + LOADED, ("uninitialised",), ("tcgen05.ld",)),
    Edit("lanes_of_another_warp", "and.b32 %r5, %r5, 0x600000;", "and.b32 %r5, %r5, 0x200000;", ("tensor_memory",), ("tcgen05.ld",)),
    Edit("accumulator_that_holds_nothing", "setp.ne.u32 %q, 0, 0;", "setp.eq.u32 %q, 0, 0;", ("uninitialised",), ("tcgen05.mma",)),
    Edit("no_proxy_fence", "fence.proxy.async.shared::cta;", "", ("proxy",), ("tcgen05.mma",)),
    Edit("no_barrier_after_filling", "bar.sync 0;\n    ld.shared.b32 %t", "bar.warp.sync -1;\n    ld.shared.b32 %t",
         ("race", "uninitialised", "mbarrier", "tensor_memory"),
         ("ld.shared.b32 %t", "tcgen05.mma", "tcgen05.ld", "st.shared.v4", TRY)),
    Edit("freed_while_others_read", "bar.sync 0;\n    @%warp0 tcgen05.dealloc", "@%warp0 tcgen05.dealloc", ("tensor_memory", "race"), ("tcgen05.ld", "tcgen05.dealloc")),
    Edit("operand_past_shared_memory", "or.b64 %da, %da, 0x8000402000000000;", "or.b64 %da, %da, 0x8000402000003fff;",
         ("out_of_bounds",), ("tcgen05.mma",)),
    Edit("sparse_descriptor", "mov.u32 %id, 0x8020490;", "mov.u32 %id, 0x8020494;", ("descriptor",), ("tcgen05.mma",)),
]  # fmt: skip


def blackwell(gpu: VirtualGPU, text: str) -> tuple[torch.Tensor, torch.Tensor]:
    """128 rows of 32 bf16; the first 16 of each (64-byte swizzle) are multiplied with those of the first 8 rows."""
    values = torch.arange(128 * 32).remainder(5).to(torch.bfloat16).reshape(128, 32)
    image = np.zeros(8192, np.uint8)
    raw = values.view(torch.uint8).numpy()
    for r in range(128):
        for k in range(64):
            at = r * 64 + k
            image[at ^ ((at >> 7 & 3) << 4)] = raw[r, k]
    out = torch.zeros(128, 8)
    gpu.launch(text, "k", 1, 128, [torch.from_numpy(image), out])
    return values, out


@pytest.mark.parametrize("schedule", ["fast", *range(10)])
def test_blackwell_kernel_is_clean_and_right(schedule: str | int) -> None:
    """Fault: a checker cries wolf, or a schedule changes the result."""
    with virtual_gpu("sm_100a", schedule=schedule, instruction_budget=20_000) as gpu:
        values, out = blackwell(gpu, BLACKWELL)
        assert gpu.findings == []
    x = values[:, :16].double()
    assert torch.equal(out, (x @ x[:8].t()).float())


@pytest.mark.parametrize("fault", BLACKWELL_FAULTS, ids=[f.name for f in BLACKWELL_FAULTS])
def test_planted_fault_of_a_blackwell_kernel_is_reported(fault: Edit) -> None:
    """Fault: a misuse of tensor memory or of its barriers passes."""
    assert BLACKWELL.count(fault.old) >= 1, "the edit does not apply"
    kinds = {s: reported(fault, "sm_100a", BLACKWELL, s) for s in ("fast", 0, 1, 2, 3)}
    assert any(set(k) & set(fault.kinds) for k in kinds.values()), kinds


def test_remote_shared_memory_needs_a_cluster_barrier() -> None:
    """Fault: reading another block's shared memory without a barrier of the cluster goes unnoticed."""
    text = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 out)
{{
    .reg .b32 %r<8>, %x, %rank;
    .reg .b64 %o;
    .shared .align 4 .b32 word;
    ld.param.u64 %o, [out];
    mov.u32 %rank, %cluster_ctarank;
    mov.u32 %r1, word;
    add.u32 %r5, %rank, 7;
    st.shared.u32 [%r1], %r5;
    {barrier}
    xor.b32 %r2, %rank, 1;
    mapa.shared::cluster.u32 %r3, %r1, %r2;
    ld.shared::cluster.u32 %r4, [%r3];
    mad.wide.u32 %o, %rank, 4, %o;
    st.global.u32 [%o], %r4;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    ret;
}}
"""
    barrier = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
    for schedule in ("fast", 1, 2):
        out = torch.zeros(2, dtype=torch.int32)
        with virtual_gpu("sm_90a", schedule=schedule) as gpu:
            gpu.launch(text.format(barrier=barrier), "k", 2, 1, [out], cluster=2)
            assert gpu.findings == []
            assert out.tolist() == [8, 7]
        with virtual_gpu("sm_90a", schedule=schedule) as gpu:
            with contextlib.suppress(VirtualGPUError):
                gpu.launch(text.format(barrier=""), "k", 2, 1, [out], cluster=2)
            # Under some orders the other block has not even written yet.
            assert [f.kind for f in gpu.findings] in (["race"], ["uninitialised"])


LANES = """.version 8.7
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 out)
{{
    .reg .b32 %t, %w, %lane, %base, %at, %slot, %v;
    .reg .b64 %o;
    .reg .pred %p;
    .shared .align 16 .b8 slot[16];
    ld.param.u64 %o, [out];
    mov.u32 %t, %tid.x;
    shr.u32 %w, %t, 5;
    mov.u32 %slot, slot;
    setp.ne.u32 %p, %w, 0;
    @!%p tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%slot], 32;
    bar.sync 0;
    ld.shared.b32 %base, [%slot];
    and.b32 %lane, %w, 3;
    shl.b32 %lane, %lane, 21;
    add.u32 %at, %base, %lane;
    {store}
    tcgen05.wait::st.sync.aligned;
    {between}
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%v}}, [%at];
    tcgen05.wait::ld.sync.aligned;
    mad.wide.u32 %o, %t, 4, %o;
    st.global.b32 [%o], %v;
    bar.sync 0;
    @!%p tcgen05.dealloc.cta_group::1.sync.aligned.b32 %base, 32;
    ret;
}}
"""


@pytest.mark.parametrize("schedule", ["fast", 1, 2, 3])
def test_warps_have_their_own_lanes_of_tensor_memory(schedule: str | int) -> None:
    """Fault: warps that use the same column of different lanes are taken for a race; those of one lane are not."""
    own = LANES.format(store="tcgen05.st.sync.aligned.32x32b.x1.b32 [%at], {%t};", between="")
    out = torch.zeros(128, dtype=torch.int32)
    with virtual_gpu("sm_100a", schedule=schedule) as gpu:
        gpu.launch(own, "k", 1, 128, [out])
        assert gpu.findings == []
    assert out.tolist() == list(range(128))
    # Of eight warps, two have each quarter of the lanes: the second group reads what the first one stores.
    half = "setp.ge.u32 %p, %w, 4; @%p bra READ; tcgen05.st.sync.aligned.32x32b.x1.b32 [%at], {%t}; READ:"
    text = LANES.format(store=half, between="setp.ne.u32 %p, %w, 0;")
    with virtual_gpu("sm_100a", schedule=schedule) as gpu:
        with contextlib.suppress(VirtualGPUError):
            gpu.launch(text, "k", 1, 256, [torch.zeros(256, dtype=torch.int32)])
        found = [(f.kind, f.text) for f in gpu.findings]
    assert [kind for kind, _ in found] in (["race"], ["uninitialised"], ["tensor_memory"])
    assert "tcgen05.ld" in (found[0][1] or "")
