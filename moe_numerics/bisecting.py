"""Finds the first stage of a composed path that is wrong: each stage is judged on what the kernel itself gave it.

    activation    out, amax, dprob, dbias                       from the inputs
    amax          the amax of each NVFP4 copy                   from the kernel's own out
    scales        block scales                                  from the kernel's own out and amax
    codes         codes                                         from the kernel's own out and amax

A stage that only passes on what an earlier one got wrong is right by this measure. Blocks' scales come before codes, so
codes are at fault only where scales are right. A path that is not composed has the stages that it writes: amax, scales
and codes, or its one result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from moe_numerics.cases import Case
from moe_numerics.findings import Finding
from moe_numerics.operations import ActivationThenNvfp4, Nvfp4Copies
from moe_numerics.paths import Path
from moe_numerics.reference import grouped_nvfp4, hadamard, nvfp4
from moe_numerics.reference.contract import Contract
from moe_numerics.reference.scale_layout import swizzle
from moe_numerics.running import compare_outputs, expected_outputs

__all__ = ["Stage", "bisect", "first_wrong"]


@dataclass(frozen=True)
class Stage:
    """One stage: its name, and a finding for each output that it writes."""

    name: str
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing is unexplained."""
        return all(finding.passed for finding in self.findings)


def _given_amax(path: Path, case: Case, contract: Contract, x: Tensor, got: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The copies of x by the reference, their global scales from the kernel's own amax."""
    operation = path.operation.copies if isinstance(path.operation, ActivationThenNvfp4) else path.operation
    assert isinstance(operation, Nvfp4Copies)
    recipe, experts = operation.recipe, path.experts(case)
    results: dict[str, Tensor] = {}
    for name, axis, wanted, stream in (
        ("rowwise", -1, recipe.rowwise, grouped_nvfp4.ROWWISE_STREAM),
        ("colwise", -2, recipe.colwise, grouped_nvfp4.COLWISE_STREAM),
    ):
        if not wanted:
            continue
        values, rows = x, experts
        if axis == -2 and recipe.rotated:
            values, rows = hadamard.rotate(x, -2, contract=contract, experts=experts), experts.blocks(nvfp4.BLOCK)
        copy = nvfp4.quantize(
            values,
            axis,
            got[f"amax_{name}"],
            contract,
            experts=rows,
            seed=case.seed if recipe.stochastic else None,
            tensor=stream,
            block2d=recipe.block2d,
            four_over_six=recipe.four_over_six,
            scale_max=recipe.scale_max,
            row_scaled=recipe.row_scaled and axis == -1,
        )
        results[f"codes_{name}"] = copy.codes
        results[f"scales_{name}"] = swizzle(copy.scales, contract.scale_padding) if recipe.swizzled else copy.scales
    return results


def bisect(path: Path, case: Case, contract: Contract, got: Mapping[str, Tensor]) -> tuple[Stage, ...]:
    """Every stage of the path in order, judged on what the kernel gave it. got: the kernel's outputs, on the CPU."""
    tensors = case.tensors(path.inputs)
    expected = expected_outputs(path, case, contract)
    if isinstance(path.operation, ActivationThenNvfp4):
        expected |= path.operation.copies.reference_of(got["out"], case, tensors, contract)
        expected |= _given_amax(path, case, contract, got["out"], got)
    elif isinstance(path.operation, Nvfp4Copies):
        expected |= _given_amax(path, case, contract, tensors["x"], got)
    findings = {finding.output: finding for finding in compare_outputs(path, case, expected, got, filled=True)}
    composed = isinstance(path.operation, ActivationThenNvfp4)
    stages: dict[str, list[Finding]] = {}
    for name, finding in findings.items():
        kind, _, copy = name.partition("_")
        stage = kind if kind in ("scales", "codes") or (kind == "amax" and (copy or not composed)) else "activation"
        stages.setdefault(stage, []).append(finding)
    order = ("activation", "amax", "scales", "codes")
    return tuple(Stage(name, tuple(stages[name])) for name in order if name in stages)


def first_wrong(stages: tuple[Stage, ...]) -> Stage | None:
    """The first stage with an unexplained bit, None where there is none."""
    return next((stage for stage in stages if not stage.passed), None)
