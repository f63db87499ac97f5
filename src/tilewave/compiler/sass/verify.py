"""Proves that a re-emitted loop does what the compiler's loop does, and keeps every promise to the hardware.

It is given two versions of a kernel, and knows nothing of how the second came about. It proves that

* only the steady loop's instructions differ, and the loop is again one basic block;
* every value that an iteration leaves behind for the next one, or for the code behind the loop, is made by
  the same instructions from the same values, loads, stores, copies and barriers included (`meaning`); cells
  that differ are read by nobody, by liveness of the whole kernel;
* memory is accessed in the compiler's order, but for loads from shared memory, which may pass one another,
  and may come before an asynchronous copy that they followed: the copy might have taken that long;
* fixed latencies are kept and scoreboards waited for, on every way into the loop, around it and out of it;
* no reuse flag outlives its register, and between a flag and its use are but multiply-adds and loads;
* no more registers are used than the kernel is given, and control bits are such as a compiler sets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from tilewave.compiler.sass.flow import live_before, steady_loop, successors
from tilewave.compiler.sass.meaning import Meaning, Meaningless, Numbers, interpret, plain_moves
from tilewave.emulator.sass import Instruction
from tilewave.emulator.sass.hazards import Hazard, HazardState
from tilewave.emulator.sass.instruction import NO_SCOREBOARD, SCOREBOARDS, Cell
from tilewave.emulator.sass.latency import LONGEST
from tilewave.emulator.sass.operands import Register
from tilewave.emulator.sass.reuse import cached_reads
from tilewave.emulator.sass.transfer import copy_depth

_ALL = (1 << SCOREBOARDS) - 1
_NO_THREADS = np.zeros(0, dtype=np.bool_)
_ROUNDS = 3
"""Iterations that are followed: what an iteration leaves in flight, the next one meets."""
_PATHS = 64
_SCOREBOARD_DELAY = 2
"""Cycles from an instruction to one that waits for its scoreboard: before that it may not count it yet."""
_BRANCH_STALL = 5
_MOST_COUNTED = 63
"""Instructions that a scoreboard can count."""


class Rejected(Exception):
    """The loop is not proved right; the text says what is wrong."""


class Verifier:
    """Judges versions of one kernel's code against the compiler's own.

    `multiply_adds`: FFMAs of the steady loop.
    """

    def __init__(self, code: Sequence[Instruction], multiply_adds: int) -> None:
        self.code = list(code)
        found = steady_loop(code, multiply_adds)
        if isinstance(found, str):
            raise Rejected(found)
        self.first, self.last = found
        self.multiply_adds = multiply_adds
        (self.live_behind,) = live_before(code, self.last + 1)
        self.ways_in = list(_ways_to(code, self.first))
        self.way_from_entry = _shortest_way(code, self.first)
        self.numbers = Numbers()
        try:
            self.meaning = interpret(code[self.first : self.last + 1], self.numbers)
        except Meaningless as error:
            raise Rejected(str(error)) from None
        self.moves = plain_moves(code)

    def check(self, code: Sequence[Instruction], registers: int) -> None:
        """Raise `Rejected` unless `code` is proved to do what the compiler's code does.

        `registers`: how many a thread is given.
        """
        first, last = self._same_but_the_loop(code)
        self._same_meaning(code, first, last)
        self._encodings(code, registers)
        self._control(code, first, last)
        self._reuse(code, first, last)
        self._timing(code, first, last)

    # What is computed.

    def _same_but_the_loop(self, code: Sequence[Instruction]) -> tuple[int, int]:
        """Where the loop is in the new code."""
        _demand(len(code) == len(self.code), "the code's length differs")
        for old, new in zip(self.code, code, strict=True):
            inside = self.first <= old.address // 16 <= self.last
            _demand(inside or old.word == new.word, f"{new.text} at {new.address:#x} is not of the loop")
        found = steady_loop(code, self.multiply_adds)
        if isinstance(found, str):
            raise Rejected(found)
        first, last = found
        _demand(self.first <= first and last <= self.last, "the loop has left its place")
        return first, last

    def _same_meaning(self, code: Sequence[Instruction], first: int, last: int) -> None:
        numbers, old = self.numbers, self.meaning
        try:
            # Registers may be copied before the loop: they then stand for the cells whose value they hold.
            before = interpret(code[self.first : first], numbers)
            new = interpret(code[first : last + 1], numbers, before.state)
            after = interpret(code[last + 1 : self.last + 1], numbers, new.state)
        except Meaningless as error:
            raise Rejected(str(error)) from None
        for outside in (before, after):
            acts = outside.effects or outside.loads or outside.global_loads or outside.condition
            _demand(not acts, "memory is accessed at the loop's side")
        # Bits that the decoder gives no meaning to may have one for the hardware.
        moves = before.moves | new.moves | after.moves
        _demand(moves <= self.moves, "a move is encoded as none of the compiler's is")
        # By induction: what the new loop reads from before an iteration is, in every iteration, what the
        # compiler's loop has in the cell that it stands for.
        for cell in _read_first(code[first : last + 1]):
            stands_for = numbers.cell_of(before.state.get(cell, numbers.before(cell)))
            _demand(stands_for is not None, f"{_name(cell)} is computed before the loop")
            assert stands_for is not None
            same = new.value(cell) == old.value(stands_for)
            _demand(same, f"{_name(cell)} has another value for the next iteration")
        for cell in sorted(self.live_behind):
            _demand(after.value(cell) == old.value(cell), f"{_name(cell)} leaves the loop with another value")
        _demand(new.condition == old.condition, "the loop goes on upon another condition")
        _same_memory(old, new)

    # What the hardware is promised.

    def _encodings(self, code: Sequence[Instruction], registers: int) -> None:
        for one in code[self.first : self.last + 1]:
            fault = one.fault(registers)
            _demand(fault is None, f"{one.text} at {one.address:#x} {fault}")

    def _control(self, code: Sequence[Instruction], first: int, last: int) -> None:
        inside = code[self.first : self.last + 1]
        boards = [one.control.write_barrier for one in inside if one.opcode == "LDGDEPBAR"]
        waited = [copy_depth(one)[0] for one in inside if one.opcode == "DEPBAR"]
        _demand(set(boards) <= set(waited), "copies are counted by a scoreboard that is not waited for")
        counted = Counter(b for one in inside for b in (one.control.write_barrier, one.control.read_barrier))
        counted.pop(NO_SCOREBOARD, None)
        _demand(max(counted.values(), default=0) <= _MOST_COUNTED, "a scoreboard has too much to count")
        for one in inside:
            control = one.control
            where = f"{one.text} at {one.address:#x}"
            set_boards = {control.write_barrier, control.read_barrier} - {NO_SCOREBOARD}
            _demand(all(board < SCOREBOARDS for board in set_boards), f"{where}: no such scoreboard")
            own = one.opcode == "LDGDEPBAR"
            _demand(own or not set_boards & set(boards), f"{where} takes the copies' scoreboard")
            _demand(control.stall >= 1, f"{where} does not stall")
            slots = {register.slot for _, register in _reuse_slots(one)}
            flagged = {slot for slot in range(4) if control.reuse >> slot & 1}
            _demand(flagged <= slots, f"{where}: a reuse flag without a register")
        _demand(code[last].control.stall >= _BRANCH_STALL, "the branch stalls too short")
        for mask, since in _since_set(code[first : last + 1]):
            _demand(since >= _SCOREBOARD_DELAY, f"scoreboards {mask:#b} are waited for too soon")
        if self._is_changed(code):
            _demand(inside[0].control.wait_mask == _ALL, "what is in flight at the entry is not waited for")
            _demand(code[last].control.wait_mask == _ALL, "the branch does not wait for all scoreboards")

    def _is_changed(self, code: Sequence[Instruction]) -> bool:
        part = slice(self.first, self.last + 1)
        return [one.word for one in code[part]] != [one.word for one in self.code[part]]

    def _reuse(self, code: Sequence[Instruction], first: int, last: int) -> None:
        kept: dict[tuple[int, int], int] = {}  # (slot, bank) -> register
        changed = self._is_changed(code)
        loop = code[first : last + 1]
        for one in (*loop, *loop):
            where = f"{one.text} at {one.address:#x}"
            if changed and one.opcode not in ("FFMA", "LDS"):
                _demand(not kept, f"{where} comes between a reuse flag and its use")
            for slot, register in _reuse_slots(one):
                for part in range(register.count):
                    index = register.index + part
                    kept.pop((slot, index % 2), None)
                    if register.reuse:
                        kept[slot, index % 2] = index
            for kind, index in one.writes:
                _demand(kind != "R" or index not in kept.values(), f"{where} overwrites a cached operand")
        _demand(not changed or not kept, "a reuse flag is set beyond the loop")

    def _timing(self, code: Sequence[Instruction], first: int, last: int) -> None:
        changed = self._is_changed(code)
        for way in (self.way_from_entry, *self.ways_in):
            state = HazardState()
            for index in way:
                _step(state, code[index])
            rounds = [*range(self.first, first)]
            rounds += [*range(first, last + 1)] * _ROUNDS
            rounds += [*range(last + 1, self.last + 1)]
            for index in rounds:
                for hazard in _step(state, code[index]):
                    raise Rejected(str(hazard))
            if changed:
                _demand(not state.pending, "the loop leaves results in flight")
                _demand(not state.reading, "the loop leaves sources unread")
            _way_out(state, code, self.last + 1, state.now + LONGEST)


def _same_memory(old: Meaning, new: Meaning) -> None:
    numbers = [[effect.number for effect in side.effects] for side in (old, new)]
    _demand(numbers[0] == numbers[1], "stores, copies or barriers differ or are out of order")
    for i in range(1, len(old.effects)):
        # What never happens is there for what follows it.
        tied = old.effects[i - 1].never and old.effects[i].glued
        _demand(new.effects[i].glued or not tied, "an instruction that never happens has moved")
    _demand(old.global_loads == new.global_loads, "loads from global memory differ")
    values = [Counter(number for number, _ in side.loads) for side in (old, new)]
    _demand(values[0] == values[1], "loads from shared memory differ, or pass a store or a barrier")
    for (_, before), (_, now) in zip(sorted(old.loads), sorted(new.loads), strict=True):
        _demand(now <= before, "a load from shared memory comes after a copy that it preceded")


def _step(state: HazardState, one: Instruction) -> list[Hazard]:
    """Issue an instruction; returns what it reads or writes too early."""
    state.wait(one, _NO_THREADS)
    never = one.guard.index == 7 and one.guard.negate
    found = [] if never else state.early_reads(one) + state.early_writes(one)
    state.issue(one, active=not never)
    if one.opcode == "DEPBAR":
        state.drain(*copy_depth(one), _NO_THREADS)
    return found


def _way_out(state: HazardState, code: Sequence[Instruction], index: int, until: int) -> None:
    """Follow all ways from an instruction on until the clock says that every fixed latency is over."""
    after = successors(code)
    open_ways = [(state, index)]
    while open_ways:
        here, at = open_ways.pop()
        if here.now >= until:
            continue
        for hazard in _step(here, code[at]):
            raise Rejected(f"behind the loop, {hazard}")
        for following in after[at]:
            open_ways.append((here.fork() if len(after[at]) > 1 else here, following))
        _demand(len(open_ways) < _PATHS, "there are too many ways out of the loop")


def _ways_to(code: Sequence[Instruction], index: int) -> Iterator[list[int]]:
    """Every way of the last instructions to `index` that takes as long as the longest fixed latency."""
    before: dict[int, list[int]] = {}
    for i, following in enumerate(successors(code)):
        for j in following:
            before.setdefault(j, []).append(i)
    open_ways: list[tuple[list[int], int]] = [([], 0)]
    while open_ways:
        way, cycles = open_ways.pop()
        sources = [i for i in before.get(way[0] if way else index, []) if way or i == index - 1]
        if cycles >= LONGEST or not sources:
            yield way
            continue
        open_ways += [([i, *way], cycles + code[i].control.stall) for i in sources]
        _demand(len(open_ways) < _PATHS, "there are too many ways into the loop")


def _shortest_way(code: Sequence[Instruction], index: int) -> list[int]:
    """The instructions of the shortest way from the kernel's entry to before `index`."""
    after = successors(code)
    came_from: dict[int, int] = {0: -1}
    frontier = [0]
    while frontier and index not in came_from:
        reached = []
        for i in frontier:
            for j in after[i]:
                if j not in came_from:
                    came_from[j] = i
                    reached.append(j)
        frontier = reached
    _demand(index in came_from, "the loop is never reached")
    way = []
    while (index := came_from[index]) >= 0:
        way.append(index)
    return way[::-1]


def _since_set(loop: Sequence[Instruction]) -> Iterator[tuple[int, int]]:
    """For every wait: its mask, and the cycles since one of its scoreboards was set last, over two rounds."""
    now = 0
    last_set: dict[int, int] = {}
    for one in (*loop, *loop):
        for board in one.control.waits():
            if board in last_set:
                yield one.control.wait_mask, now - last_set[board]
        for board in {one.control.write_barrier, one.control.read_barrier} - {NO_SCOREBOARD}:
            last_set[board] = now
        now += one.control.stall


def _read_first(code: Sequence[Instruction]) -> list[Cell]:
    """The cells that a straight piece of code reads before it writes them."""
    written: set[Cell] = set()
    found: dict[Cell, None] = {}
    for one in code:
        found.update((cell, None) for cell in one.reads if cell not in written)
        if one.guard.is_true:
            written.update(one.writes)
    return list(found)


def _reuse_slots(one: Instruction) -> list[tuple[int, Register]]:
    return [] if one.opcode == "BRA" else list(cached_reads(one))


def _name(cell: Cell) -> str:
    return f"{cell[0]}{cell[1]}"


def _demand(condition: object, otherwise: str) -> None:
    if not condition:
        raise Rejected(otherwise)
