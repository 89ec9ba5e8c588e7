"""The catalogue of faults, its committed measurement, and bisecting."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from detection import DEVICE, PEER_NAMES, measure, page, summary
from fault_catalogue import CATALOGUE
from faults import Fault, FaultyDevice, ptx_fault
from kernel_runs import thorough
from typer.testing import CliRunner

from moe_numerics.bisecting import Stage, bisect, first_wrong
from moe_numerics.campaign import campaign_cases
from moe_numerics.cli import app
from moe_numerics.devices import FILL_BYTE, open_device
from moe_numerics.paths import find_path
from moe_numerics.running import expected_outputs, run_case

ROOT = Path(__file__).parent.parent
REPORT = json.loads((ROOT / "reports" / "detection.json").read_text())
BY_ID = {fault.id: fault for fault in CATALOGUE}
COMPOSED = [fault for fault in CATALOGUE if fault.stage]

MEASURED_AGAIN = ("mx-scale-floor", "act-all-scaled-by-4.5-percent", "nv-nibbles-swapped")
BISECTED = (
    "composed-bfloat16-truncated",
    "composed-rotation-left-out",
    "composed-scales-one-more",
    "mlp-sigmoid-constant",
    "mlp-codes-swapped",
    "step-second-weights-of-another-expert",
)
STEPS = ("grouped_mlp.step.bf16", "grouped_mlp.step.mxfp8", "grouped_mlp.step.nvfp4")


def test_the_catalogue_is_what_was_measured() -> None:
    """A fault that was added and never measured, or one that was left out because it was missed."""
    assert len(BY_ID) == len(CATALOGUE) >= 60
    assert [entry["id"] for entry in REPORT["faults"]] == [fault.id for fault in CATALOGUE]
    assert REPORT["summary"] == summary(REPORT["faults"])
    assert (ROOT / "docs" / "detection.md").read_text() == page(REPORT)


def test_the_targets_are_met() -> None:
    """Detection power that fell: every fault by a thorough run, 95 % by the default one."""
    entries = [entry for entry in REPORT["faults"] if not entry["equivalent"]]
    missed = [entry["id"] for entry in entries if not entry["found_thorough"]]
    assert not missed
    assert sum(entry["found_default"] for entry in entries) >= 0.95 * len(entries)
    assert all(set(entry["peers"]) <= set(PEER_NAMES) for entry in entries)


def test_equivalent_faults_are_equivalent() -> None:
    """A fault that was missed and called equivalent: every bfloat16 magnitude is one after rounding to bfloat16."""
    assert [fault.id for fault in CATALOGUE if fault.equivalent] == ["nv-amax-in-bfloat16"]
    magnitudes = torch.arange(0x7F81, dtype=torch.int16).view(torch.bfloat16)
    again = magnitudes.float().to(torch.bfloat16)
    assert torch.equal(again.view(torch.int16), magnitudes.view(torch.int16))


@pytest.mark.parametrize("name", [fault.id for fault in CATALOGUE] if thorough() else MEASURED_AGAIN)
def test_a_fault_is_found_as_the_report_says(name: str) -> None:
    """A report edited by hand, or kernels that changed since."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = measure(BY_ID[name])
    finally:
        torch.set_num_threads(threads)
    reported = next(entry for entry in REPORT["faults"] if entry["id"] == name)
    for key in ("found_default", "found_thorough", "peers"):
        assert found[key] == reported[key], key


def _bisected(fault: Fault) -> tuple[Stage, ...]:
    """The stages of the first case in which a composed fault shows."""
    path = find_path(fault.path)
    contract = path.contract("suite")
    device = FaultyDevice(open_device(DEVICE, fault.schedule), fault)
    with ptx_fault(fault), device.activate():
        # The gauntlet's NaN reach the amax of the whole tensor, and with it every code.
        for case in list(campaign_cases(path, "suite", 20, 0))[1:]:
            if run_case(path, case, contract, device).passed:
                continue
            return bisect(path, case, contract, device.run(path, case, contract).outputs)
    raise AssertionError(f"{fault.id} was not found")


@pytest.mark.parametrize("fault", COMPOSED if thorough() else [BY_ID[name] for name in BISECTED], ids=lambda f: f.id)
def test_bisecting_names_the_stage_that_is_wrong(fault: Fault) -> None:
    """A stage blamed for what an earlier one gave it."""
    stages = _bisected(fault)
    wrong = first_wrong(stages)
    assert wrong is not None
    assert wrong.name == fault.stage
    if fault.stage == "activation" and fault.path.endswith("nvfp4"):
        # The copies are right for the wrong `out` that they were given.
        assert all(stage.passed for stage in stages[1:])


@pytest.mark.parametrize("path_id", STEPS)
def test_every_stage_of_a_step_is_judged_on_what_it_was_given(path_id: str) -> None:
    """A stage that is not judged, or one blamed for what was changed before it: one output of the reference changed."""
    path = find_path(path_id)
    contract = path.contract("suite")
    case = list(campaign_cases(path, "suite", 2, 0))[1]
    experts = path.experts(case)
    right = {}
    for name, value in expected_outputs(path, case, contract).items():
        owned = path.output(name).owned(experts)
        owned = owned.view(-1, *[1] * (value.dim() - 1)) if owned.dim() == 1 else owned
        filled = torch.zeros_like(value).contiguous()
        filled.view(torch.uint8).fill_(FILL_BYTE)
        right[name] = torch.where(owned.expand_as(value), value, filled)
    stages = bisect(path, case, contract, right)
    assert first_wrong(stages) is None
    assert {finding.output for stage in stages for finding in stage.findings} == set(right)
    for stage in stages:
        name = stage.findings[-1].output
        changed = {**right, name: right[name].clone()}
        owned = path.output(name).owned(experts)
        owned = owned.view(-1, *[1] * (right[name].dim() - 1)) if owned.dim() == 1 else owned
        place = tuple(owned.expand_as(right[name]).nonzero()[0].tolist())
        changed[name][place] = 1 - changed[name][place]
        wrong = first_wrong(bisect(path, case, contract, changed))
        assert wrong is not None
        assert wrong.name == stage.name


def test_the_command_bisects(tmp_path: Path) -> None:
    """`run --bisect` on a right kernel: every stage right, exit code 0."""
    case = list(campaign_cases(find_path("relu.fwd.nvfp4"), "suite", 2, 0))[1]
    case.save(tmp_path / "case.json")
    result = CliRunner().invoke(app, ["run", os.fspath(tmp_path / "case.json"), "--bisect", "--device", DEVICE])
    assert result.exit_code == 0, result.output
    assert [line.split(":")[0] for line in result.output.splitlines()[-5:]] == [
        "activation",
        "amax",
        "scales",
        "codes",
        "nothing unexplained",
    ]
