"""Tiles in more pieces than one block adds at once: runs of them are added first, then the runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from products import check, make_product, run

from tilewave.kernels.families import column_stream, large_tile, small_tile
from tilewave.kernels.instances import Contiguous, Instance
from tilewave.planner.schedules import STREAM_K_WALK, split_k

Generator = np.random.Generator

#: Instances of each kernel that adds pieces, of small slices and tiles.
_NAMES = (
    "column_stream_16x128_16b",
    "column_stream_32x16_16b_mirrored",
    "small_tile_16x64x32_4groups_tt_16",
    "small_tile_64x64x16_nn_16",
    "large_tile_64x64_nn_16",
)
INSTANCES = tuple(
    instance
    for family in (column_stream, small_tile, large_tile)
    for instance in family.instances()
    if instance.name in _NAMES
)


def _piled(rng: Generator, instance: Instance, pieces: int, walk: bool, tiles: int) -> None:
    k = pieces * instance.bk - 4 * int(rng.integers(instance.bk // 4))
    m, n = (instance.bm, instance.bn) if tiles == 1 else (instance.bm + 4, instance.bn)
    a, b = (
        "wide" if access is None or (access.contiguous is Contiguous.K) == along_k else "wide columns"
        for access, along_k in ((instance.a, True), (instance.b, False))
    )
    product = make_product(rng, m, n, k, layouts=(a, b, "rows"), positive=bool(rng.integers(2)))
    schedule = STREAM_K_WALK if walk else split_k(pieces)
    found = []
    orders: tuple[dict[str, Any], ...] = ({}, {"resident": 5, "order": int(rng.integers(1 << 30))})
    for options in orders:
        product.out[...] = np.nan
        plan = run(product, instance, schedule, sms=tiles * pieces, count=False, detect_races=True, **options)
        assert plan.cut.slots >= tiles * pieces
        check(product, plan)
        found.append(product.out.tobytes())
    assert found[0] == found[1]


@pytest.mark.parametrize("instance", INSTANCES, ids=str)
def test_many_pieces(instance: Instance, rng: Generator) -> None:
    _piled(rng, instance, int(rng.integers(33, 50)), bool(rng.integers(2)), int(rng.integers(1, 3)))
