"""What comparing one output gave, and how findings of many cases add up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NotRequired, TypedDict

Grade = Literal["exact", "bounded", "statistical", "unchecked"]
GRADES: tuple[Grade, ...] = ("exact", "bounded", "statistical", "unchecked")
"""From the strongest claim to none at all."""

COLUMN_BUCKETS = 32
"""How many cells the columns of an output are divided into in `Finding.mismatch_map`."""

# Upper ends of the bins of |got - oracle| / bound, the end included; a derived bound is loose when everything
# falls below 0.05, so the low end is finer.
ERROR_BINS = (
    ("0", 0.0),
    ("0-0.01", 0.01),
    ("0.01-0.1", 0.1),
    *((f"0.{tenth}-{'1' if tenth == 9 else f'0.{tenth + 1}'}", (tenth + 1) / 10) for tenth in range(1, 10)),
    (">1", math.inf),
)


class CompareError(ValueError):
    """Two tensors cannot be compared, or what describes them does not fit them."""


class FirstMismatch(TypedDict):
    """Where the first mismatch sits (`coordinates`) and what was there, as bit patterns and as values.

    `coordinates` holds `row` and, where the output has them, `expert`, `row in expert` and `column`; expert
    -1 is a row that belongs to no expert. `outside` says that the element is not the path's to write.
    """

    coordinates: dict[str, int]
    expected_bits: str
    got_bits: str
    expected: str
    got: str
    explained: bool
    outside: NotRequired[bool]


@dataclass(frozen=True)
class Finding:
    """What comparing one output gave.

    `elements` is how many elements the path owns; each is bit-equal, explained, unexplained or unchecked.
    `outside` counts elements that were written though the path does not own them: they are unexplained too,
    on top of `elements`. So `elements + outside == bit_equal + explained + unexplained + unchecked`.

    `ulp_histogram` counts elements by ULP distance ("0", "1", "2-3", "4-7", ...; "nan": one side is NaN, the
    other is not); `max_ulp` is the largest distance, None if there was none to measure. `error_histogram`
    counts elements by |got - oracle| / bound, and `sharpness` is the largest such ratio (infinite where a
    bound of 0 was missed); both only for outputs with a bound. `mismatch_map` lists (expert, column bucket,
    count) where something differs: bucket b is the b-th 1/32 of the columns, expert -1 is a row of no expert.
    `experts` and `columns` are the largest numbers of them seen, `reproduce` the command that shows
    `first_mismatch` again.
    """

    output: str
    grade: Grade
    elements: int
    bit_equal: int = 0
    explained: int = 0
    unexplained: int = 0
    unchecked: int = 0
    outside: int = 0
    reason: str = ""
    max_ulp: int | None = None
    ulp_histogram: Mapping[str, int] = field(default_factory=dict)
    error_histogram: Mapping[str, int] = field(default_factory=dict)
    sharpness: float | None = None
    mismatch_map: tuple[tuple[int, int, int], ...] = ()
    experts: int = 0
    columns: int = 0
    first_mismatch: FirstMismatch | None = None
    reproduce: str = ""

    def __post_init__(self) -> None:
        if self.grade not in GRADES:
            raise CompareError(f"grade = {self.grade!r} of output {self.output!r}: expected one of {GRADES}")
        if self.unchecked and not self.reason:
            raise CompareError(f"output {self.output!r} has {self.unchecked} unchecked elements and no reason: say why")
        counted = self.bit_equal + self.explained + self.unexplained + self.unchecked
        if counted != self.elements + self.outside:
            raise CompareError(
                f"output {self.output!r}: bit_equal + explained + unexplained + unchecked = {counted}, "
                f"expected elements + outside = {self.elements + self.outside}"
            )

    @property
    def passed(self) -> bool:
        """Whether nothing is unexplained."""
        return self.unexplained == 0


def unchecked_output(name: str, elements: int, reason: str) -> Finding:
    """A finding for an output of `elements` elements that was not compared, and the reason why."""
    return Finding(name, "unchecked", elements, unchecked=elements, reason=reason)


def merge(findings: Iterable[Finding]) -> Finding:
    """One finding for many of the same output: counts, histograms and maps added up.

    The grade is the weakest of those that checked anything. The first mismatch is the first unexplained one
    in the order of `findings`, else the first one. Raises CompareError for none, or for different outputs.
    """
    parts = list(findings)
    if not parts:
        raise CompareError("no findings to merge: give at least one")
    names = {part.output for part in parts}
    if len(names) > 1:
        raise CompareError(f"findings of different outputs {sorted(names)}: merge one output at a time")
    checked = [part.grade for part in parts if part.grade != "unchecked"]
    sources = [part for part in parts if part.first_mismatch is not None]
    worst = [part for part in sources if part.first_mismatch and not part.first_mismatch["explained"]]
    source = next(iter(worst or sources), None)
    cells: dict[tuple[int, int], int] = {}
    for part in parts:
        for expert, bucket, count in part.mismatch_map:
            cells[expert, bucket] = cells.get((expert, bucket), 0) + count
    return Finding(
        output=parts[0].output,
        grade=max(checked, key=GRADES.index, default="unchecked"),
        elements=sum(part.elements for part in parts),
        bit_equal=sum(part.bit_equal for part in parts),
        explained=sum(part.explained for part in parts),
        unexplained=sum(part.unexplained for part in parts),
        unchecked=sum(part.unchecked for part in parts),
        outside=sum(part.outside for part in parts),
        reason="; ".join(dict.fromkeys(part.reason for part in parts if part.reason)),
        max_ulp=max((part.max_ulp for part in parts if part.max_ulp is not None), default=None),
        ulp_histogram=_sum_histograms([part.ulp_histogram for part in parts], _ulp_order),
        error_histogram=_sum_histograms([part.error_histogram for part in parts], _error_order),
        sharpness=max((part.sharpness for part in parts if part.sharpness is not None), default=None),
        mismatch_map=tuple((*cell, count) for cell, count in sorted(cells.items())),
        experts=max(part.experts for part in parts),
        columns=max(part.columns for part in parts),
        first_mismatch=source.first_mismatch if source else None,
        reproduce=source.reproduce if source else "",
    )


def _sum_histograms(histograms: Iterable[Mapping[str, int]], order: Callable[[str], float]) -> dict[str, int]:
    total: dict[str, int] = {}
    for histogram in histograms:
        for label, count in histogram.items():
            total[label] = total.get(label, 0) + count
    return dict(sorted(total.items(), key=lambda item: order(item[0])))


def _ulp_order(label: str) -> float:
    return math.inf if label == "nan" else float(label.partition("-")[0])


def _error_order(label: str) -> float:
    labels = [known for known, _ in ERROR_BINS]
    return labels.index(label) if label in labels else len(labels)
