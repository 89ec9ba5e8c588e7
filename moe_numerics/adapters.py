"""Kernels of other projects as callables for `check`: eager PyTorch, `torch.compile`, torchao on a CPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_numerics.checking import kernel

__all__ = ["compiled_swiglu", "eager_swiglu", "torchao_mxfp8"]


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@kernel("swiglu.fwd.bf16", inputs={"gate_up": "gate_up", "offsets": "offsets"}, outputs={"out": 0})
def eager_swiglu(gate_up: Tensor, offsets: Tensor) -> Tensor:
    """SwiGLU by eager PyTorch on bfloat16: intermediate values are rounded to bfloat16."""
    return _swiglu(gate_up)


def compiled_swiglu() -> Callable[..., Tensor]:
    """SwiGLU by `torch.compile`: one kernel, whose intermediate values stay float32. Needs a C++ compiler on a CPU."""
    compiled = torch.compile(_swiglu, dynamic=True)

    @kernel("swiglu.fwd.bf16", inputs={"gate_up": "gate_up", "offsets": "offsets"}, outputs={"out": 0})
    def swiglu(gate_up: Tensor, offsets: Tensor) -> Tensor:
        return compiled(gate_up) if gate_up.numel() else _swiglu(gate_up)

    return swiglu


def torchao_mxfp8(scaling: str = "FLOOR") -> Callable[..., Any]:
    """Row-wise MXFP8 E4M3 by torchao's `to_mx`; scaling: FLOOR, RCEIL, CEIL or EVEN. ImportError: no torchao."""
    modes = importlib.import_module("torchao.prototype.mx_formats.config").ScaleCalculationMode
    to_mx = importlib.import_module("torchao.prototype.mx_formats.mx_tensor").to_mx
    inputs, outputs = {"x": "x", "offsets": "offsets"}, {"codes": 0, "scales": 1}

    @kernel("quantize.mxfp8_e4m3", inputs=inputs, outputs=outputs, profile="torchao")
    def quantize(x: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        scales, codes = to_mx(x, torch.float8_e4m3fn, 32, modes[scaling])
        return codes.view(torch.uint8), scales.view(torch.uint8).reshape(len(x), x.shape[1] // 32)

    return quantize
