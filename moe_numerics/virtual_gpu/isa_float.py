"""Float32 arithmetic (PTX ISA 9.7.3), packed pairs of it, and the approximations.

An unspecified rounding mode means round to nearest here; ptxas may then fuse a multiply and an add, so such
instructions have no single result on silicon.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import approximate, floats
from .isa_half import TABLES
from .lowering import Lowering
from .memory import Array
from .registry import Index, Modifiers, Step, instruction

RND = "rnd?=rn|rz|rm|rp"


def finish(
    b: Lowering, m: Modifiers, sources: int, compute: Callable[..., Any], exact: Callable[..., Any] | None = None
) -> Step:
    """A float32 instruction with the `.ftz` and `.sat` that it carries.

    exact: the result in float64, exact or rounded to odd, where rounding can lift it out of the subnormal numbers.
    """

    def flushed(*v: Any) -> Any:
        inputs = [floats.flush(x) for x in v]
        r = compute(*inputs)
        return floats.flush(r) if exact is None else floats.flush_exact(r, exact(*inputs), m.get("rnd", "rn"))

    if m.ftz and m.sat:
        return b.alu("f32", ("f32",) * sources, lambda *v: floats.saturate(flushed(*v)))
    if m.ftz:
        return b.alu("f32", ("f32",) * sources, flushed)
    if m.sat:
        return b.alu("f32", ("f32",) * sources, lambda *v: floats.saturate(compute(*v)))
    return b.alu("f32", ("f32",) * sources, compute)


@instruction(f"add {RND} .ftz? .sat? .f32")
def add(b: Lowering, m: Modifiers) -> Step:
    mode = m.get("rnd", "rn")
    return finish(b, m, 2, lambda x, y: floats.add(x, y, mode))


@instruction(f"sub {RND} .ftz? .sat? .f32")
def sub(b: Lowering, m: Modifiers) -> Step:
    mode = m.get("rnd", "rn")
    return finish(b, m, 2, lambda x, y: floats.add(x, np.negative(y), mode))


@instruction(f"mul {RND} .ftz? .sat? .f32")
def mul(b: Lowering, m: Modifiers) -> Step:
    mode = m.get("rnd", "rn")
    return finish(b, m, 2, lambda x, y: floats.mul(x, y, mode), lambda x, y: x.astype(np.float64) * y)


def _exact_fma(x: Array, y: Array, z: Array) -> Array:
    product = x.astype(np.float64) * y
    return floats.odd(*floats.two_sum(product, np.broadcast_to(np.asarray(z, np.float64), product.shape)))


@instruction("fma rnd=rn|rz|rm|rp .ftz? .sat? .f32")
def fma(b: Lowering, m: Modifiers) -> Step:
    return finish(b, m, 3, lambda x, y, z: floats.fma(x, y, z, m.rnd), _exact_fma)


@instruction(f"mad {RND} .ftz? .sat? .f32")
def mad(b: Lowering, m: Modifiers) -> Step:
    mode = m.get("rnd", "rn")
    return finish(b, m, 3, lambda x, y, z: floats.fma(x, y, z, mode), _exact_fma)


@instruction("div rnd=rn|rz|rm|rp .ftz? .f32")
def div(b: Lowering, m: Modifiers) -> Step:
    return finish(b, m, 2, lambda x, y: floats.div(x, y, m.rnd))


@instruction("rcp rnd=rn|rz|rm|rp .ftz? .f32")
def rcp(b: Lowering, m: Modifiers) -> Step:
    one = np.ones(1, np.float32)
    if m.ftz and m.rnd in ("rm", "rp"):
        # A reciprocal below 2^-126 is flushed even if it rounds up to there (seen on an H200).
        def directed(x: Array) -> Array:
            small = np.isfinite(x) & (np.abs(x) > np.float32(2.0**126))
            return np.where(small, np.copysign(np.float32(0), x), floats.div(one, x, m.rnd))

        return finish(b, m, 1, directed)
    return finish(b, m, 1, lambda x: floats.div(one, x, m.rnd))


@instruction("sqrt rnd=rn|rz|rm|rp .ftz? .f32")
def sqrt(b: Lowering, m: Modifiers) -> Step:
    return finish(b, m, 1, lambda x: floats.sqrt(x, m.rnd))


@instruction("neg .ftz? .f32")
def neg(b: Lowering, m: Modifiers) -> Step:
    return finish(b, m, 1, lambda x: floats.canonical(np.negative(x)))


@instruction("abs .ftz? .f32")
def absolute(b: Lowering, m: Modifiers) -> Step:
    return finish(b, m, 1, lambda x: floats.canonical(np.abs(x)))


@instruction("copysign .f32")
def copysign(b: Lowering, m: Modifiers) -> Step:
    return b.alu("f32", ("f32", "f32"), lambda sign, value: np.copysign(value, sign))


for _name in ("min", "max"):

    @instruction(f"{_name} .ftz? .NaN? .xorsign? .abs? .f32")
    def extremum(b: Lowering, m: Modifiers, largest: bool = _name == "max") -> Step:
        nan, magnitude, xorsign = bool(m.NaN), bool(m.abs), bool(m.xorsign)
        if len(b.operands) == 4:
            if b.program.arch == "sm_90a" or xorsign:
                raise b.fail(f"`{b.ins.name}` with three operands needs sm_100, and takes no .xorsign")
            return finish(
                b, m, 3,
                lambda x, y, z: floats.minmax(
                    floats.minmax(x, y, largest, nan, magnitude), z, largest, nan, magnitude
                ),
            )  # fmt: skip
        if magnitude != xorsign:
            raise b.fail(f"`{b.ins.name}`: .xorsign and .abs go together where there are two operands")
        return finish(b, m, 2, lambda x, y: floats.minmax(x, y, largest, nan, magnitude, xorsign))


_CLASSES: dict[str, Callable[[Array], Any]] = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "number": lambda x: ~np.isnan(x),
    "notanumber": np.isnan,
    # Zeros count as normal (seen on an H200).
    "normal": lambda x: np.isfinite(x) & ((x == 0) | (np.abs(x) >= np.finfo(x.dtype).tiny)),
    "subnormal": lambda x: (x != 0) & (np.abs(x) < np.finfo(x.dtype).tiny),
}


@instruction("testp class=finite|infinite|number|notanumber|normal|subnormal type=f32|f64")
def testp(b: Lowering, m: Modifiers) -> Step:
    return b.alu("pred", (m.type,), _CLASSES[getattr(m, "class")])


for _name in ("ex2", "lg2", "rcp", "rsqrt", "sqrt"):

    @instruction(f"{_name} .approx .ftz? .f32")
    def approximation(b: Lowering, m: Modifiers, name: str = _name) -> Step:
        f = approximate.function(name, b.program.arch, bool(m.ftz))
        return b.alu("f32", ("f32",), f)


for _name in ("sin", "cos"):

    @instruction(f"{_name} .approx .ftz? .f32")
    def unmodelled(b: Lowering, m: Modifiers, name: str = _name) -> Step:
        """No model of silicon: the correctly rounded result, and a finding that says so."""
        step = b.alu("f32", ("f32",), approximate.function(name, b.program.arch, bool(m.ftz)))

        def noted(w: Any, i: Index) -> None:
            if w.tracker is not None and w.count(i):
                w.tracker.note(
                    w, "unmodelled", f"`{b.ins.name}` gives the correctly rounded result here: what silicon gives is "
                    "not modelled", int(w.index(i)[0]),
                )  # fmt: skip
            step(w, i)

        return noted


@instruction("tanh .approx .f32")
def tanh(b: Lowering, m: Modifiers) -> Step:
    return b.alu("f32", ("f32",), approximate.function("tanh", b.program.arch, False))


def _by_reciprocal(arch: str, m: Modifiers) -> Callable[[Array, Array], Array]:
    """As ptxas expands it: both operands are scaled where the reciprocal would leave the normal range."""
    unit = approximate.function("rcp", arch, True)

    def quotient(x: Array, y: Array) -> Array:
        size = np.abs(y)
        scale = np.ones_like(size)
        if m.how == "full":
            scale = np.where((size > np.float32(2.0**126)) & np.isfinite(y), np.float32(0.25), scale)
        if not m.ftz:
            scale = np.where(size < np.finfo(np.float32).tiny, np.float32(2.0**24), scale)
        return floats.mul(np.asarray(x * scale), unit(np.asarray(y * scale)), "rn")

    return quotient


@instruction("div how=approx|full .ftz? .f32")
def div_approx(b: Lowering, m: Modifiers) -> Step:
    """The dividend times the approximate reciprocal; where that was not captured, the correctly rounded quotient.

    `.approx` gives 0 for divisors above 2^126 in magnitude.
    """
    huge = np.float32(2.0**126)
    if approximate.evidence(b.program.arch, "rcp") == "silicon":
        return finish(b, m, 2, _by_reciprocal(b.program.arch, m))

    def quotient(x: Array, y: Array) -> Array:
        r = floats.div(x, y, "rn")
        if m.how == "approx":
            big = (np.abs(y) > huge) & np.isfinite(y)
            if np.any(big):
                zero = np.where(np.isinf(x), np.float32(np.nan), np.copysign(np.float32(0), r))
                r = floats.canonical(np.asarray(np.where(big, zero, r), np.float32))
        return r

    return finish(b, m, 2, quotient)


# -- sums and products with a narrower operand (sm_100) ---------------------------------------------------------------


def _widened(b: Lowering, m: Modifiers, count: int, compute: Callable[..., Any]) -> Step:
    """The first `count` operands are f16 or bf16, which float32 holds exactly; the last is float32."""
    table = TABLES[m.type]

    def step(*v: Any) -> Array:
        r = compute(*(table[x] for x in v[:count]), v[count])
        return floats.saturate(r) if m.sat else r

    return b.alu("f32", (m.type,) * count + ("f32",), step)


for _name in ("add", "sub"):

    @instruction(f"{_name} {RND} .sat? .f32 type=f16|bf16", features=("sm_100a",))
    def add_narrow(b: Lowering, m: Modifiers, subtracts: bool = _name == "sub") -> Step:
        mode = m.get("rnd", "rn")
        return _widened(b, m, 1, lambda x, y: floats.add(x, np.negative(y) if subtracts else y, mode))


@instruction("fma rnd=rn|rz|rm|rp .sat? .f32 type=f16|bf16", features=("sm_100a",))
def fma_narrow(b: Lowering, m: Modifiers) -> Step:
    return _widened(b, m, 2, lambda x, y, z: floats.fma(x, y, z, m.rnd))


# -- packed pairs (sm_100) ------------------------------------------------------------------------------------------

for _name, _count in (("add", 2), ("sub", 2), ("mul", 2), ("fma", 3)):

    @instruction(f"{_name} rnd{'' if _name == 'fma' else '?'}=rn|rz|rm|rp .ftz? .f32x2", features=("sm_100a",))
    def pair(b: Lowering, m: Modifiers, name: str = _name, count: int = _count) -> Step:
        mode = m.get("rnd", "rn")

        def compute(*v: Any) -> Array:
            shape = np.broadcast_shapes(*(np.shape(x) for x in v))
            halves = [np.ascontiguousarray(np.broadcast_to(x, shape)).view(np.float32) for x in v]
            if m.ftz:
                halves = [floats.flush(h) for h in halves]
            if name == "fma":
                r = floats.fma(halves[0], halves[1], halves[2], mode)
            elif name == "mul":
                r = floats.mul(halves[0], halves[1], mode)
            else:
                r = floats.add(halves[0], halves[1] if name == "add" else np.negative(halves[1]), mode)
            return (floats.flush(r) if m.ftz else r).view(np.uint64)

        return b.alu("f32x2", ("f32x2",) * count, compute)
