"""Where the wide tiles are chosen, and where not: they are fast only with the register-file pass's loop."""

from __future__ import annotations

import pytest

import tilewave
from tilewave.device import get_spec
from tilewave.kernels.families import FAMILIES, large_tile
from tilewave.planner.gemm import GemmPlan, GemmPlanner, PlanOptions
from tilewave.problem import GemmProblem

WIDE = {one.name for one in large_tile.instances() if one.needs_new_loop}


def planned(planner: GemmPlanner, layouts: str, size: int) -> GemmPlan:
    return planner.plan(tilewave.plan(size, size, size, layouts=layouts, device="H200").covers)


def h200(*, new_loops: bool) -> GemmPlanner:
    return GemmPlanner(get_spec("H200"), FAMILIES, new_loops=new_loops)


@pytest.mark.parametrize("layouts", ["NN", "TN", "TT"])
def test_large_products_take_them(layouts: str) -> None:
    """An H200 had them fastest at 6144 and 8192; at 4096 too much of a tile lies beyond C."""
    chosen = {size: planned(h200(new_loops=True), layouts, size).instance.name for size in (4096, 6144, 8192)}
    assert chosen[6144] == chosen[8192]
    assert chosen[8192] in WIDE
    assert chosen[4096] not in WIDE


def test_there_is_none_for_two_operands_along_k() -> None:
    assert not any(one.name.endswith("_nt_16") for one in large_tile.instances() if one.needs_new_loop)


@pytest.mark.parametrize("layouts", ["NN", "TN", "TT"])
def test_never_without_the_pass(layouts: str) -> None:
    """Switched off, or on GPUs whose register file was not measured."""
    off = planned(h200(new_loops=False), layouts, 8192)
    assert off.instance.name not in WIDE
    said = {one.rejected for one in off.considered if one.instance.name in WIDE}
    assert said == {"it is fast only with the register-file pass's loop, which does not run here"}
    for device in ("A100", "GB10", "RTX 4090"):
        planner = GemmPlanner(get_spec(device), FAMILIES, new_loops=True)
        assert planned(planner, layouts, 8192).instance.name not in WIDE


def test_ruled_out() -> None:
    """A kernel that a GPU refused is not chosen any more, and the plans made before are forgotten."""
    planner = h200(new_loops=True)
    first = planned(planner, "NN", 8192)
    planner.rule_out(first.instance, "a reason")
    second = planned(planner, "NN", 8192)
    assert second.instance.name not in WIDE
    said = {one.rejected for one in second.considered if one.instance == first.instance}
    assert said == {"it is fast only with the register-file pass's loop: a reason"}
    assert planned(planner, "TN", 8192).instance.name in WIDE


def test_ruled_out_while_another_thread_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """That thread's plan, which was begun before, is not kept for those that ask later."""
    planner = h200(new_loops=True)
    afresh = planner.plan_afresh

    def slow(problem: GemmProblem, options: PlanOptions) -> GemmPlan:
        made = afresh(problem, options)
        planner.rule_out(made.instance, "another thread loaded it meanwhile")
        return made

    with monkeypatch.context() as begun_before:
        begun_before.setattr(planner, "plan_afresh", slow)
        assert planned(planner, "NN", 8192).instance.name in WIDE
    assert planned(planner, "NN", 8192).instance.name not in WIDE
