"""What a kernel's fault leaves behind: a context that fails every later call, and so every later test."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tilewave.errors import DeviceError
from tilewave.runtime.driver import Device, probe


def fault_of_the_context() -> str | None:
    """What the driver says of this process's context if it is lost."""
    if probe().reason is not None:
        return None
    try:
        Device().memory()
    except DeviceError as error:
        return str(error)
    return None


class ContextGuard:
    """Ends the process behind the test that has lost its context, so that the others get a new one.

    xdist starts another worker. It takes the test, which has failed already, for one that its worker crashed
    in, and reports that beside the failure; all other tests run. Without xdist the session ends.
    """

    def __init__(self, config: pytest.Config, fault: Callable[[], str | None] = fault_of_the_context) -> None:
        self._is_worker = hasattr(config, "workerinput")
        self._hands_out = not self._is_worker and config.getoption("dist", "no") != "no"
        self._fault = fault
        self._failed: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note who fails."""
        if report.failed:
            self._failed = report.nodeid

    # Last: by then xdist has sent all reports of the test. Later it would blame the next test for the crash.
    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Look at the context behind a test that has failed."""
        if self._hands_out or self._failed != nodeid or (fault := self._fault()) is None:
            return
        if self._is_worker:
            os._exit(1)
        pytest.exit(f"{nodeid} has lost the GPU's context, no later test can use it: {fault}", returncode=1)
