"""Speeds as ratios measured in one run: fused kernels against the copy bandwidth, the virtual GPU against the clock.

Every figure comes with what it is a ratio of. Times on CUDA are of replayed graphs (the host's part of a call is left
out) after a warm-up, medians over the replays; bytes are inputs once and outputs once. Nothing here is a test.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from moe_numerics.accumulators import architecture
from moe_numerics.devices import CudaDevice, VirtualDevice, open_device
from moe_numerics.reference import hadamard
from moe_numerics.reference.contract import SUITE
from moe_numerics.reference.formats import E4M3
from moe_numerics.reference.grouped_nvfp4 import Recipe

__all__ = ["Measurement", "measure"]

ROWS, HIDDEN, EXPERTS = 32768, 4096, 8
REPLAYS = 30
WARM_UP_SECONDS = 0.1
"""How long a graph is replayed before it is timed: clocks and pages of a device that waited are slower."""


@dataclass(frozen=True)
class Measurement:
    """One figure: `value` in `unit`, for `what`."""

    what: str
    value: float
    unit: str


@dataclass(frozen=True)
class _Work:
    """A call of a kernel, the bytes that it must read and write, and plain PyTorch that does the same work."""

    name: str
    bytes: int
    function: Callable[..., dict[str, torch.Tensor]]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    plain: Callable[..., tuple[torch.Tensor, ...]] | None = None
    inputs: tuple[torch.Tensor, ...] = ()


def measure(device: str) -> Iterator[Measurement]:
    """Measure what can be measured on a device, one figure at a time. DeviceError: there is no such device."""
    opened = open_device(device)
    if isinstance(opened, CudaDevice):
        from moe_numerics.bench_gemm import measure_gemm

        with opened.activate():
            yield from _cuda(device)
            if architecture(opened.target) is not None:
                yield from measure_gemm(device)
    else:
        assert isinstance(opened, VirtualDevice)
        from moe_numerics.virtual_bench import measure_virtual

        yield from measure_virtual(opened.target)


def _seconds(call: Callable[[], Any]) -> float:
    """Median time of a replayed graph of one call, once the device is at its pace."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
        until = time.monotonic() + WARM_UP_SECONDS
        while time.monotonic() < until:
            graph.replay()
            torch.cuda.synchronize()
        times = []
        for _ in range(REPLAYS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


def _copy_bandwidth(device: str) -> float:
    """Bytes read and written in a second by a device-to-device copy of 2 GiB."""
    source = torch.empty(1 << 29, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    for _ in range(3):
        target.copy_(source)
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * source.numel() * 4 / sorted(times)[len(times) // 2]


def _blocks(values: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain PyTorch MXFP8: what people write without a fused kernel. [rows, columns] float32."""
    shaped = values.unflatten(dim, (-1, 32))
    amax = shaped.abs().amax(dim, keepdim=True)
    bits = (amax * (1 / 448)).view(torch.int32)
    exponent = ((bits + 0x7FFFFF) >> 23).clamp(0, 254)
    factor = ((254 - exponent) << 23).view(torch.float32)
    codes = (shaped * factor).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.flatten(dim - 1, dim), exponent.to(torch.uint8)


def _plain_quantize(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    values = x.float()
    return (*_blocks(values, -1), *_blocks(values, -2))


def _plain_nvfp4(blocks: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain PyTorch NVFP4 of [..., 16] float32."""
    encode = 2688 / amax
    largest = blocks.abs().amax(-1, keepdim=True)
    scales = (largest * (encode / 6)).clamp(max=448).to(torch.float8_e4m3fn)
    scaled = blocks * (encode / scales.float())
    magnitude = scaled.abs()
    low, middle, high = (2 * magnitude).round(), magnitude.round() + 2, (magnitude / 2).round() + 4
    codes = low.minimum(middle).minimum(high).clamp(max=7).to(torch.uint8) | (scaled.signbit().to(torch.uint8) << 3)
    return codes[..., ::2] | (codes[..., 1::2] << 4), scales


def _plain_rowwise(x: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _plain_nvfp4(x.float().unflatten(1, (-1, 16)), amax)


def _plain_rotated(x: torch.Tensor, amax: torch.Tensor, rotation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """rotation: float32 [16, 16]."""
    return _plain_nvfp4(x.float().unflatten(0, (-1, 16)).permute(2, 0, 1) @ rotation, amax)


def plain_forward(gate_up: torch.Tensor, prob: torch.Tensor) -> tuple[torch.Tensor, ...]:
    gate, up = gate_up.float().chunk(2, dim=-1)
    y = torch.nn.functional.silu(gate) * up * prob[:, None]
    return (*_blocks(y, -1), *_blocks(y, -2))


def plain_backward(grad: torch.Tensor, gate_up: torch.Tensor, prob: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    gate, up = gate_up.float().chunk(2, dim=-1)
    s = torch.sigmoid(gate)
    weighted = grad.float() if prob is None else grad.float() * prob[:, None]
    dgate = weighted * up * s * (1 + gate * (1 - s))
    dup = weighted * gate * s
    both = torch.cat((dgate, dup), dim=-1)
    copies = (*_blocks(both, -1), *_blocks(both, -2))
    return copies if prob is None else (*copies, (grad.float() * gate * s * up).sum(-1))


def _cuda(device: str) -> Iterator[Measurement]:
    from moe_numerics.fused.elementwise import activation_backward, activation_forward, quantize
    from moe_numerics.fused.grouped_nvfp4 import quantize as quantize_nvfp4

    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(torch.bfloat16)

    gate_up, grad = normal(ROWS, 2 * HIDDEN), normal(ROWS, HIDDEN)
    prob = torch.rand(ROWS, generator=generator, device=device)
    offsets = torch.arange(0, ROWS + 1, ROWS // EXPERTS, dtype=torch.int32, device=device)
    copy = _copy_bandwidth(device)
    yield Measurement("device copy, read and written", copy / 1e12, "TB/s")

    elements = ROWS * HIDDEN
    scales = elements // 16
    packed = elements // 2 + elements // 16
    largest = grad.abs().max().float().reshape(1)
    amax = {"amax_rowwise": largest, "amax_colwise": largest}
    rotation = hadamard.rotate(torch.eye(16, device=device), -1)
    mxfp8: dict[str, Any] = {"element": E4M3}
    fast: dict[str, Any] = {"contract": SUITE.replace(maths="fast")}
    rowwise: dict[str, Any] = {"recipe": Recipe(colwise=False), "amax": amax}
    rotated: dict[str, Any] = {"recipe": Recipe(rowwise=False, rotated=True), "amax": amax}
    forward, backward = (gate_up, offsets, None, prob), (grad, gate_up, offsets, None, prob)
    of_forward, of_backward = elements * 6, elements * 10
    works = (
        _Work("quantize.mxfp8_e4m3", elements * 4 + scales, quantize, (grad, offsets), mxfp8, _plain_quantize, (grad,)),
        _Work(
            "quantize.nvfp4.rowwise, amax known",
            elements * 2 + packed,
            quantize_nvfp4,
            (grad, offsets),
            rowwise,
            _plain_rowwise,
            (grad, largest),
        ),
        _Work(
            "quantize.nvfp4.rht_colwise, amax known",
            elements * 2 + packed,
            quantize_nvfp4,
            (grad, offsets),
            rotated,
            _plain_rotated,
            (grad, largest, rotation),
        ),
        _Work("swiglu.fwd.bf16", of_forward, activation_forward, forward, {}),
        _Work(
            "swiglu.fwd.mxfp8_e4m3",
            of_forward + scales,
            activation_forward,
            forward,
            mxfp8,
            plain_forward,
            (gate_up, prob),
        ),
        _Work("swiglu.fwd.mxfp8_e4m3.fast", of_forward + scales, activation_forward, forward, mxfp8 | fast),
        _Work("swiglu.bwd.bf16", of_backward, activation_backward, backward, {}),
        _Work("swiglu.bwd.bf16.fast", of_backward, activation_backward, backward, fast),
        _Work(
            "swiglu.bwd.mxfp8_e4m3",
            of_backward + 2 * scales,
            activation_backward,
            backward,
            mxfp8,
            plain_backward,
            (grad, gate_up, prob),
        ),
        _Work("swiglu.bwd.mxfp8_e4m3.fast", of_backward + 2 * scales, activation_backward, backward, mxfp8 | fast),
    )
    for work in works:
        out = work.function(*work.arguments, **work.options)
        seconds = _seconds(partial(work.function, *work.arguments, **work.options, out=out))
        yield Measurement(f"{work.name}, [{ROWS}, {HIDDEN}]", seconds * 1e6, "us")
        yield Measurement(f"{work.name}, share of the copy bandwidth", 100 * work.bytes / seconds / copy, "%")
    for work in works:
        if work.plain is None:
            continue
        seconds = _seconds(partial(torch.compile(work.plain, dynamic=False), *work.inputs))
        what = f"torch.compile of the same work as {work.name}"
        yield Measurement(what, seconds * 1e6, "us")
        yield Measurement(f"{what}, share of the copy bandwidth", 100 * work.bytes / seconds / copy, "%")
