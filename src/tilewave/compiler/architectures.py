"""Which architecture to compile for, given a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tilewave.compiler.records import Program
from tilewave.compiler.toolchain import compiler_version, supported_architectures
from tilewave.errors import ToolchainError

# What every NVRTC 13 compiles for. For these the compiler need not be loaded to be asked.
_KNOWN_TO_ALL = frozenset(
    {(7, 5), (8, 0), (8, 6), (8, 7), (8, 8), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)}
)


@dataclass(frozen=True)
class ArchChoice:
    """What to compile for a GPU, and what of the result to load.

    ``image`` is ``"cubin"`` where machine code for ``arch`` runs on the GPU as it is, ``"ptx"`` where the
    driver has to translate. ``note`` says why ``arch`` is not the GPU's own, or is empty.
    """

    arch: str
    image: Literal["cubin", "ptx"]
    note: str = ""

    def image_of(self, program: Program) -> bytes:
        """What of a program, compiled for ``arch``, to hand to the driver's ``cuModuleLoadData``."""
        return program.cubin if self.image == "cubin" else program.ptx.encode() + b"\0"


def choose_arch(
    compute_capability: tuple[int, int], driver_cuda_version: tuple[int, int] | None = None
) -> ArchChoice:
    """The architecture to compile for so that a GPU of this compute capability can run the result.

    Machine code runs within its major version from its minor version on; beyond that only PTX does, which the
    driver translates if it is no older than the compiler: ``driver_cuda_version``, such as (13, 0), is
    checked then. Raises ``ToolchainError`` when nothing that this compiler makes can run there.
    """
    if compute_capability in _KNOWN_TO_ALL:
        return ArchChoice(_arch(compute_capability), "cubin")
    supported = supported_architectures()
    if compute_capability in supported:
        return ArchChoice(_arch(compute_capability), "cubin")
    capability = "{}.{}".format(*compute_capability)
    older = [candidate for candidate in supported if candidate < compute_capability]
    if not older:
        raise ToolchainError(
            f"the GPU has compute capability {capability}; {compiler_version()} compiles for "
            "{}.{} and newer only".format(*supported[0])
        )
    best = max(older)
    reason = f"{compiler_version()} does not know compute capability {capability}"
    if best[0] == compute_capability[0]:
        return ArchChoice(_arch(best), "cubin", f"{reason}; machine code for {_arch(best)} runs there too")
    compiler_cuda = tuple(int(part) for part in compiler_version().split()[1].split(".")[:2])
    if driver_cuda_version is not None and driver_cuda_version < compiler_cuda:
        raise ToolchainError(
            f"{reason}, so the driver would have to translate its PTX, but the driver supports CUDA "
            "{}.{} and refuses PTX of CUDA {}.{}: ".format(*driver_cuda_version, *compiler_cuda)
            + "install a newer driver, or a newer nvidia-cuda-nvrtc that knows this GPU"
        )
    return ArchChoice(_arch(best), "ptx", f"{reason}; the driver translates PTX for {_arch(best)}")


def _arch(compute_capability: tuple[int, int]) -> str:
    return "sm_{}{}".format(*compute_capability)
