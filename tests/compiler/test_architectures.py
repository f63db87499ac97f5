"""Which architecture is compiled for a GPU: its own, an older one that runs there, PTX, or a refusal."""

from __future__ import annotations

import re

import pytest
from compiler_kernels import COPY

from tilewave.compiler import (
    ARCHITECTURES,
    Source,
    architectures,
    choose_arch,
    compile_source,
    compiler_version,
)
from tilewave.compiler.toolchain import supported_architectures
from tilewave.device import get_spec, spec_names
from tilewave.errors import ToolchainError

# What NVRTC 13.0.88 answers; later ones only add to it.
KNOWN = ((7, 5), (8, 0), (8, 6), (8, 7), (8, 8), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1))


@pytest.fixture
def compiler_13_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architectures, "supported_architectures", lambda: KNOWN)
    monkeypatch.setattr(architectures, "compiler_version", lambda: "NVRTC 13.0.88")


def test_what_this_compiler_knows() -> None:
    supported = supported_architectures()
    assert set(KNOWN) <= set(supported)
    assert supported == tuple(sorted(supported))
    assert {"sm_{}{}".format(*capability) for capability in supported} >= {
        arch.rstrip("a") for arch in ARCHITECTURES
    }


@pytest.mark.parametrize("name", spec_names())
def test_a_known_gpu_gets_its_own_machine_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And without loading the compiler, which a warm start can do without."""
    monkeypatch.setattr(architectures, "supported_architectures", None)
    spec = get_spec(name)
    choice = choose_arch(spec.compute_capability)
    assert (choice.arch, choice.image, choice.note) == (spec.arch, "cubin", "")


@pytest.mark.usefixtures("compiler_13_0")
@pytest.mark.parametrize(
    ("capability", "arch", "image"),
    [
        ((8, 5), "sm_80", "cubin"),
        ((9, 5), "sm_90", "cubin"),
        ((10, 1), "sm_100", "cubin"),
        ((10, 7), "sm_103", "cubin"),
        ((12, 9), "sm_121", "cubin"),
        ((13, 0), "sm_121", "ptx"),
        ((20, 3), "sm_121", "ptx"),
    ],
)
def test_h085_a_compute_capability_that_the_compiler_does_not_know(
    capability: tuple[int, int], arch: str, image: str
) -> None:
    """Handed case H085 (cupy/cupy#1048): beyond the compiler's maximum, and in between."""
    choice = choose_arch(capability)
    assert (choice.arch, choice.image) == (arch, image)
    assert "NVRTC 13.0.88 does not know compute capability {}.{}".format(*capability) in choice.note
    assert arch in choice.note


@pytest.mark.usefixtures("compiler_13_0")
def test_h085_otherwise_a_clear_error() -> None:
    """Handed case H085: nothing that this compiler makes runs on an older GPU than it knows."""
    with pytest.raises(ToolchainError, match=r"compute capability 7\.0; NVRTC 13\.0\.88.* 7\.5 and newer"):
        choose_arch((7, 0))


@pytest.mark.usefixtures("compiler_13_0")
def test_h084_native_code_needs_no_newer_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handed case H084 (NVIDIA/numba-cuda#163): an older driver refuses PTX of a newer compiler.

    A GPU that the compiler knows, or whose major version it knows, gets machine code, whatever the versions.
    """
    monkeypatch.setattr(architectures, "compiler_version", lambda: "NVRTC 13.5.37")
    assert choose_arch((9, 0), (13, 0)).image == "cubin"
    assert choose_arch((12, 5), (13, 0)).image == "cubin"


@pytest.mark.usefixtures("compiler_13_0")
def test_h084_ptx_that_the_driver_would_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handed case H084: where only PTX is left, the message names both versions."""
    assert choose_arch((13, 0), (13, 0)).image == "ptx"
    assert choose_arch((13, 0), (13, 7)).image == "ptx"
    monkeypatch.setattr(architectures, "compiler_version", lambda: "NVRTC 13.5.37")
    with pytest.raises(ToolchainError, match=r"supports CUDA 13\.0 and refuses PTX of CUDA 13\.5"):
        choose_arch((13, 0), (13, 0))


def test_what_to_load_of_a_program() -> None:
    program = compile_source(Source.from_text("copy.cu", COPY), ["copy"], "sm_90")
    assert choose_arch((9, 0)).image_of(program) == program.cubin
    image = choose_arch((99, 0)).image_of(program)
    assert image.endswith(b"\0")
    assert image[:-1].decode() == program.ptx


def test_the_real_compiler_on_a_gpu_of_the_future() -> None:
    choice = choose_arch((99, 0))
    newest = max(supported_architectures())
    assert (choice.arch, choice.image) == ("sm_{}{}".format(*newest), "ptx")
    assert re.search(re.escape(compiler_version()), choice.note)
