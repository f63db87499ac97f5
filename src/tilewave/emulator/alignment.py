"""How many low bits of each register are known to be zero: the alignment of addresses, as a compiler proves it."""

from __future__ import annotations

from tilewave.emulator.flow import written
from tilewave.emulator.layout import Layout
from tilewave.emulator.ptx import Immediate, Instruction, Operand, Register, Symbol

_ALL = 64


class KnownZeros:
    """Trailing zero bits that a register has whatever path led to it, from all its definitions together."""

    def __init__(self, code: list[Instruction], layout: Layout) -> None:
        self._layout = layout
        self._zeros: dict[Register, int] = {}
        definitions = [(register, i) for i in code for register in written(i)]
        # Start from "all bits" and lower it until nothing changes, so that a loop's own increments can meet.
        self._zeros = {register: _ALL for register, _ in definitions}
        changed = True
        while changed:
            changed = False
            for register, instruction in definitions:
                zeros = min(self._zeros[register], self._result(instruction))
                if zeros < self._zeros[register]:
                    self._zeros[register] = zeros
                    changed = True

    def of(self, operand: Operand | None) -> int:
        """Known trailing zeros of an operand; a register that is never written has none."""
        if isinstance(operand, Register):
            return self._zeros.get(operand, 0)
        if isinstance(operand, Immediate):
            return trailing_zeros(operand.value)
        if isinstance(operand, Symbol):
            address = self._layout.address(operand.name)
            return 0 if address is None else trailing_zeros(address)
        return 0

    def _result(self, instruction: Instruction) -> int:
        opcode, sources = instruction.opcode, instruction.operands[1:]
        if instruction.modifiers and instruction.modifiers[-1] in ("f32", "f64", "pred"):
            return 0
        if opcode in ("mov", "cvt", "cvta", "neg") and len(sources) == 1:
            return self.of(sources[0])
        if opcode in ("add", "sub", "or", "xor", "min", "max") and len(sources) == 2:
            return min(map(self.of, sources))
        if opcode == "and":
            return max(map(self.of, sources))
        if opcode == "mul" and "hi" not in instruction.modifiers:
            return min(_ALL, self.of(sources[0]) + self.of(sources[1]))
        if opcode == "mad" and "hi" not in instruction.modifiers:
            return min(self.of(sources[0]) + self.of(sources[1]), self.of(sources[2]))
        if opcode == "selp":
            return min(self.of(sources[0]), self.of(sources[1]))
        if opcode in ("shl", "shr"):
            amount = sources[1].value if isinstance(sources[1], Immediate) else 0
            if opcode == "shl":
                return min(_ALL, self.of(sources[0]) + amount)
            if isinstance(sources[1], Immediate):
                return max(0, self.of(sources[0]) - amount)
        return 0


def trailing_zeros(value: int) -> int:
    """Zero bits at the end of an integer's binary form; 64 for 0."""
    return (value & -value).bit_length() - 1 if value else _ALL
