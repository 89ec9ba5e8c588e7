"""Swizzled scales: every byte at its documented offset, padding bytes defined, and back without loss."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_numerics.reference import mxfp8, nvfp4, scale_layout
from moe_numerics.reference.ragged import Experts

SHAPES = st.tuples(st.integers(0, 300), st.integers(0, 13))


@given(SHAPES, st.sampled_from([0, 0x7F, 0xFF]))
def test_swizzle_follows_the_documented_view(shape: tuple[int, int], padding: int) -> None:
    """Filling up, viewing as [tiles, 4, 32, tiles, 4] and permuting gives the same bytes as the offset
    formula.

    Finds a swapped pair of dimensions, a wrong tile stride, and padding left as it was in memory (B50).
    """
    lines, blocks = shape
    scales = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(lines))
    rows, columns = -(-lines // 128) * 128, -(-blocks // 4) * 4
    filled = torch.full((rows, columns), padding, dtype=torch.uint8)
    filled[:lines, :blocks] = scales
    expected = filled.reshape(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4).reshape(-1)
    got = scale_layout.swizzle(scales, padding)
    assert torch.equal(got, expected)
    assert torch.equal(scale_layout.unswizzle(got, lines, blocks), scales)


@pytest.mark.parametrize(("lines", "blocks"), [(5760, 90), (17, 4), (128, 47)])
def test_padding_bytes_never_reach_the_scales(lines: int, blocks: int) -> None:
    """Shapes whose blocks are not a multiple of 4: whatever fills the gaps, the compact scales come back
    (B50).
    """
    scales = torch.full((lines, blocks), 127, dtype=torch.uint8)
    zero, nan = scale_layout.swizzle(scales), scale_layout.swizzle(scales, 0xFF)
    assert torch.equal(scale_layout.unswizzle(zero, lines, blocks), scale_layout.unswizzle(nan, lines, blocks))
    filled = zero != nan
    assert int(filled.sum()) == scale_layout.swizzled_size(lines, blocks) - lines * blocks
    assert not zero[filled].any()


def test_quantised_matrices_in_both_directions() -> None:
    """Rowwise lines are rows and blocks run along columns; colwise the other way round, transposed or not."""
    x = torch.randn(160, 96, generator=torch.Generator().manual_seed(1))
    row, column = mxfp8.quantize(x, -1), mxfp8.quantize(x, -2)
    assert torch.equal(scale_layout.swizzle_quantized(row), scale_layout.swizzle(row.scales))
    assert torch.equal(scale_layout.swizzle_quantized(column), scale_layout.swizzle(column.scales.t()))
    turned = nvfp4.quantize(x, -2)
    assert torch.equal(scale_layout.swizzle_quantized(turned), scale_layout.swizzle(turned.scales))
    line, block = 70, 2
    at = scale_layout.swizzled_offset(torch.tensor(line), torch.tensor(block), 5)
    assert scale_layout.swizzle_quantized(column)[at] == column.scales[block, line]


@given(st.lists(st.integers(0, 70), min_size=1, max_size=4), st.sampled_from([-1, -2]), st.sampled_from([1, 32]))
def test_each_expert_has_a_layout_of_its_own(sizes: list[int], axis: int, alignment: int) -> None:
    """An expert's layout is that of the expert quantised alone; finds offsets taken over the whole buffer
    (B53).
    """
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // alignment) * alignment)
    experts = Experts.from_offsets(offsets, sizes, offsets[-1] + 3, alignment)
    x = torch.randn(experts.capacity, 64, generator=torch.Generator().manual_seed(sum(sizes)))
    layouts = scale_layout.swizzle_experts(mxfp8.quantize(x, axis, experts=experts), 0xFF)
    assert len(layouts) == len(sizes)
    for layout, start, count in zip(layouts, experts.starts, experts.counts, strict=True):
        alone = mxfp8.quantize(x[start : start + count], axis)
        assert torch.equal(layout, scale_layout.swizzle(scale_layout.scale_matrix(alone), 0xFF))


@given(st.lists(st.integers(0, 255), min_size=4, max_size=32).filter(lambda c: len(c) % 4 == 0))
def test_words_hold_four_bytes_and_nothing_else(codes: list[int]) -> None:
    """The first scale in the lowest byte; finds bits that leak from one scale into the next (B22)."""
    words = scale_layout.pack_words(torch.tensor(codes, dtype=torch.uint8))
    assert words.tolist() == [int.from_bytes(bytes(codes[i : i + 4]), "little") for i in range(0, len(codes), 4)]


def test_bad_arguments_name_the_value_and_the_rule() -> None:
    """A wrong dtype, size or padding is refused."""
    scales = torch.zeros(4, 4, dtype=torch.uint8)
    for call, message in (
        (lambda: scale_layout.swizzle(scales.to(torch.int32)), r"scales have dtype torch\.int32"),
        (lambda: scale_layout.swizzle(scales, 256), "padding is 256"),
        (
            lambda: scale_layout.unswizzle(torch.zeros(511, dtype=torch.uint8), 4, 4),
            "511 bytes: expected uint8 and 512",
        ),
        (lambda: scale_layout.pack_words(scales[:, :3]), r"shape \(4, 3\)"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
