"""`cp.async.mbarrier.arrive`: an arrival when all `cp.async` that a thread has started have landed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tilewave.emulator.hopper.mbarriers import Mbarrier
from tilewave.emulator.lanes import Lanes
from tilewave.errors import BarrierError

if TYPE_CHECKING:
    from tilewave.emulator.hopper.machine import HopperMachine


@dataclass
class _Arrival:
    """Threads that will arrive, all with one instruction."""

    text: str
    ids: npt.NDArray[np.int64]
    barrier: Mbarrier


class CopyArrivals:
    """Arrivals that wait for copies."""

    def __init__(self, machine: HopperMachine) -> None:
        self._machine = machine
        self._waiting: list[_Arrival] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def start(self, ids: npt.NDArray[np.int64], barrier: Mbarrier, *, counted: bool) -> None:
        """Let threads arrive later; unless `counted` already (`.noinc`), the phase awaits one more each."""
        machine = self._machine
        machine.events += 1
        if not counted:
            barrier.pending += len(ids)
        self._waiting.append(_Arrival(machine.current_line, ids, barrier))

    def land_one(self) -> None:
        """Finish the copies of some threads, and let these arrive: the oldest, or with a seed any."""
        machine = self._machine
        machine.events += 1
        chosen = int(machine.rng.integers(len(self._waiting))) if machine.scatters else 0
        arrival = self._waiting.pop(chosen)
        machine.copies.wait(Lanes(machine, arrival.ids), None)
        barrier = arrival.barrier
        if machine.mbarriers.get((barrier.slot, barrier.offset)) is not barrier:
            raise BarrierError(f"{arrival.text}: {barrier.name()} is gone before the copies have landed")
        for lane in arrival.ids.tolist():
            if machine.ordering is not None:
                machine.ordering.mbarrier_arrived(lane, barrier)
            try:
                barrier.arrive()
            except BarrierError as error:
                raise BarrierError(f"{arrival.text}: {machine.where(lane)}: {error}") from None
            machine.complete(barrier)
