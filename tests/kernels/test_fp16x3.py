"""The kernels of precision fp16x3 in the emulator: operands and products with the bits of the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from products import F32, LAYOUTS, Floats, Generator, Product, activated, chain, lay_out, make_product

from tilewave.device import get_spec
from tilewave.emulator import Memory
from tilewave.emulator.counters import Counters
from tilewave.emulator.fma import canonical_nan, fma
from tilewave.kernels import fp16x3
from tilewave.kernels.instances import Instance
from tilewave.planner.fp16x3 import plan_on
from tilewave.precision import fp16x3 as model
from tilewave.problem import Activation
from tilewave.runtime.emulated import place
from tilewave.runtime.fp16x3_emulated import emulate_fp16x3, pack

H200 = get_spec("H200")
KINDS = ("normal", "wide rows", "wide elements", "special", "tiny", "huge")
ORDERS = ("rows", "columns", "wide", "wide columns", "padded", "padded columns", "strided", "reversed")


def draw(rng: Generator, kind: str, shape: tuple[int, ...]) -> Floats:
    """Data (..., rows, K) that exercise a part of the definition."""
    x = rng.standard_normal(shape).astype(F32)
    powers: NDArray[Any] = np.zeros(shape, np.int64)
    match kind:
        case "wide rows":
            powers = rng.integers(-140, 120, (*shape[:-1], 1))
        case "wide elements":
            powers = rng.integers(-40, 20, shape)
        case "tiny":
            powers = rng.integers(-149, -120, shape)
        case "huge":
            powers = rng.integers(90, 125, shape)
    x = np.ldexp(x, powers).astype(F32)
    if kind == "special":
        x[rng.random(shape) < 0.02] = 0
        x[rng.random(shape) < 1 / (4 * shape[-1])] = rng.choice([np.inf, -np.inf, np.nan])
        x[..., rng.integers(shape[-2]), :] = 0
    return x


@pytest.mark.parametrize("order", ORDERS)
def test_packed_operands_are_the_models(order: str, rng: Generator) -> None:
    for kind in map(str, rng.permutation(KINDS)[:2]):
        batch = tuple(map(int, rng.integers(1, 3, rng.integers(3))))
        rows, k = int(rng.integers(1, 70)), int(rng.integers(1, 600))
        check_packed(draw(rng, kind, (*batch, rows, k)), order, int(rng.integers(4)))


@pytest.mark.parametrize(("least", "most"), [(1025, 3000), (8193, 9000)])
def test_packed_operands_whose_k_is_shared_by_blocks(least: int, most: int, rng: Generator) -> None:
    x = draw(rng, str(rng.choice(KINDS)), (2, int(rng.integers(1, 40)), int(rng.integers(least, most))))
    operand = check_packed(x, str(rng.choice(["columns", "wide columns", "padded columns"])), 0)
    assert operand.along_k or (operand.in_one_pass and operand.cluster > 1) == (least < 8192)


def check_packed(x: Floats, order: str, misalignment: int) -> fp16x3.UnpackedOperand:
    """An operand (..., rows, K) laid out as the order says is packed to the bits of the model."""
    *batch, rows, k = x.shape
    array, memory = lay_out(x, order), Memory()
    placed = place(memory, array, "x", 0 if order.startswith("wide") else misalignment)
    strides = [stride // 4 for stride in array.strides]
    alignment = next(n for n in (16, 8, 4) if placed.address % n == 0)
    operand = fp16x3.unpacked_operand(rows, k, *strides[-2:], strides[:-2], batch, alignment)
    buffer, _ = pack(operand, placed.address, memory, detect_races=True)
    raw = memory.get(buffer)
    packed_rows, split = operand.packed_rows, model.split_rows(x)
    halves = raw[: packed_rows * operand.row_bytes].view(np.uint16).reshape(packed_rows, -1, 2, 32)
    for half, expected in enumerate((split.hi, split.lo)):
        wanted = np.zeros((packed_rows, operand.intervals * fp16x3.INTERVAL), np.uint16)
        wanted[:, :k] = expected.view(np.uint16).reshape(packed_rows, k)
        assert np.array_equal(halves[:, :, half].reshape(packed_rows, -1), wanted), (x.shape, order)
    for offset, expected in ((operand.shifts_offset, split.shift), (operand.guards_offset, split.guard)):
        found = raw[offset : offset + 4 * packed_rows].view(np.int32)
        assert np.array_equal(found, expected.ravel()), (x.shape, order)
    return operand


def run(product: Product, instance: Instance, *, sms: int = 2, kept: str = "", **options: Any) -> Counters:
    """Run a product in place; what the main kernel counted."""
    results = emulate_fp16x3(
        plan_on(product.problem, instance, H200, sms),
        product.operands,
        alpha=product.alpha,
        beta=product.beta,
        misalignment=product.misalignment,
        kept=kept,
        exact_fma=True,
        **options,
    )
    return results[-1].counters


def check(product: Product, instance: Instance) -> int:
    """All bits are those of the model and the epilogue; how many elements must be recomputed."""
    sums = model.FINE if instance is fp16x3.SMALL else model.COARSE
    assert sums.interval == fp16x3.interval_of(instance)
    a, b = (np.ascontiguousarray(product.operands[name]) for name in "ab")
    rows, columns = model.split_rows(a), model.split_rows(b.swapaxes(-1, -2))
    total = model.unscale(model.sum_products(rows, columns, sums), rows.shift, columns.shift)
    recomputed = model.must_recompute(rows.guard, columns.guard, a.shape[-1])
    with np.errstate(all="ignore"):
        total = np.ascontiguousarray(np.where(recomputed, chain(a, b), total))
        value = F32(product.alpha) * total
        if product.beta != 0:
            value = fma(np.full_like(total, product.beta), np.ascontiguousarray(product.operands["c"]), value)
        if "bias" in product.operands:
            value = value + product.operands["bias"]
        canonical_nan(value)
    if "preactivation" in product.operands:
        same_bits(product.operands["preactivation"], value)
    if product.problem.activation in (Activation.NONE, Activation.RELU):
        same_bits(product.out, activated(product.problem.activation, value))
    else:
        wide = activated(product.problem.activation, value.astype(np.float64))
        np.testing.assert_allclose(product.out, wide, rtol=2e-6, atol=2e-6)
    return int(recomputed.sum())


def same_bits(found: Floats, expected: Floats) -> None:
    found, expected = np.ascontiguousarray(found), np.ascontiguousarray(expected)
    different = np.argwhere(found.view(np.uint32) != expected.view(np.uint32))
    assert not len(different), f"{len(different)} of {found.size} elements differ, first {different[0]}"


def test_a_ragged_product_on_large_tiles(rng: Generator) -> None:
    product = make_product(rng, 260, 132, 70, misalignment=1)
    run(product, fp16x3.PAIRS, order=int(rng.integers(1 << 30)))
    assert check(product, fp16x3.PAIRS) == 0


def test_fine_sums_over_several_runs(rng: Generator) -> None:
    """The last run is short, and the last interval padded."""
    k = 256 * int(rng.integers(1, 3)) + int(rng.integers(1, 256))
    product = make_product(rng, int(rng.integers(1, 80)), int(rng.integers(1, 40)), k)
    run(product, fp16x3.SMALL, order=int(rng.integers(1 << 30)))
    assert check(product, fp16x3.SMALL) == 0
    out = product.out.copy()
    a, b = (np.ascontiguousarray(product.operands[name]) for name in "ab")
    assert not np.array_equal(out, model.multiply(a, b, sums=model.Sums(128)).values)


def test_a_batch_on_small_tiles_with_all_of_the_epilogue(rng: Generator) -> None:
    product = make_product(
        rng,
        70,
        30,
        65,
        (2, 2),
        layouts=("one item", "wide columns", "padded"),
        alpha=1.5,
        beta=-0.5,
        bias="column",
        activation=Activation.RELU,
        preactivation=True,
    )
    a, b = product.operands["a"], product.operands["b"]
    # Results over all of float32, subnormals and beyond: each must be rounded once.
    product.operands["a"] = np.broadcast_to(np.ldexp(a[0, 0], rng.integers(-120, 120, (70, 1))), a.shape)
    b[...] = np.ldexp(b, rng.integers(-90, 90, (30,)))
    run(product, fp16x3.SMALL, order=int(rng.integers(1 << 30)))
    assert check(product, fp16x3.SMALL) == 0


def test_what_the_split_cannot_hold_is_recomputed(rng: Generator) -> None:
    product = make_product(rng, 80, 150, 40, layouts=("rows", "columns", "wide"), beta=2.0)
    a, b = product.operands["a"], product.operands["b"]
    # Row i has i small elements (from 40 on they are all alike, and none is) and b has none: the rule's
    # threshold lies between two rows.
    a[...] = rng.uniform(1, 2, a.shape) * np.where(np.arange(40) < np.arange(80)[:, None], 2.0**-30, 1)
    b[...] = rng.uniform(1, 2, b.shape)
    rows = model.split_rows(a).guard
    few, many = (model.must_recompute(rows[i : i + 1], np.int32([80]), 40) for i in (8, 9))
    assert (few, many) == (False, True)
    a[70, rng.integers(40)] = rng.choice([np.inf, -np.inf, np.nan])
    b[rng.integers(40), rng.integers(150)] = rng.choice([np.inf, -np.inf, np.nan])
    a[rng.integers(8)] = 0
    run(product, fp16x3.SMALL)
    assert check(product, fp16x3.SMALL) == (31 + 1) * 150 + (
        80 - 32
    )  # rows 9 to 39 and 70, and of the others a column


def test_one_element_of_a_tile_is_recomputed_by_both_sides_guards(rng: Generator) -> None:
    m, n, k = int(rng.integers(129, 150)), int(rng.integers(129, 150)), 40
    product = make_product(rng, m, n, k)
    a, b = product.operands["a"], product.operands["b"].T
    a[...], b[...] = rng.uniform(1, 2, a.shape), rng.uniform(1, 2, b.shape)
    # One of the two has an element that is split inexactly, the other many that are neither large nor small;
    # in the first tile A's row is the former and B's column the latter, in the last tile the other way round.
    row, column = int(rng.integers(128)), int(rng.integers(128))
    last_row, last_column = int(rng.integers(128, m)), int(rng.integers(128, n))
    for inexact, few in ((a[row], b[column]), (b[last_column], a[last_row])):
        inexact[rng.integers(k)] *= F32(2.0**-30)
        few[rng.permutation(k)[:36]] *= F32(2.0**-12)
    run(product, fp16x3.SMALL, sms=4)
    assert check(product, fp16x3.SMALL) == 2


def test_elements_that_are_split_inexactly_cost_nothing_where_none_is_recomputed(rng: Generator) -> None:
    counted = []
    for small in (1.0, 2.0**-30):
        product = make_product(rng, 40, 30, 64)
        a, b = product.operands["a"], product.operands["b"].T
        a[...], b[...] = rng.uniform(1, 2, a.shape), rng.uniform(1, 2, b.shape)
        a[rng.integers(40), rng.integers(64)] *= F32(small)
        b[rng.integers(30), rng.integers(64)] *= F32(small)
        inexact = [np.any(model.split_rows(x).guard & 1) for x in (a, b)]
        assert inexact == [small < 1] * 2
        # Large elements outweigh small ones: 64 + 60 and 60 + 60 are not below K.
        counted.append(run(product, fp16x3.SMALL).warp_instructions_by_class)
        assert check(product, fp16x3.SMALL) == 0
    for name in ("global_load", "global_store", "shared_load", "shared_store", "fp32", "barrier"):
        assert counted[0][name] == counted[1][name], name


@pytest.mark.long
def test_runs_of_a_long_k_are_longer(rng: Generator) -> None:
    k = int(rng.integers(4097, 4700))
    assert model.FINE.run_of(k) == 2 * model.FINE.run_of(4096)
    product = make_product(rng, int(rng.integers(1, 5)), int(rng.integers(1, 5)), k)
    run(product, fp16x3.SMALL)
    assert check(product, fp16x3.SMALL) == 0


@pytest.mark.long
@pytest.mark.sampled(5)
@pytest.mark.parametrize("instance", fp16x3.MAIN_INSTANCES, ids=str)
@pytest.mark.parametrize("case", range(4))
def test_any_product(case: int, instance: Instance, rng: Generator) -> None:
    batch = tuple(map(int, rng.integers(1, 3, rng.integers(3))))
    beta, bias = float(rng.choice([0, 0.75])), rng.choice([None, "row", "column", "full"])
    out = str(rng.choice([layout for layout in LAYOUTS if layout not in ("repeated", "one item")]))
    product = make_product(
        rng,
        *(int(size) for size in rng.integers(1, (280, 140, 300))),
        batch,
        layouts=(str(rng.choice(LAYOUTS)), str(rng.choice(LAYOUTS)), out),
        alpha=float(rng.choice([1, -0.7])),
        beta=beta,
        bias=None if bias is None else str(bias),
        activation=Activation(int(rng.integers(5))),
        preactivation=bool(rng.integers(2)),
        misalignment=int(rng.integers(4)),
    )
    kept = str(rng.choice(["", "a", "b", "ab"]))
    run(product, instance, sms=int(rng.integers(2, 6)), kept=kept, order=int(rng.integers(1 << 30)))
    check(product, instance)


@pytest.mark.long
@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_data_of_every_kind(kind: str, rng: Generator) -> None:
    m, n, k = (int(size) for size in rng.integers(1, (150, 140, 200)))
    product = make_product(rng, m, n, k)
    product.operands["a"][...] = draw(rng, kind, (m, k))
    product.operands["b"][...] = draw(rng, str(rng.choice(KINDS)), (n, k)).T
    run(product, fp16x3.SMALL)
    check(product, fp16x3.SMALL)


def test_packed_rows_and_tiles_beyond_an_index_are_refused() -> None:
    product = make_product(np.random.default_rng(0), 1, 1, 1)
    assert fp16x3.refusal(product.problem) is None
    assert "32-bit" in str(fp16x3.refusal(replace(product.problem, m=1 << 31)))
    # One matrix for all items: a tile an item, and a block's next tile must have a number too.
    everywhere = {name: replace(getattr(product.problem, name), batch=(0,)) for name in "ab"}
    out = replace(product.problem.out, batch=(1,))
    many = replace(product.problem, batch=((1 << 31) - 1,), out=out, **everywhere)
    assert "32-bit" in str(fp16x3.refusal(many))
    assert fp16x3.refusal(replace(many, batch=((1 << 31) - 5000,))) is None
    assert "2^24" in str(fp16x3.refusal(replace(product.problem, k=1 << 24)))
    assert "no product" in str(fp16x3.refusal(replace(product.problem, product=False)))
