"""Whether a product is PyTorch's business: looked at in every call, and without importing PyTorch."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tilewave.errors import UsageError
from tilewave.messages import kind_of

_front: Any = None
"""`tilewave.torch.front`, once there was a tensor."""


class _Within(threading.local):
    operator = False


_within = _Within()
"""Whether this thread is inside one of PyTorch's operators, where a tensor is memory with a shape."""


@contextmanager
def as_arrays() -> Iterator[None]:
    """Inside, tensors are arrays like any other, whatever PyTorch knows about them."""
    before, _within.operator = _within.operator, True
    try:
        yield
    finally:
        _within.operator = before


def front_for(*operands: Any) -> Any:
    """`tilewave.torch.front` where it must look at a product of these operands, else None.

    None among the operands is an absent one. Tensors on a GPU that are nothing but memory with a shape are
    arrays like those of other libraries, and need no front. Raises ``UsageError`` where a gradient is asked
    of a product of tensors with arrays of another library.
    """
    torch = sys.modules.get("torch")
    if torch is None or _within.operator:
        return None
    tensor = torch.Tensor
    first = operands[0]
    if not isinstance(first, tensor) and not any(isinstance(operand, tensor) for operand in operands):
        return None
    if first is None or operands[1] is None:
        return None  # a product needs both, and the check of arrays says so
    global _front
    if _front is None:
        from tilewave.torch import front

        _front = front
    for operand in operands:
        if operand is not None and not isinstance(operand, tensor):
            return _refuse_gradients(operand, [other for other in operands if isinstance(other, tensor)])
    return None if _front.ordinary(*operands) else _front


def _refuse_gradients(stranger: Any, tensors: Sequence[Any]) -> None:
    """Raise where a gradient would have to pass through an array of another library."""
    if sys.modules["torch"].is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise UsageError(
            f"a tensor that requires a gradient meets {kind_of(stranger)}; gradients pass through "
            "products of tensors only: make it one, or pass tensor.detach()"
        )
