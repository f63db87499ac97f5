"""Products of differing sizes that are computed together: checked as a whole, then launched once.

Products share a launch where they lie on one GPU, go to one stream and have the same options. No order holds
among the products of a group: what one writes, no other may read or write, and that is checked beforehand.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from tilewave.arrays import ArrayView
from tilewave.call import GemmCall
from tilewave.errors import UsageError
from tilewave.host import gpu_for_host_operands
from tilewave.kernels.arguments import Pointers
from tilewave.kernels.group_table import Operands
from tilewave.normalise import Normalised
from tilewave.on_device import (
    COPY_ALPHA,
    allocate,
    copy_problem,
    given_pointers,
    keep_exchanged,
    normalised_problem,
    ordered,
    workspace_memory,
)
from tilewave.outputs import finished, written
from tilewave.planner.gemm.group import check_group_options
from tilewave.planner.gemm.options import PlanOptions
from tilewave.problem import GemmProblem, Precision
from tilewave.semantics import share_memory, span


class Member(NamedTuple):
    """A product of a group: its checked call, its options, and the caller's workspace memory if any."""

    call: GemmCall
    options: PlanOptions
    workspace: Any


class GroupExecutor(Protocol):
    """What runs a group on a GPU: `tilewave.runtime.group.run_group`, or a stand-in for tests."""

    def __call__(
        self,
        problems: Sequence[GemmProblem],
        operands: Sequence[Operands],
        *,
        device: int,
        stream: int,
        options: PlanOptions,
        workspace: tuple[int, int] | None = None,
    ) -> object:
        """Submit the problems to a stream of a device."""
        ...


def group_executor() -> GroupExecutor:
    """The executor of this process; its module is imported at the first group on a GPU."""
    from tilewave.runtime.group import run_group

    return run_group


def run_members(members: Sequence[Member], alone: Callable[[Member], Any]) -> list[Any]:
    """The results of a group whose products are known to be apart; ``alone`` computes one by itself."""
    results: list[Any] = [None] * len(members)
    for places in together(members):
        first = members[places[0]]
        calls = [members[place].call for place in places]
        if not _shares_launches(first):
            found = [alone(members[place]) for place in places]
        elif first.call.device is None:
            from tilewave.staged_group import run_staged_group  # of no use without a GPU

            gpu = gpu_for_host_operands()
            assert gpu is not None  # else no launch is shared
            found = run_staged_group(calls, gpu, first.options)
        else:
            found = run_group_on_device(calls, first.options, first.workspace)
        for place, result in zip(places, found, strict=True):
            results[place] = result
    return results


def check_member(member: Member) -> None:
    """Raise ``UsageError`` for options that a group cannot keep to, or that mean nothing where it runs."""
    check_group_options(member.options)
    if member.call.device is None and member.workspace is not None:
        raise UsageError("workspace is memory on a GPU, but the operands are on the host; accepted is None")


def together(members: Sequence[Member]) -> list[list[int]]:
    """Places of the products that share launches: one GPU, one stream, the same options and workspace."""
    groups: dict[Any, list[int]] = {}
    for place, member in enumerate(members):
        call = member.call
        where = (call.device, call.stream, member.options, id(member.workspace))
        key = where if _shares_launches(member) else place
        groups.setdefault(key, []).append(place)
    return list(groups.values())


def _shares_launches(member: Member) -> bool:
    call = member.call
    if call.precision is not Precision.IEEE and call.reads_product:
        return False  # modes have kernels of their own, which take one product
    return call.device is not None or (member.workspace is None and gpu_for_host_operands() is not None)


def run_group_on_device(calls: Sequence[GemmCall], options: PlanOptions, workspace: Any) -> list[Any]:
    """Compute calls whose operands lie on one GPU, in one launch; results in the libraries of their a."""
    memory = None
    for call in calls:
        memory = workspace_memory(call, workspace)
        if workspace is None:
            break
    targets = [
        call.out if call.out is not None and call.overlap is None else allocate(call) for call in calls
    ]
    befores = [allocate(call) if call.keep_preactivation else None for call in calls]
    others = tuple({stream for call in calls for stream in call.others})
    with ordered(calls[0]._replace(others=others)) if others else contextlib.nullcontext():
        submit_group(calls, targets, befores, options, memory)
        aside = [
            (call, target)
            for call, target in zip(calls, targets, strict=True)
            if call.out is not None and target is not call.out
        ]
        _submit(copies_from(aside), calls[0], PlanOptions(max_sms=options.max_sms), memory)
    for place, call in enumerate(calls):
        keep_exchanged(call, None if place else workspace)
    results = []
    for call, target, before in zip(calls, targets, befores, strict=True):
        result = written(call.out) if call.out is not None else finished(call.framework, target.owner)
        results.append(result if before is None else (result, finished(call.framework, before.owner)))
    return results


def submit_group(
    calls: Sequence[GemmCall],
    targets: Sequence[ArrayView],
    befores: Sequence[ArrayView | None],
    options: PlanOptions,
    workspace: tuple[int, int] | None = None,
) -> None:
    """Launch what calls on one GPU compute, into ``targets``."""
    _submit(_products(calls, targets, befores), calls[0], options, workspace)


def group_problems(
    calls: Sequence[GemmCall], targets: Sequence[ArrayView], befores: Sequence[ArrayView | None]
) -> tuple[list[GemmProblem], list[Operands]]:
    """The problems that a group comes to, with the operands of each; products without elements leave none."""
    problems, operands = [], []
    for problem, given in _products(calls, targets, befores):
        problems.append(problem)
        operands.append(given)
    return problems, operands


def _products(
    calls: Sequence[GemmCall], targets: Sequence[ArrayView], befores: Sequence[ArrayView | None]
) -> Iterator[tuple[GemmProblem, Operands]]:
    for call, target, before in zip(calls, targets, befores, strict=True):
        normalised = normalised_problem(call, target, before)
        if normalised is not None:
            # Without a product alpha has nothing to scale; 0 keeps its sign and its NaN out of the result.
            alpha = call.alpha if call.reads_product else 0.0
            yield from _launched(normalised, given_pointers(call, target, before), alpha, call.beta)


def copies_from(aside: Iterable[tuple[GemmCall, ArrayView]]) -> Iterator[tuple[GemmProblem, Operands]]:
    """From temporary memory to the out that shares memory with another operand of its own product."""
    for call, source in aside:
        if 0 not in call.product.result_shape:
            assert call.out is not None  # it is what shares memory
            copying = copy_problem(call.product, source, call.out)
            yield from _launched(copying, Pointers(0, 0, call.out.address, c=source.address), COPY_ALPHA, 1.0)


def _launched(
    normalised: Normalised, given: Pointers, alpha: float, beta: float
) -> Iterator[tuple[GemmProblem, Operands]]:
    for pointers in normalised.pointers(given):
        yield normalised.problem, Operands(pointers, alpha, beta)


def _submit(
    products: Iterable[tuple[GemmProblem, Operands]],
    call: GemmCall,
    options: PlanOptions,
    workspace: tuple[int, int] | None,
) -> None:
    assert call.device is not None  # operands are on a GPU
    pairs = list(products)
    if pairs:
        group_executor()(
            [problem for problem, _ in pairs],
            [operands for _, operands in pairs],
            device=call.device,
            stream=call.stream,
            options=options,
            workspace=workspace,
        )


class _Extent(NamedTuple):
    """The bytes from an operand's first to behind its last, and whose operand it is."""

    low: int
    high: int
    place: int
    name: str
    view: ArrayView


def check_apart(calls: Sequence[GemmCall]) -> None:
    """Raise ``UsageError`` where the out of one product shares memory with an operand of another.

    Operands that are only read may share memory. A product's own out may be its c, and what `gemm` does about
    other overlaps within one product it does here too.
    """
    by_device: dict[int | None, list[tuple[_Extent, bool]]] = {}
    for place, call in enumerate(calls):
        if 0 in call.product.result_shape:
            continue
        found = by_device.setdefault(call.device, [])
        for name in ("a", "b", "c", "bias", "out"):
            view: ArrayView | None = getattr(call, name)
            if view is None or (name in ("a", "b") and not call.reads_product):
                continue
            low, high = _bounds(view)
            if low < high:
                found.append((_Extent(low, high, place, name, view), name == "out"))
    for extents in by_device.values():
        if any(writes for _, writes in extents):
            _sweep(extents)


def _bounds(view: ArrayView) -> tuple[int, int]:
    if view.host is not None:
        low, high = np.lib.array_utils.byte_bounds(view.host)
        return (low, high) if view.host.size else (0, 0)
    first, last = span(view.layout)
    return view.address + first, view.address + last


def _sweep(extents: list[tuple[_Extent, bool]]) -> None:
    """Compare every out with what begins before it ends, from the lowest address up."""
    order = sorted(extents, key=lambda entry: (entry[0].low, entry[0].place, entry[0].name))
    outs: list[tuple[int, int, _Extent]] = []  # heaps by end
    read: list[tuple[int, int, _Extent]] = []
    seen: dict[Any, set[int]] = {}
    for number, (extent, writes) in enumerate(order):
        for heap in (outs, read):
            while heap and heap[0][0] <= extent.low:
                heapq.heappop(heap)
        for _, _, other in outs:
            _compare(other, extent)
        if writes:
            for _, _, other in read:
                _compare(extent, other)
            heapq.heappush(outs, (extent.high, number, extent))
            continue
        # An operand that many products share is kept for two of them: one of these is not the out's own.
        places = seen.setdefault((extent.view.address, extent.view.layout), set())
        if extent.place not in places and len(places) < 2:
            places.add(extent.place)
            heapq.heappush(read, (extent.high, number, extent))


def _compare(out: _Extent, other: _Extent) -> None:
    if out.place == other.place or not _share(out.view, other.view):
        return
    raise UsageError(
        f"problem {out.place}: out shares memory with {other.name} of problem {other.place}; a group's "
        "products are computed side by side, so accepted is an out that shares no memory with another "
        "problem's operands"
    )


def _share(one: ArrayView, other: ArrayView) -> bool:
    mine, its = _columns(one), _columns(other)
    if mine is not None and its is not None and mine[0] == its[0]:
        pitch, begin, width = mine
        apart = (its[1] - begin) % pitch
        if width <= apart and apart + its[2] <= pitch:
            return False  # side by side in every row
    if one.host is not None and other.host is not None:
        try:
            return np.shares_memory(one.host, other.host, max_work=10_000)  # type: ignore[arg-type]
        except np.exceptions.TooHardError:
            return True
    return share_memory(one.address, one.layout, other.address, other.layout)


def _columns(view: ArrayView) -> tuple[int, int, int] | None:
    """(pitch, first, width) of a matrix that covers ``width`` columns of rows ``pitch`` elements apart."""
    axes = sorted(
        (abs(stride), stride, extent)
        for extent, stride in zip(view.layout.shape, view.layout.strides, strict=True)
        if extent > 1
    )
    if len(axes) < 2 or axes[0][0] != 1 or axes[1][0] < axes[0][2] or view.address % 4:
        return None
    pitch = axes[1][0]
    if any(size % pitch for size, _, _ in axes[2:]):
        return None
    _, step, width = axes[0]
    first = view.address // 4 - (width - 1 if step < 0 else 0)
    return pitch, first % pitch, width
