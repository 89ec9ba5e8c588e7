"""Compares the virtual GPU with a real one: every instruction form that runs there, bit by bit.

`capture` runs the probes and scenes on both and keeps what the hardware gave; `replay` runs the virtual GPU alone
against what was kept. An instruction compared without a difference has evidence `silicon` on that architecture.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moe_numerics.silicon_data import BYTES, operands
from moe_numerics.silicon_probes import Probe, probes
from moe_numerics.silicon_runners import (
    CudaRunner,
    IsolatedRunner,
    Job,
    KernelStopped,
    Runner,
    SiliconError,
    VirtualRunner,
)
from moe_numerics.silicon_scenes import STOPPED, Scene, scenes

__all__ = [
    "ARCH",
    "UNMODELLED",
    "VECTORS",
    "Difference",
    "Outcome",
    "capture",
    "evidence_of",
    "jobs",
    "load_evidence",
    "replay",
    "save",
    "save_replay",
    "silicon_instructions",
]

ARCH = "sm_90a"
KEPT = 256
"""Elements of a probe that are kept."""
SAMPLE = 128
"""Words of a scene's output that are kept; the hash covers all."""
SCHEMA = 1
UNMODELLED = ("sin.approx", "cos.approx")
"""Instructions whose bits on silicon are not modelled: the virtual GPU gives the correctly rounded result."""

# In a checkout, and in an editable install of one; elsewhere nothing was captured.
VECTORS = Path(__file__).resolve().parent.parent / "reports" / "silicon" / ARCH
# The copy of `evidence.json` that the package ships: an installed suite has no reports/.
EVIDENCE = Path(__file__).resolve().parent / "virtual_gpu" / "tables"

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Difference:
    """The first element of a result that differs: its number, the operands' bits, and both results' bits."""

    element: int
    operands: tuple[str, ...]
    silicon: str
    virtual: str


@dataclass(frozen=True)
class Outcome:
    """What comparing one instruction, or one scene, gave.

    name: the instruction as written, or the scene's name. instructions: the names it is evidence for. error: why it
    could not run, empty if it did.
    """

    name: str
    instructions: tuple[str, ...]
    elements: int
    differences: int
    first: Difference | None = None
    error: str = ""

    @property
    def equal(self) -> bool:
        return not self.error and self.differences == 0

    @property
    def unmodelled(self) -> bool:
        """Whether a difference is known and stated: see UNMODELLED."""
        return not self.error and self.name.startswith(UNMODELLED)


@dataclass(frozen=True)
class _Work:
    """A job, what it belongs to, and where its results are kept."""

    job: Job
    probe: Probe | None
    scene: Scene | None
    operands: tuple[npt.NDArray[Any], ...] = field(default=())


def jobs(count: int, arch: str = ARCH) -> Iterator[_Work]:
    """Every probe on `count` elements (a multiple of 128), and every scene that the architecture has."""
    if count % 128 or count <= 0:
        raise ValueError(f"count = {count} must be a positive multiple of 128")
    for probe in probes():
        values = operands(probe.kinds, count)
        job = Job(
            probe.name,
            probe.ptx(arch),
            "micro",
            count // 128,
            128,
            tuple(np.ascontiguousarray(value).view(np.uint8) for value in values),
            tuple(count * BYTES[kind] for kind in probe.results),
            True,
            count,
        )
        yield _Work(job, probe, None, tuple(values))
    for scene in scenes():
        if arch in scene.targets:
            job = Job(
                scene.name, scene.ptx(arch), "scene", scene.blocks, scene.threads, scene.inputs, scene.outputs, False,
                None, scene.cluster, scene.maps, scene.stops,
            )  # fmt: skip
            yield _Work(job, None, scene)


def _words(data: Bytes, size: int) -> npt.NDArray[Any]:
    return np.ascontiguousarray(data).view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[size])


def _compare_probe(work: _Work, silicon: list[Bytes], virtual: list[Bytes]) -> Iterator[Outcome]:
    probe = work.probe
    assert probe is not None
    at = 0
    for line in probe.lines:
        total, elements, first = 0, 0, None
        for kind in line.results:
            size = BYTES[kind]
            a, b = _words(silicon[at], size), _words(virtual[at], size)
            wrong = np.flatnonzero(a != b)
            elements += a.size
            total += wrong.size
            if first is None and wrong.size:
                n = int(wrong[0])
                shown = tuple(f"{int(v[n]):#0{2 + 2 * v.dtype.itemsize}x}" for v in work.operands)
                first = Difference(n, shown, f"{int(a[n]):#0{2 + 2 * size}x}", f"{int(b[n]):#0{2 + 2 * size}x}")
            at += 1
        yield Outcome(line.text.replace("{{", "{").replace("}}", "}"), line.instructions, elements, total, first)


def _compare_scene(work: _Work, silicon: list[Bytes], virtual: list[Bytes]) -> Outcome:
    scene = work.scene
    assert scene is not None
    a = np.concatenate([_words(x, 4) for x in silicon])
    b = np.concatenate([_words(x, 4) for x in virtual])
    wrong = np.flatnonzero(a != b)
    first = None
    if wrong.size:
        n = int(wrong[0])
        first = Difference(n, (), f"{int(a[n]):#010x}", f"{int(b[n]):#010x}")
    return Outcome(scene.name, scene.shows, int(a.size), int(wrong.size), first)


def _results(runner: Runner, job: Job) -> list[Bytes]:
    """The outputs of a job. Of one that stops its device, STOPPED instead, or what it wrote if it did not."""
    try:
        return runner.run(job)
    except KernelStopped:
        if not job.stops:
            raise
        return [np.frombuffer(STOPPED, np.uint8)]


def _virtually(job: Job) -> list[Bytes] | str:
    """For a worker process: the outputs, or why there are none."""
    torch.set_num_threads(1)
    try:
        return _results(VirtualRunner(ARCH), job)
    except SiliconError as error:
        return str(error)


def capture(
    device: str, count: int, workers: int, done: Callable[[Outcome], None] = lambda outcome: None
) -> tuple[list[Outcome], dict[str, npt.NDArray[Any]]]:
    """Runs everything on a CUDA device and on the virtual GPU; gives the outcomes and the vectors to keep.

    done: called with each outcome; that of a kernel which failed on the device says why, and the others run on.
    DeviceError: the device cannot be opened.
    """
    outcomes: list[Outcome] = []
    vectors: dict[str, npt.NDArray[Any]] = {}
    with (
        IsolatedRunner(partial(CudaRunner, device)) as runner,
        ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool,
    ):
        for work, virtual in _in_order(pool, jobs(count)):
            try:
                silicon = _results(runner, work.job)
            except SiliconError as error:
                found: Iterable[Outcome] = [_failed(work, str(error))]
            else:
                vectors.update(_kept(work, silicon))
                found = [_failed(work, virtual)] if isinstance(virtual, str) else _compared(work, silicon, virtual)
            for outcome in found:
                outcomes.append(outcome)
                done(outcome)
    return outcomes, vectors


def _in_order(pool: Executor, work: Iterator[_Work]) -> Iterator[tuple[_Work, list[Bytes] | str]]:
    everything = list(work)
    yield from zip(everything, pool.map(_virtually, [each.job for each in everything], chunksize=1), strict=True)


def _failed(work: _Work, reason: str) -> Outcome:
    names = work.scene.shows if work.scene else tuple(n for line in work.probe.lines for n in line.instructions)  # type: ignore[union-attr]
    return Outcome(work.job.name, names, 0, 0, None, reason)


def _compared(work: _Work, silicon: list[Bytes], virtual: list[Bytes]) -> Iterable[Outcome]:
    return _compare_probe(work, silicon, virtual) if work.probe else [_compare_scene(work, silicon, virtual)]


def _kept(work: _Work, silicon: list[Bytes]) -> dict[str, npt.NDArray[Any]]:
    """What of the hardware's results goes to a file: the beginning of a probe's, a sample and a hash of a scene's."""
    name = work.job.name
    if work.probe is not None:
        sizes = [BYTES[kind] for kind in work.probe.results]
        return {f"probe/{name}": np.concatenate([x[: KEPT * size] for x, size in zip(silicon, sizes, strict=True)])}
    words = np.concatenate([_words(x, 4) for x in silicon])
    digest = np.frombuffer(hashlib.sha256(words.tobytes()).digest(), np.uint8)
    return {f"scene/{name}": words[:: max(1, words.size // SAMPLE)].copy(), f"hash/{name}": digest}


def replay(
    vectors: Mapping[str, npt.NDArray[Any]], names: Callable[[str], bool] = lambda name: True
) -> Iterator[Outcome]:
    """Runs the virtual GPU on what was kept. names: which probes and scenes."""
    runner = VirtualRunner(ARCH)
    for work in jobs(KEPT):
        name = work.job.name
        if not names(name):
            continue
        try:
            virtual = _results(runner, work.job)
        except SiliconError as error:
            yield _failed(work, str(error))
            continue
        if work.probe is not None:
            if f"probe/{name}" not in vectors:
                yield _failed(work, "no vectors were captured")
                continue
            sizes = [KEPT * BYTES[kind] for kind in work.probe.results]
            silicon = np.split(vectors[f"probe/{name}"], np.cumsum(sizes)[:-1])
            yield from _compare_probe(work, silicon, virtual)
            continue
        if f"scene/{name}" not in vectors:
            yield _failed(work, "no vectors were captured")
            continue
        words = np.concatenate([_words(x, 4) for x in virtual])
        step = max(1, words.size // SAMPLE)
        outcome = _compare_scene(work, [vectors[f"scene/{name}"].view(np.uint8)], [words[::step].copy().view(np.uint8)])
        same = hashlib.sha256(words.tobytes()).digest() == vectors[f"hash/{name}"].tobytes()
        if outcome.differences == 0 and not same:
            outcome = Outcome(outcome.name, outcome.instructions, outcome.elements, 1, None)
        yield outcome


def save(
    folder: Path, outcomes: Iterable[Outcome], vectors: Mapping[str, npt.NDArray[Any]], environment: Mapping[str, Any],
    sweeps: Sequence[Mapping[str, Any]] = (),
) -> None:  # fmt: skip
    """Writes what a run on a GPU gave: `report.json`, `evidence.json` and `vectors.npz`."""
    report = {
        "schema": SCHEMA,
        "environment": dict(environment),
        "sweeps": [dict(each) for each in sweeps],
        "outcomes": [asdict(o) for o in outcomes],
        "replayed": [],
    }
    _write(folder, report)
    np.savez_compressed(folder / "vectors.npz", allow_pickle=False, **dict(vectors))


def save_replay(folder: Path, report: Mapping[str, Any], outcomes: Iterable[Outcome]) -> None:
    """Adds a replay to the report of a run: what differed in the run counts by the replay of its kept results.

    So an instruction that was corrected after the run has evidence again, of as many elements as were kept.
    """
    wrong = {o["name"] for o in report["outcomes"] if o["differences"]}
    _write(folder, {**report, "replayed": [asdict(o) for o in outcomes if o.name in wrong]})


def _write(folder: Path, report: dict[str, Any]) -> None:
    from moe_numerics.report.atomic import write_files

    replayed = {o["name"]: o for o in report["replayed"]}
    latest = [replayed.get(o["name"], o) if o["differences"] else o for o in report["outcomes"]]
    wrong = [o for o in latest if o["differences"]]
    report["summary"] = {
        "compared": sum(not o["error"] for o in latest),
        "elements": sum(o["elements"] for o in latest),
        "corrected": sum(bool(o["differences"]) for o in report["outcomes"]) - len(wrong),
        "differing": sum(not o["name"].startswith(UNMODELLED) for o in wrong),
        "unmodelled": sum(o["name"].startswith(UNMODELLED) for o in wrong),
        "not_run": sum(bool(o["error"]) for o in latest),
    }
    good: dict[str, int] = {}
    bad = {name for o in wrong for name in o["instructions"]}
    for outcome in latest:
        for name in outcome["instructions"]:
            if name not in bad and not outcome["error"]:
                good[name] = good.get(name, 0) + outcome["elements"]
    environment = report["environment"]
    evidence = {
        "schema": SCHEMA,
        "arch": ARCH,
        **{key: environment[key] for key in ("date", "device", "driver") if key in environment},
        "instructions": {name: good[name] for name in sorted(good)},
        "swept": {each["instruction"]: each["inputs"] for each in report["sweeps"] if each["differences"] == 0},
        "differing": sorted(bad),
    }
    write_files(
        folder,
        {
            "report.json": json.dumps(report, indent=1) + "\n",
            "evidence.json": json.dumps(evidence, indent=1) + "\n",
        },
    )


def load_evidence(folder: Path = EVIDENCE) -> Mapping[str, Any]:
    """The list of instructions compared on silicon, empty where none was captured."""
    return _read_evidence(folder / "evidence.json")


@lru_cache(maxsize=4)
def _read_evidence(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {"instructions": {}, "differing": []}
    loaded: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


def silicon_instructions(arch: str) -> Mapping[str, int]:
    """Instructions compared on hardware without a difference, with the elements compared."""
    found: Mapping[str, int] = load_evidence()["instructions"] if arch == ARCH else {}
    return found


def evidence_of(instruction: str, arch: str) -> str:
    """On what an instruction (its dotted name) rests on an architecture: `silicon`, `third party` or `manual`.

    ValueError: the virtual GPU has no such instruction.
    """
    from moe_numerics.virtual_gpu import isa  # noqa: F401
    from moe_numerics.virtual_gpu.registry import TABLE

    opcode, *modifiers = instruction.split(".")
    form = next((f for f in TABLE.get(opcode, []) if f.match(tuple(modifiers)) is not None), None)
    if form is None:
        raise ValueError(f"{instruction!r} is no instruction of the virtual GPU")
    if form.features and arch not in form.features:
        raise ValueError(
            f"{instruction!r} does not exist on {arch}: expected one of {', '.join(sorted(form.features))}"
        )
    if instruction in silicon_instructions(arch):
        return "silicon"
    return form.evidence
