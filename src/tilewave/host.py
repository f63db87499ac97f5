"""Products of host arrays without a GPU: NumPy's BLAS, then the epilogue in float32.

The contract. The product of two matrices has the bits of ``numpy.matmul`` on the same arrays; with strides
that BLAS does not take, those of ``numpy.matmul`` on contiguous copies. The epilogue rounds to float32 after
each of its operations, in the order alpha, beta * C, bias, activation; the activations that need a
transcendental function compute it in float64 and round once. These are not the bits of a GPU, whose sums have
another order. Modes other than ``ieee`` compute the product by their model instead (`tilewave.precision`).
As everywhere: C is not read where beta is 0, nor A and B where alpha is 0 or K is 0; NaN and
infinities go where IEEE arithmetic takes them; out may be strided or overlap an operand.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewave.call import GemmCall
from tilewave.errors import DeviceError
from tilewave.outputs import from_host, written
from tilewave.problem import Activation, Precision

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

_ELEMENTS_AT_ONCE = 1 << 16
"""Elements of float64 that an activation holds at a time."""


def gpu_for_host_operands() -> int | None:
    """The GPU on which products of host arrays run; None where there is none that can be used.

    Raises ``DeviceError`` in the fork of a process that used CUDA: there is a GPU, and it is out of reach.
    """
    from tilewave.device.driver import FORKED, ProcessState
    from tilewave.runtime.driver import probe

    if ProcessState.forked:
        raise DeviceError(FORKED)

    return 0 if probe().usable else None


def run_on_host(call: GemmCall) -> Any:
    """Compute a call whose operands are on the host; the result in the library of a."""
    product = call.product
    result, before = _gemm(call, (*product.batch, product.m, product.n))
    result = result.reshape(product.result_shape)
    if call.out is None:
        finished = from_host(call.framework, result)
    else:
        assert call.out.host is not None  # operands are on the host
        call.out.host[...] = result
        finished = written(call.out)
    if before is None:
        return finished
    return finished, from_host(call.framework, before.reshape(product.result_shape))


def _gemm(call: GemmCall, shape: tuple[int, ...]) -> tuple[Float32, Float32 | None]:
    """A new array of ``shape`` = (*batch, m, n), and what the activation was applied to if that is kept."""
    beta = np.float32(call.beta)
    with np.errstate(all="ignore"):  # overflow to Inf and NaN from Inf - Inf are results, not incidents
        if call.reads_product:
            a, b = matrices(call)
            result = _product(call.precision, _for_blas(a), _for_blas(b))
            if call.alpha != 1:
                result *= np.float32(call.alpha)
        else:
            result = np.zeros(shape, np.float32)
        addend, bias = addends(call)
        if addend is not None:
            result += beta * addend  # rounded before it is added
        if bias is not None:
            result += bias
        before = result.copy() if call.keep_preactivation else None
        activate(call.activation, result)
    return result, before


def _product(precision: Precision, a: Float32, b: Float32) -> Float32:
    if precision is Precision.IEEE:
        product: Float32 = np.matmul(a, b, order="C")
        return product
    from tilewave.precision.dispatch import product_of_model

    return product_of_model(precision, a, b)


def matrices(call: GemmCall) -> tuple[Float32, Float32]:
    """a and b of a call on the host as (..., m, k) and (..., k, n), transposed where asked; no copies."""
    a, b = call.a.host, call.b.host
    assert a is not None  # operands are on the host
    assert b is not None
    a = a[np.newaxis] if a.ndim == 1 else a
    b = b[:, np.newaxis] if b.ndim == 1 else b
    return (
        a.swapaxes(-1, -2) if call.transpose_a else a,
        b.swapaxes(-1, -2) if call.transpose_b else b,
    )


def addends(call: GemmCall) -> tuple[Float32 | None, Float32 | None]:
    """c (where beta is not 0) and bias of a call on the host, as they broadcast to (*batch, m, n)."""
    product = call.product
    c = None if call.c is None else call.c.host
    if c is not None:
        c = np.broadcast_to(c, product.result_shape)
        c = c if product.columns else c[..., np.newaxis]
        c = c if product.rows else c[..., np.newaxis, :]
    bias = None if call.bias is None else call.bias.host
    if bias is not None:
        along_m = call.bias_axis == -2 or not product.columns
        bias = bias[..., np.newaxis] if along_m else bias[..., np.newaxis, :]
    return c, bias


def activate(activation: Activation, values: Float32) -> None:
    """Apply an activation to ``values``, a contiguous array, in place; NaN stays NaN."""
    if activation is Activation.NONE:
        return
    if activation is Activation.RELU:
        values[values < 0] = 0
        return
    curve = _CURVES[activation]
    flat = values.reshape(-1)
    for begin in range(0, flat.size, _ELEMENTS_AT_ONCE):
        part = flat[begin : begin + _ELEMENTS_AT_ONCE]
        part[...] = curve(part.astype(np.float64))


def _gelu(x: Float64) -> Float64:
    # The C library's erf, element by element: NumPy has none.
    erf = np.fromiter(map(math.erf, (x * math.sqrt(0.5)).tolist()), np.float64, x.size)
    return 0.5 * x * (1 + erf)


def _gelu_tanh(x: Float64) -> Float64:
    bent: Float64 = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return 0.5 * x * (1 + bent)


def _silu(x: Float64) -> Float64:
    grown: Float64 = np.exp(-x)
    return x / (1 + grown)


_CURVES = {Activation.GELU: _gelu, Activation.GELU_TANH: _gelu_tanh, Activation.SILU: _silu}


def _for_blas(array: Float32) -> Float32:
    """The array, or a contiguous copy where NumPy would leave BLAS and sum element by element.

    BLAS takes a matrix when one of its last two axes has stride 1 element and the other a positive one that
    reaches past it.
    """
    rows, columns = array.shape[-2:]
    row, column = array.strides[-2:]
    item = array.itemsize
    by_rows = (column == item or columns == 1) and (row >= columns * item or rows == 1)
    by_columns = (row == item or rows == 1) and (column >= rows * item or columns == 1)
    aligned = array.flags.aligned and row % item == 0 and column % item == 0
    return array if aligned and (by_rows or by_columns) else _compact(array)


def _compact(array: Float32) -> Float32:
    """A contiguous copy; axes along which one element repeats stay repeated instead of filling memory."""
    kept: list[Any] = [
        slice(0, 1) if stride == 0 and axis < array.ndim - 2 else slice(None)
        for axis, stride in enumerate(array.strides)
    ]
    return np.broadcast_to(np.ascontiguousarray(array[tuple(kept)]), array.shape)
