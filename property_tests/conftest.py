"""What the property tests share: Hypothesis profiles, and the devices that kernels run on.

Choose a profile with `pytest --hypothesis-profile=thorough`. "quick", the default, draws few cases of representative
paths, the same ones in every run; "thorough" draws new ones in every run, of every path.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# With --import-mode=importlib a test's folder is not on the path: this lets tests import the helpers beside them.
sys.path.append(str(Path(__file__).parent))

from kernel_runs import ActiveDevice, active_device

from moe_numerics.garbage import collect_rarely

# A device fixture stays open over all examples of a test, as the virtual GPU forgets a case when it is done.
_ALLOWED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]

settings.register_profile("quick", max_examples=25, deadline=None, derandomize=True, suppress_health_check=_ALLOWED)
settings.register_profile("thorough", max_examples=400, deadline=None, print_blob=True, suppress_health_check=_ALLOWED)
settings.load_profile("quick")


def pytest_collection_finish() -> None:
    """The modules are imported, and the tests compile kernel after kernel."""
    collect_rarely()


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[ActiveDevice]:
    """The active device of a name given by indirect parametrisation: "reference", or what `open_device` knows."""
    with active_device(request.param) as opened:
        yield opened
