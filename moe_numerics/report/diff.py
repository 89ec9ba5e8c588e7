"""What changed between two reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from moe_numerics.report import wording
from moe_numerics.report.model import OutputResult, PathResult, Report

_Key = tuple[str, ...]


@dataclass(frozen=True)
class Change:
    """One difference between two reports.

    `kind`: `environment`, `verdict`, `path added`, `path removed`, `device`, `status`, `kernel`,
    `output added`, `output removed`, `grade`, `bit-equal`, `unexplained`. `where`: what it is about (a path
    and its device, an output, or a field). `old` and `new`: both states as text, empty where there is none.
    """

    kind: str
    where: str
    old: str
    new: str

    def __str__(self) -> str:
        if not self.old or not self.new:
            return f"{self.kind}: {self.where}{f' ({self.old or self.new})' if self.old or self.new else ''}"
        return f"{self.kind}: {self.where}: {self.old} -> {self.new}"


def diff_reports(old: Report, new: Report) -> list[Change]:
    """Every change from an old report to a new one, the verdict and the environment first.

    Paths are matched by id, device, profile and maths. If the two reports have no device in common, as when
    a virtual GPU is compared with silicon, by id, profile, maths and the target that their kernels were
    compiled for. When a run started and how long it took are not compared.
    """
    changes = _field_changes("verdict", {"verdict": old.verdict}, {"verdict": new.verdict})
    changes += _field_changes("environment", _environment(old), _environment(new))
    across = not {path.device for path in old.paths} & {path.device for path in new.paths}
    old_paths, new_paths = _by_key(old.paths, across), _by_key(new.paths, across)
    for key, path in old_paths.items():
        if key not in new_paths:
            changes.append(Change("path removed", _where(path), path.status, ""))
    for key, path in new_paths.items():
        if key not in old_paths:
            changes.append(Change("path added", _where(path), "", path.status))
        else:
            changes += _path_changes(old_paths[key], path)
    return changes


def render(changes: Iterable[Change]) -> str:
    """The changes as plain text, a line each; `no change` if there is none."""
    lines = [str(change) for change in changes]
    return "\n".join(lines or ["no change"]) + "\n"


def _environment(report: Report) -> dict[str, str]:
    environment = report.environment
    return {
        **{f"version of {name}": version for name, version in environment.versions.items()},
        "device": environment.device,
        "driver": environment.driver or "none",
        "platform": environment.platform,
        "seed": str(environment.seed),
        "command": environment.command,
    }


def _field_changes(kind: str, old: Mapping[str, str], new: Mapping[str, str]) -> list[Change]:
    return [
        Change(kind, name, old.get(name, ""), new.get(name, ""))
        for name in dict.fromkeys((*old, *new))
        if old.get(name, "") != new.get(name, "")
    ]


def _by_key(paths: Iterable[PathResult], across: bool) -> dict[_Key, PathResult]:
    keyed: dict[_Key, PathResult] = {}
    for path in paths:
        place = " ".join(sorted({kernel.target for kernel in path.kernels})) if across else path.device
        keyed.setdefault((path.id, place, path.profile, path.maths), path)
    return keyed


def _where(path: PathResult) -> str:
    return f"{path.id} on {path.device} [{path.profile}, {path.maths}]"


def _kernels(path: PathResult) -> str:
    return ", ".join(
        f"{kernel.name or 'kernel'} {kernel.target} {kernel.ptx_sha256[:16]}"
        for kernel in sorted(path.kernels, key=lambda kernel: (kernel.name, kernel.target, kernel.ptx_sha256))
    )


def _state(path: PathResult) -> str:
    return f"{path.status} ({path.reason})" if path.reason else path.status


def _path_changes(old: PathResult, new: PathResult) -> list[Change]:
    where = _where(new)
    changes: list[Change] = []
    if old.device != new.device:
        changes.append(Change("device", where, old.device, new.device))
    if old.status != new.status:
        changes.append(Change("status", where, _state(old), _state(new)))
    if _kernels(old) != _kernels(new):
        changes.append(Change("kernel", where, _kernels(old), _kernels(new)))
    old_outputs = {output.name: output for output in old.outputs}
    new_outputs = {output.name: output for output in new.outputs}
    for name in dict.fromkeys((*old_outputs, *new_outputs)):
        place = f"{name} of {where}"
        if name not in new_outputs:
            changes.append(Change("output removed", place, _share(old_outputs[name]), ""))
        elif name not in old_outputs:
            changes.append(Change("output added", place, "", _share(new_outputs[name])))
        else:
            changes += _output_changes(old_outputs[name], new_outputs[name], place)
    return changes


def _share(output: OutputResult) -> str:
    return f"{wording.share(output.bit_equal, output.checked)} bit-equal"


def _output_changes(old: OutputResult, new: OutputResult, where: str) -> list[Change]:
    changes: list[Change] = []
    if old.grade != new.grade:
        changes.append(Change("grade", where, old.grade, new.grade))
    # Shares compared exactly, as fractions: a single element among millions is a change.
    if old.bit_equal * new.checked != new.bit_equal * old.checked:
        changes.append(
            Change(
                "bit-equal",
                where,
                f"{wording.share(old.bit_equal, old.checked)} of {old.checked:,}",
                f"{wording.share(new.bit_equal, new.checked)} of {new.checked:,}",
            )
        )
    if old.unexplained != new.unexplained:
        changes.append(Change("unexplained", where, f"{old.unexplained:,}", f"{new.unexplained:,}"))
    return changes
