"""A kernel with one wrong line fails the campaign that `verify` runs, whatever the line.

Each fault is planted in the PTX of a compiled kernel, and the campaign's own task runs its own cases on it. The same
tasks pass on the kernels as they are compiled, so it is the fault that is found.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import count

import pytest
from kernel_runs import VIRTUAL, thorough
from moe_numerics.fused import elementwise, tile
from planting import Edit, planted

from moe_numerics import campaign
from moe_numerics.campaign import Task, TaskResult, campaign_cases, run_task
from moe_numerics.paths import find_path

DEVICES = VIRTUAL if thorough() else VIRTUAL[:1]

FORWARD = "swiglu.fwd.mxfp8_e4m3"
FORWARD_BF16 = "swiglu.fwd.bf16"
BACKWARD_BF16 = "swiglu.bwd.bf16"
QUANTIZE = "quantize.mxfp8_e4m3"

ROWS = tile.ROWS * tile.LANES_PER_ROW // elementwise.THREADS
"""Rows of 8 columns that a thread holds: what the compiler unrolls for each of them."""
VALUES = ROWS * tile.VECTOR
WARPS = elementwise.THREADS // tile.FULL_WARP
PAIRS = 2 * VALUES // 2
"""Conversions of two elements at a time, for row-wise and for column-wise codes."""

E4M3_PAIR = r"cvt\.rn\.satfinite\.e4m3x2\.f32 \t(%rs\d+), (%r\d+), (%r\d+);"


@dataclass(frozen=True)
class Fault:
    """One wrong line.

    message: what the reason of the failing verdict must say, for a fault that the virtual GPU has to catch in the act.
    schedule: as of `Task`, for a fault that only some orders of warps show.
    examples: cases that are run; the first one, the gauntlet, is full of NaN and Inf, which hide a last place.
    """

    name: str
    path: str
    edit: Edit
    message: str = ""
    schedule: str | int = "fast"
    examples: int = 1


def _distances(match: re.Match[str]) -> str:
    return f"{match[1]}{ {'1': 8, '2': 4, '4': 2, '8': 1}[match[2]] }{match[3]}"


def _other_buffer(match: re.Match[str]) -> str:
    return f"_param_{ {'5': 7, '7': 5}[match[1]] }];"


FAULTS = [
    Fault(
        "scale rounded down instead of up",
        FORWARD,
        Edit(r"(add\.s32 \t%r\d+, %r\d+, )2097151;", r"\g<1>0;", ROWS + 1),
    ),
    Fault(
        "gate and up swapped",
        FORWARD,
        Edit(
            r"ld\.global\.v4\.b32 \t?\{([^}]*)\}(, \[%rd\d+\];[^{]*)ld\.global\.v4\.b32 \t?\{([^}]*)\}",
            r"ld.global.v4.b32 {\3}\2ld.global.v4.b32 {\1}",
            ROWS,
        ),
    ),
    Fault(
        "padding rows read: rows past the expert's end are not clamped to its last one",
        FORWARD,
        # The other minimum is that of the columns, whose limit is hidden - 8.
        Edit(r"(?<!-8;\n\t)min\.s32 \t(%r\d+), (%r\d+), %r\d+;", r"mov.b32 \t\1, \2;", ROWS),
    ),
    Fault(
        "NaN of another lane dropped from the amax",
        QUANTIZE,
        Edit(
            r"(shfl\.sync\.bfly\.b32 \t%r\d+, %r\d+, \d+, 31, -1;\s+abs\.f32 \t(%r\d+), %r\d+;\s+)max\.NaN\.f32",
            r"\1max.f32",
            2 * ROWS + tile.VECTOR,
        ),
    ),
    Fault(
        "amax without abs",
        QUANTIZE,
        Edit(r"abs\.f32 \t", r"mov.b32 \t", VALUES + 2 * ROWS + tile.VECTOR + WARPS + 1),
    ),
    Fault(
        "E4M3 ties rounded away from zero",
        QUANTIZE,
        Edit(E4M3_PAIR, r"or.b32 \2, \2, 1; or.b32 \3, \3, 1; \g<0>", PAIRS),
    ),
    Fault(
        "bfloat16 truncated",
        FORWARD_BF16,
        Edit(r"cvt\.rn\.bf16x2\.f32", "cvt.rz.bf16x2.f32", VALUES // 2),
    ),
    Fault(
        "values rounded to bfloat16 before they are quantised",
        FORWARD,
        Edit(
            r"abs\.f32 \t(%r\d+), (%r\d+);",
            r"cvt.rn.bf16x2.f32 \2, \2, \2; and.b32 \2, \2, -65536; \g<0>",
            VALUES + 2 * ROWS + tile.VECTOR + WARPS + 1,
        ),
    ),
    Fault(
        "row-wise and column-wise codes swapped",
        FORWARD,
        Edit(r"_param_([57])\];", _other_buffer, 2),
    ),
    Fault(
        "last partial row tile skipped",
        FORWARD,
        Edit(
            r"setp\.ge\.s32 \t(%p\d+), (%r\d+), (%r\d+);(\s+@\1 bra[^\n]*\n\s+mov\.u32 \t%r\d+, %ctaid)",
            r"add.s32 \2, \2, 31; setp.ge.s32 \1, \2, \3; add.s32 \2, \2, -31;\4",
            1,
        ),
    ),
    Fault(
        "column-wise scale written one column off",
        FORWARD,
        Edit(r"(st\.global\.b8 \t\[%rd\d+)(?!.*st\.global\.b8)", r"\1+1", 1),
    ),
    Fault(
        "shared words read that nobody wrote",
        FORWARD,
        Edit(r"st\.shared\.v4\.b32 \t\[%r\d+\+16\], [^;]*;", "", 1),
        message="uninitialised",
    ),
    Fault(
        "probability forgotten",
        FORWARD,
        Edit(
            r"(ld\.global\.v4[^;]*;\s+mul\.wide\.s32[^;]*;\s+add\.s64[^;]*;\s+)ld\.global\.b32 \t(%r\d+), [^;]*;",
            r"\1mov.b32 \2, 0f3F800000;",
            ROWS,
        ),
    ),
    Fault(
        "dprob summed in another order",
        BACKWARD_BF16,
        Edit(r"(shfl\.sync\.bfly\.b32 \t%r\d+, %r\d+, )([1248])(, 31, -1;)", _distances, 4 * ROWS),
    ),
    Fault(
        "product and sum of dprob contracted to one FMA",
        BACKWARD_BF16,
        Edit(
            r"mul\.rn\.f32 \t(%r\d+), (%r\d+), (%r\d+);(\s+)add\.rn\.f32 \t(%r\d+), (%r\d+), \1;",
            r"mul.rn.f32 \t\1, \2, \3;\4fma.rn.f32 \t\5, \2, \3, \6;",
            ROWS * (tile.VECTOR - 1),
        ),
    ),
    Fault(
        "store past the expert's end",
        FORWARD,
        Edit(r"setp\.lt\.s32( \t%p\d+, %r\d+, %r\d+;\s+and\.pred )", r"setp.le.s32\1", ROWS),
        message="outside of what the case owns",
    ),
    Fault(
        "tile at a boundary taken for the expert before",
        FORWARD,
        Edit(r"setp\.le\.s32(?= \t%p\d+, %r\d+, %r\d+;\n\$L__BB\d+_\d+:\s+vote)", "setp.lt.s32", 1),
    ),
    Fault(
        "first barrier removed",
        FORWARD,
        Edit(r"bar\.sync \t0;(?=.*bar\.sync)", "", 1),
        message="PTX line",
        schedule=1,
    ),
    Fault(
        "second barrier removed",
        FORWARD,
        Edit(r"bar\.sync \t0;(?!.*bar\.sync)", "", 1),
        message="PTX line",
        schedule=1,
    ),
    Fault(
        "a constant of the exponential's polynomial off by one ulp",
        BACKWARD_BF16,
        Edit("0f3F7FFFFB", "0f3F7FFFFA", VALUES),
        examples=5,
    ),
    Fault(
        "ln 2 of the range reduction off by one ulp",
        FORWARD_BF16,
        Edit("0fBF317218", "0fBF317219", VALUES),
    ),
    Fault(
        "FMA of the range reduction split into a product and a sum",
        BACKWARD_BF16,
        Edit(
            r"fma\.rn\.f32 \t(%r\d+), (%r\d+), 0fBF317218, (%r\d+);",
            r"mul.rn.f32 \1, \2, 0fBF317218; add.rn.f32 \1, \1, \3;",
            VALUES,
        ),
    ),
    Fault(
        "sign of zero lost",
        QUANTIZE,
        Edit(E4M3_PAIR, r"add.rn.f32 \2, \2, 0f00000000; add.rn.f32 \3, \3, 0f00000000; \g<0>", PAIRS),
    ),
    Fault(
        "subnormal products flushed to zero",
        QUANTIZE,
        Edit(r"mul\.rn\.f32", "mul.rn.ftz.f32", 2 * VALUES),
    ),
    Fault(
        "Inf gives the scale of NaN",
        QUANTIZE,
        Edit(r"(selp\.b32 \t%r\d+, )254,", r"\g<1>255,", ROWS + 1),
    ),
    Fault(
        "amax stored instead of raised",
        FORWARD_BF16,
        Edit(r"atom\.global\.max\.u32 \t%r\d+, (\[%rd\d+\], %r\d+;)", r"st.global.b32 \t\1", 1),
    ),
    Fault(
        "amax of an expert without rows never written",
        FORWARD_BF16,
        Edit(r"st\.global\.b32 \t\[%rd\d+\], 0;", "", 1),
        message="uninitialised",
    ),
]


@pytest.fixture(autouse=True)
def _first_failure_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict is asked for, not the smallest case that shows it."""
    monkeypatch.setattr(campaign, "SHRINK_ATTEMPTS", 0)


def _run(path_id: str, device: str, schedule: str | int = "fast", examples: int = 1) -> TaskResult:
    """The campaign's task for the first seed whose gauntlet has counts, probabilities, halves and int32 offsets."""
    path = find_path(path_id)
    wanted_prob = any(spec.kind == "prob" for spec in path.inputs)
    for seed in count():
        case = next(campaign_cases(path, "suite", 1, seed))
        usual = case.padded and case.prob == wanted_prob and case.alignment % 32
        if usual and case.layout == "halves" and case.offsets_dtype == "int32":
            return run_task(Task(path_id, device, "suite", examples, seed, schedule))
    raise AssertionError("unreachable")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("path", sorted({fault.path for fault in FAULTS}))
def test_kernels_without_a_fault_pass(path: str, device: str) -> None:
    outcome = _run(path, device)
    assert outcome.result.status == "pass", outcome.result.reason
    assert not outcome.failing


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "_"))
def test_a_planted_fault_fails_the_verdict(fault: Fault, device: str) -> None:
    with planted(fault.edit):
        outcome = _run(fault.path, device, fault.schedule, fault.examples)
    assert outcome.result.status == "fail", f"{fault.name}: {outcome.result.status}, {outcome.result.reason}"
    assert fault.message in outcome.result.reason
    assert outcome.failing
