"""Compares one output of a fused kernel with its reference: bits first, then ULPs and derived bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from moe_numerics.findings import (
    COLUMN_BUCKETS,
    ERROR_BINS,
    CompareError,
    Finding,
    FirstMismatch,
    merge,
    unchecked_output,
)
from moe_numerics.number_lines import LINES, PACKED, Codes, NumberLine, bit_view
from moe_numerics.reference.formats import unpack_e2m1

__all__ = [
    "CompareError",
    "Explanation",
    "Finding",
    "FirstMismatch",
    "compare_output",
    "merge",
    "unchecked_output",
]

Explanation = Callable[[torch.Tensor], torch.Tensor]
"""From a bool tensor of mismatching elements to a bool tensor of those among them that are explained."""

_ULP_ENDS = np.array([1 << power for power in range(64)], dtype=np.uint64)


def compare_output(
    name: str,
    expected: torch.Tensor,
    got: torch.Tensor,
    *,
    format: str | None = None,
    owned: torch.Tensor | None = None,
    row_expert: torch.Tensor | None = None,
    fill: int | torch.Tensor | None = None,
    oracle: torch.Tensor | None = None,
    bound: torch.Tensor | None = None,
    explains: Explanation | None = None,
    nan: Literal["class", "bits"] = "class",
) -> Finding:
    """What differs between an output and its reference, element by element, and what explains it.

    `expected` and `got`: tensors of one shape and dtype, [rows, ...]; compared on the device of `got`.
    `format`: name of the number format (`bfloat16`, `float32`, `E4M3`, `E8M0`, `int32`, ...; `E2M1x2` is two
    E2M1 codes a byte, which count as two elements); may be left out where the dtype says it, that is for all
    but uint8. `owned`: bool, [rows] or broadcastable to the output, True where the path has to write;
    everywhere else `got` must still hold `fill` (bits of an element of the tensor, or a tensor with what the
    buffer held before; None: anything may be there). `row_expert`: int [rows], the expert of each row, -1 for
    none. `oracle` and `bound`: float64, broadcastable to the output; |got - oracle| <= bound explains a
    differing float. `explains`: called with a bool tensor of the mismatching elements (of the output's shape,
    unpacked), gives a bool tensor of the same shape. With `bound` or `explains` the grade is bounded, else
    exact.

    Bits decide: -0 and +0 differ. With `nan="class"` any NaN equals any other of the same format, with
    `nan="bits"` only one of the same bits. A NaN where a number was expected is never within a bound.
    Raises CompareError where shapes, dtypes or formats do not fit.
    """
    line, packed = _line(name, format, expected, got)
    if expected.shape != got.shape:
        raise CompareError(
            f"output {name!r} has shape {list(got.shape)}, expected {list(expected.shape)}: "
            "give both tensors in the layout of the path"
        )
    if (oracle is None) != (bound is None):
        raise CompareError(f"output {name!r}: oracle and bound belong together, only one of them was given")
    if bound is not None and not got.dtype.is_floating_point:
        raise CompareError(
            f"output {name!r} holds {line.name} codes: a bound applies to float outputs, use explains instead"
        )
    if nan not in ("class", "bits"):
        raise CompareError(f"nan = {nan!r}: expected 'class' or 'bits'")

    device = got.device
    owned_mask = _owned(name, owned, got)
    fill_bits = _fill(name, fill, got)
    expected_bits, got_bits = bit_view(expected.detach().to(device)), bit_view(got.detach())
    if packed:
        expected_bits, got_bits = unpack_e2m1(expected_bits), unpack_e2m1(got_bits)
        fill_bits = None if fill_bits is None else unpack_e2m1(fill_bits)
        owned_mask = None if owned_mask is None else owned_mask.repeat_interleave(2, dim=-1)
    shape = got_bits.shape
    rows = shape[0] if shape else 1
    columns = math.prod(shape[1:])

    differs = expected_bits != got_bits
    elements = got_bits.numel()
    outside = torch.empty(0, dtype=torch.int64, device=device)
    if owned_mask is not None:
        elements = int(owned_mask.sum())
        differs &= owned_mask
        if fill_bits is not None:
            outside = ((got_bits != fill_bits) & ~owned_mask).flatten().nonzero().flatten()
    index = differs.flatten().nonzero().flatten()
    expected_codes = _codes(expected_bits, index)
    got_codes = _codes(got_bits, index)
    expected_nan, got_nan = line.is_nan(expected_codes), line.is_nan(got_codes)
    if nan == "class":
        keep = ~(expected_nan & got_nan)
        index = index[torch.from_numpy(keep).to(device)]
        expected_codes, got_codes = expected_codes[keep], got_codes[keep]
        expected_nan, got_nan = expected_nan[keep], got_nan[keep]

    explained = np.zeros(index.numel(), dtype=np.bool_)
    error_histogram: dict[str, int] = {}
    sharpness: float | None = None
    if oracle is not None and bound is not None:
        ratio = _error_over_bound(name, got, oracle, bound)
        explained |= (ratio.flatten()[index] <= 1).cpu().numpy()
        owned_ratio = ratio.flatten() if owned_mask is None else ratio[owned_mask]
        error_histogram, sharpness = _error_statistics(owned_ratio)
    if explains is not None:
        mask = torch.zeros(got_bits.numel(), dtype=torch.bool, device=device)
        mask[index] = True
        explained |= _explained_by(name, explains, mask.reshape(shape)).flatten()[index].cpu().numpy()

    comparable = ~(expected_nan | got_nan)
    distances = line.distance(expected_codes[comparable], got_codes[comparable])
    nan_mismatches = int((~comparable).sum())
    equal = elements - index.numel()
    experts = _experts(name, row_expert, rows)
    everywhere = torch.cat((index, outside)).cpu().numpy()
    unexplained = int((~explained).sum())
    first = _first_mismatch(
        line,
        expected_bits,
        got_bits,
        fill_bits,
        everywhere,
        np.concatenate((explained, np.zeros(outside.numel(), dtype=np.bool_))),
        index.numel(),
        experts,
    )
    return Finding(
        output=name,
        grade="exact" if bound is None and explains is None else "bounded",
        elements=elements,
        bit_equal=equal,
        explained=index.numel() - unexplained,
        unexplained=unexplained + outside.numel(),
        outside=outside.numel(),
        max_ulp=_max_ulp(distances, equal),
        ulp_histogram=_ulp_histogram(distances, equal, nan_mismatches),
        error_histogram=error_histogram,
        sharpness=sharpness,
        mismatch_map=_mismatch_map(everywhere, columns, experts),
        experts=0 if experts is None or not rows else int(experts.max()) + 1,
        columns=columns,
        first_mismatch=first,
    )


def _line(name: str, format_name: str | None, expected: torch.Tensor, got: torch.Tensor) -> tuple[NumberLine, bool]:
    if expected.dtype != got.dtype:
        raise CompareError(
            f"output {name!r} has dtype {got.dtype}, expected {expected.dtype}: "
            "give codes and scales as torch.uint8, floats in the type of the path"
        )
    chosen = str(got.dtype).removeprefix("torch.") if format_name is None else format_name
    line = LINES.get(PACKED.get(chosen, chosen))
    if line is None or (format_name is None and got.dtype == torch.uint8):
        raise CompareError(
            f"output {name!r}: format = {format_name!r} for a tensor of {got.dtype}: "
            f"expected one of {sorted([*LINES, *PACKED])}"
        )
    if line.dtype != got.dtype:
        raise CompareError(
            f"output {name!r} has dtype {got.dtype}, but format {chosen} is held in {line.dtype}: "
            "correct the format or the tensor"
        )
    return line, chosen in PACKED


def _owned(name: str, owned: torch.Tensor | None, got: torch.Tensor) -> torch.Tensor | None:
    if owned is None:
        return None
    if owned.dtype != torch.bool:
        raise CompareError(f"output {name!r}: owned has dtype {owned.dtype}, expected torch.bool")
    mask = owned.to(got.device)
    if mask.ndim == 1 and got.ndim > 1 and mask.shape[0] == got.shape[0]:
        mask = mask.reshape(-1, *(1,) * (got.ndim - 1))
    return _broadcast(name, "owned", mask, got.shape)


def _fill(name: str, fill: int | torch.Tensor | None, got: torch.Tensor) -> torch.Tensor | None:
    """What the buffer held before, as bits in the shape of `got`."""
    if fill is None:
        return None
    if isinstance(fill, torch.Tensor):
        if fill.dtype != got.dtype:
            raise CompareError(f"output {name!r}: fill has dtype {fill.dtype}, expected {got.dtype}")
        return _broadcast(name, "fill", bit_view(fill.to(got.device)), got.shape)
    bits = got.element_size() * 8
    if not 0 <= fill < 1 << bits:
        raise CompareError(f"output {name!r}: fill = {fill:#x}, expected the {bits} bits of {got.dtype}")
    storage = bit_view(got).dtype
    signed = fill - (1 << bits) if storage != torch.uint8 and fill >> (bits - 1) else fill
    return torch.tensor(signed, dtype=storage, device=got.device).expand(got.shape)


def _broadcast(name: str, what: str, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    try:
        return tensor.expand(shape)
    except RuntimeError:
        raise CompareError(
            f"output {name!r}: {what} has shape {list(tensor.shape)}, expected one that broadcasts to {list(shape)}"
        ) from None


def _codes(bits: torch.Tensor, index: torch.Tensor) -> Codes:
    """The selected elements as unsigned codes, on the CPU."""
    selected = bits.flatten()[index].cpu().numpy()
    return selected.view(f"u{selected.itemsize}").astype(np.uint64)


def _error_over_bound(name: str, got: torch.Tensor, oracle: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """|got - oracle| / bound in float64, of the shape of `got`: 0 where they agree, NaN if one is NaN."""
    for what, tensor in (("oracle", oracle), ("bound", bound)):
        if tensor.dtype != torch.float64:
            raise CompareError(f"output {name!r}: {what} has dtype {tensor.dtype}, expected torch.float64")
    value = got.detach().double()
    target = _broadcast(name, "oracle", oracle.to(got.device), got.shape)
    limit = _broadcast(name, "bound", bound.to(got.device), got.shape)
    agree = (value == target) | (value.isnan() & target.isnan())
    # An infinite error is never inside a bound, not even an infinite one: Inf / Inf is NaN, which fails.
    return torch.where(agree, 0.0, (value - target).abs() / limit)


def _error_statistics(ratio: torch.Tensor) -> tuple[dict[str, int], float | None]:
    if ratio.numel() == 0:
        return {}, None
    ends = torch.tensor([end for _, end in ERROR_BINS], dtype=torch.float64, device=ratio.device)
    numbers = ratio[~ratio.isnan()]
    counts = torch.bincount(torch.bucketize(numbers, ends), minlength=len(ERROR_BINS)).tolist()
    histogram = {label: count for (label, _), count in zip(ERROR_BINS, counts, strict=True) if count}
    if numbers.numel() < ratio.numel():
        histogram["nan"] = ratio.numel() - numbers.numel()
    return histogram, float(numbers.max()) if numbers.numel() else None


def _explained_by(name: str, explains: Explanation, mask: torch.Tensor) -> torch.Tensor:
    result = explains(mask)
    if result.dtype != torch.bool or result.shape != mask.shape:
        raise CompareError(
            f"output {name!r}: explains gave {result.dtype} of shape {list(result.shape)}, "
            f"expected torch.bool of shape {list(mask.shape)}"
        )
    return result.to(mask.device)


def _experts(name: str, row_expert: torch.Tensor | None, rows: int) -> npt.NDArray[np.int64] | None:
    if row_expert is None:
        return None
    if row_expert.shape != (rows,):
        raise CompareError(f"output {name!r}: row_expert has shape {list(row_expert.shape)}, expected [{rows}]")
    return row_expert.cpu().numpy().astype(np.int64)


def _max_ulp(distances: Codes, equal: int) -> int | None:
    if distances.size:
        return int(distances.max())
    return 0 if equal else None


def _ulp_histogram(distances: Codes, equal: int, nan_mismatches: int) -> dict[str, int]:
    histogram = {"0": equal} if equal else {}
    powers = np.searchsorted(_ULP_ENDS, distances, side="right")
    for power, count in enumerate(np.bincount(powers).tolist()):
        if count:
            low, high = 1 << (power - 1), (1 << power) - 1
            histogram[str(low) if low == high else f"{low}-{high}"] = count
    if nan_mismatches:
        histogram["nan"] = nan_mismatches
    return histogram


def _mismatch_map(
    index: npt.NDArray[np.int64], columns: int, experts: npt.NDArray[np.int64] | None
) -> tuple[tuple[int, int, int], ...]:
    if not index.size:
        return ()
    row, column = np.divmod(index, columns)
    expert = np.full_like(row, -1) if experts is None else experts[row]
    # The bucket in which the middle of a column lies, so that maps of outputs of different widths add up.
    bucket = (2 * column + 1) * COLUMN_BUCKETS // (2 * columns)
    counts = np.bincount((expert + 1) * COLUMN_BUCKETS + bucket)
    return tuple(
        (int(cell) // COLUMN_BUCKETS - 1, int(cell) % COLUMN_BUCKETS, int(counts[cell]))
        for cell in np.flatnonzero(counts)
    )


def _first_mismatch(
    line: NumberLine,
    expected_bits: torch.Tensor,
    got_bits: torch.Tensor,
    fill_bits: torch.Tensor | None,
    index: npt.NDArray[np.int64],
    explained: npt.NDArray[np.bool_],
    inside: int,
    experts: npt.NDArray[np.int64] | None,
) -> FirstMismatch | None:
    """The first unexplained mismatch in row-major order, else the first one.

    What stands in `index[inside:]` is not the path's to write: there `fill_bits` are expected.
    """
    if not index.size:
        return None
    candidates = np.flatnonzero(~explained) if not explained.all() else np.arange(index.size)
    chosen = int(candidates[np.argmin(index[candidates])])
    position = int(index[chosen])
    row, column = divmod(position, math.prod(got_bits.shape[1:]))
    coordinates = {"row": row}
    if experts is not None:
        coordinates["expert"] = int(experts[row])
        if experts[row] >= 0:
            coordinates["row in expert"] = row - int(np.argmax(experts == experts[row]))
    if got_bits.ndim > 1:
        coordinates["column"] = column
    at = torch.tensor([position], device=got_bits.device)
    outside = fill_bits is not None and chosen >= inside
    expected_code = int(_codes(fill_bits if outside and fill_bits is not None else expected_bits, at)[0])
    got_code = int(_codes(got_bits, at)[0])
    first = FirstMismatch(
        coordinates=coordinates,
        expected_bits=line.hex(expected_code),
        got_bits=line.hex(got_code),
        expected=line.text(expected_code),
        got=line.text(got_code),
        explained=bool(explained[chosen]),
    )
    if outside:
        first["outside"] = True
    return first
