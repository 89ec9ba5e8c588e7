"""Bad input is refused by the reference and by the fused twin alike, in one line that names the value and the rule.

Faults this catches: a check that only one of the two has, so that a kernel ignores what the reference follows; codes
read in a format that is not theirs; an operand that is broadcast where it does not fit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from moe_numerics.fused import elementwise as fused
from moe_numerics.fused import grouped_gemm as fused_gemm
from moe_numerics.fused import grouped_nvfp4 as fused_nvfp4
from moe_numerics.fused.quantized import Quantized
from moe_numerics.reference import elementwise, grouped_nvfp4, hadamard, mxfp8, nvfp4, tensor_core
from moe_numerics.reference.activations import ClampedSwiglu, StepSwiglu
from moe_numerics.reference.contract import Contract
from moe_numerics.reference.formats import E4M3, E5M2
from moe_numerics.reference.grouped_nvfp4 import Recipe

ROWS, HIDDEN = 24, 64
OFFSETS = torch.tensor([0, 8, 16, 24], dtype=torch.int32)
WIDE = "expected float32, bfloat16 or float16"


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def e5m2(*shape: int) -> torch.Tensor:
    """Values as a native E5M2 tensor, whose bytes are codes."""
    return torch.zeros(shape, dtype=torch.uint8).view(torch.float8_e5m2)


def quantised(codes: torch.Tensor) -> Quantized:
    scales = torch.full((codes.shape[0], codes.shape[1] // 32), 127, dtype=torch.uint8)
    return Quantized.mxfp8(codes, scales, -1, E4M3)


def weights() -> Quantized:
    return Quantized.of([mxfp8.quantize(zeros(32, HIDDEN), -1) for _ in range(3)])


def forward(module: Any, **changed: Any) -> None:
    module.activation_forward(**({"gate_up": zeros(ROWS, 2 * HIDDEN), "offsets": OFFSETS} | changed))


def backward(module: Any, **changed: Any) -> None:
    given = {"grad": zeros(ROWS, HIDDEN), "gate_up": zeros(ROWS, 2 * HIDDEN), "offsets": OFFSETS}
    module.activation_backward(**(given | changed))


def quantize(module: Any, columns: int = HIDDEN, **recipe: bool) -> None:
    module.quantize(zeros(ROWS, columns), OFFSETS, recipe=Recipe(**recipe))


Calls = tuple[Callable[[], object], str]
REFUSED: dict[str, tuple[Calls, ...]] = {
    # A contract is what both twins take their signs and their treatment of NaN from.
    "15 signs": (
        (lambda: Contract(rht_signs=(1,) * 15), "the sign vector has 15 entries: the rotation is 16x16 and needs 16"),
        (lambda: hadamard.rotate(zeros(16, 16), -2, (1,) * 15), "the sign vector has 15 entries"),
    ),
    "no signs at all": (
        (lambda: Contract(rht_signs=()), "the sign vector has 0 entries"),
        (lambda: hadamard.rotate(zeros(16, 16), -1, []), "the sign vector has 0 entries"),
    ),
    "40 columns": (
        (lambda: nvfp4.quantize(zeros(ROWS, 40), -1), "hidden is 40: blocks of 16 columns need a multiple of 16"),
        (lambda: hadamard.rotate(zeros(ROWS, 40), -1), "hidden is 40: rotating columns needs a multiple of 16"),
        (lambda: quantize(grouped_nvfp4, 40), "hidden a multiple of 16"),
        (lambda: quantize(fused_nvfp4, 40), "x has 40 columns: expected a positive multiple of 16"),
    ),
    "40 columns of a rotated transpose": (
        (lambda: quantize(grouped_nvfp4, 40, rowwise=False, rotated=True), "x has shape [24, 40]"),
        (lambda: quantize(fused_nvfp4, 40, rowwise=False, rotated=True), "x has 40 columns"),
    ),
    "40 columns of MXFP8": (
        (lambda: mxfp8.quantize(zeros(ROWS, 40), -1), "hidden is 40: rowwise blocks need a multiple of 32"),
        (
            lambda: fused.quantize(zeros(ROWS, 40), OFFSETS, element=E4M3),
            "40 columns: expected a positive multiple of 32",
        ),
    ),
    "E5M2 codes as E4M3": (
        (lambda: E4M3.decode(e5m2(4)), "codes have dtype torch.float8_e5m2: E4M3 decodes uint8 codes"),
        (
            lambda: tensor_core.matmul(e5m2(2, 32), e5m2(32, 2), model="sm_90.e4m3", a_format="e4m3"),
            "a_format is 'e4m3' but a is torch.float8_e5m2",
        ),
        (
            lambda: fused_gemm.grouped_matmul(quantised(e5m2(ROWS, HIDDEN)), weights(), OFFSETS),
            "x codes has dtype torch.float8_e5m2: expected torch.uint8",
        ),
    ),
    "experts of two formats": (
        (
            lambda: Quantized.of([mxfp8.quantize(zeros(32, 32), -1, element) for element in (E4M3, E5M2)]),
            "the experts' matrices have formats [('E4M3', 'E8M0', -1, 1.0, False), ('E5M2'",
        ),
    ),
    "codes for values": (
        (lambda: forward(elementwise, gate_up=e5m2(ROWS, 2 * HIDDEN)), f"gate_up is torch.float8_e5m2: {WIDE}"),
        (lambda: forward(fused, gate_up=e5m2(ROWS, 2 * HIDDEN)), "gate_up has dtype torch.float8_e5m2: expected"),
        (lambda: backward(elementwise, grad=e5m2(ROWS, HIDDEN)), f"grad is torch.float8_e5m2: {WIDE}"),
        (lambda: backward(fused, grad=e5m2(ROWS, HIDDEN)), "grad has dtype torch.float8_e5m2: expected"),
    ),
    "a grad of one column": (
        (lambda: backward(elementwise, grad=zeros(ROWS, 1)), "grad has shape [24, 1]: expected [24, 64]"),
        (lambda: backward(fused, grad=zeros(ROWS, 1)), "grad has shape [24, 1]: expected [24, 64]"),
    ),
    "one prob": (
        (lambda: forward(elementwise, prob=torch.ones(1)), "prob has shape [1]: expected [24]"),
        (lambda: forward(fused, prob=torch.ones(1)), "prob has shape [1]: expected [24]"),
    ),
    "a limit of 0": tuple(
        (lambda make=make, limit=limit: make(limit=limit), f"limit = {limit}: a limit must be positive")  # type: ignore[misc]
        for make in (ClampedSwiglu, StepSwiglu)
        for limit in (0, 0.0, -0.0, -7.0, math.nan)
    ),
    "an unknown NaN policy": (
        (lambda: Contract(nan_policy="drop"), "nan_policy = 'drop' is unknown: expected one of 'propagate', 'ignore'"),
        (lambda: Contract().replace(nan_policy="Ignore"), "nan_policy = 'Ignore' is unknown"),
        (lambda: Contract.from_dict({"nan_policy": ""}), "nan_policy = '' is unknown"),
    ),
}
CALLS = [(name, call, message) for name, calls in REFUSED.items() for call, message in calls]


@pytest.mark.parametrize(("name", "call", "message"), CALLS, ids=[name for name, *_ in CALLS])
def test_bad_input_is_refused_in_one_line(name: str, call: Callable[[], object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(message)) as error:
        call()
    text = str(error.value)
    assert "\n" not in text
    assert re.search("expected|need|must|decode|have the format", text), text
