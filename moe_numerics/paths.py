"""The registry: everything that is verified, each path a reference, a fused kernel and what their outputs are.

A path is `op.pass.format[.variant]`. Adding one is an entry here; every command, test and report then covers it.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from functools import cache

from moe_numerics.cases import TensorSpec
from moe_numerics.contract import PROFILES
from moe_numerics.findings import Grade
from moe_numerics.gemm_paths import gemm_paths
from moe_numerics.operations import (
    ActivationBackward,
    ActivationForward,
    ActivationThenNvfp4,
    Mxfp8Copies,
    Nvfp4Copies,
)
from moe_numerics.path_model import DEVICES, OutputSpec, Path, PathError
from moe_numerics.reference import nvfp4
from moe_numerics.reference.activations import ACTIVATIONS, CLAMPED_SWIGLU_PRESETS, Activation
from moe_numerics.reference.elementwise import BOTH, Blocks
from moe_numerics.reference.formats import E4M3, E5M2, FloatFormat
from moe_numerics.reference.grouped_nvfp4 import Recipe
from moe_numerics.step_paths import step_paths

__all__ = ["DEVICES", "OutputSpec", "Path", "PathError", "all_paths", "find_path", "match_paths"]

_LAYOUTS = ("halves", "interleaved:32", "interleaved:64", "interleaved:96", "interleaved:128")
_RAGGED = (TensorSpec("offsets", kind="offsets"), TensorSpec("counts", kind="counts"))
_PROB = TensorSpec("prob", "float32", "prob")


def _swizzled(name: str, form: str, lines: str, blocks: str) -> OutputSpec:
    """Scales in tiles of 128 lines by 4 blocks, the bytes between them included."""
    return OutputSpec(name, form, f"[tiles of 128 {lines} * tiles of 4 {blocks} * 512]", "buffer")


def _written(element: FloatFormat | None, columns: str, blocks: Blocks = BOTH) -> tuple[OutputSpec, ...]:
    amax = OutputSpec("amax", "float32", "[experts]", "expert")
    if element is None:
        return OutputSpec("out", "bfloat16", f"[capacity, {columns}]", "token"), amax
    outputs: list[OutputSpec] = []
    if blocks.rowwise:
        outputs += [
            OutputSpec("codes_rowwise", element.name, f"[capacity, {columns}]", "token"),
            _swizzled("scales_rowwise", "E8M0", "rows", "blocks of 32 columns")
            if blocks.swizzled
            else OutputSpec("scales_rowwise", "E8M0", f"[capacity, {columns} / 32]", "token"),
        ]
    if blocks.colwise:
        outputs += [
            OutputSpec("codes_colwise", element.name, f"[capacity, {columns}]", "token"),
            _swizzled("scales_colwise", "E8M0", "columns", "blocks of 32 rows")
            if blocks.swizzled
            else OutputSpec("scales_colwise", "E8M0", f"[blocks of 32 rows, {columns}]", "block"),
        ]
    return (*outputs, amax)


_FORMATS: dict[str, FloatFormat | None] = {"bf16": None, "mxfp8_e4m3": E4M3, "mxfp8_e5m2": E5M2}
_QUANTISE_PROFILES: dict[str, Grade] = dict.fromkeys(PROFILES, "exact")


_KINDS = ("swiglu", "clamped_swiglu", "geglu", "srelu", "silu")
"""Activations of each kind. What follows an activation is the same code for all: a run of everything takes each to
bfloat16 and MXFP8 E4M3, these to MXFP8 E5M2 too, the first of them with a bias and in fast maths."""

_TO_NVFP4 = ("swiglu", "srelu")
"""Those that go on to NVFP4 in a run of everything, with a gate and without: kernels that other paths have alone."""


def _activation_paths(name: str, activation: Activation, variant: str = "") -> list[Path]:
    unary = activation.inputs == 1
    source = TensorSpec("x") if unary else TensorSpec("gate_up", columns=2)
    columns = "hidden" if unary else "2 * hidden"
    layouts = ("halves",) if unary else _LAYOUTS
    what = " ".join((name, *(variant[1:],) * bool(variant)))
    paths = []
    for label, element in _FORMATS.items():
        written = "bfloat16" if element is None else f"MXFP8 {element.name}, row-wise and column-wise"
        extended = bool(variant) or (element is E5M2 and name not in _KINDS)
        paths.append(
            Path(
                f"{name}.fwd.{label}{variant}",
                f"{what} forward, times prob, to {written}; amax of each expert",
                (source, *_RAGGED, _PROB),
                _written(element, "hidden"),
                {"suite": "exact"},
                ActivationForward(activation, element),
                layouts,
                extended=extended,
            )
        )
        paths.append(
            Path(
                f"{name}.bwd.{label}{variant}",
                f"{what} backward with prob and dprob, to {written}; amax of each expert",
                (TensorSpec("grad"), source, *_RAGGED, _PROB),
                (*_written(element, columns), OutputSpec("dprob", "float32", "[capacity]", "token")),
                {"suite": "exact"},
                ActivationBackward(activation, element),
                layouts,
                extended=extended,
            )
        )
    composed = (
        ("fwd", "forward, times prob", ActivationForward(activation, None), (source,), "hidden", Recipe(rotated=True)),
        (
            "bwd",
            "backward with prob and dprob",
            ActivationBackward(activation, None),
            (TensorSpec("grad"), source),
            columns,
            Recipe(rotated=True, stochastic=True),
        ),
    )
    for direction, words, operation, inputs, width, recipe in composed:
        dprob = (OutputSpec("dprob", "float32", "[capacity]", "token"),) if direction == "bwd" else ()
        paths.append(
            Path(
                f"{name}.{direction}.nvfp4{variant}",
                f"{what} {words}, to bfloat16, then NVFP4: {_described(recipe)}",
                (*inputs, *_RAGGED, _PROB),
                (*_written(None, width), *dprob, *_nvfp4_outputs(recipe)),
                {"suite": "exact"},
                ActivationThenNvfp4(operation, Nvfp4Copies(recipe)),
                layouts,
                extended=name not in _TO_NVFP4 or bool(variant),
            )
        )
    return paths


def _bias_paths(name: str, activation: Activation, variant: str = "") -> list[Path]:
    unary = activation.inputs == 1
    source = TensorSpec("x") if unary else TensorSpec("gate_up", columns=2)
    inputs = (source, *_RAGGED, _PROB, TensorSpec("bias", kind="bias", columns=activation.inputs))
    columns = "hidden" if unary else "2 * hidden"
    what = " ".join((name, *(variant[1:],) * bool(variant)))
    paths = []
    for label in ("bf16", "mxfp8_e4m3"):
        element = _FORMATS[label]
        written = "bfloat16" if element is None else f"MXFP8 {element.name}, row-wise and column-wise"
        layouts = ("halves",) if unary else _LAYOUTS
        extended = name != _KINDS[0] or bool(variant)
        paths.append(
            Path(
                f"{name}.fwd.{label}{variant}.bias",
                f"{what} of inputs with bias forward, times prob, to {written}; amax of each expert",
                inputs,
                _written(element, "hidden"),
                {"suite": "exact"},
                ActivationForward(activation, element),
                layouts,
                extended=extended,
            )
        )
        paths.append(
            Path(
                f"{name}.bwd.{label}{variant}.bias",
                f"{what} of inputs with bias backward, with dprob and dbias, to {written}; amax of each expert",
                (TensorSpec("grad"), *inputs),
                (
                    *_written(element, columns),
                    OutputSpec("dprob", "float32", "[capacity]", "token"),
                    OutputSpec("dbias", "float32", f"[experts, {columns}]", "expert"),
                ),
                {"suite": "exact"},
                ActivationBackward(activation, element, bias=True),
                layouts,
                extended=extended,
            )
        )
    return paths


def _block_paths(name: str, activation: Activation) -> list[Path]:
    """An activation to one MXFP8 copy, or to copies with swizzled scales."""
    paths = []
    for suffix, words, blocks in (
        (".swizzled", "row-wise and column-wise, scales swizzled", Blocks(swizzled=True)),
        (".rowwise", "row-wise", Blocks(colwise=False)),
        (".colwise", "column-wise", Blocks(rowwise=False)),
    ):
        for path in _activation_paths(name, activation):
            if isinstance(path.operation, ActivationForward) and path.operation.element is E4M3:
                dprob = tuple(spec for spec in path.outputs if spec.name == "dprob")
                columns = "hidden" if not dprob or activation.inputs == 1 else "2 * hidden"
                paths.append(
                    dataclasses.replace(
                        path,
                        id=path.id + suffix,
                        summary=path.summary.replace("row-wise and column-wise", words),
                        outputs=(*_written(E4M3, columns, blocks), *dprob),
                        operation=dataclasses.replace(path.operation, blocks=blocks),
                        extended=name != "swiglu" or suffix != ".swizzled",
                    )
                )
    return paths


_BLOCKS = {
    "": BOTH,
    ".rowwise": Blocks(colwise=False),
    ".colwise": Blocks(rowwise=False),
    ".32x32": Blocks(block2d=True),
    ".swizzled": Blocks(swizzled=True),
}


def _mxfp8_path(element: FloatFormat, name: str) -> Path:
    blocks = _BLOCKS[name]
    copies = [what for what in ("rowwise", "colwise") if getattr(blocks, what)]
    shape = " in 32x32 tiles" if blocks.block2d else " in one pass" if len(copies) == 2 else ""
    shape += ", scales swizzled" * blocks.swizzled
    return Path(
        f"quantize.mxfp8_{element.name.lower()}{name}",
        f"bfloat16 to MXFP8 {element.name}, {' and '.join(copies)}{shape}; amax of each expert",
        (TensorSpec("x"), *_RAGGED),
        _written(element, "hidden", blocks=blocks),
        _QUANTISE_PROFILES,
        Mxfp8Copies(element, blocks),
    )


def _other_scale(element: FloatFormat, rule: str) -> Path:
    """The path of a scale rule that no profile has; torchao offers it beside its own."""
    path = _mxfp8_path(element, "")
    return dataclasses.replace(
        path,
        id=f"{path.id}.{rule}",
        summary=f"{path.summary}; scale rule {rule}",
        profiles={"suite": "exact", "torchao": "exact"},
        overrides={"scale_rule": rule},
    )


_RECIPES = {
    "": Recipe(),
    ".rowwise": Recipe(colwise=False),
    ".colwise": Recipe(rowwise=False),
    ".rht": Recipe(rotated=True),
    ".rht_colwise": Recipe(rowwise=False, rotated=True),
    ".16x16": Recipe(block2d=True),
    ".sr": Recipe(stochastic=True),
    ".rht.sr": Recipe(rotated=True, stochastic=True),
    ".4over6_mae": Recipe(four_over_six="mae", scale_max=256.0),
    ".4over6_mse": Recipe(four_over_six="mse", scale_max=256.0),
    ".4over6_mae.448": Recipe(colwise=False, four_over_six="mae"),
    ".4over6_mse.448": Recipe(colwise=False, four_over_six="mse"),
    ".16x16.4over6_mae": Recipe(block2d=True, four_over_six="mae", scale_max=256.0),
    ".16x16.4over6_mse": Recipe(block2d=True, four_over_six="mse", scale_max=256.0),
    ".swizzled": Recipe(swizzled=True),
    ".rht.swizzled": Recipe(rotated=True, swizzled=True),
    ".row_scaled": Recipe(colwise=False, row_scaled=True),
    ".row_scaled.4over6_mae": Recipe(colwise=False, row_scaled=True, four_over_six="mae", scale_max=256.0),
    ".row_scaled.4over6_mse.448": Recipe(colwise=False, row_scaled=True, four_over_six="mse"),
}

_EXTENDED_RECIPES = (
    ".4over6_mae", ".4over6_mae.448", ".4over6_mse.448", ".16x16.4over6_mae", ".16x16.4over6_mse",
    ".row_scaled.4over6_mae",
)  # fmt: skip
"""Other choices of what `.4over6_mse`, `.16x16` and `.row_scaled.4over6_mse.448` have: long to compile."""


def _described(recipe: Recipe) -> str:
    block = "16x16" if recipe.block2d else "1x16"
    copies = [f"row-wise {block}"] if recipe.rowwise else []
    if recipe.colwise:
        copies.append(f"transposed column-wise {'16x16' if recipe.block2d else '16x1'}{' rotated' * recipe.rotated}")
    parts = [" and ".join(copies), "with an amax for each row" if recipe.row_scaled else "each with its amax"]
    if recipe.four_over_six:
        what = "tile" if recipe.block2d else "block"
        parts.append(
            f"each {what} at scale 6 or 4, by {recipe.four_over_six.upper()}, scales up to {recipe.scale_max:g}"
        )
    if recipe.stochastic:
        parts.append("rounded stochastically (exact given the seed)")
    return ", ".join(parts) + ", scales swizzled" * recipe.swizzled


def _nvfp4_outputs(recipe: Recipe) -> tuple[OutputSpec, ...]:
    outputs: list[OutputSpec] = []
    if recipe.rowwise:
        outputs += [
            OutputSpec("codes_rowwise", "E2M1x2", "[capacity, hidden / 2]", "token"),
            _swizzled("scales_rowwise", "E4M3", "rows", "blocks of 16 columns")
            if recipe.swizzled
            else OutputSpec("scales_rowwise", "E4M3", "[capacity, hidden / 16]", "token"),
            OutputSpec("amax_rowwise", "float32", "[capacity]", "token")
            if recipe.row_scaled
            else OutputSpec("amax_rowwise", "float32", "[1] or [experts]", "all"),
        ]
    if recipe.colwise:
        outputs += [
            OutputSpec("codes_colwise", "E2M1x2", "[hidden, blocks of 16 rows * 8]", "transposed", 8),
            _swizzled("scales_colwise", "E4M3", "columns", "blocks of 16 rows")
            if recipe.swizzled
            else OutputSpec("scales_colwise", "E4M3", "[hidden, blocks of 16 rows]", "transposed", 1),
            OutputSpec("amax_colwise", "float32", "[1] or [experts]", "all"),
        ]
    return tuple(outputs)


def _nvfp4_profiles(recipe: Recipe) -> dict[str, Grade]:
    """Profiles that have the recipe: the kernels make the random bits; four over six has a scale order of its own."""
    offered: dict[str, Grade] = {}
    for name, known in PROFILES.items():
        ours = known.contract.stochastic_source == "philox" or not recipe.stochastic
        ordered = known.contract.nvfp4_encode_scale == "divide_2688" or recipe.four_over_six is None
        if ours and ordered:
            offered[name] = "exact"
    return offered


_FAST = ("silu", "gelu", "qgelu", "swiglu", "geglu", "qgeglu", "clamped_swiglu")
"""Activations that have a form in fast maths and are offered in it."""


def _nvfp4_path(name: str, recipe: Recipe) -> Path:
    return Path(
        f"quantize.nvfp4{name}",
        f"bfloat16 to NVFP4: {_described(recipe)}",
        (TensorSpec("x"), *_RAGGED),
        _nvfp4_outputs(recipe),
        _nvfp4_profiles(recipe),
        Nvfp4Copies(recipe),
        multiple=nvfp4.BLOCK,
        extended=name in _EXTENDED_RECIPES,
    )


def _per_expert(name: str, extended: bool) -> Path:
    """The path of a recipe with an amax for each expert under every profile."""
    path = _nvfp4_path(name, _RECIPES[name])
    outputs = tuple(
        dataclasses.replace(spec, shape="[experts]", rows="expert") if spec.rows == "all" else spec
        for spec in path.outputs
    )
    return dataclasses.replace(
        path,
        id=f"{path.id}.per_expert",
        summary=f"{path.summary}; an amax for each expert",
        outputs=outputs,
        operation=Nvfp4Copies(_RECIPES[name], "expert"),
        extended=extended,
    )


def _fast_paths(name: str, activation: Activation, variant: str = "") -> list[Path]:
    """The paths of an activation to bfloat16 and to MXFP8 E4M3, in fast maths."""
    own = (path for path in _activation_paths(name, activation, variant) if ".nvfp4" not in path.id)
    return [
        dataclasses.replace(
            path,
            id=f"{path.id}.fast",
            summary=f"{path.summary}; fast maths",
            profiles={"suite": "bounded"},
            overrides={"maths": "fast"},
            extended=name != _KINDS[0] or bool(variant),
        )
        for path in own
        if ".mxfp8_e5m2" not in path.id
    ]


@cache
def all_paths() -> tuple[Path, ...]:
    """Every path, in the order in which they are listed and run."""
    paths: list[Path] = []
    for name, activation in ACTIVATIONS.items():
        paths += _activation_paths(name, activation)
        paths += _bias_paths(name, activation)
    for preset in ("deepseek", "step"):
        paths += _activation_paths("clamped_swiglu", CLAMPED_SWIGLU_PRESETS[preset], f".{preset}")
        paths += _bias_paths("clamped_swiglu", CLAMPED_SWIGLU_PRESETS[preset], f".{preset}")
    for name in _FAST:
        paths += _fast_paths(name, ACTIVATIONS[name])
    for preset in ("deepseek", "step"):
        paths += _fast_paths("clamped_swiglu", CLAMPED_SWIGLU_PRESETS[preset], f".{preset}")
    for name in _KINDS:
        paths += _block_paths(name, ACTIVATIONS[name])
    paths += [_mxfp8_path(element, name) for element in (E4M3, E5M2) for name in _BLOCKS]
    paths += [_other_scale(element, rule) for element in (E4M3, E5M2) for rule in ("ceil", "even")]
    paths += [_nvfp4_path(name, recipe) for name, recipe in _RECIPES.items()]
    paths += [_per_expert(name, name != ".rht") for name in ("", ".rht", ".rht.sr")]
    return (*paths, *gemm_paths(), *step_paths())


def find_path(path_id: str) -> Path:
    """The path of this id. PathError: there is none, with the ids that come near."""
    for path in all_paths():
        if path.id == path_id:
            return path
    import difflib

    near = difflib.get_close_matches(path_id, [path.id for path in all_paths()], 3)
    hint = f"did you mean {' or '.join(near)}?" if near else "`moe-numerics list` shows all"
    raise PathError(f"path {path_id!r} is unknown: {hint}")


def match_paths(pattern: str) -> list[Path]:
    """The paths whose id matches a shell pattern. PathError: none does."""
    matching = [path for path in all_paths() if fnmatch.fnmatchcase(path.id, pattern)]
    if not matching:
        raise PathError(f"--paths {pattern!r} matches no path: `moe-numerics list` shows all {len(all_paths())}")
    return matching
