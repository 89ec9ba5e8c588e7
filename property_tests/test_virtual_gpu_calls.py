"""`printf` in kernels prints; other calls of device functions are refused.

Faults this catches: output that is lost, an argument of another width or alignment, and a format read past its end.
"""

from __future__ import annotations

import struct

import cutlass
import pytest
import torch
from cutlass import cute
from cutlass.cute.runtime import from_dlpack
from hypothesis import given
from hypothesis import strategies as st

from moe_numerics.virtual_gpu import virtual_gpu
from moe_numerics.virtual_gpu.isa_call import formatted


@cute.kernel
def _telling_kernel(x: cute.Tensor, n: cutlass.Int32) -> None:
    thread, _, _ = cute.arch.thread_idx()
    if thread < 2:
        cute.printf("thread %d of %d has %f", thread, n, x[thread])
    x[thread] = x[thread] + 1.0


@cute.jit
def _telling(x: cute.Tensor, n: cutlass.Int32) -> None:
    _telling_kernel(x, n).launch(grid=(1, 1, 1), block=(32, 1, 1))


def test_a_kernel_prints(capfd: pytest.CaptureFixture[str]) -> None:
    x = torch.arange(32, dtype=torch.float32)
    with virtual_gpu("sm_90a") as gpu:
        given_tensor = from_dlpack(x)
        cute.compile(_telling, given_tensor, 7)(given_tensor, 7)
        assert gpu.findings == []
    assert capfd.readouterr().out == "thread 0 of 7 has 0.000000\nthread 1 of 7 has 1.000000\n"
    assert x.tolist() == [n + 1.0 for n in range(32)]


@given(st.integers(-(2**31), 2**31 - 1), st.floats(allow_nan=False), st.integers(0, 2**64 - 1), st.integers(0, 255))
def test_arguments_are_laid_out_as_c_does(small: int, real: float, wide: int, letter: int) -> None:
    raw = struct.pack("<i4xdQi", small, real, wide, letter)
    text, count = formatted("%d|%.17g|%llx|%c|100%%", raw)
    assert count == 4
    assert text == f"{small}|{real:.17g}|{wide:x}|{letter:c}|100%"


def test_formats_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="takes more arguments than were passed"):
        formatted("%d %d", b"\0\0\0\0")
    with pytest.raises(ValueError, match="unknown conversion '%y'"):
        formatted("%y", b"")
