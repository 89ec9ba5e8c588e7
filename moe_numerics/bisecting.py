"""Finds the first stage of a composed path that is wrong: each stage is judged on what the kernel itself gave it.

    product       preactivation, dactivation; out of a product  from the inputs
    activation    out, amax, dprob, dbias                       from the inputs
    amax          the amax of each NVFP4 copy                   from the kernel's own out
    scales        block scales                                  from the kernel's own out and amax
    codes         codes                                         from the kernel's own out and amax

A stage that only passes on what an earlier one got wrong is right by this measure. Blocks' scales come before codes, so
codes are at fault only where scales are right. MXFP8 copies come from float32 values that nobody writes: where some
values give all that a kernel wrote, row-wise and column-wise and the amax, they were quantised rightly, and a
difference from the reference is the activation's. A path that is not composed has the stages that it writes. A whole
training step has those of `step_bisecting`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_numerics.bounds import FLOAT32_MAX, Enclosure
from moe_numerics.cases import Case
from moe_numerics.explaining import explain_mxfp8
from moe_numerics.findings import Finding
from moe_numerics.gemm_operations import MatmulQuantize, Product, WeightGradient
from moe_numerics.operations import ActivationForward, ActivationThenNvfp4, Nvfp4Copies
from moe_numerics.paths import Path
from moe_numerics.reference import grouped_nvfp4, hadamard, nvfp4
from moe_numerics.reference.contract import Contract
from moe_numerics.reference.scale_layout import swizzle
from moe_numerics.running import compare_outputs, expected_outputs
from moe_numerics.step_bisecting import stages_of_step
from moe_numerics.step_operations import TrainingStep

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
    if isinstance(path.operation, TrainingStep):
        expected, names = stages_of_step(path.operation, case, tensors, contract, got)
        return _by_stage(_judged(path, case, expected, got), names)
    expected = expected_outputs(path, case, contract)
    if isinstance(path.operation, ActivationThenNvfp4):
        expected |= path.operation.copies.reference_of(got["out"], case, tensors, contract)
        expected |= _given_amax(path, case, contract, got["out"], got)
    elif isinstance(path.operation, Nvfp4Copies):
        expected |= _given_amax(path, case, contract, tensors["x"], got)
    findings = _judged(path, case, expected, got)
    return _by_stage(findings, _stage_names(path, case, contract, got, findings))


def _judged(path: Path, case: Case, expected: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> dict[str, Finding]:
    return {finding.output: finding for finding in compare_outputs(path, case, expected, got, filled=True)}


def _by_stage(findings: Mapping[str, Finding], names: Mapping[str, str]) -> tuple[Stage, ...]:
    """Stages in the order in which `names` first has them; names: output -> stage."""
    present = [name for name in names if name in findings]
    return tuple(
        Stage(stage, tuple(findings[name] for name in present if names[name] == stage))
        for stage in dict.fromkeys(names[name] for name in present)
    )


def _stage_names(
    path: Path, case: Case, contract: Contract, got: Mapping[str, Tensor], findings: Mapping[str, Finding]
) -> dict[str, str]:
    """The stage of each output, in order."""
    composed = isinstance(path.operation, ActivationThenNvfp4)
    quantised = isinstance(path.operation, ActivationForward | MatmulQuantize) and path.operation.element is not None
    of_product = isinstance(path.operation, Product | WeightGradient)
    wrong = any(not each.passed for name, each in findings.items() if name.startswith(("codes_", "scales_")))
    well_quantised = quantised and wrong and _well_quantised(path, case, contract, got)
    stages = {}
    for name in findings:
        kind, _, copy = name.partition("_")
        if of_product or name in ("preactivation", "dactivation"):
            stages[name] = "product"
        elif kind in ("scales", "codes"):
            stages[name] = "activation" if well_quantised else kind
        else:
            stages[name] = "amax" if kind == "amax" and (copy or not composed) and not quantised else "activation"
    order = ("product", "activation", "amax", "scales", "codes")
    return dict(sorted(stages.items(), key=lambda item: order.index(item[1])))


def _well_quantised(path: Path, case: Case, contract: Contract, got: Mapping[str, Tensor]) -> bool:
    """Whether some values give every code, scale and amax that was written; no values do where one is NaN."""
    operation, experts = path.operation, path.experts(case)
    assert isinstance(operation, ActivationForward | MatmulQuantize)
    assert operation.element is not None
    shape = got["codes_rowwise"].shape
    anything = Enclosure(
        torch.zeros(shape, dtype=torch.float64),
        torch.full(shape, FLOAT32_MAX, dtype=torch.float64),
        torch.ones(shape, dtype=torch.bool),
    )
    for name, verdict in explain_mxfp8(anything, got, operation.element, contract, experts).items():
        owned = path.output(name).owned(experts)
        owned = owned.view(-1, 1) if owned.dim() == 1 and verdict.explained.dim() > 1 else owned
        if bool((~verdict.explained & owned).any()):
            return False
    return True


def first_wrong(stages: tuple[Stage, ...]) -> Stage | None:
    """The first stage with an unexplained bit, None where there is none."""
    return next((stage for stage in stages if not stage.passed), None)
