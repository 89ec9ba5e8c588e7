"""Faults that were reported in public in grouped kernels, reductions and test harnesses, each as a test of its kind.

The number in a test's name is the row of the list of public faults that the suite was built from; its docstring names
one report. Kernels run on the virtual GPU, whose buffers begin filled with a pattern, so that what was never written
shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from kernel_runs import ActiveDevice, active_device, assert_same, failure, given_tensors
from moe_numerics.fused import elementwise as fused
from moe_numerics.fused.ragged import SLOTS_PER_LAYER
from moe_numerics.reference import elementwise, grouped_gemm, oracle
from moe_numerics.reference.activations import ACTIVATIONS
from moe_numerics.reference.formats import E4M3, E5M2, E8M0, FloatFormat

from moe_numerics.cases import Case, Values
from moe_numerics.drawing import Space, draw_cases
from moe_numerics.paths import find_path
from moe_numerics.running import CaseResult, compare_outputs, expected_outputs
from moe_numerics.virtual_gpu.schedule import Schedule

BOTH = ("virtual:sm_90a", "virtual:sm_100a")


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[ActiveDevice]:
    """The device that a test names."""
    with active_device(request.param) as opened:
        yield opened


def integers(*shape: int, low: int = -2, high: int = 3, seed: int = 0) -> torch.Tensor:
    """Small integers in bfloat16, whose products and sums are exact in float32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator).to(torch.bfloat16)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def product_case(path_id: str, counts: Sequence[int], **choices: Any) -> Case:
    """Normal values, 64 columns and a depth of 32."""
    path = find_path(path_id)
    values = {spec.name: Values("gaussian", 3) for spec in path.inputs if spec.kind in ("values", "weights")}
    return Case(path_id, tuple(counts), 64, depth=32, padded=True, values=values, **choices)


def run(device: ActiveDevice, case: Case) -> dict[str, torch.Tensor]:
    """The kernel's outputs, which agree with the reference."""
    path = find_path(case.path)
    contract = path.contract("suite", device.target)
    got = dict(device.run(path, case, contract).outputs)
    findings = compare_outputs(path, case, expected_outputs(path, case, contract), got, filled=True)
    assert all(finding.passed for finding in findings), failure(CaseResult(case, findings))
    return got


def interleaved(x: torch.Tensor, block: int) -> torch.Tensor:
    """Columns of two halves as blocks of `block` gate columns, then as many up columns, again."""
    return torch.stack([half.reshape(len(x), -1, block) for half in x.chunk(2, dim=1)], dim=2).reshape(x.shape)


@pytest.mark.parametrize("device", BOTH, indirect=True)
@pytest.mark.parametrize("block", [32, 64, 96, 128])
def test_b32_gate_and_up_lie_where_the_layout_says(block: int, device: ActiveDevice) -> None:
    """vllm#29273, ATOM#885: halves read as blocks of 32, or the other way. The same permutation reaches the bias,
    its gradient and the gradient of the inputs.
    """
    hidden, offsets, layout = 2 * block, torch.tensor([0, 3, 5]), f"interleaved:{block}"
    apart = torch.cat((torch.full((5, hidden), 2.0), torch.full((5, hidden), 3.0)), dim=1).to(torch.bfloat16)
    value = fused.activation_forward(interleaved(apart, block), offsets, layout=layout)["out"]
    assert value.unique().tolist() == [torch.tensor(5.28478, dtype=torch.bfloat16).item()]
    x, grad, bias = normal(5, 2 * hidden), normal(5, hidden, seed=1), normal(2, 2 * hidden, seed=2)
    expected = elementwise.activation_backward(grad, x, offsets, bias=bias)
    got = fused.activation_backward(grad, interleaved(x, block), offsets, bias=interleaved(bias, block), layout=layout)
    for name in ("out", "dbias"):
        assert torch.equal(got[name], interleaved(expected[name], block)), name


@pytest.mark.parametrize(("variant", "device"), [("f32", BOTH[0]), ("main_grad", BOTH[1])], indirect=["device"])
@pytest.mark.parametrize("counts", [(8, 8, 0, 16), (0, 0)], ids=str)
def test_b46_the_weight_gradient_of_an_expert_without_tokens_is_written(
    variant: str, counts: tuple[int, ...], device: ActiveDevice
) -> None:
    """pytorch#172439, cutlass#2674: stale accumulators or allocator bytes. Zeros, or main_grad as it was."""
    path = find_path(f"grouped_gemm.wgrad.bf16.{variant}")
    case = product_case(path.id, counts, tail=4)
    out = run(device, case)["out"]
    before = case.tensors(path.inputs).get("main_grad", torch.zeros(out.shape)).to(out.dtype)
    for expert, count in enumerate(counts):
        assert torch.equal(out[expert], before[expert]) == (count == 0)


@pytest.mark.parametrize("device", BOTH, indirect=True)
@pytest.mark.parametrize("counts", [(104, 56, 96), (1, 0, 17)], ids=str)
def test_b52_weight_gradients_need_no_aligned_offsets(counts: tuple[int, ...], device: ActiveDevice) -> None:
    """marin#8339: silently wrong unless offsets are multiples of 64 or 256. Any counts, against float64."""
    path = find_path("grouped_gemm.wgrad.bf16.f32")
    case = product_case(path.id, counts)
    tensors, out = case.tensors(path.inputs), run(device, case)["out"]
    for expert, (start, end) in enumerate(itertools.pairwise(case.offsets)):
        exact = tensors["grad"][start:end].double().t() @ tensors["x"][start:end].double()
        assert (out[expert] - exact).abs().max() <= 0.003 * max(exact.abs().max().item(), 1e-30)


@pytest.mark.parametrize("device", BOTH, indirect=True)
def test_b53_every_group_is_computed_and_groups_move_as_wholes(device: ActiveDevice) -> None:
    """flashinfer#3792: only the first group was computed. Each equals its own product; permuted groups permute."""
    path = find_path("grouped_gemm.matmul.bf16.f32")
    case = product_case(path.id, (64, 64, 64, 64))
    tensors, out = case.tensors(path.inputs), run(device, case)["out"]
    accumulator = path.contract("suite", device.target).accumulator
    for expert in range(4):
        rows = slice(64 * expert, 64 * expert + 64)
        own = tensors["x"][rows], tensors["weights"][expert : expert + 1]
        alone = grouped_gemm.grouped_matmul(*own, [0, 64], accumulator=accumulator)
        assert torch.equal(out[rows], alone)
    order = torch.tensor([2, 0, 3, 1])
    rows = (64 * order[:, None] + torch.arange(64)).flatten()
    swapped = {"x": tensors["x"][rows], "weights": tensors["weights"][order]}
    assert torch.equal(run(device, given_tensors(case, swapped))["out"], out[rows])


def test_b54_switching_groups_races_with_nothing() -> None:
    """DeepGEMM#343, cudnn-frontend#652: results that change from run to run where one group follows another.

    Drawn orders of warps and blocks give the same bits, and a column of zeros in every group stays one.
    """
    path = find_path("grouped_gemm.wgrad.bf16.f32")
    case = product_case(path.id, (16, 0, 33))
    tensors = case.tensors(path.inputs)
    tensors["x"][:, 5] = 0
    given = given_tensors(case, {"x": tensors["x"]})
    results = []
    for schedule in ("fast", 1):
        with active_device("virtual:sm_90a", schedule) as device:
            results.append(run(device, given)["out"])
    assert not results[0][:, :, 5].any()
    for other in results[1:]:
        assert torch.equal(results[0], other)


def quantised_at(device: ActiveDevice, monkeypatch: pytest.MonkeyPatch, start: int, hidden: int) -> dict[str, Any]:
    """A tensor of which only the last 40 rows, from `start` on, have an owner, and its quantised copies.

    Its memory is reserved and not touched elsewhere, and of the many thread blocks those that have no row to work on
    are left out.
    """
    gpu: Any = device._gpu  # type: ignore[attr-defined]
    rows, blocks = start + 40, (start + 40) // 32 + 2
    shapes = elementwise.output_shapes(rows, hidden, 2, 1, True, 1, False)
    assert shapes["scales_colwise"][0][0] == blocks
    x = gpu.sparse(rows * hidden, torch.bfloat16).view(rows, hidden)
    x[start:] = normal(40, hidden)
    out = {name: gpu.sparse(int(np.prod(shape)), dtype).view(shape) for name, (shape, dtype) in shapes.items()}
    own = np.arange(start // 32 + 1, start // 32 + 3)
    everything = Schedule.order

    def order(self: Schedule, clusters: int) -> np.ndarray:
        tiles = hidden // 128
        if clusters < blocks:
            return everything(self, clusters)
        assert clusters >= blocks * tiles
        return (own[:, None] * tiles + np.arange(tiles)).reshape(-1)

    monkeypatch.setattr(Schedule, "order", order)
    monkeypatch.setattr(Schedule, "wave_clusters", lambda *_: 2**40)
    offsets, counts = torch.tensor([0, start, rows]), torch.tensor([0, 40], dtype=torch.int32)
    fused.quantize(x, offsets, counts, element=E4M3, out=out)
    return {"x": x, **out}


@pytest.mark.parametrize("device", BOTH, indirect=True)
def test_b55_offsets_past_32_bits(device: ActiveDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger-Kernel#1248: 1,079,839 rows of 2048 wrap an int32; rows past a capped grid are skipped."""
    start, hidden = 1_079_839 - 40, 2048
    assert start * hidden > 2**31
    assert start // 32 > SLOTS_PER_LAYER
    got = quantised_at(device, monkeypatch, start, hidden)
    alone = elementwise.quantize(got["x"][start:].clone(), torch.tensor([0, 40]), element=E4M3)
    for name in ("codes_rowwise", "scales_rowwise", "codes_colwise"):
        assert torch.equal(got[name][start:], alone[name]), name
    first = start // 32 + 1
    assert torch.equal(got["scales_colwise"][first : first + 2], alone["scales_colwise"][:2])
    assert got["amax"].tolist() == [0.0, alone["amax"].item()]


@pytest.mark.parametrize("rows", [1, 32_768 * 32, 70_000 * 32, 2**31 - 65])
def test_b55_no_grid_dimension_is_past_its_limit(rows: int) -> None:
    """DeepSpeed#8590: gridDim.y ends at 65,535. Every slot has a block, in dimensions that a GPU takes."""
    slots = rows // 32 + 3
    y, z = min(slots, SLOTS_PER_LAYER), -(-slots // SLOTS_PER_LAYER)
    assert y * z >= slots
    assert max(y, z) <= 65_535


@pytest.mark.parametrize("device", BOTH[:1], indirect=True)
def test_b56_replays_follow_new_counts_and_data(device: ActiveDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepGEMM#444, cudnn-frontend#796: a replay that kept the counts or a factor of its capture.

    A launch is recorded with its arguments, and replayed twelve times over changed contents of the same buffers; on a
    GPU `test_a_replayed_graph_serves_new_counts` does it with a CUDA graph.
    """
    recorded: list[tuple[Any, ...]] = []
    launch = fused.launch

    def recording(*arguments: Any) -> None:
        recorded.append(arguments)
        launch(*arguments)

    monkeypatch.setattr(fused, "launch", recording)
    x, prob = normal(64, 64), torch.ones(64)
    offsets = torch.tensor([0, 64, 64, 64, 64], dtype=torch.int32)
    shapes = elementwise.output_shapes(64, 32, 4, 1, True, 1, False)
    out = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    fused.activation_forward(x, offsets, None, prob, element=E4M3, out=out)
    assert len(recorded) == 1
    for replay, counts in enumerate(itertools.permutations((0, 16, 0, 48))):
        if replay == 12:
            break
        offsets[1:] = torch.tensor(counts).cumsum(0)
        x.copy_(normal(64, 64, seed=replay + 1))
        prob.fill_(2.0**-replay)
        launch(*recorded[0])
        expected = elementwise.activation_forward(x, offsets, None, prob, element=E4M3)
        path = find_path("swiglu.fwd.mxfp8_e4m3")
        experts = path.experts(Case(path.id, counts, 32))
        for spec in path.outputs:
            owned = spec.owned(experts).view(-1, *[1] * (out[spec.name].dim() - 1))
            assert_same(spec, *(torch.where(owned, t[spec.name], 0) for t in (expected, out)), f"replay {replay}")


@pytest.mark.parametrize("device", BOTH, indirect=True)
def test_b57_neither_product_of_the_input_gradient_is_lost(device: ActiveDevice) -> None:
    """Liger-Kernel#1413: one of the two products of dX is lost, or all rows land in row 0.

    dX = dG @ Wg + dU @ Wu with one weight zero, then the other, then neither; small integers make sums exact.
    """
    path = find_path("grouped_gemm.dgrad.bf16.f32")
    case = Case(path.id, (3,), 64, depth=64, padded=True)
    grad, weights = integers(3, 64, seed=1), integers(1, 64, 64, seed=2)
    halves = []
    for half in (slice(0, 32), slice(32, 64)):
        own = torch.zeros_like(weights)
        own[:, half] = weights[:, half]
        halves.append(run(device, given_tensors(case, {"grad": grad, "weights": own}))["out"])
        assert torch.equal(halves[-1], grad[:, half].float() @ weights[0, half].float())
    both = run(device, given_tensors(case, {"grad": grad, "weights": weights}))["out"]
    assert torch.equal(both, halves[0] + halves[1])
    assert all(row.any() for row in both)


def test_b59_sums_are_repeatable_and_bounded_by_the_sum_of_magnitudes() -> None:
    """cudnn-frontend#521: atomics in the order of arrival. The terms 1e8, 1 and -1e8 give 0 or 1, always the same."""
    path = find_path("relu.bwd.bf16")
    case = Case(path.id, (4,), 160, padded=True, prob=True)
    grad = torch.zeros(4, 160, dtype=torch.bfloat16)
    for row, places in enumerate(((0, 1, 2), (5, 70, 130), (159, 0, 64), (31, 32, 33))):
        for place, term in zip(places, (1e8, 1.0, -1e8), strict=True):
            grad[row, place] = term
    given = given_tensors(case, {"grad": grad, "x": torch.ones(4, 160, dtype=torch.bfloat16), "prob": torch.ones(4)})
    results = []
    for schedule in ("fast", 1, 2):
        with active_device("virtual:sm_90a", schedule) as device:
            results.append(run(device, given)["dprob"])
    terms = grad.double()
    assert ((results[0] - terms.sum(1)).abs() <= 160 * 2.0**-24 * terms.abs().sum(1)).all()
    for other in results[1:]:
        assert torch.equal(results[0].view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("name", ["swiglu", "geglu", "reglu"])
def test_b61_where_values_are_rounded_is_stated(name: str) -> None:
    """pytorch#136181: a compiler keeps float32 where eager code rounds to bfloat16 in between, and results differ.

    The reference rounds once, at the end: it is the rounded float64 result nearly always, and the eager chain is not.
    """
    gate, up = normal(64, 64, seed=4), normal(64, 64, seed=5)
    activation = ACTIVATIONS[name]
    once = activation.forward(gate, up).to(torch.bfloat16)
    exact = oracle.forward(activation, gate, up).to(torch.bfloat16)
    function = {"swiglu": torch.nn.functional.silu, "reglu": torch.relu}.get(
        name, lambda x: torch.nn.functional.gelu(x, approximate="tanh")
    )
    eager = function(gate) * up
    assert (once == exact).float().mean() > 0.998
    if name == "reglu":
        assert torch.equal(eager, once)  # relu returns a bfloat16 as it is
    else:
        assert (eager != once).float().mean() > 0.1


@pytest.mark.parametrize("device", BOTH, indirect=True)
@pytest.mark.parametrize("path_id", ["quantize.mxfp8_e4m3", "quantize.nvfp4", "relu.fwd.bf16"])
def test_b63_subnormal_numbers_are_numbers(path_id: str, device: ActiveDevice) -> None:
    """array-api-tests#42, hypothesis#3155: devices that flush subnormals fail on them. Drawn on purpose, and kept.

    2**-127 is an E8M0 scale and itself subnormal in float32.
    """
    assert E8M0.decode(torch.zeros(1, dtype=torch.uint8)).view(torch.int32).item() == 0x00400000
    path = find_path(path_id)
    space = Space(
        path.id, path.inputs, kinds=("subnormal",), layouts=("halves",), max_experts=2, max_elements=1000,
        big_elements=1000, offsets_dtypes=("int32",), paddings=(True,), probs=(False,), empty_buffer=False,
    )  # fmt: skip
    drawn = draw_cases(2, 1, space)
    name = next(spec.name for spec in path.inputs if spec.kind == "values")
    inputs = torch.cat([case.tensors(path.inputs)[name].float().flatten() for case in drawn])
    assert ((inputs != 0) & (inputs.abs() < 2.0**-126)).any()
    for case in drawn:
        run(device, case)


@pytest.mark.parametrize("device", BOTH, indirect=True)
@pytest.mark.parametrize("element", [E4M3, E5M2], ids=str)
def test_b45_conversions_of_the_kernels_agree_with_the_codec(element: FloatFormat, device: ActiveDevice) -> None:
    """cutlass#3382: a cast of two lanes was dropped or miscompiled. Every bfloat16 in either lane, scale 1."""
    every = torch.arange(0x10000, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    inside = every[every.float().abs() <= element.max_value]
    blocks = -(-len(inside) // 30)
    x = torch.zeros(blocks, 32, dtype=torch.bfloat16)
    x[:, 2:] = torch.cat((inside, inside[: blocks * 30 - len(inside)])).view(blocks, 30)
    # The largest value makes every scale 1; a second copy moves every value to the other lane.
    x[:, 0] = element.max_value
    swapped = x[:, torch.arange(32) ^ 1]
    for values in (x, swapped.contiguous()):
        got = fused.quantize(values, torch.tensor([0, blocks]), element=element)
        assert (got["scales_rowwise"] == 127).all()
        assert torch.equal(got["codes_rowwise"], element.encode(values.float()))
