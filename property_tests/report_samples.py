"""Reports to test with: realistic ones, and drawn ones with hostile text and extreme numbers."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import strategies as st

from moe_numerics.compare import Finding, compare_output, merge, unchecked_output
from moe_numerics.report import (
    Environment,
    Kernel,
    OutputResult,
    PathResult,
    Report,
    json_report,
)

ENVIRONMENT = Environment(
    versions={
        "python": "3.11.9",
        "moe-numerics": "0.1.0",
        "torch": "2.13.0",
        "nvidia-cutlass-dsl": "4.8.1",
        "numpy": "2.4.0",
        "hypothesis": "6.140.2",
        "pyptx": "0.1.1",
    },
    device="virtual:sm_90a, virtual:sm_100a",
    driver=None,
    seed=20250611,
    command="moe-numerics verify --seed 20250611",
    platform="Linux x86_64",
    started="2025-06-11T08:30:12+00:00",
    seconds=94.31,
)


EVIDENCE = {
    "virtual:sm_90a": "virtual, agrees with silicon",
    "virtual:sm_100a": "virtual, manual evidence",
    "cuda": "silicon",
}


ACTIVATION_OUTPUTS = (
    ("codes_rowwise", "E4M3", 128),
    ("scales_rowwise", "E8M0", 4),
    ("codes_colwise", "E4M3", 128),
    ("scales_colwise", "E8M0", 128),
    ("amax", "float32", 1),
)


BF16_OUTPUTS = (("out", "bfloat16", 128),)


BACKWARD_OUTPUTS = (("dgate_up", "bfloat16", 256), ("dprob", "float32", 1))


PATHS = {
    "swiglu.fwd.bf16": BF16_OUTPUTS,
    "swiglu.fwd.mxfp8_e4m3": ACTIVATION_OUTPUTS,
    "swiglu.bwd.bf16": BACKWARD_OUTPUTS,
    "swiglu.bwd.mxfp8_e4m3": (*ACTIVATION_OUTPUTS[:4], ("dprob", "float32", 1)),
}


ROWS = 352


ROW_EXPERT = torch.repeat_interleave(torch.arange(8), torch.tensor([1, 31, 32, 33, 127, 0, 128, 0]))


def tensor(number_format: str, columns: int, seed: int) -> torch.Tensor:
    """Some output of an activation path, [352, columns]."""
    generator = torch.Generator().manual_seed(seed)
    if number_format in ("E4M3", "E8M0"):
        return torch.randint(0, 127, (ROWS, columns), generator=generator, dtype=torch.uint8)
    values = torch.randn(ROWS, columns, generator=generator)
    return values.bfloat16() if number_format == "bfloat16" else values


def kernel(path: str, device: str) -> Kernel:
    target = "sm_100a" if "sm_100a" in device else "sm_90a"
    return Kernel(hashlib.sha256(f"{path} {target}".encode()).hexdigest(), target, path.replace(".", "_"))


def equal_findings(outputs: tuple[tuple[str, str, int], ...], cases: int) -> list[Finding]:
    findings = []
    for name, number_format, columns in outputs:
        value = tensor(number_format, columns, 0)
        one = compare_output(name, value, value.clone(), format=number_format, row_expert=ROW_EXPERT)
        findings.append(merge([one] * cases))
    return findings


def path_result(path: str, device: str, findings: list[Finding], **more: Any) -> PathResult:
    settings: dict[str, Any] = {"profile": "suite", "maths": "exact", "seconds": round(1.0 + len(path) / 7, 3), **more}
    return PathResult.from_findings(
        path,
        device,
        cases=24,
        findings=findings,
        kernels=(kernel(path, device),),
        reproduce=f"moe-numerics verify --paths {path} --device {device} --seed 20250611",
        evidence=EVIDENCE[device],
        **settings,
    )


def bounded_finding() -> Finding:
    """A fast-maths output: a third of the elements differ by a ULP, all inside the bound."""
    expected = tensor("bfloat16", 128, 3)
    oracle = expected.double() * (1 + 2**-10 * torch.sin(torch.arange(ROWS * 128).reshape(ROWS, 128)).double())
    got = (expected.double() * (1 + 2**-8.4 * torch.cos(torch.arange(128)).double())).bfloat16()
    return compare_output(
        "out", expected, got, row_expert=ROW_EXPERT, oracle=oracle, bound=expected.double().abs() * 2**-6.9
    )


@functools.cache
def passing_report() -> Report:
    """All outputs bit-equal on both virtual GPUs, a fast-maths path with bounded outputs, some unchecked."""
    rows = []
    for path, outputs in PATHS.items():
        for device in ("virtual:sm_90a", "virtual:sm_100a"):
            findings = equal_findings(outputs, 24)
            if path == "swiglu.fwd.mxfp8_e4m3":
                findings.append(unchecked_output("workspace", 4096, "scratch memory: its content is not specified"))
            rows.append(path_result(path, device, findings))
    for device in ("virtual:sm_90a", "virtual:sm_100a"):
        rows.append(path_result("swiglu.fwd.bf16", device, [merge([bounded_finding()] * 24)], maths="fast"))
    return Report(ENVIRONMENT, tuple(rows))


@functools.cache
def failing_report() -> Report:
    """Two faults (a scale rounded down, a write past a tail), a path that crashed and one left out."""
    rows = list(passing_report().paths)
    at = next(i for i, row in enumerate(rows) if row.id == "swiglu.fwd.mxfp8_e4m3" and "100a" in row.device)
    findings = equal_findings(ACTIVATION_OUTPUTS, 24)
    expected = tensor("E8M0", 4, 0)
    floor = torch.where((torch.arange(ROWS * 4).reshape(ROWS, 4) * 7919) % 11 < 3, expected - 1, expected)
    wrong_scale = compare_output("scales_rowwise", expected, floor, format="E8M0", row_expert=ROW_EXPERT)
    codes = tensor("E4M3", 128, 0)
    doubled = torch.where((floor != expected).repeat_interleave(32, dim=1), codes + 8, codes)
    doubled[40, 17] = 0x7F
    wrong_codes = compare_output("codes_rowwise", codes, doubled, format="E4M3", row_expert=ROW_EXPERT)
    case = "moe-numerics-report/cases/swiglu.fwd.mxfp8_e4m3-4f1c09.json"
    command = f"moe-numerics run {case} --device virtual:sm_100a"
    findings[0] = replace(wrong_codes, reproduce=command)
    findings[1] = replace(wrong_scale, reproduce=command)
    rows[at] = path_result("swiglu.fwd.mxfp8_e4m3", "virtual:sm_100a", findings)

    at = next(i for i, row in enumerate(rows) if row.id == "swiglu.bwd.bf16" and "90a" in row.device)
    dgate_up = tensor("bfloat16", 256, 0)
    row_expert = ROW_EXPERT.clone()
    row_expert[190:224] = -1
    written = dgate_up.clone()
    written[row_expert < 0] = float("nan")
    written[190:192, 100:140] = 0.0
    outside = compare_output("dgate_up", dgate_up, written, owned=row_expert >= 0, row_expert=row_expert, fill=0x7FC0)
    rows[at] = path_result("swiglu.bwd.bf16", "virtual:sm_90a", [outside, equal_findings(BACKWARD_OUTPUTS, 1)[1]])
    rows.append(
        PathResult(
            "geglu.fwd.bf16",
            "virtual:sm_100a",
            "suite",
            "exact",
            "error",
            reason="geglu_fwd_bf16, line 214: unknown instruction `tanh.approx.bf16x2` (block 0, thread 32)",
            kernels=(kernel("geglu.fwd.bf16", "virtual:sm_100a"),),
            reproduce="moe-numerics verify --paths geglu.fwd.bf16 --device virtual:sm_100a --seed 20250611",
            seconds=0.4,
            evidence=EVIDENCE["virtual:sm_100a"],
        )
    )
    rows.append(
        PathResult(
            "quantize.nvfp4.rht_colwise",
            "virtual:sm_90a",
            "suite",
            "exact",
            "skipped",
            reason="needs cvt.rn.satfinite.e2m1x2.f32, which sm_90a does not have",
            evidence=EVIDENCE["virtual:sm_90a"],
        )
    )
    return Report(replace(ENVIRONMENT, seconds=131.4), tuple(rows))


SAMPLES: dict[str, Callable[[], Report]] = {
    "pass": passing_report,
    "fail": failing_report,
    "incomplete": lambda: Report(ENVIRONMENT, tuple(row for row in failing_report().paths if row.status != "fail")),
    "empty": lambda: Report(ENVIRONMENT, ()),
}


sample = pytest.mark.parametrize("report", [make() for make in SAMPLES.values()], ids=list(SAMPLES))


# Text that breaks reports: markup, quotes, table and escape characters, control characters, other scripts.
HOSTILE = "<script>alert('1')</script>|`*_[x](y) \\ & \"quoted\" \x00\x1b[31m\ufffe\ttab\nnew line é 量 ]]> {{ 7 * 7 }}"


texts = st.one_of(st.just(HOSTILE), st.text(max_size=20), st.sampled_from(("", "-", "None")))


counts = st.integers(0, 2**40)


@st.composite
def output_results(draw: st.DrawFn, unexplained: bool) -> OutputResult:
    """An output with numbers that need not come from tensors."""
    bit_equal, explained = draw(counts), draw(counts)
    wrong = draw(st.integers(1, 1000)) if unexplained else 0
    expected, got = draw(st.integers(0, 0xFFFF)), draw(st.integers(0, 0xFFFF))
    experts = draw(st.integers(0, 300))
    cells = draw(st.sets(st.tuples(st.integers(-1, experts - 1), st.integers(0, 31)), max_size=8))
    return OutputResult(
        name=draw(st.sampled_from(("out", "codes_rowwise", "amax", HOSTILE))),
        grade=draw(st.sampled_from(("exact", "bounded", "statistical"))),
        elements=bit_equal + explained + wrong,
        bit_equal=bit_equal,
        explained=explained,
        unexplained=wrong,
        reason=draw(texts),
        max_ulp=draw(st.none() | st.integers(0, 2**64)),
        ulp_histogram=draw(st.sampled_from(({}, {"0": 3}, {"0": 1, "2-3": 9, f"{2**63}-{2**64 - 1}": 1, "nan": 4}))),
        error_histogram=draw(st.sampled_from(({}, {"0": 1, "0.1-0.2": 5, ">1": 2, "nan": 1}))),
        sharpness=draw(st.none() | st.floats(0, allow_nan=False)),
        mismatch_map=tuple((*cell, draw(st.integers(1, 10**9))) for cell in sorted(cells)),
        experts=experts,
        columns=draw(st.sampled_from((0, 1, 5, 31)) | st.integers(0, 10000)),
        first_mismatch={
            "coordinates": {"row": draw(counts), "expert": draw(st.integers(-1, 300)), "column": 5},
            "expected_bits": f"0x{expected:04x}",
            "got_bits": f"0x{got:04x}",
            "expected": draw(texts),
            "got": draw(texts),
            "explained": draw(st.booleans()),
        }
        if unexplained
        else None,
        reproduce=draw(texts),
    )


@st.composite
def reports(draw: st.DrawFn) -> Report:
    """Reports with hostile text and extreme numbers."""
    rows = []
    for status in draw(st.lists(st.sampled_from(("pass", "fail", "skipped", "error")), max_size=3)):
        rows.append(
            PathResult(
                id=draw(st.sampled_from(("swiglu.fwd.bf16", HOSTILE))),
                device=draw(st.sampled_from(("cuda", "virtual:sm_100a", HOSTILE))),
                profile=draw(texts),
                maths=draw(texts),
                status=status,
                reason=draw(texts) or "because",
                cases=draw(st.integers(1, 1000)),
                kernels=(Kernel("0" * 64, "sm_90a", draw(texts)),) * draw(st.integers(0, 2)),
                outputs=tuple(draw(st.lists(output_results(status == "fail"), min_size=1, max_size=2)))
                if status in ("pass", "fail")
                else (),
                reproduce=draw(texts),
                seconds=draw(st.integers(0, 10**7)) / 1000,
                evidence=draw(texts),
            )
        )
    environment = Environment(
        versions={draw(texts): draw(texts)},
        device=draw(texts),
        driver=draw(st.none() | texts),
        seed=draw(st.integers()),
        command=draw(texts),
        platform=draw(texts),
        started=draw(st.sampled_from(("2025-06-11T08:30:12+00:00", HOSTILE, ""))),
        seconds=draw(st.integers(0, 10**7)) / 1000,
    )
    return Report(environment, tuple(rows))


@functools.cache
def validator() -> jsonschema.Draft202012Validator:
    jsonschema.Draft202012Validator.check_schema(json_report.schema())
    return jsonschema.Draft202012Validator(json_report.schema())
