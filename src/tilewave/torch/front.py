"""How a product of tensors is computed: as one of arrays, as a node of a graph, or by PyTorch's dispatcher.

A plain tensor on a GPU of which nobody records anything is an array like any other. Everything else about a
tensor (gradients, transforms, graphs, modes, subclasses) is PyTorch's, and is asked for by calling an
operator; gradients of plain tensors, the everyday case of training, skip PyTorch's dispatcher on the way.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewave.arrays import refuse_dtype, refuse_layout, refuse_negated
from tilewave.call import activation_of, check_precision
from tilewave.errors import UsageError
from tilewave.messages import shape_and_strides, shown
from tilewave.planner.gemm.options import MOST_COUNTED, PlanOptions
from tilewave.problem import Activation
from tilewave.semantics import check_bias_axis
from tilewave.torch import compute, gradients
from tilewave.torch.recipe import (
    ACTIVATION_NAMES,
    PLAIN,
    PLAIN_TYPES,
    Recipe,
    is_plain,
    rounded,
    spelled,
    wants_gradient,
)


def product(a: Any, b: Any, c: Any, bias: Any, recipe: Recipe, keep_preactivation: bool = False) -> Any:
    """A gemm of tensors by the shortest way that loses nothing of what PyTorch knows about them."""
    if not torch.compiler.is_compiling() and is_plain(a, b, c, bias):
        return _of_plain(a, b, c, bias, recipe, keep_preactivation)
    return _by_operator(a, b, c, bias, recipe, keep_preactivation)


def _of_plain(a: Any, b: Any, c: Any, bias: Any, recipe: Recipe, keep_preactivation: bool) -> Any:
    if wants_gradient(a, b, c, bias):
        return gradients.differentiable(a, b, c, bias, recipe, keep_preactivation)
    return compute.gemm(a, b, c, bias, recipe, keep_preactivation=keep_preactivation)


def _by_operator(a: Any, b: Any, c: Any, bias: Any, recipe: Recipe, keep_preactivation: bool) -> Any:
    names = torch.ops.tilewave
    operator = names.gemm_with_preactivation.default if keep_preactivation else names.gemm.default
    return operator(a, b, c, bias, **recipe._asdict())


def ordinary(*tensors: Any) -> bool:
    """Whether tensors (None for an absent one) are arrays like any other, on a GPU."""
    return (
        not torch.compiler.is_compiling()
        and not wants_gradient(*tensors)
        and is_plain(*tensors)
        and not tensors[0].is_cpu
    )


def matmul(a: Any, b: Any, *, out: Any = None, precision: Any = "ieee", stream: Any = None) -> Any:
    """`tilewave.matmul` of tensors that are not `ordinary`."""
    if (
        out is None
        and stream is None
        and isinstance(precision, str)
        and precision == "ieee"
        and not torch.compiler.is_compiling()
        and is_plain(a, b)
    ):
        return _of_plain(a, b, None, None, PLAIN, False)
    return gemm(a, b, out=out, precision=precision, stream=stream)


def gemm(
    a: Any,
    b: Any,
    c: Any = None,
    *,
    alpha: Any = 1.0,
    beta: Any = 0.0,
    bias: Any = None,
    bias_axis: int = -1,
    activation: Any = None,
    return_preactivation: bool = False,
    transpose_a: bool = False,
    transpose_b: bool = False,
    out: Any = None,
    precision: Any = "ieee",
    schedule: Any = None,
    deterministic: bool = True,
    batch_invariant: bool = False,
    max_sms: int | None = None,
    workspace: Any = None,
    stream: Any = None,
) -> Any:
    """`tilewave.gemm` of tensors that are not `ordinary`."""
    where = "where tensors are on the CPU, or their product is differentiated, compiled or mapped"
    if stream is not None:
        raise UsageError(
            f"stream is given, which it cannot be {where}; accepted is None: PyTorch's current stream is "
            "used, which torch.cuda.stream() sets"
        )
    if workspace is not None and not isinstance(workspace, int):
        raise UsageError(
            f"workspace is memory, which it cannot be {where}; accepted are None and a number of bytes"
        )
    plain = not torch.compiler.is_compiling() and is_plain(a, b, c, bias, out)
    if not plain:
        for name, tensor in (("a", a), ("b", b), ("c", c), ("bias", bias), ("out", out)):
            if tensor is not None:
                _check(name, tensor)
        if not torch.compiler.is_compiling():  # what an operator would refuse in PyTorch's words, or coerce
            check_precision(precision)
            activation_of(activation)
            check_bias_axis(bias_axis)
            limit = {} if workspace is None else {"workspace_limit": workspace}
            PlanOptions(schedule, deterministic, batch_invariant, max_sms, **limit)
    for name, flag in (
        ("transpose_a", transpose_a),
        ("transpose_b", transpose_b),
        ("return_preactivation", return_preactivation),
    ):
        if flag is not True and flag is not False:
            raise UsageError(f"{name} must be True or False, not {shown(flag)}")
    recipe = Recipe(
        rounded(alpha, "alpha"),
        rounded(beta, "beta"),
        bias_axis,
        ACTIVATION_NAMES[activation] if isinstance(activation, Activation) else activation,
        transpose_a,
        transpose_b,
        getattr(precision, "value", precision),
        spelled(schedule),
        deterministic,
        batch_invariant,
        _counted(max_sms),
        _counted(workspace),
    )
    if out is None:
        compute_it = _of_plain if plain else _by_operator
        return compute_it(a, b, c, bias, recipe, return_preactivation)
    if wants_gradient(a, b, c, bias, out):
        raise UsageError(gradients.OUT_AND_GRADIENTS)
    if plain and out.is_inference() and not torch.is_inference_mode_enabled():  # PyTorch refuses once written
        raise UsageError(
            f"out{shape_and_strides(out)} was made in inference mode, outside of which it may not be "
            "written; accepted is a clone of it, or a call in torch.inference_mode()"
        )
    if return_preactivation:
        raise UsageError("out is given with return_preactivation; accepted for such tensors is one of both")
    if plain:
        return compute.gemm(a, b, c, bias, recipe, out=out)
    torch.ops.tilewave.gemm_out.default(out, a, b, c, bias, **recipe._asdict())
    return out


def _counted(limit: Any) -> Any:
    """A limit as an operator can be told; one beyond what 64 bits can count is none."""
    return min(limit, MOST_COUNTED) if isinstance(limit, int) else limit


def _check(name: str, tensor: Any) -> None:
    """Refuse what an operator would misread, as `view_of` does for plain tensors."""
    if tensor.dtype is not torch.float32:
        raise refuse_dtype(tensor, name, str(tensor.dtype).removeprefix("torch."))
    if type(tensor) in PLAIN_TYPES and tensor.device.type not in ("cuda", "cpu", "meta"):
        raise UsageError(f"{name} is a tensor on {tensor.device}; accepted are tensors on cuda and cpu")
    if tensor.layout is not torch.strided:
        raise refuse_layout(tensor, name)
    if not torch.compiler.is_compiling() and tensor.is_neg():
        raise refuse_negated(name)
