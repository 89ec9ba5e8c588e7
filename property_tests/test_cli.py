"""The command line: exit codes, one line for every error of the user's, whole reports, and cases that reproduce.

Faults this catches: a failure that ends with exit code 0, a traceback for a typing mistake, a report that is written
although nothing ran, a case file that does not show its failure again.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from planting import Edit, planted

from moe_numerics import campaign, cli, devices
from moe_numerics.cases import Case
from moe_numerics.paths import DEVICES, all_paths
from moe_numerics.report import json_report

PATH = "quantize.mxfp8_e4m3.rowwise"
DEVICE = "virtual:sm_90a"
REPORTS = {"report.json", "index.html", "report.md", "junit.xml"}
ROUNDED_DOWN = Edit(r"(add\.s32 \t%r\d+, %r\d+, )2097151;", r"\g<1>0;", 4)
UNKNOWN = Edit(r"bar\.warp\.sync|shfl\.sync\.bfly\.b32(?=.*shfl\.sync\.bfly)", "frobnicate.b32", 7)
HAS_GPU = torch.cuda.is_available()


class Command:
    """Runs `moe-numerics` in this process, tasks of `verify` included, in an empty folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: str | Path) -> tuple[int, str, str]:
        """(exit code, standard output, standard error), white space in lines folded."""
        self._monkeypatch.setattr(sys, "argv", ["moe-numerics", *map(str, arguments)])
        self._capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        out, err = self._capsys.readouterr()
        return code, " ".join(out.split()), err.strip()


def _in_this_process(plan: campaign.Plan) -> Iterator[campaign.TaskResult]:
    """What the processes of a campaign do, where a planted fault reaches it."""
    for task in plan.tasks():
        yield campaign.run_task(task)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(campaign, "_run_all", _in_this_process)
    return Command(monkeypatch, capsys)


def _verify(*more: str | Path) -> tuple[str | Path, ...]:
    return ("verify", "--paths", PATH, "--device", DEVICE, "--examples", "2", *more)


def _report(folder: Path) -> dict[str, Any]:
    data = json.loads((folder / "report.json").read_text())
    jsonschema.validate(data, json_report.schema())
    return data


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_verify_as_installed_passes_and_writes_every_report(tmp_path: Path) -> None:
    """The script itself, in a process of its own, with its own worker processes."""
    script = shutil.which("moe-numerics", path=str(Path(sys.executable).parent))
    assert script is not None, "the package is not installed beside this Python"
    done = subprocess.run(
        [script, *map(str, _verify("--out", tmp_path / "report"))], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert _files(tmp_path / "report") == REPORTS
    data = _report(tmp_path / "report")
    assert data["summary"]["verdict"] == "pass"
    assert [(path["id"], path["device"], path["cases"]) for path in data["paths"]] == [(PATH, DEVICE, 2)]
    assert data["paths"][0]["kernel"]["ptx_sha256"]
    assert "No unexplained bit" in done.stdout


def test_unexplained_bits_end_with_1_and_a_case_that_reproduces_them(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaign, "SHRINK_ATTEMPTS", 10)
    with planted(ROUNDED_DOWN):
        code, out, err = command(*_verify())
    folder = tmp_path / "moe-numerics-report"
    assert (code, err) == (1, "")
    assert f"fail: {PATH} on {DEVICE}" in out
    data = _report(folder)
    assert data["summary"]["verdict"] == "fail"
    assert data["paths"][0]["outputs"][1]["first_mismatch"]
    cases = sorted((folder / "cases").iterdir())
    assert cases
    reproduce = data["paths"][0]["reproduce"].split()
    assert reproduce[:2] == ["moe-numerics", "run"]
    assert folder / reproduce[2] in cases

    for case in cases:
        assert Case.load(case).path == PATH
        with planted(ROUNDED_DOWN):
            code, out, _ = command("run", case, "--device", DEVICE)
        assert code == 1
        assert "unexplained; first at row" in out
        code, out, _ = command("run", case, "--device", DEVICE)
        assert code == 0
        assert "unexplained" not in out
        assert "bit-equal" in out


def test_what_cannot_run_ends_with_3_and_says_why(command: Command, tmp_path: Path) -> None:
    with planted(UNKNOWN):
        code, out, _ = command(*_verify())
    assert code == 3
    data = _report(tmp_path / "moe-numerics-report")
    assert data["summary"]["verdict"] == "incomplete"
    assert data["paths"][0]["status"] == "error"
    assert "frobnicate" in data["paths"][0]["reason"]
    assert "frobnicate" in out

    case = tmp_path / "case.json"
    Case(PATH, (3,), 32, padded=True).save(case)
    with planted(UNKNOWN):
        code, _, err = command("run", case, "--device", DEVICE)
    assert code == 3
    assert err.startswith("moe-numerics: could not run: ")
    assert "frobnicate" in err


def test_a_lost_device_ends_with_4(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> None:
        raise devices.DeviceLost("the context is broken")

    monkeypatch.setattr(devices.VirtualDevice, "run", lost)
    code, out, _ = command(*_verify())
    assert code == 4
    assert "the context is broken" in out
    assert _report(tmp_path / "moe-numerics-report")["summary"]["verdict"] == "incomplete"

    case = tmp_path / "case.json"
    Case(PATH, (3,), 32, padded=True).save(case)
    assert command("run", case, "--device", DEVICE)[0] == 4


USAGE = {
    "no path matches": (("verify", "--paths", "swish*"), "matches no path"),
    "unknown profile": (
        ("verify", "--profile", "mine"),
        "profile 'mine' is unknown: expected one of te, cudnn, suite, te@2.20, cudnn@1.28, cudnn@1.23, ocp, torchao",
    ),
    "profile not offered": (("verify", "--paths", "swiglu*", "--profile", "te"), "not offered under profile 'te'"),
    "unknown device": (("verify", "--device", "tpu"), "device 'tpu' is unknown"),
    "unknown architecture": (("verify", "--device", "virtual:sm_80"), "virtual:sm_80 does not exist"),
    "report folder is a file": (("verify", "--out", "taken"), "--out taken is a file"),
    "no case file": (("run", "absent.json"), "absent.json: cannot be read"),
    "case is no JSON": (("run", "text.json"), "text.json: line 1 is not JSON"),
    "case has an unknown key": (("run", "key.json"), "'experts' is not a key of the case"),
    "case is of another schema": (("run", "schema.json"), "schema = 2 is unknown"),
    "case has no such path": (("run", "path.json"), "path 'swigloo.fwd.bf16' is unknown"),
    "case has no such profile": (("run", "profile.json"), "profile 'mine' is unknown"),
    "case has a negative count": (("run", "count.json"), "counts[0] = -1 is out of range"),
    "case has columns that no block takes": (
        ("run", "columns.json"),
        "hidden = 24: quantize.nvfp4 takes positive multiples of 16",
    ),
    "case has a layout for one part": (("run", "layout.json"), f"layout = 'interleaved:32': {PATH} takes halves"),
    "case is interleaved by other blocks": (("run", "blocks.json"), "48 is not a multiple of 32 columns"),
    "case has an option": (("run", "option.json"), f"options.nan_policy is no option of {PATH}"),
    "case names no input": (("run", "input.json"), "values.grad is no input"),
    "case on an unknown device": (("run", "case.json", "--device", "tpu"), "device 'tpu' is unknown"),
    "no report": (("diff", "absent.json", "absent.json"), "absent.json"),
    "not a report": (("diff", "case.json", "case.json"), "case.json"),
}
GOOD = Case(PATH, (3,), 32, padded=True).to_json()
BROKEN = {
    "case.json": GOOD,
    "key.json": {**GOOD, "experts": 4},
    "schema.json": {**GOOD, "schema": 2},
    "path.json": {**GOOD, "path": "swigloo.fwd.bf16"},
    "profile.json": {**GOOD, "profile": "mine"},
    "count.json": {**GOOD, "counts": [-1]},
    "columns.json": {**GOOD, "path": "quantize.nvfp4", "hidden": 24},
    "layout.json": {**GOOD, "layout": "interleaved:32"},
    "blocks.json": {**GOOD, "path": "swiglu.fwd.bf16", "hidden": 48, "layout": "interleaved:48"},
    "option.json": {**GOOD, "options": {"nan_policy": "sometimes"}},
    "input.json": {**GOOD, "values": {"grad": {"kind": "gaussian"}}},
}


@pytest.mark.parametrize("name", USAGE)
def test_bad_usage_is_one_line_and_writes_nothing(name: str, command: Command, tmp_path: Path) -> None:
    for file, content in BROKEN.items():
        (tmp_path / file).write_text(json.dumps(content))
    (tmp_path / "text.json").write_text("counts: 3")
    (tmp_path / "taken").write_text("")
    before = _files(tmp_path)
    arguments, message = USAGE[name]
    code, out, err = command(*arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("moe-numerics: ")
    assert message in err
    assert len(err.splitlines()) == 1
    assert _files(tmp_path) == before


@pytest.mark.skipif(HAS_GPU, reason="needs a machine without a CUDA device")
def test_a_device_that_this_machine_lacks_is_bad_usage(command: Command, tmp_path: Path) -> None:
    code, _, err = command("verify", "--device", "cuda")
    assert code == 2
    assert "no usable CUDA device" in err
    assert len(err.splitlines()) == 1
    assert _files(tmp_path) == set()


@pytest.mark.parametrize("arguments", [("verify", "--examples", "0"), ("verify", "--sed", "1"), ("vertify",)])
def test_options_that_do_not_exist_are_bad_usage(arguments: tuple[str, ...], command: Command, tmp_path: Path) -> None:
    code, _, err = command(*arguments)
    assert code == 2
    assert err
    assert _files(tmp_path) == set()


def test_list_json_has_every_path_with_what_it_takes_and_gives(command: Command) -> None:
    code, out, _ = command("list", "--json")
    assert code == 0
    entries = json.loads(out)
    assert [entry["id"] for entry in entries] == [path.id for path in all_paths()]
    text = {"type": "string", "minLength": 1}
    tensor = {"type": "object", "required": ["name", "dtype", "shape"], "additionalProperties": text}
    grades = {"enum": ["exact", "bounded", "statistical", "unchecked"]}
    entry = {
        "type": "object",
        "required": ["id", "inputs", "outputs", "profiles", "devices"],
        "properties": {
            "id": {"type": "string", "pattern": r"^\w+\.[\w.]+$"},
            "inputs": {"type": "array", "minItems": 1, "items": tensor},
            "outputs": {"type": "array", "minItems": 1, "items": tensor},
            "profiles": {"type": "object", "minProperties": 1, "additionalProperties": grades},
            "devices": {"const": list(DEVICES)},
        },
    }
    jsonschema.validate(entries, {"type": "array", "items": entry})


def test_list_shows_every_path_and_profile(command: Command) -> None:
    code, out, _ = command("list")
    assert code == 0
    assert f"{len(all_paths())} paths" in out
    assert "te@2.20" in out


def test_diff_says_what_changed(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "SHRINK_ATTEMPTS", 0)
    assert command(*_verify("--out", tmp_path / "old"))[0] == 0
    with planted(ROUNDED_DOWN):
        assert command(*_verify("--out", tmp_path / "new"))[0] == 1
    code, out, _ = command("diff", tmp_path / "old" / "report.json", tmp_path / "new" / "report.json")
    assert code == 0
    assert PATH in out
    assert "pass" in out
    assert "fail" in out
