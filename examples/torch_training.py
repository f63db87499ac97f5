"""A float32 network in PyTorch, trained before and after one line.

    python examples/torch_training.py

The line is `with tilewave.torch.override():` around the same training loop. On a GPU its products, forward
and backward, run in tilewave's kernels, and the time of a step is printed; on the CPU, where sizes are tiny,
they are PyTorch's own in both runs. The loss curves must agree to rounding. Needs PyTorch.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch

import tilewave


def network(width: int, outputs: int) -> Any:
    """Three layers with gelu between them."""
    linear, gelu = torch.nn.Linear, torch.nn.GELU
    return torch.nn.Sequential(
        linear(width, width), gelu(), linear(width, width), gelu(), linear(width, outputs)
    )


def train(width: int, batch: int, steps: int, device: str, block: Any) -> tuple[list[float], float]:
    """Losses of every step, and the seconds that a step takes once the first ones are over."""
    torch.manual_seed(1)
    model = network(width, 8).to(device)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.02)
    x, target = torch.randn(batch, width, device=device), torch.randn(batch, 8, device=device)
    losses, warm = [], steps // 3
    begin = time.perf_counter()
    for step in range(steps):
        if step == warm:
            if device == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
        with block:
            loss = torch.nn.functional.mse_loss(model(x), target)
            optimiser.zero_grad()
            loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    curve = torch.stack(losses).tolist()  # waits for the GPU
    return curve, (time.perf_counter() - begin) / (steps - warm)


def main() -> None:
    """Both runs, and what came of them."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = (4096, 8192, 30) if device == "cuda" else (64, 128, 30)
    before, seconds_before = train(*sizes, device, contextlib.nullcontext())
    after, seconds_after = train(*sizes, device, tilewave.torch.override())
    for step in range(0, sizes[2], 10):
        print(f"step {step:3}: loss {before[step]:.6f} before, {after[step]:.6f} after")
    if device == "cuda":
        print(f"{1e3 * seconds_before:.2f} ms a step before, {1e3 * seconds_after:.2f} ms after")
    assert after[-1] < after[0]
    assert all(abs(one - other) < 1e-3 * one for one, other in zip(before, after, strict=True))


if __name__ == "__main__":
    main()
