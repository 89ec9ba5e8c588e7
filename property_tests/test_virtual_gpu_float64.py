"""Float64 instructions of the virtual GPU lie where their rounding direction says, beside the exact rational result.

Faults this catches: a result rounded to the other side, a tie to odd, a wrong overflow or underflow, the sign of a
zero sum. The expectations compare fractions with the result and its neighbours and share no code with the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_numerics.virtual_gpu import VirtualGPU, micro, virtual_gpu

LARGEST = math.nextafter(math.inf, 0.0)
MODES = ("rn", "rz", "rm", "rp")
EDGES = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    2.0**-1074,
    -(2.0**-1074),
    2.0**-1022,
    LARGEST,
    -LARGEST,
    0.1,
    3.0,
    1 + 2.0**-52,
    2.0**53,
)
Exact = Callable[..., Fraction]
OPERATIONS: dict[str, tuple[int, Exact]] = {
    "add": (2, lambda x, y: x + y),
    "sub": (2, lambda x, y: x - y),
    "mul": (2, lambda x, y: x * y),
    "div": (2, lambda x, y: x / y),
    "rcp": (1, lambda x: 1 / x),
    "fma": (3, lambda x, y, z: x * y + z),
    "mad": (3, lambda x, y, z: x * y + z),
}


def below(r: float, exact: Fraction, within: Callable[[float, Fraction], bool]) -> bool:
    """Whether `r` is the largest float64 that is not above `exact`. within(x, e): x <= e, for finite x."""
    if r == -math.inf:
        return not within(-LARGEST, exact)
    above = math.nextafter(r, math.inf)
    return r != math.inf and within(r, exact) and (above == math.inf or not within(above, exact))


def rounded(r: float, exact: Fraction, mode: str) -> bool:
    """Whether `r` is `exact` rounded to float64."""
    if mode == "rz":
        mode = "rm" if exact >= 0 else "rp"
    if mode == "rm":
        return below(r, exact, lambda x, e: Fraction(x) <= e)
    if mode == "rp":
        return below(-r, -exact, lambda x, e: Fraction(x) <= e)
    if math.isinf(r):
        return abs(exact) >= Fraction(LARGEST) + Fraction(2) ** 970 and (exact > 0) == (r > 0)
    error = abs(exact - Fraction(r))
    for towards in (-math.inf, math.inf):
        other = math.nextafter(r, towards)
        # Past the largest number the next one would be 2^1024.
        place = Fraction(other) if math.isfinite(other) else Fraction(2) ** 1024 * (1 if towards > 0 else -1)
        tie = error == abs(exact - place)
        even = int(np.float64(r).view(np.uint64)) & 1 == 0
        if error > abs(exact - place) or (tie and not even):
            return False
    return True


@pytest.fixture(scope="module")
def gpu() -> Iterator[VirtualGPU]:
    with virtual_gpu("sm_90a") as g:
        yield g


def operands(count: int, seed: int, first: list[float]) -> list[np.ndarray]:
    """Random bits, edges, and numbers near each other so that sums cancel and round."""
    rng = np.random.Generator(np.random.Philox(seed))
    bits = [rng.integers(0, 2**64, 16, np.uint64).view(np.float64) for _ in range(count)]
    near = [rng.integers(1, 2**53, 16).astype(np.float64) * 2.0 ** rng.integers(-60, 9, 16) for _ in range(count)]
    edges = [np.array([EDGES[k] for k in rng.integers(0, len(EDGES), 16)]) for _ in range(count)]
    drawn = [np.array([first[n]]) for n in range(count)]
    return [np.concatenate(parts) for parts in zip(drawn, bits, near, edges, strict=True)]


FINITE = st.floats(allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPERATIONS)
@given(seed=st.integers(0, 2**16), first=st.tuples(FINITE, FINITE, FINITE))
def test_arithmetic_is_rounded_once(gpu: VirtualGPU, name: str, mode: str, seed: int, first: tuple[float, ...]) -> None:
    count, exact = OPERATIONS[name]
    columns = operands(count, seed, list(first))
    text = f"{name}.{mode}.f64 {{d0}}, {', '.join(f'{{a{n}}}' for n in range(count))};"
    (got,) = micro.run(gpu, text, ["f64"], [("f64", c) for c in columns])
    for *row, r in zip(*(c.tolist() for c in columns), got.tolist(), strict=True):
        if not all(map(math.isfinite, row)) or (name in ("div", "rcp") and row[-1] == 0):
            continue
        wanted = exact(*map(Fraction, row))
        assert rounded(r, wanted, mode), f"{text} of {row} = {r!r}"
        if wanted == 0:
            assert (math.copysign(1, r) < 0) == zero_is_negative(name, row, mode), f"{text} of {row} = {r!r}"


def zero_is_negative(name: str, row: list[float], mode: str) -> bool:
    """The sign of an exact zero (IEEE 754-2019, 6.3)."""
    signs = [math.copysign(1, x) < 0 for x in row]
    if name in ("mul", "div"):
        return signs[0] != signs[1]
    terms = {"add": signs, "sub": [signs[0], not signs[-1]]}.get(name) or [signs[0] != signs[1], signs[2]]
    return terms[0] if terms[0] == terms[1] else mode == "rm"


@pytest.mark.parametrize("mode", MODES)
@given(seed=st.integers(0, 2**16), first=st.floats(0, LARGEST, exclude_min=True))
def test_square_roots_are_rounded_once(gpu: VirtualGPU, mode: str, seed: int, first: float) -> None:
    x = np.abs(operands(1, seed, [first])[0])
    (got,) = micro.run(gpu, f"sqrt.{mode}.f64 {{d0}}, {{a0}};", ["f64"], [("f64", x)])
    for value, r in zip(x.tolist(), got.tolist(), strict=True):
        if not math.isfinite(value) or value == 0:
            continue
        square, above, under = (Fraction(v) ** 2 for v in (r, math.nextafter(r, math.inf), math.nextafter(r, 0)))
        exact = Fraction(value)
        if mode in ("rm", "rz"):
            assert square <= exact < above
        elif mode == "rp":
            assert under < exact <= square
        else:
            middle = [(Fraction(r) + Fraction(math.nextafter(r, to))) / 2 for to in (0.0, math.inf)]
            assert middle[0] ** 2 <= exact <= middle[1] ** 2


@pytest.mark.parametrize(
    ("text", "kinds", "row", "wanted"),
    [
        ("add.rz.f64 {d0}, {a0}, {a1};", ("f64", "f64"), (LARGEST, LARGEST), LARGEST),
        ("add.rm.f64 {d0}, {a0}, {a1};", ("f64", "f64"), (math.inf, -1.0), math.inf),
        ("mul.rp.f64 {d0}, {a0}, {a1};", ("f64", "f64"), (-LARGEST, 2.0), -LARGEST),
        ("mul.rm.f64 {d0}, {a0}, {a1};", ("f64", "f64"), (-LARGEST, 2.0), -math.inf),
        ("fma.rp.f64 {d0}, {a0}, {a1}, {a2};", ("f64",) * 3, (LARGEST, 2.0, -math.inf), -math.inf),
        ("div.rz.f64 {d0}, {a0}, {a1};", ("f64", "f64"), (-1.0, 0.0), -math.inf),
        ("sqrt.rp.f64 {d0}, {a0};", ("f64",), (-0.0,), -0.0),
        ("copysign.f64 {d0}, {a0}, {a1};", ("f64", "f64"), (-0.0, 2.5), -2.5),
        ("cvt.rmi.f64.f64 {d0}, {a0};", ("f64",), (-1.5,), -2.0),
        ("cvt.rni.sat.f64.f64 {d0}, {a0};", ("f64",), (2.5,), 1.0),
        ("cvt.sat.f64.f64 {d0}, {a0};", ("f64",), (-3.0,), 0.0),
        ("cvt.sat.f64.f32 {d0}, {a0};", ("f32",), (0.25,), 0.25),
        ("cvt.ftz.f64.f32 {d0}, {a0};", ("f32",), (-(2.0**-140),), -0.0),
        ("cvt.rn.sat.f64.s32 {d0}, {a0};", ("s32",), (-7,), 0.0),
        ("cvt.rn.sat.f64.u32 {d0}, {a0};", ("u32",), (7,), 1.0),
    ],
)
def test_special_values(
    gpu: VirtualGPU, text: str, kinds: tuple[str, ...], row: tuple[float, ...], wanted: float
) -> None:
    dtypes = {"f64": np.float64, "f32": np.float32, "s32": np.int32, "u32": np.uint32}
    given_operands = [(k, np.array([v], dtypes[k])) for k, v in zip(kinds, row, strict=True)]
    (got,) = micro.run(gpu, text, ["f64"], given_operands)
    assert (float(got[0]), math.copysign(1, got[0])) == (wanted, math.copysign(1, wanted))
