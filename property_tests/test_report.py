"""Reports: every form says the same, is whole or absent, and shows what somebody needs to act on it."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_numerics.compare import Finding, compare_output, merge, unchecked_output
from moe_numerics.report import (
    Environment,
    Kernel,
    OutputResult,
    PathResult,
    Report,
    ReportError,
    atomic,
    charts,
    html,
    json_report,
    junit,
    markdown,
    wording,
    write_reports,
)
from moe_numerics.report.diff import Change, diff_reports, render

ENVIRONMENT = Environment(
    versions={
        "python": "3.11.9",
        "moe-numerics": "0.1.0",
        "torch": "2.13.0",
        "nvidia-cutlass-dsl": "4.8.1",
        "numpy": "2.4.0",
        "hypothesis": "6.140.2",
        "pyptx": "0.1.1",
    },
    device="virtual:sm_90a, virtual:sm_100a",
    driver=None,
    seed=20250611,
    command="moe-numerics verify --seed 20250611",
    platform="Linux x86_64",
    started="2025-06-11T08:30:12+00:00",
    seconds=94.31,
)
EVIDENCE = {
    "virtual:sm_90a": "virtual, agrees with silicon",
    "virtual:sm_100a": "virtual, manual evidence",
    "cuda": "silicon",
}
ACTIVATION_OUTPUTS = (
    ("codes_rowwise", "E4M3", 128),
    ("scales_rowwise", "E8M0", 4),
    ("codes_colwise", "E4M3", 128),
    ("scales_colwise", "E8M0", 128),
    ("amax", "float32", 1),
)
BF16_OUTPUTS = (("out", "bfloat16", 128),)
BACKWARD_OUTPUTS = (("dgate_up", "bfloat16", 256), ("dprob", "float32", 1))
PATHS = {
    "swiglu.fwd.bf16": BF16_OUTPUTS,
    "swiglu.fwd.mxfp8_e4m3": ACTIVATION_OUTPUTS,
    "swiglu.bwd.bf16": BACKWARD_OUTPUTS,
    "swiglu.bwd.mxfp8_e4m3": (*ACTIVATION_OUTPUTS[:4], ("dprob", "float32", 1)),
}
ROWS = 352
ROW_EXPERT = torch.repeat_interleave(torch.arange(8), torch.tensor([1, 31, 32, 33, 127, 0, 128, 0]))


def tensor(number_format: str, columns: int, seed: int) -> torch.Tensor:
    """Some output of an activation path, [352, columns]."""
    generator = torch.Generator().manual_seed(seed)
    if number_format in ("E4M3", "E8M0"):
        return torch.randint(0, 127, (ROWS, columns), generator=generator, dtype=torch.uint8)
    values = torch.randn(ROWS, columns, generator=generator)
    return values.bfloat16() if number_format == "bfloat16" else values


def kernel(path: str, device: str) -> Kernel:
    target = "sm_100a" if "sm_100a" in device else "sm_90a"
    return Kernel(hashlib.sha256(f"{path} {target}".encode()).hexdigest(), target, path.replace(".", "_"))


def equal_findings(outputs: tuple[tuple[str, str, int], ...], cases: int) -> list[Finding]:
    findings = []
    for name, number_format, columns in outputs:
        value = tensor(number_format, columns, 0)
        one = compare_output(name, value, value.clone(), format=number_format, row_expert=ROW_EXPERT)
        findings.append(merge([one] * cases))
    return findings


def path_result(path: str, device: str, findings: list[Finding], **more: Any) -> PathResult:
    settings: dict[str, Any] = {"profile": "suite", "maths": "exact", "seconds": round(1.0 + len(path) / 7, 3), **more}
    return PathResult.from_findings(
        path,
        device,
        cases=24,
        findings=findings,
        kernels=(kernel(path, device),),
        reproduce=f"moe-numerics verify --paths {path} --device {device} --seed 20250611",
        evidence=EVIDENCE[device],
        **settings,
    )


def bounded_finding() -> Finding:
    """A fast-maths output: a third of the elements differ by a ULP, all inside the bound."""
    expected = tensor("bfloat16", 128, 3)
    oracle = expected.double() * (1 + 2**-10 * torch.sin(torch.arange(ROWS * 128).reshape(ROWS, 128)).double())
    got = (expected.double() * (1 + 2**-8.4 * torch.cos(torch.arange(128)).double())).bfloat16()
    return compare_output(
        "out", expected, got, row_expert=ROW_EXPERT, oracle=oracle, bound=expected.double().abs() * 2**-6.9
    )


@functools.cache
def passing_report() -> Report:
    """All outputs bit-equal on both virtual GPUs, a fast-maths path with bounded outputs, some unchecked."""
    rows = []
    for path, outputs in PATHS.items():
        for device in ("virtual:sm_90a", "virtual:sm_100a"):
            findings = equal_findings(outputs, 24)
            if path == "swiglu.fwd.mxfp8_e4m3":
                findings.append(unchecked_output("workspace", 4096, "scratch memory: its content is not specified"))
            rows.append(path_result(path, device, findings))
    for device in ("virtual:sm_90a", "virtual:sm_100a"):
        rows.append(path_result("swiglu.fwd.bf16", device, [merge([bounded_finding()] * 24)], maths="fast"))
    return Report(ENVIRONMENT, tuple(rows))


@functools.cache
def failing_report() -> Report:
    """Two faults (a scale rounded down, a write past a tail), a path that crashed and one left out."""
    rows = list(passing_report().paths)
    at = next(i for i, row in enumerate(rows) if row.id == "swiglu.fwd.mxfp8_e4m3" and "100a" in row.device)
    findings = equal_findings(ACTIVATION_OUTPUTS, 24)
    expected = tensor("E8M0", 4, 0)
    floor = torch.where((torch.arange(ROWS * 4).reshape(ROWS, 4) * 7919) % 11 < 3, expected - 1, expected)
    wrong_scale = compare_output("scales_rowwise", expected, floor, format="E8M0", row_expert=ROW_EXPERT)
    codes = tensor("E4M3", 128, 0)
    doubled = torch.where((floor != expected).repeat_interleave(32, dim=1), codes + 8, codes)
    doubled[40, 17] = 0x7F
    wrong_codes = compare_output("codes_rowwise", codes, doubled, format="E4M3", row_expert=ROW_EXPERT)
    case = "moe-numerics-report/cases/swiglu.fwd.mxfp8_e4m3-4f1c09.json"
    command = f"moe-numerics run {case} --device virtual:sm_100a"
    findings[0] = replace(wrong_codes, reproduce=command)
    findings[1] = replace(wrong_scale, reproduce=command)
    rows[at] = path_result("swiglu.fwd.mxfp8_e4m3", "virtual:sm_100a", findings)

    at = next(i for i, row in enumerate(rows) if row.id == "swiglu.bwd.bf16" and "90a" in row.device)
    dgate_up = tensor("bfloat16", 256, 0)
    row_expert = ROW_EXPERT.clone()
    row_expert[190:224] = -1
    written = dgate_up.clone()
    written[row_expert < 0] = float("nan")
    written[190:192, 100:140] = 0.0
    outside = compare_output("dgate_up", dgate_up, written, owned=row_expert >= 0, row_expert=row_expert, fill=0x7FC0)
    rows[at] = path_result("swiglu.bwd.bf16", "virtual:sm_90a", [outside, equal_findings(BACKWARD_OUTPUTS, 1)[1]])
    rows.append(
        PathResult(
            "geglu.fwd.bf16",
            "virtual:sm_100a",
            "suite",
            "exact",
            "error",
            reason="geglu_fwd_bf16, line 214: unknown instruction `tanh.approx.bf16x2` (block 0, thread 32)",
            kernels=(kernel("geglu.fwd.bf16", "virtual:sm_100a"),),
            reproduce="moe-numerics verify --paths geglu.fwd.bf16 --device virtual:sm_100a --seed 20250611",
            seconds=0.4,
            evidence=EVIDENCE["virtual:sm_100a"],
        )
    )
    rows.append(
        PathResult(
            "quantize.nvfp4.rht_colwise",
            "virtual:sm_90a",
            "suite",
            "exact",
            "skipped",
            reason="needs cvt.rn.satfinite.e2m1x2.f32, which sm_90a does not have",
            evidence=EVIDENCE["virtual:sm_90a"],
        )
    )
    return Report(replace(ENVIRONMENT, seconds=131.4), tuple(rows))


SAMPLES: dict[str, Callable[[], Report]] = {
    "pass": passing_report,
    "fail": failing_report,
    "incomplete": lambda: Report(ENVIRONMENT, tuple(row for row in failing_report().paths if row.status != "fail")),
    "empty": lambda: Report(ENVIRONMENT, ()),
}
sample = pytest.mark.parametrize("report", [make() for make in SAMPLES.values()], ids=list(SAMPLES))

# Text that breaks reports: markup, quotes, table and escape characters, control characters, other scripts.
HOSTILE = "<script>alert('1')</script>|`*_[x](y) \\ & \"quoted\" \x00\x1b[31m\ufffe\ttab\nnew line é 量 ]]> {{ 7 * 7 }}"
texts = st.one_of(st.just(HOSTILE), st.text(max_size=20), st.sampled_from(("", "-", "None")))
counts = st.integers(0, 2**40)


@st.composite
def output_results(draw: st.DrawFn, unexplained: bool) -> OutputResult:
    """An output with numbers that need not come from tensors."""
    bit_equal, explained = draw(counts), draw(counts)
    wrong = draw(st.integers(1, 1000)) if unexplained else 0
    expected, got = draw(st.integers(0, 0xFFFF)), draw(st.integers(0, 0xFFFF))
    experts = draw(st.integers(0, 300))
    cells = draw(st.sets(st.tuples(st.integers(-1, experts - 1), st.integers(0, 31)), max_size=8))
    return OutputResult(
        name=draw(st.sampled_from(("out", "codes_rowwise", "amax", HOSTILE))),
        grade=draw(st.sampled_from(("exact", "bounded", "statistical"))),
        elements=bit_equal + explained + wrong,
        bit_equal=bit_equal,
        explained=explained,
        unexplained=wrong,
        reason=draw(texts),
        max_ulp=draw(st.none() | st.integers(0, 2**64)),
        ulp_histogram=draw(st.sampled_from(({}, {"0": 3}, {"0": 1, "2-3": 9, f"{2**63}-{2**64 - 1}": 1, "nan": 4}))),
        error_histogram=draw(st.sampled_from(({}, {"0": 1, "0.1-0.2": 5, ">1": 2, "nan": 1}))),
        sharpness=draw(st.none() | st.floats(0, allow_nan=False)),
        mismatch_map=tuple((*cell, draw(st.integers(1, 10**9))) for cell in sorted(cells)),
        experts=experts,
        columns=draw(st.integers(0, 10000)),
        first_mismatch={
            "coordinates": {"row": draw(counts), "expert": draw(st.integers(-1, 300)), "column": 5},
            "expected_bits": f"0x{expected:04x}",
            "got_bits": f"0x{got:04x}",
            "expected": draw(texts),
            "got": draw(texts),
            "explained": draw(st.booleans()),
        }
        if unexplained
        else None,
        reproduce=draw(texts),
    )


@st.composite
def reports(draw: st.DrawFn) -> Report:
    """Reports with hostile text and extreme numbers."""
    rows = []
    for status in draw(st.lists(st.sampled_from(("pass", "fail", "skipped", "error")), max_size=3)):
        rows.append(
            PathResult(
                id=draw(st.sampled_from(("swiglu.fwd.bf16", HOSTILE))),
                device=draw(st.sampled_from(("cuda", "virtual:sm_100a", HOSTILE))),
                profile=draw(texts),
                maths=draw(texts),
                status=status,
                reason=draw(texts) or "because",
                cases=draw(st.integers(1, 1000)),
                kernels=(Kernel("0" * 64, "sm_90a", draw(texts)),) * draw(st.integers(0, 2)),
                outputs=tuple(draw(st.lists(output_results(status == "fail"), min_size=1, max_size=2)))
                if status in ("pass", "fail")
                else (),
                reproduce=draw(texts),
                seconds=draw(st.integers(0, 10**7)) / 1000,
                evidence=draw(texts),
            )
        )
    environment = Environment(
        versions={draw(texts): draw(texts)},
        device=draw(texts),
        driver=draw(st.none() | texts),
        seed=draw(st.integers()),
        command=draw(texts),
        platform=draw(texts),
        started=draw(st.sampled_from(("2025-06-11T08:30:12+00:00", HOSTILE, ""))),
        seconds=draw(st.integers(0, 10**7)) / 1000,
    )
    return Report(environment, tuple(rows))


@functools.cache
def validator() -> jsonschema.Draft202012Validator:
    jsonschema.Draft202012Validator.check_schema(json_report.schema())
    return jsonschema.Draft202012Validator(json_report.schema())


class Page(HTMLParser):
    """Text, tags and attributes of a page, and whether its tags are balanced."""

    VOID = frozenset({"meta", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, key, value or "") for key, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, key, value or "") for key, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "script"):
            self.text.append(data)


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
    assert "sharpness inf" in "".join(Page(html.to_html(report)).text)
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


@given(report=reports())
def test_junit_is_xml_with_an_outcome_for_every_path(report: Report) -> None:
    """Would catch control characters that make the file unreadable, and failures counted as passes."""
    root = ElementTree.fromstring(junit.to_junit(report))
    cases = root.findall("testsuite/testcase")
    assert len(cases) == len(report.paths) == int(root.get("tests", "-1"))
    for element, attribute, status in (
        ("failure", "failures", "fail"),
        ("error", "errors", "error"),
        ("skipped", "skipped", "skipped"),
    ):
        number = sum(row.status == status for row in report.paths)
        assert len(root.findall(f"testsuite/testcase/{element}")) == number == int(root.get(attribute, "-1"))
        assert sum(int(suite.get(attribute, "-1")) for suite in root.findall("testsuite")) == number


def test_junit_shows_the_first_mismatch_and_how_to_reproduce_it() -> None:
    """Would catch a CI failure that says only that something failed."""
    root = ElementTree.fromstring(junit.to_junit(failing_report()))
    (failure,) = (
        case.find("failure")
        for case in root.findall("testsuite[@name='moe-numerics virtual:sm_100a']/testcase")
        if case.find("failure") is not None
    )
    assert failure is not None
    assert failure.text == (
        "codes_rowwise: first unexplained mismatch at expert 0, row in expert 0, row 0, column 0: "
        "expected 0x2a (0.3125), got 0x32 (0.625)\n"
        "scales_rowwise: first unexplained mismatch at expert 0, row in expert 0, row 0, column 0: "
        "expected 0x2a (2^-85), got 0x29 (2^-86)\n"
        "reproduce: moe-numerics run moe-numerics-report/cases/swiglu.fwd.mxfp8_e4m3-4f1c09.json "
        "--device virtual:sm_100a"
    )


@given(report=reports())
def test_markdown_tables_keep_their_columns(report: Report) -> None:
    """Would catch a name or reason with a bar or line break in it that tears the table."""
    lines = markdown.to_markdown(report).split("\n")
    assert lines[0] == f"# {wording.headline(report)}"
    start = next(number for number, line in enumerate(lines) if line.startswith("| --- |"))
    table = lines[start : start + 1 + len(report.paths)]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {13}
    assert not lines[start + 1 + len(report.paths)].startswith("|")


def test_markdown_tells_what_failed_and_what_was_not_checked() -> None:
    """Would catch a summary that leaves out the mismatch, the command, the reason or the evidence."""
    text = markdown.to_markdown(failing_report())
    assert "## fail: `swiglu.fwd.mxfp8_e4m3` on virtual:sm_100a" in text
    assert "got 0x32 (0.625)" in text
    assert "reproduce: moe-numerics run " in text
    assert "dgate_up: first written outside mismatch at no expert's row, row 190, column 100" in text
    assert "unknown instruction" in text
    assert "`workspace`: 4,096 of 4,096 elements. scratch memory: its content is not specified" in text
    assert "(virtual, manual evidence)" in text


@given(report=reports())
def test_a_page_is_well_formed_and_runs_nothing_it_was_given(report: Report) -> None:
    """Would catch unescaped text: a kernel name must not become markup, script or a template expression."""
    text = html.to_html(report)
    page = Page(text)
    assert page.open == []
    assert text.count("<script>") == 1
    assert "49" not in re.findall(r"new line é 量 \]\]&gt; (\S+)", text)
    assert not [attribute for attribute in page.attributes if attribute[1].startswith("on")]
    shown = "".join(page.text)
    assert wording.headline(report) in shown
    for row in report.paths:
        assert wording.printable(row.id) in shown


@sample
def test_a_page_needs_nothing_but_itself(report: Report) -> None:
    """Would catch a font, style, script or image that is fetched, so that a mailed page breaks."""
    text = html.to_html(report)
    page = Page(text)
    targets = [
        (tag, value) for tag, key, value in page.attributes if key in ("src", "href", "action", "data", "srcset")
    ]
    assert all(tag == "a" and value.startswith("#path-") for tag, value in targets)
    ids = {value for _, key, value in page.attributes if key == "id"}
    assert {value[1:] for _, value in targets} <= ids
    assert not re.search(r"https?://|@import|url\(|\bfetch\(|XMLHttpRequest", text)


@sample
def test_a_page_shows_everything_that_the_report_says(report: Report) -> None:
    """Would catch a page that leaves out a hash, the evidence, a bit pattern, a bin or the command."""
    shown = " ".join("".join(Page(html.to_html(report)).text).split())
    wanted = [
        wording.headline(report),
        wording.verdict_sentence(report),
        report.environment.command,
        str(report.environment.seed),
        *report.environment.versions.values(),
    ]
    for row in report.paths:
        wanted += [row.id, row.device, row.evidence, row.profile, row.maths, wording.duration(row.seconds)]
        wanted += [row.reason] if row.status != "pass" else []
        wanted += [row.reproduce] if not row.unexplained else []
        wanted += [kernel.ptx_sha256 for kernel in row.kernels if row.outputs]
        for output in row.outputs:
            wanted += [output.name, output.grade, output.reason, f"{output.elements:,}"]
            wanted += [f"{count:,}" for count in (*output.ulp_histogram.values(), *output.error_histogram.values())]
            wanted += [wording.ratio(output.sharpness)] if output.sharpness is not None else []
            wanted += [f"{output.unexplained:,} unexplained"] if output.unexplained else []
            first = output.first_mismatch
            if first is not None:
                wanted += [first["expected_bits"], first["got_bits"], first["expected"], first["got"]]
                wanted += [wording.coordinates(first), wording.reproduce_command(row, output)]
    missing = [text for text in wanted if " ".join(text.split()) not in shown]
    assert missing == []
    if any("sm_100a" in row.device for row in report.paths):
        assert "virtual, manual evidence" in shown


@given(output=output_results(unexplained=True))
def test_charts_are_svg_that_shows_every_mismatch(output: OutputResult) -> None:
    """Would catch a cell or bar outside the drawing, and mismatches that the map loses."""
    for chart in (charts.ulp_bars(output), charts.error_bars(output)):
        if chart:
            _inside(ElementTree.fromstring(wording.printable(chart)))
    drawing = wording.printable(charts.mismatch_map(output))
    assert bool(drawing) == bool(output.mismatch_map)
    if drawing:
        root = ElementTree.fromstring(drawing)
        _inside(root)
        shown = [title.text or "" for title in root.iter("title")]
        count = sum(int(text.rpartition(": ")[2].removesuffix(" mismatches").replace(",", "")) for text in shown)
        rows = set(charts.map_rows(output))
        assert count == sum(number for expert, _, number in output.mismatch_map if expert in rows)
        left_out = {expert for expert, _, _ in output.mismatch_map} - rows
        assert charts.map_left_out(output) == len(left_out)
        assert len(rows) <= 40


def _inside(root: ElementTree.Element) -> None:
    width, height = (float(size) for size in root.get("viewBox", "").split()[2:])
    for box in root.iter("rect"):
        x, y, w, h = (float(box.get(key, "nan")) for key in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= width
        assert 0 <= y <= y + h <= height
        assert w > 0


@given(columns=st.integers(1, 5000), data=st.data())
def test_the_map_names_the_columns_of_a_mismatch(columns: int, data: st.DataObject) -> None:
    """Would catch a map whose cells are one column off from where the comparison put them."""
    column = data.draw(st.integers(0, columns - 1))
    expected = torch.zeros(1, columns, dtype=torch.int32)
    got = expected.clone()
    got[0, column] = 1
    finding = compare_output("out", expected, got, row_expert=torch.tensor([2]))
    root = ElementTree.fromstring(charts.mismatch_map(OutputResult.from_finding(finding)))
    (title,) = root.iter("title")
    words = re.fullmatch(r"expert 2, columns? (\d+)(?: to (\d+))?: 1 mismatches", title.text or "")
    assert words is not None
    low, high = int(words[1]), int(words[2] or words[1])
    assert 0 <= low <= column <= high < columns
    assert high - low <= columns // 32


def test_bit_patterns_are_compared_bit_by_bit() -> None:
    """Would catch patterns shown without their leading zeros, so that bits do not stand below one another."""
    difference = charts.bit_difference("0x05", "0x15")
    assert (difference.expected, difference.got) == ("00000101", "00010101")
    assert [place for place, differs in enumerate(difference.differs) if differs] == [3]


@given(part=st.integers(0, 10**15), rest=st.integers(0, 10**15))
def test_a_share_is_whole_only_if_nothing_is_missing(part: int, rest: int) -> None:
    """Would catch 99.999 % rounded up to 100 %, which hides a mismatch among millions."""
    text = wording.share(part, part + rest)
    if part + rest == 0:
        assert text == wording.NOT_AVAILABLE
        return
    shown = float(text.removesuffix(" %"))
    assert (shown == 100) == (rest == 0)
    assert (shown == 0) == (part == 0)
    assert abs(shown - 100 * part / (part + rest)) <= 0.005 + 1e-9


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.0421, "42 ms"),
        (1, "1.0 s"),
        (59.96, "60.0 s"),
        (99.6, "1 min 40 s"),
        (3600, "60 min 00 s"),
    ],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    """Would catch `0.0 s` for a quick path, or 60 seconds in a minute."""
    assert wording.duration(seconds) == text


def test_a_report_is_written_whole(tmp_path: Path) -> None:
    """Would catch a form that is not written, or temporary files left beside the report."""
    folder = tmp_path / "a" / "report"
    written = write_reports(failing_report(), folder)
    assert sorted(written) == ["index.html", "junit.xml", "report.json", "report.md"]
    assert sorted(file.name for file in folder.iterdir()) == sorted(written)
    assert json_report.load(folder / "report.json") == failing_report()
    assert (folder / "report.json").stat().st_mode & 0o777 == 0o644
    write_reports(passing_report(), folder)
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
