"""Rounding or bug: the error of a float32 product in units of what float32 arithmetic may leave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewave.arrays import framework_of, refuse_dtype, refuse_layout, view_of
from tilewave.errors import OperandTypeError, UsageError
from tilewave.messages import kind_of, shown
from tilewave.precision.bounds import gamma
from tilewave.precision.mode_bounds import MODES, errors_in_mode_bounds, mode_coefficient, recomputed
from tilewave.semantics import product_of

_ROWS_OF_ELEMENTS = 1 << 20
"""Elements of a result that are looked at together: their float64 copies fit anywhere."""


@dataclass(frozen=True, slots=True)
class Check:
    """How far a product is from the exact one.

    ``error`` is the largest |c - exact| in units of the bound gamma_K sum |a||b| that holds for every order
    of float32 sums (`precision.bounds`): at most 1 for any correct product, infinite where a NaN or an Inf is
    wrong. ``worst`` is where that is. ``relative`` is the largest |c - exact| / |exact|, found at
    ``cancelled``, where sum |a||b| is ``cancellation`` times |exact|: a large relative error beside a large
    cancellation is no bug. ``precision`` is the mode whose bound this is, and ``recomputed`` the number of
    elements that fp16x3 computes as ieee, with that mode's bound.
    """

    k: int
    error: float
    worst: tuple[int, ...]
    wrong: int
    elements: int
    relative: float
    cancelled: tuple[int, ...]
    cancellation: float
    precision: str = "ieee"
    recomputed: int = 0

    @property
    def rounding(self) -> bool:
        """Whether rounding alone can explain every element."""
        return self.error <= 1

    def __str__(self) -> str:
        if self.elements == 0:
            return "the result is empty: nothing to check"
        bound = self._bound()
        if not self.rounding:
            return (
                f"a bug, not rounding: {self.wrong:,} of {self.elements:,} elements are further from the "
                f"exact product than {self._arithmetic} can be, which is {bound}; the worst, at "
                f"{self.worst}, by a factor of {self.error:.3g}"
            )
        verdict = f"rounding: the largest error is {self.error:.2g} times the bound, {bound}"
        if self.relative > gamma(max(1, self.k)):
            verdict += (
                f". The relative error of {self.relative:.2g} at {self.cancelled} is cancellation: the terms "
                f"there add up to {self.cancellation:.3g} times the result"
            )
        return verdict

    @property
    def _arithmetic(self) -> str:
        return "float32 arithmetic" if self.precision == "ieee" else f"the mode {self.precision}"

    def _bound(self) -> str:
        """The bound in words, of these operands."""
        if self.precision == "ieee":
            return (
                f"{gamma(self.k):.3g} of sum |a||b| (gamma_K for K = {self.k:,}; about "
                f"{2.0**-24 * max(1, self.k) ** 0.5:.1g} is typical where signs are mixed)"
            )
        share = (
            f"{mode_coefficient(self.precision, self.k):.3g} of sum |a||b| ({self.precision}, K = {self.k:,}"
        )
        if self.recomputed:
            share += (
                f"; {self.recomputed:,} of {self.elements:,} elements are out of its range: recomputed as "
                f"ieee, with {gamma(self.k):.3g}"
            )
        return f"{share})"


def check(a: Any, b: Any, c: Any, precision: str = "ieee") -> Check:
    """Tell whether ``c`` is ``a @ b`` up to rounding, and how far it is: print the answer.

    ``a`` and ``b`` are the operands, with the shapes of `matmul`, the arrays float32, from the host or a GPU
    (copied to the host, which waits for them). The exact product is computed in float64 on the CPU: 2 m n k
    operations for it and as many for the bound. The fields of the answer, a `Check`, are for programs.
    ``precision`` is the mode that ``c`` was computed in, ``"ieee"``, ``"fp16x3"`` or ``"tf32"``: each has a
    bound of its own (docs/precision.md).

    Raises ``UsageError`` where the shapes do not fit or the mode has no bound, and ``OperandTypeError`` for
    anything but float32 arrays.
    """
    if not isinstance(precision, str) or precision not in MODES:
        raise UsageError(f"precision is {shown(precision)}; accepted are {', '.join(MODES)}")
    x, y, result = (_on_host(array, name) for array, name in ((a, "a"), (b, "b"), (c, "c")))
    product = product_of(view_of(x, "a").layout, view_of(y, "b").layout)
    if result.shape != product.result_shape:
        raise UsageError(
            f"c of shape {result.shape} does not fit; the product has shape {product.result_shape}"
        )
    x = x[np.newaxis] if x.ndim == 1 else x
    y = y[:, np.newaxis] if y.ndim == 1 else y
    shape = (*product.batch, product.m, product.n)
    found = _Worst(str(precision))
    if result.size:
        x = np.broadcast_to(x, (*product.batch, *x.shape[-2:]))
        y = np.broadcast_to(y, (*product.batch, *y.shape[-2:]))
        result = result.reshape(shape)
        step = max(1, _ROWS_OF_ELEMENTS // max(product.n, product.k, 1))
        for index in np.ndindex(*product.batch):
            for row in range(0, product.m, step):
                rows = slice(row, row + step)
                found.look(result[index][rows], x[index][rows], y[index], (*index, row))
    kept = [axis for axis, keep in ((-2, product.rows), (-1, product.columns)) if not keep]

    def named(place: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(i for axis, i in enumerate(place) if axis - len(shape) not in kept)

    return Check(
        product.k,
        found.error,
        named(found.worst),
        found.wrong,
        result.size,
        found.relative,
        named(found.cancelled),
        found.cancellation,
        str(precision),
        found.recomputed,
    )


def operands_on_host(
    a: Any, b: Any, transpose_a: bool = False, transpose_b: bool = False
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Both operands of a product on the host, as (..., M, K) and (..., K, N).

    Raises as `check` does.
    """
    x, y = _on_host(a, "a"), _on_host(b, "b")
    product_of(view_of(x, "a").layout, view_of(y, "b").layout, transpose_a, transpose_b)
    x = x[np.newaxis] if x.ndim == 1 else x
    y = y[:, np.newaxis] if y.ndim == 1 else y
    return (
        x.swapaxes(-1, -2) if transpose_a else x,
        y.swapaxes(-1, -2) if transpose_b else y,
    )


class _Worst:
    """The worst elements met so far."""

    def __init__(self, precision: str) -> None:
        self.precision = precision
        self.recomputed = 0
        self.error = self.relative = 0.0
        self.cancellation = 1.0
        self.wrong = 0
        self.worst: tuple[int, ...] = ()
        self.cancelled: tuple[int, ...] = ()

    def look(self, c: NDArray[Any], a: NDArray[Any], b: NDArray[Any], origin: tuple[int, ...]) -> None:
        """Look at some rows of one item of the batch."""
        ratios = errors_in_mode_bounds(self.precision, c, a, b)
        if self.precision == "fp16x3":
            self.recomputed += int(np.count_nonzero(recomputed(a, b)))
        self.wrong += int(np.count_nonzero(~(ratios <= 1)))
        place = np.unravel_index(int(np.argmax(ratios)), ratios.shape)
        if not self.worst or ratios[place] > self.error:
            self.error, self.worst = float(ratios[place]), _moved(place, origin)
        with np.errstate(all="ignore"):
            exact = a.astype(np.float64) @ b.astype(np.float64)
            relative = np.abs(c - exact) / np.abs(exact)
        relative[~np.isfinite(relative)] = 0
        place = np.unravel_index(int(np.argmax(relative)), relative.shape)
        if not self.cancelled or relative[place] > self.relative:
            terms = np.abs(a[place[0]].astype(np.float64)) @ np.abs(b[:, place[1]].astype(np.float64))
            self.relative, self.cancelled = float(relative[place]), _moved(place, origin)
            self.cancellation = (
                float(terms / abs(exact[place])) if exact[place] and np.isfinite(exact[place]) else 1.0
            )


def _moved(place: tuple[Any, ...], origin: tuple[int, ...]) -> tuple[int, ...]:
    row, column = (int(i) for i in place)
    return (*origin[:-1], origin[-1] + row, column)


def _on_host(array: Any, name: str) -> NDArray[np.float32]:
    """A copy on the host of an array from anywhere; its own library copies it, in its own stream's order."""
    match framework_of(array):
        case "torch":
            array = _tensor_on_host(array, name)
        case "cupy":
            array = array.get()
        case "jax":
            array = np.asarray(array)
        case _ if callable(getattr(array, "to_numpy", None)):
            array = array.to_numpy()
    view = view_of(array, name)
    if view.host is None:
        raise OperandTypeError(
            f"{name} is {kind_of(array)} on a GPU, and how its library copies it to the host is not "
            "known: pass it as a NumPy array"
        )
    return view.host


def _tensor_on_host(tensor: Any, name: str) -> NDArray[np.float32]:
    """A tensor of PyTorch on the host, with its gradient and its lazy negation resolved."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype != "float32":
        raise refuse_dtype(tensor, name, dtype)
    if str(tensor.layout) != "torch.strided":
        raise refuse_layout(tensor, name)
    try:
        if tensor.untyped_storage().nbytes() < 4 * (tensor.numel() > 0):
            raise UsageError(f"{name} is {kind_of(tensor)} whose memory was freed")
        found: NDArray[np.float32] = tensor.detach().cpu().resolve_neg().numpy()
    except (RuntimeError, NotImplementedError) as error:  # meta and fake tensors, nested ones, wrappers
        raise UsageError(f"{name} is {kind_of(tensor)} without memory of its own: {error}") from error
    return found
