"""How arithmetic and conversions of halves (f16x2, bf16, bf16x2, fma.f16) become NumPy code."""

from __future__ import annotations

from tilewave.emulator import opcodes
from tilewave.emulator.codegen import Emitter
from tilewave.emulator.handlers import Handlers
from tilewave.emulator.ptx import Instruction, Operand

opcode = Handlers()
"""The opcodes of this file: what is not about halves goes on to `opcodes`."""

_KINDS = ("f16x2", "bf16x2", "bf16")


def _bits(e: Emitter, operand: Operand, kind: str) -> str:
    """An operand's bits, one element a lane."""
    return f"x.spread({e.source(operand, 'u4' if kind.endswith('x2') else 'u2')})"


def _store(e: Emitter, operand: Operand, kind: str, halves: str) -> None:
    dtype = "u4" if kind.endswith("x2") else "u2"
    e.assign(e.destination(operand, dtype), f"{halves}.view('{dtype}')")


@opcode("add", "sub", "mul", "fma", "min", "max")
def _arithmetic(e: Emitter, i: Instruction) -> None:
    kind = i.modifiers[-1]
    if kind not in _KINDS and (i.opcode, kind) not in (("fma", "f16"), ("min", "f16"), ("max", "f16")):
        opcodes.opcode[i.opcode](e, i)
        return
    others = set(i.modifiers[:-1])
    if others - {"rn"} or len(i.operands) != (4 if i.opcode == "fma" else 3):
        raise e.unknown()
    sources = ", ".join(_bits(e, operand, kind) for operand in i.operands[1:])
    _store(e, i.operands[0], kind, f"halves.compute({i.opcode!r}, {kind.removesuffix('x2')!r}, [{sources}])")


@opcode("neg", "abs")
def _sign(e: Emitter, i: Instruction) -> None:
    kind = i.modifiers[-1]
    if kind not in _KINDS:
        opcodes.opcode[i.opcode](e, i)
        return
    if len(i.modifiers) != 1:
        raise e.unknown()
    _store(e, i.operands[0], kind, f"halves.change_sign({i.opcode!r}, {_bits(e, i.operands[1], kind)})")


@opcode("cvt")
def _cvt(e: Emitter, i: Instruction) -> None:
    if len(i.modifiers) < 2 or not {"f16x2", "bf16x2", "bf16"} & set(i.modifiers[-2:]):
        opcodes.opcode["cvt"](e, i)
        return
    target, source = i.modifiers[-2:]
    rounded = i.modifiers[:-2] == ("rn",)
    if target in ("f16x2", "bf16x2") and source == "f32" and rounded and len(i.operands) == 3:
        high, low = (f"x.spread({e.source(operand, 'f4')})" for operand in i.operands[1:])
        result = e.destination(i.operands[0], "u4")
        e.assign(result, f"halves.round_pair({high}, {low}, {target.removesuffix('x2')!r})")
    elif (target, source) == ("bf16", "f32") and rounded and len(i.operands) == 2:
        value = f"x.spread({e.source(i.operands[1], 'f4')}).astype('f8')"
        _store(e, i.operands[0], "bf16", f"halves.narrow({value}, 'bf16')")
    elif (target, source) == ("f32", "bf16") and len(i.modifiers) == 2:
        e.assign(
            e.destination(i.operands[0], "f4"), f"halves.wide({_bits(e, i.operands[1], 'bf16')}, 'bf16')"
        )
    else:
        raise e.unknown()
