"""Where the rows of ragged experts lie, found on the device from the token offsets.

Row tiles never cross experts: tile j of expert e is slot `offsets[e] // rows + e + j`, so that a grid of
`capacity // rows + experts` slots serves every distribution without a prefix sum and without the host knowing it.
Slots that belong to no rows do nothing.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from moe_numerics.fused.memory import MaybeTensor

__all__ = ["locate_tile"]


@cute.jit
def locate_tile(
    offsets: cute.Tensor, counts: MaybeTensor, slot: Int32, rows: cutlass.Constexpr, lane: Int32
) -> tuple[Int32, Int32, Int32]:
    """Expert, first row and end (one past the last valid row) of a slot; `first >= end` when the slot is empty.

    All lanes of a warp call this together. `counts` is the tensor of valid rows, or None when every row between two
    offsets is valid.
    """
    experts = offsets.shape[0] - 1
    started = Int32(0)
    for base in range(0, experts, 32):
        candidate = base + lane
        below = Boolean(False)
        if candidate < experts:
            below = Int32(offsets[candidate]) // rows + candidate <= slot
        started += cute.arch.popc(cute.arch.vote_ballot_sync(below))
    expert = started - 1
    start = Int32(offsets[expert])
    first = start + rows * (slot - (start // rows + expert))
    end = Int32(offsets[expert + 1])
    if cutlass.const_expr(counts is not None):
        end = start + Int32(counts[expert])
    return expert, first, end
