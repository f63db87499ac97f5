"""Error bounds and models of what each precision mode computes."""

from tilewave.precision.bounds import error_in_bounds, errors_in_bounds, ieee_bound
from tilewave.precision.mode_bounds import error_in_mode_bounds, fp16x3_bound, mode_bound, tf32_bound

__all__ = [
    "error_in_bounds",
    "error_in_mode_bounds",
    "errors_in_bounds",
    "fp16x3_bound",
    "ieee_bound",
    "mode_bound",
    "tf32_bound",
]
