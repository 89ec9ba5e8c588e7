"""Every way in which host code of a compiled function launches kernels arrives, sizes of every width included.

Faults this catches: a cluster, a cooperative or a dependent launch that runs as another kind, one of several kernels
that is lost, a pointer or a 64-bit size that reaches the kernel as another value, and an error that ends the process.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("cutlass")

import cuda.bindings.driver as cuda
import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import from_dlpack, make_fake_compact_tensor, make_fake_stream, make_ptr

from moe_numerics.virtual_gpu import VirtualGPUError, virtual_gpu
from moe_numerics.virtual_gpu.fake_arguments import adapted
from moe_numerics.virtual_gpu.gpu import VirtualGPU

STREAM = cuda.CUstream(0)


@cute.kernel
def _first(x: cute.Tensor) -> None:
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    x[block * 32 + thread] = x[block * 32 + thread] + 1.0
    cute.arch.griddepcontrol_launch_dependents()


@cute.kernel
def _second(x: cute.Tensor, factor: cutlass.Float32) -> None:
    cute.arch.griddepcontrol_wait()
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    rank = cute.arch.block_idx_in_cluster()
    x[block * 32 + thread] = x[block * 32 + thread] * factor + cutlass.Float32(rank) * 1000.0


@cute.jit
def _chain(x: cute.Tensor, factor: cutlass.Float32, stream: cuda.CUstream) -> None:
    _first(x).launch(grid=(4, 1, 1), block=(32, 1, 1), stream=stream, cooperative=True)
    _second(x, factor).launch(grid=(4, 1, 1), block=(32, 1, 1), cluster=(2, 1, 1), stream=stream, use_pdl=True)


@pytest.mark.parametrize("schedule", ["fast", 1, 2])
def test_several_kernels_of_several_kinds(schedule: str | int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    run = VirtualGPU.launch_raw

    def launch_raw(self: VirtualGPU, ptx: str, kernel: str, *arguments: Any) -> None:
        seen.append((kernel.split("_tensor")[0].removeprefix("kernel_cutlass_"), arguments[4], arguments[5]))
        run(self, ptx, kernel, *arguments)

    monkeypatch.setattr(VirtualGPU, "launch_raw", launch_raw)
    x = torch.zeros(128)
    with virtual_gpu("sm_90a", schedule=schedule) as gpu:
        compiled = cute.compile(_chain, from_dlpack(x), cutlass.Float32(1), make_fake_stream())
        compiled(from_dlpack(x), 3.0, STREAM)
        assert gpu.findings == []
        assert gpu.stats.launches == 2
    assert x.tolist() == [3.0] * 32 + [1003.0] * 32 + [3.0] * 32 + [1003.0] * 32
    assert seen == [("_first", (1, 1, 1), True), ("_second", (2, 1, 1), False)]


@cute.kernel
def _double(p: cute.Pointer, n: cutlass.Int64) -> None:
    thread, _, _ = cute.arch.thread_idx()
    x = cute.make_tensor(p, cute.make_layout(n))
    if thread < n:
        x[thread] = x[thread] * 2.0


@cute.jit
def _doubled(p: cute.Pointer, n: cutlass.Int64) -> None:
    _double(p, n).launch(grid=(1, 1, 1), block=(64, 1, 1))


def test_pointers_and_wide_scalars() -> None:
    x = torch.arange(40, dtype=torch.float32)

    def pointer() -> Any:
        return make_ptr(cutlass.Float32, x.data_ptr(), cute.AddressSpace.gmem, assumed_align=16)

    with virtual_gpu("sm_90a") as gpu:
        compiled = cute.compile(_doubled, pointer(), cutlass.Int64(0))
        with pytest.raises(VirtualGPUError, match="outside every known allocation"):
            compiled(pointer(), 40)
        gpu.allocate(x)
        compiled(pointer(), 40)
    assert x.tolist() == [2.0 * n for n in range(40)]


_SCALARS: tuple[tuple[Any, Any], ...] = (
    (cutlass.Int8, -5), (cutlass.Uint8, 250), (cutlass.Int16, -300), (cutlass.Uint16, 60_000),
    (cutlass.Int32, -70_000), (cutlass.Uint32, 3 * 10**9), (cutlass.Int64, -(2**40)), (cutlass.Uint64, 2**50),
    (cutlass.Boolean, True), (cutlass.Float16, 0.25), (cutlass.BFloat16, -2.0), (cutlass.Float32, 1.5),
    (cutlass.Float64, 2.0**-20),
)  # fmt: skip


@pytest.mark.parametrize(("kind", "value"), _SCALARS, ids=[kind.__name__ for kind, _ in _SCALARS])
def test_scalars_of_every_type(kind: Any, value: Any) -> None:
    """Fault: a scalar arrives cut, or its conversion on the host needs a function that is not there."""

    @cute.kernel
    def keep(x: cute.Tensor, scalar: cutlass.Numeric) -> None:
        x[0] = cutlass.Float32(scalar)

    @cute.jit
    def kept(x: cute.Tensor, scalar: cutlass.Numeric) -> None:
        keep(x, scalar).launch(grid=(1, 1, 1), block=(1, 1, 1))

    x = torch.zeros(1)
    with virtual_gpu("sm_90a") as gpu:
        cute.compile(kept, from_dlpack(x), kind(value))(from_dlpack(x), kind(value))
        assert gpu.findings == []
    assert x.item() == float(value)


@cute.jit
def _twice(x: cute.Tensor) -> None:
    _first(x).launch(grid=(x.shape[0] // 32, 1, 1), block=(32, 1, 1))
    _first(x).launch(grid=(x.shape[0] // 32, 1, 1), block=(32, 1, 1))


def test_a_function_that_is_called_without_compiling_it() -> None:
    x = torch.zeros(64)
    with virtual_gpu("sm_100a") as gpu:
        _twice(from_dlpack(x))
        assert gpu.stats.launches == 2
        assert gpu.findings == []
    assert x.tolist() == [2.0] * 64


@cute.kernel
def _rows(x: cute.Tensor, y: cute.Tensor) -> None:
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    if thread < x.shape[1]:
        y[block, thread] = x[block, thread] + 1


@cute.jit
def _by_rows(x: cute.Tensor, y: cute.Tensor) -> None:
    _rows(x, y).launch(grid=(x.shape[0], 1, 1), block=(64, 1, 1))


@pytest.mark.parametrize("options", ["", "--enable-tvm-ffi"])
@pytest.mark.parametrize("width", [32, 64])
def test_sizes_of_both_widths(options: str, width: int) -> None:
    """One compilation, with `--enable-tvm-ffi` left out, serves all sizes."""

    def fake() -> Any:
        sizes = (cute.sym_int(width), cute.sym_int(width))
        return make_fake_compact_tensor(cutlass.Int32, sizes, stride_order=(1, 0))

    with virtual_gpu("sm_90a") as gpu:
        compiled = cute.compile(_by_rows, fake(), fake(), options=options)
        for rows, columns in ((3, 40), (5, 1), (1, 64)):
            x = torch.arange(rows * columns, dtype=torch.int32).view(rows, columns)
            y = torch.zeros_like(x)
            gpu.uninitialized(y)
            compiled(x, y)
            assert torch.equal(y, x + 1)
            assert gpu.written(y).all()


def test_only_unusual_sizes_are_packed_here() -> None:
    """Fault: a tensor that the DSL packs itself is packed twice, or one too few is."""
    x = torch.zeros(2, 3)
    wide = make_fake_compact_tensor(cutlass.Float32, (cute.sym_int64(), cute.sym_int64()), stride_order=(1, 0))
    plain = make_fake_compact_tensor(cutlass.Float32, (cute.sym_int(), cute.sym_int()), stride_order=(1, 0))
    first, second, number = adapted([wide, plain], [x, x, 7])
    assert hasattr(first, "__c_pointers__")
    assert second is x
    assert number == 7
    assert adapted([wide], [x, x]) == [x, x]


@cute.kernel
def _outside(x: cute.Tensor) -> None:
    thread, _, _ = cute.arch.thread_idx()
    x[thread] = 1.0


@cute.jit
def _faulty(x: cute.Tensor, y: cute.Tensor) -> None:
    _outside(x).launch(grid=(1, 1, 1), block=(64, 1, 1))
    _outside(y).launch(grid=(1, 1, 1), block=(64, 1, 1))


def test_an_empty_grid_is_refused_as_by_cuda() -> None:
    with virtual_gpu("sm_90a"), pytest.raises(VirtualGPUError, match=r"grid \(0, 1, 1\) is not possible"):
        _twice(from_dlpack(torch.zeros(31)).mark_layout_dynamic())


def test_what_follows_a_failed_launch_does_nothing() -> None:
    x, y = torch.zeros(32), torch.zeros(64)
    with virtual_gpu("sm_90a") as gpu:
        with pytest.raises(VirtualGPUError, match="past the end of argument 0"):
            _faulty(from_dlpack(x).mark_layout_dynamic(), from_dlpack(y).mark_layout_dynamic())
        assert gpu.stats.launches == 1
    assert not y.any()
