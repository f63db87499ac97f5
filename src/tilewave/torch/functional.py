"""Functions in place of those of ``torch.nn.functional``."""

from __future__ import annotations

from typing import Any

from tilewave.api import gemm
from tilewave.errors import TilewaveError
from tilewave.problem import Activation, Precision


def linear(
    input: Any,
    weight: Any,
    bias: Any = None,
    *,
    activation: Activation | str | None = None,
    precision: Precision | str = Precision.IEEE,
) -> Any:
    """activation(input weight^T + bias) in one kernel, as ``torch.nn.functional.linear`` without activation.

    ``input`` is (..., in), ``weight`` (out, in) or (in,), ``bias`` (out,) or (): the shapes of PyTorch's
    function; all are float32, under autocast too. ``activation`` is None, "relu", "gelu" (with erf),
    "gelu_tanh" or "silu". Gradients of all three are recorded.

    Raises as `tilewave.gemm` does.
    """
    try:
        if getattr(weight, "ndim", 2) == 1:
            # One output without an axis of its own: bias is a number, which broadcasts like a C.
            beta = 0.0 if bias is None else 1.0
            return gemm(input, weight, bias, beta=beta, activation=activation, precision=precision)
        return gemm(input, weight, bias=bias, transpose_b=True, activation=activation, precision=precision)
    except TilewaveError as error:
        error.args = (f"linear (input is a, weight b): {error}", *error.args[1:])
        raise
