"""Running the products of a loop's check on a GPU, on a stream of its own and beside whatever else runs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from tilewave.compiler import Kernel
from tilewave.device.driver import bindings
from tilewave.kernels.arguments import GEMM_ARGS_BYTES
from tilewave.kernels.instances import Instance
from tilewave.runtime import driver
from tilewave.runtime.driver import NAN_PATTERN
from tilewave.runtime.loop_check import Bits
from tilewave.runtime.loop_products import LoopProduct

LAUNCHES = 2
"""Of the new kernel, all of whose bits must be the same: the timing of two launches differs."""

UNSTABLE = 0x7FC0DEAD
"""Bits of an element that two launches of one kernel computed differently: a NaN that no kernel makes."""


def load_kernel(image: bytes, kernel: Kernel, instance: Instance, device: Any) -> tuple[Any, Any]:
    """The library of a cubin or PTX, and the handle to launch an instance's kernel in it by on a GPU."""
    cuda = bindings()
    library = driver._call("cuLibraryLoadData", image, [], [], 0, [], [], 0)
    loaded = driver._call("cuLibraryGetKernel", library, kernel.symbol.encode())
    if kernel.resources.static_shared_bytes + instance.shared_bytes > 48 * 1024:
        attribute = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver._call("cuKernelSetAttribute", attribute, instance.shared_bytes, loaded, device)
    driver._call("cuKernelGetFunction", loaded)  # lazy loading ends here, not inside a capture
    return library, cuda.CUfunction(int(loaded))


@contextmanager
def apart_from_captures() -> Iterator[int]:
    """A stream of its own, on which this thread may wait and allocate though other streams are captured.

    A capture in another thread, or of another stream of this one, would otherwise be broken by calls that
    might be meant for it; these are not.
    """
    with relaxed_capture_mode():
        non_blocking = int(bindings().CUstream_flags.CU_STREAM_NON_BLOCKING)
        stream = driver._call("cuStreamCreate", non_blocking)
        try:
            yield int(stream)
        finally:
            driver._call("cuStreamDestroy", stream)


@contextmanager
def relaxed_capture_mode() -> Iterator[None]:
    """Calls of this thread inside do not break captures of other threads or streams."""
    relaxed = bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = driver._call("cuThreadExchangeStreamCaptureMode", relaxed)
    try:
        yield
    finally:
        driver._call("cuThreadExchangeStreamCaptureMode", before)


class ProductOnGpu:
    """A product with all its memory in the current context, which `release` gives back.

    Nothing is allocated any more when it is run: that a GPU is full does not look like a wrong kernel.
    """

    def __init__(self, product: LoopProduct, stream: int) -> None:
        self._product, self._stream = product, stream
        self._owned = ExitStack()
        try:
            self._place()
        except BaseException:
            self.release()
            raise

    def __str__(self) -> str:
        return str(self._product)

    @property
    def finite(self) -> bool:
        """Whether no element of the result is NaN."""
        return self._product.finite

    def _place(self) -> None:
        product, stream = self._product, self._stream
        a, b = (self._allocate(array.nbytes) for array in (product.a, product.b))
        for address, array in ((a, product.a), (b, product.b)):
            driver._call("cuMemcpyHtoDAsync", address, array.ctypes.data, array.nbytes, stream)
        self._shape = (product.problem.m, product.problem.n)
        elements = (self._shape[0] * self._shape[1], product.partials, product.tickets)
        self._out, partials, self._tickets = (self._allocate(4 * count) for count in elements)
        packed = product.arguments(a, b, self._out, partials, self._tickets)
        self._block = ctypes.create_string_buffer(packed, GEMM_ARGS_BYTES)
        self._parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self._block))
        driver._call("cuStreamSynchronize", stream)

    def _allocate(self, nbytes: int) -> int:
        pointer = driver._call("cuMemAlloc", max(4, nbytes))
        self._owned.callback(driver._call, "cuMemFree", pointer)
        return int(pointer)

    def release(self) -> None:
        """Free the memory; the product cannot be run any more."""
        self._owned.close()

    def run(self, kernel: Any, launches: int = 1) -> Bits:
        """The bits of out by a loaded kernel; those that differ between launches come out as `UNSTABLE`."""
        results = [self._launched(kernel) for _ in range(launches)]
        found = results[0]
        for other in results[1:]:
            found = np.where(other == found, found, np.uint32(UNSTABLE))
        return found

    def _launched(self, kernel: Any) -> Bits:
        product, stream = self._product, self._stream
        driver._call("cuMemsetD32Async", self._out, NAN_PATTERN, self._shape[0] * self._shape[1], stream)
        driver._call("cuMemsetD32Async", self._tickets, 0, max(1, product.tickets), stream)
        driver._call(
            "cuLaunchKernel",
            kernel,
            product.cut.blocks,
            1,
            1,
            product.instance.threads,
            1,
            1,
            product.instance.shared_bytes,
            stream,
            ctypes.addressof(self._parameters),
            0,
        )
        bits = np.empty(self._shape, np.uint32)
        driver._call("cuMemcpyDtoHAsync", bits.ctypes.data, self._out, bits.nbytes, stream)
        driver._call("cuStreamSynchronize", stream)
        return bits
