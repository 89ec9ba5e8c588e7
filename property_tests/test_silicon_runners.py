"""The silicon comparison outlives a job that fails: its process is replaced, and the others run on.

Faults this catches: one fault of a kernel that takes every later comparison with it, a job that hangs for ever, a
process that dies without a word, and a device that cannot be opened but is tried again for every job.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_numerics.devices import DeviceError
from moe_numerics.silicon_runners import Bytes, IsolatedRunner, Job, SiliconError

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
