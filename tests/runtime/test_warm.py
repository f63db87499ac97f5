"""The short way launches what the long way does, byte for byte, and takes only what the long way takes."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.library.host_gpu import CupyArray, FakeStreams, TorchTensor, fake_cupy, fake_torch
from tests.runtime.fake_gpu import FakeGpu, Result

import tilewave
from tilewave import arrays, recording, warm
from tilewave.errors import CaptureError, DeviceError, TilewaveError, UsageError
from tilewave.runtime import execute, interop, prepared
from tilewave.runtime.kernels import GpuState, gpu_state
from tilewave.runtime.workspace import workspace_pool

F = np.float32
MOST_FUNCTIONS = 6
"""Functions of tilewave that a warm product may run through; 5 when this was written."""
MOST_BUILTINS = 8
"""Functions in C that those may call, arrays' and the driver's aside; 6 when this was written."""


class Tensor(TorchTensor):
    """A tensor of a stand-in for PyTorch on GPU 0."""

    def new_empty(self, shape: tuple[int, ...]) -> Tensor:
        return Tensor(np.empty(shape, F))


class Parameter(Tensor):
    pass


class Matrix(CupyArray):
    """An array of a stand-in for CuPy."""

    def __init__(self, host: Any, dtype: Any = F, device: int = 0) -> None:
        super().__init__(host if isinstance(host, np.ndarray) else np.empty(host, dtype), device)
        self.data = types.SimpleNamespace(ptr=self.data.ptr, device_id=device)


class Gpu:
    """The fake driver with arrays of both libraries, and counts of what went the long way."""

    def __init__(self, driver: FakeGpu, streams: FakeStreams) -> None:
        self.driver, self.streams = driver, streams
        self.collected = 0

    def launch(self, call: Callable[[], Any]) -> tuple[Any, bytes]:
        """What the driver was given by ``call``, which launches once."""
        before = len(self.driver.launches)
        call()
        ((arguments, block),) = self.driver.launches[before:]
        return (*arguments[:9], arguments[10]), block

    def is_short(self, call: Callable[[], Any]) -> bool:
        """Whether a call goes the short way; what it raises is swallowed."""
        before = self.collected
        with contextlib.suppress(TilewaveError):
            call()
        return self.collected == before


@pytest.fixture
def warm_gpu(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    streams = FakeStreams()
    torch, cupy = fake_torch(streams), fake_cupy(streams)
    torch.Tensor, torch.nn = Tensor, types.SimpleNamespace(Parameter=Parameter)  # type: ignore[attr-defined]
    torch.compiler = types.SimpleNamespace(is_compiling=lambda: False)  # type: ignore[attr-defined]
    torch.autograd.forward_ad = types.SimpleNamespace(_current_level=-1)  # type: ignore[attr-defined]
    vars(torch._C).update(  # type: ignore[attr-defined]
        _dynamo=types.SimpleNamespace(guards=types.SimpleNamespace()),
        _cuda_getDevice=lambda: 0,
        _len_torch_dispatch_stack=lambda: 0,
        _len_torch_function_stack=lambda: 0,
        _are_functorch_transforms_active=lambda: False,
        _get_tracing_state=lambda: None,
    )
    torch.empty = lambda shape, dtype, device: Tensor(np.empty(shape, F))  # type: ignore[attr-defined]
    cupy.ndarray, cupy.empty = Matrix, Matrix  # type: ignore[attr-defined]
    cupy.cuda.runtime = types.SimpleNamespace(getDevice=lambda: 0, getDeviceCount=lambda: 2)  # type: ignore[attr-defined]
    for name, module in (("torch", torch), ("cupy", cupy)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(arrays, "_viewers", {})
    monkeypatch.setattr(warm, "_libraries", {})
    monkeypatch.setattr(prepared, "bindings", lambda: gpu)
    monkeypatch.setattr(
        GpuState, "_load", lambda self, instance: self._kernels.setdefault(instance.name, len(self._kernels))
    )
    gpu.current = 700  # the primary context of GPU 0
    found = Gpu(gpu, streams)
    from tilewave import api

    collect = api.collect

    def counted(*arguments: Any, **keywords: Any) -> Any:
        found.collected += 1
        return collect(*arguments, **keywords)

    monkeypatch.setattr(api, "collect", counted)
    monkeypatch.setattr(api, "front_for", lambda *operands: None)  # it knows a real PyTorch only
    return found


def strided(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """An array with gaps between rows, transposed or not, at any multiple of 4 bytes."""
    wide = (*shape[:-1], shape[-1] + int(rng.integers(4)))
    if len(shape) > 1 and rng.integers(2):
        return strided_copy(rng, (*wide[:-2], wide[-1], wide[-2])).swapaxes(-1, -2)[..., : shape[-1]]
    return strided_copy(rng, wide)[..., : shape[-1]]


def strided_copy(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return at_remainder(np.zeros(shape, F), int(rng.integers(4)))


def at_remainder(like: np.ndarray[Any, Any], words: int) -> np.ndarray[Any, Any]:
    """New memory with the layout of a C-ordered array that begins ``words`` elements behind 16 bytes."""
    memory = np.zeros(like.size + 8, F)
    first = (-memory.ctypes.data // 4 + words) % 4
    return memory[first : first + like.size].reshape(like.shape)


def alike(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Other memory with the same shape, strides and remainder by 16."""
    low = sum(min(0, (n - 1) * s) for n, s in zip(array.shape, array.strides, strict=True))
    high = sum(max(0, (n - 1) * s) for n, s in zip(array.shape, array.strides, strict=True))
    memory = np.zeros((high - low) // 4 + 12, F)
    first = (array.ctypes.data + low - memory.ctypes.data) // 4 % 4 - low // 4
    made = np.lib.stride_tricks.as_strided(memory[first:], array.shape, array.strides)
    assert (made.ctypes.data - array.ctypes.data) % 16 == 0
    return made


def drawn(rng: np.random.Generator) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
    """Arrays and settings of a call of gemm that computes something in one launch."""
    m, n, k = (int(rng.integers(1, 70)) for _ in range(3))
    batch = tuple(int(rng.integers(1, 4)) for _ in range(rng.integers(3)))
    operands = {"a": strided(rng, (*batch, m, k)), "b": strided(rng, (k, n))}
    settings: dict[str, Any] = {"alpha": float(rng.choice([1.0, -0.5]))}
    if rng.integers(2):
        operands["c"] = strided(rng, (m, n))
        settings["beta"] = float(rng.choice([0.0, 1.0, 2.5]))
    if rng.integers(2):
        operands["bias"] = strided(rng, (n,))
    if rng.integers(2):
        operands["out"] = strided(rng, (*batch, m, n))
    settings["activation"] = [None, "relu", "gelu"][rng.integers(3)]
    return operands, settings


@pytest.mark.parametrize("kind", [Tensor, Matrix])
def test_the_short_way_launches_what_the_long_way_does(
    warm_gpu: Gpu, rng: np.random.Generator, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out_offset = slice(192, 200)  # of an address that is new memory's in either case
    short = 0
    for _ in range(25):
        operands, settings = drawn(rng)
        tilewave.gemm(**{name: kind(array) for name, array in operands.items()}, **settings)
        others = {name: kind(alike(array)) for name, array in operands.items()}
        before = warm_gpu.collected
        launched, block = warm_gpu.launch(lambda: tilewave.gemm(**others, **settings))  # noqa: B023
        short += warm_gpu.collected == before
        with monkeypatch.context() as patched:
            patched.setattr(warm, "_libraries", {})
            long_launched, long_block = warm_gpu.launch(lambda: tilewave.gemm(**others, **settings))  # noqa: B023
        assert warm_gpu.collected > before
        assert launched == long_launched
        if "out" not in operands:
            assert block[out_offset] != bytes(8)
            block, long_block = (each[:192] + each[200:] for each in (block, long_block))
        assert block == long_block
    assert short == 25


@pytest.mark.parametrize("kind", [Tensor, Matrix])
def test_the_result_is_new_memory_or_out(warm_gpu: Gpu, kind: Any) -> None:
    a, b, out = (kind(np.zeros((8, 8), F)) for _ in range(3))
    first, second = tilewave.matmul(a, b), tilewave.matmul(a, b)
    assert warm_gpu.collected == 1
    assert type(second) is kind
    assert second is not first
    assert second.shape == (8, 8)
    assert tilewave.matmul(a, b, out=out) is tilewave.matmul(a, b, out=out) is out
    assert warm_gpu.collected == 2
    if kind is Tensor:
        assert warm_gpu.streams.changed == [out, out]


def test_whatever_differs_goes_the_long_way_once(warm_gpu: Gpu) -> None:
    def matrix(rows: int = 16, columns: int = 16, words: int = 0) -> Tensor:
        return Tensor(at_remainder(np.zeros((rows, columns), F), words))

    calls: list[Callable[[], Any]] = [
        lambda: tilewave.matmul(matrix(), matrix()),
        lambda: tilewave.matmul(matrix(words=1), matrix()),
        lambda: tilewave.matmul(matrix(), matrix(words=2)),
        lambda: tilewave.matmul(matrix(17), matrix()),
        lambda: tilewave.matmul(matrix(), Tensor(np.zeros((16, 16), F).T)),
        lambda: tilewave.gemm(matrix(), matrix()),
        lambda: tilewave.gemm(matrix(), matrix(), alpha=2.0),
        lambda: tilewave.gemm(matrix(), matrix(), transpose_a=True),
        lambda: tilewave.gemm(matrix(), matrix(), schedule="split_k:2"),
        lambda: tilewave.gemm(matrix(), matrix(), batch_invariant=True),
        lambda: tilewave.gemm(matrix(), matrix(), max_sms=2),
        lambda: tilewave.gemm(matrix(), matrix(), matrix(), beta=1.0),
        lambda: tilewave.gemm(matrix(), matrix(), bias=Tensor(np.zeros(16, F))),
        lambda: tilewave.gemm(matrix(), matrix(), bias=Tensor(np.zeros(16, F)), bias_axis=-2),
    ]
    assert not any(warm_gpu.is_short(call) for call in calls)
    assert all(warm_gpu.is_short(call) for call in calls)


def with_traits(**traits: Any) -> Tensor:
    return Tensor(np.zeros((16, 16), F), **traits)


@pytest.mark.parametrize(
    "change",
    [
        lambda a, out: tilewave.matmul(a, Tensor(np.zeros((16, 16), np.float64))),
        lambda a, out: tilewave.matmul(a, with_traits(requires_grad=True)),
        lambda a, out: tilewave.matmul(with_traits(requires_grad=True), a),
        lambda a, out: tilewave.matmul(with_traits(negated=True), a),
        lambda a, out: tilewave.matmul(a, with_traits(without_memory=True)),
        lambda a, out: tilewave.matmul(a, np.zeros((16, 16), F)),
        lambda a, out: tilewave.matmul(a, Matrix(np.zeros((16, 16), F))),
        lambda a, out: tilewave.matmul(a, a, stream=5),  # memory of another stream's pool
        lambda a, out: tilewave.matmul(a, a, out=a),
        lambda a, out: tilewave.matmul(out, a, out=out),
        lambda a, out: tilewave.matmul(a, a, out=with_traits(negated=True)),
        lambda a, out: tilewave.gemm(a, a, alpha=True),
        lambda a, out: tilewave.gemm(a, a, transpose_a=0),
        lambda a, out: tilewave.gemm(a, a, activation=[]),
        lambda a, out: tilewave.gemm(a, a, return_preactivation=True),
        lambda a, out: tilewave.gemm(a, a, workspace=1 << 20),
    ],
)
def test_what_is_out_of_the_ordinary_goes_the_long_way(
    warm_gpu: Gpu, change: Callable[[Tensor, Tensor], Any]
) -> None:
    a, out = with_traits(), with_traits()
    calls = (
        lambda: tilewave.matmul(a, a),
        lambda: tilewave.matmul(a, a, out=out),
        lambda: tilewave.gemm(a, a),
    )
    for call in calls:
        call()
    assert all(warm_gpu.is_short(call) for call in calls)
    assert not warm_gpu.is_short(lambda: change(a, out))
    assert not warm_gpu.is_short(lambda: change(a, out))


@pytest.mark.parametrize(
    ("place", "name", "answer"),
    [
        ("compiler", "is_compiling", lambda: True),
        ("_C", "_len_torch_dispatch_stack", lambda: 1),
        ("_C", "_len_torch_function_stack", lambda: 1),
        ("_C", "_are_functorch_transforms_active", lambda: True),
        ("_C", "_get_tracing_state", lambda: object()),
        ("autograd.forward_ad", "_current_level", 0),
    ],
)
def test_whoever_watches_tensors_is_told(
    warm_gpu: Gpu, monkeypatch: pytest.MonkeyPatch, place: str, name: str, answer: Any
) -> None:
    watcher: Any = sys.modules["torch"]
    for part in place.split("."):
        watcher = getattr(watcher, part)
    monkeypatch.setattr(watcher, name, answer)
    a = with_traits()
    tilewave.matmul(a, a)
    assert not warm_gpu.is_short(lambda: tilewave.matmul(a, a))


def test_a_gradient_counts_only_where_gradients_are_recorded(
    warm_gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = Parameter(np.zeros((16, 16), F), requires_grad=True)
    monkeypatch.setattr(sys.modules["torch"], "grad_enabled", False)
    tilewave.matmul(weight, weight)
    assert warm_gpu.is_short(lambda: tilewave.matmul(weight, weight))
    monkeypatch.setattr(sys.modules["torch"], "grad_enabled", True)
    assert not warm_gpu.is_short(lambda: tilewave.matmul(weight, weight))


def test_out_may_be_c_and_nothing_else(warm_gpu: Gpu) -> None:
    a, c, other = with_traits(), with_traits(), with_traits()

    def call(c: Tensor, out: Tensor) -> Callable[[], Any]:
        return lambda: tilewave.gemm(a, a, c, beta=1.0, out=out)

    call(c, other)()
    assert warm_gpu.is_short(call(c, c))
    memory = at_remainder(np.zeros((20, 16), F), 0)
    apart = Tensor(memory[:16])
    assert warm_gpu.is_short(call(c, apart))
    assert not warm_gpu.is_short(call(Tensor(memory[4:]), apart))
    assert not warm_gpu.is_short(lambda: tilewave.gemm(apart, a, c, beta=1.0, out=Tensor(memory[4:])))


def test_a_given_stream_is_used(warm_gpu: Gpu) -> None:
    a, out = with_traits(), with_traits()
    tilewave.matmul(a, a, out=out)
    assert warm_gpu.is_short(lambda: tilewave.matmul(a, a, out=out, stream=9))
    assert warm_gpu.driver.launches[-1][0][8] == 9
    # PyTorch is told of a stream that waits for 9, which may be destroyed before the tensors are freed.
    recorded = [arguments[1] for name, arguments in warm_gpu.driver.calls if name == "cuEventRecord"]
    assert recorded == [9]
    assert set(a.used_by) == set(out.used_by) == set(interop._followers.values())
    warm_gpu.streams.current = 9
    tilewave.matmul(a, a)
    assert warm_gpu.is_short(lambda: tilewave.matmul(a, a, stream=9))
    assert warm_gpu.driver.launches[-1][0][8] == 9
    with pytest.raises(UsageError, match="stream is -1"):
        tilewave.matmul(a, a, out=out, stream=-1)


def test_the_current_context_decides_where_there_are_several_gpus(
    warm_gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = with_traits()
    tilewave.matmul(a, a)
    warm_gpu.driver.current = 701
    assert not warm_gpu.is_short(lambda: tilewave.matmul(a, a))
    warm_gpu.driver.current = 700
    assert warm_gpu.is_short(lambda: tilewave.matmul(a, a))


def test_memory_is_taken_on_the_gpu_of_the_operands(warm_gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """What allocates fastest knows the current GPU only."""
    taken: list[tuple[Any, ...]] = []

    def empty_strided(*arguments: Any) -> Tensor:
        taken.append(arguments)
        return Tensor(np.empty(arguments[0], F))

    inner: Any = sys.modules["torch"]._C
    inner._dynamo.guards._empty_strided_cuda = empty_strided
    a = with_traits()
    tilewave.matmul(a, a)
    assert warm_gpu.is_short(lambda: tilewave.matmul(a, a))
    assert taken == [((16, 16), (16, 1), "torch.float32")]
    monkeypatch.setattr(warm, "_libraries", {})  # which asks a library once what it offers
    monkeypatch.setattr(inner, "_cuda_getDevice", lambda: 1)
    tilewave.matmul(a, a)
    assert warm_gpu.is_short(lambda: tilewave.matmul(a, a))
    assert len(taken) == 1


def test_a_launch_that_the_driver_refuses_is_left_to_the_long_way(warm_gpu: Gpu) -> None:
    a = with_traits()
    tilewave.matmul(a, a)
    (library,) = {id(each): each for each in warm._libraries.values() if each is not None}.values()
    (launch,) = library.launches.values()
    launch._launch = lambda *arguments: (201,)
    before = len(warm_gpu.driver.launches)
    assert not warm_gpu.is_short(lambda: tilewave.matmul(a, a))
    assert len(warm_gpu.driver.launches) == before + 1


def test_launches_that_overlap_in_time_have_blocks_of_their_own(warm_gpu: Gpu) -> None:
    a, b, out, other = (with_traits() for _ in range(4))
    tilewave.matmul(a, b, out=out)
    (library,) = {id(each): each for each in warm._libraries.values() if each is not None}.values()
    (launch,) = library.launches.values()
    submit = launch._launch
    inside: list[bool] = []

    def reentrant(*arguments: Any) -> Any:
        if not inside:  # as another thread would, while the driver has let go of Python
            inside.append(True)
            tilewave.matmul(b, a, out=other)
        return submit(*arguments)

    launch._launch = reentrant
    tilewave.matmul(a, b, out=out)
    (_, inner), (_, outer) = warm_gpu.driver.launches[-2:]
    words = [np.frombuffer(block[:320], np.uint64) for block in (inner, outer)]
    assert [int(w[24]) for w in words] == [other.data_ptr(), out.data_ptr()]
    assert [int(w[0]) for w in words] == [b.data_ptr(), a.data_ptr()]


def test_workspace_is_that_of_the_stream(warm_gpu: Gpu) -> None:
    a, b = Tensor(np.zeros((4, 4000), F)), Tensor(np.zeros((4000, 4), F))
    call = lambda: tilewave.gemm(a, b, schedule="split_k:4")  # noqa: E731
    call()
    taken = []
    for stream in (0, 3, 0):
        warm_gpu.streams.current = stream
        assert warm_gpu.is_short(call)
        taken.append(np.frombuffer(warm_gpu.driver.launches[-1][1][8 * 51 : 8 * 53], np.uint64).tolist())
    assert 0 not in taken[0]
    assert taken[0] == taken[2] != taken[1]


def test_a_thread_without_a_context_gets_its_workspace_the_long_way(
    warm_gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream cannot be asked there; where there is one GPU, nobody looks which context is current."""
    a, b = Tensor(np.zeros((4, 4000), F)), Tensor(np.zeros((4000, 4), F))
    call = lambda: tilewave.gemm(a, b, schedule="split_k:4")  # noqa: E731
    call()
    (library,) = {id(each): each for each in warm._libraries.values() if each is not None}.values()
    (launch,) = library.launches.values()
    launch.alone = True
    driver = warm_gpu.driver

    def ask(stream: int) -> tuple[Result, int]:
        return Result.CUDA_SUCCESS if driver.current else Result.CUDA_ERROR_INVALID_CONTEXT, 0

    monkeypatch.setattr(driver, "cuStreamIsCapturing", ask, raising=False)
    driver.current = 0
    before = len(driver.launches)
    assert not warm_gpu.is_short(call)
    assert len(driver.launches) == before + 1
    driver.current = 700
    assert warm_gpu.is_short(call)


def test_no_other_thread_takes_workspace_before_it_is_used(
    warm_gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It might outgrow and free it: whoever launches holds the pool, the first time and when warm."""
    held = []
    launch = type(warm_gpu.driver).on_cuLaunchKernel
    pool = workspace_pool(gpu_state(0))

    def watched(driver: Any, *arguments: Any) -> Any:
        held.append(pool.submitting.locked())
        return launch(driver, *arguments)

    monkeypatch.setattr(type(warm_gpu.driver), "on_cuLaunchKernel", watched)
    a, b = Tensor(np.zeros((4, 4000), F)), Tensor(np.zeros((4000, 4), F))
    for _ in range(3):
        tilewave.gemm(a, b, schedule="split_k:4")
    assert held == [True] * 3
    tilewave.gemm(a, b, schedule="data_parallel")
    assert not held[-1]


def test_while_shapes_are_recorded_all_calls_are_seen(warm_gpu: Gpu) -> None:
    a = with_traits()
    tilewave.matmul(a, a)
    with recording.record() as shapes:
        tilewave.matmul(a, a)
        tilewave.matmul(a, a)
    assert [count for _, count in shapes.items()] == [2]


def test_no_more_launches_are_kept_than_stated(warm_gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "MOST_LAUNCHES", 2)

    def call(rows: int) -> Callable[[], Any]:
        return lambda: tilewave.matmul(Tensor(np.zeros((rows, 4), F)), Tensor(np.zeros((4, 4), F)))

    for rows in (1, 2, 3):
        call(rows)()
    assert warm_gpu.is_short(call(2))
    assert warm_gpu.is_short(call(3))
    assert not warm_gpu.is_short(call(1))


def test_a_library_without_the_questions_goes_the_long_way(
    warm_gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A PyTorch without CUDA has no current stream of a GPU to ask for cheaply."""
    monkeypatch.delattr(sys.modules["torch"].nn, "Parameter")
    a = with_traits()
    tilewave.matmul(a, a)
    assert not warm_gpu.is_short(lambda: tilewave.matmul(a, a))


@pytest.mark.parametrize("kind", [Tensor, Matrix])
def test_a_warm_product_runs_through_few_functions(warm_gpu: Gpu, kind: Any) -> None:
    a, b = kind(np.zeros((64, 64), F)), kind(np.zeros((64, 64), F))
    product = tilewave.matmul
    warm_gpu.driver.current = 700
    product(a, b)
    (library,) = {id(each): each for each in warm._libraries.values() if each is not None}.values()
    (launch,) = library.launches.values()
    launch.alone = True
    product(a, b)
    seen: dict[str, list[str]] = {"call": [], "c_call": []}
    package = str(Path(tilewave.__file__).parent)

    def note(frame: types.FrameType, event: str, argument: Any) -> None:
        if event in seen and frame.f_code.co_filename.startswith(package):
            seen[event].append(frame.f_code.co_qualname if event == "call" else argument.__qualname__)

    sys.setprofile(note)
    try:
        product(a, b)
    finally:
        sys.setprofile(None)
    assert 3 <= len(seen["call"]) <= MOST_FUNCTIONS, seen
    assert 2 <= len(seen["c_call"]) <= MOST_BUILTINS, seen


def test_edges_follow_their_tiles_in_the_stream(warm_gpu: Gpu) -> None:
    """A product whose last row and column are launches of their own goes the long way, captured or not."""
    a, b, out = (Tensor(at_remainder(np.zeros((2049, 2049), F), 0)) for _ in range(3))
    call = lambda: tilewave.matmul(a, b, out=out, stream=7)  # noqa: E731
    tilewave.prepare(tilewave.plan_for(a, b, out=out), device=0)
    warm_gpu.driver.capturing[7] = 1  # from here on nothing may be loaded or allocated
    for _ in range(2):
        before = len(warm_gpu.driver.launches)
        collected = warm_gpu.collected
        call()
        assert warm_gpu.collected == collected + 1
        launches = warm_gpu.driver.launches[before:]
        assert [arguments[8] for arguments, _ in launches] == [7, 7, 7]
        words = [np.frombuffer(block[:200], np.int64) for _, block in launches]
        last = 4 * 2048
        assert [int(w[24]) - out.data_ptr() for w in words] == [0, last * 2049, last]
        # The strip beside the tiles is computed as a row: its operands change places.
        assert [{int(w[0]), int(w[6])} for w in words] == [
            {a.data_ptr(), b.data_ptr()},
            {a.data_ptr() + last * 2049, b.data_ptr()},
            {a.data_ptr(), b.data_ptr() + last},
        ]


@pytest.mark.parametrize("missing", ["tiles", "first edge", "second edge", "workspace"])
def test_a_cold_capture_of_a_product_with_edges_holds_nothing_of_it(warm_gpu: Gpu, missing: str) -> None:
    """Not the tiles either, whose kernel is there where only that of an edge is missing."""
    a, b, out = (Tensor(at_remainder(np.zeros((2049, 2049), F), 0)) for _ in range(3))
    (plan,) = tilewave.plan_for(a, b, out=out)
    parts = dict(zip(("tiles", "first edge", "second edge"), execute._parts(plan), strict=True))
    assert len({part.instance.name for part in parts.values()}) == 3
    assert any(part.ticket_bytes for part in parts.values())
    loaded = {part.instance.name: 5 for name, part in parts.items() if name != missing}
    gpu_state(0)._kernels.update(loaded)
    warm_gpu.driver.capturing[7] = 1
    warm_gpu.streams.current = 8  # PyTorch has nothing to lend for a capture of another stream
    with pytest.raises(CaptureError, match="prepare"):
        tilewave.matmul(a, b, out=out, stream=7)
    assert warm_gpu.driver.launches == []
    warm_gpu.driver.capturing.clear()
    tilewave.prepare([plan], device=0)
    warm_gpu.driver.capturing[7] = 1
    tilewave.matmul(a, b, out=out, stream=7)
    assert len(warm_gpu.driver.launches) == 3


def test_workspace_too_small_for_an_edge_is_refused_before_the_tiles_are_launched(warm_gpu: Gpu) -> None:
    a, b, out = (Tensor(at_remainder(np.zeros((2049, 2049), F), 0)) for _ in range(3))
    (plan,) = tilewave.plan_for(a, b, out=out)
    assert plan.ticket_bytes == 0 < plan.workspace_bytes  # an edge needs it, the tiles do not
    memory = Tensor(np.zeros(plan.workspace_bytes // 4 + 4, F))
    tilewave.gemm(a, b, out=out, workspace=memory)
    assert len(warm_gpu.driver.launches) == 3
    with pytest.raises(UsageError, match="workspace has 400 bytes; this plan needs"):
        tilewave.gemm(a, b, out=out, workspace=Tensor(np.zeros(100, F)))
    assert len(warm_gpu.driver.launches) == 3


def test_memory_that_an_edge_would_lack_is_missed_before_the_tiles_are_launched(
    warm_gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, out = (Tensor(at_remainder(np.zeros((2049, 2049), F), 0)) for _ in range(3))
    full = lambda nbytes, stream: (Result.CUDA_ERROR_OUT_OF_MEMORY, 0)  # noqa: E731
    with monkeypatch.context() as while_full:
        while_full.setattr(warm_gpu.driver, "cuMemAllocAsync", full, raising=False)
        with pytest.raises(DeviceError, match="OUT_OF_MEMORY"):
            tilewave.matmul(a, b, out=out)
    assert warm_gpu.driver.launches == []
    tilewave.matmul(a, b, out=out)
    assert len(warm_gpu.driver.launches) == 3


def test_nobody_asks_for_a_stream_before_a_launch_is_kept(
    warm_gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch would initialise CUDA for it, which a process with tensors of the CPU alone may not want."""
    made = warm._library_of(Tensor)
    assert made is not None
    a = Tensor(np.ones((4, 4), F))
    monkeypatch.setattr(a, "get_device", lambda: -1)  # as a tensor of the CPU says

    def asked(device: int) -> int:
        raise AssertionError("a stream was asked for")

    monkeypatch.setattr(made, "_current_stream", asked)
    for out in (None, a):
        found = made.compute(a, a, None, None, out, None, ())
        assert isinstance(found, warm.Miss)
