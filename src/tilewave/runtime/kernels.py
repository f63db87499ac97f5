"""Loaded kernels: each instance once per GPU, as a context-independent library of the driver.

Libraries and their kernels, unlike modules and their functions, belong to no context, so that a launch
follows the context of its stream: the primary one, or a green context that owns a part of the SMs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tilewave.compiler import choose_arch
from tilewave.device import DeviceSpec, query_device
from tilewave.device.driver import FORKED, ProcessState, driver_cuda_version
from tilewave.errors import CaptureError, DeviceError
from tilewave.kernels.build import compile_instance
from tilewave.kernels.instances import Instance
from tilewave.kernels.new_loops import outcome_for
from tilewave.planner.gemm.select import rule_out
from tilewave.runtime import driver
from tilewave.runtime.loop_choice import COMPILERS, Loop, choose_loop
from tilewave.runtime.loop_launcher import load_kernel


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
        self._loops: dict[str, Loop] = {}

    @contextmanager
    def context(self) -> Iterator[None]:
        """A context of this GPU is current inside: the caller's own if it is of this GPU, else primary."""
        current = driver._call("cuCtxGetCurrent")
        if int(current) == self._primary_value or (
            int(current) != 0 and int(driver._call("cuCtxGetDevice")) == int(self.handle)
        ):
            yield
            return
        with self.primary_context():
            yield

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

    def loop_of(self, instance_name: str) -> Loop | None:
        """Which loop the kernel of an instance runs here, and why; None before it is loaded."""
        return self._loops.get(instance_name)

    def lacks_loop(self, instance: Instance, stream: int) -> bool:
        """Whether a kernel needs the register-file pass's loop and does not get it here; loads it to see.

        From then on `plan_gemm` leaves such a kernel out on this GPU. It is told so every time: it may have
        dropped what it knew of a GPU, as it keeps a limited number of them.
        """
        if not instance.needs_new_loop:
            return False
        with self.context():
            self.kernel(instance, stream)
        loop = self._loops[instance.name]
        if not loop.new:
            rule_out(self.spec, instance, loop.why)
        return not loop.new

    def _load(self, instance: Instance) -> Any:
        arch = choose_arch(self.spec.compute_capability, driver_cuda_version())
        machine_code_only = arch.image == "cubin"
        program, kernel = compile_instance(instance, arch.arch, machine_code_only=machine_code_only)
        new = outcome_for(instance, program, kernel) if machine_code_only else None
        with self._lock, self.context():
            if instance.name in self._kernels:
                return self._kernels[instance.name]
            image, loop = arch.image_of(program), COMPILERS
            if new is not None:
                with self.primary_context():
                    loop = choose_loop(instance, program.cubin, new, kernel, self.spec, self.handle)
                if loop.new and new.cubin is not None:
                    image = new.cubin
            library, handle = load_kernel(image, kernel, instance, self.handle)
            self._libraries.append(library)
            self._loops[instance.name] = loop
            self._kernels[instance.name] = handle
            return handle

    @contextmanager
    def primary_context(self) -> Iterator[None]:
        """The primary context is current inside."""
        driver._call("cuCtxPushCurrent", self.primary)
        try:
            yield
        finally:
            driver._call("cuCtxPopCurrent")


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


def loop_in_use(device_name: str, instance_name: str) -> Loop | None:
    """Which loop an instance's kernel runs on a GPU of this name, if this process has loaded it on one."""
    for state in list(_states.values()):
        if state.spec.name == device_name and (loop := state.loop_of(instance_name)) is not None:
            return loop
    return None
