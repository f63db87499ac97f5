"""Shapes by NumPy's rules, overlaps against brute force, and what errors say."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewave.errors import UsageError
from tilewave.semantics import (
    Layout,
    addend_strides,
    bias_strides,
    contiguous,
    out_strides,
    overlaps_itself,
    product_of,
    share_memory,
    span,
)


def offsets(layout: Layout) -> list[int]:
    """Where each element of an array lies, from the one with all indices 0."""
    ranges = [range(extent) for extent in layout.shape]
    return [
        sum(i * stride for i, stride in zip(index, layout.strides, strict=True))
        for index in itertools.product(*ranges)
    ]


layouts = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from([0, 1, 1, 2, 3, -1, -2, 4, 5, 6, 9, -7])), max_size=3
).map(lambda axes: Layout(tuple(extent for extent, _ in axes), tuple(stride for _, stride in axes)))


@settings(max_examples=400, deadline=None)
@given(layouts)
def test_overlap_with_itself_is_never_missed(layout: Layout) -> None:
    found = offsets(layout)
    distinct = len(set(found)) == len(found)
    assert distinct or overlaps_itself(layout)


def test_overlap_with_itself_is_exact_for_two_axes() -> None:
    for extents in itertools.product(range(1, 5), repeat=2):
        for strides in itertools.product(range(-4, 7), repeat=2):
            layout = Layout(extents, strides)
            found = offsets(layout)
            assert overlaps_itself(layout) == (len(set(found)) < len(found)), layout


@settings(max_examples=400, deadline=None)
@given(layouts, layouts, st.integers(-20, 20))
def test_shared_memory_is_what_brute_force_finds(one: Layout, other: Layout, apart: int) -> None:
    base = 1 << 20
    shared = bool(set(offsets(one)) & {apart + offset for offset in offsets(other)})
    assert share_memory(base, one, base + 4 * apart, other) == shared


@given(layouts)
def test_span_is_from_the_lowest_to_the_highest_byte(layout: Layout) -> None:
    found = offsets(layout)
    assert span(layout) == ((4 * min(found), 4 * max(found) + 4) if found else (0, 0))


shapes = st.lists(st.integers(0, 3), max_size=4).map(tuple)


@settings(max_examples=600, deadline=None)
@given(shapes, shapes)
def test_result_shapes_and_refusals_are_numpys(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    try:
        expected = np.shape(np.matmul(np.zeros(a), np.zeros(b)))
    except ValueError:
        with pytest.raises(UsageError) as caught:
            product_of(contiguous(a), contiguous(b))
        assert isinstance(caught.value, ValueError)
        if a and b:
            assert str(a) in str(caught.value)
            assert str(b) in str(caught.value)
    else:
        product = product_of(contiguous(a), contiguous(b))
        assert product.result_shape == expected


def test_transposing_exchanges_the_last_two_axes() -> None:
    a, b = contiguous((2, 5, 3)), contiguous((7, 5))
    product = product_of(a, b, transpose_a=True, transpose_b=True)
    assert (product.m, product.n, product.k, product.batch) == (3, 7, 5, (2,))
    assert product.a == (15, 1, 3)
    assert product.b == (0, 1, 5)
    with pytest.raises(
        UsageError, match=r"transpose_a is set, but a of shape \(5,\) and strides \(1,\) is a vector"
    ):
        product_of(contiguous((5,)), b, transpose_a=True)


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        ((2, 3), (4, 5), "K is 3 in a and 4 in b"),
        ((2, 3, 4), (5, 4, 2), r"leading axes \(2,\) and \(5,\) do not broadcast"),
        ((), (3,), "a is 0-dimensional"),
        ((3,), (), "b is 0-dimensional"),
    ],
)
def test_errors_say_what_does_not_fit(a: tuple[int, ...], b: tuple[int, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        product_of(contiguous(a), contiguous(b))


@settings(max_examples=300, deadline=None)
@given(shapes)
def test_c_broadcasts_as_numpy_does(c: tuple[int, ...]) -> None:
    product = product_of(contiguous((3, 1, 2)), contiguous((2, 2)))
    try:
        fits = np.broadcast_shapes(c, (3, 1, 2)) == (3, 1, 2)
    except ValueError:
        fits = False
    if fits:
        strides = addend_strides(product, contiguous(c))
        values = np.arange(np.prod(c, dtype=int)).reshape(c)
        wide = np.broadcast_to(values, (3, 1, 2))
        for index in np.ndindex(3, 1, 2):
            assert sum(i * s for i, s in zip(index, strides, strict=True)) == wide[index]
    else:
        with pytest.raises(UsageError, match=r"c of shape .* does not broadcast to the result's shape"):
            addend_strides(product, contiguous(c))


def test_bias_axis_counts_from_the_results_end() -> None:
    matrix = product_of(contiguous((4, 5, 3)), contiguous((3, 6)))
    assert bias_strides(matrix, contiguous((6,)), -1) == (0, 0, 1)
    assert bias_strides(matrix, contiguous((5,)), -2) == (0, 1, 0)
    assert bias_strides(matrix, contiguous((4, 5)), -2) == (5, 1, 0)
    columns = product_of(contiguous((5, 3)), contiguous((3,)))  # the result is a vector of m
    assert bias_strides(columns, contiguous((5,)), -1) == (1, 0)
    row = product_of(contiguous((3,)), contiguous((3, 6)))
    assert bias_strides(row, contiguous((6,)), -1) == (0, 1)
    with pytest.raises(UsageError, match="has 1 axes besides its batch's"):
        bias_strides(row, contiguous((6,)), -2)
    dot = product_of(contiguous((3,)), contiguous((3,)))
    with pytest.raises(UsageError, match="has 0 axes"):
        bias_strides(dot, contiguous((1,)), -1)
    for wrong in (0, 1, -3, None, 1.5):
        with pytest.raises(UsageError, match="bias_axis is"):
            bias_strides(matrix, contiguous((6,)), wrong)  # type: ignore[arg-type]


def test_out_must_have_the_results_shape_and_distinct_elements() -> None:
    product = product_of(contiguous((4, 3)), contiguous((3, 6)))
    assert out_strides(product, Layout((4, 6), (-6, 1))) == (-6, 1)
    assert out_strides(product, Layout((4, 6), (2, 9))) == (2, 9)  # interleaved, yet distinct
    with pytest.raises(UsageError, match=r"out of shape \(6, 4\) and strides .*result has shape \(4, 6\)"):
        out_strides(product, contiguous((6, 4)))
    with pytest.raises(UsageError, match="several of its elements share memory"):
        out_strides(product, Layout((4, 6), (1, 1)))


def test_huge_extents_do_not_overflow() -> None:
    huge: Any = Layout((2**40, 2**40), (2**41, 1))
    assert not overlaps_itself(huge)
    low, high = span(huge)
    assert (low, high) == (0, 4 * ((2**40 - 1) * 2**41 + 2**40))
