"""A driver whose GPU memory is this process's own, with streams, captures and stream-ordered memory."""

from __future__ import annotations

import ctypes
import enum
import types
from typing import Any


class Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_NOT_READY = 600


class FakeGpu(types.ModuleType):
    """Answers driver calls; everything runs at once, and what was asked is kept in `calls`."""

    CUresult = Result

    def __init__(self) -> None:
        super().__init__("fake")
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.capturing: dict[int, int] = {}  # stream: id of its capture
        self.memory: dict[int, Any] = {}
        self.launches: list[tuple[tuple[Any, ...], bytes]] = []
        self.current = 0
        self.pushed: list[int] = []
        self.forbidden_in_capture = {
            "cuMemAllocAsync",
            "cuMemAlloc",
            "cuLibraryLoadData",
            "cuMemHostAlloc",
            "cuStreamGetId",
        }
        self.CUfunction_attribute = types.SimpleNamespace(
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared"
        )
        self.CUstreamCaptureMode = types.SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed")
        self.capture_mode = "global"
        self.unfinished: set[int] = set()  # streams
        self.recorded: dict[int, int] = {}  # event: stream
        self.destroyed_events: set[int] = set()
        self.CUfunction = int
        self._next = 1000

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            if self.capturing and name in self.forbidden_in_capture:
                raise AssertionError(f"{name} while a stream is captured")
            self.calls.append((name, arguments))
            handler = getattr(type(self), f"on_{name}", None)
            return (Result.CUDA_SUCCESS, *(handler(self, *arguments) if handler else ()))

        return call

    def count(self, name: str) -> int:
        return sum(called == name for called, _ in self.calls)

    def new_handle(self) -> tuple[int]:
        self._next += 1
        return (self._next,)

    def on_cuDriverGetVersion(self) -> tuple[int]:
        return (13000,)

    def on_cuDeviceGetCount(self) -> tuple[int]:
        return (2,)

    def on_cuDeviceGet(self, ordinal: int) -> tuple[int]:
        return (ordinal,)

    def on_cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int]:
        return (700 + device,)

    def on_cuCtxGetCurrent(self) -> tuple[int]:
        return (self.current,)

    def on_cuCtxGetDevice(self) -> tuple[int]:
        return (self.current % 100,)

    def on_cuCtxPushCurrent(self, context: int) -> tuple[()]:
        self.pushed.append(self.current)
        self.current = context
        return ()

    def on_cuCtxPopCurrent(self) -> tuple[int]:
        popped, self.current = self.current, self.pushed.pop()
        return (popped,)

    def on_cuStreamCreate(self, flags: int) -> tuple[int]:
        return self.new_handle()

    def on_cuEventCreate(self, flags: int) -> tuple[int]:
        return self.new_handle()

    def on_cuEventRecord(self, event: int, stream: int) -> tuple[()]:
        assert event not in self.destroyed_events
        self.recorded[event] = stream
        return ()

    def on_cuEventDestroy(self, event: int) -> tuple[()]:
        self.destroyed_events.add(event)
        return ()

    def cuEventQuery(self, event: int) -> tuple[Result]:
        if self.capturing and self.capture_mode != "relaxed":
            raise AssertionError("cuEventQuery while a stream is captured")
        self.calls.append(("cuEventQuery", (event,)))
        busy = self.recorded[event] in self.unfinished
        return (Result.CUDA_ERROR_NOT_READY if busy else Result.CUDA_SUCCESS,)

    def on_cuThreadExchangeStreamCaptureMode(self, mode: str) -> tuple[str]:
        before, self.capture_mode = self.capture_mode, mode
        return (before,)

    def on_cuStreamGetId(self, stream: int) -> tuple[int]:
        return (stream + 5,)

    def on_cuStreamIsCapturing(self, stream: int) -> tuple[int]:
        return (int(stream in self.capturing),)

    def on_cuStreamGetCaptureInfo(self, stream: int) -> tuple[int, int, None]:
        return (1, self.capturing[stream], None)

    def on_cuLibraryLoadData(self, image: bytes, *rest: Any) -> tuple[int]:
        return self.new_handle()

    def on_cuLibraryGetKernel(self, library: int, name: bytes) -> tuple[int]:
        return self.new_handle()

    def on_cuMemAllocAsync(self, nbytes: int, stream: int) -> tuple[int]:
        block = (ctypes.c_uint8 * (nbytes + 256))()
        ctypes.memset(block, 0xFF, nbytes + 256)
        address = -(-ctypes.addressof(block) // 256) * 256
        self.memory[address] = block
        return (address,)

    def on_cuMemHostAlloc(self, nbytes: int, flags: int) -> tuple[int]:
        return self.on_cuMemAllocAsync(nbytes, 0)

    def on_cuMemFreeAsync(self, address: int, stream: int) -> tuple[()]:
        del self.memory[address]
        return ()

    def on_cuMemsetD8Async(self, address: int, value: int, nbytes: int, stream: int) -> tuple[()]:
        ctypes.memset(address, value, nbytes)
        return ()

    def on_cuMemcpyHtoDAsync(self, to: int, source: int, nbytes: int, stream: int) -> tuple[()]:
        ctypes.memmove(to, source, nbytes)
        return ()

    def on_cuMemcpyDtoHAsync(self, to: int, source: int, nbytes: int, stream: int) -> tuple[()]:
        ctypes.memmove(to, source, nbytes)
        return ()

    def on_cuLaunchKernel(self, *arguments: Any) -> tuple[()]:
        from tilewave.kernels.arguments import GEMM_ARGS_BYTES

        pointer = ctypes.c_void_p.from_address(arguments[9]).value
        assert pointer is not None
        self.launches.append((arguments, ctypes.string_at(pointer, GEMM_ARGS_BYTES)))
        return ()
