"""Workspace for partial sums: one arena a stream, and a reserve for captures.

A kernel that cuts tiles along K needs slots for partial sums and tickets that are 0 before and after. Work of
one stream runs in order, so that all its launches share one arena, which grows to the largest need (the
planner bounds it) and is given back in stream order when it is outgrown. Nobody says when a stream is
destroyed: a stream that was not seen before takes over the arena of one that has nothing left to do, so that
there are no more than streams at work at once. A graph may be replayed at any time
on any stream, so whatever a capture uses is its own for the life of the process; `reserve` sets it aside
beforehand, because nothing may be allocated while a stream is captured. Where nothing was set aside and it is
PyTorch that captures, memory comes from its graph's own pool, and lives as long as the graph.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilewave.errors import CaptureError, DeviceError
from tilewave.runtime import driver
from tilewave.runtime.interop import lasts, passed
from tilewave.runtime.kernels import GpuState, is_capturing
from tilewave.runtime.loop_launcher import relaxed_capture_mode

TICKET_UNIT = 4096
"""Tickets lie before the partial sums, in whole units of so many bytes."""


@dataclass(frozen=True)
class Arena:
    """Workspace on a GPU: tickets at the beginning, partial sums behind."""

    address: int
    ticket_bytes: int
    partial_bytes: int

    @property
    def partials(self) -> int:
        """Address of the partial sums, a multiple of 256."""
        return self.address + self.ticket_bytes

    @property
    def nbytes(self) -> int:
        """Size of the whole."""
        return self.ticket_bytes + self.partial_bytes

    def holds(self, ticket_bytes: int, partial_bytes: int) -> bool:
        """Whether a launch with these needs fits."""
        return ticket_bytes <= self.ticket_bytes and partial_bytes <= self.partial_bytes


class Submitting:
    """A lock, and what is to be done by whoever gives it up."""

    def __init__(self, at_the_end: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._at_the_end = at_the_end

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        try:
            self._at_the_end()
        finally:
            self._lock.release()

    def locked(self) -> bool:
        """Whether somebody holds it."""
        return self._lock.locked()


class WorkspacePool:
    """The arenas of one GPU.

    Whoever takes an arena holds `submitting` until the last launch that uses it is submitted: between them
    another thread that works on the same stream might outgrow and free it, or overwrite what one launch has
    written for the next.
    """

    def __init__(self, state: GpuState) -> None:
        self.submitting = Submitting(self._mark_last_uses)
        self._state = state
        self._lock = threading.Lock()
        self._by_stream: dict[int, Arena] = {}
        # Of streams that may be destroyed: which were used since `submitting` was entered (identity, handle),
        # an event for each, and the identities of those whose event is behind their last launch.
        self._used: list[tuple[int, int]] = []
        self._events: dict[int, Any] = {}
        self._marked: set[int] = set()
        self._reserve: list[Arena] = []
        self._captured: dict[tuple[int, int], Arena] = {}

    def take(self, stream: int, ticket_bytes: int, partial_bytes: int) -> Arena:
        """An arena for work that is submitted to ``stream`` next."""
        if is_capturing(stream):
            return self._take_for_capture(stream, ticket_bytes, partial_bytes)
        # Handles are used again for other streams, identities are not (nor told while capturing).
        identity = int(driver._call("cuStreamGetId", stream))
        with self._lock:
            self._marked.discard(identity)  # it was not known before that a stream lasts, maybe
            if not lasts(stream):
                self._used.append((identity, stream))
            arena = self._by_stream.get(identity) or self._left_behind(ticket_bytes, partial_bytes)
            if arena is None or not arena.holds(ticket_bytes, partial_bytes):
                if arena is not None:
                    ticket_bytes = max(ticket_bytes, arena.ticket_bytes)
                    partial_bytes = max(partial_bytes, arena.partial_bytes)
                    self._by_stream.pop(identity, None)
                    driver._call("cuMemFreeAsync", arena.address, stream)
                arena = self._allocate(stream, ticket_bytes, partial_bytes)
            self._by_stream[identity] = arena
            return arena

    def reserve(self, ticket_bytes: int, partial_bytes: int, count: int = 1) -> None:
        """Have ``count`` arenas of this size set aside for captures; waits until they are ready."""
        with self._lock:
            ready = sum(arena.holds(ticket_bytes, partial_bytes) for arena in self._reserve)
            if ready >= count:
                return
            with self._state.context():
                stream = driver._call("cuStreamCreate", 1)
                try:
                    for _ in range(count - ready):
                        self._reserve.append(self._allocate(int(stream), ticket_bytes, partial_bytes))
                    driver._call("cuStreamSynchronize", stream)
                finally:
                    driver._call("cuStreamDestroy", stream)

    def nbytes(self) -> int:
        """Bytes held on this GPU: the arenas of all streams, captures and the reserve."""
        with self._lock:
            arenas = [*self._by_stream.values(), *self._reserve, *set(self._captured.values())]
            return sum(arena.nbytes for arena in arenas)

    def _mark_last_uses(self) -> None:
        """Note where the streams of the launches just submitted are; one that cannot be asked keeps its
        arena.
        """
        with self._lock:
            used, self._used = self._used, []  # whatever happens: they may be gone at the next time
            for identity, stream in used:
                if identity not in self._by_stream:
                    continue  # no memory was to be had for it
                event = self._events.get(identity)
                if event is None:
                    with self._state.primary_context():
                        event = self._events[identity] = driver._call("cuEventCreate", 2)  # without timing
                with contextlib.suppress(DeviceError):
                    driver._call("cuEventRecord", event, stream)
                    self._marked.add(identity)

    def _left_behind(self, ticket_bytes: int, partial_bytes: int) -> Arena | None:
        """The arena of a stream that has nothing left to do, and may have been destroyed; it is given up.

        One that is large enough, where there is such a one.
        """
        if not self._marked:
            return None
        with relaxed_capture_mode():
            idle = [each for each in self._marked if passed(self._events[each])]
        if not idle:
            return None
        chosen = max(idle, key=lambda each: self._by_stream[each].holds(ticket_bytes, partial_bytes))
        self._marked.remove(chosen)
        driver._call("cuEventDestroy", self._events.pop(chosen))
        return self._by_stream.pop(chosen)

    def _take_for_capture(self, stream: int, ticket_bytes: int, partial_bytes: int) -> Arena:
        # (status, id of the capture, ...): streams that were forked into a capture share its id.
        capture = int(driver._call("cuStreamGetCaptureInfo", stream)[1])
        with self._lock:
            held = self._captured.get((capture, stream))
            if held is not None and held.holds(ticket_bytes, partial_bytes):
                return held
            fitting = [arena for arena in self._reserve if arena.holds(ticket_bytes, partial_bytes)]
            if not fitting and (lent := self._lent_by_torch(stream, ticket_bytes, partial_bytes)):
                return lent
            if not fitting:
                raise CaptureError(
                    f"{ticket_bytes + partial_bytes:,} bytes of workspace would have to be allocated while "
                    "the stream is captured into a graph: call tilewave.prepare() with this product before "
                    "the capture begins (branches= for streams that take part in it side by side), or pass "
                    "workspace="
                )
            arena = min(fitting, key=lambda candidate: candidate.nbytes)
            self._reserve.remove(arena)
            self._captured[(capture, stream)] = arena
            return arena

    def _lent_by_torch(self, stream: int, ticket_bytes: int, partial_bytes: int) -> Arena | None:
        """Memory of the graph that PyTorch captures on its current stream; None where that is another one.

        The tensor is given back at once: PyTorch hands its memory to what is captured later on this stream
        only, which runs after the launch that it is for. So each launch asks anew, and its tickets are
        cleared within the graph.
        """
        torch = sys.modules.get("torch")
        current = getattr(getattr(torch, "_C", None), "_cuda_getCurrentRawStream", None)
        if torch is None or current is None or int(current(self._state.ordinal)) != stream:
            return None
        ticket_bytes = _whole_units(ticket_bytes)
        device = f"cuda:{self._state.ordinal}"
        lent = torch.empty(ticket_bytes + partial_bytes, dtype=torch.uint8, device=device)
        address = int(lent.data_ptr())
        driver._call("cuMemsetD8Async", address, 0, ticket_bytes, stream)
        return Arena(address, ticket_bytes, partial_bytes)

    def _allocate(self, stream: int, ticket_bytes: int, partial_bytes: int) -> Arena:
        ticket_bytes = _whole_units(ticket_bytes)
        address = int(driver._call("cuMemAllocAsync", ticket_bytes + partial_bytes, stream))
        driver._call("cuMemsetD8Async", address, 0, ticket_bytes, stream)
        return Arena(address, ticket_bytes, partial_bytes)


def _whole_units(ticket_bytes: int) -> int:
    return max(1, -(-ticket_bytes // TICKET_UNIT)) * TICKET_UNIT


_pools: dict[int, WorkspacePool] = {}
_pools_lock = threading.Lock()


def workspace_pool(state: GpuState) -> WorkspacePool:
    """The pool of a GPU."""
    with _pools_lock:
        pool = _pools.get(state.ordinal)
        if pool is None:
            pool = _pools[state.ordinal] = WorkspacePool(state)
        return pool


_group_pools: dict[int, WorkspacePool] = {}


def group_pool(state: GpuState) -> WorkspacePool:
    """The pool of a GPU for groups alone."""
    with _pools_lock:
        pool = _group_pools.get(state.ordinal)
        if pool is None:
            pool = _group_pools[state.ordinal] = WorkspacePool(state)
        return pool
