"""Faults that users of other libraries met (handed_cases.json): devices, streams, threads, schedules, bits.

Named as in test_handed_cases.py. What needs a real stream, a second GPU or a capture is in
tests/gpu/test_handed_cases_on_gpu.py; here is what the front door and the planner decide.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
from host_gpu import CupyArray, FakeGpu
from paths import Path

import tilewave
from tilewave.device.driver import ProcessState
from tilewave.errors import DeviceError
from tilewave.precision import error_in_bounds

Rng = np.random.Generator
F = np.float32


def normal(rng: Rng, *shape: int) -> np.ndarray[Any, Any]:
    return rng.standard_normal(shape, dtype=F)


def test_h050_work_goes_to_the_device_of_the_operands(gpu: FakeGpu, rng: Rng) -> None:
    a = normal(rng, 4, 4)
    for device in (1, 0):
        tilewave.matmul(CupyArray(a, device), CupyArray(a, device))
    assert [submission.device for submission in gpu.run.submissions] == [1, 0]


def test_h051_what_is_remembered_does_not_mix_devices(gpu: FakeGpu, rng: Rng) -> None:
    """Equal problems on two devices share a form, never a device."""
    a = normal(rng, 4, 4)
    for device in (0, 1, 0):
        tilewave.matmul(CupyArray(a, device), CupyArray(a, device))
    assert [submission.device for submission in gpu.run.submissions] == [0, 1, 0]
    assert len({submission.problem for submission in gpu.run.submissions}) == 1


def test_h054_the_current_stream_of_the_library_is_used(gpu: FakeGpu, rng: Rng) -> None:
    a = CupyArray(normal(rng, 4, 4))
    for stream in (0x11, 0x12, 0x11):
        with gpu.cupy.on(stream):
            tilewave.matmul(a, a)
    assert [submission.stream for submission in gpu.run.submissions] == [0x11, 0x12, 0x11]


def test_h055_dependent_steps_stay_on_one_stream(gpu: FakeGpu, rng: Rng) -> None:
    start = normal(rng, 16, 16)
    sequences = []
    for stream in (0, 0x33):
        m = CupyArray(start.copy())
        with gpu.cupy.on(stream):
            for _ in range(5):
                tilewave.gemm(m, m, m, alpha=-1 / 16, beta=1.0, out=m)
        sequences.append(m.host)
        assert {submission.stream for submission in gpu.run.submissions[-10:]} == {stream}
    assert np.array_equal(*sequences)
    exact = start.astype(np.float64)
    for _ in range(5):
        exact = exact - exact @ exact / 16
    assert np.allclose(sequences[0], exact, rtol=1e-4, atol=1e-4)


def test_h062_threads_keep_their_own_streams(gpu: FakeGpu, rng: Rng) -> None:
    inputs = [normal(rng, 8, 8) for _ in range(8)]
    failures: list[str] = []

    def work(index: int) -> None:
        a = CupyArray(inputs[index])
        exact = inputs[index].astype(np.float64) @ inputs[index]
        for _ in range(60):
            got = tilewave.matmul(a, a, stream=0x100 + index)
            if not np.allclose(got.host, exact, rtol=1e-5, atol=1e-5):
                failures.append(f"thread {index} got another product")

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for submission in gpu.run.submissions:
        index = submission.stream - 0x100
        assert submission.pointers.a == inputs[index].ctypes.data


def _product_in_child(connection: Any) -> None:
    a = np.arange(9, dtype=F).reshape(3, 3)
    connection.send(np.array_equal(tilewave.matmul(a, a), a @ a))


def test_h063_a_fork_after_import_works_and_one_after_use_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second half on a GPU is in tests/gpu/test_threads_and_forks_on_gpu.py."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_product_in_child, args=(theirs,))
    child.start()
    assert ours.poll(30)
    assert ours.recv()
    child.join(30)
    monkeypatch.setattr(ProcessState, "forked", True)
    a = np.ones((3, 3), F)
    with pytest.raises(DeviceError, match="'spawn' or 'forkserver'"):
        tilewave.matmul(a, a)


def test_h066_rows_do_not_depend_on_the_batch(kernels: Path, rng: Rng) -> None:
    k = 400  # the GPU's test has the case's 3286
    x = normal(rng, 2, 31, k)
    x[:, ::2] = 50
    for n in (65, 1, 64):
        w = normal(rng, k, n)
        whole = kernels.matmul(x, w, batch_invariant=True)
        assert error_in_bounds(whole, x, w) <= 1
        for item in range(2):
            assert np.array_equal(kernels.matmul(x[item], w, batch_invariant=True), whole[item])
        for rows in (slice(0, 1), slice(4, 11)):
            part = kernels.matmul(x[0, rows], w, batch_invariant=True)
            assert np.array_equal(part, whole[0, rows])


def test_h067_plans_are_the_same_in_every_process() -> None:
    """Bits of fresh processes are compared in the GPU's test."""
    code = (
        "import tilewave, hashlib; p = tilewave.plan(4096, 4096, 4096, device='H200');"
        "print(hashlib.sha256(repr(p).encode()).hexdigest())"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
        ).stdout
        for _ in range(2)
    }
    assert len(answers) == 1


def test_h070_out_needs_no_clearing(kernels: Path, rng: Rng) -> None:
    a, b = normal(rng, 40, 2000), normal(rng, 2000, 30)
    out = np.full((40, 30), 1e30, F)
    results = []
    for _ in range(2):
        kernels.matmul(a, b, out=out, schedule="split_k:4")
        assert kernels.plans[-1].cut.pieces > 1
        results.append(out.copy())
        out[...] = 1e30
    assert np.array_equal(*results)
    assert error_in_bounds(results[0], a, b) <= 1


@pytest.mark.parametrize("sms", [7, 14, 28])
def test_h075_few_sms(kernels: Path, rng: Rng, sms: int) -> None:
    """No block waits for one that may not be resident: the emulator runs one block at a time."""
    kernels.with_sms(sms)
    a, b = normal(rng, 130, 1400), normal(rng, 1400, 70)
    for schedule in ("stream_k", "split_k:5", None):
        assert error_in_bounds(kernels.matmul(a, b, schedule=schedule), a, b) <= 1
        assert kernels.plans[-1].sms == sms


def test_h076_a_cap_on_sms_is_honoured(kernels: Path, rng: Rng) -> None:
    """How time degrades beside another kernel is measured on a GPU."""
    a, b = normal(rng, 130, 300), normal(rng, 300, 170)
    for cap in (1, 2, 5):
        got = kernels.matmul(a, b, max_sms=cap)
        assert kernels.plans[-1].blocks <= cap
        assert error_in_bounds(got, a, b) <= 1
    whole = tilewave.plan(8192, 8192, 1024, device="H200")
    capped = tilewave.plan(8192, 8192, 1024, device="H200", max_sms=124)
    assert whole.estimate.total <= capped.estimate.total < 1.3 * whole.estimate.total
