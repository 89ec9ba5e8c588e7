"""The command `moe-numerics`.

Exit codes: 0 nothing unexplained; 1 unexplained bits; 2 bad usage or input, nothing written; 3 a path could not run;
4 a CUDA device was lost.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from moe_numerics.bisecting import Stage
    from moe_numerics.findings import Finding
    from moe_numerics.report.model import PathResult, Report

__all__ = ["app", "main"]

EXIT_USAGE = 2
EXIT_LOST = 4

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, rich_markup_mode=None)
# In a log there is no width to keep to: ids of paths must stay whole.
_console = Console(width=None if sys.stdout.isatty() else 160)

DeviceOption = Annotated[
    list[str] | None,
    typer.Option("--device", help="cuda, cuda:N, virtual:sm_90a or virtual:sm_100a; may be given more than once."),
]


def main() -> None:
    """Run the command line; errors of the user's input end with one line and exit code 2."""
    from moe_numerics.bounds import BoundError
    from moe_numerics.cases import CaseError
    from moe_numerics.devices import DeviceError
    from moe_numerics.paths import PathError
    from moe_numerics.report import ReportError

    try:
        app()
    except (BoundError, CaseError, DeviceError, PathError, ReportError) as error:
        _refuse(str(error))
    except OSError as error:
        _refuse(f"{error.filename}: {error.strerror}" if error.filename else str(error))


def _refuse(message: str) -> NoReturn:
    print(f"moe-numerics: {message}", file=sys.stderr)
    raise SystemExit(EXIT_USAGE)


@app.command()
def verify(
    device: DeviceOption = None,
    paths: Annotated[
        str | None,
        typer.Option(help="Shell pattern on path ids; default all, on virtual GPUs but the extended ones."),
    ] = None,
    profile: Annotated[str, typer.Option(help="Contract to verify against.")] = "suite",
    examples: Annotated[
        int | None,
        typer.Option(min=1, help="Cases of each path and device; default 3 to 20, by their number."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the drawn cases.")] = 0,
    out: Annotated[FilePath, typer.Option(help="Folder for the reports.")] = FilePath("moe-numerics-report"),
) -> None:
    """Compare every fused kernel with its reference, bit by bit, and write the reports."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from moe_numerics.campaign import Plan, default_examples, verify
    from moe_numerics.contract import profile as find_profile
    from moe_numerics.devices import default_devices, open_device
    from moe_numerics.paths import PathError, match_paths

    devices = tuple(dict.fromkeys(device or default_devices()))
    for name in devices:
        open_device(name)
    try:
        find_profile(profile)
    except ValueError as error:
        _refuse(str(error))
    matching = match_paths(paths or "*")
    for path in matching:
        if paths in (None, "*") and profile != "suite":
            continue
        path.contract(profile)
    brief = paths is None and all(name.startswith("virtual:") for name in devices)
    offering = [path for path in matching if _offers(path, profile)]
    chosen = [path for path in offering if not (brief and path.extended)]
    if not chosen:
        raise PathError(f"profile {profile!r} is offered by no path that matches {paths or '*'!r}")
    if out.exists() and not out.is_dir():
        _refuse(f"--out {out} is a file: expected a folder")
    tasks = len(chosen) * len(devices)
    plan = Plan(
        tuple(path.id for path in chosen),
        devices,
        profile,
        examples or default_examples(tasks),
        seed,
        out,
        shlex.join(["moe-numerics", *sys.argv[1:]]),
    )
    _console.print(
        f"{len(chosen)} paths on {', '.join(devices)}, {plan.examples} cases each, seed {seed}, "
        f"{plan.workers} processes"
    )
    if len(offering) > len(chosen):
        _console.print(f"{len(offering) - len(chosen)} extended paths are left out: --paths '*' has them")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_console, transient=True) as bar:
        running = bar.add_task("verifying", total=tasks)

        def advance(result: PathResult) -> None:
            bar.advance(running)
            if result.status != "pass":
                bar.console.print(f"{result.status}: {result.id} on {result.device}: {result.reason}", markup=False)

        report, lost = verify(plan, advance)
    _print_report(report)
    _console.print(f"report: {out / 'index.html'}", markup=False)
    raise SystemExit(EXIT_LOST if lost else report.exit_code)


def _offers(path: object, profile: str) -> bool:
    from moe_numerics.contract import ALIASES
    from moe_numerics.paths import Path

    assert isinstance(path, Path)
    return ALIASES.get(profile, profile) in path.profiles


def _print_report(report: Report) -> None:
    from moe_numerics.report.wording import headline

    table = Table(box=None, header_style="bold")
    for name in ("path", "device", "cases", "elements", "bit-equal", "unexplained", "status"):
        table.add_column(name, justify="left" if name in ("path", "device", "status") else "right")
    for path in report.paths:
        share = path.bit_equal_share
        table.add_row(
            path.id,
            path.device,
            str(path.cases),
            f"{path.elements:,}",
            "-" if share is None else f"{share:.4%}".replace("100.0000%", "100%"),
            f"{path.unexplained:,}",
            path.status,
            style=None if path.status == "pass" else "red",
        )
    _console.print(table)
    _console.print(headline(report), style="bold", markup=False)


@app.command("list")
def list_paths(
    as_json: Annotated[bool, typer.Option("--json", help="Print an array with everything known of each path.")] = False,
) -> None:
    """List every path, its profiles and devices."""
    from moe_numerics.contract import PROFILES
    from moe_numerics.paths import DEVICES, all_paths

    if as_json:
        entries = [
            {
                "id": path.id,
                "summary": path.summary,
                "inputs": [{"name": i.name, "dtype": i.dtype, "shape": i.shape, "kind": i.kind} for i in path.inputs],
                "outputs": [
                    {"name": o.name, "dtype": o.dtype, "format": o.format, "shape": o.shape} for o in path.outputs
                ],
                "layouts": list(path.layouts),
                "profiles": dict(path.profiles),
                "devices": list(path.devices),
                "extended": path.extended,
            }
            for path in all_paths()
        ]
        print(json.dumps(entries, indent=1))
        return
    table = Table(box=None, header_style="bold")
    for name in ("path", "what it is", "profiles", "devices"):
        table.add_column(name)
    for path in all_paths():
        profiles = ", ".join(f"{name} ({grade})" for name, grade in path.profiles.items())
        devices = "all" if path.devices == DEVICES else ", ".join(path.devices)
        table.add_row(path.id, path.summary, profiles, devices + ", extended" * path.extended)
    _console.print(table)
    _console.print(f"{len(all_paths())} paths. Devices: {', '.join(DEVICES)}.\n\nProfiles:")
    for known in PROFILES.values():
        _console.print(f"  {known.name}: {known.summary}", markup=False)


@app.command()
def run(
    case_file: Annotated[FilePath, typer.Argument(metavar="CASE.json", help="A case that verify wrote.")],
    device: Annotated[str | None, typer.Option("--device", help="Device to run it on.")] = None,
    by_stage: Annotated[
        bool,
        typer.Option("--bisect", help="Judge each stage on what the kernel gave it, and name the first wrong one."),
    ] = False,
) -> None:
    """Reproduce one case and print every output's finding."""
    from moe_numerics.bisecting import bisect
    from moe_numerics.cases import Case
    from moe_numerics.devices import DeviceError, DeviceLost, KernelFault, default_devices, open_device
    from moe_numerics.paths import find_path
    from moe_numerics.running import run_case

    case = Case.load(case_file)
    path = find_path(case.path)
    path.contract(case.profile)
    path.check(case)
    opened = open_device(device or default_devices()[0])
    contract = path.contract(case.profile, opened.target)
    lacking = path.lacking(opened.target)
    if lacking:
        print(f"moe-numerics: could not run: {path.id} has {lacking}", file=sys.stderr)
        raise SystemExit(3)
    _console.print(f"{path.id} on {opened.name}, profile {case.profile}\n{case.describe()}", markup=False)
    try:
        with opened.activate():
            if by_stage:
                stages = bisect(path, case, contract, opened.run(path, case, contract).outputs)
                raise SystemExit(_print_stages(stages))
            result = run_case(path, case, contract, opened)
    except KernelFault as fault:
        _console.print(f"fault: {fault}", markup=False)
        raise SystemExit(1) from None
    except DeviceError as error:
        print(f"moe-numerics: could not run: {error}", file=sys.stderr)
        raise SystemExit(EXIT_LOST if isinstance(error, DeviceLost) else 3) from None
    if result.fault:
        _console.print(f"fault: {result.fault}", markup=False)
    for finding in result.findings:
        _console.print(_finding_line(finding), markup=False)
    raise SystemExit(0 if result.passed else 1)


def _print_stages(stages: tuple[Stage, ...]) -> int:
    from moe_numerics.bisecting import first_wrong

    wrong = first_wrong(stages)
    for stage in stages:
        _console.print(f"{stage.name}: {'right' if stage.passed else 'wrong'} for what it was given", markup=False)
        for finding in stage.findings if stage is wrong else ():
            _console.print(f"  {_finding_line(finding)}", markup=False)
    verdict = "nothing unexplained" if wrong is None else f"first wrong stage: {wrong.name}"
    _console.print(verdict, style="bold", markup=False)
    return 0 if wrong is None else 1


def _finding_line(finding: Finding) -> str:
    line = f"{finding.output}: {finding.bit_equal:,} of {finding.elements:,} bit-equal"
    if finding.explained:
        line += f", {finding.explained:,} explained"
    if finding.unexplained:
        line += f", {finding.unexplained:,} unexplained"
    first = finding.first_mismatch
    if first is not None:
        where = ", ".join(f"{name} {value}" for name, value in first["coordinates"].items())
        line += (
            f"; first at {where}: expected {first['expected']} ({first['expected_bits']}), "
            f"got {first['got']} ({first['got_bits']})"
        )
    return line


@app.command()
def diff(
    old: Annotated[FilePath, typer.Argument(metavar="OLD.json")],
    new: Annotated[FilePath, typer.Argument(metavar="NEW.json")],
) -> None:
    """Say what changed between two reports."""
    from moe_numerics.report.diff import diff_reports, render
    from moe_numerics.report.json_report import load

    print(render(diff_reports(load(old), load(new))))


@app.command()
def tolerance(
    path: Annotated[str, typer.Argument(help="Id of a path.")],
    k: Annotated[int, typer.Option("--k", min=1, help="Length of the sums: K of a GEMM, columns of dprob.")] = 8192,
    form: Annotated[str, typer.Option("--format", help="json or pytest.")] = "json",
    functions: Annotated[str, typer.Option(help="How activations are computed: exact, library or fast.")] = "library",
    intermediate: Annotated[str, typer.Option(help="Type of intermediate values: float32 or bfloat16.")] = "float32",
) -> None:
    """Print the bounds derived for a path, beside what tests of other projects allow."""
    from moe_numerics.bounds import Arithmetic
    from moe_numerics.paths import find_path
    from moe_numerics.tolerances import as_json, as_pytest

    writers = {"json": as_json, "pytest": as_pytest}
    if form not in writers:
        _refuse(f"--format {form} is unknown: expected {' or '.join(writers)}")
    print(writers[form](find_path(path), k, Arithmetic(functions, intermediate)))


@app.command()
def bench(
    device: Annotated[str | None, typer.Option("--device", help="Device to measure on.")] = None,
    out: Annotated[FilePath | None, typer.Option(help="File for the figures as JSON.")] = None,
) -> None:
    """Measure speeds, each as a ratio or beside what it is to be compared with, in one run."""
    import dataclasses

    from moe_numerics.bench import measure
    from moe_numerics.bench_gemm import BenchError
    from moe_numerics.devices import default_devices
    from moe_numerics.report.atomic import write_files

    name = device or default_devices()[0]
    figures = []
    try:
        for figure in measure(name):
            figures.append(figure)
            _console.print(f"{figure.value:12,.3f} {figure.unit}  {figure.what}", markup=False, soft_wrap=True)
    except BenchError as error:
        print(f"moe-numerics: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    if out is not None:
        data = {"device": name, "figures": [dataclasses.asdict(figure) for figure in figures]}
        write_files(out.parent, {out.name: json.dumps(data, indent=1) + "\n"})


@app.command()
def architectures(
    paths: Annotated[str, typer.Option(help="Shell pattern on path ids.")] = "grouped_*",
    examples: Annotated[int, typer.Option(min=1, help="Cases of each path.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the drawn cases.")] = 0,
    kernels: Annotated[bool, typer.Option("--kernels", help="Run kernels on virtual GPUs, not references.")] = False,
    out: Annotated[FilePath | None, typer.Option(help="File for the result: Markdown if it ends so, or JSON.")] = None,
) -> None:
    """Compare the same cases on Hopper and Blackwell: which outputs differ by accumulator, and how far."""
    from moe_numerics.architectures import as_json, as_markdown, compare_paths
    from moe_numerics.paths import match_paths
    from moe_numerics.report.atomic import write_files

    found = []
    for each in compare_paths(match_paths(paths), examples, seed, kernels=kernels):
        found.append(each)
        equal, elements = (sum(getattr(f, name) for f in each.findings) for name in ("bit_equal", "elements"))
        said = "the same" if each.same else f"{equal:,} of {elements:,} the same, by {' / '.join(each.accumulators)}"
        _console.print(f"{each.path}: {said}", markup=False, soft_wrap=True)
    if out is not None:
        text = as_markdown(found, kernels) if out.suffix == ".md" else json.dumps(as_json(found, kernels), indent=1)
        write_files(out.parent, {out.name: text.rstrip("\n") + "\n"})


@app.command()
def exhaustive(
    device: Annotated[str | None, typer.Option("--device", help="Device to run on.")] = None,
    out: Annotated[FilePath | None, typer.Option(help="File for the figures as JSON.")] = None,
) -> None:
    """Compare activations on every bfloat16 input; on a GPU also SwiGLU and GeGLU on all 2^32 pairs."""
    import dataclasses

    from moe_numerics.devices import default_devices, open_device
    from moe_numerics.exhaustive import sweeps
    from moe_numerics.report.atomic import write_files

    opened = open_device(device or default_devices()[0])
    found = []
    with opened.activate():
        for sweep in sweeps(opened):
            found.append(sweep)
            _console.print(
                f"{sweep.activation} {sweep.direction}: {sweep.bit_equal:,} of {sweep.inputs:,} bit-equal, "
                f"{sweep.correctly_rounded:,} correctly rounded",
                markup=False,
                soft_wrap=True,
            )
    if out is not None:
        data = {"device": opened.name, "sweeps": [dataclasses.asdict(sweep) for sweep in found]}
        write_files(out.parent, {out.name: json.dumps(data, indent=1) + "\n"})
    raise SystemExit(0 if all(sweep.bit_equal == sweep.inputs for sweep in found) else 1)


@app.command()
def audit(
    target: Annotated[str, typer.Argument(help="A path id, MODULE:FUNCTION that gives compiled PTX, or a PTX file.")],
    device: Annotated[str, typer.Option("--device", help="Virtual GPU to compile for.")] = "virtual:sm_90a",
    profile: Annotated[str, typer.Option(help="Contract of a path.")] = "suite",
    as_json: Annotated[bool, typer.Option("--json", help="Print the notes as JSON.")] = False,
) -> None:
    """Say what of a kernel's numerics its PTX approximates, flushes, rounds or leaves open, with line numbers."""
    from moe_numerics.audit import AuditError, audit_target, render
    from moe_numerics.devices import VIRTUAL_TARGETS
    from moe_numerics.virtual_gpu import VirtualGPUError

    kind, _, arch = device.partition(":")
    if kind != "virtual" or arch not in VIRTUAL_TARGETS:
        _refuse(f"--device {device}: expected virtual:sm_90a or virtual:sm_100a, for which PTX is then compiled")
    try:
        audits = audit_target(target, arch, profile)
    except (AuditError, VirtualGPUError) as error:
        _refuse(str(error))
    if as_json:
        print(json.dumps([each.to_json() for each in audits], indent=1))
        return
    for each in audits:
        print(render(each))


@app.command()
def silicon(
    device: Annotated[
        str | None, typer.Option("--device", help="CUDA device; without one, results are replayed.")
    ] = None,
    out: Annotated[
        FilePath | None,
        typer.Option(help="Folder for the report and the evidence; on a GPU also for the results to keep."),
    ] = None,
    vectors: Annotated[FilePath | None, typer.Option(help="Folder of captured results to replay.")] = None,
    elements: Annotated[int, typer.Option(min=128, help="Elements of each instruction, a multiple of 128.")] = 32768,
    sweeps: Annotated[bool, typer.Option(help="Also sweep the approximations over all 2^32 inputs.")] = True,
) -> None:
    """Compare every instruction form of the virtual GPU with a real one; without a GPU, with what one gave before."""
    from moe_numerics.devices import default_devices
    from moe_numerics.silicon_report import capture_all, replay_all, summary

    if elements % 128:
        _refuse(f"--elements {elements} is not a multiple of 128")
    name = device or default_devices()[0]
    if name.startswith("cuda"):
        found = capture_all(
            name, elements, sweeps, out, lambda line: _console.print(line, markup=False, soft_wrap=True)
        )
    else:
        found = replay_all(vectors, out, lambda line: _console.print(line, markup=False, soft_wrap=True))
    _console.print(summary(found), markup=False, soft_wrap=True)
    raise SystemExit(0 if found.equal else 1)
