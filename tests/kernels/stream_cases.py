"""What the tests of the two streaming families share: fresh products for an instance, and which schedules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest
from products import LAYOUTS, Product, check, make_product, run

from tilewave.kernels.families.streams import Stream
from tilewave.planner.schedules import DATA_PARALLEL, STREAM_K_WALK, Schedule, split_k, stream_k
from tilewave.problem import Activation, GemmProblem

Generator = np.random.Generator
T = TypeVar("T")

SCHEDULES: tuple[Schedule, ...] = (DATA_PARALLEL, split_k(2), split_k(7), stream_k(3), STREAM_K_WALK)


def sizes(rng: Generator, stream: Stream, most_tiles: int, most_k: int) -> tuple[int, int, int]:
    """m, n and k: up to all of the short side, some tiles of the long one, a ragged end along K."""
    few = int(rng.integers(1, stream.few + 1))
    many = int(rng.integers(2, most_tiles * stream.many))
    k = int(rng.integers(2, most_k))
    return (many, few, k) if stream.mirrored else (few, many, k)


def layouts_of(rng: Generator, stream: Stream) -> tuple[str, str, str]:
    """Layouts of a, b and out that the instance takes: with wide accesses, rows or columns without a gap."""

    def one(access: object, along_rows: bool) -> str:
        if access is None:
            return str(rng.choice(LAYOUTS))
        if getattr(access, "width", 4) == 4:
            return str(rng.choice(LAYOUTS))
        return "wide" if along_rows else "wide columns"

    a, b = stream.instance.a, stream.instance.b
    return (
        one(a, a is not None and str(a.contiguous) == "k"),
        one(b, b is not None and str(b.contiguous) != "k"),
        str(rng.choice(LAYOUTS[:6])),
    )


def products(
    rng: Generator,
    stream: Stream,
    number: int,
    *,
    plain: bool = False,
    most_tiles: int = 3,
    most_k: int = 1500,
) -> Iterator[Product]:
    """Fresh products that the instance takes, with everything an epilogue can do unless ``plain``."""
    for _ in range(number):
        m, n, k = sizes(rng, stream, most_tiles, most_k)
        batch = [(), (2,), (2, 1, 2)][int(rng.integers(3))]
        epilogue = (
            {}
            if plain
            else {
                "alpha": float(rng.choice([1.0, -1.5])),
                "beta": float(rng.choice([0.0, 1.0, -0.5])),
                "bias": rng.choice(np.array([None, "row", "column", "full"], dtype=object)),
                "activation": Activation(rng.integers(5)),
                "preactivation": bool(rng.integers(2)),
            }
        )
        yield make_product(
            rng,
            m,
            n,
            k,
            batch,
            layouts=layouts_of(rng, stream),
            misalignment=0 if stream.width == 16 else int(rng.integers(4)),
            positive=bool(rng.integers(2)),
            **epilogue,
        )


def every(streams: Sequence[Stream]) -> pytest.MarkDecorator:
    """A test for every stream."""
    return pytest.mark.parametrize("stream", streams, ids=lambda stream: stream.instance.name)


def draw(rng: Generator, choices: Sequence[T]) -> T:
    """One of some choices."""
    return choices[int(rng.integers(len(choices)))]


def check_many(rng: Generator, stream: Stream, schedule: Schedule, number: int) -> None:
    """Fresh products under a schedule, with any number of SMs."""
    for product in products(rng, stream, number):
        sms = int(rng.integers(1, 9))
        check(
            product, run(product, stream.instance, schedule, sms=sms, band=2, count=False, detect_races=True)
        )


def check_any_order(rng: Generator, stream: Stream, schedule: Schedule, resident: int) -> None:
    """One block after the other or several by turns in a random order: the same bits, and no race."""
    (product,) = products(rng, stream, 1, most_tiles=2, most_k=200)
    found = []
    for options in ({}, {"resident": resident, "order": int(rng.integers(1 << 30))}):
        product.out[...] = np.nan
        plan = run(product, stream.instance, schedule, sms=5, count=False, detect_races=True, **options)
        check(product, plan)
        found.append(product.out.tobytes())
    assert found[0] == found[1]


def check_nothing_leaks(
    rng: Generator, stream: Stream, narrow: tuple[str, str], wide: tuple[str, str]
) -> None:
    """A NaN in a row of A and an Inf in a column of B show there and nowhere else."""
    m, n = stream.few, stream.many + 1
    if stream.mirrored:
        m, n = n, m
    depth = int(rng.integers(2, 3 * stream.instance.bk))
    layouts = (*(wide if stream.width == 16 else narrow), "padded")
    product = make_product(rng, m, n, depth, layouts=layouts)
    row, column, k = (int(rng.integers(extent)) for extent in (m, n, depth))
    product.operands["a"][row, k] = np.nan
    product.operands["b"][k, column] = np.inf
    run(product, stream.instance, split_k(2), count=False, detect_races=True)
    spoilt = np.zeros((m, n), bool)
    spoilt[row] = spoilt[:, column] = True
    assert not np.isfinite(product.out[spoilt]).any()
    assert np.isfinite(product.out[~spoilt]).all()


def problem_of(rng: Generator, m: int, n: int, k: int, **options: Any) -> GemmProblem:
    """The problem of a product of these sizes."""
    return make_product(rng, m, n, k, **options).problem
