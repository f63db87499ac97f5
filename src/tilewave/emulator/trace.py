"""What one warp of a launch did, instruction by instruction, with the addresses that its lanes used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewave.emulator.codegen import Access, Group
from tilewave.emulator.flow import BasicBlock
from tilewave.emulator.ptx import Instruction
from tilewave.errors import UsageError

if TYPE_CHECKING:
    from tilewave.emulator.lanes import Lanes

WARP = 32


@dataclass(frozen=True)
class Traced:
    """One instruction that the warp executed.

    ``access`` says what memory access it makes and how it is counted (None: it makes none), ``space`` where;
    ``addresses`` are the byte addresses of the 32 lanes as the PTX has them, ``sources`` those in global
    memory that a copy reads, and ``active`` the lanes that take part.
    """

    instruction: Instruction
    access: Access | None = None
    space: str = ""
    addresses: npt.NDArray[np.int64] | None = None
    sources: npt.NDArray[np.int64] | None = None
    active: npt.NDArray[np.bool_] | None = None


@dataclass
class _Step:
    """One basic block as the warp ran it; the accesses that it made, by the instruction's id."""

    first: int
    stop: int
    accesses: dict[int, Traced] = field(default_factory=dict)


class Trace:
    """Give one to ``launch`` to follow a warp; read it by `instructions` afterwards.

    ``block`` is the linear index of the warp's block, which must be among those that run, and ``warp`` its
    number in it. Shared, global and local accesses and copies carry addresses; atomics do not.
    """

    def __init__(self, block: int = 0, warp: int = 0) -> None:
        if block < 0 or warp < 0:
            raise UsageError(f"block {block} and warp {warp} of a trace: numbers from 0 on are accepted")
        self.block, self.warp = block, warp
        self._code: list[Instruction] = []
        self._steps: list[_Step] = []
        self._row: int | None = None

    def instructions(self) -> Iterator[Traced]:
        """All instructions in the order in which the warp executed them.

        An instruction whose guard was false for the whole warp is among them, as it is issued.
        """
        for step in self._steps:
            for instruction in self._code[step.first : step.stop]:
                yield step.accesses.get(id(instruction)) or Traced(instruction)

    def enter(self, lanes: Lanes, block: BasicBlock) -> None:
        """The machine begins a basic block for some lanes."""
        machine = lanes.machine
        self._code = machine.program.entry.instructions
        self._row = None
        places = np.flatnonzero(machine.block_ids == self.block)
        if len(places) == 0:
            return
        number = int(places[0]) * machine.warps_per_block + self.warp
        warps = np.unique(lanes.block_slots * machine.warps_per_block + lanes.threads // WARP)
        row = int(np.searchsorted(warps, number))
        if self.warp < machine.warps_per_block and row < len(warps) and warps[row] == number:
            self._row = row
            self._steps.append(_Step(block.first, block.stop))

    def group(self, group: Group, table: npt.NDArray[Any], active: npt.NDArray[np.bool_] | None) -> None:
        """Shared accesses of the current block at offsets from the addresses in ``table``."""
        for offset, access in group.accesses:
            self.access(access, "shared", table + offset, active)

    def access(
        self,
        access: Access,
        space: str,
        table: npt.NDArray[Any],
        active: npt.NDArray[np.bool_] | None,
        sources: npt.NDArray[Any] | None = None,
    ) -> None:
        """One access of the current block, with the addresses of all its warps as (warps, 32)."""
        if self._row is None:
            return
        on = np.ones(WARP, dtype=np.bool_) if active is None else active[self._row].copy()
        addresses = table[self._row].astype(np.int64)
        read = None if sources is None else sources[self._row].astype(np.int64)
        traced = Traced(access.instruction, access, space, addresses, read, on)
        self._steps[-1].accesses[id(access.instruction)] = traced
