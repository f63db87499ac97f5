"""Writing changed machine code, and the registers that it takes, back into a cubin."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from tilewave.emulator.sass import Cubin
from tilewave.emulator.sass.elf import INSTRUCTION_BYTES
from tilewave.errors import EmulationError

_REGISTER_COUNT = 0x2F
_SIZED = 0x04


def with_words(cubin: Cubin, symbol: str, first: int, words: Sequence[int], registers: int) -> Cubin:
    """A copy of the cubin whose kernel has `words` from instruction `first` on and takes `registers`.

    `registers` is the count per thread (the largest number used, plus one and `RESERVED_REGISTERS`); it is
    only ever raised.
    """
    code = bytearray(cubin.function(symbol).code)
    start = first * INSTRUCTION_BYTES
    new = b"".join(word.to_bytes(INSTRUCTION_BYTES, "little") for word in words)
    code[start : start + len(new)] = new
    return _with_registers(cubin.with_code(symbol, bytes(code)), symbol, registers)


def _with_registers(cubin: Cubin, symbol: str, registers: int) -> Cubin:
    """The cubin with the kernel's count in its register attribute and in its section header raised."""
    if cubin.function(symbol).registers >= registers:
        return cubin
    image = bytearray(cubin.image)
    table, entry_size, count, names_index = struct.unpack_from("<Q10xHHH", image, 40)
    headers = [table + i * entry_size for i in range(count)]
    sections = [struct.unpack_from("<IIQQQQII", image, header) for header in headers]
    names = sections[names_index][4]

    def name_of(section: tuple[int, ...]) -> str:
        start = names + section[0]
        return bytes(image[start : image.index(b"\0", start)]).decode()

    by_name = {name_of(section): i for i, section in enumerate(sections)}
    symbols = sections[by_name[".symtab"]]
    strings = sections[symbols[6]][4]
    info = sections[by_name[".nv.info"]]
    raised = 0
    position, end = info[4], info[4] + info[5]
    while position + 4 <= end:
        kind, attribute, size = struct.unpack_from("<BBH", image, position)
        position += 4
        if kind != _SIZED:
            continue
        if attribute == _REGISTER_COUNT:
            index = struct.unpack_from("<I", image, position)[0]
            start = strings + struct.unpack_from("<I", image, symbols[4] + 24 * index)[0]
            if image[start : image.index(b"\0", start)].decode() == symbol:
                struct.pack_into("<I", image, position + 4, registers)
                raised += 1
        position += size
    if raised != 1:
        raise EmulationError(f"{raised} attributes tell how many registers '{symbol}' takes, not one")
    # The section header of the code repeats the count in the top byte of its info field.
    text = headers[by_name[f".text.{symbol}"]] + 44
    old = struct.unpack_from("<I", image, text)[0]
    if old >> 24:
        struct.pack_into("<I", image, text, old & 0xFFFFFF | registers << 24)
    return Cubin(bytes(image))
