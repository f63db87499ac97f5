"""Memory of the emulated GPU: global buffers, and shared and local memory of many blocks at once.

Every access is checked for alignment and against the bounds of the one buffer (or of the one block's shared
memory) that it may touch, for all lanes in a few NumPy operations. Fresh memory is poisoned: each 4-byte word
holds `POISON`, which reads as NaN in every floating-point format, so that a value which nobody wrote shows in
the result.

A *lane* here is one thread of all the threads that are executed together; addresses are one-dimensional
arrays with one byte address a lane.
"""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewave.errors import MemoryFault, UsageError

POISON = 0x7FFF7FFF
"""The word that fills fresh memory: NaN as float64, float32, bfloat16, float16 and both float8 formats."""

BASE_ALIGNMENT = 256
"""Alignment in bytes of a buffer's storage, as `cuMemAlloc` gives it."""

_FIRST_ADDRESS = 0x7F00_0000_0000
# Buffers own their storage, so the zone between two of them costs nothing and can be wide: an index that is
# wrong by a row, a matrix, or by a sign lands in it, and so does an address cut to 32 bits.
_GUARD_BYTES = 1 << 32
_WIDTHS = (1, 2, 4, 8, 16)

Addresses = npt.NDArray[Any]
Words = npt.NDArray[np.uint32]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Buffer:
    """A global buffer: `address` is a 64-bit byte address, as a pointer argument of a kernel holds it."""

    name: str
    address: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def end(self) -> int:
        """The first byte address behind the buffer."""
        return self.address + self.nbytes


class _Store:
    """Words of memory with views for accesses of every width; addresses count bytes from its first word."""

    def __init__(self, nbytes: int) -> None:
        # A multiple of 16 bytes, so that 8- and 16-byte accesses can be views of the same array.
        self.words: Words = np.full(-(-nbytes // 16) * 4, POISON, dtype=np.uint32)
        self._units: dict[int, npt.NDArray[Any]] = {
            1: self.words.view(np.uint8),
            2: self.words.view(np.uint16),
            4: self.words,
            8: self.words.view(np.uint64),
            16: self.words.view(np.complex128),
        }

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        return self._units[1]

    def load(self, offsets: npt.NDArray[np.int64], width: int, out: Sequence[Words]) -> None:
        """Read `width` bytes at each (checked) byte offset into `out`, one array of lanes per word."""
        units = self._units[width]
        # mode="clip" spares NumPy the bounds check that was already made, and the copy that goes with it.
        if width == 4:
            np.take(units, offsets >> 2, out=out[0], mode="clip")
        elif width > 4:
            wide = units.take(offsets >> (width.bit_length() - 1), mode="clip")
            lanes = wide.view(np.uint32).reshape(-1, width // 4)
            for i, row in enumerate(out):
                row[...] = lanes[:, i]
        else:
            out[0][...] = units.take(offsets >> (width - 1), mode="clip")

    def store(self, offsets: npt.NDArray[np.int64], width: int, words: Sequence[Words]) -> None:
        """Write `width` bytes at each (checked) byte offset; of lanes that collide the last one wins."""
        units = self._units[width]
        if width == 4:
            units[offsets >> 2] = words[0]
        elif width > 4:
            lanes = np.empty((len(offsets), width // 4), dtype=np.uint32)
            for i, row in enumerate(words):
                lanes[:, i] = row
            units[offsets >> (width.bit_length() - 1)] = lanes.view(units.dtype)[:, 0]
        else:
            units[offsets >> (width - 1)] = words[0].astype(units.dtype)


def _signed(addresses: Addresses) -> npt.NDArray[np.int64]:
    """Addresses as int64, so that a wrapped subtraction is a negative address and not a huge one."""
    if addresses.dtype == np.int64:
        return addresses
    if addresses.dtype == np.uint64:
        return addresses.view(np.int64)
    return addresses.astype(np.int64)


def _check_width(width: int) -> None:
    if width not in _WIDTHS:
        raise UsageError(f"an access of {width} bytes does not exist; accepted are 1, 2, 4, 8 and 16")


def _first_misaligned(addresses: npt.NDArray[np.int64], width: int) -> int | None:
    if width == 1 or not int(np.bitwise_or.reduce(addresses)) & (width - 1):
        return None
    return int(np.flatnonzero(addresses & (width - 1))[0])


def _rows(lanes: int, width: int, out: Sequence[Words] | None) -> Sequence[Words]:
    count = max(1, width // 4)
    if out is None:
        return list(np.zeros((count, lanes), dtype=np.uint32))
    if len(out) != count:
        raise UsageError(f"a load of {width} bytes fills {count} registers; {len(out)} were given")
    return out


class _Space(ABC):
    """What global, shared and local memory have in common: masks, alignment, and widths."""

    def load(
        self,
        addresses: Addresses,
        width: int,
        mask: Mask | None = None,
        out: Sequence[Words] | None = None,
    ) -> Sequence[Words]:
        """Read `width` bytes (1, 2, 4, 8 or 16) per lane; 1 and 2 bytes are zero-extended to a word.

        Returns max(1, width / 4) arrays of uint32, one per register, each with one word a lane: `out`, if it
        is given, else fresh zeros. Lanes that `mask` turns off touch no memory, and their words stay as they
        were. Raises `MemoryFault` with the first faulting lane.
        """
        _check_width(width)
        rows = _rows(len(addresses), width, out)
        if mask is None:
            self._access(_signed(addresses), width, None, rows, store=False)
            return rows
        active = np.flatnonzero(mask)
        if len(active):
            found = list(np.empty((len(rows), len(active)), dtype=np.uint32))
            self._access(_signed(addresses[active]), width, active, found, store=False)
            for row, values in zip(rows, found, strict=True):
                row[active] = values
        return rows

    def store(
        self, addresses: Addresses, words: Sequence[Words], width: int, mask: Mask | None = None
    ) -> None:
        """Write `width` bytes per lane from max(1, width / 4) arrays of words (1 and 2 bytes: the low ones).

        Of several lanes that write one address the highest wins. Nothing is written when any lane faults.
        """
        _check_width(width)
        if len(words) != max(1, width // 4):
            raise UsageError(
                f"a store of {width} bytes takes {max(1, width // 4)} registers; {len(words)} were given"
            )
        if mask is None:
            self._access(_signed(addresses), width, None, words, store=True)
            return
        active = np.flatnonzero(mask)
        if len(active):
            chosen = [row[active] for row in words]
            self._access(_signed(addresses[active]), width, active, chosen, store=True)

    @abstractmethod
    def _access(
        self,
        addresses: npt.NDArray[np.int64],
        width: int,
        lanes: npt.NDArray[np.intp] | None,
        rows: Sequence[Words],
        *,
        store: bool,
    ) -> None:
        """Move words between registers and the space."""


class Memory(_Space):
    """Global memory: named buffers far apart, each with its own bounds.

    `put` copies an array in, `empty` makes a poisoned buffer, `get` copies out; `load` and `store` are what
    the emulated kernel does.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []  # of the buffers' storage, ascending
        self._buffers: list[Buffer] = []
        self._stores: list[_Store] = []
        self._read_only: list[bool] = []
        self._next = _FIRST_ADDRESS

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """All buffers, by address."""
        return tuple(self._buffers)

    def put(
        self,
        array: npt.ArrayLike,
        name: str | None = None,
        *,
        offset_bytes: int = 0,
        read_only: bool = False,
    ) -> Buffer:
        """Copy an array in (C order) and return its buffer; a store to a `read_only` one is a fault.

        `offset_bytes` moves the buffer's address away from the alignment of 256 bytes.
        """
        values = np.ascontiguousarray(array).reshape(np.shape(array))
        buffer = self._allocate(values.shape, values.dtype, name, offset_bytes, read_only)
        self.set(buffer, values)
        return buffer

    def empty(
        self,
        shape: int | tuple[int, ...],
        dtype: npt.DTypeLike = np.float32,
        name: str | None = None,
        *,
        offset_bytes: int = 0,
    ) -> Buffer:
        """A buffer full of `POISON`: NaN, if it holds floating-point numbers."""
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        return self._allocate(shape, np.dtype(dtype), name, offset_bytes, read_only=False)

    def get(self, buffer: Buffer) -> npt.NDArray[Any]:
        """A copy of the buffer's contents, with its shape and dtype."""
        return self._bytes(buffer).copy().view(buffer.dtype).reshape(buffer.shape)

    def set(self, buffer: Buffer, array: npt.ArrayLike) -> None:
        """Overwrite the buffer's contents with an array of its shape and dtype."""
        values = np.asarray(array)
        if values.shape != buffer.shape or values.dtype != buffer.dtype:
            raise UsageError(
                f"buffer '{buffer.name}' holds {buffer.dtype} of shape {buffer.shape}; "
                f"given was {values.dtype} of shape {values.shape}"
            )
        self._bytes(buffer)[...] = np.frombuffer(values.tobytes(), dtype=np.uint8)

    def _allocate(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        name: str | None,
        offset_bytes: int,
        read_only: bool,
    ) -> Buffer:
        if offset_bytes < 0:
            raise UsageError(f"offset_bytes is {offset_bytes}; accepted is 0 or more")
        if dtype.hasobject:
            raise UsageError(f"an array of dtype {dtype} cannot live in GPU memory")
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        start = self._next
        buffer = Buffer(name or f"buffer{len(self._buffers)}", start + offset_bytes, nbytes, shape, dtype)
        self._starts.append(start)
        self._buffers.append(buffer)
        self._stores.append(_Store(offset_bytes + nbytes))
        self._read_only.append(read_only)
        used = offset_bytes + nbytes + _GUARD_BYTES
        self._next = start + -(-used // BASE_ALIGNMENT) * BASE_ALIGNMENT
        return buffer

    def _index(self, buffer: Buffer) -> int:
        index = bisect.bisect_right(self._starts, buffer.address) - 1
        if index < 0 or self._buffers[index] != buffer:
            raise UsageError(f"buffer '{buffer.name}' does not belong to this memory")
        return index

    def _bytes(self, buffer: Buffer) -> npt.NDArray[np.uint8]:
        index = self._index(buffer)
        first = buffer.address - self._starts[index]
        return self._stores[index].bytes[first : first + buffer.nbytes]

    def _access(
        self,
        addresses: npt.NDArray[np.int64],
        width: int,
        lanes: npt.NDArray[np.intp] | None,
        rows: Sequence[Words],
        *,
        store: bool,
    ) -> None:
        if not len(addresses):
            return
        lowest, highest = int(addresses.min()), int(addresses.max())
        index = bisect.bisect_right(self._starts, lowest) - 1
        if index >= 0:
            buffer = self._buffers[index]
            if lowest >= buffer.address and highest + width <= buffer.end:
                self._check(addresses, width, lanes, index, store)
                self._move(addresses, width, index, rows, store)
                return
        # Lanes in several buffers, or a fault: sort the lanes by buffer, check all, then move.
        owners = np.searchsorted(np.array(self._starts, dtype=np.int64), addresses, side="right") - 1
        limits = np.array([(b.address, b.end) for b in self._buffers], dtype=np.int64).reshape(-1, 2)
        if not len(limits):
            self._fault("outside every buffer", addresses, 0, width, lanes, store)
        inside = (owners >= 0) & (addresses >= limits[owners, 0]) & (addresses + width <= limits[owners, 1])
        if not inside.all():
            self._fault("outside every buffer", addresses, int(np.argmin(inside)), width, lanes, store)
        groups = [(int(owner), np.flatnonzero(owners == owner)) for owner in np.unique(owners)]
        for owner, members in groups:
            chosen = members if lanes is None else lanes[members]
            self._check(addresses[members], width, chosen, owner, store)
        for owner, members in groups:
            part = [row[members] for row in rows]
            self._move(addresses[members], width, owner, part, store)
            if not store:
                for row, values in zip(rows, part, strict=True):
                    row[members] = values

    def _check(
        self,
        addresses: npt.NDArray[np.int64],
        width: int,
        lanes: npt.NDArray[np.intp] | None,
        index: int,
        store: bool,
    ) -> None:
        bad = _first_misaligned(addresses, width)
        if bad is not None:
            self._fault("misaligned", addresses, bad, width, lanes, store)
        if store and self._read_only[index]:
            self._fault("a write to a read-only buffer", addresses, 0, width, lanes, store)

    def _move(
        self, addresses: npt.NDArray[np.int64], width: int, index: int, rows: Sequence[Words], store: bool
    ) -> None:
        offsets = addresses - self._starts[index]
        if store:
            self._stores[index].store(offsets, width, rows)
        else:
            self._stores[index].load(offsets, width, rows)

    def _fault(
        self,
        what: str,
        addresses: npt.NDArray[np.int64],
        position: int,
        width: int,
        lanes: npt.NDArray[np.intp] | None,
        store: bool,
    ) -> None:
        address = int(addresses[position])
        raise MemoryFault(
            f"global {'store' if store else 'load'} of {width} bytes at {address & (1 << 64) - 1:#x} is "
            f"{what}: {self.describe(address, width)}",
            lane=position if lanes is None else int(lanes[position]),
            address=address,
        )

    def describe(self, address: int, width: int = 1) -> str:
        """Where an access lies relative to the nearest buffer, in words."""
        if not self._buffers:
            return "there are no buffers"

        def distance(buffer: Buffer) -> int:
            return max(buffer.address - address, address + width - buffer.end, 0)

        nearest = min(self._buffers, key=distance)
        about = f"buffer '{nearest.name}' ({nearest.dtype}, shape {nearest.shape}, {nearest.nbytes} bytes)"
        if address < nearest.address:
            return f"it begins {nearest.address - address} bytes before {about}"
        if distance(nearest):
            return f"it ends {distance(nearest)} bytes behind {about}"
        return f"it lies at byte {address - nearest.address} of {about}"


class PartitionedMemory(_Space):
    """Equal parts, one for every `lanes_per_part` consecutive lanes; a lane reaches its own part only.

    Addresses count bytes from the start of the lane's part, whose first `reserved` bytes nobody may touch.
    `SharedMemory` and `LocalMemory` are its two uses.
    """

    kind = "partitioned"

    def __init__(self, parts: int, nbytes: int, lanes_per_part: int, *, reserved: int = 0) -> None:
        self.parts = parts
        self.nbytes = nbytes
        self.reserved = reserved
        self.lanes_per_part = lanes_per_part
        self._stride = -(-nbytes // 16) * 16
        self._store = _Store(parts * self._stride)
        self._bases = np.repeat(np.arange(parts, dtype=np.int64) * self._stride, lanes_per_part)

    @property
    def words(self) -> Words:
        """The words of all parts, `stride` bytes a part."""
        return self._store.words

    @property
    def stride(self) -> int:
        """Distance in bytes from one part to the next."""
        return self._stride

    def access(
        self,
        addresses: Addresses,
        width: int,
        lanes: npt.NDArray[np.int64] | None,
        rows: Sequence[Words],
        *,
        store: bool,
    ) -> None:
        """Load into or store from `rows` for the given lanes (None: all), one address each."""
        _check_width(width)
        self._access(_signed(addresses), width, lanes, rows, store=store)

    @property
    def extent(self) -> str:
        """How much a part has, for messages."""
        behind = f" from byte {self.reserved} on" if self.reserved else ""
        return f"the {self.nbytes - self.reserved} bytes of {self.kind} memory{behind}"

    def part(self, index: int) -> Words:
        """The words of one part (a view)."""
        words = self._stride // 4
        return self._store.words[index * words : (index + 1) * words][: -(-self.nbytes // 4)]

    def poison(self) -> None:
        """Fill all parts with `POISON` again."""
        self._store.words.fill(POISON)

    def _access(
        self,
        addresses: npt.NDArray[np.int64],
        width: int,
        lanes: npt.NDArray[np.intp] | None,
        rows: Sequence[Words],
        *,
        store: bool,
    ) -> None:
        if not len(addresses):
            return
        if int(addresses.min()) < self.reserved or int(addresses.max()) + width > self.nbytes:
            outside = (addresses < self.reserved) | (addresses + width > self.nbytes)
            self._fault("outside", addresses, int(np.argmax(outside)), width, lanes, store)
        bad = _first_misaligned(addresses, width)
        if bad is not None:
            self._fault("misaligned in", addresses, bad, width, lanes, store)
        offsets = addresses + (self._bases if lanes is None else self._bases[lanes])
        if store:
            self._store.store(offsets, width, rows)
        else:
            self._store.load(offsets, width, rows)

    def _fault(
        self,
        what: str,
        addresses: npt.NDArray[np.int64],
        position: int,
        width: int,
        lanes: npt.NDArray[np.intp] | None,
        store: bool,
    ) -> None:
        address = int(addresses[position])
        raise MemoryFault(
            f"{self.kind} {'store' if store else 'load'} of {width} bytes at byte {address} is {what} "
            f"{self.extent}",
            lane=position if lanes is None else int(lanes[position]),
            address=address,
        )


class SharedMemory(PartitionedMemory):
    """Shared memory of `blocks` blocks of `threads` threads each; poisoned, and bounded per block."""

    kind = "shared"

    def __init__(self, blocks: int, nbytes: int, threads: int, *, reserved: int = 0) -> None:
        super().__init__(blocks, nbytes, threads, reserved=reserved)


class LocalMemory(PartitionedMemory):
    """Local memory (the stack) of `threads` threads: `nbytes` for each of them."""

    kind = "local"

    def __init__(self, threads: int, nbytes: int) -> None:
        super().__init__(threads, nbytes, 1)
