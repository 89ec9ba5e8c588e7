"""Hypothesis strategies that draw cases and token counts; `drawing` holds what they share with campaigns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from hypothesis import strategies as st

from moe_numerics.cases import Case
from moe_numerics.drawing import Space, draw_case, draw_cases
from moe_numerics.token_counts import DRAWN_SHAPES, draw_counts

__all__ = ["Space", "cases", "draw_cases", "token_counts"]


class _Drawn:
    """A source of integers that Hypothesis shrinks."""

    def __init__(self, draw: Callable[[st.SearchStrategy[int]], int]) -> None:
        self._draw = draw

    def integer(self, low: int, high: int) -> int:
        return self._draw(_integers(low, high))


# Drawing one case builds some fifty strategies, and building costs as much as drawing.
_integers = lru_cache(maxsize=4096)(st.integers)


@st.composite
def _cases(draw: Callable[[st.SearchStrategy[int]], int], space: Space) -> Case:
    return draw_case(_Drawn(draw), space)


def cases(space: Space) -> st.SearchStrategy[Case]:
    """Cases of the space; they shrink to few experts, tokens and columns, plain values and few edits."""
    return _cases(space)


@st.composite
def _token_counts(
    draw: Callable[[st.SearchStrategy[int]], int],
    experts: int,
    rows: int,
    multiple: int,
    shapes: Sequence[str],
) -> tuple[int, ...]:
    return draw_counts(_Drawn(draw), experts=experts, rows=rows, multiple=multiple, alignment=multiple, shapes=shapes)


def token_counts(
    *, max_experts: int = 16, max_rows: int = 1024, multiple: int = 1, shapes: Sequence[str] = DRAWN_SHAPES
) -> st.SearchStrategy[tuple[int, ...]]:
    """Tokens of 1 to `max_experts` experts, at most `max_rows` together, each a multiple of `multiple`.

    shapes: names of `token_counts.SHAPES` to draw from.
    """
    return _token_counts(max_experts, max_rows, multiple, tuple(shapes))
