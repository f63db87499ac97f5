"""Host operands on a GPU: copied through pinned memory, a piece while the last one still travels."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tilewave.errors import DeviceError
from tilewave.runtime import driver
from tilewave.runtime.kernels import GpuState, gpu_state

PIECE_BYTES = 16 << 20
"""Size of one of the two pinned buffers of a GPU: large enough that a copy's fixed cost does not show."""


class DeviceBuffer:
    """Device memory taken from and returned to a stream's own order."""

    def __init__(self, stager: Stager, nbytes: int) -> None:
        self._stager = stager
        self.nbytes = nbytes
        self.address = int(driver._call("cuMemAllocAsync", max(1, nbytes), stager.stream))

    def free(self) -> None:
        """Give the memory back once all that was submitted before has run."""
        driver._call("cuMemFreeAsync", self.address, self._stager.stream)


class Stager:
    """Two pinned buffers and a stream of one GPU; used by one thread at a time, under `lock`."""

    def __init__(self, state: GpuState) -> None:
        self.lock = threading.Lock()
        self.state = state
        with state.context():
            self.stream = int(driver._call("cuStreamCreate", 1))
            self._pinned = [int(driver._call("cuMemHostAlloc", PIECE_BYTES, 0)) for _ in range(2)]
            self._passed = [driver._call("cuEventCreate", 2) for _ in range(2)]
        self._views = [
            np.ctypeslib.as_array((ctypes.c_uint8 * PIECE_BYTES).from_address(address))
            for address in self._pinned
        ]

    def upload(self, array: NDArray[np.float32]) -> DeviceBuffer:
        """A copy of ``array`` in device memory, in C order; ready for what is submitted to `stream` next."""
        source = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        buffer = DeviceBuffer(self, source.nbytes)
        try:
            for turn, begin, end in _pieces(source.nbytes):
                driver._call("cuEventSynchronize", self._passed[turn])
                self._views[turn][: end - begin] = source[begin:end]
                driver._call(
                    "cuMemcpyHtoDAsync", buffer.address + begin, self._pinned[turn], end - begin, self.stream
                )
                driver._call("cuEventRecord", self._passed[turn], self.stream)
        except BaseException:
            buffer.free()
            raise
        return buffer

    def download(self, buffer: DeviceBuffer, out: NDArray[np.float32]) -> None:
        """Copy device memory in C order into ``out``, of any strides; returns when it is there."""
        if buffer.nbytes != out.nbytes:
            raise DeviceError(f"{buffer.nbytes} bytes of device memory do not fill an array of {out.nbytes}")
        direct = out.flags.c_contiguous
        target = out if direct else np.empty(out.shape, np.float32)
        flat = target.reshape(-1).view(np.uint8)
        pending: tuple[int, int, int] | None = None
        for piece in _pieces(flat.nbytes):
            turn, begin, end = piece
            driver._call(
                "cuMemcpyDtoHAsync", self._pinned[turn], buffer.address + begin, end - begin, self.stream
            )
            driver._call("cuEventRecord", self._passed[turn], self.stream)
            if pending is not None:
                self._drain(pending, flat)
            pending = piece
        if pending is not None:
            self._drain(pending, flat)
        if not direct:
            out[...] = target

    def _drain(self, piece: tuple[int, int, int], flat: NDArray[np.uint8]) -> None:
        turn, begin, end = piece
        driver._call("cuEventSynchronize", self._passed[turn])
        flat[begin:end] = self._views[turn][: end - begin]


def _pieces(nbytes: int) -> Iterator[tuple[int, int, int]]:
    """(which of the two buffers, first byte, byte behind the last) of each piece."""
    for index, begin in enumerate(range(0, nbytes, PIECE_BYTES)):
        yield index % 2, begin, min(nbytes, begin + PIECE_BYTES)


_stagers: dict[int, Stager] = {}
_stagers_lock = threading.Lock()


def stager(ordinal: int) -> Stager:
    """The stager of a GPU; made at its first use and kept."""
    with _stagers_lock:
        found = _stagers.get(ordinal)
        if found is None:
            found = _stagers[ordinal] = Stager(gpu_state(ordinal))
        return found
