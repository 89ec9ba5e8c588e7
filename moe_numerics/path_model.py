"""What a path is: a reference, a fused kernel, what their inputs and outputs are, and where it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from moe_numerics.accumulators import architecture, on_target
from moe_numerics.cases import Case, CaseError, TensorSpec
from moe_numerics.contract import ALIASES, PROFILES, profile
from moe_numerics.drawing import MILD_EDITS, Space
from moe_numerics.findings import Grade
from moe_numerics.operations import Operation
from moe_numerics.product_values import MILD_FACTOR_KINDS
from moe_numerics.reference import mxfp8, nvfp4
from moe_numerics.reference.contract import Contract
from moe_numerics.reference.ragged import Experts

__all__ = ["DEVICES", "TARGETS", "OutputSpec", "Path", "PathError"]

TARGETS = ("sm_90a", "sm_100a")
"""Targets that kernels are compiled for: what a path has unless it says less."""

DEVICES = (*(f"virtual:{target}" for target in TARGETS), "cuda")


_PRODUCT_SPACE: dict[str, Any] = {
    "max_experts": 8,
    "max_rows": 512,
    "max_hidden": 256,
    "max_depth": 256,
    "max_elements": 6_000,
    "big_elements": 30_000,
}
"""What keeps a case on a virtual GPU below a second: a matrix product costs rows times hidden times depth."""


_QUANTISED_SPACE: dict[str, Any] = {
    "factor_kinds": MILD_FACTOR_KINDS,
    "factor_exponents": (0, 0, 0, -3, 2),
    "edit_bits": MILD_EDITS,
    "allow_specials": False,
}
"""Where factors are quantised: what bfloat16 holds of codes times scales, which the ends of the E8M0 range are not."""


class PathError(ValueError):
    """No such path, or a path that does not take what it was given."""


@dataclass(frozen=True)
class OutputSpec:
    """One output: its number format, its shape in words, and what its rows are.

    rows: "token" (row of the buffer), "block" (a column-wise block of 32 rows of one expert), "expert", "all" (every
    element is owned), "buffer" (the same, of scales swizzled over the whole buffer), or "transposed": rows are columns
    of the buffer, and each `columns_per_block` columns belong to a block of 16 rows of one expert.
    """

    name: str
    format: str
    shape: str
    rows: str
    columns_per_block: int = 0

    @property
    def dtype(self) -> str:
        """The torch dtype that holds it."""
        return self.format if self.format in ("bfloat16", "float32") else "uint8"

    def owned(self, experts: Experts, device: torch.device | str = "cpu") -> torch.Tensor:
        """bool, broadcastable to the output: what the path writes."""
        if self.rows == "token":
            return experts.valid_rows(device)
        if self.rows == "block":
            return experts.owned_colwise_rows(mxfp8.BLOCK, device)
        if self.rows == "transposed":
            return (
                experts.owned_colwise_rows(nvfp4.BLOCK, device).repeat_interleave(self.columns_per_block).unsqueeze(0)
            )
        return torch.ones(1, dtype=torch.bool, device=device)

    def row_expert(self, experts: Experts, device: torch.device | str = "cpu") -> torch.Tensor | None:
        """int64 [rows]: the expert of each row, -1 for none; None where rows have no expert."""
        if self.rows in ("all", "buffer", "transposed"):
            return None
        if self.rows == "token":
            return experts.row_expert(device)
        if self.rows == "expert":
            return torch.arange(len(experts), dtype=torch.int64, device=device)
        owner = torch.full((experts.colwise_rows(mxfp8.BLOCK),), -1, dtype=torch.int64, device=device)
        for expert, count in enumerate(experts.counts):
            if count:
                first = experts.colwise_row(expert, 0, mxfp8.BLOCK)
                owner[first : first - (-count // mxfp8.BLOCK)] = expert
        return owner


@dataclass(frozen=True)
class Path:
    """One thing that is verified.

    profiles: name -> the grade that its contract is offered at. layouts: those of gate and up that the path takes.
    multiple: what hidden sizes are multiples of. operands: what its matrix product multiplies, a key of
    `accumulators.ACCUMULATORS`, None without one; depth_multiple: what the size that it sums is a multiple of, else 0.
    overrides: choices of its contracts that are the path's own, whatever the profile says. targets: those that its
    kernels are compiled for. extended: whether a run of everything on virtual GPUs leaves it out, because others have
    the same parts and it takes seconds to compile. choices: fields of `Space` that differ from what its operands ask
    for.
    """

    id: str
    summary: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[OutputSpec, ...]
    profiles: Mapping[str, Grade]
    operation: Operation
    layouts: tuple[str, ...] = ("halves",)
    multiple: int = 32
    operands: str | None = None
    depth_multiple: int = 0
    overrides: Mapping[str, Any] = field(default_factory=dict)
    targets: tuple[str, ...] = TARGETS
    extended: bool = False
    choices: Mapping[str, Any] = field(default_factory=dict)

    @property
    def maths(self) -> str:
        """That choice of its contracts: every profile is in exact maths."""
        return str(self.overrides.get("maths", "exact"))

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices that run it: `cuda` stands for a GPU of one of its targets."""
        return (*(f"virtual:{target}" for target in self.targets), "cuda")

    def lacking(self, target: str) -> str:
        """Why it has no kernel for a target, in words; empty where it has one."""
        if self.operands is None:
            return ""
        known = {architecture(each) for each in self.targets}
        return "" if architecture(target) in known else f"no kernel for {target}: it has {', '.join(self.targets)}"

    def output(self, name: str) -> OutputSpec:
        """The output of this name. PathError: there is none."""
        for spec in self.outputs:
            if spec.name == name:
                return spec
        known = ", ".join(spec.name for spec in self.outputs)
        raise PathError(f"{self.id} has no output {name!r}: expected one of {known}")

    def contract(self, name: str, target: str = "sm_90a") -> Contract:
        """The contract of a profile of this path, with the path's own choices and the target's accumulator.

        PathError: a profile that the path does not offer.
        """
        full = ALIASES.get(name, name)
        if full not in PROFILES:
            raise PathError(f"profile {name!r} is unknown: expected one of {', '.join((*ALIASES, *PROFILES))}")
        if full not in self.profiles:
            raise PathError(f"{self.id} is not offered under profile {name!r}: it has {', '.join(self.profiles)}")
        return on_target(profile(full).replace(**self.overrides), target, self.operands)

    def check(self, case: Case) -> None:
        """CaseError: columns, a depth, a layout, an option or values that the path does not take."""
        for name, size, multiple in (
            ("hidden", case.hidden, self.multiple),
            ("depth", case.depth, self.depth_multiple),
        ):
            if size and not multiple:
                raise CaseError(f"{name} = {size}: {self.id} has no {name}")
            if multiple and (size == 0 or size % multiple):
                raise CaseError(f"{name} = {size}: {self.id} takes positive multiples of {multiple}")
        kinds = {layout.partition(":")[0] for layout in self.layouts}
        if case.layout.partition(":")[0] not in kinds:
            raise CaseError(f"layout = {case.layout!r}: {self.id} takes {', '.join(self.layouts)}")
        for name in case.options:
            raise CaseError(f"options.{name} is no option of {self.id}: it has none")
        case.tensors(self.inputs)

    def outputs_of(self, case: Case) -> tuple[OutputSpec, ...]:
        """The outputs that this case has: dprob only where it has probabilities."""
        present = self.operation.shapes(case)
        return tuple(spec for spec in self.outputs if spec.name in present)

    def experts(self, case: Case) -> Experts:
        """Which rows each expert of the case owns."""
        return Experts.from_offsets(case.offsets, case.counts if case.padded else None, case.capacity, case.alignment)

    def space(self, profile: str) -> Space:
        """The cases that are drawn for this path."""
        space = Space(self.id, self.inputs, profile=profile, layouts=self.layouts, multiple=self.multiple)
        if not self.depth_multiple:
            return space
        quantised = _QUANTISED_SPACE if self.operands != "bf16" else {}
        chosen = {**_PRODUCT_SPACE, **quantised, **self.choices}
        return replace(space, depth_multiple=self.depth_multiple, **chosen)
