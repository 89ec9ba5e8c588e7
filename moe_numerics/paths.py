"""The registry: everything that is verified, each path a reference, a fused kernel and what their outputs are.

A path is `op.pass.format[.variant]`. Adding one is an entry here; every command, test and report then covers it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

from moe_numerics.cases import Case, TensorSpec
from moe_numerics.contract import ALIASES, PROFILES, profile
from moe_numerics.drawing import Space
from moe_numerics.findings import Grade
from moe_numerics.operations import (
    ActivationBackward,
    ActivationForward,
    ActivationThenNvfp4,
    Mxfp8Copies,
    Nvfp4Copies,
    Operation,
)
from moe_numerics.reference import mxfp8, nvfp4
from moe_numerics.reference.activations import ACTIVATIONS, CLAMPED_SWIGLU_PRESETS, Activation
from moe_numerics.reference.contract import Contract
from moe_numerics.reference.elementwise import BOTH, Blocks
from moe_numerics.reference.formats import E4M3, E5M2, FloatFormat
from moe_numerics.reference.grouped_nvfp4 import Recipe
from moe_numerics.reference.ragged import Experts

__all__ = ["DEVICES", "OutputSpec", "Path", "PathError", "all_paths", "find_path", "match_paths"]

DEVICES = ("virtual:sm_90a", "virtual:sm_100a", "cuda")


class PathError(ValueError):
    """No such path, or a path that does not take what it was given."""


@dataclass(frozen=True)
class OutputSpec:
    """One output: its number format, its shape in words, and what its rows are.

    rows: "token" (row of the buffer), "block" (a column-wise block of 32 rows of one expert), "expert", "all" (every
    element is owned), "buffer" (the same, of scales swizzled over the whole buffer), or "transposed": rows are columns
    of the buffer, and each `columns_per_block` columns belong to a block of 16 rows of one expert.
    """

    name: str
    format: str
    shape: str
    rows: str
    columns_per_block: int = 0

    @property
    def dtype(self) -> str:
        """The torch dtype that holds it."""
        return self.format if self.format in ("bfloat16", "float32") else "uint8"

    def owned(self, experts: Experts, device: torch.device | str = "cpu") -> torch.Tensor:
        """bool, broadcastable to the output: what the path writes."""
        if self.rows == "token":
            return experts.valid_rows(device)
        if self.rows == "block":
            return experts.owned_colwise_rows(mxfp8.BLOCK, device)
        if self.rows == "transposed":
            return (
                experts.owned_colwise_rows(nvfp4.BLOCK, device).repeat_interleave(self.columns_per_block).unsqueeze(0)
            )
        return torch.ones(1, dtype=torch.bool, device=device)

    def row_expert(self, experts: Experts, device: torch.device | str = "cpu") -> torch.Tensor | None:
        """int64 [rows]: the expert of each row, -1 for none; None where rows have no expert."""
        if self.rows in ("all", "buffer", "transposed"):
            return None
        if self.rows == "token":
            return experts.row_expert(device)
        if self.rows == "expert":
            return torch.arange(len(experts), dtype=torch.int64, device=device)
        owner = torch.full((experts.colwise_rows(mxfp8.BLOCK),), -1, dtype=torch.int64, device=device)
        for expert, count in enumerate(experts.counts):
            if count:
                first = experts.colwise_row(expert, 0, mxfp8.BLOCK)
                owner[first : first - (-count // mxfp8.BLOCK)] = expert
        return owner


@dataclass(frozen=True)
class Path:
    """One thing that is verified.

    profiles: name -> the grade that its contract is offered at. layouts: those of gate and up that the path takes.
    multiple: what hidden sizes are multiples of.
    """

    id: str
    summary: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[OutputSpec, ...]
    profiles: Mapping[str, Grade]
    operation: Operation
    layouts: tuple[str, ...] = ("halves",)
    multiple: int = 32

    def output(self, name: str) -> OutputSpec:
        """The output of this name. PathError: there is none."""
        for spec in self.outputs:
            if spec.name == name:
                return spec
        known = ", ".join(spec.name for spec in self.outputs)
        raise PathError(f"{self.id} has no output {name!r}: expected one of {known}")

    def contract(self, name: str) -> Contract:
        """The contract of a profile of this path. PathError: a profile that the path does not offer."""
        full = ALIASES.get(name, name)
        if full not in PROFILES:
            raise PathError(f"profile {name!r} is unknown: expected one of {', '.join((*ALIASES, *PROFILES))}")
        if full not in self.profiles:
            raise PathError(f"{self.id} is not offered under profile {name!r}: it has {', '.join(self.profiles)}")
        return profile(full)

    def outputs_of(self, case: Case) -> tuple[OutputSpec, ...]:
        """The outputs that this case has: dprob only where it has probabilities."""
        present = self.operation.shapes(case)
        return tuple(spec for spec in self.outputs if spec.name in present)

    def experts(self, case: Case) -> Experts:
        """Which rows each expert of the case owns."""
        return Experts.from_offsets(case.offsets, case.counts if case.padded else None, case.capacity, case.alignment)

    def space(self, profile: str) -> Space:
        """The cases that are drawn for this path."""
        return Space(self.id, self.inputs, profile=profile, layouts=self.layouts, multiple=self.multiple)


_LAYOUTS = ("halves", "interleaved:32", "interleaved:64")
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


def _activation_paths(name: str, activation: Activation, variant: str = "") -> list[Path]:
    unary = activation.inputs == 1
    source = TensorSpec("x") if unary else TensorSpec("gate_up", columns=2)
    columns = "hidden" if unary else "2 * hidden"
    layouts = ("halves",) if unary else _LAYOUTS
    what = " ".join((name, *(variant[1:],) * bool(variant)))
    paths = []
    for label, element in _FORMATS.items():
        written = "bfloat16" if element is None else f"MXFP8 {element.name}, row-wise and column-wise"
        paths.append(
            Path(
                f"{name}.fwd.{label}{variant}",
                f"{what} forward, times prob, to {written}; amax of each expert",
                (source, *_RAGGED, _PROB),
                _written(element, "hidden"),
                {"suite": "exact"},
                ActivationForward(activation, element),
                layouts,
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
            )
        )
    return paths


_WITH_BIAS = ("swiglu", "clamped_swiglu", "geglu", "srelu", "silu")
"""Activations of each kind: a bias is added before an activation begins, so one of a kind speaks for the others."""


def _bias_paths(name: str, activation: Activation) -> list[Path]:
    unary = activation.inputs == 1
    source = TensorSpec("x") if unary else TensorSpec("gate_up", columns=2)
    inputs = (source, *_RAGGED, _PROB, TensorSpec("bias", kind="bias", columns=activation.inputs))
    columns = "hidden" if unary else "2 * hidden"
    paths = []
    for label in ("bf16", "mxfp8_e4m3"):
        element = _FORMATS[label]
        written = "bfloat16" if element is None else f"MXFP8 {element.name}, row-wise and column-wise"
        layouts = ("halves",) if unary else _LAYOUTS
        paths.append(
            Path(
                f"{name}.fwd.{label}.bias",
                f"{name} of inputs with bias forward, times prob, to {written}; amax of each expert",
                inputs,
                _written(element, "hidden"),
                {"suite": "exact"},
                ActivationForward(activation, element),
                layouts,
            )
        )
        paths.append(
            Path(
                f"{name}.bwd.{label}.bias",
                f"{name} of inputs with bias backward, with dprob and dbias, to {written}; amax of each expert",
                (TensorSpec("grad"), *inputs),
                (
                    *_written(element, columns),
                    OutputSpec("dprob", "float32", "[capacity]", "token"),
                    OutputSpec("dbias", "float32", f"[experts, {columns}]", "expert"),
                ),
                {"suite": "exact"},
                ActivationBackward(activation, element, bias=True),
                layouts,
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
    ".swizzled": Recipe(swizzled=True),
    ".row_scaled": Recipe(colwise=False, row_scaled=True),
    ".row_scaled.4over6_mae": Recipe(colwise=False, row_scaled=True, four_over_six="mae", scale_max=256.0),
}


def _described(recipe: Recipe) -> str:
    block = "16x16" if recipe.block2d else "1x16"
    copies = [f"row-wise {block}"] if recipe.rowwise else []
    if recipe.colwise:
        copies.append(f"transposed column-wise {'16x16' if recipe.block2d else '16x1'}{' rotated' * recipe.rotated}")
    parts = [" and ".join(copies), "with an amax for each row" if recipe.row_scaled else "each with its amax"]
    if recipe.four_over_six:
        parts.append(
            f"each block at scale 6 or 4, by {recipe.four_over_six.upper()}, scales up to {recipe.scale_max:g}"
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


@cache
def all_paths() -> tuple[Path, ...]:
    """Every path, in the order in which they are listed and run."""
    paths: list[Path] = []
    for name, activation in ACTIVATIONS.items():
        paths += _activation_paths(name, activation)
    for preset in ("deepseek", "step"):
        paths += _activation_paths("clamped_swiglu", CLAMPED_SWIGLU_PRESETS[preset], f".{preset}")
    for name in _WITH_BIAS:
        paths += _bias_paths(name, ACTIVATIONS[name])
    for element in (E4M3, E5M2):
        for name, blocks in _BLOCKS.items():
            copies = [what for what in ("rowwise", "colwise") if getattr(blocks, what)]
            shape = " in 32x32 tiles" if blocks.block2d else " in one pass" if len(copies) == 2 else ""
            shape += ", scales swizzled" * blocks.swizzled
            paths.append(
                Path(
                    f"quantize.mxfp8_{element.name.lower()}{name}",
                    f"bfloat16 to MXFP8 {element.name}, {' and '.join(copies)}{shape}; amax of each expert",
                    (TensorSpec("x"), *_RAGGED),
                    _written(element, "hidden", blocks=blocks),
                    _QUANTISE_PROFILES,
                    Mxfp8Copies(element, blocks),
                )
            )
    for name, recipe in _RECIPES.items():
        paths.append(
            Path(
                f"quantize.nvfp4{name}",
                f"bfloat16 to NVFP4: {_described(recipe)}",
                (TensorSpec("x"), *_RAGGED),
                _nvfp4_outputs(recipe),
                _nvfp4_profiles(recipe),
                Nvfp4Copies(recipe),
                multiple=nvfp4.BLOCK,
            )
        )
    return tuple(paths)


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
