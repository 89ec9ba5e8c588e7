"""Compiled CuTe DSL functions run on the virtual GPU, their host half included, and leave the process as it was.

Faults this catches: an argument that reaches the kernel changed, a launch that is lost, a patch that stays behind, PTX
of another compilation.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("cutlass")

import cuda.bindings.driver as cuda
import cutlass
import torch
from cutlass import cute
from cutlass.base_dsl.compiler import ExtraCompilerOpts
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.cutlass_dsl import CuTeDSL

from moe_numerics.virtual_gpu import VirtualGPUError, virtual_gpu

PINNED = ExtraCompilerOpts("nvvm-options=-fma=0")
STREAM = cuda.CUstream(0)


@cute.kernel
def _scale_kernel(x: cute.Tensor, y: cute.Tensor, factor: cutlass.Float32) -> None:
    tid, _, _ = cute.arch.thread_idx()
    bid, _, _ = cute.arch.block_idx()
    i = bid * 128 + tid
    if i < x.shape[0]:
        y[i] = x[i] * factor


@cute.jit
def _scale(
    x: cute.Tensor, y: cute.Tensor, factor: cutlass.Float32, twice: cutlass.Boolean, stream: cuda.CUstream
) -> None:
    grid = (cute.ceil_div(x.shape[0], 128), 1, 1)
    _scale_kernel(x, y, factor).launch(grid=grid, block=(128, 1, 1), stream=stream)
    if twice:
        _scale_kernel(y, y, factor).launch(grid=grid, block=(128, 1, 1), stream=stream)


@cute.kernel
def _transpose_kernel(x: cute.Tensor, y: cute.Tensor, amax: cute.Tensor) -> None:
    tid, _, _ = cute.arch.thread_idx()
    bx, by, _ = cute.arch.block_idx()
    memory = cutlass.memory.SmemAllocator()
    tile = memory.allocate_tensor(cutlass.Float32, cute.make_layout((32, 32), stride=(33, 1)), 16)
    column, first = tid % 32, tid // 32
    largest = cutlass.Float32(0.0)
    for r in cutlass.range(8):
        row = first + 4 * r
        value = x[by * 32 + row, bx * 32 + column]
        largest = cute.arch.fmax(largest, cute.arch.fmax(value, -value))
        tile[row, column] = value
    cute.arch.sync_threads()
    for r in cutlass.range(8):
        row = first + 4 * r
        y[bx * 32 + row, by * 32 + column] = tile[column, row]
    bits = cute.arch.warp_redux_sync(largest.bitcast(cutlass.Uint32), "max")
    if column == 0:
        cute.arch.atomic_max(cute.recast_ptr(amax.iterator, dtype=cutlass.Uint32), bits, sem="relaxed", scope="gpu")


@cute.jit
def _transpose(x: cute.Tensor, y: cute.Tensor, amax: cute.Tensor, stream: cuda.CUstream) -> None:
    _transpose_kernel(x, y, amax).launch(grid=(x.shape[1] // 32, x.shape[0] // 32, 1), block=(128, 1, 1), stream=stream)


def compile_scale() -> Callable[..., Any]:
    n = cute.sym_int()
    fake = [make_fake_compact_tensor(cutlass.Float32, (n,)) for _ in range(2)]
    return cute.compile[PINNED](_scale, *fake, cutlass.Float32(1), cutlass.Boolean(False), make_fake_stream())


def compile_transpose() -> Callable[..., Any]:
    n, m = cute.sym_int(), cute.sym_int()
    fakes = [make_fake_compact_tensor(cutlass.Float32, shape, stride_order=(1, 0)) for shape in ((n, m), (m, n))]
    return cute.compile[PINNED](_transpose, *fakes, make_fake_compact_tensor(cutlass.Float32, (1,)), make_fake_stream())


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_scalars_and_host_branches(arch: str) -> None:
    """Fault: a scalar arrives wrong, a second launch is lost, or one compilation does not serve all sizes."""
    with virtual_gpu(arch) as gpu:
        compiled = compile_scale()
        for n in (1, 127, 128, 1000):
            x = torch.randn(n)
            y = torch.full((n,), -1.0)
            gpu.uninitialized(y)
            compiled(x, y, 1.5, False, STREAM)
            assert torch.equal(y, x * 1.5)
            assert gpu.written(y).all()
            compiled(x, y, 1.5, True, STREAM)
            assert torch.equal(y, x * 1.5 * 1.5)
        assert gpu.stats.launches == 12
        assert gpu.findings == []
        assert {p.target for p in gpu.ptx.values()} == {arch}


def test_function_runs_in_a_later_context_and_not_outside() -> None:
    """Fault: a compiled function is tied to the context that compiled it, or runs somewhere after all ended."""
    with virtual_gpu("sm_90a"):
        compiled = compile_scale()
    x, y = torch.randn(5), torch.zeros(5)
    with virtual_gpu("sm_90a", schedule=3) as gpu:
        compiled(x, y, 2.0, False, STREAM)
        assert torch.equal(y, x * 2)
        assert gpu.stats.launches == 1
    with pytest.raises(Exception, match=r".*"):
        compiled(x, y, 3.0, False, STREAM)
    assert torch.equal(y, x * 2)


@pytest.mark.parametrize("schedule", ["fast", 0, 1, 2, 3])
def test_shared_memory_tile_under_schedules(schedule: str | int) -> None:
    """Fault: a schedule changes the result of a kernel without races, or the checkers see one."""
    x = torch.randn(96, 64)
    y = torch.zeros(64, 96)
    amax = torch.zeros(1)
    with virtual_gpu("sm_90a", schedule=schedule) as gpu:
        compile_transpose()(x, y, amax, STREAM)
        assert gpu.findings == []
    assert torch.equal(y, x.t())
    assert amax.item() == x.abs().max().item()


def test_stats_count_instructions_and_bytes() -> None:
    """Fault: traffic or instructions are counted twice or not at all."""
    x, y, amax = torch.randn(64, 32), torch.zeros(32, 64), torch.zeros(1)
    with virtual_gpu("sm_90a", checkers=False) as gpu:
        compile_transpose()(x, y, amax, STREAM)
        assert gpu.stats.read["shared"] == gpu.stats.written["shared"] == 4 * x.numel()
        assert gpu.stats.written["global"] == 4 * x.numel() + 4 * 8
        assert gpu.stats.thread_instructions > 256 * 50


def test_errors_of_the_kernel_reach_the_caller() -> None:
    """Fault: an exception inside the host half's callback is swallowed."""
    with virtual_gpu("sm_90a") as gpu:
        compiled = compile_scale()
        with pytest.raises(VirtualGPUError, match=r"past the end of argument 1 \(float32 \[5\]\)"):
            compiled(torch.zeros(64), torch.zeros(5), 1.0, False, STREAM)
        # The next call is not disturbed by the last one's failure.
        y = torch.zeros(5)
        compiled(torch.ones(5), y, 1.0, False, STREAM)
        assert y.sum() == 5
        assert [f.kind for f in gpu.findings] == ["out_of_bounds"]


def test_everything_patched_is_put_back() -> None:
    """Fault: after the context the DSL still compiles for the virtual GPU."""
    from cutlass.base_dsl import compiler, jit_executor
    from cutlass.cutlass_dsl import cuda_jit_executor

    def state() -> list[Any]:
        environment = CuTeDSL._get_dsl().envar
        function = cuda_jit_executor.CudaDialectJitCompiledFunction
        return [
            environment.arch, environment.enable_tvm_ffi, compiler.Compiler.jit, function.__init__,
            function.__dict__["num_devices"], compiler.CompileOptions.apply_envar_settings,
            jit_executor.JitExecutor.run_compiled_program, jit_executor.ExecutionArgs.generate_execution_args,
        ]  # fmt: skip

    before = state()
    with virtual_gpu("sm_100a"):
        assert state() != before
    assert state() == before
    with pytest.raises(ValueError, match="stop"), virtual_gpu("sm_90a"):
        raise ValueError("stop")
    assert state() == before


def test_no_files_in_the_working_directory(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: PTX is written where two processes would read each other's."""
    monkeypatch.chdir(tmp_path)
    with virtual_gpu("sm_90a"):
        compile_scale()
    assert list(tmp_path.iterdir()) == []


def test_processes_side_by_side_run_their_own_ptx(tmp_path: Any) -> None:
    """Fault: of two processes that compile kernels of one name, one runs the other's."""
    program = textwrap.dedent(
        """
        import sys, torch, cutlass
        import cuda.bindings.driver as cuda
        from cutlass import cute
        from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
        from moe_numerics.virtual_gpu import virtual_gpu

        @cute.kernel
        def kernel(y: cute.Tensor, f: cutlass.Constexpr):
            tid, _, _ = cute.arch.thread_idx()
            y[tid] = f(y[tid])

        @cute.jit
        def call(y: cute.Tensor, f: cutlass.Constexpr, stream: cuda.CUstream):
            kernel(y, f).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

        which = int(sys.argv[1])
        for n in range(6):
            with virtual_gpu("sm_90a"):
                y = torch.ones(32)
                step = which * 100 + n
                compiled = cute.compile(call, make_fake_compact_tensor(cutlass.Float32, (32,)), lambda v: v + step,
                                        make_fake_stream())
                compiled(y, cuda.CUstream(0))
                assert y.tolist() == [1.0 + step] * 32, (y[0].item(), step)
        """
    )
    script = tmp_path / "side.py"
    script.write_text(program)
    running = [
        subprocess.Popen([sys.executable, str(script), str(n)], stderr=subprocess.PIPE, env=dict(os.environ))
        for n in range(2)
    ]
    for process in running:
        _, problems = process.communicate(timeout=300)
        assert process.returncode == 0, problems.decode()[-2000:]
