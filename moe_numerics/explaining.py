"""Whether quantised outputs that differ from the reference can be right all the same.

A code, a scale or an amax is explained only if one set of values, each inside its enclosure, quantises to exactly what
was written: row-wise and column-wise copies of a tensor and its amax all come from these values. The answer is exact,
not a search: the float32 values that give a code under a scale are an interval, as are the amaxes that give a scale; a
block's scale asks that no value exceeds the interval's upper end and that one reaches its lower end; and the values
largest in magnitude serve every block at once. The intervals are found by bisection of the reference's own rounding,
for whatever contract.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_numerics.bounds import Enclosure
from moe_numerics.reference import mxfp8
from moe_numerics.reference.amax import INF_BITS
from moe_numerics.reference.contract import Contract
from moe_numerics.reference.formats import FloatFormat
from moe_numerics.reference.ragged import Experts

__all__ = ["Verdict", "explain_mxfp8", "float32_interval", "preimages", "scale_intervals"]

NAN_SCALE = 255
BISECTIONS = 33


@dataclass(frozen=True)
class Verdict:
    """Of each element of an output: whether it is explained, and whether the bounds decide it at all."""

    explained: Tensor
    decided: Tensor


def _key(x: Tensor) -> Tensor:
    """int64 in the order of float32 values, -0 below +0."""
    bits = x.contiguous().view(torch.int32).to(torch.int64)
    return torch.where(bits >= 0, bits, -1 - (bits & 0x7FFFFFFF))


def _value(key: Tensor) -> Tensor:
    """The float32 of a key."""
    bits = torch.where(key >= 0, key, (-1 - key) - (1 << 31))
    return bits.to(torch.int32).view(torch.float32)


def float32_interval(enclosure: Enclosure) -> tuple[Tensor, Tensor]:
    """Keys of the smallest and the largest float32 inside, both zeros where one is; empty if the first is larger."""
    low, high = enclosure.value - enclosure.error, enclosure.value + enclosure.error
    nearest_low, nearest_high = low.float(), high.float()
    lower, upper = _key(nearest_low), _key(nearest_high)
    lower = torch.where(nearest_low == 0, torch.where(low > 0, 1, -1), lower)
    upper = torch.where(nearest_high == 0, torch.where(high < 0, -2, 0), upper)
    lower = lower + ((nearest_low.double() < low) & (nearest_low != 0)).to(torch.int64)
    upper = upper - ((nearest_high.double() > high) & (nearest_high != 0)).to(torch.int64)
    return lower, upper


def _staged(x: Tensor, contract: Contract) -> Tensor:
    return x.to(torch.bfloat16).to(torch.float32) if contract.staging == "bfloat16" else x


def _bisect(low: Tensor, high: Tensor, reached: Callable[[Tensor], Tensor]) -> Tensor:
    """The least key in [low, high] at which a monotone predicate holds, high + 1 where none does."""
    first, last = low.clone(), high + 1
    for _ in range(BISECTIONS):
        middle = ((first + last) >> 1).minimum(high)
        unfinished, holds = first < last, reached(middle)
        last = torch.where(unfinished & holds, middle, last)
        first = torch.where(unfinished & ~holds, middle + 1, first)
    return last


def preimages(codes: Tensor, scales: Tensor, element: FloatFormat, contract: Contract) -> tuple[Tensor, Tensor]:
    """Keys of the first and the last finite float32 that quantise to each code under each E8M0 scale.

    codes, scales: uint8 of one shape. Where nothing does, as for a NaN code, the first is above the last.
    """
    joined = codes.to(torch.int64) * 256 + scales.to(torch.int64)
    pairs, place = joined.unique(return_inverse=True)
    wanted, scale = pairs // 256, pairs % 256
    factor = mxfp8.multipliers(scale.to(torch.uint8), contract)

    def order(code: Tensor) -> Tensor:
        wide = code.to(torch.int64)
        return torch.where(wide < element.sign_mask, wide, -1 - (wide & (element.sign_mask - 1)))

    def at(key: Tensor) -> Tensor:
        return order(element.encode(_staged(_value(key), contract) * factor))

    # An Inf is never decided, and under a multiplier of 0 it gives NaN, which has no order.
    largest = torch.full_like(pairs, INF_BITS - 1)
    low, high = -1 - largest, largest
    target = order(wanted)
    first = _bisect(low, high, lambda key: at(key) >= target)
    last = _bisect(low, high, lambda key: at(key) > target) - 1
    return first[place], last[place]


def scale_intervals(element: FloatFormat, contract: Contract) -> tuple[Tensor, Tensor]:
    """Keys of the first and the last amax that give each E8M0 code, int64 [256]; first > last where none does."""
    codes = torch.arange(256)
    low, high = torch.zeros(256, dtype=torch.int64), torch.full((256,), INF_BITS, dtype=torch.int64)

    def at(key: Tensor) -> Tensor:
        bits = _staged(_value(key), contract).view(torch.int32)
        return mxfp8.scale_codes(bits, element, contract).to(torch.int64)

    first = _bisect(low, high, lambda key: at(key) >= codes)
    last = _bisect(low, high, lambda key: at(key) > codes) - 1
    return first, last


@dataclass(frozen=True)
class _Copy:
    """One copy of a tensor: how its blocks lie. spread and block_max go from blocks to elements and back."""

    spread: Callable[[Tensor], Tensor]
    block_max: Callable[[Tensor], Tensor]


def _copies(experts: Experts) -> dict[str, _Copy]:
    block = mxfp8.BLOCK

    def columns(x: Tensor) -> Tensor:
        return experts.to_blocks(x, block).view(experts.colwise_rows(block), block, x.shape[1]).amax(1)

    return {
        "rowwise": _Copy(
            lambda x: x.repeat_interleave(block, dim=1), lambda x: x.view(len(x), x.shape[1] // block, block).amax(2)
        ),
        "colwise": _Copy(
            lambda x: experts.from_blocks(x.repeat_interleave(block, dim=0), block),
            columns,
        ),
    }


def _interval_of_magnitude(low: Tensor, high: Tensor) -> Tensor:
    """The largest magnitude's key in [low, high], -1 where it is empty."""
    return torch.where(low <= high, torch.maximum(high, -1 - low), -1)


def explain_mxfp8(
    values: Enclosure,
    got: Mapping[str, Tensor],
    element: FloatFormat,
    contract: Contract,
    experts: Experts,
    amax: Enclosure | None = None,
) -> dict[str, Verdict]:
    """Whether each code, scale and amax can be right: a verdict for each of those outputs that `got` holds.

    values: what is quantised, [capacity, hidden], in float32. got: any of codes_rowwise with scales_rowwise,
    codes_colwise with scales_colwise, amax, as `elementwise.write_values` gives them. amax: what else is known of the
    amax of each expert. An undecided value leaves its blocks, and its expert's amax, undecided; a NaN explains nothing
    there but what the reference gives.
    """
    valid = experts.valid_rows().unsqueeze(1)
    nan = torch.isnan(values.value) & valid
    undecided = ~values.decided & valid
    low, high = float32_interval(values)
    infinity = INF_BITS
    free = undecided | nan
    zero = torch.zeros_like(low)
    low = torch.where(valid, torch.where(free, -1 - infinity, low), zero)
    high = torch.where(valid, torch.where(free, infinity, high), zero)
    copies = {
        name: copy for name, copy in _copies(experts).items() if f"codes_{name}" in got and f"scales_{name}" in got
    }
    first_amax, last_amax = scale_intervals(element, contract)
    open_blocks: dict[str, Tensor] = {}
    undecided_blocks: dict[str, Tensor] = {}
    for name, copy in copies.items():
        scales = got[f"scales_{name}"].to(torch.int64)
        undecided_blocks[name] = copy.block_max(undecided.to(torch.int64)) > 0
        open_blocks[name] = undecided_blocks[name] | (copy.block_max(nan.to(torch.int64)) > 0)
        closed = valid & ~copy.spread(open_blocks[name].to(torch.int64)).bool()
        of_element = copy.spread(scales)
        first, last = preimages(got[f"codes_{name}"], of_element.to(torch.uint8), element, contract)
        limit = last_amax[of_element]
        low = torch.where(closed, torch.maximum(low, torch.maximum(first, -1 - limit)), low)
        high = torch.where(closed, torch.minimum(high, torch.minimum(last, limit)), high)
    owner = experts.row_expert().clamp(min=0)
    if "amax" in got:
        limit = _key(got["amax"].float()).masked_fill(torch.isnan(got["amax"]), infinity)
        reach = _last_staged(limit, contract)[owner].unsqueeze(1)
        low = torch.where(valid & ~free, torch.maximum(low, -1 - reach), low)
        high = torch.where(valid & ~free, torch.minimum(high, reach), high)
    possible = (low <= high) | ~valid | free
    magnitude = _interval_of_magnitude(low, high)
    verdicts: dict[str, Verdict] = {}
    for name, copy in copies.items():
        scales = got[f"scales_{name}"].to(torch.int64)
        all_possible = copy.block_max((~possible).to(torch.int64)) == 0
        reached = copy.block_max(magnitude) >= first_amax[scales]
        closed_blocks = ~open_blocks[name]
        block_ok = closed_blocks & all_possible & reached & (scales != NAN_SCALE)
        spread_closed = copy.spread(closed_blocks.to(torch.int64)).bool()
        spread_decided = ~copy.spread(undecided_blocks[name].to(torch.int64)).bool()
        verdicts[f"codes_{name}"] = Verdict(possible & spread_closed, spread_decided)
        verdicts[f"scales_{name}"] = Verdict(block_ok, ~undecided_blocks[name])
    if "amax" in got:
        verdicts["amax"] = _explain_amax(got["amax"], magnitude, possible, nan, undecided, experts, contract)
    return verdicts


def _last_staged(limit: Tensor, contract: Contract) -> Tensor:
    """The last magnitude whose staged value does not exceed the limit."""
    if contract.staging == "none":
        return limit
    low, high = torch.zeros_like(limit), torch.full_like(limit, INF_BITS)
    return _bisect(low, high, lambda key: _key(_staged(_value(key), contract)) > limit) - 1


def _explain_amax(
    got: Tensor,
    magnitude: Tensor,
    possible: Tensor,
    nan: Tensor,
    undecided: Tensor,
    experts: Experts,
    contract: Contract,
) -> Verdict:
    explained, decided = [], []
    wanted = _key(got.float())
    for expert, (start, count) in enumerate(zip(experts.starts, experts.counts, strict=True)):
        rows = slice(start, start + count)
        decided.append(not bool(undecided[rows].any()))
        if not count or bool(nan[rows].any()):
            explained.append(False)
            continue
        largest = _key(_staged(_value(magnitude[rows].amax().clamp(min=0)), contract))
        explained.append(bool(possible[rows].all()) and int(largest) >= int(wanted[expert]))
    return Verdict(torch.tensor(explained, dtype=torch.bool), torch.tensor(decided, dtype=torch.bool))
