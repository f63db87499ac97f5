"""Products with every feature of gemm, of small integers, so that float32 and float64 agree to the bit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

Rng = np.random.Generator


@dataclass
class Sample:
    """Arguments of gemm: shapes of the tensors, and the rest."""

    a: tuple[int, ...]
    b: tuple[int, ...]
    c: tuple[int, ...] | None = None
    bias: tuple[int, ...] | None = None
    more: dict[str, Any] = field(default_factory=dict)

    def tensors(self, rng: Rng, requires_grad: bool = True) -> dict[str, Any]:
        """Tensors of integers from -3 to 3, each in a random layout."""
        shapes = {"a": self.a, "b": self.b, "c": self.c, "bias": self.bias}
        made = {name: integers(rng, shape) for name, shape in shapes.items() if shape is not None}
        return {name: tensor.requires_grad_(requires_grad) for name, tensor in made.items()}


def integers(rng: Rng, shape: tuple[int, ...]) -> Any:
    """A float32 tensor of integers from -3 to 3: in C order, with its axes in another order, or with gaps."""
    kind = rng.integers(3)
    values = torch.from_numpy(rng.integers(-3, 4, shape).astype(np.float32))
    if kind == 1:
        order = [int(axis) for axis in rng.permutation(len(shape))]
        back = [order.index(axis) for axis in range(len(shape))]
        return values.permute(order).contiguous().permute(back)
    if kind == 2:
        storage = torch.full(tuple(extent + 2 for extent in shape), float("nan"))
        inside = storage[tuple(slice(1, -1) for _ in shape)]
        inside.copy_(values)
        return inside
    return values


SAMPLES = [
    Sample((3, 4), (4, 5)),
    Sample((4, 3), (5, 4), more={"transpose_a": True, "transpose_b": True}),
    Sample((3, 4), (5, 4), bias=(5,), more={"transpose_b": True}),
    Sample((4, 3), (4, 5), bias=(3,), more={"transpose_a": True, "bias_axis": -2, "alpha": -2.0}),
    Sample((3, 4), (4, 5), c=(3, 5), more={"alpha": 0.5, "beta": 2.0}),
    Sample((3, 4), (4, 5), c=(5,), more={"beta": -1.0}),
    Sample((3, 4), (4, 5), c=(3, 1), more={"beta": 0.0}),
    Sample((3, 4), (4, 5), c=(), more={"beta": 1.0, "alpha": 0.0}),
    Sample((2, 3, 4), (2, 4, 5), bias=(2, 3), more={"bias_axis": -2}),
    Sample((6, 3, 4), (4, 5), bias=(5,)),
    Sample((6, 4, 3), (5, 4), more={"transpose_a": True, "transpose_b": True}),
    Sample((3, 4), (6, 4, 5), c=(6, 1, 1), more={"beta": 1.0}),
    Sample((4, 3), (6, 5, 4), more={"transpose_a": True, "transpose_b": True, "alpha": 2.0}),
    Sample((1, 3, 4), (6, 4, 5)),
    Sample((2, 1, 3, 4), (1, 3, 4, 5), bias=(2, 1, 5)),
    Sample((2, 3, 3, 4), (3, 4, 5)),
    Sample((1, 1, 3, 4), (4, 5)),
    Sample((4,), (4, 5), bias=(5,)),
    Sample((4,), (6, 4, 5), c=(6, 5), more={"beta": 3.0}),
    Sample((3, 4), (4,), bias=(3,)),
    Sample((6, 3, 4), (4,), bias=(6, 3), more={"alpha": 2.0}),
    Sample((4,), (4,), c=(), more={"beta": 1.0}),
    Sample((0, 4), (4, 5)),
    Sample((3, 0), (0, 5), bias=(5,)),
    Sample((0, 3, 4), (4, 5)),
]
LINEAR = range(len(SAMPLES))


def reference(
    a: Any,
    b: Any,
    c: Any = None,
    bias: Any = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias_axis: int = -1,
    activation: str | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
) -> Any:
    """gemm by PyTorch's own functions, in the dtype of the operands."""
    z = alpha * torch.matmul(a.mT if transpose_a else a, b.mT if transpose_b else b)
    if c is not None:
        z = z + beta * c
    if bias is not None:
        matrix = a.ndim > 1 and b.ndim > 1
        z = z + (bias.unsqueeze(-1 if bias_axis == -2 else -2) if matrix else bias)
    functional = torch.nn.functional
    curves: dict[str | None, Any] = {
        None: lambda x: x,
        "relu": torch.relu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "silu": functional.silu,
    }
    return curves[activation](z)


def doubled(tensors: dict[str, Any]) -> dict[str, Any]:
    """Leaves of float64 with the same values."""
    return {name: t.detach().double().requires_grad_(t.requires_grad) for name, t in tensors.items()}
