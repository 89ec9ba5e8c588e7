"""Speeds of the grouped GEMMs with activation and quantisation, beside the product alone and beside unfused PyTorch.

Every time is the median of replayed graphs whose replays take turns, so that all of them see the same clock. Before a
kernel is timed a sample of its result at full size is compared with the bit-accurate reference: a wrong one has no
figure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from moe_numerics.bench import Measurement, plain_backward, plain_forward
from moe_numerics.reference import grouped_mlp
from moe_numerics.reference.formats import E4M3
from moe_numerics.reference.ragged import Experts

__all__ = ["BenchError", "Sizes", "measure_gemm"]

ROUNDS = 15
SAMPLE_ROWS, SAMPLE_COLUMNS = 64, 128
_BLOCK = 32
_LAYOUT = f"interleaved:{_BLOCK}"

Results = Mapping[str, torch.Tensor]


class BenchError(Exception):
    """A kernel's result is wrong: there is nothing to measure."""


@dataclass(frozen=True)
class Sizes:
    """Experts, tokens of each, K and N: the first layer has 2N columns. As in the figures of the README."""

    experts: int = 8
    tokens: int = 4096
    depth: int = 8192
    hidden: int = 4096

    @property
    def rows(self) -> int:
        """Tokens of all experts."""
        return self.experts * self.tokens

    def distributions(self) -> dict[str, list[int]]:
        """Tokens of each expert: as many each, by Zipf's law, or half of all for one expert."""
        rows, experts = self.rows, self.experts
        shares = [1 / rank for rank in range(1, experts + 1)]
        zipf = [int(rows * share / sum(shares)) for share in shares]
        zipf[0] += rows - sum(zipf)
        half = [rows // 2 // max(experts - 1, 1)] * experts
        half[experts // 2] = rows - sum(half[: experts // 2]) - sum(half[experts // 2 + 1 :])
        return {"balanced": [self.tokens] * experts, "Zipf": zipf, "half for one expert": half}


@dataclass(frozen=True, eq=False)
class _Inputs:
    """Normal tensors of the sizes, on a device."""

    sizes: Sizes
    device: str
    tensors: dict[str, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator(self.device).manual_seed(0)

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            made = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
            return made.normal_(std=scale, generator=generator)

        rows, experts, depth, hidden = self.sizes.rows, self.sizes.experts, self.sizes.depth, self.sizes.hidden
        tensors = {
            "x": normal(rows, depth),
            "weights1": normal(experts, 2 * hidden, depth, scale=depth**-0.5),
            "weights2": normal(experts, depth, hidden, scale=depth**-0.5),
            "preactivation": normal(rows, 2 * hidden),
            "prob": torch.rand(rows, generator=generator, device=self.device),
        }
        object.__setattr__(self, "tensors", tensors)

    def offsets(self, counts: list[int]) -> torch.Tensor:
        bounds = [0]
        for count in counts:
            bounds.append(bounds[-1] + count)
        return torch.tensor(bounds, dtype=torch.int32, device=self.device)

    def first_layer(self, offsets: torch.Tensor) -> Results:
        from moe_numerics.fused.grouped_mlp import fc1

        t = self.tensors
        return fc1(t["x"], t["weights1"], offsets, None, t["prob"], element=E4M3)

    def second_layer_backward(self, offsets: torch.Tensor, prob: torch.Tensor | None = None) -> Results:
        from moe_numerics.fused.grouped_mlp import fc2_backward

        t = self.tensors
        return fc2_backward(t["x"], t["weights2"], t["preactivation"], offsets, None, prob, element=E4M3, extras=())

    def forward_product(self, offsets: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(self.tensors["x"], self.tensors["weights1"].transpose(1, 2), offsets[1:])

    def backward_product(self, offsets: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(self.tensors["x"], self.tensors["weights2"], offsets[1:])


def _sample(
    inputs: _Inputs, counts: list[int], direction: str, weighted: bool
) -> tuple[dict[str, torch.Tensor], Callable[..., Any]]:
    """The reference's results for some rows and columns of one expert, and what picks the same out of a kernel's.

    Rows begin at a multiple of 32 of the expert's, so that column-wise blocks are whole ones.
    """
    t, sizes = inputs.tensors, inputs.sizes
    expert = max(range(len(counts)), key=lambda e: counts[e] * (e % 3 + 1))
    shift = counts[expert] // 2 // _BLOCK * _BLOCK
    rows, columns = min(SAMPLE_ROWS, counts[expert] - shift), min(SAMPLE_COLUMNS, sizes.hidden)
    row, column = sum(counts[:expert]) + shift, (sizes.hidden - columns) // 2 // _BLOCK * _BLOCK
    token, across = slice(row, row + rows), slice(2 * column, 2 * (column + columns))
    offsets = torch.tensor([0, rows], dtype=torch.int32, device=inputs.device)
    options: dict[str, Any] = {"layout": _LAYOUT, "element": E4M3}
    x, prob = t["x"][token], t["prob"][token] if weighted else None
    if direction == "forward":
        weights = t["weights1"][expert : expert + 1, across]
        expected = grouped_mlp.fc1(x, weights, offsets, None, prob, **options)
        written = slice(column, column + columns)
    else:
        weights = t["weights2"][expert : expert + 1, :, column : column + columns]
        before = t["preactivation"][token, across].contiguous()
        expected = grouped_mlp.fc2_backward(x, weights, before, offsets, None, prob, **options)
        written = across
    experts = Experts.from_offsets(inputs.offsets(counts))
    first = experts.colwise_row(expert, shift // _BLOCK, _BLOCK)

    def pick(name: str, result: torch.Tensor) -> torch.Tensor:
        if name == "preactivation":
            return result[token, across]
        if name == "scales_rowwise":
            return result[token, written.start // _BLOCK : written.stop // _BLOCK]
        if name == "scales_colwise":
            return result[first : first + -(-rows // _BLOCK), written]
        return result[token, written]

    names = ("preactivation", "codes_rowwise", "scales_rowwise", "codes_colwise", "scales_colwise")
    # One block of 32 rows more than the rows need is room for the layout of several experts.
    blocks = -(-rows // _BLOCK)
    kept = {
        name: expected[name][:blocks] if name == "scales_colwise" else expected[name]
        for name in names
        if name in expected
    }
    return kept, pick


def _checked(inputs: _Inputs, counts: list[int], direction: str, weighted: bool, results: Results) -> int:
    """Elements of the sample that were compared, all equal. BenchError: one is not."""
    expected, pick = _sample(inputs, counts, direction, weighted)
    elements = 0
    for name, want in expected.items():
        got = pick(name, results[name])
        width = torch.int16 if want.dtype == torch.bfloat16 else torch.uint8
        differ = int((got.contiguous().view(width) != want.contiguous().view(width)).sum())
        if differ:
            raise BenchError(
                f"{name} of {direction} with tokens {counts}: {differ} of {want.numel()} elements of the sample differ "
                "from the reference"
            )
        elements += want.numel()
    return elements


def _medians(calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Median seconds of each call's graph, replayed in turns."""
    graphs = {}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for name, call in calls.items():
            for _ in range(2):
                call()
            torch.cuda.synchronize()
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name], stream=stream):
                call()
        times: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(ROUNDS + 1):
            for name, graph in graphs.items():
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record(stream)
                graph.replay()
                end.record(stream)
                end.synchronize()
                # The first turn warms the caches and the clock.
                if turn:
                    times[name].append(start.elapsed_time(end) / 1e3)
    return {name: sorted(each)[len(each) // 2] for name, each in times.items()}


def measure_gemm(device: str, sizes: Sizes = Sizes()) -> Iterator[Measurement]:
    """Figures of both directions on a CUDA device, which is active. BenchError: a kernel's result is wrong."""
    inputs = _Inputs(sizes, device)
    t = inputs.tensors
    shape = f"{sizes.experts} experts, {sizes.rows} tokens, K {sizes.depth}, N {sizes.hidden}"
    forward, backward = torch.compile(plain_forward, dynamic=False), torch.compile(plain_backward, dynamic=False)
    for direction, what, weighted, fused, product, eager, compiled in (
        (
            "forward",
            "first layer + SwiGLU + MXFP8 both ways",
            True,
            inputs.first_layer,
            inputs.forward_product,
            lambda product: plain_forward(product, t["prob"]),
            lambda product: forward(product, t["prob"]),
        ),
        (
            "backward",
            "data gradient + SwiGLU backward + MXFP8 both ways",
            False,
            inputs.second_layer_backward,
            inputs.backward_product,
            lambda product: plain_backward(product, t["preactivation"], None),
            lambda product: backward(product, t["preactivation"], None),
        ),
        (
            "backward",
            "data gradient + SwiGLU backward with dprob + MXFP8 both ways",
            True,
            partial(inputs.second_layer_backward, prob=t["prob"]),
            inputs.backward_product,
            lambda product: plain_backward(product, t["preactivation"], t["prob"]),
            lambda product: backward(product, t["preactivation"], t["prob"]),
        ),
    ):
        offsets = {name: inputs.offsets(counts) for name, counts in sizes.distributions().items()}
        elements = 0
        for name, counts in sizes.distributions().items():
            elements += _checked(inputs, counts, direction, weighted, fused(offsets[name]))
        yield Measurement(f"{what}, samples of results compared with the reference", elements, "elements, all equal")
        even = offsets["balanced"]
        times = _medians(
            {
                **{name: partial(fused, bounds) for name, bounds in offsets.items()},
                "product": partial(product, even),
                "eager": lambda eager=eager, product=product, even=even: eager(product(even)),  # type: ignore[misc]
                "compiled": lambda compiled=compiled, product=product, even=even: compiled(product(even)),  # type: ignore[misc]
            }
        )
        alone = times["product"]
        yield Measurement(f"torch._grouped_mm alone, {direction}, {shape}", alone * 1e3, "ms")
        yield Measurement(f"{what}, fused", times["balanced"] * 1e3, "ms")
        yield Measurement(f"{what}, fused, over torch._grouped_mm alone", times["balanced"] / alone, "x")
        yield Measurement(f"{what}, torch._grouped_mm and torch.compile, over it alone", times["compiled"] / alone, "x")
        yield Measurement(f"{what}, torch._grouped_mm and eager PyTorch, over it alone", times["eager"] / alone, "x")
        for name in offsets:
            if name != "balanced":
                yield Measurement(
                    f"{what}, fused, tokens {name}, over balanced ones", times[name] / times["balanced"], "x"
                )
