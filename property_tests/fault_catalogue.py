"""The catalogue of faults: what is planted, where, and which public report it follows."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from faults import Fault, Outputs
from moe_numerics.reference import mxfp8
from moe_numerics.reference.activations import ACTIVATIONS, CLAMPED_SWIGLU_PRESETS, Silu
from moe_numerics.reference.elementwise import Blocks
from moe_numerics.reference.formats import E4M3, E5M2, E8M0
from moe_numerics.reference.gated_activations import ClampedSwiglu, Gated
from moe_numerics.reference.grouped_nvfp4 import Recipe
from test_planted_faults import FAULTS as PLANTED

from moe_numerics.cases import Case
from moe_numerics.operations import (
    ActivationBackward,
    ActivationForward,
    ActivationThenNvfp4,
    Mxfp8Copies,
    Nvfp4Copies,
    Operation,
)
from moe_numerics.paths import Path

FORWARD, FORWARD_BF16 = "swiglu.fwd.mxfp8_e4m3", "swiglu.fwd.bf16"
BACKWARD, BACKWARD_BF16 = "swiglu.bwd.mxfp8_e4m3", "swiglu.bwd.bf16"
BIAS_FORWARD, BIAS_BACKWARD = "swiglu.fwd.bf16.bias", "swiglu.bwd.bf16.bias"
CLAMPED = "clamped_swiglu.fwd.bf16"
CLAMPED_BACKWARD = "clamped_swiglu.bwd.bf16"
QUANTIZE, QUANTIZE_E5M2 = "quantize.mxfp8_e4m3", "quantize.mxfp8_e5m2"
NVFP4, ROTATED, STOCHASTIC = "quantize.nvfp4", "quantize.nvfp4.rht", "quantize.nvfp4.rht.sr"
FOUR_OVER_SIX = "quantize.nvfp4.4over6_mse"
COMPOSED, COMPOSED_BACKWARD = "swiglu.fwd.nvfp4", "swiglu.bwd.nvfp4"
FIRST_LAYER, SECOND_LAYER = "grouped_mlp.fc1.swiglu.fwd.mxfp8_e4m3", "grouped_mlp.fc2.swiglu.bwd.mxfp8_e4m3"
STEP, STEP_MXFP8 = "grouped_mlp.step.bf16", "grouped_mlp.step.mxfp8"


def _ptx(id: str, path: str, pattern: str, replacement: Any, seen_in: str = "", limit: int = 0, **more: Any) -> Fault:
    return Fault(id, "ptx", path, seen_in, pattern, replacement, limit, **more)


def _choice(id: str, path: str, seen_in: str = "", **choices: Any) -> Fault:
    return Fault(id, "choice", path, seen_in, choices=choices)


def _operation(id: str, path: str, operation: Operation, seen_in: str = "") -> Fault:
    return Fault(id, "operation", path, seen_in, operation=operation)


def _input(id: str, path: str, inputs: Callable[[Outputs], None] | None, seen_in: str = "", **fields: Any) -> Fault:
    return Fault(id, "input", path, seen_in, inputs=inputs, fields=fields)


def _output(id: str, path: str, output: Callable[[Outputs, Path, Case], None], seen_in: str = "") -> Fault:
    return Fault(id, "output", path, seen_in, output=output)


def _swap_halves(tensors: Outputs) -> None:
    both = tensors["gate_up"]
    tensors["gate_up"] = torch.cat(both.chunk(2, dim=-1)[::-1], dim=-1)


def _drop(name: str, value: float) -> Callable[[Outputs], None]:
    def change(tensors: Outputs) -> None:
        if name in tensors:
            tensors[name] = torch.full_like(tensors[name], value)

    return change


def _first_bias_for_all(tensors: Outputs) -> None:
    tensors["bias"] = tensors["bias"][:1].expand_as(tensors["bias"]).contiguous()


def _written(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Outputs, Path, Case], None]:
    """Changes the elements of an output that the path owns."""

    def output(outputs: Outputs, path: Path, case: Case) -> None:
        if name not in outputs:
            return
        value = outputs[name]
        owned = path.output(name).owned(path.experts(case))
        owned = owned.view(-1, *[1] * (value.dim() - 1)) if owned.dim() == 1 and value.dim() > 1 else owned
        outputs[name] = torch.where(owned, change(value), value)

    return output


def _last_expert(name: str) -> Callable[[Outputs, Path, Case], None]:
    def output(outputs: Outputs, path: Path, case: Case) -> None:
        experts = path.experts(case)
        for start, count in list(zip(experts.starts, experts.counts, strict=True))[1:]:
            outputs[name][start : start + count] = 0

    return output


def _colwise_from_rowwise(outputs: Outputs, path: Path, case: Case) -> None:
    experts = path.experts(case)
    codes, scales = outputs["codes_rowwise"], outputs["scales_rowwise"]
    of_element = scales.repeat_interleave(mxfp8.BLOCK, dim=1)
    values = E4M3.decode(codes).double() * E8M0.decode(of_element, torch.float64)
    again = mxfp8.quantize(values.float(), -2, E4M3, experts=experts)
    valid = experts.valid_rows().unsqueeze(1)
    outputs["codes_colwise"] = torch.where(valid, again.codes, outputs["codes_colwise"])
    rows = experts.owned_colwise_rows(mxfp8.BLOCK).unsqueeze(1)
    outputs["scales_colwise"] = torch.where(rows, again.scales, outputs["scales_colwise"])


def _zero_gate_gradient(outputs: Outputs, path: Path, case: Case) -> None:
    experts = path.experts(case)
    rows = experts.valid_rows()
    half = outputs["out"].shape[1] // 2
    outputs["out"][rows, :half] = 0


def _all_rows_to_the_first(outputs: Outputs, path: Path, case: Case) -> None:
    for start, count in zip(path.experts(case).starts, path.experts(case).counts, strict=True):
        outputs["out"][start : start + count] = outputs["out"][start : start + 1]


def _shift(by: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda codes: (codes.int() + by).clamp(0, 255).to(torch.uint8)


def _one_ulp_off(x: torch.Tensor) -> torch.Tensor:
    return (x.view(torch.int16) ^ 1).view(torch.bfloat16)


def _in_bfloat16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).float()


def _largest_over_all(outputs: Outputs, path: Path, case: Case) -> None:
    outputs["amax"] = outputs["amax"].amax().expand_as(outputs["amax"]).clone()


_ROUND_TO_STEPS = r"add\.rn\.f32( \t%r\d+, %r\d+, )(0f4(?:AC00000|B400002|BC0000[04]|C400002|CC00004);)"
_SIGNS = r"(and\.b32 \t%r\d+, %r\d+, )-2004318072;"
_GEGLU_ERF = ACTIVATIONS["geglu_erf"]

_PLANTED = [
    Fault(
        re.sub(r"[^a-z0-9]+", "-", planted.name.lower()),
        "ptx",
        planted.path,
        pattern=planted.edit.pattern,
        replacement=planted.edit.replacement,
        schedule=planted.schedule,
    )
    for planted in PLANTED
]

_MX = [
    _choice("mx-scale-floor", QUANTIZE, "ROCm/aiter#3212", scale_rule="floor"),
    _choice("mx-scale-even", QUANTIZE, "pytorch/ao#1835", scale_rule="even"),
    _choice("mx-scale-ceil", QUANTIZE, "pytorch/ao#2035", scale_rule="ceil"),
    _choice("mx-values-staged-in-bfloat16", BACKWARD, "triton-lang/triton#11753", staging="bfloat16"),
    _choice("mx-reciprocal-flushed", QUANTIZE, "flashinfer-ai/flashinfer#4023", mx_multiplier="flushed"),
    _choice("mx-divisor-held-normal", QUANTIZE, "flashinfer-ai/flashinfer#2440", mx_multiplier="normal"),
    _choice("mx-nan-ignored", FORWARD, "triton-lang/triton#7349", nan_policy="ignore"),
    _choice("mx-e5m2-scaled-to-128", QUANTIZE_E5M2, "", e5m2_target=128.0),
    _operation("mx-e5m2-for-e4m3", QUANTIZE, Mxfp8Copies(E5M2), "NVIDIA/TransformerEngine#3342"),
    _operation("mx-tiles-for-blocks", QUANTIZE, Mxfp8Copies(E4M3, Blocks(block2d=True))),
    _output("mx-scales-one-more", QUANTIZE, _written("scales_rowwise", _shift(1)), "microsoft/microxcaling#4"),
    _output("mx-scales-one-less", FORWARD, _written("scales_colwise", _shift(-1)), "ml-explore/mlx#4353"),
    _output("mx-colwise-from-rowwise", FORWARD, _colwise_from_rowwise, "NVIDIA/TransformerEngine#1490"),
    _output(
        "mx-negative-zero-lost",
        QUANTIZE,
        _written("codes_rowwise", lambda codes: torch.where(codes == 0x80, 0, codes)),
        "intel/torch-xpu-ops#2951",
    ),
    _output(
        "mx-nan-code-becomes-largest",
        QUANTIZE,
        _written("codes_colwise", lambda codes: torch.where(codes & 0x7F == 0x7F, codes - 1, codes)),
        "pytorch/pytorch#178817",
    ),
    _output(
        "mx-scale-zero-decoded-as-zero",
        QUANTIZE,
        _written("scales_colwise", lambda scales: torch.where(scales == 0, 1, scales)),
        "NVIDIA/TransformerEngine#3262",
    ),
    _output("mx-only-first-expert", FORWARD, _last_expert("codes_rowwise"), "flashinfer-ai/flashinfer#3792"),
    _output(
        "mx-swizzled-line-off",
        "quantize.mxfp8_e4m3.swizzled",
        lambda outputs, path, case: outputs.update(scales_rowwise=outputs["scales_rowwise"].roll(16)),
        "NVIDIA/TransformerEngine#3070",
    ),
    _ptx(
        "mx-32x32-lanes-not-exchanged",
        "quantize.mxfp8_e4m3.32x32",
        r"(shfl\.sync\.bfly\.b32 \t%r\d+, %r\d+, )16,",
        r"\g<1>0,",
    ),
]

_ACTIVATION = [
    _operation(
        "act-geglu-erf-for-tanh", "geglu.fwd.bf16", ActivationForward(_GEGLU_ERF, None), "EricLBuehler/mistral.rs#1867"
    ),
    _operation(
        "act-gradient-of-erf-for-tanh",
        "geglu.bwd.bf16",
        ActivationBackward(_GEGLU_ERF, None),
        "linkedin/Liger-Kernel#959",
    ),
    _operation(
        "act-clamp-after-silu",
        CLAMPED,
        ActivationForward(CLAMPED_SWIGLU_PRESETS["step"], None),
        "sgl-project/sglang#39939",
    ),
    _operation(
        "act-offset-forgotten",
        CLAMPED,
        ActivationForward(ClampedSwiglu(offset=0.0), None),
        "flashinfer-ai/flashinfer#3492",
    ),
    _operation(
        "act-alpha-forgotten",
        CLAMPED,
        ActivationForward(ClampedSwiglu(alpha=1.0), None),
        "flashinfer-ai/flashinfer#3492",
    ),
    _operation(
        "act-limit-unset", CLAMPED, ActivationForward(ClampedSwiglu(limit=None), None), "microsoft/onnxruntime#27221"
    ),
    _operation(
        "act-gradient-without-clamp-mask",
        CLAMPED_BACKWARD,
        ActivationBackward(ClampedSwiglu(limit=None), None),
        "NVIDIA/cudnn-frontend#447",
    ),
    _operation("act-quick-gelu-for-silu", FORWARD_BF16, ActivationForward(ACTIVATIONS["qgeglu"], None)),
    _operation("act-gradient-of-sigmoid-for-silu", BACKWARD_BF16, ActivationBackward(ACTIVATIONS["glu"], None)),
    _operation(
        "act-relu-for-squared-relu",
        "srelu.fwd.mxfp8_e4m3",
        ActivationForward(ACTIVATIONS["relu"], E4M3),
        "NVIDIA/Megatron-LM#6588",
    ),
    _ptx("act-limit-one-ulp-off", CLAMPED_BACKWARD, "0f40E00000", "0f40E00001", "pytorch/pytorch#191142"),
    _ptx(
        "act-mask-excludes-the-limit",
        CLAMPED_BACKWARD,
        r"setp\.gt\.f32( \t%p\d+, %r\d+, 0f40E00000)",
        r"setp.ge.f32\1",
        "NVIDIA/TransformerEngine#3424",
    ),
    _ptx(
        "act-sigmoid-argument-not-clamped",
        FORWARD_BF16,
        r"(?:min|max)(?:\.NaN)?\.f32 \t(%r\d+), (%r\d+), 0f(?:C2AE|42D0)0000",
        r"mov.b32 \1, \2",
        "huggingface/candle#1722",
    ),
    _ptx(
        "act-fma-of-derivative-split",
        BACKWARD_BF16,
        r"fma\.rn\.f32 \t(%r\d+), (%r\d+), (%r\d+), 0f3F800000;",
        r"mul.rn.f32 \1, \2, \3; add.rn.f32 \1, \1, 0f3F800000;",
    ),
    _ptx(
        "act-bfloat16-pair-swapped",
        FORWARD_BF16,
        r"cvt\.rn\.bf16x2\.f32 (%r\d+), (%r\d+), (%r\d+);",
        r"cvt.rn.bf16x2.f32 \1, \3, \2;",
    ),
    _ptx("act-product-truncated", FORWARD_BF16, r"mul\.rn\.f32", "mul.rz.f32"),
    _ptx("act-subnormals-flushed", BACKWARD_BF16, r"mul\.rn\.f32", "mul.rn.ftz.f32"),
    _ptx("act-amax-of-rounded-signed-value", FORWARD_BF16, r"abs\.f32 \t", "mov.b32 \t", "deepseek-ai/TileKernels#16"),
    _input("act-gate-and-up-swapped", BACKWARD_BF16, _swap_halves, "vllm-project/vllm#29273"),
    _input("act-prob-forgotten-in-backward", BACKWARD_BF16, _drop("prob", 1.0)),
    _input("act-bias-of-first-expert", BIAS_FORWARD, _first_bias_for_all),
    _input("act-bias-forgotten", BIAS_BACKWARD, _drop("bias", 0.0), "pytorch/pytorch#193633"),
    _output(
        "act-all-scaled-by-4.5-percent", FORWARD_BF16, _written("out", lambda x: (x.float() * 1.045).to(torch.bfloat16))
    ),
    _output("act-all-one-ulp-off", FORWARD_BF16, _written("out", _one_ulp_off)),
    _output("act-half-of-the-gradient-lost", BACKWARD_BF16, _zero_gate_gradient, "linkedin/Liger-Kernel#1413"),
    _output(
        "act-all-rows-from-the-first", FORWARD_BF16, _all_rows_to_the_first, "ByteDance-Seed/Triton-distributed#180"
    ),
    _output("act-amax-over-all-experts", FORWARD_BF16, _largest_over_all, "NVIDIA/TensorRT-LLM#9551"),
    _output("act-amax-stale", FORWARD_BF16, _written("amax", torch.zeros_like), "NVIDIA/TransformerEngine#2044"),
    _output("act-amax-in-bfloat16", FORWARD_BF16, _written("amax", _in_bfloat16), "vllm-project/vllm#20578"),
    _output("act-dprob-in-bfloat16", BACKWARD_BF16, _written("dprob", _in_bfloat16)),
    _output("act-dbias-in-bfloat16", BIAS_BACKWARD, _written("dbias", _in_bfloat16)),
    _ptx(
        "act-dbias-rows-paired-otherwise",
        BIAS_BACKWARD,
        r"shfl\.sync\.bfly\.b32 (\t%r\d+, %r\d+, )16,",
        r"shfl.sync.idx.b32 \g<1>0,",
    ),
]

_NV = [
    _ptx("nv-ties-away", ROTATED, _ROUND_TO_STEPS, r"fma.rn.f32\g<1>0f3F800001, \2", "ROCm/aiter#3992"),
    _ptx(
        "nv-ties-toward-zero",
        NVFP4,
        _ROUND_TO_STEPS,
        r"fma.rn.f32\g<1>0f3F7FFFFF, \2",
        "deepseek-ai/DeepGEMM, FP4 casts",
    ),
    _ptx("nv-small-values-truncated", NVFP4, r"add\.rn\.f32( \t%r\d+, %r\d+, 0f4AC00000)", r"add.rz.f32\1"),
    _ptx("nv-sign-lost", ROTATED, _SIGNS, r"\g<1>0;", "Comfy-Org/comfy-kitchen#74"),
    _ptx("nv-saturates-at-4", NVFP4, "1262485511;", "1262485510;"),
    _ptx(
        "nv-subnormal-scale-decoded-as-normal",
        NVFP4,
        r"(0f3B000000;\s+setp\.lt\.u32 \t%p\d+, %r\d+, )8;",
        r"\g<1>0;",
        "local-inference-lab/b12x#388",
    ),
    _ptx("nv-sixth-one-ulp-off", NVFP4, "0f3E2AAAAB", "0f3E2AAAAA", "NVIDIA/TransformerEngine#2615"),
    _ptx("nv-2688-one-ulp-off", NVFP4, "0f45280000", "0f45280001"),
    _ptx(
        "nv-encode-scale-not-capped",
        NVFP4,
        r"min\.NaN\.f32 \t(%r\d+), (%r\d+), 0f7F7FFFFF;",
        r"mov.b32 \t\1, \2;",
        "flashinfer-ai/flashinfer#4679",
    ),
    _ptx(
        "nv-zero-amax-not-guarded",
        NVFP4,
        r"(setp\.eq\.f32 \t%p\d+, %r\d+, )0f00000000;",
        r"\g<1>0fBF800000;",
        "vllm-project/compressed-tensors#595",
    ),
    _ptx("nv-nan-dropped-from-amax", NVFP4, r"max\.NaN\.f32", "max.f32", "triton-lang/triton#7349"),
    _ptx(
        "nv-amax-without-abs",
        NVFP4,
        r"abs\.f32 \t(%r\d+), (%r\d+);(?=\s+max)",
        r"mov.b32 \t\1, \2;",
        "deepseek-ai/TileKernels#16",
    ),
    _ptx("nv-multiplier-truncated", NVFP4, r"rcp\.rn\.f32", "rcp.rz.f32"),
    _ptx("nv-scale-product-truncated", NVFP4, r"mul\.rn\.f32( \t%r\d+, %r\d+, 0f3E2AAAAB)", r"mul.rz.f32\1"),
    _ptx(
        "nv-foreign-rows-in-the-last-block",
        ROTATED,
        r"selp\.b32 \t(%r\d+), (%r\d+), 0, %p\d+;",
        r"mov.b32 \t\1, \2;",
        "trymirai/uzu#277",
    ),
    _ptx("rht-not-normalised", ROTATED, r"0f3E800000", "0f3F800000"),
    _ptx("rht-one-sign-wrong", ROTATED, r"neg\.f32 \t(%r\d+), (%r\d+);", r"mov.b32 \t\1, \2;", limit=1),
    _ptx("rht-one-butterfly-wrong", ROTATED, r"sub\.rn\.f32", "add.rn.f32", limit=1),
    _choice("rht-without-signs", ROTATED, "", rht_signs=None),
    _choice("rht-rounded-to-bfloat16", ROTATED, "NVIDIA/TransformerEngine#2411", rht_rounding="bfloat16"),
    _operation("rht-left-out", ROTATED, Nvfp4Copies(Recipe()), "NVIDIA/TransformerEngine#2442"),
    _choice("nv-sixth-before-scale", NVFP4, "NVIDIA/TransformerEngine#2615", nvfp4_block_scale="sixth_times_scale"),
    _choice("nv-divided-amax-times-scale", NVFP4, "", nvfp4_block_scale="divided_amax_times_scale"),
    _choice("nv-divided-amax-over-decode-scale", NVFP4, "", nvfp4_block_scale="divided_amax_over_decode_scale"),
    _choice(
        "nv-multiplier-by-division",
        NVFP4,
        "NVIDIA/TransformerEngine#2639",
        nvfp4_multiplier="encode_scale_over_block_scale",
    ),
    _choice("nv-encode-scale-reciprocal", NVFP4, "", nvfp4_encode_scale="reciprocal_of_divided_amax"),
    _choice("nv-scale-floor", NVFP4, "NVIDIA/Model-Optimizer#1397", nvfp4_scale_floor="smallest_normal"),
    _choice("nv-nan-ignored", ROTATED, "pytorch/ao#4271", nan_policy="ignore"),
    _operation(
        "nv-rounded-to-nearest-not-stochastic",
        STOCHASTIC,
        Nvfp4Copies(Recipe(rotated=True)),
        "AMD-AGI/Primus-Turbo#365",
    ),
    _choice("sr-8-random-bits", STOCHASTIC, "", stochastic_bits=8),
    _choice("sr-16-random-bits", STOCHASTIC, "", stochastic_bits=16),
    _input("sr-seed-ignored", STOCHASTIC, None, "NVIDIA/TransformerEngine#2487", seed=0),
    _ptx("sr-carry-inverted", STOCHASTIC, r"selp\.b32 (\t%r\d+), 1, 0, ", r"selp.b32 \1, 0, 1, "),
    _ptx("sr-fraction-rounded", STOCHASTIC, r"cvt\.rzi\.u32\.f32", "cvt.rni.u32.f32"),
    _ptx("sr-one-weyl-step-left-out", STOCHASTIC, r"add\.s32 (\t%r\d+, %r\d+), -1640531527;", r"add.s32 \1, 0;"),
    _ptx("4over6-second-scale-twice", FOUR_OVER_SIX, "0f3FC00000", "0f40000000"),
    _operation("4over6-mae-for-mse", FOUR_OVER_SIX, Nvfp4Copies(Recipe(four_over_six="mae", scale_max=256.0))),
    _operation("4over6-largest-scale-448", FOUR_OVER_SIX, Nvfp4Copies(Recipe(four_over_six="mse", scale_max=448.0))),
    _operation("nv-tiles-for-blocks", NVFP4, Nvfp4Copies(Recipe(block2d=True))),
    _output(
        "nv-nibbles-swapped",
        NVFP4,
        _written("codes_rowwise", lambda codes: (codes >> 4) | (codes << 4)),
        "pytorch/ao#3123",
    ),
    _output(
        "nv-zero-block-scale-nan",
        NVFP4,
        _written("scales_rowwise", lambda scales: torch.where(scales == 0, 0x7F, scales)),
        "NVIDIA/Model-Optimizer#1633",
    ),
    _output(
        "nv-scales-one-code-more",
        NVFP4,
        _written("scales_colwise", lambda scales: torch.where(scales < 0x7E, scales + 1, scales)),
    ),
    _output(
        "nv-rotated-amax-in-bfloat16", ROTATED, _written("amax_colwise", _in_bfloat16), "NVIDIA/TransformerEngine#2411"
    ),
    Fault(
        "nv-amax-in-bfloat16",
        "output",
        NVFP4,
        "pytorch/ao#4725",
        output=_written("amax_rowwise", _in_bfloat16),
        equivalent="the amax of bfloat16 values is one of them, which rounding to bfloat16 does not change",
    ),
]

_COMPOSED = [
    _ptx("composed-bfloat16-truncated", COMPOSED, r"cvt\.rn\.bf16x2\.f32", "cvt.rz.bf16x2.f32", stage="activation"),
    _ptx("composed-ties-away", COMPOSED, _ROUND_TO_STEPS, r"fma.rn.f32\g<1>0f3F800001, \2", stage="codes"),
    _ptx("composed-sixth-eleven-ulps-off", COMPOSED, "0f3E2AAAAB", "0f3E2AAAA0", stage="scales"),
    _ptx(
        "composed-amax-before-rotation",
        COMPOSED,
        r"0f3E800000",
        "0f3E000000",
        "NVIDIA/TransformerEngine#2411",
        limit=16,
        stage="amax",
    ),
    _ptx("composed-sigmoid-constant", COMPOSED, "0fBF317218", "0fBF317219", stage="activation"),
    Fault("composed-gate-and-up-swapped", "input", COMPOSED_BACKWARD, inputs=_swap_halves, stage="activation"),
    Fault("composed-seed-ignored", "input", COMPOSED_BACKWARD, fields={"seed": 0}, stage="codes"),
    Fault(
        "composed-rotation-left-out",
        "operation",
        COMPOSED,
        operation=ActivationThenNvfp4(ActivationForward(Gated(Silu()), None), Nvfp4Copies(Recipe())),
        stage="amax",
    ),
    Fault(
        "composed-scales-one-more",
        "output",
        COMPOSED,
        output=_written("scales_rowwise", lambda scales: torch.where(scales < 0x7E, scales + 1, scales)),
        stage="scales",
    ),
]


def _swap_experts(name: str) -> Callable[[Outputs], None]:
    """The weights of the first two experts exchanged."""

    def change(tensors: Outputs) -> None:
        weights = tensors[name].clone()
        if len(weights) > 1:
            weights[:2] = weights[:2].flip(0)
        tensors[name] = weights

    return change


_LAYERS = [
    Fault("mlp-weights-of-another-expert", "input", FIRST_LAYER, inputs=_swap_experts("weights"), stage="product"),
    _ptx("mlp-sigmoid-constant", FIRST_LAYER, "0fBF317218", "0fBF317000", stage="activation"),
    _ptx("mlp-scale-rounded-down", FIRST_LAYER, r"(add\.s32 \t%r\d+, %r\d+, )2097151;", r"\g<1>0;", stage="scales"),
    Fault(
        "mlp-preactivation-one-ulp-off",
        "output",
        FIRST_LAYER,
        output=_written("preactivation", _one_ulp_off),
        stage="product",
    ),
    Fault("mlp-gradient-of-another-expert", "input", SECOND_LAYER, inputs=_swap_experts("weights"), stage="product"),
    Fault("mlp-prob-forgotten", "input", SECOND_LAYER, inputs=_drop("prob", 1.0), stage="activation"),
    Fault(
        "mlp-codes-swapped",
        "output",
        SECOND_LAYER,
        output=_written("codes_colwise", lambda codes: codes ^ 1),
        stage="codes",
    ),
    Fault("step-weights-of-another-expert", "input", STEP, inputs=_swap_experts("weights1"), stage="fc1"),
    Fault("step-second-weights-of-another-expert", "input", STEP, inputs=_swap_experts("weights2"), stage="fc2"),
    Fault("step-prob-forgotten", "input", STEP, inputs=_drop("prob", 1.0), stage="activation"),
    Fault("step-operand-of-another-expert", "input", STEP_MXFP8, inputs=_swap_experts("weights2"), stage="operands"),
    Fault(
        "step-gradient-one-ulp-off",
        "output",
        STEP,
        output=_written("dpreactivation", _one_ulp_off),
        stage="activation backward",
    ),
    Fault(
        "step-weight-gradient-in-bfloat16",
        "output",
        STEP_MXFP8,
        output=_written("dweights1", _in_bfloat16),
        stage="wgrad",
    ),
]
"""Matrix products with an activation around them, and the training step that is made of them."""

CATALOGUE: tuple[Fault, ...] = (*_PLANTED, *_MX, *_ACTIVATION, *_NV, *_COMPOSED, *_LAYERS)
"""Every fault, each with an id of its own."""
