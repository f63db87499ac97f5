"""Where a kernel's variables lie: offsets in shared and local memory, addresses of constant data."""

from __future__ import annotations

from tilewave.emulator.ptx import Entry

SHARED_WINDOW = 0x7E00_0000_0000
"""Generic address of the first byte of shared memory."""
LOCAL_WINDOW = 0x7D00_0000_0000
"""Generic address of the first byte of local memory."""
PARAMETER_WINDOW = 0x7C00_0000_0000
"""Generic address of the first byte of the kernel's parameters."""
WINDOW_BYTES = 1 << 32
RESERVED_SHARED_BYTES = 1024
"""What a block's shared memory begins with on Hopper; the system's own. Addresses in descriptors count it."""


class Layout:
    """Offsets of a kernel's `.shared`, `.local` and `.param` variables; dynamic shared memory comes last.

    The first `shared_start` bytes of shared memory are the system's.
    """

    def __init__(self, entry: Entry, shared_start: int = 0) -> None:
        self.shared_start = shared_start
        self._addresses: dict[str, int] = {}
        self.global_names = {v.name for v in entry.variables.values() if v.space in ("global", "const")}
        sizes = {"shared": shared_start, "local": 0}
        variables = sorted(entry.variables.values(), key=lambda variable: variable.extern)
        for variable in variables:
            if variable.space not in sizes:
                continue
            align = variable.align
            address = -(-sizes[variable.space] // align) * align
            self._addresses[variable.name] = address
            if not variable.extern:
                sizes[variable.space] = address + variable.nbytes
        self.static_shared_bytes = sizes["shared"] - shared_start
        self.local_bytes = sizes["local"]
        externs = [self._addresses[v.name] for v in variables if v.extern and v.space == "shared"]
        self.dynamic_offset = max(externs, default=sizes["shared"])
        self.parameters: dict[str, int] = {}
        self.parameter_bytes = 0
        for parameter in entry.params:
            self.parameter_bytes = -(-self.parameter_bytes // parameter.align) * parameter.align
            self.parameters[parameter.name] = self.parameter_bytes
            self.parameter_bytes += -(-parameter.nbytes // 16) * 16

    def address(self, name: str) -> int | None:
        """Address of a variable in its own space, or None if there is none of that name."""
        return self._addresses.get(name, self.parameters.get(name))
