"""`cvt` (PTX ISA 9.7.9.22): integers, floats, and packed narrow formats."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from . import floats
from .isa_float64 import with_nan64
from .isa_half import decoder, round_to, saturated
from .lowering import VIEW, Lowering
from .memory import Array
from .narrow import FORMATS, decode, decode_ue8m0, encode, encode_ue8m0, encoder, to_bf16
from .registry import Modifiers, Step, instruction

_INTS = "u8|s8|u16|s16|u32|s32|u64|s64"
_ROUND = "rnd=rn|rz|rm|rp"
_INTEGRAL = "rnd=rni|rzi|rmi|rpi"


@instruction(f"cvt .sat? to={_INTS} from={_INTS}")
def integer(b: Lowering, m: Modifiers) -> Step:
    source, target = VIEW[getattr(m, "from")], VIEW[m.to]
    given, taken = np.iinfo(source), np.iinfo(target)
    if m.sat and taken.min <= given.min and given.max <= taken.max:
        raise b.fail(f"`{b.ins.name}`: nothing to saturate, .{m.to} holds every .{getattr(m, 'from')}")

    def convert(x: Array) -> Array:
        if m.sat:
            low, high = taken.min, taken.max
            if source.kind == "u":
                x = np.minimum(x.astype(np.uint64), np.uint64(high))
            elif target == np.uint64:
                x = np.maximum(x, 0)
            else:
                x = np.clip(x.astype(np.int64), low, min(high, 2**63 - 1))
        return x.astype(target)

    return b.alu(m.to, (getattr(m, "from"),), convert)


@instruction(f"cvt {_ROUND} .ftz? .sat? to=f32 from={_INTS}")
@instruction(f"cvt {_ROUND} .sat? to=f64|f16 from={_INTS}")
@instruction(f"cvt {_ROUND} to=bf16 from={_INTS}")
def from_integer(b: Lowering, m: Modifiers) -> Step:
    source = getattr(m, "from")
    target = m.to

    def convert(x: Array) -> Array:
        if m.rnd == "rn" and target in ("f32", "f64"):
            nearest = x.astype(VIEW[target])
            return floats.saturate(nearest) if m.sat else nearest
        # The halves of a 64-bit integer are exact, and so are their sum and its error.
        high, low = np.zeros_like(x), x
        if x.dtype.itemsize == 8:
            high, low = x >> x.dtype.type(32), x & x.dtype.type(0xFFFFFFFF)
        total, residue = floats.two_sum(high.astype(np.float64) * 2.0**32, low.astype(np.float64))
        r: Array
        if target == "f64":
            r = floats.directed64(total, residue, m.rnd)
        elif target == "f32":
            r = floats.narrow32(floats.odd(total, residue), m.rnd)
        else:
            codes = round_to(target, floats.odd(total, residue), m.rnd)
            return saturated(target, codes) if m.sat else codes
        return floats.saturate(r) if m.sat else r

    return b.alu(target, (source,), convert)


@instruction(f"cvt {_INTEGRAL} .ftz? .sat? to={_INTS} from=f32")
@instruction(f"cvt {_INTEGRAL} .sat? to={_INTS} from=f64|f16")
@instruction(f"cvt {_INTEGRAL} to={_INTS} from=bf16")
def to_integer(b: Lowering, m: Modifiers) -> Step:
    """Results are clamped to the range of the target.

    NaN gives 0; a 64-bit target, and any target of a float64, gets its highest bit instead (seen on an H200).
    """
    source = getattr(m, "from")
    info = np.iinfo(VIEW[m.to])
    top = VIEW[m.to].itemsize * 8 - 1
    marked = source == "f64" or info.bits == 64
    for_nan = np.array(1 << top if marked else 0, f"u{VIEW[m.to].itemsize}").view(VIEW[m.to])[()]

    def convert(x: Array) -> Array:
        wide = decoder(source)(x) if source in ("f16", "bf16") else x
        if m.ftz:
            wide = floats.flush(wide)
        r = floats.round_integral(np.asarray(wide), m.rnd).astype(np.float64)
        inside = (r >= float(info.min)) & (r < float(info.max) + (1 if info.max < 2**53 else 0))
        safe = np.where(inside, r, 0.0).astype(VIEW[m.to])
        edge = np.where(r > 0, VIEW[m.to].type(info.max), VIEW[m.to].type(info.min))
        return np.where(np.isnan(r), for_nan, np.where(inside, safe, edge)).astype(VIEW[m.to])

    return b.alu(m.to, (source,), convert)


@instruction("cvt rnd?=rni|rzi|rmi|rpi .ftz? .sat? .f32 .f32")
def same(b: Lowering, m: Modifiers) -> Step:
    def convert(x: Array) -> Array:
        if m.ftz:
            x = floats.flush(x)
        if m.rnd:
            x = floats.round_integral(x, m.rnd)
        x = floats.canonical(x)
        return floats.saturate(x) if m.sat else x

    return b.alu("f32", ("f32",), convert)


@instruction("cvt .ftz? .sat? to=f32 from=f16")
@instruction("cvt .ftz? to=f32 from=bf16")
def widen(b: Lowering, m: Modifiers) -> Step:
    source = getattr(m, "from")
    if source == "bf16":

        def shifted(x: Array) -> Array:
            wide = (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
            # Flushing makes NaN canonical (seen on an H200).
            return floats.canonical(floats.flush(wide)) if m.ftz else wide

        return b.alu("f32", ("bf16",), shifted)
    table = decoder("f16")
    return b.alu("f32", ("f16",), (lambda x: floats.saturate(table(x))) if m.sat else table)


def _half_to_double(x: Array) -> Array:
    """f16 codes as float64; a NaN keeps its sign and payload, quieted (seen on an H200)."""
    values = decoder("f16")(x).astype(np.float64)
    wide = x.astype(np.uint64)
    kept = (wide & np.uint64(0x8000)) << np.uint64(48) | (wide & np.uint64(0x3FF)) << np.uint64(42)
    return np.where(np.isnan(values), kept | np.uint64(0x7FF8000000000000), values.view(np.uint64)).view(np.float64)


@instruction("cvt .ftz? .sat? .f64 from=f32")
@instruction("cvt .sat? .f64 from=f16")
@instruction("cvt .f64 from=bf16")
def to_double(b: Lowering, m: Modifiers) -> Step:
    source = getattr(m, "from")
    widened: dict[str, Callable[[Array], Array]] = {
        "f32": lambda x: (floats.canonical(floats.flush(x)) if m.ftz else x).astype(np.float64),
        "f16": _half_to_double,
        "bf16": lambda x: (x.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64),
    }
    wide = widened[source]
    return b.alu("f64", (source,), (lambda x: floats.saturate(wide(x))) if m.sat else wide)


@instruction(f"cvt {_ROUND} .ftz? .sat? to=f32 .f64")
@instruction(f"cvt {_ROUND} .sat? to=f16 .f64")
@instruction(f"cvt {_ROUND} to=bf16 .f64")
def from_double(b: Lowering, m: Modifiers) -> Step:
    if m.to != "f32":
        fmt = FORMATS[m.to]

        def to_half(x: Array) -> Array:
            codes = round_to(m.to, x, m.rnd)
            nan = np.isnan(x)
            if nan.any():
                # NaN keeps its sign and the upper bits of its payload.
                bits = x.view(np.uint64)
                payload = bits >> np.uint64(52 - fmt.mantissa) & np.uint64((1 << fmt.mantissa) - 1)
                quiet = (bits >> np.uint64(63)) << np.uint64(15) | np.uint64(fmt.infinity or 0)
                quiet = quiet | payload | np.uint64(1 << (fmt.mantissa - 1))
                codes = np.where(nan, quiet.astype(np.uint16), codes)
            return saturated(m.to, codes) if m.sat else codes

        return b.alu(m.to, ("f64",), to_half)

    def convert(x: Array) -> Array:
        r = floats.narrow32(x, m.rnd)
        if m.ftz:
            r = floats.flush_exact(r, x, m.rnd)
        return floats.saturate(r) if m.sat else r

    return b.alu("f32", ("f64",), convert)


@instruction("cvt rnd?=rni|rzi|rmi|rpi .sat? .f16 .f16")
@instruction("cvt rnd?=rni|rzi|rmi|rpi .bf16 .bf16")
def same_half(b: Lowering, m: Modifiers) -> Step:
    kind = "f16" if m.f16 else "bf16"
    table, fmt = decoder(kind), FORMATS[kind]

    def convert(codes: Array) -> Array:
        values = table(codes)
        codes = encode(floats.round_integral(values, m.rnd) if m.rnd else values, fmt).astype(np.uint16)
        return saturated(kind, codes) if m.sat else codes

    return b.alu(kind, (kind,), convert)


@instruction("cvt rnd?=rni|rzi|rmi|rpi .sat? .f64 .f64")
def same_double(b: Lowering, m: Modifiers) -> Step:
    def convert(x: Array) -> Array:
        r = with_nan64(floats.round_integral(x, m.rnd), x) if m.rnd else x
        return floats.saturate(r) if m.sat else r

    return b.alu("f64", ("f64",), convert)


@instruction(f"cvt {_ROUND} .f16 .bf16")
@instruction(f"cvt {_ROUND} .bf16 .f16")
def half_to_half(b: Lowering, m: Modifiers) -> Step:
    target, source = b.ins.modifiers[-2:]
    table, fmt = decoder(source), FORMATS[target]
    return b.alu(target, (source,), lambda x: encode(table(x), fmt, m.rnd).astype(np.uint16))


def _relu(x: Array) -> Array:
    """Negative values become +0; NaN stays NaN."""
    return np.where(np.signbit(x) & ~np.isnan(x), np.float32(0), x)


def _narrower(m: Modifiers, name: str) -> Callable[[Array], Array]:
    """Float32 values to codes (uint32) of one element."""
    fmt = FORMATS[name]
    mode, satfinite = m.get("rnd", "rn"), bool(m.satfinite)
    code = to_bf16 if name == "bf16" and mode == "rn" and not satfinite else encoder(fmt, mode, satfinite)

    # Rounding f16 down or up does not flush, `.ftz` or not (seen on an H200).
    flushes = m.ftz and not (name == "f16" and mode in ("rm", "rp"))

    def convert(x: Array) -> Array:
        if flushes:
            x = floats.flush(x)
        if m.relu:
            x = _relu(x)
        if m.sat:
            x = floats.saturate(x)
        return code(x)

    return convert


@instruction(f"cvt {_ROUND} .ftz? .sat? to=f16 .f32")
@instruction(f"cvt {_ROUND} .ftz? to=bf16 .f32")
@instruction("cvt rnd=rn|rz .relu? .satfinite? to=f16|bf16 .f32")
def to_half(b: Lowering, m: Modifiers) -> Step:
    convert = _narrower(m, m.to)
    return b.alu(m.to, ("f32",), lambda x: convert(x).astype(np.uint16))


@instruction("cvt rnd=rna .satfinite? .tf32 .f32")
@instruction("cvt rnd=rn|rz .relu? .tf32 .f32")
@instruction("cvt rnd=rn|rz .relu? .satfinite .tf32 .f32", features=("sm_100a",))
def to_tf32(b: Lowering, m: Modifiers) -> Step:
    convert = _narrower(m, "tf32")
    # Rounding ties away keeps the upper bits of a NaN, less one step with `.satfinite` (seen on an H200).
    step_down = np.uint32(0x2000 if m.satfinite else 0)

    def step(x: Array) -> Array:
        r = (convert(x) << np.uint32(13)).astype(np.uint32)
        if m.rnd != "rna":
            return r
        return np.where(np.isnan(x), (x.view(np.uint32) & np.uint32(0xFFFFE000)) - step_down, r)

    return b.alu("b32", ("f32",), step)


def _packed(b: Lowering, convert: Callable[[Array], Array], bits: int, register: str, sources: str = "f32") -> Step:
    """`cvt d, a, b` for two elements: `a` becomes the upper one."""

    def step(high: Array, low: Array) -> Array:
        return np.asarray((convert(high) << np.uint32(bits)) | convert(low)).astype(VIEW[register])

    return b.alu(register, (sources, sources), step)


@instruction("cvt rnd=rn|rz .relu? .satfinite? to=f16x2|bf16x2 .f32")
def to_half_pair(b: Lowering, m: Modifiers) -> Step:
    return _packed(b, _narrower(m, m.to.removesuffix("x2")), 16, "b32")


@instruction("cvt rnd=rn .satfinite .relu? to=e4m3x2|e5m2x2 .f32")
def to_fp8_pair(b: Lowering, m: Modifiers) -> Step:
    return _packed(b, _narrower(m, m.to.removesuffix("x2")), 8, "b16")


@instruction("cvt rnd=rn .satfinite .relu? to=e4m3x2|e5m2x2 .f16x2")
@instruction("cvt rnd=rn .satfinite .relu? to=e2m1x2 .f16x2", features=("sm_100a",))
def narrow_pair_from_half(b: Lowering, m: Modifiers) -> Step:
    name = m.to.removesuffix("x2")
    convert, table = _narrower(m, name), decoder("f16")
    bits, register = (4, "b8") if name == "e2m1" else (8, "b16")

    def step(x: Array) -> Array:
        low, high = table(x & np.uint32(0xFFFF)), table(x >> np.uint32(16))
        return ((convert(high) << np.uint32(bits)) | convert(low)).astype(VIEW[register])

    return b.alu(register, ("b32",), step)


@instruction("cvt rnd=rn .satfinite .relu? to=e2m1x2 .f32", features=("sm_100a",))
def to_fp4_pair(b: Lowering, m: Modifiers) -> Step:
    return _packed(b, _narrower(m, "e2m1"), 4, "b8")


@instruction("cvt rnd=rn .satfinite .relu? to=e2m3x2|e3m2x2 .f32", features=("sm_100a",))
def to_fp6_pair(b: Lowering, m: Modifiers) -> Step:
    return _packed(b, _narrower(m, m.to.removesuffix("x2")), 8, "b16")


@instruction("cvt rnd=rz|rp .satfinite? .ue8m0x2 from=f32|bf16x2", features=("sm_100a",))
def to_scale_pair(b: Lowering, m: Modifiers) -> Step:
    mode, satfinite = m.rnd, bool(m.satfinite)
    if getattr(m, "from") == "f32":
        return _packed(b, lambda x: encode_ue8m0(x, mode, satfinite), 8, "b16")

    def step(x: Array) -> Array:
        low = (x << np.uint32(16)).view(np.float32)
        high = (x & np.uint32(0xFFFF0000)).view(np.float32)
        return ((encode_ue8m0(high, mode, satfinite) << np.uint32(8)) | encode_ue8m0(low, mode, satfinite)).astype(
            np.uint16
        )

    return b.alu("b16", ("b32",), step)


def _reversed(x: Array) -> Array:
    """16 bits in the opposite order."""
    for shift, mask in ((8, 0x00FF), (4, 0x0F0F), (2, 0x3333), (1, 0x5555)):
        x = (x >> np.uint32(shift) & np.uint32(mask)) | (x & np.uint32(mask)) << np.uint32(shift)
    return x


def _stochastic(m: Modifiers, name: str, x: Array, random: Array, bits: int) -> Array:
    if m.relu or m.late:
        x = _relu(x)
    return encode(x, FORMATS[name], "rs", bool(m.satfinite), random & np.uint32((1 << bits) - 1), bits)


@instruction("cvt .rs .relu? .satfinite? late?=relu to=f16x2|bf16x2 .f32", features=("sm_100a",))
def stochastic_half_pair(b: Lowering, m: Modifiers) -> Step:
    """Rounds with the random bits of operand c: its upper half for a, its lower one for b.

    As many of their low bits count as the format drops: 13 for f16 (so FlashInfer 0.2, mamba/conversion.cuh, for
    normal results on sm_100a), 16 for bf16.
    """
    name = m.to.removesuffix("x2")
    bits = 23 - FORMATS[name].mantissa

    def step(high: Array, low: Array, random: Array) -> Array:
        upper = _stochastic(m, name, high, random >> np.uint32(16), bits)
        return upper << np.uint32(16) | _stochastic(m, name, low, random, bits)

    return b.alu("b32", ("f32", "f32", "b32"), step)


@instruction("cvt .rs .relu? .satfinite late?=relu to=e4m3x4|e5m2x4|e2m3x4|e3m2x4|e2m1x4 .f32", features=("sm_100a",))
def stochastic_quad(b: Lowering, m: Modifiers) -> Step:
    """Rounds four values with 16 random bits each: the upper half of the last operand is that of the first two values.

    The first of a pair takes the bits in the opposite order (measured for e4m3 on sm_100a by kernels on public record).
    """
    name = m.to.removesuffix("x4")
    width = 4 if name == "e2m1" else 8
    values = [b.full(b.read(o, "f32")) for o in b.items(b.operands[1])]
    random_bits = b.full(b.read(b.operands[2], "b32"))
    write = b.write(b.operands[0], "b16" if width == 4 else "b32")
    if len(values) != 4:
        raise b.fail(f"`{b.ins.name}` needs four values, found {len(values)}")

    def step(w: Any, i: Any) -> None:
        random = random_bits(w, i)
        out = np.zeros(random.shape, np.uint32)
        for n, read in enumerate(values):
            half = (random >> np.uint32(16 if n < 2 else 0)) & np.uint32(0xFFFF)
            code = _stochastic(m, name, read(w, i), _reversed(half) if n % 2 == 0 else half, 16)
            out = out << np.uint32(width) | code
        write(w, i, out.astype(np.uint16) if width == 4 else out)

    return step


@lru_cache(maxsize=32)
def _pairs(source: str, target: str, relu: bool) -> Array:
    """Pairs of 16-bit floats by pairs of codes, each in its byte (e2m1: 4 bits); both formats hold them exactly."""
    bits = {"ue8m0": 8}.get(source) or FORMATS[source].bits
    codes = np.arange(1 << bits, dtype=np.uint32)
    values = decode_ue8m0(codes) if source == "ue8m0" else decode(codes, FORMATS[source])
    single = encode(_relu(values) if relu else values, FORMATS[target])
    each = 4 if bits == 4 else 8
    pairs = np.arange(1 << 2 * each)
    mask = (1 << bits) - 1
    return single[pairs & mask] | single[pairs >> each & mask] << np.uint32(16)


def _unpack(b: Lowering, source: str, target: str, relu: bool) -> Step:
    table = _pairs(source, target, relu)
    return b.alu("b32", ("b8" if table.size == 256 else "b16",), table.take)


@instruction("cvt .rn .relu? .f16x2 from=e4m3x2|e5m2x2")
def fp8_to_half(b: Lowering, m: Modifiers) -> Step:
    return _unpack(b, getattr(m, "from").removesuffix("x2"), "f16", bool(m.relu))


@instruction("cvt .rn .relu? .f16x2 from=e2m3x2|e3m2x2", features=("sm_100a",))
def fp6_to_half(b: Lowering, m: Modifiers) -> Step:
    return _unpack(b, getattr(m, "from").removesuffix("x2"), "f16", bool(m.relu))


@instruction("cvt .rn .relu? .f16x2 .e2m1x2", features=("sm_100a",))
def fp4_to_half(b: Lowering, m: Modifiers) -> Step:
    return _unpack(b, "e2m1", "f16", bool(m.relu))


@instruction("cvt .rn .bf16x2 .ue8m0x2", features=("sm_100a",))
def scale_to_half(b: Lowering, m: Modifiers) -> Step:
    return _unpack(b, "ue8m0", "bf16", False)


_PACK = {"u8": 8, "s8": 8, "u4": 4, "s4": 4, "u2": 2, "s2": 2, "u16": 16, "s16": 16}


@instruction("cvt .pack .sat to=u16|s16 .s32")
@instruction("cvt .pack .sat to=u8|s8|u4|s4|u2|s2 .s32 .b32")
def pack(b: Lowering, m: Modifiers) -> Step:
    bits = _PACK[m.to]
    low = -(1 << (bits - 1)) if m.to[0] == "s" else 0
    high = (1 << (bits - (m.to[0] == "s"))) - 1
    mask = np.uint32((1 << bits) - 1)

    def clamp(x: Any) -> Array:
        return np.asarray(np.clip(x, low, high)).astype(np.int32).view(np.uint32) & mask

    if m.b32:
        return b.alu(
            "b32", ("s32", "s32", "b32"),
            lambda x, y, c: (c << np.uint32(2 * bits)) | (clamp(x) << np.uint32(bits)) | clamp(y),
        )  # fmt: skip
    return b.alu("b32", ("s32", "s32"), lambda x, y: (clamp(x) << np.uint32(bits)) | clamp(y))
