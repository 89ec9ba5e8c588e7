"""Known findings of kernels that are still red: a team adopts the suite today, and only what is new or worse fails.

A baseline is a JSON file, described by `report/baseline.schema.json`, with an entry for each output that had
unexplained bits when it was written:

    {"schema": 1, "known": [{"kernel": "mine", "path": "swiglu.fwd.bf16", "output": "out", "contract": "suite",
                             "arithmetic": "exact bits", "elements": 5120, "unexplained": 12, "max_ulp": 1}]}

A finding is *known* while the share of unexplained elements and the largest distance in ULPs are at most those of its
entry: it is reported and does not fail. It is *worse*, and fails, above either. An entry is *stale* once its output has
nothing unexplained any more: it is reported, so that the file can be updated.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from moe_numerics.bounds import Arithmetic
from moe_numerics.contract import PROFILES, Contract
from moe_numerics.findings import Finding
from moe_numerics.report.atomic import write_files

__all__ = ["SCHEMA", "Baseline", "BaselineError", "Judged", "Key", "Known", "described", "keys_of"]

SCHEMA = 1

EXACT_BITS = "exact bits"
"""What stands in the place of an arithmetic where bits are compared."""


class BaselineError(ValueError):
    """A baseline file that cannot be read: the text names the file, the key, the value and the rule."""


@dataclass(frozen=True, order=True)
class Key:
    """What an entry is about: an output of a kernel, on a path, under a contract and an arithmetic, both in words."""

    kernel: str
    path: str
    output: str
    contract: str
    arithmetic: str


@dataclass(frozen=True)
class Known:
    """How far an output was off: of `elements` compared, `unexplained`; the largest distance in ULPs, None for none."""

    elements: int
    unexplained: int
    max_ulp: int | None

    def covers(self, finding: Finding) -> bool:
        """Whether the finding is no worse."""
        # Shares are compared as products of integers.
        more = finding.unexplained * max(self.elements, 1) > self.unexplained * max(finding.elements, 1)
        further = finding.max_ulp is not None and (self.max_ulp is None or finding.max_ulp > self.max_ulp)
        return not more and not further


@dataclass(frozen=True)
class Judged:
    """Findings beside a baseline. known: outputs whose findings are covered; worse: in words; stale: outputs fixed."""

    known: tuple[str, ...] = ()
    worse: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()


def described(contract: Contract) -> str:
    """The contract in words: its profile, or the nearest one with the choices that differ from it."""

    def differences(name: str) -> list[str]:
        base = PROFILES[name].contract
        return [
            f"{field.name}={getattr(contract, field.name)}"
            for field in dataclasses.fields(Contract)
            if getattr(contract, field.name) != getattr(base, field.name)
        ]

    nearest = min(PROFILES, key=lambda name: len(differences(name)))
    return " + ".join((nearest, *differences(nearest)))


@dataclass
class Baseline:
    """The entries of a baseline file. `file` need not exist: then nothing is known."""

    file: FilePath
    entries: dict[Key, Known]

    @classmethod
    def load(cls, file: FilePath | str) -> Baseline:
        """Read a file. BaselineError: it is not a baseline."""
        file = FilePath(file)
        if not file.exists():
            return cls(file, {})
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise BaselineError(f"{file} is not JSON: {error}") from error
        return cls(file, dict(_entries(file, data)))

    def judge(self, keys: Mapping[str, Key], findings: Iterable[Finding]) -> Judged:
        """Findings of one kernel, by the keys of its outputs, beside what is known of them."""
        known, worse, stale = [], [], []
        for finding in findings:
            entry = self.entries.get(keys[finding.output])
            if entry is None:
                continue
            if finding.passed:
                # An output that was not compared says nothing about its entry.
                stale += [finding.output] if finding.grade != "unchecked" else []
            elif entry.covers(finding):
                known.append(finding.output)
            else:
                worse.append(
                    f"{finding.output}: {finding.unexplained:,} of {finding.elements:,} unexplained, "
                    f"largest distance {finding.max_ulp} ULP; known are {entry.unexplained:,} of "
                    f"{entry.elements:,} and {entry.max_ulp} ULP"
                )
        return Judged(tuple(known), tuple(worse), tuple(stale))

    def update(self, keys: Mapping[str, Key], findings: Iterable[Finding]) -> None:
        """Take findings of one kernel as what is known of it; entries of other kernels stay."""
        for finding in findings:
            key = keys[finding.output]
            if not finding.passed:
                self.entries[key] = Known(finding.elements, finding.unexplained, finding.max_ulp)
            elif finding.grade != "unchecked":
                self.entries.pop(key, None)

    def save(self) -> None:
        """Write the file under a temporary name, then move it to its own."""
        known = [{**dataclasses.asdict(key), **dataclasses.asdict(self.entries[key])} for key in sorted(self.entries)]
        text = json.dumps({"schema": SCHEMA, "known": known}, indent=1) + "\n"
        write_files(self.file.parent, {self.file.name: text})


def keys_of(
    kernel: str, path: str, contract: Contract, arithmetic: Arithmetic | None, outputs: Iterable[str]
) -> dict[str, Key]:
    """The key of each output of a kernel."""
    how = EXACT_BITS if arithmetic is None else f"{arithmetic.functions}, {arithmetic.intermediate}"
    return {output: Key(kernel, path, output, described(contract), how) for output in outputs}


def _entries(file: FilePath, data: Any) -> Iterable[tuple[Key, Known]]:
    if not isinstance(data, Mapping) or set(data) != {"schema", "known"}:
        raise BaselineError(f"{file}: expected an object with schema and known")
    if data["schema"] != SCHEMA:
        raise BaselineError(f"{file}: schema = {data['schema']!r}: this version reads baselines of schema {SCHEMA}")
    if not isinstance(data["known"], list):
        raise BaselineError(f"{file}: known is no list")
    texts = [field.name for field in dataclasses.fields(Key)]
    numbers = [field.name for field in dataclasses.fields(Known)]
    seen: set[Key] = set()
    for place, entry in enumerate(data["known"]):
        where = f"{file}: known[{place}]"
        if not isinstance(entry, Mapping) or set(entry) != {*texts, *numbers}:
            raise BaselineError(f"{where}: expected an object with {', '.join((*texts, *numbers))}")
        for name in texts:
            if not isinstance(entry[name], str) or not entry[name]:
                raise BaselineError(f"{where}.{name} = {entry[name]!r}: expected text")
        for name in numbers:
            value = entry[name]
            if value is None and name == "max_ulp":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise BaselineError(f"{where}.{name} = {value!r}: expected an integer, 0 or more")
        key = Key(**{name: entry[name] for name in texts})
        if key in seen:
            raise BaselineError(f"{where} stands twice: {key}")
        seen.add(key)
        yield key, Known(**{name: entry[name] for name in numbers})
