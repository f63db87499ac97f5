"""Inference mode, autocast, threads, checkpoints, subclasses, switches: the circumstances of a product."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from samples import integers
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import tilewave
import tilewave.torch
from tilewave import warm
from tilewave.errors import OperandTypeError, UsageError
from tilewave.torch import compute

Rng = np.random.Generator


def test_tensors_of_the_cpu_are_torch_s_own_product(rng: Rng) -> None:
    a, b = torch.randn(30, 40), torch.randn(40, 50)
    assert torch.equal(tilewave.matmul(a, b), torch.matmul(a, b))
    out = torch.empty(50, 30)
    assert tilewave.matmul(a, b, out=out.T).data_ptr() == out.data_ptr()
    assert torch.equal(out.T, torch.matmul(a, b))
    before = out._version
    tilewave.matmul(b.T, a.T, out=out)
    assert out._version > before


def test_overlapping_out_on_the_cpu(path: str, rng: Rng) -> None:
    a = integers(rng, (4, 4))
    expected = a @ a
    assert tilewave.matmul(a, a, out=a) is a
    assert torch.equal(a, expected)


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_no_switch_of_torch_changes_a_product(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    """Told to multiply in fewer bits, PyTorch is not asked."""
    switch = torch.backends.mkldnn.matmul
    before = switch.fp32_precision
    switch.fp32_precision = precision
    try:
        assert compute.reduced_on_host()
        with monkeypatch.context() as patch:
            patch.setattr(torch, "matmul", None)
            a = torch.tensor([[1.0 + 2.0**-20]], requires_grad=True)
            result = tilewave.matmul(a, torch.ones(1, 1))
        assert float(result.detach()) == 1.0 + 2.0**-20
        assert result.requires_grad
    finally:
        switch.fp32_precision = before
    assert not compute.reduced_on_host()


def test_the_general_switch_is_seen_too() -> None:
    try:
        torch.set_float32_matmul_precision("medium")
        assert compute.reduced_on_host()
    finally:
        torch.set_float32_matmul_precision("highest")
    assert not compute.reduced_on_host()


def test_inference_mode(path: str, rng: Rng) -> None:
    a, b = integers(rng, (3, 4)), integers(rng, (4, 5)).requires_grad_()
    with torch.inference_mode():
        result = tilewave.gemm(a, b, activation="relu")
        assert result.is_inference()
        assert torch.equal(tilewave.matmul(a, b, out=torch.empty(3, 5)).relu(), result)
        inside = integers(rng, (5, 2))
    assert not tilewave.matmul(b.detach(), inside).requires_grad


def test_autocast_leaves_a_product_float32(path: str, rng: Rng) -> None:
    a, b = integers(rng, (3, 4)), integers(rng, (4, 5)).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        result = tilewave.matmul(a, b)
        assert result.dtype is torch.float32
        layer = tilewave.torch.Linear(5, 2)
        assert layer(result).dtype is torch.float32
        with pytest.raises(OperandTypeError, match=r"a is bfloat16 of shape .*a\.float\(\)"):
            tilewave.matmul(torch.mm(a, b.detach()), torch.ones(5, 1))
    result.sum().backward()
    assert b.grad.dtype is torch.float32


def test_flops_are_counted(path: str, rng: Rng) -> None:
    x, w = integers(rng, (2, 3, 4)).requires_grad_(), integers(rng, (5, 4))
    with FlopCounterMode(display=False) as counter:
        tilewave.gemm(x, w, transpose_b=True, activation="relu").sum().backward()
        tilewave.gemm(w, w, transpose_a=True, out=torch.empty(4, 4))
        with tilewave.torch.override():
            torch.mm(w, w.T)
    assert counter.get_total_flops() == 2 * (2 * 6 * 5 * 4 + 4 * 4 * 5 + 5 * 5 * 4)


def test_threads(path: str) -> None:
    def work(seed: int) -> bool:
        rng = np.random.default_rng(seed)
        x, w = integers(rng, (4, 6)).requires_grad_(), integers(rng, (6, 3)).requires_grad_()
        for _ in range(20):
            x.grad = w.grad = None
            tilewave.gemm(x, w, activation="relu").sum().backward()
            mask = (x @ w > 0).float()
            if not (torch.equal(x.grad, mask @ w.T) and torch.equal(w.grad, x.T @ mask)):
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints(path: str, rng: Rng, reentrant: bool) -> None:
    x, w = integers(rng, (3, 4)).requires_grad_(), integers(rng, (5, 4)).requires_grad_()

    def block(x: Any) -> Any:
        return tilewave.gemm(x, w, transpose_b=True, activation="relu")

    checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    expected = torch.autograd.grad(torch.relu(x @ w.T).sum(), (x, w))
    assert all(map(torch.equal, (x.grad, w.grad), expected))


class Named(torch.Tensor):
    """A subclass with nothing of its own: PyTorch's functions give it back."""


def test_subclasses_come_back_as_from_torch_s_functions(path: str, rng: Rng) -> None:
    a, b = integers(rng, (3, 4)), integers(rng, (4, 5))
    result = tilewave.matmul(a.as_subclass(Named), b)
    assert type(result) is Named
    assert torch.equal(result.as_subclass(torch.Tensor), a @ b)
    a = a.contiguous()
    pair = tilewave.gemm(TwoTensor(a, -a), b, activation="relu")
    assert torch.equal(pair.a, (a @ b).relu())
    assert torch.equal(pair.b, (-a @ b).relu())


def test_tensors_that_are_no_arrays_are_refused_with_the_remedy(path: str) -> None:
    ones = torch.ones(3, 3)
    for tensor, words in (
        (ones.to_sparse(), r"a is a tensor of layout torch\.sparse_coo.*to_dense\(\)"),
        (torch.ones(3, 3, dtype=torch.complex64).conj().imag, r"lazily negated.*a\.resolve_neg\(\)"),
        (ones.half(), r"a is float16.*a\.float\(\)"),
        (ones.to(torch.complex64), "a is complex64.*real and imaginary"),
    ):
        for gradient in (False, True):
            with pytest.raises((UsageError, OperandTypeError), match=words):
                tilewave.matmul(tensor, ones.clone().requires_grad_(gradient))


def test_what_has_no_meaning_is_refused_with_the_remedy(rng: Rng) -> None:
    a = torch.ones(3, 3, requires_grad=True)
    for call, words in (
        (lambda: tilewave.matmul(a, a, stream=1), r"stream is given.*torch\.cuda\.stream"),
        (lambda: tilewave.gemm(a, a, workspace=torch.ones(9)), "workspace is memory.*a number of bytes"),
        (lambda: tilewave.gemm(a, a, workspace=-1), "workspace"),
        (lambda: tilewave.gemm(a, a, schedule=3), "schedule is 3"),
        (lambda: tilewave.gemm(a, a, activation="tanh"), "activation is 'tanh'"),
        (lambda: tilewave.gemm(a, a, beta=1.0), "there is no c"),
        (lambda: tilewave.gemm(a, a, bias_axis=-2), "there is no bias"),
        (lambda: tilewave.gemm(a, a, alpha=a.sum()), "alpha is a torch.Tensor"),
        (lambda: tilewave.gemm(a, a, transpose_a=1), "transpose_a must be True or False"),
        (lambda: tilewave.matmul(a, a[0, 0]), "b is 0-dimensional"),
        (lambda: tilewave.matmul(a, a, precision="exact"), "precision is 'exact'"),
    ):
        with pytest.raises((UsageError, OperandTypeError), match=words):
            call()


def test_groups_differentiate(path: str, rng: Rng) -> None:
    x, w = integers(rng, (3, 4)).requires_grad_(), integers(rng, (4, 5))
    first, second = tilewave.grouped_gemm([(x, w), {"a": x.detach(), "b": w, "alpha": 2.0}])
    assert torch.equal(first * 2, second)
    first.sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 5) @ w.T)
    with pytest.raises(UsageError, match=r"^problem 1: a of shape"):
        tilewave.grouped_gemm([(x, w), (x, x)])


def test_linear_has_the_parameters_and_results_of_torch(path: str, rng: Rng) -> None:
    torch.manual_seed(5)
    theirs = torch.nn.Linear(4, 5)
    torch.manual_seed(5)
    ours = tilewave.torch.Linear(4, 5, activation="relu")
    assert all(map(torch.equal, ours.state_dict().values(), theirs.state_dict().values()))
    ours.load_state_dict(theirs.state_dict())
    assert isinstance(ours, torch.nn.Linear)
    assert repr(ours) == "Linear(in_features=4, out_features=5, bias=True, activation='relu')"
    for shape in ((4,), (3, 4), (2, 3, 4)):
        x = integers(rng, shape)
        torch.testing.assert_close(ours(x), theirs(x).relu())
    assert tilewave.torch.Linear(4, 5, bias=False).bias is None
    for call, kind in (
        (lambda: tilewave.torch.Linear(4, 5, dtype=torch.float64), OperandTypeError),
        (lambda: tilewave.torch.Linear(4, 5, activation="tanh"), UsageError),
        (lambda: tilewave.torch.Linear(4, 5, precision="exact"), UsageError),
    ):
        with pytest.raises(kind, match="accepted"):
            call()


def test_functional_linear_takes_the_shapes_of_torch(path: str, rng: Rng) -> None:
    linear, theirs = tilewave.torch.functional.linear, torch.nn.functional.linear
    for x, w, b in (
        ((3, 4), (5, 4), (5,)),
        ((2, 3, 4), (5, 4), None),
        ((4,), (5, 4), (5,)),
        ((3, 4), (4,), None),
    ):
        tensors = [integers(rng, shape).requires_grad_() for shape in (x, w, *([] if b is None else [b]))]
        got, expected = linear(*tensors), theirs(*tensors)
        assert torch.equal(got, expected)
        gradients = (torch.autograd.grad(y.sum(), tensors) for y in (got, expected))
        assert all(map(torch.equal, *gradients))
    x, w = integers(rng, (3, 4)), integers(rng, (4,))  # a number as bias, which PyTorch only documents
    assert torch.equal(linear(x, w, torch.tensor(2.0), activation="relu"), (x @ w + 2).relu())


def test_a_build_with_cuda_compiles_too(monkeypatch: pytest.MonkeyPatch, rng: Rng) -> None:
    """There a tensor may go the short way of `tilewave.warm`, which a trace must not enter."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(warm, "_libraries", {})
    a, b = integers(rng, (3, 4)), integers(rng, (4, 5))
    torch._dynamo.reset()
    compiled = torch.compile(lambda a, b: tilewave.gemm(a, b, alpha=2.0), fullgraph=True, backend="eager")
    assert torch.equal(compiled(a, b), 2 * a @ b)
    torch._dynamo.reset()


def test_the_package_waits_for_its_first_use_and_says_what_it_needs() -> None:
    code = """
import sys
import tilewave
assert "torch" not in sys.modules
assert "torch" in dir(tilewave)
import numpy as np
tilewave.matmul(np.ones((2, 2), np.float32), np.ones((2, 2), np.float32))
assert "torch" not in sys.modules
sys.modules["torch"] = None
try:
    tilewave.torch
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("tilewave.torch needs PyTorch"), done.stderr


def test_public_names_have_docstrings() -> None:
    for name in tilewave.torch.__all__:
        assert getattr(tilewave.torch, name).__doc__
    assert tilewave.torch.functional.linear.__doc__
