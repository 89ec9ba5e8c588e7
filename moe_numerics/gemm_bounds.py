"""Enclosures of grouped matrix products and of the MLP's launches: a tensor core's sum, then the epilogue's steps.

sum over K          `bounds.accumulated`: the accumulator of the contract, a truncation for each group of K
alpha, bias, prob   one rounded operation each, in the order of `reference.grouped_gemm`
main_grad           one rounded addition
activation          `activation_bounds`, of an operand that has the error so far
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_numerics import activation_bounds
from moe_numerics.bounds import Arithmetic, BoundError, Enclosure, accumulated, expert_sum, largest, product
from moe_numerics.cases import Case
from moe_numerics.gemm_operations import FirstLayer, MatmulQuantize, Product, SecondLayerBackward, WeightGradient
from moe_numerics.reference.contract import Contract
from moe_numerics.reference.quantized import Quantized
from moe_numerics.reference.ragged import Experts
from moe_numerics.reference.tensor_core import find_model

__all__ = ["layer_of", "product_of"]

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class _Factor:
    """A factor of a product: what the tensor core multiplies, and what NVFP4 multiplies the sum by."""

    values: Tensor
    amax: Tensor | None = None
    constant: float = 1.0

    @classmethod
    def of(cls, operand: Tensor | Quantized, contract: Contract) -> _Factor:
        """BoundError: block scales that the tensor core applies itself."""
        if isinstance(operand, Tensor):
            return cls(operand)
        if find_model(contract.accumulator).scale_format:
            raise BoundError(f"{contract.accumulator}: enclosures are derived for products of exact bfloat16 operands")
        # Codes times block scales are exact in bfloat16.
        values = replace(operand, global_amax=None).dequantize().to(torch.bfloat16)
        return cls(values, operand.global_amax, operand.global_factor)

    def scales(self, expert: int) -> list[float]:
        """Factors of the sum that belong to this operand."""
        if self.amax is None:
            return []
        return [float(self.amax[expert] if self.amax.dim() else self.amax), self.constant]


def _scaled(value: Enclosure, factors: list[float], arithmetic: Arithmetic) -> Enclosure:
    exact = [Enclosure.exact(torch.full_like(value.value, factor)) for factor in factors]
    return product(arithmetic, value, *exact) if exact else value


def _alpha(tensors: Tensors, expert: int) -> list[float]:
    alpha = tensors.get("alpha")
    return [] if alpha is None else [float(alpha[expert] if alpha.dim() else alpha)]


def _plus(value: Enclosure, addend: Tensor, arithmetic: Arithmetic) -> Enclosure:
    """After one rounded addition of something exact."""
    wide = addend.double()
    total = Enclosure(value.value + wide, value.error, value.decided & ~torch.isinf(wide))
    return total.rounded(arithmetic.unit, arithmetic.underflow)


def _rows(
    operation: Product | MatmulQuantize,
    case: Case,
    tensors: Tensors,
    experts: Experts,
    contract: Contract,
    arithmetic: Arithmetic,
) -> Enclosure:
    """The rows of every expert times its weights, with alpha and bias, [capacity, columns]; 0 in rows without owner."""
    backward = (
        operation.kind == "dgrad" if isinstance(operation, Product) else isinstance(operation, SecondLayerBackward)
    )
    given = operation.operands.over_columns(case, tensors, contract, backward)
    left = _Factor.of(given["grad" if "grad" in given else "x"], contract)
    weights = [_Factor.of(each, contract) for each in given["weights"]]
    columns = tensors["weights"].shape[2 if backward else 1]
    value = torch.zeros((experts.capacity, columns), dtype=torch.float64)
    error, decided = torch.zeros_like(value), torch.ones_like(value, dtype=torch.bool)
    for e, (start, count) in enumerate(zip(experts.starts, experts.counts, strict=True)):
        if not count:
            continue
        rows, right = slice(start, start + count), weights[e].values
        part = accumulated(left.values[rows], right if backward else right.t(), contract.accumulator)
        part = _scaled(part, [*_alpha(tensors, e), *left.scales(e), *weights[e].scales(e)], arithmetic)
        if "bias" in tensors:
            part = _plus(part, tensors["bias"][e], arithmetic)
        value[rows], error[rows], decided[rows] = part.value, part.error, part.decided
    return Enclosure(value, error, decided)


def product_of(
    operation: Product | WeightGradient,
    case: Case,
    tensors: Tensors,
    experts: Experts,
    contract: Contract,
    arithmetic: Arithmetic,
) -> Enclosure:
    """The result of a product, in its dtype."""
    if isinstance(operation, WeightGradient):
        value = _weight_gradient(operation, case, tensors, experts, contract, arithmetic)
    else:
        value = _rows(operation, case, tensors, experts, contract, arithmetic)
        factors = activation_bounds.probabilities(tensors, experts)
        value = product(arithmetic, value, *factors) if factors else value
    return value.converted(mantissa_bits=7) if operation.dtype == torch.bfloat16 else value


def _weight_gradient(
    operation: WeightGradient,
    case: Case,
    tensors: Tensors,
    experts: Experts,
    contract: Contract,
    arithmetic: Arithmetic,
) -> Enclosure:
    operands = operation.operands.over_rows(case, tensors, contract)
    grad, x = (_Factor.of(operands[name], contract) for name in ("grad", "x"))
    # Rotated operands describe a buffer of their own.
    rows_of = operands["grad"].experts if isinstance(operands["grad"], Quantized) else experts
    main = tensors.get("main_grad")
    parts = []
    for e, (start, count) in enumerate(zip(rows_of.starts, rows_of.counts, strict=True)):
        rows = slice(start, start + count)
        if count:
            part = accumulated(grad.values[rows].t(), x.values[rows], contract.accumulator)
            part = _scaled(part, [*_alpha(tensors, e), *grad.scales(e), *x.scales(e)], arithmetic)
            parts.append(part if main is None else _plus(part, main[e], arithmetic))
        else:
            untouched = torch.zeros(grad.values.shape[1], x.values.shape[1]) if main is None else main[e]
            parts.append(Enclosure.exact(untouched))
    fields = zip(*((each.value, each.error, each.decided) for each in parts), strict=True)
    return Enclosure(*(torch.stack(each) for each in fields))


def layer_of(
    operation: MatmulQuantize,
    case: Case,
    tensors: Tensors,
    experts: Experts,
    contract: Contract,
    arithmetic: Arithmetic,
) -> tuple[Enclosure, dict[str, Enclosure]]:
    """(the values that are rounded or quantised, what a layer gives besides)."""
    factors = activation_bounds.probabilities(tensors, experts)
    floats: dict[str, Enclosure] = {}
    if isinstance(operation, SecondLayerBackward):
        incoming = _rows(operation, case, tensors, experts, contract, arithmetic)
        incoming = _received(operation, incoming)
        floats["dactivation"] = incoming
        x = activation_bounds.given(tensors, "preactivation", experts, arithmetic)
        values, floats["dprob"] = activation_bounds.backward(
            operation.activation, incoming, x, case.layout, arithmetic, factors
        )
        floats["dbias"] = expert_sum(values, experts)
    else:
        values = _rows(operation, case, tensors, experts, contract, arithmetic)
        if isinstance(operation, FirstLayer):
            floats["preactivation"] = values.converted(mantissa_bits=7)
            values = activation_bounds.forward(
                operation.activation, _received(operation, values), case.layout, arithmetic, factors
            )
        elif factors:
            values = product(arithmetic, values, *factors)
    if operation.rotated_amax:
        # Which amax a rotation in another order of additions has is not derived.
        amax = largest(values, experts)
        floats["amax_rotated"] = Enclosure(amax.value, amax.error, torch.zeros_like(amax.decided))
    return values, floats


def _received(operation: FirstLayer, values: Enclosure) -> Enclosure:
    """What the epilogue computes with."""
    return values if operation.epilogue_input == "accumulator" else values.converted(mantissa_bits=7)
