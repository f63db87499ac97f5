"""Reading a cubin: the machine code of each kernel and what the driver would set up for it.

A cubin is a 64-bit little-endian ELF file. For a kernel `k` it holds the machine code in `.text.k`, the size
of its static shared memory in `.nv.shared.k` and the layout of constant bank 0 (where the parameters lie) in
`.nv.constant0.k` and `.nv.info.k`. Attribute numbers are those that `cuobjdump -elf` names.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from tilewave.errors import EmulationError

INSTRUCTION_BYTES = 16
"""Bytes of one instruction on every architecture since sm_70."""

_MACHINE_CUDA = 190
_SECTION_NOBITS = 8

_ATTRIBUTE_PARAM_BANK = 0x0A
_ATTRIBUTE_FRAME_SIZE = 0x11
_ATTRIBUTE_MIN_STACK = 0x12
_ATTRIBUTE_PARAM_INFO = 0x17
_ATTRIBUTE_REGISTERS = 0x2F
_FORMAT_SIZED_VALUE = 0x04


@dataclass(frozen=True)
class Parameter:
    """One kernel parameter: byte offset from the first one, and its size in bytes."""

    ordinal: int
    offset: int
    size: int


@dataclass(frozen=True)
class Function:
    """One kernel of a cubin."""

    name: str
    code: bytes
    code_file_offset: int
    registers: int
    shared_bytes: int
    """Static shared memory with the bytes that the system reserves in front of it (1024 from sm_90 on)."""
    local_bytes: int
    """Local memory (stack) of one thread."""
    parameter_base: int
    """Byte offset of the first parameter in constant bank 0."""
    parameters: tuple[Parameter, ...]
    constants: dict[int, bytes] = field(repr=False)
    """Initial contents of the constant banks that the cubin gives, by bank."""

    def words(self) -> list[int]:
        """The instructions as 128-bit integers, in address order."""
        return [
            int.from_bytes(self.code[i : i + INSTRUCTION_BYTES], "little")
            for i in range(0, len(self.code), INSTRUCTION_BYTES)
        ]


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    offset: int
    size: int
    link: int
    info: int


class Cubin:
    """The kernels of a cubin.

    `sm` is the architecture's number (90 for sm_90 and sm_90a). Raises `EmulationError` if the bytes are no
    CUDA ELF file.
    """

    def __init__(self, image: bytes) -> None:
        self.image = image
        _check_header(image)
        try:
            self._sections = list(_read_sections(image))
            flags = struct.unpack_from("<I", image, 48)[0]
            # ABI version 8 (toolkit 13) keeps the architecture in the second byte, earlier ones in the first.
            self.sm = (flags >> 8 if image[8] >= 8 else flags) & 0xFF
            self._symbols = self._read_symbols()
            self.functions: dict[str, Function] = {
                section.name.removeprefix(".text."): self._function(section)
                for section in self._sections
                if section.name.startswith(".text.")
            }
        except (struct.error, IndexError, ValueError, OverflowError) as error:
            raise EmulationError(f"the cubin is damaged: {error}") from error

    def function(self, name: str) -> Function:
        """The kernel of that (lowered) name; an `EmulationError` names those that the cubin holds."""
        if name not in self.functions:
            known = ", ".join(sorted(self.functions)) or "none"
            raise EmulationError(f"the cubin holds no kernel '{name}'; it holds: {known}")
        return self.functions[name]

    def with_code(self, name: str, code: bytes) -> Cubin:
        """A copy of the cubin in which the kernel's machine code is replaced by `code` of the same length."""
        function = self.function(name)
        if len(code) != len(function.code):
            raise EmulationError(
                f"kernel '{name}' has {len(function.code)} bytes of code; given were {len(code)}"
            )
        start = function.code_file_offset
        return Cubin(self.image[:start] + code + self.image[start + len(code) :])

    def _data(self, section: _Section) -> bytes:
        if section.kind == _SECTION_NOBITS:
            return b""
        return self.image[section.offset : section.offset + section.size]

    def _named(self, name: str) -> _Section | None:
        return next((section for section in self._sections if section.name == name), None)

    def _read_symbols(self) -> list[str]:
        table = self._named(".symtab")
        if table is None:
            return []
        strings = self._data(self._sections[table.link])
        data = self._data(table)
        return [_string(strings, struct.unpack_from("<I", data, i)[0]) for i in range(0, len(data), 24)]

    def _function(self, text: _Section) -> Function:
        name = text.name.removeprefix(".text.")
        registers, frame = 0, 0
        for attribute, payload in self._attributes(".nv.info"):
            if attribute not in (_ATTRIBUTE_REGISTERS, _ATTRIBUTE_FRAME_SIZE, _ATTRIBUTE_MIN_STACK):
                continue
            symbol, value = struct.unpack_from("<II", payload)
            if symbol < len(self._symbols) and self._symbols[symbol] == name:
                if attribute == _ATTRIBUTE_REGISTERS:
                    registers = value
                else:
                    frame = max(frame, value)
        parameters, base = [], 0
        for attribute, payload in self._attributes(f".nv.info.{name}"):
            if attribute == _ATTRIBUTE_PARAM_BANK:
                base = struct.unpack_from("<H", payload, 4)[0]
            elif attribute == _ATTRIBUTE_PARAM_INFO:
                _, ordinal, offset, packed = struct.unpack_from("<IHHI", payload)
                parameters.append(Parameter(ordinal, offset, packed >> 18))
        shared = self._named(f".nv.shared.{name}")
        constants = {
            bank: self._data(section)
            for bank in range(32)
            for section in (self._named(f".nv.constant{bank}.{name}") or self._named(f".nv.constant{bank}"),)
            if section is not None
        }
        return Function(
            name=name,
            code=self._data(text),
            code_file_offset=text.offset,
            registers=registers or text.info >> 24,
            shared_bytes=max(shared.size if shared else 0, 1024 if self.sm >= 90 else 0),
            local_bytes=frame,
            parameter_base=base,
            parameters=tuple(sorted(parameters, key=lambda parameter: parameter.ordinal)),
            constants=constants,
        )

    def _attributes(self, name: str) -> Iterator[tuple[int, bytes]]:
        section = self._named(name)
        data = self._data(section) if section else b""
        position = 0
        while position + 4 <= len(data):
            kind, attribute, value = struct.unpack_from("<BBH", data, position)
            position += 4
            if kind == _FORMAT_SIZED_VALUE:
                yield attribute, data[position : position + value]
                position += value


def _string(table: bytes, start: int) -> str:
    return table[start : table.index(b"\0", start)].decode()


def _check_header(image: bytes) -> None:
    if len(image) < 64 or image[:6] != b"\x7fELF\x02\x01":
        raise EmulationError("this is no cubin: it does not begin as a 64-bit ELF file")
    machine = struct.unpack_from("<H", image, 18)[0]
    if machine != _MACHINE_CUDA:
        raise EmulationError(f"this is no cubin: its ELF machine is {machine}, not {_MACHINE_CUDA} (CUDA)")


def _read_sections(image: bytes) -> Iterator[_Section]:
    table, entry_size, count, names_index = struct.unpack_from("<Q10xHHH", image, 40)
    headers = [struct.unpack_from("<IIQQQQII", image, table + i * entry_size) for i in range(count)]
    names_offset, names_size = headers[names_index][4:6]
    names = image[names_offset : names_offset + names_size]
    for name, kind, _, _, offset, size, link, info in headers:
        yield _Section(_string(names, name), kind, offset, size, link, info)
