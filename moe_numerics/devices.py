"""Where fused kernels run: a CUDA device, or a virtual GPU on the CPU.

A device runs one case of one path. Outputs begin filled with a known pattern, so that what a kernel wrote outside its
rows shows, and on CUDA they lie between guard bytes that must survive.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from moe_numerics.cases import Case
from moe_numerics.paths import Path
from moe_numerics.reference.contract import Contract
from moe_numerics.report.model import Kernel

__all__ = [
    "FILL_BYTE",
    "CudaDevice",
    "Device",
    "DeviceError",
    "DeviceLost",
    "KernelFault",
    "Outcome",
    "VirtualDevice",
    "default_devices",
    "fill_bits",
    "open_device",
    "same_bytes",
]

FILL_BYTE = 0xA5
GUARD_BYTES = 512

VIRTUAL_TARGETS = ("sm_90a", "sm_100a")


class DeviceError(Exception):
    """A path cannot run on a device, with the reason in words; nothing is said about its numerics."""


class DeviceLost(DeviceError):
    """The CUDA context is broken: nothing can run on this device in this process any more."""


class KernelFault(Exception):
    """The kernel did something that no kernel may do, such as reading memory that nobody wrote."""


@dataclass(frozen=True)
class Outcome:
    """What a run left: outputs by name, on the CPU, and the kernels that ran."""

    outputs: Mapping[str, torch.Tensor]
    kernels: tuple[Kernel, ...]


class Device(Protocol):
    """Runs cases of paths. target: what kernels are compiled for, such as `sm_90a`."""

    name: str
    evidence: str
    target: str

    def activate(self) -> AbstractContextManager[None]:
        """Kernels compile for and launch on this device inside the context."""

    def run(self, path: Path, case: Case, contract: Contract) -> Outcome:
        """Run the path's fused kernel on the case, inside the context of `activate`.

        KernelFault: the kernel broke a rule of the machine. DeviceError: it could not run.
        """


def fill_bits(dtype: torch.dtype) -> int:
    """Bits of an element of a buffer that nothing has written yet."""
    return int.from_bytes(bytes([FILL_BYTE]) * dtype.itemsize, "little")


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bytes."""
    # A tensor without elements may have strides that no view takes.
    return a.numel() == 0 or torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _filled(shape: tuple[int, ...], dtype: torch.dtype, device: str, guard: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(buffer of bytes with `guard` bytes on either side, tensor inside it)."""
    count = dtype.itemsize
    for size in shape:
        count *= size
    buffer = torch.full((count + 2 * guard,), FILL_BYTE, dtype=torch.uint8, device=device)
    return buffer, buffer[guard : guard + count].view(dtype).view(shape)


def _described(compiled: list[Any]) -> tuple[Kernel, ...]:
    from moe_numerics.fused.compilation import kernels_in

    return tuple(
        Kernel(hashlib.sha256(each.ptx.encode()).hexdigest(), each.target, ", ".join(kernels_in(each.ptx)))
        for each in compiled
    )


class VirtualDevice:
    """A virtual GPU of one architecture. `schedule`: "fast", or a seed of an adversarial order of warps and blocks.

    stops_outside: whether a store outside of what a case owns ends the kernel, with its line; else comparing shows it.
    """

    stops_outside = True

    def __init__(self, target: str, schedule: str | int = "fast"):
        if target not in VIRTUAL_TARGETS:
            raise DeviceError(
                f"virtual:{target} does not exist: expected one of "
                + ", ".join(f"virtual:{known}" for known in VIRTUAL_TARGETS)
            )
        self.target = target
        self.name = f"virtual:{target}"
        self.evidence = "virtual, silicon evidence" if target == "sm_90a" else "virtual, manual evidence"
        self._schedule = schedule
        self._gpu: Any = None

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        from moe_numerics.fused import compilation
        from moe_numerics.virtual_gpu import virtual_gpu

        token = compilation.domain.set("virtual")
        try:
            with virtual_gpu(self.target, schedule=self._schedule) as gpu:
                self._gpu = gpu
                yield
        finally:
            self._gpu = None
            compilation.domain.reset(token)

    def run(self, path: Path, case: Case, contract: Contract) -> Outcome:
        from moe_numerics.fused import compilation
        from moe_numerics.virtual_gpu import VirtualGPUError

        gpu = self._gpu
        tensors = case.tensors(path.inputs)
        outputs = {
            name: _filled(shape, dtype, "cpu", 0)[1] for name, (shape, dtype) in path.operation.shapes(case).items()
        }
        for tensor in tensors.values():
            gpu.readonly(tensor)
        experts = path.experts(case)
        owned = {spec.name: spec.owned(experts) for spec in path.outputs_of(case)}
        for name, tensor in outputs.items():
            gpu.uninitialized(tensor)
            if self.stops_outside and name in owned and not bool(owned[name].all()):
                gpu.owned(tensor, owned[name])
        seen = len(gpu.findings)
        try:
            with compilation.recording() as compiled:
                path.operation.fused(case, tensors, contract, outputs)
        except VirtualGPUError as error:
            if error.finding.kind in ("unknown_instruction", "unsupported", "parse"):
                raise DeviceError(str(error)) from error
            raise KernelFault(str(error)) from error
        finally:
            for tensor in (*tensors.values(), *outputs.values()):
                gpu.forget(tensor)
        if len(gpu.findings) > seen:
            raise KernelFault("; ".join(str(finding) for finding in gpu.findings[seen : seen + 3]))
        return Outcome(outputs, _described(compiled))


class CudaDevice:
    """A CUDA device of this machine, `cuda` or `cuda:N`."""

    def __init__(self, name: str = "cuda"):
        self.name = name
        self.evidence = "silicon"
        try:
            self._device = torch.device(name)
        except RuntimeError as error:
            raise DeviceError(f"{name!r} is no device: expected cuda or cuda:N") from error
        if not torch.cuda.is_available():
            raise DeviceError(f"{name}: this machine has no usable CUDA device; use virtual:sm_90a instead")
        index = self._device.index or 0
        if index >= torch.cuda.device_count():
            raise DeviceError(f"{name}: this machine has {torch.cuda.device_count()} CUDA devices")
        self.capability = torch.cuda.get_device_capability(index)
        if self.capability < (9, 0):
            raise DeviceError(
                f"{name} is {torch.cuda.get_device_name(index)}, compute capability "
                f"{self.capability[0]}.{self.capability[1]}: the fused kernels need 9.0 or newer"
            )
        self.target = "sm_{}{}a".format(*self.capability)

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        with torch.cuda.device(self._device):
            yield

    def run(self, path: Path, case: Case, contract: Contract) -> Outcome:
        from moe_numerics.fused import compilation

        tensors = case.tensors(path.inputs, self.name)
        buffers = {
            name: _filled(shape, dtype, self.name, GUARD_BYTES)
            for name, (shape, dtype) in path.operation.shapes(case).items()
        }
        try:
            with compilation.recording() as compiled:
                path.operation.fused(case, tensors, contract, {name: inner for name, (_, inner) in buffers.items()})
            torch.cuda.synchronize(self._device)
        except (RuntimeError, torch.AcceleratorError) as error:
            raise DeviceLost(f"{path.id}: {error}") from error
        for name, (buffer, _) in buffers.items():
            for where, guard in (("before", buffer[:GUARD_BYTES]), ("after", buffer[-GUARD_BYTES:])):
                if bool((guard != FILL_BYTE).any()):
                    raise KernelFault(f"bytes {where} the buffer of {name} were overwritten")
        for name, tensor in case.tensors(path.inputs, self.name).items():
            if not same_bytes(tensor, tensors[name]):
                raise KernelFault(f"input {name} was overwritten")
        return Outcome({name: inner.cpu() for name, (_, inner) in buffers.items()}, _described(compiled))


def open_device(name: str, schedule: str | int = "fast") -> Device:
    """The device of a name: `cuda`, `cuda:1`, `virtual:sm_90a`, `virtual:sm_100a`.

    DeviceError: no such device, or none on this machine.
    """
    kind, _, rest = name.partition(":")
    if kind == "virtual":
        return VirtualDevice(rest, schedule)
    if kind == "cuda":
        return CudaDevice(name)
    raise DeviceError(f"device {name!r} is unknown: expected cuda, cuda:N, virtual:sm_90a or virtual:sm_100a")


def default_devices() -> tuple[str, ...]:
    """CUDA if this machine has a usable GPU, else both virtual GPUs."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0):
        return ("cuda",)
    return tuple(f"virtual:{target}" for target in VIRTUAL_TARGETS)
