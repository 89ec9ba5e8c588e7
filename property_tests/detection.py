"""Measures how many planted faults the campaign finds, and how many the tolerances of other projects' tests find.

    python property_tests/detection.py [--only PATTERN] [--out reports/detection.json] [--page docs/detection.md]

Each fault of the catalogue runs in the default campaign's cases (3 of its path, seed 0) and, if those miss it, in a
thorough run (20). A fault stands for a line of source that several paths share: where the path's default cases have no
such line, as without probabilities or counts, the sibling paths of the same kernel are run as `verify` does. Others'
tolerances judge the outputs of the default cases, each only the outputs that its test judges; where the virtual GPU
stops a fault in the act, there are no outputs and they judge nothing.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any

import torch
from fault_catalogue import CATALOGUE
from faults import Fault, FaultyDevice, ptx_fault
from moe_numerics.reference import grouped_nvfp4
from moe_numerics.reference.formats import FORMATS, unpack_e2m1
from moe_numerics.reference.scale_layout import unswizzle

from moe_numerics.campaign import campaign_cases
from moe_numerics.cases import Case
from moe_numerics.devices import DeviceError, KernelFault, open_device
from moe_numerics.operations import Nvfp4Copies
from moe_numerics.paths import Path, all_paths, find_path
from moe_numerics.running import compare_outputs, expected_outputs
from moe_numerics.tolerances import PEERS, subject_of, tolerances_for

DEVICE = "virtual:sm_90a"
DEFAULT_CASES, THOROUGH_CASES = 3, 20
SIBLINGS = 16
"""Of the paths that share source with the fault's, how many are run."""
PEER_NAMES = tuple(dict.fromkeys(tolerance.peer for tolerance in PEERS))
"""Peers in the order of the report."""

Outputs = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Judged:
    """What is compared of one output under the tolerances of others, in float64.

    format: where it is not that of the path: the bfloat16 result of a path that goes on to NVFP4.
    """

    output: str
    expected: torch.Tensor
    got: torch.Tensor
    scales: torch.Tensor | None = None
    format: str = ""


def _views(path: Path, case: Case, expected: Outputs, got: Outputs) -> Iterator[Judged]:
    """Every output as tests of others compare it: values that codes stand for, decoded scales, floats; owned ones."""
    experts = path.experts(case)
    for spec in path.outputs_of(case):
        owned = spec.owned(experts)
        wanted, found = expected[spec.name], got[spec.name]
        owned = owned.view(-1, *[1] * (wanted.dim() - 1)) if owned.dim() == 1 and wanted.dim() > 1 else owned
        kind = spec.name.partition("_")[0]
        if spec.format in ("bfloat16", "float32"):
            kind = "values" if kind == "out" else kind
            mask = owned.expand_as(wanted)
            yield Judged(kind, wanted.double()[mask], found.double()[mask], format="bf16" * (spec.name == "out"))
            continue
        if kind == "scales":
            form = FORMATS[spec.format]
            mask = owned.expand_as(wanted)
            yield Judged(kind, form.decode(wanted, torch.float64)[mask], form.decode(found, torch.float64)[mask])
            continue
        yield from _codes(path, case, spec.name, expected, got, owned)


def _codes(path: Path, case: Case, name: str, expected: Outputs, got: Outputs, owned: torch.Tensor) -> Iterator[Judged]:
    which = name.partition("_")[2]
    spec = path.output(name)
    packed = spec.format == "E2M1x2"
    element = FORMATS["E2M1" if packed else spec.format]
    scale_format = FORMATS[path.output(f"scales_{which}").format]
    sides = []
    for outputs in (expected, got):
        codes = unpack_e2m1(outputs[name]) if packed else outputs[name]
        scales = _spread(path, case, which, outputs, codes.shape)
        amax = _amax(path, case, which, outputs, codes.shape) if packed else 1.0
        scale = scale_format.decode(scales, torch.float64) * amax
        sides.append((element.decode(codes, torch.float64), scale))
    mask = (owned.repeat_interleave(2, dim=-1) if packed and owned.shape[-1] > 1 else owned).expand_as(sides[0][0])
    (codes_x, scale_x), (codes_y, scale_y) = sides
    yield Judged("codes", codes_x[mask], codes_y[mask])
    yield Judged("values", (codes_x * scale_x)[mask], (codes_y * scale_y)[mask], scale_x.expand_as(codes_x)[mask])


def _spread(path: Path, case: Case, which: str, outputs: Outputs, shape: torch.Size) -> torch.Tensor:
    """The scale code of each code."""
    scales = outputs[f"scales_{which}"]
    spec = path.output(f"scales_{which}")
    nvfp4 = spec.format == "E4M3"
    block = 16 if nvfp4 else 32
    experts = path.experts(case)
    if scales.dim() == 1:
        lines = shape[0] if which == "rowwise" or nvfp4 else shape[1]
        blocks = shape[1] // block if which == "rowwise" or nvfp4 else experts.colwise_rows(block)
        scales = unswizzle(scales, lines, blocks)
        if which == "colwise" and not nvfp4:
            scales = scales.t()
    if which == "rowwise" or nvfp4:
        return scales.repeat_interleave(block, dim=1)
    return experts.from_blocks(scales.repeat_interleave(block, dim=0), block)


def _amax(path: Path, case: Case, which: str, outputs: Outputs, shape: torch.Size) -> torch.Tensor:
    """The factor between a block's scale and its values."""
    operation = path.operation
    recipe = operation.recipe if isinstance(operation, Nvfp4Copies) else grouped_nvfp4.Recipe()
    amax = outputs[f"amax_{which}"].double() / (6 * recipe.scale_max)
    return amax.reshape(-1, 1) if amax.numel() == shape[0] and recipe.row_scaled else amax.reshape(1, 1)


def peers_that_find(path: Path, case: Case, expected: Outputs, got: Outputs) -> dict[str, bool]:
    """For each project whose tests judge an output of the path, whether a tolerance of theirs is exceeded."""
    found: dict[str, bool] = {}
    for judged in _views(path, case, expected, got):
        subject = subject_of(path, judged.output)
        for tolerance in tolerances_for(replace(subject, format=judged.format or subject.format)):
            exceeded = not tolerance.passes(judged.expected, judged.got, judged.scales)
            found[tolerance.peer] = found.get(tolerance.peer, False) or exceeded
    return found


@dataclass
class Run:
    """What running a fault gave so far."""

    found: bool = False
    by: str = ""
    peers: dict[str, bool] | None = None


def run_fault(fault: Fault, path: Path, cases: int, run: Run, judge_peers: bool, first: int = 0) -> int:
    """Run a fault on cases of a path until one finds it, or, for peers, on all of them. Gives how many lines match."""
    contract = path.contract("suite")
    device = FaultyDevice(open_device(DEVICE, fault.schedule), fault)
    with ptx_fault(fault) as places, device.activate():
        for number, case in enumerate(campaign_cases(path, "suite", cases, 0)):
            if number < first:
                continue
            try:
                got = device.run(path, case, contract).outputs
            except KernelFault as stopped:
                run.found, run.by = True, run.by or f"stopped in the act: {str(stopped)[:80]}"
                break
            except (DeviceError, ValueError, RuntimeError) as error:
                raise RuntimeError(f"{fault.id} could not run on {path.id}: {error}") from error
            expected = expected_outputs(path, case, contract)
            findings = compare_outputs(path, case, expected, got, filled=True)
            wrong = [finding for finding in findings if not finding.passed]
            if wrong and not run.found:
                run.found, run.by = True, f"case {number + 1}, {', '.join(finding.output for finding in wrong)}"
            if judge_peers:
                judged = peers_that_find(path, case, expected, got)
                earlier = run.peers or {}
                run.peers = {
                    name: judged.get(name, False) or earlier.get(name, False) for name in {**judged, **earlier}
                }
            elif run.found:
                break
    return sum(places) if fault.pattern else 1


def siblings(fault: Fault) -> list[Path]:
    """Paths that the same kernel source serves: other activations in the same direction and format, or other copies."""
    if fault.kind in ("operation", "input"):
        return []
    operation, _, rest = fault.path.partition(".")
    nvfp4 = "nvfp4" in fault.path
    similar = [
        path
        for path in all_paths()
        if path.id != fault.path
        and (("nvfp4" in path.id) if nvfp4 else operation != "quantize" and path.id.partition(".")[2] == rest)
    ]
    # The copies of one tensor first, as they are quick to run.
    return sorted(similar, key=lambda path: not path.id.startswith(f"{operation}."))[:SIBLINGS]


def measure(fault: Fault) -> dict[str, Any]:
    """One entry of the report."""
    started = time.monotonic()
    path = find_path(fault.path)
    default = Run()
    matched = run_fault(fault, path, DEFAULT_CASES, default, judge_peers=True)
    same_path = default.found
    for other in siblings(fault) if not default.found else []:
        matched += run_fault(fault, other, DEFAULT_CASES, default, judge_peers=False)
        if default.found:
            default.by += f" of {other.id}"
            break
    thorough = Run(default.found)
    if not thorough.found:
        matched += run_fault(fault, path, THOROUGH_CASES, thorough, judge_peers=False, first=DEFAULT_CASES)
    if not matched:
        raise RuntimeError(f"{fault.id}: no line matches {fault.pattern!r}")
    if fault.equivalent and thorough.found:
        raise RuntimeError(f"{fault.id} was found by {thorough.by}: it is not equivalent")
    return {
        "id": fault.id,
        "kind": fault.kind,
        "path": fault.path,
        "seen_in": fault.seen_in,
        "found_default": default.found,
        "found_default_same_path": same_path,
        "found_thorough": thorough.found,
        "found_by": default.by or thorough.by,
        "equivalent": bool(fault.equivalent),
        "peers": {name: (default.peers or {})[name] for name in PEER_NAMES if name in (default.peers or {})},
        "seconds": round(time.monotonic() - started, 1),
    }


def summary(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Found shares: of the suite, and of each peer among the faults whose outputs its tests judge.

    Faults that are proved equivalent are counted apart.
    """
    equivalent = [entry for entry in entries if entry["equivalent"]]
    entries = [entry for entry in entries if not entry["equivalent"]]
    peers = {}
    for name in PEER_NAMES:
        judged = [entry for entry in entries if name in entry["peers"]]
        peers[name] = {"judged": len(judged), "found": sum(entry["peers"][name] for entry in judged)}
    return {
        "faults": len(entries),
        "equivalent": len(equivalent),
        "found_default": sum(entry["found_default"] for entry in entries),
        "found_default_same_path": sum(entry["found_default_same_path"] for entry in entries),
        "found_thorough": sum(entry["found_thorough"] for entry in entries),
        "peers": peers,
    }


def page(data: Mapping[str, Any]) -> str:
    """The report as a Markdown page."""
    total = data["summary"]
    count = total["faults"]
    lines = [
        "# Detection power",
        "",
        "Numerics faults planted one at a time in the fused kernels, and who finds them: the default campaign (3",
        "cases of a path, and of paths that share its source), a thorough run (that, and 20 cases of the path where it",
        "finds nothing), and the tolerances",
        "that tests of other projects document, on the same outputs: those of the right kernel in the place of the",
        "reference, and the faulty one's. `-`: the project's tests judge no output of that path, or the virtual GPU",
        "stopped the kernel before there was one.",
        "",
        "`python property_tests/detection.py` makes this page and `reports/detection.json`.",
        "",
        "| | judged | found | share |",
        "| --- | ---: | ---: | ---: |",
        f"| moe-numerics, default, the fault's path alone | {count} | {total['found_default_same_path']} "
        f"| {total['found_default_same_path'] / count:.1%} |",
        f"| moe-numerics, default | {count} | {total['found_default']} | {total['found_default'] / count:.1%} |",
        f"| moe-numerics, thorough | {count} | {total['found_thorough']} | {total['found_thorough'] / count:.1%} |",
    ]
    for name, each in total["peers"].items():
        share = f"{each['found'] / each['judged']:.1%}" if each["judged"] else "-"
        lines.append(f"| {name} | {each['judged']} | {each['found']} | {share} |")
    lines += ["", f"| fault | path | default | thorough | {' | '.join(PEER_NAMES)} |"]
    lines.append("| --- | --- |" + " :---: |" * (2 + len(PEER_NAMES)))
    for entry in data["faults"]:
        suite = [_mark(entry["found_default"]), _mark(entry["found_thorough"])]
        cells = ["equivalent"] * 2 if entry["equivalent"] else suite
        cells += [_mark(entry["peers"][name]) if name in entry["peers"] else "-" for name in PEER_NAMES]
        lines.append(f"| {entry['id']} | {entry['path']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _mark(found: bool) -> str:
    return "yes" if found else "no"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="shell pattern on ids of faults")
    parser.add_argument("--out", type=FilePath, default=FilePath("reports/detection.json"))
    parser.add_argument("--page", type=FilePath, default=FilePath("docs/detection.md"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    entries = []
    for fault in CATALOGUE:
        if not fnmatch.fnmatchcase(fault.id, arguments.only):
            continue
        entries.append(measure(fault))
        print(json.dumps(entries[-1]), flush=True)
    data = {"schema": 1, "device": DEVICE, "summary": summary(entries), "faults": entries}
    for file, text in ((arguments.out, json.dumps(data, indent=1) + "\n"), (arguments.page, page(data))):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


if __name__ == "__main__":
    main()
