from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.runtime.fake_gpu import FakeGpu

from tilewave.compiler.register_pass import OFF_SWITCH
from tilewave.device import get_spec
from tilewave.runtime import driver, interop, kernels, loop_launcher, staging, workspace


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """A fake GPU in the driver's place, and no state of tilewave left over from before."""
    fake = FakeGpu()
    monkeypatch.setattr(driver, "_bindings", lambda: fake)
    monkeypatch.setattr(driver.ProcessState, "initialised", False)
    monkeypatch.setattr(driver.ProcessState, "forked", False)
    monkeypatch.setattr(kernels, "bindings", lambda: fake, raising=False)
    monkeypatch.setattr(loop_launcher, "bindings", lambda: fake)
    monkeypatch.setattr(interop, "bindings", lambda: fake)
    monkeypatch.setenv(OFF_SWITCH, "0")  # the fake computes nothing, so that no loop could be checked on it
    monkeypatch.setattr(kernels, "query_device", lambda ordinal: get_spec("H200"))
    monkeypatch.setattr(kernels, "driver_cuda_version", lambda: (13, 0))
    monkeypatch.setattr(kernels, "_states", {})
    monkeypatch.setattr(workspace, "_pools", {})
    monkeypatch.setattr(staging, "_stagers", {})
    monkeypatch.setattr(interop, "_followers", {})
    monkeypatch.setattr(interop, "_lasting", {0, 1})
    driver.probe.cache_clear()
    yield fake
    driver.probe.cache_clear()
