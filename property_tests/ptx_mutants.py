"""Mutants of the fused kernels' PTX, made by rule: one line of source each, drawn from all that a rule reaches.

The written catalogue plants faults that somebody thought of; these are whatever a rule reaches. Compilers unroll, so a
line of source is several instructions: those of one kernel that look the same but for registers, as do the instructions
that give their operands and those that use their results. A mutant changes them all, and belongs to one compiled
module, so it runs on cases that share a compilation.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from faults import Fault

from moe_numerics.campaign import campaign_cases
from moe_numerics.cases import Case
from moe_numerics.devices import open_device
from moe_numerics.drawing import draw_cases
from moe_numerics.paths import find_path
from moe_numerics.virtual_gpu.gpu import VirtualGPU

__all__ = ["MUTATED_PATHS", "RULES", "Mutant", "cases_of", "launched_modules", "mutants"]

DEVICE = "virtual:sm_90a"
SITES = 3
"""Lines of source drawn for each rule and path."""

MUTATED_PATHS = (
    "swiglu.fwd.bf16",
    "swiglu.bwd.mxfp8_e4m3",
    "geglu.bwd.bf16",
    "situglu.fwd.mxfp8_e5m2",
    "clamped_swiglu.fwd.bf16.bias",
    "quantize.mxfp8_e4m3",
    "quantize.nvfp4",
    "quantize.nvfp4.rht.sr",
    "swiglu.fwd.nvfp4",
)
"""Paths that between them have every kernel body: activations of each kind both ways, each quantiser, two in a row."""


@dataclass(frozen=True)
class Rule:
    """A mutation: the instructions that it reaches, as a pattern of a line, and what becomes of one."""

    name: str
    pattern: str
    change: Callable[[re.Match[str]], str]


def _other_end(match: re.Match[str]) -> str:
    swapped = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt"}[match[2]]
    return f"{match[1]}{swapped}{match[3]}"


def _last_bit(match: re.Match[str]) -> str:
    return f"{match[1]}0f{int(match[2], 16) ^ 1:08X}{match[3]}"


RULES = (
    Rule(
        "rounding of a conversion",
        r"(.*\bcvt\.)(rni|rn|rzi|rz)(\.(?!satfinite).*)",
        lambda m: m[1] + {"rn": "rz", "rz": "rn", "rni": "rzi", "rzi": "rni"}[m[2]] + m[3],
    ),
    Rule("NaN dropped", r"(.*\b(?:max|min))\.NaN(\.f32.*)", lambda m: m[1] + m[2]),
    Rule(
        "fma split",
        r"(\s*)fma\.rn\.f32 \t(%r\d+), (\S+), (\S+), (?!\2;)(\S+);",
        lambda m: f"{m[1]}mul.rn.f32 \t{m[2]}, {m[3]}, {m[4]}; add.rn.f32 \t{m[2]}, {m[2]}, {m[5]};",
    ),
    Rule("abs dropped", r"(\s*)abs\.f32 (.*)", lambda m: f"{m[1]}mov.b32 {m[2]}"),
    Rule("bound off by one", r"(.*\bsetp\.)(lt|le|gt|ge)(\.[su]\d+ .*)", _other_end),
    Rule("barrier dropped", r"(\s*)(?:bar|barrier)\.\S*sync\S*[^;]*;", lambda m: m[1]),
    Rule("constant off by one ulp", r"(.*[ \t,])0f([0-9A-F]{8})(.*)", _last_bit),
)
"""In the order in which they are reported."""


@dataclass(frozen=True)
class Mutant(Fault):
    """A fault in one module. module: SHA-256 of its PTX; rule: name of the rule.

    changed: what becomes of lines, by their number from 1. before, after: the first of them.
    """

    rule: str = ""
    module: str = ""
    changed: Mapping[int, str] = field(default_factory=dict)
    before: str = ""
    after: str = ""

    @property
    def edits(self) -> bool:
        return True

    def edit(self, ptx: str) -> tuple[str, int]:
        if _sha256(ptx) != self.module:
            return ptx, 0
        lines = ptx.split("\n")
        for number, line in self.changed.items():
            lines[number - 1] = line
        return "\n".join(lines), len(self.changed)


def _sha256(ptx: str) -> str:
    return hashlib.sha256(ptx.encode()).hexdigest()


def launched_modules(path_id: str) -> dict[str, str]:
    """PTX by SHA-256 of what the path's first default case launches."""
    modules: dict[str, str] = {}
    launch = VirtualGPU.launch_raw

    def recorded(self: VirtualGPU, ptx: str, kernel: str, *arguments: Any, **options: Any) -> None:
        modules[_sha256(ptx)] = ptx
        launch(self, ptx, kernel, *arguments, **options)

    path, device = find_path(path_id), open_device(DEVICE)
    VirtualGPU.launch_raw = recorded  # type: ignore[method-assign]
    try:
        with device.activate():
            device.run(path, next(iter(cases_of(path_id, 1))), path.contract("suite"))
    finally:
        VirtualGPU.launch_raw = launch  # type: ignore[method-assign]
    return modules


def cases_of(path_id: str, count: int, seed: int = 0) -> Iterator[Case]:
    """Cases that share the compilation of the path's default ones: those first, then drawn ones."""
    path = find_path(path_id)
    fixed = list(campaign_cases(path, "suite", min(count, 3), 0))
    yield from fixed
    first, space = fixed[0], path.space("suite")
    same = replace(
        space,
        layouts=(first.layout,),
        paddings=(first.padded,),
        probs=(first.prob,),
        offsets_dtypes=(first.offsets_dtype,),
        alignments=tuple(a for a in space.alignments if (a % 32 == 0) == (first.alignment % 32 == 0)),
        multiple=max(path.multiple, int(first.layout.partition(":")[2] or 1)),
    )
    yield from draw_cases(max(count - 3, 0), seed, same)


def _shape(line: str) -> str:
    """The line without the names of its registers and labels."""
    return re.sub(r"%[a-z]+\d+|\$L\w+", "_", line.strip())


def _surroundings(lines: list[str]) -> list[Any]:
    """Of each line of a module: its kernel, its shape, and those of the lines next to it in the flow of values."""
    kernel, kernels = 0, []
    given: dict[tuple[int, str], set[str]] = {}
    used: dict[tuple[int, str], set[str]] = {}
    registers = []
    for line in lines:
        kernel += ".entry" in line
        kernels.append(kernel)
        found = [] if line.lstrip().startswith(".") else re.findall(r"%(?:r|rd|rs|p|f|fd)\d+", line)
        registers.append(found)
        stores = re.match(r"\s*(?:@!?%p\d+\s+)?(?:st|red|bra|bar)\b", line) is not None
        for place, register in enumerate(found):
            (given if place == 0 and not stores else used).setdefault((kernel, register), set()).add(_shape(line))
    return [
        (
            kernel,
            _shape(line),
            tuple(frozenset(given.get((kernel, register), ())) for register in found[1:]),
            tuple(frozenset(used.get((kernel, register), ())) for register in found[:1]),
        )
        for line, kernel, found in zip(lines, kernels, registers, strict=True)
    ]


def _sites(ptx: str, rule: Rule) -> list[dict[int, str]]:
    """What becomes of lines, by number from 1, for each line of source that the rule reaches."""
    lines = ptx.split("\n")
    places: dict[Any, dict[int, str]] = {}
    for number, (line, key) in enumerate(zip(lines, _surroundings(lines), strict=True), 1):
        match = re.fullmatch(rule.pattern, line)
        if match is not None:
            places.setdefault(key, {})[number] = rule.change(match)
    return list(places.values())


@cache
def mutants(path_id: str) -> tuple[Mutant, ...]:
    """The mutants of a path: of each rule `SITES` drawn lines of source of all in its kernels, or all of fewer."""
    made = []
    modules = launched_modules(path_id)
    for rule in RULES:
        sites = [(module, place) for module, ptx in modules.items() for place in _sites(ptx, rule)]
        drawn = random.Random(f"{path_id} {rule.name}").sample(sites, min(SITES, len(sites)))
        for module, changed in sorted(drawn, key=lambda site: (list(modules).index(site[0]), min(site[1]))):
            first = min(changed)
            before = modules[module].split("\n")[first - 1].strip()
            name = f"{path_id}:{list(modules).index(module) + 1}:{first} {rule.name}"
            made.append(
                Mutant(
                    name,
                    "mutant",
                    path_id,
                    rule=rule.name,
                    module=module,
                    changed=changed,
                    before=before,
                    after=changed[first].strip(),
                )
            )
    return tuple(made)
