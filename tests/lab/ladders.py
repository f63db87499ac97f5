"""Ladders made up for tests of records, tables and pictures."""

from __future__ import annotations

import statistics
from dataclasses import fields

import numpy as np

from tilewave.lab.records import BaselineRow, Build, Check, Counted, Ladder, Outcome, Row, Speed


def _counted(rng: np.random.Generator, shared: bool) -> Counted:
    figures = {field.name: int(rng.integers(1 << 20, 1 << 30)) for field in fields(Counted)}
    figures = {name: value * (shared or "shared" not in name) for name, value in figures.items()}
    return Counted(**figures | {"thread_fma": 1 << 33, "warp_instructions": 1 << 29})


def _speed(milliseconds: tuple[float, ...], size: int, share: float) -> Speed:
    return Speed(milliseconds, 3, 2e-9 * size**3 / statistics.median(milliseconds), 0.02, share)


def made_up_ladder(
    rng: np.random.Generator, *, timed: bool = True, sizes: tuple[int, ...] = (1024, 2049), rungs: int = 12
) -> Ladder:
    """A ladder of plausible records with random figures."""
    ladder = Ladder(device="NVIDIA Example" if timed else "GB10", emulated=not timed)
    ladder.sessions.append({"date": "2026-01-01T00:00:00+00:00", "gpu": "NVIDIA Example" if timed else None})
    ladder.notes.append("made up")
    for size in sizes:
        for number in range(1, rungs + 1):
            milliseconds = tuple(float(ms) for ms in rng.uniform(0.9, 1.1, 5) * 2e-9 * size**3 / (4 * number))
            shared = number >= 3
            ladder.put(
                Row(
                    rung=number,
                    name=f"sgemm_{number:02d}_made_up",
                    title=f"made up {number}",
                    size=size,
                    key=f"{rng.integers(1 << 62):016x}",
                    session=0,
                    build=Build("sm_121", "NVRTC 13.5.37", int(rng.integers(24, 255)), 0, 8 * (number == 6),
                                8 * (number == 6), 32768 * shared, 256, 2, 0.3125,
                                ("registers", "shared memory"), 64),
                    counted=_counted(rng, shared),
                    checks=(Check("GPU" if timed else "emulator", (131, 261, 67), float(rng.random())),),
                    speed=_speed(milliseconds, size, 0.05 * number) if timed else None,
                    difference=1e-4 if timed else None,
                    outcomes=(Outcome("passes per read", "5", "5.00", True),
                              Outcome("registers", "128", "168", False),
                              Outcome("conflicts", "none", "", None)),
                    reported="+19 %" if number == 6 else "",
                )
            )  # fmt: skip
        if timed:
            ladder.put_baseline(BaselineRow("cuBLAS through torch 2.11.0", size, 0,
                                            Speed((1.0,), 2, 50.0, 0.01), 0.01))  # fmt: skip
    return ladder
