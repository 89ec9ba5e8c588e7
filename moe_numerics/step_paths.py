"""Paths of a whole training step of the MLP, for each kind of operand: every intermediate is an output."""

from __future__ import annotations

from collections.abc import Iterator

from moe_numerics.cases import TensorSpec
from moe_numerics.path_model import OutputSpec, Path
from moe_numerics.reference.activations import ACTIVATIONS
from moe_numerics.reference.formats import E4M3, E5M2
from moe_numerics.step_operations import TOKEN_TENSORS, TrainingStep

__all__ = ["step_paths"]

_INPUTS = (
    TensorSpec("x", width="depth", factor=True),
    TensorSpec("weights1", kind="weights", columns=2, width="depth", factor=True),
    TensorSpec("weights2", kind="weights", width="hidden", factor=True),
    TensorSpec("grad", width="depth", factor=True),
    TensorSpec("offsets", kind="offsets"),
    TensorSpec("counts", kind="counts"),
    TensorSpec("prob", "float32", "prob"),
)
_SIZES = {"x": "depth", "grad": "depth", "activation": "hidden", "dpreactivation": "2 * hidden"}
_WEIGHTS = {"weights1": ("2 * hidden", "depth"), "weights2": ("depth", "hidden")}


def _token_copies(operation: TrainingStep) -> Iterator[OutputSpec]:
    for name in TOKEN_TENSORS:
        columns = _SIZES[name]
        if operation.operands == "mxfp8":
            element = operation.grad_element if name in ("grad", "dpreactivation") else E4M3
            yield OutputSpec(f"{name}_codes_rowwise", element.name, f"[capacity, {columns}]", "token")
            yield OutputSpec(f"{name}_scales_rowwise", "E8M0", f"[capacity, {columns} / 32]", "token")
            yield OutputSpec(f"{name}_codes_colwise", element.name, f"[capacity, {columns}]", "token")
            yield OutputSpec(f"{name}_scales_colwise", "E8M0", f"[blocks of 32 rows, {columns}]", "block")
        else:
            blocks = "blocks of 16 rows"
            yield OutputSpec(f"{name}_codes_rowwise", "E2M1x2", f"[capacity, {columns} / 2]", "token")
            yield OutputSpec(f"{name}_scales_rowwise", "E4M3", f"[capacity, {columns} / 16]", "token")
            yield OutputSpec(f"{name}_amax_rowwise", "float32", "[1]", "all")
            yield OutputSpec(f"{name}_codes_colwise", "E2M1x2", f"[{columns}, {blocks} * 8]", "transposed", 8)
            yield OutputSpec(f"{name}_scales_colwise", "E4M3", f"[{columns}, {blocks}]", "transposed", 1)
            yield OutputSpec(f"{name}_amax_colwise", "float32", "[1]", "all")


def _weight_copies(operands: str) -> Iterator[OutputSpec]:
    for name, (rows, columns) in _WEIGHTS.items():
        if operands == "mxfp8":
            whole = f"[experts, {rows}, {columns}]"
            yield OutputSpec(f"{name}_codes_rowwise", "E4M3", whole, "expert")
            yield OutputSpec(f"{name}_scales_rowwise", "E8M0", f"[experts, {rows}, {columns} / 32]", "expert")
            yield OutputSpec(f"{name}_codes_colwise", "E4M3", whole, "expert")
            yield OutputSpec(f"{name}_scales_colwise", "E8M0", f"[experts, {rows} / 32, {columns}]", "expert")
        else:
            yield OutputSpec(f"{name}_codes_rowwise", "E2M1x2", f"[experts, {rows}, {columns} / 2]", "expert")
            yield OutputSpec(f"{name}_scales_rowwise", "E4M3", f"[experts, {rows}, {columns} / 16]", "expert")
            yield OutputSpec(f"{name}_amax_rowwise", "float32", "[experts]", "expert")
            yield OutputSpec(f"{name}_codes_colwise", "E2M1x2", f"[experts, {columns}, {rows} / 2]", "expert")
            yield OutputSpec(f"{name}_scales_colwise", "E4M3", f"[experts, {columns}, {rows} / 16]", "expert")
            yield OutputSpec(f"{name}_amax_colwise", "float32", "[experts]", "expert")


def _outputs(operation: TrainingStep) -> Iterator[OutputSpec]:
    if operation.operands != "bf16":
        yield from _token_copies(operation)
        yield from _weight_copies(operation.operands)
    yield OutputSpec("preactivation", "bfloat16", "[capacity, 2 * hidden]", "token")
    if operation.operands != "mxfp8":
        yield OutputSpec("activation", "bfloat16", "[capacity, hidden]", "token")
        yield OutputSpec("dpreactivation", "bfloat16", "[capacity, 2 * hidden]", "token")
    yield OutputSpec("out", "bfloat16", "[capacity, depth]", "token")
    yield OutputSpec("dactivation", "float32", "[capacity, hidden]", "token")
    yield OutputSpec("dbias", "float32", "[experts, 2 * hidden]", "expert")
    yield OutputSpec("dprob", "float32", "[capacity]", "token")
    yield OutputSpec("dx", "bfloat16", "[capacity, depth]", "token")
    yield OutputSpec("dweights1", "float32", "[experts, 2 * hidden, depth]", "expert")
    yield OutputSpec("dweights2", "float32", "[experts, depth, hidden]", "expert")


_WORDS = {
    "bf16": "operands bfloat16",
    "mxfp8": "operands MXFP8 E4M3, gradients E5M2",
    "nvfp4": "operands NVFP4: weights in 16x16 blocks, column-wise copies rotated, gradients rounded stochastically "
    "(exact given the seed)",
}


_CHOICES = {
    "factor_kinds": ("plain", "gaussian", "identity", "gaussian"),
    "factor_exponents": (0, 0, -3),
    "edit_bits": (0x0000, 0x8000, 0x3F80, 0xBF80, 0x40E0, 0xC0E0),
}
"""Of quantised operands: no gate so far below zero that its silu, alone in a block, is at the end of the range."""


def step_paths() -> tuple[Path, ...]:
    """`grouped_mlp.step` with swiglu and each kind of operand."""
    paths = []
    for operands, words in _WORDS.items():
        operation = TrainingStep(ACTIVATIONS["swiglu"], operands, E5M2)
        paths.append(
            Path(
                f"grouped_mlp.step.{operands}",
                f"a training step of the MLP with swiglu, forward to weight gradients, {words}",
                _INPUTS,
                tuple(_outputs(operation)),
                {"suite": "exact"},
                operation,
                ("interleaved:32",),
                operands=operands,
                depth_multiple=32,
                extended=True,
                choices={} if operands == "bf16" else _CHOICES,
            )
        )
    return tuple(paths)
