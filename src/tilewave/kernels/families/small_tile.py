"""Tiles up to 128 x 128 of any shape, for products that are small, narrow or of few tiles."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from tilewave.kernels.access import WIDTHS, common_access, unsuited
from tilewave.kernels.families.large_tile import layout_letters
from tilewave.kernels.instances import Access, Contiguous, Instance
from tilewave.problem import GemmProblem

name = "small_tile"


@dataclass(frozen=True, slots=True)
class _Tile:
    bm: int
    bn: int
    bk: int
    tm: int
    tn: int
    groups: int
    stages: int
    blocks: int  # an SM, at least
    reason: str

    @property
    def threads(self) -> int:
        return self.bm // self.tm * (self.bn // self.tn) * self.groups


_TILES = (
    _Tile(64, 64, 16, 8, 8, 1, 3, 5, "plain chains for C of any shape"),
    _Tile(64, 64, 16, 8, 8, 2, 3, 3, "mid sizes with too few tiles for one group each"),
    _Tile(64, 32, 32, 8, 4, 4, 3, 2, "small C, taller than wide"),
    _Tile(32, 64, 32, 4, 8, 4, 3, 2, "small C, wider than tall"),
    _Tile(32, 32, 32, 4, 4, 4, 3, 3, "C of few hundred rows and columns"),
    _Tile(32, 32, 32, 8, 4, 8, 3, 2, "C of few hundred rows and columns over a deep K, with fewer loads"),
    _Tile(128, 32, 16, 8, 4, 2, 3, 2, "columns up to 32"),
    _Tile(32, 128, 16, 4, 8, 2, 3, 2, "rows up to 32"),
    _Tile(64, 16, 32, 8, 4, 4, 4, 4, "columns up to 16"),
    _Tile(16, 64, 32, 4, 8, 4, 4, 4, "rows up to 16"),
)
_WORDS = {16: "operands on 16 bytes", 4: "any lengths and strides"}


def _operand_floats(extent: int, depth: int, access: Access) -> int:
    """Elements of an operand's part of a slice: SmallOperand::FLOATS of the template."""
    if access.contiguous is Contiguous.OTHER:
        return extent * depth
    return extent * (depth + 4) if access.width > 4 else (extent + 4) * depth


def _instance(tile: _Tile, a: Access, b: Access) -> Instance:
    letters = layout_letters(a.contiguous, b.contiguous)
    stage = _operand_floats(tile.bm, tile.bk, a) + _operand_floats(tile.bn, tile.bk, b)
    numbers = (tile.bm, tile.bn, tile.bk, tile.tm, tile.tn, tile.groups, tile.stages, tile.blocks)
    flags = (_flag(a), a.width, _flag(b), b.width)
    groups = f"_{tile.groups}groups" if tile.groups > 1 else ""
    return Instance(
        name=f"{name}_{tile.bm}x{tile.bn}x{tile.bk}{groups}_{letters}_{a.width}",
        family=name,
        header="kernels/small_tile.cuh",
        entry=f"tilewave::small_tile<{', '.join(str(value) for value in numbers + flags)}>",
        bm=tile.bm,
        bn=tile.bn,
        bk=tile.bk,
        tm=tile.tm,
        tn=tile.tn,
        threads=tile.threads,
        shared_bytes=4 * max(tile.stages * stage, tile.groups * tile.bm * tile.bn),
        a=a,
        b=b,
        reason=f"{tile.reason}; layout {letters.upper()}, {_WORDS[a.width]}",
        k_groups=tile.groups,
        sequential=tile.groups == 1,
    )


def _flag(access: Access) -> str:
    return "true" if access.contiguous is Contiguous.K else "false"


_BY_ACCESS = {
    (of_a, of_b, width): tuple(_instance(tile, Access(of_a, width), Access(of_b, width)) for tile in _TILES)
    for width, of_a, of_b in product(WIDTHS, Contiguous, Contiguous)
}
_INSTANCES = tuple(instance for group in _BY_ACCESS.values() for instance in group)


def instances() -> tuple[Instance, ...]:
    """Every instance of the family."""
    return _INSTANCES


def matching(problem: GemmProblem) -> tuple[Instance, ...]:
    """The tiles in the problem's layout and by its widest vectors."""
    return _BY_ACCESS[common_access(problem)] if problem.product else ()


def refuses(instance: Instance, problem: GemmProblem) -> str | None:
    """Why the instance cannot compute the problem, or None."""
    if not problem.product:
        return "there is no product to compute"
    return unsuited(instance.a, "a", problem) or unsuited(instance.b, "b", problem)
