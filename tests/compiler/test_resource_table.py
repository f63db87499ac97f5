"""The committed table of resources: complete, true of this compiler, and a change of it is shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from tilewave.compiler import ARCHITECTURES, compiler_version
from tilewave.lab import resource_table
from tilewave.lab.registry import load_rungs

ROOT = Path(__file__).parents[2]
RECORDED = resource_table.loads((ROOT / "benchmarks" / "results" / "resources.json").read_text())
COMPILERS = ("NVRTC 13.0.88", "NVRTC 13.5.37")


def check(architectures: Sequence[str]) -> None:
    if compiler_version() not in COMPILERS:
        pytest.skip(f"the table holds {' and '.join(COMPILERS)}, this is {compiler_version()}")
    changed = resource_table.changes(RECORDED, list(resource_table.measure(architectures=architectures)))
    assert not changed, f"resources changed; if that is meant, run `make resources`:\n{changed}"


def test_every_rung_on_the_articles_gpu() -> None:
    check(["sm_121"])


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_rung_on_every_architecture() -> None:
    check(ARCHITECTURES)


def test_the_table_is_complete() -> None:
    """Every kernel of every rung, on every architecture, by both compilers; nothing else."""
    kernels = [entry for rung in load_rungs() for entry in rung.entries]
    wanted = {(c, k, a) for c in COMPILERS for k in kernels for a in ARCHITECTURES}
    assert {(row.compiler, row.kernel, row.arch) for row in RECORDED} == wanted
    assert len(RECORDED) == len(wanted)


def test_files_are_what_the_command_writes() -> None:
    assert (ROOT / "benchmarks" / "results" / "resources.json").read_text() == resource_table.dump(RECORDED)
    assert (ROOT / "docs" / "resources.md").read_text() == resource_table.markdown(RECORDED)


def test_a_change_is_shown() -> None:
    course = next(row for row in RECORDED if row.kernel == "sgemm_05_course" and row.arch == "sm_121")
    assert resource_table.changes(RECORDED, [course]) == ""
    other = dataclasses.replace(course, registers=course.registers - 1)
    diff = resource_table.changes(RECORDED, [other])
    assert f'-{{"compiler": "{course.compiler}"' in diff
    assert f'"registers": {course.registers},' in diff
    assert f'"registers": {other.registers},' in diff
    unknown = dataclasses.replace(course, kernel="sgemm_99_new")
    assert '+{"compiler"' in resource_table.changes(RECORDED, [unknown])


def test_the_articles_registers() -> None:
    """168 registers and one block; 128, two blocks and spills when two are asked for (NVRTC 13.5.37)."""
    rows = {row.kernel: row for row in RECORDED if (row.compiler, row.arch) == (COMPILERS[1], "sm_121")}
    course, capped = rows["sgemm_05_course"], rows["sgemm_06_two_blocks"]
    assert (course.registers, course.blocks_per_sm, course.limiting) == (168, 1, "registers")
    assert (capped.registers, capped.blocks_per_sm) == (128, 2)
    assert course.spill_store_bytes == 0
    assert capped.spill_store_bytes > 0
