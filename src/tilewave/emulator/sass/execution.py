"""The threads of one block on their way through a kernel's machine code.

Threads run in *groups* that share a program counter. A branch splits a group, a convergence point (BSYNC) or
a block barrier joins groups; of the groups that can run, the one at the lowest address goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tilewave.emulator.memory import POISON, Mask
from tilewave.emulator.sass import floating, integer, transfer
from tilewave.emulator.sass.elf import INSTRUCTION_BYTES
from tilewave.emulator.sass.hazards import Hazard, HazardState
from tilewave.emulator.sass.instruction import Instruction
from tilewave.emulator.sass.integer import Handler, unsupported
from tilewave.emulator.sass.machine import WARP, Machine
from tilewave.emulator.sass.operands import Immediate, Named, Predicate, Register, Target
from tilewave.emulator.sass.reuse import ReuseCache, cached_reads
from tilewave.errors import BarrierError, EmulationError, MemoryFault

_HANDLERS: dict[str, Handler] = {**integer.HANDLERS, **floating.HANDLERS, **transfer.HANDLERS}
_CONVERGENCE_BARRIERS = 16
_WARPSYNC = _CONVERGENCE_BARRIERS
"""WARPSYNC joins threads as a convergence barrier of its own does."""


@dataclass(frozen=True)
class BlockResult:
    """What became of a block: the hazards in order of appearance (each place once), and its size."""

    hazards: tuple[Hazard, ...]
    instructions: int
    """Instructions issued, by groups of threads that ran together."""
    warp_instructions: int
    """Instructions issued, by warps."""
    reached: frozenset[int]
    """Addresses of the instructions that were issued."""
    cycles: int
    """The largest sum of stall counts of a thread: waits for scoreboards and barriers take no time here."""


@dataclass
class _Group:
    """Threads that execute together."""

    threads: Mask
    pc: int
    hazards: HazardState = field(default_factory=HazardState)
    cache: ReuseCache = field(default_factory=ReuseCache)

    def split(self, threads: Mask, pc: int) -> _Group:
        """A new group of some of the threads, elsewhere."""
        self.threads = self.threads & ~threads
        return _Group(threads, pc, self.hazards.fork(), self.cache.fork())

    def absorb(self, other: _Group) -> None:
        """Join a group at the same place."""
        self.hazards.merge(other.hazards)
        self.cache.merge(other.cache, other.threads)
        self.threads = self.threads | other.threads


@dataclass(frozen=True)
class Step:
    """An instruction with what is worth working out once."""

    instruction: Instruction
    handler: Handler | None
    uniform: bool
    cached: tuple[tuple[int, Register], ...]


def step_of(instruction: Instruction) -> Step:
    """The instruction, ready to be executed."""
    handler = _HANDLERS.get(instruction.opcode)
    return Step(instruction, handler, instruction.guard.uniform, cached_reads(instruction))


class Execution:
    """The groups of one block, and where they wait."""

    def __init__(self, machine: Machine, steps: Sequence[Step], max_instructions: int) -> None:
        self.machine = machine
        self.steps = steps
        self.ready = [_Group(machine.exists.copy(), 0)]
        self.alive: Mask = machine.exists.copy()
        self.members = np.zeros((_CONVERGENCE_BARRIERS + 1, machine.lanes), dtype=np.bool_)
        self.converging: list[tuple[int, _Group]] = []
        self.at_barrier: list[tuple[Instruction, _Group]] = []
        self.hazards: dict[tuple[str, int, tuple[str, int]], Hazard] = {}
        self.issued = self.warp_issued = self.cycles = 0
        self.reached: set[int] = set()
        self.max_instructions = max_instructions
        self.control = {
            "BRA": self._branch,
            "EXIT": self._exit,
            "BSSY": self._set_convergence,
            "BSYNC": self._converge,
            "BREAK": self._leave_convergence,
            "WARPSYNC": self._warp_sync,
            "BAR": self._barrier,
            "DEPBAR": self._wait_for_copies,
            "CALL.REL": self._call,
            "RET.REL": self._return,
        }

    def run(self, budget: int) -> bool:
        """Issue about `budget` instructions; returns whether the block has ended."""
        stop = self.issued + budget
        with np.errstate(all="ignore"):
            while self.ready:
                if self.issued >= stop:
                    return False
                self._run_group(self._next_group(), stop)
        if self.at_barrier or self.converging:
            waiting = [str(i) for i, _ in self.at_barrier] or ["a convergence barrier"]
            raise BarrierError(
                f"{int(self.alive.sum())} threads wait for ever, at {', '.join(sorted(set(waiting)))}"
            )
        return True

    def result(self) -> BlockResult:
        """What became of the block."""
        return BlockResult(
            tuple(self.hazards.values()), self.issued, self.warp_issued, frozenset(self.reached), self.cycles
        )

    def _next_group(self) -> _Group:
        lowest = min(group.pc for group in self.ready)
        here = [group for group in self.ready if group.pc == lowest]
        self.ready = [group for group in self.ready if group.pc != lowest]
        first = here[0]
        for other in here[1:]:
            first.absorb(other)
        return first

    def _run_group(self, group: _Group, stop: int) -> None:
        """Run until the group ends, waits, comes to where another group stands, or the turn is over."""
        others = min((g.pc for g in self.ready), default=None)
        while True:
            if not 0 <= group.pc < len(self.steps) * INSTRUCTION_BYTES:
                raise EmulationError(f"execution left the kernel's code, at {group.pc:#x}")
            step = self.steps[group.pc // INSTRUCTION_BYTES]
            going_on = self._execute(group, step)
            self.issued += 1
            if self.issued > self.max_instructions:
                raise EmulationError(f"stopped after {self.max_instructions} instructions")
            if not going_on:
                return
            if step.handler is None:
                others = min((g.pc for g in self.ready), default=None)
            if (others is not None and group.pc >= others) or self.issued >= stop:
                self.ready.append(group)
                return

    def _execute(self, group: _Group, step: Step) -> bool:
        """Issue one instruction; returns whether the group can go on at once."""
        instruction, machine = step.instruction, self.machine
        self.reached.add(instruction.address)
        state = group.hazards
        if instruction.control.wait_mask:
            state.wait(instruction, group.threads)
        stale: list[Hazard] = []
        if step.cached and group.cache.has_entries:
            machine.old_operands = group.cache.read(instruction, step.cached, stale)
        elif step.cached and instruction.control.reuse:
            group.cache.read(instruction, step.cached, stale)
        early = state.early_reads(instruction)
        if early and machine.old_operands:
            cached = group.cache.untouched(step.cached, machine.old_operands)
            early = [hazard for hazard in early if hazard.cell not in cached]
        saved = self._poison(early, instruction, group.threads) if early else None
        active = (
            self._uniform_mask(instruction, group)
            if step.uniform
            else machine.guarded(instruction, group.threads)
        )
        some = bool(active.any())
        found = stale + early
        spoil = None
        going_on = True
        if step.handler is not None:
            group.pc += INSTRUCTION_BYTES
            if some:
                late = state.early_writes(instruction)
                group.cache.before_write(machine, instruction.writes)
                try:
                    spoil = step.handler(machine, instruction, active)
                except MemoryFault as fault:
                    raise self._located(fault, instruction) from fault
                if late:
                    self._spoil_results(instruction, active)
                    found = found + late
        if machine.old_operands:
            machine.old_operands = {}
        if saved is not None:
            self._restore(saved, instruction, active)
        for hazard in found:
            self.hazards.setdefault((hazard.kind, hazard.address, hazard.cell), hazard)
        state.open_copies += machine.started_copies
        machine.started_copies.clear()
        state.issue(instruction, active=some, spoil=spoil)
        self.warp_issued += int(machine.warps_of(group.threads).sum())
        self.cycles = max(self.cycles, state.now)
        if step.handler is None:
            operate = self.control.get(instruction.opcode)
            if operate is None:
                raise unsupported(instruction, "this instruction")
            going_on = operate(group, instruction, active)
        return going_on

    def _uniform_mask(self, instruction: Instruction, group: _Group) -> Mask:
        warps = self.machine.warps_of(group.threads)
        if instruction.guard.is_true:
            return warps
        holds: Mask = warps & self.machine.predicate(instruction.guard, per_thread=False)
        return holds

    # Poison.

    def _poison(self, early: Sequence[Hazard], instruction: Instruction, threads: Mask) -> list[np.ndarray]:
        """Overwrite sources that are not there yet; returns their true values."""
        rows = self.machine.cells([hazard.cell for hazard in early])
        saved = [row.copy() for row in rows]
        for row in rows:
            where = threads if len(row) == len(threads) else self.machine.warps_of(threads)
            np.copyto(row, POISON if row.dtype == np.uint32 else False, where=where)
        self._poisoned = [hazard.cell for hazard in early]
        return saved

    def _restore(self, saved: list[np.ndarray], instruction: Instruction, active: Mask) -> None:
        for cell, row, value in zip(self._poisoned, self.machine.cells(self._poisoned), saved, strict=True):
            if cell in instruction.writes:
                where = active if len(active) == len(row) else self.machine.warps_of(active)
                np.copyto(row, value, where=~where)
            else:
                row[:] = value

    def _spoil_results(self, instruction: Instruction, active: Mask) -> None:
        for row in self.machine.cells(instruction.writes):
            where = active if len(active) == len(row) else self.machine.warps_of(active)
            np.copyto(row, POISON if row.dtype == np.uint32 else False, where=where)

    def _located(self, fault: MemoryFault, instruction: Instruction) -> MemoryFault:
        seen = f"; hazards before it: {next(iter(self.hazards.values()))}" if self.hazards else ""
        return MemoryFault(
            f"{instruction.text} at {instruction.address:#06x}, thread {fault.lane}: {fault}{seen}",
            lane=fault.lane,
            address=fault.address,
        )

    # Control flow. Each returns whether the group can go on at once.

    def _condition(self, instruction: Instruction, active: Mask) -> Mask:
        """The threads for which a control instruction acts: guard and predicate operand hold."""
        predicate = next(o for o in instruction.operands if isinstance(o, Predicate))
        if predicate.is_true:
            return active
        holds: Mask = active & self.machine.predicate(predicate, per_thread=True)
        return holds

    def _jump(self, group: _Group, threads: Mask, target: int) -> bool:
        if not threads.any():
            group.pc += INSTRUCTION_BYTES
            return True
        if (threads == group.threads).all():
            group.pc = target
            return True
        self.ready.append(group.split(threads, target))
        group.pc += INSTRUCTION_BYTES
        return True

    def _branch(self, group: _Group, instruction: Instruction, active: Mask) -> bool:
        target = next(o for o in instruction.operands if isinstance(o, Target))
        return self._jump(group, self._condition(instruction, active), target.address)

    def _call(self, group: _Group, instruction: Instruction, active: Mask) -> bool:
        return self._branch(group, instruction, active)

    def _return(self, group: _Group, instruction: Instruction, active: Mask) -> bool:
        # The register pair holds the return address relative to the kernel's start.
        register = next(o for o in instruction.operands if isinstance(o, Register))
        targets = self.machine.raw(register)
        threads = self._condition(instruction, active)
        for target in np.unique(targets[threads])[1:]:
            self.ready.append(group.split(threads & (targets == target), int(target)))
            threads = threads & (targets != target)
        return self._jump(group, threads, int(targets[threads][0]) if threads.any() else 0)

    def _exit(self, group: _Group, instruction: Instruction, active: Mask) -> bool:
        ending = self._condition(instruction, active)
        self.alive &= ~ending
        group.threads = group.threads & ~ending
        self._release()
        group.pc += INSTRUCTION_BYTES
        return bool(group.threads.any())

    def _barrier_register(self, instruction: Instruction) -> int:
        register = next(o for o in instruction.operands if isinstance(o, Named) and o.kind == "B")
        assert register.index is not None
        return register.index

    def _set_convergence(self, group: _Group, instruction: Instruction, active: Mask) -> bool:
        threads = self._condition(instruction, active)
        row = self.members[self._barrier_register(instruction)]
        row[np.repeat(self.machine.warps_of(threads), WARP)] = False
        row |= threads
        group.pc += INSTRUCTION_BYTES
        return True

    def _leave_convergence(self, group: _Group, instruction: Instruction, active: Mask) -> bool:
        self.members[self._barrier_register(instruction)] &= ~self._condition(instruction, active)
        group.pc += INSTRUCTION_BYTES
        self._release()
        return True

    def _converge(self, group: _Group, instruction: Instruction, active: Mask) -> bool:
        return self._await(group, self._barrier_register(instruction), self._condition(instruction, active))

    def _warp_sync(self, group: _Group, instruction: Instruction, active: Mask) -> bool:
        wanted = self.machine.raw(instruction.operands[0])
        lanes = np.arange(self.machine.lanes, dtype=np.uint32) % WARP
        row = self.members[_WARPSYNC]
        row[active] = False
        for warp in np.flatnonzero(self.machine.warps_of(active)):
            part = slice(warp * WARP, (warp + 1) * WARP)
            mask = wanted[part][active[part]][0]
            row[part] = (mask >> lanes[part] & np.uint32(1)).astype(np.bool_)
        return self._await(group, _WARPSYNC, active)

    def _await(self, group: _Group, barrier: int, threads: Mask) -> bool:
        group.pc += INSTRUCTION_BYTES
        if not threads.any():
            return True
        rest = group.threads & ~threads
        if rest.any():
            self.ready.append(group.split(rest, group.pc))
        self.converging.append((barrier, group))
        self._release()
        return False

    def _barrier(self, group: _Group, instruction: Instruction, active: Mask) -> bool:
        if not (instruction.has("SYNC") and active.any()):
            if active.any():
                raise unsupported(instruction, "this barrier")
            group.pc += INSTRUCTION_BYTES
            return True
        if not (active == group.threads).all():
            rest = group.split(group.threads & ~active, group.pc + INSTRUCTION_BYTES)
            self.ready.append(rest)
        group.pc += INSTRUCTION_BYTES
        self.at_barrier.append((instruction, group))
        self._release()
        return False

    def _wait_for_copies(self, group: _Group, instruction: Instruction, active: Mask) -> bool:
        if active.any():
            board, depth = transfer.copy_depth(instruction)
            group.hazards.drain(board, depth, group.threads)
        group.pc += INSTRUCTION_BYTES
        return True

    # Releasing groups that wait.

    def _release(self) -> None:
        self._release_converged()
        self._release_barriers()

    def _release_converged(self) -> None:
        for barrier in {b for b, _ in self.converging}:
            waiting = [group for b, group in self.converging if b == barrier]
            arrived = np.logical_or.reduce([group.threads for group in waiting])
            missing = self.members[barrier] & self.alive & ~arrived
            free = np.repeat(~self.machine.warps_of(missing), WARP)
            if not (free & arrived).any():
                continue
            self.converging = [(b, group) for b, group in self.converging if b != barrier]
            released: dict[int, _Group] = {}
            for group in waiting:
                out = group if (group.threads & ~free).sum() == 0 else None
                if out is None:
                    if not (group.threads & free).any():
                        self.converging.append((barrier, group))
                        continue
                    out = group.split(group.threads & free, group.pc)
                    self.converging.append((barrier, group))
                if out.pc in released:
                    released[out.pc].absorb(out)
                else:
                    released[out.pc] = out
            self.ready += released.values()

    def _release_barriers(self) -> None:
        for number in {_barrier_number(i) for i, _ in self.at_barrier}:
            waiting = [(i, g) for i, g in self.at_barrier if _barrier_number(i) == number]
            arrived = np.logical_or.reduce([group.threads for _, group in waiting])
            expected = _barrier_threads(waiting[0][0])
            if expected is None:
                complete = not (self.alive & ~arrived).any()
            else:
                complete = int(self.machine.warps_of(arrived).sum()) * WARP >= expected
            if complete:
                self.at_barrier = [(i, g) for i, g in self.at_barrier if _barrier_number(i) != number]
                self.ready += [group for _, group in waiting]


def _barrier_number(instruction: Instruction) -> int:
    number = instruction.operands[0]
    assert isinstance(number, Immediate)
    return number.value


def _barrier_threads(instruction: Instruction) -> int | None:
    """The thread count that a barrier names; None: all threads of the block."""
    count = instruction.operands[1]
    assert isinstance(count, Immediate)
    return count.value or None
