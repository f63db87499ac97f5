"""Modules in place of those of ``torch.nn``."""

from __future__ import annotations

from typing import Any

import torch

from tilewave.call import activation_of, check_precision
from tilewave.errors import OperandTypeError
from tilewave.problem import Activation, Precision
from tilewave.torch.functional import linear


class Linear(torch.nn.Linear):  # type: ignore[misc]  # PyTorch is seen without types
    """``torch.nn.Linear`` by tilewave, with an activation in the same kernel if wanted.

    Parameters, their initial values and the state dict are those of ``torch.nn.Linear``; they are float32,
    and stay it under autocast. ``activation`` is None, "relu", "gelu", "gelu_tanh" or "silu".
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        activation: Activation | str | None = None,
        precision: Precision | str = Precision.IEEE,
    ) -> None:
        check_precision(precision)
        activation_of(activation)
        if (dtype or torch.get_default_dtype()) is not torch.float32:
            raise OperandTypeError(
                f"dtype is {dtype or torch.get_default_dtype()}; accepted is torch.float32: pass it by name "
                "where it is not the default"
            )
        super().__init__(in_features, out_features, bias, device, torch.float32)
        self.activation = activation
        self.precision = precision

    def forward(self, input: Any) -> Any:
        """The layer's output, (..., out_features), for an input of (..., in_features)."""
        return linear(input, self.weight, self.bias, activation=self.activation, precision=self.precision)

    def extra_repr(self) -> str:
        """What ``repr`` shows between the brackets."""
        shown = str(super().extra_repr())
        return shown if self.activation is None else f"{shown}, activation={self.activation!r}"
