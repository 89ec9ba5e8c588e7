"""Cases of matrix products: weights, depths and the kinds of values that an accumulation is sensitive to.

Faults this catches: weights that change when an expert, a row or a column goes, a factor whose summed axis is the other
one, kinds that cancel nothing or truncate nothing, a case that cannot shrink its depth, edits that silently vanish.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from kernel_runs import space
from moe_numerics.reference import tensor_core
from moe_numerics.reference.grouped_gemm import grouped_dgrad, grouped_matmul

from moe_numerics.campaign import campaign_cases
from moe_numerics.cases import Case, CaseError, Edit, TensorSpec, Values, gauntlet_case
from moe_numerics.devices import same_bytes
from moe_numerics.paths import find_path
from moe_numerics.product_values import FACTOR_KINDS, MILD_FACTOR_KINDS, PRODUCT_KINDS, PRODUCT_NOT_FINITE
from moe_numerics.shrinking import shrink
from moe_numerics.strategies import cases
from moe_numerics.values import KINDS

FC1 = find_path("grouped_mlp.fc1.swiglu.fwd.mxfp8_e4m3.bias")
DGRAD = find_path("grouped_gemm.dgrad.bf16")
MATMUL = find_path("grouped_gemm.matmul.bf16")
WEIGHTS = TensorSpec("weights", kind="weights", columns=2, width="depth", factor=True)


def _bits(case: Case, spec: TensorSpec) -> np.ndarray:
    return np.asarray(case.bits(spec))


@given(cases(space(FC1)))
def test_a_case_with_weights_replays_exactly(case: Case) -> None:
    again = Case.from_json(json.loads(json.dumps(case.to_json())))
    assert again == case
    tensors, replayed = case.tensors(FC1.inputs), again.tensors(FC1.inputs)
    experts = len(case.counts)
    assert tensors["x"].shape == (case.capacity, case.depth)
    assert tensors["weights"].shape == (experts, 2 * case.hidden, case.depth)
    assert tensors["bias"].shape == (experts, 2 * case.hidden)
    assert tensors["alpha"].shape == (experts,)
    for name, tensor in tensors.items():
        assert same_bytes(tensor, replayed[name]), name


@pytest.mark.parametrize("kind", sorted(PRODUCT_KINDS))
def test_weights_that_stay_keep_their_values(kind: str) -> None:
    values = {"weights": Values(kind, 5)}
    case = Case(FC1.id, (1, 2, 0), 64, depth=96, layout="interleaved:32", values=values)
    smaller = case.replace(counts=(1, 2), hidden=32, depth=64)
    assert np.array_equal(_bits(case, WEIGHTS)[:2, :64, :64], _bits(smaller, WEIGHTS))
    # The same numbers in a matrix that stands the other way round: what is summed stays what is summed.
    turned = TensorSpec("weights", kind="weights", columns=2, width="hidden", factor=True)
    assert np.array_equal(_bits(case, turned), _bits(case, WEIGHTS).transpose(0, 2, 1))


def test_identity_hands_every_element_on() -> None:
    for path, name, product in ((MATMUL, "x", grouped_matmul), (DGRAD, "grad", grouped_dgrad)):
        values = {"weights": Values("identity"), name: Values("gaussian", 3)}
        case = Case(path.id, (5, 9), 64, depth=64, values=values)
        tensors = case.tensors(path.inputs)
        out = product(tensors[name], tensors["weights"], tensors["offsets"])
        # Output column n holds column (n + n // 32) % 32 of the factor.
        columns = [(n + n // 32) % 32 for n in range(64)]
        assert torch.equal(out, tensors[name][:, columns].float())


def _factors(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    case = Case(MATMUL.id, (64,), 64, depth=64, values={name: Values(kind, 8) for name in ("x", "weights")})
    tensors = case.tensors(MATMUL.inputs)
    return tensors["x"], tensors["weights"][0]


def test_spread_values_are_truncated_and_cancelling_ones_leave_little() -> None:
    """An accumulation that keeps every bit, or fewer than it should, differs on these kinds."""
    for kind in ("spread", "cancelling"):
        x, weights = _factors(kind)
        exact = x.double() @ weights.double().t()
        sums = tensor_core.matmul(x, weights.t()).double()
        assert (sums != exact.float().double()).float().mean() > 0.2, kind
    x, weights = _factors("cancelling")
    terms = x.double().abs() @ weights.double().abs().t()
    left = (x.double() @ weights.double().t()).abs() / terms
    alike = torch.arange(64)[:, None] % 2 == torch.arange(64)[None, :] % 2
    assert left[~alike].median() < 0.02
    assert left[alike].median() > 0.05


def test_only_the_kinds_that_say_so_are_not_finite() -> None:
    for kind in PRODUCT_KINDS:
        case = Case(MATMUL.id, (160,), 32, depth=256, values={"x": Values(kind, 4)})
        finite = bool(case.tensors(MATMUL.inputs)["x"].isfinite().all())
        assert finite == (kind not in PRODUCT_NOT_FINITE), kind
    assert set(FACTOR_KINDS) <= {*KINDS, *PRODUCT_KINDS}
    assert not set(MILD_FACTOR_KINDS) & {*PRODUCT_NOT_FINITE, "specials", "random_bits", "subnormal", "log_uniform"}


def test_the_gauntlet_has_specials_and_numbers_in_its_product() -> None:
    case = gauntlet_case(MATMUL.id, inputs=MATMUL.inputs, hidden=160, depth=96)
    tensors = case.tensors(MATMUL.inputs)
    out = grouped_matmul(tensors["x"], tensors["weights"], tensors["offsets"], tensors.get("counts"))
    owned = out[torch.from_numpy(case.valid_rows())]
    assert not owned.isfinite().all()
    assert owned.isfinite().float().mean() > 0.5


def test_a_failing_case_loses_depth_weights_and_tokens() -> None:
    case = max(campaign_cases(DGRAD, "suite", 5, 3), key=lambda each: each.tokens * each.depth)
    least = min(64, case.depth)

    def fails(candidate: Case) -> bool:
        return candidate.depth >= least and candidate.tokens > 0

    small = shrink(case, DGRAD.inputs, fails, depth_multiple=DGRAD.depth_multiple)
    assert (small.depth, small.tokens, small.hidden) == (least, 1, 32)
    assert small.values["weights"] == Values("plain")


def test_edits_of_weights_are_refused() -> None:
    case = Case(MATMUL.id, (4,), 32, depth=32, values={"weights": Values("plain", edits=(Edit(0, 0, 0x7FC0),))})
    with pytest.raises(CaseError, match=r"values.weights has a window or edits, whose rows are tokens"):
        case.tensors(MATMUL.inputs)


def test_too_large_a_product_is_refused() -> None:
    with pytest.raises(CaseError, match=r"weights of 64 experts, hidden = 65536 and depth = 65536 are more than"):
        Case(MATMUL.id, (1,) * 64, 65536, depth=65536)
