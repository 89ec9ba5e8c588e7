"""Compares a kernel's outputs with derived bounds instead of bits: the grade "bounded", for kernels of others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from moe_numerics import activation_bounds, gemm_bounds
from moe_numerics.bounds import Arithmetic, BoundError, Enclosure, expert_sum, largest
from moe_numerics.cases import Case
from moe_numerics.compare import compare_output, unchecked_output
from moe_numerics.devices import fill_bits
from moe_numerics.explaining import Verdict, explain_mxfp8
from moe_numerics.findings import Finding
from moe_numerics.gemm_operations import MatmulQuantize, Product, WeightGradient
from moe_numerics.operations import (
    ActivationBackward,
    ActivationForward,
    ActivationThenNvfp4,
    Mxfp8Copies,
    Nvfp4Copies,
)
from moe_numerics.paths import OutputSpec, Path
from moe_numerics.reference.contract import Contract
from moe_numerics.reference.formats import FloatFormat
from moe_numerics.reference.ragged import Experts

__all__ = ["Enclosed", "compare_bounded", "enclose"]

UNDECIDED = "bounds do not decide an Inf in the inputs, nor products that may leave the range of float32"


@dataclasses.dataclass(frozen=True)
class Enclosed:
    """What bounds say of one case: the values that are quantised to `element`, and float outputs by name.

    Without values there is no rounding step before those of the contract, and no bit of another output may differ.
    """

    values: Enclosure | None
    element: FloatFormat | None
    floats: Mapping[str, Enclosure]


def enclose(path: Path, case: Case, contract: Contract, arithmetic: Arithmetic) -> Enclosed:
    """The enclosures of a path's outputs for a case. BoundError: none are derived for this path."""
    operation = path.operation.activation if isinstance(path.operation, ActivationThenNvfp4) else path.operation
    tensors, experts = case.tensors(path.inputs), path.experts(case)
    if isinstance(operation, Mxfp8Copies | Nvfp4Copies):
        # What is quantised is the input: no rounding step comes before the contract's, so nothing may differ.
        return Enclosed(None, None, {})
    if isinstance(operation, Product | WeightGradient):
        return Enclosed(
            None, None, {"out": gemm_bounds.product_of(operation, case, tensors, experts, contract, arithmetic)}
        )
    floats: dict[str, Enclosure] = {}
    if isinstance(operation, MatmulQuantize):
        values, floats = gemm_bounds.layer_of(operation, case, tensors, experts, contract, arithmetic)
    elif isinstance(operation, ActivationForward):
        factors = activation_bounds.probabilities(tensors, experts)
        x = activation_bounds.given(
            tensors, "x" if operation.activation.inputs == 1 else "gate_up", experts, arithmetic
        )
        if isinstance(operation, ActivationBackward):
            grad = activation_bounds.given(tensors, "grad", experts, arithmetic)
            values, floats["dprob"] = activation_bounds.backward(
                operation.activation, grad, x, case.layout, arithmetic, factors
            )
            if operation.bias:
                floats["dbias"] = expert_sum(values, experts)
        else:
            values = activation_bounds.forward(operation.activation, x, case.layout, arithmetic, factors)
    else:
        raise BoundError(f"{path.id}: no enclosures are derived for it")
    return _written(values, operation.element, floats, experts, contract)


def _written(
    values: Enclosure,
    element: FloatFormat | None,
    floats: dict[str, Enclosure],
    experts: Experts,
    contract: Contract,
) -> Enclosed:
    """With what `elementwise.write_values` gives for the values."""
    if element is None:
        floats["out"] = values.converted(mantissa_bits=7)
    staged = element is not None and contract.staging == "bfloat16"
    floats["amax"] = largest(values.converted(mantissa_bits=7) if staged else values, experts)
    return Enclosed(values, element, floats)


def compare_bounded(
    path: Path,
    case: Case,
    expected: Mapping[str, Tensor],
    got: Mapping[str, Tensor],
    contract: Contract,
    arithmetic: Arithmetic,
    *,
    filled: bool = False,
) -> tuple[Finding, ...]:
    """A finding for each output: a difference is explained inside the derived bound, else unexplained.

    Outputs of NVFP4 copies after an activation are compared with the reference of what the kernel itself wrote as
    `out`, bit by bit. Elements that the bounds do not decide, and that differ, are unchecked. filled: as for
    `running.compare_outputs`. BoundError: no bounds are derived for the path under this arithmetic.
    """
    enclosed = enclose(path, case, contract, arithmetic)
    experts = path.experts(case)
    verdicts: dict[str, Verdict] = {}
    if enclosed.element is not None and enclosed.values is not None:
        verdicts = explain_mxfp8(enclosed.values, got, enclosed.element, contract, experts)
    if isinstance(path.operation, ActivationThenNvfp4) and "out" in got:
        tensors = case.tensors(path.inputs)
        copies = path.operation.copies.reference_of(got["out"], case, tensors, contract)
        expected = {**expected, **copies}
    findings = []
    for spec in path.outputs_of(case):
        if spec.name not in got:
            findings.append(unchecked_output(spec.name, expected[spec.name].numel(), "the kernel does not return it"))
            continue
        enclosure = enclosed.floats.get(spec.name)
        verdict = verdicts.get(spec.name)
        fill = fill_bits(got[spec.name].dtype) if filled else None
        findings.append(_finding(spec, experts, expected[spec.name], got[spec.name], enclosure, verdict, fill))
    return tuple(findings)


def _finding(
    spec: OutputSpec,
    experts: Experts,
    expected: Tensor,
    got: Tensor,
    enclosure: Enclosure | None,
    verdict: Verdict | None,
    fill: int | None,
) -> Finding:
    skipped = 0

    def explains(mask: Tensor) -> Tensor:
        """What differs and is explained, or is not decided."""
        nonlocal skipped
        undecided = torch.zeros_like(mask)
        inside = torch.zeros_like(mask)
        if verdict is not None:
            undecided, inside = mask & ~verdict.decided, mask & verdict.explained
        elif enclosure is not None:
            undecided = mask & ~enclosure.decided
        skipped = int((undecided & ~inside).sum())
        return inside | undecided

    bounded = enclosure is not None and verdict is None
    finding = compare_output(
        spec.name,
        expected,
        got,
        format=spec.format,
        owned=spec.owned(experts),
        row_expert=spec.row_expert(experts),
        fill=fill,
        oracle=_decided(enclosure.value, enclosure) if bounded and enclosure is not None else None,
        bound=_decided(enclosure.error, enclosure) if bounded and enclosure is not None else None,
        explains=explains if enclosure is not None or verdict is not None else None,
    )
    if not skipped:
        return finding
    return dataclasses.replace(
        finding, explained=finding.explained - skipped, unchecked=finding.unchecked + skipped, reason=UNDECIDED
    )


def _decided(part: Tensor, enclosure: Enclosure) -> Tensor:
    """NaN where nothing is decided, so that it counts neither as inside a bound nor for sharpness."""
    return part.masked_fill(~enclosure.decided, float("nan"))
