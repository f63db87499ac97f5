"""Kernels that compute many products of differing sizes in one launch, whatever their layouts.

They are no family of `FAMILIES`: their argument is a table of products (`kernels/group_table.py`), so that
only the planner of groups (`planner/gemm/group.py`) weighs them.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewave.kernels.access import common_access
from tilewave.kernels.instances import Access, Contiguous, Instance
from tilewave.problem import GemmProblem

name = "grouped"

VECTORS = 4
"""Bit of an access: both operands are read by 16 bytes, along K where the bits below say so."""
A_ALONG_K, B_ALONG_K = 1, 2


@dataclass(frozen=True, slots=True)
class _Tile:
    bm: int
    bn: int
    bk: int
    tm: int
    tn: int
    blocks: int  # an SM, at least
    reason: str


_STAGES = 3
_TILES = (
    _Tile(128, 128, 8, 16, 8, 2, "products of several hundred rows and columns and more"),
    _Tile(64, 64, 16, 8, 8, 4, "products that larger tiles do not fit, or that are few tiles in all"),
    _Tile(16, 128, 16, 4, 8, 4, "a few rows each, as of experts that few tokens come to"),
    _Tile(128, 16, 16, 8, 4, 4, "a few columns each"),
    _Tile(32, 32, 16, 4, 4, 8, "small products"),
    _Tile(16, 16, 8, 4, 2, 16, "tiny products, a warp each"),
)


def _instance(tile: _Tile) -> Instance:
    # Elements of a slice of both operands at most: one by one or along K in vectors, they lie with gaps.
    stage = max(
        (tile.bm + tile.bn + 8) * tile.bk,
        (tile.bm + tile.bn) * (tile.bk + 4),
    )
    numbers = (tile.bm, tile.bn, tile.bk, tile.tm, tile.tn, _STAGES, tile.blocks)
    return Instance(
        name=f"{name}_{tile.bm}x{tile.bn}x{tile.bk}",
        family=name,
        header="kernels/grouped.cuh",
        entry=f"tilewave::grouped<{', '.join(map(str, numbers))}>",
        bm=tile.bm,
        bn=tile.bn,
        bk=tile.bk,
        tm=tile.tm,
        tn=tile.tn,
        threads=tile.bm // tile.tm * (tile.bn // tile.tn),
        shared_bytes=4 * max(_STAGES * stage, tile.bm * tile.bn),
        a=None,
        b=None,
        reason=f"groups of {tile.reason}",
    )


_INSTANCES = tuple(_instance(tile) for tile in _TILES)

TABLE_WORDS = (508, 4080)
"""Words of 8 bytes that one launch of each writer brings: arguments of 4 KB, which every launch may take, and
of 32 KB, which drivers take from CUDA 12.1 on."""


def _writer(words: int) -> Instance:
    return Instance(
        name=f"group_table_{words}",
        family="group_table",
        header="kernels/group_table.cuh",
        entry=f"tilewave::group_table<{words}, {_WRITER_THREADS}>",
        bm=1,
        bn=1,
        bk=1,
        tm=1,
        tn=1,
        threads=_WRITER_THREADS,
        shared_bytes=0,
        a=None,
        b=None,
        reason="tables of groups that are longer than a launch's own argument",
        cuttable=False,
    )


_WRITER_THREADS = 256
TABLE_WRITERS = tuple(map(_writer, TABLE_WORDS))
"""What brings a table to the GPU, in small parts or in large ones; they compute nothing."""


def instances() -> tuple[Instance, ...]:
    """Every kernel that computes a group."""
    return _INSTANCES


def access_bits(problem: GemmProblem) -> int:
    """How a grouped kernel reads the operands of one of its products: GroupForm::access."""
    if not problem.product:
        return 0
    a, b, width = common_access(problem)
    if width != 16:
        return 0
    return VECTORS | A_ALONG_K * (a is Contiguous.K) | B_ALONG_K * (b is Contiguous.K)


def accesses(bits: int) -> tuple[Access, Access]:
    """The accesses to A and B that `access_bits` stand for."""
    width = 16 if bits & VECTORS else 4
    return (
        Access(Contiguous.K if bits & A_ALONG_K else Contiguous.OTHER, width),
        Access(Contiguous.K if bits & B_ALONG_K else Contiguous.OTHER, width),
    )
