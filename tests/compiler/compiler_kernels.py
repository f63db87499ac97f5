"""Small kernels for the tests of the compiler, different in every run where a test needs a cold compile."""

from __future__ import annotations

import secrets

from tilewave.compiler import Source

COPY = (
    'extern "C" __global__ void copy(float* to, const float* from) { to[threadIdx.x] = from[threadIdx.x]; }\n'
)


def fresh_source(name: str = "fresh.cu") -> tuple[Source, int]:
    """A kernel ``k`` that stores a number drawn for this call, and the number."""
    number = secrets.randbits(31)
    return Source.from_text(name, f'extern "C" __global__ void k(int* p) {{ p[0] = {number}; }}\n'), number
