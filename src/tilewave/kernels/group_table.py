"""The arguments of grouped kernels: tables of products, as `kernels/grouped.cuh` reads them."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from tilewave.errors import UsageError
from tilewave.kernels.arguments import GEMM_ARGS_BYTES, Pointers, pack_arguments
from tilewave.kernels.families import grouped
from tilewave.kernels.instances import Instance
from tilewave.planner.schedules import INT64_MAX, Decomposition, Raster
from tilewave.problem import GemmProblem

_ENTRY = struct.Struct("<q4i2f6q3q")
_HEAD = struct.Struct("<3q2q")
_PART = struct.Struct("<2q")
_WORD = 8

ENTRY_BYTES = _ENTRY.size
FORM_BYTES = GEMM_ARGS_BYTES + _WORD
INLINE_BYTES = 504 * _WORD
"""GROUP_TABLE_WORDS: a table of so many bytes travels in the launch's own argument."""
GROUP_ARGS_BYTES = _HEAD.size + INLINE_BYTES
PART_BYTES = tuple(words * _WORD for words in grouped.TABLE_WORDS)
"""What one launch of each of the writers brings of a longer table."""
_FEW_PARTS = 8
"""Parts of a table that the first writer brings; a longer one comes by the second, in larger parts."""

_NO_CUT = Decomposition(0, 0, 1, 0, 1, 0)
_NO_RASTER = Raster(0, 0)


@dataclass(frozen=True, slots=True)
class Operands:
    """What a product of a group has beside its problem: addresses and scalars."""

    pointers: Pointers
    alpha: float = 1.0
    beta: float = 0.0


@dataclass(frozen=True, slots=True)
class GroupTable:
    """A table without addresses and scalars.

    ``places`` has the entries in their order: the place of its product in the group, and the fields (first,
    form, pieces, slot, band, m, n, k). ``forms`` are the bytes behind the entries. ``items`` counts the work
    items of all products, ``slots`` those pieces that need a slot of the workspace.
    """

    places: tuple[tuple[int, ...], ...] = ()
    forms: bytes = b""
    items: int = 0
    slots: int = 0

    @property
    def nbytes(self) -> int:
        """Size of the table."""
        return ENTRY_BYTES * len(self.places) + len(self.forms)


def lay_out(
    instance: Instance,
    distinct: Sequence[GemmProblem],
    which: Sequence[int],
    pieces: Sequence[int],
    bands: Sequence[int],
    order: Iterable[int],
) -> GroupTable:
    """The table of a group: its products in this order, their forms behind them.

    ``distinct`` are the group's differing problems, ``which`` says of every place of the group which of them
    it has. ``pieces`` are those that a problem's tiles are cut into along K, ``bands`` the tile rows of a
    band.
    """
    forms: dict[tuple[GemmProblem, int], int] = {}
    fields = []
    for problem, count, band in zip(distinct, pieces, bands, strict=True):
        rows, columns, batches = instance.tiles(problem)
        form = forms.setdefault(form_of(problem), len(forms))
        k = problem.k if problem.product else 0
        fields.append((form, count, band, problem.m, problem.n, k, rows * columns * batches * count))
    places = []
    first = slot = 0
    for place in order:
        form, count, band, m, n, k, items = fields[which[place]]
        places.append((place, first, form, count, slot if count > 1 else 0, band, m, n, k))
        first += items
        slot += items if count > 1 else 0
    if max(first, *(max(one.m, one.n, one.k) for one in distinct)) > INT64_MAX:
        raise UsageError(f"a group of {first:,} tiles has more, or larger ones, than 64 bits can count")
    try:
        packed = b"".join(
            pack_arguments(problem, _NO_CUT, _NO_RASTER, Pointers(0, 0, 0), depth=instance.bk)
            + bits.to_bytes(_WORD, "little")
            for problem, bits in forms
        )
    except struct.error:
        raise UsageError("an operand of the group has strides of more bytes than 64 bits can count") from None
    return GroupTable(tuple(places), packed, first, slot)


def form_of(problem: GemmProblem) -> tuple[GemmProblem, int]:
    """What products have in common that share a form: all but their sizes, and how they are read."""
    return replace(problem, m=0, n=0, k=0), grouped.access_bits(problem)


def pack_table(table: GroupTable, operands: Sequence[Operands]) -> bytes:
    """The bytes of a table; ``operands`` are in the order of the group."""
    packed = bytearray(table.nbytes)
    at = 0
    for place, first, form, count, slot, band, m, n, k in table.places:
        given = operands[place]
        to = given.pointers
        _ENTRY.pack_into(
            packed,
            at,
            first,
            form,
            count,
            slot,
            band,
            given.alpha,
            given.beta,
            to.a,
            to.b,
            to.c,
            to.bias,
            to.out,
            to.preactivation,
            m,
            n,
            k,
        )
        at += ENTRY_BYTES
    packed[at:] = table.forms
    return bytes(packed)


def pack_group(
    table: bytes, entries: int, items: int, *, address: int = 0, partials: int = 0, tickets: int = 0
) -> bytes:
    """The argument of a grouped kernel; ``address`` is that of the table, 0 to pass it in the argument."""
    inside = b"" if address else table
    return (_HEAD.pack(address, entries, items, partials, tickets) + inside).ljust(GROUP_ARGS_BYTES, b"\0")


def table_bytes(distinct: Iterable[GemmProblem], entries: int) -> int:
    """Bytes of the table of a group of so many products, whose differing problems are given."""
    return ENTRY_BYTES * entries + FORM_BYTES * len({form_of(problem) for problem in distinct})


def table_launches(nbytes: int) -> int:
    """Launches that bring a table of so many bytes; 0 where a grouped kernel's own argument holds it."""
    if nbytes <= INLINE_BYTES:
        return 0
    return -(-nbytes // PART_BYTES[_writer_for(nbytes)])


def table_writer(nbytes: int) -> Instance:
    """The kernel that brings a table of so many bytes."""
    return grouped.TABLE_WRITERS[_writer_for(nbytes)]


def table_parts(table: bytes, address: int) -> Iterator[bytes]:
    """The arguments of the launches that write a table to an address."""
    most = PART_BYTES[_writer_for(len(table))]
    for begin in range(0, len(table), most):
        part = table[begin : begin + most]
        yield (_PART.pack(address + begin, len(part) // _WORD) + part).ljust(_PART.size + most, b"\0")


def _writer_for(nbytes: int) -> int:
    return int(nbytes > _FEW_PARTS * PART_BYTES[0])
