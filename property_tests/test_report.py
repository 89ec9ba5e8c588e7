"""Reports as data: whole or absent on disk, the same after JSON, and a verdict that hides nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from report_samples import (
    ENVIRONMENT,
    failing_report,
    passing_report,
    reports,
    sample,
    validator,
)

from moe_numerics.compare import compare_output
from moe_numerics.report import (
    Environment,
    Kernel,
    OutputResult,
    PathResult,
    Report,
    ReportError,
    atomic,
    html,
    json_report,
    junit,
    markdown,
    wording,
    write_reports,
)
from moe_numerics.report.diff import Change, diff_reports, render


@sample
def test_a_report_survives_json(report: Report) -> None:
    """Would catch a field that is not written, not read back, or missing from the schema."""
    text = json_report.to_json(report)
    assert json_report.from_json(text) == report
    validator().validate(json.loads(text))


@given(report=reports())
def test_any_report_survives_json(report: Report) -> None:
    """Would catch lost characters, infinite sharpness, numbers beyond 2^53 and NaN, which is not JSON."""
    text = json_report.to_json(report)
    assert json_report.from_json(text) == report
    validator().validate(json.loads(text))
    json.loads(text, parse_constant=pytest.fail)


def test_an_infinite_sharpness_survives_every_form() -> None:
    """Would catch Infinity in the JSON, which most readers refuse, and a page that cannot be made."""
    row = passing_report().paths[-1]
    missed = replace(row, outputs=(replace(row.outputs[0], sharpness=math.inf),))
    report = Report(ENVIRONMENT, (missed,))
    text = json_report.to_json(report)
    assert json.loads(text)["paths"][0]["outputs"][0]["sharpness"] == "inf"
    validator().validate(json.loads(text))
    assert json_report.from_json(text) == report
    assert "sharpness inf" in html.to_html(report)
    assert "| inf |" in markdown.to_markdown(report)


def test_a_key_that_is_missing_or_of_another_type_is_named() -> None:
    """Every key of the format in turn. Would catch a reader or a schema that lets a broken report pass."""
    data = json.loads(json_report.to_json(failing_report()))
    # The path with outputs, a kernel and a first mismatch, so that every key of the format is there.
    data["paths"] = [next(row for row in data["paths"] if row["status"] == "fail")]
    data["paths"][0]["outputs"] = data["paths"][0]["outputs"][:1]
    report = json_report.from_json(json.dumps({**data, "summary": _summary(data)}))
    checker = validator()

    def broken(place: list[str | int], key: str, change: object) -> str:
        copy = json.loads(json_report.to_json(report))
        item = copy
        for step in place:
            item = item[step]
        if change is None:
            del item[key]
        else:
            item[key] = change
        assert not checker.is_valid(copy), f"the schema lets {place} {key} {change!r} pass"
        with pytest.raises(ReportError) as error:
            json_report.from_json(json.dumps(copy))
        return str(error.value)

    places: list[list[str | int]] = [
        ["environment"],
        ["paths", 0],
        ["paths", 0, "kernels", 0],
        ["paths", 0, "outputs", 0],
        ["paths", 0, "outputs", 0, "first_mismatch"],
    ]
    for place in places:
        item = data
        for step in place:
            item = item[step]
        for key in item:
            if key == "kernel":  # written for readers of schema 1, read from `kernels`
                continue
            name = ".".join(str(step) for step in place).replace(".0", "[0]") + f".{key}"
            assert broken(place, key, None) == f"{name} is missing"
            assert broken(place, key, ["?"]).startswith((f"{name} = ['?']: expected", f"{name}[0] = '?': expected"))
    assert broken([], "paths", "none").startswith("paths = 'none': expected list")
    assert broken(["paths", 0], "cases", True) == "paths[0].cases = True: expected int"
    assert broken(["paths", 0], "status", "green").startswith("status = 'green'")
    assert broken(["paths", 0, "outputs", 0], "grade", "certain").startswith("grade = 'certain'")
    assert broken(["paths", 0, "outputs", 0], "sharpness", "huge").startswith("paths[0].outputs[0].sharpness")
    assert broken(["paths", 0, "outputs", 0], "mismatch_map", [[1, 2]]).endswith("[expert, column bucket, count]")
    assert broken([], "schema", 2) == "schema = 2: this version reads reports of schema 1"


def _summary(data: dict[str, object]) -> dict[str, object]:
    """The summary of a report that holds only the first failing path's first output."""
    failing = next(row for row in failing_report().paths if row.status == "fail")
    return dict(vars(Report(ENVIRONMENT, (replace(failing, outputs=failing.outputs[:1]),)).summary))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"not JSON: .* in line 1, column 2"),
        ("[]", "a report is a JSON object, this is a list"),
        ("{}", "schema = None"),
        ('{"schema": 1}', "environment is missing"),
    ],
)
def test_text_that_is_no_report_is_refused(text: str, message: str, tmp_path: Path) -> None:
    """Would catch a traceback instead of a line that names the file."""
    with pytest.raises(ReportError, match=message):
        json_report.from_json(text)
    file = tmp_path / "report.json"
    file.write_text(text)
    with pytest.raises(ReportError, match=r"report\.json: "):
        json_report.load(file)
    file.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ReportError, match=r"report\.json: not UTF-8 text"):
        json_report.load(file)


def test_a_summary_that_does_not_follow_from_the_paths_is_refused() -> None:
    """Would catch an edited verdict: a failing run whose summary says pass."""
    data = json.loads(json_report.to_json(failing_report()))
    data["summary"]["verdict"] = "pass"
    with pytest.raises(ReportError, match=r"summary.verdict = 'pass': the paths add up to 'fail'"):
        json_report.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("statuses", "verdict", "exit_code"),
    [
        (["pass", "pass"], "pass", 0),
        (["pass", "fail"], "fail", 1),
        (["pass", "error"], "incomplete", 3),
        (["pass", "skipped"], "incomplete", 3),
        (["error", "fail", "skipped"], "fail", 1),
        ([], "incomplete", 3),
    ],
)
def test_the_verdict_is_the_worst_that_happened(statuses: list[str], verdict: str, exit_code: int) -> None:
    """Would catch a run that passes although a path failed, could not run, or nothing was run at all."""
    output = OutputResult("out", "exact", 4, 4, 0, 0)
    wrong = OutputResult("out", "exact", 4, 3, 0, 1)
    rows = tuple(
        PathResult(
            "p",
            "cuda",
            "suite",
            "exact",
            status,
            reason="x",
            cases=1,
            outputs=(wrong if status == "fail" else output,),
        )
        for status in statuses
    )
    report = Report(ENVIRONMENT, rows)
    assert (report.verdict, report.exit_code, report.summary.verdict) == (verdict, exit_code, verdict)
    assert report.summary.unexplained == statuses.count("fail")
    assert (wording.headline(report) == "No unexplained bit") == (verdict == "pass")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"status": "pass", "cases": 1}, "has 1 unexplained elements: its status is not 'pass'"),
        ({"status": "pass", "cases": 0, "outputs": ()}, "ran no case"),
        ({"status": "error", "reason": ""}, "has status 'error' and no reason"),
        ({"status": "skipped", "reason": ""}, "has status 'skipped' and no reason"),
        ({"status": "maybe"}, "status = 'maybe'"),
    ],
)
def test_a_result_that_contradicts_itself_is_refused(change: dict[str, Any], message: str) -> None:
    """Would catch a pass with unexplained elements, or one that checked nothing."""
    row = PathResult("p", "cuda", "suite", "exact", "fail", outputs=(OutputResult("out", "exact", 1, 0, 0, 1),))
    with pytest.raises(ReportError, match=message):
        replace(row, **change)


def test_a_path_fails_through_any_of_its_outputs() -> None:
    """Would catch a status taken from the first output only."""
    good = compare_output("out", torch.ones(2), torch.ones(2))
    bad = compare_output("amax", torch.ones(2), torch.tensor([1.0, 2.0]))
    settings: dict[str, Any] = {"profile": "suite", "maths": "exact", "cases": 1}
    assert PathResult.from_findings("p", "cuda", findings=[good], **settings).status == "pass"
    failed = PathResult.from_findings("p", "cuda", findings=[good, bad], **settings)
    assert (failed.status, failed.reason, failed.unexplained) == ("fail", "1 unexplained in amax", 1)
    assert failed.elements == 4
    assert failed.bit_equal_share == 0.75
    assert OutputResult.from_finding(bad) == OutputResult(
        **{("name" if key == "output" else key): value for key, value in vars(bad).items()}
    )


def test_a_report_is_written_whole(tmp_path: Path) -> None:
    """Would catch a form that is not written, or temporary files left beside the report, or a file written in place."""
    folder = tmp_path / "a" / "report"
    written = write_reports(failing_report(), folder)
    assert sorted(written) == ["index.html", "junit.xml", "report.json", "report.md"]
    assert sorted(file.name for file in folder.iterdir()) == sorted(written)
    assert json_report.load(folder / "report.json") == failing_report()
    assert (folder / "report.json").stat().st_mode & 0o777 == 0o644
    with (folder / "report.json").open() as reader:
        write_reports(passing_report(), folder)
        # Somebody who was reading goes on reading the old report, not a mixture.
        assert json_report.from_json(reader.read()) == failing_report()
    assert json_report.load(folder / "report.json") == passing_report()


@pytest.mark.parametrize("stage", ["render", "write", "encode"])
def test_a_failure_while_writing_leaves_the_old_report(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch a half-written report after a full disk, or a new report.json beside an old page."""
    write_reports(passing_report(), tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    report = failing_report()
    error: type[Exception] = OSError
    if stage == "render":

        def broken(_: Report) -> str:
            raise OSError("no")

        monkeypatch.setattr(html, "to_html", broken)
    elif stage == "write":
        real: Callable[..., object] = atomic.os.fdopen
        opened: list[int] = []

        def full_disk(descriptor: int, *args: str, **options: str) -> object:
            opened.append(descriptor)
            if len(opened) == 3:
                atomic.os.close(descriptor)
                raise OSError("No space left on device")
            return real(descriptor, *args, **options)

        monkeypatch.setattr(atomic.os, "fdopen", full_disk)
    else:
        report = replace(report, environment=replace(ENVIRONMENT, command="lone surrogate \ud800"))
        error = UnicodeEncodeError
    with pytest.raises(error):
        write_reports(report, tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_each_form_can_be_written_alone(tmp_path: Path) -> None:
    """Would catch a writer that ignores the name it was given."""
    report = passing_report()
    for writer, name in ((json_report, "a.json"), (junit, "b.xml"), (markdown, "c.md"), (html, "d.html")):
        writer.write(report, tmp_path / name)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.json", "b.xml", "c.md", "d.html"]
    assert json_report.load(tmp_path / "a.json") == report


@sample
def test_a_report_does_not_differ_from_itself(report: Report) -> None:
    """Would catch a diff that reports how long a run took."""
    later = replace(report, environment=replace(report.environment, seconds=7.0, started="2026-01-01T00:00:00+00:00"))
    assert diff_reports(report, later) == []
    assert render([]) == "no change\n"


def test_every_kind_of_change_is_found() -> None:
    """Would catch a regression that a diff of two reports does not show."""
    old = passing_report()
    first, second, third, *rest = old.paths
    wrong = replace(first.outputs[0], bit_equal=first.outputs[0].bit_equal - 1, unexplained=1, grade="bounded")
    new = Report(
        replace(old.environment, versions={**old.environment.versions, "torch": "2.11.0"}, seed=7),
        (
            replace(first, outputs=(wrong,), status="fail", reason="1 unexplained in out"),
            replace(second, kernels=(Kernel("f" * 64, "sm_100a", "swiglu_fwd_bf16"),)),
            replace(third, outputs=(*third.outputs[:5], replace(third.outputs[5], name="scratch"))),
            *rest[1:],
            replace(rest[0], profile="te"),
        ),
    )
    place = "swiglu.fwd.bf16 on virtual:sm_90a [suite, exact]"
    mxfp8 = "swiglu.fwd.mxfp8_e4m3 on virtual:sm_90a [suite, exact]"
    assert diff_reports(old, new) == [
        Change("verdict", "verdict", "pass", "fail"),
        Change("environment", "version of torch", "2.13.0", "2.11.0"),
        Change("environment", "seed", "20250611", "7"),
        Change("path removed", "swiglu.fwd.mxfp8_e4m3 on virtual:sm_100a [suite, exact]", "pass", ""),
        Change("status", place, "pass", "fail (1 unexplained in out)"),
        Change("grade", f"out of {place}", "exact", "bounded"),
        Change("bit-equal", f"out of {place}", "100 % of 1,081,344", "99.999908 % of 1,081,344"),
        Change("unexplained", f"out of {place}", "0", "1"),
        Change(
            "kernel",
            "swiglu.fwd.bf16 on virtual:sm_100a [suite, exact]",
            f"swiglu_fwd_bf16 sm_100a {second.kernels[0].ptx_sha256[:16]}",
            "swiglu_fwd_bf16 sm_100a ffffffffffffffff",
        ),
        Change("output removed", f"workspace of {mxfp8}", f"{wording.NOT_AVAILABLE} bit-equal", ""),
        Change("output added", f"scratch of {mxfp8}", "", f"{wording.NOT_AVAILABLE} bit-equal"),
        Change("path added", "swiglu.fwd.mxfp8_e4m3 on virtual:sm_100a [te, exact]", "", "pass"),
    ]
    lines = render(diff_reports(old, new)).splitlines()
    assert len(lines) == 12
    assert lines[1] == "environment: version of torch: 2.13.0 -> 2.11.0"
    assert lines[3] == "path removed: swiglu.fwd.mxfp8_e4m3 on virtual:sm_100a [suite, exact] (pass)"


def test_virtual_and_silicon_are_compared_on_the_same_target() -> None:
    """Would catch a diff of a virtual and a CUDA report in which no path has a counterpart."""
    virtual = passing_report()
    silicon = Report(
        replace(ENVIRONMENT, device="NVIDIA H200", driver="580.65"),
        tuple(
            replace(row, device="cuda", evidence="silicon") for row in virtual.paths if row.device.endswith("sm_90a")
        ),
    )
    kinds = [change.kind for change in diff_reports(virtual, silicon)]
    assert kinds == ["environment"] * 2 + ["path removed"] * 5 + ["device"] * 5


def test_the_environment_names_the_packages_that_decide_bits() -> None:
    """Would catch a report that does not say which torch or DSL made it."""
    here = Environment.here("cuda", seed=3, command="moe-numerics verify", driver="580.65", seconds=2.5)
    assert here.versions["torch"] == torch.__version__.partition("+")[0] or here.versions["torch"] == torch.__version__
    assert here.versions["nvidia-cutlass-dsl"] == "4.8.1"
    assert (here.device, here.driver, here.seed, here.seconds) == ("cuda", "580.65", 3, 2.5)
    assert here.started.endswith("+00:00")
