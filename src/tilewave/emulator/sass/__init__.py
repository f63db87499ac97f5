"""Runs a kernel's machine code on the CPU: cubin reader, decoder, and an interpreter that minds the hazards.

The PTX emulator executes what the compiler was given; this executes what ptxas made of it, for one thread
block, and checks on the way that the control bits keep every latency. Known are the architectures sm_80 to
sm_90a.
"""

from tilewave.emulator.sass.decode import decode, decode_function
from tilewave.emulator.sass.elf import Cubin, Function
from tilewave.emulator.sass.execution import BlockResult
from tilewave.emulator.sass.hazards import Hazard
from tilewave.emulator.sass.instruction import Control, Instruction
from tilewave.emulator.sass.interpret import run_block, run_blocks

__all__ = [
    "BlockResult",
    "Control",
    "Cubin",
    "Function",
    "Hazard",
    "Instruction",
    "decode",
    "decode_function",
    "run_block",
    "run_blocks",
]
