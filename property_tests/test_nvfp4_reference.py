"""NVFP4 quantisation: the pinned order of the scale arithmetic, both layouts, tiles, rows, four over six,
stochastic.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_numerics.reference import nvfp4, philox
from moe_numerics.reference.contract import Contract
from moe_numerics.reference.formats import E2M1, E4M3, pack_e2m1, unpack_e2m1
from moe_numerics.reference.quantized import Quantized
from moe_numerics.reference.ragged import Experts
from significance import assert_mean

F32 = np.float32
PER_EXPERT = Contract(amax_scope="expert")


def block_by_hand(block: list[float], amax: float) -> tuple[list[int], int, F32]:
    """One block in NumPy float32 scalars, operation by operation as the module's docstring has them."""
    with np.errstate(all="ignore"):
        g = min(F32(2688) / F32(amax), np.finfo(F32).max) if amax else F32(1)
        g = g if g else F32(1)
        inverse = F32(1) / g
        b = F32(max(abs(value) for value in block))
        value = min(b * (g * F32(1 / 6)), np.finfo(F32).max)
        scale = int(E4M3.encode(torch.tensor([value]))[0])
        product = F32(E4M3.value(scale)) * inverse
        factor = min(F32(1) / product, np.finfo(F32).max)
        codes = E2M1.encode(torch.tensor([F32(x) * factor for x in block], dtype=torch.float32))
    return codes.tolist(), scale, factor


@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=16, max_size=16),
    st.floats(min_value=0, max_value=2.0**100, width=32),
)
def test_a_block_equals_the_written_order_of_operations(block: list[float], amax: float) -> None:
    """Scale and codes of any block under any amax; finds S / s for 1 / (s * (1 / S)) and b / 6 for b *
    (1/6).
    """
    codes, scale, factor = block_by_hand(block, amax)
    got = nvfp4.quantize(torch.tensor([block]), -1, torch.tensor(amax))
    assert nvfp4.multipliers(got.scales, nvfp4.global_scale(torch.tensor(amax))).item() == factor
    assert got.scales.tolist() == [[scale]]
    assert unpack_e2m1(got.codes).tolist() == [codes]


def test_every_named_order_is_its_formula() -> None:
    """200,000 pairs of bfloat16 amaxes through each named order, in NumPy float32; each order differs from
    the others.
    """
    generator = torch.Generator().manual_seed(0)
    largest = (torch.rand(200_000, generator=generator) + 0.5).to(torch.bfloat16).to(torch.float32)
    block = (largest * torch.rand(200_000, generator=generator)).to(torch.bfloat16).to(torch.float32)
    a, b = largest.numpy(), block.numpy()
    g = F32(2688) / a
    formulas = {
        "amax_times_scaled_sixth": b * (g * F32(1 / 6)),
        "sixth_times_scale": (b * F32(1 / 6)) * g,
        "divided_amax_times_scale": (b / F32(6)) * g,
        "divided_amax_over_decode_scale": (b / F32(6)) / (a / F32(2688)),
    }
    seen = []
    for name, value in formulas.items():
        divided = name == "divided_amax_over_decode_scale"
        contract = Contract(
            nvfp4_block_scale=name,
            nvfp4_encode_scale="reciprocal_of_divided_amax" if divided else "divide_2688",
        )
        codes = nvfp4.block_scale_codes(block, nvfp4.global_scale(largest, contract), contract)
        assert torch.equal(codes, E4M3.encode(torch.from_numpy(value)))
        assert all(not torch.equal(codes, other) for other in seen)
        seen.append(codes)
    scale = nvfp4.global_scale(largest)
    codes = nvfp4.block_scale_codes(block, scale)
    s = E4M3.decode(codes).numpy()
    with np.errstate(divide="ignore"):
        product, quotient = F32(1) / (s * (F32(1) / g)), g / s
    for name, value in (("reciprocal_of_product", product), ("encode_scale_over_block_scale", quotient)):
        got = nvfp4.multipliers(codes, scale, Contract(nvfp4_multiplier=name))
        assert torch.equal(got, torch.from_numpy(np.minimum(value, np.finfo(F32).max)))
    assert not np.array_equal(product, quotient)


@st.composite
def ragged_inputs(draw: st.DrawFn) -> tuple[torch.Tensor, Experts]:
    """A small buffer of bfloat16-representable values, and experts with gaps, empties, tails and shifts."""
    sizes = draw(st.lists(st.sampled_from([0, 1, 15, 16, 17, 32]), min_size=1, max_size=4))
    alignment = draw(st.sampled_from([1, 16, 32]))
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // alignment) * alignment)
    experts = Experts.from_offsets(offsets, sizes, offsets[-1] + draw(st.integers(0, 4)), alignment)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(experts.capacity, 32, generator=generator).to(torch.bfloat16)
    spread = draw(st.sampled_from([0, 3, 40]))
    powers = torch.randint(-spread, spread + 1, (experts.capacity, 2), generator=generator)
    return x * torch.exp2(powers).repeat_interleave(16, 1).to(torch.bfloat16), experts


def value_of(result: Quantized) -> torch.Tensor:
    return result.dequantize().view(torch.int32)


@given(ragged_inputs(), st.sampled_from(["tensor", "expert"]))
def test_rowwise_layout_and_amax_scopes(inputs: tuple[torch.Tensor, Experts], scope: str) -> None:
    """Each row's blocks by hand with the amax of the tensor or of the row's expert (B25); padding is code
    0.
    """
    x, experts = inputs
    got = nvfp4.quantize(x, -1, contract=Contract(amax_scope=scope), experts=experts)
    valid = experts.valid_rows()
    whole = float(x[valid].abs().max()) if bool(valid.any()) else 0.0
    codes = unpack_e2m1(got.codes)
    for row in range(experts.capacity):
        e = int(experts.row_expert()[row])
        if e < 0:
            assert not codes[row].any()
            assert not got.scales[row].any()
            continue
        start, count = experts.starts[e], experts.counts[e]
        amax = float(x[start : start + count].abs().max()) if scope == "expert" else whole
        for block in range(2):
            columns = slice(block * 16, block * 16 + 16)
            by_hand, scale, _ = block_by_hand(x[row, columns].to(torch.float32).tolist(), amax)
            assert codes[row, columns].tolist() == by_hand
            assert got.scales[row, block] == scale


@given(ragged_inputs(), st.sampled_from(["tensor", "expert"]), st.booleans(), st.sampled_from([None, "mae", "mse"]))
def test_colwise_is_rowwise_of_each_experts_transpose(
    inputs: tuple[torch.Tensor, Experts], scope: str, block2d: bool, four_over_six: str | None
) -> None:
    """Transposed codes and scales of an expert equal those of its transposed, zero-filled rows alone (B38,
    B42).
    """
    x, experts = inputs
    contract = Contract(amax_scope=scope)
    got = nvfp4.quantize(x, -2, None, contract, None, experts, block2d=block2d, four_over_six=four_over_six)
    slots = experts.blocks(16)
    codes = unpack_e2m1(got.codes)
    assert codes.shape == (32, slots.capacity)
    for e, (start, count) in enumerate(zip(experts.starts, experts.counts, strict=True)):
        if not count:
            continue
        filled = torch.zeros(slots.counts[e], 32)
        filled[:count] = x[start : start + count]
        amax = got.global_amax if scope == "tensor" else got.global_amax[e]
        alone = nvfp4.quantize(filled.t().contiguous(), -1, amax, block2d=block2d, four_over_six=four_over_six)
        there = slice(slots.starts[e], slots.starts[e] + slots.counts[e])
        mine = unpack_e2m1(alone.codes)
        mine[:, count:] = 0
        assert torch.equal(codes[:, there], mine)
        first = slots.starts[e] // 16
        assert torch.equal(got.scales[:, first : first + slots.counts[e] // 16], alone.scales)
    assert not codes[:, ~slots.valid_rows()].any()


@given(ragged_inputs(), st.sampled_from([-1, -2]), st.booleans(), st.booleans(), st.sampled_from([None, 5]))
def test_padding_rows_are_never_read(
    inputs: tuple[torch.Tensor, Experts], axis: int, rows: bool, block2d: bool, seed: int | None
) -> None:
    """NaN and Inf in padding change no byte, in every mode (B47, B49)."""
    x, experts = inputs
    results = []
    for fill in (0.0, math.nan, math.inf):
        y = torch.where(experts.valid_rows().unsqueeze(1), x, fill)
        results.append(
            nvfp4.quantize(y, axis, experts=experts, row_scaled=rows and not block2d, block2d=block2d, seed=seed)
        )
    for other in results[1:]:
        assert torch.equal(results[0].codes, other.codes)
        assert torch.equal(results[0].scales, other.scales)
        assert torch.equal(results[0].global_amax, other.global_amax)


@given(ragged_inputs(), st.sampled_from([-1, -2]), st.sampled_from([None, 5]))
def test_experts_do_not_see_each_other(inputs: tuple[torch.Tensor, Experts], axis: int, seed: int | None) -> None:
    """With an amax for each expert, changing one expert changes no byte of another (B25), random bits
    included.
    """
    x, experts = inputs
    before = nvfp4.quantize(x, axis, None, PER_EXPERT, None, experts, seed=seed)
    for e, (start, count) in enumerate(zip(experts.starts, experts.counts, strict=True)):
        y = x.clone()
        y[start : start + count] *= 3.0
        after = nvfp4.quantize(y, axis, None, PER_EXPERT, None, experts, seed=seed)
        others = experts.row_expert() != e
        assert torch.equal(value_of(before)[others], value_of(after)[others])


@given(ragged_inputs())
def test_tiles_share_one_scale_in_both_directions(inputs: tuple[torch.Tensor, Experts]) -> None:
    """16x16 blocks: one scale for 16 lines, and both layouts stand for the same values."""
    x, experts = inputs
    row = nvfp4.quantize(x, -1, experts=experts, block2d=True)
    column = nvfp4.quantize(x, -2, experts=experts, block2d=True)
    assert torch.equal(value_of(row), value_of(column))
    lines = column.scales.reshape(2, 16, -1)
    assert torch.equal(lines, lines[:, :1].expand_as(lines))


@given(ragged_inputs(), st.sampled_from([-1, -2]))
def test_line_scaling_is_quantising_each_line_alone(inputs: tuple[torch.Tensor, Experts], axis: int) -> None:
    """row_scaled: every row (or column) has the bytes it has as a tensor of its own."""
    x, experts = inputs
    got = nvfp4.quantize(x, axis, experts=experts, row_scaled=True)
    zeroed = torch.where(experts.valid_rows().unsqueeze(1), x, 0.0)
    for line in range(x.shape[0] if axis == -1 else 4):
        if axis == -1 and not experts.valid_rows()[line]:
            continue
        one = zeroed[line : line + 1] if axis == -1 else zeroed[:, line : line + 1]
        alone = nvfp4.quantize(one, axis, experts=None if axis == -1 else experts)
        assert torch.equal(got.codes[line], alone.codes[0])
        assert torch.equal(got.scales[line], alone.scales[0])
        assert got.global_amax[line] == alone.global_amax


def test_specials() -> None:
    """NaN, Inf, zeros and tiny amaxes by the documented rules (B10, B11, B12, B43)."""
    x = torch.zeros(1, 32)
    x[0, 1], x[0, 17] = -0.0, 1.0
    zero_block = nvfp4.quantize(x, -1)
    assert zero_block.scales.tolist() == [[0, 0x7E]]
    assert unpack_e2m1(zero_block.codes)[0, :2].tolist() == [0, 8]
    nothing = nvfp4.quantize(torch.zeros(1, 16), -1)
    assert nothing.scales.tolist() == [[0]]
    assert nvfp4.global_scale(torch.zeros(())).encode == 1.0
    assert not nothing.dequantize().any()

    nan = x.clone()
    nan[0, 0] = math.nan
    all_of_it = nvfp4.quantize(nan, -1)
    assert all_of_it.scales.tolist() == [[0x7F, 0x7F]]
    assert all_of_it.global_amax.isnan()
    given_amax = nvfp4.quantize(nan, -1, torch.tensor(1.0))
    assert given_amax.scales.tolist() == [[0x7F, 0x7E]]
    assert unpack_e2m1(given_amax.codes)[0, :16].tolist() == [7] * 16
    ignoring = nvfp4.quantize(nan, -1, contract=Contract(nan_policy="ignore"))
    assert ignoring.scales.tolist() == [[0, 0x7E]]
    assert unpack_e2m1(ignoring.codes)[0, :2].tolist() == [7, 8]

    inf = torch.ones(1, 16)
    inf[0, 0] = -math.inf
    infinite = nvfp4.quantize(inf, -1)
    assert nvfp4.global_scale(torch.tensor(math.inf)).encode == 1.0
    assert infinite.scales.tolist() == [[0x7E]]
    assert unpack_e2m1(infinite.codes)[0, 0] == 15

    # amax below 2688 / FLT_MAX: the encode scale is held at FLT_MAX.
    for amax, byte in ((7.8e-36, 0x7E), (1e-36, 0x66), (1e-40, 0x03)):
        assert nvfp4.quantize(torch.full((1, 16), amax), -1).scales.tolist() == [[byte]]


def test_scale_that_underflows_dequantises_to_zero() -> None:
    """A block far below the tensor's amax gets scale 0 and codes of x * FLT_MAX; it stands for 0 all the
    same.
    """
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16], x[0, 17] = 1.0, 1e-6, -1e-6
    got = nvfp4.quantize(x, -1)
    assert got.scales.tolist() == [[0x7E, 0]]
    assert unpack_e2m1(got.codes)[0, 16:19].tolist() == [7, 15, 0]
    assert got.dequantize()[0, 16:].abs().max() == 0


def four_over_six_by_hand(
    block: list[float], amax: float, error: str, largest: float
) -> tuple[list[int], int, F32, F32]:
    with np.errstate(all="ignore"):
        g = min(F32(6 * largest) / F32(amax), np.finfo(F32).max)
        inverse = F32(1) / g
        base = F32(max(abs(value) for value in block)) / F32(6) * g
        results = []
        for factor in (F32(1), F32(1.5)):
            scale = int(E4M3.encode(torch.tensor([base * factor]))[0])
            multiplier = min(F32(1) / (F32(E4M3.value(scale)) * inverse), np.finfo(F32).max)
            codes = E2M1.encode(torch.tensor([F32(x) * multiplier for x in block], dtype=torch.float32)).tolist()
            total = F32(0)
            for code, x in zip(codes, block, strict=True):
                back = F32(E2M1.value(code)) * F32(E4M3.value(scale)) * F32(amax) / F32(6 * largest)
                difference = back - F32(x)
                total = total + (abs(difference) if error == "mae" else difference * difference)
            results.append((total, codes, scale))
    (error6, codes6, scale6), (error4, codes4, scale4) = results
    return (codes4, scale4, error6, error4) if error4 < error6 else (codes6, scale6, error6, error4)


@given(
    st.lists(st.floats(-100, 100, width=32), min_size=16, max_size=16).filter(lambda b: any(b)),
    st.floats(min_value=100, max_value=1e6, width=32),
    st.sampled_from(["mae", "mse"]),
    st.sampled_from([448.0, 256.0]),
)
def test_four_over_six_takes_the_smaller_error(block: list[float], amax: float, error: str, largest: float) -> None:
    """Both candidates and their errors in NumPy float32, element by element; ties keep six."""
    codes, scale, _, _ = four_over_six_by_hand(block, amax, error, largest)
    got = nvfp4.quantize(torch.tensor([block]), -1, torch.tensor(amax), four_over_six=error, scale_max=largest)
    assert got.scales.tolist() == [[scale]]
    assert unpack_e2m1(got.codes).tolist() == [codes]


@pytest.mark.parametrize(
    ("error", "block"),
    [
        ("mae", [-40, -13, 25, -51, -48, 2, 61, 60, -20, 12, 40, 22, 17, -54, -7, -28]),
        ("mse", [-59, -56, -9, 9, -21, 41, 54, -13, -40, -52, -5, -2, -30, 54, -38, -64]),
    ],
)
def test_four_over_six_adds_errors_in_ascending_order(error: str, block: list[float]) -> None:
    """Two blocks, found by search, where adding the 16 errors from the other end picks the other scale."""
    codes, scale, _, _ = four_over_six_by_hand(block, 1000.0, error, 256.0)
    x = torch.tensor([block], dtype=torch.float32)
    got = nvfp4.quantize(x, -1, torch.tensor(1000.0), four_over_six=error, scale_max=256.0)
    assert got.scales.tolist() == [[scale]]
    assert unpack_e2m1(got.codes).tolist() == [codes]


def test_four_over_six_keeps_six_in_a_tie() -> None:
    """A block that both scales hold exactly keeps the smaller one."""
    block = torch.zeros(1, 16)
    block[0, :2] = torch.tensor([6.0, -3.0])
    for error in ("mae", "mse"):
        got = nvfp4.quantize(block, -1, torch.tensor(1536.0), four_over_six=error, scale_max=256.0)
        assert torch.equal(got.dequantize(), block)
        assert E4M3.decode(got.scales).tolist() == [[1.0]]


@pytest.mark.parametrize("axis", [-1, -2])
def test_errors_of_a_tile_are_added_eight_four_two_and_one_apart(axis: int) -> None:
    """The pinned tree, on terms that every other order adds to another sum."""
    terms = [1.0, 2.0**24, 1.0, 1.0, 3.0, -(2.0**24), 5.0, 1.0, 2.0**25, 1.0, 7.0, 1.0, -(2.0**25), 1.0, 9.0, 1.0]
    level = np.array(terms, dtype=F32)
    for half in (8, 4, 2, 1):
        level = level[:half] + level[half:]
    errors = torch.tensor(terms).unsqueeze(1)
    got = nvfp4.tile_sum(errors, axis, Experts.single(16))
    assert got.flatten().tolist() == [level[0]] * 16
    assert level[0] not in (sum(terms), np.cumsum(np.array(terms, dtype=F32))[-1])


def test_four_over_six_prefers_four_where_it_is_exact() -> None:
    """[10, 20, 30, 40]: mapped to 4 it is exact, mapped to 6 the mean squared error is 4.33."""
    block = torch.tensor([[10.0, 20.0, 30.0, 40.0] * 4])
    four = nvfp4.quantize(block, -1, torch.tensor(40.0 * 256), four_over_six="mse", scale_max=256.0)
    six = nvfp4.quantize(block, -1, torch.tensor(40.0 * 256))
    assert (four.dequantize() - block).abs().max() < 1e-4
    assert (six.dequantize() - block).square().mean() > 1


@given(ragged_inputs(), st.sampled_from([-1, -2]), st.integers(0, 2**64 - 1), st.integers(0, 65535))
def test_random_bits_are_those_of_the_logical_element(
    inputs: tuple[torch.Tensor, Experts], axis: int, seed: int, tensor: int
) -> None:
    """A seed gives the bits of philox.element_bits; passing those bits gives the same codes (B40)."""
    x, experts = inputs
    seeded = nvfp4.quantize(x, axis, experts=experts, seed=seed, tensor=tensor)
    owner, index = experts.row_expert().clamp(min=0), experts.row_index().clamp(min=0)
    bits = philox.element_bits(
        seed, tensor, owner.unsqueeze(1), index.unsqueeze(1), torch.arange(32).unsqueeze(0), axis
    )
    passed = nvfp4.quantize(x, axis, None, Contract(stochastic_source="given"), bits, experts)
    assert torch.equal(seeded.codes, passed.codes)
    assert torch.equal(seeded.scales, nvfp4.quantize(x, axis, experts=experts).scales)


@given(ragged_inputs(), st.integers(0, 2**31), st.sampled_from([8, 16, 32]))
def test_all_random_bits_count(inputs: tuple[torch.Tensor, Experts], seed: int, width: int) -> None:
    """Every one of the contract's bits takes part: codes are those of the codec given the same bits and
    width.
    """
    x, experts = inputs
    contract = Contract(stochastic_source="given", stochastic_bits=width)
    bits = torch.randint(0, 2**width, x.shape, generator=torch.Generator().manual_seed(seed))
    got = nvfp4.quantize(x, -1, None, contract, bits, experts)
    assert got.global_amax is not None
    scale = nvfp4.global_scale(got.global_amax)
    product = x.to(torch.float32) * nvfp4.multipliers(got.scales, scale).repeat_interleave(16, 1)
    expected = E2M1.encode(product, "stochastic", random_bits=bits, random_width=width)
    valid = experts.valid_rows()
    assert torch.equal(unpack_e2m1(got.codes)[valid], expected[valid])


@given(ragged_inputs(), st.sampled_from([-1, -2]), st.integers(0, 2**64 - 1))
def test_stochastic_rounding_stays_on_neighbours(inputs: tuple[torch.Tensor, Experts], axis: int, seed: int) -> None:
    """Each code is one of the two around x * multiplier, and exact values stay as they are."""
    x, experts = inputs
    got = nvfp4.quantize(x, axis, experts=experts, seed=seed)
    low, high = (
        nvfp4.quantize(x, axis, None, Contract(), torch.full(x.shape, bits), experts) for bits in (0, 2**32 - 1)
    )
    values, lows, highs = (unpack_e2m1(q.codes) for q in (got, low, high))
    assert bool(((values == lows) | (values == highs)).all())
    nearest = unpack_e2m1(nvfp4.quantize(x, axis, experts=experts).codes)
    assert bool(((nearest == lows) | (nearest == highs)).all())


def test_stochastic_rounding_is_unbiased() -> None:
    """Mean of 61,440 roundings, for nine fractions and each width; a threshold off by 1/64 is 8 standard errors."""
    n = 65536
    for width in (8, 16, 32):
        contract = Contract(stochastic_bits=width)
        for tenth in range(1, 10):
            x = torch.full((n // 16, 16), 2.0 + tenth / 10)
            x[:, 0] = 6.0
            got = nvfp4.quantize(x, -1, torch.tensor(6.0 * 448), contract, seed=tenth)
            sample = got.dequantize()[:, 1:] / (6.0 * 448 / 2688)
            part = tenth / 10
            mean, spread = sample.mean(dtype=torch.float64).item(), math.sqrt(part * (1 - part) / sample.numel())
            assert_mean(mean, 2.0 + part, spread, f"{part} with {width} bits", slack=2.0**-width)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("seed", [None, 3])
def test_padding_is_zero_even_under_a_nan_amax(axis: int, seed: int | None) -> None:
    """A NaN in a valid row poisons every block's scale; codes and values of padding stay 0, scales the
    padding byte.
    """
    experts = Experts.from_offsets([0, 3, 40], [2, 20], 48)
    x = torch.ones(48, 16)
    x[0, 0] = math.nan
    got = nvfp4.quantize(x, axis, None, Contract(scale_padding=0xFF), None, experts, seed=seed)
    valid = experts.valid_rows()
    assert not got.unpacked_codes()[~valid].any()
    assert not got.dequantize()[~valid].any()
    if axis == -1:
        assert bool((got.scales[~valid] == 0xFF).all())
        assert bool((got.scales[valid] == 0x7F).all())
    else:
        owned = experts.owned_colwise_rows(16)
        assert bool((got.scales[:, ~owned] == 0xFF).all())
        assert bool((got.scales[:, owned] == 0x7F).all())
        slots = unpack_e2m1(got.codes)
        assert not slots[:, experts.slot_rows(16) < 0].any()


def test_packing_and_shapes() -> None:
    """Even element in the low nibble; colwise codes are transposed."""
    x = torch.zeros(32, 16)
    x[0, :2] = torch.tensor([1.0, -6.0])
    row = nvfp4.quantize(x, -1, torch.tensor(6.0 * 448))
    assert row.codes.shape == (32, 8)
    assert row.codes[0, 0] == 0xF2
    column = nvfp4.quantize(x.t().contiguous().repeat(1, 2), -2, torch.tensor(6.0 * 448))
    assert column.codes.shape == (64, 8)
    assert torch.equal(column.codes[:32], row.codes)
    assert torch.equal(pack_e2m1(unpack_e2m1(row.codes)), row.codes)


@pytest.mark.parametrize("axis", [-1, -2])
def test_empty_shapes_have_empty_results(axis: int) -> None:
    """No rows, no columns, no experts: defined shapes and amax 0 (B64)."""
    for rows, hidden in ((0, 32), (17, 0), (0, 0)):
        modes = ({}, {"block2d": True}, {"four_over_six": "mae"}, {"row_scaled": True}, {"seed": 1})
        for scope, mode in itertools.product((Contract(), PER_EXPERT), modes):
            got = nvfp4.quantize(torch.empty(rows, hidden), axis, contract=scope, **mode)
            blocks = -(-rows // 16)
            assert got.codes.shape == ((rows, hidden // 2) if axis == -1 else (hidden, blocks * 8))
            assert got.scales.shape == ((rows, hidden // 16) if axis == -1 else (hidden, blocks))
            assert not got.global_amax.any()
            assert got.dequantize().shape == (rows, hidden)
    none = Experts.from_offsets([0], capacity=5)
    for scope in (Contract(), PER_EXPERT):
        got = nvfp4.quantize(torch.full((5, 16), math.nan), axis, None, scope, None, none)
        assert not got.codes.any()
        assert not got.dequantize().any()


def test_bad_arguments_name_the_value_and_the_rule() -> None:
    """Wrong shapes, mixed modes and missing bits are refused."""
    x = torch.zeros(16, 32)
    bits = torch.zeros(16, 32, dtype=torch.int64)
    for call, message in (
        (lambda: nvfp4.quantize(x, 0), "axis is 0"),
        (lambda: nvfp4.quantize(x[:, :24], -1), "hidden is 24"),
        (lambda: nvfp4.quantize(x.double(), -1), r"x has dtype torch\.float64"),
        (lambda: nvfp4.quantize(x, -1, experts=Experts.single(15)), "x has 16 rows"),
        (lambda: nvfp4.quantize(x, -1, torch.ones(2)), "amax has dtype"),
        (lambda: nvfp4.quantize(x, -1, torch.tensor(1.0, dtype=torch.float64)), "amax has dtype"),
        (lambda: nvfp4.quantize(x, -1, random_bits=bits[:1]), "random_bits have shape"),
        (lambda: nvfp4.quantize(x, -1, random_bits=bits, seed=1), "both random_bits and seed"),
        (lambda: nvfp4.quantize(x, -1, contract=Contract(stochastic_source="given"), seed=1), "pass random_bits"),
        (lambda: nvfp4.quantize(x, -1, four_over_six="mae", seed=1), "nearest-even only"),
        (lambda: nvfp4.quantize(x, -1, four_over_six="rms"), "four_over_six = 'rms' is unknown"),
        (lambda: nvfp4.quantize(x, -1, scale_max=256.0), "scale_max 256 leaves room"),
        (lambda: nvfp4.quantize(x, -1, four_over_six="mae", scale_max=300.0), "scale_max is 300"),
        (lambda: nvfp4.quantize(x, -1, row_scaled=True, block2d=True), "row_scaled with block2d"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
