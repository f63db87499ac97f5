"""Mbarrier instructions of many lanes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tilewave.emulator.hopper.cluster_lanes import ClusterLanes
from tilewave.emulator.hopper.mbarriers import MAX_COUNT, Mbarrier
from tilewave.emulator.lanes import Mask
from tilewave.emulator.ptx import Instruction
from tilewave.errors import BarrierError, MemoryFault

Array = npt.NDArray[Any]


class MbarrierLanes(ClusterLanes):
    """Lanes that make, count down and wait for mbarriers."""

    def mbarrier_at(self, slot: int, offset: int) -> Mbarrier:
        """The mbarrier at a byte of a block's shared memory."""
        barrier = self.machine.mbarriers.get((slot, offset))
        if barrier is None:
            raise BarrierError(
                f"{self.machine.current_line}: there is no mbarrier at byte {offset} of the shared memory of "
                f"{self.machine.block_name(slot)}"
            )
        return barrier

    def mbarrier_init(
        self, i: Instruction, addresses: Array, generic: bool, counts: Array, guard: Mask | None
    ) -> None:
        """`mbarrier.init`."""
        self.at(i)
        machine = self.machine
        lanes = self.chosen(guard)
        machine.events += len(lanes)
        slots, offsets = self.homes(addresses[lanes], lanes, generic=generic)
        for slot, offset, count in zip(
            slots.tolist(), offsets.tolist(), self.spread(counts)[lanes].tolist(), strict=True
        ):
            if offset % 8 or not machine.shared_start <= offset <= machine.shared_end - 8:
                raise MemoryFault(
                    f"{machine.current_line}: an mbarrier at byte {offset} is misaligned or outside "
                    f"{machine.shared.extent}",
                    lane=int(lanes[0]),
                    address=offset,
                )
            if (slot, offset) in machine.mbarriers:
                raise BarrierError(
                    f"{machine.current_line}: there is {machine.mbarriers[slot, offset].name()} already"
                )
            if not 1 <= count <= MAX_COUNT:
                raise BarrierError(f"{machine.current_line}: an mbarrier of {count} arrivals")
            barrier = machine.mbarriers[slot, offset] = Mbarrier(slot, offset, count, i.line)
            if machine.ordering is not None:
                machine.ordering.mbarrier_made(int(self.ids[lanes[0]]), barrier)

    def mbarrier_inval(self, i: Instruction, addresses: Array, generic: bool, guard: Mask | None) -> None:
        """`mbarrier.inval`."""
        self.at(i)
        lanes = self.chosen(guard)
        slots, offsets = self.homes(addresses[lanes], lanes, generic=generic)
        for slot, offset in zip(slots.tolist(), offsets.tolist(), strict=True):
            barrier = self.mbarrier_at(slot, offset)
            del self.machine.mbarriers[slot, offset]
            if self.machine.ordering is not None:
                self.machine.ordering.mbarrier_gone(barrier)

    def mbarrier_arrive(
        self,
        i: Instruction,
        addresses: Array,
        generic: bool,
        counts: Array,
        expected: Array | None,
        tokens: Array,
        guard: Mask | None,
        drop: bool,
        relaxed: bool,
    ) -> None:
        """`mbarrier.arrive`, `.arrive.expect_tx` and `.arrive_drop`; `tokens` receives the phases."""
        self.at(i)
        lanes = self.chosen(guard)
        slots, offsets = self.homes(addresses[lanes], lanes, generic=generic)
        numbers = self.spread(counts)[lanes].tolist()
        more = [0] * len(lanes) if expected is None else self.spread(expected)[lanes].tolist()
        self.machine.events += len(lanes)
        ordering = self.machine.ordering
        for lane, slot, offset, number, size in zip(
            lanes.tolist(), slots.tolist(), offsets.tolist(), numbers, more, strict=True
        ):
            barrier = self.mbarrier_at(slot, offset)
            tokens[lane] = barrier.phase
            if ordering is not None:
                ordering.mbarrier_used(int(self.ids[lane]), barrier, self.machine.current_line)
                if not relaxed:
                    ordering.mbarrier_arrived(int(self.ids[lane]), barrier)
            try:
                barrier.expect(size)
                barrier.arrive(number)
                if drop:
                    barrier.count -= number
            except BarrierError as error:
                raise BarrierError(f"{self.machine.current_line}: {self.where(lane)}: {error}") from None
            self.machine.complete(barrier)

    def arrive_after_copies(
        self, i: Instruction, addresses: Array, generic: bool, counted: bool, guard: Mask | None
    ) -> None:
        """`cp.async.mbarrier.arrive`."""
        self.at(i)
        lanes = self.chosen(guard)
        slots, offsets = self.homes(addresses[lanes], lanes, generic=generic)
        keys = slots << 32 | offsets
        for key in np.unique(keys).tolist():
            barrier = self.mbarrier_at(key >> 32, key & 0xFFFFFFFF)
            ids = self.ids[lanes[keys == key]]
            if self.machine.ordering is not None:
                self.machine.ordering.mbarrier_used(int(ids[0]), barrier, self.machine.current_line)
            self.machine.copy_arrivals.start(ids, barrier, counted=counted)

    def mbarrier_bytes(
        self,
        i: Instruction,
        addresses: Array,
        generic: bool,
        sizes: Array,
        guard: Mask | None,
        expect: bool,
    ) -> None:
        """`mbarrier.expect_tx` and `mbarrier.complete_tx`."""
        self.at(i)
        lanes = self.chosen(guard)
        slots, offsets = self.homes(addresses[lanes], lanes, generic=generic)
        self.machine.events += len(lanes)
        for slot, offset, size in zip(
            slots.tolist(), offsets.tolist(), self.spread(sizes)[lanes].tolist(), strict=True
        ):
            barrier = self.mbarrier_at(slot, offset)
            try:
                barrier.expect(size if expect else -size)
            except BarrierError as error:
                raise BarrierError(f"{self.machine.current_line}: {error}") from None
            self.machine.complete(barrier)

    def _ended(self, barrier: Mbarrier, tokens: Array) -> Array:
        """Whether the phases of these tokens have ended; a GPU cannot tell of phases longer ago."""
        known = (tokens == barrier.phase) | (tokens == barrier.phase - 1)
        if not known.all():
            raise BarrierError(
                f"{self.machine.current_line}: a wait at {barrier.name()}, which is in its phase "
                f"{barrier.phase}, with the token of phase {tokens[~known][0]}: accepted are tokens of the "
                f"current phase and of the one before"
            )
        return np.asarray(tokens < barrier.phase)

    def mbarrier_wait(
        self,
        i: Instruction,
        addresses: Array,
        generic: bool,
        states: Array,
        parity: bool,
        result: Array,
        guard: Mask | None,
        relaxed: bool,
    ) -> None:
        """`mbarrier.try_wait` and `.test_wait`; lanes that fail sleep until the phase completes."""
        self.at(i)
        lanes = self.chosen(guard)
        slots, offsets = self.homes(addresses[lanes], lanes, generic=generic)
        wanted = self.spread(states)[lanes]
        keys = slots << 32 | offsets
        for key in np.unique(keys).tolist():
            barrier = self.mbarrier_at(key >> 32, key & 0xFFFFFFFF)
            here = keys == key
            if parity:
                if (wanted[here] > 1).any():
                    raise BarrierError(f"{self.machine.current_line}: a parity other than 0 and 1")
                done = (barrier.phase & 1) != wanted[here]
            else:
                done = self._ended(barrier, wanted[here].astype(np.int64))
            result[lanes[here]] = done
            if self.machine.ordering is not None:
                ids = self.ids[lanes[here]]
                self.machine.ordering.mbarrier_used(int(ids[0]), barrier, self.machine.current_line)
                if done.any() and not relaxed:
                    self.machine.ordering.mbarrier_passed(ids[done], barrier)
            if not done.all():
                self.machine.failed.append((self.ids[lanes[here][~done]], barrier, i.line))
