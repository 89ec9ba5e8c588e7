"""The words and numbers that every form of a report shares."""

from __future__ import annotations

import math
import re
from datetime import datetime

from moe_numerics.findings import FirstMismatch
from moe_numerics.report.model import OutputResult, PathResult, Report

NOT_AVAILABLE = "–"  # noqa: RUF001 (an en dash stands for no value in a table)


# What neither XML 1.0 (section 2.2) nor HTML can hold, not even escaped: control characters but tab and line
# breaks, surrogates, and U+FFFE and U+FFFF.
_NOT_PRINTABLE = re.compile("[^\t\n\r\u0020-\u007e\u0085\u00a0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def printable(text: str) -> str:
    """The text with a replacement character for whatever XML, HTML or a terminal would choke on."""
    return _NOT_PRINTABLE.sub("\ufffd", text)


def headline(report: Report) -> str:
    """The verdict in a few plain words."""
    failing = [path for path in report.paths if path.status == "fail"]
    unexplained = report.summary.unexplained
    if failing:
        what = f"{unexplained:,} unexplained {plural(unexplained, 'element')}" if unexplained else "Failed"
        return f"{what} in {len(failing)} of {len(report.paths)} {plural(len(report.paths), 'path')}"
    if report.verdict == "incomplete":
        stopped = sum(path.status != "pass" for path in report.paths)
        return f"Incomplete: {stopped} of {len(report.paths)} paths did not run" if stopped else "Nothing was run"
    return "No unexplained bit"


def verdict_sentence(report: Report) -> str:
    """What the verdict rests on, as one or two sentences."""
    summary = report.summary
    if not summary.checked:
        return "No output element was compared with the reference."
    stopped = sum(path.status in ("skipped", "error") for path in report.paths)
    compared = (
        f"{summary.checked:,} output elements of {summary.cases:,} "
        f"{plural(summary.cases, 'case')} were compared with the reference: "
        f"{share(summary.bit_equal, summary.checked)} are bit-equal"
    )
    parts = [compared]
    if summary.explained:
        parts.append(f"{summary.explained:,} differ inside a derived bound")
    if summary.unexplained:
        parts.append(f"{summary.unexplained:,} differ without an explanation")
    sentence = ", ".join(parts) + "."
    if summary.unchecked:
        sentence += f" {summary.unchecked:,} elements were not checked; the outputs say why."
    if stopped and summary.verdict == "fail":
        sentence += f" {stopped} {plural(stopped, 'path')} did not run."
    return sentence


def plural(count: int, noun: str) -> str:
    """The noun, with an s unless there is one."""
    return noun if count == 1 else f"{noun}s"


def share(part: int, whole: int) -> str:
    """A share in percent that says 100 % and 0 % only when it is exactly that."""
    if not whole:
        return NOT_AVAILABLE
    if part == whole:
        return "100 %"
    if part == 0:
        return "0 %"
    percent = 100 * part / whole
    # Enough digits that the nearer end is not reached by rounding.
    distance = min(percent, 100 - percent)
    digits = 2 if distance >= 0.01 else 1 - math.floor(math.log10(distance))
    return f"{percent:.{digits}f} %"


def ratio(value: float | None) -> str:
    """A sharpness: three significant digits, `inf` where a bound of 0 was missed."""
    if value is None:
        return NOT_AVAILABLE
    return f"{value:.3g}" if math.isfinite(value) else "inf"


LOOSE = 0.05
"""A sharpness below which a bound is called loose."""

THOROUGH_CASES = 20
"""Cases after which a sharpness says something about the bound and not about the cases."""

_WHY_LOOSE = {
    "dprob": "the bound of a sum holds in any order of its terms, whose errors cancel",
    "dbias": "the bound of a sum holds in any order of its terms, whose errors cancel",
    "amax": "the largest value may be any whose enclosure reaches up to it",
}


def loose_bounds(report: Report) -> list[tuple[PathResult, OutputResult, str]]:
    """Outputs whose errors stayed far below their bounds over a thorough run, and why."""
    return [
        (path, output, _WHY_LOOSE.get(output.name, "no case came near the worst that each rounding step allows"))
        for path in report.paths
        for output in path.outputs
        if path.cases >= THOROUGH_CASES and output.sharpness is not None and output.sharpness < LOOSE
    ]


def duration(seconds: float) -> str:
    """A time in the unit that reads best."""
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 99.5:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def moment(started: str) -> str:
    """An ISO 8601 time to the minute, as people write it; other text as it is."""
    try:
        time = datetime.fromisoformat(started)
    except ValueError:
        return started
    return f"{time:%Y-%m-%d %H:%M} {time.tzname() or ''}".rstrip()


def coordinates(first: FirstMismatch) -> str:
    """Where a mismatch sits: `expert 1, row in expert 0, row 17, column 3`."""
    order = ("expert", "row in expert", "row", "column")
    position = first["coordinates"]
    parts = [f"{key} {position[key]}" for key in order if key in position and position[key] >= 0]
    if position.get("expert", 0) < 0:
        parts.insert(0, "no expert's row")
    return ", ".join(parts)


def mismatch_line(output: OutputResult) -> str:
    """The first mismatch of an output in one line; empty without one."""
    first = output.first_mismatch
    if first is None:
        return ""
    kind = "written outside" if first.get("outside") else "explained" if first["explained"] else "unexplained"
    return (
        f"{output.name}: first {kind} mismatch at {coordinates(first)}: expected {first['expected_bits']} "
        f"({first['expected']}), got {first['got_bits']} ({first['got']})"
    )


def reproduce_command(path: PathResult, output: OutputResult) -> str:
    """The command that shows the first mismatch of an output again; empty if nobody gave one."""
    return output.reproduce or path.reproduce


def failure_lines(path: PathResult) -> list[str]:
    """A line for each output of a path with something unexplained, then the commands that reproduce it."""
    failing = [output for output in path.outputs if output.unexplained]
    lines = [mismatch_line(output) or f"{output.name}: {output.unexplained:,} unexplained" for output in failing]
    commands = dict.fromkeys(reproduce_command(path, output) for output in failing)
    lines += [f"reproduce: {command}" for command in commands if command]
    return [" ".join(line.split()) for line in lines]
