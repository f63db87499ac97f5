"""Plans of precision fp16x3: which kernel, when ieee runs instead, what is refused."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

import tilewave
from tilewave.device import get_spec, spec_names
from tilewave.errors import UsageError
from tilewave.kernels import fp16x3
from tilewave.kernels.fp16x3 import FINE_INTERVAL, INTERVAL, interval_of
from tilewave.planner.fp16x3 import (
    COMPUTE_CAPABILITY,
    fine_only,
    least_pieces,
    pieces_of,
    plan_fp16x3,
    plan_in_mode,
    plan_on,
)
from tilewave.planner.gemm.options import WORKSPACE_LIMIT_BYTES, PlanOptions
from tilewave.precision.fp16x3 import COARSE, FINE

H200 = get_spec("H200")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def plan(*sizes: int, device: str = "H200", **options: object) -> tilewave.GemmPlan:
    return tilewave.plan(*sizes, device=device, precision="fp16x3", **options)  # type: ignore[arg-type]


def test_large_products_run_on_tensor_cores_and_small_ones_as_ieee() -> None:
    for n in (2048, 4096, 8192, 16384):
        found = plan(n, n, n)
        assert found.instance is fp16x3.PAIRS
        assert found.problem.precision == "fp16x3"
        assert found.estimate.total < tilewave.plan(n, n, n, device="H200").estimate.total / 2
        assert found.blocks == min(132, (n // 256) * (n // 128))
    for sizes in ((64, 64, 64), (1, 4096, 4096), (4096, 1, 4096), (512, 512, 8)):
        found = plan(*sizes)
        assert found.instance.family != fp16x3.FAMILY
        assert found.problem.precision == "ieee"
        assert any("'ieee' is predicted to be faster" in note for note in found.notes)


def test_what_is_chosen_was_measured_to_be_hardly_slower_than_the_other() -> None:
    record = json.loads((RESULTS / "fp16x3_h200.json").read_text())
    compared = 0
    for cell in record["cells"]:
        times = {name: one["us"] for name, one in cell["contenders"].items()}
        sizes, layouts = cell["cell"].rsplit(" ", 1)
        *batch, m, n, k = map(int, sizes.split(" x "))
        found = plan(m, n, k, batch=tuple(batch), layouts=layouts)
        assert times[found.problem.precision] <= 1.3 * min(times["ieee"], times["fp16x3"]), cell["cell"]
        compared += 1
    assert compared > 10


def test_sizes_change_neither_kernel_nor_sums_where_bits_must_not_depend_on_them() -> None:
    for m, n in ((1, 512), (64, 512), (4096, 512), (8192, 8192)):
        assert plan(m, n, 512, batch_invariant=True).instance is fp16x3.SMALL


def test_the_smaller_tile_runs_where_the_larger_one_would_leave_sms_idle() -> None:
    assert plan(1024, 1024, 4096).instance is fp16x3.SMALL


def test_outputs_that_a_library_would_cut_have_fine_sums_whatever_is_faster() -> None:
    assert interval_of(fp16x3.SMALL) == FINE.interval == FINE_INTERVAL
    for instance in (fp16x3.PAIRS, fp16x3.LARGE):
        assert interval_of(instance) == COARSE.interval == INTERVAL
    # On 12 SMs larger tiles are the faster ones, and do not run.
    problem = tilewave.plan(1408, 1536, 4096, device="H200").problem
    large, small = (plan_on(problem, one, H200, 12).estimate.total for one in (fp16x3.LARGE, fp16x3.SMALL))
    assert large < small
    for m, n, batch in ((1408, 1536, 1), (128, 16896, 1), (512, 768, 5), (1281, 1409, 1)):
        problem = tilewave.plan(m, n, 4096, batch=batch, device="H200").problem
        assert fine_only(problem, False)
        found = plan_fp16x3(problem, H200, PlanOptions(max_sms=12))
        assert found.instance is fp16x3.SMALL
        assert "every 16 of K" in found.notes[0]
    assert not fine_only(tilewave.plan(1536, 1536, 4096, device="H200").problem, False)
    assert fine_only(tilewave.plan(1536, 1536, 4096, device="H200").problem, True)
    coarse = plan(1536, 1536, 4096)
    assert coarse.instance is not fp16x3.SMALL
    assert "every 64 of K" in coarse.notes[0]


def test_ieee_in_the_modes_place_has_chains_as_short_as_a_library_s() -> None:
    changed = 0
    for k, (m, n) in itertools.product(
        (1024, 1500, 4096),
        ((128, 128), (512, 512), (768, 768), (256, 1024), (2048, 128), (16384, 64), (1, 4096), (32, 4096)),
    ):
        found, fastest = plan(m, n, k), tilewave.plan(m, n, k, device="H200")
        if found.problem.precision == "fp16x3":
            continue
        assert pieces_of(found) >= least_pieces(found.covers), (m, n, k)
        if pieces_of(fastest) >= least_pieces(found.covers):
            assert (found.instance, found.cut) == (fastest.instance, fastest.cut)
        else:
            changed += 1
            assert found.estimate.total < 1.05 * fastest.estimate.total
    assert changed > 0
    square = plan(512, 512, 1024)
    assert (least_pieces(square.problem), pieces_of(square)) == (8, 8)
    assert least_pieces(plan(768, 768, 1024).problem) == pytest.approx(264 / 36)
    # Below, and where the caller says how K is cut, it is as in ieee.
    for schedule, k in ((None, 1023), ("data_parallel", 1024), ("split_k:2", 1024)):
        found = plan(512, 512, k, schedule=schedule)
        plain = tilewave.plan(512, 512, k, device="H200", schedule=schedule)
        assert (found.instance, found.cut) == (plain.instance, plain.cut)
    tight = plan_fp16x3(square.problem, H200, PlanOptions(workspace_limit=0))
    assert tight.workspace_bytes == 0


def test_the_modes_own_plan_is_there_where_ieee_is_faster() -> None:
    problem = tilewave.plan(256, 256, 256, device="H200").problem
    assert plan_fp16x3(problem, H200).instance.family != fp16x3.FAMILY
    assert plan_in_mode(problem, H200).instance is fp16x3.SMALL
    large = tilewave.plan(4096, 4096, 4096, device="H200").problem
    assert plan_in_mode(large, H200) == plan_fp16x3(large, H200)
    with pytest.raises(UsageError, match="no plan of precision 'fp16x3': there is no product"):
        plan_in_mode(replace(problem, k=0, product=False), H200)


def test_tiles_that_come_in_no_pairs_run_alone() -> None:
    assert plan(8448, 128, 4096).instance is not fp16x3.PAIRS
    assert plan(4096, 4096, 4096, max_sms=1).instance is fp16x3.LARGE


def test_a_plan_says_what_max_sms_does_not_bound() -> None:
    found = plan(4096, 4096, 4096, max_sms=12)
    assert found.blocks == 12
    assert "packed before by as many blocks as that takes" in found.notes[-1]
    assert not any("as many blocks" in note for note in plan(4096, 4096, 4096).notes)


def test_the_workspace_holds_both_operands_packed_and_no_more_than_that_much_again() -> None:
    found = plan(4096, 2048, 1000)
    packed = 4 * 1024 * (4096 + 2048)
    assert packed < found.partial_bytes < 1.2 * packed
    assert found.ticket_bytes == 0
    kept = fp16x3.workspace_bytes(found.problem, kept_a=True, kept_b=True)
    assert kept < 1024


def test_all_of_the_output_is_computed_where_ieee_leaves_edges_to_other_launches() -> None:
    sizes = [(edge + 2048 * i, 2048 * i + 1, 2048 * i) for edge in (0, 1, 8) for i in (1, 2, 3)]
    with_edges = [each for each in sizes if tilewave.plan(*each, device="H200").edges]
    assert with_edges
    for m, n, k in with_edges:
        found = plan(m, n, k)
        assert found.instance.family == fp16x3.FAMILY
        assert (found.problem.m, found.problem.n, found.problem.k) == (m, n, k)
        assert found.covers == found.problem
        assert found.raster.tiles_m * found.instance.bm >= m
        assert found.raster.tiles_n * found.instance.bn >= n


def test_other_gpus_are_refused() -> None:
    others = [name for name in spec_names() if get_spec(name).compute_capability != COMPUTE_CAPABILITY]
    assert "A100" in others
    for name in others:
        with pytest.raises(UsageError, match=rf"needs a GPU of compute capability 9\.0.*{name}.*'ieee'"):
            plan(4096, 4096, 4096, device=name)


def test_what_the_mode_does_not_offer_says_so() -> None:
    with pytest.raises(UsageError, match=r"K is 16777216; accepted by precision 'fp16x3' is less than 2\^24"):
        plan(1, 1, 1 << 24)
    assert "tiles are not cut" in plan(4096, 4096, 4096, schedule="split_k:2").notes[-1]
    assert plan(4096, 4096, 4096, schedule="data_parallel").instance is fp16x3.PAIRS
    assert plan(0, 8, 8).blocks == 0
    assert plan(8, 8, 0).problem.precision == "ieee"


def test_shared_memory_of_the_main_kernels_fits_an_sm() -> None:
    problem = tilewave.plan(4096, 4096, 4096, device="H200").problem
    for instance in fp16x3.MAIN_INSTANCES:
        assert instance.shared_bytes <= H200.shared_per_block
        assert plan_on(problem, instance, H200, 7).blocks == 7 // fp16x3.cluster_of(
            instance
        ) * fp16x3.cluster_of(instance)


def test_a_plan_explains_itself() -> None:
    text = tilewave.explain(plan(4096, 4096, 4096))
    assert "fp16" in text
    assert "not been measured" in text


def test_only_a_limit_of_the_callers_bounds_the_packed_operands() -> None:
    problem = plan(8192, 8192, 8192).problem
    needed = plan(8192, 8192, 8192).workspace_bytes
    assert needed > WORKSPACE_LIMIT_BYTES
    assert plan(8192, 8192, 8192).instance is fp16x3.PAIRS
    for limit, family in ((needed, fp16x3.FAMILY), (needed - 1, "large_tile")):
        found = plan_fp16x3(problem, H200, PlanOptions(workspace_limit=limit))
        assert found.instance.family == family
    assert "bytes of workspace are needed" in found.notes[-1]
