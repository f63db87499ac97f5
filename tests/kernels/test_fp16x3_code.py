"""The machine code of the fp16x3 kernels: nothing spills, and multiplications stand in one stream."""

from __future__ import annotations

import re
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from tilewave.compiler import Program
from tilewave.kernels import fp16x3
from tilewave.kernels.build import compile_instance
from tilewave.kernels.instances import Instance

OPCODE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
WAITING = re.compile(
    r"WARPGROUP|DEPBAR|BAR|BRA|CALL|SYNCS|LD[GLS]|ST[GLS]|F(ADD|MUL|FMA)|MEMBAR|ERRBAR|CCTL|HGMMA"
)
"""What must not stand among them: what waits, moves data, or works on sums. Making descriptors may."""


def opcodes(program: Program, symbol: str, directory: Path) -> list[tuple[str, str]]:
    """Opcodes and operands of a kernel, in order."""
    try:
        wheel = metadata.distribution("nvidia-cuda-nvdisasm")
    except metadata.PackageNotFoundError:
        pytest.skip("the nvdisasm wheel is not installed")
    tool = next(wheel.locate_file(item) for item in wheel.files or () if item.name.startswith("nvdisasm"))
    cubin = directory / "kernel.cubin"
    cubin.write_bytes(program.cubin)
    listing = subprocess.run([str(tool), "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    _, marker, rest = listing.partition(f".text.{symbol}:")
    assert marker
    return OPCODE.findall(re.split(r"\n\s*\.section", rest)[0])


@pytest.mark.parametrize("instance", fp16x3.every_fp16x3_instance(), ids=str)
def test_nothing_spills_and_the_compiler_has_no_complaint(instance: Instance) -> None:
    program, kernel = compile_instance(instance, fp16x3.ARCHITECTURE)
    assert kernel.resources.spill_store_bytes == kernel.resources.spill_load_bytes == 0
    assert kernel.resources.stack_bytes == 0
    assert kernel.resources.registers <= 65536 // instance.threads // 8 * 8
    # What ptxas says where it waits after every wgmma, or where setmaxnreg is of no use.
    assert not re.search(r"warning|serializ|C75\d\d|setmaxnreg", program.log, re.IGNORECASE), program.log


@pytest.mark.parametrize("instance", fp16x3.MAIN_INSTANCES, ids=str)
def test_multiplications_stand_in_one_stream(instance: Instance, tmp_path: Path) -> None:
    program, kernel = compile_instance(instance, fp16x3.ARCHITECTURE)
    code = opcodes(program, kernel.symbol, tmp_path)
    halves = instance.bm // 128
    each = 3 * fp16x3.interval_of(instance) // 16
    # Two blocks of K are unrolled where they make an interval, and one where it holds several.
    streams = max(halves, fp16x3.BLOCK_K // fp16x3.interval_of(instance))
    places = [i for i, (name, _) in enumerate(code) if name.startswith("HGMMA")]
    assert len(places) == streams * each
    for stream in range(streams):
        group = places[stream * each : (stream + 1) * each]
        assert {code[i][0] for i in group} == {"HGMMA.64x128x16.F32"}
        # The first overwrites, and only the last one is waited for.
        assert ["!UPT" in code[i][1] for i in group] == [True] + [False] * (each - 1)
        assert ["gsb0" in code[i][1] for i in group] == [False] * (each - 1) + [True]
        between = [code[i][0] for i in range(group[0], group[-1]) if i not in group]
        assert not [name for name in between if WAITING.match(name)]
        # Then sums are promoted, and nothing moves them from one register to another.
        end = places[places.index(group[-1]) + 1] if stream + 1 < streams else group[-1] + 100
        after = [code[i][0] for i in range(group[-1] + 1, end)]
        assert after.count("FADD") >= 64
        assert sum(name.startswith("MOV") for name in after) < 8
    registers = [operands.split()[-1] for name, operands in code if name.startswith("USETMAXREG")]
    assert [int(value, 16) for value in registers if value.startswith("0x")] == [232, 40]
