"""The plan of a group in prose: the tile, what binds it, and what was turned down."""

from __future__ import annotations

from tilewave.planner.gemm.group import GroupPlan


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
    if plan.notes:
        parts.append("Notes:\n" + "\n".join(f"- {note}" for note in plan.notes))
    if plan.rejected:
        lines = "\n".join(f"- {candidate}" for candidate in plan.rejected)
        parts.append(f"Turned down, {len(plan.rejected)}:\n{lines}")
    return "\n\n".join(parts)
