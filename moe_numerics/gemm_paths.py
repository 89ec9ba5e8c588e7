"""Paths of the grouped GEMMs and of the MLP's launches, whose epilogues hold the activation and the quantisation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from moe_numerics.cases import TensorSpec
from moe_numerics.gemm_operations import (
    BF16,
    FirstLayer,
    MatmulQuantize,
    Operands,
    Product,
    SecondLayerBackward,
    WeightGradient,
)
from moe_numerics.operations import Operation
from moe_numerics.path_model import OutputSpec, Path
from moe_numerics.reference.activations import ACTIVATIONS, CLAMPED_SWIGLU_PRESETS, Activation
from moe_numerics.reference.formats import E4M3, E5M2, FloatFormat

__all__ = ["gemm_paths"]

_NOTHING: tuple[TensorSpec, ...] = ()
_RAGGED = (TensorSpec("offsets", kind="offsets"), TensorSpec("counts", kind="counts"))
_PROB = TensorSpec("prob", "float32", "prob")
_ALPHA = TensorSpec("alpha", "float32", "alpha")
_ALL_FORMATS = ("swiglu",)
"""Activations that write every format: the epilogues of the others differ in the activation alone."""
_ALWAYS = (
    "grouped_mlp.fc1.swiglu.fwd.mxfp8_e4m3",
    "grouped_mlp.fc2.swiglu.bwd.mxfp8_e4m3",
    "grouped_mlp.fc1.srelu.fwd.mxfp8_e4m3",
    "grouped_mlp.fc1.swiglu.fwd.nvfp4_amax",
)
"""Launches in every run: with a gate and without, and each kind of output."""


def _factor(name: str, width: str = "depth") -> TensorSpec:
    return TensorSpec(name, width=width, factor=True)


def _weights(width: str, parts: int = 1) -> TensorSpec:
    return TensorSpec("weights", kind="weights", columns=parts, width=width, factor=True)


def _bias(parts: int = 1) -> TensorSpec:
    return TensorSpec("bias", kind="bias", columns=parts)


@dataclass(frozen=True)
class _Form:
    """What an epilogue writes."""

    words: str
    element: FloatFormat | None = None
    rotated_amax: bool = False

    def outputs(self, columns: str) -> tuple[OutputSpec, ...]:
        amax = [OutputSpec("amax", "float32", "[experts]", "expert")]
        if self.rotated_amax:
            amax.append(OutputSpec("amax_rotated", "float32", "[experts]", "expert"))
        if self.element is None:
            return OutputSpec("out", "bfloat16", f"[capacity, {columns}]", "token"), *amax
        return (
            OutputSpec("codes_rowwise", self.element.name, f"[capacity, {columns}]", "token"),
            OutputSpec("scales_rowwise", "E8M0", f"[capacity, {columns} / 32]", "token"),
            OutputSpec("codes_colwise", self.element.name, f"[capacity, {columns}]", "token"),
            OutputSpec("scales_colwise", "E8M0", f"[blocks of 32 rows, {columns}]", "block"),
            *amax,
        )


_QUANTISED = {
    "matmul": {"x_mxfp8_e4m3": Operands("mxfp8"), "x_nvfp4": Operands("nvfp4")},
    "dgrad": {"grad_mxfp8_e5m2": Operands("mxfp8", E5M2), "grad_nvfp4": Operands("nvfp4")},
}
_QUANTISED["wgrad"] = _QUANTISED["dgrad"]
"""Operands of each product by what ids say of the tokens; the other factor is E4M3 or NVFP4."""


def _described(operands: Operands, tokens: str, other: str) -> str:
    """Words for operands that are quantised."""
    if operands.form == "nvfp4":
        return f"of NVFP4 {tokens} and {other}{', both rotated' if other == 'x' else ' (16x16 blocks)'}"
    element = operands.grad_element.name if tokens == "grad" else "E4M3"
    return f"of MXFP8 {element} {tokens} and E4M3 {other}"


_FORMS = {
    "bf16": _Form("to bfloat16; amax of each expert"),
    "mxfp8_e4m3": _Form("to MXFP8 E4M3, row-wise and column-wise; amax of each expert", E4M3),
    "mxfp8_e5m2": _Form("to MXFP8 E5M2, row-wise and column-wise; amax of each expert", E5M2),
    "nvfp4_amax": _Form("to bfloat16 with the amax of each expert before and after rotation, for NVFP4", None, True),
}


def _path(
    name: str,
    summary: str,
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[OutputSpec, ...],
    operation: Operation,
    layouts: tuple[str, ...] = ("halves",),
    operands: Operands = BF16,
    extended: bool = False,
) -> Path:
    return Path(
        name,
        summary,
        (*inputs, *_RAGGED),
        outputs,
        {"suite": "exact"},
        operation,
        layouts,
        operands=operands.form,
        depth_multiple=32,
        extended=extended,
    )


def _products() -> Iterator[Path]:
    rows, gradient = "[capacity, hidden]", "[experts, depth, hidden]"
    narrow, wide = torch.bfloat16, torch.float32
    x, grad = _factor("x"), _factor("grad")
    for variant, dtype, words, further in (
        ("", narrow, "to bfloat16", _NOTHING),
        (".f32", wide, "to float32", ()),
        (".bias", wide, "times alpha, plus bias, times prob, to float32", (_ALPHA, _bias(), _PROB)),
    ):
        yield _path(
            f"grouped_gemm.matmul.bf16{variant}",
            f"x @ W^T of each expert's rows, {words}",
            (x, _weights("depth"), *further),
            (OutputSpec("out", str(dtype).removeprefix("torch."), rows, "token"),),
            Product("matmul", dtype),
            extended=variant != ".bias",
        )
    for variant, dtype in (("", narrow), (".f32", wide)):
        written = str(dtype).removeprefix("torch.")
        yield _path(
            f"grouped_gemm.dgrad.bf16{variant}",
            f"grad @ W of each expert's rows, to {written}",
            (grad, _weights("hidden")),
            (OutputSpec("out", written, rows, "token"),),
            Product("dgrad", dtype),
            extended=bool(variant),
        )
    main_grad = TensorSpec("main_grad", "float32", "weights")
    for variant, dtype, words, further in (
        ("", narrow, "to bfloat16", _NOTHING),
        (".f32", wide, "to float32", ()),
        (".main_grad", wide, "times alpha, added to main_grad in float32", (main_grad, _ALPHA)),
    ):
        yield _path(
            f"grouped_gemm.wgrad.bf16{variant}",
            f"grad^T @ x of each expert's rows, {words}",
            (grad, _factor("x", "hidden"), *further),
            (OutputSpec("out", str(dtype).removeprefix("torch."), gradient, "expert"),),
            WeightGradient(dtype),
            extended=variant != ".main_grad",
        )
    for kind, tokens, other in (("matmul", "x", "W^T"), ("dgrad", "grad", "W"), ("wgrad", "grad", "x")):
        for label, operands in _QUANTISED[kind].items():
            name, what = f"grouped_gemm.{kind}.{label}", _described(operands, tokens, other)
            if kind == "wgrad":
                yield _path(
                    name,
                    f"grad^T @ x of each expert's rows, {what}, to float32",
                    (grad, _factor("x", "hidden")),
                    (OutputSpec("out", "float32", gradient, "expert"),),
                    WeightGradient(wide, operands),
                    operands=operands,
                    extended=operands.form == "mxfp8",
                )
                continue
            yield _path(
                name,
                f"{tokens} @ {other} of each expert's rows, {what}, to float32",
                (_factor(tokens), _weights("depth" if kind == "matmul" else "hidden")),
                (OutputSpec("out", "float32", rows, "token"),),
                Product("matmul" if kind == "matmul" else "dgrad", wide, operands),
                operands=operands,
                extended=kind == "matmul" or operands.form == "nvfp4",
            )
    for label, form in _FORMS.items():
        if form.element is not None or form.rotated_amax:
            yield _path(
                f"grouped_gemm.quantize.{label}",
                f"x @ W^T of each expert's rows times prob, {form.words}",
                (x, _weights("depth"), _PROB),
                form.outputs("hidden"),
                MatmulQuantize(element=form.element, rotated_amax=form.rotated_amax),
                extended=label != "mxfp8_e4m3",
            )


def _of(operands: Operands, tokens: str) -> str:
    return "" if operands == BF16 else f" {_described(operands, tokens, 'weights')}"


@dataclass(frozen=True)
class _Layer:
    """The paths of one activation. variant: appended to ids, for a preset of it."""

    name: str
    activation: Activation
    variant: str = ""

    @property
    def _columns(self) -> str:
        return "hidden" if self.activation.inputs == 1 else "2 * hidden"

    @property
    def _layouts(self) -> tuple[str, ...]:
        return ("halves",) if self.activation.inputs == 1 else ("interleaved:32",)

    def _id(self, layer: str, direction: str, label: str, variant: str) -> str:
        return f"grouped_mlp.{layer}.{self.name}.{direction}.{label}{self.variant}{variant}"

    def forward(
        self,
        label: str,
        variant: str = "",
        epilogue_input: str = "accumulator",
        bias: bool = False,
        operands: Operands = BF16,
    ) -> Path:
        form, parts = _FORMS[label], self.activation.inputs
        seen = "" if epilogue_input == "accumulator" else " of the value rounded to bfloat16"
        return _path(
            self._id("fc1", "fwd", label, variant),
            f"first layer{' with alpha and bias' * bias}{_of(operands, 'x')} and {self.name}{seen}, times prob, "
            f"{form.words}",
            (_factor("x"), _weights("depth", parts), *((_ALPHA, _bias(parts)) if bias else ()), _PROB),
            (
                OutputSpec("preactivation", "bfloat16", f"[capacity, {self._columns}]", "token"),
                *form.outputs("hidden"),
            ),
            FirstLayer(
                element=form.element,
                rotated_amax=form.rotated_amax,
                activation=self.activation,
                epilogue_input=epilogue_input,
                operands=operands,
            ),
            self._layouts,
            operands,
            self._id("fc1", "fwd", label, variant) not in _ALWAYS,
        )

    def backward(
        self, label: str, variant: str = "", epilogue_input: str = "accumulator", operands: Operands = BF16
    ) -> Path:
        form, parts = _FORMS[label], self.activation.inputs
        seen = "" if epilogue_input == "accumulator" else " of the value rounded to bfloat16"
        return _path(
            self._id("fc2", "bwd", label, variant),
            f"data gradient of the second layer{_of(operands, 'grad')} and backward of {self.name}{seen} with dprob "
            f"and dbias, {form.words}",
            (_factor("grad"), _weights("hidden"), TensorSpec("preactivation", columns=parts), _PROB),
            (
                OutputSpec("dactivation", "float32", "[capacity, hidden]", "token"),
                *form.outputs(self._columns),
                OutputSpec("dprob", "float32", "[capacity]", "token"),
                OutputSpec("dbias", "float32", f"[experts, {self._columns}]", "expert"),
            ),
            SecondLayerBackward(
                element=form.element,
                rotated_amax=form.rotated_amax,
                activation=self.activation,
                epilogue_input=epilogue_input,
                operands=operands,
            ),
            self._layouts,
            operands,
            self._id("fc2", "bwd", label, variant) not in _ALWAYS,
        )


def _layers() -> Iterator[Path]:
    layers = [_Layer(name, activation) for name, activation in ACTIVATIONS.items()]
    layers += [
        _Layer("clamped_swiglu", CLAMPED_SWIGLU_PRESETS[preset], f".{preset}") for preset in ("deepseek", "step")
    ]
    for layer in layers:
        labels = tuple(_FORMS) if layer.name in _ALL_FORMATS else ("mxfp8_e4m3",)
        for label in labels:
            yield layer.forward(label)
            yield layer.backward(label)
    swiglu = _Layer("swiglu", ACTIVATIONS["swiglu"])
    yield swiglu.forward("mxfp8_e4m3", ".bias", bias=True)
    yield swiglu.forward("mxfp8_e4m3", ".staged", "bfloat16")
    yield swiglu.backward("mxfp8_e4m3", ".staged", "bfloat16")
    for form, label in (("mxfp8", "mxfp8_e4m3"), ("nvfp4", "nvfp4_amax")):
        for kind in ("matmul", "dgrad"):
            name, operands = next(each for each in _QUANTISED[kind].items() if each[1].form == form)
            make = swiglu.forward if kind == "matmul" else swiglu.backward
            yield make(label, f".{name}", operands=operands)


def gemm_paths() -> tuple[Path, ...]:
    """The paths of products and of launches with a product in them."""
    return (*_products(), *_layers())
