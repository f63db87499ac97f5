"""The public names: documented, listed, cheap to import, and clear about mistakes of newcomers."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tilewave
from tilewave.errors import OperandTypeError, TilewaveError, UsageError

F = np.float32
NAMES = [
    "check",
    "explain",
    "gemm",
    "grouped_gemm",
    "matmul",
    "plan",
    "plan_for",
    "plan_grouped",
    "prepack",
    "prepare",
    "record",
]
FRAMEWORKS = (
    "numpy",
    "cuda",
    "torch",
    "cupy",
    "jax",
    "rich",
    "typer",
    "matplotlib",
    "jinja2",
    "platformdirs",
)
TIMED = f"""
import sys, time
begin = time.perf_counter()
import tilewave
seconds = time.perf_counter() - begin
print((seconds, sorted(set({FRAMEWORKS}) & set(sys.modules))))
"""


def test_the_names_are_these_and_dir_lists_them() -> None:
    assert tilewave.__all__ == NAMES
    assert {*NAMES, "errors", "__version__"} <= set(dir(tilewave))
    namespace: dict[str, Any] = {}
    exec("from tilewave import *", namespace)
    assert all(callable(namespace[name]) for name in NAMES)


@pytest.mark.parametrize(
    ("expression", "answer"), [("errors.UsageError.__name__", "UsageError"), ("__version__", "0.")]
)
def test_errors_and_version_are_there_from_the_beginning(expression: str, answer: str) -> None:
    code = f"import tilewave; print(tilewave.{expression})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(answer)


def test_import_is_quick_and_loads_no_framework() -> None:
    """The least of three processes: the machine may be busy, the code cannot be quicker than it is."""
    found = [
        ast.literal_eval(
            subprocess.run([sys.executable, "-c", TIMED], capture_output=True, check=True).stdout.decode()
        )
        for _ in range(3)
    ]
    assert {tuple(loaded) for _, loaded in found} == {()}
    assert min(seconds for seconds, _ in found) < 0.150


@pytest.mark.parametrize("name", NAMES)
def test_the_docstring_says_shapes_errors_and_every_argument(name: str) -> None:
    function = getattr(tilewave, name)
    text = inspect.getdoc(function) or ""
    assert text.splitlines()[0].endswith((".", ":", ","))
    assert "Raises" in text
    assert any(word in text.lower() for word in ("shape", "sizes", "(m, n, k)"))
    shared = inspect.getdoc(tilewave.gemm) or ""
    shared += inspect.getdoc(tilewave.matmul) or ""
    for argument, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is not parameter.VAR_POSITIONAL and name != "explain":
            assert f"`{argument}" in text + shared, argument
        assert parameter.annotation is not parameter.empty
    assert inspect.signature(function).return_annotation is not inspect.Signature.empty


@pytest.mark.parametrize("name", ["UsageError", "OperandTypeError", "NotBuiltError", "CaptureError"])
def test_errors_are_caught_as_one_kind_or_as_python_s_own(name: str) -> None:
    kind = getattr(__import__("tilewave.errors", fromlist=[name]), name)
    assert issubclass(kind, TilewaveError)
    assert kind.__doc__
    builtin = {"UsageError": ValueError, "OperandTypeError": TypeError, "NotBuiltError": NotImplementedError}
    assert issubclass(kind, builtin.get(name, Exception))


A, B = np.ones((3, 4), F), np.ones((4, 2), F)
MISTAKES: list[tuple[Callable[[], Any], type[TilewaveError], str]] = [
    (
        lambda: tilewave.matmul(A.astype(float), B),
        OperandTypeError,
        r"a is float64.*a\.astype\(numpy\.float32\)",
    ),
    (lambda: tilewave.matmul(A, B.astype(int)), OperandTypeError, r"b is int64.*b\.astype"),
    (
        lambda: tilewave.matmul([[1.0, 2.0]], B),
        OperandTypeError,
        r"a is float64 \(as numpy.*numpy\.asarray\(a",
    ),
    (lambda: tilewave.matmul([[1], [2, 3]], B), OperandTypeError, "a is a list.*accepted are float32 arrays"),
    (lambda: tilewave.matmul("text", B), OperandTypeError, "a is a str; accepted are float32 arrays"),
    (lambda: tilewave.matmul(2.0, B), OperandTypeError, "a is a float; accepted are float32 arrays"),
    (lambda: tilewave.matmul(None, B), OperandTypeError, "a is a NoneType; accepted are float32 arrays"),
    (lambda: tilewave.matmul(F(2), B), UsageError, r"a is 0-dimensional.*multiply by a scalar with \*"),
    (
        lambda: tilewave.matmul(A, A),
        UsageError,
        r"shape \(3, 4\) and strides \(4, 1\) and b of shape \(3, 4\).*K is 4 in a and 3 in b",
    ),
    (
        lambda: tilewave.matmul(A, B, out=np.empty((2, 3), F)),
        UsageError,
        r"out of shape.*result has shape \(3, 2\)",
    ),
    (
        lambda: tilewave.matmul(A, B, out=np.empty((3, 2))),
        OperandTypeError,
        "out is float64.*allocate out as float32",
    ),
    (lambda: tilewave.matmul(A, B, precision="tf32x3"), TilewaveError, "not built yet"),
    (lambda: tilewave.gemm(A, B, beta=1), UsageError, "there is no c"),
    (
        lambda: tilewave.gemm(A, B, bias=B[0], bias_axis=[-1]),
        UsageError,
        "accepted are -1, the result's last axis",
    ),
    (lambda: tilewave.gemm(A, B, workspace=-1), UsageError, "^workspace is -1; accepted"),
    (lambda: tilewave.gemm(A, B, workspace=True), UsageError, "^workspace is True; accepted"),
    (
        lambda: tilewave.plan(A, B, 3, device="H200"),
        UsageError,
        r"m is an ndarray of shape \(3, 4\).*plan_for",
    ),
    (lambda: tilewave.plan(3.0, 4, 5, device="H200"), UsageError, r"m is 3\.0; accepted are integers"),
    (lambda: tilewave.plan(True, 4, 5, device="H200"), UsageError, "m is True; accepted are integers"),
    (
        lambda: tilewave.plan(3, 4, 5, batch=2.0, device="H200"),
        UsageError,
        r"batch is 2\.0; accepted are integers",
    ),
    (
        lambda: tilewave.plan(3, 4, 5, batch=(2, -1), device="H200"),
        UsageError,
        "batch is -1; accepted are integers",
    ),
    (lambda: tilewave.plan(3, 4, 5, device="H2000"), UsageError, r"did you mean H200\?"),
    (lambda: tilewave.explain(A), UsageError, r"explain takes two arrays \(a, b\), sizes"),
    (
        lambda: tilewave.prepare([(A, B)]),
        UsageError,
        r"\(an ndarray of shape \(3, 4\) and dtype float32, .*prepare\(plan_for\(a, b\)\)",
    ),
    (lambda: tilewave.prepare((3, 4, 5)), UsageError, "cannot prepare 3; accepted is a list"),
    (lambda: tilewave.grouped_gemm([(A, B), (A, A)]), UsageError, "^problem 1: a of shape"),
    (lambda: tilewave.grouped_gemm([(A, B), (A, B.astype(int))]), OperandTypeError, "^problem 1: b is int64"),
    (
        lambda: tilewave.grouped_gemm([A, B]),
        UsageError,
        r"^problem 0: this is an ndarray; accepted are \(a, b\)",
    ),
    (lambda: tilewave.grouped_gemm([{"a": A, "x": B}]), UsageError, "^problem 0: gemm has no argument 'x'"),
    (lambda: tilewave.grouped_gemm([{"a": A}]), UsageError, "^problem 0: b is missing"),
    (lambda: tilewave.grouped_gemm({"a": A, "b": B}), UsageError, "given as a dict; accepted is a list"),
    (lambda: tilewave.grouped_gemm(None), UsageError, "given as a NoneType; accepted is a list"),
    (lambda: tilewave.plan_grouped(5, device="H200"), UsageError, "given as an int; accepted is a list"),
    (
        lambda: tilewave.plan_grouped([(2**62, 2**62, 2**62)], device="H200"),
        UsageError,
        r"problem 0: a of shape .* longer than 64 bits can address",
    ),
    (lambda: tilewave.prepare(5), UsageError, "cannot prepare 5; accepted is a list"),
    (lambda: tilewave.matmul(A, B, precision=A), UsageError, "precision is an ndarray; accepted is 'ieee'"),
    (lambda: tilewave.gemm(A, B, precision=[1]), UsageError, "precision is a list; accepted is 'ieee'"),
    (lambda: tilewave.grouped_gemm([(A, B)], size=1), UsageError, "^problem 0: gemm has no argument 'size'"),
    (
        lambda: tilewave.grouped_gemm([{"a": A, "b": B, "alpha": 2}], alpha=1),
        UsageError,
        "alpha is given for this",
    ),
    (
        lambda: tilewave.check(A, B, A),
        UsageError,
        r"c of shape \(3, 4\) does not fit; the product has shape \(3, 2\)",
    ),
]


@pytest.mark.parametrize("place", range(len(MISTAKES)))
def test_a_newcomer_s_mistake_gets_one_clear_sentence(place: int) -> None:
    call, kind, words = MISTAKES[place]
    with pytest.raises(kind, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 330


def test_sizes_may_be_integers_of_any_kind() -> None:
    assert tilewave.plan(
        np.int64(3), F(4).astype(np.int32), 5, batch=[np.uint8(2)], device="H200"
    ) == tilewave.plan(3, 4, 5, batch=2, device="H200")


def test_a_tuple_of_plans_is_readable() -> None:
    shown = repr(tilewave.plan_for(A, B, device="H200"))
    assert shown.startswith("(<GemmPlan 3 x 2 x 4 on H200 (132 SMs): ")
    assert len(shown) < 150


def test_a_group_writes_nothing_when_a_later_problem_is_bad() -> None:
    out = np.full((3, 2), np.nan, F)
    with pytest.raises(UsageError, match="problem 1"):
        tilewave.grouped_gemm([{"a": A, "b": B, "out": out}, (A, A)])
    assert np.isnan(out).all()
    first, second = tilewave.grouped_gemm([{"a": A, "b": B, "out": out}, (A[:0], B)], alpha=2)
    assert first is out
    assert (out == 8).all()
    assert second.shape == (0, 2)
