"""The two ways of a product without a GPU: NumPy on the host, and the product's kernels in the emulator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from emulated_gpu import EmulatedExecutor
from host_gpu import CupyArray, FakeGpu

import tilewave
from tilewave.device import get_spec
from tilewave.planner.gemm import GemmPlan

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Path:
    """Calls of the front door with NumPy arrays, which are passed as they are or as arrays of a GPU."""

    name: str
    executor: EmulatedExecutor

    @property
    def emulated(self) -> bool:
        """Whether kernels run."""
        return self.name == "kernels"

    @property
    def plans(self) -> list[GemmPlan]:
        """Plans of the kernels that ran, the last one last."""
        return self.executor.plans

    def gemm(self, a: Array, b: Array, c: Array | None = None, **arguments: Any) -> Any:
        """`tilewave.gemm`; an array that is passed twice stays one array."""
        wrapped: dict[int, Any] = {}

        def wrap(value: Any) -> Any:
            if not self.emulated or not isinstance(value, np.ndarray):
                return value
            return wrapped.setdefault(id(value), CupyArray(value))

        named = {name: wrap(value) for name, value in arguments.items()}
        if not self.emulated:
            for option in ("schedule", "max_sms", "batch_invariant"):
                named.pop(option, None)
        result = tilewave.gemm(wrap(a), wrap(b), wrap(c), **named)
        if isinstance(result, tuple):
            return tuple(np.asarray(getattr(each, "host", each)) for each in result)
        return np.asarray(getattr(result, "host", result))

    def matmul(self, a: Array, b: Array, **arguments: Any) -> Array:
        """`gemm` with nothing but a product."""
        result: Array = self.gemm(a, b, **arguments)
        return result

    def with_sms(self, sms: int) -> None:
        """Plan for a GPU of so many SMs from here on."""
        self.executor.spec = replace(get_spec("H200"), sms=sms)


@pytest.fixture(params=["host", "kernels"])
def path(request: pytest.FixtureRequest, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each way in turn."""
    executor = EmulatedExecutor()
    monkeypatch.setattr("tilewave.on_device.executor", lambda: executor)
    monkeypatch.setattr("tilewave.group.group_executor", lambda: executor.group)
    monkeypatch.setattr("tilewave.group.gpu_for_host_operands", lambda: None)
    monkeypatch.setattr("tilewave.api.gpu_for_host_operands", lambda: None)
    return Path(request.param, executor)


@pytest.fixture
def kernels(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The emulator alone."""
    executor = EmulatedExecutor()
    monkeypatch.setattr("tilewave.on_device.executor", lambda: executor)
    monkeypatch.setattr("tilewave.group.group_executor", lambda: executor.group)
    return Path("kernels", executor)
