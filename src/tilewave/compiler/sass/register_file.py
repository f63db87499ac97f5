"""How many issue slots the FFMAs of a straight piece of code take: a model of the register file.

The rules were measured on one H200 with hand-patched FFMA sequences (docs/register-file.md has the readings):

* two banks, by the parity of the register's number; each serves one read (of a warp) a cycle;
* a read may lag its instruction by about two cycles;
* every operand slot keeps one register of each bank in its reuse cache, until another register of that bank
  is read in that slot; an instruction whose yield bit is 0 keeps none.

The model looks at one warp and is blind to the latency of memory, to barriers and to what other instructions
read: it says what the register file allows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from tilewave.emulator.sass import Instruction
from tilewave.emulator.sass.operands import Register

BANKS = 2
LAG = 2
"""Cycles by which a register read may lag its instruction."""


@dataclass(frozen=True)
class RegisterFileScore:
    """What the model says of a piece of code.

    `cycles` of issue for its `multiply_adds` and `others`; `reads` tells how many FFMAs need 0, 1, 2 or 3
    reads of the register file.
    """

    multiply_adds: int
    others: int
    cycles: int
    reads: tuple[int, int, int, int]

    @property
    def utilisation(self) -> float:
        """Share of the issue slots that are FFMAs."""
        return self.multiply_adds / self.cycles if self.cycles else 0.0

    @property
    def cycles_per_multiply_add(self) -> float:
        """Issue slots for each FFMA, the other instructions' included."""
        return self.cycles / self.multiply_adds if self.multiply_adds else 0.0

    @property
    def bound(self) -> float:
        """The utilisation if no FFMA ever waited for the register file."""
        return self.multiply_adds / max(1, self.multiply_adds + self.others)

    def __str__(self) -> str:
        return (
            f"{self.multiply_adds} FFMA and {self.others} others in {self.cycles} issue slots: "
            f"{self.utilisation:.3f} FFMA a slot (at best {self.bound:.3f}), "
            f"register reads {self.reads[1]}x1 {self.reads[2]}x2 {self.reads[3]}x3"
        )


def score(code: Iterable[Instruction]) -> RegisterFileScore:
    """Predict the issue slots that a straight piece of code takes one warp after the register file."""
    cache: dict[tuple[int, int], int] = {}
    free = [0] * BANKS  # the first cycle in which a bank has nothing to do
    cycle = others = multiply_adds = 0
    reads: Counter[int] = Counter()
    for one in code:
        if one.opcode != "FFMA":
            others += 1
            cycle += 1
            continue
        multiply_adds += 1
        needed = [0] * BANKS
        for operand in one.operands[1:]:
            if not isinstance(operand, Register) or operand.uniform or operand.is_zero:
                continue
            assert operand.slot is not None
            bank = operand.index % BANKS
            key = (operand.slot, bank)
            if cache.get(key) != operand.index:
                needed[bank] += 1
            if operand.reuse:
                cache[key] = operand.index
            else:
                cache.pop(key, None)
        reads[sum(needed)] += 1
        limit = max(LAG, *needed)
        while any(
            count and max(free[bank], cycle) + count > cycle + limit for bank, count in enumerate(needed)
        ):
            cycle += 1
        for bank, count in enumerate(needed):
            if count:
                free[bank] = max(free[bank], cycle) + count
        cycle += 1
    return RegisterFileScore(multiply_adds, others, cycle, (reads[0], reads[1], reads[2], reads[3]))
