"""The context `virtual_gpu`: launches made inside it run on the CPU."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from . import schedule as schedules
from .errors import Finding, Triple, error
from .launch import MULTIPROCESSORS, Launch, Stats
from .memory import Allocation, Memory
from .program import program
from .ptx import Variable

DEFAULT_BUDGET = 20_000_000
# Linux's MAP_NORESERVE, which Python names from 3.12 on.
_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)
_ACTIVE: list[VirtualGPU] = []


def active() -> VirtualGPU | None:
    """The virtual GPU of the running context, None outside."""
    return _ACTIVE[-1] if _ACTIVE else None


@dataclass(frozen=True)
class LaunchedPTX:
    """The PTX of a kernel that was launched: its text, the SHA-256 of the text, and its `.target`.

    shared_bytes: dynamic shared memory of a block in the last launch.
    """

    kernel: str
    text: str
    sha256: str
    target: str
    shared_bytes: int


class VirtualGPU:
    """State of one context: what kernels may touch, how they are scheduled, and what was seen.

    stats: thread-instructions, launches, and bytes read and written by state space.
    findings: what the checkers saw, errors included.
    ptx: the PTX of each kernel launched, by kernel name, the latest text of each.
    """

    def __init__(self, arch: str, schedule: str | int, checkers: bool, instruction_budget: int) -> None:
        if arch not in MULTIPROCESSORS:
            raise ValueError(f"architecture {arch!r} is not one of {', '.join(sorted(MULTIPROCESSORS))}")
        if instruction_budget <= 0:
            raise ValueError(f"instruction_budget = {instruction_budget} must be positive")
        self.arch = arch
        self.schedule = schedules.schedule(schedule)
        self.checkers = checkers
        self.budget = instruction_budget
        self.stats = Stats()
        self.findings: list[Finding] = []
        self.ptx: dict[str, LaunchedPTX] = {}
        self._memory = Memory()
        self._named: dict[int, int] = {}
        self._symbols: dict[str, dict[str, int]] = {}
        self._keep: list[Any] = []

    # -- memory ---------------------------------------------------------------------------------------------------

    def allocate(self, tensor: torch.Tensor, name: str | None = None) -> None:
        """Makes the storage of a CPU tensor known, so that kernels may touch it through a bare pointer."""
        self._allocation(tensor, name)

    def _allocation(self, tensor: torch.Tensor, name: str | None = None) -> Allocation | None:
        if tensor.device.type != "cpu":
            raise error("argument", f"a tensor on {tensor.device}: a virtual GPU works on CPU tensors")
        storage = tensor.untyped_storage()
        label = name or f"tensor {len(self._named)}"
        kind = str(tensor.dtype).removeprefix("torch.")
        label = f"{label} ({kind} {list(tensor.shape)})"
        before = self._memory.find(storage.data_ptr(), storage.data_ptr() + max(storage.nbytes(), 1) - 1)
        made = self._memory.add(storage.data_ptr(), storage.nbytes(), label, storage)
        if made is not None and made is not before:
            self._named[made.base] = len(self._named)
        return made

    def sparse(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros whose pages exist once they are touched, as large as addresses allow.

        For kernels that index more than 2^31 elements: an offset cut to 32 bits leaves the buffer, or lands elsewhere
        in it. Raises ValueError for less than one element.
        """
        if elements <= 0:
            raise ValueError(f"elements = {elements} must be positive")
        size = elements * torch.empty(0, dtype=dtype).element_size()
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        return torch.frombuffer(pages, dtype=dtype)

    def uninitialized(self, tensor: torch.Tensor) -> None:
        """Marks a tensor's elements as never written: reading one before a store to it is an error."""
        allocation = self._allocation(tensor)
        if allocation is not None:
            whole = tensor.numel() * tensor.element_size() == allocation.size
            if allocation.shadow is not None or not whole:
                allocation.track()
                _elements(allocation, allocation.track(), tensor).fill_(0)
            else:
                allocation.track(defined=False)
            allocation.must_be_written = True

    def written(self, tensor: torch.Tensor) -> torch.Tensor:
        """Which elements of a tensor kernels have stored since `uninitialized`, as bools of its shape.

        An element counts as stored when every byte of it is.
        """
        allocation = self._allocation(tensor)
        if allocation is None:
            return torch.zeros(tensor.shape, dtype=torch.bool)
        if allocation.shadow is None:
            raise error("argument", "written() needs uninitialized() on the same tensor before the launch")
        return _elements(allocation, allocation.track(), tensor).bool().all(dim=-1)

    def owned(self, tensor: torch.Tensor, mask: torch.Tensor) -> None:
        """Makes a store to an element of a tensor an error where `mask` is False.

        mask: bool, one for each row or broadcastable to the tensor. Copies of tensors (TMA) are not checked.
        """
        allocation = self._allocation(tensor)
        if allocation is None:
            return
        if allocation.closed is None:
            allocation.closed = np.zeros(allocation.buffer.size, np.uint8)
        closed = allocation.closed[allocation.base - allocation.start :][: allocation.size]
        rows = mask.reshape(-1, *[1] * (tensor.dim() - 1)) if mask.dim() == 1 else mask
        elements = _elements(allocation, closed, tensor)
        elements.copy_((~rows).to(torch.uint8).unsqueeze(-1).expand(elements.shape))

    def readonly(self, tensor: torch.Tensor) -> None:
        """Makes every store to the storage of a tensor an error."""
        allocation = self._allocation(tensor)
        if allocation is not None:
            allocation.readonly = True

    def forget(self, tensor: torch.Tensor) -> None:
        """Takes back `allocate`, `uninitialized`, `owned` and `readonly` for the storage of a tensor."""
        allocation = self._memory.find(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().data_ptr())
        if allocation is not None:
            self._memory.remove(allocation)

    @contextlib.contextmanager
    def known(self, tensors: Sequence[tuple[int, int, str, object]]) -> Iterator[None]:
        """Makes ranges (address, bytes, name, owner) known while a compiled function runs."""
        before = set(map(id, self._memory))
        for base, size, name, owner in tensors:
            self._memory.add(base, size, name, owner)
        try:
            yield
        finally:
            for item in list(self._memory):
                if id(item) not in before and id(item.owner) in {id(t[3]) for t in tensors}:
                    self._memory.remove(item)

    # -- launches -------------------------------------------------------------------------------------------------

    def launch(
        self,
        ptx: str,
        kernel: str | None,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Any],
        shared_bytes: int = 0,
        cluster: int | Sequence[int] = 1,
        cooperative: bool = False,
    ) -> None:
        """Runs a kernel of a PTX text.

        kernel: its name, None if there is only one. grid, block, cluster: one to three numbers.
        args: one for each parameter: a CPU tensor (its address), an int or float (packed in the parameter's size), a
        NumPy scalar, or bytes.
        Raises VirtualGPUError for PTX that cannot be run and for every fault of the kernel.
        """
        prog = program(ptx, kernel, self.arch, self.schedule.fine)
        params = prog.kernel.params
        if len(args) != len(params):
            raise error("argument", f"{len(args)} arguments, the kernel takes {len(params)}", **prog.kernel.place)
        data = bytearray(prog.param_bytes)
        for n, (param, value) in enumerate(zip(params, args, strict=True)):
            raw = self._pack(n, value, param.size)
            if len(raw) != param.size:
                raise error(
                    "argument", f"argument {n} has {len(raw)} bytes, parameter {param.name} {param.size}",
                    **prog.kernel.place,
                )  # fmt: skip
            data[param.offset : param.offset + param.size] = raw
        self.launch_raw(ptx, prog.kernel.name, _triple(grid), _triple(block), bytes(data), shared_bytes,
                        _triple(cluster), cooperative)  # fmt: skip

    def _pack(self, number: int, value: Any, size: int) -> bytes:
        if isinstance(value, bytes | bytearray):
            return bytes(value)
        if isinstance(value, torch.Tensor):
            self._allocation(value, f"argument {number}")
            return struct.pack("<Q", value.data_ptr())
        if isinstance(value, np.generic):
            return value.tobytes()
        if isinstance(value, bool | int):
            return (int(value) & ((1 << (8 * size)) - 1)).to_bytes(size, "little")
        if isinstance(value, float):
            if size not in (4, 8):
                raise error("argument", f"argument {number} is a float, but its parameter has {size} bytes")
            return struct.pack("<f" if size == 4 else "<d", value)
        raise error("argument", f"argument {number} of type {type(value).__name__} cannot be passed to a kernel")

    def launch_raw(
        self,
        ptx: str,
        kernel: str,
        grid: Triple,
        block: Triple,
        arguments: bytes,
        shared_bytes: int = 0,
        cluster: Triple = (1, 1, 1),
        cooperative: bool = False,
    ) -> None:
        """`launch` with the parameter block as bytes."""
        prog = program(ptx, kernel, self.arch, self.schedule.fine)
        self.ptx[kernel] = LaunchedPTX(kernel, ptx, prog.sha256, prog.module.target, shared_bytes)
        Launch(
            prog, grid, block, arguments, self._memory, self.schedule, self.stats, self.findings, self.checkers,
            self.budget, shared_bytes, cluster, cooperative, self.stats.launches,
            self._globals(ptx, prog.module.variables),
        ).run()  # fmt: skip

    def _globals(self, ptx: str, variables: tuple[Variable, ...]) -> dict[str, int]:
        """Addresses of a module's `.global` and `.const` variables, which live as long as the context."""
        wanted = [v for v in variables if v.space in ("global", "const") and v.size]
        if not wanted:
            return {}
        key = hashlib.sha256(ptx.encode()).hexdigest()
        if key not in self._symbols:
            table = {}
            for v in wanted:
                buffer = np.zeros(v.size + 127, np.uint8)
                base = (buffer.ctypes.data + 127) & ~127
                start = base - buffer.ctypes.data
                if v.data is not None:
                    buffer[start : start + len(v.data)] = np.frombuffer(v.data, np.uint8)
                self._memory.add(base, v.size, f"variable {v.name}", buffer, readonly=v.space == "const")
                table[v.name] = base
            self._symbols[key] = table
        return self._symbols[key]


def _triple(value: int | Sequence[int]) -> Triple:
    numbers = (value,) if isinstance(value, int) else tuple(int(v) for v in value)
    if not 1 <= len(numbers) <= 3:
        raise ValueError(f"{value!r} must be one to three numbers")
    x, y, z = (*numbers, 1, 1)[:3]
    return x, y, z


def _elements(allocation: Allocation, marks: npt.NDArray[np.uint8], tensor: torch.Tensor) -> torch.Tensor:
    """What `marks`, a byte for each of the allocation, holds of a tensor: [*tensor.shape, itemsize]."""
    shadow = torch.from_numpy(marks)
    size = tensor.element_size()
    start = tensor.data_ptr() - tensor.storage_offset() * size - allocation.base
    return torch.as_strided(
        shadow, (*tensor.shape, size), (*(s * size for s in tensor.stride()), 1), start + tensor.storage_offset() * size
    )


@contextlib.contextmanager
def virtual_gpu(
    arch: str,
    schedule: str | int = "fast",
    checkers: bool = True,
    instruction_budget: int = DEFAULT_BUDGET,
) -> Iterator[VirtualGPU]:
    """A context in which compiled CuTe DSL functions run on the CPU.

    arch: `sm_90a` or `sm_100a`. schedule: `fast`, or a seed from which the order of warps and blocks is drawn.
    checkers: whether reads of memory and registers that were never written are errors; addresses are always checked.
    instruction_budget: the most instructions of one thread, against endless loops.
    Functions have to be compiled inside such a context and may be called in a later one of the same architecture.
    Raises RuntimeError if a context is active already.
    """
    from .interception import intercepted

    if _ACTIVE:
        raise RuntimeError("a virtual_gpu context is active already: only one can be")
    gpu = VirtualGPU(arch, schedule, checkers, instruction_budget)
    with intercepted(arch):
        _ACTIVE.append(gpu)
        try:
            yield gpu
        finally:
            _ACTIVE.remove(gpu)
