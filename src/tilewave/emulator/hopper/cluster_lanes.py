"""Lanes in a cluster: addresses of its shared memories, barriers, register counts, elections."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewave.emulator.codegen import Access
from tilewave.emulator.lanes import WARP, Lanes, Mask
from tilewave.emulator.layout import SHARED_WINDOW, WINDOW_BYTES
from tilewave.emulator.ptx import Instruction
from tilewave.errors import BarrierError, EmulationError, MemoryFault

if TYPE_CHECKING:
    from tilewave.emulator.hopper.machine import HopperMachine

Array = npt.NDArray[Any]

RANK_SHIFT = 24
"""A shared::cluster address holds the block's rank plus 1 above this bit; 0 is the own block."""


class ClusterLanes(Lanes):
    """Lanes of a `HopperMachine`."""

    machine: HopperMachine

    def __init__(self, machine: HopperMachine, ids: npt.NDArray[np.int64]) -> None:
        super().__init__(machine, ids)
        self.barrier: tuple[Array, Array] = (ids, ids)

    # -- helpers --------------------------------------------------------------------------------------------

    def at(self, instruction: Instruction) -> None:
        """Note the instruction being executed, for messages."""
        self.machine.current_line = f"PTX line {instruction.line}: {instruction.text}"

    def chosen(self, guard: Mask | None) -> npt.NDArray[np.int64]:
        """Positions of the lanes that are on."""
        return np.arange(self.n) if guard is None else np.flatnonzero(guard)

    def homes(self, addresses: Array, lanes: Array, *, generic: bool) -> tuple[Array, Array]:
        """Blocks (slots of the machine) and byte offsets of shared addresses, one for each of some lanes."""
        places = addresses.astype(np.int64)
        if generic:
            outside = (places < SHARED_WINDOW) | (places >= SHARED_WINDOW + WINDOW_BYTES)
            if outside.any():
                raise MemoryFault(
                    f"{self.machine.current_line}: the address {int(places[outside][0]):#x} of "
                    f"{self.where(int(lanes[np.argmax(outside)]))} is not in shared memory",
                    lane=int(lanes[np.argmax(outside)]),
                    address=int(places[outside][0]),
                )
            places = places - SHARED_WINDOW
        ranks = places >> RANK_SHIFT
        slots = np.where(ranks == 0, self.block_slots[lanes], ranks - 1)
        if (slots >= len(self.machine.block_ids)).any() or (places < 0).any():
            bad = int(np.argmax((slots >= len(self.machine.block_ids)) | (places < 0)))
            raise MemoryFault(
                f"{self.machine.current_line}: the address {int(places[bad]):#x} of "
                f"{self.where(int(lanes[bad]))} is not in the shared memory of its cluster",
                lane=int(lanes[bad]),
                address=int(places[bad]),
            )
        self.check_alive(lanes, slots)
        return slots, places & ((1 << RANK_SHIFT) - 1)

    def check_alive(self, lanes: Array, slots: Array) -> None:
        """A block's shared memory is gone when all its threads have ended."""
        gone = self.machine.ended_blocks()[slots]
        if gone.any():
            bad = int(np.argmax(gone))
            raise MemoryFault(
                f"{self.machine.current_line}: {self.where(int(lanes[bad]))} reaches into the shared memory "
                f"of block {int(slots[bad])} of its cluster, which has ended",
                lane=int(lanes[bad]),
                address=0,
            )

    def transfer(
        self,
        access: Access,
        space: str,
        addresses: Array,
        rows: list[Array],
        mask: Mask | None,
        *,
        store: bool,
    ) -> None:
        """Move words between registers and memory, that of other blocks of the cluster included."""
        if space != "shared" or not len(addresses) or int(addresses.max()) < 1 << RANK_SHIFT:
            super().transfer(access, space, addresses, rows, mask, store=store)
            return
        lanes = self.chosen(mask)
        self.at(access.instruction)
        slots, offsets = self.homes(addresses[lanes], lanes, generic=False)
        part = [row[lanes] for row in rows]
        try:
            self.machine.shared.access(offsets, access.width, slots * self.machine.threads, part, store=store)
        except MemoryFault as error:
            error.lane = int(lanes[0])
            self.fault(access, error)
        if not store:
            for row, values in zip(rows, part, strict=True):
                row[lanes] = values

    def _special(self, name: str) -> Array:
        kind, _, axis = name[1:].partition(".")
        shape = self.machine.cluster
        if axis and kind in ("clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid"):
            index = "xyz".index(axis)
            place = self.machine.block_indices[index][self.block_slots]
            values = {
                "clusterid": place // shape[index],
                "nclusterid": np.array(self.machine.grid[index] // shape[index]),
                "cluster_ctaid": place % shape[index],
                "cluster_nctaid": np.array(shape[index]),
            }
            return values[kind]
        if kind == "cluster_nctarank":
            return np.array(shape[0] * shape[1] * shape[2])
        if kind == "cluster_ctarank":
            return self.block_slots
        return super()._special(name)

    # -- barriers, registers, warps -------------------------------------------------------------------------

    def at_barrier(self, i: Instruction, number: Array, count: Array) -> None:
        """`bar.sync`: which barrier, for how many threads (0: all); the machine does the rest."""
        self.at(i)
        self.barrier = self.spread(number).astype(np.int64), self.spread(count).astype(np.int64)

    def arrive_at_barrier(self, i: Instruction, number: Array, count: Array, guard: Mask | None) -> None:
        """`bar.arrive`."""
        self.at(i)
        lanes = self.chosen(guard)
        if not len(lanes):
            return
        if len(np.unique(self.warp_places[lanes] // WARP)) * WARP != len(lanes):
            raise BarrierError(f"{self.machine.current_line}: not all threads of a warp arrive")
        numbers, counts = self.spread(number)[lanes], self.spread(count)[lanes]
        slots = self.block_slots[lanes]
        for slot in np.unique(slots).tolist():
            for which in np.unique(numbers[slots == slot]).tolist():
                here = (slots == slot) & (numbers == which)
                ids = self.ids[lanes[here]]
                self.machine.arrive_at_barrier(ids, slot, int(which), int(counts[here][0]), waits=False)

    def proxy_fence(self, for_mbarriers: bool, guard: Mask | None) -> None:
        """`fence.proxy.async`, or `fence.mbarrier_init`."""
        if self.machine.ordering is not None:
            self.machine.ordering.proxy_fence(self.ids[self.chosen(guard)], for_mbarriers=for_mbarriers)

    def cluster_arrive(self, i: Instruction, guard: Mask | None, relaxed: bool) -> None:
        """`barrier.cluster.arrive`."""
        self.at(i)
        self.machine.cluster_arrive(self.ids[self.chosen(guard)], relaxed=relaxed)

    def set_registers(self, i: Instruction, count: int, grow: bool) -> None:
        """`setmaxnreg`."""
        self.at(i)
        self.whole_warpgroups(i)
        self.machine.pool.request(self.ids, count, grow=grow)

    def whole_warpgroups(self, i: Instruction) -> int:
        """The number of warpgroups here; a fault if one is not complete."""
        if self.n % 128 or (self.threads.reshape(-1, 128)[:, 0] % 128).any():
            raise EmulationError(
                f"PTX line {i.line}: {i.text}: executed by {self.n} threads from {self.where(0)} on; "
                f"it takes whole warpgroups of 128 threads"
            )
        return self.n // 128

    def elect(self, i: Instruction, members: Array, leader: Array, chosen: Array) -> None:
        """`elect.sync`: the first lane of the member mask is the leader."""
        self._check_members(i, members, None)
        masks = self.spread(members).astype(np.int64)
        first = np.log2(masks & -masks).astype(np.int64)
        leader[...] = first
        chosen[...] = self.threads % WARP == first

    def map_address(
        self, i: Instruction, addresses: Array, ranks: Array, result: Array, guard: Mask | None
    ) -> None:
        """`mapa`: the address of the same byte in another block of the cluster."""
        self.at(i)
        lanes = self.chosen(guard)
        blocks = len(self.machine.block_ids)
        if (ranks[lanes] >= blocks).any():
            bad = int(ranks[lanes].max())
            raise EmulationError(
                f"{self.machine.current_line}: there is no block {bad} in a cluster of {blocks}"
            )
        window = np.uint64(
            SHARED_WINDOW if result.dtype.itemsize == 8 and "shared::cluster" not in i.modifiers else 0
        )
        own = (addresses.astype(np.uint64) - window) & np.uint64((1 << RANK_SHIFT) - 1)
        mapped = (ranks.astype(np.uint64) + np.uint64(1)) << np.uint64(RANK_SHIFT) | own
        result[...] = (mapped + window).astype(result.dtype)
