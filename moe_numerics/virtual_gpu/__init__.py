"""Runs compiled CuTe DSL kernels on the CPU by executing their PTX.

with virtual_gpu("sm_90a", schedule="fast") as gpu:
    compiled = cute.compile(function, ...)
    compiled(a, b, stream)
"""

from . import micro
from .errors import Finding, VirtualGPUError
from .gpu import LaunchedPTX, VirtualGPU, active, virtual_gpu
from .launch import Stats

__all__ = ["Finding", "LaunchedPTX", "Stats", "VirtualGPU", "VirtualGPUError", "active", "micro", "virtual_gpu"]
