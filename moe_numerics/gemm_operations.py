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
from moe_numerics.reference.formats import FloatFormat

__all__ = ["FirstLayer", "MatmulQuantize", "Product", "SecondLayerBackward", "WeightGradient"]


def _ragged(tensors: Tensors) -> dict[str, Any]:
    return {"offsets": tensors["offsets"], "counts": tensors.get("counts")}


def _given(tensors: Tensors, *names: str) -> dict[str, Any]:
    """Arguments that a path may lack."""
    return {name: tensors[name] for name in names if name in tensors}


@dataclass(frozen=True)
class Product:
    """Rows times weights: "matmul" x @ W^T, with alpha, bias and prob where the case has them, or "dgrad" grad @ W."""

    kind: Literal["matmul", "dgrad"]
    dtype: torch.dtype

    def shapes(self, case: Case) -> Shapes:
        return {"out": ((case.capacity, case.hidden), self.dtype)}

    def _arguments(self, tensors: Tensors, contract: Contract) -> dict[str, Any]:
        """Arguments that the reference and the kernel share."""
        return {
            **_given(tensors, "x", "grad", "alpha", "bias", "prob"),
            **_ragged(tensors),
            "weights": tensors["weights"],
            "accumulator": contract.accumulator,
            "dtype": self.dtype,
        }

    def reference(self, case: Case, tensors: Tensors, contract: Contract) -> dict[str, torch.Tensor]:
        function = grouped_gemm.grouped_matmul if self.kind == "matmul" else grouped_gemm.grouped_dgrad
        return {"out": function(**self._arguments(tensors, contract))}

    def fused(self, case: Case, tensors: Tensors, contract: Contract, out: Tensors) -> None:
        from moe_numerics.fused.grouped_gemm import grouped_dgrad, grouped_matmul

        function = grouped_matmul if self.kind == "matmul" else grouped_dgrad
        function(**self._arguments(tensors, contract), out=out["out"])


@dataclass(frozen=True)
class WeightGradient:
    """grad^T @ x of each expert's rows, added to main_grad where the case has one."""

    dtype: torch.dtype

    def shapes(self, case: Case) -> Shapes:
        return {"out": ((len(case.counts), case.depth, case.hidden), self.dtype)}

    def _arguments(self, tensors: Tensors, contract: Contract) -> dict[str, Any]:
        return {
            **_given(tensors, "grad", "x", "main_grad", "alpha"),
            **_ragged(tensors),
            "accumulator": contract.accumulator,
            "dtype": self.dtype,
        }

    def reference(self, case: Case, tensors: Tensors, contract: Contract) -> dict[str, torch.Tensor]:
        return {"out": grouped_gemm.grouped_wgrad(**self._arguments(tensors, contract))}

    def fused(self, case: Case, tensors: Tensors, contract: Contract, out: Tensors) -> None:
        from moe_numerics.fused.grouped_gemm import grouped_wgrad

        grouped_wgrad(**self._arguments(tensors, contract), out=out["out"])


@dataclass(frozen=True, kw_only=True)
class MatmulQuantize:
    """x @ W^T quantised to MXFP8 `element` both ways, or bfloat16 without; rotated_amax: also that of the rotation."""

    element: FloatFormat | None
    rotated_amax: bool = False

    def _written(self, case: Case, streams: int = 1, dprob: bool = False) -> Shapes:
        experts = len(case.counts)
        quantised = self.element is not None
        shapes = output_shapes(case.capacity, case.hidden, experts, streams, quantised, case.alignment, dprob)
        if self.rotated_amax:
            shapes["amax_rotated"] = ((experts,), torch.float32)
        return shapes

    def shapes(self, case: Case) -> Shapes:
        return self._written(case)

    def _arguments(self, case: Case, tensors: Tensors, contract: Contract) -> dict[str, Any]:
        """Arguments that the reference and the kernel share."""
        return {
            **_given(tensors, "x", "grad", "alpha", "bias", "prob", "preactivation"),
            **_ragged(tensors),
            "weights": tensors["weights"],
            "element": self.element,
            "rotated_amax": self.rotated_amax,
            "alignment": case.alignment,
            "contract": contract,
        }

    def reference(self, case: Case, tensors: Tensors, contract: Contract) -> dict[str, torch.Tensor]:
        return grouped_mlp.matmul_quantize(**self._arguments(case, tensors, contract))

    def fused(self, case: Case, tensors: Tensors, contract: Contract, out: Tensors) -> None:
        from moe_numerics.fused.grouped_mlp import matmul_quantize

        matmul_quantize(**self._arguments(case, tensors, contract), out=out)


@dataclass(frozen=True, kw_only=True)
class FirstLayer(MatmulQuantize):
    """The first linear layer with its activation. epilogue_input: what that sees, as for `grouped_mlp.fc1`."""

    activation: Activation
    epilogue_input: str = "accumulator"

    def shapes(self, case: Case) -> Shapes:
        columns = self.activation.inputs * case.hidden
        return {"preactivation": ((case.capacity, columns), torch.bfloat16), **self._written(case)}

    def _arguments(self, case: Case, tensors: Tensors, contract: Contract) -> dict[str, Any]:
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

        fc1(**self._arguments(case, tensors, contract), out=out)


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

        fc2_backward(**self._arguments(case, tensors, contract), out=out)
