"""The lab: every step of the optimisation as a kernel of its own, executed, counted, timed and explained."""

from tilewave.lab.registry import Rung, get_rung, load_rungs

__all__ = ["Rung", "get_rung", "load_rungs"]
