"""The product's planner: legal kernels and schedules, the estimate, the choice, and its account of itself."""

from tilewave.planner.gemm.explain import explain_plan
from tilewave.planner.gemm.options import WORKSPACE_LIMIT_BYTES, PlanOptions
from tilewave.planner.gemm.records import GemmCandidate, GemmEstimate, GemmPlan
from tilewave.planner.gemm.select import GemmPlanner, plan_gemm

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
