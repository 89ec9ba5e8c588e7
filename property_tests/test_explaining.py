"""A code or scale that differs is explained exactly where some values inside their bounds give it, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_runs import kernel_examples, space, thorough
from moe_numerics.reference import elementwise, mxfp8
from moe_numerics.reference.contract import SUITE, Contract
from moe_numerics.reference.formats import E4M3, E5M2, FloatFormat
from moe_numerics.reference.ragged import Experts

import moe_numerics
from moe_numerics.adapters import compiled_swiglu, eager_swiglu, torchao_mxfp8
from moe_numerics.bounds import Arithmetic, Enclosure
from moe_numerics.cases import Case
from moe_numerics.contract import profile
from moe_numerics.drawing import draw_cases
from moe_numerics.explaining import explain_mxfp8, preimages, scale_intervals
from moe_numerics.paths import find_path
from moe_numerics.running import expected_outputs
from moe_numerics.strategies import cases

Outputs = dict[str, torch.Tensor]

QUANTIZE = find_path("quantize.mxfp8_e4m3")


def _float(key: torch.Tensor) -> torch.Tensor:
    """The float32 of a key in the order of float32 values, -0 being -1."""
    return torch.where(key >= 0, key, (-1 - key) - (1 << 31)).to(torch.int32).view(torch.float32)


def _write(values: torch.Tensor, experts: Experts, contract: Contract = SUITE) -> Outputs:
    return elementwise.write_values(values.float(), experts, E4M3, contract)


def _all_explained(values: Enclosure, got: Mapping[str, torch.Tensor], experts: Experts) -> bool:
    verdicts = explain_mxfp8(values, got, E4M3, SUITE, experts)
    return all(bool(verdict.explained.all()) for verdict in verdicts.values())


def _enclosure(value: torch.Tensor, error: torch.Tensor | float) -> Enclosure:
    wide = value.double()
    return Enclosure(wide, torch.zeros_like(wide) + error, torch.ones_like(wide, dtype=torch.bool))


@pytest.mark.parametrize("name", ["suite", "te", "cudnn", "torchao"])
@pytest.mark.parametrize("element", [E4M3, E5M2], ids=str)
def test_intervals_of_codes_end_where_the_rounding_changes(element: FloatFormat, name: str) -> None:
    """An interval with a wrong end: a tie given to the wrong code, or a subnormal multiplier forgotten."""
    contract = profile(name)
    numbers = torch.arange(256)[(torch.arange(256) & 0x7F) <= element.max_code]
    codes = numbers.repeat(5).to(torch.uint8)
    scales = torch.tensor([0, 1, 120, 127, 254]).repeat_interleave(len(numbers)).to(torch.uint8)
    factor = mxfp8.multipliers(scales, contract)
    first, last = preimages(codes, scales, element, contract)
    some = first <= last

    def encode(key: torch.Tensor) -> torch.Tensor:
        value = _float(key)
        staged = value.to(torch.bfloat16).float() if contract.staging == "bfloat16" else value
        return element.encode(staged * factor)

    assert bool((encode(first)[some] == codes[some]).all())
    assert bool((encode(last)[some] == codes[some]).all())
    largest = 0x7F7FFFFF
    below, above = some & (first > -1 - largest), some & (last < largest)
    assert bool((encode((first - 1).clamp(min=-1 - largest))[below] != codes[below]).all())
    assert bool((encode((last + 1).clamp(max=largest))[above] != codes[above]).all())


@pytest.mark.parametrize("name", ["suite", "te", "torchao"])
def test_intervals_of_scales_cover_every_amax_once(name: str) -> None:
    """A gap or an overlap between the amaxes of neighbouring scales."""
    contract = profile(name)
    first, last = scale_intervals(E4M3, contract)
    some = first <= last
    assert int(first[some][0]) == 0
    assert bool((first[some][1:] == last[some][:-1] + 1).all())
    amax = _float(last[some])
    staged = amax.to(torch.bfloat16).float() if contract.staging == "bfloat16" else amax
    codes = mxfp8.scale_codes(staged.view(torch.int32), E4M3, contract)
    assert codes.tolist() == torch.arange(256)[some].tolist()


@kernel_examples()
@given(data=st.data())
def test_without_an_error_only_the_reference_is_explained(data: st.DataObject) -> None:
    """Any single byte changed is explained by nothing; the right bytes always are."""
    case: Case = data.draw(cases(space(QUANTIZE, kinds=("gaussian", "ties_e4m3", "scale_edges"), allow_specials=False)))
    experts = QUANTIZE.experts(case)
    if not any(experts.counts):
        return
    got = expected_outputs(QUANTIZE, case, SUITE)
    x = torch.where(experts.valid_rows().unsqueeze(1), case.tensors(QUANTIZE.inputs)["x"].float(), 0.0)
    values = Enclosure.exact(x)
    right = explain_mxfp8(values, got, E4M3, SUITE, experts)
    name = data.draw(st.sampled_from(["codes_rowwise", "codes_colwise", "scales_rowwise", "scales_colwise"]))
    owned = QUANTIZE.output(name).owned(experts).view(-1, 1).expand_as(got[name])
    assert bool(right[name].explained[owned].all())
    places = owned.nonzero()
    row, column = places[data.draw(st.integers(0, len(places) - 1))].tolist()
    changed = {key: tensor.clone() for key, tensor in got.items()}
    # The sign of a zero is not decided, so the sign bit stays.
    changed[name][row, column] ^= data.draw(st.integers(1, 127))
    verdict = explain_mxfp8(values, changed, E4M3, SUITE, experts)[name]
    assert not bool(verdict.explained[row, column])


@kernel_examples()
@given(data=st.data())
def test_values_inside_their_bounds_are_explained(data: st.DataObject) -> None:
    """A correct kernel that rounds differently held to be wrong."""
    rows, hidden = data.draw(st.integers(1, 70)), 32 * data.draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    center = torch.randn((rows, hidden), generator=generator, dtype=torch.float64)
    center *= 2.0 ** data.draw(st.integers(-130, 100))
    error = center.abs() * 2.0 ** data.draw(st.integers(-23, -3))
    inside = center + error * (torch.rand((rows, hidden), generator=generator, dtype=torch.float64) * 2 - 1) * 0.999
    experts = Experts.single(rows)
    spread = torch.where(inside.abs() < 2.0**-126, 2.0**-149, 0.0)
    assert _all_explained(_enclosure(center, error + spread), _write(inside, experts), experts)


def test_both_copies_need_the_same_values() -> None:
    """Each copy explained on its own, by values that exclude one another."""
    # 17/16 is the tie between the codes of 1 and 1.125 under scale 1; 448 fixes the scale of its row and column.
    values = torch.zeros((32, 32))
    values[0, 0], values[0, 1], values[1, 0] = 1.0625, 448.0, 448.0
    error = torch.zeros_like(values)
    error[0, 0] = 0.01
    experts = Experts.single(32)
    low, high = (values + step * error for step in (-0.5, 0.5))
    below, above = _write(low, experts), _write(high, experts)
    assert below["codes_rowwise"][0, 0] != above["codes_rowwise"][0, 0]
    enclosure = _enclosure(values, error.double())
    mixed = {**below, "codes_colwise": above["codes_colwise"], "scales_colwise": above["scales_colwise"]}
    for got in (below, above):
        assert _all_explained(enclosure, got, experts)
    verdicts = explain_mxfp8(enclosure, mixed, E4M3, SUITE, experts)
    assert not bool(verdicts["codes_colwise"].explained[0, 0])
    assert not bool(verdicts["codes_rowwise"].explained[0, 0])


def test_an_amax_at_the_boundary_of_a_scale() -> None:
    """Either scale is right where the amax may lie on either side, and only with the codes that belong to it."""
    values = torch.ones((1, 32))
    values[0, 0] = 448.0
    error = torch.zeros_like(values, dtype=torch.float64)
    error[0, 0] = 2.0**-12
    experts = Experts.single(1)
    enclosure = _enclosure(values, error)
    more = values.clone()
    more[0, 0] = torch.nextafter(torch.tensor(448.0), torch.tensor(float("inf")))
    both = [_write(x, experts) for x in (values, more)]
    assert both[0]["scales_rowwise"][0, 0] + 1 == both[1]["scales_rowwise"][0, 0]
    for got in both:
        assert _all_explained(enclosure, {k: v for k, v in got.items() if k.endswith("rowwise")}, experts)
    mixed = {"codes_rowwise": both[0]["codes_rowwise"], "scales_rowwise": both[1]["scales_rowwise"]}
    verdicts = explain_mxfp8(enclosure, mixed, E4M3, SUITE, experts)
    assert not bool(verdicts["scales_rowwise"].explained.any())


@pytest.mark.parametrize(("rule", "amax"), [("ceil", 448.0), ("floor", 500.0)])
def test_another_scale_with_the_codes_that_belong_to_it(rule: str, amax: float) -> None:
    """A scale too large, whose codes are all right, or too small, whose codes saturate."""
    values = torch.ones((2, 32))
    values[0, 3] = amax
    experts = Experts.single(2)
    enclosure = _enclosure(values, 2.0**-20)
    assert _all_explained(enclosure, _write(values, experts), experts)
    got = {k: v for k, v in _write(values, experts, SUITE.replace(scale_rule=rule)).items() if k.endswith("rowwise")}
    verdicts = explain_mxfp8(enclosure, got, E4M3, SUITE, experts)
    assert not bool(verdicts["scales_rowwise"].explained[0, 0])
    assert bool(verdicts["codes_rowwise"].explained[0, 3]) == (rule == "ceil")


def test_the_amax_belongs_to_the_values_of_the_codes() -> None:
    """An amax that no value reaches, though each code is right."""
    values = torch.ones((4, 32))
    experts = Experts.single(4)
    enclosure = _enclosure(values, 2.0**-20)
    got = _write(values, experts)
    assert _all_explained(enclosure, got, experts)
    for amax in (1.0 + 2.0**-19, 1.0 - 2.0**-19):
        changed = {**got, "amax": torch.tensor([amax])}
        assert not bool(explain_mxfp8(enclosure, changed, E4M3, SUITE, experts)["amax"].explained.any())


def test_special_blocks() -> None:
    """Zeros, saturated values and NaN: decided, and explained only as the reference writes them."""
    values = torch.zeros((3, 32))
    values[1, 3], values[2, 5] = 3.0e38, float("nan")
    experts = Experts.single(3)
    got = {k: v for k, v in _write(values, experts).items() if k.endswith("rowwise")}
    verdicts = explain_mxfp8(_enclosure(values, 0.0), got, E4M3, SUITE, experts)
    assert verdicts["codes_rowwise"].explained[:2].all()
    assert verdicts["scales_rowwise"].explained[:2].all()
    assert not verdicts["codes_rowwise"].explained[2].any()
    assert bool(verdicts["codes_rowwise"].decided.all())
    undecided = Enclosure(values.double(), torch.zeros(3, 32, dtype=torch.float64), values < 1e38)
    assert not bool(explain_mxfp8(undecided, got, E4M3, SUITE, experts)["codes_rowwise"].decided[1].any())


@cache
def _cases() -> tuple[Case, ...]:
    return tuple(
        draw_cases(
            3,
            11,
            space(
                find_path("swiglu.fwd.bf16"), paddings=(False,), probs=(False,), max_elements=2_000, big_elements=4_000
            ),
        )
    )


def _fused(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def _judged(function: Callable[[torch.Tensor], torch.Tensor], arithmetic: Arithmetic) -> bool:
    @moe_numerics.kernel("swiglu.fwd.bf16", inputs={"gate_up": "x", "offsets": "offsets"}, outputs={"out": 0})
    def swiglu(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return function(x).to(torch.bfloat16)

    return bool(moe_numerics.check(swiglu, cases=_cases(), arithmetic=arithmetic).passed)


def test_kernels_of_others_are_explained_and_wrong_ones_are_not() -> None:
    """A fault inside a bound that is too wide; a correct kernel outside one that is too narrow."""
    library = Arithmetic("library")
    assert _judged(_fused, library)
    assert not _judged(lambda x: _fused(torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1)), library)
    assert not _judged(lambda x: _fused(x) * 1.045, library)
    assert not _judged(lambda x: _fused(x) * 2, library)
    assert not _judged(lambda x: _fused(x).to(torch.bfloat16).float() * (1 + 2.0**-7), library)


def test_the_intermediate_type_is_part_of_the_arithmetic() -> None:
    """Eager PyTorch rounds silu(gate) to bfloat16: explained where that is stated, and not where it is denied."""
    with_rounding = moe_numerics.check(eager_swiglu, cases=_cases(), arithmetic=Arithmetic("library", "bfloat16"))
    assert with_rounding.passed
    assert sum(finding.explained for finding in with_rounding) > 0
    assert not moe_numerics.check(eager_swiglu, cases=_cases(), arithmetic=Arithmetic("library")).passed


def _mxfp8_kernel(change: Callable[[Outputs], None]) -> Callable[..., Outputs]:
    names = ("codes_rowwise", "scales_rowwise", "codes_colwise", "scales_colwise", "amax")

    @moe_numerics.kernel(
        "swiglu.fwd.mxfp8_e4m3", {"gate_up": "x", "offsets": "offsets"}, {name: name for name in names}
    )
    def quantized(x: torch.Tensor, offsets: torch.Tensor) -> Outputs:
        experts = Experts.from_offsets(offsets, None, x.shape[0], 1)
        got = _write(_fused(x), experts)
        change(got)
        return got

    return quantized


def test_quantised_kernels_of_others() -> None:
    """MXFP8 of library arithmetic: explained; a wrong exponent, or codes of the other copy, not."""
    drawn = [case.replace(path="swiglu.fwd.mxfp8_e4m3") for case in _cases()]
    library = Arithmetic("library")

    def judged(change: Callable[[Outputs], None]) -> bool:
        return bool(moe_numerics.check(_mxfp8_kernel(change), cases=drawn, arithmetic=library).passed)

    assert judged(lambda got: None)
    assert not judged(lambda got: got.update(scales_rowwise=got["scales_rowwise"] + 1))
    assert not judged(lambda got: got.update(codes_colwise=got["codes_rowwise"]))
    assert not judged(lambda got: got.update(amax=got["amax"] * 1.001))


def test_torchao_follows_its_profile() -> None:
    """The adapter of torchao's `to_mx`, bit by bit under the profile that describes it, and not under another."""
    pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    finite = space(
        QUANTIZE, "torchao", kinds=("gaussian",), allow_specials=False, paddings=(False,), max_elements=2_000
    )
    drawn = draw_cases(3, 2, finite)
    assert moe_numerics.check(torchao_mxfp8(), cases=drawn).passed
    assert not moe_numerics.check(torchao_mxfp8("RCEIL"), cases=drawn).passed
    rceil = profile("torchao").replace(scale_rule="rceil", mx_inf="saturate")
    assert moe_numerics.check(torchao_mxfp8("RCEIL"), cases=drawn, contract=rceil).passed


@pytest.mark.skipif(not thorough(), reason="needs a C++ compiler and half a minute")
def test_compiled_kernels_keep_intermediate_values_in_float32() -> None:
    """`torch.compile` of SwiGLU: explained under float32 intermediate values."""
    assert moe_numerics.check(compiled_swiglu(), cases=_cases(), arithmetic=Arithmetic("library")).passed
