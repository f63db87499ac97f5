"""What Hopper's instructions do for the lanes that execute a basic block: bulk copies and products."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tilewave.emulator.hopper.matrix import GROUP, Descriptor, Format, Product
from tilewave.emulator.hopper.mbarrier_lanes import MbarrierLanes
from tilewave.emulator.hopper.tiles import Box, Run, Tile
from tilewave.emulator.lanes import Mask
from tilewave.emulator.layout import PARAMETER_WINDOW, WINDOW_BYTES
from tilewave.emulator.ptx import Instruction, Register
from tilewave.emulator.tensor_maps import decode
from tilewave.errors import EmulationError, MemoryFault, RaceError, TilewaveError
from tilewave.tensor_map import TENSOR_MAP_BYTES

Array = npt.NDArray[Any]


class HopperLanes(MbarrierLanes):
    """Lanes of a `HopperMachine`."""

    # -- bulk copies ----------------------------------------------------------------------------------------

    def boxes(
        self, i: Instruction, maps: Array, space: str, coordinates: list[Array], guard: Mask | None
    ) -> dict[int, Tile]:
        """Each lane's box of a tensor."""
        self.at(i)
        tiles: dict[int, Tile] = {}
        for lane in self.chosen(guard).tolist():
            address = int(maps[lane])
            if address % 64:
                raise MemoryFault(
                    f"{self.machine.current_line}: a tensor map at {address:#x}, which is no multiple of 64",
                    lane=lane,
                    address=address,
                )
            try:
                tensor = decode(self._bytes_at(address, space))
                tiles[lane] = Box(tensor, tuple(int(axis[lane]) for axis in coordinates))
            except MemoryFault:
                raise
            except TilewaveError as error:
                raise EmulationError(f"{self.machine.current_line}: {self.where(lane)}: {error}") from None
        return tiles

    def runs(self, i: Instruction, addresses: Array, sizes: Array, guard: Mask | None) -> dict[int, Tile]:
        """Each lane's run of bytes."""
        self.at(i)
        tiles: dict[int, Tile] = {}
        for lane in self.chosen(guard).tolist():
            try:
                tiles[lane] = Run(int(addresses[lane]), int(sizes[lane]))
            except EmulationError as error:
                raise EmulationError(f"{self.machine.current_line}: {self.where(lane)}: {error}") from None
        return tiles

    def _bytes_at(self, address: int, space: str) -> bytes:
        """The bytes of a tensor map: a parameter's, or global memory's."""
        if space == "param" or PARAMETER_WINDOW <= address < PARAMETER_WINDOW + WINDOW_BYTES:
            first = address % WINDOW_BYTES
            data = self.machine.parameter_data[first : first + TENSOR_MAP_BYTES].tobytes()
            if len(data) == TENSOR_MAP_BYTES:
                return data
            raise MemoryFault(
                f"{self.machine.current_line}: a tensor map outside the parameters", lane=0, address=address
            )
        places = np.arange(address, address + TENSOR_MAP_BYTES, 4)
        return self.machine.memory.load(places, 4)[0].tobytes()

    def bulk_load(
        self,
        i: Instruction,
        targets: Array,
        tiles: dict[int, Tile],
        barriers: Array,
        masks: Array | None,
        guard: Mask | None,
    ) -> None:
        """`cp.async.bulk` into shared memory, of one block or (`masks`) of several of the cluster."""
        self.at(i)
        lanes = self.chosen(guard)
        slots, offsets = self.homes(targets[lanes], lanes, generic=False)
        owners, places = self.homes(barriers[lanes], lanes, generic=False)
        for lane, slot, offset, owner, place in zip(
            lanes.tolist(), slots.tolist(), offsets.tolist(), owners.tolist(), places.tolist(), strict=True
        ):
            if owner != slot:
                raise EmulationError(
                    f"{self.machine.current_line}: {self.where(lane)}: the copy's target and its mbarrier "
                    f"are in the shared memories of different blocks"
                )
            several = [slot]
            if masks is not None:
                mask = int(masks[lane])
                several = [rank for rank in range(16) if mask >> rank & 1]
                if not several or several[-1] >= len(self.machine.block_ids):
                    raise EmulationError(
                        f"{self.machine.current_line}: {self.where(lane)}: the multicast mask {mask:#x} "
                        f"names blocks that a cluster of {len(self.machine.block_ids)} does not have"
                    )
                self.check_alive(np.full(len(several), lane), np.array(several))
            self.machine.copies_in_flight.load(self, lane, tiles[lane], several, offset, place, i.line)

    def bulk_store(self, i: Instruction, sources: Array, tiles: dict[int, Tile], guard: Mask | None) -> None:
        """`cp.async.bulk` from the block's shared memory to global memory."""
        self.at(i)
        lanes = self.chosen(guard)
        slots, offsets = self.homes(sources[lanes], lanes, generic=False)
        for lane, slot, offset in zip(lanes.tolist(), slots.tolist(), offsets.tolist(), strict=True):
            try:
                tiles[lane].check_target()
            except EmulationError as error:
                raise EmulationError(f"{self.machine.current_line}: {self.where(lane)}: {error}") from None
            self.machine.copies_in_flight.store(self, lane, tiles[lane], slot, offset, i.line)

    def commit_bulk(self, i: Instruction, guard: Mask | None) -> None:
        """`cp.async.bulk.commit_group`."""
        self.at(i)
        self.machine.copies_in_flight.commit(self.ids[self.chosen(guard)])

    def wait_bulk(self, i: Instruction, newest: int, read_only: bool, guard: Mask | None) -> None:
        """`cp.async.bulk.wait_group`."""
        self.at(i)
        self.machine.copies_in_flight.wait(self.ids[self.chosen(guard)], newest, read_only=read_only)

    # -- products -------------------------------------------------------------------------------------------

    def product(
        self,
        i: Instruction,
        accumulators: list[Array],
        a: Array | list[Array],
        b: Array,
        adds: Array,
        form: Format,
        columns: int,
        transposed: tuple[bool, bool],
        negated: tuple[bool, bool],
        registers: frozenset[Register],
    ) -> None:
        """`wgmma.mma_async` of each warpgroup here."""
        self.at(i)
        for group in range(self.whole_warpgroups(i)):
            here = slice(group * GROUP, (group + 1) * GROUP)
            product = Product(
                i,
                self.ids[here],
                int(self.block_slots[group * GROUP]),
                form,
                columns,
                [row[here] for row in accumulators],
                [row[here] for row in a] if isinstance(a, list) else self._descriptor(a, here),
                self._descriptor(b, here),
                transposed,
                negated,
                bool(self._uniform(adds[here], "scale-d")),
                registers,
            )
            self.machine.matrix.issue(product)

    def _descriptor(self, values: Array, here: slice) -> Descriptor:
        try:
            return Descriptor.of(int(self._uniform(self.spread(values)[here], "the matrix descriptor")))
        except EmulationError as error:
            raise EmulationError(f"{self.machine.current_line}: {error}") from None

    def _uniform(self, values: Array, name: str) -> Any:
        if (values != values[0]).any():
            raise EmulationError(
                f"{self.machine.current_line}: {name} differs between the threads of a warpgroup"
            )
        return values[0]

    def commit_products(self, i: Instruction) -> None:
        """`wgmma.commit_group`."""
        self.whole_warpgroups(i)
        self.machine.matrix.commit(self.ids)

    def wait_products(self, i: Instruction, newest: int) -> None:
        """`wgmma.wait_group`."""
        self.whole_warpgroups(i)
        self.machine.matrix.wait(self.ids, newest)

    def check_in_flight(self, i: Instruction, registers: list[Register]) -> None:
        """An instruction that may touch registers of a product in flight."""
        self.machine.matrix.check(self, i, registers)

    def unfenced(self, i: Instruction, register: Register) -> None:
        """A product whose register was touched after the last `wgmma.fence`."""
        raise RaceError(
            f"PTX line {i.line}: {i.text}: no wgmma.fence lies between this product and an earlier access to "
            f"its register {register.name}"
        )
