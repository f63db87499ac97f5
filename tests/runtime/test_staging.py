"""Host operands travel through two pinned buffers; any size, any strides, the bits unchanged."""

from __future__ import annotations

import numpy as np
import pytest
from tests.runtime.fake_gpu import FakeGpu

from tilewave.errors import DeviceError
from tilewave.runtime import staging
from tilewave.runtime.staging import stager


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "PIECE_BYTES", 64)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 32, 33, 100])
def test_what_goes_up_comes_down(gpu: FakeGpu, rng: np.random.Generator, count: int) -> None:
    one = stager(0)
    array = rng.standard_normal(count, dtype=np.float32)
    buffer = one.upload(array)
    out = np.full(count, np.nan, np.float32)
    one.download(buffer, out)
    assert np.array_equal(out.view(np.uint32), array.view(np.uint32))
    assert gpu.count("cuMemHostAlloc") == 2
    assert gpu.count("cuEventSynchronize") >= 2 * -(-count * 4 // 64)


def test_strided_operands_and_results(gpu: FakeGpu, rng: np.random.Generator) -> None:
    array = rng.standard_normal((12, 14), dtype=np.float32)[::-2, 1::3].T
    whole = np.full((10, 12), np.nan, np.float32)
    out = whole[: array.shape[0] * 2 : 2, ::-1][:, : array.shape[1]]
    one = stager(0)
    one.download(one.upload(array), out)
    assert np.array_equal(out, array)
    assert np.isnan(whole).sum() == whole.size - array.size


def test_nan_payloads_and_subnormals_survive(gpu: FakeGpu) -> None:
    array = np.array([0x7FC0BEEF, 0xFFA00001, 1, 0x80000000], np.uint32).view(np.float32)
    out = np.zeros(4, np.float32)
    one = stager(0)
    one.download(one.upload(array), out)
    assert np.array_equal(out.view(np.uint32), array.view(np.uint32))


def test_a_result_of_another_size_is_refused(gpu: FakeGpu) -> None:
    one = stager(0)
    with pytest.raises(DeviceError, match="8 bytes"):
        one.download(one.upload(np.ones(2, np.float32)), np.ones(3, np.float32))


def test_memory_is_freed_when_a_copy_fails(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    one = stager(0)
    held = len(gpu.memory)

    def broken(*arguments: object) -> tuple[object, ...]:
        raise RuntimeError("broken")

    monkeypatch.setattr(FakeGpu, "on_cuMemcpyHtoDAsync", broken)
    with pytest.raises(RuntimeError):
        one.upload(np.ones(2, np.float32))
    assert len(gpu.memory) == held
