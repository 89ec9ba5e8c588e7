"""Exchanges between the lanes of a warp (PTX ISA 9.7.9.6, 9.7.13.10 to 9.7.13.15)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from . import floats, ptx
from .errors import Fault
from .lowering import Lowering, Read
from .memory import Array, first, position
from .registry import Index, Modifiers, Step, instruction


def member_mask(b: Lowering, operand: ptx.Operand) -> Read:
    """Reads a member mask and makes the instruction wait for the lanes it names."""
    read = b.read(operand, "u32")
    b.sync_mask = read
    return read


def _active(w: Any, i: Index) -> npt.NDArray[np.bool_]:
    mask = np.zeros(w.threads, bool)
    mask[i if i is not None else slice(None)] = True
    return mask


@instruction("shfl .sync mode=up|down|bfly|idx .b32", kind="sync")
def shfl(b: Lowering, m: Modifiers) -> Step:
    target, source, lane_operand, clamp_operand, mask_operand = b.operands
    member_mask(b, mask_operand)
    predicate = None
    if isinstance(target, ptx.Pair):
        predicate = b.write(target.second, "pred")
        target = target.first
    write = b.write(target, "b32")
    value = b.read(source, "b32")
    lane_of, clamp_of = b.read(lane_operand, "u32"), b.read(clamp_operand, "u32")
    mode = m.mode

    def step(w: Any, i: Index) -> None:
        lane = (w.lane if i is None else w.lane[i]).astype(np.int64)
        operand = lane_of(w, i).astype(np.int64) & 31
        c = clamp_of(w, i).astype(np.int64)
        segment = c >> 8 & 31
        edge = (lane & segment) | (c & 31 & ~segment)
        start = lane & segment
        if mode == "up":
            pick = lane - operand
            inside = pick >= edge
        elif mode == "down":
            pick = lane + operand
            inside = pick <= edge
        elif mode == "bfly":
            pick = lane ^ operand
            inside = pick <= edge
        else:
            pick = start | (operand & ~segment)
            inside = pick <= edge
        pick = np.where(inside, pick, lane)
        threads = (w.warp_base if i is None else w.warp_base[i]) + pick
        if w.checkers and i is not None:
            _check_sources(w, i, threads, pick)
        # The source lane's register is read, so the value is taken from all threads of the wave.
        values = value(w, None)
        values = values[threads] if values.ndim else np.full(lane.size, values)
        write(w, i, values)
        if predicate is not None:
            predicate(w, i, np.broadcast_to(inside, lane.shape))

    return step


def _check_sources(w: Any, i: npt.NDArray[np.intp], threads: Array, pick: Array) -> None:
    missing = ~_active(w, i)[np.minimum(threads, w.threads - 1)]
    if missing.any():
        k = first(missing)
        raise Fault("warp_mask", f"shfl.sync reads lane {int(pick[k])}, which does not take part", position(i, k))


def _per_warp(w: Any, i: Index, bits: Array) -> npt.NDArray[np.uint32]:
    """For each thread of the fragment, the 32 bits of its warp whose lanes have a true entry in `bits`."""
    warps = w.warp if i is None else w.warp[i]
    lanes = w.lane if i is None else w.lane[i]
    weights = (np.uint32(1) << lanes) * np.broadcast_to(bits, lanes.shape)
    ballots = np.bincount(warps, weights, w.block_count * w.warps_per_block).astype(np.uint32)
    return ballots[warps]


def _present(w: Any, i: Index) -> npt.NDArray[np.uint32]:
    return _per_warp(w, i, np.ones(w.count(i), bool))


@instruction("vote .sync mode=all|any|uni .pred", kind="sync")
def vote(b: Lowering, m: Modifiers) -> Step:
    mask = member_mask(b, b.operands[2])
    source = b.read(b.operands[1], "pred")
    write = b.write(b.operands[0], "pred")

    def step(w: Any, i: Index) -> None:
        # Only lanes of the thread's own group count.
        votes = _per_warp(w, i, source(w, i)) & mask(w, i)
        everyone = _present(w, i) & mask(w, i)
        if m.mode == "all":
            result = votes == everyone
        elif m.mode == "any":
            result = votes != 0
        else:
            result = (votes == 0) | (votes == everyone)
        write(w, i, result)

    return step


@instruction("vote .sync .ballot .b32", kind="sync")
def ballot(b: Lowering, m: Modifiers) -> Step:
    mask = member_mask(b, b.operands[2])
    source = b.read(b.operands[1], "pred")
    write = b.write(b.operands[0], "b32")
    return lambda w, i: write(w, i, _per_warp(w, i, source(w, i)) & mask(w, i))


@instruction("match mode=any|all .sync type=b32|b64", kind="sync")
@instruction("match .sync mode=any|all type=b32|b64", kind="sync")
def match(b: Lowering, m: Modifiers) -> Step:
    target = b.operands[0]
    mask = member_mask(b, b.operands[2])
    predicate = None
    if isinstance(target, ptx.Pair):
        predicate = b.write(target.second, "pred")
        target = target.first
    value = b.full(b.read(b.operands[1], m.type))
    write = b.write(target, "b32")

    def step(w: Any, i: Index) -> None:
        values = value(w, i)
        warps = (w.warp if i is None else w.warp[i]).astype(np.uint64)
        lanes = w.lane if i is None else w.lane[i]
        _, group = np.unique(np.stack((warps, values.astype(np.uint64))), axis=1, return_inverse=True)
        group = group.reshape(-1)
        equal = np.bincount(group, np.uint32(1) << lanes).astype(np.uint32)[group] & mask(w, i)
        if m.mode == "any":
            write(w, i, equal)
            return
        same = equal == (_present(w, i) & mask(w, i))
        write(w, i, np.where(same, equal, np.uint32(0)))
        if predicate is not None:
            predicate(w, i, same)

    return step


@instruction("activemask .b32")
def activemask(b: Lowering, m: Modifiers) -> Step:
    write = b.write(b.operands[0], "b32")
    return lambda w, i: write(w, i, _present(w, i))


@instruction("elect .sync", kind="sync")
def elect(b: Lowering, m: Modifiers) -> Step:
    """The leader is the lowest lane of the mask; the ISA leaves the choice open."""
    target = b.operands[0]
    mask = member_mask(b, b.operands[1])
    if not isinstance(target, ptx.Pair):
        raise b.fail("elect.sync needs `d|p`")
    leader = b.write(target.first, "b32")
    predicate = b.write(target.second, "pred")

    def step(w: Any, i: Index) -> None:
        members = _present(w, i) & mask(w, i)
        lowest = np.bitwise_count((members & (~members + np.uint32(1))) - np.uint32(1)).astype(np.uint32)
        lanes = w.lane if i is None else w.lane[i]
        leader(w, i, lowest)
        predicate(w, i, lanes == lowest)

    return step


def _reduce(w: Any, i: Index, values: Array, masks: Any, op: np.ufunc) -> Array:
    """`op` over the lanes of each thread's group, in order of lanes."""
    warps = w.warp if i is None else w.warp[i]
    group = warps.astype(np.uint64) << np.uint64(32) | np.broadcast_to(masks, warps.shape).astype(np.uint64)
    order = np.argsort(group, kind="stable")
    edges = np.flatnonzero(np.concatenate(([True], group[order][1:] != group[order][:-1])))
    reduced = op.reduceat(values[order], edges)
    spread = np.empty(values.size, reduced.dtype)
    spread[order] = np.repeat(reduced, np.diff(np.append(edges, values.size)))
    return spread


_REDUX = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
          "xor": np.bitwise_xor}  # fmt: skip


@instruction("redux .sync op=add|min|max type=u32|s32", kind="sync")
@instruction("redux .sync op=and|or|xor type=b32", kind="sync")
def redux(b: Lowering, m: Modifiers) -> Step:
    mask = member_mask(b, b.operands[2])
    kind = "u32" if m.op == "add" else m.type
    value = b.full(b.read(b.operands[1], kind))
    write = b.write(b.operands[0], kind)
    op = _REDUX[m.op]
    return lambda w, i: write(w, i, _reduce(w, i, value(w, i), mask(w, i), op).astype(value(w, i).dtype))


@instruction("redux .sync op=min|max .NaN .abs .f32", kind="sync", features=("sm_100a",))
@instruction("redux .sync op=min|max .abs? .NaN? .f32", kind="sync", features=("sm_100a",))
def redux_float(b: Lowering, m: Modifiers) -> Step:
    mask = member_mask(b, b.operands[2])
    value = b.full(b.read(b.operands[1], "f32"))
    write = b.write(b.operands[0], "f32")
    largest, nan = m.op == "max", bool(m.NaN)

    def step(w: Any, i: Index) -> None:
        v = value(w, i)
        if m.abs:
            v = np.abs(v)
        # Order the bits as integers, so that -0 is below +0; NaN is set apart.
        bits = v.view(np.int32)
        key = np.where(bits < 0, ~bits ^ np.int32(-(2**31)), bits)
        isnan = np.isnan(v)
        skip = np.int32(-(2**31)) if largest else np.int32(2**31 - 1)
        key = np.where(isnan, skip, key)
        masks = mask(w, i)
        best = _reduce(w, i, key, masks, np.maximum if largest else np.minimum)
        back = np.where(best < 0, ~(best ^ np.int32(-(2**31))), best).astype(np.int32).view(np.float32)
        anynan = _reduce(w, i, isnan.astype(np.uint8), masks, np.maximum).astype(bool)
        allnan = _reduce(w, i, isnan.astype(np.uint8), masks, np.minimum).astype(bool)
        bad = anynan if nan else allnan
        write(w, i, floats.canonical(np.where(bad, np.float32(np.nan), back).astype(np.float32)))

    return step


@instruction("bar .warp .sync", kind="sync")
def bar_warp(b: Lowering, m: Modifiers) -> Step:
    mask = member_mask(b, b.operands[0])

    def step(w: Any, i: Index) -> None:
        if w.tracker is not None:
            w.tracker.warp_barrier(w, i, mask(w, i))

    return step
