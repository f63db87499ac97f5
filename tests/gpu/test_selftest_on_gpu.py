"""`tilewave selftest` on a real GPU: it passes, and it finds faults that only a GPU can show."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tilewave.cli import app
from tilewave.compiler import Source
from tilewave.device import DeviceSpec
from tilewave.kernels.ship import every_instance
from tilewave.lab.faults import Edit
from tilewave.lab.ladder import Silent
from tilewave.lab.product_samples import Dealing, make_sample
from tilewave.lab.registry import Rung, get_rung
from tilewave.lab.selftest import GpuRunner, run_selftest
from tilewave.lab.selftest_library import GpuSamples, run_library
from tilewave.lab.selftest_loops import candidates, run_loops
from tilewave.lab.workers import Budget
from tilewave.planner.schedules import DATA_PARALLEL, Raster, decompose
from tilewave.runtime.driver import Device

pytestmark = pytest.mark.gpu


def broken(number: int, edit: Edit) -> Rung:
    rung = get_rung(number)
    text = edit.apply(rung.source().text, rung.file)

    class Broken(Rung):
        def source(self) -> Source:
            return Source.from_text(self.file, text)

    return Broken(**{field.name: getattr(rung, field.name) for field in fields(Rung)})


def test_some_rungs_pass(device: Device, spec: DeviceSpec, tmp_path: Path) -> None:
    path = tmp_path / "selftest.json"
    result = CliRunner().invoke(app, ["selftest", "--rungs", "1,7,13", "--json", str(path)])
    assert result.exit_code == 0, result.output
    data = json.loads(path.read_text())
    assert (data["emulated"], data["device"], data["compared_bits"]) == (False, spec.name, [1, 7, 13])
    assert data["environment"]["gpu"] == device.name
    assert data["not_run"] == []


def test_new_loops_pass(device: Device, spec: DeviceSpec, rng: np.random.Generator) -> None:
    seed = int(rng.integers(2**32))
    outcomes, left_out, notes = run_loops(spec, seed=seed, gpu=device, budget=Budget(None), progress=Silent())
    assert not left_out
    assert not [outcome for outcome in outcomes if outcome.findings], f"seed {seed}"
    assert len(outcomes) + len(notes) == len(candidates(spec)) or not outcomes


def test_the_library_passes(device: Device, spec: DeviceSpec, rng: np.random.Generator) -> None:
    seed = int(rng.integers(2**32))
    outcomes, left_out = run_library(
        spec, seed=seed, gpu=GpuSamples(device), budget=Budget(None), jobs=2, progress=Silent()
    )
    assert not left_out
    assert not [outcome for outcome in outcomes if outcome.findings], f"seed {seed}"
    assert all(outcome.compared_bits for outcome in outcomes)


def test_damage_by_a_kernel_of_the_library_is_found(
    device: Device,
) -> None:
    """A kernel is told that out has more rows than it has."""
    instance = next(one for one in every_instance() if one.family == "elementwise")
    sample = make_sample(instance, Dealing.DATA_PARALLEL, 6)
    taller = replace(sample.plan.problem, m=sample.plan.problem.m + instance.bm)
    rows, columns, groups = instance.tiles(taller)
    cut = decompose(rows * columns * groups, 0, instance.bk, DATA_PARALLEL, 3)
    plan = replace(sample.plan, problem=taller, cut=cut, raster=Raster(rows, columns))
    _, damage = GpuSamples(device).results(replace(sample, plan=plan))
    assert "wrote outside out" in damage


@pytest.mark.parametrize(
    ("number", "edit", "what"),
    [
        (3, Edit("k < TILE; ++k) sum", "k < TILE - 1; ++k) sum"), "wrong value"),
        (5, Edit("if (row < M)", "if (row <= M)"), "wrote outside C"),
        (3, Edit("k0 + ty < K &&", "k0 + ty <= K &&"), "wrong value"),  # NaN from the guard zone, times 0
    ],
    ids=["last_step", "one_row_too_many", "one_read_too_many"],
)
def test_faults_are_found(
    number: int, edit: Edit, what: str, device: Device, spec: DeviceSpec, rng: np.random.Generator
) -> None:
    rung = broken(number, edit)
    result = run_selftest([rung], spec, seed=int(rng.integers(2**32)), gpu=GpuRunner(device, spec))
    assert any(finding.what == what for outcome in result.failures for finding in outcome.findings)
