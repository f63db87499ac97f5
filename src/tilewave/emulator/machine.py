"""Runs a program's blocks: divergence, barriers, and the scheduling of lanes.

All threads of all blocks of a machine are *lanes*. The scheduler keeps, for each basic block, the lanes that
stand at its beginning, and always runs the first such block in program order: lanes that have fallen behind
catch up, so paths that parted meet again. As long as all lanes stand together, their rows are used in place;
a part of them is gathered into a second register file, run there, and scattered back.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewave.emulator.copies import CopyQueue
from tilewave.emulator.counters import Counters
from tilewave.emulator.flow import BasicBlock, End
from tilewave.emulator.lanes import WARP, Lanes
from tilewave.emulator.memory import LocalMemory, Memory, SharedMemory
from tilewave.emulator.passes import PatternMemo
from tilewave.emulator.program import Program
from tilewave.emulator.races import AccessWatcher, RaceDetector
from tilewave.emulator.registers import RegisterFile
from tilewave.emulator.tally import Tally
from tilewave.emulator.trace import Trace
from tilewave.errors import BarrierError, EmulationError

Ids = npt.NDArray[np.int64]
Shape = tuple[int, int, int]


class _Views(dict[int, npt.NDArray[np.uint32]]):
    """Shared memory from a word offset on, made when first asked for."""

    def __init__(self, words: npt.NDArray[np.uint32]) -> None:
        super().__init__()
        self._words = words

    def __missing__(self, offset: int) -> npt.NDArray[np.uint32]:
        self[offset] = view = self._words[offset:]
        return view


class Machine:
    """Some blocks of a launch that run together, from their first instruction to their last."""

    def __init__(
        self,
        program: Program,
        memory: Memory,
        grid: Shape,
        block: Shape,
        parameters: dict[str, bytes],
        block_ids: Sequence[int],
        *,
        variables: dict[str, int],
        dynamic_shared_bytes: int,
        counting: bool,
        memo: PatternMemo,
        detect_races: bool,
        allow_exited_at_barrier: bool,
        step_limit: int,
        trace: Trace | None = None,
    ) -> None:
        self.program = program
        self.memory = memory
        self.grid, self.block = grid, block
        self.variables = variables
        self.dynamic_shared_bytes = dynamic_shared_bytes
        self.counting = counting
        self.allow_exited = allow_exited_at_barrier
        self.step_limit = step_limit
        self.steps = 0
        self.threads = block[0] * block[1] * block[2]
        self.warps_per_block = -(-self.threads // WARP)
        self.block_ids = np.asarray(block_ids, dtype=np.int64)
        self.lane_count = self.threads * len(self.block_ids)
        self.thread_indices = _unravel(np.arange(self.threads), block)
        self.block_indices = _unravel(self.block_ids, grid)
        self._parameters = parameters
        self._parameter_values: dict[tuple[str, int, str], npt.NDArray[Any]] = {}
        self.counters = Counters()
        self.trace = trace
        self.tally = Tally(self.counters, memo, trace)
        # Addresses of a block's own shared memory: from `shared_start` up to, not including, `shared_end`.
        self.shared_start = program.layout.shared_start
        self.shared_end = program.layout.dynamic_offset + dynamic_shared_bytes
        self.shared = SharedMemory(
            len(self.block_ids), self.shared_end, self.threads, reserved=self.shared_start
        )
        self.shared_words = self.shared.words
        self.shared_stride = self.shared.stride
        self.shared_views = _Views(self.shared_words)
        self.local = LocalMemory(self.lane_count, program.layout.local_bytes)
        self.copies = CopyQueue(self)
        self._detector = RaceDetector(self) if detect_races else None
        self.races: AccessWatcher | None = self._detector
        self.file = RegisterFile(program.slots, program.scratch_rows, self.lane_count)
        self._part_file: RegisterFile | None = None
        self.lanes = Lanes(self, np.arange(self.lane_count, dtype=np.int64))
        blocks = program.blocks
        self._leave = len(blocks)
        self._ready: dict[int, Ids] = {0: np.arange(self.lane_count)}  # basic block -> positions in `lanes`
        self._waiting = np.full(self.lane_count, -1, dtype=np.int64)  # by id: the barrier's basic block
        self._exited = np.zeros(self.lane_count, dtype=np.bool_)  # by id
        self._block_warps = [0] * len(blocks)
        self._block_lanes = [0] * len(blocks)
        self._barriers = program.barriers

    # -- facts ----------------------------------------------------------------------------------------------

    def parameter(self, name: str, offset: int, dtype: str) -> npt.NDArray[Any]:
        """Part of a kernel parameter as a 0-d array."""
        key = (name, offset, dtype)
        if key not in self._parameter_values:
            data = self._parameters[name][offset : offset + np.dtype(dtype).itemsize]
            self._parameter_values[key] = np.frombuffer(data, dtype=dtype)[0:1].reshape(())
        return self._parameter_values[key]

    @cached_property
    def parameter_data(self) -> npt.NDArray[np.uint8]:
        """All kernel parameters, each at its offset in the layout."""
        layout = self.program.layout
        data = np.zeros(layout.parameter_bytes, dtype=np.uint8)
        for name, offset in layout.parameters.items():
            value = self._parameters[name]
            data[offset : offset + len(value)] = np.frombuffer(value, dtype=np.uint8)
        return data

    def where(self, lane: int) -> str:
        """Name a thread by its lane's id."""
        slot, thread = divmod(lane, self.threads)
        block = ", ".join(str(int(axis[slot])) for axis in self.block_indices)
        indices = ", ".join(str(int(axis[thread])) for axis in self.thread_indices)
        return f"thread ({indices}) of block ({block})"

    def _line(self, block: BasicBlock) -> str:
        instruction = self.program.entry.instructions[block.stop - 1]
        return f"PTX line {instruction.line}: {instruction.text}"

    # -- running --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run all blocks to their end."""
        while self._ready:
            self.step()

    @property
    def finished(self) -> bool:
        """Whether every thread has ended."""
        return not self._ready

    def step(self) -> None:
        """Run one basic block for the lanes that stand at it."""
        index = min(self._ready)
        positions = self._ready.pop(index)
        block = self.program.blocks[index]
        code = self.program.codes[index]
        self.steps += 1
        if self.steps > self.step_limit:
            raise EmulationError(
                f"{self._line(block)}: still running after {self.step_limit} basic blocks: an endless loop?"
            )
        if len(positions) < self.lanes.n and not self._ready and not (self._waiting >= 0).any():
            # The other lanes have ended: drop them for good.
            self.file.compact(positions)
            self.lanes = Lanes(self, self.lanes.ids[positions])
            positions = np.arange(self.lanes.n)
        if len(positions) == self.lanes.n:
            lanes, file = self.lanes, self.file
            if self.trace is not None:
                self.trace.enter(lanes, block)
            code.function(lanes, *file.rows(index, code.names, lanes.n))
        else:
            lanes = Lanes(self, self.lanes.ids[positions])
            if self._part_file is None:
                self._part_file = RegisterFile(self.program.slots, self.program.scratch_rows, self.lane_count)
            file = self._part_file
            file.copy_lanes(self.file, positions, self.program.entry_slots[index])
            if self.trace is not None:
                self.trace.enter(lanes, block)
            code.function(lanes, *file.rows(index, code.names, lanes.n))
            file.return_lanes(self.file, positions, self.program.exit_slots[index])
        if self.counting:
            self._block_warps[index] += lanes.warps
            self._block_lanes[index] += lanes.n
        self._follow(block, positions, lanes, file, code.condition)

    def _follow(
        self, block: BasicBlock, positions: Ids, lanes: Lanes, file: RegisterFile, condition: str | None
    ) -> None:
        """Send the lanes on to where the block's end leads."""
        if block.end is End.FALL:
            self._arrive(block.index + 1, positions)
        elif block.end is End.JUMP:
            self._arrive(block.target, positions)
        elif block.end is End.BRANCH:
            assert condition is not None
            taken = file.row(condition, lanes.n)
            count = int(np.count_nonzero(taken))
            if block.condition_negated:
                count = lanes.n - count
            if count == lanes.n:
                self._arrive(block.target, positions)
            elif count == 0:
                self._arrive(block.index + 1, positions)
            else:
                chosen = ~taken if block.condition_negated else taken
                here, there = positions[~chosen], positions[chosen]
                self._arrive(block.target, there)
                self._arrive(block.index + 1, here)
        else:
            self._waiting[lanes.ids] = block.index
            self._release()

    def _arrive(self, index: int, positions: Ids) -> None:
        if index == self._leave:
            self._exited[self.lanes.ids[positions]] = True
            if (self._waiting >= 0).any():
                self._release()
            return
        others = self._ready.get(index)
        if others is not None:
            positions = np.concatenate([others, positions])
            positions.sort()
        self._ready[index] = positions

    # -- barriers -------------------------------------------------------------------------------------------

    def _release(self) -> None:
        """Let the blocks go on all of whose threads have arrived at a barrier."""
        ids = self.lanes.ids
        waiting = self._waiting
        if self._ready and len(self._barriers) == 0:
            return
        by_block = waiting.reshape(-1, self.threads)
        exited = self._exited.reshape(-1, self.threads)
        alive = self.threads - exited.sum(axis=1)
        numbers = {self._barriers[index][0] for index in np.unique(waiting[waiting >= 0]).tolist()}
        go = np.zeros(by_block.shape, dtype=np.bool_)
        for number in numbers:
            members = [index for index, barrier in self._barriers.items() if barrier[0] == number]
            here = np.isin(by_block, members)
            expected = np.where(here.any(axis=1), alive, -1)
            counts = {self._barriers[index][1] for index in members} - {None}
            if counts:
                self._counted_barrier(number, members, by_block, here, expected)
            complete = here.sum(axis=1) == expected
            if complete.any():
                self._check_release(here & complete[:, None], complete, exited)
                go |= here & complete[:, None]
        if go.any():
            released = go.reshape(-1)
            if self._detector is not None:
                self._detector.barrier(go)
            places = np.flatnonzero(released[ids])
            targets = waiting[ids[places]]
            waiting[released] = -1
            for target in np.unique(targets).tolist():
                self._arrive(target + 1, places[targets == target])
        if not self._ready and (waiting >= 0).any():
            self._deadlock()

    def _counted_barrier(
        self, number: int, members: list[int], by_block: Ids, here: npt.NDArray[np.bool_], expected: Ids
    ) -> None:
        """`bar.sync a, b`: b threads are expected, not all."""
        for index in members:
            count = self._barriers[index][1]
            if count is not None:
                expected[(by_block == index).any(axis=1)] = count

    def _check_release(
        self, go: npt.NDArray[np.bool_], complete: npt.NDArray[np.bool_], exited: npt.NDArray[np.bool_]
    ) -> None:
        """Errors of a barrier that the hardware would let pass, or not, depending on its mood."""
        if not self.allow_exited and (exited & complete[:, None]).any():
            slot = int(np.argmax((exited & complete[:, None]).any(axis=1)))
            gone, waits = int(np.argmax(exited[slot])), int(np.argmax(go[slot]))
            block = self.program.blocks[int(self._waiting[slot * self.threads + waits])]
            raise BarrierError(
                f"{self._line(block)}: {int(exited[slot].sum())} of {self.threads} threads never come to "
                f"this barrier: "
                f"{self.where(slot * self.threads + gone)} has ended while "
                f"{self.where(slot * self.threads + waits)} waits"
            )
        waiting = np.where(go, self._waiting.reshape(-1, self.threads), -1)
        pad = self.warps_per_block * WARP - self.threads
        padded = np.pad(waiting, ((0, 0), (0, pad)), constant_values=-1).reshape(-1, WARP)
        highest = padded.max(axis=1)
        mixed = (padded != highest[:, None]) & (padded >= 0)
        if mixed.any():
            warp = int(np.argmax(mixed.any(axis=1)))
            slot, number = divmod(warp, self.warps_per_block)
            first, second = sorted(set(padded[warp][padded[warp] >= 0].tolist()))[:2]
            if self._barriers[first][2] or self._barriers[second][2]:
                raise BarrierError(
                    f"{self._line(self.program.blocks[second])}: threads of warp {number} of "
                    f"{self.block_name(slot)} wait here while others of the same warp wait at "
                    f"{self._line(self.program.blocks[first])}"
                )

    def block_name(self, slot: int) -> str:
        """Name a block by its place among the machine's."""
        return f"block ({', '.join(str(int(axis[slot])) for axis in self.block_indices)})"

    def _deadlock(self) -> None:
        lane = int(np.argmax(self._waiting >= 0))
        slot = lane // self.threads
        mine = self._waiting[slot * self.threads : (slot + 1) * self.threads]
        block = self.program.blocks[int(self._waiting[lane])]
        arrived = int((mine == self._waiting[lane]).sum())
        elsewhere = np.flatnonzero(mine != self._waiting[lane])
        other = slot * self.threads + int(elsewhere[0]) if len(elsewhere) else None
        there = ""
        if other is not None:
            at = int(self._waiting[other])
            there = f"; {self.where(other)} " + (
                f"waits at {self._line(self.program.blocks[at])}" if at >= 0 else "has ended"
            )
        raise BarrierError(
            f"{self._line(block)}: deadlock: {arrived} of {self.threads} threads of {self.block_name(slot)} "
            f"wait here, {self.where(lane)} among them, and no thread can go on{there}"
        )

    # -- counting -------------------------------------------------------------------------------------------

    def totals(self) -> Counters:
        """The counts of everything run so far."""
        counters = Counters() + self.counters
        for index, code in enumerate(self.program.codes):
            warps = self._block_warps[index]
            if not warps:
                continue
            for name, count in self.program.opcode_counts[index].items():
                counters.warp_instructions_by_opcode[name] += count * warps
                counters.warp_instructions += count * warps
            for name, count in self.program.class_counts[index].items():
                counters.warp_instructions_by_class[name] += count * warps
            counters.thread_fma += code.fma_count * self._block_lanes[index]
            counters.barriers += self.program.class_counts[index]["barrier"] * warps
        return counters


def _unravel(indices: npt.NDArray[np.int64], shape: Shape) -> list[npt.NDArray[np.int64]]:
    """Linear indices to (x, y, z), x fastest."""
    x, y, _ = shape
    return [indices % x, indices // x % y, indices // (x * y)]
