"""What a GPU gave, the virtual GPU gives: captured results replay bit for bit.

Faults this catches: any change of an instruction's arithmetic (a rounding, a flush, a NaN, a shift's range, a
fragment's layout, a descriptor's meaning), tables of approximations that no longer belong to the hardware, and a page
of evidence that says more than was compared.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_runs import thorough

from moe_numerics import silicon, silicon_capture, silicon_sweeps
from moe_numerics.silicon_data import operands
from moe_numerics.silicon_probes import probes
from moe_numerics.silicon_scenes import scenes
from moe_numerics.virtual_gpu import VirtualGPU, silicon_tables, table

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "reports" / "silicon" / silicon.ARCH
PARTS = 8


@pytest.fixture(scope="module")
def vectors() -> dict[str, Any]:
    with np.load(FOLDER / "vectors.npz") as file:
        return {name: file[name] for name in file.files}


def _names() -> list[str]:
    """Every probe and scene; of the widths of `wgmma`, which differ in size only, few unless asked for more."""
    found = [probe.name for probe in probes()]
    for number, scene in enumerate(scenes()):
        if not scene.name.startswith("wgmma") or number % 6 == 0 or thorough():
            found.append(scene.name)
    return found


@pytest.mark.parametrize("part", range(PARTS))
def test_captured_results_replay_bit_for_bit(part: int, vectors: dict[str, Any]) -> None:
    chosen = set(_names()[part::PARTS])
    outcomes = list(silicon.replay(vectors, chosen.__contains__))
    assert len(outcomes) >= len(chosen)
    wrong = [o for o in outcomes if not o.equal and not o.unmodelled]
    assert wrong == []


def test_everything_has_captured_results_that_are_small(vectors: dict[str, Any]) -> None:
    for probe in probes():
        assert f"probe/{probe.name}" in vectors, (
            f"{probe.name}: run `moe-numerics silicon --device cuda --out {FOLDER}`"
        )
    for scene in scenes():
        assert f"hash/{scene.name}" in vectors, scene.name
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 3 << 20


def test_only_what_is_stated_differs_from_silicon() -> None:
    """A report with differences, or with an instruction left out, must not pass for evidence."""
    report = json.loads((FOLDER / "report.json").read_text(encoding="utf-8"))
    assert report["summary"]["differing"] == 0
    assert report["summary"]["not_run"] == 0
    # What was corrected after the run counts by the replay of its kept results.
    replayed = {o["name"]: o["differences"] for o in report["replayed"]}
    for outcome in report["outcomes"]:
        if outcome["differences"] and not outcome["name"].startswith(silicon.UNMODELLED):
            assert replayed[outcome["name"]] == 0, outcome["name"]
    assert report["summary"]["compared"] == len(report["outcomes"])


def test_the_readme_quotes_the_last_run() -> None:
    summary = json.loads((FOLDER / "report.json").read_text(encoding="utf-8"))["summary"]
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    page = (ROOT / "docs" / "instructions.md").read_text(encoding="utf-8")
    forms = re.search(r"^sm_90a: (\d+) forms silicon", page, re.MULTILINE)
    assert forms is not None
    assert f"{summary['compared']:,} comparisons" in readme
    assert f"{summary['elements']:,} elements" in readme
    assert f"the other {forms[1]} instruction forms of `sm_90a`" in readme


def test_every_model_of_an_approximation_was_swept_over_all_inputs() -> None:
    report = json.loads((FOLDER / "report.json").read_text(encoding="utf-8"))
    swept = {each["instruction"]: each for each in report["sweeps"]}
    for instruction, _, _ in silicon_sweeps.instructions():
        assert swept[instruction]["inputs"] == 1 << 32
    assert len(swept) == len(silicon_sweeps.instructions()) + len(silicon_tables.HALVES) + 1
    assert [each for each in swept.values() if each["differences"]] == []


def test_the_page_of_instructions_is_up_to_date() -> None:
    page = (ROOT / "docs" / "instructions.md").read_text(encoding="utf-8")
    assert page == table.render(), "run `python -m moe_numerics.virtual_gpu.table > docs/instructions.md`"


@pytest.mark.parametrize("name", [name for names in table.MISSING.values() for name in names])
def test_what_the_page_calls_missing_is_missing(name: str) -> None:
    with pytest.raises(ValueError, match="is no instruction"):
        silicon.evidence_of(name, "sm_100a")


def test_the_package_ships_the_evidence_of_the_last_run() -> None:
    assert silicon.load_evidence() == silicon.load_evidence(FOLDER)


def test_evidence_names_what_was_compared() -> None:
    assert silicon.evidence_of("fma.rn.f32", "sm_90a") == "silicon"
    assert silicon.evidence_of("fma.rn.f32", "sm_100a") == "manual"
    assert silicon.evidence_of("sin.approx.f32", "sm_90a") == "manual"
    with pytest.raises(ValueError, match=r"'fma\.f32' is no instruction"):
        silicon.evidence_of("fma.f32", "sm_90a")
    with pytest.raises(ValueError, match="does not exist on sm_90a: expected one of sm_100a"):
        silicon.evidence_of("fma.rn.f32x2", "sm_90a")


@given(st.lists(st.integers(0, 2**32 - 1), max_size=64), st.lists(st.integers(-9, 9), max_size=64))
def test_a_table_survives_its_compression(jumps: list[int], steps: list[int]) -> None:
    """Catches a lost escape: a second difference that does not fit a byte."""
    smooth = np.cumsum(np.cumsum(np.array(steps, np.int64))) + 2**31
    values = np.concatenate([np.array(jumps, np.int64), smooth.astype(np.int64)])
    assert np.array_equal(silicon_tables.decode_table(silicon_tables.encode_table(values)), values)


@given(st.integers(0, 2**32 - 1), st.integers(1, 4096))
def test_operands_of_a_short_run_begin_those_of_a_long_one(seed: int, count: int) -> None:
    """Catches operands that depend on how many there are: kept results would belong to others."""
    kinds = ("f32", "f32", "u32:shift", "f64", "f16x2", "b32:few", "u32:members")
    for short, long in zip(operands(kinds, min(count, 64), seed % 999), operands(kinds, 4096, seed % 999), strict=True):
        assert np.array_equal(short, long[: short.size])


@given(st.integers(0x00800000, 0x7F7FFFFF), st.integers(-40, 40))
def test_models_scale_with_powers_of_two(bits: int, shift: int) -> None:
    """Catches an exponent placed wrongly: 1 / (x 2^k), sqrt(x 4^k) and 2^(n + k) only move the exponent."""
    field = bits >> 23
    if not 60 <= field <= 190:
        return
    moved = bits + (shift << 23)
    x = torch.tensor([bits, moved, bits + (2 * (shift // 4) << 23)], dtype=torch.int32)
    rcp = silicon_tables.evaluate("sm_90a", "rcp", x, True).tolist()
    assert rcp[1] - rcp[0] == -(shift << 23)
    sqrt = silicon_tables.evaluate("sm_90a", "sqrt", x, True).tolist()
    assert sqrt[2] - sqrt[0] == (shift // 4) << 23


class VirtualLauncher:
    """The device's side of a sweep, on a virtual GPU."""

    device = torch.device("cpu")

    def launch(self, ptx: str, kernel: str, blocks: int, threads: int, args: list[Any]) -> None:
        VirtualGPU(silicon.ARCH, "fast", False, 10**7).launch(ptx, kernel, blocks, threads, args)


@pytest.mark.parametrize(("instruction", "name", "ftz"), silicon_sweeps.instructions())
def test_a_sweep_sees_a_wrong_model(instruction: str, name: str, ftz: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a sweep that compares nothing: one result of 512 that is off by one ulp is found and named."""
    first = 0x3FAAAA00
    launcher = VirtualLauncher()

    def sweep() -> silicon_sweeps.Sweep:
        return silicon_sweeps.sweep_approximation(
            launcher, silicon.ARCH, instruction, name, ftz, first, first + 512, 256
        )

    assert sweep() == silicon_sweeps.Sweep(instruction, 512, 0)

    class Models:
        """The models as the sweep sees them; the virtual GPU keeps the right ones."""

        @staticmethod
        def evaluate(arch: str, function: str, bits: torch.Tensor, flush: bool) -> torch.Tensor:
            result = silicon_tables.evaluate(arch, function, bits, flush)
            return result + (bits == first + 300).to(torch.int32)

    monkeypatch.setattr(silicon_sweeps, "silicon_tables", Models)
    found = sweep()
    assert found.differences == 1
    assert found.first.startswith("0x3faaab2c gives ")


@given(st.sampled_from([*silicon_capture.TABLES, *silicon_tables.HALVES]), st.floats(0, 1))
def test_a_table_holds_the_results_it_says(name: str, place: float) -> None:
    """Catches a capture of other inputs than the models look up."""
    size = 1 << 16 if name in silicon_tables.HALVES else silicon_capture.TABLES[name].entries
    first = int(place * (size - 64))
    captured = silicon_capture.capture_table(VirtualLauncher(), silicon.ARCH, name, first, first + 64)
    stored = silicon_tables.stored(silicon.ARCH, name, first, first + 64)
    assert captured.tolist() == stored.tolist()


def test_the_seeded_reciprocal_is_correctly_rounded_where_it_is_replayed() -> None:
    sweep = silicon_sweeps.seeded_reciprocal(VirtualLauncher(), silicon.ARCH, 0x3F800000, 0x3F800000 + 4096)
    assert (sweep.inputs, sweep.differences) == (4096, 0)
