"""Finds races in shared memory: warps that touch one word between the same barriers, one of them writing.

Within a basic block the emulator runs all lanes in lockstep, so a missing barrier often changes nothing in
the result. Here every word remembers the last warp that wrote and the last that read it, and in which
*epoch* (the number of barriers that its block had passed).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from tilewave.errors import RaceError

if TYPE_CHECKING:
    from tilewave.emulator.codegen import Access
    from tilewave.emulator.lanes import Lanes
    from tilewave.emulator.machine import Machine

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]

_SEVERAL = -2
_NOBODY = -1


class AccessWatcher(Protocol):
    """Who is told of every access to shared memory."""

    def read(self, lanes: Lanes, access: Access, addresses: Array, width: int, mask: Mask | None) -> None:
        """Note a load."""
        ...

    def write(self, lanes: Lanes, access: Access, addresses: Array, width: int, mask: Mask | None) -> None:
        """Note a store."""
        ...


class RaceDetector:
    """Shadow of a machine's shared memory, byte by byte if some access is narrower than a word."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        widths = [a.width for a in machine.program.accesses if a.space in ("shared", "generic")]
        self._unit = min([4, *widths])
        size = len(machine.shared_words) * 4 // self._unit
        self._writer = np.full(size, _NOBODY, dtype=np.int64)
        self._reader = np.full(size, _NOBODY, dtype=np.int64)
        self._write_epoch = np.full(size, -1, dtype=np.int64)
        self._read_epoch = np.full(size, -1, dtype=np.int64)
        self._last_access: dict[int, Access] = {}
        self._write_by = np.full(size, -1, dtype=np.int64)
        self._read_by = np.full(size, -1, dtype=np.int64)
        self._epochs = np.zeros(len(machine.block_ids), dtype=np.int64)

    def barrier(self, released: Mask) -> None:
        """Blocks whose threads (blocks, threads) leave a barrier begin a new epoch."""
        self._epochs[released.any(axis=1)] += 1

    def _touched(
        self, lanes: Lanes, addresses: Array, width: int, mask: Mask | None
    ) -> tuple[Array, Array, Array]:
        """Units touched, and the lane position and epoch of each touch."""
        chosen = np.arange(lanes.n) if mask is None else np.flatnonzero(mask)
        places = (addresses[chosen] + lanes.shared_bases[chosen]) // self._unit
        machine, first = self._machine, addresses[chosen]
        inside = (first >= machine.shared_start) & (first + width <= machine.shared_end)
        chosen, places = chosen[inside], places[inside]  # what is outside becomes a MemoryFault
        count = max(1, width // self._unit)
        units = (places[:, None] + np.arange(count)).reshape(-1)
        who = np.repeat(chosen, count)
        return units, who, self._epochs[lanes.block_slots[who]]

    def _warps(self, lanes: Lanes, who: Array) -> Array:
        machine = self._machine
        return (lanes.block_slots * machine.warps_per_block + lanes.threads // 32)[who]

    def read(self, lanes: Lanes, access: Access, addresses: Array, width: int, mask: Mask | None) -> None:
        """Note a load; an error if another warp has written one of its words in this epoch."""
        units, who, epochs = self._touched(lanes, addresses, width, mask)
        warps = self._warps(lanes, who)
        bad = (self._write_epoch[units] == epochs) & (self._writer[units] != warps)
        if bad.any():
            first = int(np.argmax(bad))
            self._report(
                lanes, access, int(who[first]), int(units[first]), "reads", self._write_by, self._writer
            )
        fresh = self._read_epoch[units] != epochs
        previous = np.where(fresh, warps, self._reader[units])
        self._reader[units] = warps
        # Another warp's earlier read, or another lane of this very access, makes it several readers.
        several = (previous != warps) | (self._reader[units] != warps)
        self._read_epoch[units] = epochs
        self._reader[units[several]] = _SEVERAL
        self._read_by[units] = self._remember(access)

    def write(self, lanes: Lanes, access: Access, addresses: Array, width: int, mask: Mask | None) -> None:
        """Note a store; an error if another warp has read or written one of its words in this epoch."""
        units, who, epochs = self._touched(lanes, addresses, width, mask)
        warps = self._warps(lanes, who)
        bad = (self._write_epoch[units] == epochs) & (self._writer[units] != warps)
        if bad.any():
            first = int(np.argmax(bad))
            self._report(
                lanes, access, int(who[first]), int(units[first]), "writes", self._write_by, self._writer
            )
        bad = (self._read_epoch[units] == epochs) & (self._reader[units] != warps)
        if bad.any():
            first = int(np.argmax(bad))
            self._report(
                lanes, access, int(who[first]), int(units[first]), "writes", self._read_by, self._reader
            )
        self._writer[units] = warps
        self._write_epoch[units] = epochs
        self._write_by[units] = self._remember(access)
        bad = self._writer[units] != warps
        if bad.any():
            first = int(np.argmax(bad))
            self._report(
                lanes, access, int(who[first]), int(units[first]), "writes", self._write_by, self._writer
            )

    def _remember(self, access: Access) -> int:
        line = access.instruction.line
        self._last_access[line] = access
        return line

    def _report(
        self, lanes: Lanes, access: Access, lane: int, unit: int, verb: str, lines: Array, warps: Array
    ) -> NoReturn:
        machine = self._machine
        other = self._last_access[int(lines[unit])].instruction
        byte = unit * self._unit % machine.shared_stride
        warp = int(warps[unit]) % machine.warps_per_block
        name = "several warps" if warps[unit] == _SEVERAL else f"warp {warp}"
        done = "read" if lines is self._read_by else "written"
        i = access.instruction
        raise RaceError(
            f"PTX line {i.line}: {i.text}: {lanes.where(lane)} {verb} byte {byte} of shared memory, which "
            f"{name} of the block has {done} at PTX line {other.line} ({other.text}) with no barrier between"
        )
