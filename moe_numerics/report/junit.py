"""The JUnit XML form of a report, for CI systems: one test case per path and device."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

from moe_numerics.report.atomic import write_files
from moe_numerics.report.model import PathResult, Report
from moe_numerics.report.wording import failure_lines, headline, printable


def to_junit(report: Report) -> str:
    """A report as JUnit XML: a test suite per device, in it a test case per path.

    A failed path is a failure with its first mismatches and the command to reproduce them, a path that could
    not run an error, a path that was left out skipped.
    """
    root = ElementTree.Element("testsuites", name="moe-numerics")
    _count(root, report.paths)
    for device in dict.fromkeys(path.device for path in report.paths):
        paths = tuple(path for path in report.paths if path.device == device)
        suite = ElementTree.SubElement(root, "testsuite", name=printable(f"moe-numerics {device}"))
        _count(suite, paths)
        if report.environment.started:
            suite.set("timestamp", printable(report.environment.started))
        properties = ElementTree.SubElement(suite, "properties")
        _property(properties, "verdict", headline(report))
        _property(properties, "command", report.environment.command)
        _property(properties, "seed", str(report.environment.seed))
        for name, version in report.environment.versions.items():
            _property(properties, f"version {name}", version)
        for path in paths:
            suite.append(_test_case(path))
    ElementTree.indent(root, " ")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def write(report: Report, path: Path) -> None:
    """Writes the JUnit XML form of a report to a file."""
    write_files(path.parent, {path.name: to_junit(report)})


def _count(element: ElementTree.Element, paths: tuple[PathResult, ...]) -> None:
    element.set("tests", str(len(paths)))
    for attribute, status in (("failures", "fail"), ("errors", "error"), ("skipped", "skipped")):
        element.set(attribute, str(sum(path.status == status for path in paths)))
    element.set("time", f"{sum(path.seconds for path in paths):.3f}")


def _property(properties: ElementTree.Element, name: str, value: str) -> None:
    ElementTree.SubElement(properties, "property", name=printable(name), value=printable(value))


def _test_case(path: PathResult) -> ElementTree.Element:
    case = ElementTree.Element(
        "testcase",
        classname=printable(f"moe_numerics.{path.device}"),
        name=printable(f"{path.id} [{path.profile}, {path.maths}]"),
        time=f"{path.seconds:.3f}",
    )
    properties = ElementTree.SubElement(case, "properties")
    for key in ("cases", "elements", "bit_equal", "explained", "unexplained", "unchecked"):
        _property(properties, key, str(getattr(path, key)))
    for kernel in path.kernels:
        _property(properties, f"ptx_sha256 {kernel.target} {kernel.name}".rstrip(), kernel.ptx_sha256)
    if path.evidence:
        _property(properties, "evidence", path.evidence)
    if path.status == "pass":
        return case
    kind = {"fail": "failure", "error": "error", "skipped": "skipped"}[path.status]
    outcome = ElementTree.SubElement(case, kind, message=printable(path.reason))
    lines = failure_lines(path)
    if path.status == "error" and path.reproduce:
        lines.append(f"reproduce: {path.reproduce}")
    if lines:
        outcome.text = printable("\n".join(lines))
    return case
