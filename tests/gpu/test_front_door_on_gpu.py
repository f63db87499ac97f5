"""Arrays of PyTorch, CuPy, JAX, Numba's kind and NumPy through the front door on a real GPU."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tilewave
from tilewave.errors import OperandTypeError, UsageError
from tilewave.precision import error_in_bounds
from tilewave.runtime import driver, interop
from tilewave.runtime.driver import Device, DeviceArray
from tilewave.runtime.shared import SharedArray

pytestmark = pytest.mark.gpu
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take three quarters of the GPU

Array = np.ndarray[Any, Any]


class InterfaceArray:
    """What Numba and others offer: the CUDA array interface and nothing else."""

    def __init__(self, device: Device, host: Array) -> None:
        self.memory = DeviceArray.from_numpy(device, host)
        self.__cuda_array_interface__ = dict(self.memory.__cuda_array_interface__)

    def to_numpy(self) -> Array:
        return self.memory.to_numpy()


class ExchangedArray:
    """An object with DLPack and nothing else."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __dlpack__(self, **arguments: Any) -> object:
        return self.inner.__dlpack__(**arguments)

    def __dlpack_device__(self) -> Any:
        return self.inner.__dlpack_device__()


def makers(device: Device) -> dict[str, tuple[Callable[[Array], Any], Callable[[Any], Array]]]:
    """For each kind of array on the GPU: from NumPy, and back. What is not installed is left out."""
    found: dict[str, tuple[Callable[[Array], Any], Callable[[Any], Array]]] = {
        "interface": (lambda host: InterfaceArray(device, host), lambda array: array.to_numpy()),
    }
    try:
        import torch
    except ImportError:
        pass
    else:
        found["torch"] = (lambda host: torch.from_numpy(host).cuda(), lambda array: array.cpu().numpy())
        found["dlpack"] = (
            lambda host: ExchangedArray(torch.from_numpy(host).cuda()),
            lambda array: array.to_numpy(),
        )
    try:
        import cupy
    except ImportError:
        pass
    else:
        found["cupy"] = (cupy.asarray, lambda array: array.get())
    try:
        import jax
    except ImportError:
        pass
    else:
        if any(each.platform == "gpu" for each in jax.devices()):
            found["jax"] = (jax.numpy.asarray, np.asarray)
    return found


KINDS = ("torch", "cupy", "jax", "interface", "dlpack")


@pytest.mark.parametrize("kind_b", KINDS)
@pytest.mark.parametrize("kind_a", KINDS)
def test_every_pair_of_libraries(device: Device, rng: np.random.Generator, kind_a: str, kind_b: str) -> None:
    made = makers(device)
    if kind_a not in made or kind_b not in made:
        pytest.skip(f"{kind_a} or {kind_b} is not installed with CUDA")
    for shapes in (((70, 300), (300, 90)), ((3, 17, 65), (65, 5)), ((40,), (40, 7)), ((9,), (9,))):
        a, b = (rng.standard_normal(shape, dtype=np.float32) for shape in shapes)
        result = tilewave.matmul(made[kind_a][0](a), made[kind_b][0](b))
        back = made[kind_a][1]
        got = back(result)
        assert got.shape == np.matmul(a, b).shape
        if kind_a in ("torch", "cupy", "jax"):
            assert type(result) is type(made[kind_a][0](a))
        else:
            assert isinstance(result, SharedArray)
        wide_a, wide_b = np.atleast_2d(a), b if b.ndim > 1 else b[:, np.newaxis]
        assert error_in_bounds(got.reshape(np.matmul(wide_a, wide_b).shape), wide_a, wide_b) <= 1


@pytest.mark.parametrize("kind", ["torch", "cupy"])
def test_epilogue_out_and_layouts(device: Device, rng: np.random.Generator, kind: str) -> None:
    if kind not in makers(device):
        pytest.skip(f"{kind} is not installed with CUDA")
    make, back = makers(device)[kind]
    a, b, c = (rng.standard_normal(shape, dtype=np.float32) for shape in ((90, 60), (90, 70), (60, 70)))
    bias = rng.standard_normal(60, dtype=np.float32)
    storage = make(np.full((70, 64), np.nan, np.float32))
    out = storage[:, 2:62].T
    result, before = tilewave.gemm(
        make(a),
        make(b),
        make(c),
        alpha=0.5,
        beta=-2.0,
        bias=make(bias),
        bias_axis=-2,
        activation="relu",
        return_preactivation=True,
        transpose_a=True,
        out=out,
    )
    assert result is out
    exact = 0.5 * (a.T.astype(np.float64) @ b) - 2.0 * c + bias[:, np.newaxis]
    assert np.allclose(back(before), exact, rtol=1e-5, atol=1e-4)
    assert np.array_equal(back(out), np.maximum(back(before), 0))
    assert np.isnan(back(storage)[:, [0, 1, 62, 63]]).all()


@pytest.mark.parametrize("kind", ["torch", "cupy"])
def test_out_that_overlaps_an_operand(device: Device, rng: np.random.Generator, kind: str) -> None:
    if kind not in makers(device):
        pytest.skip(f"{kind} is not installed with CUDA")
    make, back = makers(device)[kind]
    host = rng.standard_normal((400, 300), dtype=np.float32)
    storage = make(host)
    a, b = storage[:200, :200], make(host[:200].copy())
    tilewave.matmul(a, b, out=storage[100:300])
    assert error_in_bounds(back(storage)[100:300].copy(), host[:200, :200], host[:200]) <= 1


def test_host_arrays_are_staged(device: Device, rng: np.random.Generator) -> None:
    """The GPU's bits come back: equal to those of the same product on the device, not to NumPy's."""
    made = makers(device)
    a = rng.standard_normal((300, 1, 2000), dtype=np.float32)
    b = rng.standard_normal((2000, 260), dtype=np.float32)[::-1]
    got = tilewave.matmul(a, b)
    assert isinstance(got, np.ndarray)
    make, back = made["interface"]
    assert np.array_equal(got, back(tilewave.matmul(make(a), make(np.ascontiguousarray(b)))))
    (plan,) = tilewave.plan_for(a, b)
    assert any("pinned memory" in note for note in plan.notes)
    out = np.full((300, 520), np.nan, np.float32)
    tilewave.gemm(a[:, 0], b, out=out[:, ::2], activation="silu")
    assert np.isnan(out[:, 1::2]).all()
    assert not np.isnan(out[:, ::2]).any()
    wide = np.broadcast_to(b, (7, *b.shape))
    assert (
        error_in_bounds(tilewave.matmul(a[:5, 0], wide), np.broadcast_to(a[:5, 0], (7, 5, 2000)), wide) <= 1
    )


def test_a_large_host_product_travels_in_pieces(device: Device, rng: np.random.Generator) -> None:
    a = rng.standard_normal((5000, 3000), dtype=np.float32)
    b = rng.standard_normal((3000, 4000), dtype=np.float32)
    got = tilewave.matmul(a, b)
    rows = [0, 2500, 4999]
    assert error_in_bounds(got[rows], a[rows], b) <= 1


def test_jax_owns_its_result(
    device: Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory made here is JAX's afterwards: it is used by jitted code and freed when JAX lets go of it."""
    jax = pytest.importorskip("jax")
    if "jax" not in makers(device):
        pytest.skip("JAX has no GPU")
    # What the GPU has free is no measure: other processes may use it too.
    held, handed, kept = set(), [], len(interop._kept)
    allocate, release = SharedArray.allocate, driver._release

    def counted(shape: tuple[int, ...], device: int, stream: int) -> SharedArray:
        made = allocate(shape, device, stream)
        held.add(made.address)
        handed.append(made.address)
        return made

    def released(context: Any, name: str, *arguments: Any) -> None:
        if name == "cuMemFree":
            held.discard(int(arguments[0]))
        release(context, name, *arguments)

    monkeypatch.setattr(SharedArray, "allocate", counted)
    monkeypatch.setattr(driver, "_release", released)
    a = jax.numpy.asarray(rng.standard_normal((1000, 1000), dtype=np.float32))
    chain = jax.jit(lambda x: x * 2 + 1)
    expected = np.asarray(chain(tilewave.matmul(a, a)))
    most = 0
    for _ in range(30):
        assert np.array_equal(np.asarray(chain(tilewave.matmul(a, a))), expected)
        gc.collect()
        most = max(most, len(held))
    assert len(handed) == 31  # all results were made here,
    assert most <= 5  # and did not pile up
    result = tilewave.matmul(a, a)
    assert len(held) >= 1
    assert np.isfinite(np.asarray(result)).all()
    del result
    deadline = time.monotonic() + 10
    while held and time.monotonic() < deadline:  # JAX may let go in a thread of its own
        gc.collect()
        time.sleep(0.01)
    assert not held
    assert len(interop._kept) <= kept + 2  # operands are let go at the next call
    with pytest.raises(UsageError, match="read-only"):
        tilewave.matmul(a, a, out=jax.numpy.zeros((1000, 1000)))
    with pytest.raises(UsageError, match="traced by JAX"):
        jax.jit(tilewave.matmul)(a, a)


def test_jax_values_are_ready_before_they_are_read(device: Device) -> None:
    jax = pytest.importorskip("jax")
    if "jax" not in makers(device):
        pytest.skip("JAX has no GPU")
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 40, lambda _, y: y @ x / 2048, x))
    ones = jax.numpy.ones((2048, 2048))
    for _ in range(5):
        result = tilewave.matmul(slow(ones), ones)  # the operand is dropped while the work is under way
        assert np.all(np.asarray(result) == 2048)


def test_torch_gradients_notice_a_write(device: Device) -> None:
    torch = pytest.importorskip("torch")
    x = torch.randn(40, 40, device="cuda", requires_grad=True)
    y = x * 1.0
    loss = (y * y).sum()
    with torch.no_grad():
        tilewave.matmul(torch.randn(40, 40, device="cuda"), torch.randn(40, 40, device="cuda"), out=y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_torch_tensors_that_are_refused(device: Device) -> None:
    torch = pytest.importorskip("torch")
    b = torch.randn(4, 4, device="cuda")
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.bool, torch.complex64):
        with pytest.raises(OperandTypeError, match=f"a is {str(dtype).removeprefix('torch.')}"):
            tilewave.matmul(torch.ones(4, 4, device="cuda", dtype=dtype), b)
        out = torch.ones(4, 4, device="cuda", dtype=dtype)
        with pytest.raises(OperandTypeError, match="out is"):
            tilewave.matmul(b, b, out=out)
        assert torch.all(out == 1)
    with pytest.raises(UsageError, match=r"to_dense\(\)"):
        tilewave.matmul(b.to_sparse(), b)
    for apart, words in (
        ((b.to("meta"), b), "a on meta, b on cuda:0"),
        ((b, b.to("meta")), "a on cuda:0, b on meta"),
        ((b, b.cpu()), "a on GPU 0, b on the host"),
        ((b.cpu(), b), "a on the host, b on GPU 0"),
    ):
        with pytest.raises(UsageError, match=f"operands lie apart: {words}; accepted are"):
            tilewave.matmul(*apart)


def test_torch_tensors_without_memory_give_shapes(device: Device) -> None:
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(7, 4, device="cuda")
        result = tilewave.matmul(fake, fake.T)
        assert (tuple(result.shape), result.device.type) == ((7, 7), "cuda")
    meta = torch.empty(7, 4, device="meta")
    assert tuple(tilewave.matmul(meta, meta.T).shape) == (7, 7)


def test_memory_for_another_stream_is_not_reused_too_early(device: Device) -> None:
    """Results for a busy stream come from that stream's pool, whose memory nobody else is given."""
    torch = pytest.importorskip("torch")
    side = torch.cuda.Stream()
    a = torch.ones(512, 512, device="cuda")
    torch.cuda.synchronize()
    for turn in range(50):
        torch.cuda._sleep(2_000_000)
        scratch = torch.full((512, 512), float(turn), device="cuda")  # in work on the current stream
        kept = scratch * 1
        del scratch  # the current stream's pool may hand it out again
        out = tilewave.matmul(a, a, stream=side)
        side.synchronize()
        assert torch.all(out == 512)
        torch.cuda.synchronize()
        assert torch.all(kept == turn)


def test_check_takes_device_arrays(device: Device, rng: np.random.Generator) -> None:
    for make, _ in makers(device).values():
        a, b = (rng.standard_normal(shape, dtype=np.float32) for shape in ((50, 60), (60, 40)))
        x, y = make(a), make(b)
        if isinstance(x, ExchangedArray):
            continue
        assert tilewave.check(x, y, tilewave.matmul(x, y)).rounding


def test_groups_of_differing_sizes(device: Device, rng: np.random.Generator) -> None:
    make, back = makers(device)["interface"]
    sizes = [(5, 6, 7), (1, 1, 1), (300, 20, 900), (64, 64, 64)]
    pairs = [
        (rng.standard_normal((m, k), dtype=np.float32), rng.standard_normal((k, n), dtype=np.float32))
        for m, n, k in sizes
    ]
    results = tilewave.grouped_gemm([(make(a), make(b)) for a, b in pairs])
    for (a, b), result in zip(pairs, results, strict=True):
        assert error_in_bounds(back(result), a, b) <= 1
