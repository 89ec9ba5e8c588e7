"""Mutants of PTX are what their rules say, and are called equivalent only where a proof holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mutant_proofs import proof
from ptx_mutants import RULES, Mutant, mutants

REPORT = json.loads((Path(__file__).parent.parent / "reports" / "detection.json").read_text())

HEAD = """.version 8.8
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 p, .param .u64 q)
{
	.reg .pred 	%p<4>;
	.reg .b16 	%rs<4>;
	.reg .b32 	%r<12>;
	.reg .b64 	%rd<4>;
	ld.param.b64 	%rd1, [p];
	ld.param.b64 	%rd2, [q];
	ld.global.b32 	%r1, [%rd1];
	ld.global.b32 	%r2, [%rd2];
	shl.b32 	%r3, %r1, 16;
"""
FIRST = HEAD.count("\n") + 1
TAIL = "	st.global.b32 	[%rd1], %r9;\n	ret;\n}\n"


def _proof(body: list[str], after: str, at: int = 0) -> str:
    """Of a kernel with these lines, one of which becomes another."""
    ptx = HEAD + "".join(f"\t{line}\n" for line in body) + TAIL
    return proof(ptx, {FIRST + at: f"\t{after}"})


def test_every_rule_changes_what_it_names() -> None:
    """A rule that reaches nothing, or whose mutant is the kernel itself."""
    made = [mutant for path in ("quantize.mxfp8_e4m3", "swiglu.fwd.bf16") for mutant in mutants(path)]
    assert {mutant.rule for mutant in made} == {rule.name for rule in RULES}
    assert len({mutant.id for mutant in made}) == len(made)
    assert all(mutant.before != mutant.after for mutant in made)


def test_a_mutant_changes_its_module_only() -> None:
    """A fault that is planted in another compilation, whose lines are other lines."""
    mutant = mutants("quantize.mxfp8_e4m3")[0]
    assert mutant.edit("another module") == ("another module", 0)
    assert isinstance(mutant, Mutant)


@pytest.mark.parametrize(
    ("body", "after", "words"),
    [
        (["cvt.rn.f32.s32 	%r9, %r4;"], "cvt.rz.f32.s32 	%r9, %r4;", ""),
        (
            ["and.b32 	%r4, %r1, 65535;", "cvt.rn.f32.u32 	%r9, %r4;"],
            "cvt.rz.f32.u32 	%r9, %r4;",
            "the same bits for all 65,536 inputs",
        ),
        (
            ["max.NaN.f32 	%r4, %r3, 0fC1F00000;", "mul.rn.f32 	%r9, %r4, %r3;"],
            "max.f32 	%r4, %r3, 0fC1F00000;",
            "the same bits for all 65,536 inputs",
        ),
        (["max.NaN.f32 	%r9, %r3, 0fC1F00000;"], "max.f32 	%r9, %r3, 0fC1F00000;", ""),
        (
            ["abs.f32 	%r4, %r1;", "max.NaN.f32 	%r5, %r4, %r2;", "abs.f32 	%r9, %r5;"],
            "mov.b32 	%r9, %r5;",
            "never negative",
        ),
        (["max.NaN.f32 	%r5, %r1, %r2;", "abs.f32 	%r9, %r5;"], "mov.b32 	%r9, %r5;", ""),
        (["mul.rn.f32 	%r9, %r3, 0f3F800001;"], "mul.rn.f32 	%r9, %r3, 0f3F800000;", ""),
        (
            ["selp.f32 	%r4, 0f7FFFFFFF, %r1, %p1;", "mul.rn.f32 	%r9, %r4, %r2;"],
            "selp.f32 	%r4, 0f7FFFFFFE, %r1, %p1;",
            "a NaN becomes another",
        ),
        (["selp.f32 	%r9, 0f7FFFFFFF, %r1, %p1;"], "selp.f32 	%r9, 0f7FFFFFFE, %r1, %p1;", ""),
    ],
)
def test_a_proof_holds_where_nothing_changes_and_nowhere_else(body: list[str], after: str, words: str) -> None:
    """A mutant that was missed and is called equivalent; one that no test can find and counts as missed."""
    destination = after.split()[1].rstrip(",")
    at = next(place for place, line in enumerate(body) if line.split()[1].rstrip(",") == destination)
    found = _proof(body, after, at)
    assert (words in found) if words else found == ""


def test_the_report_counts_mutants_apart() -> None:
    """A mutant that counts as equivalent without a proof, or that counts with the written faults."""
    made = REPORT["mutants"]
    assert len(made) >= 100
    assert {entry["rule"] for entry in made} == {rule.name for rule in RULES}
    assert all(entry["kind"] == "mutant" for entry in made)
    assert all(entry["kind"] != "mutant" for entry in REPORT["faults"])
    for entry in made:
        assert entry["equivalent"] == bool(entry["proof"])
        assert not (entry["equivalent"] and (entry["found_default"] or entry["found_thorough"]))
