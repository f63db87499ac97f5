"""Tiny products by the million: all that a tile needs of the operands is in shared memory at once."""

from __future__ import annotations

from tilewave.kernels.instances import Instance
from tilewave.problem import GemmProblem

name = "tiny"


def _run_floats(count: int) -> int:
    """Elements of the region for a run of ``count`` elements: ``flat_floats`` of `flat.cuh`."""
    return (count + 10) // 4 * 4


def _instance(bm: int, bn: int, bk: int, tm: int, tn: int, items: int, reason: str) -> Instance:
    operands = _run_floats(items * bm * bk) + _run_floats(items * bk * bn)
    return Instance(
        name=f"tiny_{bm}x{bn}x{bk}" + (f"_{items}items" if items > 1 else ""),
        family=name,
        header="kernels/tiny.cuh",
        entry=f"tilewave::tiny<{bm}, {bn}, {bk}, {tm}, {tn}, {items}>",
        bm=bm,
        bn=bn,
        bk=bk,
        tm=tm,
        tn=tn,
        threads=items * (bm // tm) * (bn // tn),
        shared_bytes=4 * max(operands, _run_floats(items * bm * bn)),
        a=None,
        b=None,
        reason=reason,
        items=items,
        cuttable=False,
    )


_ITEM_RUNS = (
    _instance(4, 4, 4, 2, 2, 64, "batches up to 4 x 4 x 4: rotations, small blocks"),
    _instance(8, 8, 8, 4, 2, 32, "batches up to 8 x 8 x 8"),
    _instance(16, 16, 16, 4, 4, 16, "batches up to 16 x 16 x 16"),
    _instance(32, 32, 32, 4, 4, 4, "batches up to 32 x 32 x 32: the blocks of sparse matrices"),
    _instance(64, 64, 64, 8, 8, 1, "batches up to 64 x 64 x 64"),
)
_INSTANCES = _ITEM_RUNS


def instances() -> tuple[Instance, ...]:
    """Every instance of the family."""
    return _INSTANCES


def _holds(instance: Instance, problem: GemmProblem) -> bool:
    return problem.m <= instance.bm and problem.n <= instance.bn and problem.k <= instance.bk


def matching(problem: GemmProblem) -> tuple[Instance, ...]:
    """The two smallest instances that hold an item of a batch."""
    if not problem.product or problem.batches < 2:
        return ()
    return tuple(instance for instance in _ITEM_RUNS if _holds(instance, problem))[:2]


def refuses(instance: Instance, problem: GemmProblem) -> str | None:
    """Why the instance cannot compute the problem, or None."""
    if not problem.product:
        return "there is no product to compute"
    if problem.k > instance.bk:
        return f"it holds K up to {instance.bk} at once, and K is {problem.k}"
    return None
