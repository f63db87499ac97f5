"""Tensor maps for a GPU: the driver's own 128 bytes of a `TensorMap`."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from tilewave.device.driver import bindings
from tilewave.errors import DeviceError
from tilewave.runtime import driver
from tilewave.tensor_map import TENSOR_MAP_BYTES, TensorMap

_ALIGNMENT = 64
_INTRODUCED = 12000
"""The version of CUDA that brought tensor maps."""

_DATA_TYPES = {"bfloat16": "BFLOAT16", "tfloat32": "TFLOAT32"}


@functools.lru_cache(maxsize=256)
def encode_for_driver(tensor: TensorMap) -> bytes:
    """The 128 bytes that a kernel on a GPU takes as a tensor map; `cuTensorMapEncodeTiled` makes them."""
    cuda = bindings()
    data_type = _DATA_TYPES.get(tensor.dtype, tensor.dtype.upper())
    swizzle = f"{tensor.swizzle}B" if tensor.swizzle else "NONE"
    promotion = f"L2_{tensor.l2_promotion}B" if tensor.l2_promotion else "NONE"
    fill = "NAN_REQUEST_ZERO_FMA" if tensor.nan_fill else "NONE"
    # The driver wants 64 bytes of alignment, which an object of cuda-bindings does not have.
    memory = ctypes.create_string_buffer(TENSOR_MAP_BYTES + _ALIGNMENT)
    address = -(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT
    code = _encode_function()(
        address,
        int(getattr(cuda.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{data_type}")),
        tensor.rank,
        tensor.address,
        _array(ctypes.c_uint64, tensor.shape),
        _array(ctypes.c_uint64, tensor.strides),
        _array(ctypes.c_uint32, tensor.box),
        _array(ctypes.c_uint32, tensor.element_strides),
        int(cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
        int(getattr(cuda.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}")),
        int(getattr(cuda.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{promotion}")),
        int(getattr(cuda.CUtensorMapFloatOOBfill, f"CU_TENSOR_MAP_FLOAT_OOB_FILL_{fill}")),
    )
    if code:
        raise DeviceError(f"cuTensorMapEncodeTiled failed with code {code} for {tensor}")
    return ctypes.string_at(address, TENSOR_MAP_BYTES)


def _array(kind: Any, values: tuple[int, ...]) -> ctypes.Array[Any]:
    return (kind * max(1, len(values)))(*values)  # type: ignore[no-any-return]


@functools.cache
def _encode_function() -> Callable[..., int]:
    """The driver's function, by its address: cuda-bindings would put its answer where it likes."""
    flags = bindings().CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_DEFAULT
    found = driver._call("cuGetProcAddress", b"cuTensorMapEncodeTiled", _INTRODUCED, int(flags))
    address = int(found[0] if isinstance(found, tuple) else found)
    integers, pointers = ctypes.c_uint32, ctypes.c_void_p
    prototype = ctypes.CFUNCTYPE(
        ctypes.c_int, *(pointers, ctypes.c_int, integers), *[pointers] * 5, *[ctypes.c_int] * 4
    )
    return prototype(address)
