"""Finds races where warps, bulk copies and products share memory: who may know that what has happened.

Every warp carries a vector clock: for each *agent* (a warp, an mbarrier, the products of a warpgroup, the
bulk stores of a warp) the last of its events that surely happened before. Barriers and mbarriers hand clocks
on. An access is a race unless the events it could collide with are in its warp's clock. A second clock,
handed on in the same way, holds what has also passed a `fence.proxy.async`: the asynchronous proxy (bulk
copies, products) sees ordinary stores only then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from tilewave.emulator.codegen import Access
from tilewave.emulator.hopper.cluster_lanes import RANK_SHIFT
from tilewave.emulator.hopper.mbarriers import Mbarrier
from tilewave.emulator.lanes import WARP, Lanes, Mask
from tilewave.errors import EmulationError, RaceError

if TYPE_CHECKING:
    from tilewave.emulator.hopper.machine import HopperMachine

Array = npt.NDArray[Any]

_MBARRIERS_PER_BLOCK = 128
_WARPS_PER_GROUP = 4
_NOBODY = -1


@dataclass
class Knowledge:
    """What some warps know together: events that happened, and those that passed a proxy fence."""

    happened: Array
    fenced: Array

    def join(self, other: Knowledge) -> None:
        """Add what others know."""
        np.maximum(self.happened, other.happened, out=self.happened)
        np.maximum(self.fenced, other.fenced, out=self.fenced)


class Ordering:
    """Clocks of a cluster's warps, and who last touched each unit of its shared memory."""

    def __init__(self, machine: HopperMachine) -> None:
        self._machine = machine
        self._warps = len(machine.block_ids) * machine.warps_per_block
        # Agents: warps, then their bulk stores, then warpgroups' products, then mbarriers.
        self._first_store = self._warps
        self._first_product = 2 * self._warps
        self._first_mbarrier = 3 * self._warps
        agents = 3 * self._warps + _MBARRIERS_PER_BLOCK * len(machine.block_ids)
        self._clock = np.zeros((self._warps, agents), dtype=np.int64)
        self._clock[np.arange(self._warps), np.arange(self._warps)] = 1
        self._fenced = np.zeros_like(self._clock)
        self._time = np.zeros(agents, dtype=np.int64)  # of agents that are no warps
        widths = [a.width for a in machine.program.accesses if a.space in ("shared", "generic")]
        self._unit = min([4, *widths])
        size = len(machine.shared_words) * 4 // self._unit
        self._writer = np.full(size, _NOBODY, dtype=np.int64)
        self._write_time = np.zeros(size, dtype=np.int64)
        self._write_line = np.zeros(size, dtype=np.int64)
        self._ordinary = np.zeros(size, dtype=np.bool_)  # last written by an ordinary store
        self._reads: dict[int, Array] = {}  # by agent: time of its last read of each unit
        self._read_line = np.zeros(size, dtype=np.int64)
        self._reserved = np.zeros(size, dtype=np.bool_)  # units of mbarriers
        self._agents: dict[tuple[int, int], int] = {}  # of mbarriers, by place
        self._waiting: dict[tuple[int, int], Knowledge] = {}  # by mbarrier: of those that arrived
        self._completed: dict[tuple[int, int], Knowledge] = {}
        self._made: dict[tuple[int, int], tuple[int, int]] = {}  # by mbarrier: warp and time
        self._ready: set[tuple[int, int]] = set()  # mbarriers that a fence has made known to copies

    # -- who and where --------------------------------------------------------------------------------------

    def _warps_of(self, ids: Array) -> Array:
        machine = self._machine
        blocks, threads = np.divmod(ids, machine.threads)
        warps: Array = blocks * machine.warps_per_block + threads // WARP
        return warps

    def _units(self, pieces: Array, slot: int) -> Array:
        each = 16 // self._unit
        first = slot * self._machine.shared_stride // self._unit
        return (first + pieces.reshape(-1, 1) * each + np.arange(each)).reshape(-1)

    def _touched(self, lanes: Lanes, addresses: Array, width: int, mask: Mask | None) -> tuple[Array, Array]:
        """Units touched, and the warp of each touch."""
        machine = self._machine
        chosen = np.arange(lanes.n) if mask is None else np.flatnonzero(mask)
        places = addresses[chosen].astype(np.int64)
        ranks = places >> RANK_SHIFT
        slots = np.where(ranks == 0, lanes.block_slots[chosen], ranks - 1)
        places &= (1 << RANK_SHIFT) - 1
        inside = (places >= machine.shared_start) & (places + width <= machine.shared_end)
        inside &= (slots >= 0) & (slots < len(machine.block_ids))
        chosen, places, slots = chosen[inside], places[inside], slots[inside]  # a MemoryFault otherwise
        count = max(1, width // self._unit)
        first = (slots * machine.shared_stride + places) // self._unit
        units = (first[:, None] + np.arange(count)).reshape(-1)
        return units, np.repeat(self._warps_of(lanes.ids[chosen]), count)

    # -- ordinary accesses ----------------------------------------------------------------------------------

    def read(self, lanes: Lanes, access: Access, addresses: Array, width: int, mask: Mask | None) -> None:
        """An ordinary load."""
        units, warps = self._touched(lanes, addresses, width, mask)
        i = access.instruction
        text = f"PTX line {i.line}: {i.text}"
        self._check_reserved(units, text)
        self._check_written(units, self._clock[warps, self._writer[units]], warps, text, "reads")
        for warp in np.unique(warps).tolist():
            self._note_read(warp, units[warps == warp], int(self._clock[warp, warp]), i.line)

    def write(self, lanes: Lanes, access: Access, addresses: Array, width: int, mask: Mask | None) -> None:
        """An ordinary store."""
        units, warps = self._touched(lanes, addresses, width, mask)
        i = access.instruction
        text = f"PTX line {i.line}: {i.text}"
        self._check_reserved(units, text)
        self._check_written(units, self._clock[warps, self._writer[units]], warps, text, "writes")
        for agent in self._reads:
            self._check_read(agent, units, self._clock[warps, agent], warps, text)
        times = self._clock[warps, warps]
        self._writer[units] = warps
        collides = self._writer[units] != warps
        if collides.any():
            self._report(text, "writes", int(units[np.argmax(collides)]), "another warp", i.line, "written")
        self._write_time[units] = times
        self._write_line[units] = i.line
        self._ordinary[units] = True

    def _note_read(self, agent: int, units: Array, time: int, line: int) -> None:
        if agent not in self._reads:
            self._reads[agent] = np.zeros(len(self._writer), dtype=np.int64)
        self._reads[agent][units] = time
        self._read_line[units] = line

    # -- the checks -----------------------------------------------------------------------------------------

    def _check_reserved(self, units: Array, text: str) -> None:
        if self._reserved[units].any():
            unit = int(units[np.argmax(self._reserved[units])])
            byte = unit * self._unit % self._machine.shared_stride
            raise RaceError(f"{text}: byte {byte} of shared memory belongs to an mbarrier")

    def _check_written(
        self, units: Array, known: Array, own: Array | int, text: str, verb: str, *, copied: bool = False
    ) -> None:
        """`known` is what is known of each unit's writer; a warp knows its own writes."""
        writer = self._writer[units]
        bad = (writer != _NOBODY) & (known < self._write_time[units])
        if not copied:
            bad &= writer != own
        if bad.any():
            unit = int(units[np.argmax(bad)])
            line, name = int(self._write_line[unit]), self._name(int(self._writer[unit]))
            self._report(text, verb, unit, name, line, "written")

    def _check_read(self, agent: int, units: Array, known: Array, own: Array | int, text: str) -> None:
        bad = (self._reads[agent][units] > known) & (own != agent)
        if bad.any():
            unit = int(units[np.argmax(bad)])
            self._report(text, "writes", unit, self._name(agent), int(self._read_line[unit]), "read")

    def _check_fenced(self, units: Array, fenced: Array, text: str) -> None:
        bad = self._ordinary[units] & (fenced[self._writer[units]] < self._write_time[units])
        if bad.any():
            unit = int(units[np.argmax(bad)])
            byte = unit * self._unit % self._machine.shared_stride
            raise RaceError(
                f"{text}: byte {byte} of shared memory was stored at "
                f"PTX line {int(self._write_line[unit])} and has passed no fence.proxy.async since"
            )

    def _name(self, agent: int) -> str:
        per_block = self._machine.warps_per_block
        if agent < self._first_store:
            return f"warp {agent % per_block}"
        if agent < self._first_product:
            return f"a bulk copy of warp {agent % per_block}"
        if agent < self._first_mbarrier:
            warp = (agent - self._first_product) % per_block
            return f"a product of the warpgroup of warp {warp}"
        return "a bulk copy"

    def _report(self, text: str, verb: str, unit: int, name: str, line: int, done: str) -> NoReturn:
        byte = unit * self._unit % self._machine.shared_stride
        raise RaceError(
            f"{text}: it {verb} byte {byte} of shared memory, which {name} has {done} at PTX line {line} "
            f"with nothing to order the two"
        )

    # -- bulk copies and products ---------------------------------------------------------------------------

    def bulk_write(
        self,
        ids: int,
        slots: Sequence[int],
        pieces: Array,
        barriers: Sequence[Mbarrier],
        text: str,
        line: int,
    ) -> None:
        """A bulk copy into shared memory begins; it ends with the phases of its mbarriers."""
        warp = int(self._warps_of(np.array([ids]))[0])
        for slot, barrier in zip(slots, barriers, strict=True):
            key = (barrier.slot, barrier.offset)
            if key not in self._ready:
                raise RaceError(
                    f"{text}: no fence.mbarrier_init or fence.proxy.async follows the mbarrier.init of "
                    f"{barrier.name()}"
                )
            units = self._units(pieces, slot)
            clock = self._clock[warp]
            self._check_written(units, clock[self._writer[units]], warp, text, "writes", copied=True)
            for agent in self._reads:
                self._check_read(agent, units, np.full(len(units), clock[agent]), warp, text)
            self._check_fenced(units, self._fenced[warp], text)
            agent = self._agents[key]
            self._writer[units] = agent
            self._write_time[units] = self._time[agent] + 1
            self._write_line[units] = line
            self._ordinary[units] = False

    def bulk_read(self, lane: int, slot: int, pieces: Array, text: str, line: int) -> tuple[int, int]:
        """A bulk copy out of shared memory begins; returns its agent and time, for `bulk_done`."""
        warp = int(self._warps_of(np.array([lane]))[0])
        units = self._units(pieces, slot)
        self._check_written(units, self._clock[warp][self._writer[units]], warp, text, "reads")
        self._check_fenced(units, self._fenced[warp], text)
        agent = self._first_store + warp
        self._time[agent] += 1
        self._note_read(agent, units, int(self._time[agent]), line)
        return agent, int(self._time[agent])

    def bulk_done(self, lane: int, event: tuple[int, int]) -> None:
        """A thread has waited for one of its bulk copies out of shared memory."""
        warp = int(self._warps_of(np.array([lane]))[0])
        agent, time = event
        self._clock[warp, agent] = max(self._clock[warp, agent], time)

    def product_read(self, ids: Array, slot: int, pieces: Array, group: int, text: str, line: int) -> None:
        """A product of a warpgroup's `group`-th group reads shared memory that all its warps must know."""
        warps = np.unique(self._warps_of(ids))
        units = self._units(np.unique(pieces), slot)
        known = self._clock[warps].min(axis=0)
        self._check_written(units, known[self._writer[units]], _NOBODY, text, "reads")
        self._check_fenced(units, self._fenced[warps].min(axis=0), text)
        self._note_read(self._first_product + int(warps[0]), units, group + 1, line)

    def products_done(self, ids: Array, groups: int) -> None:
        """A warpgroup has waited for its first `groups` groups of products."""
        warps = np.unique(self._warps_of(ids))
        self._clock[warps, self._first_product + int(warps[0])] = groups

    def proxy_fence(self, ids: Array, *, for_mbarriers: bool) -> None:
        """`fence.proxy.async`, or `fence.mbarrier_init`."""
        for warp in np.unique(self._warps_of(ids)).tolist():
            if not for_mbarriers:
                np.maximum(self._fenced[warp], self._clock[warp], out=self._fenced[warp])
            self._ready.update(
                key for key, (maker, time) in self._made.items() if self._clock[warp, maker] >= time
            )

    # -- handing clocks on ----------------------------------------------------------------------------------

    def release(self, ids: Array) -> Knowledge:
        """What the warps of some threads know now; whatever they do later is not in it."""
        warps = np.unique(self._warps_of(ids))
        known = Knowledge(self._clock[warps].max(axis=0), self._fenced[warps].max(axis=0))
        self._clock[warps, warps] += 1
        return known

    def acquire(self, ids: Array, known: Knowledge) -> None:
        """The warps of some threads learn what others have released."""
        warps = np.unique(self._warps_of(ids))
        self._clock[warps] = np.maximum(self._clock[warps], known.happened)
        self._fenced[warps] = np.maximum(self._fenced[warps], known.fenced)

    def mbarrier_made(self, lane: int, barrier: Mbarrier) -> None:
        """`mbarrier.init`."""
        key = (barrier.slot, barrier.offset)
        if key not in self._agents:
            if len(self._agents) == len(self._time) - self._first_mbarrier:
                raise EmulationError(
                    f"detect_races follows at most {len(self._agents)} mbarriers in a cluster of this size"
                )
            self._agents[key] = self._first_mbarrier + len(self._agents)
        warp = int(self._warps_of(np.array([lane]))[0])
        self._made[key] = (warp, int(self._clock[warp, warp]))
        self._ready.discard(key)
        first = (barrier.slot * self._machine.shared_stride + barrier.offset) // self._unit
        self._reserved[first : first + 8 // self._unit] = True

    def mbarrier_gone(self, barrier: Mbarrier) -> None:
        """`mbarrier.inval`: its bytes are ordinary memory again."""
        first = (barrier.slot * self._machine.shared_stride + barrier.offset) // self._unit
        self._reserved[first : first + 8 // self._unit] = False

    def mbarrier_used(self, lane: int, barrier: Mbarrier, text: str) -> None:
        """An operation on an mbarrier: its making must have happened before."""
        maker, time = self._made[barrier.slot, barrier.offset]
        warp = int(self._warps_of(np.array([lane]))[0])
        if self._clock[warp, maker] < time:
            raise RaceError(
                f"{text}: {self._machine.where(lane)} uses {barrier.name()}, "
                f"and nothing orders its making before"
            )

    def mbarrier_arrived(self, lane: int, barrier: Mbarrier) -> None:
        """A thread hands what it knows to those who wait."""
        known = self.release(np.array([lane]))
        key = (barrier.slot, barrier.offset)
        if key in self._waiting:
            self._waiting[key].join(known)
        else:
            self._waiting[key] = known

    def mbarrier_completed(self, barrier: Mbarrier) -> None:
        """A phase completes, and with it all copies that it counted."""
        key = (barrier.slot, barrier.offset)
        agent = self._agents[key]
        self._time[agent] += 1
        blank = Knowledge(np.zeros_like(self._clock[0]), np.zeros_like(self._fenced[0]))
        known = self._waiting.setdefault(key, blank)
        known.happened[agent] = self._time[agent]
        self._completed[key] = Knowledge(known.happened.copy(), known.fenced.copy())

    def mbarrier_passed(self, ids: Array, barrier: Mbarrier) -> None:
        """Threads have seen a phase complete."""
        known = self._completed.get((barrier.slot, barrier.offset))
        if known is not None:
            self.acquire(ids, known)
