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


def explain_plan(plan: GemmPlan, loop: str | None = None) -> str:
    """Why a plan is what it is, for a person; ``loop``: whose steady loop the kernel runs, in words."""
    if plan.blocks == 0:
        return f"{plan.problem} on {plan.device}: out has no elements, so nothing is launched."
    parts = [
        " ".join(_choice(plan)),
        " ".join(_prediction(plan) if plan.mode_workspace is None else _mode_prediction(plan)),
        " ".join(_reading(plan)),
    ]
    if loop is not None:
        parts.append(f"The kernel's steady loop is {loop}.")
    if changes := list(_changes(plan)):
        parts.append("What could be changed:\n" + "\n".join(f"- {change}" for change in changes))
    if plan.notes:
        parts.append("Notes:\n" + "\n".join(f"- {note}" for note in plan.notes))
    rejected = plan.rejected
    if rejected:
        lines = "\n".join(f"- {candidate}" for candidate in rejected)
        parts.append(f"Turned down{_alone(plan)}, {len(rejected)}:\n{lines}")
    else:
        parts.append("Nothing else was weighed.")
    return "\n\n".join(part for part in parts if part)


def _alone(plan: GemmPlan) -> str:
    """What candidates were weighed for where that is a part of the product, else nothing."""
    if not plan.edges:
        return ""
    chosen = plan.estimate.total - sum(edge.plan.estimate.total for edge in plan.edges)
    return f" for {plan.problem} alone, for which the choice is predicted to take {chosen:.4g} us"


def _choice(plan: GemmPlan) -> Iterator[str]:
    instance, cut, raster = plan.instance, plan.cut, plan.raster
    yield f"{plan.covers} on {plan.device}: kernel {instance}, {plan.schedule}."
    yield f"The kernel is there for {instance.reason}."
    groups = cut.tiles // max(1, raster.tiles_m * raster.tiles_n)
    batch = f" x {groups:,}" if groups > 1 else ""
    patch = f"{instance.bm} x {instance.bn}" + (f" in {instance.items} items" if instance.items > 1 else "")
    output = f"{plan.problem.m:,} x {plan.problem.n:,} of the output" if plan.edges else "the output"
    yield (
        f"{raster.tiles_m:,} x {raster.tiles_n:,}{batch} tiles of {patch} cover {output}; "
        f"{cut.blocks:,} blocks of {instance.threads} threads deal with them, {plan.blocks_per_sm} at once "
        f"on each of {plan.sms} SMs: {plan.waves:,} {'wave' if plan.waves == 1 else 'waves'}."
    )
    own = plan.partial_bytes + plan.ticket_bytes
    if not cut.walkers and cut.pieces > 1:
        yield (
            f"{cut.cut_tiles:,} tiles are cut along K into {cut.pieces} pieces, whose sums meet in a "
            f"workspace of {own:,} bytes and are added in order."
        )
    elif plan.mode_workspace is not None:
        yield f"Operands are packed into a workspace of {plan.workspace_bytes:,} bytes first."
    elif own:
        yield f"Sums of tiles that two blocks share meet in a workspace of {own:,} bytes."


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


def _mode_prediction(plan: GemmPlan) -> Iterator[str]:
    """The prediction of a mode whose parts follow one another."""
    estimate = plan.estimate
    yield f"Predicted {estimate.total:.4g} us: {_LIMITS[estimate.limit]}."
    yield (
        f"Of the parts, which add up, products take {estimate.compute:.4g}, packing the operands and storing "
        f"the result {estimate.memory:.4g} and the launches {estimate.launch:.4g} us."
    )


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
        rows, depth, columns = ("M", problem.m), ("K", problem.k), ("N", problem.n)
        for name, access, layout, extents in (
            ("A", instance.a, problem.a, (rows, depth)),
            ("B", instance.b, problem.b, (depth, columns)),
        ):
            if access is not None and access.width < 16:
                yield from _narrow(name, layout, access.width, *extents, problem.batch)
    yield from _padding(plan)
    considered = plan.considered
    if isinstance(considered, Considered):
        yield from _options(plan, considered)


def _narrow(
    name: str,
    layout: MatrixLayout,
    width: int,
    down: tuple[str, int],
    across: tuple[str, int],
    batch: tuple[int, ...],
) -> Iterator[str]:
    """Why an operand is not read 16 bytes at a time; nothing where only the other one's layout forbids it."""
    so = f"so loads are {width} bytes"
    if layout.column == 1 and across[1] > 1:
        line, leading, (axis, length), lines = "row", layout.row, across, down[1]
    elif layout.row == 1 and down[1] > 1:
        line, leading, (axis, length), lines = "column", layout.column, down, across[1]
    elif (layout.column == -1 and across[1] > 1) or (layout.row == -1 and down[1] > 1):
        line = "rows" if layout.column == -1 and across[1] > 1 else "columns"
        yield (
            f"{name}'s {line} run backwards (a step of -1), {so}; a copy that runs forwards would allow 16; "
            "in the other direction steps may be negative."
        )
        return
    else:
        yield (
            f"{name}'s elements are {abs(layout.row)} and {abs(layout.column)} elements apart in its two "
            f"directions, {so}; a copy with neighbours side by side would allow 16."
        )
        return
    if lines > 1 and leading % 4:
        offset = "odd" if leading % 2 else "uneven"
        yield (
            f"{name}'s {line}s start at {offset} offsets (a leading dimension of {leading}), {so}; a leading "
            "dimension that is a multiple of 4 would allow 16."
        )
    if length % 4:
        yield (
            f"{name}'s {line}s are {length} elements long, {so}; {axis} padded to a multiple of 4 would "
            "allow 16."
        )
    if layout.alignment < 16:
        yield (
            f"{name} begins at an address that is a multiple of {layout.alignment} bytes only, {so}; "
            "beginning at a multiple of 16 would allow 16."
        )
    apart = (stride for extent, stride in zip(batch, layout.batch, strict=True) if extent > 1 and stride % 4)
    if (stride := next(apart, None)) is not None:
        yield (
            f"{name}'s batch items are {stride} elements apart, {so}; a distance that is a multiple of 4 "
            "would allow 16."
        )


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
    other = considered.planner.plan(plan.covers, free)
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
