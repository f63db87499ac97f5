"""`grouped_gemm`: one launch for products that differ in everything, with the bits of `gemm`."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from host_gpu import CupyArray
from host_staging import install
from numpy.lib.stride_tricks import as_strided
from paths import Path

import tilewave
from tilewave.precision import ieee_bound

F = np.float32
Array = np.ndarray[Any, Any]
Generator = np.random.Generator
LAYOUTS = ("rows", "columns", "padded", "strided", "reversed", "rows reversed", "offset")


def lay_out(rng: Generator, values: Array, layout: str | None = None) -> Array:
    """``values`` in memory of its own, laid out as the name says or anyhow; gaps are NaN."""
    rows, columns = values.shape
    layout = layout or str(rng.choice(LAYOUTS))
    if layout == "columns":
        return np.asfortranarray(values)
    if layout == "reversed":
        return values[::-1, ::-1].copy()[::-1, ::-1]
    if layout == "rows reversed":
        return values[::-1].copy()[::-1]
    if layout == "rows":
        return values.copy()
    gaps = {"padded": (1, 1, 3), "strided": (2, 3, 0), "offset": (1, 1, 0)}[layout]
    memory = np.full((rows * gaps[0] + 1) * (columns * gaps[1] + gaps[2]) + 1, np.nan, F)
    pitch = columns * gaps[1] + gaps[2]
    first = layout == "offset"
    view = as_strided(memory[first:], (rows, columns), (4 * pitch * gaps[0], 4 * gaps[1]))
    view[...] = values
    return view


@dataclass
class One:
    """A problem of a group with what its result must be near to, and by how much."""

    arguments: dict[str, Any]
    expected: Array
    limit: Array


def draw(rng: Generator, m: int, n: int, k: int) -> One:
    """A problem with random layouts, scalars and bias."""
    a, b = rng.standard_normal((m, k)).astype(F), rng.standard_normal((k, n)).astype(F)
    if rng.integers(3) == 0:
        a, b = np.abs(a), np.abs(b)
    alpha = float(F(rng.choice([1.0, -1.25, 0.3])))
    bound = ieee_bound(a, b) if k else np.zeros((m, n))
    value = alpha * (a.astype(np.float64) @ b.astype(np.float64))
    size = np.abs(value) + abs(alpha) * bound
    arguments: dict[str, Any] = {"alpha": alpha}
    for name, given in (("a", a), ("b", b)):
        transposed = bool(rng.integers(2))
        arguments[name] = lay_out(rng, given.T if transposed else given)
        arguments[f"transpose_{name}"] = transposed
    if rng.integers(2):
        c = rng.standard_normal((m, n)).astype(F)
        arguments |= {"c": lay_out(rng, c), "beta": -0.5}
        value, size = value - 0.5 * c.astype(np.float64), size + np.abs(c)
    if rng.integers(2):
        bias = rng.standard_normal(n).astype(F)
        arguments["bias"] = bias
        value, size = value + bias, size + np.abs(bias)
    limit = abs(alpha) * bound + 4 * 2.0**-24 * size + 2.0**-148
    if rng.integers(2):
        arguments["activation"] = "relu"
        value = np.maximum(value, 0)
    if rng.integers(2):
        arguments["out"] = lay_out(rng, np.full((m, n), np.nan, F))
    return One(arguments, value, limit)


def on_gpu(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        name: CupyArray(value) if isinstance(value, np.ndarray) else value
        for name, value in arguments.items()
    }


def host(result: Any) -> Array:
    return np.asarray(getattr(result, "host", result))


def ragged(rng: Generator) -> list[One]:
    sizes = [rng.integers(1, (40, 40, 50)) for _ in range(6)] + [(0, 5, 3), (5, 0, 3), (4, 7, 0), (1, 1, 1)]
    sizes += [(4 * rng.integers(1, 9, 3)).tolist()]
    return [draw(rng, *map(int, size)) for size in rng.permutation(np.array(sizes))]


def test_one_launch_and_the_bits_of_gemm(kernels: Path, rng: Generator) -> None:
    group = ragged(rng)
    given = [on_gpu(one.arguments) for one in group]
    results = tilewave.grouped_gemm(given, batch_invariant=True)
    (plan,) = kernels.executor.groups
    assert plan.launches == 1
    assert not kernels.plans
    alone = set(rng.permutation(len(group))[:2])  # each needs kernels of its own, which take seconds to make
    for place, (one, arguments, result) in enumerate(zip(group, given, results, strict=True)):
        found = host(result).copy()
        assert found.shape == one.expected.shape
        if "out" in arguments:
            assert result is arguments["out"]
            arguments["out"].host.fill(np.nan)
        assert np.all(np.abs(found - one.expected) <= one.limit)
        if place in alone:
            same = np.ascontiguousarray(host(tilewave.gemm(**arguments, batch_invariant=True)))
            assert np.array_equal(found.view(np.uint32), same.view(np.uint32))


def test_a_group_longer_than_an_argument_and_tiles_that_are_cut(kernels: Path, rng: Generator) -> None:
    """A table in memory, and the longest chain in pieces: still right, and the same bits again."""
    group = [draw(rng, *map(int, rng.integers(1, 12, 3))) for _ in range(45)] + [draw(rng, 17, 9, 4100)]
    results = [host(each).copy() for each in tilewave.grouped_gemm([on_gpu(one.arguments) for one in group])]
    (plan,) = kernels.executor.groups
    assert plan.table_launches > 0
    assert max(plan.pieces) > 1
    assert plan.pieces[:45] == (1,) * 45
    for one, found in zip(group, results, strict=True):
        assert np.all(np.abs(found - one.expected) <= one.limit)
    again = tilewave.grouped_gemm([on_gpu(one.arguments) for one in group])
    for found, other in zip(results, again, strict=True):
        assert np.array_equal(found, host(other))


def test_options_that_bound_the_launch(kernels: Path, rng: Generator) -> None:
    """max_sms, no workspace, a named schedule: the same products."""
    group = [draw(rng, *map(int, rng.integers(1, 20, 3))) for _ in range(40)]
    given = [on_gpu(one.arguments) for one in group]
    for options in ({"max_sms": 3}, {"workspace": 0}, {"schedule": "split_k:2"}):
        kernels.executor.groups.clear()
        for arguments in given:
            if "out" in arguments:
                arguments["out"].host.fill(np.nan)
        results = tilewave.grouped_gemm(given, **options)
        for one, result in zip(group, results, strict=True):
            assert np.all(np.abs(host(result) - one.expected) <= one.limit)
        plans = kernels.executor.groups
        assert all(plan.blocks <= options.get("max_sms", plan.blocks) for plan in plans)
        assert (len(plans) > 1) == ("workspace" in options)  # its table has no room but in arguments
        if "workspace" in options:
            assert all(plan.workspace_bytes == 0 for plan in plans)


def test_batches_vectors_and_overlap_within_a_problem(kernels: Path, rng: Generator) -> None:
    """Shapes as in gemm; an out that overlaps its own operand is made elsewhere and copied by one launch."""
    a, b = rng.standard_normal((3, 5, 6)).astype(F), rng.standard_normal((6, 6)).astype(F)
    vector = rng.standard_normal(6).astype(F)
    square = rng.standard_normal((6, 6)).astype(F)
    many = rng.standard_normal((2, 1, 2, 1, 2, 3, 4)).astype(F)
    before = square.copy()
    wrapped = CupyArray(square)
    results = tilewave.grouped_gemm(
        [
            (CupyArray(a), CupyArray(b)),
            (CupyArray(vector), CupyArray(b)),
            (CupyArray(vector), CupyArray(vector)),
            {"a": wrapped, "b": CupyArray(b), "out": wrapped},
            (CupyArray(many[::-1, :, ::-1]), CupyArray(many.swapaxes(-1, -2).copy())),
            {"a": CupyArray(b), "b": CupyArray(b), "activation": "silu", "return_preactivation": True},
        ]
    )
    assert len(kernels.executor.groups) == 2
    expected = [a @ b, vector @ b, vector @ vector, before @ b, many[::-1, :, ::-1] @ many.swapaxes(-1, -2)]
    for result, right in zip(results, expected, strict=False):
        assert host(result).shape == np.shape(right)
        assert np.allclose(host(result), right, rtol=1e-4, atol=1e-4)
    after, preactivation = results[5]
    assert np.allclose(host(preactivation), b @ b, rtol=1e-4, atol=1e-4)
    assert np.allclose(host(after), (b @ b) / (1 + np.exp(-(b @ b))), rtol=1e-4, atol=1e-4)


def test_host_arrays_on_a_gpu_travel_together(
    kernels: Path, monkeypatch: pytest.MonkeyPatch, rng: Generator
) -> None:
    stage = install(monkeypatch)
    monkeypatch.setattr("tilewave.staged_group.stager", lambda device: stage)
    monkeypatch.setattr("tilewave.staged_group.DeviceBuffer", type(stage.upload(np.zeros(1, F))))
    state = SimpleNamespace(context=nullcontext)
    monkeypatch.setattr("tilewave.staged_group.gpu_state", lambda device: state)
    monkeypatch.setattr("tilewave.group.gpu_for_host_operands", lambda: 0)
    group = ragged(rng)
    shared = group[0].arguments
    stage.uploaded.clear()
    stage.live = 0
    results = tilewave.grouped_gemm([one.arguments for one in group] + [(shared["a"].T, shared["a"])])
    assert len(stage.uploaded) == 1
    assert len(kernels.executor.groups) == 1
    assert stage.live == 0
    for one, result in zip(group, results, strict=False):
        assert np.all(np.abs(host(result) - one.expected) <= one.limit)
    monkeypatch.setattr("tilewave.staged_group.BYTES_AT_ONCE", 3000)
    again = tilewave.grouped_gemm([one.arguments for one in group], batch_invariant=True)
    assert len(stage.uploaded) > 2
    for one, result in zip(group, again, strict=True):
        assert np.all(np.abs(host(result) - one.expected) <= one.limit)


def test_no_problems(kernels: Path) -> None:
    assert tilewave.grouped_gemm([]) == []
    assert tilewave.grouped_gemm(iter([])) == []
    (empty,) = tilewave.grouped_gemm([(CupyArray(np.zeros((0, 3), F)), CupyArray(np.zeros((3, 2), F)))])
    assert host(empty).shape == (0, 2)
    assert not kernels.executor.groups
