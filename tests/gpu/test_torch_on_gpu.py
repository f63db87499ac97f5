"""tilewave.torch on a GPU: gradients, compiled code, override, graphs, streams. Written for PyTorch 2.11."""

from __future__ import annotations

import gc
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tilewave
from tilewave.errors import CaptureError
from tilewave.precision import error_in_bounds
from tilewave.runtime import driver
from tilewave.runtime.driver import Device
from tilewave.runtime.kernels import gpu_state
from tilewave.runtime.workspace import workspace_pool

pytestmark = [
    pytest.mark.gpu,
    # PyTorch's own, of switches and of threads of autograd that meet cuBLAS before a context.
    pytest.mark.filterwarnings("ignore:.*(TF32 behavior|TensorFloat32|run cuBLAS):UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]
torch = pytest.importorskip("torch")
tilewave_torch = pytest.importorskip("tilewave.torch")

NAN = float("nan")


@pytest.fixture(autouse=True)
def _gpu(device: Device) -> None:
    """Skips the module without a GPU."""


def normal(*shape: int) -> Any:
    return torch.randn(*shape, device="cuda")


def right(out: Any, a: Any, b: Any) -> bool:
    return bool(error_in_bounds(*(t.detach().cpu().numpy() for t in (out, a, b))) <= 1)


def whole(*shape: int) -> Any:
    """Integers from -3 to 3, of which products are exact."""
    return torch.randint(-3, 4, shape, device="cuda").float()


SHAPES = [
    ((300, 200), (200, 100)),
    ((257, 1000), (1000, 33)),
    ((5, 64, 48), (5, 48, 32)),
    ((8, 100, 72), (72, 40)),
    ((40, 72), (8, 72, 100)),
    ((2, 1, 30, 40), (3, 40, 20)),
    ((500,), (500, 70)),
    ((64, 500), (500,)),
]


@pytest.mark.parametrize("shapes", SHAPES)
def test_gradients_are_those_of_torch_in_float64(shapes: Any) -> None:
    a, b = (whole(*shape).requires_grad_() for shape in shapes)
    wide = [t.detach().double().requires_grad_() for t in (a, b)]
    result, expected = tilewave.matmul(a, b), torch.matmul(*wide)
    assert torch.equal(result.double(), expected)
    incoming = torch.randint_like(result, -3, 4)
    got = torch.autograd.grad(result, (a, b), incoming)
    for ours, theirs in zip(got, torch.autograd.grad(expected, wide, incoming.double()), strict=True):
        assert torch.equal(ours.double(), theirs)


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "silu"])
def test_an_epilogue_differentiates_twice(activation: Any) -> None:
    x, w, bias = (t.requires_grad_() for t in (normal(60, 50), normal(40, 50), normal(40)))
    functional = torch.nn.functional
    curves = {
        None: lambda z: z,
        "relu": torch.relu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda z: functional.gelu(z, approximate="tanh"),
        "silu": functional.silu,
    }

    def twice(result: Any, leaves: Any) -> Any:
        first = torch.autograd.grad((result**2).sum(), leaves, create_graph=True)
        return [*first, *torch.autograd.grad(sum((g**2).sum() for g in first), leaves)]

    ours = twice(tilewave.gemm(x, w, bias=bias, transpose_b=True, activation=activation), (x, w, bias))
    wide = [t.detach().double().requires_grad_() for t in (x, w, bias)]
    theirs = twice(curves[activation](functional.linear(*wide)), wide)
    for one, other in zip(ours, theirs, strict=True):
        one, other = one.detach().double(), other.detach()
        assert float((one - other).norm() / other.norm()) < 1e-4


def test_transforms_and_opcheck() -> None:
    a, b = whole(4, 30, 20), whole(20, 10)
    assert torch.equal(torch.vmap(tilewave.matmul, (0, None))(a, b), a @ b)
    got = torch.func.jvp(lambda x: tilewave.matmul(x, b), (a,), (a,))[1]
    assert torch.equal(got, a @ b)
    arguments = (a.requires_grad_(), b.requires_grad_(), None, whole(10).requires_grad_())
    torch.library.opcheck(torch.ops.tilewave.gemm.default, arguments, {"activation": "gelu"})


@pytest.mark.filterwarnings("ignore")  # of the compiler's own making
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_h111_inductor(mode: Any) -> None:
    """Compiled by inductor, with CUDA graphs in the second case: no graph break, the same bits."""

    def layer(x: Any, w: Any, bias: Any) -> Any:
        return tilewave.gemm(x, w, bias=bias, transpose_b=True, activation="relu") * 2

    x, w, bias = whole(64, 96).requires_grad_(), whole(32, 96).requires_grad_(), whole(32).requires_grad_()
    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    for _ in range(4):
        if mode is not None:
            torch.compiler.cudagraph_mark_step_begin()
        got = compiled(x, w, bias)
        assert torch.equal(got, layer(x, w, bias))
        gradients = torch.autograd.grad(got.sum(), (x, w, bias))
        expected = torch.autograd.grad(layer(x, w, bias).sum(), (x, w, bias))
        assert all(map(torch.equal, gradients, expected))


def test_override_takes_torch_s_own_samples() -> None:
    pytest.importorskip("expecttest")
    from torch.testing._internal.common_methods_invocations import op_db

    names = {"mm", "addmm", "bmm", "baddbmm", "matmul", "nn.functional.linear"}
    infos = [info for info in op_db if info.name in names]
    assert {info.name for info in infos} == names
    for info in infos:
        for requires_grad in (False, True):
            for sample in info.sample_inputs("cuda", torch.float32, requires_grad=requires_grad):
                with tilewave_torch.override():
                    ours = info.op(sample.input, *sample.args, **sample.kwargs)
                wide = sample.transform(
                    lambda v: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
                )
                theirs = info.op(wide.input, *wide.args, **wide.kwargs)
                torch.testing.assert_close(ours, theirs.float(), rtol=1e-4, atol=1e-3, equal_nan=True)


def test_override_is_float32_whatever_the_switches_say() -> None:
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        a, b = torch.full((64, 64), 1.0 + 2.0**-20, device="cuda"), torch.eye(64, device="cuda")
        with tilewave_torch.override():
            assert torch.equal(a @ b, a)
            x = a.clone().requires_grad_()
            (x @ a).sum().backward()
        assert right(x.grad, torch.ones_like(a), a.T)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def test_autocast_stays_float32() -> None:
    x, w = normal(64, 64), normal(64, 64).requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        result = tilewave.matmul(x, w)
        assert result.dtype is torch.float32
        with tilewave_torch.override():
            assert (x @ w).dtype is torch.bfloat16
    assert right(result, x, w)


DEEP = (200, 176, 3000)
"""Few tiles and a deep K: partial sums need workspace."""


def test_h058_a_cold_capture_is_refused_and_a_warm_one_needs_no_prepare() -> None:
    """In a process of its own: nothing is loaded there."""
    code = """
import torch, tilewave
from tilewave.errors import CaptureError
a, b = torch.randn(200, 3000, device="cuda"), torch.randn(3000, 176, device="cuda")
out = torch.zeros(200, 176, device="cuda")
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out.zero_()
    try:
        tilewave.gemm(a, b, schedule="split_k")
    except CaptureError as error:
        print("refused" if "prepare" in str(error) else error)
graph.replay()
eager = tilewave.gemm(a, b, schedule="split_k")
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = tilewave.gemm(a, b, schedule="split_k")
for _ in range(3):
    captured.fill_(float("nan"))
    graph.replay()
    print(torch.equal(captured, eager))
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert answer.stdout.split() == ["refused", "True", "True", "True"], answer.stderr


def test_a_captured_training_step_is_the_eager_one() -> None:
    """Forward, backward and the update in one graph, after warm-up on a side stream, as PyTorch asks."""

    def made() -> tuple[Any, Any]:
        torch.manual_seed(2)
        model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 16))
        model = model.cuda()
        return model, torch.optim.SGD(model.parameters(), lr=0.01)

    x, target = normal(3000, 512), normal(3000, 16)

    def step(model: Any, optimiser: Any) -> Any:
        optimiser.zero_grad(set_to_none=False)
        with tilewave_torch.override():
            loss = torch.nn.functional.mse_loss(model(x), target)
            loss.backward()
        optimiser.step()
        return loss

    eager, optimiser = made()
    losses = [float(step(eager, optimiser).detach()) for _ in range(8)]
    model, optimiser = made()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        warm = [float(step(model, optimiser).detach()) for _ in range(3)]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(model, optimiser)
    replayed = []
    for _ in range(5):
        graph.replay()
        replayed.append(float(loss.detach()))
    assert warm + replayed == losses


def test_h059_graphs_made_and_freed_leave_memory_flat() -> None:
    a, b = normal(DEEP[0], DEEP[2]), normal(DEEP[2], DEEP[1])
    tilewave.gemm(a, b, schedule="split_k")
    held = []
    for _ in range(100):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = tilewave.gemm(a, b, schedule="split_k")
        graph.replay()
        torch.cuda.synchronize()
        del graph, out
        gc.collect()
        torch.cuda.empty_cache()
        held.append((workspace_pool(gpu_state(0)).nbytes(), torch.cuda.memory_reserved()))
    assert len(set(held[5:])) == 1


def test_a_cold_capture_with_gradients_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel is forgotten for it: tests before this one have loaded some."""
    a, b = normal(77, 1234).requires_grad_(), normal(1234, 99)
    torch.cuda.synchronize()
    graph, out = torch.cuda.CUDAGraph(), torch.ones(3, device="cuda")
    with monkeypatch.context() as patched:
        patched.setattr(gpu_state(0), "_kernels", {})
        with torch.cuda.graph(graph):
            out.zero_()
            with pytest.raises(CaptureError, match="prepare"):
                tilewave.gemm(a, b, schedule="split_k:13")
    graph.replay()
    assert not out.any()


def test_h054_the_backward_pass_runs_on_the_stream_of_the_forward_pass() -> None:
    side = torch.cuda.Stream()
    w = torch.ones(256, 256, device="cuda")
    torch.cuda.synchronize()
    for turn in range(1, 51):
        with torch.cuda.stream(side):
            x = torch.zeros(256, 256, device="cuda").requires_grad_()
            torch.cuda._sleep(300_000)
            with torch.no_grad():
                x.fill_(turn)
            y = tilewave.matmul(x, w)
            torch.cuda._sleep(300_000)
            (y * turn).sum().backward()
            assert float(x.grad.sum()) == turn * 256.0**3
            assert float(y.detach().sum()) == turn * 256.0**3


@pytest.mark.parametrize("given", ["a stream", "its handle"])
def test_an_operand_dropped_at_once_is_kept_for_another_stream(given: str) -> None:
    """Its memory would be given to the next tensor of the current stream while the product still reads it."""
    b, out = torch.ones(1024, 1024, device="cuda"), torch.empty(1024, 1024, device="cuda")
    tilewave.matmul(b, b, out=out)  # loads the kernel, which takes longer than the GPU is kept busy below
    side: Any = torch.cuda.Stream()
    if given == "its handle":  # of a stream that PyTorch does not know
        side = torch.cuda.ExternalStream(int(driver._call("cuStreamCreate", 1)))
    where = side if given == "a stream" else side.cuda_stream
    for turn in range(1, 21):
        a = torch.full((1024, 1024), float(turn), device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
        tilewave.matmul(a, b, out=out, stream=where)
        del a
        torch.full((1024, 1024), NAN, device="cuda")
        side.synchronize()
        assert torch.all(out == 1024.0 * turn)


def test_h066_a_row_s_bits_with_gradients() -> None:
    x, w = normal(2, 93, 3286), normal(3286, 65)
    whole_batch = tilewave.gemm(x.clone().requires_grad_(), w, batch_invariant=True)
    for item in range(2):
        assert torch.equal(tilewave.gemm(x[item], w, batch_invariant=True), whole_batch[item])


def test_gradients_have_the_same_bits_in_every_run() -> None:
    x, w = normal(3000, 200).requires_grad_(), normal(200, 176).requires_grad_()
    runs = [torch.autograd.grad(tilewave.matmul(x, w).square().sum(), (x, w)) for _ in range(3)]
    assert all(torch.equal(one, other) for run in runs[1:] for one, other in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("name", ["torch_training", "torch_reference_check"])
def test_examples_run(name: str) -> None:
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.main()
