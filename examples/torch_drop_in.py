"""PyTorch inference with a layer's product, bias and activation in one kernel.

    python examples/torch_drop_in.py

Tensors go in and come out, on the GPU's current stream and without a copy; gradients would be recorded where
they are asked for. What PyTorch's switches say of TF32 does not matter here: `precision="ieee"` is float32
products and float32 sums, always. Needs PyTorch.
"""

from __future__ import annotations

from typing import Any

import tilewave


def mlp(x: Any, layers: list[tuple[Any, Any]]) -> Any:
    """Linear layers, each a pair (weight of (out, in), bias of (out,)), with gelu between them.

    A weight is stored as `torch.nn.Linear` stores it: `transpose_b` reads it so, without a copy.
    """
    for place, (weight, bias) in enumerate(layers):
        activation = "gelu" if place < len(layers) - 1 else None
        x = tilewave.gemm(x, weight, bias=bias, transpose_b=True, activation=activation)
    return x


def main() -> None:
    """A small network by PyTorch and by tilewave, on the GPU where there is one."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    linear = torch.nn.Linear
    model = torch.nn.Sequential(linear(784, 512), torch.nn.GELU(), linear(512, 10)).to(device)
    x = torch.randn(1000, 784, device=device)
    with torch.no_grad():
        ours = mlp(x, [(layer.weight, layer.bias) for layer in model if isinstance(layer, linear)])
        theirs = model.double()(x.double())
    difference = float((ours - theirs).abs().max())
    print(f"1000 rows through 784-512-10 on {device}: off by {difference:.1e} from float64")
    assert difference < 1e-4


if __name__ == "__main__":
    main()
