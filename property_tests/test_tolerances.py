"""Others' tolerances do what their tests do, and let through what they are known to let through."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable

import pytest
import torch
from typer.testing import CliRunner

from moe_numerics.cli import app
from moe_numerics.paths import find_path
from moe_numerics.tolerances import PEERS, Subject, Tolerance, subject_of, tolerances_for

GENERATOR = torch.Generator().manual_seed(3)
NORMAL = torch.randn(4096, generator=GENERATOR, dtype=torch.float64)
VALUES = Subject("activation", "fwd", "mxfp8_e4m3", "values")
SCALES = Subject("activation", "fwd", "mxfp8_e4m3", "scales")


def _of(peer: str, subject: Subject) -> Tolerance:
    return next(each for each in tolerances_for(subject) if each.peer == peer)


@pytest.mark.parametrize("tolerance", PEERS, ids=lambda each: f"{each.peer} {each.test}")
def test_every_tolerance_passes_what_is_equal_and_fails_what_is_not(tolerance: Tolerance) -> None:
    """A criterion turned around, or one that passes everything."""
    scales = torch.full_like(NORMAL, 2.0**-6)
    assert tolerance.passes(NORMAL, NORMAL.clone(), scales)
    assert not tolerance.passes(NORMAL, -3.0 * NORMAL, scales)
    assert not tolerance.passes(NORMAL, torch.full_like(NORMAL, float("nan")), scales)
    assert tolerance.words()


BLIND: list[tuple[str, Subject, Callable[[torch.Tensor], torch.Tensor]]] = [
    ("DeepGEMM", VALUES, lambda x: x * 1.0452),
    ("flashinfer", VALUES, lambda x: x * 0.55),
    ("torchao", VALUES, lambda x: x * 1.04),
    ("cuDNN Frontend", SCALES, lambda x: x * 2),
    ("Transformer Engine", VALUES, lambda x: x * 1.124),
]


@pytest.mark.parametrize(("peer", "subject", "fault"), BLIND, ids=lambda each: each if isinstance(each, str) else "")
def test_known_blind_spots(peer: str, subject: Subject, fault: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A column of the detection table that credits a test with what it cannot see."""
    expected = torch.full((64,), 2.0**-4, dtype=torch.float64) if subject == SCALES else NORMAL
    assert _of(peer, subject).passes(expected, fault(expected))


def test_limits_are_where_they_are_documented() -> None:
    """A limit that is a little off: just inside passes, just outside fails."""
    assert not _of("DeepGEMM", VALUES).passes(NORMAL, NORMAL * 1.0470)
    assert not _of("torchao", VALUES).passes(NORMAL, NORMAL * 1.0448)
    assert not _of("flashinfer", VALUES).passes(10 * NORMAL, NORMAL)
    assert not _of("cuDNN Frontend", SCALES).passes(torch.ones(8).double(), 2 * torch.ones(8).double())


def test_exact_tests_see_the_sign_of_zero() -> None:
    """Bytes compared as numbers."""
    subject = Subject("quantize", "fwd", "mxfp8_e4m3", "codes")
    zero = torch.zeros(4, dtype=torch.float64)
    assert not _of("Transformer Engine", subject).passes(zero, -zero)


def test_a_tolerance_is_used_only_for_outputs_that_its_test_judges() -> None:
    """A quantiser judged by the tolerance of a GEMM, or amax by that of values."""
    path = find_path("quantize.nvfp4.rht")
    assert {each.kind for each in tolerances_for(subject_of(path, "codes"))} == {"equal"}
    assert not tolerances_for(Subject("activation", "fwd", "bf16", "dbias"))
    assert all(each.version and each.test for each in PEERS)


def test_the_command_prints_json_and_a_test() -> None:
    """Output that nothing can read."""
    runner = CliRunner()
    result = runner.invoke(app, ["tolerance", "swiglu.bwd.mxfp8_e4m3", "--k", "4096"])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["k"] == 4096
    assert {entry["peer"] for entry in data["peers"]} >= {"DeepGEMM", "torchao"}
    dprob = next(entry for entry in data["derived"] if entry["output"] == "dprob")
    assert dprob["relative"] == pytest.approx(4095 * 2.0**-24, rel=1e-3)
    result = runner.invoke(app, ["tolerance", "swiglu.fwd.bf16", "--format", "pytest"])
    assert result.exit_code == 0, result.output
    ast.parse(result.stdout)
    assert runner.invoke(app, ["tolerance", "swiglu.fwd.bf16", "--format", "yaml"]).exit_code == 2
