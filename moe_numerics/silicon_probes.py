"""What the silicon comparison runs element by element: instructions grouped by the operands that they share."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from moe_numerics.silicon_lines import Line, Probe, join, named, split
from moe_numerics.silicon_neighbours import neighbours

__all__ = ["Line", "Probe", "probes"]

_RND = ("", ".rn", ".rz", ".rm", ".rp")
_ROUNDED = _RND[1:]
_FTZ = ("", ".ftz")
_SAT = ("", ".sat")
_RELU = ("", ".relu")
_SATFINITE = ("", ".satfinite")
_INTS = ("u16", "s16", "u32", "s32", "u64", "s64")
_APPROXIMATE = ("ex2", "lg2", "sin", "cos", "rcp", "rsqrt", "sqrt")


def _float32() -> Iterator[Probe]:
    two = ("f32",) * 2
    for op in ("add", "sub", "mul"):
        yield from split(f"{op}.f32", named(join([op], _RND, _FTZ, _SAT, [".f32"]), "f32", 2), two)
    edges = ("f32:edge_left", "f32:edge_right", "f32")
    edge = named(join(["mul"], _ROUNDED, _FTZ, _SAT, [".f32"]), "f32", 2)
    yield from split("edge.mul.f32", edge, edges)
    edge = [
        Line(f"fma{name} {{d}}, {{a}}, {{b}}, {zero};", ("f32",))
        for name in join(_ROUNDED, _FTZ, [".f32"]) for zero in ("0f00000000", "0f80000001")
    ]  # fmt: skip
    yield from split("edge.fma.f32", edge, edges)
    for op in ("fma", "mad"):
        yield from split(f"{op}.f32", named(join([op], _ROUNDED, _FTZ, _SAT, [".f32"]), "f32", 3), ("f32",) * 3)
    yield from split("div.f32", named(join(["div"], (*_ROUNDED, ".approx", ".full"), _FTZ, [".f32"]), "f32", 2), two)
    unary = join(("rcp", "sqrt"), _ROUNDED, _FTZ, [".f32"]) + join(("neg", "abs"), _FTZ, [".f32"])
    yield from split("unary.f32", named(unary, "f32", 1), ("f32",))
    extremes = join(("min", "max"), _FTZ, ("", ".NaN"), ("", ".xorsign.abs"), [".f32"])
    yield from split("minmax.f32", named([*extremes, "copysign.f32"], "f32", 2), two)
    approximate = [*join(_APPROXIMATE, [".approx"], _FTZ, [".f32"]), "tanh.approx.f32"]
    yield from split("approx.f32", named(approximate, "f32", 1), ("f32",))


def _float64() -> Iterator[Probe]:
    yield from split(
        "binary.f64",
        named([*join(("add", "sub", "mul"), ("", ".rn"), [".f64"]), "div.rn.f64", "min.f64", "max.f64"], "f64", 2),
        ("f64",) * 2,
    )
    yield from split("unary.f64", named(["rcp.rn.f64", "sqrt.rn.f64", "neg.f64", "abs.f64"], "f64", 1), ("f64",))
    yield from split("fma.f64", named(["fma.rn.f64"], "f64", 3), ("f64",) * 3)


def _half() -> Iterator[Probe]:
    for kind in ("f16", "bf16", "f16x2", "bf16x2"):
        register = "b32" if kind.endswith("x2") else "b16"
        end = [f".{kind}"]
        ftz = _FTZ if kind.startswith("f") else ("",)
        sat = _SAT if kind.startswith("f") else ("",)
        yield from split(
            f"arithmetic.{kind}",
            named(join(("add", "sub", "mul"), ("", ".rn"), ftz, sat, end), register, 2),
            (kind,) * 2,
        )
        saturating = join(["fma.rn"], ftz, sat, end) + join(["fma.rn"], ftz, [".relu"], end)
        yield from split(f"fma.{kind}", named(saturating, register, 3), (kind,) * 3)
        extremes = join(("min", "max"), ftz, ("", ".NaN"), ("", ".xorsign.abs"), end)
        yield from split(f"minmax.{kind}", named(extremes, register, 2), (kind,) * 2)
        yield from split(f"unary.{kind}", named(join(("neg", "abs"), ftz, end), register, 1), (kind,))
        exponential = "ex2.approx" if kind.startswith("f") else "ex2.approx.ftz"
        yield from split(f"approx.{kind}", named(join([exponential, "tanh.approx"], end), register, 1), (kind,))


def _comparisons() -> Iterator[Probe]:
    ordered = ("eq", "ne", "lt", "le", "gt", "ge")
    floats = (*ordered, "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
    for kind in ("f32", "f64", "f16", "bf16"):
        lines = named(join(["setp."], floats, _FTZ if kind == "f32" else ("",), [f".{kind}"]), "pred", 2)
        yield from split(f"setp.{kind}", lines, (kind,) * 2)
    for kind in (*_INTS, "b16", "b32", "b64"):
        tests = {"u": (*ordered, "lo", "ls", "hi", "hs"), "s": ordered, "b": ("eq", "ne")}[kind[0]]
        lines = named(join(["setp."], tests, [f".{kind}"]), "pred", 2)
        yield from split(f"setp.{kind}", lines, (kind,) * 2)
    for kind in ("f32", "u32", "s64"):
        both = [
            Line(f"setp.{cmp}.{combine}.{kind} {{d}}|{{e}}, {{a}}, {{b}}, {{c}};", ("pred", "pred"))
            for cmp, combine in product(("lt", "eq", "ge"), ("and", "or", "xor"))
        ]
        yield from split(f"setp2.{kind}", both, (kind, kind, "pred"))
    for kind in ("f32", "f64", *_INTS, "b16", "b32", "b64"):
        tests = {"f": floats, "u": (*ordered, "lo", "ls", "hi", "hs"), "s": ordered, "b": ("eq", "ne")}[kind[0]]
        names = join(["set."], tests, [f".u32.{kind}", f".f32.{kind}", f".s32.{kind}"])
        for result in ("u32", "f32", "s32"):
            chosen = [n for n in names if f".{result}.{kind}" in n]
            yield from split(f"set.{result}.{kind}", named(chosen, result, 2), (kind,) * 2)
    for kind, result in product(("f16", "bf16"), ("u16", "s16", "u32", "s32", "f16", "bf16")):
        if (result, kind) != ("f16", "bf16"):
            flushes = _FTZ if kind == "f16" and result != "bf16" else ("",)
            names = join(["set."], floats, flushes, [f".{result}.{kind}"])
            yield from split(f"set.{result}.{kind}", named(names, result, 2), (kind,) * 2)
    combined = join(["set.lt."], ("and", "or", "xor"), [".u32.f16"])
    yield from split("set.combined.f16", named(combined, "u32", 3), ("f16", "f16", "pred"))
    names = join(["setp."], floats, [".ftz.f16"])
    yield from split("setp.ftz.f16", named(names, "pred", 2), ("f16",) * 2)
    names = join(["set."], floats, [".ftz.u32.f32"])
    yield from split("set.ftz", named(names, "u32", 2), ("f32",) * 2)
    combined = join(["set.lt."], ("and", "or", "xor"), [".u32.f32"])
    yield from split("set.combined", named(combined, "u32", 3), ("f32", "f32", "pred"))
    tests = ("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    for kind in ("f32", "f64"):
        yield from split(f"testp.{kind}", named(join(["testp."], tests, [f".{kind}"]), "pred", 1), (kind,))
    for kind in ("b16", "b32", "b64", "u16", "s16", "u32", "s32", "f32", "u64", "s64", "f64"):
        yield from split(f"selp.{kind}", named([f"selp.{kind}"], kind, 3), (kind, kind, "pred"))
    for kind in ("b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64"):
        for by in ("s32", "f32"):
            yield from split(f"slct.{kind}.{by}", named([f"slct.{kind}.{by}"], kind, 3), (kind, kind, by))


def _integers() -> Iterator[Probe]:
    for kind in _INTS:
        names = [f"{op}.{kind}" for op in ("add", "sub", "mul.lo", "mul.hi", "min", "max")]
        if kind == "s32":
            names += ["add.sat.s32", "sub.sat.s32", "min.relu.s32", "max.relu.s32"]
        yield from split(f"binary.{kind}", named(names, kind, 2), (kind,) * 2)
        names = [f"mad.lo.{kind}", f"mad.hi.{kind}", f"sad.{kind}"] + (["mad.hi.sat.s32"] if kind == "s32" else [])
        yield from split(f"mad.{kind}", named(names, kind, 3), (kind,) * 3)
        yield from split(f"div.{kind}", named([f"div.{kind}", f"rem.{kind}"], kind, 2), (kind, f"{kind}:divisor"))
        if kind[0] == "s":
            yield from split(f"unary.{kind}", named([f"abs.{kind}", f"neg.{kind}"], kind, 1), (kind,))
        if kind[1:] != "64":
            wide = f"{kind[0]}{2 * int(kind[1:])}"
            yield from split(f"mul.wide.{kind}", named([f"mul.wide.{kind}"], wide, 2), (kind,) * 2)
            yield from split(f"mad.wide.{kind}", named([f"mad.wide.{kind}"], wide, 3), (kind, kind, wide))
        if kind[1:] != "16":
            yield from split(f"bfe.{kind}", named([f"bfe.{kind}"], kind, 3), (kind, "u32:shift", "u32:shift"))
            yield from split(f"bfind.{kind}", named([f"bfind.{kind}", f"bfind.shiftamt.{kind}"], "u32", 1), (kind,))
        yield from split(f"shr.{kind}", named([f"shr.{kind}"], kind, 2), (kind, "u32:shift"))
    for kind in ("u32", "s32"):
        names = join(("mul24", "mad24"), (".lo", ".hi"), [f".{kind}"])
        yield from split(f"mul24.{kind}", named(names[:2], kind, 2) + named(names[2:], kind, 3), (kind,) * 3)
    for bits in (16, 32, 64):
        kind = f"b{bits}"
        yield from split(f"logic.{kind}", named([f"{op}.{kind}" for op in ("and", "or", "xor")], kind, 2), (kind,) * 2)
        yield from split(f"invert.{kind}", named([f"not.{kind}", f"cnot.{kind}"], kind, 1), (kind,))
        yield from split(f"shift.{kind}", named([f"shl.{kind}", f"shr.{kind}"], kind, 2), (kind, "u32:shift"))
        if bits > 16:
            yield from split(f"count.{kind}", named([f"popc.{kind}", f"clz.{kind}"], "u32", 1), (kind,))
            yield from split(f"brev.{kind}", named([f"brev.{kind}"], kind, 1), (kind,))
            inserted = [Line(f"bfi.{kind} {{d}}, {{a}}, {{b}}, {{c}}, {{g}};", (kind,))]
            yield from split(f"bfi.{kind}", inserted, (kind, kind, "u32:shift", "u32:shift"))
    yield from split("logic.pred", named(["and.pred", "or.pred", "xor.pred"], "pred", 2), ("pred",) * 2)
    yield from split("not.pred", named(["not.pred"], "pred", 1), ("pred",))
    yield from split(
        "shf", named(join(["shf."], "lr", (".clamp", ".wrap"), [".b32"]), "b32", 3), ("b32", "b32", "u32:shift")
    )
    modes = ("", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16")
    yield from split("prmt", named(join(["prmt.b32"], modes), "b32", 3), ("b32",) * 3)
    tables = (0x00, 0x01, 0x17, 0x1B, 0x2D, 0x3C, 0x69, 0x80, 0x96, 0xAC, 0xCA, 0xD8, 0xE8, 0xEA, 0xF7, 0xFF)
    yield from split(
        "lop3", [Line(f"lop3.b32 {{d}}, {{a}}, {{b}}, {{c}}, {table:#x};", ("b32",)) for table in tables], ("b32",) * 3
    )
    types = ("u32", "s32")
    for left, right in product(types, types):
        names = [f"dp4a.{left}.{right}", *join(["dp2a"], (".lo", ".hi"), [f".{left}.{right}"])]
        yield from split(f"dp.{left}.{right}", named(names, "b32", 3), ("b32",) * 3)
    yield from split(
        "szext", named(join(["szext"], (".clamp", ".wrap"), (".u32", ".s32")), "b32", 2), ("u32", "u32:shift")
    )
    yield from split("bmsk", named(join(["bmsk"], (".clamp", ".wrap"), [".b32"]), "b32", 2), ("u32:shift",) * 2)
    pairs = join(("add", "min", "max"), (".u16x2", ".s16x2"))
    yield from split("binary.16x2", named(pairs, "b32", 2), ("b32",) * 2)
    for kind in ("u32", "s32", "u64", "s64"):
        text = (
            f"add.cc.{kind} {{d}}, {{a}}, {{b}}; addc.cc.{kind} {{e}}, {{b}}, {{a}}; addc.{kind} {{f}}, {{a}}, {{a}};"
        )
        lines = [Line(t, (kind,) * 3) for t in (text, text.replace("add", "sub"))]
        yield from split(f"carry.{kind}", lines, (kind,) * 2)


def _conversions() -> Iterator[Probe]:
    every = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
    for source in every:
        lines = [
            Line(f"cvt{sat}.{target}.{source} {{d}}, {{a}};", (target,))
            for target, sat in product(every, _SAT)
            if target != source and (not sat or _saturates(source, target))
        ]
        yield from split(f"cvt.{source}", lines, (source,))
        lines = [
            Line(f"cvt{rnd}.{target}.{source} {{d}}, {{a}};", (target,))
            for target, rnd in product(("f16", "bf16", "f32", "f64"), _ROUNDED)
            if not (target == "bf16" and rnd == "")
        ]
        lines += [Line(f"cvt.{rnd}.sat.f32.{source} {{d}}, {{a}};", ("f32",)) for rnd in ("rn", "rz")]
        yield from split(f"cvt.float.{source}", lines, (source,))
    for source in ("f32", "f64", "f16", "bf16"):
        lines = [
            Line(f"cvt{rnd}{ftz}.{target}.{source} {{d}}, {{a}};", (target,))
            for target, rnd, ftz in product(every, (".rni", ".rzi", ".rmi", ".rpi"), _FTZ if source == "f32" else ("",))
        ]
        yield from split(f"cvt.integer.{source}", lines, (source,))
        if source != "bf16":
            saturating = [f"cvt.rzi.sat.{target}.{source}" for target in every]
            lines = [Line(f"{name} {{d}}, {{a}};", (target,)) for name, target in zip(saturating, every, strict=True)]
            yield from split(f"cvt.integer.sat.{source}", lines, (source,))
    same = join(["cvt"], ("", ".rni", ".rzi", ".rmi", ".rpi"), _FTZ, _SAT, [".f32.f32"])
    yield from split("cvt.f32.f32", named([n for n in same if n != "cvt.f32.f32"], "f32", 1), ("f32",))
    for source in ("f16", "bf16"):
        yield from split(f"cvt.f32.{source}", named([f"cvt.f32.{source}"], "f32", 1), (source,))
    yield from split("cvt.ftz.f32.f16", named(["cvt.ftz.f32.f16"], "f32", 1), ("f16",))
    yield from split("cvt.f64.f32", named(["cvt.f64.f32"], "f64", 1), ("f32",))
    yield from split("cvt.f64.f16", named(["cvt.f64.f16"], "f64", 1), ("f16",))
    lines = [
        Line(f"cvt{name} {{d}}, {{a}};", (target,))
        for target in ("f32", "f16", "bf16")
        for name in join(
            _ROUNDED, _FTZ if target == "f32" else ("",), _SAT if target == "f32" else ("",), [f".{target}.f64"]
        )
    ]
    yield from split("cvt.f64", lines, ("f64",))
    yield from split("edge.cvt.f64", [line for line in lines if ".f32.f64" in line.text], ("f64:edge",))
    lines = []
    for target in ("f16", "bf16"):
        lines += [
            Line(f"cvt{name} {{d}}, {{a}};", (target,))
            for name in join((".rn", ".rz"), _RELU, ("", ".satfinite"), [f".{target}.f32"])
        ]
    lines += [
        Line(f"cvt{name} {{d}}, {{a}};", ("f16",))
        for name in join((".rn", ".rz", ".rm", ".rp"), _FTZ, _SAT, [".f16.f32"])
    ]
    lines += [Line(f"cvt.{rnd}.bf16.f32 {{d}}, {{a}};", ("bf16",)) for rnd in ("rm", "rp")]
    yield from split("cvt.half.f32", _distinct(lines), ("f32",))
    lines = named(
        [*join(["cvt"], (".rn", ".rz"), _RELU, [".tf32.f32"]), "cvt.rna.tf32.f32", "cvt.rna.satfinite.tf32.f32"],
        "b32", 1
    )  # fmt: skip
    yield from split("cvt.tf32", lines, ("f32",))
    lines = named(join(["cvt"], (".rn", ".rz"), _RELU, ("", ".satfinite"), (".f16x2.f32", ".bf16x2.f32")), "b32", 2)
    lines += named(join(["cvt.rn.satfinite"], _RELU, (".e4m3x2.f32", ".e5m2x2.f32")), "b16", 2)
    yield from split("cvt.pairs", lines, ("f32",) * 2)
    yield from split(
        "cvt.fp8.f16x2",
        named(join(["cvt.rn.satfinite"], _RELU, (".e4m3x2.f16x2", ".e5m2x2.f16x2")), "b16", 1),
        ("f16x2",),
    )
    yield from split(
        "cvt.f16x2.fp8", named(join(["cvt.rn"], _RELU, (".f16x2.e4m3x2", ".f16x2.e5m2x2")), "b32", 1), ("b16",)
    )
    packed = named(join(["cvt.pack.sat"], (".u16", ".s16"), [".s32"]), "b32", 2)
    packed += named(join(["cvt.pack.sat"], (".u8", ".s8"), [".s32.b32"]), "b32", 3)
    yield from split("cvt.pack", packed, ("s32", "s32", "b32"))


def _saturates(source: str, target: str) -> bool:
    """Whether the target does not hold all values of the source; only then may `.sat` stand."""
    low = -(1 << (int(source[1:]) - 1)) if source[0] == "s" else 0
    high = (1 << (int(source[1:]) - (source[0] == "s"))) - 1
    target_low = -(1 << (int(target[1:]) - 1)) if target[0] == "s" else 0
    target_high = (1 << (int(target[1:]) - (target[0] == "s"))) - 1
    return low < target_low or high > target_high


def _distinct(lines: list[Line]) -> list[Line]:
    return list(dict.fromkeys(lines))


def _moves() -> Iterator[Probe]:
    for kind in ("b16", "b32", "b64", "u16", "s16", "u32", "s32", "f32", "u64", "s64", "f64"):
        yield from split(f"mov.{kind}", named([f"mov.{kind}"], kind, 1), (kind,))
    yield from split("mov.pred", named(["mov.pred"], "pred", 1), ("pred",))
    packs = [Line("mov.b32 {d}, {{{a}, {b}}};", ("b32",))]
    yield from split("mov.pack.b32", packs, ("b16", "b16"))
    packs = [Line("mov.b64 {d}, {{{a}, {b}}};", ("b64",))]
    yield from split("mov.pack.b64", packs, ("b32", "b32"))
    yield from split("mov.unpack.b32", [Line("mov.b32 {{{d}, {e}}}, {a};", ("b16", "b16"))], ("b32",))
    yield from split("mov.unpack.b64", [Line("mov.b64 {{{d}, {e}}}, {a};", ("b32", "b32"))], ("b64",))


def _warps() -> Iterator[Probe]:
    """Exchanges between lanes: every warp of these kernels is full."""
    whole = "0xffffffff"
    lines = [
        Line(f"shfl.sync.{mode}.b32 {{d}}|{{e}}, {{a}}, {{b}}, {{c}}, {whole};", ("b32", "pred"))
        for mode in ("up", "down", "bfly", "idx")
    ]
    yield from split("shfl", lines, ("b32", "u32:shift", "u32:clamp"))
    for name, mask, more in (("", whole, ()), (".groups", "{b}", ("u32:members",))):
        lines = [Line(f"vote.sync.{mode}.pred {{d}}, {{a}}, {mask};", ("pred",)) for mode in ("all", "any", "uni")]
        lines.append(Line(f"vote.sync.ballot.b32 {{d}}, {{a}}, {mask};", ("b32",)))
        yield from split(f"vote{name}", lines, ("pred", *more))
        for kind in ("b32", "b64"):
            lines = [
                Line(f"match.sync.any.{kind} {{d}}, {{a}}, {mask};", ("b32",)),
                Line(f"match.sync.all.{kind} {{d}}|{{e}}, {{a}}, {mask};", ("b32", "pred")),
            ]
            yield from split(f"match.{kind}{name}", lines, (f"{kind}:few", *more))
        operations = join(["redux.sync"], (".add", ".min", ".max"), (".u32", ".s32"))
        operations += join(["redux.sync"], (".and", ".or", ".xor"), [".b32"])
        lines = [Line(f"{operation} {{d}}, {{a}}, {mask};", ("b32",)) for operation in operations]
        yield from split(f"redux{name}", lines, ("b32", *more))
        yield from split(f"elect{name}", [Line(f"elect.sync {{d}}|{{e}}, {mask};", ("b32", "pred"))], ("b32", *more))
    yield from split("activemask", [Line("activemask.b32 {d};", ("b32",))], ("b32",))
    yield from split("movmatrix", [Line("movmatrix.sync.aligned.m8n8.trans.b16 {d}, {a};", ("b32",))], ("b32",))


_FP8 = ("e4m3", "e5m2")
_MATRIX_OPERAND = {"tf32": "b32:f32", "bf16": "b32:bf16", "f16": "b32:f16", "e4m3": "b32:fp8", "e5m2": "b32:fp8"}


def _product(name: str, registers: tuple[int, int, int], kinds: tuple[str, ...], suffix: str) -> Iterator[Probe]:
    """One `mma.sync`: how many registers A, B and the accumulator take, and the kinds of their words."""
    taken = iter("abcghijklmnopqrstuvwxyz")
    groups = ["{{" + ", ".join(f"{{{next(taken)}}}" for _ in range(size)) + "}}" for size in registers]
    results = "{{" + ", ".join(f"{{{'def'[n] if n < 3 else f'd{n}'}}}" for n in range(registers[2])) + "}}"
    line = Line(f"{name} {results}, {', '.join(groups)};", ("b32",) * registers[2])
    operands = tuple(kind for kind, size in zip(kinds, registers, strict=True) for _ in range(size))
    yield from split(f"{name}{suffix}", [line], operands)


def _products() -> Iterator[Probe]:
    """`mma.sync`: fragments of one warp from registers; in `special` some words have any bits."""
    pairs = {(a, a) for a in ("bf16", "f16", "tf32")} | set(product(_FP8, _FP8))
    depths = {"bf16": (8, 16), "f16": (8, 16), "tf32": (4, 8), "e4m3": (16, 32), "e5m2": (16, 32)}
    for a, b in sorted(pairs):
        for depth, c in product(depths[a], ("f32", "f16")):
            if c == "f16" and a in ("bf16", "tf32"):
                continue
            bits = {"tf32": 32, "bf16": 16, "f16": 16}.get(a, 8)
            left = 16 * depth * bits // 1024
            registers = (left, left // 2, 4 if c == "f32" else 2)
            name = f"mma.sync.aligned.m16n8k{depth}.row.col.{c}.{a}.{b}.{c}"
            yield from _product(name, registers, (_MATRIX_OPERAND[a], _MATRIX_OPERAND[b], f"b32:{c}"), "")
            wild = tuple(f"{kind}:any" for kind in (_MATRIX_OPERAND[a], _MATRIX_OPERAND[b], f"b32:{c}"))
            yield from _product(name, registers, wild, ".special")
    for (shape, left), a, b, sat in product((("m8n8k16", 1), ("m16n8k16", 2), ("m16n8k32", 4)), "su", "su", _SATFINITE):
        name = f"mma.sync.aligned.{shape}.row.col{sat}.s32.{a}8.{b}8.s32"
        yield from _product(name, (left, max(1, left // 2), 2 if left == 1 else 4), ("u32", "u32", "s32"), "")


def probes() -> tuple[Probe, ...]:
    """Every probe, in a fixed order."""
    families = (
        _float32, _float64, _half, _comparisons, _integers, _conversions, _moves, _warps, _products, neighbours,
    )  # fmt: skip
    return tuple(probe for family in families for probe in family())
