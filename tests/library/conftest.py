"""Fixtures of the front door's tests."""

from host_gpu import gpu
from paths import kernels, path

__all__ = ["gpu", "kernels", "path"]
