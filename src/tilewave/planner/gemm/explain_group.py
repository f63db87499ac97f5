"""The plan of a group in prose: the tile, what binds it, and what was turned down."""

from __future__ import annotations

from tilewave.device import get_spec
from tilewave.errors import UsageError
from tilewave.planner.gemm.group import Distinct, GroupPlan
from tilewave.planner.gemm.select import plan_gemm

_MOST_APART = 64
"""Differing products of which single plans are made for comparison; each takes up to half a millisecond."""


def explain_group(plan: GroupPlan) -> str:
    """Why the plan of a group is what it is, for a person."""
    if plan.blocks == 0:
        return str(plan)
    instance, estimate = plan.instance, plan.estimate
    cut = sum(pieces > 1 for pieces in plan.pieces)
    kinds = f"tiles of {instance.bm} x {instance.bn}" + (", and pieces of those that are cut" if cut else "")
    parts = [
        f"{len(plan.problems):,} products on {plan.device}: kernel {instance}, in one launch. The kernel is "
        f"there for {instance.reason}. {plan.table.items:,} work items ({kinds}) are dealt to "
        f"{plan.blocks:,} blocks of {instance.threads} threads, {plan.blocks_per_sm} at once on each of "
        f"{plan.sms} SMs, the longest first.",
        f"Predicted {estimate.total:.4g} us, bound by {estimate.limit}: compute {estimate.compute:.4g}, "
        f"memory {estimate.memory:.4g} (the longer of the two counts, and a share of the shorter), combining "
        f"{estimate.combining:.4g}, launches {estimate.launch:.4g} us.",
    ]
    if cut:
        parts.append(
            f"{cut:,} of them are cut along K, because their chains of slices would outlast all other work; "
            f"partial sums meet in {plan.partial_bytes + plan.ticket_bytes:,} bytes of workspace and are "
            "added in order. batch_invariant=True forbids it."
        )
    else:
        parts.append("No tile is cut along K: every product has the bits of gemm with batch_invariant=True.")
    if (apart := _one_by_one(plan)) is not None and apart < estimate.total:
        parts.append(
            f"One by one, as gemm computes them, they are predicted to take {apart:.4g} us: products that "
            "fill the GPU by themselves have better tiles there."
        )
    if plan.notes:
        parts.append("Notes:\n" + "\n".join(f"- {note}" for note in plan.notes))
    if plan.rejected:
        lines = "\n".join(f"- {candidate}" for candidate in plan.rejected)
        parts.append(f"Turned down, {len(plan.rejected)}:\n{lines}")
    return "\n\n".join(parts)


def _one_by_one(plan: GroupPlan) -> float | None:
    """Microseconds that plans of single products predict; None where there are too many to ask."""
    group = Distinct.of(plan.problems)
    try:
        spec = get_spec(plan.device)
    except UsageError:  # a GPU that only its driver knows
        return None
    if len(group.problems) > _MOST_APART:
        return None
    return sum(
        count * plan_gemm(problem, spec).estimate.total
        for problem, count in zip(group.problems, group.counts, strict=True)
    )
