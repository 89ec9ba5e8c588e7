"""How a target's tensor cores accumulate: the one place that says which model a contract of a path has on a device."""

from __future__ import annotations

from moe_numerics.reference.contract import Contract

__all__ = ["ACCUMULATORS", "accumulator", "architecture", "on_target"]

ACCUMULATORS = {
    # Hopper has no block scales: codes times scales are exact in bfloat16, and are multiplied as such.
    "sm_90": {"bf16": "sm_90.bf16", "mxfp8": "sm_90.bf16", "nvfp4": "sm_90.bf16"},
    "sm_100": {"bf16": "sm_100.bf16", "mxfp8": "sm_100.mxf8f6f4", "nvfp4": "sm_100.mxf4nvf4"},
}
"""Architecture -> operands of a matrix product -> the row of `tensor_core_models` that gives the kernel's bits."""

_ARCHITECTURES = {"sm_90a": "sm_90", "sm_100a": "sm_100", "sm_103a": "sm_100"}


def architecture(target: str) -> str | None:
    """The architecture whose tensor cores a target has, None for one without kernels."""
    return _ARCHITECTURES.get(target)


def accumulator(target: str, operands: str) -> str:
    """The model of the products of a target's kernels. ValueError: no kernels for the target."""
    known = architecture(target)
    if known is None:
        raise ValueError(f"target {target!r} has no matrix products here: expected {', '.join(_ARCHITECTURES)}")
    return ACCUMULATORS[known][operands]


def on_target(contract: Contract, target: str, operands: str | None) -> Contract:
    """The contract with the accumulator of a target; operands: None for a path without a matrix product."""
    return contract if operands is None else contract.replace(accumulator=accumulator(target, operands))
