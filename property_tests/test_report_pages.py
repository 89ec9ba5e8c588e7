"""Pages, tables and JUnit files of a report: they show what somebody needs to act on a mismatch."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from report_samples import (
    ENVIRONMENT,
    failing_report,
    output_results,
    passing_report,
    reports,
    sample,
)

from moe_numerics.compare import compare_output
from moe_numerics.report import (
    OutputResult,
    PathResult,
    Report,
    charts,
    html,
    junit,
    markdown,
    wording,
)


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


def test_loose_bounds_are_listed_with_the_reason() -> None:
    """Fault: a bound that explains anything shows nowhere; a short run, or a sharp bound, counts as loose."""
    report = passing_report()
    row = next(path for path in report.paths if path.maths == "fast")
    (output,) = row.outputs
    assert not wording.loose_bounds(report)
    loose = replace(output, name="dprob", sharpness=0.049)
    listed = replace(report, paths=(replace(row, cases=20, outputs=(loose, output)), replace(row, cases=19)))
    ((path, found, why),) = wording.loose_bounds(listed)
    assert (path.cases, found.name) == (20, "dprob")
    assert "any order of its terms" in why
    for text in (markdown.to_markdown(listed), html.to_html(listed)):
        assert "Loose bounds" in text
        assert why in text
    assert "Loose bounds" not in markdown.to_markdown(report)


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


def test_a_map_of_many_experts_says_how_many_it_leaves_out() -> None:
    """Would catch a page that grows with the number of experts, or leaves some out without a word."""
    expected = torch.zeros(300, 4)
    finding = compare_output("out", expected, expected + 1, row_expert=torch.arange(300))
    row = PathResult.from_findings("p", "cuda", profile="suite", maths="exact", cases=1, findings=[finding])
    assert len(charts.map_rows(row.outputs[0])) == 40
    shown = "".join(Page(html.to_html(Report(ENVIRONMENT, (row,)))).text)
    assert "260 more experts with mismatches are in report.json." in shown
    few = compare_output(
        "out", expected[:9], expected[:9] + (torch.arange(9) == 3)[:, None], row_expert=torch.arange(9)
    )
    assert charts.map_rows(OutputResult.from_finding(few)) == list(range(9))


def _inside(root: ElementTree.Element) -> None:
    width, height = (float(size) for size in root.get("viewBox", "").split()[2:])
    for box in root.iter("rect"):
        x, y, w, h = (float(box.get(key, "nan")) for key in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= width
        assert 0 <= y <= y + h <= height
        assert w > 0


@given(columns=st.integers(1, 33) | st.integers(1, 5000), data=st.data())
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
