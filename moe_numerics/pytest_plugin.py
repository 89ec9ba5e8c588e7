"""pytest plugin: the fixture `moe_check` and the options that go with it.

It imports neither torch nor cutlass until a test uses the fixture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from moe_numerics.checking import Checked


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("moe-numerics", "numerics of fused MoE kernels")
    group.addoption(
        "--moe-cases",
        type=int,
        default=None,
        metavar="N",
        help="cases that moe_check draws where a test names none (default 20)",
    )


@pytest.fixture(scope="session")
def moe_check(pytestconfig: pytest.Config) -> Callable[..., Checked]:
    """`moe_check(kernel, path=None, cases=None, contract=None)`: like `moe_numerics.check`, but fails the test.

    The failure's message holds every output's first mismatch, the failing case and the nearest contract.
    """

    def judge(kernel: Callable[..., Any], path: str | None = None, cases: Any = None, contract: Any = None) -> Checked:
        from moe_numerics.checking import check

        drawn = pytestconfig.getoption("--moe-cases")
        result = check(kernel, path, drawn if cases is None else cases, contract)
        result.raise_if_unexplained()
        return result

    return judge
