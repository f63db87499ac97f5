"""`setmaxnreg`: warpgroups of a block hand registers back to the block's pool and take them from there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tilewave.emulator.ptx import Immediate
from tilewave.errors import EmulationError

if TYPE_CHECKING:
    from tilewave.emulator.hopper.machine import HopperMachine

_REGISTERS_PER_SM = 65536
_GRANULE = 8
_MOST = 255


class RegisterPool:
    """Registers of each warp, and what is free in each block."""

    def __init__(self, machine: HopperMachine, registers: int | None) -> None:
        self._machine = machine
        if registers is None:
            registers = self._by_launch_bounds()
        per_thread = min(-(-registers // _GRANULE) * _GRANULE, 256)
        self._held = np.full(machine.lane_count, per_thread, dtype=np.int64)
        self._free = [0] * len(machine.block_ids)
        self._wanted: list[tuple[npt.NDArray[np.int64], int]] = []
        self._asked: dict[int, int] = {}

    def _by_launch_bounds(self) -> int:
        """The most that ptxas may give a thread, when the kernel's real figure is not known."""
        directives = self._machine.program.entry.directives
        if "maxnreg" in directives:
            return directives["maxnreg"][0]
        blocks = directives.get("minnctapersm", (1,))[0]
        threads = int(np.prod(directives.get("maxntid", (self._machine.threads,))))
        bound = min(_MOST, _REGISTERS_PER_SM // (threads * blocks) // _GRANULE * _GRANULE)
        asked = [
            i.operands[0].value
            for i in self._machine.program.entry.instructions
            if i.opcode == "setmaxnreg" and "inc" in i.modifiers and isinstance(i.operands[0], Immediate)
        ]
        return min([bound, *asked])

    def request(self, ids: npt.NDArray[np.int64], count: int, *, grow: bool) -> None:
        """Warpgroups set their registers per thread; one that wants more waits at its basic block's end."""
        machine = self._machine
        held = int(self._held[ids].max())
        if not 24 <= count <= 256 or count % _GRANULE:
            raise EmulationError(f"{machine.current_line}: accepted are multiples of 8 from 24 to 256")
        if grow and count < held:
            raise EmulationError(
                f"{machine.current_line}: the warpgroup has {held} registers a thread, more than {count}"
            )
        if not grow and count > int(self._held[ids].min()):
            raise EmulationError(
                f"{machine.current_line}: the warpgroup has {int(self._held[ids].min())} registers a thread, "
                f"fewer than {count}"
            )
        if grow:
            self._asked.update(dict.fromkeys(ids.tolist(), count))
            return
        for slot in np.unique(ids // machine.threads).tolist():
            chosen = ids[ids // machine.threads == slot]
            self._free[slot] += int((self._held[chosen] - count).sum())
        self._held[ids] = count
        self._serve()

    def grow(self, ids: npt.NDArray[np.int64]) -> None:
        """Hold warpgroups until their block has the registers that they asked for."""
        for first in range(0, len(ids), 128):
            group = ids[first : first + 128]
            self._wanted.append((group, self._asked[int(group[0])]))
        self._serve()

    def _serve(self) -> None:
        machine = self._machine
        waiting = []
        for ids, count in self._wanted:
            slot = int(ids[0]) // machine.threads
            need = int((count - self._held[ids]).sum())
            if need <= self._free[slot]:
                self._free[slot] -= need
                self._held[ids] = count
                machine.wake_blocked(ids)
            else:
                waiting.append((ids, count))
        self._wanted = waiting

    def state(self, slot: int) -> str:
        """What a block has left, in words."""
        threads = self._machine.threads
        held = self._held[slot * threads : (slot + 1) * threads]
        return f"{self._free[slot]} registers are free, {int(held.sum())} are held by {threads} threads"
