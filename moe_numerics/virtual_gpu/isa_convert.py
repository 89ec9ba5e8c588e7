"""`cvt` (PTX ISA 9.7.9.22): integers, floats, and packed narrow formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import floats
from .isa_half import decoder, round_to
from .lowering import VIEW, Lowering
from .memory import Array
from .narrow import FORMATS, decode, decode_ue8m0, encode, encode_ue8m0, to_bf16
from .registry import Modifiers, Step, instruction

_INTS = "u8|s8|u16|s16|u32|s32|u64|s64"
_ROUND = "rnd=rn|rz|rm|rp"
_INTEGRAL = "rnd=rni|rzi|rmi|rpi"


@instruction(f"cvt .sat? to={_INTS} from={_INTS}")
def integer(b: Lowering, m: Modifiers) -> Step:
    source, target = VIEW[getattr(m, "from")], VIEW[m.to]

    def convert(x: Array) -> Array:
        if m.sat:
            low, high = np.iinfo(target).min, np.iinfo(target).max
            if source.kind == "u":
                x = np.minimum(x.astype(np.uint64), np.uint64(high))
            elif target == np.uint64:
                x = np.maximum(x, 0)
            else:
                x = np.clip(x.astype(np.int64), low, min(high, 2**63 - 1))
        return x.astype(target)

    return b.alu(m.to, (getattr(m, "from"),), convert)


@instruction(f"cvt {_ROUND} .sat? to=f32|f64|f16|bf16 from={_INTS}")
def from_integer(b: Lowering, m: Modifiers) -> Step:
    source = getattr(m, "from")
    target = m.to

    def convert(x: Array) -> Array:
        if target == "f64" and m.rnd == "rn":
            return x.astype(np.float64)
        if m.rnd == "rn" and target == "f32":
            return floats.saturate(x.astype(np.float32)) if m.sat else x.astype(np.float32)
        # The halves of a 64-bit integer are exact, and so are their sum and its error.
        high, low = np.zeros_like(x), x
        if x.dtype.itemsize == 8:
            high, low = x >> x.dtype.type(32), x & x.dtype.type(0xFFFFFFFF)
        total, residue = floats.two_sum(high.astype(np.float64) * 2.0**32, low.astype(np.float64))
        if target == "f64":
            return floats.directed64(total, residue, m.rnd)
        wide = floats.odd(total, residue)
        r: Array
        if target == "f32":
            r = floats.narrow32(wide, m.rnd)
        else:
            return round_to(target, wide, m.rnd)
        return floats.saturate(r) if m.sat else r

    return b.alu(target, (source,), convert)


@instruction(f"cvt {_INTEGRAL} .ftz? .sat? to={_INTS} from=f32|f64|f16|bf16")
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
        if m.ftz and source == "f32":
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


@instruction("cvt .ftz? to=f32 from=f16|bf16")
def widen(b: Lowering, m: Modifiers) -> Step:
    source = getattr(m, "from")
    if source == "bf16":
        return b.alu("f32", ("bf16",), lambda x: (x.astype(np.uint32) << np.uint32(16)).view(np.float32))
    return b.alu("f32", ("f16",), decoder("f16"))


def _half_to_double(x: Array) -> Array:
    """f16 codes as float64; a NaN keeps its sign and payload, quieted (seen on an H200)."""
    values = decoder("f16")(x).astype(np.float64)
    wide = x.astype(np.uint64)
    kept = (wide & np.uint64(0x8000)) << np.uint64(48) | (wide & np.uint64(0x3FF)) << np.uint64(42)
    return np.where(np.isnan(values), kept | np.uint64(0x7FF8000000000000), values.view(np.uint64)).view(np.float64)


@instruction("cvt .f64 from=f32|f16")
def to_double(b: Lowering, m: Modifiers) -> Step:
    source = getattr(m, "from")
    if source == "f16":
        return b.alu("f64", ("f16",), _half_to_double)
    return b.alu("f64", ("f32",), lambda x: x.astype(np.float64))


@instruction(f"cvt {_ROUND} .ftz? .sat? to=f32|f16|bf16 .f64")
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
            return codes

        return b.alu(m.to, ("f64",), to_half)

    def convert(x: Array) -> Array:
        r = floats.narrow32(x, m.rnd)
        if m.ftz:
            r = floats.flush_exact(r, x, m.rnd)
        return floats.saturate(r) if m.sat else r

    return b.alu("f32", ("f64",), convert)


def _relu(x: Array) -> Array:
    """Negative values become +0; NaN stays NaN."""
    return np.where(np.signbit(x) & ~np.isnan(x), np.float32(0), x)


def _narrower(m: Modifiers, name: str) -> Callable[[Array], Array]:
    """Float32 values to codes (uint32) of one element."""
    fmt = FORMATS[name]
    mode, satfinite = m.get("rnd", "rn"), bool(m.satfinite)
    plain = name == "bf16" and mode == "rn" and not satfinite

    # Rounding f16 down or up does not flush, `.ftz` or not (seen on an H200).
    flushes = m.ftz and not (name == "f16" and mode in ("rm", "rp"))

    def convert(x: Array) -> Array:
        if flushes:
            x = floats.flush(x)
        if m.relu:
            x = _relu(x)
        if m.sat:
            x = floats.saturate(x)
        return to_bf16(x) if plain else encode(x, fmt, mode, satfinite)

    return convert


@instruction("cvt rnd=rn|rz|rm|rp .ftz? .sat? .relu? .satfinite? to=f16|bf16 .f32")
def to_half(b: Lowering, m: Modifiers) -> Step:
    convert = _narrower(m, m.to)
    return b.alu(m.to, ("f32",), lambda x: convert(x).astype(np.uint16))


@instruction("cvt rnd=rn|rz|rna .relu? .satfinite? .tf32 .f32")
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
def fp8_pair_from_half(b: Lowering, m: Modifiers) -> Step:
    convert = _narrower(m, m.to.removesuffix("x2"))
    table = decoder("f16")

    def step(x: Array) -> Array:
        low, high = table(x & np.uint32(0xFFFF)), table(x >> np.uint32(16))
        return ((convert(high) << np.uint32(8)) | convert(low)).astype(np.uint16)

    return b.alu("b16", ("b32",), step)


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


def _unpack(bits: int, values: Callable[[Array], Array], target: str, relu: bool) -> Callable[[Array], Array]:
    """Two codes of `bits` bits to a pair of 16-bit floats; both formats hold every value exactly."""
    mask = np.uint32((1 << bits) - 1)
    fmt = FORMATS[target]

    def step(x: Array) -> Array:
        wide = x.astype(np.uint32)
        low, high = values(wide & mask), values((wide >> np.uint32(8 if bits > 4 else 4)) & mask)
        if relu:
            low, high = _relu(low), _relu(high)
        return encode(low, fmt) | (encode(high, fmt) << np.uint32(16))

    return step


@instruction("cvt .rn .relu? .f16x2 from=e4m3x2|e5m2x2")
def fp8_to_half(b: Lowering, m: Modifiers) -> Step:
    fmt = FORMATS[getattr(m, "from").removesuffix("x2")]
    return b.alu("b32", ("b16",), _unpack(8, lambda c: decode(c, fmt), "f16", bool(m.relu)))


@instruction("cvt .rn .relu? .f16x2 from=e2m3x2|e3m2x2", features=("sm_100a",))
def fp6_to_half(b: Lowering, m: Modifiers) -> Step:
    fmt = FORMATS[getattr(m, "from").removesuffix("x2")]
    return b.alu("b32", ("b16",), _unpack(6, lambda c: decode(c, fmt), "f16", bool(m.relu)))


@instruction("cvt .rn .relu? .f16x2 .e2m1x2", features=("sm_100a",))
def fp4_to_half(b: Lowering, m: Modifiers) -> Step:
    fmt = FORMATS["e2m1"]
    return b.alu("b32", ("b8",), _unpack(4, lambda c: decode(c, fmt), "f16", bool(m.relu)))


@instruction("cvt .rn .bf16x2 .ue8m0x2", features=("sm_100a",))
def scale_to_half(b: Lowering, m: Modifiers) -> Step:
    return b.alu("b32", ("b16",), _unpack(8, decode_ue8m0, "bf16", False))


_PACK = {"u8": 8, "s8": 8, "u4": 4, "s4": 4, "u2": 2, "s2": 2, "u16": 16, "s16": 16}


@instruction("cvt .pack .sat to=u16|s16|u8|s8 .s32 .b32?")
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
