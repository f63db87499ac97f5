"""Faults that users of other libraries met with PyTorch (tests/library/handed_cases.json).

`test_hNNN_...` is a test of case HNNN; tests/library/test_handed_list.py holds the names against the list.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from samples import integers

import tilewave
from tilewave.errors import UsageError

Rng = np.random.Generator

PRODUCTS = {
    "mm": (lambda a, b: tilewave.matmul(a, b), torch.mm, ((3, 4), (4, 5))),
    "bmm": (lambda a, b: tilewave.matmul(a, b), torch.bmm, ((2, 3, 4), (2, 4, 5))),
    "addmm": (
        lambda a, b, c: tilewave.gemm(a, b, c, beta=1.0),
        lambda a, b, c: torch.addmm(c, a, b),
        ((3, 4), (4, 5), (3, 5)),
    ),
    "broadcast": (lambda a, b: tilewave.matmul(a, b), torch.matmul, ((2, 1, 3, 4), (3, 4, 5))),
    "transposed": (
        lambda a, b: tilewave.gemm(a, b, transpose_a=True, transpose_b=True),
        lambda a, b: torch.matmul(a.mT, b.mT),
        ((4, 3), (5, 4)),
    ),
}


def test_h111_compiled_strides_are_the_real_ones(path: str, rng: Rng) -> None:
    """Every transpose, contiguous or not, with and without out in both orders."""
    cases = []
    for turn_a, turn_b in itertools.product((False, True), repeat=2):
        for out in (None, torch.full((3, 5), torch.nan), torch.full((5, 3), torch.nan).T):
            a, b = integers(rng, (4, 3) if turn_a else (3, 4)), integers(rng, (5, 4) if turn_b else (4, 5))
            cases.append((a, b, turn_a, turn_b, out))

    def everything(cases: list[Any]) -> list[Any]:
        results = []
        for a, b, turn_a, turn_b, out in cases:
            result = tilewave.gemm(a, b, transpose_a=turn_a, transpose_b=turn_b, out=out)
            results.append(result.as_strided(result.shape, result.stride()) + 0)
        return results

    torch._dynamo.reset()
    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager")(cases)
    torch._dynamo.reset()
    for (a, b, turn_a, turn_b, out), result in zip(cases, compiled, strict=True):
        expected = (a.mT if turn_a else a) @ (b.mT if turn_b else b)
        assert torch.equal(result, expected)
        assert out is None or torch.equal(out, expected)


@pytest.mark.parametrize("name", PRODUCTS)
def test_h112_a_loss_goes_backward(path: str, rng: Rng, name: str) -> None:
    """Each operand alone, and all together; the others get no gradient."""
    ours, theirs, shapes = PRODUCTS[name]
    for wanted in (*((place,) for place in range(len(shapes))), tuple(range(len(shapes)))):
        given = [integers(rng, shape).requires_grad_(place in wanted) for place, shape in enumerate(shapes)]
        copies = [t.detach().clone().requires_grad_(t.requires_grad) for t in given]
        incoming = integers(rng, tuple(theirs(*copies).shape))
        (ours(*given) * incoming).sum().backward()
        (theirs(*copies) * incoming).sum().backward()
        for one, other in zip(given, copies, strict=True):
            assert (one.grad is None) == (other.grad is None)
            assert one.grad is None or torch.equal(one.grad, other.grad)


def test_h115_gradients_are_recorded_or_refused(path: str, rng: Rng) -> None:
    a, b = integers(rng, (4, 4)).requires_grad_(), integers(rng, (4, 4))
    tilewave.matmul(a, b).sum().backward()
    assert torch.equal(a.grad, b.sum(1).expand(4, 4))
    with pytest.raises(UsageError, match="requires a gradient meets an ndarray"):
        tilewave.matmul(a, b.numpy())
    with pytest.raises(UsageError, match=r"a\.resolve_neg\(\)"):
        tilewave.matmul(torch.ones(4, 4, dtype=torch.complex64).conj().imag, b)
