"""What needs a GPU: skipped with the reason where there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import outcome_log
from lost_context import ContextGuard

from tilewave.compiler import choose_arch
from tilewave.device import DeviceSpec, query_device
from tilewave.runtime.driver import Device, Stream, probe


def pytest_addoption(parser: pytest.Parser) -> None:
    outcome_log.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    outcome_log.configure(config)
    config.pluginmanager.register(ContextGuard(config))


@pytest.fixture(scope="session")
def device() -> Device:
    found = probe()
    if found.reason is not None:
        pytest.skip(found.reason)
    return Device()


@pytest.fixture(scope="session")
def spec(device: Device) -> DeviceSpec:
    return query_device(device.ordinal)


@pytest.fixture(scope="session")
def arch(spec: DeviceSpec) -> str:
    return choose_arch(spec.compute_capability).arch


@pytest.fixture(scope="session")
def stream(device: Device) -> Stream:
    return Stream(device)
