"""Loads, stores and addresses in the silicon comparison."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from moe_numerics.silicon_data import BYTES, operand
from moe_numerics.silicon_scenes import Scene, as_bytes

__all__ = ["memories"]

_LOADED = ("b8", "u8", "s8", "b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64")


def _loads() -> Iterator[Scene]:
    """Loads and stores of every width and sign, in global, shared and generic addresses."""
    data = as_bytes(operand("u64", 0, 512))
    for space in ("global", "shared", "local", "generic"):
        lines, names = [], []
        dotted = "" if space == "generic" else f".{space}"
        base = {"global": "%at", "shared": "%k", "local": "%l", "generic": "%g"}[space]
        for n, kind in enumerate(_LOADED):
            wide = kind.endswith("64")
            register = "%d" if wide else "%v" if not kind.startswith("b") or kind == "b32" else "%h"
            if kind == "b8":
                register = "%v"
            lines.append(f"ld{dotted}.{kind} {register}, [{base}+{8 * (n % 2)}];")
            if register == "%h":
                lines.append("cvt.u32.u16 %v, %h;")
            lines.append(f"st.global.{'b64 ' if wide else 'b32 '}[%out+{8 * n}], {'%d' if wide else '%v'};")
            lines.append(f"st{dotted}.{kind} [{base}+{8 * (n % 2)}], {register};")
            names += [f"ld{dotted}.{kind}", f"st{dotted}.{kind}"]
        lines.append(f"ld{dotted}.v2.b32 {{%v, %w}}, [{base}]; st{dotted}.v2.b32 [{base}+8], {{%w, %v}};")
        lines.append(f"ld{dotted}.v4.b32 {{%v, %w, %x, %y}}, [{base}]; st{dotted}.v4.b32 [{base}], {{%y, %v, %w, %x}};")
        lines.append(f"ld{dotted}.v2.b64 {{%d, %e}}, [{base}]; st{dotted}.v2.b64 [{base}], {{%e, %d}};")
        lines.append(f"ld{dotted}.v2.b64 {{%d, %e}}, [{base}]; st.global.v2.b64 [%out+112], {{%d, %e}};")
        names += [f"{op}{dotted}.{v}" for op in ("ld", "st") for v in ("v2.b32", "v4.b32", "v2.b64")]
        listing = "\n    ".join(lines)
        body = f"""
        mad.wide.u32 %src, %t, 16, %p0; mad.wide.u32 %at, %t, 16, %p2; mad.wide.u32 %out, %t, 128, %p1;
        mov.u32 %s, cells; mad.lo.u32 %k, %t, 16, %s; mov.u64 %l, frame;
        ld.global.v2.b64 {{%d, %e}}, [%src];
        st.global.v2.b64 [%at], {{%d, %e}}; st.shared.v2.b64 [%k], {{%d, %e}}; st.local.v2.b64 [%l], {{%d, %e}};
        cvt.u64.u32 %g, %k; cvta.shared.u64 %g, %g;
        {listing}
        """
        yield Scene(
            f"memory.{space}", body, (*names, "cvta.shared.u64"), (data[:2048],), (128 * 128, 2048),
            registers=".reg .b16 %h; .reg .b32 %k, %v, %w, %x, %y; "
            ".reg .b64 %src, %at, %out, %l, %g, %d, %e; .local .align 16 .b8 frame[32];",
            module=".shared .align 128 .b8 cells[2048];",
        )  # fmt: skip


def _addresses() -> Iterator[Scene]:
    """Generic addresses of every space, there and back."""
    body = (
        """
    mad.wide.u32 %src, %t, 4, %p0; ld.global.b32 %v, [%src];
    mov.u32 %s, cells; mad.lo.u32 %k, %t, 4, %s; cvt.u64.u32 %a, %k; mov.u64 %l, frame;
    mad.wide.u32 %out, %t, 32, %p1;
    cvta.shared.u64 %g, %a; st.b32 [%g], %v; ld.shared.b32 %r0, [%k];
    cvta.to.shared.u64 %b, %g; cvt.u32.u64 %n, %b; ld.shared.b32 %r1, [%n];
    add.u32 %v, %v, 1;
    cvta.local.u64 %h, %l; st.b32 [%h], %v; ld.local.b32 %r2, [%l];
    cvta.to.local.u64 %b, %h; ld.local.b32 %r3, [%b];
    cvta.to.global.u64 %b, %src; ld.global.b32 %r4, [%b]; cvta.global.u64 %b, %b; ld.b32 %r5, [%b];
    mov.b32 %r6, 0;
    """
        + "".join(
            f"isspacep.{space} %q, {register}; selp.b32 %n, {1 << bit}, 0, %q; or.b32 %r6, %r6, %n;\n    "
            for bit, (space, register) in enumerate(product(("global", "shared", "local"), ("%g", "%h", "%src")))
        )
        + """
    st.global.v4.b32 [%out], {%r0, %r1, %r2, %r3}; st.global.v4.b32 [%out+16], {%r4, %r5, %r6, %v};
    """
    )
    yield Scene(
        "memory.addresses", body,
        ("cvta.shared.u64", "cvta.to.shared.u64", "cvta.local.u64", "cvta.to.local.u64", "cvta.global.u64",
         "cvta.to.global.u64", "isspacep.global", "isspacep.shared", "isspacep.local"),
        (as_bytes(operand("u32", 0, 128)),), (128 * 32,),
        registers=".reg .b32 %k, %v, %n, %r<7>; .reg .b64 %src, %out, %a, %b, %g, %h, %l; .reg .pred %q; "
        ".local .align 16 .b8 frame[32];",
        module=".shared .align 128 .b8 cells[512];",
    )  # fmt: skip


def _spaces() -> Scene:
    """Addresses of constants, parameters and the cluster's shared memory, and which space each is in."""
    spaces = ("global", "shared", "shared::cta", "shared::cluster", "local", "const", "param", "param::entry")
    tests, names = [], []
    for n, register in enumerate(("%gc", "%gp", "%ge", "%far", "%near", "%gl", "%at")):
        tests.append(f"mov.b32 %r{n}, 0;")
        for bit, space in enumerate(spaces):
            tests.append(f"isspacep.{space} %q, {register}; selp.b32 %n, {1 << bit}, 0, %q; or.b32 %r{n}, %r{n}, %n;")
            names.append(f"isspacep.{space}")
    listing = "\n    ".join(tests)
    body = f"""
    mad.wide.u32 %at, %i, 4, %p0; mad.wide.u32 %out, %i, 64, %p1; ld.global.nc.b32 %v, [%at];
    mov.u32 %rank, %cluster_ctarank; xor.b32 %peer, %rank, 1;
    mov.u32 %s, cells; mad.lo.u32 %k, %t, 4, %s; st.shared.b32 [%k], %v;
    mov.u64 %c0, table; cvta.const.u64 %gc, %c0; ld.b32 %w0, [%gc+4];
    cvta.to.const.u64 %c0, %gc; ld.const.b32 %w1, [%c0+8];
    mov.u64 %c1, p0; cvta.param.u64 %gp, %c1; ld.b64 %d, [%gp]; cvta.to.param.u64 %c1, %gp; ld.param.b64 %e, [%c1];
    mov.u64 %c2, p0; cvta.param::entry.u64 %ge, %c2; cvta.to.param::entry.u64 %c2, %ge; ld.param::entry.b64 %f, [%c2];
    sub.u64 %d, %d, %e; sub.u64 %e, %e, %f; cvt.u32.u64 %w2, %d; cvt.u32.u64 %w3, %e;
    cvt.u64.u32 %c3, %k; cvta.shared::cluster.u64 %near, %c3; cvta.to.shared::cluster.u64 %c3, %near;
    cvta.shared::cta.u64 %near, %c3;
    mapa.u64 %far, %near, %peer; getctarank.u64 %w4, %far; getctarank.u64 %w5, %near;
    cvt.u64.u32 %c4, %k; mapa.shared::cluster.u64 %c4, %c4, %peer; getctarank.shared::cluster.u64 %n, %c4;
    cvt.u32.u64 %k2, %c4;
    mov.u64 %l, frame; cvta.local.u64 %gl, %l; st.b32 [%gl], %v;
    {listing}
    barrier.cluster.arrive.release;
    barrier.cluster.wait.acquire;
    ld.b32 %w6, [%far];
    add.u32 %n, %n, %v; st.shared::cluster.b32 [%k2+512], %n;
    barrier.cluster.arrive;
    barrier.cluster.wait;
    ld.shared.b32 %w7, [%k+512];
    st.global.v4.b32 [%out], {{%w0, %w1, %w2, %w3}}; st.global.v4.b32 [%out+16], {{%w4, %w5, %w6, %w7}};
    st.global.v4.b32 [%out+32], {{%r0, %r1, %r2, %r3}}; st.global.v4.b32 [%out+48], {{%r4, %r5, %r6, 0}};
    """
    shows = (
        *dict.fromkeys(names), "cvta.const.u64", "cvta.to.const.u64", "ld.const.b32", "cvta.param.u64",
        "cvta.to.param.u64", "ld.param.b64", "cvta.param::entry.u64", "cvta.to.param::entry.u64", "ld.param::entry.b64",
        "cvta.shared::cluster.u64", "cvta.to.shared::cluster.u64", "cvta.shared::cta.u64", "mapa.u64", "getctarank.u64",
        "mapa.shared::cluster.u64", "getctarank.shared::cluster.u64", "st.shared::cluster.b32", "ld.global.nc.b32",
        "barrier.cluster.arrive.release", "barrier.cluster.wait.acquire", "barrier.cluster.arrive",
        "barrier.cluster.wait",
    )  # fmt: skip
    return Scene(
        "memory.spaces", body, shows, (as_bytes(operand("u32", 0, 256)),), (256 * 64,), 128, 2, 2,
        registers=".reg .b32 %r<7>, %w<8>, %v, %n, %k, %k2, %rank, %peer; .reg .pred %q; "
        ".reg .b64 %at, %out, %c<5>, %gc, %gp, %ge, %gl, %near, %far, %d, %e, %f, %l; .local .align 16 .b8 frame[32];",
        module=".const .align 8 .b32 table[4] = {0x11, 0x2233, 0x44556677, 0x8899AABB}; "
        ".shared .align 8 .b8 cells[1024];",
    )  # fmt: skip


_HELD = ".reg .b16 %h; .reg .b32 %v, %w, %x, %y; .reg .b64 %src, %at, %out, %d, %e;"


def _register(kind: str) -> str:
    """A register that takes a value of this type."""
    return "%d" if BYTES[kind] == 8 else "%h" if BYTES[kind] == 2 else "%v"


def _kept(kind: str, n: int) -> str:
    """Stores the register of a type as the n-th result of a thread."""
    register = _register(kind)
    widen = "cvt.u32.u16 %v, %h; " if register == "%h" else ""
    return f"{widen}st.global.b{64 if register == '%d' else 32} [%out+{8 * n}], {'%d' if register == '%d' else '%v'};"


def _read_only() -> Scene:
    """Loads of memory that the kernel does not change: through a cache level of their own, and uniform ones."""
    lines: list[str] = []
    names: list[str] = []
    forms = [*(f"ld.global.{level}.nc" for level in ("ca", "cg", "cs")), "ldu.global", "ldu"]
    for form in forms:
        for kind in _LOADED:
            name = f"{form}.{kind}"
            lines.append(f"{name} {_register(kind)}, [%src+{8 * (len(names) % 2)}]; {_kept(kind, len(names))}")
            names.append(name)
        for vector, registers in (("v2.b64", "{%d, %e}"), ("v2.b32", "{%v, %w}"), ("v4.b32", "{%v, %w, %x, %y}")):
            name = f"{form}.{vector}"
            result = "%e" if vector.endswith("64") else "%w"
            lines.append(f"{name} {registers}, [%src]; st.global.b{vector[-2:]} [%out+{8 * len(names)}], {result};")
            names.append(name)
    size = 8 * len(names)
    listing = "\n    ".join(lines)
    # Uniform loads are for addresses that a warp shares.
    body = f"""
    shr.u32 %v, %t, 5; mad.wide.u32 %src, %v, 16, %p0; mad.wide.u32 %out, %t, {size}, %p1;
    {listing}
    """
    return Scene(
        "memory.read_only", body, tuple(names), (as_bytes(operand("u64", 0, 8, 14)),), (128 * size,),
        registers=_HELD,
    )  # fmt: skip


def _mapped() -> Scene:
    """Loads and stores as of memory that a device has mapped."""
    lines, names = [], []
    for n, (kind, space) in enumerate(product(_LOADED, ("", ".global"))):
        load, store = f"ld.mmio.relaxed.sys{space}.{kind}", f"st.mmio.relaxed.sys{space}.{kind}"
        register = _register(kind)
        lines.append(f"{load} {register}, [%at+{8 * (n % 2)}]; {store} [%at+{8 - 8 * (n % 2)}], {register};")
        lines.append(_kept(kind, n))
        names += [load, store]
    size = 8 * len(lines) // 2
    listing = "\n    ".join(lines)
    body = f"""
    mad.wide.u32 %src, %t, 16, %p0; mad.wide.u32 %out, %t, {size}, %p1; mad.wide.u32 %at, %t, 16, %p2;
    ld.global.v2.b64 {{%d, %e}}, [%src]; st.global.v2.b64 [%at], {{%d, %e}};
    {listing}
    """
    return Scene(
        "memory.mapped", body, tuple(names), (as_bytes(operand("u64", 0, 256, 15)),), (128 * size, 2048),
        registers=_HELD,
    )  # fmt: skip


def memories() -> Iterator[Scene]:
    """Loads and stores of every type, and generic addresses."""
    yield from _loads()
    yield from _addresses()
    yield _spaces()
    yield _read_only()
    yield _mapped()
