"""The arithmetic behind the operators: tilewave's kernels on a GPU, PyTorch's own product on the CPU.

Everything here sees plain tensors with memory. Results are contiguous, on every device, as the shape-only
versions of the operators promise.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewave import api, recording, warm
from tilewave.call import GemmCall
from tilewave.problem import Activation, Precision
from tilewave.torch.recipe import PLAIN, Recipe


def gemm(
    a: Any,
    b: Any,
    c: Any,
    bias: Any,
    recipe: Recipe,
    *,
    out: Any = None,
    keep_preactivation: bool = False,
) -> Any:
    """The result of a gemm, or the pair of result and preactivation.

    Raises as `tilewave.gemm` does, before anything is written.
    """
    by_torch = computed_by_torch(a, recipe)
    found: Any = warm.MISSED
    if not by_torch and not keep_preactivation and recipe.precision == "ieee":
        # None is what `tilewave.matmul` keeps its launches by.
        found = warm.compute(a, b, c, bias, out, None, None if recipe is PLAIN else recipe)
        if type(found) is not warm.Miss:
            return found
    call, options, _ = api._collected(
        a, b, c, bias=bias, out=out, return_preactivation=keep_preactivation, **recipe.arguments()
    )
    if not by_torch:
        result = api._execute(call, options, None)
        warm.keep(found, call, options)
        return result
    if recording.ACTIVE:
        recording.note(call)
    # Neither autocast nor modes of PyTorch's functions, `override` among them, have a say in here.
    with torch._C.DisableTorchFunction(), torch._C._DisableAutocast(), torch.no_grad():
        return _on_host(call, a, b, c, bias, out)


def computed_by_torch(a: Any, recipe: Recipe) -> bool:
    """Whether PyTorch's own product is what was asked for: float32 arithmetic on the CPU."""
    return a.is_cpu and recipe.precision == Precision.IEEE and not reduced_on_host()


def reduced_on_host() -> bool:
    """Whether PyTorch was told to multiply float32 on the CPU in fewer bits."""
    return torch.backends.mkldnn.matmul.fp32_precision not in ("ieee", "none")


def _on_host(call: GemmCall, a: Any, b: Any, c: Any, bias: Any, out: Any) -> Any:
    shape = call.product.result_shape
    if call.reads_product:
        left = a.mT if call.transpose_a else a
        right = b.mT if call.transpose_b else b
        before = torch.matmul(left, right).contiguous()
        if call.alpha != 1:
            before.mul_(call.alpha)
    else:
        before = a.new_zeros(shape)  # not in the default dtype
    if call.c is not None:
        before.add_(c, alpha=call.beta)
    if bias is not None:
        matrix = call.product.rows and call.product.columns
        before.add_(bias_in_place(bias, call.bias_axis, matrix))
    result = activated(call.activation, before)
    if out is not None:
        out.copy_(result)
        result = out
    elif result is before and call.keep_preactivation:
        result = before.clone()  # an operator's results share no memory
    return (result, before) if call.keep_preactivation else result


def bias_in_place(bias: Any, axis: int, matrix: bool) -> Any:
    """A bias as it broadcasts to the result, which has both axes of a matrix or one of a vector."""
    return bias.unsqueeze(-1 if axis == -2 else -2) if matrix else bias


def activated(activation: Activation, x: Any) -> Any:
    """An activation by PyTorch's own function; differentiable."""
    functional = torch.nn.functional
    match activation:
        case Activation.RELU:
            return functional.relu(x)
        case Activation.GELU:
            return functional.gelu(x)
        case Activation.GELU_TANH:
            return functional.gelu(x, approximate="tanh")
        case Activation.SILU:
            return functional.silu(x)
    return x
