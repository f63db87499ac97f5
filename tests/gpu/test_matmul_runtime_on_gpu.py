"""matmul and gemm among streams, graphs, threads, processes, part of a GPU and two GPUs."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import tilewave
from tilewave.device import DeviceSpec
from tilewave.errors import UsageError
from tilewave.precision import error_in_bounds
from tilewave.runtime import driver
from tilewave.runtime.driver import Device
from tilewave.runtime.kernels import gpu_state
from tilewave.runtime.workspace import workspace_pool

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

CUT = {"schedule": "split_k"}
SHAPE = (200, 176, 3000)
"""Few tiles and a deep K: cut along K under any schedule but data-parallel."""


@pytest.fixture(autouse=True)
def _no_gradients(device: Device) -> Any:
    with torch.no_grad():
        yield


def operands(m: int, n: int, k: int, gpu: int = 0) -> tuple[Any, Any]:
    return torch.randn(m, k, device=f"cuda:{gpu}"), torch.randn(k, n, device=f"cuda:{gpu}")


def right(out: Any, a: Any, b: Any) -> bool:
    bounds = error_in_bounds(out.cpu().numpy(), a.cpu().numpy(), b.cpu().numpy())
    return bool(bounds <= 1)


@pytest.mark.parametrize("schedule", ["data_parallel", "split_k", "stream_k", "stream_k_walk"])
def test_a_graph_replays_the_product_without_allocating(schedule: str) -> None:
    a, b = operands(*SHAPE)
    out = torch.empty(SHAPE[0], SHAPE[1], device="cuda")
    tilewave.prepare(tilewave.plan_for(a, b, out=out, schedule=schedule))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        tilewave.gemm(a, b, out=out, schedule=schedule)
    eager = tilewave.gemm(a, b, schedule=schedule)
    held = workspace_pool(gpu_state(0)).nbytes(), torch.cuda.memory_allocated()
    for _ in range(5):
        out.fill_(float("nan"))
        graph.replay()
        tilewave.gemm(b.T, a.T, schedule=schedule)  # in the eager stream's workspace
        assert torch.equal(out, eager)
    assert held == (workspace_pool(gpu_state(0)).nbytes(), torch.cuda.memory_allocated())
    a.copy_(torch.randn_like(a))
    graph.replay()
    torch.cuda.synchronize()
    assert right(out, a, b)


def test_a_cold_capture_is_refused_and_the_stream_lives_on() -> None:
    code = """
import torch, tilewave
from tilewave.errors import CaptureError
a, b = torch.randn(300, 400, device="cuda"), torch.randn(400, 200, device="cuda")
out = torch.empty(300, 200, device="cuda")
tilewave.matmul(torch.ones(1, 1, device="cuda"), torch.ones(1, 3000000, device="cuda"))
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out.zero_()
    try:
        tilewave.gemm(a, b, out=out, schedule="split_k")
    except CaptureError as error:
        assert "prepare" in str(error), error
        print("refused")
graph.replay()
torch.cuda.synchronize()
print("replayed", float(out.abs().sum()))
tilewave.gemm(a, b, out=out, schedule="split_k")
print("right", torch.allclose(out.double(), a.double() @ b.double(), atol=1e-3))
"""
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert answer.stdout.split() == ["refused", "replayed", "0.0", "right", "True"], answer.stderr


def test_two_graphs_may_run_at_once() -> None:
    a, b = operands(*SHAPE)
    expected = tilewave.gemm(a, b, **CUT)
    graphs = []
    for _ in range(2):
        out = torch.empty_like(expected)
        tilewave.prepare(tilewave.plan_for(a, b, out=out, **CUT))
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for _ in range(10):
                tilewave.gemm(a, b, out=out, **CUT)
        graphs.append((graph, out, torch.cuda.Stream()))
    for _ in range(20):
        for graph, out, side in graphs:
            with torch.cuda.stream(side):
                out.fill_(float("nan"))
                graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for _, out, _ in graphs)


def test_workspace_of_the_caller_is_used_in_a_cold_capture() -> None:
    a, b = operands(*SHAPE)
    expected = tilewave.gemm(a, b, **CUT)
    plan = tilewave.plan_for(a, b, **CUT)[0]
    memory = torch.full((plan.partial_bytes + plan.ticket_bytes + 64,), 255, dtype=torch.uint8, device="cuda")
    out = torch.empty_like(expected)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        tilewave.gemm(a, b, out=out, workspace=memory[3:], **CUT)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)
    with pytest.raises(UsageError, match="workspace"):
        tilewave.gemm(a, b, workspace=memory[:100], **CUT)


def test_eight_threads_with_their_own_streams() -> None:
    shapes = [(64 + 37 * i, 50 + 61 * i, 700 + 300 * i) for i in range(8)]
    barrier = threading.Barrier(8)

    def work(shape: tuple[int, int, int]) -> bool:
        stream = torch.cuda.Stream()
        with torch.no_grad(), torch.cuda.stream(stream):
            a, b = operands(*shape)
            expected = None
            barrier.wait()
            for turn in range(40):
                schedule = ("split_k", "stream_k", "data_parallel")[turn % 3]
                out = tilewave.gemm(a, b, schedule=schedule)
                if turn == 0:
                    expected = out
                elif turn % 3 == 0 and not torch.equal(out, expected):
                    return False
            stream.synchronize()
            return right(out, a, b)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, shapes))


def test_a_busy_default_stream_beside_a_non_blocking_one() -> None:
    a, b = operands(*SHAPE)
    expected = tilewave.matmul(a, b)
    big = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    for _ in range(4):
        big @ big  # keeps the default stream busy for a while
    with torch.cuda.stream(side):
        out = tilewave.matmul(a, b)
        done = torch.cuda.Event()
        done.record()
    done.synchronize()
    assert torch.equal(out, expected)
    torch.cuda.synchronize()


@pytest.mark.parametrize("schedule", [None, "split_k", "stream_k_walk"])
def test_work_is_ordered_by_the_callers_stream(schedule: str | None) -> None:
    """What a stream writes before is what the product reads, and nothing waits on the host.

    That holds once a kernel is loaded, which takes longer than the GPU is kept busy here, and for the first
    call after `prepare` as for those that find a kept launch.
    """
    a, b = operands(1024, 1024, 1024)
    ones = torch.ones(1024, 1024, device="cuda")
    tilewave.prepare(tilewave.plan_for(a, b, schedule=schedule))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # what PyTorch loads and allocates at first
        torch.cuda._sleep(1000)
        a.copy_(ones * 2)
        room = [torch.empty_like(ones) for _ in range(3)]
    del room
    for turn in range(1, 4):
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(400_000_000)  # about 0.2 s
            a.copy_(ones)
            b.copy_(ones * turn)
            out = tilewave.gemm(a, b, schedule=schedule)
            assert not side.query(), f"call {turn} waited for the GPU"
            total = out.sum()
        side.synchronize()
        assert float(total) == turn * 1024.0**3


@pytest.mark.parametrize("warm", [False, True])
def test_tensors_may_outlive_the_stream_that_used_them(device: Device, warm: bool) -> None:
    """PyTorch asks a stream that used memory when the memory is freed: by then this one is gone."""
    for turn in range(1, 6):
        stream = driver._call("cuStreamCreate", 1)
        a, b, out = (torch.full((500, 500), float(turn), device="cuda") for _ in range(3))
        if warm:
            tilewave.matmul(a, b, out=out)
        torch.cuda.synchronize()
        tilewave.matmul(a, b, out=out, stream=int(stream))
        driver._call("cuStreamSynchronize", stream)
        driver._call("cuStreamDestroy", stream)
        assert torch.all(out == 500.0 * turn**2)
        del a, b, out
        torch.cuda.synchronize()


def test_streams_that_come_and_go_leave_no_workspace_behind(device: Device) -> None:
    a, b = operands(*SHAPE)
    expected = tilewave.gemm(a, b, **CUT)
    out = torch.empty_like(expected)
    torch.cuda.synchronize()
    held = []
    for _ in range(30):
        stream = driver._call("cuStreamCreate", 1)
        for _ in range(3):
            out.fill_(float("nan"))
            torch.cuda.synchronize()
            tilewave.gemm(a, b, out=out, stream=int(stream), **CUT)
            driver._call("cuStreamSynchronize", stream)
            assert torch.equal(out, expected)
        driver._call("cuStreamDestroy", stream)
        held.append(workspace_pool(gpu_state(0)).nbytes())
    assert len(set(held)) == 1  # the first may have enlarged what an earlier stream left


def test_streams_that_take_over_workspace_do_not_mix(device: Device) -> None:
    """Many streams at work at once and new ones all the time, each with a product of its own."""
    pairs = [operands(64 + 8 * i, 176, 3000) for i in range(12)]
    expected = [tilewave.gemm(*pair, **CUT) for pair in pairs]
    torch.cuda.synchronize()
    for turn in range(20):
        streams = [driver._call("cuStreamCreate", 1) for _ in pairs]
        outs = [torch.full_like(result, float("nan")) for result in expected]
        torch.cuda.synchronize()
        for _ in range(4):
            for pair, out, stream in zip(pairs, outs, streams, strict=True):
                tilewave.gemm(*pair, out=out, stream=int(stream), **CUT)
        for stream in streams[:: 1 + turn % 2]:
            driver._call("cuStreamSynchronize", stream)
        torch.cuda.synchronize()
        assert all(map(torch.equal, outs, expected))
        for stream in streams:
            driver._call("cuStreamDestroy", stream)


def test_ten_processes_give_one_hash() -> None:
    code = """
import hashlib, torch, tilewave
generator = torch.Generator().manual_seed(7)
digest = hashlib.sha256()
for m, n, k in [(200, 176, 3000), (1025, 1025, 1025), (16, 4096, 4096), (1, 1000, 777), (3000, 9, 5)]:
    a, b = torch.randn(m, k, generator=generator).cuda(), torch.randn(k, n, generator=generator).cuda()
    digest.update(tilewave.matmul(a, b).cpu().numpy().tobytes())
print(digest.hexdigest())
"""
    runs = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(10)
    ]
    hashes = {run.communicate(timeout=200)[0] for run in runs}
    assert len(hashes) == 1
    assert len(hashes.pop().strip()) == len(hashlib.sha256().hexdigest())


@pytest.mark.parametrize("max_sms", [1, 7, 131])
def test_max_sms(max_sms: int) -> None:
    a, b = operands(700, 650, 900)
    out = tilewave.gemm(a, b, max_sms=max_sms)
    assert right(out, a, b)


@pytest.mark.parametrize("sms", [8, 40])
def test_part_of_the_gpu(device: Device, spec: DeviceSpec, sms: int) -> None:
    """Every schedule finishes on a green context with a few SMs, with the bits of the whole GPU."""
    cuda = driver._bindings()
    call = driver._call
    handle = call("cuDeviceGet", 0)
    kind = cuda.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    whole = call("cuDeviceGetDevResource", handle, kind)
    groups, _, _ = call("cuDevSmResourceSplitByCount", 1, whole, 0, sms)
    description = call("cuDevResourceGenerateDesc", groups[:1], 1)
    green = call(
        "cuGreenCtxCreate", description, handle, cuda.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    )
    stream = call("cuGreenCtxStreamCreate", green, 1, 0)
    try:
        a, b = operands(900, 1000, 1100)
        for schedule in ("data_parallel", "split_k", "stream_k", "stream_k_walk"):
            expected = tilewave.gemm(a, b, schedule=schedule)
            torch.cuda.synchronize()
            out = torch.full_like(expected, float("nan"))
            torch.cuda.synchronize()
            tilewave.gemm(a, b, schedule=schedule, out=out, stream=int(stream))
            call("cuStreamSynchronize", stream)
            assert torch.equal(out, expected), schedule
    finally:
        call("cuStreamDestroy", stream)
        call("cuGreenCtxDestroy", green)


def test_two_gpus_alternate() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    sets = [operands(*SHAPE, gpu=gpu) for gpu in (0, 1)]
    for turn in range(20):
        gpu = turn % 2
        torch.cuda.set_device(1 - gpu)  # the operands decide, not the current device
        out = tilewave.gemm(*sets[gpu], **CUT)
        assert out.device.index == gpu
        assert torch.cuda.current_device() == 1 - gpu
        assert right(out, *sets[gpu])
    with pytest.raises(UsageError, match=r"a on GPU 0, b on GPU 1.*all lie in one place"):
        tilewave.matmul(sets[0][0], sets[1][1])


@pytest.mark.parametrize("batch", [65535, 65536, 131072])
def test_batches_past_65535(batch: int) -> None:
    a, b = torch.randn(batch, 3, 5, device="cuda"), torch.randn(batch, 5, 2, device="cuda")
    out = tilewave.matmul(a, b)
    expected = (a.double() @ b.double()).float()
    assert torch.allclose(out, expected, atol=1e-5)


def test_offsets_past_2_31_elements() -> None:
    rows, columns = 70_000, 40_000  # 2.8e9 elements
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GiB of free memory")
    whole = torch.zeros(rows, columns, device="cuda")
    a = whole[-300:, -500:]
    a.normal_()
    b = torch.randn(500, 70, device="cuda")
    assert right(tilewave.matmul(a, b), a, b)
    out = whole[-300:, :70]
    tilewave.matmul(a, b, out=out)
    assert right(out, a, b)
    assert float(whole[:-300].abs().sum()) == 0
    wide = tilewave.matmul(whole[:, -1:], torch.ones(1, 40_000, device="cuda"))
    assert torch.equal(wide[-300:, 39_999], whole[-300:, -1])


def test_random_calls_against_float64(rng: np.random.Generator) -> None:
    """Shapes, layouts, offsets, alpha, beta and epilogues at random."""
    for _ in range(150):
        m, n, k = (int(2 ** rng.uniform(0, 9.5)) for _ in range(3))
        batch = () if rng.random() < 0.6 else (int(rng.integers(1, 5)),)

        def draw(*shape: int) -> Any:
            offset = int(rng.integers(0, 4)) * int(rng.random() < 0.3)
            flat = torch.randn(offset + int(np.prod(shape)) + 8, device="cuda")
            values = flat[offset : offset + int(np.prod(shape))].reshape(shape)
            kind = rng.integers(4)
            if kind == 0:
                return values.transpose(-1, -2).contiguous().transpose(-1, -2)
            if kind == 1:
                padded = torch.full((*shape[:-1], shape[-1] + 3), float("nan"), device="cuda")
                padded[..., : shape[-1]] = values
                return padded[..., : shape[-1]]
            return values

        a, b, c = draw(*batch, m, k), draw(*batch, k, n), draw(*batch, m, n)
        alpha, beta = float(rng.choice([1.0, -0.5])), float(rng.choice([0.0, 1.0, 0.25]))
        bias = torch.randn(n, device="cuda") if rng.random() < 0.5 else None
        activation = rng.choice([None, "relu", "gelu", "gelu_tanh", "silu"])
        out = tilewave.gemm(a, b, c, alpha=alpha, beta=beta, bias=bias, activation=activation)
        value = alpha * (a.double() @ b.double()) + beta * c.double()
        magnitude = abs(alpha) * (a.abs().double() @ b.abs().double()) + abs(beta) * c.abs().double()
        if bias is not None:
            value, magnitude = value + bias.double(), magnitude + bias.abs().double()
        expected = {
            None: lambda x: x,
            "relu": torch.relu,
            "gelu": torch.nn.functional.gelu,
            "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
            "silu": torch.nn.functional.silu,
        }[activation](value)
        bound = (k + 6) * 2**-24 * magnitude * 1.2 + 4e-6 * (activation is not None)
        wrong = (out.double() - expected).abs() > bound
        assert not wrong.any(), (m, n, k, batch, alpha, beta, activation, a.stride(), b.stride())
