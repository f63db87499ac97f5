"""Samples of groups and of fp16x3: they reach every kernel that no family has, and are right."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tilewave.runtime.driver
import tilewave.runtime.fp16x3
import tilewave.runtime.group
from tilewave.device import get_spec
from tilewave.emulator import Memory
from tilewave.emulator.tensor_maps import encode_for_emulator
from tilewave.kernels import fp16x3
from tilewave.kernels.arguments import Pointers
from tilewave.kernels.families import grouped
from tilewave.kernels.group_table import table_writer
from tilewave.lab.product_samples import Dealing
from tilewave.lab.product_sanitizers import Launch, Launches, prepare_products, run_products
from tilewave.lab.whole_samples import WholeSample, emulate_whole, launch_whole, make_whole, whole_names
from tilewave.planner.gemm.group import GroupPlan
from tilewave.runtime.emulated import run_group_plan
from tilewave.runtime.fp16x3_emulated import run_step
from tilewave.runtime.fp16x3_steps import steps

NAMES = whole_names(get_spec("H200"))
QUICK = ("grouped_16x16x8, cut", "grouped_32x32x16", "group_table_508", "grouped_128x16x16, cut")


def kernels_of(sample: WholeSample) -> set[str]:
    """The names of all kernels that a sample launches."""
    plan = sample.plan
    if isinstance(plan, GroupPlan):
        writer = {table_writer(plan.table.nbytes).name} if plan.table_launches else set()
        return {plan.instance.name} | writer
    launches = steps(plan, Pointers(16, 16, 16), 1.0, 0.0, memory=1 << 20, encode=lambda one: bytes(128))
    return {step.instance.name for step in launches}


def test_every_kernel_that_no_family_has_is_launched(rng: np.random.Generator) -> None:
    seed = int(rng.integers(1 << 30))
    launched: set[str] = set()
    for name in NAMES:
        sample = make_whole(name, seed)
        assert kernels_of(sample) & {name.partition(",")[0].partition(" ")[0]}
        launched |= kernels_of(sample)
        if isinstance(sample.plan, GroupPlan):
            assert (max(sample.plan.pieces) > 1) == name.endswith(", cut")
        assert sample.plan.blocks > 1 or name == fp16x3.SCAN.name
    wanted = (*grouped.instances(), *grouped.TABLE_WRITERS, *fp16x3.every_fp16x3_instance())
    assert launched == {one.name for one in wanted}


def test_other_gpus_have_no_fp16x3() -> None:
    assert set(whole_names(get_spec("A100"))) == {one for one in NAMES if not one.startswith("fp16x3")}


def test_a_sample_depends_on_its_seed_alone() -> None:
    one, same, other = (make_whole(QUICK[0], seed) for seed in (5, 5, 6))
    assert one.plan == same.plan
    first, again, changed = (sample.products[0].operands["a"].storage for sample in (one, same, other))
    np.testing.assert_array_equal(first, again)
    assert first.shape != changed.shape or not np.array_equal(first, changed, equal_nan=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", QUICK)
def test_samples_are_right_and_what_is_wrong_is_seen(name: str, rng: np.random.Generator) -> None:
    sample = make_whole(name, int(rng.integers(1 << 30)))
    assert 0 < emulate_whole(sample, detect_races=True) <= 1
    product = sample.products[int(rng.integers(len(sample.products)))]
    outs = {given: product.operands[given].view for given in product.outputs}
    outs["out"].flat[0] = np.nan
    assert product.error_in_bounds(outs["out"], outs.get("preactivation")) > 1


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NAMES)
def test_every_sample_is_right_in_the_emulator(name: str, rng: np.random.Generator) -> None:
    seed = int(rng.integers(1 << 30))
    assert 0 < emulate_whole(make_whole(name, seed), detect_races=True, order=seed) <= 1


class FakeArray:
    """Memory of the emulator in place of a GPU's."""

    memory = Memory()

    def __init__(self, array: np.ndarray) -> None:
        self._buffer = FakeArray.memory.put(array)
        self.address, self.nbytes = self._buffer.address, self._buffer.nbytes

    @staticmethod
    def from_numpy(device: object, array: np.ndarray) -> FakeArray:
        return FakeArray(array)

    @staticmethod
    def empty(device: object, shape: tuple[int, ...]) -> FakeArray:
        return FakeArray(np.full(shape, np.nan, np.float32))

    def poison(self) -> None:
        pass

    def to_numpy(self) -> np.ndarray:
        return FakeArray.memory.get(self._buffer)


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The library's launches run in the emulator; what was launched."""
    launched: list[str] = []
    FakeArray.memory = Memory()

    def launch_group(plan: Any, operands: Any, **given: Any) -> None:
        launched.append(plan.instance.name)
        assert given["tickets"]
        assert given["memory"] % 16 == 0
        run_group_plan(plan, operands, FakeArray.memory, count=False)

    def launch_fp16x3(plan: Any, pointers: Any, alpha: float, beta: float, **given: Any) -> None:
        launched.append(plan.instance.name)
        address, nbytes = given["workspace"]
        assert nbytes >= plan.workspace_bytes
        given = {"memory": address, "encode": encode_for_emulator}
        for step in steps(plan, pointers, alpha, beta, **given):
            run_step(step, FakeArray.memory, count=False)

    monkeypatch.setattr(tilewave.runtime.driver, "DeviceArray", FakeArray)
    monkeypatch.setattr(tilewave.runtime.driver, "Device", lambda: SimpleNamespace(ordinal=0))
    stream = SimpleNamespace(handle=7, synchronize=lambda: None)
    monkeypatch.setattr(tilewave.runtime.driver, "Stream", lambda device: stream)
    monkeypatch.setattr(tilewave.runtime.group, "launch_group", launch_group)
    monkeypatch.setattr(tilewave.runtime.fp16x3, "launch_fp16x3", launch_fp16x3)
    return launched


@pytest.mark.parametrize("name", [QUICK[0], pytest.param(f"{fp16x3.SMALL.name} NN", marks=pytest.mark.long)])
def test_what_a_tool_runs_is_right(name: str, fake_gpu: list[str], rng: np.random.Generator) -> None:
    device, stream = SimpleNamespace(ordinal=0), SimpleNamespace(handle=7, synchronize=lambda: None)
    sample = make_whole(name, int(rng.integers(1 << 30)))
    assert 0 < launch_whole(device, stream, sample, poison=True) <= 1
    assert fake_gpu == [sample.plan.instance.name]


def test_they_are_listed_first_and_run_by_name(tmp_path: Path, fake_gpu: list[str]) -> None:
    (tile,) = [one for one in grouped.instances() if one.name == "grouped_16x16x8"]
    names = (tile.name, QUICK[0])
    listed = prepare_products(tmp_path / "cubins", "sm_90", 7, [], jobs=1, wholes=names)
    first = [Launch(name, Dealing.DATA_PARALLEL, "", "", whole=True) for name in names]
    assert [listed.launches[index] for index in listed.sound()] == first
    assert str(listed.launches[0]) == tile.name
    listed.save(tmp_path)
    assert Launches.load(tmp_path) == listed
    run_products(tmp_path, [1, 0], tmp_path / "results", poison=True)
    lines = [json.loads(line) for line in (tmp_path / "results").read_text().splitlines()]
    assert [line["index"] for line in lines] == [1, 0]
    assert all(0 < line["error_in_bounds"] <= 1 for line in lines)
    assert fake_gpu == [tile.name, tile.name]
