"""The verifier takes what is right, and none of hundreds of loops that are wrong in one place."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Sequence

import pytest
from reemitted_kernels import INSTANCES, WIDE, Compiled, Generator, compiled, shared_instance, some

from tilewave.compiler.sass.emit import Order, emit
from tilewave.compiler.sass.flow import target_of
from tilewave.compiler.sass.reemit import orders
from tilewave.compiler.sass.register_file import score
from tilewave.compiler.sass.registers import base_of, register_operands
from tilewave.compiler.sass.verify import Rejected
from tilewave.emulator.sass import Instruction, decode
from tilewave.emulator.sass.instruction import NO_SCOREBOARD, RESERVED_REGISTERS
from tilewave.emulator.sass.operands import Register
from tilewave.errors import UnknownInstructionError
from tilewave.kernels.instances import Instance

SAMPLES = 12
REGISTERS = 255
Words = list[int]
Loop = Sequence[Instruction]


@functools.cache
def emitted(instance: Instance) -> tuple[Instruction, ...]:
    """The new loop, at its addresses."""
    kernel = compiled(instance)
    order = Order(min(kernel.steady.sides, key=lambda side: kernel.steady.extent[side]))
    if instance.needs_new_loop:
        order = fastest(kernel)
    words = emit(kernel.loop, kernel.steady, kernel.live, kernel.behind, order)
    return at_its_place(kernel, words)


def fastest(kernel: Compiled) -> Order:
    """Of the orders that are tried for a kernel, the one that the pass takes."""

    def cycles(order: Order) -> int:
        words = emit(kernel.loop, kernel.steady, kernel.live, kernel.behind, order)
        return score([decode(word, 0, 90) for word in words]).cycles

    return min(orders(kernel.steady), key=cycles)


def between_moves(loop: Loop) -> slice:
    """The loop without the moves beside it, which a kernel has whose own loop has moves of sums."""
    (branch,) = where(loop, lambda one: one.opcode == "BRA")
    target = target_of(loop[branch])
    assert target is not None
    return slice(target - loop[0].address // 16, branch + 1)


def at_its_place(kernel: Compiled, words: Words) -> tuple[Instruction, ...]:
    return tuple(decode(word, kernel.loop[i].address, 90) for i, word in enumerate(words))


def judge(kernel: Compiled, loop: Loop, registers: int = REGISTERS) -> None:
    code = [*kernel.code[: kernel.first], *loop, *kernel.code[kernel.last + 1 :]]
    kernel.verifier.check(code, registers)


def is_rejected(kernel: Compiled, loop: Loop) -> bool:
    try:
        judge(kernel, loop)
    except Rejected:
        return True
    return False


def where(loop: Loop, matches: Callable[[Instruction], bool]) -> list[int]:
    return [i for i, one in enumerate(loop) if matches(one)]


def pick(rng: Generator, indices: Sequence[int]) -> int:
    return int(indices[rng.integers(len(indices))])


def is_load(one: Instruction) -> bool:
    return one.opcode == "LDS" and one.guard.is_true


def is_multiply_add(one: Instruction) -> bool:
    return one.opcode == "FFMA"


def moved(words: Words, source: int, target: int) -> Words:
    """The word at `source` put to where `target` is, what lies between pushed along."""
    words = list(words)
    words.insert(target, words.pop(source))
    return words


# Mutations: each returns words that are wrong, of the loop's words, or None where it finds no place.


def earlier_product(rng: Generator, loop: Loop, words: Words) -> Words | None:
    """Two products of one sum change places."""
    at = pick(rng, where(loop, is_multiply_add))
    same = [
        i for i in where(loop, is_multiply_add) if i != at and loop[i].operands[0] == loop[at].operands[0]
    ]
    other = pick(rng, same)
    words[at], words[other] = words[other], words[at]
    return words


def other_register(rng: Generator, loop: Loop, words: Words) -> Words | None:
    """Any register of any instruction becomes another one."""
    one = loop[at := int(rng.integers(len(loop)))]
    places = [
        i for i, o in enumerate(one.operands) if (register := base_of(o)) is not None and not register.is_zero
    ]
    if not places:
        return None
    place = pick(rng, places)
    operand = one.operands[place]
    register = base_of(operand)
    assert register is not None
    step = 4 if is_load(one) and place == 0 else 2 if register.count == 2 else 1
    words[at] = one.with_register(place, (register.index + step * int(rng.integers(1, 20))) % 252)
    return words


def other_encoding(rng: Generator, loop: Loop, words: Words) -> Words | None:
    """A bit of an immediate, an offset, an opcode, a guard or a modifier flips."""
    at = pick(rng, where(loop, lambda one: one.opcode not in ("NOP",)))
    words[at] ^= 1 << int(rng.integers(105))
    return words


def load_after_use(rng: Generator, loop: Loop, words: Words) -> Words | None:
    """A load comes behind the first multiply-add that needs it."""
    at = pick(rng, where(loop, is_load))
    users = where(loop, lambda one: is_multiply_add(one) and bool(set(one.reads) & set(loop[at].writes)))
    later = [i for i in users if i > at]
    return moved(words, at, later[0]) if later else None


def load_before_last_use(rng: Generator, loop: Loop, words: Words) -> Words | None:
    """A load comes before the last multiply-add that needs what it overwrites."""
    at = pick(rng, where(loop, is_load))
    users = where(loop, lambda one: is_multiply_add(one) and bool(set(one.reads) & set(loop[at].writes)))
    before = [i for i in users if i < at]
    return moved(words, at, before[-1]) if before else None


def load_across_barrier(rng: Generator, loop: Loop, words: Words) -> Words | None:
    """A load passes the barrier."""
    (barrier,) = where(loop, lambda one: one.opcode == "BAR")
    loads = where(loop, is_load)
    before = max(i for i in loads if i < barrier)
    behind = min(i for i in loads if i > barrier)
    return moved(words, before, barrier) if rng.integers(2) else moved(words, behind, barrier)


def store_behind_barrier(rng: Generator, loop: Loop, words: Words) -> Words | None:
    """A store, or the wait for the copies, passes the barrier."""
    (barrier,) = where(loop, lambda one: one.opcode == "BAR")
    at = pick(rng, where(loop, lambda one: one.opcode in ("STS", "DEPBAR")))
    return moved(words, at, barrier)


def copies_out_of_order(rng: Generator, loop: Loop, words: Words) -> Words | None:
    """A copy or a store comes behind what closes its group, or before the store that it followed."""
    acts = where(loop, lambda one: one.opcode in ("LDGSTS", "LDGDEPBAR", "STS", "DEPBAR"))
    first = int(rng.integers(len(acts) - 1))
    if words[acts[first]] == words[acts[first + 1]]:
        return None
    return moved(words, acts[first], acts[first + 1])


def lost(rng: Generator, loop: Loop, words: Words) -> Words | None:
    """One instruction is another one's copy."""
    at, other = (int(i) for i in rng.integers(len(loop) - 1, size=2))
    # Two slices may multiply the same registers: such a copy only leaves a reuse flag out.
    if str(loop[at]).replace(".reuse", "") == str(loop[other]).replace(".reuse", ""):
        return None
    words[at] = words[other]
    return words


def no_wait(rng: Generator, loop: Loop, words: Words) -> Words | None:
    """A result is not waited for."""
    at = pick(rng, where(loop, lambda one: one.control.wait_mask != 0))
    boards = [
        board for board in loop[at].control.waits() if at in (0, len(loop) - 1) or needed(loop, at, board)
    ]
    if not boards:
        return None
    words[at] = loop[at].with_control(wait_mask=loop[at].control.wait_mask & ~(1 << pick(rng, boards)))
    return words


def needed(loop: Loop, at: int, board: int) -> bool:
    """Whether something of the iteration that the instruction reads or overwrites comes by the scoreboard."""
    pending = {cell for one in loop[:at] if one.control.write_barrier == board for cell in one.writes}
    return bool(pending & set(loop[at].reads))


def other_scoreboard(rng: Generator, loop: Loop, words: Words) -> Words | None:
    """The result of a slice's last load is counted by another scoreboard, or that of any load by none.

    (Loads from shared memory come back in order, so that the last one's scoreboard speaks for those before.)
    """
    (barrier,) = where(loop, lambda one: one.opcode == "BAR")
    loads = where(loop[:barrier], is_load)
    last = [
        i
        for i, j in itertools.pairwise(loads)
        if loop[i].control.write_barrier != loop[j].control.write_barrier
    ]
    at = pick(rng, [*last, *where(loop, lambda one: one.opcode == "LDG")])
    old = loop[at].control.write_barrier
    if loop[at].opcode == "LDG":
        boards = [6, NO_SCOREBOARD]
    else:
        boards = [i for i in range(8) if i == 6 or (i != old and not waited_for(loop, at, i))]
    words[at] = loop[at].with_control(write_barrier=pick(rng, boards))
    return words


def waited_for(loop: Loop, at: int, board: int) -> bool:
    """Whether a load from shared memory is there before its result is touched, were it counted by `board`:
    something waits for that scoreboard, or for that of a load behind it."""
    counted = {board}
    for one in loop[at + 1 :]:
        if counted & set(one.control.waits()):
            return True
        if set(loop[at].writes) & {*one.reads, *one.writes}:
            return False
        if is_load(one):
            counted.add(one.control.write_barrier)
    return False


def too_soon(rng: Generator, loop: Loop, words: Words) -> Words | None:
    """A result of fixed latency is read by the very next instruction."""
    producers = where(loop, lambda one: one.opcode in ("IADD3", "MOV", "LOP3.LUT", "IMAD", "SHF", "LEA"))
    at = pick(rng, producers)
    for i in range(at + 1, len(loop) - 1):
        if set(loop[i].reads) & set(loop[at].writes):
            between = {cell for one in loop[at + 1 : i] for cell in one.writes}
            return None if between & set(loop[i].reads) else moved(words, i, at + 1)
    return None


def no_stall(rng: Generator, loop: Loop, words: Words) -> Words | None:
    """An instruction does not stall, or the branch too short."""
    at = int(rng.integers(len(loop))) if rng.integers(3) else len(loop) - 1
    words[at] = loop[at].with_control(stall=0 if at < len(loop) - 1 else int(rng.integers(5)))
    return words


def cached_sum(rng: Generator, loop: Loop, words: Words) -> Words | None:
    """A reuse flag on a sum, which is overwritten."""
    at = pick(rng, where(loop, lambda one: is_multiply_add(one) and bool(one.control.yield_bit)))
    words[at] = loop[at].with_control(reuse=loop[at].control.reuse | 4)
    return words


def stale_flag(rng: Generator, loop: Loop, words: Words) -> Words | None:
    """A reuse flag before an instruction that is neither multiply-add nor load."""
    others = where(loop, lambda one: not is_multiply_add(one) and one.opcode != "LDS")
    before = [i - 1 for i in others if i and is_multiply_add(loop[i - 1])]
    at = pick(rng, before)
    words[at] = loop[at].with_control(reuse=int(rng.integers(1, 4)))
    return words


def yield_beside_flag(rng: Generator, loop: Loop, words: Words) -> Words | None:
    """The yield bit of an instruction with reuse flags becomes 0, which makes something else of them."""
    at = pick(rng, where(loop, lambda one: bool(one.control.reuse)))
    words[at] = loop[at].with_control(yield_bit=0)
    return words


def flag_without_register(rng: Generator, loop: Loop, words: Words) -> Words | None:
    """A reuse flag on an instruction that reads nothing through that slot."""
    at = pick(rng, where(loop, lambda one: one.opcode in ("LDS", "STS", "LDGSTS", "BAR", "MOV")))
    words[at] = loop[at].with_control(reuse=8)
    return words


def flag_outlives_load(rng: Generator, loop: Loop, words: Words) -> Words | None:
    """A load overwrites a cached operand: it comes between a reuse flag and its use."""
    loads = where(loop, is_load)
    flagged = where(loop, lambda one: is_multiply_add(one) and bool(one.control.reuse & 3))
    at = pick(rng, flagged)
    slot = 1 if loop[at].control.reuse & 1 else 2
    register = loop[at].operands[slot]
    for load in loads:
        if set(loop[load].writes) & {("R", getattr(register, "index", None))} and load > at + 1:
            return moved(words, load, at + 1)
    return None


def branch_elsewhere(rng: Generator, loop: Loop, words: Words) -> Words | None:
    """The branch goes elsewhere, or upon another condition."""
    bit = pick(rng, [12, 13, 14, 15, *range(16, 24), 32, *range(34, 51), *range(87, 91)])
    words[-1] ^= 1 << bit
    return words


MUTATIONS = (
    earlier_product,
    other_register,
    other_encoding,
    load_after_use,
    load_before_last_use,
    load_across_barrier,
    store_behind_barrier,
    copies_out_of_order,
    lost,
    no_wait,
    other_scoreboard,
    too_soon,
    no_stall,
    cached_sum,
    stale_flag,
    yield_beside_flag,
    flag_without_register,
    flag_outlives_load,
    branch_elsewhere,
)


def check_mutations(
    rng: Generator, instance: Instance, mutate: Callable[..., Words | None], samples: int
) -> None:
    kernel, whole = compiled(instance), emitted(instance)
    part = between_moves(whole)
    loop = whole[part]
    found = 0
    for _ in range(6 * samples):
        words = mutate(rng, loop, [one.word for one in loop])
        if words is None or words == [one.word for one in loop]:
            continue
        all_words = [one.word for one in whole]
        all_words[part] = words
        changed = [i for i, one in enumerate(whole) if one.word != all_words[i]]
        if mutate is no_wait and 0 < part.start == changed[0]:
            continue  # a move before the loop has waited, and so does the branch
        found += 1
        try:
            wrong = at_its_place(kernel, all_words)
        except UnknownInstructionError:
            continue
        assert is_rejected(kernel, wrong), [(str(whole[i]), str(wrong[i])) for i in changed[:3]]
        if found == samples:
            return
    assert found, f"{mutate.__name__} found no place"


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_mutated_loops_are_rejected(mutate: Callable[..., Words | None], rng: Generator) -> None:
    check_mutations(rng, shared_instance(rng), mutate, SAMPLES)


@pytest.mark.long
@pytest.mark.parametrize("instance", INSTANCES[::4], ids=str)
def test_every_mutation_of_many_instances(instance: Instance, rng: Generator) -> None:
    for mutate in MUTATIONS:
        check_mutations(rng, instance, mutate, 4)


# Wide tiles, whose loops renew operands in place and may have moves beside them.


_shared_wide: list[Instance] = []


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_mutated_loops_of_wide_tiles_are_rejected(
    mutate: Callable[..., Words | None], rng: Generator
) -> None:
    if not _shared_wide:
        _shared_wide.append(WIDE[rng.integers(len(WIDE))])
    check_mutations(rng, _shared_wide[0], mutate, 2)


@pytest.mark.long
@pytest.mark.parametrize("instance", WIDE, ids=str)
def test_every_mutation_of_every_wide_tile(instance: Instance, rng: Generator) -> None:
    for mutate in MUTATIONS:
        check_mutations(rng, instance, mutate, 4)


@pytest.mark.parametrize(
    "instance", [WIDE[0], *(pytest.param(one, marks=pytest.mark.long) for one in WIDE[1:])], ids=str
)
def test_moves_beside_the_loop(instance: Instance, rng: Generator) -> None:
    """A move before the loop that brings another value, is missing or not waited for; one behind it that
    changes a sum."""
    kernel, whole = compiled(instance), emitted(instance)
    judge(kernel, whole)
    part = between_moves(whole)
    assert part.start + len(whole) - part.stop == len(kernel.steady.moves)
    sums = sorted(kernel.steady.sums.values())
    wrong: list[tuple[int, int]] = []
    for i in range(part.start):
        place, source = register_operands(whole[i])[-1]
        wrong.append((i, whole[i].with_register(place, pick(rng, [r for r in sums if r != source.index]))))
        wrong.append((i, whole[i].with_register(0, pick(rng, sums))))
        wrong.append((i, kernel.loop[kernel.steady.moves[0]].word))
    if part.start:
        wrong.append((0, whole[0].with_control(wait_mask=0)))
    for i in range(part.stop, len(whole)):
        target = whole[i].operands[0]
        assert isinstance(target, Register)
        wrong.append((i, whole[i].with_register(0, pick(rng, [r for r in sums if r != target.index]))))
    for i, word in wrong:
        words = [one.word for one in whole]
        words[i] = word
        assert is_rejected(kernel, at_its_place(kernel, words)), str(decode(word, 0, 90))


# What is right is taken.


def test_the_compilers_own_loop_is_accepted(rng: Generator) -> None:
    for instance in [shared_instance(rng), *some(rng, 1)]:
        kernel = compiled(instance)
        judge(kernel, kernel.loop, kernel.registers)


def test_emitted_loops_are_accepted(rng: Generator) -> None:
    for instance in [shared_instance(rng), *some(rng, 1)]:
        kernel = compiled(instance)
        for held in kernel.steady.sides:
            words = emit(kernel.loop, kernel.steady, kernel.live, kernel.behind, Order(held))
            judge(kernel, at_its_place(kernel, words))


def test_harmless_changes_are_accepted(rng: Generator) -> None:
    """Longer stalls, more waits, no reuse, independent neighbours exchanged, another free register."""
    instance = shared_instance(rng)
    kernel, loop = compiled(instance), emitted(instance)
    for i in rng.integers(len(loop) - 1, size=5):
        words = [one.word for one in loop]
        words[i] = loop[i].with_control(stall=min(11, loop[i].control.stall + int(rng.integers(1, 4))))
        judge(kernel, at_its_place(kernel, words))
    judge(kernel, at_its_place(kernel, [one.with_control(reuse=0) for one in loop]))
    at = next(i for i in range(1, len(loop)) if loop[i].opcode == loop[i + 1].opcode == "FFMA")
    plain = [one.with_control(reuse=0) for one in loop]
    plain[at], plain[at + 1] = plain[at + 1], plain[at]
    judge(kernel, at_its_place(kernel, plain))
    # One quad of the second set, exchanged for one that nobody uses.
    used = {index for one in loop for kind, index in one.reads + one.writes if kind == "R"}
    live = {index for kind, index in kernel.live if kind == "R"}
    unused = [d for d in range(0, 252, 4) if not set(range(d, d + 4)) & (used | live | {1})]
    assert unused
    judge(kernel, at_its_place(kernel, renamed(loop, pick(rng, second_set(kernel, loop)), unused[0])))


def second_set(kernel: Compiled, loop: Loop) -> list[int]:
    """The quads that the new loop adds."""
    homes = {home for homes in kernel.steady.homes.values() for home in homes}
    return sorted({min(i for _, i in one.writes) for one in loop if is_load(one)} - homes)


def renamed(loop: Loop, old: int, new: int) -> Words:
    words = []
    for one in loop:
        word = one.word
        for position, operand in enumerate(one.operands):
            if isinstance(operand, Register) and not operand.uniform and old <= operand.index < old + 4:
                word = decode(word, one.address, 90).with_register(position, operand.index - old + new)
        words.append(word)
    return words


# The rest of the kernel.


def test_a_register_that_is_live_elsewhere_is_not_free(rng: Generator) -> None:
    """A quad of the new loop moved onto registers that the code behind the loop reads."""
    instance = shared_instance(rng)
    kernel, loop = compiled(instance), emitted(instance)
    quad = pick(rng, second_set(kernel, loop))
    used = {index for one in loop for kind, index in one.reads + one.writes if kind == "R"}
    passing = [i // 4 * 4 for kind, i in kernel.live if kind == "R" and i not in used and i < 252]
    free_besides = [d for d in passing if not set(range(d, d + 4)) & used]
    if not free_besides:
        pytest.skip("no register passes the loop by in a quad of its own")
    with pytest.raises(Rejected, match="another value"):
        judge(kernel, at_its_place(kernel, renamed(loop, quad, pick(rng, free_besides))))


def test_the_rest_of_the_kernel_must_stay(rng: Generator) -> None:
    kernel = compiled(shared_instance(rng))
    outside = [i for i in range(len(kernel.code)) if not kernel.first <= i <= kernel.last]
    at = pick(rng, [i for i in outside if kernel.code[i].opcode == "IADD3"])
    code = list(kernel.code)
    code[at] = decode(code[at].with_control(stall=15), code[at].address, 90)
    with pytest.raises(Rejected, match="is not of the loop"):
        kernel.verifier.check(code, REGISTERS)
    with pytest.raises(Rejected, match="length"):
        kernel.verifier.check(kernel.code[:-1], REGISTERS)


def test_registers_beyond_the_kernels_count(rng: Generator) -> None:
    instance = shared_instance(rng)
    kernel, loop = compiled(instance), emitted(instance)
    largest = max(index for one in loop for kind, index in one.reads + one.writes if kind == "R")
    judge(kernel, loop, largest + 1 + RESERVED_REGISTERS)
    for registers in (largest, largest + 1, largest + RESERVED_REGISTERS):
        with pytest.raises(Rejected, match=rf"uses R\d+, but a thread has {registers} registers") as refusal:
            judge(kernel, loop, registers)
        # Which of several such instructions is named is the order of the check.
        named = int(re.search(r"uses R(\d+)", str(refusal.value))[1])  # type: ignore[index]
        assert registers - RESERVED_REGISTERS <= named <= largest
