"""Loaded kernels: each instance once per GPU, as a context-independent library of the driver.

Libraries and their kernels, unlike modules and their functions, belong to no context, so that a launch
follows the context of its stream: the primary one, or a green context that owns a part of the SMs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tilewave.compiler import Program, choose_arch
from tilewave.device import DeviceSpec, query_device
from tilewave.device.driver import FORKED, ProcessState, bindings, driver_cuda_version
from tilewave.errors import CaptureError, DeviceError
from tilewave.kernels.build import compile_instance
from tilewave.kernels.instances import Instance
from tilewave.runtime import driver


class GpuState:
    """What tilewave keeps for one GPU of this process."""

    def __init__(self, ordinal: int) -> None:
        driver.require_gpu()
        self.ordinal = ordinal
        self.spec: DeviceSpec = query_device(ordinal)
        self.handle = driver._call("cuDeviceGet", ordinal)
        self.primary = driver._call("cuDevicePrimaryCtxRetain", self.handle)
        self._primary_value = int(self.primary)
        self._lock = threading.Lock()
        self._kernels: dict[str, Any] = {}
        self._libraries: list[Any] = []

    @contextmanager
    def context(self) -> Iterator[None]:
        """A context of this GPU is current inside: the caller's own if it is of this GPU, else primary."""
        current = driver._call("cuCtxGetCurrent")
        if int(current) == self._primary_value or (
            int(current) != 0 and int(driver._call("cuCtxGetDevice")) == int(self.handle)
        ):
            yield
            return
        driver._call("cuCtxPushCurrent", self.primary)
        try:
            yield
        finally:
            driver._call("cuCtxPopCurrent")

    def kernel(self, instance: Instance, stream: int) -> Any:
        """The handle to launch ``instance`` by; compiled and loaded at its first use, outside any capture."""
        handle = self._kernels.get(instance.name)
        if handle is None:
            if is_capturing(stream):
                raise CaptureError(
                    f"{instance} would have to be loaded while the stream is captured into a graph: call "
                    "tilewave.prepare() with this product before the capture begins"
                )
            handle = self._load(instance)
        return handle

    def _load(self, instance: Instance) -> Any:
        arch = choose_arch(self.spec.compute_capability, driver_cuda_version())
        machine_code_only = arch.image == "cubin"
        program, kernel = compile_instance(instance, arch.arch, machine_code_only=machine_code_only)
        with self._lock, self.context():
            if instance.name in self._kernels:
                return self._kernels[instance.name]
            image = _reordered(program, kernel.symbol) if machine_code_only else arch.image_of(program)
            library = driver._call("cuLibraryLoadData", image, [], [], 0, [], [], 0)
            self._libraries.append(library)
            loaded = driver._call("cuLibraryGetKernel", library, kernel.symbol.encode())
            cuda = bindings()
            if kernel.resources.static_shared_bytes + instance.shared_bytes > 48 * 1024:
                attribute = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                driver._call("cuKernelSetAttribute", attribute, instance.shared_bytes, loaded, self.handle)
            driver._call("cuKernelGetFunction", loaded)  # lazy loading ends here, not inside a capture
            handle = cuda.CUfunction(int(loaded))
            self._kernels[instance.name] = handle
            return handle


def _reordered(program: Program, symbol: str) -> bytes:
    """The machine code to load: put through the register-file pass where the user asks for it."""
    if os.environ.get("TILEWAVE_SASS_PASS") != "1":
        return program.cubin
    from tilewave.compiler.sass import image_to_load  # needs the decoder of the emulator

    return image_to_load(program, symbol)


def is_capturing(stream: int) -> bool:
    """Whether what is submitted to this stream is being recorded into a graph."""
    return int(driver._call("cuStreamIsCapturing", stream)) != 0


_states: dict[int, GpuState] = {}
_states_lock = threading.Lock()


def gpu_state(ordinal: int) -> GpuState:
    """The state of GPU ``ordinal``; CUDA is initialised at the first call."""
    state = _states.get(ordinal)
    if ProcessState.forked:
        raise DeviceError(FORKED)
    if state is None:
        with _states_lock:
            state = _states.get(ordinal)
            if state is None:
                state = _states[ordinal] = GpuState(ordinal)
    return state
