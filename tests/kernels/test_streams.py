"""What both streaming families must do, instance by instance, in the emulator."""

from __future__ import annotations

import numpy as np
import pytest
from stream_cases import SCHEDULES, check_any_order, check_many, check_nothing_leaks, draw, every

from tilewave.kernels.families import column_stream, dot_stream
from tilewave.kernels.families.streams import Stream
from tilewave.planner.schedules import Schedule

Generator = np.random.Generator
every_stream = every(column_stream.STREAMS + dot_stream.STREAMS)


@every_stream
def test_a_drawn_schedule(stream: Stream, rng: Generator) -> None:
    if rng.integers(2):
        check_many(rng, stream, draw(rng, SCHEDULES), 1)
    else:
        check_any_order(rng, stream, draw(rng, SCHEDULES[1:]), draw(rng, (1, 2, 7)))


@pytest.mark.long
@pytest.mark.sampled(70)
@every_stream
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_every_schedule(stream: Stream, schedule: Schedule, rng: Generator) -> None:
    check_many(rng, stream, schedule, 3)


@pytest.mark.long
@pytest.mark.sampled(50)
@every_stream
@pytest.mark.parametrize("resident", [1, 2, 7])
def test_every_order_of_blocks(stream: Stream, resident: int, rng: Generator) -> None:
    for schedule in SCHEDULES[1:]:
        check_any_order(rng, stream, schedule, resident)


@every_stream
def test_nan_and_infinity_stay_where_they_are(stream: Stream, rng: Generator) -> None:
    if stream.instance.family == column_stream.name:
        check_nothing_leaks(rng, stream, ("padded columns", "padded"), ("wide columns", "wide"))
    else:
        check_nothing_leaks(rng, stream, ("padded", "padded columns"), ("wide", "wide columns"))
