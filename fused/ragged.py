"""Where the rows of ragged experts lie, found on the device from the token offsets.

Row tiles never cross experts: tile j of expert e is slot `offsets[e] // rows + e + j`, so that a grid of
`capacity // rows + experts` slots serves every distribution without a prefix sum and without the host knowing it.
Slots that belong to no rows do nothing.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32
from moe_numerics.fused.memory import MaybeTensor, select

__all__ = ["SLOTS_PER_LAYER", "locate_tile", "raise_amax", "slot_grid"]

# blockIdx.y ends at 65,535: slots beyond one layer of the grid go on in blockIdx.z.
SLOTS_PER_LAYER = 32768


def slot_grid(columns: Int32, rows: Int32, experts: Int32, tile_rows: int) -> list[Int32]:
    """Grid of `columns` tiles by every slot that a buffer of `rows` rows can have."""
    slots = rows // tile_rows + experts
    return [columns, cutlass.min(slots, SLOTS_PER_LAYER), (slots + SLOTS_PER_LAYER - 1) // SLOTS_PER_LAYER]


@cute.jit
def locate_tile(
    offsets: cute.Tensor, counts: MaybeTensor, slot: Int32, rows: cutlass.Constexpr, lane: Int32
) -> tuple[Int32, Int32, Int32]:
    """Expert, first row and end (one past the last valid row) of a slot; `first >= end` when the slot is empty.

    All lanes of a warp call this together. `counts` is the tensor of valid rows, or None when every row between two
    offsets is valid.
    """
    experts = offsets.shape[0] - 1
    started, start, end = Int32(0), Int32(0), Int32(0)
    for base in range(0, experts, 32):
        candidate = base + lane
        own_start, own_end, below = Int32(0), Int32(0), Boolean(False)
        if candidate < experts:
            own_start = Int32(offsets[candidate])
            if cutlass.const_expr(counts is not None):
                own_end = own_start + Int32(counts[candidate])
            else:
                own_end = Int32(offsets[candidate + 1])
            below = own_start // rows + candidate <= slot
        # First slots increase with the expert, so those at or below this one are the first lanes; the last of them
        # holds the bounds of its expert, which saves a second read that would wait for the first.
        found = cute.arch.popc(cute.arch.vote_ballot_sync(below))
        last_start = cute.arch.shuffle_sync(own_start, found - 1)
        last_end = cute.arch.shuffle_sync(own_end, found - 1)
        started += found
        start = select(found > 0, last_start, start)
        end = select(found > 0, last_end, end)
    expert = started - 1
    first = start + rows * (slot - (start // rows + expert))
    return expert, first, end


@cute.jit
def raise_amax(pointer: cute.Pointer, largest: Float32, lane: Int32) -> None:
    """Raise an amax in memory to the largest value of a warp, if it is lower; values are not negative.

    Looking first keeps tens of thousands of tiles from queueing at one address: on an H200, [32768, 4096] MXFP8, the
    atomic alone costs a quarter of the time. Bits of magnitudes are ordered like integers, NaN last.
    """
    bits = cute.arch.warp_redux_sync(largest.bitcast(Uint32), "umax")
    cell = cute.recast_ptr(pointer, dtype=Uint32)
    # Two conditions: only one lane may look, and a staged `and` evaluates both sides.
    if lane == 0:  # noqa: SIM102
        if cute.arch.load(cell, Uint32, sem="relaxed", scope="gpu") < bits:
            cute.arch.atomic_max(cell, bits, sem="relaxed", scope="gpu")
