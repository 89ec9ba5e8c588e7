"""Captures the tables of the approximations on a CUDA device: `python -m moe_numerics.silicon_capture FILE.npz`.

One table for each function holds its results over the bits that matter; `silicon_tables` says how they are used, and
`moe-numerics silicon --device cuda` proves the models with all 2^32 inputs.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from moe_numerics.silicon_sweeps import HALF_NAMES, Launcher
from moe_numerics.virtual_gpu import micro
from moe_numerics.virtual_gpu.silicon_tables import TANH_DROPPED, TANH_FIRST, encode_table

__all__ = ["TABLES", "Table", "capture_table"]

_BINADE = 1 << 23
_ONE = 127 << 23


@dataclass(frozen=True)
class Table:
    """Where a table comes from.

    pieces: (first, count, dropped), one after the other: entry i of one is the result for the float32 with the bits
    first + (i << dropped), less `offset`.
    """

    instruction: str
    pieces: tuple[tuple[int, int, int], ...]
    offset: int = 0

    @property
    def entries(self) -> int:
        return sum(count for _, count, _ in self.pieces)


TABLES = {
    "rcp": Table("rcp.approx.ftz.f32", ((_ONE, _BINADE, 0),)),
    "rsqrt": Table("rsqrt.approx.ftz.f32", ((_ONE, 2 * _BINADE, 0),)),
    "sqrt": Table("sqrt.approx.ftz.f32", ((_ONE, 2 * _BINADE, 0),)),
    # From 1 to 2 the whole part is 1, which the offset takes out of the exponent.
    "ex2": Table("ex2.approx.ftz.f32", ((_ONE, _BINADE, 0),), _BINADE),
    "lg2.above": Table("lg2.approx.ftz.f32", ((_ONE, _BINADE, 0),)),
    "lg2.below": Table("lg2.approx.ftz.f32", ((_ONE - _BINADE, _BINADE, 0),)),
    "tanh": Table(
        "tanh.approx.f32",
        tuple(((TANH_FIRST + n) << 23, _BINADE >> dropped, dropped) for n, dropped in enumerate(TANH_DROPPED)),
    ),
}


def capture_table(
    launcher: Launcher, arch: str, name: str, first: int = 0, last: int | None = None
) -> npt.NDArray[np.int64]:
    """Entries `first` to before `last` (None: the end) of a table of TABLES or of a 16-bit function."""
    if name in HALF_NAMES:
        instruction = HALF_NAMES[name]
        text = f".reg .b16 %h; cvt.u16.u32 %h, {{a0}}; {instruction} %h, %h; cvt.u32.u16 {{d0}}, %h;"
        inputs, offset = torch.arange(first, 1 << 16 if last is None else last, dtype=torch.int64), 0
    else:
        table = TABLES[name]
        text = f"{table.instruction} {{d0}}, {{a0}};"
        index = torch.arange(first, table.entries if last is None else last, dtype=torch.int64)
        inputs, start = torch.zeros_like(index), 0
        for bits, count, dropped in table.pieces:
            inside = (index >= start) & (index < start + count)
            inputs = torch.where(inside, bits + ((index - start) << dropped), inputs)
            start += count
        offset = table.offset
    given = inputs.to(torch.int32).to(launcher.device)
    results = torch.empty_like(given)
    ptx = micro.kernel(text, ["b32"], ["b32"], arch)
    launcher.launch(ptx, "micro", -(-given.numel() // 128), 128, [results, given, given.numel()])
    return (results.cpu().numpy().view(np.uint32).astype(np.int64)) - offset


def main() -> None:
    """Writes the tables of the CUDA device of this machine."""
    from moe_numerics.silicon import ARCH
    from moe_numerics.silicon_runners import CudaRunner

    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m moe_numerics.silicon_capture FILE.npz")
    runner = CudaRunner()
    np.savez(
        Path(sys.argv[1]),
        allow_pickle=False,
        **{name: encode_table(capture_table(runner, ARCH, name)) for name in (*TABLES, *HALF_NAMES)},
    )


if __name__ == "__main__":
    main()
