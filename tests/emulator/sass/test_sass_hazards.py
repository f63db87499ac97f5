"""Faults planted in the control bits: the interpreter must find each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from sass_helpers import instruction_program, rung_cubin, same_bits

from tilewave.emulator import Memory
from tilewave.emulator.sass import (
    BlockResult,
    Cubin,
    Hazard,
    Instruction,
    decode,
    decode_function,
    run_blocks,
)
from tilewave.emulator.sass.latency import latency, needs_scoreboard, read_order, shortest_distances
from tilewave.emulator.sass.operands import Register
from tilewave.errors import BarrierError, EmulationError, MemoryFault
from tilewave.lab.registry import get_rung, load_rungs

ARCHITECTURES = ["sm_80", "sm_90a"]


@dataclass(frozen=True)
class Fault:
    """Changed words by address, and the hazard that must be found: its kind and the address of its victim."""

    name: str
    changes: dict[int, int]
    kind: str
    shows_at: int


@dataclass
class Workbench:
    """A small product on one rung, run again and again with changed machine code."""

    number: int
    cubin: Cubin
    kernel: str
    a: np.ndarray
    b: np.ndarray

    @property
    def code(self) -> list[Instruction]:
        return decode_function(self.cubin.function(self.kernel), self.cubin.sm)

    def run(self, changes: dict[int, int]) -> tuple[np.ndarray, list[Hazard]]:
        """C and the hazards with the words at some addresses replaced."""
        result, blocks = self.launch(changes)
        return result, [hazard for block in blocks for hazard in block.hazards]

    def reached(self) -> set[int]:
        """Addresses of the instructions that the product runs through."""
        _, blocks = self.launch({})
        return {address for block in blocks for address in block.reached}

    def launch(self, changes: dict[int, int]) -> tuple[np.ndarray, list[BlockResult]]:
        code = bytearray(self.cubin.function(self.kernel).code)
        for address, word in changes.items():
            code[address : address + 16] = word.to_bytes(16, "little")
        changed = self.cubin.with_code(self.kernel, bytes(code))
        rung = get_rung(self.number)
        (m, k), n = self.a.shape, self.b.shape[1]
        memory = Memory()
        args = [memory.put(self.a), memory.put(self.b), memory.empty((m, n)), m, n, k]
        results = run_blocks(
            changed,
            self.kernel,
            grid=rung.grid(m, n),
            block=rung.block,
            args=args,
            memory=memory,
            max_instructions=100_000,
        )
        return memory.get(args[2]), results

    def finds(self, fault: Fault) -> bool:
        """Whether the interpreter reports the fault where it was planted, or stops with an error after it."""
        try:
            _, hazards = self.run(fault.changes)
        except (MemoryFault, BarrierError, EmulationError):
            return True
        return any(h.kind == fault.kind and h.address == fault.shows_at for h in hazards)


def workbench(number: int, arch: str, rng: np.random.Generator, k: int = 32) -> Workbench:
    cubin = rung_cubin(number, arch)
    kernel = next(name for name in cubin.functions if "Lb1" in name or len(cubin.functions) == 1)
    tile = get_rung(number).tile
    a = rng.standard_normal((tile.bm, k)).astype(np.float32)
    b = rng.standard_normal((k, tile.bn)).astype(np.float32)
    return Workbench(number, cubin, kernel, a, b)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_latency_table_holds_for_every_rung(arch: str) -> None:
    """No instruction of ptxas comes earlier than the table says, and the table is not idle."""
    tight = set()
    rungs = [rung_cubin(rung.number, arch) for rung in load_rungs()]
    for cubin in (*rungs, Cubin(instruction_program(arch).cubin)):
        for function in cubin.functions.values():
            for (producer, kind, consumer, wanted), found in shortest_distances(
                decode_function(function, cubin.sm)
            ).items():
                assert found >= wanted, f"{producer} -> {consumer} ({kind}): {found} cycles, table {wanted}"
                if found == wanted:
                    tight.add((kind, wanted))
    assert {("R", 4), ("R", 5), ("P", 4), ("UR", 2)} <= tight


FLOW = ("BRA", "EXIT", "BSYNC", "BAR", "BSSY")


def straight_runs(bench: Workbench) -> Iterator[list[Instruction]]:
    """Instructions that run one after another, whatever the branches do: all are executed."""
    reached = bench.reached()
    run: list[Instruction] = []
    for instruction in bench.code:
        if instruction.address in reached:
            run.append(instruction)
        if instruction.address not in reached or instruction.opcode in FLOW:
            if len(run) > 3:
                yield run
            run = []


def tight_stalls(bench: Workbench) -> Iterator[Fault]:
    """A consumer that is issued just in time: a stall count in front of it is shortened by one."""
    for run in straight_runs(bench):
        issued, now = [], 0
        for instruction in run:
            issued.append(now)
            now += instruction.control.stall
        for j, consumer in enumerate(run):
            for cell in consumer.reads:
                i = next((i for i in range(j - 1, -1, -1) if cell in run[i].writes), None)
                if i is None or needs_scoreboard(run[i]) or not run[i].guard.is_true:
                    continue
                if issued[j] - issued[i] != latency(run[i], cell, consumer):
                    continue
                for between in run[i:j]:
                    if between.control.stall > 1:
                        word = between.with_control(stall=between.control.stall - 1)
                        name = f"{between} stalls less before {consumer}"
                        yield Fault(name, {between.address: word}, "read before ready", consumer.address)


def needed_waits(bench: Workbench) -> Iterator[Fault]:
    """The wait of the first reader of a variable-latency result is cleared."""
    for run in straight_runs(bench):
        for j, consumer in enumerate(run):
            for cell in consumer.reads:
                i = next((i for i in range(j - 1, -1, -1) if cell in run[i].writes), None)
                if i is None or run[i].control.write_barrier == 7 or not run[i].guard.is_true:
                    continue
                board = run[i].control.write_barrier
                if any(between.control.wait_mask >> board & 1 for between in run[i + 1 : j]):
                    continue
                if consumer.control.wait_mask >> board & 1:
                    word = consumer.with_control(wait_mask=consumer.control.wait_mask & ~(1 << board))
                    name = f"{consumer} does not wait for {run[i]}"
                    yield Fault(name, {consumer.address: word}, "read before wait", consumer.address)


def forgotten_scoreboards(bench: Workbench) -> Iterator[Fault]:
    """A global load counts on no scoreboard."""
    for run in straight_runs(bench):
        for i, load in enumerate(run):
            if load.opcode != "LDG":
                continue
            users = [j for j in range(i + 1, len(run)) if set(run[j].reads) & set(load.writes)]
            if users:
                word = load.with_control(write_barrier=7)
                name = f"{load} counts on no scoreboard"
                yield Fault(name, {load.address: word}, "read before wait", run[users[0]].address)


def early_overwrites(bench: Workbench) -> Iterator[Fault]:
    """A source of a memory access is overwritten without the wait that protects it."""
    for run in straight_runs(bench):
        for i, access in enumerate(run):
            board = access.control.read_barrier
            if board == 7 or read_order(access.opcode) != "memory":
                continue
            sources = {cell for cell in access.reads if cell[0] == "R"}
            for j in range(i + 1, len(run)):
                writer = run[j]
                overwrites = sources & set(writer.writes) and writer.guard.is_true
                if overwrites and read_order(writer.opcode) is None:
                    if writer.control.wait_mask >> board & 1:
                        word = writer.with_control(wait_mask=writer.control.wait_mask & ~(1 << board))
                        name = f"{writer} does not wait until {access} has read"
                        yield Fault(name, {writer.address: word}, "overwritten while read", writer.address)
                    break
                if writer.control.wait_mask:
                    break


def stale_operands(bench: Workbench) -> Iterator[Fault]:
    """An operand that is cached for the next instruction is overwritten by the instruction that caches it."""
    for run in straight_runs(bench):
        for first, second in pairwise(run):
            if first.opcode != "FFMA" or second.opcode != "FFMA":
                continue
            for position in (1, 2):
                a, b = first.operands[position], second.operands[position]
                if not (isinstance(a, Register) and isinstance(b, Register)):
                    continue
                if a.reuse and a.index == b.index:
                    word = first.with_register(0, a.index)
                    yield Fault(
                        f"{first} overwrites its operand",
                        {first.address: word},
                        "stale reuse",
                        second.address,
                    )


PLANTERS: dict[str, Callable[[Workbench], Iterator[Fault]]] = {
    "tight stalls": tight_stalls,
    "needed waits": needed_waits,
    "forgotten scoreboards": forgotten_scoreboards,
    "early overwrites": early_overwrites,
    "stale operands": stale_operands,
}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kind", PLANTERS)
def test_every_planted_fault_is_found(kind: str, arch: str, rng: np.random.Generator) -> None:
    found = 0
    for number in (4, 9, 12):
        bench = workbench(number, arch, rng)
        faults = list(PLANTERS[kind](bench))
        for index in rng.permutation(len(faults))[:8]:
            fault = faults[index]
            assert bench.finds(fault), fault
            found += 1
    assert found >= 2


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_value_that_comes_too_early_is_nan(arch: str, rng: np.random.Generator) -> None:
    """The poison of a multiply-add whose operand was not waited for reaches C."""
    bench = workbench(9, arch, rng)
    right, hazards = bench.run({})
    assert not hazards
    assert np.isfinite(right).all()
    chosen = [fault for fault in needed_waits(bench) if ": FFMA" in f": {fault.name}"]
    assert chosen
    fault = chosen[int(rng.integers(len(chosen)))]
    wrong, hazards = bench.run(fault.changes)
    assert hazards
    assert np.isnan(wrong).any()
    assert same_bits(wrong[~np.isnan(wrong)], right[~np.isnan(wrong)])


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_stale_operand_has_its_old_value(arch: str, rng: np.random.Generator) -> None:
    """With the flag, the second reader does not see the new value; without it, it does."""
    bench = workbench(9, arch, rng)
    faults = list(stale_operands(bench))
    for index in rng.permutation(len(faults))[:40]:
        ((address, word),) = faults[index].changes.items()
        word = decode(word, address, bench.cubin.sm).with_control(stall=5)
        cached, hazards = bench.run({address: word})
        if {h.kind for h in hazards} == {"stale reuse"}:
            break  # No other instruction reads the new value too early.
    else:
        pytest.fail("no fault has a stale operand alone")
    plain = decode(word, address, bench.cubin.sm).with_control(reuse=0)
    fresh, hazards = bench.run({address: plain})
    assert not hazards
    assert not same_bits(cached, fresh)
    # Where the yield bit is 0, the flag's bit is something else.
    yielding = decode(word, address, bench.cubin.sm).with_control(yield_bit=0)
    assert ".reuse" not in decode(yielding, address, bench.cubin.sm).text
    with pytest.raises(EmulationError, match="has reuse flags beside a yield bit of 0"):
        bench.run({address: yielding})


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_wait_taken_away_at_random_is_found_or_changes_nothing(arch: str, rng: np.random.Generator) -> None:
    """Waits of all kinds: of those that are not found the product must still be right."""
    bench = workbench(12, arch, rng)
    right, _ = bench.run({})
    reached = bench.reached()
    waits = [(i, board) for i in bench.code if i.address in reached for board in i.control.waits()]
    found = 0
    for index in rng.permutation(len(waits))[:25]:
        instruction, board = waits[index]
        word = instruction.with_control(wait_mask=instruction.control.wait_mask & ~(1 << board))
        try:
            result, hazards = bench.run({instruction.address: word})
        except EmulationError:
            found += 1
            continue
        if hazards:
            found += 1
        else:
            assert same_bits(result, right), instruction
    assert found >= 12


COPY_ARGS = (128, 3)  # threads, slices


def run_copies(cubin: Cubin, data: np.ndarray) -> np.ndarray:
    threads, slices = COPY_ARGS
    memory = Memory()
    out = memory.empty(slices * 896)
    run_blocks(
        cubin,
        "copies",
        grid=(1, 1, 1),
        block=(threads, 1, 1),
        args=[memory.put(data), out, slices],
        memory=memory,
        dynamic_shared_bytes=8192,
    )
    return memory.get(out)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_copy_that_was_not_waited_for_is_nan(arch: str, rng: np.random.Generator) -> None:
    """DEPBAR lets one group more stay in flight, or is gone: what was copied last reads as NaN."""
    cubin = Cubin(instruction_program(arch).cubin)
    data = rng.standard_normal(COPY_ARGS[1] * 1024).astype(np.float32)
    right = run_copies(cubin, data)
    assert np.isfinite(right).all()
    code = decode_function(cubin.function("copies"), cubin.sm)
    waits = [i for i in code if i.opcode == "DEPBAR"]
    nothing = next(i for i in code if i.opcode == "NOP").word
    depth_field = 0x3F << 38
    changes = {"gone": nothing, "deeper": waits[0].word & ~depth_field | 2 << 38}
    assert waits[0].word & depth_field == 1 << 38
    for name, word in changes.items():
        changed = bytearray(cubin.function("copies").code)
        for wait in waits:
            changed[wait.address : wait.address + 16] = word.to_bytes(16, "little")
        wrong = run_copies(cubin.with_code("copies", bytes(changed)), data)
        assert np.isnan(wrong).any(), name
        if name == "gone":  # A copy that is waited for too late may arrive on top of a newer one.
            assert same_bits(wrong[~np.isnan(wrong)], right[~np.isnan(wrong)])
