"""Between tilewave and the libraries that own the arrays: which GPU, which stream, whose memory."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from tilewave.device.driver import bindings
from tilewave.errors import UsageError
from tilewave.messages import shown
from tilewave.runtime import driver
from tilewave.runtime.kernels import gpu_state, is_capturing
from tilewave.runtime.loop_launcher import relaxed_capture_mode


def device_of_pointer(address: int) -> int:
    """The number of the GPU whose memory holds ``address``."""
    driver.require_gpu()
    attribute = bindings().CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return int(driver._call("cuPointerGetAttribute", attribute, address))


def wait_for(stream: int, producer: int, device: int) -> None:
    """Let ``stream`` begin what is submitted to it next only after what ``producer`` holds now. Nothing
    blocks.

    Both are raw handles: 0 and 1 are the legacy default stream, 2 is the calling thread's.
    """
    legacy = (0, 1)
    if stream == producer or (stream in legacy and producer in legacy):
        return
    with gpu_state(device).context():
        event = driver._call("cuEventCreate", 2)  # without timing
        try:
            driver._call("cuEventRecord", event, producer)
            driver._call("cuStreamWaitEvent", stream, event, 0)
        finally:
            driver._call("cuEventDestroy", event)


_PER_THREAD = 2
"""The handle by which every thread means another stream: its own, which ends with it."""

_lasting: set[int] = {0, 1}
"""Streams that are never destroyed: the default stream, and those of PyTorch's own pool that were met."""
_followers: dict[int, int] = {}
"""For each GPU a stream of tilewave's own, on which nothing runs; never destroyed either."""
_followers_lock = threading.Lock()


def lasts(stream: int) -> bool:
    """Whether a handle is known to mean one stream, in every thread, that lives as long as the process."""
    return stream in _lasting


def lasting_stream(stream: int, device: int) -> int:
    """A stream that is never destroyed, and passes what ``stream`` holds now no earlier than that.

    For whoever remembers a stream and asks it at some later time whether it has passed, as PyTorch does when
    memory is freed: a stream that was given as a handle may be gone by then. That is ``stream`` itself where
    it is known to last, else one of tilewave's own that waits for it; neither the host nor ``stream`` waits.
    What is captured has not happened, and nothing waits for it.
    """
    if lasts(stream):
        return stream
    state = gpu_state(device)
    # The caller's own context may be a green one, which would take streams and events with it when it goes.
    with state.primary_context(), _followers_lock:
        follower = _followers.get(device)
        if follower is None:
            with relaxed_capture_mode():  # another thread may capture
                follower = _followers[device] = int(driver._call("cuStreamCreate", 1))  # non-blocking
    # Every context has a stream of the thread's: the one at work is that of the caller's context.
    with state.context() if stream == _PER_THREAD else state.primary_context():
        if not is_capturing(stream):
            wait_for(follower, stream, device)
    return follower


_kept: list[tuple[Any, object]] = []
"""Owners of memory that is in use, each with the event behind its last use."""
_kept_lock = threading.Lock()


def keep_until_passed(owner: object, stream: int, device: int) -> None:
    """Keep ``owner`` alive until ``stream`` has passed this point; what was passed already is let go.

    What a capture uses is kept for the life of the process, because its graph may be replayed at any time.
    """
    with gpu_state(device).context(), _kept_lock:
        with relaxed_capture_mode() if _kept else contextlib.nullcontext():
            done = [place for place, (event, _) in enumerate(_kept) if event is not None and passed(event)]
        for place in reversed(done):
            driver._call("cuEventDestroy", _kept.pop(place)[0])
        event = None
        if not is_capturing(stream):
            event = driver._call("cuEventCreate", 2)  # without timing
            driver._call("cuEventRecord", event, stream)
        _kept.append((event, owner))


def passed(event: Any) -> bool:
    """Whether the stream that an event was recorded on has come to it; asked in `relaxed_capture_mode`, for
    the question would break another thread's capture otherwise.
    """
    return int(bindings().cuEventQuery(event)[0]) == 0


def stream_handle(stream: Any) -> int:
    """The raw handle of a stream: an int, a stream of PyTorch or CuPy, or anything with
    ``__cuda_stream__``.
    """
    if isinstance(stream, int) and not isinstance(stream, bool):
        handle: Any = stream
    elif hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        answer = protocol() if callable(protocol) else protocol
        if not isinstance(answer, tuple | list) or len(answer) != 2:
            raise UsageError(
                f"stream answers __cuda_stream__ with {shown(answer)}; accepted is a pair of version and "
                "handle"
            )
        version, handle = answer
        if version != 0:
            raise UsageError(f"stream speaks version {shown(version)} of __cuda_stream__; accepted is 0")
    else:
        names = ("cuda_stream", "ptr", "handle")  # PyTorch, CuPy, tilewave
        handle = next((getattr(stream, name) for name in names if hasattr(stream, name)), None)
    if not isinstance(handle, int) or isinstance(handle, bool) or handle < 0:
        raise UsageError(
            f"stream is {shown(stream)}; accepted are a handle (an int), a stream of PyTorch or CuPy, or an "
            "object with __cuda_stream__"
        )
    # PyTorch numbers the streams of its pool, which live as long as the process, and goes by the handles of
    # streams that others have made.
    if hasattr(stream, "cuda_stream") and getattr(stream, "stream_id", handle) != handle:
        _lasting.add(handle)
    return handle
