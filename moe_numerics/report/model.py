"""What a verification run gave, as data: environment, a result per path and device, a result per output."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from typing import Literal

from moe_numerics.findings import GRADES, Finding, FirstMismatch, Grade

SCHEMA = 1
"""Version of the JSON form of a report."""

Status = Literal["pass", "fail", "skipped", "error"]
STATUSES: tuple[Status, ...] = ("pass", "fail", "skipped", "error")
Verdict = Literal["pass", "fail", "incomplete"]

EXIT_CODES: Mapping[Verdict, int] = {"pass": 0, "fail": 1, "incomplete": 3}
"""Exit code of a run with each verdict."""

_PACKAGES = ("moe-numerics", "torch", "nvidia-cutlass-dsl", "numpy", "hypothesis")


class ReportError(ValueError):
    """A report contradicts itself or its JSON form is broken."""


@dataclass(frozen=True)
class Environment:
    """Where and how a run was made, so that somebody else can repeat it.

    `versions`: package or tool to version. `device`: the devices in words. `driver`: version of the GPU
    driver, None without a GPU. `command`: the command line that gives this report. `started`: ISO 8601, UTC.
    `seconds`: wall-clock time of the whole run.
    """

    versions: Mapping[str, str]
    device: str
    driver: str | None
    seed: int
    command: str
    platform: str = ""
    started: str = ""
    seconds: float = 0.0

    @classmethod
    def here(cls, device: str, seed: int, command: str, driver: str | None = None, seconds: float = 0.0) -> Environment:
        """The environment of this process: versions of Python and of the packages that decide bits."""
        versions = {"python": platform.python_version()}
        for package in _PACKAGES:
            try:
                versions[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                versions[package] = "not installed"
        return cls(
            versions=versions,
            device=device,
            driver=driver,
            seed=seed,
            command=command,
            platform=f"{platform.system()} {platform.machine()}",
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            seconds=seconds,
        )


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel: SHA-256 of its PTX text (hex), its target (`sm_90a`) and its name."""

    ptx_sha256: str
    target: str
    name: str = ""


@dataclass(frozen=True)
class OutputResult:
    """One output of one path on one device over all its cases; the other fields are those of `Finding`."""

    name: str
    grade: Grade
    elements: int
    bit_equal: int
    explained: int
    unexplained: int
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
            raise ReportError(f"grade = {self.grade!r} of output {self.name!r}: expected one of {GRADES}")

    @classmethod
    def from_finding(cls, finding: Finding) -> OutputResult:
        """The result of an output from what comparing it gave."""
        return cls(
            name=finding.output,
            grade=finding.grade,
            elements=finding.elements,
            bit_equal=finding.bit_equal,
            explained=finding.explained,
            unexplained=finding.unexplained,
            unchecked=finding.unchecked,
            outside=finding.outside,
            reason=finding.reason,
            max_ulp=finding.max_ulp,
            ulp_histogram=dict(finding.ulp_histogram),
            error_histogram=dict(finding.error_histogram),
            sharpness=finding.sharpness,
            mismatch_map=finding.mismatch_map,
            experts=finding.experts,
            columns=finding.columns,
            first_mismatch=finding.first_mismatch,
            reproduce=finding.reproduce,
        )

    @property
    def checked(self) -> int:
        """Elements that were compared."""
        return self.elements - self.unchecked

    @property
    def bit_equal_share(self) -> float | None:
        """Bit-equal elements over checked ones, None if none was checked."""
        return self.bit_equal / self.checked if self.checked else None


@dataclass(frozen=True)
class PathResult:
    """One path on one device.

    `status`: `pass`, `fail` (something is unexplained), `skipped` or `error` (it could not run; `reason` says
    why). `kernels`: the compiled kernels that ran. `evidence`: what vouches for the device's arithmetic, in
    words, such as `silicon` or `virtual, manual evidence`. `reproduce`: a command that shows it again.
    """

    id: str
    device: str
    profile: str
    maths: str
    status: Status
    reason: str = ""
    cases: int = 0
    kernels: tuple[Kernel, ...] = ()
    outputs: tuple[OutputResult, ...] = ()
    reproduce: str = ""
    seconds: float = 0.0
    evidence: str = ""

    def __post_init__(self) -> None:
        where = f"path {self.id!r} on {self.device!r}"
        if self.status not in STATUSES:
            raise ReportError(f"status = {self.status!r} of {where}: expected one of {STATUSES}")
        if self.status == "pass" and self.unexplained:
            raise ReportError(f"{where} has {self.unexplained} unexplained elements: its status is not 'pass'")
        if self.status == "pass" and not self.cases:
            raise ReportError(f"{where} ran no case: its status is 'skipped', with a reason, not 'pass'")
        if self.status in ("skipped", "error") and not self.reason:
            raise ReportError(f"{where} has status {self.status!r} and no reason: say why")

    @classmethod
    def from_findings(
        cls,
        path_id: str,
        device: str,
        *,
        profile: str,
        maths: str,
        cases: int,
        findings: Iterable[Finding],
        kernels: tuple[Kernel, ...] = (),
        reproduce: str = "",
        seconds: float = 0.0,
        evidence: str = "",
    ) -> PathResult:
        """The result of a path that ran: `findings` hold one entry per output, merged over its cases."""
        outputs = tuple(OutputResult.from_finding(finding) for finding in findings)
        failing = [output for output in outputs if output.unexplained]
        return cls(
            id=path_id,
            device=device,
            profile=profile,
            maths=maths,
            status="fail" if failing else "pass",
            reason=", ".join(f"{output.unexplained:,} unexplained in {output.name}" for output in failing),
            cases=cases,
            kernels=kernels,
            outputs=outputs,
            reproduce=reproduce,
            seconds=seconds,
            evidence=evidence,
        )

    @property
    def elements(self) -> int:
        """Elements of all outputs."""
        return sum(output.elements for output in self.outputs)

    @property
    def bit_equal(self) -> int:
        """Bit-equal elements of all outputs."""
        return sum(output.bit_equal for output in self.outputs)

    @property
    def checked(self) -> int:
        """Elements that were compared."""
        return self.elements - self.unchecked

    @property
    def bit_equal_share(self) -> float | None:
        """Bit-equal elements over checked ones, None if none was checked."""
        return self.bit_equal / self.checked if self.checked else None

    @property
    def explained(self) -> int:
        """Explained elements of all outputs."""
        return sum(output.explained for output in self.outputs)

    @property
    def unexplained(self) -> int:
        """Unexplained elements of all outputs, those written outside included."""
        return sum(output.unexplained for output in self.outputs)

    @property
    def unchecked(self) -> int:
        """Unchecked elements of all outputs."""
        return sum(output.unchecked for output in self.outputs)

    @property
    def sharpness(self) -> float | None:
        """The largest error over bound among the outputs that have a bound."""
        return max((output.sharpness for output in self.outputs if output.sharpness is not None), default=None)


@dataclass(frozen=True)
class Summary:
    """The sums of a report; a path that ran on two devices counts as two paths."""

    paths: int
    cases: int
    elements: int
    bit_equal: int
    explained: int
    unexplained: int
    unchecked: int
    verdict: Verdict

    @property
    def checked(self) -> int:
        """Elements that were compared."""
        return self.elements - self.unchecked

    @property
    def bit_equal_share(self) -> float | None:
        """Bit-equal elements over checked ones, None if none was checked."""
        return self.bit_equal / self.checked if self.checked else None


@dataclass(frozen=True)
class Report:
    """A verification run: where it was made and what each path gave on each device."""

    environment: Environment
    paths: tuple[PathResult, ...]

    @property
    def verdict(self) -> Verdict:
        """`fail` if any path failed, else `incomplete` if one (or all) could not run, else `pass`."""
        if any(path.status == "fail" for path in self.paths):
            return "fail"
        return "pass" if self.paths and all(path.status == "pass" for path in self.paths) else "incomplete"

    @property
    def summary(self) -> Summary:
        """The sums over all paths and devices, and the verdict."""
        return Summary(
            paths=len(self.paths),
            cases=sum(path.cases for path in self.paths),
            elements=sum(path.elements for path in self.paths),
            bit_equal=sum(path.bit_equal for path in self.paths),
            explained=sum(path.explained for path in self.paths),
            unexplained=sum(path.unexplained for path in self.paths),
            unchecked=sum(path.unchecked for path in self.paths),
            verdict=self.verdict,
        )

    @property
    def exit_code(self) -> int:
        """0 nothing unexplained, 1 something unexplained, 3 incomplete."""
        return EXIT_CODES[self.verdict]
