"""What a compile returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tilewave.compiler.resources import Resources, parse_resources


@dataclass(frozen=True)
class Kernel:
    """One kernel of a program: its name expression, its name in cubin and PTX, what it takes of an SM."""

    name: str
    symbol: str
    resources: Resources


@dataclass(frozen=True)
class Program:
    """A compiled source: machine code for one architecture, the PTX it came from, and the compiler's log.

    ``kernels`` maps each name expression to its kernel; ``compiler`` reads ``"NVRTC 13.5.37"``. ``ptx`` is
    empty in a program that came with the package.
    """

    arch: str
    compiler: str
    cubin: bytes = field(repr=False)
    ptx: str = field(repr=False)
    log: str = field(repr=False)
    kernels: Mapping[str, Kernel]


def kernels_of(symbols: Mapping[str, str], log: str) -> dict[str, Kernel]:
    """The kernels with these lowered names, by name expression, with the resources that the log tells.

    Raises ``KeyError`` with the name expression of what the log does not know as a kernel.
    """
    resources = parse_resources(log)
    for name, symbol in symbols.items():
        if symbol not in resources:
            raise KeyError(name)
    return {name: Kernel(name, symbol, resources[symbol]) for name, symbol in symbols.items()}
