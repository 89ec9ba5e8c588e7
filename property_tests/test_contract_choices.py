"""Every choice of a contract that changes what a quantiser writes changes it in the fused kernels as in the reference.

Faults this catches: a choice that a kernel reads and ignores, one that only the default of which was ever compiled, a
vector of signs that is written into the kernel.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_runs import ActiveDevice, failure, kernel_examples, one_device, space
from moe_numerics.reference.contract import CHOICES, SUITE, Contract

from moe_numerics.cases import Case, Edit, Values
from moe_numerics.devices import same_bytes
from moe_numerics.paths import Path, all_paths, find_path
from moe_numerics.running import run_case
from moe_numerics.strategies import cases

NVFP4, ROTATED, STOCHASTIC = "quantize.nvfp4.rowwise", "quantize.nvfp4.rht_colwise", "quantize.nvfp4.sr"
MXFP8, E5M2, ACTIVATED = "quantize.mxfp8_e4m3.rowwise", "quantize.mxfp8_e5m2.rowwise", "swiglu.fwd.mxfp8_e4m3"

PATHS = {
    "staging": (ACTIVATED, ROTATED),
    "scale_rule": (MXFP8, E5M2),
    "mx_scale": (MXFP8,),
    "mx_inf": (MXFP8,),
    "mx_multiplier": (MXFP8,),
    "e5m2_target": (E5M2,),
    "nvfp4_encode_scale": (NVFP4,),
    "nvfp4_block_scale": (NVFP4,),
    "nvfp4_multiplier": (NVFP4,),
    "nvfp4_scale_floor": (NVFP4,),
    "nan_policy": (MXFP8, NVFP4, "swiglu.fwd.bf16"),
    "rht_rounding": (ROTATED,),
    "rht_normalise": (ROTATED,),
    "stochastic_bits": (STOCHASTIC,),
    "padding": (MXFP8, NVFP4),
}
"""Paths on which a choice matters, or, for padding, must not: a block that padding completes is one of zeros."""

ELSEWHERE = {
    "amax_scope": "it changes shapes, so a profile or a path chooses it: `quantize.nvfp4.per_expert`",
    "maths": "fast maths has paths of its own, which are bounded",
    "compute": "there is one",
    "signed_zero": "the kernels keep signs, and refuse the other choice",
    "stochastic_source": "the kernels make their own bits, and refuse the other choice",
}
VALUES = [
    (name, value, path)
    for name, paths in PATHS.items()
    for value in CHOICES[name]
    if value != getattr(SUITE, name)
    for path in paths
]


def chosen(name: str, value: object) -> Contract:
    """The suite's contract with one choice changed, and what it needs beside it."""
    others = {"scale_rule": "floor"} if name == "mx_inf" else {}
    return SUITE.replace(**others, **{name: value})


def fixed_cases(path_id: str) -> list[Case]:
    """Ties and edges; normal values; specials in a few elements; a tiny amax: small, in three experts."""
    path = find_path(path_id)
    name = next(spec.name for spec in path.inputs if spec.kind == "values")
    base = Case(path_id, (17, 0, 40), 64, padded=True, room=5, seed=3, padding_fill="nan")
    edits = (Edit(3, 5, 0x7FC0), Edit(30, 40, 0x7F80))
    kinds = [
        Values("nvfp4_near_ties" if "nvfp4" in path_id else "scale_edges", 2),
        Values("gaussian", 3),
        Values("gaussian", 2, edits=edits),
        Values("subnormal", 2, -6),
    ]
    return [base.replace(values={name: item}) for item in kinds]


def test_every_choice_is_tried_or_has_its_place() -> None:
    """Catches a new choice that no kernel test knows of."""
    assert set(PATHS) | set(ELSEWHERE) == set(CHOICES)
    assert not set(PATHS) & set(ELSEWHERE)


@pytest.mark.parametrize("device", one_device(), indirect=True)
@pytest.mark.parametrize(("name", "value", "path_id"), VALUES)
def test_kernels_follow_every_choice(name: str, value: object, path_id: str, device: ActiveDevice) -> None:
    path, contract = find_path(path_id), chosen(name, value)
    differs = False
    for case in fixed_cases(path_id):
        if contract.padding == "zeroed_by_caller":
            case = case.replace(padding_fill="zero")
        result = run_case(path, case, contract, device)
        assert result.passed, failure(result)
        tensors = case.tensors(path.inputs)
        base = path.operation.reference(case, tensors, chosen(name, getattr(SUITE, name)))
        other = path.operation.reference(case, tensors, contract)
        differs = differs or not all(same_bytes(base[key], other[key]) for key in base)
    # The suite's scale on exact bits and its float32 product differ for one float32 amax, and for no bfloat16.
    assert differs == (name not in ("padding", "mx_scale"))


@pytest.mark.parametrize("device", one_device(), indirect=True)
@kernel_examples()
@given(data=st.data())
def test_kernels_rotate_with_any_signs(device: ActiveDevice, data: st.DataObject) -> None:
    """None, and drawn vectors: the signs are no constant of the kernel."""
    path = find_path(ROTATED)
    signs = data.draw(st.none() | st.tuples(*[st.sampled_from((1, -1))] * 16))
    rounding = data.draw(st.sampled_from(CHOICES["rht_rounding"]))
    case = data.draw(cases(space(path, max_elements=1000, big_elements=1000)))
    result = run_case(path, case, SUITE.replace(rht_signs=signs, rht_rounding=rounding), device)
    assert result.passed, failure(result)


def _consistent(choices: dict[str, object]) -> Contract:
    """A contract of drawn choices: round-up has no rule of its own for Inf."""
    inf = "saturate" if choices["scale_rule"] == "rceil" else choices["mx_inf"]
    return SUITE.replace(**{**choices, "mx_inf": inf})


TOGETHER = st.fixed_dictionaries(
    {name: st.sampled_from(CHOICES[name]) for name in PATHS if name != "padding"}
    | {"rht_signs": st.none() | st.tuples(*[st.sampled_from((1, -1))] * 16), "scale_padding": st.integers(0, 255)}
).map(_consistent)
QUANTISERS = [path for path in all_paths() if path.id.startswith("quantize.") and "per_expert" not in path.id]


@pytest.mark.parametrize("device", one_device(), indirect=True)
@kernel_examples()
@given(path=st.sampled_from(QUANTISERS), contract=TOGETHER, data=st.data())
def test_kernels_follow_choices_together(
    path: Path, contract: Contract, device: ActiveDevice, data: st.DataObject
) -> None:
    """Any choices with any quantiser: one may matter only beside another, as staging does where nothing else rounds."""
    case = data.draw(cases(space(path, max_elements=1000, big_elements=1000)))
    result = run_case(path, case, contract, device)
    assert result.passed, failure(result)
