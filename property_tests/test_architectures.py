"""The same cases on Hopper and Blackwell: what is the same, what differs by accumulator, and that the report says so.

Faults this catches: a contract whose accumulator does not follow the target, a difference that is counted as none, a
page that leaves an output out.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch

from moe_numerics import accumulators, architectures, campaign, cli
from moe_numerics.cases import Case, Values
from moe_numerics.checking import check, kernel
from moe_numerics.paths import PathError, all_paths, find_path

BF16 = find_path("grouped_gemm.dgrad.bf16")
WIDE = find_path("grouped_gemm.dgrad.bf16.f32")
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


def test_a_callable_is_told_which_accumulator_fits_it() -> None:
    """What somebody else's kernel on Blackwell gives, judged by Hopper's accumulator, and what plain PyTorch gives."""
    blackwell = NVFP4.contract("suite", "sm_100a")

    @kernel(NVFP4.id, inputs={"grad": "grad", "x": "x", "offsets": "offsets"}, outputs={"out": 0})
    def scaled(grad: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        tensors = {"grad": grad, "x": x, "offsets": offsets}
        return NVFP4.operation.reference(case, tensors, blackwell)["out"]

    case = Case(NVFP4.id, (40, 17), 64, depth=64, values={name: Values("spread", 7) for name in ("grad", "x")})
    judged = check(scaled, cases=case)
    assert not judged.passed
    assert judged.nearest == "100% bit-equal under accumulator=sm_100.mxf4nvf4"
    assert check(scaled, cases=case, contract=blackwell).passed

    @kernel(WIDE.id, inputs={"grad": "grad", "weights": "weights", "offsets": "offsets"}, outputs={"out": "out"})
    def plain(grad: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor) -> dict[str, torch.Tensor]:
        bounds = itertools.pairwise(offsets.tolist())
        return {"out": torch.cat([grad[a:b].float() @ weights[e].float() for e, (a, b) in enumerate(bounds)])}

    case = Case(WIDE.id, (40, 17), 64, depth=64, values={name: Values("spread", 7) for name in ("grad", "weights")})
    (finding,) = check(plain, cases=case)
    # Sums in float32 are rounded in other places than a tensor core truncates.
    assert finding.elements // 10 < finding.unexplained < finding.elements
    with pytest.raises(PathError, match="inputs lack weights"):
        kernel(BF16.id, inputs={"grad": "grad", "offsets": "offsets"}, outputs={"out": 0})


def test_verify_leaves_extended_paths_out_unless_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    planned: list[set[str]] = []

    def plan_only(plan: campaign.Plan, progress: object) -> None:
        planned.append(set(plan.paths))
        raise KeyboardInterrupt

    monkeypatch.setattr(campaign, "verify", plan_only)
    for paths in (None, "*"):
        with pytest.raises(KeyboardInterrupt):
            cli.verify(device=["virtual:sm_90a"], paths=paths, examples=1, out=tmp_path / "report")
    brief, everything = planned
    assert everything == {path.id for path in all_paths()}
    assert everything - brief == {path.id for path in all_paths() if path.extended}
    # Each kind of launch is in every run; a step is made of them.
    for pattern in ("grouped_gemm.matmul.", "grouped_gemm.wgrad.", "grouped_mlp.fc1.", "grouped_mlp.fc2."):
        assert any(pattern in name for name in brief), pattern
