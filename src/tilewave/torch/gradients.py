"""Derivatives of a gemm: backward, backward of backward, and forward mode, each made of products again.

With z = alpha op(A) op(B) + beta C + bias and out = activation(z), the node of a gemm has out and, where
there is an activation, z as its outputs. What the backward pass needs of z it takes from the saved output,
which is connected to the graph, so that derivatives of every order are right. Only gradients that somebody
wants are computed, and only what they need is saved.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from tilewave.call import activation_of
from tilewave.errors import UsageError
from tilewave.problem import Activation
from tilewave.torch import compute, front
from tilewave.torch.recipe import Recipe, wants_gradient, watching


def define(library: Any) -> None:
    """Register what PyTorch does with the operators where it records gradients or carries tangents."""
    library.impl("gemm", _autograd_gemm, "Autograd", with_keyset=True)
    library.impl("gemm_with_preactivation", _autograd_with_preactivation, "Autograd", with_keyset=True)
    library.impl("gemm_out", _autograd_out, "Autograd", with_keyset=True)


def differentiable(a: Any, b: Any, c: Any, bias: Any, recipe: Recipe, keep_preactivation: bool) -> Any:
    """A gemm of plain tensors whose gradient is recorded, without the way through PyTorch's dispatcher."""
    activated = recipe.activation is not None
    result = Gemm.apply(a, b, c, bias, recipe, None, activated or keep_preactivation)
    return result if keep_preactivation or not activated else result[0]


def _autograd_gemm(keyset: Any, a: Any, b: Any, c: Any = None, bias: Any = None, **recipe: Any) -> Any:
    return _recorded(keyset, a, b, c, bias, Recipe(**recipe), False)


def _autograd_with_preactivation(
    keyset: Any, a: Any, b: Any, c: Any = None, bias: Any = None, **recipe: Any
) -> Any:
    return _recorded(keyset, a, b, c, bias, Recipe(**recipe), True)


def _autograd_out(
    keyset: Any, out: Any, a: Any, b: Any, c: Any = None, bias: Any = None, **recipe: Any
) -> None:
    if wants_gradient(a, b, c, bias, out):
        raise UsageError(OUT_AND_GRADIENTS)
    with torch._C._AutoDispatchBelowAutograd():
        below = keyset & torch._C._after_autograd_keyset
        torch.ops.tilewave.gemm_out.default.redispatch(below, out, a, b, c, bias, **recipe)


OUT_AND_GRADIENTS = (
    "out is given and an operand requires a gradient, which out= has none of; accepted is one of both: leave "
    "out=None, or call it under torch.no_grad()"
)


def _recorded(
    keyset: Any, a: Any, b: Any, c: Any, bias: Any, recipe: Recipe, keep_preactivation: bool
) -> Any:
    tracked = wants_gradient(a, b, c, bias) or any(map(_has_tangent, (a, b, c, bias)))
    if not tracked:
        return _below(keyset, a, b, c, bias, recipe, keep_preactivation)
    both = keep_preactivation or recipe.activation is not None
    # A transform of torch.func asks for this node at its own level only, and lets it be made in no other way.
    allowed = torch._C._functorch.get_single_level_autograd_function_allowed()
    torch._C._functorch.set_single_level_autograd_function_allowed(True)
    try:
        result = Gemm.apply(a, b, c, bias, recipe, keyset, both)
    finally:
        torch._C._functorch.set_single_level_autograd_function_allowed(allowed)
    return result[0] if both and not keep_preactivation else result


def _has_tangent(tensor: Any) -> bool:
    """Whether forward mode carries a derivative with a tensor; PyTorch has one level of it, number 0."""
    return tensor is not None and torch._VF._unpack_dual(tensor, level=0).tangent is not None


def _below(keyset: Any, a: Any, b: Any, c: Any, bias: Any, recipe: Recipe, keep_preactivation: bool) -> Any:
    """The operator as it is below autograd."""
    names = torch.ops.tilewave
    operator = names.gemm_with_preactivation.default if keep_preactivation else names.gemm.default
    with torch._C._AutoDispatchBelowAutograd():
        below = keyset & torch._C._after_autograd_keyset
        return operator.redispatch(below, a, b, c, bias, **recipe._asdict())


class Gemm(_SingleLevelFunction):  # type: ignore[misc]  # PyTorch is seen without types
    """The node of a gemm in PyTorch's graph; its outputs are out, or out and z."""

    @staticmethod
    def forward(ctx: Any, a: Any, b: Any, c: Any, bias: Any, recipe: Recipe, keyset: Any, both: bool) -> Any:
        """Compute; ``keyset`` is None outside PyTorch's dispatcher."""
        if keyset is None:
            result = compute.gemm(a, b, c, bias, recipe, keep_preactivation=both)
        else:
            # Outer transforms of torch.func may record what this level does not.
            with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
                result = _below(keyset, a, b, c, bias, recipe, both)
            ctx.save_for_forward(a, b, result[1] if both else None)
            ctx.result_shape = (result[0] if both else result).shape
        ctx.recipe = recipe
        ctx.shapes = (a.shape, b.shape, None if c is None else c.shape, None if bias is None else bias.shape)
        ctx.set_materialize_grads(False)
        needs = ctx.needs_input_grad
        ctx.save_for_backward(a if needs[1] else None, b if needs[0] else None, result[1] if both else None)
        return result

    @staticmethod
    def backward(ctx: Any, g_out: Any, g_z: Any = None) -> tuple[Any, ...]:
        """Gradients of a, b, c and bias."""
        if not torch.compiler.is_compiling() and not watching():
            with torch._C.DisableTorchFunction():  # a mode is asked about each look at a shape otherwise
                return _gradients(ctx, g_out, g_z)
        return _gradients(ctx, g_out, g_z)

    @staticmethod
    def jvp(ctx: Any, t_a: Any, t_b: Any, t_c: Any, t_bias: Any, *_: Any) -> Any:
        """Tangents of the outputs."""
        return _tangents(ctx, t_a, t_b, t_c, t_bias)


def _gradients(ctx: Any, g_out: Any, g_z: Any) -> tuple[Any, ...]:
    a, b, z = ctx.saved_tensors
    recipe: Recipe = ctx.recipe
    g = g_z
    if g_out is not None:
        slope = scaled_by_slope(activation_of(recipe.activation), g_out, z)
        g = slope if g is None else g + slope
    needs = ctx.needs_input_grad
    if g is None:
        return (None,) * len(needs)
    shape_a, shape_b, shape_c, shape_bias = ctx.shapes
    gradients: list[Any] = [None] * len(needs)
    rows, columns = len(shape_a) > 1, len(shape_b) > 1
    matrix = g if columns else g.unsqueeze(-1)
    matrix = matrix if rows else matrix.unsqueeze(-2)
    if needs[0]:
        wide = shape_a if rows else (1, *shape_a)
        right = b if columns else b.unsqueeze(-1)
        gradients[0] = _gradient_of_a(matrix, right, wide, recipe).reshape(shape_a)
    if needs[1]:
        wide = shape_b if columns else (*shape_b, 1)
        left = a if rows else a.unsqueeze(-2)
        gradients[1] = _gradient_of_b(matrix, left, wide, recipe).reshape(shape_b)
    if needs[2]:
        # Not 0 * g: where beta is 0, C is not read, whatever g holds.
        g_c = g if recipe.beta == 1 else g * recipe.beta
        gradients[2] = g.new_zeros(shape_c) if recipe.beta == 0 else _summed(g_c, shape_c)
    if needs[3]:
        wide = shape_bias
        if rows and columns:
            along_m = recipe.bias_axis == -2
            wide = (*shape_bias, 1) if along_m else (*shape_bias[:-1], 1, shape_bias[-1])
        gradients[3] = _summed(g, wide).reshape(shape_bias)
    return tuple(gradients)


def _tangents(ctx: Any, t_a: Any, t_b: Any, t_c: Any, t_bias: Any) -> Any:
    a, b, z = ctx.saved_tensors
    recipe: Recipe = ctx.recipe
    plain = recipe.of_gradient(recipe.transpose_a, recipe.transpose_b, recipe.alpha)
    t = None
    if t_a is not None:
        t = front.product(t_a, b, None, None, plain)
    if t_b is not None:  # this product adds the first in its epilogue
        t = front.product(a, t_b, t, None, plain if t is None else plain._replace(beta=1.0))
    matrix = len(ctx.shapes[0]) > 1 and len(ctx.shapes[1]) > 1
    for addend in (
        t_c * recipe.beta if t_c is not None and recipe.beta != 0 else None,
        None if t_bias is None else compute.bias_in_place(t_bias, recipe.bias_axis, matrix),
    ):
        if addend is not None:
            t = addend.expand(ctx.result_shape).contiguous() if t is None else t + addend
    if t is None:  # that of C alone, where beta is 0
        t = a.new_zeros(ctx.result_shape)
    if z is None:
        return t
    return scaled_by_slope(activation_of(recipe.activation), t, z), t


def scaled_by_slope(activation: Activation, g: Any, z: Any) -> Any:
    """g times the derivative of an activation at z, by functions that PyTorch can differentiate again."""
    aten = torch.ops.aten
    match activation:
        case Activation.RELU:
            return aten.threshold_backward(g, z, 0)
        case Activation.GELU:
            return aten.gelu_backward(g, z)
        case Activation.GELU_TANH:
            return aten.gelu_backward(g, z, approximate="tanh")
        case Activation.SILU:
            if torch.is_grad_enabled() or _has_tangent(g) or _has_tangent(z):
                share = torch.sigmoid(z)  # PyTorch has no derivative of silu_backward
                return g * share * (1 + z * (1 - share))
            return aten.silu_backward(g, z)
    return g


def _gradient_of_a(g: Any, b: Any, shape: tuple[Any, ...], recipe: Recipe) -> Any:
    """alpha g op(B)^T, summed over the batch axes along which A of ``shape`` repeats; all are matrices."""
    batch, (m, n) = g.shape[:-2], g.shape[-2:]
    turned = recipe.transpose_b
    if _repeats(shape[:-2], batch):  # one product with K = batch * n, in place of a batch of them and a sum
        b = b.mT if turned else b
        turned = False
        b = b.movedim(-2, 0).reshape(b.shape[-2], prod(batch) * n)
        g = g.movedim(-2, 0).reshape(m, prod(batch) * n)
    if recipe.transpose_a:
        return _summed(_product(b, g, turned, True, recipe), shape)
    return _summed(_product(g, b, False, not turned, recipe), shape)


def _gradient_of_b(g: Any, a: Any, shape: tuple[Any, ...], recipe: Recipe) -> Any:
    """alpha op(A)^T g, summed over the batch axes along which B of ``shape`` repeats; all are matrices."""
    batch, (m, n) = g.shape[:-2], g.shape[-2:]
    turned = recipe.transpose_a
    if _repeats(shape[:-2], batch):  # one product with K = batch * m
        a = a.mT if turned else a
        turned = False
        a = a.reshape(prod(batch) * m, a.shape[-1])
        g = g.reshape(prod(batch) * m, n)
    if recipe.transpose_b:
        return _summed(_product(g, a, True, turned, recipe), shape)
    return _summed(_product(a, g, not turned, False, recipe), shape)


def _repeats(own: tuple[Any, ...], batch: tuple[Any, ...]) -> bool:
    """Whether an operand with batch axes ``own`` is one and the same for several items of a batch."""
    return all(extent == 1 for extent in own) and any(extent != 1 for extent in batch)


def _product(x: Any, y: Any, transpose_x: bool, transpose_y: bool, recipe: Recipe) -> Any:
    return front.product(x, y, None, None, recipe.of_gradient(transpose_x, transpose_y, recipe.alpha))


def _summed(g: Any, shape: tuple[Any, ...]) -> Any:
    """g summed over the axes along which an operand of ``shape`` was broadcast, or g in that shape."""
    if g.shape[:-2] == tuple(shape[:-2]) and g.shape[-2:] == tuple(shape[-2:]):
        return g
    if g.ndim == 2 and len(shape) > 2:  # summed already, and there are axes of length 1 before
        return g.reshape(shape)
    return g.sum_to_size(shape)
