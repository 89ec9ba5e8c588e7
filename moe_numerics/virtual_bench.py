"""Speed of the virtual GPU: thread-instructions a second, seconds for a GEMM, and what checkers and schedules cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from moe_numerics.bench import Measurement
from moe_numerics.fused import compilation
from moe_numerics.fused.elementwise import activation_forward
from moe_numerics.fused.grouped_gemm import grouped_matmul
from moe_numerics.fused.quantized import Quantized
from moe_numerics.reference import mxfp8
from moe_numerics.reference.formats import E4M3
from moe_numerics.virtual_gpu import virtual_gpu

__all__ = ["measure_virtual"]

REPEATS = 3
SEEDS = (1, 2, 3)
"""Adversarial schedules; the slowest counts."""

GEMM = 256
"""Rows, columns and depth of the matrices."""


def measure_virtual(target: str) -> Iterator[Measurement]:
    """An elementwise kernel on the virtual GPU `target`, a bf16 GEMM on `sm_90a`, an MXFP8 one on `sm_100a`."""
    token = compilation.domain.set("virtual")
    try:
        # A tile of 32 x 128 elements has 128 threads.
        for tiles, threads in ((8, 1024), (782, 100_096)):
            yield from _elementwise(target, tiles, threads)
        bf16, fp8 = _operands()
        size = f"{GEMM} x {GEMM} x {GEMM}"
        yield from _gemm("sm_90a", f"bf16 GEMM {size} by TMA and wgmma on virtual:sm_90a", bf16)
        yield from _gemm("sm_100a", f"MXFP8 GEMM {size} by TMA and tcgen05 on virtual:sm_100a", fp8)
    finally:
        compilation.domain.reset(token)


def _best(call: Callable[[], object]) -> float:
    """Seconds of the fastest of some calls."""
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def _elementwise(target: str, tiles: int, threads: int) -> Iterator[Measurement]:
    gate_up = torch.zeros(32 * tiles, 256, dtype=torch.bfloat16)
    offsets = torch.tensor([0, 32 * tiles], dtype=torch.int32)
    call = partial(activation_forward, gate_up, offsets, element=E4M3)
    speeds = {}
    for checkers in (False, True):
        with virtual_gpu(target, checkers=checkers) as gpu:
            call()
            before = gpu.stats.thread_instructions
            seconds = _best(call)
            speeds[checkers] = (gpu.stats.thread_instructions - before) / REPEATS / seconds / 1e6
    what = f"swiglu.fwd.mxfp8_e4m3 with {threads:,} threads"
    yield Measurement(f"{what}, checkers off", speeds[False], "million thread-instructions/s")
    yield Measurement(f"{what}, checkers on", speeds[True], "million thread-instructions/s")
    yield Measurement(f"{what}, time with checkers over time without", speeds[False] / speeds[True], "x")


def _operands() -> tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]:
    """GEMMs of one expert, in bf16 and in MXFP8."""
    generator = torch.Generator().manual_seed(0)
    x, weights = (torch.randn(GEMM, GEMM, generator=generator).to(torch.bfloat16) for _ in range(2))
    offsets = torch.tensor([0, GEMM], dtype=torch.int32)
    left, right = mxfp8.quantize(x, -1), mxfp8.quantize(weights, -1)
    return partial(grouped_matmul, x, weights[None], offsets), partial(
        grouped_matmul, Quantized.of(left), Quantized.of([right]), offsets
    )


def _gemm(target: str, what: str, call: Callable[[], torch.Tensor]) -> Iterator[Measurement]:
    seconds: dict[tuple[bool, str | int], float] = {}
    ways: list[tuple[bool, str | int]] = [(False, "fast"), (True, "fast"), *((True, seed) for seed in SEEDS)]
    for checkers, schedule in ways:
        with virtual_gpu(target, schedule, checkers) as gpu:
            # The first call compiles, parses and lowers.
            call()
            seconds[checkers, schedule] = _best(call)
            if gpu.findings:
                raise RuntimeError(f"{what}: {gpu.findings[0]}")
    alone = seconds[False, "fast"]
    adversarial = max(seconds[True, seed] for seed in SEEDS)
    yield Measurement(f"{what}, checkers off", alone, "s")
    yield Measurement(f"{what}, checkers on", seconds[True, "fast"], "s")
    yield Measurement(f"{what}, time with checkers over time without", seconds[True, "fast"] / alone, "x")
    yield Measurement(f"{what}, checkers and an adversarial schedule", adversarial, "s")
    yield Measurement(f"{what}, time with both over time without", adversarial / alone, "x")
