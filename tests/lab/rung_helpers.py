"""What the tests of the rungs share: one way to run a kernel in the emulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewave.compiler import Program, Source, compile_source
from tilewave.device import DeviceSpec, get_spec
from tilewave.emulator import LaunchResult, Memory, launch
from tilewave.lab.emulate import workspace_arguments
from tilewave.lab.launches import launch_of, sample_of_cut
from tilewave.lab.registry import Rung

Float32 = npt.NDArray[np.float32]

GB10 = "sm_121"
GPU = get_spec("GB10")
PAD = 64
"""Floats before and after each operand in its buffer: a multiple of four keeps the operand on 16 bytes."""

FRAME = np.float32(-77.5)
"""What stands around C."""


@cache
def program(rung: Rung, arch: str = GB10) -> Program:
    """All kernels of a rung."""
    return compile_source(rung.source(), rung.entries, arch)


def changed(rung: Rung, *changes: tuple[str, str]) -> Source:
    """The rung's source with each (old, new) replaced; an old text that is not there fails the test."""
    text = rung.source().text
    for old, new in changes:
        assert old in text, f"{rung.file} has no {old!r}"
        text = text.replace(old, new)
    return Source.from_text(rung.file, text)


def padded(matrix: Float32) -> Float32:
    """The matrix, flat, between NaNs: reading past its edge but inside the buffer spoils the result."""
    nans = np.full(PAD, np.nan, np.float32)
    return np.concatenate([nans, matrix.ravel(), nans])


def draw_both(rng: np.random.Generator, m: int, n: int, k: int) -> tuple[Float32, Float32]:
    """A and B whose rows and columns are each drawn from N(0,1) or from U(0,1).

    Where two of the second kind meet, nothing cancels: a check element by element sees both kinds in one run.
    """
    a, b = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)
    positive_rows, positive_columns = rng.random(m) < 0.5, rng.random(n) < 0.5
    a[positive_rows] = rng.random((positive_rows.sum(), k), np.float32)
    b[:, positive_columns] = rng.random((k, positive_columns.sum()), np.float32)
    return a, b


def multiply(
    rung: Rung, a: Float32, b: Float32, built: Program | None = None, spec: DeviceSpec = GPU, **options: Any
) -> Float32:
    """A B by the rung's kernel in the emulator: A and B amid NaNs, C amid values that must survive."""
    (m, k), n = a.shape, b.shape[1]
    built = built or program(rung)
    memory = Memory()
    buffers = [memory.put(padded(matrix), name=name) for name, matrix in (("A", a), ("B", b))]
    frame = np.full(m * n + 2 * PAD, FRAME, np.float32)
    frame[PAD:-PAD] = np.nan
    out = memory.put(frame, name="C")
    addresses = [buffer.address + 4 * PAD for buffer in (*buffers, out)]
    planned = launch_of(rung, m, n, k, spec)
    symbol = built.kernels[planned.entry].symbol
    arguments = [*addresses, m, n, k, *workspace_arguments(planned, memory)]
    launch(built.ptx, symbol, planned.grid, planned.block, arguments, memory, count=False, **options)
    written = memory.get(out)
    assert (written[:PAD] == FRAME).all(), "the kernel wrote before C"
    assert (written[-PAD:] == FRAME).all(), "the kernel wrote behind C"
    return written[PAD:-PAD].reshape(m, n)


def count(
    rung: Rung,
    m: int,
    n: int,
    k: int,
    blocks: int | Sequence[int] | Mapping[int, float] | None = None,
    built: Program | None = None,
) -> LaunchResult:
    """Counters of a product of zeros (no counter depends on the values); ``blocks`` samples the launch."""
    built = built or program(rung)
    memory = Memory()
    a, b = memory.put(np.zeros((m, k), np.float32)), memory.put(np.zeros((k, n), np.float32))
    planned = launch_of(rung, m, n, k, GPU)
    arguments = [a, b, memory.empty((m, n), np.float32), m, n, k, *workspace_arguments(planned, memory)]
    symbol = built.kernels[planned.entry].symbol
    if planned.cut is not None and isinstance(blocks, int):
        blocks = {
            block: number / len(kind) for kind, number in sample_of_cut(planned, blocks) for block in kind
        }
    return launch(built.ptx, symbol, planned.grid, planned.block, arguments, memory, blocks=blocks)
