"""The approximate instructions: `ex2`, `lg2`, `sin`, `cos`, `rcp`, `rsqrt`, `sqrt`, `tanh` with `.approx`.

The model is the correctly rounded float32 result. Silicon differs from it in the last place; where differences were
captured on an architecture, `load` adds them, and the bits are then those of that silicon.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from . import floats

F32 = npt.NDArray[np.float32]
Correction = Callable[[Any, Any], Any]

_CORRECTIONS: dict[tuple[str, str], Correction] = {}


def load(arch: str, name: str, correction: Correction) -> None:
    """Registers what silicon of `arch` gives: `correction(operands, None)` are its results.

    name: `ex2`, or `ex2.ftz` for the flushing form, on float32 values; `ex2.f16` or `ex2.bf16` on codes (uint16).
    """
    _CORRECTIONS[arch, name] = correction


def evidence(arch: str, name: str) -> str:
    """On what the bits of an approximation rest on this architecture."""
    return "silicon" if (arch, name) in _CORRECTIONS else "manual"


def of_codes(name: str, kind: str, arch: str) -> Callable[[Any], Any] | None:
    """The approximation on codes of f16 or bf16 as silicon gives it, None where that was not captured."""
    correction = _CORRECTIONS.get((arch, f"{name}.{kind}"))
    return None if correction is None else lambda codes: correction(codes, None)


def _wide(f: Callable[[Any], Any]) -> Callable[[F32], F32]:
    return lambda x: np.asarray(f(x.astype(np.float64)), np.float64).astype(np.float32)


_EXACT: dict[str, Callable[[F32], F32]] = {
    "ex2": _wide(np.exp2),
    "lg2": _wide(np.log2),
    "sin": _wide(np.sin),
    "cos": _wide(np.cos),
    "rcp": _wide(lambda x: 1.0 / x),
    "rsqrt": _wide(lambda x: 1.0 / np.sqrt(np.where(x == 0, np.abs(x), x))),
    "sqrt": _wide(np.sqrt),
    "tanh": _wide(np.tanh),
}


def function(name: str, arch: str, ftz: bool) -> Callable[[F32], F32]:
    """The approximation as a function of arrays. ftz: flush subnormal inputs and results."""
    exact = _EXACT[name]

    def evaluate(x: F32) -> F32:
        if ftz:
            x = floats.flush(x)
        correction = _CORRECTIONS.get((arch, f"{name}.ftz" if ftz else name))
        if correction is not None:
            return np.asarray(correction(x, None), np.float32)
        r = exact(x)
        if name == "rsqrt":
            # The reciprocal root of -0 is -Inf.
            r = np.where((x == 0) & np.signbit(x), np.float32(-np.inf), r)
        r = floats.canonical(np.asarray(r, np.float32))
        return floats.flush(r) if ftz else r

    return evaluate
