"""The audit finds what a kernel's PTX leaves open, and nothing else.

Faults this catches: a contraction that goes unseen because a move or a negation stands between, a pinned product that
is called contractable, a wrong line, an order-dependent sum that is not named, a conversion without its rounding.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from moe_numerics.audit import AuditError, Note, audit_ptx, audit_target, render
from moe_numerics.cli import app
from moe_numerics.virtual_gpu import VirtualGPUError

HEAD = ".version 8.7\n.target sm_90a\n.address_size 64\n.visible .entry k(.param .u64 p0)\n{\n"
DECLARED = ".reg .b32 %r<9>; .reg .b64 %a; .reg .b16 %h<4>; .reg .b64 %d<4>;\n"
FIRST = 7
"""The line of the first instruction."""


def module(*lines: str) -> str:
    return HEAD + DECLARED + "\n".join(lines) + "\nret;\n}\n"


def found(*lines: str) -> list[tuple[str, int]]:
    return [(note.kind, note.line - FIRST) for note in audit_ptx(module(*lines)).notes]


def test_an_unpinned_product_that_meets_an_unpinned_sum_is_reported_with_both_lines() -> None:
    audit = audit_ptx(
        module("mul.f32 %r1, %r2, %r3;", "mov.b32 %r4, %r1;", "neg.f32 %r5, %r4;", "sub.f32 %r6, %r7, %r5;")
    )
    (note,) = audit.of("contractable")
    assert note == Note(
        "contractable",
        "k",
        FIRST + 3,
        "sub.f32",
        note.text,
        f"takes the product of line {FIRST}: write it with .rn, or as an fma",
    )
    assert "sub.f32" in note.text
    assert not audit.determined


@pytest.mark.parametrize(
    "lines",
    [
        ("mul.rn.f32 %r1, %r2, %r3;", "add.f32 %r4, %r1, %r5;"),
        ("mul.f32 %r1, %r2, %r3;", "add.rn.f32 %r4, %r1, %r5;"),
        ("mul.f32 %r1, %r2, %r3;", "add.f32 %r4, %r2, %r5;"),
        ("mul.lo.s32 %r1, %r2, %r3;", "add.s32 %r4, %r1, %r5;"),
        ("fma.rn.f32 %r1, %r2, %r3, %r4;", "add.f32 %r4, %r1, %r5;"),
    ],
)
def test_what_cannot_be_contracted_is_not_reported(lines: tuple[str, ...]) -> None:
    assert audit_ptx(module(*lines)).determined


@pytest.mark.parametrize("kind", ["f32", "f64", "f16", "bf16x2"])
@pytest.mark.parametrize("op", ["add", "sub"])
def test_every_float_type_can_be_contracted(kind: str, op: str) -> None:
    letter = {"f64": "d", "f16": "h"}.get(kind, "r")
    names = [f"%{letter}{n}" for n in range(4)]
    lines = (f"mul.{kind} {names[1]}, {names[2]}, {names[3]};", f"{op}.{kind} {names[0]}, {names[2]}, {names[1]};")
    assert found(*lines) == [("contractable", 1)]


def test_a_loop_of_moves_ends() -> None:
    assert found("mov.b32 %r1, %r2;", "mov.b32 %r2, %r1;", "add.f32 %r3, %r1, %r4;") == []


def test_approximations_flushes_atomics_and_conversions_have_their_lines() -> None:
    lines = (
        "ex2.approx.ftz.f32 %r1, %r2;",
        "div.full.f32 %r1, %r2, %r3;",
        "red.global.add.f32 [%a], %r1;",
        "red.global.add.u32 [%a], %r1;",
        "atom.global.max.u32 %r1, [%a], %r2;",
        "cvt.rn.bf16.f32 %h1, %r1;",
        "cvt.f32.bf16 %r1, %h1;",
        "cvt.rn.satfinite.e4m3x2.f32 %h1, %r1, %r2;",
        "cvt.rzi.s32.f32 %r1, %r2;",
        "cvt.u32.u16 %r1, %h1;",
        "cp.reduce.async.bulk.tensor.1d.global.shared::cta.add.tile.bulk_group [%a, {%r1}], [%r2];",
        "cp.reduce.async.bulk.tensor.1d.global.shared::cta.max.tile.bulk_group [%a, {%r1}], [%r2];",
        "red.global.add.noftz.bf16x2 [%a], %r1;",
    )
    assert found(*lines) == [
        ("approximate", 0), ("approximate", 1), ("flush", 0), ("atomic", 2), ("atomic", 10), ("atomic", 12),
        ("rounding", 5),
        ("rounding", 7), ("rounding", 8),
    ]  # fmt: skip
    details = [note.detail for note in audit_ptx(module(*lines)).of("rounding")]
    assert details == [
        "to nearest, ties to even",
        "to nearest, ties to even, .satfinite",
        "to an integer, towards zero",
    ]


@given(
    st.permutations(["mul.f32 %r1, %r2, %r3;", "add.f32 %r4, %r1, %r5;", "ex2.approx.f32 %r6, %r7;"]), st.integers(0, 5)
)
def test_lines_follow_the_text(lines: list[str], blank: int) -> None:
    """Catches a line counted from elsewhere, whatever the order and the empty lines."""
    notes = audit_ptx(module(*[""] * blank, *lines)).notes
    for note in notes:
        text = module(*[""] * blank, *lines).splitlines()[note.line - 1]
        assert note.instruction in text
    assert {note.kind for note in notes} == {"approximate", "contractable"}


def test_a_path_of_exact_maths_is_determined_but_for_its_seeds() -> None:
    (audit, *more) = audit_target("swiglu.fwd.bf16")
    for each in (audit, *more):
        assert each.determined
        assert {note.instruction for note in each.of("approximate")} <= {"rcp.approx.ftz.f32"}
        assert each.target == "sm_90a"
        assert "determined by the PTX: yes" in render(each)


def test_functions_and_files_are_audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = module("add.rn.f32 %r1, %r2, %r3;")
    (tmp_path / "kernel.ptx").write_text(text, encoding="utf-8")
    source = f"def build():\n    return [{text!r}, {text!r}]\ndef needy(x):\n    return x\n"
    (tmp_path / "mine_for_audit.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [a.kernels for a in audit_target(str(tmp_path / "kernel.ptx"))] == [("k",)]
    assert [a.name for a in audit_target("mine_for_audit:build")] == [
        "mine_for_audit:build [0]",
        "mine_for_audit:build [1]",
    ]
    with pytest.raises(AuditError, match="mine_for_audit:missing"):
        audit_target("mine_for_audit:missing")
    with pytest.raises(AuditError, match=r"mine_for_audit:needy\(\) failed: TypeError: .*'x'"):
        audit_target("mine_for_audit:needy")
    with pytest.raises(AuditError, match="cannot be read"):
        audit_target(str(tmp_path / "none.ptx"))
    with pytest.raises(VirtualGPUError, match="line 2"):
        audit_ptx(".version 8.7\n?")


def test_the_command_prints_json_and_refuses_what_is_no_target(tmp_path: Path) -> None:
    file = tmp_path / "kernel.ptx"
    file.write_text(module("ex2.approx.ftz.f32 %r1, %r2;"), encoding="utf-8")
    result = CliRunner().invoke(app, ["audit", str(file), "--json"])
    assert result.exit_code == 0
    (audit,) = json.loads(result.output)
    assert [(note["kind"], note["line"]) for note in audit["notes"]] == [("approximate", FIRST), ("flush", FIRST)]
    assert CliRunner().invoke(app, ["audit", str(tmp_path / "none.ptx")]).exit_code == 2
    assert CliRunner().invoke(app, ["audit", str(file), "--device", "cuda"]).exit_code == 2
