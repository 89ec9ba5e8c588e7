"""Activations and quantisation over ragged experts: what one launch of a fused elementwise kernel computes.

Every value is computed in float32 from bfloat16 inputs, to which the expert's bias is added first, by the activation's
pinned sequence of operations, then multiplied by the router's probability, and rounded or quantised once. Rows that no
expert owns are not read; in the results they hold zeros.

dprob of a row is the sum of grad * activation over its columns, in float32, in this order: columns are taken in tiles
of 128, the last one filled up with +0; inside a tile, 16 groups of 8 neighbouring columns are each added from left to
right, then neighbouring groups, neighbouring pairs of groups, fours and eights; the tiles are added in ascending
order. (A kernel whose thread holds 8 columns gets this by four butterfly shuffles.)

dbias of a column is the sum of the float32 gradients, before they are rounded or quantised, over an expert's rows, in
this order: rows are taken in tiles of 32 from the expert's first one, the last tile filled up with +0; inside a tile,
rows 8 apart are each added from top to bottom, then the 8 sums: neighbours, neighbouring pairs and fours; the tiles
are added in ascending order. (A kernel whose warp holds two rows at a time gets this by one shuffle and shared memory.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import amax as amaxes
from . import mxfp8
from .activations import ACTIVATIONS, Activation, UnaryActivation
from .contract import SUITE, Contract
from .exact_math import as_float32
from .formats import FloatFormat
from .ragged import Experts
from .scale_layout import swizzle_quantized, swizzled_size

TILE_COLUMNS = 128
GROUP_COLUMNS = 8
TILE_ROWS = 32
ROW_STEP = 8


@dataclass(frozen=True)
class Blocks:
    """Which MXFP8 copies are written, the shape of their blocks, and the order of their scales.

    rowwise: blocks of 1x32; colwise: of 32x1. block2d: both have one scale for each 32x32 tile instead. swizzled:
    scales over the whole buffer in tiles of 128 lines by 4 blocks (`scale_layout`), lines being rows or, column-wise,
    columns.
    ValueError: no copy at all.
    """

    rowwise: bool = True
    colwise: bool = True
    block2d: bool = False
    swizzled: bool = False

    def __post_init__(self) -> None:
        if not (self.rowwise or self.colwise):
            raise ValueError("neither rowwise nor colwise: at least one copy is written")


BOTH = Blocks()


def split_gate_up(gate_up: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives gate and up, each [rows, hidden], from a buffer [rows, 2 * hidden].

    layout: "halves", or "interleaved:B": blocks of B gate columns and B up columns alternate, gate first.
    ValueError: columns that do not fit the layout.
    """
    pairs = gate_up.unflatten(-1, (-1, 2, _block(gate_up.shape[-1], layout)))
    return pairs[..., 0, :].flatten(-2), pairs[..., 1, :].flatten(-2)


def join_gate_up(gate: torch.Tensor, up: torch.Tensor, layout: str) -> torch.Tensor:
    """Gives the buffer [rows, 2 * hidden] from which `split_gate_up` would give gate and up."""
    block = _block(2 * gate.shape[-1], layout)
    return torch.stack([part.unflatten(-1, (-1, block)) for part in (gate, up)], dim=-2).flatten(-3)


def _block(columns: int, layout: str) -> int:
    kind, _, size = layout.partition(":")
    if kind == "halves" and not size and columns and columns % 2 == 0:
        return columns // 2
    if kind == "interleaved" and size.isdigit() and int(size) and columns % (2 * int(size)) == 0:
        return int(size)
    raise ValueError(
        f"{columns} columns do not fit layout {layout!r}: expected 'halves' and an even number, or 'interleaved:B' "
        "and a multiple of 2 * B"
    )


def output_shapes(
    rows: int,
    hidden: int,
    experts: int,
    streams: int,
    quantised: bool,
    alignment: int,
    dprob: bool,
    blocks: Blocks = BOTH,
    dbias: bool = False,
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Gives shape and dtype of each result of an elementwise kernel that writes `streams` * `hidden` columns.

    streams: 1, or for a backward the number of the activation's inputs. alignment: of the offsets, which fixes the
    number of column-wise scale rows (`Experts.colwise_rows`).
    """
    width = streams * hidden
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    if quantised:
        dense = alignment % mxfp8.BLOCK == 0
        scale_rows = -(-rows // mxfp8.BLOCK) if dense else rows // mxfp8.BLOCK + experts
        if blocks.rowwise:
            shapes["codes_rowwise"] = ((rows, width), torch.uint8)
            shapes["scales_rowwise"] = ((rows, width // mxfp8.BLOCK), torch.uint8)
            if blocks.swizzled:
                shapes["scales_rowwise"] = ((swizzled_size(rows, width // mxfp8.BLOCK),), torch.uint8)
        if blocks.colwise:
            shapes["codes_colwise"] = ((rows, width), torch.uint8)
            shapes["scales_colwise"] = ((scale_rows, width), torch.uint8)
            if blocks.swizzled:
                shapes["scales_colwise"] = ((swizzled_size(width, scale_rows),), torch.uint8)
    else:
        shapes["out"] = ((rows, width), torch.bfloat16)
    shapes["amax"] = ((experts,), torch.float32)
    if dprob:
        shapes["dprob"] = ((rows,), torch.float32)
    if dbias:
        shapes["dbias"] = ((experts, width), torch.float32)
    return shapes


def find_activation(chosen: str | Activation) -> Activation:
    """Gives an activation by name, or itself. ValueError: an unknown name, with the known ones."""
    if not isinstance(chosen, str):
        return chosen
    if chosen not in ACTIVATIONS:
        raise ValueError(f"activation is {chosen!r}: expected one of {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[chosen]


def sum_over_row(terms: torch.Tensor) -> torch.Tensor:
    """Gives the sum over the columns of float32 [rows, columns] in the order of the module's docstring."""
    rows, columns = terms.shape
    tiles = -(-columns // TILE_COLUMNS)
    padded = torch.zeros((rows, tiles * TILE_COLUMNS), dtype=torch.float32, device=terms.device)
    padded[:, :columns] = terms
    groups = padded.view(rows, tiles, TILE_COLUMNS // GROUP_COLUMNS, GROUP_COLUMNS)
    sums = groups[..., 0]
    for place in range(1, GROUP_COLUMNS):
        sums = sums + groups[..., place]
    while sums.shape[-1] > 1:
        sums = sums[..., 0::2] + sums[..., 1::2]
    total = sums[:, 0, 0]
    for tile in range(1, tiles):
        total = total + sums[:, tile, 0]
    return total


def sum_over_rows(values: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Gives float32 [experts, columns]: the sum over each expert's rows of float32 [capacity, columns].

    In the order of the module's docstring; zeros for an expert without rows.
    """
    sums = torch.zeros((len(experts), values.shape[1]), dtype=torch.float32, device=values.device)
    for expert, (start, count) in enumerate(zip(experts.starts, experts.counts, strict=True)):
        tiles = -(-count // TILE_ROWS)
        if not tiles:
            continue
        padded = torch.zeros((tiles * TILE_ROWS, values.shape[1]), dtype=torch.float32, device=values.device)
        padded[:count] = values[start : start + count]
        steps = padded.view(tiles, TILE_ROWS // ROW_STEP, ROW_STEP, values.shape[1])
        of_tile = steps[:, 0]
        for step in range(1, TILE_ROWS // ROW_STEP):
            of_tile = of_tile + steps[:, step]
        while of_tile.shape[1] > 1:
            of_tile = of_tile[:, 0::2] + of_tile[:, 1::2]
        total = of_tile[0, 0]
        for tile in range(1, tiles):
            total = total + of_tile[tile, 0]
        sums[expert] = total
    return sums


def write_values(
    values: torch.Tensor,
    experts: Experts,
    element: FloatFormat | None,
    contract: Contract,
    blocks: Blocks = BOTH,
) -> dict[str, torch.Tensor]:
    """Gives the results of a kernel for float32 values [capacity, columns]: rounded or quantised, and the amax.

    Without `element`: `out` bfloat16 [capacity, columns]. With it: `codes_rowwise`, `scales_rowwise`,
    `codes_colwise`, `scales_colwise` of `mxfp8.quantize`, or the swizzled scales with contract.scale_padding where no
    block of an expert has one. Always `amax` float32 [experts], of the values before
    rounding to bfloat16, or of what is quantised.
    """
    if element is None:
        valid = experts.valid_rows(values.device).unsqueeze(1)
        rounded = torch.where(valid, values, 0.0).to(torch.bfloat16)
        return {"out": rounded, "amax": amaxes.per_expert(values, experts, contract)}
    results: dict[str, torch.Tensor] = {}
    for name, axis, wanted in (("rowwise", -1, blocks.rowwise), ("colwise", -2, blocks.colwise)):
        if wanted:
            copy = mxfp8.quantize(values, axis, element, contract, experts, blocks.block2d)
            scales = swizzle_quantized(copy, contract.scale_padding) if blocks.swizzled else copy.scales
            results |= {f"codes_{name}": copy.codes, f"scales_{name}": scales}
    staged = values.to(torch.bfloat16).to(torch.float32) if contract.staging == "bfloat16" else values
    return results | {"amax": amaxes.per_expert(staged, experts, contract)}


def _owned(name: str, x: torch.Tensor, experts: Experts, *columns: int) -> torch.Tensor:
    """x [capacity, *columns] in float32 with zeros in the rows that no expert owns; another shape is a ValueError."""
    shape = (experts.capacity, *columns)
    if x.shape != shape:
        raise ValueError(f"{name} has shape {list(x.shape)}: expected {list(shape)}")
    valid = experts.valid_rows(x.device)
    return torch.where(valid.view(-1, *[1] * len(columns)), as_float32(name, x), 0.0)


def _matrix(name: str, x: torch.Tensor, experts: Experts) -> torch.Tensor:
    """`_owned` of a matrix with any number of columns."""
    if x.dim() != 2:
        raise ValueError(f"{name} has shape {list(x.shape)}: expected two dimensions, [capacity, columns]")
    return _owned(name, x, experts, x.shape[1])


def _add_bias(inputs: torch.Tensor, bias: torch.Tensor | None, experts: Experts) -> torch.Tensor:
    """The float32 inputs plus their expert's bias; rows without an owner stay zeros."""
    if bias is None:
        return inputs
    if bias.dtype != torch.bfloat16 or bias.shape != (len(experts), inputs.shape[1]):
        raise ValueError(
            f"bias has dtype {bias.dtype} and shape {list(bias.shape)}: expected torch.bfloat16 "
            f"{[len(experts), inputs.shape[1]]}, a row for each expert"
        )
    owner = experts.row_expert(inputs.device)
    shifts = bias.to(torch.float32)[owner.clamp(min=0)]
    return torch.where((owner >= 0).unsqueeze(1), inputs + shifts, 0.0)


def activation_forward(
    gate_up: torch.Tensor,
    offsets: torch.Tensor,
    counts: torch.Tensor | None = None,
    prob: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    activation: str | Activation = "swiglu",
    layout: str = "halves",
    element: FloatFormat | None = None,
    blocks: Blocks = BOTH,
    alignment: int = 1,
    contract: Contract = SUITE,
) -> dict[str, torch.Tensor]:
    """Gives activation(gate, up), times prob, for every valid row of every expert; a bias is added to the inputs first.

    gate_up: bfloat16 [capacity, inputs * hidden]; offsets: int32 or int64 [experts + 1]; counts: [experts] or None;
    prob: float32 [capacity] or None; bias: bfloat16 [experts, inputs * hidden] in gate_up's layout, or None. Results:
    see `write_values`, with hidden columns. ValueError: offsets or counts that do not describe the buffer, columns that
    do not fit the layout or the block, an operand of another shape, a bias of another dtype. TypeError: values that
    float32 does not hold, or codes.
    """
    experts = Experts.from_offsets(offsets, counts, gate_up.shape[0], alignment)
    function = find_activation(activation)
    inputs = _add_bias(_matrix("gate_up", gate_up, experts), bias, experts)
    if isinstance(function, UnaryActivation):
        values = function.forward(inputs)
    else:
        values = function.forward(*split_gate_up(inputs, layout))
    if prob is not None:
        values = values * _owned("prob", prob, experts).unsqueeze(1)
    return write_values(values, experts, element, contract, blocks)


def activation_backward(
    grad: torch.Tensor,
    gate_up: torch.Tensor,
    offsets: torch.Tensor,
    counts: torch.Tensor | None = None,
    prob: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    activation: str | Activation = "swiglu",
    layout: str = "halves",
    element: FloatFormat | None = None,
    blocks: Blocks = BOTH,
    alignment: int = 1,
    contract: Contract = SUITE,
) -> dict[str, torch.Tensor]:
    """Gives the gradient of `activation_forward` with respect to gate_up; `dprob` and `dbias` where those are given.

    grad: bfloat16 [capacity, hidden]. The gradient that enters the activation is grad * prob, rounded to float32.
    Results: see `write_values`, in gate_up's layout; `dprob` float32 [capacity], where prob is given; `dbias` float32
    [experts, inputs * hidden], where bias is. Errors: as for `activation_forward`.
    """
    experts = Experts.from_offsets(offsets, counts, gate_up.shape[0], alignment)
    function = find_activation(activation)
    inputs = _add_bias(_matrix("gate_up", gate_up, experts), bias, experts)
    incoming = _owned("grad", grad, experts, inputs.shape[1] // function.inputs)
    weighted = incoming if prob is None else incoming * _owned("prob", prob, experts).unsqueeze(1)
    if isinstance(function, UnaryActivation):
        value, gradient = function.differentiate(weighted, inputs)
    else:
        value, dgate, dup = function.differentiate(weighted, *split_gate_up(inputs, layout))
        gradient = join_gate_up(dgate, dup, layout)
    results = write_values(gradient, experts, element, contract, blocks)
    if prob is not None:
        results["dprob"] = sum_over_row(incoming * value)
    if bias is not None:
        results["dbias"] = sum_over_rows(gradient, experts)
    return results


def quantize(
    x: torch.Tensor,
    offsets: torch.Tensor,
    counts: torch.Tensor | None = None,
    *,
    element: FloatFormat,
    blocks: Blocks = BOTH,
    alignment: int = 1,
    contract: Contract = SUITE,
) -> dict[str, torch.Tensor]:
    """Gives MXFP8 codes and scales of x, in the copies that `blocks` names, and each expert's amax.

    x: bfloat16 [capacity, hidden]. Results: see `write_values`.
    """
    experts = Experts.from_offsets(offsets, counts, x.shape[0], alignment)
    return write_values(_matrix("x", x, experts), experts, element, contract, blocks)
