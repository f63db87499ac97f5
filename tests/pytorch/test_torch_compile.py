"""torch.compile: whole graphs, dynamic shapes, gradients, in-place results, `override` inside and outside."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from samples import integers, reference

import tilewave
import tilewave.torch

Rng = np.random.Generator
Function = Callable[..., Any]


class Graphs:
    """A backend that runs graphs as they are and keeps them."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def __call__(self, graph: Any, examples: Any) -> Any:
        self.kept.append(graph)
        return graph

    def called(self) -> list[str]:
        """The operators of tilewave that the graphs call."""
        targets = [str(node.target) for graph in self.kept for node in graph.graph.nodes]
        return [target for target in targets if target.startswith("tilewave.")]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def layer(x: Any, w: Any, b: Any) -> Any:
    return tilewave.gemm(x, w, bias=b, transpose_b=True, activation="relu") * 2


def expected_layer(x: Any, w: Any, b: Any) -> Any:
    return reference(x, w, bias=b, transpose_b=True, activation="relu") * 2


def leaves(rng: Rng, rows: int) -> list[Any]:
    return [integers(rng, shape).requires_grad_() for shape in ((rows, 4), (5, 4), (5,))]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_whole_graph_with_gradients(path: str, rng: Rng, dynamic: bool) -> None:
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (3, 7, 2):
        tensors = leaves(rng, rows)
        result = compiled(*tensors)
        wide = [t.detach().double().requires_grad_() for t in tensors]
        expected = expected_layer(*wide)
        assert torch.equal(result.double(), expected)
        assert result.stride() == expected.stride()
        incoming = torch.ones_like(result)
        got = torch.autograd.grad(result, tensors, incoming)
        for ours, theirs in zip(got, torch.autograd.grad(expected, wide, incoming.double()), strict=True):
            assert torch.equal(ours.double(), theirs)


def test_one_graph_serves_all_sizes(rng: Rng) -> None:
    graphs = Graphs()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=graphs)
    for rows in (3, 7, 11):
        tensors = [t.detach().contiguous() for t in leaves(rng, rows)]  # other strides, another graph
        assert torch.equal(compiled(*tensors), layer(*tensors))
    assert set(graphs.called()) == {"tilewave.gemm.default"}
    assert len(graphs.kept) == 1


CALLS: dict[str, Function] = {
    "matmul": lambda x, w: tilewave.matmul(x, w.T),
    "matmul by name of precision": lambda x, w: tilewave.matmul(x, w.T, precision="ieee"),
    "batched": lambda x, w: tilewave.matmul(x.expand(2, *x.shape), w.T),
    "scaled": lambda x, w: tilewave.gemm(x, w, alpha=0.5, transpose_b=True, schedule="data_parallel"),
    "both": lambda x, w: sum(
        tilewave.gemm(x, w, transpose_b=True, activation="silu", return_preactivation=True)
    ),
    "linear": lambda x, w: tilewave.torch.functional.linear(x, w),
    "vmap": lambda x, w: torch.vmap(lambda v: tilewave.matmul(w, v))(x),
    "grad": lambda x, w: torch.func.grad(lambda v: tilewave.matmul(v, w.T).square().sum())(x),
    "jvp": lambda x, w: torch.func.jvp(lambda v: tilewave.matmul(v, w.T), (x,), (x,))[1],
}


@pytest.mark.parametrize("name", CALLS)
def test_every_way_to_call_makes_one_graph(path: str, rng: Rng, name: str) -> None:
    x, w = integers(rng, (3, 4)), integers(rng, (5, 4))
    compiled = torch.compile(CALLS[name], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, w), CALLS[name](x, w), rtol=1e-6, atol=1e-6)


def test_results_written_in_place(path: str, rng: Rng) -> None:
    x, w = integers(rng, (3, 4)), integers(rng, (5, 4))

    def step(out: Any) -> Any:
        tilewave.gemm(x, w, transpose_b=True, out=out)
        return out + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for out in (torch.full((3, 5), float("nan")), torch.full((5, 3), float("nan")).T):
        assert torch.equal(compiled(out), x @ w.T + 1)
        assert torch.equal(out, x @ w.T)


def test_a_compiled_module_inside_override(rng: Rng) -> None:
    graphs = Graphs()
    module = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
    compiled = torch.compile(module, fullgraph=True, backend=graphs)
    x = integers(rng, (3, 4))
    with tilewave.torch.override():
        result = compiled(x)
    assert graphs.called() == ["tilewave.gemm.default"] * 2
    torch.testing.assert_close(result, module(x))
    graphs.kept.clear()
    compiled(x)  # outside, it is compiled anew
    assert len(graphs.kept) == 1
    assert graphs.called() == []


def test_override_inside_a_compiled_function(rng: Rng) -> None:
    graphs = Graphs()

    def function(x: Any, w: Any) -> Any:
        with tilewave.torch.override():
            y = torch.addmm(x, x, w) @ w
        return y.mm(w)

    compiled = torch.compile(function, fullgraph=True, backend=graphs)
    x, w = integers(rng, (4, 4)), integers(rng, (4, 4))
    assert torch.equal(compiled(x, w), function(x, w))
    assert graphs.called() == ["tilewave.gemm.default"] * 2


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="PyTorch's compiler needs g++ on the CPU")
def test_inductor(gpu_path: Any, rng: Rng) -> None:
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for rows in (3, 7):
        tensors = leaves(rng, rows)
        result, expected = compiled(*tensors), layer(*tensors)
        assert torch.equal(result, expected)
        got = torch.autograd.grad(result.sum(), tensors)
        assert all(map(torch.equal, got, torch.autograd.grad(expected.sum(), tensors)))


@pytest.mark.long
def test_export(rng: Rng) -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: Any, w: Any, b: Any) -> Any:
            return layer(x, w, b)

    tensors = [t.detach() for t in leaves(rng, 6)]
    rows = torch.export.Dim("rows", min=2, max=100)
    program = torch.export.export(Layer(), tuple(tensors), dynamic_shapes=({0: rows}, None, None))
    longer = [t.detach() for t in leaves(rng, 9)]
    assert torch.equal(program.module()(*longer), layer(*longer))
