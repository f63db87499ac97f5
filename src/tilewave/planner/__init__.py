"""Tiles, schedules, the cost estimate and the choice; no GPU library is imported here.

Names are loaded when first used: the product's planner, in `planner.gemm`, shares only the schedules.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewave.planner.cost import ARTICLE_COSTS as ARTICLE_COSTS
    from tilewave.planner.cost import Constant as Constant
    from tilewave.planner.cost import CostModel as CostModel
    from tilewave.planner.cost import Estimate as Estimate
    from tilewave.planner.cost import estimate as estimate
    from tilewave.planner.records import Candidate as Candidate
    from tilewave.planner.records import Launch as Launch
    from tilewave.planner.records import Plan as Plan
    from tilewave.planner.records import Problem as Problem
    from tilewave.planner.records import launch_of as launch_of
    from tilewave.planner.schedules import DATA_PARALLEL as DATA_PARALLEL
    from tilewave.planner.schedules import STREAM_K_WALK as STREAM_K_WALK
    from tilewave.planner.schedules import Decomposition as Decomposition
    from tilewave.planner.schedules import Raster as Raster
    from tilewave.planner.schedules import Schedule as Schedule
    from tilewave.planner.schedules import ScheduleKind as ScheduleKind
    from tilewave.planner.schedules import WorkItem as WorkItem
    from tilewave.planner.schedules import decompose as decompose
    from tilewave.planner.schedules import split_k as split_k
    from tilewave.planner.schedules import stream_k as stream_k
    from tilewave.planner.schedules import stream_k_sixteen as stream_k_sixteen
    from tilewave.planner.select import EVERYTHING as EVERYTHING
    from tilewave.planner.select import FAMILIES as FAMILIES
    from tilewave.planner.select import THREE_KERNELS as THREE_KERNELS
    from tilewave.planner.select import WITH_STREAM_K as WITH_STREAM_K
    from tilewave.planner.select import Family as Family
    from tilewave.planner.select import least_bare_pieces as least_bare_pieces
    from tilewave.planner.select import plan as plan
    from tilewave.planner.tiles import DOUBLE_BUFFERED as DOUBLE_BUFFERED
    from tilewave.planner.tiles import LARGE as LARGE
    from tilewave.planner.tiles import SMALL as SMALL
    from tilewave.planner.tiles import TALL as TALL
    from tilewave.planner.tiles import VARIANTS as VARIANTS
    from tilewave.planner.tiles import Tile as Tile
    from tilewave.planner.tiles import Variant as Variant

_NAMES = {
    "cost": ("ARTICLE_COSTS", "Constant", "CostModel", "Estimate", "estimate"),
    "records": ("Candidate", "Launch", "Plan", "Problem", "launch_of"),
    "schedules": (
        "DATA_PARALLEL",
        "STREAM_K_WALK",
        "Decomposition",
        "Raster",
        "Schedule",
        "ScheduleKind",
        "WorkItem",
        "decompose",
        "split_k",
        "stream_k",
        "stream_k_sixteen",
    ),
    "select": (
        "EVERYTHING",
        "FAMILIES",
        "THREE_KERNELS",
        "WITH_STREAM_K",
        "Family",
        "least_bare_pieces",
        "plan",
    ),
    "tiles": ("DOUBLE_BUFFERED", "LARGE", "SMALL", "TALL", "VARIANTS", "Tile", "Variant"),
}
_HOMES = {name: f"tilewave.planner.{home}" for home, names in _NAMES.items() for name in names}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tilewave.planner' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
