"""Runs the host half of compiled CuTe DSL functions and takes over their launches.

The host code calls C functions of the DSL's runtime library. Symbols registered on the MLIR execution engine before its
first lookup win over the library, so that each engine made inside a context gets Python callbacks; they pass launches
to the virtual GPU that is active when they are called. Everything patched is put back on exit.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from . import fake_arguments, host_tensor_map, narrow
from .errors import Triple, error

_SUCCESS = 0
_FAILURE = 999

_pointer, _i32, _i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "_cudaOccupancyMaxActiveBlocksPerMultiprocessor": (_pointer, _pointer, _i32, _i64),
    "_cudaLaunchKernelEx": (_pointer, _pointer, _pointer),
    "_cudaLaunchKernel": (_pointer, _i32, _i32, _i32, _i32, _i32, _i32, _pointer, _i64, _pointer),
    "_cudaLibraryLoadData": (_pointer, _pointer, _pointer, _pointer, _i32, _pointer, _pointer, _i32),
    "_cuKernelGetAttribute": (_pointer, _i32, _pointer, _i32),
    "_cudaDeviceGetAttribute": (_pointer, _i32, _i32),
    "_cudaGetDevice": (_pointer,),
    "_cudaSetDevice": (_i32,),
    "_cudaKernelSetAttributeForDevice": (_pointer, _i32, _i32, _i32),
    "_cudaFuncSetAttribute": (_pointer, _i32, _i32),
    "_cudaLibraryGetKernel": (_pointer, _pointer, _pointer),
    "_cudaLibraryUnload": (_pointer,),
    "_cuTensorMapEncodeTiled": (_pointer, _i32, _i32, *(_pointer,) * 5, *(_i32,) * 4),
}

# cudaDeviceAttr numbers (CUDA runtime API) that host code asks for.
_DEVICE_ATTRIBUTES = {1: 1024, 8: 48 * 1024, 10: 32, 75: 9, 76: 0, 81: 228 * 1024, 97: 227 * 1024}
_MULTIPROCESSOR_COUNT = 16

_modules: list[HostModule] = []
_kernels: list[tuple[HostModule, str]] = []
_pending: list[BaseException] = []
_dump: list[str] = []


def _write(address: int, kind: Any, value: int) -> None:
    kind.from_address(address).value = value


def dump_folder() -> str:
    """A folder of this process for the compiler's output: two processes in one folder read each other's PTX."""
    if not _dump or _dump[0] != str(os.getpid()):
        folder = tempfile.mkdtemp(prefix="moe-numerics-ptx-")
        _dump[:] = [str(os.getpid()), folder]
        atexit.register(_remove, os.getpid(), folder)
    return _dump[1]


def _remove(process: int, folder: str) -> None:
    if process == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)


def _truncated(x: float) -> float:
    """The compiler's support function that rounds a float32 to bfloat16, which older libraries do not have.

    The code comes back in the lower half of a float register.
    """
    code = narrow.to_bf16(np.array([x], np.float32))
    return float(code.astype(np.uint32).view(np.float32)[0])


class HostModule:
    """The callbacks of one compiled function's engine. `ptx` is filled in when the function exists."""

    def __init__(self) -> None:
        self.ptx: str | None = None
        self.number = len(_modules)
        _modules.append(self)
        self.callbacks: dict[str, Any] = {}
        for name, arguments in _SIGNATURES.items():
            self.callbacks[name] = ctypes.CFUNCTYPE(_i32, *arguments)(self._safe(name))
        self.callbacks["__truncsfbf2"] = ctypes.CFUNCTYPE(ctypes.c_float, ctypes.c_float)(_truncated)

    def trap(self, names: Iterable[str]) -> None:
        """Makes other functions of the CUDA runtime and driver an error when they are called."""
        for name in names:
            self.callbacks[name] = ctypes.CFUNCTYPE(_i32)(self._safe(name))

    def register(self, engine: Any) -> None:
        for name, callback in self.callbacks.items():
            engine.raw_register_runtime(name, ctypes.cast(callback, ctypes.c_void_p))

    def _safe(self, name: str) -> Callable[..., int]:
        """ctypes swallows exceptions, so they are kept and raised when the compiled function returns.

        Inside a context the host code is told of success all the same: some of it ends the process at an error. Its
        further calls do nothing. Outside nothing would raise what was kept.
        """
        from .gpu import active

        method: Callable[..., None] | None = getattr(self, name.lstrip("_"), None)

        def call(*arguments: Any) -> int:
            try:
                if _pending:
                    return _SUCCESS
                if method is None:
                    raise error("host", f"the function's host code calls {name}, which a virtual GPU does not have")
                method(*arguments)
            except BaseException as exception:
                _pending.append(exception)
                if active() is None:
                    return _FAILURE
            return _SUCCESS

        return call

    def _gpu(self) -> Any:
        from .gpu import active

        gpu = active()
        if gpu is None:
            raise error(
                "context",
                "a function compiled inside a virtual_gpu context was called outside of one: "
                "call it inside, or compile it anew",
            )
        return gpu

    def cudaLibraryLoadData(self, library: int, *rest: Any) -> None:  # noqa: N802
        _write(library, ctypes.c_uint64, self.number + 1)

    def cudaLibraryUnload(self, library: int) -> None:  # noqa: N802
        return None

    def cudaLibraryGetKernel(self, kernel: int, library: int, name: int) -> None:  # noqa: N802
        _kernels.append((self, ctypes.string_at(name).decode()))
        _write(kernel, ctypes.c_uint64, len(_kernels))

    def cudaGetDevice(self, device: int) -> None:  # noqa: N802
        _write(device, ctypes.c_int32, 0)

    def cudaSetDevice(self, device: int) -> None:  # noqa: N802
        return None

    def cudaDeviceGetAttribute(self, value: int, attribute: int, device: int) -> None:  # noqa: N802
        from .gpu import active
        from .launch import MULTIPROCESSORS

        gpu = active()
        arch = gpu.arch if gpu is not None else "sm_90a"
        if attribute == _MULTIPROCESSOR_COUNT:
            found = MULTIPROCESSORS[arch]
        elif attribute == 75:
            found = 10 if arch == "sm_100a" else 9
        else:
            found = _DEVICE_ATTRIBUTES.get(attribute, 0)
        _write(value, ctypes.c_int32, found)

    def cuKernelGetAttribute(self, value: int, *rest: Any) -> None:  # noqa: N802
        _write(value, ctypes.c_int32, 0)

    def cudaKernelSetAttributeForDevice(self, *rest: Any) -> None:  # noqa: N802
        return None

    def cudaFuncSetAttribute(self, *rest: Any) -> None:  # noqa: N802
        return None

    def cudaOccupancyMaxActiveBlocksPerMultiprocessor(self, count: int, *rest: Any) -> None:  # noqa: N802
        _write(count, ctypes.c_int32, 1)

    def cuTensorMapEncodeTiled(self, target: int, *arguments: int) -> None:  # noqa: N802
        ctypes.memmove(target, host_tensor_map.encode_tiled(*arguments), 128)

    def cudaLaunchKernel(  # noqa: N802
        self, kernel: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int, args: int, shared: int, stream: int
    ) -> None:
        self._launch(kernel, (gx, gy, gz), (bx, by, bz), shared, args, (1, 1, 1), False)

    def cudaLaunchKernelEx(self, config: int, kernel: int, args: int) -> None:  # noqa: N802
        """`config` is a cudaLaunchConfig_t; attributes are 72 bytes with the value at byte 8."""
        numbers = (ctypes.c_uint32 * 6).from_address(config)
        shared = ctypes.c_size_t.from_address(config + 24).value
        attributes = ctypes.c_void_p.from_address(config + 40).value
        count = ctypes.c_uint32.from_address(config + 48).value
        cluster: Triple = (1, 1, 1)
        cooperative = False
        for n in range(count if attributes else 0):
            base = int(attributes or 0) + 72 * n
            which = ctypes.c_uint32.from_address(base).value
            if which == 2:
                cooperative = bool(ctypes.c_int32.from_address(base + 8).value)
            elif which == 4:
                cx, cy, cz = (ctypes.c_uint32 * 3).from_address(base + 8)
                cluster = (max(cx, 1), max(cy, 1), max(cz, 1))
        gx, gy, gz, bx, by, bz = numbers
        self._launch(kernel, (gx, gy, gz), (bx, by, bz), shared, args, cluster, cooperative)

    def _launch(
        self, kernel: int, grid: Triple, block: Triple, shared: int, args: int, cluster: Triple, cooperative: bool
    ) -> None:
        from .program import parsed

        module, name = _kernels[int(kernel) - 1]
        if module.ptx is None:
            raise error("context", f"the PTX of kernel {name} was not kept by the compiler")
        params = parsed(module.ptx).kernels[name].params
        data = bytearray(params[-1].offset + params[-1].size if params else 0)
        for n, param in enumerate(params):
            source = ctypes.c_void_p.from_address(args + 8 * n).value
            if source is None:
                raise error("argument", f"parameter {param.name} of kernel {name} has no value")
            data[param.offset : param.offset + param.size] = ctypes.string_at(source, param.size)
        self._gpu().launch_raw(module.ptx, name, grid, block, bytes(data), shared, cluster, cooperative)


def ranges(value: Any, label: str, found: list[tuple[int, int, str, object]], depth: int = 0) -> None:
    """Collects the storage of tensors in an argument: (address, bytes, name, owner)."""
    if depth > 6 or value is None or isinstance(value, int | float | str | bytes):
        return
    if isinstance(value, torch.Tensor):
        if value.device.type not in ("cpu", "meta"):
            raise error("argument", f"{label} is on {value.device}: a virtual GPU works on CPU tensors")
        storage = value.untyped_storage()
        kind = str(value.dtype).removeprefix("torch.")
        found.append((storage.data_ptr(), storage.nbytes(), f"{label} ({kind} {list(value.shape)})", storage))
    elif isinstance(value, list | tuple):
        for n, item in enumerate(value):
            ranges(item, f"{label}[{n}]", found, depth + 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            ranges(item, f"{label}[{key!r}]", found, depth + 1)
    elif hasattr(value, "data_ptr") and hasattr(value, "shape") and hasattr(value, "stride"):
        _runtime_tensor(value, label, found)
    elif hasattr(value, "__dlpack__"):
        ranges(torch.from_dlpack(value), label, found, depth + 1)
    elif dataclasses.is_dataclass(value):
        for item in dataclasses.fields(value):
            ranges(getattr(value, item.name), f"{label}.{item.name}", found, depth + 1)


def _runtime_tensor(value: Any, label: str, found: list[tuple[int, int, str, object]]) -> None:
    """A `cute.runtime` tensor: its strides give its extent; the storage behind it is not known."""
    try:
        address = int(value.data_ptr)
        shape, stride = tuple(value.shape), tuple(value.stride)
        # A Boolean has one bit, but takes a byte.
        width = int(value.element_type.width)
        width = 8 if width == 1 else width
    except (TypeError, AttributeError, ValueError):
        return
    if not all(isinstance(n, int) for n in (*shape, *stride)) or 0 in shape:
        return
    span = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1
    found.append((address, -(-span * width // 8), f"{label} ({value.element_type.__name__} {list(shape)})", value))


def _runtime_calls(program: Any) -> set[str]:
    """Functions of the DSL's runtime library that stand for CUDA's and that a module declares without defining."""
    found = set()
    for operation in program.body.operations:
        if operation.operation.name == "llvm.func" and not operation.regions[0].blocks:
            name = operation.attributes["sym_name"].value
            if name.startswith("_cu"):
                found.add(name)
    return found


def _load_only(load: Callable[[], Any]) -> list[Any]:
    load()
    return []


@contextlib.contextmanager
def _patched(target: Any, name: str, value: Any) -> Iterator[None]:
    old = target.__dict__[name] if name in getattr(target, "__dict__", {}) else getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, old)


@contextlib.contextmanager
def intercepted(arch: str) -> Iterator[None]:
    """Compilation for `arch` and launches into the active virtual GPU, until the context ends."""
    from cutlass.base_dsl import compiler, dsl, jit_executor
    from cutlass.cutlass_dsl import CuTeDSL, cuda_jit_executor

    environment = CuTeDSL._get_dsl().envar
    compiled_class = cuda_jit_executor.CudaDialectJitCompiledFunction
    make_engine = compiler.Compiler.jit
    make_function = compiled_class.__init__
    apply_environment = compiler.CompileOptions.apply_envar_settings
    run_program = jit_executor.JitExecutor.run_compiled_program
    bind = jit_executor.ExecutionArgs.generate_execution_args
    compile_function = compiler.CompileCallable._compile
    bind_implicitly = dsl.BaseDSL.generate_mlir_function_types
    devices = compiled_class.__dict__["num_devices"]

    def jit(self: Any, program: Any, opt_level: int = 0, shared_libs: Any = ()) -> Any:
        # The host half runs once a launch: to optimise it takes longer than it saves.
        engine = make_engine(self, program, opt_level=0, shared_libs=shared_libs)
        module = HostModule()
        module.trap(_runtime_calls(program) - set(_SIGNATURES))
        module.register(engine)
        latest.append((engine, module))
        return engine

    latest: list[tuple[Any, HostModule]] = []

    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        make_function(self, *args, **kwargs)
        for pair in latest:
            engine, module = pair
            if engine is self.engine:
                module.ptx = self.__ptx__
                # The handles are ours: without them in its list the DSL never asks the real driver to unload them.
                self._load_cuda_library = functools.partial(_load_only, self._load_cuda_library)
                latest.remove(pair)
                break

    def options(self: Any, envar: Any, function_name: str) -> Any:
        self.options[compiler.KeepPTX].value = True
        self.options[compiler.EnableTVMFFI].value = False
        if not self.options[compiler.DumpDir].value:
            self.options[compiler.DumpDir].value = dump_folder()
        return apply_environment(self, envar, function_name)

    bound: list[list[tuple[int, int, str, object]]] = []
    kept: list[Any] = []

    def begin_call(args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
        # A call starts afresh, whatever became of the last one.
        _pending.clear()
        found: list[tuple[int, int, str, object]] = []
        for n, value in enumerate(args):
            ranges(value, f"argument {n}", found)
        for key, value in kwargs.items():
            ranges(value, f"argument {key}", found)
        bound.append(found)

    def implicit_arguments(
        self: Any, func: Any, name: str, args: Any, kwonlyargs: Any, sig: Any, compile_only: bool = False
    ) -> Any:
        """A `cute.jit` function that is called without having been compiled binds its arguments here."""
        if not compile_only:
            begin_call(args, kwonlyargs)
        return bind_implicitly(self, func, name, args, kwonlyargs, sig, compile_only)

    def arguments(self: Any, args: Any, kwargs: Any) -> Any:
        begin_call(args, kwargs)
        fakes = getattr(self, "moe_numerics_fakes", ())
        if fakes:
            values = fake_arguments.adapted(fakes, [*args, *kwargs.values()])
            # The host code gets pointers to what these hold.
            kept[:] = values
            args, kwargs = tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))
        return bind(self, args, kwargs)

    def compiled_with(self: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        result = compile_function(self, func, *args, **kwargs)
        fakes = [value for value in (*args, *kwargs.values()) if fake_arguments.is_tensor(value)]
        if any(fake_arguments.unusual(fake) for fake in fakes if not isinstance(fake, torch.Tensor)):
            result.execution_args.moe_numerics_fakes = fakes
        return result

    def run(self: Any, exe_args: Any) -> Any:
        from .gpu import active

        known = bound.pop() if bound else []
        bound.clear()
        gpu = active()
        with gpu.known(known) if gpu is not None else contextlib.nullcontext():
            try:
                result = run_program(self, exe_args)
            except BaseException as exception:
                if _pending:
                    raise _pending.pop() from exception
                raise
        if _pending:
            raise _pending.pop()
        return result

    with contextlib.ExitStack() as stack:
        stack.enter_context(_patched(environment, "arch", arch))
        stack.enter_context(_patched(environment, "enable_tvm_ffi", False))
        stack.enter_context(_patched(compiler.Compiler, "jit", jit))
        stack.enter_context(_patched(compiler.CompileCallable, "_compile", compiled_with))
        stack.enter_context(_patched(dsl.BaseDSL, "generate_mlir_function_types", implicit_arguments))
        stack.enter_context(_patched(compiled_class, "__init__", initialise))
        stack.enter_context(_patched(compiler.CompileOptions, "apply_envar_settings", options))
        stack.enter_context(_patched(jit_executor.JitExecutor, "run_compiled_program", run))
        stack.enter_context(_patched(jit_executor.ExecutionArgs, "generate_execution_args", arguments))
        del compiled_class.num_devices
        compiled_class.num_devices = 1
        try:
            yield
        finally:
            compiled_class.num_devices = devices
