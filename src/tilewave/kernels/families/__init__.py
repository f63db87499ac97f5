"""The families of kernels, in the order in which the planner weighs them."""

from __future__ import annotations

from tilewave.kernels.families import (
    column_stream,
    dot_stream,
    elementwise,
    large_tile,
    small_k,
    small_tile,
    tiny,
)
from tilewave.kernels.instances import Family

FAMILIES: tuple[Family, ...] = (
    elementwise,
    tiny,
    dot_stream,
    column_stream,
    small_k,
    large_tile,
    small_tile,
)
