"""The GEMMs of a mixture-of-experts MLP with activation and quantisation in their epilogues, on Hopper.

    fc1            value = x_e @ W1_e^T (+ bias);  preactivation = bf16(value);  activation(value) * prob
    fc2_backward   dactivation = grad_e @ W2_e;  its activation backward at the preactivation: dpreactivation
    step           both, and everything between them and the weight gradients

Twins of the functions of the same names in `moe_numerics.reference.grouped_mlp`, for the accumulator "sm_90.bf16";
operands are bfloat16 or `Quantized`, see `grouped_gemm`. Token offsets are read on the device; nothing here waits for
it, so every call can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from moe_numerics.fused.activations import IDENTITY
from moe_numerics.fused.compilation import current_target
from moe_numerics.fused.gemm_activation import SHARE_COLUMNS, ActivationBackward, ActivationForward
from moe_numerics.fused.gemm_column_sums import part_rows
from moe_numerics.fused.gemm_launch import MATRIX, VECTOR, WIDE, Kind, buffers, launch_gemm
from moe_numerics.fused.gemm_operands import Ragged, block_offsets, check_bias, check_prob, product_of_rows
from moe_numerics.fused.gemm_problem import BLOCK, Tiling
from moe_numerics.fused.grouped_gemm import grouped_dgrad, grouped_matmul, grouped_wgrad
from moe_numerics.fused.launch import check_tensor
from moe_numerics.fused.mlp_choices import INTERLEAVED, Choices, Shapes, named, without_rows
from moe_numerics.fused.mlp_operands import Copies, mxfp8_copies, nvfp4_copies, token_copies, weight_copies
from moe_numerics.fused.quantized import Quantized
from moe_numerics.fused.tile import Backward, Forward
from moe_numerics.reference.activations import Activation as ReferenceActivation
from moe_numerics.reference.contract import SUITE, Contract
from moe_numerics.reference.formats import FloatFormat
from moe_numerics.reference.grouped_mlp import Step

__all__ = ["INTERLEAVED", "Quantized", "fc1", "fc2_backward", "matmul_quantize", "step"]

STEP = Step(layout=INTERLEAVED)


def _forward(
    choices: Choices,
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
        return without_rows(results)
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
            *named(results),
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

    x: bfloat16 [capacity, K], K a multiple of 8, or row-wise `Quantized`. weights: bfloat16
    [experts, inputs * hidden, K], hidden a multiple of 32, or row-wise `Quantized` of that shape; the rows of gate and
    up alternate in blocks of 32, gate first. offsets: int32 or int64 [experts + 1]; counts:
    int32 [experts] or None; prob: float32 [capacity] or None; bias: float32 or bfloat16 [experts, inputs * hidden];
    alpha: float, or float32 [] or [experts]. `alignment`: what every offset is a multiple of. `epilogue_input`: the
    activation sees the float32 "accumulator" (times alpha, plus bias), or that rounded to "bfloat16".

    Results are those of `moe_numerics.reference.grouped_mlp.fc1`; with `preactivation` False that one is left out. Rows
    that no expert owns are not written, and what they hold changes nothing. `out` gives the results' buffers; without
    it they are allocated, and unowned rows hold anything. `tiling` changes the speed, never a bit.

    ValueError: dtype, shape, device, stride or alignment of an argument; a target other than sm_90a; a contract with
    another accumulator; another layout. The contents of offsets and counts are not looked at here.
    """
    choices = Choices.read(activation, layout, element, rotated_amax, epilogue_input, alignment, contract)
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
    choices = Choices(IDENTITY, element, rotated_amax, "accumulator", alignment, contract)
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

    grad: bfloat16 [capacity, K], K a multiple of 8, or row-wise `Quantized`. weights: bfloat16 [experts, K, hidden],
    hidden a multiple of 32, or column-wise `Quantized` of that shape. preactivation: bfloat16
    [capacity, inputs * hidden], of `fc1`, gate and up in alternating blocks of 32. Other arguments and errors as for
    `fc1`.

    Results are those of `moe_numerics.reference.grouped_mlp.fc2_backward`; dbias and dactivation only where `extras`
    names them (a training step needs neither where there is no bias). dprob and dbias are the same in every run.
    """
    choices = Choices.read(activation, layout, element, rotated_amax, epilogue_input, alignment, contract)
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
        return without_rows(results)
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
            *named(results),
        ),
    )
    return results


def _rounded(results: Mapping[str, torch.Tensor], ragged: Ragged, choices: Step, seed: int | None) -> Copies:
    """What an epilogue wrote as bfloat16, as the operands of a step; NVFP4 with the amaxes that it found."""
    values = results["out"]
    if choices.operands == "bf16":
        return Copies(values, values)
    # Rounding is monotone: the amax of rounded values is the rounded amax.
    plain = results["amax"].to(torch.bfloat16).float()
    return nvfp4_copies(values, ragged, choices.contract, seed, (plain, results["amax_rotated"]))


def step(
    x: torch.Tensor,
    weights1: torch.Tensor,
    weights2: torch.Tensor,
    grad: torch.Tensor,
    offsets: torch.Tensor,
    counts: torch.Tensor | None = None,
    prob: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    main_grad1: torch.Tensor | None = None,
    main_grad2: torch.Tensor | None = None,
    alignment: int = 1,
    choices: Step = STEP,
) -> dict[str, torch.Tensor]:
    """Every intermediate and result of one forward and backward, by name.

    Arguments and results are those of `moe_numerics.reference.grouped_mlp.step`, with tensors on one device: x, grad
    bfloat16 [capacity, K]; weights1 bfloat16 [experts, inputs * hidden, K]; weights2 bfloat16 [experts, K, hidden]; K
    and hidden multiples of 32. Gate and up must alternate in blocks of 32 (`choices.layout`). Rows that no expert owns
    are not read, and of the results not written.

    ValueError: see `fc1`, `fc2_backward` and the quantisers.
    """
    contract, operands = choices.contract, choices.operands
    nvfp4 = operands == "nvfp4"
    ragged = Ragged.read(x, offsets, counts, alignment)
    rows: dict[str, Any] = {"offsets": offsets, "counts": counts, "alignment": alignment}
    layer: dict[str, Any] = {
        **rows,
        "prob": prob,
        "activation": choices.activation,
        "layout": choices.layout,
        "epilogue_input": choices.epilogue_input,
        "contract": contract,
        "rotated_amax": nvfp4,
    }
    gemm: dict[str, Any] = {**rows, "accumulator": contract.accumulator, "dtype": torch.bfloat16}
    first, second = weight_copies(weights1, choices), weight_copies(weights2, choices)
    inputs = token_copies(x, ragged, choices)
    results = inputs.named("x") | first.named("weights1") | second.named("weights2")

    element = choices.element if operands == "mxfp8" else None
    forward = fc1(inputs.rowwise, first.rowwise, bias=bias, element=element, **layer)
    results["preactivation"] = forward["preactivation"]
    if element is None:
        activation = _rounded(forward, ragged, choices, None)
        results["activation"] = forward["out"]
    else:
        activation = mxfp8_copies(forward, element)
    results |= activation.named("activation")
    results["out"] = grouped_matmul(activation.rowwise, second.rowwise, **gemm)

    incoming = token_copies(grad, ragged, choices, gradient=True, seed=choices.seed)
    element = choices.grad_element if operands == "mxfp8" else None
    backward = fc2_backward(
        incoming.rowwise, second.colwise, preactivation=results["preactivation"], element=element, **layer
    )
    results |= {name: backward[name] for name in ("dactivation", "dbias", "dprob") if name in backward}
    if element is None:
        outgoing = _rounded(backward, ragged, choices, choices.seed + 1 if choices.stochastic else None)
        results["dpreactivation"] = backward["out"]
    else:
        outgoing = mxfp8_copies(backward, element)
    results |= incoming.named("grad") | outgoing.named("dpreactivation")
    results["dx"] = grouped_dgrad(outgoing.rowwise, first.colwise, **gemm)

    summed: dict[str, Any] = rows
    if nvfp4:
        blocks = block_offsets(offsets, counts, x.shape[0], alignment)
        summed = {"offsets": blocks[0], "counts": blocks[1], "alignment": 16}
    for name, left, right, main_grad in (
        ("dweights1", outgoing, inputs, main_grad1),
        ("dweights2", incoming, activation, main_grad2),
    ):
        results[name] = grouped_wgrad(
            left.colwise, right.colwise, accumulator=contract.accumulator, main_grad=main_grad, **summed
        )
    return results
