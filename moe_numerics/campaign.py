"""Paths x cases x devices: what `verify` runs, on all cores, and the report that comes out.

Each path on each device is one task; a path's tasks on virtual devices run one after the other in one process, where
they share the reference's outputs. Its cases are one fixed gauntlet, one of ordinary values and drawn ones, and a few
small fixed ones more for a path that writes NVFP4 (`nvfp4_cases`). They come in groups that share what a kernel is
compiled for (layout, counts, probabilities, type of the offsets), so that a few compilations serve many cases; which
variants a path gets depends on the seed. The first failing case is made smaller.
Virtual devices share a pool of processes, one a core. A CUDA device has processes of its own, so that an illegal access
ends one of them and not the run.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path as FilePath

from moe_numerics import values
from moe_numerics.cases import Case, Values, gauntlet_case
from moe_numerics.devices import Device, DeviceError, DeviceLost, open_device
from moe_numerics.drawing import Space, draw_cases
from moe_numerics.findings import Finding, merge
from moe_numerics.garbage import collect_rarely
from moe_numerics.nvfp4_cases import finite_gauntlet, near_tie_case, whole_tensor_cases
from moe_numerics.operations import ActivationThenNvfp4, Nvfp4Copies
from moe_numerics.paths import Path, find_path
from moe_numerics.reference.contract import Contract
from moe_numerics.report import write_reports
from moe_numerics.report.model import Environment, Kernel, PathResult, Report, Status
from moe_numerics.running import CaseResult, References, run_case
from moe_numerics.shrinking import shrink
from moe_numerics.token_counts import SeededSource, one_of

__all__ = ["Plan", "Task", "campaign_cases", "default_examples", "run_task", "run_tasks", "verify"]

GROUP = 5
"""Cases that share one compilation."""

VARIANTS = 4
"""Compilations of each path, as far as its groups of cases ask for more."""

PRODUCT_EXPERTS = 4
"""Experts of the ordinary case of a path with a matrix product: each costs a whole tile."""

NARROW = 64
"""Hidden size up to which every result of a matrix product is one tile of 128 columns wide, gate and up together."""

CUDA_PROCESSES = 12
"""Processes that share a CUDA device: compiling takes longer than running."""

SHRINK_ATTEMPTS = 60
SHRINK_SECONDS = 20.0
"""What is spent on making the first failing case of a path smaller."""

TASK_TIMEOUT = 600.0
"""Seconds after which a CUDA device is given up."""


@dataclass(frozen=True)
class Task:
    """One path on one device."""

    path: str
    device: str
    profile: str
    examples: int
    seed: int
    schedule: str | int = "fast"


@dataclass(frozen=True)
class TaskResult:
    """The path's result, and the cases that failed."""

    result: PathResult
    failing: tuple[Case, ...] = ()
    lost: bool = False


@dataclass(frozen=True)
class Plan:
    """What `verify` is to run."""

    paths: tuple[str, ...]
    devices: tuple[str, ...]
    profile: str
    examples: int
    seed: int
    out: FilePath
    command: str = "moe-numerics verify"
    workers: int = field(
        default_factory=lambda: (
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        )
    )

    def tasks(self) -> list[Task]:
        """Every path on every device."""
        return [
            Task(path, device, self.profile, self.examples, self.seed) for path in self.paths for device in self.devices
        ]


def default_examples(tasks: int) -> int:
    """Cases of each path and device unless the user says: 20, fewer when there are many paths, 3 at least."""
    return max(3, min(20, 600 // max(tasks, 1)))


def campaign_cases(path: Path, profile: str, examples: int, seed: int) -> Iterator[Case]:
    """The cases of a path, the same on every machine: the gauntlet, an ordinary one, then drawn ones.

    A path that writes NVFP4 has a finite gauntlet, and after the ordinary case the small ones of `nvfp4_cases`, which
    `examples` does not count.
    """
    for group in range(-(-examples // GROUP)):
        source = SeededSource(values.key("variant", path.id, seed, group % VARIANTS))
        space = _variant(path.space(profile), source)
        wanted = min(GROUP, examples - group * GROUP)
        if group == 0:
            wanted -= 2
            nvfp4 = isinstance(path.operation, Nvfp4Copies | ActivationThenNvfp4)
            gauntlet = _gauntlet(path, space, 96 if nvfp4 else 160 if space.layouts == ("halves",) else 128)
            yield finite_gauntlet(gauntlet, path.inputs) if nvfp4 else gauntlet
            if examples > 1:
                yield _ordinary_case(space, seed)
                if nvfp4:
                    narrow = _gauntlet(path, space, 64)
                    yield near_tie_case(narrow, path.inputs)
                    yield from whole_tensor_cases(narrow, path.inputs)
        yield from draw_cases(max(wanted, 0), values.key("group", seed, group), space)


def _gauntlet(path: Path, space: Space, columns: int) -> Case:
    """The gauntlet under the one variant of the space, with so many columns or the next multiple that it takes."""
    return gauntlet_case(
        path.id,
        space.profile,
        inputs=path.inputs,
        hidden=min(space.max_hidden, -(-columns // space.multiple) * space.multiple),
        depth=3 * space.depth_multiple,
        alignment=space.alignments[0],
        padded=space.paddings[0],
        layout=space.layouts[0],
        prob=space.probs[0],
        factors=next(kind for kind in ("products", "spread", "gaussian") if kind in space.factor_kinds),
    ).replace(offsets_dtype=space.offsets_dtypes[0])


def _ordinary_case(space: Space, seed: int) -> Case:
    """Normal values without specials, in many experts of few rows and columns.

    The gauntlet's NaN and Inf reach most sums and maxima; here every float32 output has a number in it, and a fault in
    the last place shows: each expert's amax is one value that nothing rounded.
    """
    plain = replace(
        space,
        kinds=("gaussian",),
        factor_kinds=("gaussian",),
        allow_specials=False,
        shapes=("balanced", "router"),
        alignments=(min(space.alignments),),
        max_experts=PRODUCT_EXPERTS if space.depth_multiple else 48,
        max_hidden=max(space.multiple, 64),
        max_elements=min(space.max_elements, 20_000),
        big_elements=min(space.max_elements, 20_000),
    )
    drawn = draw_cases(24, values.key("ordinary", seed), plain)
    chosen = max(drawn, key=lambda case: sum(count > 0 for count in case.counts))
    # A tensor whose window was small was drawn as a plain one with edits: here it is normal values too.
    values_of = {
        name: replace(item, exponent=0, window=None, edits=())
        if item.kind != "plain"
        else Values("gaussian", chosen.seed)
        for name, item in chosen.values.items()
    }
    return chosen.replace(values=values_of)


def _variant(space: Space, source: SeededSource) -> Space:
    """The space with one choice of everything that a kernel is compiled for."""
    dense = bool(source.integer(0, 2) == 0)
    layout = one_of(source, space.layouts)
    widest = space.max_hidden
    if space.depth_multiple:
        # Kernels have tiles of 128 or 256 columns: two compilations serve all widths, one the narrow ones.
        widest = one_of(source, (NARROW, NARROW, widest))
    return replace(
        space,
        max_hidden=widest,
        paddings=(one_of(source, (True, False)),),
        probs=(one_of(source, (True, True, False)),),
        layouts=(layout,),
        multiple=max(space.multiple, int(layout.partition(":")[2] or 1)),
        offsets_dtypes=(one_of(source, ("int32", "int64")),),
        alignments=tuple(a for a in space.alignments if (a % 32 == 0) == dense),
    )


def run_tasks(tasks: Sequence[Task]) -> list[TaskResult]:
    """Run the tasks of one path in this process, one device after the other; they share the reference's outputs."""
    references = References(find_path(tasks[0].path))
    return [run_task(task, references) for task in tasks]


def run_task(task: Task, references: References | None = None) -> TaskResult:
    """Run one task in this process."""
    started = time.monotonic()
    path = find_path(task.path)
    maths = path.contract(task.profile).maths

    def unfinished(reason: str, evidence: str = "", lost: bool = False, status: Status = "error") -> TaskResult:
        result = PathResult(
            path.id, task.device, task.profile, maths, status, reason, evidence=evidence,
            seconds=time.monotonic() - started,
        )  # fmt: skip
        return TaskResult(result, lost=lost)

    try:
        device = open_device(task.device, task.schedule)
    except DeviceError as error:
        return unfinished(str(error))
    lacking = path.lacking(device.target)
    if lacking:
        return unfinished(lacking, device.evidence, status="skipped")
    contract = path.contract(task.profile, device.target)
    results: list[CaseResult] = []
    try:
        with device.activate():
            for case in campaign_cases(path, task.profile, task.examples, task.seed):
                results.append(run_case(path, case, contract, device, references))
            failing = [result.case for result in results if not result.passed]
            smallest = _shrunk(path, failing[0], contract, device) if failing else None
    except DeviceLost as error:
        return unfinished(str(error), device.evidence, lost=True)
    except DeviceError as error:
        return unfinished(str(error), device.evidence)
    except Exception as error:
        # Whatever a kernel's host code, the compiler or a reference raises ends this path, not the run.
        return unfinished(f"{type(error).__name__}: {error}", device.evidence)
    seconds = time.monotonic() - started
    return _summarise(path, task, maths, device.evidence, results, smallest, seconds)


def _shrunk(path: Path, case: Case, contract: Contract, device: Device) -> Case:
    """A small case that fails like `case`, as far as a few tries find one."""
    until = time.monotonic() + SHRINK_SECONDS

    def fails(candidate: Case) -> bool:
        if time.monotonic() > until:
            return False
        try:
            return not run_case(path, candidate, contract, device).passed
        except DeviceLost:
            raise
        except Exception:
            # A case that the path cannot run is no smaller form of one that it runs and gets wrong.
            return False

    return shrink(
        case,
        path.inputs,
        fails,
        multiple=path.multiple,
        depth_multiple=path.depth_multiple,
        attempts=SHRINK_ATTEMPTS,
    )


def case_file(case: Case) -> str:
    """Name of the file that holds a failing case."""
    return f"{case.path}-{case.digest()}.json"


def _summarise(
    path: Path,
    task: Task,
    maths: str,
    evidence: str,
    results: Sequence[CaseResult],
    smallest: Case | None,
    seconds: float,
) -> TaskResult:
    per_output: dict[str, list[Finding]] = {}
    kernels: dict[Kernel, None] = {}
    for result in results:
        kernels.update(dict.fromkeys(result.kernels))
        command = f"moe-numerics run cases/{case_file(result.case)} --device {task.device}"
        for finding in result.findings:
            if finding.first_mismatch is not None:
                finding = replace(finding, reproduce=command)
            per_output.setdefault(finding.output, []).append(finding)
    failing = tuple(result.case for result in results if not result.passed)
    if smallest is not None and smallest not in failing:
        failing = (smallest, *failing)
    summary = PathResult.from_findings(
        path.id,
        task.device,
        profile=task.profile,
        maths=maths,
        cases=len(results),
        findings=[merge(findings) for findings in per_output.values()],
        kernels=tuple(kernels),
        reproduce=f"moe-numerics run cases/{case_file(failing[0])} --device {task.device}" if failing else "",
        seconds=seconds,
        evidence=evidence,
    )
    faults = [result.fault for result in results if result.fault]
    if faults:
        reasons = [f"{len(faults)} of {len(results)} cases ended in a fault: {faults[0]}", summary.reason]
        summary = replace(summary, status="fail", reason="; ".join(reason for reason in reasons if reason))
    return TaskResult(summary, failing)


def verify(plan: Plan, progress: Callable[[PathResult], None] = lambda result: None) -> tuple[Report, bool]:
    """Run the plan, write the reports and the failing cases to `plan.out`, and give the report.

    progress is called with each result as it comes. The second value says whether a CUDA device was lost.
    """
    started = time.monotonic()
    order = {(task.path, task.device): i for i, task in enumerate(plan.tasks())}
    results: list[TaskResult] = []
    for result in _run_all(plan):
        results.append(result)
        progress(result.result)
    results.sort(key=lambda result: order[(result.result.id, result.result.device)])
    environment = Environment.here(
        ", ".join(_describe(device) for device in plan.devices),
        plan.seed,
        plan.command,
        driver=_driver() if any(device.startswith("cuda") for device in plan.devices) else None,
        seconds=time.monotonic() - started,
    )
    report = Report(environment, tuple(result.result for result in results))
    write_reports(report, plan.out)
    _write_cases(plan.out / "cases", [case for result in results for case in result.failing])
    return report, any(result.lost for result in results)


def _write_cases(folder: FilePath, cases: Iterable[Case]) -> None:
    for case in cases:
        folder.mkdir(parents=True, exist_ok=True)
        case.save(folder / case_file(case))


def _run_all(plan: Plan) -> Iterator[TaskResult]:
    context = multiprocessing.get_context("spawn")
    pools: list[ProcessPoolExecutor] = []
    futures: dict[Future[list[TaskResult]], list[Task]] = {}

    def submit(processes: int, groups: Iterable[list[Task]]) -> None:
        pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_prepare)
        pools.append(pool)
        futures.update({pool.submit(run_tasks, group): group for group in groups})

    virtual = [task for task in plan.tasks() if task.device.startswith("virtual:")]
    try:
        if virtual:
            groups = [list(group) for _, group in groupby(virtual, key=lambda task: task.path)]
            if len(groups) < plan.workers:
                groups = [[task] for task in virtual]
            submit(plan.workers, sorted(groups, key=lambda group: not _multiplies(group[0])))
        for device in plan.devices:
            if not device.startswith("virtual:"):
                tasks = [task for task in plan.tasks() if task.device == device]
                submit(min(CUDA_PROCESSES, plan.workers), ([task] for task in tasks))
        limit = TASK_TIMEOUT * len(futures) if len(pools) > bool(virtual) else None
        for future in as_completed(futures, timeout=limit):
            yield from _results_of(future, futures[future])
    finally:
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)


def _multiplies(task: Task) -> bool:
    """Whether the path has a GEMM: such tasks take longest, and begin first lest one process end long after others."""
    return find_path(task.path).space(task.profile).depth_multiple > 0


def _prepare() -> None:
    """Worker processes share the cores: each computes with one thread."""
    import torch

    import moe_numerics.fused.elementwise
    import moe_numerics.virtual_gpu  # noqa: F401

    torch.set_num_threads(1)
    collect_rarely()


def _results_of(future: Future[list[TaskResult]], tasks: Sequence[Task]) -> list[TaskResult]:
    try:
        return future.result()
    except BrokenProcessPool:
        reason = "the process that ran this device ended; earlier results of it stand"
        return [
            TaskResult(
                PathResult(task.path, task.device, task.profile, "exact", "error", reason),
                lost=task.device.startswith("cuda"),
            )
            for task in tasks
        ]


def _describe(device: str) -> str:
    import torch

    if not device.startswith("cuda") or not torch.cuda.is_available():
        return device
    return f"{device} ({torch.cuda.get_device_name(torch.device(device).index or 0)})"


def _driver() -> str | None:
    import torch

    if not torch.cuda.is_available():
        return None
    import cuda.bindings.driver as driver

    status, version = driver.cuDriverGetVersion()
    return f"CUDA {version // 1000}.{version % 1000 // 10}" if int(status) == 0 else None
