"""Errors against float64: contenders on standard data or on arrays of the user's."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tilewave.bench.accuracy.contenders import Contender
from tilewave.bench.accuracy.records import Point
from tilewave.errors import UsageError
from tilewave.precision.bounds import UNIT_ROUNDOFF, ratios_to
from tilewave.precision.data_sets import draw
from tilewave.precision.mode_bounds import mode_bound, recomputed

Float32 = NDArray[np.float32]
Operands = tuple[Float32, Float32]
Source = Callable[[int], Operands]
"""Operands of a K."""


def standard(name: str, seed: int, m: int, n: int) -> Source:
    """Operands of a standard data set, the same ones for equal arguments and K."""
    return lambda k: draw(name, np.random.default_rng((seed, k)), m, k, n)


def prefixes(a: Float32, b: Float32) -> Source:
    """The first K columns of ``a`` and rows of ``b``."""
    return lambda k: (a[:, :k], b[:k])


def load_operands(paths: Sequence[Path]) -> Operands:
    """Two matrices from two .npy files, or from one .npz that holds them as ``a`` and ``b``.

    Raises ``UsageError`` for anything but float32 matrices that can be multiplied.
    """
    accepted = "accepted are one .npz that holds a and b, or two .npy"
    if [path.suffix for path in paths] not in ([".npz"], [".npy", ".npy"]):
        raise UsageError(f"cannot take {', '.join(map(str, paths))}: {accepted}")
    try:
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(path.open("rb")) for path in paths]  # NumPy leaves damaged ones open
            if len(files) == 1:
                with np.load(files[0], allow_pickle=False) as archive:
                    if not {"a", "b"} <= set(archive.files):
                        held = ", ".join(archive.files) or "nothing"
                        raise UsageError(f"{paths[0]} holds {held}; {accepted}")
                    a, b = archive["a"], archive["b"]
            else:
                a, b = (np.load(file, allow_pickle=False) for file in files)
    except UsageError:
        raise
    except (
        Exception
    ) as error:  # missing, or damaged in one of the many ways that NumPy and zipfile tell apart
        raise UsageError(f"cannot read {' and '.join(map(str, paths))}: {error}") from error
    for name, array in (("a", a), ("b", b)):
        if array.dtype != np.float32 or array.ndim != 2:
            raise UsageError(
                f"{name} is {array.dtype} of shape {array.shape}; accepted are float32 matrices"
                + (f" (cast: {name}.astype(numpy.float32))" if array.ndim == 2 else "")
            )
    if a.shape[1] != b.shape[0] or 0 in a.shape or 0 in b.shape:
        raise UsageError(
            f"a has shape {a.shape} and b {b.shape}; accepted are (M, K) and (K, N), none of them 0"
        )
    return a, b


def sampled(a: Float32, b: Float32, m: int, n: int, seed: int) -> Operands:
    """At most ``m`` rows of a and ``n`` columns of b, drawn at random: their products are part of a @ b."""
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.permutation(a.shape[0])[:m])
    columns = np.sort(rng.permutation(b.shape[1])[:n])
    return np.ascontiguousarray(a[rows]), np.ascontiguousarray(b[:, columns])


def lengths_up_to(k: int) -> list[int]:
    """K itself and the powers of 4 from 16 on below it."""
    return [*(4**power for power in range(2, 13) if 4**power < k), k]


def measure(
    sources: Mapping[str, Source],
    lengths: Sequence[int],
    contenders: Mapping[str, Contender],
    *,
    budget: float | None = None,
    failures: dict[str, str] | None = None,
) -> Iterator[Point]:
    """Points in the order of K, data set and contender, ending before ``budget`` seconds are spent.

    With ``failures`` a contender that fails is left out from there on, and that says why; else it is raised.
    """
    begun = time.monotonic()
    for k in sorted(set(lengths)):
        for data, source in sources.items():
            a, b = source(k)
            work = a.shape[0] * b.shape[1] * k
            for key, contender in contenders.items():
                spent = time.monotonic() - begun
                if budget is not None and spent + work * contender.nanoseconds * 1e-9 > budget:
                    return
                if failures is not None and key in failures:
                    continue
                try:
                    point = point_of(data, key, contender, a, b)
                except Exception as error:  # a kernel, or a library of its own
                    if failures is None:
                        raise
                    failures[key] = f"{data}, K = {k}: {type(error).__name__}: {error}"
                    continue
                yield point


def point_of(data: str, key: str, contender: Contender, a: Float32, b: Float32) -> Point:
    """The error of a contender on these operands."""
    begun = time.monotonic()
    c = contender.multiply(a, b)
    seconds = time.monotonic() - begun
    x, y = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(all="ignore"):
        exact, terms = x @ y, np.abs(x) @ np.abs(y)
        relative = float(np.linalg.norm(c - exact) / np.linalg.norm(exact))
        componentwise = ratios_to(terms * UNIT_ROUNDOFF, c, x, y)
        in_bounds = ratios_to(mode_bound(contender.mode, a, b), c, x, y)
    share = float(recomputed(a, b).mean()) if contender.mode == "fp16x3" else 0.0
    return Point(
        data,
        a.shape[1],
        key,
        _number(relative),
        _number(float(componentwise.max())),
        _number(float(in_bounds.max())),
        share,
        round(seconds, 4),
    )


def _number(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
