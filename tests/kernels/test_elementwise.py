"""What is left of a product when k or alpha is 0, in the emulator."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from products import LAYOUTS, check, make_product, run

from tilewave.kernels.families import elementwise
from tilewave.kernels.instances import Instance
from tilewave.planner.schedules import STREAM_K_WALK
from tilewave.problem import Activation

Generator = np.random.Generator
SHAPES = {
    "elementwise_1x2048": (3, 4099, ()),
    "elementwise_1024x8": (1030, 3, (2,)),
    "elementwise_32x64": (45, 70, (2,)),
    "elementwise_8x8_32items": (7, 5, (41,)),
    "elementwise_2x2_256items": (2, 1, (3, 90)),
}

every_instance = pytest.mark.parametrize("instance", elementwise.instances(), ids=str)


@every_instance
def test_a_drawn_layout(instance: Instance, rng: Generator) -> None:
    check_layout(instance, str(rng.choice(LAYOUTS[:6])), rng)


@pytest.mark.long
@every_instance
@pytest.mark.parametrize("layout", LAYOUTS[:6])
def test_every_layout(instance: Instance, layout: str, rng: Generator) -> None:
    for _ in range(5):
        check_layout(instance, layout, rng)


def check_layout(instance: Instance, layout: str, rng: Generator) -> None:
    """A and B hold NaN and are not read; c is where beta is not 0."""
    m, n, batch = SHAPES[instance.name]
    product = make_product(
        rng,
        m,
        n,
        int(rng.choice([0, 5])),
        batch,
        layouts=("rows", "rows", layout),
        alpha=0.0,
        beta=float(rng.standard_normal()),
        bias=str(rng.choice(["row", "column", "full"])),
        activation=Activation(rng.integers(5)),
        preactivation=bool(rng.integers(2)),
        misalignment=int(rng.integers(4)),
    )
    product.operands["a"][...] = np.nan
    product.operands["b"][...] = np.nan
    check(product, run(product, instance, count=False))


@every_instance
def test_without_anything_to_add_zeros_are_written(instance: Instance, rng: Generator) -> None:
    m, n, batch = SHAPES[instance.name]
    product = make_product(rng, m, n, 0, batch, alpha=2.0, beta=0.0, with_c=True)
    product.operands["c"] = np.full_like(product.out, np.nan)
    run(product, instance, count=False)
    assert (product.out.view(np.uint32) == 0).all()


@every_instance
def test_walkers(instance: Instance, rng: Generator) -> None:
    """A few blocks that take many tiles each, in any order of blocks."""
    walkers = int(rng.choice([1, 2, 5]))
    m, n, batch = SHAPES[instance.name]
    k = int(rng.choice([0, 5]))
    product = make_product(rng, 2 * m, n, k, batch, alpha=0.0, beta=0.5, preactivation=True)
    options = {"resident": 2, "order": int(rng.integers(1 << 30)), "detect_races": True}
    check(product, run(product, instance, STREAM_K_WALK, sms=walkers, band=2, **options))


def test_neighbours_are_written_together(rng: Generator) -> None:
    """Every 32-byte sector is written once, also where rows or items are shorter than that."""
    shapes = ((1, 8000, ()), (2048, 3, ()), (50, 80, (2,)), (7, 5, (64,)), (2, 1, (1024,)))
    for instance, (m, n, batch) in zip(elementwise.instances(), shapes, strict=True):
        product = make_product(rng, m, n, 0, batch, beta=0.0)
        assert elementwise.matching(product.problem) == (instance,)
        run(product, instance)
        assert product.result is not None
        assert product.result.counters.global_store_sectors <= 1.05 * product.out.size / 8, instance


def test_one_instance_for_every_shape(rng: Generator) -> None:
    for m, n, items in itertools.product((1, 2, 7, 33, 3000), (1, 2, 8, 65, 3000), (1, 2, 1000)):
        problem = make_product(rng, 1, 1, 0).problem
        problem = type(problem)(m, n, 0, (items,), problem.a, problem.b, problem.out, product=False)
        (instance,) = elementwise.matching(problem)
        assert elementwise.refuses(instance, problem) is None
    with_product = make_product(rng, 3, 3, 3).problem
    assert elementwise.matching(with_product) == ()
    assert "products" in str(elementwise.refuses(elementwise.instances()[0], with_product))
