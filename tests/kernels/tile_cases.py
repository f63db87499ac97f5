"""What the tests of the two tile families share: products that an instance takes, and which schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest
from products import LAYOUTS, Product, check, check_bits, make_product, plan_of, run

from tilewave.emulator import Memory
from tilewave.emulator.sass import Cubin, run_blocks
from tilewave.kernels.arguments import Pointers, pack_arguments
from tilewave.kernels.build import compile_instance
from tilewave.kernels.instances import Access, Contiguous, Instance
from tilewave.planner.schedules import DATA_PARALLEL, STREAM_K_WALK, Schedule, split_k, stream_k
from tilewave.problem import Activation, GemmProblem, MatrixLayout
from tilewave.runtime.emulated import place, run_plan

Generator = np.random.Generator
T = TypeVar("T")
Refuses = Callable[[Instance, GemmProblem], str | None]

SCHEDULES: tuple[Schedule, ...] = (DATA_PARALLEL, split_k(2), split_k(5), stream_k(3), STREAM_K_WALK)


def sample(rng: Generator, choices: Sequence[T], number: int) -> list[T]:
    """So many of the choices, in a random order."""
    return [choices[i] for i in rng.permutation(len(choices))[:number]]


def random_layouts(
    rng: Generator, instance: Instance, *, any_strides: bool, repeats: bool
) -> tuple[str, str, str]:
    """Layouts of a, b and out that the instance takes.

    ``any_strides``: at 4 bytes along either axis; ``repeats``: also some whose elements lie in one place.
    """

    def one(access: Access | None, rows_run: Contiguous) -> str:
        assert access is not None
        by_rows = access.contiguous is rows_run
        if access.width == 16:
            return str(rng.choice(["rows", "wide"] if by_rows else ["columns", "wide columns"]))
        if any_strides or access.contiguous is Contiguous.K:
            return str(rng.choice(LAYOUTS if repeats else LAYOUTS[:6]))
        return str(rng.choice(["rows", "padded"] if by_rows else ["columns", "padded columns"]))

    return one(instance.a, Contiguous.K), one(instance.b, Contiguous.OTHER), str(rng.choice(LAYOUTS[:6]))


def random_sizes(rng: Generator, instance: Instance, least: tuple[int, int], most_k: int) -> list[int]:
    """m, n and k: one or two tiles and a ragged part each way; whole vectors where the access is wide."""
    sizes = [
        int(rng.integers(least[0], 2 * instance.bm + 2)),
        int(rng.integers(least[1], 2 * instance.bn + 2)),
        int(rng.integers(1, most_k)),
    ]
    assert instance.a is not None
    return [max(4, size // 4 * 4) for size in sizes] if instance.a.width == 16 else sizes


def random_product(
    rng: Generator,
    instance: Instance,
    refuses: Refuses,
    *,
    least: tuple[int, int] = (1, 1),
    most_k: int = 70,
    any_strides: bool = True,
    repeats: bool = True,
    plain: bool = False,
    sizes: Sequence[int] | None = None,
    batch: tuple[int, ...] | None = None,
) -> Product:
    """A fresh product that the instance takes, with everything an epilogue can do unless ``plain``."""
    m, n, k = sizes or random_sizes(rng, instance, least, most_k)
    if batch is None:
        batch = [(), (), (2,), (1, 2, 2)][int(rng.integers(4))]
    wide = instance.a is not None and instance.a.width == 16
    options: dict[str, Any] = {}
    if not plain:
        options = {
            "alpha": float(rng.choice([1.0, -1.5])),
            "beta": float(rng.choice([0.0, 1.0, -0.5])),
            "bias": rng.choice(np.array([None, "row", "column", "full"], dtype=object)),
            "activation": Activation(rng.integers(5)),
            "preactivation": bool(rng.integers(2)),
        }
    layouts = random_layouts(rng, instance, any_strides=any_strides, repeats=repeats)
    if plain:
        layouts = (*layouts[:2], "rows")
    product = make_product(
        rng,
        m,
        n,
        k,
        batch,
        layouts=layouts,
        misalignment=0 if wide else int(rng.integers(4)),
        positive=bool(rng.integers(2)),
        **options,
    )
    reason = refuses(instance, product.problem)
    assert reason is None, f"{instance} refuses {product.problem}: {reason}"
    return product


def run_and_check(rng: Generator, product: Product, instance: Instance, schedule: Schedule) -> None:
    """Run with resident blocks in a random order, looking for races, and check every element."""
    plan = run(
        product,
        instance,
        schedule,
        sms=int(rng.integers(1, 8)),
        band=int(rng.integers(1, 4)),
        whole_waves=schedule is STREAM_K_WALK and bool(rng.integers(2)),
        resident=int(rng.choice([1, 2, 7])),
        order=int(rng.integers(1 << 30)),
        detect_races=True,
        count=False,
    )
    check(product, plan)


def check_order_independence(rng: Generator, product: Product, instance: Instance) -> None:
    """Under every schedule the bits do not depend on how many blocks run at once, nor on their order."""
    cut = sample(rng, SCHEDULES[1:-1], 1)[0]
    for schedule in (cut, STREAM_K_WALK):
        seen = []
        for resident in (1, 2, 7):
            product.out[...] = np.nan
            order = int(rng.integers(1 << 30))
            options = {"resident": resident, "order": order, "detect_races": True, "count": False}
            plan = run(product, instance, schedule, sms=3, **options)
            check(product, plan)
            seen.append(np.ascontiguousarray(product.out).tobytes())
        assert len(set(seen)) == 1, schedule


def check_special_values(rng: Generator, product: Product, instance: Instance) -> None:
    """Infinities, NaNs and vanishing values give the bits of the plain chain: none shows elsewhere."""
    special = np.array([np.inf, -np.inf, np.nan, -1e-42, -0.0, 1e-30, -1e-30], np.float32)
    for name in ("a", "b"):
        values = product.operands[name]
        for _ in range(6):
            values[tuple(int(rng.integers(extent)) for extent in values.shape)] = rng.choice(special)
    plan = run(product, instance, count=False)
    if instance.sequential and plan.cut.slots == 0:
        check_bits(product)
    with np.errstate(all="ignore"):
        wide = np.matmul(*(product.operands[name].astype(np.float64) for name in "ab"))
        finite = np.matmul(*(np.isfinite(product.operands[name]).astype(np.float64) for name in "ab"))
    whole = finite == product.problem.k
    assert np.array_equal(np.isnan(wide[~whole]), np.isnan(product.out[~whole]))
    assert np.isfinite(product.out[whole]).all()


def check_vanishing_sums(rng: Generator, instance: Instance) -> None:
    """A sum of vanishing negative products is -0: not even a zero is added beyond the end of K."""
    for k in (1, 3, 9):
        product = make_product(rng, instance.bm + 1, instance.bn + 2, k)
        product.operands["a"][...] = 1e-30
        product.operands["b"][...] = -1e-30
        run(product, instance, count=False)
        check_bits(product)
        assert np.signbit(product.out).all()


def check_machine_code(rng: Generator, product: Product, instance: Instance, schedule: Schedule) -> None:
    """What ptxas made of the kernel gives the right bits, and minds every latency.

    The interpreter lacks what the smooth activations are made of, so relu stands for them.
    """
    if product.problem.activation > Activation.RELU:
        product.problem = replace(product.problem, activation=Activation.RELU)
    plan = plan_of(instance, product.problem, schedule, int(rng.integers(1, 8)))
    program, kernel = compile_instance(instance, "sm_90")
    memory = Memory()
    placed = {
        name: place(memory, array, name, product.misalignment) for name, array in product.operands.items()
    }
    partials = memory.empty((plan.partial_bytes // 4 + 4,), name="partials")
    tickets = memory.put(np.zeros(plan.cut.counters + 1, np.uint32), name="tickets")
    addresses = {name: item.address for name, item in placed.items()}
    pointers = Pointers(**addresses, partials=partials.address, tickets=tickets.address)
    results = run_blocks(
        Cubin(program.cubin),
        kernel.symbol,
        grid=(plan.blocks, 1, 1),
        block=(instance.threads, 1, 1),
        args=[pack_arguments(product.problem, plan.cut, plan.raster, pointers, product.alpha, product.beta)],
        memory=memory,
        dynamic_shared_bytes=instance.shared_bytes,
    )
    assert not any(result.hazards for result in results)
    for name in {"out", "preactivation"} & set(placed):
        product.operands[name][...] = placed[name].view(memory.get(placed[name].buffer))
    check(product, plan)


def check_far_apart_rows(rng: Generator, instance: Instance, m: int, n: int, k: int) -> None:
    """Rows of a and out billions of elements apart: no product of sizes and strides is cut to 32 bits.

    Every row is a buffer of its own; the emulator leaves as much room between them all.
    """
    memory = Memory()
    a = rng.standard_normal((m, k), np.float32)
    b = rng.standard_normal((k, n), np.float32)
    rows = [memory.put(row, name=f"a{i}") for i, row in enumerate(a)]
    outs = [memory.empty((n,), name=f"out{i}") for i in range(m)]
    right = memory.put(b, name="b")
    a_row, out_row = ((pair[1].address - pair[0].address) // 4 for pair in (rows, outs))
    assert min(a_row, out_row) * (m - 1) > 2**31
    problem = GemmProblem(m, n, k, (), MatrixLayout(a_row, 1), MatrixLayout(n, 1), MatrixLayout(out_row, 1))
    plan = plan_of(instance, problem, DATA_PARALLEL, 3)
    pointers = Pointers(rows[0].address, right.address, outs[0].address)
    run_plan(plan, pointers, memory, exact_fma=True, count=False)
    out = np.stack([memory.get(buffer) for buffer in outs])
    check_bits(Product(problem, {"a": a, "b": b, "out": out}, 1.0, 0.0, 0))


def square_chain(instances: Sequence[Instance]) -> Instance:
    """A sequential instance of a square tile that reads a and b row by row, one element at a time."""
    return next(
        instance
        for instance in instances
        if instance.sequential and instance.name.endswith("_nn_4") and instance.bm == instance.bn
    )


every_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
