"""The GPU's stopwatch against a made-up stream: graphs for many short calls, plain launches for few."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tilewave.bench import gpu
from tilewave.errors import DeviceError


class FakeStream:
    """Counts work in milliseconds; recording a graph runs nothing."""

    def __init__(self) -> None:
        self.time_ms = 0.0
        self.recording: float | None = None
        self.captures: list[int] = []
        self.replays = 0
        self.can_record = True

    def synchronize(self) -> None:
        if self.recording is not None:
            raise DeviceError("not while recording")

    def work(self, cost_ms: float) -> None:
        if self.recording is None:
            self.time_ms += cost_ms
        else:
            self.recording += cost_ms

    def capture(self, work: Callable[[], None]) -> Any:
        if not self.can_record:
            raise DeviceError("this stream records nothing")
        self.recording = 0.0
        try:
            work()
            cost = self.recording
        finally:
            self.recording = None
        stream = self

        class Graph:
            def launch(self) -> None:
                stream.replays += 1
                stream.time_ms += cost

        return Graph()


class FakeEvent:
    def __init__(self, device: object) -> None:
        self.at = 0.0

    def record(self, stream: FakeStream) -> None:
        self.at = stream.time_ms

    def synchronize(self) -> None:
        pass

    def milliseconds_since(self, start: FakeEvent) -> float:
        return self.at - start.at


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> FakeStream:
    monkeypatch.setattr(gpu, "Event", FakeEvent)
    return FakeStream()


@pytest.mark.parametrize("repeats", [1, 7, 8, 63, 64, 65, 1000])
@pytest.mark.parametrize("graphs", [True, False])
def test_time_is_that_of_all_repeats(stream: FakeStream, repeats: int, graphs: bool) -> None:
    stopwatch = gpu.EventStopwatch(object(), stream, graphs=graphs)  # type: ignore[arg-type]
    elapsed = stopwatch.elapsed_ms(lambda: stream.work(0.25), repeats)
    assert elapsed == pytest.approx(0.25 * repeats)
    assert (stream.replays > 0) == (graphs and repeats >= gpu.GRAPH_FROM)


def test_contenders_that_cannot_be_recorded_are_found(stream: FakeStream) -> None:
    assert gpu.can_capture(stream, [lambda: stream.work(1.0)])  # type: ignore[arg-type]
    assert not gpu.can_capture(stream, [lambda: stream.work(1.0), stream.synchronize])  # type: ignore[arg-type]
    stream.can_record = False
    assert not gpu.can_capture(stream, [lambda: stream.work(1.0)])  # type: ignore[arg-type]
