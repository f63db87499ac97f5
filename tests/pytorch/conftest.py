"""PyTorch's tensors on the CPU, computed as such or as though the CPU were a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "library"))  # the stand-in for a GPU is there

collect_ignore: list[str] = []
try:
    import torch
except ImportError:  # test_installed.py says so
    here = Path(__file__).parent
    collect_ignore = [path.name for path in here.glob("test_*.py") if path.name != "test_installed.py"]
else:
    from host_gpu import FakeExecutor

    from tilewave.arrays import ArrayView
    from tilewave.arrays import _view_torch as view_torch
    from tilewave.semantics import contiguous

    class CountedExecutor(FakeExecutor):
        """The stand-in, which knows how many products it was asked for."""

        def __len__(self) -> int:
            return len(self.submissions)


def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> CountedExecutor:
    """Let tensors on the CPU go the way of those on a GPU, up to the launch, which NumPy computes."""
    run = CountedExecutor()

    def view(tensor: Any, name: str, stream: int | None) -> ArrayView:
        return view_torch(tensor, name, stream)._replace(device=0, host=None, readonly=False)

    def empty(framework: str, shape: tuple[int, ...], device: int, stream: int) -> ArrayView:
        made = torch.full(shape, float("nan"))
        return ArrayView(made, framework, made.data_ptr() if made.numel() else 0, contiguous(shape), device)

    monkeypatch.setattr("tilewave.arrays._viewers", {})
    monkeypatch.setattr("tilewave.arrays._view_torch", view)
    monkeypatch.setattr("tilewave.on_device.empty_on_device", empty)
    monkeypatch.setattr("tilewave.on_device.executor", lambda: run)
    monkeypatch.setattr("tilewave.on_device.keep_tensors", lambda tensors, stream, device: None)
    monkeypatch.setattr("tilewave.call.current_stream", lambda array: 0)
    monkeypatch.setattr("tilewave.torch.compute.computed_by_torch", lambda a, recipe: False)
    monkeypatch.setattr("tilewave.warm._libraries", {})
    return run


@pytest.fixture
def gpu_path(monkeypatch: pytest.MonkeyPatch) -> CountedExecutor:
    """The way of tensors on a GPU, for tensors on the CPU."""
    return pretend_gpu(monkeypatch)


@pytest.fixture(params=["cpu", "gpu"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways, one after the other."""
    if request.param == "gpu":
        pretend_gpu(monkeypatch)
    return str(request.param)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings of PyTorch about PyTorch are no faults of tilewave; all others stay errors."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"))
