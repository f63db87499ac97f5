"""The cubin reader against the compiler's own resource figures, and on damaged files."""

from __future__ import annotations

import numpy as np
import pytest
from sass_helpers import instruction_program, rung_program

from tilewave.emulator.sass import Cubin
from tilewave.errors import EmulationError
from tilewave.lab.registry import load_rungs


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_kernels_have_the_resources_that_the_compiler_reports(arch: str) -> None:
    for rung in load_rungs():
        program = rung_program(rung.number, arch)
        cubin = Cubin(program.cubin)
        assert cubin.sm == int(arch.removeprefix("sm_").removesuffix("a"))
        reserved = 1024 if cubin.sm >= 90 else 0
        assert set(cubin.functions) == {kernel.symbol for kernel in program.kernels.values()}
        for kernel in program.kernels.values():
            function = cubin.function(kernel.symbol)
            resources = kernel.resources
            assert function.registers == resources.registers
            assert function.shared_bytes == resources.static_shared_bytes + reserved
            assert function.local_bytes >= resources.stack_bytes
            assert [p.size for p in function.parameters][:6] == [8, 8, 8, 4, 4, 4]
            assert [p.offset for p in function.parameters][:6] == [0, 8, 16, 24, 28, 32]
            assert function.parameter_base == (0x210 if cubin.sm >= 90 else 0x160)
            assert len(function.words()) * 16 == len(function.code)


def test_code_can_be_replaced_by_code_of_the_same_length(rng: np.random.Generator) -> None:
    cubin = Cubin(instruction_program("sm_90a").cubin)
    function = cubin.function("floats")
    code = rng.bytes(len(function.code))
    changed = cubin.with_code("floats", code)
    assert changed.function("floats").code == code
    assert changed.function("integers").code == cubin.function("integers").code
    assert cubin.function("floats").code == function.code
    with pytest.raises(EmulationError, match=f"has {len(code)} bytes of code; given were 16"):
        cubin.with_code("floats", code[:16])


def test_an_unknown_kernel_is_answered_with_those_that_exist() -> None:
    with pytest.raises(EmulationError, match=r"no kernel 'nothing'; it holds: copies, diverging"):
        Cubin(instruction_program("sm_90a").cubin).function("nothing")


@pytest.mark.parametrize("image", [b"", b"\x7fELF", b"x" * 200])
def test_what_is_no_elf_file_is_refused(image: bytes) -> None:
    with pytest.raises(EmulationError, match="no cubin"):
        Cubin(image)


def test_another_machines_elf_file_is_refused() -> None:
    image = bytearray(instruction_program("sm_90a").cubin)
    image[18:20] = (62).to_bytes(2, "little")
    with pytest.raises(EmulationError, match=r"machine is 62, not 190 \(CUDA\)"):
        Cubin(bytes(image))


def test_truncated_and_garbled_files_raise_nothing_but_the_projects_error(rng: np.random.Generator) -> None:
    image = instruction_program("sm_90a").cubin
    for _ in range(200):
        damaged = bytearray(image)
        if rng.random() < 0.5:
            damaged = damaged[: int(rng.integers(0, len(image)))]
        else:
            for position in rng.integers(0, len(image), 40):
                damaged[position] = int(rng.integers(0, 256))
            header = int.from_bytes(image[40:48], "little")
            for position in rng.integers(header, len(image), 40):
                damaged[position] = int(rng.integers(0, 256))
        try:
            Cubin(bytes(damaged))
        except EmulationError:
            continue
