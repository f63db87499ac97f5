"""What a compiled kernel takes of an SM, as ptxas reports it."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Resources:
    """Registers and bytes of local memory per thread, static shared bytes and barriers per block."""

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    static_shared_bytes: int
    barriers: int = 0


_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_PROPERTIES = re.compile(r"Function properties for (\S+)")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_BARRIERS = re.compile(r"used (\d+) barriers")
_SHARED = re.compile(r"(\d+)(?:\+(\d+))? bytes smem")


def parse_resources(log: str) -> dict[str, Resources]:
    """The resources of every kernel in a log made with ``--ptxas-options=-v``, by lowered name."""
    found: dict[str, Resources] = {}
    frames: dict[str, tuple[int, int, int]] = {}
    entry = described = None
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            entry = match[1]
        elif match := _PROPERTIES.search(line):
            described = match[1]
        elif described is not None and (match := _FRAME.search(line)):
            frames[described] = (int(match[1]), int(match[2]), int(match[3]))
        elif entry is not None and (match := _REGISTERS.search(line)):
            barriers = _BARRIERS.search(line)
            shared = _SHARED.search(line)
            static_shared = int(shared[1]) + int(shared[2] or 0) if shared else 0
            found[entry] = Resources(
                int(match[1]),
                *frames.get(entry, (0, 0, 0)),
                static_shared,
                int(barriers[1]) if barriers else 0,
            )
            entry = None
    return found
