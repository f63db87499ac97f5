"""The product's planner: legal kernels and schedules, the estimate, the choice, and its account of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilewave.planner.gemm.options import WORKSPACE_LIMIT_BYTES, PlanOptions
from tilewave.planner.gemm.records import GemmCandidate, GemmEstimate, GemmPlan
from tilewave.planner.gemm.select import GemmPlanner, plan_gemm

if TYPE_CHECKING:
    from tilewave.planner.gemm.explain import explain_plan as explain_plan

__all__ = [
    "WORKSPACE_LIMIT_BYTES",
    "GemmCandidate",
    "GemmEstimate",
    "GemmPlan",
    "GemmPlanner",
    "PlanOptions",
    "explain_plan",
    "plan_gemm",
]


def __getattr__(name: str) -> Any:
    if name != "explain_plan":  # of no use to a product that is only computed
        raise AttributeError(f"module 'tilewave.planner.gemm' has no attribute {name!r}")
    from tilewave.planner.gemm.explain import explain_plan

    return explain_plan
