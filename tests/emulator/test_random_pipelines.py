"""Random warp-specialised programs: right for every schedule, a race exactly where a needed wait is missing.

A program is a list of tasks, each of one warp. A task's value is made of those of earlier tasks, which other
warps may have left in shared memory, or a bulk copy: then the warp waits for an mbarrier or a named barrier.
What happens before what is worked out here by reachability, in the emulator by vector clocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from ptx_kernels import kernel, run

from tilewave.emulator import Memory
from tilewave.errors import RaceError

WARPS = 5
TASKS = 14
MASK = 0xFFFFFFFF


@dataclass
class Task:
    """`needs` are earlier tasks, `waits` those of them that the warp waits for before it reads."""

    number: int
    warp: int
    copied: bool
    needs: list[int] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    pairs: dict[int, int] = field(default_factory=dict)  # task waited for -> named barrier


def make(rng: np.random.Generator) -> list[Task]:
    """A program in which every need is waited for where it must be."""
    tasks: list[Task] = []
    free = list(range(1, 16))
    for number in range(TASKS):
        task = Task(number, int(rng.integers(WARPS)), bool(rng.random() < 0.25))
        if number and not task.copied:
            count = int(rng.integers(0, min(4, number + 1)))
            task.needs = sorted(int(x) for x in rng.choice(number, count, replace=False))
        for need in task.needs:
            source = tasks[need]
            if source.warp == task.warp and not source.copied:
                continue
            task.waits.append(need)
            if source.warp != task.warp and not source.copied and free and rng.random() < 0.4:
                task.pairs[need] = free.pop()
        tasks.append(task)
    return tasks


def reaches(tasks: list[Task]) -> list[set[int]]:
    """For each task, the tasks whose values have surely been stored when it reads."""
    before: list[set[int]] = []
    latest: dict[int, set[int]] = {warp: set() for warp in range(WARPS)}
    for task in tasks:
        known = set(latest[task.warp])
        for source in task.waits:
            # A copy hands on nothing but itself and what its warp knew when it armed the mbarrier.
            known |= before[source] | {source}
        before.append(set(known))
        latest[task.warp] = known | (set() if task.copied else {task.number})
    return before


def text(tasks: list[Task]) -> str:
    """The program as PTX; warp w runs its tasks in order."""
    waited = {wait for task in tasks for wait in task.waits}
    body = """
    mov.u32 %r0, %tid.x; and.b32 %r1, %r0, 31; shr.u32 %r2, %r0, 5; shl.b32 %r3, %r1, 2;
    mov.u32 %r4, data; add.u32 %r5, %r4, %r3; mov.u32 %r6, bars;
    ld.param.u64 %d0, [q0]; ld.param.u64 %d1, [q1];
    setp.eq.u32 %p0, %r0, 0; setp.eq.u32 %p1, %r1, 0; cvt.u64.u32 %d2, %r3; add.s64 %d3, %d1, %d2;
    """
    for task in tasks:
        count = 1 if task.copied else 32
        body += f"@%p0 mbarrier.init.shared.b64 [%r6+{8 * task.number}], {count};\n"
    body += "@%p0 fence.mbarrier_init.release.cluster; bar.sync 0;\n"
    for warp in range(WARPS):
        body += f"setp.ne.u32 %p2, %r2, {warp}; @%p2 bra N{warp};\n"
        for task in (task for task in tasks if task.warp == warp):
            n = task.number
            for wait in task.waits:
                if wait in task.pairs:
                    body += f"bar.sync {task.pairs[wait]}, 64;\n"
                else:
                    body += f"W{n}_{wait}: mbarrier.try_wait.parity.shared.b64 %p3, [%r6+{8 * wait}], 0;\n"
                    body += f"@!%p3 bra W{n}_{wait};\n"
            if task.copied:
                body += f"""
                @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r6+{8 * n}], 128;
                add.u32 %r7, %r4, {128 * n}; add.s64 %d4, %d0, {128 * n}; add.u32 %r8, %r6, {8 * n};
                @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
                    [%r7], [%d4], 128, [%r8];
                """
                continue
            body += f"mov.u32 %r9, {n};\n"
            for need in task.needs:
                body += f"ld.shared.u32 %r10, [%r5+{128 * need}]; mad.lo.u32 %r9, %r9, 31, %r10;\n"
            body += f"st.shared.u32 [%r5+{128 * n}], %r9; st.global.u32 [%d3+{128 * n}], %r9;\n"
            for later in tasks:
                if n in later.pairs:
                    body += f"bar.arrive {later.pairs[n]}, 64;\n"
            body += f"mbarrier.arrive.shared.b64 _, [%r6+{8 * n}];\n"
        body += f"N{warp}:\n"
    for task in tasks:
        if task.copied and task.number not in waited:
            body += f"E{task.number}: mbarrier.try_wait.parity.shared.b64 %p3, [%r6+{8 * task.number}], 0;\n"
            body += f"@!%p3 bra E{task.number};\n"
    declarations = f".shared .align 128 .b8 data[{128 * TASKS}]; .shared .align 8 .b8 bars[{8 * TASKS}];"
    return kernel(body, ".param .u64 q0, .param .u64 q1", declarations)


def values(tasks: list[Task], source: np.ndarray) -> list[np.ndarray]:
    """What every task's value is."""
    found: list[np.ndarray] = []
    for task in tasks:
        value = np.full(32, task.number, np.uint64)
        for need in task.needs:
            value = (value * 31 + found[need]) & MASK
        found.append(source[task.number].astype(np.uint64) if task.copied else value)
    return found


def execute(tasks: list[Task], rng: np.random.Generator, *, detect_races: bool) -> None:
    """Run under a random schedule and compare."""
    source = rng.integers(0, 1 << 32, (TASKS, 32), dtype=np.uint32)
    memory = Memory()
    out = memory.put(np.zeros((TASKS, 32), np.uint32))
    order = int(rng.integers(1 << 30)) if rng.random() < 0.8 else None
    arguments = [memory.put(source), out]
    run(text(tasks), arguments, memory, block=32 * WARPS, order=order, detect_races=detect_races)
    found = memory.get(out)
    for task, value in zip(tasks, values(tasks, source), strict=True):
        if not task.copied:
            assert found[task.number].tolist() == value.tolist()


@pytest.mark.parametrize("detect_races", [False, True])
def test_random_programs_are_right_under_every_schedule(detect_races: bool, rng: np.random.Generator) -> None:
    for _ in range(6):
        tasks = make(rng)
        for _ in range(2):
            execute(tasks, rng, detect_races=detect_races)


def test_a_missing_wait_is_a_race_unless_something_else_orders_it(rng: np.random.Generator) -> None:
    for _ in range(12):
        tasks = make(rng)
        plain = [(task, wait) for task in tasks for wait in task.waits if wait not in task.pairs]
        if not plain:
            continue
        task, wait = plain[int(rng.integers(len(plain)))]
        task.waits.remove(wait)
        before = reaches(tasks)
        safe = all(
            need in before[t.number] or (tasks[need].warp == t.warp and not tasks[need].copied)
            for t in tasks
            for need in t.needs
        )
        if safe:
            execute(tasks, rng, detect_races=True)
        else:
            with pytest.raises(RaceError, match="with nothing to order the two"):
                execute(tasks, rng, detect_races=True)
