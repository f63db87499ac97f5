"""Small tiles, in the emulator."""

from __future__ import annotations

import numpy as np
import pytest
from products import check, make_product, run
from tile_cases import (
    SCHEDULES,
    check_far_apart_rows,
    check_order_independence,
    check_special_values,
    check_vanishing_sums,
    every_schedule,
    random_product,
    run_and_check,
    sample,
    square_chain,
)

from tilewave.kernels.build import compile_instance
from tilewave.kernels.families import large_tile, small_tile
from tilewave.kernels.instances import Instance
from tilewave.planner.schedules import Schedule

Generator = np.random.Generator
INSTANCES = small_tile.instances()


def test_random_products(rng: Generator) -> None:
    """Other instances every time; the long test runs them all."""
    for instance in sample(rng, INSTANCES, 6):
        for _ in range(2):
            product = random_product(rng, instance, small_tile.refuses)
            run_and_check(rng, product, instance, SCHEDULES[rng.integers(len(SCHEDULES))])


@pytest.mark.long
@pytest.mark.sampled(80)
@every_schedule
@pytest.mark.parametrize("instance", INSTANCES, ids=str)
def test_every_instance_under_every_schedule(instance: Instance, schedule: Schedule, rng: Generator) -> None:
    for _ in range(3):
        run_and_check(rng, random_product(rng, instance, small_tile.refuses), instance, schedule)


def test_every_depth(rng: Generator) -> None:
    """K of 0 to beyond two slices: nothing is added beyond its end, in no group."""
    instance = next(one for one in sample(rng, INSTANCES, len(INSTANCES)) if one.name.endswith("_4"))
    depths = [0, 1, 2, 3, *(int(k) for k in rng.integers(4, 2 * instance.bk + 6, 6))]
    for k in depths:
        product = make_product(rng, 5, 9, k, layouts="rows", beta=float(rng.integers(2)))
        check(product, run(product, instance, count=False))


def test_order_of_blocks(rng: Generator) -> None:
    instance = sample(rng, INSTANCES, 1)[0]
    product = random_product(
        rng, instance, small_tile.refuses, plain=True, sizes=(instance.bm + 4, instance.bn + 4, 72), batch=()
    )
    check_order_independence(rng, product, instance)


def test_special_values(rng: Generator) -> None:
    for instance in sample(rng, INSTANCES, 2):
        check_special_values(
            rng,
            random_product(rng, instance, small_tile.refuses, plain=True, repeats=False, batch=()),
            instance,
        )


def test_vanishing_sums(rng: Generator) -> None:
    check_vanishing_sums(rng, square_chain(INSTANCES))


def test_far_apart_rows(rng: Generator) -> None:
    check_far_apart_rows(rng, square_chain(INSTANCES), 9, 20, 6)


def test_copies_and_loads_do_not_meet_in_banks(rng: Generator) -> None:
    """A load of 16 bytes takes two passes, the fewest of a warp that needs 8 x 4 of them; copies take one."""
    instance = next(one for one in INSTANCES if one.name == "small_tile_64x64x16_nt_4")
    figures = []
    for k in (32, 64):
        product = make_product(rng, 64, 64, k, layouts=("rows", "columns", "rows"))
        run(product, instance)
        assert product.result is not None
        figures.append(product.result.counters)
    warps, loads = instance.threads // 32, 4  # of 16 bytes a warp and depth, each in two passes
    assert figures[1].shared_loads - figures[0].shared_loads == warps * 32 * loads
    assert figures[1].shared_load_passes - figures[0].shared_load_passes == 2 * warps * 32 * loads


@pytest.mark.parametrize("arch", ["sm_75", "sm_121"])
def test_other_architectures(arch: str, rng: Generator) -> None:
    """sm_75 copies through registers, and has 64 KB of shared memory a block."""
    instance = sample(rng, INSTANCES, 1)[0]
    product = random_product(rng, instance, small_tile.refuses)
    check(product, run(product, instance, arch=arch, count=False))
    assert all(one.shared_bytes + 1024 <= 65536 for one in INSTANCES)


def test_no_spills(rng: Generator) -> None:
    _check_resources(sample(rng, INSTANCES, 2), "sm_90")


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm_90", "sm_90a"])
def test_no_instance_spills(arch: str) -> None:
    _check_resources(list(INSTANCES), arch)


def _check_resources(instances: list[Instance], arch: str) -> None:
    for instance in instances:
        resources = compile_instance(instance, arch)[1].resources
        assert (resources.stack_bytes, resources.spill_store_bytes, resources.spill_load_bytes) == (0, 0, 0)


def test_some_instance_takes_any_product(rng: Generator) -> None:
    layouts = ["rows", "columns", "padded", "padded columns", "strided", "reversed", "repeated", "one item"]
    for _ in range(60):
        m, n, k = (int(size) for size in rng.integers(1, 40, 3))
        of_a, of_b = (str(name) for name in rng.choice(layouts, 2))
        product = make_product(
            rng, m, n, k, (2,), layouts=(of_a, of_b, "rows"), misalignment=int(rng.integers(4))
        )
        found = small_tile.matching(product.problem)
        assert found
        assert all(small_tile.refuses(instance, product.problem) is None for instance in found)
        assert {instance.bm for instance in found} == {instance.bm for instance in INSTANCES}


def test_wide_access_where_every_row_allows_it(rng: Generator) -> None:
    for m, n, k, width in ((8, 12, 16, "16"), (8, 12, 17, "4"), (8, 13, 16, "4"), (7, 12, 16, "16")):
        problem = make_product(rng, m, n, k).problem
        assert {instance.name.rsplit("_", 1)[1] for instance in small_tile.matching(problem)} == {width}
    shifted = make_product(rng, 8, 12, 16, misalignment=2).problem
    assert {instance.name[-1] for instance in small_tile.matching(shifted)} == {"4"}
    reason = small_tile.refuses(INSTANCES[0], shifted)
    assert reason is not None
    assert "16 bytes" in reason


def test_names_and_number_of_instances() -> None:
    both = INSTANCES + large_tile.instances()
    assert (
        len({instance.name for instance in both}) == len({instance.entry for instance in both}) == len(both)
    )
    assert len(both) <= 140
