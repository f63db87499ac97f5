"""`grouped_gemm`: one launch for products that differ in everything, with the bits of `gemm`."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from host_gpu import CupyArray, FakeGpu
from host_staging import install
from numpy.lib.stride_tricks import as_strided
from paths import Path

import tilewave
from tilewave.errors import OperandTypeError, UsageError
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


def pick(rng: Generator, memory: Array, shape: tuple[int, int]) -> Array:
    """A matrix somewhere in ``memory``: by rows or columns, close or apart, maybe turned around."""
    rows, columns = shape
    inner = int(rng.integers(1, 3))
    pitch = inner * columns + int(rng.integers(4))
    first = int(rng.integers(memory.size - pitch * rows - inner * columns))
    if rng.integers(2):
        view = as_strided(memory[first:], (rows, columns), (4 * pitch, 4 * inner))
    else:
        pitch = inner * rows + int(rng.integers(4))
        view = as_strided(memory[first:], (rows, columns), (4 * inner, 4 * pitch))
    return view[:: int(rng.choice([1, -1])), :: int(rng.choice([1, -1]))]


def cells(memory: Array, view: Array) -> set[int]:
    """Indices in ``memory`` of a view's elements, one by one."""
    first = (view.ctypes.data - memory.ctypes.data) // 4
    return {
        first + sum(i * step // 4 for i, step in zip(index, view.strides, strict=True))
        for index in np.ndindex(view.shape)
    }


@pytest.mark.parametrize("place", ["host", "gpu"])
def test_outs_that_meet_operands_of_others_are_refused_and_no_others(
    place: str, kernels: Path, rng: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a count of elements; what is refused leaves everything as it was."""
    monkeypatch.setattr("tilewave.group.run_members", lambda members, alone: [None] * len(members))
    monkeypatch.setattr("tilewave.api.run_members", lambda members, alone: [None] * len(members))
    refused = 0
    for _ in range(60):
        memory = rng.standard_normal(int(rng.integers(150, 900))).astype(F)
        before = memory.copy()
        group, used = [], []
        for _ in range(int(rng.integers(2, 6))):
            m, n, k = (int(size) for size in rng.integers(1, 5, 3))
            given = {"a": pick(rng, memory, (m, k)), "b": pick(rng, memory, (k, n))}
            if rng.integers(4):
                given["out"] = pick(rng, memory, (m, n))
            if rng.integers(3) == 0:
                given["c"] = given["out"] if "out" in given and rng.integers(2) else pick(rng, memory, (m, n))
            beta = 0.5 if "c" in given and rng.integers(2) else 0.0
            read = [given["a"], given["b"], *([given["c"]] if beta else [])]
            used.append((read, given.get("out")))
            arguments: dict[str, Any] = dict(given) if place == "host" else on_gpu(given)
            group.append(arguments | {"beta": beta})
        meets = any(
            out is not None and cells(memory, out) & cells(memory, other)
            for i, (_, out) in enumerate(used)
            for j, (read, written) in enumerate(used)
            if i != j
            for other in [*read, *([] if written is None else [written])]
        )
        if meets:
            with pytest.raises(UsageError, match=r"^problem \d+: out shares memory with \w+ of problem \d+"):
                tilewave.grouped_gemm(group)
            refused += 1
        else:
            tilewave.grouped_gemm(group)
        assert np.array_equal(before, memory)
    assert 0 < refused < 60


def test_blocks_of_one_result_may_be_computed_side_by_side(kernels: Path, rng: Generator) -> None:
    """Outs that cover a matrix like a chess board interleave in memory and share nothing."""
    whole = np.full((24, 36), np.nan, F)
    a, b = rng.standard_normal((24, 7)).astype(F), rng.standard_normal((7, 36)).astype(F)
    tilewave.grouped_gemm(
        [
            {"a": CupyArray(a[i : i + 6]), "b": CupyArray(b[:, j : j + 9]), "out": CupyArray(out)}
            for i in range(0, 24, 6)
            for j in range(0, 36, 9)
            for out in [whole[i : i + 6, j : j + 9]]
        ]
    )
    assert len(kernels.executor.groups) == 1
    assert np.allclose(whole, a @ b, atol=1e-4)
    with pytest.raises(UsageError, match="problem 0: out shares memory with out of problem 1"):
        tilewave.grouped_gemm(
            [{"a": CupyArray(a[:6]), "b": CupyArray(b), "out": CupyArray(whole[i : i + 6])} for i in (0, 5)]
        )


def test_errors_name_the_problem_and_nothing_is_written(path: Path, rng: Generator) -> None:
    wrap = CupyArray if path.emulated else np.asarray
    a, b = rng.standard_normal((4, 5)).astype(F), rng.standard_normal((5, 6)).astype(F)
    out = np.full((4, 6), 7, F)
    good = {"a": wrap(a), "b": wrap(b), "out": wrap(out)}
    bad: list[tuple[Any, type[Exception], str]] = [
        ((wrap(a), wrap(a)), UsageError, "problem 1: a of shape"),
        ((wrap(a), wrap(b.astype(np.float64))), OperandTypeError, "problem 1: b is float64"),
        ({"a": wrap(a), "b": wrap(b), "schedule": "stream_k"}, UsageError, "problem 1: schedule stream_k"),
        ({"a": wrap(a), "b": wrap(b), "max_sms": 0}, UsageError, "problem 1: max_sms"),
        ({"a": wrap(a), "b": wrap(b), "beta": 1}, UsageError, "problem 1: beta is 1"),
        ({"a": wrap(a), "b": wrap(b), "out": wrap(out[:2])}, UsageError, "problem 1: out of shape"),
        ({"a": wrap(a), "b": wrap(b), "out": wrap(out)}, UsageError, "problem 0: out shares memory with out"),
        ({"a": wrap(out), "b": wrap(out.T)}, UsageError, "problem 0: out shares memory with a of problem 1"),
        ({"a": wrap(a), "b": wrap(b), "bias": wrap(out[0])}, UsageError, "memory with bias of problem 1"),
        ({"a": wrap(a), "b": wrap(b), "c": wrap(out), "beta": 1}, UsageError, "memory with c of problem 1"),
        (5, UsageError, "problem 1: this is an int"),
        ({"a": wrap(a), "b": wrap(b), "precision": "bf16x9"}, NotImplementedError, "problem 1: precision"),
    ]
    if not path.emulated:
        bad.append((good | {"workspace": wrap(a)}, UsageError, "problem 1: workspace is memory on a GPU"))
    for problem, kind, message in bad:
        with pytest.raises(kind, match=message):
            tilewave.grouped_gemm([good, problem])
    assert np.all(out == 7)
    unread = {"a": wrap(a), "b": wrap(b), "c": wrap(out)}  # beta is 0
    nothing = {"a": wrap(out[:, :5]), "b": wrap(b), "alpha": 0.0}
    empty = {"a": wrap(a[:0]), "b": wrap(b), "out": wrap(out[:0])}
    assert len(tilewave.grouped_gemm([good, unread, nothing, empty])) == 4


def test_groups_part_by_stream_and_options(gpu: FakeGpu, rng: Generator) -> None:
    a, b = rng.standard_normal((4, 5)).astype(F), rng.standard_normal((5, 6)).astype(F)
    own = [{}, {"max_sms": 2}, {"stream": 5}, {"max_sms": 2}, {"stream": 5}, {"alpha": 3.0}, {}]
    results = tilewave.grouped_gemm([{"a": CupyArray(a), "b": CupyArray(b)} | more for more in own])
    assert gpu.run.groups == [3, 2, 2]
    assert {one.stream for one in gpu.run.submissions} == {0, 5}
    for result, more in zip(results, own, strict=True):
        assert np.allclose(host(result), more.get("alpha", 1.0) * (a @ b), atol=1e-5)


def test_operands_of_many_problems_may_be_shared(gpu: FakeGpu, rng: Generator) -> None:
    """Thousands that read one matrix: checked in little time, told apart from one that writes it."""
    a, b = rng.standard_normal((3, 4)).astype(F), rng.standard_normal((4, 2)).astype(F)
    outs = np.full((3000, 3, 2), np.nan, F)
    given = [{"a": CupyArray(a), "b": CupyArray(b), "out": CupyArray(out)} for out in outs]
    tilewave.grouped_gemm(given)
    assert gpu.run.groups == [3000]
    assert np.allclose(outs, a @ b, atol=1e-5)
    with pytest.raises(UsageError, match="problem 3000: out shares memory with b of problem "):
        tilewave.grouped_gemm([*given, {"a": CupyArray(b), "b": CupyArray(b[:2]), "out": CupyArray(b)}])
