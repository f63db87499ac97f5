"""What is left of a product when k or alpha is 0: out = activation(alpha * 0 + beta * c + bias)."""

from __future__ import annotations

from tilewave.kernels.instances import Instance
from tilewave.problem import GemmProblem

name = "elementwise"

_THREADS = 256


def _instance(bm: int, bn: int, items: int, reason: str) -> Instance:
    return Instance(
        name=f"elementwise_{bm}x{bn}" + (f"_{items}items" if items > 1 else ""),
        family=name,
        header="kernels/elementwise.cuh",
        entry=f"tilewave::elementwise<{bm}, {bn}, {items}, {_THREADS}>",
        bm=bm,
        bn=bn,
        bk=1,
        tm=1,
        tn=bm * bn * items // _THREADS,
        threads=_THREADS,
        shared_bytes=0,
        a=None,
        b=None,
        reason=reason,
        items=items,
        cuttable=False,
    )


_WIDE = _instance(1, 2048, 1, "few rows: long runs of a row")
_TALL = _instance(1024, 8, 1, "few columns: rows that lie behind each other are one run")
_PATCH = _instance(
    32, 64, 1, "matrices of any layout: a patch whose columns are as short as a c by columns wants"
)
_SMALL = _instance(8, 8, 32, "batches of matrices up to 8 x 8: several items a block")
_DOT = _instance(2, 2, 256, "batches of matrices up to 2 x 2: hundreds of items a block")
_INSTANCES = (_WIDE, _TALL, _PATCH, _SMALL, _DOT)


def instances() -> tuple[Instance, ...]:
    """Every instance of the family."""
    return _INSTANCES


def matching(problem: GemmProblem) -> tuple[Instance, ...]:
    """The one instance whose patch suits the shape; none where there is a product to compute."""
    if problem.product:
        return ()
    larger = max(problem.m, problem.n)
    if problem.batches > 1 and larger <= 8:
        return (_DOT,) if larger <= 2 else (_SMALL,)
    if problem.m < 8:
        return (_WIDE,)
    return (_TALL,) if problem.n < 8 else (_PATCH,)


def refuses(instance: Instance, problem: GemmProblem) -> str | None:
    """Why the instance cannot compute the problem, or None."""
    return "it computes no products, and k and alpha are not 0" if problem.product else None
