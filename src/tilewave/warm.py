"""The short way: a product that differs from an earlier one in nothing but addresses.

How a call is checked, normalised, planned and packed hangs on shapes, strides, alignments, the GPU and the
options. The first call goes the long way (`call`, `on_device`); what it came to is kept here as a launch
whose block of arguments lacks only the addresses, and a later call with the same key fills them in. Whatever
is out of the ordinary, in an array, in the stream or in memory that is shared, is left to the long way, which
does it or says what is wrong: nothing is accepted here that is not accepted there.

Host time is what all of this is about, so the questions are the cheapest that an array's library answers, and
nothing is made that need not be. ``benchmarks/host_time.py`` takes the time, a test counts the calls.
"""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tilewave import recording
from tilewave.device.driver import ProcessState
from tilewave.outputs import keep_tensors

if TYPE_CHECKING:
    from tilewave.call import GemmCall
    from tilewave.planner.gemm.options import PlanOptions
    from tilewave.runtime.prepared import PreparedGemm

MOST_LAUNCHES = 4096
"""Launches that are kept for each library of arrays; beyond that the oldest goes."""

_VECTOR_MASK = 15
"""Bits of an address that say how wide its vectors may be: 16 bytes at most."""


class Miss:
    """Nothing was done: the long way is to be gone. ``key`` is what to keep its launch by, if at all."""

    __slots__ = ("key", "launches")

    def __init__(self, launches: dict[Any, PreparedGemm] | None = None, key: Any = None) -> None:
        self.launches = launches
        self.key = key


MISSED: Final = Miss()
"""For a call that is not to be kept."""

_keeping = threading.Lock()


def compute(a: Any, b: Any, c: Any, bias: Any, out: Any, stream: Any, options: Any) -> Any:
    """The result of a call whose like was kept, in ``out`` or in new memory; else a `Miss`.

    ``options`` differs wherever two calls differ in more than their arrays and stream. Where it cannot be
    hashed, one of them is wrong, and is told apart where all are checked.
    """
    kind = type(a)
    library = _libraries[kind] if kind in _libraries else _library_of(kind)
    if library is None or recording.ACTIVE or ProcessState.forked:
        return MISSED
    return library.compute(a, b, c, bias, out, stream, options)


def _hashable(options: Any) -> bool:
    # Asked behind the question of compiling: Dynamo of PyTorch 2.11 cannot trace `hash`.
    try:
        hash(options)
    except TypeError:
        return False
    return True


def keep(miss: Miss, call: GemmCall, options: PlanOptions) -> None:
    """Keep the launch of a call that has gone the long way, where its like may go the short one."""
    launches = miss.launches
    if launches is None:
        return
    from tilewave.runtime.prepared import prepare_call

    launch = prepare_call(call, options)
    if launch is not None:
        with _keeping:
            while len(launches) >= MOST_LAUNCHES:
                launches.pop(next(iter(launches)))
            launches[miss.key] = launch


class _Library(ABC):
    """The arrays of one library. ``kinds`` are the types that are nothing but memory with a shape."""

    kinds: tuple[type, ...]

    def __init__(self) -> None:
        self.launches: dict[Any, PreparedGemm] = {}

    @abstractmethod
    def compute(self, a: Any, b: Any, c: Any, bias: Any, out: Any, stream: Any, options: Any) -> Any:
        """As the function `compute`. a and b are looked at in line: calls are what time goes into."""

    @abstractmethod
    def current(self, device: int) -> int:
        """The library's current stream, asked only where a launch was kept.

        PyTorch initialises CUDA for it, which a process with nothing but tensors of the CPU may not want.
        """

    @abstractmethod
    def see(self, array: Any, device: int) -> tuple[Any, int] | None:
        """What a launch hangs on in an array, and its address; None for what only the long way can judge."""

    @abstractmethod
    def empty(self, like: Any, launch: PreparedGemm) -> tuple[Any, int]:
        """New memory for a result in the order of the current stream, and its address."""

    @abstractmethod
    def used_by(self, arrays: tuple[Any, ...], stream: int, device: int) -> None:
        """Note that work on another stream than the library's current one uses these arrays."""

    def compute_more(
        self,
        key: tuple[Any, ...],
        device: int,
        a: Any,
        b: Any,
        at_a: int,
        at_b: int,
        c: Any,
        bias: Any,
        out: Any,
        stream: Any,
    ) -> Any:
        """A call with more than a and b, whose part of the key is ``key``."""
        seen_c, seen_bias, seen_out = (
            _ABSENT if array is None else self.see(array, device) for array in (c, bias, out)
        )
        if seen_c is None or seen_bias is None or seen_out is None:
            return MISSED
        if c is not None or bias is not None or out is not None:
            key = (*key, seen_c[0], seen_bias[0], seen_out[0])
        launch = self.launches.get(key)
        if launch is None:
            return Miss(self.launches, key)
        handle = current = self.current(device)
        if stream is not None:
            from tilewave.runtime.interop import stream_handle

            handle = stream_handle(stream)
        at_c, at_bias, at_out = seen_c[1], seen_bias[1], seen_out[1]
        if out is not None:
            if not launch.apart(at_a, at_b, at_c, at_bias, at_out):
                return MISSED
        else:
            if handle != current:
                return MISSED  # the result's memory is to come from that stream's pool
            out, at_out = self.empty(a, launch)
            if at_out & _VECTOR_MASK:
                return MISSED
        if not launch(at_a, at_b, at_c, at_bias, at_out, handle):
            return MISSED
        if handle != current:
            self.used_by((a, b, c, bias, out), handle, device)
        return out


_ABSENT: Final = (None, 0)


class _Torch(_Library):
    """PyTorch. Tensors that PyTorch's own functions would treat in a way of their own are not plain."""

    def __init__(self, torch: Any) -> None:
        super().__init__()
        self.kinds = (torch.Tensor, torch.nn.Parameter)
        self._float32 = torch.float32
        self._is_grad_enabled = torch.is_grad_enabled
        self._is_compiling = torch.compiler.is_compiling
        self._dispatch_modes = torch._C._len_torch_dispatch_stack
        self._function_modes = torch._C._len_torch_function_stack
        self._transforms = torch._C._are_functorch_transforms_active
        self._tracing = torch._C._get_tracing_state
        self._forward_ad = torch.autograd.forward_ad
        self._current_stream = torch._C._cuda_getCurrentRawStream
        self._current_device = torch._C._cuda_getDevice
        self._changed = torch.autograd.graph.increment_version
        # What PyTorch's own compiler allocates by, in a third of new_empty's time; on the current GPU only.
        self._empty_strided = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)

    def compute(self, a: Any, b: Any, c: Any, bias: Any, out: Any, stream: Any, options: Any) -> Any:
        if (
            self._is_compiling()
            or self._dispatch_modes()
            or self._function_modes()
            or self._transforms()
            or self._forward_ad._current_level >= 0
            or self._tracing() is not None
        ):
            return MISSED  # somebody wants to be told of what is done with tensors
        if options is not None and not _hashable(options):
            return MISSED
        float32 = self._float32
        try:
            device = a.get_device()
            if (
                type(b) not in self.kinds
                or a.dtype is not float32
                or b.dtype is not float32
                or b.get_device() != device
                or a.is_neg()
                or b.is_neg()
                or ((a.requires_grad or b.requires_grad) and self._is_grad_enabled())
            ):
                return MISSED
            at_a, at_b = a.data_ptr(), b.data_ptr()
            key = (
                options,
                device,
                a.shape,
                a.stride(),
                at_a & _VECTOR_MASK,
                b.shape,
                b.stride(),
                at_b & _VECTOR_MASK,
            )
            if c is None and bias is None and out is None and stream is None:
                launch = self.launches.get(key)
                if launch is None:
                    return Miss(self.launches, key)
                current = self._current_stream(device)
                result, at_result = self.empty(a, launch)
                if at_result & _VECTOR_MASK or not launch(at_a, at_b, 0, 0, at_result, current):
                    return MISSED
                return result
            result = self.compute_more(key, device, a, b, at_a, at_b, c, bias, out, stream)
        except RuntimeError:  # a tensor without memory, or no memory for the result
            return MISSED
        if result is out and out is not None and not out.is_inference():
            self._changed(out)
        return result

    def current(self, device: int) -> int:
        return int(self._current_stream(device))

    def see(self, array: Any, device: int) -> tuple[Any, int] | None:
        if (
            type(array) not in self.kinds
            or array.dtype is not self._float32
            or array.get_device() != device
            or array.is_neg()
            or (array.requires_grad and self._is_grad_enabled())
        ):
            return None
        address: int = array.data_ptr()
        return (array.shape, array.stride(), address & _VECTOR_MASK), address

    def used_by(self, arrays: tuple[Any, ...], stream: int, device: int) -> None:
        keep_tensors([array for array in arrays if array is not None], stream, device)

    def empty(self, like: Any, launch: PreparedGemm) -> tuple[Any, int]:
        here = launch.alone or self._current_device() == like.get_device()
        if here and self._empty_strided is not None:
            made = self._empty_strided(launch.shape, launch.strides, self._float32)
        else:
            made = like.new_empty(launch.shape)
        return made, made.data_ptr()


class _Cupy(_Library):
    """CuPy."""

    def __init__(self, cupy: Any) -> None:
        super().__init__()
        self.kinds = (cupy.ndarray,)
        self._array = cupy.ndarray
        self._float32 = np.dtype(np.float32)
        self._current_stream = cupy.cuda.get_current_stream
        self._current_device = cupy.cuda.runtime.getDevice
        self._several = cupy.cuda.runtime.getDeviceCount() > 1

    def compute(self, a: Any, b: Any, c: Any, bias: Any, out: Any, stream: Any, options: Any) -> Any:
        if options is not None and not _hashable(options):
            return MISSED
        float32 = self._float32
        memory_a = a.data
        device = memory_a.device_id
        if type(b) is not self._array or a.dtype is not float32 or b.dtype is not float32:
            return MISSED
        memory_b = b.data
        if memory_b.device_id != device:
            return MISSED
        at_a, at_b = memory_a.ptr, memory_b.ptr
        key = (
            options,
            device,
            a.shape,
            a.strides,
            at_a & _VECTOR_MASK,
            b.shape,
            b.strides,
            at_b & _VECTOR_MASK,
        )
        if self._several and out is None and self._current_device() != device:
            return MISSED  # memory for the result would come from another GPU
        if c is None and bias is None and out is None and stream is None:
            launch = self.launches.get(key)
            if launch is None:
                return Miss(self.launches, key)
            current = int(self._current_stream(device).ptr)
            result, at_result = self.empty(a, launch)
            if at_result & _VECTOR_MASK or not launch(at_a, at_b, 0, 0, at_result, current):
                return MISSED
            return result
        return self.compute_more(key, device, a, b, at_a, at_b, c, bias, out, stream)

    def current(self, device: int) -> int:
        return int(self._current_stream(device).ptr)

    def see(self, array: Any, device: int) -> tuple[Any, int] | None:
        if type(array) is not self._array or array.dtype is not self._float32:
            return None
        memory = array.data
        if memory.device_id != device:
            return None
        address: int = memory.ptr
        return (array.shape, array.strides, address & _VECTOR_MASK), address

    def empty(self, like: Any, launch: PreparedGemm) -> tuple[Any, int]:
        made = self._array(launch.shape, self._float32)
        return made, made.data.ptr

    def used_by(self, arrays: tuple[Any, ...], stream: int, device: int) -> None:
        """CuPy leaves it to its user to keep arrays until another stream is done with them."""


_libraries: dict[type, _Library | None] = {}
"""The library of each type of array that was met; None for all types that always go the long way."""


def _library_of(kind: type) -> _Library | None:
    found = None
    for name, library in (("torch", _Torch), ("cupy", _Cupy)):
        module = sys.modules.get(name)
        if module is None:
            continue
        try:
            made = library(module)
        except AttributeError:  # a build without CUDA, or one that answers other questions
            continue
        if kind in made.kinds:
            found = next((known for known in _libraries.values() if type(known) is library), made)
    _libraries[kind] = found
    return found
