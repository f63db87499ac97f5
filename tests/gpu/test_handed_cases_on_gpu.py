"""Faults that users of other libraries met (tests/library/handed_cases.json), on a real GPU.

`test_hNNN_...` is the test of case HNNN; tests/library/test_handed_list.py holds the names against the list.
"""

from __future__ import annotations

import itertools
import multiprocessing
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import tilewave
from tilewave.errors import CaptureError, UsageError
from tilewave.precision import error_in_bounds
from tilewave.runtime.driver import Device
from tilewave.runtime.kernels import gpu_state
from tilewave.runtime.workspace import workspace_pool

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

NAN = float("nan")
GIB = 1 << 30


@pytest.fixture(autouse=True)
def _gpu(device: Device) -> None:
    """Skips the module without a GPU."""


def normal(*shape: int, gpu: int = 0) -> Any:
    return torch.randn(*shape, device=f"cuda:{gpu}")


def right(out: Any, a: Any, b: Any) -> bool:
    host = [tensor.cpu().numpy() for tensor in (out, a, b)]
    return bool(error_in_bounds(*host) <= 1)


def need_memory(nbytes: int) -> None:
    if torch.cuda.mem_get_info()[0] < nbytes:
        pytest.skip(f"needs {nbytes / GIB:.0f} GiB of free device memory")


def need_two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


def test_h001_empty_k_writes_zeros() -> None:
    a, b = normal(10, 1, 0), normal(10, 0, 43200)
    out = normal(10, 1, 43200)
    tilewave.matmul(a, b, out=out)
    assert not out.any()
    assert not torch.signbit(out).any()
    assert not tilewave.matmul(normal(3, 2, 0), normal(3, 0, 3)).any()


def test_h007_small_squares_and_neighbours_of_tiles() -> None:
    for n in (*range(1, 41), 63, 65, 127, 129, 255, 257):
        for transpose_a, transpose_b in itertools.product((False, True), repeat=2):
            a, b = normal(n, n), normal(n, n)
            storage = torch.full((n + 4, n + 4), NAN, device="cuda")
            out = storage[2:-2, 2:-2]
            tilewave.gemm(a, b, transpose_a=transpose_a, transpose_b=transpose_b, out=out)
            assert right(out, a.T if transpose_a else a, b.T if transpose_b else b), n
            out.fill_(NAN)
            assert storage.isnan().all()


def test_h014_a_matrix_broadcast_over_a_batch_is_not_copied() -> None:
    a, b = normal(4096, 4096), normal(192, 4096, 1)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = tilewave.matmul(a, b)
    assert torch.cuda.max_memory_allocated() - before < 2 * out.numel() * 4
    assert right(out[..., 0].T, a, b[..., 0].T)


def test_h020_any_alignment() -> None:
    for offsets in itertools.product(range(4), repeat=4):
        tensors = []
        for offset, shape in zip(offsets, ((128, 64), (64, 96), (128, 96), (96,)), strict=True):
            flat = normal(int(np.prod(shape)) + 4)
            tensors.append(flat[offset : offset + int(np.prod(shape))].view(shape))
        a, b, c, bias = tensors
        out = tilewave.gemm(a, b, c, beta=0.5, bias=bias)
        exact = a.double() @ b.double() + 0.5 * c.double() + bias.double()
        assert torch.allclose(out.double(), exact, rtol=1e-5, atol=1e-4), offsets


def test_h024_more_than_65535_items() -> None:
    for batch in (65535, 65536, 65537, 100_000, 131_072):
        ones = torch.ones(batch, 1, 1, device="cuda")
        assert tilewave.matmul(ones, ones).double().sum() == batch


def test_h025_offsets_beyond_two_to_the_31() -> None:
    rows, columns = 16_909_322, 127
    need_memory(12 * GIB)
    x = torch.empty(rows, columns, device="cuda").normal_()
    v = x[:, 126]
    got = float(tilewave.matmul(v, v))
    exact = float(v.double() @ v.double())
    assert abs(got - exact) <= 1e-5 * exact


def test_h026_more_than_two_to_the_31_outputs() -> None:
    need_memory(14 * GIB)
    n, k = 46341, 64
    a, b = normal(n, k), normal(k, n)
    out = torch.full((n, n), NAN, device="cuda")
    tilewave.matmul(a, b, out=out)
    probes = torch.tensor([0, 1, n // 2, n - 2, n - 1], device="cuda")
    probes = torch.cat([probes, torch.randint(n, (200,), device="cuda")])
    assert right(out[probes][:, probes], a[probes], b[:, probes])
    assert not any(part.isnan().any() for part in out.split(4096))


@pytest.mark.parametrize("swapped", [False, True])
def test_h027_millions_of_tiles_in_one_direction(swapped: bool) -> None:
    need_memory(6 * GIB)
    n = 65536 * 128 + 1
    a, b = normal(8, 4), normal(4, n)
    if swapped:
        a, b = b.T.contiguous(), a.T.contiguous()
    out = tilewave.matmul(a, b)
    exact = a.double() @ b.double()
    assert torch.allclose(out.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [NAN, float("inf")])
def test_h032_beta_zero_does_not_read_c(value: float) -> None:
    for schedule in ("data_parallel", "split_k", "stream_k"):
        for m, n, k in ((257, 255, 2000), (128, 256, 4096), (1, 70, 300)):
            a, b, c = normal(m, k), normal(k, n), torch.full((m, n), value, device="cuda")
            tilewave.gemm(a, b, c, beta=0.0, out=c, schedule=schedule)
            assert right(c, a, b), (schedule, m, n, k)


def test_h037_subnormals_are_kept() -> None:
    def product(x: float, y: float) -> float:
        return float(
            tilewave.matmul(torch.full((1, 1), x, device="cuda"), torch.full((1, 1), y, device="cuda"))
        )

    tiny = float(np.finfo(np.float32).tiny)
    assert product(tiny, 0.5) == tiny / 2
    assert product(2.0**-149, 2.0) == 2.0**-148
    a = torch.full((300, 50), 2.0**-80, device="cuda")
    b = torch.full((50, 400), 2.0**-65, device="cuda")
    assert torch.all(tilewave.matmul(a, b).double() == 50 * 2.0**-145)


def test_h042_out_is_an_input() -> None:
    a = torch.ones(2, 999, 999, device="cuda")
    tilewave.matmul(a, a, out=a)
    assert torch.all(a == 999)


def test_h043_chained_in_place() -> None:
    x, y, z = (normal(500, 500) for _ in range(3))
    expected = tilewave.matmul(tilewave.matmul(x, y), z)
    tilewave.matmul(x, y, out=y)
    tilewave.matmul(y, z, out=y)
    assert torch.equal(y, expected)


def test_h050_work_goes_to_the_device_of_the_operands() -> None:
    need_two_gpus()
    for gpu in (1, 0):
        torch.cuda.set_device(0)
        a, b = normal(300, 200, gpu=gpu), normal(200, 100, gpu=gpu)
        out = tilewave.matmul(a, b)
        assert out.device.index == gpu
        assert torch.cuda.current_device() == 0
        assert right(out, a, b)


def test_h051_caches_are_per_device() -> None:
    need_two_gpus()
    for gpu in (0, 1, 0):
        a, b = normal(200, 3000, gpu=gpu), normal(3000, 100, gpu=gpu)
        assert right(tilewave.gemm(a, b, schedule="split_k"), a, b)


def test_h054_the_fill_is_always_seen() -> None:
    for side in (torch.cuda.Stream(), torch.cuda.ExternalStream(torch.cuda.Stream().cuda_stream)):
        b = torch.ones(256, 256, device="cuda")
        a = torch.zeros(256, 256, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            for turn in range(1, 101):
                torch.cuda._sleep(300_000)
                a.fill_(turn)
                total = tilewave.matmul(a, b).sum()
                assert float(total) == turn * 256.0**3


def test_h054_the_fill_is_always_seen_by_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    for side in (cupy.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)):
        with side:
            a, b = cupy.zeros((512, 512), np.float32), cupy.ones((512, 512), np.float32)
            big = cupy.random.standard_normal((2048, 2048), dtype=np.float32)
            for turn in range(1, 101):
                big = big @ big * np.float32(1e-3)
                a.fill(turn)
                assert float(tilewave.matmul(a, b).sum()) == turn * 512.0**3


def test_h055_dependent_steps_on_a_fresh_stream() -> None:
    n = 2048
    start = normal(n, n)
    results = []
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            m = start.clone()
            for _ in range(5):
                m -= tilewave.matmul(m, m) / n
        torch.cuda.synchronize()
        results.append(m)
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((333, 77, 2222), {"schedule": "split_k:7"}),
        ((512, 512, 512), {}),
        ((2049, 2049, 2049), {}),  # three launches, each with a kernel of its own
        ((1, 1000, 4000), {}),
        ((1000, 1000, 3), {}),
        ((1024, 1024, 1024), {"precision": "fp16x3"}),
    ],
)
def test_h058_a_cold_capture_is_refused_and_a_warm_one_replays(
    shape: tuple[int, int, int], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kernel and launch is forgotten for the cold capture: tests before this one have loaded some."""
    m, n, k = shape
    a, b, out = normal(m, k), normal(k, n), torch.full((m, n), NAN, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with monkeypatch.context() as patched:
        patched.setattr(gpu_state(0), "_kernels", {})
        patched.setattr("tilewave.runtime.fp16x3._modes", {})
        patched.setattr("tilewave.warm._libraries", {})
        with torch.cuda.graph(graph):
            out.zero_()  # PyTorch warns of an empty graph
            for _ in range(2):
                with pytest.raises(CaptureError, match="prepare"):
                    tilewave.gemm(a, b, out=out, **options)
    for _ in range(2):
        graph.replay()
        assert not out.any()
    tilewave.prepare(tilewave.plan_for(a, b, out=out, **options))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tilewave.gemm(a, b, out=out, **options)
    for _ in range(3):
        out.fill_(NAN)
        graph.replay()
        assert right(out, a, b)


def test_h059_captures_do_not_pile_up_memory() -> None:
    """A hundred graphs of one product, made and freed: workspace of the caller's keeps memory flat."""
    a, b = normal(200, 3000), normal(3000, 176)
    out = torch.empty(200, 176, device="cuda")
    (plan,) = tilewave.plan_for(a, b, out=out, schedule="split_k")
    tilewave.prepare([plan])
    memory = torch.empty(plan.workspace_bytes + 4096, dtype=torch.uint8, device="cuda")
    held = []
    for _ in range(100):
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            tilewave.gemm(a, b, out=out, schedule="split_k", workspace=memory)
        graph.replay()
        torch.cuda.synchronize()
        del graph
        held.append((workspace_pool(gpu_state(0)).nbytes(), torch.cuda.memory_allocated()))
    assert len(set(held)) == 1
    assert right(out, a, b)


def test_h062_threads_keep_their_own_streams() -> None:
    def work(index: int) -> bool:
        with torch.cuda.stream(torch.cuda.Stream()):
            a, b = normal(40 + index, 300 + 50 * index), normal(300 + 50 * index, 60)
            first = tilewave.matmul(a, b)
            same = all(torch.equal(tilewave.matmul(a, b), first) for _ in range(500))
            return same and right(first, a, b)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def _product_in_child(connection: Any) -> None:
    """Use the GPU in a child: right where the parent had not used it, refused where it had."""
    try:
        a = np.arange(9, dtype=np.float32).reshape(3, 3)
        connection.send(bool(np.array_equal(tilewave.matmul(a, a), a @ a)))
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # JAX warns of any fork
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_h063_a_fork_after_use_is_named() -> None:
    tilewave.matmul(normal(3, 3), normal(3, 3))
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_product_in_child, args=(theirs,))
    child.start()
    assert ours.poll(60)
    answer = ours.recv()
    child.join(60)
    assert answer.startswith("DeviceError: this process was forked")


def test_h063_a_fork_before_use_works() -> None:
    code = """
import os, numpy as np, tilewave
a = np.arange(9, dtype=np.float32).reshape(3, 3)
child = os.fork()
if child == 0:
    from tilewave.runtime.driver import probe
    assert probe().usable
    os._exit(0 if np.array_equal(tilewave.matmul(a, a), a @ a) else 1)
assert os.waitpid(child, 0)[1] == 0
print("right")
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert answer.stdout.strip() == "right", answer.stderr


def test_h066_rows_do_not_depend_on_the_batch() -> None:
    for fill in (lambda x: x.fill_(50), lambda x: x.normal_()):
        x = torch.empty(2, 93, 3286, device="cuda")
        fill(x)
        for n in (65, 1, 64):
            w = normal(3286, n)
            whole = tilewave.gemm(x, w, batch_invariant=True)
            for item in range(2):
                assert torch.equal(tilewave.gemm(x[item], w, batch_invariant=True), whole[item])
            for rows in (slice(0, 1), slice(5, 40), slice(92, 93)):
                assert torch.equal(tilewave.gemm(x[0, rows], w, batch_invariant=True), whole[0, rows])


def test_h067_ten_processes_give_the_same_bits() -> None:
    code = """
import hashlib, torch, tilewave
generator = torch.Generator(device="cuda").manual_seed(5)
a, b = (torch.randn(4096, 4096, device="cuda", generator=generator) for _ in range(2))
print(hashlib.sha256(tilewave.matmul(a, b).cpu().numpy().tobytes()).hexdigest())
"""
    answers = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
        ).stdout
        for _ in range(10)
    }
    assert len(answers) == 1


def test_h070_out_needs_no_clearing() -> None:
    a, b = normal(200, 5000), normal(5000, 130)
    results = []
    for _ in range(2):
        out = torch.full((200, 130), 1e30, device="cuda")
        tilewave.gemm(a, b, out=out, schedule="split_k:8")
        results.append(out)
    assert torch.equal(*results)
    assert right(results[0], a, b)


def test_h071_cut_tiles_beside_a_kernel_that_holds_the_gpu() -> None:
    a, b = normal(1024, 4096), normal(4096, 832)
    torch.cuda.synchronize()
    busy, ours = torch.cuda.Stream(), torch.cuda.Stream()
    for pieces in range(2, 17):
        with torch.cuda.stream(busy):
            torch.cuda._sleep(20_000_000)
        with torch.cuda.stream(ours):
            out = tilewave.gemm(a, b, schedule=f"split_k:{pieces}")
        ours.synchronize()
        assert right(out, a, b), pieces
    torch.cuda.synchronize()


def test_h072_a_hundred_thousand_launches_reuse_their_counters() -> None:
    a, b = normal(130, 700), normal(700, 150)
    out = torch.empty(130, 150, device="cuda")
    expected = tilewave.gemm(a, b, schedule="stream_k")
    for _ in range(100_000):
        tilewave.gemm(a, b, schedule="stream_k", out=out)
    assert torch.equal(out, expected)
    with pytest.raises(UsageError):
        tilewave.gemm(a, b[:-1], schedule="stream_k", out=out)
    assert torch.equal(tilewave.gemm(a, b, schedule="stream_k"), expected)


@pytest.mark.parametrize("sms", [7, 14, 28])
def test_h075_few_sms(sms: int) -> None:
    """Blocks walk over several tiles, or over several pieces of cut tiles, and are no more than the SMs."""
    a, b = normal(900, 3000), normal(3000, 700)
    for schedule in (None, "data_parallel", "stream_k_walk", "stream_k", "split_k", "split_k:5"):
        out = torch.full((900, 700), NAN, device="cuda")
        tilewave.gemm(a, b, schedule=schedule, max_sms=sms, out=out)
        torch.cuda.synchronize()
        assert right(out, a, b), schedule
        for plan in tilewave.plan_for(a, b, out=out, schedule=schedule, max_sms=sms):
            assert plan.blocks <= sms, schedule
            assert not plan.edges


def test_h076_a_cap_on_sms_costs_in_proportion() -> None:
    a, b = normal(8192, 1024), normal(1024, 8192)
    out = torch.empty(8192, 8192, device="cuda")
    total = gpu_state(0).spec.sms

    def milliseconds(max_sms: int | None) -> float:
        times = []
        for _ in range(7):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            tilewave.gemm(a, b, out=out, max_sms=max_sms)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return float(np.median(times[2:]))

    whole, capped = milliseconds(None), milliseconds(total - 8)
    assert capped < 1.3 * whole


def test_h095_nothing_is_rounded_to_ten_bits() -> None:
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        one = tilewave.matmul(torch.tensor([[1024.5]], device="cuda"), torch.ones(1, 1, device="cuda"))
        assert float(one) == 1024.5
        a = torch.eye(128, device="cuda")
        a[0, 0] = 1024.5
        assert torch.equal(tilewave.matmul(a, torch.eye(128, device="cuda")), a)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def test_h107_rounding_is_told_from_a_bug_as_k_grows() -> None:
    for k in (10**3, 10**4, 10**5, 10**6, 10**7):
        for a, b in ((torch.rand, torch.rand), (torch.randn, torch.randn)):
            x, y = a(1, k, device="cuda"), b(k, 1, device="cuda")
            verdict = tilewave.check(x, y, tilewave.matmul(x, y))
            assert verdict.rounding
            assert verdict.error <= 8 / k**0.5, str(verdict)


def test_h115_tensors_whose_meaning_would_be_lost() -> None:
    b = normal(4, 4)
    a = normal(4, 4).requires_grad_()
    tilewave.matmul(a, b).sum().backward()
    assert torch.allclose(a.grad, b.sum(1).expand(4, 4))
    with torch.no_grad():
        assert not tilewave.matmul(a, b).requires_grad
    with pytest.raises(UsageError, match=r"requires a gradient meets .*detach"):
        tilewave.matmul(a, b.cpu().numpy())
    lazy = torch.randn(4, 4, dtype=torch.complex64, device="cuda").conj().imag
    assert lazy.is_neg()
    with pytest.raises(UsageError, match=r"a\.resolve_neg\(\)"):
        tilewave.matmul(lazy, b)


def test_h115_the_consumer_waits_for_the_producer() -> None:
    cupy = pytest.importorskip("cupy")
    side = torch.cuda.Stream()
    ones = cupy.ones((1024, 1024), np.float32)
    cupy.cuda.Device().synchronize()
    for _ in range(20):
        a = torch.zeros(1024, 1024, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            a.fill_(2)
            with cupy.cuda.Stream(non_blocking=True):
                out = tilewave.matmul(ones, a)  # CuPy's stream, which must wait for PyTorch's
                assert float(out.sum()) == 2 * 1024.0**3


def test_h116_negative_strides() -> None:
    cupy = pytest.importorskip("cupy")
    a, b = (cupy.random.standard_normal(shape, dtype=np.float32) for shape in ((200, 300), (300, 100)))
    for flipped in (cupy.flip(a), cupy.flip(a, 0), cupy.flip(a, 1)):
        out = tilewave.matmul(flipped, cupy.flip(b))
        assert error_in_bounds(out.get(), flipped.get(), cupy.flip(b).get()) <= 1


def test_h129_bias_follows_its_axis_in_every_layout() -> None:
    bias = torch.arange(1.0, 9.0, device="cuda")
    for flips in itertools.product((False, True), repeat=3):
        a, b, out = (torch.randint(-4, 5, (8, 8), device="cuda").float() for _ in range(3))
        a, b, out = (x.T.contiguous().T if flip else x for x, flip in zip((a, b, out), flips, strict=True))
        for axis in (-1, -2):
            tilewave.gemm(a, b, bias=bias, bias_axis=axis, out=out)
            exact = (a.double() @ b.double()).float() + (bias if axis == -1 else bias[:, None])
            assert torch.equal(out, exact)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_h130_activation_waits_for_the_last_partial_sum(activation: str) -> None:
    k = 4096
    a, b = normal(100, k).abs(), normal(k, 120).abs()
    a[:, : k // 2] *= -1
    b[k // 2 :] *= 2
    bias = normal(120)
    exact = a.double() @ b.double() + bias.double()
    assert (exact > 10).all()
    for schedule in (None, "split_k:2", "split_k:8", "stream_k"):
        out = tilewave.gemm(a, b, bias=bias, activation=activation, schedule=schedule)
        assert torch.allclose(out.double(), exact, rtol=1e-4)
