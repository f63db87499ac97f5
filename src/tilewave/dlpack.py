"""DLPack capsules read by hand: where a tensor lies, without importing the library that made it.

Structures are those of dlpack.h, versions 0.8 and 1.x (https://dmlc.github.io/dlpack/latest/c_api.html).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from tilewave.errors import UsageError
from tilewave.messages import shown

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
"""Values of DLDeviceType."""

HOST_DEVICES = (CPU, CUDA_HOST)
GPU_DEVICES = (CUDA, CUDA_MANAGED)

_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
_READ_ONLY = 1
_SUPPORTED_MAJOR = 1


class DLDevice(ctypes.Structure):
    """Device type and number."""

    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class DLDataType(ctypes.Structure):
    """Kind of number, bits and lanes."""

    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class DLTensor(ctypes.Structure):
    """Where a tensor lies; strides are in elements, null for C order."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class DLManagedTensor(ctypes.Structure):
    """A tensor with its owner, as before version 1."""

    _fields_ = (("tensor", DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class DLManagedTensorVersioned(ctypes.Structure):
    """A tensor with its owner, since version 1."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    )


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What a capsule says. ``capsule`` keeps the memory alive: it is never consumed, so that its own
    destructor gives the tensor back."""

    capsule: object
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device_type: int
    device_id: int
    readonly: bool


_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)


def exchange(producer: Any, stream: int | None) -> Exchanged:
    """Ask an object for its tensor, ready for work that is submitted to ``stream`` next.

    ``stream`` is a CUDA stream handle, or None for memory of the host. What the producer raises (BufferError
    for what cannot be shared) passes through.
    """
    arguments: dict[str, Any] = {}
    if stream is not None:
        # The protocol has no 0: the legacy default stream is 1 there.
        arguments["stream"] = 1 if stream == 0 else stream
    try:
        capsule = producer.__dlpack__(max_version=(_SUPPORTED_MAJOR, 0), **arguments)
    except TypeError:  # a producer from before version 1
        capsule = producer.__dlpack__(**arguments)
    return read_capsule(capsule)


def read_capsule(capsule: object) -> Exchanged:
    """What a capsule named ``dltensor`` or ``dltensor_versioned`` holds."""
    readonly = False
    if _is_valid(capsule, b"dltensor_versioned"):
        address = _get_pointer(capsule, b"dltensor_versioned")
        versioned = DLManagedTensorVersioned.from_address(address)
        if versioned.major != _SUPPORTED_MAJOR:
            raise UsageError(
                f"the tensor was exported as DLPack {versioned.major}.{versioned.minor}; "
                f"accepted are versions before {_SUPPORTED_MAJOR + 1}"
            )
        tensor, readonly = versioned.tensor, bool(versioned.flags & _READ_ONLY)
    elif _is_valid(capsule, b"dltensor"):
        tensor = DLManagedTensor.from_address(_get_pointer(capsule, b"dltensor")).tensor
    else:
        raise UsageError(f"{shown(capsule)} is no DLPack capsule, or it was consumed already")
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    if tensor.strides:
        strides = tuple(tensor.strides[axis] for axis in range(tensor.ndim))
    else:
        steps = [1] * tensor.ndim
        for axis in range(tensor.ndim - 2, -1, -1):
            steps[axis] = steps[axis + 1] * max(1, shape[axis + 1])
        strides = tuple(steps)
    return Exchanged(
        capsule,
        (tensor.data or 0) + tensor.byte_offset,
        shape,
        strides,
        _dtype_name(tensor.dtype),
        tensor.device.device_type,
        tensor.device.device_id,
        readonly,
    )


def _dtype_name(dtype: DLDataType) -> str:
    kind = _KINDS.get(dtype.code, f"type {dtype.code} of")
    name = "bool" if kind == "bool" else f"{kind}{dtype.bits}"
    return name if dtype.lanes == 1 else f"{name}x{dtype.lanes}"


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
# The destructor gets a capsule that is being freed, as a bare address: nothing may count references to it.
_dying_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_dying_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)

_NAME = b"dltensor"
_exported: dict[int, tuple[Any, ...]] = {}
"""What keeps each exported tensor alive, by its address, until its consumer calls the deleter."""


def make_capsule(owner: object, address: int, shape: tuple[int, ...], device: int) -> object:
    """A DLPack capsule of a float32 array in C order on a GPU; ``owner`` lives as long as it is in use."""
    shape_array = (ctypes.c_int64 * max(1, len(shape)))(*shape)
    managed = DLManagedTensor()
    managed.tensor.data = address
    managed.tensor.device = DLDevice(CUDA, device)
    managed.tensor.ndim = len(shape)
    managed.tensor.dtype = DLDataType(2, 32, 1)
    managed.tensor.shape = ctypes.cast(shape_array, ctypes.POINTER(ctypes.c_int64))
    managed.deleter = ctypes.cast(_DELETER, ctypes.c_void_p).value
    place = ctypes.addressof(managed)
    _exported[place] = (owner, managed, shape_array)
    return _new_capsule(place, _NAME, ctypes.cast(_DESTRUCTOR, ctypes.c_void_p))


def _delete(place: int) -> None:
    """Called by whoever consumed a capsule, from any thread, when it is done with the tensor."""
    _exported.pop(place, None)


def _destroy(capsule: int) -> None:
    """Called when a capsule goes; one that was consumed has another name by then and belongs to its
    consumer.
    """
    if _dying_is_valid(capsule, _NAME):
        _exported.pop(_dying_pointer(capsule, _NAME), None)


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_delete)
_DESTRUCTOR = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_destroy)
