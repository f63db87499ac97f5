"""Whatever is given for whatever argument: an answer, or an error on one line, and nothing written.

Values are what programs pass by mistake (arrays for options, types for arrays) and what breaks messages:
what cannot be printed, prints for pages, or answers a protocol with nonsense.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tilewave
from tilewave.errors import OperandTypeError, TilewaveError, UsageError
from tilewave.messages import kind_of, shown

Rng = np.random.Generator
F = np.float32
LONGEST = 900
"""Characters of the longest message: those that list all options of gemm come near it."""


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewave.api.gpu_for_host_operands", lambda: None)
    monkeypatch.setattr("tilewave.planning.gpu_for_host_operands", lambda: None)


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


class UnprintableNumber(float):
    def __repr__(self) -> str:
        raise RuntimeError("no words")


class Anything:
    """Has every attribute, as a mock has; none of them is what a protocol asks for."""

    def __getattr__(self, name: str) -> int:
        return 3


class Interface:
    def __init__(self, answer: Any) -> None:
        self.__cuda_array_interface__ = answer


class FailingInterface:
    @property
    def __cuda_array_interface__(self) -> Any:
        raise RuntimeError("the driver is gone")


class Capsule:
    """Speaks DLPack with answers of one's choice; those that are exceptions are raised."""

    def __init__(self, place: Any, capsule: Any = 3) -> None:
        self.place, self.capsule = place, capsule

    def __dlpack_device__(self) -> Any:
        return _answer(self.place)

    def __dlpack__(self, **keywords: Any) -> Any:
        return _answer(self.capsule)


def _answer(value: Any) -> Any:
    if isinstance(value, Exception):
        raise value
    return value


class CudaStream:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def __cuda_stream__(self) -> Any:
        return self.answer


ODD: dict[str, Any] = {
    "array": np.ones((3, 4), F),
    "long array": np.ones(1 << 20, F),
    "array in a list": [np.ones(1 << 20, F)],
    "long list": list(range(1 << 16)),
    "deep list": [[[[[[[[1]]]]]]]],
    "unprintable": Unprintable(),
    "unprintable number": UnprintableNumber(1e300),
    "long integer": 10**5000,
    "long negative integer": -(10**5000),
    "long text": "x" * 100_000,
    "text with lines": "x\ny",
    "type": np.ndarray,
    "function": np.matmul,
    "anything": Anything(),
    "dict": {},
    "bytes": b"ieee",
    "complex": 1j,
    "NumPy's bool": np.True_,
}

OPTIONS_OF_GEMM = (
    *("alpha", "beta", "bias_axis", "activation", "return_preactivation", "transpose_a", "transpose_b"),
    *("precision", "schedule", "deterministic", "batch_invariant", "max_sms", "workspace", "stream"),
)
OPTIONS_OF_PLAN = (
    *("batch", "layouts", "alignment", "beta", "bias_axis", "activation", "return_preactivation"),
    *("precision", "device", "schedule", "deterministic", "batch_invariant", "max_sms"),
)
A, B, C, BIAS = np.ones((3, 3), F), np.ones((3, 3), F), np.ones((3, 3), F), np.ones(3, F)

ARGUMENTS: dict[str, Callable[[Any, Any], Any]] = {
    **{
        f"gemm {name}": lambda out, value, name=name: tilewave.gemm(
            A, B, C, bias=BIAS, out=out, **{name: value}
        )
        for name in OPTIONS_OF_GEMM
    },
    **{
        f"plan {name}": lambda out, value, name=name: tilewave.plan(
            5, 6, 7, **{"device": "H200", name: value}
        )
        for name in OPTIONS_OF_PLAN
    },
    "matmul precision": lambda out, value: tilewave.matmul(A, B, out=out, precision=value),
    "plan m": lambda out, value: tilewave.plan(value, 6, 7, device="H200"),
    "plan_grouped": lambda out, value: tilewave.plan_grouped([(5, value, 7)], device="H200"),
    "plan_grouped, all of it": lambda out, value: tilewave.plan_grouped(value, device="H200"),
    "explain": lambda out, value: tilewave.explain(value, 6, 7, device="H200"),
    "explain, all of it": lambda out, value: tilewave.explain(value),
    "prepare": lambda out, value: tilewave.prepare([value]),
    "prepare, all of it": lambda out, value: tilewave.prepare(value),
    "prepack operand": lambda out, value: tilewave.prepack(A, operand=value),
    "prepack transpose": lambda out, value: tilewave.prepack(A, transpose=value),
    "prepack stream": lambda out, value: tilewave.prepack(A, stream=value),
    "check precision": lambda out, value: tilewave.check(A, B, C, value),
    "grouped_gemm": lambda out, value: tilewave.grouped_gemm([{"a": A, "b": B, "out": out}, value]),
    "grouped_gemm, all of it": lambda out, value: tilewave.grouped_gemm(value),
    "grouped_gemm schedule": lambda out, value: tilewave.grouped_gemm(
        [{"a": A, "b": B, "out": out}], schedule=value
    ),
}


def refusal(call: Callable[[Any, Any], Any], out: Any, value: Any) -> TilewaveError | None:
    """The error of a call; None where it gives an answer. Any other error is a failure."""
    try:
        call(out, value)
    except TilewaveError as error:
        return error
    return None


@pytest.mark.parametrize("value", ODD)
def test_an_odd_value_for_any_argument_is_answered_or_refused_on_one_line(value: str) -> None:
    refused = 0
    for name, call in ARGUMENTS.items():
        out = np.full((3, 3), np.nan, F)
        error = refusal(call, out, ODD[value])
        if error is not None:
            refused += 1
            assert "\n" not in str(error), name
            assert len(str(error)) < LONGEST, name
            assert np.isnan(out).all(), name
    assert refused > len(ARGUMENTS) // 2


NO_ARRAYS: dict[str, Any] = {
    "type": np.ndarray,
    "anything": Anything(),
    "empty interface": Interface({}),
    "no interface": Interface(None),
    "number for interface": Interface(3),
    "unknown dtype": Interface({"typestr": "foo", "shape": (3, 3), "data": (4096, False), "version": 3}),
    "no shape": Interface({"typestr": "<f4", "shape": "x", "data": (4096, False), "version": 3}),
    "no address": Interface({"typestr": "<f4", "shape": (3, 3), "data": None, "version": 3}),
    "failing interface": FailingInterface(),
    "no place": Capsule(None),
    "failing place": Capsule(RuntimeError("lost")),
    "no capsule on the host": Capsule((1, 0)),
    "no capsule on a GPU": Capsule((2, 0)),
    "failing capsule": Capsule((1, 0), RuntimeError("lost")),
    "refusing capsule": Capsule((1, 0), BufferError("exported already")),
    "failing capsule on a GPU": Capsule((2, 0), RuntimeError("lost")),
    "place of no library": Capsule((99, 0)),
    "unprintable": Unprintable(),
    "generator": (row for row in [[1.0]]),
}

PLACES: dict[str, Callable[[Any, Any], Any]] = {
    "a": lambda out, array: tilewave.matmul(array, B, out=out),
    "b": lambda out, array: tilewave.matmul(A, array, out=out),
    "c": lambda out, array: tilewave.gemm(A, B, array, beta=1.0, out=out),
    "bias": lambda out, array: tilewave.gemm(A, B, bias=array, out=out),
    "out": lambda out, array: tilewave.matmul(A, B, out=array),
    "problem 1: a": lambda out, array: tilewave.grouped_gemm([{"a": A, "b": B, "out": out}, (array, B)]),
    "array": lambda out, array: tilewave.prepack(array),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", NO_ARRAYS)
def test_what_is_no_array_is_refused_by_the_name_of_the_operand(kind: str, place: str) -> None:
    out = np.full((3, 3), np.nan, F)
    with pytest.raises((OperandTypeError, UsageError)) as caught:
        PLACES[place](out, NO_ARRAYS[kind])
    assert str(caught.value).startswith(f"{place} "), str(caught.value)
    assert "\n" not in str(caught.value)
    assert np.isnan(out).all()


@pytest.mark.parametrize("answer", [None, 3, (0,), (0, 1, 2), (0, -1), (1, 7), (0, "x")])
def test_a_stream_with_a_strange_answer(answer: Any) -> None:
    with pytest.raises(UsageError, match=r"^stream "):
        tilewave.matmul(A, B, stream=CudaStream(answer))


@pytest.mark.parametrize("name", ["a", "b", "c", "bias", "out"])
@pytest.mark.parametrize("dtype", ["f8", "f2", ">f4", "i4", "?", "c8", "O", "U1", "M8[s]", [("x", "f4")]])
def test_another_dtype_is_told_with_name_shape_and_strides(rng: Rng, name: str, dtype: Any) -> None:
    rows, columns = (int(extent) for extent in rng.integers(2, 9, 2))
    wide = np.zeros((rows, 2 * columns), dtype)
    array = wide[::-1, ::2] if name != "bias" else wide[0, ::2]
    steps = tuple(step // array.itemsize for step in array.strides)
    given = {"a": np.ones((rows, columns), F), "b": np.ones((columns, columns), F)} | {name: array}
    if name == "b":
        given["a"] = np.ones((3, rows), F)
    with pytest.raises(OperandTypeError) as caught:
        tilewave.gemm(given.pop("a"), given.pop("b"), **given)
    assert str(caught.value).startswith(f"{name} is ")
    assert f" of shape {array.shape} and strides {steps}; " in str(caught.value)
    assert "float32" in str(caught.value)


def test_a_shape_that_does_not_fit_is_told_with_strides(rng: Rng) -> None:
    m, n, k = (int(extent) for extent in rng.integers(2, 9, 3))
    a, b = np.ones((k, m), F).T, np.ones((k, n), F)
    for given, words in (
        ({"b": b[:-1]}, f"a of shape {(m, k)} and strides {(1, m)} and b of shape {(k - 1, n)} and strides"),
        ({"c": np.ones((m, n + 1), F)}, f"c of shape {(m, n + 1)} and strides {(n + 1, 1)} does not"),
        ({"bias": np.ones(n + 1, F)[::-1]}, f"bias of shape {(n + 1,)} and strides (-1,) does not"),
        ({"out": np.ones((m, n + 1), F)}, f"out of shape {(m, n + 1)} and strides {(n + 1, 1)} does not"),
    ):
        with pytest.raises(UsageError) as caught:
            tilewave.gemm(a, given.pop("b", b), **given)
        assert words in str(caught.value)


def test_results_beyond_what_can_be_addressed() -> None:
    tall = np.broadcast_to(F(1), (1 << 40, 1, 1))
    with pytest.raises(
        UsageError, match=r"the result of shape \(1099511627776, 1, 4194304\) would be longer"
    ):
        tilewave.matmul(tall, np.broadcast_to(F(1), (1, 1 << 22)))
    for sizes in ((1 << 62, 1, 1), (1, 1, 1 << 62), (1 << 61, 1, 1), (1 << 31, 1 << 31, 1), (10**5000, 0, 1)):
        refused = 4 * max(sizes[0] * sizes[1], sizes[0] * sizes[2], sizes[1] * sizes[2]) >= 1 << 63
        for plan in (
            lambda sizes=sizes: tilewave.plan(*sizes, device="H200"),
            lambda sizes=sizes: tilewave.plan_grouped([sizes], device="H200"),
        ):
            assert refused
            with pytest.raises(UsageError, match="longer than 64 bits can address"):
                plan()
    largest = (1 << 61) - 1  # its bytes are the most that 63 bits count
    assert tilewave.plan(largest, 1, 1, device="H200").problem.multiply_adds == largest


def test_values_as_they_are_shown() -> None:
    class Odd(int):
        pass

    for value, words in (
        (3, "3"),
        ("x", "'x'"),
        (None, "None"),
        (True, "True"),
        (1.5, "1.5"),
        (np.float32(2), repr(np.float32(2))),
        (np.int64(-2), repr(np.int64(-2))),
        (np.True_, repr(np.True_)),
        (Odd(7), "7"),
        (1 << 255, str(1 << 255)),
        (1 << 256, "an integer of 257 bits"),
        (-(1 << 256), "a negative integer of 257 bits"),
        (np.ones((2, 3), F), "an ndarray of shape (2, 3) and dtype float32"),
        (np.ones((), np.int8), "an ndarray of shape () and dtype int8"),
        ((1,), "(1,)"),
        ([1, (2, "x")], "[1, (2, 'x')]"),
        (list(range(9)), "[0, 1, 2, 3, 4, 5, ... 9 in all]"),
        ([[[[[1]]]]], "[[[a list of 1]]]"),
        (np.ndarray, "<class 'numpy.ndarray'>"),
        (Unprintable(), "an Unprintable"),
        ("y" * 500, "'" + "y" * 119 + "... (a str)"),
    ):
        assert shown(value) == words
    assert kind_of(Anything()) == "an Anything"
    assert kind_of({}) == "a dict"
