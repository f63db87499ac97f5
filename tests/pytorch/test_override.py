"""`tilewave.torch.override`: what goes through tilewave, what does not, and that leaving it restores all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from samples import integers
from torch.utils.checkpoint import checkpoint

import tilewave
import tilewave.torch
from tilewave.errors import UsageError

Rng = np.random.Generator


@contextmanager
def counted() -> Iterator[list[int]]:
    """The number of products that tilewave computes inside, known afterwards."""
    seen: list[int] = []
    with tilewave.record() as shapes:
        yield seen
    seen.append(sum(count for _, count in shapes.items()))


def products(call: Callable[[], Any]) -> int:
    with counted() as seen:
        call()
    return seen[0]


X, W, B = torch.ones(3, 4), torch.ones(4, 5), torch.ones(5)
BATCH = torch.ones(2, 4, 4)
TAKEN: dict[str, Callable[[], Any]] = {
    "mm": lambda: torch.mm(X, W),
    "mm method": lambda: X.mm(W),
    "mm out": lambda: torch.mm(X, W, out=torch.empty(3, 5)),
    "matmul": lambda: torch.matmul(X, B[:4]),
    "at": lambda: X @ W,
    "at of vectors": lambda: B @ B,
    "batched": lambda: BATCH @ BATCH[0],
    "linalg": lambda: torch.linalg.matmul(X, W),
    "addmm": lambda: torch.addmm(B, X, W, alpha=2, beta=0.5),
    "addmm in place": lambda: torch.empty(3, 5).fill_(1).addmm_(X, W),
    "bmm": lambda: torch.bmm(BATCH, BATCH),
    "baddbmm": lambda: torch.baddbmm(BATCH, BATCH, BATCH),
    "baddbmm in place": lambda: BATCH.clone().baddbmm_(BATCH, BATCH, beta=0),
    "linear": lambda: torch.nn.functional.linear(X, W.T, B),
    "module": lambda: torch.nn.Linear(4, 5)(X),
    "transposed": lambda: X.T.mm(X),
    "meta": lambda: X.to("meta") @ W.to("meta"),
}
LEFT: dict[str, Callable[[], Any]] = {
    "float64": lambda: X.double() @ W.double(),
    "integers": lambda: X.int() @ W.int(),
    "complex": lambda: X.to(torch.complex64) @ W.to(torch.complex64),
    "sparse": lambda: X.to_sparse() @ W,
    "other functions": lambda: torch.einsum("ij,jk->ik", X, W) + torch.mv(X, B[:4]).sum(),
    "lazily negated": lambda: torch.ones(3, 4, dtype=torch.complex64).conj().imag @ W,
    "subclass": lambda: X.as_subclass(Named) @ W,
    "out of another shape": lambda: torch.mm(X, W, out=torch.empty(0)),
    "one input for all": lambda: torch.addmm(B.double(), X.double(), W.double()),
}


class Named(torch.Tensor):
    """A subclass that PyTorch's functions keep."""


REFUSED: dict[str, Callable[[], Any]] = {
    "sizes": lambda: X @ X,
    "sizes of mm": lambda: torch.mm(X, X),
    "axes of mm": lambda: torch.mm(BATCH, BATCH),
    "items of bmm": lambda: torch.bmm(BATCH, BATCH[:1]),
    "batches": lambda: torch.ones(2, 3, 4) @ torch.ones(5, 4, 3),
    "addend": lambda: torch.addmm(X, X, W),
    "addend written": lambda: B.clone().addmm_(X, W),
    "items of baddbmm": lambda: torch.baddbmm(BATCH, BATCH[:1], BATCH),
    "weight": lambda: torch.nn.functional.linear(X, W),
    "bias": lambda: torch.nn.functional.linear(X, W.T, B[:3]),
    "dtypes": lambda: X @ W.double(),
    "dtype of out": lambda: torch.mm(X, W, out=torch.empty(3, 5, dtype=torch.float64)),
    "out and gradients": lambda: torch.mm(X.clone().requires_grad_(), W, out=torch.empty(3, 5)),
    "scalar": lambda: torch.matmul(X, X.sum()),
    "number": lambda: torch.matmul(X, 2),
    "nothing": lambda: torch.mm(X),
    "no such argument": lambda: torch.mm(X, W, scale=2),
    "imaginary alpha": lambda: torch.addmm(B, X, W, alpha=1j),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_refused_in_its_words(name: str) -> None:
    with pytest.raises((RuntimeError, TypeError)) as alone:
        REFUSED[name]()
    with tilewave.torch.override(), pytest.raises(type(alone.value)) as inside:
        REFUSED[name]()
    assert str(inside.value) == str(alone.value)


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_taken(name: str) -> None:
    expected = TAKEN[name]()
    torch.manual_seed(0)
    outside = products(lambda: TAKEN[name]())
    assert outside == 0
    got: list[Any] = []
    torch.manual_seed(0)
    with tilewave.torch.override():
        assert products(lambda: got.append(TAKEN[name]())) == (name != "meta")
    if name not in ("meta", "module"):
        assert torch.equal(got[0], expected)


@pytest.mark.parametrize("name", LEFT)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized:UserWarning")
def test_what_is_left_to_torch(name: str) -> None:
    expected = LEFT[name]()
    got: list[Any] = []
    with tilewave.torch.override():
        assert products(lambda: got.append(LEFT[name]())) == 0
    assert type(got[0]) is type(expected)
    assert torch.equal(torch.as_tensor(got[0].to_dense()), torch.as_tensor(expected.to_dense()))


def test_small_products_are_left_where_that_is_asked_for() -> None:
    with tilewave.torch.override(min_size=3 * 4 * 5):
        assert products(lambda: X @ W) == 1
        assert products(lambda: torch.addmm(B, X, W)) == 1
        assert products(lambda: torch.nn.functional.linear(X, W.T)) == 1
        assert products(lambda: X[:2] @ W) == 0
        assert products(lambda: BATCH[:, :2] @ BATCH) == 1


def test_the_inner_block_counts() -> None:
    with tilewave.torch.override():
        with tilewave.torch.override(min_size=1000):
            assert products(lambda: X @ W) == 0
            with tilewave.torch.override():
                assert products(lambda: X @ W) == 1
        assert products(lambda: X @ W) == 1
    assert products(lambda: X @ W) == 0


def test_one_object_serves_twice_and_within_itself() -> None:
    block = tilewave.torch.override()
    for _ in range(2):
        with block, block:
            assert products(lambda: X @ W) == 1
        assert products(lambda: X @ W) == 0


def test_an_exception_restores_all() -> None:
    def fail() -> None:
        with tilewave.torch.override():
            X @ X

    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        fail()
    assert products(lambda: X @ W) == 0
    with tilewave.torch.override():
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            X @ X
        assert products(lambda: X @ W) == 1


def test_other_threads_are_untouched() -> None:
    inside, done = threading.Event(), threading.Event()
    found: list[int] = []

    def hold() -> None:
        with tilewave.torch.override():
            inside.set()
            done.wait(30)

    def look() -> None:
        found.append(products(lambda: X @ W))

    holder = threading.Thread(target=hold)
    holder.start()
    assert inside.wait(30)
    look()
    done.set()
    holder.join()
    with tilewave.torch.override():
        other = threading.Thread(target=look)
        other.start()
        other.join()
        look()
    look()
    assert found == [0, 0, 1, 0]


def test_autocast_keeps_what_it_would_compute_in_fewer_bits() -> None:
    with tilewave.torch.override(), torch.autocast("cpu", torch.bfloat16):
        assert products(lambda: X @ W) == 0
        assert (X @ W).dtype is torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            assert products(lambda: X @ W) == 1


def test_the_backward_pass_of_what_was_computed_inside(rng: Rng) -> None:
    x, w = integers(rng, (3, 4)).requires_grad_(), integers(rng, (4, 5)).requires_grad_()
    with tilewave.torch.override():
        assert products(lambda: (x @ w).sum().backward()) == 3
        y = (x @ w).sum()
    assert products(y.backward) == 2  # outside, too: it was recorded inside


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_forward_is_repeated_the_same_way(rng: Rng, reentrant: bool) -> None:
    x, w = integers(rng, (3, 4)).requires_grad_(), integers(rng, (4, 5)).requires_grad_()

    def block(x: Any) -> Any:
        return torch.relu(x @ w)

    def step() -> None:
        checkpoint(block, x, use_reentrant=reentrant).sum().backward()

    with tilewave.torch.override():
        assert products(step) == 4  # forward, forward again, two gradients
    expected = torch.autograd.grad(block(x).sum(), (x, w))
    assert all(map(torch.equal, (x.grad, w.grad), expected))


def test_attention_of_torch_s_own_modules(rng: Rng) -> None:
    module = torch.nn.MultiheadAttention(8, 2)
    x = integers(rng, (3, 2, 8)).requires_grad_()
    with tilewave.torch.override():
        got: list[Any] = []
        assert products(lambda: got.append(module(x, x, x)[0])) == 4
    torch.testing.assert_close(got[0], module(x, x, x)[0])


def test_a_network_trains_as_before(path: str, rng: Rng) -> None:
    def losses(use: bool) -> list[float]:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
        optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
        data, target = torch.randn(20, 6), torch.randn(20, 1)
        found = []
        for _ in range(5):
            with tilewave.torch.override(min_size=0 if use else 2**60):
                loss = (model(data) - target).square().mean()
                optimiser.zero_grad()
                loss.backward()
            optimiser.step()
            found.append(float(loss.detach()))
        return found

    np.testing.assert_allclose(losses(True), losses(False), rtol=1e-4)


def test_mistakes() -> None:
    for wrong in (-1, 1.5, True, "large", None):
        with pytest.raises(UsageError, match=r"min_size is .*accepted is a number of multiply-adds"):
            tilewave.torch.override(min_size=wrong)
    with pytest.raises(UsageError, match="precision is 'exact'"):
        tilewave.torch.override(precision="exact")
