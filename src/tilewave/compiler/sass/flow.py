"""Control flow of a kernel's machine code: successors, loops, and which cells are live where.

Flow is that of one thread. A call goes to its target, and a return to behind every call: more ways than there
are, so more is live than need be, never less.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewave.emulator.sass import Instruction
from tilewave.emulator.sass.instruction import Cell
from tilewave.emulator.sass.operands import Immediate, Predicate, Register, Target

_BYTES = 16
_CALLS = frozenset({"CALL.REL"})
_RETURNS = frozenset({"RET.REL"})
_JUMPS = frozenset({"BRA"}) | _CALLS


def target_of(instruction: Instruction) -> int | None:
    """The index of the instruction that a branch or call goes to; None for anything else."""
    if instruction.opcode not in _JUMPS:
        return None
    return _address(instruction) // _BYTES


def _address(jump: Instruction) -> int:
    return next(o.address for o in jump.operands if isinstance(o, Target))


def is_conditional(instruction: Instruction) -> bool:
    """Whether a control instruction may be passed over: by its guard, its predicate operand or its kind."""
    if not instruction.guard.is_true or instruction.has("DIV") or instruction.has("CONV"):
        return True
    return any(isinstance(o, Predicate) and not o.is_true for o in instruction.operands)


def successors(code: Sequence[Instruction]) -> list[tuple[int, ...]]:
    """The indices of the instructions that may come next, for every instruction."""
    behind_calls = tuple(i + 1 for i, one in enumerate(code) if one.opcode in _CALLS)
    found: list[tuple[int, ...]] = []
    for i, one in enumerate(code):
        after: tuple[int, ...] = (i + 1,)
        target = target_of(one)
        if target is not None:
            after = (target, i + 1) if is_conditional(one) else (target,)
        elif one.opcode in _RETURNS:
            after = behind_calls + ((i + 1,) if is_conditional(one) else ())
        elif one.opcode == "EXIT":
            after = (i + 1,) if is_conditional(one) else ()
        found.append(tuple(index for index in dict.fromkeys(after) if index < len(code)))
    return found


_Condition = tuple[Cell, bool] | None
_Need = tuple[Cell, _Condition]
"""A cell whose value is needed: always (None), or only where a predicate is true (or, with True, is not)."""


def live_before(code: Sequence[Instruction], *indices: int) -> list[frozenset[Cell]]:
    """The cells whose value may still be read, before each of these instructions.

    A guarded write ends a value's life for reads under the same guard. Where it can be told that a called
    routine returns to behind the call, each call is followed by itself; else a return leads behind all calls.
    """
    nodes, after = _with_calls_unfolded(code)
    steps = _Needs(code)
    live = [0] * len(nodes)
    changed = True
    while changed:
        changed = False
        for node in range(len(nodes) - 1, -1, -1):
            out = 0
            for following in after[node]:
                out |= live[following]
            new = steps.before(nodes[node], out)
            if new != live[node]:
                live[node] = new
                changed = True
    found = live[: len(code)]
    for node in range(len(code), len(nodes)):
        found[nodes[node]] |= live[node]
    return [steps.cells(found[index]) for index in indices]


class _Needs:
    """What an instruction does to the set of needs behind it; a set is an integer, a bit for each need."""

    def __init__(self, code: Sequence[Instruction]) -> None:
        read = [[(cell, _guard(one)) for cell in one.reads] for one in code]
        self._bits: dict[_Need, int] = {}
        of_cell: dict[Cell, int] = {}
        of_predicate: dict[Cell, int] = {}
        for need in (need for needs in read for need in needs):
            for cell, condition in (need, (need[0], None)):
                bit = self._bits.setdefault((cell, condition), 1 << len(self._bits))
                of_cell[cell] = of_cell.get(cell, 0) | bit
                if condition is not None:
                    of_predicate[condition[0]] = of_predicate.get(condition[0], 0) | bit
        # The guard itself is needed always.
        self._gained = []
        for one, needs in zip(code, read, strict=True):
            guard = _guard(one)
            gained = 0
            for cell, condition in needs:
                unconditional = guard is not None and cell == guard[0]
                gained |= self._bits[cell, None if unconditional else condition]
            self._gained.append(gained)
        self._kept = []
        self._decided = []
        for one in code:
            guard, kept, decided = _guard(one), -1, 0
            for cell in one.writes:
                ended = of_cell.get(cell, 0) if guard is None else self._bits.get((cell, guard), 0)
                kept &= ~ended
                decided |= of_predicate.get(cell, 0)
            self._kept.append(kept)
            self._decided.append(decided)
        self._by_bit = list(self._bits)

    def before(self, index: int, out: int) -> int:
        """The needs before an instruction, of those behind it."""
        if unknown := out & self._decided[index]:
            # Before the instruction, a condition on a predicate that it writes is not known to hold.
            out &= ~unknown
            for cell in self.cells(unknown):
                out |= self._bits[cell, None]
        return self._gained[index] | (out & self._kept[index])

    def cells(self, needs: int) -> frozenset[Cell]:
        """The cells in a set of needs."""
        found = []
        while needs:
            lowest = needs & -needs
            found.append(self._by_bit[lowest.bit_length() - 1][0])
            needs ^= lowest
        return frozenset(found)


def _guard(one: Instruction) -> _Condition:
    guard = one.guard
    return None if guard.is_true else (("UP" if guard.uniform else "P", guard.index), guard.negate)


def _with_calls_unfolded(code: Sequence[Instruction]) -> tuple[list[int], list[tuple[int, ...]]]:
    """A flow graph in which every call has a copy of the routine: instruction and successors of each node.

    The first nodes are the code itself.
    """
    plain = successors(code)
    nodes, after = list(range(len(code))), list(plain)
    calls = [i for i, one in enumerate(code) if one.opcode in _CALLS]
    bodies = {}
    for i in calls:
        body = _routine(code, plain, plain[i][0])
        if is_conditional(code[i]) or body is None or not _returns_behind(code, i, body):
            return list(range(len(code))), plain
        bodies[i] = body
    for i, body in bodies.items():
        copy_of = {index: len(nodes) + position for position, index in enumerate(body)}
        nodes += body
        for index in body:
            if code[index].opcode in _RETURNS:
                after.append((i + 1,))
            else:
                after.append(tuple(copy_of[j] for j in plain[index]))
        after[i] = (copy_of[plain[i][0]],)
    for body in bodies.values():
        for index in body:
            after[index] = ()
    return nodes, after


def _routine(code: Sequence[Instruction], plain: Sequence[tuple[int, ...]], entry: int) -> list[int] | None:
    """The instructions of the routine that begins at `entry`; None unless it calls nothing, is entered there
    only and ends in returns."""
    body = {entry}
    frontier = [entry]
    while frontier:
        i = frontier.pop()
        if code[i].opcode in _CALLS or code[i].opcode == "EXIT":
            return None
        if code[i].opcode in _RETURNS:
            if is_conditional(code[i]):
                return None
            continue
        new = set(plain[i]) - body
        body |= new
        frontier += new
    entered = any(
        j in body and code[i].opcode not in _CALLS
        for i, following in enumerate(plain)
        if i not in body and code[i].opcode not in _RETURNS
        for j in following
    )
    return None if entered else sorted(body)


def _returns_behind(code: Sequence[Instruction], call: int, body: Sequence[int]) -> bool:
    """Whether the routine's returns use a register that holds the address behind the call, and keep it."""
    held: set[int] = set()
    for i in range(call - 1, -1, -1):
        one = code[i]
        if one.opcode in _JUMPS | _RETURNS or one.opcode in ("EXIT", "BSYNC"):
            break
        value = one.operands[1] if one.opcode == "MOV" else None
        target = one.operands[0]
        address = isinstance(value, Immediate) and value.value == (call + 1) * _BYTES
        if address and one.guard.is_true and isinstance(target, Register):
            behind = {cell for later in code[i + 1 : call] for cell in later.writes}
            if ("R", target.index) not in behind:
                held.add(target.index)
    written = {index for i in body for kind, index in code[i].writes if kind == "R"}
    kept = held - written
    entered = {target_of(code[i]) for i in body}

    def holds_address(at: int, register: int) -> bool:
        """Whether the return at `at` finds the address in the register, kept or copied right before."""
        if register in kept:
            return True
        for i in range(at - 1, body[0] - 1, -1):
            if i + 1 in entered or code[i].opcode in _JUMPS | _RETURNS:
                return False
            if ("R", register) in code[i].writes:
                source = code[i].operands[1] if code[i].opcode == "MOV" else None
                plain = isinstance(source, Register) and not source.uniform and code[i].guard.is_true
                return plain and isinstance(source, Register) and source.index in kept
        return False

    returns = [i for i in body if code[i].opcode in _RETURNS]
    used = [(i, o.index) for i in returns for o in code[i].operands if isinstance(o, Register)]
    return bool(used) and all(holds_address(*one) for one in used)


def innermost_loops(code: Sequence[Instruction]) -> list[tuple[int, int]]:
    """First and last index of every loop that holds no other: from a branch's target back to the branch."""
    loops = [
        (target, last)
        for last, one in enumerate(code)
        if one.opcode == "BRA" and (target := target_of(one)) is not None and target <= last
    ]
    return [
        (first, last)
        for first, last in loops
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in loops)
    ]


def steady_loop(code: Sequence[Instruction], multiply_adds: int) -> tuple[int, int] | str:
    """First and last index of the one innermost loop with so many FFMAs, or why there is none.

    It is one basic block: nothing branches into it or out of it but its last instruction, which branches to
    its first.
    """
    found = [
        (first, last)
        for first, last in innermost_loops(code)
        if sum(one.opcode == "FFMA" for one in code[first:last]) == multiply_adds
    ]
    if len(found) != 1:
        return f"{len(found)} innermost loops hold {multiply_adds} multiply-adds, not one"
    first, last = found[0]
    if astray := [one.text for one in code if one.opcode in _JUMPS and _address(one) % _BYTES]:
        return f"{astray[0]} goes to no instruction"
    into = [
        i
        for i, one in enumerate(code)
        if (target := target_of(one)) is not None and first <= target <= last and i != last
    ]
    control = {"BRA", "EXIT", "BSSY", "BSYNC", "BREAK", "WARPSYNC", "CALL.REL", "RET.REL", "YIELD"}
    inside = [one.text for one in code[first:last] if one.opcode in control]
    if into or inside:
        return f"the steady loop is not one basic block: {', '.join(inside) or 'it is entered by a branch'}"
    if first == 0 or successors(code)[first - 1] != (first,):
        return "the steady loop is not entered from the instruction before it"
    return first, last
