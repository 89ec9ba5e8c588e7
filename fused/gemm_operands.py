"""The two factors of a grouped GEMM as a caller gives them: checked, their scales combined, and as kernels take them.

With an accumulator that has scales (Blackwell) the tensor core takes codes and block scales as they are; with one of
bfloat16 a kernel multiplies them first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from moe_numerics.fused.blackwell_operands import Operands
from moe_numerics.fused.blackwell_problem import RaggedSlots
from moe_numerics.fused.compilation import current_target
from moe_numerics.fused.dequantize import dequantize_tokens, dequantize_weights
from moe_numerics.fused.elementwise import check_ragged
from moe_numerics.fused.gemm_launch import Factors, Kind
from moe_numerics.fused.gemm_problem import RaggedDepth, RaggedRows
from moe_numerics.fused.launch import check_tensor
from moe_numerics.fused.quantized import Quantized, colwise_rows
from moe_numerics.reference.tensor_core_models import Model, find_model

__all__ = ["Product", "Ragged", "block_offsets", "check_bias", "check_prob", "product_of_rows", "product_over_rows"]

# TMA's strides are multiples of 16 bytes.
STRIDE = 8
CODE_STRIDE = 16
# Experts are a dimension of a grid.
MOST_EXPERTS = 65535
TRANSPOSED_BLOCK = 16


@dataclass(frozen=True, eq=False)
class Ragged:
    """Token offsets and counts on the device; alignment: what every offset is a multiple of."""

    offsets: torch.Tensor
    counts: torch.Tensor | None
    alignment: int
    experts: int

    @classmethod
    def read(
        cls, tokens: torch.Tensor | Quantized, offsets: torch.Tensor, counts: torch.Tensor | None, alignment: int
    ) -> Ragged:
        """Of a buffer of tokens. ValueError: see `check_ragged`; more experts than a grid has room for."""
        device = tokens.codes.device if isinstance(tokens, Quantized) else tokens.device
        experts = check_ragged(offsets, counts, device, alignment)
        if experts > MOST_EXPERTS:
            raise ValueError(f"offsets describe {experts} experts: these kernels take at most {MOST_EXPERTS}")
        return cls(offsets, counts, alignment, experts)


def block_offsets(
    offsets: torch.Tensor, counts: torch.Tensor | None, rows: int, alignment: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets and counts of the block-aligned buffer of a buffer of `rows` rows, both int32, on the device.

    See `moe_numerics.reference.ragged.Experts.blocks(16)`: every expert owns whole blocks of 16 rows there.
    """
    experts, block = offsets.shape[0] - 1, TRANSPOSED_BLOCK
    valid = offsets[1:] - offsets[:-1] if counts is None else counts
    starts = offsets[:-1] // block
    if alignment % block:
        starts = starts + torch.arange(experts, dtype=offsets.dtype, device=offsets.device)
    end = torch.full((1,), colwise_rows(rows, experts, alignment, block), dtype=offsets.dtype, device=offsets.device)
    bounds = torch.cat((starts, end)) * block
    return bounds.to(torch.int32), ((valid + (block - 1)) // block * block).to(torch.int32)


@dataclass(frozen=True, eq=False)
class Factor:
    """A checked operand: tokens [rows, columns], or weights [experts, rows, columns]."""

    name: str
    source: torch.Tensor | Quantized
    rows: int
    columns: int
    weights: bool

    @classmethod
    def read(
        cls,
        name: str,
        source: torch.Tensor | Quantized,
        axis: int,
        ragged: Ragged,
        device: torch.device,
        weights: bool = False,
    ) -> Factor:
        """A factor that is summed along an axis. ValueError: dtype, shape, device, stride or alignment of a tensor."""
        if isinstance(source, Quantized):
            source.check(name, device, ragged.experts, axis, weights)
            rows = source.rows(name, ragged.experts, ragged.alignment, weights)
            return cls(name, source, rows, source.columns, weights)
        shape = (ragged.experts, None, None) if weights else (None, None)
        check_tensor(name, source, torch.bfloat16, shape, device, 16)
        return cls(name, source, source.shape[-2], source.shape[-1], weights)

    @property
    def transposed(self) -> bool:
        """Whether this is given as transposed codes."""
        return isinstance(self.source, Quantized) and self.source.transposed

    def bfloat16(self, ragged: Ragged) -> torch.Tensor:
        """The values without the global amax; launches the dequantisation of a quantised factor.

        ValueError: its scales are swizzled, which only a tensor core with block scales reads.
        """
        if isinstance(self.source, torch.Tensor):
            return self.source
        if self.source.swizzled:
            raise ValueError(
                f"{self.name} scales are in the 128x4-swizzled layout of block-scaled tensor cores: products in "
                f"bfloat16 for {current_target()} dequantise first and take compact scales"
            )
        if self.weights:
            return dequantize_weights(self.source)
        return dequantize_tokens(self.source, self.rows, ragged.offsets, ragged.counts, ragged.alignment)


@dataclass(frozen=True, eq=False)
class Product:
    """Two factors that fit each other, and the shape [rows, columns] of their product (of each expert's, over rows).

    transposed: the weights are [experts, K, N].
    """

    left: Factor
    right: Factor
    ragged: Ragged
    rows: int
    columns: int
    multiples: tuple[tuple[int, ...], tuple[int, ...]]
    over_rows: bool = False
    transposed: bool = False

    def factors(self, accumulator: str) -> Factors:
        """Both factors for `launch_gemm`. ValueError: they do not fit the accumulator, which the target has."""
        model = find_model(accumulator)
        if model.scale_format:
            return self._scaled(model)
        problem = RaggedDepth() if self.over_rows else RaggedRows(self.transposed)
        left, right = (
            (factor.bfloat16(self.ragged), Kind(torch.bfloat16, sizes, 16))
            for factor, sizes in zip((self.left, self.right), self.multiples, strict=True)
        )
        return Factors(problem, left, right)

    def _scaled(self, model: Model) -> Factors:
        sources = []
        for factor in (self.left, self.right):
            source = factor.source
            if not isinstance(source, Quantized) or not _applies(model, source):
                raise ValueError(
                    f"an operand does not fit accumulator {model.name}: it needs {' or '.join(model.operands)} codes "
                    f"with {model.scale_format} scales for {model.scale_block}"
                )
            sources.append(source)
        left, right = sources
        codes = [source.codes for source in sources]
        problem: RaggedRows | RaggedDepth
        if self.over_rows:
            dense = self.ragged.alignment % left.block == 0
            problem = RaggedSlots(dense) if left.packed else RaggedDepth(dense)
        else:
            # Column-wise NVFP4 copies are transposed already.
            problem = RaggedRows(self.transposed and not left.packed)
        if left.packed and self.over_rows:
            # 8 bytes a block, of which there may be an odd number.
            codes = [torch.nn.functional.pad(each, (0, each.shape[1] % CODE_STRIDE)) for each in codes]
        for each in codes:
            _check_multiple(f"a line of codes has {each.shape[-1]} bytes", each.shape[-1], CODE_STRIDE)
        given = [(each, Kind(torch.uint8, (*(1,) * (each.dim() - 1), CODE_STRIDE), 16)) for each in codes]
        operands = Operands(left.element.name, right.element.name)
        scales = [source.tiles() if source.swizzled else source.scales for source in sources]
        return Factors(problem, given[0], given[1], operands, (scales[0], scales[1]))

    def alpha(self, alpha: torch.Tensor | float | None) -> torch.Tensor | None:
        """What each expert's accumulators are multiplied by: ((alpha * amax_left) * amax_right) * factor, float32.

        factor: the product of the global factors. ValueError: alpha is neither one number nor one an expert.
        """
        experts, device = self.ragged.experts, self.ragged.offsets.device
        factors = []
        if isinstance(alpha, torch.Tensor):
            check_tensor("alpha", alpha, torch.float32, (experts,) if alpha.dim() else (), device, 4)
            factors.append(alpha)
        elif alpha is not None:
            factors.append(torch.full((), alpha, dtype=torch.float32, device=device))
        scaled = [
            factor.source
            for factor in (self.left, self.right)
            if isinstance(factor.source, Quantized) and factor.source.global_amax is not None
        ]
        factors += [source.global_amax.reshape(-1) for source in scaled if source.global_amax is not None]
        constant = math.prod(source.global_factor for source in scaled)
        if constant != 1.0:
            factors.append(torch.full((), constant, dtype=torch.float32, device=device))
        if not factors:
            return None
        scale = factors[0].reshape(-1)
        for factor in factors[1:]:
            scale = scale * factor
        return scale if scale.numel() == experts else scale.repeat(experts)


def product_of_rows(
    name: str,
    x: torch.Tensor | Quantized,
    weights: torch.Tensor | Quantized,
    ragged: Ragged,
    transposed: bool,
    columns_multiple: int,
) -> Product:
    """Each row of x [rows, K] times its expert's weights [N, K], or `transposed` [K, N]: [rows, N].

    ValueError: an operand or their shapes do not fit; K or N is not a multiple of what the kernels need.
    """
    device = ragged.offsets.device
    left = Factor.read(name, x, -1, ragged, device)
    right = Factor.read("weights", weights, -2 if transposed else -1, ragged, device, weights=True)
    depth, columns = (right.rows, right.columns) if transposed else (right.columns, right.rows)
    if left.columns != depth:
        shape = [ragged.experts, right.rows, right.columns]
        raise ValueError(f"{name} has {left.columns} columns: expected {depth}, which weights {shape} sum")
    _check_multiple(f"{name} has {depth} columns", depth, STRIDE)
    _check_multiple(f"the result has {columns} columns", columns, columns_multiple)
    right_sizes = (1, STRIDE, columns_multiple) if transposed else (1, columns_multiple, STRIDE)
    return Product(left, right, ragged, left.rows, columns, ((1, STRIDE), right_sizes), transposed=transposed)


def product_over_rows(
    grad: torch.Tensor | Quantized, x: torch.Tensor | Quantized, ragged: Ragged, columns_multiple: int
) -> Product:
    """The transpose of each expert's rows of grad [rows, N] times its rows of x [rows, K]: [N, K].

    ValueError: as for `product_of_rows`.
    """
    device = ragged.offsets.device
    left = Factor.read("grad", grad, -2, ragged, device)
    right = Factor.read("x", x, -2, ragged, device)
    # Transposed codes have whole blocks of rows: as many as the other factor's rows need.
    plain = [factor.rows for factor in (left, right) if not factor.transposed]
    rows = plain[0] if plain else left.rows
    for name, factor in (("grad", left), ("x", right)):
        wanted = rows
        if factor.transposed and plain:
            wanted = colwise_rows(rows, ragged.experts, ragged.alignment, TRANSPOSED_BLOCK) * TRANSPOSED_BLOCK
        if factor.rows != wanted:
            raise ValueError(f"{name} has {factor.rows} rows: expected {wanted}, as the other operand has {rows}")
    _check_multiple(f"grad has {left.columns} columns", left.columns, STRIDE)
    _check_multiple(f"x has {right.columns} columns", right.columns, columns_multiple)
    multiples = (1, STRIDE), (1, columns_multiple)
    return Product(left, right, ragged, left.columns, right.columns, multiples, over_rows=True)


def _applies(model: Model, source: Quantized) -> bool:
    """Whether the tensor core can apply the block scales of an operand."""
    kind = (source.scale_format.name.lower(), source.block)
    return source.element.name.lower() in model.operands and kind == (model.scale_format, model.scale_block)


def _check_multiple(what: str, size: int, multiple: int) -> None:
    if size == 0 or size % multiple:
        raise ValueError(f"{what}: expected a positive multiple of {multiple}")


def check_bias(bias: torch.Tensor | None, experts: int, columns: int, device: torch.device) -> bool:
    """Whether the bias is float32 and not bfloat16. ValueError: it does not fit."""
    if bias is None:
        return False
    dtype = torch.float32 if bias.dtype == torch.float32 else torch.bfloat16
    check_tensor("bias", bias, dtype, (experts, columns), device, 16)
    return dtype == torch.float32


def check_prob(prob: torch.Tensor | None, rows: int, device: torch.device) -> None:
    """ValueError: a prob that does not fit."""
    if prob is not None:
        check_tensor("prob", prob, torch.float32, (rows,), device, 4)
