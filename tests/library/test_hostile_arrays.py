"""Arrays and options that few programs pass and that some day one does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewave
from tilewave.errors import OperandTypeError, UsageError

Rng = np.random.Generator
F = np.float32


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewave.api.gpu_for_host_operands", lambda: None)


@pytest.mark.parametrize("width", [5, 6, 7, 9, 12])
def test_a_field_of_a_structured_array_receives_a_result_in_any_direction(rng: Rng, width: int) -> None:
    """Its strides are no multiples of 4 bytes; its elements are distinct whichever way they are walked."""
    record = np.dtype({"names": ["x"], "formats": ["f4"], "offsets": [width - 4], "itemsize": width})
    steps = (1, -1, 2, -2)
    for n in range(1, 8):
        for rows, columns in ((r, c) for r in steps for c in steps):
            octets = np.full((9, 2 * n * width), 0xAB, np.uint8)
            memory = octets.view(record)["x"]
            out = memory[::rows, ::columns]
            a = rng.integers(-9, 9, (out.shape[0], 3)).astype(F)
            b = rng.integers(-9, 9, (3, out.shape[1])).astype(F)
            assert tilewave.matmul(a, b, out=out) is out
            assert np.array_equal(out, a @ b)
            assert np.array_equal(tilewave.matmul(out, out.T.copy()), (a @ b) @ (a @ b).T)
            out[...] = np.frombuffer(b"\xab" * 4, F)[0]
            assert np.all(octets == 0xAB)  # nothing else was touched


@pytest.mark.parametrize(
    "axis", [-1.0, -2.0, 1, 0, True, None, "x", [-1], np.array([-1, -2]), np.float32(-1)]
)
def test_a_bias_axis_that_is_none(rng: Rng, axis: Any) -> None:
    a = rng.standard_normal((5, 5), dtype=F)
    with pytest.raises(UsageError, match=r"bias_axis is .*accepted are -1"):
        tilewave.gemm(a, a, bias=a[0], bias_axis=axis)
    if axis is not None:
        with pytest.raises(UsageError, match=r"bias_axis is .*accepted are -1"):
            tilewave.plan(5, 5, 5, bias_axis=axis, device="H200")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"beta": "1"}, OperandTypeError),
        ({"beta": 1e39}, UsageError),
        ({"beta": [1.0]}, OperandTypeError),
        ({"return_preactivation": "no"}, UsageError),
        ({"alignment": 16.0}, UsageError),
        ({"alignment": [16]}, UsageError),
    ],
)
def test_a_plan_checks_options_as_gemm_does(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(options))):
        tilewave.plan(5, 6, 7, device="H200", **options)


@pytest.mark.parametrize("path", [5, b"shapes.csv", ["shapes.csv"]])
def test_a_recording_needs_the_name_of_a_file_before_it_begins(path: Any) -> None:
    with pytest.raises(UsageError, match=r"path is an? "), tilewave.record(path):
        pytest.fail("it began")


@pytest.mark.parametrize("name", ["no/such/folder/shapes.csv", "with\0zero.csv", "."])
def test_a_recording_that_cannot_be_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot write "), tilewave.record(tmp_path / name):
        pass


@pytest.mark.parametrize("arguments", [(), (None,), (3, 4), (3, 4, 5, 6), ([[1.0]], [[1.0]]), ([],)])
def test_explain_says_what_it_takes(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(UsageError, match="explain takes two arrays"):
        tilewave.explain(*arguments, device="H200")


def test_explain_takes_sizes_by_name() -> None:
    said = tilewave.explain(8, n=9, k=7, device="H200")
    assert said == tilewave.explain(8, 9, 7, device="H200")


class Plain(np.ndarray[Any, Any]):
    """A class of arrays whose products are those of NumPy."""


@pytest.mark.parametrize("kind", [Plain, np.recarray, np.memmap, np.matrix])
def test_an_out_of_another_class_is_what_comes_back(rng: Rng, tmp_path: Path, kind: type) -> None:
    a = rng.integers(-9, 9, (3, 3)).astype(F)
    file = np.memmap(tmp_path / "out", F, "w+", shape=(3, 3))
    out = file if kind is np.memmap else np.full((3, 3), np.nan, F).view(kind)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: tilewave.matmul(a, a, out=out),
        lambda: tilewave.gemm(a, a, out=out, precision="tf32"),
        lambda: tilewave.grouped_gemm([{"a": a, "b": a, "out": out}])[0],
    )
    for call in calls:
        assert call() is out
        assert np.array_equal(np.asarray(out), a @ a)
        out[...] = np.nan


class Unshared:
    """What refuses to be shared."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **_: Any) -> object:
        raise BufferError("not today")


def test_what_cannot_be_shared_is_named(rng: Rng) -> None:
    a = rng.standard_normal((3, 3), dtype=F)
    with pytest.raises(UsageError, match="b cannot be shared through DLPack: not today"):
        tilewave.matmul(a, Unshared())
