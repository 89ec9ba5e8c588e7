"""What the tasks of a path share in `verify` changes no result."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from moe_numerics import running
from moe_numerics.campaign import Task, run_task, run_tasks
from moe_numerics.cases import Case
from moe_numerics.contract import Contract
from moe_numerics.garbage import uncollected
from moe_numerics.path_model import Path

DEVICES = ("virtual:sm_90a", "virtual:sm_100a")


@pytest.mark.parametrize(("path", "shared"), [("relu.fwd.bf16", True), ("grouped_gemm.matmul.bf16.f32", False)])
def test_devices_share_reference_outputs_of_equal_contracts(
    path: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference runs once a case, once a case and device where the contract depends on the device.

    Catches outputs that are kept for another case or contract.
    """
    calls: list[tuple[str, Contract]] = []
    real = running.expected_outputs

    def counted(path: Path, case: Case, contract: Contract) -> dict[str, torch.Tensor]:
        calls.append((case.digest(), contract))
        return real(path, case, contract)

    monkeypatch.setattr(running, "expected_outputs", counted)
    tasks = [Task(path, device, "suite", 1, 0) for device in DEVICES]
    together = run_tasks(tasks)
    assert len(calls) == len(set(calls)) == (1 if shared else 2)
    alone = [run_task(task) for task in tasks]
    assert [_without_time(result) for result in together] == [_without_time(result) for result in alone]
    assert [result.result.status for result in together] == ["pass", "pass"]


def _without_time(result: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(result.result).items() if name != "seconds"}


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_put_back(enabled: bool) -> None:
    """Also after an exception, and where it was off before."""

    def fails() -> None:
        with uncollected():
            with uncollected():
                pass
            assert not gc.isenabled()
            raise ZeroDivisionError

    before = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        with pytest.raises(ZeroDivisionError):
            fails()
        assert gc.isenabled() == enabled
    finally:
        gc.enable() if before else gc.disable()
