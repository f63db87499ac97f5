"""The context in which a basic block's code runs: some lanes of a machine, and what they can do to memory."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from tilewave.emulator import atomics
from tilewave.emulator.codegen import Access, Group
from tilewave.emulator.layout import LOCAL_WINDOW, SHARED_WINDOW, WINDOW_BYTES
from tilewave.emulator.ptx import Instruction
from tilewave.errors import EmulationError, MemoryFault

if TYPE_CHECKING:
    from tilewave.emulator.machine import Machine

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]
WARP = 32


class Lanes:
    """Lanes `ids` (ascending, counted over all blocks of the machine) that execute a basic block together."""

    def __init__(self, machine: Machine, ids: npt.NDArray[np.int64]) -> None:
        self.machine = machine
        self.ids = ids
        self.n = len(ids)
        self.words = machine.shared_views
        self._specials: dict[tuple[str, str], Array] = {}

    # -- who the lanes are ----------------------------------------------------------------------------------

    @cached_property
    def whole(self) -> bool:
        """Whether these are all lanes of the machine."""
        return self.n == self.machine.lane_count

    @cached_property
    def block_slots(self) -> npt.NDArray[np.int64]:
        """For each lane, which of the machine's blocks it belongs to."""
        return self.ids // self.machine.threads

    @cached_property
    def threads(self) -> npt.NDArray[np.int64]:
        """For each lane, its linear index within its block."""
        return self.ids % self.machine.threads

    @cached_property
    def warp_places(self) -> npt.NDArray[np.int64]:
        """For each lane, 32 times its warp's number among `warp_numbers`, plus its lane in the warp."""
        warps = self.block_slots * self.machine.warps_per_block + self.threads // WARP
        _, compact = np.unique(warps, return_inverse=True)
        places: npt.NDArray[np.int64] = compact * WARP + self.threads % WARP
        return places

    @cached_property
    def warps(self) -> int:
        """How many warps have at least one of these lanes."""
        return int(self.warp_places[-1]) // WARP + 1 if self.n else 0

    @cached_property
    def full_warps(self) -> bool:
        """Whether every warp has all 32 lanes here."""
        return self.n == self.warps * WARP

    def by_warp(self, values: Array, mask: Mask | None) -> tuple[Array, Mask | None]:
        """Values as (warps, 32), and which of them exist (None: all)."""
        if self.full_warps:
            return values.reshape(-1, WARP), None if mask is None else mask.reshape(-1, WARP)
        table = np.zeros(self.warps * WARP, dtype=values.dtype)
        active = np.zeros(self.warps * WARP, dtype=np.bool_)
        table[self.warp_places] = values
        active[self.warp_places] = True if mask is None else mask
        return table.reshape(-1, WARP), active.reshape(-1, WARP)

    def special(self, name: str, dtype: str) -> Array:
        """A special register's value for each lane (or one value for all)."""
        key = (name, dtype)
        if key not in self._specials:
            self._specials[key] = self._special(name).astype(dtype)
        return self._specials[key]

    def _special(self, name: str) -> Array:
        machine = self.machine
        kind, _, axis = name[1:].partition(".")
        if axis:
            index = "xyz".index(axis)
            if kind == "ntid":
                return np.array(machine.block[index])
            if kind == "nctaid":
                return np.array(machine.grid[index])
            if kind == "tid":
                return machine.thread_indices[index][self.threads]
            if kind == "ctaid":
                return machine.block_indices[index][self.block_slots]
        if kind == "laneid":
            return self.threads % WARP
        if kind == "warpid":
            return self.threads // WARP
        if kind == "nwarpid":
            return np.array(machine.warps_per_block)
        if kind.startswith("lanemask_"):
            bit = np.uint64(1) << (self.threads % WARP).astype(np.uint64)
            everything = np.uint64(0xFFFFFFFF)
            masks = {"eq": bit, "lt": bit - 1, "le": bit | (bit - 1)}
            masks |= {"gt": everything & ~masks["le"], "ge": everything & ~masks["lt"]}
            return masks[kind[9:]]
        if kind in ("dynamic_smem_size", "total_smem_size"):
            static = machine.program.layout.static_shared_bytes if kind.startswith("total") else 0
            return np.array(machine.dynamic_shared_bytes + static)
        if kind in ("clock", "clock64", "globaltimer"):
            return np.array(machine.steps)
        raise EmulationError(f"the special register {name} cannot be emulated")

    def where(self, lane: int) -> str:
        """Name a lane (a position among these) for a message."""
        return self.machine.where(int(self.ids[lane]))

    # -- small helpers of the generated code ----------------------------------------------------------------

    def parameter(self, name: str, offset: int, dtype: str) -> Array:
        """A kernel parameter (or a part of it)."""
        return self.machine.parameter(name, offset, dtype)

    def parameter_at(
        self, instruction: Instruction, addresses: Array, offset: int, result: Array, guard: Mask | None
    ) -> None:
        """What each lane reads of the parameters at an address that it computed."""
        data = self.machine.parameter_data
        size = result.dtype.itemsize
        places = addresses + offset
        bad = (places < 0) | (places + size > len(data)) | (places % size != 0)
        if guard is not None:
            bad &= guard
        if bad.any():
            lane = int(np.argmax(bad))
            raise MemoryFault(
                f"PTX line {instruction.line}: {instruction.text}: outside the parameters or misaligned, "
                f"{self.where(lane)}",
                lane=lane,
                address=int(places[lane]),
            )
        data.view(result.dtype).take(places // size, out=result, mode="clip")

    def variable(self, name: str, dtype: str = "i8") -> Array:
        """Address of a global or constant variable."""
        return np.array(self.machine.variables[name]).astype(dtype)

    def spread(self, value: Array) -> Array:
        """A value for every lane."""
        return value if value.ndim else np.full(self.n, value)

    def constant_address(self, offset: int) -> Array:
        """The same address for every lane."""
        return np.full(self.n, offset, dtype=np.int64)

    def address(self, base: Array, offset: int) -> Array:
        """Byte addresses as int64."""
        return np.add(base, np.int64(offset), dtype=np.int64)

    def count_fma(self, guard: Mask) -> None:
        """Count the lanes of a guarded FMA."""
        self.machine.counters.thread_fma += int(np.count_nonzero(guard))

    def is_space(self, addresses: Array, space: str) -> Mask:
        """`isspacep`."""
        shared = (addresses >= SHARED_WINDOW) & (addresses < SHARED_WINDOW + WINDOW_BYTES)
        local = (addresses >= LOCAL_WINDOW) & (addresses < LOCAL_WINDOW + WINDOW_BYTES)
        if space.startswith("shared"):
            return shared
        return local if space == "local" else ~(shared | local)

    def trap(self, instruction: Instruction, guard: Mask | None) -> None:
        """`trap`: an error, if any lane executes it."""
        if guard is None or guard.any():
            lane = 0 if guard is None else int(np.argmax(guard))
            raise EmulationError(
                f"PTX line {instruction.line}: {instruction.text}: {self.where(lane)} trapped"
            )

    # -- memory ---------------------------------------------------------------------------------------------

    def fault(self, access: Access, error: MemoryFault) -> NoReturn:
        """Say which instruction and thread a fault belongs to; the error's lane is a position among these."""
        instruction = access.instruction
        thread = f", {self.where(error.lane)}" if error.lane is not None else ""
        message = f"PTX line {instruction.line}: {instruction.text}: {error}{thread}"
        raise MemoryFault(message, lane=error.lane, address=error.address) from None

    def shared_index(self, group: Group, base: Array | None) -> npt.NDArray[np.int64]:
        """Check a group of shared accesses at once; word indices of its lowest in the machine's memory."""
        machine = self.machine
        addresses = np.zeros(self.n, dtype=np.int64) if base is None else base.astype(np.int64)
        low, high = int(addresses.min()), int(addresses.max())
        misaligned = int(np.bitwise_or.reduce(addresses)) & (group.alignment - 1)
        outside = low + group.low < machine.shared_start or high + group.high > machine.shared_end
        if outside or misaligned or group.odd:
            for offset, access in group.accesses:
                self._check_shared(access, addresses + offset)
        if machine.counting:
            self.machine.tally.shared_group(self, group, addresses)
        addresses += self.shared_bases
        if group.low:
            addresses += group.low
        addresses >>= 2
        return addresses

    @cached_property
    def shared_bases(self) -> npt.NDArray[np.int64]:
        """Byte offset of each lane's block in the machine's shared memory."""
        return self.block_slots * self.machine.shared_stride

    def _check_shared(self, access: Access, addresses: Array) -> None:
        machine = self.machine
        bad = (addresses < machine.shared_start) | (addresses + access.width > machine.shared_end)
        what = "outside"
        if not bad.any():
            bad, what = (addresses & (access.width - 1)) != 0, "misaligned in"
        if bad.any():
            lane = int(np.argmax(bad))
            direction = "store" if access.store else "load"
            text = f"shared {direction} of {access.width} bytes at byte {addresses[lane]} is {what}"
            error = MemoryFault(
                f"{text} {machine.shared.extent}",
                lane=lane,
                address=int(addresses[lane]),
            )
            self.fault(access, error)

    def resolve(self, access: Access, addresses: Array, mask: Mask | None) -> tuple[str, Array]:
        """Space and address in it of a generic access; all active lanes must agree on the space."""
        if access.space != "generic":
            return access.space, addresses
        chosen = addresses if mask is None else addresses[mask]
        if len(chosen) == 0:
            return "global", addresses
        for space, window in (("shared", SHARED_WINDOW), ("local", LOCAL_WINDOW)):
            inside = (chosen >= window) & (chosen < window + WINDOW_BYTES)
            if inside.all():
                return space, addresses - window
            if inside.any():
                i = access.instruction
                raise EmulationError(f"PTX line {i.line}: {i.text}: lanes address different state spaces")
        return "global", addresses

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
        """Move words between registers and memory."""
        machine = self.machine
        width = access.width
        try:
            if space == "global" or space == "const":
                if store:
                    machine.memory.store(addresses, rows, width, mask)
                else:
                    machine.memory.load(addresses, width, mask, rows)
                return
            memory = machine.shared if space == "shared" else machine.local
            if mask is None:
                memory.access(addresses, width, None if self.whole else self.ids, rows, store=store)
                return
            active = np.flatnonzero(mask)
            if not len(active):
                return
            part = [row[active] for row in rows]
            memory.access(addresses[active], width, self.ids[active], part, store=store)
            if not store:
                for row, values in zip(rows, part, strict=True):
                    row[active] = values
        except MemoryFault as error:
            if space in ("shared", "local") and error.lane is not None and not (mask is None and self.whole):
                error.lane = int(np.searchsorted(self.ids, error.lane))
            self.fault(access, error)

    def load(self, access: Access, addresses: Array, rows: list[Array], mask: Mask | None) -> None:
        """`ld` outside the fast path."""
        space, addresses = self.resolve(access, addresses, mask)
        if self.machine.counting:
            self.machine.tally.access(self, access, space, addresses, mask)
        if self.machine.races is not None and space == "shared":
            self.machine.races.read(self, access, addresses, access.width, mask)
        self.transfer(access, space, addresses, rows, mask, store=False)

    def store(self, access: Access, addresses: Array, rows: list[Array], mask: Mask | None) -> None:
        """`st` outside the fast path."""
        space, addresses = self.resolve(access, addresses, mask)
        if self.machine.counting:
            self.machine.tally.access(self, access, space, addresses, mask)
        if self.machine.races is not None and space == "shared":
            self.machine.races.write(self, access, addresses, access.width, mask)
        self.transfer(access, space, addresses, rows, mask, store=True)

    def only_count(self, access: Access, addresses: Array, mask: Mask | None) -> None:
        """An access whose value does not matter."""
        if self.machine.counting:
            space, addresses = self.resolve(access, addresses, mask)
            self.machine.tally.access(self, access, space, addresses, mask)

    def atomic(
        self,
        access: Access,
        addresses: Array,
        operation: str,
        dtype: str,
        values: list[Array],
        result: Array,
        mask: Mask | None,
    ) -> None:
        """`atom` and `red`: lanes that hit one address take turns in lane order."""
        space, addresses = self.resolve(access, addresses, mask)
        if self.machine.counting:
            self.machine.tally.access(self, access, space, addresses, mask)
        lanes = np.arange(self.n) if mask is None else np.flatnonzero(mask)
        size = access.width
        for turn in atomics.turns(addresses[lanes]):
            chosen = lanes[turn]
            rows = [np.zeros(len(chosen), dtype=np.uint32) for _ in range(size // 4)]
            part = Lanes(self.machine, self.ids[chosen])
            part.transfer(access, space, addresses[chosen], rows, None, store=False)
            old = np.stack(rows, axis=1).reshape(-1).view(dtype)
            new = atomics.combine(operation, old, [value[chosen] for value in values])
            result[chosen] = old
            words = np.ascontiguousarray(new).view(np.uint32).reshape(-1, size // 4)
            part.transfer(access, space, addresses[chosen], list(words.T), None, store=True)

    # -- asynchronous copies --------------------------------------------------------------------------------

    def copy_async(
        self,
        access: Access,
        target: Array,
        source: Array,
        size: int,
        given: Array | None,
        mask: Mask | None,
        moves: bool,
    ) -> None:
        """`cp.async`: read now, write when the copy's group has been waited for; or only count it."""
        machine = self.machine
        if machine.counting:
            machine.tally.copy(self, access, target, source, given, mask)
        if not moves:
            return
        lanes = np.arange(self.n) if mask is None else np.flatnonzero(mask)
        if not len(lanes):
            return
        words = [np.zeros(self.n, dtype=np.uint32) for _ in range(size // 4)]
        if given is None or (given == size).all():
            self.transfer(access, "global", source, words, mask, store=False)
        else:
            self._copy_part(access, source, size, self.spread(given), words, mask)
        part = self if mask is None else Lanes(machine, self.ids[lanes])
        chosen = target if mask is None else target[lanes]
        part._check_shared(access, chosen)
        machine.copies.start(part, access, chosen, [word[lanes] for word in words])

    def _copy_part(
        self, access: Access, source: Array, size: int, given: Array, words: list[Array], mask: Mask | None
    ) -> None:
        """A copy of fewer bytes than its size: the rest is zero. Lanes that copy nothing touch no memory."""
        on = np.ones(self.n, dtype=np.bool_) if mask is None else mask
        for count in np.unique(given[on]).tolist():
            if count > size:
                i = access.instruction
                raise EmulationError(
                    f"PTX line {i.line}: {i.text}: a source size of {count} bytes is above {size}"
                )
            lanes = on & (given == count)
            if count == size:
                self.transfer(access, "global", source, words, lanes, store=False)
                continue
            piece = Access(access.instruction, "global", 1, False, 0)
            for byte in range(count):
                row = np.zeros(self.n, dtype=np.uint32)
                self.transfer(piece, "global", source + byte, [row], lanes, store=False)
                words[byte // 4] |= row << np.uint32(8 * (byte % 4))

    def commit_copies(self) -> None:
        """`cp.async.commit_group`."""
        self.machine.copies.commit(self)

    def wait_copies(self, newest: int | None) -> None:
        """`cp.async.wait_group N`, or `wait_all` for None."""
        self.machine.copies.wait(self, newest)

    # -- warps ----------------------------------------------------------------------------------------------

    def _members(self, mask: Mask | None) -> Mask:
        """(warps, 32): which lanes are here and on."""
        _, active = self.by_warp(np.zeros(self.n, dtype=np.uint8), mask)
        return np.ones((self.warps, WARP), dtype=np.bool_) if active is None else active

    def _check_members(self, instruction: Instruction, members: Array, mask: Mask | None) -> None:
        """Every lane that a warp-wide instruction names must execute it, the caller included."""
        active = self._members(mask)
        bits = np.arange(WARP, dtype=np.uint32)
        named, _ = self.by_warp(self.spread(members), None)
        here = np.where(active, named, np.uint32(0)).astype(np.uint32)
        missing = ((here[:, :, None] >> bits) & 1).astype(bool).any(axis=1) & ~active
        threads = self.machine.threads
        if missing.any():
            # Lanes that the block does not have (its last warp is short) cannot be missed.
            first = np.array(
                [
                    int(self.threads[np.flatnonzero(self.warp_places // WARP == w)[0]])
                    for w in range(self.warps)
                ]
            )
            exists = (first // WARP * WARP)[:, None] + np.arange(WARP) < threads
            missing &= exists
        if missing.any():
            warp = int(np.argmax(missing.any(axis=1)))
            lane = int(np.argmax(missing[warp]))
            i = instruction
            raise EmulationError(
                f"PTX line {i.line}: {i.text}: lane {lane} is named by the member mask but not here; "
                f"{self.where(int(np.flatnonzero(self.warp_places // WARP == warp)[0]))} is"
            )

    def shuffle(
        self,
        instruction: Instruction,
        mode: str,
        value: Array,
        lane: Array,
        clamp: Array,
        members: Array,
        mask: Mask | None,
        result: Array,
        valid: Mask,
    ) -> None:
        """`shfl.sync`: `result` and the predicate `valid` for each lane."""
        self._check_members(instruction, members, mask)
        table, _ = self.by_warp(np.ascontiguousarray(self.spread(value)), None)
        own = (self.threads % WARP).astype(np.int64)
        c = self.spread(clamp).astype(np.int64)
        b = self.spread(lane).astype(np.int64) & 31
        segment, limit = (c >> 8) & 31, c & 31
        highest = (own & segment) | (limit & ~segment)
        if mode == "up":
            source, ok = own - b, own - b >= highest
        elif mode == "down":
            source, ok = own + b, own + b <= highest
        elif mode == "bfly":
            source, ok = own ^ b, (own ^ b) <= highest
        else:
            source = (own & segment) | (b & ~segment)
            ok = source <= highest
        source = np.where(ok, source, own)
        result[...] = table.reshape(-1)[self.warp_places // WARP * WARP + source]
        valid[...] = ok

    def vote(
        self, instruction: Instruction, mode: str, predicate: Array, members: Array, mask: Mask | None
    ) -> Array:
        """`vote.sync`."""
        self._check_members(instruction, members, mask)
        named = self.spread(members).astype(np.uint32)
        table, _ = self.by_warp(self.spread(predicate), None)
        active = self._members(mask)
        bits = np.uint64(1) << np.arange(WARP, dtype=np.uint64)
        ballots: Array = ((table & active) * bits).sum(axis=1).astype(np.uint32)[
            self.warp_places // WARP
        ] & named
        if mode == "ballot":
            return ballots
        if mode == "any":
            some: Array = ballots != 0
            return some
        present = (active * bits).sum(axis=1).astype(np.uint32)[self.warp_places // WARP] & named
        everyone: Array = ballots == present
        return everyone if mode == "all" else everyone | (ballots == 0)

    def active_mask(self, mask: Mask | None) -> Array:
        """`activemask`: bit i is set if lane i of the warp is here."""
        bits = np.uint64(1) << np.arange(WARP, dtype=np.uint64)
        masks: Array = (self._members(mask) * bits).sum(axis=1).astype(np.uint32)[self.warp_places // WARP]
        return masks
