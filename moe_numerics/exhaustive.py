"""Every input there is: all 65,536 bfloat16 values of a unary activation, all 2^32 pairs of a gated one.

The fused kernel is compared with the reference, bit by bit, and the result with the oracle's float64 value rounded once
to bfloat16 (how many are correctly rounded). Pairs take a GPU; unary inputs also run on a virtual one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from moe_numerics.compare import compare_output
from moe_numerics.devices import CudaDevice, Device
from moe_numerics.reference import oracle
from moe_numerics.reference.activations import GATED_ACTIVATIONS, UNARY_ACTIVATIONS

__all__ = ["PAIRS", "Sweep", "sweep_pairs", "sweep_unary", "sweeps"]

PAIRS = ("swiglu", "geglu")

VALUES = 1 << 16
PAIR_COLUMNS = 1 << 12
UNARY_COLUMNS = 128


@dataclass(frozen=True)
class Sweep:
    """What a sweep found. correctly_rounded: results equal to the float64 oracle's, rounded once to bfloat16."""

    activation: str
    direction: str
    inputs: int
    bit_equal: int
    correctly_rounded: int
    largest_ulp: int | None


def _all_values(device: str) -> torch.Tensor:
    """Every bfloat16 value in the order of its bits, [65536]."""
    bits = torch.arange(VALUES, dtype=torch.int32, device=device)
    return bits.to(torch.uint16).view(torch.bfloat16)


def _equal(a: torch.Tensor, b: torch.Tensor) -> int:
    same = (a.view(torch.int16) == b.view(torch.int16)) | (torch.isnan(a) & torch.isnan(b))
    return int(same.sum())


def sweep_unary(device: Device) -> Iterator[Sweep]:
    """Forward and derivative of every unary activation over all bfloat16 inputs; the device is active."""
    from moe_numerics.fused.elementwise import activation_backward, activation_forward

    where = device.name if isinstance(device, CudaDevice) else "cpu"
    x = _all_values(where).view(-1, UNARY_COLUMNS)
    ones = torch.ones_like(x)
    offsets = torch.tensor([0, x.shape[0]], dtype=torch.int32, device=where)
    for name, activation in UNARY_ACTIVATIONS.items():
        for direction in ("forward", "backward"):
            if direction == "forward":
                fused = activation_forward(x, offsets, activation=activation)["out"]
                expected = activation.forward(x)
                exact = oracle.forward(activation, x.double())
            else:
                fused = activation_backward(ones, x, offsets, activation=activation)["out"]
                expected = activation.backward(ones, x)
                exact = oracle.backward(activation, ones.double(), x.double())[0]
            finding = compare_output(name, expected.to(torch.bfloat16), fused)
            correct = _equal(fused, oracle.round_once(exact, torch.bfloat16))
            yield Sweep(name, direction, VALUES, finding.bit_equal, correct, finding.max_ulp)


def sweep_pairs(device: CudaDevice, names: Sequence[str] = PAIRS) -> Iterator[Sweep]:
    """Forward of gated activations over all pairs of bfloat16 gate and up, on a GPU; the device is active."""
    from moe_numerics.fused.elementwise import activation_forward

    values = _all_values(device.name)
    offsets = torch.tensor([0, VALUES], dtype=torch.int32, device=device.name)
    for name in names:
        activation = GATED_ACTIVATIONS[name]
        equal, correct, largest = 0, 0, 0
        for start in range(0, VALUES, PAIR_COLUMNS):
            gate = values[:, None].expand(VALUES, PAIR_COLUMNS)
            up = values[None, start : start + PAIR_COLUMNS].expand(VALUES, PAIR_COLUMNS)
            fused = activation_forward(torch.cat((gate, up), dim=1), offsets, activation=activation)["out"]
            for part in range(0, VALUES, VALUES // 8):
                rows = slice(part, part + VALUES // 8)
                expected = activation.forward(gate[rows], up[rows]).to(torch.bfloat16)
                finding = compare_output(name, expected, fused[rows])
                equal += finding.bit_equal
                largest = max(largest, finding.max_ulp or 0)
                exact = oracle.forward(activation, gate[rows].double(), up[rows].double())
                correct += _equal(fused[rows], oracle.round_once(exact, torch.bfloat16))
        yield Sweep(name, "forward", VALUES * VALUES, equal, correct, largest)


def sweeps(device: Device) -> Iterator[Sweep]:
    """All sweeps that a device takes; the device is active."""
    yield from sweep_unary(device)
    if isinstance(device, CudaDevice):
        yield from sweep_pairs(device)
