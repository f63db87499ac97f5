"""NVRTC, the program cache, resource figures and occupancy; nothing here needs a GPU or a driver."""

from tilewave.compiler.architectures import ArchChoice, choose_arch
from tilewave.compiler.cache import CacheWarning, cache_directory
from tilewave.compiler.occupancy import Occupancy, occupancy
from tilewave.compiler.program import ARCHITECTURES, DEFAULT_OPTIONS, compile_source
from tilewave.compiler.records import Kernel, Program
from tilewave.compiler.resources import Resources
from tilewave.compiler.source import Source
from tilewave.compiler.toolchain import compiler_version

__all__ = [
    "ARCHITECTURES",
    "DEFAULT_OPTIONS",
    "ArchChoice",
    "CacheWarning",
    "Kernel",
    "Occupancy",
    "Program",
    "Resources",
    "Source",
    "cache_directory",
    "choose_arch",
    "compile_source",
    "compiler_version",
    "occupancy",
]
