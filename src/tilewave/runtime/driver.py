"""A thin layer over the CUDA driver: availability, contexts, modules, launches, events, memory.

Every call of the driver is checked; an error names the call, its code and what the driver says it means.
Nothing here is imported by the emulator, and importing this module needs neither a GPU nor a driver.
"""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tilewave.device.driver import FORKED, ProcessState, cuda_version_of, require_driver
from tilewave.device.driver import bindings as _bindings
from tilewave.errors import DeviceError, ToolchainError

#: A quiet NaN with a full payload: outputs are filled with it, so that an element never written shows.
NAN_PATTERN = 0x7FFFFFFF

_NOT_INITIALIZED = 3
"""CUDA_ERROR_NOT_INITIALIZED: what cuInit answers in the fork of a process where any library used CUDA."""


def _describe(cuda: ModuleType, code: Any) -> str:
    """Name, number and meaning of a CUresult, as far as the driver tells them."""
    name, meaning = getattr(code, "name", str(code)), "no description"
    try:
        _, text = cuda.cuGetErrorString(code)
        if text:
            meaning = text.decode() if isinstance(text, bytes) else str(text)
    except Exception:  # the description is a courtesy: the code alone must still reach the user
        pass
    return f"{name} ({int(code)}): {meaning}"


def _fail(call: str, code: Any) -> DeviceError:
    hint = f"; {FORKED}" if ProcessState.forked else ""
    return DeviceError(f"{call} failed with {_describe(_bindings(), code)}{hint}")


def _call(name: str, *arguments: Any) -> Any:
    """Call a driver function, check its code, return its result (a tuple when it has several)."""
    if ProcessState.forked:
        raise DeviceError(FORKED)
    code, *results = getattr(_bindings(), name)(*arguments)
    if int(code) != 0:
        raise _fail(name, code)
    if not results:
        return None
    return results[0] if len(results) == 1 else tuple(results)


@dataclass(frozen=True)
class Probe:
    """What was found when looking for a GPU. ``reason`` is None exactly when one can be used."""

    devices: int
    driver_cuda: tuple[int, int] | None
    reason: str | None
    outdated_driver: bool = False

    @property
    def usable(self) -> bool:
        """Whether a GPU can be used."""
        return self.reason is None


@functools.cache
def probe() -> Probe:
    """Look for a usable GPU. Never raises: without one, the reason says what is missing and what helps."""
    if ProcessState.forked:
        return Probe(0, None, FORKED)
    try:
        cuda = _bindings()
    except ToolchainError as error:
        return Probe(0, None, str(error))
    try:
        code = cuda.cuInit(0)[0]
    except Exception:  # cuda-bindings raises different types here, by version, when libcuda is missing
        return Probe(0, None, "no NVIDIA driver on this machine: libcuda was not found")
    try:
        if int(code) == 0:
            ProcessState.initialised = True
        _, version = cuda.cuDriverGetVersion()
        driver_cuda = cuda_version_of(version)
        try:
            require_driver(driver_cuda)
        except ToolchainError as error:
            return Probe(0, driver_cuda, str(error), outdated_driver=True)
        if int(code) != 0:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            hint = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
            if int(code) == _NOT_INITIALIZED:  # another library used CUDA before the fork, unseen by us
                hint += f"; probably {FORKED}"
            return Probe(0, driver_cuda, f"cuInit failed with {_describe(cuda, code)}{hint}")
        code, count = cuda.cuDeviceGetCount()
        if int(code) != 0:
            return Probe(0, driver_cuda, f"cuDeviceGetCount failed with {_describe(cuda, code)}")
        if count == 0:
            return Probe(0, driver_cuda, "the NVIDIA driver sees no GPU")
        return Probe(int(count), driver_cuda, None)
    except Exception as error:
        return Probe(0, None, f"the NVIDIA driver could not be asked ({type(error).__name__}: {error})")


os.register_at_fork(after_in_child=probe.cache_clear)


def require_gpu() -> Probe:
    """Return the probe, or raise: ToolchainError for a driver that is too old, else DeviceError."""
    found = probe()
    if found.reason is not None:
        raise (ToolchainError if found.outdated_driver else DeviceError)(found.reason)
    return found


class Device:
    """One GPU and its primary context, the one that PyTorch, CuPy and the CUDA runtime share."""

    def __init__(self, ordinal: int = 0) -> None:
        found = require_gpu()
        if not 0 <= ordinal < found.devices:
            raise DeviceError(f"GPU {ordinal} was asked for; this machine has GPUs 0 to {found.devices - 1}")
        self.ordinal = ordinal
        self._device = _call("cuDeviceGet", ordinal)
        self._context = _call("cuDevicePrimaryCtxRetain", self._device)
        self.activate()

    def __repr__(self) -> str:
        return f"Device({self.ordinal}: {self.name})"

    @property
    def name(self) -> str:
        """The product name, such as "NVIDIA H200"."""
        raw = _call("cuDeviceGetName", 128, self._device)
        return raw.split(b"\0")[0].decode() if isinstance(raw, bytes) else str(raw)

    @property
    def pci_bus_id(self) -> str:
        """Where the GPU sits, such as "0000:3B:00.0": how NVML and nvidia-smi are told which one is meant."""
        raw = _call("cuDeviceGetPCIBusId", 32, self._device)
        return raw.split(b"\0")[0].decode() if isinstance(raw, bytes) else str(raw)

    def activate(self) -> None:
        """Make the context current in the calling thread. Loading and allocating do it themselves."""
        _call("cuCtxSetCurrent", self._context)

    def synchronize(self) -> None:
        """Wait until everything submitted to this GPU's context has finished."""
        self.activate()
        _call("cuCtxSynchronize")

    def memory(self) -> tuple[int, int]:
        """Free and total device memory, in bytes."""
        self.activate()
        free, total = _call("cuMemGetInfo")
        return int(free), int(total)


class Stream:
    """A stream of its own, or a view of another library's by its raw handle."""

    def __init__(self, device: Device, handle: int | None = None) -> None:
        self.device = device
        if handle is None:
            device.activate()
            owned = _call("cuStreamCreate", int(_bindings().CUstream_flags.CU_STREAM_NON_BLOCKING))
            handle = int(owned)
            _release_with(self, device, "cuStreamDestroy", owned)
        self.handle = handle

    def synchronize(self) -> None:
        """Wait until everything submitted to this stream has finished."""
        _call("cuStreamSynchronize", self.handle)

    def capture(self, work: Callable[[], None]) -> Graph:
        """Record what ``work`` submits to this stream as a graph, without running it."""
        self.device.activate()
        mode = _bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        _call("cuStreamBeginCapture", self.handle, mode)
        try:
            work()
        except BaseException:
            _release(self.device._context, "cuStreamEndCapture", self.handle)
            raise
        return Graph(self, _call("cuStreamEndCapture", self.handle))


class Graph:
    """An instantiated graph of launches, replayed on the stream that it was captured from."""

    def __init__(self, stream: Stream, graph: Any) -> None:
        self.stream = stream
        try:
            self._executable = _call("cuGraphInstantiate", graph, 0)
        finally:
            _release(stream.device._context, "cuGraphDestroy", graph)
        _release_with(self, stream.device, "cuGraphExecDestroy", self._executable)

    def launch(self) -> None:
        """Submit the whole graph once."""
        _call("cuGraphLaunch", self._executable, self.stream.handle)


class Event:
    """A point in a stream; two of them measure the GPU time between them."""

    def __init__(self, device: Device) -> None:
        device.activate()
        self._event = _call("cuEventCreate", 0)
        _release_with(self, device, "cuEventDestroy", self._event)

    def record(self, stream: Stream) -> None:
        """Mark this point in the stream."""
        _call("cuEventRecord", self._event, stream.handle)

    def synchronize(self) -> None:
        """Wait until the stream has passed this point."""
        _call("cuEventSynchronize", self._event)

    def milliseconds_since(self, start: Event) -> float:
        """GPU time from ``start`` to this event; both must have been passed."""
        return float(_call("cuEventElapsedTime", start._event, self._event))


class DeviceArray:
    """Device memory with a shape: PyTorch and CuPy take it without a copy (CUDA array interface).

    The memory is freed with the last object that refers to it; views keep their owner alive.
    """

    def __init__(self, device: Device, address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.device = device
        self.address = address
        self.shape = shape
        self.dtype = dtype
        self._owner: DeviceArray | None = None

    @classmethod
    def empty(cls, device: Device, shape: Sequence[int], dtype: DTypeLike = np.float32) -> DeviceArray:
        """Allocate device memory; its contents are undefined."""
        kind = np.dtype(dtype)
        nbytes = max(1, int(np.prod(shape, dtype=np.int64)) * kind.itemsize)
        device.activate()
        free, total = _call("cuMemGetInfo")
        if nbytes > free:
            raise DeviceError(f"{nbytes:,} bytes were asked for; {free:,} of the GPU's {total:,} are free")
        pointer = _call("cuMemAlloc", nbytes)
        array = cls(device, int(pointer), tuple(int(extent) for extent in shape), kind)
        _release_with(array, device, "cuMemFree", pointer)
        return array

    @classmethod
    def from_numpy(cls, device: Device, array: NDArray[Any]) -> DeviceArray:
        """Allocate device memory and copy a NumPy array into it."""
        copy = cls.empty(device, array.shape, array.dtype)
        copy.copy_from(array)
        return copy

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }

    def view(self, offset: int, shape: Sequence[int]) -> DeviceArray:
        """A part of this memory, from element ``offset`` on, with a shape of its own."""
        part = DeviceArray(
            self.device, self.address + offset * self.dtype.itemsize, tuple(map(int, shape)), self.dtype
        )
        if offset < 0 or part.address + part.nbytes > self.address + self.nbytes:
            raise DeviceError(f"elements {offset} and on of shape {part.shape} lie outside {self.shape}")
        part._owner = self
        return part

    def copy_from(self, array: NDArray[Any]) -> None:
        """Copy a NumPy array of the same shape and dtype into this memory; returns when it has arrived."""
        source = np.ascontiguousarray(array)
        if source.shape != self.shape or source.dtype != self.dtype:
            raise DeviceError(
                f"{source.dtype}{source.shape} does not fit into device memory of {self.dtype}{self.shape}"
            )
        self.device.activate()
        if source.nbytes:
            _call("cuMemcpyHtoD", self.address, source.ctypes.data, source.nbytes)
            # From pageable memory the call returns once the data is staged, not once it has arrived, and
            # streams made here do not wait for the default stream.
            self.device.synchronize()

    def to_numpy(self) -> NDArray[Any]:
        """Wait for all work of the context, then copy this memory into a new NumPy array."""
        self.device.synchronize()
        array = np.empty(self.shape, self.dtype)
        if array.nbytes:
            _call("cuMemcpyDtoH", array.ctypes.data, self.address, array.nbytes)
        return array

    def poison(self) -> None:
        """Fill the memory with NaN (32-bit elements only) and wait until it is done."""
        if self.dtype.itemsize != 4:
            raise DeviceError(f"only memory of 4-byte elements can be poisoned, not {self.dtype}")
        self.device.activate()
        if self.nbytes:
            _call("cuMemsetD32", self.address, NAN_PATTERN, self.nbytes // 4)
        self.device.synchronize()


class Module:
    """A loaded cubin."""

    def __init__(self, device: Device, cubin: bytes) -> None:
        device.activate()
        self.device = device
        self._module = _call("cuModuleLoadData", cubin)
        _release_with(self, device, "cuModuleUnload", self._module)

    def function(self, symbol: str) -> Function:
        """The kernel of this (lowered) name."""
        return Function(self, symbol, _call("cuModuleGetFunction", self._module, symbol.encode()))


class Function:
    """A kernel that can be launched."""

    def __init__(self, module: Module, symbol: str, handle: Any) -> None:
        self.module = module
        self.symbol = symbol
        self._handle = handle

    def attribute(self, name: str) -> int:
        """A function attribute by the driver's name, such as "NUM_REGS" or "LOCAL_SIZE_BYTES"."""
        attributes = _bindings().CUfunction_attribute
        return int(
            _call("cuFuncGetAttribute", getattr(attributes, f"CU_FUNC_ATTRIBUTE_{name}"), self._handle)
        )

    def allow_dynamic_shared(self, nbytes: int) -> None:
        """Allow launches with up to ``nbytes`` of dynamic shared memory (needed above 48 KiB)."""
        which = _bindings().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _call("cuFuncSetAttribute", self._handle, which, nbytes)

    def prepare(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: Sequence[Any],
        stream: Stream,
        dynamic_shared_bytes: int = 0,
    ) -> PreparedLaunch:
        """Pack the arguments ahead, so that each launch costs one driver call and nothing else."""
        if dynamic_shared_bytes > 48 * 1024:
            self.allow_dynamic_shared(dynamic_shared_bytes)
        return PreparedLaunch(self, grid, block, PackedArguments(arguments), stream, dynamic_shared_bytes)


class PackedArguments:
    """Kernel arguments in C form: an array of pointers to values, both kept alive by this object."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._kept = tuple(values)  # device arrays must outlive every launch that was prepared with them
        self._values = [_as_c_value(index, value) for index, value in enumerate(values)]
        self._pointers = (ctypes.c_void_p * max(1, len(values)))(*map(ctypes.addressof, self._values))
        self.address = ctypes.addressof(self._pointers)


def _as_c_value(index: int, value: Any) -> Any:
    """A ctypes value for one kernel argument: array to pointer, int to int32, float to float32.

    A ctypes value or array (an argument passed as a struct) is taken as it is.
    """
    if isinstance(value, DeviceArray):
        return ctypes.c_void_p(value.address)
    if isinstance(value, (ctypes._SimpleCData, ctypes.Array)):
        return value
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        if not -(2**31) <= value < 2**31:
            raise DeviceError(f"kernel argument {index} is {value}: integers must fit into 32 bits")
        return ctypes.c_int32(int(value))
    if isinstance(value, (float, np.floating)):
        return ctypes.c_float(float(value))
    raise DeviceError(
        f"kernel argument {index} is a {type(value).__name__}: "
        "a DeviceArray, an int, a float or a ctypes value is accepted"
    )


class PreparedLaunch:
    """One launch with everything decided; calling it submits it."""

    def __init__(
        self,
        function: Function,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: PackedArguments,
        stream: Stream,
        dynamic_shared_bytes: int,
    ) -> None:
        self.function = function
        self._keep = (arguments, stream)
        self._submit = _bindings().cuLaunchKernel
        self._arguments = (
            function._handle,
            *grid,
            *block,
            dynamic_shared_bytes,
            stream.handle,
            arguments.address,
            0,
        )

    def __call__(self) -> None:
        """Submit the launch; errors of the kernel itself show at the next synchronisation."""
        if ProcessState.forked:
            raise DeviceError(FORKED)
        code = self._submit(*self._arguments)[0]
        if code != 0:
            raise _fail(f"cuLaunchKernel of {self.function.symbol}", code)


def _release(context: Any, name: str, *arguments: Any) -> None:
    """Free something in its own context: clean-up may run in any thread, and its errors have no reader."""
    if ProcessState.forked:
        return
    cuda = _bindings()
    if int(cuda.cuCtxPushCurrent(context)[0]) == 0:
        getattr(cuda, name)(*arguments)
        cuda.cuCtxPopCurrent()


def _release_with(owner: object, device: Device, name: str, *arguments: Any) -> None:
    """Arrange for a driver object to be freed when its Python owner goes (not at interpreter exit)."""
    weakref.finalize(owner, _release, device._context, name, *arguments).atexit = False
