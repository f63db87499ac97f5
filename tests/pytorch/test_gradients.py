"""Gradients of gemm of every order and in both modes, against PyTorch's own in float64.

Operands are small integers: sums and products of them are exact in float32, so that results must be equal.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from emulated_gpu import EmulatedExecutor
from samples import LINEAR, SAMPLES, Sample, doubled, integers, reference

import tilewave
from tilewave.errors import UsageError

Rng = np.random.Generator
FAMILY = {"a": (3, 4), "b": (4, 5), "c": (3, 5), "bias": (5,)}


def weights(rng: Rng, result: Any) -> Any:
    """An incoming gradient for a result."""
    return torch.from_numpy(rng.integers(-3, 4, tuple(result.shape)).astype(np.float32))


def gradients(function: Any, tensors: dict[str, Any], more: dict[str, Any], incoming: Any) -> list[Any]:
    result = function(**tensors, **more)
    return [result, *torch.autograd.grad(result, list(tensors.values()), incoming.to(result.dtype))]


@pytest.mark.parametrize("place", LINEAR)
def test_gradients_are_those_of_torch(path: str, rng: Rng, place: int) -> None:
    sample = SAMPLES[place]
    tensors = sample.tensors(rng)
    expected_result = reference(**doubled(tensors), **sample.more)
    incoming = weights(rng, expected_result)
    got = gradients(tilewave.gemm, tensors, sample.more, incoming)
    expected = gradients(reference, doubled(tensors), sample.more, incoming)
    for ours, theirs, source in zip(got, expected, [None, *tensors.values()], strict=True):
        assert ours.dtype is torch.float32
        assert source is None or ours.shape == source.shape
        assert torch.equal(ours.double(), theirs)


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_gradients_through_an_activation(path: str, rng: Rng, activation: str) -> None:
    sample = Sample((3, 4), (5, 4), (3, 1), (5,), {"transpose_b": True, "beta": 1.0, "alpha": 0.125})
    tensors, more = sample.tensors(rng), {**sample.more, "activation": activation}
    incoming = weights(rng, reference(**tensors, **more))
    got = gradients(tilewave.gemm, tensors, more, incoming)
    expected = gradients(reference, doubled(tensors), more, incoming)
    for ours, theirs in zip(got, expected, strict=True):
        # |z| < 13, slopes below 1.2, at most 5 terms of at most 3 * 3: 1e-4 is a hundred roundings of 54.
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=1e-4)


def test_the_preactivation_differentiates_too(path: str, rng: Rng) -> None:
    tensors = Sample((3, 4), (4, 5), None, (5,)).tensors(rng)
    out, z = tilewave.gemm(**tensors, activation="relu", return_preactivation=True)
    wide = doubled(tensors)
    z_wide = reference(**wide)
    out_wide = torch.relu(z_wide)
    for ours, theirs in ((out, out_wide), (z, z_wide), (out * 2 - z, out_wide * 2 - z_wide)):
        got = torch.autograd.grad(ours.sum(), list(tensors.values()), retain_graph=True)
        expected = torch.autograd.grad(theirs.sum(), list(wide.values()), retain_graph=True)
        assert all(torch.equal(x.double(), y) for x, y in zip(got, expected, strict=True))


def curvature(function: Any, tensors: dict[str, Any], more: dict[str, Any]) -> list[Any]:
    """Gradients of the squared length of the gradients of a squared result."""
    leaves = list(tensors.values())
    result = function(**tensors, **more)
    first = torch.autograd.grad((result * result).sum(), leaves, create_graph=True)
    return list(torch.autograd.grad(sum((g * g).sum() for g in first), leaves))


SECOND = [0, 1, 2, 4, 8, 9, 13, 17, 19, 21]


@pytest.mark.parametrize("place", SECOND)
def test_the_second_derivative_by_backward_of_backward(path: str, rng: Rng, place: int) -> None:
    sample = SAMPLES[place]
    tensors = {name: (t.detach().sign()).requires_grad_() for name, t in sample.tensors(rng).items()}
    got = curvature(tilewave.gemm, tensors, sample.more)
    expected = curvature(reference, doubled(tensors), sample.more)
    for ours, theirs in zip(got, expected, strict=True):
        assert float(theirs.abs().max()) < 2**24  # exact in float32
        assert torch.equal(ours.double(), theirs)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_the_second_derivative_of_a_curved_activation(path: str, rng: Rng, activation: str) -> None:
    """Of the loss sum(activation(z)^2): its first derivative goes through z, which must carry the second."""
    more = {"activation": activation, "alpha": 0.25}
    tensors = Sample((3, 4), (4, 5), None, (5,)).tensors(rng)

    def twice(function: Any, tensors: dict[str, Any]) -> list[Any]:
        leaves = list(tensors.values())
        first = torch.autograd.grad((function(**tensors, **more) ** 2).sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(sum(g.sum() for g in first), leaves))

    for ours, theirs in zip(twice(tilewave.gemm, tensors), twice(reference, doubled(tensors)), strict=True):
        assert theirs.any()
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("place", LINEAR)
def test_forward_mode(path: str, rng: Rng, place: int) -> None:
    sample = SAMPLES[place]
    tensors = sample.tensors(rng, requires_grad=False)
    tangents = {name: integers(rng, tuple(t.shape)) for name, t in tensors.items()}
    chosen = [name for name in tensors if rng.integers(2)] or ["a"]

    def tangent(function: Any, wide: bool) -> Any:
        convert = (lambda t: t.double()) if wide else (lambda t: t)
        with torch.autograd.forward_ad.dual_level():
            duals = {
                name: torch.autograd.forward_ad.make_dual(convert(t), convert(tangents[name]))
                if name in chosen
                else convert(t)
                for name, t in tensors.items()
            }
            return torch.autograd.forward_ad.unpack_dual(function(**duals, **sample.more)).tangent

    got, expected = tangent(tilewave.gemm, False), tangent(reference, True)
    assert torch.equal(got.double(), expected)


def test_only_wanted_gradients_are_computed(gpu_path: Any, rng: Rng) -> None:
    """Case H112: one product forward, one backward for each operand that wants a gradient, none else."""
    for wanted in ({"a"}, {"b"}, {"a", "b"}, {"bias"}, {"c"}):
        tensors = Sample((3, 4), (4, 5), (3, 5), (5,)).tensors(rng, requires_grad=False)
        for name in wanted:
            tensors[name].requires_grad_()
        before = len(gpu_path)
        result = tilewave.gemm(**tensors, beta=1.0)
        assert len(gpu_path) == before + 1
        result.sum().backward()
        assert len(gpu_path) == before + 1 + len(wanted & {"a", "b"})
        assert {name for name, t in tensors.items() if t.grad is not None} == wanted


def test_only_what_is_needed_is_saved(gpu_path: Any, rng: Rng) -> None:
    tensors = Sample((3, 4), (4, 5)).tensors(rng, requires_grad=False)
    tensors["a"].requires_grad_()
    result = tilewave.gemm(**tensors)  # kept: PyTorch 2.11 frees what is saved with it
    saved = result.grad_fn.saved_tensors
    assert saved[0] is None
    assert saved[1] is not None
    assert saved[2] is None


def test_an_operand_that_is_not_needed_again_is_let_go(path: str) -> None:
    x, w = torch.ones(3, 4, requires_grad=True), torch.ones(4, 5)
    y = x * 2
    gone = weakref.ref(y)
    result = tilewave.matmul(y, w)
    del y
    assert gone() is None
    result.sum().backward()
    assert torch.all(x.grad == 10)


def test_a_shared_weight_s_gradient_is_one_product_without_a_batch(gpu_path: Any, rng: Rng) -> None:
    x, w = integers(rng, (6, 3, 4)), integers(rng, (5, 4)).requires_grad_()
    tilewave.gemm(x, w, transpose_b=True).sum().backward()
    gradient = gpu_path.submissions[-1].problem
    assert gradient.batches == 1
    assert sorted((gradient.m, gradient.n, gradient.k)) == [4, 5, 18]


def test_the_gradient_of_a_sum_has_stride_zero(path: str, rng: Rng) -> None:
    """Case H011 with a gradient: what arrives is an expanded scalar."""
    x, v = integers(rng, (2, 2)).requires_grad_(), torch.ones(2)
    tilewave.matmul(x, v).sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 2))


def test_beta_zero_does_not_read_c_in_the_backward_pass(path: str, rng: Rng) -> None:
    a, b = (integers(rng, (3, 3)).requires_grad_() for _ in range(2))
    c = torch.full((3, 3), float("nan"), requires_grad=True)
    result = tilewave.gemm(a, b, c)
    result.backward(torch.full((3, 3), float("inf")))
    assert not c.grad.any()


def test_out_with_gradients_is_refused_before_it_is_written(path: str) -> None:
    a, b, out = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2), torch.full((2, 2), 7.0)
    with pytest.raises(UsageError, match=r"out=None.*no_grad"):
        tilewave.matmul(a, b, out=out)
    assert torch.all(out == 7)
    with torch.no_grad():
        assert tilewave.matmul(a, b, out=out) is out
    assert torch.all(out == 2)


def test_a_result_written_in_place_is_noticed(path: str) -> None:
    """PyTorch's own check that what a backward pass needs was not changed meanwhile."""
    x = torch.ones(2, 2, requires_grad=True)
    y = x.exp()
    with torch.no_grad():
        tilewave.matmul(torch.ones(2, 2), torch.ones(2, 2), out=y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_other_libraries_have_no_gradients() -> None:
    a = torch.ones(2, 2, requires_grad=True)
    with pytest.raises(UsageError, match=r"meets an ndarray.*detach"):
        tilewave.matmul(a, np.ones((2, 2), np.float32))
    with torch.no_grad():
        assert torch.all(tilewave.matmul(a, np.ones((2, 2), np.float32)) == 2)


def test_gradients_by_the_kernels_themselves(
    gpu_path: Any, monkeypatch: pytest.MonkeyPatch, rng: Rng
) -> None:
    """A training step's products in tilewave's own kernels, run by the emulator."""
    run = EmulatedExecutor()
    monkeypatch.setattr("tilewave.on_device.executor", lambda: run)
    shapes = {"a": (2, 9, 20), "b": (7, 20), "bias": (7,)}
    tensors = {name: integers(rng, shape).requires_grad_() for name, shape in shapes.items()}
    more = {"transpose_b": True, "activation": "relu"}
    incoming = weights(rng, reference(**tensors, **more))
    got = gradients(tilewave.gemm, tensors, more, incoming)
    expected = gradients(reference, doubled(tensors), more, incoming)
    assert len(run.plans) == 3
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours.double(), theirs)
