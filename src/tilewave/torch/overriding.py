"""`override`: the float32 products of existing code through tilewave, for the length of a block."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from tilewave.api import gemm, matmul
from tilewave.call import check_precision
from tilewave.errors import UsageError
from tilewave.messages import shown
from tilewave.problem import Precision
from tilewave.semantics import broadcast_shapes
from tilewave.torch.recipe import PASSIVE_MODES, is_plain, wants_gradient

DEVICES = ("cuda", "cpu", "meta")
_KINDS = (torch.Tensor, torch.nn.Parameter, FakeTensor)


class override(TorchFunctionMode):  # type: ignore[misc]  # PyTorch is seen without types
    """``with tilewave.torch.override():`` sends the float32 products of the code inside through tilewave.

    These are ``mm``, ``addmm``, ``bmm``, ``baddbmm``, ``matmul`` (and ``@``) and ``linear``, as functions, as
    methods, in place and with ``out=``, called from Python by your code or by modules; what ``nn.Linear`` and
    ``nn.MultiheadAttention`` multiply is among them, and so are the products of the backward pass of what was
    computed inside. Shapes are those of PyTorch's functions, of any size, from ``min_size`` multiply-adds
    (batch M N K) on. ``precision`` is that of `tilewave.gemm`; TF32 switches of PyTorch have no effect.

    Everything else is PyTorch's own, untouched: other dtypes and devices, whatever autocast would compute in
    fewer bits, sparse tensors and tensor subclasses, calls that PyTorch refuses, and products that PyTorch
    makes within its own C++ (``einsum``, recurrent layers, fused attention). Tensors on the CPU go to
    PyTorch's own product.

    The block holds for its thread, and for backward passes begun in it. Leaving it, by an exception too,
    restores what was; in a block within a block the inner one counts. It works under ``torch.compile``.

    Raises ``UsageError`` for a ``min_size`` or ``precision`` that makes no sense.
    """

    def __init__(self, precision: Precision | str = Precision.IEEE, min_size: int = 0) -> None:
        super().__init__()
        check_precision(precision)
        if not isinstance(min_size, int) or isinstance(min_size, bool) or min_size < 0:
            raise UsageError(
                f"min_size is {shown(min_size)}; accepted is a number of multiply-adds (an int), at least 0"
            )
        self.precision = getattr(precision, "value", precision)
        self.min_size = min_size

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What PyTorch asks for each of its functions that is called inside."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            rule = RULES.get(func)
            answer = NotImplemented if rule is None else rule(self, *args, **kwargs)
            return func(*args, **kwargs) if answer is NotImplemented else answer
        if func in _OPENED:
            with self:
                return _opened(func)(*args, **kwargs)
        rule = RULES.get(func)
        if rule is None or _Declined.by_inner:
            return func(*args, **kwargs)
        answer = rule(self, *args, **kwargs)
        if answer is not NotImplemented:
            return answer
        _Declined.by_inner = True
        try:
            return func(*args, **kwargs)
        finally:
            _Declined.by_inner = False

    def takes(self, *tensors: Any) -> bool:
        """Whether a product of these tensors is one of float32, in one place, that tilewave computes."""
        first = tensors[0]
        for tensor in tensors:
            if (
                type(tensor) not in _KINDS
                or tensor.dtype is not torch.float32
                or tensor.layout is not torch.strided
                or tensor.is_nested
                or tensor.device != first.device
            ):
                return False
        kind = first.device.type
        if kind not in DEVICES or (kind != "meta" and torch.is_autocast_enabled(kind)):
            return False
        return torch.compiler.is_compiling() or not any(tensor.is_neg() for tensor in tensors)

    def large(self, *extents: Any) -> bool:
        """Whether a product of these extents (batch, m, n, k) is not too small."""
        if self.min_size == 0:
            return True
        size = 1
        for extent in extents:
            size = size * extent
        return bool(size >= self.min_size)


class _Declining(threading.local):
    by_inner = False


_Declined = _Declining()
"""Whether the innermost block of this thread has left the product that is being called to PyTorch."""


PASSIVE_MODES.add(override)


def _matmul(mode: override, input: Any, other: Any, *more: Any, out: Any = None, **others: Any) -> Any:
    if more or others or not mode.takes(input, other) or not input.ndim or not other.ndim:
        return NotImplemented
    rows, columns = input.ndim > 1, other.ndim > 1
    if input.shape[-1] != other.shape[-2 if columns else -1]:
        return NotImplemented
    try:
        batch = broadcast_shapes(tuple(input.shape[:-2]), tuple(other.shape[:-2]) if columns else ())
    except ValueError:
        return NotImplemented
    m, n = input.shape[-2] if rows else 1, other.shape[-1] if columns else 1
    if not mode.large(*batch, m, n, input.shape[-1]):
        return NotImplemented
    if out is None:
        return matmul(input, other, precision=mode.precision)
    shape = (*batch, *((m,) * rows), *((n,) * columns))
    if not _writable(mode, shape, out, input, other):
        return NotImplemented
    return matmul(input, other, out=out, precision=mode.precision)


def _rmatmul(mode: override, other: Any, input: Any) -> Any:
    return _matmul(mode, input, other)


def _mm(mode: override, input: Any, mat2: Any, *more: Any, out: Any = None, **others: Any) -> Any:
    if not (mode.takes(input, mat2) and input.ndim == mat2.ndim == 2):
        return NotImplemented
    return _matmul(mode, input, mat2, *more, out=out, **others)


def _bmm(mode: override, input: Any, mat2: Any, *more: Any, out: Any = None, **others: Any) -> Any:
    if not (mode.takes(input, mat2) and input.ndim == mat2.ndim == 3 and input.shape[0] == mat2.shape[0]):
        return NotImplemented
    return _matmul(mode, input, mat2, *more, out=out, **others)


def _added(
    axes: int,
    mode: override,
    input: Any,
    left: Any,
    right: Any,
    *more: Any,
    beta: Any = 1,
    alpha: Any = 1,
    out: Any = None,
    **others: Any,
) -> Any:
    """beta input + alpha left right, for addmm (2 axes) and baddbmm (3)."""
    if more or others or not mode.takes(input, left, right) or not left.ndim == right.ndim == axes:
        return NotImplemented
    if not all(isinstance(scalar, Real) and not isinstance(scalar, bool) for scalar in (alpha, beta)):
        return NotImplemented
    shape = (*left.shape[:-1], right.shape[-1])
    if left.shape[-1] != right.shape[-2] or left.shape[:-2] != right.shape[:-2]:
        return NotImplemented
    try:
        if broadcast_shapes(tuple(input.shape), shape) != shape:
            return NotImplemented
    except ValueError:
        return NotImplemented
    if not mode.large(*shape, left.shape[-1]):
        return NotImplemented
    if out is not None and not _writable(mode, shape, out, input, left, right):
        return NotImplemented
    return gemm(left, right, input, alpha=float(alpha), beta=float(beta), out=out, precision=mode.precision)


_addmm = functools.partial(_added, 2)
_baddbmm = functools.partial(_added, 3)


def _addmm_(mode: override, input: Any, left: Any, right: Any, *more: Any, **others: Any) -> Any:
    return _added(2, mode, input, left, right, *more, out=input, **others)


def _baddbmm_(mode: override, input: Any, left: Any, right: Any, *more: Any, **others: Any) -> Any:
    return _added(3, mode, input, left, right, *more, out=input, **others)


def _linear(mode: override, input: Any, weight: Any, bias: Any = None) -> Any:
    tensors = (input, weight) if bias is None else (input, weight, bias)
    if not mode.takes(*tensors) or not input.ndim or weight.ndim != 2 or input.shape[-1] != weight.shape[1]:
        return NotImplemented
    if bias is not None and bias.shape != weight.shape[:1]:
        return NotImplemented
    if not mode.large(*input.shape, weight.shape[0]):
        return NotImplemented
    return gemm(input, weight, bias=bias, transpose_b=True, precision=mode.precision)


def _writable(mode: override, shape: tuple[Any, ...], out: Any, *operands: Any) -> bool:
    """Whether a result may be written to ``out`` as it is; PyTorch resizes and refuses in its own ways."""
    return (
        not torch.compiler.is_compiling()
        and mode.takes(out, *operands)
        and is_plain(out, *operands)
        and not wants_gradient(out, *operands)
        and tuple(out.shape) == shape
        and (out.is_contiguous() or (out.ndim > 1 and out.mT.is_contiguous()))
    )


RULES: dict[Any, Callable[..., Any]] = {
    torch.matmul: _matmul,
    torch.linalg.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.Tensor.__rmatmul__: _rmatmul,
    torch.mm: _mm,
    torch.Tensor.mm: _mm,
    torch.bmm: _bmm,
    torch.Tensor.bmm: _bmm,
    torch.addmm: _addmm,
    torch.Tensor.addmm: _addmm,
    torch.Tensor.addmm_: _addmm_,
    torch.baddbmm: _baddbmm,
    torch.Tensor.baddbmm: _baddbmm,
    torch.Tensor.baddbmm_: _baddbmm_,
    torch.nn.functional.linear: _linear,
}
"""What is done in place of each function of PyTorch; the answer NotImplemented leaves it to PyTorch."""

_OPENED = frozenset(
    {
        torch.Tensor.backward,
        torch.autograd.backward,
        torch.autograd.grad,
        torch.nn.functional.multi_head_attention_forward,
        torch.svd_lowrank,
        torch.pca_lowrank,
    }
)
"""Functions that PyTorch has written in Python and inside of which it calls the above, or code of the user's
(a checkpointed forward that the backward pass repeats)."""


@functools.cache
def _opened(function: types.FunctionType) -> types.FunctionType:
    """The function with the same body that does not ask the modes about itself, so that they may be active.

    PyTorch takes a mode away while it answers for a function, and offers no other way to have its insides
    asked about.
    """
    silenced = {name: _asks_nobody for name in function.__globals__ if name.startswith("has_torch_function")}
    opened = types.FunctionType(
        function.__code__,
        {**function.__globals__, **silenced},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


def _asks_nobody(*tensors: Any) -> bool:
    return False
