"""Products of little depth: much of C from a K of a few, bound by writing it."""

from __future__ import annotations

from tilewave.kernels.instances import Instance
from tilewave.problem import GemmProblem

name = "small_k"

MOST_K = 16
"""The largest K that the family takes."""

_THREADS = 256


def _instance(bm: int, lanes: int, depth: int, reason: str) -> Instance:
    return Instance(
        name=f"small_k_{bm}x{4 * lanes}x{depth}",
        family=name,
        header="kernels/small_k.cuh",
        entry=f"tilewave::small_k<{bm}, {lanes}, {depth}>",
        bm=bm,
        bn=4 * lanes,
        bk=depth,
        tm=4,
        tn=4,
        threads=_THREADS,
        shared_bytes=0,
        a=None,
        b=None,
        reason=reason,
        cuttable=False,
    )


_TALL = tuple(_instance(128, 32, depth, f"K up to {depth}, much of C") for depth in (4, 8, 16))
_LOW = tuple(
    _instance(32, 32, depth, f"K up to {depth}, C of fewer tiles than a GPU has SMs") for depth in (8, 16)
)
_WIDE = tuple(_instance(16, 64, depth, f"K up to {depth}, few rows, long ones") for depth in (4, 16))


def instances() -> tuple[Instance, ...]:
    """Every instance of the family."""
    return _TALL + _LOW + _WIDE


def matching(problem: GemmProblem) -> tuple[Instance, ...]:
    """The least depth that holds K: the wide tile for few rows, else a taller and a lower one."""
    if not problem.product or problem.k > MOST_K:
        return ()
    groups = (_WIDE,) if problem.m <= 16 else (_TALL, _LOW)
    return tuple(next(instance for instance in group if instance.bk >= problem.k) for group in groups)


def refuses(instance: Instance, problem: GemmProblem) -> str | None:
    """Why the instance cannot compute the problem, or None."""
    if not problem.product:
        return "there is no product to compute"
    if problem.k > instance.bk:
        return f"it holds K up to {instance.bk}, and K is {problem.k}"
    return None
