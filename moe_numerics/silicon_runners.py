"""Where the kernels of the silicon comparison run: a virtual GPU, or a CUDA device through the driver's API.

A fault of a kernel ends a CUDA context for good, so that jobs run on the device in a process that can be replaced.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

from moe_numerics.devices import DeviceError
from moe_numerics.virtual_gpu.errors import Fault
from moe_numerics.virtual_gpu.tensor_map import DRIVER_TYPE, TensorMap, decode, encode

__all__ = [
    "CudaRunner",
    "IsolatedRunner",
    "Job",
    "KernelStopped",
    "Runner",
    "SiliconError",
    "VirtualRunner",
    "driver_map",
]

START_LIMIT = 120.0
"""Seconds that a process may take to open its device."""
JOB_LIMIT = 60.0
"""Seconds that a job may take on the device: its kernel may wait for what never comes."""

Bytes = npt.NDArray[np.uint8]


class SiliconError(Exception):
    """A kernel of the comparison could not run, with the reason in words."""


class KernelStopped(SiliconError):
    """A kernel ran, and a fault of it ended the run."""


@dataclass(frozen=True)
class Job:
    """A kernel and its arguments: pointers to outputs and inputs, to tensor maps, then perhaps a number.

    outputs_first: the order of the pointers. count: the last argument (u32), None if there is none. maps: tensor maps
    (their addresses do not count), each with the number of its buffer among the inputs and outputs. stops: whether the
    kernel must end by a fault.
    """

    name: str
    ptx: str
    kernel: str
    blocks: int
    threads: int
    inputs: tuple[Bytes, ...]
    outputs: tuple[int, ...]
    outputs_first: bool
    count: int | None = None
    cluster: int = 1
    maps: tuple[tuple[TensorMap, int], ...] = ()
    stops: bool = False


class Runner(Protocol):
    """Runs jobs."""

    def run(self, job: Job) -> list[Bytes]:
        """The bytes of each output. SiliconError: the kernel was refused or failed."""


class VirtualRunner:
    """A virtual GPU of one architecture, a fresh one for each job."""

    def __init__(self, arch: str) -> None:
        self.arch = arch

    def run(self, job: Job) -> list[Bytes]:
        from moe_numerics.virtual_gpu import VirtualGPU, VirtualGPUError

        gpu = VirtualGPU(self.arch, "fast", False, 10_000_000)
        # PyTorch's own memory is aligned to 64 bytes, which a tensor map needs.
        inputs = [torch.from_numpy(np.array(data)).clone() for data in job.inputs]
        outputs = [torch.zeros(max(size, 1), dtype=torch.uint8) for size in job.outputs]
        args: list[Any] = [*outputs, *inputs] if job.outputs_first else [*inputs, *outputs]
        for described, number in job.maps:
            args.append(encode(replace(described, address=args[number].data_ptr())))
        if job.count is not None:
            args.append(job.count)
        try:
            # What a kernel prints is not compared.
            with np.errstate(all="ignore"), contextlib.redirect_stdout(io.StringIO()):
                gpu.launch(job.ptx, job.kernel, job.blocks, job.threads, args, cluster=job.cluster)
        except VirtualGPUError as error:
            kind = SiliconError if error.finding.thread is None else KernelStopped
            raise kind(f"{job.name} on virtual:{self.arch}: {error}") from error
        return [output.numpy()[:size] for output, size in zip(outputs, job.outputs, strict=True)]


class CudaRunner:
    """A CUDA device. The driver compiles the PTX; memory and the context are PyTorch's."""

    def __init__(self, device: str = "cuda") -> None:
        self.device = torch.device(device)
        torch.cuda.init()
        torch.zeros(1, device=self.device)
        self._loaded: dict[tuple[str, str], Any] = {}

    def function(self, ptx: str, kernel: str) -> Any:
        """The driver's handle of a kernel; modules stay loaded."""
        from cuda.bindings import driver

        key = (ptx, kernel)
        if key not in self._loaded:
            module = _checked(driver.cuModuleLoadData(ptx.encode() + b"\0"), "loading the PTX")
            self._loaded[key] = _checked(
                driver.cuModuleGetFunction(module, kernel.encode()), f"finding kernel {kernel}"
            )
        return self._loaded[key]

    def launch(self, ptx: str, kernel: str, blocks: int, threads: int, args: Sequence[Any]) -> None:
        """Launches a kernel on tensors of the device, u32 numbers and tensor maps, on PyTorch's current stream."""
        from cuda.bindings import driver

        values = tuple(arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args)
        # An object of the driver's own has no C type here: it says itself where it lies.
        kinds = tuple(
            ctypes.c_void_p if isinstance(arg, torch.Tensor) else ctypes.c_uint32 if isinstance(arg, int) else None
            for arg in args
        )
        stream = driver.CUstream(torch.cuda.current_stream(self.device).cuda_stream)
        _checked(
            driver.cuLaunchKernel(
                self.function(ptx, kernel), blocks, 1, 1, threads, 1, 1, 0, stream, (values, kinds), 0
            ),
            f"launching {kernel}",
        )

    def run(self, job: Job) -> list[Bytes]:
        try:
            return self._run(job)
        except SiliconError as error:
            raise type(error)(f"{job.name} on {self.device}: {error}") from error
        except RuntimeError as error:
            raise SiliconError(f"{job.name} on {self.device}: {error}") from error

    def _run(self, job: Job) -> list[Bytes]:
        inputs = [torch.from_numpy(np.array(data)).to(self.device) for data in job.inputs]
        outputs = [torch.zeros(max(size, 1), dtype=torch.uint8, device=self.device) for size in job.outputs]
        args: list[Any] = [*outputs, *inputs] if job.outputs_first else [*inputs, *outputs]
        for described, number in job.maps:
            buffer = args[number]
            assert isinstance(buffer, torch.Tensor)
            args.append(driver_map(replace(described, address=buffer.data_ptr())))
        if job.count is not None:
            args.append(job.count)
        self.launch(job.ptx, job.kernel, job.blocks, job.threads, args)
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            # The first line names the error; the others are PyTorch's advice on how to debug.
            raise KernelStopped(str(error).splitlines()[0]) from error
        return [output.cpu().numpy()[:size] for output, size in zip(outputs, job.outputs, strict=True)]


def _serve(make: Callable[[], Runner], pipe: Connection) -> None:
    """A process of its own: opens a runner, then answers every job with its outputs, or with why there are none."""
    # What kernels print is not compared.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        runner = make()
    except (SiliconError, RuntimeError) as error:
        pipe.send(f"opening the device failed: {error}")
        return
    pipe.send("")
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(runner.run(job))
        except SiliconError as error:
            pipe.send(error)


class IsolatedRunner:
    """A runner in a process of its own, and in a fresh one after a job that failed, ended it or took too long.

    make: builds the runner there; it travels to the process, so it must be importable. limit: seconds for a job.
    method: how the process starts; one that uses CUDA cannot be forked from one that does.
    """

    def __init__(
        self, make: Callable[[], Runner], limit: float = JOB_LIMIT, method: Literal["spawn", "fork"] = "spawn"
    ) -> None:
        self._make, self._limit = make, limit
        self._context: Any = get_context(method)
        self._process: Any = None
        self._pipe: Any = None

    def __enter__(self) -> Self:
        """DeviceError: it cannot be opened."""
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process, if there is one."""
        if self._process is not None:
            self._pipe.close()
            self._process.kill()
            self._process.join()
            self._process = None

    def _start(self) -> None:
        self._pipe, theirs = self._context.Pipe()
        self._process = self._context.Process(target=_serve, args=(self._make, theirs), daemon=True)
        self._process.start()
        theirs.close()
        try:
            refused = self._answer("opening the device", START_LIMIT)
        except SiliconError as error:
            raise DeviceError(str(error)) from error
        if refused:
            self.close()
            raise DeviceError(refused)

    def _answer(self, what: str, limit: float) -> Any:
        """What the process sends next. SiliconError: it ends, or sends nothing for `limit` seconds."""
        if not self._pipe.poll(limit):
            self.close()
            raise SiliconError(f"{what}: no result after {limit:g} s")
        try:
            return self._pipe.recv()
        except EOFError as end:
            self._process.join()
            code = self._process.exitcode
            self.close()
            raise SiliconError(f"{what}: its process ended with status {code}") from end

    def run(self, job: Job) -> list[Bytes]:
        """DeviceError: the device cannot be opened again."""
        if self._process is None:
            self._start()
        self._pipe.send(job)
        answer = self._answer(job.name, self._limit)
        if isinstance(answer, SiliconError):
            # Its context may be lost.
            self.close()
            raise answer
        outputs: list[Bytes] = answer
        return outputs


def driver_map(described: TensorMap) -> Any:
    """The driver's tensor map, as it passes one to a kernel. SiliconError: it refuses, or we would read another."""
    from cuda.bindings import driver

    wide, narrow = driver.cuuint64_t, driver.cuuint32_t
    made = _checked(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType(DRIVER_TYPE[described.kind]), described.rank, described.address,
            [wide(n) for n in described.sizes], [wide(n) for n in described.strides or (16,)],
            [narrow(n) for n in described.box], [narrow(n) for n in described.steps],
            driver.CUtensorMapInterleave(0), driver.CUtensorMapSwizzle(described.swizzle),
            driver.CUtensorMapL2promotion(0), driver.CUtensorMapFloatOOBfill(int(described.nan)),
        ),
        f"encoding {described}",
    )  # fmt: skip
    raw = ctypes.string_at(int(made.getPtr()), 128)
    try:
        ours: object = decode(raw)
    except Fault as fault:
        ours = fault.message
    if ours != described:
        raise SiliconError(f"the driver's tensor map {raw[:64].hex()} is read as {ours}, not {described}")
    return made


def _checked(result: tuple[Any, ...], doing: str) -> Any:
    from cuda.bindings import driver

    code, *values = result
    if code != driver.CUresult.CUDA_SUCCESS:
        raise SiliconError(f"{doing} failed: {code.name}")
    return values[0] if values else None
