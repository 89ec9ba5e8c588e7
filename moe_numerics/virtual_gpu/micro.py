"""Micro-kernels: one instruction applied to arrays, for tests and for comparison with silicon.

The same PTX text runs on a virtual GPU and, through the driver, on a real one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .lowering import VIEW

_LOAD = {"pred": ("u8", 1), "b8": ("b8", 1), "e2m1x2": ("b8", 1)}
_REGISTER = {1: "b8", 2: "b16", 4: "b32", 8: "b64"}


def size_of(kind: str) -> int:
    """Bytes of one element in memory; a predicate takes one."""
    return _LOAD[kind][1] if kind in _LOAD else VIEW[kind].itemsize


def kernel(statement: str, results: Sequence[str], operands: Sequence[str], target: str = "sm_90a") -> str:
    """PTX of a kernel `micro` that runs `statement` for each element.

    statement: PTX with `{d0}`, `{d1}` for results and `{a0}`, `{a1}` for operands. results, operands: PTX types.
    Parameters: a pointer for each result, one for each operand, and the number of elements (u32).
    """
    names: dict[str, str] = {}
    declarations, loads, stores = [], [], []
    params = [f".param .u64 p{n}" for n in range(len(results) + len(operands))] + [".param .u32 count"]
    for n, (kind, prefix) in enumerate([(k, "d") for k in results] + [(k, "a") for k in operands]):
        number = n if prefix == "d" else n - len(results)
        name = f"%{prefix}{number}"
        names[f"{prefix}{number}"] = name
        size = size_of(kind)
        declarations.append(f".reg .{'pred' if kind == 'pred' else _REGISTER[size]} {name};")
        address = f"ld.param.u64 %base, [p{n}]; mad.wide.u32 %at, %i, {size}, %base;"
        if prefix == "a":
            if kind == "pred":
                loads.append(f"{address} ld.global.u8 %byte, [%at]; setp.ne.b16 {name}, %byte, 0;")
            else:
                loads.append(f"{address} ld.global.b{8 * size} {name}, [%at];")
        elif kind == "pred":
            stores.append(f"{address} selp.b16 %byte, 1, 0, {name}; st.global.b8 [%at], %byte;")
        else:
            stores.append(f"{address} st.global.b{8 * size} [%at], {name};")
    newline = "\n    "
    return f""".version 8.7
.target {target}
.address_size 64
.visible .entry micro({", ".join(params)})
{{
    .reg .b32 %i, %t, %c, %n, %count;
    .reg .b64 %base, %at;
    .reg .b16 %byte;
    .reg .pred %past;
    {newline.join(declarations)}
    mov.u32 %t, %tid.x;
    mov.u32 %c, %ctaid.x;
    mov.u32 %n, %ntid.x;
    mad.lo.u32 %i, %c, %n, %t;
    ld.param.u32 %count, [count];
    setp.ge.u32 %past, %i, %count;
    @%past bra DONE;
    {newline.join(loads)}
    {statement.format(**names)}
    {newline.join(stores)}
DONE:
    ret;
}}
"""


def run(
    gpu: Any, statement: str, results: Sequence[str], operands: Sequence[tuple[str, npt.NDArray[Any]]], block: int = 128
) -> list[npt.NDArray[Any]]:
    """Runs a micro-kernel on a virtual GPU; gives one array for each result, of the type's own NumPy dtype."""
    count = len(operands[0][1])
    text = kernel(statement, results, [k for k, _ in operands], gpu.arch)
    outs = [torch.zeros(max(count, 1) * size_of(k), dtype=torch.uint8) for k in results]
    ins = [torch.from_numpy(np.ascontiguousarray(v).view(np.uint8).copy()) for _, v in operands]
    gpu.launch(text, "micro", max(1, -(-count // block)), block, [*outs, *ins, count])
    for tensor in (*outs, *ins):
        gpu.forget(tensor)
    return [o.numpy()[: count * size_of(k)].view(VIEW[k]) for o, k in zip(outs, results, strict=True)]
