"""Running one case: the reference's outputs, a kernel's outputs, and a finding for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from moe_numerics.bounded import compare_bounded
from moe_numerics.bounds import Arithmetic
from moe_numerics.cases import Case
from moe_numerics.compare import compare_output, unchecked_output
from moe_numerics.devices import Device, KernelFault, fill_bits
from moe_numerics.findings import Finding
from moe_numerics.paths import Path
from moe_numerics.reference.contract import Contract
from moe_numerics.report.model import Kernel

__all__ = ["CaseResult", "References", "compare_outputs", "expected_outputs", "run_case"]

KEPT_REFERENCES = 32


@dataclass(frozen=True)
class CaseResult:
    """What one case gave: a finding for each output, or the fault that ended it."""

    case: Case
    findings: tuple[Finding, ...]
    kernels: tuple[Kernel, ...] = ()
    fault: str = ""

    @property
    def passed(self) -> bool:
        """Whether nothing is unexplained."""
        return not self.fault and all(finding.passed for finding in self.findings)


def expected_outputs(path: Path, case: Case, contract: Contract) -> dict[str, torch.Tensor]:
    """The reference's outputs for a case, on the CPU."""
    return path.operation.reference(case, case.tensors(path.inputs), contract)


class References:
    """The reference's outputs of the latest cases of a path, so that devices which run the same cases share them.

    Nothing may write to the tensors that `outputs` gives.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[tuple[str, Contract], dict[str, torch.Tensor]] = {}

    def outputs(self, case: Case, contract: Contract) -> dict[str, torch.Tensor]:
        """As `expected_outputs`."""
        key = (case.digest(), contract)
        if key not in self._known:
            if len(self._known) >= KEPT_REFERENCES:
                del self._known[next(iter(self._known))]
            self._known[key] = expected_outputs(self.path, case, contract)
        return self._known[key]


def compare_outputs(
    path: Path,
    case: Case,
    expected: Mapping[str, torch.Tensor],
    got: Mapping[str, torch.Tensor],
    *,
    filled: bool,
) -> tuple[Finding, ...]:
    """A finding for each output of the path. Outputs that `got` lacks are unchecked.

    filled: the buffers of `got` were filled with the pattern of `devices.fill_bits`, which must stand wherever the
    path owns nothing; else unowned elements may hold anything.
    """
    experts = path.experts(case)
    findings = []
    for spec in path.outputs_of(case):
        reference = expected[spec.name]
        if spec.name not in got:
            findings.append(unchecked_output(spec.name, reference.numel(), "the kernel does not return it"))
            continue
        value = got[spec.name]
        findings.append(
            compare_output(
                spec.name,
                reference.to(value.device),
                value,
                format=spec.format,
                owned=spec.owned(experts, value.device),
                row_expert=spec.row_expert(experts, value.device),
                fill=fill_bits(value.dtype) if filled else None,
            )
        )
    return tuple(findings)


def run_case(
    path: Path, case: Case, contract: Contract, device: Device, references: References | None = None
) -> CaseResult:
    """Run the fused kernel on one case and compare every output; the device is active.

    Bit by bit, or in fast maths within the bounds of approximate instructions. references: of the path, where other
    devices run the same cases. DeviceError: the path could not run.
    """
    try:
        outcome = device.run(path, case, contract)
    except KernelFault as fault:
        return CaseResult(case, (), fault=str(fault))
    expected = (references or References(path)).outputs(case, contract)
    if contract.maths == "fast":
        findings = compare_bounded(path, case, expected, outcome.outputs, contract, Arithmetic("fast"), filled=True)
    else:
        findings = compare_outputs(path, case, expected, outcome.outputs, filled=True)
    return CaseResult(case, findings, outcome.kernels)
