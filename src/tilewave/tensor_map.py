"""Tensor maps: what a bulk tensor copy (TMA) needs to know of an array in global memory, as plain data.

A `TensorMap` has no address space of its own: `runtime.tensor_maps` makes the driver's `CUtensorMap` of it,
`emulator.tensor_maps` the emulator's. Both are 128 bytes that a kernel takes as a
`const __grid_constant__` parameter of 64-byte alignment. Rules: CUDA Driver API, `cuTensorMapEncodeTiled`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewave.errors import UsageError

TENSOR_MAP_BYTES = 128
"""Size of an encoded tensor map."""

ELEMENT_BYTES = {
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "bfloat16": 2,
    "tfloat32": 4,
}
"""Element types that a tensor map may have, and their sizes."""

SWIZZLES = (0, 32, 64, 128)
"""Widths in bytes of the swizzle patterns; 0 is none."""

_MAX_RANK = 5


@dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory and the box of it that one copy moves; dimension 0 varies fastest.

    `address` is that of element (0, ..., 0); `shape` holds elements, `strides` the bytes between neighbours
    along dimensions 1 and up (dimension 0 is contiguous). A copy moves `box` elements from the coordinates
    that it is given, every `element_strides`-th of them, into dense shared memory, whose 16-byte pieces are
    exchanged by the pattern `swizzle` bytes wide. Elements outside the tensor arrive as 0, or as NaN with
    `nan_fill`. The first coordinate must be a multiple of 16 bytes. A copy into the tensor must begin inside
    it, none of its coordinates negative, and writes whole pieces of 16 bytes: up to 15 bytes behind a row
    whose length is no multiple of 16. Raises `UsageError` where the driver's rules are broken.
    """

    dtype: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    element_strides: tuple[int, ...] = ()
    nan_fill: bool = False
    l2_promotion: int = 0

    def __post_init__(self) -> None:
        if not self.element_strides:
            object.__setattr__(self, "element_strides", (1,) * self.rank)
        self._check()

    @property
    def rank(self) -> int:
        """Number of dimensions, 1 to 5."""
        return len(self.shape)

    @property
    def element_bytes(self) -> int:
        """Size of an element."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def copied(self) -> tuple[int, ...]:
        """Elements that a copy moves along each dimension; the stride of dimension 0 is ignored."""
        steps = (1, *self.element_strides[1:])
        return tuple(-(-box // step) for box, step in zip(self.box, steps, strict=True))

    @property
    def box_bytes(self) -> int:
        """Bytes that a copy moves into shared memory: what an mbarrier must expect."""
        count = 1
        for extent in self.copied:
            count *= extent
        return count * self.element_bytes

    def _check(self) -> None:
        if self.dtype not in ELEMENT_BYTES:
            raise UsageError(f"a tensor map of {self.dtype!r}: accepted are {', '.join(ELEMENT_BYTES)}")
        rank = self.rank
        if not 1 <= rank <= _MAX_RANK:
            raise UsageError(f"a tensor map of {rank} dimensions: accepted are 1 to {_MAX_RANK}")
        sizes = {"strides": (self.strides, rank - 1), "box": (self.box, rank)}
        sizes["element_strides"] = (self.element_strides, rank)
        for name, (values, expected) in sizes.items():
            if len(values) != expected:
                raise UsageError(f"a tensor map of rank {rank} has {expected} {name}; given were {values}")
        if self.address % 16 or not 0 <= self.address < 1 << 64:
            raise UsageError(f"a tensor map's address {self.address:#x} is no multiple of 16")
        self._within("shape", self.shape, 1, 1 << 32)
        self._within("box", self.box, 1, 256)
        self._within("element_strides", self.element_strides, 1, 8)
        self._within("strides", self.strides, 16, (1 << 40) - 1)
        if any(stride % 16 for stride in self.strides):
            raise UsageError(f"a tensor map's strides {self.strides} are not all multiples of 16 bytes")
        inner = self.box[0] * self.element_bytes
        if inner % 16:
            raise UsageError(f"a box of {self.box[0]} {self.dtype} is {inner} bytes wide: no multiple of 16")
        if self.swizzle not in SWIZZLES:
            raise UsageError(f"swizzle {self.swizzle}: accepted are {SWIZZLES} bytes")
        if self.swizzle and inner > self.swizzle:
            raise UsageError(f"a box {inner} bytes wide does not fit a swizzle of {self.swizzle} bytes")
        if self.l2_promotion not in (0, 64, 128, 256):
            raise UsageError(f"l2_promotion {self.l2_promotion}: accepted are 0, 64, 128 and 256 bytes")
        if self.nan_fill and "float" not in self.dtype:
            raise UsageError(f"nan_fill needs a floating-point type; given was {self.dtype}")

    def _within(self, name: str, values: tuple[int, ...], low: int, high: int) -> None:
        if any(not low <= value <= high for value in values):
            raise UsageError(f"a tensor map's {name} {values}: accepted are {low} to {high}")
