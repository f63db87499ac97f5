"""torch.vmap, torch.func, fake and meta tensors, torch.library.opcheck: the operators in PyTorch's hands."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from samples import SAMPLES, Sample, doubled, integers, reference
from torch._subclasses import FakeTensorMode

import tilewave
import tilewave.torch
from tilewave.errors import OperandTypeError, UsageError

Rng = np.random.Generator
ITEMS = 3
NAMES = ("a", "b", "c", "bias")


def mapped_over(function: Any, tensors: dict[str, Any], in_dims: dict[str, Any], more: dict[str, Any]) -> Any:
    names = list(tensors)
    return torch.vmap(
        lambda *each: function(**dict(zip(names, each, strict=True)), **more),
        in_dims=tuple(in_dims[name] for name in names),
    )(*tensors.values())


@pytest.mark.parametrize("place", [0, 1, 2, 3, 4, 5, 7, 8, 9, 11, 14, 17, 18, 19, 20, 21, 22, 23])
def test_vmap_is_one_batched_product(gpu_path: Any, rng: Rng, place: int) -> None:
    """Every choice of operands to map, each along a random axis."""
    sample = SAMPLES[place]
    shapes = {name: getattr(sample, name) for name in NAMES if getattr(sample, name) is not None}
    for choice in itertools.product((False, True), repeat=len(shapes)):
        if not any(choice):
            continue
        tensors, in_dims = {}, {}
        for (name, shape), chosen in zip(shapes.items(), choice, strict=True):
            axis = int(rng.integers(len(shape) + 1)) if chosen else None
            wide = shape if axis is None else (*shape[:axis], ITEMS, *shape[axis:])
            tensors[name], in_dims[name] = integers(rng, wide), axis
        before = len(gpu_path)
        got = mapped_over(tilewave.gemm, tensors, in_dims, sample.more)
        assert len(gpu_path) - before == (got.numel() > 0)
        expected = mapped_over(reference, {n: t.double() for n, t in tensors.items()}, in_dims, sample.more)
        assert torch.equal(got.double(), expected), choice


def test_vmap_in_vmap_and_of_pairs(path: str, rng: Rng) -> None:
    a, b = integers(rng, (2, 3, 4, 5)), integers(rng, (6, 5, 4))
    got = torch.vmap(lambda x: torch.vmap(lambda y: tilewave.matmul(x, y))(b))(a)
    assert torch.equal(got, torch.matmul(a[:, None], b[:, None]))
    out, z = torch.vmap(lambda x: tilewave.gemm(x, b[0], activation="relu", return_preactivation=True))(a)
    assert torch.equal(z, torch.matmul(a, b[0]))
    assert torch.equal(out, z.relu())


def test_vmap_refuses_what_each_item_would_be_refused(path: str) -> None:
    ones = torch.ones(3, 3)
    for call, words in (
        (lambda v: tilewave.matmul(v, ones, out=torch.empty(3)), "out cannot be given under torch.vmap"),
        (lambda v: tilewave.gemm(v, ones, transpose_a=True), "transpose_a is set, but each a is a vector"),
        (lambda v: tilewave.gemm(v, ones, bias=ones[0], bias_axis=-2), "bias_axis is -2"),
        (lambda v: tilewave.matmul(v.sum(), ones), "each a is 0-dimensional"),
        (lambda v: tilewave.matmul(v[:2], ones), "K is 2 in a and 3 in b"),
        (lambda v: tilewave.matmul(v.double(), ones), r"a is float64 of shape .*; accepted is float32"),
    ):
        with pytest.raises((UsageError, OperandTypeError), match=words):
            torch.vmap(call)(ones)


FUNCTIONS = {
    "grad": lambda f: torch.func.grad(f),
    "jacrev": lambda f: torch.func.jacrev(torch.func.grad(f)),
    "jacfwd of grad": lambda f: torch.func.jacfwd(torch.func.grad(f)),
    "grad of jvp": lambda f: torch.func.grad(lambda x: torch.func.jvp(f, (x,), (x,))[1]),
    "jacfwd of jacfwd": lambda f: torch.func.jacfwd(torch.func.jacfwd(f)),
    "vmap of grad": lambda f: lambda x: torch.vmap(torch.func.grad(f))(torch.stack([x, 2 * x])),
    "under no_grad": lambda f: torch.no_grad()(torch.func.grad(f)),
    "functionalize": lambda f: torch.func.functionalize(torch.func.grad(f)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_torch_func(path: str, rng: Rng, name: str) -> None:
    w, bias = integers(rng, (5, 4)), integers(rng, (5,))

    def squared(function: Any, dtype: torch.dtype) -> Any:
        def loss(x: Any) -> Any:
            more = {"bias": bias.to(dtype), "transpose_b": True, "activation": "relu", "alpha": 2.0}
            return (function(x, w.to(dtype), **more) ** 2).sum()

        return loss

    x = integers(rng, (3, 4)) + 0.25  # no preactivation is 0, where relu has no derivative
    x = x.contiguous()
    got = FUNCTIONS[name](squared(tilewave.gemm, torch.float32))(x)
    expected = FUNCTIONS[name](squared(reference, torch.float64))(x.double())
    assert torch.equal(got.double(), expected)


@pytest.mark.parametrize("place", [14, *(pytest.param(p, marks=pytest.mark.long) for p in (0, 3, 6, 19, 23))])
def test_opcheck(rng: Rng, place: int) -> None:
    sample = SAMPLES[place]
    tensors = sample.tensors(rng)
    arguments = [tensors.get(name) for name in NAMES]
    names = torch.ops.tilewave
    for operator in (names.gemm.default, names.gemm_with_preactivation.default):
        torch.library.opcheck(operator, arguments, {**sample.more, "activation": "silu"})
    detached = [t if t is None else t.detach() for t in arguments]
    out = torch.empty(reference(**{n: t.detach() for n, t in tensors.items()}, **sample.more).shape)
    torch.library.opcheck(names.gemm_out.default, [out, *detached], sample.more)


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_shapes_and_strides_without_memory_are_the_real_ones(path: str, rng: Rng, activation: Any) -> None:
    """Case H111, for every sample and layout, as fake tensors and as meta tensors."""
    for sample, pair in itertools.product(SAMPLES, (False, True)):
        tensors = sample.tensors(rng, requires_grad=False)
        more = {**sample.more, "activation": activation, "return_preactivation": pair}
        real = tilewave.gemm(**tensors, **more)
        with FakeTensorMode() as mode:
            faked = tilewave.gemm(**{name: mode.from_tensor(t) for name, t in tensors.items()}, **more)
        without = tilewave.gemm(**{name: t.to("meta") for name, t in tensors.items()}, **more)
        for kind in (faked, without):
            for one, other in zip(real, kind, strict=True) if pair else ((real, kind),):
                assert one.shape == other.shape
                assert one.stride() == other.stride()
                assert one.dtype == other.dtype
        assert (without[0] if pair else without).device.type == "meta"


def test_mistakes_are_named_without_memory_too() -> None:
    meta = torch.empty(3, 4, device="meta")
    with pytest.raises(UsageError, match="K is 4 in a and 3 in b"):
        tilewave.matmul(meta, meta)
    with pytest.raises(OperandTypeError, match=r"b is float16.*b\.float\(\)"):
        tilewave.matmul(meta, meta.T.half())
    with pytest.raises(UsageError, match="out of shape"):
        tilewave.matmul(meta, meta.T, out=torch.empty(2, 2, device="meta"))
    with pytest.raises(UsageError, match=r"operands lie apart: a on meta, b on cpu"):
        tilewave.matmul(meta, torch.ones(4, 3))
    with pytest.raises(UsageError, match="activation is 'tanh'"):
        tilewave.gemm(meta, meta.T, activation="tanh")


def test_gradients_of_fake_tensors(rng: Rng) -> None:
    with FakeTensorMode():
        x, w = torch.empty(6, 3, 4, requires_grad=True), torch.empty(5, 4, requires_grad=True)
        tilewave.gemm(x, w, transpose_b=True, activation="gelu").sum().backward()
        assert x.grad.shape == (6, 3, 4)
        assert w.grad.shape == (5, 4)


def test_sample_layouts_differ(rng: Rng) -> None:
    """What the tests above take for granted of their inputs."""
    strides = {integers(rng, (3, 4)).stride() for _ in range(250)}
    assert strides == {(4, 1), (1, 3), (6, 1)}
    leaf = Sample((3, 4), (4, 5)).tensors(rng)["a"]
    assert leaf.is_leaf
    assert doubled({"a": leaf})["a"].dtype is torch.float64
