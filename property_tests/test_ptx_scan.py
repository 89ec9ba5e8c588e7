"""Kernels of exact maths hold no float instruction but explicitly rounded ones.

Faults this catches: a product and a sum that the compiler contracted, arithmetic without a rounding mode (which ptxas
may contract), subnormals flushed, an approximation of the hardware, a conversion that rounds another way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from kernel_runs import ActiveDevice, few_paths, kernel_devices, thorough
from moe_numerics.fused import compilation

from moe_numerics.cases import Case
from moe_numerics.paths import Path, find_path

QUICK = ("geglu_erf.bwd.bf16", "situglu.bwd.bf16", "clamped_swiglu.bwd.bf16")
CHOSEN = few_paths() if thorough() else [*few_paths(), *(find_path(name) for name in QUICK)]
PATHS = [path for path in CHOSEN if path.maths == "exact"]

FLOAT = re.compile(r"\.(f16|f16x2|bf16|bf16x2|tf32|f32|f32x2|f64|e4m3x2|e5m2x2|e2m1x2|e2m3x2|e3m2x2|ue8m0x2)\b")
FLOAT_ONLY = re.compile(r"(ex2|lg2|sin|cos|tanh|sqrt|rsqrt|rcp|testp|copysign|call)\b")
"""Instructions that compute on floats whatever their type says, and calls, which hide what they compute."""

# An fma is one only where it is written: arithmetic with `.rn` is never contracted (PTX ISA, 9.7.3, `add`: "an add
# instruction with an explicit rounding modifier is treated conservatively by the code optimizer").
ALLOWED = (
    r"(add|sub|mul|fma)\.rn\.f32(x2)?",
    r"(div|rcp|sqrt)\.rn\.f32",
    r"(neg|abs)\.f32",
    r"(min|max)(\.NaN)?\.f32",
    r"max(\.NaN)?\.xorsign\.abs\.bf16x2",
    r"(selp|mov)\.f32",
    r"setp\.(eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan)(\.and|\.or|\.xor)?\.f32",
    r"cvt\.rn\.(bf16|bf16x2)\.f32",
    r"cvt\.f32\.bf16",
    r"cvt\.rn\.f32\.[us](16|32)",
    r"cvt\.rn\.satfinite\.(e4m3|e5m2)x2\.f32",
    r"cvt\.rn\.f16x2\.(e4m3|e5m2)x2",
    r"cvt\.f32\.f16",
    r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k\d+\.f32\.\w+\.\w+",
)
SEED = "rcp.approx.ftz.f32"

# Seed y of 1 / d, then e = 1 - d * y and y + y * e, each rounded once; the seed is used for nothing else.
CORRECTED = re.compile(
    r"rcp\.approx\.ftz\.f32 \t(?P<y>%r\d+), (?P<d>%r\d+);\s+"
    r"neg\.f32 \t(?P<n>%r\d+), (?P=d);\s+"
    r"fma\.rn\.f32 \t(?P<e>%r\d+), (?P=n), (?P=y), 0f3F800000;\s+"
    r"fma\.rn\.f32 \t%r\d+, (?P=y), (?P=e), (?P=y);"
)


def instructions(ptx: str) -> Iterator[tuple[int, str]]:
    """(line, opcode with its modifiers) of every instruction, several on a line and inline assembly included."""
    for number, line in enumerate(ptx.splitlines(), 1):
        for statement in line.partition("//")[0].split(";"):
            text = re.sub(r"^\s*([\w$]+:\s*|[{}]\s*|@!?%?\w+\s+)*", "", statement)
            match = re.match(r"[a-z][\w.:]*", text)
            if match is not None:
                yield number, match[0].rstrip(".")


def forbidden(ptx: str) -> list[str]:
    """What a kernel of exact maths must not hold, each with its line."""
    target = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
    assert target is not None
    found = []
    seeds = 0
    for number, opcode in instructions(ptx):
        if not FLOAT.search(opcode) and not FLOAT_ONLY.match(opcode):
            continue
        if opcode == SEED and target[1].startswith("sm_90"):
            seeds += 1
        elif not any(re.fullmatch(allowed, opcode) for allowed in ALLOWED):
            found.append(f"line {number}: {opcode}")
    corrected = list(CORRECTED.finditer(ptx))
    if len(corrected) != seeds:
        found.append(f"{seeds} {SEED}, {len(corrected)} of them corrected")
    for match in corrected:
        uses = len(re.findall(rf"{re.escape(match['y'])}\b", ptx[: match.end()])) - len(
            re.findall(rf"{re.escape(match['y'])}\b", ptx[: match.start()])
        )
        if uses != 4 or re.search(rf"{re.escape(match['y'])}\b", _same_kernel(ptx, match.end())):
            found.append(f"the seed {match['y']} is used uncorrected")
    return found


def _same_kernel(ptx: str, start: int) -> str:
    """The rest of the kernel: register names begin anew in the next one."""
    end = ptx.find(".entry", start)
    return ptx[start : end if end >= 0 else None]


def _compiled(path: Path, device: ActiveDevice, **choices: object) -> list[str]:
    prob = any(spec.kind == "prob" for spec in path.inputs)
    case = Case(path.id, (3,), 64, depth=path.depth_multiple, padded=True, layout=path.layouts[0], prob=prob)
    case = case.replace(**choices)
    contract = path.contract("suite", device.target)
    with compilation.recording() as compiled:
        tensors = case.tensors(path.inputs)
        outputs = path.operation.reference(case, tensors, contract)
        path.operation.fused(case, tensors, contract, outputs)
    return [each.ptx for each in compiled]


@pytest.mark.parametrize("device", kernel_devices()[:2], indirect=True)
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.id)
def test_every_float_instruction_is_explicitly_rounded(path: Path, device: ActiveDevice) -> None:
    modules = _compiled(path, device)
    assert modules
    for ptx in modules:
        assert device.name.removeprefix("virtual:") in ptx
        assert forbidden(ptx) == []


MODULE = """
.version 8.8
.target {target}
.visible .entry kernel()
{{
	.reg .b32 	%r<20>;
	{line}
	// begin inline asm
	{{ .reg .b32 t; mul.rn.f32 t, %r1, %r1; {inline} }}
	// end inline asm
$L__1: @%p1 bra $L__1;
	ret;
}}
"""
CORRECTION = (
    "rcp.approx.ftz.f32 \t%r2, %r1;\n\tneg.f32 \t%r3, %r1;\n\tfma.rn.f32 \t%r4, %r3, %r2, 0f3F800000;\n"
    "\tfma.rn.f32 \t%r5, %r2, %r4, %r2;"
)
WRONG = (
    "mul.f32 \t%r1, %r2, %r3;",
    "add.f32 \t%r1, %r2, %r3;",
    "sub.f32 \t%r1, %r2, %r3;",
    "mad.f32 \t%r1, %r2, %r3, %r4;",
    "mad.rn.f32 \t%r1, %r2, %r3, %r4;",
    "fma.rz.f32 \t%r1, %r2, %r3, %r4;",
    "fma.rn.ftz.f32 \t%r1, %r2, %r3, %r4;",
    "fma.rn.sat.f32 \t%r1, %r2, %r3, %r4;",
    "mul.rn.ftz.f32 \t%r1, %r2, %r3;",
    "add.f32x2 \t%rd1, %rd2, %rd3;",
    "fma.rn.ftz.f32x2 \t%rd1, %rd2, %rd3, %rd4;",
    "mul.rn.f64 \t%rd1, %rd2, %rd3;",
    "fma.rn.bf16x2 \t%r1, %r2, %r3, %r4;",
    "mul.f16x2 \t%r1, %r2, %r3;",
    "div.full.f32 \t%r1, %r2, %r3;",
    "div.approx.f32 \t%r1, %r2, %r3;",
    "sqrt.approx.f32 \t%r1, %r2;",
    "rsqrt.approx.ftz.f32 \t%r1, %r2;",
    "ex2.approx.ftz.f32 \t%r1, %r2;",
    "ex2.approx.ftz.bf16x2 \t%r1, %r2;",
    "lg2.approx.f32 \t%r1, %r2;",
    "tanh.approx.f32 \t%r1, %r2;",
    "rcp.approx.ftz.f32 \t%r1, %r2;",
    "max.ftz.f32 \t%r1, %r2, %r3;",
    "setp.lt.ftz.f32 \t%p1, %r2, %r3;",
    "cvt.rz.bf16x2.f32 \t%r1, %r2, %r3;",
    "cvt.rn.satfinite.bf16x2.f32 \t%r1, %r2, %r3;",
    "cvt.rs.satfinite.e4m3x4.f32 \t%r1, {%r2, %r3, %r4, %r5}, %r6;",
    "cvt.rn.relu.satfinite.e4m3x2.f32 \t%rs1, %r2, %r3;",
    "cvt.rzi.ftz.s32.f32 \t%r1, %r2;",
    "call.uni (%r1), __nv_expf, (%r2);",
    CORRECTION.replace("%r4, %r2;", "%r4, %r3;"),
    CORRECTION + "\n\tmul.rn.f32 \t%r6, %r2, %r2;",
)


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_instruction_is_found(line: str) -> None:
    assert forbidden(MODULE.format(target="sm_90a", line=line, inline=""))
    if "\n" not in line:
        assert forbidden(MODULE.format(target="sm_90a", line="", inline=line)), "in inline assembly"


def test_the_corrected_seed_is_allowed_on_sm_90_only() -> None:
    assert forbidden(MODULE.format(target="sm_90a", line=CORRECTION, inline="")) == []
    assert forbidden(MODULE.format(target="sm_100a", line=CORRECTION, inline=""))
