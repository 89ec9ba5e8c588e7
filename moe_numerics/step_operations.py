"""How the paths of a whole training step of the MLP compute: forward to weight gradients, every intermediate."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_numerics.cases import Case
from moe_numerics.operations import Shapes, Tensors
from moe_numerics.reference import grouped_mlp, mxfp8, nvfp4
from moe_numerics.reference.activations import Activation
from moe_numerics.reference.contract import Contract
from moe_numerics.reference.formats import E4M3, FloatFormat
from moe_numerics.reference.ragged import Experts

__all__ = ["TOKEN_TENSORS", "TrainingStep"]

TOKEN_TENSORS = ("x", "activation", "grad", "dpreactivation")
"""Tensors with a row for each token that products read, quantised where the operands are."""


@dataclass(frozen=True)
class TrainingStep:
    """One forward and backward of the MLP: `grouped_mlp.step` with operands "bf16", "mxfp8" or "nvfp4".

    NVFP4 gradients are rounded stochastically with the case's seed, to known bits.
    """

    activation: Activation
    operands: str
    grad_element: FloatFormat = E4M3

    @property
    def stochastic(self) -> bool:
        """Whether results depend on random bits, which are keyed by the number of the expert."""
        return self.operands == "nvfp4"

    def choices(self, case: Case, contract: Contract) -> grouped_mlp.Step:
        """What the step is told to do for a case."""
        return grouped_mlp.Step(
            self.operands,
            self.activation,
            case.layout,
            grad_element=self.grad_element,
            # Two seeds are taken, this one and the next.
            seed=case.seed % ((1 << 64) - 1),
            contract=contract,
        )

    def shapes(self, case: Case) -> Shapes:
        rows, experts, wide = case.capacity, len(case.counts), self.activation.inputs * case.hidden
        columns = {"x": case.depth, "grad": case.depth, "activation": case.hidden, "dpreactivation": wide}
        weights = {"weights1": (wide, case.depth), "weights2": (case.depth, case.hidden)}
        shapes: Shapes = {"preactivation": ((rows, wide), torch.bfloat16)}
        if self.operands != "mxfp8":
            shapes |= {name: ((rows, columns[name]), torch.bfloat16) for name in ("activation", "dpreactivation")}
        if self.operands != "bf16":
            for name, width in columns.items():
                shapes |= self._token_copies(name, case, width)
            for name, sizes in weights.items():
                shapes |= self._weight_copies(name, experts, *sizes)
        shapes |= {
            "out": ((rows, case.depth), torch.bfloat16),
            "dactivation": ((rows, case.hidden), torch.float32),
            "dbias": ((experts, wide), torch.float32),
            "dx": ((rows, case.depth), torch.bfloat16),
            **{f"d{name}": ((experts, *sizes), torch.float32) for name, sizes in weights.items()},
        }
        if case.prob:
            shapes["dprob"] = ((rows,), torch.float32)
        return shapes

    def _token_copies(self, name: str, case: Case, columns: int) -> Shapes:
        rows = case.capacity
        block = mxfp8.BLOCK if self.operands == "mxfp8" else nvfp4.BLOCK
        blocks = _experts(case).colwise_rows(block)
        if self.operands == "mxfp8":
            return _bytes(name, (rows, columns), (rows, columns // block), (rows, columns), (blocks, columns))
        codes = _bytes(
            name, (rows, columns // 2), (rows, columns // block), (columns, blocks * block // 2), (columns, blocks)
        )
        return codes | {f"{name}_amax_{which}": ((1,), torch.float32) for which in ("rowwise", "colwise")}

    def _weight_copies(self, name: str, experts: int, rows: int, columns: int) -> Shapes:
        if self.operands == "mxfp8":
            block = mxfp8.BLOCK
            shape = (experts, rows, columns)
            return _bytes(name, shape, (experts, rows, columns // block), shape, (experts, rows // block, columns))
        block = nvfp4.BLOCK
        codes = _bytes(
            name,
            (experts, rows, columns // 2),
            (experts, rows, columns // block),
            (experts, columns, rows // 2),
            (experts, columns, rows // block),
        )
        return codes | {f"{name}_amax_{which}": ((experts,), torch.float32) for which in ("rowwise", "colwise")}

    def reference(self, case: Case, tensors: Tensors, contract: Contract) -> dict[str, torch.Tensor]:
        results = grouped_mlp.step(**tensors, alignment=case.alignment, choices=self.choices(case, contract))
        return _with_one_dimension(results)

    def fused(self, case: Case, tensors: Tensors, contract: Contract, out: Tensors) -> None:
        from moe_numerics.fused.grouped_mlp import step

        results = step(**tensors, alignment=case.alignment, choices=self.choices(case, contract))
        # A step allocates its results, whose unowned rows hold anything.
        for name, result in _with_one_dimension(results).items():
            owned = self._owned(case, name, result)
            out[name].copy_(result if owned is None else torch.where(owned, result, out[name]))

    def _owned(self, case: Case, name: str, result: torch.Tensor) -> torch.Tensor | None:
        """What a step writes of a result, broadcastable to it; None: all of it."""
        experts, device = _experts(case), result.device
        tensor, _, copy = name.partition("_")
        if tensor in ("weights1", "weights2", "dweights1", "dweights2", "dbias") or copy.startswith("amax"):
            return None
        if copy == "scales_colwise" and self.operands == "mxfp8":
            return experts.owned_colwise_rows(mxfp8.BLOCK, device)[:, None]
        if copy.endswith("colwise") and self.operands == "nvfp4":
            spread = nvfp4.BLOCK // 2 if copy.startswith("codes") else 1
            return experts.owned_colwise_rows(nvfp4.BLOCK, device).repeat_interleave(spread)
        return experts.valid_rows(device).view(-1, *[1] * (result.dim() - 1))


def _experts(case: Case) -> Experts:
    return Experts.from_offsets(case.offsets, case.counts if case.padded else None, case.capacity, case.alignment)


def _bytes(name: str, *shapes: tuple[int, ...]) -> Shapes:
    """Codes and scales row-wise, then column-wise."""
    names = ("codes_rowwise", "scales_rowwise", "codes_colwise", "scales_colwise")
    return {f"{name}_{which}": (shape, torch.uint8) for which, shape in zip(names, shapes, strict=True)}


def _with_one_dimension(results: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The results, the amax of a whole tensor as [1]."""
    return {name: result.reshape(1) if result.dim() == 0 else result for name, result in results.items()}
