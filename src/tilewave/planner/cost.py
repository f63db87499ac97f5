"""The estimate of the busiest SM's work, and the constants in it.

The estimate is the article's: count the work that the schedule gives the busiest SM, charge each variant its
cost per unit of work and each combining of partial sums an allowance, choose the least. The unit everywhere
is one multiply-add at the rate of the article's 128x256 kernel; a tile counts whole, padding included,
because that is what the kernel computes.

The constants come from ratios that the article reports on a GB10, and so does the arithmetic that derives
them: a test checks that the estimate gives the ratios back. They are not calibrated for any other GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from tilewave.device.spec import DeviceSpec
from tilewave.planner.combining import moved_pieces
from tilewave.planner.schedules import Decomposition, Schedule, ScheduleKind
from tilewave.planner.tiles import DOUBLE_BUFFERED, LARGE, SMALL, TALL, Variant


class Basis(StrEnum):
    """How a constant came to be."""

    REPORTED = "reported"
    DERIVED = "derived"
    ASSUMED = "assumed"


@dataclass(frozen=True)
class Constant:
    """A number of the model with its unit, how it came to be, and from what."""

    value: float
    unit: str
    basis: Basis
    source: str

    def __str__(self) -> str:
        return f"{self.value:.4g} {self.unit} ({self.basis}: {self.source})"


# What the article reports (GB10; throughput as a share of cuBLAS's at the same size).
LARGE_VS_CUBLAS = 1.035  # 128x256 at 2048 and 4096: "103-104%"
DOUBLE_BUFFERED_VS_CUBLAS = 0.90  # double-buffered 128x128 at 2048 and 4096: "about 90%"
DOUBLE_BUFFERED_VS_CUBLAS_2049 = 1.02  # "about 2% faster than cuBLAS at both N = 1025 and N = 2049"
SELECTOR_VS_CUBLAS_2049 = 1.14
LARGE_VS_CUBLAS_1024 = 0.86
SELECTOR_VS_CUBLAS_1024 = 1.00  # "roughly parity"
STREAM_K_GAIN_2049 = 1.11  # over the 128x256 kernel, "about 11%"
STREAM_K_GAIN_2048 = 1.04  # "4%", "close to the timing variation"
TALL_SLOWDOWN = 1.08  # 256x128 "ran 6-10% slower": the middle
WALK_SLOWDOWN = 1.40  # first attempt at stream-K: "increasing time per tile by about 40%"
MATH_UTILISATION = 0.70  # 128x256 kernel in the profiler, at full clock

# What follows from it.
#
# At 2048 and 4096 both kernels give the busiest SM the same bare work (3 and 11 big tiles), so their costs
# per unit of work are as their throughputs.
_DOUBLE_BUFFERED_COST = LARGE_VS_CUBLAS / DOUBLE_BUFFERED_VS_CUBLAS
# The two small-tile unknowns, cost per unit of work and combining, from two ratios, in slices of the big
# tile: at 1024 (64 slices) split-K three ways gives the busiest SM 22 + 22 + 21 + 21 half-size slices and 5
# big tiles to move (4 small pieces written, 2 tiles of 3 summed), in 0.86 of the big tile's 64; at 2049 (129
# slices) 19 pieces of 43 half-size slices and 20 big tiles to move, in 1.02 / 1.14 of what the double-
# buffered kernel takes for its 7 half-size tiles. Both take the selector to have chosen split-K, which is
# what the resulting constants choose.
_SPLIT_1024 = 64 * LARGE_VS_CUBLAS_1024 / SELECTOR_VS_CUBLAS_1024
_SPLIT_2049 = 7 * 129 / 2 * _DOUBLE_BUFFERED_COST * DOUBLE_BUFFERED_VS_CUBLAS_2049 / SELECTOR_VS_CUBLAS_2049
_SMALL_COST = (_SPLIT_2049 - 20 / 5 * _SPLIT_1024) / (19 * 43 / 2 - 20 / 5 * 86 / 2)
_SPLIT_COMBINE = (_SPLIT_1024 - 86 / 2 * _SMALL_COST) / 5 * 16
# At 2049 (129 slices) the big tile's 153 tiles take 4 rounds; with the last 9 in four pieces 3 rounds and 33
# slices, 1 piece written, one tile of 4 summed. At 2048 (128 slices) 128 tiles take 3 rounds; with the last
# 32 in three pieces 2 rounds and 43 + 43 slices, 2 pieces written, one tile of 3 summed. Five tiles moved in
# both.
_STREAM_COMBINE_2049 = (4 * 129 / STREAM_K_GAIN_2049 - (3 * 129 + 33)) / 5 * 16
_STREAM_COMBINE_2048 = (3 * 128 / STREAM_K_GAIN_2048 - (2 * 128 + 86)) / 5 * 16
_STREAM_COMBINE = (_STREAM_COMBINE_2049 + _STREAM_COMBINE_2048) / 2

_PER_UNIT = "per multiply-add of the 128x256 kernel"
_PER_ELEMENT = "multiply-adds per partial sum written or read"


@dataclass(frozen=True)
class CostModel:
    """The constants of an estimate.

    ``work`` is the cost per multiply-add by variant name; ``combining`` the cost per partial sum that goes to
    or comes from the workspace, by schedule; ``walk`` multiplies the work of the long walk, which loses L2
    reuse; ``utilisation`` is the share of the FP32 peak at which a cost of 1 runs, for the prediction in
    microseconds. ``gpu`` is where they were measured.
    """

    name: str
    gpu: str
    work: Mapping[str, Constant]
    combining: Mapping[ScheduleKind, Constant]
    walk: Constant
    utilisation: Constant

    def constants(self) -> dict[str, Constant]:
        """Every constant by a name for a person."""
        named = {f"work, {variant}": constant for variant, constant in self.work.items()}
        named |= {f"combining, {kind}": constant for kind, constant in self.combining.items()}
        return named | {"walk": self.walk, "utilisation": self.utilisation}


_SMALL_SOURCE = (
    "86 % of cuBLAS with 128x256 and parity with the selector at 1024; 102 % with the double-buffered kernel "
    "and 114 % with the selector at 2049; both taken to be split-K"
)
_STREAM_SOURCE = "mean of +11 % at 2049 and +4 % at 2048 over the 128x256 kernel"

ARTICLE_COSTS = CostModel(
    name="the article's ratios",
    gpu="GB10",
    work={
        LARGE.name: Constant(1.0, _PER_UNIT, Basis.DERIVED, "the unit itself"),
        SMALL.name: Constant(
            _SMALL_COST,
            _PER_UNIT,
            Basis.DERIVED,
            _SMALL_SOURCE,
        ),
        TALL.name: Constant(
            TALL_SLOWDOWN, _PER_UNIT, Basis.REPORTED, "6-10 % slower than 128x256: the middle"
        ),
        DOUBLE_BUFFERED.name: Constant(
            _DOUBLE_BUFFERED_COST, _PER_UNIT, Basis.DERIVED, "103.5 % against 90 % of cuBLAS at 2048 and 4096"
        ),
    },
    combining={
        ScheduleKind.SPLIT_K: Constant(
            _SPLIT_COMBINE,
            _PER_ELEMENT,
            Basis.DERIVED,
            _SMALL_SOURCE,
        ),
        ScheduleKind.STREAM_K: Constant(_STREAM_COMBINE, _PER_ELEMENT, Basis.DERIVED, _STREAM_SOURCE),
        ScheduleKind.STREAM_K_SIXTEEN: Constant(
            _STREAM_COMBINE, _PER_ELEMENT, Basis.ASSUMED, "as in the version that was kept"
        ),
        ScheduleKind.STREAM_K_WALK: Constant(
            0.0, _PER_ELEMENT, Basis.ASSUMED, "contained in the 40 % that the walk costs"
        ),
    },
    walk=Constant(WALK_SLOWDOWN, "times the work", Basis.REPORTED, "+40 % time per tile, L2 reuse lost"),
    utilisation=Constant(
        MATH_UTILISATION,
        "of the FP32 peak",
        Basis.REPORTED,
        "math-unit utilisation of 128x256 in the profiler",
    ),
)


@dataclass(frozen=True)
class Estimate:
    """The busiest SM's share of a product under one schedule.

    ``slices`` of the variant's tile make ``bare_work`` multiply-adds; ``work`` is that times the variant's
    cost per unit; ``combining`` is the allowance for partial sums; ``cost`` is their sum, the figure that is
    compared. ``waves`` counts rounds of one block an SM, ``idle_sms`` the SMs without a block in the last
    one, and ``microseconds`` turns the cost into time on the GPU at hand: arithmetic only, neither memory nor
    launch.
    """

    slices: int
    bare_work: int
    work: float
    combining: float
    waves: int
    idle_sms: int
    microseconds: float

    @property
    def cost(self) -> float:
        """Work and combining, in multiply-adds of the 128x256 kernel."""
        return self.work + self.combining


def estimate(
    variant: Variant,
    schedule: Schedule,
    cut: Decomposition,
    spec: DeviceSpec,
    model: CostModel = ARTICLE_COSTS,
) -> Estimate:
    """The busiest SM's work when ``cut``, a binding of ``schedule``, runs on ``spec``."""
    slices = cut.busiest_slices(spec.sms)
    bare = slices * variant.tile.outputs * variant.tile.bk
    work = bare * model.work[variant.name].value
    combining = 0.0
    if schedule.kind is ScheduleKind.STREAM_K_WALK:
        work *= model.walk.value
    if cut.slots:
        combining = moved_pieces(cut, spec.sms) * variant.tile.outputs * model.combining[schedule.kind].value
    per_second = spec.fp32_lanes_per_sm * spec.clock_mhz * 1e6 * model.utilisation.value
    return Estimate(
        slices=slices,
        bare_work=bare,
        work=work,
        combining=combining,
        waves=-(-cut.blocks // spec.sms),
        idle_sms=-cut.blocks % spec.sms,
        microseconds=1e6 * (work + combining) / per_second,
    )
