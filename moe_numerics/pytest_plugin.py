"""pytest plugin: the fixture `moe_check` and the options that go with it.

It imports neither torch nor cutlass until a test uses the fixture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from moe_numerics.checking import Checked

_REPORTED = pytest.StashKey[list[str]]()
"""Lines on known and stale findings, for the end of the run."""

_WORKER_KEY = "moe_numerics_baseline"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("moe-numerics", "numerics of fused MoE kernels")
    group.addoption(
        "--moe-cases",
        type=int,
        default=None,
        metavar="N",
        help="cases that moe_check draws where a test names none (default 20)",
    )
    group.addoption(
        "--moe-baseline",
        default=None,
        metavar="FILE",
        help="known findings: moe_check reports them and fails only on what is new or worse",
    )
    group.addoption(
        "--moe-update-baseline",
        action="store_true",
        help="write what moe_check finds to the file of --moe-baseline instead of failing",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_REPORTED] = []
    if not config.getoption("--moe-update-baseline"):
        return
    if config.getoption("--moe-baseline") is None:
        raise pytest.UsageError("--moe-update-baseline needs --moe-baseline FILE: name the file to write")
    if hasattr(config, "workerinput") or getattr(config.option, "numprocesses", None):
        raise pytest.UsageError("--moe-update-baseline writes one file: run it in one process, without -n")


@pytest.fixture(scope="session")
def moe_check(pytestconfig: pytest.Config) -> Callable[..., Checked]:
    """`moe_check(kernel, path=None, cases=None, contract=None)`: like `moe_numerics.check`, but fails the test.

    Any other argument of `check` may be given by name. The failure's message holds every output's first mismatch, the
    failing case and the nearest contract.
    """
    options = {
        "baseline": pytestconfig.getoption("--moe-baseline"),
        "update_baseline": pytestconfig.getoption("--moe-update-baseline"),
    }

    def judge(
        kernel: Callable[..., Any], path: str | None = None, cases: Any = None, contract: Any = None, **more: Any
    ) -> Checked:
        from moe_numerics.checking import check

        drawn = pytestconfig.getoption("--moe-cases")
        result = check(kernel, path, drawn if cases is None else cases, contract, **{**options, **more})
        if result.baseline.known or result.baseline.stale:
            pytestconfig.stash[_REPORTED].append(str(result))
        result.raise_if_unexplained()
        return result

    return judge


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[_WORKER_KEY] = session.config.stash[_REPORTED]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Takes over what a process of pytest-xdist reported."""
    node.config.stash[_REPORTED] += getattr(node, "workeroutput", {}).get(_WORKER_KEY, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.stash[_REPORTED]:
        terminalreporter.section("moe-numerics baseline")
        for text in config.stash[_REPORTED]:
            terminalreporter.line(text)
