"""Reference-and-verification suite for the numerics of fused MoE training kernels."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_numerics.baseline import BaselineError
    from moe_numerics.bounds import Arithmetic, BoundError
    from moe_numerics.cases import Case, CaseError
    from moe_numerics.checking import Checked, KernelError, UnexplainedBits, check, kernel
    from moe_numerics.contract import Contract, profile
    from moe_numerics.findings import Finding
    from moe_numerics.paths import all_paths, find_path

__all__ = [
    "Arithmetic",
    "BaselineError",
    "BoundError",
    "Case",
    "CaseError",
    "Checked",
    "Contract",
    "Finding",
    "KernelError",
    "UnexplainedBits",
    "all_paths",
    "check",
    "find_path",
    "kernel",
    "profile",
]

_HOMES = {
    "Arithmetic": "bounds",
    "BaselineError": "baseline",
    "BoundError": "bounds",
    "Case": "cases",
    "CaseError": "cases",
    "Checked": "checking",
    "Contract": "contract",
    "Finding": "findings",
    "KernelError": "checking",
    "UnexplainedBits": "checking",
    "all_paths": "paths",
    "check": "checking",
    "find_path": "paths",
    "kernel": "checking",
    "profile": "contract",
}


def __getattr__(name: str) -> Any:
    # Loaded when first used, so that the pytest plugin costs nothing where it is only installed.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
