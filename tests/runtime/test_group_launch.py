"""A group on a GPU: one launch, its table within or before it, and what a capture of it needs."""

from __future__ import annotations

import ctypes
import itertools
import struct
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from tests.runtime.fake_gpu import FakeGpu

import tilewave
from tilewave.device import get_spec
from tilewave.errors import CaptureError, UsageError
from tilewave.kernels.arguments import Pointers
from tilewave.kernels.families import grouped
from tilewave.kernels.group_table import (
    ENTRY_BYTES,
    GROUP_ARGS_BYTES,
    INLINE_BYTES,
    PART_BYTES,
    Operands,
    pack_table,
)
from tilewave.normalise import normalise
from tilewave.planner.gemm.group import GroupPlan, plan_group
from tilewave.planner.gemm.options import PlanOptions
from tilewave.problem import GemmProblem, MatrixLayout
from tilewave.runtime import workspace
from tilewave.runtime.group import prepare_group, run_group
from tilewave.runtime.kernels import gpu_state

Generator = np.random.Generator
FREE = PlanOptions(batch_invariant=True)


@dataclass
class Launched:
    """A launch of a grouped kernel: its head, and the table that it would read at that time."""

    stream: int
    blocks: int
    entries: int
    items: int
    partials: int
    tickets: int
    address: int
    table: bytes


@dataclass
class Watcher:
    """Carries out what the writers of tables do, and notes what the grouped kernels are given."""

    groups: list[Launched] = field(default_factory=list)
    written: int = 0
    pause: float = 0.0


@pytest.fixture
def watcher(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Watcher:
    seen = Watcher()

    def launch(self: FakeGpu, *arguments: Any) -> tuple[()]:
        names = {handle: name for name, handle in gpu_state(0)._kernels.items()}
        name, stream = names[arguments[0]], arguments[8]
        pointer = ctypes.c_void_p.from_address(arguments[9]).value
        assert pointer is not None
        if name.startswith("group_table"):
            words = int(name.rpartition("_")[2])
            block = ctypes.string_at(pointer, 16 + 8 * words)
            target, count = struct.unpack_from("<2q", block)
            assert 0 < count <= words
            ctypes.memmove(target, block[16:], 8 * count)
            seen.written += 1
            time.sleep(seen.pause)  # for other threads to come between
            return ()
        block = ctypes.string_at(pointer, GROUP_ARGS_BYTES)
        address, entries, items, partials, tickets = struct.unpack_from("<5q", block)
        table = ctypes.string_at(address, 1 << 16) if address else block[40:]
        seen.groups.append(Launched(stream, arguments[1], entries, items, partials, tickets, address, table))
        return ()

    monkeypatch.setattr(FakeGpu, "on_cuLaunchKernel", launch)
    monkeypatch.setattr(workspace, "_group_pools", {})
    return seen


def some(rng: Generator, count: int, k: int = 0) -> tuple[list[GemmProblem], list[Operands]]:
    problems, operands = [], []
    for _ in range(count):
        m, n, deep = (int(size) for size in rng.integers(1, 9, 3))
        deep = k or deep
        layouts = MatrixLayout(deep, 1), MatrixLayout(n, 1), MatrixLayout(n, 1)
        problems.append(normalise(GemmProblem(m, n, deep, (), *layouts)).problem)
        at = [int(address) * 16 for address in rng.integers(1, 1 << 40, 3)]
        operands.append(Operands(Pointers(*at), float(np.float32(rng.standard_normal())), 0.0))
    return problems, operands


def submit(
    problems: list[GemmProblem], operands: list[Operands], options: PlanOptions = FREE, **more: Any
) -> Any:
    return run_group(problems, operands, device=0, stream=7, options=options, **more)


def test_a_few_products_take_one_launch_and_nothing_else(
    gpu: FakeGpu, watcher: Watcher, rng: Generator
) -> None:
    problems, operands = some(rng, 12)
    problems = problems[:1] * 12
    (plan,) = submit(problems, operands)
    (launch,) = watcher.groups
    assert watcher.written == 0
    assert gpu.count("cuMemAllocAsync") == gpu.count("cuMemcpyHtoDAsync") == gpu.count("cuMemHostAlloc") == 0
    assert (launch.entries, launch.items, launch.blocks) == (12, plan.table.items, plan.blocks)
    expected = pack_table(plan.table, operands)
    assert launch.table[: len(expected)] == expected
    assert launch.stream == 7


@pytest.mark.parametrize("count", [60, 900])
def test_a_longer_table_is_written_first(count: int, gpu: FakeGpu, watcher: Watcher, rng: Generator) -> None:
    """In small parts, or in large ones; no memory of the host outlives the call, nothing is waited for."""
    problems, operands = some(rng, count)
    (plan,) = submit(problems, operands)
    (launch,) = watcher.groups
    expected = pack_table(plan.table, operands)
    assert len(expected) > INLINE_BYTES
    assert (len(expected) > 8 * PART_BYTES[0]) == (count == 900)
    assert watcher.written == plan.table_launches > 0
    assert launch.table[: min(len(expected), len(launch.table))] == expected[: len(launch.table)]
    for name in ("cuMemcpyHtoDAsync", "cuStreamSynchronize", "cuMemHostAlloc", "cuEventSynchronize"):
        assert gpu.count(name) == 0
    before = gpu.count("cuMemAllocAsync")
    submit(problems, operands)
    assert gpu.count("cuMemAllocAsync") == before  # the stream's workspace serves again


def test_partial_sums_and_the_table_lie_apart(gpu: FakeGpu, watcher: Watcher, rng: Generator) -> None:
    """In the pool's workspace and in the caller's, wherever that begins."""
    problems, operands = some(rng, 50, k=2000)
    options = PlanOptions("split_k:3")
    (plan,) = submit(problems, operands, options)
    memory = np.full(plan.workspace_bytes + 64, 255, np.uint8)
    check_workspace(watcher.groups[-1], plan, 0, 1 << 62)
    for offset in (0, 5):
        address = memory.ctypes.data + offset
        submit(problems, operands, options, workspace=(address, memory.size - offset))
        check_workspace(watcher.groups[-1], plan, address, memory.ctypes.data + memory.size)
    with pytest.raises(UsageError, match="workspace"):
        submit(problems, operands, options, workspace=(memory.ctypes.data, 5000))


def check_workspace(launch: Launched, plan: GroupPlan, begin: int, end: int) -> None:
    assert launch.partials % 16 == 0
    assert ctypes.string_at(launch.tickets, plan.ticket_bytes) == bytes(plan.ticket_bytes)
    spans = sorted(
        [
            (launch.partials, launch.partials + plan.partial_bytes),
            (launch.tickets, launch.tickets + plan.ticket_bytes),
            (launch.address, launch.address + plan.table.nbytes),
        ]
    )
    assert begin <= spans[0][0]
    assert spans[-1][1] <= end
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))


def test_a_small_workspace_means_more_launches(gpu: FakeGpu, watcher: Watcher, rng: Generator) -> None:
    problems, operands = some(rng, 100)
    memory = np.zeros(8000, np.uint8)
    plans = submit(problems, operands, workspace=(memory.ctypes.data, memory.size))
    assert len(plans) > 1
    assert [launch.entries for launch in watcher.groups] == [len(plan.problems) for plan in plans]
    places = 0
    for plan, launch in zip(plans, watcher.groups, strict=True):
        expected = pack_table(plan.table, operands[places : places + launch.entries])
        assert launch.table[: len(expected)] == expected
        assert launch.address == 0 or launch.address + len(expected) <= memory.ctypes.data + memory.size
        places += launch.entries
    assert places == 100


def test_a_capture_needs_what_prepare_does(gpu: FakeGpu, watcher: Watcher, rng: Generator) -> None:
    """A cold one is refused before anything is launched; a warm one has workspace of its own."""
    problems, operands = some(rng, 60)
    plan = plan_group(problems, get_spec("H200"), FREE)
    gpu.capturing[7] = 3
    with pytest.raises(CaptureError, match="prepare"):
        submit(problems, operands)
    gpu.capturing.clear()
    prepare_group(plan, device=0)
    (eager,) = submit(problems, operands)
    gpu.capturing[7] = 3
    submit(problems, operands)
    submit(problems, operands)
    assert len(watcher.groups) == 3
    assert watcher.groups[1].address == watcher.groups[2].address != watcher.groups[0].address
    assert eager == plan
    gpu.capturing[7] = 4  # the next capture needs workspace of its own
    with pytest.raises(CaptureError, match="prepare"):
        submit(problems, operands)
    assert len(watcher.groups) == 3


def test_threads_on_one_stream_do_not_mix_their_tables(
    gpu: FakeGpu, watcher: Watcher, rng: Generator
) -> None:
    """Each kernel reads the table that its own call wrote, whatever others submit to the stream meanwhile."""
    groups = [some(rng, 60 + 5 * i) for i in range(4)]
    expected = {}
    for problems, operands in groups:
        (plan,) = submit(problems, operands)
        expected[len(problems)] = pack_table(plan.table, operands)
    watcher.groups.clear()

    def work(group: tuple[list[GemmProblem], list[Operands]]) -> None:
        for _ in range(20):
            submit(*group)

    watcher.pause = 1e-4
    threads = [threading.Thread(target=work, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(watcher.groups) == 80
    for launch in watcher.groups:
        table = expected[launch.entries]
        assert launch.table[: len(table)] == table


def test_prepare_takes_plans_of_groups(gpu: FakeGpu, watcher: Watcher) -> None:
    plans = tilewave.plan_grouped([(4, 5, 6)] * 3, device="H200")
    assert tilewave.prepare([plans]) == plans == tilewave.prepare(plans)
    names = set(gpu_state(0)._kernels)
    assert plans[0].instance.name in names
    three = tilewave.plan_grouped([(4, 5, 6)], device="H200") * 3
    assert tilewave.prepare([three]) == three  # and not sizes


def test_entries_are_what_the_kernel_reads() -> None:
    assert ENTRY_BYTES % 8 == 0
    assert GROUP_ARGS_BYTES <= 4096
    assert all(16 + nbytes <= 32_764 for nbytes in PART_BYTES)
    assert [8 * words for words in grouped.TABLE_WORDS] == list(PART_BYTES)
