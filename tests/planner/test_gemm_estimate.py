"""The estimate's parts, its constants, calibrations, and the figures of kernels behind it."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources

import pytest
from gemm_fakes import ALONG_K, FAKES, FakeTiles, product, tile

from tilewave.compiler.resources import Resources
from tilewave.device import get_spec, spec_names
from tilewave.errors import UsageError
from tilewave.kernels.families import FAMILIES, large_tile
from tilewave.kernels.instances import Access, Instance
from tilewave.planner.cost import Basis
from tilewave.planner.gemm import GemmPlanner, PlanOptions
from tilewave.planner.gemm.candidates import bind
from tilewave.planner.gemm.costs import THEORY, Calibration, GemmCosts, costs_for
from tilewave.planner.gemm.estimate import InstanceModel, Rates, Traffic, Weigher, fma_share
from tilewave.planner.gemm.resources import blocks_per_sm, estimated_resources, residency, resource_table
from tilewave.planner.schedules import DATA_PARALLEL, STREAM_K_WALK, Schedule, split_k, stream_k
from tilewave.problem import GemmProblem, MatrixLayout

H200 = get_spec("H200")
WIDE = Access(ALONG_K, 16)
BIG = tile(128, 256, 8, 16, 8, 1, WIDE, WIDE)


def weigher(instance: Instance, problem: GemmProblem, sms: int = 132, costs=THEORY) -> Weigher:
    model = InstanceModel.of(instance, H200, costs)
    return Weigher(model, problem, Traffic.of(problem), Rates.of(H200, costs, sms))


def predict(instance: Instance, problem: GemmProblem, schedule: Schedule = DATA_PARALLEL, costs=THEORY):
    one = weigher(instance, problem, costs=costs)
    return one.estimate(bind(one, problem.k, schedule, 132, PlanOptions()))


def test_traffic_counts_each_element_once_and_whole_sectors() -> None:
    problem = product(100, 200, 300)
    assert Traffic.of(problem) == Traffic(4 * 100 * 300, 4 * 300 * 200, 4 * 100 * 200)
    shared = replace(product(10, 20, 30, (50,)), a=MatrixLayout(30, 1, (0,)))
    assert Traffic.of(shared).a == 4 * 10 * 30
    assert Traffic.of(shared).b == 4 * 50 * 30 * 20
    repeated = replace(problem, b=MatrixLayout(0, 1))
    assert Traffic.of(repeated).b == 4 * 200
    # Every third element: a third of each sector is used; beyond a sector, an element each.
    assert Traffic.of(replace(problem, a=MatrixLayout(900, 3))).a == 3 * 4 * 100 * 300
    assert Traffic.of(replace(problem, a=MatrixLayout(-9000, -30))).a == 8 * 4 * 100 * 300
    added = replace(problem, c=problem.out, bias=MatrixLayout(0, 1), preactivation=problem.out)
    assert Traffic.of(added).outputs == 3 * 4 * 100 * 200 + 4 * 200
    unread = Traffic.of(replace(problem, product=False))
    assert (unread.a, unread.b) == (0, 0)


def test_a_large_square_by_hand() -> None:
    """4096 with 128 x 256 tiles: 512 tiles, 4 on the busiest of 132 SMs."""
    estimate = predict(BIG, product(4096, 4096, 4096))
    share = 0.829 * 128 / (128 + 6 + 128 / 4 / 256 + 256 / 4 / 256)
    assert fma_share(BIG, THEORY) == pytest.approx(share)
    compute = 4 * 128 * 256 * 4096 / (128 * 1980 * share) * (1 + 0.14 / 2) + 3 * 1000 / 1980
    compute += 4 * (200 + (2 + 1) * 128 * 256 / 32) / 1980  # tiles: their start, sums and stores
    assert estimate.compute == pytest.approx(compute)
    assert estimate.combining == 0
    assert estimate.total == pytest.approx(2.35 + estimate.compute + 0.25 * estimate.memory)
    assert estimate.limit == "compute"


def test_memory_is_the_longer_of_the_whole_and_the_busiest_sm() -> None:
    """A matrix-vector product moves its matrix once; on one SM of few it is that SM's share that counts."""
    flat = tile(16, 128, 32, 4, 4, 1, WIDE, WIDE)
    estimate = predict(flat, product(16, 128 * 132 * 8, 4096))
    moved = 4 * (16 * 4096 + 4096 * 128 * 132 * 8 + 16 * 128 * 132 * 8)
    assert estimate.memory == pytest.approx(
        max(moved / 4e6, 8 * 4 * (4096 * 144 + 16 * 128) / (32 * 1980)), rel=0.01
    )
    alone = predict(flat, product(16, 128, 65536))
    assert alone.memory == pytest.approx(4 * (65536 * 144 + 16 * 128) / (32 * 1980))
    cut = predict(flat, product(16, 128, 65536), split_k(64))
    assert cut.memory < alone.memory / 20
    assert cut.combining > 1.4


def test_what_l2_does_not_keep_is_read_again() -> None:
    def least(problem: GemmProblem, l2_bytes: int) -> float:
        spec = replace(H200, l2_bytes=l2_bytes)
        model = InstanceModel.of(BIG, spec, THEORY)
        return Weigher(model, problem, Traffic.of(problem), Rates.of(spec, THEORY, 132)).least()

    small, large = product(2048, 2048, 1024), product(65536, 65536, 1024)
    assert least(small, 60 * 2**20) == least(small, 2**40)
    # The last bands of B, beyond the first, come from memory again: 16 rows of tiles are a band.
    again = (512 // 16 - 1) * 4 * 65536 * 1024 / 4e6
    assert least(large, 60 * 2**20) - least(large, 2**40) == pytest.approx(0.25 * again)


def test_combining_grows_with_the_pieces() -> None:
    problem = product(128, 256, 100_000)
    times = [predict(BIG, problem, split_k(pieces)).combining for pieces in (2, 8, 32, 128)]
    assert times == sorted(times)
    assert predict(BIG, problem).combining == 0
    # Two pieces written, one tile of two summed: at most three tiles through one SM.
    assert times[0] == pytest.approx(1.4 + 3 * 128 * 256 * 4 / (32 * 1980))


def test_a_walk_costs_its_factor() -> None:
    """All of it for tiles of 64 x 64 and smaller, less for larger ones, and only for what is walked."""
    without = replace(THEORY, walk=replace(THEORY.walk, value=1.0))

    def slowdown(instance: Instance, waves: int) -> float:
        problem = product(instance.bm * 3, instance.bn * (44 * waves + 6), 65536)  # and 18 tiles
        plain = predict(instance, problem, STREAM_K_WALK, without)
        assert plain.compute < predict(instance, problem).compute
        return predict(instance, problem, STREAM_K_WALK).compute / plain.compute

    walk = THEORY.walk.value - 1
    for size in (32, 64):
        small = tile(size, size, 16, 8, 8, 1, WIDE, WIDE)
        resident = InstanceModel.of(small, H200, THEORY).resident
        assert slowdown(small, resident) == pytest.approx(1 + walk, rel=0.02)
    large = 1 + walk * 32 * (1 / 128 + 1 / 256)
    assert slowdown(BIG, 1) == pytest.approx(large, rel=0.01)
    assert slowdown(BIG, 9) == pytest.approx(1 + (large - 1) / 8, rel=0.01)


def test_a_block_that_keeps_its_own_sums_moves_fewer() -> None:
    problem = product(128 * 3, 256 * 50, 4096)
    keeps = replace(BIG, keeps_own=True)
    plain, kept = (predict(one, problem, STREAM_K_WALK).combining for one in (BIG, keeps))
    fixed = 1.5 * THEORY.combining.value
    assert 0.3 * (plain - fixed) < kept - fixed < 0.7 * (plain - fixed)
    assert predict(BIG, problem, split_k(2)) == predict(keeps, problem, split_k(2))


def test_a_new_loop_is_faster_unless_the_factors_know_it() -> None:
    def element(costs: GemmCosts, *, new_loop: bool) -> float:
        return InstanceModel.of(BIG, H200, costs, new_loop=new_loop).element

    assert element(THEORY, new_loop=True) == pytest.approx(
        THEORY.new_loop.value * element(THEORY, new_loop=False)
    )
    known = replace(THEORY, new_loops=True)
    assert element(known, new_loop=True) == element(known, new_loop=False) == element(THEORY, new_loop=False)
    record = {"device": "H200", "source": "x", "new_loops": True}
    assert Calibration.from_json(json.dumps(record)).applied().new_loops
    assert not Calibration.from_json(json.dumps({**record, "new_loops": False})).applied().new_loops


def test_planners_know_which_kernels_get_new_loops() -> None:
    """Kernels that read 16 bytes, on a GPU whose register file was measured, unless it is switched off."""
    wide, narrow = (
        next(i for i in large_tile.instances() if i.name == f"large_tile_128x256_nn_{width}")
        for width in (16, 4)
    )
    for spec, faster in ((H200, True), (get_spec("GB10"), False)):
        plain, new = (GemmPlanner(spec, [large_tile], THEORY, new_loops=loops) for loops in (False, True))
        assert (new.model(wide).element < plain.model(wide).element) is faster
        assert new.model(narrow).element == plain.model(narrow).element


@pytest.mark.parametrize("costs", [THEORY, costs_for("H200")], ids=["theory", "H200"])
def test_no_schedule_beats_the_bound(costs) -> None:
    for sizes in ((1000, 900, 800), (16, 128, 65536), (4096, 4096, 64), (5, 7, 9), (640, 1281, 4096)):
        problem = product(*sizes)
        for family in FAKES:
            for instance in family.matching(problem):
                one = weigher(instance, problem, costs=costs)
                for schedule in (DATA_PARALLEL, STREAM_K_WALK, split_k(2), split_k(16), stream_k(3)):
                    cut = bind(one, problem.k, schedule, 132, PlanOptions())
                    time = one.key(cut)[0] * (1 + 1e-12)
                    assert one.least() <= time
                    if cut.pieces == schedule.pieces:  # not where K is too short for the pieces
                        assert one.least_of(schedule) <= time


def test_a_whole_tile_that_is_left_alone_waits_for_every_slice() -> None:
    """150 tiles in stream-K: an SM's whole tile and its piece run side by side, then the tile by itself."""
    small = tile(64, 64, 16, 8, 8, 1, WIDE, WIDE)
    problem = product(64 * 10, 64 * 15, 16 * 240)

    def compute(waiting: float) -> float:
        costs = replace(THEORY, few_warps=replace(THEORY.few_warps, value=waiting))
        return predict(small, problem, stream_k(4), costs).compute

    assert weigher(small, problem).model.resident >= 3
    # 132 whole tiles, 18 in four pieces of 60: a busiest SM has 240 + 60 slices, and 240 in a row.
    slice_us = 64 * 64 * 16 / (128 * 1980 * fma_share(small, THEORY))
    waits = 240 * slice_us / (64 / 32 / 4)
    assert compute(2.0) - compute(1.0) == pytest.approx(waits)
    whole = predict(small, problem).compute
    assert compute(THEORY.few_warps.value) < whole  # two whole tiles on an SM


def test_tiles_cost_by_size_by_stores_and_by_their_factor() -> None:
    wide, odd = product(2048, 512, 16), product(2048, 511, 16)
    instance = tile(64, 64, 16, 8, 8, 1, WIDE, Access(ALONG_K, 4))
    tiles = 2  # of 256 on 132 SMs
    slow = replace(THEORY, narrow_stores=replace(THEORY.narrow_stores, value=14.0))
    assert predict(instance, wide, costs=slow).compute == predict(instance, wide).compute
    more = predict(instance, odd, costs=slow).compute - predict(instance, odd).compute
    assert more == pytest.approx(tiles * 10 * 64 * 64 / 32 / 1980)
    apart = replace(wide, out=replace(wide.out, row=513))
    assert not Traffic.of(apart).wide
    assert Traffic.of(wide).wide
    factored = replace(THEORY, tile_factors={instance.name: 3.0})
    more = predict(instance, wide, costs=factored).compute - predict(instance, wide).compute
    assert more == pytest.approx(2 * tiles * (200 + 3 * 64 * 64 / 32) / 1980)


def test_narrow_copies_cost_where_there_are_any() -> None:
    problem = product(4096, 4096, 4096)
    slow = replace(THEORY, narrow_copies=replace(THEORY.narrow_copies, value=50.0))
    assert predict(BIG, problem, costs=slow).compute == predict(BIG, problem).compute
    narrow = tile(128, 256, 8, 16, 8, 1, Access(ALONG_K, 4), WIDE)
    ratio = predict(narrow, problem, costs=slow).compute / predict(narrow, problem).compute
    share = 128 / 256 / 128  # copies of A a thread, for each of 128 multiply-adds
    assert ratio == pytest.approx((1 + 50 * share) / (1 + share), rel=0.01)


# What kernels with these tiles took on an H200, in us: a measured study of small and skinny products, and one
# of FP32 kernels. The studies name block tiles, k groups and pieces; thread tiles are taken to be 16 x 8 and
# 8 x 8 and, for the small ones, 8 x 4 and 4 x 4.
READINGS = [
    (26.7, (16, 4096, 4096), (), (16, 128, 32, 4, 4, 4), split_k(8)),
    (253.0, (8, 512, 500_000), (), (8, 128, 32, 4, 4, 4), split_k(99)),
    (54.8, (8457, 35, 1760), (), (128, 36, 32, 8, 4, 1), split_k(5)),
    (229.0, (401_408, 64, 147), (), (128, 64, 16, 8, 8, 1), DATA_PARALLEL),
    (15.8, (16, 56, 150_352), (), (16, 56, 64, 4, 4, 8), split_k(132)),
    (67.2, (64, 64, 64), (4096,), (64, 64, 32, 8, 4, 1), DATA_PARALLEL),
    (89.0, (1025, 1025, 1025), (), (64, 64, 16, 8, 4, 1), DATA_PARALLEL),
    (59.0, (1024, 1024, 1024), (), (64, 64, 16, 8, 4, 1), DATA_PARALLEL),
    (201.7, (1536, 1536, 1536), (), (64, 64, 16, 8, 4, 1), DATA_PARALLEL),
    (3040.0, (4096, 4096, 4096), (), (128, 256, 8, 16, 8, 1), DATA_PARALLEL),
    (24_160.0, (8192, 8192, 8192), (), (128, 256, 8, 16, 8, 1), DATA_PARALLEL),
    (10.5, (512, 512, 512), (), (32, 32, 32, 4, 4, 4), DATA_PARALLEL),
    (4.3, (256, 256, 256), (), (32, 32, 32, 4, 4, 4), DATA_PARALLEL),
    (3.3, (2048, 512, 13), (), (64, 64, 16, 8, 4, 1), DATA_PARALLEL),
    (41.0, (5120, 5120, 16), (), (64, 64, 16, 8, 4, 1), DATA_PARALLEL),
]


def test_theory_is_near_what_kernels_took() -> None:
    """Without any factor of a kernel: within 1.6 times everywhere, within 15 % in the median."""
    ratios = []
    for measured, sizes, batch, shape, schedule in READINGS:
        predicted = predict(tile(*shape, WIDE, WIDE), product(*sizes, batch), schedule).total
        ratios.append(max(predicted / measured, measured / predicted))
        assert ratios[-1] < 1.6, (sizes, predicted)
    assert sorted(ratios)[len(ratios) // 2] < 1.15


def test_every_constant_says_what_it_is() -> None:
    for device in spec_names():
        constants = costs_for(device).constants()
        assert len(constants) == 17
        for constant in constants.values():
            assert constant.value > 0
            assert constant.unit
            assert len(constant.source) > 5


def test_packaged_calibrations_are_of_known_gpus_and_instances() -> None:
    known = {instance.name for family in FAMILIES for instance in family.instances()}
    folder = resources.files("tilewave.planner.gemm").joinpath("calibration")
    files = [file for file in folder.iterdir() if file.name.endswith(".json")]
    assert files
    for file in files:
        calibration = Calibration.from_json(file.read_text(encoding="utf-8"))
        assert file.name == f"{get_spec(calibration.device).name.replace(' ', '_')}.json"
        assert set(calibration.factors) <= known
        costs = costs_for(calibration.device)
        assert costs.calibration == calibration.source
        assert all(costs.constants()[name] == constant for name, constant in calibration.constants.items())
    assert costs_for("T4") is THEORY
    assert costs_for("NVIDIA H200") == costs_for("H200")
    assert costs_for("some GPU of the future") is THEORY
    assert costs_for("H200").walk.basis is Basis.REPORTED


def test_a_calibration_changes_the_choice() -> None:
    problem = product(4096, 4096, 4096)
    plain = GemmPlanner(H200, FAKES, THEORY).plan(problem)
    text = {
        "device": "H200",
        "source": "made up",
        "constants": {"launch": {"value": 9.0, "source": "made up"}},
        "factors": {plain.instance.name: 3.0},
    }
    costs = Calibration.from_json(json.dumps(text)).applied()
    assert costs.factor(plain.instance) == 3.0
    assert costs.factor(BIG) == 1.0
    calibrated = GemmPlanner(H200, FAKES, costs).plan(problem)
    assert calibrated.instance != plain.instance
    assert calibrated.estimate.launch == 9.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"constants": {"lunch": {"value": 1.0, "source": "x"}}},
            r"constants \['lunch'\]; known: launch",
        ),
        ({"constants": {"launch": {"value": 0.0, "source": "x"}}}, "positive numbers.*launch"),
        ({"factors": {"a": -1}}, "positive numbers.*'a': -1"),
        ({"factors": {"a": float("nan")}}, "positive numbers"),
        ({"constants": {"launch": {"value": 1.0}}}, "without a usable 'source'"),
        ({"source": None, "device": None, "factors": {"a": "x"}}, "without a usable"),
    ],
)
def test_calibrations_that_make_no_sense(change: dict, message: str) -> None:
    record = {"device": "H200", "source": "made up"} | change
    with pytest.raises(UsageError, match=message):
        Calibration.from_json(json.dumps(record))


def test_estimated_resources_are_within_what_a_gpu_allows() -> None:
    for device in spec_names():
        spec = get_spec(device)
        for instance in FakeTiles().instances():
            registers = estimated_resources(instance, spec).registers
            assert 32 <= registers <= spec.registers_per_thread
            assert registers * instance.threads <= spec.registers_per_block
    assert blocks_per_sm(BIG, H200) == 1
    assert blocks_per_sm(tile(32, 32, 32, 4, 4, 1, WIDE, WIDE), H200) > 4


def test_the_table_of_resources_is_read(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = {"architectures": {"sm_90": {BIG.name: [111, 16, 48]}}}
    (tmp_path / "resources.json").write_text(json.dumps(record))
    monkeypatch.setattr("tilewave.planner.gemm.resources.package_files.files", lambda _: tmp_path)
    resource_table.cache_clear()
    try:
        assert resource_table("sm_90") == {BIG.name: Resources(111, 0, 16, 0, 48)}
        assert resource_table("sm_75") == {}
        assert blocks_per_sm(BIG, H200) == 2
    finally:
        resource_table.cache_clear()


def test_every_instance_of_the_product_runs_on_some_gpu_and_has_its_own_name() -> None:
    instances = [instance for family in FAMILIES for instance in family.instances()]
    assert len({instance.name for instance in instances}) == len(instances)
    for instance in instances:
        assert any(blocks_per_sm(instance, get_spec(device)) > 0 for device in spec_names()), instance
        assert 0 < fma_share(instance, THEORY) <= 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"threads": 2048}, "2048 threads a block, H200 allows 1024"),
        ({"shared_bytes": 300_000}, "bytes of shared memory a block, H200 allows 232,448"),
    ],
)
def test_what_no_sm_holds_says_why(change: dict[str, int], reason: str) -> None:
    blocks, why = residency(replace(BIG, **change), H200)
    assert blocks == 0
    assert why is not None
    assert reason in why
    few = replace(H200, registers_per_sm=16384)
    assert residency(BIG, few) == (0, "256 threads of 216 registers do not fit an SM of H200")


def test_a_kernel_that_the_gpu_cannot_run_is_turned_down_with_the_reason() -> None:
    plan = GemmPlanner(get_spec("T4"), FAKES).plan(product(1024, 1024, 1024))
    small = replace(get_spec("T4"), shared_per_block=20_000)
    held = GemmPlanner(small, FAKES).plan(product(1024, 1024, 1024))
    assert held.instance.shared_bytes <= 20_000
    refused = [c for c in held.rejected if c.rejected and "bytes of shared memory" in c.rejected]
    assert refused
    assert plan.instance.shared_bytes <= 65_536
