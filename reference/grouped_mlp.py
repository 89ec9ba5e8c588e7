"""The grouped MLP of a mixture of experts, forward and backward, as its fused launches compute it.

    matmul_quantize  (x_e @ W_e^T (+ bias)) * prob, quantised
    fc1              value = x_e @ W1_e^T (+ bias);  preactivation = bf16(value);  activation(value) * prob
    fc2              out = bf16(activation_e @ W2_e^T)
    fc2_backward     dactivation = grad_e @ W2_e;  its activation backward at the preactivation: dpreactivation
    fc1_dgrad        dx = bf16(dpreactivation_e @ W1_e)
    wgrads           dW2_e = grad_e^T @ activation_e;  dW1_e = dpreactivation_e^T @ x_e

An epilogue takes the float32 value of its accumulator ("accumulator"), or that value rounded to bfloat16, as it would
be read back by a launch of its own ("bfloat16"). The backward reads the stored preactivation, which is bfloat16 in
both, so that in the fused form it is not exactly the gradient of the forward (cudnn-frontend@1.23 does the same).

dprob is summed as in `elementwise`. dbias of an expert is the float32 sum of dpreactivation, before rounding, over its
rows: rows are taken in tiles of 128 from the expert's first row, the last one filled up with +0; inside a tile
neighbouring rows are added, then neighbouring pairs, fours and so on; tiles are added in ascending order. (Bits 0 to 2
of a row are lanes of a wgmma fragment, bit 3 a register, bits 4 and 5 warps, bit 6 the warpgroup.)

`step` runs the whole with operands in bfloat16, MXFP8 or NVFP4. MXFP8 (arXiv 2506.08027): every operand is quantised
from the unquantised tensor in both directions, weights along each dimension. NVFP4 (arXiv 2509.25149, appendices):
weights in 16x16 tiles; inputs row-wise, and rotated column-wise for the weight gradients; gradients likewise, with
stochastic rounding; all from bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import amax as amaxes
from . import hadamard, mxfp8, nvfp4
from .activations import Activation, UnaryActivation
from .contract import SUITE, Contract
from .elementwise import find_activation, join_gate_up, split_gate_up, sum_over_row, write_values
from .formats import E4M3, FloatFormat
from .grouped_gemm import Weights, grouped_dgrad, grouped_matmul, grouped_wgrad
from .quantized import Quantized
from .ragged import Experts

TILE_ROWS = 128
EPILOGUE_INPUTS = ("accumulator", "bfloat16")
OPERANDS = ("bf16", "mxfp8", "nvfp4")


def sum_over_rows(values: Tensor, experts: Experts) -> Tensor:
    """Gives each expert's sum of float32 [capacity, columns] over its rows, in the order of the module's docstring.

    Result: float32 [experts, columns], 0 for an expert without rows. Padding rows are never read.
    """
    result = torch.zeros((len(experts), values.shape[1]), dtype=torch.float32, device=values.device)
    for e, (start, count) in enumerate(zip(experts.starts, experts.counts, strict=True)):
        tiles = -(-count // TILE_ROWS)
        padded = torch.zeros((tiles * TILE_ROWS, values.shape[1]), dtype=torch.float32, device=values.device)
        padded[:count] = values[start : start + count]
        sums = padded.view(tiles, TILE_ROWS, values.shape[1])
        while sums.shape[1] > 1:
            sums = sums[:, 0::2] + sums[:, 1::2]
        for tile in range(tiles):
            result[e] = sums[tile, 0] if tile == 0 else result[e] + sums[tile, 0]
    return result


def fc1(
    x: Tensor | Quantized,
    weights: Weights,
    offsets: Tensor,
    counts: Tensor | None = None,
    prob: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    alpha: Tensor | float | None = None,
    activation: str | Activation = "swiglu",
    layout: str = "halves",
    element: FloatFormat | None = None,
    rotated_amax: bool = False,
    epilogue_input: str = "accumulator",
    alignment: int = 1,
    contract: Contract = SUITE,
) -> dict[str, Tensor]:
    """Gives the first linear layer with its activation, times prob, for every valid row.

    x, weights [experts, inputs * hidden, K], bias, alpha, alignment: as for `grouped_matmul`, with
    contract.accumulator; the columns of gate and up in `layout`. Results: `preactivation` bfloat16
    [capacity, inputs * hidden] (before any clamp); the activation as of `elementwise.write_values`: `out` bfloat16 or,
    with `element`, MXFP8 codes and scales both ways, and `amax` float32 [experts]; with rotated_amax `amax_rotated`
    float32 [experts], of the rotated bfloat16 activation (blocks of 16 rows of each expert). Rows without an owner
    hold zeros. ValueError: see `grouped_matmul` and `elementwise.activation_forward`.
    """
    experts = Experts.from_offsets(offsets, counts, _capacity(x), alignment)
    launch = _Launch(experts, prob, alpha, activation, layout, epilogue_input, contract)
    stored, activated = _forward(launch, x, weights, bias)
    return {"preactivation": stored, **_written(activated, experts, element, rotated_amax, contract)}


def matmul_quantize(
    x: Tensor | Quantized,
    weights: Weights,
    offsets: Tensor,
    counts: Tensor | None = None,
    prob: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    alpha: Tensor | float | None = None,
    element: FloatFormat | None = None,
    rotated_amax: bool = False,
    alignment: int = 1,
    contract: Contract = SUITE,
) -> dict[str, Tensor]:
    """Gives the linear layer of `grouped_matmul` as of `elementwise.write_values`, for every valid row.

    Arguments as for `fc1`; weights [experts, N, K]. Results: `out` bfloat16 [capacity, N] or, with `element`, MXFP8
    codes and scales both ways; `amax`, and `amax_rotated` with rotated_amax. ValueError: see `grouped_matmul`.
    """
    experts = Experts.from_offsets(offsets, counts, _capacity(x), alignment)
    values = grouped_matmul(
        x, weights, accumulator=contract.accumulator, alpha=alpha, bias=bias, prob=prob, **_rows_of(experts)
    )
    return _written(values, experts, element, rotated_amax, contract)


def fc2_backward(
    grad: Tensor | Quantized,
    weights: Weights,
    preactivation: Tensor,
    offsets: Tensor,
    counts: Tensor | None = None,
    prob: Tensor | None = None,
    *,
    alpha: Tensor | float | None = None,
    activation: str | Activation = "swiglu",
    layout: str = "halves",
    element: FloatFormat | None = None,
    rotated_amax: bool = False,
    epilogue_input: str = "accumulator",
    alignment: int = 1,
    contract: Contract = SUITE,
) -> dict[str, Tensor]:
    """Gives the data gradient of the second linear layer taken back through the activation, for every valid row.

    grad [capacity, K], weights [experts, K, hidden], alpha, alignment: as for `grouped_dgrad`, with
    contract.accumulator. preactivation: bfloat16 [capacity, inputs * hidden], of `fc1`. Results: `dactivation` float32
    [capacity, hidden], what enters the activation's backward; dpreactivation as of `elementwise.write_values` (`out`
    or codes and scales, `amax`) and `amax_rotated` as for `fc1`; `dbias` float32 [experts, inputs * hidden]; with prob
    `dprob` float32 [capacity]. Rows without an owner hold zeros. ValueError: see `grouped_dgrad` and
    `elementwise.activation_backward`.
    """
    experts = Experts.from_offsets(offsets, counts, _capacity(grad), alignment)
    launch = _Launch(experts, prob, alpha, activation, layout, epilogue_input, contract)
    results, gradient = _backward(launch, grad, weights, preactivation)
    return results | _written(gradient, experts, element, rotated_amax, contract)


@dataclass(frozen=True)
class _Launch:
    """What the epilogues of both directions share."""

    experts: Experts
    prob: Tensor | None
    alpha: Tensor | float | None
    activation: str | Activation
    layout: str
    epilogue_input: str
    contract: Contract

    def __post_init__(self) -> None:
        _check_epilogue_input(self.epilogue_input)
        rows = self.experts.capacity
        if self.prob is not None and (self.prob.dtype != torch.float32 or self.prob.shape != (rows,)):
            raise ValueError(f"prob is {self.prob.dtype} {list(self.prob.shape)}: expected float32 {[rows]}")

    def received(self, values: Tensor) -> Tensor:
        """What an epilogue computes with, of the float32 accumulators."""
        return values if self.epilogue_input == "accumulator" else values.to(torch.bfloat16).float()

    def owned(self, values: Tensor) -> Tensor:
        """values in float32, with zeros in the rows that no expert owns."""
        valid = self.experts.valid_rows(values.device)
        return torch.where(valid.view(-1, *[1] * (values.dim() - 1)), values.float(), 0.0)

    def weight(self, values: Tensor) -> Tensor:
        """values times prob."""
        return values if self.prob is None else values * self.owned(self.prob).unsqueeze(1)

    def options(self) -> dict[str, Any]:
        """Arguments of the matrix products; starts and counts are checked already, so rows need no alignment."""
        return {"accumulator": self.contract.accumulator, "alpha": self.alpha, **_rows_of(self.experts)}


def _rows_of(experts: Experts) -> dict[str, Any]:
    return {"offsets": [*experts.starts, experts.capacity], "counts": experts.counts}


def _forward(launch: _Launch, x: Tensor | Quantized, weights: Weights, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The stored preactivation, and the float32 activation times prob."""
    values = grouped_matmul(x, weights, bias=bias, **launch.options())
    inputs = launch.received(values)
    function = find_activation(launch.activation)
    if isinstance(function, UnaryActivation):
        activated = function.forward(inputs)
    else:
        activated = function.forward(*split_gate_up(inputs, launch.layout))
    return values.to(torch.bfloat16), launch.owned(launch.weight(activated))


def _backward(
    launch: _Launch, grad: Tensor | Quantized, weights: Weights, preactivation: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """dactivation, dbias and dprob, and the float32 gradient of the preactivation."""
    incoming = launch.received(grouped_dgrad(grad, weights, **launch.options()))
    function = find_activation(launch.activation)
    shape = (incoming.shape[0], function.inputs * incoming.shape[1])
    if preactivation.dtype != torch.bfloat16 or preactivation.shape != shape:
        raise ValueError(
            f"preactivation is {preactivation.dtype} {list(preactivation.shape)}: expected bfloat16 {list(shape)}"
        )
    inputs = launch.owned(preactivation)
    if isinstance(function, UnaryActivation):
        activated, gradient = function.differentiate(launch.weight(incoming), inputs)
    else:
        halves = split_gate_up(inputs, launch.layout)
        activated, dgate, dup = function.differentiate(launch.weight(incoming), *halves)
        gradient = join_gate_up(dgate, dup, launch.layout)
    gradient = launch.owned(gradient)
    results = {"dactivation": incoming, "dbias": sum_over_rows(gradient, launch.experts)}
    if launch.prob is not None:
        results["dprob"] = launch.owned(sum_over_row(incoming * activated))
    return results, gradient


def _written(
    values: Tensor, experts: Experts, element: FloatFormat | None, rotated_amax: bool, contract: Contract
) -> dict[str, Tensor]:
    """What an epilogue writes of float32 values; with rotated_amax also that of the rotated bfloat16 ones."""
    results = write_values(values, experts, element, contract)
    if rotated_amax:
        rotated = hadamard.rotate(values.to(torch.bfloat16), -2, contract=contract, experts=experts)
        if contract.staging == "bfloat16":
            rotated = rotated.to(torch.bfloat16).to(torch.float32)
        results["amax_rotated"] = amaxes.per_expert(rotated, experts.blocks(hadamard.BLOCK), contract)
    return results


def _capacity(x: Tensor | Quantized) -> int:
    return x.shape[0] if isinstance(x, Tensor) else x.experts.capacity


def _check_epilogue_input(chosen: str) -> None:
    if chosen not in EPILOGUE_INPUTS:
        raise ValueError(f"epilogue_input is {chosen!r}: expected one of {', '.join(EPILOGUE_INPUTS)}")


@dataclass(frozen=True)
class Step:
    """The choices of a training step of the MLP.

    operands: "bf16", "mxfp8" or "nvfp4": what every matrix product reads. activation, layout, epilogue_input: as for
    `fc1`. element, grad_element: MXFP8 formats of inputs and weights, and of gradients. stochastic: whether NVFP4
    gradients are rounded stochastically, with `seed` for grad and `seed + 1` for dpreactivation. contract: everything
    else; its accumulator must be able to read the operands. ValueError: an unknown choice.
    """

    operands: str = "mxfp8"
    activation: str | Activation = "swiglu"
    layout: str = "halves"
    epilogue_input: str = "accumulator"
    element: FloatFormat = E4M3
    grad_element: FloatFormat = E4M3
    stochastic: bool = True
    seed: int = 0
    contract: Contract = SUITE

    def __post_init__(self) -> None:
        if self.operands not in OPERANDS:
            raise ValueError(f"operands is {self.operands!r}: expected one of {', '.join(OPERANDS)}")
        _check_epilogue_input(self.epilogue_input)


@dataclass(frozen=True)
class Copies:
    """One tensor as matrix products read it: summed along its columns, and along its rows."""

    rowwise: Tensor | Quantized
    colwise: Tensor | Quantized

    def named(self, name: str) -> dict[str, Tensor]:
        """Gives codes, scales and global amaxes by name; nothing for operands that are not quantised."""
        results: dict[str, Tensor] = {}
        for which, copy in (("rowwise", self.rowwise), ("colwise", self.colwise)):
            if isinstance(copy, Quantized):
                results[f"{name}_codes_{which}"] = copy.codes
                results[f"{name}_scales_{which}"] = copy.scales
                if copy.global_amax is not None:
                    results[f"{name}_amax_{which}"] = copy.global_amax
        return results


def copies(values: Tensor, experts: Experts, choices: Step, *, gradient: bool = False, seed: int = 0) -> Copies:
    """Gives a token tensor, bfloat16 or float32 [capacity, columns], as the operands of a step."""
    contract = choices.contract
    if choices.operands == "bf16":
        return Copies(values.to(torch.bfloat16), values.to(torch.bfloat16))
    if choices.operands == "mxfp8":
        element = choices.grad_element if gradient else choices.element
        rowwise, colwise = (mxfp8.quantize(values, axis, element, contract, experts) for axis in (-1, -2))
        return Copies(rowwise, colwise)
    rounded = values.to(torch.bfloat16)
    key = seed if gradient and choices.stochastic else None
    rotated = hadamard.rotate(rounded, -2, contract=contract, experts=experts)
    blocks = experts.blocks(nvfp4.BLOCK)
    return Copies(
        nvfp4.quantize(rounded, -1, contract=contract, experts=experts, seed=key, tensor=0),
        nvfp4.quantize(rotated, -2, contract=contract, experts=blocks, seed=key, tensor=1),
    )


def weight_copies(weights: Tensor, choices: Step) -> list[Copies]:
    """Gives the weights bfloat16 [experts, N, K] as the operands of a step, for each expert."""
    if choices.operands == "bf16":
        return [Copies(weight, weight) for weight in weights]
    if choices.operands == "mxfp8":
        return [
            Copies(*(mxfp8.quantize(weight, axis, choices.element, choices.contract) for axis in (-1, -2)))
            for weight in weights
        ]
    return [
        Copies(*(nvfp4.quantize(weight, axis, contract=choices.contract, block2d=True) for axis in (-1, -2)))
        for weight in weights
    ]


def step(
    x: Tensor,
    weights1: Tensor,
    weights2: Tensor,
    grad: Tensor,
    offsets: Tensor,
    counts: Tensor | None = None,
    prob: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    main_grad1: Tensor | None = None,
    main_grad2: Tensor | None = None,
    alignment: int = 1,
    choices: Step = Step(),
) -> dict[str, Tensor]:
    """Gives every intermediate and result of one forward and backward, by name.

    x, grad: bfloat16 [capacity, K], the input and the gradient of the output. weights1: bfloat16
    [experts, inputs * hidden, K]; weights2: bfloat16 [experts, K, hidden]. bias: [experts, inputs * hidden], of fc1.
    main_grad1, main_grad2: float32, of the shapes of the weights, to which the weight gradients are added.
    Hidden and K: multiples of 32 for MXFP8, of 16 for NVFP4.

    Results: `preactivation`, `activation`, `out`, `dpreactivation`, `dx` bfloat16; `dactivation`, `dbias`, `dprob`,
    `dweights1`, `dweights2` float32; of quantised operands `NAME_codes_rowwise`, `_scales_`, `_amax_` and the same
    with colwise, for NAME x, activation, grad, dpreactivation and, stacked over experts, weights1 and weights2. With
    MXFP8, activation and dpreactivation are quantised from float32 and are given as codes and scales only.
    """
    experts = Experts.from_offsets(offsets, counts, x.shape[0], alignment)
    launch = _Launch(experts, prob, None, choices.activation, choices.layout, choices.epilogue_input, choices.contract)
    gemm: dict[str, Any] = {**launch.options(), "dtype": torch.bfloat16}
    first, second = weight_copies(weights1, choices), weight_copies(weights2, choices)
    inputs = copies(x, experts, choices)
    results = inputs.named("x") | _stacked("weights1", first) | _stacked("weights2", second)

    stored, activated = _forward(launch, inputs.rowwise, [w.rowwise for w in first], bias)
    activation = copies(activated, experts, choices)
    results |= {"preactivation": stored} | activation.named("activation")
    results["out"] = grouped_matmul(activation.rowwise, [w.rowwise for w in second], **gemm)

    incoming = copies(grad, experts, choices, gradient=True, seed=choices.seed)
    summed, gradient = _backward(launch, incoming.rowwise, [w.colwise for w in second], stored)
    outgoing = copies(gradient, experts, choices, gradient=True, seed=choices.seed + 1)
    results |= incoming.named("grad") | summed | outgoing.named("dpreactivation")
    if choices.operands != "mxfp8":
        results |= {"activation": activated.to(torch.bfloat16), "dpreactivation": gradient.to(torch.bfloat16)}
    results["dx"] = grouped_dgrad(outgoing.rowwise, [w.colwise for w in first], **gemm)
    for name, left, right, main_grad in (
        ("dweights1", outgoing, inputs, main_grad1),
        ("dweights2", incoming, activation, main_grad2),
    ):
        rows = left.colwise.experts if isinstance(left.colwise, Quantized) else experts
        results[name] = grouped_wgrad(
            left.colwise,
            right.colwise,
            accumulator=choices.contract.accumulator,
            main_grad=main_grad,
            **_rows_of(rows),
        )
    return results


def _stacked(name: str, each: list[Copies]) -> dict[str, Tensor]:
    """The results of every expert's copies, stacked."""
    named = [one.named(name) for one in each]
    return {key: torch.stack([one[key] for one in named]) for key in named[0]} if named else {}
