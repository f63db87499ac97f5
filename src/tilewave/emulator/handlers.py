"""Tables of opcodes, and what the functions that fill them share."""

from __future__ import annotations

from collections.abc import Callable

from tilewave.emulator.codegen import DTYPES, Emitter
from tilewave.emulator.ptx import Instruction

Handler = Callable[[Emitter, Instruction], None]


class Handlers(dict[str, Handler]):
    """Opcodes and the functions that emit their code; a call of the table registers one."""

    def __call__(self, *names: str) -> Callable[[Handler], Handler]:
        """Decorator: the function emits these opcodes."""

        def register(handler: Handler) -> Handler:
            self.update(dict.fromkeys(names, handler))
            return handler

        return register


def dtype_of(e: Emitter, name: str) -> str:
    """NumPy dtype code of a PTX type."""
    if name not in DTYPES:
        raise e.unknown(f"type .{name} is not emulated")
    return DTYPES[name]


def form(e: Emitter, i: Instruction, allowed: str = "", operands: int | None = None) -> tuple[str, set[str]]:
    """The type (an instruction's last modifier), and the other modifiers, which must be known."""
    if not i.modifiers:
        raise e.unknown()
    others = set(i.modifiers[:-1])
    if others - set(allowed.split()):
        raise e.unknown(f"modifier .{min(others - set(allowed.split()))} is not emulated")
    if operands is not None and len(i.operands) != operands:
        raise e.unknown(f"expected {operands} operands")
    return dtype_of(e, i.modifiers[-1]), others
