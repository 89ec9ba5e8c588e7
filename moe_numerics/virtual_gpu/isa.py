"""Fills the table of instructions: importing this module imports every family."""

from . import (
    isa_atomic,
    isa_barrier,
    isa_control,
    isa_convert,
    isa_float,
    isa_half,
    isa_integer,
    isa_memory,
    isa_move,
    isa_warp,
)

FAMILIES = (
    isa_atomic, isa_barrier, isa_control, isa_convert, isa_float, isa_half, isa_integer, isa_memory, isa_move, isa_warp
)  # fmt: skip
