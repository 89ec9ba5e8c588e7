"""A baseline lets known findings pass, and nothing else: new and worse ones fail, fixed ones are named."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import jsonschema
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moe_numerics
from moe_numerics.baseline import Baseline, BaselineError, Key, Known, described
from moe_numerics.cases import Case
from moe_numerics.contract import PROFILES
from moe_numerics.findings import Finding

CASE = Case("relu.fwd.bf16", counts=(3, 0, 40), hidden=64)


def _kernel(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    @moe_numerics.kernel("relu.fwd.bf16", inputs={"x": "x", "offsets": "offs"}, outputs={"out": 0})
    def mine(x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return change(torch.where(x <= 0, torch.zeros_like(x), x))

    return mine


def _off_in(rows: int, by: int = 1) -> Callable[..., torch.Tensor]:
    """A kernel that is off by some ULPs in the first column of some rows."""

    def change(out: torch.Tensor) -> torch.Tensor:
        bits = out.view(torch.int16).clone()
        bits[:rows, 0] = 0x4000 + by
        return bits.view(torch.bfloat16)

    return _kernel(change)


def test_known_findings_are_reported_and_pass(tmp_path: Path) -> None:
    """Fault: a baseline that hides what it knows, or does not let it pass."""
    file = tmp_path / "known.json"
    assert not moe_numerics.check(_off_in(5), cases=CASE).passed
    written = moe_numerics.check(_off_in(5), cases=CASE, baseline=file, update_baseline=True)
    assert written.passed
    again = moe_numerics.check(_off_in(5), cases=CASE, baseline=file)
    assert again.passed
    assert "known, no worse than the baseline" in str(again)
    assert again.failing is not None
    again.raise_if_unexplained()


def test_what_is_worse_or_new_fails(tmp_path: Path) -> None:
    """Fault: anything goes once an output is known."""
    file = tmp_path / "known.json"
    moe_numerics.check(_off_in(5), cases=CASE, baseline=file, update_baseline=True)
    more = moe_numerics.check(_off_in(6), cases=CASE, baseline=file)
    assert not more.passed
    assert "worse than the baseline: out: " in str(more)
    assert not moe_numerics.check(_off_in(5, by=0x200), cases=CASE, baseline=file).passed
    assert moe_numerics.check(_off_in(4), cases=CASE, baseline=file).passed
    other = moe_numerics.profile("suite").replace(staging="bfloat16")
    assert not moe_numerics.check(_off_in(5), cases=CASE, baseline=file, contract=other).passed


def test_what_is_fixed_is_named_and_leaves_with_an_update(tmp_path: Path) -> None:
    """Fault: entries that nobody needs stay for ever, and let the fault come back."""
    file = tmp_path / "known.json"
    moe_numerics.check(_off_in(5), cases=CASE, baseline=file, update_baseline=True)
    fixed = moe_numerics.check(_kernel(lambda out: out), cases=CASE, baseline=file)
    assert fixed.passed
    assert fixed.baseline.stale == ("out",)
    assert "stale in the baseline: out has nothing unexplained" in str(fixed)
    assert len(json.loads(file.read_text())["known"]) == 1
    moe_numerics.check(_kernel(lambda out: out), cases=CASE, baseline=file, update_baseline=True)
    assert json.loads(file.read_text())["known"] == []


numbers = st.integers(0, 50)


@given(numbers, numbers, numbers, numbers, st.none() | numbers, st.none() | numbers)
def test_covering_follows_share_and_distance(
    a: int, n: int, b: int, m: int, far: int | None, further: int | None
) -> None:
    """Fault: counts compared where the number of elements differs, or a distance without a limit."""
    n, m = max(a, n), max(b, m)
    finding = Finding("out", "exact", m, bit_equal=m - b, unexplained=b, max_ulp=further)
    share_ok = b / max(m, 1) <= a / max(n, 1)
    assert Known(n, a, far).covers(finding) == (share_ok and (further is None or (far is not None and further <= far)))


def test_the_file_is_what_its_schema_says(tmp_path: Path) -> None:
    """Fault: a schema that describes another file; a file that is not read as it was written."""
    file = tmp_path / "deep" / "known.json"
    baseline = Baseline(file, {Key("m.f", "relu.fwd.bf16", "out", "suite", "exact bits"): Known(10, 3, None)})
    baseline.save()
    schema = json.loads(resources.files("moe_numerics.report").joinpath("baseline.schema.json").read_text())
    jsonschema.validate(json.loads(file.read_text()), schema)
    assert Baseline.load(file).entries == baseline.entries
    assert [each.name for each in file.parent.iterdir()] == ["known.json"]
    fields = {each.name for form in (Key, Known) for each in dataclasses.fields(form)}
    assert set(schema["properties"]["known"]["items"]["required"]) == fields


ENTRY = {
    "kernel": "m.f", "path": "p", "output": "out", "contract": "suite", "arithmetic": "exact bits",
    "elements": 4, "unexplained": 1, "max_ulp": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "expected an object with schema and known"),
        (json.dumps({"schema": 2, "known": []}), "schema = 2: this version reads baselines of schema 1"),
        (json.dumps({"schema": 1, "known": {}}), "known is no list"),
        (json.dumps({"schema": 1, "known": [{"kernel": "f"}]}), r"known\[0\]: expected an object with kernel, path"),
        (json.dumps({"schema": 1, "known": [ENTRY | {"path": 3}]}), r"known\[0\]\.path = 3: expected text"),
        (json.dumps({"schema": 1, "known": [ENTRY | {"max_ulp": -1}]}), r"max_ulp = -1: expected an integer"),
        (json.dumps({"schema": 1, "known": [ENTRY, ENTRY]}), r"known\[1\] stands twice"),
    ],
)
def test_a_file_that_is_no_baseline_is_refused(text: str, message: str, tmp_path: Path) -> None:
    """Fault: a broken file counts as an empty one, and everything it knew fails, or as one that knows everything."""
    file = tmp_path / "known.json"
    file.write_text(text)
    with pytest.raises(BaselineError, match=message):
        Baseline.load(file)


def test_contracts_in_words() -> None:
    """Fault: two contracts with the same words, so that what is known of one lets the other pass."""
    assert [described(each.contract) for each in PROFILES.values()] == list(PROFILES)
    changed = moe_numerics.profile("te").replace(scale_rule="even")
    assert described(changed) == "te@2.20 + scale_rule=even"


SUITE = """
import torch, moe_numerics

@moe_numerics.kernel(path="relu.fwd.bf16", inputs={"x": "x", "offsets": "offs"}, outputs={"out": 0})
def wrong(x, offs):
    return x

def test_wrong(moe_check):
    moe_check(wrong)
"""


def _pytest(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--moe-cases",
        "2",
        *options,
        str(folder),
    ]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)


def test_the_plugin_writes_and_reads_a_baseline(tmp_path: Path) -> None:
    """Fault: the options do nothing; known findings are not shown at the end."""
    (tmp_path / "test_mine.py").write_text(SUITE)
    written = _pytest(tmp_path, "--moe-baseline", "known.json", "--moe-update-baseline")
    assert written.returncode == 0, written.stdout
    ran = _pytest(tmp_path, "--moe-baseline", "known.json", "-n", "1")
    assert ran.returncode == 0, ran.stdout
    assert "moe-numerics baseline" in ran.stdout
    assert "known, no worse than the baseline" in ran.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--moe-update-baseline",), "needs --moe-baseline FILE"),
        (("--moe-baseline", "known.json", "--moe-update-baseline", "-n", "2"), "without -n"),
    ],
)
def test_updates_that_cannot_be_are_bad_usage(options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    """Fault: an update without a file to write, or by processes that overwrite one another."""
    (tmp_path / "test_mine.py").write_text("")
    ran = _pytest(tmp_path, *options)
    assert ran.returncode == 4
    assert message in ran.stderr
