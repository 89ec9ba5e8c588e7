"""Every path of the registry, extended ones too, agrees on virtual GPUs in the first case of a campaign.

Faults this catches: a path that does not compile or run for one of the architectures, an entry of the registry that
pairs a kernel with another reference, other outputs or other profiles than its own.
"""

from __future__ import annotations

import pytest
from kernel_runs import VIRTUAL, ActiveDevice, failure, thorough

from moe_numerics.campaign import campaign_cases
from moe_numerics.path_model import Path
from moe_numerics.paths import all_paths
from moe_numerics.running import run_case


def _devices(place: int, path: Path) -> tuple[str, ...]:
    """Both virtual GPUs; in the quick profile one of them, in turn, for an extended path that is long to compile."""
    short = not path.extended or (path.operands is None and ".bf16" in path.id)
    return VIRTUAL if thorough() or short else (VIRTUAL[place % 2],)


RUNS = [(path, device) for place, path in enumerate(all_paths()) for device in _devices(place, path)]


@pytest.mark.parametrize(
    ("path", "device"), RUNS, indirect=["device"], ids=[f"{path.id}-{name}" for path, name in RUNS]
)
def test_the_first_case_of_every_path_agrees(path: Path, device: ActiveDevice) -> None:
    case = next(campaign_cases(path, "suite", 1, 0))
    result = run_case(path, case, path.contract("suite", device.target), device)
    assert result.passed, failure(result)
    assert {finding.output for finding in result.findings} == {spec.name for spec in path.outputs_of(case)}
