"""Tensor maps that a kernel changes, calls, and instructions that stop the device, in the silicon comparison."""

from __future__ import annotations

from collections.abc import Iterator

from moe_numerics.silicon_bulk import BEGIN, REGISTERS, copied, dumped, tile_memory
from moe_numerics.silicon_data import operand
from moe_numerics.silicon_scenes import STOPPED, WAIT, Scene, as_bytes
from moe_numerics.silicon_tensors import Tile

__all__ = ["changes"]

_DIMENSIONS = (1, 2, 1000, 1 << 31, (1 << 32) - 1, 0)
_STRIDES = (16, 48, 0x1234567890, (1 << 40) - 16, 1 << 40, 8, (1 << 64) - 1)


def _replacements() -> Iterator[tuple[str, str, int, str]]:
    """(field, its dimension as the instruction names it, value, type) of every field, in range and out of it."""
    for address in (0x123456789ABCDEF0, (1 << 64) - 1):
        yield "global_address", "", address, "b64"
    for rank in range(6):
        yield "rank", "", rank, "b32"
    for dimension in range(5):
        for field, values in (
            ("box_dim", (1, 64, 256, 257)), ("global_dim", _DIMENSIONS), ("element_stride", (1, 2, 3, 8, 9)),
        ):  # fmt: skip
            for value in values:
                yield field, f"{dimension}, ", value, "b32"
    for dimension in range(4):
        for value in _STRIDES:
            yield "global_stride", f"{dimension}, ", value, "b64"
    for field, count in (("elemtype", 13), ("interleave_layout", 3), ("swizzle_mode", 4), ("fill_mode", 2)):
        for value in range(count):
            yield field, "", value, "b32"


def _fields(space: str) -> Scene:
    """Each replacement on random bits of its own, in memory of this space."""
    lines, names = [], []
    for n, (field, dimension, value, kind) in enumerate(_replacements()):
        name = f"tensormap.replace.tile.{field}.{space}.b1024.{kind}"
        place = f"[{'%s' if space == 'shared::cta' else '%p1'}+{128 * n}]"
        register = {"b64": "%d", "b32": "%v"}[kind]
        if field in ("elemtype", "interleave_layout", "swizzle_mode", "fill_mode"):
            lines.append(f"{name} {place}, {dimension}{value};")
        else:
            lines.append(f"mov.{kind} {register}, {value:#x}; {name} {place}, {dimension}{register};")
        names.append(name)
    size = 128 * len(lines)
    listing = "\n    ".join(lines)
    bring, take = copied(size, 0, 1), ""
    if space == "shared::cta":
        bring, take = copied(size, 0, None), dumped(size, 1)
    body = f"""{BEGIN}
    {bring}
    bar.sync 0;
    @%other bra CHANGED;
    {listing}
    CHANGED:
    bar.sync 0;
    {take}"""
    return Scene(
        f"tensormap.replace.{space}", body, tuple(dict.fromkeys(names)), (as_bytes(operand("u32", 0, size // 4, 12)),),
        (size,), registers=REGISTERS, module=tile_memory(size),
    )  # fmt: skip


def _made() -> Scene:
    """A tensor map made from another one in shared memory, published, and used by a load."""
    first, wanted = Tile("u32", (4,), (4,), (0,)), Tile("bf16", (40, 6, 3), (16, 4, 2), (24, 3, -1), 1)
    size, m = wanted.map.box_bytes, wanted.map
    fence = "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned"
    acquire = "fence.proxy.tensormap::generic.acquire.gpu"
    copy = "cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
    replace = "tensormap.replace.tile"
    lists = {"box_dim": m.box, "global_dim": m.sizes, "element_stride": m.steps, "global_stride": m.strides}
    lines = [f"{replace}.global_address.shared::cta.b1024.b64 [%s], %p0;"]
    for field, values in lists.items():
        kind, register = ("b64", "%d") if field == "global_stride" else ("b32", "%v")
        lines += [
            f"mov.{kind} {register}, {value}; {replace}.{field}.shared::cta.b1024.{kind} [%s], {n}, {register};"
            for n, value in enumerate(values)
        ]
    lines += [f"mov.b32 %v, 2; {replace}.rank.shared::cta.b1024.b32 [%s], %v;"]
    lines += [f"{replace}.{field}.shared::cta.b1024.b32 [%s], {value};" for field, value in (
        ("elemtype", 10), ("swizzle_mode", 1), ("interleave_layout", 0), ("fill_mode", 0))]  # fmt: skip
    listing = "\n    ".join(lines)
    body = f"""{BEGIN}{wanted.moves}
    mov.u64 %e, made; cvta.global.u64 %e, %e;
    setp.ge.u32 %q, %t, 32;
    @%q bra READY;
    mad.wide.u32 %at, %t, 4, %p2; ld.b32 %v, [%at]; mad.lo.u32 %k, %t, 4, %s; st.shared.b32 [%k], %v;
    bar.warp.sync 0xffffffff;
    @%other bra CHANGED;
    {listing}
    CHANGED:
    bar.warp.sync 0xffffffff;
    {fence} [%e], [%s], 128;
    @%other bra READY;
    {acquire} [%e], 128;
    mbarrier.init.shared::cta.b64 [%bar], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {size};
    fence.proxy.async.shared::cta;
    {copy} [%s], [%e, {wanted.where}], [%bar];
    READY:
    bar.sync 0;
    {WAIT.format(label="WAIT", parity=0)}
    {dumped(size, 1)}"""
    return Scene(
        "tensormap.made", body, (fence, acquire, copy), (as_bytes(operand("u32", 0, wanted.tensor_bytes // 4, 13)),),
        (size,), registers=REGISTERS, module=f"{tile_memory(max(size, 128))} .global .align 128 .b8 made[128];",
        maps=((first.map, 0),),
    )  # fmt: skip


def _called() -> Scene:
    """`printf`, which says how many arguments it printed."""
    text = ", ".join(str(c) for c in b"silicon %d %f\n\0")
    lines = []
    for n, call in enumerate(("call.uni", "call")):
        lines.append(
            f"{{ .param .b64 q0; st.param.b64 [q0], %d; .param .b64 q1; st.param.b64 [q1], %e; .param .b32 r0; "
            f"{call} (r0), vprintf, (q0, q1); ld.param.b32 %v, [r0]; st.global.b32 [%p1+{4 * n}], %v; }}"
        )
    listing = "\n    ".join(lines)
    body = f"""
    mov.u64 %e, frame; ld.global.b64 %at, [%p0]; st.local.b64 [%e], %at; st.local.b64 [%e+8], %at;
    cvta.local.u64 %e, %e; mov.u64 %d, text; cvta.global.u64 %d, %d;
    {listing}
    """
    return Scene(
        "call", body, ("call.uni", "call", "st.param.b64", "ld.param.b32"), (as_bytes(operand("u64", 0, 1)),), (8,), 1,
        registers=f"{REGISTERS} .local .align 8 .b8 frame[16];",
        module=f".global .align 1 .b8 text[15] = {{{text}}}; "
        ".extern .func (.param .b32 r) vprintf(.param .b64 a, .param .b64 b);",
    )  # fmt: skip


def _stopped(instruction: str) -> Scene:
    """A kernel that half of its threads end."""
    body = f"""
    setp.lt.u32 %q, %t, 64;
    @%q {instruction};
    st.global.b64 [%p1], %p0;
    """
    return Scene(
        f"{instruction}.stops", body, (instruction,), (as_bytes(operand("u64", 0, 1)),), (len(STOPPED),),
        registers=REGISTERS, stops=True,
    )  # fmt: skip


def changes() -> Iterator[Scene]:
    """Fields of tensor maps in both spaces, a map that a load uses, a call, and what ends a kernel."""
    yield _fields("shared::cta")
    yield _fields("global")
    yield _made()
    yield _called()
    yield _stopped("trap")
    yield _stopped("brkpt")
