"""Tensors that hold no float32 numbers in memory of their own: each is refused by name, everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tilewave
import tilewave.torch
from tilewave.errors import OperandTypeError, TilewaveError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore:.*(quantize|CSR tensor|nested tensors):UserWarning")


def freed() -> torch.Tensor:
    tensor = torch.randn(3, 3)
    tensor.untyped_storage().resize_(0)
    return tensor


def faked() -> torch.Tensor:
    with FakeTensorMode():
        return torch.randn(3, 3)


UNUSABLE: dict[str, Callable[[], Any]] = {
    "float64": lambda: torch.randn(3, 3, dtype=torch.float64),
    "bfloat16": lambda: torch.randn(3, 3).bfloat16(),
    "float8": lambda: torch.randn(3, 3).to(torch.float8_e4m3fn),
    "qint8": lambda: torch.quantize_per_tensor(torch.randn(3, 3), 0.1, 0, torch.qint8),
    "complex": lambda: torch.randn(3, 3, dtype=torch.complex64),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "meta": lambda: torch.randn(3, 3, device="meta"),
    "fake": faked,
    "nested": lambda: torch.nested.nested_tensor([torch.randn(3, 3), torch.randn(3, 3)]),
    "freed": freed,
}


# Fake tensors among real ones are PyTorch's to refuse.
@pytest.mark.parametrize("kind", [kind for kind in UNUSABLE if kind != "fake"])
@pytest.mark.parametrize("gradient", [False, True])
def test_each_place_refuses_it(kind: str, gradient: bool) -> None:
    tensor, good = UNUSABLE[kind](), torch.randn(3, 3)
    other = good.clone().requires_grad_(gradient)
    for call in (
        lambda: tilewave.matmul(tensor, other),
        lambda: tilewave.matmul(other, tensor),
        lambda: tilewave.gemm(other, good, tensor, beta=1.0),
        lambda: tilewave.matmul(good, good, out=tensor),
        lambda: tilewave.grouped_gemm([(good, other), (other, tensor)]),
    ):
        with pytest.raises(TilewaveError):
            call()


@pytest.mark.parametrize("kind", UNUSABLE)
def test_check_refuses_it(kind: str) -> None:
    tensor, good = UNUSABLE[kind](), torch.randn(3, 3)
    for place, operands in enumerate(((tensor, good, good), (good, tensor, good), (good, good, tensor))):
        with pytest.raises(TilewaveError, match=f"^{'abc'[place]} is "):
            tilewave.check(*operands)


def test_check_names_the_cast() -> None:
    good = torch.randn(3, 3)
    with pytest.raises(UsageError, match=r"accepted are strided ones: a\.to_dense\(\)"):
        tilewave.check(good.to_sparse(), good, good @ good)
    with pytest.raises(OperandTypeError, match=r"c is bfloat16 of shape .*c\.float\(\)"):
        tilewave.check(good, good, (good @ good).bfloat16())


@pytest.mark.parametrize("kind", [kind for kind in UNUSABLE if kind != "fake"])
def test_linear_says_whose_operand_it_is(kind: str) -> None:
    tensor, good, layer = UNUSABLE[kind](), torch.randn(3, 3), tilewave.torch.Linear(3, 3)
    for call, name in (
        (lambda: layer(tensor), "a"),
        (lambda: tilewave.torch.functional.linear(good, tensor), "b"),
        (lambda: tilewave.torch.functional.linear(good, good, tensor), "bias"),
    ):
        with pytest.raises(
            TilewaveError, match=rf"^linear \(input is a, weight b\): (operands lie apart: .*)?{name} "
        ):
            call()
    for weight in ([[1.0] * 3], [1.0] * 3, None, "weight"):
        with pytest.raises(OperandTypeError, match=r"^linear .*: b is "):
            tilewave.torch.functional.linear(good, weight)


def test_an_inference_tensor_is_refused_as_out_before_it_is_written() -> None:
    a = torch.randn(3, 3)
    with torch.inference_mode():
        out = torch.full((3, 3), float("nan"))
    with pytest.raises(
        UsageError, match=r"^out of shape \(3, 3\) and strides \(3, 1\) was made in inference"
    ):
        tilewave.matmul(a, a, out=out)
    assert out.isnan().all()
    with torch.inference_mode():
        assert tilewave.matmul(a, a, out=out) is out
    assert torch.equal(out, a @ a)


def test_override_leaves_nested_tensors_to_pytorch() -> None:
    nested = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)])
    other = torch.nested.nested_tensor([torch.randn(4, 5), torch.randn(4, 6)])
    expected = torch.matmul(nested, other).unbind()
    with tilewave.torch.override():
        found = torch.matmul(nested, other).unbind()
        mapped = torch.nn.functional.linear(nested, torch.ones(2, 4)).unbind()
    assert all(map(torch.equal, found, expected))
    assert [tuple(part.shape) for part in mapped] == [(2, 2), (3, 2)]


@pytest.mark.parametrize(
    "options",
    [
        {"bias_axis": None},
        {"bias_axis": -1.0},
        {"bias_axis": "x"},
        {"precision": None},
        {"precision": []},
        {"activation": 3},
        {"activation": []},
        {"schedule": []},
        {"max_sms": 1.0},
        {"max_sms": 0},
        {"deterministic": 1},
        {"batch_invariant": "x"},
        {"workspace": True},
        {"workspace": -1},
        {"return_preactivation": 1},
        {"transpose_a": 1},
    ],
    ids=str,
)
def test_options_are_refused_in_our_own_words(options: dict[str, Any]) -> None:
    a = torch.randn(3, 3)
    given = {"bias": a[0], **options}
    (name,) = options

    def call(x: torch.Tensor) -> Any:
        return tilewave.gemm(x, a, **given)

    ways: tuple[Callable[[], Any], ...] = (
        lambda: call(a),
        lambda: call(a.clone().requires_grad_()),
        lambda: torch.vmap(call)(a.expand(2, 3, 3)),
        lambda: torch.func.jvp(call, (a,), (a,)),
        lambda: torch.func.grad(lambda x: call(x).sum())(a),
    )
    for way in ways:
        with pytest.raises(TilewaveError, match=name):
            way()


def test_an_unlimited_workspace_is_no_limit() -> None:
    a = torch.randn(3, 3)
    found = torch.vmap(lambda x: tilewave.gemm(x, a, workspace=10**30))(a.expand(2, 3, 3))
    assert torch.equal(found[1], tilewave.gemm(a, a))


@pytest.mark.parametrize("gradient", [False, True])
def test_a_missing_operand_is_named(gradient: bool) -> None:
    tensor = torch.randn(3, 3, requires_grad=gradient)
    missing: Any = None
    for name, operands in (("a", (missing, tensor)), ("b", (tensor, missing))):
        for call in (
            lambda pair: tilewave.matmul(*pair),
            lambda pair: tilewave.gemm(*pair, beta=0.0),
            lambda pair: tilewave.grouped_gemm([pair]),
        ):
            with pytest.raises(OperandTypeError, match=f"{name} is a NoneType"):
                call(operands)


@pytest.mark.parametrize("gradient", [False, True])
def test_zeros_are_float32_whatever_the_defaults_are(gradient: bool) -> None:
    """Where nothing is summed the result is made from nothing, but not by PyTorch's defaults."""
    empty, full = torch.empty(3, 0), torch.randn(3, 3)
    empty.requires_grad_(gradient)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            results = (
                tilewave.matmul(empty, empty.mT),
                tilewave.gemm(full, full, alpha=0.0),
                tilewave.gemm(full, full, full, alpha=0.0, beta=2.0),
                torch.vmap(tilewave.matmul)(empty[None], empty.mT[None])[0],
                *tilewave.grouped_gemm([(empty, empty.mT), (full, full)]),
            )
    finally:
        torch.set_default_dtype(before)
    assert all((found.dtype, found.device.type) == (torch.float32, "cpu") for found in results)
    expected = (0 * full, 0 * full, 2 * full, 0 * full, 0 * full, full @ full)
    assert all(map(torch.equal, results, expected))
