"""Strategies and seeded drawing: every distribution is what it says, inside its limits, and shrinks to the point."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st

from moe_numerics.cases import Case, CaseError, Edit, TensorSpec, Values
from moe_numerics.drawing import Space, draw_cases
from moe_numerics.strategies import cases, token_counts
from moe_numerics.token_counts import MULTIPLES, SHAPES, SeededSource

GATE_UP, GRAD = TensorSpec("gate_up", columns=2), TensorSpec("grad")
PROB = TensorSpec("prob", "float32", "prob")
INPUTS = (GATE_UP, GRAD, TensorSpec("offsets", kind="offsets"), TensorSpec("counts", kind="counts"), PROB)
SPACE = Space("swiglu.bwd.bf16", INPUTS)
SMALL = replace(SPACE, max_rows=80, max_hidden=128, max_elements=4000, big_elements=8000)


@given(st.integers(1, 64), st.integers(1, 600), st.sampled_from([1, 16, 32, 128]), st.data())
def test_token_counts_keep_their_limits(experts: int, rows: int, multiple: int, data: st.DataObject) -> None:
    """Catches more experts or rows than asked for, and counts between the multiples."""
    counts = data.draw(token_counts(max_experts=experts, max_rows=rows, multiple=multiple))
    assert 1 <= len(counts) <= experts
    assert sum(counts) <= rows
    assert all(count >= 0 and count % multiple == 0 for count in counts)


@pytest.mark.parametrize("shape", SHAPES)
@given(seed=st.integers(0, (1 << 64) - 1), experts=st.integers(1, 64), tokens=st.integers(1, 2000))
def test_proposals_are_counts(shape: str, seed: int, experts: int, tokens: int) -> None:
    """Catches a negative count, a wrong number of experts, or twice as many tokens as the buffer was made for."""
    counts = SHAPES[shape](SeededSource(seed), experts, tokens)
    assert len(counts) == experts
    assert all(isinstance(count, int) and count >= 0 for count in counts)
    assert sum(counts) <= 2 * tokens + 2 * experts
    assert counts == SHAPES[shape](SeededSource(seed), experts, tokens)


@pytest.mark.parametrize("seed", range(20))
def test_shapes_are_what_they_say(seed: int) -> None:
    """Catches a distribution that became another one under its old name."""

    def counts(shape: str) -> list[int]:
        return SHAPES[shape](SeededSource(seed), 16, 1000)

    assert max(counts("balanced")) - min(counts("balanced")) <= 1
    assert sum(counts("balanced")) == 1000
    assert sorted(counts("one_takes_all")) == [0] * 15 + [1000]
    assert sorted(counts("one_token")) == [0] * 15 + [1]
    assert counts("all_empty") == [0] * 16
    assert counts("many_empty").count(0) >= 12
    zipf = sorted(counts("zipf"), reverse=True)
    assert zipf[0] >= 2 * zipf[4] - 2
    assert zipf[0] >= 4 * zipf[15] - 4
    assert all(any((c + d) % m == 0 for d in (-1, 0, 1) for m in MULTIPLES) for c in counts("near_multiples"))


def test_near_multiples_meet_every_neighbour() -> None:
    """Catches a distribution that never is one below, at or one above a block or tile size."""
    drawn = {c for seed in range(300) for c in SHAPES["near_multiples"](SeededSource(seed), 8, 3000)}
    assert {multiple + d for multiple in MULTIPLES for d in (-1, 0, 1)} <= drawn


@given(st.integers(0, (1 << 64) - 1), st.integers(1, 32), st.integers(8, 400))
def test_the_router_gives_every_token_distinct_experts(seed: int, experts: int, tokens: int) -> None:
    """Catches a router that sends a token to one expert twice: no expert can have more tokens than there are."""
    counts = SHAPES["router"](SeededSource(seed), experts, tokens)
    top = router_choices(seed, experts)[0]
    assert sum(counts) == tokens // top * top
    assert max(counts) <= tokens // top


def router_choices(seed: int, experts: int) -> tuple[int, int, int]:
    """Experts a token, and the weights of the bias and of the topic, as the router draws them."""
    source = SeededSource(seed)
    top, _, _ = source.integer(1, min(experts, 8)), source.integer(0, (1 << 32) - 1), source.integer(1, 6)
    return top, source.integer(0, 3), source.integer(0, 3)


def test_bias_and_topics_unbalance_the_router() -> None:
    """Catches logits without bias or topics, which would make the counts as good as balanced."""
    spread: dict[tuple[bool, bool], list[float]] = {}
    for seed in range(150):
        _, bias, topic = router_choices(seed, 16)
        counts = SHAPES["router"](SeededSource(seed), 16, 2000)
        spread.setdefault((bias > 0, topic > 0), []).append(float(np.std(counts) / np.mean(counts)))
    # Independent choices of 2,000 tokens over 16 experts spread by 9 % at most.
    assert np.median(spread[False, False]) < 0.15
    assert np.median(spread[False, True]) > 0.3
    assert np.median(spread[True, False]) > 0.3
    assert max(max(values) for values in spread.values()) > 1.0


def test_the_seeded_source_is_the_same_everywhere() -> None:
    """Catches draws that depend on the machine, Python or NumPy: recorded numbers."""
    source = SeededSource(2024)
    assert [source.integer(0, 999) for _ in range(8)] == SOURCE_GOLDEN
    assert source.integer(5, 5) == 5
    with pytest.raises(ValueError, match="low must not exceed high"):
        source.integer(2, 1)


SOURCE_GOLDEN = [682, 110, 124, 781, 453, 611, 262, 499]


@given(st.integers(0, (1 << 64) - 1), st.integers(-5, 5), st.integers(0, (1 << 64) - 1))
def test_seeded_integers_stay_in_their_range(seed: int, low: int, size: int) -> None:
    """Catches an integer past either end."""
    assert low <= SeededSource(seed).integer(low, low + size) <= low + size


def test_drawn_cases_are_the_same_everywhere() -> None:
    """Catches a campaign whose seed means other cases on another machine: recorded digests."""
    assert [case.digest() for case in draw_cases(6, 7, SPACE)] == CASES_GOLDEN


CASES_GOLDEN = ["4e07216b47f7", "dbade352bd45", "2603839d030e", "c8338e5327e6", "78fa2c956210", "107c3b778119"]


def test_drawn_cases_do_not_depend_on_how_many_follow() -> None:
    """Catches a shared generator: `--examples 30` must begin with the cases of `--examples 20`."""
    assert draw_cases(3, 1, SPACE) == draw_cases(8, 1, SPACE)[:3]
    assert draw_cases(8, 1, SPACE) != draw_cases(8, 2, SPACE)
    other = draw_cases(8, 1, replace(SPACE, path="other"))
    assert [case.counts for case in other] != [case.counts for case in draw_cases(8, 1, SPACE)]


def test_drawn_cases_cover_the_space() -> None:
    """Catches a choice that is never drawn, or hardly anything but small, empty or plain cases."""
    drawn = draw_cases(600, 3, SPACE)
    for name in ("padded", "prob", "layout", "offsets_dtype", "padding_fill"):
        assert min(Counter(getattr(case, name) for case in drawn).values()) > 60, name
    assert {case.alignment for case in drawn} == set(SPACE.alignments)
    assert {case.values["gate_up"].kind for case in drawn} == set(SPACE.kinds)
    assert {case.hidden for case in drawn} > {32, 64, 96, 128, 512}
    assert {len(case.counts) for case in drawn} == set(range(1, 17))
    sizes = np.array([case.capacity * case.hidden for case in drawn])
    assert np.median(sizes) > 20_000
    assert 0.02 < (sizes > 100_000).mean() < 0.15
    assert 0.02 < np.mean([case.tokens == 0 for case in drawn]) < 0.12
    assert np.mean([any(c % 32 for c in case.counts) for case in drawn]) > 0.4
    assert np.mean([any(o % 32 for o in case.offsets) for case in drawn]) > 0.3
    assert np.mean([case.values["gate_up"].kind == "plain" for case in drawn]) < 0.25
    same = [case.values["gate_up"].kind == case.values["grad"].kind for case in drawn]
    assert 0.5 < np.mean(same) < 0.95


@given(cases(SMALL))
def test_cases_keep_the_limits_of_the_space(case: Case) -> None:
    """Catches a case larger than the space, or one that the space does not have."""
    assert len(case.counts) <= SMALL.max_experts
    assert case.hidden % SMALL.multiple == 0
    assert case.hidden <= SMALL.max_hidden
    assert case.alignment in SMALL.alignments
    assert case.tail <= SMALL.max_tail
    assert case.offsets[-1] <= max(SMALL.max_rows, case.alignment)
    assert case.offsets[-1] * case.hidden <= SMALL.big_elements
    assert case.layout in SMALL.layouts
    case.tensors(INPUTS)


@given(cases(replace(SMALL, allow_specials=False)))
def test_cases_without_specials_are_finite(case: Case) -> None:
    """Catches a NaN or an infinity that a property about finite values did not ask for."""
    owned = case.valid_rows()
    for spec in (GATE_UP, GRAD, PROB):
        bits = case.bits(spec)[owned].astype(np.uint32) << (16 if spec.dtype == "bfloat16" else 0)
        assert np.isfinite(bits.view(np.float32)).all()


@given(cases(replace(SMALL, empty_buffer=False, max_tail=0, shapes=("all_empty", "one_token"))))
def test_no_empty_buffer_where_none_may_be(case: Case) -> None:
    """Catches a buffer without rows for a path that needs one."""
    assert case.capacity > 0


@given(
    cases(
        replace(
            SMALL,
            alignments=(128,),
            paddings=(True,),
            probs=(True,),
            layouts=("interleaved:64",),
            multiple=64,
            fills=("nan",),
            kinds=("gaussian",),
            options={"limit": (7.0, None)},
        )
    )
)
def test_cases_have_what_the_space_fixes(case: Case) -> None:
    """Catches a draw that goes past what a path allows."""
    assert (case.alignment, case.padded, case.prob, case.layout) == (128, True, True, "interleaved:64")
    assert case.padding_fill == "nan"
    assert case.hidden % 64 == 0
    assert case.options["limit"] in (7.0, None)
    assert {item.kind for name, item in case.values.items() if name != "prob"} <= {"gaussian", "plain"}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"max_rows": 0}, "max_rows = 0 is out of range"),
        ({"max_hidden": 16}, "max_hidden = 16 is out of range: expected 32 or more"),
        ({"layouts": ()}, r"layouts = \(\) leaves nothing to draw"),
        ({"kinds": ("specials",), "allow_specials": False}, "leave no kind"),
        ({"layouts": ("interleaved:64",), "max_hidden": 32}, "no layout"),
        ({"kinds": ("normal",)}, "kinds = 'normal' is unknown"),
        ({"shapes": ("normal",)}, "shapes = 'normal' is unknown"),
    ],
)
def test_a_space_without_cases_is_refused(change: dict, text: str) -> None:
    """Catches an error in the middle of a campaign where the space itself is at fault."""
    with pytest.raises(CaseError, match=text):
        replace(SPACE, **change)


MEDIUM = replace(SPACE, max_rows=200, max_hidden=128, max_elements=8000, big_elements=12_000)
SETTINGS = settings(
    max_examples=2000, database=None, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)


def owned(case: Case, spec: TensorSpec) -> np.ndarray:
    return case.bits(spec)[case.valid_rows()]


def test_a_failing_count_shrinks_to_itself() -> None:
    """Catches a case that keeps experts, columns or values which do not matter."""
    case = find(cases(MEDIUM), lambda case: 33 in case.counts, settings=SETTINGS)
    assert case == Case(SPACE.path, (33,), 32, values={"gate_up": Values(), "grad": Values()})


def test_a_failing_value_shrinks_to_one_element() -> None:
    """Catches a seeded tensor where one element is at fault: a NaN gradient must end as one token and one edit."""

    def fails(case: Case) -> bool:
        return bool(((owned(case, GRAD) & 0x7FFF) > 0x7F80).any())

    case = find(cases(MEDIUM), fails, settings=SETTINGS)
    assert (case.tokens, case.hidden) == (1, 32)
    assert case.values["gate_up"] == Values()
    (edit,) = case.values["grad"].edits
    assert case.values["grad"] == Values(edits=(Edit(*edit),))
    assert f"grad[{edit.column}] is 0x{edit.bits:04x}" in case.describe()


def test_a_failure_of_the_second_expert_keeps_two() -> None:
    """Catches shrinking that stops early: 65 tokens behind another expert and nothing else."""
    case = find(cases(MEDIUM), lambda case: any(n % 32 and n > 64 for n in case.counts[1:]), settings=SETTINGS)
    assert case.counts[1:] == (65,)
    assert case.counts[0] <= 1
    assert case.hidden == 32
