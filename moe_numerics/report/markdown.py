"""The Markdown form of a report, short enough for a pull request or a CI job's summary."""

from __future__ import annotations

import functools
from importlib import resources
from pathlib import Path

import jinja2

from moe_numerics.report import wording
from moe_numerics.report.atomic import write_files
from moe_numerics.report.model import Report


def to_markdown(report: Report) -> str:
    """A report as GitHub-flavoured Markdown: verdict, a table of paths, what failed or was not checked."""
    text = _template().render(report=report, summary=report.summary, wording=wording)
    return wording.printable(text)


def write(report: Report, path: Path) -> None:
    """Writes the Markdown form of a report to a file."""
    write_files(path.parent, {path.name: to_markdown(report)})


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"cell": _cell, "code": _code}
    text = resources.files("moe_numerics.report").joinpath("report.md.j2").read_text(encoding="utf-8")
    return environment.from_string(text)


def _code(text: str) -> str:
    """Text as a code span of one line, inside a table or not."""
    line = " ".join(text.split()).replace("`", "'").replace("|", "\\|")
    return f"`{line}`"


def _cell(text: str) -> str:
    """Text that cannot end a table cell or start markup."""
    line = " ".join(text.split())
    for character in "\\`*[]<>|":
        line = line.replace(character, f"\\{character}")
    return line
