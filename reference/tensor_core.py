"""Tensor-core matrix products, bit for bit: one table of accumulation models, one arithmetic.

A tensor core adds the products of a group of L values of K and the accumulator in fixed point: every term is
truncated to F bits below the largest exponent of the group, the truncated terms are added exactly, and the
sum is rounded once. A longer K is a chain of such groups. Architectures and types differ in the numbers of
the `MODELS` table and in nothing else. tensor_core_models.py has the table and its sources.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .tensor_core_models import MODELS, OPERANDS, Model, find_model
from .tensor_core_operands import NO_EXPONENT, Side, exponent, power_of_two, prepare

__all__ = ["MODELS", "OPERANDS", "Model", "accumulate", "accumulation_bound", "find_model", "matmul"]

NAN_F32_BITS = 0x7FFFFFFF
NAN_F16_BITS = 0x7FFF
# Elements of the result worked on at once: a tile whose scratch stays in the cache on a CPU, fills a GPU.
TILE_ELEMENTS = {"cpu": 1 << 14, "cuda": 1 << 22}


def matmul(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    model: str = "sm_90.bf16",
    *,
    a_format: str | None = None,
    b_format: str | None = None,
    scales_a: Tensor | None = None,
    scales_b: Tensor | None = None,
    restart: int = 0,
) -> Tensor:
    """Gives a @ b + c with the bits of a tensor core that goes through K upwards, without split-K.

    a [M, K], b [K, N]: float tensors that hold values of the operand format (tf32: the low 13 bits of a
    float32 are dropped), or its codes: uint8, one code a byte, or a torch float8 tensor. `a_format` and
    `b_format` name the formats, by default the first operand format of the model. c [M, N]: float32, absent
    is +0. Block-scaled models: scales_a [M, ceil(K / block)] and scales_b [ceil(K / block), N], uint8 codes
    of the model's scale format (of an e4m3 scale the sign bit is ignored). A K that is no multiple of the
    model's group is padded with zeros.

    `restart`: begin a new chain at +0 every `restart` values of K and add the chains' results in float32,
    rounded to nearest (FP8 promotion: 128 in cuBLAS without fast accumulation and in DeepGEMM).

    The result is float32 [M, N], float16 for models that accumulate in float16. K = 0 gives c. A zero sum is
    +0. Any NaN, Inf * 0 or Inf - Inf gives the NaN 0x7FFFFFFF (float16: 0x7FFF); a sum of 2^128 or more is
    Inf. The bits are the same on CPU and CUDA.

    Raises ValueError for shapes that do not fit, values that the format does not have, missing or superfluous
    scales and a `restart` that is no multiple of the model's group.
    """
    row = find_model(model)
    _check_shapes(row, a, b, restart)
    scales_b = None if scales_b is None else scales_b.t()
    left, nan_left = prepare(row, "a", a, a_format, scales_a, check=True)
    right, nan_right = prepare(row, "b", b.t(), b_format, scales_b, check=True)
    result = _start(row, c, (a.shape[0], b.shape[1]), a.device).unsqueeze(0)
    if not restart:
        result = _chain(row, left, right, result)
    for begin in range(0, left.length if restart else 0, restart or 1):
        part = slice(begin, begin + restart)
        result = result + _chain(row, left.part(row, part), right.part(row, part), torch.zeros_like(result))
    return _finish(row, result, nan_left, nan_right)[0]


def accumulate(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    model: str = "sm_90.bf16",
    *,
    a_format: str | None = None,
    b_format: str | None = None,
    scales_a: Tensor | None = None,
    scales_b: Tensor | None = None,
) -> Tensor:
    """Gives what MMA instructions deliver, for a batch of them: `matmul` with K last in both operands.

    a [..., M, K], b [..., N, K], c [..., M, N]; scales_a [..., M, ceil(K / block)], scales_b
    [..., N, ceil(K / block)]; leading dimensions are equal in all. Types, special values and the result are
    those of `matmul`, but values are not checked to be in their format: this is the inner loop of an
    executor that decodes registers and memory itself.
    """
    row = find_model(model)
    if a.ndim < 2 or a.ndim != b.ndim or a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-1]:
        raise ValueError(f"a {list(a.shape)} and b {list(b.shape)}: expected a [..., M, K] and b [..., N, K]")
    left, nan_left = prepare(row, "a", a, a_format, scales_a, check=False)
    right, nan_right = prepare(row, "b", b, b_format, scales_b, check=False)
    shape = (*a.shape[:-1], b.shape[-2])
    start = _start(row, c, shape, a.device).reshape(left.values.shape[1], *shape[-2:])
    return _finish(row, _chain(row, left, right, start), nan_left, nan_right).reshape(shape)


def accumulation_bound(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    model: str = "sm_90.bf16",
    *,
    a_format: str | None = None,
    b_format: str | None = None,
    scales_a: Tensor | None = None,
    scales_b: Tensor | None = None,
    restart: int = 0,
) -> Tensor:
    """Gives, for each element, how far `matmul` with the same arguments can be from the exact a @ b + c.

    Arguments as for `matmul`. The result is float64 [M, N], in the unit of the product. It is summed over the
    chain: a group adds less than 2^(emax - F) for each nonzero term that it truncates and 2^(1 - p) of its
    result (p = 24, 14 or, rounded to nearest, 12), and emax is bounded from the products' exponents and the
    partial sums. inf where the exact value or a partial sum is not finite or may overflow.
    """
    row = find_model(model)
    _check_shapes(row, a, b, restart)
    scales_b = None if scales_b is None else scales_b.t()
    left, nan_left = prepare(row, "a", a, a_format, scales_a, check=True)
    right, nan_right = prepare(row, "b", b.t(), b_format, scales_b, check=True)
    undefined = torch.zeros((a.shape[0], b.shape[1]), dtype=torch.bool, device=a.device)
    if nan_left is not None:
        undefined = undefined | nan_left[0, :, None]
    if nan_right is not None:
        undefined = undefined | nan_right[0, None, :]
    for side, axis in ((left, 1), (right, 0)):
        if side.signs is not None:
            undefined = undefined | torch.isinf(side.signs[:, 0]).any(0).unsqueeze(axis)
    zero = torch.zeros(undefined.shape, dtype=torch.float64, device=a.device)
    total, total_error = _start(row, c, (a.shape[0], b.shape[1]), a.device).double(), zero
    length = left.length
    limit = 65504.0 if row.rounding == "rne_f16" else (2 - 2.0**-23) * 2.0**127
    for begin in range(0, length, restart or max(length, 1)):
        joins = bool(restart) and (begin > 0 or c is not None)
        partial, error = (zero, zero) if joins else (total, total_error)
        for k in range(begin, min(length, begin + (restart or length)), row.group):
            part = slice(k, k + row.group)
            partial, error = _group_bound(row, left.part(row, part), right.part(row, part), partial, error)
            undefined |= ~(partial.abs() + error <= limit)
        if joins:
            partial, error = total + partial, total_error + error
            error = error + 2.0**-24 * (partial.abs() + error) + 2.0**-149
        total, total_error = partial, error
        undefined |= ~(total.abs() + total_error <= limit)
    return total_error.masked_fill(undefined, float("inf"))


def _check_shapes(row: Model, a: Tensor, b: Tensor, restart: int) -> None:
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"a {list(a.shape)} and b {list(b.shape)}: expected a [M, K] and b [K, N]")
    if restart < 0 or restart % row.group:
        raise ValueError(f"restart = {restart}: expected a multiple of {row.group}, the group of {row.name}")
    if restart and row.rounding == "rne_f16":
        raise ValueError(f"restart = {restart}: {row.name} accumulates in float16, chains are added in float32")


def _start(row: Model, c: Tensor | None, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """The accumulator before the first group, as float32."""
    if c is None:
        return torch.zeros(shape, dtype=torch.float32, device=device)
    dtype = torch.float16 if row.rounding == "rne_f16" else torch.float32
    if c.dtype != dtype or c.shape != shape:
        raise ValueError(f"c is {c.dtype} {list(c.shape)}: {row.name} needs {dtype} {list(shape)}")
    return c.detach().float()


def _finish(row: Model, result: Tensor, nan_left: Tensor | None, nan_right: Tensor | None) -> Tensor:
    """The accumulators [batch, M, N] in their own type, every NaN canonical."""
    undefined = torch.isnan(result)
    if nan_left is not None:
        undefined = undefined | nan_left[:, :, None]
    if nan_right is not None:
        undefined = undefined | nan_right[:, None, :]
    if row.rounding == "rne_f16":
        bits = result.to(torch.float16).view(torch.int16)
        return bits.masked_fill_(undefined, NAN_F16_BITS).view(torch.float16)
    return result.view(torch.int32).masked_fill(undefined, NAN_F32_BITS).view(torch.float32)


def _chain(row: Model, left: Side, right: Side, c: Tensor) -> Tensor:
    """All groups of K onto accumulators c [batch, M, N], float32, tile by tile: no element needs another."""
    if not left.length or not c.numel():
        return c
    careful = _needs_care(row, left, right, c)
    # Vectors run along the last dimension: the batch goes there if the instruction's N is short.
    batch_last = c.shape[0] > c.shape[2] and c.shape[2] < 32
    if batch_last:
        left, right = (side.map(lambda t: t.transpose(1, 2).contiguous()) for side in (left, right))
        left, right = left.map(lambda t: t.unsqueeze(2)), right.map(lambda t: t.unsqueeze(1))
        c = c.permute(1, 2, 0)
    else:
        left, right = left.map(lambda t: t.unsqueeze(3)), right.map(lambda t: t.unsqueeze(2))
    tiles = list(_tiles(c.shape, TILE_ELEMENTS["cuda" if c.is_cuda else "cpu"]))
    if len(tiles) == 1:
        out = _tile_chain(row, left, right, c, careful)
    else:
        out = torch.empty(c.shape, dtype=torch.float32, device=c.device)
        for tile in tiles:
            out[tile] = _tile_chain(row, _cut(left, tile), _cut(right, tile), c[tile], careful)
    return out.permute(2, 0, 1).contiguous() if batch_last else out


def _needs_care(row: Model, left: Side, right: Side, c: Tensor) -> bool:
    """Whether an Inf, an overflow or a sum that is no multiple of 2^-126 can occur anywhere in the chain."""
    if row.rounding == "rne_f16" or left.signs is not None or right.signs is not None:
        return True
    (low_left, high_left), (low_right, high_right) = left.exponent_range(), right.exponent_range()
    # A product is below 2^(exponent + 2), the exact sum of a run of FP4 products below 2^10.
    highest = min(high_left + high_right + 12, 1000)
    largest = 2.0**highest * left.length + max(abs(float(end)) for end in torch.aminmax(c))
    return low_left + low_right < row.fraction_bits - 126 or not largest < 2.0**127


def _tiles(shape: torch.Size, budget: int) -> Iterator[tuple[slice, slice, slice]]:
    """Slices that cover [X, Y, Z] with pieces of at most about `budget` elements, long in Z."""
    z = min(shape[2], max(256, budget // 64))
    y = min(shape[1], max(1, budget // z))
    x = min(shape[0], max(1, budget // (y * z)))
    for i in range(0, shape[0], x):
        for j in range(0, shape[1], y):
            for k in range(0, shape[2], z):
                yield slice(i, i + x), slice(j, j + y), slice(k, k + z)


def _cut(side: Side, tile: tuple[slice, ...]) -> Side:
    def cut(t: Tensor) -> Tensor:
        wanted = (slice(None) if size == 1 else part for size, part in zip(t.shape[1:], tile, strict=True))
        return t[(slice(None), *wanted)]

    return side.map(cut)


def _fold(op: Callable[..., Tensor], x: Tensor) -> None:
    """Combines x [2^n, ...] over its first dimension, in place: the result is x[0]."""
    size = x.shape[0]
    while size > 1:
        size //= 2
        op(x[:size], x[size : 2 * size], out=x[:size])


def _tile_chain(row: Model, left: Side, right: Side, c: Tensor, careful: bool) -> Tensor:
    """The chain on one tile: left [K, X, Y, 1] and right [K, X, 1, Z] (or the like) onto c [X, Y, Z]."""
    bits = row.fraction_bits
    # A truncated term is below 2^(F + 2): so many fit an int32.
    integer, fitting = (torch.int32, 1 << (29 - bits)) if bits <= 29 else (torch.int64, row.group)
    at_once = max(1, TILE_ELEMENTS["cuda" if c.is_cuda else "cpu"] // c.numel())
    step = min(row.group, fitting, 1 << (at_once.bit_length() - 1))
    per_group, per_sum = row.group // step, max(1, min(row.group, fitting) // step)
    values = list(zip(left.values.split(step), right.values.split(step), strict=True))
    exponents = list(zip(left.exponents.split(step), right.exponents.split(step), strict=True))
    product = torch.empty((step, *c.shape), dtype=torch.float64, device=c.device)
    whole = torch.empty(product.shape, dtype=integer, device=c.device)
    pair_exponent = torch.empty(product.shape, dtype=torch.int16, device=c.device)
    partial = torch.empty(c.shape, dtype=integer, device=c.device)
    whole_sum, largest = whole[0], pair_exponent[0]
    for group in range(left.length // row.group):
        emax = _accumulator_exponent(row, c, careful)
        part = slice(group * per_group, (group + 1) * per_group)
        runs = None
        if row.exact_run > 1:
            runs, run_exponents = _exact_runs(row, left, right, group, c.shape)
            torch.maximum(emax, run_exponents.amax(0), out=emax)
        else:
            for x, y in exponents[part]:
                torch.add(x, y, out=pair_exponent)
                _fold(torch.maximum, pair_exponent)
                torch.maximum(emax, largest, out=emax)
        scale = power_of_two(bits - emax)
        kept = torch.where(torch.isfinite(c), c, 0.0) if careful else c
        total = (kept * scale).to(integer).double()
        if runs is not None:
            total.add_((runs * scale).to(integer).sum(0))
        else:
            for first in range(part.start, part.stop, per_sum):
                partial.zero_()
                for x, y in values[first : first + per_sum]:
                    torch.mul(x, y, out=product)
                    # Conversion to an integer truncates toward zero, and is fast where trunc() is not.
                    whole.copy_(product.mul_(scale))
                    _fold(torch.add, whole)
                    partial.add_(whole_sum)
                total.add_(partial)
        after = _round(row, total.div_(scale), careful)
        if careful:
            # The finite terms, whose sum may itself overflow, count for nothing beside an Inf.
            infinite = torch.where(torch.isfinite(c), 0.0, c)
            if left.signs is not None or right.signs is not None:
                infinite = infinite + _infinite_sum(row, left, right, group)
            after = torch.where(infinite == 0, after, infinite)
        c = after
    return c


def _accumulator_exponent(row: Model, c: Tensor, careful: bool) -> Tensor:
    """The exponent of the accumulator as int16, at least the model's exponent of zero."""
    exponents = c.view(torch.int32).bitwise_right_shift(23).bitwise_and_(0xFF).to(torch.int16).sub_(127)
    if not careful:
        # -127 for zeros and subnormals: below that of any product, and beside no product as good as another.
        return exponents
    least = OPERANDS["f16"].min_exponent if row.rounding == "rne_f16" else -126
    return exponents.clamp_(min=least).masked_fill_(c == 0, row.zero_exponent)


def _exact_runs(row: Model, left: Side, right: Side, group: int, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """The scaled exact sums of one group's runs, float64 [runs, X, Y, Z], and their exponents.

    The exponent is that of the scales alone, also where the products cancel to zero; a run whose products
    are all zero has none.
    """
    assert left.scales is not None
    assert right.scales is not None
    count = row.group // row.exact_run
    sums = torch.empty((count, *shape), dtype=torch.float64, device=left.values.device)
    exponents = torch.empty(sums.shape, dtype=torch.int16, device=sums.device)
    for i in range(count):
        term = group * count + i
        run = torch.zeros(shape, dtype=torch.float32, device=sums.device)
        nonzero = torch.zeros_like(run)
        for k in range(term * row.exact_run, (term + 1) * row.exact_run):
            x, y = left.values[k], right.values[k]
            run.addcmul_(x, y)
            nonzero.addcmul_(x.abs(), y.abs())
        torch.mul(run, left.scales[term] * right.scales[term], out=sums[i])
        scale_exponents = left.exponents[term] + right.exponents[term]
        exponents[i] = torch.where(nonzero > 0, scale_exponents, NO_EXPONENT)
    return sums, exponents


def _infinite_sum(row: Model, left: Side, right: Side, group: int) -> Tensor:
    """Inf, -Inf or NaN where a product of the group is so, else 0."""
    part = slice(group * row.group, (group + 1) * row.group)
    x, y = (torch.sign(side.values) if side.signs is None else side.signs for side in (left, right))
    total = (x[part] * y[part]).sum(0)
    return torch.where(torch.isfinite(total), 0.0, total).float()


def _round(row: Model, exact: Tensor, careful: bool) -> Tensor:
    """The exact sum of a group (float64) rounded to the accumulator's type, held in float32."""
    if row.rounding == "rne_f16":
        fmt = OPERANDS["f16"]
        exponents = exponent(exact, fmt.min_exponent).clamp_(min=fmt.min_exponent)
        quantum = power_of_two(exponents - fmt.mantissa_bits)
        rounded = torch.round(exact / quantum) * quantum
        infinite = torch.copysign(torch.full_like(rounded, float("inf")), rounded)
        return torch.where(rounded.abs() > fmt.max_value, infinite, rounded).float() + 0.0
    # Without its low 29 bits a float64 has the 24 significant bits of a float32.
    result = exact.view(torch.int64).bitwise_and(-1 << 29).view(torch.float64).float()
    if careful:
        below = exact.abs() < 2.0**-126
        steps = torch.where(below, exact, 0.0) * 2.0**149
        result = torch.where(below, (steps.int().double() * 2.0**-149).float(), result)
    if row.rounding == "rz_e8m13":
        # The only place where a negative sum can become a zero of its sign, which the addition turns into +0.
        result = result.view(torch.int32).bitwise_and(-1 << 10).view(torch.float32).add_(0.0)
    return result


def _group_bound(row: Model, left: Side, right: Side, partial: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """The exact sum and its error bound after one more group, from those before it: float64 [M, N]."""
    x, y = left.values[:, 0], right.values[:, 0]
    top = torch.full(partial.shape, NO_EXPONENT, dtype=torch.int16, device=partial.device)
    for p, q in zip(left.exponents[:, 0], right.exponents[:, 0], strict=True):
        top = torch.maximum(top, p[:, None] + q[None, :])
    if left.scales is not None and right.scales is not None:
        x = x * left.scales[:, 0].repeat_interleave(row.exact_run, 0)
        y = y * right.scales[:, 0].repeat_interleave(row.exact_run, 0)
    nonzero = ((x != 0).double().t() @ (y != 0).double()).clamp_(max=row.group // row.exact_run)
    reach = partial.abs() + error
    live = (nonzero > 0) | (reach > 0)
    largest = torch.maximum(power_of_two(top.clamp(min=row.zero_exponent)), reach.clamp(min=2.0**-126))
    error = error + (nonzero + 1) * largest * 2.0**-row.fraction_bits
    # What float64 itself may lose in this sum of exact products.
    error = error + (x.abs().t() @ y.abs() + reach) * (row.group * 2.0**-52)
    partial = partial + x.t() @ y
    relative, least = {"rz_f32": (-23, -149), "rz_e8m13": (-13, -139), "rne_f16": (-11, -25)}[row.rounding]
    error = error + (partial.abs() + error) * 2.0**relative + 2.0**least
    return partial, error.masked_fill(~live, 0.0)
