"""What was given, in the words of an error message: short, on one line, and never an error of its own."""

from __future__ import annotations

from typing import Any

_MOST_CHARACTERS = 120
_MOST_ITEMS = 6
_MOST_DEPTH = 3
_MOST_BITS = 256
"""Longer integers are told by their length: Python refuses to print very long ones."""


def shown(value: object) -> str:
    """A value that was given where it makes no sense.

    Arrays are told by type, shape and dtype, which says more than their elements and waits for no GPU; long
    texts are cut, and what cannot be printed is told by its type.
    """
    try:
        return _shown(value, _MOST_DEPTH)
    except Exception:  # a repr may do anything, and what it raises is not what the user should read
        return kind_of(value)


def kind_of(value: object) -> str:
    """The type of a value with its article: a list, an ndarray, a Tensor."""
    name = type(value).__name__
    vowel = name[:1].lower() in "aeiou" or name == "ndarray"
    return f"{'an' if vowel else 'a'} {name}"


def shape_and_strides(array: Any) -> str:
    """' of shape (3, 4) and strides (4, 1)' with strides in elements; what the array does not say is left
    out.
    """
    shape = _extents(array)
    if shape is None:
        return ""
    try:
        strides = tuple(array.stride()) if hasattr(array, "stride") else _steps(array)
    except Exception:  # sparse tensors have none, and what is no array of ours may do anything
        strides = None
    return f" of shape {shape}" + ("" if strides is None else f" and strides {strides}")


def _shown(value: object, depth: int) -> str:
    if isinstance(value, tuple | list):
        return _listed(value, depth)
    if isinstance(value, int) and (bits := value.bit_length()) > _MOST_BITS:
        return f"{'a negative' if value < 0 else 'an'} integer of {bits:,} bits"
    shape = _extents(value)
    if shape is not None and not _is_numpy_scalar(value):
        dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
        return f"{kind_of(value)} of shape {shape}" + (f" and dtype {dtype}" if dtype else "")
    text = " ".join(repr(value).split("\n"))
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}... ({kind_of(value)})"


def _is_numpy_scalar(value: object) -> bool:
    return type(value).__module__ == "numpy" and type(value).__hash__ is not None


def _listed(values: tuple[Any, ...] | list[Any], depth: int) -> str:
    if depth == 0:
        return f"{kind_of(values)} of {len(values):,}"
    parts = [_shown(each, depth - 1) for each in values[:_MOST_ITEMS]]
    if len(values) > _MOST_ITEMS:
        parts.append(f"... {len(values):,} in all")
    inside = ", ".join(parts)
    if isinstance(values, list):
        return f"[{inside}]"
    return f"({inside},)" if len(values) == 1 else f"({inside})"


def _extents(value: Any) -> tuple[Any, ...] | None:
    """The shape of an array, None for anything else; a type has an attribute of that name and no shape."""
    if isinstance(value, type):
        return None
    try:
        return tuple(value.shape)
    except Exception:  # no such attribute, or one that is no shape
        return None


def _steps(array: Any) -> tuple[int, ...] | None:
    """Strides of NumPy's kind, which are in bytes, in elements; None where there are none or parts of one."""
    size = int(array.itemsize)
    strides = tuple(array.strides)
    if size <= 0 or any(stride % size for stride in strides):
        return None
    return tuple(stride // size for stride in strides)
