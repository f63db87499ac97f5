"""Groups of tensors: gradients pass, traces work, and what is refused is refused by name."""

from __future__ import annotations

import pytest
import torch

import tilewave
from tilewave.errors import UsageError


def test_tensors_with_gradients_are_computed_beside_others() -> None:
    a = torch.randn(4, 5, requires_grad=True)
    b = torch.randn(5, 6, requires_grad=True)
    c, d = torch.randn(2, 3), torch.randn(3, 7)
    first, second, third = tilewave.grouped_gemm([(a, b), (c, d), {"a": b, "b": a, "alpha": 2.0, **SWAPPED}])
    assert torch.allclose(second, c @ d, atol=1e-5)
    assert not second.requires_grad
    (first.sum() + third.sum()).backward()
    own_a, own_b = a.detach().requires_grad_(), b.detach().requires_grad_()
    ((own_a @ own_b).sum() + (2 * own_b.T @ own_a.T).sum()).backward()
    assert torch.allclose(a.grad, own_a.grad, atol=1e-4)
    assert torch.allclose(b.grad, own_b.grad, atol=1e-4)


SWAPPED = {"transpose_a": True, "transpose_b": True}


def test_refusals_name_the_problem() -> None:
    a, b = torch.randn(4, 5, requires_grad=True), torch.randn(5, 6)
    with pytest.raises(UsageError, match=r"^problem 1: out is given and an operand requires a gradient"):
        tilewave.grouped_gemm([(b.T, b), {"a": a, "b": b, "out": torch.empty(4, 6)}])
    shared = torch.empty(4, 6)
    with pytest.raises(UsageError, match=r"^problem 0: out shares memory with out of problem 1"):
        tilewave.grouped_gemm([{"a": a.detach(), "b": b, "out": shared}] * 2)
    with pytest.raises(UsageError, match=r"^problem 1: a of shape"):
        tilewave.grouped_gemm([(a, b), (b, b)])


@pytest.mark.long
# PyTorch 2.11 says so of the long way that a group goes outside of the graph; what is cached there is pure.
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_a_group_is_traced() -> None:
    traced = torch.compile(lambda x, y: tilewave.grouped_gemm([(x, y), (y, y.T)])[1], backend="eager")
    x, y = torch.randn(3, 4), torch.randn(4, 5)
    assert torch.allclose(traced(x, y), y @ y.T, atol=1e-5)
