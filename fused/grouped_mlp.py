"""The GEMMs of a mixture-of-experts MLP with activation and quantisation in their epilogues, on Hopper.

    fc1            value = x_e @ W1_e^T (+ bias);  preactivation = bf16(value);  activation(value) * prob
    fc2_backward   dactivation = grad_e @ W2_e;  its activation backward at the preactivation: dpreactivation

Twins of the functions of the same names in `moe_numerics.reference.grouped_mlp`, for bfloat16 operands and the
accumulator "sm_90.bf16". Token offsets are read on the device; nothing here waits for it, so every call can be
captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from moe_numerics.fused.activations import IDENTITY, Activation
from moe_numerics.fused.activations import activation as twin
from moe_numerics.fused.compilation import current_target
from moe_numerics.fused.gemm_activation import SHARE_COLUMNS, ActivationBackward, ActivationForward
from moe_numerics.fused.gemm_column_sums import part_rows
from moe_numerics.fused.gemm_launch import (
    CODES,
    MATRIX,
    SCALES,
    VECTOR,
    WIDE,
    Kind,
    buffers,
    check_contract,
    launch_gemm,
)
from moe_numerics.fused.gemm_operands import Ragged, check_bias, check_prob, product_of_rows
from moe_numerics.fused.gemm_problem import BLOCK, Tiling
from moe_numerics.fused.hadamard import Rotation
from moe_numerics.fused.launch import check_tensor
from moe_numerics.fused.mxfp8 import Mxfp8
from moe_numerics.fused.quantized import Quantized
from moe_numerics.fused.tile import Backward, Bfloat16, Forward, Layout, Sink
from moe_numerics.reference.activations import Activation as ReferenceActivation
from moe_numerics.reference.contract import SUITE, Contract
from moe_numerics.reference.elementwise import find_activation, output_shapes
from moe_numerics.reference.formats import FloatFormat

__all__ = ["INTERLEAVED", "fc1", "fc2_backward", "matmul_quantize"]

INTERLEAVED = f"interleaved:{BLOCK}"
"""The one layout of gate and up that these kernels take: both must stand in one tile."""

_OUTPUTS = {
    "out": MATRIX,
    "codes_rowwise": CODES,
    "scales_rowwise": SCALES,
    "codes_colwise": CODES,
    "scales_colwise": SCALES,
}

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class _Choices:
    """What the epilogues of both directions are told at compile time."""

    activation: Activation
    element: FloatFormat | None
    rotated_amax: bool
    epilogue_input: str
    alignment: int
    contract: Contract

    def __post_init__(self) -> None:
        check_contract(self.contract)
        if self.epilogue_input not in ("accumulator", "bfloat16"):
            raise ValueError(f"epilogue_input is {self.epilogue_input!r}: expected 'accumulator' or 'bfloat16'")

    @classmethod
    def read(
        cls,
        activation: str | ReferenceActivation,
        layout: str,
        element: FloatFormat | None,
        rotated_amax: bool,
        epilogue_input: str,
        alignment: int,
        contract: Contract,
    ) -> _Choices:
        """The choices of a call. ValueError: one that these kernels do not have."""
        chosen = twin(find_activation(activation))
        if chosen.inputs == 2 and layout != INTERLEAVED:
            raise ValueError(
                f"layout is {layout!r}: expected {INTERLEAVED!r}, the weights' rows of gate and up in alternating "
                f"blocks of {BLOCK}, so that one tile holds both"
            )
        return cls(chosen, element, rotated_amax, epilogue_input, alignment, contract)

    @property
    def layout(self) -> Layout:
        return Layout(self.activation.inputs, BLOCK if self.activation.inputs == 2 else 0)

    @property
    def sink(self) -> Sink:
        dense = self.alignment % BLOCK == 0
        if self.element is None:
            return Sink(Bfloat16(self.contract.nan_policy == "propagate"), dense_scale_rows=dense)
        return Sink(Mxfp8.of(self.element, self.contract), dense_scale_rows=dense)

    @property
    def staged(self) -> bool:
        return self.epilogue_input == "bfloat16"

    @property
    def rotation(self) -> Rotation | None:
        return Rotation.of(self.contract) if self.rotated_amax else None

    def shapes(self, rows: int, hidden: int, experts: int, streams: int, dprob: bool) -> Shapes:
        """Results that both directions have."""
        shapes = output_shapes(rows, hidden, experts, streams, self.element is not None, self.alignment, dprob)
        if self.rotated_amax:
            shapes["amax_rotated"] = ((experts,), torch.float32)
        return shapes


def _without_rows(results: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The results for a buffer without rows: there is nothing to launch for."""
    for name in ("amax", "amax_rotated", "dbias"):
        if name in results:
            results[name].zero_()
    return results


def _named(results: Mapping[str, torch.Tensor]) -> list[tuple[torch.Tensor | None, Kind]]:
    return [(results.get(name), kind) for name, kind in _OUTPUTS.items()]


def _forward(
    choices: _Choices,
    x: torch.Tensor | Quantized,
    weights: torch.Tensor | Quantized,
    offsets: torch.Tensor,
    counts: torch.Tensor | None,
    prob: torch.Tensor | None,
    bias: torch.Tensor | None,
    alpha: torch.Tensor | float | None,
    preactivation: bool,
    out: Mapping[str, torch.Tensor] | None,
    tiling: Tiling | None,
) -> dict[str, torch.Tensor]:
    inputs = choices.activation.inputs
    ragged = Ragged.read(x, offsets, counts, choices.alignment)
    product = product_of_rows("x", x, weights, ragged, False, BLOCK * inputs)
    device, experts, rows, columns = offsets.device, ragged.experts, product.rows, product.columns
    wide_bias = check_bias(bias, experts, columns, device)
    check_prob(prob, rows, device)
    shapes: Shapes = {"preactivation": ((rows, columns), torch.bfloat16)} if preactivation else {}
    shapes |= choices.shapes(rows, columns // inputs, experts, 1, False)
    results = buffers(shapes, out, device)
    factor = product.alpha(alpha)
    if rows == 0:
        return _without_rows(results)
    launch_gemm(
        product.factors(choices.contract.accumulator),
        ActivationForward(
            Forward(choices.activation, choices.layout),
            choices.sink,
            choices.staged,
            current_target(),
            choices.rotation,
            wide_bias,
        ),
        columns,
        tiling,
        offsets,
        counts,
        (
            (results["amax"], VECTOR),
            (factor, VECTOR),
            (bias, WIDE if wide_bias else MATRIX),
            (prob, VECTOR),
            (results.get("preactivation"), MATRIX),
            (results.get("amax_rotated"), VECTOR),
            *_named(results),
        ),
    )
    return results


def fc1(
    x: torch.Tensor | Quantized,
    weights: torch.Tensor | Quantized,
    offsets: torch.Tensor,
    counts: torch.Tensor | None = None,
    prob: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    alpha: torch.Tensor | float | None = None,
    activation: str | ReferenceActivation = "swiglu",
    layout: str = INTERLEAVED,
    element: FloatFormat | None = None,
    rotated_amax: bool = False,
    epilogue_input: str = "accumulator",
    alignment: int = 1,
    contract: Contract = SUITE,
    preactivation: bool = True,
    out: Mapping[str, torch.Tensor] | None = None,
    tiling: Tiling | None = None,
) -> dict[str, torch.Tensor]:
    """The first linear layer with its activation, times prob, for every valid row.

    x: bfloat16 [capacity, K], K a multiple of 8. weights: bfloat16 [experts, inputs * hidden, K], hidden a multiple of
    32; the rows of gate and up alternate in blocks of 32, gate first. offsets: int32 or int64 [experts + 1]; counts:
    int32 [experts] or None; prob: float32 [capacity] or None; bias: float32 or bfloat16 [experts, inputs * hidden];
    alpha: float, or float32 [] or [experts]. `alignment`: what every offset is a multiple of. `epilogue_input`: the
    activation sees the float32 "accumulator" (times alpha, plus bias), or that rounded to "bfloat16".

    Results are those of `moe_numerics.reference.grouped_mlp.fc1`; with `preactivation` False that one is left out. Rows
    that no expert owns are not written, and what they hold changes nothing. `out` gives the results' buffers; without
    it they are allocated, and unowned rows hold anything. `tiling` changes the speed, never a bit.

    ValueError: dtype, shape, device, stride or alignment of an argument; a target other than sm_90a; a contract with
    another accumulator; another layout. The contents of offsets and counts are not looked at here.
    """
    choices = _Choices.read(activation, layout, element, rotated_amax, epilogue_input, alignment, contract)
    return _forward(choices, x, weights, offsets, counts, prob, bias, alpha, preactivation, out, tiling)


def matmul_quantize(
    x: torch.Tensor | Quantized,
    weights: torch.Tensor | Quantized,
    offsets: torch.Tensor,
    counts: torch.Tensor | None = None,
    prob: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    alpha: torch.Tensor | float | None = None,
    element: FloatFormat | None = None,
    rotated_amax: bool = False,
    alignment: int = 1,
    contract: Contract = SUITE,
    out: Mapping[str, torch.Tensor] | None = None,
    tiling: Tiling | None = None,
) -> dict[str, torch.Tensor]:
    """(x_e @ W_e^T * alpha + bias_e) times prob as MXFP8 both ways, or without `element` as bfloat16; and its amax.

    Arguments, results and errors as for `fc1`, without an activation and a preactivation.
    """
    choices = _Choices(IDENTITY, element, rotated_amax, "accumulator", alignment, contract)
    return _forward(choices, x, weights, offsets, counts, prob, bias, alpha, False, out, tiling)


def fc2_backward(
    grad: torch.Tensor | Quantized,
    weights: torch.Tensor | Quantized,
    preactivation: torch.Tensor,
    offsets: torch.Tensor,
    counts: torch.Tensor | None = None,
    prob: torch.Tensor | None = None,
    *,
    alpha: torch.Tensor | float | None = None,
    activation: str | ReferenceActivation = "swiglu",
    layout: str = INTERLEAVED,
    element: FloatFormat | None = None,
    rotated_amax: bool = False,
    epilogue_input: str = "accumulator",
    alignment: int = 1,
    contract: Contract = SUITE,
    extras: Sequence[str] = ("dbias", "dactivation"),
    out: Mapping[str, torch.Tensor] | None = None,
    tiling: Tiling | None = None,
) -> dict[str, torch.Tensor]:
    """The data gradient of the second linear layer taken back through the activation, for every valid row.

    grad: bfloat16 [capacity, K], K a multiple of 8. weights: bfloat16 [experts, K, hidden], hidden a multiple of 32.
    preactivation: bfloat16 [capacity, inputs * hidden], of `fc1`, gate and up in alternating blocks of 32. Other
    arguments and errors as for `fc1`.

    Results are those of `moe_numerics.reference.grouped_mlp.fc2_backward`; dbias and dactivation only where `extras`
    names them (a training step needs neither where there is no bias). dprob and dbias are the same in every run.
    """
    choices = _Choices.read(activation, layout, element, rotated_amax, epilogue_input, alignment, contract)
    unknown = sorted(set(extras) - {"dbias", "dactivation"})
    if unknown:
        raise ValueError(f"extras has {unknown[0]!r}: expected 'dbias' or 'dactivation'")
    inputs = choices.activation.inputs
    ragged = Ragged.read(grad, offsets, counts, alignment)
    product = product_of_rows("grad", grad, weights, ragged, True, BLOCK)
    device, experts, rows, hidden = offsets.device, ragged.experts, product.rows, product.columns
    check_tensor("preactivation", preactivation, torch.bfloat16, (rows, hidden * inputs), device, 16)
    check_prob(prob, rows, device)
    shapes = choices.shapes(rows, hidden, experts, inputs, prob is not None)
    if "dactivation" in extras:
        shapes["dactivation"] = ((rows, hidden), torch.float32)
    if "dbias" in extras:
        shapes["dbias"] = ((experts, inputs * hidden), torch.float32)
    results = buffers(shapes, out, device)
    factor = product.alpha(alpha)
    if rows == 0:
        return _without_rows(results)
    shares = parts = None
    if prob is not None:
        shares = torch.empty((-(-hidden // SHARE_COLUMNS), rows), dtype=torch.float32, device=device)
    if "dbias" in extras:
        parts = torch.empty((part_rows(rows, experts), inputs * hidden), dtype=torch.float32, device=device)
    launch_gemm(
        product.factors(contract.accumulator),
        ActivationBackward(
            Backward(choices.activation, choices.layout),
            choices.sink,
            choices.staged,
            current_target(),
            choices.rotation,
            parts is not None,
        ),
        hidden,
        tiling,
        offsets,
        counts,
        (
            (results["amax"], VECTOR),
            (factor, VECTOR),
            (prob, VECTOR),
            (preactivation, MATRIX),
            (results.get("dactivation"), WIDE),
            (shares, Kind(torch.float32, (1, 1), 4)),
            (results.get("dprob"), VECTOR),
            (parts, WIDE),
            (results.get("dbias"), WIDE),
            (results.get("amax_rotated"), VECTOR),
            *_named(results),
        ),
    )
    return results
