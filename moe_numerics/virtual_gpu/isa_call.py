"""`call` (PTX ISA 9.7.12.5): of the device functions, only `vprintf`, which is what `printf` in a kernel becomes."""

from __future__ import annotations

import ctypes
import re
import struct
import sys
from typing import Any

import numpy as np

from . import memory, ptx
from .errors import Fault
from .lowering import Lowering
from .memory import LOCAL_WINDOW
from .registry import Index, Modifiers, Step, instruction

_CONVERSION = re.compile(
    r"%(?P<flags>[-+ #0]*)(?P<width>\d*)(?P<precision>\.\d*)?(?P<length>hh|h|ll|l|j|z|t)?(?P<kind>.)"
)
_WIDE = ("l", "ll", "j", "z", "t")


def formatted(text: str, arguments: bytes) -> tuple[str, int]:
    """What C's `printf` prints, and how many arguments it takes.

    arguments: packed as C lays out a struct of them: int (and what is promoted to it) in 4 bytes; `l`, `ll`, `z`,
    pointers and double in 8. A `%s` prints its address: it is a device pointer. ValueError: an unknown conversion, or
    fewer bytes than it needs.
    """
    at = count = 0

    def take(size: int) -> bytes:
        nonlocal at, count
        at = -(-at // size) * size
        if at + size > len(arguments):
            raise ValueError(f"printf format {text!r} takes more arguments than were passed")
        raw = arguments[at : at + size]
        at, count = at + size, count + 1
        return raw

    def convert(match: re.Match[str]) -> str:
        kind, length = match["kind"], match["length"] or ""
        if kind == "%":
            return "%"
        shape = f"%{match['flags']}{match['width']}{match['precision'] or ''}"
        if kind in "diouxXc":
            size = 8 if length in _WIDE else 4
            value = int.from_bytes(take(size), "little", signed=kind in "di")
            value = {"h": value & 0xFFFF, "hh": value & 0xFF}.get(length, value) if kind not in "di" else value
            return (shape + ("d" if kind in "iu" else kind)) % (value & 0xFF if kind == "c" else value)
        if kind in "fFeEgGaA":
            (number,) = struct.unpack("<d", take(8))
            return number.hex() if kind in "aA" else (shape + kind) % number
        if kind in "ps":
            return f"{int.from_bytes(take(8), 'little'):#x}"
        raise ValueError(f"printf format {text!r} has an unknown conversion {match[0]!r}")

    return _CONVERSION.sub(convert, text), count


def _string(w: Any, address: int, thread: int) -> str:
    """The zero-terminated text at a global address."""
    found = w.launch.memory.find(address, address)
    if found is None:
        raise Fault("out_of_bounds", f"no printf format at {address:#x}", thread, address)
    raw = ctypes.string_at(address, found.base + found.size - address)
    return raw.split(b"\0", 1)[0].decode("utf-8", "replace")


def _address(b: Lowering, parameter: ptx.Operand) -> Any:
    """The 64 bits that were stored into a parameter of the call."""
    if not isinstance(parameter, ptx.Symbol) or parameter.name not in b.program.local_offsets:
        raise b.fail(f"`{b.ins.name}` needs parameters declared with .param, not {parameter}")
    where = np.uint64(b.program.local_offsets[parameter.name])
    return lambda w, i: memory.load(w, i, "local", np.full(w.count(i), where), 8, 1)[0]


@instruction("call .uni?")
def call(b: Lowering, m: Modifiers) -> Step:
    """Prints to the standard output, thread by thread; the result is the number of arguments."""
    groups = list(b.operands)
    results: tuple[ptx.Operand, ...] = ()
    if groups and isinstance(groups[0], ptx.Group):
        results = groups.pop(0).items  # type: ignore[union-attr]
    name = groups[0].name if groups and isinstance(groups[0], ptx.Symbol) else "(a pointer)"
    if name != "vprintf":
        raise b.fail(f"a call of {name}: device functions are not supported, only vprintf; compile it inline")
    parameters = groups[1].items if len(groups) > 1 and isinstance(groups[1], ptx.Group) else ()
    if len(parameters) != 2:
        raise b.fail(f"vprintf takes 2 parameters, found {len(parameters)}")
    form, arguments = (_address(b, p) for p in parameters)
    answers = [b.program.local_offsets.get(getattr(o, "name", "")) for o in results]

    def step(w: Any, i: Index) -> None:
        threads = w.index(i)
        counts = np.zeros(threads.size, np.uint32)
        for k, (t, text, at) in enumerate(
            zip(threads.tolist(), form(w, i).tolist(), arguments(w, i).tolist(), strict=True)
        ):
            raw = b""
            if at >= LOCAL_WINDOW:
                low = t * w.local_bytes + at - LOCAL_WINDOW
                raw = w.local_region.buffer[low : (t + 1) * w.local_bytes].tobytes()
            try:
                printed, counts[k] = formatted(_string(w, text, t), raw)
            except ValueError as error:
                raise Fault("printf", str(error), t) from error
            sys.stdout.write(printed)
        for answer in answers:
            if answer is not None:
                memory.store(w, i, "local", np.full(threads.size, np.uint64(answer)), 4, [counts])

    return step
