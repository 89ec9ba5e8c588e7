"""Kinds of values: each holds what its name says, on every machine the same."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_numerics.reference.activations import ACTIVATIONS
from numpy.typing import NDArray
from significance import assert_mean, assert_share

from moe_numerics import values
from moe_numerics.cases import Case, TensorSpec, Values

X = TensorSpec("x")
GATE_UP = TensorSpec("gate_up", columns=2)
SEEDS = st.integers(0, (1 << 64) - 1)
E4M3 = [Fraction(m, 512) if e == 0 else Fraction((8 + m) * 2**e, 1024) for e in range(16) for m in range(8)][:-1]
E4M3_MIDPOINTS = {(a + b) / 2 for a, b in pairwise(E4M3)}
E2M1_MIDPOINTS = {Fraction(n, 4) for n in (1, 3, 5, 7, 10, 14, 20)}


def bits_of(
    kind: str, seed: int, spec: TensorSpec = X, rows: int = 64, hidden: int = 64, exponent: int = 0
) -> NDArray[Any]:
    return Case("p", (rows,), hidden, values={spec.name: Values(kind, seed, exponent)}).bits(spec)


def floats(bits: NDArray[np.uint16]) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore"):
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def test_splitmix_known_answers() -> None:
    """Catches a generator that is not the published one: SplitMix64 from state 1234567 (Vigna's splitmix64.c)."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    states = [(1234567 + i * 0x9E3779B97F4A7C15) % (1 << 64) for i in range(4)]
    assert [values.mix_one(state) for state in states] == expected
    assert values.mix(np.array(states, dtype=np.uint64)).tolist() == expected


@given(SEEDS)
def test_words_are_uniform(seed: int) -> None:
    """Catches a key that leaves bits out: each of 64 bits of 4,096 words is set in half of them."""
    row, column = np.arange(64, dtype=np.uint64)[:, None], np.arange(64, dtype=np.uint64)[None, :]
    words = values.Places(seed, "x", "bfloat16", 0, 1, np.zeros_like(row), row, column).words("test")
    assert len(np.unique(words)) == 4096
    for bit in range(64):
        ones = int(((words >> np.uint64(bit)) & np.uint64(1)).sum())
        assert_share(ones, 4096, 0.5, f"bit {bit}")


@pytest.mark.parametrize("other", ["seed", "tensor", "part", "expert", "row", "column", "stream"])
def test_words_depend_on_every_part_of_the_key(other: str) -> None:
    """Catches two experts, tensors or columns that hold the same values: swapping them would not show."""
    place: dict[str, Any] = {"seed": 1, "tensor": "x", "part": 0, "expert": 2, "row": 3, "column": 4, "stream": "a"}
    changed = {**place, other: "y" if other in ("tensor", "stream") else place[other] + 1}

    def word(p: dict[str, Any]) -> int:
        at = [np.array([[p[name]]], dtype=np.uint64) for name in ("expert", "row", "column")]
        places = values.Places(p["seed"], p["tensor"], "bfloat16", p["part"], 2, *at)
        return int(places.words(p["stream"])[0, 0])

    assert word(place) != word(changed)


@given(SEEDS)
def test_gaussian_moments(seed: int) -> None:
    """Catches a wrong mean, width or tail: of 16,384 sums of twelve uniform numbers."""
    x = floats(bits_of("gaussian", seed, rows=128, hidden=128))
    n = x.size
    assert_mean(x.mean(), 0, n**-0.5, "mean")
    assert_mean((x**2).mean(), 1, (2 / n) ** 0.5, "variance")
    assert 3 < np.abs(x).max() <= 6


@pytest.mark.parametrize("kind", [kind for kind in values.KINDS if kind not in values.NOT_FINITE])
@given(seed=SEEDS)
def test_other_kinds_are_finite(kind: str, seed: int) -> None:
    """Catches a NaN or an infinity where a strategy promises none, also when the values are scaled up."""
    assert np.isfinite(floats(bits_of(kind, seed))).all()
    assert np.isfinite(floats(bits_of(kind, seed, exponent=200))).all()


@pytest.mark.parametrize("kind", values.NOT_FINITE)
def test_special_kinds_hold_all_specials(kind: str) -> None:
    """Catches a kind that forgets NaN or one of the infinities."""
    x = floats(bits_of(kind, 0, rows=512, hidden=256))
    assert np.isnan(x).any()
    assert (x == np.inf).any()
    assert (x == -np.inf).any()


@given(SEEDS)
def test_e4m3_ties_are_ties(seed: int) -> None:
    """Catches values beside the midpoints, or a block amax that moves the scale: checked in exact fractions."""
    x = floats(bits_of("ties_e4m3", seed))
    assert_ties(x, 32, (Fraction(448), Fraction(256)), E4M3_MIDPOINTS)


@given(SEEDS)
def test_e2m1_ties_are_ties(seed: int) -> None:
    """Catches values beside the midpoints of E2M1, whose block's amax stands for 6."""
    x = floats(bits_of("ties_e2m1", seed))
    assert_ties(x, 16, (Fraction(6),), E2M1_MIDPOINTS)


def assert_ties(x: NDArray[np.float64], side: int, tops: tuple[Fraction, ...], midpoints: set[Fraction]) -> None:
    exact = total = 0
    for i in range(0, x.shape[0], side):
        for j in range(0, x.shape[1], side):
            tile = np.abs(x[i : i + side, j : j + side])
            amax = Fraction(float(tile.max()))
            assert (np.diagonal(tile) == float(amax)).all(), "every row and column of a tile holds its amax"
            units = {amax / top for top in tops}
            inner = [Fraction(float(v)) for v in tile[~np.eye(side, dtype=bool)]]
            exact += max(sum(v / unit in midpoints for v in inner) for unit in units)
            total += len(inner)
    # Two in eight are moved to a neighbour on purpose.
    assert 0.70 * total < exact < 0.80 * total


@pytest.mark.parametrize("name", ["swiglu", "geglu", "reglu"])
@pytest.mark.parametrize("kind", ["ties_e4m3", "ties_e2m1", "scale_edges"])
def test_ties_survive_an_activation(name: str, kind: str) -> None:
    """Catches a gate that changes the up part: ties of the inputs must be ties of what is quantised."""
    tensors = Case("p", (64,), 64, values={"gate_up": Values(kind, 8)}).tensors([GATE_UP])
    gate, up = tensors["gate_up"].float().split(64, dim=1)
    assert torch.equal(ACTIVATIONS[name].forward(gate, up), 32 * up)


def test_half_the_tiles_of_two_parts_are_powers_of_two() -> None:
    """Catches ties in both factors of a backward product, whose product is no tie."""
    up = np.abs(floats(bits_of("ties_e4m3", 3, GATE_UP, rows=512, hidden=512)[:, 512:]))
    tiles = up.reshape(16, 32, 16, 32).transpose(0, 2, 1, 3).reshape(256, 1024)
    powers = sum(len(np.unique(tile)) == 1 and np.frexp(tile[0])[0] == 0.5 for tile in tiles)
    assert 80 < powers < 176


def test_scale_edges_reach_both_ends_of_e8m0() -> None:
    """Catches a range that stops short of scale codes 0, 1 and the largest of a bfloat16 amax."""
    x = np.abs(floats(bits_of("scale_edges", 1, rows=32 * 32, hidden=32 * 32)))
    amax = x.reshape(32, 32, 32, 32).max(axis=(1, 3)).ravel()
    smallest_code = 448 * 2.0**-127
    assert (amax <= smallest_code).mean() > 0.05
    assert ((amax > smallest_code) & (amax <= 2 * smallest_code)).any()
    assert (amax >= 256 * 2.0**118).mean() > 0.05
    # Beside a step: one bfloat16 below, at and above 448 times a power of two.
    mantissas = {int(m) for m in np.round(np.frexp(amax)[0] * 256)}
    assert {223, 224, 225} <= mantissas


def test_log_uniform_has_every_exponent() -> None:
    """Catches a range of exponents with a hole or a missing end."""
    fields = (bits_of("log_uniform", 1, rows=256, hidden=256) >> 7) & 0xFF
    assert set(fields.ravel().tolist()) == set(range(255))


def test_random_bits_have_every_pattern_class() -> None:
    """Catches a mask that leaves bits of the pattern out."""
    bits = bits_of("random_bits", 1, rows=1024, hidden=512)
    assert len(np.unique(bits)) > 65_400


def test_outliers_stay_in_their_columns() -> None:
    """Catches outliers that are scattered: real ones sit in the same channels for all tokens and experts."""
    x = np.abs(floats(Case("p", (200, 200), 512, values={"x": Values("outliers", 4)}).bits(X)))
    first, second = np.median(x[:200], axis=0), np.median(x[200:], axis=0)
    assert ((first > 5) == (second > 5)).all()
    assert 10 < (first > 5).sum() < 60


def test_zeros_are_zeros_of_both_signs() -> None:
    """Catches a lost sign of zero."""
    assert set(np.unique(bits_of("zeros", 0, rows=256)).tolist()) == {0, 0x8000}


def test_subnormal_products() -> None:
    """Catches a kind whose activation outputs are all zero: an ordinary gate must meet subnormal values."""
    both = floats(bits_of("subnormal", 2, GATE_UP, rows=256, hidden=128)).astype(np.float32)
    products = np.abs(both[:, :128] * both[:, 128:])
    assert (np.abs(both[:, 128:]) < 2.0**-126).mean() > 0.5
    assert ((products > 0) & (products < 2.0**-126)).mean() > 0.2


def test_kinks_hold_limits_and_their_neighbours() -> None:
    """Catches a kind that misses a clamp limit, a zero or the values beside them."""
    held = set(bits_of("kinks", 1, rows=256, hidden=128).ravel().tolist())
    assert {0x0000, 0x8000, 0x0001, 0x40DF, 0x40E0, 0x40E1, 0xC0E0, 0xC0E1, 0x007F, 0x0080} <= held


def test_mixed_has_every_kind_and_shares_tiles() -> None:
    """Catches a mixture that leaves a kind out, or gives gate_up and grad different kinds in one tile."""
    rows, hidden = 32 * 16, 32 * 16
    x, grad = bits_of("mixed", 6, rows=rows, hidden=hidden), bits_of("mixed", 6, TensorSpec("grad"), rows, hidden)
    zero_x, zero_grad = ((np.abs(floats(t)) == 0).reshape(16, 32, 16, 32).all(axis=(1, 3)) for t in (x, grad))
    assert zero_x.any()
    assert (zero_x == zero_grad).all()
    for kind in values.KINDS:
        if kind not in ("plain", "mixed", "mixed_finite"):
            alone = bits_of(kind, 6, rows=rows, hidden=hidden)
            assert (x == alone).reshape(16, 32, 16, 32).all(axis=(1, 3)).any(), kind


@given(st.integers(0, (1 << 32) - 1))
def test_rounding_to_bfloat16(word: int) -> None:
    """Catches a double rounding, a lost NaN or a finite value that becomes infinite: against exact fractions."""
    bits = np.array([word], dtype=np.uint32)
    got = int(values.to_dtype(bits, "bfloat16")[0])
    x = float(bits.view(np.float32)[0])
    if not np.isfinite(x):
        assert np.isnan(x) or got == word >> 16
        return
    below = word >> 16
    above = below if below & 0x7FFF == 0x7F7F else below + 1
    exact = Fraction(x)
    errors = {c: abs(Fraction(float(floats(np.array([c], dtype=np.uint16))[0])) - exact) for c in (below, above)}
    best = [c for c in errors if errors[c] == min(errors.values())]
    assert got in best
    assert len(best) == 1 or got % 2 == 0


@given(st.integers(0, 0xFFFF), st.integers(-300, 300))
def test_scaling_is_exact_or_saturates(pattern: int, exponent: int) -> None:
    """Catches a scaling that changes a mantissa, a sign or a NaN."""
    bits = np.array([pattern << 16], dtype=np.uint32)
    got = values.scaled(bits, exponent)
    x, y = float(bits.view(np.float32)[0]), float(got.view(np.float32)[0])
    if not np.isfinite(x):
        assert (got == bits).all()
        return
    assert np.isfinite(y)
    assert np.signbit(x) == np.signbit(y)
    product = Fraction(x) * Fraction(2) ** exponent
    if abs(product) < Fraction(2) ** 127 and (product == 0 or abs(product) >= Fraction(1, 2**126)):
        assert Fraction(y) == product


def test_router_probabilities() -> None:
    """Catches probabilities outside [0, 1], or none that is exactly 0, 1 or a power of two."""
    spec = TensorSpec("prob", "float32", "prob")
    prob = Case("p", (4000,), 32, prob=True, seed=3).bits(spec).view(np.float32)
    assert ((prob >= 0) & (prob <= 1)).all()
    assert (prob == 0).sum() > 100
    assert (prob == 1).sum() > 100
    assert ((np.frexp(prob)[0] == 0.5) & (prob < 1)).sum() > 300
    assert len(np.unique(prob)) > 2500
