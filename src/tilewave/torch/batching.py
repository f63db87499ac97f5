"""`torch.vmap` over any operands of a gemm: one product with a batch axis more, whatever is mapped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewave.errors import UsageError
from tilewave.torch.recipe import Recipe


def define(library: Any) -> None:
    """Register the rules."""
    names = torch.ops.tilewave
    for operator in (names.gemm.default, names.gemm_with_preactivation.default):
        torch.library.register_vmap(operator, _rule_of(operator), lib=library)
    torch.library.register_vmap(names.gemm_out.default, _refuse_out, lib=library)


def _rule_of(operator: Any) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Sequence[Any], a: Any, b: Any, *others: Any, **recipe: Any) -> Any:
        tensors = [
            None if tensor is None else tensor if axis is None else tensor.movedim(axis, 0)
            for tensor, axis in zip((a, b, *others), in_dims, strict=True)
        ]
        mapped = [axis is not None for axis in in_dims]
        missing = 4 - len(tensors)
        call = _Mapped((*tensors, *(None,) * missing), (*mapped, *(False,) * missing), info.batch_size)
        results = call.run(operator, Recipe(**recipe))
        return results, 0 if isinstance(results, torch.Tensor) else (0, 0)

    return rule


def _refuse_out(info: Any, in_dims: Any, *operands: Any, **recipe: Any) -> Any:
    raise UsageError(
        "out cannot be given under torch.vmap; accepted is None: take the result that is returned"
    )


class _Mapped:
    """Operands of which some have the mapped axis in front: a, b, c, bias."""

    def __init__(self, tensors: Sequence[Any], mapped: Sequence[bool], items: Any) -> None:
        self._tensors = tensors
        self._mapped = mapped
        self._items = items
        ranks = [0 if t is None else t.ndim - m for t, m in zip(tensors, mapped, strict=True)]
        if min(ranks[:2]) == 0:
            name = "ab"[ranks.index(0)]
            raise UsageError(f"each {name} is 0-dimensional (a scalar): matmul takes vectors and matrices")
        self._rows, self._columns = ranks[0] > 1, ranks[1] > 1
        self._ranks = ranks
        self._batch_axes = max(ranks[0] - self._rows, ranks[1] - self._columns) - 1

    def run(self, operator: Any, recipe: Recipe) -> Any:
        """The results of all items at once, items in front."""
        for name, flag, matrix in (
            ("a", recipe.transpose_a, self._rows),
            ("b", recipe.transpose_b, self._columns),
        ):
            if flag and not matrix:
                raise UsageError(f"transpose_{name} is set, but each {name} is a vector")
        both = self._rows and self._columns
        if recipe.bias_axis == -2 and not both:
            raise UsageError("bias_axis is -2, but each result has fewer than 2 axes besides its batch's")
        a, b, c, bias = self._tensors
        a = self._padded(a if self._rows else a.unsqueeze(-2), 0, not self._rows)
        b = self._padded(b if self._columns else b.unsqueeze(-1), 1, not self._columns)
        if not (self._mapped[0] or self._mapped[1]):  # the product has no axis for the items yet
            a = a.expand(self._items, *(1,) * (self._batch_axes + 2 - a.ndim), *a.shape)
        if c is not None:
            added = 0
            if self._ranks[2] and not self._columns:
                c, added = c.unsqueeze(-1), added + 1
            if self._ranks[2] and not self._rows:
                c, added = c.unsqueeze(-2), added + 1
            c = self._padded(c, 2, added)
        if bias is not None:
            bias = self._padded(bias, 3, 0, axes=self._batch_axes + 1)
        axis = recipe.bias_axis if self._columns or bias is None else -2
        results = operator(a, b, c, bias, **recipe._replace(bias_axis=axis)._asdict())
        if isinstance(results, torch.Tensor):
            return self._squeezed(results)
        return tuple(self._squeezed(result) for result in results)

    def _padded(self, tensor: Any, place: int, added: int, axes: int | None = None) -> Any:
        """The operand with axes of length 1 behind the mapped one, so that its own meet those of the
        others.
        """
        if not self._mapped[place]:
            return tensor
        wanted = self._batch_axes + 2 if axes is None else axes
        for _ in range(wanted - self._ranks[place] - added):
            tensor = tensor.unsqueeze(1)
        return tensor

    def _squeezed(self, result: Any) -> Any:
        if not self._columns:
            result = result.squeeze(-1)
        if not self._rows:
            result = result.squeeze(-2 if self._columns else -1)
        return result
