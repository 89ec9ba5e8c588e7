"""What ptxas makes of the grouped GEMMs: registers, spills, shared and tensor memory; and what their epilogues cost.

`python -m moe_numerics.assembly` compiles a kernel of each kind for sm_90a, sm_100a and sm_103a, assembles it where
there is a ptxas (CUDA 12.9 or newer knows all three), and writes `reports/assembly.json`. No GPU is needed.

The share of an epilogue is an estimate, and labelled so: the instructions that a tile of 128 by 256 takes on the
virtual GPU where 32 values are summed, at one instruction of a warp a clock in each of a multiprocessor's four parts,
over the clocks that the tile's products take at the datasheet rate when 4096 values are summed. Loads of operands and
of scales are in it once, though they recur along the sum. Epilogue and products run at the same time, so that a share
below 1 can be hidden. It is of PTX: what ptxas merges or adds does not count.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path as FilePath
from typing import Any

import torch

from moe_numerics.accumulators import on_target
from moe_numerics.cases import Case
from moe_numerics.gemm_operations import FirstLayer, Operands, WeightGradient
from moe_numerics.paths import find_path
from moe_numerics.report.atomic import write_files

__all__ = ["TARGETS", "AssembledKernel", "assemble", "kernels", "main"]

TARGETS = ("sm_90a", "sm_100a", "sm_103a")
DEPTH = 4096
# NVIDIA's datasheets, dense products a clock and multiprocessor: 989 TFLOP/s bfloat16 of 132 at 1.83 GHz (H100 SXM);
# 2.25, 4.5 and 9 PFLOP/s bfloat16, FP8 and FP4 of 148 at 1.85 GHz (B200).
PRODUCTS_PER_CLOCK = {
    ("sm_90a", "bf16"): 2048,
    ("sm_100a", "bf16"): 4096,
    ("sm_100a", "mxfp8"): 8192,
    ("sm_100a", "nvfp4"): 16384,
}
ISSUE_SLOTS = 4
TILE = 128 * 256

_KINDS: tuple[tuple[str, str | None], ...] = (
    ("grouped_gemm.matmul.bf16.bias", None),
    ("grouped_gemm.matmul.x_mxfp8_e4m3", None),
    ("grouped_gemm.matmul.x_nvfp4", None),
    ("grouped_gemm.dgrad.bf16", None),
    ("grouped_gemm.dgrad.grad_mxfp8_e5m2", None),
    ("grouped_gemm.wgrad.bf16.main_grad", None),
    ("grouped_gemm.wgrad.grad_mxfp8_e5m2", None),
    ("grouped_gemm.wgrad.grad_nvfp4", None),
    ("grouped_gemm.quantize.mxfp8_e4m3", None),
    ("grouped_mlp.fc1.swiglu.fwd.mxfp8_e4m3", None),
    ("grouped_mlp.fc1.swiglu.fwd.mxfp8_e4m3", "mxfp8"),
    ("grouped_mlp.fc2.swiglu.bwd.mxfp8_e4m3", None),
    ("grouped_mlp.fc2.swiglu.bwd.mxfp8_e4m3", "mxfp8"),
    ("grouped_mlp.fc2.swiglu.bwd.nvfp4_amax", "nvfp4"),
)
"""A path, and the operands of its product where they are not the path's own."""


@dataclass(frozen=True)
class AssembledKernel:
    """A grouped GEMM kernel of a path. assembled: False where there was no ptxas; then sizes from it are None.

    tensor_columns: of tensor memory. estimated_epilogue_share: see the module's docstring; None where the target is not
    executed.
    """

    path: str
    operands: str
    target: str
    kernel: str
    assembled: bool
    registers: int | None
    spill_bytes: int | None
    barriers: int | None
    shared_bytes: int | None
    tensor_columns: int | None
    estimated_epilogue_share: float | None


def _call(path_id: str, operands: str | None, target: str, tiles: int) -> None:
    """Launch a path's kernels for `tiles` tiles of 128 rows and 256 columns, or several of them beside each other."""
    path = find_path(path_id)
    operation, form = path.operation, operands or path.operands
    if operands is not None:
        assert isinstance(operation, FirstLayer)
        operation = replace(operation, operands=Operands(operands))
    contract = on_target(path.contract("suite", target), target, form)
    over_rows = isinstance(operation, WeightGradient)
    counts, depth = ((32,), 128 * tiles) if over_rows else ((128 * tiles,), 32)
    prob = any(spec.kind == "prob" for spec in path.inputs)
    case = Case(path.id, counts, 256, depth=depth, prob=prob, layout=path.layouts[0])
    outputs = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in operation.shapes(case).items()}
    operation.fused(case, case.tensors(path.inputs), contract, outputs)


def _beside(path_id: str) -> int:
    """Tiles of 256 columns beside each other, of 256 columns of a result."""
    operation = find_path(path_id).operation
    return operation.activation.inputs if type(operation) is FirstLayer else 1


def _executed(path_id: str, operands: str | None, target: str) -> tuple[Any, float]:
    """The launched PTX of the grouped GEMM, and thread-instructions of a tile, from launches of 4 and of 8 a block."""
    from moe_numerics.fused import compilation
    from moe_numerics.virtual_gpu import virtual_gpu

    token = compilation.domain.set("virtual")
    try:
        with virtual_gpu(target) as gpu:
            seen = []
            for tiles in (4, 8):
                before = gpu.stats.thread_instructions
                _call(path_id, operands, target, tiles)
                seen.append(gpu.stats.thread_instructions - before)
            (launched,) = (each for name, each in gpu.ptx.items() if "gemm_kernel" in name)
    finally:
        compilation.domain.reset(token)
    return launched, (seen[1] - seen[0]) / (4 * _beside(path_id))


def _compiled(path_id: str, operands: str | None, target: str) -> tuple[str, str]:
    """Text and kernel name of the grouped GEMM, which is not launched."""
    from moe_numerics.fused import compilation

    with compilation.compiling_for(target) as used:
        _call(path_id, operands, target, 1)
    for each in used:
        for name in compilation.kernels_in(each.ptx):
            if "gemm_kernel" in name:
                return each.ptx, name
    raise ValueError(f"{path_id} has no grouped GEMM")


def assemble(text: str, target: str, ptxas: str) -> dict[str, tuple[int, int, int]]:
    """Registers, bytes of spill stores and loads, and barriers of each kernel. ValueError: ptxas refuses the text."""
    with tempfile.TemporaryDirectory() as folder:
        source = FilePath(folder) / "kernel.ptx"
        source.write_text(text, encoding="utf-8")
        done = subprocess.run(
            [ptxas, f"-arch={target}", "-v", "-o", str(source.with_suffix(".cubin")), str(source)],
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise ValueError(f"{ptxas} refuses the PTX for {target}: {done.stderr.strip()[-600:]}")
    found = {}
    for part in done.stderr.split("Compiling entry function '")[1:]:
        name = part.partition("'")[0]
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        used = re.search(r"Used (\d+) registers", part)
        barriers = re.search(r"used (\d+) barriers", part)
        if spills is None or used is None:
            raise ValueError(f"{ptxas} -v says nothing of {name} that this understands: {part[:200]}")
        found[name] = (int(used[1]), int(spills[1]) + int(spills[2]), int(barriers[1]) if barriers else 0)
    return found


def _tensor_columns(text: str, kernel: str) -> int | None:
    """Columns of tensor memory that a kernel allocates."""
    body = text.partition(f".entry {kernel}")[2].partition(".entry ")[0]
    allocation = re.search(r"tcgen05\.alloc\S*\s+\[[^]]+\],\s*([%\w]+);", body)
    if allocation is None:
        return None
    if allocation[1].isdigit():
        return int(allocation[1])
    constant = re.findall(rf"mov\.b32\s+{re.escape(allocation[1])},\s*(\d+);", body[: allocation.start()])
    return int(constant[-1]) if constant else None


def kernels(ptxas: str | None) -> Iterator[AssembledKernel]:
    """Every kind of grouped GEMM for every target."""
    for path_id, operands in _KINDS:
        form = operands or find_path(path_id).operands or "bf16"
        shared: dict[bool, int] = {}
        for target in TARGETS:
            hopper = target == "sm_90a"
            if hopper and form != "bf16":
                # Hopper multiplies such operands as bfloat16, in the same kernels.
                continue
            share = None
            if target == "sm_103a":
                text, kernel = _compiled(path_id, operands, target)
            else:
                launched, instructions = _executed(path_id, operands, target)
                text, kernel, shared[hopper] = launched.text, launched.kernel, launched.shared_bytes
                clocks = TILE * DEPTH / PRODUCTS_PER_CLOCK[target, form]
                share = round(instructions / 32 / ISSUE_SLOTS / clocks, 3)
            found = assemble(text, target, ptxas).get(kernel) if ptxas else None
            registers, spilled, barriers = found or (None, None, None)
            yield AssembledKernel(
                path_id,
                form,
                target,
                kernel,
                found is not None,
                registers,
                spilled,
                barriers,
                shared[hopper],
                _tensor_columns(text, kernel),
                share,
            )


def main(arguments: list[str] | None = None) -> int:
    """Print and write what there is to say of every kernel; 1 if one spills."""
    parser = argparse.ArgumentParser(prog="python -m moe_numerics.assembly", description=__doc__.partition("\n")[0])
    parser.add_argument("--ptxas", default=shutil.which("ptxas"), help="the assembler, else that of PATH")
    parser.add_argument("--out", type=FilePath, default=FilePath("reports/assembly.json"))
    chosen = parser.parse_args(arguments)
    version = None
    if chosen.ptxas is None:
        print("no ptxas on PATH: kernels are compiled to PTX and not assembled (give one with --ptxas)")
    else:
        said = subprocess.run([chosen.ptxas, "--version"], capture_output=True, text=True, check=True).stdout
        version = said.strip().splitlines()[-1]
    rows = []
    for row in kernels(chosen.ptxas):
        rows.append(row)
        sizes = f"{row.registers} registers, {row.spill_bytes} bytes spilled, " if row.assembled else ""
        tensor = f", {row.tensor_columns} tensor columns" if row.tensor_columns else ""
        share = "" if row.estimated_epilogue_share is None else f", estimated share {row.estimated_epilogue_share}"
        print(f"{row.path} ({row.operands}) {row.target}: {sizes}{row.shared_bytes} bytes shared{tensor}{share}")
    data = {"ptxas": version, "depth_of_the_estimate": DEPTH, "kernels": [asdict(row) for row in rows]}
    write_files(chosen.out.parent, {chosen.out.name: json.dumps(data, indent=1) + "\n"})
    return int(any(row.spill_bytes for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
