"""How the paths of the grouped GEMMs and of the MLP's launches compute: their reference and their fused kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from moe_numerics.cases import Case
from moe_numerics.operations import Shapes, Tensors
from moe_numerics.reference import grouped_gemm, grouped_mlp
from moe_numerics.reference.activations import Activation
from moe_numerics.reference.contract import Contract
from moe_numerics.reference.elementwise import output_shapes
from moe_numerics.reference.formats import E4M3, FloatFormat
from moe_numerics.reference.quantized import Quantized
from moe_numerics.reference.ragged import Experts

__all__ = ["BF16", "FirstLayer", "MatmulQuantize", "Operands", "Product", "SecondLayerBackward", "WeightGradient"]

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Operands:
    """What both factors of a product are: "bf16", or quantised from the case's bfloat16 to "mxfp8" or "nvfp4".

    grad_element: the MXFP8 format of gradients; everything else is E4M3. Quantised by the reference, for it and for the
    kernel alike: tokens as in a training step without stochastic rounding, weights as there.
    """

    form: str = "bf16"
    grad_element: FloatFormat = E4M3

    def _choices(self, contract: Contract) -> grouped_mlp.Step:
        return grouped_mlp.Step(self.form, grad_element=self.grad_element, stochastic=False, contract=contract)

    def over_columns(self, case: Case, tensors: Tensors, contract: Contract, transposed: bool) -> Arguments:
        """Tokens and weights, summed along the columns of the tokens; transposed: along the rows of the weights."""
        left = "grad" if "grad" in tensors else "x"
        if self.form == "bf16":
            return {left: tensors[left], "weights": tensors["weights"]}
        choices, experts = self._choices(contract), _experts(case)
        tokens = grouped_mlp.copies(tensors[left], experts, choices, gradient=left == "grad")
        weights = grouped_mlp.weight_copies(tensors["weights"], choices)
        return {left: tokens.rowwise, "weights": [each.colwise if transposed else each.rowwise for each in weights]}

    def over_rows(self, case: Case, tensors: Tensors, contract: Contract) -> Arguments:
        """grad and x, summed along their rows, with the offsets and counts of the buffer that they describe."""
        if self.form == "bf16":
            return {"grad": tensors["grad"], "x": tensors["x"], **_ragged(case, tensors)}
        choices, experts = self._choices(contract), _experts(case)
        grad, x = (
            grouped_mlp.copies(tensors[name], experts, choices, gradient=name == "grad").colwise
            for name in ("grad", "x")
        )
        assert isinstance(grad, Quantized)
        if grad.experts == experts:
            return {"grad": grad, "x": x, **_ragged(case, tensors)}
        offsets, counts = tensors["offsets"], grad.experts.counts
        return {
            "grad": grad,
            "x": x,
            "offsets": offsets.new_tensor((*grad.experts.starts, grad.experts.capacity)),
            "counts": torch.tensor(counts, dtype=torch.int32, device=offsets.device),
            "alignment": grad.experts.alignment,
        }


BF16 = Operands()


def _experts(case: Case) -> Experts:
    return Experts.from_offsets(case.offsets, case.counts if case.padded else None, case.capacity, case.alignment)


def _ragged(case: Case, tensors: Tensors) -> Arguments:
    return {"offsets": tensors["offsets"], "counts": tensors.get("counts"), "alignment": case.alignment}


def _given(tensors: Tensors, *names: str) -> Arguments:
    """Arguments that a path may lack."""
    return {name: tensors[name] for name in names if name in tensors}


def _as_fused(arguments: Arguments) -> Arguments:
    """The arguments of a reference as its fused twin takes them: weights of all experts stacked."""
    from moe_numerics.fused.quantized import Quantized as FusedQuantized

    return {
        name: FusedQuantized.of(value) if isinstance(value, Quantized | list) else value
        for name, value in arguments.items()
    }


@dataclass(frozen=True)
class Product:
    """Rows times weights: "matmul" x @ W^T, with alpha, bias and prob where the case has them, or "dgrad" grad @ W."""

    kind: Literal["matmul", "dgrad"]
    dtype: torch.dtype
    operands: Operands = BF16

    def shapes(self, case: Case) -> Shapes:
        return {"out": ((case.capacity, case.hidden), self.dtype)}

    def _arguments(self, case: Case, tensors: Tensors, contract: Contract) -> Arguments:
        """Arguments that the reference and the kernel share."""
        return {
            **self.operands.over_columns(case, tensors, contract, self.kind == "dgrad"),
            **_given(tensors, "alpha", "bias", "prob"),
            **_ragged(case, tensors),
            "accumulator": contract.accumulator,
            "dtype": self.dtype,
        }

    def reference(self, case: Case, tensors: Tensors, contract: Contract) -> dict[str, torch.Tensor]:
        function = grouped_gemm.grouped_matmul if self.kind == "matmul" else grouped_gemm.grouped_dgrad
        return {"out": function(**self._arguments(case, tensors, contract))}

    def fused(self, case: Case, tensors: Tensors, contract: Contract, out: Tensors) -> None:
        from moe_numerics.fused.grouped_gemm import grouped_dgrad, grouped_matmul

        function = grouped_matmul if self.kind == "matmul" else grouped_dgrad
        function(**_as_fused(self._arguments(case, tensors, contract)), out=out["out"])


@dataclass(frozen=True)
class WeightGradient:
    """grad^T @ x of each expert's rows, added to main_grad where the case has one."""

    dtype: torch.dtype
    operands: Operands = BF16

    def shapes(self, case: Case) -> Shapes:
        return {"out": ((len(case.counts), case.depth, case.hidden), self.dtype)}

    def _arguments(self, case: Case, tensors: Tensors, contract: Contract) -> Arguments:
        return {
            **self.operands.over_rows(case, tensors, contract),
            **_given(tensors, "main_grad", "alpha"),
            "accumulator": contract.accumulator,
            "dtype": self.dtype,
        }

    def reference(self, case: Case, tensors: Tensors, contract: Contract) -> dict[str, torch.Tensor]:
        return {"out": grouped_gemm.grouped_wgrad(**self._arguments(case, tensors, contract))}

    def fused(self, case: Case, tensors: Tensors, contract: Contract, out: Tensors) -> None:
        from moe_numerics.fused.grouped_gemm import grouped_wgrad

        grouped_wgrad(**_as_fused(self._arguments(case, tensors, contract)), out=out["out"])


@dataclass(frozen=True, kw_only=True)
class MatmulQuantize:
    """x @ W^T quantised to MXFP8 `element` both ways, or bfloat16 without; rotated_amax: also that of the rotation."""

    element: FloatFormat | None
    rotated_amax: bool = False
    operands: Operands = BF16

    def _written(self, case: Case, streams: int = 1, dprob: bool = False) -> Shapes:
        experts = len(case.counts)
        quantised = self.element is not None
        shapes = output_shapes(case.capacity, case.hidden, experts, streams, quantised, case.alignment, dprob)
        if self.rotated_amax:
            shapes["amax_rotated"] = ((experts,), torch.float32)
        return shapes

    def shapes(self, case: Case) -> Shapes:
        return self._written(case)

    def _arguments(self, case: Case, tensors: Tensors, contract: Contract) -> Arguments:
        """Arguments that the reference and the kernel share."""
        return {
            **self.operands.over_columns(case, tensors, contract, "grad" in tensors),
            **_given(tensors, "alpha", "bias", "prob", "preactivation"),
            **_ragged(case, tensors),
            "element": self.element,
            "rotated_amax": self.rotated_amax,
            "contract": contract,
        }

    def reference(self, case: Case, tensors: Tensors, contract: Contract) -> dict[str, torch.Tensor]:
        return grouped_mlp.matmul_quantize(**self._arguments(case, tensors, contract))

    def fused(self, case: Case, tensors: Tensors, contract: Contract, out: Tensors) -> None:
        from moe_numerics.fused.grouped_mlp import matmul_quantize

        matmul_quantize(**_as_fused(self._arguments(case, tensors, contract)), out=out)


@dataclass(frozen=True, kw_only=True)
class FirstLayer(MatmulQuantize):
    """The first linear layer with its activation. epilogue_input: what that sees, as for `grouped_mlp.fc1`."""

    activation: Activation
    epilogue_input: str = "accumulator"

    def shapes(self, case: Case) -> Shapes:
        columns = self.activation.inputs * case.hidden
        return {"preactivation": ((case.capacity, columns), torch.bfloat16), **self._written(case)}

    def _arguments(self, case: Case, tensors: Tensors, contract: Contract) -> Arguments:
        return {
            **super()._arguments(case, tensors, contract),
            "activation": self.activation,
            "layout": case.layout,
            "epilogue_input": self.epilogue_input,
        }

    def reference(self, case: Case, tensors: Tensors, contract: Contract) -> dict[str, torch.Tensor]:
        return grouped_mlp.fc1(**self._arguments(case, tensors, contract))

    def fused(self, case: Case, tensors: Tensors, contract: Contract, out: Tensors) -> None:
        from moe_numerics.fused.grouped_mlp import fc1

        fc1(**_as_fused(self._arguments(case, tensors, contract)), out=out)


@dataclass(frozen=True, kw_only=True)
class SecondLayerBackward(FirstLayer):
    """The data gradient of the second linear layer, taken back through the activation."""

    def shapes(self, case: Case) -> Shapes:
        inputs = self.activation.inputs
        return {
            "dactivation": ((case.capacity, case.hidden), torch.float32),
            **self._written(case, inputs, case.prob),
            "dbias": ((len(case.counts), inputs * case.hidden), torch.float32),
        }

    def reference(self, case: Case, tensors: Tensors, contract: Contract) -> dict[str, torch.Tensor]:
        return grouped_mlp.fc2_backward(**self._arguments(case, tensors, contract))

    def fused(self, case: Case, tensors: Tensors, contract: Contract, out: Tensors) -> None:
        from moe_numerics.fused.grouped_mlp import fc2_backward

        fc2_backward(**_as_fused(self._arguments(case, tensors, contract)), out=out)
