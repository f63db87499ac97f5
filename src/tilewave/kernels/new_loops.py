"""Which instances run with the loop of the register-file pass, and what may be said before one is loaded."""

from __future__ import annotations

from tilewave.compiler import Program
from tilewave.compiler.records import Kernel
from tilewave.compiler.register_pass import (
    KNOWN_COMPILERS,
    PassOutcome,
    architecture_refusal,
    pass_outcome,
    switched_off,
)
from tilewave.kernels.instances import Instance

_FAMILY = "large_tile"
_WIDTH = 16
"""Bytes of the vectors by which those instances read that an H200 has run with their new loops."""
_NARROW = frozenset(
    f"{_FAMILY}_{tile}_4"
    for tile in ("64x128_nn", "128x64_nn", "128x128_nn", "256x128_nn", "128x128_nt", "128x256_nt")
)
"""Those that read 4 bytes and that an H200 has run with their new loops: they gave the compiler's bits (1025
and 4097 each way, NT 2048 x 1024 x 479)."""


def written_for_the_pass(instance: Instance) -> bool:
    """Whether a kernel's template is of the form that the register-file pass takes."""
    return instance.family == _FAMILY


def instance_refusal(instance: Instance) -> str | None:
    """Why an instance never gets a new loop, or None."""
    if not written_for_the_pass(instance):
        return "the kernel is not written for the register-file pass"
    widths = [access.width for access in (instance.a, instance.b) if access is not None]
    wide = len(widths) == 2 and min(widths) >= _WIDTH
    if not wide and instance.name not in _NARROW:
        return f"only kernels that read {_WIDTH} bytes at once, and a few others, have run so on a GPU"
    return None


def outcome_for(instance: Instance, program: Program, kernel: Kernel) -> PassOutcome:
    """The new loop of an instance's kernel, or why there is none."""
    reason = instance_refusal(instance)
    return PassOutcome(None, reason) if reason is not None else pass_outcome(program, kernel.symbol)


def prospect(instance: Instance, arch: str | None) -> str | None:
    """What the pass will do with an instance on an architecture, before it is loaded; None for other kernels.

    ``arch`` is None where it is not known.
    """
    if not written_for_the_pass(instance):
        return None
    reason = switched_off() or instance_refusal(instance) or (architecture_refusal(arch) if arch else None)
    if reason is not None:
        return f"the compiler's, because {reason}"
    return (
        f"the register-file pass's, if the compiler is {' or '.join(KNOWN_COMPILERS)} and the new loop gives "
        "the compiler's bits on this GPU, which is checked when the kernel is loaded"
    )
