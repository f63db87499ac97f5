"""Plans of groups without running them, for sizes and for arrays, and their account in prose."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

from tilewave.api import collect_members, listed
from tilewave.arrays import ArrayView
from tilewave.call import GemmCall
from tilewave.device import DeviceSpec
from tilewave.errors import UsageError
from tilewave.group import Member, copies_from, group_problems, together
from tilewave.messages import shown
from tilewave.normalise import normalise
from tilewave.planner.gemm.group import GroupPlan, plan_group, portions
from tilewave.planner.gemm.options import PlanOptions
from tilewave.planning import device_spec
from tilewave.problem import GemmProblem, MatrixLayout
from tilewave.semantics import check_addressable, contiguous


def plan_grouped(
    problems: Iterable[Any],
    *,
    device: str | int | DeviceSpec | None = None,
    **common: Any,
) -> tuple[GroupPlan, ...]:
    """The plans that `grouped_gemm` would follow, one for each launch of a computing kernel; nothing is run.

    Each of ``problems`` is what `grouped_gemm` takes, or three integers (m, n, k): a product of matrices that
    lie row by row on 16 bytes. ``common`` are arguments of `gemm` for all of them; for sizes ``schedule``,
    ``deterministic``, ``batch_invariant`` and ``max_sms``. ``device`` is as in `plan`. One plan is the rule:
    products part that go to different streams or have different options, and those whose table would not fit
    the workspace; where an out shares memory with its own operands, a second one copies.

    Raises as `grouped_gemm` does, and ``UsageError`` where no GPU is named or found.
    """
    given = list(listed(problems, "problems of a group"))
    if given and all(map(_is_sizes, given)):
        groups = [_of_sizes(given, common)]
    else:
        groups = _of_arrays(given, common)
    spec = device_spec(device)
    plans = []
    for found, options, notes in groups:
        for begin, end in portions(found, options.workspace_limit):
            plan = plan_group(found[begin:end], spec, options)
            plans.append(plan.noted(notes))
    return tuple(plans)


_Group = tuple[list[GemmProblem], PlanOptions, tuple[str, ...]]


def _is_sizes(problem: Any) -> bool:
    return isinstance(problem, Sequence) and len(problem) == 3 and isinstance(problem[0], Integral)


def _is_size(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, Integral) and int(value) >= 0


def _of_sizes(sizes: Sequence[Any], common: dict[str, Any]) -> _Group:
    known = ("schedule", "deterministic", "batch_invariant", "max_sms")
    for name in common:
        if name not in known:
            raise UsageError(f"sizes are planned with {', '.join(known)}; {name} needs arrays")
    problems = []
    for place, one in enumerate(sizes):
        if not all(_is_size(size) for size in one):
            raise UsageError(
                f"problem {place} is {shown(tuple(one))}; accepted are three integers of at least 0"
            )
        m, n, k = map(int, one)
        for name, rows, columns in (("a", m, k), ("b", k, n), ("the result", m, n)):
            check_addressable(f"problem {place}: {name}", (rows, columns))
        rows_of_k, rows_of_n = MatrixLayout(k, 1), MatrixLayout(n, 1)
        problem = GemmProblem(m, n, k, (), rows_of_k, rows_of_n, rows_of_n, product=k > 0)
        problems.append(normalise(problem).problem)
    return problems, PlanOptions(**common), ()


def _of_arrays(given: Sequence[Any], common: dict[str, Any]) -> list[_Group]:
    members, fronts = collect_members(given, common)
    if fronts:
        raise UsageError(
            f"problem {next(iter(fronts))} is PyTorch's to compute, by itself (it takes part in gradients, "
            "or is no plain memory); accepted are arrays that are nothing but memory"
        )
    members = [member for member in members if 0 not in member.call.product.result_shape]
    groups = []
    for places in together(members):
        groups += _groups_of([members[place] for place in places])
    return groups


def _groups_of(members: Sequence[Member]) -> list[_Group]:
    """What goes together: the products and, where there are any, the copies behind them."""
    calls = [member.call for member in members]
    notes = []
    if calls[0].device is None:
        from tilewave.staged import staged_bytes, staged_call

        notes.append(
            f"operands are on the host: up to {sum(map(staged_bytes, calls)):,} bytes are copied to the GPU "
            "through pinned memory, each operand once, and the results back"
        )
        calls = [staged_call(call, 0, 0, {}) for call in calls]
    options = members[0].options
    targets = [_target(call) for call in calls]
    befores = [_fresh(call) if call.keep_preactivation else None for call in calls]
    aside = [(call, target) for call, target in zip(calls, targets, strict=True) if target.owner is None]
    aside = [(call, target) for call, target in aside if call.out is not None]
    if not aside:
        return [(group_problems(calls, targets, befores)[0], options, tuple(notes))]
    notes.append(
        f"out of {len(aside):,} products shares memory with an operand of theirs: these results are made in "
        "temporary memory, and one more launch copies them"
    )
    copies = [problem for problem, _ in copies_from(aside)]
    return [
        (group_problems(calls, targets, befores)[0], options, tuple(notes)),
        (copies, PlanOptions(max_sms=options.max_sms), ("the copies from temporary memory to out",)),
    ]


def _target(call: GemmCall) -> ArrayView:
    return call.out if call.out is not None and call.overlap is None else _fresh(call)


def _fresh(call: GemmCall) -> ArrayView:
    return ArrayView(None, "", 0, contiguous(call.product.result_shape), call.device)
