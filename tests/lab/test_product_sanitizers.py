"""The library's kernels under compute-sanitizer: samples, what is launched, what counts, planted faults."""

from __future__ import annotations

import importlib.util
import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tilewave.compiler
import tilewave.device
import tilewave.kernels.ship
import tilewave.runtime.driver
from tilewave.compiler import compile_source
from tilewave.device import get_spec
from tilewave.emulator import Memory, launch
from tilewave.errors import MemoryFault, RaceError, UsageError
from tilewave.kernels.arguments import GEMM_ARGS_BYTES, Pointers, pack_arguments
from tilewave.kernels.build import compile_instance
from tilewave.kernels.families import FAMILIES
from tilewave.kernels.instances import Instance
from tilewave.kernels.ship import every_instance
from tilewave.lab.product_faults import FAULTS, ProductFault
from tilewave.lab.product_samples import (
    Dealing,
    Sample,
    dealing_of,
    dealings,
    family_of,
    make_sample,
)
from tilewave.lab.product_sanitizers import (
    Job,
    Launch,
    Launches,
    jobs_for,
    judge_chunk,
    judge_planted,
    prepare_products,
    run_products,
)
from tilewave.lab.sanitizers import TOOLS, Sanitizer, ToolRun, parse_log
from tilewave.runtime.emulated import emulate_plan

INSTANCES = every_instance()
PAIRS = [(instance, dealing) for instance in INSTANCES for dealing in dealings(instance)]
ERRORS = {error.__name__: error for error in (MemoryFault, RaceError)}
CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"


def emulated(sample: Sample, **options: Any) -> float:
    views = {name: operand.view for name, operand in sample.operands.items()}
    emulate_plan(
        sample.plan, views, alpha=sample.alpha, beta=sample.beta, count=False, detect_races=True, **options
    )
    return sample.error_in_bounds(views["out"], views.get("preactivation"))


def test_every_sample_is_dealt_as_it_says_and_ragged(rng: np.random.Generator) -> None:
    for instance, dealing in PAIRS:
        sample = make_sample(instance, dealing, int(rng.integers(1 << 30)))
        plan, problem = sample.plan, sample.plan.problem
        assert dealing_of(plan.schedule, plan.cut) is dealing
        assert family_of(instance).refuses(instance, problem) is None
        assert plan.cut.tiles > 1
        assert problem.m % instance.bm or problem.n % instance.bn or problem.batches % instance.items
        cut = dealing not in (Dealing.DATA_PARALLEL, Dealing.WHOLE_TILES_WALKED)
        # Somewhere pieces meet, and walkers go from one tile to the next.
        assert any(item.pieces > 1 for _, item in plan.cut.all_items()) == cut
        if plan.cut.walkers:
            assert any(len(list(plan.cut.items(block))) > 1 for block in range(plan.blocks))


def test_a_sample_depends_on_its_seed_alone() -> None:
    instance, dealing = PAIRS[len(PAIRS) // 2]
    one, same, other = (make_sample(instance, dealing, seed) for seed in (5, 5, 6))
    assert one.plan == same.plan
    np.testing.assert_array_equal(one.operands["a"].storage, same.operands["a"].storage)
    assert not np.array_equal(one.operands["a"].view[0, :1, :1], other.operands["a"].view[0, :1, :1])


def test_samples_are_right_in_the_emulator_and_a_wrong_result_is_not(rng: np.random.Generator) -> None:
    for family in FAMILIES:
        small = [i for i in family.instances() if i.bm * i.bn * i.items <= 4096] or family.instances()
        instance = small[rng.integers(len(small))]
        dealing = dealings(instance)[rng.integers(len(dealings(instance)))]
        sample = make_sample(instance, dealing, int(rng.integers(1 << 30)))
        assert emulated(sample) <= 1, (instance, dealing)
        out = sample.operands["out"].view.copy()
        pre = sample.operands["preactivation"].view if "preactivation" in sample.operands else None
        place = tuple(int(rng.integers(extent)) for extent in out.shape)
        for wrong in (np.float32(np.nan), out[place] + np.float32(8)):
            spoilt = out.copy()
            spoilt[place] = wrong
            assert sample.error_in_bounds(spoilt, pre) > 1


@pytest.mark.long
@pytest.mark.parametrize("dealing", Dealing, ids=str)
@pytest.mark.parametrize("instance", INSTANCES, ids=str)
def test_every_sample_is_right_in_the_emulator(
    instance: Instance, dealing: Dealing, rng: np.random.Generator
) -> None:
    if dealing not in dealings(instance):
        with pytest.raises(UsageError, match="cannot be dealt"):
            make_sample(instance, dealing, 0)
        return
    seed = int(rng.integers(1 << 30))
    assert emulated(make_sample(instance, dealing, seed), resident=2, order=seed) <= 1


def emulated_fault(fault: ProductFault, *, planted: bool) -> float:
    """The error of the fault's sample; operands end where their memory does."""
    sample = make_sample(fault.instance, fault.dealing, 6)
    instance = fault.instance
    source = fault.source() if planted else tilewave.kernels.build.source_of(instance.header)
    program = compile_source(source, [instance.entry], "sm_90")
    FakeDriver.memory = Memory()
    placed = {name: FakeArray(operand.storage) for name, operand in sample.operands.items()}
    plan = sample.plan
    partials = FakeArray(np.full(max(1, plan.partial_bytes // 4), np.nan, np.float32))
    tickets = FakeArray(np.zeros(max(1, plan.cut.counters), np.uint32))
    addresses = {name: placed[name].address + 4 * o.offset for name, o in sample.operands.items()}
    pointers = Pointers(**addresses, partials=partials.address, tickets=tickets.address)
    packed = pack_arguments(
        plan.problem, plan.cut, plan.raster, pointers, sample.alpha, sample.beta, depth=instance.bk
    )
    launch(
        program.ptx,
        program.kernels[instance.entry].symbol,
        (plan.blocks, 1, 1),
        (instance.threads, 1, 1),
        [packed],
        FakeDriver.memory,
        dynamic_shared_bytes=instance.shared_bytes,
        count=False,
        detect_races=True,
    )
    for name in sample.outputs:
        sample.operands[name].storage[...] = placed[name].to_numpy()
    views = {name: sample.operands[name].view for name in sample.outputs}
    return sample.error_in_bounds(views["out"], views.get("preactivation"))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "_"))
def test_the_emulator_finds_planted_faults(fault: ProductFault) -> None:
    assert emulated_fault(fault, planted=False) <= 1
    if fault.emulator == "NaN":
        assert emulated_fault(fault, planted=True) == float("inf")
        return
    with pytest.raises(ERRORS[fault.emulator], match=r"PTX line \d+"):
        emulated_fault(fault, planted=True)


def test_planted_faults_are_for_tools_that_find_any() -> None:
    assert {fault.tool for fault in FAULTS} == set(TOOLS) - {"synccheck"}
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


# A driver made of the emulator, for the program that runs under a tool.


class FakeDriver:
    memory = Memory()
    kernels: dict[bytes, Instance] = {}  # noqa: RUF012


class FakeArray:
    def __init__(self, array: np.ndarray) -> None:
        self._buffer = FakeDriver.memory.put(array)
        self.address = self._buffer.address

    @staticmethod
    def from_numpy(device: object, array: np.ndarray) -> FakeArray:
        return FakeArray(array)

    @staticmethod
    def empty(device: object, shape: Sequence[int]) -> FakeArray:
        return FakeArray(np.full(shape, np.nan, np.float32))

    def poison(self) -> None:
        pass

    def to_numpy(self) -> np.ndarray:
        return FakeDriver.memory.get(self._buffer)


class FakeModule:
    def __init__(self, device: object, cubin: bytes) -> None:
        self._instance = FakeDriver.kernels[cubin]

    def function(self, symbol: str) -> SimpleNamespace:
        program, kernel = compile_instance(self._instance, "sm_90")
        assert symbol == kernel.symbol
        allowed: list[int] = []

        def prepare(grid: Any, block: Any, arguments: list[Any], stream: object, shared: int) -> Any:
            (packed,) = arguments
            assert allowed == [shared]
            assert len(packed.raw) == GEMM_ARGS_BYTES
            options = {"dynamic_shared_bytes": shared, "count": False}
            return lambda: launch(
                program.ptx, symbol, grid, block, [packed.raw], FakeDriver.memory, **options
            )

        return SimpleNamespace(prepare=prepare, allow_dynamic_shared=allowed.append)


def small_instances(rng: np.random.Generator) -> list[Instance]:
    small = [i for i in INSTANCES if i.bm * i.bn * i.items <= 1024 and i.bk <= 64]
    return [small[index] for index in rng.permutation(len(small))[:2]]


def test_what_runs_under_a_tool(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    instances = small_instances(rng)
    listed = prepare_products(tmp_path / "cubins", "sm_90", 7, instances, jobs=1)
    wanted = [(i.name, dealing) for i in instances for dealing in dealings(i)]
    assert [(one.instance, one.dealing) for one in map(listed.launches.__getitem__, listed.sound())] == wanted
    assert all(len(listed.of_fault(f"fault{number}")) == 1 for number in range(len(FAULTS)))
    listed.save(tmp_path)
    assert Launches.load(tmp_path) == listed
    assert prepare_products(tmp_path / "cubins", "sm_90", 8, instances, jobs=1).digest != listed.digest

    FakeDriver.memory = Memory()
    FakeDriver.kernels = {compile_instance(i, "sm_90")[0].cubin: i for i in instances}
    driver = tilewave.runtime.driver
    for name, fake in (
        ("Device", lambda: None),
        ("Stream", lambda device: SimpleNamespace(synchronize=lambda: None)),
        ("DeviceArray", FakeArray),
        ("Module", FakeModule),
    ):
        monkeypatch.setattr(driver, name, fake)
    results = tmp_path / "run.jsonl"
    run_products(tmp_path, listed.sound(), results, poison=True)
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [line["index"] for line in lines] == listed.sound()
    assert all(0 <= line["error_in_bounds"] <= 1 for line in lines)


LISTED = Launches(
    "sm_90",
    "NVRTC 13.5.37",
    "digest",
    6,
    (
        Launch("small_tile_32x32x16_nn_4", Dealing.SPLIT_K, "a.cubin", "a"),
        Launch("tiny_4x4x4", Dealing.DATA_PARALLEL, "b.cubin", "b"),
        *(
            Launch(fault.instance.name, fault.dealing, "c.cubin", "c", f"fault{number}")
            for number, fault in enumerate(FAULTS)
        ),
    ),
)
REPORTS = {
    "racecheck": "Error: Race reported between Write access at",
    "memcheck": "Invalid __global__ {kind} of size 4 bytes\n=========     at",
    "initcheck": "Uninitialized __global__ memory read of size 4 bytes\n=========     at",
}


def said(fault: ProductFault, family: str) -> str:
    kind = "write" if "write" in fault.says else "read"
    first = REPORTS[fault.tool].format(kind=kind)
    return (
        f"========= COMPUTE-SANITIZER\n========= {first} void tilewave::{family}<(int)2>(tilewave::GemmArgs)"
        "+0x10\n=========\n========= ERROR SUMMARY: 1 error\n"
    )


def tool_run(tool: str, log: str, indices: Sequence[int], code: int = 0) -> ToolRun:
    return ToolRun(tool, (), 0.1, code, parse_log(log), dict.fromkeys(indices, 0.5))


def test_what_counts_as_clean() -> None:
    job = Job("memcheck", (0, 1))
    assert judge_chunk(LISTED, job, tool_run("memcheck", CLEAN, (0, 1)))["clean"]
    assert judge_chunk(LISTED, job, tool_run("memcheck", CLEAN, (0,)))["unfinished"] == [
        "tiny_4x4x4 data_parallel"
    ]
    reported = judge_chunk(LISTED, job, tool_run("memcheck", said(FAULTS[0], "small_tile"), (0, 1)))
    assert not reported["clean"]
    assert reported["errors_by_family"] == {"small_tile": 1}
    wrong = tool_run("memcheck", CLEAN, (0, 1))
    wrong.errors_in_bounds[1] = float("nan")
    for run in (wrong, tool_run("memcheck", CLEAN, (0, 1), code=1), tool_run("memcheck", "", (0, 1))):
        assert not judge_chunk(LISTED, job, run)["clean"]


def test_a_fault_is_found_in_the_kernel_that_has_it() -> None:
    for number, fault in enumerate(FAULTS):
        job = Job(fault.tool, tuple(LISTED.of_fault(f"fault{number}")), f"fault{number}")
        for family, found in ((fault.family, True), ("elementwise", False)):
            run = tool_run(fault.tool, said(fault, family), job.indices)
            assert judge_planted(LISTED, job, fault.says, run)["found"] == found
        assert not judge_planted(LISTED, job, fault.says, tool_run(fault.tool, CLEAN, job.indices))["found"]


def test_all_launches_run_under_all_tools() -> None:
    jobs = jobs_for(LISTED, [("memcheck", "fault0")], 1)
    assert jobs[0] == Job("memcheck", (2,), "fault0")
    assert sorted((job.tool, job.indices) for job in jobs[1:]) == sorted(
        (tool, (index,)) for tool in TOOLS for index in (0, 1)
    )


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/product_sanitizers.py on a machine whose GPU is made up."""
    path = Path(__file__).parents[2] / "benchmarks" / "product_sanitizers.py"
    spec = importlib.util.spec_from_file_location("benchmark_product_sanitizers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(tilewave.runtime.driver, "require_gpu", lambda: None)
    monkeypatch.setattr(tilewave.runtime.driver, "Device", lambda: SimpleNamespace(name="NVIDIA H200"))
    monkeypatch.setattr(tilewave.device, "query_device", lambda: get_spec("H200"))
    monkeypatch.setattr(module, "prepare_products", lambda *_, **__: LISTED)
    monkeypatch.setattr(Sanitizer, "find", staticmethod(lambda: "compute-sanitizer"))
    monkeypatch.setattr(Sanitizer, "version", lambda self: "2025.3.1.0")
    return module


def test_the_benchmark_goes_on_where_it_was(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[tuple[str, tuple[int, ...]]] = []
    missed = {2}

    def run(self: Sanitizer, tool: str, indices: Sequence[int], limit_s: float) -> ToolRun:
        started.append((tool, tuple(indices)))
        if indices[0] < 2 or indices[0] in missed:
            return tool_run(tool, CLEAN, indices)
        fault = FAULTS[indices[0] - 2]
        return tool_run(tool, said(fault, fault.family), indices)

    monkeypatch.setattr(Sanitizer, "run", run)
    out = tmp_path / "products.json"
    options = Namespace(out=out, folder=tmp_path, budget=60.0, chunk=48, workers=2, seed=6)
    assert not script.check(options)
    assert len(started) == len(TOOLS) + len(FAULTS)
    assert f"MISSED: {FAULTS[0].name}" in capsys.readouterr().out
    record = json.loads(out.read_text())
    assert (record["complete"], record["clean"], record["all_faults_found"]) == (True, True, False)
    assert record["tools"]["racecheck"]["launches"] == 2
    missed.clear()
    started.clear()
    assert script.check(options)
    assert started == [(FAULTS[0].tool, (2,))]
    options.budget = 0.0
    options.chunk = 1
    assert not script.check(options)
    assert not json.loads(out.read_text())["complete"]
