"""The reference gives the same bits on a CPU and on a CUDA device, in every quantiser and codec.

Finds what torch computes differently there: division by a Python number (a product with its reciprocal on
CUDA), flushed subnormals, conversions of NaN, and reductions in another order.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_numerics.reference import amax, hadamard, mxfp8, nvfp4, philox, scale_layout
from moe_numerics.reference.contract import Contract
from moe_numerics.reference.formats import E2M1, E4M3, E5M2, E8M0, FORMATS
from moe_numerics.reference.quantized import Quantized
from moe_numerics.reference.ragged import Experts

from moe_numerics.contract import PROFILES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

EXPERTS = Experts.from_offsets([0, 40, 40, 103, 128], counts=[37, 0, 63, 20], capacity=133)


def wide(seed: int) -> torch.Tensor:
    """Every exponent of float32, both zeros, Inf and NaN."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (133, 64), generator=generator).to(torch.int32).view(torch.float32)
    x = torch.randn(133, 64, generator=generator)
    pick = torch.rand(133, 64, generator=generator)
    return torch.where(pick < 0.02, bits, torch.where(pick < 0.03, x * 1e-40, x))


def finite(seed: int) -> torch.Tensor:
    return wide(seed).nan_to_num(nan=1.0, posinf=2.0, neginf=-3.0).clamp(-1e30, 1e30)


def assert_same(cpu: Quantized, cuda: Quantized) -> None:
    assert torch.equal(cpu.codes, cuda.codes.cpu())
    assert torch.equal(cpu.scales, cuda.scales.cpu())
    assert_same_floats(cpu.dequantize(), cuda.dequantize())


def assert_same_floats(cpu: torch.Tensor, cuda: torch.Tensor) -> None:
    there = cuda.cpu()
    both = cpu.isnan() & there.isnan()
    integers = torch.int64 if cpu.dtype == torch.float64 else torch.int32
    assert bool((both | (cpu.view(integers) == there.view(integers))).all())


@pytest.mark.parametrize("element", FORMATS.values(), ids=str)
@pytest.mark.parametrize("rounding", ["nearest_even", "nearest_away", "toward_zero", "up", "down"])
def test_codecs(element: object, rounding: str) -> None:
    """All bfloat16 inputs, float32 and float64 carriers."""
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x if element.signed else x.abs()  # type: ignore[attr-defined]
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        source = x.to(dtype)
        codes = element.encode(source, rounding)  # type: ignore[attr-defined]
        assert torch.equal(codes, element.encode(source.cuda(), rounding).cpu())  # type: ignore[attr-defined]
    every = torch.arange(element.n_codes, dtype=torch.uint8)  # type: ignore[attr-defined]
    assert_same_floats(element.decode(every), element.decode(every.cuda()))  # type: ignore[attr-defined]


@given(
    st.integers(0, 10**6),
    st.sampled_from([-1, -2]),
    st.sampled_from([E4M3, E5M2, E2M1]),
    st.sampled_from(sorted(PROFILES)),
    st.booleans(),
)
def test_mxfp8(seed: int, axis: int, element: object, name: str, block2d: bool) -> None:
    """Every profile, format, direction and tile shape on ragged experts with specials."""
    contract, x = PROFILES[name].contract, wide(seed)
    cpu, cuda = (
        mxfp8.quantize(t, axis, element, contract, EXPERTS, block2d)  # type: ignore[arg-type]
        for t in (x, x.cuda())
    )
    assert_same(cpu, cuda)


@given(
    st.integers(0, 10**6),
    st.sampled_from([-1, -2]),
    st.sampled_from(sorted(PROFILES)),
    st.sampled_from(["plain", "tile", "line", "mae", "mse", "seed"]),
    st.booleans(),
)
def test_nvfp4(seed: int, axis: int, name: str, mode: str, special: bool) -> None:
    """Every profile and mode in both directions."""
    contract = PROFILES[name].contract
    if mode == "seed":
        contract = contract.replace(stochastic_source="philox")
    x = wide(seed) if special else finite(seed)
    cpu, cuda = (
        nvfp4.quantize(
            t,
            axis,
            contract=contract,
            experts=EXPERTS,
            block2d=mode == "tile",
            row_scaled=mode == "line",
            four_over_six=mode if mode in ("mae", "mse") else None,
            seed=seed if mode == "seed" else None,
        )
        for t in (x, x.cuda())
    )
    assert_same(cpu, cuda)


@given(st.integers(0, 10**6), st.sampled_from([-1, -2]), st.sampled_from(sorted(PROFILES)))
def test_rotation_amax_and_layout(seed: int, axis: int, name: str) -> None:
    """Rotation there and back, amax of both kinds, swizzled scales."""
    contract, x = PROFILES[name].contract, finite(seed)
    cpu, cuda = (hadamard.rotate(t, axis, contract=contract, experts=EXPERTS) for t in (x, x.cuda()))
    assert_same_floats(cpu, cuda)
    back = (hadamard.rotate_back(t, axis, contract=contract, experts=EXPERTS) for t in (cpu, cuda))
    assert_same_floats(*back)
    for function in (amax.per_expert, amax.per_tensor):
        assert_same_floats(function(x, EXPERTS, contract), function(x.cuda(), EXPERTS, contract))
    scales = mxfp8.quantize(x, axis, experts=EXPERTS)
    there = mxfp8.quantize(x.cuda(), axis, experts=EXPERTS)
    assert torch.equal(scale_layout.swizzle_quantized(scales), scale_layout.swizzle_quantized(there).cpu())


def test_philox() -> None:
    """Random bits of logical elements."""
    rows, columns = torch.arange(100).unsqueeze(1), torch.arange(64).unsqueeze(0)
    for width in (8, 16, 32):
        for axis in (-1, -2):
            arguments = (torch.tensor(3), rows, columns)
            cpu = philox.element_bits(2**63 + 5, 7, *arguments, axis, width)
            cuda = philox.element_bits(2**63 + 5, 7, *(a.cuda() for a in arguments), axis, width)
            assert torch.equal(cpu, cuda.cpu())


def test_subnormal_scales_and_specials() -> None:
    """2**-127 as scale and as multiplier, and NaN, are not flushed or lost on the device."""
    codes = torch.arange(256, dtype=torch.uint8)
    for contract in (Contract(), *(each.contract for each in PROFILES.values())):
        assert_same_floats(mxfp8.multipliers(codes, contract), mxfp8.multipliers(codes.cuda(), contract))
    assert E8M0.decode(codes[:1].cuda()).item() == 2.0**-127
    assert math.isnan(E8M0.decode(codes[255:].cuda()).item())
