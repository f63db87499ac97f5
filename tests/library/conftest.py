"""Fixtures of the front door's tests."""

from fake_gpu import gpu

__all__ = ["gpu"]
