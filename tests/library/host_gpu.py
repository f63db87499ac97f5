"""A GPU that is host memory: arrays of stand-ins for PyTorch and CuPy, and an executor that computes with
NumPy.

Addresses, strides and alignments are real, so that whatever the front door makes of them is what is computed.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from tilewave import dlpack
from tilewave.kernels.arguments import Pointers
from tilewave.kernels.group_table import Operands
from tilewave.planner.gemm.options import PlanOptions
from tilewave.problem import BATCH_LEVELS, Activation, GemmProblem, MatrixLayout

F = np.float32
Array = np.ndarray[Any, Any]

LASTING_OFFSET = 0x1000
"""Added to a stream's handle: the stand-in for the stream that outlives it."""


def matrix_at(address: int, layout: MatrixLayout, rows: int, columns: int, batch: tuple[int, ...]) -> Array:
    """The float32 array of these extents at an address of this process."""
    extents, strides = (*batch, rows, columns), (*layout.batch, layout.row, layout.column)
    reach = [(extent - 1) * stride for extent, stride in zip(extents, strides, strict=True)]
    low, high = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
    count = high - low + 1
    flat = np.ctypeslib.as_array((ctypes.c_float * count).from_address(address + 4 * low))
    return as_strided(flat[-low:], extents, tuple(4 * stride for stride in strides))


@dataclass(repr=False)
class Submission:
    """One launch that the executor was asked for."""

    problem: GemmProblem
    pointers: Pointers
    alpha: float
    beta: float
    device: int
    stream: int
    options: PlanOptions
    workspace: tuple[int, int] | None


@dataclass(repr=False)
class FakeExecutor:
    """Computes problems at addresses of this process, in float64 rounded once, and remembers them."""

    submissions: list[Submission] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"FakeExecutor({len(self.submissions)} submissions)"

    def __call__(
        self,
        problem: GemmProblem,
        pointers: Pointers,
        alpha: float,
        beta: float,
        *,
        device: int,
        stream: int,
        options: PlanOptions,
        workspace: tuple[int, int] | None = None,
    ) -> None:
        self.submissions.append(
            Submission(problem, pointers, alpha, beta, device, stream, options, workspace)
        )
        assert len(problem.batch) <= BATCH_LEVELS
        for name in ("a", "b", "out", "c", "bias", "preactivation"):
            layout = getattr(problem, name)
            if layout is not None:
                assert getattr(pointers, name) % layout.alignment == 0, name

        def read(name: str, rows: int, columns: int) -> Array:
            layout = getattr(problem, name)
            return matrix_at(getattr(pointers, name), layout, rows, columns, problem.batch)

        m, n, k = problem.m, problem.n, problem.k
        assert problem.batches * m * n > 0  # nothing else is worth a launch
        value = np.full((*problem.batch, m, n), alpha * 0.0)
        with np.errstate(all="ignore"):
            if problem.product:
                value = alpha * (read("a", m, k).astype(np.float64) @ read("b", k, n).astype(np.float64))
            assert (problem.c is None) == (beta == 0)
            if problem.c is not None:
                value = value + beta * read("c", m, n).astype(np.float64)
            if problem.bias is not None:
                value = value + read("bias", m, n)
            if problem.preactivation is not None:
                read("preactivation", m, n)[...] = value.astype(F)
            read("out", m, n)[...] = activate(problem.activation, value).astype(F)

    def group(
        self,
        problems: Sequence[GemmProblem],
        operands: Sequence[Operands],
        *,
        device: int,
        stream: int,
        options: PlanOptions,
        workspace: tuple[int, int] | None = None,
    ) -> None:
        """A group in one launch, which is remembered by its size."""
        self.groups.append(len(problems))
        for problem, given in zip(problems, operands, strict=True):
            self(
                problem,
                given.pointers,
                given.alpha,
                given.beta,
                device=device,
                stream=stream,
                options=options,
                workspace=workspace,
            )


def activate(activation: Activation, x: Array) -> Array:
    """Each activation by its definition."""
    match activation:
        case Activation.RELU:
            return np.where(x < 0, 0, x)
        case Activation.GELU:
            return x * 0.5 * (1 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2)))
        case Activation.GELU_TANH:
            return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        case Activation.SILU:
            return x / (1 + np.exp(-x))
    return x


class FakeStreams:
    """The current stream of a stand-in library, and the waits between streams that were asked for."""

    def __init__(self) -> None:
        self.current = 0
        self.waits: list[tuple[int, int]] = []
        self.allocated_on: list[int] = []
        self.changed: list[object] = []

    @contextlib.contextmanager
    def on(self, handle: int) -> Iterator[None]:
        before, self.current = self.current, handle
        try:
            yield
        finally:
            self.current = before


class CupyArray:
    """What the front door uses of cupy.ndarray."""

    def __init__(self, host: Array, device: int = 0) -> None:
        self.host = host
        self.device = types.SimpleNamespace(id=device)
        self.data = types.SimpleNamespace(ptr=host.ctypes.data if host.size else 0)
        self.shape, self.strides, self.dtype = host.shape, host.strides, host.dtype

    def astype(self, dtype: Any) -> CupyArray:
        return CupyArray(self.host.astype(dtype))


def fake_cupy(streams: FakeStreams) -> types.ModuleType:
    def empty(shape: tuple[int, ...], dtype: Any) -> CupyArray:
        streams.allocated_on.append(streams.current)
        host = np.empty(shape, dtype)
        host.fill(np.nan)
        return CupyArray(host)

    module = types.ModuleType("cupy")
    module.ndarray = CupyArray  # type: ignore[attr-defined]
    module.empty = empty  # type: ignore[attr-defined]
    module.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
        get_current_stream=lambda device=-1: types.SimpleNamespace(ptr=streams.current),
        Device=lambda device: contextlib.nullcontext(),
        ExternalStream=lambda handle, device=-1: streams.on(handle),
    )
    return module


class TorchTensor:
    """What the front door uses of torch.Tensor."""

    def __init__(self, host: Array, device: str = "cuda", **traits: Any) -> None:
        self.host = host
        self.device = types.SimpleNamespace(type=device)
        self.is_cuda = device == "cuda"
        self.dtype = f"torch.{host.dtype.name}"
        if host.dtype == F:
            self.dtype = sys.modules["torch"].float32
        self.shape = host.shape
        self.layout = traits.get("layout", "torch.strided")
        self.requires_grad = traits.get("requires_grad", False)
        self.negated = traits.get("negated", False)
        self.is_nested = False
        self.without_memory = traits.get("without_memory", False)
        self.used_by: list[Any] = []

    def stride(self) -> tuple[int, ...]:
        return tuple(stride // self.host.itemsize for stride in self.host.strides)

    def data_ptr(self) -> int:
        if self.without_memory:
            raise RuntimeError("Cannot access data pointer of Tensor that doesn't have storage")
        return self.host.ctypes.data if self.host.size else 0

    def get_device(self) -> int:
        return 0

    def is_inference(self) -> bool:
        return False

    def is_neg(self) -> bool:
        return self.negated

    def record_stream(self, stream: Any) -> None:
        self.used_by.append(stream)

    def detach(self) -> TorchTensor:
        return self

    def numpy(self) -> Array:
        return self.host


def fake_torch(streams: FakeStreams) -> types.ModuleType:
    def empty(shape: tuple[int, ...], dtype: Any, device: str) -> TorchTensor:
        streams.allocated_on.append(streams.current)
        return TorchTensor(np.full(shape, np.nan, F))

    module = types.ModuleType("torch")
    module.Tensor = TorchTensor  # type: ignore[attr-defined]
    module.float32 = "torch.float32"  # type: ignore[attr-defined]
    module.strided = "torch.strided"  # type: ignore[attr-defined]
    module.grad_enabled = True  # type: ignore[attr-defined]
    module.is_grad_enabled = lambda: module.grad_enabled  # type: ignore[attr-defined]
    module.empty = empty  # type: ignore[attr-defined]
    module.from_numpy = lambda host: TorchTensor(host, "cpu")  # type: ignore[attr-defined]
    module._C = types.SimpleNamespace(  # type: ignore[attr-defined]
        _cuda_getCurrentRawStream=lambda device: streams.current
    )
    module.autograd = types.SimpleNamespace(  # type: ignore[attr-defined]
        graph=types.SimpleNamespace(increment_version=streams.changed.append)
    )
    module.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
        stream=lambda stream: streams.on(stream), ExternalStream=lambda handle, device: handle
    )
    return module


class InterfaceArray:
    """An object with nothing but the CUDA array interface."""

    def __init__(self, host: Array, *, contiguous: bool = False, **fields: Any) -> None:
        self.host = host
        self.__cuda_array_interface__ = {
            "shape": host.shape,
            "typestr": host.dtype.str,
            "data": (host.ctypes.data if host.size else 0, False),
            "strides": None if contiguous else host.strides,
            "version": 3,
            **fields,
        }


class ExchangedArray:
    """An object with nothing but DLPack, of version 1 or before, in C order."""

    def __init__(self, host: Array, *, device_type: int = dlpack.CUDA, old: bool = False) -> None:
        self.host = host
        self.device_type = device_type
        self.streams: list[int | None] = []
        if old:
            self.__class__ = OldExchangedArray

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device_type, 0

    def __dlpack__(self, *, stream: int | None = None, max_version: Any = None) -> object:
        self.streams.append(stream)
        return dlpack.make_capsule(self.host, self.host.ctypes.data, self.host.shape, 0)


class OldExchangedArray(ExchangedArray):
    def __dlpack__(self, *, stream: int | None = None) -> object:  # type: ignore[override]
        return super().__dlpack__(stream=stream)


@dataclass(repr=False)
class FakeGpu:
    """Everything together; `cupy` and `torch` are the libraries' own current streams."""

    run: FakeExecutor
    cupy: FakeStreams
    torch: FakeStreams
    waits: list[tuple[int, int]] = field(default_factory=list)
    kept: list[object] = field(default_factory=list)
    shared: list[Any] = field(default_factory=list)

    def __repr__(self) -> str:
        return "FakeGpu()"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Stand-ins for both libraries and the executor, for one test."""
    fake = FakeGpu(FakeExecutor(), FakeStreams(), FakeStreams())
    monkeypatch.setattr("tilewave.arrays._viewers", {})
    monkeypatch.setattr("tilewave.api.front_for", lambda *operands: None)  # it asks PyTorch itself
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(fake.cupy))
    monkeypatch.setitem(sys.modules, "torch", fake_torch(fake.torch))
    monkeypatch.setattr("tilewave.on_device.executor", lambda: fake.run)
    monkeypatch.setattr("tilewave.group.group_executor", lambda: fake.run.group)
    monkeypatch.setattr("tilewave.runtime.interop.device_of_pointer", lambda address: 0)
    monkeypatch.setattr(
        "tilewave.runtime.interop.wait_for",
        lambda stream, producer, device: fake.waits.append((stream, producer)),
    )
    monkeypatch.setattr(
        "tilewave.runtime.interop.lasting_stream", lambda stream, device: stream + LASTING_OFFSET
    )
    monkeypatch.setattr(
        "tilewave.runtime.interop.keep_until_passed",
        lambda owners, stream, device: fake.kept.append(owners),
    )

    def allocate(shape: tuple[int, ...], device: int, stream: int) -> Any:
        from tilewave.runtime.shared import SharedArray

        memory = np.full(shape, np.nan, F)
        fake.shared.append(memory)
        return SharedArray(memory.ctypes.data, shape, device, stream)

    monkeypatch.setattr("tilewave.runtime.shared.SharedArray.allocate", allocate)
    return fake
