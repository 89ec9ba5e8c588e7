"""Judging somebody else's kernel: any callable that takes and returns tensors, against a path's reference.

@moe_numerics.kernel(path="swiglu.fwd.bf16", inputs={"gate_up": "x", "offsets": "offs"}, outputs={"out": 0})
def mine(x, offs): ...

moe_numerics.check(mine)
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, overload

import torch

from moe_numerics.bounded import compare_bounded
from moe_numerics.bounds import Arithmetic
from moe_numerics.cases import Case
from moe_numerics.compare import CompareError
from moe_numerics.contract import CHOICES, Contract
from moe_numerics.devices import same_bytes
from moe_numerics.drawing import Space, draw_cases
from moe_numerics.findings import Finding, merge
from moe_numerics.paths import Path, PathError, find_path
from moe_numerics.running import compare_outputs, expected_outputs

__all__ = ["Binding", "Checked", "KernelError", "UnexplainedBits", "binding", "check", "kernel"]

DEFAULT_CASES = 20

# The short names of a one-directional kernel's results.
_SHORT = {"codes": "codes_rowwise", "scales": "scales_rowwise"}


class KernelError(ValueError):
    """The callable does not do what its binding says: it raises, or returns something else."""


class UnexplainedBits(AssertionError):
    """A kernel's results differ from the reference; the message says where, and what would fit better."""


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
        missing = [s.name for s in path.inputs if s.kind in ("values", "bias") and s.name not in self.inputs]
        if missing or "offsets" not in self.inputs:
            raise PathError(f"inputs lack {', '.join(missing or ['offsets'])}: {path.id} cannot be computed without")
        for name in self.outputs:
            path.output(_SHORT.get(name, name))
        if not self.outputs:
            raise PathError(f"outputs are empty: name at least one of {', '.join(o.name for o in path.outputs)}")

    def space(self) -> Space:
        """The cases that the callable takes."""
        path = find_path(self.path)
        space = path.space(self.profile)
        return dataclasses.replace(
            space,
            layouts=(self.layout,),
            multiple=max(space.multiple, int(self.layout.partition(":")[2] or 1)),
            paddings=space.paddings if "counts" in self.inputs else (False,),
            probs=space.probs if "prob" in self.inputs else (False,),
            alignments=(self.alignment,),
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
        return {_SHORT.get(name, name): self._pick(function, returned, place) for name, place in self.outputs.items()}

    def _pick(self, function: Callable[..., Any], returned: Any, place: int | str) -> torch.Tensor:
        results: Any = (returned,) if isinstance(returned, torch.Tensor) else returned
        try:
            value = results[place]
        except (KeyError, IndexError, TypeError):
            what = f"{len(results)} results" if isinstance(results, Sequence | Mapping) else type(results).__name__
            raise KernelError(f"{_name(function)} returned {what}: expected one at {place!r}") from None
        if not isinstance(value, torch.Tensor):
            raise KernelError(f"{_name(function)} returned {type(value).__name__} at {place!r}: expected a tensor")
        return value.view(torch.uint8) if value.dtype.itemsize == 1 else value


@dataclass(frozen=True)
class Checked(Sequence[Finding]):
    """What `check` found: a finding for each output over all cases, and the nearest contract if something differs."""

    path: str
    cases: int
    findings: tuple[Finding, ...]
    failing: Case | None = None
    nearest: str = ""

    @overload
    def __getitem__(self, index: int) -> Finding: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Finding]: ...

    def __getitem__(self, index: int | slice) -> Finding | Sequence[Finding]:
        return self.findings[index]

    def __len__(self) -> int:
        return len(self.findings)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    @property
    def passed(self) -> bool:
        """Whether nothing is unexplained."""
        return all(finding.passed for finding in self.findings)

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.cases} cases"]
        for finding in self.findings:
            line = f"  {finding.output}: "
            if finding.unchecked == finding.elements and finding.elements:
                lines.append(line + f"not checked, {finding.reason}")
                continue
            line += f"{finding.bit_equal:,} of {finding.elements:,} bit-equal"
            if finding.explained:
                line += f", {finding.explained:,} explained"
            if finding.sharpness is not None:
                line += f", largest error {finding.sharpness:.3g} of its bound"
            lines.append(line)
            first = finding.first_mismatch
            if first is not None:
                where = ", ".join(f"{name} {value}" for name, value in first["coordinates"].items())
                lines.append(
                    f"    first at {where}: expected {first['expected']} ({first['expected_bits']}), "
                    f"got {first['got']} ({first['got_bits']})"
                )
        if self.nearest:
            lines.append(f"  nearest contract: {self.nearest}")
        if self.failing is not None:
            lines.append(f"  failing case: {self.failing!r}")
        return "\n".join(lines)

    def raise_if_unexplained(self) -> None:
        """UnexplainedBits, with everything above as its message, unless nothing is unexplained."""
        if not self.passed:
            raise UnexplainedBits(str(self))


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


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


def _cases(bound: Binding, cases: Any) -> list[Case]:
    if cases is None:
        return draw_cases(DEFAULT_CASES, 0, bound.space())
    if isinstance(cases, int):
        return draw_cases(cases, 0, bound.space())
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
) -> Checked:
    """Compare a callable with a path's reference over cases, bit by bit or within derived bounds.

    kernel: decorated with `@moe_numerics.kernel`, or, with `path`, taking and returning (as a mapping) the path's own
    names. cases: one Case, several, a number of drawn ones (20 without it), or a Hypothesis strategy of cases.
    contract: instead of that of the binding's profile. arithmetic: how the kernel computes between inputs and outputs;
    with it the grade is bounded: a bit that differs is explained where the bounds derived for that arithmetic, and for
    codes and scales one set of values inside them, allow what was written (see `bounds`). Only rows that experts own
    are compared: what a kernel leaves in padding rows of its results is its own affair.

    KernelError: the callable raises, returns another number, shape, dtype or device of tensors, or writes into its
    inputs. BoundError: no bounds are derived for the path under this arithmetic. PathError and CaseError: the arguments
    do not fit.
    """
    bound = binding(kernel, path)
    found = find_path(bound.path)
    chosen = contract if contract is not None else found.contract(bound.profile)
    per_output: dict[str, list[Finding]] = {}
    failing: tuple[Case, dict[str, torch.Tensor]] | None = None
    all_cases = _cases(bound, cases)
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
    if failing is None:
        return Checked(found.id, len(all_cases), merged)
    nearest = _nearest(found, *failing, chosen) if arithmetic is None else ""
    return Checked(found.id, len(all_cases), merged, failing[0], nearest)


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
    for name, allowed in CHOICES.items():
        for value in allowed:
            if value == getattr(contract, name):
                continue
            try:
                changed = contract.replace(**{name: value})
            except ValueError:
                continue
            share = score(changed)
            if share > best:
                best, described = share, f"{share:.4%} bit-equal under {name}={value}"
    return described.replace("100.0000%", "100%")


def _share(path: Path, case: Case, got: Mapping[str, torch.Tensor], contract: Contract) -> float:
    expected = expected_outputs(path, case, contract)
    results = {name: value for name, value in got.items() if name in expected}
    findings = [f for f in compare_outputs(path, case, expected, results, filled=False) if f.output in results]
    elements = sum(finding.elements for finding in findings)
    return sum(finding.bit_equal for finding in findings) / elements if elements else 0.0
