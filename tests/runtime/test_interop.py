"""Streams, pointers and memory shared with other libraries, on a fake GPU."""

from __future__ import annotations

import gc
import types
from typing import Any

import numpy as np
import pytest
from tests.runtime.fake_gpu import FakeGpu, Result

from tilewave import dlpack
from tilewave.errors import UsageError
from tilewave.runtime import interop
from tilewave.runtime.interop import (
    device_of_pointer,
    keep_until_passed,
    lasting_stream,
    stream_handle,
    wait_for,
)
from tilewave.runtime.shared import SharedArray


@pytest.fixture
def shared(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """The fake GPU with what sharing asks of it."""
    monkeypatch.setattr(interop, "_kept", [])
    monkeypatch.setattr(
        type(gpu), "on_cuMemAlloc", lambda self, n: self.on_cuMemAllocAsync(n, 0), raising=False
    )
    monkeypatch.setattr(
        type(gpu), "on_cuMemFree", lambda self, address: self.on_cuMemFreeAsync(address, 0), raising=False
    )
    monkeypatch.setattr(
        type(gpu),
        "on_cuMemcpyDtoH",
        lambda self, to, source, nbytes: self.on_cuMemcpyDtoHAsync(to, source, nbytes, 0),
        raising=False,
    )
    return gpu


def named(gpu: FakeGpu, *names: str) -> list[tuple[str, tuple[Any, ...]]]:
    return [call for call in gpu.calls if call[0] in names]


def test_a_stream_waits_for_an_event_of_the_other(shared: FakeGpu) -> None:
    wait_for(0x20, 0x10, 0)
    (_, (event, producer)), (_, (stream, waited, _)) = named(shared, "cuEventRecord", "cuStreamWaitEvent")
    assert (producer, stream) == (0x10, 0x20)
    assert event == waited
    assert shared.count("cuEventDestroy") == 1
    assert shared.count("cuStreamSynchronize") == 0  # the host does not wait


@pytest.mark.parametrize(("stream", "producer"), [(0x10, 0x10), (0, 1), (1, 0), (0, 0)])
def test_a_stream_does_not_wait_for_itself(shared: FakeGpu, stream: int, producer: int) -> None:
    wait_for(stream, producer, 0)
    assert shared.count("cuEventRecord") == 0


def test_owners_are_kept_until_the_stream_has_passed(
    shared: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: set[int] = set()
    busy = types.SimpleNamespace(value=600)
    monkeypatch.setattr(
        shared,
        "cuEventQuery",
        lambda event: (Result.CUDA_SUCCESS,) if event in passed else (busy.value,),
        raising=False,
    )
    first, second = object(), object()
    keep_until_passed(first, 0x10, 0)
    keep_until_passed(second, 0x10, 0)
    assert [owner for _, owner in interop._kept] == [first, second]
    passed.add(interop._kept[0][0])
    third = object()
    keep_until_passed(third, 0x10, 0)
    assert [owner for _, owner in interop._kept] == [second, third]


def test_asking_what_has_passed_disturbs_no_capture_of_another_thread(shared: FakeGpu) -> None:
    keep_until_passed(object(), 0x10, 0)
    shared.capturing[0x99] = 1
    last = object()
    keep_until_passed(last, 0x11, 0)
    assert [owner for _, owner in interop._kept] == [last]
    assert shared.capture_mode == "global"


def test_what_a_capture_uses_is_kept_for_good(shared: FakeGpu) -> None:
    shared.capturing[0x10] = 1
    owner = object()
    keep_until_passed(owner, 0x10, 0)
    shared.capturing.clear()
    keep_until_passed(object(), 0x11, 0)
    keep_until_passed(object(), 0x11, 0)
    assert any(kept is owner for _, kept in interop._kept)
    assert len(named(shared, "cuEventRecord")) == 2


def test_a_stream_that_may_be_destroyed_is_followed_by_one_that_is_not(shared: FakeGpu) -> None:
    """What asks a stream later must not be told of one that is gone by then."""
    shared.current = 333  # a context of the caller's own, a green one say, on another GPU
    first = lasting_stream(0x10, 0)
    assert first != 0x10
    (_, (event, followed)), (_, (follower, waited, _)) = named(shared, "cuEventRecord", "cuStreamWaitEvent")
    assert (followed, follower, waited) == (0x10, first, event)
    assert lasting_stream(0x20, 0) == first  # one a GPU, not one a stream
    assert lasting_stream(0x10, 1) != first
    assert [call[0] for call in shared.calls].count("cuStreamCreate") == 2
    assert [call[1][1] for call in named(shared, "cuEventRecord")] == [0x10, 0x20, 0x10]
    for name in ("cuStreamSynchronize", "cuEventSynchronize", "cuStreamDestroy"):
        assert shared.count(name) == 0
    assert (shared.current, shared.pushed) == (333, [])


def test_followers_and_their_events_belong_to_the_primary_context(
    shared: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A green context of the same GPU may be current, and be destroyed next."""
    made_in: list[int] = []

    def noted(self: FakeGpu, flags: int) -> tuple[int]:
        made_in.append(self.current)
        return self.new_handle()

    monkeypatch.setattr(type(shared), "on_cuStreamCreate", noted)
    monkeypatch.setattr(type(shared), "on_cuEventCreate", noted)
    shared.current = 901  # of GPU 1 by the fake's rule, as is its primary context, 701
    lasting_stream(0x10, 1)
    assert made_in == [701, 701]
    assert shared.current == 901


@pytest.mark.parametrize("handle", [0, 1])
def test_default_streams_last(shared: FakeGpu, handle: int) -> None:
    assert lasting_stream(handle, 0) == handle
    assert shared.calls == []


def test_a_threads_own_stream_is_followed(shared: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks handle 2 later, in another thread, asks another stream; it is that of the current context."""
    recorded_in: list[int] = []

    def record(self: FakeGpu, event: int, stream: int) -> tuple[()]:
        recorded_in.append(self.current)
        return ()

    monkeypatch.setattr(type(shared), "on_cuEventRecord", record)
    shared.current = 901  # of GPU 1 by the fake's rule
    follower = lasting_stream(2, 1)
    assert follower not in (0, 1, 2)
    assert [call[1][1] for call in named(shared, "cuEventRecord")] == [2]
    assert recorded_in == [901]
    assert [call[1][0] for call in named(shared, "cuStreamWaitEvent")] == [follower]
    assert (shared.current, shared.pushed) == (901, [])


def test_streams_of_torch_s_pool_last_and_external_ones_do_not(shared: FakeGpu) -> None:
    assert stream_handle(types.SimpleNamespace(cuda_stream=0x50, stream_id=35)) == 0x50
    assert stream_handle(types.SimpleNamespace(cuda_stream=0x60, stream_id=0x60)) == 0x60
    assert stream_handle(types.SimpleNamespace(ptr=0x70, stream_id=35)) == 0x70  # some other library's
    assert lasting_stream(0x50, 0) == 0x50
    assert shared.calls == []
    assert 0x60 != lasting_stream(0x60, 0) == lasting_stream(0x70, 0)


def test_nothing_waits_for_what_is_only_captured(shared: FakeGpu) -> None:
    """The follower would become part of the capture, which it never leaves."""
    shared.capturing[0x10] = 1
    assert lasting_stream(0x10, 0) != 0x10
    assert named(shared, "cuEventRecord", "cuStreamWaitEvent") == []


def test_the_driver_says_where_a_pointer_lies(shared: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    shared.CUpointer_attribute = types.SimpleNamespace(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL=9)
    monkeypatch.setattr(
        type(shared), "on_cuPointerGetAttribute", lambda self, attribute, address: (1,), raising=False
    )
    assert device_of_pointer(0x1234) == 1
    assert named(shared, "cuPointerGetAttribute")[0][1] == (9, 0x1234)


def test_streams_by_every_name() -> None:
    class Protocol:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, 0x44

    class AsAttribute:
        __cuda_stream__ = (0, 0x45)

    assert stream_handle(0x41) == 0x41
    assert stream_handle(types.SimpleNamespace(cuda_stream=0x42)) == 0x42
    assert stream_handle(types.SimpleNamespace(ptr=0x43)) == 0x43
    assert stream_handle(Protocol()) == 0x44
    assert stream_handle(AsAttribute()) == 0x45
    for wrong in (None, -1, True, 1.0, "0", object(), types.SimpleNamespace(ptr="x")):
        with pytest.raises(UsageError, match="stream is"):
            stream_handle(wrong)
    with pytest.raises(UsageError, match="version 1 of __cuda_stream__"):
        stream_handle(type("Later", (), {"__cuda_stream__": (1, 5)})())


def test_shared_memory_is_freed_when_nobody_has_it(shared: FakeGpu) -> None:
    array = SharedArray.allocate((3, 4), 0, 0x10)
    assert len(shared.memory) == 1
    capsule = array.__dlpack__(stream=-1)
    del array
    gc.collect()
    assert len(shared.memory) == 1  # the capsule keeps it
    del capsule
    gc.collect()
    assert shared.memory == {}


def test_shared_memory_goes_out_through_dlpack_after_its_stream(shared: FakeGpu) -> None:
    array = SharedArray.allocate((3, 4), 1, 0x10)
    assert array.__dlpack_device__() == (dlpack.CUDA, 1)
    seen = dlpack.read_capsule(array.__dlpack__(stream=0x20, max_version=(1, 0), copy=False))
    assert (seen.address, seen.shape, seen.strides) == (array.address, (3, 4), (4, 1))
    assert (seen.dtype, seen.device_id) == ("float32", 1)
    (_, (_, producer)), (_, (consumer, _, _)) = named(shared, "cuEventRecord", "cuStreamWaitEvent")
    assert (producer, consumer) == (0x10, 0x20)
    array.__dlpack__(stream=-1)
    assert shared.count("cuStreamWaitEvent") == 1
    with pytest.raises(UsageError, match="stream 0 is ambiguous"):
        array.__dlpack__(stream=0)
    with pytest.raises(BufferError, match="not copied"):
        array.__dlpack__(dl_device=(dlpack.CPU, 0))
    with pytest.raises(BufferError, match="shared, not copied"):
        array.__dlpack__(copy=True)


def test_shared_memory_names_its_stream(shared: FakeGpu) -> None:
    interface = SharedArray.allocate((3, 4), 0, 0).__cuda_array_interface__
    assert (interface["stream"], interface["version"], interface["typestr"]) == (1, 3, "<f4")
    assert SharedArray.allocate((3, 4), 0, 0x10).__cuda_array_interface__["stream"] == 0x10
    assert SharedArray.allocate((0, 4), 0, 0x10).__cuda_array_interface__["data"] == (0, False)


def test_shared_memory_comes_to_the_host(shared: FakeGpu) -> None:
    array = SharedArray.allocate((3, 4), 0, 0x10)
    values = array.to_numpy()
    assert values.shape == (3, 4)
    assert np.isnan(values).all()  # the fake poisons what it allocates
    assert named(shared, "cuStreamSynchronize") == [("cuStreamSynchronize", (0x10,))]
