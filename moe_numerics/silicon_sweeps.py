"""Full sweeps on a CUDA device: the models of the approximations over every float32, and the seeded reciprocal.

The kernel and the model, the latter with PyTorch's integer operations on the same device, both see all 2^32 inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from moe_numerics.virtual_gpu import micro, silicon_tables

__all__ = [
    "HALF_NAMES",
    "Launcher",
    "Sweep",
    "instructions",
    "seeded_reciprocal",
    "sweep_all",
    "sweep_approximation",
    "sweep_half",
]

CHUNK = 1 << 26
_SEEDED = (
    ".reg .b32 %y, %minus, %e; rcp.approx.ftz.f32 %y, {a0}; neg.f32 %minus, {a0}; "
    "fma.rn.f32 %e, %minus, %y, 0f3F800000; fma.rn.f32 {d0}, %y, %e, %y; rcp.rn.f32 {d1}, {a0};"
)
HALF_NAMES = {"ex2.f16": "ex2.approx.f16", "ex2.bf16": "ex2.approx.ftz.bf16", "tanh.f16": "tanh.approx.f16",
               "tanh.bf16": "tanh.approx.bf16"}  # fmt: skip


class Launcher(Protocol):
    """Launches PTX on tensors of its device."""

    device: torch.device

    def launch(self, ptx: str, kernel: str, blocks: int, threads: int, args: list[torch.Tensor | int]) -> None: ...


@dataclass(frozen=True)
class Sweep:
    """All inputs of one instruction: how many differ between the hardware and the model, and the first that does."""

    instruction: str
    inputs: int
    differences: int
    first: str = ""


def instructions() -> tuple[tuple[str, str, bool], ...]:
    """(instruction, function, whether it flushes) of every modelled float32 approximation."""
    flushing = [(f"{name}.approx.ftz.f32", name, True) for name in silicon_tables.FUNCTIONS if name != "tanh"]
    return (*flushing, *((f"{name}.approx.f32", name, False) for name in silicon_tables.FUNCTIONS))


def _inputs(launcher: Launcher, start: int, count: int) -> torch.Tensor:
    """The bits start, start + 1, ... as int32."""
    return torch.arange(start, start + count, dtype=torch.int64, device=launcher.device).to(torch.int32)


def _run(launcher: Launcher, ptx: str, inputs: torch.Tensor, results: int) -> list[torch.Tensor]:
    outputs = [torch.empty_like(inputs) for _ in range(results)]
    count = inputs.numel()
    launcher.launch(ptx, "micro", -(-count // 128), 128, [*outputs, inputs, count])
    return outputs


def _differences(
    launcher: Launcher, ptx: str, results: int, first: int, last: int, chunk: int,
    expected: Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor],
) -> tuple[int, str]:  # fmt: skip
    """Inputs from `first` to before `last` whose first result is not `expected(inputs, results)`."""
    total, shown = 0, ""
    for start in range(first, last, chunk):
        inputs = _inputs(launcher, start, min(chunk, last - start))
        got = _run(launcher, ptx, inputs, results)
        want = expected(inputs, got)
        wrong = got[0] != want
        count = int(wrong.sum())
        if count and not shown:
            n = int(wrong.nonzero()[0, 0])
            x, a, b = (int(t[n]) & 0xFFFFFFFF for t in (inputs, got[0], want))
            shown = f"{x:#010x} gives {a:#010x}, expected {b:#010x}"
        total += count
    return total, shown


def sweep_approximation(
    launcher: Launcher, arch: str, instruction: str, name: str, ftz: bool, first: int = 0, last: int = 1 << 32,
    chunk: int = CHUNK,
) -> Sweep:  # fmt: skip
    """The hardware against `silicon_tables.evaluate`, from the float32 with bits `first` to that before `last`."""
    ptx = micro.kernel(f"{instruction} {{d0}}, {{a0}};", ["f32"], ["f32"], arch)
    wrong, shown = _differences(
        launcher, ptx, 1, first, last, chunk, lambda x, _: silicon_tables.evaluate(arch, name, x, ftz)
    )
    return Sweep(instruction, last - first, wrong, shown)


def sweep_half(launcher: Launcher, arch: str, name: str) -> Sweep:
    """All 65,536 inputs of a 16-bit approximation."""
    instruction = HALF_NAMES[name]
    ptx = micro.kernel(
        f".reg .b16 %h; cvt.u16.u32 %h, {{a0}}; {instruction} %h, %h; cvt.u32.u16 {{d0}}, %h;", ["b32"], ["b32"], arch
    )
    wrong, shown = _differences(
        launcher, ptx, 1, 0, 1 << 16, 1 << 16, lambda x, _: silicon_tables.evaluate_half(arch, name, x)
    )
    return Sweep(instruction, 1 << 16, wrong, shown)


def seeded_reciprocal(
    launcher: Launcher, arch: str, first: int = 1 << 23, last: int = (253 << 23) + 1, chunk: int = CHUNK
) -> Sweep:
    """`rcp.approx.ftz` and one Newton step against `rcp.rn`, by default for every float32 from 2^-126 to 2^126.

    y = rcp.approx.ftz(d), e = fma(-d, y, 1), r = fma(y, e, y).
    """
    ptx = micro.kernel(_SEEDED, ["b32", "b32"], ["b32"], arch)
    wrong, shown = _differences(launcher, ptx, 2, first, last, chunk, lambda _, results: results[1])
    return Sweep("rcp.approx.ftz.f32 with one Newton step = rcp.rn.f32", last - first, wrong, shown)


def sweep_all(launcher: Launcher, arch: str) -> Iterator[Sweep]:
    """Every sweep."""
    yield seeded_reciprocal(launcher, arch)
    for instruction, name, ftz in instructions():
        yield sweep_approximation(launcher, arch, instruction, name, ftz)
    for name in silicon_tables.HALVES:
        yield sweep_half(launcher, arch, name)
