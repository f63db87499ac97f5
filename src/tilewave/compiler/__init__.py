"""NVRTC, the program cache, resource figures and occupancy; nothing here needs a GPU or a driver."""

from tilewave.compiler.occupancy import Occupancy, occupancy
from tilewave.compiler.program import ARCHITECTURES, DEFAULT_OPTIONS, Kernel, Program, compile_source
from tilewave.compiler.resources import Resources
from tilewave.compiler.source import Source
from tilewave.compiler.toolchain import compiler_version

__all__ = [
    "ARCHITECTURES",
    "DEFAULT_OPTIONS",
    "Kernel",
    "Occupancy",
    "Program",
    "Resources",
    "Source",
    "compile_source",
    "compiler_version",
    "occupancy",
]
