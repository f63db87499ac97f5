"""The product's plans: legal, least, complete, the same every time."""

from __future__ import annotations

import itertools
import pickle
import random
import subprocess
import sys
import threading
from collections import defaultdict
from dataclasses import replace

import pytest
from gemm_fakes import FAKES, FakeTiles, product, random_problem
from numpy.random import Generator

from tilewave.device import get_spec, spec_names
from tilewave.errors import UsageError
from tilewave.planner.gemm import GemmPlan, GemmPlanner, PlanOptions, explain_plan, plan_gemm
from tilewave.planner.gemm.candidates import MAX_BLOCKS
from tilewave.planner.gemm.resources import residency
from tilewave.planner.schedules import Decomposition, Schedule, ScheduleKind, split_k, stream_k
from tilewave.problem import GemmProblem, MatrixLayout

H200 = get_spec("H200")
OPTIONS = (
    PlanOptions(),
    PlanOptions(batch_invariant=True),
    PlanOptions(max_sms=1),
    PlanOptions(max_sms=7),
    PlanOptions(max_sms=5, batch_invariant=True),
    PlanOptions(workspace_limit=0),
    PlanOptions(workspace_limit=100_000),
    PlanOptions(schedule="split_k"),
    PlanOptions(schedule="stream_k"),
    PlanOptions(schedule="stream_k_walk"),
    PlanOptions(schedule=split_k(5)),
    PlanOptions(schedule="data_parallel"),
)


def planner(name: str = "H200", families=FAKES) -> GemmPlanner:
    return GemmPlanner(get_spec(name), families)


@pytest.fixture
def draw(rng: Generator) -> random.Random:
    return random.Random(int(rng.integers(2**32)))


def check_plan(plan: GemmPlan, options: PlanOptions, spec) -> None:
    """Everything that must hold of any plan."""
    problem, instance, cut = plan.problem, plan.instance, plan.cut
    if problem.m * problem.n * problem.batches == 0:
        assert plan.blocks == 0
        return
    assert residency(instance, spec)[1] is None
    tiles_m, tiles_n, groups = instance.tiles(problem)
    assert cut.tiles == tiles_m * tiles_n * groups
    assert (plan.raster.tiles_m, plan.raster.tiles_n) == (tiles_m, tiles_n)
    assert 1 <= plan.raster.band <= tiles_m
    assert cut.k == (problem.k if problem.product else 0)
    assert 1 <= plan.blocks <= MAX_BLOCKS
    assert plan.workspace_bytes <= options.workspace_limit
    if options.max_sms is not None:
        assert plan.blocks <= options.max_sms
    if options.batch_invariant:
        assert instance.sequential
        assert instance.k_groups == 1
        assert plan.workspace_bytes == 0
        assert plan.schedule.kind is ScheduleKind.DATA_PARALLEL
    if not instance.cuttable:
        assert cut.slices == 1 or (cut.walkers == 0 and cut.pieces == 1)


def check_cover(cut: Decomposition) -> None:
    """Every element of K of every tile once, cut ranges in order, slots and tickets within the workspace."""
    ranges: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for _, item in cut.all_items():
        ranges[item.tile].append((item.k_begin, item.k_end))
        if cut.slices == 1:
            assert item.pieces == 1
    assert sorted(ranges) == list(range(cut.tiles))
    for parts in ranges.values():
        parts.sort()
        assert parts[0][0] == 0
        assert parts[-1][1] == cut.k
        assert all(before[1] == after[0] for before, after in itertools.pairwise(parts))


def test_plans_of_random_problems_are_legal_least_and_complete(draw: random.Random) -> None:
    planners = {name: planner(name) for name in spec_names()}
    assert len(planners) == 10
    planned = covered = 0
    for _ in range(250):
        problem, options = random_problem(draw), draw.choice(OPTIONS)
        name = draw.choice(spec_names())
        try:
            plan = planners[name].plan(problem, options)
        except UsageError as error:
            assert "no kernel can compute" in str(error)  # noqa: PT017
            assert options != PlanOptions()
            continue
        planned += 1
        check_plan(plan, options, planners[name].spec)
        if plan.cut.tiles <= 3000 and plan.cut.blocks <= 3000:
            check_cover(plan.cut)
            covered += 1
        if plan.blocks == 0:
            continue
        # The fast choice is the choice of the full enumeration, and that is its least.
        (chosen,) = (candidate for candidate in plan.considered if candidate.rejected is None)
        assert (chosen.instance, chosen.schedule) == (plan.instance, plan.schedule)
        assert chosen.estimate is not None
        least = min(c.estimate.total for c in plan.considered if c.estimate is not None)
        assert chosen.estimate.total == least
        if plan.edges:
            edges = sum(edge.plan.estimate.total for edge in plan.edges)
            assert plan.estimate.total == pytest.approx(least + edges, rel=1e-12)
        else:
            assert plan.estimate == chosen.estimate
        assert len(plan.rejected) == len(plan.considered) - 1
        text = explain_plan(plan)
        assert all(str(candidate) in text for candidate in plan.rejected)
        assert str(problem) in text
        assert str(problem) in str(plan)
    assert planned > 150
    assert covered > 80


def test_a_plan_is_the_same_afresh_and_from_another_planner(draw: random.Random) -> None:
    first, second = planner(), planner()
    problems = [random_problem(draw) for _ in range(60)]
    plans = [first.plan(problem) for problem in problems]
    for problem, plan in reversed(list(zip(problems, plans, strict=True))):
        assert second.plan(problem) == plan
        assert second.plan_afresh(problem) == plan
        assert first.plan(replace(problem)) is plan


def test_any_candidate_can_be_planned(draw: random.Random) -> None:
    own = planner()
    for _ in range(20):
        problem = random_problem(draw, largest=600)
        for candidate in own.candidates(problem):
            if candidate.estimate is None:
                with pytest.raises(UsageError, match="cannot compute"):
                    own.plan_with(problem, candidate.instance, candidate.schedule)
                continue
            plan = own.plan_with(problem, candidate.instance, candidate.schedule)
            assert (plan.instance, plan.schedule, plan.estimate) == (
                candidate.instance,
                candidate.schedule,
                candidate.estimate,
            )
            check_plan(plan, PlanOptions(), own.spec)


def test_equal_predictions_are_told_apart_the_same_way_whatever_the_order_of_asking() -> None:
    """Instances that only differ in name predict the same time: the first of the family is chosen."""
    one = FakeTiles()
    twin = FakeTiles(name="twin")
    twin.all = tuple(replace(instance, name=f"twin_{instance.name}") for instance in twin.all)
    problem = product(1024, 1024, 1024)
    assert not planner(families=(one, twin)).plan(problem).instance.name.startswith("twin")
    assert planner(families=(twin, one)).plan(problem).instance.name.startswith("twin")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_an_empty_output_launches_nothing(options: PlanOptions) -> None:
    for sizes in ((0, 5, 7), (5, 0, 7), (0, 0, 0)):
        plan = planner().plan(product(*sizes), options)
        assert plan.blocks == 0
        assert plan.workspace_bytes == 0
        assert "nothing" in str(plan)
        assert "nothing is launched" in explain_plan(plan)
    empty_batch = planner().plan(replace(product(4, 4, 4, (3, 2)), batch=(3, 0)), options)
    assert empty_batch.blocks == 0


def test_without_a_product_the_elementwise_family_computes() -> None:
    plan = planner().plan(product(100, 100, 0))
    assert plan.instance.name == FAKES[1].instances()[0].name
    assert plan.cut.slices == 1
    assert "not read" in explain_plan(plan)
    asked = replace(product(100, 100, 9), product=False)
    assert planner().plan(asked).instance == plan.instance
    # k of 0 with a product asked for means the same.
    assert planner().plan(replace(product(100, 100, 0), product=True)).instance == plan.instance


def test_max_sms_caps_the_blocks_and_keeps_the_bits() -> None:
    problem = product(1000, 900, 800)
    for most in (1, 2, 7, 131, 132, 500):
        for invariant in (False, True):
            plan = planner().plan(problem, PlanOptions(max_sms=most, batch_invariant=invariant))
            assert plan.blocks <= most
            assert plan.sms == min(most, 132)
            check_cover(plan.cut)
            assert any("max_sms" in note for note in plan.notes)
    invariant = planner().plan(problem, PlanOptions(max_sms=7, batch_invariant=True))
    assert invariant.cut.slices == 1
    assert all(item.pieces == 1 for _, item in invariant.cut.all_items())
    assert any("whole tiles" in note for note in invariant.notes)
    times = [
        planner().plan(problem, PlanOptions(max_sms=most)).estimate.total for most in (1, 4, 16, 64, 132)
    ]
    assert times == sorted(times, reverse=True)
    assert times[0] > 50 * times[-1]
    assert "Without max_sms 1 the choice would be" in explain_plan(
        planner().plan(problem, PlanOptions(max_sms=1))
    )


def test_a_gpu_whose_bandwidth_nobody_knows() -> None:
    unknown = replace(H200, name="a GPU of the future", bandwidth_gb_s=float("nan"))
    for sizes in ((16, 16384, 4096), (2048, 2048, 2048)):
        plan = GemmPlanner(unknown, FAKES).plan(product(*sizes))
        assert 0 < plan.estimate.memory < plan.estimate.total < 10_000


def test_more_tiles_than_a_launch_has_blocks() -> None:
    plan = planner().plan(product(8, 8, 8, (2**32,)))
    assert plan.blocks <= MAX_BLOCKS
    assert plan.cut.tiles >= 2**31
    assert plan.workspace_bytes == 0
    assert any("walk over" in note for note in plan.notes)
    assert plan.estimate.total > 1000


def test_more_sms_are_never_slower_for_whole_tiles(draw: random.Random) -> None:
    options = PlanOptions(schedule="data_parallel")
    for _ in range(25):
        problem = random_problem(draw)
        times = [
            GemmPlanner(replace(H200, sms=sms), FAKES).plan(problem, options).estimate.total
            for sms in (1, 2, 3, 7, 48, 131, 132, 200)
        ]
        assert times == sorted(times, reverse=True), problem


def test_twice_the_sms_are_never_slower_by_more_than_a_cut_can_cost(draw: random.Random) -> None:
    """Only some cuts are weighed, so the free choice may lose a little to what fits the smaller count."""
    for _ in range(60):
        problem = random_problem(draw)
        few, many = (
            GemmPlanner(replace(H200, sms=sms), FAKES).plan(problem).estimate.total for sms in (33, 66)
        )
        assert many <= 1.03 * few, problem


def test_few_tiles_are_cut_and_many_are_not() -> None:
    deep = planner().plan(product(64, 64, 1_000_000))
    assert deep.cut.pieces > 16 or deep.cut.walkers > 16
    assert deep.workspace_bytes > 0
    large = planner().plan(product(16384, 16384, 512))
    assert large.schedule.kind in (
        ScheduleKind.DATA_PARALLEL,
        ScheduleKind.STREAM_K,
        ScheduleKind.STREAM_K_WALK,
    )
    assert large.instance.bm >= 64
    no_room = planner().plan(product(64, 64, 1_000_000), PlanOptions(workspace_limit=0))
    assert no_room.workspace_bytes == 0
    assert no_room.estimate.total > 5 * deep.estimate.total
    text = explain_plan(no_room)
    assert "more than the limit of 0" in text
    assert "Without the workspace limit of 0 bytes" in text


@pytest.mark.parametrize(
    ("schedule", "kind"),
    [
        ("data_parallel", ScheduleKind.DATA_PARALLEL),
        ("split_k", ScheduleKind.SPLIT_K),
        ("split_k:4", ScheduleKind.SPLIT_K),
        ("stream_k", ScheduleKind.STREAM_K),
        ("stream_k:3", ScheduleKind.STREAM_K),
        ("stream_k_walk", ScheduleKind.STREAM_K_WALK),
        (split_k(3), ScheduleKind.SPLIT_K),
        (stream_k(2), ScheduleKind.STREAM_K),
    ],
)
def test_a_schedule_asked_for_is_the_schedule(schedule: Schedule | str, kind: ScheduleKind) -> None:
    for sizes in ((1000, 1000, 1000), (64, 64, 64), (2048, 4096, 40), (33, 7, 5)):
        plan = planner().plan(product(*sizes), PlanOptions(schedule=schedule))
        assert plan.schedule.kind is kind
        check_cover(plan.cut)
        if isinstance(schedule, str) and ":" in schedule:
            assert plan.schedule.pieces == int(schedule.partition(":")[2])
        if plan.schedule.pieces > plan.cut.pieces and plan.cut.whole_tiles != plan.cut.tiles:
            assert any("was asked for" in note for note in plan.notes)


def test_batch_invariant_uses_one_chain_of_sums() -> None:
    free = planner().plan(product(16, 512, 8192))
    assert free.instance.k_groups > 1 or free.cut.slots > 0
    kept = planner().plan(product(16, 512, 8192), PlanOptions(batch_invariant=True))
    assert kept.instance.sequential
    text = explain_plan(kept)
    assert "batch_invariant asks for" in text
    assert "Without batch_invariant the choice would be" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "split"}, "one of data_parallel, split_k, stream_k, stream_k_walk.*'split'"),
        ({"schedule": "split_k:1"}, "split_k takes 2 to 1024 pieces, not 1"),
        ({"schedule": 3}, "schedule must be None, a Schedule or one of"),
        ({"schedule": "split_k", "batch_invariant": True}, "batch_invariant needs uncut tiles.*split_k"),
        ({"max_sms": 0}, "max_sms must be an integer of at least 1, not 0"),
        ({"max_sms": 2.0}, "max_sms must be an integer"),
        ({"max_sms": True}, "max_sms must be an integer"),
        ({"workspace_limit": -1}, "workspace_limit must be an integer of at least 0"),
        ({"workspace_limit": None}, "workspace_limit must be an integer"),
        ({"deterministic": 1}, "deterministic must be True or False"),
        ({"batch_invariant": None}, "batch_invariant must be True or False"),
    ],
)
def test_options_that_make_no_sense(options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PlanOptions(**options)


def test_problems_that_no_kernel_computes() -> None:
    with pytest.raises(UsageError, match="no kernel can compute 5 x 5 x 5 on H200: none matches"):
        planner(families=FAKES[1:]).plan(product(5, 5, 5))
    whole = FakeTiles(cuttable=False)
    with pytest.raises(UsageError, match="cannot be cut along K") as caught:
        planner(families=(whole,)).plan(product(500, 500, 500), PlanOptions(schedule=split_k(3)))
    assert "schedule" in str(caught.value)
    with pytest.raises(UsageError, match="at most 3 batch axes, not 4"):
        planner().plan(product(5, 5, 5, (2, 2, 2, 2)))
    with pytest.raises(UsageError, match="must be at least 0"):
        planner().plan(replace(product(5, 5, 5), m=-1))


def test_threads_share_a_planner(draw: random.Random) -> None:
    shared = planner()
    problems = [random_problem(draw) for _ in range(40)]
    expected = {problem: planner().plan(problem) for problem in problems}
    wrong: list[GemmProblem] = []

    def work(seed: int) -> None:
        order = problems.copy()
        random.Random(seed).shuffle(order)
        wrong.extend(problem for problem in order if shared.plan(problem) != expected[problem])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_cache_is_bounded_and_forgets_the_least_recently_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewave.planner.gemm.select.CACHED_PLANS", 3)
    own = planner()
    plans = [own.plan(product(m, 64, 64)) for m in (1, 2, 3)]
    assert own.plan(product(1, 64, 64)) is plans[0]
    own.plan(product(4, 64, 64))
    assert len(own._plans) == 3
    assert own.plan(product(1, 64, 64)) is plans[0]
    assert own.plan(product(2, 64, 64)) is not plans[1]


def test_everything_about_a_problem_is_in_the_key() -> None:
    """Two problems that differ anywhere never share a plan."""
    own = planner()
    base = product(64, 64, 64, (2,))
    layout = MatrixLayout(64, 1, (4096,))
    plan = own.plan(base)
    changes = [
        {"m": 65}, {"n": 65}, {"k": 65}, {"batch": (3,)},
        *({name: replace(layout, **change)} for name in ("a", "b", "out", "c", "bias", "preactivation")
          for change in ({"row": 68}, {"column": 2}, {"batch": (4100,)}, {"alignment": 4})),
        {"activation": 1}, {"product": False},
    ]  # fmt: skip
    others = [own.plan(replace(base, **change)) for change in changes]
    assert len({id(other) for other in [plan, *others]}) == len(changes) + 1
    assert own.plan(base, PlanOptions(max_sms=9)) is not plan


def test_plans_of_equal_records_are_shared_and_of_others_are_not() -> None:
    problem = replace(product(3, 4, 0), product=False)
    plan = plan_gemm(problem, H200)
    assert plan_gemm(problem, replace(H200)) is plan
    assert plan_gemm(problem, replace(H200, sms=7)).sms == 7
    for sms in range(100, 180):  # more records than planners are kept
        assert plan_gemm(problem, replace(H200, sms=sms)).sms == sms
    assert plan_gemm(problem, H200) == plan


def test_a_plan_travels_with_its_candidates() -> None:
    plan = planner().plan(product(100, 200, 300))
    copy = pickle.loads(pickle.dumps(plan))
    assert copy == plan
    assert tuple(copy.considered) == tuple(plan.considered)
    assert len(copy.rejected) > 5


def test_planning_imports_neither_numpy_nor_a_gpu_library() -> None:
    code = (
        "import sys, tilewave.planner.gemm, tilewave.kernels.families\n"
        "heavy = {'numpy', 'cuda', 'torch', 'cupy', 'rich', 'typer'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
