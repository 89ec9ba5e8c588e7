"""Philox4x32-10 against the published vectors, and the addressing of random bits by logical element."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_numerics.reference.philox import element_bits, philox

# Random123, tests/kat_vectors, philox4x32-10: counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

WORD = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter: tuple, key: tuple, expected: tuple) -> None:
    """The published vectors; finds a wrong constant, round count or word order."""
    words = philox(tuple(torch.tensor(word) for word in counter), key)  # type: ignore[arg-type]
    assert tuple(int(word) for word in words) == expected


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    """The generator in Python integers, without any overflow to mind."""
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [second >> 32 ^ c[1] ^ k[0], second & 0xFFFFFFFF, first >> 32 ^ c[3] ^ k[1], first & 0xFFFFFFFF]
        k = [k[0] + 0x9E3779B9 & 0xFFFFFFFF, k[1] + 0xBB67AE85 & 0xFFFFFFFF]
    return c


@given(st.lists(WORD, min_size=4, max_size=4), st.lists(WORD, min_size=2, max_size=2))
def test_tensor_arithmetic_equals_integer_arithmetic(counter: list[int], key: list[int]) -> None:
    """Any counter and key; finds a product that overflows int64."""
    words = philox(tuple(torch.tensor(word) for word in counter), (key[0], key[1]))  # type: ignore[arg-type]
    assert [int(word) for word in words] == plain_philox(counter, key)


@given(
    seed=st.integers(0, 2**64 - 1),
    tensor=st.integers(0, 65535),
    expert=st.integers(0, 65535),
    row=st.integers(0, 2**20),
    column=st.integers(0, 2**14),
    axis=st.sampled_from([-1, -2]),
    width=st.sampled_from([8, 16, 32]),
)
def test_bits_are_those_of_the_documented_counter(
    seed: int, tensor: int, expert: int, row: int, column: int, axis: int, width: int
) -> None:
    """The documented addressing, which a kernel mirrors: counter words, key words, word and shift of an
    element.
    """
    along, across = (column, row) if axis == -1 else (row, column)
    n = 128 // width
    words = plain_philox([along // n, across, expert + (tensor << 16), 0], [seed & 0xFFFFFFFF, seed >> 32])
    whole = sum(word << 32 * place for place, word in enumerate(words))
    expected = whole >> (along % n) * width & ((1 << width) - 1)
    got = element_bits(seed, tensor, *(torch.tensor(place) for place in (expert, row, column)), axis, width)
    assert int(got) == expected


def test_streams_differ() -> None:
    """Seeds, tensors, experts, rows and columns have streams of their own (B40): no two agree beyond
    chance.
    """
    row, column = torch.arange(64).unsqueeze(1), torch.arange(64).unsqueeze(0)

    def bits(seed: int = 1, tensor: int = 0, expert: int = 0, axis: int = -1) -> torch.Tensor:
        return element_bits(seed, tensor, torch.tensor(expert), row, column, axis, 32)

    base = bits()
    assert torch.equal(base, bits())
    assert len(base.unique()) > 4090
    for other in (
        bits(seed=2),
        bits(seed=1 + 2**32),
        bits(tensor=1),
        bits(expert=1),
        bits(tensor=1, axis=-2),
    ):
        assert int((base == other).sum()) <= 1


def test_bad_arguments_name_the_value_and_the_rule() -> None:
    """Keys out of range would silently alias other streams."""
    zero = torch.tensor(0)
    for call, message in (
        (
            lambda: philox((zero, zero, zero, zero), (1 << 32, 0)),
            r"key\[0\] = 4294967296 is not a 32-bit word",
        ),
        (lambda: element_bits(-1, 0, zero, zero, zero), "seed is -1"),
        (lambda: element_bits(0, 65536, zero, zero, zero), "tensor is 65536"),
        (lambda: element_bits(0, 0, zero, zero, zero, width=12), "width is 12"),
        (lambda: element_bits(0, 0, zero, zero, zero, axis=0), "axis is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
