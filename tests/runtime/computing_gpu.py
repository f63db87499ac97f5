"""A fake GPU that computes large tiles' products with NumPy, right or wrong as a test wants it."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray
from tests.runtime.fake_gpu import FakeGpu, Result

from tilewave.kernels.arguments import GEMM_ARGS_BYTES, POINTER_OFFSETS, SCALARS_OFFSET

Floats = NDArray[np.float32]
Fault = Callable[[Floats, int], None]
"""Spoils a result that the new kernel made, given the number of its launch."""


class ComputingGpu(FakeGpu):
    """Kernels of cubins that are not among ``compilers`` (the compiler's own) are subject to ``fault``."""

    def __init__(self) -> None:
        super().__init__()
        self.images: dict[int, bytes] = {}
        self.kernels: dict[int, int] = {}
        self.compilers: set[bytes] = set()
        self.fault: Fault = lambda out, launch: None
        self.new_launches = 0
        self.CUstream_flags = _Names(CU_STREAM_NON_BLOCKING=1)
        self.forbidden_in_capture = set()

    @property
    def loaded_now(self) -> list[bytes]:
        """Images of the libraries that are loaded, oldest first."""
        return list(self.images.values())

    def on_cuLibraryLoadData(self, image: bytes, *rest: Any) -> tuple[int]:
        (handle,) = self.new_handle()
        self.images[handle] = image
        return (handle,)

    def on_cuLibraryUnload(self, library: int) -> tuple[()]:
        del self.images[library]
        return ()

    def on_cuLibraryGetKernel(self, library: int, name: bytes) -> tuple[int]:
        (handle,) = self.new_handle()
        self.kernels[handle] = library
        return (handle,)

    def on_cuMemAlloc(self, nbytes: int) -> tuple[int]:
        assert not self.capturing or self.capture_mode == "relaxed", "cuMemAlloc would break a capture"
        return self.on_cuMemAllocAsync(nbytes, 0)

    def on_cuMemFree(self, address: int) -> tuple[()]:
        return self.on_cuMemFreeAsync(address, 0)

    def on_cuMemsetD32Async(self, address: int, value: int, count: int, stream: int) -> tuple[()]:
        words = (ctypes.c_uint32 * count).from_address(address)
        np.frombuffer(words, np.uint32)[...] = value
        return ()

    def on_cuLaunchKernel(self, *arguments: Any) -> tuple[()]:
        super().on_cuLaunchKernel(*arguments)
        out = computed(self.launches[-1][1])
        if self.images[self.kernels[arguments[0]]] not in self.compilers:
            self.new_launches += 1
            self.fault(out, self.new_launches)
        return ()


class OutOfMemory(ComputingGpu):
    """A GPU without a byte to spare."""

    def __getattr__(self, name: str) -> Any:
        if name == "cuMemAlloc":
            return lambda *arguments: (Result.CUDA_ERROR_OUT_OF_MEMORY,)
        return super().__getattr__(name)


class _Names:
    def __init__(self, **names: Any) -> None:
        self.__dict__.update(names)


def computed(block: bytes) -> Floats:
    """Compute what a kernel's argument describes, in this process's memory; the result in its place."""

    def matrix(name: str, rows: int, columns: int) -> Floats:
        address, row, column = struct.unpack_from("<3q", block, POINTER_OFFSETS[name])
        count = (rows - 1) * row + (columns - 1) * column + 1
        memory = np.frombuffer((ctypes.c_float * count).from_address(address), np.float32)
        return as_strided(memory, (rows, columns), (4 * row, 4 * column))

    assert len(block) == GEMM_ARGS_BYTES
    m, n, k = struct.unpack_from("<3q", block, 6 * 48)
    (alpha,) = struct.unpack_from("<f", block, SCALARS_OFFSET)
    out = matrix("out", m, n)
    with np.errstate(invalid="ignore"):
        out[...] = np.float32(alpha) * (matrix("a", m, k) @ matrix("b", k, n))
    return out


@contextmanager
def refusing(directory: Any) -> Any:
    """While inside, the cache in this directory may neither be read nor written: others could write there."""
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o777)
    try:
        yield
    finally:
        directory.chmod(0o700)
