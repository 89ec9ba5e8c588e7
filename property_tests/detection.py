"""Measures how many planted faults the campaign finds, and how many the tolerances of other projects' tests find.

    python property_tests/detection.py [--only PATTERN] [--out reports/detection.json] [--page docs/detection.md]

Each fault of the catalogue runs in the default campaign's cases (3 of its path, seed 0), and in a thorough run of its
own (20 cases, seed 1), both until something finds it. A fault stands for a line of source that several paths share:
where the path's cases have no such line, as without probabilities or counts, the sibling paths of the same kernel are
run as `verify` does. Mutants that `ptx_mutants` makes by rule belong to one compiled module, and run on as many cases
that share its compilation. Others' tolerances judge the outputs of the default cases, each only the outputs that its
test judges; where the virtual GPU stops a fault in the act, there are no outputs and they judge nothing.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any

import torch
from fault_catalogue import CATALOGUE
from faults import Fault, FaultyDevice, ptx_fault
from moe_numerics.reference import grouped_nvfp4
from moe_numerics.reference.formats import FORMATS, unpack_e2m1
from moe_numerics.reference.scale_layout import unswizzle
from mutant_proofs import proof_of
from ptx_mutants import MUTATED_PATHS, Mutant, cases_of, mutants

from moe_numerics.campaign import campaign_cases
from moe_numerics.cases import Case
from moe_numerics.devices import DeviceError, KernelFault, VirtualDevice, open_device
from moe_numerics.operations import Nvfp4Copies
from moe_numerics.paths import Path, all_paths, find_path
from moe_numerics.report.atomic import write_files
from moe_numerics.running import compare_outputs, expected_outputs
from moe_numerics.step_operations import TrainingStep
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
        if isinstance(path.operation, TrainingStep):
            # Tests of others judge what a step gives, not the operands of its products.
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


def _cases(fault: Fault, path: Path, cases: int, seed: int) -> Iterable[Case]:
    return cases_of(path.id, cases, seed) if isinstance(fault, Mutant) else campaign_cases(path, "suite", cases, seed)


def run_fault(fault: Fault, path: Path, cases: int, seed: int, run: Run, judge_peers: bool = False) -> int:
    """Run a fault on cases of a path until one finds it, or, for peers, on all of them. Gives how many lines match."""
    contract = path.contract("suite")
    opened = open_device(DEVICE, fault.schedule)
    if isinstance(opened, VirtualDevice):
        # The others judge the outputs of a kernel that stores where it must not.
        opened.stops_outside = False
    device = FaultyDevice(opened, fault)
    with ptx_fault(fault) as places, device.activate():
        for number, case in enumerate(_cases(fault, path, cases, seed), 1):
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
                run.found, run.by = True, f"case {number}, {', '.join(finding.output for finding in wrong)}"
            if judge_peers:
                judged = peers_that_find(path, case, expected, got)
                earlier = run.peers or {}
                run.peers = {
                    name: judged.get(name, False) or earlier.get(name, False) for name in {**judged, **earlier}
                }
            elif run.found:
                break
    return sum(places) if fault.edits else 1


def siblings(fault: Fault) -> list[Path]:
    """Paths that the same kernel source serves: other activations in the same direction and format, or other copies."""
    if fault.kind in ("operation", "input", "mutant") or fault.path.startswith("grouped_"):
        return []
    operation, _, rest = fault.path.partition(".")
    nvfp4 = "nvfp4" in fault.path
    similar = [
        path
        for path in all_paths()
        if path.id != fault.path
        and not path.id.startswith("grouped_")
        and (("nvfp4" in path.id) if nvfp4 else operation != "quantize" and path.id.partition(".")[2] == rest)
    ]
    # The copies of one tensor first, as they are quick to run.
    return sorted(similar, key=lambda path: not path.id.startswith(f"{operation}."))[:SIBLINGS]


def _search(fault: Fault, cases: int, seed: int, judge_peers: bool) -> tuple[Run, bool, int]:
    """(what running it on its path and then on siblings gave, whether its own path found it, lines that match)."""
    path, run = find_path(fault.path), Run()
    matched = run_fault(fault, path, cases, seed, run, judge_peers)
    same_path = run.found
    for other in siblings(fault) if not run.found else []:
        matched += run_fault(fault, other, cases, seed, run)
        if run.found:
            run.by += f" of {other.id}"
            break
    return run, same_path, matched


def measure(fault: Fault) -> dict[str, Any]:
    """One entry of the report."""
    started = time.monotonic()
    default, same_path, matched = _search(fault, DEFAULT_CASES, 0, judge_peers=True)
    thorough, thorough_same_path, more = _search(fault, THOROUGH_CASES, 1, judge_peers=False)
    if not matched + more:
        raise RuntimeError(f"{fault.id}: no line matches {fault.pattern!r}")
    found = default.found or thorough.found
    proof = fault.equivalent or (proof_of(fault) if isinstance(fault, Mutant) and not found else "")
    if proof and found:
        raise RuntimeError(f"{fault.id} was found by {default.by or thorough.by}: it is not equivalent")
    entry = {
        "id": fault.id,
        "kind": fault.kind,
        "path": fault.path,
        "seen_in": fault.seen_in,
        "found_default": default.found,
        "found_default_same_path": same_path,
        "found_thorough": thorough.found,
        "found_thorough_same_path": thorough_same_path,
        "found_by": default.by or thorough.by,
        "equivalent": bool(proof),
        "proof": proof,
        "peers": {name: (default.peers or {})[name] for name in PEER_NAMES if name in (default.peers or {})},
        "seconds": round(time.monotonic() - started, 1),
    }
    if isinstance(fault, Mutant):
        entry |= {"rule": fault.rule, "before": fault.before, "after": fault.after, "places": len(fault.changed)}
    return entry


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
        "found_thorough_same_path": sum(entry["found_thorough_same_path"] for entry in entries),
        "peers": peers,
    }


def _table(total: Mapping[str, Any], lines: Iterable[tuple[str, str]]) -> list[str]:
    """Rows of found shares: the given ones of the suite, then each peer's."""
    count = total["faults"]
    rows = ["| | judged | found | share |", "| --- | ---: | ---: | ---: |"]
    for words, key in lines:
        rows.append(f"| moe-numerics, {words} | {count} | {total[key]} | {total[key] / max(count, 1):.1%} |")
    for name, each in total["peers"].items():
        share = f"{each['found'] / each['judged']:.1%}" if each["judged"] else "-"
        rows.append(f"| {name} | {each['judged']} | {each['found']} | {share} |")
    return rows


def _by_rule(entries: list[dict[str, Any]]) -> list[str]:
    rows = ["| rule | mutants | proved equivalent | found, default | found, thorough |"]
    rows.append("| --- | ---: | ---: | ---: | ---: |")
    for rule in dict.fromkeys(entry["rule"] for entry in entries):
        total = summary([entry for entry in entries if entry["rule"] == rule])
        counts = (total["faults"] + total["equivalent"], total["equivalent"], total["found_default"])
        rows.append(f"| {rule} | {' | '.join(map(str, counts))} | {total['found_thorough']} |")
    return rows


def page(data: Mapping[str, Any]) -> str:
    """The report as a Markdown page."""
    lines = [
        "# Detection power",
        "",
        "Numerics faults planted one at a time in the fused kernels, and who finds them: the default campaign (3",
        "cases of a path, and of paths that share its source where those find nothing), a thorough run (20 cases,",
        "drawn from another seed, likewise), and the tolerances that tests of other projects document, on the same",
        "outputs: those of the right kernel in the place of the reference, and the faulty one's. `-`: the project's",
        "tests judge no output of that path, or the virtual GPU stopped the kernel before there was one.",
        "",
        "`python property_tests/detection.py` makes this page and `reports/detection.json`.",
        "",
        "## The written catalogue",
        "",
        *_table(
            data["summary"],
            (
                ("default, the fault's path alone", "found_default_same_path"),
                ("default", "found_default"),
                ("thorough, the fault's path alone", "found_thorough_same_path"),
                ("thorough", "found_thorough"),
            ),
        ),
        "",
        "## Mutants of PTX",
        "",
        "One line of source of one compiled kernel, all the places to which the compiler unrolled it, changed by rule;",
        f"drawn from all that the rules reach in the kernels of {len({entry['path'] for entry in data['mutants']})} "
        "paths. They run on cases of that",
        "compilation. A mutant that nothing finds is called equivalent only with a proof, below.",
        "",
        *_table(data["mutant_summary"], (("default", "found_default"), ("thorough", "found_thorough"))),
        "",
        *_by_rule(data["mutants"]),
    ]
    unfound = [entry for entry in data["mutants"] if not (entry["found_default"] or entry["found_thorough"])]
    if unfound:
        lines += ["", "| mutant that nothing finds | instruction | becomes | proof of equivalence |"]
        lines.append("| --- | --- | --- | --- |")
        for entry in unfound:
            texts = (entry["before"], entry["after"])
            before, after = (f"`{' '.join(text.split())}`" if text else "nothing" for text in texts)
            lines.append(f"| {entry['id']} | {before} | {after} | {entry['proof'] or 'none: counted as missed'} |")
    lines += ["", "## Every written fault", ""]
    lines.append(f"| fault | path | default | thorough | {' | '.join(PEER_NAMES)} |")
    lines.append("| --- | --- |" + " :---: |" * (2 + len(PEER_NAMES)))
    for entry in data["faults"]:
        suite = [_mark(entry["found_default"]), _mark(entry["found_thorough"])]
        cells = ["equivalent"] * 2 if entry["equivalent"] else suite
        cells += [_mark(entry["peers"][name]) if name in entry["peers"] else "-" for name in PEER_NAMES]
        lines.append(f"| {entry['id']} | {entry['path']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _mark(found: bool) -> str:
    return "yes" if found else "no"


def _measured(task: tuple[str, int]) -> dict[str, Any]:
    """The entry of a fault of the catalogue (task: "", its place), or of a mutant (task: its path, its place)."""
    path, place = task
    return measure(mutants(path)[place] if path else CATALOGUE[place])


def _tasks(pattern: str) -> list[tuple[str, int]]:
    written = [("", place) for place, fault in enumerate(CATALOGUE) if fnmatch.fnmatchcase(fault.id, pattern)]
    made = [
        (path, place)
        for path in MUTATED_PATHS
        for place, mutant in enumerate(mutants(path))
        if fnmatch.fnmatchcase(mutant.id, pattern)
    ]
    return written + made


def _one_thread() -> None:
    torch.set_num_threads(1)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="shell pattern on ids of faults and mutants")
    parser.add_argument("--out", type=FilePath, default=FilePath("reports/detection.json"))
    parser.add_argument("--page", type=FilePath, default=FilePath("docs/detection.md"))
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    tasks = _tasks(arguments.only)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.workers, mp_context=context, initializer=_one_thread) as pool:
        futures = {pool.submit(_measured, task): place for place, task in enumerate(tasks)}
        found = {}
        for future in as_completed(futures):
            found[futures[future]] = future.result()
            print(json.dumps(future.result()), flush=True)
    entries = [found[place] for place in range(len(tasks))]
    written = [entry for entry in entries if entry["kind"] != "mutant"]
    made = [entry for entry in entries if entry["kind"] == "mutant"]
    data = {
        "schema": 1,
        "device": DEVICE,
        "summary": summary(written),
        "faults": written,
        "mutant_summary": summary(made),
        "mutants": made,
    }
    for file, text in ((arguments.out, json.dumps(data, indent=1) + "\n"), (arguments.page, page(data))):
        write_files(file.parent, {file.name: text})


if __name__ == "__main__":
    main()
