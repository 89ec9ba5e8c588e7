"""Named, versioned contracts: whose numerics a path follows, and where that is written down."""

from __future__ import annotations

from dataclasses import dataclass

from .reference.contract import CHOICES, DEFAULT_SIGNS, SUITE, Contract

__all__ = ["ALIASES", "CHOICES", "DEFAULT_SIGNS", "PROFILES", "SUITE", "Contract", "Profile", "profile"]


@dataclass(frozen=True)
class Profile:
    """A contract with a name, one line of what it is, and its sources.

    A profile fixes where values are rounded and in which order scales are computed. Where its source
    evaluates an activation with approximate instructions, the path's grade is bounded whatever the profile
    says.
    """

    name: str
    summary: str
    contract: Contract
    sources: tuple[str, ...]


_ALL = (
    Profile(
        "suite",
        "round-up scales on exact integer arithmetic, NaN propagates, quantised straight from float32",
        SUITE,
        (
            "OCP Microscaling Formats (MX) v1.0, sections 5 and 6: formats and block layout",
            "arXiv 2506.08027: round-up of E8M0 scales",
            "arXiv 2509.25149, appendices B to E: NVFP4 two-level scaling, rotation, stochastic rounding",
        ),
    ),
    Profile(
        "te@2.20",
        "Transformer Engine 2.20: values pass through bfloat16 first, NaN is ignored by amax reductions",
        Contract(
            accumulator="sm_100.mxf8f6f4",
            staging="bfloat16",
            mx_scale="float32_product",
            nan_policy="ignore",
            rht_rounding="bfloat16",
            stochastic_source="given",
            stochastic_bits=8,
            padding="zeroed_by_caller",
        ),
        (
            "transformer_engine/common/cast/mxfp8/quantize_mxfp8.cuh@2.20: rounding to bfloat16 before amax",
            "transformer_engine/common/util/ptx.cuh@2.20: float_to_e8m0, exp2f_rcp",
            "transformer_engine/common/cast/nvfp4/core_nvfp4.cuh@2.20: order of the NVFP4 scale arithmetic",
            "transformer_engine/common/hadamard_transform@2.20: sign mask 0xD7E8, rounded to bfloat16; "
            "its fused reduction propagates NaN, unlike the others",
            "transformer_engine/pytorch/custom_recipes/reference_nvfp4.py@2.20: the Python reference, which "
            "differs from the kernels for NaN and -0",
        ),
    ),
    Profile(
        "cudnn@1.28",
        "cuDNN Frontend 1.28: straight from float32, E5M2 scaled to 128, flushing reciprocal, no signs",
        Contract(
            accumulator="sm_100.mxf8f6f4",
            mx_scale="float32_product",
            mx_multiplier="flushed",
            e5m2_target=128.0,
            nvfp4_block_scale="sixth_times_scale",
            nvfp4_multiplier="encode_scale_over_block_scale",
            amax_scope="expert",
            rht_signs=None,
            padding="zeroed_by_caller",
        ),
        (
            "cudnn-frontend v1.28, python/cudnn/gemm/cutedsl/grouped: scales by cvt.rp of (amax * (1/max)) * "
            "norm, elements times rcp.approx.ftz(scale) held below the largest float32",
            "cudnn-frontend v1.28, docs/fe-oss-apis: rotation with factor 1/4, amax of each expert",
        ),
    ),
    Profile(
        "cudnn@1.23",
        "cuDNN Frontend 1.23: as 1.28, with the rotation left unnormalised and rounded through bfloat16",
        Contract(
            accumulator="sm_100.mxf8f6f4",
            mx_scale="float32_product",
            mx_multiplier="flushed",
            e5m2_target=128.0,
            nvfp4_block_scale="sixth_times_scale",
            nvfp4_multiplier="encode_scale_over_block_scale",
            amax_scope="expert",
            rht_signs=None,
            rht_normalise="none",
            rht_rounding="bfloat16",
            padding="zeroed_by_caller",
        ),
        ("cudnn-frontend v1.23, python/cudnn/grouped_gemm: GLU rounded to bfloat16, then H16 of +-1",),
    ),
    Profile(
        "ocp",
        "OCP MX v1.0 as written: floor scales, so the block's maximum may saturate",
        Contract(scale_rule="floor", amax_scope="tensor", rht_signs=None),
        (
            "OCP Microscaling Formats (MX) v1.0, section 6.3: scale 2**(floor(log2 amax) - emax); "
            "Inf and NaN in a block are left to the implementation and follow `suite`",
        ),
    ),
    Profile(
        "torchao",
        "torchao 0.18: floor scales, divisor held above 2**-126, NVFP4 block scales of at least 2**-6",
        Contract(
            scale_rule="floor",
            mx_inf="rule",
            mx_multiplier="normal",
            nvfp4_encode_scale="reciprocal_of_divided_amax",
            nvfp4_block_scale="divided_amax_over_decode_scale",
            nvfp4_multiplier="encode_scale_over_block_scale",
            nvfp4_scale_floor="smallest_normal",
            padding="zeroed_by_caller",
        ),
        (
            "torchao/prototype/mx_formats/mx_tensor.py@0.18, to_mx: floor by default, division by a scale "
            "of at least 2**-126, 0xFF only for NaN",
            "torchao/prototype/mx_formats/nvfp4_tensor.py@0.18, nvfp4_quantize: order of the scales",
        ),
    ),
)

PROFILES: dict[str, Profile] = {each.name: each for each in _ALL}
ALIASES: dict[str, str] = {"te": "te@2.20", "cudnn": "cudnn@1.28"}


def profile(name: str) -> Contract:
    """Gives the contract of a named profile; "te" and "cudnn" are the newest version described.

    ValueError: an unknown name, with the known ones.
    """
    known = PROFILES.get(ALIASES.get(name, name))
    if known is None:
        raise ValueError(f"profile {name!r} is unknown: expected one of {', '.join((*ALIASES, *PROFILES))}")
    return known.contract
