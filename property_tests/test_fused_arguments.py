"""Wrappers of fused kernels refuse what their kernels cannot take, in one line, before anything is launched.

Faults this catches: a kernel that reads float32 as bfloat16, vector loads from an odd address, a result written past
a buffer that is too small, an error that does not say what to do.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from moe_numerics.fused import elementwise, grouped_nvfp4
from moe_numerics.reference.contract import Contract
from moe_numerics.reference.formats import E2M1, E4M3, E4M3FNUZ
from moe_numerics.reference.grouped_nvfp4 import Recipe

ROWS, HIDDEN, EXPERTS = 24, 64, 3


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def _offsets(dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([0, 8, 16, 24], dtype=dtype)


def _shifted(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A contiguous tensor that starts one element after an aligned address."""
    count = 1
    for size in shape:
        count *= size
    return torch.zeros(count + 1, dtype=dtype)[1:].view(shape)


FORWARD: dict[str, Any] = {"gate_up": _empty(ROWS, 2 * HIDDEN), "offsets": _offsets()}
BACKWARD: dict[str, Any] = {**FORWARD, "grad": _empty(ROWS, HIDDEN)}
QUANTIZE: dict[str, Any] = {"x": _empty(ROWS, HIDDEN), "offsets": _offsets(), "element": E4M3}
NVFP4: dict[str, Any] = {"x": _empty(ROWS, HIDDEN), "offsets": _offsets(), "recipe": Recipe()}
OUT = {"out": _empty(ROWS, HIDDEN), "amax": _empty(EXPERTS, dtype=torch.float32)}

REFUSED: list[tuple[Callable[..., Any], dict[str, Any], dict[str, Any], str]] = [
    (elementwise.activation_forward, FORWARD, {"gate_up": FORWARD["gate_up"].float()}, "gate_up has dtype"),
    (elementwise.activation_forward, FORWARD, {"gate_up": _empty(ROWS * 2 * HIDDEN)}, "gate_up has shape"),
    (elementwise.activation_forward, FORWARD, {"gate_up": _empty(2 * HIDDEN, ROWS).t()}, "gate_up has strides"),
    (elementwise.activation_forward, FORWARD, {"gate_up": _shifted(ROWS, 2 * HIDDEN)}, "gate_up starts at address"),
    (elementwise.activation_forward, FORWARD, {"gate_up": _empty(ROWS, 96)}, "96 columns"),
    (elementwise.activation_forward, FORWARD, {"gate_up": _empty(ROWS, 0)}, "0 columns"),
    (elementwise.activation_forward, FORWARD, {"layout": "interleaved:128"}, "columns"),
    (elementwise.activation_forward, FORWARD, {"layout": "interleaved:16"}, "layout is 'interleaved:16'"),
    (elementwise.activation_forward, FORWARD, {"layout": "thirds"}, "layout is 'thirds'"),
    (elementwise.activation_forward, FORWARD, {"activation": "swish"}, "activation is 'swish'"),
    (elementwise.activation_forward, FORWARD, {"offsets": _offsets().float()}, "offsets"),
    (elementwise.activation_forward, FORWARD, {"offsets": _offsets()[:1]}, "offsets"),
    (elementwise.activation_forward, FORWARD, {"offsets": _offsets().view(2, 2)}, "offsets"),
    (elementwise.activation_forward, FORWARD, {"offsets": torch.zeros(8, dtype=torch.int32)[::2]}, "offsets"),
    (elementwise.activation_forward, FORWARD, {"offsets": _offsets().to("meta")}, "offsets is on meta"),
    (elementwise.activation_forward, FORWARD, {"counts": _empty(EXPERTS, dtype=torch.int64)}, "counts has dtype"),
    (elementwise.activation_forward, FORWARD, {"counts": _empty(EXPERTS + 1, dtype=torch.int32)}, "counts has shape"),
    (elementwise.activation_forward, FORWARD, {"prob": _empty(ROWS)}, "prob has dtype"),
    (elementwise.activation_forward, FORWARD, {"prob": _empty(ROWS - 1, dtype=torch.float32)}, "prob has shape"),
    (elementwise.activation_forward, FORWARD, {"prob": _empty(ROWS, dtype=torch.float32, device="meta")}, "prob is on"),
    (elementwise.activation_forward, FORWARD, {"bias": _empty(2 * HIDDEN)}, "bias has shape"),
    (elementwise.activation_forward, FORWARD, {"alignment": 0}, "alignment is 0"),
    (elementwise.activation_forward, FORWARD, {"alignment": 257}, "alignment is 257"),
    (elementwise.activation_forward, FORWARD, {"element": E2M1}, "element is E2M1"),
    (
        elementwise.activation_forward,
        FORWARD,
        {"contract": Contract(maths="fast"), "activation": "geglu_erf"},
        "maths is 'fast': Gated is compiled in exact maths only",
    ),
    (elementwise.activation_forward, FORWARD, {"out": {"out": OUT["out"]}}, "out lacks 'amax'"),
    (elementwise.activation_forward, FORWARD, {"out": {**OUT, "out": _empty(ROWS, 2 * HIDDEN)}}, "out has shape"),
    (elementwise.activation_forward, FORWARD, {"out": {**OUT, "out": _empty(ROWS, HIDDEN).half()}}, "out has dtype"),
    (elementwise.activation_forward, FORWARD, {"out": {**OUT, "out": _shifted(ROWS, HIDDEN)}}, "out starts at"),
    (elementwise.activation_backward, BACKWARD, {"grad": _empty(ROWS, 2 * HIDDEN)}, "grad has shape"),
    (elementwise.activation_backward, BACKWARD, {"grad": _empty(ROWS, HIDDEN).float()}, "grad has dtype"),
    (elementwise.activation_backward, BACKWARD, {"grad": _shifted(ROWS, HIDDEN)}, "grad starts at address"),
    (elementwise.activation_backward, BACKWARD, {"grad": _empty(ROWS, HIDDEN).to("meta")}, "grad is on meta"),
    (elementwise.quantize, QUANTIZE, {"x": _empty(ROWS, 48)}, "48 columns"),
    (elementwise.quantize, QUANTIZE, {"x": _empty(ROWS, HIDDEN).half()}, "x has dtype"),
    (elementwise.quantize, QUANTIZE, {"element": E2M1}, "element is E2M1"),
    (elementwise.quantize, QUANTIZE, {"element": E4M3FNUZ}, "element is E4M3FNUZ"),
    (elementwise.quantize, QUANTIZE, {"contract": Contract(signed_zero="drop")}, "signed_zero is 'drop'"),
    (
        elementwise.activation_forward,
        FORWARD,
        {"element": E4M3, "contract": Contract(signed_zero="drop")},
        "signed_zero is 'drop'",
    ),
    (grouped_nvfp4.quantize, NVFP4, {"x": _empty(ROWS, 40)}, "40 columns"),
    (grouped_nvfp4.quantize, NVFP4, {"x": _empty(ROWS, HIDDEN).float()}, "x has dtype"),
    (grouped_nvfp4.quantize, NVFP4, {"contract": Contract(signed_zero="drop")}, "signed_zero is 'drop'"),
    (grouped_nvfp4.quantize, NVFP4, {"recipe": Recipe(stochastic=True)}, "seed is missing"),
    (
        grouped_nvfp4.quantize,
        NVFP4,
        {"recipe": Recipe(stochastic=True), "seed": torch.zeros(2, dtype=torch.int64)},
        "seed has dtype",
    ),
]


@pytest.mark.parametrize(("function", "arguments", "wrong", "message"), REFUSED)
def test_bad_arguments_are_refused_before_a_launch(
    function: Callable[..., Any],
    arguments: dict[str, Any],
    wrong: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def launched(*_: object) -> None:
        raise AssertionError("launched all the same")

    for module in (elementwise, grouped_nvfp4):
        monkeypatch.setattr(module, "launch", launched)
        monkeypatch.setattr(module, "compile_function", launched)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        function(**{**arguments, **wrong})
    text = str(error.value)
    assert re.search("expected|needs|takes|compiled|keep", text)
    assert "\n" not in text


def test_an_empty_buffer_gives_empty_results() -> None:
    results = elementwise.activation_forward(_empty(0, 2 * HIDDEN), torch.zeros(EXPERTS + 1, dtype=torch.int32))
    assert results["out"].shape == (0, HIDDEN)
    assert results["amax"].tolist() == [0.0] * EXPERTS
