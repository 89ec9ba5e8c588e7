"""Judging somebody else's kernel: any callable that takes and returns tensors, against a path's reference.

@moe_numerics.kernel(path="swiglu.fwd.bf16", inputs={"gate_up": "x", "offsets": "offs"}, outputs={"out": 0})
def mine(x, offs): ...

moe_numerics.check(mine)
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path as FilePath
from typing import Any

import torch

from moe_numerics.accumulators import ACCUMULATORS
from moe_numerics.baseline import Baseline, Judged, keys_of
from moe_numerics.bounded import compare_bounded
from moe_numerics.bounds import Arithmetic
from moe_numerics.cases import VALUE_KINDS, Case
from moe_numerics.compare import CompareError
from moe_numerics.contract import CHOICES, Contract
from moe_numerics.devices import same_bytes
from moe_numerics.drawing import Space, draw_cases
from moe_numerics.findings import Finding, merge
from moe_numerics.judgement import Checked, UnexplainedBits
from moe_numerics.paths import Path, PathError, find_path
from moe_numerics.running import compare_outputs, expected_outputs

__all__ = ["Binding", "Checked", "KernelError", "UnexplainedBits", "binding", "check", "kernel"]

DEFAULT_CASES = 20
NEEDED_KINDS = tuple(kind for kind in VALUE_KINDS if kind != "prob")
"""Kinds of inputs without which nothing can be computed."""

# The short names of a one-directional kernel's results.
_SHORT = {"codes": "codes_rowwise", "scales": "scales_rowwise"}


_NARROW = {
    "E4M3": torch.float8_e4m3fn,
    "E5M2": torch.float8_e5m2,
    "E8M0": torch.float8_e8m0fnu,
    "E2M1x2": torch.float4_e2m1fn_x2,
}


class KernelError(ValueError):
    """The callable does not do what its binding says: it raises, or returns something else."""


@dataclass(frozen=True)
class Binding:
    """How a callable's arguments and results map to a path's names.

    inputs: name of the path's input -> name of the argument; inputs that are left out are not passed. outputs: name
    of the path's output -> place in the returned tuple, or key of the returned mapping; outputs that are left out are
    not checked. layout: of gate and up. alignment: what offsets are multiples of in every case. Without "counts" among
    the inputs the kernel sees no padding inside experts, without "prob" no probabilities.
    """

    path: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, int | str]
    layout: str = "halves"
    alignment: int = 1
    profile: str = "suite"
    device: str = "cpu"

    def __post_init__(self) -> None:
        path = find_path(self.path)
        path.contract(self.profile)
        names = {spec.name for spec in path.inputs}
        for name in self.inputs:
            if name not in names:
                raise PathError(f"{path.id} has no input {name!r}: expected some of {', '.join(sorted(names))}")
        missing = [s.name for s in path.inputs if s.kind in NEEDED_KINDS and s.name not in self.inputs]
        if missing or "offsets" not in self.inputs:
            raise PathError(f"inputs lack {', '.join(missing or ['offsets'])}: {path.id} cannot be computed without")
        for name in self.outputs:
            path.output(_SHORT.get(name, name))
        if not self.outputs:
            raise PathError(f"outputs are empty: name at least one of {', '.join(o.name for o in path.outputs)}")

    def space(self, contract: Contract | None = None) -> Space:
        """The cases that the callable takes, under the binding's profile or a contract.

        Under a contract with padding that the caller zeroes, rows that no expert owns hold zeros: the callable may read
        them.
        """
        path = find_path(self.path)
        space = path.space(self.profile)
        chosen = contract if contract is not None else path.contract(self.profile)
        return dataclasses.replace(
            space,
            layouts=(self.layout,),
            multiple=max(space.multiple, int(self.layout.partition(":")[2] or 1)),
            paddings=space.paddings if "counts" in self.inputs else (False,),
            probs=space.probs if "prob" in self.inputs else (False,),
            alignments=(self.alignment,),
            fills=("zero",) if chosen.padding == "zeroed_by_caller" else space.fills,
        )

    def call(self, function: Callable[..., Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Call the function on a case's tensors and give its results by the path's names. KernelError: see there."""
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        arguments = {argument: copies.get(name) for name, argument in self.inputs.items()}
        try:
            returned = function(**arguments)
        except Exception as error:
            raise KernelError(f"{_name(function)} raised {type(error).__name__}: {error}") from error
        for name, tensor in tensors.items():
            if not same_bytes(tensor, copies[name]):
                raise KernelError(f"{_name(function)} wrote into its input {self.inputs[name]!r}")
        where = torch.device(self.device)
        results = {}
        for name, place in self.outputs.items():
            value = self._pick(function, returned, place)
            if value.device.type != where.type or (where.index is not None and value.device != where):
                raise KernelError(
                    f"{_name(function)} returned a tensor on {value.device} at {place!r}: expected {self.device}"
                )
            full = _SHORT.get(name, name)
            results[full] = self._as_bits(function, full, place, value)
        return results

    def _as_bits(self, function: Callable[..., Any], name: str, place: int | str, value: torch.Tensor) -> torch.Tensor:
        """Codes and scales as uint8, whichever type of one byte holds them."""
        if value.dtype.itemsize != 1:
            return value
        form = find_path(self.path).output(name).format
        if value.dtype not in (torch.uint8, torch.int8, _NARROW.get(form, torch.uint8)):
            raise KernelError(
                f"{_name(function)} returned {str(value.dtype).removeprefix('torch.')} at {place!r}: "
                f"expected {form} codes, as uint8 or in torch's own type for them"
            )
        return value.view(torch.uint8)

    def _pick(self, function: Callable[..., Any], returned: Any, place: int | str) -> torch.Tensor:
        results: Any = (returned,) if isinstance(returned, torch.Tensor) else returned
        try:
            value = results[place]
        except (KeyError, IndexError, TypeError):
            what = f"{len(results)} results" if isinstance(results, Sequence | Mapping) else type(results).__name__
            raise KernelError(f"{_name(function)} returned {what}: expected one at {place!r}") from None
        if not isinstance(value, torch.Tensor):
            raise KernelError(f"{_name(function)} returned {type(value).__name__} at {place!r}: expected a tensor")
        return value


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def _stable_name(function: Callable[..., Any]) -> str:
    """Module and qualified name; of a callable object those of its type, as its own words may hold an address."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def kernel(
    path: str,
    inputs: Mapping[str, str],
    outputs: Mapping[str, int | str],
    layout: str = "halves",
    alignment: int = 1,
    profile: str = "suite",
    device: str = "cpu",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that says how a callable's arguments and results map to a path: see `Binding`.

    PathError: an unknown path, input, output or profile.
    """
    bound = Binding(path, dict(inputs), dict(outputs), layout, alignment, profile, device)

    def attach(function: Callable[..., Any]) -> Callable[..., Any]:
        parameters = inspect.signature(function).parameters.values()
        accepted = {p.name for p in parameters}
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
            for argument in bound.inputs.values():
                if argument not in accepted:
                    raise PathError(f"{_name(function)} has no argument {argument!r}: inputs must name its arguments")
        function.__moe_numerics__ = bound  # type: ignore[attr-defined]
        return function

    return attach


def binding(function: Callable[..., Any], path: str | None = None) -> Binding:
    """The binding of a decorated callable, or, with `path`, that of a callable whose names are the path's own."""
    bound: Binding | None = getattr(function, "__moe_numerics__", None)
    if bound is not None:
        return bound if path is None else dataclasses.replace(bound, path=path)
    if path is None:
        raise PathError(f"{_name(function)} is not decorated with @moe_numerics.kernel: give path=...")
    found = find_path(path)
    accepted = inspect.signature(function).parameters
    inputs = {spec.name: spec.name for spec in found.inputs if spec.name in accepted}
    return Binding(path, inputs, {spec.name: spec.name for spec in found.outputs})


def _cases(bound: Binding, cases: Any, contract: Contract) -> list[Case]:
    if cases is None:
        return draw_cases(DEFAULT_CASES, 0, bound.space(contract))
    if isinstance(cases, int):
        return draw_cases(cases, 0, bound.space(contract))
    if isinstance(cases, Case):
        return [cases]
    if hasattr(cases, "example") and not isinstance(cases, Iterable):
        return _drawn(cases)
    return list(cases)


def _drawn(strategy: Any) -> list[Case]:
    from hypothesis import HealthCheck, Phase, given, settings

    found: list[Case] = []
    quiet = settings(
        max_examples=DEFAULT_CASES,
        database=None,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )

    @quiet
    @given(strategy)
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return found


def check(
    kernel: Callable[..., Any],
    path: str | None = None,
    cases: Any = None,
    contract: Contract | None = None,
    arithmetic: Arithmetic | None = None,
    baseline: str | FilePath | None = None,
    update_baseline: bool = False,
) -> Checked:
    """Compare a callable with a path's reference over cases, bit by bit or within derived bounds.

    kernel: decorated with `@moe_numerics.kernel`, or, with `path`, taking and returning (as a mapping) the path's own
    names. cases: one Case, several, a number of drawn ones (20 without it), or a Hypothesis strategy of cases.
    contract: instead of that of the binding's profile. arithmetic: how the kernel computes between inputs and outputs;
    with it the grade is bounded: a bit that differs is explained where the bounds derived for that arithmetic, and for
    codes and scales one set of values inside them, allow what was written (see `bounds`). Only rows that experts own
    are compared: what a kernel leaves in padding rows of its results is its own affair. baseline: a file of known
    findings, which do not fail unless they got worse (see `baseline`); with `update_baseline` it is written instead.

    KernelError: the callable raises, returns another number, shape, dtype or device of tensors, writes into its inputs,
    or needs a GPU that is not there. BoundError: no bounds are derived for the path under this arithmetic.
    BaselineError: the file is no baseline. PathError and CaseError: the arguments do not fit.
    """
    known = None if baseline is None else Baseline.load(baseline)
    if known is None and update_baseline:
        raise PathError("update_baseline needs baseline: name the file to write")
    bound = binding(kernel, path)
    found = find_path(bound.path)
    _need_device(kernel, bound.device)
    chosen = contract if contract is not None else found.contract(bound.profile, _target(bound.device))
    per_output: dict[str, list[Finding]] = {}
    failing: tuple[Case, dict[str, torch.Tensor]] | None = None
    all_cases = _cases(bound, cases, chosen)
    if not all_cases:
        raise PathError("cases are empty: give at least one")
    for case in all_cases:
        tensors = case.tensors(found.inputs, bound.device)
        got = {name: tensor.cpu() for name, tensor in bound.call(kernel, tensors).items()}
        findings = _compare(kernel, found, case, chosen, got, arithmetic)
        for finding in findings:
            per_output.setdefault(finding.output, []).append(finding)
        if failing is None and not all(finding.passed for finding in findings):
            failing = case, got
    merged = tuple(merge(findings) for findings in per_output.values())
    judged = Judged()
    if known is not None:
        keys = keys_of(_stable_name(kernel), found.id, chosen, arithmetic, per_output)
        if update_baseline:
            known.update(keys, merged)
            known.save()
        judged = known.judge(keys, merged)
    if failing is None:
        return Checked(found.id, len(all_cases), merged, baseline=judged)
    nearest = _nearest(found, *failing, chosen) if arithmetic is None else ""
    return Checked(found.id, len(all_cases), merged, failing[0], nearest, judged)


def _target(device: str) -> str:
    """The target whose accumulator a callable on a device is judged by: on a CPU that of Hopper."""
    if torch.device(device).type != "cuda":
        return "sm_90a"
    return "sm_{}{}a".format(*torch.cuda.get_device_capability(device))


def _need_device(kernel: Callable[..., Any], device: str) -> None:
    """KernelError: the binding asks for a device that this machine lacks."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise KernelError(f"{_name(kernel)} needs device {device}, which cannot be used here: {reason}") from error


def _compare(
    kernel: Callable[..., Any],
    path: Path,
    case: Case,
    contract: Contract,
    got: Mapping[str, torch.Tensor],
    arithmetic: Arithmetic | None,
) -> tuple[Finding, ...]:
    present = {spec.name for spec in path.outputs_of(case)}
    try:
        expected = expected_outputs(path, case, contract)
        results = {name: value for name, value in got.items() if name in present}
        if arithmetic is not None:
            return compare_bounded(path, case, expected, results, contract, arithmetic)
        return compare_outputs(path, case, expected, results, filled=False)
    except CompareError as error:
        raise KernelError(f"{_name(kernel)}: {error}") from error


def _nearest(path: Path, case: Case, got: Mapping[str, torch.Tensor], contract: Contract) -> str:
    """Which single other choice makes most bits equal, in words; empty if none does better."""
    score = partial(_share, path, case, got)
    best, described = score(contract), ""
    choices: dict[str, tuple[Any, ...]] = {**CHOICES}
    if path.operands is not None:
        choices["accumulator"] = tuple(models[path.operands] for models in ACCUMULATORS.values())
    for name, allowed in choices.items():
        for value in allowed:
            if value == getattr(contract, name):
                continue
            try:
                share = score(contract.replace(**{name: value}))
            except ValueError:
                # A choice that does not go with the others, or operands that an accumulator cannot read.
                continue
            if share > best:
                best, described = share, f"{share:.4%} bit-equal under {name}={value}"
    return described.replace("100.0000%", "100%")


def _share(path: Path, case: Case, got: Mapping[str, torch.Tensor], contract: Contract) -> float:
    expected = expected_outputs(path, case, contract)
    results = {name: value for name, value in got.items() if name in expected}
    findings = [f for f in compare_outputs(path, case, expected, results, filled=False) if f.output in results]
    elements = sum(finding.elements for finding in findings)
    return sum(finding.bit_equal for finding in findings) / elements if elements else 0.0
