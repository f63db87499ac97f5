"""What a bulk copy moves in global memory: a run of bytes, or a box of a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tilewave.emulator.memory import Memory
from tilewave.errors import EmulationError
from tilewave.tensor_map import TensorMap

Array = npt.NDArray[Any]

_NAN = 0x7FF77FF77FF77FF7
"""What an H200 puts where elements are outside, whatever their type: a NaN in every 2 bytes."""

_PIECE = 16
"""Bytes in which the copy engine moves rows of a box."""


class Tile(Protocol):
    """Global memory of a copy; its data are rows of four words, 16 bytes each."""

    @property
    def nbytes(self) -> int:
        """Bytes in shared memory, elements outside the tensor included."""
        ...

    @property
    def swizzle(self) -> int:
        """Width of the swizzle pattern in shared memory, 0 if there is none."""
        ...

    @property
    def alignment(self) -> int:
        """Alignment that the copy needs in shared memory."""
        ...

    def check_target(self) -> None:
        """Raise `EmulationError` if a copy may be made from here, but not to here."""
        ...

    def read(self, memory: Memory) -> Array:
        """The bytes that go to shared memory."""
        ...

    def write(self, memory: Memory, data: Array) -> None:
        """Put bytes of shared memory where they belong."""
        ...


@dataclass(frozen=True)
class Run:
    """`nbytes` contiguous bytes, a multiple of 16 at a multiple of 16."""

    address: int
    nbytes: int
    swizzle: int = 0
    alignment: int = 16

    def __post_init__(self) -> None:
        if self.nbytes % 16 or self.address % 16:
            raise EmulationError(
                f"a bulk copy of {self.nbytes} bytes at {self.address:#x}: both must be multiples of 16"
            )

    def check_target(self) -> None:
        """Whatever can be read can be written."""

    def _addresses(self) -> Array:
        return self.address + 16 * np.arange(self.nbytes // 16, dtype=np.int64)

    def read(self, memory: Memory) -> Array:
        """The run's bytes."""
        return np.stack(memory.load(self._addresses(), 16), axis=1) if self.nbytes else _NOTHING

    def write(self, memory: Memory, data: Array) -> None:
        """Replace the run's bytes."""
        memory.store(self._addresses(), list(np.ascontiguousarray(data.T)), 16)


_NOTHING = np.zeros((0, 4), dtype=np.uint32)


@dataclass(frozen=True)
class Box:
    """The box of a tensor at some coordinates, dimension 0 first; they may lie outside the tensor."""

    tensor: TensorMap
    coordinates: tuple[int, ...]

    def __post_init__(self) -> None:
        tensor = self.tensor
        if len(self.coordinates) != tensor.rank:
            raise EmulationError(
                f"a copy with {len(self.coordinates)} coordinates of a tensor map of rank {tensor.rank}"
            )
        first = self.coordinates[0] * tensor.element_bytes
        if first % _PIECE:
            raise EmulationError(
                f"the copy's first coordinate, {self.coordinates[0]}, is byte {first} of a row: it must be a "
                f"multiple of {_PIECE}; a GPU calls it an illegal instruction"
            )
        inner = tensor.copied[0] * tensor.element_bytes
        if tensor.swizzle and inner != tensor.swizzle:
            raise EmulationError(
                f"the emulator swizzles boxes whose rows are as wide as the pattern: the box is {inner} "
                f"bytes wide, the pattern {tensor.swizzle}"
            )

    def check_target(self) -> None:
        """A box that is written begins inside (CUDA C++ Programming Guide, multi-dimensional bulk copies)."""
        if min(self.coordinates) < 0:
            raise EmulationError(
                f"a copy into a tensor at the coordinates {self.coordinates}, before its beginning: accepted "
                f"are coordinates from 0 on; a GPU calls others an illegal instruction"
            )

    @property
    def nbytes(self) -> int:
        """Bytes in shared memory, elements outside the tensor included."""
        return self.tensor.box_bytes

    @property
    def swizzle(self) -> int:
        """Width of the swizzle pattern in shared memory, 0 if there is none."""
        return self.tensor.swizzle

    @property
    def alignment(self) -> int:
        """Alignment that the copy needs in shared memory."""
        return 128

    @cached_property
    def _elements(self) -> tuple[Array, Array]:
        """Address of each element, dimension 0 fastest, and which exist."""
        tensor = self.tensor
        rank = tensor.rank
        address = np.full((1,) * rank, tensor.address, dtype=np.int64)
        exists = np.ones((1,) * rank, dtype=np.bool_)
        strides = (tensor.element_bytes, *tensor.strides)
        steps = (1, *tensor.element_strides[1:])
        for d, (first, count) in enumerate(zip(self.coordinates, tensor.copied, strict=True)):
            shape = [1] * rank
            shape[rank - 1 - d] = count
            index = (first + steps[d] * np.arange(count, dtype=np.int64)).reshape(shape)
            address = address + index * strides[d]
            exists = exists & (index >= 0) & (index < tensor.shape[d])
        return address, exists

    def _pieces(self) -> tuple[Array, Array, bool]:
        """Address of each 16-byte piece, which exist at least in part, and whether all of those do wholly."""
        address, exists = self._elements
        each = _PIECE // self.tensor.element_bytes
        parts = exists.reshape(*exists.shape[:-1], -1, each)
        some = parts[..., 0]  # none begins before its row does, as the first coordinate begins a piece
        whole = bool((some == parts[..., -1]).all())
        return address[..., ::each].reshape(-1), some.reshape(-1), whole

    def read(self, memory: Memory) -> Array:
        """The box, with zeros (or NaN) for what lies outside the tensor."""
        size = self.tensor.element_bytes
        address, exists, whole = self._pieces()
        if whole and not self.tensor.nan_fill:
            rows = memory.load(address, _PIECE, None if exists.all() else exists)
            return np.stack(rows, axis=1)
        address, exists = (values.reshape(-1) for values in self._elements)
        fill = _NAN & ((1 << 8 * size) - 1) if self.tensor.nan_fill else 0
        rows = memory.load(address, size, exists)
        data = np.stack(rows, axis=1).reshape(-1)
        elements = data.astype(f"u{size}") if size < 4 else data.view(f"u{size}")
        return np.where(exists, elements, np.array(fill, dtype=f"u{size}")).view(np.uint32).reshape(-1, 4)

    def write(self, memory: Memory, data: Array) -> None:
        """Write the pieces that begin inside the tensor, to their ends: up to 15 bytes behind each row."""
        address, exists, _ = self._pieces()
        memory.store(address, list(np.ascontiguousarray(data.T)), _PIECE, None if exists.all() else exists)
