"""Grouped kernels: products that differ in everything, in one launch, to the last bit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from products import LAYOUTS, Product, check_bits, check_values, make_product

from tilewave.device import get_spec
from tilewave.emulator import Memory
from tilewave.kernels.arguments import Pointers
from tilewave.kernels.families import grouped
from tilewave.kernels.group_table import ENTRY_BYTES, FORM_BYTES, INLINE_BYTES, Operands, table_writer
from tilewave.kernels.instances import Instance
from tilewave.kernels.ship import every_kernel
from tilewave.planner.gemm.group import GroupPlan, GroupPlanner
from tilewave.planner.gemm.options import PlanOptions
from tilewave.problem import Activation
from tilewave.runtime.emulated import place, run_group_plan

Generator = np.random.Generator
TINIEST = grouped.instances()[-1]


def plan_on(
    instance: Instance, products: Sequence[Product], monkeypatch: pytest.MonkeyPatch, **options: object
) -> GroupPlan:
    """The plan of a group that has but one tile to choose from."""
    with monkeypatch.context() as patch:
        patch.setattr(grouped, "instances", lambda: (instance,))
        planner = GroupPlanner(get_spec("H200"))
        return planner.plan([one.problem for one in products], PlanOptions(**options))  # type: ignore[arg-type]


def run(plan: GroupPlan, products: Sequence[Product], **options: object) -> None:
    """Run a group in the emulator, in place; what lies between the elements must stay as it was."""
    memory = Memory()
    placed = [
        {name: place(memory, array, f"{name} {i}", one.misalignment) for name, array in one.operands.items()}
        for i, one in enumerate(products)
    ]
    before = [{name: memory.get(item.buffer) for name, item in items.items()} for items in placed]
    operands = []
    for one, items in zip(products, placed, strict=True):
        read = {n: item.address for n, item in items.items() if getattr(one.problem, n) is not None}
        operands.append(Operands(Pointers(**read), one.alpha, one.beta))
    run_group_plan(plan, operands, memory, exact_fma=True, count=False, **options)
    for one, items, old in zip(products, placed, before, strict=True):
        for name, item in items.items():
            after = memory.get(item.buffer)
            if name in ("out", "preactivation"):
                one.operands[name][...] = item.view(after)
                item.view(old[name])[...] = item.view(after)
            assert np.array_equal(old[name].view(np.uint32), after.view(np.uint32)), name


def check(plan: GroupPlan, products: Sequence[Product]) -> None:
    for one, pieces in zip(products, plan.pieces, strict=True):
        check_values(one)
        if pieces == 1:
            check_bits(one)


def draw(rng: Generator, most: tuple[int, int, int], *, whole_vectors: bool) -> Product:
    m, n, k = (int(rng.integers(1, extent + 1)) for extent in most)
    layouts = [str(rng.choice(LAYOUTS)), str(rng.choice(LAYOUTS)), str(rng.choice(LAYOUTS[:6]))]
    if rng.integers(8) == 0:
        k = 0
    if whole_vectors:
        m, n, k = (max(4, size // 4 * 4) for size in (m, n, k))
        layouts = [str(rng.choice(["rows", "wide", "columns", "wide columns"])) for _ in range(3)]
    return make_product(
        rng,
        m,
        n,
        k,
        [(), (2,), (1, 2)][rng.integers(3)],
        layouts=(layouts[0], layouts[1], layouts[2]),
        alpha=float(rng.choice([1.0, -1.5, 0.0])),
        beta=float(rng.choice([0.0, 0.5])),
        bias=[None, "row", "column", "full"][rng.integers(4)],
        activation=Activation(int(rng.integers(5))),
        preactivation=bool(rng.integers(2)),
        misalignment=0 if whole_vectors else int(rng.integers(4)),
        positive=bool(rng.integers(4) == 0),
    )


@pytest.mark.parametrize("instance", grouped.instances()[2:], ids=str)
@pytest.mark.sampled(1)
def test_products_that_have_nothing_in_common(
    instance: Instance, rng: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_a_mixture(instance, rng, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("instance", grouped.instances()[:2], ids=str)
@pytest.mark.sampled(1)
def test_products_that_have_nothing_in_common_by_large_tiles(
    instance: Instance, rng: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_a_mixture(instance, rng, monkeypatch)


def check_a_mixture(instance: Instance, rng: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, walked by three blocks, and cut along K; every way of reading the operands is there."""
    most = (2 * instance.bm, 2 * instance.bn, 70)
    products = [draw(rng, most, whole_vectors=i % 2 == 1) for i in range(8)]
    for a in ("rows", "columns"):
        for b in ("rows", "columns"):
            products.append(make_product(rng, 8, 12, 20, layouts=(a, b, "rows")))
    bits = {grouped.access_bits(one.problem) for one in products}
    assert {4, 5, 6, 7} <= bits
    assert 0 in bits
    for options in ({}, {"max_sms": 3}, {"schedule": "split_k:3"}):
        for one in products:
            for name in ("out", "preactivation"):
                if name in one.operands:
                    one.operands[name][...] = np.nan
        plan = plan_on(instance, products, monkeypatch, **options)
        assert plan.blocks <= options.get("max_sms", plan.blocks)  # type: ignore[operator]
        run(plan, products, detect_races=True)
        check(plan, products)


def test_many_products_are_found_in_a_table_in_memory(
    rng: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More products than threads, some of several tiles, in a table that several launches write."""
    sizes = [tuple(map(int, rng.integers(1, 40 if i % 50 == 0 else 4, 3))) for i in range(330)]
    products = [make_product(rng, *size) for size in sizes]
    plan = plan_on(TINIEST, products, monkeypatch)
    assert plan.table_launches > 1
    assert plan.table.items > len(products) > TINIEST.threads**1.5
    assert table_writer(plan.table.nbytes) in grouped.TABLE_WRITERS
    run(plan, products)
    check(plan, products)


@pytest.mark.parametrize("entries", [33, 34, 35])
def test_the_longest_table_that_an_argument_holds(
    entries: int, rng: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One product more needs memory; nothing else changes."""
    one = make_product(rng, *map(int, rng.integers(1, 9, 3)))
    products = []
    for _ in range(entries):
        out = np.full_like(one.out, np.nan)
        products.append(Product(one.problem, one.operands | {"out": out}, 1.0, 0.0, 0))
    plan = plan_on(TINIEST, products, monkeypatch)
    assert plan.table.nbytes == entries * ENTRY_BYTES + FORM_BYTES
    assert (plan.table_launches > 0) == (plan.table.nbytes > INLINE_BYTES) == (entries > 34)
    run(plan, products)
    check(plan, products)


def test_kernels_have_names_of_their_own_and_are_few() -> None:
    names = [instance.name for instance in every_kernel()]
    assert len(set(names)) == len(names) <= 205  # about 200 are wanted
