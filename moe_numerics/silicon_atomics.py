"""Atomic operations in the silicon comparison."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from moe_numerics.silicon_data import operand, operands
from moe_numerics.silicon_scenes import Scene, as_bytes

__all__ = ["atomics"]

_REGISTER = {1: "b16", 2: "b16", 4: "b32", 8: "b64"}


def _width(kind: str) -> int:
    return 4 if kind.endswith("16x2") else int("".join(c for c in kind if c.isdigit())) // 8


def _atomic(op: str, kind: str, space: str, returns: bool) -> Scene:
    """Every thread on a cell of its own: the value found and the value left."""
    size = _width(kind)
    bits = f"b{8 * size}"
    end = f"{'.noftz' if '16' in kind and kind[0] in 'fb' and op != 'cas' else ''}.{kind}"
    name = f"{'atom' if returns else 'red'}.{space}.{op}{end}"
    count = 1024
    kinds = (kind,) * (3 if op == "cas" else 2)
    values = operands(kinds, count, seed=5)
    sources = "%v1, %v2" if op == "cas" else "%v1"
    at = "%cell" if space == "global" else "%s"
    registers = f".reg .{bits} %v<3>, %old, %now; .reg .b64 %cell, %at<4>;"
    offset = "\n    ".join(
        f"mad.wide.u32 %at{n}, %i, {size}, %p{n}; ld.global.{bits} %v{n}, [%at{n}];" for n in range(len(kinds))
    )
    base = len(kinds)
    inside = f"st.{space}.{bits} [{at}], %v0;"
    operation = f"{name} {'%old, ' if returns else ''}[{at}], {sources};"
    body = f"""
    {offset}
    mad.wide.u32 %cell, %i, {size}, %p{base + 1};
    mov.u32 %s, cells; mad.lo.u32 %s, %t, {size}, %s;
    mov.{bits} %old, 0;
    {inside}
    {operation}
    ld.{space}.{bits} %now, [{at}];
    st.global.{bits} [%cell], %now;
    mad.wide.u32 %at3, %i, {size}, %p{base}; st.global.{bits} [%at3], %old;
    """
    return Scene(
        f"{name}", body, (name,), tuple(as_bytes(v) for v in values), (count * size,) * 2, 128, count // 128,
        registers=registers, module=f".shared .align 8 .b8 cells[{128 * size}];",
    )  # fmt: skip


def atomics() -> Iterator[Scene]:
    """Every operation and type, each thread on a cell of its own, then sums that all threads share."""
    yield from _contended()
    integer = [(op, kind) for op in ("add", "min", "max") for kind in ("u32", "s32", "u64", "s64")]
    integer.remove(("add", "s64"))
    logic = [(op, kind) for op in ("and", "or", "xor", "exch") for kind in ("b32", "b64")]
    counters = [("inc", "u32"), ("dec", "u32")]
    swaps = [("cas", kind) for kind in ("b16", "b32", "b64")]
    floats = [("add", kind) for kind in ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2")]
    for space in ("global", "shared"):
        for op, kind in (*integer, *logic, *counters, *swaps, *floats):
            yield _atomic(op, kind, space, True)
            if op not in ("exch", "cas"):
                yield _atomic(op, kind, space, False)
    far = [("add", "u32"), ("exch", "b32"), ("inc", "u32"), ("cas", "b64"), ("add", "f32"), ("add", "f16x2")]
    for op, kind in (*far, ("and", "b32")):
        yield _atomic(op, kind, "shared::cluster", True)
        if op not in ("exch", "cas"):
            yield _atomic(op, kind, "shared::cluster", False)
    for op, kind in product(("min", "max"), ("f16", "bf16", "f16x2", "bf16x2")):
        yield _atomic_vector(op, kind, 2, True)
        yield _atomic_vector(op, kind, 2, False)
    for kind, counts in (("f32", (2, 4)), ("f16x2", (2, 4)), ("bf16x2", (2, 4)), ("f16", (4, 8)), ("bf16", (4, 8))):
        for count in counts:
            yield _atomic_vector("add", kind, count, True)
            yield _atomic_vector("add", kind, count, False)


def _atomic_vector(op: str, kind: str, width: int, returns: bool) -> Scene:
    size = _width(kind)
    bits = f"b{8 * size}"
    vector = f".v{width}"
    end = f"{'.noftz' if kind != 'f32' else ''}{vector}.{kind}"
    if kind == "f32":
        end = f"{vector}.f32"
    name = f"{'atom' if returns else 'red'}.global.{op}{end}"
    count = 512
    cells, values = operands((kind, kind), count * width, seed=6)
    registers = f".reg .{bits} %v<{width}>, %o<{width}>, %n<{width}>; .reg .b64 %cell, %at<3>;"
    each = range(width)
    loads = "\n    ".join(
        f"ld.global.{bits} %v{k}, [%at1+{k * size}]; ld.global.{bits} %n{k}, [%at0+{k * size}];" for k in each
    )
    copies = "\n    ".join(f"st.global.{bits} [%cell+{k * size}], %n{k}; mov.{bits} %o{k}, 0;" for k in each)
    outs = "\n    ".join(f"st.global.{bits} [%at2+{k * size}], %o{k};" for k in each)
    found = f"{{{', '.join(f'%o{k}' for k in each)}}}, " if returns else ""
    step = size * width
    body = f"""
    mad.wide.u32 %at0, %i, {step}, %p0; mad.wide.u32 %at1, %i, {step}, %p1;
    mad.wide.u32 %at2, %i, {step}, %p2; mad.wide.u32 %cell, %i, {step}, %p3;
    {loads}
    {copies}
    {name} {found}[%cell], {{{", ".join(f"%v{k}" for k in each)}}};
    {outs}
    """
    return Scene(
        name,
        body,
        (name,),
        (as_bytes(cells), as_bytes(values)),
        (count * step,) * 2,
        128,
        count // 128,
        registers=registers,
    )


def _contended() -> Iterator[Scene]:
    """All threads on five cells: the sums of integers do not depend on the order."""
    cells = operand("b32:few", 0, 1024)
    values = operand("u32", 1, 1024)
    for name in ("red.global.add.u32", "red.global.max.u32", "red.global.xor.b32", "red.shared.add.u32"):
        shared = ".shared." in name
        at = "%s" if shared else "%cell"
        body = f"""
        mad.wide.u32 %at0, %i, 4, %p0; mad.wide.u32 %at1, %i, 4, %p1;
        ld.global.b32 %n, [%at0]; ld.global.b32 %v, [%at1];
        mad.wide.u32 %cell, %n, 4, %p2;
        mov.u32 %s, cells;
        setp.lt.u32 %q, %t, 8;
        mad.lo.u32 %k, %t, 4, %s;
        @%q st.shared.b32 [%k], 0;
        bar.sync 0;
        mad.lo.u32 %s, %n, 4, %s;
        {name} [{at}], %v;
        bar.sync 0;
        """
        if shared:
            body += """
        @!%q bra LEAVE;
        ld.shared.b32 %v, [%k];
        mad.wide.u32 %cell, %t, 4, %p2;
        red.global.add.u32 [%cell], %v;
        LEAVE:
        """
        yield Scene(
            f"contended.{name}", body, (name, "bar.sync"), (as_bytes(cells), as_bytes(values)), (32,), 128, 8,
            registers=".reg .b32 %n, %v, %k; .reg .pred %q; .reg .b64 %cell, %at<2>;",
            module=".shared .align 8 .b8 cells[64];",
        )  # fmt: skip
