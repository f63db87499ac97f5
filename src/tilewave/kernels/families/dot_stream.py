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
# element. For more than 8 rows by vectors there is none: another kernel was faster, by 5% to 2.7 times, at
# each of nine products of an H200's calibration (benchmarks/results/gemm_calibration_h200.json).
_SHAPES = {
    (1, 16): (4, 2, 4),
    (4, 16): (4, 4, 2),
    (8, 16): (4, 4, 2),
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


# Of one row or column: lines of the long operand that a warp holds, by how many turns it reads them ahead.
_VECTOR_LINES = {4: 2, 8: 1}
_VECTOR_WARPS = 8


def _vector(lines: int, mirrored: bool) -> Stream:
    many = lines * _VECTOR_WARPS
    threads = 32 * _VECTOR_WARPS
    parameters = f"{lines}, {_VECTOR_WARPS}, {_VECTOR_LINES[lines]}, {str(mirrored).lower()}"
    a, b = streams.accesses(None, Access(Contiguous.K, 16), mirrored)
    bm, bn, tm, tn = (many, 1, lines, 1) if mirrored else (1, many, 1, lines)
    instance = Instance(
        name=f"dot_stream_{bm}x{bn}_16b" + ("_mirrored" if mirrored else ""),
        family=name,
        header="kernels/dot_vector.cuh",
        entry=f"tilewave::dot_vector<{parameters}>",
        bm=bm,
        bn=bn,
        bk=_STEP,
        tm=tm,
        tn=tn,
        threads=threads,
        shared_bytes=0,
        a=a,
        b=b,
        reason=f"{streams.at_most(1, mirrored)}, by 16 bytes along K, a warp's lines apart from others'",
        sequential=False,
        alone=streams.added_alone(many, threads),
    )
    return Stream(instance, 1, many, 16, mirrored)


#: Every instance with what it takes.
STREAMS = tuple(
    stream
    for mirrored in (False, True)
    for stream in (
        *(_stream(few, width, mirrored) for few, width in _SHAPES),
        *(_vector(lines, mirrored) for lines in _VECTOR_LINES),
    )
)


def instances() -> tuple[Instance, ...]:
    """Every instance of the family."""
    return tuple(stream.instance for stream in STREAMS)


refuses = streams.refuses


def _fitting(problem: GemmProblem, mirrored: bool) -> tuple[Instance, ...]:
    few = streams.few_of(problem, mirrored)
    if few > streams.MOST_FEW:
        return ()
    # Element by element, lanes along K are worth it where the long operand's K is its nearer axis.
    layout = streams.long_operand(problem, mirrored)
    if layout.column != 1 and (layout.row in (0, 1) or abs(layout.column) > abs(layout.row)):
        return ()
    for width in (16, 4):
        taking = [s for s in STREAMS if (s.mirrored, s.width) == (mirrored, width)]
        if refuses(taking[0].instance, problem) is None:
            found = streams.smallest(taking, few)
            return tuple(s.instance for s in taking if found is not None and s.few == found.few)
    return ()


def matching(problem: GemmProblem) -> tuple[Instance, ...]:
    """For few rows, few columns or both: the instances of the smallest number that holds them."""
    if not problem.product or problem.k < LEAST_K:
        return ()
    return _fitting(problem, False) + _fitting(problem, True)
