"""Faults for tests: edits of a kernel's PTX on its way into the virtual GPU.

An edit stands for one wrong line of a kernel's source, which the compiler has unrolled, so it says how many places it
must change. No line is added or taken away, so that a fault's PTX line is a line of the compiler's text.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from moe_numerics.virtual_gpu.gpu import VirtualGPU

Replacement = str | Callable[[re.Match[str]], str]


@dataclass(frozen=True)
class Edit:
    """One wrong line of a kernel.

    pattern: regular expression of the text to change, `replacement`: as for `re.sub`. places: how many places of the
    kernel's module must match, no more and no fewer.
    """

    pattern: str
    replacement: Replacement
    places: int

    def __call__(self, ptx: str) -> str:
        edited, count = re.subn(self.pattern, self.replacement, ptx, flags=re.DOTALL)
        assert count == self.places, f"{count} places match {self.pattern!r}: expected {self.places}"
        assert edited != ptx, f"{self.pattern!r}: nothing changed"
        assert edited.count("\n") == ptx.count("\n"), f"{self.pattern!r}: the number of lines changed"
        return edited


@contextlib.contextmanager
def planted(edit: Callable[[str], str]) -> Iterator[None]:
    """Kernels launched inside the context run with the edit; what is compiled and reported is not edited."""
    launch = VirtualGPU.launch_raw
    edited: dict[str, str] = {}

    def launch_edited(self: VirtualGPU, ptx: str, kernel: str, *arguments: Any, **options: Any) -> None:
        if ptx not in edited:
            edited[ptx] = edit(ptx)
        launch(self, edited[ptx], kernel, *arguments, **options)

    VirtualGPU.launch_raw = launch_edited  # type: ignore[method-assign]
    try:
        yield
    finally:
        VirtualGPU.launch_raw = launch  # type: ignore[method-assign]
    assert edited, "no kernel was launched"
