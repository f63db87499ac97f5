"""Small ragged products for kernels of the library: what selftest and compute-sanitizer launch.

A *sample* is one product that an instance takes, a little larger than its tile, with a plan that deals its
work in one of the ways that the planner knows. It depends on the seed, the instance and the way alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from tilewave.errors import UsageError
from tilewave.kernels.families import FAMILIES
from tilewave.kernels.instances import Access, Contiguous, Family, Instance
from tilewave.planner.gemm.records import GemmEstimate, GemmPlan
from tilewave.planner.schedules import (
    DATA_PARALLEL,
    STREAM_K_WALK,
    Decomposition,
    Raster,
    Schedule,
    ScheduleKind,
    decompose,
    split_k,
    stream_k,
)
from tilewave.precision import mode_bound
from tilewave.precision.bounds import UNIT_ROUNDOFF
from tilewave.problem import Activation, GemmProblem, MatrixLayout, Precision

Floats = NDArray[np.float32]

SMS = 3
"""What schedules are bound to: of a sample's few tiles some then are whole and some are cut."""

_NO_TIME = GemmEstimate(0.0, 0.0, 0.0, 0.0, 0.0)


class Dealing(StrEnum):
    """The ways in which a plan can deal tiles to blocks: kinds of schedule, and walks over whole tiles."""

    DATA_PARALLEL = "data_parallel"
    WHOLE_TILES_WALKED = "whole_tiles_walked"  # data-parallel with fewer blocks than tiles, as under max_sms
    SPLIT_K = "split_k"
    STREAM_K = "stream_k"
    STREAM_K_WALK = "stream_k_walk"


UNCUT = (Dealing.DATA_PARALLEL, Dealing.WHOLE_TILES_WALKED)


def dealings(instance: Instance) -> tuple[Dealing, ...]:
    """The ways that an instance can be dealt."""
    return tuple(Dealing) if instance.cuttable else UNCUT


def dealing_of(schedule: Schedule, cut: Decomposition) -> Dealing:
    """The way that a plan's schedule came to."""
    if cut.walkers and (schedule.kind is ScheduleKind.DATA_PARALLEL or cut.slices == 1):
        return Dealing.WHOLE_TILES_WALKED
    return Dealing.DATA_PARALLEL if cut.pieces == 1 and not cut.walkers else Dealing(schedule.kind.value)


@dataclass(frozen=True)
class Operand:
    """A batch of matrices: ``view`` (batch, rows, columns) within ``storage``, whose gaps are NaN."""

    storage: Floats
    view: Floats
    offset: int

    @property
    def layout(self) -> MatrixLayout:
        """How it lies where ``storage`` begins on 16 bytes."""
        batch, row, column = (
            0 if extent == 1 else stride // 4
            for extent, stride in zip(self.view.shape, self.view.strides, strict=True)
        )
        alignment = 16 if self.offset % 4 == 0 else 8 if self.offset % 2 == 0 else 4
        return MatrixLayout(row, column, (batch,), alignment)


@dataclass(frozen=True)
class SampleProduct:
    """A product with its data; ``operands`` has a, b, out and whatever else the epilogue takes."""

    problem: GemmProblem
    operands: dict[str, Operand]
    alpha: float
    beta: float

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the operands that are written."""
        return tuple(name for name in ("out", "preactivation") if name in self.operands)

    def error_in_bounds(self, out: Floats, preactivation: Floats | None = None) -> float:
        """How far results are from float64, in units of what may be left; infinite for a NaN.

        The bound is that of the precision's sum, and four roundings of the epilogue.
        """
        problem = self.problem
        views = {name: operand.view for name, operand in self.operands.items()}
        total, bound = np.zeros(out.shape), np.zeros(out.shape)
        if problem.product:
            total = views["a"].astype(np.float64) @ views["b"].astype(np.float64)
            a, b = (np.ascontiguousarray(views[name]) for name in "ab")
            bound = mode_bound(problem.precision, a, b)
        value, size = self.alpha * total, abs(self.alpha) * (np.abs(total) + bound)
        for name, factor in (("c", self.beta), ("bias", 1.0)):
            if name in views:
                term = factor * views[name].astype(np.float64)
                value, size = value + term, size + np.abs(term)
        limit = abs(self.alpha) * bound + 4 * UNIT_ROUNDOFF * size + 2.0**-148
        pairs = [(out, np.maximum(value, 0) if problem.activation is Activation.RELU else value)]
        if preactivation is not None:
            pairs.append((preactivation, value))
        errors = [np.abs(found.astype(np.float64) - expected) / limit for found, expected in pairs]
        worst = max((float(np.max(error, initial=0.0)) for error in errors), key=lambda e: (np.isnan(e), e))
        return float("inf") if np.isnan(worst) else worst


@dataclass(frozen=True)
class Sample:
    """A product with its plan."""

    plan: GemmPlan
    dealing: Dealing
    product: SampleProduct

    @property
    def operands(self) -> dict[str, Operand]:
        """The product's operands."""
        return self.product.operands

    @property
    def alpha(self) -> float:
        """Its factor."""
        return self.product.alpha

    @property
    def beta(self) -> float:
        """The factor of c."""
        return self.product.beta

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the operands that are written."""
        return self.product.outputs

    def error_in_bounds(self, out: Floats, preactivation: Floats | None = None) -> float:
        """As that of the product."""
        return self.product.error_in_bounds(out, preactivation)


def family_of(instance: Instance) -> Family:
    """The family that an instance belongs to."""
    return next(family for family in FAMILIES if family.name == instance.family)


def make_sample(instance: Instance, dealing: Dealing, seed: int) -> Sample:
    """A fresh sample: layouts as the instance reads them, sums alone or with an epilogue."""
    if dealing not in dealings(instance):
        raise UsageError(f"{instance} cannot be dealt as {dealing}; {', '.join(dealings(instance))} can be")
    rng = np.random.default_rng([seed, *instance.name.encode(), *dealing.encode()])
    product = draw_product(rng, *_sizes(rng, instance, dealing), instance.a, instance.b)
    refusal = family_of(instance).refuses(instance, product.problem)
    assert refusal is None, f"{instance} refuses {product.problem}: {refusal}"
    return Sample(_plan(instance, product.problem, dealing, rng), dealing, product)


def draw_product(
    rng: np.random.Generator,
    m: int,
    n: int,
    k: int,
    batches: int,
    a: Access | None,
    b: Access | None,
    precision: Precision = Precision.IEEE,
) -> SampleProduct:
    """A product of these sizes, its operands laid out to be read so (None: in any way)."""
    alpha, beta = (1.0, 0.0) if rng.integers(2) else (-1.5, 0.5)
    fused = beta != 0

    def draw(rows: int, columns: int, access: Access | None, along_row: Contiguous) -> Operand:
        narrow = access is None or access.width == 4
        by_rows = bool(rng.integers(2)) if access is None else access.contiguous is along_row
        padding = int(rng.integers(4)) if narrow else 4 * int(rng.integers(2))
        values = rng.standard_normal((batches, rows, columns), np.float32)
        return _lay_out(values, by_rows, padding, int(rng.integers(4)) if narrow else 0)

    # Results lie packed: what no kernel writes is not read back, where initcheck would see it.
    unwritten = np.full((batches, m, n), np.nan, np.float32)
    operands = {
        "a": draw(m, k, a, Contiguous.K),
        "b": draw(k, n, b, Contiguous.OTHER),
        "out": _lay_out(unwritten, bool(rng.integers(4)), 0, 0),
    }
    if fused:
        operands["c"] = draw(m, n, None, Contiguous.OTHER)
        operands["bias"] = draw(m, n, None, Contiguous.OTHER)
        operands["preactivation"] = _lay_out(unwritten, True, 0, 0)
    layouts = {name: operand.layout for name, operand in operands.items()}
    problem = GemmProblem(
        m,
        n,
        k,
        (batches,),
        layouts["a"],
        layouts["b"],
        layouts["out"],
        layouts.get("c"),
        layouts.get("bias"),
        layouts.get("preactivation"),
        activation=Activation.RELU if fused else Activation.NONE,
        product=k > 0,
        precision=precision,
    )
    return SampleProduct(problem, operands, alpha, beta)


def _sizes(rng: np.random.Generator, instance: Instance, dealing: Dealing) -> tuple[int, int, int, int]:
    """m, n, k and items: two tiles, the second ragged, along each axis that the family can tile."""
    bm, bn, bk, family = instance.bm, instance.bn, instance.bk, instance.family

    def beyond(extent: int) -> int:
        return extent + int(rng.integers(1, max(2, min(extent // 2, 40))))

    def within(extent: int) -> int:
        return int(rng.integers(1, extent + 1))

    m, n, batches = beyond(bm), beyond(bn), 1 + int(rng.integers(4) == 0)
    if instance.items > 1:
        m, n, batches = within(bm), within(bn), beyond(instance.items)
    cut = dealing not in UNCUT
    k = bk * int(rng.integers(4, 6) if cut else rng.integers(1, 3)) + within(bk) - 1 + (not cut)
    if family == "elementwise":
        k = 0
    elif not instance.cuttable:  # they hold all of K at once
        k = within(bk)
    accesses = [access for access in (instance.a, instance.b) if access is not None]
    if any(access.width > 4 for access in accesses):
        m, n, k = (-(-size // 4) * 4 for size in (m, n, k))
    return m, n, k, batches


def _lay_out(values: Floats, by_rows: bool, padding: int, offset: int) -> Operand:
    """Values in memory row by row or column by column, lines ``padding`` elements apart; 2-D with a batch."""
    batches, rows, columns = values.shape
    lines, length = (rows, columns) if by_rows else (columns, rows)
    pitch = length + padding
    used = max(0, (batches * lines - 1) * pitch + length) if values.size else 0
    storage = np.full(offset + used, np.nan, np.float32)
    strides = (lines * pitch, pitch, 1) if by_rows else (lines * pitch, 1, pitch)
    view = as_strided(storage[offset:], values.shape, [4 * stride for stride in strides])
    view[...] = values
    return Operand(storage, view, offset)


def _plan(instance: Instance, problem: GemmProblem, dealing: Dealing, rng: np.random.Generator) -> GemmPlan:
    rows, columns, groups = instance.tiles(problem)
    tiles, depth = rows * columns * groups, instance.bk
    schedule = {
        Dealing.SPLIT_K: split_k(int(rng.integers(2, 4))),
        Dealing.STREAM_K: stream_k(int(rng.integers(2, 4))),
        Dealing.STREAM_K_WALK: STREAM_K_WALK,
    }.get(dealing, DATA_PARALLEL)
    if dealing is Dealing.WHOLE_TILES_WALKED:
        deep = max(1, -(-problem.k // depth)) * depth
        cut = Decomposition(tiles, problem.k, deep, 0, 1, max(1, min(SMS, tiles - 1)))
    else:
        cut = decompose(tiles, problem.k, depth, schedule, SMS)
    raster = Raster(rows, columns, int(rng.integers(1, 3)))
    return GemmPlan(problem, "a sample", SMS, instance, schedule, cut, raster, _NO_TIME, ())
