"""Bulk copies and bulk reductions in the silicon comparison: consecutive bytes, and what blocks of a cluster share."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from moe_numerics.silicon_data import BYTES, operand, operands
from moe_numerics.silicon_scenes import WAIT, Scene, as_bytes

__all__ = ["BEGIN", "REGISTERS", "bulk", "cleared", "copied", "dumped", "filled", "tile_memory"]

BEGIN = """
    mov.u32 %s, tile; mov.u32 %bar, barrier;
    setp.ne.u32 %other, %t, 0;
"""
"""The addresses of the tile and of the mbarrier; thread 0 alone is not %other."""
REGISTERS = (
    ".reg .b32 %k, %n, %v, %w, %bar, %rank, %peer, %far, %farbar, %c<5>; .reg .b16 %mask; .reg .pred %q, %other; "
    ".reg .b64 %at, %d, %e, %policy;"
)


def tile_memory(size: int) -> str:
    """Declares the tile and the mbarrier."""
    return f".shared .align 1024 .b8 tile[{size}]; .shared .align 8 .b8 barrier[8];"


def _loop(label: str, size: int, step: str) -> str:
    return f"""
    mov.u32 %n, %t;
    {label}:
    setp.ge.u32 %q, %n, {size // 4};
    @%q bra {label}_END;
    {step}
    add.u32 %n, %n, 128;
    bra {label};
    {label}_END:
    """


def dumped(size: int, out: int) -> str:
    """Copies the words of the tile to an output, block by block."""
    return _loop(
        "DUMP", size,
        f"mad.lo.u32 %k, %n, 4, %s; ld.shared.b32 %v, [%k]; "
        f"mad.lo.u32 %w, %c, {size // 4}, %n; mad.wide.u32 %at, %w, 4, %p{out}; st.global.b32 [%at], %v;",
    )  # fmt: skip


def copied(size: int, source: int, target: int | None) -> str:
    """Copies words of one buffer in global memory to another; None: to the tile."""
    put = f"mad.wide.u32 %at, %n, 4, %p{target}; st.global.b32 [%at], %v;"
    if target is None:
        put = "mad.lo.u32 %k, %n, 4, %s; st.shared.b32 [%k], %v;"
    return _loop("COPY", size, f"mad.wide.u32 %at, %n, 4, %p{source}; ld.global.b32 %v, [%at]; {put}")


def cleared(size: int) -> str:
    """Fills the tile with a pattern, for the async proxy to write over."""
    clear = _loop("CLEAR", size, "mad.lo.u32 %k, %n, 4, %s; st.shared.b32 [%k], 0xA5A5A5A5;")
    return f"{clear}fence.proxy.async.shared::cta;\n    bar.sync 0;\n"


def filled(size: int, source: int = 0, label: str = "FILL") -> str:
    """Copies words of an input into the tile, for the async proxy to read."""
    copy = copied(size, source, None).replace("COPY", label)
    return f"{copy}fence.proxy.async.shared::cta;\n    bar.sync 0;\n"


def _reduced(op: str, kind: str) -> Scene:
    """A bulk copy to global memory, then a reduction into it."""
    end = f"{op}{'.noftz' if op == 'add' and kind in ('f16', 'bf16') else ''}.{kind}"
    name = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{end}"
    size = 2048
    body = f"""{BEGIN}
    {filled(size)}
    @%other bra LEAVE;
    cp.async.bulk.global.shared::cta.bulk_group [%p2], [%s], {size};
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    LEAVE:
    bar.sync 0;
    {filled(size, 1, "AGAIN")}
    @%other bra DONE;
    {name} [%p2], [%s], {size};
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    DONE:
    """
    values = operands((kind, kind), size // BYTES[kind], seed=9)
    return Scene(
        name, body, (name,), tuple(as_bytes(v) for v in values), (size,), registers=REGISTERS, module=tile_memory(size)
    )


def _across(op: str, kind: str) -> Scene:
    """Each of two blocks combines its words with the other's shared memory."""
    name = f"cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.{op}.{kind}"
    size = 1024
    body = f"""{BEGIN}
    mov.u32 %rank, %cluster_ctarank; xor.b32 %peer, %rank, 1;
    mad.wide.u32 %at, %i, 8, %p0; ld.global.b64 %d, [%at]; mad.wide.u32 %at, %i, 8, %p1; ld.global.b64 %e, [%at];
    mad.lo.u32 %k, %t, 8, %s; st.shared.b64 [%k], %d; st.shared.b64 [%k+{size}], %e;
    fence.proxy.async;
    @%other bra READY;
    mbarrier.init.shared::cta.b64 [%bar], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {size};
    READY:
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    @%other bra SENT;
    mapa.shared::cluster.u32 %far, %s, %peer; mapa.shared::cluster.u32 %farbar, %bar, %peer;
    add.u32 %n, %s, {size};
    {name} [%far], [%n], {size}, [%farbar];
    SENT:
    {WAIT.format(label="WAIT", parity=0)}
    ld.shared.b64 %d, [%k]; mad.wide.u32 %at, %i, 8, %p2; st.global.b64 [%at], %d;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    """
    values = operands((kind, kind), 2 * size // BYTES[kind], seed=10)
    return Scene(
        name, body, (name,), tuple(as_bytes(v) for v in values), (2 * size,), 128, 2, 2, REGISTERS,
        tile_memory(2 * size),
    )  # fmt: skip


def _multicast() -> Scene:
    """Each of two blocks copies half of the bytes to both."""
    size = 2048
    copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
    body = f"""{BEGIN}
    mov.u32 %rank, %cluster_ctarank; mov.b16 %mask, 3;
    @%other bra READY;
    mbarrier.init.shared::cta.b64 [%bar], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {size};
    READY:
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
    @%other bra SENT;
    mad.lo.u32 %k, %rank, {size // 2}, %s; mad.wide.u32 %at, %rank, {size // 2}, %p0;
    {copy} [%k], [%at], {size // 2}, [%bar], %mask;
    SENT:
    {WAIT.format(label="WAIT", parity=0)}
    {dumped(size, 1)}
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    """
    return Scene(
        copy, body, (copy,), (as_bytes(operand("u32", 0, size // 4, 5)),), (2 * size,), 128, 2, 2, REGISTERS,
        tile_memory(size),
    )  # fmt: skip


def _reread() -> Scene:
    """A tile that is written again once its first copy has read it, before that copy is known to be complete."""
    size = 2048
    body = f"""{BEGIN}
    {filled(size)}
    @%other bra LEAVE;
    cp.async.bulk.global.shared::cta.bulk_group [%p1], [%s], {size};
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
    LEAVE:
    bar.sync 0;
    mad.lo.u32 %k, %t, 16, %s; ld.shared.b32 %v, [%k]; not.b32 %v, %v; st.shared.b32 [%k], %v;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @%other bra DONE;
    add.u64 %d, %p1, {size};
    cp.async.bulk.global.shared::cta.bulk_group [%d], [%s], {size};
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    DONE:
    """
    return Scene(
        "cp.async.bulk.wait_group.read", body, ("cp.async.bulk.wait_group.read",),
        (as_bytes(operand("u32", 0, size // 4, 6)),), (2 * size,), registers=REGISTERS, module=tile_memory(size),
    )  # fmt: skip


def bulk() -> Iterator[Scene]:
    """Reductions of every operation and type, a copy to several blocks, and a wait for reads alone."""
    both = [(op, kind) for op in ("add", "min", "max") for kind in ("u32", "s32")]
    both += [("inc", "u32"), ("dec", "u32"), ("add", "u64"), *product(("and", "or", "xor"), ("b32",))]
    wide = [*product(("min", "max"), ("u64", "s64")), *product(("and", "or", "xor"), ("b64",))]
    floats = [*product(("add", "min", "max"), ("f16", "bf16")), ("add", "f32"), ("add", "f64")]
    for op, kind in (*both, *wide, *floats):
        yield _reduced(op, kind)
    for op, kind in both:
        yield _across(op, kind)
    yield _multicast()
    yield _reread()
