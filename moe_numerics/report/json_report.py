"""The JSON form of a report: `report.json`, described by `report.schema.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, cast

from moe_numerics.findings import FirstMismatch, Grade
from moe_numerics.report.atomic import write_files
from moe_numerics.report.model import (
    SCHEMA,
    Environment,
    Kernel,
    OutputResult,
    PathResult,
    Report,
    ReportError,
    Status,
)

_Value = TypeVar("_Value")


def schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of `report.json`."""
    text = resources.files("moe_numerics.report").joinpath("report.schema.json").read_text(encoding="utf-8")
    return cast("dict[str, Any]", json.loads(text))


def to_json(report: Report) -> str:
    """A report as JSON text; an infinite sharpness is the string "inf", which no JSON number can hold."""
    summary = report.summary
    data = {
        "schema": SCHEMA,
        "environment": {
            "versions": dict(report.environment.versions),
            "device": report.environment.device,
            "driver": report.environment.driver,
            "seed": report.environment.seed,
            "command": report.environment.command,
            "platform": report.environment.platform,
            "started": report.environment.started,
            "seconds": round(report.environment.seconds, 3),
        },
        "summary": {
            "paths": summary.paths,
            "cases": summary.cases,
            "elements": summary.elements,
            "bit_equal": summary.bit_equal,
            "explained": summary.explained,
            "unexplained": summary.unexplained,
            "unchecked": summary.unchecked,
            "verdict": summary.verdict,
        },
        "paths": [_path_data(path) for path in report.paths],
    }
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def from_json(text: str) -> Report:
    """The report in a JSON text that `to_json` wrote; unknown keys are passed over.

    Raises ReportError, naming the place and what was expected there, for anything else; the summary has to be
    the one that follows from the paths.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ReportError(f"not JSON: {error.msg} in line {error.lineno}, column {error.colno}") from None
    if not isinstance(data, dict):
        raise ReportError(f"a report is a JSON object, this is a {type(data).__name__}")
    if data.get("schema") != SCHEMA:
        raise ReportError(f"schema = {data.get('schema')!r}: this version reads reports of schema {SCHEMA}")
    report = Report(
        _environment(_take(data, "environment", dict, "")),
        tuple(
            _path(_expect(item, dict, f"paths[{number}]"), f"paths[{number}].")
            for number, item in enumerate(_take(data, "paths", list, ""))
        ),
    )
    stated = _take(data, "summary", dict, "")
    for key, value in vars(report.summary).items():
        if stated.get(key) != value:
            raise ReportError(f"summary.{key} = {stated.get(key)!r}: the paths add up to {value!r}")
    return report


def load(path: Path) -> Report:
    """The report in a `report.json` file. Raises OSError if it cannot be read, ReportError if broken."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ReportError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    try:
        return from_json(text)
    except ReportError as error:
        raise ReportError(f"{path}: {error}") from None


def write(report: Report, path: Path) -> None:
    """Writes the JSON form of a report to a file."""
    write_files(path.parent, {path.name: to_json(report)})


def _path_data(path: PathResult) -> dict[str, Any]:
    kernels = [
        {"ptx_sha256": kernel.ptx_sha256, "target": kernel.target, "name": kernel.name} for kernel in path.kernels
    ]
    return {
        "id": path.id,
        "device": path.device,
        "profile": path.profile,
        "maths": path.maths,
        "status": path.status,
        "reason": path.reason,
        "evidence": path.evidence,
        "cases": path.cases,
        "seconds": round(path.seconds, 3),
        "kernel": kernels[0] if kernels else None,
        "kernels": kernels,
        "outputs": [_output_data(output) for output in path.outputs],
        "reproduce": path.reproduce,
    }


def _output_data(output: OutputResult) -> dict[str, Any]:
    infinite = output.sharpness is not None and math.isinf(output.sharpness)
    return {
        "name": output.name,
        "grade": output.grade,
        "reason": output.reason,
        "elements": output.elements,
        "bit_equal": output.bit_equal,
        "max_ulp": output.max_ulp,
        "ulp_histogram": dict(output.ulp_histogram),
        "error_histogram": dict(output.error_histogram),
        "explained": output.explained,
        "unexplained": output.unexplained,
        "unchecked": output.unchecked,
        "outside": output.outside,
        "sharpness": "inf" if infinite else output.sharpness,
        "mismatch_map": [list(cell) for cell in output.mismatch_map],
        "experts": output.experts,
        "columns": output.columns,
        "first_mismatch": output.first_mismatch,
        "reproduce": output.reproduce,
    }


def _expect(value: object, kind: type[_Value] | tuple[type, ...], where: str) -> _Value:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join("null" if known is NoneType else known.__name__ for known in kinds)
        raise ReportError(f"{where} = {value!r}: expected {names}")
    return cast("_Value", value)


def _take(data: Mapping[str, Any], key: str, kind: type[_Value] | tuple[type, ...], where: str) -> _Value:
    if key not in data:
        raise ReportError(f"{where}{key} is missing")
    return _expect(data[key], kind, f"{where}{key}")


def _counts(data: Mapping[str, Any], key: str, where: str) -> dict[str, int]:
    histogram: dict[str, int] = _take(data, key, dict, where)
    return {label: _expect(count, int, f"{where}{key}[{label!r}]") for label, count in histogram.items()}


def _environment(data: Mapping[str, Any]) -> Environment:
    where = "environment."
    versions: dict[str, str] = _take(data, "versions", dict, where)
    return Environment(
        versions={key: _expect(value, str, f"{where}versions[{key!r}]") for key, value in versions.items()},
        device=_take(data, "device", str, where),
        driver=_take(data, "driver", (str, NoneType), where),
        seed=_take(data, "seed", int, where),
        command=_take(data, "command", str, where),
        platform=_take(data, "platform", str, where),
        started=_take(data, "started", str, where),
        seconds=float(_take(data, "seconds", (int, float), where)),
    )


def _kernel(data: Mapping[str, Any], where: str) -> Kernel:
    return Kernel(*(_take(data, key, str, where) for key in ("ptx_sha256", "target", "name")))


def _path(data: Mapping[str, Any], where: str) -> PathResult:
    kernels: list[Any] = _take(data, "kernels", list, where)
    outputs: list[Any] = _take(data, "outputs", list, where)
    return PathResult(
        id=_take(data, "id", str, where),
        device=_take(data, "device", str, where),
        profile=_take(data, "profile", str, where),
        maths=_take(data, "maths", str, where),
        status=cast("Status", _take(data, "status", str, where)),
        reason=_take(data, "reason", str, where),
        cases=_take(data, "cases", int, where),
        kernels=tuple(
            _kernel(_expect(item, dict, f"{where}kernels[{number}]"), f"{where}kernels[{number}].")
            for number, item in enumerate(kernels)
        ),
        outputs=tuple(
            _output(_expect(item, dict, f"{where}outputs[{number}]"), f"{where}outputs[{number}].")
            for number, item in enumerate(outputs)
        ),
        reproduce=_take(data, "reproduce", str, where),
        seconds=float(_take(data, "seconds", (int, float), where)),
        evidence=_take(data, "evidence", str, where),
    )


def _output(data: Mapping[str, Any], where: str) -> OutputResult:
    sharpness: float | str | None = _take(data, "sharpness", (int, float, str, NoneType), where)
    if isinstance(sharpness, str) and sharpness != "inf":
        raise ReportError(f"{where}sharpness = {sharpness!r}: expected a number, 'inf' or null")
    first: dict[str, Any] | None = _take(data, "first_mismatch", (dict, NoneType), where)
    cells: list[Any] = _take(data, "mismatch_map", list, where)
    return OutputResult(
        name=_take(data, "name", str, where),
        grade=cast("Grade", _take(data, "grade", str, where)),
        reason=_take(data, "reason", str, where),
        elements=_take(data, "elements", int, where),
        bit_equal=_take(data, "bit_equal", int, where),
        explained=_take(data, "explained", int, where),
        unexplained=_take(data, "unexplained", int, where),
        unchecked=_take(data, "unchecked", int, where),
        outside=_take(data, "outside", int, where),
        max_ulp=_take(data, "max_ulp", (int, NoneType), where),
        ulp_histogram=_counts(data, "ulp_histogram", where),
        error_histogram=_counts(data, "error_histogram", where),
        sharpness=None if sharpness is None else float(sharpness),
        mismatch_map=tuple(_cell(item, f"{where}mismatch_map[{number}]") for number, item in enumerate(cells)),
        experts=_take(data, "experts", int, where),
        columns=_take(data, "columns", int, where),
        first_mismatch=None if first is None else _first_mismatch(first, f"{where}first_mismatch."),
        reproduce=_take(data, "reproduce", str, where),
    )


def _cell(item: object, where: str) -> tuple[int, int, int]:
    cell: list[Any] = _expect(item, list, where)
    if len(cell) != 3:
        raise ReportError(f"{where} = {cell!r}: expected [expert, column bucket, count]")
    expert, bucket, count = (_expect(value, int, where) for value in cell)
    return expert, bucket, count


def _first_mismatch(data: Mapping[str, Any], where: str) -> FirstMismatch:
    first = FirstMismatch(
        coordinates=_counts(data, "coordinates", where),
        expected_bits=_take(data, "expected_bits", str, where),
        got_bits=_take(data, "got_bits", str, where),
        expected=_take(data, "expected", str, where),
        got=_take(data, "got", str, where),
        explained=_take(data, "explained", bool, where),
    )
    if "outside" in data:
        first["outside"] = _take(data, "outside", bool, where)
    return first
