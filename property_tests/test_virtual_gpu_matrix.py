"""wgmma, mma.sync, tcgen05.mma and the matrix moves address memory and registers as the PTX ISA says.

The arithmetic is the reference's; what is tested here is which element of which operand goes where. Faults this
catches: a wrong fragment, descriptor field, swizzle, transposition, negation or scale.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_numerics.reference import tensor_core

from moe_numerics.virtual_gpu import virtual_gpu

Bytes = npt.NDArray[np.uint8]
START = 1024
WIDTH = {0: 16, 1: 32, 2: 64, 3: 128}
WGMMA_MODE = {0: 0, 1: 3, 2: 2, 3: 1}
TCGEN05_MODE = {0: 0, 1: 6, 2: 4, 3: 2}

COPY = """
    .reg .b32 %x, %a, %w, %n, %e;
    .reg .b64 %i, %o, %s;
    .reg .pred %more;
    ld.param.u64 %i, [image];
    ld.param.u64 %o, [out];
    mov.u32 %x, %tid.x;
    mov.u32 %n, %ntid.x;
    shl.b32 %n, %n, 2;
    shl.b32 %e, %x, 2;
    mov.u32 %a, memory;
    add.u32 %a, %a, %e;
    cvt.u64.u32 %s, %e;
    add.u64 %i, %i, %s;
FILL:
    ld.global.u32 %w, [%i];
    st.shared.u32 [%a], %w;
    add.u32 %a, %a, %n;
    add.u32 %e, %e, %n;
    cvt.u64.u32 %s, %n;
    add.u64 %i, %i, %s;
    setp.lt.u32 %more, %e, IMAGE_BYTES;
    @%more bra FILL;
    fence.proxy.async.shared::cta;
    bar.sync 0;
"""


def swizzled(address: int, mode: int) -> int:
    return address ^ ((address >> 7 & {0: 0, 1: 1, 2: 3, 3: 7}[mode]) << 4)


def lay_out(
    image: Bytes, matrix: Bytes, base: int, mode: int, transposed: bool, element: int, modes: dict[int, int], fixed: int
) -> int:
    """Puts [rows, K bytes] into shared memory at `base` and gives the descriptor.

    K-major with the canonical strides of the swizzle; transposed: MN-major.
    """
    rows, depth = matrix.shape
    width = WIDTH[mode]
    if not transposed:
        leading, stride = (8 * 16 * (rows // 8), 128) if mode == 0 else (16, 8 * width)
        for r in range(rows):
            for k in range(depth):
                if mode == 0:
                    at = r // 8 * stride + k // 16 * leading + r % 8 * 16 + k % 16
                else:
                    at = r // 8 * stride + r % 8 * width + k
                image[swizzled(base + at, mode) - START] = matrix[r, k]
    else:
        steps = depth // element
        if mode == 0:
            stride, leading = 128 * (-(-steps // 8)), 128
        else:
            stride = 8 * width
            leading = stride * (-(-steps // 8))
        for r in range(rows):
            for k in range(steps):
                for b in range(element):
                    mn = r * element + b
                    if mode == 0:
                        at = mn // 16 * stride + k // 8 * leading + k % 8 * 16 + mn % 16
                    else:
                        at = mn // width * leading + mn % width + k % 8 * width + k // 8 * stride
                    image[swizzled(base + at, mode) - START] = matrix[r, k * element + b]
    top = 62 if modes is WGMMA_MODE else 61
    return base >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | modes[mode] << top | fixed


def values(rng: np.random.Generator, kind: str, rows: int, depth: int) -> tuple[torch.Tensor, Bytes]:
    """Operand values (or codes) and their bytes [rows, K bytes]."""
    if kind in ("bf16", "f16"):
        x = torch.from_numpy(rng.standard_normal((rows, depth))).to(torch.bfloat16 if kind == "bf16" else torch.float16)
        return x, x.view(torch.uint8).numpy()
    if kind == "tf32":
        x = torch.from_numpy(rng.standard_normal((rows, depth)).astype(np.float32))
        return x, x.view(torch.uint8).numpy()
    if kind == "e2m1":
        codes = rng.integers(0, 16, (rows, depth), np.uint8)
        return torch.from_numpy(codes), codes[:, ::2] | codes[:, 1::2] << 4
    codes = rng.integers(0, 0x78, (rows, depth), np.uint8) | rng.integers(0, 2, (rows, depth), np.uint8) << 7
    return torch.from_numpy(codes), codes


KINDS = {"bf16": (16, 2), "f16": (16, 2), "tf32": (8, 4), "e4m3": (32, 1), "e5m2": (32, 1)}


BLOCKS = 3


def apart(n: int, mma: str) -> str:
    """The instruction on two paths, one of block 0 and one of the others."""
    return f"""
    mov.u32 %r1, %ctaid.x;
    setp.eq.u32 %more, %r1, 0;
    @%more bra OTHER{n};
    {mma}
    bra JOIN{n};
OTHER{n}:
    {mma}
JOIN{n}:
    """


def negated(x: torch.Tensor, kind: str) -> torch.Tensor:
    return x ^ 0x80 if kind in ("e4m3", "e5m2") else -x


def module(target: str, params: str, body: str, size: int) -> str:
    return (
        f".version 8.7\n.target {target}\n.address_size 64\n.extern .shared .align 1024 .b8 memory[];\n"
        f".visible .entry k(.param .u64 image, .param .u64 out{params})\n{{"
        + COPY.replace("IMAGE_BYTES", str(size))
        + body
        + "    ret;\n}\n"
    )


def multiply(
    kind: str, columns: int, mode_a: int, mode_b: int, transposes: tuple[bool, bool], signs: tuple[int, int],
    from_registers: bool, steps: int, schedule: str | int, seed: int, alternate: bool = False,
) -> None:  # fmt: skip
    """Runs wgmma `steps` times on the same operands in three blocks that drift apart, and checks every accumulator.

    alternate: every second product takes other rows of B (8 columns, 32-byte swizzle), so that order matters.
    """
    depth, element = KINDS[kind]
    transposed = tuple(t and element == 2 for t in transposes)
    rng = np.random.Generator(np.random.Philox(seed))
    (a, a_bytes), (b, b_bytes) = values(rng, kind, 64, depth), values(rng, kind, columns * (1 + alternate), depth)
    image = np.zeros(24 * 1024, np.uint8)
    a_bits = lay_out(image, a_bytes, START, mode_a, transposed[0], element, WGMMA_MODE, 0)
    b_bits = lay_out(image, b_bytes, START + 8192, mode_b, transposed[1], element, WGMMA_MODE, 0)
    count = columns // 2
    registers = ", ".join(f"%d{n}" for n in range(count))
    a_operand, loads = "%da", "ld.param.u64 %da, [da];"
    if from_registers:
        # The register fragment of A, prepared by the host behind the image.
        fragment = np.zeros((128, 4, 4), np.uint8)
        each = 4 // element
        for t in range(128):
            lane, warp = t % 32, t // 32
            for r in range(4):
                row = 16 * warp + lane // 4 + 8 * (r % 2)
                first = (each * (lane % 4) + (r // 2) * (depth // 2)) * element
                fragment[t, r] = a_bytes[row, first : first + 4]
        image[22528 : 22528 + 2048] = fragment.reshape(-1)
        loads = "mov.u32 %e, memory; mad.lo.u32 %e, %x, 16, %e; ld.shared.v4.b32 {%a0, %a1, %a2, %a3}, [%e+22528];"
        a_operand = "{%a0, %a1, %a2, %a3}"
    flags = ""
    if element == 2:
        flags = f", {int(transposed[1])}" if from_registers else f", {int(transposed[0])}, {int(transposed[1])}"
    mma = (
        f"wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.f32.{kind}.{kind} {{{registers}}}, {a_operand}, %db, %p, "
        f"{signs[0]}, {signs[1]}{flags};"
    )
    other = mma.replace("%db", "%dc")
    body = f"""
    .reg .b32 %d<{count}>, %a<4>, %r<4>;
    .reg .b64 %da, %db, %dc, %rd<4>;
    .reg .pred %p;
    {loads}
    ld.param.u64 %db, [db];
    add.u64 %dc, %db, {16 * alternate};
    wgmma.fence.sync.aligned;
    setp.ne.u32 %p, 0, 0;
    {mma}
    setp.eq.u32 %p, 0, 0;
    {chr(10).join(apart(n, other) if n % 3 == 1 else mma for n in range(1, steps))}
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    mov.u32 %r1, %ctaid.x;
    mad.lo.u32 %r1, %r1, 128, %x;
    mad.wide.u32 %rd1, %r1, {4 * count}, %o;
    {chr(10).join(f"st.global.b32 [%rd1+{4 * n}], %d{n};" for n in range(count))}
"""
    out = torch.zeros(BLOCKS, 128, count)
    with virtual_gpu("sm_90a", schedule=schedule) as gpu:
        text = module("sm_90a", ", .param .u64 da, .param .u64 db", body, image.size)
        gpu.launch(text, "k", BLOCKS, 128, [torch.from_numpy(image), out, a_bits, b_bits], shared_bytes=image.size)
        assert gpu.findings == []
    left = negated(a, kind) if signs[0] < 0 else a
    right = negated(b, kind) if signs[1] < 0 else b
    formats = {"a_format": kind, "b_format": kind} if element == 1 else {}
    model = f"sm_90.{'e4m3' if element == 1 else kind}"
    rows = [right[columns * (alternate and n % 3 == 1) :][:columns] for n in range(steps)]
    wanted = tensor_core.matmul(left.repeat(1, steps), torch.cat(rows, 1).t(), model=model, **formats)
    t, d = torch.arange(128)[:, None], torch.arange(count)
    row = 16 * (t // 32) + t % 32 // 4 + 8 * (d // 2 % 2)
    column = 8 * (d // 4) + 2 * (t % 4) + d % 2
    wrong = (out.view(torch.int32) != wanted[row, column].view(torch.int32)).nonzero()
    assert not wrong.numel(), f"block, thread, accumulator {wrong[0].tolist()}"


@given(
    kind=st.sampled_from(sorted(KINDS)),
    columns=st.sampled_from([8, 16, 64, 96]),
    mode_a=st.integers(0, 3),
    mode_b=st.integers(0, 3),
    transposes=st.tuples(st.booleans(), st.booleans()),
    signs=st.tuples(st.sampled_from([1, -1]), st.sampled_from([1, -1])),
    from_registers=st.booleans(),
    steps=st.integers(1, 6),
    schedule=st.sampled_from(["fast", *range(12)]),
    seed=st.integers(0, 99),
)
def test_wgmma_multiplies_what_its_descriptors_name(
    kind: str, columns: int, mode_a: int, mode_b: int, transposes: tuple[bool, bool], signs: tuple[int, int],
    from_registers: bool, steps: int, schedule: str | int, seed: int,
) -> None:  # fmt: skip
    """Fault: a fragment, layout, swizzle, transposition or sign of wgmma is off."""
    multiply(kind, columns, mode_a, mode_b, transposes, signs, from_registers, steps, schedule, seed)


@pytest.mark.parametrize("schedule", range(24))
def test_wgmma_adds_in_order_of_issue(schedule: int) -> None:
    """Fault: a schedule that completes products out of order changes the order of the additions."""
    multiply("bf16", 8, 1, 1, (False, False), (1, 1), False, 6, schedule, schedule, alternate=True)


MMA_SYNC = {("bf16", 16): (4, 2), ("bf16", 8): (2, 1), ("f16", 16): (4, 2), ("f16", 8): (2, 1), ("tf32", 8): (4, 2),
            ("tf32", 4): (2, 1)}  # fmt: skip


@pytest.mark.parametrize("shape", sorted(MMA_SYNC))
def test_mma_sync_fragments(shape: tuple[str, int]) -> None:
    """Fault: an element of an mma.sync fragment belongs to another row or column."""
    kind, depth = shape
    a_count, b_count = MMA_SYNC[shape]
    element = KINDS[kind][1]
    each = 4 // element
    rng = np.random.Generator(np.random.Philox(depth))
    (a, a_bytes), (b, b_bytes) = values(rng, kind, 16, depth), values(rng, kind, 8, depth)
    c = torch.from_numpy(rng.standard_normal((16, 8)).astype(np.float32))
    image = np.zeros((32, 16, 4), np.uint8)
    for lane in range(32):
        for r in range(a_count):
            k = (each * (lane % 4) + (r // 2) * 4 * each) * element
            image[lane, r] = a_bytes[lane // 4 + 8 * (r % 2), k : k + 4]
        for r in range(b_count):
            k = (each * (lane % 4) + r * 4 * each) * element
            image[lane, 4 + r] = b_bytes[lane // 4, k : k + 4]
        for n in range(4):
            image[lane, 8 + n] = c[lane // 4 + 8 * (n // 2), 2 * (lane % 4) + n % 2].numpy().reshape(1).view(np.uint8)
    left = ", ".join(f"%a{n}" for n in range(a_count))
    right = ", ".join(f"%a{4 + n}" for n in range(b_count))
    body = f"""
    .reg .b32 %a<16>, %d<4>;
    .reg .b64 %rd<4>;
    mov.u32 %e, memory;
    mad.lo.u32 %e, %x, 64, %e;
    {chr(10).join(f"ld.shared.b32 %a{n}, [%e+{4 * n}];" for n in range(12))}
    mma.sync.aligned.m16n8k{depth}.row.col.f32.{kind}.{kind}.f32 {{%d0, %d1, %d2, %d3}}, {{{left}}}, {{{right}}}, {{%a8, %a9, %a10, %a11}};
    mad.wide.u32 %rd1, %x, 16, %o;
    st.global.v4.b32 [%rd1], {{%d0, %d1, %d2, %d3}};
"""  # noqa: E501
    out = torch.zeros(32, 4)
    flat = torch.from_numpy(image.reshape(-1))
    with virtual_gpu("sm_90a") as gpu:
        gpu.launch(module("sm_90a", "", body, image.size), "k", 1, 32, [flat, out], shared_bytes=image.size)
    wanted = tensor_core.matmul(a, b.t(), c, model=f"sm_90.{kind}")
    for lane in range(32):
        for n in range(4):
            assert out[lane, n] == wanted[lane // 4 + 8 * (n // 2), 2 * (lane % 4) + n % 2]


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_and_stmatrix(count: int, transposed: bool) -> None:
    """Fault: a row of an 8x8 matrix goes to the wrong lanes; a transposed pair is swapped."""
    trans = ".trans" if transposed else ""
    registers = ", ".join(f"%m{n}" for n in range(count))
    body = f"""
    .reg .b32 %m<4>, %row, %to;
    .reg .b64 %rd<4>;
    mov.u32 %row, memory;
    mad.lo.u32 %to, %x, 16, %row;
    ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{registers}}}, [%to];
    mad.wide.u32 %rd1, %x, 16, %o;
    {chr(10).join(f"st.global.b32 [%rd1+{4 * n}], %m{n};" for n in range(count))}
    bar.sync 0;
    stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%to+1024], {{{registers}}};
    bar.sync 0;
    ld.shared.v4.b32 {{%m0, %m1, %m2, %m3}}, [%to+1024];
    st.global.v4.b32 [%rd1+512], {{%m0, %m1, %m2, %m3}};
"""
    image = np.arange(1024, dtype=np.uint16)
    out = torch.zeros(2, 32, 4, dtype=torch.int32)
    raw = torch.from_numpy(image.view(np.uint8).copy())
    with virtual_gpu("sm_90a") as gpu:
        gpu.launch(module("sm_90a", "", body, 2048), "k", 1, 32, [raw, out], shared_bytes=2048)
        assert gpu.findings == []
    matrices = image[: 64 * count].reshape(count, 8, 8)
    for lane in range(32):
        for j in range(count):
            for k in range(2):
                row, column = lane // 4, 2 * (lane % 4) + k
                wanted = matrices[j][column, row] if transposed else matrices[j][row, column]
                assert int(out[0, lane, j]) >> (16 * k) & 0xFFFF == wanted
    # stmatrix is the inverse: the rows come back where they were.
    stored = out[1].numpy().view(np.uint16).reshape(-1)
    assert stored[: 64 * count].tolist() == image[: 64 * count].tolist()


TCGEN05 = """
    .reg .b32 %d<{count}>, %r<8>, %t, %id;
    .reg .b64 %da, %db, %sa, %sb, %rd<4>;
    .reg .pred %p, %q, %first, %warp0;
    .shared .align 8 .b64 bar;
    .shared .align 4 .b32 place;
    ld.param.u64 %da, [da];
    ld.param.u64 %db, [db];
    ld.param.u64 %sa, [sa];
    ld.param.u64 %sb, [sb];
    ld.param.u32 %id, [id];
    setp.eq.u32 %first, %x, 0;
    setp.lt.u32 %warp0, %x, 32;
    mov.u32 %r1, bar;
    mov.u32 %r2, place;
    @%first mbarrier.init.shared.b64 [%r1], 1;
    @%warp0 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 256;
    tcgen05.fence::before_thread_sync;
    bar.sync 0;
    tcgen05.fence::after_thread_sync;
    ld.shared.b32 %t, [%r2];
    @!%first bra WAIT;
    setp.ne.u32 %q, 0, 0;
    setp.eq.u32 %p, 0, 0;
    add.u32 %r3, %t, 192;
    add.u32 %r4, %t, 200;
    {issue}
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1];
WAIT:
    mbarrier.try_wait.parity.shared.b64 %q, [%r1], 0;
    @!%q bra WAIT;
    tcgen05.fence::after_thread_sync;
    shl.b32 %r5, %x, 16;
    and.b32 %r5, %r5, 0x600000;
    add.u32 %r5, %r5, %t;
    tcgen05.ld.sync.aligned.32x32b.x{count}.b32 {{{registers}}}, [%r5];
    tcgen05.wait::ld.sync.aligned;
    mad.wide.u32 %rd1, %x, {bytes}, %o;
    {stores}
    bar.sync 0;
    @%warp0 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
    @%warp0 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %t, 256;
"""
PARAMS = ", .param .u64 da, .param .u64 db, .param .u64 sa, .param .u64 sb, .param .u32 id"


def tcgen05_text(issue: str, count: int, size: int) -> str:
    body = TCGEN05.format(
        count=count, issue=issue, bytes=4 * count, registers=", ".join(f"%d{n}" for n in range(count)),
        stores="\n    ".join(f"st.global.b32 [%rd1+{4 * n}], %d{n};" for n in range(count)),
    )  # fmt: skip
    return module("sm_100a", PARAMS, body, size)


PLAIN = {"bf16": ("f16", 1), "f16": ("f16", 0), "tf32": ("tf32", 2), "e4m3": ("f8f6f4", 0), "e5m2": ("f8f6f4", 1)}


@given(
    kind=st.sampled_from(sorted(PLAIN)),
    columns=st.sampled_from([16, 32, 64]),
    mode_a=st.integers(0, 3),
    mode_b=st.integers(0, 3),
    transposes=st.tuples(st.booleans(), st.booleans()),
    negate=st.tuples(st.booleans(), st.booleans()),
    steps=st.integers(1, 3),
    schedule=st.sampled_from(["fast", 1, 2, 3]),
    seed=st.integers(0, 99),
)
def test_tcgen05_multiplies_what_its_descriptors_name(
    kind: str, columns: int, mode_a: int, mode_b: int, transposes: tuple[bool, bool], negate: tuple[bool, bool],
    steps: int, schedule: str | int, seed: int,
) -> None:  # fmt: skip
    """Fault: a layout, swizzle, type, transposition or sign of tcgen05.mma is off."""
    depth, element = KINDS[kind]
    # tf32 tiles are swizzled differently along M and N.
    transposed = tuple(t and element <= 2 for t in transposes)
    rng = np.random.Generator(np.random.Philox(seed))
    (a, a_bytes), (b, b_bytes) = values(rng, kind, 128, depth), values(rng, kind, columns, depth)
    image = np.zeros(24 * 1024, np.uint8)
    # The kernel's static variables come first: dynamic shared memory begins at 2048.
    shift = 1024
    a_bits = lay_out(image, a_bytes, START, mode_a, transposed[0], element, TCGEN05_MODE, 1 << 46) + (shift >> 4)
    b_bits = lay_out(image, b_bytes, START + 16384, mode_b, transposed[1], element, TCGEN05_MODE, 1 << 46)
    b_bits += shift >> 4
    name, code = PLAIN[kind]
    bits = (
        1 << 4 | code << 7 | code << 10 | negate[0] << 13 | negate[1] << 14 | transposed[0] << 15 | transposed[1] << 16
        | columns // 8 << 17 | 128 // 16 << 24
    )  # fmt: skip
    mma = f"tcgen05.mma.cta_group::1.kind::{name} [%t], %da, %db, %id, "
    issue = mma + "%q;\n" + (mma + "%p;\n") * (steps - 1)
    out = torch.zeros(128, columns)
    with virtual_gpu("sm_100a", schedule=schedule) as gpu:
        text = tcgen05_text(issue, columns, image.size)
        arguments = [torch.from_numpy(image), out, a_bits, b_bits, 0, 0, bits]
        gpu.launch(text, "k", 1, 128, arguments, shared_bytes=image.size)
        assert gpu.findings == []
    left, right = (negated(v, kind) if n else v for v, n in zip((a, b), negate, strict=True))
    formats = {"a_format": kind, "b_format": kind} if element == 1 else {}
    model = f"sm_100.{'f8f6f4' if element == 1 else kind}"
    wanted = tensor_core.matmul(left.repeat(1, steps), right.repeat(1, steps).t(), model=model, **formats)
    assert torch.equal(out.view(torch.int32), wanted.view(torch.int32))


Scaled = tuple[str, int, int, str, Callable[[np.random.Generator, tuple[int, int]], Bytes]]
SCALED: dict[str, Scaled] = {
    "mxf8f6f4": ("e4m3", 32, 32, "mxf8f6f4", lambda g, s: g.integers(120, 132, s, np.uint8)),
    "mxf4": ("e2m1", 64, 32, "mxf4", lambda g, s: g.integers(120, 132, s, np.uint8)),
    "mxf4nvf4": ("e2m1", 64, 16, "mxf4nvf4", lambda g, s: g.integers(40, 80, s, np.uint8)),
}


@given(
    name=st.sampled_from(sorted(SCALED)),
    columns=st.sampled_from([16, 32, 64]),
    identity=st.integers(0, 3),
    schedule=st.sampled_from(["fast", 1, 2, 3]),
    seed=st.integers(0, 99),
)
def test_tcgen05_block_scales(name: str, columns: int, identity: int, schedule: str | int, seed: int) -> None:
    """Fault: a block scale is taken from another row, column or byte of tensor memory."""
    kind, depth, block, model, draw = SCALED[name]
    rng = np.random.Generator(np.random.Philox(seed))
    (a, a_bytes), (b, b_bytes) = values(rng, kind, 128, depth), values(rng, kind, columns, depth)
    per_step = depth // block
    if per_step == 4:
        identity = 0
    elif per_step == 2:
        identity = identity // 2 * 2
    image = np.zeros(24 * 1024, np.uint8)
    shift = 1024
    a_bits = lay_out(image, a_bytes, START, 1, False, 1, TCGEN05_MODE, 1 << 46) + (shift >> 4)
    b_bits = lay_out(image, b_bytes, START + 8192, 1, False, 1, TCGEN05_MODE, 1 << 46) + (shift >> 4)
    scales, descriptors = [], []
    for rows, base in ((128, 16384), (columns, 16384 + 1024)):
        codes = draw(rng, (128, 4))
        # Row r of the scales lies in atom row r % 32 at word r // 32.
        atom = np.zeros((32, 4, 4), np.uint8)
        for r in range(128):
            atom[r % 32, r // 32] = codes[r]
        image[base : base + 512] = atom.reshape(-1)
        scales.append(torch.from_numpy(np.ascontiguousarray(codes[:rows, identity : identity + per_step])))
        descriptors.append((START + shift + base) >> 4 | (128 >> 4) << 32 | 1 << 46)
    bits = (
        identity << 4 | (0 if kind == "e4m3" else 1) << 7 | (0 if kind == "e4m3" else 1) << 10 | columns // 8 << 17
        | (0 if name == "mxf4nvf4" else 1) << 23 | 1 << 27 | identity << 29
    )  # fmt: skip
    size = {"mxf8f6f4": "block32", "mxf4": "block32", "mxf4nvf4": "block16"}[name]
    issue = (
        "tcgen05.cp.cta_group::1.32x128b.warpx4 [%r3], %sa;\ntcgen05.cp.cta_group::1.32x128b.warpx4 [%r4], %sb;\n"
        f"tcgen05.mma.cta_group::1.kind::{name}.block_scale.{size} [%t], %da, %db, %id, [%r3], [%r4], %q;"
    )
    out = torch.zeros(128, columns)
    with virtual_gpu("sm_100a", schedule=schedule) as gpu:
        arguments = [torch.from_numpy(image), out, a_bits, b_bits, *descriptors, bits]
        gpu.launch(tcgen05_text(issue, columns, image.size), "k", 1, 128, arguments, shared_bytes=image.size)
        assert gpu.findings == []
    wanted = tensor_core.matmul(
        a, b.t(), model=f"sm_100.{model}", a_format=kind, b_format=kind, scales_a=scales[0], scales_b=scales[1].t()
    )
    assert torch.equal(out.view(torch.int32), wanted.view(torch.int32))
