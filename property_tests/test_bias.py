"""Bias and dbias: added once in float32 before the activation, summed over an expert's rows in one pinned order.

Faults this catches: another expert's bias, a sum rounded to bfloat16 before the activation, a bias in another layout
than gate and up, dbias of rounded gradients, of padding rows, in an order that depends on the launch, or left unwritten
for an expert without rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_runs import ActiveDevice, active_device, failure, kernel_examples, space
from moe_numerics.reference import elementwise
from moe_numerics.reference.activations import ACTIVATIONS
from moe_numerics.reference.contract import SUITE
from moe_numerics.reference.formats import E4M3
from moe_numerics.reference.ragged import Experts

from moe_numerics.cases import Case, CaseError, Edit, Values
from moe_numerics.paths import find_path
from moe_numerics.running import run_case
from moe_numerics.strategies import cases

BACKWARD = "swiglu.bwd.mxfp8_e4m3.bias"
GAUSSIAN = {name: Values("gaussian", 5) for name in ("gate_up", "grad", "bias")}


def example(**choices: Any) -> Case:
    """Experts of no, one, a tile's and more than two tiles' tokens, with padding."""
    fields = {"counts": (33, 0, 1, 32, 70), "hidden": 160, "padded": True, "room": 5, "tail": 3, "values": GAUSSIAN}
    return Case(BACKWARD, **{**fields, **choices})


def arguments(case: Case) -> dict[str, torch.Tensor]:
    """The tensors of a case, counts included."""
    return case.tensors(find_path(case.path).inputs)


@pytest.mark.parametrize(
    ("path_id", "device"),
    [(BACKWARD, "virtual:sm_90a"), ("silu.bwd.bf16.bias", "virtual:sm_100a")],
    indirect=["device"],
)
@kernel_examples()
@given(data=st.data())
def test_drawn_cases_agree_bit_for_bit(path_id: str, device: ActiveDevice, data: st.DataObject) -> None:
    path = find_path(path_id)
    case = data.draw(cases(space(path)))
    result = run_case(path, case, path.contract("suite"), device)
    assert result.passed, failure(result)


@pytest.mark.parametrize("schedule", [1, 2])
def test_any_order_of_warps_gives_the_same_bits(schedule: int) -> None:
    """A missing barrier before the sum over warps would show."""
    path = find_path("silu.bwd.bf16.bias")
    case = Case(path.id, (40, 0, 65), 128)
    with active_device("virtual:sm_90a", schedule) as device:
        result = run_case(path, case, path.contract("suite"), device)
    assert result.passed, failure(result)


@pytest.mark.parametrize("layout", ["halves", "interleaved:32"])
def test_bias_is_added_in_float32_before_the_activation(layout: str) -> None:
    """The bias of row r's expert is added to row r, in gate_up's layout and without rounding to bfloat16."""
    case = example(layout=layout)
    tensors = arguments(case)
    owner = find_path(case.path).experts(case).row_expert()
    results = elementwise.activation_forward(
        tensors["gate_up"], tensors["offsets"], tensors["counts"], bias=tensors["bias"], layout=layout
    )
    for row in torch.nonzero(owner >= 0).flatten().tolist():
        exact = tensors["gate_up"][row].double() + tensors["bias"][owner[row]].double()
        gate, up = elementwise.split_gate_up(exact.float().unsqueeze(0), layout)
        expected = ACTIVATIONS["swiglu"].forward(gate, up).to(torch.bfloat16)
        assert torch.equal(results["out"][row], expected[0])


@given(
    counts=st.lists(st.integers(0, 75), min_size=1, max_size=4),
    seed=st.integers(0, 2**32 - 1),
)
def test_dbias_is_added_in_the_documented_order(counts: list[int], seed: int) -> None:
    """One addition after the other in float32, by an implementation that shares nothing with the reference's."""
    offsets = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
    values = torch.randn(sum(counts) + 3, 2, generator=torch.Generator().manual_seed(seed)) * 1e3
    got = elementwise.sum_over_rows(values, Experts.from_offsets(offsets, capacity=len(values)))
    for expert, count in enumerate(counts):
        for column in range(2):
            own = values[offsets[expert] : offsets[expert] + count, column].numpy()
            total: np.float32 | None = None
            for first in range(0, count, 32):
                tile = np.zeros(32, dtype=np.float32)
                tile[: len(own[first : first + 32])] = own[first : first + 32]
                eight = [np.float32(((tile[r] + tile[r + 8]) + tile[r + 16]) + tile[r + 24]) for r in range(8)]
                left, right = (
                    (eight[0] + eight[1]) + (eight[2] + eight[3]),
                    (eight[4] + eight[5]) + (eight[6] + eight[7]),
                )
                total = left + right if total is None else total + (left + right)
            assert got[expert, column].item() == (0.0 if total is None else float(total))


@pytest.mark.parametrize("device", ["virtual:sm_90a"], indirect=True)
def test_dbias_is_of_unrounded_gradients_and_zero_without_rows(device: ActiveDevice) -> None:
    """The format that is written changes nothing in dbias, nor does rounding to bfloat16 before quantising."""
    from moe_numerics.fused import elementwise as fused

    case = example()
    tensors = arguments(case)
    inputs = [tensors[name] for name in ("grad", "gate_up", "offsets", "counts", "prob") if name in tensors]
    staged = SUITE.replace(staging="bfloat16")
    plain = elementwise.activation_backward(*inputs, bias=tensors["bias"])["dbias"]
    written = fused.activation_backward(*inputs, bias=tensors["bias"])["dbias"]
    quantised = fused.activation_backward(*inputs, bias=tensors["bias"], element=E4M3, contract=staged)["dbias"]
    assert torch.equal(written.view(torch.int32), plain.view(torch.int32))
    assert torch.equal(quantised.view(torch.int32), plain.view(torch.int32))
    assert not written[1].any()
    assert written[[0, 2, 3, 4]].all()


@pytest.mark.parametrize("way", ["reference", "fused"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda bias: bias[:-1], r"bias has .*shape \[4, 320\]"),
        (lambda bias: bias[:, :-32].contiguous(), r"bias has .*shape \[5, 288\]"),
        (lambda bias: bias.float(), "bias has dtype torch.float32"),
    ],
)
def test_a_bias_that_does_not_fit_is_refused(way: str, change: Any, message: str) -> None:
    from moe_numerics.fused import elementwise as fused

    module = {"reference": elementwise, "fused": fused}[way]
    tensors = arguments(example())
    inputs = (tensors["gate_up"], tensors["offsets"], tensors["counts"])
    with pytest.raises(ValueError, match=message):
        module.activation_forward(*inputs, bias=change(tensors["bias"]))
    with pytest.raises(ValueError, match=message):
        module.activation_backward(tensors["grad"], *inputs, bias=change(tensors["bias"]))


def test_a_case_gives_each_expert_a_bias_of_its_own() -> None:
    """The bias of an expert stays when tokens go, and a case without rows has one; edits, of tokens, are refused."""
    spec = next(spec for spec in find_path(BACKWARD).inputs if spec.kind == "bias")
    case = example()
    bias = case.bits(spec)
    assert bias.shape == (5, 320)
    assert len({row.tobytes() for row in bias}) == 5
    assert np.array_equal(bias, case.replace(counts=(0, 0, 0, 0, 0), room=0, tail=0).bits(spec))
    assert Case.from_json(case.to_json()) == case
    edited = case.replace(values={"bias": Values("gaussian", 5, edits=(Edit(0, 0, 0),))})
    with pytest.raises(CaseError, match=r"values\.bias has a window or edits"):
        edited.bits(spec)
