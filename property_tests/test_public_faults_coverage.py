"""Every row of the list of public faults has a test that bears its id, and every such test has a row."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from public_faults import KINDS, PUBLIC_FAULTS, PublicFault

FILES = sorted(Path(__file__).parent.glob("test_public_faults_*.py"))
NAMED = re.compile(r"(?:test_b|TestB)(\d\d)(?:_|[A-Z])")


def named_tests() -> dict[str, list[str]]:
    """Names of the tests of each row: functions `test_b46_...`, or classes `TestB46...` that hold tests."""
    found: dict[str, list[str]] = {}
    for file in FILES:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            match = NAMED.match(node.name)
            inner = [item.name for item in node.body if isinstance(item, ast.FunctionDef)]
            holds = isinstance(node, ast.FunctionDef) or any(name.startswith("test_") for name in inner)
            if match and holds:
                found.setdefault(f"B{match[1]}", []).append(f"{file.name}::{node.name}")
    return found


@pytest.mark.parametrize("fault", PUBLIC_FAULTS, ids=lambda fault: fault.id)
def test_every_row_has_a_test_or_a_reason(fault: PublicFault) -> None:
    """Catches a row whose test was renamed away, and a reason that outlived the lack of a test."""
    assert bool(named_tests().get(fault.id)) != bool(fault.inexpressible)
    assert fault.kinds
    assert set(fault.kinds) <= set(KINDS)


def test_every_test_has_a_row() -> None:
    """Catches a test under an id that is not in the list, and an id that stands for two faults."""
    ids = [fault.id for fault in PUBLIC_FAULTS]
    assert len(set(ids)) == len(ids)
    assert set(named_tests()) <= set(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_tested(kind: str) -> None:
    """Catches a kind of which no row is left."""
    assert any(kind in fault.kinds and fault.id in named_tests() for fault in PUBLIC_FAULTS)
