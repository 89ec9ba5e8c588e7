"""Control flow and instructions that leave values alone (PTX ISA 9.7.12, 9.7.19)."""

from __future__ import annotations

from typing import Any

from .errors import Fault
from .lowering import Lowering
from .registry import Index, Modifiers, Step, instruction


def _nothing(w: Any, i: Index) -> None:
    return None


@instruction("bra .uni?", kind="branch")
def bra(b: Lowering, m: Modifiers) -> Step:
    return _nothing


@instruction("brx .idx .uni?", kind="branch")
def brx(b: Lowering, m: Modifiers) -> Step:
    b.read(b.operands[0], "u32")
    return _nothing


@instruction("ret .uni?", kind="exit")
@instruction("exit", kind="exit")
def leave(b: Lowering, m: Modifiers) -> Step:
    return _nothing


@instruction("trap")
@instruction("brkpt")
def trap(b: Lowering, m: Modifiers) -> Step:
    """Ends the kernel; so does a breakpoint without a debugger (seen on an H200)."""

    def step(w: Any, i: Index) -> None:
        raise Fault("trap", f"the kernel executed a {b.ins.opcode}", int(w.index(i)[0]))

    return step


@instruction("nanosleep .u32")
def nanosleep(b: Lowering, m: Modifiers) -> Step:
    b.read(b.operands[0], "u32")
    return _nothing


@instruction("pmevent .mask?")
@instruction("griddepcontrol what=launch_dependents|wait")
@instruction("setmaxnreg way=inc|dec .sync .aligned .u32")
def no_effect(b: Lowering, m: Modifiers) -> Step:
    """Launches run one after the other, so that a dependent grid finds all of its predecessor's work done."""
    return _nothing
