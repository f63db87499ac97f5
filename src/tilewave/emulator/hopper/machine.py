"""The scheduler of kernels whose warps go their own ways: producers, consumers, clusters, things in flight.

One machine runs the blocks of one cluster. At every step a random warp runs its next basic block, together
with the other warps that stand there (with a seed: sometimes alone), or something in flight lands. A thread
whose `try_wait` failed sleeps until its mbarrier's phase completes; when nothing can move any more, the
deadlock is reported with everything that is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewave.emulator.flow import BasicBlock, End
from tilewave.emulator.hopper.bulk import BulkCopies
from tilewave.emulator.hopper.copy_arrivals import CopyArrivals
from tilewave.emulator.hopper.lanes import HopperLanes
from tilewave.emulator.hopper.matrix import MatrixUnits
from tilewave.emulator.hopper.mbarriers import Mbarrier
from tilewave.emulator.hopper.ordering import Knowledge, Ordering
from tilewave.emulator.hopper.register_pool import RegisterPool
from tilewave.emulator.machine import Machine, Shape
from tilewave.emulator.memory import Memory
from tilewave.emulator.program import Program
from tilewave.emulator.registers import RegisterFile
from tilewave.errors import BarrierError, EmulationError

Ids = npt.NDArray[np.int64]

WARPS_PER_GROUP = 4
_GROUP = 128
_NOWHERE = 1 << 40
_PATIENCE = 64  # times that all may poll in vain before it is a deadlock
_LANDINGS = 0.2  # of the steps with a seed, in which something in flight lands
_DETOURS = 1 / 16  # of the steps, in which lanes of a warp may overtake others of the same warp
_RUNNING, _SPINNING, _BLOCKED, _ENDED = range(4)


@dataclass
class _Gathering:
    """Threads at a numbered barrier of a block."""

    expected: int | None
    arrived: int = 0
    waiting: list[Ids] = field(default_factory=list)
    known: Knowledge | None = None  # of those who have come, for the race detection

    def learn(self, known: Knowledge) -> None:
        """Add what some that have come know."""
        if self.known is None:
            self.known = known
        else:
            self.known.join(known)


class HopperMachine(Machine):
    """The blocks of a cluster, from their first instruction to their last."""

    def __init__(
        self,
        program: Program,
        memory: Memory,
        grid: Shape,
        block: Shape,
        parameters: dict[str, bytes],
        block_ids: Sequence[int],
        *,
        cluster: Shape,
        registers: int | None,
        seed: int | None,
        **options: Any,
    ) -> None:
        detect_races = options.pop("detect_races")
        super().__init__(program, memory, grid, block, parameters, block_ids, detect_races=False, **options)
        self.cluster = cluster
        self.scatters = seed is not None
        self.rng = np.random.default_rng(seed or 0)
        self.events = 0
        self.current_line = ""  # of the instruction being executed, for messages
        self.mbarriers: dict[tuple[int, int], Mbarrier] = {}
        self.copies_in_flight = BulkCopies(self)
        self.copy_arrivals = CopyArrivals(self)
        self.matrix = MatrixUnits(self)
        self.pool = RegisterPool(self, registers)
        self.ordering = Ordering(self) if detect_races else None
        self.races = self.ordering
        self.failed: list[tuple[Ids, Mbarrier, int]] = []  # waits of the current step
        self._pc = np.zeros(self.lane_count, dtype=np.int64)
        self._state = np.full(self.lane_count, _RUNNING, dtype=np.int8)
        self._spins: dict[int, tuple[Mbarrier, int]] = {}  # by lane: mbarrier, and line of the wait
        self._gatherings: dict[tuple[int, int], _Gathering] = {}
        self._blocked_at: dict[int, int] = {}  # by lane: basic block
        self._cluster = _Gathering(None)
        self._cluster_known: Knowledge | None = None  # of the phase before
        self._cluster_arrived = np.zeros(self.lane_count, dtype=np.bool_)
        self._cluster_owed = np.zeros(self.lane_count, dtype=np.bool_)
        self._cluster_waiting = np.zeros(self.lane_count, dtype=np.bool_)
        self._polls, self._last_events = 0, -1
        ids = np.arange(self.lane_count)
        starts = [
            slot * self.threads + first
            for slot in range(len(self.block_ids))
            for first in range(0, self.threads, 32)
        ]
        self._warp_starts = np.array(starts, dtype=np.int64)
        self._warp_of = np.searchsorted(self._warp_starts, ids, side="right") - 1
        groups = [start for start in starts if start % self.threads % _GROUP == 0]
        self._group_starts = np.array(groups, dtype=np.int64)
        self._group_of_warp = np.searchsorted(self._group_starts, self._warp_starts, side="right") - 1
        self._known_lanes: dict[tuple[int, int], HopperLanes] = {}

    # -- running --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run all blocks to their end."""
        while not self.finished:
            self.step()

    @property
    def finished(self) -> bool:
        """Whether every thread has ended and everything in flight has landed."""
        return bool((self._state == _ENDED).all()) and not self._in_flight()

    def _in_flight(self) -> list[BulkCopies | CopyArrivals]:
        """Queues in which something waits to land."""
        queues: list[BulkCopies | CopyArrivals] = [self.copies_in_flight, self.copy_arrivals]
        return [queue for queue in queues if len(queue)]

    def _land(self) -> bool:
        """Let something in flight land, if anything is."""
        queues = self._in_flight()
        if queues:
            queues[int(self.rng.integers(len(queues)))].land_one()
        return bool(queues)

    def step(self) -> None:
        """Let something happen: a basic block of some warps, or a landing."""
        if self.scatters and self.rng.random() < _LANDINGS and self._land():
            return
        found = self._choose()
        if found is None:
            self._stalled()
            return
        index, ids = found
        block = self.program.blocks[index]
        self.steps += 1
        if self.steps > self.step_limit:
            raise EmulationError(
                f"{self._line(block)}: still running after {self.step_limit} basic blocks: an endless loop?"
            )
        self._execute(block, ids)

    def _choose(self) -> tuple[int, Ids] | None:
        """A basic block and lanes that can run it."""
        program = self.program
        places = np.where(self._state == _RUNNING, self._pc, _NOWHERE)
        low = np.minimum.reduceat(places, self._warp_starts)
        ready = low < _NOWHERE
        if not ready.any():
            return None
        collective = program.collective[np.where(ready, low, 0)] & ready
        if collective.any():
            alive = np.where(self._state == _ENDED, -1, places)
            least = np.minimum.reduceat(alive, self._group_starts)
            most = np.maximum.reduceat(alive, self._group_starts)
            together = (least == most)[self._group_of_warp]
            ready &= ~collective | together
        # Lanes that a warp-wide instruction names may still be on their way.
        converge = program.convergent[np.where(low < _NOWHERE, low, 0)] & ready
        unmet = np.zeros_like(ready)
        if converge.any():
            alive = np.where(self._state == _ENDED, -1, places)
            unmet = converge & (np.maximum.reduceat(alive, self._warp_starts) != low)
            ready &= ~unmet
        choices = np.flatnonzero(ready)
        if (detour := self._detour(places, low, choices)) is not None:
            return detour
        if not len(choices):
            ready = unmet
            choices = np.flatnonzero(ready)
            if not len(choices):
                return None
        warp = int(choices[self.rng.integers(len(choices))])
        index = int(low[warp])
        members = ready & (low == index)
        if self.scatters and self.rng.random() < 0.5:
            if program.collective[index]:
                members &= self._group_of_warp == self._group_of_warp[warp]
            else:
                members &= np.arange(len(members)) == warp
        if program.collective[index]:
            # Products work on views of the register file: one stretch of lanes at a time.
            members = _stretch(members, warp)
        ids = np.flatnonzero((places == index) & members[self._warp_of])
        return index, ids

    def _detour(self, places: Ids, low: Ids, ready: Ids) -> tuple[int, Ids] | None:
        """Lanes of a diverged warp that are further on than those whose turn it would be.

        Those behind may wait for them at an instruction for all, or poll for what they do.
        """
        if len(ready) and self.rng.random() >= _DETOURS:
            return None
        high = np.maximum.reduceat(np.where(places < _NOWHERE, places, -1), self._warp_starts)
        for warp in self.rng.permutation(np.flatnonzero(high > low)).tolist():
            lanes = np.flatnonzero((self._warp_of == warp) & (places < _NOWHERE))
            found = np.unique(places[lanes])[1:]
            found = found[~(self.program.collective | self.program.convergent)[found]]
            if len(found):
                index = int(found[self.rng.integers(len(found))])
                return index, lanes[places[lanes] == index]
        return None

    def _execute(self, block: BasicBlock, ids: Ids) -> None:
        index = block.index
        code = self.program.codes[index]
        n, start = len(ids), int(ids[0])
        contiguous = int(ids[-1]) - start + 1 == n
        self.failed.clear()
        if contiguous:
            lanes = self._known_lanes.get((start, n))
            if lanes is None:
                lanes = self._known_lanes[start, n] = HopperLanes(self, ids)
            file = self.file
            if self.trace is not None:
                self.trace.enter(lanes, block)
            code.function(lanes, *file.rows(index, code.names, n, start))
            taken = file.row(code.condition, n, start) if code.condition is not None else None
        else:
            lanes = HopperLanes(self, ids)
            if self._part_file is None:
                self._part_file = RegisterFile(self.program.slots, self.program.scratch_rows, self.lane_count)
            file = self._part_file
            file.copy_lanes(self.file, ids, self.program.entry_slots[index])
            if self.trace is not None:
                self.trace.enter(lanes, block)
            code.function(lanes, *file.rows(index, code.names, n))
            file.return_lanes(self.file, ids, self.program.exit_slots[index])
            taken = file.row(code.condition, n) if code.condition is not None else None
        if self.counting:
            self._block_warps[index] += lanes.warps
            self._block_lanes[index] += n
        self._go_on(block, lanes, taken)

    def _go_on(self, block: BasicBlock, lanes: HopperLanes, taken: npt.NDArray[np.bool_] | None) -> None:
        """Send the lanes on to where the block's end leads."""
        ids = lanes.ids
        following = np.full(lanes.n, block.index + 1, dtype=np.int64)
        if block.end is End.JUMP:
            following[:] = block.target
        elif block.end is End.BRANCH:
            assert taken is not None
            following[~taken if block.condition_negated else taken] = block.target
        self._pc[ids] = following
        ended = following == self._leave
        if ended.any():
            self._end(ids[ended])
        if block.end is End.BARRIER:
            self._block_lanes_at(block, lanes)
        for failed, barrier, line in self.failed:
            chosen = failed[self._state[failed] == _RUNNING]
            self._state[chosen] = _SPINNING
            for lane in chosen.tolist():
                self._spins[lane] = (barrier, line)

    def _end(self, ids: Ids) -> None:
        self.events += 1
        self._state[ids] = _ENDED
        self._exited[ids] = True
        slots = np.unique(ids // self.threads)
        ended = self.ended_blocks()
        self.copies_in_flight.check_ended([slot for slot in slots.tolist() if ended[slot]])
        for key, gathering in list(self._gatherings.items()):
            self._complete(key, gathering)
        self._complete_cluster()

    def ended_blocks(self) -> npt.NDArray[np.bool_]:
        """For each block of the cluster, whether all its threads have ended."""
        ended: npt.NDArray[np.bool_] = (self._state.reshape(-1, self.threads) == _ENDED).all(axis=1)
        return ended

    # -- waiting --------------------------------------------------------------------------------------------

    def wake(self, barrier: Mbarrier) -> None:
        """The phase of an mbarrier has completed: whoever waits for it looks again."""
        for lane in [lane for lane, (waited, _) in self._spins.items() if waited is barrier]:
            del self._spins[lane]
            self._state[lane] = _RUNNING

    def wake_blocked(self, ids: Ids) -> None:
        """Lanes held at the end of a basic block go on."""
        self.events += 1
        self._state[ids] = _RUNNING
        for lane in ids.tolist():
            self._blocked_at.pop(lane, None)

    def complete(self, barrier: Mbarrier) -> None:
        """Begin an mbarrier's next phase if nothing is pending in this one."""
        if barrier.try_complete():
            if self.ordering is not None:
                self.ordering.mbarrier_completed(barrier)
            self.wake(barrier)

    def _block_lanes_at(self, block: BasicBlock, lanes: HopperLanes) -> None:
        """Hold lanes at an instruction that may block, which has been executed up to the waiting itself."""
        instruction = self.program.entry.instructions[block.stop - 1]
        ids = lanes.ids
        self.events += 1
        self._state[ids] = _BLOCKED
        self._blocked_at.update(dict.fromkeys(ids.tolist(), block.index))
        if instruction.opcode == "setmaxnreg":
            self.pool.grow(ids)
        elif "cluster" in instruction.modifiers:
            self._cluster_wait(block, ids)
        else:
            self._gather(lanes)

    def _gather(self, lanes: HopperLanes) -> None:
        numbers, counts = lanes.barrier
        for slot in np.unique(lanes.block_slots).tolist():
            for number in np.unique(numbers[lanes.block_slots == slot]).tolist():
                chosen = (lanes.block_slots == slot) & (numbers == number)
                expected = int(counts[chosen][0])
                self.arrive_at_barrier(lanes.ids[chosen], slot, number, expected or None, waits=True)

    def arrive_at_barrier(
        self, ids: Ids, slot: int, number: int, expected: int | None, *, waits: bool
    ) -> None:
        """`bar.sync` (`waits`) and `bar.arrive` of some threads of one block."""
        self.events += 1
        if not 0 <= number < 16 or (expected is not None and (expected % 32 or not 0 < expected <= 1024)):
            raise BarrierError(
                f"{self.current_line}: barrier {number} for {expected} threads: accepted are barriers "
                f"0 to 15 and multiples of 32 threads"
            )
        key = (slot, number)
        gathering = self._gatherings.setdefault(key, _Gathering(expected))
        if gathering.expected != expected:
            raise BarrierError(
                f"{self.current_line}: barrier {number} of {self.block_name(slot)} is given "
                f"{expected or 'all'} threads here; threads before came with {gathering.expected or 'all'}"
            )
        gathering.arrived += len(ids)
        if self.ordering is not None:
            gathering.learn(self.ordering.release(ids))
        if expected is not None and gathering.arrived > expected:
            raise BarrierError(
                f"{self.current_line}: {gathering.arrived} threads come to barrier {number} of "
                f"{self.block_name(slot)}, which is for {expected}"
            )
        if waits:
            gathering.waiting.append(ids)
        self._complete(key, gathering)

    def _complete(self, key: tuple[int, int], gathering: _Gathering) -> None:
        """Let the threads at a barrier go if all have come."""
        slot = key[0]
        expected = gathering.expected
        if expected is None:
            exited = self._exited.reshape(-1, self.threads)[slot]
            gone = int(exited.sum())
            if gathering.arrived != self.threads - gone:
                return
            if gone and not self.allow_exited:
                waits = int(gathering.waiting[0][0])
                block = self.program.blocks[self._blocked_at[waits]]
                raise BarrierError(
                    f"{self._line(block)}: {gone} of {self.threads} threads never come to this barrier: "
                    f"{self.where(slot * self.threads + int(np.argmax(exited)))} has ended while "
                    f"{self.where(waits)} waits"
                )
        elif gathering.arrived != expected:
            return
        del self._gatherings[key]
        if gathering.waiting:
            released = np.concatenate(gathering.waiting)
            if self.ordering is not None and gathering.known is not None:
                self.ordering.acquire(released, gathering.known)
            self.wake_blocked(released)

    def cluster_arrive(self, ids: Ids, *, relaxed: bool) -> None:
        """`barrier.cluster.arrive`."""
        self.events += 1
        if self._cluster_owed[ids].any():
            lane = int(ids[np.argmax(self._cluster_owed[ids])])
            raise BarrierError(
                f"{self.current_line}: {self.where(lane)} arrives at the cluster's barrier twice without "
                f"waiting"
            )
        self._cluster_arrived[ids] = True
        self._cluster_owed[ids] = True
        if self.ordering is not None and not relaxed:
            self._cluster.learn(self.ordering.release(ids))
        self._complete_cluster()

    def _complete_cluster(self) -> None:
        """Let the threads at the cluster's barrier go if all that have not ended have arrived."""
        if not self._cluster_arrived.any() or not (self._cluster_arrived | self._exited).all():
            return
        self._cluster_arrived[:] = False
        waiting = np.flatnonzero(self._cluster_waiting)
        self._cluster_waiting[:] = False
        self._cluster_known, self._cluster = self._cluster.known, _Gathering(None)
        self._pass_cluster(waiting)

    def _cluster_wait(self, block: BasicBlock, ids: Ids) -> None:
        if not self._cluster_owed[ids].all():
            lane = int(ids[np.argmin(self._cluster_owed[ids])])
            raise BarrierError(f"{self._line(block)}: {self.where(lane)} waits but has not arrived")
        self._cluster_owed[ids] = False
        held = self._cluster_arrived[ids]
        self._cluster_waiting[ids[held]] = True
        self._pass_cluster(ids[~held])

    def _pass_cluster(self, ids: Ids) -> None:
        if self.ordering is not None and self._cluster_known is not None and len(ids):
            self.ordering.acquire(ids, self._cluster_known)
        self.wake_blocked(ids)

    # -- when nothing moves ---------------------------------------------------------------------------------

    def _stalled(self) -> None:
        if self._land():
            return
        self._polls = self._polls + 1 if self.events == self._last_events else 0
        self._last_events = self.events
        if self._spins and self._polls < _PATIENCE:
            # Who polls may do something else in between: let them.
            self._state[list(self._spins)] = _RUNNING
            self._spins.clear()
            return
        self._report_deadlock()

    def _report_deadlock(self) -> None:
        """Say who waits for what."""
        code = self.program.entry.instructions
        reasons: dict[str, list[int]] = {}
        for lane in np.flatnonzero(self._state != _ENDED).tolist():
            if lane in self._spins:
                barrier, line = self._spins[lane]
                text = next(i.text for i in code if i.line == line and i.opcode == "mbarrier")
                reason = f"PTX line {line} ({text}): {barrier.name()}: {barrier.state()}"
            elif self._state[lane] == _BLOCKED:
                block = self.program.blocks[self._blocked_at[lane]]
                reason = f"{self._line(block)}{self._barrier_state(lane, block)}"
            else:
                block = self.program.blocks[int(self._pc[lane])]
                first = code[block.first]
                reason = f"PTX line {first.line} ({first.text}): the other warps of the warpgroup"
            reasons.setdefault(reason, []).append(lane)
        ended = int((self._state == _ENDED).sum())
        parts = [f"{self._who(lanes)} at {reason}" for reason, lanes in reasons.items()]
        tail = f"; {ended} threads have ended" if ended else ""
        raise BarrierError(f"deadlock: {'; '.join(parts)}{tail}")

    def _barrier_state(self, lane: int, block: BasicBlock) -> str:
        instruction = self.program.entry.instructions[block.stop - 1]
        if instruction.opcode == "setmaxnreg":
            return f": {self.pool.state(lane // self.threads)}"
        if "cluster" in instruction.modifiers:
            return f": {int(self._cluster_arrived.sum())} of {self.lane_count} threads of the cluster arrived"
        slot = lane // self.threads
        for (owner, number), gathering in self._gatherings.items():
            if owner == slot and any(lane in ids for ids in gathering.waiting):
                expected = gathering.expected or self.threads
                return f": {gathering.arrived} of {expected} threads have come to barrier {number}"
        return ""

    def _who(self, lanes: list[int]) -> str:
        first = self.where(lanes[0])
        return f"{len(lanes)} threads ({first} first) wait" if len(lanes) > 1 else f"{first} waits"


def _stretch(members: npt.NDArray[np.bool_], warp: int) -> npt.NDArray[np.bool_]:
    """The members that are neighbours of a warp, without a gap."""
    number = np.cumsum(~members)
    near: npt.NDArray[np.bool_] = members & (number == number[warp])
    return near
