"""The kernels' E2M1 conversion gives the reference's code for every float32.

It is a minimum of sums that do not decrease with the magnitude, so its codes do not decrease either: where the first
and the last magnitude of each code are right, every one is. Faults this catches: a tie that goes the wrong way, one of
the three spacings missing, a magnitude past the range that wraps, a NaN that is not 7, nibbles exchanged, a sign
misplaced.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import pytest
import torch
from cutlass import Float32, Uint32, cute
from cutlass.cute.runtime import from_dlpack, make_fake_compact_tensor, make_fake_stream
from hypothesis import given
from hypothesis import strategies as st
from kernel_runs import ActiveDevice, kernel_examples
from moe_numerics.fused import e2m1
from moe_numerics.fused.compilation import compile_function
from moe_numerics.reference.formats import E2M1, pack_e2m1

THREADS = 128
INFINITY = 0x7F800000
NAN = 0x7FFFFFFF


@cute.kernel
def _encode_kernel(values: cute.Tensor, words: cute.Tensor) -> None:
    """words[i]: the codes of the eight values from 8 * i on."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    place = block * THREADS + thread
    if place < words.shape[0]:
        words[place] = e2m1.encode_word([Float32(values[e2m1.WORD * place + j]) for j in range(e2m1.WORD)])


@cute.jit
def _encode(values: cute.Tensor, words: cute.Tensor, stream: Any) -> None:
    grid = ((words.shape[0] + THREADS - 1) // THREADS, 1, 1)
    _encode_kernel(values, words).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)


def encode_on_device(bits: list[int]) -> torch.Tensor:
    """Packed codes of float32 values given by their bits, by the kernels' conversion; a multiple of eight of them."""
    values = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)
    words = torch.empty(len(bits) // e2m1.WORD, dtype=torch.uint32)
    compiled = compile_function(
        _encode,
        "e2m1",
        lambda: (
            make_fake_compact_tensor(cutlass.Float32, (cute.sym_int(),)),
            make_fake_compact_tensor(Uint32, (cute.sym_int(),)),
            make_fake_stream(),
        ),
    )
    compiled(*(from_dlpack(tensor).mark_layout_dynamic() for tensor in (values, words)), cuda.CUstream(0))
    return words.view(torch.uint8)


def expected(bits: list[int]) -> torch.Tensor:
    """The same by the reference."""
    values = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)
    return pack_e2m1(E2M1.encode(values.unsqueeze(0)).to(torch.uint8)).squeeze(0)


def first_of(code: int) -> int:
    """Bits of the smallest magnitude that the reference gives this code or a larger one."""
    low, high = 0, INFINITY
    while low < high:
        middle = (low + high) // 2
        value = torch.tensor([middle], dtype=torch.int32).view(torch.float32)
        low, high = (low, middle) if int(E2M1.encode(value)) >= code else (middle + 1, high)
    return low


@pytest.mark.parametrize("device", ["virtual:sm_90a", "virtual:sm_100a"], indirect=True)
def test_the_first_and_the_last_magnitude_of_every_code(device: ActiveDevice) -> None:
    firsts = [first_of(code) for code in range(1, 8)]
    ends = [0, *(end for first in firsts for end in (first - 1, first)), INFINITY]
    both = [sign | end for sign in (0, 1 << 31) for end in ends]
    # Every end at every place of a word, between neighbours that change.
    bits = [both[(7 * shift + place) % len(both)] for shift in range(2 * len(both)) for place in range(e2m1.WORD)]
    bits += [*both, *[0] * (-len(both) % e2m1.WORD)]
    assert torch.equal(encode_on_device(bits), expected(bits))


@pytest.mark.parametrize("device", ["virtual:sm_90a"], indirect=True)
@kernel_examples()
@given(data=st.data())
def test_any_float32(device: ActiveDevice, data: st.DataObject) -> None:
    # Around the ends: a sign, an exponent from 2^-4 to 2^4, two bits of the significand, and a step beside that.
    near = st.builds(
        lambda sign, x, step: (sign << 31) + (x << 21) + step,
        st.integers(0, 1),
        st.integers(123 << 2, 131 << 2),
        st.integers(-2, 2),
    )
    finite = near | st.integers(0, 2**32 - 1)
    # A NaN that a kernel encodes is computed, and so has the canonical bits.
    canonical = finite.map(lambda bits: NAN if bits % 2**31 > INFINITY else bits)
    bits = data.draw(st.lists(canonical, min_size=64, max_size=64))
    assert torch.equal(encode_on_device(bits), expected(bits))
