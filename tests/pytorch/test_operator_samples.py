"""PyTorch's own samples of its products (its OpInfo lists), through `tilewave.torch.override`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewave
import tilewave.torch

pytest.importorskip("expecttest", reason="PyTorch's own tests need it")

from torch.testing._internal.common_methods_invocations import op_db

OPERATORS = {"mm", "addmm", "bmm", "baddbmm", "matmul", "nn.functional.linear", "__rmatmul__"}
OPINFOS = [info for info in op_db if info.name in OPERATORS]


def test_the_list_of_operators_is_whole() -> None:
    assert {info.name for info in OPINFOS} == OPERATORS


@pytest.mark.parametrize("info", OPINFOS, ids=lambda info: f"{info.name}{info.variant_test_name}")
@pytest.mark.parametrize("requires_grad", [False, True])
def test_torch_s_own_samples(path: str, info: Any, requires_grad: bool) -> None:
    """Functions, methods, in-place forms and out=, with gradients: as PyTorch, and through tilewave."""
    forms = [info.op, info.method_variant, info.inplace_variant]
    taken = tried = 0
    for drawn in info.sample_inputs("cpu", torch.float32, requires_grad=requires_grad):
        sample = drawn.transform(_whole)
        for form in forms:
            if form is None or (form is info.inplace_variant and sample.broadcasts_input):
                continue
            with tilewave.record() as shapes, tilewave.torch.override():
                got = _applied(form, info, sample)
            tried += 1
            taken += bool(len(shapes))
            expected = _applied(form, info, sample)
            assert got[0].stride() == expected[0].stride()
            for ours, theirs in zip(got, expected, strict=True):
                # alpha and beta of the samples are no powers of two: 1e-3 is a few roundings of 1000.
                atol = 1e-3 if {"alpha", "beta"} & set(sample.kwargs) else 0
                torch.testing.assert_close(ours, theirs, rtol=0, atol=atol, equal_nan=True)
    # PyTorch keeps in-place forms of tensors with gradients; nothing is recorded of empty results.
    assert taken >= tried / 4
    assert tried


def _whole(value: Any) -> Any:
    """A tensor rounded to integers, whose products are exact in float32."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().round().requires_grad_(value.requires_grad)


def _applied(form: Any, info: Any, sample: Any) -> list[Any]:
    """The result of a sample, and the gradients of all its tensors if they have any."""
    given = sample.input
    leaves = [t for t in (given, *sample.args, *sample.kwargs.values()) if isinstance(t, torch.Tensor)]
    leaves = [t for t in leaves if t.requires_grad]
    if form is info.inplace_variant:
        given = given.clone()
    result = form(given, *sample.args, **sample.kwargs)
    if not leaves:
        return [result]
    gradients = torch.autograd.grad(result, leaves, torch.ones_like(result), allow_unused=True)
    return [result, *(g for g in gradients if g is not None)]
