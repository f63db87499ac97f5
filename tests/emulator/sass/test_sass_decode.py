"""The decoder against nvdisasm, instruction by instruction, and re-encoding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from sass_helpers import (
    disassemble,
    instruction_program,
    normalised,
    nvdisasm,
    rung_cubin,
    rung_program,
)

from tilewave.emulator.sass import Control, Cubin, Instruction, decode, decode_function
from tilewave.emulator.sass.operands import Address, Register
from tilewave.errors import EmulationError, UnknownInstructionError
from tilewave.lab.registry import load_rungs

needs_nvdisasm = pytest.mark.skipif(nvdisasm() is None, reason="the nvidia-cuda-nvdisasm wheel is missing")
RUNGS = [rung.number for rung in load_rungs()]
ARCHITECTURES = [
    "sm_80",
    "sm_90a",
    *(pytest.param(arch, marks=pytest.mark.long) for arch in ("sm_86", "sm_89", "sm_90")),
]


def assert_same_listing(image: bytes, path: Path) -> int:
    """Compare every instruction of a cubin with nvdisasm's text; returns how many there are."""
    cubin = Cubin(image)
    listing = disassemble(image, path)
    assert set(listing) == set(cubin.functions)
    total = 0
    for kernel, lines in listing.items():
        decoded = decode_function(cubin.function(kernel), cubin.sm)
        assert [line.address for line in lines] == [i.address for i in decoded]
        for line, instruction in zip(lines, decoded, strict=True):
            assert normalised(instruction.text) == line.text, f"{kernel} {hex(instruction.word)}"
        total += len(lines)
    return total


@needs_nvdisasm
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_instruction_of_some_rungs_reads_as_nvdisasm_says(
    arch: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    check_rungs(rng.permutation(RUNGS)[:5].tolist(), arch, tmp_path)


@pytest.mark.long
@needs_nvdisasm
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_instruction_of_every_rung_reads_as_nvdisasm_says(arch: str, tmp_path: Path) -> None:
    check_rungs(RUNGS, arch, tmp_path)


def check_rungs(numbers: Sequence[int], arch: str, tmp_path: Path) -> None:
    for number in numbers:
        total = assert_same_listing(rung_program(number, arch).cubin, tmp_path / f"{number}.cubin")
        assert total > 100


@needs_nvdisasm
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_every_instruction_of_the_test_kernels_reads_as_nvdisasm_says(arch: str, tmp_path: Path) -> None:
    assert_same_listing(instruction_program(arch).cubin, tmp_path / "instructions.cubin")


def register_positions(instruction: Instruction) -> list[int]:
    """Operands that are registers, or addresses with a base register."""
    return [
        i
        for i, operand in enumerate(instruction.operands)
        if i not in instruction.hidden
        and (
            (isinstance(operand, Register) and not operand.is_zero)
            or (isinstance(operand, Address) and operand.base is not None and not operand.base.is_zero)
        )
    ]


@needs_nvdisasm
def test_replaced_registers_and_control_bits_read_as_nvdisasm_says(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """Every instruction of some kernels with one register, the reuse flags and the stall count redrawn."""
    for number in (6, 12):
        cubin = rung_cubin(number, "sm_90a")
        for kernel, function in cubin.functions.items():
            changed = bytearray()
            for instruction in decode_function(function, cubin.sm):
                word = instruction.word
                if positions := register_positions(instruction):
                    position = int(rng.choice(positions))
                    operand = instruction.operands[position]
                    uniform = isinstance(operand, Register) and operand.uniform
                    # Tuples of four and pairs need an aligned register.
                    index = 4 * int(rng.integers(0, 15 if uniform else 62))
                    word = instruction.with_register(position, index)
                    again = decode(word, instruction.address, cubin.sm)
                    chosen = again.operands[position]
                    base = chosen.base if isinstance(chosen, Address) else chosen
                    assert isinstance(base, Register)
                    assert base.index == index
                    assert again.opcode == instruction.opcode
                control = Control.of_word(word)
                stall = int(rng.integers(12, 16)) if control.yield_bit == 0 else int(rng.integers(1, 12))
                word = decode(word, instruction.address, cubin.sm).with_control(stall=stall)
                assert Control.of_word(word).stall == stall
                changed += word.to_bytes(16, "little")
            image = cubin.with_code(kernel, bytes(changed)).image
            assert_same_listing(image, tmp_path / "changed.cubin")


def test_control_bits_survive_a_round_trip(rng: np.random.Generator) -> None:
    for _ in range(200):
        word = int.from_bytes(rng.bytes(16), "little") & ~(7 << 125)
        control = Control.of_word(word)
        assert control.into_word(word) == word
        other = Control(*(int(rng.integers(0, n)) for n in (16, 2, 8, 8, 64, 16)))
        assert Control.of_word(other.into_word(word)) == other
        untouched = (1 << 105) - 1
        assert other.into_word(word) & untouched == word & untouched


def test_control_bits_out_of_range_are_refused() -> None:
    with pytest.raises(EmulationError, match=r"stall is 16; accepted are 0 to 15"):
        Control(stall=16).into_word(0)


FFMA = 0x000FE20000000037000000201C557223


def test_fields_of_a_known_instruction() -> None:
    ffma = decode(FFMA | 1 << 123, 0x40)
    assert ffma.text == "FFMA R85, R28, R32.reuse, R55"
    assert ffma.reads == (("R", 28), ("R", 32), ("R", 55))
    assert ffma.writes == (("R", 85),)
    assert ffma.control.stall == 1
    assert ffma.control.yield_bit == 1
    assert ffma.control.write_barrier == 7
    assert ffma.control.reuse == 0b10


def test_registers_of_wide_accesses_are_all_named() -> None:
    kernel = rung_cubin(9, "sm_90a")
    found = set()
    for function in kernel.functions.values():
        for instruction in decode_function(function, kernel.sm):
            if instruction.opcode in ("LDS", "LDG", "STS") and instruction.has("128"):
                cells = instruction.reads if instruction.opcode == "STS" else instruction.writes
                data = [index for kind, index in cells if kind == "R"][-4:]
                assert data == list(range(data[0], data[0] + 4))
                found.add(instruction.opcode)
    assert found == {"LDS", "LDG", "STS"}


def test_unknown_opcode_names_address_and_word() -> None:
    word = FFMA & ~0xFFF | 0x7FF
    with pytest.raises(
        UnknownInstructionError, match=r"0x7ff at 0x0120 .* word 0x000fe2000000003700"
    ) as error:
        decode(word, 0x120)
    assert f"{word:#034x}" in str(error.value)


def test_unknown_value_of_a_field_names_the_field() -> None:
    load = next(
        i
        for function in rung_cubin(5, "sm_90a").functions.values()
        for i in decode_function(function, 90)
        if i.opcode == "LDS"
    )
    with pytest.raises(UnknownInstructionError, match="value 7 of the field at bit 73 of LDS"):
        decode(load.word | 7 << 73, load.address)


def test_an_architecture_with_another_encoding_is_refused() -> None:
    with pytest.raises(UnknownInstructionError, match=r"sm_120.*sm_80 to sm_90"):
        decode(FFMA, 0, sm=120)


def test_a_register_that_does_not_exist_is_refused() -> None:
    with pytest.raises(EmulationError, match="register 256 does not exist"):
        decode(FFMA).with_register(0, 256)
    code = decode_function(rung_cubin(3, "sm_90a").functions["sgemm_03_shared_tile"], 90)
    branch = next(i for i in code if i.opcode == "BRA")
    with pytest.raises(EmulationError, match="is no register"):
        branch.with_register(1, 0)
