"""``kernels/stream_k.cuh``, run in the emulator, against the planner's Python: item by item."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tilewave.compiler import Program, Source, compile_source
from tilewave.emulator import Memory, launch
from tilewave.planner.schedules import (
    DATA_PARALLEL,
    INT64_MAX,
    STREAM_K_WALK,
    Decomposition,
    Raster,
    behind_whole_waves,
    decompose,
    split_k,
    stream_k,
    stream_k_sixteen,
)

ENTRIES = ("dump_items", "dump_places", "dump_arrivals", "dump_asking_arrivals")
FIELDS = 9
MOST_ITEMS = 6


@cache
def program() -> Program:
    header = Source.packaged("kernels/stream_k.cuh")
    text = (Path(__file__).parent / "stream_k_dump.cu").read_text()
    source = Source.from_text("stream_k_dump.cu", text, headers={"stream_k.cuh": header.text})
    return compile_source(source, [*ENTRIES], "sm_90")


def run(
    entry: str,
    blocks: int,
    args: list[object],
    memory: Memory,
    threads: int = 1,
    resident: int | None = None,
) -> None:
    launch(
        program().ptx,
        program().kernels[entry].symbol,
        (blocks, 1, 1),
        (threads, 1, 1),
        args,
        memory,
        count=False,
        resident=resident,
    )


def device_items(cut: Decomposition, first: int, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    memory = Memory()
    items = memory.put(np.full((blocks, MOST_ITEMS, FIELDS), -7, np.int64), name="items")
    counts = memory.put(np.full(blocks, -7, np.int64), name="counts")
    integers = [cut.tiles, cut.k, cut.depth, cut.whole_tiles, cut.pieces, cut.walkers]
    run("dump_items", blocks, [items, counts, MOST_ITEMS, first, *integers], memory)
    return memory.get(items), memory.get(counts)


def host_items(cut: Decomposition, first: int, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    items = np.full((blocks, MOST_ITEMS, FIELDS), -7, np.int64)
    counts = np.zeros(blocks, np.int64)
    for block in range(blocks):
        for number, item in enumerate(cut.items(first + block)):
            counts[block] += 1
            if number < MOST_ITEMS:
                ends = [-1, -1] if item.pieces == 1 else [cut.slot_of(item, p) for p in (0, item.pieces - 1)]
                fields = (
                    item.tile,
                    item.k_begin,
                    item.k_end,
                    item.piece,
                    item.pieces,
                    item.slot,
                    item.ticket,
                )
                items[block, number] = [*fields, *ends]
    return items, counts


def random_schedule(rng: np.random.Generator) -> object:
    makers = (
        lambda: DATA_PARALLEL,
        lambda: STREAM_K_WALK,
        lambda: split_k(int(rng.integers(2, 12))),
        lambda: stream_k(int(rng.integers(2, 5))),
        lambda: stream_k_sixteen(int(rng.integers(1, 17))),
    )
    return makers[rng.integers(len(makers))]()


def test_small_products_item_by_item(rng: np.random.Generator) -> None:
    """All blocks: fewer tiles than SMs, one SM, K of 0, K shorter than the pieces, and the ordinary."""
    for _ in range(60):
        tiles, sms = int(rng.integers(1, 60)), int(rng.choice([1, 2, 7, 48, 132]))
        k = int(rng.choice([0, 1, rng.integers(2, 100), rng.integers(100, 3000)]))
        schedule = random_schedule(rng)
        cut = decompose(tiles, k, int(rng.choice([1, 8, 16, 33])), schedule, sms, int(rng.integers(1, 4)))
        if rng.integers(2):
            cut = behind_whole_waves(cut)  # changes nothing but walks
        for mine, theirs in zip(
            host_items(cut, 0, cut.blocks), device_items(cut, 0, cut.blocks), strict=True
        ):
            np.testing.assert_array_equal(theirs, mine, err_msg=f"{cut} of {schedule}")


def test_huge_products_beyond_32_bits(rng: np.random.Generator) -> None:
    """Some blocks of products whose tiles, slices and depths need all of 63 bits."""
    for _ in range(40):
        tile_bits = int(rng.integers(1, 48))
        tiles = int(rng.integers(1, 2**tile_bits, endpoint=True))
        depth = int(rng.choice([8, 16, 32]))
        k = int(rng.integers(0, min(INT64_MAX // tiles, 2**62)))
        schedule = random_schedule(rng)
        cut = decompose(tiles, k, depth, schedule, int(rng.integers(1, 1000)))
        middle = min(max(0, cut.whole_tiles - 2), cut.blocks - 1)
        for first in {0, middle, max(0, cut.blocks - 4)}:
            blocks = min(4, cut.blocks - first)
            if cut.walkers and tiles > 10**5:
                continue  # a walker would list too many items for a test
            for mine, theirs in zip(
                host_items(cut, first, blocks), device_items(cut, first, blocks), strict=True
            ):
                np.testing.assert_array_equal(theirs, mine, err_msg=f"{cut} of {schedule}")


@pytest.mark.parametrize("band", [1, 2, 5, 8])
def test_places(band: int, rng: np.random.Generator) -> None:
    rows, columns = (int(size) for size in rng.integers(1, 20, 2))
    for rows_n, columns_n, first in ((rows, columns, 0), (2**20 + rows, 2**19 + columns, 3 * 2**38 + rows)):
        raster = Raster(rows_n, columns_n, band)
        blocks = min(3 * rows * columns, 200)
        memory = Memory()
        places = memory.put(np.full((blocks, 3), -7, np.int64), name="places")
        run("dump_places", blocks, [places, first, rows_n, columns_n, band], memory)
        expected = [raster.coordinates(first + tile) for tile in range(blocks)]
        np.testing.assert_array_equal(memory.get(places), expected)


@pytest.mark.parametrize("pieces", [1, 2, 3, 16])
def test_one_block_arrives_last_and_the_ticket_wraps(pieces: int) -> None:
    memory = Memory()
    tickets = memory.put(np.zeros(1, np.uint32), name="tickets")
    for _ in range(2):  # the second launch finds the counter as the first did
        arrived = memory.put(np.full(pieces, -7, np.int32), name="arrived")
        run("dump_arrivals", pieces, [tickets, arrived, pieces], memory, threads=64)
        assert sorted(memory.get(arrived)) == [0] * (pieces - 1) + [1]
        assert memory.get(tickets)[0] == 0


@pytest.mark.parametrize("pieces", [1, 2, 3, 16])
@pytest.mark.parametrize("resident", [1, 16])
def test_a_block_is_told_whether_the_others_have_arrived(pieces: int, resident: int) -> None:
    """One after the other the last need not arrive; all at once, it may still be the last that does."""
    memory = Memory()
    tickets = memory.put(np.zeros(1, np.uint32), name="tickets")
    for _ in range(2):
        arrived = memory.put(np.full(pieces, -7, np.int32), name="arrived")
        arguments = [tickets, arrived, pieces]
        run("dump_asking_arrivals", pieces, arguments, memory, threads=64, resident=resident)
        last = max(memory.get(arrived))
        assert last in ((2,) if resident == 1 else (1, 2))
        assert sorted(memory.get(arrived)) == [0] * (pieces - 1) + [last]
        assert memory.get(tickets)[0] == 0
