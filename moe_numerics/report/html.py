"""The HTML form of a report: one self-contained page that opens from disk with no network."""

from __future__ import annotations

import functools
from importlib import resources
from pathlib import Path

import jinja2

from moe_numerics.report import charts, wording
from moe_numerics.report.atomic import write_files
from moe_numerics.report.model import Report


def to_html(report: Report) -> str:
    """A report as one HTML page with its styles, charts and script inside; readable without the script."""
    page = _template().render(
        report=report,
        summary=report.summary,
        charts=charts,
        wording=wording,
        kernels=_kernels(report),
        devices=list(dict.fromkeys(path.device for path in report.paths)),
    )
    return wording.printable(page)


def write(report: Report, path: Path) -> None:
    """Writes the HTML form of a report to a file."""
    write_files(path.parent, {path.name: to_html(report)})


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    text = resources.files("moe_numerics.report").joinpath("report.html.j2").read_text(encoding="utf-8")
    return environment.from_string(text)


def _kernels(report: Report) -> list[tuple[str, str, str, str]]:
    """Every kernel once: target, PTX hash, name, and the paths that it served."""
    users: dict[tuple[str, str, str], list[str]] = {}
    for path in report.paths:
        for kernel in path.kernels:
            users.setdefault((kernel.target, kernel.ptx_sha256, kernel.name), []).append(path.id)
    return [(*kernel, ", ".join(dict.fromkeys(paths))) for kernel, paths in sorted(users.items())]
