"""Result model of a verification run and its writers."""

from __future__ import annotations

from pathlib import Path

from moe_numerics.report.atomic import write_files
from moe_numerics.report.model import (
    EXIT_CODES,
    Environment,
    Kernel,
    OutputResult,
    PathResult,
    Report,
    ReportError,
    Summary,
)

__all__ = [
    "EXIT_CODES",
    "Environment",
    "Kernel",
    "OutputResult",
    "PathResult",
    "Report",
    "ReportError",
    "Summary",
    "write_reports",
]


def write_reports(report: Report, folder: Path) -> dict[str, Path]:
    """Writes `report.json`, `index.html`, `report.md`, `junit.xml` into a folder; gives their paths by name.

    Every form is made before the first is written, and each file appears whole or not at all. Raises OSError
    as the file system does.
    """
    # The writers load Jinja2 and the templates, which somebody who only reads a report does not need.
    from moe_numerics.report import html, json_report, junit, markdown

    return write_files(
        folder,
        {
            "report.json": json_report.to_json(report),
            "index.html": html.to_html(report),
            "report.md": markdown.to_markdown(report),
            "junit.xml": junit.to_junit(report),
        },
    )
