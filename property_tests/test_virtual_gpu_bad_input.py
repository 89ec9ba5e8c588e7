"""Bad input gives one clear error that names the value, the rule, and the line where there is one.

Faults this catches: PTX that is run as something else, a launch that no GPU would take, and an error without its place.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_numerics.virtual_gpu import VirtualGPUError, virtual_gpu

HEAD = """.version 8.7
.target {target}
.address_size 64
.visible .entry k(.param .u64 out, .param .u32 count)
{{
    .reg .b32 %r<8>;
    .reg .b64 %rd<4>;
    .reg .f32 %f<4>;
    .reg .pred %p<2>;
    {body}
    ret;
}}
"""


def refused(text: str, line: str, **launch: Any) -> str:
    """The message of the only error that running a text gives; it blames the line that holds `line`."""
    given: dict[str, Any] = {"grid": 1, "block": 32, "args": [torch.zeros(4, dtype=torch.int32), 4], **launch}
    with virtual_gpu("sm_90a", instruction_budget=1_000) as gpu, pytest.raises(VirtualGPUError) as caught:
        gpu.launch(text, "k", **given)
    finding = caught.value.finding
    assert finding.line is not None
    assert line in text.splitlines()[finding.line - 1]
    assert f"PTX line {finding.line}" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("frobnicate.b32 %r1, %r2;", "unknown instruction `frobnicate.b32`"),
        ("add.funny.u32 %r1, %r2, %r3;", "unknown form `add.funny.u32`; the table has"),
        ("mov.f16 %r1, %r2;", "unknown form `mov.f16`"),
        ("setp.lo.f32 %p1, %f1, %f2;", ".lo does not compare .f32"),
        ("mma.sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32 {%r0}, {%r1}, {%r2}, {%r3};", "no combination of shape"),
        ("tcgen05.mma.ws.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, %p1;", "unknown form `tcgen05.mma.ws"),
        ("ld.global.v8.b32 {%r0, %r1, %r2, %r3, %r4, %r5, %r6, %r7}, [%rd1];", "only on sm_100a"),
        ("cvt.rs.bf16x2.f32 %r1, %f1, %f2, %r2;", "only on sm_100a"),
        ("st.param.b32 [out], %r1;", "stores to the parameters of a call only"),
        ("call helper, (%r1);", "a call of helper: device functions are not supported"),
        (".reg .b32 %r3;", "register %r3 is declared twice in one scope"),
        ("HERE: mov.b32 %r1, 0; HERE: ;", "label HERE is defined twice"),
        ("{ .reg .b32 %x; .reg .b64 %x; }", "register %x is declared twice"),
        ("add.sat.u32 %r1, %r2, %r3;", "unknown form `add.sat.u32`"),
        ("cvt.sat.u64.u32 %rd1, %r2;", "nothing to saturate, .u64 holds every .u32"),
        ("max.abs.f32 %f1, %f2, %f3;", ".xorsign and .abs go together"),
        ("fma.rn.ftz.bf16x2 %r1, %r2, %r3, %r4;", "unknown form `fma.rn.ftz.bf16x2`"),
        ("red.acquire.gpu.global.add.u32 [%rd1], %r1;", "unknown form `red.acquire.gpu.global.add.u32`"),
        ("atom.global.add.s64 %rd1, [%rd2], %rd3;", "sums of 64 bits are .u64"),
        ("ld.global.nc.lu.b32 %r1, [%rd1];", ".nc goes with weak loads of .global memory, and with .ca, .cg or .cs"),
        ("ld.global.L2::evict_last.b32 %r1, [%rd1];", ".L2::evict_last goes with .v8.b32 and .v4.b64 only"),
        ("st.global.v4.b64 [%rd1], {%rd0, %rd1, %rd2, %rd3};", "accesses of 32 bytes are to global memory, on sm_100a"),
        ("cp.async.cg.shared.global [%r1], [%rd1], 8;", "cp.async.cg copies 16 bytes"),
        ("cvt.rn.satfinite.tf32.f32 %r1, %f1;", "only on sm_100a"),
        ("LOOP: bra LOOP;", "more than 1000 instructions in a thread: an endless loop"),
    ],
)
def test_ptx_that_cannot_run(body: str, words: str) -> None:
    assert words in refused(HEAD.format(target="sm_90a", body=body), body)


def test_inner_scopes_may_reuse_names() -> None:
    """Fault: braces of inline PTX that declare the same register are taken for a double declaration."""
    body = "{ .reg .b32 %x; mov.b32 %x, 1; } { .reg .b32 %x, %r1; mov.b32 %x, 2; mov.b32 %r1, %x; }"
    with virtual_gpu("sm_90a") as gpu:
        gpu.launch(HEAD.format(target="sm_90a", body=body), "k", 1, 32, [torch.zeros(1), 1])


@pytest.mark.parametrize(
    ("target", "words"),
    [("sm_100a", "PTX for sm_100a cannot run on a virtual sm_90a"), ("gfx90a", ".target gfx90a is not known")],
)
def test_foreign_targets(target: str, words: str) -> None:
    assert words in refused(HEAD.format(target=target, body=""), f".target {target}")


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        ({"shared_bytes": 228 * 1024}, "bytes of shared memory are more than the 232448 of sm_90a"),
        ({"args": [torch.zeros(1)]}, "1 arguments, the kernel takes 2"),
        ({"args": [torch.zeros(1), b"12345678"]}, "argument 1 has 8 bytes, parameter count 4"),
        ({"block": 1056}, "1056 threads; 1 to 1024 are possible"),
        ({"grid": (4, 0)}, "grid (4, 0, 1) is not possible"),
        ({"grid": 3, "cluster": 2}, "grid (3, 1, 1) is not a multiple of cluster (2, 1, 1)"),
    ],
)
def test_launches_that_no_gpu_takes(launch: dict[str, Any], words: str) -> None:
    assert words in refused(HEAD.format(target="sm_90a", body=""), ".entry k", **launch)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        (torch.zeros(1, device="meta"), "a tensor on meta: a virtual GPU works on CPU tensors"),
        ("text", "argument 0 of type str cannot be passed"),
    ],
)
def test_arguments_of_the_wrong_kind(argument: object, words: str) -> None:
    with virtual_gpu("sm_90a") as gpu, pytest.raises(VirtualGPUError, match=words):
        gpu.launch(HEAD.format(target="sm_90a", body=""), "k", 1, 32, [argument, 1])


def test_a_budget_that_is_large_enough_lets_a_loop_end() -> None:
    """Fault: the budget counts other threads' instructions, or cannot be set."""
    body = "mov.u32 %r1, 0; LOOP: add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 300; @%p1 bra LOOP;"
    text = HEAD.format(target="sm_90a", body=body)
    with virtual_gpu("sm_90a", instruction_budget=2_000) as gpu:
        gpu.launch(text, "k", 8, 256, [torch.zeros(1), 1])
    with virtual_gpu("sm_90a", instruction_budget=500) as gpu, pytest.raises(VirtualGPUError, match="endless loop"):
        gpu.launch(text, "k", 1, 32, [torch.zeros(1), 1])
    with (
        pytest.raises(ValueError, match="instruction_budget = 0 must be positive"),
        virtual_gpu("sm_90a", instruction_budget=0),
    ):
        pass


def test_a_sparse_buffer_exists_where_it_is_touched() -> None:
    """Fault: a large buffer takes its whole size in memory, or an offset cut to 32 bits lands in it unseen."""
    body = "ld.param.u64 %rd1, [out]; ld.param.u32 %r1, [count]; {multiply} add.u64 %rd2, %rd1, %rd2;"
    body += " st.global.u8 [%rd2], 1;"
    element = (1 << 31) + 5
    with virtual_gpu("sm_90a") as gpu:
        big = gpu.sparse(16 << 30, torch.uint8)
        wide = HEAD.format(target="sm_90a", body=body.format(multiply="mul.wide.u32 %rd2, %r1, 4;"))
        gpu.launch(wide, "k", 1, 1, [big, element])
        assert int(big[4 * element]) == 1
        narrow = HEAD.format(target="sm_90a", body=body.format(multiply="mul.wide.s32 %rd2, %r1, 4;"))
        with pytest.raises(VirtualGPUError, match="bytes before the start of argument 0") as caught:
            gpu.launch(narrow, "k", 1, 1, [big, element])
        assert "st.global.u8" in str(caught.value.finding.text)
        with pytest.raises(ValueError, match="elements = 0 must be positive"):
            gpu.sparse(0, torch.uint8)


@pytest.mark.parametrize(
    "body",
    [
        "mov.b32 %r1, 7; mov.b64 %rd2, {%r1, %r2}; mov.b64 {%r3, _}, %rd2;",
        "mov.b32 %r1, 7; mov.b64 {_, %r2}, %rd2; mov.b64 %rd2, {%r1, %r2}; mov.b64 {%r3, _}, %rd2;",
    ],
)
def test_elements_that_compilers_leave_undefined_are_no_error(body: str) -> None:
    """Fault: half of a pair that nothing uses stops a correct kernel, or any register may be read unwritten."""
    out = torch.zeros(1, dtype=torch.int32)
    end = "ld.param.u64 %rd1, [out]; st.global.b32 [%rd1], %r3;"
    with virtual_gpu("sm_90a") as gpu:
        gpu.launch(HEAD.format(target="sm_90a", body=body + end), "k", 1, 1, [out, 1])
        assert gpu.findings == []
    assert out.tolist() == [7]
    assert "register %r2 is read before it was written" in refused(
        HEAD.format(target="sm_90a", body="add.u32 %r3, %r2, 1;"), "add.u32 %r3"
    )
