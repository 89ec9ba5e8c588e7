"""Fused kernels that write swizzled scales: the compact ones, each in its place, and defined bytes everywhere else.

Faults this catches: lines and blocks exchanged, a wrong tile stride, bytes between the blocks left as memory held them
(NaN in a scale survives the tensor core's multiplication by zero), a scale written for a row that no expert owns.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_runs import ActiveDevice, failure, kernel_examples, space
from moe_numerics.reference import mxfp8, nvfp4
from moe_numerics.reference.contract import SUITE, Contract
from moe_numerics.reference.elementwise import Blocks
from moe_numerics.reference.formats import E4M3
from moe_numerics.reference.grouped_nvfp4 import Recipe
from moe_numerics.reference.scale_layout import swizzle, swizzled_size, unswizzle

from moe_numerics.cases import Case
from moe_numerics.paths import find_path
from moe_numerics.running import run_case
from moe_numerics.strategies import cases

PADDING = 0x5A
PATHS = {"mxfp8": "quantize.mxfp8_e4m3", "nvfp4": "quantize.nvfp4"}


@pytest.mark.parametrize(
    ("path_id", "device"),
    [("quantize.mxfp8_e4m3.swizzled", "virtual:sm_90a"), ("quantize.nvfp4.swizzled", "virtual:sm_100a")],
    indirect=["device"],
)
@kernel_examples()
@given(data=st.data(), padding=st.sampled_from((0, PADDING)))
def test_drawn_cases_agree_bit_for_bit(path_id: str, device: ActiveDevice, data: st.DataObject, padding: int) -> None:
    path = find_path(path_id)
    case = data.draw(cases(space(path, max_rows=300)))
    result = run_case(path, case, path.contract("suite").replace(scale_padding=padding), device)
    assert result.passed, failure(result)


def _quantize(kind: str, case: Case, contract: Contract, swizzled: bool, block2d: bool) -> dict[str, torch.Tensor]:
    from moe_numerics.fused import elementwise, grouped_nvfp4

    tensors = case.tensors(find_path(case.path).inputs)
    inputs = tensors["x"], tensors["offsets"], tensors["counts"]
    if kind == "mxfp8":
        blocks = Blocks(swizzled=swizzled, block2d=block2d)
        return elementwise.quantize(*inputs, element=E4M3, blocks=blocks, alignment=case.alignment, contract=contract)
    recipe = Recipe(swizzled=swizzled, block2d=block2d)
    return grouped_nvfp4.quantize(*inputs, recipe=recipe, alignment=case.alignment, contract=contract)


@pytest.mark.parametrize("device", ["virtual:sm_90a"], indirect=True)
@pytest.mark.parametrize(
    ("kind", "alignment", "block2d"), [("mxfp8", 1, False), ("mxfp8", 32, True), ("nvfp4", 1, False)]
)
def test_swizzled_scales_hold_the_compact_ones_and_padding(
    kind: str, alignment: int, block2d: bool, device: ActiveDevice
) -> None:
    """Against the kernel's own compact scales: codes and amax stay, owned scales move, the rest is the padding byte."""
    case = Case(PATHS[kind], (70, 0, 1, 140), 160, alignment=alignment, padded=True)
    experts = find_path(case.path).experts(case)
    contract = SUITE.replace(scale_padding=PADDING)
    compact, swizzled = (_quantize(kind, case, contract, chosen, block2d) for chosen in (False, True))
    block = mxfp8.BLOCK if kind == "mxfp8" else nvfp4.BLOCK
    valid, owned = experts.valid_rows(), experts.owned_colwise_rows(block)
    for name in ("scales_rowwise", "scales_colwise"):
        rowwise = name == "scales_rowwise"
        lines = compact[name].t() if kind == "mxfp8" and not rowwise else compact[name]
        written = (valid.unsqueeze(1) if rowwise else owned.unsqueeze(0)).expand(lines.shape)
        assert swizzled[name].shape == (swizzled_size(*lines.shape),)
        moved = unswizzle(swizzled[name], *lines.shape)
        assert torch.equal(moved[written], lines[written])
        assert (moved[~written] == PADDING).all()
        assert torch.equal(swizzled[name], swizzle(moved, PADDING))
    assert torch.equal(swizzled["codes_rowwise"][valid], compact["codes_rowwise"][valid])
    for name in ("amax", "amax_rowwise", "amax_colwise"):
        assert name not in compact or torch.equal(swizzled[name], compact[name])


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4"])
def test_a_buffer_without_rows_has_padding_only(kind: str) -> None:
    """Column-wise scales keep a spare block an expert at alignment 1, so even an empty buffer has bytes to define."""
    case = Case(PATHS[kind], (0, 0), 160, padded=True)
    scales = _quantize(kind, case, SUITE.replace(scale_padding=PADDING), True, False)
    assert scales["scales_rowwise"].numel() == 0
    assert scales["scales_colwise"].numel() == 2 * 512
    assert (scales["scales_colwise"] == PADDING).all()


@pytest.mark.parametrize(
    ("size", "start", "message"),
    [
        (1024, 0, r"scales_rowwise has shape \[1024\]: expected \[512\]"),
        (512, 4, r"scales_rowwise starts at address .*: expected a multiple of 16 bytes"),
    ],
)
def test_a_buffer_that_does_not_fit_is_refused(size: int, start: int, message: str) -> None:
    from moe_numerics.fused import elementwise

    x = torch.zeros(4, 64, dtype=torch.bfloat16)
    room = torch.zeros(size + 64, dtype=torch.uint8)
    first = -room.data_ptr() % 16 + start
    out = {
        "codes_rowwise": torch.zeros(4, 64, dtype=torch.uint8),
        "scales_rowwise": room[first : first + size],
        "amax": torch.zeros(1),
    }
    with pytest.raises(ValueError, match=message):
        elementwise.quantize(
            x, torch.tensor([0, 4]), element=E4M3, blocks=Blocks(colwise=False, swizzled=True), out=out
        )
