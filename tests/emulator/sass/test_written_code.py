"""Machine code that no compiler wrote: every encoding is one that a compiler gives, and nvdisasm reads it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from sass_helpers import disassemble, normalised, nvdisasm, rung_cubin

from tilewave.compiler.sass.patch import with_words
from tilewave.emulator import Memory
from tilewave.emulator.sass import Control, Cubin, Instruction, decode, decode_function, run_blocks
from tilewave.errors import EmulationError
from tilewave.lab.register_file import SEQUENCES, FmaSequence, kernel_of, multiply_add, pairs

needs_nvdisasm = pytest.mark.skipif(nvdisasm() is None, reason="the nvidia-cuda-nvdisasm wheel is missing")
_CONTROL = ((1 << 21) - 1) << 105


def without_registers(one: Instruction) -> int:
    """The encoding but for control bits, registers and the offset of an address."""
    word = one.word & ~_CONTROL & ~(0xFF << 16 | 0xFF << 24)
    return word & ~(0xFF << 32 | 0xFF << 64) if one.opcode == "FFMA" else word & ~(0xFFFFFF << 40)


@needs_nvdisasm
@pytest.mark.sampled(4)
@pytest.mark.parametrize("sequence", SEQUENCES, ids=lambda sequence: sequence.name)
def test_the_probe_s_kernels_are_such_as_a_compiler_writes(sequence: FmaSequence, tmp_path: Path) -> None:
    """Registers within the declared count, encodings bit for bit, and the text that nvdisasm prints."""
    compiled = [
        one
        for number in (5, 9)
        for function in rung_cubin(number, "sm_90a").functions.values()
        for one in decode_function(function, 90)
    ]
    known = {without_registers(one) for one in compiled if one.opcode in ("FFMA", "LDS")}
    cubin = kernel_of(sequence.make(), "sm_90")
    function = cubin.function("carrier")
    lines = disassemble(cubin.image, tmp_path / "probe.cubin")["carrier"]
    code = decode_function(function, cubin.sm)
    assert [line.text for line in lines] == [normalised(one.text) for one in code]
    for one in code:
        assert one.fault(function.registers) is None, one.text
        if one.opcode == "FFMA" or (one.opcode == "LDS" and one.has("128")):
            assert without_registers(one) in known, one.text


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_compiler_writes_nothing_that_is_refused(arch: str) -> None:
    for number in (5, 9, 12):
        for function in rung_cubin(number, arch).functions.values():
            for one in decode_function(function, 90):
                assert one.fault(function.registers) is None, one.text


@needs_nvdisasm
def test_control_bits_that_no_compiler_gives(tmp_path: Path) -> None:
    """Refused is what nvdisasm refuses, and reuse flags that it does not take for any."""
    base = multiply_add(126, 192, 65).word
    controls = [Control(stall, y, reuse=reuse) for reuse in range(8) for y in (0, 1) for stall in range(16)]
    words = [control.into_word(base) for control in controls]
    path = tmp_path / "code.bin"
    path.write_bytes(b"".join(word.to_bytes(16, "little") for word in words))
    tool = nvdisasm()
    assert tool is not None
    found = subprocess.run([tool, "-b", "SM90", path], capture_output=True, text=True, check=False)
    addresses = re.findall(r"undefined value .* at address (0x\w+)", found.stderr)
    undefined = {int(address, 16) // 16 for address in addresses}
    assert len(undefined) > 40
    assert all(controls[i].fault for i in undefined)
    taken = [i for i in range(len(words)) if i not in undefined]
    path.write_bytes(b"".join(words[i].to_bytes(16, "little") for i in taken))
    listing = subprocess.run([tool, "-b", "SM90", path], capture_output=True, text=True, check=True).stdout
    texts = re.findall(r"\*/\s+(FFMA .*?)\s*;", listing)
    for i, text in zip(taken, texts, strict=True):
        assert normalised(decode(words[i]).text) == normalised(text)
        flags_shown = text.count(".reuse") == controls[i].reuse.bit_count()
        assert (controls[i].fault is None) == flags_shown, (controls[i], text)


def with_first_multiply_add(cubin: Cubin, one: Instruction, **control: int) -> Cubin:
    code = decode_function(cubin.function("carrier"), cubin.sm)
    at = next(i for i, other in enumerate(code) if other.opcode == "FFMA")
    return with_words(cubin, "carrier", at, [one.with_control(**control)], 0)


def test_what_a_gpu_may_stop_at_is_not_run(rng: np.random.Generator) -> None:
    cubin = kernel_of(pairs(1), "sm_90")
    count = cubin.function("carrier").registers
    beyond = int(rng.integers(count, 255))
    faulty = {
        f"uses R{beyond}, but a thread has {count} registers": with_first_multiply_add(
            cubin, multiply_add(100, beyond, 101)
        ),
        "has reuse flags beside a yield bit of 0": with_first_multiply_add(
            cubin, multiply_add(100, 101, 102), reuse=int(rng.integers(1, 8)), yield_bit=0
        ),
        "stalls for 12 beside a yield bit of 1": with_first_multiply_add(
            cubin, multiply_add(100, 101, 102), stall=12
        ),
        "stalls for 0 beside a yield bit of 1": with_first_multiply_add(
            cubin, multiply_add(100, 101, 102), stall=0
        ),
    }
    for words, wrong in faulty.items():
        memory = Memory()
        args = [memory.empty((64,), np.int64, name="cycles"), memory.empty((32,), np.float32, name="out"), 1]
        with pytest.raises(EmulationError, match=words):
            run_blocks(wrong, "carrier", grid=(1, 1, 1), block=(32, 1, 1), args=args, memory=memory)
