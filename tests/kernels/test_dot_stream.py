"""Dot products along K for few rows or columns, in the emulator."""

from __future__ import annotations

import numpy as np
import pytest
from products import check, make_product, run
from stream_cases import (
    problem_of,
)

from tilewave.kernels.families import dot_stream
from tilewave.kernels.families.streams import Stream
from tilewave.planner.schedules import split_k

Generator = np.random.Generator


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("short", ["rows", "columns"])
@pytest.mark.parametrize("few", [1, 4, 7])
def test_both_operands_are_read_once_a_tile(few: int, short: str, mirrored: bool, rng: Generator) -> None:
    many, k = 96, 1024
    m, n = (many, few) if mirrored else (few, many)
    layouts = ("rows", short, "rows") if mirrored else (short, "columns", "rows")
    product = make_product(rng, m, n, k, layouts=layouts)
    instance = dot_stream.matching(product.problem)[0]
    check(product, run(product, instance, split_k(2)))
    assert product.result is not None
    counters = product.result.counters
    tiles = -(-many // max(instance.bm, instance.bn))
    partials = 2 * tiles * instance.bm * instance.bn / 8
    assert many * k / 8 <= counters.global_load_sectors <= many * k / 8 + partials
    added = tiles * instance.threads // 32 * 8  # loads of partial sums, of which most read nothing
    assert many * k / 4 / 32 <= counters.global_loads_by_width[16] <= many * k / 4 / 32 + added
    # Copies of 4 bytes by neighbours along an axis of `few` elements: at most two sectors where one would do.
    assert tiles * few * k / 8 <= counters.copy_sectors <= 2 * tiles * max(few, 4) * k / 8


VECTORS = tuple(stream for stream in dot_stream.STREAMS if stream.few == 1 and stream.many > 8)


@pytest.mark.parametrize("stream", VECTORS, ids=lambda stream: stream.instance.name)
def test_a_vector_is_read_where_it_lies(stream: Stream, rng: Generator) -> None:
    many, k = int(rng.integers(2, 2 * stream.many)), int(rng.integers(130, 500))
    m, n = (many, 1) if stream.mirrored else (1, many)
    short = str(rng.choice(["rows", "columns", "padded", "strided", "reversed"]))
    layouts = ("wide", short, "rows") if stream.mirrored else (short, "wide columns", "rows")
    # Items of the vector begin at any multiple of 4 bytes.
    product = make_product(rng, m, n, k, (3,), layouts=layouts)
    check(product, run(product, stream.instance, split_k(2), count=False, detect_races=True))


@pytest.mark.parametrize("stream", VECTORS, ids=lambda stream: stream.instance.name)
def test_a_warp_reads_its_lines_once_and_the_vector(stream: Stream, rng: Generator) -> None:
    many, k = int(rng.integers(2, 2 * stream.many)), 128 * int(rng.integers(1, 4))
    m, n = (many, 1) if stream.mirrored else (1, many)
    product = make_product(rng, m, n, k, layouts=("rows", "columns", "rows"))
    check(product, run(product, stream.instance))
    assert product.result is not None
    lines = max(stream.instance.tm, stream.instance.tn)
    warps = -(-many // lines)
    assert product.result.counters.global_load_sectors == warps * (lines + 1) * k / 8
    assert product.result.counters.global_loads_by_width[16] == warps * (lines + 1) * k / 128


@pytest.mark.parametrize("k", [1, 31, 127, 128, 129, 511, 513, 1025])
def test_every_end_of_k(k: int, rng: Generator) -> None:
    for stream in rng.permutation(np.array(dot_stream.STREAMS, dtype=object))[:2]:
        m, n = (stream.many, stream.few) if stream.mirrored else (stream.few, stream.many)
        layouts = ("wide", "wide columns", "rows") if stream.width == 16 else ("rows", "columns", "rows")
        if k == 1 and stream.width == 16:
            continue  # no vectors along an axis of length 1
        product = make_product(rng, m, n, k, layouts=layouts)
        check(product, run(product, stream.instance, split_k(2), count=False, detect_races=True))


def test_what_is_weighed(rng: Generator) -> None:
    def names(m: int, n: int, k: int, **options: object) -> list[str]:
        return [str(instance) for instance in dot_stream.matching(problem_of(rng, m, n, k, **options))]

    contiguous = {"layouts": ("rows", "columns", "rows")}
    assert names(1, 500, 512, **contiguous) == [
        "dot_stream_1x8_16b",
        "dot_stream_1x32_16b",
        "dot_stream_1x64_16b",
    ]
    assert names(3, 500, 512, **contiguous) == ["dot_stream_4x16_16b"]
    assert names(500, 1, 512, **contiguous)[-2:] == [
        "dot_stream_32x1_16b_mirrored",
        "dot_stream_64x1_16b_mirrored",
    ]
    assert names(500, 9, 512, **contiguous) == []
    assert names(2, 3, 512, **contiguous) == ["dot_stream_4x16_16b", "dot_stream_16x4_16b_mirrored"]
    assert names(3, 500, 511, **contiguous) == ["dot_stream_4x16_4b"]
    assert names(3, 500, 512, **contiguous, misalignment=1) == ["dot_stream_4x16_4b"]
    assert names(3, 500, 512, layouts=("columns", "columns", "rows")) == ["dot_stream_4x16_16b"]
    assert names(7, 500, 511, **contiguous) == ["dot_stream_8x16_4b"]
    assert names(500, 16, 511, **contiguous) == ["dot_stream_8x16_4b_mirrored"]
    assert names(3, 500, 512, layouts="rows") == []
    assert names(17, 500, 512, **contiguous) == []
    assert names(3, 500, 16, **contiguous) == []
    assert names(3, 500, 0, **contiguous) == []


def test_what_is_refused(rng: Generator) -> None:
    wide = dot_stream.STREAMS[0].instance
    assert dot_stream.refuses(wide, problem_of(rng, 1, 9, 64, layouts=("rows", "columns", "rows"))) is None
    rows = problem_of(rng, 1, 9, 64, layouts="rows")
    assert dot_stream.refuses(wide, rows) == "B cannot be read by 16 bytes along K"
    ragged = problem_of(rng, 2, 9, 63, layouts=("rows", "columns", "rows"))
    assert dot_stream.refuses(wide, ragged) == "B cannot be read by 16 bytes along K"
    assert dot_stream.refuses(wide, problem_of(rng, 1, 9, 0)) == "there is no product to compute"
