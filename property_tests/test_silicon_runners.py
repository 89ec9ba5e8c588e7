"""The silicon comparison outlives a job that fails: its process is replaced, and the others run on.

Faults this catches: one fault of a kernel that takes every later comparison with it, a job that hangs for ever, a
process that dies without a word, and a device that cannot be opened but is tried again for every job.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import partial
from typing import Self

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_numerics import silicon
from moe_numerics.devices import DeviceError
from moe_numerics.silicon_runners import Bytes, IsolatedRunner, Job, SiliconError, VirtualRunner

JOB = Job("fine", "", "micro", 1, 32, (), (4,), True)


class Device:
    """Gives the number of jobs it has run; after a fault every later job fails, as in a CUDA context."""

    def __init__(self, opens: bool = True) -> None:
        if not opens:
            raise RuntimeError("no such device")
        self.count, self.lost = 0, False

    def run(self, job: Job) -> list[Bytes]:
        if job.name == "crash":
            os._exit(9)
        if job.name == "hang":
            time.sleep(3600)
        self.lost |= job.name == "fault"
        if self.lost:
            raise SiliconError(f"{job.name}: an illegal instruction was encountered")
        self.count += 1
        return [np.full(4, self.count, np.uint8)]


REASONS = {"fault": "fault: an illegal instruction", "crash": "crash: its process ended with status 9"}


@given(st.lists(st.sampled_from(["fine", *REASONS]), min_size=1, max_size=5))
def test_a_failed_job_costs_no_other_its_result(names: list[str]) -> None:
    with IsolatedRunner(Device, method="fork") as runner:
        fine = 0
        for name in [*names, "fine"]:
            if name == "fine":
                fine += 1
                assert runner.run(JOB)[0].tolist() == [fine] * 4
            else:
                with pytest.raises(SiliconError, match=REASONS[name]):
                    runner.run(replace(JOB, name=name))
                fine = 0


def test_a_job_that_hangs_is_ended() -> None:
    with IsolatedRunner(Device, limit=1.0, method="fork") as runner:
        with pytest.raises(SiliconError, match=r"hang: no result after 1 s"):
            runner.run(replace(JOB, name="hang"))
        assert runner.run(JOB)[0].tolist() == [1] * 4


def test_a_device_that_cannot_be_opened_is_refused_at_once() -> None:
    with pytest.raises(DeviceError, match="opening the device failed: no such device"):
        IsolatedRunner(partial(Device, False), method="fork").__enter__()


class _Flawed:
    """A device that refuses one kernel, survives a trap, and does the others as the virtual GPU does."""

    def __init__(self, make: object) -> None:
        self.virtual = VirtualRunner(silicon.ARCH)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, job: Job) -> list[Bytes]:
        if job.name == "discard":
            raise SiliconError("discard on cuda: CUDA error: an illegal instruction was encountered")
        if job.stops:
            return [np.zeros(size, np.uint8) for size in job.outputs]
        return self.virtual.run(job)


def test_a_capture_reports_what_fails_and_what_should_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a failure that ends the capture or passes for evidence, and a fault of the model that silicon lacks."""
    names = ("trap.stops", "discard", "unary.f16", "cp.async.bulk")
    chosen = [work for work in silicon.jobs(128) if work.job.name in names]
    assert len(chosen) == len(names)
    monkeypatch.setattr(silicon, "IsolatedRunner", _Flawed)
    monkeypatch.setattr(silicon, "jobs", lambda count: iter(chosen))
    outcomes, vectors = silicon.capture("cuda", 128, 1)
    found = {o.name: o for o in outcomes}
    assert "illegal instruction" in found["discard"].error
    assert found["trap.stops"].differences > 0
    assert found["cp.async.bulk"].equal
    assert not any(name.endswith("/discard") for name in vectors)
