"""How the paths of the registry compute: their reference and their fused kernels, on the tensors of a case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from moe_numerics.cases import Case
from moe_numerics.contract import profile
from moe_numerics.reference import elementwise, grouped_nvfp4
from moe_numerics.reference.activations import Activation
from moe_numerics.reference.contract import Contract
from moe_numerics.reference.elementwise import BOTH, Blocks
from moe_numerics.reference.formats import FloatFormat
from moe_numerics.reference.grouped_nvfp4 import Recipe

__all__ = [
    "ActivationBackward",
    "ActivationForward",
    "ActivationThenNvfp4",
    "Mxfp8Copies",
    "Nvfp4Copies",
    "Operation",
    "Shapes",
    "Tensors",
]

Tensors = Mapping[str, torch.Tensor]
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


class Operation(Protocol):
    """How a path computes: from a case's tensors to its outputs."""

    def shapes(self, case: Case) -> Shapes:
        """Shape and dtype of each output."""

    def reference(self, case: Case, tensors: Tensors, contract: Contract) -> dict[str, torch.Tensor]:
        """The outputs by the reference."""

    def fused(self, case: Case, tensors: Tensors, contract: Contract, out: Tensors) -> None:
        """The outputs by the fused kernel, written to `out`."""


@dataclass(frozen=True)
class ActivationForward:
    """An activation, times prob where the case has it.

    element: of the MXFP8 copies, None writes bfloat16. blocks: which copies, and the layout of their scales.
    """

    activation: Activation
    element: FloatFormat | None
    blocks: Blocks = BOTH

    def shapes(self, case: Case) -> Shapes:
        quantised = self.element is not None
        return elementwise.output_shapes(
            case.capacity, case.hidden, len(case.counts), 1, quantised, case.alignment, False, self.blocks
        )

    def _arguments(self, case: Case, tensors: Tensors, contract: Contract) -> dict[str, Any]:
        """Arguments that the reference and the kernel share."""
        return {
            "gate_up": tensors["x" if self.activation.inputs == 1 else "gate_up"],
            "offsets": tensors["offsets"],
            "counts": tensors.get("counts"),
            "prob": tensors.get("prob"),
            "bias": tensors.get("bias"),
            "activation": self.activation,
            "layout": case.layout,
            "element": self.element,
            "blocks": self.blocks,
            "alignment": case.alignment,
            "contract": contract,
        }

    def reference(self, case: Case, tensors: Tensors, contract: Contract) -> dict[str, torch.Tensor]:
        return elementwise.activation_forward(**self._arguments(case, tensors, contract))

    def fused(self, case: Case, tensors: Tensors, contract: Contract, out: Tensors) -> None:
        from moe_numerics.fused.elementwise import activation_forward

        activation_forward(**self._arguments(case, tensors, contract), out=out)


@dataclass(frozen=True)
class ActivationBackward(ActivationForward):
    """The gradient of an activation. bias: whether the inputs have one, and the results its gradient."""

    bias: bool = False

    def shapes(self, case: Case) -> Shapes:
        return elementwise.output_shapes(
            case.capacity,
            case.hidden,
            len(case.counts),
            self.activation.inputs,
            self.element is not None,
            case.alignment,
            case.prob,
            self.blocks,
            self.bias,
        )

    def reference(self, case: Case, tensors: Tensors, contract: Contract) -> dict[str, torch.Tensor]:
        return elementwise.activation_backward(tensors["grad"], **self._arguments(case, tensors, contract))

    def fused(self, case: Case, tensors: Tensors, contract: Contract, out: Tensors) -> None:
        from moe_numerics.fused.elementwise import activation_backward

        activation_backward(tensors["grad"], **self._arguments(case, tensors, contract), out=out)


@dataclass(frozen=True)
class Mxfp8Copies:
    """MXFP8 copies of a tensor."""

    element: FloatFormat
    blocks: Blocks = BOTH

    def shapes(self, case: Case) -> Shapes:
        return elementwise.output_shapes(
            case.capacity, case.hidden, len(case.counts), 1, True, case.alignment, False, self.blocks
        )

    def reference(self, case: Case, tensors: Tensors, contract: Contract) -> dict[str, torch.Tensor]:
        return elementwise.quantize(
            tensors["x"],
            tensors["offsets"],
            tensors.get("counts"),
            element=self.element,
            blocks=self.blocks,
            alignment=case.alignment,
            contract=contract,
        )

    def fused(self, case: Case, tensors: Tensors, contract: Contract, out: Tensors) -> None:
        from moe_numerics.fused.elementwise import quantize

        quantize(
            tensors["x"],
            tensors["offsets"],
            tensors.get("counts"),
            element=self.element,
            blocks=self.blocks,
            alignment=case.alignment,
            contract=contract,
            out=out,
        )


def _seed_words(case: Case, device: torch.device) -> torch.Tensor:
    """The case's seed as kernels take it: int32 [2], low word first."""
    words = torch.tensor([case.seed & 0xFFFFFFFF, case.seed >> 32], dtype=torch.int64)
    return words.to(torch.uint32).view(torch.int32).to(device)


@dataclass(frozen=True)
class Nvfp4Copies:
    """NVFP4 copies of a tensor. amax_scope: "tensor" or "expert" whatever the contract says, or None for that."""

    recipe: Recipe
    amax_scope: str | None = None

    def _scoped(self, contract: Contract) -> Contract:
        return contract if self.amax_scope is None else contract.replace(amax_scope=self.amax_scope)

    def shapes(self, case: Case) -> Shapes:
        return self.shapes_of(case, case.hidden)

    def shapes_of(self, case: Case, columns: int) -> Shapes:
        """Shapes of the copies of a tensor with this number of columns."""
        contract = self._scoped(profile(case.profile))
        experts = len(case.counts)
        return grouped_nvfp4.output_shapes(case.capacity, columns, experts, self.recipe, case.alignment, contract)

    def _arguments(self, x: torch.Tensor, case: Case, tensors: Tensors, contract: Contract) -> dict[str, Any]:
        return {
            "x": x,
            "offsets": tensors["offsets"],
            "counts": tensors.get("counts"),
            "recipe": self.recipe,
            "alignment": case.alignment,
            "contract": self._scoped(contract),
        }

    def reference(self, case: Case, tensors: Tensors, contract: Contract) -> dict[str, torch.Tensor]:
        return self.reference_of(tensors["x"], case, tensors, contract)

    def reference_of(
        self, x: torch.Tensor, case: Case, tensors: Tensors, contract: Contract
    ) -> dict[str, torch.Tensor]:
        """The copies of a tensor by the reference."""
        return grouped_nvfp4.quantize(**self._arguments(x, case, tensors, contract), seed=case.seed)

    def fused(self, case: Case, tensors: Tensors, contract: Contract, out: Tensors) -> None:
        self.fused_of(tensors["x"], case, tensors, contract, out)

    def fused_of(self, x: torch.Tensor, case: Case, tensors: Tensors, contract: Contract, out: Tensors) -> None:
        """The copies of a tensor by the fused kernels."""
        from moe_numerics.fused.grouped_nvfp4 import quantize

        quantize(**self._arguments(x, case, tensors, contract), seed=_seed_words(case, x.device), out=out)


@dataclass(frozen=True)
class ActivationThenNvfp4:
    """An activation to bfloat16, then NVFP4 copies of that."""

    activation: ActivationForward
    copies: Nvfp4Copies

    def shapes(self, case: Case) -> Shapes:
        shapes = self.activation.shapes(case)
        return shapes | self.copies.shapes_of(case, shapes["out"][0][1])

    def reference(self, case: Case, tensors: Tensors, contract: Contract) -> dict[str, torch.Tensor]:
        results = self.activation.reference(case, tensors, contract)
        return results | self.copies.reference_of(results["out"], case, tensors, contract)

    def fused(self, case: Case, tensors: Tensors, contract: Contract, out: Tensors) -> None:
        first = self.activation.shapes(case)
        self.activation.fused(case, tensors, contract, {name: out[name] for name in first})
        copies = {name: tensor for name, tensor in out.items() if name not in first}
        self.copies.fused_of(out["out"], case, tensors, contract, copies)
