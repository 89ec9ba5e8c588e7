"""Fills the table of instructions: importing this module imports every family."""

from . import (
    isa_atomic,
    isa_barrier,
    isa_bulk,
    isa_cluster,
    isa_control,
    isa_convert,
    isa_float,
    isa_half,
    isa_integer,
    isa_matrix,
    isa_mbarrier,
    isa_memory,
    isa_move,
    isa_tcgen05,
    isa_warp,
    isa_wgmma,
)

FAMILIES = (
    isa_atomic, isa_barrier, isa_bulk, isa_cluster, isa_control, isa_convert, isa_float, isa_half, isa_integer,
    isa_matrix, isa_mbarrier, isa_memory, isa_move, isa_tcgen05, isa_warp, isa_wgmma,
)  # fmt: skip
