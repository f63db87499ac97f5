"""Plans of groups: one launch whatever is in it, the table that goes along, cuts where chains are long."""

from __future__ import annotations

import copy
import itertools
import random

import numpy as np
import pytest

import tilewave
from tilewave.device import get_spec, spec_names
from tilewave.errors import UsageError
from tilewave.kernels.families import grouped
from tilewave.kernels.group_table import FORM_BYTES, INLINE_BYTES, table_bytes
from tilewave.normalise import normalise
from tilewave.planner.gemm.group import GroupPlanner, plan_group, portions
from tilewave.planner.gemm.options import PlanOptions
from tilewave.planner.schedules import Schedule, ScheduleKind
from tilewave.problem import GemmProblem, MatrixLayout

H200 = get_spec("H200")
FREE = PlanOptions()
Generator = np.random.Generator


def problem(m: int, n: int, k: int, row: int | None = None) -> GemmProblem:
    of_a, of_b = MatrixLayout(k if row is None else row, 1), MatrixLayout(n, 1)
    return normalise(GemmProblem(m, n, k, (), of_a, of_b, MatrixLayout(n, 1), product=k > 0)).problem


def some(rng: Generator, count: int, most: int = 3000) -> list[GemmProblem]:
    return [problem(*(int(size) for size in rng.integers(1, most, 3))) for _ in range(count)]


@pytest.mark.parametrize("name", spec_names())
def test_every_gpu_has_a_tile_for_every_group(name: str, rng: Generator) -> None:
    """One launch; every product has its tiles; nothing takes more workspace than it may."""
    group = some(rng, 20)
    plan = plan_group(group, get_spec(name), FREE)
    tiles = [np.prod(plan.instance.tiles(one)) for one in group]
    assert plan.launches == 1
    assert plan.table.items == sum(np.multiply(tiles, plan.pieces))
    assert plan.blocks == plan.table.items
    assert sorted(entry[0] for entry in plan.table.places) == list(range(20))
    firsts = [entry[1] for entry in plan.table.places]
    assert firsts == sorted(set(firsts))
    assert plan.workspace_bytes <= FREE.workspace_limit
    assert plan.table.nbytes == table_bytes(set(group), len(group))


def test_equal_groups_have_equal_plans_and_order_does_not_matter_to_the_choice(rng: Generator) -> None:
    group = some(rng, 30)
    again = copy.deepcopy(group)
    assert GroupPlanner(H200).plan(group, FREE) == GroupPlanner(H200).plan(again, FREE)
    shuffled = list(group)
    random.Random(1).shuffle(shuffled)
    plan, other = plan_group(group, H200, FREE), plan_group(shuffled, H200, FREE)
    assert plan.instance == other.instance
    assert plan.estimate.total == pytest.approx(other.estimate.total)
    assert plan_group(group, H200, FREE) is plan


def test_a_chain_that_outlasts_everything_is_cut_and_may_be_forbidden() -> None:
    group = [problem(40, 40, 100_000), *(problem(30, 30, 30) for _ in range(20))]
    plan = plan_group(group, H200, FREE)
    assert plan.pieces[0] > 1
    assert set(plan.pieces[1:]) == {1}
    assert plan.table.places[0][0] == 0  # it begins first
    assert plan.table.slots == plan.pieces[0] * np.prod(plan.instance.tiles(group[0]))
    whole = plan_group(group, H200, PlanOptions(batch_invariant=True))
    assert set(whole.pieces) == {1} == set(plan_group(group, H200, PlanOptions("data_parallel")).pieces)
    assert plan.estimate.total < whole.estimate.total
    assert set(plan_group(group, H200, PlanOptions(workspace_limit=0)).pieces) == {1}
    small = plan_group(group, H200, PlanOptions(workspace_limit=100_000))
    assert 0 < small.workspace_bytes <= 100_000
    assert "cut along K" in str(plan)
    assert "batch_invariant" in tilewave.explain(plan)


def test_forced_pieces() -> None:
    group = [problem(40, 40, 1000), problem(40, 40, 1)]
    assert plan_group(group, H200, PlanOptions("split_k:5")).pieces == (5, 1)
    with pytest.raises(UsageError, match=r"workspace of [\d,]+ bytes is more than the limit of 10"):
        plan_group(group, H200, PlanOptions("split_k:5", workspace_limit=10))


@pytest.mark.parametrize(
    "schedule", ["stream_k", "stream_k_walk", Schedule(ScheduleKind.STREAM_K_SIXTEEN, 3)], ids=str
)
def test_schedules_of_one_product_alone(schedule: Schedule | str) -> None:
    with pytest.raises(UsageError, match="accepted for a group are None, 'data_parallel' and 'split_k'"):
        plan_group([problem(4, 4, 4)], H200, PlanOptions(schedule))


def test_tiles_go_by_size() -> None:
    """Tiny products get the tiniest tile, thin ones a thin tile, large ones no thin one."""
    tile = {
        sizes: plan_group([problem(*sizes)] * 2000, H200, FREE).instance
        for sizes in [(3, 3, 3), (4, 4000, 400), (4000, 4, 400), (512, 512, 512)]
    }
    assert [min(one.bm, one.bn) for one in tile.values()] == [16, 16, 16, tile[512, 512, 512].bm]
    assert tile[3, 3, 3].bm == tile[3, 3, 3].bn
    assert tile[4, 4000, 400].bn == tile[4000, 4, 400].bm == 128
    assert min(tile[512, 512, 512].bm, tile[512, 512, 512].bn) >= 64


def test_a_hundred_thousand_products_and_more_tiles_than_a_launch_has_blocks() -> None:
    """Any number; the table says which launch of several it takes to bring it."""
    plan = plan_group([problem(3, 3, 3)] * 100_000, H200, FREE)
    assert plan.launches == 1
    assert plan.table_launches == -(-plan.table.nbytes // (8 * grouped.TABLE_WORDS[1]))
    assert f"{plan.table_launches} launches before it" in str(plan)
    huge = plan_group([problem(2**20, 2**20, 1)] * 200, H200, FREE)
    assert huge.table.items > 2**31 - 1 == huge.blocks
    assert max(entry[1] for entry in huge.table.places) > 2**31
    assert "as many as a launch can have" in str(huge)


def test_portions_keep_the_table_within_the_limit(rng: Generator) -> None:
    """By the limit, never more than it and never a product lost; one launch where there is room."""
    group = [problem(2, 2, int(k), int(row)) for k, row in rng.integers(2, 60, (300, 2))]
    for limit in (0, 10_000, int(rng.integers(5_000, 200_000)), 1 << 28):
        parts = portions(group, limit)
        assert parts[0][0] == 0
        assert parts[-1][1] == len(group)
        assert all(one[1] == other[0] for one, other in itertools.pairwise(parts))
        for begin, end in parts:
            part = group[begin:end]
            nbytes = table_bytes(set(part), len(part))
            assert nbytes <= max(limit, INLINE_BYTES)
            plan = plan_group(part, H200, PlanOptions(workspace_limit=limit))
            assert plan.workspace_bytes <= limit
            if end < len(group):  # no more would have gone in
                assert nbytes + FORM_BYTES + 200 > max(limit // 16 * 16, INLINE_BYTES)
    assert len(portions(group, 1 << 28)) == 1
    assert portions([], 0) == []


def test_fewer_sms_take_longer_and_no_more_blocks(rng: Generator) -> None:
    group = some(rng, 12)
    times = []
    for sms in (1, 7, 50, 132):
        plan = plan_group(group, H200, PlanOptions(max_sms=sms))
        assert plan.blocks <= sms == plan.sms
        times.append(plan.estimate.total)
    assert times == sorted(times, reverse=True)


def test_the_account_tells_when_products_had_better_go_alone() -> None:
    (few,) = tilewave.plan_grouped([(4096, 4096, 4096)] * 3, device="H200")
    (many,) = tilewave.plan_grouped([(64, 64, 64)] * 500, device="H200")
    assert "One by one" in tilewave.explain(few)
    assert "One by one" not in tilewave.explain(many)


def test_sizes_of_the_front_door() -> None:
    (plan,) = tilewave.plan_grouped([(300, 400, 500), (0, 5, 5), (7, 8, 0)], device="H200", max_sms=5)
    assert [one.k for one in plan.problems] == [500, 0]
    assert plan.blocks <= 5
    assert tilewave.plan_grouped([], device="H200") == ()
    for sizes, message in (
        ((1, 2, -3), r"problem 1 is \(1, 2, -3\); accepted are three integers"),
        ((1, 2, True), "problem 1 is"),
        ((1, 2, 2.5), "problem 1 is"),
    ):
        with pytest.raises(UsageError, match=message):
            tilewave.plan_grouped([(1, 2, 3), sizes], device="H200")
    with pytest.raises(UsageError, match="sizes are planned with schedule"):
        tilewave.plan_grouped([(1, 2, 3)], device="H200", alpha=2.0)


def test_integers_of_numpy_are_integers() -> None:
    options = PlanOptions(max_sms=np.int64(7), workspace_limit=np.int32(100))  # type: ignore[arg-type]
    assert options == PlanOptions(max_sms=7, workspace_limit=100)
    assert type(options.max_sms) is int
    with pytest.raises(UsageError, match="max_sms must be an integer"):
        PlanOptions(max_sms=np.float64(7))  # type: ignore[arg-type]


def test_arrays_of_the_front_door(rng: Generator) -> None:
    a = rng.standard_normal((6, 6), np.float32)
    (plan,) = tilewave.plan_grouped([(a, a), (a[:0], a)], device="H200")
    assert len(plan.problems) == 1
    assert "copied to the GPU" in str(plan)
    assert "Turned down" in tilewave.explain(plan)
    plans = tilewave.plan_grouped([(a, a), {"a": a, "b": a, "max_sms": 3}], device="H200")
    assert [plan.sms for plan in plans] == [132, 3]
    assert tilewave.explain(plans) == "\n\n".join(map(tilewave.explain, plans))
