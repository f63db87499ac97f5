"""Counters of a launch of which only some blocks run, against the same launch with every block run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from rung_helpers import GPU, program

from tilewave.emulator import Memory, launch
from tilewave.lab import emulate
from tilewave.lab.launches import RungLaunch, launch_of
from tilewave.lab.registry import get_rung
from tilewave.lab.walk_counts import count_walk, shares_of
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


@pytest.mark.parametrize("number", [6, pytest.param(17, marks=pytest.mark.long)])
def test_plain_rungs(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_sampled_is_whole(number, 525, 48, monkeypatch)


def random_walk(rng: np.random.Generator) -> tuple[RungLaunch, tuple[int, int]]:
    """A walk over up to 7 x 7 tiles of 1 to 600 slices, by any number of blocks, and its M and N."""
    tiles_m, tiles_n = (int(count) for count in rng.integers(1, 8, 2))
    k = int(rng.integers(1, rng.choice([2, 5, 40, 600]) * TILE.bk))
    cut = decompose(tiles_m * tiles_n, k, TILE.bk, STREAM_K_WALK, int(rng.integers(1, 200)))
    walk = RungLaunch("walk", (cut.blocks, 1, 1), (256, 1, 1), cut, Raster(tiles_m, tiles_n))
    ragged = (int(rng.integers(0, extent)) for extent in (TILE.bm, TILE.bn))
    m, n = (
        count * extent - cut_off
        for count, extent, cut_off in zip((tiles_m, tiles_n), (TILE.bm, TILE.bn), ragged, strict=True)
    )
    return walk, (m, n)


TILE = get_rung(19).tile


@pytest.mark.parametrize("round_", range(60))
def test_any_walk_is_determined_by_short_ones(round_: int, rng: np.random.Generator) -> None:
    """With any price for each share, the prices of a few blocks give that of the whole launch."""
    walk, (m, n) = random_walk(rng)
    assert walk.cut is not None
    assert walk.raster is not None
    prices = {
        share: float(rng.integers(0, 1000)) for share in shares_of(walk.cut, walk.raster, range(walk.blocks))
    }
    asked = []

    def count(
        one: RungLaunch, short_m: int, short_n: int, walker: int, tickets: dict[int, int]
    ) -> dict[str, float]:
        assert one.cut is not None
        assert one.raster is not None
        assert (-(-short_m // TILE.bm), -(-short_n // TILE.bn)) == (one.raster.tiles_m, one.raster.tiles_n)
        assert (short_m - m) % TILE.bm == (short_n - n) % TILE.bn == 0  # edges are as ragged as they were
        pieces = {item.ticket: item.pieces for item in one.cut.items(walker)}
        assert all(ticket == pieces[place] - 1 > 0 for place, ticket in tickets.items())
        asked.append(walker)
        shares = shares_of(one.cut, one.raster, [walker])
        return {"price": sum(prices[share] * number for share, number in shares.items())}

    found = count_walk(walk, (m, n), TILE, count)
    whole = shares_of(walk.cut, walk.raster, range(walk.blocks))
    assert found.counters["price"] == pytest.approx(sum(prices[s] * number for s, number in whole.items()))
    assert found.blocks_run == len(asked) <= len(whole)
