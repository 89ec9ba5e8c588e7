"""Compiles CuTe DSL functions with pinned rounding, once for each variant.

Every kernel of the suite is compiled with libNVVM's contraction switched off: `a * b + c` stays a rounded product
and a rounded sum, and an FMA is only where `cute.math.fma` is written (nvidia-cutlass-dsl 4.8.1, option
`nvvm-options=-fma=0`). `cute.compile` itself never caches, so the cache is here.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import cutlass.cute as cute
from cutlass.base_dsl.compiler import DumpDir, ExtraCompilerOpts, KeepPTX, PtxasOptions
from cutlass.cutlass_dsl import CuTeDSL

from moe_numerics.garbage import uncollected

__all__ = ["Compiled", "compile_function", "compiling_for", "current_target", "domain", "kernels_in", "recording"]

domain: ContextVar[str] = ContextVar("domain", default="cuda")
"""Where compiled functions launch: a function compiled for one domain is never reused in another."""


_NOWHERE = "nowhere"


class Compiled:
    """A compiled function and the PTX of its kernels; calling it launches them."""

    def __init__(self, executor: Any, target: str):
        self.executor = executor
        self.target = target
        self.ptx: str = executor.__ptx__

    def __call__(self, *arguments: Any) -> None:
        used = _recorded.get()
        if used is not None and self not in used:
            used.append(self)
        if domain.get() != _NOWHERE:
            self.executor(*arguments)


_recorded: ContextVar[list[Compiled] | None] = ContextVar("recorded", default=None)


@contextlib.contextmanager
def recording() -> Iterator[list[Compiled]]:
    """Collects the compiled functions that are called inside the context."""
    used: list[Compiled] = []
    token = _recorded.set(used)
    try:
        yield used
    finally:
        _recorded.reset(token)


@contextlib.contextmanager
def compiling_for(target: str) -> Iterator[list[Compiled]]:
    """Functions are compiled for a target, such as `sm_103a`, and collected; calling them launches nothing."""
    environment = CuTeDSL._get_dsl().envar
    before, environment.arch = environment.arch, target
    token = domain.set(_NOWHERE)
    try:
        with recording() as used:
            yield used
    finally:
        domain.reset(token)
        environment.arch = before


def current_target() -> str:
    """Architecture that functions are compiled for now, such as `sm_90a`."""
    return str(CuTeDSL._get_dsl().envar.arch)


def kernels_in(ptx: str) -> list[str]:
    """Names of the entry functions of a PTX module, in order."""
    return re.findall(r"\.entry\s+([\w$]+)", ptx)


@functools.cache
def _dump_directory(process: int) -> str:
    # The DSL reads PTX back from a file whose name does not tell variants apart: processes must not share a folder.
    directory = tempfile.mkdtemp(prefix=f"moe-numerics-{process}-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


_CACHE: dict[tuple[Hashable, ...], Compiled] = {}


def compile_function(function: Callable[..., Any], key: Hashable, arguments: Callable[[], Sequence[Any]]) -> Compiled:
    """Compile `function` for the current target, or return what was compiled before.

    `key` tells this variant from every other variant of the same function; `arguments` builds the fake tensors and
    compile-time objects and is called only when there is something to compile.
    """
    target = current_target()
    full_key = (function.__module__, function.__qualname__, domain.get(), target, key)
    if full_key not in _CACHE:
        options = [
            KeepPTX(True),
            ExtraCompilerOpts("nvvm-options=-fma=0"),
            DumpDir(_dump_directory(os.getpid())),
        ]
        if domain.get() == "virtual":
            # Only the PTX runs there: ptxas has to accept it, and need not make it fast.
            options.append(PtxasOptions("-O0"))
        with uncollected():
            _CACHE[full_key] = Compiled(cute.compile[tuple(options)](function, *arguments()), target)
    return _CACHE[full_key]
