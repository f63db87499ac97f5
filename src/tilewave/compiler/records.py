"""What a compile returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tilewave.compiler.resources import Resources


@dataclass(frozen=True)
class Kernel:
    """One kernel of a program: its name expression, its name in cubin and PTX, what it takes of an SM."""

    name: str
    symbol: str
    resources: Resources


@dataclass(frozen=True)
class Program:
    """A compiled source: machine code for one architecture, the PTX it came from, and the compiler's log.

    ``kernels`` maps each name expression to its kernel; ``compiler`` reads ``"NVRTC 13.5.37"``.
    """

    arch: str
    compiler: str
    cubin: bytes = field(repr=False)
    ptx: str = field(repr=False)
    log: str = field(repr=False)
    kernels: Mapping[str, Kernel]
