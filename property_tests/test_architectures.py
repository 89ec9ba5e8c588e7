"""The same cases on Hopper and Blackwell: what is the same, what differs by accumulator, and that the report says so.

Faults this catches: a contract whose accumulator does not follow the target, a difference that is counted as none, a
page that leaves an output out.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from moe_numerics import accumulators, architectures, campaign, cli
from moe_numerics.paths import all_paths, find_path

BF16 = find_path("grouped_gemm.dgrad.bf16")
NVFP4 = find_path("grouped_gemm.wgrad.grad_nvfp4")


def test_a_contract_has_the_accumulator_of_its_target() -> None:
    for path in all_paths():
        hopper, blackwell = (path.contract("suite", target).accumulator for target in ("sm_90a", "sm_100a"))
        if path.operands is None:
            assert hopper == blackwell
        else:
            assert hopper == "sm_90.bf16"
            assert blackwell == accumulators.ACCUMULATORS["sm_100"][path.operands]
    assert find_path("grouped_mlp.step.mxfp8").contract("suite", "sm_103a").accumulator == "sm_100.mxf8f6f4"
    with pytest.raises(ValueError, match="target 'sm_80' has no matrix products here: expected sm_90a"):
        BF16.contract("suite", "sm_80")


def test_a_path_says_which_targets_it_lacks() -> None:
    assert BF16.lacking("sm_90a") == BF16.lacking("sm_103a") == ""
    assert "no kernel for sm_120a" in BF16.lacking("sm_120a")
    assert find_path("swiglu.fwd.bf16").lacking("sm_120a") == ""


def test_a_device_without_a_kernel_skips_the_path_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper_only = dataclasses.replace(BF16, targets=("sm_90a",))
    assert hopper_only.devices == ("virtual:sm_90a", "cuda")
    monkeypatch.setattr(campaign, "find_path", lambda _: hopper_only)
    result = campaign.run_task(campaign.Task(BF16.id, "virtual:sm_100a", "suite", 1, 0)).result
    assert (result.status, result.cases) == ("skipped", 0)
    assert result.reason == "no kernel for sm_100a: it has sm_90a"


def test_bfloat16_is_the_same_on_both_and_block_scaled_operands_are_not() -> None:
    same, other = (architectures.compare_path(path, 3) for path in (BF16, NVFP4))
    assert same.same
    assert same.accumulators == ("sm_90.bf16", "sm_100.bf16")
    assert other.accumulators == ("sm_90.bf16", "sm_100.mxf4nvf4")
    (finding,) = other.findings
    assert 0 < finding.bit_equal < finding.elements
    assert finding.max_ulp is not None
    page = architectures.as_markdown([same, other], kernels=False)
    assert f"- `{BF16.id}`" in page
    assert f"| `{NVFP4.id}` | sm_90.bf16 / sm_100.mxf4nvf4 | `out` |" in page
    data = architectures.as_json([same, other], kernels=False)
    assert data["paths"][1]["outputs"][0]["bit_equal"] == finding.bit_equal


def test_kernels_differ_where_the_references_do() -> None:
    references, kernels = (architectures.compare_path(NVFP4, 1, kernels=kernels) for kernels in (False, True))
    (expected,), (found,) = references.findings, kernels.findings
    assert (found.elements, found.bit_equal, found.max_ulp) == (expected.elements, expected.bit_equal, expected.max_ulp)


def test_the_command_writes_both_forms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("page.md", "data.json"):
        cli.architectures(paths=BF16.id, examples=1, seed=0, kernels=False, out=tmp_path / name)
    assert f"{BF16.id}: the same" in capsys.readouterr().out.replace("\n", " ")
    assert f"- `{BF16.id}`" in (tmp_path / "page.md").read_text()
    assert json.loads((tmp_path / "data.json").read_text())["paths"][0]["id"] == BF16.id
