"""Shrinking of campaign cases: the failure stays, and what does not matter goes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_numerics.cases import Case, Edit, TensorSpec, Values, Window, gauntlet_case
from moe_numerics.drawing import Space, draw_cases
from moe_numerics.reducing import keep, narrower, without_empty_experts, without_plain_tokens
from moe_numerics.shrinking import shrink
from moe_numerics.strategies import cases

GATE_UP, GRAD = TensorSpec("gate_up", columns=2), TensorSpec("grad")
PROB = TensorSpec("prob", "float32", "prob")
INPUTS = (GATE_UP, GRAD, TensorSpec("offsets", kind="offsets"), TensorSpec("counts", kind="counts"), PROB)
SPACE = Space("swiglu.bwd.bf16", INPUTS, max_rows=120, max_hidden=128, max_elements=6000, big_elements=9000)


def owned(case: Case, spec: TensorSpec) -> np.ndarray:
    return case.bits(spec)[case.valid_rows()]


def has_nan_gradient(case: Case) -> bool:
    return bool(((owned(case, GRAD) & 0x7FFF) > 0x7F80).any())


def has_large_gate(case: Case) -> bool:
    part = [case.physical_column(0, c, 2) for c in range(case.hidden)]
    return bool(((owned(case, GATE_UP)[:, part] & 0x7FFF) > 0x4000).any())


def has_ragged_second(case: Case) -> bool:
    return any(count % 32 and count > 10 for count in case.counts[1:])


def has_zero_probability(case: Case) -> bool:
    return case.prob and bool((owned(case, PROB) == 0).any())


def has_padding_of_nan(case: Case) -> bool:
    return case.padding_fill == "nan" and case.offsets[-1] > case.tokens > 3


FAILURES = [has_nan_gradient, has_large_gate, has_ragged_second, has_zero_probability, has_padding_of_nan]


@pytest.mark.parametrize("fails", FAILURES, ids=lambda f: f.__name__)
def test_shrunk_cases_still_fail_and_are_small(fails: Callable[[Case], bool]) -> None:
    """Catches a shrunk case that passes, and shrinking that leaves a large one: drawn cases and the gauntlet."""
    drawn = [gauntlet_case("p", inputs=INPUTS), *draw_cases(120, 11, SPACE)]
    failing = [case for case in drawn if fails(case)][:6]
    assert len(failing) >= 4
    for case in failing:
        calls: list[Case] = []

        def counted(candidate: Case, calls: list[Case] = calls) -> bool:
            calls.append(candidate)
            return fails(candidate)

        small = shrink(case, INPUTS, counted)
        assert fails(small)
        assert len(calls) <= 150
        assert small.hidden == 32
        assert len(small.counts) <= 2
        assert small.tokens <= (12 if fails is has_ragged_second else 4)
        assert all(item.kind in ("plain", "ones") for item in small.values.values())
        assert sum(len(item.edits) for item in small.values.values()) <= 1
        assert small == shrink(case, INPUTS, fails), "shrinking is deterministic"


def test_attempts_are_bounded() -> None:
    """Catches a shrinker that runs on: a failure that everything has ends after the attempts it was given."""
    calls: list[Case] = []

    def fails(case: Case) -> bool:
        calls.append(case)
        return has_nan_gradient(case)

    shrink(gauntlet_case("p", inputs=INPUTS), INPUTS, fails, attempts=10)
    assert len(calls) <= 10


@given(cases(SPACE), st.data())
def test_kept_tokens_keep_their_edits(case: Case, data: st.DataObject) -> None:
    """Catches an edit that ends on another token or survives one that went."""
    case = case.replace(padded=True)
    tokens = [
        None if data.draw(st.integers(0, 4)) == 4 else [t for t in range(n) if data.draw(st.booleans())]
        for n in case.counts
    ]
    if all(kept is None for kept in tokens):
        tokens[0] = []
    rows = case.valid_rows().tolist()
    marks = {"grad": Values(edits=tuple(Edit(row, 1, number) for number, row in enumerate(rows)))}
    smaller = keep(case.replace(values=marks), tokens)
    starts = zip(case.offsets, tokens, strict=False)
    expected = [rows.index(start + t) for start, kept in starts if kept is not None for t in kept]
    assert owned(smaller, GRAD)[:, 1].tolist() == expected
    assert smaller.counts == tuple(len(kept) for kept in tokens if kept is not None)


def test_windows_move_with_their_tokens() -> None:
    """Catches a window that covers other tokens after one before it went."""
    case = Case("p", (3, 2, 4), 32, values={"grad": Values("gaussian", 1, window=Window(3, 7, 0, 32, 0, 1))})
    smaller = keep(case, [range(1), None, range(4)])
    assert smaller.values["grad"].window == Window(1, 3, 0, 32, 0, 1)
    gone = keep(case, [range(3), None, None])
    assert (owned(gone, GRAD) == 0x3F80).all()


def test_plain_tokens_and_empty_experts_go() -> None:
    """Catches a token with an edit that is dropped, or one without that stays."""
    edits = (Edit(1, 2, 7), Edit(8, 3, 9))
    case = Case("p", (4, 0, 6), 32, values={"grad": Values(edits=edits)})
    smaller = without_empty_experts(without_plain_tokens(case))
    assert smaller.counts == (1, 1)
    assert smaller.values["grad"].edits == (Edit(0, 2, 7), Edit(1, 3, 9))
    aligned = Case("p", (32, 64), 32, alignment=16, values={"grad": Values(edits=(Edit(40, 0, 5),))})
    assert without_plain_tokens(aligned).counts == (16, 16)
    assert owned(without_plain_tokens(aligned), GRAD)[16, 0] in (5, 0x3F80)
    assert (owned(without_plain_tokens(aligned), GRAD) == 5).sum() == 1


def test_narrower_cases_keep_gate_and_up() -> None:
    """Catches an edit of the up part that ends in the gate when columns go or the layout changes."""
    values = {"gate_up": Values(edits=(Edit(0, 32 + 5, 0x1111), Edit(0, 64 + 3, 0x2222)))}
    case = Case("p", (1,), 64, layout="interleaved:32", values=values)
    bits = narrower(case, INPUTS, 32, "halves").bits(GATE_UP)
    assert bits.shape == (1, 64)
    assert bits[0, 32 + 5] == 0x1111, "column 5 of up"
    assert bits[0, 3] == 0x2222, "column 35 of gate, modulo 32"


@pytest.mark.parametrize("matters", [False, True], ids=["bias does not matter", "bias matters"])
def test_a_bias_shrinks_too(matters: bool) -> None:
    """Catches a bias that stays random in a case that fails without it, or is lost where the case needs it."""
    bias = TensorSpec("bias", kind="bias", columns=2)
    case = Case("p", (3, 5), 64, values={"bias": Values("gaussian", 7), "gate_up": Values("gaussian", 7)})

    def fails(candidate: Case) -> bool:
        return candidate.tokens > 0 and (not matters or bool((candidate.bits(bias) & 0x8000).any()))

    smaller = shrink(case, (*INPUTS, bias), fails)
    assert fails(smaller)
    assert smaller.tokens == 1
    assert (smaller.values["bias"] == Values("plain")) != matters
