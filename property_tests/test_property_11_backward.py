"""Property 11: the backward equals float64 autograd of the forward, away from kinks.

Kernels are held against reverse mode over the float64 formula of the forward, prob and dprob included; neither
reference nor closed derivative takes part. The masks at kinks are tested in test_activation_backward.py.

Faults this catches: gradients of gate and up swapped, prob left out of one of them, dprob of the wrong row or of the
gradient instead of the value, a derivative of another activation.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from kernel_runs import (
    ActiveDevice,
    elementwise,
    kernel_examples,
    reference_and_kernels,
    representative_paths,
    space,
)
from moe_numerics.reference import oracle
from moe_numerics.reference.activations import Activation, UnaryActivation
from moe_numerics.reference.elementwise import join_gate_up, split_gate_up

from moe_numerics.cases import Values
from moe_numerics.paths import Path
from moe_numerics.strategies import cases

PATHS = [
    path
    for path in elementwise(representative_paths())
    if ".bwd.bf16" in path.id and not getattr(path.operation, "bias", False)
]

ROUNDINGS = 16
"""Float32 roundings between the inputs and a gradient or a term of dprob: fewer in every activation's chain."""
UNIT = 2.0**-24
HALF_BFLOAT16 = 2.0**-8
"""Largest relative error of rounding to bfloat16's 8 significant bits."""
SMALLEST_BFLOAT16 = 2.0**-134
"""Half of the smallest bfloat16: what rounding near zero may lose."""
TREE_DEPTH = 7 + 4
"""Additions that a term of dprob goes through inside a tile of 128 columns."""


def _smooth(activation: Activation, gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    """Where no operand lies at a kink, or so near that autograd in float64 takes the other side."""
    smooth = gate != 0
    limit = getattr(activation, "limit", None)
    if limit is not None and up is not None:
        silu = gate * torch.sigmoid(gate)
        for operand in (gate, silu, up.abs()):
            smooth &= (operand - limit).abs() > 1e-6
    return smooth


@pytest.mark.parametrize("device", reference_and_kernels(), indirect=True)
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.id)
@kernel_examples()
@given(data=st.data())
def test_gradients_are_those_of_autograd(path: Path, device: ActiveDevice, data: st.DataObject) -> None:
    drawn = space(path, kinds=("plain", "gaussian", "constant", "ties_e4m3"), allow_specials=False)
    case = data.draw(cases(drawn))
    assume(case.tokens)
    # Without the exponents and edits of the drawn values: tails and overflow have tests of their own.
    case = case.replace(values={name: Values(item.kind, item.seed) for name, item in case.values.items()})
    activation: Activation = path.operation.activation  # type: ignore[attr-defined]
    tensors = case.tensors(path.inputs)
    valid = path.experts(case).valid_rows()
    grad, prob = tensors["grad"][valid].double(), tensors["prob"][valid].double().requires_grad_()
    if isinstance(activation, UnaryActivation):
        operands = [tensors["x"][valid].double().requires_grad_()]
    else:
        operands = [part.double().requires_grad_() for part in split_gate_up(tensors["gate_up"][valid], case.layout)]
    value = oracle.forward(activation, *operands)
    (value * prob.unsqueeze(1) * grad).sum().backward()

    outputs = device.run(path, case, path.contract("suite")).outputs
    smooth = _smooth(activation, operands[0].detach(), operands[1].detach() if len(operands) == 2 else None)
    gradients = [operand.grad for operand in operands]
    # The largest term of a gradient: the derivative of an activation is at most 1 + |x| in all of them, cubed for
    # squares and cubes inside.
    size = (grad * prob.detach().unsqueeze(1)).abs()
    for operand in operands:
        size = size * (1 + operand.detach().abs()) ** 2
    expected = gradients[0] if len(gradients) == 1 else join_gate_up(*gradients, case.layout)
    sizes = size if len(gradients) == 1 else join_gate_up(size, size, case.layout)
    where = smooth if len(gradients) == 1 else join_gate_up(smooth, smooth, case.layout)
    bound = expected.abs() * HALF_BFLOAT16 + sizes * (ROUNDINGS * UNIT) + SMALLEST_BFLOAT16
    error = (outputs["out"][valid].double() - expected).abs()
    assert (error <= bound)[where].all(), f"gradient is off by {float((error / bound)[where].max())} bounds"

    tiles = -(-case.hidden // 128)
    terms = (value.detach() * grad).abs().sum(1)
    scale = terms + (grad.abs() * size).sum(1)
    error = (outputs["dprob"][valid].double() - prob.grad).abs()
    assert (error <= scale * ((ROUNDINGS + TREE_DEPTH + tiles) * UNIT)).all(), "dprob"
