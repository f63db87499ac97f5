"""Device memory of tilewave's own that other libraries take without a copy: results for JAX, Numba and
others.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewave import dlpack
from tilewave.errors import UsageError
from tilewave.runtime import driver
from tilewave.runtime.interop import wait_for
from tilewave.runtime.kernels import gpu_state


class SharedArray:
    """A float32 array in C order on a GPU, freed with the last object that refers to it.

    Other libraries take it by ``__dlpack__`` or ``__cuda_array_interface__``; ``stream`` is where its values
    are made, and what takes it waits for them there. ``to_numpy`` copies it to the host.
    """

    def __init__(self, address: int, shape: tuple[int, ...], device: int, stream: int) -> None:
        self.address = address
        self.shape = shape
        self.device = device
        self.stream = stream

    @classmethod
    def allocate(cls, shape: tuple[int, ...], device: int, stream: int) -> SharedArray:
        """Memory of undefined contents for work on ``stream``."""
        nbytes = max(4, 4 * math.prod(shape))
        state = gpu_state(device)
        with state.context():
            address = int(driver._call("cuMemAlloc", nbytes))
        array = cls(address, shape, device, stream)
        # cuMemFree waits for the GPU: whoever still reads the memory, on whatever stream, has finished then.
        weakref.finalize(array, driver._release, state.primary, "cuMemFree", address).atexit = False
        return array

    def __repr__(self) -> str:
        return f"SharedArray(float32 {self.shape} on GPU {self.device})"

    @property
    def dtype(self) -> np.dtype[np.float32]:
        """float32."""
        return np.dtype(np.float32)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address if math.prod(self.shape) else 0, False),
            "strides": None,
            "stream": self.stream or 1,  # the interface calls the legacy default stream 1
            "version": 3,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, self.device

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """A capsule; ``stream`` waits for the values (-1: it does not, None: the legacy default stream)."""
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(
                f"the array lies on {self.__dlpack_device__()} and is not copied to {dl_device}"
            )
        if copy:
            raise BufferError("the array is shared, not copied")
        if stream == 0:
            raise UsageError(
                "stream 0 is ambiguous in DLPack: 1 is the legacy default stream, 2 each thread's"
            )
        if stream != -1:
            wait_for(1 if stream is None else stream, self.stream, self.device)
        return dlpack.make_capsule(self, self.address, self.shape, self.device)

    def to_numpy(self) -> NDArray[np.float32]:
        """Wait for the values and copy them to the host."""
        values = np.empty(self.shape, np.float32)
        if values.size:
            with gpu_state(self.device).context():
                driver._call("cuStreamSynchronize", self.stream)
                driver._call("cuMemcpyDtoH", values.ctypes.data, self.address, values.nbytes)
        return values
