"""Runs of paths for the property tests: which paths and devices, drawn cases, given tensors, and comparing."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import settings
from moe_numerics.reference.contract import Contract
from moe_numerics.reference.ragged import Experts

from moe_numerics.cases import Case, TensorSpec
from moe_numerics.compare import compare_output
from moe_numerics.devices import Device, Outcome, default_devices, open_device
from moe_numerics.drawing import Space
from moe_numerics.paths import OutputSpec, Path, all_paths, find_path
from moe_numerics.running import CaseResult, expected_outputs

VIRTUAL = ("virtual:sm_90a", "virtual:sm_100a")

QUICK_ACTIVATIONS = ("swiglu", "geglu_erf", "relu", "clamped_swiglu", "situglu")

QUICK_QUANTISERS = (
    "quantize.mxfp8_e4m3",
    "quantize.mxfp8_e5m2",
    "quantize.mxfp8_e4m3.32x32",
    "quantize.nvfp4.16x16",
    "quantize.nvfp4.rht.sr",
)

FEW = (
    "swiglu.fwd.mxfp8_e4m3",
    "swiglu.bwd.mxfp8_e4m3",
    "swiglu.bwd.bf16",
    "relu.fwd.bf16",
    "quantize.mxfp8_e5m2",
    "quantize.nvfp4.rht",
    "grouped_mlp.fc2.swiglu.bwd.mxfp8_e4m3",
)
"""Paths that between them have every kind of output, input and data flow."""


def thorough() -> bool:
    """Whether the profile asks for more than the quick run."""
    return settings.default is not None and settings.default.max_examples > 100


def kernel_examples() -> settings:
    """Settings for tests whose examples each launch kernels: a few, as each of them is thousands of elements."""
    assert settings.default is not None
    return settings(max_examples=max(4, settings.default.max_examples // 16))


def representative_paths() -> list[Path]:
    """Every path in the thorough profile; in the quick one some activations of every kind, and every kind of block."""
    wanted = {
        f"{name}.{way}.{form}"
        for name in QUICK_ACTIVATIONS
        for way in ("fwd", "bwd")
        for form in ("bf16", "mxfp8_e4m3")
    }
    wanted.update(QUICK_QUANTISERS)
    return [path for path in all_paths() if thorough() or path.id in wanted]


def few_paths() -> list[Path]:
    """Every path in the thorough profile, one of each kind in the quick one."""
    return list(all_paths()) if thorough() else [find_path(name) for name in FEW]


def elementwise(paths: Sequence[Path]) -> list[Path]:
    """Those without a matrix product: what the inputs hold is what is rounded and quantised."""
    return [path for path in paths if path.operands is None]


def kernel_devices() -> tuple[str, ...]:
    """Names of devices that run kernels: both virtual GPUs, and CUDA where there is one."""
    return tuple(dict.fromkeys((*VIRTUAL, *default_devices())))


def one_device() -> tuple[str, ...]:
    """Every device that runs kernels in the thorough profile, the virtual sm_90a in the quick one."""
    return kernel_devices() if thorough() else VIRTUAL[:1]


def another_device() -> tuple[str, ...]:
    """Every device that runs kernels in the thorough profile, all but the virtual sm_90a in the quick one."""
    return kernel_devices() if thorough() else tuple(name for name in kernel_devices() if name != VIRTUAL[0])


def reference_and_kernels() -> tuple[str, ...]:
    """The reference and what `one_device` gives."""
    return ("reference", *one_device())


class ReferenceDevice:
    """The reference in the place of a kernel, so that one test states a property of both."""

    name = "reference"
    evidence = "reference"
    target = "sm_90a"

    def activate(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def run(self, path: Path, case: Case, contract: Contract) -> Outcome:
        return Outcome(expected_outputs(path, case, contract), ())


ActiveDevice = Device


@contextlib.contextmanager
def active_device(name: str, schedule: str | int = "fast") -> Iterator[ActiveDevice]:
    """A device that launches inside the context. Only one virtual GPU can be active at a time."""
    opened: Device = ReferenceDevice() if name == "reference" else open_device(name, schedule)
    with opened.activate():
        yield opened


def space(path: Path, profile: str = "suite", **choices: Any) -> Space:
    """Small cases of a path that share one compilation: counts, probabilities, one layout and int32 offsets are given.

    choices: fields of `Space` that differ from that.
    """
    shared: dict[str, Any] = {
        "paddings": (True,),
        "probs": (True,),
        "layouts": path.layouts[:1],
        "offsets_dtypes": ("int32",),
        "alignments": (1, 1, 8),
        "max_experts": 8,
        "max_rows": 160,
        "max_hidden": 256,
        "max_elements": 6_000,
        "big_elements": 20_000,
    }
    if path.depth_multiple:
        # A virtual GPU spends on each expert as much as on a whole tile of 128 rows.
        shared |= {"max_experts": 2, "max_hidden": 64, "max_depth": 96, "max_elements": 3_000, "big_elements": 9_000}
    return dataclasses.replace(path.space(profile), **{**shared, **choices})


@dataclass(frozen=True, repr=False)
class GivenTensors(Case):
    """A case whose inputs are given tensors instead of what its values describe."""

    given: Mapping[str, torch.Tensor] = field(default_factory=dict, compare=False)

    def tensors(self, inputs: Sequence[TensorSpec], device: str = "cpu") -> dict[str, torch.Tensor]:
        made = super().tensors(inputs, device)
        return {name: self.given[name].to(device, copy=True) if name in self.given else made[name] for name in made}


def given_tensors(case: Case, given: Mapping[str, torch.Tensor]) -> GivenTensors:
    """The case with these tensors; offsets and counts are still those of the case."""
    fields = {item.name: getattr(case, item.name) for item in dataclasses.fields(Case)}
    return GivenTensors(**fields, given={name: x for name, x in given.items() if name not in ("offsets", "counts")})


def moved(
    path: Path, tensors: Mapping[str, torch.Tensor], rows: torch.Tensor, experts: Sequence[int]
) -> dict[str, torch.Tensor]:
    """The inputs with these token rows and, where a row belongs to an expert (bias), these experts, in this order."""
    order = torch.tensor(list(experts), dtype=torch.int64)
    indices = {"values": rows, "prob": rows, "bias": order, "weights": order, "alpha": order}
    return {
        spec.name: tensors[spec.name][indices[spec.kind]]
        for spec in path.inputs
        if spec.kind in indices and spec.name in tensors
    }


def filled(
    path: Path, tensors: Mapping[str, torch.Tensor], rows: torch.Tensor, value: float
) -> dict[str, torch.Tensor]:
    """The inputs with a value in the token rows that a mask names."""
    kinds = {spec.name: spec.kind for spec in path.inputs}
    return {
        name: x.masked_fill(rows.view(-1, *[1] * (x.dim() - 1)), value)
        for name, x in tensors.items()
        if kinds[name] in ("values", "prob")
    }


def untied_profile(path: Path) -> str | None:
    """A profile of the path under which no number of one expert depends on another expert, if it has one."""
    ties = any(spec.rows == "all" for spec in path.outputs)
    untied = (name for name in path.profiles if not ties or path.contract(name).amax_scope == "expert")
    return next(untied, None)


def stochastic(path: Path) -> bool:
    """Whether codes are rounded stochastically, with bits keyed by the number of the expert."""
    copies = getattr(path.operation, "copies", path.operation)
    recipe = getattr(copies, "recipe", copies)
    return bool(getattr(recipe, "stochastic", False))


def captured_as_it_is(path: Path) -> bool:
    """Whether nothing but launches happens between the inputs and the results, so that a graph holds all of it."""
    return path.operands in (None, "bf16") and not path.id.startswith("grouped_mlp.step")


def owned_mask(spec: OutputSpec, experts: Experts, output: torch.Tensor) -> torch.Tensor:
    """What the path writes of an output, as a mask of its shape."""
    owned = spec.owned(experts)
    return owned.view(*owned.shape, *[1] * (output.dim() - owned.dim())).expand(output.shape)


def owned_part(spec: OutputSpec, experts: Experts, output: torch.Tensor) -> torch.Tensor:
    """An output with zeros where the path writes nothing."""
    return torch.where(owned_mask(spec, experts, output), output, 0)


def part_of(spec: OutputSpec, experts: Experts, expert: int, output: torch.Tensor) -> torch.Tensor:
    """What an output holds for one expert; all of it where it holds one number for all of them.

    Not of swizzled scales, whose tiles hold several experts.
    """
    start, count = experts.starts[expert], experts.counts[expert]
    if spec.rows == "token":
        return output[start : start + count]
    if spec.rows == "expert" or (spec.rows == "all" and len(output) == len(experts)):
        return output[expert : expert + 1]
    if spec.rows == "all":
        return output
    size = 16 if spec.rows == "transposed" else 32
    blocks = -(-count // size)
    first = experts.colwise_row(expert, 0, size) if blocks else 0
    if spec.rows == "block":
        return output[first : first + blocks]
    return output[:, first * spec.columns_per_block : (first + blocks) * spec.columns_per_block]


def assert_same(spec: OutputSpec, expected: torch.Tensor, got: torch.Tensor, claim: str) -> None:
    """Every bit of two outputs agrees; NaN by class."""
    finding = compare_output(spec.name, expected.contiguous(), got.contiguous(), format=spec.format)
    assert finding.passed, f"{claim}: {finding.unexplained} elements of {spec.name} differ, {finding.first_mismatch}"


def failure(result: CaseResult) -> str:
    """What is wrong with a case, for an assertion's text."""
    parts = [result.case.describe(), result.fault]
    for finding in result.findings:
        if not finding.passed:
            parts.append(f"{finding.output}: {finding.unexplained} unexplained, first {finding.first_mismatch}")
    return "\n".join(part for part in parts if part)
