"""Batches of tiny products, in the emulator."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from products import LAYOUTS, Product, check, make_product, run

from tilewave.kernels.families import tiny
from tilewave.kernels.instances import Instance
from tilewave.planner.schedules import STREAM_K_WALK
from tilewave.problem import Activation

Generator = np.random.Generator
every_instance = pytest.mark.parametrize("instance", tiny.instances(), ids=str)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def sizes(rng: Generator, instance: Instance) -> tuple[int, int, int, int]:
    """m, n, k and a number of items that fill more than a tile, none of them evenly."""
    m, n, k = (int(rng.integers(1, most + 1)) for most in (instance.bm, instance.bn, instance.bk))
    if instance.items == 1:
        m = instance.bm + m
    items = instance.items + int(rng.integers(1, instance.items + 1)) if instance.items > 1 else 2
    return m, n, k, items


@every_instance
def test_drawn_layouts(instance: Instance, rng: Generator) -> None:
    for layout in rng.choice(LAYOUTS, 3, replace=False):
        check_layout(instance, str(layout), rng)


@pytest.mark.long
@every_instance
@every_layout
def test_every_layout(instance: Instance, layout: str, rng: Generator) -> None:
    check_layout(instance, layout, rng)


def check_layout(instance: Instance, layout: str, rng: Generator) -> None:
    m, n, k, items = sizes(rng, instance)
    of_out = layout if layout in LAYOUTS[:6] else "rows"
    product = make_product(
        rng, m, n, k, (items,), layouts=(layout, layout, of_out), misalignment=int(rng.integers(4))
    )
    check(product, run(product, instance, count=False))


def epilogues(rng: Generator, instance: Instance, number: int) -> Iterator[Product]:
    for _ in range(number):
        m, n, k, items = sizes(rng, instance)
        yield make_product(
            rng,
            m,
            n,
            k,
            (items,) if rng.integers(2) else (2, -(-items // 2)),
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
def test_epilogues(instance: Instance, rng: Generator) -> None:
    for product in epilogues(rng, instance, 2):
        check(product, run(product, instance, count=False))


@pytest.mark.long
@every_instance
def test_many_more_products(instance: Instance, rng: Generator) -> None:
    for product in epilogues(rng, instance, 40):
        check(product, run(product, instance, count=False))


@every_instance
def test_walkers(instance: Instance, rng: Generator) -> None:
    """A few blocks that take many tiles each, two of them at a time, in a random order."""
    check_walkers(instance, int(rng.choice([1, 2, 7])), rng)


@pytest.mark.long
@every_instance
@pytest.mark.parametrize("walkers", [1, 2, 7])
def test_every_number_of_walkers(instance: Instance, walkers: int, rng: Generator) -> None:
    check_walkers(instance, walkers, rng)


def check_walkers(instance: Instance, walkers: int, rng: Generator) -> None:
    m, n, k, items = sizes(rng, instance)
    product = make_product(rng, m, n, k, (2 * items,), misalignment=int(rng.integers(4)))
    options = {"resident": 2, "order": int(rng.integers(1 << 30)), "detect_races": True}
    check(product, run(product, instance, STREAM_K_WALK, sms=walkers, count=False, **options))


@every_instance
def test_largest_sizes_fit(instance: Instance, rng: Generator) -> None:
    for misalignment in (0, 3):
        product = make_product(
            rng,
            instance.bm,
            instance.bn,
            instance.bk,
            (instance.items + 1,),
            misalignment=misalignment,
        )
        check(product, run(product, instance, count=False))


@every_instance
def test_nan_and_infinity_stay_where_they_are(instance: Instance, rng: Generator) -> None:
    """Nothing of one row, column or item shows in another."""
    m, n, k, items = sizes(rng, instance)
    product = make_product(rng, m, n, k, (items,))
    item, row, column = (int(rng.integers(extent)) for extent in (items, m, n))
    product.operands["a"][item, row] = np.nan
    product.operands["b"][item, 0, column] = np.inf
    plan = run(product, instance, count=False)
    spoilt = np.zeros(product.out.shape, bool)
    spoilt[item, row] = spoilt[item, :, column] = True
    assert not np.isfinite(product.out[spoilt]).any()
    assert np.isfinite(product.out[~spoilt]).all()
    assert plan.instance is instance


@pytest.mark.parametrize("size", [3, 4, 9, 16, 23])
def test_packed_items_are_moved_once(size: int, rng: Generator) -> None:
    """Every sector of a packed batch is touched once, whatever the size of an item."""
    product = make_product(rng, size, size, size, (200,), misalignment=1)
    instance = tiny.matching(product.problem)[0]
    check(product, run(product, instance))
    assert product.result is not None
    counters = product.result.counters
    blocks = product.result.blocks_run
    sectors = 200 * size * size / 8
    # 32 neighbours of 4 bytes that begin inside a sector touch 5 instead of 4.
    assert 2 * sectors <= counters.copy_sectors <= 1.35 * 2 * (sectors + 3 * blocks)
    assert counters.global_load_sectors == 0
    assert sectors <= counters.global_store_sectors <= sectors + 3 * blocks


@pytest.mark.parametrize(("n", "k"), [(3, 3), (16, 2), (50, 25)])
def test_rows_of_a_tall_matrix_are_moved_once(n: int, k: int, rng: Generator) -> None:
    m = 1200
    for instance in tiny.matching(make_product(rng, m, n, k).problem):
        product = make_product(rng, m, n, k, misalignment=3)
        check(product, run(product, instance))
        assert product.result is not None
        counters, blocks = product.result.counters, product.result.blocks_run
        assert m * k / 8 <= counters.copy_sectors <= 1.25 * (m * k / 8 + blocks * (n * k / 8 + 8))
        assert m * n / 8 <= counters.global_store_sectors <= m * n / 8 + 3 * blocks


def test_a_shared_operand_is_read_once_a_block(rng: Generator) -> None:
    product = make_product(rng, 3, 2, 3, (640,), layouts=("one item", "rows", "rows"))
    instance = tiny.matching(product.problem)[0]
    check(product, run(product, instance))
    assert product.result is not None
    blocks = product.result.blocks_run
    assert product.result.counters.copy_sectors <= 640 * 6 / 8 + blocks * 6


def test_the_smallest_fitting_instances_are_weighed(rng: Generator) -> None:
    for m, n, k in itertools.product((1, 4, 5, 30, 64, 65), repeat=3):
        problem = make_product(rng, m, n, k, (3,)).problem
        found = tiny.matching(problem)
        if m > 64:
            assert len(found) == (2 if n <= 64 and k <= 32 else 0)
            assert all(instance.items == 1 for instance in found)
        else:
            assert len(found) == (0 if max(n, k) > 64 else 1 if max(m, n, k) > 32 else 2)
        for instance in found:
            assert tiny.refuses(instance, problem) is None
            assert n <= instance.bn
            assert k <= instance.bk


def test_what_is_refused(rng: Generator) -> None:
    smallest = tiny.instances()[0]
    assert "K up to 4" in str(tiny.refuses(smallest, make_product(rng, 2, 2, 5, (9,)).problem))
    assert "no product" in str(tiny.refuses(smallest, make_product(rng, 2, 2, 0, (9,)).problem))
    assert tiny.matching(make_product(rng, 2, 2, 2).problem) == ()
