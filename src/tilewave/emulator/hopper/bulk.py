"""Bulk copies (TMA) in flight: they land late, or at random, and never before they must."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewave.emulator.hopper.mbarriers import Mbarrier
from tilewave.emulator.hopper.tiles import Tile
from tilewave.emulator.memory import POISON
from tilewave.errors import BarrierError, MemoryFault, RaceError

if TYPE_CHECKING:
    from tilewave.emulator.hopper.lanes import HopperLanes
    from tilewave.emulator.hopper.machine import HopperMachine

Array = npt.NDArray[Any]


@dataclass
class Flight:
    """One copy: between a tile of global memory and 16-byte pieces of the shared memory of some blocks."""

    text: str  # the instruction that started it
    lane: int
    tile: Tile
    slot: int  # the block whose shared memory it writes or reads
    pieces: Array  # index of each 16-byte piece in a block's shared memory, in the tile's order
    barrier: tuple[Mbarrier, int] | None = None  # a load's, with the phase at the start
    data: Array | None = None  # what a store has read
    waited: bool = False  # whether a store's thread knows that it has read
    event: tuple[int, int] | None = None  # a store's, for the race detection


class BulkCopies:
    """All copies in flight of a cluster's blocks, and the bulk groups of its threads."""

    def __init__(self, machine: HopperMachine) -> None:
        self._machine = machine
        self._flights: list[Flight] = []
        self._open: dict[int, list[Flight]] = {}  # by lane: stores that no group holds yet
        self._groups: dict[int, list[list[Flight]]] = {}  # by lane: committed groups, oldest first

    def __len__(self) -> int:
        return len(self._flights)

    def _shared(self, slot: int) -> Array:
        """A block's shared memory as rows of 16 bytes."""
        stride = self._machine.shared_stride // 4
        return self._machine.shared_words[slot * stride : (slot + 1) * stride].reshape(-1, 4)

    def _pieces(self, tile: Tile, offset: int, alignment: int) -> Array:
        machine = self._machine
        if offset % alignment:
            raise MemoryFault(
                f"{machine.current_line}: the copy's address in shared memory, byte {offset}, is no multiple "
                f"of {alignment}",
                lane=0,
                address=offset,
            )
        if offset < machine.shared_start or offset + tile.nbytes > machine.shared_end:
            raise MemoryFault(
                f"{machine.current_line}: {tile.nbytes} bytes from byte {offset} on do not fit "
                f"{machine.shared.extent}",
                lane=0,
                address=offset,
            )
        addresses = offset + 16 * np.arange(tile.nbytes // 16)
        if tile.swizzle:
            addresses ^= ((addresses >> 7) & (tile.swizzle // 16 - 1)) << 4
        return addresses >> 4

    def _check_mbarriers(self, slots: list[int], offset: int, nbytes: int) -> None:
        for slot, place in self._machine.mbarriers:
            if slot in slots and place < offset + nbytes and place + 8 > offset:
                raise RaceError(
                    f"{self._machine.current_line}: the copy overwrites "
                    f"{self._machine.mbarriers[slot, place].name()}"
                )

    def load(
        self,
        lanes: HopperLanes,
        lane: int,
        tile: Tile,
        slots: list[int],
        offset: int,
        mbarrier: int,
        line: int,
    ) -> None:
        """Start a copy from global memory into the shared memory of some blocks, at the same byte of each."""
        machine = self._machine
        machine.events += 1
        pieces = self._pieces(tile, offset, tile.alignment)
        self._check_mbarriers(slots, offset, tile.nbytes)
        barriers = []
        for slot in slots:
            barrier = lanes.mbarrier_at(slot, mbarrier)
            barriers.append((barrier, barrier.phase))
            self._shared(slot)[pieces] = POISON
        if machine.ordering is not None:
            machine.ordering.bulk_write(
                int(lanes.ids[lane]), slots, pieces, [b for b, _ in barriers], machine.current_line, line
            )
        for slot, armed in zip(slots, barriers, strict=True):  # each block's part lands when it likes
            flight = Flight(machine.current_line, int(lanes.ids[lane]), tile, slot, pieces, armed)
            self._flights.append(flight)

    def store(self, lanes: HopperLanes, lane: int, tile: Tile, slot: int, offset: int, line: int) -> None:
        """Start a copy from shared to global memory, as part of the thread's open bulk group."""
        machine = self._machine
        machine.events += 1
        pieces = self._pieces(tile, offset, tile.alignment)
        flight = Flight(machine.current_line, int(lanes.ids[lane]), tile, slot, pieces)
        if machine.ordering is not None:
            flight.event = machine.ordering.bulk_read(flight.lane, slot, pieces, flight.text, line)
        self._flights.append(flight)
        self._open.setdefault(flight.lane, []).append(flight)

    def commit(self, ids: Array) -> None:
        """`cp.async.bulk.commit_group`."""
        for lane in ids.tolist():
            self._groups.setdefault(lane, []).append(self._open.pop(lane, []))

    def wait(self, ids: Array, newest: int, *, read_only: bool) -> None:
        """`cp.async.bulk.wait_group`: finish all but the `newest` groups, or only (`.read`) their reading."""
        for lane in ids.tolist():
            groups = self._groups.get(lane, [])
            done = groups[: len(groups) - newest] if newest else list(groups)
            for group in done:
                for flight in group:
                    self._read(flight)
                    flight.waited = True
                    if self._machine.ordering is not None and flight.event is not None:
                        self._machine.ordering.bulk_done(lane, flight.event)
                    if not read_only:
                        self._land(flight)
            if not read_only:
                self._groups[lane] = groups[len(done) :]

    def land_one(self) -> None:
        """Let some copy land: the oldest, or with a seed any."""
        machine = self._machine
        chosen = int(machine.rng.integers(len(self._flights))) if machine.scatters else 0
        self._land(self._flights[chosen])

    def check_ended(self, slots: list[int]) -> None:
        """Blocks have ended: nothing may be in flight to or from their shared memory."""
        loads = [flight for flight in self._flights if flight.barrier is not None]
        groups = [*self._open.values(), *(group for groups in self._groups.values() for group in groups)]
        stores = [flight for group in groups for flight in group if not flight.waited]
        for flight in loads + stores:
            if flight.slot in slots:
                raise RaceError(
                    f"{flight.text}: {self._machine.where(flight.lane)} started the copy, and its block has "
                    f"ended without waiting for it"
                )

    def _read(self, flight: Flight) -> None:
        if flight.data is None and flight.barrier is None:
            flight.data = self._shared(flight.slot)[flight.pieces]

    def _land(self, flight: Flight) -> None:
        if not any(flight is other for other in self._flights):
            return
        machine = self._machine
        machine.events += 1
        self._flights = [other for other in self._flights if other is not flight]
        try:
            if flight.barrier is None:
                self._read(flight)
                assert flight.data is not None
                flight.tile.write(machine.memory, flight.data)
                return
            data = flight.tile.read(machine.memory)
        except MemoryFault as error:
            error.args = (f"{flight.text}: {machine.where(flight.lane)}: {error}",)
            raise
        self._shared(flight.slot)[flight.pieces] = data
        barrier, phase = flight.barrier
        if machine.mbarriers.get((barrier.slot, barrier.offset)) is not barrier:
            raise BarrierError(f"{flight.text}: {barrier.name()} is gone while the copy is in flight")
        if barrier.phase != phase:
            raise BarrierError(
                f"{flight.text}: the copy was started in phase {phase} of {barrier.name()}, which has ended "
                f"before the copy landed: fewer bytes were expected than copied"
            )
        barrier.land(flight.tile.nbytes)
        machine.complete(barrier)
