"""Kernels take the parameters of an activation, not only those that the registry names: limits, or none, and scales.

Faults this catches: a parameter that a kernel reads and ignores, a limit that is absent and clamps to 0, a mask left in
without a limit, one beta used for both operands, a value whose text a kernel's name cannot hold.
"""

from __future__ import annotations

import dataclasses

import pytest
from kernel_runs import ActiveDevice, failure, one_device, thorough
from moe_numerics.reference.activations import (
    ACTIVATIONS,
    Activation,
    ClampedSwiglu,
    Gated,
    QuickGelu,
    SituGlu,
    StepSwiglu,
    TanhSquaredRelu,
)

from moe_numerics.cases import Case, Edit, Values
from moe_numerics.devices import same_bytes
from moe_numerics.operations import ActivationBackward, ActivationForward
from moe_numerics.paths import Path, find_path
from moe_numerics.running import run_case

VARIANTS: dict[str, tuple[str, Activation]] = {
    "no limit": ("clamped_swiglu", ClampedSwiglu(limit=None)),
    "a limit past every integer": ("clamped_swiglu", ClampedSwiglu(limit=1e30)),
    "limit, alpha and offset": ("clamped_swiglu", ClampedSwiglu(limit=0.7, alpha=0.9, offset=-0.5)),
    "step without a limit": ("clamped_swiglu", StepSwiglu(limit=None)),
    "a step limit": ("clamped_swiglu", StepSwiglu(limit=0.7)),
    "both betas": ("situglu", SituGlu(beta_gate=1.5, beta_up=2.5)),
    "alpha": ("qgelu", QuickGelu(alpha=0.8)),
    "scale": ("tanh_srelu", TanhSquaredRelu(scale=1.25)),
    "a gate of its own": ("sreglu", Gated(TanhSquaredRelu(scale=3.0))),
}
"""Name: (the activation of the registry that it varies, the variant)."""

FORWARD = ("no limit", "limit, alpha and offset", "both betas")
"""Variants that the quick profile takes forward too: dprob of the backward is of the same values."""
RUNS = [(name, way) for name in VARIANTS for way in ("fwd", "bwd") if way == "bwd" or thorough() or name in FORWARD]


def variant(name: str, direction: str) -> Path:
    base, activation = VARIANTS[name]
    path = find_path(f"{base}.{direction}.bf16")
    made = {"fwd": ActivationForward, "bwd": ActivationBackward}[direction](activation, None)
    return dataclasses.replace(path, operation=made)


@pytest.mark.parametrize("device", one_device(), indirect=True)
@pytest.mark.parametrize(("name", "direction"), RUNS)
def test_kernels_take_every_parameter(name: str, direction: str, device: ActiveDevice) -> None:
    """Of normal values with operands at, beside and far beyond the limits; the variant's results are not the base's."""
    path = variant(name, direction)
    source = next(spec.name for spec in path.inputs if spec.name in ("x", "gate_up"))
    # 0.7 in bfloat16 is 0x3f33; gate and up of one element, then NaN, Inf and zeros.
    edges = (0x3F33, 0xBF33, 0x3F34, 0xBF34, 0x42C8, 0xC2C8, 0x7FC0, 0x7F80, 0xFF80, 0x0000, 0x8000)
    edits = tuple(Edit(row, column, bits) for column, bits in enumerate(edges) for row in (0, 20))
    values = {spec.name: Values("gaussian", 3) for spec in path.inputs if spec.kind == "values"}
    values[source] = Values("gaussian", 5, 2, edits=edits)
    layout = "interleaved:32" if "interleaved:32" in path.layouts else "halves"
    case = Case(path.id, (17, 0, 9), 64, layout=layout, padded=True, prob=True, values=values)
    contract = path.contract("suite", device.target)
    result = run_case(path, case, contract, device)
    assert result.passed, failure(result)
    tensors = case.tensors(path.inputs)
    operations = (path.operation, type(path.operation)(ACTIVATIONS[VARIANTS[name][0]], None))
    ours, base = (operation.reference(case, tensors, contract) for operation in operations)
    assert not same_bytes(ours["out"], base["out"])
