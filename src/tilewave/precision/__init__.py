"""Error bounds and models of what each precision mode computes."""

from tilewave.precision.bounds import error_in_bounds, errors_in_bounds, ieee_bound

__all__ = ["error_in_bounds", "errors_in_bounds", "ieee_bound"]
