"""Few rows or columns from an operand that is contiguous across K, in the emulator."""

from __future__ import annotations

import numpy as np
import pytest
from products import check, make_product, run
from stream_cases import (
    problem_of,
)

from tilewave.kernels.families import column_stream
from tilewave.planner.schedules import DATA_PARALLEL, split_k

Generator = np.random.Generator


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize(("few", "many"), [(1, 512), (4, 8), (7, 64), (16, 256)])
def test_both_operands_are_read_once_a_tile(few: int, many: int, mirrored: bool, rng: Generator) -> None:
    k = 2048
    m, n = (many, few) if mirrored else (few, many)
    layouts = ("columns", "rows", "rows")
    product = make_product(rng, m, n, k, layouts=layouts)
    fitting = column_stream.matching(product.problem)
    instance = [i for i in fitting if i.name.endswith("_mirrored") == mirrored][-1]
    check(product, run(product, instance, DATA_PARALLEL))
    assert product.result is not None
    counters = product.result.counters
    tiles = -(-many // max(instance.bm, instance.bn))
    assert counters.global_load_sectors == 0
    assert counters.copy_sectors >= (many + few) * k / 8
    # Copies of 4 bytes by neighbours along an axis of `few` elements: at most two sectors where one would do.
    assert counters.copy_sectors <= (many + 2 * tiles * max(few, 4)) * k / 8


@pytest.mark.parametrize("k", [1, 2, 7, 31, 33, 255, 257, 600, 1500])
def test_every_end_of_k(k: int, rng: Generator) -> None:
    for stream in rng.permutation(np.array(column_stream.STREAMS, dtype=object))[:2]:
        m, n = (stream.many + 1, stream.few) if stream.mirrored else (stream.few, stream.many + 1)
        product = make_product(rng, m, n, k, layouts=("wide columns", "wide", "rows"))
        check(product, run(product, stream.instance, split_k(2), count=False, detect_races=True))


def test_what_is_weighed(rng: Generator) -> None:
    def names(m: int, n: int, k: int, **options: object) -> list[str]:
        return [str(instance) for instance in column_stream.matching(problem_of(rng, m, n, k, **options))]

    assert names(1, 512, 64) == ["column_stream_1x128_16b"]
    assert names(2, 8, 4096) == ["column_stream_4x8_16b"]
    assert names(3, 32, 4096) == ["column_stream_4x8_16b", "column_stream_4x32_16b"]
    assert names(9, 100, 4096) == ["column_stream_16x32_16b", "column_stream_16x128_16b"]
    assert names(3, 511, 64) == ["column_stream_4x32_4b"]
    assert names(3, 512, 64, misalignment=2) == ["column_stream_4x32_4b"]
    assert names(512, 3, 64, layouts=("columns", "rows", "rows"))[-1] == "column_stream_128x4_16b_mirrored"
    assert names(512, 3, 64, layouts="rows") == []
    assert names(17, 500, 512) == []
    assert names(3, 500, 16) == []


def test_what_is_refused(rng: Generator) -> None:
    wide = column_stream.STREAMS[0].instance
    assert column_stream.refuses(wide, problem_of(rng, 2, 8, 64)) is None
    columns = problem_of(rng, 2, 8, 64, layouts="columns")
    assert column_stream.refuses(wide, columns) == "B cannot be read by 16 bytes along N"
    mirrored = next(s.instance for s in column_stream.STREAMS if s.mirrored)
    rows = problem_of(rng, 8, 2, 64)
    assert column_stream.refuses(mirrored, rows) == "A cannot be read by 16 bytes along M"
    assert column_stream.refuses(wide, problem_of(rng, 1, 9, 0)) == "there is no product to compute"
