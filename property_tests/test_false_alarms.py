"""Correct kernels of others are not found fault with, over the cases that were counted and some more."""

from __future__ import annotations

import json
from pathlib import Path

import false_alarms
import pytest
from false_alarms import Correct, Task, correct_kernels, judge, summary, upper_limit
from kernel_runs import thorough

from moe_numerics.bounds import Arithmetic

REPORT = json.loads((Path(__file__).parent.parent / "reports" / "false_alarms.json").read_text())
FEW = ("swiglu.bwd.mxfp8_e4m3", "geglu.fwd.bf16", "swiglu.bwd.bf16.bias")


def test_no_false_alarm_in_ten_thousand_cases() -> None:
    """A report of fewer cases than the target, or one with false alarms."""
    total = REPORT["summary"]
    assert total == summary(REPORT["kernels"])
    assert total["cases"] >= 10_000
    assert total["false_alarms"] == 0
    assert total["upper_limit_95"] <= 3e-4
    assert total["explained"] > 1_000_000


@pytest.mark.parametrize("kernel", [k for k, each in enumerate(correct_kernels()) if thorough() or each.path in FEW])
def test_correct_kernels_pass(kernel: int) -> None:
    """A bound or an explanation that became too narrow."""
    found = judge(Task(kernel, 10 if thorough() else 2, 77, "cpu"))
    assert found["alarms"] == []
    assert found["cases"]


def test_an_alarm_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement that cannot find anything: bfloat16 intermediates under the bounds of exact arithmetic."""
    wrong = Correct("swiglu.fwd.bf16", "eager", Arithmetic("exact"))
    monkeypatch.setattr(false_alarms, "correct_kernels", lambda: [wrong])
    found = judge(Task(0, 4, 5, "cpu"))
    assert found["false_alarms"] > 0
    assert len(found["alarms"]) == found["false_alarms"]


def test_the_upper_limit() -> None:
    """A confidence limit on the wrong side, or one that forgets the alarms."""
    assert upper_limit(0, 10_000) == pytest.approx(3.0e-4, rel=2e-3)
    assert upper_limit(0, 10) == pytest.approx(1 - 0.05 ** (1 / 10))
    assert upper_limit(3, 10_000) > upper_limit(0, 10_000)
    assert upper_limit(5, 5) == 1.0
