"""Workspace: one arena a stream, growing in stream order; captures get their own, set aside beforehand."""

from __future__ import annotations

import ctypes
import sys
import types

import pytest
from tests.runtime.fake_gpu import FakeGpu, Result

import tilewave
from tilewave.errors import CaptureError, DeviceError
from tilewave.runtime.execute import workspace_of_plan
from tilewave.runtime.interop import stream_handle
from tilewave.runtime.kernels import gpu_state
from tilewave.runtime.workspace import Arena, WorkspacePool, workspace_pool


@pytest.fixture
def pool(gpu: FakeGpu) -> WorkspacePool:
    return workspace_pool(gpu_state(0))


def test_launches_of_a_stream_share_an_arena(pool: WorkspacePool, gpu: FakeGpu) -> None:
    first = pool.take(11, 100, 1000)
    assert pool.take(11, 50, 1000) is first
    assert pool.take(12, 50, 1000).address != first.address
    assert gpu.count("cuMemAllocAsync") == 2


def test_tickets_are_zero_and_lie_before_the_partial_sums(pool: WorkspacePool) -> None:
    arena = pool.take(11, 5000, 1 << 16)
    assert ctypes.string_at(arena.address, 5000) == bytes(5000)
    assert arena.partials >= arena.address + 5000
    assert arena.partials % 256 == 0
    assert pool.nbytes() == arena.nbytes >= 5000 + (1 << 16)


@pytest.mark.parametrize("precision", ["ieee", "fp16x3"])
def test_of_memory_of_the_callers_tickets_are_cleared_and_nothing_else(gpu: FakeGpu, precision: str) -> None:
    """The packed operands of fp16x3 come without tickets: what would lie behind them is not the caller's."""
    sizes = (4096, 4096, 4096) if precision == "fp16x3" else (64, 64, 20_000)
    plan = tilewave.plan(*sizes, device="H200", precision=precision)
    assert plan.partial_bytes > 0
    assert (plan.ticket_bytes > 0) == (precision == "ieee")
    size = plan.workspace_bytes + 15
    memory = (ctypes.c_uint8 * size)(*[7] * min(size, 100))
    address = ctypes.addressof(memory)
    tickets, partials = workspace_of_plan(plan, 0, 11, (address, size))
    assert address <= partials <= partials + plan.partial_bytes <= tickets <= address + size
    assert ctypes.string_at(tickets, plan.ticket_bytes) == bytes(plan.ticket_bytes)
    assert gpu.count("cuMemsetD8Async") == (plan.ticket_bytes > 0)


def test_an_arena_grows_in_both_parts_and_the_old_one_is_freed_in_stream_order(
    pool: WorkspacePool, gpu: FakeGpu
) -> None:
    small = pool.take(11, 100, 1 << 20)
    larger = pool.take(11, 9000, 10)
    assert larger.holds(9000, 1 << 20)
    assert ("cuMemFreeAsync", (small.address, 11)) in gpu.calls
    assert pool.nbytes() == larger.nbytes


def test_each_gpu_has_its_own_pool(gpu: FakeGpu) -> None:
    assert workspace_pool(gpu_state(0)) is workspace_pool(gpu_state(0))
    assert workspace_pool(gpu_state(0)) is not workspace_pool(gpu_state(1))


def test_a_cold_capture_is_refused_before_anything_is_done(pool: WorkspacePool, gpu: FakeGpu) -> None:
    gpu.capturing[11] = 1
    with pytest.raises(CaptureError, match=r"5,000 bytes .* tilewave\.prepare"):
        pool.take(11, 1000, 4000)


def test_a_capture_of_torch_lends_memory_of_its_graph(
    pool: WorkspacePool, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was set aside: each launch gets memory of PyTorch's, its tickets cleared in the graph."""
    lent: list[types.SimpleNamespace] = []

    def empty(nbytes: int, dtype: str, device: str) -> types.SimpleNamespace:
        memory = (ctypes.c_ubyte * nbytes)(*b"\xff" * 100)
        lent.append(types.SimpleNamespace(memory=memory, data_ptr=lambda: ctypes.addressof(memory)))
        assert device == "cuda:0"
        return lent[-1]

    torch = types.SimpleNamespace(
        empty=empty, uint8="uint8", _C=types.SimpleNamespace(_cuda_getCurrentRawStream=lambda device: 11)
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    gpu.capturing[11] = gpu.capturing[12] = 1
    with pytest.raises(CaptureError):
        pool.take(12, 1000, 4000)  # somebody else's capture
    assert lent == []
    first, second = pool.take(11, 1000, 4000), pool.take(11, 1000, 4000)
    assert len(lent) == 2
    assert first.address != second.address
    assert first.holds(1000, 4000)
    assert ctypes.string_at(first.address, 1000) == bytes(1000)
    assert pool.nbytes() == 0
    assert gpu.count("cuMemAllocAsync") == 0


def test_a_capture_uses_what_was_set_aside_and_keeps_it(pool: WorkspacePool, gpu: FakeGpu) -> None:
    eager = pool.take(11, 1000, 4000)
    pool.reserve(1000, 4000)
    pool.reserve(1000, 4000)  # once is enough
    assert gpu.count("cuMemAllocAsync") == 2
    gpu.capturing[11] = 1
    captured = pool.take(11, 1000, 4000)
    assert captured.address != eager.address
    assert pool.take(11, 500, 4000) is captured  # of the same graph, in order
    gpu.capturing = {}
    assert pool.take(11, 1000, 4000) is eager
    gpu.capturing[11] = 2  # another graph: it may be replayed beside the first
    with pytest.raises(CaptureError):
        pool.take(11, 1000, 4000)
    gpu.capturing = {}
    pool.reserve(1000, 4000)
    gpu.capturing[11] = 2
    assert pool.take(11, 1000, 4000).address not in (captured.address, eager.address)


def test_streams_of_one_capture_do_not_share(pool: WorkspacePool, gpu: FakeGpu) -> None:
    pool.reserve(1000, 4000)
    gpu.capturing = {11: 1, 12: 1}
    pool.take(11, 1000, 4000)
    with pytest.raises(CaptureError):
        pool.take(12, 1000, 4000)


def test_branches_that_were_prepared_for_run_side_by_side(pool: WorkspacePool, gpu: FakeGpu) -> None:
    pool.reserve(1000, 4000, 2)
    gpu.capturing = {11: 1, 12: 1}
    assert pool.take(11, 1000, 4000).address != pool.take(12, 1000, 4000).address


def test_a_capture_takes_the_smallest_that_fits(pool: WorkspacePool, gpu: FakeGpu) -> None:
    pool.reserve(1000, 4000)
    pool.reserve(1000, 1 << 20)
    gpu.capturing[11] = 1
    assert pool.take(11, 1000, 4000).partial_bytes < 1 << 20
    assert pool.take(11, 1000, 1 << 19).partial_bytes == 1 << 20


def used(pool: WorkspacePool, stream: int, ticket_bytes: int = 100, partial_bytes: int = 1000) -> Arena:
    """The arena of a launch on a stream, which was submitted."""
    with pool.submitting:
        return pool.take(stream, ticket_bytes, partial_bytes)


def test_streams_that_come_and_go_leave_no_memory_behind(pool: WorkspacePool, gpu: FakeGpu) -> None:
    """Nobody says that a stream is destroyed; its handle must not be used any more."""
    first = used(pool, 0x100)
    for stream in range(0x101, 0x200):
        before = len(gpu.calls)
        assert used(pool, stream) is first
        handles = {each for name, each in gpu.calls[before:] if name.startswith("cuStream")}
        assert handles == {(stream,)}
    assert gpu.count("cuMemAllocAsync") == 1
    assert pool.nbytes() == first.nbytes
    assert gpu.count("cuEventCreate") == gpu.count("cuEventDestroy") + 1
    assert gpu.count("cuStreamSynchronize") == gpu.count("cuEventSynchronize") == 0


def test_streams_at_work_have_arenas_of_their_own(pool: WorkspacePool, gpu: FakeGpu) -> None:
    gpu.unfinished = {11, 12, 13}
    arenas = [used(pool, stream) for stream in (11, 12, 13)]
    assert len({arena.address for arena in arenas}) == 3
    assert [used(pool, stream) for stream in (11, 12, 13)] == arenas
    gpu.unfinished = {11, 13, 14}
    assert used(pool, 14) == arenas[1]
    gpu.unfinished = {11, 12, 13, 14}
    assert used(pool, 12) not in arenas  # it was alive after all
    assert gpu.count("cuMemAllocAsync") == 4


def test_an_arena_is_not_taken_over_before_its_launch_is_submitted(pool: WorkspacePool, gpu: FakeGpu) -> None:
    """The event of the launch before it says nothing."""
    first = used(pool, 11)
    with pool.submitting:
        assert pool.take(11, 100, 1000) is first
        assert pool.take(12, 100, 1000) is not first


def test_a_stream_that_cannot_be_asked_keeps_its_arena(
    pool: WorkspacePool, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = lambda event, stream: (Result.CUDA_ERROR_INVALID_HANDLE,)  # noqa: E731
    monkeypatch.setattr(gpu, "cuEventRecord", failed, raising=False)
    assert used(pool, 11).address != used(pool, 12).address
    monkeypatch.undo()
    assert gpu.count("cuEventQuery") == 0


def test_streams_that_last_keep_their_arenas(
    pool: WorkspacePool, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default stream and those of PyTorch's pool that were met cost nothing more either."""
    stream_handle(types.SimpleNamespace(cuda_stream=0x50, stream_id=35))
    arenas = [used(pool, stream) for stream in (0, 1, 0x50)]
    assert gpu.count("cuEventRecord") == 0
    assert used(pool, 0x60) not in arenas
    assert [used(pool, stream) for stream in (0, 1, 0x50)] == arenas


def test_a_stream_that_turns_out_to_last_keeps_its_arena(pool: WorkspacePool, gpu: FakeGpu) -> None:
    """PyTorch's current stream comes as a number, a stream that is given as an object: it may be the same.
    The event of the launch that was submitted under its number says nothing of later ones."""
    first = used(pool, 0x50)
    stream_handle(types.SimpleNamespace(cuda_stream=0x50, stream_id=35))
    assert used(pool, 0x50) is first
    assert used(pool, 0x60) is not first  # 0x50 may be at work: nobody has asked


@pytest.mark.parametrize("before", [False, True], ids=["at first", "when it grows"])
def test_memory_that_is_not_to_be_had_disturbs_no_other_stream(
    pool: WorkspacePool, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    if before:
        used(pool, 11)
    full = lambda nbytes, stream: (Result.CUDA_ERROR_OUT_OF_MEMORY, 0)  # noqa: E731
    with monkeypatch.context() as while_full:
        while_full.setattr(gpu, "cuMemAllocAsync", full, raising=False)
        with pytest.raises(DeviceError, match="OUT_OF_MEMORY"):
            used(pool, 11, 100, 1 << 20)
    arena = used(pool, 12)
    assert used(pool, 13) is arena
    assert used(pool, 11) is arena


def test_an_arena_left_behind_that_is_too_small_is_outgrown(pool: WorkspacePool, gpu: FakeGpu) -> None:
    small = used(pool, 11, 100, 1 << 20)
    larger = used(pool, 12, 9000, 10)
    assert larger.holds(9000, 1 << 20)
    assert ("cuMemFreeAsync", (small.address, 12)) in gpu.calls
    assert pool.nbytes() == larger.nbytes


def test_one_that_is_large_enough_is_taken_over_first(pool: WorkspacePool, gpu: FakeGpu) -> None:
    gpu.unfinished = {11, 12, 13}
    sizes = (1000, 1 << 20, 5000)
    arenas = [used(pool, stream, 100, size) for stream, size in zip((11, 12, 13), sizes, strict=True)]
    gpu.unfinished = set()
    assert used(pool, 14, 100, 1 << 19) is arenas[1]
    assert gpu.count("cuMemFreeAsync") == 0


def test_another_threads_capture_is_not_disturbed(pool: WorkspacePool, gpu: FakeGpu) -> None:
    """Asking after an event would break it; no memory may be allocated meanwhile, and need not be."""
    first = used(pool, 11)
    gpu.capturing[0x99] = 1
    gpu.forbidden_in_capture -= {"cuStreamGetId"}  # of a stream that is not captured
    assert used(pool, 12) is first
    assert gpu.capture_mode == "global"


def test_an_error_while_submitting_is_the_callers(pool: WorkspacePool, gpu: FakeGpu) -> None:
    def fail() -> None:
        with pool.submitting:
            pool.take(11, 100, 1000)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not pool.submitting.locked()
    assert used(pool, 12) == used(pool, 11)
