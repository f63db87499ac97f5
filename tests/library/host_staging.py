"""A stager whose device memory is host memory."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import numpy as np
import pytest

Array = np.ndarray[Any, Any]


class Buffer:
    def __init__(self, stage: Stage, nbytes: int) -> None:
        # Aligned as device memory is, and poisoned.
        self.memory = np.full(nbytes // 4 + 64, np.nan, np.float32)
        start = -self.memory.ctypes.data % 256 // 4
        self.values = self.memory[start : start + nbytes // 4]
        self.nbytes, self.address, self.stage = nbytes, self.values.ctypes.data, stage
        stage.live += 1

    def free(self) -> None:
        self.stage.live -= 1


class Stage:
    def __init__(self) -> None:
        self.lock = contextlib.nullcontext()
        self.stream = 0x57
        self.live = 0
        self.uploaded: list[int] = []

    def upload(self, array: Array) -> Buffer:
        buffer = Buffer(self, array.nbytes)
        buffer.values[...] = np.ascontiguousarray(array).reshape(-1)
        self.uploaded.append(array.nbytes)
        return buffer

    def download(self, buffer: Buffer, out: Array) -> None:
        assert buffer.nbytes == out.nbytes
        out[...] = buffer.values.reshape(out.shape)


def install(monkeypatch: pytest.MonkeyPatch) -> Stage:
    """Put a stage in the place of the one that needs a GPU."""
    stage = Stage()
    monkeypatch.setattr("tilewave.staged.stager", lambda device: stage)
    monkeypatch.setattr("tilewave.staged.DeviceBuffer", Buffer)
    monkeypatch.setattr(
        "tilewave.staged.gpu_state", lambda device: types.SimpleNamespace(context=contextlib.nullcontext)
    )
    return stage
