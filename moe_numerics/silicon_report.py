"""The command `moe-numerics silicon`: runs the comparison or the replay and says what it found."""

from __future__ import annotations

import json
import os
import subprocess
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_numerics.devices import DeviceError, open_device
from moe_numerics.silicon import ARCH, VECTORS, Outcome, capture, load_evidence, replay, save, save_replay
from moe_numerics.silicon_runners import CudaRunner
from moe_numerics.silicon_sweeps import Sweep, sweep_all

__all__ = ["Found", "capture_all", "replay_all", "summary"]

SHOWN = 20

Say = Callable[[str], None]


@dataclass(frozen=True)
class Found:
    """Everything that one run compared."""

    outcomes: tuple[Outcome, ...]
    sweeps: tuple[Sweep, ...]

    @property
    def equal(self) -> bool:
        """Whether nothing differs but what is stated as not modelled."""
        return all(o.equal or o.unmodelled for o in self.outcomes) and not any(s.differences for s in self.sweeps)


def _environment(device: str) -> dict[str, Any]:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        driver = "unknown"
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(torch.device(device)),
        "driver": driver,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "numpy": np.__version__,
        "arch": ARCH,
    }


def capture_all(device: str, elements: int, sweeps: bool, out: Path | None, say: Say) -> Found:
    """Compares with a CUDA device and, with `out`, writes the report, the evidence and the vectors.

    DeviceError: no such device, or one that is not an sm_90.
    """
    open_device(device)
    capability = torch.cuda.get_device_capability(torch.device(device))
    if capability != (9, 0):
        raise DeviceError(
            f"{device} has compute capability {capability[0]}.{capability[1]}: this comparison is of {ARCH}"
        )
    swept: list[Sweep] = []
    if sweeps:
        for sweep in sweep_all(CudaRunner(device), ARCH):
            swept.append(sweep)
            say(f"{sweep.instruction}: {sweep.differences:,} of {sweep.inputs:,} inputs differ {sweep.first}".rstrip())
    outcomes, vectors = capture(device, elements, os.cpu_count() or 1)
    if out is not None:
        save(out, outcomes, vectors, {**_environment(device), "elements": elements}, [asdict(s) for s in swept])
    return Found(tuple(outcomes), tuple(swept))


def replay_all(folder: Path | None, out: Path | None, say: Say) -> Found:
    """Replays captured results on the virtual GPU and, with `out`, writes the report with what the replay gave.

    DeviceError: there are none.
    """
    where = folder or VECTORS
    if not (where / "vectors.npz").exists():
        raise DeviceError(f"{where} has no vectors.npz: give --vectors a folder that `silicon --device cuda` wrote")
    known = load_evidence(where)
    say(
        f"no CUDA device: replaying on virtual:{ARCH} what {known.get('device', 'a GPU')}, driver "
        f"{known.get('driver', 'unknown')}, gave on {known.get('date', 'an unknown day')}"
    )
    with np.load(where / "vectors.npz") as file:
        vectors = {name: file[name] for name in file.files}
    found = Found(tuple(replay(vectors)), ())
    if out is not None:
        save_replay(out, json.loads((where / "report.json").read_text(encoding="utf-8")), found.outcomes)
    return found


def summary(found: Found) -> str:
    """A table by kind of instruction, then what differs."""
    rows: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for outcome in found.outcomes:
        row = rows[outcome.instructions[0].split(".")[0]]
        row[0] += 1
        row[1] += outcome.elements
        row[2] += not (outcome.equal or outcome.unmodelled)
    out = [f"{'instruction':12} {'compared':>9} {'elements':>13} {'differing':>10}"]
    out += [f"{name:12} {row[0]:9,} {row[1]:13,} {row[2]:10,}" for name, row in sorted(rows.items())]
    wrong = [outcome for outcome in found.outcomes if not (outcome.equal or outcome.unmodelled)]
    known = [outcome for outcome in found.outcomes if outcome.unmodelled and not outcome.equal]
    for outcome in wrong[:SHOWN]:
        first = outcome.first
        what = outcome.error or f"{outcome.differences:,} of {outcome.elements:,} differ"
        if first is not None:
            what += f"; operands {', '.join(first.operands)}: silicon {first.silicon}, virtual {first.virtual}"
        out.append(f"{outcome.name}: {what}")
    if len(wrong) > SHOWN:
        out.append(f"... and {len(wrong) - SHOWN} more")
    elements = sum(outcome.elements for outcome in found.outcomes)
    out.append(f"{len(found.outcomes):,} compared, {elements:,} elements, {len(wrong):,} differ")
    if known:
        names = ", ".join(sorted({name for outcome in known for name in outcome.instructions}))
        out.append(f"not modelled, correctly rounded instead: {names}")
    return "\n".join(out)
