"""Large tiles, in the emulator, and the form of their loop as compiled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from products import LAYOUTS, Product, check, make_product, plan_of, run
from tile_cases import (
    SCHEDULES,
    check_far_apart_rows,
    check_machine_code,
    check_order_independence,
    check_special_values,
    check_vanishing_sums,
    every_schedule,
    random_product,
    run_and_check,
    sample,
    square_chain,
)

from tilewave.compiler import ARCHITECTURES, Program
from tilewave.compiler.records import Kernel
from tilewave.emulator import Memory, parse_ptx
from tilewave.emulator.flow import End, basic_blocks
from tilewave.emulator.sass import Cubin
from tilewave.emulator.sass.decode import decode_function
from tilewave.emulator.sass.operands import Target
from tilewave.kernels.arguments import Pointers
from tilewave.kernels.build import compile_instance
from tilewave.kernels.families import large_tile, small_tile
from tilewave.kernels.instances import Instance
from tilewave.planner.schedules import Schedule
from tilewave.runtime.emulated import place, run_plan

Generator = np.random.Generator
INSTANCES = large_tile.instances()
WIDE = [one for one in INSTANCES if one.needs_new_loop]
DEPTHS = 8


def fresh(rng: Generator, instance: Instance, **options: Any) -> Product:
    """A fresh product that the instance takes."""
    least = (instance.bm, instance.bn)
    options.setdefault("batch", [(), (2,)][int(rng.integers(2))])
    return random_product(
        rng, instance, large_tile.refuses, least=least, any_strides=False, most_k=50, **options
    )


def test_random_products(rng: Generator) -> None:
    """Other instances every time; the long test runs them all."""
    for instance in sample(rng, INSTANCES, 3):
        product = fresh(rng, instance)
        run_and_check(rng, product, instance, SCHEDULES[rng.integers(len(SCHEDULES))])


@pytest.mark.long
@pytest.mark.sampled(60)
@every_schedule
@pytest.mark.parametrize("instance", INSTANCES, ids=str)
def test_every_instance_under_every_schedule(instance: Instance, schedule: Schedule, rng: Generator) -> None:
    for _ in range(3):
        run_and_check(rng, fresh(rng, instance), instance, schedule)


def test_every_depth(rng: Generator) -> None:
    """K of 0 to beyond two slices: a first, steady, last and ragged slice, and any of them alone."""
    instance = next(one for one in sample(rng, INSTANCES, len(INSTANCES)) if one.name.endswith("_nn_4"))
    for k in (0, 1, 7, 8, 9, 16, 17, int(rng.integers(18, 40))):
        product = make_product(rng, instance.bm, instance.bn, k, beta=float(rng.integers(2)))
        check(product, run(product, instance, count=False))


def test_tiles_at_an_edge_store_only_their_own(rng: Generator) -> None:
    """Where out is also the addend, an element that two tiles stored would have it added twice."""
    instance = sample(rng, INSTANCES, 1)[0]
    m, n = instance.bm + 4, instance.bn + 8
    product = fresh(rng, instance, plain=True, sizes=(m, n, 12), batch=())
    addend = rng.standard_normal((m, n), np.float32)
    product.operands["c"], product.beta = addend, 1.0
    problem = product.problem = replace(product.problem, c=product.problem.out)
    memory = Memory()
    a, b = (place(memory, product.operands[name], name) for name in "ab")
    out = place(memory, addend, "out")
    pointers = Pointers(a.address, b.address, out.address, c=out.address)
    plan = plan_of(instance, problem, SCHEDULES[rng.integers(len(SCHEDULES))], 3)
    run_plan(plan, pointers, memory, beta=1.0, exact_fma=True, count=False)
    product.operands["out"] = out.view(memory.get(out.buffer))
    check(product, plan)


def test_order_of_blocks(rng: Generator) -> None:
    instance = sample(rng, INSTANCES, 1)[0]
    product = fresh(rng, instance, plain=True, sizes=(instance.bm + 4, instance.bn + 8, 40), batch=())
    check_order_independence(rng, product, instance)


def test_special_values(rng: Generator) -> None:
    instance = sample(rng, INSTANCES, 1)[0]
    check_special_values(rng, fresh(rng, instance, plain=True, repeats=False, batch=()), instance)


def test_vanishing_sums(rng: Generator) -> None:
    check_vanishing_sums(rng, square_chain(INSTANCES))


def test_far_apart_rows(rng: Generator) -> None:
    check_far_apart_rows(rng, square_chain(INSTANCES), 130, 129, 6)


def check_loop(instance: Instance, arch: str = "sm_90") -> None:
    """The steady loop is one run of code without predicates in PTX and in machine code; nothing spills.

    It holds a thread's multiply-adds of a slice; those of its last depth follow a barrier.
    """
    of_depth = instance.tm * instance.tn
    program, kernel = compile_instance(instance, arch)
    resources = kernel.resources
    assert (resources.stack_bytes, resources.spill_store_bytes, resources.spill_load_bytes) == (0, 0, 0)

    # In PTX. The emulator's blocks end at a barrier too, so the loop is two of them.
    entry = parse_ptx(program.ptx).entries[kernel.symbol]
    bodies = {}
    for block in basic_blocks(entry):
        code = entry.instructions[block.first : block.stop]
        bodies[block.index] = block, code, sum(one.opcode == "fma" for one in code)
    (first,) = (index for index, (_, _, fmas) in bodies.items() if fmas == (DEPTHS - 1) * of_depth)
    (before, head, _), (after, tail, fmas) = bodies[first], bodies[first + 1]
    assert fmas == of_depth
    assert before.end is End.BARRIER
    assert after.end is End.BRANCH
    assert after.target == first
    assert [one.opcode for one in head + tail if one.guard is not None] == ["bra"]

    # In machine code. ptxas itself puts three loads that never happen before an asynchronous copy.
    (steady,) = (loop for loop in machine_loops(program, kernel) if fmas_of(loop) == DEPTHS * of_depth)
    assert [one for one in steady if one.opcode in ("BRA", "BSSY", "CALL", "WARPSYNC")] == steady[-1:]
    guarded = [one.text for one in steady[:-1] if not one.guard.is_true]
    assert all(text == "@!PT LDS RZ, [RZ]" for text in guarded)
    quads = (instance.tm + instance.tn) // 4
    assert sum(one.opcode == "LDS" and one.guard.is_true for one in steady) == DEPTHS * quads
    assert len(steady) <= 1.16 * DEPTHS * of_depth


def fmas_of(code: list[Any]) -> int:
    """Multiply-adds of a piece of machine code."""
    return sum(one.opcode == "FFMA" for one in code)


def machine_loops(program: Program, kernel: Kernel) -> list[list[Any]]:
    """The innermost loops of a kernel's machine code: from the target of a branch back to the branch."""
    code = decode_function(Cubin(program.cubin).function(kernel.symbol), 90)
    loops = []
    for last, one in enumerate(code):
        target = one.operands[-1] if one.opcode == "BRA" else None
        if isinstance(target, Target) and target.address <= one.address:
            loops.append((target.address // 16, last))
    return [
        code[first : last + 1]
        for first, last in loops
        if not any(first <= other and end <= last and (other, end) != (first, last) for other, end in loops)
    ]


def test_steady_loop(rng: Generator) -> None:
    for instance in sample(rng, INSTANCES, 2):
        check_loop(instance)


@pytest.mark.long
@pytest.mark.sampled(24)
@pytest.mark.parametrize("arch", ["sm_90", "sm_90a"])
@pytest.mark.parametrize("instance", INSTANCES, ids=str)
def test_steady_loop_of_every_instance(instance: Instance, arch: str) -> None:
    check_loop(instance, arch)


def test_machine_code(rng: Generator) -> None:
    instance = sample(rng, INSTANCES, 1)[0]
    product = fresh(rng, instance, plain=bool(rng.integers(2)), batch=())
    check_machine_code(rng, product, instance, SCHEDULES[rng.integers(len(SCHEDULES))])


@pytest.mark.long
@pytest.mark.sampled(30)
@every_schedule
@pytest.mark.parametrize("instance", INSTANCES, ids=str)
def test_machine_code_of_every_instance(instance: Instance, schedule: Schedule, rng: Generator) -> None:
    for plain in (True, False):
        check_machine_code(rng, fresh(rng, instance, plain=plain, batch=()), instance, schedule)


def test_shared_memory_takes_the_fewest_passes(rng: Generator) -> None:
    """Half a warp's loads of 16 bytes in one pass, so 12 a warp and depth; stores meet in no bank."""
    instance = next(one for one in sample(rng, INSTANCES, len(INSTANCES)) if one.name.endswith("_16"))
    figures = []
    for k in (16, 48):
        product = fresh(rng, instance, plain=True, sizes=(instance.bm, instance.bn, k), batch=())
        run(product, instance)
        assert product.result is not None
        figures.append(product.result.counters)
    warps = instance.threads // 32
    assert figures[1].shared_load_passes - figures[0].shared_load_passes == warps * 32 * passes_of(instance)
    loads = (instance.tm + instance.tn) // 4
    assert figures[1].shared_loads_by_width[16] - figures[0].shared_loads_by_width[16] == warps * 32 * loads
    stores, passes = (getattr(figures[1], name) for name in ("shared_stores", "shared_store_passes"))
    few, least = (getattr(figures[0], name) for name in ("shared_stores", "shared_store_passes"))
    assert passes - least == stores - few


def passes_of(instance: Instance) -> int:
    """Passes of a warp's loads of one depth: two for each, one for half a warp."""
    return 2 * (instance.tm + instance.tn) // 4


@pytest.mark.parametrize("arch", ["sm_75", "sm_121"])
def test_other_architectures(arch: str, rng: Generator) -> None:
    instance = sample(rng, INSTANCES, 1)[0]
    product = fresh(rng, instance)
    check(product, run(product, instance, arch=arch, count=False))


@pytest.mark.long
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_architectures_take_the_tiles(arch: str, rng: Generator) -> None:
    for instance in sample(rng, INSTANCES, 3) + sample(rng, small_tile.instances(), 3):
        compile_instance(instance, arch)


def test_matching(rng: Generator) -> None:
    """The tiles that fit, in the layout of the problem; strided operands are read along K."""
    for _ in range(40):
        m, n, k = (int(size) for size in rng.integers((50, 50, 1), (300, 300, 40)))
        of_a, of_b = (str(name) for name in rng.choice(LAYOUTS, 2))
        product = make_product(rng, m, n, k, layouts=(of_a, of_b, "rows"), misalignment=int(rng.integers(4)))
        found = large_tile.matching(product.problem)
        sizes = {(one.bm, one.bn) for one in INSTANCES if not one.needs_new_loop}
        usual = {(one.bm, one.bn) for one in found if not one.needs_new_loop}
        assert usual == {(bm, bn) for bm, bn in sizes if m >= bm and n >= bn}
        expected = {one for one in WIDE if large_tile.refuses(one, product.problem) is None}
        assert {one for one in found if one.needs_new_loop} == expected
        assert all(large_tile.refuses(instance, product.problem) is None for instance in found)


def test_refusals(rng: Generator) -> None:
    by_name = {instance.name: instance for instance in INSTANCES}
    small = make_product(rng, 128, 255, 8).problem
    assert "must fit into C" in str(large_tile.refuses(by_name["large_tile_128x256_nn_4"], small))
    wide = by_name["large_tile_128x128_nn_16"]
    assert large_tile.refuses(wide, make_product(rng, 128, 128, 8).problem) is None
    assert "a cannot be read by 16 bytes along k" in str(
        large_tile.refuses(wide, make_product(rng, 128, 128, 9).problem)
    )
    strided = make_product(rng, 128, 128, 9, layouts=("rows", "strided", "rows")).problem
    assert "3 elements apart" in str(large_tile.refuses(by_name["large_tile_128x128_nn_4"], strided))
    deep = replace(small, n=256, k=2**34)
    assert "its K is below" in str(large_tile.refuses(by_name["large_tile_128x256_nn_4"], deep))
    nothing = replace(small, product=False)
    assert "no product" in str(large_tile.refuses(wide, nothing))
    assert large_tile.matching(nothing) == ()
