"""The grouped MLP: exact on operands that nothing rounds, equal to its launches, blind to padding and neighbours."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_numerics.reference import elementwise, grouped_mlp
from moe_numerics.reference.contract import SUITE
from moe_numerics.reference.formats import E4M3, E5M2
from moe_numerics.reference.grouped_gemm import grouped_dgrad, grouped_matmul
from moe_numerics.reference.grouped_mlp import Step, fc1, fc2_backward, step, sum_over_rows
from moe_numerics.reference.ragged import Experts

WIDTH = 32


@dataclass
class Case:
    """Inputs of a step, with `fill` in the rows that no expert owns."""

    experts: Experts
    tensors: dict[str, torch.Tensor]
    inputs: int

    def run(self, choices: Step, **options: object) -> dict[str, torch.Tensor]:
        return step(**self.tensors, alignment=self.experts.alignment, choices=choices, **options)


def make(
    counts: list[int],
    gaps: list[int],
    seed: int,
    kind: str,
    inputs: int = 2,
    alignment: int = 1,
    fill: float = math.nan,
) -> Case:
    """kind "normal": random values. "signs": values in -1, 0, 1, weights that are signed permutations, prob 1/2 or 2;
    so nothing is rounded anywhere. "flat": the same with blocks of 16 equal rows."""
    generator = torch.Generator().manual_seed(seed)
    offsets = [0]
    for count, gap in zip(counts, gaps, strict=True):
        offsets.append(offsets[-1] + -(-(count + gap) // alignment) * alignment)
    experts = Experts.from_offsets(offsets, counts, offsets[-1] + 3, alignment)
    rows, n = experts.capacity, len(counts)
    if kind == "normal":
        x, grad = (torch.randn(rows, WIDTH, generator=generator) for _ in range(2))
        weights1 = torch.randn(n, inputs * WIDTH, WIDTH, generator=generator) / 6
        weights2 = torch.randn(n, WIDTH, WIDTH, generator=generator) / 6
        prob = torch.rand(rows, generator=generator)
    else:
        x, grad = (torch.randint(-1, 2, (rows, WIDTH), generator=generator).float() for _ in range(2))
        prob = 2.0 ** torch.randint(-1, 2, (rows,), generator=generator)
        if kind == "flat":
            x, grad, prob = (t[torch.arange(rows) // 16] for t in (x, grad, torch.ones(rows)))
        weights1 = torch.stack([torch.cat([permutation(generator) for _ in range(inputs)]) for _ in range(n)])
        weights2 = torch.stack([permutation(generator) for _ in range(n)])
    padding = ~experts.valid_rows()
    x[padding], grad[padding], prob[padding] = fill, fill, fill
    tensors = {
        "x": x.bfloat16(),
        "weights1": weights1.bfloat16(),
        "weights2": weights2.bfloat16(),
        "grad": grad.bfloat16(),
        "offsets": torch.tensor(offsets),
        "counts": torch.tensor(counts, dtype=torch.int32),
        "prob": prob,
    }
    return Case(experts, tensors, inputs)


def permutation(generator: torch.Generator) -> torch.Tensor:
    signs = torch.randint(0, 2, (WIDTH, 1), generator=generator) * 2.0 - 1
    return torch.eye(WIDTH)[torch.randperm(WIDTH, generator=generator)] * signs


def bits(x: torch.Tensor) -> torch.Tensor:
    kind = {torch.float32: torch.int32, torch.bfloat16: torch.int16}.get(x.dtype)
    return x if kind is None else x.contiguous().view(kind)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def autograd(case: Case, activation: str) -> dict[str, torch.Tensor]:
    """The step in float64, its gradients by autograd."""
    tensors = {name: case.tensors[name].double() for name in ("x", "weights1", "weights2", "prob")}
    padding = ~case.experts.valid_rows()
    for name in ("x", "prob"):
        tensors[name][padding] = 0.0
    x, weights1, weights2, prob = (t.requires_grad_() for t in tensors.values())
    out = torch.zeros_like(x)
    for e, (start, count) in enumerate(zip(case.experts.starts, case.experts.counts, strict=True)):
        rows = slice(start, start + count)
        hidden = x[rows] @ weights1[e].t()
        activated = torch.relu(hidden[:, :WIDTH])
        if activation == "reglu":
            activated = activated * hidden[:, WIDTH:]
        out[rows] = (activated * prob[rows, None]) @ weights2[e].t()
    grad = torch.where(padding[:, None], 0.0, case.tensors["grad"].double())
    out.backward(grad)
    results = {"out": out.detach(), "dx": x.grad, "dweights1": weights1.grad, "dweights2": weights2.grad}
    return {**results, "dprob": prob.grad}


ragged = {
    "counts": st.lists(st.integers(0, 35), min_size=1, max_size=3),
    "gaps": st.lists(st.integers(0, 3), min_size=3, max_size=3),
    "seed": st.integers(0, 2**32),
}
activations = st.sampled_from(["reglu", "relu"])


@given(
    **ragged, activation=activations, operands=st.sampled_from(["bf16", "mxfp8"]), element=st.sampled_from([E4M3, E5M2])
)
def test_nothing_is_lost_where_nothing_is_rounded(
    counts: list[int], gaps: list[int], seed: int, activation: str, operands: str, element: object
) -> None:
    """Catches any wrong wiring: a transposed weight, a missing prob, gate and up swapped, a copy of the wrong axis."""
    case = make(counts, gaps[: len(counts)], seed, "signs", inputs=1 if activation == "relu" else 2)
    accumulator = "sm_90.bf16" if seed % 2 or operands == "bf16" else "sm_100.mxf8f6f4"
    choices = Step(operands, activation, grad_element=element, contract=SUITE.replace(accumulator=accumulator))
    got, want = case.run(choices), autograd(case, activation)
    for name, exact in want.items():
        assert torch.equal(got[name].double(), exact), name
    expected = torch.zeros_like(got["dbias"])
    for e, (start, count) in enumerate(zip(case.experts.starts, case.experts.counts, strict=True)):
        expected[e] = dpreactivation(case, got, activation)[start : start + count].sum(0)
    assert torch.equal(got["dbias"], expected)


def dpreactivation(case: Case, got: dict[str, torch.Tensor], activation: str) -> torch.Tensor:
    """relu or reglu backward of dactivation times prob, with zeros in padding rows."""
    weighted = torch.nan_to_num(got["dactivation"] * case.tensors["prob"][:, None])
    pre = got["preactivation"].float()
    if activation == "relu":
        return weighted * (pre > 0)
    gate, up = pre[:, :WIDTH], pre[:, WIDTH:]
    return torch.cat([weighted * up * (gate > 0), weighted * torch.relu(gate)], dim=1)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=3), st.integers(0, 2**32), activations)
def test_nvfp4_rotations_cancel(tiles: list[int], seed: int, activation: str) -> None:
    """Catches a weight gradient of one rotated operand, or of operands in two different buffers.

    Rows are equal in blocks of 16, so that the rotation without signs has one entry a block and FP4 holds it. What
    remains is the rounding of the global scales: three float32 products and 2688^-2.
    """
    case = make([16 * n for n in tiles], [0] * len(tiles), seed, "flat", 1 if activation == "relu" else 2, 16, fill=0.0)
    contract = SUITE.replace(rht_signs=None)
    got = case.run(Step("nvfp4", activation, stochastic=False, contract=contract))
    want = autograd(case, activation)
    for name in ("out", "dx"):
        assert torch.equal(got[name].double(), want[name]), name
    for name in ("dweights1", "dweights2"):
        assert bool(((got[name].double() - want[name]).abs() <= want[name].abs() * 6 * 2.0**-23).all()), name


CHOICES = [
    Step("bf16", "swiglu"),
    Step("mxfp8", "clamped_swiglu", "interleaved:32", grad_element=E5M2),
    Step("mxfp8", "gelu", epilogue_input="bfloat16", contract=SUITE.replace(accumulator="sm_90.e4m3")),
    Step("nvfp4", "swiglu", stochastic=False, contract=SUITE.replace(amax_scope="expert")),
    Step("nvfp4", "srelu", seed=5, contract=SUITE.replace(amax_scope="expert", accumulator="sm_100.mxf4nvf4")),
]


def inputs_of(choices: Step) -> int:
    return elementwise.find_activation(choices.activation).inputs


@given(**ragged, choices=st.sampled_from(CHOICES), alignment=st.sampled_from([1, 16, 32]))
def test_padding_does_not_matter(counts: list[int], gaps: list[int], seed: int, choices: Step, alignment: int) -> None:
    """Catches a row that no expert owns reaching a result, and results in such rows that are not zero."""
    inputs = inputs_of(choices)
    results = [
        make(counts, gaps[: len(counts)], seed, "normal", inputs, alignment, fill).run(choices)
        for fill in (0.0, math.nan)
    ]
    for name, value in results[0].items():
        assert same_bits(value, results[1][name]), name
    padding = ~make(counts, gaps[: len(counts)], seed, "normal", inputs, alignment).experts.valid_rows()
    for name in ("out", "dx", "preactivation", "dactivation", "dprob"):
        assert not bool(results[0][name][padding].any()), name


@given(**ragged, choices=st.sampled_from(CHOICES))
def test_an_expert_alone_gives_the_same(counts: list[int], gaps: list[int], seed: int, choices: Step) -> None:
    """Catches anything that one expert's rows change in another's results."""
    if choices.operands == "nvfp4" and choices.stochastic:
        choices = Step("nvfp4", choices.activation, stochastic=False, contract=choices.contract)
    case = make(counts, gaps[: len(counts)], seed, "normal", inputs_of(choices))
    together = case.run(choices)
    e = seed % len(counts)
    start, count = case.experts.starts[e], case.experts.counts[e]
    rows = slice(start, start + count)
    alone = {
        name: case.tensors[name][rows] if name in ("x", "grad", "prob") else case.tensors[name][e, None]
        for name in ("x", "grad", "prob", "weights1", "weights2")
    }
    got = step(**alone, offsets=torch.tensor([0, count]), choices=choices)
    for name in ("out", "dx", "preactivation", "dactivation", "dprob"):
        assert same_bits(got[name], together[name][rows]), name
    for name in ("dweights1", "dweights2", "dbias"):
        assert same_bits(got[name][0], together[name][e]), name


@given(**ragged, choices=st.sampled_from(CHOICES[:3]), epilogue=st.sampled_from(["accumulator", "bfloat16"]))
def test_a_step_is_its_launches(counts: list[int], gaps: list[int], seed: int, choices: Step, epilogue: str) -> None:
    """Catches a launch that differs from the step it is part of, and an epilogue from the elementwise kernels."""
    choices = Step(
        choices.operands,
        choices.activation,
        choices.layout,
        epilogue,
        choices.element,
        choices.grad_element,
        contract=choices.contract,
    )
    case = make(counts, gaps[: len(counts)], seed, "normal", inputs_of(choices))
    whole, given_tensors, experts = case.run(choices), case.tensors, case.experts
    offsets, row_counts, prob = (given_tensors[name] for name in ("offsets", "counts", "prob"))
    element = choices.element if choices.operands == "mxfp8" else None
    grad_element = choices.grad_element if choices.operands == "mxfp8" else None
    shared = {"activation": choices.activation, "layout": choices.layout, "contract": choices.contract}
    x = grouped_mlp.copies(given_tensors["x"], experts, choices).rowwise
    grad = grouped_mlp.copies(given_tensors["grad"], experts, choices, gradient=True).rowwise
    weights1 = [w.rowwise for w in grouped_mlp.weight_copies(given_tensors["weights1"], choices)]
    weights2 = [w.colwise for w in grouped_mlp.weight_copies(given_tensors["weights2"], choices)]
    rows = (offsets, row_counts, prob)

    forward = fc1(x, weights1, *rows, element=element, epilogue_input=epilogue, rotated_amax=True, **shared)
    stored = forward["preactivation"]
    backward = fc2_backward(grad, weights2, stored, *rows, element=grad_element, epilogue_input=epilogue, **shared)
    for prefix, launch in (("activation", forward), ("dpreactivation", backward)):
        for name, value in launch.items():
            named = {"out": prefix}.get(name, name if name in whole else f"{prefix}_{name}")
            if named in whole:
                assert same_bits(value, whole[named]), named

    values = grouped_matmul(x, weights1, offsets, row_counts, choices.contract.accumulator)
    assert same_bits(stored, values.bfloat16())
    incoming = grouped_dgrad(grad, weights2, offsets, row_counts, choices.contract.accumulator)
    if epilogue == "bfloat16":
        unfused = elementwise.activation_forward(stored, *rows, element=element, **shared)
        for name, value in unfused.items():
            assert same_bits(forward[name], value), name
        unfused = elementwise.activation_backward(incoming.bfloat16(), stored, *rows, element=grad_element, **shared)
        for name, value in unfused.items():
            assert same_bits(backward[name], value), name
        assert same_bits(backward["dactivation"], incoming.bfloat16().float())
    else:
        assert same_bits(backward["dactivation"], incoming)


@given(**ragged, choices=st.sampled_from(CHOICES))
def test_bias_and_main_grads(counts: list[int], gaps: list[int], seed: int, choices: Step) -> None:
    """Catches a bias after the activation, and a gradient that replaces main_grad."""
    case = make(counts, gaps[: len(counts)], seed, "normal", inputs_of(choices))
    plain = case.run(choices)
    generator = torch.Generator().manual_seed(seed)
    main_grads = [torch.randn(plain[f"dweights{i}"].shape, generator=generator) for i in (1, 2)]
    added = case.run(choices, main_grad1=main_grads[0], main_grad2=main_grads[1])
    for i in (1, 2):
        assert same_bits(added[f"dweights{i}"], main_grads[i - 1] + plain[f"dweights{i}"])
    bias = torch.randn(plain["dbias"].shape, generator=generator)
    biased = case.run(choices, bias=bias)
    x = grouped_mlp.copies(case.tensors["x"], case.experts, choices).rowwise
    weights = [w.rowwise for w in grouped_mlp.weight_copies(case.tensors["weights1"], choices)]
    tensors, accumulator = case.tensors, choices.contract.accumulator
    values = grouped_matmul(x, weights, tensors["offsets"], tensors["counts"], accumulator, bias=bias)
    assert same_bits(biased["preactivation"], values.bfloat16())


@given(st.integers(0, 300), st.integers(0, 3), st.integers(0, 2**32))
def test_dbias_is_summed_in_its_order(count: int, before: int, seed: int) -> None:
    """Catches another tree: the order of float32 additions is part of the result."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count + before + 1, 3, generator=generator) * 2.0 ** torch.randint(
        -9, 9, (count + before + 1, 3), generator=generator
    )
    values[before + count :] = math.nan
    experts = Experts.from_offsets([0, before, before + count], None, before + count + 1)

    def tree(first: int, size: int) -> torch.Tensor:
        if size == 1:
            return values[before + first] if first < count else torch.zeros(3)
        return tree(first, size // 2) + tree(first + size // 2, size // 2)

    total = torch.zeros(3)
    for i, first in enumerate(range(0, count, 128)):
        total = tree(first, 128) if i == 0 else total + tree(first, 128)
    assert same_bits(sum_over_rows(values, experts)[1], total)


def test_bad_choices_are_named() -> None:
    """Catches a choice that is silently another one."""
    with pytest.raises(ValueError, match="operands is 'fp8': expected one of bf16, mxfp8, nvfp4"):
        Step("fp8")
    with pytest.raises(ValueError, match="epilogue_input is 'fp16': expected one of accumulator, bfloat16"):
        Step(epilogue_input="fp16")
    case = make([4], [0], 0, "normal")
    tensors = {**case.tensors, "prob": torch.ones(3)}
    with pytest.raises(ValueError, match=r"prob is torch.float32 \[3\]: expected float32 \[7\]"):
        step(**tensors)
    with pytest.raises(ValueError, match=r"preactivation is torch.bfloat16 \[7, 32\]: expected bfloat16 \[7, 64\]"):
        fc2_backward(case.tensors["grad"], case.tensors["weights2"], case.tensors["x"], case.tensors["offsets"])
