"""The stopwatch for a GPU: CUDA events around launches, or around a CUDA graph of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from tilewave.runtime.driver import Device, Event, Graph, Stream

#: From this many calls a sample on, the calls are replayed from a graph: each is so short that the host's
#: time to submit it would show, and that differs between a library call and a bare launch.
GRAPH_FROM = 8
#: Calls in one graph; a sample of more replays it.
GRAPH_CALLS = 64


class EventStopwatch:
    """Measures with CUDA events on one stream.

    With ``graphs``, samples of many short calls are replayed from a CUDA graph, so that host time does not
    count. Use `can_capture` to find out whether all contenders allow that: either all use graphs, or none.
    """

    def __init__(self, device: Device, stream: Stream, *, graphs: bool = False) -> None:
        self._stream = stream
        self._start, self._end = Event(device), Event(device)
        self._graphs = graphs

    def elapsed_ms(self, work: Callable[[], None], repeats: int) -> float:
        """GPU milliseconds for ``repeats`` calls of ``work`` back to back."""
        if self._graphs and repeats >= GRAPH_FROM:
            calls = min(repeats, GRAPH_CALLS)
            replays = math.ceil(repeats / calls)
            graph = capture(self._stream, work, calls)
            graph.launch()  # the first launch uploads the graph
            return self._between_events(graph.launch, replays) * repeats / (calls * replays)
        return self._between_events(work, repeats)

    def _between_events(self, work: Callable[[], None], repeats: int) -> float:
        self._stream.synchronize()
        self._start.record(self._stream)
        for _ in range(repeats):
            work()
        self._end.record(self._stream)
        self._end.synchronize()
        return self._end.milliseconds_since(self._start)


def capture(stream: Stream, work: Callable[[], None], calls: int) -> Graph:
    """A graph of ``calls`` calls of ``work``, which must submit to ``stream``."""

    def submit() -> None:
        for _ in range(calls):
            work()

    return stream.capture(submit)


def can_capture(stream: Stream, works: Iterable[Callable[[], None]]) -> bool:
    """Whether every one of these can be recorded into a graph (each must have run once before)."""
    try:
        for work in works:
            capture(stream, work, 1).launch()
        stream.synchronize()
    except Exception:  # a library that allocates or synchronises inside a call fails in ways of its own
        return False
    return True
