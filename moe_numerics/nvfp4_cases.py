"""Fixed cases for the paths that write NVFP4.

One NaN or infinity in the gauntlet is the amax of the whole tensor, and then every scale and code is the same. So these
paths get finite cases, whose amaxes are chosen, and small ones for what a whole tensor can be: zero, so small that its
encode scale overflows, infinite, or not a number.
"""

from __future__ import annotations

from collections.abc import Sequence

from moe_numerics.cases import Case, Edit, TensorSpec, Values

__all__ = ["finite_gauntlet", "near_tie_case", "whole_tensor_cases"]

_SEED = 22
_SMALL_COUNTS = (1, 0, 16, 33)

# Silu, gelu and relu return a number of at least 32 unchanged, and their derivative there is 1.
_ONE_OF_TIES, _SMALLEST_OF_TIES = 5, 20

# Brings the kind's largest value, 2**-111, below 2688 / FLT_MAX, with room for factors up to 16.
_TINY = -10


def finite_gauntlet(gauntlet: Case, inputs: Sequence[TensorSpec]) -> Case:
    """The gauntlet with an amax of 2688 times a power of two, of all copies: elements and scales lie on ties."""
    return gauntlet.replace(values=_tied(inputs, "nvfp4_ties"))


def near_tie_case(gauntlet: Case, inputs: Sequence[TensorSpec]) -> Case:
    """A smaller case with an amax of 252 times a power of two, where other orders of arithmetic give other scales."""
    return _small(gauntlet, (0, 1, 16, 17, 64, 0, 33)).replace(values=_tied(inputs, "nvfp4_near_ties"))


def whole_tensor_cases(gauntlet: Case, inputs: Sequence[TensorSpec]) -> list[Case]:
    """Small cases: everything mixed, NaN and infinities included; one infinity; a tiny amax; zeros."""
    small = _small(gauntlet, _SMALL_COUNTS)
    streamed = [spec for spec in inputs if spec.kind == "values"]
    plain = {spec.name: Values("gaussian", _SEED) for spec in streamed} | _no_bias(inputs)
    first = streamed[0].name
    infinite = Values("gaussian", _SEED, edits=(Edit(int(small.valid_rows()[0]), 0, 0x7F80),))
    return [
        small,
        small.replace(values=plain | {first: infinite}),
        small.replace(values=plain | {first: Values("subnormal", _SEED, _TINY)}),
        small.replace(values={spec.name: Values("zeros", _SEED) for spec in streamed} | _no_bias(inputs)),
    ]


def _no_bias(inputs: Sequence[TensorSpec]) -> dict[str, Values]:
    return {spec.name: Values("zeros", _SEED) for spec in inputs if spec.kind == "bias"}


def _small(gauntlet: Case, counts: tuple[int, ...]) -> Case:
    if not gauntlet.padded:
        counts = tuple(-(-count // gauntlet.alignment) * gauntlet.alignment for count in counts)
    return gauntlet.replace(counts=counts, tail=3)


def _tied(inputs: Sequence[TensorSpec], kind: str) -> dict[str, Values]:
    """Values of the inputs such that what is quantised is `kind` times a power of two.

    In a backward pass the gradient is, and what is activated 32. In a forward pass the up part is, beside a gate of
    32, or the input times 2**20, where its positive values pass through.
    """
    backward = any(spec.name == "grad" for spec in inputs)
    values = _no_bias(inputs)
    for spec in inputs:
        if spec.kind == "prob":
            values[spec.name] = Values("ones")
        elif spec.kind == "values" and backward and spec.name != "grad":
            values[spec.name] = Values("plain", exponent=_ONE_OF_TIES)
        elif spec.kind == "values":
            exponent = _SMALLEST_OF_TIES if spec.columns == 1 and spec.name != "grad" else 0
            values[spec.name] = Values(kind, _SEED, exponent)
    return values
