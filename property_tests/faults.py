"""Numerics faults planted in kernels that are otherwise right; `fault_catalogue` lists them.

A fault changes one thing: lines of a kernel's PTX, a choice that the kernel is compiled for, the operation that runs in
its place, what it is given, or what it leaves. Many are faults that projects reported in public; `seen_in` says where.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from moe_numerics.reference.contract import Contract

from moe_numerics.cases import Case, TensorSpec
from moe_numerics.devices import Device, Outcome
from moe_numerics.operations import Operation
from moe_numerics.paths import Path
from moe_numerics.virtual_gpu.gpu import VirtualGPU

Outputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Fault:
    """One fault of one path. kind: "ptx", "choice", "operation", "input", "output", or "mutant" (see `ptx_mutants`).

    pattern, replacement, limit: of `re.sub` on the PTX; limit 0 changes every place. choices: of the contract.
    operation: runs in the place of the path's. inputs: changes the tensors that the kernel gets; fields: of the case.
    output: changes what the kernel left. stage: of a composed path, the one that is wrong. schedule: as of `Task`.
    """

    id: str
    kind: str
    path: str
    seen_in: str = ""
    pattern: str = ""
    replacement: str | Callable[[re.Match[str]], str] = ""
    limit: int = 0
    choices: Mapping[str, Any] = field(default_factory=dict)
    operation: Operation | None = None
    inputs: Callable[[Outputs], None] | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    output: Callable[[Outputs, Path, Case], None] | None = None
    stage: str = ""
    schedule: str | int = "fast"
    equivalent: str = ""

    def edit(self, ptx: str) -> tuple[str, int]:
        """The module with the fault, and in how many places it changed."""
        return re.subn(self.pattern, self.replacement, ptx, count=self.limit, flags=re.DOTALL)

    @property
    def edits(self) -> bool:
        """Whether it changes PTX."""
        return bool(self.pattern)


@dataclass(frozen=True, repr=False)
class ChangedCase(Case):
    """A case whose tensors are changed on their way to the kernel."""

    change: Callable[[Outputs], None] = field(default=lambda tensors: None, compare=False)

    def tensors(self, inputs: Sequence[TensorSpec], device: str = "cpu") -> Outputs:
        made = super().tensors(inputs, device)
        self.change(made)
        return made


@dataclass(frozen=True)
class FaultyDevice:
    """A device whose kernels have a fault."""

    inner: Device
    fault: Fault

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def evidence(self) -> str:
        return self.inner.evidence

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        with self.inner.activate():
            yield

    def run(self, path: Path, case: Case, contract: Contract) -> Outcome:
        fault = self.fault
        given = case
        if fault.inputs is not None or fault.fields:
            values = {item.name: getattr(case, item.name) for item in dataclasses.fields(Case)} | dict(fault.fields)
            given = ChangedCase(**values, change=fault.inputs or (lambda tensors: None))
        changed = dataclasses.replace(path, operation=fault.operation or path.operation)
        outcome = self.inner.run(changed, given, contract.replace(**fault.choices))
        outputs = {name: tensor.clone() for name, tensor in outcome.outputs.items()}
        if fault.output is not None:
            fault.output(outputs, path, case)
        return Outcome(outputs, outcome.kernels)


@contextlib.contextmanager
def ptx_fault(fault: Fault) -> Iterator[list[int]]:
    """Kernels launched inside the context have the fault's lines; the list holds how many places changed in each."""
    places: list[int] = []
    if not fault.edits:
        yield places
        return
    launch = VirtualGPU.launch_raw
    edited: dict[str, str] = {}

    def launch_edited(self: VirtualGPU, ptx: str, kernel: str, *arguments: Any, **options: Any) -> None:
        if ptx not in edited:
            edited[ptx], count = fault.edit(ptx)
            places.append(count)
        launch(self, edited[ptx], kernel, *arguments, **options)

    VirtualGPU.launch_raw = launch_edited  # type: ignore[method-assign]
    try:
        yield places
    finally:
        VirtualGPU.launch_raw = launch  # type: ignore[method-assign]
