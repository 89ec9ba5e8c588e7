"""Enclosures of what a correct kernel may compute, composed from its rounding steps.

An `Enclosure` holds, element by element, the exact value by the float64 oracle and how far a float32 computation of it
can be off. Each step adds what it can add, and no more:

    conversion to a format    half the spacing of that format at the largest value in the enclosure
    activation of a bfloat16  `activation_errors`, measured over every input
    product of n factors      (1 + u)^(n - 1) of the product of the factors' ends, in any order; an intermediate
                              product that underflows loses up to the least subnormal times the other factors
    sum of n terms            (n - 1) u / (1 - (n - 1) u) of the sum of magnitudes, in any order (Higham, Accuracy and
                              Stability of Numerical Algorithms, 2nd ed., section 4.2), atomics included
    amax                      the largest lower and the largest upper end
    tensor core               `reference.tensor_core.accumulation_bound`, a truncation for each group of K

u = 2^-24 where intermediate values are float32, and 2^-8 where each of them is rounded to bfloat16.

Not decided, and then neither explained nor unexplained: Inf in an input, and factors whose product can leave the range
of float32 in some order. A NaN in an input is decided: the result is NaN. The sign of a zero is not decided.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_numerics.activation_errors import KINDS
from moe_numerics.reference.ragged import Experts
from moe_numerics.reference.tensor_core import accumulation_bound, find_model

__all__ = [
    "Arithmetic",
    "BoundError",
    "Enclosure",
    "accumulated",
    "accumulation_factor",
    "expert_sum",
    "half_spacing",
    "largest",
    "product",
    "row_sum",
]

FLOAT32_MAX = (2 - 2.0**-23) * 2.0**127
INTERMEDIATES = {"float32": 2.0**-24, "bfloat16": 2.0**-8}
UNDERFLOWS = {"float32": 2.0**-149, "bfloat16": 2.0**-133}
"""The least subnormal of each type of intermediate values: no operation loses more where its result underflows."""


class BoundError(ValueError):
    """No bound is derived for what was asked; the message says why."""


@dataclass(frozen=True)
class Arithmetic:
    """How a kernel computes between its bfloat16 inputs and its outputs.

    functions: "exact", "library" or "fast", as in `activation_errors`. intermediate: "float32", or "bfloat16" where
    every operation's result is rounded to bfloat16, as eager PyTorch does on bfloat16 tensors.
    """

    functions: str = "library"
    intermediate: str = "float32"

    def __post_init__(self) -> None:
        if self.functions not in KINDS:
            raise BoundError(f"functions = {self.functions!r}: expected one of {', '.join(KINDS)}")
        if self.intermediate not in INTERMEDIATES:
            raise BoundError(f"intermediate = {self.intermediate!r}: expected one of {', '.join(INTERMEDIATES)}")

    @property
    def unit(self) -> float:
        """Relative error of one operation, its rounding to float32 and to the intermediate type."""
        return 2.0**-24 + (INTERMEDIATES["bfloat16"] * (1 + 2.0**-24) if self.intermediate == "bfloat16" else 0.0)

    @property
    def underflow(self) -> float:
        """Absolute error of one operation whose result underflows."""
        return UNDERFLOWS[self.intermediate]


@dataclass(frozen=True)
class Enclosure:
    """value: float64, the oracle's. error: float64, how far a correct result may be from it. decided: bool."""

    value: Tensor
    error: Tensor
    decided: Tensor

    @classmethod
    def exact(cls, value: Tensor) -> Enclosure:
        """A value that every kernel has: an input."""
        wide = value.double()
        return cls(wide, torch.zeros_like(wide), ~torch.isinf(wide))

    @property
    def reach(self) -> Tensor:
        """The largest magnitude inside."""
        return self.value.abs() + self.error

    def where(self, mask: Tensor, other: float = 0.0) -> Enclosure:
        """This enclosure where `mask` holds, exactly `other` elsewhere."""
        return Enclosure(torch.where(mask, self.value, other), torch.where(mask, self.error, 0.0), self.decided | ~mask)

    def rounded(self, unit: float, underflow: float = UNDERFLOWS["float32"]) -> Enclosure:
        """After one more operation that rounds with this relative error, or this absolute one where it underflows."""
        return Enclosure(self.value, self.error + unit * self.reach + underflow, self.decided)

    def converted(self, mantissa_bits: int, min_exponent: int = -126) -> Enclosure:
        """After rounding to a format with the exponents of float32, to nearest; not decided where that may give Inf."""
        error = self.error + half_spacing(self.reach, mantissa_bits, min_exponent)
        inside = ~(self.reach >= (2 - 2.0 ** -(mantissa_bits + 1)) * 2.0**127)
        return Enclosure(self.value, error, self.decided & inside)


def half_spacing(magnitude: Tensor, mantissa_bits: int, min_exponent: int = -126) -> Tensor:
    """Half the distance between neighbours of a format at a magnitude: the most that rounding to nearest moves it."""
    exponent = torch.frexp(magnitude).exponent.to(torch.int64) - 1
    exponent = torch.where(magnitude == 0, min_exponent, exponent.clamp(min=min_exponent))
    return torch.ldexp(torch.ones_like(magnitude), exponent - mantissa_bits - 1)


INNER_OPERATIONS = 4
"""Operations inside a derivative that PyTorch multiplies a gradient into."""


def product(arithmetic: Arithmetic, *factors: Enclosure, inner: Tensor | None = None) -> Enclosure:
    """The product in any order, every operation rounded.

    inner: what factors of one of the factors do not exceed, where the others may be multiplied into them one by one.
    """
    value, reach, wide, decided = (
        factors[0].value,
        factors[0].reach,
        factors[0].reach.clamp(min=1.0),
        factors[0].decided,
    )
    for factor in factors[1:]:
        value, reach = value * factor.value, reach * factor.reach
        wide, decided = wide * factor.reach.clamp(min=1.0), decided & factor.decided
    operations, underflows = len(factors) - 1, len(factors) - 1
    if inner is not None:
        wide, underflows = wide * inner, underflows + INNER_OPERATIONS
    error = (reach - value.abs()) + ((1 + arithmetic.unit) ** operations - 1) * reach
    error = error + underflows * arithmetic.underflow * wide
    nan = torch.isnan(value)
    return Enclosure(value, torch.where(nan, 0.0, error), (decided & (wide < FLOAT32_MAX)) | (nan & decided))


def row_sum(terms: Enclosure, unit: float = 2.0**-24, dim: int = 1) -> Enclosure:
    """The sum over a dimension in any order."""
    n = max(terms.value.shape[dim], 1)
    reach = terms.reach.sum(dim)
    growth = (n - 1) * unit / (1 - (n - 1) * unit)
    value = terms.value.sum(dim)
    # float64 itself loses a little in a long sum, and partial sums may leave the range of float32.
    error = terms.error.sum(dim) + growth * reach + n * 2.0**-52 * reach
    nan = torch.isnan(value)
    return Enclosure(value, torch.where(nan, 0.0, error), terms.decided.all(dim) & (nan | (reach < FLOAT32_MAX)))


def largest(values: Enclosure, experts: Experts) -> Enclosure:
    """The amax of each expert's rows; 0 for an expert without rows. Its ends are not equally far from its value."""
    low, high, decided = [], [], []
    for start, count in zip(experts.starts, experts.counts, strict=True):
        rows = slice(start, start + count)
        magnitude, error = values.value[rows].abs(), values.error[rows]
        zero = torch.zeros((), dtype=torch.float64)
        low.append((magnitude - error).clamp(min=0.0).amax() if magnitude.numel() else zero)
        high.append((magnitude + error).amax() if magnitude.numel() else zero)
        decided.append(values.decided[rows].all())
    lower, upper = torch.stack(low), torch.stack(high)
    return Enclosure((lower + upper) / 2, (upper - lower) / 2, torch.stack(decided))


def expert_sum(terms: Enclosure, experts: Experts) -> Enclosure:
    """The sum of each expert's rows, [experts, columns], in any order; 0 for an expert without rows."""
    sums = []
    for start, count in zip(experts.starts, experts.counts, strict=True):
        rows = slice(start, start + count)
        sums.append(row_sum(Enclosure(terms.value[rows], terms.error[rows], terms.decided[rows]), dim=0))
    parts = zip(*((each.value, each.error, each.decided) for each in sums), strict=True)
    return Enclosure(*(torch.stack(part) for part in parts))


def accumulated(left: Tensor, right: Tensor, model: str) -> Enclosure:
    """left [M, K] @ right [K, N], bfloat16, as a tensor core of the model sums it, in one chain over K."""
    exact = left.double() @ right.double()
    error = accumulation_bound(left, right, model=model)
    # float64 itself loses a little in a long sum.
    error = error + left.shape[1] * 2.0**-52 * (left.double().abs() @ right.double().abs())
    inside = torch.isfinite(exact) & torch.isfinite(error)
    return Enclosure(exact, torch.where(inside, error, 0.0), inside)


def accumulation_factor(model: str, k: int, restart: int = 0) -> float:
    """How far a tensor-core sum over K can be from the exact one, over the sum of the products' magnitudes.

    From the accumulation's definition alone, for every input whose sums stay above the format's end: a group truncates
    its products and the accumulator at 2^-F of the largest of them, then its sum at 2^(1 - p). Truncation makes nothing
    larger, so none of them exceeds the sum of magnitudes, and the groups' errors add up; where sums are rounded to
    nearest, as to float16, they may grow. A chain over K has a group for every `group` values; `restart` begins a new
    one, and the chains' results are added in float32. A factor near 1 says nothing about the result:
    `tensor_core.accumulation_bound` is the bound of given operands and much smaller.
    """
    row = find_model(model)
    if k < 0 or restart < 0 or restart % row.group:
        raise BoundError(f"k = {k}, restart = {restart}: expected k >= 0 and a multiple of {row.group}")
    relative = {"rz_f32": 2.0**-23, "rz_e8m13": 2.0**-13, "rne_f16": 2.0**-11}[row.rounding]
    of_group = (row.group // row.exact_run + 1) * 2.0**-row.fraction_bits + relative
    groups = -(-min(k, restart or k) // row.group)
    chains = -(-k // restart) if restart and k else 1
    of_chain = (1 + of_group) ** groups - 1 if row.rounding == "rne_f16" else groups * of_group
    return (1 + of_chain) * (1 + 2.0**-24) ** (chains - 1) - 1
