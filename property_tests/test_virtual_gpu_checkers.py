"""Planted kernel faults are reported with the right kind and PTX line; their repaired twins are clean.

Faults this catches: a checker that is blind, one that names the wrong line, and one that cries wolf.
"""

# ruff: noqa: E501  (PTX in tables)
from __future__ import annotations

import contextlib
from dataclasses import dataclass

import pytest
import torch

from moe_numerics.virtual_gpu import VirtualGPU, VirtualGPUError, virtual_gpu

HEAD = """.version 8.7
.target {target}
.address_size 64
.visible .entry k(.param .u64 out, .param .u64 in)
{{
    .reg .b32 %r<16>, %t, %c, %l, %w, %a, %b;
    .reg .b64 %out, %in, %rd<8>;
    .reg .b16 %h<4>;
    .reg .f32 %f<4>;
    .reg .pred %p<4>;
    {shared}
    ld.param.u64 %out, [out];
    ld.param.u64 %in, [in];
    mov.u32 %t, %tid.x;
    mov.u32 %c, %ctaid.x;
    mov.u32 %l, %laneid;
    shr.u32 %w, %t, 5;
"""


def module(body: str, shared: str = ".shared .align 16 .b8 buffer[1024];", target: str = "sm_90a") -> str:
    return HEAD.format(target=target, shared=shared) + body + "\n    ret;\n}\n"


def run(gpu: VirtualGPU, text: str, threads: int = 64, blocks: int = 1, words: int = 256) -> torch.Tensor:
    out = torch.zeros(words, dtype=torch.int32)
    given = torch.arange(words, dtype=torch.int32)
    gpu.launch(text, "k", blocks, threads, [out, given])
    return out


@dataclass(frozen=True)
class Planted:
    """A faulty body, the kind of the finding, a part of the faulty line, and the same body without the fault."""

    name: str
    kind: str
    line: str
    faulty: str
    repaired: str | None
    shared: str = ".shared .align 16 .b8 buffer[1024];"
    threads: int = 64
    blocks: int = 1
    error: bool = True


STORE = "mov.u32 %a, buffer; mad.lo.u32 %a, %t, 4, %a; st.shared.u32 [%a], %t;"
PARTNER = "xor.b32 %r1, %t, 32; mov.u32 %b, buffer; mad.lo.u32 %b, %r1, 4, %b;"
NEIGHBOUR = "xor.b32 %r1, %t, 1; mov.u32 %b, buffer; mad.lo.u32 %b, %r1, 4, %b;"
COPY = (
    f"{STORE} bar.sync 0; mad.wide.u32 %rd1, %t, 4, %in; cp.async.ca.shared.global [%a], [%rd1], 4;"
    " cp.async.commit_group;"
)
COMPLETE = (
    "mov.u32 %r3, buffer; add.u32 %r3, %r3, 1016; setp.ne.u32 %p1, %t, 0; @!%p1 mbarrier.init.shared.b64 [%r3], 64;"
    " bar.sync 0; cp.async.mbarrier.arrive.noinc.shared.b64 [%r3];"
    "LOOP: mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0; @!%p2 bra LOOP;"
)
KEEP = "mad.wide.u32 %rd1, %t, 4, %out; st.global.u32 [%rd1], %r2;"

FAULTS = [
    Planted("global_past_the_end", "out_of_bounds", "st.global.u32 [%rd1+1024]",
            "mad.wide.u32 %rd1, %t, 4, %out;\n st.global.u32 [%rd1+1024], %t;",
            "mad.wide.u32 %rd1, %t, 4, %out; st.global.u32 [%rd1+768], %t;"),
    Planted("global_before_the_start", "out_of_bounds", "ld.global.u32 %r1, [%rd1+-4]",
            "mad.wide.u32 %rd1, %t, 4, %in;\n ld.global.u32 %r1, [%rd1+-4];",
            "mad.wide.u32 %rd1, %t, 4, %in; ld.global.u32 %r1, [%rd1+4];"),
    Planted("null_pointer", "out_of_bounds", "ld.global.u32 %r1, [%rd1];",
            "mov.u64 %rd1, 0;\n ld.global.u32 %r1, [%rd1];", None),
    Planted("misaligned_vector", "misaligned", "ld.global.v2.u32",
            "mad.wide.u32 %rd1, %t, 4, %in;\n ld.global.v2.u32 {%r1, %r2}, [%rd1];",
            "mad.wide.u32 %rd1, %t, 8, %in; ld.global.v2.u32 {%r1, %r2}, [%rd1];"),
    Planted("shared_past_the_end", "out_of_bounds", "st.shared.u32 [%a+1024]",
            "mov.u32 %a, buffer; mad.lo.u32 %a, %t, 4, %a;\n st.shared.u32 [%a+1024], %t;", STORE),
    Planted("shared_never_written", "uninitialised", "ld.shared.u32 %r2, [%a+256]",
            STORE + " bar.sync 0;\n ld.shared.u32 %r2, [%a+256];", STORE + " bar.sync 0; ld.shared.u32 %r2, [%a];"),
    Planted("local_never_written", "uninitialised", "ld.local.u32 %r2, [depot+4]",
            "st.local.u32 [depot], %t;\n ld.local.u32 %r2, [depot+4];",
            "st.local.u32 [depot+4], %t; ld.local.u32 %r2, [depot+4];", ".local .align 8 .b8 depot[16];"),
    Planted("local_past_the_end", "out_of_bounds", "st.local.u32 [depot+16]",
            "\n st.local.u32 [depot+16], %t;", "st.local.u32 [depot+12], %t;", ".local .align 8 .b8 depot[16];"),
    Planted("register_never_written", "uninitialised", "add.u32 %r3, %r2, 1;",
            "setp.lt.u32 %p1, %t, 40; @%p1 mov.u32 %r2, 7;\n add.u32 %r3, %r2, 1;",
            "mov.u32 %r2, 1; setp.lt.u32 %p1, %t, 40; @%p1 mov.u32 %r2, 7; add.u32 %r3, %r2, 1;"),
    Planted("endless_loop", "budget", "bra LOOP",
            "LOOP:\n bra LOOP;", "setp.lt.u32 %p1, %t, 0;\nLOOP:\n @%p1 bra LOOP;"),
    Planted("trap", "trap", "trap;", "setp.eq.u32 %p1, %t, 5;\n @%p1 trap;",
            "setp.eq.u32 %p1, %t, 500; @%p1 trap;"),
    Planted("divergent_barrier", "deadlock", "bar.sync 0;",
            "setp.lt.u32 %p1, %t, 20; @%p1 bra SKIP;\n bar.sync 0; bra.uni END;\nSKIP:\n bar.sync 1;\nEND:",
            "setp.lt.u32 %p1, %t, 32; @%p1 bra SKIP;\n bar.sync 1, 32; bra.uni END;\nSKIP:\n bar.sync 2, 32;\nEND:"),
    Planted("barrier_nobody_else_reaches", "deadlock", "bar.sync 1, 64;",
            "setp.lt.u32 %p1, %t, 32;\n @%p1 bar.sync 1, 64;", "bar.sync 1, 64;"),
    Planted("barrier_count_not_of_warps", "barrier", "bar.sync 1, 40;", "\n bar.sync 1, 40;", "bar.sync 1, 64;"),
    Planted("barrier_counts_differ", "barrier", "bar.sync 1, 64;",
            "setp.lt.u32 %p1, %t, 32; @%p1 bra A;\n bar.arrive 1, 96;\n bra.uni END;\nA:\n bar.sync 1, 64;\nEND:",
            "setp.lt.u32 %p1, %t, 32; @%p1 bra A;\n bar.arrive 1, 64;\n bra.uni END;\nA:\n bar.sync 1, 64;\nEND:"),
    Planted("lane_outside_the_mask", "warp_mask", "shfl.sync.idx.b32",
            "\n shfl.sync.idx.b32 %r2, %t, 0, 31, 0xffff;", "shfl.sync.idx.b32 %r2, %t, 0, 31, -1;"),
    Planted("shuffle_from_an_absent_lane", "warp_mask", "shfl.sync.idx.b32 %r2, %t, 20",
            "setp.lt.u32 %p1, %l, 16; @!%p1 bra END;\n shfl.sync.idx.b32 %r2, %t, 20, 31, 0xffff;\nEND:",
            "setp.lt.u32 %p1, %l, 16; @!%p1 bra END;\n shfl.sync.idx.b32 %r2, %t, 10, 31, 0xffff;\nEND:"),
    Planted("missing_block_barrier", "race", "ld.shared.u32 %r2, [%b];",
            f"{STORE} {PARTNER}\n ld.shared.u32 %r2, [%b]; {KEEP}",
            f"{STORE} {PARTNER} bar.sync 0; ld.shared.u32 %r2, [%b]; {KEEP}", error=False),
    Planted("missing_barrier_before_reuse", "race", "st.shared.u32 [%a], %r2;",
            f"{STORE} {PARTNER} bar.sync 0; ld.shared.u32 %r2, [%b];\n st.shared.u32 [%a], %r2;",
            f"{STORE} {PARTNER} bar.sync 0; ld.shared.u32 %r2, [%b]; bar.sync 0; st.shared.u32 [%a], %r2;", error=False),
    Planted("missing_warp_barrier", "race", "ld.shared.u32 %r2, [%b];",
            f"{STORE} {NEIGHBOUR}\n ld.shared.u32 %r2, [%b]; {KEEP}",
            f"{STORE} {NEIGHBOUR} bar.warp.sync -1; ld.shared.u32 %r2, [%b]; {KEEP}", error=False),
    Planted("warp_barrier_for_two_warps", "race", "ld.shared.u32 %r2, [%b];",
            f"{STORE} {PARTNER} bar.warp.sync -1;\n ld.shared.u32 %r2, [%b]; {KEEP}",
            f"{STORE} {PARTNER} bar.sync 3, 64; ld.shared.u32 %r2, [%b]; {KEEP}", error=False),
    Planted("named_barrier_of_other_warps", "race", "ld.shared.u32 %r2, [%b];",
            f"{STORE} {PARTNER} add.u32 %r5, %w, 1; bar.sync %r5, 32;\n ld.shared.u32 %r2, [%b]; {KEEP}",
            f"{STORE} {PARTNER} bar.sync 1, 64; ld.shared.u32 %r2, [%b]; {KEEP}", error=False),
    Planted("one_way_barrier_used_both_ways", "race", "st.shared.u32 [%b+512], %r2;",
            f"{STORE} {PARTNER} setp.lt.u32 %p1, %t, 32; @%p1 bra A;\n st.shared.u32 [%b+512], %t;"
            " bar.arrive 1, 64; bra.uni END;\n"
            "A:\n bar.sync 1, 64; ld.shared.u32 %r2, [%a+512];\n bar.arrive 2, 64;\n add.u32 %r2, %r2, 1;\n bra.uni END;\n"
            "END:\n setp.lt.u32 %p1, %t, 32; @%p1 bra DONE;\n mov.u32 %r2, 3;\n st.shared.u32 [%b+512], %r2;\nDONE:",
            f"{STORE} {PARTNER} setp.lt.u32 %p1, %t, 32; @%p1 bra A;\n st.shared.u32 [%b+512], %t;"
            " bar.arrive 1, 64; bar.sync 2, 64; mov.u32 %r2, 3; st.shared.u32 [%b+512], %r2; bra.uni END;\n"
            "A:\n bar.sync 1, 64; ld.shared.u32 %r2, [%a+512];\n bar.arrive 2, 64;\nEND:", error=False),
    Planted("blocks_write_the_same_words", "race", "st.global.u32 [%rd1], %c;",
            "mad.wide.u32 %rd1, %t, 4, %out;\n st.global.u32 [%rd1], %c;",
            "mad.lo.u32 %r1, %c, 64, %t; mad.wide.u32 %rd1, %r1, 4, %out; st.global.u32 [%rd1], %c;",
            blocks=2, error=False),
    Planted("block_reads_what_another_writes", "race", "st.global.u32 [%rd1], %r2;",
            "mad.wide.u32 %rd1, %t, 4, %out; ld.global.u32 %r2, [%rd1+256]; mad.lo.u32 %r1, %c, 64, %t;"
            " mad.wide.u32 %rd1, %r1, 4, %out;\n st.global.u32 [%rd1], %r2;",
            "mad.wide.u32 %rd1, %t, 4, %in; ld.global.u32 %r2, [%rd1+256]; mad.lo.u32 %r1, %c, 64, %t;"
            " mad.wide.u32 %rd1, %r1, 4, %out;\n st.global.u32 [%rd1], %r2;", blocks=2, error=False),
    Planted("lanes_store_different_values", "race", "st.shared.u32 [%a], %t;",
            "mov.u32 %a, buffer;\n st.shared.u32 [%a], %t;", "mov.u32 %a, buffer; st.shared.u32 [%a], %c;", error=False),
    Planted("copy_read_by_others_before_its_wait", "race", "ld.shared.u32 %r2, [%b];",
            f"{COPY} bar.sync 0; {PARTNER}\n ld.shared.u32 %r2, [%b];\n {KEEP} cp.async.wait_all;",
            f"{COPY} cp.async.wait_all; bar.sync 0; {PARTNER} ld.shared.u32 %r2, [%b]; {KEEP}", error=False),
    Planted("copy_read_by_its_thread_before_its_wait", "race", "ld.shared.u32 %r2, [%a];",
            f"{COPY}\n ld.shared.u32 %r2, [%a];\n {KEEP} cp.async.wait_all;",
            f"{COPY} cp.async.wait_group 0; ld.shared.u32 %r2, [%a]; {KEEP}", error=False),
    Planted("copy_of_a_group_that_may_be_pending", "race", "ld.shared.u32 %r2, [%b];",
            f"{COPY} cp.async.wait_group 1; bar.sync 0; {PARTNER}\n ld.shared.u32 %r2, [%b];\n {KEEP}",
            f"{COPY} {COMPLETE} {PARTNER} ld.shared.u32 %r2, [%b]; {KEEP}", error=False),
    Planted("plain_store_beside_atomics", "race", "st.shared.u32 [%a], %c;",
            "mov.u32 %a, buffer; st.shared.u32 [%a], %c; bar.sync 0; red.shared.add.u32 [%a], 1;\n"
            " setp.ne.u32 %p1, %t, 5; @%p1 bra END;\n st.shared.u32 [%a], %c;\nEND:",
            "mov.u32 %a, buffer; st.shared.u32 [%a], %c; bar.sync 0; red.shared.add.u32 [%a], 1;\n"
            " atom.shared.add.u32 %r2, [%a], 1;", error=False),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=[f.name for f in FAULTS])
@pytest.mark.parametrize("schedule", ["fast", 1, 2])
def test_planted_fault_is_reported_at_its_line(fault: Planted, schedule: str | int) -> None:
    """Fault: a checker misses a broken kernel or blames another line."""
    text = module(fault.faulty, fault.shared)
    with virtual_gpu("sm_90a", schedule=schedule, instruction_budget=20_000) as gpu:
        if fault.error:
            with pytest.raises(VirtualGPUError) as caught:
                run(gpu, text, fault.threads, fault.blocks)
            findings = [caught.value.finding]
        else:
            with contextlib.suppress(VirtualGPUError):
                run(gpu, text, fault.threads, fault.blocks)
            findings = gpu.findings
    kinds = [f.kind for f in findings]
    if not fault.error and schedule != "fast" and kinds == ["uninitialised"]:
        # Another order of warps turns the race into a read of memory that nobody wrote yet.
        return
    assert fault.kind in kinds, kinds
    found = findings[kinds.index(fault.kind)]
    lines = text.split("\n")
    if schedule == "fast":
        assert found.line is not None
        assert fault.line in lines[found.line - 1], (found.line, lines[found.line - 1])
    assert found.kernel == "k"


@pytest.mark.parametrize("fault", [f for f in FAULTS if f.repaired], ids=[f.name for f in FAULTS if f.repaired])
@pytest.mark.parametrize("schedule", ["fast", 1, 2, 3])
def test_repaired_kernel_has_no_finding(fault: Planted, schedule: str | int) -> None:
    """Fault: a checker reports what is allowed."""
    assert fault.repaired is not None
    with virtual_gpu("sm_90a", schedule=schedule, instruction_budget=20_000) as gpu:
        run(gpu, module(fault.repaired, fault.shared), fault.threads, fault.blocks)
        assert gpu.findings == []


def test_error_names_kernel_line_thread_address_and_nearest_tensor() -> None:
    """Fault: an error that does not say where."""
    text = module("mad.wide.u32 %rd1, %t, 4, %out;\n st.global.u32 [%rd1], %t;")
    with virtual_gpu("sm_90a") as gpu, pytest.raises(VirtualGPUError) as caught:
        run(gpu, text, threads=64, words=40)
    message = str(caught.value)
    finding = caught.value.finding
    assert "0 bytes past the end of argument 0 (int32 [40])" in message
    assert finding.thread == (40, 0, 0)
    assert finding.block == (0, 0, 0)
    assert finding.address is not None
    assert f"PTX line {finding.line}" in message


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        ("frobnicate.b32 %r1, %r2;", "unknown_instruction", "unknown instruction `frobnicate.b32`"),
        ("add.funny.u32 %r1, %r2, %r3;", "unknown_instruction", "unknown form `add.funny.u32`"),
        ("cvt.rn.satfinite.e2m1x2.f32 %h1, %f1, %f2;", "unavailable", "is not available on sm_90a"),
        ("add.u64 %rd1, %rd2, %r1;", "unknown_instruction", "needs 64 bits"),
        ("mov.u32 %r1, nowhere;", "unknown_instruction", "unknown symbol nowhere"),
        ("mov.u32 %r1, %nosuch;", "unknown_instruction", "unknown special register %nosuch"),
        ("bra NOWHERE;", "unknown_instruction", "is not a label"),
        ("add.u32 %r1 %r2;", "syntax", "expected `,` or `;`"),
        ("ld.param.u64 %rd1, [out+8];", "unknown_instruction", "reads outside parameter out"),
    ],
)
def test_ptx_that_cannot_run_is_one_clear_error(body: str, kind: str, words: str) -> None:
    """Fault: PTX the virtual GPU does not understand is executed as something else."""
    text = module(body)
    with virtual_gpu("sm_90a") as gpu, pytest.raises(VirtualGPUError) as caught:
        run(gpu, text)
    assert caught.value.finding.kind == kind
    assert words in str(caught.value)
    assert body in text.split("\n")[(caught.value.finding.line or 0) - 1]


def test_uninitialised_and_readonly_tensors() -> None:
    """Fault: reading an output before it was written, or writing an input, goes unnoticed."""
    copy = module("mad.wide.u32 %rd1, %t, 4, %in; ld.global.u32 %r1, [%rd1]; mad.wide.u32 %rd1, %t, 4, %out;"
                  " st.global.u32 [%rd1], %r1;")  # fmt: skip
    with virtual_gpu("sm_90a") as gpu:
        out, given = torch.zeros(64, dtype=torch.int32), torch.arange(64, dtype=torch.int32)
        gpu.uninitialized(out)
        gpu.launch(copy, "k", 1, 40, [out, given])
        assert gpu.written(out).tolist() == [n < 40 for n in range(64)]
        with pytest.raises(VirtualGPUError, match="read before they were written"):
            gpu.launch(copy, "k", 1, 64, [given, out])
        gpu.readonly(given)
        with pytest.raises(VirtualGPUError, match="read-only"):
            gpu.launch(copy, "k", 1, 40, [given, out])


@pytest.mark.parametrize("schedule", ["fast", 1])
@pytest.mark.parametrize(
    ("store", "line"),
    [
        ("st.global.v2.b32 [%rd1], {%t, %t};", "st.global.v2.b32"),
        ("red.global.add.u32 [%rd1+4], %t;", "red.global.add.u32"),
        ("st.global.u8 [%rd1+7], %h1;", "st.global.u8"),
        ("cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], 16;", "cp.async.bulk.global"),
    ],
)
def test_stores_outside_of_what_a_case_owns_are_reported_at_their_line(
    store: str, line: str, schedule: str | int
) -> None:
    """Fault: a store to rows of another case's tokens, or to padding, is known by its traces only, or not at all."""
    body = "mul.lo.u32 %r1, %t, 16; mad.wide.u32 %rd1, %t, 16, %out; mov.b16 %h1, 7; mov.u32 %r2, buffer;"
    body += " add.u32 %r1, %r1, %r2; st.shared.v4.b32 [%r1], {%t, %t, %t, %t}; fence.proxy.async.shared::cta;"
    text = module(body + f"\n {store}\n cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;")
    for rows, allowed in ((8, True), (6, False)):
        out, given = torch.zeros(8, 4, dtype=torch.int32), torch.zeros(8, 4, dtype=torch.int32)
        with virtual_gpu("sm_90a", schedule=schedule) as gpu:
            gpu.owned(out, torch.arange(8) < rows)
            if allowed:
                gpu.launch(text, "k", 1, 8, [out, given])
                continue
            with pytest.raises(VirtualGPUError, match="outside of what the case owns") as caught:
                gpu.launch(text, "k", 1, 8, [out, given])
        finding = caught.value.finding
        assert finding.kind == "not_owned"
        assert line in text.split("\n")[(finding.line or 0) - 1]
        assert finding.thread == (6, 0, 0)


def test_written_marks_only_the_view() -> None:
    """Fault: a mark on a slice covers its neighbours, or the wrong bytes of them."""
    storage = torch.zeros(8, 8, dtype=torch.int16)
    view = storage[2:6, 1:5]
    with virtual_gpu("sm_90a") as gpu:
        gpu.uninitialized(view)
        assert not gpu.written(view).any()
        assert int(gpu.written(storage).sum()) == 64 - 16
        assert gpu.written(storage)[0].all()


def test_bad_launches_are_refused() -> None:
    """Fault: a launch that no GPU would take is run."""
    text = module("mov.u32 %r1, 1;")
    tensors = [torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)]
    with virtual_gpu("sm_90a") as gpu:
        for arguments, block, shared, words in [
            (tensors[:1], 32, 0, "1 arguments, the kernel takes 2"),
            ([b"1234", tensors[0]], 32, 0, "argument 0 has 4 bytes, parameter out 8"),
            (tensors, 2000, 0, "2000 threads"),
            (tensors, 32, 300_000, "bytes of shared memory are more than"),
        ]:
            with pytest.raises(VirtualGPUError, match=words):
                gpu.launch(text, "k", 1, block, arguments, shared_bytes=shared)
        with pytest.raises(VirtualGPUError, match="has no kernel nosuch"):
            gpu.launch(text, "nosuch", 1, 32, tensors)
        with pytest.raises(VirtualGPUError, match="cannot run on a virtual sm_90a"):
            gpu.launch(module("", target="sm_100a"), "k", 1, 32, tensors)
    with pytest.raises(ValueError, match="sm_70"), virtual_gpu("sm_70"):
        pass
    with virtual_gpu("sm_90a"), pytest.raises(RuntimeError, match="active already"), virtual_gpu("sm_90a"):
        pass


def test_sparse_buffer_shows_a_32_bit_offset_fault() -> None:
    """Fault: an offset that wraps at 2^31 elements lands inside a big buffer unseen."""
    body = """
    ld.global.u64 %rd2, [%in];
    cvt.u32.u64 %r1, %rd2;
    {multiply}
    add.u64 %rd3, %out, %rd3;
    st.global.u8 [%rd3], 1;"""
    big = torch.empty(5 << 30, dtype=torch.uint8)
    element = (1 << 31) + 5
    given = torch.tensor([element], dtype=torch.int64)
    with virtual_gpu("sm_90a") as gpu:
        gpu.launch(module(body.format(multiply="mul.wide.u32 %rd3, %r1, 2;")), "k", 1, 1, [big, given])
        assert int(big[2 * element]) == 1
        with pytest.raises(VirtualGPUError, match="outside every known allocation"):
            gpu.launch(module(body.format(multiply="mul.wide.s32 %rd3, %r1, 2;")), "k", 1, 1, [big, given])
