"""`tilewave selftest` of the library's kernels: faults of any kind are found, told and repeatable."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from tilewave.cli import app
from tilewave.device import get_spec
from tilewave.emulator import Memory
from tilewave.errors import DeviceError, EmulationError
from tilewave.kernels.arguments import Pointers
from tilewave.kernels.families import FAMILIES
from tilewave.lab import selftest_command, selftest_library
from tilewave.lab.ladder import Silent
from tilewave.lab.product_samples import Dealing, Sample, dealings, make_sample
from tilewave.lab.selftest_library import LibraryOutcome, Results, Task, run_library, tasks_for
from tilewave.lab.workers import Budget
from tilewave.planner.gemm.records import GemmPlan
from tilewave.runtime.driver import Probe
from tilewave.runtime.emulated import emulate_plan, run_plan

SPEC = get_spec("H200")
cli = CliRunner()


@pytest.fixture
def seed(rng: np.random.Generator) -> int:
    return int(rng.integers(2**32))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    """Two quick products instead of the selftest's own."""
    tasks = [
        task for task in tasks_for(SPEC, 5, thorough=False) if task.instance.family in ("tiny", "small_k")
    ]
    monkeypatch.setattr(
        selftest_library,
        "tasks_for",
        lambda spec, seed, *, thorough: [Task(one.instance, one.dealing, seed) for one in tasks],
    )
    return tasks


class Gpu:
    """A GPU made of the emulator; `spoil` may change what it answers."""

    def results(self, sample: Sample) -> tuple[Results, tuple[str, ...]]:
        views = {name: operand.view for name, operand in sample.operands.items()}
        emulate_plan(sample.plan, views, alpha=sample.alpha, beta=sample.beta, exact_fma=True, count=False)
        return self.spoil({name: views[name].copy() for name in sample.outputs})

    def spoil(self, results: Results) -> tuple[Results, tuple[str, ...]]:
        return results, ()


def outcomes_of(seed: int, gpu: Gpu | None) -> list[LibraryOutcome]:
    return run_library(SPEC, seed=seed, gpu=gpu, budget=Budget(None), jobs=1, progress=Silent())[0]


def test_every_family_is_tested_and_on_a_gpu_in_every_way(seed: int) -> None:
    for thorough in (False, True):
        tasks = tasks_for(SPEC, seed, thorough=thorough)
        assert tasks == tasks_for(SPEC, seed, thorough=thorough)
        for family in FAMILIES:
            ours = [task for task in tasks if task.instance.family == family.name]
            ways = dealings(family.instances()[0])
            assert {task.dealing for task in ours} <= set(ways)
            assert len(ours) == (len(ways) if thorough else 1)


def test_right_kernels_pass(few: list[Task], seed: int) -> None:
    for gpu in (None, Gpu()):
        outcomes = outcomes_of(seed, gpu)
        assert [outcome.kernel for outcome in outcomes] == [task.instance.name for task in few]
        assert not any(outcome.findings for outcome in outcomes)
        assert all(outcome.compared_bits == (gpu is not None) for outcome in outcomes)


def test_wrong_values_bits_and_writes_are_found(few: list[Task], seed: int) -> None:
    class Wrong(Gpu):
        def spoil(self, results: Results) -> tuple[Results, tuple[str, ...]]:
            results["out"][-1, -1, -1] = np.nan
            return results, ()

    class OtherBits(Gpu):
        def spoil(self, results: Results) -> tuple[Results, tuple[str, ...]]:
            largest = np.unravel_index(np.argmax(np.abs(results["out"])), results["out"].shape)
            results["out"][largest] = np.nextafter(results["out"][largest], np.float32(0))
            return results, ()

    class Careless(Gpu):
        def spoil(self, results: Results) -> tuple[Results, tuple[str, ...]]:
            return results, ("wrote outside out",)

    for gpu, said in (
        (Wrong(), "wrong value"),
        (OtherBits(), "other bits: 1 elements"),
        (Careless(), "wrote"),
    ):
        outcomes = outcomes_of(seed, gpu)
        assert all(any(said in finding for finding in outcome.findings) for outcome in outcomes), said


def test_a_lost_gpu_and_a_spent_budget_leave_some_out(few: list[Task], seed: int) -> None:
    class Dying(Gpu):
        def results(self, sample: Sample) -> tuple[Results, tuple[str, ...]]:
            raise DeviceError("CUDA_ERROR_ILLEGAL_ADDRESS")

    options = {"budget": Budget(None), "jobs": 1, "progress": Silent()}
    outcomes, left = run_library(SPEC, seed=seed, gpu=Dying(), **options)
    assert [outcome.findings for outcome in outcomes] == [("failed: CUDA_ERROR_ILLEGAL_ADDRESS",)]
    assert len(left) == len(few) - 1
    for gpu in (None, Gpu()):
        outcomes, left = run_library(SPEC, seed=seed, gpu=gpu, **{**options, "budget": Budget(0)})
        assert (outcomes, len(left)) == ([], len(few))


class Memories:
    """Device memory made of the emulator's, in which plans are launched."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.launches = 0

    def from_numpy(self, device: object, array: np.ndarray) -> SimpleNamespace:
        buffer = self.memory.put(array)
        return SimpleNamespace(
            address=buffer.address,
            to_numpy=lambda: self.memory.get(buffer),
            copy_from=lambda values: self.memory.set(buffer, values),
        )

    def launch(self, plan: GemmPlan, pointers: Pointers, alpha: float, beta: float, **_: object) -> None:
        self.launches += 1
        run_plan(plan, pointers, self.memory, alpha=alpha, beta=beta, exact_fma=True, count=False)


@pytest.fixture
def memories(monkeypatch: pytest.MonkeyPatch) -> Memories:
    memories = Memories()
    monkeypatch.setattr(selftest_library, "DeviceArray", memories)
    stream = SimpleNamespace(handle=0, synchronize=lambda: None)
    monkeypatch.setattr(selftest_library, "Stream", lambda device: stream)
    monkeypatch.setattr("tilewave.runtime.execute.launch_plan", memories.launch)
    return memories


def test_what_a_gpu_gives_is_read_between_guard_zones(memories: Memories, seed: int) -> None:
    samples = selftest_library.GpuSamples(SimpleNamespace(ordinal=0))  # type: ignore[arg-type]
    instance = next(one for family in FAMILIES for one in family.instances() if one.family == "tiny")
    for dealing in dealings(instance):
        sample = make_sample(instance, dealing, seed)
        results, damage = samples.results(sample)
        assert damage == ()
        assert sample.error_in_bounds(results["out"], results.get("preactivation")) <= 1
    assert memories.launches == 2 * len(dealings(instance))


def test_a_write_outside_and_bits_that_change_are_seen(
    memories: Memories, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = next(one for family in FAMILIES for one in family.instances() if one.family == "tiny")
    sample = make_sample(instance, Dealing.DATA_PARALLEL, seed)
    samples = selftest_library.GpuSamples(SimpleNamespace(ordinal=0))  # type: ignore[arg-type]

    def careless(plan: GemmPlan, pointers: Pointers, *_: object, **__: object) -> None:
        memories.launches += 1
        for address in (pointers.out, pointers.out - 4, pointers.a):
            (buffer,) = (b for b in memories.memory.buffers if b.address <= address < b.end)
            values = memories.memory.get(buffer)
            values[(address - buffer.address) // 4] = memories.launches
            memories.memory.set(buffer, values)

    monkeypatch.setattr("tilewave.runtime.execute.launch_plan", careless)
    assert set(samples.results(sample)[1]) == {
        "wrote outside out",
        "wrote into a",
        "gave other bits when launched again",
    }


def run(*arguments: str) -> tuple[int, str]:
    result = cli.invoke(app, ["selftest", "--jobs", "1", *arguments], prog_name="tilewave")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout


def test_the_command(few: list[Task], seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest_command, "probe", lambda: Probe(0, None, "no NVIDIA driver here"))
    monkeypatch.setattr(selftest_command, "run_loops", lambda *_, **__: ([], [], []))  # test_selftest_loops
    path = tmp_path / "selftest.json"
    code, out = run("--library", "--seed", str(seed), "--json", str(path))
    assert code == 0
    assert re.search(r"^tiny +1 product, .*: right$", out, re.MULTILINE)
    assert "\n2 products of the library are right on the emulator of GB10. " in out
    data = json.loads(path.read_text())
    assert data["passed"]
    assert [outcome["kernel"] for outcome in data["library"]] == [task.instance.name for task in few]
    code, out = run("--rungs", "2")
    assert code == 0
    assert "tiny" not in out

    def broken(*_: object, **__: object) -> None:
        raise EmulationError("PTX line 7: an access outside")

    monkeypatch.setattr("tilewave.runtime.emulated.emulate_plan", broken)
    code, out = run("--library", "--seed", str(seed))
    assert code == 1
    assert (
        f"WRONG on the emulator of GB10: the library's {', '.join(sorted(t.instance.name for t in few))}"
        in out
    )
    assert "failed in the emulator: PTX line 7: an access outside" in out
    command = re.search(r"reproduce: tilewave selftest (.*)$", out, re.MULTILINE)
    assert command is not None
    assert shlex.split(command[1]) == ["--library", "--seed", str(seed), "--device", "GB10"]
    code, out = run("--library", "--budget", "1e-9")
    assert code == 1
    assert "NOT RUN: 2 of the library's" in out
