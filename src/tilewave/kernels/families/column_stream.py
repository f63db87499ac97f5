"""A few rows, or columns, of C where the long operand's other axis is contiguous: a thread owns columns."""

from __future__ import annotations

from itertools import product

from tilewave.kernels.families import streams
from tilewave.kernels.families.streams import Stream
from tilewave.kernels.instances import Access, Contiguous, Instance
from tilewave.problem import GemmProblem

name = "column_stream"

LEAST_K = 32
"""Below, most of a block's groups would have nothing to do."""

_THREADS = 256
_AHEAD = 10  # k of a thread's ring, COLUMN_AHEAD of the template
# Neighbouring threads along the long axis, by width in bytes: two threads that read 16 bytes suit N of 8.
_LANES = {16: (2, 8, 32), 4: (8, 32)}
_FEW = {(16, 32): (1, 4, 8, 16), (16, 8): (4, 8, 16), (16, 2): (4,), (4, 32): (4, 16), (4, 8): (4,)}


def _shared_bytes(few: int, lanes: int, each: int) -> int:
    """Shared memory of a block: a ring and two slabs of K, later outputs and warps' sums in their place."""
    groups, pitch, turns = _THREADS // lanes, few if few <= 4 else few + 4, 32
    while turns > 4 and turns * groups * pitch > 2560:
        turns //= 2
    walking = _AHEAD * _THREADS * each + 2 * turns * groups * pitch
    many = lanes * each
    summing = few * many + max(_THREADS // 32 * min(few, 4) * many, 4 * _THREADS)
    return 4 * max(walking, summing)


def _stream(few: int, lanes: int, width: int, mirrored: bool) -> Stream:
    each = width // 4
    many = lanes * each
    groups = _THREADS // lanes
    tile, thread = (few, many), (few, each)
    if mirrored:
        tile, thread = (many, few), (each, few)
    a, b = streams.accesses(None, Access(Contiguous.OTHER, width), mirrored)
    instance = Instance(
        name=f"column_stream_{tile[0]}x{tile[1]}_{width}b" + ("_mirrored" if mirrored else ""),
        family=name,
        header="kernels/column_stream.cuh",
        entry=f"tilewave::column_stream<{few}, {lanes}, {each}, {str(mirrored).lower()}>",
        bm=tile[0],
        bn=tile[1],
        bk=4 * groups,
        tm=thread[0],
        tn=thread[1],
        threads=_THREADS,
        shared_bytes=_shared_bytes(few, lanes, each),
        a=a,
        b=b,
        reason=f"{streams.at_most(few, mirrored)}; long side in steps of {many}, by {width} bytes",
        k_groups=groups,
        sequential=False,
        alone=streams.added_alone(few * many, _THREADS),
    )
    return Stream(instance, few, many, width, mirrored)


#: Every instance with what it takes.
STREAMS = tuple(
    _stream(few, lanes, width, mirrored)
    for mirrored, width in product((False, True), (16, 4))
    for lanes in _LANES[width]
    for few in _FEW[width, lanes]
)


def instances() -> tuple[Instance, ...]:
    """Every instance of the family."""
    return tuple(stream.instance for stream in STREAMS)


refuses = streams.refuses


def _fitting(problem: GemmProblem, mirrored: bool) -> tuple[Instance, ...]:
    few = streams.few_of(problem, mirrored)
    if few > streams.MOST_FEW:
        return ()
    layout = streams.long_operand(problem, mirrored)
    # Element by element, threads along the lines are worth it where those are the nearer axis.
    if layout.row != 1 and (layout.column in (0, 1) or abs(layout.row) > abs(layout.column)):
        return ()
    for width in (16, 4):
        found = []
        for lanes in _LANES[width]:
            beside = (
                s for s in STREAMS if (s.mirrored, s.width, s.many) == (mirrored, width, lanes * width // 4)
            )
            stream = streams.smallest(beside, few)
            if stream is not None and refuses(stream.instance, problem) is None:
                found.append(stream)
        if found:
            many = problem.m if mirrored else problem.n
            holding = [stream for stream in found if stream.many >= many]
            shorter = [stream for stream in found if stream.many < many]
            # The shortest that holds the long side whole, and the next shorter, which wastes less at its end.
            return tuple(stream.instance for stream in shorter[-1:] + holding[:1])
    return ()


def matching(problem: GemmProblem) -> tuple[Instance, ...]:
    """For few rows, few columns or both: the instances of the smallest number that holds them."""
    if not problem.product or problem.k < LEAST_K:
        return ()
    return _fitting(problem, False) + _fitting(problem, True)
