"""Kernels of other projects as callables for `check`: eager PyTorch, `torch.compile` and torchao, quack on a GPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_numerics.checking import kernel

__all__ = ["compiled_swiglu", "eager_swiglu", "quack_swiglu", "torchao_mxfp8"]


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


def quack_swiglu(activation: str = "swiglu", path: str = "swiglu.fwd.bf16") -> Callable[..., Tensor]:
    """A gated activation in the epilogue of quack's GEMM, whose weights give each column as it is.

    activation: one of quack's gated ones. A product with one weight of 1 and zeros is exact for finite values, so cases
    must hold no NaN and no Inf; what is left is the epilogue: `ex2.approx` and `rcp.approx`, `Arithmetic("fast")`.
    Needs a GPU of compute capability 9.0 or newer. ImportError: no quack.
    """
    gemm_gated = importlib.import_module("quack.gemm_interface").gemm_gated

    @kernel(path, inputs={"gate_up": "gate_up", "offsets": "offsets"}, outputs={"out": 0}, device="cuda")
    def gated(gate_up: Tensor, offsets: Tensor) -> Tensor:
        columns = gate_up.shape[1]
        # quack takes gate and up from neighbouring columns.
        order = torch.arange(columns, device=gate_up.device).view(2, -1).t().reshape(-1)
        weights = torch.eye(columns, dtype=gate_up.dtype, device=gate_up.device)[order]
        _, out = gemm_gated(gate_up, weights.t(), activation=activation, store_preact=False, tuned=False)
        return out

    return gated
