"""The GEMMs of a mixture-of-experts MLP with the activation and the quantisation in their epilogues, on Hopper.

Token offsets are read on the device; nothing here waits for it, so every call can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from moe_numerics.fused.activations import IDENTITY, Activation
from moe_numerics.fused.activations import activation as twin
from moe_numerics.fused.compilation import current_target
from moe_numerics.fused.elementwise import check_ragged
from moe_numerics.fused.gemm_activation import SHARE_COLUMNS, ActivationBackward, ActivationForward
from moe_numerics.fused.gemm_launch import (
    CODES,
    MATRIX,
    SCALES,
    VECTOR,
    Kind,
    buffers,
    check_contract,
    choose_tiling,
    launch_gemm,
)
from moe_numerics.fused.gemm_problem import BLOCK, RaggedRows, Tiling
from moe_numerics.fused.grouped_gemm import check_bias, check_operands, expert_alpha
from moe_numerics.fused.launch import check_tensor
from moe_numerics.fused.mxfp8 import Mxfp8
from moe_numerics.fused.tile import Backward, Bfloat16, Forward, Layout, Sink
from moe_numerics.reference.activations import Activation as ReferenceActivation
from moe_numerics.reference.contract import SUITE, Contract
from moe_numerics.reference.elementwise import find_activation, output_shapes
from moe_numerics.reference.formats import FloatFormat

__all__ = ["matmul_activation", "matmul_activation_backward", "matmul_quantize"]

_OUTPUTS = {
    "out": MATRIX,
    "codes_rowwise": CODES,
    "scales_rowwise": SCALES,
    "codes_colwise": CODES,
    "scales_colwise": SCALES,
}
_DEPTH_MULTIPLE = 8


def _sink(element: FloatFormat | None, contract: Contract, alignment: int) -> Sink:
    quantizer = Bfloat16(contract.nan_policy == "propagate") if element is None else Mxfp8.of(element, contract)
    return Sink(quantizer, alignment % BLOCK == 0)


def _layout(activation: Activation) -> Layout:
    return Layout(activation.inputs, BLOCK if activation.inputs == 2 else 0)


def _forward(
    activation: Activation,
    x: torch.Tensor,
    weights: torch.Tensor,
    offsets: torch.Tensor,
    counts: torch.Tensor | None,
    prob: torch.Tensor | None,
    bias: torch.Tensor | None,
    alpha: torch.Tensor | float | None,
    element: FloatFormat | None,
    alignment: int,
    argument: bool,
    contract: Contract,
    staged: bool,
    out: Mapping[str, torch.Tensor] | None,
    tiling: Tiling | None,
) -> dict[str, torch.Tensor]:
    check_contract(contract)
    device = x.device
    experts = check_ragged(offsets, counts, device, alignment)
    columns = check_operands("x", x, weights, experts, 2, BLOCK * activation.inputs)
    wide_bias = check_bias(bias, experts, columns, device)
    rows = x.shape[0]
    if prob is not None:
        check_tensor("prob", prob, torch.float32, (rows,), device, 4)
    shapes = output_shapes(rows, columns // activation.inputs, experts, 1, element is not None, alignment, False)
    if argument:
        shapes["argument"] = ((rows, columns), torch.bfloat16)
    results = buffers(shapes, out, device)
    if rows == 0:
        results["amax"].zero_()
        return results
    op = Forward(activation, _layout(activation))
    launch_gemm(
        RaggedRows(),
        ActivationForward(op, _sink(element, contract, alignment), staged, current_target(), wide_bias),
        tiling or choose_tiling(columns),
        (x, Kind(torch.bfloat16, (1, _DEPTH_MULTIPLE), 16)),
        (weights, Kind(torch.bfloat16, (1, BLOCK * activation.inputs, _DEPTH_MULTIPLE), 16)),
        offsets,
        counts,
        (
            (results["amax"], VECTOR),
            (expert_alpha(alpha, experts, device), VECTOR),
            (bias, Kind(torch.float32 if wide_bias else torch.bfloat16, (1, BLOCK), 16)),
            (prob, VECTOR),
            (results.get("argument"), MATRIX),
            *((results.get(name), kind) for name, kind in _OUTPUTS.items()),
        ),
    )
    return results


def matmul_activation(
    x: torch.Tensor,
    weights: torch.Tensor,
    offsets: torch.Tensor,
    counts: torch.Tensor | None = None,
    prob: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    activation: str | ReferenceActivation = "swiglu",
    alpha: torch.Tensor | float | None = None,
    element: FloatFormat | None = None,
    alignment: int = 1,
    argument: bool = True,
    staged: bool = False,
    contract: Contract = SUITE,
    out: Mapping[str, torch.Tensor] | None = None,
    tiling: Tiling | None = None,
) -> dict[str, torch.Tensor]:
    """activation(x_e @ W_e^T * alpha + bias_e), times prob, for the rows of every expert: the first layer of an MLP.

    x: bfloat16 [capacity, K], K a multiple of 8. weights: bfloat16 [experts, columns, K]; of a gated activation the
    rows of gate and up alternate in blocks of 32, gate first (layout "interleaved:32"), so columns = 2 * hidden; hidden
    is a multiple of 32. offsets: int32 or int64 [experts + 1]; counts: int32 [experts] or None; prob: float32
    [capacity] or None; bias: float32 or bfloat16 [experts, columns] or None; alpha: float, or float32 [] or [experts].
    `alignment`: what every offset is a multiple of. `staged`: the activation sees its argument rounded to bfloat16.

    Results are those of `moe_numerics.fused.elementwise.activation_forward`, and with `argument` the activation's
    argument as bfloat16 [capacity, columns], for the backward. Rows that no expert owns are not written, and what they
    hold changes nothing. `out` gives the results' buffers. `tiling` changes the speed, never a bit.

    ValueError: dtype, shape, device, stride or alignment of an argument; a target other than sm_90a; a contract with
    another accumulator. The contents of offsets and counts are not looked at here.
    """
    chosen = twin(find_activation(activation))
    return _forward(
        chosen,
        x,
        weights,
        offsets,
        counts,
        prob,
        bias,
        alpha,
        element,
        alignment,
        argument,
        contract,
        staged,
        out,
        tiling,
    )


def matmul_quantize(
    x: torch.Tensor,
    weights: torch.Tensor,
    offsets: torch.Tensor,
    counts: torch.Tensor | None = None,
    prob: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    element: FloatFormat,
    alpha: torch.Tensor | float | None = None,
    alignment: int = 1,
    contract: Contract = SUITE,
    out: Mapping[str, torch.Tensor] | None = None,
    tiling: Tiling | None = None,
) -> dict[str, torch.Tensor]:
    """(x_e @ W_e^T * alpha + bias_e) times prob as MXFP8 row-wise and column-wise, and each expert's amax.

    Arguments, results and errors as for `matmul_activation`, without an activation.
    """
    return _forward(
        IDENTITY,
        x,
        weights,
        offsets,
        counts,
        prob,
        bias,
        alpha,
        element,
        alignment,
        False,
        contract,
        False,
        out,
        tiling,
    )


def matmul_activation_backward(
    grad: torch.Tensor,
    weights: torch.Tensor,
    argument: torch.Tensor,
    offsets: torch.Tensor,
    counts: torch.Tensor | None = None,
    prob: torch.Tensor | None = None,
    *,
    activation: str | ReferenceActivation = "swiglu",
    alpha: torch.Tensor | float | None = None,
    element: FloatFormat | None = None,
    alignment: int = 1,
    staged: bool = False,
    contract: Contract = SUITE,
    out: Mapping[str, torch.Tensor] | None = None,
    tiling: Tiling | None = None,
) -> dict[str, torch.Tensor]:
    """Gradient of the activation's argument, grad_e @ W_e * alpha being that of its result; and dprob.

    grad: bfloat16 [capacity, N], N a multiple of 8: the gradient of the second layer's result. weights: bfloat16
    [experts, N, hidden], that layer's. argument: bfloat16 [capacity, columns] as `matmul_activation` gives it (gate and
    up "interleaved:32"). `staged`: grad @ W is rounded to bfloat16 first. Other arguments as for `matmul_activation`;
    results are those of `moe_numerics.fused.elementwise.activation_backward` in the argument's layout, dprob where prob
    is given.
    """
    check_contract(contract)
    chosen = twin(find_activation(activation))
    device = grad.device
    experts = check_ragged(offsets, counts, device, alignment)
    hidden = check_operands("grad", grad, weights, experts, 1, BLOCK)
    rows = grad.shape[0]
    check_tensor("argument", argument, torch.bfloat16, (rows, hidden * chosen.inputs), device, 16)
    if prob is not None:
        check_tensor("prob", prob, torch.float32, (rows,), device, 4)
    results = buffers(
        output_shapes(rows, hidden, experts, chosen.inputs, element is not None, alignment, prob is not None),
        out,
        device,
    )
    if rows == 0:
        results["amax"].zero_()
        return results
    shares = None
    if prob is not None:
        shares = torch.empty((-(-hidden // SHARE_COLUMNS), rows), dtype=torch.float32, device=device)
    op = Backward(chosen, _layout(chosen))
    launch_gemm(
        RaggedRows(transposed=True),
        ActivationBackward(op, _sink(element, contract, alignment), staged, current_target()),
        tiling or choose_tiling(hidden),
        (grad, Kind(torch.bfloat16, (1, _DEPTH_MULTIPLE), 16)),
        (weights, Kind(torch.bfloat16, (1, _DEPTH_MULTIPLE, BLOCK), 16)),
        offsets,
        counts,
        (
            (results["amax"], VECTOR),
            (expert_alpha(alpha, experts, device), VECTOR),
            (prob, VECTOR),
            (argument, MATRIX),
            (shares, Kind(torch.float32, (1, 1), 4)),
            (results.get("dprob"), VECTOR),
            *((results.get(name), kind) for name, kind in _OUTPUTS.items()),
        ),
    )
    return results
