"""A normalised problem computes the same values, every element of out once."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewave.kernels.arguments import Pointers
from tilewave.normalise import Normalised, normalise
from tilewave.problem import BATCH_LEVELS, GemmProblem, MatrixLayout

ROLES = ("a", "b", "out", "c", "bias", "preactivation")


def evaluate(
    problem: GemmProblem, memory: np.ndarray[Any, Any], places: Pointers, writes: np.ndarray[Any, Any]
):
    """out = A B + 2 C + bias in float64 by plain loops over the memory, counting how often each is
    written.
    """
    for index in itertools.product(*(range(extent) for extent in problem.batch)):

        def at(name: str, row: int, column: int, index: tuple[int, ...] = index) -> int:
            layout = getattr(problem, name)
            steps = sum(i * stride for i, stride in zip(index, layout.batch, strict=True))
            return getattr(places, name) // 4 + row * layout.row + column * layout.column + steps

        for i, j in itertools.product(range(problem.m), range(problem.n)):
            value = 0.0
            if problem.product:
                for k in range(problem.k):
                    value += memory[at("a", i, k)] * memory[at("b", k, j)]
            if problem.c is not None:
                value += 2 * memory[at("c", i, j)]
            if problem.bias is not None:
                value += memory[at("bias", i, j)]
            for name in ("out", "preactivation"):
                if getattr(problem, name) is not None:
                    memory[at(name, i, j)] = value
                    writes[at(name, i, j)] += 1


def run(normalised: Normalised, memory: np.ndarray[Any, Any], places: Pointers) -> np.ndarray[Any, Any]:
    writes = np.zeros(memory.shape, int)
    for pointers in normalised.pointers(places):
        evaluate(normalised.problem, memory, pointers, writes)
    return writes


@st.composite
def strides_along(draw: st.DrawFn, extents: tuple[int, ...], repeated: bool) -> tuple[int, ...]:
    """Strides of an array with these extents: axes in any order, gaps, signs; repeated ones where allowed."""
    order = draw(st.permutations(range(len(extents))))
    strides = [0] * len(extents)
    step = draw(st.sampled_from([1, 1, 1, 2]))
    for axis in order:
        if extents[axis] == 1:
            strides[axis] = draw(st.sampled_from([0, 1, 7, 999, -3]))
            continue
        if repeated and draw(st.integers(0, 3)) == 0:
            continue
        strides[axis] = step * draw(st.sampled_from([1, 1, 1, -1]))
        step *= extents[axis]
        step += draw(st.sampled_from([0, 0, 0, 1, 4]))
    return tuple(strides)


@st.composite
def problems(draw: st.DrawFn) -> tuple[GemmProblem, Pointers, int]:
    """A problem, addresses for it in one memory, and that memory's size in elements."""
    extent = st.sampled_from([1, 1, 2, 3])
    batch = tuple(draw(st.lists(extent, max_size=5)))
    m, n, k = draw(extent), draw(extent), draw(st.sampled_from([0, 1, 2, 3]))
    product = k > 0 and draw(st.integers(0, 4)) > 0
    layouts: dict[str, MatrixLayout | None] = {}
    addresses: dict[str, int] = {}
    end = 4
    for role in ROLES:
        if role in ("c", "bias", "preactivation") and draw(st.booleans()):
            layouts[role] = None
            continue
        inner = {"a": (m, k), "b": (k, n)}.get(role, (m, n))
        extents = (*batch, *inner)
        strides = draw(strides_along(extents, role not in ("out", "preactivation")))
        reach = [max(0, e - 1) * s for e, s in zip(extents, strides, strict=True)]
        first = end - sum(r for r in reach if r < 0) + draw(st.integers(0, 3))
        end = first + sum(r for r in reach if r > 0) + 1
        address = 4 * first
        alignment = 16 if address % 16 == 0 else 8 if address % 8 == 0 else 4
        layouts[role] = MatrixLayout(strides[-2], strides[-1], strides[:-2], alignment)
        addresses[role] = address
    problem = GemmProblem(m, n, k, batch, product=product, **layouts)  # type: ignore[arg-type]
    return problem, Pointers(**addresses), end


@settings(max_examples=150, deadline=None)
@given(problems(), st.integers(0, 2**32 - 1))
def test_same_values_and_every_element_once(drawn: tuple[GemmProblem, Pointers, int], seed: int) -> None:
    problem, places, size = drawn
    memory = np.random.default_rng(seed).integers(-9, 9, size).astype(np.float64)
    expected, found = memory.copy(), memory.copy()
    direct = np.zeros(size, int)
    evaluate(problem, expected, places, direct)
    normalised = normalise(problem)
    writes = run(normalised, found, places)
    assert np.array_equal(expected, found)
    assert np.array_equal(writes, direct)
    seen = normalised.problem
    assert len(seen.batch) <= BATCH_LEVELS
    assert all(extent != 1 for extent in seen.batch)
    assert seen.multiply_adds * normalised.launches == problem.multiply_adds
    if seen.product:
        assert normalise(seen).problem == seen
    for role in ROLES:
        layout = getattr(seen, role)
        if layout is None or (role in "ab" and not seen.product):
            continue
        assert len(layout.batch) == len(seen.batch)
        for pointers in normalised.pointers(places):
            # The alignment holds at every launch's address and is not claimed beyond it.
            assert getattr(pointers, role) % layout.alignment == 0
        if seen.m == 1 and role != "b":
            assert layout.row == 0
        if seen.n == 1 and role != "a":
            assert layout.column == 0


def contiguous(*shape: int) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def layout(*strides: int) -> MatrixLayout:
    return MatrixLayout(strides[-2], strides[-1], tuple(strides[:-2]))


def test_shared_matrix_becomes_one_product_with_more_rows() -> None:
    """Case H123: a weight shared by a batch of two-row items is one product of 768 rows."""
    problem = GemmProblem(
        2,
        15360,
        5120,
        (384,),
        layout(*contiguous(384, 2, 5120)),
        layout(0, *contiguous(5120, 15360)),
        layout(*contiguous(384, 2, 15360)),
    )
    folded = normalise(problem)
    assert (folded.problem.m, folded.problem.batch, folded.swapped) == (768, (), False)


def test_shared_matrix_times_a_batch_of_columns_is_one_product() -> None:
    """Case H014: A (4096, 4096) broadcast over B (192, 4096, 1)."""
    problem = GemmProblem(
        4096,
        1,
        4096,
        (192,),
        layout(0, *contiguous(4096, 4096)),
        layout(*contiguous(192, 4096, 1)),
        layout(*contiguous(192, 4096, 1)),
    )
    folded = normalise(problem)
    assert (folded.problem.batch, folded.launches) == ((), 1)
    assert {folded.problem.m, folded.problem.n} == {192, 4096}
    assert folded.problem.out.column == 1


def test_column_major_out_is_the_transposed_product() -> None:
    problem = GemmProblem(5, 7, 3, (), layout(3, 1), layout(7, 1), layout(1, 5))
    swapped = normalise(problem)
    assert swapped.swapped
    assert (swapped.problem.m, swapped.problem.n) == (7, 5)
    assert swapped.problem.a == MatrixLayout(1, 7)
    assert swapped.problem.b == MatrixLayout(1, 3)
    assert swapped.problem.out == MatrixLayout(5, 1)
    assert next(swapped.pointers(Pointers(a=16, b=32, out=64))) == Pointers(a=32, b=16, out=64)


def test_a_column_becomes_a_row() -> None:
    problem = GemmProblem(100, 1, 50, (), layout(50, 1), layout(1, 1), layout(1, 1))
    seen = normalise(problem).problem
    assert (seen.m, seen.n) == (1, 100)
    assert seen.a == MatrixLayout(0, 1)
    assert seen.b == MatrixLayout(1, 50)
    assert seen.out == MatrixLayout(0, 1)


def test_batch_that_needs_no_loop_has_none() -> None:
    """Four contiguous batch axes are one."""
    shape = (2, 3, 4, 5)
    problem = GemmProblem(
        6,
        7,
        8,
        shape,
        layout(*contiguous(*shape, 6, 8)),
        layout(*contiguous(*shape, 8, 7)),
        layout(*contiguous(*shape, 6, 7)),
    )
    assert normalise(problem).problem.batch == (120,)


def test_more_axes_than_kernels_walk_are_looped_over_shortest_first() -> None:
    shape = (2, 6, 3, 5, 4)
    gaps = tuple(2 * stride for stride in contiguous(*(extent + 1 for extent in shape), 6, 8))
    problem = GemmProblem(6, 7, 8, shape, layout(*gaps), layout(*gaps), layout(*gaps))
    normalised = normalise(problem)
    assert sorted(axis.extent for axis in normalised.loops) == [2, 3]
    assert normalised.launches == 6
    assert math.prod(normalised.problem.batch) == 120


def test_alignment_of_a_loop_is_what_all_its_addresses_share() -> None:
    strides = (1001, 20002, 400004, 8000008)
    shape = (2, 3, 4, 5)
    operand = layout(*strides, 9, 1)
    normalised = normalise(GemmProblem(2, 3, 4, shape, operand, operand, operand))
    assert [axis.extent for axis in normalised.loops] == [2]
    assert normalised.problem.a.alignment == 4  # 1001 elements past an address that is a multiple of 16


@pytest.mark.parametrize("bias", [layout(0, 1), layout(1, 0)])
def test_bias_keeps_its_axis_when_operands_are_swapped(bias: MatrixLayout) -> None:
    """Case H129: the axis of a bias follows the swap."""
    problem = GemmProblem(8, 8, 8, (), layout(8, 1), layout(8, 1), layout(1, 8), bias=bias)
    swapped = normalise(problem)
    assert swapped.swapped
    assert swapped.problem.bias == bias.transposed


def test_without_a_product_everything_is_one_row() -> None:
    problem = GemmProblem(
        5, 7, 0, (3,), layout(0, 0, 0), layout(0, 0, 0), layout(35, 7, 1), c=layout(35, 7, 1), product=False
    )
    seen = normalise(problem).problem
    assert (seen.m, seen.n, seen.k, seen.batch) == (1, 105, 0, ())
