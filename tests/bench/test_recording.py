"""Recording the products of a running program: what is noted, and that threads may share a recording."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import numpy as np
import pytest

import tilewave
from tilewave import recording
from tilewave.bench.products.shapes import products_of
from tilewave.errors import UsageError

F = np.float32


def shapes_of(recorded: recording.RecordedShapes) -> dict[str, int]:
    return {str(product): count for product, count in recorded.items()}


def test_products_are_noted_with_layouts_batches_and_counts(rng: np.random.Generator) -> None:
    m, n, k, batch = (int(size) for size in rng.integers(2, 9, 4))
    a, b = np.ones((m, k), F), np.ones((k, n), F)
    many = np.ones((batch, k, n), F)
    with tilewave.record() as shapes:
        for _ in range(3):
            tilewave.matmul(a, b)
        tilewave.matmul(np.ones((k, m), F).T, b)
        tilewave.gemm(a, np.ones((n, k), F), transpose_b=True, alpha=2)
        tilewave.matmul(a, many)
        tilewave.matmul(np.ones((batch, m, k), F), many)
        tilewave.matmul(a, np.ones(k, F))
        tilewave.grouped_gemm([(a, b), (a, b)])
    tilewave.matmul(a, b)  # outside
    size = f"{m} x {n} x {k}"
    assert shapes_of(shapes) == {
        f"{size} NN": 5,
        f"{size} TN": 1,
        f"{size} NT": 1,
        f"{batch} times {size} NN shared A": 1,
        f"{batch} times {size} NN": 1,
        f"{m} x 1 x {k} NN": 1,
    }


def test_what_computes_nothing_and_what_is_refused_is_not_noted() -> None:
    a = np.ones((3, 4), F)
    with tilewave.record() as shapes:
        tilewave.matmul(a[:0], a.T)
        tilewave.matmul(a[:, :0], a.T[:0])
        tilewave.gemm(a, a.T, alpha=0)
        with pytest.raises(UsageError):
            tilewave.matmul(a, a)
    assert len(shapes) == 0
    assert str(shapes) == "no product was recorded"


def test_the_csv_comes_back_as_the_same_products(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    a, b = np.ones((5, 3, 4), F), np.ones((6, 4), F)
    recordings = []

    def program() -> None:
        with tilewave.record(path) as shapes:
            recordings.append(shapes)
            tilewave.matmul(a, b.T)
            tilewave.matmul(b, a[0].T)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        program()
    (shapes,) = recordings
    assert products_of([str(path)]) == [product for product, _ in shapes.items()]
    assert [str(one) for one in products_of([str(path)])] == ["5 times 3 x 6 x 4 NT shared B", "6 x 3 x 4 NT"]
    with pytest.raises(UsageError, match="cannot write"):
        shapes.write(tmp_path / "no" / "mine.csv")


def test_recordings_nest_and_end() -> None:
    a = np.ones((2, 2), F)
    with tilewave.record() as outer:
        with tilewave.record() as inner:
            tilewave.matmul(a, a)
        tilewave.matmul(a, a)
    assert [count for _, count in outer.items()] == [2]
    assert [count for _, count in inner.items()] == [1]
    assert recording.ACTIVE == ()


def test_threads_share_a_recording() -> None:
    a, calls, threads = np.ones((2, 3), F), 200, 8
    start = threading.Barrier(threads)

    def work() -> None:
        start.wait()
        for _ in range(calls):
            tilewave.matmul(a, a.T)

    with tilewave.record() as shapes:
        workers = [threading.Thread(target=work) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert [count for _, count in shapes.items()] == [calls * threads]


def test_nobody_records_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off, a call pays one look at a tuple: `note` is not reached."""
    monkeypatch.setattr(recording, "note", lambda call: pytest.fail("noted"))
    tilewave.matmul(np.ones((2, 2), F), np.ones((2, 2), F))
    assert recording.ACTIVE == ()


def test_the_example_in_the_documentation_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "benchmarking.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out.strip() in code
