"""What judging somebody else's kernel gave, in numbers and in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

from moe_numerics.baseline import Judged
from moe_numerics.cases import Case
from moe_numerics.findings import Finding

__all__ = ["Checked", "UnexplainedBits"]


class UnexplainedBits(AssertionError):
    """A kernel's results differ from the reference; the message says where, and what would fit better."""


@dataclass(frozen=True)
class Checked(Sequence[Finding]):
    """What `check` found: a finding for each output over all cases, and the nearest contract if something differs.

    baseline: what a baseline knows of the findings.
    """

    path: str
    cases: int
    findings: tuple[Finding, ...]
    failing: Case | None = None
    nearest: str = ""
    baseline: Judged = field(default_factory=Judged)

    @overload
    def __getitem__(self, index: int) -> Finding: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Finding]: ...

    def __getitem__(self, index: int | slice) -> Finding | Sequence[Finding]:
        return self.findings[index]

    def __len__(self) -> int:
        return len(self.findings)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    @property
    def passed(self) -> bool:
        """Whether nothing is unexplained but what the baseline knows."""
        return all(finding.passed or finding.output in self.baseline.known for finding in self.findings)

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.cases} cases"]
        for finding in self.findings:
            line = f"  {finding.output}: "
            if finding.unchecked == finding.elements and finding.elements:
                lines.append(line + f"not checked, {finding.reason}")
                continue
            line += f"{finding.bit_equal:,} of {finding.elements:,} bit-equal"
            if finding.explained:
                line += f", {finding.explained:,} explained"
            if finding.sharpness is not None:
                line += f", largest error {finding.sharpness:.3g} of its bound"
            if finding.output in self.baseline.known:
                line += "; known, no worse than the baseline"
            lines.append(line)
            first = finding.first_mismatch
            if first is not None:
                where = ", ".join(f"{name} {value}" for name, value in first["coordinates"].items())
                lines.append(
                    f"    first at {where}: expected {first['expected']} ({first['expected_bits']}), "
                    f"got {first['got']} ({first['got_bits']})"
                )
        lines += [f"  worse than the baseline: {words}" for words in self.baseline.worse]
        lines += [f"  stale in the baseline: {output} has nothing unexplained" for output in self.baseline.stale]
        if self.nearest:
            lines.append(f"  nearest contract: {self.nearest}")
        if self.failing is not None:
            lines.append(f"  failing case: {self.failing!r}")
        return "\n".join(lines)

    def raise_if_unexplained(self) -> None:
        """UnexplainedBits, with everything above as its message, unless `passed`."""
        if not self.passed:
            raise UnexplainedBits(str(self))
