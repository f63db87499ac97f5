"""How far is a low-precision model from float32? A reference to hold it against, in PyTorch.

    python examples/torch_reference_check.py

A model is run in bfloat16 by autocast, and in float32 by tilewave, which is float32 whatever PyTorch's
switches say: `precision="ieee"` has no TF32 in it. Layer by layer the error of bfloat16 is told in units of
its own rounding, 2^-8, and the reference is held against float64. Needs PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch

import tilewave


def layer_outputs(model: Any, x: Any) -> list[Any]:
    """What every linear layer of a model gives for x."""
    seen: list[Any] = []
    handles = [
        layer.register_forward_hook(lambda _, __, output: seen.append(output))
        for layer in model.modules()
        if isinstance(layer, torch.nn.Linear)
    ]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return seen


def relative(error: Any, reference: Any) -> float:
    """The Frobenius norm of an error in units of the reference's."""
    return float(error.double().norm() / reference.double().norm())


def compare(model: Any, x: Any) -> list[tuple[float, float]]:
    """For each layer: the error of bfloat16 against the float32 reference, and that of the reference."""
    with tilewave.torch.override():
        reference = layer_outputs(model, x)
    with torch.autocast(x.device.type, torch.bfloat16):
        low = layer_outputs(model, x)
    exact = layer_outputs(model.double(), x.double())
    model.float()
    return [
        (relative(one - ours, ours), relative(ours - true, true))
        for one, ours, true in zip(low, reference, exact, strict=True)
    ]


def main() -> None:
    """A small network on the CPU, a wide one on a GPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    width = 4096 if device == "cuda" else 128
    torch.manual_seed(1)
    linear, gelu = torch.nn.Linear, torch.nn.GELU
    layers = [part for _ in range(4) for part in (linear(width, width), gelu())]
    model = torch.nn.Sequential(*layers, linear(width, 10)).to(device)
    errors = compare(model, torch.randn(256, width, device=device))
    print(f"Five layers, {width} wide, on {device}:")
    for place, (low, reference) in enumerate(errors):
        print(f"layer {place}: bfloat16 off by {low * 2**8:.2f} roundings, the reference by {reference:.1e}")
    assert all(reference < 1e-5 < low < 0.1 for low, reference in errors)


if __name__ == "__main__":
    main()
