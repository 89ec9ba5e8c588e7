"""The stages of a training step, each recomputed by the reference from what the kernels themselves wrote before it.

operands                copies of x, grad and both weights                  from the inputs
fc1                     preactivation                                       from the copies of x and weights1
activation              activation, or its copies from MXFP8 operands       from the same: float32 values stay inside
activation copies       NVFP4 copies of the activation                      from activation
fc2                     out                                                 from the copies of activation, weights2
fc2 dgrad               dactivation                                         from the copies of grad and weights2
activation backward     dprob, dbias; dpreactivation or its MXFP8 copies    from the same, and preactivation
dpreactivation copies   NVFP4 copies of the gradient                        from dpreactivation
fc1 dgrad               dx                                                  from the copies of dpreactivation, weights1
wgrad                   dweights1, dweights2                                from column-wise copies
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_numerics.cases import Case
from moe_numerics.operations import Tensors
from moe_numerics.reference import grouped_mlp
from moe_numerics.reference.contract import Contract
from moe_numerics.reference.grouped_gemm import grouped_dgrad, grouped_matmul, grouped_wgrad
from moe_numerics.reference.quantized import Quantized
from moe_numerics.reference.ragged import Experts
from moe_numerics.step_operations import TrainingStep

__all__ = ["stages_of_step"]

Operand = Tensor | Quantized


@dataclass(frozen=True)
class _Written:
    """What the kernels wrote, as operands of the products that read it."""

    got: Mapping[str, Tensor]

    def _copy(self, known: Operand, name: str, which: str, expert: int | None = None) -> Operand:
        if isinstance(known, Tensor):
            return known

        def part(kind: str) -> Tensor:
            whole = self.got[f"{name}_{kind}_{which}"]
            return whole if expert is None else whole[expert]

        amax = known.global_amax
        if amax is not None:
            amax = part("amax").reshape(amax.shape)
        return replace(known, codes=part("codes"), scales=part("scales"), global_amax=amax)

    def tokens(self, known: grouped_mlp.Copies, name: str) -> grouped_mlp.Copies:
        """The copies of a token tensor; of bfloat16 operands the tensor that was written, if one was."""
        if isinstance(known.rowwise, Tensor):
            own = self.got.get(name, known.rowwise)
            return grouped_mlp.Copies(own, own)
        return grouped_mlp.Copies(*(self._copy(getattr(known, which), name, which) for which in ("rowwise", "colwise")))

    def weights(self, known: list[grouped_mlp.Copies], name: str) -> list[grouped_mlp.Copies]:
        """The copies of each expert's weights."""
        return [
            grouped_mlp.Copies(*(self._copy(getattr(each, which), name, which, e) for which in ("rowwise", "colwise")))
            for e, each in enumerate(known)
        ]


def stages_of_step(
    operation: TrainingStep, case: Case, tensors: Tensors, contract: Contract, got: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(what each output should be for what the kernels gave its stage, the stage of each output in order)."""
    choices, written = operation.choices(case, contract), _Written(got)
    experts = Experts.from_offsets(case.offsets, case.counts if case.padded else None, case.capacity, case.alignment)
    reference = operation.reference(case, tensors, contract)
    nvfp4 = choices.operands == "nvfp4"
    x, grad = (
        written.tokens(
            grouped_mlp.copies(tensors[name], experts, choices, gradient=name == "grad", seed=choices.seed), name
        )
        for name in ("x", "grad")
    )
    first, second = (
        written.weights(grouped_mlp.weight_copies(tensors[name], choices), name) for name in ("weights1", "weights2")
    )
    ragged: dict[str, Any] = {"offsets": [*experts.starts, experts.capacity], "counts": experts.counts}
    product: dict[str, Any] = {**ragged, "accumulator": contract.accumulator, "dtype": torch.bfloat16}
    launch: dict[str, Any] = {
        "offsets": tensors["offsets"],
        "counts": tensors.get("counts"),
        "prob": tensors.get("prob"),
        "activation": choices.activation,
        "layout": choices.layout,
        "epilogue_input": choices.epilogue_input,
        "alignment": case.alignment,
        "contract": contract,
    }
    element = choices.element if choices.operands == "mxfp8" else None
    grad_element = choices.grad_element if choices.operands == "mxfp8" else None
    forward = grouped_mlp.fc1(x.rowwise, [each.rowwise for each in first], element=element, **launch)
    backward = grouped_mlp.fc2_backward(
        grad.rowwise, [each.colwise for each in second], got["preactivation"], element=grad_element, **launch
    )
    expected, names = dict(reference), dict[str, str]()

    def blank(columns: int, gradient: bool = False) -> grouped_mlp.Copies:
        """Copies of the right shapes, whose contents are then those that were written."""
        return grouped_mlp.copies(torch.zeros(case.capacity, columns), experts, choices, gradient=gradient)

    def stage(name: str, results: Mapping[str, Tensor]) -> None:
        for output, value in results.items():
            if output in got:
                expected[output], names[output] = value.reshape(got[output].shape), name

    operands = ("x", "weights1", "weights2", "grad")
    stage("operands", {name: value for name, value in reference.items() if _copied(name) in operands})
    stage("fc1", {"preactivation": forward["preactivation"]})
    stage("activation", _named("activation", forward))
    activation = written.tokens(blank(case.hidden), "activation")
    if nvfp4:
        stage("activation copies", grouped_mlp.copies(got["activation"], experts, choices).named("activation"))
    stage("fc2", {"out": grouped_matmul(activation.rowwise, [each.rowwise for each in second], **product)})
    stage("fc2 dgrad", {"dactivation": backward["dactivation"]})
    stage("activation backward", {name: backward[name] for name in ("dprob", "dbias") if name in backward})
    stage("activation backward", _named("dpreactivation", backward))
    outgoing = written.tokens(blank(operation.activation.inputs * case.hidden, gradient=True), "dpreactivation")
    if nvfp4:
        copied = grouped_mlp.copies(got["dpreactivation"], experts, choices, gradient=True, seed=choices.seed + 1)
        stage("dpreactivation copies", copied.named("dpreactivation"))
    stage("fc1 dgrad", {"dx": grouped_dgrad(outgoing.rowwise, [each.colwise for each in first], **product)})
    for name, left, right in (("dweights1", outgoing, x), ("dweights2", grad, activation)):
        rows = left.colwise.experts if isinstance(left.colwise, Quantized) else experts
        of_rows: dict[str, Any] = {"offsets": [*rows.starts, rows.capacity], "counts": rows.counts}
        stage("wgrad", {name: grouped_wgrad(left.colwise, right.colwise, accumulator=contract.accumulator, **of_rows)})
    return expected, names


def _copied(name: str) -> str:
    """The tensor that an output is a copy of."""
    return name.partition("_")[0]


def _named(tensor: str, results: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a launch wrote of an activation, by the step's names."""
    copies = {f"{tensor}_{name}": value for name, value in results.items() if name.startswith(("codes_", "scales_"))}
    return copies or {tensor: results["out"]}
