"""Products of little depth, in the emulator."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from products import LAYOUTS, Product, check, make_product, run

from tilewave.kernels.families import small_k
from tilewave.kernels.instances import Instance
from tilewave.planner.schedules import DATA_PARALLEL, STREAM_K_WALK
from tilewave.problem import Activation

Generator = np.random.Generator
every_instance = pytest.mark.parametrize("instance", small_k.instances(), ids=str)


def products(rng: Generator, instance: Instance, number: int) -> Iterator[Product]:
    """Ragged products of a few tiles, with everything that an epilogue can do."""
    for _ in range(number):
        m, n = (int(rng.integers(1, 2 * extent + 2)) for extent in (instance.bm, instance.bn))
        yield make_product(
            rng,
            m,
            n,
            int(rng.integers(1, instance.bk + 1)),
            [(), (2,)][int(rng.integers(2))],
            layouts=(str(rng.choice(LAYOUTS)), str(rng.choice(LAYOUTS)), str(rng.choice(LAYOUTS[:6]))),
            alpha=float(rng.choice([1.0, -1.5])),
            beta=float(rng.choice([0.0, 1.0, -0.5])),
            bias=rng.choice(np.array([None, "row", "column", "full"], dtype=object)),
            activation=Activation(rng.integers(5)),
            preactivation=bool(rng.integers(2)),
            misalignment=int(rng.integers(4)),
            positive=bool(rng.integers(2)),
        )


@every_instance
def test_drawn_products(instance: Instance, rng: Generator) -> None:
    for product in products(rng, instance, 3):
        check(product, run(product, instance, count=False, detect_races=True))


@pytest.mark.long
@every_instance
def test_many_more_products(instance: Instance, rng: Generator) -> None:
    for number, product in enumerate(products(rng, instance, 40)):
        schedule = (DATA_PARALLEL, STREAM_K_WALK)[number % 2]
        sms = int(rng.integers(1, 8))
        check(product, run(product, instance, schedule, sms=sms, count=False, detect_races=True))


@every_instance
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_plain_products(instance: Instance, layout: str, rng: Generator) -> None:
    layouts = (layout, str(rng.choice(["rows", "columns"])), "rows")
    m, n, k = instance.bm + 1, instance.bn + 1, instance.bk
    product = make_product(rng, m, n, k, layouts=layouts, misalignment=int(rng.integers(4)))
    check(product, run(product, instance, count=False, detect_races=True))


@every_instance
def test_walkers(instance: Instance, rng: Generator) -> None:
    """A few blocks that take several tiles each, two at a time, in a random order."""
    product = make_product(rng, 2 * instance.bm + 3, instance.bn + 3, instance.bk - 1)
    options = {"resident": 2, "order": int(rng.integers(1 << 30)), "detect_races": True}
    sms = int(rng.choice([1, 2, 7]))
    check(product, run(product, instance, STREAM_K_WALK, sms=sms, count=False, **options))


@every_instance
def test_nan_and_infinity_stay_where_they_are(instance: Instance, rng: Generator) -> None:
    m, n, k = instance.bm + 3, instance.bn + 5, instance.bk - 1
    product = make_product(rng, m, n, k, layouts="padded")
    row, column, depth = (int(rng.integers(extent)) for extent in (m, n, k))
    product.operands["a"][row, depth] = np.nan
    product.operands["b"][depth, column] = np.inf
    run(product, instance, count=False)
    spoilt = np.zeros((m, n), bool)
    spoilt[row] = spoilt[:, column] = True
    assert not np.isfinite(product.out[spoilt]).any()
    assert np.isfinite(product.out[~spoilt]).all()


@every_instance
def test_c_is_written_once(instance: Instance, rng: Generator) -> None:
    """Every sector of C once; of A and B a tile's part once a tile."""
    m, n, k = 2 * instance.bm, 2 * instance.bn, instance.bk
    product = make_product(rng, m, n, k)
    check(product, run(product, instance))
    assert product.result is not None
    counters = product.result.counters
    assert counters.global_store_sectors == m * n / 8
    # Copies by 4 bytes, and by 16 to lines that begin inside a sector of shared memory.
    assert counters.copy_sectors <= 1.25 * 2 * (m + n) * k / 8 + 8
    assert counters.global_load_sectors == 0


def test_what_is_weighed_and_refused(rng: Generator) -> None:
    def names(m: int, n: int, k: int) -> list[str]:
        problem = make_product(rng, m, n, k).problem
        found = small_k.matching(problem)
        assert all(small_k.refuses(instance, problem) is None for instance in found)
        return [str(instance) for instance in found]

    assert names(200, 300, 3) == ["small_k_128x128x4", "small_k_32x128x8"]
    assert names(200, 300, 13) == ["small_k_128x128x16", "small_k_32x128x16"]
    assert names(3, 300, 2) == ["small_k_16x256x4"]
    assert names(3, 300, 17) == []
    assert names(3, 300, 0) == []
    smallest = small_k.instances()[0]
    assert "K up to 4" in str(small_k.refuses(smallest, make_product(rng, 9, 9, 5).problem))
    assert "no product" in str(small_k.refuses(smallest, make_product(rng, 9, 9, 0).problem))
