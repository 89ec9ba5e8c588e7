"""Other people's references as oracles, bit for bit: Transformer Engine's NVFP4 in Python, torchao's MX and
NVFP4.

Every known disagreement is a row with its reason in a test of its own; nothing is compared loosely. The
element codecs are compared with ml_dtypes and gfloat in test_property_13_formats.py.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_numerics.reference import amax, hadamard, mxfp8, nvfp4
from moe_numerics.reference.contract import Contract
from moe_numerics.reference.formats import E2M1, E4M3, E5M2, FloatFormat, unpack_e2m1

from moe_numerics.contract import profile

TE = profile("te")
TORCHAO = profile("torchao")


@pytest.fixture(scope="module")
def te() -> Iterator[Any]:
    """The module reference_nvfp4 of the installed wheel, with stand-ins for the two modules that need a
    driver.
    """
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the transformer-engine wheel is not installed")
    folder = Path(next(iter(spec.submodule_search_locations))) / "pytorch" / "custom_recipes"

    class Storage:
        pass

    class Quantizer:
        def __init__(self, rowwise: bool, columnwise: bool) -> None:
            self.rowwise_usage, self.columnwise_usage = rowwise, columnwise

    base = "transformer_engine.pytorch"
    packages = ["transformer_engine", base, f"{base}.custom_recipes", f"{base}.tensor"]
    stand_ins = {name: types.ModuleType(name) for name in packages}
    stand_ins[f"{base}.quantized_tensor"] = types.ModuleType("quantized_tensor")
    vars(stand_ins[f"{base}.quantized_tensor"]).update(QuantizedTensorStorage=Storage, Quantizer=Quantizer)
    stand_ins[f"{base}.tensor.utils"] = types.ModuleType("utils")
    vars(stand_ins[f"{base}.tensor.utils"]).update(is_custom=lambda *_: True)
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "transformer_engine"}
    sys.modules.update(stand_ins)
    try:
        module = None
        for name in ("reference_utils", "gemm", "reference_nvfp4"):
            full = f"{base}.custom_recipes.{name}"
            file = importlib.util.spec_from_file_location(full, folder / f"{name}.py")
            assert file is not None
            assert file.loader is not None
            module = importlib.util.module_from_spec(file)
            sys.modules[full] = module
            setattr(stand_ins[f"{base}.custom_recipes"], name, module)
            file.loader.exec_module(module)
        yield module
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
            del sys.modules[name]
        sys.modules.update(before)


def te_quantize(te: Any, x: torch.Tensor, **options: Any) -> Any:
    """Their result; scales as bytes."""
    quantizer = te.NVFP4QuantizerRef(te.reference_utils.Fp4Formats.E2M1, **options)
    return quantizer.quantize(x)


def exactly_summable(rows: int, columns: int, seed: int) -> torch.Tensor:
    """bfloat16 with 8-bit integers times a power of two a block: any order of a block's 16 additions is
    exact.
    """
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(-255, 256, (rows, columns), generator=generator)
    powers = torch.randint(-30, 30, (-(-rows // 16), columns), generator=generator).repeat_interleave(16, 0)
    return (whole * torch.exp2(powers[:rows])).to(torch.bfloat16)


def spread_out(rows: int, columns: int, seed: int) -> torch.Tensor:
    """bfloat16 Gaussians with the exponents of blocks of 16 columns spread, so that scales underflow and
    saturate.
    """
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-12, 13, (rows, -(-columns // 16)), generator=generator).repeat_interleave(16, 1)
    return (torch.randn(rows, columns, generator=generator) * torch.exp2(powers[:, :columns])).to(torch.bfloat16)


def constant(value: float) -> torch.Tensor:
    return torch.full((32, 48), value, dtype=torch.bfloat16)


def boundaries() -> torch.Tensor:
    """Values on and around every rounding border of E2M1 when the block's amax maps to 6."""
    borders = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 5.5, 6.0])
    near = torch.stack([borders, borders * (1 + 2.0**-7), borders * (1 - 2.0**-7), -borders]).to(torch.bfloat16)
    return near.repeat(8, 3) + 0.0


INPUTS = {
    "gaussian": lambda: torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),
    "spread": lambda: spread_out(128, 128, 1),
    "zeros": lambda: constant(0.0),
    "largest": lambda: constant(torch.finfo(torch.bfloat16).max),
    "tiny": lambda: constant(1e-38),
    "boundaries": boundaries,
    "272 rows": lambda: spread_out(272, 256, 2),
    "304 square": lambda: spread_out(304, 304, 3),
    "float32": lambda: torch.randn(48, 64, generator=torch.Generator().manual_seed(4)),
}
MODES: dict[str, dict[str, Any]] = {
    "1x16": {},
    "16x16": {"quant_tile_shape": (16, 16)},
    "row scaled": {"row_scaled_nvfp4": True},
    "4over6 mae 448": {"nvfp4_use_4over6": True},
    "4over6 mse 448": {"nvfp4_use_4over6": True, "nvfp4_4over6_err_mode": "MSE"},
    "4over6 mae 256": {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256},
    "4over6 mse 256": {"nvfp4_use_4over6": True, "nvfp4_4over6_err_mode": "MSE", "nvfp4_e4m3_max": 256},
    "4over6 mae 256 16x16": {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256, "quant_tile_shape": (16, 16)},
    "4over6 mse 448 row scaled": {
        "nvfp4_use_4over6": True,
        "nvfp4_4over6_err_mode": "MSE",
        "row_scaled_nvfp4": True,
    },
}


def ours(x: torch.Tensor, axis: int, mode: dict[str, Any]) -> Any:
    """The same quantisation here. float32 inputs are quantised as they are by the Python reference: no
    staging.
    """
    error = str(mode.get("nvfp4_4over6_err_mode", "MAE")).lower()
    return nvfp4.quantize(
        x,
        axis,
        contract=TE.replace(staging="none"),
        block2d=mode.get("quant_tile_shape") == (16, 16),
        row_scaled=mode.get("row_scaled_nvfp4", False),
        four_over_six=error if mode.get("nvfp4_use_4over6") else None,
        scale_max=float(mode.get("nvfp4_e4m3_max", 448)),
    )


def assert_same(quantized: Any, data: torch.Tensor, scales: torch.Tensor, largest: torch.Tensor) -> None:
    """Codes, scales and amax bit for bit, but for the one documented row: -0 (see the test of
    differences).
    """
    mine, theirs = unpack_e2m1(quantized.codes), unpack_e2m1(data)
    minus_zero = (mine == 8) & (theirs == 0)
    assert torch.equal(torch.where(minus_zero, 0, mine), theirs)
    assert torch.equal(quantized.scales, scales.view(torch.uint8))
    assert torch.equal(quantized.global_amax.reshape(-1), largest.reshape(-1))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", INPUTS)
def test_te_reference_of_nvfp4(te: Any, name: str, mode: str) -> None:
    """Data, scales and amax, both directions, every mode of Transformer Engine's reference: 0 differing
    bits.
    """
    x = INPUTS[name]()
    theirs = te_quantize(te, x, **MODES[mode])
    assert_same(ours(x, -1, MODES[mode]), theirs.data, theirs.scale, theirs.global_amax_row)
    assert_same(ours(x, -2, MODES[mode]), theirs.data_t, theirs.scale_t, theirs.global_amax_col)


@given(seed=st.integers(0, 2**31), mode=st.sampled_from(sorted(MODES)))
def test_te_reference_of_nvfp4_drawn(te: Any, seed: int, mode: str) -> None:
    """The same over drawn inputs."""
    x = spread_out(32, 32, seed)
    theirs = te_quantize(te, x, **MODES[mode])
    assert_same(ours(x, -1, MODES[mode]), theirs.data, theirs.scale, theirs.global_amax_row)
    assert_same(ours(x, -2, MODES[mode]), theirs.data_t, theirs.scale_t, theirs.global_amax_col)


@pytest.mark.parametrize("signs", [True, False])
@given(seed=st.integers(0, 2**31))
def test_te_reference_of_the_rotated_transpose(te: Any, signs: bool, seed: int) -> None:
    """Rotation, amax after it, data and scales of the rotated transpose: 0 differing bits.

    Their rotation is a bfloat16 matmul whose order of additions belongs to the CPU library; on inputs whose
    sums are exact in any order nothing is left open.
    """
    x = exactly_summable(64, 16, seed)
    theirs = te_quantize(te, x, with_rht=True, with_random_sign_mask=signs)
    contract = TE if signs else TE.replace(rht_signs=None)
    turned = hadamard.rotate(x, -2, contract=contract)
    assert_same(nvfp4.quantize(turned, -2, contract=contract), theirs.data_t, theirs.scale_t, theirs.global_amax_col)
    assert torch.equal(amax.per_tensor(turned).reshape(1), theirs.global_amax_col)
    assert_same(nvfp4.quantize(x, -1, contract=contract), theirs.data, theirs.scale, theirs.global_amax_row)


def test_te_signs_are_the_default(te: Any) -> None:
    """Their hard-coded sign vector is the contract's."""
    assert te.get_wgrad_sign_vector().tolist() == list(TE.rht_signs or ())


def test_te_reference_differs_where_documented(te: Any) -> None:
    """Rows of disagreement between their Python reference and the kernels, which the profile follows.

    -0: their table of ranges gives code 0, the conversion instruction keeps the sign. NaN: their torch
    reduction propagates it and their table gives code 0 for it, the unfused kernels ignore it in the amax and
    convert it to +6.
    """
    x = torch.zeros(1, 32, dtype=torch.bfloat16)
    x[0, 0], x[0, 1] = -0.0, 6.0
    theirs = te_quantize(te, x, columnwise=False)
    mine = nvfp4.quantize(x, -1, contract=TE)
    assert unpack_e2m1(theirs.data)[0, 0] == 0
    assert unpack_e2m1(mine.codes)[0, 0] == 8
    assert torch.equal(mine.scales, theirs.scale.view(torch.uint8))

    x[0, 0] = math.nan
    theirs = te_quantize(te, x, columnwise=False)
    mine = nvfp4.quantize(x, -1, contract=TE)
    assert theirs.scale.to(torch.float32).isnan().all()
    assert not theirs.data.any()
    assert mine.scales.tolist() == [[0x7E, 0]]
    assert unpack_e2m1(mine.codes)[0, :2].tolist() == [7, 7]


@pytest.mark.parametrize(("outer", "seed"), [(32, 0), (160, 1)])
def test_te_gemm_reference_on_dequantised_values(te: Any, outer: int, seed: int) -> None:
    """Their qgemm equals the product of the dequantised matrices within float32 rounding of its 16-wide
    sums.
    """
    a, b = spread_out(outer, 64, seed), spread_out(32, 64, seed + 9)
    quantizer = te.NVFP4QuantizerRef(te.reference_utils.Fp4Formats.E2M1)
    qa, qb = quantizer.quantize(a), quantizer.quantize(b)
    theirs = quantizer.qgemm(
        qa.data, qb.data, None, torch.float32, qa.scale, qb.scale, qresult_x=qa, qresult_w=_as_weight(qb)
    )
    left, right = (nvfp4.quantize(t, -1, contract=TE).dequantize(torch.float32).double() for t in (a, b))
    exact, size = left @ right.t(), left.abs() @ right.abs().t()
    assert bool(((theirs.double() - exact).abs() <= 2.0**-20 * size).all())


def _as_weight(result: Any) -> Any:
    # qgemm asks a weight for the amax of the direction it was not quantised in.
    result.global_amax_col = result.global_amax_row
    return result


@pytest.fixture(scope="module")
def torchao() -> Any:
    """torchao's MX and NVFP4 modules; their optional binary extensions are not needed and may not load."""
    logging.disable(logging.WARNING)
    try:
        mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
        nv = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    finally:
        logging.disable(logging.NOTSET)
    return types.SimpleNamespace(mx=mx, nv=nv)


TORCHAO_TYPES = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2, E2M1: torch.float4_e2m1fn_x2}
BY_RULE = {
    "floor": TORCHAO,
    "ceil": TORCHAO.replace(scale_rule="ceil"),
    "even": TORCHAO.replace(scale_rule="even"),
    "rceil": TORCHAO.replace(scale_rule="rceil", mx_inf="saturate", mx_multiplier="exact"),
}


def wide(seed: int, spread: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-spread, spread + 1, (64, 2), generator=generator).repeat_interleave(32, 1)
    return (torch.randn(64, 64, generator=generator) * torch.exp2(powers)).to(dtype)


def special_blocks() -> torch.Tensor:
    """NaN, both Infs, -0, subnormals, saturation, both ends of the range."""
    x = torch.zeros(7, 32)
    for row, values in enumerate(
        (
            (math.nan, 1.0, -2.0),
            (math.inf, 1.0, -math.inf),
            (-0.0,),
            (1e-45, -1e-40),
            (448.0, -450.0),
            (3e38, 1e38),
            (2.0**-119 * 1.75, 2.0**-126, -1e-39),
        )
    ):
        x[row, : len(values)] = torch.tensor(values)
    return x


def torchao_mx(torchao: Any, x: torch.Tensor, element: FloatFormat, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    mode = getattr(torchao.mx.ScaleCalculationMode, rule.upper())
    scales, data = torchao.mx.to_mx(x, TORCHAO_TYPES[element], 32, mode)
    return scales.view(torch.uint8), data.view(torch.uint8)


def same_codes(quantized: Any, data: torch.Tensor) -> torch.Tensor:
    """Which codes agree, NaN by class: torch's cast keeps the sign of NaN."""
    if quantized.element == E2M1:
        return quantized.codes == data
    both = quantized.element.decode(quantized.codes).isnan() & quantized.element.decode(data).isnan()
    return (quantized.codes == data) | both


@pytest.mark.parametrize("element", TORCHAO_TYPES, ids=str)
@pytest.mark.parametrize("rule", ["floor", "ceil", "even"])
@given(seed=st.integers(0, 2**31), spread=st.sampled_from([0, 10, 120]), narrow=st.booleans())
def test_torchao_mx(torchao: Any, element: FloatFormat, rule: str, seed: int, spread: int, narrow: bool) -> None:
    """Codes and scales over the whole float32 range, float32 and bfloat16: 0 differing bits in three scale
    rules.
    """
    x = wide(seed, spread, torch.bfloat16 if narrow else torch.float32)
    scales, data = torchao_mx(torchao, x, element, rule)
    got = mxfp8.quantize(x, -1, element, BY_RULE[rule])
    assert torch.equal(got.scales, scales)
    assert bool(same_codes(got, data).all())


@pytest.mark.parametrize("element", TORCHAO_TYPES, ids=str)
@pytest.mark.parametrize("rule", ["floor", "ceil", "even"])
def test_torchao_mx_specials(torchao: Any, element: FloatFormat, rule: str) -> None:
    """NaN, Inf, -0, subnormals and range ends agree too; one row differs: NaN to E2M1, 3 there and 7 here and
    in PTX.
    """
    x = special_blocks()
    scales, data = torchao_mx(torchao, x, element, rule)
    got = mxfp8.quantize(x, -1, element, BY_RULE[rule])
    assert torch.equal(got.scales, scales)
    differing = torch.nonzero(~same_codes(got, data)).tolist()
    if element == E2M1:
        assert differing == [[0, 0]]
        assert [unpack_e2m1(codes[0])[0].item() for codes in (data, got.codes)] == [3, 7]
    else:
        assert differing == []


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=str)
@given(seed=st.integers(0, 2**31), spread=st.sampled_from([0, 10, 100]))
def test_torchao_mx_round_up(torchao: Any, element: FloatFormat, seed: int, spread: int) -> None:
    """Round-up on bfloat16 where the scale is above 0: 0 differing bits."""
    x = wide(seed, spread, torch.bfloat16)
    scales, data = torchao_mx(torchao, x, element, "rceil")
    got = mxfp8.quantize(x, -1, element, BY_RULE["rceil"])
    assert torch.equal(got.scales, scales)
    usual = (scales > 0).repeat_interleave(32, 1)
    assert bool(same_codes(got, data)[usual].all())


def test_torchao_round_up_differs_where_known(torchao: Any) -> None:
    """Two rows: log2 loses a float32 amax just above a power of two (B03); scale code 0 multiplies by 1, not
    2**127.
    """
    x = torch.zeros(2, 32)
    x[0, 0] = torch.nextafter(torch.tensor(448.0 * 2.0**8), torch.tensor(math.inf))
    x[1, 0] = 2.0**-120
    scales, data = torchao_mx(torchao, x, E4M3, "rceil")
    got = mxfp8.quantize(x, -1, E4M3, BY_RULE["rceil"])
    assert scales.flatten().tolist() == [135, 0]
    assert got.scales.flatten().tolist() == [136, 0]
    assert data[1, 0] == 0
    assert got.codes[1, 0] == E4M3.encode(torch.tensor([128.0]))[0]


@given(seed=st.integers(0, 2**31), spread=st.sampled_from([0, 3, 10]), narrow=st.booleans())
def test_torchao_nvfp4(torchao: Any, seed: int, spread: int, narrow: bool) -> None:
    """Two-level NVFP4 in torchao's order of arithmetic: 0 differing bits."""
    x = wide(seed, spread, torch.bfloat16 if narrow else torch.float32)
    largest = x.to(torch.float32).abs().max()
    scales, data = torchao.nv.nvfp4_quantize(x, 16, torchao.nv.per_tensor_amax_to_scale(largest))
    got = nvfp4.quantize(x, -1, contract=TORCHAO)
    assert torch.equal(got.scales, scales.view(torch.uint8))
    assert torch.equal(got.codes, data)


def test_torchao_nvfp4_differs_where_known(torchao: Any) -> None:
    """NaN elements (4 or C there, +6 here), and a zero tensor, whose scale 0 / 0 is NaN in both."""
    x = torch.ones(1, 16)
    x[0, 0] = math.nan
    scales, data = torchao.nv.nvfp4_quantize(x, 16, torchao.nv.per_tensor_amax_to_scale(torch.tensor(1.0)))
    got = nvfp4.quantize(x, -1, torch.tensor(1.0), TORCHAO)
    assert got.scales.tolist() == scales.view(torch.uint8).tolist() == [[0x7F]]
    assert set(unpack_e2m1(data)[0].tolist()) == {4}
    assert set(unpack_e2m1(got.codes)[0].tolist()) == {7}

    zero = torch.zeros(1, 16)
    scales, _ = torchao.nv.nvfp4_quantize(zero, 16, torchao.nv.per_tensor_amax_to_scale(torch.tensor(0.0)))
    got = nvfp4.quantize(zero, -1, contract=TORCHAO)
    assert E4M3.decode(scales.view(torch.uint8)).isnan().all()
    assert E4M3.decode(got.scales).isnan().all()
    assert nvfp4.quantize(zero, -1, contract=Contract()).scales.tolist() == [[0]]
