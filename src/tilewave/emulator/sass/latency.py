"""When the result of an instruction may be read: fixed latencies, and which results need a scoreboard.

An instruction whose control bits name a write scoreboard has a variable latency: its result may be read after
a wait for that scoreboard. All others have a fixed latency, and the compiler keeps the distance with stall
counts. NVIDIA publishes no figures. Those below are the smallest issue distances, in cycles, that ptxas
leaves between producer and consumer in all rungs of the lab and the kernels of this module's tests, compiled
by NVRTC 13.0.88 and 13.5.37 for sm_80 and sm_90a; `shortest_distances` measures them, and a test holds the
table against every rung. So they are what the compiler relies on, and an upper bound of what the hardware
needs.

| result | read by | cycles |
|---|---|---|
| register, FMA pipe or ALU | the same pipe; MUFU, conversions, RET | 4 |
| register, FMA pipe or ALU | the other pipe, memory, anything else | 5 |
| register, HFMA2.MMA (used to load constants) | anything | 10 |
| low half of IMAD.WIDE; high half of its third source | | 2 less than that |
| predicate | operand of an ALU or FMA instruction | 4 |
| predicate | guard; operand of a branch, barrier, vote or memory access | 12 |
| uniform register | uniform instruction / anything else | 4 / 6 |
| uniform register from ULDC, UMOV, VOTEU | anything | 2 |
| uniform predicate | uniform instruction / anything else | 4 / 6 |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tilewave.emulator.sass.instruction import NO_SCOREBOARD, Cell, Instruction
from tilewave.emulator.sass.operands import Register

FMA, ALU, CONVERT, UNIFORM, OTHER = "fma", "alu", "convert", "uniform", "other"
"""Pipes, as far as latencies tell them apart."""

_PIPE_MEMBERS = {
    FMA: "FFMA FADD FMUL IMAD IMAD.WIDE IMAD.HI VIADD HFMA2 HFMA2.MMA",
    ALU: (
        "IADD3 LEA LOP3.LUT SHF ISETP MOV SEL IABS IMNMX VIMNMX VIADDMNMX PRMT FMNMX FSEL FSETP PLOP3.LUT "
        "P2R R2P I2FP CS2R VOTE"
    ),
    CONVERT: "MUFU I2F F2I FRND POPC FLO BREV FCHK",
    UNIFORM: ("UIADD3 UIMAD UIMAD.WIDE UISETP ULEA ULOP3.LUT USHF UPRMT USEL UMOV ULDC UPOPC UFLO VOTEU"),
}
_PIPES = {name: pipe for pipe, names in _PIPE_MEMBERS.items() for name in names.split()}

VARIABLE_LATENCY = frozenset(
    [
        "LDG",
        "LDS",
        "LDL",
        "LDC",
        "ATOMG",
        "ATOMS",
        "S2R",
        "S2UR",
        "MUFU",
        "I2F",
        "F2I",
        "FRND",
        "POPC",
        "FLO",
        "BREV",
        "FCHK",
        "SHFL",
        "R2UR",
        "B2R",
    ]
)
"""Instructions whose result needs a scoreboard; without one it is never known to be there."""

_IN_ORDER_RESULTS = {
    "LDS": "shared",
    "LDC": "constant",
    "S2R": "special",
    "S2UR": "special uniform",
    **dict.fromkeys(["MUFU", "I2F", "F2I", "FRND", "POPC", "FLO", "BREV"], "convert"),
}
_IN_ORDER_READS = {
    **dict.fromkeys(["LDG", "STG", "LDS", "STS", "LDL", "STL", "LDGSTS", "ATOMG", "REDG", "ATOMS"], "memory"),
    **dict.fromkeys(["MUFU", "I2F", "F2I", "FRND", "POPC", "FLO", "BREV"], "convert"),
}


def result_order(opcode: str) -> str | None:
    """The queue in which an instruction's result arrives in order of issue, if there is one.

    ptxas gives a scoreboard to the last of several such instructions only.
    """
    return _IN_ORDER_RESULTS.get(opcode)


def read_order(opcode: str) -> str | None:
    """The queue in which an instruction's sources are read in order of issue, if there is one."""
    return _IN_ORDER_READS.get(opcode)


_EARLY_UNIFORM = frozenset({"ULDC", "UMOV", "VOTEU"})
_SAME_PIPE, _OTHER_PIPE, _TENSOR = 4, 5, 10
_PREDICATE_OPERAND, _PREDICATE_CONTROL = 4, 12
_UNIFORM_NEAR, _UNIFORM_FAR, _UNIFORM_EARLY = 4, 6, 2
_WIDE_HALF = 2
LONGEST = max(_TENSOR, _PREDICATE_CONTROL)
"""No fixed latency is longer, in cycles."""


def pipe_of(opcode: str) -> str:
    """The pipe that executes an opcode."""
    return _PIPES.get(opcode, OTHER)


def needs_scoreboard(instruction: Instruction) -> bool:
    """Whether the instruction's results have a variable latency."""
    return instruction.control.write_barrier != NO_SCOREBOARD or instruction.opcode in VARIABLE_LATENCY


def latency(producer: Instruction, cell: Cell, consumer: Instruction) -> int:
    """Cycles from the issue of `producer` to the earliest issue of a `consumer` that reads `cell` right."""
    kind, index = cell
    source, sink = pipe_of(producer.opcode), pipe_of(consumer.opcode)
    if kind in ("UR", "UP"):
        if producer.opcode in _EARLY_UNIFORM:
            return _UNIFORM_EARLY
        return _UNIFORM_NEAR if sink == UNIFORM else _UNIFORM_FAR
    if kind == "P":
        is_guard = not consumer.guard.uniform and consumer.guard.index == index
        return _PREDICATE_CONTROL if is_guard or sink not in (FMA, ALU) else _PREDICATE_OPERAND
    cycles = _SAME_PIPE if source == sink or sink == CONVERT or consumer.opcode == "RET.REL" else _OTHER_PIPE
    if producer.opcode == "HFMA2.MMA":
        cycles = _TENSOR
    if producer.opcode == "IMAD.WIDE" and _is_half(producer.operands[0], index, high=False):
        cycles -= _WIDE_HALF
    if consumer.opcode == "IMAD.WIDE" and _only_high_addend(consumer, index):
        cycles -= _WIDE_HALF
    return cycles


def _is_half(operand: object, index: int, *, high: bool) -> bool:
    return isinstance(operand, Register) and not operand.uniform and operand.index + int(high) == index


def _only_high_addend(wide: Instruction, index: int) -> bool:
    """Whether the register is read as the upper half of the 64-bit addend and as nothing else."""
    registers = [
        operand
        for i, operand in enumerate(wide.operands)
        if i not in wide.destinations and isinstance(operand, Register) and not operand.uniform
    ]
    *factors, addend = registers
    return (
        addend.count == 2
        and _is_half(addend, index, high=True)
        and all(factor.index != index for factor in factors)
    )


def shortest_distances(code: Sequence[Instruction]) -> dict[tuple[str, str, str, int], int]:
    """The smallest number of cycles between a fixed-latency producer and its consumer in a kernel.

    The key is (producer's opcode, kind of cell, consumer's opcode, latency that the table gives).
    Straight-line stretches only; pairs with a wait for a scoreboard in between are left out, as it takes
    unknown time.
    """
    found: dict[tuple[str, str, str, int], int] = {}
    for stretch in _stretches(code):
        written: dict[Cell, tuple[Instruction, int]] = {}
        now = last_wait = 0
        for instruction in stretch:
            if instruction.control.wait_mask:
                last_wait = now
            for cell in instruction.reads:
                producer, issued = written.get(cell, (None, 0))
                if producer is None or (last_wait > issued) or instruction.control.wait_mask:
                    continue
                key = (
                    producer.opcode,
                    cell[0],
                    instruction.opcode,
                    latency(producer, cell, instruction),
                )
                found[key] = min(found.get(key, now - issued), now - issued)
            for cell in instruction.writes:
                written.pop(cell, None)
                if not needs_scoreboard(instruction):
                    written[cell] = (instruction, now)
            now += instruction.control.stall
    return found


def _stretches(code: Sequence[Instruction]) -> Iterable[list[Instruction]]:
    """The code, cut where execution cannot fall through."""
    current: list[Instruction] = []
    for instruction in code:
        current.append(instruction)
        if instruction.opcode in ("BRA", "EXIT", "RET.REL") and instruction.guard.is_true:
            yield current
            current = []
    yield current
