"""Counters of a launch of which only some blocks run, against the same launch with every block run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from rung_helpers import GPU, program

from tilewave.emulator import Memory, launch
from tilewave.lab import emulate
from tilewave.lab.launches import launch_of
from tilewave.lab.registry import get_rung
from tilewave.lab.walk_counts import shares_of
from tilewave.planner import STREAM_K_WALK, Raster, decompose

ARCH = "sm_121"
# Passes and conflicts of copies depend on where rows begin; a walk also divides 64-bit numbers, in a few
# instructions more or less by their size.
TOLERANCES = {"copy_passes": 0.05, "copy_conflicts": 0.05, "warp_instructions": 3e-4}


def assert_sampled_is_whole(number: int, size: int, sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulate, "FULL_THREADS", 0)
    monkeypatch.setattr(emulate, "FULL_SLICES", 0)
    rung, spec = get_rung(number), replace(GPU, sms=sms)
    built = program(rung, ARCH)
    planned = launch_of(rung, size, size, size, spec)
    kernel = built.kernels[planned.entry]
    sampled = emulate.count(rung, built, kernel, size, spec)
    memory = Memory()
    matrix = np.zeros((size, size), np.float32)
    arguments = [memory.put(matrix), memory.put(matrix), memory.empty((size, size), np.float32)]
    arguments += [size, size, size, *emulate.workspace_arguments(planned, memory)]
    whole = launch(
        built.ptx, kernel.symbol, planned.grid, planned.block, arguments, memory, values=False
    ).counters
    assert sampled.blocks_total == planned.blocks
    for name, value in emulate._flat(whole).items():
        tolerance = TOLERANCES.get(name, 0) if name != "warp_instructions" or number == 19 else 0
        assert getattr(sampled, name) == pytest.approx(value, rel=tolerance), name


# 528 is a whole number of slices but not of tiles, 525 is ragged in everything; 512 in nothing.
@pytest.mark.parametrize(("size", "sms"), [(512, 132), (528, 7), (525, 48)])
def test_walkers(size: int, sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_sampled_is_whole(19, size, sms, monkeypatch)


@pytest.mark.parametrize(
    ("number", "sms"),
    [(18, 132), *(pytest.param(*case, marks=pytest.mark.long) for case in ((20, 10), (21, 7), (23, 10)))],
)
def test_cut_tiles(number: int, sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_sampled_is_whole(number, 525, sms, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("sms", [30, 48, 132])
@pytest.mark.parametrize("size", [896, 1025, 1100])
@pytest.mark.parametrize("number", [18, 19, 20, 21, 22, 23])
def test_larger_products(number: int, size: int, sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_sampled_is_whole(number, size, sms, monkeypatch)


@pytest.mark.parametrize(
    ("size", "sms"), [(1024, 132), (1025, 48), pytest.param(4096, 132, marks=pytest.mark.long)]
)
def test_walkers_multiply_no_more_than_there_is(size: int, sms: int) -> None:
    rung = get_rung(19)
    spec = replace(GPU, sms=sms)
    built = program(rung, ARCH)
    kernel = built.kernels[launch_of(rung, size, size, size, spec).entry]
    counted = emulate.count(rung, built, kernel, size, spec)
    tile = rung.tile
    tiles = -(-size // tile.bm) * -(-size // tile.bn)
    assert counted.thread_fma == tiles * tile.bm * tile.bn * -(-size // tile.bk) * tile.bk
    assert counted.blocks_run < sms


def test_shares_add_up_to_the_decomposition() -> None:
    raster = Raster(3, 5)
    cut = decompose(15, 100, 16, STREAM_K_WALK, 11)
    shares = shares_of(cut, raster, range(cut.walkers))
    by_name = {name: sum(n for share, n in shares.items() if share[0] == name) for name, *_ in shares}
    items = [item for _, item in cut.all_items()]
    assert by_name["blocks"] == 11
    assert by_name["slices"] == 15 * 7
    assert by_name["items"] == len(items)
    assert by_name["written"] == 15
    assert by_name["stored"] == by_name["summed"] == sum(item.pieces > 1 for item in items)
    assert shares["written", True, True] == 1
    assert shares["written", False, False] == 2 * 4
