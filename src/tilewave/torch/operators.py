"""The operators ``torch.ops.tilewave.gemm``, ``gemm_with_preactivation`` and ``gemm_out``.

They are what PyTorch sees of tilewave wherever it must look: in graphs, under transforms, where gradients are
recorded. Each takes tensors a, b, c, bias and the fields of `Recipe` as keyword arguments, and each has a
kernel for CPU and CUDA (`compute`), one that knows shapes only (fake and meta tensors), rules for gradients
and forward mode (`gradients`) and a rule for `torch.vmap` (`batching`). Autocast has none: a product stays
float32 under it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from tilewave.arrays import refuse_dtype
from tilewave.call import activation_of, check_precision
from tilewave.errors import UsageError
from tilewave.semantics import Layout, Product, addend_strides, bias_strides, product_of
from tilewave.torch import compute
from tilewave.torch.recipe import Recipe

TENSORS = "Tensor a, Tensor b, Tensor? c=None, Tensor? bias=None"
RECIPE = (
    "float alpha=1.0, float beta=0.0, int bias_axis=-1, str? activation=None, bool transpose_a=False, "
    'bool transpose_b=False, str precision="ieee", str? schedule=None, bool deterministic=True, '
    "bool batch_invariant=False, int? max_sms=None, int? workspace_limit=None"
)
SCHEMAS = {
    "gemm": f"({TENSORS}, *, {RECIPE}) -> Tensor",
    "gemm_with_preactivation": f"({TENSORS}, *, {RECIPE}) -> (Tensor, Tensor)",
    "gemm_out": f"(Tensor(a!) out, {TENSORS}, *, {RECIPE}) -> ()",
}

LIBRARY = torch.library.Library("tilewave", "DEF")
"""Holds the registrations for as long as this module is loaded."""


def define() -> None:
    """Register the operators with everything that `operators` itself knows about them."""
    for name, schema in SCHEMAS.items():
        LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        LIBRARY.impl("gemm", _gemm, key)
        LIBRARY.impl("gemm_with_preactivation", _gemm_with_preactivation, key)
        LIBRARY.impl("gemm_out", _gemm_out, key)
    for name, fake in (
        ("gemm", _fake_gemm),
        ("gemm_with_preactivation", _fake_gemm_with_preactivation),
        ("gemm_out", _fake_gemm_out),
    ):
        torch.library.register_fake(f"tilewave::{name}", fake, lib=LIBRARY)
    names = torch.ops.tilewave
    register_flop_formula([names.gemm, names.gemm_with_preactivation], get_raw=True)(_operations)
    register_flop_formula(names.gemm_out, get_raw=True)(_operations_of_gemm_out)


def _operations(a: Any, b: Any, *others: Any, out_val: Any, transpose_a: bool = False, **recipe: Any) -> int:
    """What PyTorch's FlopCounterMode adds: two operations for each multiply-add."""
    result = out_val if isinstance(out_val, torch.Tensor) else out_val[0]
    return int(2 * a.shape[-2 if transpose_a else -1] * result.numel())


def _operations_of_gemm_out(out: Any, a: Any, *others: Any, out_val: Any = None, **recipe: Any) -> int:
    return _operations(a, *others, out_val=out, **recipe)


def _gemm(a: Any, b: Any, c: Any = None, bias: Any = None, **recipe: Any) -> Any:
    return compute.gemm(a, b, c, bias, Recipe(**recipe))


def _gemm_with_preactivation(a: Any, b: Any, c: Any = None, bias: Any = None, **recipe: Any) -> Any:
    return compute.gemm(a, b, c, bias, Recipe(**recipe), keep_preactivation=True)


def _gemm_out(out: Any, a: Any, b: Any, c: Any = None, bias: Any = None, **recipe: Any) -> None:
    compute.gemm(a, b, c, bias, Recipe(**recipe), out=out)


def _fake_gemm(a: Any, b: Any, c: Any = None, bias: Any = None, **recipe: Any) -> Any:
    product = inferred(a, b, c, bias, Recipe(**recipe))
    return a.new_empty(product.result_shape)


def _fake_gemm_with_preactivation(
    a: Any, b: Any, c: Any = None, bias: Any = None, **recipe: Any
) -> tuple[Any, Any]:
    product = inferred(a, b, c, bias, Recipe(**recipe))
    return a.new_empty(product.result_shape), a.new_empty(product.result_shape)


def _fake_gemm_out(out: Any, a: Any, b: Any, c: Any = None, bias: Any = None, **recipe: Any) -> None:
    product = inferred(a, b, c, bias, Recipe(**recipe))
    _check_tensor("out", out, a)
    if tuple(out.shape) != product.result_shape:
        raise UsageError(
            f"out of shape {tuple(out.shape)} does not fit; the result has shape "
            f"{tuple(product.result_shape)}"
        )


def inferred(a: Any, b: Any, c: Any, bias: Any, recipe: Recipe) -> Product:
    """The product of tensors that may have no memory and symbolic sizes, after the checks of `gemm`.

    Raises ``OperandTypeError`` and ``UsageError`` as a product of real tensors does.
    """
    check_precision(recipe.precision)
    activation_of(recipe.activation)
    for name, tensor in (("a", a), ("b", b), ("c", c), ("bias", bias)):
        if tensor is not None:
            _check_tensor(name, tensor, a)
    product = product_of(_layout(a), _layout(b), recipe.transpose_a, recipe.transpose_b)
    if c is not None:
        addend_strides(product, _layout(c))
    if bias is not None:
        bias_strides(product, _layout(bias), recipe.bias_axis)
    return product


def _layout(tensor: Any) -> Layout:
    return Layout(tuple(tensor.shape), tuple(tensor.stride()))


def _check_tensor(name: str, tensor: Any, first: Any) -> None:
    if tensor.dtype is not torch.float32:
        raise refuse_dtype(tensor, name, str(tensor.dtype).removeprefix("torch."))
    if tensor.device != first.device:
        raise UsageError(
            f"operands lie apart: a on {first.device}, {name} on {tensor.device}; accepted are operands that "
            "all lie in one place"
        )
