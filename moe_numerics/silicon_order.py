"""Order and hints in the silicon comparison: instructions whose effect shows in the results of others."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

from moe_numerics.silicon_data import operand, operands
from moe_numerics.silicon_scenes import WAIT, Scene, as_bytes

__all__ = ["orders"]

_LEVELS = ("L2::evict_last", "L2::evict_normal", "L2::evict_first", "L2::evict_unchanged")


def _barriers() -> Scene:
    """Every spelling of arriving and reducing at a barrier of a block."""
    lines, names = [], []
    spellings = (("bar.cta", ""), ("barrier", ""), ("barrier.cta", ".aligned"), ("barrier", ".aligned"))
    for result, (opcode, aligned) in enumerate(spellings):
        popc = f"{opcode}.red.popc{aligned}.u32"
        lines.append(f"{popc} %r{result}, 0, %q;")
        names.append(popc)
        for op in ("and", "or"):
            name = f"{opcode}.red.{op}{aligned}.pred"
            weight = 200 if op == "and" else 400
            lines.append(f"{name} %a, 0, %q; selp.b32 %n, {weight}, 0, %a; add.u32 %r{result}, %r{result}, %n;")
            names.append(name)
    listing = "\n    ".join(lines)
    meetings = []
    for number, (opcode, aligned) in enumerate((*spellings[:3], ("bar", "")), 1):
        arrive, sync = f"{opcode}.arrive{aligned}", f"{opcode}.sync{aligned}"
        names += [arrive, sync]
        meetings.append(
            f"@%half bra TAKE{number}; st.shared.b32 [%k], %v; {arrive} {number}, 128; bra MET{number}; "
            f"TAKE{number}: {sync} {number}, 128; ld.shared.b32 %n, [%k+256]; xor.b32 %v, %v, %n; "
            f"MET{number}: bar.sync 0;"
        )
    met = "\n    ".join(meetings)
    body = f"""
    mad.wide.u32 %at, %i, 4, %p0; ld.global.b32 %v, [%at];
    and.b32 %n, %v, 3; setp.ne.u32 %q, %n, 0; setp.lt.u32 %half, %t, 64;
    {listing}
    mov.u32 %s, cells; mad.lo.u32 %k, %t, 4, %s;
    {met}
    mad.wide.u32 %at, %i, 16, %p1; st.global.v4.b32 [%at], {{%r0, %r1, %r2, %r3}};
    mad.wide.u32 %at, %i, 4, %p2; st.global.b32 [%at], %v;
    """
    return Scene(
        "barrier.spellings", body, tuple(names), (as_bytes(operand("u32", 0, 256)),), (256 * 16, 1024), 128, 2,
        registers=".reg .b32 %r<4>, %v, %n, %k; .reg .pred %q, %a, %half; .reg .b64 %at;",
        module=".shared .align 8 .b8 cells[512];",
    )  # fmt: skip


def _hints() -> Scene:
    """Policies, prefetches, fences and waits between loads and stores: no value changes."""
    policies = [f"createpolicy.fractional.{level}.b64 %policy, 1.0;" for level in _LEVELS]
    policies += [f"createpolicy.fractional.L2::evict_last.{second}.b64 %policy, 0.5;" for second in _LEVELS[2:]]
    policies += [f"createpolicy.range.global.{level}.b64 %policy, [%at], 16, 64;" for level in _LEVELS]
    policies += [f"createpolicy.range.global.L2::evict_last.{s}.b64 %policy, [%at], 16, 64;" for s in _LEVELS[2:]]
    policies += ["createpolicy.cvt.L2.b64 %policy, 0x10F0000000000000;"]
    hints = [f"prefetch.{space}.{level} [%at];" for space, level in (("global", "L1"), ("global", "L2"))]
    hints += [f"prefetch.global.{level} [%at];" for level in _LEVELS[:2]]
    hints += ["prefetch.L1 [%at];", "prefetch.local.L1 [%l];", "prefetchu.L1 [%at];",
              "applypriority.global.L2::evict_normal [%p0], 128;", "nanosleep.u32 20;", "pmevent 1;", "pmevent.mask 3;",
              "cp.async.bulk.prefetch.L2.global [%p0], 512;"]  # fmt: skip
    fences = [f"membar.{level};" for level in ("cta", "gl", "sys")]
    fences += [f"fence{sem}.{scope};" for sem, scope in product(
        (".sc", ".acq_rel", ".acquire", ".release", ""), ("cta", "cluster", "gpu", "sys"))]  # fmt: skip
    fences += ["fence.proxy.alias;", "fence.proxy.async;", "fence.proxy.async.global;",
               "fence.proxy.async.shared::cluster;"]  # fmt: skip
    fences += [f"fence.proxy.tensormap::generic.release.{scope};" for scope in ("cta", "cluster", "gpu", "sys")]
    fences += ["membar.proxy.alias;"]
    fences += [f"fence{kind}.{sem}.sync_restrict::shared::{place}.cluster;" for kind, (sem, place) in product(
        ("", ".proxy.async::generic"), (("acquire", "cluster"), ("release", "cta")))]  # fmt: skip
    waits = ["setmaxnreg.dec.sync.aligned.u32 40;", "setmaxnreg.inc.sync.aligned.u32 64;",
             "griddepcontrol.launch_dependents;", "griddepcontrol.wait;"]  # fmt: skip
    every = [*policies, *hints, *fences, *waits]
    listing = "\n    ".join(every)
    names = tuple(dict.fromkeys(line.split()[0].rstrip(";") for line in every))
    body = f"""
    mad.wide.u32 %at, %i, 4, %p0; mad.wide.u32 %out, %i, 4, %p1; mov.u64 %l, frame;
    ld.global.b32 %v, [%at];
    {listing}
    createpolicy.fractional.L2::evict_first.b64 %policy, 1.0;
    ld.global.L2::cache_hint.b32 %n, [%at], %policy;
    add.u32 %v, %v, %n;
    st.global.L2::cache_hint.b32 [%out], %v, %policy;
    """
    return Scene(
        "hints", body, names, (as_bytes(operand("u32", 0, 128)),), (512,),
        registers=".reg .b32 %v, %n; .reg .b64 %at, %out, %policy, %l; .local .align 16 .b8 frame[32];",
    )  # fmt: skip


def _discarded() -> Scene:
    """Discarded bytes are undefined until they are written again."""
    body = """
    mad.wide.u32 %at, %t, 4, %p0; mad.wide.u32 %out, %t, 4, %p1; ld.global.b32 %v, [%at];
    setp.ne.u32 %q, %t, 0;
    @%q bra READY;
    discard.global.L2 [%p1], 128;
    READY:
    bar.sync 0;
    st.global.b32 [%out], %v;
    """
    return Scene(
        "discard", body, ("discard.global.L2",), (as_bytes(operand("u32", 0, 32)),), (128,), 32,
        registers=".reg .b32 %v; .reg .b64 %at, %out; .reg .pred %q;",
    )  # fmt: skip


def _branches() -> Scene:
    """A table of branches, and threads that leave early in three ways."""
    body = """
    mad.wide.u32 %at, %i, 4, %p0; mad.wide.u32 %out, %i, 4, %p1; ld.global.b32 %v, [%at];
    and.b32 %n, %v, 3;
    TABLE: .branchtargets ZERO, ONE, TWO, THREE;
    brx.idx %n, TABLE;
    ZERO: add.u32 %v, %v, 17; bra MEET;
    ONE: mul.lo.u32 %v, %v, 5; bra.uni MEET;
    TWO: xor.b32 %v, %v, %i; st.global.b32 [%out], %v; ret;
    THREE: st.global.b32 [%out], %n; exit;
    MEET:
    st.global.b32 [%out], %v;
    and.b32 %n, %c, 1;
    BLOCKS: .branchtargets EVEN, ODD;
    brx.idx.uni %n, BLOCKS;
    ODD: add.u32 %v, %v, 3;
    EVEN:
    st.global.b32 [%out], %v;
    setp.gt.u32 %q, %v, 0x80000000;
    @%q ret;
    add.u32 %v, %v, 1; st.global.b32 [%out], %v;
    ret.uni;
    """
    shows = ("brx.idx", "brx.idx.uni", "bra", "bra.uni", "ret", "exit", "ret.uni")
    return Scene(
        "branches", body, shows, (as_bytes(operand("u32", 0, 512)),), (2048,), 128, 4,
        registers=".reg .b32 %v, %n; .reg .b64 %at, %out; .reg .pred %q;",
    )  # fmt: skip


def _counts() -> Scene:
    """One thread counts arrivals and bytes: what is pending, and when a phase ends."""
    lines, names = [], []

    def add(name: str, operands_: str) -> None:
        lines.append(f"{name} {operands_};")
        names.append(name)

    def test(n: int) -> None:
        lines.append(f"mbarrier.test_wait.shared::cta.b64 %q, [%bar], %token; selp.b32 %n, {1 << n}, 0, %q; "
                     "or.b32 %r3, %r3, %n;")  # fmt: skip

    add("mbarrier.init.shared::cta.b64", "[%bar], 6")
    add("mbarrier.arrive.shared::cta.b64", "%token, [%bar]")
    add("mbarrier.pending_count.b64", "%r0, %token")
    add("mbarrier.arrive.noComplete.shared::cta.b64", "%state, [%bar], 2")
    add("mbarrier.pending_count.b64", "%r1, %state")
    test(0)
    add("mbarrier.expect_tx.relaxed.cta.shared::cta.b64", "[%bar], 64")
    add("mbarrier.arrive_drop.noComplete.shared::cta.b64", "%state, [%bar], 1")
    add("mbarrier.pending_count.b64", "%r2, %state")
    add("mbarrier.arrive_drop.expect_tx.relaxed.cta.shared::cta.b64", "%state, [%bar], 32")
    add("mbarrier.arrive.release.cta.shared::cta.b64", "%state, [%bar], 1")
    test(1)
    add("mbarrier.complete_tx.relaxed.cta.shared::cta.b64", "[%bar], 64")
    test(2)
    add("mbarrier.complete_tx.relaxed.cta.shared::cta.b64", "[%bar], 32")
    test(3)
    add("mbarrier.arrive.shared::cta.b64", "%token, [%bar], 3")
    add("mbarrier.pending_count.b64", "%r4, %token")
    test(4)
    add("mbarrier.arrive.expect_tx.shared::cta.b64", "%token, [%bar], 0")
    add("mbarrier.pending_count.b64", "%r5, %token")
    test(5)
    listing = "\n    ".join(lines)
    names.append("mbarrier.test_wait.shared::cta.b64")
    body = f"""
    mov.u32 %bar, barrier; mov.b32 %r3, 0;
    {listing}
    st.global.v4.b32 [%p1], {{%r0, %r1, %r2, %r3}}; st.global.v2.b32 [%p1+16], {{%r4, %r5}};
    """
    return Scene(
        "mbarrier.counts", body, tuple(dict.fromkeys(names)), (np.zeros(16, np.uint8),), (32,), 1,
        registers=".reg .b32 %bar, %n, %r<6>; .reg .b64 %token, %state; .reg .pred %q;",
        module=".shared .align 8 .b8 barrier[8];",
    )  # fmt: skip


def _remote() -> Scene:
    """Every thread arrives at the barrier of the other block of its cluster, in every way there is."""
    ways = (
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%far]",
        "mbarrier.arrive_drop.release.cluster.shared::cluster.b64 _, [%far]",
        "mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%far], 4",
        "mbarrier.arrive_drop.expect_tx.release.cluster.shared::cluster.b64 _, [%far], 4",
    )
    phases = "\n    ".join(
        f"""@%other{n} bra LATER{n};
    {"mbarrier.expect_tx.relaxed.cluster.shared::cluster.b64 [%far], 4;" if n < 2 else ""}
    {way};
    mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%far], 4;
    LATER{n}:
    {WAIT.format(label=f"WAIT{n}", parity=n % 2)}
    mbarrier.test_wait.parity.shared::cta.b64 %q, [%bar], {n % 2}; selp.b32 %n, {1 << n}, 0, %q; or.b32 %v, %v, %n;
    mbarrier.test_wait.parity.shared::cta.b64 %q, [%bar], {1 - n % 2}; selp.b32 %n, {16 << n}, 0, %q; or.b32 %v, %v, %n;
    barrier.cluster.arrive; barrier.cluster.wait;"""
        for n, way in enumerate(ways)
    )
    limits = " ".join(f"setp.ge.u32 %other{n}, %t, {limit};" for n, limit in enumerate((128, 128, 96, 96)))
    body = f"""
    mov.u32 %bar, barrier; mov.u32 %rank, %cluster_ctarank; xor.b32 %peer, %rank, 1; mov.b32 %v, 0;
    mapa.shared::cluster.u32 %far, %bar, %peer; setp.ne.u32 %q, %t, 0; {limits}
    @%q bra READY;
    mbarrier.init.shared::cta.b64 [%bar], 128;
    fence.mbarrier_init.release.cluster;
    READY:
    barrier.cluster.arrive; barrier.cluster.wait;
    {phases}
    mad.wide.u32 %at, %i, 4, %p1; st.global.b32 [%at], %v;
    """
    # The second phase drops every arrival but those of the first quarter, so that the later ones need fewer.
    body = body.replace(ways[1], f"setp.ge.u32 %q, %t, 32; @%q {ways[1]}; @!%q {ways[0]}")
    body = body.replace(ways[3], f"setp.ge.u32 %q, %t, 16; @%q {ways[3]}; @!%q {ways[2]}")
    body = body.replace("setp.ge.u32 %other2, %t, 96;", "setp.ge.u32 %other2, %t, 32;")
    body = body.replace("setp.ge.u32 %other3, %t, 96;", "setp.ge.u32 %other3, %t, 32;")
    names = [way.split()[0] for way in ways]
    names += ["mbarrier.expect_tx.relaxed.cluster.shared::cluster.b64",
              "mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64"]  # fmt: skip
    return Scene(
        "mbarrier.remote", body, tuple(names), (np.zeros(16, np.uint8),), (1024,), 128, 2, 2,
        registers=".reg .b32 %bar, %n, %v, %rank, %peer, %far; .reg .b64 %at; .reg .pred %q, %other<4>;",
        module=".shared .align 8 .b8 barrier[8];",
    )  # fmt: skip


def _copied() -> Iterator[Scene]:
    """`cp.async` that arrives at an mbarrier, and the wait for all copies."""
    for noinc in ("", ".noinc"):
        name = f"cp.async.mbarrier.arrive{noinc}.shared::cta.b64"
        count = 128 if noinc else 1
        more = "" if noinc else "@!%other mbarrier.arrive.shared::cta.b64 _, [%bar];"
        body = f"""
    mov.u32 %s, tile; mov.u32 %bar, barrier; mad.lo.u32 %k, %t, 16, %s; mad.wide.u32 %at, %t, 16, %p0;
    setp.ne.u32 %other, %t, 0;
    @!%other mbarrier.init.shared::cta.b64 [%bar], {count};
    bar.sync 0;
    cp.async.ca.shared::cta.global [%k], [%at], 16;
    {name} [%bar];
    bar.sync 0;
    {more}
    {WAIT.format(label="WAIT", parity=0)}
    xor.b32 %k, %k, 1008; ld.shared.v4.b32 {{%r0, %r1, %r2, %r3}}, [%k];
    cp.async.cg.shared::cta.global [%k], [%at], 16, 8;
    cp.async.wait_all;
    ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%k];
    mad.wide.u32 %at, %t, 32, %p1;
    st.global.v4.b32 [%at], {{%r0, %r1, %r2, %r3}}; st.global.v4.b32 [%at+16], {{%r4, %r5, %r6, %r7}};
    """
        # All have read what others copied before the tile is written again.
        body = body.replace("    cp.async.cg", "    bar.sync 0;\n    cp.async.cg")
        yield Scene(
            name, body, (name, "cp.async.wait_all"), (as_bytes(operand("u32", 0, 512)),), (128 * 32,),
            registers=".reg .b32 %k, %bar, %r<8>; .reg .b64 %at; .reg .pred %q, %other;",
            module=".shared .align 2048 .b8 tile[2048]; .shared .align 8 .b8 barrier[8];",
        )  # fmt: skip


def _sent(name: str, kind: str, width: int) -> Scene:
    """Every thread sends a value to the other block, which waits for all of them."""
    size = int(kind[1:]) // 8
    values = operands((kind, kind), 256 * width, seed=11)
    step = size * width
    bits = f"b{8 * size}"
    each = range(width)
    group = "%v0" if width == 1 else "{" + ", ".join(f"%v{n}" for n in each) + "}"
    loads = " ".join(
        f"ld.global.{bits} %v{n}, [%at0+{n * size}]; ld.global.{bits} %w, [%at1+{n * size}]; "
        f"st.shared.{bits} [%k+{n * size}], %w;" for n in each
    )  # fmt: skip
    stores = " ".join(f"ld.shared.{bits} %w, [%k+{n * size}]; st.global.{bits} [%at2+{n * size}], %w;" for n in each)
    body = f"""
    mov.u32 %s, cells; mov.u32 %bar, barrier; mov.u32 %rank, %cluster_ctarank; xor.b32 %peer, %rank, 1;
    mad.lo.u32 %k, %t, {step}, %s;
    mad.wide.u32 %at0, %i, {step}, %p0; mad.wide.u32 %at1, %i, {step}, %p1; mad.wide.u32 %at2, %i, {step}, %p2;
    {loads}
    setp.ne.u32 %other, %t, 0;
    @%other bra READY;
    mbarrier.init.shared::cta.b64 [%bar], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {128 * step};
    READY:
    barrier.cluster.arrive; barrier.cluster.wait;
    mapa.shared::cluster.u32 %far, %k, %peer; mapa.shared::cluster.u32 %farbar, %bar, %peer;
    {name} [%far], {group}, [%farbar];
    {WAIT.format(label="WAIT", parity=0)}
    {stores}
    barrier.cluster.arrive; barrier.cluster.wait;
    """
    return Scene(
        name, body, (name,), tuple(as_bytes(v) for v in values), (256 * step,), 128, 2, 2,
        registers=f".reg .b32 %k, %bar, %rank, %peer, %far, %farbar; .reg .{bits} %v<4>, %w; .reg .b64 %at<3>; "
        ".reg .pred %q, %other;",
        module=f".shared .align 16 .b8 cells[{128 * step}]; .shared .align 8 .b8 barrier[8];",
    )  # fmt: skip


def _asynchronous() -> Iterator[Scene]:
    end = ".mbarrier::complete_tx::bytes"
    for vector, kind in product(("", ".v2", ".v4"), ("b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64")):
        if not (vector == ".v4" and kind.endswith("64")):
            yield _sent(f"st.async.shared::cluster{end}{vector}.{kind}", kind, int(vector[2:] or 1))
    forms = [("add", kind) for kind in ("u32", "s32", "u64")] + list(product(("min", "max"), ("u32", "s32")))
    forms += [("inc", "u32"), ("dec", "u32"), ("and", "b32"), ("or", "b32"), ("xor", "b32")]
    for op, kind in forms:
        yield _sent(f"red.async.relaxed.cluster.shared::cluster{end}.{op}.{kind}", kind, 1)


def _bulk() -> Scene:
    """Bulk copies into the own block's memory, and from it into the other block's."""
    load = "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes"
    across = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
    body = f"""
    mov.u32 %s, tile; mov.u32 %bar, barrier; mov.u32 %rank, %cluster_ctarank; xor.b32 %peer, %rank, 1;
    setp.ne.u32 %other, %t, 0;
    @%other bra READY;
    mbarrier.init.shared::cta.b64 [%bar], 1; mbarrier.init.shared::cta.b64 [%bar+8], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 512;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar+8], 512;
    mad.wide.u32 %at, %rank, 512, %p0;
    {load} [%s], [%at], 512, [%bar];
    READY:
    barrier.cluster.arrive; barrier.cluster.wait;
    {WAIT.format(label="WAIT", parity=0)}
    @%other bra SENT;
    add.u32 %n, %s, 512; mapa.shared::cluster.u32 %far, %n, %peer;
    add.u32 %n, %bar, 8; mapa.shared::cluster.u32 %farbar, %n, %peer;
    {across} [%far], [%s], 512, [%farbar];
    SENT:
    {WAIT.format(label="WAIT2", parity=0).replace("[%bar]", "[%bar+8]")}
    mad.lo.u32 %k, %t, 8, %s; ld.shared.b64 %d, [%k]; mad.wide.u32 %at, %i, 8, %p1; st.global.b64 [%at], %d;
    barrier.cluster.arrive; barrier.cluster.wait;
    """
    return Scene(
        "cp.async.bulk.across", body, (load, across), (as_bytes(operand("u32", 0, 256)),), (2048,), 128, 2, 2,
        registers=".reg .b32 %k, %n, %bar, %rank, %peer, %far, %farbar; .reg .b64 %at, %d; .reg .pred %q, %other;",
        module=".shared .align 128 .b8 tile[1024]; .shared .align 8 .b8 barrier[16];",
    )  # fmt: skip


def orders() -> Iterator[Scene]:
    """Barriers, hints, branches and asynchronous stores."""
    yield from (_barriers(), _hints(), _discarded(), _branches(), _counts(), _remote(), _bulk())
    yield from _copied()
    yield from _asynchronous()
