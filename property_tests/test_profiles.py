"""Contracts and profiles: every choice is checked, named, and changes a bit somewhere; sources travel with
profiles.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from moe_numerics.reference import amax, hadamard, mxfp8, nvfp4
from moe_numerics.reference.contract import CHOICES, DEFAULT_SIGNS, SUITE, Contract
from moe_numerics.reference.formats import E4M3, E5M2, FloatFormat
from moe_numerics.reference.ragged import Experts

from moe_numerics.contract import ALIASES, PROFILES, profile


def test_profiles_have_names_sources_and_valid_contracts() -> None:
    """Every profile can be found by its full name, has a source, and aliases point at existing profiles."""
    for name, each in PROFILES.items():
        assert each.name == name
        assert each.summary
        assert each.sources
        assert profile(name) is each.contract
    for alias, name in ALIASES.items():
        assert profile(alias) is PROFILES[name].contract
    assert profile("te") is profile("te@2.20")
    assert profile("suite") == Contract() == SUITE
    assert len({each.contract for each in PROFILES.values()}) == len(PROFILES)


def test_an_unknown_profile_lists_the_known_ones() -> None:
    """A mistyped name must not fall back to a default."""
    with pytest.raises(ValueError, match="profile 'te@9' is unknown: expected one of te, cudnn, suite"):
        profile("te@9")


@pytest.mark.parametrize("name", CHOICES)
def test_an_unknown_value_is_refused_with_its_choice(name: str) -> None:
    """Each choice names itself and what it may be; finds a value that is silently read as another."""
    with pytest.raises(ValueError, match=f"{name} = 'other' is unknown: expected one of"):
        Contract(**{name: "other"})


def test_other_bad_choices_are_refused() -> None:
    """Signs, padding byte, model name, contradictions, unknown names."""
    for call, message in (
        (lambda: Contract(rht_signs=(1,) * 15), "the sign vector has 15 entries"),
        (lambda: Contract(rht_signs=(2,) * 16), r"signs\[0\] = 2"),
        (lambda: Contract(scale_padding=256), "scale_padding = 256 is not a byte"),
        (lambda: Contract(accumulator="hopper"), "accumulator = 'hopper' is not a model name"),
        (lambda: Contract(mx_inf="rule"), "round-up always gives 0xFE"),
        (lambda: SUITE.replace(rounding="rne"), "'rounding' is not a choice of a contract"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("name", PROFILES)
def test_contracts_go_through_json_values(name: str) -> None:
    """to_dict and from_dict are inverse for every profile, through plain JSON types."""
    contract = PROFILES[name].contract
    choices = contract.to_dict()
    assert all(isinstance(value, str | int | float | list | None) for value in choices.values())
    assert Contract.from_dict(choices) == contract
    assert set(choices) == {field.name for field in dataclasses.fields(Contract)}


def test_differences_name_what_differs() -> None:
    """A changed choice appears with both values and nothing else does."""
    other = SUITE.replace(scale_rule="floor", nan_policy="ignore")
    assert SUITE.differences(other) == {
        "scale_rule": ("rceil", "floor"),
        "nan_policy": ("propagate", "ignore"),
    }
    assert SUITE.differences(SUITE) == {}


def test_default_signs_are_those_published() -> None:
    """+++-+------+-+-- as printed, mask 0xD7E8 as in the kernels."""
    assert "".join("+" if sign > 0 else "-" for sign in DEFAULT_SIGNS) == "+++-+------+-+--"
    assert sum(1 << bit for bit, sign in enumerate(DEFAULT_SIGNS) if sign < 0) == 0xD7E8


def outputs(contract: Contract) -> dict[str, list[int]]:
    """Bytes of the reference on one input chosen so that every choice that acts on it shows."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(48, 64, generator=generator) * torch.exp2(torch.randint(-3, 4, (48, 64), generator=generator))
    special = torch.zeros(4, 32)
    special[0, :2] = torch.tensor([math.nan, 1.0])
    special[1, :2] = torch.tensor([math.inf, -0.0])
    special[2, :2] = torch.tensor([448.0, 450.0]) * 2.0**-127
    special[3, 0] = torch.nextafter(torch.tensor(448.0 * 2.0**-127), torch.tensor(1.0))
    experts = Experts.from_offsets([0, 20, 40], capacity=48)
    found: dict[str, torch.Tensor] = {}

    def add(name: str, quantized: object) -> None:
        for part in ("codes", "scales"):
            found[f"{name}.{part}"] = getattr(quantized, part)

    formats: tuple[FloatFormat, ...] = (E4M3, E5M2)
    for element in formats:
        add(f"mxfp8.{element}", mxfp8.quantize(x, -1, element, contract, experts))
        add(f"mxfp8.special.{element}", mxfp8.quantize(special, -1, element, contract))
    add("nvfp4", nvfp4.quantize(x, -1, contract=contract, experts=experts))
    # An amax for each row: the order of the scale arithmetic shows in about one block of a thousand.
    wide = torch.randn(4096, 64, generator=generator).to(torch.bfloat16)
    add("nvfp4.wide", nvfp4.quantize(wide, -1, contract=contract, row_scaled=True))
    zero = torch.zeros(1, 32)
    zero[0, 16] = 1.0
    add("nvfp4.zero", nvfp4.quantize(zero, -1, contract=contract))
    bits = torch.full(x.shape, 0xC0)
    add("nvfp4.bits", nvfp4.quantize(x, -1, None, contract, bits, experts))
    if contract.stochastic_source == "philox":
        add("nvfp4.seed", nvfp4.quantize(x, -1, contract=contract, experts=experts, seed=1))
    found["rotated"] = hadamard.rotate(x, -1, contract=contract).view(torch.int32)
    found["amax"] = amax.per_expert(special, contract=contract).view(torch.int32)
    return {name: tensor.flatten().tolist() for name, tensor in found.items()}


QUANTISER_CHOICES = {
    name: allowed for name, allowed in CHOICES.items() if name not in ("maths", "compute", "padding", "mx_inf")
}


@pytest.mark.parametrize("name", QUANTISER_CHOICES)
def test_every_choice_of_a_quantiser_changes_a_bit(name: str) -> None:
    """A field that nothing reads would make two contracts look different and compute the same."""
    base = outputs(SUITE)
    for value in QUANTISER_CHOICES[name]:
        if value != getattr(SUITE, name):
            assert outputs(SUITE.replace(**{name: value})) != base, f"{name} = {value!r} changes nothing"


def test_the_rule_for_inf_changes_a_bit() -> None:
    """mx_inf acts under floor, where Inf has an exponent of its own."""
    floor = SUITE.replace(scale_rule="floor")
    assert outputs(floor) != outputs(floor.replace(mx_inf="rule"))


def test_profiles_differ_on_an_input() -> None:
    """No two profiles give the same bytes everywhere; what differs in the table differs in the numbers."""
    found = {name: str(sorted(outputs(each.contract).items())) for name, each in PROFILES.items()}
    assert len(set(found.values())) == len(found)
