"""The argument block, the places of a batch's items and the epilogue: the device against the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from products import LAYOUTS, Floats, Product, activated, lay_out, layout_of

from tilewave.compiler import Program, Source, compile_source
from tilewave.emulator import Memory, launch
from tilewave.emulator.fma import fma
from tilewave.kernels.arguments import (
    C_VECTORS,
    GEMM_ARGS_BYTES,
    OUT_VECTORS,
    POINTER_OFFSETS,
    SCALARS_OFFSET,
    Pointers,
    pack_arguments,
    vectors,
)
from tilewave.planner.schedules import Decomposition, Raster
from tilewave.problem import Activation, GemmProblem, MatrixLayout
from tilewave.runtime.emulated import place

Generator = np.random.Generator
OPERANDS = ("a", "b", "c", "bias", "out", "preactivation")


@cache
def program() -> Program:
    header = Source.packaged("kernels/epilogue.cuh")
    text = (Path(__file__).parent / "arguments_echo.cu").read_text()
    source = Source.from_text(
        "arguments_echo.cu", text, headers={"kernels/epilogue.cuh": header.text, **header.headers}
    )
    return compile_source(source, ["echo", "items", "store_all"], "sm_90")


def run(entry: str, blocks: int, threads: int, args: list[Any], memory: Memory) -> None:
    symbol = program().kernels[entry].symbol
    launch(program().ptx, symbol, (blocks, 1, 1), (threads, 1, 1), args, memory, count=False, exact_fma=True)


def random_layout(rng: Generator, batch: int) -> MatrixLayout:
    row, column, *steps = (int(step) for step in rng.integers(-(2**40), 2**40, 2 + batch))
    return MatrixLayout(row, column, tuple(steps), int(rng.choice([4, 8, 16])))


def random_block(rng: Generator, batch: tuple[int, ...]) -> tuple[GemmProblem, Pointers]:
    """A problem whose every field is a large random number, and addresses."""
    m, n, k = (int(size) for size in rng.integers(1, 2**40, 3))
    layouts = {name: random_layout(rng, len(batch)) for name in OPERANDS}
    problem = GemmProblem(m, n, k, batch, activation=Activation(rng.integers(5)), **layouts)
    addresses = rng.integers(2**20, 2**47, 8) * 16
    names = (*OPERANDS, "partials", "tickets")
    return problem, Pointers(**{name: int(at) for name, at in zip(names, addresses, strict=True)})


@pytest.mark.parametrize("levels", [0, 1, 2, 3])
@pytest.mark.parametrize("depth", [None, 24])
def test_every_field_arrives(levels: int, depth: int | None, rng: Generator) -> None:
    batch = tuple(int(extent) for extent in rng.integers(1, 2**30, levels))
    problem, pointers = random_block(rng, batch)
    cut = Decomposition(*(int(value) for value in rng.integers(1, 2**50, 6)))
    cut = replace(cut, depth=int(rng.integers(1, 2**20)))  # times a stride it must fit into 63 bits
    raster = Raster(*(int(value) for value in rng.integers(1, 2**40, 3)))
    alpha, beta = (float(value) for value in rng.standard_normal(2, np.float32))
    block = pack_arguments(problem, cut, raster, pointers, alpha, beta, depth=depth)
    memory = Memory()
    echoed = memory.put(np.full(69, -7, np.int64), name="echoed")
    run("echo", 1, 1, [block, echoed], memory)

    expected: list[int] = []
    for name in OPERANDS:
        layout = getattr(problem, name)
        steps = (0,) * (3 - levels) + layout.batch
        expected += [getattr(pointers, name), layout.row, layout.column, *steps]
    expected += [problem.m, problem.n, problem.k, *(1,) * (3 - levels), *batch]
    expected += [cut.tiles, cut.k, cut.depth, cut.whole_tiles, cut.pieces, cut.walkers]
    expected += [raster.tiles_m, raster.tiles_n, raster.band, pointers.partials, pointers.tickets]
    step = 4 * (cut.depth if depth is None else depth)
    expected += [step * problem.a.column, step * problem.b.row]
    expected += [int(np.float32(value).view(np.int32)) for value in (alpha, beta)]
    flags = OUT_VECTORS * vectors(problem.out) | C_VECTORS * vectors(problem.c or problem.out)
    expected += [int(problem.activation), flags, GEMM_ARGS_BYTES]
    found = memory.get(echoed)
    wrapped = [(value + 2**63) % 2**64 - 2**63 for value in expected]
    assert found[: len(expected)].tolist() == wrapped
    assert (found[len(expected) :] == -7).all()


def test_absent_operands_are_null(rng: Generator) -> None:
    layout = MatrixLayout(8, 1)
    problem = GemmProblem(4, 8, 8, (), layout, layout, layout)
    block = pack_arguments(problem, Decomposition(1, 8, 8, 1, 1, 0), Raster(1, 1), Pointers(16, 32, 48))
    memory = Memory()
    echoed = memory.put(np.full(69, -7, np.int64), name="echoed")
    run("echo", 1, 1, [block, echoed], memory)
    matrices = memory.get(echoed)[:36].reshape(6, 6)
    assert matrices[:, 0].tolist() == [16, 32, 0, 0, 48, 0]
    assert not matrices[[2, 3, 5]].any()


def test_offsets_of_what_changes_from_call_to_call(rng: Generator) -> None:
    """Writing at these offsets is the same as packing anew."""
    problem, pointers = random_block(rng, (3,))
    _, others = random_block(rng, (3,))
    cut, raster = Decomposition(1, 8, 8, 1, 1, 0), Raster(1, 1)
    block = bytearray(pack_arguments(problem, cut, raster, pointers, 1.0, 0.0))
    for name, offset in POINTER_OFFSETS.items():
        block[offset : offset + 8] = getattr(others, name).to_bytes(8, "little")
    block[SCALARS_OFFSET : SCALARS_OFFSET + 8] = np.array([2.5, -0.5], np.float32).tobytes()
    assert bytes(block) == pack_arguments(problem, cut, raster, others, 2.5, -0.5)


def test_vectors_need_every_row_aligned() -> None:
    good = MatrixLayout(8, 1, (64, 16), 16)
    assert vectors(good)
    for row, column, batch, alignment in (
        (9, 1, (), 16),
        (8, 2, (), 16),
        (8, 1, (62,), 16),
        (8, 1, (64, 3), 16),
        (8, 1, (), 8),
    ):
        assert not vectors(MatrixLayout(row, column, batch, alignment))
    assert vectors(MatrixLayout(2, 1, (6,), 8), width=8)


@pytest.mark.parametrize("levels", [0, 1, 2, 3])
def test_items_of_a_batch(levels: int, rng: Generator) -> None:
    batch = tuple(int(extent) for extent in rng.integers(1, 9, levels))
    problem, pointers = random_block(rng, batch)
    memory = Memory()
    count = problem.batches
    found = memory.put(np.zeros((count, 6), np.int64), name="found")
    block = pack_arguments(problem, Decomposition(1, 8, 8, 1, 1, 0), Raster(1, 1), pointers)
    run("items", 1, min(count, 1024), [block, 0, found], memory)
    index = np.indices(batch).reshape(levels, -1) if levels else np.zeros((0, 1), np.int64)
    for column, name in enumerate(OPERANDS):
        steps = np.array(getattr(problem, name).batch, np.int64)
        expected = getattr(pointers, name) + 4 * (steps @ index)
        assert memory.get(found)[:, column].tolist() == np.broadcast_to(expected, count).tolist()


def test_an_item_beyond_32_bits(rng: Generator) -> None:
    batch = (3, 2**30, 5)
    problem, pointers = random_block(rng, batch)
    index = (2 * 2**30 + 2**30 - 7) * 5 + 3
    memory = Memory()
    found = memory.put(np.zeros((1, 6), np.int64), name="found")
    block = pack_arguments(problem, Decomposition(1, 8, 8, 1, 1, 0), Raster(1, 1), pointers)
    run("items", 1, 1, [block, index, found], memory)
    for name, address in zip(OPERANDS, memory.get(found)[0].tolist(), strict=True):
        outer, middle, inner = getattr(problem, name).batch
        expected = getattr(pointers, name) + 4 * (2 * outer + (2**30 - 7) * middle + 3 * inner)
        assert address == (expected + 2**63) % 2**64 - 2**63


def finish(
    sums: Floats, operands: Mapping[str, Floats], activation: Activation, alpha: float, beta: float
) -> tuple[Product, bool]:
    """The epilogue of the device, in place; and whether it calls it plain."""
    m, n = sums.shape
    memory = Memory()
    placed = {name: place(memory, array, name) for name, array in operands.items()}
    layouts = {name: layout_of(array, 0) for name, array in operands.items()}
    anywhere = MatrixLayout(1, 1)
    problem = GemmProblem(m, n, 1, (), anywhere, anywhere, activation=activation, **layouts)
    pointers = Pointers(16, 16, **{name: item.address for name, item in placed.items()})
    block = pack_arguments(problem, Decomposition(1, 1, 1, 1, 1, 0), Raster(1, 1), pointers, alpha, beta)
    plain = memory.put(np.array([-7], np.int32), name="plain")
    run("store_all", m, 32, [block, memory.put(sums, name="sums"), plain], memory)
    for name in ("out", "preactivation"):
        if name in operands:
            operands[name][...] = placed[name].view(memory.get(placed[name].buffer))
    return Product(problem, dict(operands), alpha, beta, 0), bool(memory.get(plain)[0])


def random_operands(rng: Generator, m: int, n: int) -> dict[str, Floats]:
    """Some of c, bias and preactivation, each laid out in some way, and out."""
    found = {"out": lay_out(np.full((m, n), np.nan, np.float32), str(rng.choice(LAYOUTS[:6])))}
    if rng.integers(2):
        found["c"] = lay_out(rng.standard_normal((m, n), np.float32), str(rng.choice(LAYOUTS)))
    if rng.integers(2):
        shape = [(1, n), (m, 1), (m, n)][int(rng.integers(3))]
        found["bias"] = np.broadcast_to(rng.standard_normal(shape, np.float32), (m, n))
    if rng.integers(2):
        found["preactivation"] = lay_out(np.full((m, n), np.nan, np.float32), str(rng.choice(LAYOUTS[:6])))
    return found


@pytest.mark.parametrize("activation", Activation)
def test_epilogue(activation: Activation, rng: Generator) -> None:
    """Bits of everything before the activation; the activation within some units of roundoff."""
    for _ in range(6):
        m, n = (int(size) for size in rng.integers(1, 25, 2))
        sums = (rng.standard_normal((m, n)) * 10.0 ** rng.integers(-3, 2)).astype(np.float32)
        operands = random_operands(rng, m, n)
        alpha = float(np.float32(rng.choice([1.0, -1.0, 0.3])))
        beta = float(np.float32(rng.choice([1.0, -0.7]))) if "c" in operands else 0.0
        product, plain = finish(sums, operands, activation, alpha, beta)
        value = np.float32(alpha) * sums
        if beta != 0:
            value = fma(np.full((m, n), beta, np.float32), np.ascontiguousarray(operands["c"]), value)
        if "bias" in operands:
            value = value + operands["bias"]
        if "preactivation" in operands:
            np.testing.assert_array_equal(operands["preactivation"], value)
        if activation <= Activation.RELU:
            np.testing.assert_array_equal(product.out, activated(activation, value))
        wide = activated(activation, value.astype(np.float64))
        error = np.abs(product.out - wide)
        assert (error <= 2.0**-24 * 8 * np.abs(wide) + 2.0**-24 * 4 * np.abs(value)).all()
        assert plain == (set(operands) <= {"out", "c"} and activation is Activation.NONE and beta == 0)


def test_c_is_not_read_where_beta_is_0(rng: Generator) -> None:
    sums = rng.standard_normal((3, 5), np.float32)
    operands = {"out": np.full((3, 5), np.nan, np.float32), "c": np.full((3, 5), np.nan, np.float32)}
    product, plain = finish(sums, operands, Activation.NONE, 2.0, 0.0)
    np.testing.assert_array_equal(product.out, np.float32(2.0) * sums)
    assert plain


@pytest.mark.parametrize("activation", Activation)
def test_special_values(activation: Activation) -> None:
    """NaN stays NaN, relu included; what is far from 0 is the limit of the activation, and no NaN."""
    sums = np.array([[np.nan, np.inf, -np.inf, 0.0, -0.0, 1e30, -1e30, 100.0, -100.0, 1e-42]], np.float32)
    product, _ = finish(sums, {"out": np.full(sums.shape, -7, np.float32)}, activation, 1.0, 0.0)
    found = product.out[0]
    assert np.isnan(found[0])
    assert found[1] == np.inf
    assert not np.isnan(found[3:]).any()
    assert found[5] == np.float32(1e30)
    assert found[7] == 100
    if activation is Activation.NONE:
        np.testing.assert_array_equal(product.out, sums)
    else:
        assert found[3:5].tolist() == [0, 0]
        assert (found[[6, 8]] == 0).all()
