"""Counts false alarms: drawn cases of correct kernels of others that the suite finds fault with.

    python property_tests/false_alarms.py [--cases 10000] [--seed 0] [--device cpu] [--out reports/false_alarms.json]

The kernels are correct by construction and differ from the reference in many bits: activations and their autograd by
PyTorch's float32 operators, with sums in a drawn order, rounded or quantised; eager PyTorch on bfloat16; torchao; and
the float64 oracle, rounded once, judged by the bounds of exact arithmetic. Each is judged by `check`, as any user's is,
so a mistake in a bound or in the explanation of codes and scales shows here. The report has the cases and false
alarms of each, and the upper limit of the rate at 95 % confidence.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any

import torch
from moe_numerics.reference import elementwise, grouped_nvfp4, oracle
from moe_numerics.reference.activations import ACTIVATIONS, Activation
from moe_numerics.reference.exact_math import float32
from moe_numerics.reference.gated_activations import ClampedSwiglu, Gated, SituGlu, StepSwiglu
from moe_numerics.reference.ragged import Experts
from moe_numerics.reference.unary_activations import QuickGelu, TanhSquaredRelu
from scipy.stats import beta
from torch import Tensor

import moe_numerics
from moe_numerics.adapters import torchao_mxfp8
from moe_numerics.bounds import Arithmetic
from moe_numerics.cases import Case
from moe_numerics.checking import binding
from moe_numerics.drawing import Space, draw_cases
from moe_numerics.operations import ActivationBackward, ActivationForward, ActivationThenNvfp4
from moe_numerics.paths import Path, all_paths, find_path
from moe_numerics.report.atomic import write_files

CHUNK = 25
"""Cases that a process judges at a time."""

ERF_OVERFLOWS = torch.__version__ < "2.13"
"""PyTorch's gelu by erf gave Inf for finite inputs far below zero on CPUs in 2.11: no correct kernel there."""

NOT_EAGER = ("tanh_srelu", "situglu")
"""Activations for which no bound is derived where each operator's result is rounded to bfloat16."""

MODERATE = 2.0**40
"""Magnitudes up to which PyTorch's gradients, as it orders their products, stay in the range of float32."""

Outputs = dict[str, Tensor]
F = torch.nn.functional


def _torch_unary(activation: Activation, x: Tensor) -> Tensor:
    """A unary activation as PyTorch code has it, in the type of x."""
    if isinstance(activation, QuickGelu):
        return x * torch.sigmoid(float32(activation.alpha) * x)
    if isinstance(activation, TanhSquaredRelu):
        scale = float32(activation.scale)
        return (scale * torch.tanh(torch.relu(x) / scale)).square()
    plain: dict[str, Callable[[Tensor], Tensor]] = {
        "Silu": F.silu,
        "Sigmoid": torch.sigmoid,
        "Gelu": lambda x: F.gelu(x, approximate="tanh"),
        "GeluErf": F.gelu,
        "Relu": torch.relu,
        "SquaredRelu": lambda x: torch.relu(x).square(),
    }
    return plain[type(activation).__name__](x)


def _torch_forward(activation: Activation, operands: tuple[Tensor, ...]) -> Tensor:
    """An activation as PyTorch code has it, in the type of its operands."""
    if len(operands) == 1:
        return _torch_unary(activation, *operands)
    gate, up = operands
    match activation:
        case Gated(activation=unary):
            return _torch_unary(unary, gate) * up
        case ClampedSwiglu(limit=limit, alpha=alpha, offset=offset):
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            return gate * torch.sigmoid(float32(alpha) * gate) * (up + offset)
        case StepSwiglu(limit=limit):
            return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)
        case SituGlu(beta_gate=b, beta_up=c):
            return b * torch.tanh(gate / b) * torch.sigmoid(gate) * (c * torch.tanh(up / c))
    raise AssertionError(activation)


def _by_torch(activation: Activation, operands: tuple[Tensor, ...], grad: Tensor | None, prob: Tensor) -> list[Tensor]:
    """[y * prob], or [gradients of the operands..., dprob], by float32 operators and autograd; sums in any order."""
    leaves = tuple(x.detach().requires_grad_() for x in operands)
    y = _torch_forward(activation, leaves)
    if grad is None:
        return [(y * prob).detach()]
    gradients = torch.autograd.grad(y, leaves, grad * prob)
    order = torch.randperm(y.shape[1])
    return [*gradients, (grad * y.detach())[:, order].sum(1)]


def _by_oracle(activation: Activation, operands: tuple[Tensor, ...], grad: Tensor | None, prob: Tensor) -> list[Tensor]:
    """The same in float64, rounded once to float32."""
    wide = [x.double() for x in operands]
    y = oracle.forward(activation, *wide)
    if grad is None:
        return [oracle.round_once(y * prob.double(), torch.float32)]
    gradients = oracle.backward(activation, grad.double() * prob.double(), *wide)
    results = [*gradients, (grad.double() * y).sum(1)]
    return [oracle.round_once(x, torch.float32) for x in results]


def _sum_of_rows(values: Tensor, experts: Experts) -> Tensor:
    """Each expert's sum over its rows, in a drawn order."""
    sums = []
    for start, count in zip(experts.starts, experts.counts, strict=True):
        sums.append(values[start : start + count][torch.randperm(count)].sum(0))
    return torch.stack(sums)


@dataclass(frozen=True)
class Correct:
    """A kernel of others that is right. by: "torch", "oracle", "eager" or "torchao"."""

    path: str
    by: str
    arithmetic: Arithmetic | None

    def callable(self, layout: str, alignment: int, device: str) -> Callable[..., Any]:
        """The kernel, decorated as a user would."""
        if self.by == "torchao":
            return torchao_mxfp8()
        path = find_path(self.path)
        composed = isinstance(path.operation, ActivationThenNvfp4)
        operation = path.operation.activation if isinstance(path.operation, ActivationThenNvfp4) else path.operation
        assert isinstance(operation, ActivationForward)
        backward = isinstance(operation, ActivationBackward)
        activation, source = operation.activation, "x" if operation.activation.inputs == 1 else "gate_up"
        biased = any(spec.name == "bias" for spec in path.inputs)
        names = ("grad",) * backward + (source, "offsets", "counts", "prob") + ("bias",) * biased
        written = ("out",) if self.by == "eager" else tuple(spec.name for spec in path.outputs)

        @moe_numerics.kernel(
            self.path,
            {name: name for name in names},
            {name: name for name in written},
            layout,
            alignment,
            device=device,
        )
        def kernel(**given: Tensor | None) -> Outputs:
            x, offsets, counts, prob = (given[name] for name in (source, "offsets", "counts", "prob"))
            assert x is not None
            assert offsets is not None
            experts = Experts.from_offsets(offsets, counts, x.shape[0], alignment)
            valid = experts.valid_rows(x.device).unsqueeze(1)
            x = torch.where(valid, x, 0.0)
            scale = torch.ones_like(valid, dtype=torch.float32) if prob is None else prob.unsqueeze(1)
            scale = torch.where(valid, scale, 0.0)
            if self.by == "eager":
                operands = (x,) if source == "x" else elementwise.split_gate_up(x, layout)
                return {"out": (_torch_forward(activation, operands) * scale).to(torch.bfloat16)}
            wide = x.float() if self.by == "torch" else x.double()
            if biased:
                shifts = given["bias"].to(wide.dtype)[experts.row_expert(x.device).clamp(min=0)]
                wide = torch.where(valid, wide + shifts, 0.0)
            operands = (wide,) if source == "x" else elementwise.split_gate_up(wide, layout)
            grad = torch.where(valid, given["grad"], 0.0).float() if backward else None
            compute = _by_torch if self.by == "torch" else _by_oracle
            results = compute(activation, operands, grad, scale)
            values = results[0]
            if backward and source != "x":
                values = elementwise.join_gate_up(results[0], results[1], layout)
            contract = path.contract("suite")
            outputs = elementwise.write_values(values, experts, operation.element, contract)
            if backward:
                outputs["dprob"] = results[-1]
            if backward and biased:
                outputs["dbias"] = _sum_of_rows(values, experts)
            if composed:
                recipe = path.operation.copies.recipe  # type: ignore[union-attr]
                outputs |= grouped_nvfp4.quantize(
                    outputs["out"], offsets, counts, recipe=recipe, alignment=alignment, contract=contract, seed=0
                )
            return outputs

        return kernel


def correct_kernels() -> list[Correct]:
    """Every kernel that is judged."""
    found, known = [], {path.id for path in all_paths()}
    names = [(name, "") for name in ACTIVATIONS] + [("clamped_swiglu", ".deepseek"), ("clamped_swiglu", ".step")]
    for name, variant in names:
        for direction in ("fwd", "bwd"):
            forms = ["bf16", "mxfp8_e4m3", "mxfp8_e5m2"] + ["nvfp4"] * (direction == "fwd")
            for form in forms:
                path = f"{name}.{direction}.{form}{variant}"
                if not (ERF_OVERFLOWS and name.endswith("_erf")):
                    found.append(Correct(path, "torch", Arithmetic("library")))
                found.append(Correct(path, "oracle", Arithmetic("exact")))
            for form in ("bf16", "mxfp8_e4m3"):
                path = f"{name}.{direction}.{form}{variant}.bias"
                if path in known and name not in ("gelu_erf", "geglu_erf", "situglu"):
                    found.append(Correct(path, "torch", Arithmetic("library")))
                    found.append(Correct(path, "oracle", Arithmetic("exact")))
        if name not in NOT_EAGER and not (ERF_OVERFLOWS and name.endswith("_erf")):
            found.append(Correct(f"{name}.fwd.bf16{variant}", "eager", Arithmetic("library", "bfloat16")))
    if importlib.util.find_spec("torchao") is not None:
        found.append(Correct("quantize.mxfp8_e4m3", "torchao", None))
    return found


@dataclass(frozen=True)
class Task:
    """Cases of one kernel."""

    kernel: int
    cases: int
    seed: int
    device: str


def _drawn(path: Path, space: Space, task: Task, limit: float | None) -> Iterator[Case]:
    """The task's cases: of those that are drawn, the first ones whose valid rows stay within the limit."""
    left = task.cases
    for attempt in itertools.count():
        for case in draw_cases(task.cases, task.seed + (attempt << 32), space):
            tensors = case.tensors(path.inputs)
            rows = path.experts(case).valid_rows()
            floats = [x if name == "bias" else x[rows] for name, x in tensors.items() if x.is_floating_point()]
            if limit is not None and any(bool((x.float().abs() > limit).any()) for x in floats):
                continue
            yield case
            left -= 1
            if not left:
                return


def judge(task: Task) -> dict[str, Any]:
    """What judging the task's cases gave."""
    correct = correct_kernels()[task.kernel]
    path: Path = find_path(correct.path)
    torch.manual_seed(task.seed)
    layout = path.layouts[task.seed % len(path.layouts)]
    function = correct.callable(layout, (1, 32, 128)[task.seed % 3], task.device)
    space = replace(binding(function).space(), max_elements=3_000, big_elements=12_000)
    if correct.by == "torchao":
        space = replace(space, allow_specials=False)
    elif ".bwd." in correct.path and correct.by == "torch":
        # Autograd's masks let the gradient of a NaN through, and its products overflow where the reference's do not:
        # differences that `check` reports, and rightly.
        space = replace(space, allow_specials=False)
    result = {"cases": 0, "false_alarms": 0, "elements": 0, "bit_equal": 0, "explained": 0, "unchecked": 0}
    alarms: list[str] = []
    sharpness = 0.0
    limit = MODERATE if ".bwd." in correct.path and correct.by == "torch" else None
    for case in _drawn(path, space, task, limit):
        checked = moe_numerics.check(function, cases=case, arithmetic=correct.arithmetic)
        result["cases"] += 1
        for finding in checked:
            for key in ("elements", "bit_equal", "explained", "unchecked"):
                result[key] += getattr(finding, key)
            sharpness = max(sharpness, finding.sharpness or 0.0)
        if not checked.passed:
            result["false_alarms"] += 1
            alarms.append(str(checked))
    return {"kernel": task.kernel, **result, "sharpness": sharpness, "alarms": alarms}


def upper_limit(alarms: int, cases: int) -> float:
    """The rate of false alarms below which it is at 95 % confidence (Clopper and Pearson 1934; 3 / cases for none)."""
    return 1.0 if alarms >= cases else float(beta.ppf(0.95, alarms + 1, cases - alarms))


def summary(kernels: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over kernels."""
    keys = ("cases", "false_alarms", "elements", "bit_equal", "explained", "unchecked")
    total = {key: sum(each[key] for each in kernels) for key in keys}
    return {**total, "upper_limit_95": upper_limit(total["false_alarms"], total["cases"])}


def _tasks(cases: int, seed: int, device: str) -> Iterator[Task]:
    """Explaining MXFP8 copies takes three times as long as everything else: a third as many cases of those."""
    kernels = correct_kernels()
    weights = [1 if "mxfp8" in each.path else 3 for each in kernels]
    unit = -(-cases // sum(weights))
    for kernel, weight in enumerate(weights):
        for start in range(0, unit * weight, CHUNK):
            number = (seed * 1000 + start // CHUNK) * len(kernels) + kernel
            yield Task(kernel, min(CHUNK, unit * weight - start), number, device)


def _one_thread() -> None:
    torch.set_num_threads(1)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000, help="at least as many are judged")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="where the kernels run")
    parser.add_argument("--out", type=FilePath, default=FilePath("reports/false_alarms.json"))
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    started = time.monotonic()
    kernels = [
        {
            "path": each.path,
            "by": each.by,
            "arithmetic": "exact bits"
            if each.arithmetic is None
            else f"{each.arithmetic.functions}, {each.arithmetic.intermediate}",
            **dict.fromkeys(("cases", "false_alarms", "elements", "bit_equal", "explained", "unchecked"), 0),
            "sharpness": 0.0,
        }
        for each in correct_kernels()
    ]
    context = multiprocessing.get_context("spawn")
    tasks = list(_tasks(arguments.cases, arguments.seed, arguments.device))
    with ProcessPoolExecutor(arguments.workers, mp_context=context, initializer=_one_thread) as pool:
        for found in pool.map(judge, tasks):
            entry = kernels[found.pop("kernel")]
            for text in found.pop("alarms"):
                print(f"{entry['by']}: {text}", flush=True)
            entry["sharpness"] = max(entry["sharpness"], found.pop("sharpness"))
            for key, value in found.items():
                entry[key] += value
    data = {
        "schema": 1,
        "device": arguments.device,
        "torch": torch.__version__,
        "seed": arguments.seed,
        "seconds": round(time.monotonic() - started, 1),
        "summary": summary(kernels),
        "kernels": kernels,
    }
    print(json.dumps(data["summary"]))
    write_files(arguments.out.parent, {arguments.out.name: json.dumps(data, indent=1) + "\n"})


if __name__ == "__main__":
    main()
