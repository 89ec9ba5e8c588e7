"""Probes of the silicon comparison for forms next to those that compilers emit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from moe_numerics.silicon_lines import Line, Probe, join, named, split

__all__ = ["neighbours"]

_DIRECTED = (".rz", ".rm", ".rp")
_ROUNDED = (".rn", *_DIRECTED)
_FTZ = ("", ".ftz")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
_INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")


def _float64() -> Iterator[Probe]:
    names = [*join(("add", "sub", "mul", "div"), _DIRECTED, [".f64"]), "copysign.f64"]
    yield from split("directed.binary.f64", named(names, "f64", 2), ("f64",) * 2)
    yield from split("directed.unary.f64", named(join(("rcp", "sqrt"), _DIRECTED, [".f64"]), "f64", 1), ("f64",))
    names = [*join(["fma"], _DIRECTED, [".f64"]), *join(["mad"], _ROUNDED, [".f64"])]
    yield from split("directed.fma.f64", named(names, "f64", 3), ("f64",) * 3)


def _comparisons() -> Iterator[Probe]:
    for kind in ("f16x2", "bf16x2"):
        flushes = _FTZ if kind == "f16x2" else ("",)
        names = join(["setp."], _COMPARISONS, flushes, [f".{kind}"])
        lines = [Line(f"{name} {{d}}|{{e}}, {{a}}, {{b}};", ("pred", "pred")) for name in names]
        yield from split(f"setp.{kind}", lines, (kind,) * 2)
        names = join(["setp.lt."], ("and", "or", "xor"), [f".{kind}"])
        lines = [Line(f"{name} {{d}}|{{e}}, {{a}}, {{b}}, {{c}};", ("pred", "pred")) for name in names]
        yield from split(f"setp.combined.{kind}", lines, (kind, kind, "pred"))
        for result in (kind, "u32", "s32"):
            names = join(["set."], _COMPARISONS, flushes, [f".{result}.{kind}"])
            yield from split(f"set.{result}.{kind}", named(names, "b32", 2), (kind,) * 2)
        names = join(["set.lt."], ("and", "or", "xor"), [f".{kind}.{kind}"])
        yield from split(f"set.combined.{kind}", named(names, "b32", 3), (kind, kind, "pred"))
    for kind, result in product(("u16", "s16", "u32", "s32", "u64", "s64", "f32", "f64"), ("f16", "bf16")):
        yield from split(f"set.{result}.{kind}", named(join(["set."], ("eq", "lt"), [f".{result}.{kind}"]), "b16", 2),
                         (kind,) * 2)  # fmt: skip
    for kind in ("b16", "u16", "s16"):
        for by in ("s32", "f32"):
            yield from split(f"slct.{kind}.{by}", named([f"slct.{kind}.{by}"], kind, 3), (kind, kind, by))
    for kind in ("b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64"):
        yield from split(f"slct.ftz.{kind}", named([f"slct.ftz.{kind}.f32"], kind, 3), (kind, kind, "f32"))


def _integers() -> Iterator[Probe]:
    yield from split("mad24.sat", named(["mad24.hi.sat.s32"], "s32", 3), ("s32",) * 3)
    yield from split("relu.s16x2", named(["min.relu.s16x2", "max.relu.s16x2"], "b32", 2), ("b32",) * 2)
    lines = [Line(f"fns.b32 {{d}}, {{a}}, {{b}}, {offset};", ("b32",)) for offset in (0, 1, 2, 7, -1, -3, -32)]
    yield from split("fns", lines, ("b32", "u32:shift"))
    lines = [
        Line(f"lop3.{op}.b32 {{d}}|{{e}}, {{a}}, {{b}}, {{c}}, {table}, {{g}};", ("b32", "pred"))
        for op in ("or", "and") for table in (0x80, 0x17, 0x00)
    ]  # fmt: skip
    yield from split("lop3.predicate", lines, ("b32", "b32", "b32", "pred"))
    for kind in ("u32", "s32", "u64", "s64"):
        lines = [
            Line(
                f"mad.{half}.cc.{kind} {{d}}, {{a}}, {{b}}, {{c}}; madc.{half}.cc.{kind} {{e}}, {{b}}, {{c}}, {{a}}; "
                f"madc.{half}.{kind} {{f}}, {{a}}, {{c}}, {{b}};",
                (kind,) * 3,
            )
            for half in ("lo", "hi")
        ]
        yield from split(f"carry.mad.{kind}", lines, (kind,) * 3)


def _conversions() -> Iterator[Probe]:
    modes = ("", ".rni", ".rzi", ".rmi", ".rpi")
    for kind in ("f16", "bf16", "f64"):
        names = join(["cvt"], modes, ("",) if kind == "bf16" else ("", ".sat"), [f".{kind}.{kind}"])
        yield from split(f"cvt.{kind}.{kind}", named(names, kind, 1), (kind,))
    for source, target in (("bf16", "f16"), ("f16", "bf16")):
        names = join(["cvt"], _ROUNDED, [f".{target}.{source}"])
        yield from split(f"cvt.{target}.{source}", named(names, target, 1), (source,))
    yield from split("cvt.sat.f32.f16", named(join(["cvt"], _FTZ, [".sat.f32.f16"]), "f32", 1), ("f16",))
    yield from split("cvt.ftz.f32.bf16", named(["cvt.ftz.f32.bf16"], "f32", 1), ("bf16",))
    yield from split("cvt.f64.bf16", named(["cvt.f64.bf16"], "f64", 1), ("bf16",))
    yield from split("cvt.sat.f64.f16", named(["cvt.sat.f64.f16"], "f64", 1), ("f16",))
    names = ["cvt.ftz.f64.f32", "cvt.sat.f64.f32", "cvt.ftz.sat.f64.f32"]
    yield from split("cvt.modified.f64.f32", named(names, "f64", 1), ("f32",))
    yield from split("cvt.sat.f16.f64", named(join(["cvt"], _ROUNDED, [".sat.f16.f64"]), "f16", 1), ("f64",))
    yield from split("cvt.ftz.bf16.f32", named(join(["cvt"], _ROUNDED, [".ftz.bf16.f32"]), "bf16", 1), ("f32",))
    for source in _INTEGERS:
        lines = [
            Line(f"cvt{rnd}{modifier}.{target}.{source} {{d}}, {{a}};", (target,))
            for rnd in _ROUNDED for modifier, target in ((".sat", "f16"), (".sat", "f64"), (".ftz", "f32"))
        ]  # fmt: skip
        yield from split(f"cvt.modified.{source}", lines, (source,))
    names = join(["cvt.pack.sat"], (".u4", ".s4", ".u2", ".s2"), [".s32.b32"])
    yield from split("cvt.pack.narrow", named(names, "b32", 3), ("s32", "s32", "b32"))


def _warps() -> Iterator[Probe]:
    for kind in ("b32", "b64"):
        lines = [
            Line(f"match.any.sync.{kind} {{d}}, {{a}}, 0xffffffff;", ("b32",)),
            Line(f"match.all.sync.{kind} {{d}}|{{e}}, {{a}}, 0xffffffff;", ("b32", "pred")),
        ]
        yield from split(f"match.first.{kind}", lines, (f"{kind}:few",))


def neighbours() -> Iterator[Probe]:
    """The probes, in a fixed order."""
    for family in (_float64, _comparisons, _integers, _conversions, _warps):
        yield from family()
