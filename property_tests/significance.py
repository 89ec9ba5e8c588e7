"""One family-wise error rate for every statistical test of a run.

A test that compares a share or a mean with what chance allows has a small probability of failing without a fault. The
probabilities of all comparisons of a run together are held below `FAMILY_WISE` (Bonferroni): each gets an equal part,
and more comparisons than were divided for are an error.
"""

from __future__ import annotations

from itertools import count

from scipy import stats

__all__ = ["FAMILY_WISE", "assert_mean", "assert_share"]

FAMILY_WISE = 1e-6
COMPARISONS = 1 << 16
"""Most comparisons of a run: the thorough profile makes about half of them."""

LEVEL = FAMILY_WISE / COMPARISONS
STANDARD_ERRORS = float(stats.norm.isf(LEVEL / 2))
"""Two-sided: about 6.6 standard errors of a normal distribution."""

_made = count(1)


def _counted() -> None:
    assert next(_made) <= COMPARISONS, f"more than {COMPARISONS} comparisons: divide the error rate by more"


def assert_share(successes: int, trials: int, probability: float, claim: str) -> None:
    """`successes` of `trials` independent events of this probability are no surprise, by the exact binomial test."""
    _counted()
    p = stats.binomtest(int(successes), int(trials), probability).pvalue
    assert p >= LEVEL, f"{claim}: {successes} of {trials} where {probability:.6g} are expected, p = {p:.2g}"


def assert_mean(observed: float, expected: float, standard_error: float, claim: str, slack: float = 0.0) -> None:
    """A mean of many terms is no surprise. slack: what it may be off by besides chance."""
    _counted()
    allowed = STANDARD_ERRORS * standard_error + slack
    assert abs(observed - expected) <= allowed, f"{claim}: {observed:.9g} is not within {allowed:.2g} of {expected:.9g}"
