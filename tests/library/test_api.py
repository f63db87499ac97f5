"""Device operands through the front door: the values, the launches, the streams, what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import host_staging
import numpy as np
import pytest
from host_gpu import CupyArray, ExchangedArray, FakeGpu, InterfaceArray, TorchTensor, activate
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tilewave
from tilewave.call import activation_of
from tilewave.errors import NotBuiltError, OperandTypeError, TilewaveError, UsageError

Rng = np.random.Generator
F = np.float32
Array = np.ndarray[Any, Any]


def normal(rng: Rng, *shape: int) -> Array:
    return rng.standard_normal(shape, dtype=F)


def close(got: Array, exact: Array) -> bool:
    """Equal to a float64 value rounded once; Inf and NaN in the same places."""
    with np.errstate(all="ignore"):
        return np.allclose(got, exact.astype(F), rtol=1e-6, atol=1e-6, equal_nan=True)


@st.composite
def strided(draw: st.DrawFn, shape: tuple[int, ...], rng: Rng, *, repeats: bool = True) -> Array:
    """A random array of a shape in any layout, in storage of NaN."""
    order = draw(st.permutations(range(len(shape))))
    stored = []
    for axis in order:
        repeated = repeats and draw(st.integers(0, 5)) == 0
        step = draw(st.sampled_from([1, 1, 1, 2, -1, -2]))
        stored.append((axis, repeated, step))
    extents = [1 if repeated else shape[axis] * abs(step) for axis, repeated, step in stored]
    offset = draw(st.integers(0, 3))
    storage = np.full(int(np.prod(extents)) + offset, np.nan, F)[offset:].reshape(extents)
    view = storage[(..., *(slice(None, None, step) for _, _, step in stored))]
    view[...] = rng.standard_normal(view.shape)
    wide = view
    if any(repeated for _, repeated, _ in stored):
        wide = np.broadcast_to(view, [shape[axis] for axis, _, _ in stored])
    return wide.transpose(np.argsort(order))


class Drawn:
    """Arguments of gemm as host arrays, the exact result, what the activation is applied to, and how far off
    float32 arithmetic may be: K and a few roundings of ``scale``, the sum of all terms' magnitudes."""

    def __init__(
        self, arguments: dict[str, Any], exact: Array, before: Array | None, scale: Array, k: int
    ) -> None:
        self.arguments, self.exact, self.before = arguments, exact, before
        self.bound = (k + 6) * 2.0**-24 * scale
        # Activations stretch by less than 1.2, and round in steps of their own.
        self.bound_behind = self.bound if arguments["activation"] is None else 1.2 * self.bound + 4e-6

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # Hypothesis would print every element

    def __repr__(self) -> str:
        return ", ".join(
            f"{name}: {value.shape} {value.strides}" if isinstance(value, np.ndarray) else f"{name}={value}"
            for name, value in self.arguments.items()
        )


@st.composite
def calls(draw: st.DrawFn, sizes: tuple[int, ...] = (0, 1, 1, 2, 3, 5), batch_axes: int = 3) -> Drawn:
    """A call in any shape, layout and epilogue."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    m, n, k = (draw(st.sampled_from(sizes)) for _ in range(3))
    batch = tuple(draw(st.lists(st.sampled_from([0, 1, 1, 2, 3, 5]), max_size=batch_axes)))

    def broadcastable(shape: tuple[int, ...]) -> tuple[int, ...]:
        kept = shape[draw(st.integers(0, len(shape))) :]
        return tuple(1 if draw(st.integers(0, 3)) == 0 else extent for extent in kept)

    vector_a, vector_b = draw(st.integers(0, 5)) == 0, draw(st.integers(0, 5)) == 0
    transpose_a = not vector_a and draw(st.booleans())
    transpose_b = not vector_b and draw(st.booleans())
    a_shape = (k,) if vector_a else (*broadcastable(batch), *((k, m) if transpose_a else (m, k)))
    b_shape = (k,) if vector_b else (*broadcastable(batch), *((n, k) if transpose_b else (k, n)))
    a, b = draw(strided(a_shape, rng)), draw(strided(b_shape, rng))
    wide_a = (a.swapaxes(-1, -2) if transpose_a else a).astype(np.float64)
    wide_b = (b.swapaxes(-1, -2) if transpose_b else b).astype(np.float64)
    exact = np.asarray(np.matmul(wide_a, wide_b))
    alpha, beta = draw(st.sampled_from([1.0, 0.0, -0.5])), draw(st.sampled_from([0.0, 0.0, 1.0, 2.5]))
    arguments: dict[str, Any] = {"alpha": alpha, "beta": beta}
    arguments |= {"transpose_a": transpose_a, "transpose_b": transpose_b}
    exact = alpha * exact
    scale = np.asarray(abs(alpha) * np.matmul(np.abs(wide_a), np.abs(wide_b)))
    if beta or draw(st.booleans()):
        c = draw(strided(broadcastable(exact.shape), rng))
        arguments["c"] = c
        if beta:
            exact = exact + beta * c.astype(np.float64)
            scale = scale + np.abs(beta * c)
    if exact.ndim and not (vector_a and vector_b) and draw(st.booleans()):
        axes = (not vector_a) + (not vector_b)
        axis = draw(st.sampled_from([-1, -2][:axes]))
        leading = exact.shape[: exact.ndim - axes]
        bias = draw(strided((*broadcastable(leading), exact.shape[axis]), rng))
        arguments |= {"bias": bias, "bias_axis": axis}
        spread = bias if axes == 1 or axis == -1 else bias[..., np.newaxis]
        spread = spread if axes == 1 or axis == -2 else bias[..., np.newaxis, :]
        exact, scale = exact + spread, scale + np.abs(spread)
    before = None
    arguments["activation"] = draw(st.sampled_from([None, "relu", "gelu", "gelu_tanh", "silu"]))
    if draw(st.booleans()):
        arguments["return_preactivation"] = True
        before = exact
    exact = activate(activation_of(arguments["activation"]), exact)
    match draw(st.integers(0, 2)):
        case 1:
            arguments["out"] = draw(strided(exact.shape, rng, repeats=False))
        case 2 if "c" in arguments and beta and arguments["c"].shape == exact.shape:
            c = arguments["c"]
            if c.flags.writeable:
                arguments["out"] = c
    return Drawn({"a": a, "b": b, **arguments}, exact, before, scale, k)


def check_call(drawn: Drawn, wrap: Any) -> None:
    """Make the call with each array wrapped, and compare everything that it answers."""
    arguments = drawn.arguments
    wrapped = {
        name: wrap(value) if isinstance(value, np.ndarray) else value for name, value in arguments.items()
    }
    if arguments.get("out") is not None and arguments.get("out") is arguments.get("c"):
        wrapped["out"] = wrapped["c"]
    result = tilewave.gemm(**wrapped)
    answers = [(result, drawn.exact, drawn.bound_behind)]
    if drawn.before is not None:
        result, before = result
        answers = [(result, drawn.exact, drawn.bound_behind), (before, drawn.before, drawn.bound)]
    if "out" in arguments:
        assert result is wrapped["out"]
    for got, exact, bound in answers:
        assert got.shape == exact.shape
        assert np.all(np.abs(np.asarray(getattr(got, "host", got)) - exact) <= bound)


relaxed = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@relaxed
@given(drawn=calls())
def test_gemm_on_a_gpu_is_right(gpu: FakeGpu, drawn: Drawn) -> None:
    check_call(drawn, CupyArray)


@relaxed
@given(drawn=calls())
def test_gemm_on_the_host_is_right(monkeypatch: pytest.MonkeyPatch, drawn: Drawn) -> None:
    monkeypatch.setattr("tilewave.api.gpu_for_host_operands", lambda: None)
    check_call(drawn, lambda array: array)


@relaxed
@given(drawn=calls())
def test_gemm_staged_to_a_gpu_is_right(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, drawn: Drawn) -> None:
    monkeypatch.setattr("tilewave.api.gpu_for_host_operands", lambda: 0)
    stage = host_staging.install(monkeypatch)
    check_call(drawn, lambda array: array)
    assert stage.live == 0  # every buffer was given back


def test_matmul_takes_every_kind_of_device_array(gpu: FakeGpu, rng: Rng) -> None:
    a, b = normal(rng, 4, 5), normal(rng, 5, 6)
    makers = [CupyArray, TorchTensor, InterfaceArray, ExchangedArray]
    for make_a, make_b in itertools.product(makers, makers):
        result = tilewave.matmul(make_a(a), make_b(b))
        host = result.host if hasattr(result, "host") else gpu.shared[-1]
        assert close(host, a.astype(np.float64) @ b), (make_a, make_b)
        assert type(result).__name__ == (
            make_a.__name__ if make_a in (CupyArray, TorchTensor) else "SharedArray"
        )


def test_work_goes_to_the_current_stream_of_the_library(gpu: FakeGpu, rng: Rng) -> None:
    a = normal(rng, 4, 4)
    with gpu.cupy.on(0x51), gpu.torch.on(0x52):
        tilewave.matmul(CupyArray(a), CupyArray(a))
        tilewave.matmul(TorchTensor(a), TorchTensor(a))
    assert [submission.stream for submission in gpu.run.submissions] == [0x51, 0x52]
    assert gpu.cupy.allocated_on == [0x51]
    assert gpu.torch.allocated_on == [0x52]
    assert gpu.waits == []


def test_memory_for_another_stream_comes_from_that_streams_pool(gpu: FakeGpu, rng: Rng) -> None:
    a = normal(rng, 4, 4)

    class Stream:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, 0x77

    for stream in (0x77, Stream()):
        tilewave.matmul(CupyArray(a), CupyArray(a), stream=stream)
        tilewave.matmul(TorchTensor(a), TorchTensor(a), stream=stream)
    assert {submission.stream for submission in gpu.run.submissions} == {0x77}
    assert gpu.cupy.allocated_on == gpu.torch.allocated_on == [0x77, 0x77]


def test_streams_of_two_libraries_wait_for_each_other(gpu: FakeGpu, rng: Rng) -> None:
    a = normal(rng, 4, 4)
    with gpu.cupy.on(0x51), gpu.torch.on(0x52):
        tilewave.matmul(CupyArray(a), TorchTensor(a))
    assert gpu.waits == [(0x51, 0x52), (0x52, 0x51)]  # (who waits, for whom)


def test_stream_of_the_cuda_array_interface_is_used_or_waited_for(gpu: FakeGpu, rng: Rng) -> None:
    a = normal(rng, 4, 4)
    tilewave.matmul(InterfaceArray(a, stream=0x60), InterfaceArray(a, stream=0x60))
    assert gpu.run.submissions[-1].stream == 0x60
    assert gpu.waits == []
    tilewave.matmul(InterfaceArray(a, stream=0x60), InterfaceArray(a, stream=0x61))
    assert gpu.waits == [(0x60, 0x61), (0x61, 0x60)]
    with pytest.raises(UsageError, match="names stream 0"):
        tilewave.matmul(InterfaceArray(a, stream=0), InterfaceArray(a))


def test_dlpack_producers_are_told_our_stream_and_kept(gpu: FakeGpu, rng: Rng) -> None:
    a = normal(rng, 4, 4)
    old, new = ExchangedArray(a, old=True), ExchangedArray(a)
    tilewave.matmul(old, new, stream=0x99)
    tilewave.matmul(old, new)
    assert old.streams == new.streams == [0x99, 1]  # DLPack calls the legacy default stream 1
    assert len(gpu.kept) == 2


@pytest.mark.parametrize("stream", ["default", -1, True, 1.5, object()])
def test_what_is_no_stream_is_refused(gpu: FakeGpu, rng: Rng, stream: Any) -> None:
    a = CupyArray(normal(rng, 4, 4))
    with pytest.raises(UsageError, match="stream is"):
        tilewave.matmul(a, a, stream=stream)
    assert gpu.run.submissions == []


def test_out_that_overlaps_an_operand_goes_through_temporary_memory(gpu: FakeGpu, rng: Rng) -> None:
    storage = normal(rng, 40, 30)
    a, b = storage[:20, :20], normal(rng, 20, 30)
    expected = a.astype(np.float64) @ b
    tilewave.matmul(CupyArray(a), CupyArray(b), out=CupyArray(storage[10:30]))
    assert close(storage[10:30], expected)
    assert len(gpu.run.submissions) == 2  # the product, then the copy


def test_a_copy_keeps_the_sign_of_zero_and_nan(gpu: FakeGpu) -> None:
    a = np.array([[0.0, np.nan, np.inf, 1.0]], F)
    tilewave.gemm(CupyArray(a.T), CupyArray(np.ones((1, 1), F)), out=CupyArray(a.T), alpha=-1.0)
    assert len(gpu.run.submissions) == 2
    assert np.array_equal(a, np.array([[0.0, np.nan, -np.inf, -1.0]], F), equal_nan=True)
    assert np.signbit(a[0, 0])


def test_out_that_is_c_in_another_order_goes_through_temporary_memory(gpu: FakeGpu, rng: Rng) -> None:
    """The transpose of out has its address and shape, and is not out itself."""
    a, b, storage = normal(rng, 9, 5), normal(rng, 5, 9), normal(rng, 9, 9)
    for c in (storage, storage.T):
        expected = a.astype(np.float64) @ b + 2.0 * c
        before = len(gpu.run.submissions)
        tilewave.gemm(CupyArray(a), CupyArray(b), CupyArray(c), beta=2.0, out=CupyArray(storage))
        assert close(storage, expected)
        assert len(gpu.run.submissions) - before == (1 if c is storage else 2)


def test_out_between_the_rows_of_an_operand_needs_no_temporary_memory(gpu: FakeGpu, rng: Rng) -> None:
    storage = normal(rng, 20, 40)
    a, out = storage[:, :20], storage[:, 20:]
    expected = a.astype(np.float64) @ a[:20]
    tilewave.matmul(CupyArray(a), CupyArray(a[:20]), out=CupyArray(out))
    assert close(out, expected)
    assert len(gpu.run.submissions) == 1


def test_empty_results_launch_nothing_and_empty_k_writes(gpu: FakeGpu) -> None:
    empty = tilewave.matmul(CupyArray(np.empty((0, 4), F)), CupyArray(np.empty((4, 3), F)))
    assert empty.shape == (0, 3)
    assert gpu.run.submissions == []
    out = np.full((3, 5), np.nan, F)
    tilewave.gemm(
        CupyArray(np.empty((3, 0), F)), CupyArray(np.empty((0, 5), F)), out=CupyArray(out), alpha=-np.inf
    )
    assert np.array_equal(out, np.zeros((3, 5)))
    assert not np.signbit(out).any()


def test_empty_array_without_a_place_goes_with_the_others(gpu: FakeGpu) -> None:
    empty = InterfaceArray(np.empty((3, 0), F))
    got = tilewave.matmul(empty, CupyArray(np.empty((0, 5), F), device=3))
    assert gpu.run.submissions[0].device == 3
    assert got.shape == (3, 5)


def test_operands_in_different_places_are_refused(gpu: FakeGpu, rng: Rng) -> None:
    a = normal(rng, 4, 4)
    out = np.full((4, 4), 7, F)
    with pytest.raises(UsageError, match="a on GPU 0, b on the host"):
        tilewave.matmul(CupyArray(a), a)
    with pytest.raises(UsageError, match="a on GPU 0, b on GPU 1, out on GPU 0"):
        tilewave.matmul(CupyArray(a), CupyArray(a, device=1), out=CupyArray(out))
    assert np.all(out == 7)


@pytest.mark.parametrize("dtype", ["f2", "f8", "i4", "i8", "u1", "?", "c8", ">f4"])
@pytest.mark.parametrize("name", ["a", "b", "c", "bias", "out"])
@pytest.mark.parametrize("place", ["host", "cupy", "interface"])
def test_only_float32_is_taken(gpu: FakeGpu, dtype: str, name: str, place: str) -> None:
    """Cases H046 and H047: the same rule for every operand, rank and place; nothing is written."""
    make = {"host": lambda x: x, "cupy": CupyArray, "interface": InterfaceArray}[place]
    for batch in ((), (2,), (2, 3)):
        shapes = {"a": (*batch, 4, 5), "b": (*batch, 5, 6), "c": (*batch, 4, 6), "bias": (6,)}
        shapes["out"] = shapes["c"]
        arrays = {other: np.ones(shape, dtype if other == name else F) for other, shape in shapes.items()}
        with pytest.raises(OperandTypeError, match=f"^{name} is .*float32") as caught:
            tilewave.gemm(**{other: make(array) for other, array in arrays.items()}, beta=1.0)
        assert isinstance(caught.value, TypeError)
        assert np.all(arrays["out"] == 1)
    assert gpu.run.submissions == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"alpha": "2"}, "alpha is a builtins.str"),
        ({"alpha": 1 + 2j}, "alpha is a builtins.complex"),
        ({"beta": np.ones(1, F)}, "beta is a numpy.ndarray"),
        ({"alpha": 1e39}, "range of float32"),
        ({"beta": -(10**400), "c": np.ones((4, 6), F)}, "range of float32"),
        ({"beta": 1.0}, "there is no c"),
        ({"activation": "tanh"}, "relu, gelu, gelu_tanh, silu"),
        (
            {"bias": np.ones(5, F)},
            r"bias of shape \(5,\) and strides \(1,\) does not fit: along axis -1 .* length 6",
        ),
        ({"bias": np.ones(6, F), "bias_axis": 0}, "bias_axis is 0; accepted are -1"),
        ({"bias": np.ones((2, 6), F)}, "leading axes do not broadcast"),
        ({"bias_axis": -2}, "there is no bias"),
        ({"c": np.ones((3, 6), F)}, r"c of shape \(3, 6\) and strides \(6, 1\) does not broadcast"),
        ({"transpose_a": 1}, "transpose_a must be True or False"),
        ({"precision": "fast"}, "accepted is 'ieee'"),
        ({"out": np.ones((6, 4), F)}, r"out of shape \(6, 4\) and strides \(4, 1\) does not fit"),
        ({"stream": 5}, "operands are on the host"),
        ({"workspace": np.ones(4, F)}, "operands are on the host"),
        ({"max_sms": 0}, "max_sms must be"),
        ({"schedule": "magic"}, "schedule must be"),
    ],
)
def test_bad_arguments_are_named(rng: Rng, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(TilewaveError, match=words):
        tilewave.gemm(normal(rng, 4, 5), normal(rng, 5, 6), **arguments)


def test_what_is_not_built_says_so(rng: Rng) -> None:
    for mode in ("tf32x3", "bf16x9", "auto"):
        with pytest.raises(NotBuiltError, match="not built yet") as caught:
            tilewave.matmul(normal(rng, 4, 4), normal(rng, 4, 4), precision=mode)
        assert isinstance(caught.value, NotImplementedError)


def test_workspace_of_the_caller(gpu: FakeGpu, rng: Rng) -> None:
    a = CupyArray(normal(rng, 4, 4))
    memory = CupyArray(np.zeros(100, F))
    tilewave.gemm(a, a, workspace=memory)
    assert gpu.run.submissions[-1].workspace == (memory.data.ptr, 400)
    tilewave.gemm(a, a, workspace=1024)
    assert gpu.run.submissions[-1].options.workspace_limit == 1024
    with pytest.raises(UsageError, match="workspace shares memory with a"):
        tilewave.gemm(a, a, workspace=a)
    with pytest.raises(UsageError, match="in C order"):
        tilewave.gemm(a, a, workspace=CupyArray(np.zeros((8, 8), F).T[::2]))
    with pytest.raises(UsageError, match="workspace lies on the host"):
        tilewave.gemm(a, a, workspace=np.zeros(100, F))


def test_planning_options_reach_the_planner(gpu: FakeGpu, rng: Rng) -> None:
    a = CupyArray(normal(rng, 4, 4))
    tilewave.gemm(a, a, schedule="split_k:4", max_sms=7)
    options = gpu.run.submissions[-1].options
    assert (options.schedule, options.max_sms, options.batch_invariant) == ("split_k:4", 7, False)
