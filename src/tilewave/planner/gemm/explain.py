"""A plan in prose: the choice, what binds it, what the user could change, and what was turned down."""

from __future__ import annotations

from collections.abc import Iterator

from tilewave.kernels.instances import Contiguous
from tilewave.planner.gemm.options import PlanOptions
from tilewave.planner.gemm.records import GemmPlan
from tilewave.planner.gemm.select import Considered
from tilewave.problem import MatrixLayout

_WORTH_SAYING = 1.02
"""Assumed: a change that gains less than this is not worth suggesting."""


def explain_plan(plan: GemmPlan) -> str:
    """Why a plan is what it is, for a person."""
    if plan.blocks == 0:
        return f"{plan.problem} on {plan.device}: out has no elements, so nothing is launched."
    parts = [
        " ".join(_choice(plan)),
        " ".join(_prediction(plan)),
        " ".join(_reading(plan)),
    ]
    if changes := list(_changes(plan)):
        parts.append("What could be changed:\n" + "\n".join(f"- {change}" for change in changes))
    if plan.notes:
        parts.append("Notes:\n" + "\n".join(f"- {note}" for note in plan.notes))
    rejected = plan.rejected
    if rejected:
        lines = "\n".join(f"- {candidate}" for candidate in rejected)
        parts.append(f"Turned down, {len(rejected)}:\n{lines}")
    else:
        parts.append("Nothing else was weighed.")
    return "\n\n".join(part for part in parts if part)


def _choice(plan: GemmPlan) -> Iterator[str]:
    instance, cut, raster = plan.instance, plan.cut, plan.raster
    yield f"{plan.problem} on {plan.device}: kernel {instance}, {plan.schedule}."
    yield f"The kernel is there for {instance.reason}."
    groups = cut.tiles // max(1, raster.tiles_m * raster.tiles_n)
    batch = f" x {groups:,}" if groups > 1 else ""
    patch = f"{instance.bm} x {instance.bn}" + (f" in {instance.items} items" if instance.items > 1 else "")
    yield (
        f"{raster.tiles_m:,} x {raster.tiles_n:,}{batch} tiles of {patch} cover the output; "
        f"{cut.blocks:,} blocks of {instance.threads} threads deal with them, {plan.blocks_per_sm} at once "
        f"on each of {plan.sms} SMs: {plan.waves:,} {'wave' if plan.waves == 1 else 'waves'}."
    )
    if not cut.walkers and cut.pieces > 1:
        yield (
            f"{cut.cut_tiles:,} tiles are cut along K into {cut.pieces} pieces, whose sums meet in a "
            f"workspace of {plan.workspace_bytes:,} bytes and are added in order."
        )
    elif plan.workspace_bytes:
        yield f"Sums of tiles that two blocks share meet in a workspace of {plan.workspace_bytes:,} bytes."


_LIMITS = {
    "compute": "arithmetic on the busiest SM binds",
    "memory": "moving the operands and the output binds",
    "combining": "combining the partial sums binds",
    "launch": "the launch itself binds: the product is too small to fill it",
}


def _prediction(plan: GemmPlan) -> Iterator[str]:
    estimate = plan.estimate
    yield f"Predicted {estimate.total:.4g} us: {_LIMITS[estimate.limit]}."
    yield (
        f"Of the parts, compute takes {estimate.compute:.4g}, memory {estimate.memory:.4g} (the "
        "longer of the two counts, and a share of the shorter), "
        f"combining {estimate.combining:.4g} and the launch {estimate.launch:.4g} us."
    )
    if plan.problem.multiply_adds:
        useful = plan.problem.multiply_adds / _padded(plan)
        yield f"{useful:.0%} of the tiles' multiply-adds are the product's own."
    considered = plan.considered
    if isinstance(considered, Considered):
        costs = considered.planner.costs
        source = (
            f"calibrated: {costs.calibration}" if costs.calibration else "theory, not calibrated for this GPU"
        )
        measured = "measured" if plan.instance.name in costs.factors else "not measured"
        yield f"Constants: {source}; this kernel's factor is {measured}."


def _padded(plan: GemmPlan) -> int:
    """Multiply-adds of all tiles, padding included."""
    instance = plan.instance
    deep = -(-plan.problem.k // instance.bk) * instance.bk if instance.cuttable else plan.problem.k
    return plan.cut.tiles * instance.bm * instance.bn * instance.items * deep


def _reading(plan: GemmPlan) -> Iterator[str]:
    """How the operands are read."""
    instance, problem = plan.instance, plan.problem
    if not problem.product:
        yield "There is no product to compute (alpha or k is 0), so A and B are not read."
        return
    for name, access in (("A", instance.a), ("B", instance.b)):
        if access is None:
            yield f"{name} is read in whatever layout it has."
        else:
            axis = "K" if access.contiguous is Contiguous.K else "M" if name == "A" else "N"
            yield f"{name} is read {access.width} bytes at a time along {axis}."


def _changes(plan: GemmPlan) -> Iterator[str]:
    """What the user could change, and what it would bring."""
    problem, instance = plan.problem, plan.instance
    if problem.product:
        for name, access, layout, along in (
            ("A", instance.a, problem.a, "row" if problem.a.column == 1 else "column"),
            ("B", instance.b, problem.b, "row" if problem.b.column == 1 else "column"),
        ):
            if access is not None and access.width < 16:
                yield from _alignment(name, layout, access.width, along)
    yield from _padding(plan)
    considered = plan.considered
    if isinstance(considered, Considered):
        yield from _options(plan, considered)


def _alignment(name: str, layout: MatrixLayout, width: int, along: str) -> Iterator[str]:
    """Why an operand is not read 16 bytes at a time."""
    if 1 not in (layout.row, layout.column):
        yield (
            f"{name}'s elements are {_apart(layout)} elements apart in both directions, so loads are {width} "
            "bytes; a copy with neighbours side by side would allow 16."
        )
        return
    leading = layout.row if layout.column == 1 else layout.column
    if leading % 4:
        offset = "odd" if leading % 2 else "uneven"
        yield (
            f"{name}'s {along}s start at {offset} offsets (a leading dimension of {leading}), so loads are "
            f"{width} bytes; a leading dimension that is a multiple of 4 would allow 16."
        )
    if layout.alignment < 16:
        yield (
            f"{name} begins at an address that is a multiple of {layout.alignment} bytes only, so loads are "
            f"{width} bytes; beginning at a multiple of 16 would allow 16."
        )
    if odd := [stride for stride in layout.batch if stride % 4]:
        yield (
            f"{name}'s batch items are {odd[0]} elements apart, so loads are {width} bytes; a distance "
            "that is a multiple of 4 would allow 16."
        )


def _apart(layout: MatrixLayout) -> str:
    return f"{abs(layout.row)} and {abs(layout.column)}"


def _padding(plan: GemmPlan) -> Iterator[str]:
    """Sizes just past a multiple of the tile."""
    problem, instance, raster = plan.problem, plan.instance, plan.raster
    if not problem.product or plan.estimate.limit != "compute":
        return
    for name, size, tile, count in (
        ("M", problem.m, instance.bm, raster.tiles_m),
        ("N", problem.n, instance.bn, raster.tiles_n),
    ):
        over = size % tile
        if count > 1 and 0 < over <= tile // 8:
            yield (
                f"{name} = {size} is {over} past {count - 1} tiles of {tile}, so the last tiles do "
                f"{over / tile:.0%} of what they could; {name} = {size - over} would need {count - 1}, not "
                f"{count}."
            )


def _options(plan: GemmPlan, considered: Considered) -> Iterator[str]:
    """What the options cost, against the planner's free choice."""
    options = considered.options
    free = PlanOptions()
    if options == free:
        return
    other = considered.planner.plan(plan.problem, free)
    if plan.estimate.total > _WORTH_SAYING * other.estimate.total:
        yield (
            f"Without {_constraints(options)} the choice would be {other.instance} {other.schedule}, "
            f"predicted {other.estimate.total:.4g} us instead of {plan.estimate.total:.4g}."
        )


def _constraints(options: PlanOptions) -> str:
    asked = []
    if options.schedule is not None:
        asked.append(f"schedule {options.schedule}")
    if options.batch_invariant:
        asked.append("batch_invariant")
    if options.max_sms is not None:
        asked.append(f"max_sms {options.max_sms}")
    if options.workspace_limit != PlanOptions().workspace_limit:
        asked.append(f"the workspace limit of {options.workspace_limit:,} bytes")
    return " and ".join(asked) or "these options"
