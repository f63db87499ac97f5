"""Tiny products by the million, and tall ones of few columns: a tile's operands in shared memory at once."""

from __future__ import annotations

from tilewave.kernels.instances import Instance
from tilewave.problem import GemmProblem

name = "tiny"

MOST_ITEM = 64
"""The most rows, columns and depth of an item of a batch."""


def _run_floats(count: int) -> int:
    """Elements that hold a run of ``count`` which begins anywhere in a sector of 8."""
    return count + 7


def _part_floats(lines: int, depth: int) -> int:
    """Elements that hold lines of K in any form, as `part_floats` of `staging.cuh` has them."""
    return lines * (depth if depth == 4 else depth + 4) + 8


def _instance(bm: int, bn: int, bk: int, tm: int, tn: int, items: int, reason: str) -> Instance:
    parts = _part_floats(items * bm, bk) + _part_floats(items * bn, bk)
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
        shared_bytes=4 * max(parts, _run_floats(items * bm * bn)),
        a=None,
        b=None,
        reason=reason,
        items=items,
        cuttable=False,
    )


_ITEM_RUNS = (
    _instance(4, 4, 4, 4, 4, 128, "batches up to 4 x 4 x 4: rotations, small blocks"),
    _instance(1, 32, 8, 1, 4, 16, "batches of vectors up to 8 long times matrices"),
    _instance(8, 8, 8, 4, 4, 32, "batches up to 8 x 8 x 8"),
    _instance(16, 16, 16, 4, 4, 8, "batches up to 16 x 16 x 16"),
    _instance(24, 24, 24, 3, 8, 5, "batches up to 24 x 24 x 24: the blocks of sparse matrices"),
    _instance(32, 32, 32, 4, 4, 2, "batches up to 32 x 32 x 32"),
    _instance(64, 64, 64, 8, 4, 1, "batches up to 64 x 64 x 64"),
)
_PANELS = (
    _instance(2048, 4, 4, 8, 4, 1, "tall matrices times one up to 4 x 4: points turned by a rotation"),
    _instance(128, 16, 4, 4, 4, 1, "tall matrices times one up to 4 x 16: outer products"),
    _instance(256, 16, 16, 4, 4, 1, "tall matrices times one up to 16 x 16"),
    _instance(64, 64, 32, 4, 4, 1, "tall matrices times one up to 32 x 64: small layers of a network"),
    _instance(128, 64, 32, 8, 4, 1, "the same, where C has many of these tiles"),
)
_INSTANCES = _ITEM_RUNS + _PANELS


def instances() -> tuple[Instance, ...]:
    """Every instance of the family."""
    return _INSTANCES


def matching(problem: GemmProblem) -> tuple[Instance, ...]:
    """The two smallest instances that hold an item of a batch; the first two panels for tall matrices."""
    if not problem.product:
        return ()
    if problem.m > MOST_ITEM:
        wide_enough = (i for i in _PANELS if problem.n <= i.bn and problem.k <= i.bk)
        return tuple(wide_enough)[:2]
    if problem.batches < 2:
        return ()
    return tuple(i for i in _ITEM_RUNS if problem.m <= i.bm and problem.n <= i.bn and problem.k <= i.bk)[:2]


def refuses(instance: Instance, problem: GemmProblem) -> str | None:
    """Why the instance cannot compute the problem, or None."""
    if not problem.product:
        return "there is no product to compute"
    if problem.k > instance.bk:
        return f"it holds K up to {instance.bk} at once, and K is {problem.k}"
    return None
