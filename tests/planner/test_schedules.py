"""The schedules' arithmetic against enumeration: everything once, bounds kept, counts equal."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewave.errors import UsageError
from tilewave.planner.combining import most_pieces, moved_pieces, run_of
from tilewave.planner.schedules import (
    DATA_PARALLEL,
    INT64_MAX,
    STREAM_K_WALK,
    Decomposition,
    Raster,
    Schedule,
    ScheduleKind,
    WorkItem,
    behind_whole_waves,
    decompose,
    even_begin,
    even_owner,
    split_k,
    stream_k,
    stream_k_sixteen,
)

schedules = st.one_of(
    st.just(DATA_PARALLEL),
    st.just(STREAM_K_WALK),
    st.integers(2, 40).map(split_k),
    st.integers(2, 4).map(stream_k),
    st.integers(1, 16).map(stream_k_sixteen),
)


@st.composite
def bound_schedules(draw: st.DrawFn) -> tuple[Decomposition, Schedule, int, int]:
    """A small decomposition with its schedule, SM count and least slices a piece; odd corners likely."""
    schedule = draw(schedules)
    tiles = draw(st.one_of(st.integers(0, 8), st.integers(0, 200)))
    k = draw(st.one_of(st.integers(0, 5), st.integers(0, 3000)))
    depth = draw(st.sampled_from([1, 2, 8, 16, 32, 33]))
    sms = draw(st.one_of(st.integers(1, 8), st.integers(1, 150)))
    least = draw(st.integers(1, 5))
    cut = decompose(tiles, k, depth, schedule, sms, least)
    if schedule is STREAM_K_WALK and draw(st.booleans()):
        cut = behind_whole_waves(cut)
    return cut, schedule, sms, least


def by_tile(cut: Decomposition) -> dict[int, list[WorkItem]]:
    items = defaultdict(list)
    for _, item in cut.all_items():
        items[item.tile].append(item)
    return items


@given(bound_schedules())
@settings(max_examples=400, deadline=None)
def test_every_tile_and_k_exactly_once(bound: tuple[Decomposition, Schedule, int, int]) -> None:
    cut, *_ = bound
    items = by_tile(cut)
    assert sorted(items) == list(range(cut.tiles))
    for tile, pieces in items.items():
        pieces.sort(key=lambda item: item.piece)
        assert [item.piece for item in pieces] == list(range(len(pieces))), tile
        assert {item.pieces for item in pieces} == {len(pieces)}
        # End to end from 0 to k: no element is missing and none is done twice.
        assert [item.k_begin for item in pieces] == [0] + [item.k_end for item in pieces[:-1]]
        assert pieces[-1].k_end == cut.k
        for item in pieces:
            assert item.k_begin % cut.depth == 0
            assert item.k_begin < item.k_end or cut.k == 0


@given(bound_schedules())
@settings(max_examples=400, deadline=None)
def test_slots_and_tickets(bound: tuple[Decomposition, Schedule, int, int]) -> None:
    cut, *_ = bound
    slots: list[int] = []
    tickets: dict[int, int] = {}
    for tile, pieces in by_tile(cut).items():
        if len(pieces) == 1:
            assert (pieces[0].slot, pieces[0].ticket) == (-1, -1)
            continue
        ticket = {item.ticket for item in pieces}
        assert len(ticket) == 1, "all pieces of a tile share its ticket"
        assert ticket.isdisjoint(tickets), "no two tiles share a ticket"
        tickets[ticket.pop()] = tile
        for item in pieces:
            slots.append(item.slot)
            for other in pieces:
                assert cut.slot_of(other, item.piece) == item.slot
    assert len(set(slots)) == len(slots), "no two pieces share a slot"
    assert all(0 <= slot < cut.slots for slot in slots)
    assert all(0 <= ticket < cut.tickets for ticket in tickets)
    if not cut.walkers:
        assert len(slots) == cut.slots
        assert len(tickets) == cut.tickets


@given(bound_schedules())
@settings(max_examples=400, deadline=None)
def test_pieces_within_bounds(bound: tuple[Decomposition, Schedule, int, int]) -> None:
    cut, schedule, sms, least = bound
    slices = cut.slices
    for tile, pieces in by_tile(cut).items():
        lengths = [-(-(item.k_end - item.k_begin) // cut.depth) for item in pieces]
        match schedule.kind:
            case ScheduleKind.DATA_PARALLEL:
                assert len(pieces) == 1
            case ScheduleKind.STREAM_K_WALK:
                assert len(pieces) <= sms
                continue  # a walk breaks where it breaks: its pieces may be a single slice
            case ScheduleKind.SPLIT_K:
                assert len(pieces) == min(schedule.pieces, max(1, slices // least))
            case _:
                whole = tile < cut.tiles // sms * sms
                most = 4 if schedule.kind is ScheduleKind.STREAM_K else 16
                assert len(pieces) == (1 if whole else min(schedule.pieces, max(1, slices // least)))
                assert len(pieces) <= most
        if len(pieces) > 1:
            assert min(lengths) >= least
        assert max(lengths) - min(lengths) <= 1
        assert lengths == sorted(lengths, reverse=True)


@given(bound_schedules())
@settings(max_examples=400, deadline=None)
def test_busiest_sm_equals_a_count_over_all_blocks(bound: tuple[Decomposition, Schedule, int, int]) -> None:
    cut, _, sms, _ = bound
    slices = Counter[int]()
    written = Counter[int]()
    for block, item in cut.all_items():
        # An empty tile still costs its one empty slice.
        slices[block % sms] += max(1, -(-(item.k_end - item.k_begin) // cut.depth))
        written[block % sms] += item.pieces > 1
    assert cut.busiest_slices(sms) == max(slices.values(), default=0)

    cut_tiles = [pieces for pieces in by_tile(cut).values() if len(pieces) > 1]
    sums = -(-len(cut_tiles) // sms) * max(map(len, cut_tiles), default=0)
    moved = max(written.values(), default=0) + sums
    if cut.walkers:
        assert moved_pieces(cut, sms) >= moved
    else:
        assert moved_pieces(cut, sms) == moved


@given(bound_schedules(), st.integers(1, 20))
@settings(max_examples=200, deadline=None)
def test_what_two_rounds_move(bound: tuple[Decomposition, Schedule, int, int], alone: int) -> None:
    """Beyond ``alone`` pieces every run's last block draws it and writes one sum, then one draws these."""
    cut, _, sms, _ = bound
    most = max((len(pieces) for pieces in by_tile(cut).values()), default=1)
    assert most_pieces(cut) >= most if cut.walkers else most == (cut.pieces if cut.cut_tiles else 1)
    if cut.walkers or most <= alone:
        return
    runs = list(range(0, cut.pieces, run_of(cut.pieces)))
    assert len(runs) <= run_of(cut.pieces)
    first_round, second_round = Counter[int](), Counter[int]()
    for tile in range(cut.cut_tiles):
        for number in range(len(runs)):
            first_round[(tile * len(runs) + number) % sms] += run_of(cut.pieces) + 1
        second_round[tile % sms] += len(runs)
    written = -(-cut.cut_tiles * cut.pieces // sms)
    moved = written + max(first_round.values()) + max(second_round.values())
    assert moved_pieces(cut, sms, alone) == moved


def test_a_walk_behind_whole_waves() -> None:
    """Five waves and a bit: four are whole, the rest is shared; without two waves nothing is whole."""
    walk = decompose(5 * 132 + 60, 4096, 8, STREAM_K_WALK, 132)
    cut = behind_whole_waves(walk)
    assert (cut.whole_tiles, cut.walkers, cut.blocks) == (4 * 132, 132, 5 * 132)
    assert cut.busiest_slices(132) == walk.busiest_slices(132) == -(-(5 * 132 + 60) * 512 // 132)
    for tiles in (0, 1, 100, 132, 263):
        walk = decompose(tiles, 4096, 8, STREAM_K_WALK, 132)
        assert behind_whole_waves(walk) == walk
    plain = decompose(1000, 4096, 8, DATA_PARALLEL, 132)
    assert behind_whole_waves(replace(plain, whole_tiles=0)).whole_tiles == 0


@given(bound_schedules())
@settings(max_examples=200, deadline=None)
def test_walkers_share_evenly_and_in_order(bound: tuple[Decomposition, Schedule, int, int]) -> None:
    cut, _, sms, _ = bound
    cut = decompose(cut.tiles, cut.k, cut.depth, STREAM_K_WALK, sms)
    assert cut.blocks == min(sms, cut.tiles * cut.slices)
    runs = [
        sum(max(1, -(-(item.k_end - item.k_begin) // cut.depth)) for item in cut.items(block))
        for block in range(cut.blocks)
    ]
    assert sum(runs) == cut.tiles * cut.slices
    assert not runs or max(runs) - min(runs) <= 1
    tiles = [item.tile for _, item in cut.all_items()]
    assert tiles == sorted(tiles)


@given(st.integers(0, 500), st.integers(1, 60))
def test_even_parts(total: int, parts: int) -> None:
    begins = [even_begin(total, parts, part) for part in range(parts + 1)]
    assert begins[0] == 0
    assert begins[-1] == total
    assert begins == sorted(begins)
    for part in range(parts):
        for position in range(begins[part], begins[part + 1]):
            if parts <= total:
                assert even_owner(total, parts, position) == part


@given(
    schedules,
    st.integers(1, 2**40),
    st.integers(0, 2**40),
    st.sampled_from([8, 16, 32]),
    st.integers(1, 1000),
    st.randoms(use_true_random=False),
)
@settings(max_examples=300, deadline=None)
def test_huge_sizes(schedule: Schedule, tiles: int, k: int, depth: int, sms: int, random: object) -> None:
    """At sizes that no test can enumerate, blocks still agree with each other and stay within 64 bits."""
    if tiles * max(1, -(-k // depth)) > INT64_MAX:
        with pytest.raises(UsageError, match="2\\^63"):
            decompose(tiles, k, depth, schedule, sms)
        return
    cut = decompose(tiles, k, depth, schedule, sms)
    assert max(cut.blocks, cut.slots, cut.tickets) <= INT64_MAX
    for block in {0, cut.blocks - 1, cut.blocks // 2, min(cut.whole_tiles, cut.blocks - 1)}:
        for number, item in enumerate(cut.items(block)):
            assert 0 <= item.tile < tiles
            assert 0 <= item.k_begin <= item.k_end <= k
            assert item.slot < cut.slots
            assert item.ticket < cut.tickets
            if number > 3:
                break
    busiest = cut.busiest_slices(sms)
    assert busiest * sms >= tiles * cut.slices, "the busiest SM does at least the mean"


@pytest.mark.parametrize("schedule", [DATA_PARALLEL, STREAM_K_WALK, split_k(3), stream_k(2)])
@pytest.mark.parametrize("sms", [1, 48, 133])
def test_an_empty_product_of_k_zero_still_visits_every_tile(schedule: Schedule, sms: int) -> None:
    cut = decompose(50, 0, 16, schedule, sms)
    items = [item for _, item in cut.all_items()]
    assert sorted(item.tile for item in items) == list(range(50))
    assert {(item.k_begin, item.k_end, item.pieces) for item in items} == {(0, 0, 1)}
    assert cut.slots == 0 or schedule is STREAM_K_WALK


def test_the_articles_picture_of_six_sms() -> None:
    """Eight tiles on six SMs: six stay whole, the other two are cut in three, a piece an SM."""
    cut = decompose(8, 12 * 16, 16, stream_k(3), 6)
    assert [str(item) for _, item in cut.all_items()] == [
        *(f"tile {tile}, k 0..192 (whole)" for tile in range(6)),
        "tile 6, k 0..64 (piece 0 of 3, slot 0)",
        "tile 7, k 0..64 (piece 0 of 3, slot 3)",
        "tile 6, k 64..128 (piece 1 of 3, slot 1)",
        "tile 7, k 64..128 (piece 1 of 3, slot 4)",
        "tile 6, k 128..192 (piece 2 of 3, slot 2)",
        "tile 7, k 128..192 (piece 2 of 3, slot 5)",
    ]
    assert cut.busiest_slices(6) == 12 + 4


def test_a_walk_crosses_tiles() -> None:
    """Three tiles of four slices on two SMs: six slices each, the middle tile shared."""
    cut = decompose(3, 64, 16, STREAM_K_WALK, 2)
    assert list(cut.items(0)) == [
        WorkItem(0, 0, 64, 0, 1, -1, -1),
        WorkItem(1, 0, 32, 0, 2, 1, 0),
    ]
    assert list(cut.items(1)) == [
        WorkItem(1, 32, 64, 1, 2, 2, 0),
        WorkItem(2, 0, 64, 0, 1, -1, -1),
    ]
    assert (cut.slots, cut.tickets) == (4, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: stream_k(5), "stream_k takes 2 to 4 pieces, not 5"),
        (lambda: stream_k(1), "stream_k takes 2 to 4 pieces, not 1"),
        (lambda: stream_k_sixteen(17), "stream_k_sixteen takes 1 to 16 pieces, not 17"),
        (lambda: split_k(1), "split_k takes 2 to 1024 pieces, not 1"),
        (lambda: decompose(-1, 1, 1, DATA_PARALLEL, 1), "tiles must be at least 0, not -1"),
        (lambda: decompose(1, -1, 1, DATA_PARALLEL, 1), "k must be at least 0, not -1"),
        (lambda: decompose(1, 1, 0, DATA_PARALLEL, 1), "depth must be at least 1, not 0"),
        (lambda: decompose(1, 1, 1, DATA_PARALLEL, 0), "sms must be at least 1, not 0"),
        (lambda: list(decompose(3, 1, 1, DATA_PARALLEL, 1).items(3)), "block 3 is outside"),
        (lambda: Raster(1, 1, 0), "a band of at least 1"),
    ],
)
def test_bad_requests_say_what_is_wrong(make: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()  # type: ignore[operator]


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 20), st.integers(1, 3))
def test_a_raster_visits_every_place_once_band_by_band(
    rows: int, columns: int, band: int, batch: int
) -> None:
    raster = Raster(rows, columns, band)
    places = [raster.coordinates(tile) for tile in range(rows * columns * batch)]
    assert sorted(places) == [(b, r, c) for b in range(batch) for r in range(rows) for c in range(columns)]
    bands = [(b, r // band, c) for b, r, c in places]
    assert bands == sorted(bands), "a band is finished column by column before the next begins"
    if band == 1:
        assert places == sorted(places)
