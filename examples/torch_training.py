"""A float32 network in PyTorch, trained before and after one line.

    python examples/torch_training.py

The line is `with tilewave.torch.override():` around the same training loop. On a GPU its products, forward
and backward, run in tilewave's kernels, and the time of a step is printed: both networks are trained in
turns, so that clocks are the same for both, and the first turn, which loads kernels, does not count. On the
CPU, where sizes are tiny, products are PyTorch's own in both runs. The loss curves must agree to rounding.
Needs PyTorch.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from typing import Any

import torch

import tilewave


class Training:
    """A network of three layers, equal in every run, its data, and what came of it so far."""

    def __init__(self, width: int, batch: int, device: str) -> None:
        torch.manual_seed(1)
        linear, gelu = torch.nn.Linear, torch.nn.GELU
        layers = linear(width, width), gelu(), linear(width, width), gelu(), linear(width, 8)
        self.model = torch.nn.Sequential(*layers).to(device)
        self.optimiser = torch.optim.SGD(self.model.parameters(), lr=0.02)
        self.x, self.target = torch.randn(batch, width, device=device), torch.randn(batch, 8, device=device)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def turn(self, steps: int, block: Any) -> None:
        """Train for some steps, each inside ``block``."""
        losses = []
        if self.x.is_cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            with block:
                loss = torch.nn.functional.mse_loss(self.model(self.x), self.target)
                self.optimiser.zero_grad()
                loss.backward()
            self.optimiser.step()
            losses.append(loss.detach())
        if self.x.is_cuda:
            torch.cuda.synchronize()
        self.seconds.append((time.perf_counter() - begin) / steps)
        self.losses += torch.stack(losses).tolist()


def main() -> None:
    """Both runs, and what came of them."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    width, batch = (4096, 8192) if device == "cuda" else (64, 128)
    before, after = Training(width, batch, device), Training(width, batch, device)
    for _ in range(6):
        before.turn(5, contextlib.nullcontext())
        after.turn(5, tilewave.torch.override())
    print(f"Three layers, {width} wide, {batch} rows, on {device}:")
    for step in range(0, len(before.losses), 10):
        print(f"step {step:3}: loss {before.losses[step]:.6f} before, {after.losses[step]:.6f} after")
    if device == "cuda":
        times = [1e3 * statistics.median(run.seconds[1:]) for run in (before, after)]
        print(f"{times[0]:.2f} ms a step before, {times[1]:.2f} ms after")
    assert after.losses[-1] < after.losses[0]
    pairs = zip(before.losses, after.losses, strict=True)
    assert all(abs(one - other) < 1e-3 * one for one, other in pairs)


if __name__ == "__main__":
    main()
