"""A few rows, or columns, of C where K is contiguous: dot products along K, lanes side by side."""

from __future__ import annotations

from tilewave.kernels.families import streams
from tilewave.kernels.families.streams import Stream
from tilewave.kernels.instances import Access, Contiguous, Instance
from tilewave.problem import GemmProblem

name = "dot_stream"

LEAST_K = 32
"""Below, most of a warp's lanes would have nothing to do."""

# Few, width: (lines of the long operand that a warp holds, warps beside each other, warps along K). The more
# rows, the more is to be gained by lines beside each other; 2 lines of 16 are what registers hold element by
# element.
_SHAPES = {
    (1, 16): (4, 2, 4),
    (4, 16): (4, 4, 2),
    (8, 16): (4, 4, 2),
    (16, 16): (4, 4, 2),
    (4, 4): (4, 4, 2),
    (8, 4): (4, 4, 2),
    (16, 4): (2, 4, 2),
}
_STEP = 128  # k of a warp at once


def _stream(few: int, width: int, mirrored: bool) -> Stream:
    lines, beside, along = _SHAPES[few, width]
    many = lines * beside
    a, b = streams.accesses(None, Access(Contiguous.K, width), mirrored)
    tile, thread = (few, many), (few, lines)
    if mirrored:
        tile, thread = (many, few), (lines, few)
    flags = ", ".join(str(flag).lower() for flag in (width == 16, mirrored))
    reason = f"{streams.at_most(few, mirrored)}, by {width} bytes along K"
    instance = Instance(
        name=f"dot_stream_{tile[0]}x{tile[1]}_{width}b" + ("_mirrored" if mirrored else ""),
        family=name,
        header="kernels/dot_stream.cuh",
        entry=f"tilewave::dot_stream<{few}, {lines}, {beside}, {along}, {flags}>",
        bm=tile[0],
        bn=tile[1],
        bk=_STEP * along,
        tm=thread[0],
        tn=thread[1],
        threads=32 * beside * along,
        shared_bytes=0,
        a=a,
        b=b,
        reason=reason + ("" if width == 16 else ": any stride and alignment"),
        k_groups=along,
        sequential=False,
        alone=streams.added_alone(few * many, 32 * beside * along),
    )
    return Stream(instance, few, many, width, mirrored)


#: Every instance with what it takes.
STREAMS = tuple(_stream(few, width, mirrored) for mirrored in (False, True) for few, width in _SHAPES)


def instances() -> tuple[Instance, ...]:
    """Every instance of the family."""
    return tuple(stream.instance for stream in STREAMS)


refuses = streams.refuses


def _fitting(problem: GemmProblem, mirrored: bool) -> Instance | None:
    few = streams.few_of(problem, mirrored)
    if few > streams.MOST_FEW:
        return None
    # Element by element, lanes along K are worth it where the long operand's K is its nearer axis.
    layout = streams.long_operand(problem, mirrored)
    if layout.column != 1 and (layout.row in (0, 1) or abs(layout.column) > abs(layout.row)):
        return None
    for width in (16, 4):
        fitting = (s for s in STREAMS if s.mirrored == mirrored and s.width == width)
        found = streams.smallest(fitting, few)
        if found is not None and refuses(found.instance, problem) is None:
            return found.instance
    return None


def matching(problem: GemmProblem) -> tuple[Instance, ...]:
    """For few rows, few columns or both: the instance of the smallest number that holds them."""
    if not problem.product or problem.k < LEAST_K:
        return ()
    found = (_fitting(problem, mirrored) for mirrored in (False, True))
    return tuple(instance for instance in found if instance is not None)
