"""A call of the front door, checked in full before anything is written or launched."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from tilewave.arrays import ANYWHERE, ArrayView, current_stream, view_of
from tilewave.errors import NotBuiltError, OperandTypeError, UsageError
from tilewave.messages import kind_of, shown
from tilewave.packed import Packed
from tilewave.problem import Activation, Precision
from tilewave.semantics import (
    Layout,
    Product,
    Strides,
    addend_strides,
    bias_strides,
    check_addressable,
    check_bias_axis,
    out_strides,
    product_of,
    share_memory,
)

PLANNED_PRECISIONS = ("tf32x3", "bf16x6", "bf16x9", "auto")
"""Modes that are designed and not built."""

OPERANDS = ("a", "b", "c", "bias", "out")

ACTIVATIONS = {
    "relu": Activation.RELU,
    "gelu": Activation.GELU,
    "gelu_tanh": Activation.GELU_TANH,
    "silu": Activation.SILU,
}


class GemmCall(NamedTuple):
    """What is to be computed: checked operands, and the strides of each along the shared axes.

    ``c`` and ``bias`` are None where they are absent or, for c, where beta is 0. ``out_view`` is None where
    the result is to be allocated, by ``framework``. ``alpha`` and ``beta`` are rounded to float32. ``stream``
    is a raw handle; ``others`` are streams on which operands may still be in work. ``overlap`` names the
    operand whose memory out shares, so that the result must be made elsewhere first. ``packed`` are operands
    of `prepack`, whose arrays a and b are.
    """

    a: ArrayView
    b: ArrayView
    c: ArrayView | None
    bias: ArrayView | None
    out: ArrayView | None
    product: Product
    transpose_a: bool
    transpose_b: bool
    bias_axis: int
    c_strides: Strides | None
    bias_strides: Strides | None
    out_strides: Strides | None
    alpha: float
    beta: float
    activation: Activation
    keep_preactivation: bool
    device: int | None
    framework: str
    stream: int
    others: tuple[int, ...]
    overlap: str | None
    precision: Precision = Precision.IEEE
    packed: tuple[Packed, ...] = ()

    @property
    def reads_product(self) -> bool:
        """Whether a and b are read at all."""
        return self.alpha != 0 and self.product.k > 0


def collect(
    a: Any,
    b: Any,
    c: Any = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: Any = None,
    bias_axis: int = -1,
    activation: Activation | str | None = None,
    return_preactivation: bool = False,
    transpose_a: bool = False,
    transpose_b: bool = False,
    out: Any = None,
    precision: Precision | str = Precision.IEEE,
    stream: Any = None,
) -> GemmCall:
    """Check a call and say what it means. Raises ``UsageError`` or ``OperandTypeError``; nothing is
    touched.
    """
    mode = check_precision(precision)
    packed = tuple(operand for operand in (a, b) if isinstance(operand, Packed))
    if packed:
        a, b = (operand.array if isinstance(operand, Packed) else operand for operand in (a, b))
    for name, flag in (
        ("transpose_a", transpose_a),
        ("transpose_b", transpose_b),
        ("return_preactivation", return_preactivation),
    ):
        if not isinstance(flag, bool):
            raise UsageError(f"{name} must be True or False, not {shown(flag)}")
    alpha, beta = scalar(alpha, "alpha"), scalar(beta, "beta")
    if beta != 0 and c is None:
        raise UsageError(f"beta is {beta}, but there is no c to scale by it; pass c, or leave beta at 0")
    if bias is None and bias_axis != -1:
        raise UsageError(f"bias_axis is {shown(bias_axis)}, but there is no bias")
    check_bias_axis(bias_axis)  # before anything is kept by it

    given = {"a": a, "b": b, "c": c, "bias": bias, "out": out}
    given = {name: array for name, array in given.items() if array is not None or name in "ab"}
    handle = _stream(given, stream)
    views = {name: view_of(array, name, handle) for name, array in given.items()}
    device = _common_device(views)
    if device is None and stream is not None:
        raise UsageError("stream is given, but the operands are on the host; accepted is None")

    if "out" in views and views["out"].readonly:
        raise UsageError("out is read-only; accepted is an array that may be written")
    product, along_c, along_bias, along_out = _fitted(
        transpose_a, transpose_b, bias_axis, *(_layout(views.get(name)) for name in OPERANDS)
    )
    if beta == 0:
        views.pop("c", None)
        along_c = None
    return GemmCall(
        views["a"],
        views["b"],
        views.get("c"),
        views.get("bias"),
        views.get("out"),
        product,
        transpose_a,
        transpose_b,
        bias_axis,
        along_c,
        along_bias,
        along_out,
        alpha,
        beta,
        activation_of(activation),
        return_preactivation,
        device,
        views["a"].framework if views["a"].device == device else views["b"].framework,
        handle,
        _other_streams(views, handle) if stream is None and device is not None else (),
        _overlap(views, product, along_c, along_out) if "out" in views and device is not None else None,
        mode,
        packed,
    )


def check_precision(precision: Precision | str) -> Precision:
    """The mode of this name; the modes to come raise ``NotBuiltError``, anything else ``UsageError``."""
    accepted = "accepted is 'ieee', and by name only 'fp16x3' and 'tf32'"
    if not isinstance(precision, str):  # what is no name may not even be comparable with one
        raise UsageError(f"precision is {kind_of(precision)}; {accepted}")
    if precision == Precision.IEEE:
        return Precision.IEEE
    if precision in PLANNED_PRECISIONS:
        raise NotBuiltError(f"precision {precision!r} is not built yet; {accepted}")
    try:
        return Precision(precision)
    except ValueError:
        raise UsageError(f"precision is {shown(precision)}; {accepted}") from None


def activation_of(activation: Activation | str | None) -> Activation:
    """The activation of this name; None for none."""
    if activation is None:
        return Activation.NONE
    if isinstance(activation, Activation):
        return activation
    found = ACTIVATIONS.get(activation) if isinstance(activation, str) else None
    if found is None:
        raise UsageError(f"activation is {shown(activation)}; accepted are None, {', '.join(ACTIVATIONS)}")
    return found


def scalar(value: Any, name: str) -> float:
    """``value`` rounded to float32, as kernels receive it."""
    if type(value) is float and value in (0.0, 1.0):
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        kind = type(value)
        raise OperandTypeError(
            f"{name} is a {kind.__module__}.{kind.__qualname__}; accepted is a real number of the host (an "
            "array's value would have to be waited for)"
        )
    try:
        exact = float(value)
        with np.errstate(over="ignore"):
            rounded = float(np.float32(exact))
        too_large = math.isinf(rounded) and not math.isinf(exact)
    except OverflowError:  # an integer beyond float64
        too_large = True
    if too_large:
        raise UsageError(f"{name} is {shown(value)}; accepted are numbers in the range of float32")
    return rounded


def _layout(view: ArrayView | None) -> Layout | None:
    return None if view is None else view.layout


@lru_cache(maxsize=4096)
def _fitted(
    transpose_a: bool,
    transpose_b: bool,
    bias_axis: int,
    a: Layout,
    b: Layout,
    c: Layout | None,
    bias: Layout | None,
    out: Layout | None,
) -> tuple[Product, Strides | None, Strides | None, Strides | None]:
    """The product, and the strides of c, bias and out along its axes; all shapes are checked."""
    product = product_of(a, b, transpose_a, transpose_b)
    check_addressable("the result", product.result_shape)
    return (
        product,
        None if c is None else addend_strides(product, c),
        None if bias is None else bias_strides(product, bias, bias_axis),
        None if out is None else out_strides(product, out),
    )


def _stream(given: Mapping[str, Any], stream: Any) -> int:
    """The stream to work on: the one asked for, else the current one of the first operand's library."""
    if stream is not None:
        from tilewave.runtime.interop import stream_handle

        return stream_handle(stream)
    for array in given.values():
        current = current_stream(array)
        if current is not None:
            return current
    return 0


def _common_device(views: dict[str, ArrayView]) -> int | None:
    """The one place where all operands lie; empty arrays that lie nowhere are moved to it."""
    placed = {name: view for name, view in views.items() if view.device != ANYWHERE}
    if len({view.device for view in placed.values()}) > 1:
        where = ", ".join(f"{name} on {view.place}" for name, view in placed.items())
        raise UsageError(f"operands lie apart: {where}; accepted are operands that all lie in one place")
    device = next(iter(placed.values())).device if placed else 0
    return device


def _other_streams(views: Mapping[str, ArrayView], stream: int) -> tuple[int, ...]:
    """Streams besides ours on which libraries of the operands work."""
    if len({view.framework for view in views.values()}) == 1 and all(
        view.producer_stream is None for view in views.values()
    ):
        return ()

    def streams() -> Iterator[int | None]:
        for view in views.values():
            yield view.producer_stream
            if view.framework in ("torch", "cupy"):
                yield current_stream(view.owner)

    return tuple({other for other in streams() if other is not None and other != stream})


def _overlap(
    views: Mapping[str, ArrayView], product: Product, along_c: Strides | None, along_out: Strides | None
) -> str | None:
    """The operand that shares memory with out so that the result must be made elsewhere first, or None.

    c may be out itself: each element is read before it is written, by the thread that writes it.
    """
    out = views["out"]
    for name, view in views.items():
        if name == "out":
            continue
        if name == "c" and view.address == out.address and same_steps(product, along_c, along_out):
            continue
        if share_memory(view.address, view.layout, out.address, out.layout):
            return name
    return None


def same_steps(product: Product, one: Strides | None, other: Strides | None) -> bool:
    """Whether two arrays of a result's shape that begin at one address have each element in one place."""
    if one is None or other is None:
        return False
    extents = (*product.batch, product.m, product.n)
    return all(mine == its for extent, mine, its in zip(extents, one, other, strict=True) if extent > 1)
