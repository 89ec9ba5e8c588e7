"""What the tests of other projects let through: their documented tolerances, as data that can be applied.

Each entry says whose it is, of which version, in which test, and to which outputs that test applies it; it is used for
no other. `values` are what codes and scales stand for, or a bfloat16 result; `scales` are decoded block scales.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_numerics.accumulators import accumulator
from moe_numerics.bounds import Arithmetic, accumulation_factor
from moe_numerics.gemm_operations import FirstLayer, MatmulQuantize, Product, WeightGradient
from moe_numerics.operations import ActivationForward, ActivationThenNvfp4, Mxfp8Copies, Nvfp4Copies
from moe_numerics.paths import Path
from moe_numerics.reference.tensor_core import MODELS
from moe_numerics.step_operations import TrainingStep

__all__ = ["PEERS", "Subject", "Tolerance", "as_json", "as_pytest", "derived", "subject_of", "tolerances_for"]


@dataclass(frozen=True)
class Subject:
    """What is compared: the kind of operation, direction, number format, and output.

    operation: "activation" (fused with a matrix product or not), "gemm" or "quantize".
    output: "values", "scales", "codes", "amax", "dprob" or "dbias".
    """

    operation: str
    direction: str
    format: str
    output: str


@dataclass(frozen=True)
class Tolerance:
    """One tolerance of one project's test.

    kind: "close" |got - expected| <= atol + rtol |expected| everywhere; "share": in a share of elements; "calc_diff"
    1 - 2 <x, y> / (<x, x> + <y, y>) below a limit; "sqnr" 10 log10 of signal over error power, in dB, at least a floor;
    "equal": the same bytes; "scaled": |got - expected| <= factor * block scale + atol. numbers: of that kind.
    applies: (operation, direction, format, output) of the outputs that the test applies it to; "*" is any.
    """

    peer: str
    version: str
    test: str
    kind: str
    numbers: tuple[float, ...]
    applies: tuple[tuple[str, str, str, str], ...]

    def covers(self, subject: Subject) -> bool:
        """Whether the test applies it to this output."""
        actual = (subject.operation, subject.direction, subject.format, subject.output)
        return any(all(w in ("*", a) for w, a in zip(wanted, actual, strict=True)) for wanted in self.applies)

    def passes(self, expected: Tensor, got: Tensor, scales: Tensor | None = None) -> bool:
        """Whether an output passes. Elements that are not finite in both are left out, unless only one is NaN.

        expected, got: float64 of one shape; scales: of each element, for "scaled".
        """
        if bool((torch.isnan(expected) != torch.isnan(got)).any()):
            return False
        keep = torch.isfinite(expected) & torch.isfinite(got)
        if self.kind != "equal" and bool(((expected != got) & ~keep & ~torch.isnan(expected)).any()):
            return False
        x, y = expected[keep], got[keep]
        if not x.numel() or torch.equal(x, y):
            return bool(torch.equal(x.signbit(), y.signbit())) if self.kind == "equal" else True
        return _RULES[self.kind](self.numbers, x, y, None if scales is None else scales[keep])

    def words(self) -> str:
        """The criterion in words."""
        n = [f"{number:g}" for number in self.numbers]
        return {
            "close": lambda: f"atol {n[0]}, rtol {n[1]}",
            "share": lambda: f"atol {n[0]}, rtol {n[1]} for {float(n[2]):.1%} of the elements",
            "calc_diff": lambda: f"calc_diff < {n[0]}",
            "sqnr": lambda: f"SQNR >= {n[0]} dB",
            "equal": lambda: "equal bytes",
            "scaled": lambda: f"error <= {n[0]} * block scale + {n[1]}",
        }[self.kind]()


def _close(n: tuple[float, ...], x: Tensor, y: Tensor, _: Tensor | None) -> bool:
    return bool(((y - x).abs() <= n[0] + n[1] * x.abs()).all())


def _share(n: tuple[float, ...], x: Tensor, y: Tensor, _: Tensor | None) -> bool:
    return float(((y - x).abs() <= n[0] + n[1] * y.abs()).double().mean()) >= n[2]


def _calc_diff(n: tuple[float, ...], x: Tensor, y: Tensor, _: Tensor | None) -> bool:
    # Both are scaled by one factor, which changes nothing and keeps squares finite.
    top = torch.maximum(x.abs().amax(), y.abs().amax())
    x, y = x / top, y / top
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum()) < n[0]


def _sqnr(n: tuple[float, ...], x: Tensor, y: Tensor, _: Tensor | None) -> bool:
    top = torch.maximum(x.abs().amax(), y.abs().amax())
    signal, noise = (x / top).square().sum(), ((x - y) / top).square().sum()
    return float(10 * torch.log10(signal / noise)) >= n[0]


def _equal(_n: tuple[float, ...], x: Tensor, y: Tensor, _: Tensor | None) -> bool:
    return torch.equal(x, y)


def _scaled(n: tuple[float, ...], x: Tensor, y: Tensor, scales: Tensor | None) -> bool:
    assert scales is not None
    return bool(((y - x).abs() <= n[0] * scales + n[1]).all())


_RULES: dict[str, Callable[[tuple[float, ...], Tensor, Tensor, Tensor | None], bool]] = {
    "close": _close,
    "share": _share,
    "calc_diff": _calc_diff,
    "sqnr": _sqnr,
    "equal": _equal,
    "scaled": _scaled,
}

_TE, _CUDNN, _GEMM, _FLASH, _AO = (
    "Transformer Engine",
    "cuDNN Frontend",
    "DeepGEMM",
    "flashinfer",
    "torchao",
)
_GROUPED = "tests/pytorch/test_grouped_mlp.py"
_MOE = "tests/moe/test_trtllm_gen_fused_moe.py"
_TRAINING = "test/prototype/moe_training"

PEERS: tuple[Tolerance, ...] = (
    Tolerance(
        _TE,
        "2.20",
        "tests/pytorch/test_fusible_ops.py, bfloat16",
        "close",
        (1e-5, 1.6e-2),
        (("activation", "*", "bf16", "values"),),
    ),
    Tolerance(
        _TE,
        "2.20",
        f"{_GROUPED}, fused in MXFP8",
        "close",
        (0.25, 0.125),
        (
            ("activation", "*", "mxfp8_e4m3", "values"),
            ("activation", "*", "mxfp8_e5m2", "values"),
            ("activation", "*", "bf16", "dprob"),
            ("activation", "*", "mxfp8_e4m3", "dprob"),
            ("activation", "*", "mxfp8_e4m3", "dbias"),
        ),
    ),
    Tolerance(
        _TE,
        "2.20",
        f"{_GROUPED}, fused in NVFP4",
        "close",
        (0.5, 0.25),
        (("activation", "*", "nvfp4", "values"),),
    ),
    Tolerance(
        _TE,
        "2.20",
        "tests/pytorch/mxfp8 and tests/pytorch/nvfp4, exact quantisation",
        "equal",
        (),
        tuple(("quantize", "*", "*", output) for output in ("codes", "scales", "amax")),
    ),
    Tolerance(
        _CUDNN,
        "1.23",
        "test/python/fe_api, grouped GEMM with activation",
        "close",
        (0.1, 0.01),
        (
            ("activation", "*", "bf16", "values"),
            ("gemm", "*", "bf16", "values"),
            *(("activation", "*", "*", output) for output in ("amax", "dprob")),
            *(("activation", "*", form, "scales") for form in ("mxfp8_e4m3", "mxfp8_e5m2")),
        ),
    ),
    Tolerance(
        _CUDNN,
        "1.23",
        "test/python/fe_api, grouped GEMM to FP8",
        "close",
        (0.125, 0.125),
        (("activation", "*", "mxfp8_e4m3", "codes"),),
    ),
    Tolerance(
        _CUDNN,
        "1.23",
        "test/python/fe_api, grouped GEMM to FP8",
        "close",
        (0.25, 0.25),
        (("activation", "*", "mxfp8_e5m2", "codes"),),
    ),
    Tolerance(
        _CUDNN,
        "1.28",
        "test/python/fe_api, GLU with rotation to NVFP4, block scales",
        "close",
        (0.01, 0.14),
        (("activation", "*", "nvfp4", "scales"),),
    ),
    Tolerance(
        _CUDNN,
        "1.28",
        "test/python/fe_api, GLU with rotation to NVFP4, data",
        "scaled",
        (1.5, 0.05),
        (("activation", "*", "nvfp4", "values"),),
    ),
    Tolerance(
        _GEMM,
        "2026-06",
        "tests/test_fp8_fp4.py",
        "calc_diff",
        (1e-3,),
        tuple(("*", "*", form, "values") for form in ("mxfp8_e4m3", "mxfp8_e5m2")),
    ),
    Tolerance(_GEMM, "2026-06", "tests/test_bf16.py", "calc_diff", (1e-5,), (("*", "*", "bf16", "values"),)),
    Tolerance(
        _GEMM, "2026-06", "tests/test_fp8_fp4.py, FP4 by FP4", "calc_diff", (0.02,), (("*", "*", "nvfp4", "values"),)
    ),
    Tolerance(
        _FLASH, "2026-08", f"{_MOE}, FP4", "share", (0.1, 0.85, 0.925), (("activation", "fwd", "nvfp4", "values"),)
    ),
    Tolerance(
        _FLASH,
        "2026-08",
        f"{_MOE}, FP8 with block scales",
        "share",
        (0.1, 0.85, 0.8),
        tuple(("activation", "fwd", form, "values") for form in ("mxfp8_e4m3", "mxfp8_e5m2")),
    ),
    Tolerance(
        _FLASH, "2026-08", f"{_MOE}, BF16", "share", (0.1, 0.85, 0.925), (("activation", "fwd", "bf16", "values"),)
    ),
    *(
        Tolerance(
            _AO,
            "0.18",
            f"{_TRAINING}/test_{forms[0].partition('_')[0]}_grouped_mm.py, {name}",
            "sqnr",
            (floor,),
            tuple((operation, direction, form, "values") for form in forms for operation in operations),
        )
        for name, floor, direction, forms, operations in (
            ("MXFP8 output", 27.0, "fwd", ("mxfp8_e4m3", "mxfp8_e5m2"), ("activation", "quantize")),
            ("MXFP8 input gradient", 25.0, "bwd", ("mxfp8_e4m3", "mxfp8_e5m2"), ("activation",)),
            ("NVFP4 output", 15.0, "fwd", ("nvfp4",), ("activation", "quantize")),
            ("NVFP4 input gradient", 14.0, "bwd", ("nvfp4",), ("activation",)),
        )
    ),
)
"""In the order in which projects are listed."""


def subject_of(path: Path, output: str) -> Subject:
    """What an output of a path is to the tests of others: `output` as in `Subject`."""
    parts = path.id.split(".")
    if isinstance(path.operation, Mxfp8Copies | Nvfp4Copies):
        return Subject("quantize", "fwd", parts[1], output)
    if isinstance(path.operation, FirstLayer):
        return Subject("activation", parts[3], parts[4], output)
    if isinstance(path.operation, TrainingStep):
        return Subject("gemm", "fwd", parts[2], output)
    if isinstance(path.operation, MatmulQuantize | Product | WeightGradient):
        return Subject("gemm", "fwd" if parts[1] in ("matmul", "quantize") else "bwd", parts[2], output)
    return Subject("activation", parts[1], parts[2], output)


def tolerances_for(subject: Subject) -> tuple[Tolerance, ...]:
    """Those that tests of others apply to the output."""
    return tuple(each for each in PEERS if each.covers(subject))


@dataclass(frozen=True)
class Derived:
    """The suite's own bound of an output: relative to `of`, in words why. 0 where every bit is predicted."""

    output: str
    relative: float
    of: str
    why: str


def derived(path: Path, k: int, arithmetic: Arithmetic | None = None) -> tuple[Derived, ...]:
    """Bounds for a kernel of somebody else on this path, and of a tensor-core sum over K = `k`, for any input.

    The bounds of given inputs are smaller, element by element: `check(..., arithmetic=...)` uses those.
    """
    chosen = arithmetic or Arithmetic()
    operation = path.operation.activation if isinstance(path.operation, ActivationThenNvfp4) else path.operation
    found: list[Derived] = []
    if isinstance(operation, Mxfp8Copies | Nvfp4Copies):
        found.append(Derived("codes, scales, amax", 0.0, "", "exact: the input is what is quantised"))
    if isinstance(operation, ActivationForward | FirstLayer):
        found.append(_of_products(2 + operation.activation.inputs, chosen))
    if isinstance(operation, ActivationForward | MatmulQuantize):
        if operation.element is None:
            found.append(Derived("out", 2.0**-8, "what is rounded", "rounding to bfloat16, half a unit"))
        else:
            found.append(Derived("codes, scales", 0.0, "", "some values inside their bounds give exactly these bytes"))
    elif isinstance(operation, Product | WeightGradient) and operation.dtype == torch.bfloat16:
        found.append(Derived("out", 2.0**-8, "what is rounded", "rounding to bfloat16, half a unit"))
    for name, terms in (("dprob", f"{k} columns"), ("dbias", f"{k} rows")):
        if any(spec.name == name for spec in path.outputs):
            relative = (k - 1) * 2.0**-24 / (1 - (k - 1) * 2.0**-24)
            found.append(Derived(name, relative, "the sum of magnitudes", f"float32 sum of {terms} in any order"))
    for model in _models(path):
        relative = accumulation_factor(model, k)
        found.append(
            Derived(f"GEMM {model}", relative, "the sum of magnitudes of the products", f"truncation, K = {k}")
        )
    return tuple(found)


def _of_products(count: int, arithmetic: Arithmetic) -> Derived:
    return Derived(
        "values",
        (1 + arithmetic.unit) ** count - 1,
        "the exact value; to this add the activation's own error",
        f"{count} products in {arithmetic.intermediate}",
    )


def _models(path: Path) -> list[str]:
    """The accumulators of the path's targets; of a path without a matrix product all that may come before it."""
    if path.operands is not None:
        return list(dict.fromkeys(accumulator(target, path.operands) for target in path.targets))
    return [name for name in MODELS if name.startswith(("sm_90.", "sm_100.")) and not name.endswith("f16acc")]


def _entries(path: Path) -> list[dict[str, Any]]:
    seen: dict[tuple[str, str, str], dict[str, Any]] = {}
    for output in ("values", "codes", "scales", "amax", "dprob", "dbias"):
        for each in tolerances_for(subject_of(path, output)):
            entry = seen.setdefault(
                (each.peer, each.test, each.words()),
                {
                    "peer": each.peer,
                    "version": each.version,
                    "test": each.test,
                    "criterion": each.words(),
                    "outputs": [],
                },
            )
            entry["outputs"].append(output)
    return list(seen.values())


def as_json(path: Path, k: int, arithmetic: Arithmetic) -> str:
    """Derived bounds and others' tolerances as JSON."""
    bounds = [
        {"output": each.output, "relative": each.relative, "of": each.of, "why": each.why}
        for each in derived(path, k, arithmetic)
    ]
    data = {
        "path": path.id,
        "k": k,
        "functions": arithmetic.functions,
        "intermediate": arithmetic.intermediate,
        "derived": bounds,
        "peers": _entries(path),
    }
    return json.dumps(data, indent=1)


def as_pytest(path: Path, k: int, arithmetic: Arithmetic) -> str:
    """A test file that judges a kernel by the derived bounds, with others' tolerances as comments."""
    lines = [
        f'"""Judges a kernel on {path.id} by derived bounds: replace `kernel`."""',
        "",
        "import moe_numerics",
        "",
        "",
        f"# Of a tensor-core sum over K = {k}, relative to the sum of magnitudes of the products:",
        *(f"#   {each.output}: {each.relative:.3g}" for each in derived(path, k, arithmetic) if "GEMM" in each.output),
        "# What tests of others allow:",
        *(f"#   {e['peer']} {e['version']}, {', '.join(e['outputs'])}: {e['criterion']}" for e in _entries(path)),
        "def test_kernel() -> None:",
        f"    arithmetic = moe_numerics.Arithmetic({arithmetic.functions!r}, {arithmetic.intermediate!r})",
        f"    moe_numerics.check(kernel, {path.id!r}, arithmetic=arithmetic).raise_if_unexplained()",
    ]
    return "\n".join(lines)
