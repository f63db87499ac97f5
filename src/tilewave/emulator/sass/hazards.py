"""What a group of threads has in flight: results that are not there yet, sources not yet read, copies.

The state belongs to one instruction stream. Groups that part take a copy each (`fork`), groups that meet join
theirs (`merge`): whatever is not ready in one of them is not ready in the joint group, which is what the
compiler had to assume, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

from tilewave.emulator.memory import Mask
from tilewave.emulator.sass.instruction import NO_SCOREBOARD, SCOREBOARDS, Cell, Instruction
from tilewave.emulator.sass.latency import LONGEST, latency, needs_scoreboard, read_order, result_order


@dataclass(frozen=True)
class Hazard:
    """A read or write that comes too early (or, of a reuse cache, too late).

    `kind`: "read before ready" (a fixed latency was not kept), "read before wait" (a scoreboard was not
    waited for), "write before wait" (a result still in flight will overwrite), "overwritten while read" (a
    source of an instruction in flight), or "stale reuse" (the cached operand is not the register's value any
    more).
    """

    kind: str
    cell: Cell
    address: int
    instruction: str
    producer_address: int
    producer: str

    def __str__(self) -> str:
        name = self.cell[0] + str(self.cell[1])
        return (
            f"{self.kind}: {name} at {self.address:#06x} ({self.instruction}), "
            f"from {self.producer_address:#06x} ({self.producer})"
        )


Arrive = Callable[[Mask], None]
"""Makes a copy's data visible for the threads of a mask, once for each of them."""


@dataclass(eq=False)
class InFlight:
    """An instruction that is not done yet.

    `arrive` runs when a scoreboard says that it is done (copies reach shared memory), `spoil` when one of its
    sources was overwritten too early.
    """

    instruction: Instruction
    number: int = field(default_factory=count().__next__)
    """Entries are numbered in the order of their issue."""
    arrive: list[Arrive] = field(default_factory=list)
    spoil: Callable[[], None] | None = None


class HazardState:
    """Scoreboards, fixed latencies and the clock (in cycles) of one instruction stream.

    A scoreboard's queue has a place for each instruction that it counts, the oldest first; a place holds more
    than one entry where groups met that had come different ways.
    """

    def __init__(self) -> None:
        self.now = 0
        self.fixed: dict[Cell, tuple[Instruction, int]] = {}
        self.pending: dict[Cell, list[InFlight]] = {}
        self.reading: dict[Cell, list[InFlight]] = {}
        self.queues: list[list[list[InFlight]]] = [[] for _ in range(SCOREBOARDS)]
        self.results: dict[str, list[InFlight]] = {}
        self.sources: dict[str, list[InFlight]] = {}
        self.open_copies: list[Arrive] = []

    # Before an instruction issues.

    def wait(self, instruction: Instruction, threads: Mask) -> None:
        """Let the scoreboards of the wait mask run down."""
        for board in instruction.control.waits():
            if self.queues[board]:
                self.drain(board, 0, threads)

    def drain(self, board: int, depth: int, threads: Mask) -> None:
        """Finish what a scoreboard counts, the oldest first, until `depth` are left."""
        queue = self.queues[board]
        finished = max(0, len(queue) - depth)
        self.queues[board] = queue[finished:]
        for place in queue[:finished]:
            for entry in place:
                self._complete(entry, board, threads)

    def _complete(self, entry: InFlight, board: int, threads: Mask) -> None:
        """A scoreboard has counted an entry, and with it all that its pipe handled before."""
        for arrive in entry.arrive:
            arrive(threads)
        opcode = entry.instruction.opcode
        if entry.instruction.control.write_barrier == board:
            for done in _up_to(self.results, result_order(opcode), entry):
                _remove(self.pending, done.instruction.writes, done)
        # A result that has arrived proves that the sources were read.
        for done in _up_to(self.sources, read_order(opcode), entry):
            _remove(self.reading, done.instruction.reads, done)

    def early_reads(self, instruction: Instruction) -> list[Hazard]:
        """The sources of an instruction that are not there yet at its issue."""
        found = []
        for cell in instruction.reads:
            if cell in self.pending:
                producer = self.pending[cell][0].instruction
                found.append(_hazard("read before wait", cell, instruction, producer))
            elif cell in self.fixed:
                producer, issued = self.fixed[cell]
                elapsed = self.now - issued
                if elapsed < LONGEST and elapsed < latency(producer, cell, instruction):
                    found.append(_hazard("read before ready", cell, instruction, producer))
        return found

    def early_writes(self, instruction: Instruction) -> list[Hazard]:
        """Destinations that something in flight still writes or reads."""
        found = []
        order = read_order(instruction.opcode)
        for cell in instruction.writes:
            for entry in self.pending.get(cell, ()):
                found.append(_hazard("write before wait", cell, instruction, entry.instruction))
            for entry in self.reading.get(cell, ()):
                if order is not None and order == read_order(entry.instruction.opcode):
                    continue  # The same pipe reads the old value first.
                found.append(_hazard("overwritten while read", cell, instruction, entry.instruction))
                if entry.spoil is not None:
                    entry.spoil()
        return found

    # When it issues.

    def issue(
        self, instruction: Instruction, *, active: bool, spoil: Callable[[], None] | None = None
    ) -> None:
        """Record what the instruction has in flight from now on, and let its stall count pass.

        `active`: whether any thread executes it; else its guard turned it off, and it moves nothing.
        """
        control = instruction.control
        entry = InFlight(instruction, spoil=spoil)
        if instruction.opcode == "LDGDEPBAR":
            entry.arrive, self.open_copies = self.open_copies, []
        variable = needs_scoreboard(instruction)
        if active:
            for cell in instruction.writes:
                if variable:
                    self.pending[cell] = [entry]
                    self.fixed.pop(cell, None)
                else:
                    self.fixed[cell] = (instruction, self.now)
            if variable or control.read_barrier != NO_SCOREBOARD or read_order(instruction.opcode):
                for cell in instruction.reads:
                    # Predicates and uniform registers are read when the instruction issues.
                    if cell[0] == "R":
                        self.reading.setdefault(cell, []).append(entry)
            _enqueue(self.results, result_order(instruction.opcode), entry)
            _enqueue(self.sources, read_order(instruction.opcode), entry)
        for board in {control.write_barrier, control.read_barrier} - {NO_SCOREBOARD}:
            self.queues[board].append([entry])
        self.now += control.stall

    # Groups that part and meet.

    def fork(self) -> HazardState:
        """A copy for a group that goes its own way; what is in flight is shared."""
        other = HazardState()
        other.now = self.now
        other.fixed = dict(self.fixed)
        other.pending = dict(self.pending)
        other.reading = {cell: list(entries) for cell, entries in self.reading.items()}
        other.queues = [list(queue) for queue in self.queues]
        other.results = {name: list(entries) for name, entries in self.results.items()}
        other.sources = {name: list(entries) for name, entries in self.sources.items()}
        other.open_copies = list(self.open_copies)
        return other

    def merge(self, other: HazardState) -> None:
        """Join the state of another group that has come to the same instruction."""
        for cell, (producer, issued) in other.fixed.items():
            since = self.now - (other.now - issued)
            if cell not in self.fixed or self.fixed[cell][1] < since:
                self.fixed[cell] = (producer, since)
        for mine, theirs in ((self.pending, other.pending), (self.reading, other.reading)):
            for cell, entries in theirs.items():
                mine[cell] = _union(mine.get(cell, []), entries)
        for order, others in ((self.results, other.results), (self.sources, other.sources)):
            for name, entries in others.items():
                joint = _union(order.get(name, []), entries)
                order[name] = sorted(joint, key=lambda entry: entry.number)
        for board, queue in enumerate(other.queues):
            self.queues[board] = _merge_queues(self.queues[board], queue)
        self.open_copies = _union(self.open_copies, other.open_copies)


def _hazard(kind: str, cell: Cell, instruction: Instruction, producer: Instruction) -> Hazard:
    return Hazard(kind, cell, instruction.address, instruction.text, producer.address, producer.text)


def _remove(table: dict[Cell, list[InFlight]], cells: Sequence[Cell], entry: InFlight) -> None:
    for cell in cells:
        entries = table.get(cell)
        if entries is not None and entry in entries:
            if len(entries) == 1:
                del table[cell]
            else:
                table[cell] = [e for e in entries if e is not entry]


def _enqueue(orders: dict[str, list[InFlight]], name: str | None, entry: InFlight) -> None:
    if name is not None:
        orders.setdefault(name, []).append(entry)


def _up_to(orders: dict[str, list[InFlight]], name: str | None, entry: InFlight) -> list[InFlight]:
    """Take an entry, and all that were issued before it, out of an in-order queue."""
    if name is None:
        return [entry]
    queue = orders.get(name, [])
    orders[name] = [e for e in queue if e.number > entry.number]
    return [e for e in queue if e.number < entry.number] + [entry]


_Item = TypeVar("_Item")


def _union(first: list[_Item], second: list[_Item]) -> list[_Item]:
    return first + [item for item in second if not any(item is known for known in first)]


def _merge_queues(first: list[list[InFlight]], second: list[list[InFlight]]) -> list[list[InFlight]]:
    """Places side by side, counted from the newest, as each group waits until so many are left."""
    length = max(len(first), len(second))
    nothing: list[InFlight] = []
    padded = [[nothing] * (length - len(queue)) + queue for queue in (first, second)]
    return [_union(a, b) for a, b in zip(*padded, strict=True)]
