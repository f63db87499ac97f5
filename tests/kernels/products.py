"""Products on random layouts, run by one kernel instance in the emulator, and what must come out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewave.emulator import LaunchResult
from tilewave.emulator.fma import canonical_nan, fma
from tilewave.kernels.instances import Instance
from tilewave.planner.gemm.records import GemmEstimate, GemmPlan
from tilewave.planner.schedules import DATA_PARALLEL, Raster, Schedule, behind_whole_waves, decompose
from tilewave.precision import ieee_bound
from tilewave.precision.bounds import UNIT_ROUNDOFF
from tilewave.problem import Activation, GemmProblem, MatrixLayout
from tilewave.runtime.emulated import emulate_plan

Generator = np.random.Generator
Floats = NDArray[np.float32]
F32 = np.float32

LAYOUTS = ("rows", "columns", "padded", "padded columns", "strided", "reversed", "repeated", "one item")
"""How an operand may lie: see `lay_out`. An output takes all but the last two, which repeat elements."""


def lay_out(values: Floats, layout: str) -> Floats:
    """An array that holds ``values`` (batch..., rows, columns) laid out as the name says.

    ``repeated`` and ``one item`` drop values: all rows are then the first one, or all items the first item.
    """
    rows, columns = values.shape[-2:]
    batch = values.shape[:-2]

    def within(shape: tuple[int, int], index: tuple[slice, slice]) -> Floats:
        view = np.zeros((*batch, *shape), F32)[(..., *index)]
        view[...] = values
        return view

    match layout:
        case "rows":
            return values.copy()
        case "columns":
            return values.swapaxes(-1, -2).copy().swapaxes(-1, -2)
        case "padded":
            return within((rows + 1, columns + 3), (slice(rows), slice(columns)))
        case "wide":  # every row of every item starts on 16 bytes
            return within((rows, (columns + 3) // 4 * 4 + 4), (slice(rows), slice(columns)))
        case "wide columns":
            return lay_out(values.swapaxes(-1, -2), "wide").swapaxes(-1, -2)
        case "padded columns":
            return lay_out(values.swapaxes(-1, -2), "padded").swapaxes(-1, -2)
        case "strided":
            return within((2 * rows, 3 * columns), (slice(0, 2 * rows, 2), slice(0, 3 * columns, 3)))
        case "reversed":
            flipped = values[..., ::-1, ::-1].copy()
            return flipped[..., ::-1, ::-1]
        case "repeated":
            return np.broadcast_to(values[..., :1, :].copy(), values.shape)
        case "one item":
            first = values[(0,) * len(batch)].copy()
            return np.broadcast_to(first, values.shape)
    raise ValueError(layout)


def layout_of(array: Floats, misalignment: int) -> MatrixLayout:
    """The layout of an array that lies ``misalignment`` elements past a multiple of 256 bytes."""
    strides = [
        0 if extent == 1 else stride // 4 for extent, stride in zip(array.shape, array.strides, strict=True)
    ]
    below = sum(min(0, (extent - 1) * stride) for extent, stride in zip(array.shape, strides, strict=True))
    first = misalignment - below
    alignment = 16 if first % 4 == 0 else 8 if first % 2 == 0 else 4
    return MatrixLayout(strides[-2], strides[-1], tuple(strides[:-2]), alignment)


@dataclass
class Product:
    """One problem with its operands; ``operands`` holds a, b, out and whatever else there is."""

    problem: GemmProblem
    operands: dict[str, Floats]
    alpha: float
    beta: float
    misalignment: int
    result: LaunchResult | None = field(default=None)

    @property
    def out(self) -> Floats:
        return self.operands["out"]


def make_product(
    rng: Generator,
    m: int,
    n: int,
    k: int,
    batch: Sequence[int] = (),
    *,
    layouts: str | tuple[str, str, str] = "rows",
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: str | None = None,
    activation: Activation = Activation.NONE,
    preactivation: bool = False,
    misalignment: int = 0,
    positive: bool = False,
    with_c: bool | None = None,
) -> Product:
    """Fresh operands. ``layouts`` are those of a, b and out; ``bias`` is "row", "column" or "full"."""
    of_a, of_b, of_out = (layouts,) * 3 if isinstance(layouts, str) else layouts
    batch = tuple(batch)

    def draw(*shape: int) -> Floats:
        values = rng.standard_normal(batch + shape).astype(F32)
        return np.abs(values) if positive else values

    def poison(layout: str) -> Floats:
        return lay_out(np.full((*batch, m, n), np.nan, F32), layout)

    operands = {"a": lay_out(draw(m, k), of_a), "b": lay_out(draw(k, n), of_b), "out": poison(of_out)}
    if beta != 0 if with_c is None else with_c:
        operands["c"] = lay_out(draw(m, n), str(rng.choice(LAYOUTS)))
    if bias is not None:
        vector = rng.standard_normal({"row": (1, n), "column": (m, 1), "full": (m, n)}[bias]).astype(F32)
        operands["bias"] = np.broadcast_to(vector, (*batch, m, n))
    if preactivation:
        operands["preactivation"] = poison("padded")
    found = {name: layout_of(array, misalignment) for name, array in operands.items()}
    if beta == 0:
        found.pop("c", None)
    product = alpha != 0 and k != 0
    problem = GemmProblem(m, n, k, batch, activation=activation, product=product, **found)
    return Product(problem, operands, alpha, beta, misalignment)


def plan_of(
    instance: Instance,
    problem: GemmProblem,
    schedule: Schedule,
    sms: int,
    band: int = 1,
    *,
    whole_waves: bool = False,
) -> GemmPlan:
    """A plan that runs ``problem`` on one instance; ``whole_waves``: a walk follows them."""
    tiles_m, tiles_n, groups = instance.tiles(problem)
    cut = decompose(tiles_m * tiles_n * groups, problem.k, instance.bk, schedule, sms)
    if whole_waves:
        cut = behind_whole_waves(cut)
    nothing = GemmEstimate(0.0, 0.0, 0.0, 0.0, 0.0)
    raster = Raster(tiles_m, tiles_n, band)
    return GemmPlan(problem, "emulated", sms, instance, schedule, cut, raster, nothing, ())


def run(
    product: Product,
    instance: Instance,
    schedule: Schedule = DATA_PARALLEL,
    *,
    sms: int = 3,
    band: int = 1,
    whole_waves: bool = False,
    **options: Any,
) -> GemmPlan:
    """Run a product in the emulator, in place."""
    plan = plan_of(instance, product.problem, schedule, sms, band, whole_waves=whole_waves)
    product.result = emulate_plan(
        plan,
        product.operands,
        alpha=product.alpha,
        beta=product.beta,
        misalignment=product.misalignment,
        exact_fma=True,
        **options,
    )
    return plan


def chain(a: Floats, b: Floats) -> Floats:
    """A B as chains of float32 fused multiply-adds in the order of k, from +0."""
    total = np.zeros((*a.shape[:-1], b.shape[-1]), F32)
    for k in range(a.shape[-1]):
        total = fma(
            np.ascontiguousarray(np.broadcast_to(a[..., :, k, None], total.shape)),
            np.ascontiguousarray(np.broadcast_to(b[..., None, k, :], total.shape)),
            total,
        )
    return total


def activated(activation: Activation, x: NDArray[Any]) -> NDArray[Any]:
    """The activation of ``x`` in ``x``'s precision (float64 for a reference)."""
    match activation:
        case Activation.RELU:
            return np.where(x < 0, x.dtype.type(0), x)
        case Activation.GELU:
            return 0.5 * x * (1 + np.vectorize(math.erf, otypes=[x.dtype])(x / math.sqrt(2)))
        case Activation.GELU_TANH:
            return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        case Activation.SILU:
            with np.errstate(over="ignore"):  # to 0, which is right
                return x / (1 + np.exp(-x))
    return x


def check_bits(product: Product) -> None:
    """out and preactivation are, bit for bit, the epilogue of plain chains over k."""
    problem, operands = product.problem, product.operands
    with np.errstate(all="ignore"):
        total = np.zeros(operands["out"].shape, F32)
        if problem.product:
            total = chain(operands["a"], operands["b"])
        value = F32(product.alpha) * total
        if product.beta != 0:
            scale = np.full(total.shape, product.beta, F32)
            value = fma(scale, np.ascontiguousarray(operands["c"]), np.ascontiguousarray(value))
        if "bias" in operands:
            value = value + operands["bias"]
        canonical_nan(value)
    if "preactivation" in operands:
        _same(operands["preactivation"], value)
    if problem.activation in (Activation.NONE, Activation.RELU):
        _same(operands["out"], activated(problem.activation, value))


def _same(found: Floats, expected: Floats) -> None:
    found, expected = np.ascontiguousarray(found), np.ascontiguousarray(expected)
    different = np.argwhere(found.view(np.uint32) != expected.view(np.uint32))
    if len(different):
        first = tuple(different[0])
        raise AssertionError(
            f"{len(different)} of {found.size} elements differ, first {[int(i) for i in first]}: "
            f"{found[first]!r} instead of {expected[first]!r}"
        )


def check_values(product: Product) -> None:
    """out is within the bound of float32 arithmetic of the float64 result, whatever the order of sums."""
    problem, operands = product.problem, product.operands
    sum64 = np.zeros(operands["out"].shape)
    bound = np.zeros(operands["out"].shape)
    if problem.product:
        a, b = operands["a"], operands["b"]
        sum64 = np.matmul(a.astype(np.float64), b.astype(np.float64))
        bound = abs(product.alpha) * ieee_bound(np.ascontiguousarray(a), np.ascontiguousarray(b))
    value = float(F32(product.alpha)) * sum64
    size = np.abs(value) + bound
    if product.beta != 0:
        term = float(F32(product.beta)) * operands["c"].astype(np.float64)
        value, size = value + term, size + np.abs(term)
    if "bias" in operands:
        value, size = value + operands["bias"], size + np.abs(operands["bias"])
    limit = bound + 4 * UNIT_ROUNDOFF * size + 2.0**-148
    if "preactivation" in operands:
        _near(operands["preactivation"], value, limit)
    if problem.activation is not Activation.NONE:
        # No activation is steeper than 1.13; expf, erff and tanhf err by a few units of roundoff.
        limit = 1.13 * limit + 16 * UNIT_ROUNDOFF * (1 + np.abs(value))
        value = activated(problem.activation, value)
    _near(operands["out"], value, limit)


def _near(found: Floats, expected: NDArray[np.float64], limit: NDArray[np.float64]) -> None:
    error = np.abs(found.astype(np.float64) - expected)
    wrong = np.argwhere(~(error <= limit))
    if len(wrong):
        first = tuple(wrong[0])
        raise AssertionError(
            f"{len(wrong)} of {found.size} elements are off, first {[int(i) for i in first]}: "
            f"{found[first]!r} instead of {expected[first]!r} within {limit[first]:.3g}"
        )


def check(product: Product, plan: GemmPlan) -> None:
    """The right values, and the very bits where the instance promises them."""
    check_values(product)
    if plan.instance.sequential and plan.cut.slots == 0:
        check_bits(product)
