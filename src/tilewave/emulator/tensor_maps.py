"""The emulator's encoding of a tensor map: 128 bytes of its own, as the driver's are not documented."""

from __future__ import annotations

import struct

from tilewave.errors import EmulationError
from tilewave.tensor_map import ELEMENT_BYTES, TENSOR_MAP_BYTES, TensorMap

_SIGNATURE = b"twtmap1\0"
_FORMAT = struct.Struct("<8s4B4xQ5I4Q5H5B")
_TYPES = tuple(ELEMENT_BYTES)


def encode_for_emulator(tensor: TensorMap) -> bytes:
    """The 128 bytes that a kernel in the emulator takes as a tensor map."""
    rank = tensor.rank
    fields = _FORMAT.pack(
        _SIGNATURE,
        _TYPES.index(tensor.dtype),
        rank,
        tensor.swizzle,
        int(tensor.nan_fill),
        tensor.address,
        *(extent - 1 for extent in tensor.shape),
        *[0] * (5 - rank),
        *tensor.strides,
        *[0] * (5 - rank),
        *tensor.box,
        *[0] * (5 - rank),
        *tensor.element_strides,
        *[0] * (5 - rank),
    )
    return fields.ljust(TENSOR_MAP_BYTES, b"\0")


def decode(data: bytes) -> TensorMap:
    """The tensor map in 128 bytes of emulated memory; `EmulationError` if they hold none."""
    signature, kind, rank, swizzle, fill, address, *rest = _FORMAT.unpack_from(data)
    if signature != _SIGNATURE:
        raise EmulationError(
            "no tensor map of the emulator lies there (emulator.encode_for_emulator makes one)"
        )
    return TensorMap(
        _TYPES[kind],
        address,
        tuple(extent + 1 for extent in rest[:rank]),
        tuple(rest[5 : 5 + rank - 1]),
        tuple(rest[9 : 9 + rank]),
        swizzle,
        tuple(rest[14 : 14 + rank]),
        bool(fill),
    )
